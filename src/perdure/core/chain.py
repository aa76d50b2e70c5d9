"""The hash chain: every event's hash covers the event as stored and the hash before it.

hash(n) = sha256(hash(n-1) + envelope + stored bytes); hash(0) comes from the run id, so that events cannot move between runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import sha256

from msgspec import Struct

from perdure.core.events import Event, encode_body


class Sealed(Struct, frozen=True, gc=False):
    """An event as it is stored: the bytes that were hashed, and the hash."""

    event: Event
    data: bytes
    hash: bytes


def genesis(run_id: str) -> bytes:
    """The hash before the first event of a run."""
    return sha256(b"perdure-journal-1\0" + run_id.encode()).digest()


def link(before: bytes, seq: int, event_id: str, ts: int, epoch: int, call: int | None, cause: int | None, data: bytes) -> bytes:
    """The hash of one event. All envelope fields are numbers or hex, so that `|` cannot occur inside one."""
    envelope = f"{seq}|{event_id}|{ts}|{epoch}|{'' if call is None else call}|{'' if cause is None else cause}|"
    return sha256(before + envelope.encode() + data).digest()


def seal_all(before: bytes, events: Iterable[Event]) -> list[Sealed]:
    """Events with their bytes and their hashes, in order onto `before`, ready to be stored."""
    sealed = []
    for event in events:
        data = encode_body(event.body)
        before = link(before, event.seq, event.event_id, event.ts, event.epoch, event.call, event.cause, data)
        sealed.append(Sealed(event, data, before))
    return sealed


def seal(before: bytes, event: Event) -> Sealed:
    """The same for one event."""
    return seal_all(before, (event,))[0]
