"""Reads a streamed answer until it is complete, or explains why it did not become complete.

Every error leaves this module as an exception that core/failures.py can classify: a status, a reset, a time-out. Most
exceptions of the SDKs have such a form already. Two cases do not, and are changed here: errors that a provider reports
inside a stream, and streams that end without an error.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Collection, Mapping
from datetime import UTC, datetime
from typing import Any, Protocol

from perdure.errors import Fatal, NotReady
from perdure.models.messages import Tokens
from perdure.models.model import Model
from perdure.models.prices import cost_of
from perdure.models.wire import joined, mapping, plain, text_in
from perdure.tool.call import Call

LINGER_S = 2.0  # when the answer is complete: how long to wait for its usage and for the end of the stream
CONNECT_S = 15.0
MAX_EVENTS = 500_000  # the most events of one stream: an endless answer must not fill the worker's memory
MAX_CHARS = 16_000_000
_SHORTEST_S = 0.1
# Error code inside a stream → the HTTP status that the code means. All other codes count as errors of the service.
_STATUS = {
    "rate_limit_error": 429,
    "rate_limit_exceeded": 429,
    "overloaded_error": 529,
    "invalid_request_error": 400,
    "invalid_prompt": 400,
    "context_length_exceeded": 400,
    "content_policy_violation": 400,
    "authentication_error": 401,
    "billing_error": 402,
    "permission_error": 403,
    "not_found_error": 404,
    "request_too_large": 413,
}
_KEYS = re.compile(r"\bsk-[A-Za-z0-9_*.-]{6,}")
_UNREADABLE = (ValueError, TypeError, LookupError, AttributeError)
_CHAIN = 10
_SHORTEST_KEY = 8
_OUT_OF_MONEY = "insufficient_quota"


class ProviderError(Exception):
    """The provider reported an error inside its stream. `status_code`: the HTTP status with the same meaning."""

    def __init__(self, message: str, status_code: int) -> None:
        super().__init__(message)
        self.status_code = status_code


def reported(error: object) -> Exception:
    """The exception for an error object of a provider, chosen by the object's code or type.

    If neither is known, the exception is an error of the service (status 500).
    """
    words = [text_in(error, "code"), text_in(error, "type")]
    message = text_in(error, "message") or "the provider has reported an error without a message"
    said = f"{next((word for word in words if word), 'error')}: {message}"
    if _OUT_OF_MONEY in words:
        return NotReady(f"{said}; the account of the API key has no credit left: top it up, and resume the run")
    return ProviderError(said, next((_STATUS[word] for word in words if word in _STATUS), 500))


class StreamedAnswer(Protocol):
    """An answer that is built from the events of a stream."""

    whole: bool

    @property
    def tokens(self) -> Tokens:
        """The tokens that are known so far."""

    def take(self, event: Mapping[str, Any]) -> str:
        """Take the next event of the stream. Returns the text in the event."""


async def hear(
    model: Model, call: Call, opening: Awaitable[Any], heard: StreamedAnswer, *, id_header: str, secrets: Collection[str]
) -> str | None:
    """Read the stream until the answer is complete, and pass its text to the model's listener. Returns the request id.

    If an error or a cancel ends the stream earlier, the call is charged for the tokens that are known so far.
    """
    try:
        return await _listen(model, call, opening, heard, id_header, secrets)
    except BaseException:
        tokens = heard.tokens
        if tokens != Tokens():
            usd = cost_of(model.provider, model.name, model.price, tokens)
            call.spend(usd=usd, tokens_in=tokens.input, tokens_out=tokens.output, tokens_cached=tokens.cached, model=model.name)
        raise


async def _listen(
    model: Model, call: Call, opening: Awaitable[Any], heard: StreamedAnswer, id_header: str, secrets: Collection[str]
) -> str | None:
    what, request_id = f"model {model.name}", None
    opened: Any = None
    held = ""
    events_heard = chars_heard = 0
    try:
        opened = await opening
        request_id = _text(opened.response.headers.get(id_header))
        async with opened:
            events = aiter(opened)
            while True:
                async with asyncio.timeout(LINGER_S if heard.whole else None):
                    event = await anext(events, None)
                if event is None:
                    break
                events_heard += 1
                words = joined([held, heard.take(plain(event))])
                # If the text ends with the first half of a surrogate pair, wait for the second half.
                held = words[-1:] if "\ud800" <= words[-1:] <= "\udbff" else ""
                chars_heard += len(words)
                if events_heard > MAX_EVENTS or chars_heard > MAX_CHARS:
                    raise Fatal(
                        f"{what}: its answer does not end; it was given up after {events_heard:,} pieces and {chars_heard:,} characters"
                    )
                model.say(call, words[: len(words) - len(held)])
        if not heard.whole:
            raise ConnectionResetError(f"{what}: the stream has ended, and the answer is not complete")
    except Exception as error:
        if heard.whole:
            return request_id  # the answer was already complete when the error happened, so the error does not matter
        known = _explained(error if opened is None else _inside(error, what), request_id, secrets)
        _redact(error, secrets)
        if known is error:
            raise
        raise known from error
    return request_id


def time_left_s(call: Call, timeout_s: float) -> float:
    """How long to wait for the provider if it sends nothing: until the call's deadline."""
    left = timeout_s if call.deadline is None else (call.deadline - datetime.now(UTC)).total_seconds()
    return max(left, _SHORTEST_S)


