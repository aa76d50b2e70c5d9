"""Signed heads.

A user who can write to the whole database, and compute every hash again, cannot change what was signed.
"""

from __future__ import annotations

import asyncio
import builtins
import json
import os
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import apsw
import msgspec
import pytest
from click.testing import CliRunner, Result
from tests.conformance.suite_moving import over
from tests.conformance.suite_waiting import NOW, create, found, hold
from tests.unit.inspect_tools import listens
from tests.unit.notice_tools import SECRET, receiver, says
from tests.unit.test_checkpoints import rests, turns
from tests.unit.test_journal_chain import Hand, cut_to, delete, journal, parks, sound
from tests.unit.test_specimens import exported, take_in, zoos

from perdure import Perdure
from perdure.cli import cli
from perdure.core.identity import chain_link, genesis, link
from perdure.errors import InvalidInput
from perdure.inspect.chain import chain_problems
from perdure.inspect.signed import (
    Book,
    Comparison,
    Contradiction,
    Leaf,
    PublicKey,
    SigningKey,
    compare,
    kept_heads,
    merkle_root,
    new_key,
    state,
)
from perdure.inspect.verify import verify_journal
from perdure.store.api import RunRow, Store
from perdure.store.open import open_store
from perdure.webhooks import verify as verify_webhook

__all__ = ["journal", "zoos"]


class Notary:
    """Signs as `perdure sign` does, into a file."""

    def __init__(self, folder: Path) -> None:
        secret, public = new_key()
        self.key_file, self.public_file, self.file = folder / "key", folder / "key.pub", folder / "statements.jsonl"
        self.key_file.write_bytes(secret)
        self.key_file.chmod(0o600)
        self.public_file.write_bytes(public)
        self.key, self.public = SigningKey(self.key_file), PublicKey.read(self.public_file)

    def sign(self, store: Store) -> None:
        book = self.book() if self.file.exists() else Book()
        assert book.problem is None, book.problem
        made = state(store, book, self.key, now=NOW)
        with self.file.open("ab") as file:
            file.write(b"".join(made.lines) + made.signed)

    def book(self) -> Book:
        return Book.read(self.file, self.public)

    def problems(self, store: Store) -> list[str]:
        book = self.book()
        assert book.problem is None, book.problem
        return [*compare(store, book).problems, *chain_problems(store, kept_heads(book))]


@pytest.fixture
def notary(tmp_path: Path) -> Notary:
    return Notary(tmp_path)


def test_a_journal_that_goes_on_still_has_what_was_signed(journal: tuple[Store, Hand], notary: Notary) -> None:
    store, _ = journal
    notary.sign(store)
    parks(store, "a")
    create(store, "new")
    notary.sign(store)
    over(store, "p")
    held = hold(store, "held")
    notary.sign(store)
    assert notary.problems(store) == []
    parks_again(store)
    held.write(row=None)
    notary.sign(store)
    notary.sign(store)
    book = notary.book()
    assert [statement.changed for statement in book.statements] == [0, 2, 3, 1, 0], "only what has changed is written"
    assert [statement.runs for statement in book.statements] == [0, 2, 5, 5, 5]
    assert book.statements[-1].root == merkle_root(book.heads)
    assert notary.problems(store) == []


def parks_again(store: Store) -> None:
    from tests.conformance.suite_waiting import payload, post

    from perdure.core.events import SignalReceived

    post(store, "a", SignalReceived("t", payload(2), "ann"))


def test_a_journal_that_was_edited_and_computed_again_is_found_and_the_run_is_named(journal: tuple[Store, Hand], notary: Notary) -> None:
    store, hand = journal
    parks(store, "a")
    parks(store, "b")
    notary.sign(store)
    hand.forge(*rewritten(store, "b", b'"paid"', b'"lost"', hand.is_postgres))
    sound(store)  # the database does not show it: every hash and the whole chain were computed again
    assert all(_sound(store, row) for row in store.list())
    problems = notary.problems(store)
    assert len(problems) == 2
    assert problems[0].startswith("run b: statement 1 of ")
    assert problems[0].endswith("and event 7 is another one now: its journal was rewritten after it was signed")
    assert "history was rewritten" in problems[1]
    with pytest.raises(Contradiction, match=r"run b: .*was rewritten"):
        notary.sign(store)


