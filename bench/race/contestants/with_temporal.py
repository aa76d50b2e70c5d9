"""Temporal: workflows and activities of its Python SDK, on the `temporal` development server with its own SQLite file."""

from __future__ import annotations

import asyncio
import importlib.metadata
import itertools
import os
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Iterable, Mapping
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any, NoReturn

import wire
from temporalio.api.enums.v1 import EventType
from temporalio.client import Client, WorkflowFailureError, WorkflowHandle
from temporalio.common import WorkerDeploymentVersion
from temporalio.runtime import Runtime, TelemetryConfig
from temporalio.worker import PollerBehaviorAutoscaling, Worker, WorkerDeploymentConfig
from with_temporal_workflows import Approval, Conversation, Moment, Steps, StepsToTheLast, Tools

QUEUE = "race"
REQUESTS_AT_ONCE = 100
PARKING_S = 60

TEMPORAL = Path(sys.executable).parent / "temporal"
# limit.historyCount.error of the server, at its default.
HISTORY_EVENTS = 51_200
BYTES = "bytes are the pages of the server's SQLite file after a checkpoint, free ones included"

ONE_RUN = "one"
TALK = "talk"


def about(_: Mapping[str, Any]) -> dict[str, Any]:
    """The notes beside the figures in the table."""
    return {
        "name": "Temporal",
        "version": importlib.metadata.version("temporalio"),
        "server": _server_version(),
        "stores": ["own"],
        "as_shipped": ["own"],
        "durable": "intent, arguments and result of a step, each before it is acted on; SQLite of the development server, WAL, synchronous=FULL "
        "(as shipped: a rollback journal)",
        "how": (
            "Python SDK, one async activity per step, eager activities, autoscaling pollers, no sandbox, the server's 20 polls a second raised to 1,000; "
            "no local activities, though they were about seven times as fast in a trial, since a crash repeats all that have ended since the last workflow task"
        ),
        "resume": (
            "activities with a heartbeat time-out of 1 s (start-to-close 1 min) and a first retry after 0.1 s: the server hands the interrupted step to "
            "the new worker once they are over, and the history is replayed only when that step has ended"
        ),
        "notes": {
            "W4": f"a run is refused more than {HISTORY_EVENTS:,} events, six for each step; its documentation recommends continue-as-new, which begins "
            "a new run",
            "W5": BYTES,
            "W7": "all messages so far are an argument of the model's activity on every turn, and arguments are stored, where DBOS and Restate "
            "record none; continue-as-new when the server suggests it (a history of 4 MB), as its documentation recommends; " + BYTES,
        },
    }


def _server_version() -> str:
    """The server's version in `temporal version 1.9.1 (Server 1.32.0, UI 2.54.1)`."""
    told = subprocess.run([TEMPORAL, "--version"], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True).stdout
    found = re.search(r"Server ([^,)\s]+)", told)
    return found[1] if found else told.strip()


def serve(given: Mapping[str, Any]) -> NoReturn:
    """Run the development server until SIGTERM or the end of stdin."""
    port = _free_port()
    # The default is a rollback journal. The server's repository sets these two for a SQLite file: as durable, and faster.
    pragmas = ["--sqlite-pragma", "journal_mode=wal", "--sqlite-pragma", "synchronous=2"]
    # By default the server polls a shard at most 20 times a second, and it has one shard: 20 steps a second. Durability is the same.
    polls = ["--dynamic-config-value", "history.transferProcessorMaxPollRPS=1000"]
    tuned = [] if given.get("as_shipped") else [*pragmas, *polls]
    address = ["--ip", "127.0.0.1", "--port", str(port), "--headless", "--log-level", "error"]
    server = subprocess.Popen(
        [TEMPORAL, "server", "start-dev", "--db-filename", _database(given), *address, *tuned],
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr,
        env={**os.environ, "TEMPORAL_VERSION_CHECK_DISABLED": "1"},
    )
    signal.signal(signal.SIGTERM, lambda *_: server.terminate())
    threading.Thread(target=_end_with_stdin, args=[server], daemon=True).start()
    told = {"address": f"127.0.0.1:{port}"}
    asyncio.run(_until_it_answers(told["address"], server))
    wire.say({"ready": True, "pid": server.pid, **told})
    server.wait()
    _leave(0)


def _end_with_stdin(server: subprocess.Popen[bytes]) -> None:
    sys.stdin.read()
    server.terminate()


async def _until_it_answers(address: str, server: subprocess.Popen[bytes]) -> None:
    while server.poll() is None:
        try:
            client = await _connect(address)
            await client.count_workflows()
        except RuntimeError:
            await asyncio.sleep(0.05)
        else:
            return
    raise ChildProcessError(f"the server ended with code {server.returncode} before it answered")


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def _database(given: Mapping[str, Any]) -> Path:
    return Path(given["folder"]) / "temporal.db"


