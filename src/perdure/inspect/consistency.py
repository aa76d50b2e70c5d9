"""Checks that the other tables agree with a journal: approvals, budgets, labels, the run's parent and its children.

Post to a held run stays in the inbox until the holder appends it to the journal. If the run ends first, the post stays
in the inbox for ever. So the row of an approval, a budget or a child may be newer than the journal, but only by the
unread post in the inbox.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from perdure.core.budget import Amounts
from perdure.core.events import (
    AnyBody,
    ApprovalDecided,
    ApprovalEscalated,
    ApprovalExpired,
    ApprovalVoted,
    ApprovalWithdrawn,
    BudgetRaised,
    ChildFinished,
    ChildStarted,
    Event,
    event_at,
)
from perdure.core.fork import copies
from perdure.core.state import AskState, RunState, own_children
from perdure.engine.api import Reading
from perdure.errors import NotFound, PerdureError, StoreCorrupt
from perdure.inspect.projection import same
from perdure.inspect.text import limits_words
from perdure.store.api import FINISHED, ApprovalRow, RunRow

_SAID = (ApprovalVoted, ApprovalEscalated, ApprovalDecided, ApprovalExpired, ApprovalWithdrawn)


class Inconsistency(Struct, frozen=True):
    problem: str
    seq: int | None = None


class Relatives:
    """The children of a parent run, from the parent's journal. Keeps the children of the parent that was read last."""

    def __init__(self, store: Reading) -> None:
        self._store = store
        self._parent: str | None = None
        self._started: dict[int | None, str] = {}

    def child_at(self, parent: str, call: int | None) -> str | None:
        """The run id of the child that this call of the parent started, by the parent's journal; None if there is none."""
        if parent != self._parent:
            events = self._store.read(parent)
            self._started = {event.call: event.body.run_id for event in events if isinstance(event.body, ChildStarted)}
            self._parent = parent
        return self._started.get(call)


def other_rows_problem(store: Reading, row: RunRow, state: RunState, events: Sequence[Event], relatives: Relatives) -> Inconsistency | None:
    """The first row of another table that contradicts the journal; None if all rows agree."""
    try:
        return (
            _parent_problem(store, row, relatives)
            or _fork_problem(store, row, state, events)
            or _children_problem(store, row, state, events)
            or _approvals_problem(store, row, state)
            or budget_problem(store, row, state)
            or labels_problem(store, row, state)
        )
    except StoreCorrupt as error:
        return Inconsistency(str(error))


def _unread(store: Reading, row: RunRow) -> list[AnyBody]:
    """The post of the run that is not in its journal yet.

    Read the row of the approval, budget or child before this call. One commit writes the row and the post that
    explains it, so this call finds the post.
    """
    return [letter.body for letter in store.unread(row.run_id) if letter.body is not None]


# -- the family -------------------------------------------------------------------------------------------------------
def _parent_problem(store: Reading, row: RunRow, relatives: Relatives) -> Inconsistency | None:
    if row.parent is None:
        return None
    claim = f"it was created as child of run {row.parent} (its call {row.parent_call})"
    if store.get(row.parent) is None:
        return Inconsistency(f"{claim}, and there is no such run", seq=1)
    try:
        found = relatives.child_at(row.parent, row.parent_call)
    except PerdureError as error:
        return Inconsistency(f"{claim}, whose journal cannot be read: {error}", seq=1)
    checkpoint = None if found else store.checkpoint(row.parent)
    if checkpoint is not None and checkpoint.removed:
        return None  # the event that started this run may be one of those that were removed
    if found != row.run_id:
        return Inconsistency(
            f"{claim}, and the journal of {row.parent} does not have it: that call {f'is run {found}' if found else 'is no child'}", seq=1
        )
    return None


