"""How the work grows, in operations and never in seconds: commits, statements, folded events, function calls, bytes.

bench/ measures time. The results here are the same on any machine, however busy, and show which step has become more
than one step.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import apsw
import pytest
from tests.unit.store_tools import python

from perdure import Agent, Call, Perdure, Run, Settings, agent, tool
from perdure.core.codec import Payload
from perdure.core.events import Event, RunSucceeded
from perdure.core.machine import Facts
from perdure.core.replay import replay
from perdure.core.state import RunState, fold
from perdure.engine.local import worker
from perdure.engine.local.worker import Worker
from perdure.store.open import open_store

# No renewal and hardly a poll in between: what comes with time would be counted as if it came with a call.
SETTINGS = Settings(lease_s=3600, poll_s=1.0)
DIES = "TEST_SCALING_DIES"


@tool(effect="idempotent")
async def step(text: str) -> str:
    return text


@tool(effect="read")
async def look(text: str) -> str:
    return text


@tool(effect="idempotent")
async def last_step() -> None:
    if DIES in os.environ:
        os.kill(os.getpid(), signal.SIGKILL)


@agent(version="1")
async def steps(run: Run, calls: int) -> int:
    for number in range(calls):
        await step(f"{number:020d}")
    return calls


@agent(version="1")
async def looks(run: Run, calls: int) -> int:
    for number in range(calls):
        await look(f"{number:020d}")
    return calls


@agent(version="1")
async def mortal(run: Run, calls: int) -> int:
    for number in range(calls):
        await step(f"{number:020d}")
    await last_step()
    return calls


# -- counting ---------------------------------------------------------------------------------------------------------------
class Statements:
    """Every statement that any connection of this process executes."""

    def __init__(self) -> None:
        self.all: list[str] = []

    def of(self, *words: str) -> list[str]:
        return [sql for sql in self.all if all(word in sql for word in words)]

    @property
    def commits(self) -> int:
        return len(self.of("COMMIT"))

    @property
    def but_polls(self) -> list[str]:
        """Without the question whether anything has changed, which comes with time and not with work."""
        return [sql for sql in self.all if "data_version" not in sql]

    def _note(self, _: apsw.Cursor, sql: str, __: object) -> bool:
        self.all.append(" ".join(sql.split()))
        return True

    def __call__(self, connection: apsw.Connection) -> None:
        connection.exec_trace = self._note


@contextmanager
def statements() -> Iterator[Statements]:
    """The statements of the connections that are opened in this block."""
    seen = Statements()
    apsw.connection_hooks.append(seen)
    try:
        yield seen
    finally:
        apsw.connection_hooks.remove(seen)


def function_calls(work: Callable[[], object]) -> int:
    """How many functions, of Python and of C, the work calls on this thread."""
    count = 0

    def note(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count


def grows_in_step(cost: Callable[[int], int], size: int) -> bool:
    """Whether three times the size costs three times as much and not nine: the third part may not cost much more than the second."""
    one, two, three = cost(size), cost(2 * size), cost(3 * size)
    return three - two <= 1.2 * (two - one)


# -- driving ----------------------------------------------------------------------------------------------------------------
async def drive(url: str, subject: Agent[..., Any], calls: int, settings: Settings = SETTINGS) -> int:
    """One run from start to end; the number of its events."""
    async with Perdure(url, agents=[subject], settings=settings) as app:
        handle = await app.start(subject, calls)
        row = await app.engine.drive(handle.id)
        assert row.status == "succeeded", row.error
        return row.seq


async def serve(url: str, runs: int, calls: int) -> int:
    """So many runs at a time, from a queue; the number of their appends."""
    appends, left, stop = 0, runs, asyncio.Event()

    def count(run_id: str, events: Sequence[Event]) -> None:
        nonlocal appends, left
        appends += 1
        left -= sum(isinstance(event.body, RunSucceeded) for event in events)
        if not left:
            stop.set()

    async with Perdure(url, agents=[steps], settings=SETTINGS, observers=[count]) as app:
        for _ in range(runs):
            await app.start(steps, calls)
        await app.work(stop=stop)
    return appends


def killed(folder: Path, calls: int, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a journal whose run `r` has made so many calls, and whose process died inside the next one."""
    url = f"sqlite:///{folder / f'killed-{calls}.db'}"
    program = (
        "import asyncio, sys\nfrom perdure import Perdure\nfrom tests.e2e.test_scaling import mortal\n"
        "async def main():\n"
        "    async with Perdure(sys.argv[1], agents=[mortal]) as app:\n"
        "        await app.run(mortal, int(sys.argv[2]), id='r')\n"
        "asyncio.run(main())\n"
    )
    with monkeypatch.context() as context:
        context.setenv(DIES, "1")
        process = python(program, url, calls)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL, errors
    return url


