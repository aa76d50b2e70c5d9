"""The protocol between the race and a contestant: `CONTESTANT ROLE JSON`, and JSON as the last line of stdout.

Only the standard library is used, because every contestant runs in its own environment.
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
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

ARGUMENT_CHARS = 200
SAID_CHARS = 2000
# The start of a worker (its first queries, threads, connections) must not be measured as idle time.
SETTLING_S = 1.0
UNCOUNTED_STARTS = 3

Role = Callable[[Mapping[str, Any]], Awaitable[dict[str, Any]] | dict[str, Any]]


def text_of(number: int) -> str:
    """The argument of a step: 200 characters, different for every step."""
    return _hex(number, ARGUMENT_CHARS)


def said(number: int) -> str:
    """The answer of a model in a turn, and the result of a tool: two kilobytes, different for every turn."""
    return f"{number}: {_hex(number, SAID_CHARS)}"[:SAID_CHARS]


def _hex(number: int, chars: int) -> str:
    """Random digits: a store that compresses would keep next to nothing of a repeated letter, unlike real text."""
    return hashlib.shake_128(str(number).encode()).hexdigest(chars // 2)


def compete(roles: Mapping[str, Role]) -> None:
    """Run the role of the command line, and print its answer."""
    name, given = sys.argv[1], json.loads(sys.argv[2])
    if name not in roles:
        say({"not": "it has nothing of the kind"})
        return
    answer = roles[name](given)
    say(asyncio.run(_awaited(answer)) if inspect.isawaitable(answer) else answer)


async def _awaited(answer: Awaitable[dict[str, Any]]) -> dict[str, Any]:
    return await answer


def say(answer: Mapping[str, Any]) -> None:
    """Write one line directly to stdout, without buffers and without the logging of a library."""
    os.write(1, (json.dumps(answer) + "\n").encode())


def last_words() -> NoReturn:
    """Print when this was reached, on the clock that all processes of the machine share, and die as by `kill -9`."""
    say({"reached_ns": time.monotonic_ns()})
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("nobody survives that")


def leaving() -> asyncio.Event:
    """An event that is set by SIGTERM or the end of stdin: the asking process may be dead, and a worker must not outlive it."""
    told, loop = asyncio.Event(), asyncio.get_running_loop()

    def watch() -> None:
        while os.read(0, 4096):
            pass
        loop.call_soon_threadsafe(told.set)

    loop.add_signal_handler(signal.SIGTERM, told.set)
    threading.Thread(target=watch, daemon=True).start()
    return told


async def cue() -> None:
    """Print that this process is ready, and wait for the line to begin. Call it before `leaving`, which reads stdin too."""
    say({"ready": True})
    await asyncio.to_thread(sys.stdin.readline)


def pause_s(number: int) -> float:
    """Pauses before a start on an idle system, of different lengths; otherwise every start would meet a polling worker at the same point."""
    return 0.14 + 0.001 * (number * 7 % 20)


async def idle_ms(times: int, start: Callable[[], Awaitable[int]]) -> list[float]:
    """The time from the start of a run to the beginning of its step, one at a time.

    `start` starts a run, waits for its end and returns when the step began. The first few are not counted: with a new queue, or without
    a connection, the system is not idle.
    """
    waits = []
    for number in range(-UNCOUNTED_STARTS, times):
        await asyncio.sleep(pause_s(number))
        asked_ns = time.monotonic_ns()
        began_ns = await start()
        if number >= 0:
            waits.append((began_ns - asked_ns) / 1e6)
    return waits


def laps(moments_ns: Sequence[int]) -> dict[str, float]:
    """The times between the beginnings of successive steps, in microseconds."""
    between = sorted((later - earlier) / 1000 for earlier, later in itertools.pairwise(moments_ns))
    return {"p50_us": statistics.median(between), "p99_us": between[min(len(between) - 1, len(between) * 99 // 100)]}


def peak_mb() -> float:
    """The peak memory of this process since its program began."""
    status = Path("/proc/self/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))) / 1024


def bytes_in(folder: Path) -> int:
    """The space of a folder on its disk; space that is reserved and not written does not count."""
    return sum(one.stat().st_blocks * 512 for one in folder.rglob("*") if one.is_file())


async def idle_cpu(given: Mapping[str, Any]) -> dict[str, float]:
    """The share of a core that this process, and its own server if any, uses while idle, after some time to settle."""
    server = given["server"] and given["server"]["pid"]
    await asyncio.sleep(SETTLING_S)
    begun, used, served = time.monotonic(), time.process_time(), _cpu_s(server) if server else 0.0
    await asyncio.sleep(given["seconds"])
    seconds = time.monotonic() - begun
    ours = {"cpu_percent": 100 * (time.process_time() - used) / seconds}
    return ours | ({"server_cpu_percent": 100 * (_cpu_s(server) - served) / seconds} if server else {})


def _cpu_s(pid: int) -> float:
    """The CPU time of a process and all its child processes so far."""
    fields = {}
    for one in Path("/proc").iterdir():
        if one.name.isdigit():
            try:
                fields[int(one.name)] = (one / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it has just ended
    family = {pid}
    while more := {child for child, stat in fields.items() if int(stat[1]) in family} - family:
        family |= more
    return sum(int(fields[one][11]) + int(fields[one][12]) for one in family & fields.keys()) / os.sysconf("SC_CLK_TCK")
