"""Plans as agents: with fixed steps (`Plan`), from a file (`from_file`), or written by a model (`from_model`).

A plan that a model writes is checked like any other plan. If the plan has problems, they are returned to the model,
and the model writes the plan again. If an approval is wanted, a person approves the plan. Then the plan is followed.
The journal contains every answer of the model and every decision, so a resumed run has the same plan and asks neither
the model nor a person again.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Any, get_args

from perdure.agent import Agent, BuiltAgent
from perdure.agents import frames
from perdure.agents.plan.check import MAX_STEPS, PlanProblem, Sound, sound
from perdure.agents.plan.follow import Following, facts_of
from perdure.agents.plan.frames import RecordedPlans, change, trusted
from perdure.agents.plan.refs import Test
from perdure.agents.plan.step import (
    NO_DEFAULT,
    TYPES,
    Callee,
    Document,
    OnFailure,
    Step,
    document_of,
    named,
    params_of,
    pins,
    with_signature,
    written_approval,
)
from perdure.core import codec
from perdure.core.approval import Approval
from perdure.core.budget import Budget
from perdure.core.codec import shown
from perdure.core.events import Event, FrameChanged
from perdure.core.failures import clean
from perdure.core.loop_detector import Circles
from perdure.core.machine import current
from perdure.core.replay import Frontier
from perdure.core.state import RunState
from perdure.errors import InvalidInput, InvalidPlan, NotFound, PlanFailed
from perdure.models import Answer, Message, Model, ToolResult, ToolSpec, User
from perdure.run import Run
from perdure.schedule import Cron, Every, Schedule
from perdure.tool import Tool

if TYPE_CHECKING:
    from perdure.models import Model

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


class PlanAgent(BuiltAgent[..., dict[str, Any]]):
    """An agent that follows a plan."""

    declared: str | None = None  # the digest of the plan that the code has; None: a model writes the plan

    def facts_of(self, code: CodeType, variables: Mapping[str, Any]) -> Mapping[str, Any]:
        """The outcomes of the steps so far; in the task of a step: the step, its tool and its arguments."""
        return facts_of(code, variables)

    def frame_change(
        self, state: RunState, events: Sequence[Event], load: frames.Load, *, by: str, note: str | None
    ) -> FrameChanged | None:
        return change(self.version, self.declared, state, events, load, by=by, note=note)

    def check_open_calls(self, frontier: Frontier, state: RunState, load: frames.Load) -> None:
        frames.check_open_calls(self.name, self.version, frontier, state, load)


class WrittenPlan(PlanAgent):
    """An agent that lets a model write its plan, and then follows the plan. `Plan.from_model` creates it."""

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
            recorded = RecordedPlans(callees, None)
            plan, by = await writer.write(run, str(given.get("goal", goal)), recorded)
            return await Following(run, plan, {}, by, recorded=recorded, refit=writer.refit).follow()

        write_and_follow.__doc__ = f"Plan and do what is wanted, with {', '.join(callees)}."
        takes = {"goal": (str, NO_DEFAULT)} if goal is None else {}
        whole = [goal, instructions, model.name, model.pin(), pins(callees.values()), max_attempts, asked, _SYSTEM]
        version = options.get("version") or codec.digest(codec.encode(whole))[:12]
        given = {key: value for key, value in options.items() if key != "version"}
        super().__init__(with_signature(write_and_follow, name, home, takes), name=name, version=version, home=home, **given)
        self.callees = callees

    @property
    def agents(self) -> tuple[Agent[..., Any], ...]:
        """The agents that a plan of this agent may call."""
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
    """Lets the model write and correct the plan, and a person approve it."""

    def __init__(
        self, model: Model, callees: Mapping[str, Callee], name: str, max_attempts: int, policy: Approval | None, instructions: str
    ) -> None:
        self._model = model
        self._callees = callees
        self._name = name
        self._max_attempts = max_attempts
        self._policy = policy
        self._instructions = instructions

    async def write(self, run: Run, goal: str, recorded: RecordedPlans) -> tuple[Sound, str]:
        """The plan to follow, and who wrote it: the model, and the person if a person edited the plan."""
        old = recorded.current()
        if old is None and self._policy is not None and (impossible := self._policy.check_for(run.actor)) is not None:
            raise InvalidInput(f"the approval of the plan could never be granted: {impossible}")
        plan = await self._written(run, goal, recorded)
        old = recorded.current()
        by = self._model.name if old is None else old.model
        if old is not None and old.asked:
            # People were asked before this code was let go on with the run: what they decide counts.
            return await self._approved(run, plan, self._policy or Approval(editable="plan"), by, recorded)
        if old is not None or self._policy is None:
            return plan, by
        return await self._approved(run, plan, self._policy, by, recorded)

    def refit(self, plan: Sound, begun: Collection[str]) -> Sound:
        """The plan that a model wrote for the run, which stays, with the tools of this code. InvalidInput if one does not fit."""
        try:
            return sound(plan.document, self._callees, as_is=True, begun=begun)
        except InvalidPlan as error:
            raise InvalidInput(f"its plan does not fit the tools of this code: {_in_one_line(error)}") from None

    async def _written(self, run: Run, goal: str, recorded: RecordedPlans) -> Sound:
        talk: list[Message] = [User(f"{goal}\n\nWrite the plan for this.")]
        system, spec = self._system(), submit_spec(self._callees)
        last = ""
        for attempt in count(1):
            old = recorded.current()
            if old is None and attempt > self._max_attempts:
                break
            run.status(f"planning, attempt {attempt}" if attempt > 1 else "planning")
            if old is None:
                answer = await self._model.ask(talk, system=system, tools=[spec], choice=SUBMIT)
            else:
                answer = await old.ask(self._model, talk)
            # The model may have answered after the frame was changed: then its plan is checked against the tools of this code.
            old = recorded.current()
            if answer.stop == "refusal":
                raise PlanFailed(f"model {self._model.name} refused to write the plan: {clean(answer.text, 500) or 'it gave no reason'}")
            if old is not None:
                if (told := old.told(attempt)) is None:
                    submitted: Any = answer.uses[0].arguments
                    return trusted({"name": self._name, "steps": submitted["steps"]}, self._callees)
                talk += _sent_back(answer, told)
                continue
            try:
                return self._submitted(answer)
            except InvalidInput as error:
                last = _in_one_line(error)
                talk += _sent_back(answer, _again(clean(str(error), _PROBLEM_CHARS)))
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
            PlanProblem(place, f"step {shown(step.get('name'))}: who approves what is not for the plan to say")
            for place, step in enumerate(steps if isinstance(steps, list) else ())
            if isinstance(step, dict) and "approval" in step
        ]
        # as_is: the bytes that are recorded must be the bytes that a person approved.
        return sound({"name": self._name, "steps": steps}, self._callees, known, as_is=True)

    async def _approved(self, run: Run, plan: Sound, policy: Approval, by: str, recorded: RecordedPlans) -> tuple[Sound, str]:
        """Exactly the plan that a person approved.

        If the person's edit makes the plan invalid, the approval of the plan before the edit is requested again.
        """
        said, machine = _with_edits(policy), current()
        assert machine is not None
        for asked in count(1):
            if recorded.current() is not None:
                machine.in_the_way = partial(self._in_the_way, plan)
            shown_plan = {"plan": {"steps": plan.document["steps"]}}
            ask = run.request_approval(f"plan {self._name}", shown_plan, policy=policy, reason=said)
            decision = await ask
            if not decision.granted:
                who, note = f" by {decision.by}" if decision.by else "", f": {decision.note}" if decision.note else ""
                raise PlanFailed(f"the plan was not approved: {decision.outcome}{who}{note}; nothing of it has begun")
            approved, old = decision.input["plan"], recorded.current()
            if codec.encode(decision.input) == codec.encode(shown_plan):
                return plan if old is not None else self.refit(plan, ()), by
            if old is not None and asked == old.asked:
                return trusted({"name": self._name, **approved}, self._callees), f"{by}, edited by {decision.by}"
            try:
                if old is not None:
                    raise InvalidInput("it was not a plan that could be followed")
                if approved.keys() != {"steps"}:
                    raise InvalidInput("a plan has its steps, and nothing beside them")
                return self._sound(approved["steps"]), f"{by}, edited by {decision.by}"
            except InvalidInput as error:
                said = clean(
                    f"the edit of {decision.by} was not taken, and this is the plan as it was before: {_in_one_line(error)}", 2_000
                )
        raise AssertionError("people are asked until they decide")

    def _in_the_way(self, plan: Sound) -> str | None:
        """Why the plan that a person is asked about could not be followed with this code."""
        try:
            self.refit(plan, ())
        except InvalidInput as error:
            return str(error)
        return None

    def _system(self) -> str:
        tools = [
            {"tool": callee.name, "description": callee.description, "arguments": callee.schema()} for callee in self._callees.values()
        ]
        known = "\n".join(json.dumps(one, ensure_ascii=False, sort_keys=True) for one in tools)
        return f"{self._instructions}\n\n{_SYSTEM}\nThe tools:\n{known}".strip()


def _with_edits(policy: Approval) -> str | None:
    """The reason to show, with a hint for people who edit the plan.

    An edited plan is checked when the run continues, not when the person decides: the check needs the tools, and the
    process in which the person decides does not have them.
    """
    if not policy.editable:
        return policy.reason
    edits = "an edited plan is checked when the run goes on; one that is wrong is not followed, and this is asked again"
    return edits if policy.reason is None else f"{policy.reason}; {edits}"


def _in_one_line(error: InvalidInput) -> str:
    if not isinstance(error, InvalidPlan) or len(error.lines) == 1:
        return str(error)
    return f"{error.lines[0]} {'; '.join(line.removeprefix('- ') for line in error.lines[1:])}"


def _again(problem: str) -> str:
    return f"That is no plan that can be followed: {problem}. Put all of it right, and submit the whole plan again."


def _sent_back(answer: Answer, again: str) -> list[Message]:
    """The messages to the model about an invalid plan, in a form that every provider accepts (threat T28)."""
    message = answer.message
    if not message.uses or len({use.id for use in message.uses}) != len(message.uses):
        # Leave out an empty answer, and an answer whose tool uses have equal ids: providers refuse both.
        return [message, User(again)] if message.text and not message.uses else [User(again)]
    return [message, *(ToolResult(use.id, use.name, again, error=True) for use in message.uses)]


def submit_spec(callees: Mapping[str, Callee]) -> ToolSpec:
    """The tool with which a model submits its plan. The tool is never performed: its arguments are the plan."""
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


# -- Plan -------------------------------------------------------------------------------------------------------------
class Plan(PlanAgent):
    """An agent that follows fixed steps: `Plan("deploy", steps=[Step("build", build_image, {…}), …])`.

    The plan is checked before the first effect and recorded. A run keeps its plan, until a person lets another version
    go on with the run. Steps that do not wait for each other run at the same time. With parallel=False the steps run one
    after the other, in the given order. The result is a dict of the steps' results by name. Its key "$not_done" says
    which steps were skipped, or failed with on_failure="continue", and why. `params`: the parameters of the plan, by
    name and type, for `param("service")` in the steps. InvalidPlan lists all problems of a plan.
    """

    def __init__(
        self,
        name: str,
        steps: Sequence[Step],
        *,
        params: Mapping[str, Any] | None = None,
        parallel: bool = True,
        version: str | None = None,
        budget: Budget | None = None,
        circles: Circles | None = None,
        queue: str | None = None,
        schedule: Schedule | Cron | Every | None = None,
    ) -> None:
        document, callees, problems = _written(name, steps, params, parallel)
        options = {"version": version, "budget": budget, "circles": circles, "queue": queue, "schedule": schedule}
        self._become(sound(document, callees, problems), sys._getframe(1).f_globals, options)

    @classmethod
    def from_file(cls, path: str | os.PathLike[str], tools: Iterable[Tool[..., Any] | Agent[..., Any]]) -> Plan:
        """The plan from a TOML or JSON file. The steps in the file name tools and agents from `tools`.

        InvalidPlan lists all problems of the plan.
        """
        document, version = read_plan(path)
        plan = cls.__new__(cls)
        checked = sound(document, named(tools), label=f"plan {document.get('name')} ({os.fspath(path)})")
        plan._become(checked, sys._getframe(1).f_globals, {"version": version})
        return plan

    @classmethod
    def from_model(
        cls,
        model: Model,
        tools: Sequence[Tool[..., Any] | Agent[..., Any]],
        goal: str | None = None,
        *,
        name: str = "plan",
        max_attempts: int = 3,
        approval: bool | Approval | None = None,
        instructions: str = "",
        version: str | None = None,
        budget: Budget | None = None,
        circles: Circles | None = None,
        queue: str | None = None,
        schedule: Schedule | Cron | Every | None = None,
    ) -> BuiltAgent[..., dict[str, Any]]:
        """An agent that lets a model write a plan for `goal`, and then follows the plan.

        With goal=None the goal is an argument of the agent. If a plan is not valid, the model gets the list of all its
        problems and writes it again; the model has `max_attempts` attempts. With `approval` a person must approve the
        exact plan before it is followed. With approval=True the person may also edit the plan. A resumed run keeps its
        plan.
        """

        options = {"version": version, "budget": budget, "circles": circles, "queue": queue, "schedule": schedule}
        home = sys._getframe(1).f_globals
        return WrittenPlan(model, tools, goal, name, max_attempts, approval, instructions, home=home, options=options)

    def _become(self, checked: Sound, home: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        self.sound = checked
        self.declared = checked.digest
        given = {key: value for key, value in options.items() if key != "version"}
        version = options.get("version") or version_of(checked)
        super().__init__(_function(checked, home), name=checked.name, version=version, home=home, **given)

    @property
    def document(self) -> Document:
        """The plan as a document: the journal contains it in this form, and a plan file may contain it."""
        whole: Document = codec.decode(self.sound.encoded)
        return whole

    @property
    def digest(self) -> str:
        """The digest of the document. A run follows the plan with the digest that it recorded last."""
        return self.sound.digest

    @property
    def agents(self) -> tuple[Agent[..., Any], ...]:
        """The agents that are steps of the plan. Their runs are children of the plan's run."""
        return tuple(callee for callee in self.sound.callees.values() if isinstance(callee, Agent))