async def resume(url: str) -> int:
    """The killed run, to its end; the number of its events."""
    async with Perdure(url, agents=[mortal], settings=SETTINGS) as app:
        row = await app.engine.drive("r")
        assert row.status == "succeeded", row.error
        return row.seq


# -- commits ----------------------------------------------------------------------------------------------------------------
def test_a_call_in_a_sequence_costs_one_commit(tmp_path):
    def commits(calls: int) -> int:
        with statements() as seen:
            asyncio.run(drive(f"sqlite:///{tmp_path / f'{calls}.db'}", steps, calls))
        return seen.commits

    assert commits(60) - commits(20) == 40


def test_a_call_in_a_sequence_costs_the_same_few_statements(tmp_path):
    def executed(calls: int) -> int:
        with statements() as seen:
            asyncio.run(drive(f"sqlite:///{tmp_path / f'{calls}.db'}", steps, calls))
        return len(seen.but_polls) - len(seen.of("perdure_inbox"))  # looked into once a second at most, for all runs together

    # BEGIN, the guard, two events and COMMIT.
    assert executed(60) - executed(20) == 5 * 40


def test_reads_alone_cost_no_commit(tmp_path):
    # Buffered events are written with the end of the run, because nothing else of it must be durable.
    patient = Settings(lease_s=3600, poll_s=1.0, flush_s=3600)

    def commits(calls: int) -> int:
        with statements() as seen:
            asyncio.run(drive(f"sqlite:///{tmp_path / f'{calls}.db'}", looks, calls, patient))
        return seen.commits

    assert commits(100) == commits(10)


def test_runs_at_the_same_time_share_commits(tmp_path):
    with statements() as seen:
        appends = asyncio.run(serve(f"sqlite:///{tmp_path / 'j.db'}", runs=50, calls=10))
    created = 50
    assert appends >= 50 * 11  # each run: ten intents, each with the result before it, and its end
    assert seen.commits - created < appends / 2


def test_an_idle_worker_asks_and_writes_nothing(tmp_path):
    async def idle(seen: Statements) -> None:
        settings = Settings(lease_s=3600, poll_s=0.001)
        async with Perdure(f"sqlite:///{tmp_path / 'j.db'}", agents=[steps], settings=settings) as app, asyncio.TaskGroup() as group:
            group.create_task(app.work())
            await _polls(seen, 5)
            begun = len(seen.but_polls)
            await _polls(seen, 105)
            # It looks for dead workers and for something to claim once a second, not with every poll.
            assert len(seen.but_polls) - begun <= 50
            assert [sql for sql in seen.but_polls[begun:] if sql.startswith(("INSERT", "UPDATE", "DELETE"))] == []
            app.drain()

    with statements() as seen:
        asyncio.run(idle(seen))


async def _polls(seen: Statements, count: int) -> None:
    while len(seen.of("data_version")) < count:
        await asyncio.sleep(0.001)


# -- resuming ---------------------------------------------------------------------------------------------------------------
def test_resuming_a_run_reads_its_journal_once_and_asks_for_no_call(tmp_path, monkeypatch):
    def executed(calls: int) -> int:
        url = killed(tmp_path, calls, monkeypatch)
        with statements() as seen:
            asyncio.run(resume(url))
        # The journal is read once, and the type of its last event once: a run that has ended is not claimed.
        assert len(seen.of("SELECT seq", "FROM perdure_events")) == 1
        assert len(seen.of("SELECT", "FROM perdure_events")) == 2
        return len(seen.but_polls)

    # 580 more calls: on a slow machine the inbox is looked into a few times meanwhile, and that is all.
    assert executed(600) - executed(20) <= 20


def test_resuming_a_run_folds_every_event_once(tmp_path, monkeypatch):
    url = killed(tmp_path, 200, monkeypatch)
    folded: list[int] = []
    apply = RunState.apply

    def noted(state: RunState, event: Event) -> None:
        folded.append(event.seq)
        apply(state, event)

    monkeypatch.setattr(RunState, "apply", noted)
    events = asyncio.run(resume(url))
    assert events > 400
    assert folded == list(range(1, events + 1))


def test_folding_and_replaying_grow_with_the_journal_and_no_faster(tmp_path):
    journals = {calls: asyncio.run(journal(tmp_path, calls)) for calls in (100, 200, 300)}
    assert grows_in_step(lambda calls: function_calls(lambda: fold(journals[calls])), 100)
    assert grows_in_step(lambda calls: function_calls(lambda: replayed(journals[calls])), 100)


async def journal(folder: Path, calls: int) -> list[Event]:
    """The events of a finished run of so many calls."""
    url = f"sqlite:///{folder / f'{calls}.db'}"
    await drive(url, steps, calls)
    store = open_store(url)
    try:
        (row,) = store.list()
        return store.read(row.run_id)
    finally:
        store.close()


