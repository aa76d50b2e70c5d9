"""Was this journal changed after it was written? Every edit is detected (G11): the stored bytes are hashed again.

The events are checked in order of seq, and the check ends at the first problem. For each event it checks the hash, the
encoding, the cause, the epoch and the blobs, and whether the event may follow the events before it. Then it checks the
run's row, and the other rows that must agree with the journal: approvals, budgets, the parent and the children. At the
end it reads the artifacts that the run has saved and its journal names, and checks their hashes.

One change is not detected here: the last events are deleted, and the row is changed to match. The journal-wide chain
shows this change (see chain.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec
from msgspec import Struct, structs

from perdure.core import identity
from perdure.core.events import (
    CheckpointTaken,
    Event,
    OutcomeReused,
    RunClaimed,
    RunCreated,
    RunReopened,
    decode_body,
    event_at,
)
from perdure.core.state import RunState, image_in, image_problem, payloads
from perdure.engine.api import Reading
from perdure.errors import InvalidInput, StoreCorrupt
from perdure.inspect.artifacts import artifact_problem
from perdure.inspect.consistency import Relatives, other_rows_problem
from perdure.inspect.projection import birth_problem, row_problem, specimen_problem
from perdure.store.api import Checkpoint, RunRow, Stored

LOOKS = 5  # if the run changes while it is verified, it is verified again, at most this many times


class Verdict(Struct, frozen=True):
    """The result for one run. `problem` is None if everything is as it was written."""

    run_id: str
    events: int
    head: str  # the hash of the last sound event: compare it with a copy from another place
    seq: int | None = None  # the seq of the first bad event
    problem: str | None = None
    projection: bool = False  # True: the journal is sound, but the run's row or another row contradicts it
    # Only for a redacted copy: the head of the run in the original journal. The content of the copy cannot be
    # verified.
    original_head: str | None = None


class Heading(Protocol):
    """The run id, the length and the head of a journal. A run's row and the line of a run in an export have these."""

    @property
    def run_id(self) -> str: ...
    @property
    def seq(self) -> int: ...
    @property
    def head(self) -> bytes: ...


class _Bad(Exception):
    def __init__(self, seq: int, problem: str) -> None:
        super().__init__(problem)
        self.seq = seq
        self.problem = problem


def verify_run(store: Reading, row: RunRow, relatives: Relatives | None = None) -> Verdict:
    """The verdict on the run. Read `row` before this call: then the journal has at least `row.seq` events.

    To verify many runs, pass the same `relatives` each time: then a parent's journal is read once for all its
    children.
    """
    verdict = _verdict(store, row, relatives or Relatives(store))
    for _ in range(LOOKS):
        try:
            later = store.get(row.run_id) if verdict.problem is not None and verdict.projection else None
        except StoreCorrupt as damage:
            return structs.replace(verdict, seq=None, problem=str(damage))
        if later is None or later == row:
            break
        # The run has changed since its row was read. This may explain the problem, so verify the run again.
        row = later
        verdict = _verdict(store, row, Relatives(store))
    return verdict


def _verdict(store: Reading, row: RunRow, relatives: Relatives) -> Verdict:
    stored = store.stored(row.run_id)
    beyond = [event for event in stored if isinstance(event.seq, int) and event.seq > row.seq]
    if beyond:
        later = store.get(row.run_id)
        if later is not None and later.seq >= beyond[-1].seq:
            # A worker has appended events since `row` was read. Leave out these events: `row` does not count them.
            stored = stored[: len(stored) - len(beyond)]
    checkpoint = store.checkpoint(row.run_id)
    verdict, checker = verify_journal(row, stored, store.blob, checkpoint)
    if verdict.problem is not None:
        return verdict
    of_row = row_problem if row.specimen is None else specimen_problem
    problem = of_row(row, checker.state, checker.events, checker.input_digest, checker.head)
    around = None if problem is not None else other_rows_problem(store, row, checker.state, checker.events, relatives)
    if around is not None:
        problem = around.problem
    if problem is None and (checkpoint.seq if checkpoint else 0) != checker.checkpoint:
        where = f"event {checker.checkpoint}" if checker.checkpoint else "its first event"
        problem = f"a resume reads it from event {checkpoint.seq if checkpoint else 1} on, and by its journal that is {where}"
    if problem is None:
        problem = artifact_problem(store, row.run_id, checker.events)
    imported = None if problem is not None else row.imported
    return Verdict(
        *(row.run_id, len(stored), checker.head.hex(), None if around is None else around.seq, problem),
        projection=problem is not None,
        original_head=None if imported is None else imported.original_head,
    )


