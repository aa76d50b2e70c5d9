"""Workloads on PostgreSQL, compared with a raw commit loop and pgbench on the same server in the same minute."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import agents
import here
import litter
import project  # noqa: F401 – before what lies in tests
import psycopg
import raw_postgres
from elsewhere import environment, latencies, worker
from figures import Figure, Sample
from round_trips import RoundTrips
from tests.servers.binaries import account
from tests.servers.postgres import Server

from perdure import Perdure

_LEAST, _MOST = 3, 5
_ENOUGH_S = 2.0
_PATIENCE_S = 60.0
_CHILD = Path(__file__).with_name("child.py")


@contextmanager
def started(folder: Path) -> Iterator[Measured]:
    """A server whose files are on the measured disk, if its user can access the folder."""
    folder.chmod(0o711)
    before = tempfile.tempdir
    tempfile.tempdir = str(folder) if account().can_enter(folder) else before
    try:
        server = Server(shared_buffers="128MB")
    finally:
        tempfile.tempdir = before
    try:
        server.start()
        yield Measured(server)
    finally:
        server.close()


class Measured:
    """The server and the measurements on it. Every repeat has its own database."""

    def __init__(self, server: Server) -> None:
        self._server = server
        raw_postgres.prepare(server.url)
        self.workloads: tuple[Callable[[Path], list[Figure]], ...] = (
            self.sequential,
            self.concurrent,
            self.shared,
            self.idle,
            self.round_trips,
            self.space,
        )

    def new_database(self) -> str:
        """The URL of an empty database."""
        return self._server.new_database()

    def facts(self, folder: Path) -> dict[str, str]:
        with psycopg.connect(self._server.url) as connection:
            row = connection.execute(
                "SELECT current_setting('server_version'), current_setting('fsync'), current_setting('synchronous_commit')"
            ).fetchone()
        assert row is not None
        psycopg_s, pgbench_s = self._raw(), raw_postgres.pgbench_per_s(self._server._bin, folder, self._server.url)
        return {
            "postgresql": f"{row[0]}, fsync {row[1]}, synchronous_commit {row[2]}, psycopg {psycopg.__version__} ({psycopg.pq.__impl__})",
            "single-row commits over one connection": f"{psycopg_s:,.0f} /s by psycopg, {pgbench_s:,.0f} /s by pgbench",
        }

    def sequential(self, folder: Path) -> list[Figure]:
        """PostgreSQL: one run of 1,000 calls, one after the other."""
        theirs: list[float] = []
        own: list[float] = []
        for _ in _repeats(own):
            theirs.append(self._raw())
            own.append(self._on_new_database(lambda url: here.one_run(url, agents.steps, 1000)))
        commits, rate = Sample.of(theirs), Sample.of(own)
        note = f"{rate.median:,.0f} calls/s beside {commits.median:,.0f} raw commits/s"
        return [Figure("PostgreSQL: one run, 1,000 calls: share of the raw commit rate", rate.over(commits), "×", 0.4, note=note)]

    def concurrent(self, folder: Path) -> list[Figure]:
        """PostgreSQL: 200 concurrent runs of 20 calls in one process."""
        runs, calls = 200, 20
        theirs: list[float] = []
        own: list[float] = []
        for _ in _repeats(own):
            theirs.append(self._raw())
            own.append(runs * calls / self._on_new_database(lambda url: here.serve(url, agents.steps, [calls] * runs)))
        commits, rate = Sample.of(theirs), Sample.of(own)
        note = f"{rate.over(commits).median:.2f} × {commits.median:,.0f} raw commits/s"
        return [
            Figure("PostgreSQL: 200 runs of 20 calls at a time", rate, "calls/s", min(5000.0, 3 * commits.median), note=note),
        ]

    def shared(self, folder: Path) -> list[Figure]:
        """PostgreSQL: a queue of 200 runs of 10 calls, for two workers and for one; fewer calls if a call computes."""
        return [
            *self._two_against_one(
                folder, "steps", "tools that do nothing: all there is to share is our own time and the server's", None, calls=10
            ),
            *self._two_against_one(folder, "labours", "each call costs its worker 1 ms of computing", 1.5, calls=6),
        ]

    def _two_against_one(self, folder: Path, agent: str, which: str, target: float | None, calls: int) -> list[Figure]:
        one: list[float] = []
        two: list[float] = []
        for _ in range(_LEAST):
            one.append(self._rate_of_workers(folder, agent, 1, calls))
            two.append(self._rate_of_workers(folder, agent, 2, calls))
        alone, both = Sample.of(one), Sample.of(two)
        note = f"{both.median:,.0f} calls/s against {alone.median:,.0f}; {which}"
        name = f"PostgreSQL: two workers, in times of one ({agent})"
        return [Figure(name, both.over(alone), "×", target, note=note)]

    def _rate_of_workers(self, folder: Path, agent: str, count: int, calls: int) -> float:
        """Calls per second of `count` worker processes, from the moment at which they may begin."""
        runs = 200  # twice as many as a worker claims at a time; otherwise the first worker would claim all runs
        url = self._server.new_database()
        command = [sys.executable, str(_CHILD), "stand_by", url, "-"]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        workers = [subprocess.Popen(command, env=environment(folder), **pipes) for _ in range(count)]
        try:
            asyncio.run(_queue(url, agent, runs, calls))  # while the workers start
            for process in workers:
                assert process.stdout is not None
                assert process.stdout.readline() == "ready\n"
            begun = time.perf_counter()
            for process in workers:
                assert process.stdin is not None
                process.stdin.write("go\n")
                process.stdin.flush()
            self._wait_for(url, runs)
            elapsed = time.perf_counter() - begun
        finally:
            for process in workers:
                process.terminate()
                process.communicate(timeout=_PATIENCE_S)
        self._server.drop(url)
        return runs * calls / elapsed

    def _wait_for(self, url: str, runs: int) -> None:
        deadline = time.perf_counter() + _PATIENCE_S
        with psycopg.connect(url, autocommit=True) as connection:
            while True:
                # Count only the unfinished runs: counting all runs ten times a second would load the server.
                row = connection.execute("SELECT count(*) FROM perdure_runs WHERE status <> 'succeeded'").fetchone()
                if row == (0,):
                    return
                assert time.perf_counter() < deadline, f"{row} of {runs} runs are left"
                time.sleep(0.02)

    def idle(self, folder: Path) -> list[Figure]:
        """PostgreSQL: how soon an idle worker begins a queued run, and how many connections an idle worker keeps."""
        url = self._server.new_database()
        with worker(folder, url):
            latency = Sample.of(asyncio.run(latencies(url, 20)))
            time.sleep(1.0)
            counts = Sample.of([self._connections(url) for _ in range(3)])
        self._server.drop(url)
        return [
            Figure(
                "PostgreSQL: an idle worker elsewhere begins a queued run",
                latency,
                "ms",
                10,
                "at most",
                "from start() to the first effect, 20 times",
            ),
            Figure(
                "PostgreSQL: connections of an idle worker", counts, "", note="the one that listens, and those that its last work needed"
            ),
        ]

    def _connections(self, url: str) -> float:
        time.sleep(0.3)
        with psycopg.connect(url, application_name="bench") as connection:
            row = connection.execute(
                "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'perdure'"
            ).fetchone()
        assert row is not None
        return float(row[0])

    def round_trips(self, folder: Path) -> list[Figure]:
        """PostgreSQL: round trips of 200 concurrent runs, with 5 and with 15 calls each."""
        runs = 200
        per_commit: list[float] = []
        per_run: list[float] = []
        for _ in range(_LEAST):
            (few, few_commits), (many, many_commits) = self._count_round_trips(runs, 5), self._count_round_trips(runs, 15)
            each = (many - few) / (many_commits - few_commits)
            per_commit.append(each)
            per_run.append((few - few_commits * each) / runs)
        return [
            Figure(
                "PostgreSQL: round trips per commit, 200 runs at a time", Sample.of(per_commit), "", note="what 10 more calls of each add"
            ),
            Figure("PostgreSQL: round trips per run beside those", Sample.of(per_run), "", note="to claim it and to read its journal"),
        ]

    def _count_round_trips(self, runs: int, calls: int) -> tuple[int, int]:
        """Round trips of a worker from its start to its end, and how many transactions wrote to the journal."""
        url = self._server.new_database()
        asyncio.run(_queue(url, "steps", runs, calls))
        between = RoundTrips(url)
        try:
            asyncio.run(_work_off(between.url(url), runs))
        finally:
            between.close()
        with psycopg.connect(url) as connection:
            row = connection.execute("SELECT count(DISTINCT xmin::text) FROM perdure_events WHERE seq > 1").fetchone()
        assert row is not None
        self._server.drop(url)
        return between.count, int(row[0])

    def space(self, folder: Path) -> list[Figure]:
        """PostgreSQL: bytes in the tables of runs and events for one call."""
        calls, runs = 100, 10

        def size() -> float:
            url = self._server.new_database()
            try:
                asyncio.run(here.serve(url, agents.steps, [calls] * runs))
                with psycopg.connect(url, autocommit=True) as connection:
                    connection.execute("VACUUM perdure_runs, perdure_events")
                    row = connection.execute(
                        "SELECT pg_total_relation_size('perdure_events') + pg_total_relation_size('perdure_runs')"
                    ).fetchone()
                assert row is not None
                return float(row[0])
            finally:
                self._server.drop(url)

        per_call = Sample.of([size() / (calls * runs) for _ in range(_LEAST)])
        note = "10 runs of 100 calls, with their rows and indexes, after a vacuum"
        return [Figure("PostgreSQL: database per call (20-character argument)", per_call, "bytes", note=note)]

    def _raw(self) -> float:
        return raw_postgres.commits_per_s(self._server.url)

    def _on_new_database(self, ours: Callable[[str], Coroutine[Any, Any, float]]) -> float:
        url = self._server.new_database()
        try:
            return asyncio.run(ours(url))
        finally:
            self._server.drop(url)


def _repeats(done: list[float]) -> Iterator[None]:
    begun = time.perf_counter()
    while len(done) < _LEAST or (len(done) < _MOST and time.perf_counter() - begun < _ENOUGH_S):
        litter.collect()  # garbage of one repeat must not cost time in the next
        yield


async def _queue(url: str, agent: str, runs: int, calls: int) -> None:
    async with Perdure(url) as app:
        for _ in range(0, runs, 10):
            await asyncio.gather(*(app.start(getattr(agents, agent), calls) for _ in range(10)))


async def _work_off(url: str, runs: int) -> None:
    """Run a worker in this process until it has finished `runs` runs."""
    count, stop = here.counted(runs)
    async with Perdure(url, agents=[agents.steps], observers=[count]) as app:
        await app.work(stop=stop)
