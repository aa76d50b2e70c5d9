"""Metrics as text and over HTTP, in one process: what is counted, what the format is, what the probes say."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests import exposition
from tests.exposition import Read
from tests.unit.drive_tools import perdure, run

from perdure import Agent, Call, InvalidInput, Perdure, Retry, Run, Settings, agent, metrics, tool
from perdure.engine.counts import MOST_VALUES, Counter, Histogram, LabelValues
from perdure.errors import StoreUnavailable
from perdure.metrics import FAMILIES, Metrics, MetricsServer

PATIENCE_S = 60.0


@tool(effect="idempotent", retry=Retry(attempts=3, base=0.0))
async def flaky(until: int, call: Call) -> int:
    call.spend(usd="0.25", tokens_in=10, tokens_out=4, tokens_cached=2, model="m-1")
    if call.attempt < until:
        raise ConnectionError("not yet")
    return call.attempt


@tool(effect="once")
async def lost() -> None:
    raise TimeoutError("no answer")


@tool(effect="read", approval=True)
async def guarded() -> str:
    return "done"


@agent(version="1")
async def trier(run: Run, until: int) -> int:
    return await flaky(until)


@agent(version="1")
async def doubter(run: Run) -> None:
    await lost()


@agent(version="1", queue="slow")
async def asker(run: Run) -> str:
    return await guarded()


AGENTS: list[Agent[Any, Any]] = [trier, doubter, asker]


async def read(metrics_of: Metrics, *, openmetrics: bool = False) -> Read:
    return exposition.read(await asyncio.to_thread(metrics_of.text, openmetrics=openmetrics), openmetrics=openmetrics)


# -- what is counted --------------------------------------------------------------------------------------------------
def test_the_counters_say_what_happened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "FRESH_S", 0.0)

    async def main() -> None:
        async with perdure(tmp_path / "db", AGENTS) as app:
            shown = Metrics(app)
            before = await read(shown)
            assert before.value("perdure_takeovers_total", agent="trier", queue="default") == 0
            assert await app.run(trier, 3, id="t") == 3
            await app.start(doubter, id="d")
            await app.drive("d")
            await app.start(asker, id="a")
            await app.drive("a")
            now = await read(shown)
        assert now.value("perdure_claims_total", agent="doubter", queue="default") == 1
        assert now.value("perdure_claims_total", agent="asker", queue="slow") == 1
        assert now.value("perdure_call_attempts_total", agent="trier", tool="flaky") == 3
        assert now.value("perdure_call_retries_total", agent="trier", tool="flaky") == 2
        assert now.value("perdure_calls_in_doubt_total", agent="doubter", tool="lost") == 1
        assert now.value("perdure_runs_ended_total", agent="trier", status="succeeded") == 1
        assert now.value("perdure_runs", agent="doubter", queue="default", status="needs_attention") == 1
        assert now.value("perdure_runs_needing_attention", agent="doubter", reason="in_doubt") == 1
        assert now.value("perdure_runs", agent="asker", queue="slow", status="waiting_approval") == 1
        assert now.value("perdure_approvals_pending", agent="asker", queue="slow") == 1
        assert now.has("perdure_approvals_oldest_seconds")
        assert now.value("perdure_runs", agent="trier") == 0  # finished runs are not counted in the database
        assert now.value("perdure_tokens_total", agent="trier", model="m-1", kind="input") == 30
        assert now.value("perdure_tokens_total", agent="trier", model="m-1", kind="output") == 12
        assert now.value("perdure_tokens_total", agent="trier", model="m-1", kind="cached") == 6
        assert now.value("perdure_cost_usd_total", agent="trier", model="m-1") == 0.75
        assert now.value("perdure_commit_seconds_count") == now.value("perdure_commit_appends_sum") > 0
        assert now.value("perdure_replay_seconds_count") == now.value("perdure_claims_total")
        assert now.value("perdure_resumes_total", source="new") == 3
        assert now.value("perdure_database_up") == 1
        assert now.value("perdure_build_info", store="sqlite") == 1

    run(main())


def test_the_appends_of_many_runs_share_commits_and_each_is_counted(tmp_path: Path) -> None:
    async def main() -> None:
        async with perdure(tmp_path / "db", AGENTS) as app:
            await asyncio.gather(*(app.run(trier, 1, id=f"t{n}") for n in range(20)))
            now = await read(Metrics(app))
            assert now.value("perdure_commit_appends_sum") == now.value("perdure_commit_seconds_count")
            assert now.value("perdure_commit_appends_count") < now.value("perdure_commit_appends_sum"), "no commit was shared"

    run(main())


def test_a_ready_run_is_counted_with_its_age_until_it_is_claimed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "FRESH_S", 0.0)

    async def main() -> None:
        async with perdure(tmp_path / "db", AGENTS) as app:
            shown = Metrics(app)
            await app.start(asker, id="a")
            app.clock.jump(100)  # type: ignore[attr-defined]
            await app.start(asker, id="b")
            now = await read(shown)
            assert now.value("perdure_queue_runs", agent="asker", queue="slow") == 2
            assert 100 <= now.value("perdure_queue_oldest_seconds", agent="asker", queue="slow") < 101
            await app.drive("a")
            await app.drive("b")
            assert (await read(shown)).value("perdure_queue_runs") == 0

    run(main())


def test_the_figures_of_the_database_are_read_once_for_many_scrapes(tmp_path: Path) -> None:
    async def main() -> None:
        async with perdure(tmp_path / "db", AGENTS) as app:
            shown = Metrics(app)
            assert (await read(shown)).value("perdure_queue_runs") == 0
            await app.start(asker, id="a")
            assert (await read(shown)).value("perdure_queue_runs") == 0  # still the figures of the first scrape
            assert (await read(Metrics(app))).value("perdure_queue_runs") == 1

    run(main())


def test_a_database_that_is_gone_leaves_the_counters_and_says_so(tmp_path: Path) -> None:
    async def main() -> None:
        async with perdure(tmp_path / "db", AGENTS) as app:
            await app.run(trier, 1, id="t")
            app.store.close()
            now = await read(Metrics(app))
            assert now.value("perdure_database_up") == 0
            assert not now.has("perdure_runs")
            assert not now.has("perdure_workers")
            assert now.value("perdure_claims_total") == 1

    run(main())


def test_a_question_that_is_never_answered_is_given_up_and_asked_only_once() -> None:
    never, asked = threading.Event(), list[int]()

    def ask() -> None:
        asked.append(1)
        never.wait(PATIENCE_S)

    question = metrics._Question(ask, 0.0)
    begun_s = time.monotonic()
    for _ in range(3):
        with pytest.raises(StoreUnavailable, match=r"has not answered within 0\.1 s"):
            question.answer(0.1)
    assert time.monotonic() - begun_s < PATIENCE_S / 2
    assert asked == [1]
    never.set()


# -- the format -------------------------------------------------------------------------------------------------------
def test_both_formats_hold_the_same_values(tmp_path: Path) -> None:
    async def main() -> None:
        async with perdure(tmp_path / "db", AGENTS) as app:
            await app.run(trier, 3, id="t")
            shown = Metrics(app)
            assert (await read(shown)).samples == (await read(shown, openmetrics=True)).samples

    run(main())


def test_label_values_are_escaped() -> None:
    evil = 'a"b\\c\nd,e="f"} 1'
    family = next(one for one in FAMILIES if one.name == "perdure_claims_total")
    counter = Counter(LabelValues(), "agent", "queue")
    counter.add((evil, "q"))
    for openmetrics in (False, True):
        found = exposition.read(metrics._text([(family, dict(counter.values))], openmetrics=openmetrics), openmetrics=openmetrics)
        assert found.value("perdure_claims_total", agent=evil, queue="q") == 1


def test_a_label_has_a_bounded_number_of_values_and_the_rest_is_other() -> None:
    counter = Counter(LabelValues(), "agent", "queue")
    for n in range(3 * MOST_VALUES):
        counter.add((f"agent-{n}", "q"), 2)
    assert len(counter.values) == MOST_VALUES + 1
    assert counter.values["other", "q"] == 2 * 2 * MOST_VALUES
    assert sum(counter.values.values()) == 2 * 3 * MOST_VALUES


def test_the_figures_of_the_database_have_bounded_labels_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perdure.engine.counts.MOST_VALUES", 5)

    async def main() -> None:
        async with Perdure(f"sqlite:///{tmp_path}/db") as app:
            for n in range(12):
                await app.start(f"agent{n}", id=f"r{n}")
            now = await read(Metrics(app))
            assert now.value("perdure_runs", agent="other") == 7
            assert now.value("perdure_queue_runs") == 12
            assert len([key for key in now.samples if key[0] == "perdure_runs"]) == 6

    run(main())


def test_a_histogram_counts_a_value_on_a_bound_below_it() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 9.0):
        histogram.add(value)
    assert histogram.counts == [2, 2, 1]
    assert histogram.sum == 14.0


def test_the_names_follow_the_rules_of_prometheus() -> None:
    for family in FAMILIES:
        assert family.name.startswith("perdure_")
        assert family.name.endswith("_total") == (family.kind == "counter"), family.name
        assert not {"run", "run_id", "tenant", "id"} & set(family.labels), "such a label has no bound"
    assert len({family.name for family in FAMILIES}) == len(FAMILIES)


# -- over HTTP --------------------------------------------------------------------------------------------------------
class Served:
    """The answers of a server, from a thread: status and body."""

    def __init__(self, port: int) -> None:
        self._port = port

    def get_now(self, path: str, method: str = "GET", **headers: str) -> tuple[int, str]:
        request = urllib.request.Request(f"http://127.0.0.1:{self._port}{path}", method=method, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    async def get(self, path: str, method: str = "GET", **headers: str) -> tuple[int, str]:
        return await asyncio.to_thread(self.get_now, path, method, **headers)

    def say(self, data: bytes) -> bytes:
        """Send these bytes; what comes back until the server closes the connection."""
        with socket.create_connection(("127.0.0.1", self._port), timeout=30) as client:
            try:
                client.sendall(data)
            except OSError:
                return b""
            answer = b""
            try:
                while more := client.recv(65536):
                    answer += more
            except ConnectionResetError:
                pass
            return answer


def serving(tmp_path: Path, check: Callable[[Perdure, Served], Any], **options: Any) -> None:
    async def main() -> None:
        async with Perdure(f"sqlite:///{tmp_path}/db", AGENTS, settings=Settings(lease_s=30.0)) as app:
            with MetricsServer(app, "127.0.0.1:0", **options) as server:
                await check(app, Served(server.port))

    run(main())


def test_the_three_paths_are_answered_and_no_other(tmp_path: Path) -> None:
    async def check(app: Perdure, served: Served) -> None:
        assert await served.get("/livez") == (200, "ok\n")
        assert await served.get("/readyz?verbose=1") == (200, "ok\n")
        status, text = await served.get("/metrics")
        assert status == 200
        assert exposition.read(text).value("perdure_worker_ready") == 1
        assert exposition.read(text).has("perdure_event_loop_stuck_seconds")
        _, text = await served.get("/metrics", Accept="application/openmetrics-text; version=1.0.0")
        assert exposition.read(text, openmetrics=True).value("perdure_worker_ready") == 1
        assert (await served.get("/"))[0] == (await served.get("/metrics/x"))[0] == 404
        assert await served.get("/metrics", method="HEAD") == (200, "")
        assert (await served.get("/livez", method="POST"))[0] == 405
        assert (await served.get("/livez", method="DELETE"))[0] == 405

    serving(tmp_path, check)


def test_odd_requests_get_no_answer_or_an_error_and_the_server_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_REQUEST_S", 0.5)

    async def check(app: Perdure, served: Served) -> None:
        assert (await asyncio.to_thread(served.say, b"\x16\x03\x01 hello\r\n\r\n")).startswith(b"HTTP/1.1 400 ")
        assert (await asyncio.to_thread(served.say, b"GET /livez\r\n\r\n")).startswith(b"HTTP/1.1 400 ")
        assert await asyncio.to_thread(served.say, b"GET / HTTP/1.1\r\nX: " + 100_000 * b"x") == b""
        assert await asyncio.to_thread(served.say, b"GET /livez HTTP/1.1\r\n") == b""  # its end never comes
        assert await served.get("/livez") == (200, "ok\n")

    serving(tmp_path, check)


def test_a_client_that_drips_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_REQUEST_S", 1.0)

    def drip(port: int) -> float:
        begun_s = time.monotonic()
        with socket.create_connection(("127.0.0.1", port), timeout=0.1) as client:
            while time.monotonic() - begun_s < 20.0:
                try:
                    client.sendall(b"x")  # no single read of the server takes long
                    if client.recv(100) == b"":
                        break
                except TimeoutError:
                    pass
                except OSError:
                    break
        return time.monotonic() - begun_s

    async def check(app: Perdure, served: Served) -> None:
        assert await asyncio.to_thread(drip, served._port) < 15.0

    serving(tmp_path, check)


def test_a_database_that_is_gone_is_not_ready_and_one_that_is_back_is(tmp_path: Path) -> None:
    async def check(app: Perdure, served: Served) -> None:
        assert await served.get("/readyz") == (200, "ok\n")
        (tmp_path / "db").rename(tmp_path / "elsewhere")
        status, why = await served.get("/readyz")
        assert status == 503
        assert why.startswith("the database was deleted, moved or replaced")
        assert str(tmp_path) not in why
        assert await served.get("/livez") == (200, "ok\n")
        (tmp_path / "elsewhere").rename(tmp_path / "db")
        assert await served.get("/readyz") == (200, "ok\n")

    serving(tmp_path, check)


def test_slow_clients_cannot_keep_the_server_from_answering_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_REQUEST_S", 1.0)

    async def check(app: Perdure, served: Served) -> None:
        clients = [socket.create_connection(("127.0.0.1", served._port)) for _ in range(3 * metrics._MOST_REQUESTS)]
        dripping = threading.Event()

        def drip() -> None:  # a byte now and then, so that no single read takes long
            while not dripping.wait(0.05):
                for client in clients:
                    try:
                        client.sendall(b"x")
                    except OSError:
                        pass

        thread = threading.Thread(target=drip)
        thread.start()
        try:
            until = time.monotonic() + PATIENCE_S
            while True:
                try:
                    assert await served.get("/livez") == (200, "ok\n")
                    break
                except (OSError, urllib.error.URLError):
                    assert time.monotonic() < until, "the slow clients keep all threads"
                    await asyncio.sleep(0.1)
        finally:
            dripping.set()
            thread.join()
            for client in clients:
                client.close()

    serving(tmp_path, check)


def test_a_worker_that_drains_is_alive_and_not_ready(tmp_path: Path) -> None:
    release = asyncio.Event()

    @tool(effect="read")
    async def hold() -> str:
        await release.wait()
        return "held"

    @agent(version="1")
    async def holder(run: Run) -> str:
        return await hold()

    async def main() -> None:
        async with Perdure(f"sqlite:///{tmp_path}/db", [holder], settings=Settings(drain_timeout_s=60.0)) as app:
            with MetricsServer(app, "127.0.0.1:0") as server:
                served, stop = Served(server.port), asyncio.Event()
                await app.start(holder, id="h")
                working = asyncio.create_task(app.work(stop=stop))
                await until(served, lambda now: now.value("perdure_worker_runs") == 1)
                assert (await served.get("/readyz"))[0] == 200
                stop.set()
                now = await until(served, lambda now: now.value("perdure_worker_draining") == 1)
                assert now.value("perdure_worker_drains_total") == 1
                assert now.value("perdure_worker_ready") == 0
                assert await served.get("/readyz") == (503, "the worker drains\n")
                assert await served.get("/livez") == (200, "ok\n")
                release.set()
                await working

    run(main())


def test_a_worker_is_not_ready_before_it_has_registered_itself(tmp_path: Path) -> None:
    async def main() -> None:
        async with Perdure(f"sqlite:///{tmp_path}/db", AGENTS) as app:
            with MetricsServer(None, "127.0.0.1:0") as server:
                served = Served(server.port)
                assert await served.get("/readyz") == (503, "the worker starts\n")
                assert await served.get("/metrics") == (503, "the worker starts\n")
                server.show(app, works=True)
                assert await served.get("/readyz") == (503, "the worker starts\n")
                assert await app.run(trier, 1, id="t") == 1
                assert await served.get("/readyz") == (200, "ok\n")

    run(main())


async def until(served: Served, holds: Callable[[Read], bool]) -> Read:
    until_s = time.monotonic() + PATIENCE_S
    while True:
        now = exposition.read((await served.get("/metrics"))[1])
        if holds(now):
            return now
        assert time.monotonic() < until_s, now
        await asyncio.sleep(0.02)


def test_a_stuck_event_loop_is_not_alive_and_comes_back(tmp_path: Path) -> None:
    async def check(app: Perdure, served: Served) -> None:
        assert await served.get("/livez") == (200, "ok\n")
        found: list[tuple[int, str]] = []

        def watch() -> None:
            until_s = time.monotonic() + PATIENCE_S
            while time.monotonic() < until_s and not (found and found[-1][0] == 503):
                found.append(served.get_now("/livez"))
            found.append((0, served.get_now("/metrics")[1]))

        thread = threading.Thread(target=watch)
        thread.start()
        thread.join()  # on the event loop: it does not turn before the probe has failed
        *_, (status, why), (_, text) = found
        assert status == 503
        assert why.startswith("the event loop has not turned for ")
        assert exposition.read(text).value("perdure_event_loop_stuck_seconds") > 1.0
        await asyncio.sleep(0)
        assert await served.get("/livez") == (200, "ok\n")
        now = await until(served, lambda now: now.value("perdure_event_loop_lag_seconds_sum") > 1.0)
        assert now.value("perdure_event_loop_stuck_seconds") == 0

    serving(tmp_path, check, stuck_s=1.0)


def test_a_busy_port_and_a_wrong_address_are_one_clear_error(tmp_path: Path) -> None:
    async def check(app: Perdure, served: Served) -> None:
        with pytest.raises(InvalidInput, match=rf"cannot serve metrics on 127\.0\.0\.1:{served._port}: Address already in use; choose"):
            MetricsServer(app, f"127.0.0.1:{served._port}").__enter__()
        for wrong in ("9464", ":9464", "localhost:", "localhost:http", "localhost:99999", "localhost:²"):
            with pytest.raises(InvalidInput, match="is not HOST:PORT; write an address such as 127"):
                MetricsServer(app, wrong)

    serving(tmp_path, check)


FORKS = """
import asyncio, os, sys
from perdure import MetricsServer, Perdure

