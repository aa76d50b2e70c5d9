"""The app inside an agent is refused: no journal would record its work, and every replay would repeat it.

Inside a tool the app is allowed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from tests.unit.drive_tools import perdure, run

from perdure import NotAllowedInAgent, Perdure, Run, agent, sync, tool

Use = Callable[[Perdure], Awaitable[Any]]


@agent(version="1")
async def other(run: Run) -> int:
    return 7


async def _opens(app: Perdure) -> None:
    async with Perdure(app.url):
        pass


async def _follows(app: Perdure) -> None:
    async for _ in app.handle("there").follow():
        pass


USES: dict[str, Use] = {
    "start": lambda app: app.start(other),
    "run": lambda app: app.run(other),
    "in a task": lambda app: asyncio.ensure_future(app.start(other)),
    "signal": lambda app: app.signal("there", "topic", 1),
    "cancel": lambda app: app.cancel("there"),
    "pause": lambda app: app.pause("there"),
    "unpause": lambda app: app.unpause("there"),
    "approve": lambda app: app.approve("a", by="ann"),
    "reject": lambda app: app.reject("a", by="ann", reason="no"),
    "resolve": lambda app: app.resolve("there", 1, did_not_happen=True),
    "adopt": lambda app: app.adopt("there"),
    "undo": lambda app: app.undo("there"),
    "drive": lambda app: app.engine.drive("there"),
    "work": lambda app: app.work(),
    "approvals": lambda app: app.approvals(),
    "costs": lambda app: app.costs(),
    "transcript": lambda app: app.transcript("there"),
    "status": lambda app: app.handle("there").row(),
    "result": lambda app: app.handle("there").result(),
    "events": lambda app: app.handle("there").events(),
    "follow": _follows,
    "open": _opens,
}


@pytest.mark.parametrize("use", USES)
def test_an_agent_may_not_use_the_app_and_hears_what_to_do_instead(tmp_path: Path, use: str) -> None:
    apps: list[Perdure] = []

    @agent(version="1")
    async def reckless(run: Run) -> str:
        try:
            await USES[use](apps[0])
        except NotAllowedInAgent as refused:
            return str(refused)
        return "it was allowed"

    async def main() -> tuple[str, list[str]]:
        async with perdure(tmp_path / "db", [reckless, other]) as app:
            apps.append(app)
            await app.start(other, id="there")
            said = str(await app.run(reckless, id="r"))
            return said, [event.type for event in await app.handle("there").events()]

    said, left_alone = run(main())
    assert "an agent may not use the app" in said
    assert "await other(…)" in said
    assert "in a tool" in said
    assert left_alone == ["run_created"]


@pytest.mark.parametrize("use", ["start", "signal", "open"])
def test_neither_may_it_use_the_app_that_blocks(tmp_path: Path, use: str) -> None:
    opened: list[sync.Perdure] = []
    uses: dict[str, Callable[[], Any]] = {
        "start": lambda: opened[0].start(other),
        "signal": lambda: opened[0].signal("there", "topic"),
        "open": lambda: sync.Perdure(f"sqlite:///{tmp_path}/more.db").__enter__(),
    }

    @agent(version="1")
    async def reckless(run: Run) -> str:
        try:
            uses[use]()
        except NotAllowedInAgent as refused:
            return str(refused)
        return "it was allowed"

    with sync.Perdure(f"sqlite:///{tmp_path}/blocks.db", [other]) as app:
        opened.append(app)

        async def main() -> str:
            async with perdure(tmp_path / "db", [reckless]) as apart:
                return str(await apart.run(reckless))

        assert "an agent may not use the app" in run(main())
    assert not (tmp_path / "more.db").exists()


def test_a_tool_may_use_the_app_whether_it_blocks_or_not(tmp_path: Path) -> None:
    apps: list[Perdure] = []

    @tool(effect="idempotent")
    async def starts(run_id: str) -> str:
        handle = await apps[0].start(other, id=run_id)
        return str((await handle.row()).status)

    @tool(effect="idempotent")
    def starts_elsewhere(run_id: str) -> int:
        with sync.Perdure(f"sqlite:///{tmp_path}/elsewhere.db", [other]) as app:
            return int(app.run(other, id=run_id))

    @agent(version="1")
    async def careful(run: Run) -> list[Any]:
        return [await starts("another"), await starts_elsewhere("elsewhere"), await other()]

    async def main() -> Any:
        async with perdure(tmp_path / "db", [careful, other]) as app:
            apps.append(app)
            return await app.run(careful)

    assert run(main()) == ["queued", 7, 7]
