"""The schema on PostgreSQL.

The first process creates it, a foreign schema is refused, and changes by hand are named.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import psycopg
import pytest
from tests.conformance.suite import found, hold_one, payload
from tests.conformance.suite_waiting import approved, starting
from tests.servers.postgres import OWNER, Server
from tests.unit.postgres_tools import empty, opened, raw

from perdure.core.events import RunSucceeded, ThoughtRecorded
from perdure.errors import StoreCorrupt, StoreError, StoreVersion
from perdure.store.api import Committed, RowChange
from perdure.store.open import open_store
from perdure.store.postgres import migrate
from perdure.store.postgres.integrity import _FUNCTION, _TRIGGER
from perdure.store.postgres.store import PostgresStore


@pytest.fixture
def url(postgres: Server) -> str:
    return empty(postgres)


@pytest.fixture
def store(url: str) -> Iterator[PostgresStore]:
    store = opened(url)
    yield store
    store.close()


# -- making it -------------------------------------------------------------------------------------------------------------------------------
def test_of_twenty_that_start_at_once_one_makes_the_schema_and_all_find_it(url: str) -> None:
    errors: list[BaseException] = []
    start = threading.Barrier(20)

    def begin() -> None:
        start.wait()
        try:
            store = opened(url, busy_s=30.0)
            store.workers(0, 1)
            store.close()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=begin) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    with raw(url) as outside:
        assert outside.execute("SELECT version FROM perdure_schema ORDER BY 1").fetchall() == [(m.version,) for m in migrate.MIGRATIONS]


def test_opening_one_that_is_up_to_date_waits_for_nobody(store: PostgresStore) -> None:
    with psycopg.connect(store.url) as outside:
        outside.execute("SELECT pg_advisory_xact_lock(hashtextextended('perdure schema ' || current_schema(), 0))")
        opened(store.url, busy_s=1.0).close()


def test_a_schema_of_a_newer_perdure_is_left_alone(store: PostgresStore) -> None:
    with raw(store.url) as outside:
        outside.execute("INSERT INTO perdure_schema VALUES (999, 'x', 0)")
    with pytest.raises(StoreVersion, match="upgrade perdure, nothing was changed"):
        open_store(store.url)


def test_a_schema_that_something_else_has_made_is_refused(store: PostgresStore) -> None:
    with raw(store.url) as outside:
        outside.execute("UPDATE perdure_schema SET checksum = 'x' WHERE version = 1")
    with pytest.raises(StoreCorrupt, match="schema version 1 is not the one that perdure releases"):
        open_store(store.url)


def test_a_database_without_a_journal_is_left_alone_unless_one_may_be_made(url: str) -> None:
    with pytest.raises(StoreCorrupt, match="has no perdure journal in schema"):
        open_store(url, create=False)
    with raw(url) as outside:
        assert outside.execute("SELECT count(*) FROM pg_class WHERE relnamespace = current_schema()::regnamespace").fetchone() == (0,)


def test_a_migration_that_fails_leaves_nothing_behind(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first, *rest = migrate.MIGRATIONS
    broken = msgspec.structs.replace(first, sql=first.sql + ";\nSELECT 1/0;")
    with monkeypatch.context() as patch:
        patch.setattr(migrate, "MIGRATIONS", (broken, *rest))
        with pytest.raises(StoreError, match="division by zero"):
            open_store(url)
    with raw(url) as outside:
        assert outside.execute("SELECT count(*) FROM pg_class WHERE relnamespace = current_schema()::regnamespace").fetchone() == (0,)
    opened(url).close()


def test_a_user_who_may_not_create_tables_is_told_who_may(postgres: Server, url: str) -> None:
    with raw(url) as owner:
        (schema,) = owner.execute("SELECT current_schema()").fetchone() or ("",)
    name = url.rpartition("/")[2].partition("?")[0]
    postgres.execute("CREATE ROLE guest LOGIN")
    postgres.execute(f'ALTER ROLE guest IN DATABASE "{name}" SET search_path = {schema}')
    try:
        with raw(url) as owner:
            owner.execute(f"GRANT USAGE ON SCHEMA {schema} TO guest".encode())
        with pytest.raises(StoreError, match=r"this user may not do that .*let the owner of the tables migrate"):
            open_store(url.replace(f"//{OWNER}@", "//guest@"))
    finally:
        with raw(url) as owner:
            owner.execute(f"REVOKE ALL ON SCHEMA {schema} FROM guest".encode())
        postgres.execute(f'ALTER ROLE guest IN DATABASE "{name}" RESET ALL')
        postgres.execute("DROP ROLE guest")


# -- its own guards --------------------------------------------------------------------------------------------------------------------------
TRIGGERS = [(name, table) for migration in migrate.MIGRATIONS for name, table in _TRIGGER.findall(migration.sql)]
FUNCTIONS = [name for migration in migrate.MIGRATIONS for name, _ in _FUNCTION.findall(migration.sql)]
EVENT = "INSERT INTO perdure_events (run, seq, event_id, ts, epoch, data, hash) {}"
ARTIFACT = (
    "INSERT INTO perdure_artifacts (artifact, run_id, tenant, call, attempt, state, sha256, size, content_type, created_at)"
    " VALUES ('{}', '{}', 'default', 1, 1, 'saved', sha256('')::bytea, 0, 'text/plain', 1)"
)
COPY = (
    "INSERT INTO perdure_runs (run_id, agent, version, tenant, queue, input_digest, status, seq, head, epoch, created_at, updated_at, depth, line, "
    "specimen{1}) SELECT '{0}', agent, version, tenant, queue, input_digest, 'waiting', seq, head, epoch, created_at, updated_at, depth, line, "
    "'{{}}'{2} FROM perdure_runs WHERE run_id = 'r'"
)
TOMBSTONE = """
INSERT INTO perdure_pruned (number, run_id, status, events, agent, tenant, head, created_at, finished_at, pruned_at, by)
SELECT t.number, t.run_id, t.status, t.events, 'a', 't', coalesce(r.head, ''), 1, 1, 1, 'ann'
FROM ({}) AS t (number, run_id, status, events) LEFT JOIN perdure_runs AS r ON r.id = t.number
"""
CHECKPOINT = "INSERT INTO perdure_checkpoints (run, seq) SELECT id, 2 FROM perdure_runs WHERE run_id = 'r'"
SCHEDULE = "INSERT INTO perdure_schedules (schedule_id, agent, queue, state, seq, head) VALUES ('s', 'a', 'q', '{}', 1, '')"
# Forbidden changes, and the trigger that refuses each of them.
FORBIDDEN = [
    ("perdure_chain_no_change", "DELETE FROM perdure_chain", "perdure_chain is append-only"),
    (
        "perdure_checkpoints_true",
        f"{CHECKPOINT}; UPDATE perdure_checkpoints SET removed = 1, head = sha256(''), by = 'ann', at = 1",
        "only events before a checkpoint can be removed",
    ),
    ("perdure_checkpoints_no_delete", f"{CHECKPOINT}; DELETE FROM perdure_checkpoints", "where a journal begins stays with its run"),
    ("perdure_events_no_update", "UPDATE perdure_events SET data = '{}' WHERE seq = 1", "append-only"),
    ("perdure_events_no_update", "TRUNCATE perdure_events", "append-only"),
    ("perdure_events_no_delete", "DELETE FROM perdure_events WHERE seq = 2", "append-only"),
    (
        "perdure_events_guarded",
        EVENT.format("SELECT run, 99, event_id, ts, epoch, data, hash FROM perdure_events WHERE seq = 1"),
        "covered by the seq of its run",
    ),
    (
        "perdure_events_guarded",
        EVENT.format("SELECT 4711, 1, event_id, ts, epoch, data, hash FROM perdure_events LIMIT 1"),
        "covered by the seq of its run",
    ),
    ("perdure_runs_finished", "UPDATE perdure_runs SET seq = seq + 1 WHERE run_id = 'done'", "takes nothing more"),
    ("perdure_runs_finished", "UPDATE perdure_runs SET status = 'queued' WHERE run_id = 'done'", "takes nothing more"),
    ("perdure_runs_finished", "UPDATE perdure_runs SET ready_at = 1 WHERE run_id = 'done'", "takes nothing more"),
    ("perdure_runs_identity", "UPDATE perdure_runs SET target = '/tmp/other.py:x' WHERE run_id = 'r'", "first event says of a run stays"),
    ("perdure_runs_identity", "UPDATE perdure_runs SET run_id = 'mine' WHERE run_id = 'r'", "first event says of a run stays"),
    ("perdure_runs_identity", "UPDATE perdure_runs SET tenant = 'mine' WHERE run_id = 'r'", "first event says of a run stays"),
    ("perdure_runs_specimen", "UPDATE perdure_runs SET specimen = '{}' WHERE run_id = 'r'", "a specimen stays as it was imported"),
    ("perdure_runs_specimen", "UPDATE perdure_runs SET epoch = 9 WHERE run_id = 'copy'", "a specimen stays as it was imported"),
    ("perdure_runs_specimen_rests", COPY.format("other", ", ready_at", ", 1"), "a specimen is never driven"),
    ("perdure_runs_specimen_rests", COPY.format("other", ", holder", ", 'w'"), "a specimen is never driven"),
    ("perdure_runs_specimen_family", COPY.format("copy/undo", "", "").replace("'{}'", "NULL"), "a specimen is never driven"),
    (
        "perdure_inbox_specimen",
        "INSERT INTO perdure_inbox (run, event_id, ts, data) SELECT id, '', 1, '' FROM perdure_runs WHERE run_id = 'copy'",
        "a specimen takes no post",
    ),
    (
        "perdure_approvals_specimen",
        "UPDATE perdure_approvals SET status = 'approved' WHERE approval = 'copied'",
        "an approval of a specimen is never decided",
    ),
    ("perdure_runs_no_delete", "DELETE FROM perdure_runs WHERE run_id = 'done'", "stay together"),
    ("perdure_runs_no_truncate", "TRUNCATE perdure_runs CASCADE", "stay together"),
    ("perdure_approvals_settled", "UPDATE perdure_approvals SET status = 'pending' WHERE approval <> 'copied'", "settled stays so"),
    ("perdure_approvals_settled", "UPDATE perdure_approvals SET status = 'approved' WHERE approval <> 'copied'", "settled stays so"),
    ("perdure_approvals_no_delete", "DELETE FROM perdure_approvals", "stays with its run"),
    (
        "perdure_pruned_true",
        TOMBSTONE.format("SELECT id, run_id, 'succeeded', seq FROM perdure_runs WHERE run_id = 'r'"),
        "only a finished run",
    ),
    (
        "perdure_pruned_true",
        TOMBSTONE.format("SELECT id, run_id, status, seq - 1 FROM perdure_runs WHERE run_id = 'done'"),
        "only a finished run",
    ),
    ("perdure_pruned_no_change", "UPDATE perdure_pruned SET by = 'nobody'", "a tombstone stays"),
    ("perdure_pruned_no_change", "DELETE FROM perdure_pruned", "a tombstone stays"),
    ("perdure_pruned_no_change", "TRUNCATE perdure_pruned", "a tombstone stays"),
    ("perdure_artifacts_stay", "UPDATE perdure_artifacts SET size = 7", "does not change"),
    ("perdure_artifacts_stay", "UPDATE perdure_artifacts SET place = 'file:///etc', object = 'passwd'", "does not change"),
    ("perdure_artifacts_no_delete", "DELETE FROM perdure_artifacts", "stays with the runs that use it"),
    ("perdure_artifact_chunks_no_update", "UPDATE perdure_artifact_chunks SET data = ''", "does not change"),
    ("perdure_artifact_chunks_no_update", "TRUNCATE perdure_artifact_chunks", "does not change"),
    ("perdure_artifacts_open", ARTIFACT.format("b" * 32, "r"), "moved 1 there"),
    ("perdure_runs_open", "UPDATE perdure_runs SET ready_at = 1 WHERE run_id = 'nobody'", "moved 1 there"),
    (
        "perdure_inbox_open",
        "INSERT INTO perdure_inbox (run, event_id, ts, data) SELECT id, '', 1, '' FROM perdure_runs WHERE run_id = 'r'",
        "moved 1 there",
    ),
    ("perdure_approvals_open", "UPDATE perdure_approvals SET note = 'x' WHERE approval = 'none'", "moved 1 there"),
    ("perdure_notices_open", "UPDATE perdure_notices SET next_at = 0", "moved 1 there"),
    (
        "perdure_workers_open",
        "INSERT INTO perdure_workers (worker, name, pid, started_at, beat_at) VALUES ('x', 'x', 1, 1, 1)",
        "moved 1 there",
    ),
    ("perdure_schedules_open", SCHEDULE, "moved 1 there"),
    ("perdure_schedules_forward", f"{SCHEDULE}; UPDATE perdure_schedules SET due_at = 1", "changes only by an event"),
    ("perdure_schedules_no_delete", f"{SCHEDULE}; DELETE FROM perdure_schedules", "a schedule and its journal stay"),
    ("perdure_schedule_events_no_change", "DELETE FROM perdure_schedule_events", "append-only"),
    (
        "perdure_schedule_events_guarded",
        f"{SCHEDULE}; INSERT INTO perdure_schedule_events SELECT id, 2, '', 1, '{{}}', '' FROM perdure_schedules",
        "covered by the seq of its schedule",
    ),
    ("perdure_pruned_open", TOMBSTONE.format("VALUES (NULL::bigint, 'gone', 'succeeded', 1)"), "moved 1 there"),
]


@pytest.fixture
def lived(store: PostgresStore) -> PostgresStore:
    """A journal with a finished run, a running one, an approval that was used, a tombstone of another journal's, and a specimen."""
    store.append([hold_one(store, "done", worker="w1").append(RunSucceeded(payload(1)), row=RowChange("succeeded"))])
    approved(store).write(starting("ap"), call=1)
    with raw(store.url) as outside:
        outside.execute(TOMBSTONE.format("VALUES (NULL::bigint, 'old', 'succeeded', 1)").encode())
        outside.execute(ARTIFACT.format("a" * 32, "done").encode())
        outside.execute(COPY.format("copy", "", "").encode())
        outside.execute(
            b"INSERT INTO perdure_approvals (run, approval, seq, call, action, asked_at, status, deciders)"
            b" SELECT id, 'copied', 1, 1, 'a', 1, 'pending', '[]' FROM perdure_runs WHERE run_id = 'copy'"
        )
    return store