def version_of(checked: Sound) -> str:
    """The default version: a digest of the plan and of the pins of its tools."""
    return codec.digest(codec.encode([checked.digest, pins(checked.callees.values())]))[:12]


def _written(
    name: str, steps: Any, params: Mapping[str, Any] | None, parallel: bool
) -> tuple[Document, dict[str, Callee], list[PlanProblem]]:
    problems: list[PlanProblem] = []
    document: Document = {"name": name, "steps": []}
    callees: dict[str, Callee] = {}
    if parallel is not True:
        document["parallel"] = parallel
    if params:
        document["params"] = params_of(params)
    for place, step in enumerate(steps if isinstance(steps, (list, tuple)) else ()):
        if not isinstance(step, Step):
            problems.append(PlanProblem(place, f"step {place + 1} is {shown(step)}; write Step(name, tool, {{…}})", blind=True))
            document["steps"].append({})
            continue
        where = f"step {step.name}" if isinstance(step.name, str) else f"step {place + 1}"
        try:
            document["steps"].append(document_of(step))
        except InvalidInput as error:
            problems.append(PlanProblem(place, f"{where}: {error}", blind=True))
            # Keep the name of the step, so that references to the step are not reported too.
            document["steps"].append({"name": step.name, "tool": getattr(step.tool, "name", None)})
        if isinstance(step.tool, (Tool, Agent)) and callees.setdefault(step.tool.name, step.tool) is not step.tool:
            twice = f"{where}: another tool of this plan is called {step.tool.name} too; give one of them a name= of its own"
            problems.append(PlanProblem(place, twice, blind=True))
    return document, callees, problems


