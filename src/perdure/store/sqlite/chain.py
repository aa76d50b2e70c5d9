"""Links the entries of the journal-wide chain. SQLite has no hash function that a trigger could call."""

from __future__ import annotations

from typing import Any

import apsw

from perdure.core.identity import ChainEntry, chain_link
from perdure.store.sqlite.queries import QUERIES

_UNLINKED, _LINK = QUERIES["unlinked_entries"], QUERIES["link_entry"]


def link_chain(cursor: apsw.Cursor) -> None:
    """Give the last entry a link that covers all entries since the last link."""
    rows: list[Any] = cursor.execute(_UNLINKED).fetchall()
    before, fresh = (rows[0][-1], rows[1:]) if rows and rows[0][-1] is not None else (b"", rows)
    if fresh:
        entries = [ChainEntry(0, *row) for row in fresh]
        cursor.execute(_LINK, (chain_link(before, entries), entries[-1].n))
