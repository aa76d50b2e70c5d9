"""Calls that a run has undone itself, as a plan does when a step fails. An undo of the run skips these calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from perdure.core import codec
from perdure.core.codec import Payload
from perdure.core.state import CallState, RunState
from perdure.errors import Conflict

UNDO = ".undo"  # suffix of the tool name under which a compensate hook is called


def taken_back(state: RunState, load: Callable[[Payload], bytes]) -> dict[int, int]:
    """The numbers of the calls that the run has undone itself → the numbers of the calls that undid them."""
    return _undone_by(state, load, lambda hook: hook.phase == "completed")


def check_not_taken_back(state: RunState, back_to: int, load: Callable[[Payload], bytes]) -> None:
    """Conflict if the run undid a call after the event `back_to`, or may have undone it.

    After a rewind to that event, and in a live fork from it, the agent would use the result of a call that no longer counts.
    """
    hooks = _undone_by(state, load, lambda hook: hook.begun and hook.asked_seq > back_to)
    if not hooks:
        return
    assert state.created is not None
    number, hook = next(iter(sorted(hooks.items())))
    may = "has" if state.calls[hook].phase == "completed" else "may have"
    raise Conflict(
        f"run {state.created.run_id} cannot go on from event {back_to}: after it the run {may} undone call {number} "
        f"({state.calls[number].tool}) itself, with call {hook}, so that its result no longer counts; start a new run"
    )


def _undone_by(state: RunState, load: Callable[[Payload], bytes], is_wanted: Callable[[CallState], bool]) -> dict[int, int]:
    """For each wanted call of a compensate hook: the number of the call that it undoes → the number of the hook's call."""

    def value(payload: Payload | None) -> Any:
        return None if payload is None else codec.decode(load(payload))

    hooks = [call for call in state.calls.values() if call.tool.endswith(UNDO) and is_wanted(call)]
    done: dict[tuple[str, bytes], list[int]] = {}
    for call in state.calls.values() if hooks else ():
        if call.phase == "completed":
            given = codec.encode({"arguments": value(call.args), "result": value(call.result)})
            done.setdefault((f"{call.tool}{UNDO}", given), []).append(call.number)
    undone: dict[int, int] = {}
    for hook in hooks:
        # Calls with equal arguments and equal results are undone in the same way. So any of these calls may be matched
        # with the hook.
        same = done.get((hook.tool, codec.encode(value(hook.args))))
        if same:
            undone[same.pop()] = hook.number
    return undone
