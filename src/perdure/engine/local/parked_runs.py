"""Keeps the machines of runs that this worker has parked, so that the next claim needs no replay.

A parent that awaits 800 children one after the other is parked and claimed 800 times. With a replay at each claim,
this would cost O(n²). This is only a cache. A run is replayed if it is not in the cache, or if `goes_on_from` does not
accept what its journal has now. The runs that were used least recently are dropped first.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from msgspec import Struct

from perdure.agent import Agent
from perdure.core.codec import Payload
from perdure.core.state import RunState
from perdure.core.steps import ParkedRun

# Estimates, from measurements with small agents. The first is for a machine with its loop, its tasks and the state of
# its run. The second is for one call without its payloads.
_MACHINE_BYTES = 30_000
_CALL_BYTES = 1_500
_SAMPLE = 64


class _Kept(Struct, frozen=True, eq=False):
    run: ParkedRun
    agent: Agent[Any, Any]
    bytes: int


class ParkedRuns:
    """At most `runs` parked runs, which together need at most about `megabytes`. Use this on the loop's thread."""

    def __init__(self, runs: int, megabytes: int) -> None:
        self._runs = runs
        self._bytes = megabytes * 1_000_000
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._weight = 0

    def keep(self, run_id: str, run: ParkedRun, agent: Agent[Any, Any]) -> None:
        """Keep the run. To make room, other runs are dropped. A run that alone is too large is not kept."""
        self.drop(run_id)
        kept = self._kept[run_id] = _Kept(run, agent, weight_of(run.state))
        self._weight += kept.bytes
        while self._kept and (len(self._kept) > self._runs or self._weight > self._bytes):
            self.drop(next(iter(self._kept)))

    def take(self, run_id: str, agent: Agent[Any, Any]) -> ParkedRun | None:
        """Remove the run and return it. The caller has to close its machine. None: no run is kept for this agent."""
        kept = self._kept.get(run_id)
        if kept is None or kept.agent is not agent:
            self.drop(run_id)
            return None
        del self._kept[run_id]
        self._weight -= kept.bytes
        return kept.run

    def drop(self, run_id: str) -> None:
        kept = self._kept.pop(run_id, None)
        if kept is not None:
            self._weight -= kept.bytes
            kept.run.machine.close()

    def clear(self) -> None:
        for run_id in list(self._kept):
            self.drop(run_id)

    def __len__(self) -> int:
        return len(self._kept)


def weight_of(state: RunState) -> int:
    """About how many bytes of memory a parked run with this state needs; from a sample of its calls and children."""
    if not state.numbers:
        return _MACHINE_BYTES
    sample = range(1, state.numbers + 1, state.numbers // _SAMPLE + 1)
    payloads = sum(_payload_bytes(state, number) for number in sample)
    return _MACHINE_BYTES + state.numbers * (_CALL_BYTES + payloads // len(sample))


def _payload_bytes(state: RunState, number: int) -> int:
    call, child = state.calls.get(number), state.children.get(number)
    if call is not None:
        return _size(call.args) + _size(call.result) + _size(call.progress)
    if child is not None:
        return _size(child.input) + (0 if child.ended is None else _size(child.ended.output))
    return 0


def _size(payload: Payload | None) -> int:
    """The bytes of the payload. A blob counts too: the agent may still have a reference to its value."""
    if payload is None:
        return 0
    inline = payload.inline
    return len(inline) if inline is not None else payload.size if isinstance(payload.size, int) else 0
