"""A request that arrives after its process has died, and after its reconcile hook has looked for it."""

from __future__ import annotations

import asyncio
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.lab.matrices import advice, matrix, rules
from tests.lab.test_crashtest_cli import SHOP, crashtest, is_alive
from tests.lab.test_rules import FIRST, SECOND, call, evidence, line, told, undisturbed

from perdure import Call, Outcome, Run, Settings, agent, tool
from perdure.core.run_core import RunCore
from perdure.testing import forking
from perdure.testing.lab import Report, carrier, victim
from perdure.testing.lab.contents import FileSeen
from perdure.testing.lab.judge import judge
from perdure.testing.lab.ledger import EffectLedger, Entry
from perdure.testing.lab.spec import Resolution
from perdure.testing.lab.warp import Warp, WarpedLoop

LATE = ["late_tool_effect"]
BOOK = Path("book")
CANCELLED, ATTEMPTS = Path("../cancelled"), Path("../attempts")  # files of a service, outside of the compared folder


def words(file: Path) -> list[str]:
    return file.read_text().split() if file.exists() else []


def booked() -> list[str]:
    return words(BOOK)


def book(line: str) -> str:
    with BOOK.open("a") as file:
        file.write(f"{line}\n")
    return "booked"


# -- tools: each has a hook with one thing about it ---------------------------------------------------------------------------
@tool(timeout=20)
async def looks(call: Call) -> str:
    """Careful, and with its own loop in whichever process it runs."""
    await asyncio.sleep(0)
    return book(call.key)


@looks.reconcile
async def _(call: Call) -> Outcome:
    return Outcome.happened("booked") if call.key in booked() else Outcome.not_happened()


@tool(timeout=20)
def rules_it_out(call: Call) -> str:
    return book(call.key)


@rules_it_out.reconcile
def _(call: Call) -> Outcome:
    return Outcome.happened("booked") if call.key in booked() else Outcome.not_happened(final=True)


@tool(timeout=20)
def looks_in_a_copy(call: Call) -> str:
    return book(call.key)


@looks_in_a_copy.reconcile
def _(call: Call) -> Outcome:
    """Takes a copy when it is first asked, and looks there from then on."""
    copy = Path("../copy")
    if not copy.exists():
        copy.write_text(" ".join(booked()))
    return Outcome.happened("booked") if call.key in words(copy) else Outcome.not_happened()


@tool(timeout=20)
def refuses_what_was_cancelled(call: Call) -> str:
    if f"{call.key}-{call.attempt}" in words(CANCELLED):
        raise PermissionError("cancelled")
    return book(call.key)


@refuses_what_was_cancelled.reconcile
def _(call: Call) -> Outcome:
    CANCELLED.write_text(f"{call.key}-{call.attempt}")
    return Outcome.happened("booked") if call.key in booked() else Outcome.not_happened(final=True)


@tool(timeout=20)
def drops_what_was_cancelled(call: Call) -> str:
    """Answers "booked" even for a request that it drops."""
    return "booked" if f"{call.key}-{call.attempt}" in words(CANCELLED) else book(call.key)


@drops_what_was_cancelled.reconcile
def _(call: Call) -> Outcome:
    CANCELLED.write_text(f"{call.key}-{call.attempt}")
    return Outcome.happened("booked") if call.key in booked() else Outcome.not_happened(final=True)


@tool(timeout=20)
def does_not_know(call: Call) -> str:
    return book(call.key)


@does_not_know.reconcile
def _(call: Call) -> Outcome:
    return Outcome.unknown("no look-up there")


@tool(timeout=20)
def is_sure(call: Call) -> str:
    return book(call.key)


@is_sure.reconcile
def _(call: Call) -> Outcome:
    return Outcome.happened("booked")


@tool(effect="keyed")
async def drops_duplicates(call: Call) -> str:
    return "booked" if call.key in booked() else book(call.key)


@tool(effect="keyed")
def drops_no_duplicates(call: Call) -> str:
    return book(call.key)


