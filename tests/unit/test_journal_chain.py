"""The journal-wide chain.

A user who can write, and switches the triggers off and on again, cannot cut history unnoticed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import apsw
import msgspec
import psycopg
import pytest
from tests.conformance.suite_moving import ELSEWHERE, LEASE_US, over
from tests.conformance.suite_waiting import HOUR, NOW, asking, create, found, hold, payload, post
from tests.unit.postgres_tools import empty
from tests.unit.postgres_tools import raw as raw_postgres

from perdure.core.events import ApprovalDecided, RunReleased, SignalReceived, ThoughtRecorded
from perdure.core.identity import chain_link
from perdure.errors import InvalidInput
from perdure.inspect.chain import ChainHead, chain_heads, chain_problems, missing_ends, read_heads
from perdure.inspect.repair import plan_repair
from perdure.inspect.verify import verify_journal
from perdure.store.api import RowChange, Store
from perdure.store.open import open_store
from perdure.store.sqlite.migrate import MIGRATIONS
from perdure.store.transfer import Copying


class Hand:
    """Someone at the database's own prompt, with every right."""

    def __init__(self, ask: Callable[[str], list[tuple[Any, ...]]], is_postgres: bool) -> None:
        self.ask = ask
        self.is_postgres = is_postgres

    def forge(self, *statements: str) -> None:
        """Execute these with all triggers switched off, and put the triggers back."""
        if self.is_postgres:
            for table in ("perdure_runs", "perdure_events", "perdure_chain"):
                self.ask(f"ALTER TABLE {table} DISABLE TRIGGER USER")
            for sql in statements:
                self.ask(sql)
            for table in ("perdure_runs", "perdure_events", "perdure_chain"):
                self.ask(f"ALTER TABLE {table} ENABLE TRIGGER USER")
            return
        triggers = self.ask("SELECT name, sql FROM sqlite_schema WHERE type = 'trigger'")
        for name, _ in triggers:
            self.ask(f"DROP TRIGGER {name}")
        for sql in statements:
            self.ask(sql)
        for _, sql in triggers:
            self.ask(sql)


@pytest.fixture(params=["sqlite", "postgres"])
def journal(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Store, Hand]]:
    if request.param == "sqlite":
        store = open_store(f"sqlite:///{tmp_path}/journal.db")
        connection = apsw.Connection(str(tmp_path / "journal.db"))
        yield store, Hand(lambda sql: list(connection.execute(sql)), is_postgres=False)
        connection.close()
    else:
        url = empty(request.getfixturevalue("postgres"))
        store = open_store(url)
        other = raw_postgres(url)

        def ask(sql: str) -> list[tuple[Any, ...]]:
            cursor = other.execute(sql.encode())
            return cursor.fetchall() if cursor.description else []

        yield store, Hand(ask, is_postgres=True)
        other.close()
    store.close()


def parks(store: Store, run_id: str) -> None:
    """Two activations: the run waits after event 3, gets a signal (4), is claimed (5), and waits again after event 7."""
    hand = hold(store, run_id)
    hand.write(RunReleased("waiting", "signal t", None), row=RowChange("waiting", "signal t", release=True))
    assert post(store, run_id, SignalReceived("t", payload(1), "ann"))
    hand = hold(store, run_id)
    hand.write(ThoughtRecorded("paid"), RunReleased("waiting", "signal t", None), row=RowChange("waiting", "signal t", release=True))
    assert found(store, run_id).seq == 7


def sound(store: Store) -> None:
    assert missing_ends(store) == ({}, [])
    assert list(chain_problems(store)) == []
    assert store.problems() == []


def cut_to(run_id: str, seq: int, status: str = "waiting") -> list[str]:
    """Cut a journal after event `seq`, and make its row agree."""
    number = f"(SELECT id FROM perdure_runs WHERE run_id = '{run_id}')"
    head = f"(SELECT hash FROM perdure_events WHERE run = {number} AND seq = {seq})"
    return [
        f"UPDATE perdure_runs SET seq = {seq}, status = '{status}', ready_at = NULL, epoch = 1, head = {head} WHERE run_id = '{run_id}'",
        f"DELETE FROM perdure_events WHERE run = {number} AND seq > {seq}",
    ]


def delete(run_id: str) -> list[str]:
    number = f"(SELECT id FROM perdure_runs WHERE run_id = '{run_id}')"
    return [f"DELETE FROM perdure_events WHERE run = {number}", f"DELETE FROM perdure_runs WHERE run_id = '{run_id}'"]


def test_what_is_written_in_the_ordinary_way_is_sound(journal: tuple[Store, Hand]) -> None:
    store, _ = journal
    parks(store, "a")
    over(store, "p")
    create(store, "new")
    hold(store, "held")
    store.unregister("w", NOW)  # its worker is gone: the run is lost, and its end is in the chain
    sound(store)
    assert sorted(entry.seq for entry in store.chain((-100_000_000, 0))) == [2, 3, 3, 4, 5, 7]


