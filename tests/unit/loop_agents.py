"""Agents that use each part of asyncio once, and a program that replays them in a separate process.

Their results tell the order of the events. `python loop_agents.py DB` prints one line of JSON per run.
"""

from __future__ import annotations

import asyncio
import contextvars
import json
import random
import sys
from collections.abc import AsyncIterator
from typing import Any

from perdure import Agent, Run, agent, tool
from perdure.core.machine import Facts
from perdure.core.replay import replay
from perdure.core.state import fold
from perdure.errors import Diverged
from perdure.store.api import Store
from perdure.store.open import open_store

WHERE: contextvars.ContextVar[str] = contextvars.ContextVar("WHERE", default="nowhere")


@tool(effect="read")
async def echo(what: Any, delay_ms: int = 0) -> Any:
    await asyncio.sleep(delay_ms / 1000)
    return what


async def _twice(what: str, delay_ms: int) -> str:
    first = await echo(what, delay_ms)
    return str(await echo(first * 2))


@agent(version="1")
async def uses_gather(run: Run) -> list[Any]:
    first = await asyncio.gather(_twice("a", 6), _twice("b", 3), _twice("c", 1))
    second = await asyncio.gather(echo(1), echo(2), asyncio.sleep(0.001, "slept"), return_exceptions=True)
    return [*first, *second]


@agent(version="1")
async def uses_task_group(run: Run) -> list[str]:
    said: list[str] = []

    async def child(name: str, delay_ms: int) -> None:
        try:
            said.append(await echo(name, delay_ms))
            if name == "b":
                raise ValueError(name)
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            said.append(f"{name} cancelled")
            await echo(f"{name} cleans up")
            raise

    try:
        async with asyncio.TaskGroup() as group:
            for name, delay_ms in (("a", 1), ("b", 5), ("c", 2), ("d", 3)):
                group.create_task(child(name, delay_ms))
    except* ValueError as errors:
        said.append(repr(errors.exceptions))
    return said


@agent(version="1")
async def uses_wait(run: Run) -> list[str]:
    tasks = {asyncio.create_task(_twice(name, 8 - at), name=name) for at, name in enumerate("abcdefgh")}
    said: list[str] = []
    while tasks:
        done, tasks = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        said += [f"{task.get_name()}={task.result()}" for task in done]
        for task in done:
            await echo(task.get_name())
    return said


@agent(version="1")
async def uses_wait_for(run: Run) -> list[Any]:
    said = [await asyncio.wait_for(echo("in time"), 60)]
    try:
        await asyncio.wait_for(asyncio.sleep(60), 0.002)
    except TimeoutError:
        said.append("too late")
    return said


@agent(version="1")
async def uses_timeout(run: Run) -> list[Any]:
    said: list[Any] = []
    async with asyncio.timeout(60) as limit:
        said.append(await echo("in time"))
    said.append(limit.expired())
    try:
        async with asyncio.timeout(0.002):
            await echo("never seen", 60_000)
    except TimeoutError:
        said.append("too late")
    loop = asyncio.get_running_loop()
    async with asyncio.timeout_at(loop.time() + 60) as limit:
        limit.reschedule(loop.time() + 30)
        said.append(await echo("again"))
    return said


@agent(version="1")
async def uses_queue(run: Run) -> list[Any]:
    queue: asyncio.Queue[str] = asyncio.Queue(maxsize=2)
    said: list[Any] = []

    async def consume(name: str) -> None:
        while True:
            said.append((name, await echo(await queue.get())))
            queue.task_done()

    consumers = [asyncio.create_task(consume(name)) for name in "xyz"]
    for at in range(9):
        await queue.put(f"item {at}")
    await queue.join()
    for consumer in consumers:
        consumer.cancel()
    return said


@agent(version="1")
async def uses_locks(run: Run) -> list[str]:
    lock, gate, ready, said = asyncio.Lock(), asyncio.Semaphore(2), asyncio.Event(), list[str]()
    free = asyncio.Condition()
    tokens = 1

    async def child(name: str) -> None:
        nonlocal tokens
        await ready.wait()
        async with gate:
            said.append(f"{name} in")
            async with lock:
                await echo(name)
            said.append(f"{name} out")
        async with free:
            await free.wait_for(lambda: tokens > 0)
            tokens -= 1
        await echo(f"{name} has a token")
        async with free:
            tokens += 1
            free.notify()

    children = [asyncio.create_task(child(name)) for name in "abcde"]
    await asyncio.sleep(0.001)
    ready.set()
    await asyncio.gather(*children)
    return said


@agent(version="1")
async def uses_shield(run: Run) -> list[Any]:
    inner = asyncio.ensure_future(_twice("shielded", 4))
    try:
        async with asyncio.timeout(0.001):
            await asyncio.shield(inner)
    except TimeoutError:
        await echo("gave up waiting")
    return [await inner]


