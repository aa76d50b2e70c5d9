"""What the run core does with the journal that it gets at a claim."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.drive_tools import SETTINGS, perdure, run

from perdure import Call, Run, agent, tool
from perdure.core.codec import encode, pack
from perdure.core.events import AnyBody, Event, Failure, RunClaimed, RunCreated, ToolCallFailed, ToolCallInitiated
from perdure.core.run_core import RunCore
from perdure.core.state import LOST, fold
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


@tool(effect="idempotent")
async def upload(call: Call) -> None: ...


@agent(version="1")
async def uploads(run: Run) -> None:
    await upload()


@pytest.mark.parametrize(("stored", "poison"), [({"part": 8}, False), ({"part": 7}, True), (None, True)])
def test_a_run_whose_last_attempt_came_further_is_not_poison(stored: object, poison: bool) -> None:
    """Its workers died as often as the limit says, and the journal does not have the progress of the last attempt yet."""
    limit = SETTINGS.poison_limit
    bodies: list[tuple[int | None, AnyBody]] = [
        (None, RunCreated("r", "uploads", "1", "default", pack(encode({"args": [], "kwargs": {}}))[0])),
        (None, RunClaimed("w0")),
        (1, ToolCallInitiated("upload", "idempotent", "key", args=pack(b"{}")[0])),
        (None, RunClaimed("w1", takeover=True, proven_dead=True)),
        (1, ToolCallFailed(Failure("cancelled", LOST, ""), attempt=1, progress=pack(encode({"part": 7}))[0])),
        (1, ToolCallInitiated("upload", "idempotent", "key", args=pack(b"{}")[0], attempt=2)),
        *[(None, RunClaimed(f"w{n}", takeover=True, proven_dead=True)) for n in range(2, 2 + limit)],
    ]
    events, epoch = [], 0
    for seq, (call, body) in enumerate(bodies, 1):
        epoch += isinstance(body, RunClaimed)
        events.append(Event(seq, f"{seq:032x}", seq, epoch, call, seq - 1 or None, body))
    core = RunCore("r", uploads, run_settings(SETTINGS, still=False), Clock().ids(), {})
    core.step(JournalRead(events, crashes=limit, progress={} if stored is None else {(1, 2): encode(stored)}), 0, 0)
    assert (core.state.attention is not None and core.state.attention.reason == "poison") is poison
    assert poison or core.state.crashes == 0


def begun(journal: list[Event], epoch: int | None) -> tuple[RunCore, Broken | None]:
    """The core right after it was given the journal, and whether it broke."""
    core = RunCore("r", waits, run_settings(SETTINGS, still=False), Clock().ids(), {})
    step = core.step(JournalRead(journal, epoch=epoch), 0, 0)
    assert (step.append is None) == isinstance(step.end, Broken)
    return core, step.end if isinstance(step.end, Broken) else None


def test_a_journal_that_another_worker_has_claimed_since_is_not_gone_on_with(journal: list[Event]) -> None:
    """The journal was read after the lease was lost: new events would get the epoch of the other worker."""
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
