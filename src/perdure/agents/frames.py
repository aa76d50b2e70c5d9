"""Frames: what a run goes on with after a person has changed it, and what the journal keeps of the old one.

When a person lets another version go on with a run, and its recorded calls do not follow from the new code, then
`frame_changed` records the frame of the run so far: of a conversation (react/frames.py) the request without its
messages, of a plan (plan/frames.py) the plan. A replay makes the recorded calls again with the recorded frame. A call
that has ended is compared by its tool's name alone, since the tool may be gone or may have changed. From the next event
on that wakes the agent, the frame of the code counts.

A call that was open when the frame was changed goes on with the code's tool of that name. So `check_open_calls` makes
sure that there is such a tool, with the same effect class, and that the recorded arguments fit it unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from msgspec import Struct, structs

from perdure import shell
from perdure.agent import Agent
from perdure.core import codec, prompt_deltas
from perdure.core.codec import Payload
from perdure.core.events import OF_TOOL, Event, FrameChanged
from perdure.core.history import history, is_stated
from perdure.core.machine import CallTool, StartChild, current
from perdure.core.replay import Frontier
from perdure.core.state import CallState, RunState
from perdure.errors import Conflict
from perdure.models.messages import Answer, Message, Request
from perdure.models.model import Model, ModelQuestion

Load = Callable[[Payload], bytes]


class Called(Struct, frozen=True):
    """What the journal knows about a tool that the run has called."""

    effect: str
    pin: str | None = None


# -- the change ---------------------------------------------------------------------------------------------------------
class Past:
    """What the journal has of the frame that ends: the statements that the agent knows, and the calls of the run."""

    def __init__(self, state: RunState, events: Sequence[Event], load: Load) -> None:
        self.state = state
        self.stated = [event for event in history(events).events if is_stated(event)]
        self.load = load
        calls = (event.call for event in self.stated if event.call is not None)
        self.requests = [number for number in calls if number in state.calls and is_request(state.calls[number])]
        self.tools = {
            call.tool: Called(call.effect, state.pins.get(f"tool {call.tool}")) for call in state.calls.values() if not is_request(call)
        }
        self.agents = sorted({child.agent for child in state.children.values()})

    def packed(self, number: int) -> bytes:
        """The recorded request of this call to a model."""
        args = self.state.calls[number].args
        assert args is not None, number
        return self.load(args)

    def request(self) -> dict[str, Any]:
        """The last request to a model, without its messages."""
        return prompt_deltas.frame_of(self.requests[-1], self.packed)

    def changed(self, version: str, frame: Any, *, by: str, note: str | None) -> FrameChanged | None:
        """The event that ends this frame.

        `frame` is None if the run has none: nothing of it is recorded. If the run was reopened before its first statement,
        an earlier frame applies to nothing any more. None: there is no frame to end.
        """
        if frame is None:
            return FrameChanged(version, by, self.state.frames[0].frame, 0, note) if self.state.frames else None
        payload = codec.pack(codec.encode(frame), codec.MAX_BYTES)[0]
        return FrameChanged(version, by, payload, max(event.cause or 0 for event in self.stated), note)


def check_open_calls(agent: str, version: str, frontier: Frontier, state: RunState, load: Load) -> None:
    """Raise Conflict, and name what is in the way, if the run or an open call cannot go on with the code of this version."""
    assert state.created is not None
    run_id = state.created.run_id
    if frontier.in_the_way is not None:
        raise Conflict(
            f"run {run_id} cannot go on with version {version} of agent {agent}: {frontier.in_the_way}",
            hint=f"change that in the new version, or let the run end with the code of version {state.began_with}; or rewind it to an event "
            f"before that, with the new code: {shell.command('rewind', run_id)} --to SEQ ({shell.command('events', run_id)} has the numbers)",
        )
    for number, call in sorted(state.open.items()):
        why = _in_the_way(call, frontier.calls.get(number), state, load)
        if why is not None:
            raise Conflict(
                f"run {run_id} cannot go on with version {version} of agent {agent} yet: its call {number} ({call.tool}) is open, and {why}",
                hint=f"let it end first, with the code of version {state.began_with} (what it waits for: {shell.command('why', run_id)}), "
                "or keep the tool in the new version until then",
            )
    for number, child in sorted(state.alive.items()):
        asked = frontier.calls.get(number)
        if isinstance(asked, StartChild) and not isinstance(asked.agent, Agent):
            raise Conflict(
                f"run {run_id} cannot go on with version {version} of agent {agent} yet: its child {child.run_id} has not ended, and this code "
                f"has no agent {child.agent} among its tools",
                hint=f"wait for the child, or keep the agent in the new version until then: {shell.command('why', child.run_id)}",
            )


def _in_the_way(call: CallState, asked: Any, state: RunState, load: Load) -> str | None:
    if not isinstance(asked, CallTool):
        return "this code does not ask for it"
    if isinstance(asked.tool, ModelQuestion):
        pin = state.pins.get(f"tool {call.tool}")
        return None if pin in (None, asked.tool.pin()) else "this code asks its models through another provider"
    if not isinstance(asked.tool, RecordedTool):
        return None
    tool = asked.tool.tool
    if tool is None:
        return f"this code has no tool {call.tool}"
    if tool.effect != call.effect:
        return f"in this code {call.tool} is {tool.effect}, not {call.effect}"
    assert call.args is not None
    recorded = load(call.args)
    if tool.rebind(recorded) != recorded:
        return f"its arguments do not fit {call.tool} in this code as they are, so that an approval or a retry would be about another call"
    return None


def is_request(call: CallState) -> bool:
    return prompt_deltas.is_request(call.args)


# -- the calls before the change ------------------------------------------------------------------------------------------
def recorded_frame() -> tuple[int, bytes] | None:
    """The recorded frame that applies to what the agent does right now. None: the frame of the code applies."""
    machine = current()
    assert machine is not None
    return next(((after, encoded) for after, encoded in machine.facts.frames if machine.cause <= after), None)


def ask_again(model: Model, request: Request, messages: Sequence[Message]) -> Coroutine[Any, Any, Answer]:
    """Make a recorded request again. If its answer is still to come, the code's provider is asked."""
    request = structs.replace(request, messages=tuple(messages))
    return (model if model.name == request.model else model.renamed(request.model)).ask_for(request)


