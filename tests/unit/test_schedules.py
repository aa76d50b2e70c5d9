"""Schedules in an app and its worker: ticks by a clock of the test, policies, deploys, people, and edited rows."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import apsw
import psycopg
import pytest
from msgspec import structs
from tests.servers.postgres import Server
from tests.unit.drive_tools import SETTINGS, ManualClock, run, until
from tests.unit.postgres_tools import empty

from perdure import Agent, Conflict, Cron, Every, InvalidInput, NotFound, Perdure, Plan, ReAct, Run, Schedule, Step, Tick, agent, tool
from perdure.core.events import CancelRequested, RunCreated
from perdure.core.schedule import AnyScheduleBody, ScheduleSet, TicksSkipped, TickStarted, decode_schedule_body
from perdure.inspect.audit import AuditFilter
from perdure.inspect.schedules import ScheduleLines, check_schedules, schedule_problems
from perdure.inspect.why.page import why
from perdure.models import Answer, Scripted
from perdure.store.api import Store
from perdure.store.open import open_store
from perdure.store.transfer import Copying

START = datetime(2026, 11, 17, 6, 0, 30, tzinfo=UTC)  # half a minute after a tick of Every(minutes=1)
SOON = structs.replace(SETTINGS, poll_s=0.01)


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.full)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/journal.db"
    server: Server = request.getfixturevalue("postgres")
    return empty(server)


def clock_at(when: datetime = START) -> ManualClock:
    clock = ManualClock()
    clock.set_to(when)
    return clock


def reporter(schedule: Any = None, version: str = "1", name: str = "report") -> Agent[Any, Any]:
    @agent(name=name, version=version, schedule=schedule)
    async def report(run: Run, wait: bool = False, date: str = "") -> str:
        if wait:
            await run.receive("go")
        return f"{date}|{run.scheduled_for}"

    return report


@asynccontextmanager
async def working(url: str, clock: ManualClock, *agents: Agent[Any, Any], **options: Any) -> AsyncIterator[Perdure]:
    """An app whose worker serves."""
    async with Perdure(url, agents, settings=SOON, clock=clock, **options) as app:
        stop = asyncio.Event()
        work = asyncio.create_task(app.work(stop=stop))
        try:
            yield app
        finally:
            stop.set()
            await work


def bodies(app: Perdure, schedule_id: str = "report") -> list[AnyScheduleBody]:
    return [decode_schedule_body(one.data) for one in app.store.schedule_events(schedule_id)]


def started(app: Perdure, schedule_id: str = "report") -> list[str]:
    return [body.run_id for body in bodies(app, schedule_id) if isinstance(body, TickStarted)]


def status(app: Perdure, run_id: str) -> str | None:
    row = app.store.get(run_id)
    return None if row is None else row.status


async def looked(app: Perdure, clock: ManualClock) -> None:
    """Wait until the worker has certainly looked at the schedules since now."""
    engine: Any = app._engine
    await until(lambda: engine._worker is not None)
    ticking = engine._worker._ticking
    for _ in range(2):
        ticking._looked_s = float("-inf")
        clock.advance(0)
        await until(lambda: ticking._looked_s > float("-inf"))


RUN_1, RUN_2, RUN_3 = (f"report@2026-11-17T06:0{minute}:00Z" for minute in (1, 2, 3))


def test_the_ticks_that_a_worker_handles_are_counted(url):
    async def main() -> None:
        clock = clock_at()
        async with working(url, clock, reporter(Schedule(Every(minutes=1), input={"wait": True}))) as app:
            await until(lambda: app.store.schedule("report") is not None)
            counted: Any = app._engine
            counted = counted._worker.counts.ticks.values
            clock.advance(30)
            await until(lambda: counted.get(("report", "started")) == 1)
            clock.advance(180)  # three ticks, and the run before has not ended
            await until(lambda: counted.get(("report", "skipped")) == 3)
            await app.signal(RUN_1, "go")
            await until(lambda: status(app, RUN_1) == "succeeded")
            clock.advance(180)
            await until(lambda: counted.get(("report", "started")) == 2)
            assert counted == {("report", "started"): 2, ("report", "skipped"): 3, ("report", "missed"): 2}

    run(main())


def test_the_runs_of_a_schedule_have_its_labels(url):
    async def main() -> None:
        clock = clock_at()
        code = reporter(Schedule(Every(minutes=1), labels={"team": "sales"}))
        async with working(url, clock, code) as app:
            await until(lambda: app.store.schedule("report") is not None)
            assert (await app.schedules.get("report")).labels == {"team": "sales"}
            clock.advance(30)
            await until(lambda: status(app, RUN_1) == "succeeded")
            assert [info.id for info in await app.list(where="label.team:sales")] == [RUN_1]
            await app.schedule(code, Schedule(Every(minutes=1), labels={"team": "support"}))
            await app.schedules.start_now("report", by="ann")
            assert len(await app.list(where="label.team:support")) == 1

    run(main())


@pytest.mark.parametrize("labels", [{"team": ""}, {"": "x"}, {str(number): "x" for number in range(33)}, ["x"]])
def test_labels_that_a_run_could_not_have_are_refused_at_the_declaration(labels):
    with pytest.raises(InvalidInput, match="labels="):
        Schedule(Every(minutes=1), labels=labels)


@pytest.mark.parametrize("kind", ["ReAct", "Plan", "Plan.from_model"])
def test_agents_that_are_built_from_parts_declare_schedules_too(url, kind):
    declared = Schedule(Every(minutes=1), id="report", input={"prompt": "go"} if kind == "ReAct" else None)

    @tool(effect="read")
    async def look() -> str:
        return "seen"

    def built() -> Agent[Any, Any]:
        if kind == "ReAct":
            return ReAct("built", model=Scripted(["done"]), schedule=declared)
        if kind == "Plan":
            return Plan("built", [Step("look", look)], schedule=declared)
        plan = Answer('{"steps": [{"name": "look", "tool": "look"}]}')
        return Plan.from_model(Scripted([plan]), [look], goal="look", name="built", schedule=declared)

    async def main() -> None:
        clock = clock_at()
        async with working(url, clock, built()) as app:
            await until(lambda: app.store.schedule("report") is not None)
            clock.advance(30)
            await until(lambda: status(app, RUN_1) in ("succeeded", "failed"))
            assert (await app.handle(RUN_1).info()).agent == "built"

    run(main())
    if kind == "ReAct":
        with pytest.raises(InvalidInput, match="prompt"):
            ReAct("built", model=Scripted(["done"]), schedule=Every(minutes=1))


def test_a_worker_registers_the_schedule_of_its_code_and_starts_its_ticks(url):
    async def main() -> None:
        clock = clock_at()
        declared = Schedule(Every(minutes=1), input={"date": Tick("%H:%M")})
        async with working(url, clock, reporter(declared)) as app:
            await until(lambda: app.store.schedule("report") is not None)
            clock.advance(30)
            await until(lambda: status(app, RUN_1) == "succeeded")
            assert await app.handle(RUN_1).result() == "06:01|2026-11-17 06:01:00+00:00"
            clock.advance(59)
            await looked(app, clock)
            assert status(app, RUN_2) is None
            clock.advance(1)
            await until(lambda: status(app, RUN_2) == "succeeded")
            created = app.store.read(RUN_2)[0].body
            assert isinstance(created, RunCreated)
            assert (created.schedule, created.actor, created.by_name, created.version) == ("report", "schedule:report", True, "")
        async with working(url, clock, reporter(declared)) as app:  # the next deploy of the same code records nothing
            await looked(app, clock)
            assert [type(body) for body in bodies(app)] == [ScheduleSet, TickStarted, TickStarted]
            assert list(schedule_problems(app.store)) == []

    run(main())


def test_a_worker_that_was_down_over_ticks_makes_up_for_the_last_one(url):
    async def main() -> None:
        clock = clock_at()
        async with working(url, clock, reporter(Every(minutes=1))) as app:
            await until(lambda: app.store.schedule("report") is not None)
        clock.advance(minutes=3)
        async with working(url, clock, reporter(Every(minutes=1))) as app:
            await until(lambda: status(app, RUN_3) == "succeeded")
            assert started(app) == [RUN_3]
            (skipped,) = [body for body in bodies(app) if isinstance(body, TicksSkipped)]
            assert "missed" in skipped.why

    run(main())


def test_all_missed_ticks_are_made_up_for_if_so_declared(url):
    async def main() -> None:
        clock, declared = clock_at(), Schedule(Every(minutes=1), missed="all", overlap="allow")
        async with working(url, clock, reporter(declared)) as app:
            await until(lambda: app.store.schedule("report") is not None)
        clock.advance(minutes=3)
        async with working(url, clock, reporter(declared)) as app:
            await until(lambda: status(app, RUN_3) == "succeeded")
            assert started(app) == [RUN_1, RUN_2, RUN_3]

    run(main())


def test_a_tick_is_skipped_while_the_run_before_waits(url):
    async def main() -> None:
        clock = clock_at()
        async with working(url, clock, reporter(Schedule(Every(minutes=1), input={"wait": True}))) as app:
            await until(lambda: app.store.schedule("report") is not None)
            clock.advance(30)
            await until(lambda: status(app, RUN_1) == "waiting")
            clock.advance(60)
            await until(lambda: any(isinstance(body, TicksSkipped) for body in bodies(app)))
            assert started(app) == [RUN_1]
            assert status(app, RUN_2) is None
            (info,) = await app.schedules.list()
            assert info.skipped == f"run {RUN_1} has not ended"
            with pytest.raises(Conflict, match="has not ended"):
                await app.schedules.start_now("report", by="ann")
            await app.signal(RUN_1, "go")
            await until(lambda: status(app, RUN_1) == "succeeded")
            clock.advance(60)
            await until(lambda: status(app, RUN_3) is not None)

    run(main())


def test_a_tick_waits_for_the_run_before_if_so_declared(url):
    async def main() -> None:
        clock = clock_at()
        async with working(url, clock, reporter(Schedule(Every(minutes=1), input={"wait": True}, overlap="queue"))) as app:
            await until(lambda: app.store.schedule("report") is not None)
            clock.advance(30)
            await until(lambda: status(app, RUN_1) == "waiting")
            clock.advance(60)
            await looked(app, clock)
            assert started(app) == [RUN_1]
            assert len(bodies(app)) == 2
            await app.signal(RUN_1, "go")
            await until(lambda: status(app, RUN_2) == "waiting")

    run(main())


def test_a_tick_cancels_the_run_before_if_so_declared(url):
    async def main() -> None:
        clock = clock_at()
        async with working(url, clock, reporter(Schedule(Every(minutes=1), input={"wait": True}, overlap="cancel"))) as app:
            await until(lambda: app.store.schedule("report") is not None)
            clock.advance(30)
            await until(lambda: status(app, RUN_1) == "waiting")
            clock.advance(60)
            await until(lambda: status(app, RUN_1) == "cancelled" and status(app, RUN_2) == "waiting")
            (cancel,) = [event.body for event in app.store.read(RUN_1) if isinstance(event.body, CancelRequested)]
            assert cancel.by == "schedule:report"

    run(main())


def test_a_schedule_that_a_person_has_paused_stays_paused_across_deploys(url):
    async def main() -> None:
        clock = clock_at()
        async with working(url, clock, reporter(Every(minutes=1))) as app:
            await until(lambda: app.store.schedule("report") is not None)
            assert (await app.schedules.pause("report", by="ann", note="holiday")).status == "paused"
            await app.schedules.pause("report", by="bob")  # a second pause records nothing
            clock.advance(minutes=2)
            await looked(app, clock)
        async with working(url, clock, reporter(Every(minutes=2), version="2")) as app:
            await until(lambda: len(bodies(app)) == 3)
            clock.advance(minutes=5)
            await looked(app, clock)
            assert started(app) == []
            info = await app.schedules.resume("report", by="ann")
            # The ticks of the pause are not made up for.
            assert (info.when, info.next_tick) == ("every 2 minutes", datetime(2026, 11, 17, 6, 8, tzinfo=UTC))
            clock.advance_to(datetime(2026, 11, 17, 6, 8, tzinfo=UTC))
            await until(lambda: started(app) == ["report@2026-11-17T06:08:00Z"])

    run(main())


def test_two_versions_of_the_code_do_not_fight_and_the_newest_declaration_stays(url):
    old, new = reporter(Every(minutes=1)), reporter(Every(minutes=5), version="2")

    async def main() -> None:
        clock = clock_at()
        for code in (old, new, old, new, old):  # a rolling deploy in which old workers are started again
            async with working(url, clock, code) as app:
                await looked(app, clock)
        async with Perdure(url, settings=SOON, clock=clock) as app:
            assert [body.spec.every_s for body in bodies(app) if isinstance(body, ScheduleSet)] == [60, 300]
            assert (await app.schedules.get("report")).when == "every 5 minutes"
            # A person goes back to the old one, and that stays too.
            assert old.scheduled is not None
            await app.schedules.set("report", old.scheduled.spec, by="ann", declared=True)
        async with working(url, clock, new) as app:
            await looked(app, clock)
            assert (await app.schedules.get("report")).when == "every minute"

    run(main())


def test_a_schedule_that_a_person_has_removed_does_not_come_back_with_the_same_code(url):
    async def main() -> None:
        clock = clock_at()
        async with working(url, clock, reporter(Every(minutes=1))) as app:
            await until(lambda: app.store.schedule("report") is not None)
            await app.schedules.remove("report", by="ann")
        async with working(url, clock, reporter(Every(minutes=1))) as app:
            await looked(app, clock)
            clock.advance(minutes=2)
            await looked(app, clock)
            assert await app.schedules.list() == []
            assert started(app) == []
            with pytest.raises(NotFound, match="was removed"):
                await app.schedules.pause("report", by="ann")
        async with working(url, clock, reporter(Cron("*/2 * * * *"), version="2")) as app:
            await until(lambda: app.store.next_schedules(list(app.versions)) != [])

    run(main())


def test_a_changed_input_keeps_the_tick_that_is_due(url):
    async def main() -> None:
        clock = clock_at()
        async with working(url, clock, reporter(Every(minutes=1))) as app:
            await until(lambda: app.store.schedule("report") is not None)
        clock.advance(minutes=1)
        async with working(url, clock, reporter(Schedule(Every(minutes=1), input={"date": "x"}), version="2")) as app:
            await until(lambda: status(app, RUN_1) == "succeeded")
            assert await app.handle(RUN_1).result() == "x|2026-11-17 06:01:00+00:00"

    run(main())


def test_the_clock_that_is_set_back_starts_no_tick_again(url):
    async def main() -> None:
        clock = clock_at()
        async with working(url, clock, reporter(Every(minutes=1))) as app:
            await until(lambda: app.store.schedule("report") is not None)
            clock.advance(90)
            await until(lambda: status(app, RUN_2) == "succeeded")
            clock.jump(-120)
            await looked(app, clock)
            clock.advance(110)
            await looked(app, clock)
            assert started(app) == [RUN_2]
            clock.advance(70)
            await until(lambda: RUN_3 in started(app))

    run(main())


def test_a_tick_whose_run_id_is_taken_is_skipped(url):
    async def main() -> None:
        clock = clock_at()
        async with working(url, clock, reporter(Every(minutes=1))) as app:
            await until(lambda: app.store.schedule("report") is not None)
            await app.start("report", id=RUN_1)
            clock.advance(30)
            await until(lambda: any(isinstance(body, TicksSkipped) and "already" in body.why for body in bodies(app)))
            clock.advance(60)
            await until(lambda: started(app) == [RUN_2])
            assert len(app.store.list()) == 2

    run(main())


def test_a_worker_starts_only_ticks_of_agents_and_queues_that_it_serves(url):
    async def main() -> None:
        clock = clock_at()
        async with working(url, clock, reporter(name="other"), queues=["night"]) as app:
            await app.schedule("other", Schedule(Every(minutes=1), id="day"))
            await app.schedule("other", Schedule(Every(minutes=1), id="night", queue="night"))
            await app.schedule("third", Schedule(Every(minutes=1)))
            clock.advance(30)
            await until(lambda: started(app, "night") != [])
            assert started(app, "day") == []
            assert started(app, "third") == []
            check = check_schedules(app.store, app.store.workers(clock.now(), 30_000_000), clock.now())
            assert check.verdict == "warn"
            assert "no live worker serves agent third in queue default" in check.found
            assert "day: no live worker serves agent other in queue default" in check.found

    run(main())


def test_a_run_that_a_person_starts_now_is_recorded(url):
    async def main() -> None:
        clock = clock_at()
        async with working(url, clock, reporter()) as app:
            await app.schedule("report", Schedule(Every(minutes=1), id="r", input={"date": Tick("%H:%M:%S")}), by="ann")
            run_id = await app.schedules.start_now("r", by="bob")
            assert run_id == "r@now-2"
            assert (await app.handle(run_id).result()).startswith("06:00:30|")
            assert "bob" in str(bodies(app, "r")[1])
            assert (await app.schedules.get("r")).last_run == run_id
            assert "without a tick" in str(why(app.store, run_id, now=clock.now()).schedule)
            clock.advance(30)
            await until(lambda: started(app, "r") != [])
            line = why(app.store, started(app, "r")[0], now=clock.now()).schedule
            assert line is not None
            assert line.startswith("started by schedule r for its tick 2026-11-17T06:01:00Z")

    run(main())


def test_app_schedule_is_idempotent_and_checks_the_input():
    async def main() -> None:
        code = reporter()
        async with Perdure("sqlite://", [code], settings=SOON, clock=clock_at()) as app:
            await app.schedule(code, Schedule(Every(minutes=1), input={"date": Tick("%H")}))
            await app.schedule(code, Schedule(Every(minutes=1), input={"date": Tick("%H")}))
            assert len(bodies(app)) == 1
            with pytest.raises(InvalidInput, match="nonsense"):
                await app.schedule(code, Schedule(Every(minutes=1), input={"nonsense": 1}))
            with pytest.raises(InvalidInput, match="nonsense"):
                await app.schedule("report", Schedule(Every(minutes=1), input={"nonsense": 1}))
            assert (await app.schedule("unknown", Every(minutes=1))).agent == "unknown"
            (first, second) = await app.schedules.next("report", 2)
            assert (first.tick, second.tick) == (datetime(2026, 11, 17, 6, 1, tzinfo=UTC), datetime(2026, 11, 17, 6, 2, tzinfo=UTC))
            with pytest.raises(NotFound, match="no schedule nightly"):
                await app.schedules.get("nightly")

    run(main())


def test_the_life_of_a_schedule_is_in_the_audit_trail():
    async def main() -> None:
        clock = clock_at()
        async with Perdure("sqlite://", settings=SOON, clock=clock) as app:
            await app.schedule("report", Schedule(Every(minutes=1), input={"secret": "x"}, tenant="acme"), by="ann")
            lines = ScheduleLines(app.store, AuditFilter())
            (line,) = lines.more()
            assert (line["schedule"], line["type"], line["actor"]) == ("report", "schedule_set", "ann")
            assert line["run_id"] is None
            assert "secret" not in json.dumps(line)
            assert list(lines.more()) == []
            await app.schedules.pause("report", by="bob", note="holiday")
            (line,) = lines.more()
            assert (line["type"], line["actor"], line["context"]["note"]) == ("schedule_paused", "bob", "holiday")
            assert list(ScheduleLines(app.store, AuditFilter(tenant="other")).more()) == []
            assert list(ScheduleLines(app.store, AuditFilter(run_id="r")).more()) == []
            assert len(list(ScheduleLines(app.store, AuditFilter(tenant="acme", types=frozenset(["schedule_paused"]))).more())) == 1

    run(main())


# -- edited rows ------------------------------------------------------------------------------------------------------
async def _some_ticks(url: str) -> None:
    clock = clock_at()
    async with working(url, clock, reporter(Every(minutes=1))) as app:
        await until(lambda: app.store.schedule("report") is not None)
        for minute in (1, 2, 3):
            clock.advance_to(datetime(2026, 11, 17, 6, minute, tzinfo=UTC))
            await until(lambda: status(app, f"report@2026-11-17T06:0{minute}:00Z") == "succeeded")  # noqa: B023
        assert list(schedule_problems(app.store)) == []


def forge(url: str, server: Server | None, statements: Sequence[str]) -> None:
    """Change the tables by hand, with the triggers switched off."""
    if server is None:
        other = apsw.Connection(url.removeprefix("sqlite:///"))
        for (name,) in other.execute(
            "SELECT name FROM sqlite_schema WHERE type = 'trigger' AND tbl_name LIKE 'perdure_schedule%'"
        ).fetchall():
            other.execute(f"DROP TRIGGER {name}")
        for statement in statements:
            other.execute(statement)
        other.close()
        return
    with psycopg.connect(url, autocommit=True) as owner:
        for table in ("perdure_schedules", "perdure_schedule_events"):
            owner.execute(f"ALTER TABLE {table} DISABLE TRIGGER USER".encode())
        for statement in statements:
            owner.execute(statement.encode())


@pytest.mark.parametrize(
    ("statements", "words"),
    [
        (["UPDATE perdure_schedules SET due_at = due_at - 60000000"], "its row was edited"),
        (["UPDATE perdure_schedules SET state = replace(state, 'report@', 'other@')"], "its row was edited"),
        (["UPDATE perdure_schedules SET agent = 'evil'"], "its row was edited"),
        (["UPDATE perdure_schedules SET seq = 3"], "its row was rolled back"),
        (["UPDATE perdure_schedule_events SET data = replace(data, 'report', 'reporT') WHERE seq = 2"], "event 2"),
        (["DELETE FROM perdure_schedule_events WHERE seq = 3"], "event 3"),
        # The row and the journal agree, both without the last tick: only the journal-wide chain knows.
        (
            [
                "DELETE FROM perdure_schedule_events WHERE seq = 4",
                "UPDATE perdure_schedules SET seq = 3, head = (SELECT hash FROM perdure_schedule_events WHERE seq = 3)",
            ],
            "the journal-wide chain has its event 4",
        ),
        (["DELETE FROM perdure_schedule_events", "DELETE FROM perdure_schedules"], "schedule report: the journal-wide chain has it"),
    ],
)
def test_verify_finds_a_schedule_that_was_edited_or_rolled_back(url, request, statements, words):
    run(_some_ticks(url))
    forge(url, None if url.startswith("sqlite") else request.getfixturevalue("postgres"), statements)
    store = open_store(url)
    try:
        problems = list(schedule_problems(store))
        assert any(words in problem for problem in problems), problems
    finally:
        store.close()


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE perdure_schedules SET due_at = due_at - 60000000",
        "UPDATE perdure_schedules SET seq = seq - 1",
        "UPDATE perdure_schedules SET schedule_id = 'x', seq = seq + 1",
        "DELETE FROM perdure_schedules",
        "UPDATE perdure_schedule_events SET ts = 1",
        "DELETE FROM perdure_schedule_events",
        "INSERT INTO perdure_schedule_events SELECT schedule, seq + 9, event_id, ts, data, hash FROM perdure_schedule_events",
    ],
)
def test_the_database_refuses_to_change_a_schedule_without_an_event(url, statement):
    run(_some_ticks(url))
    if url.startswith("sqlite"):
        other = apsw.Connection(url.removeprefix("sqlite:///"))
        with pytest.raises(apsw.ConstraintError):
            other.execute(statement)
        other.close()
    else:
        with psycopg.connect(url, autocommit=True) as owner, pytest.raises(psycopg.errors.IntegrityError):
            owner.execute(statement.encode())


def test_a_row_that_was_set_back_starts_no_run_twice(url, request):
    """The same run by construction: the id of the run follows from schedule and tick."""
    run(_some_ticks(url))
    forge(
        url,
        None if url.startswith("sqlite") else request.getfixturevalue("postgres"),
        [
            "DELETE FROM perdure_schedule_events WHERE seq > 1",
            (
                "UPDATE perdure_schedules SET seq = 1, due_at = 1794895260000000, head = (SELECT hash FROM perdure_schedule_events WHERE seq = 1),"
                " state = replace(state, '1794895440000000', '1794895260000000')"
            ),
        ],
    )

    async def main() -> None:
        clock = clock_at(datetime(2026, 11, 17, 6, 3, 30, tzinfo=UTC))
        async with working(url, clock, reporter(Every(minutes=1))) as app:
            await until(lambda: len(bodies(app)) > 1)
            await looked(app, clock)
            assert len(app.store.list()) == 3
            assert len(app.store.read(RUN_3)) == 3  # created, claimed, succeeded: once

    run(main())


# -- moving -----------------------------------------------------------------------------------------------------------
def moved(source: Store, target: Store, now: int) -> Any:
    return Copying(source, target, to_url=target.url, by="ann").move(now=now, lease_us=30_000_000)


def test_a_move_takes_the_schedules_along_and_only_the_target_starts_ticks(url, tmp_path):
    run(_some_ticks(url))
    source, target = open_store(url), open_store(f"sqlite:///{tmp_path}/target.db")
    try:
        copied = moved(source, target, 0)
        assert copied.schedules == 1
        assert copied.runs == 3
        assert target.schedules() == source.schedules()
        assert list(schedule_problems(target)) == []
        assert moved(source, target, 0).schedules == 0  # the same command again
    finally:
        source.close()
        target.close()

    async def main() -> None:
        clock = clock_at(datetime(2026, 11, 17, 6, 4, tzinfo=UTC))
        async with working(f"sqlite:///{tmp_path}/target.db", clock, reporter(Every(minutes=1))) as app:
            await until(lambda: status(app, "report@2026-11-17T06:04:00Z") == "succeeded")

    run(main())


def test_a_move_to_a_journal_with_another_schedule_of_that_id_is_refused_before_anything_is_closed(url, tmp_path):
    run(_some_ticks(url))

    async def other() -> None:
        async with Perdure(f"sqlite:///{tmp_path}/target.db", settings=SOON, clock=clock_at()) as app:
            await app.schedule("report", Every(minutes=7))

    run(other())
    source, target = open_store(url), open_store(f"sqlite:///{tmp_path}/target.db")
    try:
        with pytest.raises(Conflict, match="schedule report is also in"):
            moved(source, target, 0)
        assert source.moved() is None
    finally:
        source.close()
        target.close()