def test_a_journal_whose_end_was_cut_off_is_named(journal: tuple[Store, Hand]) -> None:
    store, hand = journal
    parks(store, "a")
    parks(store, "b")
    hand.forge(*cut_to("a", 3))
    assert store.problems() == [], "the triggers are back"
    assert list(chain_problems(store)) == []
    verdict, _ = verify_journal(found(store, "a"), store.stored("a"), store.blob)
    assert verdict.problem is None, "the journal is whole, and its row agrees: only the chain knows more"
    cut, deleted = missing_ends(store)
    assert deleted == []
    assert list(cut) == ["a"]
    assert cut["a"].startswith("its end was cut off: the journal-wide chain has event 7, and the journal ends with event 3")
    assert missing_ends(store, "a")[0] == cut
    assert missing_ends(store, "b") == ({}, [])


def test_a_journal_whose_end_was_cut_off_is_not_repaired(journal: tuple[Store, Hand]) -> None:
    """The row still says how the run ended. A repair by the shorter journal would let the run go on from there."""
    store, hand = journal
    parks(store, "a")
    assert plan_repair(store, found(store, "a")) is not None  # the rows of this test have another input digest
    hand.forge(*cut_to("a", 3, status="succeeded"))
    assert plan_repair(store, found(store, "a")) is None


def test_no_role_can_use_the_function_of_the_chain_by_itself(postgres_url: str) -> None:
    open_store(postgres_url).close()
    with psycopg.connect(postgres_url) as connection:
        asked = "SELECT has_function_privilege('public', 'perdure_add_to_chain()', 'execute')"
        assert connection.execute(asked).fetchone() == (False,)


def test_a_decision_that_was_cut_off_before_a_worker_has_seen_it_is_named(journal: tuple[Store, Hand]) -> None:
    store, hand = journal
    hold(store, "a").write(
        asking("ap"), RunReleased("waiting_approval", "ap", None), row=RowChange("waiting_approval", "ap", release=True), call=1
    )
    seq = found(store, "a").seq
    post(store, "a", ApprovalDecided("ap", False, "ann", ""))
    sound(store)
    hand.forge(*cut_to("a", seq, "waiting_approval"))
    assert list(missing_ends(store)[0]) == ["a"]


def test_an_end_that_was_rewritten_is_named(journal: tuple[Store, Hand]) -> None:
    store, hand = journal
    parks(store, "a")
    parks(store, "b")
    other = "sha256(hash)" if hand.is_postgres else "zeroblob(32)"
    hand.forge(f"UPDATE perdure_events SET hash = {other} WHERE seq = 7 AND run = (SELECT id FROM perdure_runs WHERE run_id = 'a')")
    cut, _ = missing_ends(store)
    assert cut == {"a": "its journal was rewritten: event 7 is not the one that the journal-wide chain has"}


def test_a_run_that_was_deleted_is_named(journal: tuple[Store, Hand]) -> None:
    store, hand = journal
    for run_id in ("a", "b", "c"):
        parks(store, run_id)
    hand.forge(*delete("b"))
    assert store.problems() == []
    cut, deleted = missing_ends(store)
    assert cut == {}
    assert deleted == [
        "run 'b': the journal-wide chain has it with 7 events, and it is gone without a tombstone: it was deleted; restore it from a backup"
    ]
    hand.forge(*delete("c"))  # the youngest run: SQLite gives its number to the next run
    create(store, "next")
    over(store, "next")
    assert [one.split(":")[0] for one in missing_ends(store)[1]] == ["run 'b'", "run 'c'"]
    assert "next" not in missing_ends(store)[0]


def test_a_run_that_was_pruned_is_not_missed(journal: tuple[Store, Hand]) -> None:
    store, _ = journal
    over(store, "p")
    over(store, "r")
    assert store.prune(["p"], NOW + HOUR, by="ann", now=NOW).runs == 2
    sound(store)


def test_a_copied_run_is_covered_where_it_is_now(journal: tuple[Store, Hand]) -> None:
    store, hand = journal
    other = open_store("sqlite://")
    parks(other, "a")
    over(other, "b")
    Copying(other, store, to_url=ELSEWHERE, by="ann").move(now=NOW, lease_us=LEASE_US)
    other.close()
    sound(store)
    hand.forge(*cut_to("a", 3))
    assert list(missing_ends(store)[0]) == ["a"]


def test_the_chain_itself_cannot_be_thinned_or_edited_unseen(journal: tuple[Store, Hand]) -> None:
    store, hand = journal
    for number in range(20):
        over(store, f"r{number}")
    sound(store)
    entries = store.chain((-100_000_000, 0))
    chain, n = entries[3].chain, 4
    place = f"n = {n}" + (f" AND chain = {chain}" if hand.is_postgres else "")
    hand.forge(f"UPDATE perdure_chain SET seq = seq - 1 WHERE {place}")
    assert any("is not what was written" in problem for problem in chain_problems(store))
    hand.forge(f"UPDATE perdure_chain SET seq = seq + 1 WHERE {place}")
    sound(store)
    hand.forge(f"DELETE FROM perdure_chain WHERE {place}")
    assert any(f"entry {n} was deleted" in problem for problem in chain_problems(store))


