"""Frames of conversations: how a ReAct run goes on with other instructions, tools, limits or another model.

The frame of a turn is what the request to the model has beside its messages. A replay makes the turns before the change
again with the recorded frame: the requests must be the recorded requests. The turn after that has the frame of the code.
"""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from perdure.agent import Agent
from perdure.agents.frames import Called, Load, Past, RecordedAgent, RecordedTool, ask_again, recorded_frame
from perdure.agents.react.toolbox import Kit, NotCallable, check_arguments, made
from perdure.core import codec
from perdure.core.events import Event, FrameChanged
from perdure.core.json_schema import problem
from perdure.core.machine import current
from perdure.core.state import RunState
from perdure.models.messages import Answer, Message, Request, ToolUse
from perdure.models.model import Model
from perdure.tool import Tool


class Recorded(Struct, frozen=True):
    """The payload of `frame_changed`."""

    request: dict[str, Any]  # a Request without its messages
    tools: dict[str, Called]  # the tools that the run had called, by name
    agents: list[str]  # the agents that the run had called


def change(version: str, state: RunState, events: Sequence[Event], load: Load, *, by: str, note: str | None) -> FrameChanged | None:
    """The event that ends the frame of the turns so far. None: the run has asked no model yet, so it has no frame."""
    past = Past(state, events, load)
    frame = Recorded(past.request(), past.tools, past.agents) if past.requests else None
    return past.changed(version, msgspec.to_builtins(frame), by=by, note=note)


# -- the turns before the change --------------------------------------------------------------------------------------
class RecordedFrames:
    """The recorded frames of one run."""

    def __init__(self, kit: Kit) -> None:
        self._kit = kit
        self._frames: dict[int, RecordedFrame] = {}

    def current(self) -> RecordedFrame | None:
        """The recorded frame that applies to what the agent does right now. None: the frame of the code applies."""
        found = recorded_frame()
        if found is None:
            return None
        after, encoded = found
        if after not in self._frames:
            self._frames[after] = RecordedFrame(msgspec.json.decode(encoded, type=Recorded), self._kit)
        return self._frames[after]


class RecordedFrame:
    """A frame that the journal has."""

    def __init__(self, recorded: Recorded, kit: Kit) -> None:
        self._request: Request = msgspec.convert({**recorded.request, "messages": []}, Request)
        self.kit = RecordedKit(self._request, recorded, kit)

    def ask(self, model: Model, messages: Sequence[Message]) -> Coroutine[Any, Any, Answer]:
        """Make the request of the recorded turn."""
        return ask_again(model, self._request, messages)


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
        callee, machine = self._callee(use.name), current()
        assert machine is not None
        if use.name in self._recorded.agents:
            arguments = check_arguments(use, self.names, self._schemas.get(use.name))
            if isinstance(callee, Agent):
                return made(lambda: callee(**arguments))
            _check_fits(arguments, self._schemas[use.name])
            stand_in = self._agents.setdefault(use.name, RecordedAgent(use.name))
            return machine.start_child(stand_in, codec.encode(arguments))
        # A tool whose schema has changed can still go on with an open call, if the recorded arguments fit it.
        tool, args = None if isinstance(callee, Agent) else self._kit.callees.get(use.name), self.args(use)
        if isinstance(callee, Tool):
            tool, args = callee.for_call(args)
        return machine.call_tool(RecordedTool(use.name, self._recorded.tools.get(use.name), tool, args), args)

    def args(self, use: ToolUse) -> bytes:
        """The arguments of the call. NotCallable: no call could be made."""
        schema, callee = self._schemas.get(use.name), self._callee(use.name)
        arguments = check_arguments(use, self.names, schema)
        assert schema is not None
        if callee is None:
            _check_fits(arguments, schema)
            return codec.encode(arguments)
        args: bytes = made(lambda: callee.bind((), arguments))
        return args

    def _callee(self, name: str) -> Any:
        """The tool or agent of the code, if its schema is still the recorded one."""
        callee = self._kit.callees.get(name)
        return None if callee is None or callee.schema() != self._schemas.get(name) else callee

    def effect(self, name: str) -> str:
        called = self._recorded.tools.get(name)
        return "once" if called is None else called.effect

    def encode(self, name: str) -> None:
        """The results are used as they were recorded."""


def _check_fits(arguments: dict[str, Any], schema: dict[str, Any]) -> None:
    why = problem(arguments, schema, schema.get("$defs", {}))
    if why is not None:
        raise NotCallable(why)