class RecordedTool:
    """A tool for a recorded call: the call is compared by the tool's name, and its result is used as it is recorded.

    Everything else is that of the code's tool of this name, so that an open call can go on. `tool` is None if the code
    has no such tool: then no call of it is open.
    """

    events = OF_TOOL
    reconciler = None
    compensator = None

    def __init__(self, name: str, called: Called | None, tool: Any, args: bytes) -> None:
        self.name = name
        self.tool = tool
        self._called = called or Called("once")
        self._args = args

    def __getattribute__(self, attribute: str) -> Any:
        # Attributes of the class, such as `compensator`, must not hide those of the code's tool.
        if attribute.startswith("_") or attribute in _OWN:
            return object.__getattribute__(self, attribute)
        tool = object.__getattribute__(self, "tool")
        return object.__getattribute__(self, attribute) if tool is None else getattr(tool, attribute)

    @property
    def effect(self) -> str:
        return self._called.effect

    def pin(self) -> str | None:
        return self._called.pin

    def rebind(self, recorded: bytes) -> bytes:
        return self._args

    def decode_result(self, encoded: bytes) -> Any:
        return codec.decode(encoded)

    def compensation(self) -> None:
        return None


_OWN = frozenset(("name", "tool", "rebind", "decode_result"))


class RecordedAgent:
    """An agent that the code no longer has among its tools, for a child that has ended."""

    version, target, queue, budget = "", None, None, None

    def __init__(self, name: str) -> None:
        self.name = name

    def rebind(self, recorded: bytes) -> bytes:
        return recorded

    def decode_result(self, encoded: bytes) -> Any:
        return codec.decode(encoded)
