"""Workers and waiting runs: the words about leases, lag and limits."""

from __future__ import annotations

import pytest
from tests.conformance.suite_queues import NOW, claim, queue_run

from perdure.cli.doctor_postgres import DEAD_ROWS, LONG_US, _commits, _connections, _vacuum
from perdure.inspect.workers import crew, no_room
from perdure.settings import Queue
from perdure.store.api import Backlog, Served
from perdure.store.open import open_store
from perdure.store.postgres.health import DeadRows, Health, OpenTransaction

LEASE_US = 30_000_000


def test_a_crew_is_who_has_signed_on_and_what_each_queue_holds():
    store = open_store("sqlite://")
    try:
        store.register("w", "host:1", 1, NOW, [Served("a", "1")], ["reports"])
        for number in range(3):
            queue_run(store, f"r{number}", queue="reports", tenant=f"t{number}", ts=NOW + number)
        assert len(claim(store, 1)) == 1
        found = crew(store, NOW + 5_000_000, LEASE_US, {"reports": Queue(concurrency=4)})
    finally:
        store.close()
    [one] = found.workers
    assert (one.name, one.alive, one.runs, one.serves, one.queues) == ("host:1", True, 1, ["a@1"], ["reports"])
    assert (one.silent_s, one.lease_left_s) == (5.0, 25.0)
    [lag] = found.queues
    assert (lag.queue, lag.ready, lag.held, lag.tenants, lag.limit) == ("reports", 2, 1, 3, 4)
    assert lag.waited_s == 5.0


@pytest.mark.parametrize(
    ("limit", "words"),
    [
        (Queue(concurrency=3), "queue reports is full: 3 runs of at most 3"),
        (Queue(concurrency=4, per_tenant=1), "tenant acme has its share of queue reports: 1 run of at most 1"),
        (Queue(concurrency=4, per_tenant=2), None),
        (None, None),
    ],
)
def test_the_limit_that_keeps_a_run_is_named(limit, words):
    store = open_store("sqlite://")
    try:
        queue_run(store, "r", queue="reports", tenant="acme")
        row = store.get("r")
    finally:
        store.close()
    assert row is not None
    backlog = [Backlog("default", "acme", 0, None, 9), Backlog("reports", "acme", 1, NOW, 1), Backlog("reports", "other", 0, None, 2)]
    said = no_room(row, backlog, {} if limit is None else {"reports": limit})
    assert said is None if words is None else said is not None and said.startswith(words)


def health(*, dead: int = 0, open_us: int = 0) -> Health:
    return Health(
        where="PostgreSQL at h:1/d",
        schema="public",
        version=1,
        latest=1,
        server="16",
        size="1 MB",
        settings={"autovacuum": "on", "track_counts": "on"},
        max_connections=100,
        connections_used=1,
        ahead_us=0,
        direct=True,
        hears=True,
        missing=[],
        missing_to_decide=[],
        dead=[DeadRows("perdure_workers", 1, 5, None), DeadRows("perdure_runs", 100, dead, None)],
        oldest=OpenTransaction(77, "psql", "idle in transaction", open_us) if open_us else None,
    )


def test_dead_rows_and_a_forgotten_transaction_are_told():
    assert {check.name: check.verdict for check in _vacuum(health(dead=DEAD_ROWS, open_us=LONG_US - 1))} == {
        "autovacuum": "ok",
        "transactions": "ok",
    }
    bloated, forgotten = _vacuum(health(dead=DEAD_ROWS + 1, open_us=LONG_US))
    assert (bloated.verdict, bloated.found) == ("warn", "perdure_runs has 50,001 dead rows beside 100 live ones")
    assert forgotten.verdict == "warn"
    assert "psql" in forgotten.found
    assert "pg_terminate_backend(77)" in str(forgotten.way_out)


@pytest.mark.parametrize(("used", "verdict"), [(79, "ok"), (80, "warn"), (94, "warn"), (95, "FAIL")])
def test_connections_are_told_before_they_are_used_up(used, verdict):
    assert _connections(used, 100).verdict == verdict


@pytest.mark.parametrize(
    ("commits", "standbys", "verdict"),
    [("on", "", "ok"), ("on", "s1", "ok"), ("local", "", "ok"), ("local", "s1", "warn"), ("remote_write", "s1", "ok")],
)
def test_a_commit_that_does_not_wait_for_its_standby_is_told(commits, standbys, verdict):
    assert _commits(commits, standbys).verdict == verdict