async def main():
    async with Perdure("sqlite://") as app:
        with MetricsServer(app, "127.0.0.1:0") as server:
            print(server.port, flush=True)
            if os.fork() == 0:              # as a tool may do
                print("forked", flush=True)
                sys.stdin.read()            # it lives until the test closes the pipe
                os._exit(0)
            await asyncio.sleep(60)

asyncio.run(main())
"""


def test_a_process_that_a_tool_forks_does_not_keep_the_port_of_a_killed_worker() -> None:
    command = [sys.executable, "-W", "ignore", "-c", FORKS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        port = int(program.stdout.readline())
        assert program.stdout.readline() == "forked\n"
        program.kill()
        program.wait()
        socket.create_server(("127.0.0.1", port)).close()


def test_a_server_that_is_entered_without_an_event_loop_says_where_to_enter_it() -> None:
    with pytest.raises(InvalidInput, match="enter MetricsServer on the event loop of its app"):
        MetricsServer(Perdure("sqlite://"), "127.0.0.1:0").__enter__()


def test_an_ended_server_leaves_neither_its_port_nor_its_threads(tmp_path: Path) -> None:
    async def main() -> None:
        async with Perdure(f"sqlite:///{tmp_path}/db", AGENTS) as app:
            with MetricsServer(app, "127.0.0.1:0") as server:
                port = server.port
                assert await Served(port).get("/livez") == (200, "ok\n")
            with MetricsServer(app, f"127.0.0.1:{port}"):
                assert await Served(port).get("/livez") == (200, "ok\n")
            until_s = time.monotonic() + PATIENCE_S
            while any(one.name.startswith(("perdure-metrics", "perdure-pulse")) for one in threading.enumerate()):
                assert time.monotonic() < until_s, threading.enumerate()
                await asyncio.sleep(0.01)

    run(main())
