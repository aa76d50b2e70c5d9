"""Recorded runs against today's code, and the checks of `perdure doctor` about runs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.unit.inspect_tools import AGENTS, LEASE_US, hold, long_read, lookup, make_zoo, url_of

from perdure import Agent, Run, agent
from perdure.core.machine import Facts, Machine
from perdure.core.state import RunState
from perdure.engine.clock import Clock
from perdure.inspect.health import Check, check_runs
from perdure.inspect.replay import Different, Same, compare
from perdure.inspect.view import all_rows, loader, read_run
from perdure.store.api import Store
from perdure.store.open import open_store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    path = tmp_path / "journal.db"
    make_zoo(path)
    opened = open_store(url_of(path))
    yield opened
    opened.close()


def compared(store: Store, run_id: str, code: Agent[Any, Any], max_steps: int = 10_000) -> Same | Different:
    reading, load = read_run(store, run_id), loader(store)

    def make(state: RunState) -> Machine:
        assert state.created is not None
        return code.machine(Facts(run_id, "acme", None, code.name, code.version), load(state.created.input), max_steps)

    return compare(run_id, reading.events, reading.state, make, load)


def test_the_code_that_made_them_does_the_same_again(store: Store) -> None:
    by_name = {one.name: one for one in AGENTS}
    found = {row.run_id: compared(store, row.run_id, by_name[row.agent]) for row in all_rows(store)}
    assert {run_id: one.same for run_id, one in found.items()} == dict.fromkeys(found, True)
    done = found["done"]
    assert isinstance(done, Same)
    assert (done.calls, done.activations) == (4, 6)  # the start, four results, one timer


async def asks_for_something_else(run: Run, order: str) -> str:
    run.status("looking it up")
    await asyncio.gather(lookup(order), lookup("another"))
    return ""


async def ends_early(run: Run, order: str) -> str:
    run.status("looking it up")
    return ""


async def says_something_else(run: Run, order: str) -> str:
    run.status("looking elsewhere")
    return await long_read()


async def takes_something_else(run: Run, amount: int) -> str:
    return ""


async def never_rests(run: Run, order: str) -> str:
    while True:
        await asyncio.sleep(0)


async def touches_the_world(run: Run, order: str) -> str:
    await asyncio.to_thread(len, order)
    return ""


@pytest.mark.parametrize(
    ("code", "seq", "words"),
    [
        (asks_for_something_else, 5, 'lookup({"order":"another"})'),
        (ends_early, 4, "the run's success"),
        (says_something_else, 3, "looking elsewhere"),
        (takes_something_else, None, "InvalidInput"),
        (never_rests, None, "without waiting for anything"),
        (touches_the_world, 3, "NotAllowedInAgent"),
    ],
)
def test_other_code_is_told_where_it_parts(store: Store, code: Any, seq: int | None, words: str) -> None:
    found = compared(store, "done", agent(name="shop", version="2")(code), max_steps=1000)
    assert isinstance(found, Different)
    assert found.seq == seq
    assert words in found.difference


# -- health ---------------------------------------------------------------------------------------------------------------
def checks(store: Store, later_us: int = 0) -> dict[str, Check]:
    return {check.name: check for check in check_runs(store, Clock().now() + later_us, LEASE_US)}


def test_runs_that_wait_for_a_person_or_for_a_worker_are_named(store: Store) -> None:
    found = checks(store, later_us=60_000_000)
    assert (found["attention"].verdict, found["attention"].way_out) == ("warn", "perdure why doubt")
    assert found["queue"].verdict == "warn"
    assert "2 ready runs that no worker claims, of buy, shop; the oldest (resolved) for 1 min" in found["queue"].found
    assert found["runs"].found == "1 cancelled, 1 failed, 1 needs_attention, 2 queued, 1 succeeded, 1 waiting"
    assert checks(store)["queue"].verdict == "ok"  # ready only just now


def test_a_silent_worker_and_what_it_holds_are_named(store: Store) -> None:
    hold(store, "queued", "shop")
    assert "1 alive: host:1 (1 run" in checks(store)["workers"].found
    assert checks(store)["leases"].verdict == "ok"
    silent = checks(store, later_us=2 * LEASE_US)
    assert silent["workers"].verdict == "warn"
    assert "none is alive, and 3 runs are unfinished" in silent["workers"].found
    assert "; 1 silent, suspended or cut off from the database: host:1 for 1 min" in silent["workers"].found
    assert "1 run held by silent workers: queued" in silent["leases"].found
    taken = "the next worker takes them over, from a silent worker when its lease has run out; here: perdure resume queued"
    assert (silent["leases"].verdict, silent["leases"].way_out) == ("warn", taken)


def test_a_clock_that_was_wrong_is_noticed(store: Store) -> None:
    assert checks(store)["clock"].verdict == "ok"
    assert checks(store, later_us=-3_600_000_000)["clock"].verdict == "warn"
