"""The failures of MCP calls, as exceptions that core/failures.py classifies (not sent, refused, in doubt, …)."""

from __future__ import annotations

from collections.abc import Iterable

from perdure.agents.mcp.secrets import redacted
from perdure.core.failures import MAX_MESSAGE_CHARS, clean
from perdure.errors import Fatal, InvalidInput, NotReady, NotSent, PerdureError

MAX_MESSAGE_BYTES = 32 * 1024 * 1024  # the longest message from a server, over stdio and over HTTP

# JSON-RPC codes with which a server says that it did not begin the call.
_REFUSALS = frozenset((-32600, -32601, -32602, -32020, -32021, -32022, -32042))
_TIMEOUT = -32001
_CLOSED = -32000
_INTERNAL = frozenset((-32603, -32700))  # the SDK also uses -32700 for an answer that the SDK cannot read


class McpToolError(PerdureError):
    """The tool itself reports a failure. The message is the message of the tool."""


class ToolGone(InvalidInput):
    """The server no longer offers the tool. Nothing was called."""


class ToolChanged(InvalidInput):
    """The tool has changed since the run's tool list was recorded. Nothing was called."""


class McpRefused(InvalidInput):
    """The server refused the request and did not begin the call."""


class ServerGone(ConnectionResetError):
    """The connection ended while the call was under way, so the outcome of the call is unknown."""


class BadAnswer(PerdureError):
    """The server's answer cannot be understood. The call may have happened."""

    status = 502  # the status of a gateway error: core/failures.py then puts the call in doubt and not into `refused`


class ServerFailed(PerdureError):
    """The server had an internal error. The call may have happened."""

    status = 500


class BadListing(Fatal):
    """The server's list of tools cannot be used."""


def of_rpc(code: int, message: str, server: str, secrets: Iterable[str] = ()) -> Exception:
    """The exception for a JSON-RPC error."""
    message = redacted(message, secrets)
    said = clean(f"server {server}: {message} (JSON-RPC error {code})", MAX_MESSAGE_CHARS)
    if code in _REFUSALS:
        return McpRefused(said)
    if code == _TIMEOUT:
        return TimeoutError(said)
    if code == _CLOSED:
        return ServerGone(clean(f"the connection to server {server} ended while the call was under way: {message}", MAX_MESSAGE_CHARS))
    return ServerFailed(said) if code in _INTERNAL else McpToolError(said)


def while_opening(error: BaseException, server: str, secrets: Iterable[str] = ()) -> Exception:
    """The exception for a connection that could not be opened.

    No call was sent. After NotSent a retry can help. After NotReady a person has to act first. McpRefused and Fatal
    are final.
    """
    found = innermost(error)
    said = redacted(str(found), secrets)
    if isinstance(found, (Fatal, NotSent, NotReady)):
        return type(found)(f"server {server}: {said}")
    response = getattr(found, "response", None)
    status = getattr(response, "status_code", 0)
    if 400 <= status < 500 and status not in (408, 429):
        return McpRefused(f"server {server} refuses the connection: {said}")
    words = f"{type(found).__name__}: {said}" if said else type(found).__name__
    return NotSent(clean(f"no connection to server {server}: {words}", MAX_MESSAGE_CHARS))


def is_closed(error: BaseException) -> bool:
    """Does the error only say that the connection has ended?"""
    found = innermost(error)
    closed = getattr(found, "code", None) == _CLOSED or isinstance(found, ConnectionError)
    return closed or type(found).__name__ in ("BrokenResourceError", "ClosedResourceError", "EndOfStream")


def innermost(error: BaseException) -> BaseException:
    """The first exception inside nested exception groups. It is probably the cause."""
    while isinstance(error, BaseExceptionGroup) and error.exceptions:
        error = error.exceptions[0]
    return error
