"""Violations that the simulation has found: each with its seed, the shortest list of faults, and a description.

The meaning of a seed depends on the agents, the people and the tools of the simulation: if these change, it changes
too. So test_found.py tests each violation again without the simulation.
"""

from __future__ import annotations

from tests.sim.faults import Fault

REGRESSIONS: list[tuple[int, list[Fault] | None]] = [  # None: all faults of the seed
    # A clock that was set back between two events of one commit: the run's row kept the last one's time, and `verify` called it damaged.
    (6, [Fault(184, "skew", False, 0.9, 1), Fault(196, "skew", False, 0.1, 1)]),
    # A worker that had to stop, and stood still, released a run with a call whose approval expired meanwhile: the
    # append was refused, and the run was left to a person.
    (15004, None),
]
