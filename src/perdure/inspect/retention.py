"""Runs that were pruned, and a journal that was moved: in the checks of `perdure doctor` and in the audit trail."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from perdure import shell
from perdure.engine.api import Reading
from perdure.inspect.audit import AuditFilter
from perdure.inspect.health import Check
from perdure.inspect.text import iso, plural
from perdure.store.api import Tombstone


def check_retention(store: Reading) -> Iterator[Check]:
    """The checks of `perdure doctor`: was the journal moved, and how many runs were pruned?"""
    moved = store.moved()
    if moved is not None and moved.done:
        yield Check(
            "moved",
            "warn",
            moved.words,
            f"name the other one: --url {shell.quote(moved.to_url)}, PERDURE_URL, or url in perdure.toml",
        )
    elif moved is not None:
        yield Check("moved", "FAIL", moved.words, f"perdure copy --to {shell.quote(moved.to_url)}")
    facts = store.facts()
    pruned = int(facts["pruned"])
    last = f", the last ones at {iso(int(facts['pruned_at']))}" if pruned else ""
    yield Check("pruned", "ok", f"{plural(pruned, 'run was', 'runs were')} pruned{last}")


def pruned_runs(store: Reading) -> int:
    """How many runs were pruned from this journal."""
    return int(store.facts()["pruned"])


PRUNED = "run_pruned"  # the type of a tombstone's line in the audit trail; no event has this type


class PrunedRuns:
    """Tombstones as lines of the audit trail. Each call of `more` yields only the tombstones that are new."""

    def __init__(self, store: Reading, wanted: AuditFilter) -> None:
        self._store = store
        self._wanted = wanted
        self._after = 0

    def more(self) -> Iterator[dict[str, Any]]:
        while page := self._store.tombstones(self._after):
            self._after = page[-1][0]
            yield from (_line(tombstone) for _, tombstone in page if self._has(tombstone))

    def _has(self, tombstone: Tombstone) -> bool:
        wanted = self._wanted
        return (
            tombstone.status != "returned"
            and wanted.has_run(tombstone.run_id, tombstone.agent, tombstone.tenant)
            and wanted.has_line(PRUNED, tombstone.pruned_at)
        )


def _line(tombstone: Tombstone) -> dict[str, Any]:
    return {
        "ts": iso(tombstone.pruned_at),
        "run_id": tombstone.run_id,
        "event_id": None,
        "seq": None,
        "type": PRUNED,
        "call": None,
        "tool": None,
        "caused_by": None,
        "idempotency_key": None,
        "actor": tombstone.by,
        "error": None,
        "context": {
            "agent": tombstone.agent,
            "tenant": tombstone.tenant,
            "status": tombstone.status,
            "events": tombstone.events,
            "head": tombstone.head.hex(),
            "created_at": iso(tombstone.created_at),
            "finished_at": iso(tombstone.finished_at),
        },
    }
