"""How the values of an agent's variables are shown: short, without secrets, and without running any code of the user.

A `__repr__`, a property or a `__getattr__` of the user may be slow, raise, print, or call a tool. So none of them is
called. Values are read with the methods of their built-in types. Text comes from models and tools, so invisible
characters are escaped.

These values count as secrets: a value whose name looks secret (`password`, `api_key`, `Authorization` …), also inside
dicts and objects; a variable of the environment with such a name; and text that looks like a key of a known service. A
secret is redacted wherever it occurs.
"""

from __future__ import annotations

import asyncio
import dataclasses
import decimal
import enum
import os
import pathlib
import re
import sys
import types
import uuid
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from datetime import date, datetime, time, timedelta, timezone
from itertools import islice, pairwise
from typing import Any
from zoneinfo import ZoneInfo

from msgspec import Struct

from perdure.agent import Agent
from perdure.agents.mcp.secrets import secrets_of
from perdure.core.invisible import escaped
from perdure.run import Run
from perdure.tool import Tool

REDACTED = "[redacted]"
MAX_CHARS = 400  # the most characters of one value
MAX_ITEMS = 20  # the most items of one list, dict or object
_DEEPEST = 6
_MOST_SECRETS = 1_000
_MOST_OBJECTS = 100_000  # the most objects that are searched for secrets
_MOST_SEARCHED = 1_000  # the most items of one list or dict that are searched
_MOST_BITS = 512  # a whole number with at most this many bits is shown in full

# A name is split into its words: `stripeApiKey`, `STRIPE_API_KEY` and `Stripe-Api-Key` are three words each.
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_SECRET_WORDS = frozenset(
    "password passwords passwd passphrase pwd secret secrets token tokens apikey credential credentials authorization bearer auth "
    "cookie cookies jwt otp cvv cvc".split()
)
_SECRET_ENDS = ("password", "passwd", "secret", "token", "apikey")  # `dbpassword`, `authtoken`
_KEY_OF = frozenset(
    "api access private secret signing encryption webhook service account master license session client app deploy hmac ssh gpg pgp "
    "aws azure google gcp github gitlab stripe openai anthropic slack sendgrid twilio datadog".split()
)
# These variables of the environment name a folder or a socket.
_NO_SECRETS = frozenset(("PWD", "OLDPWD", "SSH_AUTH_SOCK"))
_COUNTED = frozenset(("token", "tokens"))  # `max_tokens=500` is no secret

# Keys of known services, logins in URLs, and HTTP credentials.
_KEYS = re.compile(
    r"""\b(?:sk|rk|pk|whsec|shpat|hf|npm|glpat|dop_v1|gh[pousr]|github_pat|xox[abeprs]|SG)[-_.][A-Za-z0-9_.*-]{8,}
    | \b(?:AKIA|ASIA)[A-Z0-9]{16}\b | \bAIza[A-Za-z0-9_-]{30,} | \bya29\.[A-Za-z0-9_-]{10,}
    | \beyJ[A-Za-z0-9_-]{5,}\.[A-Za-z0-9_-]{5,}\.[A-Za-z0-9_-]*
    | -----BEGIN[ ][A-Z ]*PRIVATE[ ]KEY-----[\s\S]*?(?:-----END[ ][A-Z ]*PRIVATE[ ]KEY-----|\Z)
    | (?<=://)[^\s/@:]*:[^\s/@]+(?=@)
    | (?i:(?<=bearer\s)|(?<=basic\s))[A-Za-z0-9._~+/=-]{8,}""",
    re.VERBOSE,
)

# `password = "…"`, `token: str = "…"`, `"api_key": "…"`, `login(secret="…")`
_LITERAL = re.compile(
    r"(?P<before>\b(?P<name>[A-Za-z_][\w-]*)[\"']?\]?\s*(?::[^=:\"'\n]{1,60}=|:|=)\s*)[rRbBfFuU]{0,2}"
    r"(?P<quote>\"{3}|'{3}|[\"']).+?(?:(?P=quote)|$)"
)
_PATHS = (pathlib.PurePosixPath, pathlib.PureWindowsPath, pathlib.PosixPath, pathlib.WindowsPath)
_PLAIN = frozenset((type(None), bool, float, complex, type(...), date, timedelta, timezone, decimal.Decimal, uuid.UUID, *_PATHS))
_CALLABLE = (types.FunctionType, types.BuiltinFunctionType)
_NAMED = (types.CoroutineType, types.GeneratorType, types.AsyncGeneratorType)
_SEQUENCES: tuple[tuple[Any, str, str], ...] = ((list, "[", "]"), (tuple, "(", ")"), (deque, "deque([", "])"))
_SETS: tuple[tuple[Any, str, str], ...] = ((set, "{", "}"), (frozenset, "frozenset({", "})"))


