"""Canonical JSON: which values the journal can hold, and how values are encoded and decoded.

The rule: a live call returns decode(encode(x)) to the agent, so live execution and replay cannot differ. Stored bytes
are hashed and compared without a change. They are never decoded and encoded again for a comparison.
"""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import hashlib
import json
import math
import pathlib
import sys
import uuid
from collections.abc import Callable, Iterable
from json.scanner import make_scanner
from typing import Any, cast

import msgspec
from msgspec import UNSET, Raw, UnsetType

from perdure.core.invisible import escaped
from perdure.errors import NotEncodable

MAX_DEPTH = 200
MAX_BYTES = 64 * 1024 * 1024
MAX_DIGITS = sys.int_info.default_max_str_digits  # Python refuses to format or parse an integer with more digits
INLINE_BYTES = 64 * 1024
PREVIEW_CHARS = 200

_FORM: dict[str, Any] = {"allow_nan": False, "sort_keys": True, "separators": (",", ":"), "check_circular": False}


def _encoder() -> Callable[[Any, int], Iterable[str]]:
    """A function that returns the JSON of a value in pieces.

    JSONEncoder.encode builds a new C encoder for every value. One encoder for all values makes encoding four times as
    fast.
    """
    make = getattr(json.encoder, "c_make_encoder", None)
    form = json.JSONEncoder(ensure_ascii=False, **_FORM)
    if make is None:
        return lambda value, _: form.iterencode(value)
    return cast(
        "Callable[[Any, int], Iterable[str]]",
        make(None, form.default, json.encoder.encode_basestring, None, ":", ",", True, False, False),
    )


_encode = _encoder()
_scan = make_scanner(json.JSONDecoder())  # type: ignore[arg-type]  # the stub declares the wrong type
_encode_ascii = json.JSONEncoder(ensure_ascii=True, **_FORM).encode
_encode_flat = msgspec.json.Encoder(order="sorted").encode
_decode_text = msgspec.json.Decoder(str).decode
# A document of at most this many bytes cannot contain an integer with too many digits.
_SHORT = sys.int_info.str_digits_check_threshold
_SCALARS = frozenset((str, int, bool, type(None)))
_TEXTUAL = (datetime.datetime, datetime.date, datetime.time)
_NAMED = (decimal.Decimal, uuid.UUID, pathlib.PurePath)


