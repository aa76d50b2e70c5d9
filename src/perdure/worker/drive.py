"""One run, from claim to rest: feeds the machine, journals what it wants, performs it, journals what came of it.

Everything here runs in plain callbacks of the worker's loop, never inside a task: an agent's own tasks are entered from here.
One activation is one append: the completion that woke the machine and the intents of the calls it makes next share a commit.

The order that matters (G2):  record intent → commit → start the effect → record result → commit, with the next intent.
While a commit is under way nothing else is recorded; what arrives meanwhile queues up and is taken in order of arrival.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

from msgspec import Struct

from perdure.agent import Agent
from perdure.core import codec
from perdure.core.codec import Payload
from perdure.core.decide import GiveUp, Park, Perform
from perdure.core.events import (
    AttentionNeeded,
    CancelRequested,
    Event,
    Failure,
    RunCancelled,
    RunFailed,
    RunReleased,
    RunSucceeded,
    TimerFired,
    TimerSet,
    ToolCallFailed,
    ToolCallInDoubt,
    ToolCallInitiated,
    ToolCallResolved,
)
from perdure.core.failures import describe
from perdure.core.keys import CallKeys
from perdure.core.loop import DoesNotRest
from perdure.core.machine import (
    Abandon,
    CallTool,
    Cancelled,
    Command,
    Completion,
    Facts,
    Failed,
    Finish,
    Machine,
    Record,
    Succeeded,
    TimerDue,
)
from perdure.core.replay import completion_of, replay
from perdure.core.rest import Ask, Sleep, Stay, Stuck, at_rest
from perdure.core.state import NOT_STARTED, CallState, RunState
from perdure.errors import Diverged, Fenced, PerdureError
from perdure.settings import Settings
from perdure.store.api import Claimed, InboxRow, RowChange, Status, Store
from perdure.tool import Outcome
from perdure.worker.calls import Calls, Ended
from perdure.worker.clock import Clock
from perdure.worker.commits import Commits, Writes
from perdure.worker.pen import Pen
from perdure.worker.threads import Threads

log = logging.getLogger("perdure.worker")
Reason = Literal["in_doubt", "diverged", "poison", "stuck", "error"]


class Host(Writes, Protocol):
    """What a drive needs of its worker."""

    store: Store
    settings: Settings
    clock: Clock
    threads: Threads
    entered: str | None

    def committed(self, run_id: str, events: Sequence[Event]) -> None: ...

    def rested(self, drive: Drive) -> None: ...

    def broke(self, drive: Drive, error: Exception) -> None: ...


class Closing(Struct, frozen=True):
    """Why the run is to be given up at the next step boundary."""

    status: Literal["queued", "needs_attention"]
    waiting_for: str


class Drive:
    """Drives one claimed run until it rests: finished, parked, handed over or taken away."""

    def __init__(self, claimed: Claimed, agent: Agent[Any, Any], host: Host) -> None:
        self.run_id = claimed.lease.run_id
        self.lease = claimed.lease
        self.over = False
        self.state = RunState()
        self._claimed = claimed
        self._agent = agent
        self._host = host
        self._machine: Machine | None = None
        self._keys = CallKeys(claimed.row.tenant, self.run_id)
        self._pen = Pen(claimed.lease, self.state, claimed.row.head, host.clock, host.settings.inline_bytes)
        self._calls = Calls(self.state, host.settings, host.clock, host.loop, host.threads, self.arrive, self.pack)
        self._arrived: deque[Ended | InboxRow] = deque()
        self._read: set[int] = set()  # inbox rows that have been taken and may not be gone from the database yet
        self._asked: dict[int, CallTool] = {}  # every call that the machine has made: its tool and arguments
        self._unwanted: set[int] = set()  # calls that the agent has stopped waiting for
        self._due: list[int] = []  # calls whose intent is recorded and that start after the next commit
        self._commits = Commits(self.run_id, self._pen, host, self._saved, self._lost, lambda error: host.broke(self, error))
        self._shown: Status = "running"  # the status in the run's row
        self._suspect = claimed.row.crashes > 0  # the row still counts crashes that this drive has to answer
        self._precious = False  # what came of an effect is recorded and not durable yet; results of reads may wait, these may not
        self._closing: Closing | None = None
        self._alarm: asyncio.TimerHandle | None = None
        self._flush: asyncio.TimerHandle | None = None

    # -- from outside: plain calls on the worker's loop ---------------------------------------------------------------
    def begin(self, events: Sequence[Event]) -> None:
        """Rebuild the machine from the journal and go on at the frontier."""
        for event in events:
            self.state.apply(event)
        self._pen.rebase()
        limit = self._host.settings.poison_limit
        if self.state.crashes >= limit:
            self._attend("poison", f"{self.state.crashes} workers in a row died while they drove this run, without any progress in between")
        else:
            self._guarded(self._rebuild, events)
        self._pump()

    def receive(self, row: InboxRow) -> None:
        """Something from outside has arrived for this run."""
        if row.inbox_id not in self._read:
            self._read.add(row.inbox_id)
            self._arrived.append(row)
            self._soon()

    def drain(self) -> None:
        """Hand the run over at the next step boundary: attempts in flight may end, no new one starts."""
        if self._closing is None and not self.over:
            self._closing = Closing("queued", "another worker: the one before was drained")
            self._soon()

    def stop_attempts(self) -> None:
        """The drain has taken too long: end what is in flight; what may have happened is recorded as in doubt."""
        self._calls.stop_all()
        self._soon()

    def _soon(self) -> None:
        # Whoever calls from outside may be inside a task, where an agent's own tasks cannot be entered (CPython 3.14).
        self._host.loop.call_soon(self._pump)

    def abort(self) -> None:
        """Stop at once and write nothing more, as a crash would: somebody else has the run, or we must not go on."""
        if not self.over:
            self.over = True
            self._disarm()
            self._commits.stop()
            self._calls.drop_all()
            if self._machine is not None:
                self._machine.close()
            self._host.rested(self)

    # -- replay -------------------------------------------------------------------------------------------------------
    def _rebuild(self, events: Sequence[Event]) -> None:
        created = self.state.created
        assert created is not None
        facts = Facts(self.run_id, created.tenant, created.actor, created.agent, created.version)
        self._machine = self._agent.machine(facts, self._load(created.input), self._host.settings.max_steps)
        frontier = replay(self._machine, events, self._load)
        self._asked, self._unwanted = frontier.calls, frontier.abandoned
        open_before = list(self.state.open.values())
        for cause, command in frontier.pending:
            self._obey(command, cause)
        for call in open_before:
            self._consider(call)
        for number in sorted(frontier.abandoned.intersection(self.state.open).difference(call.number for call in open_before)):
            self._obey(Abandon(number), self.state.seq)  # asked for and given up in the same breath

    def _load(self, payload: Payload) -> bytes:
        inline = payload.inline
        if inline is not None:
            return inline
        assert isinstance(payload.blob, str)
        return self._pen.blob(payload.blob) or self._host.store.blob(payload.blob)

    # -- the pump -----------------------------------------------------------------------------------------------------
    def _pump(self) -> None:
        """Take what has arrived, then commit, wait or rest."""
        if self._commits.under_way or self.over or self.state.created is None:
            return  # the answer, or `begin` when the journal has been read, comes back here
        try:
            self._turn()
        except Exception as error:
            self._host.broke(self, error)

    def _turn(self) -> None:
        while self._arrived:
            arrived = self._arrived.popleft()
            if isinstance(arrived, InboxRow):
                self._read_inbox(arrived)
            else:
                self._guarded(self._take, arrived)
        if self._closing is None and self._machine is not None and (self._machine.has_timers or self._calls.waits):
            self._guarded(self._wake_due)
        if self._closing is None and not self.state.finished and self._must_commit():
            self._commit(None)
        elif self._calls.idle() and (self._closing is not None or not self._due):
            self._rest()
        else:
            self._arm()

    def _must_commit(self) -> bool:
        return bool(self._due) or self._precious

    def _guarded(self, work: Callable[..., None], *args: Any) -> None:
        """Run a piece of work; whatever the agent's code does wrong there parks this run and touches no other."""
        self._host.entered = self.run_id
        try:
            work(*args)
        except Diverged as diverged:
            self._attend("diverged", str(diverged))
        except DoesNotRest as endless:
            self._attend("stuck", str(endless))
        except PerdureError as error:
            self._attend("error", f"{type(error).__name__}: {error}")
        except Exception as error:
            log.exception("run %s: unexpected error; the run is parked", self.run_id)
            self._attend("error", f"unexpected {type(error).__name__}: {describe(error).message}")  # its own __str__ may raise
        finally:
            self._host.entered = None

    def _attend(self, reason: Reason, detail: str) -> None:
        """Stop the run until a person has looked. Attempts in flight may still end and are recorded."""
        if self._closing is None or self._closing.status == "queued":
            self._pen.record(AttentionNeeded(reason, detail), cause=self._claimed.row.seq)
            self._closing = Closing("needs_attention", f"a person: {reason.replace('_', ' ')}")

    # -- what the machine wants ---------------------------------------------------------------------------------------
    def _deliver(self, event: Event, completion: Completion | None = None) -> None:
        """Tell the machine what the event says, and do what it wants. When the run is being given up, the next one does that."""
        if self._closing is not None:
            return
        assert self._machine is not None
        completion = completion or completion_of(event, self._load)
        if completion is not None and not self._machine.finished:
            self._machine.cause = event.seq
            commands = self._machine.deliver(event.ts, completion)
            # What was given up comes last: telling the machine so may end the run, and nothing can be recorded after its end.
            for command in sorted(commands, key=lambda command: isinstance(command, Abandon)):
                self._obey(command, event.seq)

    def _obey(self, command: Command, cause: int) -> None:
        match command:
            case CallTool():
                self._initiate(command, cause)
            case Record(body):
                self._pen.record(body, cause=cause)
            case Abandon(number):
                self._unwanted.add(number)
                self._calls.unwanted(self.state.calls[number], cancel_effects=self.state.cancel is not None)
                self._give_up_if_idle(number)
            case Finish(Succeeded(output)):
                self._pen.record(RunSucceeded(self._pen.pack(output)), cause=cause)
            case Finish(Failed(failure)):
                self._pen.record(RunFailed(failure), cause=cause)
            case Finish(Cancelled()):
                self._pen.record(RunCancelled(self.state.cancel.reason if self.state.cancel else None), cause=cause)

    def _initiate(self, command: CallTool, cause: int) -> None:
        tool, number = command.tool, command.number
        self._asked[number] = command
        self._pen.record(
            ToolCallInitiated(
                tool=tool.name,
                effect=tool.effect,
                key=self._keys.key(number),
                args=self._pen.pack(command.args),
                digest=codec.digest(command.args),
                timeout_s=tool.timeout_s,
                reconcile=tool.reconciler is not None,
            ),
            call=number,
            cause=cause,
        )
        self._ready(self.state.calls[number])

    def _attempt_again(self, call: CallState, attempt: int, cause: int) -> None:
        tool = self._asked[call.number].tool
        again = ToolCallInitiated(
            tool=call.tool,
            effect=call.effect,
            key=call.key,
            attempt=attempt,
            timeout_s=tool.timeout_s,
            reconcile=tool.reconciler is not None,
        )
        self._pen.record(again, call=call.number, cause=cause)
        self._ready(call)

    def _ready(self, call: CallState) -> None:
        if call.effect == "read":
            # Reading changes nothing: a crash from here on costs at most the same reading again, so nothing waits for a commit.
            self._calls.start(call, self._asked[call.number])
        else:
            self._due.append(call.number)

    # -- calls that nobody is performing ------------------------------------------------------------------------------
    def _consider(self, call: CallState) -> None:
        """Decide about an open call that nobody is performing."""
        self._follow(call, self._calls.consider(call, self._asked[call.number], wanted=call.number not in self._unwanted))

    def _follow(self, call: CallState, verdict: Perform | GiveUp | Park | None) -> None:
        match verdict:
            case Perform(attempt):
                self._attempt_again(call, attempt, self._why_again(call))
            case GiveUp():
                self._give_up(call)
            case Park(why):
                if call.phase != "in_doubt" or why not in (call.doubt or ""):
                    self._doubt(call, f"{why}; {call.doubt}"[:500] if call.doubt else why)
            case None:
                if self._calls.busy(call.number) and call.phase != "in_doubt":
                    self._doubt(call, "its worker died inside it; its reconcile hook is being asked")

    def _why_again(self, call: CallState) -> int:
        """The event that made another attempt necessary: a failure, a resolved doubt, or the claim after a crash."""
        return call.last_seq if call.last_seq > call.intent_seq else self._claimed.row.seq

    def _doubt(self, call: CallState, why: str) -> None:
        self._pen.record(ToolCallInDoubt(call.attempt, why), call=call.number, cause=self._claimed.row.seq)

    def _give_up(self, call: CallState) -> None:
        failure = Failure(kind="cancelled", type="Cancelled", message="nobody waits for this call any more")
        event = self._pen.record(ToolCallFailed(failure, attempt=call.attempt, final=True), call=call.number, cause=call.last_seq)
        self._deliver(event)

    def _give_up_if_idle(self, number: int) -> None:
        call = self.state.calls[number]
        if call.doubtful:
            return  # an earlier attempt may have happened: nobody's losing interest settles that
        if number in self._due:
            # Its intent is recorded but its effect has provably not begun: this process starts it and has not.
            self._due.remove(number)
            self._give_up(call)
        elif call.phase in ("retry_wait", "idle", "failing"):
            self._calls.forget(number)
            self._give_up(call)

    # -- what came of an attempt --------------------------------------------------------------------------------------
    def _take(self, ended: Ended) -> None:
        call, asked = self.state.calls[ended.number], self._asked[ended.number]
        if call.ended or ended.attempt != call.attempt or (isinstance(ended.result, Outcome) and call.phase != "in_doubt"):
            return  # somebody has settled that attempt meanwhile
        wanted = call.number not in self._unwanted
        for body in self._calls.outcome(call, ended, asked, wanted=wanted, closing=self._closing is not None):
            event = self._pen.record(body, call=call.number, cause=call.intent_seq if call.phase == "started" else call.last_seq)
            self._precious = self._precious or call.effect != "read"
            self._deliver(event)
        if not call.ended and not self._calls.busy(call.number) and self._closing is None:
            verdict = self._calls.after_unknown(call, ended, asked, wanted=wanted)
            self._follow(call, verdict) if verdict is not None else self._consider(call)

    def pack(self, encoded: bytes) -> Payload:
        return self._pen.pack(encoded)

    def arrive(self, ended: Ended) -> None:
        """An attempt or a reconcile hook has come to an end."""
        self._arrived.append(ended)
        self._pump()

    def _read_inbox(self, row: InboxRow) -> None:
        body = row.body
        if body is None:
            self._pen.leave(row.inbox_id)
            self._attend("error", f"something from outside (inbox row {row.inbox_id}) was written by a newer perdure; upgrade this worker")
            return
        self._pen.consume(row.inbox_id)
        match body:
            case CancelRequested() if self.state.cancel is None and not self.state.finished:
                event = self._pen.record(body)
                self._guarded(self._deliver, event)
            case ToolCallResolved() if row.call in self.state.open and self._is_about(body, self.state.open[row.call]):
                call = self.state.open[row.call]
                self._calls.forget(row.call)
                event = self._pen.record(body, call=row.call, cause=call.last_seq)
                self._guarded(self._deliver, event)
                if not call.ended and self._closing is None:
                    self._guarded(self._consider, call)
            case _:
                log.warning("run %s: %s came too late and changes nothing", self.run_id, body.__struct_config__.tag)

    @staticmethod
    def _is_about(answer: ToolCallResolved, call: CallState) -> bool:
        """Whether the answer is about the attempt that is in doubt now, and not about one before it."""
        return call.phase == "in_doubt" and answer.attempt == call.attempt

    # -- time ---------------------------------------------------------------------------------------------------------
    def _wake_due(self) -> None:
        """Fire the timers and go on with the calls that are due at this moment; timers set by that wait for the next turn."""
        assert self._machine is not None
        now = self._host.clock.now()
        for number in self._calls.due(now):
            self._consider(self.state.calls[number])
        last = self._machine.timers_set
        while (timer := self._machine.next_timer()) is not None and timer[0] <= now and timer[1] <= last and self._closing is None:
            if self.state.finished:
                return  # a timer that nobody awaits is left over
            event = self._pen.record(TimerFired(timer[1]), cause=self._machine.timer_cause(timer[1]))
            self._deliver(event, TimerDue(timer[1]))

    def _next_wake(self) -> int | None:
        assert self._machine is not None
        timer = self._machine.next_timer()
        waits = [at for at in (timer[0] if timer else None, self._calls.next_due()) if at is not None]
        return min(waits, default=None)

    def _arm(self) -> None:
        """Wait: for attempts, for the next timer, and for the moment when what is buffered must go out."""
        if (
            self._alarm is None
            and not self._pen.dirty
            and not self._calls.waits
            and (self._machine is None or not self._machine.has_timers)
        ):
            return  # the common case: nothing but attempts to wait for
        loop, settings = self._host.loop, self._host.settings
        if self._pen.dirty and self._flush is None:
            self._flush = loop.call_later(settings.flush_s, self._flush_now)
        wake = None if self._closing is not None or self._machine is None else self._next_wake()
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        if wake is not None:
            # Never longer than a minute at a time, so that a wall clock that jumps is noticed.
            delay_s = min(max((wake - self._host.clock.now()) / 1e6, 0.0), 60.0)
            self._alarm = loop.call_later(delay_s, self._pump)

    def _flush_now(self) -> None:
        self._flush = None
        if self._pen.dirty and not self._commits.under_way and not self.over:
            self._commit(None)

    def _disarm(self) -> None:
        for handle in (self._alarm, self._flush):
            if handle is not None:
                handle.cancel()
        self._alarm = self._flush = None

    # -- rest ---------------------------------------------------------------------------------------------------------
    def _rest(self) -> None:
        """Nothing is under way: finish the run, give it up, or wait."""
        if self.state.finished:
            self._commit(RowChange(self.state.status, error=_error(self.state.failure), release=True, progress=True))
        elif self._closing is not None:
            self._withdraw_due()
            now = self._host.clock.now()
            self._release(self._closing.status, self._closing.waiting_for, now if self._closing.status == "queued" else None)
        else:
            self._wait()

    def _wait(self) -> None:
        assert self._machine is not None
        settings = self._host.settings
        answer = at_rest(
            self.state,
            next_timer=self._machine.next_timer(),
            waits=self._calls.waits,
            now=self._host.clock.now(),
            park_after_us=round(settings.park_after_s * 1e6),
        )
        match answer:
            case Stay():
                self._arm()
            case Sleep(wake_at, waiting_for, timer):
                if timer is not None and timer not in self.state.timers:
                    self._pen.record(TimerSet(timer=timer, due=wake_at), cause=self._machine.timer_cause(timer))
                self._release("waiting", waiting_for, wake_at)
            case Ask(calls, wake_at):
                self._pen.record(AttentionNeeded("in_doubt", f"{answer.names}: {calls[0].doubt}"), cause=calls[0].last_seq)
                self._release("needs_attention", f"a person: {answer.names} in doubt", wake_at)
            case Stuck():
                self._attend("stuck", "the agent waits for something that nothing can bring about: no call is open and no timer is set")
                self._rest()

    def _withdraw_due(self) -> None:
        """Say of calls whose intent is recorded that they have not begun, so that the next worker need not doubt them."""
        due, self._due = self._due, []
        for number in due:
            call = self.state.calls[number]
            failure = Failure(kind="not_sent", type=NOT_STARTED, message="its worker gave the run up before the call began")
            self._pen.record(ToolCallFailed(failure, attempt=call.attempt), call=number, cause=call.intent_seq)

    def _release(self, status: Literal["queued", "waiting", "needs_attention"], waiting_for: str, wake: int | None) -> None:
        self._pen.record(RunReleased(status, waiting_for, wake))
        attention = self.state.attention.detail[:500] if self.state.attention else None
        self._commit(RowChange(status, waiting_for=waiting_for, ready_at=wake, error=attention, release=True, progress=True))

    # -- the commit ---------------------------------------------------------------------------------------------------
    def _commit(self, row: RowChange | None) -> None:
        """Make everything recorded so far durable; what waits for that starts afterwards."""
        self._disarm()
        precious, self._precious = self._precious, False
        number = self._next_transaction()
        # What came of an effect does not wait for the transaction's tool: a crash inside it would make a doubt of a known result.
        if number is not None and not precious:
            self._transact(number)
            return
        progress = self._suspect and self.state.crashes == 0
        if row is None and (progress or self.state.status != self._shown):
            row = RowChange(self.state.status, progress=progress)
        self._commits.write(row)

    def _saved(self, events: Sequence[Event], row: RowChange | None, result: Event | None) -> None:
        try:
            self._host.committed(self.run_id, events)
            self._go_on(row, result)
        except Exception as error:
            self._host.broke(self, error)

    def _go_on(self, row: RowChange | None, result: Event | None) -> None:
        if row is not None:
            self._shown, self._suspect = row.status, self._suspect and not row.progress
            if row.release:
                self.abort()
                return
        durable = set(self._due)
        if result is not None:
            self._guarded(self._deliver, result)
        due, self._due = self._due, []
        for number in due:
            call = self.state.calls[number]
            # What a transaction's result has just made the agent ask for was not in this commit: it waits for the next one (G2).
            if number not in durable or call.effect == "transaction" or self._closing is not None:
                self._due.append(number)
            else:
                # The intent is durable. From here on a crash leaves an intent without a result: decide() settles it by effect class.
                self._calls.start(call, self._asked[number])
        self._pump()

    def _lost(self, why: str) -> None:
        # Refused although nobody else has the run: our own commit, of unknown outcome, has arrived after all. Then it is given up.
        self._host.broke(self, Fenced(why))

    # -- effect="transaction" -----------------------------------------------------------------------------------------
    def _next_transaction(self) -> int | None:
        if self._closing is not None or self.state.finished:
            return None
        return next((number for number in self._due if self.state.calls[number].effect == "transaction"), None)

    def _transact(self, number: int) -> None:
        """The effect and its result event in one commit, together with everything recorded before it."""
        self._due.remove(number)
        call, asked = self.state.calls[number], self._asked[number]
        self._commits.transact(
            lambda head: self._calls.transaction(call, asked, head, self._pen), lambda error: self._rolled_back(number, error)
        )

    def _rolled_back(self, number: int, error: BaseException | None) -> None:
        """The effect has not happened. Its intent is still in the buffer and goes out with the failure, or with the next try."""
        if error is None:
            self._due.insert(0, number)
        else:
            self._arrived.appendleft(self._calls.rolled_back(self.state.calls[number], error))
        self._pump()


def _error(failure: Failure | None) -> str | None:
    return f"{failure.type}: {failure.message}"[:500] if failure else None
