"""Shared by the MCP tests: the server in a separate process, over either transport, and its ledger."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.servers import forked

from perdure import mcp
from perdure.agents.mcp.tools import McpServer

SERVERS = Path(__file__).resolve().parents[1] / "servers"
POLITE = str(SERVERS / "mcp_server.py")
RUDE = str(SERVERS / "mcp_rude.py")


class Warehouse:
    """One server, and how to reach it. Over stdio every connection starts a process; over HTTP there is one."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.ledger_file = folder / "ledger"
        self.ledger_file.touch()
        self.kind = kind
        self._port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    def server(self, *flags: str, **options: Any) -> McpServer:
        options = {"name": "warehouse", "timeout": 20, **options}
        if self.kind == "stdio":
            return mcp([sys.executable, POLITE, str(self.ledger_file), *flags], **options)
        self.start(*flags)
        return mcp(self.url, **options)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}/mcp"

    def start(self, *flags: str) -> None:
        """Start the HTTP server, which replaces the server before."""
        self.stop()
        command = [sys.executable, POLITE, str(self.ledger_file), "--port", str(self._port), *flags]
        self._process = forked.Popen(command, brings=("mcp.server.mcpserver", "uvicorn"))
        wait_for_port(self._port, self._process)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def ledger(self, tool: str | None = None) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in self.ledger_file.read_text().splitlines()]
        return [line for line in lines if tool is None or line["tool"] == tool]


@contextmanager
def rude_http(*flags: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The URL of a rude server over HTTP, and its process."""
    port = free_port()
    process = forked.Popen([sys.executable, RUDE, "--port", str(port), *flags], stdout=subprocess.PIPE, text=True)
    try:
        wait_for_port(port, process)
        yield f"http://127.0.0.1:{port}/mcp", process
    finally:
        process.kill()
        if process.stdout is not None and not process.stdout.closed:
            process.communicate()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_for_port(port: int, process: subprocess.Popen[Any]) -> None:
    until = time.monotonic() + 60
    while time.monotonic() < until:
        assert process.poll() is None, "the server has ended"
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.02)
    raise AssertionError("the server does not come up")


def alive(pid: int) -> bool:
    """Does the process still do something? A process that has ended and was not reaped does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def until_gone(pid: int, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while alive(pid):
        assert time.monotonic() < deadline, f"process {pid} is still there"
        time.sleep(0.01)


def descendants(pid: int) -> list[int]:
    """Every process below this one."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += [int(child), *descendants(int(child))]
    return found


def python_path() -> dict[str, str]:
    root = Path(__file__).resolve().parents[2]
    return {**os.environ, "PYTHONPATH": f"{root / 'src'}:{root}"}
