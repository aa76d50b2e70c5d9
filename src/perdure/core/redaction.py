"""What must not be stored in clear text: secrets, by their value, and fields, by the rules of a path language.

A `Scrubber` removes the values of secrets from everything that a tool says. `Rules` name fields: `perdure export
--redact` replaces these fields in a copy, and a `Redaction` stores a keyed digest instead of them.

There are three kinds of rules:

    key:NAME      the value of every key with this name, at any depth; upper and lower case are the same
    path:A.B.*    the value at this path: keys and list indexes; * stands for any one of them
    text:REGEX    each match of the regular expression, in every text and in every number
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import html
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct, structs

from perdure.core import codec
from perdure.core.events import Failure
from perdure.errors import InvalidInput

# -- rules ----------------------------------------------------------------------------------------------------------
RULES = "key:NAME, path:A.B.* or text:REGEX"


class Rules(Struct, frozen=True):
    keys: frozenset[str] = frozenset()
    paths: tuple[tuple[str, ...], ...] = ()
    texts: tuple[re.Pattern[str], ...] = ()

    def name(self, path: Sequence[str]) -> bool:
        """Does a `key` or `path` rule name the value at this path?"""
        if not path:
            return False
        if path[-1].casefold() in self.keys:
            return True
        return any(
            len(rule) == len(path) and all(want in ("*", have) for want, have in zip(rule, path, strict=True)) for rule in self.paths
        )


def rules_of(lines: Sequence[tuple[str, str]]) -> Rules:
    """The rules in these lines. Each line comes with its place, which InvalidInput names if the line is no rule."""
    keys, paths, texts = set(), [], []
    for where, line in lines:
        kind, _, rest = line.partition(":")
        if kind not in ("key", "path", "text") or not rest.strip():
            raise InvalidInput(f"{where} is no rule; a rule is {RULES}")
        if kind == "key":
            keys.add(rest.strip().casefold())
        elif kind == "path":
            paths.append(tuple(rest.strip().split(".")))
        else:
            texts.append(_pattern(where, rest))
    return Rules(frozenset(keys), tuple(paths), tuple(texts))


def _pattern(where: str, text: str) -> re.Pattern[str]:
    try:
        pattern = re.compile(text)
    except (re.error, RecursionError, OverflowError) as error:
        raise InvalidInput(f"{where}: not a regular expression: {error}") from None
    if pattern.search("") is not None:
        raise InvalidInput(f"{where} matches the empty text, and would match everywhere")
    return pattern


# -- secrets, by their value ----------------------------------------------------------------------------------------
# A shorter secret would occur in many texts by chance.
MIN_CHARS = 4
MIN_DIGITS = 6  # the same for a number that a rule has found
# A text may be cut in the middle of a secret. So much of its beginning counts as the secret.
_HEAD_CHARS = 16
_UNRESERVED = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_.-~"


def forms_of(secret: str) -> Iterator[str]:
    """The forms of a secret in a text: plain, escaped as JSON once or twice, percent-encoded, in hex and in base64."""
    yield secret
    for ascii_only in (True, False):
        once = json.dumps(secret, ensure_ascii=ascii_only)[1:-1]
        yield once
        yield json.dumps(once, ensure_ascii=ascii_only)[1:-1]
    raw = secret.encode("utf-8", "surrogatepass")
    yield _percent(raw, safe=b"/")
    yield _percent(raw)
    yield _percent(raw, safe=b" ").replace(" ", "+")
    yield raw.hex()
    for offset in range(3):  # the position of the secret in a group of three bytes
        encoded = base64.b64encode(bytes(offset) + raw)
        # Keep only the characters that depend on no byte before or after the secret.
        own = encoded[-(-offset * 8 // 6) : (offset + len(raw)) * 8 // 6].decode()
        if len(own) >= 2 * MIN_CHARS or offset == 0:
            yield own
            yield own.replace("+", "-").replace("/", "_")


def _percent(raw: bytes, safe: bytes = b"") -> str:
    """Percent-encoding. (The core may not import urllib.)"""
    kept = _UNRESERVED + safe
    return "".join(chr(byte) if byte in kept else f"%{byte:02X}" for byte in raw)


def marker_of(name: str) -> str:
    """The text that takes the place of a secret."""
    return f"<secret {name}>"


class Scrubber:
    """The secrets of one attempt, by name. It replaces their values by `<secret NAME>`, in every form of `forms_of`.

    A text that begins like a long secret and then ends, or goes on differently, is replaced too: the text may have been
    cut. For the same reason, a text must be scrubbed before perdure itself cuts it.
    """

    __slots__ = ("_forms", "_heads", "redacted", "values")

    def __init__(self, values: Mapping[str, str], redacted: Mapping[str, str] = {}) -> None:
        """`redacted`: the values of redacted arguments, by their path. They are removed too."""
        self.values = dict(values)
        self.redacted = dict(redacted)
        found: dict[str, str] = {}
        marked = [(marker_of(name), value) for name, value in values.items()]
        for name, value in (*marked, *((f"<redacted {path}>", value) for path, value in redacted.items())):
            # The lines of a key (PEM) may be shown one by one, without their line breaks.
            lines = [line for line in value.splitlines() if len(line) >= _HEAD_CHARS] if "\n" in value else []
            for secret in (value, *lines):
                for form in _forms_in_texts(secret):
                    found.setdefault(form, name)
        # The longest form comes first, because one secret may be a part of another secret.
        self._forms = sorted(found.items(), key=lambda one: (-len(one[0]), one))
        heads = dict.fromkeys(form[:_HEAD_CHARS] for form, _ in self._forms)
        self._heads = re.compile("|".join(map(re.escape, sorted(heads, key=len, reverse=True))) or r"(?!)")

    def value_of(self, name: str) -> str | None:
        """The value of the secret; None if it is not a secret of this attempt."""
        return self.values.get(name)

    def __repr__(self) -> str:
        return f"<Scrubber {', '.join((*self.values, *self.redacted))}>"

    def text(self, text: str) -> str:
        """The text without the secrets."""
        pieces: list[str] = []
        place = after = 0
        while (found := self._heads.search(text, place)) is not None:
            begin = found.start()
            size, name = self._longest_at(text, begin)
            if not size:
                place = begin + 1
                continue
            pieces += [text[after:begin], name]
            place = after = begin + size
        return text if not pieces else "".join((*pieces, text[after:]))

    def _longest_at(self, text: str, begin: int) -> tuple[int, str]:
        """How much of a secret begins at this place, and the text that takes its place."""
        best, of = 0, ""
        for form, name in self._forms:
            if len(form) <= best:
                break
            if text.startswith(form, begin):
                return len(form), name
            if len(form) > _HEAD_CHARS and text.startswith(form[:_HEAD_CHARS], begin):
                size = _HEAD_CHARS
                while size < len(form) and text[begin + size : begin + size + 1] == form[size]:
                    size += 1
                if size > best:
                    best, of = size, name
        return best, of

    def value(self, value: Any) -> Any:
        """A JSON value without the secrets: in texts, in keys, and in numbers."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            fresh: dict[str, Any] = {}
            for key, item in value.items():
                fresh[unused(self.text(key), fresh)] = self.value(item)
            return fresh
        if isinstance(value, list):
            return [self.value(item) for item in value]
        if isinstance(value, int | float) and not isinstance(value, bool):
            shown = self.text(str(value))
            return value if shown == str(value) else shown
        return value

    def json(self, encoded: bytes) -> bytes:
        """Canonical JSON without the secrets."""
        value = codec.decode(encoded)
        fresh = self.value(value)
        return encoded if fresh == value else codec.encode(fresh)

    def failure(self, failure: Failure) -> Failure:
        """The failure without the secrets, for a failure that another process has described."""
        return structs.replace(
            failure,
            type=self.text(failure.type),
            message=self.text(failure.message),
            lineage=tuple(map(self.text, failure.lineage)),
            traceback=None if failure.traceback is None else self.text(failure.traceback),
        )

    @property
    def longest(self) -> int:
        """The number of bytes of the longest form."""
        return max((len(form.encode("utf-8", "surrogatepass")) for form, _ in self._forms), default=0)

    def found_in(self, data: bytes) -> str | None:
        """The marker of a secret whose value is in these bytes, in any form; None if there is none."""
        for form, name in self._forms:
            if form.encode("utf-8", "surrogatepass") in data:
                return name
        return None


