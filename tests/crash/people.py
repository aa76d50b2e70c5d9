"""Processes of people and programs that act on runs: they decide, send signals and cancel, each in its own process."""

from __future__ import annotations

import asyncio
import mmap
import os
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.crash import fate
from tests.crash.victims import AGENTS, Shifted, prepare, tell

from perdure import Budget, Perdure
from perdure.errors import AlreadyRunning, Conflict, PerdureError, RunEnded, StoreError
from perdure.store.api import ApprovalFilter


def decide(
    folder: str, report: str, approval: str, granted: bool = True, by: str = "ann", die: Sequence[Any] = (), clock: Sequence[Any] = ()
) -> None:
    """Say yes or no, once; what came of it."""
    url, chosen = prepare(folder)
    if die:
        fate.seal(die)

    async def main() -> None:
        async with Perdure(url, settings=chosen, clock=Shifted(*clock) if clock else None) as app:
            tell(report, answer=await _decide(app, approval, granted, by))

    asyncio.run(main())


async def _decide(app: Perdure, approval: str, granted: bool, by: str) -> str:
    try:
        await (app.approve(approval, by=by) if granted else app.reject(approval, by=by, reason="no"))
    except (Conflict, RunEnded, StoreError) as refused:
        return type(refused).__name__
    return "counted"


def reopen(
    folder: str,
    report: str,
    run_id: str,
    to: int | None = None,
    by: str = "ann",
    die: Sequence[Any] = (),
    barrier: str = "",
    mine: int = 0,
    add_calls: int | None = None,
) -> None:
    """Retry the run, or rewind it to this event; what came of it."""
    add = None if add_calls is None else Budget(calls=add_calls)
    url, chosen = prepare(folder)
    if die:
        fate.seal(die)

    async def main() -> None:
        async with Perdure(url, agents=AGENTS.values(), settings=chosen) as app:
            if barrier:
                Barrier(barrier, mine).meet(1)
            try:
                await (app.retry(run_id, by=by, add=add) if to is None else app.rewind(run_id, to, by=by, add=add))
            except (Conflict, AlreadyRunning) as refused:
                tell(report, answer=type(refused).__name__)
            else:
                tell(report, answer="done")

    asyncio.run(main())


def fork(folder: str, report: str, run_id: str, fork_id: str, live: bool, how: dict[str, Any], die: Sequence[Any] = ()) -> None:
    """Make a fork of the run; what came of it."""
    url, chosen = prepare(folder)
    if die:
        fate.seal(die)

    async def main() -> None:
        async with Perdure(url, agents=AGENTS.values(), settings=chosen) as app:
            try:
                await (app.live_fork if live else app.fork)(run_id, id=fork_id, **how)
            except Conflict as refused:
                tell(report, answer=type(refused).__name__)
            else:
                tell(report, answer="done")

    asyncio.run(main())


class Barrier:
    """Two processes that reach the same place at the same moment: each waits in a loop for the other."""

    def __init__(self, path: str, mine: int) -> None:
        self._file = open(path, "r+b")  # noqa: SIM115  # open for as long as the process lives
        self._places = mmap.mmap(self._file.fileno(), 2)
        self._mine = mine

    def meet(self, turn: int) -> None:
        self._places[self._mine] = turn % 251 + 1
        deadline = time.monotonic() + 60
        while self._places[1 - self._mine] not in (turn % 251 + 1, (turn + 1) % 251 + 1):
            assert time.monotonic() < deadline, f"the other one did not come to turn {turn}"


def rival(folder: str, report: str, barrier: str, mine: int, approvals: Sequence[str]) -> None:
    """One of two who decide the same things at the same instant: the first says yes, the second no."""
    url, chosen = prepare(folder)
    together = Barrier(barrier, mine)

    async def main() -> None:
        answers = []
        async with Perdure(url, settings=chosen) as app:
            for turn, approval in enumerate(approvals):
                together.meet(turn)
                answers.append(await _decide(app, approval, mine == 0, f"decider {mine}"))
        tell(report, answers=answers)

    asyncio.run(main())


def latecomer(folder: str, report: str, run_id: str, seed: int) -> None:
    """Approves everything at the moment when its time is over: a little before, or a little after.

    If a decision comes too late, the next one starts earlier: on a busy machine a decision takes longer than any fixed
    time.
    """
    url, chosen = prepare(folder)
    chance = random.Random(seed)

    async def main() -> None:
        answers, lead_us = {}, 0
        async with Perdure(url, settings=chosen) as app:
            rows = app.store.approvals(ApprovalFilter(run_id=run_id, limit=1000))
            for row in sorted(rows, key=lambda row: row.standing.request.expires_at or 0):
                expires_at = row.standing.request.expires_at
                assert expires_at is not None
                at = expires_at + round(chance.uniform(-8000, 1000)) - lead_us
                while (left_us := at - app.clock.now()) > 0:
                    time.sleep(left_us / 2e6)
                begun = app.clock.now()
                answers[row.approval] = await _decide(app, row.approval, True, "late")
                lead_us = lead_us // 2 if answers[row.approval] == "counted" else lead_us + app.clock.now() - begun
        tell(report, **answers)

    asyncio.run(main())


def hasty_decider(folder: str, by: str, until: str) -> None:
    """Approves every request as soon as it is visible, until a file appears."""
    url, chosen = prepare(folder)

    async def main() -> None:
        async with Perdure(url, settings=chosen) as app:
            while not os.path.exists(until):
                for row in await app.approvals():
                    await _decide(app, row.approval, True, by)
                await asyncio.sleep(0.001)

    asyncio.run(main())


def send(folder: str, run_id: str, sender: str, count: int, pace_s: float = 0.0, die: Sequence[Any] = ()) -> None:
    """Send numbered signals, each with its key; killed, it begins again at the first that it does not know to have arrived."""
    url, chosen = prepare(folder)
    if die:
        fate.seal(die)
    progress = Path(folder) / f"sent-{sender}"

    async def main() -> None:
        async with Perdure(url, settings=chosen) as app:
            for number in range(int(progress.read_text() or 0) if progress.exists() else 0, count):
                name = f"{sender}:{number}"
                await app.signal(run_id, "post", name, key=name, by=sender)
                _note(progress, number + 1)
                await asyncio.sleep(pace_s)

    asyncio.run(main())


def _note(path: Path, number: int) -> None:
    path.with_suffix(".new").write_text(str(number))
    os.replace(path.with_suffix(".new"), path)


def top_up(folder: str, run_id: str, calls: int) -> None:
    """Add to the run's budget, and let all runs continue that this budget has stopped."""
    url, chosen = prepare(folder)

    async def main() -> None:
        async with Perdure(url, settings=chosen) as app:
            await app.unpause(run_id, by="ann", add=Budget(calls=calls))

    asyncio.run(main())


def refused(folder: str, report: str, run_id: str) -> None:
    """Try to signal a run that has ended."""
    url, chosen = prepare(folder)

    async def main() -> None:
        async with Perdure(url, settings=chosen) as app:
            try:
                await app.signal(run_id, "post", "late", key="late")
            except PerdureError as error:
                tell(report, error=type(error).__name__)

    asyncio.run(main())