def test_a_rewrite_before_the_last_statement_is_found_too(journal: tuple[Store, Hand], notary: Notary) -> None:
    """A rewritten run that has gone on since: the next signature is refused, because it would hide the first."""
    store, hand = journal
    parks(store, "a")
    notary.sign(store)
    hand.forge(*rewritten(store, "a", b'"paid"', b'"lost"', hand.is_postgres))
    parks_again(store)
    with pytest.raises(Contradiction, match=r"run a: .*signed it with 7 events, and event 7 is another one now"):
        notary.sign(store)
    assert any("run a" in problem for problem in notary.problems(store))


def test_what_is_cut_deleted_or_rolled_back_is_found(journal: tuple[Store, Hand], notary: Notary) -> None:
    store, hand = journal
    for run_id in ("a", "b", "c"):
        parks(store, run_id)
    notary.sign(store)
    hand.forge(*cut_to("a", 3), *delete("b"), "DELETE FROM perdure_chain")
    assert [problem.partition(",")[0] for problem in notary.problems(store)[:2]] == [
        "run a: statement 1 of 2023-11-14T22:13:20.000000Z signed it with 7 events",
        "run b: statement 1 of 2023-11-14T22:13:20.000000Z signed it with 7 events",
    ]
    words = " ".join(notary.problems(store))
    assert "its journal ends with event 3: its end was cut off, or the whole database was rolled back" in words
    assert "it is gone without a tombstone: it was deleted, or the whole database was rolled back" in words
    assert "run c" not in words
    with pytest.raises(Contradiction) as refused:
        notary.sign(store)
    assert len(refused.value.lines) == 2


def test_a_database_that_was_restored_from_an_older_copy_is_found(tmp_path: Path, notary: Notary) -> None:
    path = tmp_path / "journal.db"
    store = open_store(f"sqlite:///{path}")
    parks(store, "a")
    store.close()
    before = path.read_bytes()
    store = open_store(f"sqlite:///{path}")
    parks(store, "b")
    parks_again(store)
    notary.sign(store)
    store.close()
    path.write_bytes(before)
    store = open_store(f"sqlite:///{path}")
    assert all(_sound(store, row) for row in store.list()), "a sound journal, but an old one"
    words = " ".join(notary.problems(store))
    assert "run a: statement 1" in words
    assert "run b: statement 1" in words
    assert "has no entry" in words, "and the chain is shorter"
    store.close()


def test_pruned_runs_are_no_alarm_and_a_forged_tombstone_is(journal: tuple[Store, Hand], notary: Notary) -> None:
    store, hand = journal
    for run_id in ("p", "q", "r"):
        over(store, run_id)
    notary.sign(store)
    store.prune(["p"], NOW * 2, by="ann", now=NOW)
    assert notary.problems(store) == []
    notary.sign(store)
    assert notary.problems(store) == []
    assert set(notary.book().heads) == {"q", "r"}
    store.prune(["q"], NOW * 2, by="ann", now=NOW)
    hand.ask("DROP TRIGGER perdure_pruned_no_update" if not hand.is_postgres else "ALTER TABLE perdure_pruned DISABLE TRIGGER USER")
    hand.ask("UPDATE perdure_pruned SET events = 1 WHERE run_id = 'q'")
    (problem,) = notary.problems(store)
    assert "run q" in problem
    assert "the tombstone was forged" in problem