def _forms_in_texts(secret: str) -> Iterator[str]:
    """More forms than an export has: those of exceptions and logs."""
    yield from forms_of(secret)
    raw = secret.encode("utf-8", "surrogatepass")
    yield repr(secret)[1:-1]
    yield ascii(secret)[1:-1]
    yield repr(raw)[2:-1]
    yield html.escape(secret)
    yield raw.hex().upper()
    yield re.sub("%[0-9A-F]{2}", lambda found: found[0].lower(), _percent(raw))


def unused(name: str, taken: Mapping[str, Any]) -> str:
    """The key itself, or the key with a number if redaction has made two keys equal."""
    number = 1
    fresh = name
    while fresh in taken:
        number += 1
        fresh = f"{name} {number}"
    return fresh


# -- fields that are stored as a keyed digest ---------------------------------------------------------------------------
REDACTED = "$redacted"
MARK = b'"$redacted"'  # JSON without it has no redacted field
_DIGEST = re.compile(r"hmac-sha256:[0-9a-f]{64}")


class Redaction(Struct, frozen=True):
    """Replaces the fields that the rules name by a keyed digest: the same value has the same digest, in every run.

    The key is needed because a field may have few possible values: the digest of a PIN without a key reveals the PIN.
    """

    key: bytes
    rules: Rules

    def __repr__(self) -> str:
        return f"<Redaction by {len(self.rules.keys) + len(self.rules.paths)} rules>"

    def redacted(self, encoded: bytes) -> tuple[bytes, dict[str, Found]]:
        """The JSON with digests, and what they stand for. A field that is null or redacted already stays as it is."""
        known: dict[str, Found] = {}
        value = codec.decode(encoded)
        fresh = self._value(value, (), known)
        return (codec.encode(fresh), known) if known else (encoded, known)

    def _value(self, value: Any, path: tuple[str, ...], known: dict[str, Found]) -> Any:
        if self.rules.name(path) and value is not None and digest_in(value) is None:
            digest = f"hmac-sha256:{hmac.new(self.key, codec.encode(value), hashlib.sha256).hexdigest()}"
            known[digest] = Found(".".join(path), value)
            return {REDACTED: digest}
        if isinstance(value, dict):
            return {key: self._value(item, (*path, key), known) for key, item in value.items()}
        if isinstance(value, list):
            return [self._value(item, (*path, str(place)), known) for place, item in enumerate(value)]
        return value


