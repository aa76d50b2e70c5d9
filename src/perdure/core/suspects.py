"""Suspects: runs whose workers died again and again. How many of them a worker may hold at a time, and when one is called poison.

A worker dies with all runs that it holds, and nobody sees which of them killed it. Two deaths in a row without progress make a run a
suspect. A worker holds suspects as a group. At first the group may be of any size, so that the innocent lose no time. Whenever a
group's worker dies, each of its runs may from then on only be in a group of half that size. So the run that kills workers is alone
after log2(n) more deaths, and only a death that it met alone proves anything against it.

Progress (a call that has ended, a wait that has begun) sets a run's count of crashes to 0: it is no suspect any more.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

SUSPECT_CRASHES = 2  # from so many on; `ready_of_line` and the other statements about suspects in queries.sql say the same
ANY_SIZE = sys.maxsize


def largest_group(crashes: int, lost_with: int) -> int:
    """How many suspects a worker may hold, this one included, while it holds a suspect with this history.

    `crashes` counts the takeover by that worker. `lost_with`: how many other suspects its last worker held when it was lost.
    """
    if crashes <= SUSPECT_CRASHES:
        return ANY_SIZE  # it has not been in a group before
    return max((lost_with + 1) // 2, 1)


class Group:
    """The suspects that one worker holds: never more than each of them allows."""

    def __init__(self, members: Iterable[tuple[int, int]] = ()) -> None:
        self.size = 0
        self._largest = ANY_SIZE
        for crashes, lost_with in members:
            self.add(crashes, lost_with)

    def add(self, crashes: int, lost_with: int) -> None:
        self.size += 1
        self._largest = min(self._largest, largest_group(crashes, lost_with))

    def admits(self, crashes: int, lost_with: int) -> bool:
        """Whether a suspect with this history may join."""
        return self.size < min(self._largest, largest_group(crashes, lost_with))

    @property
    def is_full(self) -> bool:
        """Whether no suspect may join, whatever its history."""
        return self.size >= self._largest


def is_poison(crashes: int, crashes_alone: int, limit: int) -> bool:
    """Whether the run is taken for what killed its workers: `limit` of them in a row, some while it was their only suspect.

    The first deaths make a run a suspect, whatever was beside it; those after them must have met it alone. At least one must: runs
    that merely died in one group with a poisonous one are never blamed. With the default limit of 5 three deaths must have met it alone. An
    innocent suspect that is alone survives a new poisonous run beside it: that one is a suspect itself after two deaths.
    """
    return crashes >= limit and crashes_alone >= max(limit - SUSPECT_CRASHES, 1)
