"""A plan that a model writes: checked like any other, sent back with what is wrong with it, shown to a person if wanted, and followed.

Every answer of the model and every decision about its plan is in the journal, so that a resumed run has the same plan, and asks nobody.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from perdure.agent import Agent, BuiltAgent
from perdure.core import codec
from perdure.core.approval import Approval
from perdure.core.codec import shown
from perdure.core.failures import clean
from perdure.errors import InvalidInput, InvalidPlan, PlanFailed
from perdure.models import Answer, Message, Model, ToolResult, ToolSpec, User
from perdure.plan.check import MAX_STEPS, Problem, Sound, sound
from perdure.plan.follow import Following
from perdure.plan.parts import NO_DEFAULT, dressed, named, pins
from perdure.plan.refs import Test
from perdure.plan.step import Callee, OnFailure, written_approval
from perdure.run import Run
from perdure.tool import Tool

SUBMIT = "submit_plan"
MAX_ATTEMPTS = 20
_PROBLEM_CHARS = 6_000
_SYSTEM = f"""You write plans. A plan is a list of steps; each step calls one tool with its arguments. Call {SUBMIT} once, with the whole plan.
Rules:
- Every step has a name of its own: letters, digits, _ and -.
- "args" are the tool's arguments by name, as its schema says. Give every required one, and none that the schema does not name.
- To use what an earlier step returns, write {{"$ref": ["step", "field", 0]}} in the place of a value: the step's name, and the way into its
  result through names of fields and places in lists. Refer only to steps that stand before. References in the middle of a text do not work.
