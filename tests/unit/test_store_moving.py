"""Moving and pruning at the level of the database.

What a user with SQL may not do, what two processes may not do, and views.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import apsw
import psycopg
import pytest
from tests.conformance.suite_moving import BOOM, ELSEWHERE, ENDED, LEASE_US, LONG, over, undo_of
from tests.conformance.suite_waiting import HOUR, NOW, create, found, hold, payload
from tests.servers.postgres import Server
from tests.unit.postgres_tools import empty
from tests.unit.postgres_tools import raw as raw_postgres

from perdure.core.codec import encode, pack
from perdure.core.events import (
    Failure,
    RetryScheduled,
    RunFailed,
    RunSucceeded,
    ThoughtRecorded,
    ToolCallCompleted,
    ToolCallFailed,
    ToolCallInDoubt,
    ToolCallInitiated,
    ToolCallProposed,
    ToolCallResolved,
)
from perdure.core.identity import CallKeys
from perdure.errors import Conflict, StoreCorrupt, StoreError
from perdure.inspect.verify import verify_run
from perdure.store import pruning
from perdure.store.api import Committed, RowChange, Store
from perdure.store.creation import insert_run
from perdure.store.cursor import Cursor
from perdure.store.open import open_store
from perdure.store.postgres.queries import QUERIES as POSTGRES
from perdure.store.postgres.queries import Statement
from perdure.store.sql import SqlStore
from perdure.store.sqlite.migrate import MIGRATIONS
from perdure.store.transfer import Copied, Copying

Ask = Callable[[str], list[tuple[Any, ...]]]


@pytest.fixture(params=["sqlite", "postgres"])
def journal(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Store, Ask]]:
    """A store, and direct SQL on its database."""
    if request.param == "sqlite":
        store = open_store(f"sqlite:///{tmp_path}/journal.db")
        connection = apsw.Connection(str(tmp_path / "journal.db"))
        connection.pragma("foreign_keys", 1)
        yield store, lambda sql: list(connection.execute(sql))
    else:
        url = empty(request.getfixturevalue("postgres"))
        store = open_store(url)
        other = raw_postgres(url)

        def ask(sql: str) -> list[tuple[Any, ...]]:
            cursor = other.execute(sql.encode())
            return cursor.fetchall() if cursor.description else []

        yield store, ask
        other.close()
    store.close()


def refused(ask: Ask, sql: str, words: str) -> None:
    with pytest.raises((apsw.ConstraintError, psycopg.Error), match=words):
        ask(sql)


# -- what the database refuses
# ------------------------------------------------------------------------------------------
FORGED = (
    "INSERT INTO perdure_pruned (number, run_id, agent, tenant, status, events, head, created_at, finished_at, pruned_at, by) "
    "SELECT id, {run_id}, agent, tenant, {status}, {events}, head, 0, 0, 0, 'x' FROM perdure_runs WHERE run_id = '{of}'"
)


def forged(of: str, run_id: str = "run_id", status: str = "status", events: str = "seq") -> str:
    return FORGED.format(of=of, run_id=run_id, status=status, events=events)


def test_only_what_has_a_tombstone_can_be_deleted(journal: tuple[Store, Ask]) -> None:
    store, ask = journal
    over(store, "p")
    refused(ask, "DELETE FROM perdure_events", "append-only")
    refused(ask, "DELETE FROM perdure_approvals", "stays with its run")
    refused(ask, "DELETE FROM perdure_runs WHERE run_id = 'p/1'", "stay together")
    over(store, "q")
    store.prune(["q"], NOW + HOUR, by="ann", now=NOW)
    refused(ask, "DELETE FROM perdure_events", "append-only")
    assert store.problems() == []


@pytest.mark.parametrize(
    "sql",
    [
        forged("open"),
        forged("open", status="'succeeded'"),
        forged("done", status="'failed'"),
        forged("done", events="seq - 1"),
        forged("done", run_id="'other'"),
        forged("held", status="'returned'"),
        forged("done").replace("SELECT id,", "SELECT NULL,"),
    ],
)
def test_a_tombstone_is_true_or_refused(journal: tuple[Store, Ask], sql: str) -> None:
    store, ask = journal
    create(store, "open")
    over(store, "done")
    hold(store, "held")
    refused(ask, sql, "only a finished run can be pruned")
    ask(forged("done"))


def test_a_tombstone_stays(journal: tuple[Store, Ask]) -> None:
    store, ask = journal
    over(store, "r")
    store.prune(["r"], NOW + HOUR, by="ann", now=NOW)
    refused(ask, "UPDATE perdure_pruned SET run_id = 'x'", "a tombstone stays")
    refused(ask, "DELETE FROM perdure_pruned", "a tombstone stays")


@pytest.mark.parametrize(
    "sql",
    [
        "UPDATE perdure_runs SET ready_at = 1, holder = NULL WHERE run_id = 'r'",
        "INSERT INTO perdure_inbox (run, event_id, ts, data) SELECT id, head, 1, '{}' FROM perdure_runs",
        "UPDATE perdure_approvals SET note = 'x'",
        "INSERT INTO perdure_workers (worker, name, pid, started_at, beat_at) VALUES ('v', 'h', 1, 1, 1)",
        forged("done"),
    ],
)
def test_a_hand_at_the_prompt_cannot_write_to_a_closed_journal(journal: tuple[Store, Ask], sql: str) -> None:
    store, ask = journal
    create(store, "r")
    over(store, "p")
    over(store, "done")
    store.close_journal(ELSEWHERE, by="ann", now=NOW, lease_us=LEASE_US)
    refused(ask, sql, "moved|moving")


TRIGGERS = {
    "sqlite": "perdure_events_open perdure_runs_open perdure_runs_none_new perdure_inbox_open perdure_approvals_open perdure_workers_open "
    "perdure_pruned_open perdure_pruned_true perdure_pruned_no_delete perdure_runs_fresh perdure_notices_open",
    "postgres": "perdure_runs_open perdure_inbox_open perdure_approvals_open perdure_workers_open perdure_pruned_open perdure_pruned_true "
    "perdure_pruned_no_change perdure_notices_open perdure_events_no_delete perdure_runs_no_delete perdure_approvals_no_delete",
}


def test_a_guard_that_is_gone_is_named(journal: tuple[Store, Ask]) -> None:
    store, ask = journal
    for name in TRIGGERS["postgres" if store.remote else "sqlite"].split():
        table = "_".join(name.split("_")[:2])
        ask(f"DROP TRIGGER {name} ON {table}" if store.remote else f"DROP TRIGGER {name}")
        assert [problem for problem in store.problems() if f"the trigger {name} " in problem]


# -- SQLite alone --------------------------------------------------------------------------------------------------------------
def test_an_old_process_gets_no_number_of_a_pruned_run(tmp_path: Path) -> None:
    """SQLite uses the youngest number again, and the tombstone would allow the deletion of another run's events."""
    store = open_store(f"sqlite:///{tmp_path}/journal.db")
    over(store, "r")
    store.prune(["r"], NOW + HOUR, by="ann", now=NOW)
    with apsw.Connection(str(tmp_path / "journal.db")) as old, pytest.raises(apsw.ConstraintError, match="not used again"):
        old.execute(
            "INSERT INTO perdure_runs (run_id, agent, version, tenant, queue, input_digest, status, seq, head, epoch, created_at, updated_at) "
            "VALUES ('s', 'a', '1', 't', 'q', 'd', 'queued', 1, x'00', 0, 1, 1)"
        )
    create(store, "s")
    assert apsw.Connection(str(tmp_path / "journal.db")).execute("SELECT id FROM perdure_runs").get == 2
    store.close()


