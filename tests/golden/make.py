"""Makes the journals of this version: `python -m tests.golden.make`.

The journals of a released version are never remade.

It runs real agents in real processes, some of which are killed, with a fixed clock and fixed ids: making the journals
twice gives the same bytes. A new version gets a new folder; the old folders are not changed, and every later perdure
reads all of them.
"""

from __future__ import annotations

import gzip
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import apsw
from tests.golden.files import AGENTS, BLOBS, DATABASE, EXPECTED, HERE, JOURNAL, folder_of, projection
from tests.golden.lives import T0_S, Life, live
from tests.golden.scenes import LIVES

import perdure
from perdure.core.codec import Payload
from perdure.core.state import fold
from perdure.store.api import Store, Stored
from perdure.store.open import open_store


def make(folder: Path, lives: Sequence[Life] = LIVES) -> None:
    """Make the journals in a new folder; FileExistsError when it is there: history is not written twice."""
    folder.mkdir(parents=True)
    shutil.copyfile(HERE / AGENTS, folder / AGENTS)
    with tempfile.TemporaryDirectory() as place:
        database = Path(place) / "journal.db"
        for number, life in enumerate(lives, 1):
            live(number, life, database, folder / AGENTS)
        _write_database(database, folder / DATABASE)
        with closing(open_store(f"sqlite:///{database}", create=False)) as store:
            _write_text(store, folder)


def _write_database(made: Path, to: Path) -> None:
    """The database in one file, laid out by its content alone: how often a page was written does not show."""
    whole = made.with_name("whole.db")
    connection = apsw.Connection(str(made))
    try:
        connection.execute("UPDATE perdure_schema SET applied_at = ?", (T0_S * 1_000_000,))
        connection.execute("VACUUM INTO ?", (str(whole),))
    finally:
        connection.close()
    to.write_bytes(gzip.compress(whole.read_bytes(), mtime=0))


def _write_text(store: Store, folder: Path) -> None:
    lines, blobs, expected = [], {}, {}

    def load(payload: Payload) -> bytes:
        inline = payload.inline
        if inline is None:
            inline = blobs[str(payload.blob)] = store.blob(str(payload.blob))
        return inline

    for row in sorted(store.list(limit=1000), key=lambda row: (row.created_at, row.run_id)):
        lines += [_line(row.run_id, stored) for stored in store.stored(row.run_id)]
        expected[row.run_id] = projection(row, fold(store.read(row.run_id)), load)
    (folder / JOURNAL).write_bytes(b"".join(lines))
    named = [b'{"digest":"%s","data":%s}\n' % (digest.encode(), data) for digest, data in sorted(blobs.items())]
    (folder / BLOBS).write_bytes(b"".join(named))
    (folder / EXPECTED).write_text(json.dumps(expected, indent=1, sort_keys=True) + "\n", "utf-8")


def _line(run_id: str, stored: Stored) -> bytes:
    columns = {
        "run_id": run_id,
        "seq": stored.seq,
        "event_id": stored.event_id.hex(),
        "ts": stored.ts,
        "epoch": stored.epoch,
        "call": stored.call,
        "cause": stored.cause,
    }
    data: bytes = stored.data
    return b'%s,"data":%s,"hash":"%s"}\n' % (json.dumps(columns, separators=(",", ":")).encode()[:-1], data, stored.hash.hex().encode())


if __name__ == "__main__":
    target = folder_of(perdure.__version__)
    if target.exists():
        sys.exit(f"{target.name} has its journals, and they are never made again; give perdure another version first")
    make(target)
    print(f"{target}: {sum(1 for _ in (target / JOURNAL).open())} events of {len(LIVES)} processes")
