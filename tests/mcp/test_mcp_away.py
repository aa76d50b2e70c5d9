"""Servers that cannot be reached: the error says why, nothing is lost, and a run waits as long as that is useful."""

from __future__ import annotations

import asyncio
import gc
import sys
from asyncio.base_subprocess import BaseSubprocessTransport
from typing import Any

import pytest
from tests.mcp.test_mcp_calls import app_on
from tests.mcp.warehouse import POLITE, RUDE, Warehouse
from tests.unit.drive_tools import ManualClock, outline, perdure, run

from perdure import Agent, Call, NotReady, NotSent, Run, ToolFailed, agent, mcp
from perdure.agents.mcp import stdio
from perdure.agents.mcp.tools import McpServer
from perdure.core.events import ToolCallFailed, ToolCallInDoubt


@pytest.fixture(autouse=True)
def _waits_for_last_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a second may go by between the end of a server's output and the report about its end."""
    monkeypatch.setattr(stdio, "_REPORT_S", 600.0)


def seeking(server: McpServer) -> Agent[Any, Any]:
    @agent(version="1")
    async def seek(run: Run) -> Any:
        return await server.call("search", query="box")

    return seek


def test_a_program_that_is_missing_is_named_before_anything_is_started_and_the_run_goes_on_once_it_is_there(stdio, tmp_path):
    program = tmp_path / "bin" / "findme"
    server = mcp(["findme", str(stdio.ledger_file)], name="warehouse", timeout=60, env={"PATH": f"{program.parent}:/usr/bin:/bin"})

    async def main() -> Any:
        async with app_on(tmp_path, seeking(server)) as app:
            handle = await app.start("seek", id="r")
            assert (await app.engine.drive("r", wait=False)).status == "needs_attention"
            told = [event.body.failure for event in app.store.read("r") if isinstance(event.body, ToolCallFailed)]
            assert [failure.message.partition(";")[0] for failure in told] == ["server warehouse: findme: no such program on the PATH"]
            program.parent.mkdir()
            program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{POLITE}" "$@"\n')
            program.chmod(0o755)
            await app.unpause("r", by="ann")
            await app.engine.drive("r", wait=False)
            return await handle.result()

    assert run(main()) == "found box\nat most 10"


@pytest.mark.parametrize(
    ("program", "words"),
    [("nosuchprogram", "no such program on the PATH"), ("./nowhere", "no such program"), (POLITE, "is not executable")],
)
def test_what_cannot_be_started_is_told_with_the_way_out(program, words):
    async def main() -> None:
        async with mcp([program], name="none") as server:
            with pytest.raises(NotReady, match=rf"server none: {program}: {words}; .*mcp\(…\)"):
                await server.toolset()

    run(main())


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("import sys; sys.exit(0)", "exited with code 0: it has said nothing on stderr"),
        ("import sys; print('it is', file=sys.stderr); sys.exit('no \x1b[31mkey')", r"exited with code 1: it is | no \x1b[31mkey"),
        ("import os; os.kill(os.getpid(), 9)", "was ended by signal 9: it has said nothing on stderr"),
        ("import os; os.write(2, b'cut'); os._exit(2)", "exited with code 2: cut"),
    ],
)
def test_a_server_that_ends_at_once_is_told_about_with_its_code_and_its_last_words(script, words):
    async def main() -> None:
        async with mcp([sys.executable, "-c", script], name="none") as server:
            for _ in range(2):  # each process has its own end
                with pytest.raises(NotSent) as told:
                    await server.toolset()
                assert str(told.value) == f"server none: {sys.executable} {words}"

    run(main())


def test_last_words_are_short_and_the_last_ones():
    script = "import sys; print('first' + 'x' * 500, file=sys.stderr); sys.exit('y' * 200 + 'last')"

    async def main() -> str:
        async with mcp([sys.executable, "-c", script], name="none") as server:
            with pytest.raises(NotSent) as told:
                await server.toolset()
            return str(told.value).partition(": …")[2]

    said = run(main())
    assert len(said) == 299
    assert said.endswith("y" * 200 + "last")


def test_a_server_that_dies_inside_a_call_says_how(stdio, tmp_path):
    server = stdio.server()

    @agent(version="1")
    async def trouble(run: Run) -> None:
        await server.call("complain", words="the disk is full")
        await server.call("crash")

    async def main() -> None:
        async with app_on(tmp_path, trouble) as app:
            await app.start(trouble, id="r")
            assert (await app.engine.drive("r")).status == "needs_attention"
            [doubt] = [event.body for event in app.store.read("r") if isinstance(event.body, ToolCallInDoubt)]
            assert doubt.failure is not None
            assert doubt.failure.type == "ServerGone"
            assert doubt.failure.message.endswith(f"{sys.executable} exited with code 9: the disk is full")

    run(main())


