"""Frames of plans: how a run goes on with another plan, or with other tools.

The frame of a run that follows a plan is the plan, with the arguments that its tools have made of the steps which have
begun. A plan that a model has written is data of the run and stays; beside it, its frame has the requests to that model.
A replay follows the recorded plan up to the change. At the next event that wakes the agent, the plan of the code takes
its place (`Following`): the steps that have begun are the same in both, and the others are those of the code.
"""

from __future__ import annotations

import re
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from perdure.agent import Agent
from perdure.agents.frames import Called, Load, Past, RecordedAgent, RecordedTool, ask_again, recorded_frame
from perdure.agents.plan.check import Sound, sound
from perdure.agents.plan.step import Callee
from perdure.core import codec, prompt_deltas
from perdure.core.codec import Payload
from perdure.core.events import Event, FrameChanged, PlanGenerated, StatusReported
from perdure.core.machine import current
from perdure.core.prompt_deltas import Sources
from perdure.core.state import RunState
from perdure.errors import InvalidInput
from perdure.models.messages import Answer, Message, Request, answer_of
from perdure.models.model import Model
from perdure.tool import Tool

_STEP = re.compile(r"step ([A-Za-z_][A-Za-z0-9_-]{0,63}): ")  # the status and the approval of a step begin with this


class Recorded(Struct, frozen=True, omit_defaults=True):
    """The payload of `frame_changed`."""

    tools: dict[str, Called]  # the tools that the run had called, by name
    agents: list[str]  # the agents that the run had called
    plan: dict[str, Any] | None = None  # None: a model was still writing the plan
    by: str | None = None  # who wrote it
    args: dict[str, Any] = {}  # step → the arguments with which it began
    goes_on_with: str | None = None  # the digest of the code's plan; None: the code has none, because a model writes it
    # Only of a plan that a model writes:
    request: dict[str, Any] | None = None  # a Request without its messages
    sent_back: list[str] = []  # what the model was told about each of its attempts that was no plan
    asked: int = 0  # how often people were asked for their approval of the plan


# -- the change ---------------------------------------------------------------------------------------------------------
def change(
    version: str, digest: str | None, state: RunState, events: Sequence[Event], load: Load, *, by: str, note: str | None
) -> FrameChanged | None:
    """The event that ends the frame of the steps so far. None: the run has no plan yet, and has asked no model for one."""
    past = Past(state, events, load)
    made = next((event.body for event in reversed(past.stated) if isinstance(event.body, PlanGenerated)), None)
    if made is None and not (digest is None and past.requests):
        return past.changed(version, None, by=by, note=note)
    plan: dict[str, Any] = {} if made is None else {"plan": codec.decode(load(made.plan)), "by": made.by, "args": _arguments(past)}
    written: dict[str, Any] = (
        {} if digest is not None else {"request": past.request(), "sent_back": _sent_back(past), "asked": _asked(past)}
    )
    frame = Recorded(past.tools, past.agents, goes_on_with=digest, **plan, **written)
    return past.changed(version, msgspec.to_builtins(frame), by=by, note=note)


def _arguments(past: Past) -> dict[str, Any]:
    """The arguments of each step that has begun, before a person edited them.

    A step says its name right before its call, in the same activation. If people are asked, the approval has its name.
    """
    found: dict[str, Any] = {}
    announced: tuple[str, int | None] | None = None
    for event in past.stated:
        if isinstance(event.body, StatusReported):
            named = _STEP.match(event.body.text)
            announced = None if named is None else (named[1], event.cause)
            continue
        asked = None if event.call is None else _input(past.state, event.call)
        if asked is None:
            continue
        action, payload = asked
        named = _STEP.match(action)
        step = named[1] if named is not None else announced[0] if announced is not None and announced[1] == event.cause else None
        if step is not None and step not in found:
            found[step] = codec.decode(past.load(payload))
        announced = None
    return found


def _input(state: RunState, number: int) -> tuple[str, Payload] | None:
    """What this call was asked for with: (the action of an approval that the agent requested, its input)."""
    if number in state.children:
        return "", state.children[number].input
    if number in state.calls:
        args = state.calls[number].args
        return None if args is None else ("", args)
    ask = state.asks.get(number)
    return None if ask is None else (ask.request.action, ask.request.input)


