"""PostgreSQL: the round trips and the time of a signal to a parked run, and of a start beside an idle worker.

    python bench/ab_postgres.py [--against CHECKOUT] [--pairs 7] [--times 30] [--show]

The app that signals or starts is one process, and the worker is another. With `--against` the code of another checkout
is measured too, in turn, and the ratio of the medians is printed. `--show` prints every statement of one signal and one
start.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from perdure import Perdure, Run, agent, tool
from perdure.core.events import Event, RunReleased, RunSucceeded

_HERE = Path(__file__).resolve().parents[1]
_PATIENCE_S = 60.0
_QUIET_S = 0.1  # pause between two measurements, so that the worker is idle again
_SIGNALS_OF_A_RUN = 10
_WARM_UP = 6
_KINDS = {"signal": "a signal to a parked run, until it is parked again", "start": "a start beside an idle worker, until its end"}


@tool(effect="idempotent")
async def step() -> int:
    """Does nothing: its intent is durable before it begins."""
    return 1


@agent(version="1")
async def listener(run: Run) -> None:
    while await run.receive("go"):
        pass


@agent(version="1")
async def single(run: Run) -> int:
    return await step()


# -- the measured processes -------------------------------------------------------------------------------------------
async def work(url: str) -> None:
    """Serve the queue until SIGTERM. Print when a run was released or has ended, in ns of the machine's clock."""

    def observe(run_id: str, events: Sequence[Event]) -> None:
        if events and isinstance(events[-1].body, RunReleased | RunSucceeded):
            print(time.monotonic_ns(), flush=True)

    async with Perdure(url, agents=[listener, single], observers=[observe]) as app:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, app.drain)
        await app.work()


async def act(url: str, kind: str) -> None:
    """For each line on stdin: print the time, then start a run or signal the run in that line, and print the run."""
    async with Perdure(url) as app:
        while line := await asyncio.to_thread(sys.stdin.readline):
            begun, run_id = time.monotonic_ns(), line.strip()
            if run_id:
                await app.signal(run_id, "go", 1)
            else:
                run_id = (await app.start(listener if kind == "signal" else single)).id
            print(begun, run_id, flush=True)


# -- measuring --------------------------------------------------------------------------------------------------------
class Measured:
    """A worker and an app with the code of one checkout, on their own database."""

    def __init__(self, server: Server, checkout: Path, kind: str, counted: bool = False) -> None:
        self._server = server
        self._url = server.new_database()
        self._between = RoundTrips(self._url) if counted else None
        url = self._url if self._between is None else self._between.url(self._url)
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        compiled = str(Path(tempfile.gettempdir()) / "perdure-ab-compiled")
        env = kept | {"PYTHONPATH": str(checkout / "src"), "PYTHONPYCACHEPREFIX": compiled}
        command = [sys.executable, str(Path(__file__).resolve()), "--role"]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._worker = subprocess.Popen([*command, "work", url], env=env, **pipes)
        self._app = subprocess.Popen([*command, "act", url, kind], env=env, **pipes)
        self._kind, self._run_id = kind, ""
        self.spans: list[tuple[int, int]] = []

    def once(self) -> None:
        """Signal or start once, and wait until the worker is idle again."""
        if self._kind == "signal" and len(self.spans) % _SIGNALS_OF_A_RUN == 0:
            _, _, self._run_id = self._happen("")
        begun, ended, _ = self._happen(self._run_id)
        self.spans.append((begun, ended))

    def _happen(self, run_id: str) -> tuple[int, int, str]:
        """When the signal or start began, when the run was parked or had ended, and the id of the run."""
        assert self._app.stdin is not None
        assert self._app.stdout is not None
        assert self._worker.stdout is not None
        self._app.stdin.write(f"{run_id}\n")
        self._app.stdin.flush()
        begun, run_id = self._app.stdout.readline().split()
        ended = int(self._worker.stdout.readline())
        # The pauses differ in length. Otherwise each signal would meet the worker at the same point of its polling.
        time.sleep(_QUIET_S + 0.003 * (len(self.spans) % 7))
        return int(begun), ended, run_id

    def median_ms(self) -> float:
        """The median without the first measurements, in which statements are prepared."""
        return median((ended - begun) / 1e6 for begun, ended in self.spans[_WARM_UP:])

    def round_trips(self, show: bool) -> tuple[float, float]:
        """Medians of the round trips until the run was parked or had ended, and of the worker's queries after that."""
        assert self._between is not None
        trips, quiet_ns = list(self._between.trips), _QUIET_S * 0.9e9
        inside = [sum(begun <= one.at_ns <= ended for one in trips) for begun, ended in self.spans]
        after = [sum(ended < one.at_ns <= ended + quiet_ns for one in trips) for _, ended in self.spans]
        begun, ended = self.spans[-1]
        for one in trips if show else ():
            if begun <= one.at_ns <= ended + quiet_ns:
                place = " " if one.at_ns <= ended else "-"
                print(f"    {place} {(one.at_ns - begun) / 1e6:8.2f} ms  {' '.join(one.text.split())[:110]}")
        return median(inside), median(after)

    def close(self) -> None:
        self._app.communicate(timeout=_PATIENCE_S)
        self._worker.terminate()
        self._worker.communicate(timeout=_PATIENCE_S)
        if self._between is not None:
            self._between.close()
        self._server.drop(self._url)


def _count(server: Server, checkout: Path, kind: str, show: bool) -> None:
    one = Measured(server, checkout, kind, counted=True)
    for _ in range(10):
        one.once()
    trips, after = one.round_trips(show)
    print(f"  {checkout.name}: {trips:g} round trips, and {after:g} of polling after it", flush=True)
    one.close()


def _pair_ms(server: Server, checkouts: Sequence[Path], kind: str, times: int) -> list[float]:
    """The medians of each checkout, measured in turn, so that other load on the machine affects all checkouts."""
    pair = [Measured(server, checkout, kind) for checkout in checkouts]
    for _ in range(times + _WARM_UP):
        for one in pair:
            one.once()
    found = [one.median_ms() for one in pair]
    for one in pair:
        one.close()
    return found


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--against", type=Path, help="the folder of another checkout")
    options.add_argument("--pairs", type=int, default=7)
    options.add_argument("--times", type=int, default=30)
    options.add_argument("--kinds", nargs="+", choices=list(_KINDS), default=list(_KINDS))
    options.add_argument("--show", action="store_true")
    chosen = options.parse_args()
    checkouts = [_HERE] if chosen.against is None else [chosen.against.resolve(), _HERE]
    server = Server(shared_buffers="128MB")
    try:
        server.start()
        for kind in chosen.kinds:
            print(f"{_KINDS[kind]}:")
            for checkout in checkouts:
                _count(server, checkout, kind, chosen.show)
            pairs = [_pair_ms(server, checkouts, kind, chosen.times) for _ in range(chosen.pairs)]
            for place, checkout in enumerate(checkouts):
                each = [pair[place] for pair in pairs]
                print(f"  {checkout.name}: {median(each):.2f} ms, the median of {' '.join(f'{one:.2f}' for one in each)}")
            if len(checkouts) > 1:
                ratios = [before / now for before, now in pairs]
                print(f"  {median(ratios):.2f} times as fast, the median of {' '.join(f'{one:.2f}' for one in ratios)}", flush=True)
    finally:
        server.close()


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["--role", "work", url]:
            asyncio.run(work(url))
        case ["--role", "act", url, kind]:
            asyncio.run(act(url, kind))
        case _:
            import project  # noqa: F401 – before what lies in tests
            from round_trips import RoundTrips
            from tests.servers.postgres import Server

            main()