class Found(Struct, frozen=True):
    path: str
    value: Any

    def __repr__(self) -> str:
        return f"<redacted {self.path}>"


def digest_in(value: object) -> str | None:
    """The digest of a redacted field; None if the value is something else."""
    if not isinstance(value, dict) or value.keys() != {REDACTED}:
        return None
    digest = value[REDACTED]
    return digest if isinstance(digest, str) and _DIGEST.fullmatch(digest) else None


def filled_in(encoded: bytes, known: Mapping[str, Found], what: str) -> bytes:
    """The JSON with the values of its redacted fields. InvalidInput if a value is not known: it is never guessed."""
    if MARK not in encoded:
        return encoded

    def fill(value: Any, path: tuple[str, ...]) -> Any:
        digest = digest_in(value)
        if digest is not None:
            if digest not in known:
                raise InvalidInput(
                    f"{what}: {'.'.join(path)} is redacted, and its value is not known here; only a digest of it is stored. "
                    "Pass the value itself, or a Secret by which the tool finds it"
                )
            return known[digest].value
        if isinstance(value, dict):
            return {key: fill(item, (*path, key)) for key, item in value.items()}
        if isinstance(value, list):
            return [fill(item, (*path, str(place))) for place, item in enumerate(value)]
        return value

    return codec.encode(fill(codec.decode(encoded), ()))


def texts_of(known: Mapping[str, Found]) -> dict[str, str]:
    """The texts and numbers in redacted fields that are long enough to be found in what a tool says, by their path."""
    return dict(text for one in known.values() for text in _texts_in(one.value, one.path))


def _texts_in(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _texts_in(item, f"{path}.{key}")
    elif isinstance(value, list):
        for place, item in enumerate(value):
            yield from _texts_in(item, f"{path}.{place}")
    elif isinstance(value, str) and len(value) >= MIN_CHARS:
        yield path, value
    elif isinstance(value, int | float) and not isinstance(value, bool) and sum(map(str.isdigit, str(value))) >= MIN_DIGITS:
        yield path, str(value)
