"""What readers say about a run that people have reopened: superseded events, the audit trail, the tools of superseded calls."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from tests.unit.inspect_tools import url_of

from perdure import Perdure, Run, RunFailed, agent, tool
from perdure.core.machine import CallTool
from perdure.core.state import fold
from perdure.inspect.audit import Audit, AuditLog
from perdure.inspect.branches import Reopening, Superseded, asked_in_all_branches
from perdure.inspect.verify import verify_run
from perdure.store.api import Store
from perdure.store.open import open_store

DOWN = [True]


@tool(effect="idempotent")
async def pay(n: int) -> int:
    return n


@tool(effect="idempotent")
async def refund(n: int) -> int:
    return -n


@pay.compensate(effect="idempotent")
async def _(n: int) -> None: ...


@tool(effect="read")
async def look() -> str:
    if DOWN[0]:
        raise ValueError("503")
    return "up"


@agent(version="1")
async def payer(run: Run) -> str:
    await pay(1)
    await pay(2)
    return await look()


@agent(name="payer", version="2")
async def refunder(run: Run) -> str:
    await pay(1)
    await refund(1)
    return await look()


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    DOWN[0] = True
    if request.param == "postgres":
        found: str = request.getfixturevalue("postgres_url")
        return found
    return url_of(tmp_path / "journal.db")


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    opened = open_store(url)
    yield opened
    opened.close()


def at(url: str, words: Callable[[Perdure], Awaitable[None]]) -> None:
    async def work() -> None:
        async with Perdure(url, agents=[payer]) as app:
            await words(app)

    asyncio.run(work())


async def fails(app: Perdure) -> None:
    with pytest.raises(RunFailed):
        await app.run(payer, id="p")


async def retries(app: Perdure) -> None:
    await app.retry("p", by="ann")


async def succeeds(app: Perdure) -> None:
    DOWN[0] = False
    assert await app.handle("p").result() == "up"


def test_an_event_is_superseded_by_the_first_reopening_that_went_back_behind_it() -> None:
    def reopened(seq: int, back_to: int) -> Reopening:
        return Reopening(seq, "", "ann", None, back_to, fresh=False)

    past = Superseded([reopened(10, 6), reopened(20, 14), reopened(30, 4)])
    assert [past.by(seq) for seq in (1, 4)] == [None, None]
    assert [past.by(seq) for seq in (5, 6)] == [30, 30]
    assert [past.by(seq) for seq in (7, 9)] == [10, 10]
    assert [past.by(seq) for seq in (10, 14)] == [30, 30]
    assert [past.by(seq) for seq in (15, 19)] == [20, 20]
    assert [past.by(seq) for seq in (20, 29)] == [30, 30]
    assert [past.by(seq) for seq in (30, 31)] == [None, None]


def test_who_follows_all_runs_hears_of_a_run_that_goes_on_after_its_end(url: str, store: Store) -> None:
    at(url, fails)
    audit = Audit(store)
    told = list(audit.more())
    assert told[-1]["type"] == "run_failed"
    at(url, retries)
    told += audit.more()
    assert told[-1]["type"] == "run_reopened"
    assert (told[-1]["actor"], told[-1]["context"]["back_to"]) == ("ann", told[-2]["seq"] - 2)
    at(url, succeeds)
    told += audit.more()
    assert list(audit.more()) == []
    row = store.get("p")
    assert row is not None
    assert [line["seq"] for line in told] == list(range(1, row.seq + 1))
    assert told[-2]["tool"] == "look", "the names of the calls before are known"


def test_who_follows_all_runs_misses_nothing_of_a_run_that_was_reopened_and_has_ended_since(url: str, store: Store) -> None:
    at(url, fails)
    audit = Audit(store)
    told = list(audit.more())

    async def all_at_once(app: Perdure) -> None:
        await retries(app)
        with pytest.raises(RunFailed):
            await app.handle("p").result()
        await retries(app)
        await succeeds(app)

    at(url, all_at_once)
    told += audit.more()
    row = store.get("p")
    assert row is not None
    assert [line["seq"] for line in told] == list(range(1, row.seq + 1))
    assert [line["type"] for line in told].count("run_reopened") == 2
    assert list(audit.more()) == []
    assert [line["seq"] for line in Audit(store).more()] == list(range(1, row.seq + 1))


def test_the_log_of_a_worker_has_who_reopened_the_run(tmp_path: Path) -> None:
    DOWN[0] = True
    url, file = url_of(tmp_path / "journal.db"), tmp_path / "audit.jsonl"
    at(url, fails)
    at(url, retries)
    at(url, succeeds)
    store = open_store(url)
    try:
        events = store.read("p")
        claim = max(event.seq for event in events if event.type == "run_claimed")
        log = AuditLog(file, store.read)
        log.committed("p", [event for event in events if event.seq >= claim])
        log.close()
    finally:
        store.close()
    lines = file.read_text()
    assert '"type":"run_reopened"' in lines
    assert '"type":"run_failed"' not in lines, "the worker before has written that line"


def test_the_row_of_a_reopened_run_agrees_with_its_journal_at_every_moment(url: str, store: Store) -> None:
    for moment in (fails, retries, succeeds):
        at(url, moment)
        row = store.get("p")
        assert row is not None
        assert verify_run(store, row).problem is None, moment


def test_the_tools_of_superseded_calls_are_found_although_the_code_makes_others(url: str, store: Store) -> None:
    at(url, fails)

    async def rewound(app: Perdure) -> None:
        DOWN[0] = False
        await app.rewind("p", 4, by="ann")
        assert await app.handle("p").result() == "up"

    async def work() -> None:
        async with Perdure(url, agents=[refunder]) as app:
            await rewound(app)

    asyncio.run(work())
    events = store.read("p")
    state = fold(events)
    asked = asked_in_all_branches(refunder, state, events, lambda payload: payload.inline or b"", 10_000)
    names = {number: call.tool.name for number, call in asked.items() if isinstance(call, CallTool)}
    assert names == {number: call.tool for number, call in state.calls.items()}
    assert [names[number] for number in (1, 2, 3, 4)] == ["pay", "pay", "look", "refund"]
