"""What a call of an MCP tool can fail with, in words of the retry table: proof that nothing was done, a refusal, a failure or a doubt."""

from __future__ import annotations

from collections.abc import Iterable

from perdure.core.failures import MAX_MESSAGE_CHARS, clean
from perdure.errors import Fatal, InvalidInput, NotReady, NotSent, PerdureError
from perdure.integrations.mcp_secrets import redacted

MAX_MESSAGE_BYTES = 32 * 1024 * 1024  # of one message from a server, over either transport

# JSON-RPC codes by which a server says that it has not even begun.
_REFUSALS = frozenset((-32600, -32601, -32602, -32020, -32021, -32022, -32042))
_TIMEOUT = -32001
_CLOSED = -32000
_INTERNAL = frozenset((-32603, -32700))  # the latter is also how the SDK calls an answer that it could not read


class McpToolError(PerdureError):
    """The tool itself says that it failed. Its words are the message."""


class ToolGone(InvalidInput):
    """The server does not offer the tool any more; nothing was called."""


class ToolChanged(InvalidInput):
    """The tool is not what it was when the run's tool list was recorded; nothing was called."""


class Refused(InvalidInput):
    """The server refused the request before it began."""


class ServerGone(ConnectionResetError):
    """The connection ended while the call was under way: nobody knows what became of it."""


class BadAnswer(PerdureError):
    """The server has answered, and nobody can tell what: the call may have happened."""

    status = 502  # how a service behind a gateway would be told about: a doubt, not a refusal


class ServerFailed(PerdureError):
    """The server failed inside; the call may have happened."""

    status = 500


class BadListing(Fatal):
    """The server's list of tools cannot be used."""


def of_rpc(code: int, message: str, server: str, secrets: Iterable[str] = ()) -> Exception:
    """The failure that a JSON-RPC error stands for."""
    message = redacted(message, secrets)
    said = clean(f"server {server}: {message} (JSON-RPC error {code})", MAX_MESSAGE_CHARS)
    if code in _REFUSALS:
        return Refused(said)
    if code == _TIMEOUT:
        return TimeoutError(said)
    if code == _CLOSED:
        return ServerGone(clean(f"the connection to server {server} ended while the call was under way: {message}", MAX_MESSAGE_CHARS))
    return ServerFailed(said) if code in _INTERNAL else McpToolError(said)


def while_opening(error: BaseException, server: str, secrets: Iterable[str] = ()) -> Exception:
    """Why there is no connection. Nothing of any call was sent; only some of it is worth another try."""
    found = innermost(error)
    said = redacted(str(found), secrets)
    if isinstance(found, (Fatal, NotSent, NotReady)):
        return type(found)(f"server {server}: {said}")
    response = getattr(found, "response", None)
    status = getattr(response, "status_code", 0)
    if 400 <= status < 500 and status not in (408, 429):
        return Refused(f"server {server} refuses the connection: {said}")
    words = f"{type(found).__name__}: {said}" if said else type(found).__name__
    return NotSent(clean(f"no connection to server {server}: {words}", MAX_MESSAGE_CHARS))


def is_closed(error: BaseException) -> bool:
    """Whether all that it says is that the connection has ended."""
    found = innermost(error)
    closed = getattr(found, "code", None) == _CLOSED or isinstance(found, ConnectionError)
    return closed or type(found).__name__ in ("BrokenResourceError", "ClosedResourceError", "EndOfStream")


def innermost(error: BaseException) -> BaseException:
    """The one that a group is about, as far as one can say."""
    while isinstance(error, BaseExceptionGroup) and error.exceptions:
        error = error.exceptions[0]
    return error
