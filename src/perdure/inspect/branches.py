"""The branches of a run that people have reopened: what each reopening superseded, and the calls of superseded events.

`core/history.py` says what a reopened run means for its agent. This module serves people who look at the run, and
undo.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from msgspec import Struct

from perdure.agent import Agent
from perdure.core.codec import Payload
from perdure.core.events import Event, RunCancelled, RunReopened
from perdure.core.history import history, is_stated
from perdure.core.machine import Asked, CallTool, StartChild
from perdure.core.state import RunState
from perdure.errors import Diverged, PerdureError
from perdure.inspect.text import iso

_MOST_CUTS = 100  # how often a superseded branch is cut at a difference; after that, the rest of its calls is ignored


class Reopening(Struct, frozen=True):
    """A person let the run go on from the event `back_to`. The events between that event and `seq` are superseded."""

    seq: int
    at: str
    by: str
    reason: str | None
    back_to: int
    fresh: bool


def reopenings(events: Iterable[Event]) -> list[Reopening]:
    """Every reopening of the run, the oldest first. This includes reopenings that a later reopening superseded."""
    return [
        Reopening(event.seq, iso(event.ts), event.body.by, event.body.reason, event.body.back_to, event.body.fresh)
        for event in events
        if isinstance(event.body, RunReopened)
    ]


class Superseded:
    """Says which events are superseded, and by which event.

    It is made from the reopenings, in the order of the journal.
    """

    def __init__(self, found: Iterable[Reopening]) -> None:
        self._ends: list[int] = []  # the seqs of the reopenings, ascending
        self._backs: list[int] = []
        for one in found:
            self._ends.append(one.seq)
            self._backs.append(one.back_to)

    def by(self, seq: int) -> int | None:
        """The seq of the `run_reopened` that superseded this event first; None if the event is not superseded."""
        first = bisect_left(self._ends, seq + 1)
        return next((end for end, back in zip(self._ends[first:], self._backs[first:], strict=True) if back < seq), None)


def known_calls(events: Sequence[Event]) -> set[int]:
    """The numbers of the calls, approvals and children that the agent knows. All others are superseded."""
    return {event.call for event in history(events).events if event.call is not None and is_stated(event)}


def asked_in_all_branches(
    agent: Agent[Any, Any], state: RunState, events: Sequence[Event], load: Callable[[Payload], bytes], max_steps: int
) -> dict[int, Asked]:
    """Every call that the run has made, as a command of this code.

    Superseded calls are included if this code makes them.

    Raises Diverged if this code cannot replay the events that the agent knows. Other code may have made a superseded
    branch. Such a branch is replayed up to the first difference, and for its other calls, a call with the same tool or
    agent is used.
    """
    asked = dict(agent.replayed(state, _stated_by_agent(events), load, max_steps).calls)
    for one in reopenings(events):
        if any(number not in asked for number in (*state.calls, *state.children)):
            before = _as_far_as_possible(agent, state, _stated_by_agent(events[: one.seq - 1]), load, max_steps)
            asked = before | asked
    names: dict[str, Asked] = {}
    for call in asked.values():
        match call:
            case CallTool(tool=tool):
                names.setdefault(f"tool {tool.name}", call)
            case StartChild(agent=child):
                names.setdefault(f"agent {child.name}", call)
            case _:
                pass
    for number, made in state.calls.items():
        if number not in asked and f"tool {made.tool}" in names:
            asked[number] = names[f"tool {made.tool}"]
    for number, started in state.children.items():
        if number not in asked and f"agent {started.agent}" in names:
            asked[number] = names[f"agent {started.agent}"]
    return asked


def _stated_by_agent(events: Sequence[Event]) -> Sequence[Event]:
    """The events without an end by force, because the agent did not state that end."""
    last = events[-1].body if events else None
    return events[:-1] if isinstance(last, RunCancelled) and last.forced_by is not None else events


def _as_far_as_possible(
    agent: Agent[Any, Any], state: RunState, events: Sequence[Event], load: Callable[[Payload], bytes], max_steps: int
) -> dict[int, Asked]:
    for _ in range(_MOST_CUTS):
        try:
            frontier = agent.replayed(state, events, load, max_steps)
            # The calls that this code asks for at the frontier are not in the branch: there, other calls have these
            # numbers.
            pending = {command.number for _, command in frontier.pending if isinstance(command, Asked)}
            return {number: call for number, call in frontier.calls.items() if number not in pending}
        except Diverged as diverged:
            if not 1 < diverged.seq <= len(events):
                return {}
            # Remove the statements of that activation. Then the replay ends before the difference.
            cut = min(events[diverged.seq - 1].cause or 1, diverged.seq - 1)
            events = events[:cut]
        except PerdureError:
            return {}
    return {}
