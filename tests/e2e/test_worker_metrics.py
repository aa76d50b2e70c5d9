"""`perdure worker --http`, `--log-format` and `--setup`: real processes, on SQLite and on PostgreSQL."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests import exposition
from tests.exposition import Read
from tests.servers.proxy import Proxy

PATIENCE_S = 60.0
AGENTS = """
import asyncio, contextlib, logging, os, time
from pathlib import Path
from perdure import Call, Retry, Run, agent, tool

HERE = Path(__file__).parent
log = logging.getLogger("shop.work")

@tool(effect="idempotent")  # its intent is durable before it begins
async def hold(name: str) -> str:
    (HERE / f"{name}.begun").touch()
    while not (HERE / "go").exists():
        await asyncio.sleep(0.01)
    return name

@tool(effect="read")
async def block() -> str:
    (HERE / "blocked").touch()
    while not (HERE / "go").exists():
        time.sleep(0.01)          # on the event loop: the mistake that /livez has to find
    return "unblocked"

@tool(effect="idempotent", retry=Retry(attempts=3, base=0.0))
def flaky(call: Call) -> int:
    log.info("attempt %s", call.attempt)
    if call.attempt < 3:
        raise ConnectionError("not yet")
    return call.attempt

@tool(effect="once")
async def lost() -> None:
    raise TimeoutError("no answer")

@tool(effect="read", approval=True)
async def guarded() -> str:
    return "done"

@tool(effect="read", isolate=True)
def apart() -> int:
    log.warning("apart")
    return os.getpid()

@agent(version="1")
async def holder(run: Run, name: str) -> str:
    return await hold(name)

@agent(version="1")
async def blocker(run: Run) -> str:
    return await block()

@agent(version="1")
async def trier(run: Run) -> int:
    return await flaky()

@agent(version="1")
async def doubter(run: Run) -> None:
    await lost()

@agent(version="1")
async def asker(run: Run) -> str:
    return await guarded()

@agent(version="1")
async def talker(run: Run) -> int:
    run.log.info("begins")
    log.info("said by the agent")
    await flaky()
    run.log.info("waits for a word")
    await run.receive("word")
    try:
        run.log.info("has heard")
        return await apart()
    finally:
        log.info("ends")

@contextlib.asynccontextmanager
async def first():
    with (HERE / "hooks").open("a") as file: file.write("first up\\n")
    yield
    with (HERE / "hooks").open("a") as file: file.write("first down\\n")

@contextlib.contextmanager
def second():
    with (HERE / "hooks").open("a") as file: file.write("second up\\n")
    yield
    with (HERE / "hooks").open("a") as file: file.write("second down\\n")

async def broken():
    raise ValueError("no key")

async def bare():
    yield

async def plain():
    with (HERE / "hooks").open("a") as file: file.write("plain\\n")
"""


class Floor:
    """A folder with agents, a database, and workers."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder = folder
        self.url = url
        self.workers: list[Worker] = []
        (folder / "shop.py").write_text(AGENTS)

    def env(self, more: dict[str, str]) -> dict[str, str]:
        return {**os.environ, "PERDURE_URL": self.url, **more}

    def run(self, *args: str, code: int = 0) -> str:
        command = [sys.executable, "-m", "perdure", *args]
        done = subprocess.run(command, cwd=self.folder, env=self.env({}), capture_output=True, text=True, timeout=60)
        assert done.returncode == code, done
        return done.stdout

    def start(self, agent: str, run_id: str, *values: str) -> None:
        self.run("start", agent, *values, "--id", run_id)

    def worker(self, *args: str, **env: str) -> Worker:
        self.workers.append(Worker(self, args, env))
        return self.workers[-1]

    def wait_for(self, file: str) -> None:
        wait_until(lambda: (self.folder / file).exists(), file)

    def go(self) -> None:
        (self.folder / "go").touch()