@tool(effect="keyed")
def refuses_duplicates(call: Call) -> str:
    """As a service that answers 409 to an earlier request than it has seen."""
    if max(map(int, words(ATTEMPTS)), default=0) > call.attempt:
        raise FileExistsError("a later request with that key was here")
    ATTEMPTS.write_text(str(call.attempt))
    return "booked" if call.key in booked() else book(call.key)


class Workshop:
    """What belongs to one process: a lock of its loop, and a thread that does the work."""

    def __init__(self) -> None:
        self.loop_of_connection: Any = None
        self.orders: queue.Queue[tuple[str, threading.Event]] | None = None

    def order(self, key: str) -> None:
        if self.orders is None:
            self.orders = queue.Queue()
            threading.Thread(target=self._work, daemon=True).start()
        done = threading.Event()
        self.orders.put((key, done))
        done.wait()

    def _work(self) -> None:
        assert self.orders is not None
        while True:
            key, done = self.orders.get()
            book(key)
            done.set()


WORKSHOP = Workshop()


@tool(effect="read")
async def opens_connection() -> None:
    WORKSHOP.loop_of_connection = asyncio.get_running_loop()


@tool(timeout=20)
async def needs_its_loop(call: Call) -> str:
    """As a client that has opened a connection: another loop cannot use it."""
    if WORKSHOP.loop_of_connection not in (None, asyncio.get_running_loop()):
        raise RuntimeError("attached to a different loop")
    return book(call.key)


@needs_its_loop.reconcile
async def _(call: Call) -> Outcome:
    return Outcome.happened("booked") if call.key in booked() else Outcome.not_happened()


@tool(effect="idempotent")
def warms_up() -> None:
    WORKSHOP.order("warm")


@tool(timeout=20)
def needs_its_thread(notes: str, call: Call) -> str:
    Path(notes, str(os.getpid())).touch()
    WORKSHOP.order(call.key)
    return "booked"


@needs_its_thread.reconcile
def _(notes: str, call: Call) -> Outcome:
    return Outcome.happened("booked") if call.key in booked() else Outcome.not_happened()


@tool(timeout=20, isolate=True)
def apart(call: Call) -> str:
    return book(call.key)


@apart.reconcile
def _(call: Call) -> Outcome:
    return Outcome.happened("booked") if call.key in booked() else Outcome.not_happened()


TOOLS = {
    one.name: one
    for one in (
        *(looks, rules_it_out, looks_in_a_copy, refuses_what_was_cancelled, drops_what_was_cancelled, does_not_know, is_sure),
        *(drops_duplicates, drops_no_duplicates, refuses_duplicates, needs_its_loop, apart),
    )
}


@agent(version="1")
async def books(run: Run, which: str) -> str:
    await opens_connection()
    return await TOOLS[which]()


@agent(version="1")
async def orders(run: Run, notes: str) -> str:
    await warms_up()
    return await needs_its_thread(notes)


def entries(folder: Path) -> list[str]:
    """What counts: the book."""
    return (folder / "book").read_text().split()


def late(which: str, **options: Any) -> Report:
    return matrix(books, which, **{"boundaries": LATE, "ledger": entries, **options})


# -- hooks ----------------------------------------------------------------------------------------------------------------------
def test_a_hook_that_finds_the_late_request_when_it_is_asked_again_is_as_declared(tmp_path: Path) -> None:
    report = late("looks", keep=tmp_path)
    assert (report.ok, rules(report), advice(report)) == (True, set(), set()), report.table()
    (trial,) = report.trials
    assert (trial.boundaries, trial.outcome, trial.kills) == (("late_tool_effect: looks (call 2)",), "ok", 1)
    facts = [entry for entry in EffectLedger(tmp_path / "trial-00002" / "ledger").entries() if entry.tool in ("looks", "")]
    assert [(entry.fact, entry.result) for entry in facts if entry.fact != "asked"] == [
        *(("begun", None), ("late", None), ("killed", None)),
        *(("told", "not_happened"), ("returned", '"booked"'), ("told", "happened")),
    ]
    # The request arrived, once, after its process was gone; it was not sent again.
    assert (trial.effects["looks"], len(trial.world), trial.output_equal) == (1, 1, True)
    assert (report.figures.kills, report.figures.tried, report.figures.not_reached) == (1, 1, 0)
    assert {seen.name: seen.verdict for seen in report.tools}["looks"] == "as declared"


