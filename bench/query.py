"""How long a page of `perdure list --where …` takes among very many runs: `python -m bench.query [RUNS]`.

The runs are made by SQL: most have succeeded, a few have failed or wait; the rare values are a thousandth of the runs or
less, and one agent has had no new run for long. Prints a table for each store: the time of the first page (50 runs) and
of the second, the median of some tries; and what the indexes for queries cost a run that is created, claimed and ended.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import apsw
import psycopg
from tests.conformance.suite import hold_one, payload
from tests.servers.postgres import Server

from perdure.core.events import RunSucceeded
from perdure.core.query import EVERYTHING, parse_query
from perdure.store.api import RowChange, Store
from perdure.store.open import open_store

NOW = 1_800_000_000_000_000
TRIES = 5
QUERY_INDEXES = ("perdure_runs_agent", "perdure_runs_status", "perdure_runs_error", "perdure_runs_tenant", "perdure_runs_queue")
QUERIES = (
    "",
    *("status:succeeded", "status:failed", "status:needs_attention", "status:running,waiting", "-status:succeeded"),
    *("agent:a3", "agent:rare", "agent:retired", "version:3", "version:1", "tenant:t7", "tenant:default", "queue:slow", "queue:default"),
    *("id:run-500000", "id:run-77*", "id:*99", "id:run-*", "parent:run-5", "parent:none"),
    *("label.customer:c-8", "label.batch:b-1", "label.customer:c-12* agent:a3", "-label.batch:b-1"),
    *("error:503", "error:*timeout*", "error:nowhere"),
    *("since:2h", "since:1s", "until:30d", "created:>1d", "created:<300d"),
    *("status:failed agent:a3", "status:failed agent:rare", "status:failed error:503", "agent:a3 version:3", "agent:a3 tenant:t7"),
    *("label.batch:b-1 status:failed", "status:needs_attention tenant:t7", "status:succeeded agent:retired", "agent:a3 since:30d"),
)
# {n}: the number of the run, from 1. One run is created each 30 s or so, the last one now. The same text for both dialects.
COLUMNS = """
    'run-' || {n} || CASE WHEN {n} % 50 = 7 THEN '/1' ELSE '' END,
    CASE WHEN {n} % 2000 = 3 THEN 'rare' WHEN {n} < {runs} / 10 AND {n} % 2 = 0 THEN 'retired' ELSE 'a' || ({n} % 8) END,
    CASE WHEN {n} < {runs} / 5 THEN '1' ELSE CAST(2 + {n} % 3 AS TEXT) END,
    CASE WHEN {n} % 3 = 0 THEN 't' || ({n} % 500) ELSE 'default' END,
    CASE WHEN {n} % 1000 = 9 THEN 'slow' ELSE 'default' END,
    CASE WHEN {n} % 25 = 2 THEN 'failed' WHEN {n} % 5000 = 11 THEN 'needs_attention' WHEN {n} % 500 = 12 THEN 'waiting'
        WHEN {n} % 10000 = 13 THEN 'paused' WHEN {n} % 300 = 14 THEN 'cancelled' ELSE 'succeeded' END,
    CASE WHEN {n} % 25 = 2 THEN 'ToolFailed: HTTP ' || (500 + {n} % 4) || ' from https://api.example/' || {n} WHEN {n} % 5000 = 11 THEN 'Timeout: timeout' END,
    {now} - ({runs} - {n}) * 30000000,
    {now} - ({runs} - {n}) * 30000000 + 20000000,
    CASE WHEN {n} % 50 = 7 THEN 'run-' || {n} END
