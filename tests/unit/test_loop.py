"""asyncio on the deterministic loop: everything without I/O works and replays; everything else is refused by name."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import math
import os
import re
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import urllib.request
from collections.abc import AsyncGenerator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from tests.unit import loop_agents
from tests.unit.drive_tools import SETTINGS, ManualClock, perdure, run
from tests.unit.loop_agents import AGENTS, DETERMINISTIC, replayed

from perdure import Agent, NotAllowedInAgent, Perdure, Run, Settings, agent, tool
from perdure.core import agent_loop
from perdure.core import machine as core_machine
from perdure.core.agent_loop import AgentLoop, DoesNotRest
from perdure.core.machine import CallCompleted, CallTool, CancelAsked, Facts, Finish, Machine, Succeeded, TimerDue
from perdure.interrupts import is_interrupt
from perdure.store.open import open_store

EXPECTED: dict[str, Any] = {
    "uses_gather": ["aa", "bb", "cc", 1, 2, "slept"],
    "uses_wait_for": ["in time", "too late"],
    "uses_timeout": ["in time", False, "too late", "again"],
    "uses_shield": ["shieldedshielded"],
    "uses_cancel": ["please", "now", "done", "cancelled, True"],
    "uses_sleep_zero": ["a0", "b0", "a1", "b1", "a2", "b2"],
    "uses_async_generators": ["a0", "a1", "a2", "a closed", "b closed", "b0", "b1", "b2", "b3", "b4"],
    "uses_context_variables": ["nowhere", "a", "b", "nowhere", "c", "c"],
    "uses_background_tasks": "left 6 behind",
}


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Every agent's run, driven live with the real clock, and its result."""
    path = tmp_path_factory.mktemp("loop") / "journal.db"

    async def live() -> dict[str, Any]:
        # One after the other: the delays of the tools must not depend on other runs.
        async with Perdure(f"sqlite:///{path}", AGENTS, settings=Settings(poll_s=0.002)) as app:
            return {one.name: await app.run(one, id=one.name) for one in AGENTS}

    return path, run(live(), 60)


@pytest.mark.parametrize("name", EXPECTED)
def test_asyncio_answers_as_everywhere(journal: tuple[Path, dict[str, Any]], name: str) -> None:
    assert journal[1][name] == EXPECTED[name]


def test_queues_task_groups_wait_and_locks_do_all_of_their_work(journal: tuple[Path, dict[str, Any]]) -> None:
    output = journal[1]
    assert sorted(item for _, item in output["uses_queue"]) == [f"item {at}" for at in range(9)]
    assert {"a cancelled", "c cancelled", "d cancelled", "(ValueError('b'),)"} < set(output["uses_task_group"])
    assert sorted(output["uses_wait"]) == [f"{name}={name * 2}" for name in "abcdefgh"]
    assert sorted(output["uses_locks"]) == sorted(f"{name} {what}" for name in "abcde" for what in ("in", "out"))
    assert max(_at_once(output["uses_locks"])) == 2
    assert len(output["uses_as_completed"]) == 24
    assert output["uses_run"][-2:] == [True, True]


def _at_once(said: list[str]) -> list[int]:
    inside, counts = 0, []
    for word in said:
        inside += 1 if word.endswith("in") else -1
        counts.append(inside)
    return counts


@pytest.mark.parametrize("code", DETERMINISTIC, ids=lambda code: code.name)
def test_a_fresh_machine_asks_for_the_same_again(journal: tuple[Path, dict[str, Any]], code: Agent[Any, Any]) -> None:
    store = open_store(f"sqlite:///{journal[0]}")
    try:
        assert replayed(store, code.name, code) is None
    finally:
        store.close()


@pytest.mark.parametrize("seed", ["0", "4711"])
def test_another_process_with_another_hash_seed_asks_for_the_same_again(journal: tuple[Path, dict[str, Any]], seed: str) -> None:
    path = os.pathsep.join(["src", *sys.path])
    done = subprocess.run(
        [sys.executable, loop_agents.__file__, str(journal[0])],
        env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = dict(json.loads(line) for line in done.stdout.splitlines())
    assert len(found) == len(AGENTS)
    chance = found.pop("is_left_to_chance")
    assert found == dict.fromkeys(found)
    assert chance is not None, "the control must differ"
    assert re.search(r"call \d+: echo", chance)


# -- refusals
# -----------------------------------------------------------------------------------------------------------
async def _nothing() -> None: ...


async def _streams(_: Path) -> None:
    await asyncio.open_connection("127.0.0.1", 1)


async def _server(_: Path) -> None:
    await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)


