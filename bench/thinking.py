"""Workloads with a model that answers at once, so that only the cost of perdure is measured."""

from __future__ import annotations

import asyncio
import shutil
import signal
import time
from pathlib import Path

import agents
from elsewhere import child, python
from figures import Figure, Sample
from here import beside_raw, new_path, url_of

from perdure import Perdure, Settings
from perdure.inspect.prompt import request_of_call
from perdure.inspect.view import loader, read_run
from perdure.store.open import open_store

_TURNS = 50


def turns(folder: Path) -> list[Figure]:
    """A ReAct run of 50 turns of 2 kB, each with a question and a tool: the cost of a turn, without model and tool."""
    commits, per_turn = beside_raw(folder, lambda url: _ms_per_turn(url, _TURNS))
    told = f"two commits each, beside {commits.median:,.0f} raw commits/s"
    return [Figure("a ReAct run of 50 turns: a turn", per_turn, "ms", 3, "at most", told)]


def growth(folder: Path) -> list[Figure]:
    """The size of the database for a conversation of 200 turns, divided by the size of its text: the last request."""
    sizes = []
    for _ in range(3):
        path = new_path(folder)
        asyncio.run(_ms_per_turn(url_of(path), 200, Settings(synchronous="normal")))  # closing checkpoints the log
        size = path.stat().st_size
        store = open_store(url_of(path))
        (row,) = store.list()
        reading = read_run(store, row.run_id)
        sizes.append(size / len(request_of_call(reading, reading.state.numbers, loader(store))))
        store.close()
    return [Figure("a conversation of 200 turns: database in unique bytes", Sample.of(sizes), "×", 2, "at most", "2 kB a message")]


async def _ms_per_turn(url: str, count: int, settings: Settings | None = None) -> float:
    async with Perdure(url, agents=[agents.talker], settings=settings) as app:
        begun = time.perf_counter()
        await app.run(agents.talker, f"{count}")
        return (time.perf_counter() - begun) / count * 1e3


def resuming(folder: Path) -> list[Figure]:
    """A ReAct run of 50 turns whose process was killed: a new process, up to the run's next tool."""
    home = folder / "talk"
    home.mkdir()
    child(folder, "talk", url_of(home / "run.db"), _TURNS, code=-signal.SIGKILL)
    beyond = []
    python(folder, "-c", "import perdure")  # compiles the modules; not measured
    for _ in range(3):
        bare_s = _seconds_of_bare_import(folder)
        copy = folder / f"copy-{time.monotonic_ns()}"
        shutil.copytree(home, copy, ignore=shutil.ignore_patterns("*.bell"))
        begun = time.monotonic_ns()
        _, reached = map(int, child(folder, "talk_on", url_of(copy / "run.db"), "-", code=-signal.SIGKILL))
        beyond.append((reached - begun) / 1e9 - bare_s)
    told = "from the start of a process to the next tool, less one that only imports perdure"
    return [Figure("a ReAct run of 50 turns resumes, beyond process start", Sample.of(beyond), "s", 0.3, "at most", told)]


def _seconds_of_bare_import(folder: Path) -> float:
    begun = time.perf_counter()
    python(folder, "-c", "import perdure")
    return time.perf_counter() - begun
