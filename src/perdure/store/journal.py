"""The journal: append under the guard, read back what was appended. The one commit path of a running run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from perdure import shell
from perdure.core.events import ChildStarted, Event, ToolCallInitiated
from perdure.core.identity import genesis
from perdure.errors import NotFound, StoreCorrupt
from perdure.store import blobs, budgets
from perdure.store.api import FINISHED, Append, Appended, Committed, Refused, RowChange, Stored
from perdure.store.consequences import CONSEQUENTIAL, Consequences, may_be_refused
from perdure.store.cursor import Cursor, Gone, Row
from perdure.store.delivery import Delivery
from perdure.store.part import Means, Part
from perdure.store.rows import event_from

_COMMITTED = Committed()


class Journal(Part):
    """Appends and reads."""

    def __init__(self, means: Means) -> None:
        super().__init__(means)
        self._consequences = Consequences(Delivery(means.liveness))

    def append(self, batch: Sequence[Append]) -> list[Appended]:
        """One transaction for the whole batch; a refused append writes nothing and does not hinder the others."""
        called_s = time.monotonic()
        answers = self._database.write(
            lambda cursor: self._append_all(cursor, batch, called_s), lambda cursor, answers: self._arrived(cursor, batch, answers)
        )
        if concerns_others(batch, answers):
            self._bell.ring()
        return answers

    def transact(self, head: Append, work: Callable[[Any], tuple[Append, Any]]) -> tuple[Appended, Any]:
        """`head`, the tool's own writes and the Append it returns: one commit, or nothing."""
        tail: list[Append] = []
        called_s = time.monotonic()

        def both(cursor: Cursor) -> tuple[Appended, Any]:
            self._append_or_stop(cursor, head, called_s)
            try:
                with self._database.lend(cursor) as connection:
                    last, value = work(connection)
            except Gone:
                raise  # the database's doing: the call is given back as one that has not happened
            except BaseException as error:
                raise _ToolRaised(error) from None
            self._append_or_stop(cursor, last, called_s)
            tail.append(last)
            return _COMMITTED, value

        try:
            answer = self._database.write(
                both, lambda cursor, _: self._arrived(cursor, [head, *tail], [_COMMITTED, _COMMITTED]), again=False
            )
        except _Stopped as stopped:
            return stopped.answer, None
        except _ToolRaised as raised:
            error = raised.error
        else:
            if concerns_others([head, *tail], [_COMMITTED, _COMMITTED]):
                self._bell.ring()
            return answer
        raise error

    def read(self, run_id: str, after: int = 0) -> list[Event]:
        events = [event_from(run_id, row) for row in self._database.read("read_events", {"run_id": run_id, "after": after})]
        for seq, event in enumerate(events, after + 1):
            if event.seq != seq:
                raise StoreCorrupt(f"event {seq} of run {run_id} is missing; see what else is damaged: {shell.command('verify', run_id)}")
        return events

    def stored(self, run_id: str) -> list[Stored]:
        return [Stored(*row) for row in self._database.read("stored_events", {"run_id": run_id})]

    def hash_at(self, run_id: str, seq: int) -> bytes:
        """The hash of the event at seq; before the first one, what the chain begins with."""
        if seq == 0:
            return genesis(run_id)
        rows = self._database.read("hash_at", (run_id, seq))
        if not rows:
            raise NotFound(f"run {run_id} has no event {seq}")
        found: bytes = rows[0][0]
        return found

    def _append_all(self, cursor: Cursor, batch: Sequence[Append], called_s: float) -> list[Appended]:
        answers: list[Appended] = []
        rows: list[Row] = []
        for append in batch:
            run_id = append.lease.run_id
            key = self._keys.get(run_id) or self._look_up_key(cursor, run_id)
            if key is None:
                answers.append(Refused(f"there is no run {run_id}"))
                continue
            before = len(rows)
            following, last_ts = _collect(append, key, rows)
            answer = self._append_one(cursor, append, key, following, last_ts, called_s)
            answers.append(answer)
            if answer is not _COMMITTED:
                del rows[before:]
                continue
            if append.blobs:
                blobs.put(cursor, key, append.blobs)
            if append.row is not None and gives_up(append.row):
                self._keys.pop(run_id, None)  # or the keys of a worker's whole life would pile up
        cursor.each("insert_event", rows)
        return answers

    def _append_one(self, cursor: Cursor, append: Append, key: int, events: list[Event], last_ts: int, called_s: float) -> Appended:
        """The guard, and what follows from these events of it. Anything but Committed means that nothing was written."""
        undoable = bool(events) and may_be_refused(events)
        if undoable:
            cursor.change("begin_append")
        answer = _advance(cursor, append, key, last_ts)
        if append.charge is not None and answer is _COMMITTED:
            budgets.charge(cursor, key, append.charge)
        if events and answer is _COMMITTED:
            # Others may have had the write lock for long: what they took counts as well.
            waited_us = round((time.monotonic() - called_s) * 1e6)
            answer = self._consequences.follow(cursor, key, events, append.at + waited_us) or _COMMITTED
        if undoable:
            if answer is not _COMMITTED:
                cursor.change("undo_append")
            cursor.change("keep_append")
        return answer

    def _append_or_stop(self, cursor: Cursor, append: Append, called_s: float) -> None:
        (answer,) = self._append_all(cursor, [append], called_s)
        if answer is not _COMMITTED:
            raise _Stopped(answer)

    def _look_up_key(self, cursor: Cursor, run_id: str) -> int | None:
        found = cursor.one("run_key", (run_id,))
        if found is None:
            return None
        self._keys[run_id] = found[0]
        return self._keys[run_id]

    def _arrived(self, cursor: Cursor, batch: Sequence[Append], answers: list[Appended]) -> bool:
        """Whether the transaction is there: it was one commit, so that a single event of ours proves it whole."""
        absent = False
        for place, append in enumerate(batch):
            if answers[place] is not _COMMITTED:
                continue
            found = None
            if append.events:
                key = self._look_up_key(cursor, append.lease.run_id)
                found = cursor.one("event_at", (key, append.expected_seq + 1))
            if found is None:
                absent = True
            elif found[0] == append.events[0].hash:
                return True
            else:
                answers[place] = Refused(f"run {append.lease.run_id}: another worker has written event {append.expected_seq + 1}")
        return not absent  # False: whoever asked may append the same events again