async def _loop_socket(_: Path) -> None:
    with socket.socket() as line:
        await asyncio.get_running_loop().sock_connect(line, ("127.0.0.1", 1))


async def _look_up(_: Path) -> None:
    await asyncio.get_running_loop().getaddrinfo("localhost", 80)


async def _to_thread(_: Path) -> None:
    await asyncio.to_thread(print)


async def _executor(_: Path) -> None:
    await asyncio.get_running_loop().run_in_executor(None, print)


async def _from_thread(_: Path) -> None:
    asyncio.get_running_loop().call_soon_threadsafe(print)


async def _subprocess_exec(_: Path) -> None:
    await asyncio.create_subprocess_exec("true")


async def _subprocess_shell(_: Path) -> None:
    await asyncio.create_subprocess_shell("true")


async def _reader(_: Path) -> None:
    asyncio.get_running_loop().add_reader(0, print)


async def _signal(_: Path) -> None:
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, print)


async def _run_until_complete(_: Path) -> None:
    asyncio.get_running_loop().run_until_complete(asyncio.get_running_loop().create_future())


async def _stop(_: Path) -> None:
    asyncio.get_running_loop().stop()


async def _as_completed_of_a_set(_: Path) -> None:
    waiting = {_nothing(), _nothing()}
    try:
        for first in asyncio.as_completed(waiting):
            await first
    finally:
        for one in waiting:
            one.close()


async def _blocking_connection(_: Path) -> None:
    socket.create_connection(("127.0.0.1", 1))


async def _blocking_bind(_: Path) -> None:
    with socket.socket() as line:
        line.bind(("127.0.0.1", 0))


async def _blocking_look_up(_: Path) -> None:
    socket.getaddrinfo("localhost", 80)


async def _blocking_datagram(_: Path) -> None:
    with socket.socket(type=socket.SOCK_DGRAM) as line:
        line.sendto(b"x", ("127.0.0.1", 9))


async def _url(_: Path) -> None:
    urllib.request.urlopen("http://127.0.0.1:1/")


async def _file_url(path: Path) -> None:
    urllib.request.urlopen(f"file://{path}")


async def _blocking_subprocess(_: Path) -> None:
    subprocess.run(["true"], check=True)


async def _system(_: Path) -> None:
    os.system("true")


async def _spawn(_: Path) -> None:
    os.posix_spawn("/bin/true", ["true"], {})


async def _fork(_: Path) -> None:
    if os.fork() == 0:
        os._exit(0)


async def _exec(_: Path) -> None:
    os.execv("/nowhere/true", ["true"])


async def _write(path: Path) -> None:
    (path / "file").write_text("x")


async def _append(path: Path) -> None:
    with open(path / "file", "a") as file:
        file.write("x")


async def _low_level_write(path: Path) -> None:
    os.close(os.open(path / "file", os.O_WRONLY | os.O_CREAT))


async def _database(path: Path) -> None:
    sqlite3.connect(path / "file").close()


async def _make_folder(path: Path) -> None:
    (path / "folder").mkdir()


async def _rename(path: Path) -> None:
    os.replace(path / "nothing", path / "file")


async def _remove(path: Path) -> None:
    (path / "nothing").unlink()


async def _remove_tree(path: Path) -> None:
    shutil.rmtree(path / "nothing")


async def _link(path: Path) -> None:
    (path / "file").symlink_to(path)


async def _change_mode(path: Path) -> None:
    os.chmod(path, 0o700)


async def _thread(_: Path) -> None:
    threading.Thread(target=print).start()


