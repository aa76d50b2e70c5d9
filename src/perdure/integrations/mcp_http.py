"""A streamable HTTP MCP server: an HTTP client that keeps what went wrong with each request.

Left alone, the SDK makes one dead request the end of the whole session, tells every status above 400 alike, and calls a request that
never left the process and one that was cut off by the same name. Which of them it was decides whether a call may be made again, so each
failure is kept here, and a JSON-RPC error with a ticket for it is what the SDK gets to see: the caller redeems the ticket.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from secrets import token_hex
from typing import TYPE_CHECKING, Any

import httpx2

from perdure.core.failures import MAX_MESSAGE_CHARS, clean
from perdure.errors import NotSent
from perdure.integrations.mcp_errors import MAX_MESSAGE_BYTES, BadAnswer
from perdure.integrations.mcp_secrets import redacted

if TYPE_CHECKING:
    from mcp.client import Transport
    from mcp.client._transport import TransportStreams

FAULT = -32000
_TICKET = "perdure/ticket"
_CONNECT_S = 10.0
_CLOSE_S = 3.0
_SHOWN_CHARS = 200  # of a body, in an error
_MAX_KEPT = 1_000  # a probe that failed is asked about by nobody


class SessionOver(NotSent):
    """The server does not know our session any more, and has done nothing for this request."""


class Faults:
    """What went wrong, by ticket. A ticket is a secret of this process: no server can make one up."""

    def __init__(self) -> None:
        self._kept: dict[str, Exception] = {}

    def keep(self, error: Exception) -> dict[str, str]:
        """The data of a JSON-RPC error that stands for this one."""
        ticket = token_hex(16)
        self._kept[ticket] = error
        if len(self._kept) > _MAX_KEPT:
            del self._kept[next(iter(self._kept))]
        return {_TICKET: ticket}

    def redeem(self, data: Any) -> Exception | None:
        """The failure that a ticket stands for."""
        ticket = data.get(_TICKET) if isinstance(data, dict) else None
        return self._kept.pop(ticket, None) if isinstance(ticket, str) else None


class FaultKeeping(httpx2.AsyncClient):
    """An HTTP client for one MCP server, which answers for everything that it could not get an answer for."""

    def __init__(self, headers: Mapping[str, str], timeout_s: float, faults: Faults, secrets: Sequence[str]) -> None:
        # The attempt's own time-out comes first; this one is for what nobody waits for any more.
        super().__init__(headers=dict(headers), timeout=httpx2.Timeout(_CONNECT_S, read=timeout_s + 60.0, pool=timeout_s))
        self._faults = faults
        self._secrets = secrets

    async def send(self, request: httpx2.Request, **options: Any) -> httpx2.Response:
        if request.method == "DELETE":  # the end of a session: nobody waits long for that
            request.extensions = {**request.extensions, "timeout": dict.fromkeys(("connect", "read", "write", "pool"), _CLOSE_S)}
        ident = await _request_id(request)
        try:
            response = await super().send(request, **options)
            return response if ident is None else await self._checked(request, response, ident)
        except httpx2.RequestError as error:
            if request.method != "POST":
                raise
            if ident is None:  # a notification that got lost; the next request will tell
                return httpx2.Response(202, request=request)
            return self._fault(request, ident, error)

    async def _checked(self, request: httpx2.Request, response: httpx2.Response, ident: Any) -> httpx2.Response:
        """The response, if the SDK says of it what is true; otherwise the failure that it is."""
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
        # The words of an HTTP library too: of a header that cannot be sent it shows the value.
        error.args = tuple(redacted(word, self._secrets) if isinstance(word, str) else word for word in error.args)
        said = {"code": FAULT, "message": type(error).__name__, "data": self._faults.keep(error)}
        return httpx2.Response(400, json={"jsonrpc": "2.0", "id": ident, "error": said}, request=request)


def streamable(url: str, headers: Mapping[str, str], timeout_s: float, faults: Faults, secrets: Sequence[str]) -> Transport:
    """The transport for this URL, to be entered once; its session and its connections are closed behind it."""
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
    """Whether nobody may be there any more who knows our session."""
    return isinstance(error, (SessionOver, httpx2.RequestError))


async def _request_id(request: httpx2.Request) -> Any:
    """The id of a JSON-RPC request; None for a notification, and for whatever else is sent."""
    if request.method != "POST":
        return None
    message = json.loads(await request.aread())  # one that follows a redirect has only a stream to begin with
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
