"""The standard library's sqlite3 must not open a journal that is open here."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

import pytest

from perdure.errors import StoreError
from perdure.store.open import open_store


def test_a_second_sqlite_library_is_refused_by_every_name_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "my journal.db"
    store = open_store(f"sqlite:///{path}")
    os.symlink(path, tmp_path / "link.db")
    os.link(path, tmp_path / "hard.db")
    monkeypatch.chdir(tmp_path)
    uri = f"file:{tmp_path}/my%20journal.db?mode=ro"
    for name, is_uri in (
        (str(path), False),
        (path, False),
        (os.fsencode(path), False),
        ("my journal.db", False),
        ("link.db", False),
        ("hard.db", False),
        (uri, True),
    ):
        with pytest.raises(StoreError, match="through apsw, or from another process"):
            sqlite3.connect(name, uri=is_uri)
    store.close()


def test_other_files_and_a_journal_that_is_closed_are_nobodys_business(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/journal.db"
    one, two = open_store(url), open_store(url)
    sqlite3.connect(tmp_path / "other.db").close()
    sqlite3.connect(":memory:").close()
    one.close()
    with pytest.raises(StoreError, match="corrupts"):
        sqlite3.connect(tmp_path / "journal.db")
    two.close()
    mine = sqlite3.connect(tmp_path / "journal.db")
    assert mine.execute("SELECT count(*) FROM perdure_runs").fetchone() == (0,)
    mine.close()
