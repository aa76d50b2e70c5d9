"""The hooks of a tool.

A reconcile hook finds out whether a call happened, a compensate hook undoes a call, and a stand-in (`simulate`) answers
calls in a rehearsal.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from typing import Any, get_args

from perdure.core.events import Effect
from perdure.errors import InvalidInput
from perdure.tool.call import Call
from perdure.tool.signature import Signature

RESULT = "result"  # the parameter of a compensate hook that receives what the call returned


class Hook:
    """A hook: its function, and the name of the parameter that receives the Call."""

    def __init__(self, fn: Callable[..., Any], call_parameter: str | None) -> None:
        self.fn = fn
        self.is_async = inspect.iscoroutinefunction(fn)
        self._call_parameter = call_parameter

    def with_call(self, arguments: dict[str, Any], call: Call) -> dict[str, Any]:
        """The arguments, plus the Call if the function has a parameter for the Call."""
        return arguments if self._call_parameter is None else {**arguments, self._call_parameter: call}


class Compensator(Hook):
    """A hook that undoes a completed call. Undoing is an effect too, with its own effect class."""

    def __init__(self, fn: Callable[..., Any], signature: Signature, effect: Effect) -> None:
        super().__init__(fn, signature.call_parameter)
        self.effect = effect
        self.takes_result = RESULT in signature.names
        self._names = [name for name in signature.names if name != RESULT]

    def given(self, arguments: dict[str, Any], call: Call) -> dict[str, Any]:
        """The arguments of the tool that the hook takes, plus the Call if the hook takes it."""
        return self.with_call({name: arguments[name] for name in self._names}, call)


class Simulator:
    """A stand-in: a function that answers calls of the tool in a rehearsal. It takes no Call: there is no attempt."""

    def __init__(self, fn: Callable[..., Any], names: list[str]) -> None:
        self.fn = fn
        self._names = names

    async def run(self, arguments: dict[str, Any]) -> Any:
        """What the stand-in returns for the arguments of a call."""
        answer = self.fn(**{name: arguments[name] for name in self._names})
        return await answer if inspect.iscoroutine(answer) else answer


def reconciler(label: str, fn: Callable[..., Any], signature: Signature, tool_takes: Collection[str]) -> Hook:
    """The reconcile hook.

    Raises InvalidInput if the hook does not take all arguments of the tool: with fewer arguments the hook could find
    another call.
    """
    if set(signature.names) != set(tool_takes):
        raise InvalidInput(
            f"{label}: the hook takes ({', '.join(signature.names)}), but it is called with the tool's arguments ({', '.join(tool_takes)})"
        )
    return Hook(fn, signature.call_parameter)


def compensator(label: str, fn: Callable[..., Any], signature: Signature, tool_takes: Collection[str], effect: Effect) -> Compensator:
    """The compensate hook.

    Raises InvalidInput if the hook has a parameter that is not an argument of the tool, `result` or a Call.
    """
    if effect not in get_args(Effect):
        raise InvalidInput(f"{label}: effect={effect!r} is unknown; one of {', '.join(get_args(Effect))}")
    if RESULT in signature.names and RESULT in tool_takes:
        raise InvalidInput(
            f"{label}: the tool has a parameter named {RESULT}, which in a hook is what the call returned; rename the parameter of the tool"
        )
    foreign = [name for name in signature.names if name not in tool_takes and name != RESULT]
    if foreign:
        raise InvalidInput(
            f"{label}: the hook takes {', '.join(foreign)}; it can have the tool's arguments ({', '.join(tool_takes)}), {RESULT}, and a Call"
        )
    return Compensator(fn, signature, effect)


def simulator(label: str, fn: Callable[..., Any], signature: Signature, tool_takes: Collection[str]) -> Simulator:
    """The stand-in. Raises InvalidInput if it takes something else than arguments of the tool."""
    if signature.call_parameter is not None:
        raise InvalidInput(f"{label}: the stand-in takes a Call, but a rehearsal makes no attempt; leave {signature.call_parameter} out")
    foreign = [name for name in signature.names if name not in tool_takes]
    if foreign:
        raise InvalidInput(f"{label}: the stand-in takes {', '.join(foreign)}; it can have the tool's arguments ({', '.join(tool_takes)})")
    return Simulator(fn, signature.names)