# They refuse nothing: test_journal_chain.py tests what they write.
WRITING = {"perdure_runs_copied_chained", "perdure_runs_chained", "perdure_schedules_added_chained", "perdure_schedules_chained"}


def test_every_trigger_has_its_forbidden_write() -> None:
    assert {name for name, _ in TRIGGERS} - WRITING == {name for name, _, _ in FORBIDDEN}


@pytest.mark.parametrize(("trigger", "sql", "rule"), FORBIDDEN)
def test_the_database_itself_refuses_to(lived: PostgresStore, trigger: str, sql: str, rule: str) -> None:
    """The database refuses to change settled rows for every user; without the trigger it would not."""
    table = dict(TRIGGERS)[trigger]
    with raw(lived.url) as outside:
        if trigger.endswith("_open"):
            outside.execute("INSERT INTO perdure_moved VALUES (1, 'moved', 'there', 'ann', 1)")
        with pytest.raises(psycopg.DatabaseError, match=rule):
            outside.execute(sql.encode())
        outside.execute(f"ALTER TABLE {table} DISABLE TRIGGER {trigger}".encode())
        if "TRUNCATE perdure_runs" in sql:  # it would reach all that hangs on it
            outside.execute("ALTER TABLE perdure_approvals DISABLE TRIGGER USER")
        outside.execute(sql.encode())


