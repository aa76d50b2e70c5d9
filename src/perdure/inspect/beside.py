"""What lies beside a journal and must say what it says: approvals, budgets, the run's parent and its children.

A decision about a run that somebody holds lies in an inbox until its holder journals it: until then an approval's row may be ahead
of the journal, and only then.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from perdure.core.budget import Amounts
from perdure.core.events import ChildFinished, ChildStarted, Event, RunClaimed, RunReleased
from perdure.core.state import AskState, RunState
from perdure.errors import PerdureError, StoreCorrupt
from perdure.inspect.projection import forced, lost
from perdure.inspect.sentences import limits_words
from perdure.store.api import FINISHED, ApprovalRow, RunRow, Store

CLOCKS_US = 60_000_000  # how far the clocks of two processes may be apart


class Problem(Struct, frozen=True):
    problem: str
    seq: int | None = None


class Kin:
    """The children that parents say they have; the parent that was looked at last is kept."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._parent: str | None = None
        self._started: dict[int | None, str] = {}

    def child_at(self, parent: str, call: int | None) -> str | None:
        """The run that this call of the parent has started, by the parent's journal."""
        if parent != self._parent:
            events = self._store.read(parent)
            self._started = {event.call: event.body.run_id for event in events if isinstance(event.body, ChildStarted)}
            self._parent = parent
        return self._started.get(call)


def beside_problem(store: Store, row: RunRow, state: RunState, events: Sequence[Event], kin: Kin) -> Problem | None:
    """The first thing beside the journal that does not fit it; None when everything does."""
    unread = _unread(store, row, state, events)
    try:
        return (
            _parent_problem(store, row, kin)
            or _children_problem(store, row, state, events, unread)
            or _approvals_problem(store, row, state, events, unread)
            or _budget_problem(store, row, state, unread)
        )
    except StoreCorrupt as error:
        return Problem(str(error))


def _unread(store: Store, row: RunRow, state: RunState, events: Sequence[Event]) -> bool:
    """Whether something may have reached the run that its journal does not have yet."""
    if row.holder is not None:
        return any(letter.run_id == row.run_id for letter in store.inbox(row.holder))
    if state.finished:
        return False
    released = next((event for event in reversed(events) if isinstance(event.body, RunReleased)), None)
    return lost(row, state) or (released is not None and row.ready_at == released.ts)


# -- the family -----------------------------------------------------------------------------------------------------------
def _parent_problem(store: Store, row: RunRow, kin: Kin) -> Problem | None:
    if row.parent is None:
        return None
    claim = f"it was created as child of run {row.parent} (its call {row.parent_call})"
    if store.get(row.parent) is None:
        return Problem(f"{claim}, and there is no such run", seq=1)
    try:
        found = kin.child_at(row.parent, row.parent_call)
    except PerdureError as error:
        return Problem(f"{claim}, whose journal cannot be read: {error}", seq=1)
    if found != row.run_id:
        return Problem(
            f"{claim}, and the journal of {row.parent} does not have it: that call {f'is run {found}' if found else 'is no child'}", seq=1
        )
    return None


def _children_problem(store: Store, row: RunRow, state: RunState, events: Sequence[Event], unread: bool) -> Problem | None:
    for event in events:
        body = event.body
        if isinstance(body, ChildStarted):
            child = store.get(body.run_id)
            if child is None:
                return Problem(f"it starts run {body.run_id} as a child, and there is no such run", event.seq)
            if (child.parent, child.parent_call, child.input_digest) != (row.run_id, event.call, body.digest):
                return Problem(f"it starts run {body.run_id} as a child, and the run with that id is another one", event.seq)
            ended = child.status in FINISHED
            if ended and event.call in state.alive and not unread and not state.finished:
                return Problem(
                    f"its child {child.run_id} has {child.status}, and the run was never told: it would wait for ever", event.seq
                )
        elif isinstance(body, ChildFinished):
            child = store.get(body.run_id)
            if child is None or child.status != body.status:
                is_now = "is not there" if child is None else f"is {child.status}"
                return Problem(f"it says that its child {body.run_id} {body.status}, and that run {is_now}", event.seq)
    return None


