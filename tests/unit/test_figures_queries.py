"""The figures of metrics: right on both stores, and served by an index however many runs have finished."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import apsw
import psycopg
import pytest

from perdure.store.api import Store, Unfinished, Waiting
from perdure.store.open import open_store
from perdure.store.postgres.queries import QUERIES as OF_POSTGRES
from perdure.store.sqlite.queries import QUERIES as OF_SQLITE

FINISHED, UNFINISHED = 20_000, 400
READY, PENDING = 100, 100
# 10 lines: agents a0 to a4, queues q0 and q1. Of each four unfinished runs one is queued, one has a timer, one waits for an approval, one
# is in doubt. A specimen counts nowhere.
LINES = """INSERT INTO perdure_lines (id, agent, version, queue, tenant, priority)
WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 10)
SELECT i, 'a' || (i % 5), '1', 'q' || (i % 2), 't' || i, 0 FROM n"""
RUNS = """INSERT INTO perdure_runs (run_id, agent, version, tenant, queue, input_digest, status, attention, ready_at, seq, head, epoch,
    created_at, updated_at, line, specimen)
WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {last})
SELECT 'r' || i, 'a' || ((i % 10 + 1) % 5), '1', 't' || (i % 10 + 1), 'q' || ((i % 10 + 1) % 2), 'd',
    CASE WHEN i > {unfinished} AND i < {last} THEN 'succeeded' WHEN i % 4 = 0 THEN 'queued' WHEN i % 4 = 1 THEN 'waiting'
        WHEN i % 4 = 2 THEN 'waiting_approval' ELSE 'needs_attention' END,
    CASE WHEN i <= {unfinished} AND i % 4 = 3 THEN 'in_doubt' END,
    CASE WHEN i > {unfinished} THEN NULL WHEN i % 4 = 0 THEN 1000 + i WHEN i % 4 = 1 THEN 9000000000 + i END,
    1, {head}, 0, i, i, i % 10 + 1, CASE WHEN i = {last} THEN '{{}}' END
FROM n"""
APPROVALS = """INSERT INTO perdure_approvals (approval, run, seq, call, action, asked_at, status, deciders)
SELECT 'ap' || run_id, id, 1, 1, 'x', 5000 + id, 'pending', '[]' FROM perdure_runs WHERE status = 'waiting_approval' AND specimen IS NULL"""
SETTLED = """INSERT INTO perdure_approvals (approval, run, seq, call, action, asked_at, status, deciders)
SELECT 'as' || run_id, id, 1, 1, 'x', 1, 'consumed', '[]' FROM perdure_runs WHERE status = 'succeeded' AND id % 4 = 0"""


def fill(head: str) -> list[str]:
    last = UNFINISHED + FINISHED + 2  # a number that is no multiple of 4: the specimen waits for an approval
    return [LINES, RUNS.format(last=last, unfinished=UNFINISHED, head=head), APPROVALS, SETTLED]


class Filled:
    """A store with many finished runs and few others, and how its database would answer a statement."""

    def __init__(self, store: Store, where: str) -> None:
        self.store = store
        self._where = where

    def plan(self, name: str) -> str:
        if self.store.remote:
            sql = re.sub(r"\$\d+", "2000", OF_POSTGRES[name].sql)
            with psycopg.connect(self._where, autocommit=True) as connection:
                return "\n".join(row[0] for row in connection.execute(f"EXPLAIN {sql}".encode()))
        connection_ = apsw.Connection(self._where)
        values = (2000,) if "?" in OF_SQLITE[name] else ()
        return "\n".join(row[3] for row in connection_.execute(f"EXPLAIN QUERY PLAN {OF_SQLITE[name]}", values))


@pytest.fixture(params=["sqlite", "postgres"])
def filled(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Filled]:
    if request.param == "sqlite":
        store, where = open_store(f"sqlite:///{tmp_path}/j.db"), f"{tmp_path}/j.db"
        connection = apsw.Connection(where)
        for statement in fill("zeroblob(32)"):
            connection.execute(statement)
        connection.close()
    else:
        where = request.getfixturevalue("postgres_url")
        store = open_store(where)
        with psycopg.connect(where, autocommit=True) as server:
            for statement in fill("'\\x00'::bytea"):
                server.execute(statement.encode())
            server.execute("VACUUM ANALYZE perdure_runs")
            server.execute("ANALYZE perdure_approvals")
    yield Filled(store, where)
    store.close()


def test_the_figures_count_what_is_there(filled: Filled) -> None:
    figures = filled.store.figures(2000)
    assert sum(one.runs for one in figures.unfinished) == UNFINISHED
    by_status = {
        status: sum(one.runs for one in figures.unfinished if one.status == status) for status in ("queued", "waiting", "needs_attention")
    }
    assert by_status == {"queued": 100, "waiting": 100, "needs_attention": 100}
    assert all((one.attention == "in_doubt") == (one.status == "needs_attention") for one in figures.unfinished)
    # Runs 4, 24, 44 … are queued in line 5, and so of agent a0 in queue q1.
    assert Unfinished("a0", "q1", "queued", None, 20) in figures.unfinished
    assert Waiting("a0", "q1", 20, 1004) in figures.ready
    assert sum(one.number for one in figures.ready) == READY
    assert sum(one.number for one in figures.pending) == PENDING
    assert min(one.since for one in figures.pending) == 5002
    assert figures.held == {}
    assert sum(one.number for one in filled.store.figures(1000).ready) == 0


@pytest.mark.parametrize(
    ("statement", "index"),
    [
        ("unfinished_runs", "perdure_runs_unfinished"),
        ("ready_runs", "perdure_runs_line"),
        ("pending_approvals", "perdure_approvals_status"),
        ("held_by_workers", "perdure_runs_held"),
    ],
)
def test_an_index_serves_every_figure(filled: Filled, statement: str, index: str) -> None:
    plan = filled.plan(statement)
    assert index in plan, plan
    assert "Seq Scan on perdure_runs" not in plan
    assert not re.search(r"SCAN (perdure_runs|r)( USING INDEX sqlite_|$)", plan, re.M), plan
