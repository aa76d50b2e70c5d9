"""What an exception of a tool means: for example proof that nothing was sent, a refusal, or a doubt.

Exceptions of libraries (httpx, requests, urllib, aiohttp, openai, anthropic) are recognised by class name and
attributes, never by import: perdure does not depend on them. If the meaning is not certain, the answer is a kind that
leaves the call in doubt.
"""

from __future__ import annotations

import asyncio
import errno
import math
from collections import deque
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec

from perdure.core.codec import parse
from perdure.core.events import Failure, FailureKind
from perdure.errors import ArtifactNotSaved, Fatal, InvalidInput, NotReady, NotSent, PerdureError, RetryLater

Scrub = Callable[[str], str]

IN_DOUBT_KINDS: frozenset[FailureKind] = frozenset(("timeout", "reset", "server_error", "not_saved", "process_died", "cancelled"))
# These failures prove that nothing happened, so every effect class allows another attempt. `refused` proves nothing,
# because a tool may raise such an exception after its effect, for example when it checks the answer of the service.
HARMLESS_KINDS: frozenset[FailureKind] = frozenset(("not_sent", "rate_limited"))
MAX_MESSAGE_CHARS = 2_000
MAX_TRACEBACK_CHARS = 2_000
MAX_RETRY_AFTER_S = 86_400.0
_NAME_CHARS = 200
_BASES = 20
_FRAMES = 5
_LIBRARIES = (__file__.removesuffix("core/failures.py"), asyncio.__file__.removesuffix("asyncio/__init__.py"))
_CHAIN = 10  # how many causes, and how many levels of exception groups, are followed

# Exceptions about the connection or the service, by class name. A class is looked up before its bases.
_NAMED: dict[str, FailureKind] = {
    **dict.fromkeys(
        (
            *("gaierror", "SSLCertVerificationError"),  # the standard library
            *("ConnectError", "ConnectTimeout", "PoolTimeout"),  # httpx; ConnectTimeout is requests' too
            *("NewConnectionError", "NameResolutionError", "ConnectTimeoutError"),  # urllib3, beneath requests
            *("ClientConnectorError", "ConnectionTimeoutError"),  # aiohttp
        ),
        "not_sent",
    ),
    **dict.fromkeys(("TimeoutException", "Timeout", "ReadTimeoutError", "TimeoutExpired"), "timeout"),
    **dict.fromkeys(
        (
            *("IncompleteReadError", "IncompleteRead", "SSLEOFError", "SSLZeroReturnError"),
            *("NetworkError", "RemoteProtocolError", "ProtocolError", "ChunkedEncodingError"),
            *("ServerDisconnectedError", "ClientOSError", "ClientPayloadError"),
        ),
        "reset",
    ),
    "ValidationError": "refused",  # pydantic, msgspec, jsonschema
    "CancelledError": "cancelled",
}
# Exceptions that say less than their causes. They decide only if no other exception in the chain is known.
_WRAPPERS: dict[str, FailureKind] = {"APITimeoutError": "timeout", "APIConnectionError": "reset", "ConnectionError": "reset"}
_BUILT_IN: tuple[tuple[type[BaseException], FailureKind], ...] = (
    (Fatal, "fatal"),
    (NotSent, "not_sent"),
    (NotReady, "not_sent"),
    (RetryLater, "rate_limited"),
    (InvalidInput, "refused"),
    (PermissionError, "refused"),
    (ConnectionRefusedError, "not_sent"),
    (ConnectionResetError, "reset"),
    (ConnectionAbortedError, "reset"),
    (BrokenPipeError, "reset"),
    (asyncio.CancelledError, "cancelled"),
)
# An established connection can report these errors too: they do not prove that nothing was sent.
_RESETS = frozenset((errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.ENETRESET, errno.ESHUTDOWN))
# All kinds of failure of a tool. If several errors happen at once, the kind that comes first in this tuple decides. A
# doubt comes before everything else, and proof that nothing was sent comes last.
_WEIGHT: tuple[FailureKind, ...] = (
    *("cancelled", "timeout", "reset", "server_error", "not_saved", "process_died"),
    *("fatal", "refused", "error", "not_encodable", "rate_limited", "not_sent"),
)


def _unchanged(text: str) -> str:
    return text


