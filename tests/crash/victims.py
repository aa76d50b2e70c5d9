"""The program of a victim: a real app that drives a run until the run ends or needs a person, or the process dies."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import time
from collections.abc import Coroutine, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
from tests.crash import chores, clans, errands, fate, late, ledger, petitions
from tests.crash import thicket as thickets
from tests.crash.careless import CARELESS
from tests.crash.failing import FailingDisk
from tests.crash.nursery import JOURNAL

from perdure import Agent, Perdure
from perdure.cli.driving import stop_on_signals
from perdure.core.events import Event
from perdure.engine.clock import Clock
from perdure.errors import RunNotSucceeded, StoreUnavailable
from perdure.settings import Settings
from perdure.store.api import FINISHED
from perdure.store.open import open_store
from perdure.store.sql import SqlStore

# Waits that only cost time are short, and a wait of any length is given up: a parked run is a boundary too.
AGENTS: dict[str, Agent[Any, Any]] = {
    found.name: found
    for found in (
        *(
            chores.chores,
            chores.sleeper,
            chores.asker,
            chores.hasty,
            chores.racing,
            chores.fickle,
            errands.branch,
            errands.errand,
            errands.mishap,
            errands.allowance,
            errands.lives,
            errands.crossing,
            errands.doomed,
        ),
        *(petitions.petition, petitions.vigil, petitions.forum, petitions.council),
        *(late.orderer, late.holder),
        *(clans.clan, clans.kin, clans.spender, clans.purse, clans.heir, clans.household, clans.listener),
    )
}
QUICK: dict[str, Any] = {"reconcile_margin_s": 0.0, "unknown_deadline_s": 0.0, "park_after_s": 0.0, "cancel_grace_s": 0.5}


def prepare(folder: str, settings: dict[str, Any] | None = None) -> tuple[str, Settings]:
    """The journal's URL and the settings of this process."""
    os.environ[ledger.VARIABLE] = f"{folder}/ledger"
    logging.basicConfig(level=logging.INFO)
    return os.environ[JOURNAL], msgspec.convert({**QUICK, **(settings or {})}, Settings)


def acknowledge(run_id: str, events: Sequence[Event]) -> None:
    """Keep a list of the events that the store has acknowledged, in a place that the store does not use."""
    path = f"{os.environ[ledger.VARIABLE]}.acknowledged"
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(descriptor, "".join(f"{run_id} {event.event_id}\n" for event in events).encode())
    os.close(descriptor)


def tell(report: str, **facts: Any) -> None:
    """Write a message for the test, completely or not at all."""
    Path(f"{report}.new").write_text(json.dumps(facts))
    os.replace(f"{report}.new", report)


def errand(
    folder: str,
    report: str,
    run_id: str,
    kind: str,
    die: Sequence[Any] = (),
    settings: dict[str, Any] | None = None,
    nap_s: float = 0.02,
    blow: str = "SIGKILL",
) -> None:
    """Start the errand, or find it started, and drive it until it ends; unless the process dies before."""
    url, chosen = prepare(folder, {**({"lease_s": 0.2} if die and die[0] == "renew" else {}), **(settings or {})})
    doom = fate.seal([*die, kind, blow]) if die else fate.current()

    async def main() -> None:
        stop, loop = asyncio.Event(), asyncio.get_running_loop()
        doom.on_drain = lambda: loop.call_soon_threadsafe(stop.set)  # type: ignore[assignment]
        async with Perdure(url, agents=[errands.errand], settings=chosen, observers=[acknowledge]) as app:
            handle = await app.start(errands.errand, kind, nap_s, id=run_id)
            if die and die[0] == "handover":
                await app.engine.drive(run_id, stop=stop)
                return
            tell(report, **await result(handle.result(timeout=60), app, run_id))

    asyncio.run(main())


async def result(awaited: Coroutine[Any, Any, Any], app: Perdure, run_id: str) -> dict[str, Any]:
    """How the run has ended, in words that fit in a report."""
    try:
        output, error = await awaited, None
    except RunNotSucceeded as not_succeeded:
        output, error = None, str(not_succeeded)
    row = app.store.get(run_id)
    assert row is not None
    return {"status": row.status, "output": output, "error": error}


def resolve(folder: str, run_id: str, call: int, **how: Any) -> None:
    """What a person does about a call in doubt."""
    url, chosen = prepare(folder)

    async def main() -> None:
        async with Perdure(url, settings=chosen) as app:
            await app.resolve(run_id, call, by="ann", **how)

    asyncio.run(main())


class Shifted(Clock):
    """A wall clock that is wrong by this many seconds, from the moment at which a file exists."""

    def __init__(self, seconds: float, since: str | None = None) -> None:
        super().__init__()
        self._us = round(seconds * 1e6)
        self._since = since

    def now(self) -> int:
        wrong = self._since is None or os.path.exists(self._since)
        return super().now() + (self._us if wrong else 0)


def start(folder: str, runs: dict[str, list[Any]], agent: str = "chores", queue: str | None = None) -> None:
    """Create runs that no worker drives yet."""
    url, chosen = prepare(folder)

    async def main() -> None:
        async with Perdure(url, settings=chosen) as app:
            for run_id, args in runs.items():
                await app.start(AGENTS[agent], *([args] if agent == "chores" else args), id=run_id, queue=queue)

    asyncio.run(main())


