"""Servers that write a line without an end: they are ended at a limit, and up to it each byte costs the same."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from typing import Any

import pytest
from tests.mcp.test_mcp_calls import app_on
from tests.mcp.warehouse import RUDE, until_gone
from tests.unit.drive_tools import outline, run

from perdure import NotSent, Run, agent, mcp
from perdure.agents.mcp.tools import McpServer
from perdure.core.failures import describe

LIMIT = "33,554,432 bytes"


def rude(*flags: str, **options: Any) -> McpServer:
    return mcp([sys.executable, RUDE, *flags], name="rude", timeout=60, **options)


def test_a_server_that_does_not_end_its_line_is_ended_and_what_is_in_flight_is_in_doubt():
    async def main() -> None:
        async with rude() as server:
            pid = int(await server.call("pid"))
            beside = asyncio.create_task(server.call("unanswered"))
            while await server.call("how_many_unanswered") != "1":
                assert not beside.done()
            with pytest.raises(ConnectionResetError) as raised:
                await server.call("flood")
            failure = describe(raised.value)
            assert failure.kind == "reset", "nobody knows what became of it"
            assert "server rude ended while the call was under way" in failure.message
            assert f"wrote more than {LIMIT} without a line break" in failure.message, "the rule"
            assert "have the tool return less" in failure.message, "the way out"
            with pytest.raises(ConnectionResetError, match="server rude ended while the call was under way"):
                await beside
            await asyncio.to_thread(until_gone, pid, 60)
            assert int(await server.call("pid")) != pid, "the next call starts another"

    run(main())


@pytest.mark.parametrize(("tool", "status", "then"), [("flood", "needs_attention", "in_doubt 2/1"), ("flood_read", "waiting", "retry 2/2")])
def test_the_call_becomes_what_its_effect_class_says(tmp_path, tool, status, then):
    server = rude()

    @agent(version="1")
    async def asking(run: Run) -> Any:
        return await server.call(tool)

    async def main() -> None:
        async with app_on(tmp_path, asking) as app:
            await app.start(asking, id="r")
            assert (await app.engine.drive("r", wait=False)).status == status
            events = app.store.read("r")
            assert then in outline(events)
            assert f"more than {LIMIT} without a line break" in repr(events), "and the journal says why"

    run(main())


def test_a_server_that_does_not_end_its_first_line_is_no_connection_and_nothing_was_sent():
    async def main() -> None:
        async with rude("--flood") as server:
            with pytest.raises(NotSent, match=f"server rude: .* wrote more than {LIMIT} without a line break"):
                await server.call("echo")

    run(main())


def test_a_byte_of_a_long_line_costs_what_a_byte_of_a_short_one_costs():
    """CPU time of this process, for as many bytes: in short lines, one by one, and in one long line that ends one by one."""

    async def main() -> None:
        async with rude() as server:
            await server.call("echo")

            async def cpu_s(lines: int, mib: int, drips: int) -> float:
                begun = time.process_time()
                await server.call("drip", lines=lines, mib=mib, drips=drips)
                return time.process_time() - begun

            short_s, one_by_one_s = await cpu_s(24, 1, 0), await cpu_s(1, 0, 1000)
            long_s = await cpu_s(1, 24, 1000)
            assert long_s < 4 * (short_s + one_by_one_s), (short_s, one_by_one_s, long_s)

    run(main())


def test_what_a_server_says_on_stderr_without_a_line_break_is_cut_and_costs_nothing_else(caplog):
    caplog.set_level(logging.INFO, "perdure.mcp")

    async def main() -> None:
        async with rude() as server:
            pid = await server.call("pid")
            await server.call("shout", mib=8)
            assert await server.call("pid") == pid

    run(main())
    said = [line for record in caplog.records if "xxx" in (line := record.getMessage())]
    assert said
    assert max(map(len, said)) < 1_200
