"""Measure perdure on this machine: `make bench`. Progress goes to stderr, the table to stdout and to bench/results.

Each figure is compared with a reference from the same minute on the same disk, so that the ratios are valid on a
shared machine too.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime
from pathlib import Path

import elsewhere
import here
import machine
import postgres
import report
import telemetry
import thinking
import waiting
from bar import TwoLines
from figures import Figure
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

_INTERRUPTED = 130
RESULTS = Path(__file__).resolve().with_name("results")
Workload = Callable[[Path], list[Figure]]
WORKLOADS: tuple[Workload, ...] = (
    here.sequential,
    here.reading,
    here.space,
    here.concurrent,
    here.queued,
    telemetry.on_and_off,
    elsewhere.idle,
    elsewhere.memory,
    elsewhere.imports,
    elsewhere.resuming,
    thinking.turns,
    thinking.growth,
    thinking.resuming,
    waiting.parked,
    waiting.timers,
    waiting.children,
    waiting.rewinding,
)


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure perdure on this machine.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")
    parser.add_argument("--only", choices=("sqlite", "postgres"), help="measure on one of the two alone")
    wanted = parser.parse_args()
    RESULTS.mkdir(exist_ok=True)
    facts: dict[str, str] = {}
    figures: list[Figure] = []
    try:
        _measure(wanted.only, facts, figures)
    except KeyboardInterrupt:
        if figures:
            print(f"\n{report.table(figures)}\n")
        print("interrupted: the rest is not measured, and nothing is written", file=sys.stderr)
        return _INTERRUPTED
    print(f"\n{report.table(figures)}\n")
    missed = sum(figure.verdict == "miss" for figure in figures)
    print(f"{missed} missed; medians, with lowest and highest as spread" if missed else "every target is met")
    for path in _write(facts, figures, wanted.json):
        print(f"written: {path}", file=sys.stderr)
    return 0


def _measure(only: str | None, facts: dict[str, str], figures: list[Figure]) -> None:
    """Measure on both databases, or on one. Fills `facts` and `figures` step by step, so an interrupt loses nothing."""
    # Not in /tmp, which is often in memory: there an fsync costs nothing, and every ratio would be meaningless.
    with tempfile.TemporaryDirectory(prefix="scratch-", dir=RESULTS) as scratch:
        folder = Path(scratch)
        facts |= _told(machine.facts(folder))
        if only in (None, "sqlite"):
            _measure_on("SQLite", WORKLOADS, folder, figures)
        if only in (None, "postgres"):
            with postgres.started(folder) as on_postgres:
                facts |= _told(on_postgres.facts(folder))
                _measure_on("PostgreSQL", on_postgres.workloads, folder, figures)


def _told(facts: dict[str, str]) -> dict[str, str]:
    for name, value in facts.items():
        print(f"{name}: {value}", flush=True)
    return facts


def _measure_on(store: str, workloads: Sequence[Workload], folder: Path, figures: list[Figure]) -> None:
    with _bar(store, len(workloads)) as begin:
        for workload in workloads:
            with begin(workload.__doc__ or workload.__name__):
                figures += workload(folder)


@contextmanager
def _bar(store: str, count: int) -> Iterator[Callable[[str], AbstractContextManager[None]]]:
    """Progress: a bar on a terminal, plain lines elsewhere."""
    console = Console(stderr=True)
    columns = (BarColumn(24), TextColumn("{task.completed}/{task.total}"), TimeElapsedColumn(), TimeRemainingColumn())
    with TwoLines(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task(store, total=count)

        @contextmanager
        def begin(what: str) -> Iterator[None]:
            begun = time.perf_counter()
            bar.update(task, description=f"{store}: {what}")
            yield
            bar.advance(task)
            console.print(f"{what} {time.perf_counter() - begun:.1f} s", highlight=False, markup=False, soft_wrap=True)

        yield begin


def _write(facts: dict[str, str], figures: list[Figure], also: Path | None) -> list[Path]:
    stem = RESULTS / f"{datetime.now(UTC):%Y-%m-%dT%H%M%SZ}"
    as_json = json.dumps(report.document(facts, figures), ensure_ascii=False, indent=2) + "\n"
    written = {stem.with_suffix(".json"): as_json, stem.with_suffix(".md"): report.markdown(facts, figures)}
    if also is not None:
        written[also] = as_json
    for path, text in written.items():
        path.write_text(text)
    return list(written)


if __name__ == "__main__":
    sys.exit(main())
