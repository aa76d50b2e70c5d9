"""Following a plan, and undoing its completed steps if the plan fails.

Each step waits for the steps in its `waits_for`. Once a failed step has stopped the plan, no other step begins. To
undo steps, perdure calls the compensate hooks of their tools, the last completed step first. Each call of a hook is
recorded like any other call.

If a person has let another version go on with the run, the recorded plan is followed up to that change (frames.py). Then
the plan of the code takes its place.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from types import CodeType
from typing import Any, Literal, TypeGuard, TypeVar

from msgspec import Struct

from perdure import shell
from perdure.agent import Agent
from perdure.agents.frames import RecordedAgent, RecordedTool
from perdure.agents.plan.check import CheckedStep, Sound
from perdure.agents.plan.conditions import holds, written_condition
from perdure.agents.plan.frames import RecordedPlan, RecordedPlans
from perdure.agents.plan.refs import resolve, written_arguments
from perdure.agents.plan.step import written_approval
from perdure.core import codec
from perdure.core.approval import Approval
from perdure.core.events import PlanGenerated
from perdure.core.failures import IN_DOUBT_KINDS, clean
from perdure.core.identity import is_id
from perdure.core.machine import current
from perdure.errors import ChildFailed, InvalidInput, NotApproved, NotEncodable, PlanFailed, ResultNotEncodable, ToolFailed
from perdure.run import Run
from perdure.tool import Tool

# -- undoing ----------------------------------------------------------------------------------------------------------
_NAMED = 20  # a message names at most this many steps


class DoneStep(Struct, frozen=True):
    """A completed step."""

    step: str
    tool: str
    effect: str | None  # None: it is a run of its own
    arguments: dict[str, Any]
    result: Any
    told: bool = True  # False: the result of the step could not be recorded


class Undone(Struct, frozen=True):
    """The steps that were undone, and in `left` the steps that were not undone, each with the reason."""

    steps: list[str]
    left: list[tuple[str, str]]

    def words(self, run_id: str, doubtful: Sequence[str]) -> str:
        """The last part of the message of PlanFailed."""
        parts = [f"; undone: {', '.join(self.steps[:_NAMED])}{_more(self.steps)}" if self.steps else "; nothing was undone"]
        if self.left:
            named = ", ".join(f"{step} [{why}]" for step, why in self.left[:_NAMED])
            parts.append(f"; could not be undone: {named}{_more(self.left)}; once that is mended: perdure undo {_as_recorded(run_id)}")
        if doubtful:
            parts.append(f"; may have happened all the same: {', '.join(doubtful[:_NAMED])}{_more(doubtful)}")
        return "".join(parts)


def _as_recorded(run_id: str) -> str:
    """The run's id as a word of a shell command.

    A valid id is not quoted, because replay compares the message with the message in the journal, and older journals
    contain the id without quotes.
    """
    return run_id if is_id(run_id) else shell.quote(run_id)


def may_have_happened(error: Exception, effect: str | None) -> bool:
    """Is it possible that a failed call of this effect class had its effect? None: it was a run of its own."""
    if not isinstance(error, ToolFailed) or error.kind not in IN_DOUBT_KINDS or not error.attempts:
        return False
    if effect is None:
        return True
    # A `once` or `keyed` call that failed as "cancelled" has not happened; otherwise the call would be in doubt, not
    # failed.
    settled = ("read", "transaction") if error.kind != "cancelled" else ("read", "transaction", "once", "keyed")
    return effect not in settled


async def undo(run: Run, steps: Sequence[DoneStep], callees: Mapping[str, Any]) -> Undone:
    """Undo the steps, the last step first. If a hook fails, its step is not undone, but the other steps still are."""
    undone = Undone([], [])
    for done in reversed(steps):
        callee = callees.get(done.tool)
        if done.effect is None:
            undone.left.append((done.step, "it is a run of its own"))
            continue
        if done.effect == "read":
            continue
        hook = callee.compensation() if isinstance(callee, Tool) else None
        if not isinstance(callee, Tool):
            undone.left.append((done.step, f"this code has no tool {done.tool}"))
        elif hook is None or callee.compensator is None:
            undone.left.append((done.step, "its tool has no compensate hook"))
        elif not done.told and callee.compensator.takes_result:
            undone.left.append((done.step, "its result could not be recorded, and its compensate hook needs it"))
        elif (problem := await _undo_one(run, done, hook)) is not None:
            undone.left.append((done.step, problem))
        else:
            undone.steps.append(done.step)
    return undone


async def _undo_one(run: Run, done: DoneStep, hook: Tool[..., Any]) -> str | None:
    """Call the hook. Returns None if the step was undone, and the reason if it could not be undone."""
    run.status(f"undoing step {done.step}")
    try:
        await hook(arguments=done.arguments, result=done.result)
    except ResultNotEncodable:
        return None  # the hook has run, and the result of the hook is not needed
    except ToolFailed as failed:
        return f"{failed.type}: {failed.message[:200]}"
    except InvalidInput as refused:
        return str(refused)[:200]
    return None


def _more(named: Sequence[Any]) -> str:
    return f" and {len(named) - _NAMED} more" if len(named) > _NAMED else ""


# -- following a plan -------------------------------------------------------------------------------------------------
T = TypeVar("T")
# Two keys in the result of a plan. No step can have such a name.
NOT_DONE = "$not_done"  # steps that were not done, and why
LEFT_OUT = "$left_out"  # steps whose results do not fit into the plan's result
_NOTE_BYTES = 512  # space for the note about one step under one of these keys
_WHY_CHARS = 1_000


class StepOutcome(Struct, frozen=True):
    """The outcome of a step."""

    what: Literal["done", "failed", "skipped", "not_begun", "given_up"]
    result: Any = None
    why: str = ""


class _Withdrawn(Exception):
    """The plan stopped while the step waited for a person."""


Refit = Callable[[Sound, Collection[str]], Sound]


class Following:
    """The state of one run of a plan: what became of each step, and what is still open.

    `refit(plan, begun)`: the code's plan for a run that has followed `plan` so far and has begun these steps. InvalidInput
    if the code cannot go on with it.
    """

    def __init__(
        self, run: Run, plan: Sound, given: Mapping[str, Any], by: str | None = None, *, recorded: RecordedPlans, refit: Refit
    ) -> None:
        self._run = run
        self._plan = plan
        self._given = dict(given)
        self._by = by
        self._recorded = recorded
        self._refit = refit
        self._frame: RecordedPlan | None = recorded.current()
        self._refused: str | None = None  # why the code's plan could not take the place of the recorded one
        self._outcomes: dict[str, StepOutcome] = {}
        self._ended: dict[str, asyncio.Event] = {}
        self._waiting: dict[str, asyncio.Task[None]] = {}  # steps that have not begun
        self._begun: dict[str, None] = {}
        self._asking: dict[str, dict[str, Any]] = {}  # steps that wait for an approval, and the arguments it is about
        self._done_steps: list[DoneStep] = []  # completed steps, in the order of completion
        self._stopped_by: tuple[CheckedStep, str] | None = None
        self._undoes = False
        self._doubtful: list[str] = []  # steps that failed, but may have had their effect
        self._patient: dict[asyncio.Task[Any], None] = {}  # tasks of steps that wait for the decision of a person
        self._calls: dict[int, None] = {}  # numbers of open tool calls, for `_stop`; children are not in this dict

    async def follow(self) -> dict[str, Any]:
        """The results of the steps by name. PlanFailed if a step stopped the plan."""
        machine = current()
        assert machine is not None
        machine.in_the_way = self.in_the_way
        if (impossible := self._impossible(self._plan)) is not None:
            raise InvalidInput(impossible)
        async with asyncio.TaskGroup() as self._tasks:
            self._begin()
        if self._stopped_by is None:
            return self._results()
        undone = await undo(self._run, self._done_steps, self._plan.callees) if self._undoes else None
        raise PlanFailed(self._failure(*self._stopped_by) + ("" if undone is None else undone.words(self._run.id, self._doubtful)))

    def facts(self) -> Mapping[str, Any]:
        """What became of the steps so far, for a person who looks into a run."""
        stopped = {} if self._stopped_by is None else {"stopped_by": self._stopped_by[0].name}
        steps = {step.name: self._outcomes[step.name].what if step.name in self._outcomes else "open" for step in self._plan.steps}
        return {"steps": steps, **stopped}

    def first_before(self, step: CheckedStep) -> Mapping[str, Any]:
        """The step for which this step waits, for a person who looks into a run; empty if it waits for none."""
        return next(({"waits_for_step": name} for name in step.waits_for if not self._ended[name].is_set()), {})

    def _impossible(self, plan: Sound) -> str | None:
        """Which step of this plan needs an approval that could never be granted."""
        for step in plan.steps:
            why = None if step.approval is None or step.name in self._begun else step.approval.check_for(self._run.actor)
            if why is not None:
                return f"step {step.name}: its approval could never be granted: {why}"
        return None

    def _begin(self) -> None:
        """Record the plan, and let its steps wait for their turn."""
        plan = self._plan
        self._run.record(PlanGenerated(codec.pack(plan.encoded, codec.MAX_BYTES)[0], plan.digest, self._by))
        for step in plan.steps:
            if step.name not in self._begun:
                self._ended.setdefault(step.name, asyncio.Event())
                self._waiting[step.name] = self._tasks.create_task(self._take(step), name=f"step {step.name}")

    # -- when another plan takes the place of this one ----------------------------------------------------------------
    def in_the_way(self) -> str | None:
        """Why the code's plan cannot take the place of the recorded one; None if it can, or has."""
        if self._refused is not None or self._frame is None:
            return self._refused
        try:
            return self._misfit(self._refit(self._plan, self._begun))
        except InvalidInput as error:
            return str(error)

    def _misfit(self, plan: Sound) -> str | None:
        if self._stopped_by is not None:
            return f"its plan has stopped, because step {self._stopped_by[0].name} failed, so that no step of another plan would begin"
        steps = {step.name: step for step in plan.steps}
        for step in self._plan.steps:
            if step.name in self._begun and (why := _difference(step, steps.get(step.name))) is not None:
                return f"its step {step.name} has begun, and {why}"
        for name, arguments in self._asking.items():
            # The call is made with exactly what a person has approved.
            encoded, callee = codec.encode(arguments), plan.callees.get(steps[name].tool)
            if callee is None or callee.rebind(encoded) != encoded:
                return f"the approval of its step {name} is about arguments that do not fit {steps[name].tool} in this code as they are"
        return self._impossible(plan)

    def _keep_up(self) -> None:
        """If the frame has changed since the agent last woke, let the next plan take the place of this one."""
        frame = self._recorded.current() if self._frame is not None else None
        if frame is self._frame:
            return
        if frame is None and (why := self.in_the_way()) is not None:
            self._refused = why
            return  # this is a replay, and its caller goes no further: `Frontier.in_the_way`
        self._plan = self._refit(self._plan, self._begun) if frame is None else frame.plan()
        self._frame = frame
        for task in self._waiting.values():
            task.cancel()
        self._waiting.clear()
        self._begin()

    async def _woken(self, waiting: Coroutine[Any, Any, T]) -> T:
        """Wait for a call or a person. Everything that follows belongs to the frame of the event that ended the wait."""
        try:
            answer = await waiting
        except Exception:
            self._keep_up()
            raise
        self._keep_up()
        return answer

    # -- steps --------------------------------------------------------------------------------------------------------
    async def _take(self, step: CheckedStep) -> None:
        for name in step.waits_for:
            await self._ended[name].wait()
        del self._waiting[step.name]
        self._begun[step.name] = None
        self._outcomes[step.name] = await self._outcome_of(step)
        self._ended[step.name].set()

    async def _outcome_of(self, step: CheckedStep) -> StepOutcome:
        if self._stopped_by is not None:
            return StepOutcome("not_begun")
        missing = next((name for name in step.needs if self._outcomes[name].what != "done"), None)
        if missing is not None:
            return self._skip(step, f"it needs step {missing}, which was {self._outcomes[missing].what}")
        while True:
            try:
                broken = next((condition for condition in step.when if not holds(condition, self._look)), None)
                if broken is not None:
                    return self._skip(step, f"its condition does not hold: {broken}")
                return StepOutcome("done", await self._make(step))
            except _Withdrawn:
                return StepOutcome("not_begun")
            except (ToolFailed, InvalidInput) as error:
                ended = await self._failed(step, error)
            if ended is not None:
                return ended

    def _skip(self, step: CheckedStep, why: str) -> StepOutcome:
        self._run.decide(f"skip step {step.name}", reason=clean(why, _WHY_CHARS))
        return StepOutcome("skipped", why=clean(why, _WHY_CHARS))

    def _look(self, step: str | None) -> Any:
        return self._given if step is None else self._outcomes[step].result

    # -- making a step ------------------------------------------------------------------------------------------------
    async def _make(self, step: CheckedStep) -> Any:
        """Make the call of the step. Returns the result as JSON, so that other steps can refer to it."""
        resolved = resolve(step.args, self._look)
        if self._frame is None:
            arguments = codec.decode(self._plan.callees[step.tool].bind((), resolved))
        else:
            arguments = self._frame.bound(step.name, step.tool, resolved)
        if step.approval is not None:
            arguments = await self._approved(step, step.approval, arguments)
        self._run.status(f"step {step.name}: {step.tool}")
        callee = self._plan.callees[step.tool] if self._frame is None else self._frame.callee(step.tool, arguments)
        effect = None if isinstance(callee, Agent | RecordedAgent) else callee.effect
        try:
            result = await self._called(callee, arguments)
        except ResultNotEncodable:
            self._done_steps.append(DoneStep(step.name, step.tool, effect, arguments, None, told=False))
            raise
        self._done_steps.append(DoneStep(step.name, step.tool, effect, arguments, result))
        return result

    async def _called(self, callee: Any, arguments: dict[str, Any]) -> Any:
        """Call the tool or the agent. Returns the result as JSON."""
        recorded = self._frame is not None
        called = _made_again(callee, arguments) if recorded else callee(**callee.with_secrets(arguments))
        number = self._run.calls
        if not isinstance(callee, Agent | RecordedAgent):
            self._calls[number] = None
        try:
            result = await self._woken(called)
        finally:
            self._calls.pop(number, None)
        return result if isinstance(callee, RecordedTool | RecordedAgent) else codec.decode(callee.encode_result(result))

    async def _approved(self, step: CheckedStep, policy: Approval, arguments: dict[str, Any]) -> dict[str, Any]:
        """Exactly the arguments that a person approved. If the person does not approve them, the step fails."""
        ask = self._run.request_approval(f"step {step.name}: {step.tool}", arguments, policy=policy, reason=policy.reason)
        self._asking[step.name] = arguments
        try:
            decision = await self._unless_stopped(ask)
        finally:
            del self._asking[step.name]
        if not decision.granted:
            by, note = f" by {decision.by}" if decision.by else "", f": {decision.note}" if decision.note else ""
            raise InvalidInput(f"it was not approved: {decision.outcome}{by}{note}")
        approved: dict[str, Any] = decision.input
        for name in getattr(self._plan.callees.get(step.tool), "takes_secrets", ()):
            if approved.get(name) != arguments.get(name):
                raise InvalidInput(f"its argument {name} is a secret, which a decision may not change")
        return approved

    async def _unless_stopped(self, waiting: Coroutine[Any, Any, T]) -> T:
        """Wait for the decision of a person. _Withdrawn if the plan stops first."""
        task = asyncio.current_task()
        assert task is not None
        self._patient[task] = None
        try:
            answer = await self._woken(waiting)
        except asyncio.CancelledError:
            # If the run is cancelled when the plan stops, the cancel of the run wins.
            if self._stopped_by is not None and task.uncancel() == 0:
                raise _Withdrawn from None
            raise
        finally:
            del self._patient[task]
        if self._stopped_by is not None:
            raise _Withdrawn
        return answer

    # -- when a step fails --------------------------------------------------------------------------------------------
    async def _failed(self, step: CheckedStep, error: ToolFailed | InvalidInput) -> StepOutcome | None:
        """The outcome of a step that has failed. None if a person decided that the step is made again."""
        why = clean(f"{error.type}: {error.message}" if isinstance(error, ToolFailed) else str(error), _WHY_CHARS)
        step = next((one for one in self._plan.steps if one.name == step.name), step)  # the plan may be another one now
        if may_have_happened(error, self._effect(step.tool)):
            self._doubtful.append(step.name)
            why = f"{why}{'' if why.endswith('.') else '.'} It may have happened all the same"
        if self._stopped_by is not None and _was_given_up(error):
            return StepOutcome("given_up" if error.attempts else "not_begun", why=why)
        on_failure = step.on_failure
        if on_failure == "ask" and self._stopped_by is None:
            try:
                choice, who = await self._ask(step, why)
            except _Withdrawn:
                return StepOutcome("failed", why=why)
            if choice == "retry":
                return None
            if choice == "skip":
                return self._skip(step, f"{who} chose to go on without it, after it had failed: {why}")
        elif on_failure == "continue" and self._stopped_by is None:
            self._run.decide(f"go on without step {step.name}", reason=why)
            return StepOutcome("failed", why=why)
        self._undoes |= on_failure == "undo"
        self._stop(step, why)
        return StepOutcome("failed", why=why)

    def _effect(self, tool: str) -> str | None:
        callee = self._plan.callees.get(tool) if self._frame is None else self._frame.callee(tool, {})
        return None if isinstance(callee, Agent | RecordedAgent) else str(getattr(callee, "effect", "once"))

    def _stop(self, step: CheckedStep, why: str) -> None:
        if self._stopped_by is not None:
            return
        self._stopped_by = (step, why)
        self._run.status(f"stopping: step {step.name} failed")
        for task in self._patient:
            task.cancel()
        for number in self._calls:
            self._run.begin_no_more(number)

    async def _ask(self, step: CheckedStep, why: str) -> tuple[str, str]:
        """What a person decides about a failed step ("retry", "skip" or "stop"), and the name of the person."""
        said = ""
        while True:
            policy = Approval(editable="choice")
            question = {"step": step.name, "tool": step.tool, "error": why, "choice": "retry"}
            reason = (
                f"{said}step {step.name} failed. Approved, it is made again, as a new call with a key of its own; approved with choice edited to "
                '"skip" the plan goes on without it; edited to "stop", or rejected, the plan stops'
            )
            ask = self._run.request_approval(f"step {step.name} failed", question, policy=policy, reason=reason)
            decision = await self._unless_stopped(ask)
            choice = decision.input["choice"] if decision.granted else "stop"
            if choice in ("retry", "skip", "stop"):
                return choice, decision.by or "somebody"
            said = f"{choice[:40]!r} is no choice. "

    # -- how the plan ended -------------------------------------------------------------------------------------------
    def _results(self) -> dict[str, Any]:
        others = {
            step.name: {"outcome": self._outcomes[step.name].what, "why": self._outcomes[step.name].why}
            for step in self._plan.steps
            if self._outcomes[step.name].what != "done"
        }
        results, left_out = self._fitting(codec.MAX_BYTES - len(codec.encode({NOT_DONE: others})))
        return {**results, **({NOT_DONE: others} if others else {}), **({LEFT_OUT: left_out} if left_out else {})}

    def _fitting(self, room: int) -> tuple[dict[str, Any], dict[str, str]]:
        """The results that fit into the plan's result. For each other result: the reason why it does not fit.

        A plan whose steps are done must not fail because its result is too large.
        """
        results: dict[str, Any] = {}
        left_out: dict[str, str] = {}
        room -= _NOTE_BYTES * len(self._plan.steps)
        for step in self._plan.steps:
            became = self._outcomes[step.name]
            if became.what != "done":
                continue
            try:
                size = len(codec.encode({step.name: became.result}))
            except NotEncodable:
                left_out[step.name] = "it is nested too deeply, or too large, to be part of another result; it is recorded with its call"
                continue
            if size > room:
                left_out[step.name] = f"its {size:,} bytes are too many beside the other results; it is recorded with its call"
                continue
            results[step.name] = became.result
            room -= size
        return results, left_out

    def _failure(self, step: CheckedStep, why: str) -> str:
        parts = [f"step {step.name} ({step.tool}) failed: {why}"]
        for what, words in (
            ("done", "done"),
            ("failed", "failed too"),
            ("skipped", "skipped"),
            ("given_up", "given up"),
            ("not_begun", "not begun"),
        ):
            names = [name for name, became in self._outcomes.items() if became.what == what and name != step.name]
            if names:
                more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
                parts.append(f"{words}: {', '.join(names[:_NAMED])}{more}")
        return "; ".join(parts)


