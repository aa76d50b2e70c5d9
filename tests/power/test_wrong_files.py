"""Files that do not belong together, or that lack a part.

An error, or a true beginning of the history; never another one.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest
from tests import figures
from tests.power.autopsy import lay_out
from tests.power.outage import Image
from tests.unit.inspect_tools import AGENTS, SETTINGS, make_zoo, shop, sleeper, url_of

from perdure import Perdure
from perdure.errors import StoreError
from perdure.inspect.consistency import Relatives
from perdure.inspect.verify import verify_run
from perdure.inspect.view import all_rows
from perdure.store.sqlite.store import SqliteStore

Histories = dict[str, list[bytes]]  # hashes in order, by run


def histories(store: SqliteStore) -> Histories:
    return {row.run_id: [stored.hash for stored in store.stored(row.run_id)] for row in all_rows(store)}


def copied(path: Path, runs: int) -> tuple[Image, Histories]:
    """The files of a journal while it is open and its log is full, and the content of the journal."""

    async def main() -> tuple[Image, Histories]:
        async with Perdure(url_of(path), AGENTS, settings=SETTINGS) as app:
            for number in range(runs):
                await app.run(shop, f"o-{number}", id=f"{path.parent.name}-{number}")
            await app.start(sleeper, 3600.0, id=f"{path.parent.name}-asleep")
            assert isinstance(app.store, SqliteStore)
            return {name: path.with_name(name).read_bytes() for name in ("journal.db", "journal.db-wal")}, histories(app.store)

    path.parent.mkdir()
    make_zoo(path)
    return asyncio.run(main())


def told(folder: Path, image: Image) -> tuple[str, Histories]:
    """What comes of opening these files: refused, named as damaged, or a history that is said to be sound."""
    path = lay_out(folder, image)
    try:
        with closing(SqliteStore("sqlite:", path)) as store:
            kin = Relatives(store)
            if any(verify_run(store, row, kin).problem for row in all_rows(store)) or store.problems():
                return "named", {}
            return "sound", histories(store)
    except StoreError:
        return "refused", {}


def is_beginning(found: Histories, written: Histories) -> bool:
    return all(written.get(run_id, [])[: len(hashes)] == hashes for run_id, hashes in found.items())


def test_the_log_of_another_journal_is_never_taken_for_ones_own(folder: Path) -> None:
    (ann, anns), (bob, bobs) = copied(folder / "ann" / "journal.db", 1), copied(folder / "bob" / "journal.db", 3)
    for database, log, written in ((ann, bob, anns), (bob, ann, bobs)):
        assert told(folder / "state", database)[1] == written
        what, found = told(folder / "state", {"journal.db": database["journal.db"], "journal.db-wal": log["journal.db-wal"]})
        assert what != "sound" or is_beginning(found, written), (what, found)


@pytest.mark.parametrize("name", ["journal.db", "journal.db-wal"])
def test_a_file_that_was_cut_off_is_refused_or_holds_a_true_beginning(name: str, folder: Path) -> None:
    image, written = copied(folder / "cut" / "journal.db", 2)
    chance, found = random.Random(name), Counter[str]()
    sizes = {0, 1, 99, 100, 511, 512, 8191, 8192, *(chance.randrange(len(image[name])) for _ in range(150))}
    for size in sizes:
        what, history = told(folder / "state", {**image, name: image[name][:size]})
        assert what != "sound" or is_beginning(history, written), f"{name} cut to {size} bytes: another history"
        found[what] += 1
    figures.seen("files cut off", len(sizes))
    assert found["sound" if name.endswith("-wal") else "refused"] > 50, found
