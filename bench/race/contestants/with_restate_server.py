"""The server of Restate from npm: one node with its default configuration, on free ports, its files in the measurement's folder."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
import wire

MODULES = Path(sys.prefix) / "node_modules" / "@restatedev"
Given = Mapping[str, Any]


def data_in(given: Given) -> Path:
    return Path(given["folder"]) / "data"


async def serve(given: Given) -> dict[str, Any]:
    folder = Path(given["folder"])
    ingress, admin, node, service = free_ports(4)
    settings = {
        "RESTATE_INGRESS__BIND_ADDRESS": f"127.0.0.1:{ingress}",
        "RESTATE_ADMIN__BIND_ADDRESS": f"127.0.0.1:{admin}",
        "RESTATE_BIND_ADDRESS": f"127.0.0.1:{node}",
        "RESTATE_ADVERTISED_ADDRESS": f"http://127.0.0.1:{node}",
        "RESTATE_LISTEN_MODE": "tcp",
        "RESTATE_DISABLE_TELEMETRY": "true",
    }
    (binary,) = MODULES.glob("restate-server-*/bin/restate-server")
    with (folder / "server.log").open("w") as log:
        server = await asyncio.create_subprocess_exec(
            binary, "--base-dir", data_in(given), "--node-name", "race", "--no-logo", env=os.environ | settings, stdout=log, stderr=log
        )
    try:
        await until_healthy(f"http://127.0.0.1:{admin}/health")
        await until_healthy(f"http://127.0.0.1:{ingress}/restate/health")
        addresses = {"ingress": ingress, "admin": admin, "service": service}
        wire.say({"ready": True, "pid": server.pid} | {name: f"http://127.0.0.1:{port}" for name, port in addresses.items()})
        await wire.leaving().wait()
    finally:
        server.terminate()
        await server.wait()
    return {"left": True}


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in sockets]


async def until_healthy(url: str) -> None:
    async with aiohttp.ClientSession() as http:
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                async with http.get(url) as response:
                    if response.status == 200:
                        return
            await asyncio.sleep(0.05)
