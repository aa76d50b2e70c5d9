"""Every single edit of a journal or of its row is found, and the first bad event is named (G11)."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import apsw
import pytest
from msgspec import structs
from tests.unit.inspect_tools import at_work, forge, hold, make_zoo, url_of

from perdure import Perdure
from perdure.core.codec import Payload, pack
from perdure.core.events import RunCreated, RunSucceeded, ThoughtRecorded, ToolCallCompleted
from perdure.core.identity import genesis, seal
from perdure.errors import StoreCorrupt
from perdure.inspect.verify import Verdict, creation_of, verify_journal, verify_run
from perdure.inspect.view import all_rows
from perdure.store.api import Store
from perdure.store.open import open_store

RUNS = ("done", "failed", "waiting", "doubt", "cancelled", "resolved", "queued")
NO_HISTORY = {"nonce", "lost", "lost_with"}  # columns of the lease alone: the journal cannot say what they should be
UNSEEN = {"parent_seq", "depth", "line", "ledger", "reopened"}  # how the database finds its way; no row that it gives out has them


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("zoo") / "journal.db"
    make_zoo(path)
    return path


@pytest.fixture
def path(zoo: Path, tmp_path: Path) -> Path:
    """A copy to spoil. The last app closed the original, so that its log is empty."""
    return Path(shutil.copy(zoo, tmp_path / "journal.db"))


@pytest.fixture
def store(path: Path) -> Iterator[Store]:
    opened = open_store(url_of(path))
    yield opened
    opened.close()


@pytest.fixture
def other(path: Path, store: Store) -> Iterator[apsw.Connection]:
    """Direct access to the file, with all its guards removed."""
    connection = apsw.Connection(str(path))
    connection.set_busy_timeout(5000)
    for (name,) in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'trigger'").fetchall():
        connection.execute(f"DROP TRIGGER {name}")
    connection.pragma("ignore_check_constraints", 1)
    connection.pragma("synchronous", 0)
    yield connection
    connection.close()


def verdict_on(store: Store, run_id: str) -> Verdict:
    row = store.get(run_id)
    assert row is not None
    return verify_run(store, row)


def key_of(other: apsw.Connection, run_id: str) -> int:
    key: int = other.execute("SELECT id FROM perdure_runs WHERE run_id = ?", (run_id,)).get
    return key


def test_what_nobody_touched_is_as_it_was_written(store: Store) -> None:
    assert {row.run_id: verify_run(store, row).problem for row in all_rows(store)} == dict.fromkeys(RUNS)


def test_a_run_that_is_held_or_was_lost_is_as_it_was_written(store: Store) -> None:
    hold(store, "queued", "shop")
    assert verdict_on(store, "queued").problem is None
    store.unregister("w-alive", 9_999_999_999_999_999)
    assert verdict_on(store, "queued").problem is None


def test_a_run_is_as_it_was_written_at_every_step_of_being_cancelled_settled_and_finished(path: Path) -> None:
    async def steps(app: Perdure) -> None:
        await app.cancel("doubt", by="ann")
        check(app.store, "doubt")
        await app.engine.drive("doubt", wait=False)
        check(app.store, "doubt")
        await app.resolve("doubt", 2, fail="never mind", by="ann")
        check(app.store, "doubt")
        await app.engine.drive("doubt")
        check(app.store, "doubt")
        await app.engine.drive("resolved")
        check(app.store, "resolved")

    def check(store: Store, run_id: str) -> None:
        assert verdict_on(store, run_id).problem is None

    at_work(path, steps)


def test_a_run_that_was_settled_while_its_worker_was_dead_is_as_it_was_written(path: Path, store: Store) -> None:
    hold(store, "resolved", "buy")
    store.unregister("w-alive", 1)
    assert verdict_on(store, "resolved").problem is None

    async def go_on(app: Perdure) -> None:
        await app.engine.drive("resolved")

    at_work(path, go_on)
    assert verdict_on(store, "resolved").problem is None
    assert any(event.type == "run_succeeded" for event in store.read("resolved"))


def edits(value: object) -> list[object]:
    """Other values that such a column could hold."""
    match value:
        case None:
            return [1]
        case int():
            return [value + 1, -value - 1, None] if value else [1, None]
        case bytes():
            return [bytes([value[0] ^ 1]) + value[1:], value[:-1] + bytes([value[-1] ^ 128])]
        case str():
            middle = len(value) // 2
            return [value + " ", value[:middle] + "~" + value[middle + 1 :], value[1:]]
        case _:
            raise AssertionError(type(value))


@pytest.mark.parametrize("run_id", RUNS)
def test_every_edit_of_every_column_of_every_event_is_found(store: Store, other: apsw.Connection, run_id: str) -> None:
    key = key_of(other, run_id)
    columns = [name for _, name, *_ in other.execute("PRAGMA table_info(perdure_events)")]
    assert set(columns) == {"id", "event_id", "ts", "epoch", "call", "cause", "data", "hash"}
    tried = 0
    for (seq,) in cast(list[tuple[int]], other.execute("SELECT seq FROM perdure_events WHERE run = ?", (key,)).fetchall()):
        place = key << 32 | seq  # another run's journal, a later place in this one, and a place of no run
        for column in columns:
            (before,) = other.execute(f"SELECT {column} FROM perdure_events WHERE id = ?", (place,)).fetchall()[0]
            for edited in [990 << 32 | seq, key << 32 | 990, -1] if column == "id" else edits(before):
                try:
                    other.execute(f"UPDATE perdure_events SET {column} = ? WHERE id = ?", (edited, place))
                except (apsw.ConstraintError, apsw.SQLError):
                    continue  # NULL, or not even JSON: the file itself does not take it
                verdict = verdict_on(store, run_id)
                assert verdict.problem is not None, (seq, column, before, edited)
                assert verdict.seq == seq, (seq, column, verdict)
                other.execute(f"UPDATE perdure_events SET {column} = ? WHERE id = ?", (before, edited if column == "id" else place))
                tried += 1
    assert tried > 10
    assert verdict_on(store, run_id).problem is None


@pytest.mark.parametrize("run_id", RUNS)
def test_every_edit_of_the_row_is_found_and_called_the_projection(store: Store, other: apsw.Connection, run_id: str) -> None:
    key = key_of(other, run_id)
    columns = [name for _, name, *_ in other.execute("PRAGMA table_info(perdure_runs)") if name not in NO_HISTORY | UNSEEN]
    assert len(columns) == 25
    for column in columns:
        (before,) = other.execute(f"SELECT {column} FROM perdure_runs WHERE id = ?", (key,)).fetchall()[0]
        # When the row was last touched may be later than its last event, but never earlier.
        for edited in [1] if column == "updated_at" else [77] if column == "id" else [*edits(before), "~"]:
            if edited == before:
                continue
            try:
                other.execute(f"UPDATE perdure_runs SET {column} = ? WHERE id = ?", (edited, key))
            except apsw.ConstraintError:
                continue  # NOT NULL, or not of the column's type
            verdict = verdict_on(store, str(edited) if column == "run_id" else run_id)
            assert verdict.problem is not None, (column, before, edited)
            if column not in ("run_id", "id", "seq"):
                assert verdict.projection, (column, verdict)
                assert f"{column} is" in verdict.problem or column in ("holder", "status"), (column, verdict)
            other.execute(f"UPDATE perdure_runs SET {column} = ? WHERE id = ?", (before, 77 if column == "id" else key))
    assert verdict_on(store, run_id).problem is None


def test_a_row_that_was_held_or_lost_is_checked_too(store: Store, other: apsw.Connection) -> None:
    hold(store, "queued", "shop")
    for column, edited in {"status": "queued", "holder": "w-other", "ready_at": 5, "waiting_for": "x", "error": "x", "crashes": 3}.items():
        (before,) = other.execute(f"SELECT {column} FROM perdure_runs WHERE run_id = 'queued'").fetchall()[0]
        other.execute(f"UPDATE perdure_runs SET {column} = ? WHERE run_id = 'queued'", (edited,))
        assert verdict_on(store, "queued").projection, column
        other.execute(f"UPDATE perdure_runs SET {column} = ? WHERE run_id = 'queued'", (before,))
    store.unregister("w-alive", 9_999_999_999_999_999)
    for column, changed in {"status": "running", "ready_at": None, "waiting_for": "x", "error": "x", "holder": "w"}.items():
        (before,) = other.execute(f"SELECT {column} FROM perdure_runs WHERE run_id = 'queued'").fetchall()[0]
        other.execute(f"UPDATE perdure_runs SET {column} = ? WHERE run_id = 'queued'", (changed,))
        assert verdict_on(store, "queued").projection, column
        other.execute(f"UPDATE perdure_runs SET {column} = ? WHERE run_id = 'queued'", (before,))
    assert verdict_on(store, "queued").problem is None


def test_a_missing_event_is_named(store: Store, other: apsw.Connection) -> None:
    key, last = key_of(other, "done"), len(store.stored("done"))
    for seq in range(1, last + 1):
        row = other.execute(
            "SELECT id, event_id, ts, epoch, call, cause, data, hash FROM perdure_events WHERE run = ? AND seq = ?", (key, seq)
        ).fetchall()[0]
        other.execute("DELETE FROM perdure_events WHERE run = ? AND seq = ?", (key, seq))
        verdict = verdict_on(store, "done")
        assert (verdict.seq, verdict.projection) == (seq, False)
        assert f"event {seq} is missing" in str(verdict.problem)
        other.execute("INSERT INTO perdure_events (id, event_id, ts, epoch, call, cause, data, hash) VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)


@pytest.mark.parametrize("gone", [1, 3])
def test_events_cut_off_at_the_end_are_found_by_the_row(store: Store, other: apsw.Connection, gone: int) -> None:
    last = len(store.stored("done"))
    other.execute("DELETE FROM perdure_events WHERE run = ? AND seq > ?", (key_of(other, "done"), last - gone))
    verdict = verdict_on(store, "done")
    assert verdict.seq == last - gone + 1
    assert f"ends with event {last - gone}" in str(verdict.problem)


def test_a_journal_that_is_gone_altogether_is_found(store: Store, other: apsw.Connection) -> None:
    other.execute("DELETE FROM perdure_events WHERE run = ?", (key_of(other, "done"),))
    assert verdict_on(store, "done").seq == 1


def test_a_row_that_speaks_of_no_event_does_not_make_an_empty_journal_sound(store: Store) -> None:
    """One flipped bit in an index returns such a row, while the table is right.

    Its events then seem to be later events.
    """
    row = store.get("done")
    assert row is not None
    told = verify_run(store, structs.replace(row, seq=0))
    assert (told.seq, told.problem) == (1, "it ends with event 0, and no journal is empty")


@pytest.mark.parametrize(("one", "two"), [(4, 5), (4, 9)])
def test_events_that_changed_places_are_called_out_of_place(store: Store, other: apsw.Connection, one: int, two: int) -> None:
    key = key_of(other, "done")
    for frm, to in ((one, 900), (two, one), (900, two)):
        other.execute("UPDATE perdure_events SET id = ? WHERE id = ?", (key << 32 | to, key << 32 | frm))
    verdict = verdict_on(store, "done")
    assert verdict.seq == one
    assert f"it was written as event {two}" in str(verdict.problem)


def test_an_edited_hash_is_told_from_an_edited_event(store: Store, other: apsw.Connection) -> None:
    key, last = key_of(other, "done"), len(store.stored("done"))
    for seq in (3, last):
        before = other.execute("SELECT hash FROM perdure_events WHERE run = ? AND seq = ?", (key, seq)).get
        other.execute("UPDATE perdure_events SET hash = ? WHERE run = ? AND seq = ?", (bytes(32), key, seq))
        assert "its hash was changed" in str(verdict_on(store, "done").problem)
        other.execute("UPDATE perdure_events SET hash = ?, ts = ts + 1 WHERE run = ? AND seq = ?", (before, key, seq))
        assert "not what was written" in str(verdict_on(store, "done").problem)
        other.execute("UPDATE perdure_events SET ts = ts - 1 WHERE run = ? AND seq = ?", (key, seq))


@pytest.mark.parametrize(
    ("sql", "what"), [("DELETE FROM perdure_blobs", "is missing"), ("UPDATE perdure_blobs SET data = x'00'", "does not have the content")]
)
def test_a_blob_that_is_missing_or_changed_is_found_at_the_event_that_names_it(
    store: Store, other: apsw.Connection, sql: str, what: str
) -> None:
    naming = next(
        event.seq
        for event in store.read("done")
        if isinstance(event.body, ToolCallCompleted) and event.body.result and event.body.result.inline is None
    )
    other.execute(sql)
    verdict = verdict_on(store, "done")
    assert verdict.seq == naming
    assert what in str(verdict.problem)


@pytest.mark.parametrize(
    ("seq", "change", "what"),
    [
        (3, {"cause": 5}, "does not lie before it"),
        (3, {"cause": 3}, "does not lie before it"),
        (3, {"epoch": 0}, "without a claim it stays 1"),
        (2, {"epoch": 0}, "a claim takes one above 0"),
        (6, {"call": 9}, "never initiated"),
        (2, ThoughtRecorded("x"), "without a claim it stays 0"),
        (1, ThoughtRecorded("x"), "the first event"),
        (3, RunSucceeded(pack(b"1")[0]), "after the run's end"),
        (3, b'{"type":"no_such_type"}', "cannot be decoded"),
        (3, b'{"type":"thought_recorded"}', "cannot be decoded"),
    ],
)
def test_a_forged_chain_does_not_hide_what_makes_no_sense(path: Path, seq: int, change: object, what: str) -> None:
    forge(path, "done", {seq: change})  # type: ignore[dict-item]
    store = open_store(url_of(path))
    try:
        verdict = verdict_on(store, "done")
    finally:
        store.close()
    assert what in str(verdict.problem)
    assert (verdict.seq or 0) >= seq


# -- the first event, as far as its chain vouches for it ----------------------------------------------------------------------
def creation(store: Store, run_id: str) -> RunCreated:
    row = store.get(run_id)
    assert row is not None
    return creation_of(store, row)


@pytest.mark.parametrize("run_id", RUNS)
def test_what_created_a_run_is_told_if_chain_and_row_agree(store: Store, run_id: str) -> None:
    first = store.read(run_id)[0].body
    assert creation(store, run_id) == first


@pytest.mark.parametrize("column", ["target", "agent", "tenant", "actor", "queue", "parent"])
def test_a_row_that_says_something_else_than_its_first_event_is_named(store: Store, other: apsw.Connection, column: str) -> None:
    other.execute(f"UPDATE perdure_runs SET {column} = '/tmp/other.py:x' WHERE run_id = 'done'")
    with pytest.raises(StoreCorrupt, match=rf"{column} is '/tmp/other.py:x', and by the journal it is "):
        creation(store, "done")


def test_a_first_event_is_not_believed_once_anything_in_its_journal_was_changed(store: Store, other: apsw.Connection) -> None:
    for seq in (1, 2, len(store.stored("done"))):
        change = "UPDATE perdure_events SET ts = ts + ? WHERE run = ? AND seq = ?"
        other.execute(change, (1, key_of(other, "done"), seq))
        with pytest.raises(StoreCorrupt, match=f"event {seq} does not have the hash that the journal's chain gives it"):
            creation(store, "done")
        other.execute(change, (-1, key_of(other, "done"), seq))
    other.execute("UPDATE perdure_runs SET head = zeroblob(32) WHERE run_id = 'done'")
    with pytest.raises(StoreCorrupt, match="does not lead to the head that the run's row has"):
        creation(store, "done")


def test_a_run_without_a_journal_or_with_another_ones_has_no_creation(store: Store, other: apsw.Connection) -> None:
    other.execute("UPDATE perdure_runs SET run_id = 'mine' WHERE run_id = 'failed'")
    with pytest.raises(StoreCorrupt, match="event 1 does not have the hash"):
        creation(store, "mine")
    other.execute("DELETE FROM perdure_events WHERE run = ?", (key_of(other, "done"),))
    with pytest.raises(StoreCorrupt, match="does not lead to the head"):
        creation(store, "done")


def test_a_journal_of_another_run_is_recognised(store: Store, other: apsw.Connection) -> None:
    other.execute("UPDATE perdure_runs SET run_id = 'mine' WHERE run_id = 'failed'")
    verdict = verdict_on(store, "mine")
    assert verdict.seq == 1
    assert "belongs to run 'failed'" in str(verdict.problem)


def test_a_payload_without_a_value_is_found_although_every_hash_is_right(store: Store) -> None:
    row = store.get("done")
    assert row is not None
    first = store.read("done")[0]
    assert isinstance(first.body, RunCreated)
    sealed = seal(genesis("done"), structs.replace(first, body=structs.replace(first.body, input=Payload())))
    stored = structs.replace(store.stored("done")[0], data=sealed.data, hash=sealed.hash)
    verdict, _ = verify_journal(structs.replace(row, seq=1, head=sealed.hash), [stored], store.blob)
    assert (verdict.seq, verdict.problem) == (1, "it has a payload without a value: neither JSON nor the digest of a blob")
