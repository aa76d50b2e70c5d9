"""What the run core makes of the journal that it is given at a claim."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.drive_tools import SETTINGS, perdure, run

from perdure import Run, agent
from perdure.core.events import Event
from perdure.core.run_core import RunCore
from perdure.core.state import fold
from perdure.core.steps import Broken, JournalRead
from perdure.engine.clock import Clock
from perdure.engine.local.worker import run_settings


@agent(version="1")
async def waits(run: Run) -> None:
    await run.receive("go")
    await run.receive("again")


@pytest.fixture
def journal(tmp_path: Path) -> list[Event]:
    async def main() -> list[Event]:
        async with perdure(tmp_path / "db", [waits]) as app:
            handle = await app.start(waits, id="r")
            await app.engine.drive("r", wait=False)
            await app.signal("r", "go")
            await app.engine.drive("r", wait=False)
            return await handle.events()

    return run(main())


def begun(journal: list[Event], epoch: int | None) -> tuple[RunCore, Broken | None]:
    """The core right after it was given the journal, and whether it broke."""
    core = RunCore("r", waits, run_settings(SETTINGS, still=False), Clock().ids(), {})
    step = core.step(JournalRead(journal, epoch=epoch), 0, 0)
    assert (step.append is None) == isinstance(step.end, Broken)
    return core, step.end if isinstance(step.end, Broken) else None


def test_a_journal_that_another_worker_has_claimed_since_is_not_gone_on_with(journal: list[Event]) -> None:
    """It was read after the lease was lost: what would be recorded now would bear the other worker's epoch."""
    epoch = fold(journal).epoch
    assert epoch == 2
    _, broken = begun(journal, epoch - 1)
    assert broken is not None
    assert broken.kind == "fenced"


@pytest.mark.parametrize("epoch", [2, None])
def test_a_journal_that_ends_with_the_claim_of_this_worker_is_gone_on_with(journal: list[Event], epoch: int | None) -> None:
    core, broken = begun(journal, epoch)
    assert broken is None
    assert core.state.seq > len(journal)
