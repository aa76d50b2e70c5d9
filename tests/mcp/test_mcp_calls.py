"""The tools of a real MCP server inside agents: what is recorded, what the server gets, and what its failures mean."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import time
from typing import Any

import pytest
from tests.mcp.warehouse import POLITE, Warehouse, alive, until_gone
from tests.unit.approval_tools import check_replay
from tests.unit.drive_tools import outline, perdure, run

from perdure import Agent, Approval, InvalidInput, NotApproved, NotReady, Perdure, Run, Settings, ToolFailed, agent, mcp, sync
from perdure.agents.mcp.listing import Offered
from perdure.agents.mcp.tool import McpCallee
from perdure.agents.mcp.tools import McpServer
from perdure.core.events import ToolCallCompleted, ToolCallFailed, ToolCallInDoubt, ToolCallInitiated
from perdure.engine.clock import Clock

SETTINGS = Settings(poll_s=0.002, reconcile_margin_s=0, unknown_deadline_s=0, cancel_grace_s=0.5, flush_s=0.005)


def app_on(folder: Any, *agents: Agent[Any, Any]) -> Perdure:
    return perdure(folder / "journal.db", agents, Clock(), SETTINGS)


def initiated(app: Perdure, run_id: str) -> dict[int, ToolCallInitiated]:
    return {event.call or 0: event.body for event in app.store.read(run_id) if isinstance(event.body, ToolCallInitiated)}


def failure(error: ToolFailed) -> list[Any]:
    return [error.kind, error.type, error.attempts]


def shopping(server: McpServer) -> Agent[Any, Any]:
    @agent(version="1")
    async def shop(run: Run) -> Any:
        tools = {tool.name: tool for tool in await server.toolset(run)}
        found, stored = await asyncio.gather(tools["search"](query="box"), tools["put"](name="a", value=3))
        deleted = await server.call("delete", name="a")
        return [found, stored, deleted, await server.call("picture"), len(await server.call("large", chars=70_000))]

    return shop


def test_the_tools_of_a_server_are_durable_calls_with_its_name_its_classes_and_their_keys(warehouse, tmp_path):
    server = warehouse.server()

    async def main() -> None:
        async with app_on(tmp_path, shopping(server)) as app:
            found, stored, deleted, picture, length = await app.run("shop", id="r")
            calls = initiated(app, "r")
            assert [(call.tool, call.effect) for call in calls.values()] == [
                ("warehouse.tools/list", "read"),
                ("warehouse.search", "read"),
                ("warehouse.put", "idempotent"),
                ("warehouse.delete", "once"),
                ("warehouse.picture", "read"),
                ("warehouse.large", "read"),
            ]
            assert found == "found box\nat most 10"
            assert stored == {"a": 3}
            assert deleted == {"result": "deleted a"}
            assert picture.startswith("one pixel\n[image/png, 70 bytes, sha256 6b7fa434")
            assert length == 70_000
            meta = {line["tool"]: line["meta"] for line in warehouse.ledger()}
            assert meta["delete"] == {
                "perdure/idempotency-key": calls[4].key,
                "perdure/run": "r",
                "perdure/call": 4,
                "perdure/attempt": 1,
            }
        await server.close()

    run(main())
    assert [line["tool"] for line in warehouse.ledger()] in (["search", "put", "delete"], ["put", "search", "delete"])


def test_no_tool_of_a_server_is_called_in_a_stored_fork_and_a_live_fork_repeats_none(http, tmp_path):
    server = http.server()

    @agent(version="1")
    async def shop(run: Run, name: str) -> Any:
        await server.toolset(run)
        await server.call("put", name=name, value=3)
        return [await server.call("delete", name="a"), await server.call("delete", name=name)]

    async def main() -> None:
        async with app_on(tmp_path, shop) as app:
            await app.run("shop", "b", id="r")
            done = [line["tool"] for line in http.ledger()]
            fork = await app.fork("r", input={"name": "c"}, reads=True, id="s")
            assert [(call.name, call.args) for call in fork.would_call] == [("warehouse.put", {"name": "c", "value": 3})]
            assert [line["tool"] for line in http.ledger()] == done
            await app.live_fork("r", id="f")
            assert await app.handle("f").result() == [{"result": "deleted a"}, {"result": "deleted b"}]
            assert [line["tool"] for line in http.ledger()] == done
            await app.live_fork("r", id="g", input={"name": "c"})
            assert await app.handle("g").result() == [{"result": "deleted a"}, {"result": "deleted c"}]
            assert [line["tool"] for line in http.ledger()] == [*done, "put", "delete"]
        await server.close()

    run(main())


def test_the_list_is_the_runs_own_and_says_which_server_it_is_from(stdio, tmp_path):
    server = stdio.server()
    code = shopping(server)

    async def main() -> None:
        async with app_on(tmp_path, code) as app:
            await app.run("shop", id="r")
            listed = next(event.body for event in app.store.read("r") if isinstance(event.body, ToolCallCompleted))
            assert listed.result is not None
            recorded = json.loads(listed.result.inline or b"")
            assert recorded["server"] == "warehouse 3.1"
            assert recorded["address"].endswith("(and 2 arguments)"), "arguments may be secret"
            assert {tool["name"] for tool in recorded["tools"]} >= {"search", "put", "delete"}
            await server.close()
            check_replay(app, code)  # nothing is asked of the server for that

    run(main())
    assert len(stdio.ledger()) == 3


def test_fifty_calls_at_once_share_one_connection(warehouse, tmp_path):
    server = warehouse.server()

    @agent(version="1")
    async def many(run: Run) -> int:
        tools = {tool.name: tool for tool in await server.toolset(run)}
        return len(await asyncio.gather(*(tools["ponder"](seconds=0.3) for _ in range(50))))

    async def main() -> float:
        async with app_on(tmp_path, many) as app:
            await server.toolset()  # the server is up
            begun = time.monotonic()
            assert await app.run(many) == 50
            took = time.monotonic() - begun
        await server.close()
        return took

    assert run(main()) < 10, "one after the other they take 15 s"
    assert len({line["pid"] for line in warehouse.ledger("ponder")}) == 1
    assert len({line["meta"]["perdure/idempotency-key"] for line in warehouse.ledger("ponder")}) == 50


def test_what_a_tool_fails_with_is_told_and_a_server_that_dies_is_started_again(stdio, tmp_path):
    server = stdio.server()

    @agent(version="1")
    async def trouble(run: Run) -> Any:
        told = []
        try:
            await server.call("fail", why="out of stock")
        except ToolFailed as error:
            told.append([*failure(error), "out of stock" in error.message])
        told.append(await server.call("faint"))  # dies the first time: it only reads, so it is asked again
        await server.call("crash")
        return told  # never reached: it is not known whether the crash came after the effect

    async def main() -> None:
        async with app_on(tmp_path, trouble) as app:
            handle = await app.start(trouble, id="r")
            row = await app.engine.drive("r")
            assert row.status == "needs_attention"
            assert "in_doubt 4/1" in outline(await handle.events())
            await app.resolve("r", 4, happened="it did", by="ann")
            told = await handle.result()
            assert told[0] == ["error", "McpToolError", 1, True]
            assert told[1]["result"].startswith("awake")
        await server.close()

    run(main())
    assert [line["tool"] for line in stdio.ledger()] == ["fail", "faint", "faint", "crash"]
    assert [line["meta"]["perdure/attempt"] for line in stdio.ledger("faint")] == [1, 2]
    assert len({line["pid"] for line in stdio.ledger()}) == 2, "the server of the first connection died; the second one served the rest"


def test_an_http_server_that_dies_during_a_call_leaves_a_doubt_and_the_next_one_is_found(tmp_path):
    warehouse = Warehouse(tmp_path, "http")
    server = warehouse.server()

    @agent(version="1")
    async def trouble(run: Run) -> str:
        await server.call("crash")
        return str(await server.call("search", query="box"))

    async def main() -> None:
        async with app_on(tmp_path, trouble) as app:
            handle = await app.start(trouble, id="r")
            assert (await app.engine.drive("r")).status == "needs_attention"
            warehouse.start()
            await app.resolve("r", 2, happened="it did", by="ann")
            assert await handle.result() == "found box\nat most 10"
        await server.close()

    try:
        run(main())
    finally:
        warehouse.stop()
    assert len(warehouse.ledger("crash")) == 1


def test_a_call_that_takes_too_long_is_in_doubt(warehouse, tmp_path):
    server = warehouse.server(timeout=1)

    @agent(version="1")
    async def waiting(run: Run) -> Any:
        return await server.call("slow", seconds=30)

    async def main() -> None:
        async with app_on(tmp_path, waiting) as app:
            await server.toolset()  # outside a run nothing has a time-out, and the server may be slow to start
            await app.start(waiting, id="r")
            assert (await app.engine.drive("r")).status == "needs_attention"
            doubt = next(event.body for event in app.store.read("r") if isinstance(event.body, ToolCallInDoubt))
            assert doubt.failure is not None
            assert doubt.failure.kind == "timeout"
            assert await server.call("ponder", seconds=0) == {"result": "pondered 0.0"}, "the connection is not the worse for it"
        await server.close()

    run(main())
    assert [line["what"] for line in warehouse.ledger("slow")] == ["begun"]


def test_a_call_that_is_stopped_while_the_server_starts_has_sent_nothing(stdio, tmp_path):
    command = ["sh", "-c", 'sleep 1.5; exec "$0" "$@"', sys.executable, POLITE, str(stdio.ledger_file)]
    server = mcp(command, name="warehouse", timeout=1)

    @agent(version="1")
    async def hasty(run: Run) -> Any:
        return await server.call("search", query="box")

    async def main() -> None:
        async with app_on(tmp_path, hasty) as app:
            assert await app.run(hasty, id="r") == "found box\nat most 10"
            told = [event.body.failure.kind for event in app.store.read("r") if isinstance(event.body, ToolCallFailed)]
            assert told
            assert set(told) == {"not_sent"}
        await server.close()

    run(main())
    assert len(stdio.ledger()) == 1


def test_outside_a_run_a_time_out_and_a_cancel_are_what_they_are():
    async def main() -> None:
        async with mcp(["sleep", "600"], name="silent") as server:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.5):
                    await server.toolset()
            task = asyncio.create_task(server.toolset())
            await asyncio.sleep(0.1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    run(main())


def test_a_redirect_on_the_same_host_is_followed(tmp_path):
    warehouse = Warehouse(tmp_path, "http")
    warehouse.start()

    async def main() -> Any:
        async with mcp(f"{warehouse.url}/", name="warehouse", timeout=60) as server:  # it sends us to the same without a slash
            return await server.call("search", query="box")

    try:
        assert run(main()) == "found box\nat most 10"
    finally:
        warehouse.stop()


def test_arguments_that_do_not_fit_are_refused_before_anything_is_recorded(http, tmp_path):
    server = http.server()
    words = []

    @agent(version="1")
    async def wrong(run: Run) -> None:
        for arguments in ({}, {"name": "a"}, {"name": "a", "value": "b"}, {"name": "a", "value": 1, "x": {1}}):
            try:
                await server.call("put", **arguments)
            except InvalidInput as refused:
                words.append(str(refused))
        try:
            await server.call("pull")
        except InvalidInput as refused:
            words.append(str(refused))

    async def main() -> None:
        async with app_on(tmp_path, wrong) as app:
            await app.run(wrong, id="r")
            assert [call.tool for call in initiated(app, "r").values()] == ["warehouse.tools/list"]
        await server.close()

    run(main())
    assert words[0] == "tool warehouse.put: name is missing"
    assert words[1] == "tool warehouse.put: value is missing"
    assert words[2] == "tool warehouse.put: value: it must be of type integer, not string"
    assert "x is of type set" in words[3]
    assert words[4].startswith("server warehouse has no tool 'pull' for this run; it has 'search', ")
    assert http.ledger() == []


def test_calls_of_a_server_can_need_a_person_who_may_change_them(http, tmp_path):
    approval = {"delete": Approval(when=lambda name, force: f"{name} for good" if name != "tmp" else False, editable=("name",))}
    server = http.server(approval=approval, effects={"delete": "keyed"})

    @agent(version="1")
    async def clean(run: Run) -> list[str]:
        said = [str((await server.call("delete", name="tmp"))["result"]), str((await server.call("delete", name="all"))["result"])]
        try:
            await server.call("delete", name="rest")
        except NotApproved as refused:
            said.append(refused.outcome)
        return said

    async def main() -> None:
        async with app_on(tmp_path, clean) as app:
            handle = await app.start(clean, id="r")
            assert (await app.engine.drive("r")).status == "waiting_approval"
            [asked] = await app.approvals()
            assert (asked.standing.request.action, asked.standing.request.reason) == ("warehouse.delete", "all for good")
            with pytest.raises(InvalidInput, match="force"):
                await app.approve(asked.approval, by="ann", edit={"force": True})
            await app.approve(asked.approval, by="ann", edit={"name": "some"})
            await app.engine.drive("r")
            [asked] = await app.approvals()
            await app.reject(asked.approval, by="ann", reason="enough")
            assert await handle.result() == ["deleted tmp", "deleted some", "rejected"]
            assert {call.effect for call in initiated(app, "r").values()} == {"read", "keyed"}
        await server.close()

    run(main())
    assert [line["arguments"]["name"] for line in http.ledger("delete")] == ["tmp", "some"]


def test_only_the_editable_arguments_of_an_approved_call_can_differ():
    schema = {"type": "object", "properties": {"name": {"type": "string"}, "force": {"type": "boolean"}}, "required": ["name"]}
    policy = Approval(editable=("name",))
    callee = McpCallee("files.delete", Offered("delete", "", schema, "once"), "once", 60, policy, None)  # type: ignore[arg-type]
    before = b'{"force":false,"name":"a"}'
    assert callee.editable_schema() == {"properties": {"name": {"type": "string"}}}
    assert callee.edited(before, b'{"force":false,"name":"b"}') == b'{"force":false,"name":"b"}'
    for edited, words in (
        (b'{"force":true,"name":"a"}', "force may not"),
        (b'{"name":"a"}', "force may not"),
        (b'{"force":false,"name":1}', "name: "),
    ):
        with pytest.raises(InvalidInput, match=words):
            callee.edited(before, edited)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"approval": {"delet": True}}, r"mcp\(approval=…\) names 'delet', which server warehouse does not offer"),
        ({"effects": {"delet": "keyed"}}, r"mcp\(effects=…\) names 'delet'"),
        ({"only": ["delete", "pull"]}, r"mcp\(only=…\) names 'pull'"),
        ({"approval": {"delete": lambda nam: True}}, "its approval policy takes nam"),
    ],
)
def test_a_name_that_is_written_wrong_is_noticed_before_anything_is_called(http, options, words):
    server = http.server(**options)

    async def main() -> None:
        async with server:
            with pytest.raises((NotReady, InvalidInput), match=words):
                await server.toolset()

    run(main())


def test_only_some_of_the_tools_and_a_name_that_is_taken(http):
    server = http.server(only=["search", "put"])

    async def main() -> list[str]:
        async with server:
            return [tool.name for tool in await server.toolset(taken=("search",))]

    assert run(main()) == ["warehouse_search", "put"]


def test_what_a_server_says_on_stderr_is_in_the_log_and_does_nothing_to_a_terminal(stdio, caplog):
    caplog.set_level(logging.INFO, "perdure.mcp")
    server = stdio.server()

    async def main() -> None:
        async with server:
            await server.call("complain", words="\x1b[31mred\x1b[0m and größer")

    run(main())
    assert r"server warehouse: \x1b[31mred\x1b[0m and größer" in [record.getMessage() for record in caplog.records]


def test_a_server_ends_with_its_loop_and_so_does_what_it_has_started(stdio):
    server = stdio.server("--stubborn")
    started: list[int] = []

    def children() -> set[int]:
        with open(f"/proc/self/task/{os.getpid()}/children") as listed:
            return {int(pid) for pid in listed.read().split()}

    before = children()  # servers of other tests, which go on

    async def main() -> None:
        started.append(int(await server.call("beget")))
        started.extend(children() - before)

    run(main())  # and nothing closes it
    for pid in started:
        until_gone(pid, 1.0)


def test_a_server_ends_with_a_blocking_app_too(stdio):
    server = stdio.server()

    @agent(version="1")
    async def look(run: Run) -> Any:
        return await server.call("search", query="box")

    with sync.Perdure("sqlite://", [look], settings=SETTINGS) as app:
        app.run(look)
        [line] = stdio.ledger()
    assert not alive(line["pid"]), "it was waited for"


@pytest.mark.parametrize("command", [["false"], ["echo", "hello"]])
def test_a_server_that_cannot_be_started_is_proof_that_nothing_was_sent(command, tmp_path):
    server = McpServer(command, name="none", env=None, headers=None, timeout=20, effects=None, approval=None, only=None)

    @agent(version="1")
    async def hopeful(run: Run) -> Any:
        return await server.toolset(run)

    async def main() -> None:
        async with app_on(tmp_path, hopeful) as app:
            await app.start(hopeful, id="r")
            assert (await app.engine.drive("r", wait=False)).status == "waiting"
            events = app.store.read("r")
            assert outline(events)[1:4] == ["initiated none.tools/list 1/1", "failing 1/1 not_sent", "retry 1/2"]
            told = next(event.body for event in events if isinstance(event.body, ToolCallFailed))
            assert told.failure.message.startswith(f"server none: {command[0]} exited with code ")

    run(main())


def test_its_process_ends_with_the_last_worker_that_has_used_it_and_not_with_the_loop(stdio, tmp_path):
    server = stdio.server()

    @agent(version="1")
    async def ask(run: Run) -> str:
        return str(await server.call("search", query="box"))

    async def main() -> None:
        async with app_on(tmp_path, ask) as first:
            await first.run(ask, id="a")
            async with app_on(tmp_path, ask) as second:
                await second.run(ask, id="b")
            [pid] = {line["pid"] for line in stdio.ledger("search")}
            assert alive(pid), "somebody still uses it"
        assert not alive(pid), "nobody does, and the loop goes on"
        async with app_on(tmp_path, ask) as third:
            await third.run(ask, id="c")
            assert len({line["pid"] for line in stdio.ledger("search")}) == 2

    run(main())


def test_after_a_retry_the_calls_of_a_server_are_not_made_again(warehouse, tmp_path):
    server = warehouse.server()
    bug = [True]

    @agent(version="1")
    async def shop(run: Run) -> Any:
        tools = {tool.name: tool for tool in await server.toolset(run)}
        stored = await tools["put"](name="a", value=3)
        deleted = await server.call("delete", name="a")
        if bug:
            raise ValueError("a bug")
        return [stored, deleted]

    async def main() -> None:
        async with app_on(tmp_path, shop) as app:
            await app.start(shop, id="r")
            assert (await app.drive("r")).status == "failed"
            bug.clear()
            await app.rewind("r", 2)  # to before all calls: each of them is made again, and has its recorded result
            assert (await app.drive("r")).status == "succeeded"
            assert await app.handle("r").result() == [{"a": 3}, {"result": "deleted a"}]
            assert len(warehouse.ledger("put")) == len(warehouse.ledger("delete")) == 1

    run(main())