def test_a_hook_that_rules_out_what_still_comes_is_named_with_the_way_out() -> None:
    report = late("rules_it_out")
    assert rules(report) == {("reconcile_final", "rules_it_out"), ("effect_twice", "rules_it_out")}
    (problem,) = [problem for problem in report.problems if problem.rule == "reconcile_final"]
    assert problem.sentence == "its reconcile hook ruled the call out for good (final=True), and the request arrived afterwards"
    assert "not_happened(), which is believed after timeout= and settle=" in problem.way_out
    assert [(trial.outcome, trial.effects["rules_it_out"], len(trial.world)) for trial in report.trials] == [("wrong", 2, 2)]
    # Nothing else in the matrix shows it: only a late request comes after a hook has looked.
    others = matrix(books, "rules_it_out", boundaries=lambda words: "rules_it_out" in words and "late" not in words, ledger=entries)
    assert others.ok, others.table()


def test_a_hook_that_looks_where_the_late_request_never_shows_is_found() -> None:
    report = late("looks_in_a_copy")
    assert rules(report) == {("reconcile_wrong", "looks_in_a_copy"), ("effect_twice", "looks_in_a_copy")}
    (problem,) = [problem for problem in report.problems if problem.rule == "reconcile_wrong"]
    assert problem.way_out.endswith("if the service shows it later, say so: settle=")


@pytest.mark.parametrize("which", ["refuses_what_was_cancelled", "drops_what_was_cancelled"])
def test_a_hook_may_rule_out_what_the_service_then_refuses_or_drops(which: str) -> None:
    report = late(which)
    assert (rules(report), advice(report)) == (set(), set()), report.table()
    assert [(trial.outcome, len(trial.world)) for trial in report.trials] == [("ok", 1)]


def test_a_hook_that_does_not_know_leaves_it_to_a_person_who_sees_what_came() -> None:
    report = late("does_not_know")
    assert (report.ok, advice(report)) == (True, {("reconcile_unsure", "does_not_know")})
    (trial,) = report.trials
    assert (trial.outcome, trial.settled, len(trial.world)) == ("doubt", ("does_not_know (call 2): it happened",), 1)


def test_a_hook_that_says_yes_before_the_request_has_arrived_is_wrong() -> None:
    report = late("is_sure")
    assert rules(report) == {("reconcile_wrong", "is_sure")}
    assert "its request had not arrived yet" in report.problems[0].sentence


# -- a service that shows a request some time after it has accepted it --------------------------------------------------------
@tool(timeout=20, settle=3)
def shows_in_time(call: Call) -> str:
    book(f"{call.key}:{time.time()}")
    return "booked"


@shows_in_time.reconcile
def _(call: Call) -> Outcome:
    return shown_after(2.5, call)


@tool(timeout=20, settle=0.1)
def shows_too_late(call: Call) -> str:
    book(f"{call.key}:{time.time()}")
    return "booked"


@shows_too_late.reconcile
def _(call: Call) -> Outcome:
    return shown_after(600, call)


@tool(timeout=20, settle=600)
def has_its_time(call: Call) -> str:
    book(f"{call.key}:{time.time()}")
    return "booked"


@has_its_time.reconcile
def _(call: Call) -> Outcome:
    return shown_after(500, call)


def shown_after(seconds: float, call: Call) -> Outcome:
    accepted = [float(line.partition(":")[2]) for line in booked() if line.startswith(call.key)]
    there = any(time.time() - at > seconds for at in accepted)
    return Outcome.happened("booked") if there else Outcome.not_happened()


@agent(version="1")
async def books_slowly(run: Run, which: str) -> str:
    return await {one.name: one for one in (shows_in_time, shows_too_late, has_its_time)}[which]()


def test_what_has_arrived_late_has_its_settle_to_show() -> None:
    report = matrix(books_slowly, "shows_in_time", boundaries=LATE)
    assert (rules(report), [trial.outcome for trial in report.trials]) == (set(), ["ok"]), report.table()