def test_specimens_are_not_signed_and_a_run_that_became_one_is_missing(
    journal: tuple[Store, Hand], notary: Notary, zoos: Path, tmp_path: Path
) -> None:
    store, hand = journal
    over(store, "p")
    take_in(store, exported(zoos, "done", tmp_path))
    notary.sign(store)
    assert set(notary.book().heads) == {"p", "p/1"}
    store.delete_specimens(["done"], by="ann", now=NOW)
    assert notary.problems(store) == [], "a specimen comes and goes"
    hand.forge("UPDATE perdure_runs SET specimen = '{}' WHERE run_id = 'p'")
    assert "run p" in notary.problems(store)[0]


def test_a_copy_that_was_taken_back_is_no_alarm(tmp_path: Path, notary: Notary) -> None:
    from perdure.store.transfer import Copying

    source, store = open_store(f"sqlite:///{tmp_path}/a.db"), open_store(f"sqlite:///{tmp_path}/b.db")
    parks(source, "a")
    source.unregister("w", NOW)
    source.close_journal(store.url, by="ann", now=NOW, lease_us=1)
    copying = Copying(source, store, to_url=store.url, by="ann")
    copying._copy(copying.survey(), only_finished=False)
    notary.sign(store)
    copying.abandon(now=NOW)
    assert notary.problems(store) == []
    notary.sign(store)
    assert notary.problems(store) == []
    parks_again(source)
    source.close_journal(store.url, by="ann", now=NOW, lease_us=1)
    again = Copying(source, store, to_url=store.url, by="ann")
    again._copy(again.survey(), only_finished=False)  # the same run is back, and has gone on
    assert notary.problems(store) == []
    notary.sign(store)
    assert notary.problems(store) == []
    source.close()
    store.close()


@pytest.mark.parametrize("signed_between", [True, False])
def test_another_run_under_the_id_of_a_copy_that_was_taken_back_is_found(
    journal: tuple[Store, Hand], notary: Notary, signed_between: bool
) -> None:
    store, _ = journal
    parks(store, "a")
    notary.sign(store)
    row = found(store, "a")
    # As an undone move does: the id is free again.
    assert store.delete_copies([[("a", row.seq, row.head)]], by="mallory", now=NOW) == []
    if signed_between:
        notary.sign(store)
        assert notary.problems(store) == []
    parks(store, "a")
    (problem,) = notary.problems(store)
    assert problem.startswith("run a: statement 1 of ")
    assert "event 7 is another one now" in problem
    assert ("another run has its id now" in problem) == signed_between
    with pytest.raises(Contradiction, match="run a: "):
        notary.sign(store)


# -- events that were removed before a checkpoint -------------------------------------------------------------------------
def lives(store: Store, signals: int) -> None:
    """The run `r` of test_checkpoints: a checkpoint after each three signals."""
    if store.get("r") is None:
        asyncio.run(rests(store.url, turns, then=lambda app: app.start(turns, 8, id="r")))
    for _ in range(signals):
        asyncio.run(rests(store.url, turns, then=lambda app: app.signal("r", "go", 1)))


def remove(store: Store) -> int:
    """The last event that was removed."""
    assert store.remove_before_checkpoint("r", by="ann", now=NOW).events > 0
    return store.removed()["r"][0]


def test_removed_events_are_proven_by_a_later_statement_that_was_made_before(journal: tuple[Store, Hand], notary: Notary) -> None:
    store, _ = journal
    lives(store, 1)
    notary.sign(store)
    lives(store, 1)
    notary.sign(store)
    lives(store, 2)
    notary.sign(store)
    removed = remove(store)
    assert [leaf.seq < removed for leaf in notary.book().signed["r"]] == [True, True, False]
    assert notary.problems(store) == []
    assert compare(store, notary.book()).uncompared == []
    notary.sign(store)
    book = notary.book()
    assert book.statements[-1].changed == 1, "what was removed is signed, too"
    assert (book.signed["r"][-1].removed, book.signed["r"][-1].removed_head) == (removed, store.hash_at("r", removed).hex())
    notary.sign(store)
    assert notary.book().statements[-1].changed == 0
    lives(store, 3)
    notary.sign(store)
    remove(store)
    notary.sign(store)
    assert compare(store, notary.book()) == Comparison([], [])