def test_an_end_of_the_chain_that_was_cut_off_leaves_runs_without_an_entry(journal: tuple[Store, Hand]) -> None:
    store, hand = journal
    for run_id in ("a", "b", "c"):
        parks(store, run_id)
    (last,) = hand.ask("SELECT max(n) FROM perdure_chain")[0]
    hand.forge(f"DELETE FROM perdure_chain WHERE n > {last} - 3")  # all entries about c
    cut, _ = missing_ends(store)
    assert list(cut) == ["c"]
    assert "its last event, 7, is not in the journal-wide chain" in cut["c"]


def test_heads_that_were_kept_show_a_chain_that_was_computed_again(journal: tuple[Store, Hand], tmp_path: Path) -> None:
    store, hand = journal
    parks(store, "a")
    parks(store, "b")
    kept = chain_heads(store)
    file = tmp_path / "heads"
    file.write_bytes(b"".join(msgspec.json.encode(head) + b"\n" for head in kept))
    assert read_heads(str(file)) == kept
    assert list(chain_problems(store, kept)) == []
    parks(store, "c")
    assert list(chain_problems(store, kept)) == [], "a chain that has grown still has what it had"

    entries = store.chain((-100_000_000, 0))
    hand.forge(*cut_to("b", 3), *computed_again(entries, hand.is_postgres, without="b"))
    sound(store)  # nothing in the database shows it
    problems = list(chain_problems(store, kept))
    assert len(problems) == 1
    assert "not the one whose head was kept" in problems[0] or "whose head was kept: the journal was cut" in problems[0]


def computed_again(entries: list[Any], is_postgres: bool, without: str) -> list[str]:
    """The statements of someone who knows how the chain is computed, and leaves out all but the first entry of a run."""
    number = next(entry.run for entry in entries if entry.run_id == without)
    first = next(entry for entry in entries if entry.run == number)
    kept = [entry for entry in entries if entry.run != number or entry is first]
    statements = ["DELETE FROM perdure_chain"]
    before = b""
    for n, entry in enumerate(kept, 1):
        fresh = msgspec.structs.replace(entry, n=n, chain=kept[0].chain, link=None)
        before = chain_link(before, [fresh])
        quote = (lambda data: f"'\\x{data.hex()}'::bytea") if is_postgres else (lambda data: f"x'{data.hex()}'")
        name = "NULL" if entry.run_id is None else f"'{entry.run_id}'"
        columns, values = ("chain, ", f"{fresh.chain}, ") if is_postgres else ("", "")
        statements.append(
            f"INSERT INTO perdure_chain ({columns}n, run, seq, head, run_id, link) "
            f"VALUES ({values}{n}, {entry.run}, {entry.seq}, {quote(entry.head)}, {name}, {quote(before)})"
        )
    return statements


def test_a_file_without_heads_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("")
    (tmp_path / "other").write_text("hello\n")
    for name, words in (("empty", "is empty"), ("other", "does not hold heads"), ("none", "No such file")):
        with pytest.raises(InvalidInput, match=words):
            read_heads(str(tmp_path / name))


def test_an_old_journal_is_covered_from_its_migration_on(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    store = open_store(f"sqlite:///{path}")
    parks(store, "a")
    over(store, "b")
    store.close()
    with_chain = apsw.Connection(str(path))
    for name in ("perdure_runs_chained", "perdure_runs_copied_chained", "perdure_schedules_chained", "perdure_schedules_added_chained"):
        with_chain.execute(f"DROP TRIGGER {name}")
    with_chain.execute("DROP TABLE perdure_chain")
    assert "CREATE TABLE perdure_chain" in MIGRATIONS[-1].sql, "later migrations would be applied a second time"
    with_chain.execute("DELETE FROM perdure_schema WHERE version = ?", (MIGRATIONS[-1].version,))
    with_chain.close()
    store = open_store(f"sqlite:///{path}")
    sound(store)
    assert [head.n for head in chain_heads(store)] == [2]
    assert store.chain((0, 1))[0].link is not None, "the migration itself links what was there"
    connection = apsw.Connection(str(path))
    Hand(lambda sql: list(connection.execute(sql)), is_postgres=False).forge(*cut_to("a", 3))
    assert list(missing_ends(store)[0]) == ["a"]
    connection.close()
    store.close()


def test_a_link_is_the_same_in_the_database_and_in_python(journal: tuple[Store, Hand]) -> None:
    store, hand = journal
    over(store, "r")
    over(store, "s")
    entries = store.chain((-100_000_000, 0))
    assert [entry.run_id for entry in entries] == ["r", "s"]
    by_hand = b""
    for entry in entries:
        line = f"{entry.n}|{entry.run}|{entry.seq}|{found(store, str(entry.run_id)).head[:16].hex()}|{entry.run_id}\n"
        # SQLite links rarely: at the first commit of a process, and at every eighth.
        if hand.is_postgres or entry.n == 1:
            by_hand = hashlib.sha256(by_hand + line.encode()).digest()[:16]
            assert entry.link == by_hand
    assert chain_heads(store) == [ChainHead(entries[0].chain, 2, chain_heads(store)[0].link)]
