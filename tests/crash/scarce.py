"""Victims that run out of file descriptors or of memory. Their tools need neither of them."""

from __future__ import annotations

import asyncio
import json
import os
import resource
from pathlib import Path
from typing import Any

from tests.crash import victims
from tests.crash.ledger import Ledger

from perdure import Call, Run, ToolFailed, agent, tool

HELD = 20_000_000  # bytes of a result: more than a process finds anywhere once it may have no more memory
_kept = -1  # the ledger, open from the beginning, so that a write needs no descriptor


def _note(fact: str, what: str, call: Call) -> None:
    told = {"fact": fact, "what": what, "pid": os.getpid(), "key": call.key, "run": call.run_id}
    os.write(_kept, (json.dumps(told) + "\n").encode())  # one short line: complete or not there


@tool
async def frugal(what: str, seconds: float, call: Call) -> str:
    """A deed that opens nothing."""
    _note("begun", what, call)
    await asyncio.sleep(seconds)
    _note("effect", what, call)
    await asyncio.sleep(seconds)
    return f"{what} done"


@tool
async def hoard(what: str, call: Call) -> str:
    """An effect with a result so large that no memory is left afterwards."""
    result = "x" * HELD
    _note("begun", what, call)
    _note("effect", what, call)
    while not os.path.exists(f"{os.environ['CRASH_LEDGER']}.go"):
        await asyncio.sleep(0.01)
    return result


@agent(version="1")
async def thrifty(run: Run, seconds: float, whats: list[str]) -> list[str]:
    return [await frugal(what, seconds) for what in whats]


@agent(version="1")
async def lavish(run: Run) -> list[Any]:
    try:
        return [len(await hoard("paid")), await frugal("sent", 0)]
    except ToolFailed as failed:
        return [failed.kind, await frugal("sent", 0)]


def _prepare(folder: str) -> None:
    global _kept
    ledger = Ledger(Path(folder) / "ledger")
    _kept = os.open(ledger.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    victims.AGENTS.update({found.name: found for found in (thrifty, lavish)})  # of this process alone


def start(folder: str, **args: Any) -> None:
    _prepare(folder)
    victims.start(folder=folder, **args)


def serve(folder: str, spare: int | None = None, **args: Any) -> None:
    """A worker; with `spare`, it may open this many more descriptors than it has now."""
    _prepare(folder)
    if spare is not None:
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) - 1 + spare, most))
    victims.serve(folder=folder, **args)