def _made_again(callee: Any, arguments: dict[str, Any]) -> Coroutine[Any, Any, Any]:
    """Make a recorded call again, with the recorded arguments: the code's tool may take others."""
    machine = current()
    assert machine is not None
    make = machine.call_tool if isinstance(callee, RecordedTool) else machine.start_child
    return make(callee, codec.encode(arguments))


def _difference(step: CheckedStep, other: CheckedStep | None) -> str | None:
    """What is different in a step that has begun. Its description, and what to do if it fails, may be."""
    if other is None:
        return "this plan has no such step"
    parts = {
        "tool": (step.tool, other.tool),
        "arguments": (written_arguments(step.args), written_arguments(other.args)),
        "condition": ([*map(written_condition, step.when)], [*map(written_condition, other.when)]),
        "approval": (_written_approval(step), _written_approval(other)),
    }
    for what, (before, now) in parts.items():
        if before != now:
            return f"in this plan it has another {what}" if what != "arguments" else "in this plan it has other arguments"
    return None if {*step.waits_for} == {*other.waits_for} else "in this plan it waits for other steps"


def _written_approval(step: CheckedStep) -> Any:
    return None if step.approval is None else written_approval(step.approval)


def facts_of(code: CodeType, variables: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a frame of this module says about the plan: the outcomes of all steps, or the step of a task."""
    if code is Following.follow.__code__:
        following: Following = variables["self"]
        return following.facts()
    if code is Following._take.__code__:
        step, following = variables["step"], variables["self"]
        return {"step": step.name, "tool": step.tool, **following.first_before(step)}
    if code is Following._make.__code__ and "arguments" in variables:
        return {"arguments": variables["arguments"]}
    return {}


def _was_given_up(error: ToolFailed | InvalidInput) -> TypeGuard[ToolFailed]:
    """Did the call fail only because the plan stopped?"""
    if isinstance(error, NotApproved):
        return error.outcome == "withdrawn"
    return isinstance(error, ToolFailed) and not isinstance(error, ChildFailed) and (error.kind, error.type) == ("cancelled", "Cancelled")
