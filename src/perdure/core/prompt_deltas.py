"""Requests to models, recorded as differences: each request adds only its new messages to the journal.

A request is recorded as a list of items. An item may refer to something that the journal holds already:

    again_of   messages of an earlier request, by call and place; usually one item covers nearly all messages
    answer_of  the answer of a call, by the number of that call
    text_of    a long text, by the seq of the event that holds the text
    frame_of   everything except the messages, by the first call with the same frame

`unpack` rebuilds the exact bytes of every request. The recorded digest proves that these bytes are right.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from msgspec import to_builtins

from perdure.core import codec
from perdure.core.codec import Payload
from perdure.errors import StoreCorrupt

LONG_CHARS = 200  # for a shorter text, a reference would save too little space
_SPARE = 256  # the cache keeps twice as many messages as the newest request has, plus this many
_LATELY = 8  # for how many requests the order of messages is kept
_MOST = 1_000_000  # the most messages of one request: a damaged journal must not fill the memory
# The first characters of every packed request (JSON keys are sorted). So the preview of a blob is enough to recognise
# a packed request.
_PACKED = re.compile(r'\{"digest":"[0-9a-f]{64}","frame(?:_of)?":')
_TELLS = 100  # this many bytes are enough for `_PACKED`
_ODD = b"\\ud"  # may be a lone surrogate: codec.encode writes it as \udXXX, and then the whole document in ASCII


class _Known(NamedTuple):
    """A message that was encoded before."""

    message: Any  # this reference keeps the object alive, so that its id() is not used for another object
    mutable: bytes | None  # the mutable parts of the message when it was encoded; None: the message has no such parts
    encoded: bytes
    digest: bytes
    odd: bool


class _Request(NamedTuple):
    """A recent request."""

    order: list[bytes]  # the digests of the request's messages, in order
    head: bytes
    hashed: Any  # SHA-256 state after the last message; None if the digest was computed from the whole request


class Prompts:
    """The requests of one run so far. Deterministic: the same requests in the same order give the same bytes."""

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}  # by the id of the message object
        self._frames: dict[bytes, int] = {}  # digest of a frame (all but the messages) → the first call with it
        self._answers: dict[bytes, int] = {}  # digest of a message → the call that this message answers
        # Digest of a message → the last call whose request has this message, and the place of the message there.
        self._places: dict[bytes, tuple[int, int]] = {}
        self._lately: dict[int, _Request] = {}  # by call, the newest last
        self._texts: dict[bytes, int] = {}  # digest of a long payload → the event that holds it

    def answered(self, number: int, message: Any) -> None:
        """Note that this message is the answer of call `number`."""
        self._answers.setdefault(self._message(message).digest, number)

    def recorded(self, encoded: bytes, seq: int) -> None:
        """Note that the event `seq` has this payload."""
        if len(encoded) > LONG_CHARS:
            self._texts.setdefault(_hash(encoded), seq)

    def pack(self, number_of: Callable[[str], int], frame: Mapping[str, Any], messages: Sequence[Any]) -> bytes:
        """The request as it is recorded, with the digest of the whole request, as canonical JSON.

        `number_of(digest)` returns the number of the call. It is called once, after the request was encoded.
        """
        known = [self._message(message) for message in messages]
        head, tail = _around(frame)
        items = self._items(known)
        # Hash message by message. To join a long conversation only for its hash would cost more than the rest of the
        # packing.
        hashed = None if _ODD in head or _ODD in tail or any(one.odd for one in known) else self._hashed(head, known, items)
        if hashed is None:
            digest = codec.digest(_in_ascii(head + b",".join([one.encoded for one in known]) + tail))
        else:
            ended = hashed.copy()
            ended.update(tail)
            digest = ended.hexdigest()
        framed = _hash(head + tail)
        of = self._frames.get(framed)
        packed = {"digest": digest, "then": items} | ({"frame": dict(frame)} if of is None else {"frame_of": of})
        encoded = codec.encode(packed)
        # Remember the request only after encoding succeeded: a request that cannot be recorded is never made, and no
        # item may refer to such a request.
        number = number_of(digest)
        self._frames.setdefault(framed, number)
        self._remember(number, known, head, hashed)
        return encoded

    def _hashed(self, head: bytes, known: Sequence[_Known], items: Sequence[dict[str, Any]]) -> Any:
        """The SHA-256 state after the last message.

        If this request extends an earlier request, the state of the earlier request is continued.
        """
        first = items[0] if items else {}
        before = self._lately.get(first.get("again_of", 0))
        count = first.get("count", 0)
        if before is not None and before.hashed is not None and before.head == head and first["at"] == 0 and len(before.order) == count:
            hashed = before.hashed.copy()
        else:
            hashed, count = hashlib.sha256(head), 0
        for place, one in enumerate(known[count:], count):
            hashed.update(b"," + one.encoded if place else one.encoded)
        return hashed

    def _items(self, known: Sequence[_Known]) -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = []
        place = 0
        while place < len(known):
            found = self._found(known[place].digest, place)
            if found is None:
                items.append(self._item(known[place]))
                place += 1
                continue
            of, at = found
            count = self._run(known, place, of, at)
            items.append({"again_of": of, "at": at, "count": count})
            place += count
        return items

    def _found(self, digest: bytes, place: int) -> tuple[int, int] | None:
        """(call, place) of this message in an earlier request.

        A request with the message at the same place is preferred, because more equal messages follow there.
        """
        for number in reversed(self._lately):
            order = self._lately[number].order
            if place < len(order) and order[place] == digest:
                return number, place
        return self._places.get(digest)

    def _run(self, known: Sequence[_Known], place: int, of: int, at: int) -> int:
        """How many messages in a row, from `place` on, equal the messages of call `of` from `at` on."""
        lately = self._lately.get(of)
        count = 1
        for one in known[place + 1 :]:
            there = at + count
            if lately is None:
                same = self._places.get(one.digest) == (of, there)
            else:
                same = there < len(lately.order) and lately.order[there] == one.digest
            if not same:
                break
            count += 1
        return count

    def _item(self, one: _Known) -> dict[str, Any]:
        if (number := self._answers.get(one.digest)) is not None:
            return {"answer_of": number}
        message: dict[str, Any] = codec.decode(one.encoded)
        text = message.get("text")
        if isinstance(text, str) and len(text) > LONG_CHARS and (seq := self._event_of(text)) is not None:
            del message["text"]
            return {"text_of": seq, "message": message}
        return {"message": message}

    def _event_of(self, text: str) -> int | None:
        """The event whose payload is this text, as a JSON string or as JSON itself.

        A text that begins with a quote is looked up only as a JSON string: when the payload is read, a JSON text that
        begins with a quote looks like a JSON string.
        """
        found = self._texts.get(_hash(codec.encode(text)))
        return self._texts.get(_hash(text.encode("utf-8", "surrogatepass"))) if found is None and text[0] != '"' else found

    def _remember(self, number: int, known: Sequence[_Known], head: bytes, hashed: Any) -> None:
        order = [one.digest for one in known]
        self._lately[number] = _Request(order, head, hashed)
        if len(self._lately) > _LATELY:
            del self._lately[next(iter(self._lately))]
        self._places.update((digest, (number, place)) for place, digest in enumerate(order))
        if len(self._known) > 2 * len(known) + _SPARE:
            self._known = {id(one.message): one for one in known}

    def _message(self, message: Any) -> _Known:
        found = self._known.get(id(message))
        if found is not None and (found.mutable is None or found.mutable == _mutable(message)):
            return found
        encoded = codec.encode(to_builtins(message))
        found = _Known(message, _mutable(message), encoded, _hash(encoded), _ODD in encoded)
        if isinstance(message, msgspec.Struct) and found.mutable != _UNKNOWN:
            self._known[id(message)] = found
        return found


_UNKNOWN = b""


def _mutable(message: Any) -> bytes | None:
    """The mutable parts of a message, encoded; None if the message has no mutable parts.

    They show whether the message has changed since it was encoded. Messages are frozen, but the arguments of a tool
    use are a dictionary.
    """
    uses, raw = getattr(message, "uses", ()), getattr(message, "raw", None)
    if not uses and raw is None:
        return None
    try:
        return msgspec.json.encode((uses, raw))
    except (UnicodeEncodeError, OverflowError, TypeError, ValueError, RecursionError):
        return _UNKNOWN


def _around(frame: Mapping[str, Any]) -> tuple[bytes, bytes]:
    """The canonical JSON of a request before its messages, and after them."""
    parts = {key: codec.encode(key) + b":" + codec.encode(value) for key, value in frame.items()} | {"messages": b'"messages":['}
    before = b",".join(parts[key] for key in sorted(parts) if key <= "messages")
    behind = b"".join(b"," + parts[key] for key in sorted(parts) if key > "messages")
    return b"{" + before, b"]" + behind + b"}"


def _in_ascii(whole: bytes) -> bytes:
    """Encode the document again with codec.encode. Only a document with a lone surrogate changes: it becomes ASCII."""
    return codec.encode(codec.decode(whole))


def joined(frame: Mapping[str, Any], messages: Sequence[bytes]) -> bytes:
    """Canonical JSON of the request, from messages that are canonical JSON."""
    head, tail = _around(frame)
    whole = head + b",".join(messages) + tail
    return _in_ascii(whole) if _ODD in whole else whole


class PromptTold(NamedTuple):
    """The number of messages in a request, and how many of these messages are new in the run."""

    messages: int
    new: int


def is_request(args: Payload | None) -> bool:
    """Are these arguments a request to a model? Works for inline payloads and blobs."""
    if args is None:
        return False
    inline = args.inline
    return _PACKED.match(str(args.preview) if inline is None else inline[:_TELLS].decode("utf-8", "replace")) is not None


def request_digest(args: Payload) -> str:
    """The digest of a whole request, from its packed form. Works for inline payloads and blobs."""
    inline = args.inline
    return digest_in(str(args.preview).encode() if inline is None else inline)


def digest_in(packed: bytes) -> str:
    """The digest of the whole request, which is at the beginning of the packed form."""
    return packed[len(b'{"digest":"') :][:64].decode()


def told(packed: bytes) -> PromptTold:
    """The number of messages of a packed request, and the number of new messages.

    Raises StoreCorrupt if `packed` is not a packed request.
    """
    try:
        own = _Own(packed)
    except _DAMAGED as error:
        raise StoreCorrupt(f"a request to a model cannot be read: {error}") from None
    return PromptTold(own.messages, sum("again_of" not in item for _, item in own.items))


def in_short(packed: bytes) -> str | None:
    """A packed request in words, for messages about a call; None if these arguments are not a packed request."""
    if _PACKED.match(packed[:_TELLS].decode("utf-8", "replace")) is None:
        return None
    try:
        own = _Own(packed)
    except _DAMAGED:
        return None
    item = own.items[-1][1] if own.items else {}
    message = item.get("message", {})
    last = f", the last from {message.get('role')}: {str(message.get('text', '…'))[:80]!r}" if message else ""
    framed = ", with a system prompt, tools or settings that are new" if "frame" in own.fields else ""
    return f"{own.messages:,} message{'' if own.messages == 1 else 's'}{last}{framed}"


def difference(before: bytes, now: bytes) -> str | None:
    """How two packed requests differ, in words; None if the difference cannot be determined."""
    try:
        one, other = _Own(before), _Own(now)
        changed = _changed(one.fields.get("frame"), other.fields.get("frame"))
        if changed or one.messages != other.messages:
            return changed or f"{one.messages:,} messages there, and {other.messages:,} here"
        for (place, was), (_, is_) in zip(one.items, other.items, strict=False):
            if was != is_:
                return f"message {place + 1} differs: {_apart(_words(was), _words(is_))}"
    except _DAMAGED:
        return None
    return None


def _changed(before: Any, now: Any) -> str | None:
    """The fields of the frame that differ, in words; None if no field differs or a frame is not known."""
    if not isinstance(before, dict) or not isinstance(now, dict):
        return None
    names = [name for name in sorted({**before, **now}) if before.get(name) != now.get(name)]
    shown = [
        f"{name} differs: {_apart(*(codec.encode(side.get(name)).decode('utf-8', 'replace') for side in (before, now)))}" for name in names
    ]
    return "; ".join(shown) or None


def _words(item: dict[str, Any]) -> str:
    return codec.encode(item.get("message", item)).decode("utf-8", "replace")


def _apart(before: str, now: str) -> str:
    """Both texts, from shortly before their first difference."""
    same = next((place for place, (one, other) in enumerate(zip(before, now, strict=False)) if one != other), min(len(before), len(now)))
    start = max(same - 20, 0)
    return " → ".join(f"{'…' if start else ''}{text[start : start + 60]}{'…' if len(text) > start + 60 else ''}" for text in (before, now))


class Sources(NamedTuple):
    """Functions that read the journal of a run."""

    packed: Callable[[int], bytes]  # number of a call → its packed request
    answer: Callable[[int], Any]  # number of a call → its answer, as a message
    text: Callable[[int], str]  # seq of an event → its payload, as text


def unpack(number: int, packed: Callable[[int], bytes], answer: Callable[[int], Any], text: Callable[[int], str]) -> bytes:
    """The whole request of call `number`, byte for byte. Raises StoreCorrupt if the request does not match its digest.

    `packed`, `answer` and `text` are the functions of `Sources`.
    """
    whole, digest = rejoined(number, Sources(packed, answer, text))
    if codec.digest(whole) != digest:
        raise StoreCorrupt(
            f"the request of call {number} cannot be made again as it was: its digest is {digest[:12]}…, and what the journal has of it "
            f"comes to {codec.digest(whole)[:12]}…"
        )
    return whole


def rejoined(number: int, sources: Sources) -> tuple[bytes, str]:
    """The whole request of call `number`, and its recorded digest, which is not compared."""
    reader = _Reader(sources)
    try:
        own = reader.own(number)
        frame = own.fields["frame"] if "frame" in own.fields else reader.own(_before(own.fields["frame_of"], number)).fields["frame"]
        return joined(frame, [codec.encode(message) for message in reader.messages(number, 0, own.messages)]), str(own.fields["digest"])
    except _DAMAGED as error:
        raise StoreCorrupt(f"the request of call {number} cannot be made again: what the journal has of it is damaged ({error})") from None


def frame_of(number: int, packed: Callable[[int], bytes]) -> dict[str, Any]:
    """Everything in the request of call `number` except its messages. `packed` is the function of `Sources`."""
    try:
        own = _Own(packed(number)).fields
        frame: dict[str, Any] = own["frame"] if "frame" in own else _Own(packed(_before(own["frame_of"], number))).fields["frame"]
        return frame
    except _DAMAGED as error:
        raise StoreCorrupt(f"the request of call {number} cannot be made again: what the journal has of it is damaged ({error})") from None


def added(number: int, sources: Sources) -> list[Any]:
    """The messages of call `number`'s request, without the prefix that this request shares with an earlier request.

    Raises StoreCorrupt if the recorded request is damaged.
    """
    reader = _Reader(sources)
    try:
        own = reader.own(number)
        first = own.items[0][1] if own.items else {}
        return reader.messages(number, first["count"] if first.get("at") == 0 else 0, own.messages)
    except _DAMAGED as error:
        raise StoreCorrupt(f"the request of call {number} cannot be read: what the journal has of it is damaged ({error})") from None


_DAMAGED = (LookupError, TypeError, ValueError, AttributeError, RecursionError)


class _Own:
    """One decoded packed request. Raises ValueError if `packed` is not a packed request."""

    def __init__(self, packed: bytes) -> None:
        self.fields: dict[str, Any] = codec.decode(packed)
        if not isinstance(self.fields, dict) or not isinstance(self.fields.get("then"), list):
            raise ValueError("it is no packed request")
        self.items: list[tuple[int, dict[str, Any]]] = []  # (the place of the item's first message, the item)
        place = 0
        for item in self.fields["then"]:
            self.items.append((place, item))
            place += _count(item["count"]) if "again_of" in item else 1
        self.messages = _count(place)


class _Reader:
    """Replaces the references of a request by the messages themselves, and follows references from call to call."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._owns: dict[int, _Own] = {}

    def own(self, number: int) -> _Own:
        found = self._owns.get(number)
        if found is None:
            found = self._owns[number] = _Own(self._sources.packed(number))
        return found

    def messages(self, number: int, first: int, last: int) -> list[Any]:
        """The messages at the places from `first` to `last`. The place `last` is not included.

        The method is not recursive, because a conversation may be very long.
        """
        found: list[Any] = []
        # A stack: the next part is at the end.
        wanted: list[tuple[int, int, int] | tuple[int, dict[str, Any]]] = [(number, first, last)]
        while wanted:
            match wanted.pop():
                case (of, item):
                    found.append(self._message(of, item))
                case (of, start, end):
                    wanted += reversed(list(self._parts(of, start, end)))
        return found

    def _parts(self, of: int, start: int, end: int) -> Iterator[tuple[int, int, int] | tuple[int, dict[str, Any]]]:
        """What is at these places of a request, in order: places of other requests, and items of this request."""
        own = self.own(of)
        if end > own.messages:
            raise ValueError(f"call {of} has {own.messages:,} messages, and {end:,} are referred to")
        for place, item in own.items:
            count = item["count"] if "again_of" in item else 1
            low, high = max(start, place), min(end, place + count)
            if low < high and "again_of" in item:
                at = _count(item["at"]) - place
                yield _before(item["again_of"], of), low + at, high + at
            elif low < high:
                yield of, item

    def _message(self, of: int, item: dict[str, Any]) -> Any:
        if "answer_of" in item:
            return self._sources.answer(_before(item["answer_of"], of))
        return {**item["message"], "text": self._sources.text(item["text_of"])} if "text_of" in item else item["message"]


def _before(of: Any, number: int) -> int:
    """The referenced call. It must be an earlier call: a damaged journal must not cause an endless loop."""
    if type(of) is not int or not 0 < of < number:
        raise ValueError(f"call {number} refers to call {of!r:.20}")
    return of


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= _MOST:
        raise ValueError(f"{value!r:.20} is no number of messages")
    return value


def _hash(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()