class Worker:
    """One `perdure worker --http 127.0.0.1:0`."""

    def __init__(self, floor: Floor, args: tuple[str, ...], env: dict[str, str]) -> None:
        self.log = floor.folder / f"worker-{len(floor.workers)}.log"
        with self.log.open("w") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "perdure", "worker", "shop.py", "--http", "127.0.0.1:0", *args],
                cwd=floor.folder,
                env=floor.env(env),
                stderr=stderr,
            )

    @property
    def port(self) -> int:
        found: list[str] = []

        def look() -> bool:
            found[:] = re.findall(r"metrics on http://127\.0\.0\.1:(\d+)/metrics", self.log.read_text())
            assert found or self.process.poll() is None, self.log.read_text()
            return bool(found)

        wait_until(look, "the worker's port")
        return int(found[0])

    def get(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=30) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def metrics(self) -> Read:
        status, text = self.get("/metrics")
        assert status == 200, text
        return exposition.read(text)

    def until(self, holds: Callable[[Read], bool]) -> Read:
        read: list[Read] = []

        def look() -> bool:
            status, text = self.get("/metrics")
            read[:] = [exposition.read(text)] if status == 200 else []
            return bool(read) and holds(read[0])

        wait_until(look, read)
        return read[0]

    def until_ready(self) -> None:
        wait_until(lambda: self.get("/readyz")[0] == 200, "readiness")

    def until_not(self, path: str, why: str) -> None:
        found: list[Any] = []

        def look() -> bool:
            found[:] = self.get(path)
            return found[0] == 503 and why in found[1]

        wait_until(look, found)

    def stop(self) -> str:
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(60) == 0, self.log.read_text()
        return self.log.read_text()


def wait_until(holds: Callable[[], bool], what: object) -> None:
    until_s = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < until_s, what
        time.sleep(0.05)


def closed(floor: Floor) -> None:
    for worker in floor.workers:
        if worker.process.poll() is None:
            worker.process.kill()
        worker.process.wait()


@pytest.fixture(params=["sqlite", "postgres"])
def floor(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Floor]:
    url = f"sqlite:///{tmp_path}/j.db" if request.param == "sqlite" else request.getfixturevalue("postgres_url")
    floor = Floor(tmp_path, url)
    yield floor
    closed(floor)


@pytest.fixture
def local(tmp_path: Path) -> Iterator[Floor]:
    floor = Floor(tmp_path, f"sqlite:///{tmp_path}/j.db")
    yield floor
    closed(floor)


# -- metrics ----------------------------------------------------------------------------------------------------------
def test_a_worker_counts_what_it_has_done(floor: Floor) -> None:
    worker = floor.worker()
    worker.until_ready()
    floor.start("trier", "t")
    floor.start("doubter", "d")
    floor.start("asker", "a")
    now = worker.until(lambda now: now.value("perdure_approvals_pending") == 1 and now.value("perdure_runs_needing_attention") == 1)
    assert now.value("perdure_claims_total", agent="trier", queue="default") >= 1
    assert now.value("perdure_call_retries_total", agent="trier", tool="flaky") == 2
    assert now.value("perdure_calls_in_doubt_total", agent="doubter", tool="lost") == 1
    assert now.value("perdure_runs_needing_attention", agent="doubter", reason="in_doubt") == 1
    assert now.value("perdure_approvals_pending", agent="asker") == 1
    assert now.value("perdure_runs", agent="asker", status="waiting_approval") == 1
    assert now.value("perdure_runs_ended_total", agent="trier", status="succeeded") == 1
    assert now.value("perdure_workers", state="alive") == 1
    assert now.value("perdure_build_info", store="sqlite" if floor.url.startswith("sqlite") else "postgresql") == 1
    claims = json.loads(floor.run("audit", "--json", "--type", "run_claimed").splitlines()[0])
    assert claims["type"] == "run_claimed"
    approval = json.loads(floor.run("approvals", "--json").splitlines()[0])
    floor.run("approve", approval["approval"])
    worker.until(lambda now: now.value("perdure_runs_ended_total", agent="asker", status="succeeded") == 1)
    worker.stop()


def test_a_takeover_from_a_killed_worker_is_counted_by_the_one_that_takes_over(floor: Floor) -> None:
    first = floor.worker(PERDURE_LEASE_S="4")
    floor.start("holder", "h", "name=x")
    floor.wait_for("x.begun")
    first.process.kill()
    first.process.wait()
    (floor.folder / "x.begun").unlink()
    second = floor.worker(PERDURE_LEASE_S="4")
    now = second.until(lambda now: now.value("perdure_takeovers_total") == 1)
    assert now.value("perdure_takeovers_total", agent="holder", queue="default") == 1
    assert now.value("perdure_claims_total") == 1
    floor.wait_for("x.begun")
    now = second.until(lambda now: now.value("perdure_worker_leases") == 1)
    assert now.value("perdure_worker_runs") == 1
    assert now.value("perdure_resumes_total", source="journal") == 1
    assert now.value("perdure_call_retries_total", agent="holder", tool="hold") == 1
    floor.go()
    second.until(lambda now: now.value("perdure_runs_ended_total", agent="holder", status="succeeded") == 1)
    second.stop()


