"""perdure in the race: asyncio agents, tools whose intent is committed before they begin, and every setting at its default.

The tools are `idempotent`, which is not the default: the peers also run an interrupted step again.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import wire

from perdure import Perdure, ReAct, Run, agent, tool
from perdure.core.events import Event, RunSucceeded
from perdure.models import Answer, Assistant, Request, Scripted
from perdure.models.scripted import use, uses

_TURNS_AT_MOST = 10_000
_AT_A_TIME = 50
_PATIENCE_S = 60.0

_began_ns: list[int] = []


# -- the agents ------------------------------------------------------------------------------------------------------------
@tool(effect="idempotent")
async def step(text: str) -> str:
    """Does nothing; its intent is durable before it begins."""
    return text


@tool(effect="idempotent")
async def timed_step(text: str) -> str:
    """The same, and the time at which it begins is noted."""
    _began_ns.append(time.monotonic_ns())
    return text


@tool(effect="idempotent")
async def slow_step(text: str, tool_ms: float) -> str:
    """Takes as long as a request to a service."""
    await asyncio.sleep(tool_ms / 1000)
    return text


@tool(effect="idempotent")
async def when(text: str) -> int:
    """The moment at which it begins, on the clock that all processes of this machine share."""
    return time.monotonic_ns()


@tool(effect="idempotent")
async def last_words() -> None:
    """Ends its process as `kill -9` does."""
    wire.last_words()


@tool(effect="idempotent")
async def page(number: int) -> str:
    """Two kilobytes to read."""
    return wire.said(number)


@agent(version="1")
async def timed(run: Run, steps: int) -> int:
    for number in range(steps):
        await timed_step(wire.text_of(number))
    return steps


@agent(version="1")
async def plain(run: Run, steps: int) -> int:
    for number in range(steps):
        await step(wire.text_of(number))
    return steps


@agent(version="1")
async def slow(run: Run, steps: int, tool_ms: float) -> int:
    for number in range(steps):
        await slow_step(wire.text_of(number), tool_ms)
    return steps


@agent(version="1")
async def punctual(run: Run) -> int:
    return await when(wire.text_of(0))


@agent(version="1")
async def waiting(run: Run) -> int:
    await run.receive("go")
    return await when(wire.text_of(0))


@agent(version="1")
async def doomed(run: Run, steps: int) -> None:
    for number in range(steps):
        await step(wire.text_of(number))
    await last_words()


def _line(request: Request) -> Answer:
    """As many turns as the prompt says, each with 2 kB and a tool, and then the tool that kills the process."""
    turn = sum(isinstance(message, Assistant) for message in request.messages)
    turns = int(getattr(request.messages[0], "text", "0"))
    return uses(use("page", number=turn), text=wire.said(turn)) if turn < turns else uses(use("last_words"))


talker = ReAct("talker", model=Scripted([_line] * _TURNS_AT_MOST), tools=[page, last_words], max_turns=_TURNS_AT_MOST)


# -- the roles -------------------------------------------------------------------------------------------------------
def about(_: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "name": "perdure",
        "version": importlib.metadata.version("perdure"),
        "stores": ["sqlite", "postgres"],
        "durable": "the intent of a step with its arguments before it begins; its result with the next intent or the end of the run, or, if the "
        "agent waits for something else first, after flush_s (50 ms) at most; fsync per commit, runs that are ready at the same time share one; "
        "every event hashed into a chain",
        "how": "@agent and @tool(effect='idempotent'), default settings otherwise: an interrupted step is run again, as the peers do it; the default "
        "effect, 'once', asks a person instead, is as fast, and takes about 820 instead of 722 bytes per step; conversations by ReAct with a "
        "scripted model, waits by run.receive",
        "resume": "Perdure.drive in a new process: that its last worker is dead is seen at once",
    }


async def sequential(given: Mapping[str, Any]) -> dict[str, Any]:
    steps, tool_ms = given["steps"], given["tool_ms"]
    async with Perdure(_url(given), agents=[timed, slow]) as app:
        begun = time.perf_counter()
        await (app.run(slow, steps, tool_ms) if tool_ms else app.run(timed, steps))
        seconds = time.perf_counter() - begun
    laps = wire.laps(_began_ns) if len(_began_ns) > 1 else {}
    return {"seconds": seconds, **laps, "peak_mb": wire.peak_mb(), "bytes": _bytes(given)}


async def together(given: Mapping[str, Any]) -> dict[str, Any]:
    runs, steps, tool_ms = given["runs"], given["steps"], given["tool_ms"]
    count, all_ended = _counted(runs)
    async with Perdure(_url(given), agents=[plain, slow], observers=[count]) as app:
        begun = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            group.create_task(app.work(stop=all_ended))
            for _ in range(runs):
                group.create_task(app.start(slow, steps, tool_ms) if tool_ms else app.start(plain, steps))
        seconds = time.perf_counter() - begun
    return {"seconds": seconds, "peak_mb": wire.peak_mb()}


async def queue(given: Mapping[str, Any]) -> dict[str, Any]:
    runs = given["runs"]
    count, all_ended = _counted(runs)
    async with Perdure(_url(given), agents=[plain], observers=[count]) as app:
        begun = time.perf_counter()
        await _enqueue(app, runs, 1)
        enqueued = time.perf_counter()
        await app.work(stop=all_ended)
        ended = time.perf_counter()
    return {"enqueue_seconds": enqueued - begun, "seconds": ended - enqueued, "peak_mb": wire.peak_mb()}


async def worker(given: Mapping[str, Any]) -> dict[str, Any]:
    """Serve the queue until asked to end; with `on_cue`, begin at a line on stdin."""
    async with Perdure(_url(given), agents=[punctual, plain]) as app:
        if given.get("on_cue"):
            await wire.cue()
        else:
            wire.say({"ready": True})
        await app.work(stop=wire.leaving())
    return {"ended": True}


async def idle(given: Mapping[str, Any]) -> dict[str, Any]:
    async with Perdure(_url(given)) as app:

        async def start() -> int:
            return int(await (await app.start(punctual)).result(timeout=_PATIENCE_S))

        waits_ms = await wire.idle_ms(given["times"], start)
    return {"ms": waits_ms, "why": "the worker hears of a new run; it looks by itself every 0.25 s (the default) should it not"}


async def fill(given: Mapping[str, Any]) -> dict[str, Any]:
    async with Perdure(_url(given)) as app:
        begun = time.perf_counter()
        await _enqueue(app, given["runs"], given["steps"])
        return {"seconds": time.perf_counter() - begun}


def wait(given: Mapping[str, Any]) -> dict[str, Any]:
    """Wait until no run is left. It only asks whether one exists, so that waiting hardly loads the measured server."""
    import psycopg

    with psycopg.connect(given["url"], autocommit=True) as connection:
        while connection.execute("SELECT EXISTS (SELECT FROM perdure_runs WHERE status <> 'succeeded')").fetchone() == (True,):
            time.sleep(0.02)
        return {"done_ns": time.monotonic_ns()}


async def build(given: Mapping[str, Any]) -> dict[str, Any]:
    async with Perdure(_url(given), agents=[doomed]) as app:
        await app.run(doomed, given["steps"], id="long")
    raise AssertionError("the last step ends the process")


async def resume(given: Mapping[str, Any]) -> dict[str, Any]:
    async with Perdure(_url(given), agents=[doomed]) as app:
        row = await app.engine.drive("long")
    raise AssertionError(f"the run is {row.status}: the last step ends the process")


async def talk(given: Mapping[str, Any]) -> dict[str, Any]:
    async with Perdure(_url(given), agents=[talker]) as app:
        await app.run(talker, str(given["turns"]), id="long")
    raise AssertionError("the last tool ends the process")


async def talk_on(given: Mapping[str, Any]) -> dict[str, Any]:
    async with Perdure(_url(given), agents=[talker]) as app:
        row = await app.engine.drive("long")
    raise AssertionError(f"the run is {row.status}: the last tool ends the process")


async def size(given: Mapping[str, Any]) -> dict[str, Any]:
    async with Perdure(_url(given)):
        pass  # closing checkpoints the log into the file
    return {"bytes": _bytes(given)}


async def park(given: Mapping[str, Any]) -> dict[str, Any]:
    runs = given["runs"]
    async with Perdure(_url(given), agents=[waiting]) as app:
        begun = time.perf_counter()
        for first in range(0, runs, _AT_A_TIME):
            await asyncio.gather(*(app.start(waiting, id=_id(number)) for number in range(first, min(first + _AT_A_TIME, runs))))
        async with asyncio.TaskGroup() as group:
            group.create_task(app.work())
            for number in range(runs):
                while (await app.handle(_id(number)).row()).status != "waiting":
                    await asyncio.sleep(0.05)
            app.drain()
        seconds = time.perf_counter() - begun
    return {"runs": runs, "seconds": seconds}


async def parked(given: Mapping[str, Any]) -> dict[str, Any]:
    """A worker beside the parked runs, idle at first; then some of them are woken one after the other."""
    first = given.get("woken", 0)
    async with Perdure(_url(given), agents=[waiting]) as app, asyncio.TaskGroup() as group:
        group.create_task(app.work())
        cpu = await wire.idle_cpu(given)
        waits = [await _wake(app, _id(number)) for number in range(first, first + given["wakes"])]
        app.drain()
    return {"peak_mb": wire.peak_mb(), **cpu, "wake_ms": waits}


async def _wake(app: Perdure, run_id: str) -> float:
    begun = time.monotonic_ns()
    await app.signal(run_id, "go")
    return float((await app.handle(run_id).result(timeout=_PATIENCE_S) - begun) / 1e6)


# -- the journal ------------------------------------------------------------------------------------------------------------
def _url(given: Mapping[str, Any]) -> str:
    return str(given["url"] or f"sqlite:///{Path(given['folder']) / 'perdure.db'}")


def _id(number: int) -> str:
    return f"run-{number}"


def _bytes(given: Mapping[str, Any]) -> int:
    """The size of the file, or of all tables with their indexes; call it after the app was closed."""
    if given["url"] is None:
        return wire.bytes_in(Path(given["folder"]))
    import psycopg

    with psycopg.connect(given["url"]) as connection:
        row = connection.execute("SELECT sum(pg_total_relation_size(relid))::bigint FROM pg_stat_user_tables").fetchone()
    assert row is not None
    return int(row[0])


async def _enqueue(app: Perdure, runs: int, steps: int) -> None:
    for first in range(0, runs, _AT_A_TIME):
        await asyncio.gather(*(app.start(plain, steps, id=_id(number)) for number in range(first, min(first + _AT_A_TIME, runs))))


def _counted(runs: int) -> tuple[Callable[[str, Sequence[Event]], None], asyncio.Event]:
    """An observer, and the event that it sets when that many runs have succeeded."""
    left, all_ended = runs, asyncio.Event()

    def count(run_id: str, events: Sequence[Event]) -> None:
        nonlocal left
        left -= sum(isinstance(event.body, RunSucceeded) for event in events)
        if not left:
            all_ended.set()

    return count, all_ended


if __name__ == "__main__":
    wire.compete(
        {
            "about": about,
            "sequential": sequential,
            "together": together,
            "queue": queue,
            "worker": worker,
            "idle": idle,
            "fill": fill,
            "wait": wait,
            "build": build,
            "resume": resume,
            "talk": talk,
            "talk_on": talk_on,
            "size": size,
            "park": park,
            "parked": parked,
        }
    )
