"""One run, from claim to rest: feeds the machine, journals what it wants, performs it, journals what came of it.

Everything here runs in plain callbacks of the worker's loop, never inside a task: an agent's own tasks are entered from here.
One activation is one append: the completion that woke the machine and the intents of the calls it makes next share a commit.

The order that matters (G2):  record intent → commit → start the effect → record result → commit, with the next intent.
While a commit is under way nothing else is recorded; what arrives meanwhile queues up and is taken in order of arrival.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Hashable, Sequence
from functools import wraps
from typing import Any, Concatenate, Literal, ParamSpec, Protocol, TypeVar

from perdure.agent import Agent
from perdure.core.attempts import Raised
from perdure.core.budget import Amounts
from perdure.core.circles import CircleWatch
from perdure.core.codec import Payload
from perdure.core.events import (
    ApprovalDecided,
    ApprovalEscalated,
    ApprovalExpired,
    ApprovalVoted,
    ApprovalWithdrawn,
    AttentionNeeded,
    Event,
    Failure,
    Reason,
    RunReleased,
    TimerFired,
    TimerSet,
    ToolCallFailed,
    ToolCallInDoubt,
    ToolCallResolved,
)
from perdure.core.failures import describe
from perdure.core.loop import DoesNotRest
from perdure.core.machine import (
    Abandon,
    Completion,
    Facts,
    Machine,
    StartChild,
    TimerDue,
)
from perdure.core.rate import Rate
from perdure.core.replay import completion_of, replay
from perdure.core.rest import Ask, Sleep, Stay, Stuck, at_rest
from perdure.core.state import RunState
from perdure.core.suspects import is_poison
from perdure.errors import Conflict, Diverged, Fenced, PerdureError, StoreUnavailable
from perdure.settings import Settings
from perdure.store.api import Claimed, InboxRow, RowChange, RunRow, Status, Store
from perdure.tool import Outcome
from perdure.tool.call import Closer
from perdure.worker.asks import Asks
from perdure.worker.calls import Calls, Ended, Performing, is_not_ready
from perdure.worker.clock import Clock
from perdure.worker.closing import Closing
from perdure.worker.commits import Commits, Writes
from perdure.worker.gate import Debts, Gate
from perdure.worker.inbox import Inbox
from perdure.worker.orders import Helps, Orders
from perdure.worker.pen import Pen
from perdure.worker.threads import Threads

log = logging.getLogger("perdure.worker")
T = TypeVar("T")
P = ParamSpec("P")
_BUSY_S = 0.02
# An approval that was given may be over by now: its call must not be started first, and refused.
_ANSWERS = (ToolCallResolved, ApprovalVoted, ApprovalEscalated, ApprovalDecided, ApprovalExpired, ApprovalWithdrawn)


class Host(Writes, Helps, Protocol):
    """What a drive needs of its worker."""

    store: Store
    settings: Settings
    clock: Clock
    threads: Threads
    closers: dict[Hashable, Closer]
    performing: Performing
    entered: str | None

    def committed(self, run_id: str, events: Sequence[Event]) -> None: ...

    def rested(self, drive: Drive) -> None: ...

    def broke(self, drive: Drive, error: Exception) -> None: ...

    @property
    def transacting(self) -> bool: ...

    def uncharged_beside(self, run_id: str, budget_of: str) -> Amounts: ...

    def is_short_of_room(self, queue: str) -> bool: ...

    def let_go_on(self, run_id: str) -> None: ...

    def has_held_since(self, then_s: float) -> bool: ...

    def consult(self, work: Callable[[], T], done: Callable[[T | Exception], None]) -> None: ...


def _whole(turn: Callable[Concatenate[Drive, P], None]) -> Callable[Concatenate[Drive, P], None]:
    """A turn that is done whole, or the drive's last."""

    @wraps(turn)
    def entered(self: Drive, /, *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            turn(self, *args, **kwargs)
        except Exception:
            raise
        except BaseException:
            # The crash window: a signal (Ctrl-C) strikes between any two lines, and the loop may turn again before the process ends.
            # What is half done here must not be gone on with, nor recorded as anybody's fault.
            self.abort()
            raise

    return entered


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
        self._pen = Pen(claimed.lease, self.state, claimed.row.head, host.clock, host.settings.inline_bytes)
        self._calls = Calls(self, self.state, self._pen, host.settings, host.clock, host.loop, host.threads, host.closers, host.performing)
        self._arrived: deque[Ended | InboxRow] = deque()
        self._read: set[int] = set()  # inbox rows that have been taken and may not be gone from the database yet
        self._gate = Gate(self.run_id, host.store, self._pen, host.clock, host)
        self._asks = Asks(self.state, host, host.clock)
        self.last_news_s = 0.0  # when a child last ended, by the loop's clock
        self._orders = Orders(self, host, claimed, self.state, self._pen, self._calls, self._gate, self._asks)
        self._inbox = Inbox(self, host.loop, self.state, self._pen, self._calls, self._asks, self._orders)
        self._commits = Commits(self, self._pen, host)
        self._shown: Status = "running"  # the status in the run's row
        self._suspect = claimed.row.crashes > 0  # the row still counts crashes that this drive has to answer
        self._precious = False  # what came of an effect is recorded and not durable yet; results of reads may wait, these may not
        self._transaction: int | None = None  # the call that the commit under way performs
        self.closing: Closing | None = None
        self._alarm: asyncio.TimerHandle | None = None
        self._flush: asyncio.TimerHandle | None = None
        self._linger: asyncio.TimerHandle | None = None

    # -- from outside: plain calls on the worker's loop ---------------------------------------------------------------
    @_whole
    def begin(self, events: Sequence[Event], debts: Debts) -> None:
        """Rebuild the machine from the journal and go on at the frontier."""
        watch = None if self._agent.circles is None else CircleWatch(self._agent.circles)
        for event in events:
            self.state.apply(event)
            if watch is not None:
                watch.observe(event, None if event.call is None else self.state.calls.get(event.call))
        self._pen.rebase()
        self._gate.open(debts)
        self._watch_circles(watch)
        if self.state.paused is not None:
            # It was given up as paused while something was on its way to it: that is read now, and the run stands still again.
            self.closing = Closing("paused", f"somebody who unpauses it; {self.state.paused.by} paused it")
        limit = self._host.settings.poison_limit
        if watch is not None and watch.circling is not None:
            self.attend("circling", watch.circling)  # its worker died before the run stood still: nothing of it is begun again
        elif is_poison(self.state.crashes, self.state.crashes_alone, limit):
            deaths = f"{self.state.crashes} workers in a row died while they drove this run, without any progress in between"
            self.attend("poison", f"{deaths}; in {self.state.crashes_alone} of these deaths it was the worker's only suspect")
        else:
            self.guarded(self._rebuild, events)
        self.pump()

    def receive(self, row: InboxRow) -> None:
        """Something from outside has arrived for this run."""
        if row.inbox_id not in self._read:
            self._read.add(row.inbox_id)
            self._arrived.append(row)
            self._soon()

    def drain(self) -> None:
        """Hand the run over at the next step boundary: attempts in flight may end, no new one starts."""
        if self.closing is None and not self.over:
            self.closing = Closing("queued", "another worker: the one before was drained")
            self._soon()

    def stop_attempts(self) -> None:
        """The drain has taken too long: end what is in flight; what may have happened is recorded as in doubt."""
        if not self.over:
            self._calls.stop_all()
            self._soon()

    def _soon(self) -> None:
        # Whoever calls from outside may be inside a task, where an agent's own tasks cannot be entered (CPython 3.14).
        self._host.loop.call_soon(self.pump)

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
            self._come_apart()

    def _come_apart(self) -> None:
        """A drive and its parts know each other: left to the garbage collector, thousands of ended runs would be looked through time and
        again. Whoever still calls finds that it is over."""
        del self._calls, self._orders, self._inbox, self._commits
        self._machine = None
        self._pen.observe = None

    def uncharged(self, budget_of: str) -> Amounts:
        """What is recorded here under that budget and not durable yet."""
        return self._gate.uncharged(budget_of)

    @property
    def giving_up(self) -> bool:
        return self.closing is not None

    def _watch_circles(self, watch: CircleWatch | None) -> None:
        if watch is None:
            return

        def observe(event: Event) -> None:
            circling = watch.observe(event, None if event.call is None else self.state.calls.get(event.call))
            if circling is not None:
                self.attend("circling", circling)

        self._pen.observe = observe

    # -- replay -------------------------------------------------------------------------------------------------------
    def _rebuild(self, events: Sequence[Event]) -> None:
        created = self.state.created
        assert created is not None
        facts = Facts(self.run_id, created.tenant, created.actor, created.agent, self.state.version, created.parent, created.depth)
        self._machine = self._agent.machine(facts, self.load(created.input), self._host.settings.max_steps)
        frontier = replay(self._machine, events, self.load)
        self._orders.asked, self._orders.unwanted = frontier.calls, frontier.abandoned
        self._orders.check_pins()
        open_before = list(self.state.open.values())
        known = self.state.numbers
        self._orders.obey_all(frontier.pending)
        self._read_answers()
        for call in open_before:
            # What an answer has just made begin is neither cut off nor in doubt.
            if not call.ended and call.number not in self._orders.due and not self._calls.busy(call.number):
                self._orders.consider(call)
        for ask in list(self.state.pending.values()):
            self._asks.watch(ask)
        for number, child in self.state.alive.items():
            asked = self._orders.asked[number]
            assert isinstance(asked, StartChild), child
            self._host.serve_too(asked.agent)
        for number in sorted(self._orders.unwanted):
            if number > known or number not in self.state.calls:
                self._orders.obey_all(
                    [(self.state.seq, Abandon(number))]
                )  # asked for and given up in the same breath, or a child, or an approval

    def _read_answers(self) -> None:
        """What was said about calls that were cut off, or wait for a yes, before anything else is done about those."""
        for row in [row for row in self._arrived if isinstance(row, InboxRow) and isinstance(row.body, _ANSWERS)]:
            self._arrived.remove(row)
            self._inbox.read(row)

    def load(self, payload: Payload) -> bytes:
        inline = payload.inline
        if inline is not None:
            return inline
        assert isinstance(payload.blob, str)
        return self._pen.blob(payload.blob) or self._host.store.blob(payload.blob)

    # -- the pump -----------------------------------------------------------------------------------------------------
    @_whole
    def pump(self) -> None:
        """Take what has arrived, then commit, wait or rest."""
        if self.over or self._commits.under_way or self.state.created is None:
            return  # the answer, or `begin` when the journal has been read, comes back here
        try:
            self._turn()
        except Exception as error:
            self._host.broke(self, error)

    def _turn(self) -> None:
        if self._orders.orphans and not self._pen.dirty:
            self._orders.let_orphans_go()
        while self._arrived:
            arrived = self._arrived.popleft()
            if isinstance(arrived, InboxRow):
                self._inbox.read(arrived)
            else:
                self.guarded(self._take, arrived)
        if self.closing is None and self._machine is not None and (self._machine.has_timers or self._calls.waits or self._asks.waits):
            self.guarded(self._wake_due)
        if self._may_begin and not self.state.finished and self._must_commit():
            self._commit(None)
        elif self._calls.idle() and (self.closing is not None or not self._orders.due):
            self._rest()
        else:
            self._arm()

    @property
    def _may_begin(self) -> bool:
        """Whether calls begin whose intents are recorded: not when the run is given up, unless only those after them lack the money."""
        return self.closing is None or self.closing.attention == "budget"

    def _must_commit(self) -> bool:
        return bool(self._orders.due) or self._precious or bool(self._orders.orphans)

    def guarded(self, work: Callable[..., None], *args: Any) -> None:
        """Run a piece of work; whatever the agent's code does wrong there parks this run and touches no other."""
        self._host.entered = self.run_id
        try:
            work(*args)
        except StoreUnavailable as error:
            # Nothing is wrong with the run: whoever takes it next reads what could not be read now.
            log.error("run %s: %s; it is handed over", self.run_id, error)
            self.closing = self.closing or Closing("queued", "another look at its journal")
        except Diverged as diverged:
            self.attend("diverged", str(diverged))
        except DoesNotRest as endless:
            self.attend("stuck", str(endless))
        except PerdureError as error:
            self.attend("error", f"{type(error).__name__}: {error}")
        except Exception as error:
            log.exception("run %s: unexpected error; the run is parked", self.run_id)
            self.attend("error", f"unexpected {type(error).__name__}: {describe(error).message}")  # its own __str__ may raise
        finally:
            self._host.entered = None

    def attend(self, reason: Reason, detail: str) -> None:
        """Stop the run until a person has looked. Attempts in flight may still end and are recorded."""
        if self.closing is None or self.closing.status == "queued":
            self.closing = Closing("needs_attention", f"a person: {reason.replace('_', ' ')}", reason)
            self._pen.record(AttentionNeeded(reason, detail), cause=self._claimed.row.seq)

    # -- what the machine wants ---------------------------------------------------------------------------------------
    def deliver(self, event: Event, completion: Completion | None = None) -> None:
        """Tell the machine what the event says, and do what it wants. When the run is being given up, the next one does that."""
        if self.closing is not None:
            return
        assert self._machine is not None
        completion = completion or completion_of(event, self.load)
        if completion is not None and not self._machine.finished:
            self._machine.cause = event.seq
            commands = self._machine.deliver(event.ts, completion)
            if len(commands) > 1:
                # What was given up comes last: telling the machine so may end the run, and nothing can be recorded after its end.
                commands.sort(key=lambda command: isinstance(command, Abandon))
            if commands:
                self._orders.obey_all([(event.seq, command) for command in commands])

    # -- what came of an attempt --------------------------------------------------------------------------------------
    def _take(self, ended: Ended) -> None:
        call = self.state.calls[ended.number]
        asked = self._orders.tool_call(call)
        if call.ended or ended.attempt != call.attempt or (isinstance(ended.result, Outcome) and call.phase != "in_doubt"):
            return  # somebody has settled that attempt meanwhile
        wanted = call.number not in self._orders.unwanted
        for body in self._calls.outcome(call, ended, asked, wanted=wanted, closing=self.closing is not None):
            event = self._pen.record(body, call=call.number, cause=call.intent_seq if call.phase == "started" else call.last_seq)
            self._precious = self._precious or call.effect != "read"
            if asked.tool.rate is not None and isinstance(body, ToolCallFailed | ToolCallInDoubt):
                self._hear_of_limit(asked.tool.rate, body.failure)
            self.deliver(event)
        if isinstance(ended.result, Raised) and is_not_ready(ended.result.failure) and wanted and not call.ended:
            self.attend("error", f"call {call.number} ({call.tool}) cannot be made here, and was not: {ended.result.failure.message}")
        if not call.ended and not self._calls.busy(call.number) and self.closing is None:
            verdict = self._calls.after_unknown(call, ended, asked, wanted=wanted)
            self._orders.follow(call, verdict) if verdict is not None else self._orders.consider(call)

    def _hear_of_limit(self, rate: Rate, failure: Failure | None) -> None:
        if failure is not None and failure.kind == "rate_limited":
            wait_s = 1.0 if failure.retry_after_s is None else failure.retry_after_s
            self._hold_back(rate, self._host.clock.now() + round(wait_s * 1e6))

    def _hold_back(self, rate: Rate, until: int) -> None:
        if self._host.transacting:
            # A tool's transaction has the write lock, and the loop must not wait. Nobody can take a place in the line meanwhile either.
            self._host.loop.call_later(_BUSY_S, self._hold_back, rate, until)
        else:
            self._gate.hold_back(rate, until)

    @_whole
    def arrive(self, ended: Ended) -> None:
        """An attempt or a reconcile hook has come to an end."""
        self._arrived.append(ended)
        self.pump()

    # -- time ---------------------------------------------------------------------------------------------------------
    def _wake_due(self) -> None:
        """Fire the timers and go on with the calls that are due at this moment; timers set by that wait for the next turn."""
        assert self._machine is not None
        now = self._host.clock.now()
        self._asks.settle_due(now)
        for number in self._calls.due(now):
            self._orders.consider(self.state.calls[number])
        last = self._machine.timers_set
        while (timer := self._machine.next_timer()) is not None and timer[0] <= now and timer[1] <= last and self.closing is None:
            if self.state.finished:
                return  # a timer that nobody awaits is left over
            event = self._pen.record(TimerFired(timer[1]), cause=self._machine.timer_cause(timer[1]))
            self.deliver(event, TimerDue(timer[1]))

    def _next_wake(self) -> int | None:
        assert self._machine is not None
        timer = self._machine.next_timer()
        waits = [at for at in (timer[0] if timer else None, self._calls.next_due(), self._asks.next_due()) if at is not None]
        return min(waits, default=None)

    def _arm(self) -> None:
        """Wait: for attempts, for the next timer, and for the moment when what is buffered must go out."""
        if self._orders.urgent and self.closing is None:
            self._commit(None)
            return
        if (
            self._alarm is None
            and not self._pen.dirty
            and not self._calls.waits
            and not self._asks.waits
            and (self._machine is None or not self._machine.has_timers)
        ):
            return  # the common case: nothing but attempts to wait for
        loop, settings = self._host.loop, self._host.settings
        if self._pen.dirty and self._flush is None:
            self._flush = loop.call_later(settings.flush_s, self._flush_now)
        wake = None if self.closing is not None or self._machine is None else self._next_wake()
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        if wake is not None:
            # Never longer than a minute at a time, so that a wall clock that jumps is noticed; and never at once: what is due again
            # already waits for something beside it, which may take long.
            delay_s = min(max((wake - self._host.clock.now()) / 1e6, 0.001), 60.0)
            self._alarm = loop.call_later(delay_s, self.pump)

    def _flush_now(self) -> None:
        self._flush = None
        if not self.over and self._pen.dirty and not self._commits.under_way:
            self._commit(None)

    def _disarm(self) -> None:
        for handle in (self._alarm, self._flush, self._linger):
            if handle is not None:
                handle.cancel()
        self._alarm = self._flush = self._linger = None

    # -- rest ---------------------------------------------------------------------------------------------------------
    def _rest(self) -> None:
        """Nothing is under way: finish the run, give it up, or wait."""
        if self.state.finished:
            self._commit(RowChange(self.state.status, error=_error(self.state.failure), release=True, progress=True))
        elif self.closing is not None:
            if self.closing.attention == "budget" and self._has_room_again():
                self.closing = Closing("queued", "another worker: its budget was raised meanwhile")
            self._orders.withdraw_due()
            now = self._host.clock.now()
            self._release(
                self.closing.status, self.closing.waiting_for, now if self.closing.status == "queued" else None, self.closing.attention
            )
        else:
            self._wait()

    def _has_room_again(self) -> bool:
        return self.state.over is not None and self._gate.has_room_again(self.state.over)

    def _wait(self) -> None:
        assert self._machine is not None
        # A parent that looks after its children every now and then must not keep the room that they need to go on; nor does a run that
        # waits for money keep it from those who have reserved that.
        waits_for_others = bool(self.state.alive) or self._gate.waiting
        # A suspect that waits for money keeps its place in a group of suspects, and the runs that have reserved the money may need it.
        makes_room = waits_for_others and (self._host.is_short_of_room(self._claimed.row.queue) or (self._suspect and self._gate.waiting))
        park_after_s = 0.0 if makes_room or self._host.clock.still else self._host.settings.park_after_s
        timer = self._machine.next_timer()
        answer = at_rest(
            self.state,
            next_timer=timer,
            waits={**self._calls.waits, **self._asks.waits},
            topics=self._machine.topics,
            now=self._host.clock.now(),
            park_after_us=round(park_after_s * 1e6),
        )
        match answer:
            case Stay():
                self._arm()
            case Sleep(status, waiting_for, wake_at):
                if self._lingers():
                    return
                if timer is not None and timer[0] == wake_at and timer[1] not in self.state.timers:
                    self._pen.record(TimerSet(timer=timer[1], due=timer[0]), cause=self._machine.timer_cause(timer[1]))
                self._release(status, waiting_for, wake_at)
            case Ask(calls, wake_at):
                self._pen.record(AttentionNeeded("in_doubt", f"{answer.names}: {calls[0].doubt}"), cause=calls[0].last_seq)
                self._release("needs_attention", f"a person: {answer.names} in doubt", wake_at, "in_doubt")
            case Stuck():
                self.attend(
                    "stuck",
                    "the agent waits for something that nothing can bring about: no call, approval or child is open, "
                    "it listens for no signal, and no timer is set",
                )
                self._rest()

    def _lingers(self) -> bool:
        """Keep a run whose children end, or whose approvals are decided, one after the other: giving it up and replaying it for each
        would cost the square of them."""
        more_to_come = bool(self.state.alive) and len(self.state.alive) < len(self.state.children)
        more_to_come = more_to_come or (bool(self.state.pending) and len(self.state.pending) < len(self.state.asks))
        if not more_to_come:
            return False
        left_s = self.last_news_s + self._host.settings.linger_s - self._host.loop.time()
        if left_s <= 0:
            return False
        self._arm()
        if self._linger is None:
            self._linger = self._host.loop.call_later(left_s, self._end_linger)
        return True

    def _end_linger(self) -> None:
        self._linger = None
        self.pump()

    def _release(
        self,
        status: Literal["queued", "waiting", "waiting_approval", "paused", "needs_attention"],
        waiting_for: str,
        wake: int | None,
        attention: Reason | None = None,
    ) -> None:
        # Whatever a run waits for that is to be cancelled: until that is confirmed, it is being cancelled (T29).
        standing = "cancelling" if self.state.cancel is not None and status not in ("paused", "needs_attention") else status
        self._pen.record(RunReleased(standing, waiting_for, wake, short_since=self._gate.short_since))
        detail = self.state.attention.detail[:500] if self.state.attention else None
        self._commit(
            RowChange(standing, waiting_for=waiting_for, ready_at=wake, error=detail, attention=attention, release=True, progress=True)
        )

    # -- the commit ---------------------------------------------------------------------------------------------------
    def _commit(self, row: RowChange | None) -> None:
        """Make everything recorded so far durable; what waits for that starts afterwards."""
        self._disarm()
        precious, self._precious, self._orders.urgent = self._precious, False, False
        # What came of an effect does not wait for the transaction's tool: a crash inside it would make a doubt of a known result.
        self._transaction = None if precious else self._next_transaction()
        if self._transaction is not None:
            self._transact(self._transaction)
            return
        progress = self._suspect and self.state.crashes == 0
        if row is None and (progress or self.state.status != self._shown):
            row = RowChange(self.state.status, progress=progress)
        self._commits.write(row)

    @_whole
    def saved(self, events: Sequence[Event], row: RowChange | None, result: Event | None) -> None:
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
                if row.attention == "budget" and self._has_room_again():
                    self._host.let_go_on(self.run_id)  # whoever added to it meanwhile did not find the run stopped yet
                return
        durable = set(self._orders.due)
        if result is not None:
            self.guarded(self.deliver, result)
        sent_s = self._commits.sent_s
        if self._may_begin and any(self._too_late(sent_s, number)() for number in self._orders.due):
            # They are handed over as not begun; if the run is no longer ours, that is refused like everything else.
            self.closing = Closing("queued", "another worker: the one before gave no sign of life for longer than its lease")
        due, self._orders.due = self._orders.due, []
        for number in due:
            call = self.state.calls[number]
            # What a transaction's result has just made the agent ask for was not in this commit: it waits for the next one (G2).
            if number not in durable or call.effect == "transaction" or not self._may_begin:
                self._orders.due.append(number)
            else:
                # The intent is durable. From here on a crash leaves an intent without a result: decide() settles it by effect class.
                asked = self._orders.tool_call(call)
                waits_for_thread = asked.tool.isolate or not asked.tool.is_async
                self._calls.start(call, asked, self._too_late(sent_s, number) if waits_for_thread else None)
        self.pump()

    def _too_late(self, sent_s: float, number: int) -> Callable[[], bool]:
        """A question for any thread: may another worker have the run by now, because this process slept past its lease after the
        call's intent was sent?

        A worker that takes the run over adds `settle` to the wait before "not found" is believed. An attempt that begins within that time
        after its intent went out is covered by it. `settle` is mostly the service's own delay, so no more than the margin is used up here.
        """
        host = self._host
        covered_s = min(host.settings.reconcile_margin_s, self._calls.settle_s(self.state.calls[number]))
        return lambda: time.monotonic() - sent_s > covered_s and not host.has_held_since(sent_s)

    def broke(self, error: Exception) -> None:
        self._host.broke(self, error)

    @_whole
    def lost(self, why: str) -> None:
        # Not only what was to begin: when the run is given up, the intent and its withdrawal were in one commit, and used the approval up.
        starting = [call.number for call in self.state.calls.values() if call.intent_seq > self._pen.durable_seq]
        lapsed = [number for number in starting if self._has_lapsed(number)]
        for number in lapsed:
            self._asks.expire(self.state.asks[number])  # whoever has the run then finds it in the post, and tells the agent
        if self._can_take_back(lapsed):
            self._go_on_without(lapsed, why)
        elif lapsed:
            self._host.broke(self, Fenced(why))
        else:
            # Nothing goes on here until the row is there: the commit counts as under way.
            store = self._host.store
            self._host.consult(
                lambda: (store.get(self.run_id), store.unread(self.run_id)), lambda found: self._refused(why, starting, found)
            )

    @_whole
    def _refused(self, why: str, starting: Sequence[int], found: tuple[RunRow | None, Sequence[InboxRow]] | Exception) -> None:
        if self.over:
            return
        row, post = (None, ()) if isinstance(found, Exception) else found
        # An answer about one of these calls that lies unread may be the reason, such as the end of its approval by another worker's
        # clock. Other post explains nothing, and a refusal that stays would go around with it for ever.
        unread = [row for row in self._arrived if isinstance(row, InboxRow)] + [row for row in post if row.inbox_id not in self._read]
        answers = [letter for letter in unread if letter.call in starting and isinstance(letter.body, _ANSWERS)]
        answered = {letter.call for letter in answers if letter.call is not None}
        if row is None or not self._is_still_ours(row):
            self._host.broke(self, Fenced(why))
        elif not answered:
            self._host.broke(self, Conflict(why))
        elif self._can_take_back(answered):
            for letter in answers:
                self.receive(letter)
            self._go_on_without(answered, why)
        else:
            self._host.broke(self, Fenced(why))  # whoever is next reads it first

    def _can_take_back(self, numbers: Collection[int]) -> bool:
        # A run that is given up may have said already that such a call has not begun, which makes no sense without its intent.
        return bool(numbers) and all(self._orders.can_take_back(number) for number in numbers)

    def _go_on_without(self, numbers: Collection[int], why: str) -> None:
        """What was refused for these starts is written without them. Calls in flight know nothing of it: giving the run up would cut
        them off, and make doubts of them."""
        log.info("%s; the run goes on without it", why)
        for number in numbers:
            self._orders.take_back(number)
        if self._transaction is not None and self._transaction not in numbers:
            self._orders.due.insert(0, self._transaction)
        self._precious = True  # what else was in the commit has not been written
        self._commits.change()
        self._soon()

    def _has_lapsed(self, number: int) -> bool:
        ask = self.state.asks.get(number)
        return ask is not None and ask.request.expires_at is not None and ask.request.expires_at <= self._host.clock.now()

    def _is_still_ours(self, row: RunRow) -> bool:
        """Whether the lease holds and nothing was written meanwhile: then it is what we wanted to write that was refused, such as the
        start of a call whose approval is not what the journal says, and it would be again; a person has to look."""
        return (row.holder, row.epoch, row.seq) == (self.lease.worker, self.lease.epoch, self._pen.durable_seq)

    # -- effect="transaction" -----------------------------------------------------------------------------------------
    def _next_transaction(self) -> int | None:
        if not self._may_begin or self.state.finished:
            return None
        return next((number for number in self._orders.due if self.state.calls[number].effect == "transaction"), None)

    def _transact(self, number: int) -> None:
        """The effect and its result event in one commit, together with everything recorded before it."""
        self._orders.due.remove(number)
        call = self.state.calls[number]
        asked = self._orders.tool_call(call)
        self._commits.transact(
            lambda head: self._calls.transaction(call, asked, head, self._pen), lambda error: self._rolled_back(number, error)
        )

    @_whole
    def _rolled_back(self, number: int, error: BaseException | None) -> None:
        """The effect has not happened. Its intent is still in the buffer and goes out with the failure, or with the next try."""
        if error is None:
            self._orders.due.insert(0, number)
        else:
            self._arrived.appendleft(self._calls.rolled_back(self.state.calls[number], error))
        self.pump()


def _error(failure: Failure | None) -> str | None:
    return f"{failure.type}: {failure.message}"[:500] if failure else None
