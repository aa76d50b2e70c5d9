"""What must hold for runs that wait: their approvals, their children, their costs (G6, G8, G9, G14)."""

from __future__ import annotations

from collections import Counter
from typing import Any

from tests.crash.checks import check_journal
from tests.crash.errands import ORDER
from tests.crash.world import RUN, World

from perdure.core.budget import Amounts
from perdure.core.events import (
    ApprovalDecided,
    ApprovalExpired,
    ApprovalRequested,
    ApprovalWithdrawn,
    ChildFinished,
    ChildStarted,
    Event,
    ToolCallInitiated,
)
from perdure.core.state import fold
from perdure.store.api import FINISHED, ApprovalFilter, ApprovalRow

SETTLEMENTS = (ApprovalDecided, ApprovalExpired, ApprovalWithdrawn)


def approval_rows(world: World, run_id: str) -> list[ApprovalRow]:
    with world.journal.reading() as store:
        return store.approvals(ApprovalFilter(status=None, run_id=run_id, limit=100_000))


def check_approvals(world: World, run_id: str = RUN) -> dict[str, str]:
    """One settlement and at most one start per approval, in that order and in time; the inbox of people agrees. Each one's outcome."""
    events = check_journal(world, run_id)
    asked = {event.body.approval: event.body for event in events if isinstance(event.body, ApprovalRequested)}
    rows = {row.approval: row for row in approval_rows(world, run_id)}
    assert rows.keys() == asked.keys(), f"asked for {asked.keys()}, and people see {rows.keys()}"
    assert len(asked) == sum(isinstance(event.body, ApprovalRequested) for event in events), "asked twice under one id"
    ended = events[-1].type.startswith("run_") and events[-1].type.removeprefix("run_") in FINISHED
    return {approval: _check_one(events, approval, rows[approval], ended) for approval in asked}


def _check_one(events: list[Event], approval: str, row: ApprovalRow, ended: bool) -> str:
    settled = [event for event in events if isinstance(event.body, SETTLEMENTS) and event.body.approval == approval]
    starts = [event for event in events if isinstance(event.body, ToolCallInitiated) and event.body.approval == approval]
    outcomes = [_outcome(event.body) for event in settled]
    assert outcomes in ([], ["approved"], ["rejected"], ["expired"], ["withdrawn"], ["approved", "expired"], ["approved", "withdrawn"]), (
        f"approval {approval} was settled {len(outcomes)} times: {outcomes}"
    )
    assert len(starts) <= 1, f"approval {approval} was used {len(starts)} times"
    for start in starts:
        assert outcomes == ["approved"], f"started although it was {outcomes}"
        assert start.seq > settled[0].seq, "started before it was decided"
        decided, expires_at = settled[0].body, row.standing.request.expires_at
        assert isinstance(decided, ApprovalDecided)
        assert isinstance(start.body, ToolCallInitiated)
        assert start.body.digest == decided.digest, "started with other arguments than those that were approved"
        assert expires_at is None or start.ts < expires_at, f"started {start.ts - expires_at} µs after its approval had expired"
    last = outcomes[-1] if outcomes else "withdrawn" if ended else "pending"
    expected = "consumed" if starts else last
    assert row.standing.status == expected, f"people see {row.standing.status}, and the journal says {expected}"
    return expected


def _outcome(body: Any) -> str:
    if isinstance(body, ApprovalDecided):
        return "approved" if body.granted else "rejected"
    return "expired" if isinstance(body, ApprovalExpired) else "withdrawn"


def check_effects_of(world: World, kind: str, run_id: str = RUN) -> None:
    """A call that has completed has changed the world as often as its class allows, and not before it was allowed to."""
    effects = world.ledger.effects(ORDER, run_id)
    if kind == "transaction":
        assert [row[:3] for row in world.paid()] == [(ORDER, run_id, 2)], world.paid()
    elif kind in ("read", "idempotent"):
        assert len(effects) >= 1, effects
    else:
        assert len(effects) == 1, f"{kind}: {len(effects)} effects: {effects}"


def check_not_begun(world: World, run_id: str = RUN) -> None:
    """No person has approved, so nothing of the call has reached the world."""
    assert not world.ledger.lines("begun", run_id), "it began without anybody's yes"
    assert not world.ledger.effects(ORDER, run_id)
    assert not world.paid()


def check_waits(world: World, run_id: str = RUN, status: str = "waiting_approval") -> None:
    """The run is not held, and it says what it waits for (G6)."""
    row, _ = world.peek(run_id)
    assert row is not None
    assert (row.status, row.holder) == (status, None), row
    assert row.waiting_for, "it waits for nothing that it could say"


def check_family(world: World, run_id: str, children: int) -> None:
    """Every child was born once, ended once and was heard of once; all journals are sound."""
    events = check_journal(world, run_id)
    born = [event.body.run_id for event in events if isinstance(event.body, ChildStarted)]
    heard = Counter(event.body.run_id for event in events if isinstance(event.body, ChildFinished))
    assert len(born) == len(set(born)) == children, f"{len(born)} births of {children} children"
    assert heard == Counter(born), f"heard of {heard}"
    for child in born:
        check_journal(world, child)


def check_budget(world: World, run_id: str) -> Amounts:
    """The ledger equals the sum over the journals of the run and all its children, counted once.

    Returns the spent amount.
    """
    total = Amounts()
    with world.journal.reading() as store:
        (ledger,) = store.ledgers(run_id)
        for _, row in store.growing():
            if row.run_id == run_id or row.run_id.startswith(f"{run_id}/"):
                total += fold(store.read(row.run_id)).spent
    assert ledger.spent == total, f"the ledger says {ledger.spent}, the journals {total}"
    assert not ledger.reserved, f"still reserved after the end: {ledger.reserved}"
    return ledger.spent
