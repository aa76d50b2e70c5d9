"""Violations that the simulation has found, tested without the simulation: each in a few steps."""

from __future__ import annotations

from tests.unit.drive_tools import ManualClock, perdure, run, status_of

from perdure import Approval, NotApproved, Run, agent, tool
from perdure.core import identity
from perdure.core.approval import Expire
from perdure.core.events import Event, ThoughtRecorded
from perdure.inspect.verify import verify_run
from perdure.store.api import Append, ApprovalFilter, Committed, Served

CALLS: list[str] = []


@tool(approval=Approval(expires=30.0))
async def demolish(what: str) -> str:
    CALLS.append(what)
    return "gone"


@agent(version="1")
async def wreck(run: Run) -> str:
    try:
        return await demolish("house")
    except NotApproved as refused:
        return refused.outcome


SERVED = [Served("wreck", "1")]


def test_a_clock_that_is_set_back_between_two_events_of_a_commit_is_no_damage() -> None:
    """Seed 51: the row kept the time of the last event, and `verify` found it older than the journal."""

    async def main() -> None:
        async with perdure(None, [wreck]) as app:
            await app.start(wreck, id="r")
            now = app.clock.now()
            app.store.register("w", "host:1", 1, now, SERVED)
            (claimed,) = app.store.claim("w", SERVED, 1, now)
            seq, epoch = claimed.row.seq, claimed.lease.epoch
            events = [
                Event(seq + 1 + place, f"{place:032x}", now + 1_000_000 * (1 - place), epoch, None, seq, ThoughtRecorded("x"))
                for place in (0, 1)
            ]
            append = Append(claimed.lease, seq, tuple(identity.seal_all(claimed.row.head, events)))
            assert app.store.append([append]) == [Committed()]
            row = app.store.get("r")
            assert row is not None
            assert row.updated_at == now + 1_000_000
            assert verify_run(app.store, row).problem is None

    run(main())


def test_an_approval_that_somebody_elses_clock_has_ended_needs_no_person() -> None:
    """Seed 1145: a worker whose clock was ahead had it expire, and died; the next one started the call, was refused, and stood still."""
    clock = ManualClock()
    CALLS.clear()

    async def main() -> None:
        async with perdure(None, [wreck], clock) as app:
            await app.start(wreck, id="r")
            await app.engine.drive("r", wait=False)
            (asked,) = app.store.approvals(ApprovalFilter(run_id="r"))
            await app.approve(asked.approval, by="ann")
            app.store.register("ahead", "host:1", 1, clock.now(), SERVED)
            assert app.store.claim("ahead", SERVED, 1, clock.now())
            later = clock.now() + 60_000_000
            app.store.decide(asked.approval, Expire(), event_id="0" * 32, now=later)
            app.store.unregister("ahead", clock.now())
            await app.engine.drive("r", wait=False)
            assert status_of(app, "r") == "succeeded"
            assert await app.handle("r").result() == "expired"

    run(main())
    assert CALLS == []
