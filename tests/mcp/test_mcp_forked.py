"""A fork of a run with the tools of a real MCP server.

The server gets no call, or with `reads` only calls that read.
"""

from __future__ import annotations

import asyncio
from typing import Any

from tests.mcp.test_mcp_calls import app_on
from tests.unit.drive_tools import run

from perdure import Run, agent


def test_a_fork_sends_nothing_to_a_server_and_with_reads_only_what_reads(warehouse, tmp_path):
    server = warehouse.server()

    @agent(version="1")
    async def shop(run: Run, what: str) -> Any:
        tools = {tool.name: tool for tool in await server.toolset(run)}
        calls = (tools["search"](query=what), tools["put"](name=what, value=3), server.call("delete", name=what))
        return await asyncio.gather(*calls, return_exceptions=True)

    async def main() -> None:
        async with app_on(tmp_path, shop) as app:
            await app.run("shop", "box", id="r")
            before = warehouse.ledger()
            assert (await app.fork("r")).diff.is_same
            fork = await app.fork("r", input={"what": "bag"})
            assert [call.name for call in fork.would_call] == ["warehouse.search", "warehouse.put", "warehouse.delete"]
            assert warehouse.ledger() == before
            fork = await app.fork("r", input={"what": "bag"}, reads=True)
            assert [call.name for call in fork.would_call] == ["warehouse.put", "warehouse.delete"]
            assert [line["tool"] for line in warehouse.ledger()[len(before) :]] == ["search"]
        await server.close()

    run(main())
