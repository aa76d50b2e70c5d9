"""The journal: appends under the guard, and reads. A run that is held is written only by these appends."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from perdure import shell
from perdure.core.events import CheckpointTaken, ChildStarted, Event, ToolCallInitiated
from perdure.core.identity import genesis
from perdure.errors import NotFound, StoreCorrupt
from perdure.store import blobs, limits
from perdure.store.api import FINISHED, Append, Appended, Checkpoint, Committed, Recorded, Refused, RowChange, Stored
from perdure.store.cursor import ConnectionGone, Cursor, Row
from perdure.store.delivery import Delivery
from perdure.store.part import Means, Part
from perdure.store.projections import CONSEQUENTIAL, Consequences, may_be_refused
from perdure.store.rows import event_from

_COMMITTED = Committed()
_from_hex = bytes.fromhex
LINK_EVERY = 8  # the first commit that releases runs links the journal-wide chain, and then every 8th such commit
LAST_SEQ = (1 << 32) - 1  # no event has a higher number


class Journal(Part):
    """Appends events, and reads them."""

    def __init__(self, means: Means) -> None:
        super().__init__(means)
        self._consequences = Consequences(Delivery(means.liveness))
        self._released = 0  # how many commits of this process have released runs

    def append(self, batch: Sequence[Append]) -> list[Appended]:
        """Write the whole batch in one transaction. A refused append writes nothing and does not stop the others."""
        called_s = time.monotonic()
        answers = self._database.write(
            lambda cursor: self._append_all(cursor, batch, called_s), lambda cursor, answers: self._arrived(cursor, batch, answers)
        )
        if concerns_others(batch, answers):
            self._bell.ring()
        if self._bell.watched:
            self._bell.moved({append.lease.run_id for append in batch})
        return answers

    def transact(self, head: Append, work: Callable[[Any], tuple[Append, Any]]) -> tuple[Appended, Any]:
        """Commit `head`, the tool's own writes, and the Append that `work` returns: all together, or nothing."""
        tail: list[Append] = []
        called_s = time.monotonic()

        def both(cursor: Cursor) -> tuple[Appended, Any]:
            self._append_or_stop(cursor, head, called_s)
            try:
                with self._database.lend(cursor) as connection:
                    last, value = work(connection)
            except ConnectionGone:
                raise  # the database failed, not the tool: the engine learns that nothing was written
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
            if self._bell.watched:
                self._bell.moved([head.lease.run_id])
            return answer
        raise error

    def read(self, run_id: str, after: int = 0, limit: int | None = None) -> list[Event]:
        wanted = {"run_id": run_id, "after": after, "until": LAST_SEQ if limit is None else after + limit}
        return _in_order(run_id, after, self._database.read("read_events", wanted))

    def recorded(self, run_id: str) -> Recorded:
        rows = self._database.read("read_events", {"run_id": run_id, "after": 0, "until": LAST_SEQ})
        return Recorded(run_id, _in_order(run_id, 0, rows), [row[-1] for row in rows])

    def read_life(self, run_id: str) -> list[Event]:
        return _in_order(run_id, 0, self._database.read("read_life", {"run_id": run_id}))

    def checkpoint(self, run_id: str) -> Checkpoint | None:
        rows = self._database.read("checkpoint_of_run", (run_id,))
        return Checkpoint(*rows[0]) if rows else None

    def removed(self) -> dict[str, tuple[int, bytes]]:
        return {run_id: (seq, head) for run_id, seq, head in self._database.read("removed_events")}

    def read_many(self, after: Mapping[str, int], limit: int) -> dict[str, list[Event]]:
        wanted = {"after": msgspec.json.encode(after).decode(), "limit": limit}
        rows: dict[str, list[Row]] = {run_id: [] for run_id in after}
        for run_id, *row in self._database.read("read_events_of_runs", wanted):
            rows[run_id].append(tuple(row))
        return {run_id: _in_order(run_id, after[run_id], rows[run_id]) for run_id in after}

    def stored(self, run_id: str) -> list[Stored]:
        return [Stored(*row) for row in self._database.read("stored_events", {"run_id": run_id})]

    def hash_at(self, run_id: str, seq: int) -> bytes:
        """The hash of the event at seq; for seq 0, the start of the hash chain."""
        if seq == 0:
            return genesis(run_id)
        rows = self._database.read("hash_at", (run_id, seq))
        if not rows and (checkpoint := self.checkpoint(run_id)) is not None and checkpoint.removed == seq and checkpoint.head is not None:
            return checkpoint.head
        if not rows:
            raise NotFound(f"run {run_id} has no event {seq}")
        found: bytes = rows[0][0]
        return found

    def hashes(self, run_id: str, after: int, limit: int) -> list[bytes]:
        return [row[0] for row in self._database.read("hashes_of_run", {"run_id": run_id, "after": after, "until": after + limit})]

    def _append_all(self, cursor: Cursor, batch: Sequence[Append], called_s: float) -> list[Appended]:
        answers: list[Appended] = []
        rows: list[Row] = []
        released = False
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
            if append.row is not None and ends_lease(append.row):
                # The run is released, so its key is not needed any more. Without this, the cache would grow for ever.
                self._keys.pop(run_id, None)
                released = True
        cursor.each("insert_event", rows)
        if released:
            # A link costs as much as a small append, and covers all entries since the last link. So link rarely.
            if self._released % LINK_EVERY == 0:
                cursor.link_chain()
            self._released += 1
        return answers

    def _append_one(self, cursor: Cursor, append: Append, key: int, events: list[Event], last_ts: int, called_s: float) -> Appended:
        """Check the guard, and write the consequences of `events`. If the answer is Refused, nothing was written."""
        if not events and append.charge is None:
            return _advance(cursor, append, key, last_ts)  # the common case
        undoable = may_be_refused(events)
        if undoable:
            cursor.change("begin_append")
        answer = _advance(cursor, append, key, last_ts)
        if append.charge is not None and answer is _COMMITTED:
            limits.charge(cursor, key, append.charge)
        if events and answer is _COMMITTED:
            # This append may have waited long for the write lock. Add that time, since an approval may have expired.
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
        """Was the transaction committed? One event of the batch in a journal proves that the whole batch is there."""
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
        return not absent  # False: the caller may append the same events again


