"""Every event but the first has a recorded cause, an earlier event of its journal.

On both stores, held or not held.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.unit.drive_tools import SETTINGS, ManualClock, until
from tests.unit.inspect_tools import make_waiting, make_zoo
from tests.unit.postgres_tools import cleared

from perdure import Budget, Outcome, Perdure, Run, agent, tool
from perdure.core.events import Event, RunReleased
from perdure.inspect.audit import Audit
from perdure.inspect.trace import trace
from perdure.inspect.view import all_rows
from perdure.store.api import Store
from perdure.store.open import open_store


@pytest.fixture(params=["sqlite", "postgres"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of a new journal."""
    return cleared(request.getfixturevalue("postgres")) if request.param == "postgres" else f"sqlite:///{tmp_path / 'db'}"


# -- a run that needs everything -----------------------------------------------------------------------------------------
IN_TOOL: list[str] = []


@tool(effect="once")
async def charge(order: str) -> str:
    raise TimeoutError("no answer")


@tool(effect="keyed")
async def slow(order: str) -> str:
    IN_TOOL.append(order)
    await asyncio.sleep(0.05)
    return order


@tool(effect="once")
async def asked(order: str) -> str:
    raise TimeoutError("no answer")


@asked.reconcile
async def _(order: str) -> Outcome:
    return Outcome.unknown("the service does not say")


@agent(version="1")
async def buys(run: Run, order: str) -> str:
    run.decide("buy", among=["buy", "wait"], reason="it is cheap")
    return await charge(order)


@agent(version="1")
async def buys_two(run: Run) -> list[Any]:
    return list(await asyncio.gather(charge("o-1"), charge("o-2"), return_exceptions=True))


@agent(version="1")
async def buys_with_hook(run: Run) -> str:
    return await asked("o-1")


@agent(version="1")
async def works(run: Run) -> list[Any]:
    done: list[Any] = [await slow("o-1"), await slow("o-2")]
    done += [await run.receive("go"), await run.receive("go")]
    await asyncio.sleep(5)
    return done


@agent(version="1", budget=Budget(calls=1))
async def short(run: Run) -> list[str]:
    return [await slow("o-1"), await slow("o-2")]


@agent(version="1")
async def parent(run: Run) -> Any:
    return await asyncio.gather(buys("o-1"), works(), return_exceptions=True)


AGENTS = (buys, buys_two, buys_with_hook, works, short, parent)


