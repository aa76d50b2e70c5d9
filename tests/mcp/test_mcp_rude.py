"""Servers that break the rules: their lists and answers are limited and checked, and nothing hangs."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from tests.mcp.warehouse import RUDE, free_port, rude_http
from tests.unit.drive_tools import run

from perdure import Approval, Call, InvalidInput, NotReady, NotSent, mcp
from perdure.agents.mcp.connection import ServerConnections
from perdure.agents.mcp.errors import BadListing, while_opening
from perdure.agents.mcp.http import Faults
from perdure.agents.mcp.listing import MAX_TOOLS, Arguments, BadSchema, names_for_models
from perdure.agents.mcp.tools import McpServer
from perdure.core.failures import describe


def rude(*flags: str, **options: Any) -> McpServer:
    return mcp([sys.executable, RUDE, *flags], name="rude", timeout=60, **options)


async def kind_of(server: McpServer, tool: str, **arguments: Any) -> str:
    """How the failure of the call would be recorded."""
    with pytest.raises(Exception) as raised:
        await server.call(tool, **arguments)
    failure = describe(raised.value)
    assert "\x1b" not in failure.message or tool.startswith("rpc")
    return failure.kind


def test_what_cannot_be_used_is_left_out_with_a_reason_and_the_rest_is_named_for_models():
    server = rude()

    async def main() -> None:
        async with server:
            listing = await server._listing_now(Call.outside())
            assert listing.server == r"rude\x1b[2J 0"
            assert listing.protocol == "2025-06-18"
            left_out = {tool.name[:20]: tool.why for tool in listing.left_out}
            assert left_out["twice"] == "it is listed 2 times"
            assert left_out["n" * 20] == "its name has 300 characters; the limit is 200"
            assert left_out[""].startswith("its name has 0 characters")
            assert "the limit is 65,536" in left_out["huge"]
            assert left_out["broken"].startswith("its schema is no JSON Schema")
            tools = {tool.offered.name: tool for tool in await server.toolset()}
            assert tools["with spaces"].name.startswith("rude_with_spaces")
            assert tools["with_spaces"].name == "with_spaces"
            assert tools["größe/2"].name == "rude_gr__e_2"
            assert len(tools["n" * 128].name) == 64
            assert len({tool.name for tool in tools.values()}) == len(tools)
            assert tools["loud"].description == "\\x1b[31mred\\x07 \\u202eevil\nsecond line"
            assert len(tools["wordy"].description) < 10_100
            assert await tools["größe/2"]() == '["gr\\u00f6\\u00dfe/2", {}]', "the server is called by its own name for it"
            with pytest.raises(NotReady, match="'twice', a tool of server rude that cannot be used: it is listed 2 times"):
                await rude_with(server, only=["twice"]).toolset()

    run(main())


def rude_with(server: McpServer, **options: Any) -> McpServer:
    """The same connection, declared in another way."""
    other = rude(**options)
    other._connections = server._connections
    return other


def test_schemas_that_would_take_for_ever_are_given_up():
    server = rude()

    async def main() -> None:
        async with server:
            await server.toolset()
            begun = time.process_time()
            for tool, words in (("bomb", "10,000 references"), ("loop", "cannot be checked"), ("outside", "cannot be checked")):
                with pytest.raises(InvalidInput, match=words):
                    await server.call(tool, x=1)
            await server.call("regex", x="a" * 60 + "b")  # its pattern is the server's to check
            assert time.process_time() - begun < 5

    run(main())


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--endless"], "has no end: 100 pages"),
        (["--many", str(MAX_TOOLS + 1)], "more than 1,000"),
        (["--untyped"], "breaks the MCP protocol: tools.0.inputSchema.type"),
    ],
)
def test_a_list_that_cannot_be_one_is_an_error(flags, words):
    server = rude(*flags)

    async def main() -> None:
        with pytest.raises(BadListing, match=words):
            await server.toolset()
        await server.close()

    run(main())


def test_what_a_server_answers_means_what_it_proves():
    server = rude()

    async def main() -> None:
        async with server:
            for code, kind in {
                -32602: "refused",
                -32601: "refused",
                -32600: "refused",
                -32603: "server_error",
                -32700: "server_error",
                -32000: "reset",
                -32001: "timeout",
                -1: "error",
                429: "error",
            }.items():
                assert await kind_of(server, "rpc", code=code) == kind, code
            assert await kind_of(server, "nonsense") == "server_error", "it has answered: nobody knows what"
            assert await kind_of(server, "status", status=0) == "reset"  # it dies
            assert await server.call("echo") == '["echo", {}]'  # and is started again

    run(main())


def test_what_a_gateway_answers_means_what_it_proves():
    async def main(url: str) -> None:
        async with mcp(url, name="rude", timeout=60) as server:
            for status, kind in {
                400: "refused",
                401: "refused",
                404: "not_sent",  # the session is unknown there
                429: "rate_limited",
                500: "server_error",
                503: "server_error",
                202: "server_error",  # accepted, and never answered
                200: "server_error",  # a page of HTML
                0: "reset",  # cut before the answer
                1: "reset",  # cut inside it
            }.items():
                beside = None if status == 404 else asyncio.create_task(server.call("echo"))
                assert await kind_of(server, "status", status=status) == kind, status
                assert await (beside or server.call("echo")) == '["echo", {}]', "a failure is that call's own"
            with pytest.raises(Exception) as raised:
                await server.call("status", status=429)
            assert describe(raised.value).retry_after_s == 7.0

    with rude_http() as (url, process):
        run(main(url))
        process.kill()
        said, _ = process.communicate()
    assert "deleted session-" in said, "sessions are closed"


def test_nobody_there_is_proof_that_nothing_was_sent():
    server = mcp(f"http://127.0.0.1:{free_port()}/mcp", name="nobody")

    async def main() -> None:
        async with server:
            for _ in range(3):
                with pytest.raises(NotSent, match="no connection to server nobody: ConnectError"):
                    await server.call("echo")

    run(main())


@asynccontextmanager
async def closed_door() -> AsyncIterator[Any]:
    raise ConnectionRefusedError("nobody there")
    yield


def test_a_line_that_keeps_failing_is_opened_more_and_more_slowly():
    line = ServerConnections("dead", "nowhere", closed_door, 10, lambda error: error)
    took: list[float] = []

    async def main() -> None:
        for _ in range(5):
            begun = time.monotonic()
            with pytest.raises(NotSent, match="no connection to server dead: ConnectionRefusedError: nobody there"):
                await line.live()
            took.append(time.monotonic() - begun)

    run(main())
    assert took[0] < took[4]
    assert all(measured >= delay for measured, delay in zip(took, (0, 0.1, 0.2, 0.4, 0.8), strict=True))


def test_a_long_list_of_different_things_is_checked_in_no_time():
    items = [{"n": n} for n in range(2_000)]
    schema = {"type": "object", "properties": {"x": {"type": "array", "uniqueItems": True}}}
    old = {"$schema": "http://json-schema.org/draft-04/schema#", "type": "object", "properties": {"x": {"enum": items}}}
    begun = time.process_time()
    Arguments(schema).check("it", {"x": items})
    Arguments(old)
    assert time.process_time() - begun < 1
    with pytest.raises(InvalidInput, match="it: x: it does not fit uniqueItems"):
        Arguments(schema).check("it", {"x": [*items, {"n": 7}]})
    with pytest.raises(BadSchema, match="the same item twice"):
        Arguments({**old, "properties": {"x": {"enum": [{}, {}]}}})


@pytest.mark.parametrize("reference", ["#", "#/$defs/again"])
def test_a_schema_that_names_its_kind_again_is_bounded_no_less(reference):
    kind = "https://json-schema.org/draft/2020-12/schema"
    regex = {"$schema": kind, "type": ["object", "string"], "pattern": "^(a+)+$"}
    schema = {**regex, "type": "object", "properties": {"x": {"$ref": reference}}, "$defs": {"again": regex}}
    if reference == "#":
        schema |= {"properties": {"x": {"$ref": reference}, "y": {"type": "string", "pattern": "^(a+)+$"}}}
    inside = {"y": "a" * 24 + "b"} if reference == "#" else "a" * 24 + "b"
    Arguments(schema).check("it", {"x": inside})  # its pattern is the server's to check


def over_ten(n: int) -> bool:
    return n > 10


def over_five(n: int) -> bool:
    return n > 5


def test_another_url_or_another_approval_is_another_version_and_another_key_or_program_is_not():
    def pin(server: Any = "https://host/mcp", policy: Any = True, **options: Any) -> str:
        return mcp(server, name="one", approval={"delete": policy}, **options).pin()

    policies = [True, False, over_ten, over_five, Approval(), Approval(by="ann"), Approval(by="ann", when=over_ten)]
    urls = ["https://host/other", "https://host/mcp?tenant=2", "https://host:8443/mcp", "https://other/mcp", "http://host/mcp"]
    pins = [*(pin(policy=policy) for policy in policies), *map(pin, urls), pin(["server"])]
    assert len(set(pins)) == len(pins)
    assert pin() == pin("https://ann:key@host/mcp", headers={"Authorization": "Bearer key"})
    assert pin(["server"]) == pin(["/opt/server", "--data", "here"], env={"KEY": "other"})


def test_a_ticket_is_good_once_and_only_if_it_is_ours():
    faults, error = Faults(), ConnectionRefusedError("no")
    ticket = faults.keep(error)
    assert faults.redeem({"perdure/ticket": "0" * 32}) is None
    assert faults.redeem(["perdure/ticket"]) is None
    assert faults.redeem(ticket) is error
    assert faults.redeem(ticket) is None


def test_why_there_is_no_connection_is_found_inside_groups():
    inside = ExceptionGroup("many", [ExceptionGroup("more", [ConnectionRefusedError("no")])])
    assert str(while_opening(inside, "files")) == "no connection to server files: ConnectionRefusedError: no"


def test_names_for_models_stay_apart():
    names = names_for_models("files", ["a b", "a_b", "a.b", "x" * 65, "x" * 66], taken=["files_a_b"])
    assert names["a_b"] == "a_b"
    assert len(set(names.values())) == 5
    assert all(len(name) <= 64 for name in names.values())
    assert names == names_for_models("files", ["a b", "a_b", "a.b", "x" * 65, "x" * 66], taken=["files_a_b"])


@pytest.mark.parametrize(
    ("server", "options", "words"),
    [
        ("", {}, "a server is a command"),
        ([], {}, "a server is a command"),
        (7, {}, "a server is a command"),
        (["a", ""], {}, "a server is a command"),
        ("python 'server.py", {}, "cannot be read"),
        ("http://", {}, "not a URL"),
        ("http://host:70000/mcp", {}, "not a URL"),
        ("server", {"name": "a b"}, "a server's name is"),
        ("server", {"timeout": 0}, "timeout=0"),
        ("server", {"headers": {"a": "b"}}, "headers are for a URL"),
        ("http://a/mcp", {"env": {"a": "b"}}, "env is for a process"),
        ("server", {"env": {"a": 1}}, "env=…"),
        ("server", {"effects": {"a": "transaction"}}, "no class for it"),
        ("server", {"only": "search"}, "a list of tool names"),
    ],
)
def test_what_is_declared_wrong_is_refused_where_it_is_declared(server, options, words):
    with pytest.raises(InvalidInput, match=words):
        mcp(server, **options)


@pytest.mark.parametrize(
    ("server", "name", "address"),
    [
        ("python -m files_server /data", "files_server", "python (and 3 arguments)"),
        (["npx", "-y", "@modelcontextprotocol/server-files"], "server-files", "npx (and 2 arguments)"),
        ("https://ann:secret@api.example.com:8443/secret?key=secret", "api_example_com", "https://api.example.com:8443 (#e2cda272)"),
        ("https://api.example.com/", "api_example_com", "https://api.example.com"),
        ("http://[::1]:80", "_1", "http://[::1]:80"),
        (["/opt/7zip"], "_7zip", "/opt/7zip"),
    ],
)
def test_a_server_has_a_name_and_an_address_without_secrets(server, name, address):
    found = mcp(server)
    assert (found.name, found.address) == (name, address)
    assert "secret" not in repr(found)
