"""Lines of ready runs: fair between tenants, within limits over all workers, and fast even if many runs wait."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import apsw
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.conformance.suite import T0, new_run, serving
from tests.conformance.suite_queues import A1, A2, NOW, claim, park, queue_run, sign_on, take
from tests.unit.store_tools import output, python, raw

from perdure.core.identity import genesis
from perdure.settings import Queue
from perdure.store.api import Served, Store
from perdure.store.open import open_store
from perdure.store.queues import Choice, which
from perdure.store.sqlite.database import SqliteCursor
from perdure.store.sqlite.migrate import APPLICATION_ID, MIGRATIONS
from perdure.store.sqlite.queries import QUERIES

MANY = 10_000


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.db"


@pytest.fixture
def store(path: Path) -> Iterator[Store]:
    opened = open_store(f"sqlite:///{path}", synchronous="normal")
    sign_on(opened, "w")
    yield opened
    opened.close()


def multiply(path: Path, run_id: str, copies: int, *, later_us: int = 0) -> None:
    """Many more runs like this one, only as rows: the tests are about how runs are found, not about their content."""
    with raw(path) as connection:
        connection.execute(
            """INSERT INTO perdure_runs (run_id, agent, version, tenant, queue, input_digest, status, ready_at, seq, head, epoch,
                   created_at, updated_at, priority, line)
               SELECT r.run_id || '-' || n.value, agent, version, tenant, queue, input_digest, status, ready_at + ?2, 1, head, 0,
                   created_at, updated_at, priority, line
               FROM perdure_runs AS r, (WITH RECURSIVE n(value) AS (SELECT 1 UNION ALL SELECT value + 1 FROM n LIMIT ?3) SELECT value FROM n) AS n
               WHERE r.run_id = ?1""",
            (run_id, later_us, copies),
        )
    connection.close()


def steps(path: Path, limit: int, served: list[Served], limits: dict[str, Queue] | None = None) -> int:
    """The work of SQLite for one claim and one query of the next ready time: instructions of its virtual machine."""
    connection, counted = raw(path), 0

    def count() -> bool:
        nonlocal counted
        counted += 1
        return False

    connection.set_progress_handler(count, 1)
    connection.execute("BEGIN IMMEDIATE")
    Choice(SqliteCursor(connection.cursor()), "w", limits or {}, NOW + 100).take(served, None, limit)
    connection.execute(QUERIES["next_ready"], which(served, None)).fetchall()
    connection.execute("ROLLBACK")
    connection.close()
    return counted


def test_one_run_beside_ten_thousand_of_another_tenant_is_among_the_first_two(store: Store, path: Path) -> None:
    queue_run(store, "big", tenant="big")
    multiply(path, "big", MANY)
    queue_run(store, "small", tenant="small", ts=NOW + 1)
    names = [row.run_id for row in take(store, 10)]
    assert "small" in names[:2]
    assert len(names) == 10


@pytest.mark.parametrize(
    ("agent", "version", "ready_in_us", "status"),
    [
        ("a", "1", 0, "ready in the line that is served"),
        ("a", "1", 10**9, "asleep in it"),
        ("a", "0", 0, "of a version that nobody serves"),
    ],
)
def test_ten_thousand_runs_cost_a_claim_nothing_when_they_are(
    store: Store, path: Path, agent: str, version: str, ready_in_us: int, status: str
) -> None:
    """Runs after the first of a line, runs that sleep, and runs in a line that is not served."""
    queue_run(store, "first")
    queue_run(store, "others", agent=agent, version=version, ts=NOW + ready_in_us)
    multiply(path, "others", 20)
    before = steps(path, 10, [A1, A2])
    multiply(path, "others-1", MANY)
    after = steps(path, 10, [A1, A2])
    assert after <= before * 1.05, status


def test_held_runs_are_counted_for_a_limit_without_reading_their_rows(store: Store, path: Path) -> None:
    connection = raw(path)
    plan = " | ".join(row[3] for row in connection.execute(f"EXPLAIN QUERY PLAN {QUERIES['held_by_party']}"))
    connection.close()
    assert "USING COVERING INDEX perdure_runs_held" in plan, plan


@pytest.mark.full
@given(st.integers(2, 5), st.lists(st.tuples(st.integers(1, 4), st.booleans()), min_size=1, max_size=12))
def test_tenants_who_always_have_work_get_the_same_share_however_it_is_claimed(tenants: int, claims: list[tuple[int, bool]]) -> None:
    """With claims of any size, and with or without releases: no tenant is ever more than one run ahead."""
    store = open_store("sqlite://")
    sign_on(store, "w")
    made, had = 0, Counter({f"t{n}": 0 for n in range(tenants)})
    for size, release in claims:
        for tenant in had:
            for _ in range(size):
                made += 1
                queue_run(store, f"r{made}", tenant=tenant, priority=made % 3, ts=NOW - made)
        claimed = claim(store, size)
        assert len(claimed) == size
        had.update(one.row.tenant for one in claimed)
        assert max(had.values()) - min(had.values()) <= 1, had
        if release:
            park(store, claimed[0])
    store.close()


def test_limits_hold_over_two_stores_on_one_file(store: Store, path: Path) -> None:
    other = open_store(f"sqlite:///{path}")
    sign_on(other, "w2")
    limits = {"default": Queue(concurrency=4, per_tenant=3)}
    for n in range(6):
        queue_run(store, f"x{n}", tenant="x")
        queue_run(store, f"y{n}", tenant="y")
    held: Counter[str] = Counter()
    for _ in range(4):
        held.update(row.tenant for row in take(store, 1, limits=limits))
        held.update(row.tenant for row in take(other, 2, worker="w2", limits=limits))
    assert held.total() == 4
    assert max(held.values()) <= 3
    other.close()


_GREEDY = """
import sys
from perdure.settings import Queue
from perdure.store.open import open_store
from tests.conformance.suite import T0, new_run, serving
from tests.conformance.suite_queues import NOW, claim, sign_on
store = open_store(f"sqlite:///{sys.argv[1]}")
sign_on(store, sys.argv[2])
got = [one.lease.run_id for _ in range(30) for one in claim(store, 2, worker=sys.argv[2], limits={"default": Queue(concurrency=7)})]
print(len(got), flush=True)
sys.stdin.readline()
"""


def test_processes_that_claim_at_once_do_not_exceed_a_limit_together(store: Store, path: Path) -> None:
    for n in range(40):
        queue_run(store, f"r{n}", tenant=f"t{n % 3}")
    processes = [python(_GREEDY, path, f"greedy{n}") for n in range(3)]
    # They hold their runs until all of them are done.
    counts = [int(process.stdout.readline()) for process in processes if process.stdout is not None]
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        output(process)
    assert sum(counts) == 7


def test_runs_of_a_dead_worker_count_for_the_limit_until_somebody_has_noticed(store: Store, path: Path) -> None:
    limits = {"default": Queue(concurrency=1)}
    queue_run(store, "r1")
    queue_run(store, "r2")
    code = _GREEDY.replace("sys.stdin.readline()", "import os; os._exit(0)")
    assert output(python(code.replace("concurrency=7", "concurrency=1"), path, "victim")) == "1"
    assert take(store, 1, limits=limits) == []
    assert store.reap("w", 30_000_000, NOW + 1) == 1
    assert [row.run_id for row in take(store, 2, limits=limits)] == ["r2"], "r1 has been ready for less long now"


def test_an_older_journal_gets_its_runs_into_lines(path: Path) -> None:
    connection = apsw.Connection(str(path))
    connection.pragma("journal_mode", "wal")
    for migration in MIGRATIONS[:2]:
        connection.execute(migration.sql)
        connection.execute(QUERIES["record_migration"], (migration.version, migration.checksum))
    connection.pragma("application_id", APPLICATION_ID)
    rows = [
        ("r1", "1", "q", "x", 5),
        ("r2", "1", "q", "x", 5),
        ("r3", "2", "q", "x", 5),
        ("r4", "1", "q", "y", 5),
        ("done", "1", "q", "y", None),
    ]
    for run_id, version, queue, tenant, ready_at in rows:
        connection.execute(
            """INSERT INTO perdure_runs (run_id, agent, version, tenant, queue, input_digest, status, ready_at, seq, head, epoch,
               created_at, updated_at) VALUES (?, 'a', ?, ?, ?, '', ?, ?, 0, ?, 0, 1, 1)""",
            (run_id, version, tenant, queue, "queued" if ready_at else "succeeded", ready_at, genesis(run_id)),
        )
    connection.close()
    store = open_store(f"sqlite:///{path}")
    sign_on(store, "w")
    assert store.problems() == []
    assert store.next_ready([A1], ["q"]) == 5
    assert [row.run_id for row in take(store, 9, served=[A1])] == ["r1", "r4", "r2"]
    assert [row.run_id for row in take(store, 9, served=[A2])] == ["r3"]
    with raw(path) as looked:
        assert looked.execute("SELECT count(*), count(line), count(DISTINCT line) FROM perdure_runs").fetchall() == [(5, 5, 3)]
    looked.close()
    store.close()


def test_new_runs_come_with_their_journals_and_one_that_is_damaged_without(store: Store, path: Path) -> None:
    """No second query for each run. Only the worker that drives a damaged run gets its error."""
    for run_id in ("sound", "damaged"):
        store.create_run(new_run(run_id))
    other = raw(path)
    other.execute("DROP TRIGGER perdure_events_no_update")
    other.execute("UPDATE perdure_events SET data = '[]' WHERE id >> 32 = (SELECT id FROM perdure_runs WHERE run_id = 'damaged')")
    other.close()
    claimed = {one.lease.run_id: one for one in store.claim("w", serving("a"), 9, T0)}
    assert claimed["damaged"].events is None
    assert claimed["sound"].events == tuple(store.read("sound"))
