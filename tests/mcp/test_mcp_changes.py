"""A server that has changed since the run began (T30).

The run keeps its list of tools, and a changed tool is not called.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from tests.mcp.test_mcp_calls import app_on
from tests.mcp.warehouse import RUDE, Warehouse, rude_http
from tests.unit.drive_tools import run

from perdure import Agent, Run, ToolFailed, agent, mcp
from perdure.agents.mcp import tools as module
from perdure.agents.mcp.tools import McpServer

CALLS: dict[str, dict[str, Any]] = {
    "put": {"name": "a", "value": 1},
    "delete": {"name": "a"},
    "search": {"query": "box"},
    "ponder": {"seconds": 0},
    "large": {"chars": 3},
    "fail": {"why": "always"},
}


def patient(server: McpServer) -> Agent[Any, Any]:
    """Takes the list, waits for a signal, and then makes the call, in any process."""

    @agent(version="1")
    async def wait(run: Run) -> Any:
        tools = {tool.name: tool for tool in await server.toolset(run)}
        await run.receive("go")
        told: dict[str, Any] = {}
        for name, arguments in CALLS.items():
            try:
                told[name] = await tools[name](**arguments)
            except ToolFailed as error:
                told[name] = (error.kind, error.type, error.message)
        return told

    return wait


def test_a_run_keeps_its_list_and_a_tool_that_is_not_what_it_was_is_not_called_by_surprise(http, tmp_path):
    options: dict[str, Any] = {"effects": {"large": "read"}}

    async def first() -> None:
        server = http.server(**options)
        async with app_on(tmp_path, patient(server)) as app:
            await app.start("wait", id="r")
            await app.engine.drive("r")
        await server.close()

    async def second() -> dict[str, Any]:
        changed = "--without put --changed delete --changed search --writable ponder --writable large".split()
        server = http.server(*changed, **options)
        async with app_on(tmp_path, patient(server)) as app:
            await app.signal("r", "go")
            await app.engine.drive("r")
            told: dict[str, Any] = await app.handle("r").result()
        await server.close()
        return told

    run(first())
    told = run(second())
    gone = "server warehouse does not offer 'put' any more; this run began when it did. Nothing was called"
    assert told["put"] == ["refused", "ToolGone", gone]
    assert told["delete"][:2] == ["refused", "ToolChanged"]
    assert told["delete"][2].startswith(
        "tool 'delete' of server warehouse has changed since this run's list was recorded; nothing was called."
    )
    assert told["search"] == "found box from 0", "it still only reads, and takes what it took"
    assert told["ponder"][:2] == ["refused", "ToolChanged"], "the class by which it would be repeated is not its own any more"
    assert told["large"] == "xxx", "the class is ours to say"
    assert told["fail"][:2] == ["error", "McpToolError"], "what has not changed is called"
    assert [line["tool"] for line in http.ledger()] == ["search", "fail"]


def test_a_list_that_changes_under_way_is_noticed(warehouse, tmp_path):
    server = warehouse.server()

    @agent(version="1")
    async def surprised(run: Run) -> Any:
        tools = {tool.name: tool for tool in await server.toolset(run)}
        await tools["rearrange"](without="delete")
        await tools["ponder"](seconds=0.2)  # the news is on its way
        try:
            await tools["delete"](name="a")
        except ToolFailed as error:
            return [error.type, "delete" in {tool.name for tool in await server.toolset(run)}]

    async def main() -> None:
        async with app_on(tmp_path, surprised) as app:
            assert await app.run(surprised) == ["ToolGone", True]
        await server.close()

    run(main())
    assert warehouse.ledger("delete") == []


def test_a_list_that_changes_in_silence_is_a_new_runs_all_the_same_and_what_does_more_than_read_is_compared_with_a_fresh_one(
    tmp_path, monkeypatch
):
    server = mcp([sys.executable, RUDE], name="rude", timeout=60)

    @agent(version="1")
    async def names(run: Run) -> list[str]:
        return [tool.offered.name for tool in await server.toolset(run)]

    @agent(version="1")
    async def surprised(run: Run) -> Any:
        tools = {tool.offered.name: tool for tool in await server.toolset(run)}
        await tools["forget"](name="loud")
        await tools["forget"](name="echo")
        monkeypatch.setattr(module, "FRESH_S", 0.0)  # half a minute has passed
        told = [await tools["with spaces"]()]
        for name in ("loud", "echo"):
            try:
                told.append(await tools[name]())
            except ToolFailed as error:
                told.append(error.type)
        return told

    async def main() -> None:
        async with app_on(tmp_path, names, surprised) as app:
            before = await app.run(names)
            assert {"loud", "echo", "wordy"} <= set(before)
            assert await app.run(surprised) == ['["with spaces", {}]', "ToolGone", "ToolGone"]
            await server.call("forget", name="wordy")
            assert set(before) - set(await app.run(names)) == {"loud", "echo", "wordy"}

    run(main())


def test_a_run_that_begins_after_the_server_has_forgotten_the_session_opens_another(tmp_path):
    async def main(url: str) -> None:
        server = mcp(url, name="rude", timeout=60)

        @agent(version="1")
        async def count(run: Run) -> int:
            return len(await server.toolset(run))

        async with app_on(tmp_path, count) as app, mcp(url, name="other", timeout=60) as other:
            there = await app.run(count)
            await other.toolset()  # this server knows only its last caller
            async with asyncio.timeout(10):
                assert await app.run(count) == there

    with rude_http() as (url, _):
        run(main(url))


def test_a_run_that_begins_after_the_server_was_started_again_finds_it(tmp_path):
    warehouse = Warehouse(tmp_path, "http")
    server = warehouse.server()

    @agent(version="1")
    async def names(run: Run) -> list[str]:
        return [tool.offered.name for tool in await server.toolset(run)]

    async def main() -> None:
        async with app_on(tmp_path, names) as app:
            assert "put" in await app.run(names)
            warehouse.start("--without", "put")
            assert "put" not in await app.run(names)

    try:
        run(main())
    finally:
        warehouse.stop()