class Payload(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """Canonical JSON inside an event: inline, or as the digest of a blob."""

    json: Raw | UnsetType = UNSET
    text: str | UnsetType = UNSET  # JSON with lone surrogates, which msgspec cannot embed as raw JSON
    blob: str | UnsetType = UNSET
    size: int | UnsetType = UNSET
    preview: str | UnsetType = UNSET

    @property
    def inline(self) -> bytes | None:
        """The JSON, or None if it is stored as a blob."""
        if self.json is not UNSET:
            return bytes(self.json)
        if self.text is not UNSET:
            return self.text.encode("ascii")
        return None

    @property
    def digest(self) -> str:
        """The SHA-256 of the JSON, which is inline or in a blob."""
        inline = self.inline
        return str(self.blob) if inline is None else digest(inline)


def encode(value: Any) -> bytes:
    """Canonical JSON of the value. NotEncodable says which part of the value cannot be encoded, and why."""
    kind = type(value)
    if kind is str:
        if len(value) > _SHORT:
            return _encode_any(value)
    elif kind is dict:
        for key, item in value.items():
            if type(key) is not str or type(item) not in _SCALARS or (type(item) is str and len(item) > _SHORT):
                return _encode_any(value)
    elif kind not in _SCALARS:
        return _encode_any(value)
    # Nearly all values are strings, integers, or flat objects of strings and integers. For these values msgspec writes
    # the same bytes as json, ten times as fast. msgspec is not used for floats, because it formats them differently.
    # msgspec is not used for long values, because msgspec 0.22 kills the process (SIGSEGV) when no memory is left;
    # json raises MemoryError.
    try:
        encoded = _encode_flat(value)
    except Exception:
        return _encode_any(value)  # for example, the value contains a lone surrogate
    return encoded if len(encoded) <= _SHORT else _encode_any(value)  # `_encode_any` checks the limits


def _encode_any(value: Any) -> bytes:
    plain = value if type(value) in _SCALARS else _plain(value, 0, "value")
    try:
        text = "".join(_encode(plain, 0))
        try:
            encoded = text.encode("utf-8")
        except UnicodeEncodeError:
            encoded = _encode_ascii(plain).encode("ascii")
            if json.loads(encoded) != plain:
                raise NotEncodable("a string holds a surrogate pair as two code points; join them into one character") from None
    except ValueError as error:
        if isinstance(error, NotEncodable):
            raise
        _check_integers(plain, "value")
        raise NotEncodable(f"value cannot be written as JSON: {error}") from None
    # Check the digits even if the host program has raised Python's limit: other processes must be able to read the
    # journal.
    if len(encoded) > MAX_DIGITS and sys.get_int_max_str_digits() != MAX_DIGITS:
        _check_integers(plain, "value")
    if len(encoded) > MAX_BYTES:
        raise NotEncodable(
            f"value takes {len(encoded):,} bytes as JSON; the limit is {MAX_BYTES:,}: save it as an artifact (call.save), or store it elsewhere and record a reference"
        )
    return encoded


def decode(encoded: bytes) -> Any:
    """The value that encode() wrote."""
    if encoded[:1] == b'"':
        try:
            return _decode_text(encoded)
        except msgspec.MsgspecError:
            pass  # the text contains a lone surrogate, or encode() did not write it
    text = encoded.decode("utf-8")
    try:
        # Call the scanner directly. json.loads also skips white space around the value, which takes longer than the
        # scan, and encode() writes no white space there.
        value, end = _scan(text, 0)
    except StopIteration:
        value, end = None, -1
    # If encode() did not write this text, json.loads reads it or says where the text is wrong.
    return value if end == len(text) else json.loads(text)


def digest(encoded: bytes) -> str:
    """The full SHA-256 of stored bytes, in hex."""
    return hashlib.sha256(encoded).hexdigest()


def pack(encoded: bytes, inline_bytes: int = INLINE_BYTES) -> tuple[Payload, bytes | None]:
    """A payload for an event. If the value is too large to be inline, also the blob to store with the event."""
    if len(encoded) > inline_bytes:
        preview = encoded[: PREVIEW_CHARS * 4].decode("utf-8", "ignore")[:PREVIEW_CHARS]
        return Payload(blob=digest(encoded), size=len(encoded), preview=preview), encoded
    if b"\\ud" in encoded and _has_lone_surrogate(encoded):
        return Payload(text=encoded.decode("ascii")), None
    return Payload(json=Raw(encoded)), None


def parse(text: str | bytes, what: str = "the input") -> Any:
    """Parse JSON from outside strictly: duplicate keys, NaN and invalid text are refused."""
    value = _parsed(text, what)
    encode(value)
    return value


def canonical(text: bytes, what: str) -> bytes:
    """JSON from outside, in the canonical form of encode(). Refuses the same text as parse()."""
    return encode(_parsed(text, what))


def _parsed(text: str | bytes, what: str) -> Any:
    if isinstance(text, bytes):
        try:
            text = text.decode("utf-8")
        except UnicodeDecodeError as error:
            raise NotEncodable(f"{what} is not UTF-8 text: byte {error.start}") from None
    try:
        return json.loads(text.removeprefix("\ufeff"), object_pairs_hook=_unique_keys, parse_constant=_no_constant, parse_int=_integer)
    except NotEncodable as error:
        raise NotEncodable(f"{what}: {error}") from None
    except RecursionError:
        raise NotEncodable(f"{what} is nested deeper than {MAX_DEPTH} levels") from None
    except ValueError as error:
        raise NotEncodable(f"{what} is not valid JSON: {error}") from None


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise NotEncodable(f"the key {next(n for n in names if names.count(n) > 1)!r} occurs twice in one object")
    return found


def _no_constant(name: str) -> Any:
    raise NotEncodable(f"{name} is not a number that JSON can hold")


def _integer(text: str) -> int:
    digits = len(text.removeprefix("-"))
    if digits > _most_digits():
        raise NotEncodable(f"the integer {text[:9]}… has {digits:,} digits; {_too_long()}")
    return int(text)


def _check_integers(plain: Any, where: str) -> None:
    """Raise NotEncodable for the first integer with too many digits. The message says where the integer is."""
    if isinstance(plain, dict):
        for key, item in plain.items():
            _check_integers(item, key)
    elif isinstance(plain, list):
        for item in plain:
            _check_integers(item, where)
    elif isinstance(plain, int) and plain.bit_length() > 3 * _most_digits() and (digits := _digits(plain)) > _most_digits():
        raise NotEncodable(f"{_place(where)} is an integer of {digits:,} digits; {_too_long()}")


def _digits(value: int) -> int:
    """The number of digits, without formatting the integer."""
    digits = int((value.bit_length() - 1) * math.log10(2)) + 1
    return digits + 1 if abs(value) >= 10**digits else digits


def _most_digits() -> int:
    return min(MAX_DIGITS, sys.get_int_max_str_digits() or MAX_DIGITS)  # 0 means: no limit


def _too_long() -> str:
    return f"the limit is {_most_digits():,}: write it as a string"


def _has_lone_surrogate(encoded: bytes) -> bool:
    try:
        decode(encoded).encode("utf-8") if encoded[:1] == b'"' else "".join(_encode(decode(encoded), 0)).encode("utf-8")
    except UnicodeEncodeError:
        return True
    return False


def _plain(value: Any, depth: int, where: str) -> Any:
    """The value as JSON types. Refuses values that would silently be decoded as something else."""
    kind = type(value)
    if kind in _SCALARS:
        return value
    if kind is float:
        if not math.isfinite(value):
            raise NotEncodable(f"{_place(where)} is {value!r}, which JSON cannot hold")
        return value
    if depth >= MAX_DEPTH:
        raise NotEncodable(f"{_place(where)} is nested deeper than {MAX_DEPTH} levels (or contains itself)")
    if kind is dict:
        plain = {}
        for key, item in value.items():
            if type(key) is not str:
                if not isinstance(key, str):
                    raise NotEncodable(f"{_place(where)} has the key {shown(key)} of type {type(key).__name__}; keys must be strings")
                key = str.__str__(key)
            plain[key] = item if type(item) in _SCALARS else _plain(item, depth + 1, key)
        if len(plain) != len(value):
            raise NotEncodable(f"{_place(where)} has two keys that are the same text")
        return plain
    if kind is list or kind is tuple:
        return [_plain(item, depth + 1, where) if type(item) not in _SCALARS else item for item in value]
    try:
        converted = _converted(value, where)
    except NotEncodable:
        raise
    except Exception as error:  # from a property, model_dump or isoformat of a user's class
        raise NotEncodable(
            f"{_place(where)}, a {kind.__name__}, cannot be turned into JSON: {type(error).__name__}: {_text(error)}"
        ) from None
    return _plain(converted, depth + 1, where)


def _converted(value: Any, where: str) -> Any:
    """The nearest JSON type for common Python types. Other types are refused with their name."""
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, (int, float, str)):
        # The plain value inside an instance of a subclass. The subclass's own __int__ or __str__ is not called.
        return str.__str__(value) if isinstance(value, str) else int.__index__(value) if isinstance(value, int) else float.__float__(value)
    if isinstance(value, dict):
        return dict(value)
    if isinstance(value, (list, tuple)):
        return list(value) if not hasattr(value, "_asdict") else value._asdict()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, _TEXTUAL):
        return value.isoformat()
    if isinstance(value, _NAMED):
        return str(value)
    if isinstance(value, msgspec.Struct):
        return msgspec.to_builtins(value)
    dump = getattr(type(value), "model_dump", None)
    if dump is not None:
        return dump(value, mode="json")
    hint = {
        "bytes": "; write it as text (base64), or save it as an artifact: call.save(…)",
        "Pending": "; await it, or call its wait() in a sync tool",
        "Secret": "; a secret is a whole argument of a tool or an agent, for a parameter with the annotation Secret",
        "set": "; sort it into a list, since a set has no order",
        "frozenset": "; sort it into a list, since a set has no order",
        "coroutine": "; was an await forgotten?",
        "generator": "; make a list of it",
    }.get(type(value).__name__, "")
    raise NotEncodable(f"{_place(where)} is of type {type(value).__name__}, which JSON cannot hold{hint}")


def _place(where: str) -> str:
    """A key for use in a message: cut short, and without lone surrogates."""
    return where[:80].encode("utf-8", "backslashreplace").decode("utf-8")


def _text(error: Exception) -> str:
    try:
        return str(error)[:200]
    except Exception:
        return "(no message)"


def shown(value: Any) -> str:
    """The value for use in a message, cut short. Never raises."""
    try:
        return escaped(repr(value)[:80])
    except Exception:  # a broken __repr__ must not hide the error that is being reported
        return f"<{type(value).__name__}>"
