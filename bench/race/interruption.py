"""An interrupted race: how far it came, and what is missing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from bench.race.figures import WORKLOADS
from bench.race.measurements import Measurement
from msgspec import Struct


class Interruption(Struct, frozen=True):
    """How many of the planned cells were measured; which workloads are incomplete, and which are missing."""

    cells: int
    planned: int
    unfinished: tuple[str, ...] = ()
    not_reached: tuple[str, ...] = ()

    @classmethod
    def of(cls, chosen: Sequence[Measurement], planned: Sequence[str], done: Sequence[str]) -> Interruption:
        """Computed from the measurements that were planned and the cells that exist."""
        wanted, there = Counter(planned), Counter(done)
        parts = {workload: [one.name for one in chosen if workload in one.workloads and wanted[one.name]] for workload in WORKLOADS}
        reached = {workload for workload, names in parts.items() if any(there[name] for name in names)}
        whole = {workload for workload, names in parts.items() if all(there[name] >= wanted[name] for name in names)}
        return cls(
            len(done),
            len(planned),
            tuple(workload for workload in WORKLOADS if workload in reached - whole),
            tuple(workload for workload in WORKLOADS if workload not in reached | whole),
        )

    def told(self) -> str:
        """One sentence without its full stop."""
        parts = [f"interrupted after {self.cells} of {self.planned} cells"]
        if self.unfinished:
            parts.append(f"not finished: {', '.join(self.unfinished)}")
        if self.not_reached:
            parts.append(f"not reached: {', '.join(self.not_reached)}")
        return "; ".join(parts)