def test_events_that_were_removed_before_a_later_statement_cannot_be_compared_and_that_is_told(
    journal: tuple[Store, Hand], notary: Notary
) -> None:
    store, _ = journal
    lives(store, 1)
    notary.sign(store)
    lives(store, 3)
    remove(store)
    assert compare(store, notary.book()) == Comparison([], ["r"])
    for n in (1, 2):
        told = CliRunner().invoke(
            cli, ["verify", "--signatures", str(notary.file), "--public-key", str(notary.public_file), "--url", store.url]
        )
        assert told.exit_code == 0, told.output
        assert "not comparable with the statements: signed events of 1 run" in told.output
        assert "before a later statement: r\n" in told.output
        in_json = CliRunner().invoke(
            cli, ["verify", "--signatures", str(notary.file), "--public-key", str(notary.public_file), "--json", "--url", store.url]
        )
        assert json.loads(in_json.output.splitlines()[-1])["uncompared"] == ["r"]
        signed = CliRunner().invoke(cli, ["sign", "--key", str(notary.key_file), "--to", str(notary.file), "--url", store.url])
        assert signed.exit_code == 0, signed.output
        assert ("1 run could not be compared with the statement before" in signed.output) == (n == 1)
    lives(store, 1)
    notary.sign(store)
    assert compare(store, notary.book()) == Comparison([], ["r"]), "no later statement proves what was gone when it was made"


def test_the_last_removed_event_is_compared_with_its_hash(journal: tuple[Store, Hand], notary: Notary) -> None:
    store, _ = journal
    lives(store, 4)
    notary.sign(store)
    removed = remove(store)
    book = notary.book()
    (leaf,) = book.signed["r"]
    book.signed["r"] = [Leaf(removed, store.hash_at("r", removed).hex(), leaf.statement)]
    assert compare(store, book) == Comparison([], [])
    book.signed["r"] = [Leaf(removed, "0" * 64, leaf.statement)]
    (problem,) = compare(store, book).problems
    assert f"event {removed} is another one now" in problem


def test_a_prune_does_not_hide_that_what_was_signed_was_rewritten(journal: tuple[Store, Hand], notary: Notary) -> None:
    store, hand = journal
    lives(store, 4)
    notary.sign(store)
    hand.forge(*rewritten(store, "r", b'"topic":"go"', b'"topic":"ga"', hand.is_postgres))
    remove(store)
    problems = compare(store, notary.book()).problems
    assert len(problems) == 1
    assert "its journal was rewritten after it was signed" in problems[0]


@pytest.mark.parametrize("forged", ["head = {zeros}", "removed = 3"])
def test_what_was_removed_when_it_was_signed_stays_so(journal: tuple[Store, Hand], notary: Notary, forged: str) -> None:
    store, hand = journal
    lives(store, 4)
    remove(store)
    notary.sign(store)
    hand.ask("ALTER TABLE perdure_checkpoints DISABLE TRIGGER USER" if hand.is_postgres else "DROP TRIGGER perdure_checkpoints_true")
    hand.ask(f"UPDATE perdure_checkpoints SET {forged.format(zeros='sha256(head)' if hand.is_postgres else 'zeroblob(32)')}")
    (problem,) = compare(store, notary.book()).problems
    assert "these are there again, or the hash of the last one is another one" in problem


def _sound(store: Store, row: RunRow) -> bool:
    return verify_journal(row, store.stored(row.run_id), store.blob)[0].problem is None


def real(url: str, *run_ids: str) -> None:
    """Runs of the real app that wait for a signal: of those `perdure verify` says that all is well."""

    async def main() -> None:
        async with Perdure(url, [listens]) as app:
            for run_id in run_ids:
                await app.start(listens, id=run_id)
                await app.drive(run_id, wait=False)

    asyncio.run(main())