def _advance(cursor: Cursor, append: Append, key: int, last_ts: int) -> Appended:
    """The guard and the projection in one UPDATE. Anything but Committed means that nothing was written."""
    lease, row, events, before = append.lease, append.row, append.events, append.expected_seq
    head = events[-1].hash if events else None
    guarded = (before + len(events), head, last_ts, key, lease.epoch, lease.nonce, lease.worker, before)
    if row is None:
        moved = cursor.change("advance", guarded)
    elif not gives_up(row):
        moved = cursor.change("advance_and_project", (*guarded, row.status, row.waiting_for, row.error, row.progress, row.attention))
    else:
        ready_at = None if row.status in FINISHED else wake_at(append) if _is_woken(cursor, append, key) else row.ready_at
        released = (row.status, row.waiting_for, row.error, row.progress, row.attention, ready_at)
        moved = cursor.change("advance_and_release", (*guarded, *released))
    if moved != 1:
        why = refusal(cursor, append, key)
        assert why is not None, append.lease
        return why
    if append.consumed:
        cursor.each("consume_inbox", [(inbox_id, key) for inbox_id in append.consumed])
    return _COMMITTED


def _is_woken(cursor: Cursor, append: Append, key: int) -> bool:
    """Whether what has arrived while the holder gives the run up makes it ready at once. What reaches a run that has just finished changes
    nothing any more, and stays: its sender was told that it has arrived."""
    if wake_at(append) is None:
        return False
    return cursor.one("unread_inbox_of_run", (key, msgspec.json.encode(append.consumed + append.left).decode())) is not None