def _in_order(run_id: str, after: int, rows: Sequence[Row]) -> list[Event]:
    """The events in these rows. StoreCorrupt if one of them is missing or cannot be decoded.

    Only the events before a checkpoint may be missing: they were not asked for, or were removed.
    """
    events = [event_from(run_id, row) for row in rows]
    seq = after
    for place, event in enumerate(events):
        seq += 1
        if event.seq != seq:
            if event.seq > seq and place <= 1 and type(event.body) is CheckpointTaken:
                seq = event.seq
                continue
            raise StoreCorrupt(
                f"event {seq} of run {run_id} is missing", hint=f"see what else is damaged: {shell.command('verify', run_id)}"
            )
    return events


def _advance(cursor: Cursor, append: Append, key: int, last_ts: int) -> Appended:
    """Check the guard and update the run's row, in one UPDATE. If the answer is Refused, nothing was written."""
    lease, row, events, before = append.lease, append.row, append.events, append.expected_seq
    head = events[-1].hash if events else None
    guarded = (before + len(events), head, last_ts, key, lease.epoch, lease.nonce, lease.worker, before)
    if row is None:
        moved = cursor.change("advance", guarded)
    elif not ends_lease(row):
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
    """Is there unread post that makes the run ready at once when the run is released?

    False for a run that cannot be driven: see `wake_at`. Do not call this for a run that finishes: its ready_at is
    None, and its unread post stays in the inbox, because the sender was told that the post has arrived.
    """
    if wake_at(append) is None:
        return False
    return cursor.one("unread_inbox_of_run", (key, msgspec.json.encode(append.consumed + append.left).decode())) is not None


