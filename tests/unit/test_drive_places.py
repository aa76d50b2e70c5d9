"""A worker whose environment changes: its file disappears, its loop is blocked, its tool returns twice."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.unit.drive_tools import SETTINGS, perdure, run, until

from perdure import Run, agent, tool


def test_a_file_that_is_moved_away_stops_every_effect_and_when_it_is_back_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    database, elsewhere = tmp_path / "db", tmp_path / "elsewhere"
    performed: list[int] = []

    @tool(effect="once")
    async def pay(at: int) -> int:
        performed.append(at)
        if at == 1:
            database.rename(elsewhere)
        return at

    @agent(version="1")
    async def payer(run: Run) -> list[int]:
        return [await pay(at) for at in range(4)]

    async def main() -> Any:
        async with perdure(database, [payer]) as app:
            await app.start(payer, id="r")
            driving = asyncio.create_task(app.engine.drive("r"))
            await until(lambda: "was deleted, moved or replaced" in caplog.text)
            assert performed == [0, 1], "no intent can be written, so that no effect may begin"
            elsewhere.rename(database)
            await driving
            return await app.handle("r").result()

    with caplog.at_level(logging.ERROR):
        assert run(main()) == [0, 1, 2, 3]
    assert performed == [0, 1, 2, 3]


def test_a_loop_that_does_not_turn_is_told_with_the_run_whose_agent_blocks_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    @agent(version="1")
    async def spinning(run: Run) -> None:
        end = time.monotonic() + 0.6
        while time.monotonic() < end:
            pass

    async def main() -> None:
        async with perdure(tmp_path / "db", [spinning], settings=msgspec.structs.replace(SETTINGS, lease_s=0.2)) as app:
            await app.start(spinning, id="spinner")
            await app.engine.drive("spinner")

    with caplog.at_level(logging.ERROR):
        run(main())
    assert "the event loop has not turned for" in caplog.text
    assert "inside the agent of run spinner" in caplog.text


_FORKS = """
    import asyncio, os, sys, time
    from pathlib import Path
    from perdure import Perdure, Run, agent, tool

    folder = Path(sys.argv[1])

    def did(what):
        with open(folder / "ledger", "a") as ledger:
            ledger.write(f"{what}\\n")

    @tool(effect="once")
    async def slow() -> None:
        await asyncio.sleep(0.5)
        did("slow")

    @tool(effect="once")
    async def forks() -> str:
        await asyncio.sleep(0.1)
        if os.fork() == 0:
            return "child"  # os._exit was forgotten
        return "parent"

    @tool(effect="once")
    def forks_in_a_thread() -> str:
        return "child" if os.fork() == 0 else "parent"

    @agent(version="1")
    async def innocent(run: Run) -> None:
        await slow()

    @agent(version="1")
    async def forker(run: Run, how: str) -> str:
        return await (forks() if how == "task" else forks_in_a_thread())

    async def main():
        async with Perdure(f"sqlite:///{folder}/db", agents=[innocent, forker]) as app:
            runs = [await app.start(innocent, id=f"r{at}") for at in range(3)]
            forked = await app.start(forker, sys.argv[2], id="f")
            results = await asyncio.gather(forked.result(), *(one.result() for one in runs))
            print(results[0])

    asyncio.run(main())
    did("end")
"""


@pytest.mark.parametrize("how", ["task", "thread"])
def test_a_tool_that_forks_and_returns_in_the_child_does_not_repeat_the_effects_of_other_runs(tmp_path: Path, how: str) -> None:
    program = tmp_path / "forks.py"
    program.write_text(textwrap.dedent(_FORKS))
    done = subprocess.run([sys.executable, program, tmp_path, how], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "parent\n"), done.stderr
    time.sleep(0.7)  # a ghost would be done by now
    assert sorted((tmp_path / "ledger").read_text().split()) == ["end", "slow", "slow", "slow"]


def test_only_a_subprocess_that_a_tool_starts_properly_goes_on(tmp_path: Path) -> None:
    @tool(effect="read")
    def shell() -> str:
        return subprocess.run(["echo", "hello"], capture_output=True, text=True, check=True).stdout.strip()

    @agent(version="1")
    async def sheller(run: Run) -> str:
        return str(await shell())

    async def main() -> Any:
        async with perdure(tmp_path / "db", [sheller]) as app:
            return await app.run(sheller)

    assert run(main()) == "hello"
