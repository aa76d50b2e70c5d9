"""What has become of a finished run's calls since: a run of its own undoes them, and its journal says how far it has come."""

from __future__ import annotations

from msgspec import Struct

from perdure.core.identity import undo_id, undone_by
from perdure.core.state import RunState
from perdure.engine.api import Reading
from perdure.inspect.view import loader, read_run
from perdure.inspect.words import clock, iso, plain
from perdure.store.api import FINISHED


class Undoing(Struct, frozen=True):
    """The run that undoes this one, or the one that this one is a child of."""

    run_id: str
    status: str
    by: str  # who asked for it
    at: str  # of its last event
    calls: dict[int, str]  # calls of this run: "undone", "not undone", "to be undone"
    words: str


def undoing_of(store: Reading, run_id: str, now: int) -> Undoing | None:
    """The undo of the run; None when nobody has asked for one."""
    undo = undo_id(run_id.partition("/")[0])
    if undone_by(run_id) is not None or store.get(undo) is None:
        return None
    reading = read_run(store, undo)
    state = reading.state
    assert state.created is not None
    planned = plain(state.created.input, loader(store))
    calls = {step["call"]: "not undone" for step in planned["left"] if step["run"] == run_id}
    outcomes = _outcomes(state)
    for place, step in enumerate(planned["steps"]):
        if step["run"] == run_id:
            calls[step["call"]] = outcomes[place] if place < len(outcomes) else "not undone" if state.finished else "to be undone"
    words = _words(reading.status, planned["by"], clock(state.updated_at, now), in_part="not undone" in outcomes or bool(planned["left"]))
    return Undoing(undo, reading.status, planned["by"], iso(state.updated_at), calls, words)


def _outcomes(state: RunState) -> list[str]:
    """What has become of the steps that are behind it, in their order."""
    undone = {call.number for call in state.calls.values() if call.phase == "completed"}
    given_up = {ask.number for ask in state.asks.values() if ask.outcome not in (None, "approved")}
    # One step after the other: the numbers of what has settled one follow the order of the steps.
    return ["undone" if number in undone else "not undone" for number in sorted(undone | given_up)]


def _words(status: str, by: str, when: str, *, in_part: bool) -> str:
    if status == "succeeded":
        return f"undone{' in part' if in_part else ''} by {by} at {when}"
    if status in FINISHED:
        return f"its undo, which {by} asked for, {'was ' if status == 'cancelled' else ''}{status} at {when}: what it had undone stays so"
    return f"being undone, as {by} asked: that is {status.replace('_', ' ')}"