def test_blobs_of_an_older_journal_are_known_after_its_upgrade(tmp_path: Path) -> None:
    store = open_store(f"sqlite:///{tmp_path}/journal.db")
    over(store, "one", blob=True)
    over(store, "two", blob=True)
    hand = hold(store, "three")
    hand.write(ThoughtRecorded('a text with "blob":"' + "0" * 64 + '" in it'))
    store.close()
    digest = hashlib.sha256(LONG).hexdigest()
    with apsw.Connection(str(tmp_path / "journal.db")) as old:
        old.execute("DELETE FROM perdure_blob_uses")
        for step in MIGRATIONS[4].sql.split(";\n"):
            if "INSERT OR IGNORE INTO perdure_blob_uses" in step:
                old.execute(step)
        assert list(old.execute("SELECT run, hex(digest) FROM perdure_blob_uses ORDER BY 1")) == [(1, digest.upper()), (2, digest.upper())]
    store = open_store(f"sqlite:///{tmp_path}/journal.db")
    assert store.prune(["one"], NOW + HOUR, by="ann", now=NOW).blobs == 0
    assert store.blob(digest) == LONG
    store.close()


def test_other_writers_get_their_turn_between_two_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, other = (open_store(f"sqlite:///{tmp_path}/journal.db", busy_s=5) for _ in range(2))
    for n in range(30):
        over(store, f"r{n}")
    monkeypatch.setattr(pruning, "BATCH_FAMILIES", 1)
    waits: list[float] = []

    def write() -> None:
        for n in range(20):
            begun_s = time.monotonic()
            create(other, f"new-{n}")
            waits.append(time.monotonic() - begun_s)

    writer = threading.Thread(target=write)
    writer.start()
    assert pruning.prune(store, pruning.found(store, NOW + HOUR, ENDED, None), NOW + HOUR, by="ann", clock=lambda: NOW).families == 30
    writer.join()
    assert len(waits) == 20
    assert max(waits) < 2
    store.close()
    other.close()


