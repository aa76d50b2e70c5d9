"""A stepped run stops exactly where it should, is really killed there, and continues in another process."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from perdure import Call, InvalidInput, NeedsAttention, NotFound, Outcome, Run, RunFailed, Settings, agent, sync, tool
from perdure.testing import ManualClock, NotReached, stepping
from perdure.testing.boundaries import names


@tool(effect="keyed")
async def charge(order: str, book: str, call: Call) -> str:
    with open(book, "a") as paid:
        paid.write(f"{call.key}\n")
    return f"receipt for {order}"


@tool(effect="once")
def launch(book: str) -> str:
    Path(book).write_text("launched")
    return "up"


@agent(version="1")
async def shop(run: Run, order: str, book: str) -> str:
    return await charge(order, book)


@agent(version="1")
async def rocket(run: Run, book: str) -> str:
    return await launch(book)


def types(run) -> list[str]:
    return [event.type for event in run.events()]


def is_gone(pid: int) -> bool:
    """Has the process ended? A zombie has ended too."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def wait_until(condition, seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it has not come true"
        time.sleep(0.01)


# -- standing still -----------------------------------------------------------------------------------------------------
def test_a_run_is_held_between_the_effect_and_its_record_and_killed_there(tmp_path):
    book = tmp_path / "book"
    with stepping(shop, "o-7", book=str(book)) as run:
        at = run.until("before_tool_result_persisted", tool="charge")
        assert (at.call, at.tool) == (1, "charge")
        assert types(run) == ["run_created", "run_claimed", "tool_call_initiated"]
        assert run.state().calls[1].attempt == 1
        assert len(book.read_text().splitlines()) == 1

        run.crash()
        assert run.finish() == "receipt for o-7"

        assert run.effects == {"charge": 2}
        first, second = book.read_text().splitlines()
        assert first == second
        assert types(run).count("run_claimed") == 2


def test_a_once_tool_that_was_killed_inside_is_left_to_a_person(tmp_path):
    with stepping(rocket, str(tmp_path / "book")) as run:
        run.until("after_tool_effect", tool="launch")
        run.crash()
        with pytest.raises(NeedsAttention, match=r"call 1 \(launch\): it may or may not have happened"):
            run.finish()
        assert run.effects["launch"] == 1


def test_before_and_after_a_commit_are_two_moments(tmp_path):
    with stepping(rocket, str(tmp_path / "book")) as run:
        run.until("before_tool_intent_persisted")
        before = types(run)
        run.until("after_tool_intent_persisted")
        assert types(run) == [*before, "tool_call_initiated"]
        assert not (tmp_path / "book").exists()
        run.until("after_tool_effect")
        assert (tmp_path / "book").read_text() == "launched"
        assert run.at[0].name == "after_tool_effect"
        assert run.finish() == "up"
        assert run.at == ()


def test_while_one_thread_is_held_no_other_one_passes_a_boundary():
    @tool(effect="keyed")
    def slow(call: Call) -> int:
        return 1

    @tool(effect="keyed")
    def quick(call: Call) -> int:
        time.sleep(0.05)  # it reaches the end of its effect while the other call is held
        return 2

    @agent(version="1")
    async def both(run_: Run) -> list[int]:
        return list(await asyncio.gather(slow(), quick()))

    with stepping(both) as run:
        run.until("before_tool_effect", tool="slow")
        time.sleep(0.5)
        assert "tool_call_completed" not in types(run)
        assert run.finish() == [1, 2]


def test_the_nth_visit_is_counted_from_where_the_run_stands():
    @tool(effect="read")
    async def look(number: int) -> int:
        return number

    @agent(version="1")
    async def looker(run_: Run) -> int:
        return sum([await look(number) for number in range(5)])

    with stepping(looker) as run:
        assert run.until("before_tool_effect", nth=2).call == 2
        assert run.until("before_tool_effect", nth=2).call == 4
        assert run.until("after_tool_effect", call=5).tool == "look"
        assert run.finish() == 10


def test_the_boundaries_of_a_child_have_its_place():
    @agent(version="1")
    async def child(run_: Run, number: int) -> int:
        return number

    @agent(version="1")
    async def parent(run_: Run) -> int:
        return await child(1) + await child(2)

    with stepping(parent) as run:
        run.until("before_end_persisted", run="/2")
        run.crash()
        assert run.finish() == 3


def test_a_run_that_was_killed_before_it_was_created_is_created_by_the_next_process(tmp_path):
    with stepping(rocket, str(tmp_path / "book")) as run:
        run.until("before_run_created_persisted")
        assert run.events() == []
        with pytest.raises(NotFound, match="is not in"):
            run.row()
        run.crash()
        assert run.finish() == "up"


def test_people_and_time_reach_a_run_that_rests(tmp_path):
    @agent(version="1")
    async def asker(run_: Run) -> str:
        decision = await run_.request_approval("go", {"n": 1})
        await asyncio.sleep(3600)
        return str(decision.by)

    clock = ManualClock()
    with stepping(asker, clock=clock, url=f"sqlite:///{tmp_path / 'journal.db'}") as run:
        assert run.rest().status == "waiting_approval"
        with pytest.raises(NotReached, match=r"it waits for .*Make that happen"):
            run.finish()
        with sync.Perdure(run.url, clock=clock) as app:
            [asked] = app.approvals()
            app.approve(asked.approval, by="ann")
        assert run.rest().status == "waiting"
        run.crash()
        clock.advance(hours=1)
        assert run.finish() == "ann"


