"""Listening to an answer as it streams in, until it is whole; and what is the matter when it never is.

Whatever goes wrong leaves here as an exception that the rule for tools understands: a status, a reset, a time-out. The SDKs' own
exceptions do already, apart from what is reported inside a stream and from streams that just end.
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

LINGER_S = 2.0  # for the last words behind a whole answer: how much it was, and that the connection is free again
CONNECT_S = 15.0
MAX_EVENTS = 500_000  # of one stream, and the characters in it: an answer that never ends would take all of the worker's memory
MAX_CHARS = 16_000_000
_SHORTEST_S = 0.1
# What the words in an error event stand for. Everything else that is reported inside a stream is the service's own trouble.
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
    """The provider has reported an error inside its stream; `status_code` is what it would have been outside it."""

    def __init__(self, message: str, status_code: int) -> None:
        super().__init__(message)
        self.status_code = status_code


def reported(error: object) -> Exception:
    """The exception for an error object of a provider: by its code, its type, or as trouble of the service."""
    words = [text_in(error, "code"), text_in(error, "type")]
    message = text_in(error, "message") or "the provider has reported an error without a word about it"
    said = f"{next((word for word in words if word), 'error')}: {message}"
    if _OUT_OF_MONEY in words:
        return NotReady(f"{said}; the account behind the API key has nothing left: top it up, and resume the run")
    return ProviderError(said, next((_STATUS[word] for word in words if word in _STATUS), 500))


class Heard(Protocol):
    """An answer that is being put together from the events of a stream."""

    whole: bool

    @property
    def tokens(self) -> Tokens:
        """What is known about its cost so far."""

    def take(self, event: Mapping[str, Any]) -> str:
        """Go on by one event; the words in it."""


async def hear(model: Model, call: Call, opening: Awaitable[Any], heard: Heard, *, id_header: str, secrets: Collection[str]) -> str | None:
    """Listen until the answer is whole, and have whoever listens to the model hear it too; the id of the request.

    Whatever ends it before that, a cancel too, leaves what is known to be spent with the call: it has been paid for.
    """
    try:
        return await _listen(model, call, opening, heard, id_header, secrets)
    except BaseException:
        tokens = heard.tokens
        if tokens != Tokens():
            usd = cost_of(model.provider, model.name, model.price, tokens)
            call.spend(usd=usd, tokens_in=tokens.input, tokens_out=tokens.output, tokens_cached=tokens.cached, model=model.name)
        raise


async def _listen(model: Model, call: Call, opening: Awaitable[Any], heard: Heard, id_header: str, secrets: Collection[str]) -> str | None:
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
                held = words[-1:] if "\ud800" <= words[-1:] <= "\udbff" else ""  # half a character: nobody could print it
                chars_heard += len(words)
                if events_heard > MAX_EVENTS or chars_heard > MAX_CHARS:
                    raise Fatal(
                        f"{what}: its answer does not end; it was given up after {events_heard:,} pieces and {chars_heard:,} characters"
                    )
                model.say(call, words[: len(words) - len(held)])
        if not heard.whole:
            raise ConnectionResetError(f"{what}: the stream has ended, and the answer is not whole")
    except Exception as error:
        if heard.whole:
            return request_id  # behind a whole answer nothing can go wrong any more
        known = _explained(error if opened is None else _inside(error, what), request_id, secrets)
        _redact(error, secrets)
        if known is error:
            raise
        raise known from error
    return request_id


def time_left_s(call: Call, timeout_s: float) -> float:
    """How long the provider may be silent: until the call's deadline."""
    left = timeout_s if call.deadline is None else (call.deadline - datetime.now(UTC)).total_seconds()
    return max(left, _SHORTEST_S)


def redacted(text: str, secrets: Collection[str]) -> str:
    """The text without the keys that were sent, and without anything that looks like one (G15)."""
    for secret in secrets:
        if len(secret) >= _SHORTEST_KEY:  # a shorter one is a stand-in for a server that wants none, and would be found inside words
            text = text.replace(secret, "[key]")
    return _KEYS.sub("[key]", text)


def _inside(error: Exception, what: str) -> Exception:
    """The error as it is understood outside. Once the stream is open, what cannot be read is a broken stream."""
    body = getattr(error, "body", None)
    if body is not None and hasattr(error, "request"):
        return reported(mapping(body).get("error", body))  # the SDK's error has the status of the headers, which is 200
    if isinstance(error, _UNREADABLE):
        return ConnectionResetError(f"{what}: the stream holds something that makes no sense: {type(error).__name__}: {error}")
    return error


def _explained(error: Exception, request_id: str | None, secrets: Collection[str]) -> Exception:
    """The same error with all that is known about it in its message, and nothing that must not be."""
    body = getattr(error, "body", None)
    error_object = mapping(body).get("error", body)
    if _OUT_OF_MONEY in (text_in(error_object, "code"), text_in(error_object, "type")):
        return _explained(reported(error_object), request_id or _text(getattr(error, "request_id", None)), secrets)
    if type(error) is TypeError:
        error = Fatal(str(error))  # the SDK refuses to send it: it does not know an argument
    request_id = request_id or _text(getattr(error, "request_id", None))
    if getattr(error, "status_code", None) == 401:
        # Nothing was done, and nothing is wrong with the run: a key that was replaced must not end all that are under way.
        error = NotReady(f"{error}; the provider does not take this API key: see to it, and resume the run")
    text = str(error) or f"{type(error).__name__}: the connection was lost"
    reason = "" if error.__cause__ is None else str(error.__cause__)
    if reason not in text:
        text = f"{text} ({reason})"  # the SDKs say "Connection error." and keep the reason to themselves
    if request_id is not None and request_id not in text:
        text = f"{text} (request {request_id})"
    error.args = (redacted(text, secrets), *error.args[1:])
    return error


def _redact(error: BaseException | None, secrets: Collection[str]) -> None:
    """In everything that a traceback would show."""
    for _ in range(_CHAIN):
        if error is None:
            return
        error.args = tuple(redacted(arg, secrets) if isinstance(arg, str) else arg for arg in error.args)
        error = error.__cause__ or error.__context__


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None