def wake_at(append: Append) -> int | None:
    """When a run that is given up is ready, should something unread lie in its inbox; None: whenever it would be anyway."""
    if append.row is not None and append.row.attention == "error":
        return None  # it cannot be driven at all, and stands still for a person, whatever lies there: it would only be claimed for ever
    return append.events[-1].event.ts if append.events else 0


def latest(append: Append) -> int:
    """The latest time that its events tell; not the last one's, when the clock was set back in between."""
    last = 0
    for sealed in append.events:
        if sealed.event.ts > last:
            last = sealed.event.ts
    return last


def gives_up(row: RowChange) -> bool:
    """Whether the run has no holder after this."""
    # Nobody holds a finished run, whatever the change says about `release`.
    return row.release or row.status in FINISHED


def _collect(append: Append, key: int, rows: list[Row]) -> tuple[list[Event], int]:
    """Its rows as `event_row` has them, the events from which something follows, and the latest time that they tell."""
    seq, epoch, last_ts = append.expected_seq, append.lease.epoch, 0
    following: list[Event] = []
    for sealed in append.events:
        event = sealed.event
        seq, ts, body = seq + 1, event.ts, event.body
        assert event.seq == seq and event.epoch == epoch, (append.lease, event.seq, seq)
        rows.append((key, seq, bytes.fromhex(event.event_id), ts, epoch, event.call, event.cause, sealed.data.decode(), sealed.hash))
        if ts > last_ts:
            last_ts = ts  # not the last event's: the clock may have been set back in between
        if type(body) in CONSEQUENTIAL or (type(body) is ToolCallInitiated and body.approval is not None):
            following.append(event)
    return following, last_ts


def concerns_others(batch: Sequence[Append], answers: Sequence[Appended]) -> bool:
    """Whether these appends leave something for another worker to do now: a run that was given up, a child, the end of one."""
    # Lists, here and below: this is asked about every commit, and a generator costs more than what it saves.
    return True in [isinstance(answer, Committed) and leaves_work(append) for append, answer in zip(batch, answers, strict=True)]


def leaves_work(append: Append) -> bool:
    """Whether another worker has to hear of this append, once it is committed."""
    row, events = append.row, append.events
    if row is not None and row.status in FINISHED:
        return "/" in append.lease.run_id  # a child: its parent has heard of it
    if row is not None and row.release and row.ready_at is not None:
        # A worker that sleeps until then looks again long before: only what is ready now is worth a ring.
        return not events or row.ready_at <= events[-1].event.ts
    return ChildStarted in [type(sealed.event.body) for sealed in events]


def refusal(cursor: Cursor, append: Append, key: int) -> Refused | None:
    """Which part of the guard does not hold, in words; None when all of it does."""
    lease = append.lease
    status, seq, epoch, holder, nonce = cursor.all("guard_of_run", (key,))[0]
    if status in FINISHED:
        return Refused(f"run {lease.run_id} has finished ({status})")
    if holder is None:
        return Refused(f"run {lease.run_id} is no longer held by worker {lease.worker}: it was given up or taken away")
    if (holder, epoch, nonce) != (lease.worker, lease.epoch, lease.nonce):
        return Refused(
            f"run {lease.run_id} is held by worker {holder} under epoch {epoch}, not by {lease.worker} under epoch {lease.epoch}"
        )
    if seq != append.expected_seq:
        return Refused(f"run {lease.run_id} is at event {seq}, not at {append.expected_seq}")
    return None


class _Stopped(Exception):
    """The guard did not hold: leave the transaction with this answer."""

    def __init__(self, answer: Appended) -> None:
        self.answer = answer


class _ToolRaised(Exception):
    """Carries what a tool raised out of the transaction, so that it is not taken for an error of the journal."""

    def __init__(self, error: BaseException) -> None:
        self.error = error
