"""Ids, idempotency keys and the hash chain.

Everything here is pure: it gives the same result on every replay.

The chain: hash(n) = sha256(hash(n-1) + envelope + stored bytes). hash(0) is derived from the run id, so events cannot
be moved to another run.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from hashlib import sha256

from msgspec import Struct

from perdure.core import codec
from perdure.core.events import Event, RunCreated, encode_body
from perdure.errors import InvalidInput, StoreVersion

MAX_ID_CHARS = 200
CHAIN_BYTES = 16  # the length of a hash in the journal-wide chain
_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:@+~=-]*\Z")
_BELOW = re.compile(r"(?:/(?:[0-9]+|undo))*\Z")  # the parts that child_id and undo_id add
KEY_SCHEME = 2  # the scheme of new runs; a run keeps the scheme that `run_created` recorded


class CallKeys:
    """The idempotency keys of one run's calls. A key does not depend on arguments, time, randomness or attempt.

    Two journals may use the same account at a provider and contain runs with the same id. So in scheme 2 a key also
    depends on the agent, the tool and the journal's `key_namespace`. In scheme 1 a key depends only on tenant, run id
    and call number; runs that were created with scheme 1 keep scheme 1. If a database is lost and created again, the
    same call of the same run has the same key.
    """

    def __init__(self, tenant: str, run_id: str, agent: str = "", namespace: str = "", scheme: int = 1) -> None:
        assert scheme in (1, 2), scheme
        self._covers_tool = scheme == 2
        self._parts = ("perdure-call-1", tenant, run_id) if scheme == 1 else ("perdure-call-2", namespace, tenant, run_id, agent)
        self._hash: hashlib._Hash | None = None  # the hash of `_parts`; computed at first use: many runs need no key
        self._tools: dict[str, bytes] = {}  # the name of a tool → that name as `_framed` returns it

    @classmethod
    def of(cls, created: RunCreated, fork: str | None = None) -> CallKeys:
        """The keys of the run with this `run_created` event.

        In the journal of a fork, calls have the keys of the run that made them: first those of the run with which the history
        began, and after each `run_forked` those of the run that begins there (`fork`).
        """
        if not 1 <= created.key_scheme <= KEY_SCHEME:
            raise StoreVersion(
                f"run {created.run_id} makes its keys by scheme {created.key_scheme}, and this perdure knows {KEY_SCHEME}: upgrade perdure"
            )
        return cls(created.tenant, fork or created.forked_from or created.run_id, created.agent, created.key_namespace, created.key_scheme)

    def __repr__(self) -> str:
        return f"CallKeys({', '.join(self._parts)})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CallKeys) and self._parts == other._parts

    __hash__ = None  # type: ignore[assignment]

    def key(self, call: int, tool: str) -> str:
        if self._hash is None:
            self._hash = _hashed(*self._parts)
        number = b"%d" % call
        whole = self._hash.copy()
        whole.update(len(number).to_bytes(8, "big") + number)  # the same as `_framed`
        if self._covers_tool:
            whole.update(self._tools.get(tool) or self._framed_tool(tool))
        return whole.hexdigest()

    def _framed_tool(self, tool: str) -> bytes:
        framed = self._tools[tool] = _framed(tool)
        return framed


def approval_id(tenant: str, run_id: str, call: int) -> str:
    """The id of the approval of this call: unique, and short enough to be typed."""
    return "ap-" + _hash("perdure-approval-1", tenant, run_id, str(call))[:20]


def child_id(run_id: str, call: int) -> str:
    """The run id of the child that this call starts. This id is unique, because ids from users contain no slash."""
    return f"{run_id}/{call}"


def undo_id(run_id: str) -> str:
    """The id of the run that undoes this run."""
    return f"{run_id}/undo"


def undone_by(run_id: str) -> str | None:
    """The id of the run that this run undoes; None if this run is not an undo."""
    return run_id.removesuffix("/undo") if run_id.endswith("/undo") else None


def seed(run_id: str, purpose: str) -> int:
    """A number for seeding: always the same for the same run and purpose."""
    return int(_hash("perdure-seed-1", run_id, purpose), 16)


def jitter(key: str, attempt: int) -> float:
    """A fraction in [0, 1) that spreads retries over time. It is the same on every replay."""
    return int(_hash("perdure-jitter-1", key, str(attempt))[:8], 16) / 2**32


def derived(*parts: str) -> str:
    """64 hexadecimal digits that follow from these parts: ids of traces and spans are made of them."""
    return _hash(*parts)


def check_id(value: str, what: str) -> str:
    """The id itself. Raises InvalidInput if the id is not valid."""
    if not isinstance(value, str) or not 0 < len(value) <= MAX_ID_CHARS or not _ID.match(value):
        shown = ascii(value)[:60] if isinstance(value, str) else codec.shown(value)
        raise InvalidInput(
            f"{what} {shown} is not usable: 1 to {MAX_ID_CHARS} characters out of A-Z a-z 0-9 and _ . : @ + ~ = -, the first one a letter, digit or _"
        )
    return str.__str__(value)  # a plain str, also for a subclass such as a member of a StrEnum


def is_id(text: str) -> bool:
    """Can a run or an approval have this id?

    An id from a database may be invalid: ids are checked only when they are created.
    """
    own, slash, below = text.partition("/")
    return len(own) <= MAX_ID_CHARS and _ID.match(own) is not None and _BELOW.match(slash + below) is not None


# -- the hash chain -----------------------------------------------------------------------------------------------------------
class Sealed(Struct, frozen=True, gc=False):
    """An event as it is stored, with the hashed bytes and the hash."""

    event: Event
    data: bytes
    hash: bytes


def genesis(run_id: str) -> bytes:
    """The hash before the first event of a run."""
    return sha256(b"perdure-journal-1\0" + run_id.encode()).digest()


def link(before: bytes, seq: int, event_id: str, ts: int, epoch: int, call: int | None, cause: int | None, data: bytes) -> bytes:
    """The hash of one event. All envelope fields are numbers or hex, so no field contains a `|`."""
    envelope = f"{seq}|{event_id}|{ts}|{epoch}|{'' if call is None else call}|{'' if cause is None else cause}|"
    return sha256(before + envelope.encode() + data).digest()


def seal_all(before: bytes, events: Iterable[Event]) -> list[Sealed]:
    """Chain the events onto the hash `before`, in order. The result is ready to be stored."""
    sealed = []
    for event in events:
        data = encode_body(event.body)
        before = link(before, event.seq, event.event_id, event.ts, event.epoch, event.call, event.cause, data)
        sealed.append(Sealed(event, data, before))
    return sealed


def seal(before: bytes, event: Event) -> Sealed:
    """Chain one event onto the hash `before`."""
    return seal_all(before, (event,))[0]


# -- the journal-wide chain ---------------------------------------------------------------------------------------------------
class ChainEntry(Struct, frozen=True, gc=False):
    """An entry of the journal-wide chain: the last event of a run in a commit after which no worker holds the run."""

    chain: int
    n: int
    run: int  # the number of the run in its database
    seq: int
    head: bytes  # the first bytes of the event's hash
    run_id: str | None  # set only in the first entries of a run
    link: bytes | None  # None: a later link covers this entry


def chain_link(before: bytes, entries: Iterable[ChainEntry]) -> bytes:
    """The link of the last entry. `before` is the last link before these entries; empty if there is none."""
    lines = "".join(f"{one.n}|{one.run}|{one.seq}|{one.head.hex()}|{one.run_id or ''}\n" for one in entries)
    return sha256(before + lines.encode()).digest()[:CHAIN_BYTES]


# -- hashing ------------------------------------------------------------------------------------------------------------------
def _hash(*parts: str) -> str:
    return _hashed(*parts).hexdigest()


def _hashed(*parts: str) -> hashlib._Hash:
    return hashlib.sha256(b"".join(map(_framed, parts)))


def _framed(part: str) -> bytes:
    # Each part is prefixed with its length: otherwise ("a:b", "c") and ("a", "b:c") would have the same hash (T5).
    encoded = part.encode("utf-8", "surrogatepass")
    return len(encoded).to_bytes(8, "big") + encoded
