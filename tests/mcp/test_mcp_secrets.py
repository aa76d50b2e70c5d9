"""Secrets that `mcp(…)` was given are in no journal and no log, whatever the server does with them (G15)."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.mcp.test_mcp_calls import app_on
from tests.mcp.warehouse import RUDE, rude_http
from tests.unit.drive_tools import run

from perdure import NotReady, Perdure, Run, Secret, ToolFailed, agent, mcp
from perdure.agents.mcp.errors import McpToolError, while_opening
from perdure.agents.mcp.http import FaultKeeping, Faults
from perdure.agents.mcp.secrets import redacted, secrets_of
from perdure.agents.mcp.stdio import MAX_LINE_CHARS
from perdure.agents.mcp.tool import value_of
from perdure.agents.mcp.tools import McpServer
from perdure.core.events import ToolCallFailed, encode_body

SECRET = "kT9-very-secret-7Qx"
PART = SECRET[:5]


def told_about(server: McpServer, folder: Path, caplog: Any, *calls: tuple[str, dict[str, Any]]) -> list[str]:
    """What an agent learns about these calls. Checks that neither its journal nor the log contains the secret."""
    caplog.set_level(logging.INFO, "perdure")

    @agent(version="1")
    async def trying(run: Run) -> list[str]:
        told = []
        for name, arguments in calls:
            try:
                told.append(str(await server.call(name, **arguments)))
            except ToolFailed as error:
                told.append(error.message)
        return told

    async def main() -> list[str]:
        async with app_on(folder, trying) as app:
            await app.start(trying, id="r")
            await app.engine.drive("r", wait=False)
            events = app.store.read("r")
            assert PART not in repr(events)
            failed = [event.body.failure.message for event in events if isinstance(event.body, ToolCallFailed)]
        await server.close()
        return failed

    failed = run(main())
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("perdure")]
    assert not [line for line in lines if PART in line]
    return failed + lines


def test_a_header_that_comes_back_in_an_error_page_is_not_told(tmp_path, caplog):
    with rude_http() as (url, _):
        server = mcp(f"{url}/{SECRET}", name="rude", headers={"Authorization": f"Bearer {SECRET}"}, timeout=60)
        told = told_about(server, tmp_path, caplog, ("status", {"status": 400}))
    assert told[0] == "HTTP 400: <html>/mcp/[hidden] is not for [hidden]</html>"


def test_half_of_a_header_in_an_error_page_is_not_told_either(tmp_path, caplog):
    with rude_http() as (url, _):
        server = mcp(url + "/abcdefg" * 20, name="rude", headers={"Authorization": f"Bearer {SECRET}"}, timeout=60)
        told = told_about(server, tmp_path, caplog, ("status", {"status": 400}))
    assert told[0].endswith("/abcdefg is not for [hidden]</html>")


def test_a_header_that_comes_back_instead_of_a_connection_is_not_told(tmp_path, caplog):
    with rude_http("--locked") as (url, _):
        server = mcp(url, name="rude", headers={"Authorization": f"Bearer {SECRET}"}, timeout=60)
        told = told_about(server, tmp_path, caplog, ("echo", {}))
    assert any("/mcp is not for [hidden]" in line for line in told)


def test_a_header_that_cannot_be_sent_is_not_told(tmp_path, caplog):
    with rude_http() as (url, _):
        server = mcp(url, name="rude", headers={"Authorization": f"Bearer {SECRET}\n"}, timeout=60)
        told = told_about(server, tmp_path, caplog, ("echo", {}))
        assert any("[hidden]" in line for line in told)
        run(at_once(url))


async def at_once(url: str) -> None:
    faults, headers = Faults(), {"Authorization": f"Bearer {SECRET}\n"}
    async with FaultKeeping(headers, 10, faults, secrets_of(url, headers, {})) as client:
        response = await client.post(url, json={"jsonrpc": "2.0", "id": 1, "method": "ping"})
    error = faults.redeem(response.json()["error"]["data"])
    assert type(error).__name__ == "LocalProtocolError"
    assert PART not in str(error)


def test_an_environment_that_comes_back_on_stderr_is_not_told(tmp_path, caplog):
    script = "import os, sys; sys.exit('no ' + os.environ['KEY'] + ' here')"
    server = mcp([sys.executable, "-c", script], name="ended", env={"KEY": SECRET})
    told = told_about(server, tmp_path, caplog, ("echo", {}))
    assert told[0].endswith("exited with code 1: no [hidden] here")
    assert "server ended: no [hidden] here" in told


def test_a_server_inherits_six_variables_and_none_of_our_secrets(monkeypatch):
    for name in ("PERDURE_URL", "PERDURE_WEBHOOK_SECRET", "PGPASSWORD", "ANTHROPIC_API_KEY", "ANYTHING_ELSE"):
        monkeypatch.setenv(name, SECRET)

    async def main() -> str:
        async with mcp([sys.executable, RUDE], name="rude", env={"GIVEN": "it"}, timeout=60) as server:
            return str(await server.call("environment"))

    found = json.loads(run(main()))
    assert found["GIVEN"] == "it"
    ours_or_pythons = {"GIVEN", "LC_CTYPE"}  # Python sets the latter for itself
    assert found.keys() - ours_or_pythons <= {"HOME", "LOGNAME", "PATH", "SHELL", "TERM", "USER"}


def test_an_environment_that_comes_back_in_an_rpc_error_is_not_told(tmp_path, caplog):
    server = mcp([sys.executable, RUDE], name="rude", env={"RUDE_SECRET": SECRET}, timeout=60)
    told = told_about(server, tmp_path, caplog, ("rpc", {"code": -32602}))
    assert told[0] == "server rude: as you wish\x1b[31m[hidden] (JSON-RPC error -32602)"


def test_an_environment_that_comes_back_instead_of_a_connection_is_not_told(tmp_path, caplog):
    server = mcp([sys.executable, RUDE, "--locked"], name="rude", env={"RUDE_SECRET": SECRET}, timeout=60)
    told = told_about(server, tmp_path, caplog, ("echo", {}))
    assert told[0] == "no connection to server rude: MCPError: not with [hidden]"
    assert "server rude: MCPError: not with [hidden]" in told


def test_an_environment_that_comes_back_in_what_a_tool_fails_with_is_not_told_and_a_result_is_left_alone():
    failed = {"isError": True, "content": [{"type": "text", "text": f"no {SECRET}"}]}
    with pytest.raises(McpToolError) as raised:
        value_of(failed, [SECRET])
    assert str(raised.value) == "no [hidden]"
    assert value_of({**failed, "isError": False}, [SECRET]) == f"no {SECRET}"


def test_half_of_a_secret_is_none_to_tell_either(caplog):
    caplog.set_level(logging.INFO, "perdure.mcp")
    script = f"import sys; sys.exit('x' * {MAX_LINE_CHARS - 5} + '{SECRET}')"

    async def main() -> None:
        async with mcp([sys.executable, "-c", script], name="none", env={"KEY": SECRET}) as server:
            with pytest.raises(Exception, match=r"\[hid"):
                await server.toolset()

    run(main())
    assert PART not in caplog.text


def test_secrets_are_found_in_every_way_they_may_be_written():
    secrets = secrets_of(
        "https://ann:pass%2Fword@host/v1/mcp/0123456789?api_key=query-key&x=1",
        {"Authorization": "Bearer header-token", "X-Key": 'quo"ted-key'},
        {"DATABASE": "postgres://bob:hunter22@db/main", "PEM": "-----BEGIN\nfirst-line\nsecond-line\n", "DEBUG": "true"},
    )
    hidden = [
        "pass%2Fword",
        "pass/word",
        "0123456789",
        "query-key",
        "header-token",
        json.dumps('quo"ted-key')[1:-1],
        "hunter22",
        "first-line",
    ]
    hidden += ["YW5uOnBhc3Mvd29yZA=="]  # ann:pass/word, as HTTP has it
    for secret in hidden:
        assert redacted(f"<{secret}>", secrets) == "<[hidden]>", secret
    for plain in ("Bearer", "true", "mcp", "v1", "host", "1"):
        assert redacted(plain, secrets) == plain
    assert (
        str(while_opening(ConnectionError("for hunter22"), "one", secrets)) == "no connection to server one: ConnectionError: for [hidden]"
    )


def test_a_secret_in_the_environment_of_a_server_is_resolved_for_each_call_and_not_recorded(tmp_path, caplog):
    values = [SECRET, SECRET, "another-" + SECRET]
    server = mcp([sys.executable, RUDE], name="rude", env={"GIVEN": f"key {Secret('server')}"}, timeout=60)

    @agent(version="1")
    async def trying(run: Run) -> list[Any]:
        return [await server.call("environment"), await server.call("environment")]

    async def main() -> list[Any]:
        async with Perdure("sqlite://", [trying], secrets=lambda name: values.pop(0) if len(values) > 1 else values[0]) as app:
            found: list[Any] = await app.run(trying, id="r")
            journal = b"".join(encode_body(event.body) for event in app.store.read("r"))
            assert PART.encode() not in journal
        await server.close()
        return found

    caplog.set_level(logging.INFO, "perdure")
    found = [json.loads(one) if isinstance(one, str) else one for one in run(main())]
    assert [one["GIVEN"] for one in found] == ["key <secret server>"] * 2
    assert values == ["another-" + SECRET]
    assert PART not in caplog.text


def test_a_server_without_its_secret_is_not_started():
    server = mcp([sys.executable, RUDE], name="rude", env={"GIVEN": Secret("absent")}, timeout=60)

    async def main() -> None:
        with pytest.raises(NotReady, match="set PERDURE_SECRET_ABSENT"):
            await server.call("environment")

    run(main())
