"""The log itself has filled the disk: one write is refused, the next finds room, and nothing is lost."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import apsw
import pytest
from tests.unit.store_tools import raw

from perdure.errors import StoreUnavailable
from perdure.store.sqlite.store import SqliteStore

NOW = 1_800_000_000_000_000
ROOM = 20 * 4096  # far below the length at which SQLite itself empties a log


class SmallDisk(apsw.VFS):
    """A disk with so much room and no more; default for connections that are opened while it is in use."""

    def __init__(self) -> None:
        self.sizes: dict[str, int] = {}
        self.room: int | None = None
        super().__init__("perdure-small", "unix", makedefault=True)

    def xOpen(self, name: Any, flags: Any) -> apsw.VFSFile:
        return _SmallFile(self, name, flags)

    def grow(self, name: str, size: int) -> None:
        larger = max(size, self.sizes.get(name, 0))
        if self.room is not None and sum(self.sizes.values()) - self.sizes.get(name, 0) + larger > self.room:
            raise apsw.FullError("no room, as ordered")
        self.sizes[name] = larger


class _SmallFile(apsw.VFSFile):
    def __init__(self, disk: SmallDisk, name: Any, flags: Any) -> None:
        super().__init__("unix", name, flags)
        self._disk = disk
        self._name = str(name.filename() if isinstance(name, apsw.URIFilename) else name)

    def xWrite(self, data: Any, offset: int) -> None:
        self._disk.grow(self._name, offset + len(data))
        super().xWrite(data, offset)

    def xTruncate(self, size: int) -> None:
        super().xTruncate(size)
        self._disk.sizes[self._name] = size


@pytest.fixture
def disk() -> Iterator[SmallDisk]:
    small = SmallDisk()
    yield small
    small.unregister()


def renewed(store: SqliteStore, beat: int) -> bool:
    try:
        store.renew("w", beat)
    except StoreUnavailable:
        return False
    return True


def test_a_log_that_fills_the_disk_is_emptied_for_the_next_write(tmp_path: Path, disk: SmallDisk) -> None:
    path = tmp_path / "journal.db"
    SqliteStore("sqlite:", path).close()  # the tables are in the file itself, and the log is gone
    disk.sizes = {str(path): path.stat().st_size}
    store = SqliteStore("sqlite:", path)
    store.register("w", "host:1", 1, NOW)
    disk.room = sum(disk.sizes.values()) + ROOM
    refused, beaten = 0, NOW
    for beat in range(NOW + 10, NOW + 2010, 10):
        if not renewed(store, beat):
            refused += 1
            store.renew("w", beat)  # there is room again
        beaten = beat
    assert 2 <= refused <= 40
    assert [worker.beat_at for worker in store.workers(NOW, 1)] == [beaten]
    disk.room = None
    store.close()
    assert raw(path).execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def test_where_nothing_can_be_freed_the_disk_stays_full_and_the_store_whole(tmp_path: Path, disk: SmallDisk) -> None:
    path = tmp_path / "journal.db"
    store = SqliteStore("sqlite:", path)
    store.register("w", "host:1", 1, NOW)
    disk.room = 0
    for _ in range(3):
        with pytest.raises(StoreUnavailable, match="disk full"):
            store.renew("w", NOW + 1)
    assert [worker.beat_at for worker in store.workers(NOW, 1)] == [NOW]
    disk.room = None
    store.renew("w", NOW + 2)
    assert [worker.beat_at for worker in store.workers(NOW, 1)] == [NOW + 2]
    store.close()


def test_somebody_who_reads_meanwhile_is_not_waited_for(tmp_path: Path, disk: SmallDisk) -> None:
    path = tmp_path / "journal.db"
    SqliteStore("sqlite:", path).close()
    disk.sizes = {str(path): path.stat().st_size}
    store = SqliteStore("sqlite:", path)
    store.register("w", "host:1", 1, NOW)
    reader = raw(path)
    reader.execute("BEGIN")
    reader.execute("SELECT count(*) FROM perdure_workers").fetchall()
    disk.room = sum(disk.sizes.values()) + ROOM
    assert not all(renewed(store, beat) for beat in range(NOW, NOW + 200))
    with pytest.raises(StoreUnavailable, match="disk full"):
        store.renew("w", NOW + 300)
    reader.execute("ROLLBACK")
    with pytest.raises(StoreUnavailable, match="disk full"):
        store.renew("w", NOW + 400)  # finds the disk full, and the log is emptied then
    store.renew("w", NOW + 500)
    reader.close()
    disk.room = None
    store.close()
