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
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

ARGUMENT_CHARS = 200
SAID_CHARS = 2000
# What a worker does when it has just begun (the first look at its store, threads, connections) is not what it does while it is idle.
SETTLING_S = 1.0
UNCOUNTED_STARTS = 3

Role = Callable[[Mapping[str, Any]], Awaitable[dict[str, Any]] | dict[str, Any]]


def text_of(number: int) -> str:
    """The argument of a step: 200 characters, different for every step."""
    return _hex(number, ARGUMENT_CHARS)


def said(number: int) -> str:
    """What a model says in a turn, and what a tool gives back: two kilobytes, different for every turn."""
    return f"{number}: {_hex(number, SAID_CHARS)}"[:SAID_CHARS]


def _hex(number: int, chars: int) -> str:
    """Digits without a pattern: of one letter over and over a store that compresses would keep next to nothing, which nobody's words are."""
    return hashlib.shake_128(str(number).encode()).hexdigest(chars // 2)


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


def leaving() -> asyncio.Event:
    """Set by SIGTERM, or as soon as nobody holds our stdin any more: whoever asked may be dead, and a worker must not outlive that."""
    told, loop = asyncio.Event(), asyncio.get_running_loop()

    def watch() -> None:
        while os.read(0, 4096):
            pass
        loop.call_soon_threadsafe(told.set)

    loop.add_signal_handler(signal.SIGTERM, told.set)
    threading.Thread(target=watch, daemon=True).start()
    return told


async def cue() -> None:
    """Say that we are ready, and wait for the line that tells us to begin. To be called before `leaving`, which reads stdin too."""
    say({"ready": True})
    await asyncio.to_thread(sys.stdin.readline)


def pause_s(number: int) -> float:
    """Before a start of an idle system: of different lengths, or every start would meet somebody who polls at the same point of the interval."""
    return 0.14 + 0.001 * (number * 7 % 20)


async def idle_ms(times: int, start: Callable[[], Awaitable[int]]) -> list[float]:
    """From asking for a run to the beginning of its step, one at a time; `start` asks, waits for its end and gives back when the step began.

    A few are not counted: a queue that has just been made, or a connection that is not there yet, is no idle system.
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


async def idle_cpu(given: Mapping[str, Any]) -> dict[str, float]:
    """The share of a core that this process takes while nothing happens, once it has settled; and its own server, if it has one."""
    server = given["server"] and given["server"]["pid"]
    await asyncio.sleep(SETTLING_S)
    begun, used, served = time.monotonic(), time.process_time(), _cpu_s(server) if server else 0.0
    await asyncio.sleep(given["seconds"])
    seconds = time.monotonic() - begun
    ours = {"cpu_percent": 100 * (time.process_time() - used) / seconds}
    return ours | ({"server_cpu_percent": 100 * (_cpu_s(server) - served) / seconds} if server else {})


def _cpu_s(pid: int) -> float:
    """What a process and all below it have computed so far."""
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
