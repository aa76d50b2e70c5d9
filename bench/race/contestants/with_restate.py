"""Restate: services in Python behind the single-node server from npm, started with its own default configuration.

Every role except `serve` is a separate Restate service: the endpoint, its handlers and their caller share one process and one loop,
so that a step can report its time to the caller, which measures. with_restate_server.py runs the server, which outlives them.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import json
import os
import time
from collections.abc import AsyncIterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import aiohttp
import restate
import wire
from granian.constants import HTTPModes, Interfaces
from granian.http import HTTP2Settings
from granian.server.embed import Server
from restate.serde import JsonSerde
from with_restate_server import MODULES, data_in, serve

Given = Mapping[str, Any]

# Without options the signature of a step is inspected at every call to find a serializer; naming the serializer saves that.
TEXT: restate.RunOptions[str] = restate.RunOptions(serde=JsonSerde())
MOMENT: restate.RunOptions[int] = restate.RunOptions(serde=JsonSerde())
ANSWER: restate.RunOptions[dict[str, Any]] = restate.RunOptions(serde=JsonSerde())

# The whole journal is sent when its run is resumed; with 10,000 steps it broke the connection at granian's default window of 1 MiB.
WIDE = HTTP2Settings(initial_connection_window_size=64 * 2**20, initial_stream_window_size=64 * 2**20)

# The times that the steps of this process report.
began_ns: list[int] = []
handled: asyncio.Queue[int] = asyncio.Queue()

race = restate.Service("Race")


# ---- the agents ----


async def step(text: str, tool_ms: float) -> str:
    began_ns.append(time.monotonic_ns())
    if tool_ms:
        await asyncio.sleep(tool_ms / 1000)
    return text


async def begin() -> int:
    return time.monotonic_ns()


async def last_words() -> str:
    wire.last_words()


@race.handler()
async def steps(ctx: restate.Context, order: dict[str, Any]) -> int:
    for number in range(order["steps"]):
        await ctx.run_typed("step", step, TEXT, wire.text_of(number), order["tool_ms"])
    if order["dies"]:
        await ctx.run_typed("last words", last_words, TEXT)
    return int(order["steps"])


@race.handler()
async def single(ctx: restate.Context, text: str) -> int:
    """One queued step; returns when it began."""
    moment = await ctx.run_typed("begin", begin, MOMENT)
    handled.put_nowait(moment)
    return moment


async def model(messages: list[dict[str, Any]]) -> dict[str, Any]:
    turn = len(messages) // 2
    return {"role": "assistant", "content": wire.said(turn), "tool": "page", "number": turn}


async def page(number: int) -> str:
    return wire.said(number)


@race.handler()
async def talk(ctx: restate.Context, turns: int) -> None:
    messages: list[dict[str, Any]] = []
    for _ in range(turns):
        said = await ctx.run_typed("model", model, ANSWER, messages)
        result = await ctx.run_typed("page", page, TEXT, said["number"])
        messages += [said, {"role": "tool", "content": result}]
    await ctx.run_typed("last words", last_words, TEXT)


async def ask(awakeable: str, inbox: str) -> str:
    with Path(inbox).open("a") as lines:
        lines.write(awakeable + "\n")
    return awakeable


# By default the server keeps the connection of a waiting handler for a minute before it asks it to suspend. People do not answer so soon.
@race.handler(inactivity_timeout=timedelta(0))
async def approval(ctx: restate.Context, inbox: str) -> int:
    """Ask a person through `inbox` and wait for the answer; the step after it says when it began."""
    awakeable, answer = ctx.awakeable(type_hint=str)
    await ctx.run_typed("ask", ask, TEXT, awakeable, inbox)
    await answer
    moment = await ctx.run_typed("begin", begin, MOMENT)
    handled.put_nowait(moment)
    return moment


# ---- the service and its server ----


class Client:
    """The ingress of one server, which starts and awaits runs, and its admin API."""

    def __init__(self, http: aiohttp.ClientSession, server: Given) -> None:
        self._http = http
        self._ingress, self._admin, self._service = server["ingress"], server["admin"], server["service"]

    async def call(self, handler: str, argument: object) -> Any:
        return await self._post(f"{self._ingress}/Race/{handler}", argument)

    async def send(self, handler: str, argument: object) -> str:
        """Returns as soon as the call is durable on the server."""
        return str((await self._post(f"{self._ingress}/Race/{handler}/send", argument))["invocationId"])

    async def answer(self, awakeable: str, value: str) -> None:
        await self._post(f"{self._ingress}/restate/awakeables/{awakeable}/resolve", value)

    async def register(self) -> None:
        await self._post(f"{self._admin}/deployments", {"uri": self._service})

    async def resume(self, run: str) -> None:
        async with self._http.patch(f"{self._admin}/invocations/{run}/resume") as response:
            response.raise_for_status()

    async def count(self, where: str) -> int:
        answer = await self._post(f"{self._admin}/query", {"query": f"SELECT count(*) AS n FROM sys_invocation WHERE {where}"})
        return int(answer["rows"][0]["n"])

    async def until_all_are(self, status: str) -> None:
        while await self.count(f"status != '{status}'"):
            await asyncio.sleep(0.01)

    async def _post(self, url: str, body: object) -> Any:
        async with self._http.post(url, json=body, headers={"accept": "application/json"}) as response:
            if response.status >= 400:
                raise RuntimeError(f"{url} refused with {response.status}: {await response.text()}")
            return await response.json(content_type=None) if response.content_length != 0 else None


@contextlib.asynccontextmanager
async def connected(given: Given) -> AsyncIterator[Client]:
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=60)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as http:
        yield Client(http, given["server"])


@contextlib.asynccontextmanager
async def listening(given: Given) -> AsyncIterator[None]:
    """The service, served in this process: both directions of a step over one HTTP/2 stream."""
    port = int(given["server"]["service"].rsplit(":", 1)[1])
    endpoint = Server(
        restate.app([race]),
        port=port,
        interface=Interfaces.ASGINL,
        http=HTTPModes.http2,
        backlog=2048,
        websockets=False,
        log_enabled=False,
        http2_settings=WIDE,
    )
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(endpoint.serve())
        await until_open(port)
        yield
        endpoint.stop()  # type: ignore[no-untyped-call]


@contextlib.asynccontextmanager
async def serving(given: Given) -> AsyncIterator[Client]:
    """The service, registered at the server. One run was made, so that no figure includes the first connection."""
    async with connected(given) as client, listening(given):
        await client.register()
        await client.call("steps", order(1))
        began_ns.clear()
        yield client


async def until_open(port: int) -> None:
    while True:
        with contextlib.suppress(ConnectionRefusedError):
            (await asyncio.open_connection("127.0.0.1", port))[1].close()
            return
        await asyncio.sleep(0.005)


def order(count: int, tool_ms: float = 0, dies: bool = False) -> dict[str, Any]:
    return {"steps": count, "tool_ms": tool_ms, "dies": dies}


# ---- the roles ----


def about(_: Given) -> dict[str, Any]:
    package = json.loads((MODULES / "restate-server" / "package.json").read_text())
    return {
        "name": "Restate",
        "version": importlib.metadata.version("restate-sdk"),
        "server": package["version"],
        "stores": ["own"],
        "durable": "the result of a step after it ran, before the next begins: the server's log is fsynced per batch (its default); "
        "names of steps, no arguments",
        "how": "ctx.run_typed in a handler over HTTP/2 (granian), single-node server with its default configuration, telemetry off",
        "resume": "the server would try again by itself after 0.5, 1, 2 … 60 s (its default); the new process does not wait for that and calls "
        "PATCH /invocations/ID/resume",
    }


async def sequential(given: Given) -> dict[str, Any]:
    async with serving(given) as client:
        began = time.monotonic()
        await client.call("steps", order(given["steps"], given["tool_ms"]))
        seconds = time.monotonic() - began
    laps = wire.laps(began_ns) if given["steps"] > 1 else {}
    return {"seconds": seconds, **laps, "peak_mb": wire.peak_mb(), **size(given)}


async def together(given: Given) -> dict[str, Any]:
    async with serving(given) as client:
        began = time.monotonic()
        await asyncio.gather(*(client.call("steps", order(given["steps"], given["tool_ms"])) for _ in range(given["runs"])))
        seconds = time.monotonic() - began
    return {"seconds": seconds, "peak_mb": wire.peak_mb()}


async def queue(given: Given) -> dict[str, Any]:
    """One-way calls, served while they arrive: without a listening service they would not be queued, but fail and back off."""
    async with serving(given) as client:
        began = time.monotonic()
        await send_all(client, "single", [wire.text_of(number) for number in range(given["runs"])])
        for _ in range(given["runs"]):
            await handled.get()
        await client.until_all_are("completed")
        seconds = time.monotonic() - began
    return {
        "through_seconds": seconds,
        "why": "the worker serves while they arrive, so that sending and working have no figures of their own",
        "peak_mb": wire.peak_mb(),
    }


async def send_all(client: Client, handler: str, arguments: list[str]) -> None:
    """Fifty at a time; more are not faster."""
    waiting = iter(arguments)

    async def sender() -> None:
        for argument in waiting:
            await client.send(handler, argument)

    await asyncio.gather(*(sender() for _ in range(50)))


async def worker(given: Given) -> dict[str, Any]:
    async with serving(given):
        wire.say({"ready": True})
        await wire.leaving().wait()
    return {"left": True}


async def idle(given: Given) -> dict[str, Any]:
    async with connected(given) as client:

        async def start() -> int:
            return int(await client.call("single", wire.text_of(0)))

        waits_ms = await wire.idle_ms(given["times"], start)
    return {"ms": waits_ms, "why": "the server pushes, nobody polls"}


async def build(given: Given) -> dict[str, Any]:
    return await started(given, "steps", order(given["steps"], dies=True))


async def talk_until_killed(given: Given) -> dict[str, Any]:
    return await started(given, "talk", given["turns"])


async def started(given: Given, handler: str, argument: object) -> dict[str, Any]:
    async with serving(given) as client:
        run = await client.send(handler, argument)
        (Path(given["folder"]) / "run").write_text(run)
        await wire.leaving().wait()
    raise AssertionError("its last step ends the process")


async def resume(given: Given) -> dict[str, Any]:
    """Listen at the address that is registered at the server, and ask it to retry at once."""
    async with connected(given) as client, listening(given):
        await client.resume((Path(given["folder"]) / "run").read_text())
        await wire.leaving().wait()
    raise AssertionError("its last step ends the process")


async def park(given: Given) -> dict[str, Any]:
    async with serving(given) as client:
        began = time.monotonic()
        await send_all(client, "approval", [str(inbox_in(given))] * given["runs"])
        while await client.count("status = 'suspended'") < given["runs"]:
            await asyncio.sleep(0.1)
        seconds = time.monotonic() - began
    return {"runs": given["runs"], "seconds": seconds, "why": "awakeables, suspended at once (inactivity_timeout=0)"}


async def parked(given: Given) -> dict[str, Any]:
    awakeables = inbox_in(given).read_text().split()[given.get("woken", 0) :]
    waits_ms = []
    async with connected(given) as client, listening(given):
        cpu = await wire.idle_cpu(given)
        for awakeable in awakeables[: given["wakes"]]:
            sent_ns = time.monotonic_ns()
            await client.answer(awakeable, "granted")
            waits_ms.append((await handled.get() - sent_ns) / 1e6)
    return {**cpu, "wake_ms": waits_ms, "peak_mb": wire.peak_mb()}


def size(given: Given) -> dict[str, Any]:
    """The written size, not the reserved one: RocksDB reserves 230 MB for its empty logs."""
    written = sum(one.stat().st_size for one in data_in(given).rglob("*") if one.is_file())
    return {
        "bytes": written,
        "why": "written length of all files of the running server; what its partition store still holds in memory is not in it",
    }


def inbox_in(given: Given) -> Path:
    return Path(given["folder"]) / "inbox"


if __name__ == "__main__":
    wire.compete(
        {
            "about": about,
            "serve": serve,
            "sequential": sequential,
            "together": together,
            "queue": queue,
            "worker": worker,
            "idle": idle,
            "build": build,
            "resume": resume,
            "talk": talk_until_killed,
            "talk_on": resume,
            "size": size,
            "park": park,
            "parked": parked,
        }
    )
    # Threads of granian outlive its stop(), and abort the process if the interpreter ends while they run.
    os._exit(0)