def _fork_problem(store: Reading, row: RunRow, state: RunState, events: Sequence[Event]) -> Inconsistency | None:
    """Are the first events of a fork those of the run that it was made from? Nothing is known if that run is not here."""
    forked, imported = state.forked, row.imported
    if forked is None or (imported is not None and imported.fork_of is None) or store.get(forked.parent) is None:
        return None
    said = f"event {state.inherited + 1} says that the events before it were copied from run {forked.parent}, and"
    recorded = [event for event in store.read(forked.parent) if event.seq <= state.inherited]
    checkpoint = store.checkpoint(forked.parent)
    try:
        head = store.hash_at(forked.parent, state.inherited).hex()
    except NotFound:
        if checkpoint is not None and checkpoint.removed > state.inherited:
            return None  # since then, the events that were copied were removed by prune --before-checkpoint
        return Inconsistency(f"{said} that run has only {recorded[-1].seq} events", state.inherited + 1)
    if head != forked.head:
        return Inconsistency(f"{said} event {state.inherited} there has another hash", state.inherited + 1)
    for copy in copies(recorded, row.run_id)[1:]:
        if copy != event_at(events, copy.seq):
            return Inconsistency(f"{said} event {copy.seq} there is another one", copy.seq)
    return None


def _children_problem(store: Reading, row: RunRow, state: RunState, events: Sequence[Event]) -> Inconsistency | None:
    own = set(own_children(state))
    for event in events:
        body = event.body
        if isinstance(body, ChildStarted | ChildFinished) and body.run_id not in own:
            continue  # in a fork: a child of the run that was forked
        if isinstance(body, ChildStarted):
            child = store.get(body.run_id)
            if child is None:
                return Inconsistency(f"it starts run {body.run_id} as a child, and there is no such run", event.seq)
            if (child.parent, child.parent_call, child.input_digest) != (row.run_id, event.call, body.digest):
                return Inconsistency(f"it starts run {body.run_id} as a child, and the run with that id is another one", event.seq)
            ended = child.status in FINISHED and event.call in state.alive and not state.finished
            if ended and not any(isinstance(told, ChildFinished) and told.run_id == child.run_id for told in _unread(store, row)):
                return Inconsistency(
                    f"its child {child.run_id} has {child.status}, and the run was never told: it would wait for ever", event.seq
                )
        elif isinstance(body, ChildFinished) and event.call is not None and state.children[event.call].ended is body:
            # Only the last end of the child counts. Earlier ends were before the child was reopened together with this
            # run.
            child = store.get(body.run_id)
            if child is None or child.status != body.status:
                is_now = "is not there" if child is None else f"is {child.status}"
                return Inconsistency(f"it says that its child {body.run_id} {body.status}, and that run {is_now}", event.seq)
    return None


# -- approvals --------------------------------------------------------------------------------------------------------
def _approvals_problem(store: Reading, row: RunRow, state: RunState) -> Inconsistency | None:
    return next((problem for ask in state.asks.values() if (problem := approval_problem(store, row, state, ask)) is not None), None)


def approval_problem(store: Reading, row: RunRow, state: RunState, ask: AskState) -> Inconsistency | None:
    """How the row of this approval contradicts the journal; None if it agrees."""
    name = ask.request.approval
    found = store.approval(name)
    if found is None:
        return Inconsistency(f"it asks for approval {name}, and that has no row: it was removed or renamed", ask.asked_seq)
    if (found.run_id, found.call, found.asked_at) != (row.run_id, ask.number, ask.asked_at):
        return Inconsistency(
            f"the row of approval {name} is about call {found.call} of run {found.run_id}, asked at another time", ask.asked_seq
        )
    status = approval_status(ask, state)
    problem = _standing_problem(ask, found, status)
    if problem is not None and not _is_ahead(store, row, state, found, status):
        return Inconsistency(f"the journal is sound, but the row of approval {name} is not: {problem}", ask.settled_seq or ask.asked_seq)
    return None


def approval_status(ask: AskState, state: RunState) -> str:
    """The status that the approval has in the journal."""
    call = state.calls.get(ask.number)
    if ask.outcome == "approved" and ask.request.tool is not None and call is not None and call.attempt > 0:
        return "consumed"
    return ask.outcome or "pending"