BY_THE_LOOP = [
    *(
        _streams,
        _server,
        _loop_socket,
        _look_up,
        _to_thread,
        _executor,
        _from_thread,
        _subprocess_exec,
        _subprocess_shell,
        _reader,
        _signal,
    ),
    *(_run_until_complete, _stop),
]
BY_THE_GUARD = [
    *(_blocking_connection, _blocking_bind, _blocking_look_up, _blocking_datagram, _url, _file_url, _blocking_subprocess, _system, _spawn),
    *(_fork, _exec, _write, _append, _low_level_write, _database),
    *(_make_folder, _rename, _remove, _remove_tree, _link, _change_mode),
    pytest.param(_thread, marks=pytest.mark.skipif(sys.version_info < (3, 12), reason="CPython announces threads from 3.12 on")),
]


@pytest.mark.parametrize("touch", [*BY_THE_LOOP, *BY_THE_GUARD], ids=lambda touch: touch.__name__.strip("_"))
def test_touching_the_world_is_refused_and_says_where_it_belongs(
    touch: Callable[[Path], Coroutine[Any, Any, None]], tmp_path: Path
) -> None:
    @agent(version="1")
    async def reckless(run: Run) -> str:
        try:
            await touch(tmp_path)
        except NotAllowedInAgent as refused:
            return str(refused)
        return "it was allowed"

    async def main() -> str:
        async with perdure(None, [reckless]) as app:
            return str(await app.run(reckless))

    said = run(main())
    assert "in a tool" in said
    assert "an agent may not" in said
    assert list(tmp_path.iterdir()) == []


def test_as_completed_of_a_set_of_coroutines_is_refused_since_its_order_is_left_to_chance() -> None:
    @agent(version="1")
    async def reckless(run: Run) -> str:
        try:
            await _as_completed_of_a_set(Path())
        except NotAllowedInAgent as refused:
            return str(refused)
        return "it was allowed"

    async def main() -> str:
        async with perdure(None, [reckless]) as app:
            return str(await app.run(reckless))

    assert "give it a list" in run(main())


def test_running_another_loop_inside_an_agent_is_refused_by_asyncio_itself() -> None:
    @agent(version="1")
    async def nested(run: Run) -> str:
        inner = _nothing()
        try:
            asyncio.run(inner)
        except RuntimeError as refused:
            inner.close()
            return str(refused)
        return "it was allowed"

    async def main() -> str:
        async with perdure(None, [nested]) as app:
            return str(await app.run(nested))

    assert "running event loop" in run(main())


def test_the_same_things_are_fine_in_a_tool(tmp_path: Path) -> None:
    @tool(effect="idempotent")
    def sync_tool() -> str:
        (tmp_path / "file").write_text("x")
        sqlite3.connect(tmp_path / "database").close()
        threading.Thread(target=print).start()
        return subprocess.run(["echo", "hello"], capture_output=True, text=True, check=True).stdout.strip()

    @tool(effect="idempotent")
    async def async_tool() -> str:
        process = await asyncio.create_subprocess_exec("true")
        (tmp_path / "other").write_text("x")
        return f"{await process.wait()} {socket.getaddrinfo('127.0.0.1', 80)[0][4][0]}"

    @agent(version="1")
    async def careful(run: Run) -> list[str]:
        return [await sync_tool(), await async_tool()]

    async def main() -> list[str]:
        async with perdure(None, [careful]) as app:
            found: list[str] = await app.run(careful)
            (tmp_path / "after").write_text("and so they are outside of both")
            return found

    assert run(main()) == ["hello", "0 127.0.0.1"]
    assert {path.name for path in tmp_path.iterdir()} == {"file", "database", "other", "after"}


def test_an_agent_may_read_import_and_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "imported_by_an_agent.py").write_text("ANSWER = 42\n")
    (tmp_path / "prompt.txt").write_text("be kind")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    handler = logging.FileHandler(tmp_path / "agent.log", delay=True)
    logger = logging.getLogger("tests.agent")
    logger.addHandler(handler)

    @agent(version="1")
    async def quiet(run: Run) -> str:
        import imported_by_an_agent  # type: ignore[import-not-found]

        logger.warning("hello from an agent")
        return f"{(tmp_path / 'prompt.txt').read_text()} {imported_by_an_agent.ANSWER}"

    async def main() -> str:
        async with perdure(None, [quiet]) as app:
            return str(await app.run(quiet))

    try:
        assert run(main()) == "be kind 42"
    finally:
        logger.removeHandler(handler)
        handler.close()
    assert (tmp_path / "agent.log").read_text() == "hello from an agent\n"
    assert list((tmp_path / "__pycache__").glob("imported_by_an_agent*"))


