"""Compare two checkouts of perdure: `.venv/bin/python bench/ab.py --against OTHER_CHECKOUT`.

Every measurement is a fresh process with the Python and the source of its checkout. The two checkouts take turns, and
each begins every second pair, so that variations of the machine affect both in the same way. The ratio of a pair is
above 1 if this checkout is faster, or needs less memory. The median of the ratios counts; the spread is the lowest and
the highest ratio. CPU seconds are shown beside wall seconds, because they vary less on a shared machine.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from figures import Sample

_CHILD = Path(__file__).with_name("ab_child.py")
_RESULTS = Path(__file__).resolve().with_name("results")
_PATIENCE_S = 300.0
_DESCRIBED = {
    "fan": "200 concurrent runs of 20 keyed calls",
    "line": "one run of 1,000 keyed calls",
    "queued": "1,000 queued runs of one keyed call",
    "resume": "a run of 10,000 recorded calls, from the opening of the journal to its next call",
    "restart": "the same, from the start of the process",
    "signal": "PostgreSQL: from a signal to the next effect of a parked run",
}
NewUrl = Callable[[], str]


class Taken(NamedTuple):
    """What one measurement took."""

    wall_s: float
    cpu_s: float
    peak_mb: float


class Checkout:
    """One side of the comparison."""

    def __init__(self, root: Path, scratch: Path) -> None:
        self.root = root
        self._scratch = scratch
        scratch.mkdir()
        own = root / ".venv" / "bin" / "python"
        self._python = str(own) if own.exists() else sys.executable
        self._journal: Path | None = None

    def measure(self, workload: str, url: str) -> Taken:
        """Measure the workload in a fresh process."""
        done = self._run(workload, url)
        if done.returncode:
            raise SystemExit(f"{workload} in {self.root} ended with {done.returncode}:\n{done.stderr}")
        return Taken(*map(float, done.stdout.split()))

    def new_file(self) -> str:
        return f"sqlite:///{self._scratch}/{time.monotonic_ns()}.db"

    def killed_run(self) -> str:
        """A copy of a journal that this checkout has written: a run of 10,000 calls whose process was killed."""
        if self._journal is None:
            self._journal = self._scratch / "long"
            self._journal.mkdir()
            done = self._run("build", f"sqlite:///{self._journal}/run.db", AB_DIES="1")
            if done.returncode != -signal.SIGKILL:
                raise SystemExit(f"the run to be resumed was not built in {self.root}: {done.returncode}\n{done.stderr}")
        copy = self._scratch / f"copy-{time.monotonic_ns()}"
        shutil.copytree(self._journal, copy, ignore=shutil.ignore_patterns("*.bell"))
        return f"sqlite:///{copy}/run.db"

    def _run(self, workload: str, url: str, **variables: str) -> subprocess.CompletedProcess[str]:
        inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        # Compiled modules are kept, as they are on any machine after the first start.
        own = {"PYTHONPATH": str(self.root / "src"), "PYTHONPYCACHEPREFIX": str(self._scratch / "compiled")}
        command = [self._python, str(_CHILD), workload, url]
        return subprocess.run(
            command, env=inherited | own | variables, capture_output=True, text=True, timeout=_PATIENCE_S, check=False, cwd=self._scratch
        )


def measured(workload: str, side: Checkout, new_database: NewUrl | None) -> dict[str, Taken]:
    """One measurement. Returns both figures if the workload has two."""
    match workload:
        case "resume":
            url = side.killed_run()
            begun, children = time.perf_counter(), _cpu_of_children_s()
            taken = side.measure("resume", url)
            # After the next call of the run, the ends of run and process take a few milliseconds in both checkouts.
            whole = Taken(time.perf_counter() - begun, _cpu_of_children_s() - children, taken.peak_mb)
            return {"resume": taken, "restart": whole}
        case "signal":
            assert new_database is not None
            return {"signal": side.measure("signal", new_database())}
        case _:
            return {workload: side.measure(workload, side.new_file())}


def _cpu_of_children_s() -> float:
    times = os.times()
    return times.children_user + times.children_system


@contextmanager
def databases(folder: Path) -> Iterator[NewUrl]:
    """Starts a PostgreSQL server. Yields a function that makes a new database for each measurement."""
    import project  # noqa: F401 – before what lies in tests
    from postgres import started

    with started(folder) as server:
        yield server.new_database


def compare(workload: str, ours: Checkout, theirs: Checkout, pairs: int, new_database: NewUrl | None) -> None:
    """Measure the pairs of one workload and print them."""
    for side in (ours, theirs):
        measured(workload, side, new_database)  # compiles the imported modules; not counted
    found: dict[str, tuple[list[Taken], list[Taken]]] = {}
    for pair in range(pairs):
        for side in (theirs, ours) if pair % 2 else (ours, theirs):
            for name, taken in measured(workload, side, new_database).items():
                found.setdefault(name, ([], []))[side is theirs].append(taken)
        print(f"\r{workload}: {pair + 1} of {pairs} pairs", end="", file=sys.stderr)
    print("\r" + " " * 40 + "\r", end="", file=sys.stderr)
    for name, (own, other) in found.items():
        print(f"{name}: {_DESCRIBED[name]}")
        for what, factor, unit in (("wall_s", 1e3, "ms"), ("cpu_s", 1e3, "ms"), ("peak_mb", 1.0, "MB")):
            here = Sample.of([getattr(taken, what) * factor for taken in own])
            there = Sample.of([getattr(taken, what) * factor for taken in other])
            label = what.partition("_")[0].rjust(6)
            print(f"{label}  this {_shown(here, unit)}   other {_shown(there, unit)}   ratio {_times(there.over(here))}", flush=True)


def _shown(sample: Sample, unit: str) -> str:
    return f"{sample.median:9,.1f} {unit} ({min(sample.values):,.1f} – {max(sample.values):,.1f})"


def _times(sample: Sample) -> str:
    return f"{sample.median:.2f} × ({min(sample.values):.2f} – {max(sample.values):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--against", type=Path, required=True, metavar="PATH", help="the other checkout, with its own .venv if it has one")
    parser.add_argument("--pairs", type=int, default=7, metavar="N", help="how often both are measured, at least 3 (default: 7)")
    names = [name for name in _DESCRIBED if name != "restart"]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="WORKLOAD", help=f"some of: {', '.join(names)}")
    asked = parser.parse_args()
    if not (asked.against / "src" / "perdure").is_dir():
        parser.error(f"--against {asked.against}: there is no src/perdure")
    if asked.pairs < 3:
        parser.error(f"--pairs {asked.pairs}: fewer than three say nothing")
    _RESULTS.mkdir(exist_ok=True)
    # Not in /tmp, which is often in memory: there an fsync costs nothing, and would hide the cost of a commit.
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="scratch-", dir=_RESULTS)))
        ours = Checkout(_CHILD.resolve().parents[1], folder / "this")
        theirs = Checkout(asked.against.resolve(), folder / "other")
        new_database = stack.enter_context(databases(folder)) if "signal" in asked.only else None
        print(f"this: {ours.root}\nother: {theirs.root}\n{asked.pairs} pairs, medians with lowest and highest\n")
        for workload in asked.only:
            compare(workload, ours, theirs, asked.pairs, new_database)


if __name__ == "__main__":
    main()
