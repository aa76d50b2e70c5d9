"""Drives one claimed run: the engine around the run core.

The core (core/run_core.py) has the rules and says what to do. A drive makes the core's appends durable, performs the
attempts, asks the reconcile hooks and sets the timers. This is one loop: an input goes into the core, the drive
carries out the step that comes out, and the results of that step are the next inputs.

A drive runs only in plain callbacks of the worker's loop, never inside a task, because a drive enters the agent's own
tasks.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from msgspec import structs

from perdure.agent import Agent
from perdure.core import codec
from perdure.core.approval import Expire, Withdraw
from perdure.core.budget import Amounts, Charge, Ledger, amounts_of
from perdure.core.events import Event, Failure, ModelCallCompleted, ModelCallInitiated, ToolCallCompleted, ToolCallInitiated
from perdure.core.failures import describe
from perdure.core.identity import Sealed, seal, seal_all
from perdure.core.outcomes import Outcome, Performed
from perdure.core.rate import Rate
from perdure.core.redaction import Scrubber
from perdure.core.run_core import RunCore, RunSettings, has_room_again
from perdure.core.state import RunState
from perdure.core.steps import (
    Answer,
    AppendCommitted,
    AppendRefused,
    AttemptEnded,
    Begin,
    Broken,
    CancelChild,
    ClockReached,
    Crowded,
    Drain,
    HookAnswered,
    InboxRow,
    Input,
    JournalRead,
    LedgersRead,
    LimitUnanswered,
    NotSettled,
    ParkedRun,
    Posted,
    Question,
    Rested,
    RolledBack,
    Settle,
    Step,
    StopAttempts,
)
from perdure.core.steps import StepAppend as CoreAppend
from perdure.core.trace_context import SpanContext, span_context
from perdure.engine.artifacts import Vaults
from perdure.engine.clock import Clock
from perdure.engine.counts import Counts
from perdure.engine.local.attempts import Attempt, perform_in_transaction, reconcile, redacted_texts, secrets_in
from perdure.engine.local.limits import Debts, OneAtATime, answer, look
from perdure.engine.local.progress import ProgressKeeper
from perdure.engine.local.task_cleanup import cancel
from perdure.engine.threads import Threads
from perdure.errors import Conflict, Fenced, NotFound, RunEnded, StoreError, StoreUnavailable, in_full
from perdure.settings import Settings
from perdure.store.api import Append, Appended, Claimed, Committed, ProgressRow, Refused, RunRow, Store
from perdure.store.writer import GroupCommit
from perdure.tool.call import Call, Closer
from perdure.tool.secret import Resolver, resolve

if TYPE_CHECKING:
    from perdure.otel import RunSpans, Telemetry

log = logging.getLogger("perdure.worker")
T = TypeVar("T")
Performing = Callable[[Any], Any]  # takes a tool or a model call, and returns the object that is performed instead
# Events that only affect their own run: the worker need not look at them.
_PLAIN = frozenset((ToolCallInitiated, ToolCallCompleted, ModelCallInitiated, ModelCallCompleted))
_NOTHING = Step()  # a step that asks for nothing
_LEVELS = {"info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
_BUSY_S = 0.02
_LONGEST_TURN_S = 0.005
_AGAIN_S = 1.0


class ToolRaised(Exception):
    """What became of a tool that raised an exception inside a transaction; the transaction was rolled back."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.type)
        self.failure = failure