# -- the loop alone
# -----------------------------------------------------------------------------------------------------
class Owner:
    cause = 0


def loop_of(max_steps: int = 1000) -> AgentLoop:
    return AgentLoop(Owner(), max_steps)  # type: ignore[abstract]


def test_the_clock_never_goes_back() -> None:
    loop = loop_of()
    loop.advance(100.0)
    loop.advance(50.0)
    assert loop.time() == 100.0


def test_a_loop_that_only_yields_is_stopped() -> None:
    async def spin() -> None:
        while True:
            await asyncio.sleep(0)

    loop = loop_of(max_steps=500)
    task = loop.create_task(spin())
    with pytest.raises(DoesNotRest, match="500 steps"):
        loop.run_until_quiet()
    assert not task.done()
    assert asyncio.events._get_running_loop() is None, "whoever runs next must not find the agent's loop"


def test_tasks_hash_by_their_number_and_are_still_themselves() -> None:
    first, second = loop_of(), loop_of()
    tasks = [loop.create_task(_nothing()) for loop in (first, second)]
    assert hash(tasks[0]) == hash(tasks[1]) == 1
    assert tasks[0] != tasks[1]
    assert len(set(tasks)) == 2
    first.run_until_quiet()
    second.run_until_quiet()
    assert first.tasks == second.tasks == {}


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="CPython keeps no set of all tasks from 3.14 on")
def test_tasks_of_many_runs_do_not_meet_in_the_set_that_asyncio_has_of_all_tasks() -> None:
    """Every run has a task 1.

    If the hash were only this number, each task would be compared with the tasks of all other runs.
    """
    loops = [loop_of() for _ in range(50)]
    tasks = [loop.create_task(_nothing()) for loop in loops]
    every = getattr(asyncio.tasks, "_scheduled_tasks", None) or asyncio.tasks._all_tasks  # type: ignore[attr-defined]
    kept = [hash(found) for found in every.data if found() in tasks]
    assert len(set(kept)) == len(tasks)
    assert {place % 2**12 for place in kept} == {1}, "those of one run are still in the order of their numbers"
    for loop in loops:
        loop.run_until_quiet()


def test_futures_hash_by_their_number_so_that_a_set_of_them_has_the_same_order_in_every_process() -> None:
    first, second = ([loop.create_future() for _ in range(40)] for loop in (loop_of(), loop_of()))
    assert [hash(future) for future in first] == [hash(future) for future in second] == list(range(1, 41))
    places = [[futures.index(future) for future in set(futures)] for futures in (first, second)]
    assert places[0] == places[1]
    assert first[0] != second[0]


async def _numbers(closed: list[str]) -> AsyncGenerator[int, None]:
    try:
        yield 1
        yield 2
    finally:
        await asyncio.sleep(0)
        closed.append("closed")


def test_an_async_generator_that_the_agent_lets_go_of_is_closed_as_everywhere() -> None:
    loop, closed = loop_of(), list[str]()

    async def leaves() -> None:
        async for _ in _numbers(closed):
            break

    task = loop.create_task(leaves())
    loop.run_until_quiet()
    assert (task.done(), closed, loop.strays) == (True, ["closed"], [])


@pytest.mark.parametrize("where", ["in the middle of an activation", "between two of them"])
def test_an_async_generator_that_the_garbage_collector_finds_is_left_alone(where: str) -> None:
    """When it finds one is left to chance: what its closing calls would come at another place in every process."""
    loop, closed = loop_of(), list[str]()

    async def leaves() -> None:
        circle: list[Any] = [_numbers(closed)]
        circle.append(circle)
        await anext(circle[0])

    gc.disable()
    try:
        task = loop.create_task(leaves())
        loop.run_until_quiet()
        if where == "between two of them":
            gc.collect()
        else:
            loop.call_soon(gc.collect)
        loop.run_until_quiet()
    finally:
        gc.enable()
    assert (task.done(), closed, len(loop.strays), loop.tasks) == (True, [], 1, {})