# -- the file -----------------------------------------------------------------------------------------------------------------
def test_every_edit_of_the_file_is_found(notary: Notary) -> None:
    store = open_store("sqlite://")
    for run_id in ("a", "b"):
        parks(store, run_id)
        notary.sign(store)
    create(store, "c")
    notary.sign(store)
    lines = notary.file.read_bytes().splitlines(keepends=True)
    assert len(lines) == 6
    first, second, third = lines[:2], lines[2:4], lines[4:]
    changes = {
        "a head": [lines[0].replace(b'"seq":7', b'"seq":6'), *lines[1:]],
        "a statement": [lines[0], lines[1].replace(b'runs\\":1', b'runs\\":2'), *lines[2:]],
        "a signature": [lines[0], lines[1].replace(b'signature":"', b'signature":"A'), *lines[2:]],
        "the key's name": [lines[0], lines[1].replace(notary.public.id.encode(), b"0" * 32), *lines[2:]],
        "reordered": [*second, *first, *third],
        "cut in the middle": [*first, *third],
        "without its beginning": [*second, *third],
        "a statement twice": [*first, *first, *second],
        "a line of a run is gone": [lines[1], *lines[2:]],
        "a line of a run more": [lines[0], lines[0], *lines[1:]],
        "not JSON": [b"hello\n", *lines],
        "another kind": [b'{"kind":"other"}\n', *lines],
        "a field more": [lines[0].replace(b"{", b'{"x":1,', 1), *lines[1:]],
    }
    for name, changed in changes.items():
        notary.file.write_bytes(b"".join(changed))
        book = notary.book()
        assert book.problem is not None, name
        assert str(notary.file) in book.problem, name
    notary.file.write_bytes(b"".join(lines))
    assert notary.book().problem is None
    store.close()


def test_every_flipped_bit_of_the_file_is_found(notary: Notary) -> None:
    store = open_store("sqlite://")
    parks(store, "a")
    notary.sign(store)
    parks(store, "b")
    notary.sign(store)
    good = notary.file.read_bytes()
    for place in range(len(good) - 1):
        notary.file.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
        book = notary.book()
        # If the line end before the last statement is lost, the rest looks like an unfinished statement.
        assert book.problem is not None or book.torn_bytes, place
    store.close()


def test_a_statement_of_another_key_is_refused(notary: Notary, tmp_path: Path) -> None:
    store = open_store("sqlite://")
    parks(store, "a")
    notary.sign(store)
    (tmp_path / "other").mkdir()
    other = Notary(tmp_path / "other")
    assert "signed by another key" in str(Book.read(notary.file, other.public).problem)
    # A forger signs the same statement with another key, and gives it the id of the right key.
    other.sign(store)
    other.file.write_bytes(other.file.read_bytes().replace(other.public.id.encode(), notary.public.id.encode()))
    assert "the signature is not right" in str(Book.read(other.file, notary.public).problem)
    store.close()


def test_a_torn_tail_is_told_and_is_no_alarm(tmp_path: Path) -> None:
    url, notary = f"sqlite:///{tmp_path}/journal.db", Notary(tmp_path)
    real(url, "a")
    assert run_sign(url, notary).exit_code == 0
    whole = notary.file.read_bytes()
    real(url, "b")
    assert run_sign(url, notary).exit_code == 0
    tail = notary.file.read_bytes()[len(whole) :]
    for torn in range(1, len(tail)):
        notary.file.write_bytes(whole + tail[:torn])
        book = notary.book()
        assert (book.problem, len(book.statements), book.torn_bytes) == (None, 1, torn)
    line = tail[: tail.index(b"\n") + 1]
    for left in (tail[:1], line, tail[:-1], line * 50):  # the last one is longer than the statement that replaces it
        notary.file.write_bytes(whole + left)
        torn = len(left)
        answer = run_verify(url, notary)
        assert answer.exit_code == 0, answer.output
        assert f"{torn:,} byte" in answer.stdout
        assert "never finished" in answer.stdout
        again = run_sign(url, notary)
        assert again.exit_code == 0, again.output
        assert "never finished; going on after statement 1" in again.stderr
        assert [statement.n for statement in notary.book().statements] == [1, 2]
        assert notary.book().torn_bytes == 0
        assert run_verify(url, notary).exit_code == 0


