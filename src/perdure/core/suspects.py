"""Suspects: runs whose workers died repeatedly. This module has three rules.

How many suspects may a worker hold at a time? When does a run count as poison? When has an attempt come further?

When a worker dies, it is not known which of its runs killed it. Two deaths in a row without progress make a run a
suspect. A worker holds suspects as a group. At first the group may have any size, so that innocent runs lose no time.
When the worker of a group dies, each run of this group may afterwards only be in a group of half that size. So the run
that kills workers is alone after log2(n) more deaths. A death proves something against a run only if the run was the
worker's only suspect.

Progress sets a run's count of crashes to 0: the run is no suspect any more. Progress is a call that has ended, a wait
that has begun, or an attempt that came further than the earlier attempts of its call. `call.heartbeat` reports how far
an attempt has come.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

SUSPECT_CRASHES = 2  # a run with this many crashes is a suspect; the statements in queries.sql contain the same number
ANY_SIZE = sys.maxsize


def largest_group(crashes: int, lost_with: int) -> int:
    """The size of the largest group in which a suspect with this history may be. The suspect itself is included.

    `crashes` includes the takeover by this worker. `lost_with`: how many other suspects the run's previous worker held
    when that worker was lost.
    """
    if crashes <= SUSPECT_CRASHES:
        return ANY_SIZE  # the run has not been in a group before
    return max((lost_with + 1) // 2, 1)


class Group:
    """The suspects that one worker holds. Each suspect limits the size of the group."""

    def __init__(self, members: Iterable[tuple[int, int]] = ()) -> None:
        self.size = 0
        self._largest = ANY_SIZE
        for crashes, lost_with in members:
            self.add(crashes, lost_with)

    def add(self, crashes: int, lost_with: int) -> None:
        self.size += 1
        self._largest = min(self._largest, largest_group(crashes, lost_with))

    def admits(self, crashes: int, lost_with: int) -> bool:
        """May a suspect with this history join the group?"""
        return self.size < min(self._largest, largest_group(crashes, lost_with))

    @property
    def is_full(self) -> bool:
        """Is the group closed to every suspect, with any history?"""
        return self.size >= self._largest


def is_poison(crashes: int, crashes_alone: int, limit: int) -> bool:
    """Does the run count as the cause of its workers' deaths?

    Yes, after `limit` deaths in a row, if the run was the worker's only suspect in enough of these deaths.

    The first two deaths only make the run a suspect, so the other runs of those workers do not matter. "Enough" means:
    the number of the remaining deaths, and at least one. With the default limit of 5, that is three deaths. So a run
    that only shared its group with a poisonous run never counts as poison. If a new run starts to kill the worker of
    an innocent suspect, the new run is a suspect after two deaths, and then the innocent run is not alone.
    """
    return crashes >= limit and crashes_alone >= max(limit - SUSPECT_CRASHES, 1)


def goes_further(before: Any, now: Any) -> bool:
    """Is this progress certainly more than the furthest progress before? None: nothing was reported before.

    A number must be greater. A list must be longer. Lists of the same length are compared like dicts. In a dict with
    the same keys, at least one value must go further, and no value may go back. Texts and other values prove nothing:
    a tool that kills its worker at the same place each time may report another text each time.
    """
    return before is None or _compared(before, now) > 0


def _compared(before: Any, now: Any) -> int:
    """1: further. -1: back. 0: neither, or unknown."""
    if isinstance(before, bool) or isinstance(now, bool):
        return 0
    if isinstance(before, int | float) and isinstance(now, int | float):
        return (now > before) - (now < before)
    if isinstance(before, list) and isinstance(now, list):
        if len(before) != len(now):
            return 1 if len(now) > len(before) else -1
        pairs = list(zip(before, now, strict=True))
    elif isinstance(before, dict) and isinstance(now, dict) and before.keys() == now.keys():
        pairs = [(before[key], now[key]) for key in before]
    else:
        return 0
    ways = {_compared(*pair) for pair in pairs}
    return -1 if -1 in ways else 1 if 1 in ways else 0
