"""A journal as lines, for `perdure events`: each event with the tool and the key of its call, and the step of a plan."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec import Struct

from perdure.core.events import (
    ApprovalRequested,
    CheckpointTaken,
    ChildStarted,
    Event,
    PlanGenerated,
    RunCreated,
    RunForked,
    RunReleased,
    StatusReported,
    ToolCallInitiated,
    ToolCallProposed,
    encode_body,
)
from perdure.core.identity import CallKeys
from perdure.core.state import image_in
from perdure.inspect.branches import Superseded
from perdure.inspect.text import Load, clip, iso, plain, sentence

# The texts that agents/plan/follow.py writes: the status right before the call of a step, and the action of a step's
# approval.
_STEP_STATUS = re.compile(r"(undoing )?step ([A-Za-z_][A-Za-z0-9_-]{0,63})(?:: (.*))?\Z", re.DOTALL)
_STEP_ACTION = re.compile(r"step ([A-Za-z_][A-Za-z0-9_-]{0,63})(?:: .*| failed)\Z", re.DOTALL)


class PlanStep(Struct, frozen=True, omit_defaults=True):
    """The step of a plan to which a call belongs."""

    name: str
    description: str | None = None
    undoing: bool = False  # the call undoes the step

    @property
    def label(self) -> str:
        return f"{'undo of ' if self.undoing else ''}step {self.name}"

    @property
    def words(self) -> str:
        return f"{self.label}: {clip(self.description, 100)}" if self.description else self.label


class EventNames:
    """The tools, keys, names and steps of a run's calls. They are collected from the events of the run, in order.

    `load` reads a plan that is too large for its event; without `load` its steps have no descriptions.
    """

    def __init__(self, load: Load | None = None) -> None:
        self._load = load
        self._described: dict[str, str | None] | None = None  # step of the recorded plan → its description; None: no plan
        # (step, tool, cause) of the step whose call comes next.
        self._announced: tuple[PlanStep, str | None, int | None] | None = None
        self.steps: dict[int, PlanStep] = {}
        self.tools: dict[int, str] = {}
        self.keys: dict[int, str] = {}
        self._created: RunCreated | None = None
        self.in_rehearsal = False  # the events since `run_forked` are those of a rehearsal, which no worker drives
        self._keys = CallKeys("", "")  # replaced at the run's first event; no call comes before it
        self.calls: dict[int, str] = {}  # call → its tool, the action of its approval, or the agent of its child
        self.began: dict[int, int] = {}  # call → when its last attempt began

    def learn(self, event: Event) -> None:
        """Learn the names from the event that begins a call. Later events of the call do not have these names."""
        if event.call is None:
            match event.body:
                case RunCreated():
                    self._created, self._keys = event.body, CallKeys.of(event.body)
                case RunForked(run_id=fork) if self._created is not None:
                    self._keys = CallKeys.of(self._created, fork)
                    self.in_rehearsal = fork == self._created.run_id and self._created.rehearses is not None
                case CheckpointTaken():
                    # If the events before it were removed, only its image has the requests of the calls that are open.
                    for request in image_in(event.body).requests:
                        if request.call not in self.calls:
                            self.learn(request)
                case PlanGenerated(plan=plan):
                    self._described = {name: description for name, _, description in steps_in(plain(plan, self._load))}
                case StatusReported(text=text) if self._described is not None:
                    self._announce(text, event.cause)
            return
        if self._announced is not None and event.call not in self.calls:
            self._begin_step(event, event.call)
        match event.body:
            case ToolCallInitiated(tool=tool, key=key) | ToolCallProposed(tool=tool, key=key):
                self.tools[event.call] = self.calls[event.call] = tool
                self.keys[event.call] = key or self._keys.key(event.call, tool)
                self.began[event.call] = event.ts
            case ApprovalRequested(action=action):
                self.calls.setdefault(event.call, action)
                found = _STEP_ACTION.match(action)
                if found is not None and self._described is not None:
                    self.steps.setdefault(event.call, PlanStep(found[1], self._described.get(found[1])))
            case ChildStarted(agent=agent):
                self.calls[event.call] = agent

    def _announce(self, text: str, cause: int | None) -> None:
        """A plan reports each step right before the step's call, in the same activation.

        So the next call belongs to the step.
        """
        found = _STEP_STATUS.match(text)
        if found is not None and self._described is not None:
            step = PlanStep(found[2], self._described.get(found[2]), undoing=found[1] is not None)
            self._announced = (step, found[3], cause)

    def _begin_step(self, event: Event, call: int) -> None:
        assert self._announced is not None
        (step, tool, cause), self._announced = self._announced, None
        match event.body:
            case ToolCallInitiated(tool=name) | ToolCallProposed(tool=name) | ChildStarted(agent=name):
                if event.cause == cause and tool in (None, name):
                    self.steps[call] = step


def steps_in(plan: Any) -> list[tuple[str, str, str | None]]:
    """(name, tool, description) of each step of a recorded plan. Empty if the plan is not readable."""
    steps = plan.get("steps") if isinstance(plan, dict) else None
    found = [step for step in steps if isinstance(step, dict)] if isinstance(steps, list) else []
    return [(str(step.get("name")), str(step.get("tool")), step.get("description")) for step in found]


def steps_of(events: Iterable[Event], load: Load | None = None) -> dict[int, PlanStep]:
    """Call → the step of the run's plan. Empty if the run follows no plan."""
    names = EventNames(load)
    for event in events:
        names.learn(event)
    return names.steps


class Timeline:
    """Turns the events of one run into lines.

    The events must come in order, from the first event on. `load` reads payloads from the blob store. `superseded` says
    which events were superseded when the run was reopened.
    """

    def __init__(self, run_id: str, load: Load | None = None, superseded: Superseded | None = None) -> None:
        self.run_id = run_id
        self._load = load
        self.superseded = superseded or Superseded(())
        self.names = EventNames(load)
        self._told: set[int] = set()  # calls whose step was described in an earlier sentence

    def learn(self, event: Event) -> None:
        """Learn the names from an event that gets no line."""
        self.names.learn(event)

    def say(self, event: Event) -> str:
        """The event as a sentence."""
        self.learn(event)
        if self.names.in_rehearsal and isinstance(event.body, RunReleased):
            return f"the rehearsal stops here as {event.body.status}: {event.body.waiting_for}"
        said = sentence(event, self.names.calls, self.names.began, self._load)
        step = self.step(event)
        if step is None or event.call is None:
            return said
        first = event.call not in self._told
        self._told.add(event.call)
        return f"{said} [{step.words if first else step.label}]"

    def step(self, event: Event) -> PlanStep | None:
        """The step of the plan that the event is about. The event must have been learned."""
        return None if event.call is None else self.names.steps.get(event.call)

    def record(self, event: Event, hash_: bytes) -> dict[str, Any]:
        """The event as one JSON object. `data` is the body of the event, as in the journal.

        `superseded_by` is the seq of the `run_reopened` that superseded the event, as far as the journal was read.
        """
        self.learn(event)
        call = event.call
        return {
            "run_id": self.run_id,
            "seq": event.seq,
            "event_id": event.event_id,
            "type": event.type,
            "ts": iso(event.ts),
            "call": call,
            "tool": None if call is None else self.names.tools.get(call),
            "plan_step": msgspec.to_builtins(self.step(event)),
            "cause": event.cause,
            "superseded_by": self.superseded.by(event.seq),
            "key": None if call is None else self.names.keys.get(call),
            "epoch": event.epoch,
            "data": json.loads(encode_body(event.body)),
            "hash": hash_.hex(),
        }
