"""What is durable before what, and what a user sees of this order."""

from __future__ import annotations

import asyncio
import dataclasses
import warnings
from pathlib import Path
from typing import Any

import apsw
import pytest
from tests.unit.drive_tools import perdure, run

from perdure import Call, Perdure, Run, UnknownAgent, agent, tool


def test_what_came_of_an_effect_is_durable_before_a_transactions_tool_runs(tmp_path: Path) -> None:
    """A crash inside the transaction would otherwise make a doubt of a result that was known."""
    seen: list[list[str]] = []

    @tool(effect="once")
    async def mail() -> str:
        return "sent"

    @tool(effect="transaction")
    def book(call: Call) -> None:
        with apsw.Connection(str(tmp_path / "db"), flags=apsw.SQLITE_OPEN_READONLY) as other:
            seen.append([str(kind) for (kind,) in other.execute("SELECT type FROM perdure_events ORDER BY id")])

    @agent(version="1")
    async def clerk(run: Run) -> str:
        sent = await mail()
        await book()
        return str(sent)

    async def main() -> Any:
        async with perdure(tmp_path / "db", [clerk]) as app:
            return await app.run(clerk)

    assert run(main()) == "sent"
    assert seen[0][-2:] == ["tool_call_completed", "tool_call_initiated"]


def test_an_agent_that_the_app_does_not_serve_is_refused_and_not_waited_for_for_ever() -> None:
    @agent(version="1")
    async def known(run: Run) -> None: ...

    @agent(version="1")
    async def unknown(run: Run) -> None: ...

    async def main() -> None:
        async with perdure(None, [known]) as app:
            with pytest.raises(UnknownAgent, match=r"this app does not serve agent unknown.*agents=\[unknown"):
                await app.run(unknown, id="r")
            assert app.store.get("r") is None, "nothing is left behind"

    run(main())


@dataclasses.dataclass
class Order:
    number: int
    lines: dict[int, str]


def test_an_agents_result_comes_back_as_what_its_annotation_says() -> None:
    @agent(version="1")
    async def orders(run: Run) -> Order:
        return Order(7, {1: "tea"})

    async def main() -> Any:
        async with perdure(None, [orders]) as app:
            return await app.run(orders, id="r"), await app.handle("r").result()

    assert run(main()) == (Order(7, {1: "tea"}), Order(7, {1: "tea"}))


def test_a_call_that_was_not_awaited_is_named_by_its_tool() -> None:
    @tool(effect="read")
    async def look_up() -> int:
        return 1

    @agent(version="1")
    async def forgetful(run: Run) -> str:
        look_up()  # type: ignore[unused-coroutine]
        await asyncio.sleep(0)
        return "done"

    async def main() -> Any:
        async with perdure(None, [forgetful]) as app:
            return await app.run(forgetful)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert run(main()) == "done"
    assert [str(one.message) for one in caught if "never awaited" in str(one.message)] == ["coroutine 'look_up' was never awaited"]


@agent(version="1")
async def at_the_top(run: Run) -> None: ...


def test_a_run_that_a_program_starts_says_where_its_agent_is() -> None:
    @agent(version="1")
    async def inside(run: Run) -> None: ...

    async def main() -> list[str | None]:
        async with Perdure("sqlite://", [at_the_top, inside]) as app:
            started = [await app.start(at_the_top), await app.start(inside)]
            return [(await one.row()).target for one in started]

    assert run(main()) == [f"{__file__}:at_the_top", None]
