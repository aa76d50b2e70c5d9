"""Tools in their own process: real processes, real signals, and a check of the process table afterwards."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from perdure.core.events import Usage
from perdure.core.outcomes import Performed, Raised, Returned, Unrecordable
from perdure.engine.local.attempts import Attempt, attempt
from perdure.engine.local.isolated_main import framed, unframed
from perdure.engine.local.isolation import Isolated
from perdure.engine.threads import Threads
from perdure.tool import Call, Tool

TOOLS = '''
import asyncio, ctypes, os, signal, subprocess, sys, threading, time
from datetime import datetime
from perdure.errors import Fatal, NotSent, RetryLater
from perdure.tool import Call, tool

@tool(isolate=True)
def where(n: int, at: datetime, call: Call) -> list:
    print("printed to stdout")
    os.write(1, b"written to stdout")
    return [n, type(at).__name__, call.key, call.number, call.tenant, call.deadline.isoformat(), os.getpid(), os.getsid(0), __name__]

@tool(isolate=True)
async def asynchronous(text: str) -> str:
    await asyncio.sleep(0)
    return text

@tool(isolate=True)
def large(size: int) -> str:
    return "x" * size

@tool(isolate=True)
def beats(call: Call) -> int:
    for done in range(3):
        call.heartbeat({"done": done})
    return 3

@tool(isolate=True)
def spends(how: str, call: Call) -> str:
    call.spend(usd=0.25, tokens_in=7, model="small")
    call.spend(tokens_out=2)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "raise":
        raise Fatal("no")
    if how == "hang":
        time.sleep(60)
    return how

@tool(isolate=True)
def wrong_amount(call: Call) -> str:
    try:
        call.spend(usd=-1, tokens_in=5)
    except ValueError as error:
        return str(error)
    return "spent"

@tool(isolate=True)
def goes_on(call: Call) -> object:
    return call.last_progress

@tool(isolate=True, heartbeat_timeout=1)
def silent(call: Call) -> None:
    call.heartbeat("loaded")
    time.sleep(60)

@tool(isolate=True)
def beats_often(call: Call) -> int:
    for done in range(10_000):
        call.heartbeat({"done": done})
    return 10_000

@tool(isolate=True)
def chatters(size: int, call: Call) -> str:
    """Threads that speak all the time, also while the answer, much larger than a pipe, is on its way."""
    def chatter() -> None:
        while True:
            call.heartbeat("h" * 20_000)
            call.spend(tokens_in=1)
    for _ in range(4):
        threading.Thread(target=chatter, daemon=True).start()
    time.sleep(0.1)
    return "x" * size

@tool(isolate=True)
def raises(what: str) -> None:
    raise {"not_sent": NotSent("queue"), "later": RetryLater(after=9), "fatal": Fatal("no"), "exit": SystemExit(4),
           "interrupt": KeyboardInterrupt(), "stop": StopIteration()}[what]

@tool(isolate=True)
def takes_a_minute() -> None:
    time.sleep(60)

@tool(isolate=True)
def returns_object() -> object:
    return object()

@tool(isolate=True)
def dies(how: str) -> None:
    if how == "segfault":
        ctypes.string_at(0)
    elif how == "exit":
        os._exit(7)
    elif how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "term":
        os.kill(os.getpid(), signal.SIGTERM)

def leave_offspring(pids: str) -> None:
    """Another program, one more in a session of its own, and a fork that ignores signals; their numbers go to a file."""
    sleeper = subprocess.Popen(["sleep", "60"])
    escaped = subprocess.Popen(["sleep", "60"], start_new_session=True)
    forked = os.fork()
    if forked == 0:
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        time.sleep(60)
        os._exit(0)
    with open(pids + ".new", "w") as file:
        file.write(f"{os.getppid()} {os.getpid()} {sleeper.pid} {escaped.pid} {forked}")
    os.rename(pids + ".new", pids)

@tool(isolate=True)
def with_offspring(pids: str, wait: bool) -> str:
    leave_offspring(pids)
    if wait:
        time.sleep(60)
    return "done"

@tool(isolate=True)
def daemonizes(pids: str) -> str:
    """A daemon as books teach it: two forks and a session of its own, and the pipe of the answers still open."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            with open(pids + ".new", "w") as file:
                file.write(str(os.getpid()))
            os.rename(pids + ".new", pids)
            time.sleep(60)
        os._exit(0)
    while not os.path.exists(pids):
        time.sleep(0.005)
    return "done"

def plain(n: int) -> int:
    return n + 1