def creation_of(store: Reading, row: RunRow) -> RunCreated:
    """The run's first event. StoreCorrupt if the hash chain does not lead from this event to the row's head.

    Read `row` before this call: then the journal has at least `row.seq` events.
    """
    stored = [one for one in store.stored(row.run_id) if not isinstance(one.seq, int) or one.seq <= row.seq]
    checkpoint = store.checkpoint(row.run_id)
    head, expected = identity.genesis(row.run_id), 0
    for place, one in enumerate(stored):
        expected += 1
        if place == 1 and checkpoint is not None and checkpoint.head is not None:
            head, expected = checkpoint.head, checkpoint.removed + 1
        if one.seq != expected or _link(head, one, expected) != one.hash:
            raise StoreCorrupt(f"event {expected} does not have the hash that the journal's chain gives it")
        head = one.hash
    if head != row.head:
        raise StoreCorrupt("the journal's chain does not lead to the head that the run's row has")
    try:
        created = decode_body(stored[0].data)
    except (msgspec.MsgspecError, UnicodeDecodeError, IndexError) as error:
        raise StoreCorrupt(f"its first event cannot be decoded: {error}") from None
    if not isinstance(created, RunCreated) or created.run_id != row.run_id:
        raise StoreCorrupt("its first event does not create it")
    if (problem := birth_problem(row, created)) is not None:
        raise StoreCorrupt(problem)
    return created


def verify_journal(
    row: Heading, stored: Sequence[Stored], blob: Callable[[str], bytes], checkpoint: Checkpoint | None = None
) -> tuple[Verdict, Verified]:
    """The verdict on the events alone, and the `Verified` that has folded them, up to the first bad event.

    `checkpoint`: which events were removed, and the hash from which the chain goes on.
    """
    checked = Verified(row, stored, blob, checkpoint)
    try:
        checked.check()
    except _Bad as bad:
        return Verdict(row.run_id, len(stored), checked.head.hex(), bad.seq, bad.problem), checked
    return Verdict(row.run_id, len(stored), checked.head.hex()), checked