def at_work(where: str, work: Callable[[Perdure], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        async with Perdure(where, AGENTS, settings=SETTINGS, clock=ManualClock()) as app:
            await work(app)

    IN_TOOL.clear()
    asyncio.run(main())


def by_type(events: Sequence[Event], kind: str) -> list[Event]:
    return [event for event in events if event.type == kind]


def check(store: Store) -> set[str]:
    """Every cause is recorded and earlier, so that each chain of them ends in `run_created`. Returns the types of the events."""
    types: set[str] = set()
    for row in all_rows(store):
        events = store.read(row.run_id)
        for event in events:
            types.add(event.type)
            if event.seq > 1:
                assert event.cause is not None, (row.run_id, event)
                assert 1 <= event.cause < event.seq, (row.run_id, event)
            links = trace(row.run_id, events, event.seq)
            assert [link.seq for link in links] == recorded_chain(events, event.seq), "trace follows what is recorded, and nothing else"
            assert not any(link.inferred for link in links)
    return types


def recorded_chain(events: Sequence[Event], seq: int) -> list[int]:
    chain = [seq]
    while (cause := events[chain[-1] - 1].cause) is not None:
        chain.append(cause)
    assert chain[-1] == 1
    return chain[::-1]


@pytest.mark.parametrize("make", [make_zoo, make_waiting])
def test_every_event_of_a_run_of_each_kind_names_its_cause(where: str, make: Callable[[str], None]) -> None:
    make(where)
    with closing(open_store(where)) as store:
        assert len(check(store)) >= 17


def test_what_people_say_to_a_held_run_and_to_a_parked_one_has_a_cause(where: str) -> None:
    async def work(app: Perdure) -> None:
        for run_id in ("held", "parked"):
            await app.start(works, id=run_id)
        driving = asyncio.create_task(app.drive("held", wait=False))
        await until(lambda: IN_TOOL)
        await app.signal("held", "go", 1, by="ann")
        await app.pause("held", by="ann", reason="look first")
        await driving
        await app.unpause("held", by="ann")
        driving = asyncio.create_task(app.drive("held", wait=False))
        await until(lambda: len(IN_TOOL) >= 2)
        await app.cancel("held", by="ann", reason="enough")
        await driving
        await app.drive("parked", wait=False)
        await app.pause("parked", by="bob")
        await app.signal("parked", "go", 2, by="bob")
        await app.unpause("parked", by="bob")
        await app.drive("parked", wait=False)
        await app.cancel("parked", by="bob", force=True)

    at_work(where, work)
    with closing(open_store(where)) as store:
        assert check(store) >= {"signal_received", "run_paused", "run_unpaused", "cancel_requested", "run_cancelled", "run_released"}
        held = store.read("held")
        (pause,) = by_type(held, "run_paused")
        (released,) = [event for event in held if isinstance(event.body, RunReleased) and event.body.status == "paused"]
        assert released.cause == pause.seq, "it is released because of the pause, whatever ended meanwhile"
        assert released.seq > pause.seq + 1, "an attempt ended between the two"


def test_a_resolution_goes_back_to_the_doubt_about_its_own_call(where: str) -> None:
    async def work(app: Perdure) -> None:
        await app.start(buys_two, id="two")
        await app.drive("two", wait=False)
        await app.resolve("two", 2, happened="r-2", by="ann")
        await app.drive("two", wait=False)
        await app.resolve("two", 1, did_not_happen=True, final=True, by="ann")
        await app.drive("two", wait=False)

    at_work(where, work)
    with closing(open_store(where)) as store:
        check(store)
        events = store.read("two")
        second, first = by_type(events, "tool_call_resolved")
        for resolved in (second, first):
            doubt = events[(resolved.cause or 0) - 1]
            assert (doubt.type, doubt.call) == ("tool_call_in_doubt", resolved.call)
        for released in by_type(events, "run_released"):
            assert events[(released.cause or 0) - 1].type == "attention_needed"


def test_every_walk_over_caused_by_in_the_audit_log_ends_at_run_created(where: str) -> None:
    async def work(app: Perdure) -> None:
        await app.start(buys, "o-1", id="resolved")
        await app.drive("resolved", wait=False)
        await app.resolve("resolved", 1, happened="r-1", by="ann")
        await app.drive("resolved")
        await app.start(parent, id="parent")
        await app.drive("parent", wait=False)
        await app.cancel("parent", by="ann")
        await app.drive("parent", wait=False)

    at_work(where, work)
    with closing(open_store(where)) as store:
        lines = list(Audit(store).more())
    by_id = {line["event_id"]: line for line in lines}
    for line in lines:
        seen = line
        while seen["caused_by"] is not None:
            seen = by_id[seen["caused_by"]]
        assert (seen["type"], seen["run_id"]) == ("run_created", line["run_id"]), line


def test_a_budget_a_hook_a_drain_and_a_run_that_cannot_be_driven_have_causes(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(app: Perdure) -> None:
        await app.start(short, id="short")
        await app.drive("short", wait=False)
        await app.unpause("short", add=Budget(calls=5), by="ann")
        await app.drive("short", wait=False)
        await app.start(buys_with_hook, id="hook")
        await app.drive("hook", wait=False)
        await app.start(works, id="broken")
        monkeypatch.setattr("perdure.engine.local.drive.RunCore.step", _broken)
        await app.drive("broken", wait=False)

    at_work(where, work)
    with closing(open_store(where)) as store:
        assert check(store) >= {"budget_exceeded", "budget_raised", "tool_call_in_doubt", "attention_needed"}
        short_ = store.read("short")
        (over,) = by_type(short_, "budget_exceeded")
        assert by_type(short_, "attention_needed")[0].cause == over.seq
        broken = store.read("broken")
        assert [event.type for event in broken[-2:]] == ["attention_needed", "run_released"]
        assert broken[-1].cause == broken[-2].seq


def _broken(*_: object, **__: object) -> None:
    raise RuntimeError("as ordered")


# -- journals of older versions --------------------------------------------------------------------------------------------
@pytest.fixture
def golden() -> dict[str, list[Event]]:
    from tests.golden.files import Golden, versions

    (folder,) = [folder for folder in versions() if folder.name == "v0_1_0"]
    return {run_id: [line.event for line in lines] for run_id, lines in Golden(folder).journals().items()}


def test_in_a_journal_of_an_older_version_a_missing_cause_is_inferred_and_marked(golden: dict[str, list[Event]]) -> None:
    missing = 0
    for run_id, events in golden.items():
        for event in events:
            links = trace(run_id, events, event.seq)
            assert (links[0].seq, links[-1].seq) == (1, event.seq)
            for link in links[1:]:
                recorded = events[link.seq - 1].cause
                assert link.inferred == (recorded is None)
                assert link.cause == recorded or link.inferred
                missing += link.inferred
    assert missing, "version 0.1.0 recorded no cause for releases and for some post"