def looks_secret(name: str, value: Any) -> bool:
    """Does a value under this name count as a secret? None, True, False and empty text never do."""
    if value is None or value is True or value is False or (type(value) in (str, bytes) and not value):
        return False
    words = [word.lower() for word in _WORDS.findall(name)]
    if (
        issubclass(type(value), (int, float))
        and _COUNTED.intersection(words)
        and not _SECRET_WORDS.difference(_COUNTED).intersection(words)
    ):
        return False
    return (
        any(word in _SECRET_WORDS or word.endswith(_SECRET_ENDS) for word in words)
        or any(end == "key" and first in _KEY_OF for first, end in pairwise(words))
        or words[-1:] == ["pass"]
    )


class Values:
    """Shows values. `scopes` are the variables of all frames: a secret among these variables is never shown."""

    def __init__(self, scopes: Iterable[Mapping[str, Any]], environ: Mapping[str, str] = os.environ) -> None:
        found = {name: value for name, value in environ.items() if looks_secret(name, value) and name not in _NO_SECRETS}
        for number, secret in enumerate(islice(_secrets(scopes), _MOST_SECRETS)):
            found[f"variable {number}"] = secret
        # `secrets_of` gives all spellings, the longest first. It leaves out very short secrets: they would hide
        # ordinary words.
        self._secrets = secrets_of((), {}, found)
        self._slack = max((len(secret) for secret in self._secrets), default=0) + 200

    def text(self, text: str, limit: int | None = None) -> str:
        """The text without secrets and with its invisible characters escaped, cut to the limit."""
        # Cut the text twice. The first cut keeps every secret that begins before the limit complete, so that it is
        # redacted.
        shown = escaped(self._redacted(text if limit is None else text[: limit + self._slack]))
        return shown if limit is None or len(shown) <= limit else shown[: limit - 1] + "…"

    def source(self, line: str, limit: int) -> str:
        """A line of source. If the line assigns a text to a name that looks secret, that text is redacted too."""
        return self.text(_LITERAL.sub(_without_literal, line), limit)

    def show(self, name: str, value: Any) -> str:
        """The value of the variable with this name."""
        out = _Out()
        try:
            self._write(name, value, out, ())
        except _Full:
            pass
        return self.text(out.joined(), MAX_CHARS)

    def message(self, error: BaseException) -> str:
        """The message of an exception.

        If its class has a `__str__` of the user, the arguments of the exception instead.
        """
        said = _static(type(error), "__str__")
        args = BaseException.args.__get__(error)  # type: ignore[attr-defined]
        top = str(getattr(said, "__module__", "")).partition(".")[0]
        if (type(said) is types.WrapperDescriptorType or top == "perdure") and all(type(one) in (str, int, float) for one in args[:2]):
            return self.text(str(error), MAX_CHARS)
        return ", ".join(self.show("", one) for one in args[:MAX_ITEMS])

    def call(self, name: str, arguments: Any) -> str:
        """A call with its arguments, such as refund(cents=500, order='o-7')."""
        if type(arguments) is not dict:
            return self.text(f"{name}({self.show('', arguments)})", MAX_CHARS)
        return self.text(f"{name}({', '.join(f'{key}={self.show(key, value)}' for key, value in arguments.items())})", MAX_CHARS)

    def _redacted(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, REDACTED)
        return _KEYS.sub(REDACTED, text)

    # -- one value ----------------------------------------------------------------------------------------------------
    def _write(self, name: str, value: Any, out: _Out, above: tuple[int, ...]) -> None:
        kind = type(value)
        if looks_secret(name, value) or _name_of(kind).startswith("Secret"):  # SecretStr, SecretBytes
            out.add(REDACTED)
        elif kind in _PLAIN:
            out.add(repr(value))  # exactly a built-in type, so this runs no code of the user
        elif issubclass(kind, enum.Enum):
            out.add(f"{_name_of(kind)}.{attributes_of(value).get('_name_', '?')}")
        elif issubclass(kind, int):
            out.add(int.__repr__(value) if int.bit_length(value) <= _MOST_BITS else f"<int of {int.bit_length(value)} bits>")
        elif issubclass(kind, str):
            # Redact the text before it becomes a literal, because a literal writes quotes and line ends differently.
            out.add(repr(self._redacted(str.__str__(value)[: MAX_CHARS + self._slack])))
        elif issubclass(kind, (bytes, bytearray)):
            start = bytes(memoryview(value)[: MAX_CHARS + self._slack])
            out.add(repr(self._redacted(start.decode("latin-1")).encode("latin-1")))
        elif kind in (datetime, time):
            zone = value.tzinfo
            known = zone is None or type(zone) in (timezone, ZoneInfo)
            out.add(repr(value if known else value.replace(tzinfo=None)) + ("" if known else f" in <{_name_of(type(zone))}>"))
        elif id(value) in above or len(above) >= _DEEPEST:
            out.add("…")
        else:
            self._write_whole(kind, value, out, (*above, id(value)))

    def _write_whole(self, kind: type, value: Any, out: _Out, above: tuple[int, ...]) -> None:
        fields = _static(kind, "_fields")
        if issubclass(kind, dict):
            pairs = ((f"{_shown_key(key)}: ", _key(key), item) for key, item in dict.items(value))
            self._write_items("{", pairs, "}", dict.__len__(value), out, above)
        elif issubclass(kind, tuple) and type(fields) is tuple:
            named = ((f"{name}=", name, one) for name, one in zip(fields, tuple.__iter__(value), strict=False))
            self._write_items(f"{_name_of(kind)}(", named, ")", len(fields), out, above)
        elif (found := next((one for one in _SEQUENCES if issubclass(kind, one[0])), None)) is not None:
            base, opening, closing = found
            count = base.__len__(value)
            end = f",{closing}" if base is tuple and count == 1 else closing
            self._write_items(opening, (("", "", one) for one in base.__iter__(value)), end, count, out, above)
        elif (found := next((one for one in _SETS if issubclass(kind, one[0])), None)) is not None:
            base, opening, closing = found
            # A set has a different order in each process. So the shown members are sorted as text.
            members = sorted(self.show("", one) for one in islice(base.__iter__(value), 10 * MAX_ITEMS))
            more = base.__len__(value) - MAX_ITEMS
            out.add(opening + ", ".join(members[:MAX_ITEMS]) + (f", … {more} more" if more > 0 else "") + closing)
        elif issubclass(kind, BaseException):
            args = BaseException.args.__get__(value)  # type: ignore[attr-defined]
            self._write_items(f"{_name_of(kind)}(", (("", "", one) for one in args), ")", len(args), out, above)
        else:
            self._write_object(kind, value, out, above)

    def _write_object(self, kind: type, value: Any, out: _Out, above: tuple[int, ...]) -> None:
        if (short := _short(kind, value)) is not None:
            out.add(short)
            return
        of_class = _static(kind, "__dataclass_fields__")
        attributes = {name: one for name, one in attributes_of(value).items() if not name.startswith("__")}
        opening, closing = f"{_name_of(kind)}(", ")"
        if issubclass(kind, Struct):
            attributes = {name: attributes[name] for name in type.__getattribute__(kind, "__struct_fields__") if name in attributes}
        elif type(of_class) is dict:
            fields = [name for name, one in of_class.items() if type(one) is dataclasses.Field and one.repr]
            attributes = {name: attributes[name] for name in fields if name in attributes}
        else:
            opening, closing = f"<{_name_of(kind)}{' ' if attributes else ''}", ">"
        named = ((f"{name}=", name, one) for name, one in attributes.items())
        self._write_items(opening, named, closing, len(attributes), out, above)

    def _write_items(
        self, opening: str, items: Iterable[tuple[str, str, Any]], closing: str, count: int, out: _Out, above: tuple[int, ...]
    ) -> None:
        """Write each item (label, name, value). `name` decides whether the value is a secret."""
        out.add(opening)
        for place, (label, name, value) in enumerate(islice(items, MAX_ITEMS)):
            out.add((", " if place else "") + label)
            self._write(name, value, out, above)
        out.add((f", … {count - MAX_ITEMS} more" if count > MAX_ITEMS else "") + closing)


