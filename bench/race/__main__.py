"""perdure compared with its peers: `make bench-peers`, or `python -m bench.race` from the root of the checkout.

Progress goes to stderr, the page to stdout, and the page, both plots and every repeat to bench/results.
"""

from __future__ import annotations

import argparse
import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any

from bench.race import alone, database, document, machine, page, plot, progress
from bench.race.exchange import Absent, Exchange, Failed
from bench.race.figures import WORKLOADS
from bench.race.install import NotInstalled, install
from bench.race.interruption import Interruption
from bench.race.lanes import ENVIRONMENTS, OURS, PEERS, ROOT, Contestant, Lane, lanes_of
from bench.race.measurements import MEASUREMENTS, Measurement
from bench.race.race import Race
from bench.race.results import Results
from bench.race.sizes import QUICK, WHOLE
from bench.race.table import Ground
from tests.servers.binaries import NoPostgres
from tests.servers.postgres import Server
from tests.servers.undertaker import hire

_RESULTS = ROOT / "bench" / "results"
_KEPT = "race.json"
_ABOUT_S = 60.0
_REPEATS = 3
_INTERRUPTED = 130
_ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class NobodyToRace(Exception):
    """Peers were requested, and none of them can take part; the reasons have been printed."""


def main(arguments: Sequence[str] | None = None) -> int:
    wanted = parsed(arguments)
    if wanted.render is not None:
        return _rendered(wanted.render)
    wanted.results = wanted.results.resolve()  # contestants may run in another folder
    try:
        _make_room(wanted.results)
    except OSError as error:
        print(
            f"--results {wanted.results}: nothing can be written there: {error.strerror}; name a folder that can be made", file=sys.stderr
        )
        return 1
    _heed_signals()
    try:
        with alone.on_this_machine(ENVIRONMENTS / "race.lock", is_measuring=not wanted.quick):
            return _race(wanted)
    except (alone.NotAlone, NobodyToRace) as reason:
        print(reason, file=sys.stderr)
        return 1


def _make_room(folder: Path) -> None:
    """Check that the folder exists and is writable, or raise OSError: before an hour of measuring, not after it."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.race", description="perdure beside its peers, on this machine.")
    parser.add_argument("--only", type=_listed(WORKLOADS), default=WORKLOADS, metavar="W1,W4", help=f"of {', '.join(WORKLOADS)}")
    parser.add_argument(
        "--with",
        type=_listed(PEERS),
        default=PEERS,
        dest="peers",
        metavar="dbos,temporal",
        help=f"of {', '.join(PEERS)}, or '' for nobody; perdure is always there",
    )
    parser.add_argument(
        "--repeats",
        type=int,
        # A run that has killed five workers in a row is parked as poison.
        choices=range(1, 5),
        metavar="N",
        help=f"of everything, 1 to 4: {_REPEATS} unless told otherwise, 1 with --quick",
    )
    parser.add_argument("--quick", action="store_true", help="small sizes: shows that it works, and measures nothing")
    parser.add_argument(
        "--results", type=Path, default=_RESULTS, metavar="FOLDER", help="where everything is written, on the disk to measure on"
    )
    parser.add_argument("--render", type=Path, metavar="FILE.json", help="only write the page and the plots of these results again")
    wanted = parser.parse_args(arguments)
    if not wanted.only:
        parser.error(f"--only names no workload: there is {', '.join(WORKLOADS)}")
    if wanted.repeats is None:
        wanted.repeats = 1 if wanted.quick else _REPEATS
    return wanted


def _listed(known: Sequence[str]) -> Any:
    def parse(text: str) -> tuple[str, ...]:
        chosen = [one.strip().lower() for one in text.split(",") if one.strip()]
        if unknown := [one for one in chosen if one not in map(str.lower, known)]:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: there is {', '.join(known)}")
        return tuple(one for one in known if one.lower() in chosen)

    return parse


def _heed_signals() -> None:
    """On every signal that asks for the end, also the end of the terminal: end all processes and write the results."""
    for number in _ENDINGS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # started with nohup: ignore the end of the terminal
            signal.signal(number, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    for one in _ENDINGS:  # a second signal would interrupt the cleanup, and leave processes behind
        signal.signal(one, signal.SIG_IGN)
    if number == signal.SIGHUP:
        _forget_the_terminal()
    raise KeyboardInterrupt


def _forget_the_terminal() -> None:
    """Stop writing to a terminal that has gone: the error would prevent the results from being written."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        if stat.S_ISCHR(os.fstat(stream).st_mode):  # isatty() is False for a terminal that has gone
            os.dup2(nowhere, stream)


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
    planned: list[progress.Key] = []
    is_over = False
    try:
        _measure(found, chosen, wanted, planned)
        is_over = True
    except KeyboardInterrupt:
        kept = "what has been measured is kept" if found.cells else "nothing has been measured"
        print(f"interrupted: {kept}", file=sys.stderr)
    finally:  # in any case, so that an hour of measuring is not lost
        found.seconds = time.monotonic() - begun
        found.machine["load after (1, 5, 15 min)"] = machine.load()
        found.is_whole = is_over and is_whole(wanted, found)
        if not is_over:
            found.interrupted = Interruption.of(chosen, [name for name, _ in planned], [cell.measurement for cell in found.cells])
        if found.lanes:
            _written(found, wanted.results / f"race-{stamp:%Y-%m-%dT%H%M%SZ}.json")
    if found.is_whole:
        _written(found, wanted.results / _KEPT)
    if found.lanes:
        print(page.page(found))
    return 0 if is_over else _INTERRUPTED


