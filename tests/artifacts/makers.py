"""Agents and tools that save large bytes and pass them on, for the tests of artifacts.

Isolated tools are loaded from this file.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from perdure import Agent, Artifact, Call, Outcome, Run, agent, tool

MB = 1_000_000


def body(size: int) -> bytes:
    """Bytes that do not repeat by chunks."""
    return b"".join(hashlib.sha256(n.to_bytes(8)).digest() for n in range(-(-size // 32)))[:size]


async def pieces(size: int) -> AsyncIterator[bytes]:
    data = body(size)
    for start in range(0, size, 300_001):
        await asyncio.sleep(0)
        yield data[start : start + 300_001]


class Report(BaseModel):
    title: str
    pages: list[Artifact]
    by_name: dict[str, Artifact] = {}


@tool(effect="read")
async def fetch(size: int, call: Call) -> Artifact:
    return await call.save(body(size), content_type="text/csv")


@tool(effect="read")
async def stream(size: int, call: Call) -> Artifact:
    return await call.save(pieces(size), content_type="text/csv")


@tool(effect="read")
def fetch_sync(size: int, call: Call) -> Artifact:
    return call.save(body(size)).wait()


@tool(effect="read")
def fetch_file(path: str, call: Call) -> Artifact:
    return call.save(Path(path)).wait()


@tool(effect="read", isolate=True)
def fetch_isolated(size: int, call: Call) -> Artifact:
    data = body(size)
    return call.save(data[n : n + 1000] for n in range(0, size, 1000)).wait()


@tool(effect="read", isolate=True)
async def copy_isolated(file: Artifact, call: Call) -> Artifact:
    async with file.open() as opened:
        return await call.save(opened, content_type=file.content_type)


@tool(effect="read")
async def digest(file: Artifact) -> str:
    total = hashlib.sha256()
    async with file.open() as opened:
        async for chunk in opened:
            total.update(chunk)
    return total.hexdigest()


@tool(effect="read")
async def digest_of_read(file: Artifact) -> str:
    return hashlib.sha256(await file.read()).hexdigest()


@tool(effect="read")
async def digest_by_bites(file: Artifact) -> str:
    total = hashlib.sha256()
    async with file.open() as opened:
        while bite := await opened.read(77_777):
            total.update(bite)
    return total.hexdigest()


@tool(effect="read")
def digest_sync(file: Artifact) -> str:
    total = hashlib.sha256()
    with file.open() as opened:
        while piece := opened.read(123_457):
            total.update(piece)
    return total.hexdigest()


@tool(effect="read")
def digest_of_read_sync(file: Artifact) -> str:
    return hashlib.sha256(file.read().wait()).hexdigest()


@tool(effect="read")
def bind(pages: list[Artifact]) -> Report:
    return Report(title="all", pages=pages, by_name={str(n): page for n, page in enumerate(pages)})


@tool(effect="read")
async def weigh(report: Report) -> int:
    return sum([len(await page.read()) for page in (*report.pages, *report.by_name.values())])


@tool(effect="transaction")
def in_transaction(file: Artifact, call: Call) -> int:
    return len(file.read().wait())


@tool(effect="transaction")
def save_in_transaction(call: Call) -> Artifact:
    return call.save(b"x").wait()


@tool(effect="once")
async def act_and_save(size: int, done: str, call: Call) -> Artifact:
    with Path(done).open("a") as file:
        file.write("acted\n")
    return await call.save(body(size))


@tool(effect="once")
async def save_and_die(size: int, marker: str, call: Call) -> Artifact:
    """Dies after the artifact is saved and before its event, once."""
    saved = await call.save(body(size))
    if not Path(marker).exists():
        Path(marker).write_text("died")
        os.kill(os.getpid(), signal.SIGKILL)
    return saved


@tool(effect="read")
async def die_while_saving(size: int, marker: str, call: Call) -> Artifact:
    """Dies between two chunks, once."""

    async def dying() -> AsyncIterator[bytes]:
        data = body(size)
        for start in range(0, size, MB):
            if start >= size // 2 and not Path(marker).exists():
                Path(marker).write_text("died")
                os.kill(os.getpid(), signal.SIGKILL)
            yield data[start : start + MB]

    return await call.save(dying())


@agent(version="1")
async def relay(run: Run, size: int) -> Artifact:
    """One maker, and every kind of reader."""
    made = await fetch(size)
    assert type(made) is Artifact, made
    readers = (digest, digest_of_read, digest_by_bites, digest_sync, digest_of_read_sync)
    assert {await read(made) for read in readers} == {made.sha256}
    assert await in_transaction(made) == size
    return made


@agent(version="1")
async def makers(run: Run, size: int, path: str) -> list[Artifact]:
    """Every kind of maker."""
    return [
        await stream(size),
        await fetch_sync(size),
        await fetch_file(path),
        await fetch_isolated(size),
        await copy_isolated(await fetch(size)),
    ]


@agent(version="1")
async def nested(run: Run, size: int) -> int:
    return await weigh(await bind([await fetch(size), await fetch(2)]))


@agent(version="1")
async def one(run: Run, size: int) -> Artifact:
    return await fetch(size)


@agent(version="1")
async def streamed(run: Run, size: int) -> Artifact:
    return await stream(size)


@agent(version="1")
async def reader(run: Run, file: Artifact) -> str:
    return await digest(file)


@agent(version="1")
async def parent(run: Run, size: int) -> str:
    return await reader(await one(size))


@agent(version="1")
async def waiter(run: Run) -> str:
    return await digest(Artifact(**await run.receive("file")))


@agent(version="1")
async def acting(run: Run, size: int, done: str) -> Artifact:
    return await act_and_save(size, done)


@agent(version="1")
async def in_trans(run: Run) -> Artifact:
    return await save_in_transaction()


@agent(version="1")
async def opener(run: Run, file: Artifact) -> int:
    return len(await file.read())


@agent(version="1")
async def dies_after(run: Run, size: int, marker: str) -> Artifact:
    return await save_and_die(size, marker)


@agent(version="1")
async def dies_within(run: Run, size: int, marker: str) -> Artifact:
    return await die_while_saving(size, marker)


@save_and_die.reconcile
async def _(size: int, marker: str, call: Call) -> Outcome:
    return Outcome.happened(await call.save(body(size)))


ALL: list[Agent[Any, Any]] = [
    relay,
    makers,
    nested,
    one,
    streamed,
    reader,
    parent,
    waiter,
    acting,
    in_trans,
    opener,
    dies_after,
    dies_within,
]