def describe(error: BaseException, now: datetime | None = None, scrub: Scrub = _unchanged) -> Failure:
    """The failure as it is recorded.

    `now` is used only if Retry-After is a date and the Date header is missing. `scrub` removes secrets from texts. It
    gets each text before the text is cut: a part of a secret must not be left at the end.
    """
    kind, retry_after_s = _classify(error, now, _CHAIN)
    bases = type(error).__mro__[1:]
    return Failure(
        kind=kind,
        type=clean(scrub(type(error).__name__), _NAME_CHARS),
        message=_message(error, _CHAIN, scrub),
        lineage=tuple(clean(scrub(base.__name__), _NAME_CHARS) for base in bases if base not in (BaseException, object))[:_BASES],
        retry_after_s=retry_after_s,
        traceback=_traceback(error, scrub),
    )


def received(encoded: bytes) -> Failure:
    """Read a failure that another process described. Fields that are too long are cut.

    Raises ValueError for a failure that describe() never returns.
    """
    try:
        told = msgspec.convert(parse(encoded, "the failure"), Failure)
    except msgspec.ValidationError as error:
        raise ValueError(f"the failure: {error}") from None
    if told.kind not in _WEIGHT:
        raise ValueError(f"the failure: a tool cannot fail with the kind {told.kind}")
    return Failure(
        kind=told.kind,
        type=clean(told.type, _NAME_CHARS),
        message=clean(told.message, MAX_MESSAGE_CHARS),
        lineage=tuple(clean(name, _NAME_CHARS) for name in told.lineage[:_BASES]),
        retry_after_s=_sane_wait(told.retry_after_s),
        traceback=None if told.traceback is None else clean(told.traceback, MAX_TRACEBACK_CHARS),
    )


def _classify(error: BaseException, now: datetime | None, depth: int) -> tuple[FailureKind, float | None]:
    if isinstance(error, BaseExceptionGroup) and depth:
        members = [_classify(member, now, depth - 1) for member in error.exceptions]
        waits = [wait for _, wait in members if wait is not None]
        return min((kind for kind, _ in members), key=_WEIGHT.index), max(waits, default=None)
    if isinstance(error, RetryLater):
        return "rate_limited", _sane_wait(error.after)
    chain = list(_chain(error, depth))
    for known in chain:
        if known is not error and isinstance(known, BaseExceptionGroup):
            return _classify(known, now, depth - 1) if depth else ("error", None)
        if isinstance(known, ArtifactNotSaved):
            # The tool may have acted already, so this failure leaves a doubt. If the error is not final, a later
            # attempt may succeed.
            return ("not_saved" if known.final else "server_error"), None
        status = _status(known)
        if status is not None:
            return _by_status(status), _retry_after(known, now)
        kind = _by_type(known)
        if kind is not None:
            return kind, None
    for known in chain:
        for base in type(known).__mro__:
            if base.__name__ in _WRAPPERS:
                return _WRAPPERS[base.__name__], None
    return "error", None


def _chain(error: BaseException, depth: int) -> Iterator[BaseException]:
    """The error and the chain of its causes. urllib and requests keep a cause in `reason` or in the first argument."""
    seen: set[int] = set()
    current: Any = error
    while isinstance(current, BaseException) and id(current) not in seen and len(seen) <= depth:
        yield current
        seen.add(id(current))
        candidates = (current.__cause__, _attribute(current, "reason"), *current.args[:1])
        current = next((below for below in candidates if isinstance(below, BaseException)), None)


def _by_type(error: BaseException) -> FailureKind | None:
    for known, kind in _BUILT_IN:
        if isinstance(error, known):
            return kind
    for base in type(error).__mro__:
        if base.__name__ in _NAMED:
            return _NAMED[base.__name__]
    # This check comes after the names: the connect time-outs of some libraries are TimeoutErrors too, but these
    # time-outs prove that nothing was sent.
    if isinstance(error, TimeoutError):
        return "timeout"
    if isinstance(error, OSError):
        if error.errno == errno.EADDRNOTAVAIL or _text(error).startswith("Multiple exceptions: [Errno"):
            return "not_sent"  # asyncio raises "Multiple exceptions" when no address of a host accepted the connection
        if error.errno in _RESETS:
            return "reset"
    return None


def _status(error: BaseException) -> int | None:
    """The HTTP status (400 to 599) of the exception, from any of the attributes that libraries use."""
    if not isinstance(error, Exception):
        return None  # SystemExit has a `code` too
    response = _attribute(error, "response")
    found = [_attribute(error, name) for name in ("status_code", "status", "code")]
    found += [_attribute(response, name) for name in ("status_code", "status")]
    return next((int(status) for status in found if isinstance(status, int) and 400 <= status <= 599), None)


