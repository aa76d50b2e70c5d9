"""Writes to a run from outside: creates it, posts to it for people and other runs, and ends it without its agent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

from msgspec import structs

from perdure import shell
from perdure.core import identity
from perdure.core.budget import NOTHING, amounts_of
from perdure.core.events import (
    AnyBody,
    BudgetRaised,
    CancelRequested,
    Event,
    FrameChanged,
    RunAdopted,
    RunCancelled,
    RunCreated,
    RunFailed,
    RunPaused,
    RunReopened,
    RunSucceeded,
    SignalReceived,
    Terminal,
    ToolCallResolved,
)
from perdure.core.identity import seal
from perdure.errors import AlreadyRunning, Conflict, NotFound, RunEnded
from perdure.store import family, limits, queues
from perdure.store.api import FINISHED, Charge, InboxRow, NewRun, Reopen, RunRow, Status, Tombstone
from perdure.store.creation import insert_run
from perdure.store.cursor import Cursor, Row
from perdure.store.delivery import OF_APPROVALS, Delivery, Letter, journal_unread
from perdure.store.part import Means, Part
from perdure.store.projections import Consequences
from perdure.store.rows import body_or_none, check_not_ended, event_row, has_arrived, inbox_row, key_of, run_row

_ERROR_CHARS = 500  # how much of an error message the run's row has; the journal has the whole message
_STATUS: dict[type, Status] = {RunSucceeded: "succeeded", RunFailed: "failed", RunCancelled: "cancelled"}


class Mailbox(Part):
    """Writes to runs that the caller does not hold."""

    def __init__(self, means: Means) -> None:
        super().__init__(means)
        self._delivery = Delivery(means.liveness)
        self._consequences = Consequences(self._delivery)

    def create_run(self, new: NewRun) -> tuple[RunRow, bool]:
        (answer,) = self._create([new])
        return answer

    def create_run_on(self, connection: Any, new: NewRun) -> tuple[RunRow, bool]:
        with self._database.join(connection) as cursor:
            row, created = _created(cursor, new)
            if created:
                cursor.ring_at_commit()
        return row, created

    def create_runs(self, news: Sequence[NewRun]) -> list[tuple[RunRow, bool]]:
        return self._create(news)

    def _create(self, news: Sequence[NewRun]) -> list[tuple[RunRow, bool]]:
        # After a commit with unknown outcome, either all runs exist or no run does. It is safe to create the same ids
        # again.
        answers = self._database.write(
            lambda cursor: [_created(cursor, new) for new in news],
            lambda cursor, _: all(cursor.one("run_key", (new.run_id,)) is not None for new in news),
        )
        if any(created for _, created in answers):
            self._bell.ring()
        return answers

    def post(
        self,
        run_id: str,
        call: int | None,
        body: AnyBody,
        *,
        event_id: str,
        now: int,
        status: Status | None = None,
        expect: Callable[[RunRow], None] | None = None,
        lost: bool = False,
    ) -> bool:
        """Post an event to a run.

        True: the event is in the journal. The answer is also True for a signal that the run has had before.

        `lost`: the same signal was sent before in a statement of its own, and the outcome of that statement is
        unknown. The first signal may have arrived, or may still arrive.
        """

        def deliver(cursor: Cursor) -> tuple[bool, bool]:
            if lost and cursor.one("run_to_change", (run_id,)) is not None and has_arrived(cursor, run_id, event_id):
                return True, False
            found = _unfinished(cursor, run_id)
            if lost and isinstance(body, SignalReceived) and body.key is None:
                # The first signal has not arrived, and the second is posted below. Remember the signal, so that the
                # first is refused if it arrives later.
                cursor.change("remember_signal", (key_of(found), body.topic, stands_for(event_id)))
            row = run_row(found)
            # Ask only once whether the run is held. If the holder is dead, the event is appended right here, so
            # `expect` gets a row without a holder.
            held = self._delivery.holds(row.holder)
            if expect is not None:
                expect(row if held else structs.replace(row, holder=None))
            if isinstance(body, RunAdopted | FrameChanged) and held:
                # The holder continues with its own code and would not append this event. So the row must not get the
                # new version.
                raise AlreadyRunning(f"run {run_id} is held by a worker that is not known to be dead; stop that process first")
            if not _is_news(cursor, found, body):
                return True, False
            appended = self._delivery.deliver(cursor, found, Letter(call, body, event_id, now), status, held=held)
            if appended and isinstance(body, ToolCallResolved):
                # Charge the usage in this very commit, as a holder does: the journal and the ledger must never differ.
                limits.charge(cursor, key_of(found), Charge(reserved=NOTHING, spent=amounts_of(body.usage)))
            return appended, True

        # A repeated signal (done[1] is False) writes no event that `arrived` could look for. Its answer is right
        # without a commit.
        appended, _ = self._database.write(deliver, lambda cursor, done: not done[1] or has_arrived(cursor, run_id, event_id))
        self._bell.ring()
        return appended

    def end(self, run_id: str, body: AnyBody, *, event_id: str, now: int, expect: Callable[[RunRow], None] | None = None) -> None:
        assert isinstance(body, Terminal), body

        def finish(cursor: Cursor) -> None:
            _lock_parent(cursor, run_id)
            found = _unfinished(cursor, run_id)
            # Lock the children's rows before any budget's row. A child that charges locks its own row first and then
            # waits for the budget's row: with another order the two transactions could deadlock.
            below = cursor.all("family_to_change", {"run_id": run_id})
            row, key = run_row(found), key_of(found)
            if self._delivery.holds(row.holder):
                name, _ = cursor.one("worker_by_id", (str(row.holder),)) or (row.holder, 0)
                raise AlreadyRunning(
                    f"run {run_id} is held by a worker", hint=f"cancel it and let worker {name} end it, or stop that process"
                )
            if expect is not None:
                expect(row)
            sealed = seal(row.head, Event(row.seq + 1, event_id, now, row.epoch, None, row.seq, body))
            error = f"{body.failure.type}: {body.failure.message}"[:_ERROR_CHARS] if isinstance(body, RunFailed) else None
            values = {"id": key, "seq": row.seq + 1, "head": sealed.hash, "now": now, "status": _STATUS[type(body)], "error": error}
            cursor.change("end_unheld", values)
            cursor.change("insert_event", event_row(key, sealed))
            self._consequences.end(cursor, key, family.relations(cursor, key), sealed.event, body)
            family.cancel_children(cursor, self._delivery, run_id, below, now)

        self._database.write(finish, lambda cursor, _: has_arrived(cursor, run_id, event_id))
        self._bell.ring()

    def reopen(self, runs: Sequence[Reopen], *, now: int) -> None:
        def write(cursor: Cursor) -> None:
            # All runs are locked before any budget, and a parent before its child. That is the order of other writes.
            ordered = sorted(runs, key=lambda one: (one.run_id.count("/"), one.run_id))
            for one, found in [(one, cursor.one("run_to_change", (one.run_id,))) for one in ordered]:
                self._reopen(cursor, one, found, now)

        # After a commit with unknown outcome, either all runs are reopened or none is. So it is enough to check one
        # run.
        self._database.write(write, lambda cursor, _: has_arrived(cursor, runs[0].run_id, runs[0].events[0][2]))
        self._bell.ring()

    def _reopen(self, cursor: Cursor, one: Reopen, found: Row | None, now: int) -> None:
        if found is None:
            raise NotFound(f"there is no run {one.run_id}", hint="`perdure list` shows the runs")
        row, key = run_row(found), key_of(found)
        row.check_live()  # a specimen is never reopened
        if self._delivery.holds(row.holder):
            raise AlreadyRunning(f"run {one.run_id} is held by a worker that is not known to be dead; pause it first")
        if row.status == "succeeded" or row.seq != one.seen:
            raise Conflict(f"run {one.run_id} has moved on: it is {row.status} and has {row.seq} events, not {one.seen}; look at it again")
        check_not_ended(found)  # a run that has succeeded is not reopened, even if its row was edited
        row.check_not_restored()
        if cursor.one("run_by_id", (identity.undo_id(one.run_id),)) is not None:
            # The undo was started after the reopening was planned. The lock of the run's row keeps others out until the
            # commit.
            raise Conflict(f"run {one.run_id} is being undone by run {identity.undo_id(one.run_id)}, so it cannot go on; start a new run")
        body = one.events[0][0]
        assert isinstance(body, RunReopened), body
        _, removed = cursor.one("checkpoint_to_change", (key,)) or (0, 0)
        if body.back_to <= removed:
            # These events were removed after the reopening was planned, and that does not change the number of events. If it
            # goes back to a later event, all that it reuses is in the checkpoint, or later than it.
            raise Conflict(
                f"run {one.run_id} cannot go back to event {body.back_to}: its events 2 to {removed} were removed by prune --before-checkpoint"
            )
        found = _settle_unread(cursor, found, body, now)
        row = run_row(found)
        head, reopened = row.head, row.seq + 1
        events = []
        for seq, (written, call, event_id) in enumerate(one.events, reopened):
            sealed = seal(head, Event(seq, event_id, now, row.epoch, call, row.seq if seq == reopened else reopened, written))
            events.append(event_row(key, sealed))
            head = sealed.hash
        cursor.change("reopen_run", {"id": key, "seq": row.seq + len(events), "head": head, "now": now})
        cursor.each("insert_event", events)
        cursor.change("leave_checkpoint", {"run": key, "back_to": body.back_to})
        for call in body.withdrawn:
            cursor.change("withdraw_approval_of_call", {"run": key, "call": call, "ts": now})
        for one_call in body.unsettled:
            limits.charge(cursor, key, Charge(reserved=NOTHING, spent=amounts_of(one_call.usage)))
        for raised, _, _ in one.events:
            if isinstance(raised, BudgetRaised):
                limits.raise_limits(cursor, key, one.run_id, raised)
        if one.version is not None:
            queues.move(cursor, key, one.version)

    def inbox(self, worker: str) -> list[InboxRow]:
        return [inbox_row(row) for row in self._database.read("inbox_of_worker", (worker,))]

    def unread(self, run_id: str) -> list[InboxRow]:
        return [inbox_row(row) for row in self._database.read("inbox_of_run", (run_id,))]


def _settle_unread(cursor: Cursor, found: Row, reopened: RunReopened, now: int) -> Row:
    """Journal the posts that no worker has read and that belong to the events that are superseded now. Returns the new row.

    These are a cancel, a pause, and votes and decisions about an approval that is withdrawn. Their senders were told that
    the posts will reach the run, so they must not vanish. If they stayed in the inbox, a later post would journal them
    after `run_reopened`, where no approval is open. If the run has ended, they came too late: they are deleted.
    """

    def is_superseded(body: AnyBody, call: int | None) -> bool:
        return isinstance(body, CancelRequested | RunPaused) or (isinstance(body, OF_APPROVALS) and (call in reopened.withdrawn or ended))

    row = run_row(found)
    ended = row.status in FINISHED
    if not ended:
        return journal_unread(cursor, found, now, is_superseded)
    for inbox_id, call, _, data in cursor.all("unread_of_run", (key_of(found),)):
        body = body_or_none(data, f"inbox row {inbox_id} of run {row.run_id}")
        if body is not None and is_superseded(body, call):
            cursor.change("consume_inbox", (inbox_id, key_of(found)))
    return found


def stands_for(event_id: str) -> str:
    """The key in `perdure_signals` for a signal that has no key. No key of a user begins with "!"."""
    return f"!{event_id}"


def _created(cursor: Cursor, new: NewRun) -> tuple[RunRow, bool]:
    found = cursor.one("run_by_id", (new.run_id,))
    if found is not None:
        _check_no_specimen(new, run_row(found))
        return run_row(found), False
    if (undone := identity.undone_by(new.run_id)) is not None:
        # The lock: the run cannot be reopened between this look and the commit.
        root = cursor.one("run_to_change", (undone,))
        if root is not None:
            run_row(root).check_live()
            _check_as_planned(new, run_row(root))
            if removed := cursor.all("removed_in_family", {"root": undone}):
                # They were removed after the undo was planned. A worker that goes on with the undo later needs them.
                run_id, last = removed[0]
                raise Conflict(
                    f"run {undone} cannot be undone: the events 2 to {last} of run {run_id} were removed by prune --before-checkpoint, and with "
                    "them what its calls did; undo these effects by hand"
                )
    # Another process may have created a run with this id since the query above. Then `insert_run` creates nothing, and
    # the next query finds that run.
    created = insert_run(cursor, new)
    found = cursor.one("run_by_id", (new.run_id,))
    if found is None:
        raise pruned_id(cursor, new)
    _check_no_specimen(new, run_row(found))
    return run_row(found), created


def _check_as_planned(new: NewRun, row: RunRow) -> None:
    """Conflict if the run has gone on since its undo was planned: the plan does not have its newest effects."""
    if new.undoes is not None and row.seq != new.undoes:
        raise Conflict(
            f"run {row.run_id} has been reopened since its undo was planned: it is {row.status.replace('_', ' ')} and has {row.seq} events, "
            f"not {new.undoes}; nothing was undone; look at it again"
        )


def _check_no_specimen(new: NewRun, row: RunRow) -> None:
    """Conflict if the id is the id of a specimen: its result is not a result of this journal."""
    assert isinstance(new.created, RunCreated), new.created
    if row.specimen is not None and row.tenant != new.created.tenant:
        raise Conflict(f"the run id {row.run_id} is taken; choose another")
    if row.specimen is not None:
        raise Conflict(
            f"run {row.run_id} is a specimen here: an imported copy, to be looked at; no run with this id can be started",
            hint=f"choose another id, or delete the specimen: perdure prune --specimen {shell.quote(row.run_id)}",
        )


def pruned_id(cursor: Cursor, new: NewRun) -> Conflict:
    """The error for an id whose run, or whose family, was pruned: the id cannot be used again."""
    run_id = new.run_id
    found = cursor.one("tombstone", (run_id,)) or cursor.one("tombstone", (run_id.partition("/")[0],))
    assert found is not None, run_id
    tombstone = Tombstone(*found[1:])
    assert isinstance(new.created, RunCreated), new.created
    if tombstone.tenant != new.created.tenant:
        # The same words as for a run of another tenant that was not pruned: the caller may learn only that the id is
        # taken.
        return Conflict(f"the run id {run_id} is taken; choose another")
    at = datetime.fromtimestamp(tombstone.pruned_at // 1_000_000, UTC).date().isoformat()
    return Conflict(
        f"run {tombstone.run_id} ran ({tombstone.status}, {tombstone.events} events) and was pruned on {at} by {tombstone.by}: "
        "its id cannot be used again, because its effects could happen twice; choose another id"
    )


def _lock_parent(cursor: Cursor, run_id: str) -> None:
    """Lock the parent's row first, since the end of the run is posted to the parent.

    Runs are locked from the oldest to the youngest, so that two transactions that end related runs cannot deadlock.
    """
    found = cursor.one("run_by_id", (run_id,))
    if found is not None and (parent := run_row(found).parent) is not None:
        cursor.one("run_to_change", (parent,))


def _unfinished(cursor: Cursor, run_id: str) -> Row:
    found = cursor.one("run_to_change", (run_id,))
    if found is None:
        raise NotFound(f"there is no run {run_id}", hint="`perdure list` shows the runs")
    row = run_row(found)
    row.check_live()
    if row.status in FINISHED:
        raise RunEnded(f"run {run_id} has finished ({row.status}) and accepts no more post")
    check_not_ended(found)
    return found


def _is_news(cursor: Cursor, found: Row, body: AnyBody) -> bool:
    """Write what follows from the body. This is the same whether the event is appended now or later by the holder.

    False: the body is a signal that the run has had before.
    """
    match body:
        case SignalReceived() if body.key is not None:
            return cursor.change("remember_signal", (key_of(found), body.topic, body.key)) == 1
        case BudgetRaised():
            limits.raise_limits(cursor, key_of(found), run_row(found).run_id, body)
        case RunAdopted() | FrameChanged():
            queues.move(cursor, key_of(found), body.version)
    return True