# -- what has arrived is read back ------------------------------------------------------------------------------------------
@pytest.fixture
def sides(tmp_path: Path) -> Iterator[tuple[Store, Store, Path]]:
    """A journal with a finished family and an open one, an empty one, and the folder with both files."""
    source, target = open_store(f"sqlite:///{tmp_path}/a.db"), open_store(f"sqlite:///{tmp_path}/b.db")
    over(source, "p")
    create(source, "open")
    yield source, target, tmp_path
    source.close()
    target.close()


def move(source: Store, target: Store) -> Copied:
    return Copying(source, target, to_url=ELSEWHERE, by="ann").move(now=NOW, lease_us=LEASE_US)


def test_a_target_that_does_not_keep_what_it_was_given_is_found_out(sides: tuple[Store, Store, Path]) -> None:
    source, target, folder = sides
    with apsw.Connection(str(folder / "b.db")) as wicked:
        wicked.execute("DROP TRIGGER perdure_events_no_update")
        wicked.execute(
            "CREATE TRIGGER wicked AFTER INSERT ON perdure_events WHEN NEW.data LIKE '%run_succeeded%' "
            "BEGIN UPDATE perdure_events SET data = replace(data, 'succeeded', 'succeeeded') WHERE id = NEW.id; END"
        )
    with pytest.raises(StoreCorrupt, match=r"run p is not in .* as it was sent there; nothing is lost here"):
        move(source, target)
    moved = source.moved()
    assert moved is not None
    assert not moved.done


def test_a_journal_that_is_damaged_arrives_as_it_is_and_is_named(sides: tuple[Store, Store, Path]) -> None:
    """Evidence is not mended on the way."""
    source, target, folder = sides
    with apsw.Connection(str(folder / "a.db")) as hand:
        guard = hand.execute("SELECT sql FROM sqlite_schema WHERE name = 'perdure_events_no_update'").get
        hand.execute("DROP TRIGGER perdure_events_no_update")
        hand.execute("UPDATE perdure_events SET ts = ts + 1 WHERE id = (1 << 32 | 2)")
        hand.execute(guard)
    assert move(source, target).damaged == ("p",)
    for store in (source, target):
        assert verify_run(store, found(store, "p")).seq == 2


def test_runs_below_a_run_that_is_gone_are_not_left_behind_silently(sides: tuple[Store, Store, Path]) -> None:
    source, target, folder = sides
    with apsw.Connection(str(folder / "a.db")) as hand:
        for name in ("perdure_runs_no_delete", "perdure_events_no_delete"):
            hand.execute(f"DROP TRIGGER {name}")
        hand.execute("DELETE FROM perdure_runs WHERE run_id = 'p'")
    with pytest.raises(StoreCorrupt, match=r"1 runs of .* belong to a parent that does not exist"):
        move(source, target)
    Copying(source, target, to_url=ELSEWHERE, by="ann").abandon(now=NOW)
    assert source.moved() is None


# -- two at once, on PostgreSQL ------------------------------------------------------------------------------------------------
@pytest.fixture
def stores(postgres: Server) -> Iterator[tuple[SqlStore, SqlStore]]:
    url = empty(postgres)
    first, second = open_store(url), open_store(url)
    assert isinstance(first, SqlStore)
    assert isinstance(second, SqlStore)
    yield first, second
    first.close()
    second.close()