class Host(Protocol):
    """The part of a worker that a drive uses."""

    loop: asyncio.AbstractEventLoop
    store: Store
    settings: Settings
    run_settings: RunSettings
    clock: Clock
    ids: Iterator[str]
    blobs: Mapping[str, bytes]
    threads: Threads
    closers: dict[Hashable, Closer]
    vaults: Vaults
    secrets: Resolver
    performing: Performing | None
    observers: Sequence[Callable[[str, Sequence[Event]], None]]
    group: GroupCommit
    commits_here: bool
    entered: str | None
    counts: Counts
    telemetry: Telemetry | None

    @property
    def transacting(self) -> bool: ...

    def commit(self, append: Append, done: Callable[[Appended | Exception], None]) -> None: ...

    def transact(
        self, head: Append, work: Callable[[Any], tuple[Append, Any]], done: Callable[[tuple[Appended, Any] | Exception], None]
    ) -> None: ...

    def decide(self, approval: str, judgement: Expire | Withdraw, done: Callable[[Exception | None], None]) -> None: ...

    def cancel_run(self, run_id: str, by: str, reason: str, done: Callable[[Exception | None], None]) -> None: ...

    def consult(self, work: Callable[[], T], done: Callable[[T | Exception], None]) -> None: ...

    def serve_too(self, agent: Agent[Any, Any]) -> None: ...

    def committed(self, run_id: str, sealed: Sequence[Sealed]) -> None: ...

    def observe(self, run_id: str, sealed: Sequence[Sealed]) -> None: ...

    def rested(self, drive: Drive) -> None: ...

    def keep_parked(self, run_id: str, run: ParkedRun, agent: Agent[Any, Any]) -> None: ...

    def broke(self, drive: Drive, error: Exception) -> None: ...

    questions: OneAtATime
    progress: ProgressKeeper

    def uncharged_beside(self, run_id: str, budget_of: str) -> Amounts: ...

    def is_short_of_room(self, queue: str) -> bool: ...

    def unpause_after_raise(self, run_id: str) -> None: ...

    def has_held_since(self, then_s: float) -> bool: ...

    def beat(self) -> float: ...