async def _client(given: Mapping[str, Any]) -> Client:
    return await _connect(given["server"]["address"])


async def _connect(address: str) -> Client:
    """Telemetry stays off: no metrics, no worker reports to the server, and no log on stdout, which is for the answer."""
    runtime = Runtime(telemetry=TelemetryConfig(metrics=None, logging=None), worker_heartbeat_interval=None)
    return await Client.connect(address, runtime=runtime)


def _worker(client: Client, tools: Tools) -> Worker:
    return Worker(
        client,
        task_queue=QUEUE,
        workflows=[Steps, StepsToTheLast, Moment, Approval, Conversation],
        activities=[tools.step, tools.moment, tools.last_words, tools.model, tools.page],
        # Workflow code holds the GIL: more of these at once only cost memory. This does not limit the number of open runs.
        max_concurrent_workflow_tasks=20,
        max_concurrent_activities=200,
        workflow_task_poller_behavior=PollerBehaviorAutoscaling(),
        activity_task_poller_behavior=PollerBehaviorAutoscaling(),
        # Without a given version a worker hashes all loaded modules to compute one: half a second at every start.
        deployment_config=WorkerDeploymentConfig(version=WorkerDeploymentVersion(QUEUE, "1"), use_worker_versioning=False),
    )


@asynccontextmanager
async def _served(given: Mapping[str, Any], tools: Tools) -> AsyncIterator[Client]:
    """A client, and a worker in this process that serves what the client starts."""
    client = await _client(given)
    async with _worker(client, tools):
        yield client


async def _start(client: Client, run: Any, *args: Any, run_id: str) -> WorkflowHandle[Any, Any]:
    return await client.start_workflow(run, args=args, id=run_id, task_queue=QUEUE, request_eager_start=True)


async def _all(requests: Iterable[Awaitable[Any]]) -> list[Any]:
    """Send many requests to the server, a limited number of them at a time."""
    room = asyncio.Semaphore(REQUESTS_AT_ONCE)

    async def one(request: Awaitable[Any]) -> Any:
        async with room:
            return await request

    return await asyncio.gather(*map(one, requests))


async def sequential(given: Mapping[str, Any]) -> dict[str, Any]:
    tools = Tools(given["tool_ms"])
    async with _served(given, tools) as client:
        began = time.monotonic()
        await (await _start(client, Steps.run, given["steps"], run_id=ONE_RUN)).result()
        seconds = time.monotonic() - began
    laps = wire.laps(tools.began_ns) if given["steps"] > 1 else {}
    return {"seconds": seconds, **laps, "peak_mb": wire.peak_mb(), **size(given)}


async def together(given: Mapping[str, Any]) -> dict[str, Any]:
    async with _served(given, Tools(given["tool_ms"])) as client:
        began = time.monotonic()
        handles = await _all(_start(client, Steps.run, given["steps"], run_id=f"run-{number}") for number in range(given["runs"]))
        await asyncio.gather(*(handle.result() for handle in handles))
        seconds = time.monotonic() - began
    return {"seconds": seconds, "peak_mb": wire.peak_mb()}


async def queue(given: Mapping[str, Any]) -> dict[str, Any]:
    client = await _client(given)
    began = time.monotonic()
    handles = await _all(_start(client, Steps.run, 1, run_id=f"run-{number}") for number in range(given["runs"]))
    enqueued = time.monotonic()
    async with _worker(client, Tools()):
        await asyncio.gather(*(handle.result() for handle in handles))
        ended = time.monotonic()
    return {"enqueue_seconds": enqueued - began, "seconds": ended - enqueued, "peak_mb": wire.peak_mb()}


async def worker(given: Mapping[str, Any]) -> dict[str, Any]:
    """Serve until asked to end; with `on_cue`, begin at a line on stdin."""
    serving = _worker(await _client(given), Tools())
    if given.get("on_cue"):
        await wire.cue()
    async with serving:
        if not given.get("on_cue"):
            wire.say({"ready": True})
        await wire.leaving().wait()
    return {"ended": True}


async def fill(given: Mapping[str, Any]) -> dict[str, Any]:
    client = await _client(given)
    began = time.monotonic()
    await _all(_start(client, Steps.run, given["steps"], run_id=f"run-{number}") for number in range(given["runs"]))
    return {"seconds": time.monotonic() - began}


async def wait(given: Mapping[str, Any]) -> dict[str, Any]:
    client = await _client(given)
    await asyncio.gather(*(client.get_workflow_handle(f"run-{number}").result() for number in range(given["runs"])))
    return {"done_ns": time.monotonic_ns()}