def serve(
    folder: str,
    until: Sequence[str] = (),
    settings: dict[str, Any] | None = None,
    clock: Sequence[Any] = (),
    report: str | None = None,
    slow_read_s: float = 0,
    queues: Sequence[str] | None = None,
    die: Sequence[Any] = (),
) -> None:
    """A worker, until all of these runs have ended or need a person; without any, until SIGTERM."""
    url, chosen = prepare(folder, settings)
    if die:
        fate.seal(die).on_drain = lambda: os.kill(os.getpid(), signal.SIGTERM)
    if slow_read_s:
        read_slowly(slow_read_s)

    async def main() -> None:
        stop = stop_on_signals(asyncio.get_running_loop())
        options: dict[str, Any] = {"clock": Shifted(*clock) if clock else None, "queues": queues}
        async with Perdure(url, agents=AGENTS.values(), settings=chosen, observers=[acknowledge], **options) as app:
            async with asyncio.TaskGroup() as group:
                group.create_task(app.work(stop=stop))
                if until:
                    group.create_task(_watch(app, until, stop))
            if report is not None:
                tell(report, **{run_id: await result(app.handle(run_id).result(), app, run_id) for run_id in until})

    asyncio.run(main())


def reap(folder: str) -> None:
    """Notice that a worker has been silent for longer than 0.4 s, and take its runs away; claim nothing."""
    url, _ = prepare(folder)
    clock = Clock()
    with closing(open_store(url)) as store:
        store.register("reaper", "reaper", os.getpid(), clock.now())
        while not store.reap("reaper", 400_000, clock.now()):
            time.sleep(0.05)
        store.unregister("reaper", clock.now())


def read_slowly(seconds: float) -> None:
    """Have a worker take its time whenever it reads a journal, and say when it begins."""
    real = SqlStore.read_life

    def slow(store: SqlStore, run_id: str) -> list[Event]:
        ledger.Ledger.here().note("reading", run_id)
        time.sleep(seconds)
        return real(store, run_id)

    SqlStore.read_life = slow  # type: ignore[method-assign,assignment]


def cancel(folder: str, run_id: str) -> None:
    """A person cancels the run."""
    url, chosen = prepare(folder)

    async def main() -> None:
        async with Perdure(url, settings=chosen) as app:
            await app.cancel(run_id, by="ann")

    asyncio.run(main())


async def _watch(app: Perdure, until: Sequence[str], stop: asyncio.Event) -> None:
    deadline = asyncio.get_running_loop().time() + 60
    while asyncio.get_running_loop().time() < deadline and not stop.is_set():
        try:
            rows = [app.store.get(run_id) for run_id in until]
        except StoreUnavailable:
            rows = [None]  # the worker in this process waits for it too
        if all(row is not None and row.status in (*FINISHED, "needs_attention") for row in rows):
            break
        await asyncio.sleep(0.01)
    stop.set()


def drive(
    folder: str,
    report: str,
    run_id: str,
    settings: dict[str, Any] | None = None,
    clock: Sequence[Any] = (),
    disk: Sequence[Any] = (),
    die: Sequence[Any] = (),
    word: str = "",
) -> None:
    """Drive one run to its end; on a disk that fails, or into its own death, if it is given one."""
    url, chosen = prepare(folder, settings)
    os.environ["CRASH_WORD"] = word
    if die:
        fate.seal(die)
    faulty = FailingDisk(*disk) if disk else None  # held for as long as this process lives, or it would be gone

    async def main() -> None:
        shifted = Shifted(*clock) if clock else None
        async with Perdure(url, agents=AGENTS.values(), settings=chosen, clock=shifted, observers=[acknowledge]) as app:
            tell(report, **await result(app.handle(run_id).result(timeout=60), app, run_id))

    asyncio.run(main())
    del faulty


def rest(
    folder: str,
    report: str,
    agent: str,
    args: Sequence[Any],
    run_id: str,
    die: Sequence[Any] = (),
    settings: dict[str, Any] | None = None,
    clock: Sequence[Any] = (),
    careless: str = "",
) -> None:
    """Start the run, or find it started, and drive it here until it ends, needs a person or waits for one; unless the process dies before."""
    url, chosen = prepare(folder, settings)
    if careless:
        CARELESS[careless]()
    if die:
        fate.seal(die)

    async def main() -> None:
        shifted = Shifted(*clock) if clock else None
        async with Perdure(url, agents=AGENTS.values(), settings=chosen, clock=shifted, observers=[acknowledge]) as app:
            handle = await app.start(AGENTS[agent], *args, id=run_id)
            row = await handle.row()
            if row.status not in FINISHED:
                row = await app.engine.drive(run_id)
            output = await handle.result() if row.status == "succeeded" else None
            tell(report, status=row.status, output=output, error=row.error, waiting_for=row.waiting_for)

    asyncio.run(main())


def thicket(folder: str, report: str, seed: int, die: Sequence[Any] = ()) -> None:
    """Start the thicket of this seed, or go on with it, until it ends or needs a person; unless the process dies before."""
    url, chosen = prepare(folder)
    if die:
        fate.seal([*die, fate.ANY])

    async def main() -> None:
        async with Perdure(url, agents=[thickets.thicket], settings=chosen, observers=[acknowledge]) as app:
            handle = await app.start(thickets.thicket, seed, id=f"seed-{seed}")
            tell(report, **await result(handle.result(timeout=60), app, handle.id))

    asyncio.run(main())