"""
NAMES = "run_id, agent, version, tenant, queue, status, error, created_at, updated_at, parent"
LABELS = (
    ("customer", "'c-' || (id % 20000)", "id % 2 = 0"),
    ("batch", "'b-' || (id / 50000)", "1 = 1"),
)


def fill_sqlite(path: Path, runs: int) -> None:
    with closing(apsw.Connection(str(path))) as connection:
        connection.execute("INSERT INTO perdure_lines (agent, version, queue, tenant, priority) VALUES ('a', '1', 'default', 'default', 0)")
        connection.execute(
            f"INSERT INTO perdure_runs ({NAMES}, input_digest, seq, head, epoch, line) "
            f"WITH RECURSIVE numbers (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM numbers WHERE n < {runs}) "
            f"SELECT {COLUMNS.format(n='n', now=NOW, runs=runs)}, '', 1, zeroblob(32), 0, 1 FROM numbers"
        )
        for key, value, which in LABELS:
            connection.execute(f"INSERT INTO perdure_labels SELECT id, '{key}', {value}, created_at FROM perdure_runs WHERE {which}")


def fill_postgres(url: str, runs: int) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("INSERT INTO perdure_lines (agent, version, queue, tenant, priority) VALUES ('a', '1', 'default', 'default', 0)")
        connection.execute(
            f"INSERT INTO perdure_runs ({NAMES}, input_digest, seq, head, epoch, line) "
            f"SELECT {COLUMNS.format(n='n', now=NOW, runs=runs)}, '', 1, sha256(''), 0, 1 FROM generate_series(1, {runs}::bigint) AS numbers (n)".encode()
        )
        for key, value, which in LABELS:
            connection.execute(
                f"INSERT INTO perdure_labels SELECT id, '{key}', {value}, created_at FROM perdure_runs WHERE {which}".encode()
            )
        connection.execute("VACUUM ANALYZE")


def timed(work: Callable[[], object]) -> float:
    taken = []
    for _ in range(TRIES):
        began = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began)
        if taken[-1] > 2:
            break
    return statistics.median(taken) * 1000


def measure(store: Store) -> Iterator[str]:
    for text in QUERIES:
        query = parse_query(text, NOW) if text else EVERYTHING
        page = store.find(query, 50)
        first = timed(lambda query=query: store.find(query, 50))  # type: ignore[misc]
        after = page[-1][0] if page else None
        second = timed(lambda query=query, after=after: store.find(query, 50, after)) if after else 0.0  # type: ignore[misc]
        yield f"| `{text or '(all)'}` | {len(page)} | {first:.1f} | {second:.1f} |{' **slow** |' if first > 50 else ' |'}"
    for text, by in (("", "status"), ("", "agent"), ("", "label.batch"), ("status:failed", "error")):
        query = parse_query(text, NOW) if text else EVERYTHING
        yield f"| count `{text}` by {by} | | {timed(lambda query=query, by=by: store.count(query, by)):.0f} | | |"  # type: ignore[misc]


def lives(store: Store, number: int, prefix: str, clock: Callable[[], float]) -> float:
    """Seconds for so many runs, each created, claimed and ended in commits of their own."""
    began = clock()
    for at in range(number):
        held = hold_one(store, f"{prefix}-{at}", "w")
        store.append([held.append(RunSucceeded(payload("done")), row=RowChange("succeeded"))])
    return clock() - began


def cost(store: Store, drop: Callable[[str], None], restore: Callable[[], object]) -> str:
    ratios = []
    clock = time.perf_counter if store.remote else time.process_time  # SQLite works in this process, whatever else the machine does
    for turn in range(5):
        restore()
        with_them = lives(store, 300, f"with-{turn}", clock)
        for index in QUERY_INDEXES:
            drop(index)
        ratios.append(with_them / lives(store, 300, f"without-{turn}", clock))
    restore()
    return f"a run with the indexes takes {statistics.median(ratios):.2f} of the time without them ({', '.join(f'{one:.2f}' for one in sorted(ratios))})"


@contextmanager
def sqlite(runs: int) -> Iterator[tuple[Store, Callable[[str], None]]]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal.db"
        open_store(f"sqlite:///{path}").close()
        fill_sqlite(path, runs)
        with closing(open_store(f"sqlite:///{path}")) as store, closing(apsw.Connection(str(path))) as outside:
            yield store, lambda index: outside.execute(f"DROP INDEX IF EXISTS {index}") and None


@contextmanager
def postgres(runs: int) -> Iterator[tuple[Store, Callable[[str], None]]]:
    with closing(Server(shared_buffers="256MB")) as server:
        server.start()
        url = server.new_database()
        open_store(url).close()
        fill_postgres(url, runs)
        with closing(open_store(url)) as store, psycopg.connect(url, autocommit=True) as outside:
            yield store, lambda index: outside.execute(f"DROP INDEX IF EXISTS {index}".encode()) and None


def main() -> None:
    runs = int(sys.argv[1].replace("_", "")) if len(sys.argv) > 1 else 1_000_000
    wanted = sys.argv[2:] or ["sqlite", "postgres"]
    for name, opened in (("sqlite", sqlite), ("postgres", postgres)):
        if name not in wanted:
            continue
        with opened(runs) as (store, drop):
            print(f"\n{name}, {runs:,} runs\n\n| query | runs | first page, ms | second page, ms | |\n|---|---|---|---|---|")
            for line in measure(store):
                print(line, flush=True)
            print(f"\n{cost(store, drop, store.restore_schema)}", flush=True)


if __name__ == "__main__":
    main()
