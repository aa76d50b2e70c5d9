"""Reads the journal-wide chain, and compares it with the journals.

Triggers of the schema write the chain. If no worker holds the run after a commit (the run was released or lost, has
ended, or got post), the run's last event becomes an entry. Entries are numbered and linked by hashes. They stay when
their run is pruned. PostgreSQL has several chains, so that commits need not wait for each other.
"""

from __future__ import annotations

from perdure.core.identity import ChainEntry
from perdure.store.api import MissingHead
from perdure.store.part import Part


class JournalChain(Part):
    """The reads of `perdure verify`."""

    def chain(self, after: tuple[int, int], limit: int = 5000) -> list[ChainEntry]:
        values = {"chain": after[0], "after": after[1], "limit": limit}
        return [ChainEntry(*row) for row in self._database.read("chain_entries", values)]

    def chain_ends(self) -> list[ChainEntry]:
        return [ChainEntry(*row) for row in self._database.read("chain_ends")]

    def missing_heads(self, run_id: str | None = None) -> list[MissingHead]:
        return [MissingHead(*row) for row in self._database.read("missing_heads", {"run_id": run_id})]

    def unchained(self, run_id: str | None = None) -> dict[str, int]:
        return {str(name): int(seq) for name, seq in self._database.read("unchained_runs", {"run_id": run_id})}