@pytest.mark.parametrize(("trigger", "table"), TRIGGERS)
def test_a_trigger_that_is_missing_switched_off_or_changed_is_named(store: PostgresStore, trigger: str, table: str) -> None:
    assert store.problems() == []
    with raw(store.url) as outside:
        outside.execute(f"ALTER TABLE {table} DISABLE TRIGGER {trigger}".encode())
        assert store.problems() == [problem(trigger, table, "is switched off")]
        outside.execute(f"ALTER TABLE {table} ENABLE REPLICA TRIGGER {trigger}".encode())
        assert store.problems() == [problem(trigger, table, "is switched off")]
        outside.execute(f"ALTER TABLE {table} ENABLE ALWAYS TRIGGER {trigger}".encode())
        assert store.problems() == []
        found = "SELECT pg_get_triggerdef(oid) FROM pg_trigger WHERE tgname = %s AND tgrelid = %s::regclass"
        (made,) = outside.execute(found.encode(), (trigger, table)).fetchone() or ("",)
        outside.execute(f"DROP TRIGGER {trigger} ON {table}".encode())
        assert store.problems() == [problem(trigger, table, "is missing")]
        tame = f"CREATE TRIGGER {trigger} BEFORE INSERT ON {table} FOR EACH ROW WHEN (FALSE) EXECUTE FUNCTION perdure_refuse('x')"
        outside.execute(tame.encode())
        assert store.problems() == [problem(trigger, table, "is not the one that perdure makes")]
        outside.execute(f"DROP TRIGGER {trigger} ON {table}".encode())
        outside.execute(made.encode())
        assert store.problems() == []
        for spoil in (
            f"DROP TRIGGER {trigger} ON {table}",
            f"ALTER TABLE {table} DISABLE TRIGGER {trigger}",
            f"DROP TRIGGER {trigger} ON {table}; {tame}",
        ):
            outside.execute(spoil.encode())
            (named,) = store.restore_schema(check=True)
            assert store.problems() == [f"{named}{CHANGED}"]
            assert store.restore_schema() == [named]
            assert (store.problems(), store.restore_schema()) == ([], [])
            assert outside.execute(found.encode(), (trigger, table)).fetchone() == (made,)


