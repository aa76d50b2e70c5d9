"""Calls that a run has undone itself, as a plan does when a step fails. An undo of the run skips these calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from perdure.core import codec
from perdure.core.codec import Payload
from perdure.core.state import RunState

UNDO = ".undo"  # suffix of the tool name under which a compensate hook is called


def taken_back(state: RunState, load: Callable[[Payload], bytes]) -> dict[int, int]:
    """The numbers of the calls that the run has undone itself → the numbers of the calls that undid them."""

    def value(payload: Payload | None) -> Any:
        return None if payload is None else codec.decode(load(payload))

    hooks = [call for call in state.calls.values() if call.tool.endswith(UNDO) and call.phase == "completed"]
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