def test_a_collection_at_another_moment_does_not_make_a_run_diverge(tmp_path: Path) -> None:
    collects = [False]

    @agent(version="1")
    async def litters(run: Run) -> str:
        async def lines() -> AsyncGenerator[int, None]:
            try:
                yield 1
            finally:
                await loop_agents.echo("closed", 0)

        circle: list[Any] = [lines()]
        circle.append(circle)
        await anext(circle[0])
        del circle
        if collects[0]:
            gc.collect()
        await loop_agents.echo("one", 0)
        await asyncio.sleep(60)
        return str(await loop_agents.echo("two", 0))

    clock = ManualClock()

    async def drive() -> Any:
        async with perdure(tmp_path / "db", [litters], clock) as app:
            await app.start(litters, id="r")
            return await app.engine.drive("r", wait=False)

    gc.disable()
    try:
        assert run(drive()).status == "waiting"
        collects[0] = True
        clock.advance(61)
        row = run(drive())
    finally:
        gc.enable()
    assert (row.status, row.error) == ("succeeded", None)


@pytest.mark.parametrize("when", [math.nan, math.inf, 1e300])
def test_a_timer_beyond_all_time_is_refused(when: float) -> None:
    with pytest.raises(ValueError, match="year 9999"):
        loop_of().call_at(when, print)


def test_a_timer_that_was_cancelled_is_no_longer_pending() -> None:
    loop = loop_of()
    first, second = loop.call_later(5, print), loop.call_later(1, print)
    second.cancel()
    assert loop.next_timer() == (5.0, 1)
    first.cancel()
    assert loop.next_timer() is None
    assert not loop.fire(1)


def test_an_exception_in_a_callback_is_reported_and_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    loop = loop_of()
    seen: list[str] = []
    loop.call_soon(lambda: 1 / 0)
    loop.call_soon(seen.append, "after")
    loop.run_until_quiet()
    assert seen == ["after"]
    assert "Exception in callback" in caplog.text
    loop.set_exception_handler(lambda _, context: seen.append(type(context["exception"]).__name__))
    loop.call_soon(lambda: 1 / 0)
    loop.run_until_quiet()
    assert seen == ["after", "ZeroDivisionError"]


def test_sys_exit_in_a_task_ends_that_task_alone() -> None:
    loop = loop_of()

    async def leaves() -> None:
        sys.exit(3)

    task, other = loop.create_task(leaves()), loop.create_task(_nothing())
    loop.run_until_quiet()
    assert isinstance(task.exception(), SystemExit)
    assert other.done()


def test_a_machine_needs_no_app() -> None:
    """The waist: start, deliver, commands. No store, no clock, no running loop."""

    async def main(machine: Machine) -> str:
        await asyncio.sleep(5)
        return str(await machine.call_tool(loop_agents.echo, b'{"delay_ms":0,"what":"x"}'))

    machine = Machine(Facts("r", "default", None, "main", "1"), main)
    assert machine.start(1_000_000) == []
    assert machine.next_timer() == (6_000_000, 1)
    (call,) = machine.deliver(6_000_000, TimerDue(1))
    assert isinstance(call, CallTool)
    assert (call.number, call.args) == (1, b'{"delay_ms":0,"what":"x"}')
    assert machine.deliver(7_000_000, CallCompleted(1, b'"y"')) == [Finish(Succeeded(b'"y"'))]
    assert machine.finished
    assert machine.now == 7_000_000


def test_a_machine_that_was_cancelled_before_it_started_never_begins() -> None:
    begun: list[int] = []

    async def main(machine: Machine) -> None:
        begun.append(1)

    machine = Machine(Facts("r", "default", None, "main", "1"), main)
    assert machine.deliver(1, CancelAsked()) == []
    (finish,) = machine.start(2)
    assert type(finish.outcome).__name__ == "Cancelled"  # type: ignore[union-attr]
    assert begun == []


