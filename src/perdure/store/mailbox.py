"""What reaches a run from outside: its creation, what people and other runs hand to it later, and an end without its agent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime

from msgspec import structs

from perdure.core.budget import NOTHING, amounts_of
from perdure.core.events import (
    AnyBody,
    BudgetRaised,
    Event,
    RunAdopted,
    RunCancelled,
    RunFailed,
    RunSucceeded,
    SignalReceived,
    Terminal,
    ToolCallResolved,
)
from perdure.core.identity import seal
from perdure.errors import AlreadyRunning, Conflict, NotFound, RunEnded
from perdure.store import budgets, family, lines
from perdure.store.api import FINISHED, Charge, InboxRow, NewRun, RunRow, Status, Tombstone
from perdure.store.consequences import Consequences
from perdure.store.creation import insert_run
from perdure.store.cursor import Cursor, Row
from perdure.store.delivery import Delivery, Letter
from perdure.store.part import Means, Part
from perdure.store.rows import event_row, has_arrived, inbox_row, key_of, run_row

_ERROR_CHARS = 500  # of the row; the journal has all of it
_STATUS: dict[type, Status] = {RunSucceeded: "succeeded", RunFailed: "failed", RunCancelled: "cancelled"}


class Mailbox(Part):
    """Writes to a run by somebody who does not hold it."""

    def __init__(self, means: Means) -> None:
        super().__init__(means)
        self._delivery = Delivery(means.liveness)
        self._consequences = Consequences(self._delivery)

    def create_run(self, new: NewRun) -> tuple[RunRow, bool]:
        (answer,) = self._create([new])
        return answer

    def create_runs(self, news: Sequence[NewRun]) -> list[tuple[RunRow, bool]]:
        return self._create(news)

    def _create(self, news: Sequence[NewRun]) -> list[tuple[RunRow, bool]]:
        # After an unknown commit the runs are there or they are not, all of them; asking for the same ids again is safe either way.
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
        """Whether it is in the journal; one letter that the run has had before is.

        `lost`: nobody has heard what became of a signal that was sent to the run by itself. It may be there, or arrive yet.
        """

        def deliver(cursor: Cursor) -> tuple[bool, bool]:
            if lost and cursor.one("run_to_change", (run_id,)) is not None and has_arrived(cursor, run_id, event_id):
                return True, False
            found = _unfinished(cursor, run_id)
            if lost and isinstance(body, SignalReceived) and body.key is None:
                # The crash window: it has not arrived, and is posted below. Should the first one come after all, it is refused for this.
                cursor.change("remember_signal", (key_of(found), body.topic, stands_for(event_id)))
            row = run_row(found)
            # Looked at once. Where the holder is dead the letter is appended right here, so `expect` sees a run without a holder.
            held = self._delivery.holds(row.holder)
            if expect is not None:
                expect(row if held else structs.replace(row, holder=None))
            if isinstance(body, RunAdopted) and held:
                # Its holder goes on with the code that it has, and would not journal this: the row must not say otherwise.
                raise AlreadyRunning(f"run {run_id} is held by a worker that is not known to be dead; stop that process first")
            if not _is_news(cursor, found, body):
                return True, False
            appended = self._delivery.deliver(cursor, found, Letter(call, body, event_id, now), status, held=held)
            if appended and isinstance(body, ToolCallResolved):
                # In this very commit, as whoever holds a run charges it: the journal and the ledger must never differ.
                budgets.charge(cursor, key_of(found), Charge(reserved=NOTHING, spent=amounts_of(body.usage)))
            return appended, True

        # A letter that was none leaves no trace to look for: nothing was written, and saying so again is safe.
        appended, _ = self._database.write(deliver, lambda cursor, done: not done[1] or has_arrived(cursor, run_id, event_id))
        self._bell.ring()
        return appended

    def end(self, run_id: str, body: AnyBody, *, event_id: str, now: int, expect: Callable[[RunRow], None] | None = None) -> None:
        assert isinstance(body, Terminal), body

        def finish(cursor: Cursor) -> None:
            _lock_parent(cursor, run_id)
            found = _unfinished(cursor, run_id)
            # Its children too before any budget: one that charges holds its own row and waits for the budget.
            below = cursor.all("family_to_change", {"run_id": run_id})
            row, key = run_row(found), key_of(found)
            if self._delivery.holds(row.holder):
                name, _ = cursor.one("worker_by_id", (str(row.holder),)) or (row.holder, 0)
                raise AlreadyRunning(f"run {run_id} is held by worker {name}; cancel it and let that worker end it, or stop the worker")
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

    def inbox(self, worker: str) -> list[InboxRow]:
        return [inbox_row(row) for row in self._database.read("inbox_of_worker", (worker,))]

    def unread(self, run_id: str) -> list[InboxRow]:
        return [inbox_row(row) for row in self._database.read("inbox_of_run", (run_id,))]


def stands_for(event_id: str) -> str:
    """The key of a signal without one, for `perdure_signals`. No id begins like this."""
    return f"!{event_id}"


def _created(cursor: Cursor, new: NewRun) -> tuple[RunRow, bool]:
    found = cursor.one("run_by_id", (new.run_id,))
    if found is not None:
        return run_row(found), False
    # Somebody else may have taken the id after we looked: then it is there by now.
    created = insert_run(cursor, new)
    found = cursor.one("run_by_id", (new.run_id,))
    if found is None:
        raise pruned_id(cursor, new.run_id)
    return run_row(found), created


def pruned_id(cursor: Cursor, run_id: str) -> Conflict:
    """Why there is no such run, and cannot be one."""
    root = run_id.partition("/")[0]
    found = cursor.one("tombstone", (run_id,)) or cursor.one("tombstone", (root,))
    assert found is not None, run_id
    tombstone = Tombstone(*found[1:])
    at = datetime.fromtimestamp(tombstone.pruned_at // 1_000_000, UTC).date().isoformat()
    return Conflict(
        f"run {tombstone.run_id} ran ({tombstone.status}, {tombstone.events} events) and was pruned on {at} by {tombstone.by}: "
        "its id is not used again, or what it has done would be done twice; choose another id"
    )


def _lock_parent(cursor: Cursor, run_id: str) -> None:
    """Runs are locked from the oldest to the youngest, and the parent will hear of the end: two who end relatives must not wait for each other."""
    found = cursor.one("run_by_id", (run_id,))
    if found is not None and (parent := run_row(found).parent) is not None:
        cursor.one("run_to_change", (parent,))


def _unfinished(cursor: Cursor, run_id: str) -> Row:
    found = cursor.one("run_to_change", (run_id,))
    if found is None:
        raise NotFound(f"there is no run {run_id}; `perdure list` shows those that there are")
    row = run_row(found)
    if row.status in FINISHED:
        raise RunEnded(f"run {run_id} has finished ({row.status}) and takes nothing more")
    return found


def _is_news(cursor: Cursor, found: Row, body: AnyBody) -> bool:
    """Write what follows from the body, whoever journals it in the end; False for a signal that the run has had before."""
    match body:
        case SignalReceived() if body.key is not None:
            return cursor.change("remember_signal", (key_of(found), body.topic, body.key)) == 1
        case BudgetRaised():
            budgets.raise_limits(cursor, key_of(found), run_row(found).run_id, body)
        case RunAdopted():
            lines.move(cursor, key_of(found), body.version)
    return True
