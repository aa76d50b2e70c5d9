"""Corrects the rows of a run by its journal, for `perdure verify --repair`. Events are never changed."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import structs

from perdure.errors import AlreadyRunning, Conflict, NotFound
from perdure.store.api import Repair, RunRow
from perdure.store.cursor import Cursor
from perdure.store.delivery import Delivery
from perdure.store.part import Means, Part
from perdure.store.queues import line_of
from perdure.store.rows import key_of, run_row


class Repairs(Part):
    def __init__(self, means: Means) -> None:
        super().__init__(means)
        self._delivery = Delivery(means.liveness)

    def repair(self, repair: Repair) -> None:
        """Write the repair in one transaction.

        AlreadyRunning if a worker that is not known to be dead holds the run. Conflict if the run's row has changed
        since the repair was computed.
        """

        def write(cursor: Cursor) -> None:
            # Triggers refuse every change of a settled row. They would also refuse this correction.
            with self._database.unguarded(cursor):
                _write(cursor, repair, self._delivery)

        self._database.write(write, lambda cursor, _: False)
        self._bell.ring()


def _write(cursor: Cursor, repair: Repair, delivery: Delivery) -> None:
    found = cursor.one("run_to_change", (repair.run_id,))
    if found is None:
        raise NotFound(f"there is no run {repair.run_id}; `perdure list` shows the runs")
    row, key = run_row(found), key_of(found)
    row.check_live()
    worker = cursor.one("worker_by_id", (row.holder,)) if row.holder is not None and delivery.holds(row.holder) else None
    if worker is not None:  # perdure never writes a holder that is not registered: ignore such a holder
        raise AlreadyRunning(f"run {repair.run_id} is held by worker {worker[0]}; nothing was changed: stop that worker first")
    if row != repair.seen:
        raise Conflict(f"run {repair.run_id} has changed meanwhile; nothing was changed: verify it again")
    right = structs.replace(row, **repair.row)
    cursor.change("repair_run", {"id": key, **_columns(right), "line": _line(cursor, right)})
    for one in repair.approvals:
        values = {
            **structs.asdict(one),
            "run": key,
            "escalated": int(one.escalated),
            "deciders": msgspec.json.encode(one.deciders).decode(),
            "voters": msgspec.json.encode(one.voters).decode(),
        }
        cursor.change("repair_approval", values)
    if repair.ledger is not None:
        limits, spent, reserved = repair.ledger.limits, repair.ledger.spent, repair.ledger.reserved
        amounts = {
            f"{what}_{name}": getattr(of, name)
            for what, of in (("limit", limits), ("spent", spent), ("reserved", reserved))
            for name in ("usd_micros", "tokens", "calls", "busy_us")
        }
        cursor.change("repair_budget", {"run": key, "on_exceed": limits.on_exceed, "parent": row.parent, **amounts})
        cursor.change("own_ledger", (key,))
    if repair.labels is not None:
        cursor.change("remove_labels", (key,))
        cursor.each("set_label", [(name, value, key) for name, value in repair.labels.items()])


def _columns(row: RunRow) -> dict[str, Any]:
    return {name: getattr(row, name) for name in row.__struct_fields__ if name not in ("run_id", "lost_with", "specimen")}


def _line(cursor: Cursor, row: RunRow) -> int:
    return line_of(cursor, agent=row.agent, version=row.version, queue=row.queue, tenant=row.tenant, priority=row.priority)