def test_a_signer_that_is_killed_never_leaves_more_than_a_torn_tail(tmp_path: Path) -> None:
    url, notary = f"sqlite:///{tmp_path}/journal.db", Notary(tmp_path)
    store = open_store(url)
    for number in range(30):
        create(store, f"r{number}")
    command = [
        sys.executable,
        "-m",
        "perdure",
        "sign",
        "--key",
        str(notary.key_file),
        "--to",
        str(notary.file),
        "--every",
        "1s",
        "--url",
        url,
    ]
    seen = 0
    for attempt in range(6):
        create(store, f"more{attempt}")
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until = time.monotonic() + 60
        while len(notary.book().statements if notary.file.exists() else []) <= seen and time.monotonic() < until:
            time.sleep(0.01)
        process.kill()
        process.wait()
        book = notary.book()
        assert book.problem is None
        assert len(book.statements) > seen
        seen = len(book.statements)
    assert notary.problems(store) == []
    store.close()


# -- the command line ---------------------------------------------------------------------------------------------------------
def run_sign(url: str, notary: Notary, *more: str, env: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(cli, ["sign", "--key", str(notary.key_file), "--to", str(notary.file), *more, "--url", url], env=env)


def run_verify(url: str, notary: Notary, *more: str) -> Result:
    words = ["verify", "--signatures", str(notary.file), "--public-key", str(notary.public_file), *more, "--url", url]
    return CliRunner().invoke(cli, words)


def test_a_new_key_is_private_and_replaces_none(tmp_path: Path) -> None:
    key = tmp_path / "k"
    assert CliRunner().invoke(cli, ["sign", "--new-key", "--out", str(key)]).exit_code == 0
    assert stat.S_IMODE(os.stat(key).st_mode) == 0o600
    assert b"PUBLIC" in (tmp_path / "k.pub").read_bytes()
    before = key.read_bytes()
    again = CliRunner().invoke(cli, ["sign", "--new-key", "--out", str(key)])
    assert again.exit_code == 2
    assert "nothing is overwritten" in again.stderr
    key.unlink()
    assert CliRunner().invoke(cli, ["sign", "--new-key", "--out", str(key)]).exit_code == 2, "the public key is there, of another pair"
    key.write_bytes(before)
    key.chmod(0o640)
    with pytest.raises(InvalidInput, match=r"other users can read the private key .*chmod 600"):
        SigningKey(key)
    key.chmod(0o600)
    assert SigningKey(key).public.id == PublicKey.read(tmp_path / "k.pub").id


@pytest.mark.parametrize("content", [b"", b"hello", b"-----BEGIN PRIVATE KEY-----\n!!\n-----END PRIVATE KEY-----\n"])
def test_a_file_without_a_key_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "k"
    file.write_bytes(content)
    file.chmod(0o600)
    with pytest.raises(InvalidInput, match="holds no private key"):
        SigningKey(file)
    with pytest.raises(InvalidInput, match="holds no public key"):
        PublicKey.read(file)
    with pytest.raises(InvalidInput, match="No such file"):
        SigningKey(tmp_path / "none")


def test_a_key_of_another_kind_is_refused(tmp_path: Path) -> None:
    from cryptography.hazmat.primitives import serialization as form
    from cryptography.hazmat.primitives.asymmetric import ec

    private = ec.generate_private_key(ec.SECP256R1())
    file = tmp_path / "k"
    file.write_bytes(private.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption()))
    file.chmod(0o600)
    with pytest.raises(InvalidInput, match="of another kind"):
        SigningKey(file)