def test_a_worker_that_was_suspended_past_its_lease_counts_a_fenced_write_and_is_still_alive(floor: Floor) -> None:
    first = floor.worker(PERDURE_LEASE_S="2")
    floor.start("holder", "h", "name=x")
    floor.wait_for("x.begun")
    first.until_ready()
    first.process.send_signal(signal.SIGSTOP)
    second = floor.worker(PERDURE_LEASE_S="2")
    second.until(lambda now: now.value("perdure_takeovers_total") == 1)
    first.process.send_signal(signal.SIGCONT)
    assert first.get("/livez") == (200, "ok\n"), "the loop was not stuck: the whole process did not run"
    floor.go()
    now = first.until(lambda now: now.value("perdure_fenced_writes_total") == 1)
    assert now.value("perdure_runs_ended_total") == 0
    now = second.until(lambda now: now.value("perdure_runs_ended_total", status="succeeded") == 1)
    assert now.value("perdure_fenced_writes_total") == 0
    first.stop()
    second.stop()


# -- probes -----------------------------------------------------------------------------------------------------------
def test_a_tool_that_blocks_the_event_loop_makes_the_worker_not_alive(floor: Floor) -> None:
    worker = floor.worker(PERDURE_LEASE_S="2")
    worker.until_ready()
    assert worker.get("/livez") == (200, "ok\n")
    floor.start("blocker", "b")
    floor.wait_for("blocked")
    worker.until_not("/livez", "the event loop has not turned for")
    assert worker.metrics().value("perdure_event_loop_stuck_seconds") >= 2
    floor.go()
    wait_until(lambda: worker.get("/livez")[0] == 200, "life")
    worker.until(lambda now: now.value("perdure_event_loop_lag_seconds_sum") >= 2)
    worker.stop()


def test_a_worker_that_drains_is_not_ready_and_ends(floor: Floor) -> None:
    worker = floor.worker("--drain-timeout", "60")
    floor.start("holder", "h", "name=x")
    floor.wait_for("x.begun")
    worker.until_ready()
    worker.process.send_signal(signal.SIGTERM)
    worker.until_not("/readyz", "the worker drains")
    assert worker.get("/livez")[0] == 200
    assert worker.metrics().value("perdure_worker_drains_total") == 1
    floor.go()
    assert worker.process.wait(60) == 0


def test_a_worker_is_not_ready_while_its_database_does_not_answer(tmp_path: Path, postgres_url: str) -> None:
    with Proxy(postgres_url) as proxy:
        floor = Floor(tmp_path, proxy.url(postgres_url))
        try:
            worker = floor.worker(PERDURE_ANSWER_S="2")
            worker.until_ready()
            proxy.silence("to client", "to server")
            worker.until_not("/readyz", "the database")
            assert worker.get("/livez")[0] == 200
            proxy.speak()
            worker.until_ready()
            worker.until(lambda now: now.value("perdure_database_up") == 1)
            worker.stop()
        finally:
            closed(floor)


def test_a_worker_that_waits_for_its_database_is_alive_and_not_ready(tmp_path: Path, postgres_url: str) -> None:
    proxy = Proxy(postgres_url)
    proxy.__enter__()
    away = proxy.url(postgres_url)
    proxy.close()
    floor = Floor(tmp_path, away)
    try:
        worker = floor.worker()
        worker.until_not("/readyz", "the worker waits for its database")
        assert worker.get("/livez")[0] == 200
        assert worker.get("/metrics")[0] == 503
        worker.process.send_signal(signal.SIGTERM)
        assert worker.process.wait(60) == 0
    finally:
        closed(floor)


