"""Opens the store that a URL names."""

from __future__ import annotations

import os
from pathlib import Path

from perdure.errors import InvalidInput
from perdure.store.api import Store
from perdure.store.url import shown_url

_FILES = "sqlite:///file.db (relative), sqlite:////absolute.db, sqlite:// (in memory)"
_FORMS = f"{_FILES}, postgresql://user@host/database"
_POSTGRES = ("postgresql://", "postgres://")


def open_store(url: str, *, synchronous: str = "full", busy_s: float = 10.0, create: bool = True, connections: int = 10) -> Store:
    """Open the journal that the URL names; create it, or update its schema, if needed.

    If the database does not answer within `busy_s` seconds, the error is StoreUnavailable. `connections` is how many
    connections to a server this process may have. A database of another program is refused before anything is
    written. If `create` is false, a database without a journal is refused as well.
    """
    # The driver of a database is imported only for a URL of that database.
    if is_postgres(url):
        from perdure.store.postgres.driver import require_psycopg

        require_psycopg()
        from perdure.store.postgres.store import open_postgres

        return open_postgres(url, create=create, answer_s=busy_s, connections=connections)
    from perdure.store.sqlite import owner
    from perdure.store.sqlite.store import SqliteStore

    path = sqlite_path(url)
    if path is not None and not create:
        owner.require_journal(path)
    elif path is not None and path.exists():
        owner.holds_journal(path)
    return SqliteStore(url, path, synchronous=synchronous, busy_s=busy_s)


def is_postgres(url: str) -> bool:
    return url.startswith(_POSTGRES)


def sqlite_path(url: str) -> Path | None:
    """The file that a sqlite: URL names; None for a database in memory."""
    if url in ("sqlite://", "sqlite:"):
        return None
    scheme, found, rest = url.partition("://")
    if scheme != "sqlite" or not found:
        raise InvalidInput(f"{shown_url(url)!r} is not the URL of a store; supported: {_FORMS}")
    if not rest.startswith("/") or not rest[1:] or "?" in rest or "\0" in rest:
        raise InvalidInput(f"{shown_url(url)!r} does not name a file; supported: {_FILES}, without a host and without options")
    return Path(os.path.abspath(rest[1:]))