def test_without_the_package_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("cryptography"):
            raise ImportError(name)
        return whole(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    for words in (["--new-key", "--out", str(tmp_path / "k")], ["--key", "k"]):
        answer = CliRunner().invoke(cli, ["sign", *words])
        assert answer.exit_code == 2
        assert answer.stderr == "perdure: signatures need the package cryptography: pip install 'perdure[sign]'\n"
    assert not list(tmp_path.iterdir())


def test_verify_is_red_for_the_whole_journal_and_names_the_runs(tmp_path: Path) -> None:
    url, notary = f"sqlite:///{tmp_path}/journal.db", Notary(tmp_path)
    real(url, *(f"r{number}" for number in range(25)))
    assert run_sign(url, notary).exit_code == 0
    answer = run_verify(url, notary)
    assert answer.exit_code == 0, answer.output
    assert "1 statement, the last of" in answer.stdout
    with apsw.Connection(str(tmp_path / "journal.db")) as connection:
        Hand(lambda sql: list(connection.execute(sql)), is_postgres=False).forge(*(sql for n in range(25) for sql in delete(f"r{n}")))
    answer = run_verify(url, notary)
    assert answer.exit_code == 7
    assert answer.stdout.count("signed it with 3 events, and it is gone without a tombstone") == 20
    assert "and 5 more runs that contradict the statements" in answer.stdout
    told = [json.loads(line) for line in run_verify(url, notary, "--json").stdout.splitlines()]
    assert any("signed it with 3 events" in str(line["problem"]) for line in told)
    refused = run_sign(url, notary)
    assert refused.exit_code == 7
    assert "25 runs contradict what was signed (5 are not named above); nothing was signed" in refused.stderr
    assert len(notary.book().statements) == 1


def test_an_edited_or_empty_file_makes_verify_red_and_sign_refuse(tmp_path: Path) -> None:
    url, notary = f"sqlite:///{tmp_path}/journal.db", Notary(tmp_path)
    real(url, "a")
    run_sign(url, notary)
    good = notary.file.read_bytes()
    notary.file.write_bytes(good.replace(b'"seq":3', b'"seq":2'))
    answer = run_verify(url, notary)
    assert answer.exit_code == 7
    assert "line 2: the lines of runs before statement 1 are not those that were signed" in answer.stdout
    refused = run_sign(url, notary)
    assert refused.exit_code == 2
    assert "nothing was signed: keep that file" in refused.stderr
    notary.file.write_bytes(b"")
    answer = run_verify(url, notary)
    assert answer.exit_code == 7
    assert "holds no statement that this key has signed" in answer.stdout


@pytest.mark.parametrize(
    ("words", "says_"),
    [
        (["sign"], "say which key signs"),
        (["sign", "--new-key", "--key", "k"], "only makes a key pair"),
        (["sign", "--key", "{key}", "--to", "http://127.0.0.1:1/x"], "name one file with --to"),
        (["sign", "--key", "{key}", "--to", "a", "--to", "b"], "name one file with --to"),
        (["sign", "--key", "{key}", "--to", "a", "--every", "soon"], "is no length of time"),
        (["sign", "--key", "{key}", "--to", "{folder}/none/a"], "No such file"),
        (["sign", "--key", "{key}", "--to", "a", "--to", "https://example.org/x"], "webhook_secret"),
        (["verify", "--signatures", "x"], "belong together"),
        (["verify", "--public-key", "x"], "belong together"),
        (["verify", "r", "--signatures", "x", "--public-key", "y"], "leave RUN out"),
        (["verify", "--signatures", "none", "--public-key", "{public}"], "none: No such file"),
    ],
)
def test_wrong_usage_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], says_: str) -> None:
    notary = Notary(tmp_path)
    monkeypatch.chdir(tmp_path)
    url = f"sqlite:///{tmp_path}/journal.db"
    open_store(url).close()
    given = [word.format(key=notary.key_file, public=notary.public_file, folder=tmp_path) for word in words]
    answer = CliRunner().invoke(cli, [*given, "--url", url])
    assert answer.exit_code == 2, answer.output
    assert answer.stderr.count("\n") == 1
    assert says_ in answer.stderr