# -- inside of a task of another loop -----------------------------------------------------------------------------------------
# From CPython 3.14 on a thread has one current task, whatever the number of its loops.
def test_an_agent_runs_and_is_let_go_inside_of_a_task_as_everywhere() -> None:
    seen: list[object] = []

    async def main(machine: Machine) -> None:
        seen.append(type(asyncio.current_task()).__name__)
        try:
            async with asyncio.timeout(1):
                await asyncio.gather(asyncio.sleep(5), asyncio.sleep(6))
        except TimeoutError:
            seen.append("too late")
        try:
            await asyncio.sleep(60)
        finally:
            seen.append(asyncio.current_task())  # no task of the agent runs any more, and the outer one is not the agent's

    async def outside() -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        machine = Machine(Facts("r", "default", None, "main", "1"), main)
        assert machine.start(0) == []
        assert asyncio.current_task() is task
        due = machine.next_timer()
        assert due is not None
        assert machine.deliver(due[0], TimerDue(due[1])) == []
        machine.close()
        assert (asyncio.get_running_loop(), asyncio.current_task()) == (loop, task)
        await asyncio.sleep(0)  # the task can go on

    asyncio.run(outside())
    assert seen == ["AgentTask", "too late", None]


class Struck:
    """Lets a signal arrive right after the call with this number among those that change what asyncio believes to be running."""

    CHANGES = (
        (asyncio.events, "_set_running_loop"),
        (sys, "set_asyncgen_hooks"),
        *((module, name) for module in (agent_loop, core_machine) for name in ("set_current_task", "set_running_loop")),
    )

    def __init__(self, at: int) -> None:
        self.at = at
        self.calls = 0

    def __enter__(self) -> Struck:
        self.before = signal.signal(signal.SIGUSR1, self.interrupt)
        gc.disable()  # a machine of another test, closed by the collector just now, would be struck instead
        self.patched = pytest.MonkeyPatch()
        for module, name in self.CHANGES:
            if hasattr(module, name):
                self.patched.setattr(module, name, self.struck_after(getattr(module, name)))
        return self

    def __exit__(self, *_: object) -> None:
        self.patched.undo()
        signal.signal(signal.SIGUSR1, self.before)
        gc.enable()  # last: until then, the collector could close a machine of another test, which would be struck

    def interrupt(self, signum: int, frame: object) -> None:
        raise KeyboardInterrupt

    def struck_after(self, change: Callable[..., object]) -> Callable[..., object]:
        def changed(*args: object) -> object:
            answer = change(*args)
            self.calls += 1
            if self.calls == self.at:
                signal.raise_signal(signal.SIGUSR1)
            return answer

        return changed


@pytest.mark.parametrize("doing", ["run", "replay", "close"])
def test_ctrl_c_while_an_agent_is_entered_or_left_finds_the_outer_loop_and_its_task_as_they_were(doing: str) -> None:
    async def main(machine: Machine) -> None:
        await asyncio.sleep(60)

    async def outside(at: int) -> bool:
        """Whether the signal arrived at all."""
        loop, task, hooks = asyncio.get_running_loop(), asyncio.current_task(), sys.get_asyncgen_hooks()
        machine = Machine(Facts("r", "default", None, "main", "1"), main, is_interrupt=is_interrupt)
        if doing == "close":
            machine.start(0)
        with Struck(at) as struck:
            try:
                match doing:
                    case "run":
                        machine.start(0)
                    case "replay":
                        with machine.replayed():
                            machine.start(0)
                    case "close":
                        machine.close()
            except KeyboardInterrupt:
                assert struck.calls >= at
        running = asyncio.events._get_running_loop()
        asyncio.events._set_running_loop(loop)  # otherwise the error would be shown as another error
        assert running is loop
        assert asyncio.current_task() is task
        assert sys.get_asyncgen_hooks() == hooks
        machine.close()
        await asyncio.sleep(0)
        return struck.calls >= at

    arrived = [asyncio.run(outside(at)) for at in range(1, 10)]
    assert arrived.count(True) >= 2
    assert not arrived[-1], "every call was struck"


def test_the_settings_of_these_tests_park_at_any_wait() -> None:
    assert SETTINGS.park_after_s == 0
    assert ManualClock(5).now() == 5_000_000
    assert len(AGENTS) <= 100, "a list of runs has so many at most"