def _sent_back(past: Past) -> list[str]:
    """The last message of each request but the first one: it says what was wrong with the attempt before."""

    def answer(number: int) -> Any:
        result = past.state.calls[number].result
        assert result is not None, number
        return msgspec.to_builtins(answer_of(past.load(result)).message)

    def text(seq: int) -> str:
        raise LookupError(f"event {seq} holds no text of a plan")

    whole, _ = prompt_deltas.rejoined(past.requests[-1], Sources(past.packed, answer, text))
    messages = codec.decode(whole)["messages"]
    return [messages[prompt_deltas.told(past.packed(number)).messages - 1]["text"] for number in past.requests[1:]]


def _asked(past: Past) -> int:
    asks = [past.state.asks.get(event.call) for event in past.stated if event.call is not None]
    return sum(ask is not None and ask.request.tool is None and ask.request.action.startswith("plan ") for ask in asks)


# -- the steps before the change --------------------------------------------------------------------------------------
class RecordedPlans:
    """The recorded frames of one run. `digest`: of the code's plan; None if a model writes the plans."""

    def __init__(self, tools: Mapping[str, Callee], digest: str | None) -> None:
        machine = current()
        assert machine is not None
        self._tools = tools
        self._frames: dict[int, RecordedPlan] = {}
        # A frame after event 0 applies to nothing.
        known = [msgspec.json.decode(encoded, type=Recorded) for after, encoded in machine.facts.frames if after]
        # If the code has another plan than the one that a person let go on, the recorded frames do not apply: the replay
        # compares the code's plan with the recorded plan, and stops.
        self._apply = bool(known) and known[-1].goes_on_with == digest

    def current(self) -> RecordedPlan | None:
        """The recorded frame that applies to what the agent does right now. None: the frame of the code applies."""
        found = recorded_frame() if self._apply else None
        if found is None:
            return None
        after, encoded = found
        if after not in self._frames:
            self._frames[after] = RecordedPlan(msgspec.json.decode(encoded, type=Recorded), self._tools)
        return self._frames[after]


class RecordedPlan:
    """A frame that the journal has. `tools`: the tools and agents of the code, by name."""

    def __init__(self, recorded: Recorded, tools: Mapping[str, Callee]) -> None:
        self._recorded = recorded
        self._tools = tools
        self._agents: dict[str, RecordedAgent] = {}
        self.by = recorded.by
        self.asked = recorded.asked

    def plan(self) -> Sound:
        """The plan that the run followed."""
        return trusted(self._recorded.plan, self._tools)

    # -- a model that writes the plan ---------------------------------------------------------------------------------
    def ask(self, model: Model, messages: Sequence[Message]) -> Coroutine[Any, Any, Answer]:
        """Make the recorded request to the model again."""
        return ask_again(model, msgspec.convert({**(self._recorded.request or {}), "messages": []}, Request), messages)

    @property
    def model(self) -> str:
        """The name of the model that wrote the plan."""
        return str((self._recorded.request or {}).get("model"))

    def told(self, attempt: int) -> str | None:
        """What the model was told about this attempt. None: its plan was taken."""
        said = self._recorded.sent_back
        return said[attempt - 1] if attempt <= len(said) else None

    # -- steps --------------------------------------------------------------------------------------------------------
    def bound(self, step: str, tool: str, resolved: dict[str, Any]) -> dict[str, Any]:
        """The arguments with which the step began. InvalidInput if its arguments were not taken."""
        if step in self._recorded.args:
            recorded: dict[str, Any] = self._recorded.args[step]
            return recorded
        callee = self._tools.get(tool)
        if callee is None:
            raise InvalidInput(f"there is no tool {tool}")
        bound: dict[str, Any] = codec.decode(callee.bind((), resolved))
        return bound

    def callee(self, name: str, arguments: dict[str, Any]) -> RecordedTool | RecordedAgent | Agent[..., Any]:
        """The tool or the agent for a recorded call."""
        mine = self._tools.get(name)
        if name in self._recorded.agents:
            return mine if isinstance(mine, Agent) else self._agents.setdefault(name, RecordedAgent(name))
        tool = mine if isinstance(mine, Tool) else None
        return RecordedTool(name, self._recorded.tools.get(name), tool, codec.encode(arguments))


def trusted(document: Any, tools: Mapping[str, Callee]) -> Sound:
    """The plan of a recorded document, which was checked before it was recorded. Its tools are not compared."""
    return sound(document, tools, as_is=True, begun=None)
