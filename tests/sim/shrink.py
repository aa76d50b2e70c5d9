"""Makes a failing list of faults as short as possible: parts are left out as long as a violation remains."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tests.sim.faults import Fault


def shrink(plan: Sequence[Fault], fails: Callable[[Sequence[Fault]], bool]) -> list[Fault]:
    """The shortest list that was found in which nothing can be left out; `plan` itself fails."""
    left, parts = list(plan), 2
    while len(left) >= 2:
        size = -(-len(left) // parts)
        for start in range(0, len(left), size):
            fewer = left[:start] + left[start + size :]
            if fails(fewer):
                left, parts = fewer, max(parts - 1, 2)
                break
        else:
            if parts >= len(left):
                break
            parts = min(parts * 2, len(left))
    return [] if left and fails([]) else left