def test_a_settle_that_is_too_short_for_the_service_is_found() -> None:
    report = matrix(books_slowly, "shows_too_late", boundaries=LATE)
    assert rules(report) == {("reconcile_wrong", "shows_too_late"), ("effect_twice", "shows_too_late")}, report.table()


def test_a_settle_that_the_lab_does_not_wait_for_accuses_nobody() -> None:
    report = matrix(books_slowly, "has_its_time", boundaries=LATE, timeout_s=20)
    assert (rules(report), advice(report)) == (set(), {("reconcile_unsure", "has_its_time")}), report.table()
    assert any("tool has_its_time: " in remark and "--timeout" in remark for remark in report.baseline.remarks)


# -- keys -----------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("which", ["drops_duplicates", "refuses_duplicates"])
def test_a_key_that_is_good_for_a_late_duplicate_is_as_declared(which: str) -> None:
    report = late(which)
    assert report.ok, report.table()
    assert [(trial.outcome, trial.effects[which], len(trial.world)) for trial in report.trials] == [("ok", 2, 1)]


def test_a_key_that_is_not_is_named() -> None:
    report = late("drops_no_duplicates")
    assert rules(report) == {("effect_twice", "drops_no_duplicates")}
    assert "the ledger has 2 entries instead of 1" in report.problems[0].sentence


# -- what cannot be carried -------------------------------------------------------------------------------------------------------
def test_what_needs_the_loop_of_its_process_is_not_said_to_have_been_tried() -> None:
    wanted = ["late_tool_effect: needs_its_loop", "after_tool_effect: needs_its_loop"]
    report = late("needs_its_loop", boundaries=wanted)
    assert (report.ok, advice(report)) == (True, {("late_missed", "needs_its_loop")}), report.table()
    assert "was not tried: its function was called in another process, and raised RuntimeError" in report.notes[0].sentence
    assert {trial.boundaries[0].partition(":")[0]: trial.outcome for trial in report.trials} == {
        "late_tool_effect": "not_reached",
        "after_tool_effect": "ok",
    }
    assert (report.figures.kills, report.figures.tried, report.figures.not_reached) == (2, 1, 1)
    alone = late("needs_its_loop")
    assert rules(alone) == {("not_reached", "")}
    assert {seen.name: seen.verdict for seen in alone.tools}["needs_its_loop"] == "not tried"


@pytest.mark.long
def test_a_carrier_that_never_ends_is_ended_and_its_trial_goes_on(tmp_path: Path) -> None:
    report = matrix(orders, str(tmp_path), boundaries=LATE, timeout_s=20)
    assert [trial.outcome for trial in report.trials] == ["not_reached"], report.table()
    assert "was not tried: its function was called in another process, and did not end in time" in report.notes[0].sentence
    pids = [int(path.name) for path in tmp_path.iterdir()]
    assert len(pids) == 4  # twice undisturbed, the carrier, and the process that made the call again
    assert not any(is_alive(pid) for pid in pids)


def test_an_isolated_tool_is_named_as_not_tried() -> None:
    report = matrix(books, "apart", learn_only=True)
    assert not any("late" in boundary for boundary in report.baseline.boundaries)
    assert any(
        "tool apart runs in its own process" in remark and "late requests were not tried" in remark for remark in report.baseline.remarks
    )


def test_only_calls_that_can_meet_a_late_request_have_the_boundary() -> None:
    listed = matrix(books, "looks", learn_only=True)
    assert [boundary for boundary in listed.baseline.boundaries if "late" in boundary] == ["late_tool_effect: looks (call 2)"]
    at = listed.baseline.boundaries.index("late_tool_effect: looks (call 2)")
    assert listed.baseline.boundaries[at - 1] == "after_tool_effect: looks (call 2)"


