"""Following a plan: every step waits for what it refers to, and nothing begins any more once one of them has stopped the plan.

Each step is a task of its own on the agent's deterministic loop; what it waits for are the ends of others. What was begun when the plan
stops is waited for, since an effect that is under way cannot be taken back; what waits for a person, for its turn or between two attempts
is given up, so that nobody can set it going afterwards.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from typing import Any, Literal, TypeGuard, TypeVar

from msgspec import Struct

from perdure.core import codec
from perdure.core.approval import Approval
from perdure.core.events import PlanGenerated
from perdure.core.failures import clean
from perdure.errors import ChildFailed, InvalidInput, NotApproved, NotEncodable, PlanFailed, ResultNotEncodable, ToolFailed
from perdure.plan.check import Checked, Sound
from perdure.plan.conditions import holds
from perdure.plan.refs import resolve
from perdure.plan.step import Callee
from perdure.plan.undoing import Deed, may_have_happened, undo
from perdure.run import Run
from perdure.tool import Tool

T = TypeVar("T")
NOT_DONE = "$not_done"  # in the result of a plan; no step can be called so
LEFT_OUT = "$left_out"
_NOTE_BYTES = 512  # of one step under that
_NAMED = 20  # steps, in a message
_WHY_CHARS = 1_000


class Became(Struct, frozen=True):
    """What has become of a step."""

    what: Literal["done", "failed", "skipped", "not_begun", "given_up"]
    result: Any = None
    why: str = ""


class _Withdrawn(Exception):
    """The plan was stopped while the step waited for a person."""


class Following:
    """One run of a plan."""

    def __init__(self, run: Run, plan: Sound, given: Mapping[str, Any], by: str | None = None) -> None:
        self._run = run
        self._plan = plan
        self._given = dict(given)
        self._by = by
        self._became: dict[str, Became] = {}
        self._ended = {step.name: asyncio.Event() for step in plan.steps}
        self._deeds: list[Deed] = []  # in the order in which they were done
        self._stopped_by: tuple[Checked, str] | None = None
        self._undoes = False
        self._doubtful: list[str] = []  # steps that have failed, and may have happened all the same
        self._patient: dict[asyncio.Task[Any], None] = {}  # steps that wait for a person before they begin
        self._calls: dict[int, None] = {}  # of tools, that have not ended; a child that was started is under way, whatever it waits for

    async def follow(self) -> dict[str, Any]:
        """Every step's result by its name; PlanFailed when one of them has stopped the plan."""
        self._check_approvals()
        plan = self._plan
        self._run._machine.record(PlanGenerated(codec.pack(plan.encoded, codec.MAX_BYTES)[0], plan.digest, self._by))
        async with asyncio.TaskGroup() as steps:
            for step in plan.steps:
                steps.create_task(self._take(step), name=f"step {step.name}")
        if self._stopped_by is None:
            return self._results()
        undone = await undo(self._run, self._deeds) if self._undoes else None
        raise PlanFailed(self._failure(*self._stopped_by) + ("" if undone is None else undone.words(self._run.id, self._doubtful)))

    def _check_approvals(self) -> None:
        for step in self._plan.steps:
            impossible = None if step.approval is None else step.approval.check_for(self._run.actor)
            if impossible is not None:
                raise InvalidInput(f"step {step.name}: its approval could never be granted: {impossible}")

    async def _take(self, step: Checked) -> None:
        for name in step.waits_for:
            await self._ended[name].wait()
        self._became[step.name] = await self._become(step)
        self._ended[step.name].set()

    async def _become(self, step: Checked) -> Became:
        if self._stopped_by is not None:
            return Became("not_begun")
        missing = next((name for name in step.needs if self._became[name].what != "done"), None)
        if missing is not None:
            return self._skip(step, f"it needs step {missing}, which was {self._became[missing].what}")
        while True:
            try:
                broken = next((condition for condition in step.when if not holds(condition, self._look)), None)
                if broken is not None:
                    return self._skip(step, f"its condition does not hold: {broken}")
                return Became("done", await self._make(step))
            except _Withdrawn:
                return Became("not_begun")
            except (ToolFailed, InvalidInput) as error:
                ended = await self._failed(step, error)
            if ended is not None:
                return ended

    def _skip(self, step: Checked, why: str) -> Became:
        self._run.decide(f"skip step {step.name}", reason=clean(why, _WHY_CHARS))
        return Became("skipped", why=clean(why, _WHY_CHARS))

    def _look(self, step: str | None) -> Any:
        return self._given if step is None else self._became[step].result

    # -- making a step ------------------------------------------------------------------------------------------------------
    async def _make(self, step: Checked) -> Any:
        """The step's result as JSON, by which others refer to it."""
        callee = self._plan.callees[step.tool]
        arguments = codec.decode(callee.bind((), resolve(step.args, self._look)))
        if step.approval is not None:
            arguments = await self._approved(step, step.approval, arguments)
        self._run.status(f"step {step.name}: {step.tool}")
        try:
            result = codec.decode(callee.encode_result(await self._called(callee, arguments)))
        except ResultNotEncodable:
            self._deeds.append(Deed(step.name, callee, arguments, None, told=False))
            raise
        self._deeds.append(Deed(step.name, callee, arguments, result))
        return result

    async def _called(self, callee: Callee, arguments: dict[str, Any]) -> Any:
        called, number = callee(**arguments), self._run._machine.calls
        if not isinstance(callee, Tool):
            return await called
        self._calls[number] = None
        try:
            return await called
        finally:
            del self._calls[number]

    async def _approved(self, step: Checked, policy: Approval, arguments: dict[str, Any]) -> dict[str, Any]:
        """The very arguments that somebody has approved; a refusal is the step's failure."""
        ask = self._run._machine.ask_approval(f"step {step.name}: {step.tool}", codec.encode(arguments), policy, policy.reason)
        decision = await self._unless_stopped(ask)
        if not decision.granted:
            by, note = f" by {decision.by}" if decision.by else "", f": {decision.note}" if decision.note else ""
            raise InvalidInput(f"it was not approved: {decision.outcome}{by}{note}")
        approved: dict[str, Any] = decision.input
        return approved

    async def _unless_stopped(self, waiting: Coroutine[Any, Any, T]) -> T:
        """Wait for a person, until the plan stops."""
        task = asyncio.current_task()
        assert task is not None
        self._patient[task] = None
        try:
            answer = await waiting
        except asyncio.CancelledError:
            # Both can happen: a plan that stops while its run is being cancelled is cancelled.
            if self._stopped_by is not None and task.uncancel() == 0:
                raise _Withdrawn from None
            raise
        finally:
            del self._patient[task]
        if self._stopped_by is not None:
            raise _Withdrawn
        return answer

    # -- when it fails --------------------------------------------------------------------------------------------------------
    async def _failed(self, step: Checked, error: ToolFailed | InvalidInput) -> Became | None:
        """What becomes of a step that has failed; None: it is made once more."""
        why = clean(f"{error.type}: {error.message}" if isinstance(error, ToolFailed) else str(error), _WHY_CHARS)
        if may_have_happened(error, self._plan.callees[step.tool]):
            self._doubtful.append(step.name)
            why = f"{why}{'' if why.endswith('.') else '.'} It may have happened all the same"
        if self._stopped_by is not None and _was_given_up(error):
            return Became("given_up" if error.attempts else "not_begun", why=why)
        on_failure = step.on_failure
        if on_failure == "ask" and self._stopped_by is None:
            try:
                choice, who = await self._ask(step, why)
            except _Withdrawn:
                return Became("failed", why=why)
            if choice == "retry":
                return None
            if choice == "skip":
                return self._skip(step, f"{who} chose to go on without it, after it had failed: {why}")
        elif on_failure == "continue" and self._stopped_by is None:
            self._run.decide(f"go on without step {step.name}", reason=why)
            return Became("failed", why=why)
        self._undoes |= on_failure == "undo"
        self._stop(step, why)
        return Became("failed", why=why)

    def _stop(self, step: Checked, why: str) -> None:
        if self._stopped_by is not None:
            return
        self._stopped_by = (step, why)
        self._run.status(f"stopping: step {step.name} failed")
        for task in self._patient:
            task.cancel()
        for number in self._calls:
            self._run._machine.begin_no_more(number)

    async def _ask(self, step: Checked, why: str) -> tuple[str, str]:
        """What a person wants done about a step that has failed, and who: "retry", "skip" or "stop"."""
        said = ""
        while True:
            policy = Approval(editable="choice")
            question = {"step": step.name, "tool": step.tool, "error": why, "choice": "retry"}
            reason = (
                f"{said}step {step.name} failed. Approved, it is made again, as a new call with a key of its own; approved with choice edited to "
                '"skip" the plan goes on without it; edited to "stop", or rejected, the plan stops'
            )
            ask = self._run._machine.ask_approval(f"step {step.name} failed", codec.encode(question), policy, reason)
            decision = await self._unless_stopped(ask)
            choice = decision.input["choice"] if decision.granted else "stop"
            if choice in ("retry", "skip", "stop"):
                return choice, decision.by or "somebody"
            said = f"{choice[:40]!r} is no choice. "

    # -- how it ended -----------------------------------------------------------------------------------------------------------
    def _results(self) -> dict[str, Any]:
        others = {
            step.name: {"outcome": self._became[step.name].what, "why": self._became[step.name].why}
            for step in self._plan.steps
            if self._became[step.name].what != "done"
        }
        results, left_out = self._fitting(codec.MAX_BYTES - len(codec.encode({NOT_DONE: others})))
        return {**results, **({NOT_DONE: others} if others else {}), **({LEFT_OUT: left_out} if left_out else {})}

    def _fitting(self, room: int) -> tuple[dict[str, Any], dict[str, str]]:
        """The results that the plan's own can hold, and why not the others: nothing fails for its result alone when all is done."""
        results: dict[str, Any] = {}
        left_out: dict[str, str] = {}
        room -= _NOTE_BYTES * len(self._plan.steps)
        for step in self._plan.steps:
            became = self._became[step.name]
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

    def _failure(self, step: Checked, why: str) -> str:
        parts = [f"step {step.name} ({step.tool}) failed: {why}"]
        for what, words in (
            ("done", "done"),
            ("failed", "failed too"),
            ("skipped", "skipped"),
            ("given_up", "given up"),
            ("not_begun", "not begun"),
        ):
            names = [name for name, became in self._became.items() if became.what == what and name != step.name]
            if names:
                more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
                parts.append(f"{words}: {', '.join(names[:_NAMED])}{more}")
        return "; ".join(parts)


def _was_given_up(error: ToolFailed | InvalidInput) -> TypeGuard[ToolFailed]:
    """Whether a call of a plan that has stopped has ended for no other reason."""
    if isinstance(error, NotApproved):
        return error.outcome == "withdrawn"
    return isinstance(error, ToolFailed) and not isinstance(error, ChildFailed) and (error.kind, error.type) == ("cancelled", "Cancelled")
