"""Runs whose workers died repeatedly.

When a run counts as poison, how groups are made, and what people see (T26, T34).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.conformance.suite_suspects import die
from tests.unit.drive_tools import run, until
from tests.unit.postgres_tools import empty

from perdure import Budget, Call, Outcome, Perdure, Run, agent, tool
from perdure.cli import cli
from perdure.core.events import Event, RunClaimed
from perdure.core.suspects import ANY_SIZE, Group, goes_further, is_poison, largest_group
from perdure.engine.clock import Clock
from perdure.inspect.health import Check, check_runs
from perdure.inspect.text import sentence
from perdure.inspect.why.page import Why, why
from perdure.settings import Settings
from perdure.store.api import Served, Store
from perdure.store.open import open_store

LEASE_US = 30_000_000
A1 = Served("a", "1")


# -- the rule ---------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("crashes", "alone", "limit", "poison"),
    [
        (4, 4, 5, False),
        (5, 5, 5, True),  # a run that was always alone
        (5, 3, 5, True),
        (9, 2, 5, False),  # seven deaths with others and two alone: another run may now kill the workers
        (900, 0, 5, False),
        (2, 2, 2, True),
        (2, 0, 2, False),
        (3, 1, 2, True),
        (1, 1, 1, True),
        (9, 0, 1, False),  # whatever the limit is: a run that was never the only suspect is not blamed
    ],
)
def test_a_run_is_poison_after_so_many_deaths_of_which_some_met_it_alone(crashes: int, alone: int, limit: int, poison: bool) -> None:
    assert is_poison(crashes, alone, limit) is poison


@pytest.mark.parametrize(
    ("before", "now", "further"),
    [
        (None, 0, True),  # the first that was reported
        (None, "page 1", True),
        (5, 6, True),
        (5, 5, False),
        (5, 4.5, False),
        (5, 5.5, True),
        ({"part": 5, "of": 9}, {"part": 6, "of": 9}, True),
        ({"part": 5, "of": 9}, {"part": 5, "of": 9}, False),
        ({"part": 5, "seen": 9}, {"part": 6, "seen": 8}, False),  # one value further, one value back
        ({"part": 5, "etag": "a"}, {"part": 6, "etag": "b"}, True),
        ({"part": 5}, {"part": 6, "etag": "b"}, False),  # another thing is counted
        (["a"], ["a", "b"], True),
        (["a", "b"], ["c"], False),
        ([1, 5], [1, 6], True),
        ([1, 5], [2, 4], False),
        ("page 1", "page 2", False),
        (False, True, False),
        (5, None, False),
        (5, {"part": 6}, False),
    ],
)
def test_progress_is_further_only_if_that_is_certain(before: object, now: object, further: bool) -> None:
    assert goes_further(before, now) is further


@pytest.mark.parametrize(
    ("crashes", "lost_with", "largest"),
    [(2, 199, ANY_SIZE), (3, 199, 100), (4, 99, 50), (4, 4, 2), (5, 2, 1), (5, 1, 1), (6, 0, 1)],
)
def test_a_group_may_be_of_any_size_at_first_and_then_of_half_the_size(crashes: int, lost_with: int, largest: int) -> None:
    assert largest_group(crashes, lost_with) == largest


def test_a_group_takes_no_more_than_each_of_its_members_allows() -> None:
    group = Group([(2, 0), (3, 7)])
    assert group.admits(2, 0)
    assert group.admits(3, 5)
    assert not group.admits(3, 4), "it may be one of two, and would be the third"
    group.add(2, 0)
    assert not group.is_full
    group.add(2, 0)
    assert group.is_full
    assert not group.admits(2, 0), "one of them may be one of four"


# -- what people see
# ----------------------------------------------------------------------------------------------------
@pytest.fixture(params=["sqlite", "postgres"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    """Four runs that three workers in a row died with; a fourth worker holds two of them."""
    url = f"sqlite:///{tmp_path}/journal.db" if request.param == "sqlite" else empty(request.getfixturevalue("postgres"))
    opened = open_store(url)
    now = Clock().now()
    die(opened, ["r1", "r2", "r3", "r4"], "w1", "w2", "w3", now=now)
    opened.register("w4", "host:4", 4, now, [A1])
    assert sorted(one.row.run_id for one in opened.claim("w4", [A1], 9, now)) == ["r1", "r2"]
    yield opened
    opened.close()


def page_of(store: Store, run_id: str) -> Why:
    return why(store, run_id, now=Clock().now())


def checks(store: Store, later_us: int = 0) -> dict[str, Check]:
    return {check.name: check for check in check_runs(store, Clock().now() + later_us, LEASE_US)}


def test_why_says_that_a_run_waits_because_its_workers_died(store: Store) -> None:
    page = page_of(store, "r3")
    waits = (
        "3 workers in a row died with it: it may be what kills them, and waits as a suspect; "
        "suspects are driven in groups, this one in a group of at most 2, and host:4 holds 2"
    )
    assert page.suspect == waits
    assert page.sentence.endswith(waits)
    assert "may be busy" not in page.sentence
    assert page_of(store, "r1").suspect is None, "it is held"


def test_why_says_nothing_of_it_while_a_worker_has_room_for_the_run(store: Store) -> None:
    store.register("w5", "host:5", 5, Clock().now(), [A1])
    page = page_of(store, "r3")
    assert page.suspect is None
    assert page.sentence.endswith("2 workers would, and may be busy")


def test_why_says_that_nobody_serves_a_suspect_before_anything_else(store: Store) -> None:
    store.register("w4", "host:4", 4, Clock().now(), [Served("b", "1")])
    page = page_of(store, "r3")
    assert page.suspect is None
    assert "no worker serves agent a" in page.sentence


def test_doctor_names_those_that_wait_for_it_and_does_not_ask_for_another_worker(store: Store) -> None:
    found = checks(store, later_us=20_000_000)
    assert found["suspects"].verdict == "warn"
    assert found["suspects"].found.startswith("2 ready runs wait because 2 or more workers in a row died with them: ")
    assert found["suspects"].found.endswith("(r4, r3)")
    assert (found["suspects"].way_out or "").startswith("perdure why r4; ")
    assert found["queue"].verdict == "ok"
    store.unregister("w4", Clock().now())
    assert checks(store)["suspects"].verdict == "ok"


def test_list_says_so_in_a_few_words(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    shown = CliRunner().invoke(cli, ["list", "--url", store.url])
    assert shown.exit_code == 0, shown.output
    lines = {line.split()[0]: line for line in shown.output.splitlines() if line.startswith("r")}
    assert "a suspect: 3 workers in a row died with it" in lines["r3"]
    assert "suspect" not in lines["r1"]
    told = CliRunner().invoke(cli, ["list", "--json", "--url", store.url])
    suspects = {row["run_id"]: row["suspect"] for row in map(json.loads, told.output.splitlines())}
    assert suspects["r1"] is None
    assert suspects["r3"].startswith("3 workers in a row died with it")


def test_events_say_how_many_others_may_be_to_blame() -> None:
    claimed = RunClaimed("w", name="host:1", takeover=True, proven_dead=True, lost_with=1)
    said = sentence(Event(4, "0" * 32, 0, 2, None, 3, claimed), {})
    assert said.endswith("which is gone (the kernel says so); 1 other run of that worker may be to blame")


# -- suspects and money -------------------------------------------------------------------------------------------------------
def test_a_suspect_that_waits_for_money_makes_room_for_those_that_have_reserved_it(tmp_path: Path) -> None:
    """After three deaths suspects are driven one at a time.

    The first of them waits for money that the other two have reserved.
    """
    paying: list[int] = []
    quick = asyncio.Event()

    @tool(effect="once", timeout=30, cost="0.10")
    async def pay(n: int, call: Call) -> str:
        paying.append(n)
        await quick.wait()
        call.spend(usd="0.01")
        return f"paid {n}"

    @pay.reconcile
    async def _(n: int, call: Call) -> Outcome:
        await quick.wait()
        return Outcome.not_happened(final=True)

    @tool(effect="read")
    async def wait_for_the_others() -> None:
        await until(lambda: len(paying) >= 2)

    @agent(version="1")
    async def child(run: Run, n: int) -> str:
        if n == 1:
            await wait_for_the_others()
        return await pay(n)

    @agent(version="1", budget=Budget(usd="0.25"))
    async def parent(run: Run) -> list[str]:
        return list(await asyncio.gather(*(child(n) for n in (1, 2, 3))))

    settings = Settings(poll_s=0.01, reconcile_margin_s=0, cancel_grace_s=0.05, flush_s=0.005, linger_s=0.01)

    def open_app() -> Perdure:
        return Perdure(f"sqlite:///{tmp_path / 'j.db'}", [parent, child], settings=settings)

    async def die(deaths: int) -> None:
        """A worker takes all three, two of them inside their call and one without money, and is gone without a word."""
        async with open_app() as app:
            if deaths == 1:
                await app.start(parent, id="p")
            working = asyncio.create_task(app.work())
            await until(lambda: all(_claims(app, f"p/{n}") >= deaths for n in (1, 2, 3)))
            await until(lambda: "tool_call_proposed" in {event.type for event in app.store.read("p/1")})
            working.cancel()
            await asyncio.wait([working])

    async def main() -> list[str]:
        for deaths in (1, 2, 3):
            await die(deaths)
        quick.set()
        async with open_app() as app:
            driving = asyncio.create_task(app.handle("p").result())
            await asyncio.wait([driving], timeout=45)
            assert driving.done(), "suspects and reserved money wait for each other"
            return list(driving.result())

    assert run(main()) == ["paid 1", "paid 2", "paid 3"]


def _claims(app: Perdure, run_id: str) -> int:
    return 0 if app.store.get(run_id) is None else sum(event.type == "run_claimed" for event in app.store.read(run_id))
