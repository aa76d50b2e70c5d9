"""Redaction: a marker replaces secret values before an export is written, so that the file can be given to others.

`core/redaction.py` has the language of the rules.

A value that `key` or `path` has found is a secret. It is replaced everywhere in the family: also inside longer texts,
escaped as JSON, percent-encoded or in base64. The digests of redacted values are computed again, because the digest of
a short secret would reveal the secret. Some values cannot be redacted, because the format needs them: run ids, names
of tools, keys of calls. If a rule matches there, the export is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from msgspec import Raw, Struct

from perdure.core import codec
from perdure.core.codec import Payload
from perdure.core.events import AnyBody, CheckpointTaken, Event, LabelsChanged, RunCreated, SignalReceived, UnreadSignal, event_at
from perdure.core.prompt_deltas import is_request, rejoined
from perdure.core.redaction import MIN_CHARS, MIN_DIGITS, Rules, forms_of, rules_of, unused
from perdure.core.state import RunState, image_in, image_of, payloads
from perdure.errors import InvalidInput, StoreCorrupt
from perdure.inspect.prompt import sources

MARKER = "[redacted]"
_MAX_RULES_BYTES = 1 << 20
# The format needs these values, or other rows of the journal refer to them. A rule that matches one of them is
# refused.
_STRUCTURE = frozenset(
    (
        *("run_id", "agent", "version", "tenant", "queue", "parent", "tool", "key_namespace", "budget_of"),
        *("key", "digest", "approval", "pinned", "worker"),
    )
)
# perdure itself computes these values, from hashes and random numbers. A rule for hexadecimal tokens may match them.
_MADE = frozenset(("key", "digest", "approval", "pinned", "worker", "blob", "before", "after", "original_head"))

Load = Callable[[Payload], bytes]


def read_rules(given: Sequence[str]) -> Rules:
    """The rules of `--redact`. Each entry is a rule, or the name of a file with one rule on each line.

    InvalidInput says which rule is wrong, and why.
    """
    lines: list[tuple[str, str]] = []
    for one in given:
        if one.startswith(("key:", "path:", "text:")):
            lines.append((f"--redact {one!r:.60}", one))
        else:
            lines += _from_file(one)
    if not lines:
        raise InvalidInput(
            f"--redact {given[0] if given else ''}: there is no rule in it; such as key:password, path:card.number, text:sk-[a-z0-9]+"
        )
    return rules_of(lines)


def _from_file(name: str) -> list[tuple[str, str]]:
    try:
        with Path(name).open("rb") as file:
            raw = file.read(_MAX_RULES_BYTES + 1)
        if len(raw) > _MAX_RULES_BYTES:
            raise InvalidInput(f"{name} is larger than {_MAX_RULES_BYTES:,} bytes: it is no file of rules")
        text = raw.decode()
    except OSError as error:
        raise InvalidInput(f"--redact {name}: {error.strerror}; give a rule (key:NAME, path:A.B, text:REGEX) or a file of rules") from None
    except UnicodeDecodeError:
        raise InvalidInput(f"{name} is not UTF-8 text: it is no file of rules") from None
    numbered = [(f"{name}, line {number}", line.strip()) for number, line in enumerate(text.splitlines(), 1)]
    return [(where, line) for where, line in numbered if line and not line.startswith("#")]


class Redactor:
    """Redacts one family. First call `collect` for every event of every run, then `redact` in the same order."""

    def __init__(self, rules: Rules, load: Load) -> None:
        self._rules = rules
        self._load = load
        self._secrets: set[str] = set()
        self._numbers: set[int | float] = set()
        self._short_numbers: set[int | float] = set()
        self._in_json = _key_in_json(rules.keys)
        self._literals: re.Pattern[str] | None = None
        self._digests: dict[str, str] = {}  # digest of a value before the redaction → its digest after the redaction
        self.blobs: dict[str, bytes] = {}  # the new blobs
        self.count = 0  # how many values and matches were replaced
        self.short = 0  # how many different secrets are too short to be searched for

    # -- the first pass: which values are secret? -----------------------------------------------------------------------
    def collect(self, body: AnyBody) -> None:
        image = body.image if isinstance(body, CheckpointTaken) else None  # it repeats what other events have
        for payload in (one for one in payloads(body) if one is not image):
            value = codec.decode(self._load(payload))
            for part in _values_of_request(value) if is_request(payload) else (value,):
                self._find(part, ())
        if isinstance(body, RunCreated | LabelsChanged):
            self._find(body.labels, ())

    def _find(self, value: Any, path: tuple[str, ...]) -> None:
        if self._rules.name(path):
            self._keep(value)
        elif isinstance(value, dict):
            for key, item in value.items():
                self._find(item, (*path, key))
        elif isinstance(value, list):
            for place, item in enumerate(value):
                self._find(item, (*path, str(place)))

    def _keep(self, value: Any) -> None:
        if isinstance(value, dict):
            for key, item in value.items():
                self._keep(key)
                self._keep(item)
        elif isinstance(value, list):
            for item in value:
                self._keep(item)
        elif isinstance(value, str) and value and MARKER not in value:
            self._secrets.add(value)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            if sum(map(str.isdigit, str(value))) >= MIN_DIGITS:
                self._numbers.add(value)
                self._secrets.add(str(value))
            else:
                self._short_numbers.add(value)

    # -- the second pass ------------------------------------------------------------------------------------------------
    def redact(self, event: Event, state: RunState, events: Sequence[Event]) -> AnyBody:
        """The body of the event without its secrets. `state` and `events`: the redacted run before this event."""
        if self._literals is None:
            self._literals = self._compiled()
        fields: dict[str, Any] = {}
        if isinstance(event.body, CheckpointTaken):
            return self._checkpoint(event.body, event, state, events)
        for name in event.body.__struct_fields__:
            value = getattr(event.body, name)
            if isinstance(value, Payload):
                fields[name] = self._payload(value, event, state, events)
        for name in event.body.__struct_fields__:
            value = getattr(event.body, name)
            if name == "digest":
                fields[name] = self._digests.get(value, value)
            elif name not in fields:
                fields[name] = self._field(type(event.body), name, value)
        return type(event.body)(**fields)

    def _checkpoint(self, body: CheckpointTaken, event: Event, state: RunState, events: Sequence[Event]) -> CheckpointTaken:
        """What the image holds is made again from the redacted events."""
        image = image_in(body)
        held = [[one for seq in some if (one := event_at(events, seq.seq)) is not None] for some in (image.requests, image.outcomes)]
        return CheckpointTaken(
            self._payload(body.state, event, state, events),
            Payload(json=Raw(image_of(state, held[0], held[1]))),
            tuple(UnreadSignal(one.topic, self._payload(one.payload, event, state, events)) for one in body.signals),
            body.timers,
        )

    def _compiled(self) -> re.Pattern[str]:
        long = {secret for secret in self._secrets if len(secret) >= MIN_CHARS}
        self.short = len(self._secrets) - len(long) + len(self._short_numbers)
        forms = {form for secret in long for form in forms_of(secret)}
        # The longest form comes first, because one secret may be a part of another secret.
        return re.compile("|".join(map(re.escape, sorted(forms, key=len, reverse=True))) or r"(?!)")

    def _field(self, of: type, name: str, value: Any) -> Any:
        if isinstance(value, Struct):
            return type(value)(**{one: self._field(type(value), one, getattr(value, one)) for one in value.__struct_fields__})
        if _is_structure(of, name):
            return value
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, dict):
            return {key: self._value(label, (key,)) for key, label in value.items()}
        if isinstance(value, tuple):
            return tuple(self._text(one) if isinstance(one, str) else self._field(of, name, one) for one in value)
        return value

    def _payload(self, payload: Payload, event: Event, state: RunState, events: Sequence[Event]) -> Payload:
        before = self._load(payload)
        value = codec.decode(before)
        if is_request(payload):
            after = self._request(value, event, state, events)
        else:
            after = codec.encode(self._value(value, ()))
        self._digests[codec.digest(before)] = codec.digest(after)
        if after == before:
            if isinstance(payload.blob, str):
                self.blobs[payload.blob] = before
            return payload
        # A value that was inline stays inline: readers of a plan expect the plan in its event.
        packed, blob = codec.pack(after, codec.INLINE_BYTES if payload.inline is None else codec.MAX_BYTES)
        if blob is not None:
            self.blobs[codec.digest(blob)] = blob
        return packed

    def _request(self, packed: dict[str, Any], event: Event, state: RunState, events: Sequence[Event]) -> bytes:
        """Redact a request to a model. Only its frame and its messages have values; the rest refers to other calls."""
        items = [{**item, "message": self._value(item["message"], ())} if "message" in item else item for item in packed["then"]]
        fresh = {**packed, "then": items}
        if "frame" in packed:
            fresh["frame"] = self._value(packed["frame"], ())
        # The recorded digest is the digest of the whole request. It is computed again from the redacted parts.
        assert event.call is not None, event
        own = codec.encode(fresh)
        before = sources(state.calls, events, self._load_redacted)
        parts = before._replace(packed=lambda number: own if number == event.call else before.packed(number))
        try:
            whole, _ = rejoined(event.call, parts)
        except StoreCorrupt:
            # A rule has changed the form of an earlier answer. `show --prompt` will say that the request cannot be
            # rebuilt.
            whole = own
        return codec.encode({**fresh, "digest": codec.digest(whole)})

    def _load_redacted(self, payload: Payload) -> bytes:
        inline = payload.inline
        return self.blobs[str(payload.blob)] if inline is None else inline

    def _value(self, value: Any, path: tuple[str, ...]) -> Any:
        if self._rules.name(path) and value is not None:
            self.count += 1
            return MARKER
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, dict):
            fresh: dict[str, Any] = {}
            for key, item in value.items():
                name = unused(self._text(key), fresh)
                fresh[name] = self._value(item, (*path, key))
            return fresh
        if isinstance(value, list):
            return [self._value(item, (*path, str(place))) for place, item in enumerate(value)]
        if isinstance(value, int | float) and not isinstance(value, bool):
            if value in self._numbers or any(pattern.search(str(value)) for pattern in self._rules.texts):
                self.count += 1
                return MARKER
        return value

    def _text(self, text: str) -> str:
        text, found = self._in_json.subn(_marked, text)
        self.count += found
        for pattern in self._patterns():
            text, found = pattern.subn(MARKER, text)
            self.count += found
        return text

    def _patterns(self) -> Iterator[re.Pattern[str]]:
        assert self._literals is not None
        yield self._literals
        yield from self._rules.texts

    # -- the check ------------------------------------------------------------------------------------------------------
    def check(self, what: str, value: Any) -> None:
        """Raise InvalidInput if a secret or a match is left in a name or an id, because these cannot be redacted."""
        for name, text in _texts(value, ""):
            left = text.replace(MARKER, "")
            assert self._literals is not None
            if any(pattern.search(left) for pattern in ((self._literals,) if name in _MADE else self._patterns())):
                raise InvalidInput(
                    f"{what}: its field {name or 'value'} matches a rule, or holds a redacted value, and cannot be redacted: the run needs it. "
                    "Nothing was written: narrow the rule"
                )


def _key_in_json(keys: frozenset[str]) -> re.Pattern[str]:
    r"""Finds a key of a rule and its text, number or constant in JSON that is part of a text, such as {\"cents\":4900}.

    The quotes may have backslashes, because the text may be in JSON itself.
    """
    if not keys:
        return re.compile(r"(?!)")
    names = "|".join(re.escape(key) for key in sorted(keys, key=len, reverse=True))
    number = r"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?"
    value = rf'(?P=quote)(?!{re.escape(MARKER)})[^"\\]+(?P=quote)|{number}|true|false'
    return re.compile(rf'(?P<key>(?P<quote>\\{{0,15}}")(?:{names})(?P=quote)\s*:\s*)(?:{value})', re.IGNORECASE)


def _marked(found: re.Match[str]) -> str:
    return f"{found['key']}{found['quote']}{MARKER}{found['quote']}"


def _values_of_request(packed: Any) -> Iterator[Any]:
    yield packed.get("frame")
    yield from (item["message"] for item in packed["then"] if "message" in item)


@cache
def _literal_fields(of: type) -> frozenset[str]:
    """The fields whose values are fixed words of the format, such as the kind of a failure."""
    return frozenset(name for name, hint in get_type_hints(of).items() if _has_literal(hint))


def _has_literal(hint: Any) -> bool:
    return get_origin(hint) is Literal or any(_has_literal(part) for part in get_args(hint))


def _is_structure(of: type, name: str) -> bool:
    if of is SignalReceived and name == "key":
        return False  # the sender has chosen this key
    return name in _STRUCTURE or name in _literal_fields(of)


def _texts(value: Any, name: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield name, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield name or "key", key
            yield from _texts(item, name or key)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item, name)
    elif isinstance(value, Struct):
        for one in value.__struct_fields__:
            yield from _texts(getattr(value, one), one)