# -- twice killed -----------------------------------------------------------------------------------------------------------------
@pytest.mark.long
@pytest.mark.parametrize("which", ["looks", "drops_duplicates"])
def test_a_late_request_is_survived_by_a_run_whose_next_process_dies_as_well(which: str) -> None:
    report = late(which, pairs=True, limit=20, settings=Settings(reconcile_margin_s=0.2))
    assert report.ok, report.table()
    assert {len(trial.world) for trial in report.trials} == {1}
    assert len([trial for trial in report.trials if len(trial.boundaries) == 2]) >= 8


# -- the verdicts of the judge ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(("after_s", "asked", "outcome"), [(22.5, 1, "not_compared"), (22.5, 2, "wrong"), (2.0, 1, "wrong")])
def test_a_hook_is_not_accused_of_what_came_later_than_was_promised(after_s: float, asked: int, outcome: str) -> None:
    """Asked for the first time when it was to be believed already: the machine was slow."""
    denied = Resolution(1, "did_not_happen", "reconcile", after_s)
    told_about = told(call(effect="once", reconcile=True, resolutions=(denied,), quiet_s=22.0))
    lines = (
        *(line("begun", FIRST), line("late", FIRST), Entry("killed", FIRST, 0.0)),
        *(line("asked", SECOND) for _ in range(asked)),
        *(line("told", SECOND, result="not_happened"), line("returned", FIRST, result='"ok"')),
        *(line("begun", SECOND, 2), line("returned", SECOND, 2, result='"ok"')),
    )
    case = evidence(told_about, lines, files={"f": FileSeen("b", 2)})
    (trial,) = judge([case], undisturbed(files={"f": FileSeen("a", 1)}))
    assert trial.outcome == outcome
    assert any(problem.rule == "promise" for problem in trial.problems) == (after_s < 22.0)


def test_while_the_time_is_held_the_runs_own_clock_stands_still(tmp_path: Path) -> None:
    warp = Warp(tmp_path / "ahead", allowed=True)

    async def look() -> list[float]:
        loop, seen = asyncio.get_running_loop(), []
        due = loop.create_task(asyncio.sleep(0.05))
        with warp.real_time(), warp.held():
            seen.append(loop.time())
            await asyncio.to_thread(time.sleep, 0.3)
            seen.append(loop.time())
            assert not due.done()
        await due
        return seen

    with asyncio.Runner(loop_factory=lambda: WarpedLoop(warp)) as runner:
        before, after = runner.run(look())
    assert before == after


# -- a lab that cannot fail proves nothing -------------------------------------------------------------------------------------------
def test_a_perdure_that_believes_the_first_not_found_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    real = victim.live

    def hasty(*args: Any) -> None:
        RunCore._quiet_at = lambda self, call: 0  # type: ignore[method-assign]
        real(*args)

    monkeypatch.setattr(victim, "live", hasty)
    report = late("looks")
    assert {("promise", "looks"), ("effect_twice", "looks")} == rules(report)
    (broken,) = [problem for problem in report.problems if problem.rule == "promise"]
    assert "was believed before its time-out and settle were over" in broken.sentence


def test_without_a_carrier_nothing_is_said_to_have_been_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(victim, "leave_behind", lambda *_: None)
    report = late("looks")
    assert [trial.outcome for trial in report.trials] == ["not_reached"]
    assert rules(report) == {("not_reached", "")}
    assert "no late request arrived" in report.problems[0].sentence