def test_a_webhook_gets_each_statement_and_its_failure_is_told(tmp_path: Path) -> None:
    url, notary = f"sqlite:///{tmp_path}/journal.db", Notary(tmp_path)
    real(url, "a")
    with receiver(says(200), says(500)) as there:
        place = there.url if hasattr(there, "url") else f"http://127.0.0.1:{there.port}/in"
        env = {"PERDURE_WEBHOOK_SECRET": SECRET}
        assert run_sign(url, notary, "--to", place, env=env).exit_code == 0
        failed = run_sign(url, notary, "--to", place, env=env)
        assert failed.exit_code == 1
        assert "statement 2 is in" in failed.stderr
        assert "could not be posted to http://127.0.0.1" in failed.stderr
        (first, _) = there.received
    notice = verify_webhook(SECRET, first.headers, first.body)
    assert (notice["type"], notice["n"]) == ("heads_signed", 1)
    assert notice["line"].encode() in notary.file.read_bytes().splitlines(), "the very line of the file: it can be compared"
    assert b"run_id" not in first.body, "no id of a run goes over the wire"
    assert len(notary.book().statements) == 2, "the file has both"


def test_two_signers_of_one_file_take_turns(tmp_path: Path) -> None:
    url, notary = f"sqlite:///{tmp_path}/journal.db", Notary(tmp_path)
    real(url, "a")
    command = [sys.executable, "-m", "perdure", "sign", "--key", str(notary.key_file), "--to", str(notary.file), "--url", url]
    both = [subprocess.Popen(command, stdout=subprocess.DEVNULL) for _ in range(4)]
    assert [one.wait(60) for one in both] == [0] * 4
    assert notary.book().problem is None
    assert [statement.n for statement in notary.book().statements] == [1, 2, 3, 4]


def test_a_root_is_that_of_rfc_6962_and_depends_on_every_leaf() -> None:
    heads = {f"r{number}": (number, "ab") for number in range(7)}
    assert merkle_root(heads) == merkle_root(dict(reversed(heads.items()))), "the order of reading does not count"
    seen = {merkle_root(heads)}
    for run_id in heads:
        seen.add(merkle_root({**heads, run_id: (99, "ab")}))
        seen.add(merkle_root({key: value for key, value in heads.items() if key != run_id}))
    assert len(seen) == 1 + 2 * len(heads)


def rewritten(store: Store, run_id: str, old: bytes, new: bytes, is_postgres: bool) -> list[str]:
    """The statements after a user has edited an event and computed all hashes of the run and the whole chain again."""

    def quote(data: bytes) -> str:
        return f"'\\x{data.hex()}'::bytea" if is_postgres else f"x'{data.hex()}'"

    number = f"(SELECT id FROM perdure_runs WHERE run_id = '{run_id}')"
    head, hashes, statements = genesis(run_id), {}, []
    for one in store.stored(run_id):
        data = one.data.replace(old, new)
        head = hashes[one.seq] = link(head, one.seq, one.event_id.hex(), one.ts, one.epoch, one.call, one.cause, data)
        text = data.decode().replace("'", "''")
        statements.append(f"UPDATE perdure_events SET data = '{text}', hash = {quote(head)} WHERE run = {number} AND seq = {one.seq}")
    assert head != found(store, run_id).head
    statements.append(f"UPDATE perdure_runs SET head = {quote(head)} WHERE run_id = '{run_id}'")
    entries = store.chain((-100_000_000, 0))
    key = next(entry.run for entry in entries if entry.run_id == run_id)
    before: dict[int, bytes] = {}
    for entry in entries:
        fresh = msgspec.structs.replace(entry, head=hashes[entry.seq][:16]) if entry.run == key else entry
        before[entry.chain] = chain_link(before.get(entry.chain, b""), [fresh])
        place = f"n = {entry.n}" + (f" AND chain = {entry.chain}" if is_postgres else "")
        statements.append(f"UPDATE perdure_chain SET head = {quote(fresh.head)}, link = {quote(before[entry.chain])} WHERE {place}")
    return statements
