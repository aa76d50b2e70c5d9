"""What the machine wants, recorded: calls that start or wait, approvals that are asked for, children, and what is given up.

Also the open calls that nobody is performing: after a crash, a wait or a doubt, what is to be done about each. Nothing is performed
here; a call whose intent is recorded is `due`, and starts when the commit that holds it is durable (G2).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from copy import copy
from typing import Any, Literal, Protocol

from msgspec import structs

from perdure.agent import Agent
from perdure.core import codec
from perdure.core.codec import Payload
from perdure.core.decide import GiveUp, Park, Perform
from perdure.core.events import (
    OF_MODEL,
    BudgetExceeded,
    ChildStarted,
    Event,
    Failure,
    PinChanged,
    PlanGenerated,
    Reason,
    RetryScheduled,
    RunCancelled,
    RunFailed,
    RunSucceeded,
    ToolCallInDoubt,
    ToolCallProposed,
)
from perdure.core.keys import KEY_SCHEME, approval_id, child_id
from perdure.core.machine import (
    Abandon,
    AskApproval,
    Asked,
    CallTool,
    Cancelled,
    Command,
    Failed,
    Finish,
    Record,
    StartChild,
    Succeeded,
)
from perdure.core.state import LOST, NOT_STARTED, AskState, CallState, RunState, refusal
from perdure.errors import InvalidInput
from perdure.store.api import Claimed
from perdure.tool import Tool
from perdure.worker.asks import Asks, Decides
from perdure.worker.calls import Calls, lost_answer
from perdure.worker.clock import Clock
from perdure.worker.gate import Gate, Later, Over
from perdure.worker.pen import Pen

log = logging.getLogger("perdure.worker")
_SLOW_RULE_S = 0.1
_START_MARGIN_US = 50_000  # an approval is not used in the last moment of its time: the clock goes on until the intent is recorded


class Helps(Decides, Protocol):
    """What is needed of the worker."""

    loop: asyncio.AbstractEventLoop
    clock: Clock

    def serve_too(self, agent: Agent[Any, Any]) -> None: ...

    def cancel_run(self, run_id: str, by: str, reason: str, done: Callable[[Exception | None], None]) -> None: ...


class Driving(Protocol):
    """What is needed of the drive."""

    run_id: str

    @property
    def giving_up(self) -> bool: ...

    def deliver(self, event: Event) -> None: ...

    def attend(self, reason: Reason, detail: str) -> None: ...

    def load(self, payload: Payload) -> bytes: ...

    def pump(self) -> None: ...


class Orders:
    """The machine's wishes for one run, and its open calls."""

    def __init__(
        self, drive: Driving, host: Helps, claimed: Claimed, state: RunState, pen: Pen, calls: Calls, gate: Gate, asks: Asks
    ) -> None:
        self.state = state
        self.asked: dict[int, Asked] = {}  # everything that the machine has asked for, by number
        self.unwanted: set[int] = set()  # what the agent has stopped waiting for
        self.orphans: set[int] = set()  # children and approvals among those: told so once they are durable
        self.due: list[int] = []  # calls whose intent is recorded and that start after the next commit
        self.urgent = False  # something is recorded that others wait for; it shares the commit that is due anyway, or has one of its own
        self._drive = drive
        self._host = host
        self._claimed = claimed
        self._pen = pen
        self._calls = calls
        self._gate = gate
        self._asks = asks
        self._approved: dict[int, CallState] = {}  # as it was before the intent that uses its approval up
        self._compared: set[str] = set()  # tools that are known to be what they were, or said not to be
        self._obeying = False
        self._refused: deque[Event] = deque()  # recorded while the machine's wishes were, and told to it after the last of them

    def check_pins(self) -> None:
        """Say so when a tool is not what it was when this run first called it (T30)."""
        tools = {asked.tool.name: asked.tool for asked in self.asked.values() if isinstance(asked, CallTool)}
        for tool in tools.values():
            self._pinned(tool)

    def _pinned(self, tool: Tool[..., Any]) -> str | None:
        """The tool's pin if this is the run's first call of it."""
        what = f"tool {tool.name}"
        if what in self._compared:
            return None
        pin = tool.pin()
        before = self.state.pins.get(what)
        if before is None:
            return pin
        self._compared.add(what)
        if before != pin:
            log.warning("run %s: %s has changed since the run first called it (%s, now %s)", self._drive.run_id, what, before, pin)
            self._pen.record(PinChanged(what, before, pin), cause=self._claimed.row.seq)
        return None

    def obey_all(self, commands: Sequence[tuple[int, Command]]) -> None:
        """Do what the machine wants. What is refused at once it hears when all of it is recorded, or its answer would get ahead of the rest."""
        outermost, self._obeying = not self._obeying, True
        try:
            broken: Exception | None = None
            for cause, command in commands:
                try:
                    self._obey(command, cause)
                except Exception as error:
                    # All of it is recorded before the run stops for that, or the half of it would look like another program's.
                    broken = broken or error
                    self._state_anyway(command, cause)
            if broken is not None:
                raise broken
            while outermost and self._refused:
                self._drive.deliver(self._refused.popleft())
        finally:
            if outermost:
                self._obeying = False
                self._refused.clear()

    def _state_anyway(self, command: Command, cause: int) -> None:
        if isinstance(command, CallTool) and command.number > self.state.numbers:
            self._propose(command, cause, "handover")

    def _obey(self, command: Command, cause: int) -> None:
        match command:
            case CallTool():
                self._call(command, cause)
            case Finish(Succeeded(output)):
                self._pen.record(RunSucceeded(self._pen.pack(output)), cause=cause)
            case Finish(Failed(failure)):
                self._pen.record(RunFailed(failure), cause=cause)
            case Finish(Cancelled()):
                self._pen.record(RunCancelled(self.state.cancel.reason if self.state.cancel else None), cause=cause)
            case AskApproval():
                self._ask(command, cause)
            case StartChild():
                self._start_child(command, cause)
            case Record(PlanGenerated() as body):
                # A plan can be too large to lie in place, and the machine knows no blobs.
                assert body.plan.inline is not None, body.digest
                self._pen.record(structs.replace(body, plan=self._pen.pack(body.plan.inline)), cause=cause)
            case Record(body):
                self._pen.record(body, cause=cause)
            case Abandon(number, stop):
                self.unwanted.add(number)
                self._abandon(number, stop)

    def _abandon(self, number: int, stop: bool) -> None:
        if number in self.state.alive or number in self.state.pending:
            self.orphans.add(number)
        elif number in self.state.open:
            call = self.state.open[number]
            if stop:
                self._calls.unwanted(call, cancel_effects=self.state.cancel is not None)
            self._give_up_if_idle(number)

    def _call(self, command: CallTool, cause: int) -> None:
        """A call that the agent makes: it starts, or it is proposed and waits for a person, for its turn or for money."""
        tool, number = command.tool, command.number
        self.asked[number] = command
        if self._drive.giving_up:
            self._propose(command, cause, "handover")
            return
        if (asks := self._asks_now(command)) is not False:
            self._propose(command, cause, "approval")
            self._ask_for(command, asks)
            return
        barrier = self._barrier(number, tool)
        match barrier:
            case None:
                self._initiate(command, cause)
            case Later(at, has_place):
                self._propose(command, cause, "rate" if tool.rate is not None else "budget", at if has_place else None)
                self._calls.waits[number] = at
            case Over():
                self._propose(command, cause, "budget")
                self._over_budget(self.state.calls[number], barrier)

    def _barrier(self, number: int, tool: Tool[..., Any]) -> Later | Over | None:
        """What keeps the call from starting now."""
        if tool.rate is None and not self._pen.metered:
            return None
        return self._gate.check(number, tool.rate, tool.estimate)

    def _propose(
        self, command: CallTool, cause: int, until: Literal["approval", "rate", "budget", "handover"], at: int | None = None
    ) -> None:
        tool, number = command.tool, command.number
        args, digest = self._pen.pack(command.args), codec.digest(command.args)
        self._pen.record(
            ToolCallProposed(tool.name, tool.effect, self.state.keys.key(number, tool.name), args, digest, until, at),
            call=number,
            cause=cause,
        )

    def _over_budget(self, call: CallState, over: Over) -> None:
        unstarted = call.phase in ("proposed", "approved", "retry_wait", "idle", "failing") and not call.doubtful
        lost = call.failure is not None and call.failure.type == LOST
        if over.limits.on_exceed == "fail" and unstarted and not lost:  # what may have happened is not told as a failure
            self._refuse(call, Failure(kind="over_budget", type="BudgetExceeded", message=_over_words(over.what)))
            return
        self._pen.record(over.what, cause=call.last_seq)
        self._drive.attend("budget", f"call {call.number} ({call.tool}): {_over_words(over.what)}")

    def _refuse(self, call: CallState, failure: Failure) -> None:
        """The call fails before it has begun."""
        failed = self.tool_call(call).tool.events.failed
        event = self._pen.record(failed(failure, attempt=call.attempt, final=True), call=call.number, cause=call.last_seq)
        self._refused.append(event)
        if not self._obeying:
            self.obey_all(())

    def _initiate(self, command: CallTool, cause: int) -> None:
        tool, number = command.tool, command.number
        self._pen.record(
            tool.events.initiated(
                tool=tool.name,
                effect=tool.effect,
                key=self.state.keys.key(number, tool.name) if tool.shows_key else "",
                args=self._pen.pack(command.args),
                timeout_s=tool.timeout_s,
                settle_s=tool.settle_s,
                reconcile=tool.reconciler is not None,
                pinned=self._pinned(tool),
                estimate=tool.estimate,
            ),
            call=number,
            cause=cause,
        )
        self._ready(self.state.calls[number])

    # -- approvals and children -----------------------------------------------------------------------------------------
    def _ask(self, command: AskApproval, cause: int) -> None:
        number, policy = command.number, command.policy
        self.asked[number] = command
        now, ident = self._host.clock.now(), approval_id(self._claimed.row.tenant, self._drive.run_id, number)
        payload = self._pen.pack(command.input)
        body = policy.request(ident, command.action, payload, command.input, now=now, reason=command.reason)
        self._pen.record(body, call=number, cause=cause)
        self._asks.watch(self.state.asks[number])

    def _ask_for(self, command: CallTool, asks: str | bool) -> None:
        """Ask whether the call may be made: the exact call, and what of it a decision may change."""
        tool, number = command.tool, command.number
        policy = tool.approval
        assert policy is not None
        impossible = policy.check_for(self._claimed.row.actor)
        if impossible is not None:
            failure = Failure(kind="refused", type="InvalidInput", message=f"its approval could never be granted: {impossible}")
            self._refuse(self.state.calls[number], failure)
            return
        editable = self._pen.pack(codec.encode(tool.editable_schema())) if policy.editable else None
        body = policy.request(
            approval_id(self._claimed.row.tenant, self._drive.run_id, number),
            tool.name,
            self._pen.pack(command.args),
            command.args,
            now=self._host.clock.now(),
            reason=asks if isinstance(asks, str) else None,
            tool=tool.name,
            editable_schema=editable,
        )
        self._pen.record(body, call=number, cause=self.state.seq)
        self._asks.watch(self.state.asks[number])

    def _start_approved(self, call: CallState) -> None:
        """The call that somebody has approved, exactly as they have: the commit that starts it consumes the approval (G9)."""
        ask, asked = self.state.asks[call.number], self.asked[call.number]
        assert isinstance(asked, CallTool) and ask.outcome == "approved"
        expires_at, now = ask.request.expires_at, self._host.clock.now()
        if expires_at is not None and expires_at - _START_MARGIN_US <= now:
            if expires_at <= now:
                self._asks.expire(ask)
            else:
                self._asks.waits[call.number] = expires_at
            return
        try:
            asked = self._as_approved(ask, asked)
        except InvalidInput as refused:
            failure = Failure(kind="refused", type="InvalidInput", message=f"as edited by {ask.by}: {refused}")
            failed = asked.tool.events.failed
            self._drive.deliver(self._pen.record(failed(failure, attempt=0, final=True), call=call.number, cause=call.last_seq))
            return
        barrier = self._barrier(call.number, asked.tool)
        if isinstance(barrier, Later):
            self._wait_for_turn(call, barrier)
            if expires_at is not None:
                self._asks.waits[call.number] = expires_at  # its turn may come too late
        elif isinstance(barrier, Over):
            self._over_budget(call, barrier)
        else:
            self._asks.waits.pop(call.number, None)
            self._consume(call, ask, asked)

    def _as_approved(self, ask: AskState, asked: CallTool) -> CallTool:
        if not ask.edited:
            return asked
        assert ask.input is not None
        edited = CallTool(asked.number, asked.tool, asked.tool.edited(asked.args, self._drive.load(ask.input)))
        self.asked[asked.number] = edited
        return edited

    def _consume(self, call: CallState, ask: AskState, asked: CallTool) -> None:
        tool, digest = asked.tool, codec.digest(asked.args)
        # Checked here and again by the store in the very commit: what starts is what was approved, to the byte.
        if digest != ask.digest:
            self._drive.attend(
                "error", f"call {call.number} ({call.tool}): its arguments are not those that were approved; it was not made"
            )
            return
        initiated = tool.events.initiated(
            tool=tool.name,
            effect=tool.effect,
            key=call.recorded_key,
            attempt=call.attempt + 1,
            args=self._pen.pack(asked.args) if ask.edited else None,
            digest=digest,
            timeout_s=tool.timeout_s,
            settle_s=tool.settle_s,
            reconcile=tool.reconciler is not None,
            approval=ask.request.approval,
            pinned=self._pinned(tool),
            estimate=tool.estimate,
        )
        self._approved[call.number] = copy(call)
        self._pen.record(initiated, call=call.number, cause=call.last_seq)
        self.due.append(call.number)  # also a read: the approval is used up before anything is done with it

    def can_take_back(self, number: int) -> bool:
        """Whether the last that was recorded of the call, and is not durable yet, is the intent that uses its approval up."""
        before = self._approved.get(number)
        if before is None:
            return False
        call = self.state.calls[number]
        return call.attempt == before.attempt + 1 and call.last_seq == call.intent_seq > self._pen.durable_seq

    def take_back(self, number: int) -> None:
        """The approval is over before the commit that starts the call: it has not begun, and waits for that answer."""
        intent = self._pen.take_back(self._approved.pop(number))
        if intent.pinned is not None:
            self._compared.discard(f"tool {intent.tool}")
        if number in self.due:
            self.due.remove(number)

    def _start_child(self, command: StartChild, cause: int) -> None:
        agent, number = command.agent, command.number
        self.asked[number] = command
        assert self.state.created is not None
        body = ChildStarted(
            agent=agent.name,
            version=agent.version,
            run_id=child_id(self._drive.run_id, number),
            input=self._pen.pack(command.args),
            digest=codec.digest(command.args),
            target=agent.target,
            queue=agent.queue,
            budget=agent.budget,
            key_scheme=KEY_SCHEME,
            key_namespace=self.state.created.key_namespace,
        )
        self._pen.record(body, call=number, cause=cause)
        self.urgent = True  # the commit creates the child
        self._host.serve_too(agent)

    def let_orphans_go(self) -> None:
        """Withdraw the approvals and cancel the children that nobody waits for. They exist: all that is recorded here is durable."""
        orphans, self.orphans = self.orphans, set()
        for number in sorted(orphans.intersection(self.state.asks)):
            ask = self.state.asks[number]
            if ask.pending or (number in self.state.open and self.state.open[number].phase == "approved"):
                self._asks.withdraw(ask)
        reason = self.state.cancel.reason if self.state.cancel else None
        for number in sorted(orphans.intersection(self.state.alive)):
            child = self.state.alive[number]

            def done(error: Exception | None, number: int = number) -> None:
                if error is not None:
                    log.error("run %s: its child cannot be cancelled yet: %s; trying again", self._drive.run_id, error)
                    self._host.loop.call_later(1.0, self._cancel_later, number)

            self._host.cancel_run(child.run_id, f"run {self._drive.run_id}", reason or "its parent does not wait for it any more", done)

    def _cancel_later(self, number: int) -> None:
        self.orphans.add(number)
        self._drive.pump()

    def _attempt_again(self, call: CallState, attempt: int, cause: int) -> None:
        tool = self.tool_call(call).tool
        ask = self.state.asks.get(call.number)
        if ask is not None and not call.begun and ask.request.expires_at is not None and ask.request.expires_at <= self._host.clock.now():
            # Its intent used the approval up, and its worker gave the run up before it began: nothing begins after the time (G9).
            failure = refusal("expired", ask.by, None)
            failed = tool.events.failed
            self._drive.deliver(self._pen.record(failed(failure, attempt=call.attempt, final=True), call=call.number, cause=cause))
            return
        if self._was_lost(call):
            cause = self._lose(call)
        barrier = self._barrier(call.number, tool)
        if isinstance(barrier, Later):
            self._wait_for_turn(call, barrier)
            return
        if isinstance(barrier, Over):
            self._over_budget(call, barrier)
            return
        self._gate.forget(call.number)
        again = tool.events.initiated(
            tool=call.tool,
            effect=call.effect,
            key=call.recorded_key,
            attempt=attempt,
            timeout_s=tool.timeout_s,
            settle_s=tool.settle_s,
            reconcile=tool.reconciler is not None,
            pinned=self._pinned(tool) if attempt == 1 else None,
            estimate=tool.estimate,
        )
        self._pen.record(again, call=call.number, cause=cause)
        self._ready(call)

    def _wait_for_turn(self, call: CallState, later: Later) -> None:
        if later.has_place and call.turn != later.at:
            self._pen.record(RetryScheduled(attempt=call.attempt + 1, at=later.at, turn=True), call=call.number, cause=call.last_seq)
        self._calls.waits[call.number] = later.at

    def _ready(self, call: CallState) -> None:
        if call.effect == "read" and not self._pen.metered:
            # Reading changes nothing: a crash from here on costs at most the same reading again, so nothing waits for a commit. What
            # is charged to a budget does wait: until the commit no other run that shares it would know of it (G14).
            self._calls.start(call, self.tool_call(call))
        else:
            self.due.append(call.number)

    def tool_call(self, call: CallState) -> CallTool:
        asked = self.asked[call.number]
        assert isinstance(asked, CallTool), call
        return asked

    # -- calls that nobody is performing ------------------------------------------------------------------------------
    def consider(self, call: CallState) -> None:
        """Decide about an open call that nobody is performing."""
        wanted = call.number not in self.unwanted
        ask = self.state.asks.get(call.number)
        asked = self.tool_call(call)
        if ask is not None and ask.edited and ask.input is not None and call.attempt:
            # It has begun: whatever today's code would make of them, these are its arguments.
            asked = self.asked[call.number] = CallTool(call.number, asked.tool, self._drive.load(ask.input))
        match call.phase:
            case "awaiting_approval":
                if not wanted:
                    self.orphans.add(call.number)  # else the approval is watched on its own
            case "proposed" | "failing" if wanted and ask is None and not call.begun and (asks := self._asks_now(asked)) is not False:
                self._ask_for(asked, asks)  # the run was given up before anybody could be asked, or before the call began
            case "approved":
                self._start_approved(call) if wanted else self.orphans.add(call.number)
            case _:
                self.follow(call, self._calls.consider(call, asked, wanted=wanted))

    def _asks_now(self, asked: CallTool) -> str | bool:
        """Whether somebody has to agree to the call, and why, by the tool's own rule."""
        if asked.tool.approval is None:
            return False
        begun_s = self._host.loop.time()
        asks: str | bool = asked.tool.asks(asked.args)
        if (took_s := self._host.loop.time() - begun_s) > _SLOW_RULE_S:
            log.warning("the approval rule of tool %s took %.1f s, and every run of this worker waited for it", asked.tool.name, took_s)
        return asks

    def follow(self, call: CallState, verdict: Perform | GiveUp | Park | None) -> None:
        match verdict:
            case Perform(attempt):
                self._attempt_again(call, attempt, self._why_again(call))
            case GiveUp():
                if self._was_lost(call):
                    self._lose(call)  # nobody asks again, and yet it has been asked
                self._give_up(call)
            case Park(why):
                if call.phase != "in_doubt" or why not in (call.doubt or ""):
                    self._doubt(call, f"{why}; {call.doubt}"[:500] if call.doubt else why)
            case None:
                if self._calls.busy(call.number) and call.phase != "in_doubt":
                    self._doubt(call, "its worker died inside it; its reconcile hook is being asked")

    def _was_lost(self, call: CallState) -> bool:
        """Whether its worker ended while a model was asked, or inside an attempt with a cost that is simply made again."""
        if call.phase != "started" or call.effect not in ("read", "idempotent"):
            return False
        return self.tool_call(call).tool.events is OF_MODEL or call.estimate is not None

    def _lose(self, call: CallState) -> int:
        """Record the lost attempt. It may have been paid for: without this charge a budget would have no bound across deaths (T33)."""
        lost = lost_answer("its worker ended", self.tool_call(call).tool)
        failed = self.tool_call(call).tool.events.failed
        return self._pen.record(failed(lost, attempt=call.attempt, usage=call.estimate), call=call.number, cause=call.intent_seq).seq

    def _why_again(self, call: CallState) -> int:
        """The event that made another attempt necessary: a failure, a resolved doubt, or the claim after a crash."""
        return call.last_seq if call.last_seq > call.intent_seq else self._claimed.row.seq

    def _doubt(self, call: CallState, why: str) -> None:
        self._pen.record(ToolCallInDoubt(call.attempt, why), call=call.number, cause=self._claimed.row.seq)

    def _give_up(self, call: CallState) -> None:
        failure = Failure(kind="cancelled", type="Cancelled", message="nobody waits for this call any more")
        failed = self.tool_call(call).tool.events.failed
        event = self._pen.record(failed(failure, attempt=call.attempt, final=True), call=call.number, cause=call.last_seq)
        self._drive.deliver(event)

    def _give_up_if_idle(self, number: int) -> None:
        call = self.state.calls[number]
        if call.phase == "approved":
            self._calls.forget(number)  # it may be waiting for its turn
            self.orphans.add(number)
            return
        if call.doubtful:
            # An earlier attempt may have happened: that the agent has stopped waiting does not settle it. After a cancel no further one begins.
            if number in self.due and self.state.cancel is not None:
                self.due.remove(number)
                self._withdraw(call)
                self.consider(call)
            return
        if number in self.due:
            # Its intent is recorded but its effect has provably not begun: this process starts it and has not.
            self.due.remove(number)
            self._give_up(call)
        elif call.phase in ("retry_wait", "idle", "failing", "proposed"):
            self._calls.forget(number)
            self._give_up(call)

    def withdraw_due(self) -> None:
        """Say of calls whose intent is recorded that they have not begun, so that the next worker need not doubt them."""
        due, self.due = self.due, []
        for number in due:
            self._withdraw(self.state.calls[number])

    def _withdraw(self, call: CallState) -> None:
        failure = Failure(kind="not_sent", type=NOT_STARTED, message="its worker gave the run up before the call began")
        failed = self.tool_call(call).tool.events.failed
        self._pen.record(failed(failure, attempt=call.attempt), call=call.number, cause=call.intent_seq)


_UNITS = {"usd": ("$", 1_000_000, ""), "seconds": ("", 1_000_000, " s"), "tokens": ("", 1, " tokens"), "calls": ("", 1, " calls")}


def _over_words(over: BudgetExceeded) -> str:
    used, limit, wanted = (_amount(over.what, number) for number in (over.used, over.limit, over.wanted))
    # What others had reserved is given back where it was not needed: a sum that counts it is wrong as soon as somebody reads it.
    how = f"{used} of {limit}" if over.used >= over.limit else f"its {limit} do not cover {wanted} more"
    return f"the budget of run {over.budget_of} is used up: {how}"


def _amount(what: str, number: int) -> str:
    before, unit, after = _UNITS[what]
    if unit == 1:
        return f"{before}{number:,}{after}"
    whole, part = divmod(number, unit)
    decimals = f"{part:06d}".rstrip("0")
    shown = f"{whole:,}.{decimals:0<2}" if before else f"{whole:,}.{decimals}".rstrip(".")
    return f"{before}{shown}{after}"
