"""Computes a repair: what the store has to write so that the rows of a run agree with its journal.

Only a run whose journal is undamaged can be repaired. A problem in another journal (a child is missing, a parent does
not know its child) cannot be repaired with this journal.
"""

from __future__ import annotations

from collections.abc import Iterator

from perdure.core.budget import NOTHING, Amounts
from perdure.core.state import AskState, RunState, fold, own_children
from perdure.engine.api import Reading
from perdure.errors import PerdureError, StoreCorrupt
from perdure.inspect.consistency import approval_problem, approval_status, budget_problem, labels_problem
from perdure.inspect.projection import right_row
from perdure.inspect.text import labels_words, limits_words
from perdure.inspect.verify import verify_journal
from perdure.store.api import ApprovalRepair, ApprovalRow, Ledger, Repair, RunRow


def plan_repair(store: Reading, row: RunRow) -> Repair | None:
    """The repair of the run's row, approvals, budget and labels.

    None: there is nothing to repair, or the journal is damaged, or its end was cut off (by the journal-wide chain).
    """
    stored = store.stored(row.run_id)
    verdict, checked = verify_journal(row, stored, store.blob, store.checkpoint(row.run_id))
    if verdict.problem is not None:
        return None  # a row that was made to fit a damaged journal would hide the damage
    # The journal-wide chain has a later event, or another one: the end was cut off or rewritten. After a repair, the run
    # would go on from there and repeat its last effects. If only the row names too early an event, the journal is whole.
    if any(missing.last_seq > checked.state.seq or row.seq >= missing.last_seq for missing in store.missing_heads(row.run_id)):
        return None
    state = checked.state
    unread = [letter for letter in store.unread(row.run_id) if letter.body is not None]
    wrong = right_row(row, state, checked.events, checked.input_digest, checked.head, has_post=bool(unread))
    asks = [ask for ask in state.asks.values() if _contradicts(store, row, state, ask)]
    approvals = tuple(right_approval(state, ask, _found(store, ask.request.approval)) for ask in asks)
    ledger = _right_ledger(store, row, state) if budget_problem(store, row, state) is not None else None
    labels = state.labels if labels_problem(store, row, state) is not None else None
    if not wrong and not approvals and ledger is None and labels is None:
        return None
    words = (
        *(f"{column}: {_shown(getattr(row, column))} becomes {_shown(value)}" for column, value in wrong.items()),
        *(f"approval {one.approval}: becomes {one.status}" + (f" by {one.settled_by}" if one.settled_by else "") for one in approvals),
        *(() if ledger is None else (f"its budget: becomes {limits_words(ledger.limits)}, of which {ledger.spent} is spent",)),
        *(() if labels is None else (f"its labels: become {labels_words(labels) or 'none'}",)),
    )
    return Repair(row.run_id, row, wrong, approvals, ledger, labels, words)


def _contradicts(store: Reading, row: RunRow, state: RunState, ask: AskState) -> bool:
    try:
        return approval_problem(store, row, state, ask) is not None
    except StoreCorrupt:
        return True


def right_approval(state: RunState, ask: AskState, found: ApprovalRow | None) -> ApprovalRepair:
    """The row of an approval according to the journal. `found`: the existing row; None if there is none."""
    request, status = ask.request, approval_status(ask, state)
    if state.finished and status == "pending":
        status = "withdrawn"  # the end of a run withdraws its approvals without an event
    granted = status in ("approved", "consumed")
    kept = found.standing.digest if found is not None and status in ("expired", "withdrawn") else ""
    agreed = granted or (status in ("expired", "withdrawn") and ask.digest is not None)
    settled_at = ask.settled_at or (found.settled_at if found is not None else None) or ask.asked_at
    return ApprovalRepair(
        approval=request.approval,
        seq=ask.asked_seq,
        call=ask.number,
        action=request.action,
        asked_at=ask.asked_at,
        status=status,
        deciders=request.by,
        expires_at=request.expires_at,
        escalated=ask.escalated,
        voters=tuple(ask.by.split(", ")) if agreed and ask.by else ask.voters,
        digest=(ask.digest or "") if granted else kept,
        settled_by=ask.by if granted or status == "rejected" else None,
        note=ask.note if status != "withdrawn" else None,
        settled_at=None if status == "pending" else settled_at,
    )


def _found(store: Reading, approval: str) -> ApprovalRow | None:
    try:
        return store.approval(approval)
    except StoreCorrupt:
        return None


def _right_ledger(store: Reading, row: RunRow, state: RunState) -> Ledger | None:
    """The ledger of the run's own budget, from the journals of the run and all runs below.

    None: the run has no budget.
    """
    if state.budget is None:
        return None
    ledgers = store.ledgers(row.run_id)
    own = ledgers[0] if ledgers and ledgers[0].run_id == row.run_id else None
    spent = sum((below.spent for below in _family(store, row.run_id)), start=NOTHING)
    return Ledger(row.run_id, state.budget, spent, NOTHING if own is None else _whole(own.reserved))


def _whole(amounts: Amounts) -> Amounts:
    return amounts if all(isinstance(getattr(amounts, name), int) for name in amounts.__struct_fields__) else NOTHING


def _family(store: Reading, run_id: str) -> Iterator[RunState]:
    """The state of the run and of every run below it, from their journals."""
    try:
        state = fold(store.read(run_id))
    except PerdureError:
        return  # the check of that run itself reports what is wrong
    yield state
    for child in own_children(state):
        yield from _family(store, child)


def _shown(value: object) -> str:
    return value.hex() if isinstance(value, bytes) else repr(value)[:80]
