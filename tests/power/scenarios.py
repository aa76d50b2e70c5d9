"""What is recorded: whole runs with everything that happens to them. A scenario can run again after any power loss."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import apsw
from tests.conformance.suite_waiting import payload
from tests.power import agents, hasty
from tests.power.agents import AGENTS, World
from tests.power.disk import Noted, Op, Trouble, recording
from tests.power.told import notary
from tests.unit.drive_tools import ManualClock
from tests.unit.test_store_upgrade import insert

from perdure import Agent, Perdure, Settings
from perdure.core.events import RunClaimed, RunCreated, RunSucceeded
from perdure.core.state import fold
from perdure.errors import RunEnded, StoreUnavailable
from perdure.inspect.view import all_rows
from perdure.store.api import FINISHED, RunRow
from perdure.store.liveness import closed_in_children
from perdure.store.sqlite import connect
from perdure.store.sqlite.migrate import APPLICATION_ID, MIGRATIONS
from perdure.store.sqlite.queries import QUERIES

SETTINGS = Settings(poll_s=0.002, park_after_s=0, reconcile_margin_s=0, unknown_deadline_s=0, flush_s=0.005, linger_s=0)
ROUNDS = 60
TRIES = 10  # how often an operation is repeated that a failing disk has refused
ENOUGH = 4
T = TypeVar("T")


@dataclass(frozen=True)
class Start:
    agent: Agent[Any, Any]
    args: tuple[Any, ...]
    output: Any


Runs = dict[str, Start]


def trading(*orders: str) -> Runs:
    return {order: Start(agents.trade, (order,), _traded(order)) for order in orders}


def _traded(order: str) -> list[str]:
    done = ["paid done", "sale booked", "shipped done", "marked done", "fee done"]
    return [f"{order} seen", f"{order}/history seen", *(f"{order} {one}" for one in done), str(agents.LONG), f"{order} end booked"]


PEOPLE: Runs = {
    "ask": Start(agents.ask, ("news",), ["approved", "news wired done"]),
    "hear": Start(agents.hear, (2,), ["answer to 1 done", "answer to 2 done"]),
    "doubt": Start(agents.doubt, ("odd",), "settled"),
    "family": Start(agents.parent, (["ada", "bob"],), ["ada paid done", "bob paid done", "parent's own done"]),
}
CROWD: Runs = {f"c{n}": Start(agents.small, (f"c{n}",), [f"c{n} one done", f"c{n} two done"]) for n in range(8)}


class Player:
    """People and a clock around an app: each run gets what it waits for, however often the scenario is repeated."""

    def __init__(self, path: Path, runs: Runs, clock: ManualClock) -> None:
        self.path = path
        self.runs = runs
        self.clock = clock

    @asynccontextmanager
    async def app(self) -> AsyncIterator[Perdure]:
        app = Perdure(f"sqlite:///{self.path}", AGENTS, settings=SETTINGS, clock=self.clock)

        async def enter() -> None:
            try:
                await app.__aenter__()
            except apsw.Error as error:
                # As below: the error that perdure was about to translate was overtaken by one more from closing the file.
                raise StoreUnavailable(str(error)) from error

        await patiently(enter)
        try:
            yield app
        except asyncio.CancelledError:
            app.abort()
            raise
        finally:
            try:
                await app.__aexit__(None, None, None)
            except apsw.Error:
                # SQLite itself is silent about a checkpoint that fails while it closes the file; apsw passes on what our disk has raised.
                pass

    async def play(self, app: Perdure, rounds: int = ROUNDS) -> None:
        """Until all runs have ended; AssertionError when that takes more rounds than it can."""
        started: set[str] = set()
        for _ in range(rounds):
            try:
                await self._start(app, started)
                for row in sorted(all_rows(app.store), key=lambda row: row.run_id):
                    if row.status not in FINISHED:
                        await app.engine.drive(row.run_id, wait=False)
                await self._attend(app)
                if all(row.status in FINISHED for row in all_rows(app.store)):
                    return
            except StoreUnavailable:
                await asyncio.sleep(0.1)
            self.clock.advance(30)
        if rounds == ROUNDS:
            raise AssertionError([(row.run_id, row.status, row.waiting_for, row.error) for row in all_rows(app.store)])

    async def play_together(self, app: Perdure) -> None:
        """The same by a worker that drives all of them at once: their commits are shared."""
        started: set[str] = set()
        await patiently(lambda: self._start(app, started))
        stop = asyncio.Event()
        async with asyncio.timeout(30 * hasty.FASTER), asyncio.TaskGroup() as group:
            group.create_task(patiently(lambda: app.work(stop=stop)))
            while any(row.status not in FINISHED for row in all_rows(app.store)):
                await asyncio.sleep(0.005)
            stop.set()

    async def _start(self, app: Perdure, started: set[str]) -> None:
        for run_id, start in self.runs.items():
            if run_id not in started:
                await app.start(start.agent, *start.args, id=run_id)
                started.add(run_id)

    async def _attend(self, app: Perdure) -> None:
        for approval in await app.approvals():
            await app.approve(approval.approval, by="ann")
        for row in list(all_rows(app.store)):
            if row.run_id == "hear" and row.status not in FINISHED:
                for number in (1, 2):
                    await _unless_ended(app.signal("hear", "chat", number, key=str(number)))
            if row.status == "needs_attention":
                await self._settle(app, row)

    async def _settle(self, app: Perdure, row: RunRow) -> None:
        """A person looks whether it has happened, and says so."""
        world = agents.WORLD[0]
        for number, call in fold(app.store.read(row.run_id)).calls.items():
            if call.key is not None and call.phase == "in_doubt":
                if call.key in world.happened:
                    await app.resolve(row.run_id, number, happened=(row.agent == "doubt" and "settled") or "news wired done", by="ann")
                else:
                    await app.resolve(row.run_id, number, did_not_happen=True, final=True, by="ann")

    async def outputs(self, app: Perdure) -> dict[str, Any]:
        return {run_id: await app.handle(run_id).result(timeout=60) for run_id in self.runs}


async def patiently(action: Callable[[], Awaitable[T]]) -> T:
    """Repeat the operation, as a caller does if the store is unavailable."""
    for left in reversed(range(TRIES)):
        try:
            return await action()
        except StoreUnavailable:
            if not left:
                raise
            await asyncio.sleep(0.1)
    raise AssertionError


async def _unless_ended(sending: Awaitable[None]) -> None:
    try:
        await sending
    except RunEnded:
        pass


Script = Callable[[Player], Awaitable[None]]


@dataclass(frozen=True)
class Scenario:
    """A script, and how many pages SQLite lets its log grow to before it moves them to the database."""

    runs: Runs
    script: Script
    log_pages: int
    old: bool = False  # the file is there already, as the first release has left it


async def whole(player: Player) -> None:
    async with player.app() as app:
        await player.play(app)


async def together(player: Player) -> None:
    async with player.app() as app:
        await player.play_together(app)


async def prune(app: Perdure, now: int) -> None:
    pruned = app.store.prune(["old"], now - 1, by="ann", now=now)
    assert pruned.runs == 1, pruned


async def reopened(player: Player) -> None:
    """Closed in the middle, opened again; and an old run is pruned."""
    async with player.app() as app:
        await patiently(lambda: app.run(agents.small, "old", id="old"))
        await player.play(app, rounds=1)
    player.clock.advance(1000)
    async with player.app() as app:
        await patiently(lambda: prune(app, player.clock.now()))
        await player.play(app)


SCENARIOS = {
    "one run, from the first byte on": Scenario(trading("o-1"), whole, 1000),
    "one run, with checkpoints": Scenario(trading("o-1"), whole, 12),
    "people": Scenario(PEOPLE, whole, 40),
    "several runs in one commit": Scenario(CROWD, together, 30),
    "closed, opened, pruned": Scenario(trading("o-2"), reopened, 25),
    "upgraded": Scenario({"c0": CROWD["c0"]}, whole, 20, old=True),
}


def record(scenario: Scenario, path: Path, trouble: Trouble | None = None) -> list[Op]:
    """Everything that the disk has seen while the scenario ran once, with every answer and effect at its place.

    On a disk that fails for ever, the scenario ends after ENOUGH attempts.
    """
    log: list[Op] = []

    def note(mark: object) -> None:
        log.append(Noted(mark))

    if scenario.old:
        make_old(path)
    with notary(note), recording(log, trouble) as disk, _log_of(scenario.log_pages):
        if scenario.old:
            disk.already_there(path)
        agents.WORLD[0] = World(note)
        hasty.run(_played(scenario, path, trouble))
    _end_process()
    return log


def _end_process() -> None:
    """What the kernel does at the end of a process.

    A worker that could not unregister keeps its lock until then, because its tools may still run.
    """
    for descriptor in list(closed_in_children):
        os.close(descriptor)
    closed_in_children.clear()


async def _played(scenario: Scenario, path: Path, trouble: Trouble | None) -> None:
    player = Player(path, scenario.runs, ManualClock())
    playing = asyncio.ensure_future(scenario.script(player))
    if trouble is not None and trouble.times > ENOUGH:
        while not playing.done() and trouble.struck < ENOUGH:
            await asyncio.sleep(0.05)
        playing.cancel()
    try:
        await playing
    except asyncio.CancelledError:
        pass


def resume(scenario: Scenario, path: Path, world: World) -> dict[str, Any]:
    """Run the scenario to its end on these files. Returns the outputs."""
    agents.WORLD[0] = world
    player = Player(path, scenario.runs, ManualClock(1_700_010_000.0))

    async def main() -> dict[str, Any]:
        async with player.app() as app:
            await player.play(app)
            return await player.outputs(app)

    return hasty.run(main())


@contextmanager
def _log_of(pages: int) -> Iterator[None]:
    before, connect._LOG_PAGES = connect._LOG_PAGES, pages
    try:
        yield
    finally:
        connect._LOG_PAGES = before


def make_old(path: Path) -> None:
    """A journal with the schema of the first release and one run in it that has ended."""
    created = RunCreated("old", "a", "1", "default", payload(1))
    connection = apsw.Connection(str(path))
    connection.execute(MIGRATIONS[0].sql)
    connection.execute(QUERIES["record_migration"], (1, MIGRATIONS[0].checksum))
    connection.pragma("application_id", APPLICATION_ID)
    insert(connection, 1, "old", "succeeded", None, [created, RunClaimed("w0"), RunSucceeded(payload("done"))])
    connection.close()
