"""What a contestant and the one who asks say to each other: `CONTESTANT ROLE JSON`, and JSON as the last line of stdout.

Only the standard library, since every contestant runs in an environment of its own.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import itertools
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

ARGUMENT_CHARS = 200
SAID_CHARS = 2000

Role = Callable[[Mapping[str, Any]], Awaitable[dict[str, Any]] | dict[str, Any]]


def text_of(number: int) -> str:
    """The argument of a step: 200 characters, different for every step."""
    return f"{number:0{ARGUMENT_CHARS}d}"


def said(number: int) -> str:
    """What a model says in a turn, and what a tool gives back: two kilobytes, different for every turn."""
    # No letter over and over: PostgreSQL would press two kilobytes of that into forty bytes, which nobody's words are.
    return f"{number}: {hashlib.shake_128(str(number).encode()).hexdigest(SAID_CHARS)}"[:SAID_CHARS]


def compete(roles: Mapping[str, Role]) -> None:
    """Do what the command line asks for, and say what came of it."""
    name, given = sys.argv[1], json.loads(sys.argv[2])
    if name not in roles:
        say({"not": "it has nothing of the kind"})
        return
    answer = roles[name](given)
    say(asyncio.run(_awaited(answer)) if inspect.isawaitable(answer) else answer)


async def _awaited(answer: Awaitable[dict[str, Any]]) -> dict[str, Any]:
    return await answer


def say(answer: Mapping[str, Any]) -> None:
    """One line, past any buffer and any logging of a library."""
    os.write(1, (json.dumps(answer) + "\n").encode())


def last_words() -> NoReturn:
    """Say when this was reached, on the clock that all processes of the machine share, and die as by `kill -9`."""
    say({"reached_ns": time.monotonic_ns()})
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("nobody survives that")


def laps(moments_ns: Sequence[int]) -> dict[str, float]:
    """What lay between the beginnings of one step and the next, in microseconds."""
    between = sorted((later - earlier) / 1000 for earlier, later in itertools.pairwise(moments_ns))
    return {"p50_us": statistics.median(between), "p99_us": between[min(len(between) - 1, len(between) * 99 // 100)]}


def peak_mb() -> float:
    """The most memory that this process has held since its program began."""
    status = Path("/proc/self/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))) / 1024


def bytes_in(folder: Path) -> int:
    """What a folder takes on its disk; files that are reserved and not written do not count."""
    return sum(one.stat().st_blocks * 512 for one in folder.rglob("*") if one.is_file())
