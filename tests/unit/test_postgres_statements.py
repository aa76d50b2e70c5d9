"""The statements of the PostgreSQL dialect.

The same names as in SQLite, valid on the server, and fast with the indexes.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from importlib import resources
from typing import Any

import psycopg
import pytest
from psycopg.pq import ExecStatus
from tests.conformance.suite import Held, hold_one
from tests.servers.postgres import Server
from tests.unit.postgres_tools import empty, opened, raw

from perdure.core.events import ThoughtRecorded
from perdure.store.api import Committed, RowChange
from perdure.store.cursor import load
from perdure.store.postgres.journal import _composed
from perdure.store.postgres.queries import QUERIES, Statement, numbered, shown
from perdure.store.sqlite.queries import QUERIES as SQLITE

SOURCE = load("postgres")
BOTH = sorted(SOURCE.keys() & SQLITE.keys())
BIG = ("perdure_runs", "perdure_events", "perdure_inbox", "perdure_notices", "perdure_approvals", "perdure_blobs", "perdure_budgets")
SERVED = '[["a", "1"]]'
# The statement, its parameters, and the indexes that it must use.
USES: list[tuple[str, Any, set[str]]] = [
    ("ready_of_line", {"line": 1, "now": 1, "after_ready": 0, "after_id": 0, "suspects": True, "limit": 9}, {"perdure_runs_line"}),
    ("lines_with_ready_runs", {"served": SERVED, "now": 1, "queues": None}, {"perdure_runs_line"}),
    ("next_ready", {"served": SERVED, "queues": None}, {"perdure_runs_line"}),
    (
        "claim_at_once",
        {
            "served": SERVED,
            "queues": None,
            "limited": "[]",
            "now": 1,
            "worker": "w",
            "name": "host:1",
            "limit": 9,
            "suspect": 2,
            "secret": b"s",
            "token": 1,
            "data": "{}",
            "few": 9,
        },
        {"perdure_runs_line", "perdure_runs_pkey", "perdure_events_pkey", "perdure_inbox_run"},
    ),
    ("claimed_at_once", {"worker": "w", "secret": b"s"}, {"perdure_runs_held"}),
    (
        "signal_at_once",
        {
            "run_id": "r",
            "parked": ["waiting"],
            "status": "queued",
            "topic": "t",
            "has_key": False,
            "once": "k",
            "event_id": bytes(16),
            "now": 1,
            "data": "{}",
            "channel": "perdure",
            "ring": "x",
            "alone": True,
        },
        {"perdure_runs_run_id_key", "perdure_runs_pkey", "perdure_inbox_run", "perdure_signals_pkey"},
    ),
    ("lock_to_release", {"keys": [1, 2]}, {"perdure_runs_pkey"}),
    ("ready_below", {"run_id": "r", "now": 1, "queues": None, "served": SERVED, "suspects": True, "limit": 9}, {"perdure_runs_run_id_key"}),
    ("family_of_run", {"run_id": "r"}, {"perdure_runs_run_id_key"}),
    ("run_by_id", ("r",), {"perdure_runs_run_id_key"}),
    ("lock_runs", {"keys": [1, 2], "ending": [2]}, {"perdure_runs_pkey", "perdure_runs_run_id_key"}),
    ("inbox_of_worker", ("w",), {"perdure_runs_held", "perdure_inbox_run"}),
    ("unread_of_run", (1,), {"perdure_inbox_run"}),
    ("read_events", {"run_id": "r", "after": 0, "until": 9}, {"perdure_events_pkey", "perdure_runs_run_id_key"}),
    ("stored_events", {"run_id": "r"}, {"perdure_events_pkey", "perdure_runs_run_id_key"}),
    ("event_at", (1, 1), {"perdure_events_pkey"}),
    ("due_notices", (1, 9), {"perdure_notices_due"}),
    ("notices_to_take", (1, 9), {"perdure_notices_due"}),
    ("next_notice", (), {"perdure_notices_due"}),
    (
        "list_approvals",
        {"statuses": '["pending"]', "tenant": None, "run_id": None, "limit": 9},
        {"perdure_events_pkey", "perdure_runs_pkey"},
    ),
    ("withdraw_approvals", {"ts": 1, "run": 1}, {"perdure_approvals_run"}),
    ("suspects_of_worker", ("w",), {"perdure_runs_held"}),
    ("held_suspects", (), {"perdure_runs_held"}),
    ("load_of_worker", ("w",), {"perdure_runs_held"}),
    ("held_by_party", (), {"perdure_runs_held"}),
    ("lose_runs", {"lost": 1, "now": 1, "worker": "w", "beside": 0, "beside_suspects": 0}, {"perdure_runs_held", "perdure_runs_pkey"}),
    ("over_budget", ("r",), {"perdure_budgets_above", "perdure_runs_ledger"}),
    ("workers_without_session", (), {"perdure_runs_held"}),
    ("blob", (bytes(32),), {"perdure_blobs_pkey"}),
    ("blobs_to_keep", {"digests": f'["{bytes(32).hex()}"]'}, {"perdure_blobs_pkey"}),
    ("journals_without_run", (), {"perdure_events_pkey"}),
]


CROWD = """
INSERT INTO perdure_lines (agent, version, queue, tenant, priority) SELECT 'a' || n % 5, '1', 'q', 't' || n, 0 FROM generate_series(1, 20) AS n;
INSERT INTO perdure_runs (id, run_id, agent, version, tenant, queue, input_digest, status, ready_at, seq, head, epoch, holder, created_at,
    updated_at, line, ledger)