def redacted(text: str, secrets: Collection[str]) -> str:
    """The text without these secrets, and without any other text that looks like an API key (guarantee G15)."""
    for secret in secrets:
        if len(secret) >= _SHORTEST_KEY:  # a shorter key is only a placeholder, and may be a part of a normal word
            text = text.replace(secret, "[key]")
    return _KEYS.sub("[key]", text)


def _inside(error: Exception, what: str) -> Exception:
    """The error of an open stream, in a form that can be classified. Unreadable data counts as a broken connection."""
    body = getattr(error, "body", None)
    if body is not None and hasattr(error, "request"):
        return reported(mapping(body).get("error", body))  # the SDK's error has the HTTP status 200
    if isinstance(error, _UNREADABLE):
        return ConnectionResetError(f"{what}: the stream cannot be read: {type(error).__name__}: {error}")
    return error


def _explained(error: Exception, request_id: str | None, secrets: Collection[str]) -> Exception:
    """The same error with the cause and the request id in its message, and without secrets."""
    body = getattr(error, "body", None)
    error_object = mapping(body).get("error", body)
    if _OUT_OF_MONEY in (text_in(error_object, "code"), text_in(error_object, "type")):
        return _explained(reported(error_object), request_id or _text(getattr(error, "request_id", None)), secrets)
    if type(error) is TypeError:
        error = Fatal(str(error))  # the SDK does not know one of our arguments, and sent nothing
    request_id = request_id or _text(getattr(error, "request_id", None))
    if getattr(error, "status_code", None) == 401:
        # The provider did nothing, and the run made no mistake. While a key is being replaced, runs must wait for the
        # new key and not fail.
        error = NotReady(f"{error}; the provider refuses this API key: correct the key, and resume the run")
    text = str(error) or f"{type(error).__name__}: the connection was lost"
    reason = "" if error.__cause__ is None else str(error.__cause__)
    if reason not in text:
        text = f"{text} ({reason})"  # the message of the SDK is only "Connection error."
    if request_id is not None and request_id not in text:
        text = f"{text} (request {request_id})"
    error.args = (redacted(text, secrets), *error.args[1:])
    return error


def _redact(error: BaseException | None, secrets: Collection[str]) -> None:
    """Remove secrets from the messages of the error and of its causes, because a traceback shows them all."""
    for _ in range(_CHAIN):
        if error is None:
            return
        error.args = tuple(redacted(arg, secrets) if isinstance(arg, str) else arg for arg in error.args)
        error = error.__cause__ or error.__context__


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None