def test_a_carrier_that_does_not_come_up_is_replaced_by_another(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stuck: list[int] = []

    def fork() -> int:
        if stuck:
            monkeypatch.setattr(carrier, "_READY_S", 60.0)
            return forking.fork()
        child = os.fork()
        if child == 0:
            signal.pause()
        stuck.append(child)
        return child

    monkeypatch.setattr(carrier, "fork", fork)
    monkeypatch.setattr(carrier, "_READY_S", 0.2)
    ledger = EffectLedger(tmp_path / "ledger")
    carrier.leave_behind(tmp_path, lambda: book_in(tmp_path), lambda *_: None)
    ledger.note("late", tool="t", run="r", call=1, attempt=1, key="k")
    carrier.Late(tmp_path, ledger, Warp(tmp_path / "ahead", allowed=True), 60.0).arrive_all()
    assert (tmp_path / "book").read_text() == "booked"
    with pytest.raises(ProcessLookupError):
        os.kill(stuck[0], 0)


def test_a_process_that_is_forked_while_the_ledger_is_locked_does_not_keep_the_lock(tmp_path: Path) -> None:
    ledger = EffectLedger(tmp_path / "ledger")
    with ledger._locked(os.O_RDWR | os.O_APPEND | os.O_CREAT):
        child = os.fork()
        if child == 0:
            signal.pause()
    try:
        writing = threading.Thread(target=lambda: ledger.note("killed"), daemon=True)
        writing.start()
        writing.join(60)
        assert not writing.is_alive()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def book_in(folder: Path) -> None:
    (folder / "book").write_text("booked")


# -- processes -----------------------------------------------------------------------------------------------------------------------
STUCK = """
import time
from pathlib import Path
from perdure import Call, Outcome, Run, agent, tool

@tool(timeout=600)
def send() -> None:
    Path("sent").touch()

@send.reconcile
def _() -> Outcome:
    Path("{asked}").touch()
    time.sleep(600)
    return Outcome.not_happened()

@agent(version="1")
async def sender(run: Run) -> None:
    await send()
"""


@pytest.fixture
def interrupted(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A crash test whose carrier waits, and the carrier's pid."""
    asked = tmp_path / "asked"
    (tmp_path / "app.py").write_text(STUCK.replace("{asked}", str(asked)))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-m", "perdure", "crashtest", "app.py:sender", "--boundary", "late", "--timeout", "600"]
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while not asked.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    (mark,) = [path for path in tmp_path.glob("perdure-crashtest-*/trial-*/late-*") if not path.suffix]
    yield process, int(mark.read_text())
    process.kill()
    process.wait(60)
    assert process.stderr is not None
    process.stderr.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_carrier_does_not_outlive_the_lab(interrupted: tuple[subprocess.Popen[bytes], int], number: signal.Signals) -> None:
    process, carrier = interrupted
    assert is_alive(carrier)
    process.send_signal(number)
    process.wait(60)
    deadline = time.monotonic() + 60
    while is_alive(carrier):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_fresh_interpreters_carry_too(tmp_path: Path) -> None:
    """If the import of the target leaves threads, every process is a fresh interpreter."""
    (tmp_path / "app.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
        + STUCK.replace('Path("{asked}").touch()', 'late = Path("sent").exists()')
        .replace("time.sleep(600)\n", "\n")
        .replace("return Outcome.not_happened()", "return Outcome.happened() if late else Outcome.not_happened()")
    )
    done = crashtest(tmp_path, "app.py:sender", "--boundary", "late", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert [trial["outcome"] for trial in document["trials"]] == ["ok"]
    assert document["trials"][0]["effects"] == {"send": 1}


# -- as a user sees it ----------------------------------------------------------------------------------------------------------------
def test_the_command_lists_and_tries_late_requests_and_the_page_tells_of_them(tmp_path: Path) -> None:
    listed = crashtest(tmp_path, f"{SHOP}:shop", "order=o-1", "--list")
    assert [line for line in listed.stdout.splitlines() if line.startswith("late_")] == [
        "late_tool_effect: charge (call 3)",
        "late_tool_effect: send (call 4)",
    ]
    done = crashtest(tmp_path, f"{SHOP}:shop", "order=o-1", "--boundary", "late_tool_effect", "--report", "out.html")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 kills in 2 trials, at 2 of " in done.stdout
    assert "2 as declared" in done.stdout
    page = (tmp_path / "out.html").read_text()
    assert "It took effect only after the next process had looked for it" in page


@pytest.mark.long
def test_on_postgres_a_late_request_arrives_too(postgres_url: str) -> None:
    settings = Settings(reconcile_margin_s=0.3)
    careful = late("looks", url=postgres_url, settings=settings, timeout_s=100)
    assert (careful.ok, [trial.outcome for trial in careful.trials]) == (True, ["ok"]), careful.table()
    hasty = late("rules_it_out", url=postgres_url, settings=settings, timeout_s=100)
    assert ("reconcile_final", "rules_it_out") in rules(hasty)