def _is_ahead(store: Reading, row: RunRow, state: RunState, found: ApprovalRow, status: str) -> bool:
    """Does the last unread post explain the status of the approval's row?"""
    said = [body for body in _unread(store, row) if isinstance(body, _SAID) and body.approval == found.approval]
    stands = found.standing
    # The end of a run withdraws its pending approvals without an event.
    withdrawn_at_end = state.finished and stands.status == "withdrawn"
    match said[-1] if said else None:
        case None:
            return withdrawn_at_end and status == "pending"
        case ApprovalVoted() | ApprovalEscalated():
            return withdrawn_at_end or stands.status == "pending"
        case ApprovalDecided() as decided:
            outcome = ("approved", decided.digest) if decided.granted else ("rejected", "")
            return (stands.status, stands.digest, stands.settled_by) == (*outcome, decided.by)
        case ApprovalExpired():
            return stands.status == "expired"
        case ApprovalWithdrawn():
            return stands.status == "withdrawn"


def _standing_problem(ask: AskState, found: ApprovalRow, status: str) -> str | None:
    standing = found.standing
    if ask.superseded and standing.status in ("withdrawn", "rejected", "expired"):
        return None  # when the run was reopened, a vote or a decision was unread: it is in the row alone
    if standing.status != status:
        by = f" by {standing.settled_by}" if standing.settled_by else ""
        said = "has no decision" if ask.pending else f"says {ask.outcome}" + (" and used up" if status == "consumed" else "")
        return f"it says {standing.status}{by}, and the journal {said}: it was edited"
    granted = status in ("approved", "consumed")
    # If an approval was granted, and then expired or was withdrawn before its call began, the row keeps its voters.
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
        if not same(is_, was):
            return f"{what} is {is_!r:.80}, and by the journal it is {was!r:.80}: it was edited"
    return None


# -- budgets ----------------------------------------------------------------------------------------------------------
def budget_problem(store: Reading, row: RunRow, state: RunState) -> Inconsistency | None:
    ledgers = store.ledgers(row.run_id)
    own = ledgers[0] if ledgers and ledgers[0].run_id == row.run_id else None
    if (own is None) != (state.budget is None):
        return Inconsistency(f"the run {'has' if own else 'has no'} budget, and by its journal it has {'none' if own else 'one'}")
    if own is None or state.budget is None:
        return None
    counts = (own.limits.usd_micros, own.limits.tokens, own.limits.calls, own.limits.busy_us)
    if not all(count is None or isinstance(count, int) for count in counts):
        return Inconsistency("its budget is not in whole numbers: it was edited, or is damaged")
    if own.limits != state.budget and not any(isinstance(told, BudgetRaised) for told in _unread(store, row)):
        return Inconsistency(
            f"its budget allows {limits_words(own.limits)}, and by the journal {limits_words(state.budget)}: it was edited"
        )
    exact = not state.children and not state.checkpoint  # children from before a checkpoint may be unknown
    if own.spent != state.spent if exact else not _covers(own.spent, state.spent):
        return Inconsistency(
            f"its budget has {own.spent} as spent, and by the journal the run alone has spent {state.spent}: it was edited"
        )
    return None


# -- labels -----------------------------------------------------------------------------------------------------------
def labels_problem(store: Reading, row: RunRow, state: RunState) -> Inconsistency | None:
    found = store.labels([row.run_id])[row.run_id]
    if found == state.labels:
        return None
    key = next(key for key in sorted({*found, *state.labels}) if found.get(key) != state.labels.get(key))
    return Inconsistency(
        f"its label {key} is {found.get(key)!r:.80}, and by the journal it is {state.labels.get(key)!r:.80}: it was edited"
    )


def _covers(whole: Amounts, part: Amounts) -> bool:
    return all(getattr(whole, name) >= getattr(part, name) for name in part.__struct_fields__)