def _function(checked: Sound, home: Mapping[str, Any]) -> Any:
    """A coroutine function that follows the plan. Its parameters are the parameters of the plan."""

    async def follow(run: Run, **given: Any) -> dict[str, Any]:
        recorded = RecordedPlans(checked.callees, checked.digest)
        old = recorded.current()
        plan = checked if old is None else old.plan()
        return await Following(run, plan, given, recorded=recorded, refit=lambda plan, begun: checked).follow()

    follow.__doc__ = f"Follow the plan {checked.name}, whose steps are {', '.join(step.name for step in checked.steps[:20])}."
    return with_signature(
        follow, checked.name, home, {name: (TYPES[one["type"]], one.get("default", NO_DEFAULT)) for name, one in checked.params.items()}
    )


# -- plan files: TOML, or JSON of the same form -----------------------------------------------------------------------
MAX_BYTES = 4 * 1024 * 1024
ENDINGS = (".toml", ".json")


def read_plan(path: str | os.PathLike[str]) -> tuple[Document, str | None]:
    """The plan's document, and the plan's version if the file declares a version.

    InvalidInput names the file and the problem.
    """
    where = os.fspath(path)
    text = _text(Path(where), where)
    whole = _parsed(text, where)
    if not isinstance(whole, dict):
        raise InvalidInput(f"{where}: a plan is an object with its steps, not {shown(whole)}")
    version = whole.pop("version", None)
    if version is not None and not isinstance(version, str):
        raise InvalidInput(f'{where}: version is a text, such as "7", not {shown(version)}')
    whole.setdefault("name", Path(where).stem)
    if isinstance(whole.get("params"), dict):
        whole["params"] = {name: {"type": given} if isinstance(given, str) else given for name, given in whole["params"].items()}
    for step in whole["steps"] if isinstance(whole.get("steps"), list) else []:
        if isinstance(step, dict) and isinstance(step.get("after"), str):
            step["after"] = [step["after"]]
    return whole, version


