"""The page of a family that a budget stopped, of signals and timers without a wait, and after an end or an undo."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tests.unit.inspect_tools import at_work, url_of

from perdure import Agent, Budget, Call, Fatal, Perdure, Run, agent, tool
from perdure.cli import cli
from perdure.core.events import AttentionNeeded, BudgetExceeded
from perdure.core.run_core import over_words
from perdure.engine.clock import Clock
from perdure.inspect.why.page import Why, why
from perdure.store.open import open_store


def made(path: Path, run_id: str) -> Why:
    store = open_store(url_of(path))
    try:
        return why(store, run_id, now=Clock().now())
    finally:
        store.close()


def commands(page: Why) -> list[str]:
    return [step.command for step in page.next]


def told(path: Path, *words: str) -> str:
    result = CliRunner().invoke(cli, [*words, "--url", url_of(path)])
    assert result.exit_code == 0, result.output
    return result.output


# -- one budget, many children ------------------------------------------------------------------------------------------------
@tool(effect="idempotent", cost=0.05)
async def ask_model(number: int, call: Call) -> int:
    call.spend(usd="0.02")
    return number


@agent(version="1")
async def asker(run: Run, number: int) -> int:
    return await ask_model(number)


@agent(version="1", budget=Budget(usd="0.10"))
async def quorum(run: Run, count: int) -> list[int]:
    return await asyncio.gather(*(asker(number) for number in range(count)))


@agent(version="1")
async def above(run: Run, count: int) -> list[int]:
    return await quorum(count)


FAMILY: tuple[Agent[Any, Any], ...] = (quorum, asker, above)


async def drive_all(app: Perdure) -> None:
    await app.start(quorum, 12, id="q-1")
    await app.engine.drive("q-1", wait=False)


def test_children_that_stand_still_for_one_budget_are_one_line_and_one_command_which_frees_them_all(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    at_work(path, drive_all, agents=FAMILY)
    page = made(path, "q-1")
    assert page.children is not None
    (short,) = page.children.short
    done = page.done_count
    assert len(short.runs) == 12 - done
    assert f"{12 - done} children stand still for the budget of q-1 ({short.runs[0]}, " in page.sentence
    assert commands(page)[0] == "perdure unpause q-1 --add-usd N"
    assert not [command for command in commands(page) if " why " in command], "one cause, one command"
    least = f"{short.least / 1e6:.2f}"
    assert f"it needs at least ${least}" in page.next[0].does
    text = told(path, "why", "q-1")
    assert sum("stand still for the budget of q-1" in line for line in text.splitlines()) == 2  # the headline, and under the children

    async def add(app: Perdure) -> None:
        assert sorted(await app.unpause("q-1", add=Budget(usd="5"), by="ann")) == sorted(short.runs)
        await app.engine.drive("q-1")

    at_work(path, add, agents=FAMILY)
    ended = made(path, "q-1")
    assert ended.status == "succeeded"
    assert ended.cost_all is not None
    assert (ended.cost_all.calls, ended.cost_all.usd) == (12, 0.24)
    assert ended.cost_words == "12 calls, $0.24, with its children; itself: nothing"
    assert "cost     12 calls, $0.24, with its children" in told(path, "show", "q-1")


def test_a_budget_has_one_number_wherever_the_page_speaks_of_it(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    at_work(path, drive_all, agents=FAMILY)
    page = made(path, "q-1")
    assert page.children is not None
    (limit,) = page.budgets[0].limits
    spent = f"${limit.spent / 1e6:.2f} of $0.10"
    assert limit.reserved == 0
    assert spent in page.sentence
    child = made(path, page.children.short[0].runs[0])
    assert f"the budget of run q-1 is used up: {spent}, and $0.05 more wanted" in child.sentence
    assert child.over_budget is not None
    assert spent in child.over_budget
    # The least amount is enough, and less is not.
    least = limit.spent + 50_000 - limit.limit
    assert f"it needs at least ${least / 1e6:.2f})" in child.next[0].does
    for line in told(path, "why", page.children.short[0].runs[0]).splitlines():
        assert " of $0.10" not in line or spent in line, line


def test_so_are_the_children_of_a_child_for_the_run_above_it(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"

    async def drive(app: Perdure) -> None:
        await app.start(above, 12, id="top")
        await app.engine.drive("top", wait=False)

    at_work(path, drive, agents=FAMILY)
    assert commands(made(path, "top/1"))[0] == "perdure unpause top/1 --add-usd N"
    page = made(path, "top")
    assert "children stand still for the budget of top/1 (top/1/" in page.sentence
    assert commands(page)[0] == "perdure unpause top/1 --add-usd N", "it is not top's budget"


@pytest.mark.parametrize(
    ("over", "words"),
    [
        (BudgetExceeded("r", "usd", limit=200_000, used=190_000, wanted=50_000), "its $0.20 do not cover $0.05 more"),
        (BudgetExceeded("r", "usd", limit=200_000, used=1_200_000, wanted=0), "$1.20 of $0.20"),
        (BudgetExceeded("r", "usd", limit=200_000, used=200_123, wanted=0), "$0.200123 of $0.20"),
        (BudgetExceeded("r", "calls", limit=3, used=3, wanted=1), "3 calls of 3 calls"),
        (BudgetExceeded("r", "seconds", limit=1_500_000, used=2_000_000, wanted=0), "2 s of 1.5 s"),
    ],
)
def test_what_is_recorded_of_a_budget_has_two_decimals_and_no_sum_that_others_may_give_back(over: BudgetExceeded, words: str) -> None:
    assert over_words(over) == f"the budget of run r is used up: {words}"


# -- timers and signals ----------------------------------------------------------------------------------------------------------
@agent(version="1")
async def chatty(run: Run) -> str:
    for _ in range(3):
        await run.receive("user", timeout=3600)
    return "bye"


def test_timers_of_answered_waits_are_not_waited_for_and_a_signal_on_a_mistyped_topic_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"

    async def drive(app: Perdure) -> None:
        await app.start(chatty, id="c")
        await app.engine.drive("c", wait=False)
        for _ in range(2):
            await app.signal("c", "user", "hello", by="ann")
            await app.engine.drive("c", wait=False)
        await app.signal("c", "usr", "hello?", by="ann")
        await app.engine.drive("c", wait=False)

    at_work(path, drive, agents=(chatty,))
    page = made(path, "c")
    assert [wait.split(" at ")[0] for wait in page.waiting] == ["timer 3", "a signal on 'user'"]
    assert [(one.topic, one.received, one.waited_for) for one in page.heard] == [("user", 2, True), ("usr", 1, False)]
    (stray,) = page.strays
    assert stray.startswith("1 signal on 'usr' (event ")
    assert stray in told(path, "why", "c")
    assert f"signals  {stray}" in told(path, "show", "c")


# -- after the end -----------------------------------------------------------------------------------------------------------------
@tool(effect="idempotent")
async def book(what: str) -> str:
    return f"booked {what}"


@book.compensate(effect="idempotent")
async def unbook(what: str, result: str, call: Call) -> None:
    pass


@tool(effect="once")
async def pay(cents: int) -> str:
    return "paid"


@agent(version="1")
async def trip(run: Run, fails: bool) -> str:
    await book("room")
    await pay(5)
    if fails:
        raise Fatal("no seat")
    return "gone"


def test_a_failed_run_with_effects_offers_to_go_on_and_to_take_them_back(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"

    async def drive(app: Perdure) -> None:
        await app.start(trip, True, id="t", tenant="acme", actor="ann")
        await app.start(trip, False, id="well")
        for run_id in ("t", "well"):
            await app.engine.drive(run_id)

    at_work(path, drive, agents=(trip,))
    page = made(path, "t")
    assert page.status == "failed"
    (undo,) = [step for step in page.next if step.command.startswith("perdure undo t")]
    assert "take back what it has changed (2 calls)" in undo.does
    assert "that takes code that still does what the journal has, as version 1 did" in undo.does
    assert page.next[0].command == "perdure retry t"
    assert page.next[0].does.startswith("take its last step again, with the code of now (mend it first); 2 calls with a result")
    assert commands(made(path, "well")) == ["perdure show well"]


def test_after_an_undo_the_page_says_so_and_marks_every_call(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"

    async def drive(app: Perdure) -> None:
        await app.start(trip, False, id="t")
        await app.engine.drive("t")
        await app.undo("t", by="ann", accept=True)

    at_work(path, drive, agents=(trip,))
    page = made(path, "t")
    assert page.undoing is not None
    assert page.undoing.words.startswith("undone in part by ann at ")
    assert [(done.call, done.undone) for done in page.done] == [(1, "undone"), (2, "not undone")]
    assert commands(page)[-1] == "perdure why t/undo"
    text = told(path, "why", "t")
    assert "undone in part by ann at " in text
    assert ": perdure why t/undo --url " in text
    assert 'book(what="room") returned "booked room" – undone  (' in text
    assert made(path, "t/undo").undoing is None


# -- versions ----------------------------------------------------------------------------------------------------------------------
def test_code_that_differs_from_an_adopted_version_is_not_told_as_what_the_run_began_with(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"

    def version(number: str, order: str) -> Agent[Any, Any]:
        @agent(name="buyer", version=number)
        async def buyer(run: Run) -> str:
            await book(order)
            await run.receive("go")
            return order

        return buyer

    async def begin(app: Perdure) -> None:
        await app.start("buyer", id="b")
        await app.engine.drive("b", wait=False)

    async def adopt(app: Perdure) -> None:
        await app.adopt("b", by="ann")

    async def go_on(app: Perdure) -> None:
        await app.signal("b", "go", by="ann")
        await app.engine.drive("b", wait=False)

    at_work(path, begin, agents=[version("1", "room")])
    at_work(path, adopt, agents=[version("2", "room")])
    at_work(path, go_on, agents=[version("2", "car")])
    store = open_store(url_of(path))
    reason = [event.body.reason for event in store.read("b") if isinstance(event.body, AttentionNeeded)]
    store.close()
    assert reason == ["diverged"]
    does = made(path, "b").next[1].does
    assert "put the code back of version 2, which goes on with it since (it began with version 1)" in does


def test_without_a_worker_of_its_version_the_page_says_which_code_a_resume_needs(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"

    @agent(name="buyer", version="1")
    async def buyer(run: Run) -> str:
        await book("room")
        await run.receive("go")
        return "done"

    async def begin(app: Perdure) -> None:
        await app.start("buyer", id="b")
        await app.engine.drive("b", wait=False)
        await app.signal("b", "go", by="ann")

    at_work(path, begin, agents=[buyer])
    resume, worker = made(path, "b").next[:2]
    assert worker.does == "serve every run of buyer with such code, this one too"
    assert resume.command == "perdure resume b FILE.py:buyer"
    assert resume.does == (
        "drive the run here until it rests; that takes the code of version 1: other code goes on with the run only after "
        "perdure adopt b FILE.py:buyer"
    )


def test_the_page_of_a_specimen_offers_to_look_into_its_agent(tmp_path: Path) -> None:
    path, other = tmp_path / "journal.db", tmp_path / "other.db"

    async def drive(app: Perdure) -> None:
        await app.start(trip, True, id="t")
        await app.engine.drive("t")

    at_work(path, drive, agents=(trip,))
    told(path, "export", "t", "-o", str(tmp_path / "t.jsonl"))
    told(other, "import", str(tmp_path / "t.jsonl"))
    assert "perdure inspect t FILE.py:trip --at SEQ" in commands(made(other, "t"))