class Drive:
    """Drives one claimed run until it rests: it is finished, parked or released, or another worker took it over."""

    def __init__(self, claimed: Claimed, agent: Agent[Any, Any], host: Host) -> None:
        self.run_id = claimed.lease.run_id
        self.lease = claimed.lease
        self.over = False
        self._row = claimed.row
        self._agent = agent
        self._host = host
        self._core = RunCore(self.run_id, agent, host.run_settings, host.ids, host.blobs)
        self._head = claimed.row.head  # hash of the last durable event
        self._inputs: deque[Input] = deque()
        self._stepping = False
        self._asked = False  # the turn that is under way has asked the store a question
        self._attempts: dict[int, Attempt] = {}
        self._hooks: dict[int, asyncio.Task[None]] = {}
        self._begin: Sequence[Begin] = ()  # attempts that begin when the append under way is durable
        self._spans: RunSpans | None = None  # with telemetry, from the time when the journal was read
        self._took_s = 0.0  # how long the append under way took, until it was known to be durable
        self._sent_s = 0.0  # when the append under way was first sent, by the monotonic clock
        self._failures = 0
        self._again: asyncio.TimerHandle | None = None
        self._alarm: asyncio.TimerHandle | None = None

    # -- from outside: plain calls on the worker's loop ---------------------------------------------------------------
    @property
    def about(self) -> dict[str, str]:
        """The run, for log records about it: `log.info(…, extra=drive.about)`."""
        about = {"run": self.run_id, "agent": self._row.agent, "tenant": self._row.tenant}
        return about if self._spans is None else about | {"trace_id": self._spans.trace.trace_id}

    @property
    def state(self) -> RunState:
        return self._core.state

    def uncharged(self, budget_of: str) -> Amounts:
        """The amounts that this run has recorded under the budget of run `budget_of` and not committed yet."""
        return self._core.uncharged(budget_of)

    def begin(self, events: Sequence[Event], debts: Debts, progress: list[ProgressRow], parked: ParkedRun | None) -> None:
        """Replay the journal, and continue after its last event. With `parked`, replay only the newer events.

        `progress`: the stored progress of attempts that were cut off.
        """
        if self._host.telemetry is not None:
            self._spans = self._host.telemetry.spans_of(events, parked)
        self._host.progress.knows(self.run_id, progress)
        cut_off = {(row.call, row.attempt): row.progress for row in progress}
        self._feed(JournalRead(events, debts.budgets, debts.reserved, self._row.crashes, self.lease.epoch, parked, cut_off))

    def receive(self, row: InboxRow) -> None:
        """Give the core an inbox row that has arrived for this run."""
        self._feed_soon(Posted(row))

    def drain(self) -> None:
        """Release the run at the next step boundary: attempts under way may end, and no new attempt starts."""
        self._core.begin_release()
        self._feed_soon(Drain())

    def stop_attempts(self) -> None:
        """Stop the attempts under way, because the drain has taken too long.

        Attempts that may have acted are recorded as in doubt.
        """
        self._feed_soon(StopAttempts())

    def look_at_clock(self) -> None:
        """Tell the core the time, because the clock was set or the time of the alarm has come."""
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        self._feed(ClockReached())

    def abort(self) -> None:
        """Stop at once and write nothing more, like a crash.

        This is for a run that another worker has, or that this worker must not continue. It also ends every drive.
        """
        if self.over:
            return
        self.over = True
        for handle in (self._alarm, self._again):
            if handle is not None:
                handle.cancel()
        attempts, self._attempts = self._attempts, {}
        for running in attempts.values():
            running.cancel()
        self._forget_hooks(list(self._hooks))
        self._stop_asking()
        self._core.close()
        self._host.rested(self)

    # -- the loop -----------------------------------------------------------------------------------------------------
    def _feed_soon(self, given: Input) -> None:
        # Queue the input now, to keep the order of arrival. Process it in a later callback, because the caller may be
        # inside a task, where the first step of a tool cannot run at once (`compat.begun`). The callback gets an empty
        # context, because that task may belong to a tool of another run.
        self._inputs.append(given)
        self._host.loop.call_soon(self._work, context=contextvars.Context())

    def _feed(self, given: Input) -> None:
        self._inputs.append(given)
        self._work()

    def _work(self) -> None:
        """Feed the queued inputs to the core and carry out its steps, until the queue is empty."""
        if self._stepping:
            return
        host, inputs, core = self._host, self._inputs, self._core
        self._stepping = True
        begun_s = now_s = host.loop.time()
        try:
            while inputs and not self.over:
                given: Input | None = inputs.popleft()
                while given is not None:
                    host.entered = self.run_id
                    try:
                        step = core.step(given, host.clock.now(), int(now_s * 1_000_000), more=bool(inputs))
                    finally:
                        host.entered = None
                    if type(given) is JournalRead:
                        host.counts.replay_s.add(host.loop.time() - now_s)
                    if step == _NOTHING:
                        break  # the common case: the append is durable, and the end of its attempt is the next input
                    self._carry_out(step)
                    given = None if step.question is None else self._answer(step.question)
                if self._asked and not core.is_asking:
                    self._stop_asking()
                if not inputs:
                    break
                now_s = host.loop.time()
                if now_s - begun_s > _LONGEST_TURN_S:
                    # A tool that answers at once leads to the next commit, and that commit leads to the next tool. Let
                    # the loop serve other runs in between.
                    host.loop.call_soon(self._work)
                    return
        except Exception as error:
            host.broke(self, error)
        except BaseException:
            # A signal (Ctrl-C) may arrive between any two lines, and the loop may run again before the process ends. A
            # half-done step must not be continued, and must not be recorded as a failure of the agent.
            self.abort()
            raise
        finally:
            self._stepping = False

    def _carry_out(self, step: Step) -> None:
        """Carry out a step, in the order of the fields of `Step`.

        The actions before the append need no durable intent. Only the alarm, the yield and the end come after the
        append.
        """
        # Most steps are only an append.
        if (
            step.notes
            or step.stop
            or step.forget
            or step.serve
            or step.settle
            or step.cancel
            or step.hold_back
            or step.ask
            or step.begin_now
        ):
            self._act_before_append(step)
            if self.over:
                return
        if step.append is not None:
            self._commit(step.append, step.begin)
        if step.wake_after_us is not None:
            self._arm(step.wake_after_us / 1e6)
        if step.yields and self._host.is_short_of_room(self._row.queue):
            self._feed(Crowded())
        if step.end is not None:
            self._end(step.end)

    def _act_before_append(self, step: Step) -> None:
        for note in step.notes:
            log.log(_LEVELS[note.level], "%s", note.text, extra=self.about)
        for number in step.stop:
            running = self._attempts.get(number)
            if running is not None:
                running.cancel()
        if step.forget:
            self._forget_hooks(step.forget)
        for agent in step.serve:
            self._host.serve_too(agent)
        for settle in step.settle:
            self._settle(settle)
        for child in step.cancel:
            self._cancel_child(child)
        for held in step.hold_back:
            self._hold_back(held.rate, held.until)
        for begin in step.ask:
            self._ask(begin)
        for begin in step.begin_now:
            if not self.over:  # the first step of a tool may have called `app.abort()`
                self._start(begin, None)

    def _answer(self, question: Question) -> Input | None:
        """The answer to the core's question. None: the answer comes later, as an input.

        Until the core has recorded what follows from the answer, no other run of this worker may record anything.
        """
        host, run_id, now = self._host, self.run_id, self._host.clock.now()
        if not host.store.remote:
            return answer(question, run_id, host.store, host, now)

        def looked(found: Answer | Exception) -> None:
            if not self.over:
                self._feed(host.questions.complete(LimitUnanswered(found) if isinstance(found, Exception) else found, run_id))

        # The server may take long to answer, and the loop must not wait for the answer.
        self._asked = True
        host.questions.ask(self, partial(host.consult, partial(look, question, run_id, host.store, now), looked))
        return None

    def _stop_asking(self) -> None:
        self._asked = False
        self._host.questions.end_turn(self)

    def _arm(self, delay_s: float) -> None:
        loop = self._host.loop
        at_s = loop.time() + delay_s
        if self._alarm is not None:
            if self._alarm.when() <= at_s:
                return  # when the time of the earlier alarm comes, the core says again how long it waits
            self._alarm.cancel()
        self._alarm = loop.call_at(at_s, self.look_at_clock)

    def _end(self, end: Rested | Broken) -> None:
        if isinstance(end, Broken):
            self._host.broke(self, Fenced(end.why) if end.kind == "fenced" else Conflict(end.why))
            return
        parked = self._core.parked()
        if parked is not None:
            self._host.keep_parked(self.run_id, parked, self._agent)
        self.abort()
        over = end.check_budget
        if over is None:
            return

        def looked(ledgers: Sequence[Ledger] | Exception) -> None:
            if not isinstance(ledgers, Exception) and has_room_again(over, LedgersRead(ledgers)):
                # The budget was raised before the run had stopped, so the raise did not wake the run.
                self._host.unpause_after_raise(self.run_id)

        self._host.consult(lambda: self._host.store.ledgers(self.run_id), looked)

    # -- attempts and hooks -------------------------------------------------------------------------------------------
    def _start(self, begin: Begin, is_too_late: Callable[[], bool] | None) -> None:
        """Begin an attempt. Its intent is durable, or its effect class needs no intent."""
        assert begin.number not in self._attempts, begin.number
        # With `heard`, the attempt's progress is stored. The progress of a transaction is not stored: a rollback undoes
        # its work.
        told = self._told(begin, begin.tool.timeout_s, heard=self._heard)
        host = self._host
        running = Attempt(
            begin.tool if host.performing is None else self._performed(begin.tool),
            begin.args,
            told,
            threads=host.threads,
            grace_s=host.settings.cancel_grace_s,
            is_too_late=is_too_late,
        )
        if host.telemetry is not None:
            host.telemetry.begins(begin.tool)
        self._attempts[begin.number] = running
        running.start(partial(self._ended, told))

    def _performed(self, tool: Any) -> Any:
        return tool if self._host.performing is None else self._host.performing(tool)

    def _ended(self, told: Call, performed: Performed) -> None:
        if self._attempts.pop(told.number, None) is not None:
            told.over = True
            self._inputs.append(AttemptEnded(told.number, told.attempt, performed, told.usage, told.progress_json))
            if not self._stepping:
                self._work()

    def _told(self, begin: Begin, timeout_s: float | None, connection: Any = None, heard: Callable[[Call], None] | None = None) -> Call:
        return Call(
            key=begin.key or partial(begin.keys.key, begin.number, begin.tool.name),
            run_id=self.run_id,
            number=begin.number,
            attempt=begin.attempt,
            deadline=None if timeout_s is None else datetime.now(UTC) + timedelta(seconds=timeout_s),
            tenant=self._row.tenant,
            actor=self._row.actor,
            agent=self._row.agent,
            connection=connection,
            last_progress=None if begin.last_progress is None else codec.decode(begin.last_progress),
            on_heartbeat=heard,
            closers=self._host.closers,
            vaults=self._host.vaults,
            span=self._span_of(begin),
            on_enter=None if self._host.telemetry is None else self._host.telemetry.enter,
            secrets=self._host.secrets,
        )

    def _span_of(self, begin: Begin) -> SpanContext | Callable[[], SpanContext] | None:
        if self._spans is not None:
            return partial(self._spans.trace.attempt_span, begin.number, begin.attempt)
        created = self._core.state.created
        return None if created is None or created.trace is None else span_context(created.trace)

    def _heard(self, call: Call) -> None:
        """A tool has sent a heartbeat, on any thread."""
        self._host.progress.hear(self.lease, call)

    def _ask(self, begin: Begin) -> None:
        host, number = self._host, begin.number

        async def ask() -> None:
            await asyncio.sleep(begin.after_us / 1e6)
            asked_at = int(host.loop.time() * 1_000_000)
            try:
                tool, told = self._performed(begin.tool), self._told(begin, None)
                outcome = await reconcile(tool, begin.args, told, threads=host.threads, grace_s=host.settings.cancel_grace_s)
            except Exception as error:
                outcome = Outcome.unknown(f"asking failed: {error}")
            answered.append(HookAnswered(number, begin.attempt, outcome, asked_at))

        def done(task: asyncio.Task[None]) -> None:
            # This is a plain callback: an input enters the agent, and that must not happen inside the hook's task.
            if self._hooks.get(number) is task:
                del self._hooks[number]
                if answered:
                    self._feed(answered[0])

        answered: list[HookAnswered] = []
        task = self._hooks[number] = host.loop.create_task(ask(), name=f"reconcile {begin.tool.name}")
        task.add_done_callback(done)

    def _forget_hooks(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            task = self._hooks.pop(number, None)
            if task is not None:
                cancel(task)

    # -- appends ------------------------------------------------------------------------------------------------------
    def _commit(self, append: CoreAppend, begin: Sequence[Begin]) -> None:
        """Make the append durable; the attempts in `begin` start afterwards."""
        self._begin = begin
        stored = Append(
            self.lease,
            append.after_seq,
            tuple(seal_all(self._head, append.events)),
            append.blobs,
            append.row,
            append.consumed,
            append.left,
            append.charge,
            self._host.clock.now(),
        )
        # Set this when the append is first sent, not at each retry: the first send may be written at once, although
        # its answer is lost until the end of an outage.
        self._sent_s = time.monotonic()
        if append.transaction is None:
            self._send(stored)
            return
        tool = append.transaction.begin.tool
        names = secrets_in(tool, append.transaction.begin.args)
        if not names:
            self._transact_now(append, stored, None)
            return
        # Before the transaction: a resolver that takes long must not keep the journal's database locked.
        work = resolve(names, self._host.secrets, redacted_texts(tool))
        resolving = self._host.loop.create_task(work, name=f"secrets of {tool.name}")
        resolving.add_done_callback(partial(self._resolved, append, stored))

    def _resolved(self, append: CoreAppend, stored: Append, resolving: asyncio.Task[Scrubber]) -> None:
        if self.over or resolving.cancelled():
            return
        error = resolving.exception()
        if error is None:
            self._transact_now(append, stored, resolving.result())
        elif isinstance(error, Exception):
            self._feed(RolledBack(describe(error)))  # nothing was written
        else:
            raise error

    def _transact_now(self, append: CoreAppend, stored: Append, scrubber: Scrubber | None) -> None:
        self._host.transact(stored, partial(self._transact, append, stored, scrubber), partial(self._transacted, stored))

    def _send(self, append: Append) -> None:
        host = self._host
        if not host.commits_here or host.group.under_way:
            host.commit(append, partial(self._answered, append))
            return
        try:
            said: Appended | Exception = host.store.append([append])[0]
            host.counts.batch.add(1)
        except Exception as error:
            said = error
        self._answered(append, said)

    def _send_again(self, append: Append) -> None:
        # `at` is the time of this send, not the time of the events: an approval may have expired in between.
        self._send(structs.replace(append, at=self._host.clock.now()))

    def _answered(self, append: Append, said: Appended | Exception) -> None:
        if self.over:
            return
        if isinstance(said, Committed):
            self._host.counts.commit_s.add(time.monotonic() - self._sent_s)
            self._durable(append, None)
        elif isinstance(said, Refused):
            self._refused(append, said.why)
        elif isinstance(said, StoreUnavailable):
            self._try_again(said, partial(self._send_again, append))
        else:
            self._host.broke(self, said)

    def _durable(self, append: Append, result: Sealed | None) -> None:
        """Continue after a durable append.

        After a crash from now on, the journal has intents without results. core/decide.py says what happens to them.
        """
        host = self._host
        self._took_s = time.monotonic() - self._sent_s
        if host.store.remote and any(self._is_unsure(self._sent_s, one.covered_s) for one in self._begin):
            self._make_sure(append, result)
        else:
            self._begin_what_is_durable(append, result)

    def _make_sure(self, append: Append, result: Sealed | None) -> None:
        """Ask the store whether this worker still holds the run, before any attempt begins.

        The drive waits for the answer.

        The append may have been written long ago, and its answer comes only now, after an outage. In between, another
        worker may have taken the run over and made the calls.
        """

        def looked(held_s: float | Exception | None) -> None:
            if not self.over:
                self._sent_s = held_s if isinstance(held_s, float) else self._sent_s
                self._begin_what_is_durable(append, result)

        self._host.consult(self._held_now, looked)

    def _held_now(self) -> float | None:
        """Send a heartbeat, and ask the store whether this worker holds the run.

        Returns the time of the heartbeat. None: this worker does not hold the run.
        """
        lease, asked_s = self.lease, self._host.beat()
        row = self._host.store.get(lease.run_id)
        return asked_s if row is not None and (row.holder, row.epoch) == (lease.worker, lease.epoch) else None

    def _begin_what_is_durable(self, append: Append, result: Sealed | None) -> None:
        host, core = self._host, self._core
        sealed = append.events if result is None else (*append.events, result)
        if sealed:
            self._head = sealed[-1].hash
            host.progress.settle(self.run_id, core.state)
        self._failures = 0
        if append.charge is not None:
            host.questions.committed(core.budgets, append.charge)
        begin, self._begin = self._begin, ()
        stepping, self._stepping = self._stepping, True
        try:
            for durable in sealed:
                if type(durable.event.body) not in _PLAIN:
                    host.committed(self.run_id, sealed)
                    break
            host.counts.appended(self._row.agent, self._row.queue, core.state, sealed)
            if host.observers:
                host.observe(self.run_id, sealed)
            if self._spans is not None and host.telemetry is not None and sealed:
                end = host.clock.now()
                host.telemetry.committed(self._spans, [one.event for one in sealed], end - round(self._took_s * 1e6), end)
            sent_s = self._sent_s
            in_doubt = False
            for one in begin:
                in_doubt = in_doubt or self._is_unsure(sent_s, one.covered_s)
            begun = bool(begin) and not in_doubt and (core.closing is None or core.may_begin)
            self._inputs.append(AppendCommitted(begun, in_doubt, None if result is None else result.event))
            if begun:
                for one in begin:
                    if self.over:
                        break  # the first step of a tool has called `app.abort()`: no further effect begins
                    # If an attempt has to wait for a thread or for its secrets, it checks the lease again after that.
                    waits = one.tool.isolate or not one.tool.is_async or secrets_in(one.tool, one.args)
                    self._start(one, partial(self._is_too_late, sent_s, one.covered_s) if waits else None)
        except Exception as error:
            host.broke(self, error)
        except BaseException:
            self.abort()
            raise
        finally:
            self._stepping = stepping
        if not stepping:
            self._work()

    def _is_too_late(self, sent_s: float, covered_s: float) -> bool:
        """May another worker have the run by now, because this process slept for longer than its lease?

        Call this from any thread.
        """
        if not self._is_unsure(sent_s, covered_s):
            return False
        if not self._host.store.remote:
            return True
        try:
            held_s = self._held_now()
        except StoreError:
            return True
        return held_s is None or self._is_unsure(held_s, covered_s)

    def _is_unsure(self, then_s: float, covered_s: float) -> bool:
        """May another worker have taken the run over since `then_s`, and believe the answer "not found" too early?

        This worker held the run at `then_s`. The danger: the other worker's reconcile hook finds nothing, and the
        attempt of this worker begins after that. A worker that takes a run over waits for the time `settle` before it
        believes "not found". So an attempt that begins within that time after the takeover is safe. Most of `settle`
        is the delay of the service itself, so only the margin `covered_s` may be used here.
        """
        return time.monotonic() - then_s > covered_s and not self._host.has_held_since(then_s)

    def _refused(self, append: Append, why: str) -> None:
        """Find out why the append was refused. Until then the append counts as under way, and the drive waits."""
        store, lease = self._host.store, self.lease

        def looked(found: tuple[RunRow | None, Sequence[InboxRow]] | Exception) -> None:
            row, post = (None, ()) if isinstance(found, Exception) else found
            ours = row is not None and (row.holder, row.epoch, row.seq) == (lease.worker, lease.epoch, append.expected_seq)
            self._host.counts.fenced_writes += not ours
            if not self.over:
                self._feed(AppendRefused(why, ours, post))

        self._host.consult(lambda: (store.get(self.run_id), store.unread(self.run_id)), looked)

    def _try_again(self, error: Exception, again: Callable[[], None]) -> None:
        """Call `again` later, because the append was not acknowledged. Its events are still in memory."""
        self._failures += 1
        delay_s = min(0.1 * 2**self._failures, 5.0)
        # Log the first failure, and then about twice a minute: with one line per retry, the rest of the log would be
        # hard to find.
        level = logging.ERROR if self._failures % 6 == 1 else logging.DEBUG
        log.log(
            level,
            "run %s: cannot write the journal: %s; nothing is lost, trying again in %.1f s",
            self.run_id,
            in_full(error),
            delay_s,
            extra=self.about,
        )
        self._again = self._host.loop.call_later(delay_s, again)

    # -- effect="transaction" -----------------------------------------------------------------------------------------
    def _transact(self, append: CoreAppend, head: Append, scrubber: Scrubber | None, connection: Any) -> tuple[Append, Sealed]:
        """Perform the effect and append its result right after `head`.

        This runs on a thread, inside the store's transaction.
        """
        transaction = append.transaction
        assert transaction is not None
        begin = transaction.begin
        told = self._told(begin, begin.tool.timeout_s, connection)
        told.scrubber = scrubber
        payload, blob = codec.pack(self._perform_in_time(begin, told), self._host.settings.inline_bytes)
        usage = transaction.estimate if told.usage is None else told.usage
        before, seq = (head.events[-1].hash, head.events[-1].event.seq) if head.events else (self._head, head.expected_seq)
        progress = None if told.progress_json is None else codec.pack(told.progress_json, codec.MAX_BYTES)[0]
        body = ToolCallCompleted(result=payload, attempt=begin.attempt, usage=usage, progress=progress)
        event = Event(seq + 1, transaction.event_id, self._host.clock.now(), self.lease.epoch, begin.number, transaction.cause, body)
        charge = None
        if transaction.metered:
            charge = Charge(-transaction.reserved, amounts_of(usage, busy_us=max(event.ts - transaction.started_at, 0)))
        sealed = seal(before, event)
        return Append(self.lease, seq, (sealed,), () if blob is None else (blob,), charge=charge), sealed

    def _perform_in_time(self, begin: Begin, told: Call) -> bytes:
        """The tool's result. If the tool raises, or returns after its timeout, the transaction is rolled back."""
        timeout_s, begun_s = begin.tool.timeout_s, time.monotonic()
        try:
            result = perform_in_transaction(self._performed(begin.tool), begin.args, told)
            if timeout_s is not None and time.monotonic() - begun_s > timeout_s:
                raise TimeoutError(f"tool {begin.tool.name} took longer than {timeout_s:g} s; its transaction was rolled back")
        except BaseException as error:
            # Wrap the exception, so that an exception of the tool is never treated as a failure of the store.
            raise ToolRaised(describe(error, scrub=told.scrub)) from None
        return result

    def _transacted(self, head: Append, said: tuple[Appended, Any] | Exception) -> None:
        if self.over:
            return
        match said:
            case StoreUnavailable():
                # Nothing was written. The core is told that the call has not happened, and plans the call again.
                self._try_again(said, partial(self._feed, RolledBack()))
            case ToolRaised():
                self._feed(RolledBack(said.failure))
            case Exception():
                self._feed(RolledBack(describe(said)))
            case (Refused(why), _):
                self._refused(head, why)
            case (_, sealed):
                self._durable(head, sealed)

    # -- requests of the core about approvals, children and rate limits -----------------------------------------------
    def _settle(self, settle: Settle) -> None:
        """Expire or withdraw an approval.

        A person may vote at the same time: the store decides, and the result arrives in the inbox.
        """

        def done(error: Exception | None) -> None:
            match error:
                case None | RunEnded():
                    return  # the result arrives in the inbox
                case Conflict() | NotFound() | StoreError():
                    # Either a vote was faster, and the vote arrives in the inbox. Or the clock was set back, the
                    # request itself is not durable yet, or the store is busy: then the core tries again.
                    log.info("approval %s: %s", settle.approval, in_full(error), extra=self.about)
                    self._feed_soon(NotSettled(settle.number))
                case _:
                    if not self.over:
                        self._host.broke(self, error)

        self._host.decide(settle.approval, settle.how, done)

    def _cancel_child(self, child: CancelChild) -> None:
        def done(error: Exception | None) -> None:
            if error is not None and not self.over:
                log.error("run %s: its child cannot be cancelled yet: %s; trying again", self.run_id, in_full(error), extra=self.about)
                self._host.loop.call_later(_AGAIN_S, self._cancel_child, child)

        if not self.over:
            self._host.cancel_run(child.run_id, f"run {self.run_id}", child.reason, done)

    def _hold_back(self, rate: Rate, until: int) -> None:
        """The service refuses requests before `until`: make every run that uses this rate limit wait until then."""
        assert rate.key is not None
        if self._host.transacting:
            # A tool's transaction has the write lock, and the loop must not wait for the lock. Before the transaction
            # ends, no run can get a place under a rate limit either.
            self._host.loop.call_later(_BUSY_S, self._hold_back, rate, until)
            return
        key, questions, teller = rate.key, self._host.questions, object()

        def done(error: Exception | None) -> None:
            if error is not None:
                log.error("rate limit %s: the pause that its service asked for cannot be stored for other runs: %s", key, in_full(error))
            questions.end_turn(teller)

        # Use the same queue as the questions. So if a call asks for a place after the refusal, the pause is stored
        # before the call gets its answer.
        questions.ask(teller, partial(self._host.consult, lambda: self._host.store.hold_back(key, until), done))
