"""kill -9 after every effect that costs money: a budget limits the cost, even if workers die (T33)."""

from __future__ import annotations

import pytest
from tests.crash import spenders
from tests.crash.checks import check_journal
from tests.crash.world import KILLED, RUN, World

CENT = 10_000  # micro-dollars


@pytest.mark.parametrize("kind", spenders.AGENTS)
def test_killed_after_every_effect_the_effects_stay_within_the_budget_and_are_shown(world: World, kind: str) -> None:
    code, report = KILLED, ""
    while code == KILLED:
        report = world.report()
        code = world.run(spenders.rest, report=report, agent=f"spend_{kind}", args=[], run_id=RUN)
        effects = len(world.ledger.effects("paid"))
        assert (_cents(world), effects) == (10 * effects, min(effects, 5)), "what has happened, or may have, is spent or reserved"
    assert code == 0, world.log()
    told = world.told(report)
    assert (told["status"], "the budget of run run-1 is used up" in told["error"]) == ("needs_attention", True), told
    assert len(world.ledger.effects("paid")) == 5
    assert _cents(world) == 50
    with world.journal.reading() as store:
        (row,) = store.costs("run")
        lost = store.reserved(RUN).usd_micros  # an attempt that is charged when it is made again
        assert row.usd_micros + lost == 50 * CENT, row
    check_journal(world)  # and the ledger agrees with the journal


def _cents(world: World) -> int:
    """Spent and reserved."""
    with world.journal.reading() as store:
        (ledger,) = store.ledgers(RUN)
        return (ledger.spent.usd_micros + ledger.reserved.usd_micros) // CENT
