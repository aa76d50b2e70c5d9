"""The streamable HTTP transport. This module needs httpx2, so it is imported only for a server with a URL.

After a failed HTTP request the SDK's own error does not say what failed. So the HTTP client keeps the original error,
and gives the SDK a JSON-RPC error with a ticket. With the ticket, `Faults` finds the original error again.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from secrets import token_hex
from typing import TYPE_CHECKING, Any

import httpx2

from perdure.agents.mcp.errors import MAX_MESSAGE_BYTES, BadAnswer
from perdure.agents.mcp.secrets import redacted
from perdure.core.failures import MAX_MESSAGE_CHARS, clean
from perdure.errors import NotSent

if TYPE_CHECKING:
    from mcp.client import Transport
    from mcp.client._transport import TransportStreams


FAULT = -32000
_TICKET = "perdure/ticket"
_CONNECT_S = 10.0
_CLOSE_S = 3.0
_SHOWN_CHARS = 200  # how much of a response's body an error message shows
_MAX_KEPT = 1_000  # a limit is needed because the tickets of some errors are never redeemed


class SessionOver(NotSent):
    """The server no longer knows the session. The server did nothing for this request."""


class Faults:
    """Original errors by ticket. A ticket is a random secret of this process, so no server can forge a ticket."""

    def __init__(self) -> None:
        self._kept: dict[str, Exception] = {}

    def keep(self, error: Exception) -> dict[str, str]:
        """Keep the error. Returns the data field for the JSON-RPC error that replaces the original error."""
        ticket = token_hex(16)
        self._kept[ticket] = error
        if len(self._kept) > _MAX_KEPT:
            del self._kept[next(iter(self._kept))]
        return {_TICKET: ticket}

    def redeem(self, data: Any) -> Exception | None:
        """The original error for the ticket in the data. None if there is no ticket or it is unknown."""
        ticket = data.get(_TICKET) if isinstance(data, dict) else None
        return self._kept.pop(ticket, None) if isinstance(ticket, str) else None


class FaultKeeping(httpx2.AsyncClient):
    """An HTTP client for one MCP server. The answer to a failed request is a JSON-RPC error with a ticket."""

    def __init__(self, headers: Mapping[str, str], timeout_s: float, faults: Faults, secrets: Sequence[str]) -> None:
        # This time-out is longer than the attempt's: it ends a request whose attempt has already stopped waiting.
        super().__init__(headers=dict(headers), timeout=httpx2.Timeout(_CONNECT_S, read=timeout_s + 60.0, pool=timeout_s))
        self._faults = faults
        self._secrets = secrets

    async def send(self, request: httpx2.Request, **options: Any) -> httpx2.Response:
        if request.method == "DELETE":  # DELETE ends a session; its answer is not worth a long wait
            request.extensions = {**request.extensions, "timeout": dict.fromkeys(("connect", "read", "write", "pool"), _CLOSE_S)}
        ident = await _request_id(request)
        try:
            response = await super().send(request, **options)
            return response if ident is None else await self._checked(request, response, ident)
        except httpx2.RequestError as error:
            if request.method != "POST":
                raise
            if ident is None:  # a notification was lost; if the connection is broken, the next request fails
                return httpx2.Response(202, request=request)
            return self._fault(request, ident, error)

    async def _checked(self, request: httpx2.Request, response: httpx2.Response, ident: Any) -> httpx2.Response:
        """The response, if the SDK handles such a response correctly.

        If the SDK does not, the result is a JSON-RPC error with a ticket for the failure that the response means.
        """
        status, kind = response.status_code, response.headers.get("content-type", "").partition(";")[0].strip().lower()
        if 300 <= status < 400 or (status == 200 and kind == "text/event-stream"):
            return response
        body = await _whole(response)
        if body is None:
            return self._fault(request, ident, BadAnswer(f"its answer is longer than {MAX_MESSAGE_BYTES:,} bytes"))
        if status == 404 and "mcp-session-id" in request.headers:
            return self._fault(request, ident, SessionOver("the server has forgotten the session: it was restarted, most likely"))
        if status >= 400 and (status == 429 or not _is_error(body)):
            said = redacted(body.decode("utf-8", "replace"), self._secrets)[:_SHOWN_CHARS]
            words = clean(f"HTTP {status}: {said}", MAX_MESSAGE_CHARS)
            return self._fault(request, ident, httpx2.HTTPStatusError(words, request=request, response=response))
        if status < 400 and (status == 202 or kind != "application/json"):
            return self._fault(request, ident, BadAnswer(f"it answered with HTTP {status} and {kind or 'nothing'}, not with a result"))
        kept = {name: response.headers[name] for name in ("content-type", "mcp-session-id") if name in response.headers}
        return httpx2.Response(status, headers=kept, content=body, request=request)

    def _fault(self, request: httpx2.Request, ident: Any, error: Exception) -> httpx2.Response:
        # Remove secrets also from the errors of the HTTP library: its error about an invalid header shows the value.
        error.args = tuple(redacted(word, self._secrets) if isinstance(word, str) else word for word in error.args)
        said = {"code": FAULT, "message": type(error).__name__, "data": self._faults.keep(error)}
        return httpx2.Response(400, json={"jsonrpc": "2.0", "id": ident, "error": said}, request=request)


def streamable(url: str, headers: Mapping[str, str], timeout_s: float, faults: Faults, secrets: Sequence[str]) -> Transport:
    """The transport for this URL. It can be entered once. On exit its session and its connections are closed."""
    return _streamable(url, FaultKeeping(headers, timeout_s, faults, secrets))


@asynccontextmanager
async def _streamable(url: str, client: FaultKeeping) -> AsyncGenerator[TransportStreams]:
    from mcp.client.streamable_http import streamable_http_client

    async with (
        client as http,
        streamable_http_client(url, http_client=http, max_sse_event_size=MAX_MESSAGE_BYTES) as streams,
    ):
        yield streams


def loses_session(error: BaseException) -> bool:
    """Does the error mean that the server may have lost the session?"""
    return isinstance(error, (SessionOver, httpx2.RequestError))


async def _request_id(request: httpx2.Request) -> Any:
    """The id of a JSON-RPC request. None for notifications, for answers and for HTTP requests other than POST."""
    if request.method != "POST":
        return None
    message = json.loads(await request.aread())  # aread: after a redirect, the body of the request is only a stream
    return message.get("id") if "method" in message else None


async def _whole(response: httpx2.Response) -> bytes | None:
    body = bytearray()
    try:
        async for piece in response.aiter_bytes():
            body += piece
            if len(body) > MAX_MESSAGE_BYTES:
                return None
    finally:
        await response.aclose()
    return bytes(body)


def _is_error(body: bytes) -> bool:
    try:
        message = json.loads(body)
    except ValueError:
        return False
    return isinstance(message, dict) and isinstance(message.get("error"), dict) and isinstance(message["error"].get("code"), int)
