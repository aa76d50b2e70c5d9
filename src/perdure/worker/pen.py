"""The writing end of one run's journal: what has happened and is not durable yet.

Events get their seq, and are folded into the state, when they are recorded; they leave the buffer when their commit is known to
have succeeded. What is not yet durable has never left the process: the driver starts no effect whose intent is still in here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import structs

from perdure.core import chain, codec
from perdure.core.budget import NOTHING, Amounts, amounts_of
from perdure.core.chain import Sealed
from perdure.core.codec import Payload
from perdure.core.events import AnyBody, Event, RetryScheduled, ToolCallCompleted, ToolCallInitiated
from perdure.core.state import CallState, RunState
from perdure.store.api import Append, Charge, Lease, RowChange
from perdure.worker.clock import Clock


class Pen:
    """Records events of one run in order, and hands them out as one append at a time."""

    def __init__(self, lease: Lease, state: RunState, head: bytes, clock: Clock, inline_bytes: int) -> None:
        self.lease = lease
        self.state = state
        self._head = head  # hash of the last durable event
        self._durable_seq = state.seq
        self._clock = clock
        self._inline_bytes = inline_bytes
        self._events: list[Event] = []
        self._blobs: dict[str, bytes] = {}  # by digest
        self._consumed: list[int] = []
        self._left: list[int] = []
        self.metered = False  # the run has a budget, its own or one above it: what it uses is charged in the commits that say so
        self._sent: tuple[Amounts, Amounts] = (NOTHING, NOTHING)
        self._charged = (NOTHING, NOTHING)  # what of the state's reserved and spent is in the ledger
        self.observe: Callable[[Event], None] | None = None  # told of every event right after it is in the state

    def owe(self, reserved: Amounts) -> None:
        """That much is reserved in the ledgers. What a person has settled while nobody held the run is given back with the next commit."""
        self._charged = (reserved, self._charged[1])

    def rebase(self) -> None:
        """The state has been folded up to the durable end of the journal: go on from there."""
        assert not self._events
        self._durable_seq = self.state.seq
        self._charged = (self.state.reserved, self.state.spent)

    @property
    def durable_seq(self) -> int:
        """The seq of the last event that is known to be durable."""
        return self._durable_seq

    @property
    def dirty(self) -> bool:
        return bool(self._events or self._consumed)

    def record(self, body: AnyBody, *, call: int | None = None, cause: int | None = None, event_id: str | None = None) -> Event:
        """State a fact. It is in the state at once, and durable after the next commit."""
        event = Event(self.state.seq + 1, event_id or self._clock.new_id(), self._clock.now(), self.lease.epoch, call, cause, body)
        self.state.apply(event)
        self._events.append(event)
        if self.observe is not None:
            self.observe(event)
        return event

    def take_back(self, before: CallState) -> ToolCallInitiated:
        """The call's intent was refused and is not in the journal: another event has its place, so that those behind it keep theirs."""
        place = self.state.calls[before.number].intent_seq - self._durable_seq - 1
        intent = self._events[place].body
        assert isinstance(intent, ToolCallInitiated)
        postponed = RetryScheduled(attempt=intent.attempt, at=self._clock.now(), turn=True)
        self._events[place] = structs.replace(self._events[place], event_id=self._clock.new_id(), body=postponed)
        self.state.take_back(intent, before, self._events[place])
        return intent

    @property
    def uncharged(self) -> Charge:
        """What the events that are not durable yet do to the budget."""
        reserved, spent = self._charged
        return Charge(self.state.reserved + -reserved, self.state.spent + -spent)

    def pack(self, encoded: bytes) -> Payload:
        """A payload for an event; what is too large to lie in place goes along as a blob in the same commit."""
        payload, blob = codec.pack(encoded, self._inline_bytes)
        if blob is not None:
            assert isinstance(payload.blob, str)
            self._blobs[payload.blob] = blob
        return payload

    def blob(self, digest: str) -> bytes | None:
        """A blob that is not durable yet, and that nobody else can read; None if it is none of those."""
        return self._blobs.get(digest)

    def consume(self, inbox_id: int) -> None:
        """An inbox row is dealt with: it goes away in the same commit as what was made of it."""
        self._consumed.append(inbox_id)

    def leave(self, inbox_id: int) -> None:
        """An inbox row was seen and cannot be dealt with here: it stays, and does not make the run ready by itself."""
        self._left.append(inbox_id)

    def append(self, row: RowChange | None = None) -> Append:
        """Everything recorded so far as one append. Nothing leaves the buffer before `saved`."""
        sealed = tuple(chain.seal_all(self._head, self._events))
        charge = self.uncharged if self.metered else None
        if self.metered:
            self._sent = (self.state.reserved, self.state.spent)
        return Append(
            self.lease,
            self._durable_seq,
            sealed,
            tuple(self._blobs.values()),
            row,
            tuple(self._consumed),
            tuple(self._left),
            charge,
            self._clock.now(),
        )

    def anew(self, append: Append) -> Append:
        """The very same, to be sent once more now."""
        return structs.replace(append, at=self._clock.now())

    def saved(self, append: Append) -> Sequence[Event]:
        """That append is durable: forget what it held. Returns its events."""
        count = len(append.events)
        saved = self._events[:count]
        assert [sealed.event.seq for sealed in append.events] == [event.seq for event in saved]
        del self._events[:count], self._consumed[: len(append.consumed)]
        for digest in list(self._blobs)[: len(append.blobs)]:
            del self._blobs[digest]
        self._charged = self._sent  # one append at a time: nothing else can have been charged meanwhile
        if append.events:
            self._head, self._durable_seq = append.events[-1].hash, append.events[-1].event.seq
        return saved

    def following(self, append: Append, body: ToolCallCompleted, *, call: int, cause: int, blobs: tuple[bytes, ...] = ()) -> Append:
        """One more event right behind an append that is being written in the same transaction. Not recorded yet: see `adopt`."""
        head, seq = (append.events[-1].hash, append.events[-1].event.seq) if append.events else (self._head, self._durable_seq)
        event = Event(seq + 1, self._clock.new_id(), self._clock.now(), self.lease.epoch, call, cause, body)
        return Append(self.lease, seq, (chain.seal(head, event),), blobs, charge=self._charge_of(event, body) if self.metered else None)

    def _charge_of(self, event: Event, done: ToolCallCompleted) -> Charge:
        assert event.call is not None
        call = self.state.calls[event.call]
        return Charge(-call.reserved, amounts_of(done.usage, busy_us=max(event.ts - call.started_at, 0)))

    def adopt(self, sealed: Sealed) -> Event:
        """An event that `following` made has become durable."""
        assert not self._events, "everything before it must be durable"
        self.state.apply(sealed.event)
        self._charged = (self.state.reserved, self.state.spent)
        if self.observe is not None:
            self.observe(sealed.event)
        self._head, self._durable_seq = sealed.hash, sealed.event.seq
        return sealed.event