def _text(file: Path, where: str) -> str:
    if not where.endswith(ENDINGS):
        raise InvalidInput(f"{where}: a plan is a file that ends in {' or '.join(ENDINGS)}")
    try:
        with file.open("rb") as opened:
            content = opened.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise NotFound(f"there is no file {where}") from None
    except OSError as error:
        raise InvalidInput(f"{where} cannot be read: {error.strerror}") from None
    if len(content) > MAX_BYTES:
        raise InvalidInput(f"{where} is larger than {MAX_BYTES:,} bytes; a plan is short: keep its data elsewhere, for a tool to read")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{where} is not UTF-8 text: byte {error.start}") from None


def _parsed(text: str, where: str) -> Any:
    if where.endswith(".json"):
        return codec.parse(text, where)
    import tomllib

    try:
        parsed = tomllib.loads(text)
    except RecursionError:
        raise InvalidInput(f"{where} is nested deeper than {codec.MAX_DEPTH} levels") from None
    except ValueError as error:  # a TOMLDecodeError, or an integer with too many digits
        raise InvalidInput(f"{where} is not valid TOML: {error}") from None
    try:
        return codec.decode(codec.encode(parsed))  # dates become text, as in JSON
    except InvalidInput as error:
        raise InvalidInput(f"{where}: {error}") from None
