"""Calls that an agent has taken back itself, as a plan does when a step fails: who undoes the run leaves them alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from perdure.core import codec
from perdure.core.codec import Payload
from perdure.core.state import RunState

UNDO = ".undo"  # what the tool of a compensate hook is called, behind the name of its tool


def taken_back(state: RunState, load: Callable[[Payload], bytes]) -> dict[int, int]:
    """The calls that the run itself has undone, each with the call that has undone it."""

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
        # Calls with the same arguments and the same result are undone by the same thing: it does not matter which of them was.
        same = done.get((hook.tool, codec.encode(value(hook.args))))
        if same:
            undone[same.pop()] = hook.number
    return undone