def test_a_busy_port_is_one_line(local: Floor) -> None:
    port = local.worker().port
    command = [sys.executable, "-m", "perdure", "worker", "shop.py", "--http", f"127.0.0.1:{port}", "--setup", "shop.py:first"]
    done = subprocess.run(command, cwd=local.folder, env=local.env({}), capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr == (
        f"perdure: cannot serve metrics on 127.0.0.1:{port}: Address already in use; choose another address, or stop the process that uses it\n"
    )


# -- logs -------------------------------------------------------------------------------------------------------------
def test_every_line_is_json_with_its_run_and_no_line_comes_again_after_a_replay(floor: Floor) -> None:
    worker = floor.worker("--log-format", "json", PERDURE_CACHE_RUNS="0")
    floor.start("talker", "r")
    worker.until(lambda now: now.value("perdure_runs", status="waiting") == 1)
    floor.run("signal", "r", "word", "1")
    worker.until(lambda now: now.value("perdure_runs_ended_total", status="succeeded") == 1)
    lines = [json.loads(line) for line in worker.stop().splitlines()]
    assert all(set(line) >= {"time", "level", "logger", "message"} for line in lines)
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", line["time"]) for line in lines)
    own = [line for line in lines if line["logger"] in ("perdure.agent", "shop.work")]
    of_agent = {"run": "r", "agent": "talker", "tenant": "default"}
    assert [(line["message"], line.get("call"), line.get("attempt")) for line in own] == [
        ("begins", None, None),
        ("said by the agent", None, None),
        ("attempt 1", 1, 1),
        ("attempt 2", 1, 2),
        ("attempt 3", 1, 3),
        ("waits for a word", None, None),
        ("has heard", None, None),
        ("apart", 2, 1),  # from a process of its own
        ("ends", None, None),
    ]
    assert all(line.items() >= of_agent.items() for line in own)


def test_as_text_a_line_names_its_run_and_without_the_option_tools_are_not_logged(local: Floor) -> None:
    worker = local.worker("--log-format", "text")
    local.start("trier", "t")
    worker.until(lambda now: now.value("perdure_runs_ended_total", status="succeeded") == 1)
    assert re.search(r"INFO attempt 3 \(run t, call 1, attempt 3\)$", worker.stop(), re.M)
    quiet = local.worker()
    local.start("trier", "t2")
    quiet.until(lambda now: now.value("perdure_runs_ended_total", status="succeeded") == 1)
    assert "attempt 3" not in quiet.stop()


# -- set-up hooks -----------------------------------------------------------------------------------------------------
def hooks_of(floor: Floor) -> list[str]:
    file = floor.folder / "hooks"
    return file.read_text().splitlines() if file.exists() else []


def test_hooks_run_at_the_start_and_at_the_end_after_a_drain(local: Floor) -> None:
    worker = local.worker("--setup", "shop.py:first", "--setup", "shop:second", "--setup", "shop.py:plain", "--drain-timeout", "60")
    local.start("holder", "h", "name=x")
    local.wait_for("x.begun")
    assert hooks_of(local) == ["first up", "second up", "plain"]
    worker.process.send_signal(signal.SIGTERM)
    worker.until_not("/readyz", "the worker drains")
    assert len(hooks_of(local)) == 3, "a tool may still need what a hook has opened"
    local.go()
    assert worker.process.wait(60) == 0
    assert hooks_of(local) == ["first up", "second up", "plain", "second down", "first down"]


@pytest.mark.parametrize(
    ("hook", "code", "message"),
    [
        ("shop.py:broken", 1, "--setup shop.py:broken: the worker does not start: ValueError: no key"),
        ("shop.py:bare", 1, "it is a generator; decorate it with @contextlib.contextmanager or @contextlib.asynccontextmanager"),
        ("shop.py:nothing", 2, "shop.py has no function called 'nothing'; write FILE.py:FUNCTION"),
    ],
)
def test_a_hook_that_fails_is_one_line_and_the_hooks_before_it_are_ended(local: Floor, hook: str, code: int, message: str) -> None:
    command = [sys.executable, "-m", "perdure", "worker", "shop.py", "--setup", "shop.py:first", "--setup", hook]
    done = subprocess.run(command, cwd=local.folder, env=local.env({}), capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.startswith("perdure: ")
    assert done.stderr.endswith(f"{message}\n")
    assert done.stderr.count("\n") == 1
    assert hooks_of(local) == (["first up", "first down"] if code == 1 else [])


def test_a_worker_that_cannot_open_its_database_ends_its_hooks(local: Floor) -> None:
    (local.folder / "j.db").write_text("this is no database at all, and long enough to be looked at" * 100)
    command = [sys.executable, "-m", "perdure", "worker", "shop.py", "--setup", "shop.py:first"]
    done = subprocess.run(command, cwd=local.folder, env=local.env({}), capture_output=True, text=True, timeout=60)
    assert done.returncode == 2, done
    assert done.stderr.count("\n") == 1
    assert hooks_of(local) == ["first up", "first down"]