def test_an_error_that_the_server_answers_with_is_not_taken_for_its_end():
    async def main() -> None:
        async with mcp([sys.executable, RUDE], name="rude", timeout=60) as server:
            await server.toolset()
            # A caller that treats the error as the server's end would wait for that end, which does not come: much
            # longer than this.
            async with asyncio.timeout(60):
                with pytest.raises(ConnectionResetError, match="as you wish"):
                    await server.call("rpc", code=-32000)

    run(main())


def test_a_server_whose_connection_is_just_ending_is_not_left_behind_when_it_is_closed():
    async def main() -> list[BaseSubprocessTransport]:
        async with mcp([sys.executable, RUDE], name="rude", timeout=60) as server:
            await server.toolset()
            live = await (await server._connections_here(Call.outside())).live()
            live.over.set()
            await asyncio.sleep(0.005)  # its keeper has begun to end the process, which takes longer than this
        return [one for one in gc.get_objects() if isinstance(one, BaseSubprocessTransport) and not one._closed]

    assert run(main()) == []


@pytest.mark.parametrize("option", ["effects", "approval", "only"])
def test_a_name_that_is_written_wrong_stops_the_run_until_the_code_is_right(http, tmp_path, option):
    wrong = {"effects": {"serch": "read"}, "approval": {"serch": True}, "only": ["serch"]}[option]

    async def first() -> None:
        async with app_on(tmp_path, seeking(http.server(**{option: wrong}))) as app:
            await app.start("seek", id="r")
            assert (await app.engine.drive("r", wait=False)).status == "needs_attention"
            [told] = [event.body.failure for event in app.store.read("r") if isinstance(event.body, ToolCallFailed)]
            assert told.message.startswith(f"mcp({option}=…) names 'serch', which server warehouse does not offer; it has 'search', ")

    async def second() -> Any:
        async with app_on(tmp_path, seeking(http.server())) as app:
            await app.unpause("r", by="ann")
            await app.engine.drive("r", wait=False)
            return await app.handle("r").result()

    run(first())
    assert run(second()) == "found box\nat most 10"


def test_a_slip_that_comes_after_the_list_was_recorded_calls_nothing_and_a_tool_that_has_come_since_is_no_slip(http, tmp_path):
    def waiting(server: McpServer) -> Agent[Any, Any]:
        @agent(version="1")
        async def wait(run: Run) -> Any:
            await server.toolset(run)
            await run.receive("go")
            return await server.call("delete", name="a")

        return wait

    async def drive(server: McpServer, *, go: bool = False, again: bool = False) -> str:
        async with app_on(tmp_path, waiting(server)) as app:
            if app.store.get("r") is None:
                await app.start("wait", id="r")
            if go:
                await app.signal("r", "go")
            if again:
                await app.unpause("r", by="ann")
            return str((await app.engine.drive("r", wait=False)).status)

    assert run(drive(http.server("--without", "put"))) == "waiting"
    assert run(drive(http.server(approval={"delet": True}), go=True)) == "needs_attention"
    assert http.ledger() == []
    assert run(drive(http.server(effects={"put": "keyed"}), again=True)) == "succeeded"
    assert len(http.ledger("delete")) == 1


@pytest.mark.parametrize("away", ["for the list", "for a call"])
def test_a_server_that_is_away_for_a_while_ends_no_run(tmp_path, away):
    warehouse, clock = Warehouse(tmp_path, "http"), ManualClock()
    server = warehouse.server()

    @agent(version="1")
    async def patient(run: Run) -> Any:
        if away == "for a call":
            await server.toolset(run)
        await run.receive("go")
        # It is `once`; it is tried again because it is proven that nothing was sent.
        return await server.call("delete", name="a")

    async def main() -> None:
        async with perdure(tmp_path / "journal.db", [patient], clock) as app:
            handle = await app.start(patient, id="r")
            await app.engine.drive("r", wait=False)
            warehouse.stop()
            await app.signal("r", "go")
            for _ in range(6):  # the default of tools is five attempts
                assert (await app.engine.drive("r", wait=False)).status == "waiting"
                clock.advance(120)
            warehouse.start()
            assert (await app.engine.drive("r", wait=False)).status == "succeeded"
            assert f"failing {2 if away == 'for a call' else 1}/6 not_sent" in outline(await handle.events())

    try:
        run(main())
    finally:
        warehouse.stop()
    assert len(warehouse.ledger("delete")) == 1


def test_what_a_tool_says_that_it_failed_with_is_not_repeated_for_all_the_patience(http, tmp_path):
    server = http.server(effects={"fail": "read"})

    @agent(version="1")
    async def trying(run: Run) -> int:
        try:
            await server.call("fail", why="no such thing")
        except ToolFailed as error:
            return error.attempts
        return 0

    async def main() -> int:
        async with app_on(tmp_path, trying) as app:
            return int(await app.run(trying, id="r"))

    assert run(main()) == 1
    assert len(http.ledger("fail")) == 1
