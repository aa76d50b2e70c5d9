"""Frames: how a ReAct run goes on with other instructions, tools, limits or another model.

The frame of a turn is what the request to the model has beside its messages. When a person lets another version go on
with a run, `frame_changed` records the frame of the turns so far. A replay makes these turns again with the recorded
frame: the requests must be the recorded requests, and a call that has ended is compared by its tool's name alone, since
the tool may be gone or may have changed. The turn after that has the frame of the code.

A call that was open when the frame was changed goes on with the code's tool of that name. So `check_open_calls` makes
sure that there is such a tool, with the same effect class, and that the recorded arguments fit it unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import msgspec
from msgspec import Struct, structs

from perdure import shell
from perdure.agent import Agent
from perdure.agents.react.toolbox import Kit, NotCallable, check_arguments, made
from perdure.core import codec, prompt_deltas
from perdure.core.codec import Payload
from perdure.core.events import OF_TOOL, Event, FrameChanged
from perdure.core.history import history, is_stated
from perdure.core.json_schema import problem
from perdure.core.machine import CallTool, StartChild, current
from perdure.core.replay import Frontier
from perdure.core.state import CallState, RunState
from perdure.errors import Conflict
from perdure.models.messages import Answer, Message, Request, ToolUse
from perdure.models.model import Model, ModelQuestion

Load = Callable[[Payload], bytes]


class Called(Struct, frozen=True):
    """What the journal knows about a tool that the run has called."""

    effect: str
    pin: str | None = None


class Recorded(Struct, frozen=True):
    """The payload of `frame_changed`."""

    request: dict[str, Any]  # a Request without its messages
    tools: dict[str, Called]  # the tools that the run had called, by name
    agents: list[str]  # the agents that the run had called


# -- the change ---------------------------------------------------------------------------------------------------------
def change(version: str, state: RunState, events: Sequence[Event], load: Load, *, by: str, note: str | None) -> FrameChanged | None:
    """The event that ends the frame of the turns so far. None: the run has asked no model yet, so it has no frame.

    If the run was reopened before its first turn, an earlier frame applies to nothing any more.
    """
    stated = [event for event in history(events).events if is_stated(event)]
    requests = [event.call for event in stated if event.call in state.calls and prompt_deltas.is_request(state.calls[event.call].args)]
    if not requests:
        return FrameChanged(version, by, state.frames[0].frame, 0, note) if state.frames else None
    assert requests[-1] is not None

    def packed(number: int) -> bytes:
        args = state.calls[number].args
        assert args is not None, number
        return load(args)

    tools = {call.tool: Called(call.effect, state.pins.get(f"tool {call.tool}")) for call in state.calls.values() if not _is_request(call)}
    frame = Recorded(prompt_deltas.frame_of(requests[-1], packed), tools, sorted({child.agent for child in state.children.values()}))
    payload = codec.pack(codec.encode(msgspec.to_builtins(frame)), codec.MAX_BYTES)[0]
    return FrameChanged(version, by, payload, max(event.cause or 0 for event in stated), note)


def check_open_calls(agent: str, version: str, frontier: Frontier, state: RunState, load: Load) -> None:
    """Raise Conflict, and name the call, if an open call cannot go on with the code of this version."""
    assert state.created is not None
    run_id = state.created.run_id
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


def _is_request(call: CallState) -> bool:
    return prompt_deltas.is_request(call.args)


# -- the turns before the change --------------------------------------------------------------------------------------
class RecordedFrames:
    """The recorded frames of one run."""

    def __init__(self, kit: Kit) -> None:
        self._kit = kit
        self._frames: dict[int, RecordedFrame] = {}

    def current(self) -> RecordedFrame | None:
        """The recorded frame that applies to what the agent does right now. None: the frame of the code applies."""
        machine = current()
        assert machine is not None
        for after, encoded in machine.facts.frames:
            if machine.cause <= after:
                if after not in self._frames:
                    self._frames[after] = RecordedFrame(msgspec.json.decode(encoded, type=Recorded), self._kit)
                return self._frames[after]
        return None


class RecordedFrame:
    """A frame that the journal has."""

    def __init__(self, recorded: Recorded, kit: Kit) -> None:
        self._request: Request = msgspec.convert({**recorded.request, "messages": []}, Request)
        self.kit = RecordedKit(self._request, recorded, kit)

    def ask(self, model: Model, messages: Sequence[Message]) -> Coroutine[Any, Any, Answer]:
        """Make the request of the recorded turn. If its answer is still to come, the code's provider is asked."""
        request = structs.replace(self._request, messages=tuple(messages))
        return (model if model.name == request.model else model.renamed(request.model)).ask_for(request)


class RecordedKit:
    """The tools of a recorded frame, for turns that are made again. `kit`: the tools of the code."""

    def __init__(self, request: Request, recorded: Recorded, kit: Kit) -> None:
        self.names = tuple(spec.name for spec in request.tools)
        self._schemas = {spec.name: spec.schema for spec in request.tools}
        self._recorded = recorded
        self._kit = kit
        self._agents: dict[str, RecordedAgent] = {}

    def call(self, use: ToolUse) -> Coroutine[Any, Any, Any]:
        """Make the call of the recorded turn again. NotCallable: the recorded turn made no call here, either."""
        schema = self._schemas.get(use.name)
        arguments = check_arguments(use, self.names, schema)
        assert schema is not None
        callee, machine = self._kit.callees.get(use.name), current()
        assert machine is not None
        if callee is not None and callee.schema() != schema:
            callee = None
        if use.name in self._recorded.agents:
            if isinstance(callee, Agent):
                return made(lambda: callee(**arguments))
            _check_fits(arguments, schema)
            stand_in = self._agents.setdefault(use.name, RecordedAgent(use.name))
            return machine.start_child(stand_in, codec.encode(arguments))
        # A tool whose schema has changed can still go on with an open call, if the recorded arguments fit it.
        tool = None if isinstance(callee, Agent) else self._kit.callees.get(use.name)
        if callee is None:
            _check_fits(arguments, schema)
            args = codec.encode(arguments)
        else:
            args = made(lambda: callee.bind((), arguments))
        return machine.call_tool(RecordedTool(use.name, self._recorded.tools.get(use.name), tool, args), args)

    def effect(self, name: str) -> str:
        called = self._recorded.tools.get(name)
        return "once" if called is None else called.effect

    def encode(self, name: str) -> None:
        """The results are used as they were recorded."""


def _check_fits(arguments: dict[str, Any], schema: dict[str, Any]) -> None:
    why = problem(arguments, schema, schema.get("$defs", {}))
    if why is not None:
        raise NotCallable(why)


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