async def idle(given: Mapping[str, Any]) -> dict[str, Any]:
    client = await _client(given)
    numbers = itertools.count()

    async def start() -> int:
        return int(await (await _start(client, Moment.run, run_id=f"idle-{next(numbers)}")).result())

    return {"ms": await wire.idle_ms(given["times"], start)}


async def build(given: Mapping[str, Any]) -> dict[str, Any]:
    async with _served(given, Tools()) as client:
        return await _until_its_last_words(await _start(client, StepsToTheLast.run, given["steps"], run_id=ONE_RUN))


async def resume(given: Mapping[str, Any]) -> dict[str, Any]:
    """An interrupted run only needs a worker."""
    async with _served(given, Tools()) as client:
        return await _until_its_last_words(client.get_workflow_handle(ONE_RUN))


async def talk(given: Mapping[str, Any]) -> dict[str, Any]:
    async with _served(given, Tools()) as client:
        asked = [{"role": "user", "content": "Read all pages.", "pages": given["turns"]}]
        return await _until_its_last_words(await _start(client, Conversation.run, asked, run_id=TALK))


async def talk_on(given: Mapping[str, Any]) -> dict[str, Any]:
    async with _served(given, Tools()) as client:
        return await _until_its_last_words(client.get_workflow_handle(TALK))


async def _until_its_last_words(handle: WorkflowHandle[Any, Any]) -> dict[str, Any]:
    """This process dies in the run's last step, so a result comes back only if the run failed before it, or its history grew too long."""
    try:
        await handle.result()
    except WorkflowFailureError as ended:
        events = [event.event_type async for event in handle.fetch_history_events()]
        steps = events.count(EventType.EVENT_TYPE_ACTIVITY_TASK_COMPLETED)
        if len(events) < HISTORY_EVENTS:
            raise RuntimeError(f"the server ended the run after {steps:,} steps: {ended.cause}") from None
        return {
            "not": f"refused at {steps:,} steps: its history limit is {HISTORY_EVENTS:,} events; its documentation recommends continue-as-new"
        }
    raise RuntimeError("the run ended without its last step")


def size(given: Mapping[str, Any]) -> dict[str, Any]:
    """The size of the server's file after a checkpoint, read without disturbing the running server."""
    with closing(sqlite3.connect(f"file:{_database(given)}?mode=ro", uri=True)) as file:
        pages = file.execute("PRAGMA page_count").fetchone()[0]
        page_bytes = file.execute("PRAGMA page_size").fetchone()[0]
    return {"bytes": pages * page_bytes}


async def park(given: Mapping[str, Any]) -> dict[str, Any]:
    began = time.monotonic()
    runs = 0
    async with _served(given, Tools()) as client:
        while runs < given["runs"] and time.monotonic() - began < PARKING_S:
            more = range(runs, min(runs + REQUESTS_AT_ONCE, given["runs"]))
            await asyncio.gather(*(_start(client, Approval.run, run_id=f"parked-{number}") for number in more))
            runs = more.stop
            while Approval.reached < runs:
                await asyncio.sleep(0.01)
    seconds = time.monotonic() - began
    why = {} if runs == given["runs"] else {"why": f"{runs:,} runs had come to their wait after {PARKING_S} s"}
    return {"runs": runs, "seconds": seconds, **why}


async def parked(given: Mapping[str, Any]) -> dict[str, Any]:
    async with _served(given, Tools()) as client:
        cpu = await wire.idle_cpu(given)
        waits_ms = []
        for number in range(given.get("woken", 0), given.get("woken", 0) + given["wakes"]):
            handle = client.get_workflow_handle(f"parked-{number}", result_type=int)
            asked_ns = time.monotonic_ns()
            await handle.signal(Approval.grant)
            waits_ms.append((await handle.result() - asked_ns) / 1e6)
    return {"peak_mb": wire.peak_mb(), **cpu, "wake_ms": waits_ms}


ROLES: dict[str, wire.Role] = {
    "about": about,
    "serve": serve,
    "sequential": sequential,
    "together": together,
    "queue": queue,
    "worker": worker,
    "idle": idle,
    "build": build,
    "resume": resume,
    "talk": talk,
    "talk_on": talk_on,
    "size": size,
    "park": park,
    "parked": parked,
    "fill": fill,
    "wait": wait,
}


def _leave(code: int) -> NoReturn:
    """End without the interpreter's shutdown, which the SDK's threads may turn into a crash (temporalio/sdk-python#300)."""
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    try:
        wire.compete(ROLES)
    except Exception:
        traceback.print_exc()
        _leave(1)
    _leave(0)