def is_whole(wanted: argparse.Namespace, found: Results) -> bool:
    """Were all workloads measured with all contestants? Only then may the race replace the one in git."""
    is_everything = not wanted.quick and wanted.repeats >= _REPEATS and wanted.only == WORKLOADS and wanted.peers == PEERS
    return is_everything and not found.left_out and not found.silent()


def _measure(found: Results, chosen: Sequence[Measurement], wanted: argparse.Namespace, planned: list[progress.Key]) -> None:
    # Beside the results and not in /tmp, which is often memory: an fsync that costs nothing would make every ratio meaningless.
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="scratch-", dir=wanted.results, ignore_cleanup_errors=True)))
        stack.enter_context(_looked_after(folder))
        # Before anything is installed, because installing is a load too.
        found.load_before = os.getloadavg()[0]
        if warning := machine.busy(found.load_before):
            print(warning, file=sys.stderr, flush=True)
        found.machine |= machine.facts(folder)
        lanes = _lanes(found, folder, (OURS, *wanted.peers))
        if wanted.peers and not found.contestants.keys() & set(wanted.peers):
            raise NobodyToRace("no peer can take part, and perdure alone is no race: see above what to try, or race it alone: --with ''")
        server = _postgresql(found, folder, stack)
        lanes = [lane for lane in lanes if lane.store != "postgres" or server is not None]
        planned += _planned(chosen, lanes, wanted.repeats)
        found.lanes += [lane.name for lane in lanes]
        ground = Ground(folder, server, found.sizes)
        earlier = {} if wanted.quick else earlier_durations(wanted.results / _KEPT)
        told = stack.enter_context(progress.shown(planned, earlier))
        race = Race(ground, lanes, wanted.repeats, told, found.cells)
        for measurement in chosen:
            race.run(measurement)


@contextmanager
def _looked_after(folder: Path) -> Iterator[None]:
    """If this process is killed, end all processes that work below this folder; a contestant could wait for a worker that has ended."""
    undertaker = hire(folder)
    try:
        yield
    finally:
        undertaker.kill()
        undertaker.wait()


def _postgresql(found: Results, folder: Path, stack: ExitStack) -> Server | None:
    try:
        server = stack.enter_context(database.started(folder))
    except (NoPostgres, database.OnAnotherDisk, RuntimeError, OSError, subprocess.SubprocessError) as reason:
        found.left_out["PostgreSQL"] = str(reason)
        print(f"PostgreSQL is left out: {reason}", file=sys.stderr, flush=True)
        return None
    found.machine |= database.facts(server)
    return server


def _lanes(found: Results, folder: Path, names: Sequence[str]) -> list[Lane]:
    """The contestants that can be installed and answer; prints why others are left out."""
    lanes: list[Lane] = []
    exchange = Exchange(folder / "about")
    for name in names:
        contestant = Contestant.called(name)
        try:
            install(name)
            about = described(exchange.ask(contestant, "about", {"folder": str(folder), "url": None, "server": None}, _ABOUT_S))
            about["python"] = machine.python(contestant.python)
        except (NotInstalled, Failed, Absent, OSError, subprocess.SubprocessError) as reason:
            found.left_out[name] = str(reason)
            print(f"{name} is left out: {reason}", file=sys.stderr, flush=True)
            continue
        found.contestants[name] = about
        lanes += lanes_of(contestant, about)
    return lanes


def described(about: dict[str, Any]) -> dict[str, Any]:
    """Raise Failed if the answer lacks a field that the page needs."""
    if missing := [name for name in ("name", "version", "stores", "durable", "how") if not about.get(name)]:
        raise Failed(f"about: it says nothing of {', '.join(missing)}")
    return about


def _planned(chosen: Sequence[Measurement], lanes: Sequence[Lane], repeats: int) -> list[progress.Key]:
    return [
        (measurement.name, lane.name)
        for measurement in chosen
        for lane in lanes
        if measurement.takes(lane)
        for _ in range(repeats + (measurement.prepare is not None))
    ]


def earlier_durations(kept: Path) -> dict[progress.Key, float]:
    """How long each measurement took in the race in git, if it can be read; used only to estimate the remaining time."""
    try:
        return progress.earlier_durations(document.read(kept).cells)
    except document.Unreadable:
        return {}


def _written(found: Results, path: Path) -> None:
    document.write(found, path)
    print(f"written: {path}", file=sys.stderr)
    _render(found, path)


def _rendered(path: Path) -> int:
    try:
        _render(document.read(path), path)
    except document.Unreadable as reason:
        print(reason, file=sys.stderr)
        return 1
    return 0


def _render(found: Results, path: Path) -> None:
    for written, text in (
        (path.with_suffix(".md"), page.page(found)),
        (path.with_suffix(".svg"), plot.plot(found)),
        (_headline_of(path), plot.headline(found)),
    ):
        document.replace(written, text.encode())
        print(f"written: {written}", file=sys.stderr)


def _headline_of(path: Path) -> Path:
    """Where the four panels of these results go: headline.svg beside race.json."""
    stem = path.stem
    named = stem.replace("race", "headline", 1) if stem.startswith("race") else f"{stem}-headline"
    return path.with_name(f"{named}.svg")


if __name__ == "__main__":
    sys.exit(main())
