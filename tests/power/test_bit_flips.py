"""A bit has changed somewhere in the file.

Inside an event, the change is found and the event is named. In other places, the history stays the same (G11).
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import cast

import apsw
import pytest
from tests import figures
from tests.power.cells import Cell, cells
from tests.unit.inspect_tools import make_waiting, make_zoo, url_of

from perdure.engine.clock import Clock
from perdure.errors import StoreCorrupt, StoreError
from perdure.inspect.consistency import Relatives
from perdure.inspect.verify import verify_run
from perdure.inspect.view import all_rows
from perdure.store.api import RunRow, Served, Stored
from perdure.store.sqlite.store import SqliteStore

MAKERS = {"runs at rest": make_zoo, "runs that wait": make_waiting}
# The type of the first column. This column is in the key and takes no bytes: its type is NULL or "0". No code reads
# it.
ZERO = 8
TYPES, ROW_TYPES = 12, 60  # how many bytes at the beginning of a record describe the types of its columns


@pytest.fixture(params=MAKERS)
def path(request: pytest.FixtureRequest, folder: Path) -> Path:
    """A journal in one file: the last one to close it has emptied the log."""
    MAKERS[request.param](folder / "journal.db")
    return folder / "journal.db"


class Flipped:
    """A file that is open, and whose bits can be turned over underneath."""

    def __init__(self, path: Path) -> None:
        self.content = path.read_bytes()
        self.store = SqliteStore("sqlite:", path)
        keys = {str(run_id): cast(int, key) for run_id, key in self._reader.execute("SELECT run_id, id FROM perdure_runs").fetchall()}
        self.rows: dict[int, RunRow] = {keys[row.run_id]: row for row in all_rows(self.store)}
        self._file = os.open(path, os.O_RDWR)

    @property
    def _reader(self) -> apsw.Connection:
        return self.store._database._reader

    def table(self, name: str) -> list[Cell]:
        root: int = self._reader.execute("SELECT rootpage FROM sqlite_schema WHERE name = ?", (name,)).get
        return list(cells(self.content, root))

    def flip(self, place: int, bit: int) -> None:
        os.pwrite(self._file, bytes((self.content[place] ^ 1 << bit,)), place)
        self._reader.release_memory()  # or SQLite would answer from its cache

    def restore(self, place: int) -> None:
        os.pwrite(self._file, self.content[place : place + 1], place)
        self._reader.release_memory()

    def close(self) -> None:
        os.close(self._file)
        self.store.close()


@pytest.fixture
def flipped(path: Path) -> Iterator[Flipped]:
    with closing(Flipped(path)) as opened:
        yield opened


@pytest.mark.long
@pytest.mark.parametrize("half", [0, 1])
def test_a_bit_that_turns_over_in_any_byte_of_any_event_is_found(flipped: Flipped, half: int) -> None:
    count, found = 0, Counter[str]()
    events = flipped.table("perdure_events")
    assert len(events) == sum(row.seq for row in flipped.rows.values())
    for cell in events[half::2]:
        row, seq = flipped.rows[cell.rowid >> 32], cell.rowid & 0xFFFFFFFF
        for index, place in enumerate(cell.places):
            # All eight where that is quick enough; else two, each of the eight in its turn.
            for bit in range(8) if len(events) < 100 else (place % 8, (place + 3) % 8):
                flipped.flip(place, bit)
                try:
                    found[_verdict(flipped, row, seq, index - cell.record, bit)] += 1
                finally:
                    flipped.restore(place)
                count += 1
    figures.seen("bits flipped in events", count)
    assert found["nobody reads it"] == len(events[half::2]) or len(events) > 100, found
    assert found["the event is named"] > 0.9 * count, found
    assert {row.run_id: verify_run(flipped.store, row).problem for row in flipped.rows.values()} == dict.fromkeys(
        row.run_id for row in flipped.rows.values()
    )


def _verdict(flipped: Flipped, row: RunRow, seq: int, column: int, bit: int) -> str:
    if 0 <= column < TYPES:
        _read(flipped, row.run_id)
    try:
        verdict = verify_run(flipped.store, row)
    except StoreCorrupt:
        return "the file is damaged"
    if column == 1 and bit == ZERO.bit_length() - 1:
        assert verdict.problem is None, verdict
        return "nobody reads it"
    assert verdict.problem is not None, f"event {seq} of run {row.run_id}, byte {column} of its record, bit {bit}: not found"
    if verdict.seq == seq:
        return "the event is named"
    # With another size or key the event is in another place, and the first missing event depends on it.
    assert column < 0, f"event {seq} of run {row.run_id}, byte {column}, bit {bit}: {verdict}"
    return "another event is named"


def _read(flipped: Flipped, run_id: str) -> None:
    """A worker that would claim the run gets an error of perdure, if it gets an error."""
    try:
        flipped.store.read(run_id)
    except StoreError:
        pass


def test_a_bit_that_turns_over_in_the_row_of_a_run_never_ends_in_a_traceback(flipped: Flipped) -> None:
    count, found = 0, Counter[str]()
    for cell in flipped.table("perdure_runs"):
        run_id = flipped.rows[cell.rowid].run_id
        for place in cell.places[:ROW_TYPES]:
            for bit in range(8):
                flipped.flip(place, bit)
                try:
                    row = flipped.store.get(run_id)
                    found["not there" if row is None else "named" if verify_run(flipped.store, row).problem else "the same"] += 1
                except StoreError:
                    found["refused"] += 1
                finally:
                    flipped.restore(place)
                count += 1
    figures.seen("bits flipped in rows", count)
    assert min(found["named"], found["refused"]) > 100, found


def test_text_that_is_none_any_more_is_damage_to_whoever_reads_and_to_whoever_writes(folder: Path) -> None:
    make_zoo(folder / "journal.db")
    with closing(SqliteStore("sqlite:", folder / "journal.db")) as store:
        with apsw.Connection(str(folder / "journal.db")) as other:
            other.execute("DROP TRIGGER perdure_runs_identity")
            other.execute("UPDATE perdure_runs SET actor = CAST(x'ff' AS TEXT) WHERE run_id = 'queued'")
        with pytest.raises(StoreCorrupt, match=r"is damaged .*not UTF-8"):
            store.get("queued")
        store.register("w", "host:1", 1, 1)
        with pytest.raises(StoreCorrupt, match=r"is damaged .*not UTF-8"):
            store.claim("w", [Served("shop", "1")], 1, Clock().now(), run_id="queued")


def test_every_byte_of_a_blob_that_is_changed_is_found(folder: Path) -> None:
    make_zoo(folder / "journal.db")
    with closing(Flipped(folder / "journal.db")) as flipped:
        (blob,) = flipped.table("perdure_blobs")
        assert len(blob.places) > 2000
        (row,) = (row for row in flipped.rows.values() if row.run_id == "done")
        for place in blob.places:
            flipped.flip(place, place % 8)
            try:
                # A name that is wrong in the table and right in its index is still found by its index.
                assert verify_run(flipped.store, row).problem is not None or flipped.store.problems(), place
            except StoreCorrupt:
                pass
            finally:
                flipped.restore(place)
        figures.seen("bits flipped in blobs", len(blob.places))


def histories(store: SqliteStore) -> dict[str, list[Stored]]:
    return {row.run_id: store.stored(row.run_id) for row in all_rows(store)}


def test_a_bit_that_turns_over_elsewhere_is_named_or_changes_nothing_that_is_read(path: Path) -> None:
    """In headers, indexes, the schema, other rows, free space: the only errors are errors of perdure."""
    with closing(Flipped(path)) as flipped:
        content, written = flipped.content, histories(flipped.store)
        inside = {place for cell in flipped.table("perdure_events") for place in cell.places}
    # Most of a file is zeros that were never written. So choose bytes near other bytes that are not zero.
    used = [place for place in range(len(content)) if place not in inside and content[max(0, place - 8) : place + 8].strip(b"\0")]
    chance, found = random.Random(6), Counter[str]()
    for place in chance.sample(used, 600):
        bit = chance.randrange(8)
        for name in ("journal.db-wal", "journal.db-shm"):
            path.with_name(name).unlink(missing_ok=True)
        path.write_bytes(content[:place] + bytes((content[place] ^ 1 << bit,)) + content[place + 1 :])
        found[_told(path, written, f"byte {place}, bit {bit}")] += 1
    figures.seen("bits flipped elsewhere", found.total())
    assert min(found[one] for one in ("refused", "named", "the same")) > 50, found


def _told(path: Path, written: dict[str, list[Stored]], where: str) -> str:
    try:
        with closing(SqliteStore("sqlite:", path)) as store:
            kin = Relatives(store)
            if any(verify_run(store, row, kin).problem for row in all_rows(store)) or store.problems():
                return "named"
            assert histories(store) == written, f"{where}: another history, and nobody says so"
            return "the same"
    except StoreError:
        return "refused"


@pytest.mark.parametrize(("part", "code"), [("event", 7), ("header", 2)])
def test_the_command_line_says_so_in_one_line(part: str, code: int, folder: Path) -> None:
    make_zoo(folder / "journal.db")
    with closing(Flipped(folder / "journal.db")) as flipped:
        (cell,) = (cell for cell in flipped.table("perdure_events") if cell.rowid == 1 << 32 | 3)
        place = cell.places[-40] if part == "event" else 5
        flipped.flip(place, 0)
        command = [sys.executable, "-m", "perdure", "verify", "--url", url_of(folder / "journal.db")]
        told = subprocess.run(command, capture_output=True, text=True)
        flipped.restore(place)
    assert told.returncode == code, told
    said = told.stdout + told.stderr
    assert "Traceback" not in said
    assert ("run done, event 3: it is not what was written" if part == "event" else "is not a SQLite database") in said