SELECT n, 'r' || n, 'a', '1', 't', 'q', '', 'queued', CASE WHEN n % 3 = 0 THEN n END, 4, '', 0, CASE WHEN n % 3 = 1 THEN 'w' || n % 50 END, n, n,
    1 + n % 20, CASE WHEN n % 5 = 0 THEN n END
FROM generate_series(1, 3000) AS n;
INSERT INTO perdure_events (run, seq, event_id, ts, epoch, data, hash)
SELECT run, seq, decode(repeat('00', 16), 'hex'), 1, 0, '{"type":"x"}', decode(repeat('00', 32), 'hex')
FROM generate_series(1, 3000) AS run, generate_series(1, 4) AS seq;
INSERT INTO perdure_inbox (run, event_id, ts, data) SELECT n, '', 1, '{}' FROM generate_series(1, 2000) AS n;
INSERT INTO perdure_notices (run, seq, next_at) SELECT n, 1, n FROM generate_series(1, 2000) AS n;
INSERT INTO perdure_approvals (approval, run, seq, call, action, asked_at, status, deciders)
SELECT 'p' || n, n, 1, 1, 'x', n, CASE WHEN n % 40 = 0 THEN 'pending' ELSE 'consumed' END, '[]' FROM generate_series(1, 2000) AS n;
INSERT INTO perdure_budgets (run, above, on_exceed) SELECT n * 5, CASE WHEN n > 10 THEN 5 * (n / 10) END, 'ask' FROM generate_series(1, 600) AS n;
INSERT INTO perdure_blobs SELECT decode(lpad(to_hex(n), 64, '0'), 'hex'), '' FROM generate_series(1, 1000) AS n;
INSERT INTO perdure_workers (worker, name, pid, started_at, beat_at) SELECT 'w' || n, 'w', 1, n, 1 FROM generate_series(0, 59) AS n;
ANALYZE perdure_lines, perdure_workers, perdure_runs, perdure_events, perdure_inbox, perdure_notices, perdure_approvals, perdure_budgets, perdure_blobs;
"""


@pytest.fixture
def url(postgres: Server) -> str:
    url = empty(postgres)
    opened(url).close()
    return url


def asked_for(sql: str) -> tuple[set[str], int]:
    """The names of its parameters, and how many have none."""
    found = re.findall(r"(?<![:\w]):([a-z_]+)|\?(\d*)", sql)
    marks = [number for name, number in found if not name]
    return {name for name, _ in found if name}, max([len(marks) if "" in marks else 0, *(int(n) for n in marks if n)])


@pytest.mark.parametrize(
    ("sql", "expected"),
    [
        ("SELECT :a, :b_c, :a::text", Statement("SELECT $1, $2, $1::text", ("a", "b_c"))),
        ("SELECT ?, ?::bigint", Statement("SELECT $1, $2::bigint")),
        ("SELECT ?2, ?1, ?2", Statement("SELECT $2, $1, $2")),
        ("SELECT x::bigint[], (:a)::int", Statement("SELECT x::bigint[], ($1)::int", ("a",))),
        ("SELECT (:a::jsonb ->> 0), r.b::text", Statement("SELECT ($1::jsonb ->> 0), r.b::text", ("a",))),
        ("SELECT 1", Statement("SELECT 1")),
    ],
)
def test_parameters_are_numbered_and_casts_are_left_alone(sql: str, expected: Statement) -> None:
    assert numbered(sql) == expected


def test_values_come_in_the_order_of_their_numbers_and_as_the_server_can_hold_them() -> None:
    statement = numbered("SELECT :b, :a, :b")
    assert statement.values({"a": 1, "b": "x\0y", "unused": 3}) == ["x␀y", 1]
    assert numbered("SELECT ?, ?").values(("\0", b"\0")) == ["␀", b"\0"]
    assert shown(None) is None
    with pytest.raises(KeyError):
        statement.values({"a": 1})


def test_both_dialects_know_the_statements_that_the_logic_asks_for_under_the_same_names() -> None:
    assert len(BOTH) > 100
    files = [file for file in resources.files("perdure.store").iterdir() if file.name.endswith(".py")]
    logic = "".join(file.read_text("utf-8") for file in files)
    assert [name for name in SOURCE.keys() ^ SQLITE.keys() if f'"{name}"' in logic] == []


@pytest.mark.parametrize("name", BOTH)
def test_a_statement_has_the_same_parameters_in_both_dialects(name: str) -> None:
    names, marks = asked_for(SQLITE[name])
    # In a file with one writer the number of a run is its place; here its transaction comes first.
    assert asked_for(SOURCE[name]) == (names | ({"after_commit", "newest_commit"} if name == "growing_runs" else set()), marks)


def test_every_statement_of_the_file_is_used() -> None:
    files = [*resources.files("perdure.store").iterdir(), *resources.files("perdure.store.postgres").iterdir()]
    code = "".join(file.read_text("utf-8") for file in files if file.name.endswith(".py"))
    assert [name for name in SOURCE if f'"{name}"' not in code] == []


def test_the_server_understands_every_statement_and_every_parameter_has_one_type(url: str) -> None:
    wrong = {}
    statements = {name: statement.sql.encode() for name, statement in QUERIES.items()}
    for name in ("advance", "advance_and_project"):
        statements |= {f"{name} with {n}": _composed(QUERIES[name].sql, n) for n in (1, 2, 8)}
    with raw(url) as connection:
        for name, sql in statements.items():
            result = connection.pgconn.prepare(b"", sql)
            if result.status != ExecStatus.COMMAND_OK:
                wrong[name] = result.error_message.decode()
                continue
            described = connection.pgconn.describe_prepared(b"")
            if name in QUERIES and QUERIES[name].names and described.nparams != len(QUERIES[name].names):
                wrong[name] = f"{described.nparams} parameters"
    assert wrong == {}


@pytest.mark.parametrize(("name", "params", "indexes"), USES)
def test_it_is_found_by_its_index(postgres: Server, planned: psycopg.Connection[Any], name: str, params: Any, indexes: set[str]) -> None:
    statement = QUERIES[name]
    ((plan,),) = psycopg.RawCursor(planned).execute(f"EXPLAIN (FORMAT JSON) {statement.sql}".encode(), statement.values(params)).fetchall()
    nodes = list(each_node(plan[0]["Plan"]))
    assert indexes <= {node["Index Name"] for node in nodes if "Index Name" in node}, json.dumps(plan, indent=1)
    assert [node["Relation Name"] for node in nodes if node["Node Type"] == "Seq Scan" and node["Relation Name"] in BIG] == []


@pytest.fixture(scope="module")
def planned(postgres: Server) -> Iterator[psycopg.Connection[Any]]:
    """A journal of some thousand runs."""
    url = empty(postgres)
    opened(url).close()
    with raw(url) as connection:
        connection.execute(CROWD)
        connection.execute("SET enable_seqscan = off")  # only statements without an index then read whole tables
        yield connection


def test_the_events_of_approvals_are_looked_up_for_those_alone_that_are_listed(planned: psycopg.Connection[Any]) -> None:
    nodes = done(planned, "list_approvals", {"statuses": '["pending"]', "tenant": None, "run_id": None, "limit": 9})
    (events,) = [node for node in nodes if node.get("Relation Name") == "perdure_events"]
    assert events["Actual Loops"] * events["Actual Rows"] == 9


def test_a_page_of_what_grows_reads_no_more_than_it_shows(planned: psycopg.Connection[Any]) -> None:
    ((born,),) = planned.execute("SELECT born::text::bigint FROM perdure_runs LIMIT 1").fetchall()
    planned.execute("SELECT pg_current_xact_id()")  # so that the runs are from the past
    place = {"after_commit": born, "after": 1500, "newest_commit": born, "newest": 1200, "limit": 9}
    read = [node for node in done(planned, "growing_runs", place) if node.get("Index Name") == "perdure_runs_born" and node["Actual Loops"]]
    assert [(node["Actual Rows"], node.get("Rows Removed by Filter", 0)) for node in read] == [(9, 0)], read


def test_what_workers_hold_is_counted_in_one_pass_over_what_is_held(planned: psycopg.Connection[Any]) -> None:
    nodes = done(planned, "list_workers", {"now": 1})
    (held,) = [node for node in nodes if node.get("Relation Name") == "perdure_runs"]
    assert (held["Actual Loops"], held["Actual Rows"]) == (1, 1000)
    assert "perdure_runs_held" in {node.get("Index Name") for node in nodes}
    statement = QUERIES["list_workers"]
    rows = psycopg.RawCursor(planned).execute(statement.sql.encode(), statement.values({"now": 1})).fetchall()
    assert [row[5] for row in rows] == [20] * 50 + [0] * 10


def done(connection: psycopg.Connection[Any], name: str, params: Any) -> list[dict[str, Any]]:
    """The steps of a statement, with what each has cost."""
    statement = QUERIES[name]
    explain = f"EXPLAIN (ANALYZE, FORMAT JSON) {statement.sql}".encode()
    ((plan,),) = psycopg.RawCursor(connection).execute(explain, statement.values(params)).fetchall()
    return list(each_node(plan[0]["Plan"]))


def each_node(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for below in plan.get("Plans", ()):
        yield from each_node(below)


def test_a_plain_append_changes_its_row_in_place(url: str) -> None:
    """HOT: no index is touched, or every event would cost five.

    An autovacuum has a snapshot open, and while it is open the old versions of rows stay in their page. A page that is full because of
    that takes no new version. So of three tries one counts; an append that touches an index fails in all of them.
    """
    elsewhere = [_changes_elsewhere(url, attempt) for attempt in range(3)]
    assert min(elsewhere) <= 6, elsewhere  # the claims, which take the runs out of their queue


def _changes_elsewhere(url: str, attempt: int) -> int:
    """How many of about 120 changes of rows were not in place."""
    before, before_in_place = _row_changes(url)
    store = opened(url)
    held = [hold_one(store, f"r{attempt}{n}") for n in range(3)]
    for n in range(60):
        batch = [each.append(ThoughtRecorded("x"), row=[None, RowChange("running")][n % 2]) for each in held[: n % 3 + 1]]
        assert store.append(batch) == [Committed()] * len(batch)
        for place, append in enumerate(batch):
            held[place] = Held(append.lease, held[place].seq + 1, append.events[-1].hash)
    store.close()
    # A connection reports its statistics when its process on the server ends: that may be after `close`.
    given_up = time.monotonic() + 60
    while (counted := _row_changes(url))[0] - before < 120:
        assert time.monotonic() < given_up, counted
        time.sleep(0.05)
    changed, in_place = counted
    return (changed - before) - (in_place - before_in_place)


def _row_changes(url: str) -> tuple[int, int]:
    """The changes of rows of runs so far, and how many of them were in place."""
    with raw(url) as connection:
        row = connection.execute(
            "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables WHERE relname = 'perdure_runs' AND schemaname = current_schema()"
        ).fetchone()
    return (0, 0) if row is None else (int(row[0]), int(row[1]))