def _without_literal(found: re.Match[str]) -> str:
    return f"{found['before']}{REDACTED}" if looks_secret(found["name"], "text") else found[0]


class _Full(Exception):
    """Enough of the value was written."""


class _Out:
    """The pieces of a text, up to a little more than the limit. The rest of a large value is never read."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._chars = 0

    def add(self, piece: str) -> None:
        self._pieces.append(piece)
        self._chars += len(piece)
        if self._chars > 2 * MAX_CHARS:
            raise _Full

    def joined(self) -> str:
        return "".join(self._pieces)


def _secrets(scopes: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """The texts of the secrets in these variables. The variables themselves come first, then each deeper level."""
    queue = deque((name, value, 0) for scope in scopes for name, value in scope.items())
    seen: set[tuple[int, bool]] = set()
    while queue and len(seen) < _MOST_OBJECTS:
        name, value, depth = queue.popleft()
        kind, secret = type(value), looks_secret(name, value)
        if issubclass(kind, (str, bytes)):
            if secret:
                yield str.__str__(value) if issubclass(kind, str) else bytes.decode(value, "utf-8", "replace")
        elif depth < _DEEPEST and (id(value), secret) not in seen:
            seen.add((id(value), secret))
            # Everything inside a value with a secret name is secret too, such as the fields of `credentials`.
            queue.extend((name if secret else label, one, depth + 1) for label, one in _inside(kind, value))


def _inside(kind: type, value: Any) -> Iterable[tuple[str, Any]]:
    """The named parts of a dict, a list, a set or an object."""
    if kind in _PLAIN or issubclass(kind, (int, enum.Enum)):
        return ()
    if issubclass(kind, dict):
        return [(_key(key), one) for key, one in islice(dict.items(value), _MOST_SEARCHED)]
    base = next((base for base, _, _ in (*_SEQUENCES, *_SETS) if issubclass(kind, base)), None)
    if base is None:
        return attributes_of(value).items() if _short(kind, value) is None else ()
    fields = _static(kind, "_fields")
    names = fields if type(fields) is tuple else ()
    return [(names[at] if at < len(names) else "", one) for at, one in enumerate(islice(base.__iter__(value), _MOST_SEARCHED))]


def _short(kind: type, value: Any) -> str | None:
    """The short form of functions, and of objects of perdure, of asyncio and of the standard library: their name."""
    if issubclass(kind, Run):
        return f"<Run {Run.id.__get__(value, Run)}>"
    if issubclass(kind, (Agent, Tool)):
        return f"<{'agent' if issubclass(kind, Agent) else 'tool'} {attributes_of(value).get('name')}>"
    if issubclass(kind, asyncio.Task):
        return f"<task {asyncio.Task.get_name(value)!r}>"
    if kind is types.MethodType:
        kind, value = type(value.__func__), value.__func__
    if kind in _CALLABLE:
        return f"<function {value.__qualname__}>"
    if kind in _NAMED:
        return f"<{'async generator' if kind is types.AsyncGeneratorType else kind.__name__} {value.__qualname__}>"
    if issubclass(kind, type):
        return f"<class {_name_of(value)}>"
    if kind is types.ModuleType:
        return f"<module {types.ModuleType.__getattribute__(value, '__name__')}>"
    module = _static(kind, "__module__")
    top = module.partition(".")[0] if type(module) is str else ""
    if kind is types.SimpleNamespace or issubclass(kind, Struct) or _static(kind, "__dataclass_fields__") is not None:
        return None
    return f"<{_name_of(kind)}>" if top == "perdure" or (top in sys.stdlib_module_names and top != "__main__") else None


def _static(kind: type, name: str) -> Any:
    """The attribute of the class or of its bases with this name. No metaclass and no descriptor is called."""
    for base in type.__getattribute__(kind, "__mro__"):
        own = type.__getattribute__(base, "__dict__")
        if name in own:
            return own[name]
    return None


def attributes_of(value: Any) -> dict[str, Any]:
    """The attributes that the object itself stores in its __dict__ and its slots. No code of the object runs."""
    found: dict[str, Any] = {}
    for base in type.__getattribute__(type(value), "__mro__"):
        for name, held in type.__getattribute__(base, "__dict__").items():
            if type(held) is types.MemberDescriptorType or (name == "__dict__" and type(held) is types.GetSetDescriptorType):
                try:
                    stored = held.__get__(value)
                except Exception:  # the slot has no value
                    continue
                if name != "__dict__":
                    found.setdefault(name, stored)
                elif type(stored) is dict:
                    found = {**{key: one for key, one in dict.items(stored) if type(key) is str}, **found}
    return found


def _name_of(kind: type) -> str:
    name = type.__getattribute__(kind, "__name__")
    return name if type(name) is str else "?"


def _key(key: Any) -> str:
    """The key of a dict as a name, to check whether it looks like the name of a secret."""
    if issubclass(type(key), str):
        return str.__str__(key)
    return str(key) if type(key) in (int, float, bool, type(None)) else f"<{_name_of(type(key))}>"


def _shown_key(key: Any) -> str:
    return repr(str.__str__(key)[:MAX_CHARS]) if issubclass(type(key), str) else _key(key)
