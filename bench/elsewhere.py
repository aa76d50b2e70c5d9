"""Workloads in other processes: imports, an idle worker, memory, and a run whose process has died."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import agents
from figures import Figure, Sample
from here import new_path, url_of

from perdure import Perdure
from perdure.store.open import open_store

_CHILD = Path(__file__).with_name("child.py")
_IMPORT_CPU = "import time; begun = time.process_time(); import perdure; print(time.process_time() - begun)"
_PATIENCE_S = 60.0


def environment(folder: Path) -> dict[str, str]:
    """Compiled modules are kept, as on any machine after the first start, but in the scratch folder."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return kept | {"PYTHONPYCACHEPREFIX": str(folder / "compiled")}


def python(folder: Path, *arguments: str, code: int = 0) -> str:
    """The output of a fresh interpreter that must end with this exit code."""
    command, env = [sys.executable, *arguments], environment(folder)
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=_PATIENCE_S, check=False)
    if done.returncode != code:
        raise RuntimeError(f"python {' '.join(arguments)} ended with {done.returncode}, not {code}:\n{done.stderr}")
    return done.stdout


def child(folder: Path, role: str, url: str, argument: object, code: int = 0) -> list[str]:
    return python(folder, str(_CHILD), role, url, str(argument), code=code).split()


def imports(folder: Path) -> list[Figure]:
    """`import perdure` in a fresh interpreter."""
    python(folder, "-c", _IMPORT_CPU)  # compiles the modules; not measured
    seconds = Sample.of([float(python(folder, "-c", _IMPORT_CPU)) for _ in range(5)])
    return [Figure("import perdure, CPU", seconds, "s", 0.15, "at most", "five fresh processes, its modules compiled before")]


def memory(folder: Path) -> list[Figure]:
    """A worker with 200 live runs."""
    peak = Sample.of([float(child(folder, "crowd", url_of(new_path(folder)), 200)[-1]) for _ in range(3)])
    return [Figure("a worker with 200 live runs, peak memory", peak, "MB", 80, "at most", "each run 20 calls old and inside the next")]


# -- an idle system ---------------------------------------------------------------------------------------------------
@contextmanager
def worker(folder: Path, url: str) -> Iterator[None]:
    """A worker in another process."""
    process = subprocess.Popen([sys.executable, str(_CHILD), "serve", url, "-"], env=environment(folder))
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def idle(folder: Path) -> list[Figure]:
    """From the return of `start` in this process to the first effect in an idle worker's process."""
    url = url_of(new_path(folder))
    with worker(folder, url):
        waits = Sample.of(asyncio.run(latencies(url, 20)))
    return [
        Figure("an idle worker elsewhere begins a queued run", waits, "ms", 10, "at most", "from start() to the first effect, 20 times")
    ]


async def latencies(url: str, times: int) -> list[float]:
    waits = []
    async with Perdure(url) as app:
        await (await app.start(agents.punctual)).result(timeout=_PATIENCE_S)  # the worker is ready now
        for number in range(times):
            # The pauses differ in length. Otherwise every start would meet the worker at the same point of its polling.
            await asyncio.sleep(0.03 + 0.001 * (number * 7 % 20))
            handle = await app.start(agents.punctual)
            returned = time.monotonic_ns()
            waits.append((await handle.result(timeout=_PATIENCE_S) - returned) / 1e6)
    return waits


# -- a long run -------------------------------------------------------------------------------------------------------
def resuming(folder: Path) -> list[Figure]:
    """A run of 10,000 calls whose process was killed: a new process, up to the run's next call."""
    long, short = _built(folder, 10_000), _built(folder, 1_000)
    whole, parts, replays, short_replays = [], [], [], []
    _seconds_of_bare_import(folder)  # compiles the modules; not measured
    for _ in range(3):
        resumed_s, replay_s = _resume(folder, long)
        bare_s = _seconds_of_bare_import(folder)
        whole.append(resumed_s)
        parts.append(bare_s + _seconds_to_read(folder, long))
        replays.append(replay_s)
        short_replays.append(_resume(folder, short)[1])
    times = Sample.of(whole).over(Sample.of(parts))
    growth = Sample.of(replays).over(Sample.of(short_replays))
    told = f"{Sample.of(whole).median:.2f} s against {Sample.of(parts).median:.2f} s"
    grown = (
        f"{Sample.of(replays).median * 1e3:,.0f} ms against {Sample.of(short_replays).median * 1e3:,.0f} ms, without the process's start"
    )
    return [
        Figure("10,000 calls resume, in imports + readings of the journal", times, "×", 3, "at most", told),
        Figure("10,000 calls resume, in resumes of 1,000 calls", growth, "×", 11, "at most", grown),
    ]


def _built(folder: Path, calls: int) -> Path:
    """A folder with the journal of a run whose process died after `calls` calls, inside the next call."""
    home = folder / f"long-{calls}"
    home.mkdir()
    child(folder, "build", url_of(home / "run.db"), calls, code=-signal.SIGKILL)
    return home


def _copied(folder: Path, home: Path) -> str:
    """A copy of the journal for one resume. Each resume dies too, and a run whose workers die is parked as poison."""
    copy = folder / f"copy-{time.monotonic_ns()}"
    shutil.copytree(home, copy, ignore=shutil.ignore_patterns("*.bell"))
    return url_of(copy / "run.db")


def _resume(folder: Path, home: Path) -> tuple[float, float]:
    """Seconds to the run's next call: from the start of a new process, and from the first line of its program."""
    url = _copied(folder, home)
    begun = time.monotonic_ns()
    ready, reached = map(int, child(folder, "resume", url, "-", code=-signal.SIGKILL))
    return (reached - begun) / 1e9, (reached - ready) / 1e9


def _seconds_of_bare_import(folder: Path) -> float:
    begun = time.perf_counter()
    python(folder, "-c", "import perdure")
    return time.perf_counter() - begun


def _seconds_to_read(folder: Path, home: Path) -> float:
    store = open_store(_copied(folder, home))
    try:
        begun = time.perf_counter()
        events = store.read("long")
        elapsed = time.perf_counter() - begun
    finally:
        store.close()
    assert len(events) > 2000, len(events)
    return elapsed
