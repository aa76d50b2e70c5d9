"""From a URL to a store."""

from __future__ import annotations

import os
from pathlib import Path

from perdure.errors import InvalidInput
from perdure.store.api import Store

_FORMS = "sqlite:///file.db (relative), sqlite:////absolute.db, sqlite:// (in memory)"


def open_store(url: str, *, synchronous: str = "full", busy_s: float = 10.0, create: bool = True) -> Store:
    """Open the journal that the URL names; create it, or bring its schema up to date, if need be.

    A database of another program is refused before anything is touched; so is one without a journal, unless one may be created.
    """
    from perdure.store import owner
    from perdure.store.sqlite import SqliteStore  # a driver is loaded when its URL asks for it

    path = sqlite_path(url)
    if path is not None and not create:
        owner.require_journal(path)
    elif path is not None and path.exists():
        owner.holds_journal(path)
    return SqliteStore(url, path, synchronous=synchronous, busy_s=busy_s)


def sqlite_path(url: str) -> Path | None:
    """The file that a sqlite: URL means; None for a database in memory."""
    if url in ("sqlite://", "sqlite:"):
        return None
    scheme, found, rest = url.partition("://")
    if scheme != "sqlite" or not found:
        raise InvalidInput(f"{_without_password(url)!r} is not the URL of a store; supported: {_FORMS}")
    if not rest.startswith("/") or not rest[1:] or "?" in rest or "\0" in rest:
        raise InvalidInput(f"{url!r} does not name a file; supported: {_FORMS}, without a host and without options")
    return Path(os.path.abspath(rest[1:]))


def _without_password(url: str) -> str:
    head, at, tail = url.rpartition("@")
    return f"{head.split('://')[0]}://…@{tail}" if at else url
