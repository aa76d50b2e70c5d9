"""What the simulation has found: a seed, with the shortest list of faults that shows it, and what it was. They stay.

A seed means what the agents, the people and the tools of the simulation make of it: when those change, so does it. What was found
therefore stands in test_found.py once more, without the simulation.
"""

from __future__ import annotations

from tests.sim.faults import Fault

REGRESSIONS: list[tuple[int, list[Fault] | None]] = [  # None: all faults of the seed
    # A clock that was set back between two events of one commit: the run's row kept the last one's time, and `verify` called it damaged.
    (6, [Fault(184, "skew", False, 0.9, 1), Fault(196, "skew", False, 0.1, 1)]),
    # A worker that was told to stop, and stood still, handed a call over whose approval expired meanwhile: refused, and left to a person.
    (15004, None),
]