class Verified:
    """Checks and folds the stored events once, from the first to the last."""

    def __init__(self, row: Heading, stored: Sequence[Stored], blob: Callable[[str], bytes], checkpoint: Checkpoint | None = None) -> None:
        self.state = RunState()
        self.events: list[Event] = []
        self.head = identity.genesis(row.run_id)
        self.input_digest = ""
        self._blob = blob
        self._row = row
        self._stored = stored
        self._blobs: set[str] = set()
        self._removed, self._removed_head = (checkpoint.removed, checkpoint.head) if checkpoint is not None else (0, None)
        self._held = set[int]()  # the removed events that the checkpoint after them holds
        self.checkpoint = 0  # where a resume begins to read

    def check(self) -> None:
        for index, stored in enumerate(self._stored):
            self._check_place(index, stored)
            self._check_link(index, stored)
            event = self._decoded(stored)
            self._check_sense(event)
            self._check_blobs(event)
            self._check_checkpoint(event)
            try:
                self.state.apply(event)
            except StoreCorrupt as error:
                raise _Bad(event.seq, f"it breaks the rules of a journal: {error}") from None
            self.events.append(event)
        self._check_end()

    # -- one event ----------------------------------------------------------------------------------------------------
    def _check_place(self, index: int, stored: Stored) -> None:
        expected = index + 1
        if self._removed and index:
            expected = self._removed + index
            if index == 1:
                assert self._removed_head is not None
                self.head = self._removed_head
        if stored.seq == expected and type(stored.seq) is int:
            return
        if isinstance(stored.seq, int) and stored.seq > expected:
            gone = f"event {expected} is" if stored.seq == expected + 1 else f"events {expected} to {stored.seq - 1} are"
            raise _Bad(expected, f"{gone} missing: event {stored.seq} is the next one that is there")
        raise _Bad(expected, f"where event {expected} should be, there is one with the number {stored.seq!r}")

    def _check_link(self, index: int, stored: Stored) -> None:
        computed = _link(self.head, stored, stored.seq)
        if computed is None or computed != stored.hash:  # None: a wrong type; `stored.hash` may be None too
            raise _Bad(stored.seq, self._why_broken(index, stored, computed))
        self.head = stored.hash

    def _why_broken(self, index: int, stored: Stored, computed: bytes | None) -> str:
        if index == 0 and (other := _run_id_of(stored)) not in (None, self._row.run_id):
            return f"the journal belongs to run {other!r}: the run's row or its first event was renamed"
        after = self._stored[index + 1] if index + 1 < len(self._stored) else None
        if computed is not None and (self._row.head == computed if after is None else _link(computed, after, after.seq) == after.hash):
            return "its hash was changed; the event itself is as it was written"
        if self._row.head == stored.hash if after is None else _link(stored.hash, after, after.seq) == after.hash:
            return "it is not what was written: its content does not have the hash that was recorded with it"
        if (was := self._written_as(stored)) is not None and was != stored.seq:
            return f"it is out of place: it was written as event {was}"
        return "hash mismatch: it, or the event before it, is not what was written"

    def _written_as(self, stored: Stored) -> int | None:
        """If events were swapped: the seq for which this event's hash is right. None if there is no such seq."""
        for position, other in enumerate(self._stored, 1):
            for seq in (position, position + 1):
                if _link(other.hash, stored, seq) == stored.hash:
                    return seq
        return None

    def _decoded(self, stored: Stored) -> Event:
        try:
            body = decode_body(stored.data)
        except (msgspec.MsgspecError, UnicodeDecodeError, TypeError) as error:
            raise _Bad(stored.seq, f"it cannot be decoded: {error}") from None
        return Event(stored.seq, _hex(stored.event_id), stored.ts, stored.epoch, stored.call, stored.cause, body)

    def _check_sense(self, event: Event) -> None:
        seq, body = event.seq, event.body
        if self._removed and seq == self._removed + 1 and not isinstance(body, CheckpointTaken):
            raise _Bad(seq, f"the events 2 to {self._removed} were removed, and it is no checkpoint")
        if event.cause is not None and not 1 <= event.cause < seq:
            raise _Bad(seq, f"it names event {event.cause} as its cause, which does not lie before it")
        if isinstance(body, RunCreated) != (seq == 1):
            raise _Bad(seq, "the first event, and no other, creates the run" + (f"; it is {event.type}" if seq == 1 else ""))
        if isinstance(body, RunCreated) and body.run_id != self._row.run_id:
            raise _Bad(seq, f"it creates run {body.run_id!r}, not this one")
        if isinstance(body, RunReopened) and not self._removed < body.back_to < seq:
            gone = f", and the events 2 to {self._removed} were removed" if body.back_to <= self._removed else ""
            raise _Bad(seq, f"it lets the run go back to event {body.back_to}{gone}: no worker can go on with this run")
        if isinstance(body, OutcomeReused) and event_at(self.events, body.of) is None and body.of not in self._held:
            raise _Bad(seq, f"it gives the agent the content of event {body.of}, which does not lie before it, or was removed")
        claimed = isinstance(body, RunClaimed)
        if self._removed and seq == self._removed + 1:
            return
        if event.epoch <= self.state.epoch if claimed else event.epoch != self.state.epoch:
            rule = f"a claim takes one above {self.state.epoch}" if claimed else f"without a claim it stays {self.state.epoch}"
            raise _Bad(seq, f"it has epoch {event.epoch}, and {rule}")

    def _check_checkpoint(self, event: Event) -> None:
        body = event.body
        if isinstance(body, CheckpointTaken):
            if event.seq == self._removed + 1:
                self._held = {one.seq for one in image_in(body).outcomes}
            else:
                problem = image_problem(self.state, body, self.events)
                if problem is not None:
                    raise _Bad(event.seq, f"it is no checkpoint of this run: {problem}")
            self.checkpoint = event.seq
        elif isinstance(body, RunReopened) and body.back_to < self.checkpoint:
            self.checkpoint = 0

    def _check_blobs(self, event: Event) -> None:
        for payload in payloads(event.body):
            if payload.inline is None and not isinstance(payload.blob, str):
                raise _Bad(event.seq, "it has a payload without a value: neither JSON nor the digest of a blob")
            if isinstance(payload.blob, str) and payload.blob not in self._blobs:
                try:
                    found = self._blob(payload.blob)
                except (StoreCorrupt, InvalidInput) as error:
                    raise _Bad(event.seq, str(error)) from None
                if len(found) != payload.size:
                    raise _Bad(event.seq, f"blob {payload.blob} has {len(found)} bytes, and the event says {payload.size}")
                self._blobs.add(payload.blob)
        if isinstance(event.body, RunCreated):
            self.input_digest = event.body.input.digest

    # -- the end ------------------------------------------------------------------------------------------------------
    def _check_end(self) -> None:
        row, last = self._row, self._stored[-1].seq if self._stored else 0
        if last == 0 and row.seq < 1:
            raise _Bad(1, f"it ends with event {row.seq}, and no journal is empty")
        if last < row.seq and (row.head != self.head or last == 0):
            gone = f"event {row.seq} is" if row.seq == last + 1 else f"events {last + 1} to {row.seq} are"
            raise _Bad(last + 1, f"{gone} missing: the journal ends with event {last}, and the run's row says that there are {row.seq}")


def _link(before: bytes, stored: Stored, seq: int) -> bytes | None:
    """The hash that this event must have if the previous hash is `before`; None if a field has a wrong type."""
    try:
        return identity.link(before, seq, _hex(stored.event_id), stored.ts, stored.epoch, stored.call, stored.cause, stored.data)
    except TypeError:
        return None


def _hex(event_id: Any) -> str:
    return event_id.hex() if isinstance(event_id, bytes) else str(event_id)


def _run_id_of(stored: Stored) -> str | None:
    try:
        body = decode_body(stored.data)
    except (msgspec.MsgspecError, UnicodeDecodeError, TypeError):
        return None
    return body.run_id if isinstance(body, RunCreated) else None