class Beside:
    """Work in another thread, which is found waiting or done."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self.answer: Any = None
        self._thread = threading.Thread(target=self._do, args=(work,))
        self._thread.start()

    def _do(self, work: Callable[[], Any]) -> None:
        try:
            self.answer = work()
        except Exception as error:
            self.answer = error

    def waits(self, seconds: float = 0.3) -> bool:
        self._thread.join(seconds)
        return self._thread.is_alive()

    def done(self) -> Any:
        self._thread.join(20)
        assert not self._thread.is_alive()
        return self.answer


def undo_while_it_is_pruned(stores: tuple[SqlStore, SqlStore]) -> None:
    store, other = stores
    over(store, "r")
    beside: list[Beside] = []

    def create_and_look_away(cursor: Cursor) -> None:
        assert insert_run(cursor, undo_of("r"))
        beside.append(Beside(lambda: other.prune(["r"], NOW + HOUR, by="ann", now=NOW)))
        beside[0].waits()

    store._database.write(create_and_look_away, lambda cursor, _: True)
    beside[0].done()
    assert {row.run_id for row in store.list()} == {"r", "r/undo"}, "an undo without the run that it undoes"


def test_a_family_whose_undo_is_just_beginning_is_not_pruned(stores: tuple[SqlStore, SqlStore]) -> None:
    undo_while_it_is_pruned(stores)


def test_an_undo_of_what_is_just_being_pruned_is_refused(stores: tuple[SqlStore, SqlStore]) -> None:
    store, other = stores
    over(store, "r")
    beside: list[Beside] = []

    def prune_and_look_away(cursor: Cursor) -> None:
        families = pruning._locked(cursor, ["r"])
        beside.append(Beside(lambda: other.create_run(undo_of("r"))))
        assert beside[0].waits()
        pruning._delete(cursor, families, {"status": None, "now": NOW, "by": "ann"}, at_once=False)

    store._database.write(prune_and_look_away, lambda cursor, _: True)
    assert isinstance(beside[0].done(), Conflict)
    assert store.list() == []


def blob_put_while_it_is_pruned(stores: tuple[SqlStore, SqlStore]) -> None:
    store, other = stores
    over(store, "old", blob=True)
    hand = hold(store, "new")
    packed, long = pack(LONG)
    assert long is not None
    head = hand.sealed(ToolCallCompleted(packed), call=1, blobs=(long,))
    beside: list[Beside] = []

    def look_away(_: Any) -> Any:
        beside.append(Beside(lambda: other.prune(["old"], NOW + HOUR, by="ann", now=NOW)))
        beside[0].waits()
        hand.seq, hand.head = head.events[-1].event.seq, head.events[-1].hash
        return hand.sealed(ThoughtRecorded("x")), None

    assert store.transact(head, look_away)[0] == Committed()
    pruned = beside[0].done()
    assert pruned.families == 1
    assert store.missing_blobs([hashlib.sha256(LONG).hexdigest()]) == [], "somebody's blob was deleted under their hands"


def test_a_blob_that_somebody_is_just_putting_there_again_stays(stores: tuple[SqlStore, SqlStore]) -> None:
    blob_put_while_it_is_pruned(stores)


def test_a_journal_is_closed_after_whoever_is_writing_to_it(stores: tuple[SqlStore, SqlStore], postgres: Server) -> None:
    close_while_somebody_writes(stores)


def close_while_somebody_writes(stores: tuple[SqlStore, SqlStore]) -> None:
    store, other = stores
    hand = hold(store, "r")
    head = hand.sealed(ThoughtRecorded("under way"))
    beside: list[Beside] = []
    with psycopg.connect(store.url, autocommit=True) as prompt:
        prompt.execute("UPDATE perdure_workers SET beat_at = 0")

    def look_away(_: Any) -> Any:
        beside.append(Beside(lambda: other.close_journal(ELSEWHERE, by="ann", now=NOW, lease_us=LEASE_US)))
        assert beside[0].waits(), "closed while somebody was writing"
        hand.seq, hand.head = head.events[-1].event.seq, head.events[-1].hash
        return hand.sealed(ThoughtRecorded("and done")), None

    assert store.transact(head, look_away)[0] == Committed()
    assert beside[0].done().to_url == ELSEWHERE
    assert found(store, "r").holder is None
    with pytest.raises(StoreError, match="being moved"):
        create(store, "s")


@pytest.mark.parametrize(
    ("statement", "guard", "instead", "check"),
    [
        ("run_to_keep", "FOR KEY SHARE", "", undo_while_it_is_pruned),
        ("blobs_to_keep", "FOR KEY SHARE", "", blob_put_while_it_is_pruned),
        ("lock_journal", "LOCK TABLE perdure_runs IN EXCLUSIVE MODE", "SELECT 1", close_while_somebody_writes),
    ],
)
def test_without_its_lock_the_test_above_goes_red(
    stores: tuple[SqlStore, SqlStore],
    monkeypatch: pytest.MonkeyPatch,
    statement: str,
    guard: str,
    instead: str,
    check: Callable[[Any], None],
) -> None:
    sql, names = POSTGRES[statement].sql, POSTGRES[statement].names
    assert guard in sql
    monkeypatch.setitem(POSTGRES, statement, Statement(sql.replace(guard, instead), names))
    with pytest.raises((AssertionError, AttributeError)):
        check(stores)


# -- views ---------------------------------------------------------------------------------------------------------------------
def test_effects_are_shown_with_what_became_of_them(journal: tuple[Store, Ask]) -> None:
    store, ask = journal
    hand = hold(store, "r")
    odd = payload("NUL \0"), payload("half \ud800")

    def started(name: str, attempt: int = 1) -> ToolCallInitiated:
        return ToolCallInitiated(name, "once", f"key-{name}", attempt=attempt, args=odd[0])

    failure = RunFailed(BOOM).failure
    hand.write(started("done"), ToolCallCompleted(odd[1]), call=1)
    hand.write(started("failed"), ToolCallFailed(failure, final=True), call=2)
    hand.write(started("again"), ToolCallFailed(failure), RetryScheduled(2, NOW), started("again", 2), call=3)
    hand.write(started("doubt"), ToolCallInDoubt(1, "no answer \0"), call=4)
    hand.write(ToolCallProposed("asked", "once", "key-asked", odd[0], "d", "approval"), call=5)
    hand.write(started("known"), ToolCallInDoubt(1, "x"), ToolCallResolved("happened", "ann"), call=6)
    hand.write(started("later"), ToolCallFailed(failure), RetryScheduled(2, NOW), call=7)
    hand.write(ThoughtRecorded("no call"))
    rows = ask("SELECT call, tool, effect, key, attempts, state FROM perdure_effects WHERE run_id = 'r' ORDER BY call")
    states = {
        "done": ("done", 1),
        "failed": ("failed", 1),
        "again": ("started", 2),
        "doubt": ("in doubt", 1),
        "asked": ("waiting for approval", 0),
        "known": ("done", 1),
        "later": ("waiting to be tried again", 1),
    }
    assert rows == [(n, name, "once", f"key-{name}", attempts, state) for n, (name, (state, attempts)) in enumerate(states.items(), 1)]
    times = ask(
        "SELECT CAST(started_at AS TEXT), CAST(ended_at AS TEXT) FROM perdure_effects WHERE run_id = 'r' AND call IN (1, 5) ORDER BY call"
    )
    assert [[at and at[:19] for at in row] for row in times] == [["2023-11-14 22:13:20"] * 2, [None, None]]


@pytest.mark.parametrize("scheme", [1, 2])
def test_effects_have_the_request_the_response_and_the_key_of_every_call(journal: tuple[Store, Ask], scheme: int) -> None:
    store, ask = journal
    run_id, agent_name, tool_name = "größe-7" if scheme == 1 else "r" * 90, "täglich", "look_up"
    hand = hold(store, run_id, agent=agent_name, tenant="acme", key_scheme=scheme, key_namespace="" if scheme == 1 else "eu")
    large, blob = pack(encode({"text": "x" * 3000}), 100)
    assert blob is not None
    failure = Failure(kind="refused", type="ValueError", message="no")
    hand.write(ToolCallInitiated(tool_name, "read", args=payload({"order": "o-1"})), ToolCallCompleted(payload([1, None])), call=1)
    hand.write(ToolCallInitiated("refund", "keyed", "key-2", args=payload({"cents": 5})), ToolCallFailed(failure, final=True), call=2)
    hand.write(ToolCallInitiated("long", "idempotent", args=large), ToolCallCompleted(large), call=3, blobs=(blob,))
    hand.write(ToolCallProposed("edited", "once", "key-4", payload({"cents": 900}), "d", "approval"), call=4)
    hand.write(ToolCallInitiated("edited", "once", "key-4", args=payload({"cents": 700}), approval=None), call=4)
    hand.write(ToolCallInDoubt(1, "x"), ToolCallResolved("happened", "ann", result=payload("r-4")), call=4)
    hand.write(ToolCallInitiated("null", "read", args=payload({})), ToolCallFailed(failure), RetryScheduled(2, NOW), call=5)
    hand.write(ToolCallInitiated("null", "read", attempt=2), ToolCallCompleted(payload(None), attempt=2), call=5)
    keys = CallKeys("acme", run_id, agent_name, "" if scheme == 1 else "eu", scheme)
    rows = ask("SELECT call, key, CAST(request AS TEXT), CAST(response AS TEXT), error FROM perdure_effects ORDER BY call")
    told = [(call, key, json.loads(request), response and json.loads(response), error) for call, key, request, response, error in rows]
    assert told == [
        (1, keys.key(1, tool_name), {"order": "o-1"}, [1, None], None),
        (2, "key-2", {"cents": 5}, None, "ValueError: no"),
        (3, keys.key(3, "long"), {"text": "x" * 3000}, {"text": "x" * 3000}, None),
        (4, "key-4", {"cents": 700}, "r-4", None),
        (5, keys.key(5, "null"), {}, None, None),
    ]


def test_one_event_that_cannot_be_read_hides_no_other(postgres: Server) -> None:
    """On SQLite this cannot happen: it parses the JSON itself."""
    url = empty(postgres)
    store = open_store(url)
    hand = hold(store, "r")
    hand.write(ToolCallInitiated("pay", "once", "k"), call=1)
    hand.write(ToolCallInitiated("lost", "once", "k"), call=2)
    with raw_postgres(url) as prompt:
        prompt.execute("DROP TRIGGER perdure_events_no_update ON perdure_events")
        prompt.execute("""UPDATE perdure_events SET data = '{"type":"tool_call_initiated", broken' WHERE call = 2""")
        assert prompt.execute("SELECT tool, state FROM perdure_effects").fetchall() == [("pay", "started")]
    store.close()


def test_status_is_one_readable_line_for_each_run(journal: tuple[Store, Ask]) -> None:
    store, ask = journal
    create(store, "ready", not_before=NOW + 1)
    hold(store, "held")
    over(store, "over")
    hold(store, "held")
    rows = ask("SELECT run_id, status, worker, events, substr(CAST(ready_at AS TEXT), 1, 26) FROM perdure_status ORDER BY run_id")
    assert rows == [
        ("held", "running", "host:1", 3, None),
        ("over", "succeeded", None, 3, None),
        ("ready", "queued", None, 1, "2023-11-14 22:13:20.000001"),
    ]


def test_a_view_reads_one_run_when_it_is_asked_for_one(journal: tuple[Store, Ask]) -> None:
    store, ask = journal
    if store.remote:
        ask("SET enable_seqscan = off")
    plan = ask(f"EXPLAIN {'' if store.remote else 'QUERY PLAN '}SELECT * FROM perdure_effects WHERE run_id = 'r'")
    assert not [line for line in plan if "Seq Scan" in str(line) or "SCAN r" in str(line) or "SCAN e" in str(line)], plan


def test_nothing_is_pruned_that_was_not_asked_for() -> None:
    store = open_store("sqlite://")
    for n in range(5):
        over(store, f"r{n}")
    hold(store, "last").write(RunSucceeded(payload(1)), row=RowChange("succeeded"), ts=NOW + HOUR)
    found_ = [one.root for one in pruning.found(store, NOW + HOUR, ENDED, 3)]
    assert found_ == ["r0", "r1", "r2"]
    assert (
        pruning.prune(store, pruning.found(store, NOW + HOUR, ["failed"], None), NOW + HOUR, by="ann", clock=lambda: NOW) == pruning.NOTHING
    )
    assert pruning.prune(store, pruning.found(store, NOW + HOUR, ENDED, 3), NOW + HOUR, by="ann", clock=lambda: NOW).families == 3
    assert sorted(row.run_id for row in store.list()) == ["last", "r3", "r4"]
    store.close()
