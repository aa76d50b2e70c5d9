"""The processes in a storm.

Workers on separate machines, and a person who starts runs, answers them and settles doubts.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec import structs
from tests.postgres import storm_agents, storm_guards, storm_service
from tests.postgres.storm_agents import Ask, Word, plan

from perdure import Perdure, Settings
from perdure.cli.driving import stop_on_signals
from perdure.core.events import Event
from perdure.core.query import EVERYTHING
from perdure.core.state import fold
from perdure.errors import Conflict, StoreError, StoreUnavailable
from perdure.store.api import FINISHED, RunRow

log = logging.getLogger("storm")
LEASE_S = 2.0
SERVER_AWAY = 75  # the exit code of a worker that found no server when it started, and leaves it to others to start it again
# Waits that only cost time are short. No run counts as poison, because workers die only by kills.
SETTINGS = Settings(lease_s=LEASE_S, reconcile_margin_s=0.2, park_after_s=0.3, cancel_grace_s=0.5, poison_limit=10_000, drain_timeout_s=5.0)
_LOOK_EVERY_S = 0.1
_TO_BE_SURE_S = storm_agents.TIMEOUT_S + 0.5  # after this the service takes nothing any more from an attempt that was given up


def work(folder: str, url: str, machine: int, change: str = "", concurrency: int = 200) -> None:
    """A worker, until SIGTERM. Workers of one machine see each other's lock files, and so notice a death.

    `change`: something that this worker does differently from the others.
    """
    _arrive(folder, f"worker on machine {machine}")
    place = Path(folder) / f"machine-{machine}"
    place.mkdir(exist_ok=True)
    tempfile.tempdir = str(place)
    if change:
        storm_guards.CHANGES[change]()
    settings = structs.replace(SETTINGS, concurrency=concurrency)

    async def main() -> None:
        stop = stop_on_signals(asyncio.get_running_loop())
        async with Perdure(url, agents=storm_agents.AGENTS, settings=settings, observers=[_Acknowledged(folder)]) as app:
            await app.work(stop=stop)

    try:
        asyncio.run(main())
    except StoreUnavailable as error:
        log.warning("leaving: %s", error)
        os._exit(SERVER_AWAY)


class _Acknowledged:
    """Keeps a list of acknowledged events, in a place that the store does not use."""

    def __init__(self, folder: str) -> None:
        self._file = os.open(f"{folder}/acknowledged", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def __call__(self, run_id: str, events: Sequence[Event]) -> None:
        os.write(self._file, "".join(f"{run_id} {event.event_id}\n" for event in events).encode())


def attend(folder: str, url: str, seed: int, abreast: int) -> None:
    """The person, until the file `enough` exists and every run that was started has ended."""
    _arrive(folder, "person")

    async def main() -> None:
        while True:
            try:
                async with Perdure(url, settings=SETTINGS) as app:
                    await _Person(app, Path(folder), random.Random(f"person {seed}"), abreast).attend()
                return
            except StoreUnavailable:
                time.sleep(0.2)

    asyncio.run(main())


def _arrive(folder: str, who: str) -> None:
    os.environ[storm_service.VARIABLE] = folder
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {who} {os.getpid()} %(name)s %(levelname)s: %(message)s", force=True)


class _Person:
    """Repeats what the storm has interrupted: starts by id, signals by key; a decision counts once."""

    def __init__(self, app: Perdure, folder: Path, chance: random.Random, abreast: int) -> None:
        self._app = app
        self._enough = folder / "enough"
        self._started = folder / "started"
        self._chance = chance
        self._abreast = abreast
        self._next = 0
        self._open: dict[str, int] = {}
        self._words: list[tuple[float, str, Word]] = []

    async def attend(self) -> None:
        while self._open or not self._enough.exists():
            for duty in (self._start, self._speak, self._decide, self._settle, self._look):
                try:
                    await duty()
                except StoreError as error:
                    log.info("%s: %s", duty.__name__, error)
            await asyncio.sleep(_LOOK_EVERY_S)

    async def _start(self) -> None:
        while len(self._open) < self._abreast and not self._enough.exists():
            seed, run_id = self._next, f"storm-{self._next}"
            await self._app.start(storm_agents.errand, seed, id=run_id)
            self._next += 1
            self._started.write_text(str(self._next))
            self._open[run_id] = seed
            # Before the agent asks for them, while it waits, and long after.
            said = [step for step in plan(seed) if isinstance(step, Word)]
            times = sorted(time.monotonic() + self._chance.choice((0.0, 0.5, 2.0)) for _ in said)
            self._words += [(at, run_id, word) for at, word in zip(times, said, strict=True)]
        self._words.sort(key=lambda one: one[0])

    async def _speak(self) -> None:
        while self._words and self._words[0][0] <= time.monotonic():
            _, run_id, word = self._words[0]
            await self._app.signal(run_id, "word", word.number, key=f"word-{word.number}")
            self._words.pop(0)

    async def _decide(self) -> None:
        for row in await self._app.approvals():
            asked = Ask(row.input["number"])
            try:
                if asked.outcome == "approved":
                    await self._app.approve(row.approval, by="ann")
                else:
                    await self._app.reject(row.approval, by="ann", reason="no")
            except Conflict as error:
                log.info("%s was decided before: %s", row.approval, error)

    async def _settle(self) -> None:
        """When no request of an old attempt can arrive any more, look into the service's ledger and say what is true."""
        for row in self._app.store.list(EVERYTHING.also(status="needs_attention"), 1000):
            if time.time() - row.updated_at / 1e6 < _TO_BE_SURE_S:
                continue
            for call in fold(self._app.store.read(row.run_id)).open.values():
                if call.phase == "in_doubt":
                    await self._settle_call(row, call.number, call.tool, call.key)

    async def _settle_call(self, row: RunRow, number: int, tool: str, key: str) -> None:
        # A hook that finds nothing is not believed while an attempt that did not stop may still be running.
        assert tool in ("mail", "ship"), f"{row.run_id}: a person is asked about call {number} ({tool}): {row.error}"
        happened = await storm_service.find(key)
        how: dict[str, Any] = {"happened": "by hand"} if happened else {"did_not_happen": True}
        try:
            await self._app.resolve(row.run_id, number, by="ann", **how)
        except Conflict as error:
            log.info("%s was settled before: %s", row.run_id, error)

    async def _look(self) -> None:
        for run_id in list(self._open):
            row = self._app.store.get(run_id)
            if row is not None and row.status in FINISHED:
                del self._open[run_id]