def problem(trigger: str, table: str, what: str) -> str:
    return f"the trigger {trigger} on {table} {what}{CHANGED}"


def test_an_index_that_is_missing_is_named_and_made_again(store: PostgresStore) -> None:
    with raw(store.url) as outside:
        sql = b"SELECT indexname, indexdef FROM pg_indexes WHERE schemaname = current_schema() AND indexdef LIKE 'CREATE INDEX%' ORDER BY 1"
        made = outside.execute(sql).fetchall()
        assert len(made) >= 15
        for name, _ in made:
            outside.execute(f"DROP INDEX {name}".encode())
        assert sorted(problem.split()[2] for problem in store.problems()) == [name for name, _ in made]
        assert len(store.restore_schema()) == len(made)
        assert outside.execute(sql).fetchall() == made
    assert store.problems() == []


def test_a_trigger_whose_function_is_gone_is_not_made_again_alone(store: PostgresStore) -> None:
    with raw(store.url) as outside:
        outside.execute("DROP FUNCTION perdure_refuse CASCADE")
    with pytest.raises(StoreCorrupt, match=r"the function that it calls is gone too .*; nothing was changed"):
        store.restore_schema()


CHANGED = ": the database was changed by hand; `perdure migrate` makes it again, and find out what else was changed"


@pytest.mark.parametrize("function", [name for name in FUNCTIONS if name not in ("perdure_json", "perdure_key")])  # those are no guards
def test_a_function_that_is_missing_or_was_changed_is_named(store: PostgresStore, function: str) -> None:
    with raw(store.url) as outside:
        outside.execute(f"CREATE OR REPLACE FUNCTION {function}() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END'".encode())
        (named,) = store.problems()
        assert named.startswith(f"the function {function} is not the one that perdure makes")
        outside.execute(f"DROP FUNCTION {function} CASCADE".encode())
        assert f"the function {function} is missing: the database was changed by hand; find out what else was changed" in store.problems()


