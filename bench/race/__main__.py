"""perdure beside its peers: `make bench-peers`, or `python -m bench.race` from the root of the checkout.

Progress goes to stderr, the page to stdout, and the page, the plot and every repeat to bench/results.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any

from bench.race import database, document, machine, page, plot, progress
from bench.race.exchange import Absent, Exchange, Failed
from bench.race.figures import WORKLOADS
from bench.race.install import NotInstalled, install
from bench.race.lanes import NAMES, OURS, ROOT, Contestant, Lane, lanes_of
from bench.race.measurements import MEASUREMENTS, Measurement
from bench.race.race import Race
from bench.race.results import Cell, Results
from bench.race.sizes import QUICK, WHOLE
from bench.race.table import Ground
from tests.servers.binaries import NoPostgres
from tests.servers.postgres import Server

_RESULTS = ROOT / "bench" / "results"
_KEPT = "race.json"
_ABOUT_S = 60.0
_REPEATS = 3
_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    wanted = _parsed(arguments)
    if wanted.render is not None:
        return _render(wanted.render)
    signal.signal(signal.SIGTERM, _interrupt)
    wanted.results = wanted.results.resolve()  # contestants may run elsewhere
    wanted.results.mkdir(parents=True, exist_ok=True)
    return _race(wanted)


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.race", description="perdure beside its peers, on this machine.")
    parser.add_argument("--only", type=_listed(WORKLOADS), default=WORKLOADS, metavar="W1,W4", help=f"of {', '.join(WORKLOADS)}")
    parser.add_argument(
        "--with", type=_listed(NAMES), default=NAMES, dest="names", metavar="dbos,temporal", help="peers; perdure is always there"
    )
    # A run that has killed five workers in a row is not given to another one.
    parser.add_argument("--repeats", type=int, choices=range(1, 5), default=_REPEATS)
    parser.add_argument("--quick", action="store_true", help="one repeat at small sizes: shows that it works, and measures nothing")
    parser.add_argument(
        "--results", type=Path, default=_RESULTS, metavar="FOLDER", help="where everything is written, on the disk to measure on"
    )
    parser.add_argument("--render", type=Path, metavar="FILE.json", help="only write the page and the plot of these results again")
    wanted = parser.parse_args(arguments)
    if wanted.quick:
        wanted.repeats = 1
    return wanted


def _listed(known: Sequence[str]) -> Any:
    def parse(text: str) -> tuple[str, ...]:
        chosen = text.split(",")
        if unknown := [one for one in chosen if one not in known]:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: there is {', '.join(known)}")
        return tuple(one for one in known if one in chosen)

    return parse


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _race(wanted: argparse.Namespace) -> int:
    begun, stamp = time.monotonic(), datetime.now(UTC)
    chosen = [one for one in MEASUREMENTS if one.workloads & set(wanted.only)]
    found = Results(
        date=stamp.isoformat(timespec="seconds"),
        quick=wanted.quick,
        repeats=wanted.repeats,
        sizes=QUICK if wanted.quick else WHOLE,
        machine={},
        contestants={},
        left_out={},
        lanes=[],
        cells=[],
    )
    is_over = False
    try:
        _measure(found, chosen, wanted)
        is_over = True
    except KeyboardInterrupt:
        print("interrupted: what has been measured is kept", file=sys.stderr)
    finally:  # whatever happens: an hour of measuring is not lost
        found.seconds = time.monotonic() - begun
        found.is_whole = is_over and _is_everything(wanted)
        _written(found, wanted.results / f"race-{stamp:%Y-%m-%dT%H%M%SZ}.json")
    if found.is_whole:
        _written(found, wanted.results / _KEPT)
    print(page.page(found))
    return 0 if is_over else _INTERRUPTED


def _is_everything(wanted: argparse.Namespace) -> bool:
    return not wanted.quick and wanted.repeats >= _REPEATS and wanted.only == WORKLOADS and wanted.names == NAMES


def _measure(found: Results, chosen: Sequence[Measurement], wanted: argparse.Namespace) -> None:
    # Beside the results and not in /tmp, which is often memory: an fsync that costs nothing would make every ratio meaningless.
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="scratch-", dir=wanted.results, ignore_cleanup_errors=True)))
        found.machine |= machine.facts(folder)
        lanes = _lanes(found, folder, (OURS, *(name for name in wanted.names if name != OURS)))
        server = _postgresql(found, folder, stack)
        lanes = [lane for lane in lanes if lane.store != "postgres" or server is not None]
        found.lanes += [lane.name for lane in lanes]
        ground = Ground(folder, server, found.sizes)
        earlier = {} if wanted.quick else _earlier(wanted.results / _KEPT)
        told = stack.enter_context(progress.shown(_planned(chosen, lanes, wanted.repeats), earlier))
        race = Race(ground, lanes, wanted.repeats, told, found.cells)
        for measurement in chosen:
            race.run(measurement)


def _postgresql(found: Results, folder: Path, stack: ExitStack) -> Server | None:
    try:
        server = stack.enter_context(database.started(folder))
    except (NoPostgres, RuntimeError, OSError, subprocess.SubprocessError) as reason:
        found.left_out["PostgreSQL"] = str(reason)
        print(f"PostgreSQL is left out: {reason}", file=sys.stderr, flush=True)
        return None
    found.machine |= database.facts(server)
    return server


def _lanes(found: Results, folder: Path, names: Sequence[str]) -> list[Lane]:
    """Everybody who can be installed and speaks; why the others are left out is told."""
    lanes: list[Lane] = []
    exchange = Exchange(folder / "about")
    for name in names:
        contestant = Contestant.called(name)
        try:
            install(name)
            about = exchange.ask(contestant, "about", {"folder": str(folder), "url": None, "server": None}, _ABOUT_S)
        except (NotInstalled, Failed, Absent) as reason:
            found.left_out[name] = str(reason)
            print(f"{name} is left out: {reason}", file=sys.stderr, flush=True)
            continue
        found.contestants[name] = about
        lanes += lanes_of(contestant, about)
    return lanes


def _planned(chosen: Sequence[Measurement], lanes: Sequence[Lane], repeats: int) -> list[progress.Key]:
    return [
        (measurement.name, lane.name)
        for measurement in chosen
        for lane in lanes
        if measurement.takes(lane)
        for _ in range(repeats + (measurement.prepare is not None))
    ]


def _earlier(kept: Path) -> dict[progress.Key, float]:
    """How long everything took in the race that is kept, if one is."""
    cells: list[Cell] = document.read(kept).cells if kept.exists() else []
    return progress.earlier_durations(cells)


def _written(found: Results, path: Path) -> None:
    document.write(found, path)
    _render(path)


def _render(path: Path) -> int:
    found = document.read(path)
    for suffix, text in ((".md", page.page(found)), (".svg", plot.plot(found))):
        path.with_suffix(suffix).write_text(text)
        print(f"written: {path.with_suffix(suffix)}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