def wake_at(append: Append) -> int | None:
    """When a released run with unread post is ready. None: the post does not change the run's ready_at."""
    if append.row is not None and append.row.attention == "error":
        # The run cannot be driven at all, and waits for a person. If post made it ready, workers would claim it again
        # and again.
        return None
    return append.events[-1].event.ts if append.events else 0


def latest(append: Append) -> int:
    """The latest time of the append's events. If the clock was set back, this is not the time of the last event."""
    last = 0
    for sealed in append.events:
        if sealed.event.ts > last:
            last = sealed.event.ts
    return last


def ends_lease(row: RowChange) -> bool:
    """Does this change end the lease, so that the run has no holder?"""
    # A finished run is never held, whatever the change says about `release`.
    return row.release or row.status in FINISHED


def _collect(append: Append, key: int, rows: list[Row]) -> tuple[list[Event], int]:
    """Add the rows of the append's events to `rows`, in the form of `event_row`.

    Returns the events that have consequences, and the latest time of the events.
    """
    seq, epoch, last_ts = append.expected_seq, append.lease.epoch, 0
    following: list[Event] = []
    for sealed in append.events:
        event = sealed.event
        ts, body = event.ts, event.body
        kind = type(body)
        seq += 1
        assert event.seq == seq and event.epoch == epoch, (append.lease, event.seq, seq)
        rows.append((key, seq, _from_hex(event.event_id), ts, epoch, event.call, event.cause, sealed.data.decode(), sealed.hash))
        if ts > last_ts:
            last_ts = ts  # the maximum, not the time of the last event: the clock may have been set back in between
        if kind in CONSEQUENTIAL or (kind is ToolCallInitiated and body.approval is not None):  # type: ignore[union-attr]
            following.append(event)
    return following, last_ts


def concerns_others(batch: Sequence[Append], answers: Sequence[Appended]) -> bool:
    """Do these appends leave work for another worker now: a released run, a new child, the end of a child?"""
    return any(leaves_work(append) and isinstance(answer, Committed) for append, answer in zip(batch, answers, strict=True))


def leaves_work(append: Append) -> bool:
    """Does this append, once committed, leave work for another worker?"""
    row, events = append.row, append.events
    if row is not None:
        if row.status in FINISHED:
            return "/" in append.lease.run_id  # a child: its parent has got a `child_finished`
        if row.release and row.ready_at is not None:
            # Ring only for a run that is ready now. Workers find a run that is ready later without a bell.
            return not events or row.ready_at <= events[-1].event.ts
    # A plain loop: this code runs for every append, and a generator or a list would be slower.
    for sealed in events:  # noqa: SIM110
        if type(sealed.event.body) is ChildStarted:
            return True
    return False


def refusal(cursor: Cursor, append: Append, key: int) -> Refused | None:
    """Which part of the guard does not hold, in words. None: the whole guard holds."""
    lease = append.lease
    status, seq, epoch, holder, nonce = cursor.all("guard_of_run", (key,))[0]
    if status in FINISHED:
        return Refused(f"run {lease.run_id} has finished ({status})")
    if holder is None:
        return Refused(f"run {lease.run_id} is no longer held by worker {lease.worker}: it was released or lost")
    if (holder, epoch, nonce) != (lease.worker, lease.epoch, lease.nonce):
        return Refused(
            f"run {lease.run_id} is held by worker {holder} under epoch {epoch}, not by {lease.worker} under epoch {lease.epoch}"
        )
    if seq != append.expected_seq:
        return Refused(f"run {lease.run_id} is at event {seq}, not at {append.expected_seq}")
    return None


class _Stopped(Exception):
    """An append was refused: roll the transaction back, and return this answer."""

    def __init__(self, answer: Appended) -> None:
        self.answer = answer


class _ToolRaised(Exception):
    """Carries a tool's exception out of the transaction, so that it is not treated as an error of the database."""

    def __init__(self, error: BaseException) -> None:
        self.error = error