# -- approvals ------------------------------------------------------------------------------------------------------------
def _approvals_problem(store: Store, row: RunRow, state: RunState, events: Sequence[Event], unread: bool) -> Problem | None:
    for ask in state.asks.values():
        name = ask.request.approval
        found = store.approval(name)
        if found is None:
            return Problem(f"it asks for approval {name}, and that has no row: it was removed or renamed", ask.asked_seq)
        if (found.run_id, found.call, found.asked_at) != (row.run_id, ask.number, ask.asked_at):
            return Problem(
                f"the row of approval {name} is about call {found.call} of run {found.run_id}, asked at another time", ask.asked_seq
            )
        status = _status(ask, state)
        still_open = status in ("pending", "approved")
        if still_open and (unread or (state.finished and _ended_first(found, status, events))):
            continue  # somebody has said something that the journal does not have yet, or never will
        problem = _standing_problem(ask, found, status)
        if problem is not None:
            return Problem(f"the journal is sound, but the row of approval {name} is not: {problem}", ask.settled_seq or ask.asked_seq)
    return None


def _status(ask: AskState, state: RunState) -> str:
    """How the approval stands by the journal."""
    call = state.calls.get(ask.number)
    if ask.outcome == "approved" and ask.request.tool is not None and call is not None and call.attempt > 0:
        return "consumed"
    return ask.outcome or "pending"


def _ended_first(found: ApprovalRow, status: str, events: Sequence[Event]) -> bool:
    """Whether the run's end explains that its journal has no decision: nobody wants one then, or it came too late to be read."""
    if found.standing.status == "withdrawn" and status == "pending":
        return True
    claimed = next((event.ts for event in reversed(events) if isinstance(event.body, RunClaimed)), None)
    if found.settled_at is None or claimed is None or forced(events) or found.standing.status in ("pending", "consumed"):
        return False
    # While somebody held the run, what was said lay in the inbox, which ended with the run.
    return claimed - CLOCKS_US <= found.settled_at <= events[-1].ts + CLOCKS_US and found.standing.status != status


def _standing_problem(ask: AskState, found: ApprovalRow, status: str) -> str | None:
    standing = found.standing
    if standing.status != status:
        by = f" by {standing.settled_by}" if standing.settled_by else ""
        said = "has no decision" if ask.pending else f"says {ask.outcome}" + (" and used up" if status == "consumed" else "")
        return f"it says {standing.status}{by}, and the journal {said}: it was edited"
    granted = status in ("approved", "consumed")
    # A yes that came to nothing, because its time was over or nobody wanted the call any more, was one all the same.
    agreed = granted or (status in ("expired", "withdrawn") and ask.digest is not None)
    voters = standing.voters if agreed and ", ".join(standing.voters) == ask.by else ask.voters
    expected = {
        "who may decide": (standing.request.by, ask.request.by),
        "its expiry": (standing.request.expires_at, ask.request.expires_at),
        "whether it was escalated": (standing.escalated, ask.escalated),
        "who has agreed": (standing.voters, voters),
        "what was approved": (standing.digest, ask.digest if granted else standing.digest if status in ("expired", "withdrawn") else ""),
        "who decided": (standing.settled_by, ask.by if granted or status == "rejected" else None),
        "the note": (standing.note, ask.note if status != "withdrawn" else None),
        "that it is settled": (found.settled_at is not None, status != "pending"),
    }
    for what, (is_, was) in expected.items():
        if is_ != was:
            return f"{what} is {is_!r:.80}, and by the journal it is {was!r:.80}: it was edited"
    return None


# -- budgets --------------------------------------------------------------------------------------------------------------
def _budget_problem(store: Store, row: RunRow, state: RunState, unread: bool) -> Problem | None:
    ledgers = store.ledgers(row.run_id)
    own = ledgers[0] if ledgers and ledgers[0].run_id == row.run_id else None
    if (own is None) != (state.budget is None):
        return Problem(f"the run {'has' if own else 'has no'} budget, and by its journal it has {'none' if own else 'one'}")
    if own is None or state.budget is None:
        return None
    if own.limits != state.budget and not unread:
        return Problem(f"its budget allows {limits_words(own.limits)}, and by the journal {limits_words(state.budget)}: it was edited")
    exact = not state.children
    if own.spent != state.spent if exact else not _covers(own.spent, state.spent):
        return Problem(f"its budget has {own.spent} as spent, and by the journal the run alone has spent {state.spent}: it was edited")
    return None


def _covers(whole: Amounts, part: Amounts) -> bool:
    return all(getattr(whole, name) >= getattr(part, name) for name in part.__struct_fields__)
