"""DBOS Transact: workflows and steps of its Python library, recorded in SQLite or PostgreSQL by the process that runs them.

They are plain functions, with a thread for each run: compared directly they were up to a third faster than the asyncio functions, and
nowhere clearly slower. Only runs that wait for a person are coroutines, because thousands of plain functions would hold thousands of threads.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
import sqlite3
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NoReturn

import psycopg
import wire
from dbos import DBOS, DBOSClient, DBOSConfig, EnqueueOptions, SetWorkflowID, run_dbos_database_migrations

Given = Mapping[str, Any]
Message = dict[str, Any]

NAME = "race"
QUEUE = "race"
INTERRUPTED = "interrupted"
# The default is a second. With a tenth of it recovery starts sooner.
POLLING_S = 0.1
# Only where the latency of an idle system is measured, in which a worker may poll often.
PROMPT_POLLING_S = 0.01
# Without a limit the first worker that polls claims all enqueued runs. With this limit the others get their share.
RUNS_OF_A_WORKER = 20
# The client has five connections; more threads would wait for one.
SENDERS = 5
# For thousands of runs: by default there is no limit, and every claimed run takes a thread, while there are 20 connections.
THREADS = 32
# How often this program checks whether all runs have ended: often enough for the figure, too rarely to slow down the work.
LOOK_EVERY_S = 0.1

# A person may take a week; by default recv times out after a minute.
PATIENCE_S = 7 * 24 * 3600.0
PARK_FOR_AT_MOST_S = 60.0
PARK_AT_ONCE = 200

began_ns: list[int] = []
waiting: set[str] = set()
woken: dict[str, asyncio.Future[int]] = {}


@DBOS.step()
def step(text: str, tool_ms: float) -> str:
    began_ns.append(time.monotonic_ns())
    if tool_ms:
        time.sleep(tool_ms / 1000)
    return text


@DBOS.step()
def now_ns() -> int:
    return time.monotonic_ns()


@DBOS.step()
def last_words() -> None:
    wire.last_words()


@DBOS.step()
def model(messages: list[Message], turns: int) -> Message:
    """Stands for a model: it finds its turn from the conversation so far."""
    turn = sum(message["role"] == "assistant" for message in messages)
    use = {"name": "page", "input": {"number": turn}} if turn < turns else {"name": "last_words", "input": {}}
    return {"role": "assistant", "content": wire.said(turn), "tool_use": use}


@DBOS.step()
def page(number: int) -> str:
    return wire.said(number)


@DBOS.workflow()
def steps_in_turn(steps: int, tool_ms: float) -> None:
    for number in range(steps):
        step(wire.text_of(number), tool_ms)


@DBOS.workflow()
def steps_then_death(steps: int) -> None:
    for number in range(steps):
        step(wire.text_of(number), 0)
    last_words()


@DBOS.workflow()
def stamp() -> int:
    return now_ns()


@DBOS.workflow()
def conversation(turns: int) -> None:
    tools: dict[str, Any] = {"page": page, "last_words": last_words}
    messages: list[Message] = [{"role": "user", "content": "Read all the pages."}]
    while True:
        answer = model(messages, turns)
        use = answer["tool_use"]
        messages += [answer, {"role": "tool", "content": tools[use["name"]](**use["input"])}]


@DBOS.step()
async def begin() -> int:
    return time.monotonic_ns()


# Thousands of these wait at the same time: as plain functions each would hold a thread.
@DBOS.workflow()
async def approval() -> None:
    workflow_id = DBOS.workflow_id
    assert workflow_id is not None
    waiting.add(workflow_id)
    await DBOS.recv_async(timeout_seconds=PATIENCE_S)
    began = await begin()
    if workflow_id in woken:
        woken[workflow_id].set_result(began)


def store_url(given: Given) -> str:
    return given["url"] or f"sqlite:///{sqlite_file(given)}"


def sqlite_file(given: Given) -> Path:
    return Path(given["folder"]) / "dbos.sqlite"


def create_store(given: Given) -> None:
    """The system database, with its tables; SQLite uses a write-ahead log, except in the lane as shipped.

    DBOS leaves SQLite's rollback journal on. The log is as durable (synchronous stays FULL, one fsync per commit
    instead of several) and was faster in every trial: a file remembers this mode, so one statement is enough.
    """
    if given["url"] is None and not given.get("as_shipped"):
        with closing(sqlite3.connect(sqlite_file(given))) as connection:
            connection.execute("PRAGMA journal_mode = WAL")
    run_dbos_database_migrations(store_url(given))


@contextmanager
def launched(given: Given, *, executor_id: str = "local", threads: int | None = None) -> Iterator[None]:
    """DBOS as in a process of an application: it serves all queues and at once recovers the runs that its executor left behind."""
    config: DBOSConfig = {
        "name": NAME,
        "system_database_url": store_url(given),
        # Otherwise the version is a hash of the source, and recovery resumes only runs of the same version.
        "application_version": "1",
        "executor_id": executor_id,
        "log_level": "ERROR",
        "enable_otlp": False,
    }
    if threads is not None:
        config["max_executor_threads"] = threads
    DBOS(config=config)
    DBOS.launch()
    try:
        yield
    finally:
        DBOS.destroy()


@contextmanager
def client_of(given: Given) -> Iterator[DBOSClient]:
    """The client for a process that runs no workflows itself."""
    client = DBOSClient(system_database_url=store_url(given), application_name=NAME)
    try:
        yield client
    finally:
        client.destroy()


def enqueue_steps(client: DBOSClient, runs: int, steps: int) -> None:
    options: EnqueueOptions = {"workflow_name": steps_in_turn.__qualname__, "queue_name": QUEUE}
    with ThreadPoolExecutor(SENDERS) as senders:
        for _ in senders.map(lambda _: client.enqueue(options, steps, 0), range(runs)):
            pass


def all_ended(client: DBOSClient) -> None:
    """Return as soon as all runs have ended; a failed run is an error."""
    while listed(client, ["ENQUEUED", "PENDING"]):
        time.sleep(LOOK_EVERY_S)
    if failed := listed(client, ["ERROR", "CANCELLED", "MAX_RECOVERY_ATTEMPTS_EXCEEDED"]):
        raise RuntimeError(f"run {failed[0].workflow_id} ended as {failed[0].status}: {failed[0].error}")


def listed(client: DBOSClient, status: list[str]) -> list[Any]:
    return client.list_workflows(status=status, limit=1, load_input=False, load_output=False)


def bytes_of(given: Given) -> int:
    if given["url"] is None:
        # A killed process leaves its log behind; closing the file checkpoints it into the database.
        with closing(sqlite3.connect(sqlite_file(given))) as connection:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        return wire.bytes_in(Path(given["folder"]))
    with psycopg.connect(given["url"]) as connection:
        rows = connection.execute("SELECT sum(pg_total_relation_size(relid)) FROM pg_stat_user_tables").fetchall()
        return int(rows[0][0])


def about(_: Given) -> dict[str, Any]:
    return {
        "name": "DBOS",
        "version": importlib.metadata.version("dbos"),
        "stores": ["sqlite", "postgres"],
        "as_shipped": ["sqlite"],
        "durable": "the result of a step after it ran, one commit per step; no intent and no arguments of steps",
        "how": "plain (blocking) workflows and steps of the Python library, a thread per run: up to a third faster than its asyncio ones; "
        f"asyncio only for runs that wait (W8), of which each would hold a thread; {THREADS} threads at most in W3 and W8, default pool of 20 "
        "connections; in W2 runs are started one after the other: 4 or 16 threads that start them brought nothing; "
        "SQLite in WAL mode with synchronous=FULL (its default, the rollback journal, is slower)",
        "resume": f"recovery when the same executor and version is launched again, which enqueues the run anew; queue polled every {POLLING_S} s",
        "notes": {
            "W8": "on SQLite it looks for messages once a second (its default), with a query for each run that waits; beside 1,500 runs looking "
            "ten times as often woke them after 0.3 s and took most of a core",
            "W9": f"a worker runs {RUNS_OF_A_WORKER} at a time (worker_concurrency): without a limit the first to look claims all that is enqueued",
        },
        # Short, for the plot.
        "in_short": {"dbos/sqlite": {"W8.wake_ms": "polls every second"}},
    }


def sequential(given: Given) -> dict[str, Any]:
    create_store(given)
    with launched(given):
        start = time.monotonic()
        DBOS.start_workflow(steps_in_turn, given["steps"], given["tool_ms"]).get_result()
        seconds = time.monotonic() - start
    laps = wire.laps(began_ns) if len(began_ns) > 1 else {}
    return {"seconds": seconds, **laps, "peak_mb": wire.peak_mb(), "bytes": bytes_of(given)}


def together(given: Given) -> dict[str, Any]:
    create_store(given)
    with launched(given):
        start = time.monotonic()
        handles = [DBOS.start_workflow(steps_in_turn, given["steps"], given["tool_ms"]) for _ in range(given["runs"])]
        for handle in handles:
            handle.get_result()
        return {"seconds": time.monotonic() - start, "peak_mb": wire.peak_mb()}


def queue(given: Given) -> dict[str, Any]:
    create_store(given)
    with client_of(given) as client:
        client.register_queue(QUEUE, polling_interval_sec=POLLING_S)
        start = time.monotonic()
        enqueue_steps(client, given["runs"], steps=1)
        enqueued = time.monotonic()
        with launched(given, threads=THREADS):
            all_ended(client)
            ended = time.monotonic()
    return {"enqueue_seconds": enqueued - start, "seconds": ended - enqueued, "peak_mb": wire.peak_mb()}


async def worker(given: Given) -> dict[str, Any]:
    """Serve until asked to end; with `on_cue`, begin at a line on stdin."""
    on_cue = given.get("on_cue")
    if on_cue:
        await wire.cue()
    else:
        create_store(given)
    # Several processes serve one queue, and each recovers only what it left behind itself.
    with launched(given, executor_id=f"worker-{os.getpid()}"):
        if not on_cue:
            await DBOS.register_queue_async(QUEUE, polling_interval_sec=PROMPT_POLLING_S)
            wire.say({"ready": True})
        await wire.leaving().wait()
    return {}


async def idle(given: Given) -> dict[str, Any]:
    with client_of(given) as client:

        async def start() -> int:
            handle: Any = await client.enqueue_async({"workflow_name": stamp.__qualname__, "queue_name": QUEUE})
            return int(await handle.get_result(polling_interval_sec=LOOK_EVERY_S))

        waits_ms = await wire.idle_ms(given["times"], start)
    return {"ms": waits_ms, "why": f"the queue is polled every {PROMPT_POLLING_S} s; by default every second"}


def fill(given: Given) -> dict[str, Any]:
    create_store(given)
    with client_of(given) as client:
        client.register_queue(QUEUE, polling_interval_sec=POLLING_S, worker_concurrency=RUNS_OF_A_WORKER)
        start = time.monotonic()
        enqueue_steps(client, given["runs"], given["steps"])
        return {"seconds": time.monotonic() - start}


def wait(given: Given) -> dict[str, Any]:
    with client_of(given) as client:
        all_ended(client)
        return {"done_ns": time.monotonic_ns()}


def build(given: Given) -> dict[str, Any]:
    return killed_in(given, steps_then_death, given["steps"])


def talk(given: Given) -> dict[str, Any]:
    return killed_in(given, conversation, given["turns"])


def killed_in(given: Given, workflow: Any, size: int) -> dict[str, Any]:
    """Serve one run until it kills this process. It is enqueued, so that recovery puts it into a queue that is polled soon."""
    create_store(given)
    with launched(given):
        DBOS.register_queue(QUEUE, polling_interval_sec=POLLING_S)
        with SetWorkflowID(INTERRUPTED):
            handle = DBOS.enqueue_workflow(QUEUE, workflow, size)
        handle.get_result()
    raise RuntimeError("the run was to end in its last words, and did not")


def resume(given: Given) -> dict[str, Any]:
    with launched(given):
        handle: Any = DBOS.retrieve_workflow(INTERRUPTED)
        handle.get_result()
    raise RuntimeError("the run was to end in its last words, and did not")


def size(given: Given) -> dict[str, Any]:
    return {"bytes": bytes_of(given)}


async def park(given: Given) -> NoReturn:
    create_store(given)
    with launched(given, threads=THREADS):
        start = time.monotonic()
        started = 0
        while started < given["runs"] and time.monotonic() - start < PARK_FOR_AT_MOST_S:
            some = min(PARK_AT_ONCE, given["runs"] - started)
            await asyncio.gather(*(DBOS.start_workflow_async(approval) for _ in range(some)))
            started += some
        while len(waiting) < started:
            await asyncio.sleep(LOOK_EVERY_S)
        seconds = time.monotonic() - start
        why = {} if started == given["runs"] else {"why": f"no more were started in {PARK_FOR_AT_MOST_S:.0f} s"}
        wire.say({"runs": started, "seconds": seconds, **why})
        # A run is durable once it has started. An orderly end would cancel thousands of waits, some just about to be recorded.
        os._exit(0)


async def parked(given: Given) -> dict[str, Any]:
    with launched(given, threads=THREADS):
        start = time.monotonic()
        await all_recovered()
        recovery_seconds = time.monotonic() - start
        cpu = await wire.idle_cpu(given)
        wake_ms = [await wake(workflow_id) for workflow_id in sorted(waiting)[: given["wakes"]]]
    return {"peak_mb": wire.peak_mb(), **cpu, "wake_ms": wake_ms, "recovery_seconds": recovery_seconds}


async def all_recovered() -> None:
    """Return when every parked run waits in this process."""
    parked_runs = len(await DBOS.list_workflows_async(status=["ENQUEUED", "PENDING"], load_input=False, load_output=False))
    while len(waiting) < parked_runs:
        await asyncio.sleep(LOOK_EVERY_S)


async def wake(workflow_id: str) -> float:
    woken[workflow_id] = asyncio.get_running_loop().create_future()
    start = time.monotonic_ns()
    await DBOS.send_async(workflow_id, "yes")
    return (await woken[workflow_id] - start) / 1e6


if __name__ == "__main__":
    wire.compete(
        {
            "about": about,
            "sequential": sequential,
            "together": together,
            "queue": queue,
            "worker": worker,
            "idle": idle,
            "build": build,
            "resume": resume,
            "talk": talk,
            "talk_on": resume,
            "size": size,
            "park": park,
            "parked": parked,
            "fill": fill,
            "wait": wait,
        }
    )