def test_a_journal_whose_run_is_gone_is_named(store: PostgresStore) -> None:
    for number in range(4):
        hold_one(store, f"r{number}", worker=f"w{number}")
    with raw(store.url) as outside:
        outside.execute("ALTER TABLE perdure_runs DISABLE TRIGGER USER; ALTER TABLE perdure_events DISABLE TRIGGER USER")
        outside.execute("DELETE FROM perdure_runs WHERE run_id IN ('r0', 'r2', 'r3')")
        outside.execute("DELETE FROM perdure_events WHERE run = 1 AND seq = 1")
        outside.execute("ALTER TABLE perdure_runs ENABLE TRIGGER USER; ALTER TABLE perdure_events ENABLE TRIGGER USER")
    problems = store.problems()
    assert [problem.split(":")[0] for problem in problems] == ["run number 1", "run 'r2'", "run 'r3'"]
    assert "a journal of 1 events is left" in problems[0]


@pytest.mark.parametrize("data", ['{"type":"no_such_type"}', '{"type":"thought_recorded","text":7}', "not json", ""])
def test_an_event_that_cannot_be_decoded_is_named_and_verify_still_sees_it(store: PostgresStore, data: str) -> None:
    store.append([hold_one(store, "r").append(ThoughtRecorded("x"))])
    tamper(store.url, "UPDATE perdure_events SET data = %s WHERE seq = 3", data)
    with pytest.raises(StoreCorrupt, match="event 3 of run r cannot be decoded"):
        store.read("r")
    assert store.stored("r")[2].data == data.encode()