renamed = tool(isolate=True, name="renamed")(plain)
'''


def loaded(file: Path, source: str) -> ModuleType:
    """The module of this source, from a file that is not on the import path."""
    file.write_text(source)
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """The tools above."""
    return loaded(tmp_path_factory.mktemp("tools") / "some_tools.py", TOOLS)


def a_call() -> Call:
    return Call(key="k-1", run_id="r", number=4, attempt=2, deadline=datetime(2030, 1, 1, tzinfo=UTC), tenant="acme", actor=None)


def started(declared: Tool[..., Any], *args: Any, call: Call | None = None) -> Attempt:
    return attempt(declared, declared.bind(args, {}), call or a_call(), threads=Threads(2), grace_s=20)


def performed(declared: Tool[..., Any], *args: Any, call: Call | None = None) -> Performed:
    async def main() -> Performed:
        return await started(declared, *args, call=call).run()

    return asyncio.run(main())


def failure_of(answer: Performed) -> tuple[str, str]:
    assert isinstance(answer, Raised), answer
    return answer.failure.kind, answer.failure.message


def alive(pid: int) -> bool:
    """Does a process with this number run? A zombie does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def appears(file: Path, within_s: float = 20) -> list[int]:
    until = time.monotonic() + within_s
    while not file.exists():
        assert time.monotonic() < until, f"{file.name} did not appear"
        time.sleep(0.01)
    return [int(word) for word in file.read_text().split()]


def all_end(pids: list[int], within_s: float = 10) -> bool:
    until = time.monotonic() + within_s
    while any(map(alive, pids)) and time.monotonic() < until:
        time.sleep(0.01)
    return not any(map(alive, pids))


# --- it returns --------------------------------------------------------------------------------------------------------------


def test_an_isolated_tool_runs_in_a_session_of_its_own_and_gets_typed_arguments_and_its_call(tools, capfd):
    answer = performed(tools.where, 5, datetime(2024, 1, 1, tzinfo=UTC))
    assert isinstance(answer, Returned)
    n, kind, key, number, tenant, deadline, pid, session, module = tools.where.decode_result(answer.result)
    assert (n, kind, key, number, tenant, deadline) == (5, "datetime", "k-1", 4, "acme", "2030-01-01T00:00:00+00:00")
    assert pid == session != os.getpid()
    assert module == "some_tools"
    assert not alive(pid)
    said = capfd.readouterr()
    assert said.out == ""
    assert "printed to stdout" in said.err
    assert "written to stdout" in said.err


def test_async_tools_and_awkward_text_work_too(tools):
    assert performed(tools.asynchronous, 'newline \n quote " nul \0 é 😀') == Returned(
        tools.asynchronous.encode_result('newline \n quote " nul \0 é 😀')
    )


def test_a_large_argument_and_a_large_result_get_through(tools):
    answer = performed(tools.large, 3_000_000)
    assert isinstance(answer, Returned)
    assert len(answer.result) == 3_000_002
    text = "y" * 2_000_000
    assert performed(tools.asynchronous, text) == Returned(f'"{text}"'.encode())


def test_an_isolated_tool_gets_the_last_progress_of_the_attempt_before(tools):
    call = a_call()
    call.last_progress = {"part": 40}
    assert performed(tools.goes_on, call=call) == Returned(b'{"part":40}')


def test_an_isolated_tool_that_goes_silent_is_ended_and_the_time_to_load_it_does_not_count(tools):
    call = a_call()
    kind, message = failure_of(performed(tools.silent, call=call))[:2]
    assert kind == "timeout"
    assert "no heartbeat for 1 s" in message
    assert call.progress == "loaded"


def test_many_heartbeats_of_an_isolated_tool_are_cheap(tools):
    call = a_call()
    assert performed(tools.beats_often, call=call) == Returned(b"10000")
    assert call.progress == {"done": 9999}


def test_heartbeats_reach_the_call(tools):
    call = a_call()
    assert performed(tools.beats, call=call) == Returned(b"3")
    assert call.progress == {"done": 2}


# The usage of spends(), however it ends.
SPENT = Usage(usd_micros=250_000, tokens_in=7, tokens_out=2, model="small")


@pytest.mark.parametrize(
    ("how", "answer"), [("return", Returned(b'"return"')), ("raise", "fatal"), ("kill", "process_died")], ids=["return", "raise", "kill"]
)
def test_what_the_process_has_spent_reaches_the_call_however_it_ends(tools, how, answer):
    call = a_call()
    assert call.usage is None
    performed_as = performed(tools.spends, how, call=call)
    assert performed_as == answer or failure_of(performed_as)[0] == answer
    assert call.usage == SPENT


def test_what_was_spent_before_a_cancel_is_not_lost(tools):
    async def main() -> tuple[Performed, Usage | None]:
        call = a_call()
        running = started(tools.spends, "hang", call=call)
        task = asyncio.create_task(running.run())
        while call.usage != SPENT:
            assert not task.done()
            await asyncio.sleep(0.01)
        running.cancel()
        return await task, call.usage

    answer, spent = asyncio.run(asyncio.wait_for(main(), 30))
    assert failure_of(answer)[0] == "cancelled"
    assert spent == SPENT


def test_a_wrong_amount_is_refused_in_the_tools_own_process(tools):
    call = a_call()
    answer = performed(tools.wrong_amount, call=call)
    assert isinstance(answer, Returned)
    assert b"-1 is not an amount" in answer.result
    assert call.usage is None


def test_threads_that_speak_do_not_break_the_answer(tools):
    call = a_call()
    answer = performed(tools.chatters, 3_000_000, call=call)
    assert isinstance(answer, Returned)
    assert len(answer.result) == 3_000_002
    assert call.usage is not None
    assert call.usage.tokens_in > 4


def test_a_tool_under_another_name_than_its_function_is_found(tools):
    assert performed(tools.renamed, 1) == Returned(b"2")


def test_a_result_that_cannot_be_recorded_has_happened_all_the_same(tools):
    answer = performed(tools.returns_object)
    assert isinstance(answer, Unrecordable)
    assert answer.failure.kind == "not_encodable"


# --- it raises, or dies ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "kind"),
    [("not_sent", "not_sent"), ("later", "rate_limited"), ("fatal", "fatal"), ("exit", "error"), ("interrupt", "error"), ("stop", "error")],
)
def test_exceptions_keep_their_kind_on_the_way_out_of_the_process(tools, what, kind):
    answer = performed(tools.raises, what)
    assert isinstance(answer, Raised)
    assert answer.failure.kind == kind
    assert answer.failure.retry_after_s == (9.0 if what == "later" else None)
    assert "some_tools.py" in str(answer.failure.traceback)


@pytest.mark.parametrize(
    ("how", "words"),
    [("segfault", "killed by SIGSEGV"), ("exit", "ended with exit code 7"), ("kill", "killed by SIGKILL"), ("term", "killed by SIGTERM")],
)
def test_a_process_that_dies_is_a_call_in_doubt_and_not_a_dead_worker(tools, how, words):
    kind, message = failure_of(performed(tools.dies, how))
    assert kind == "process_died"
    assert f"the process of tool dies was {words}" in message or f"the process of tool dies {words}" in message


def test_a_tool_that_cannot_be_loaded_has_sent_nothing(tools, tmp_path):
    file = tmp_path / "broken_later.py"
    module = loaded(file, "from perdure.tool import tool\n@tool(isolate=True)\ndef f() -> None: ...\n")
    file.write_text("import a_module_that_is_not_there\n")
    kind, message = failure_of(performed(module.f))
    assert kind == "not_sent"
    assert "could not be loaded" in message
    assert "a_module_that_is_not_there" in message


def test_a_process_that_cannot_be_started_has_sent_nothing(tools, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    kind, message = failure_of(performed(tools.beats))
    assert kind == "not_sent"
    assert "could not be started" in message


# --- nothing survives --------------------------------------------------------------------------------------------------------


def test_nothing_that_a_tool_has_started_survives_its_end(tools, tmp_path):
    answer = performed(tools.with_offspring, str(tmp_path / "pids"), False)
    assert answer == Returned(b'"done"')
    assert not any(map(alive, appears(tmp_path / "pids")))  # when the answer is there, they are gone


def test_a_time_out_ends_the_whole_group(tools, tmp_path):
    slow: Tool[..., Any] = Tool(tools.with_offspring.fn, timeout=2.5, isolate=True)
    kind, message = failure_of(performed(slow, str(tmp_path / "pids"), True))
    assert kind == "timeout"
    assert "did not answer within 2.5 s, and was stopped" in message
    assert not any(map(alive, appears(tmp_path / "pids")))


def test_a_cancel_ends_the_whole_group(tools, tmp_path):
    async def main() -> tuple[Performed, float]:
        running = started(tools.with_offspring, str(tmp_path / "pids"), True)
        task = asyncio.create_task(running.run())
        await asyncio.to_thread(appears, tmp_path / "pids")
        began = time.monotonic()
        running.cancel()
        return await task, time.monotonic() - began

    answer, took_s = asyncio.run(main())
    assert failure_of(answer)[0] == "cancelled"
    assert took_s < 30
    assert not any(map(alive, appears(tmp_path / "pids")))


def test_a_stop_before_the_process_has_begun_sends_nothing(tools, tmp_path):
    async def main() -> Performed:
        running = started(tools.with_offspring, str(tmp_path / "pids"), True)
        task = asyncio.create_task(running.run())
        await asyncio.sleep(0.001)
        running.cancel()
        return await task

    assert failure_of(asyncio.run(main()))[0] == "not_sent"
    assert not (tmp_path / "pids").exists()


def test_a_daemon_does_not_survive_its_tool_either(tools, tmp_path):
    assert performed(tools.daemonizes, str(tmp_path / "pid")) == Returned(b'"done"')
    assert not any(map(alive, appears(tmp_path / "pid")))


WORKER = (
    TOOLS
    + """
from perdure.engine.local.attempts import attempt
from perdure.engine.threads import Threads

async def main() -> None:
    call = Call(key="k", run_id="r", number=1, attempt=1, deadline=None, tenant="t", actor=None)
    args = with_offspring.bind((sys.argv[1], sys.argv[2] == "wait"), {})
    print(await attempt(with_offspring, args, call, threads=Threads(1), grace_s=5).run(), flush=True)

if __name__ == "__main__":
    asyncio.run(main())
"""
)


def worker(folder: Path, mode: str) -> subprocess.Popen[str]:
    """A process that acts as a worker: a script that contains its tool."""
    script = folder / "worker.py"
    script.write_text(WORKER)
    return subprocess.Popen(
        [sys.executable, str(script), str(folder / "pids"), mode], stdout=subprocess.PIPE, text=True, start_new_session=True
    )


def test_a_tool_in_the_main_script_is_loaded_from_its_file_without_running_the_script_again(tmp_path):
    running = worker(tmp_path, "go")
    out, _ = running.communicate(timeout=60)
    assert "Returned(result=b'\"done\"')" in out
    assert out.count("Returned") == 1


@pytest.mark.parametrize("whole_group", [False, True], ids=["the worker alone", "the worker's whole group"])
def test_when_the_worker_is_killed_nothing_of_its_tool_goes_on(tmp_path, whole_group):
    running = worker(tmp_path, "wait")
    pids = appears(tmp_path / "pids")
    assert all(map(alive, pids))
    (os.killpg if whole_group else os.kill)(running.pid, signal.SIGKILL)
    running.communicate(timeout=60)
    assert running.returncode == -signal.SIGKILL
    assert len(pids) == 5  # supervisor, tool, two other programs, a fork
    assert all_end(pids)


def test_a_stopped_worker_keeps_its_tool_and_a_killed_one_does_not(tmp_path):
    running = worker(tmp_path, "wait")
    pids = appears(tmp_path / "pids")
    os.kill(running.pid, signal.SIGSTOP)
    time.sleep(1.5)  # longer than the supervisor's look at who its parent is
    assert all(map(alive, pids))
    os.kill(running.pid, signal.SIGKILL)
    running.communicate(timeout=60)
    assert all_end(pids)


def test_a_supervisor_survives_the_signals_that_a_terminal_sends(tmp_path):
    running = worker(tmp_path, "wait")
    supervisor, *others = appears(tmp_path / "pids")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(supervisor, number)
    time.sleep(0.1)
    assert alive(supervisor)
    os.kill(running.pid, signal.SIGKILL)
    running.communicate(timeout=60)
    assert all_end([supervisor, *others])


def test_a_tool_whose_supervisor_is_killed_ends_with_it(tools, tmp_path):
    async def main() -> tuple[Performed, int]:
        task = asyncio.create_task(started(tools.with_offspring, str(tmp_path / "pids"), True).run())
        supervisor, tool, *others = await asyncio.to_thread(appears, tmp_path / "pids")
        os.kill(supervisor, signal.SIGKILL)
        await asyncio.to_thread(all_end, [tool])
        for pid in others:  # the supervisor is gone, so nothing else ends these
            os.kill(pid, signal.SIGKILL)
        return await task, tool

    answer, tool = asyncio.run(main())
    assert failure_of(answer) == (
        "process_died",
        "the process of tool with_offspring ended together with its supervisor, without an answer",
    )
    assert not alive(tool)


# --- the lines ---------------------------------------------------------------------------------------------------------------


def test_a_line_that_was_cut_off_is_never_taken_for_a_shorter_answer():
    line = framed(b"R", b'{"cents":12345}')
    assert unframed(line) == (b"R", b'{"cents":12345}')
    number = framed(b"R", b"12345678901234567890")
    for whole in (line, number):
        for length in range(len(whole) - 1):
            assert unframed(whole[:length] + b"\n") is None
            assert unframed(whole[:length]) is None


def test_an_empty_text_is_a_line():
    assert unframed(framed(b"B", b"")) == (b"B", b"")


def test_its_supervisor_ends_it_when_its_time_is_over(tools):
    """The worker ends the process at its time-out. If the worker is paused, the process still ends."""
    declared = tools.takes_a_minute
    kind = "not_sent"
    for limit_s in (0.5, 5, 40):  # on a machine under load its time may be over before the tool has begun
        if kind == "not_sent":
            kind, _ = failure_of(Isolated(declared, declared.bind((), {}), a_call(), limit_s=limit_s).run())
    assert kind == "process_died"
