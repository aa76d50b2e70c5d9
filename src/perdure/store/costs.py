"""What runs have used, added up from their journals: what was replayed left no second event there, so that it counts once (T24)."""

from __future__ import annotations

from perdure.store.api import CostRow
from perdure.store.database import Database


def costs(database: Database, by: str, since: int, tenant: str | None) -> list[CostRow]:
    return [CostRow(*row) for row in database.read("costs", {"by": by, "since": since, "tenant": tenant})]
