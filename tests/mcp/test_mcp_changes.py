"""A server that is not what it was when the run began (T30): its list is the run's own, and a changed tool is not called by surprise."""

from __future__ import annotations

from typing import Any

from tests.mcp.test_mcp_calls import app_on
from tests.unit.drive_tools import run

from perdure import Agent, Run, ToolFailed, agent
from perdure.integrations.mcp import McpServer

CALLS: dict[str, dict[str, Any]] = {
    "put": {"name": "a", "value": 1},
    "delete": {"name": "a"},
    "search": {"query": "box"},
    "ponder": {"seconds": 0},
    "large": {"chars": 3},
    "fail": {"why": "always"},
}


def patient(server: McpServer) -> Agent[Any, Any]:
    """Takes the list, waits for a word, and then calls; in whatever process that is."""

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


def test_a_run_keeps_its_list_and_a_tool_that_is_not_what_it_was_is_not_called_by_surprise(stdio, tmp_path):
    options: dict[str, Any] = {"effects": {"large": "read"}}

    async def first() -> None:
        server = stdio.server(**options)
        async with app_on(tmp_path, patient(server)) as app:
            await app.start("wait", id="r")
            await app.drive("r")
        await server.close()

    async def second() -> dict[str, Any]:
        changed = "--without put --changed delete --changed search --writable ponder --writable large".split()
        server = stdio.server(*changed, **options)
        async with app_on(tmp_path, patient(server)) as app:
            await app.signal("r", "go")
            await app.drive("r")
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
    assert [line["tool"] for line in stdio.ledger()] == ["search", "fail"]


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
