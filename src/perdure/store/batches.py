"""Bulk operations: what a person has ordered for many runs with one command, so that the same command goes on after a crash."""

from __future__ import annotations

from perdure.store.api import Batch
from perdure.store.part import Part


class Batches(Part):
    def open_batch(self, new: Batch) -> None:
        values = (new.batch, new.verb, new.query, new.given, new.by, new.at)
        self._database.write(
            lambda cursor: cursor.change("insert_batch", values), lambda cursor, _: bool(cursor.all("batch", (new.batch,)))
        )

    def batch(self, batch: str) -> Batch | None:
        rows = self._database.read("batch", (batch,))
        return Batch(*rows[0]) if rows else None

    def interrupted_batches(self, verb: str) -> list[Batch]:
        return [Batch(*row) for row in self._database.read("interrupted_batches", (verb,))]

    def end_batch(self, batch: str, now: int) -> None:
        values = {"batch": batch, "now": now}
        self._database.write(lambda cursor: cursor.change("end_batch", values), lambda cursor, _: True)
