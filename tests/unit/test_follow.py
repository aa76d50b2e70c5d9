"""`handle.follow(progress=True)`: statuses of the agent, and the progress of calls, as they come."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from tests.unit.drive_tools import run, until

from perdure import Call, Perdure, Run, RunningCall, Settings, agent, tool
from perdure.core.events import Event, StatusReported, ToolCallCompleted
from perdure.sync import Perdure as SyncPerdure

QUICK = Settings(progress_s=0.0, poll_s=0.01)


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'db'}" if request.param == "sqlite" else str(request.getfixturevalue("postgres_url"))


class Steps:
    """An agent whose tool goes on to its next part when the test lets it."""

    def __init__(self) -> None:
        self.go: dict[int, asyncio.Event] = {}

        @tool(effect="idempotent")
        async def copy(call: Call) -> str:
            for part in (1, 2):
                call.heartbeat({"part": part})
                await self.go.setdefault(part, asyncio.Event()).wait()
            return "copied"

        @agent(version="1")
        async def copier(run: Run) -> str:
            run.status("copying")
            done = await copy()
            run.status("done")
            return done

        self.agent: Any = copier


def short(one: Event | RunningCall) -> str:
    if isinstance(one, RunningCall):
        return f"{one.tool} {one.call}/{one.attempt} {one.progress['part']}"
    return one.body.text if isinstance(one.body, StatusReported) else one.type


@pytest.mark.parametrize(("elsewhere", "after"), [(False, 3), (True, 0)], ids=["the same app, from the middle", "another app"])
def test_statuses_and_progress_come_in_their_order_and_nothing_comes_after_the_end_of_a_call(url: str, elsewhere: bool, after: int) -> None:
    steps = Steps()
    seen: list[Event | RunningCall] = []

    async def main() -> None:
        async with Perdure(url, [steps.agent], settings=QUICK) as app, Perdure(url, settings=QUICK) as other:
            await app.start(steps.agent, id="r")
            driving = asyncio.create_task(app.drive("r"))
            if after:
                await until(lambda: app.store.progress(["r"]))

            async def collect() -> None:
                news = (other if elsewhere else app).handle("r").follow(after, progress=True)
                while (one := await anext(news, None)) is not None:
                    seen.append(one)

            following = asyncio.create_task(collect())
            for part in (1, 2):
                await until(lambda part=part: f"copy 1/1 {part}" in map(short, seen))
                steps.go.setdefault(part, asyncio.Event()).set()
            await asyncio.gather(driving, following)

    run(main())
    lines = [short(one) for one in seen]
    progress = ["copy 1/1 1", "copy 1/1 2"]
    assert [line for line in lines if line in progress] == progress
    assert lines[-3:] == ["tool_call_completed", "done", "run_succeeded"]
    if not after:
        assert lines.index("copying") < lines.index("tool_call_initiated") < lines.index("copy 1/1 1")
    assert all(isinstance(one, RunningCall) == (short(one) in progress) for one in seen)


def test_without_progress_only_events_come() -> None:
    steps = Steps()

    async def main() -> list[Any]:
        async with Perdure("sqlite://", [steps.agent], settings=QUICK) as app:
            await app.start(steps.agent, id="r")
            driving = asyncio.create_task(app.drive("r"))
            await until(lambda: app.store.progress(["r"]))
            for part in (1, 2):
                steps.go.setdefault(part, asyncio.Event()).set()
            found = [event async for event in app.handle("r").follow()]
            await driving
            return found

    found = run(main())
    assert {type(one) for one in found} == {Event}
    (ended,) = [one.body for one in found if isinstance(one.body, ToolCallCompleted)]
    assert ended.progress is not None
    assert ended.progress.inline == b'{"part":2}'


def test_the_loop_can_be_left_while_a_call_is_under_way() -> None:
    steps = Steps()

    async def main() -> Any:
        async with Perdure("sqlite://", [steps.agent], settings=QUICK) as app:
            await app.start(steps.agent, id="r")
            driving = asyncio.create_task(app.drive("r"))
            async with contextlib.aclosing(app.handle("r").follow(progress=True)) as news:
                first = await anext(one async for one in news if isinstance(one, RunningCall))
            for part in (1, 2):
                steps.go.setdefault(part, asyncio.Event()).set()
            await driving
            return first.progress

    assert run(main()) == {"part": 1}


@pytest.mark.full
def test_a_program_without_asyncio_hears_a_worker_in_another_process(url: str, tmp_path: Path) -> None:
    code = tmp_path / "copying.py"
    go = tmp_path / "go"
    code.write_text(
        textwrap.dedent(
            f"""
            import asyncio
            from pathlib import Path
            from perdure import Call, Run, agent, tool

            @tool(effect="idempotent")
            async def copy(call: Call) -> str:
                call.heartbeat({{"part": 1}})
                while not Path({str(go)!r}).exists():
                    await asyncio.sleep(0.01)
                return "copied"

            @agent(version="1")
            async def copier(run: Run) -> str:
                run.status("copying")
                return await copy()
            """
        )
    )
    worker = subprocess.Popen([sys.executable, "-m", "perdure", "run", f"{code}:copier", "--id", "r", "--url", url])
    try:
        with SyncPerdure(url, settings=QUICK) as app:
            run(until(lambda: any(one.id == "r" for one in app.list())))
            heard = []
            for one in app.handle("r").follow(progress=True):
                heard.append(short(one))
                if isinstance(one, RunningCall):
                    go.touch()
        assert worker.wait(60) == 0
    finally:
        worker.kill()
        worker.wait()
    assert heard.index("copying") < heard.index("copy 1/1 1") < heard.index("tool_call_completed")