@agent(version="1")
async def uses_cancel(run: Run) -> list[str]:
    said: list[str] = []

    async def stubborn() -> str:
        for _ in range(2):
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError as asked:
                said.append(str(asked))
                await echo("not yet")
        return "done"

    task = asyncio.create_task(stubborn())
    for word in ("please", "now"):
        await asyncio.sleep(0)
        task.cancel(word)
        await echo(word, 20)
    said.append(await task)
    victim = asyncio.create_task(asyncio.sleep(60))
    await asyncio.sleep(0)
    victim.cancel()
    try:
        await victim
    except asyncio.CancelledError:
        said.append(f"cancelled, {asyncio.current_task() is not None}")
    return said


@agent(version="1")
async def uses_as_completed(run: Run) -> list[str]:
    said = [await first for first in asyncio.as_completed([_twice(f"n{at}", (at * 7) % 5) for at in range(12)])]
    calls = [echo(at) for at in range(12)]
    await asyncio.sleep(0.005)  # by now all of them have been answered, so that only the order of the tasks decides
    said += [str(await first) for first in asyncio.as_completed(calls, timeout=60)]
    return said


@agent(version="1")
async def uses_sleep_zero(run: Run) -> list[str]:
    said: list[str] = []

    async def step(name: str) -> None:
        for at in range(3):
            said.append(f"{name}{at}")
            await asyncio.sleep(0)
        await asyncio.sleep(-1)
        await echo(name)

    await asyncio.gather(step("a"), step("b"))
    return said


@agent(version="1")
async def uses_async_generators(run: Run) -> list[Any]:
    said: list[Any] = []

    async def numbers(name: str) -> AsyncIterator[Any]:
        try:
            for at in range(5):
                yield await echo(f"{name}{at}")
        finally:
            said.append(f"{name} closed")
            await echo(f"{name} closed")

    async for number in numbers("a"):
        said.append(number)
        if number == "a2":
            break  # left half way: the loop closes it
    said += [number async for number in numbers("b")]
    await asyncio.sleep(0.001)
    return said


@agent(version="1")
async def uses_context_variables(run: Run) -> list[str]:
    async def child(name: str) -> str:
        WHERE.set(name)
        await echo(name)
        return WHERE.get()

    before = WHERE.get()
    found = await asyncio.gather(child("a"), child("b"))
    context = contextvars.copy_context()
    inside = await asyncio.get_running_loop().create_task(child("c"), context=context)
    return [before, *found, WHERE.get(), inside, context[WHERE]]


@agent(version="1")
async def uses_run(run: Run) -> list[Any]:
    drawn = [run.random.random(), run.random.randrange(10**6), str(run.uuid()), str(run.uuid())]
    before = run.now()
    await echo("time passes", 2)
    moved = run.now() > before
    run.note(f"at {run.now().isoformat()}")
    run.status("nearly there")
    run.decide("left", among=["left", "right"], reason="heard music")
    return [*drawn, moved, asyncio.get_running_loop().time() > before.timestamp()]


@agent(version="1")
async def uses_background_tasks(run: Run) -> str:
    async def background(name: str) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await echo(f"{name} was stopped")

    tasks = [asyncio.create_task(background(name)) for name in "abcdef"]
    await asyncio.sleep(0)
    return await echo(f"left {len(tasks)} behind")  # type: ignore[no-any-return]


@agent(version="1")
async def is_left_to_chance(run: Run) -> None:
    """The control: without it, a replay that compares nothing would look like a replay without differences."""
    for word in {f"word {at}" for at in range(50)}:
        await echo(word)


DETERMINISTIC: list[Agent[Any, Any]] = [
    uses_gather,
    uses_task_group,
    uses_wait,
    uses_wait_for,
    uses_timeout,
    uses_queue,
    uses_locks,
    uses_shield,
    uses_cancel,
    uses_as_completed,
    uses_sleep_zero,
    uses_async_generators,
    uses_context_variables,
    uses_run,
    uses_background_tasks,
]
AGENTS = [*DETERMINISTIC, is_left_to_chance]


def replayed(store: Store, run_id: str, code: Agent[Any, Any]) -> str | None:
    """How today's machine differs from the journal; None if it does not."""
    events = store.read(run_id)
    created = fold(events).created
    assert created is not None
    inline = created.input.inline
    assert inline is not None
    machine = code.machine(Facts(run_id, created.tenant, created.actor, created.agent, created.version), inline, 100_000)

    def load(payload: Any) -> bytes:
        return payload.inline if payload.inline is not None else store.blob(payload.blob)

    try:
        frontier = replay(machine, events, load)
    except Diverged as diverged:
        return str(diverged)
    return None if machine.finished and not frontier.pending else f"it stops with {frontier.pending}"


def main(path: str) -> None:
    """Replay every run of the database and say how each compares."""
    # Objects have other addresses than in the process before: anything that depends on addresses gives another result.
    clutter = [[at] * random.randrange(1, 40) for at in range(10_000)]
    random.shuffle(clutter)
    del clutter[::2]
    store = open_store(f"sqlite:///{path}")
    agents = {one.name: one for one in AGENTS}
    for row in store.list():
        print(json.dumps([row.agent, replayed(store, row.run_id, agents[row.agent])]))
    store.close()


if __name__ == "__main__":
    main(sys.argv[1])