def test_an_event_that_is_gone_is_named(store: PostgresStore) -> None:
    store.append([hold_one(store, "r").append(ThoughtRecorded("x"))])
    tamper(store.url, "DELETE FROM perdure_events WHERE seq = %s", 2)
    with pytest.raises(StoreCorrupt, match="event 2 of run r is missing"):
        store.read("r")


def test_a_table_that_somebody_has_renamed_is_named(store: PostgresStore) -> None:
    with raw(store.url) as outside:
        outside.execute("ALTER TABLE perdure_blobs RENAME TO perdure_no_blobs")
    with pytest.raises(StoreCorrupt, match=r"perdure_blobs.*they were changed by hand"):
        store.blob("00" * 32)


def test_the_type_of_an_event_can_be_asked_for_in_sql(store: PostgresStore) -> None:
    store.append([hold_one(store, "r").append(ThoughtRecorded('NUL \0 and "quotes"'))])
    with raw(store.url) as outside:
        rows = outside.execute("SELECT e.type FROM perdure_events AS e ORDER BY e.seq").fetchall()
        found = outside.execute("SELECT e.seq FROM perdure_events AS e WHERE e.type = 'thought_recorded'").fetchall()
    assert (rows, found) == ([("run_created",), ("run_claimed",), ("thought_recorded",)], [(3,)])


def test_the_type_of_an_event_and_the_views_do_not_depend_on_the_search_path(store: PostgresStore) -> None:
    hold_one(store, "r")
    with raw(store.url) as outside:
        outside.execute("SET search_path = pg_catalog")
        rows = outside.execute(f"SELECT {store.schema}.type(e) FROM {store.schema}.perdure_events AS e ORDER BY e.seq").fetchall()
        assert rows == [("run_created",), ("run_claimed",)]
        # A view remembers which function it means.
        assert outside.execute(f"SELECT count(*) FROM {store.schema}.perdure_effects").fetchone() == (0,)


def test_an_event_takes_no_more_room_than_what_it_says(store: PostgresStore) -> None:
    """24 bytes are the row's own; then five numbers, and the ids and the text with a length each. No gap, and nothing twice."""
    body = ThoughtRecorded("x" * 300)
    store.append([hold_one(store, "r").append(body)])
    with raw(store.url) as outside:
        row = outside.execute("SELECT pg_column_size(e.*), length(e.data) FROM perdure_events AS e WHERE seq = 3").fetchone()
    assert row is not None
    taken, text = row
    null_call = 8  # a row with an empty column says which
    assert taken == 24 + null_call + (2 * 8 + 3 * 4) + (4 + text) + (1 + 16) + (1 + 32)


def test_a_run_with_as_many_events_as_there_are_numbers_is_told_so_and_nothing_is_written(store: PostgresStore) -> None:
    last = 2**31 - 1
    held = hold_one(store, "r")
    with raw(store.url) as outside:
        outside.execute("UPDATE perdure_runs SET seq = %s", (last - 1,))
    held.seq = last - 1
    before = store.append([held.append(ThoughtRecorded("the last one"))])
    held.seq, held.head = last, found(store, "r").head
    for bodies in ([ThoughtRecorded("one too many")], [ThoughtRecorded("and more")] * 9):  # in one statement, and in many
        with pytest.raises(StoreError, match=r"counted up to 2,147,483,647: end this run"):
            store.append([held.append(*bodies)])
    assert before == [Committed()]
    assert found(store, "r").seq == last
    with raw(store.url) as outside:
        assert outside.execute("SELECT max(seq) FROM perdure_events").fetchone() == (last,)


def tamper(url: str, sql: str, *values: Any) -> None:
    with raw(url) as outside:
        outside.execute("ALTER TABLE perdure_events DISABLE TRIGGER USER")
        outside.execute(sql.encode(), values)
