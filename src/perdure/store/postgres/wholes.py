"""Whole runs into PostgreSQL: their events in one statement, since each statement is a round trip and a look by the trigger."""

from __future__ import annotations

from collections.abc import Sequence

from perdure.store.cursor import Cursor, Row
from perdure.store.postgres.arrays import Array, Byteas, Int8s, Texts
from perdure.store.wholes import Wholes

_COLUMNS: tuple[tuple[str, type[Array]], ...] = (
    *(("runs", Int8s), ("seqs", Int8s), ("ids", Byteas), ("times", Int8s), ("epochs", Int8s)),
    *(("calls", Int8s), ("causes", Int8s), ("data", Texts), ("hashes", Byteas)),
)


class PostgresWholes(Wholes):
    def _take_in_events(self, cursor: Cursor, events: Sequence[Row]) -> None:
        columns = zip(*events, strict=True)
        cursor.change("take_in_events", {name: kind.of(column) for (name, kind), column in zip(_COLUMNS, columns, strict=True)})