def test_a_stepped_run_in_an_async_test():
    async def main() -> Any:
        with stepping(shop, "o-7", os.devnull) as run:
            run.until("before_end_persisted")
            await asyncio.sleep(0)
            return run.finish()

    assert asyncio.run(main()) == "receipt for o-7"


def test_a_reconcile_hook_is_asked_at_once_since_the_dead_are_dead(tmp_path):
    @tool(effect="once")
    def send() -> str:
        (tmp_path / "sent").write_text("x")
        return "sent"

    @send.reconcile
    def _() -> Outcome:
        return Outcome.happened("found") if (tmp_path / "sent").exists() else Outcome.not_happened()

    @agent(version="1")
    async def sender(run_: Run) -> str:
        return await send()

    with stepping(sender) as run:
        run.until("after_tool_effect")
        run.crash()
        assert run.finish() == "found"
        assert run.effects["send"] == 1


# -- errors for wrong uses --------------------------------------------------------------------------------------------
def test_a_name_that_is_none_is_refused_with_those_near_it():
    with stepping(shop, "o-7", os.devnull) as run:
        with pytest.raises(InvalidInput, match=r"no boundary 'before_tool_effekt'; did you mean before_tool_effect"):
            run.until("before_tool_effekt")
        assert run.passed == []
    assert len(names()) == len(set(names())) > 80


def test_a_boundary_that_is_not_reached_is_a_failure_that_names_those_that_were():
    with stepping(shop, "o-7", os.devnull) as run:
        with pytest.raises(NotReached, match=r"is succeeded, and has not come to before_tool_effect: refund; it came to") as failed:
            run.until("before_tool_effect", tool="refund")
        assert "before_tool_effect: charge (call 1)\n" in str(failed.value)
        assert run.finish() == "receipt for o-7"


def test_a_run_that_takes_too_long_is_ended_and_says_how_far_it_came():
    @tool(effect="read")
    def endless() -> None:
        time.sleep(600)

    @agent(version="1")
    async def stuck(run_: Run) -> None:
        await endless()

    with stepping(stuck) as run, pytest.raises(NotReached, match=r"has not come to its end within 2 s(?s:.*)before_tool_effect: endless"):
        run.finish(timeout_s=2)


def test_a_process_that_ends_by_itself_is_told_of():
    @tool(effect="once")
    def leave() -> None:
        os._exit(5)

    @agent(version="1")
    async def leaver(run_: Run) -> None:
        await leave()

    with stepping(leaver) as run:
        with pytest.raises(NotReached, match=r"has ended \(exit code 5\) on its way to its end"):
            run.finish()
        with pytest.raises(NeedsAttention):
            run.finish()


def test_an_error_that_is_no_runs_comes_with_its_traceback(tmp_path):
    (tmp_path / "journal.db").write_text("this is no database, and it is long enough to be sure of that" * 100)
    with (
        stepping(shop, "o-7", os.devnull, url=f"sqlite:///{tmp_path / 'journal.db'}") as run,
        pytest.raises(RuntimeError, match=r"has broken:\n(?s:.*)journal\.db"),
    ):
        run.finish()


def test_a_failed_run_fails_as_its_handle_would():
    @agent(version="1")
    async def broken(run_: Run) -> None:
        raise LookupError("nothing there")

    with stepping(broken) as run, pytest.raises(RunFailed, match="LookupError: nothing there"):
        run.finish()


def test_what_cannot_be_stepped_is_refused_before_anything_begins():
    with pytest.raises(InvalidInput, match="is not an agent"), stepping(len):  # type: ignore[arg-type]
        pass
    with pytest.raises(InvalidInput, match="in memory"), stepping(shop, "o-7", "x", url="sqlite://"):
        pass
    with pytest.raises(InvalidInput, match="order"), stepping(shop, order=7):
        pass
    with stepping(shop, "o-7", "x") as run, pytest.raises(InvalidInput, match="no process to kill"):
        run.crash()


# -- nothing is left behind --------------------------------------------------------------------------------------------------
def test_its_process_ends_with_the_block():
    with stepping(shop, "o-7", os.devnull, settings=Settings()) as run:
        run.until("before_end_persisted")
        pid = run._pid
        assert pid is not None
        assert not is_gone(pid)
    assert is_gone(pid)


ORPHAN = """
import os, sys, time
from perdure import Run, agent, tool
from perdure.testing import stepping

@tool(effect="once")
def work():
    with open(sys.argv[1], "w") as told:
        told.write(f"{os.getpid()}\\n")
    time.sleep(600)

@agent(version="1")
async def worker(run: Run):
    await work()

with stepping(worker) as run:
    run.finish(timeout_s=600)
"""


def test_its_process_ends_with_the_test_that_is_killed(tmp_path):
    told = tmp_path / "pid"
    parent = subprocess.Popen([sys.executable, "-c", ORPHAN, str(told)])
    try:
        wait_until(lambda: told.exists() and told.read_text().endswith("\n"))
        pid = int(told.read_text())
        assert not is_gone(pid)
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    wait_until(lambda: is_gone(pid))
