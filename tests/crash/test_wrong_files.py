"""Files that do not belong together: an old backup was restored, the log of another journal, a file that was cut off.

Nothing can restore the events that a backup does not have. But an effect with a key is not repeated, and damage is
refused or named.
"""

from __future__ import annotations

import os
import shutil
from contextlib import closing
from pathlib import Path

import pytest
from tests.crash import victims
from tests.crash.checks import check_journal
from tests.crash.scenarios import check_one_effect_each
from tests.crash.world import KILLED, World
from tests.crash.worlds import Worlds

from perdure.core.events import Event
from perdure.errors import StoreError
from perdure.inspect.verify import verify_run
from perdure.store.open import open_store

TODO = [["work", "a", 0], ["work", "b", 0], ["step", "c", 0], ["work", "d", 0]]


def test_from_a_backup_that_was_restored_the_run_goes_on_and_nothing_that_has_a_key_happens_again(world: World) -> None:
    world.begin(r=TODO)
    assert world.run(victims.drive, run_id="r", report=world.report(), die=["intent", "after", 2, "work"]) == KILLED
    backup = world.copy()
    assert world.finish("r")["r"]["output"] == ["a done", "b done", "c done", "d done"]
    # The journal is as it was; the world outside is not.
    shutil.copyfile(world.ledger.path, backup.ledger.path)
    (backup.folder / "ledger.acknowledged").unlink()
    assert backup.finish("r")["r"]["output"] == ["a done", "b done", "c done", "d done"]
    check_one_effect_each(backup, "r", ["a", "b", "c", "c", "d"])  # c is only said to be idempotent: it has no key to be known by
    assert {line["what"] for line in backup.ledger.lines("dropped")} >= {"d"}
    check_journal(backup, "r")


@pytest.fixture
def half_done(worlds: Worlds) -> tuple[World, World]:
    """Two journals on SQLite, each with a log that was not emptied, since its worker was killed."""
    made = worlds.new(), worlds.new()
    for number, world in enumerate(made):
        world.begin(**{f"r{number}": [["work", f"{place}{number}", 0] for place in range(6 + 5 * number)]})
        assert (
            world.run(victims.drive, run_id=f"r{number}", report=world.report(), die=["intent", "after", 4 + 5 * number, "work"]) == KILLED
        )
        assert (world.disk / "journal.db-wal").stat().st_size > 0
    return made


def journal_of(folder: Path) -> dict[str, list[Event]] | None:
    """What a process that reads everything finds there; None if it is refused, or if it gets an error."""
    try:
        with closing(open_store(f"sqlite:///{folder}/journal.db")) as store:
            if store.problems():
                return None
            rows = store.list()
            if any(verify_run(store, row).problem is not None for row in rows):
                return None
            return {row.run_id: store.read(row.run_id) for row in rows}
    except StoreError:
        return None


def check_is_something_that_was_written(found: dict[str, list[Event]] | None, *originals: dict[str, list[Event]]) -> None:
    """Damage is refused or named; what passes for sound is a journal as it once was, and not a mixture."""
    if found is None:
        return
    written = {run_id: events for original in originals for run_id, events in original.items()}
    assert all(events == written[run_id][: len(events)] for run_id, events in found.items()), found


@pytest.mark.parametrize("dialect", ["sqlite"], indirect=True)
def test_the_log_of_another_journal_makes_no_mixture_that_passes_for_a_journal(half_done: tuple[World, World], tmp_path: Path) -> None:
    one, other = half_done
    originals = []
    for number, world in enumerate(half_done):
        shutil.copytree(world.disk, tmp_path / f"own{number}", ignore=shutil.ignore_patterns("*-workers", "*-shm"))
        found = journal_of(tmp_path / f"own{number}")
        assert found is not None
        originals.append(found)
    for number, (base, log) in enumerate(((one, other), (other, one))):
        mixed = tmp_path / f"mixed{number}"
        mixed.mkdir()
        shutil.copyfile(base.disk / "journal.db", mixed / "journal.db")
        shutil.copyfile(log.disk / "journal.db-wal", mixed / "journal.db-wal")
        check_is_something_that_was_written(journal_of(mixed), *originals)


@pytest.mark.parametrize("dialect", ["sqlite"], indirect=True)
def test_a_file_that_was_cut_off_is_refused_or_named_and_a_log_that_was_cut_off_is_an_older_journal(world: World, tmp_path: Path) -> None:
    world.begin(r=[["work", str(place), 0] for place in range(12)])
    assert world.run(victims.drive, run_id="r", report=world.report(), die=["intent", "after", 12, "work"]) == KILLED
    logged = tmp_path / "logged"
    shutil.copytree(world.disk, logged, ignore=shutil.ignore_patterns("*-workers", "*-shm"))
    emptied = tmp_path / "emptied"
    shutil.copytree(logged, emptied)
    whole = journal_of(emptied)  # the reader has moved the log into the file
    assert whole is not None
    assert not (emptied / "journal.db-wal").exists()
    lengths: set[int] = set()
    for name, folder in (("journal.db", emptied), ("journal.db-wal", logged)):
        size = (folder / name).stat().st_size
        for part in range(12):
            cut = tmp_path / f"{name}-{part}"
            shutil.copytree(folder, cut)
            os.truncate(cut / name, size * part // 12 + part)
            found = journal_of(cut)
            if name == "journal.db":
                assert found is None or found == whole or part == 0, (part, found)  # an empty file is a new journal
            else:
                check_is_something_that_was_written(found, whole)
                lengths.add(len((found or {}).get("r", [])))
    assert len(lengths) > 2, "no cut has changed anything"