- A key of an argument that itself begins with $ is written with $$, and data whose only key is ref or param as {{"$data": {{"ref": "main"}}}}.
- "when" has conditions that must hold for the step to be made: {{"ref": ["step", "field"], "is": true}}; the comparisons are {", ".join(get_args(Test))}.
- "on_failure" is stop (the default), continue (without the step and those that refer to it), undo (what is done) or ask (a person).
- "after" names steps that must have ended before, where nothing refers to them. Steps that do not wait for each other run at the same time.
"""


class WrittenPlan(BuiltAgent[..., dict[str, Any]]):
    """An agent that has a model write its plan, and follows it. Made by `Plan.from_model`."""

    def __init__(
        self,
        model: Model,
        tools: Sequence[Tool[..., Any] | Agent[..., Any]],
        goal: str | None,
        name: str,
        max_attempts: int,
        approval: bool | Approval | None,
        instructions: str,
        *,
        home: Mapping[str, Any],
        options: Mapping[str, Any],
    ) -> None:
        _check(model, goal, max_attempts, instructions)
        callees = named(tools)
        if not callees:
            raise InvalidInput("Plan.from_model needs tools: without any there is nothing to plan with")
        policy = Approval(editable="plan") if approval is True else approval or None
        if policy is not None and set(getattr(policy, "editable", ())) - {"plan"}:
            raise InvalidInput('Plan.from_model: an approval of a plan can have editable="plan" and nothing else')
        asked = None if policy is None else written_approval(policy)
        writer = _Writer(model, callees, name, max_attempts, policy, instructions)

        async def write_and_follow(run: Run, **given: Any) -> dict[str, Any]:
            plan, by = await writer.write(run, str(given.get("goal", goal)))
            return await Following(run, plan, {}, by).follow()

        write_and_follow.__doc__ = f"Plan and do what is wanted, with {', '.join(callees)}."
        takes = {"goal": (str, NO_DEFAULT)} if goal is None else {}
        whole = [goal, instructions, model.name, model.pin(), pins(callees.values()), max_attempts, asked, _SYSTEM]
        version = options.get("version") or codec.digest(codec.encode(whole))[:12]
        given = {key: value for key, value in options.items() if key != "version"}
        super().__init__(dressed(write_and_follow, name, home, takes), name=name, version=version, home=home, **given)
        self.callees = callees

    @property
    def agents(self) -> tuple[Agent[..., Any], ...]:
        """The agents that a plan of its may call."""
        return tuple(callee for callee in self.callees.values() if isinstance(callee, Agent))


def _check(model: Any, goal: Any, max_attempts: Any, instructions: Any) -> None:
    if not isinstance(model, Model):
        raise InvalidInput(f"Plan.from_model: {shown(model)} is no model; take one of perdure.models, or write a subclass of Model")
    if goal is not None and (not isinstance(goal, str) or not goal.strip()):
        raise InvalidInput(f"Plan.from_model: goal={shown(goal)} is no text; leave it out to have it as the agent's argument")
    if not isinstance(instructions, str):
        raise InvalidInput(f"Plan.from_model: instructions={shown(instructions)} is no text")
    if type(max_attempts) is not int or not 1 <= max_attempts <= MAX_ATTEMPTS:
        raise InvalidInput(f"Plan.from_model: max_attempts={shown(max_attempts)}: a whole number from 1 to {MAX_ATTEMPTS}")


class _Writer:
    """Has the plan written, put right, and approved."""

    def __init__(
        self, model: Model, callees: Mapping[str, Callee], name: str, max_attempts: int, policy: Approval | None, instructions: str
    ) -> None:
        self._model = model
        self._callees = callees
        self._name = name
        self._max_attempts = max_attempts
        self._policy = policy
        self._instructions = instructions

    async def write(self, run: Run, goal: str) -> tuple[Sound, str]:
        """The plan that is followed, and who has written it."""
        if self._policy is not None and (impossible := self._policy.check_for(run.actor)) is not None:
            raise InvalidInput(f"the approval of the plan could never be granted: {impossible}")
        plan = await self._written(run, goal)
        if self._policy is None:
            return plan, self._model.name
        return await self._approved(run, plan, self._policy)

    async def _written(self, run: Run, goal: str) -> Sound:
        talk: list[Message] = [User(f"{goal}\n\nWrite the plan for this.")]
        system, spec = self._system(), submit_spec(self._callees)
        last = ""
        for attempt in range(1, self._max_attempts + 1):
            run.status(f"planning, attempt {attempt}" if attempt > 1 else "planning")
            answer = await self._model.ask(talk, system=system, tools=[spec], choice=SUBMIT)
            if answer.stop == "refusal":
                raise PlanFailed(f"model {self._model.name} refused to write the plan: {clean(answer.text, 500) or 'it gave no reason'}")
            try:
                return self._submitted(answer)
            except InvalidInput as error:
                last = _in_one_line(error)
                talk += _sent_back(answer, clean(str(error), _PROBLEM_CHARS))
        raise PlanFailed(
            f"model {self._model.name} has written no plan that can be followed, in {self._max_attempts} attempts; the last: {clean(last, _PROBLEM_CHARS)}"
        )

    def _submitted(self, answer: Answer) -> Sound:
        plans = [use for use in answer.uses if use.name == SUBMIT]
        if len(plans) != 1 or len(answer.uses) != 1:
            raise InvalidInput(
                f"call {SUBMIT} once, and nothing else; there were {len(answer.uses)} calls, {len(plans)} of them of {SUBMIT}"
            )
        submitted = plans[0].arguments
        if not isinstance(submitted, dict) or answer.stop == "length":
            raise InvalidInput(f"what {SUBMIT} was called with is cut off, or no JSON object; submit a shorter plan, whole")
        unknown = [key for key in submitted if key != "steps"]
        if unknown:
            raise InvalidInput(f"{SUBMIT} takes steps, and no {shown(unknown[0])}")
        return self._sound(submitted.get("steps"))

    def _sound(self, steps: Any) -> Sound:
        known = [
            Problem(place, f"step {shown(step.get('name'))}: who approves what is not for the plan to say")
            for place, step in enumerate(steps if isinstance(steps, list) else ())
            if isinstance(step, dict) and "approval" in step
        ]
        # As it is: the bytes that are approved are those that are journaled.
        return sound({"name": self._name, "steps": steps}, self._callees, known, as_is=True)

    async def _approved(self, run: Run, plan: Sound, policy: Approval) -> tuple[Sound, str]:
        """The very plan that somebody has approved. One that they have made wrong with an edit they are asked about again."""
        by, said = self._model.name, _with_edits(policy)
        while True:
            shown_plan = {"plan": {"steps": plan.document["steps"]}}
            ask = run._machine.ask_approval(f"plan {self._name}", codec.encode(shown_plan), policy, said)
            decision = await ask
            if not decision.granted:
                who, note = f" by {decision.by}" if decision.by else "", f": {decision.note}" if decision.note else ""
                raise PlanFailed(f"the plan was not approved: {decision.outcome}{who}{note}; nothing of it has begun")
            approved = decision.input["plan"]
            if codec.encode(decision.input) == codec.encode(shown_plan):
                return plan, by
            try:
                if approved.keys() != {"steps"}:
                    raise InvalidInput("a plan has its steps, and nothing beside them")
                return self._sound(approved["steps"]), f"{by}, edited by {decision.by}"
            except InvalidInput as error:
                said = clean(
                    f"the edit of {decision.by} was not taken, and this is the plan as it was before: {_in_one_line(error)}", 2_000
                )

    def _system(self) -> str:
        tools = [
            {"tool": callee.name, "description": callee.description, "arguments": callee.schema()} for callee in self._callees.values()
        ]
        known = "\n".join(json.dumps(one, ensure_ascii=False, sort_keys=True) for one in tools)
        return f"{self._instructions}\n\n{_SYSTEM}\nThe tools:\n{known}".strip()


def _with_edits(policy: Approval) -> str | None:
    """The reason, and what whoever edits the plan must know: they decide where nobody has the tools that it is checked against."""
    if not policy.editable:
        return policy.reason
    edits = "an edited plan is checked when the run goes on; one that is wrong is not followed, and this is asked again"
    return edits if policy.reason is None else f"{policy.reason}; {edits}"


def _in_one_line(error: InvalidInput) -> str:
    if not isinstance(error, InvalidPlan) or len(error.lines) == 1:
        return str(error)
    return f"{error.lines[0]} {'; '.join(line.removeprefix('- ') for line in error.lines[1:])}"


def _sent_back(answer: Answer, problem: str) -> list[Message]:
    """What the model is told about a plan that is wrong, such that every provider takes the conversation (T28)."""
    message = answer.message
    again = f"That is no plan that can be followed: {problem}. Put all of it right, and submit the whole plan again."
    if not message.uses or len({use.id for use in message.uses}) != len(message.uses):
        # An answer that says nothing, or whose calls cannot be told apart, cannot be repeated to a provider.
        return [message, User(again)] if message.text and not message.uses else [User(again)]
    return [message, *(ToolResult(use.id, use.name, again, error=True) for use in message.uses)]


def submit_spec(callees: Mapping[str, Callee]) -> ToolSpec:
    """The tool that a model submits its plan with. It is never called: what it is called with is the plan."""
    way = {"type": "array", "items": {"type": ["string", "integer"]}, "minItems": 1}
    condition = {"type": "object", "properties": {"ref": way, **{test: {} for test in get_args(Test)}}, "required": ["ref"]}
    step = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "pattern": "^[A-Za-z_][A-Za-z0-9_-]{0,63}$"},
            "tool": {"type": "string", "enum": list(callees)},
            "args": {
                "type": "object",
                "description": 'The arguments by name; {"$ref": ["step", "field"]} for what an earlier step returns.',
            },
            "when": {"type": "array", "items": condition},
            "on_failure": {"type": "string", "enum": list(get_args(OnFailure))},
            "after": {"type": "array", "items": {"type": "string"}},
        },
        "required": ["name", "tool"],
        "additionalProperties": False,
    }
    steps = {"type": "array", "items": step, "minItems": 1, "maxItems": MAX_STEPS}
    schema = {"type": "object", "properties": {"steps": steps}, "required": ["steps"], "additionalProperties": False}
    return ToolSpec(SUBMIT, "Submit the whole plan.", schema)