def _by_status(status: int) -> FailureKind:
    if status == 429:
        return "rate_limited"
    if status == 408:
        return "timeout"  # the server received only a part of the request in time
    return "server_error" if status >= 500 else "refused"


def _retry_after(error: BaseException, now: datetime | None) -> float | None:
    """How many seconds the service asks to wait, limited to a sensible range; None if the service does not ask."""
    for holder in (_attribute(error, "response"), error):
        headers = _attribute(holder, "headers")
        if headers is None:
            continue
        in_ms = _number(_header(headers, "retry-after-ms"))
        if in_ms is not None:
            return _sane_wait(in_ms / 1000)
        text = _header(headers, "retry-after")
        if text is None:
            continue
        seconds = _number(text)
        if seconds is not None:
            return _sane_wait(seconds)
        until, sent = _http_date(text), _http_date(_header(headers, "date")) or now
        if until is not None and sent is not None:
            # If the server sends its Date header, both times come from the server's clock. The local clock may be
            # wrong.
            return _sane_wait(max((until - sent).total_seconds(), 0.0))
    return None


def _sane_wait(seconds: object) -> float | None:
    if isinstance(seconds, timedelta):
        seconds = seconds.total_seconds()
    if not isinstance(seconds, (int, float)) or isinstance(seconds, bool) or math.isnan(seconds) or seconds < 0:
        return None
    return float(min(seconds, MAX_RETRY_AFTER_S))


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


def _http_date(text: str | None) -> datetime | None:
    if text is None:
        return None
    from email.utils import parsedate_to_datetime  # imported late: a large module for a rare header

    try:
        parsed = parsedate_to_datetime(text)
    except (ValueError, TypeError, OverflowError):
        return None
    return parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)


def _header(headers: Any, name: str) -> str | None:
    get = _attribute(headers, "get")
    for spelling in (name, name.title()):
        try:
            value = get(spelling)
        except Exception:  # not a mapping of headers
            return None
        if isinstance(value, (str, int, float)):
            return str(value)
    return None


def _attribute(holder: Any, name: str) -> Any:
    try:
        return getattr(holder, name, None)
    except Exception:  # a property of a foreign exception may raise: treat it as missing
        return None


def _message(error: BaseException, depth: int, scrub: Scrub) -> str:
    text = _text(error)
    if isinstance(error, BaseExceptionGroup) and depth:
        inside = "; ".join(f"{type(member).__name__}: {_message(member, depth - 1, scrub)}" for member in error.exceptions[:10])
        text = f"{text}: {inside}"
    return clean(scrub(text), MAX_MESSAGE_CHARS)


def _text(error: BaseException) -> str:
    try:
        return str.__str__(str(error))  # a plain str, even when __str__ returned a subclass of it
    except BaseException as hostile:  # the failure must be recorded even if __str__ raises
        return f"<its message cannot be shown: __str__ raised {type(hostile).__name__}>"


def clean(text: str, limit: int) -> str:
    """The text in a form that can be stored, cut to the limit."""
    # Lone surrogates cannot be stored as UTF-8. They come from undecodable file names and from broken input.
    text = text[: limit + 1].encode("utf-8", "backslashreplace").decode("utf-8")
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _traceback(error: BaseException, scrub: Scrub) -> str | None:
    """The innermost frames, without source lines: the source files on disk may have changed since they were loaded.

    If all these frames belong to libraries, the innermost frame of the user's own code replaces the first of them.
    """
    frames: deque[str] = deque(maxlen=_FRAMES)
    own, inside = "", 0  # the innermost frame of the user's code, and how many frames are inside it
    step = error.__traceback__
    while step is not None:
        code = step.tb_frame.f_code
        frames.append(f"{code.co_filename}:{step.tb_lineno} in {code.co_qualname}")
        own, inside = (own, inside + 1) if _is_library(code.co_filename) else (frames[-1], 0)
        step = step.tb_next
    if own and inside >= _FRAMES:
        frames[0] = own
    if not own and isinstance(error, PerdureError):
        return None  # perdure itself refuses something: its message says all, and its own lines say nothing more
    return clean(scrub("\n".join(frames)), MAX_TRACEBACK_CHARS) if frames else None


def _is_library(file: str) -> bool:
    """Is the file part of perdure, of the standard library, or of an installed package?"""
    return file.startswith(_LIBRARIES) or "-packages/" in file or file.startswith("<frozen ")