def replayed(events: list[Event]) -> None:
    created = fold(events[:1]).created
    assert created is not None
    facts = Facts(created.run_id, created.tenant, created.actor, created.agent, created.version)
    machine = steps.machine(facts, inline(created.input), 1_000_000)
    replay(machine, events, inline)
    assert machine.finished


def inline(payload: Payload) -> bytes:
    assert payload.inline is not None
    return payload.inline


def test_folding_copies_nothing(tmp_path):
    """A copy is one function call however much it copies, so that counting calls would not see it."""
    events = asyncio.run(journal(tmp_path, 10))
    state = fold(events[:4])
    before = (state.calls, state.open, state.calls[1])
    for event in events[4:]:
        state.apply(event)
    assert len(state.calls) == 10
    assert all(one is other for one, other in zip(before, (state.calls, state.open, state.calls[1]), strict=True))


def test_a_long_run_does_not_slow_down(tmp_path):
    def cost(calls: int) -> int:
        return function_calls(lambda: asyncio.run(drive(f"sqlite:///{tmp_path / f'{calls}.db'}", steps, calls)))

    assert grows_in_step(cost, 150)


def test_a_queued_run_of_one_call_takes_fewer_than_930_function_calls(tmp_path):
    """From the start to the end of a run, for nearly all of its time.

    Work that is repeated needlessly for each run shows here.
    """

    def cost(runs: int) -> int:
        return function_calls(lambda: asyncio.run(serve(f"sqlite:///{tmp_path / f'{runs}.db'}", runs, 1)))

    cost(20)  # work that is done once per process
    assert cost(150) - cost(50) < 100 * 930


def test_work_that_grows_faster_is_noticed():
    def look_back_at_everything(size: int) -> int:
        return function_calls(lambda: [abs(earlier) for later in range(size) for earlier in range(later)])

    assert not grows_in_step(look_back_at_everything, 50)


# -- space ------------------------------------------------------------------------------------------------------------------
def test_a_call_takes_less_than_700_bytes(tmp_path):
    def size(calls: int) -> int:
        path = tmp_path / f"{calls}.db"
        asyncio.run(drive(f"sqlite:///{path}", steps, calls))  # closing empties the log into the file
        assert not path.with_name(f"{path.name}-wal").exists()
        bytes_on_disk: int = path.stat().st_size
        return bytes_on_disk

    assert (size(400) - size(100)) / 300 < 700


# -- imports ----------------------------------------------------------------------------------------------------------------
HEAVY = ("pydantic", "click", "rich", "docstring_parser", "sqlite3", "http.client", "email", "multiprocessing", "unittest", "xml")
PROGRAM = """
import asyncio, sys
from perdure import Perdure, Run, agent, tool
@tool
async def one(text: str, count: int = 1) -> dict: return {text: count}
@agent(version="1")
async def plain(run: Run, text: str) -> dict: return await one(text)
async def main():
    async with Perdure("sqlite://", agents=[plain]) as app:
        assert await app.run(plain, "x") == {"x": 1}
asyncio.run(main())
"""


def loaded_by(program: str) -> list[str]:
    program += f"\nimport sys\nprint(*(name for name in {HEAVY!r} if name in sys.modules))"
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True).stdout.split()


def test_a_whole_run_of_plain_types_loads_no_heavy_module():
    assert loaded_by(PROGRAM) == []


def test_a_heavy_module_is_noticed():
    assert loaded_by("import email, unittest") == ["email", "unittest"]


# -- waiting ----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("end", ["one after another", "all at once"])
def test_who_waits_for_one_of_many_results_beside_a_worker_hears_of_its_own_run_alone(end):
    runs, woken = 150, 0
    codes = (Worker._goes_on_here.__code__, worker._end_nap.__code__)

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal woken
        woken += event == "call" and frame.f_code in codes

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        asyncio.run(_await_all(runs, end))
    finally:
        sys.setprofile(before)
    # Each caller wakes a few times, and once a second. If every change woke every caller, it would be at least 150
    # times.
    assert woken <= 40 * runs


async def _await_all(runs: int, end: str) -> None:
    guests: dict[str, asyncio.Future[None]] = {}
    full = asyncio.Event()

    @tool(effect="read")
    async def stay(call: Call) -> None:
        guests[call.run_id] = asyncio.get_running_loop().create_future()
        if len(guests) == runs:
            full.set()
        await guests[call.run_id]

    @agent(version="1")
    async def guest(run: Run) -> None:
        await stay()

    async with Perdure("sqlite://", agents=[guest], settings=SETTINGS) as app, asyncio.TaskGroup() as group:
        group.create_task(app.work())
        handles = await asyncio.gather(*(app.start(guest) for _ in range(runs)))
        waiting = [group.create_task(handle.result()) for handle in handles]
        await full.wait()
        for handle, result in zip(handles, waiting, strict=True):
            guests[handle.id].set_result(None)
            if end == "one after another":
                await result
        await asyncio.gather(*waiting)
        app.drain()
