"""Everything that is durable or outside: the journal, the row, post, approvals, ledger and rates, and the services.

A `World` is everything that is left when a worker dies. It is small and can be copied; different worlds have different
keys (`World.key`). `World` does the work of the store: it accepts post, judges approvals (with core/approval.py),
keeps the guard of an append and computes what follows from its events. `Journal` is the list of events; equal lists
are the same object, so each event is checked once.

The services count effects by call. A request that was sent arrives now, or never, or at the last possible moment:
after the last moment at which the request could have been sent, it may stay in a queue for its tool's time-out plus
`settle` (T22, T31).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from copy import copy
from typing import Any, NamedTuple

import msgspec
from msgspec import structs

from perdure.agent import Agent
from perdure.core import codec
from perdure.core.approval import ApprovalFacts, Expire, Judgement, Ruling, Standing, Withdraw, judge
from perdure.core.budget import NOTHING, Amounts, Ledger, amounts_of
from perdure.core.decide import Patience
from perdure.core.events import (
    AnyBody,
    ApprovalDecided,
    ApprovalEscalated,
    ApprovalExpired,
    ApprovalRequested,
    ApprovalVoted,
    ApprovalWithdrawn,
    AttentionNeeded,
    BudgetRaised,
    CallKept,
    CancelRequested,
    CheckpointTaken,
    ChildFinished,
    ChildStarted,
    Event,
    Limits,
    RunAdopted,
    RunCancelled,
    RunClaimed,
    RunCreated,
    RunForked,
    RunPaused,
    RunReopened,
    RunUnpaused,
    SignalReceived,
    ToolCallInitiated,
    ToolCallProposed,
    ToolCallResolved,
    encode_body,
)
from perdure.core.fork import LiveFork, check_copies, copies, fork_point, live_fork
from perdure.core.identity import KEY_SCHEME, CallKeys
from perdure.core.machine import CallTool
from perdure.core.rate import Rate, next_start
from perdure.core.rehearsal import ForkJournal, Rehearsal
from perdure.core.reopen import reopening, retry_point
from perdure.core.run_core import RunSettings
from perdure.core.state import FINISHED, CallState, RunState, fold, image_problem, raised, unsettled
from perdure.core.steps import Begin, InboxRow, RowChange, StepAppend
from perdure.core.transitions import landing
from perdure.errors import Conflict, Diverged, InvalidInput, StoreCorrupt

RUN = "r"
SECOND = 1_000_000
START = 1_000_000 * SECOND
TIMEOUT_S, SETTLE_S, GRACE_S = 10.0, 2.0, 5.0
PATIENCE = Patience(timeout_s=20.0, settle_s=SETTLE_S, grace_s=GRACE_S)
SETTINGS = RunSettings(
    inline_bytes=65_536,
    max_steps=10_000,
    poison_limit=5,
    reconcile_asks=2,
    patience=PATIENCE,
    park_after_us=SECOND,
    linger_us=SECOND // 10,
    flush_us=SECOND // 20,
)
KEY_WINDOW_S = 600  # of all tools with a key
EVER_US = 500 * SECOND  # for how long an attempt goes on that nothing ends: longer than the core ever waits for one
# A service remembers a key for its window from the first request on. Its clock is not ours, and a request takes its time.
KEY_SLACK_US = round((60.0 + TIMEOUT_S + SETTLE_S) * 1e6)
CLOCK_SLACK_US = 2 * 3600 * SECOND  # where our own clock is set: how old a key is can then be known no better
_NO_ID = "0" * 32
_IN_ORDER = (
    *(SignalReceived, ApprovalVoted, ApprovalEscalated, ApprovalDecided, ApprovalExpired, ApprovalWithdrawn),
    *(RunPaused, RunUnpaused),
)
_FINE = frozenset(("in_doubt", "budget"))  # why a run may need a person here; "poison" where workers die often enough
_encode = msgspec.json.Encoder().encode
_plain = msgspec.json.Encoder(enc_hook=repr).encode


class Violation(AssertionError):
    """A promise is broken."""


# -- the journal --------------------------------------------------------------------------------------------------------
class Journal:
    """A run's events and the state that they fold to.

    `extended` makes longer ones; the same events give the same object.
    """

    __slots__ = ("_after", "_digest", "_fork_points", "_points", "cancelled_at", "events", "number", "patient", "state")

    def __init__(self, number: int, events: tuple[Event, ...], state: RunState, patient: bool, cancelled_at: int) -> None:
        self.number = number
        self.events = events
        self.state = state
        self.patient = patient  # no run is called poison here: too few workers die
        self.cancelled_at = cancelled_at  # seq of the request to cancel it; 0: none
        self._after: dict[bytes, Journal] = {}
        self._digest: bytes | None = None
        self._points: list[int] | None = None
        self._fork_points: list[int] | None = None

    @classmethod
    def begun(cls, agent: Agent[Any, Any], *, patient: bool) -> Journal:
        created = RunCreated(
            RUN, agent.name, agent.version, "t", codec.pack(b"{}", 1000)[0], actor="ann", budget=agent.budget, key_scheme=KEY_SCHEME
        )
        numbers = Numbers()
        journal = cls(0, (), RunState(), patient, 0)
        return journal.extended([Event(1, _NO_ID, START, 0, None, None, created)], numbers)

    @property
    def seq(self) -> int:
        return len(self.events)

    @property
    def digest(self) -> bytes:
        """Of the folded state."""
        if self._digest is None:
            self._digest = digest_of(self.state)
        return self._digest

    @property
    def life(self) -> tuple[Event, ...]:
        """What a store gives to a worker: see `read_life`."""
        first = 0
        for event in self.events:
            if isinstance(event.body, CheckpointTaken):
                first = event.seq
            elif isinstance(event.body, RunReopened) and event.body.back_to < first:
                first = 0
        return (self.events[0], *self.events[max(first - 1, 1) :])

    @property
    def points(self) -> list[int]:
        """The events to which a person can let the run go back. All others must be refused, with words."""
        if self._points is None:
            self._points = []
            for seq in range(self.seq + 2):
                try:
                    reopening(self.events, seq, by="ann", ended=self.ended)
                except (Conflict, InvalidInput):
                    continue
                self._points.append(seq)
        return self._points

    @property
    def ended(self) -> dict[int, ChildFinished]:
        """The children that were cancelled when the run was ended by force."""
        return {number: ChildFinished(child.run_id, "cancelled") for number, child in self.state.alive.items() if self.state.finished}

    @property
    def retried_at(self) -> int | None:
        """The event to which a retry goes back; None if it is refused."""
        try:
            point = retry_point(self.events)
            reopening(self.events, point, by="ann", ended=self.ended)
        except Conflict:
            return None
        return point

    @property
    def fork_points(self) -> list[int]:
        """The events at which a person can make a live fork. All others must be refused, with words."""
        if self._fork_points is None:
            self._fork_points = []
            for seq in range(self.seq + 2):
                try:
                    check_copies(self.events)
                    self._fork("f", fork_point(RUN, self.events, seq, ()), self.state.version, START)
                except (Conflict, InvalidInput):
                    continue
                self._fork_points.append(seq)
        return self._fork_points

    def _fork(self, run_id: str, at: int, version: str, now: int) -> LiveFork:
        created = self.state.created
        assert created is not None
        forked = RunForked(run_id, created.run_id, at, "", "ann")
        return live_fork(
            self.events, fold(self.events), forked, {}, version=version, input=None, target=None, now=now, ids=itertools.repeat(_NO_ID)
        )

    def forked(self, run_id: str, at: int, agent: Agent[Any, Any], now: int, numbers: Numbers) -> Journal:
        """The journal of a live fork. Raises Violation if it cannot be one."""
        before = _encode(self.events)
        fork = self._fork(run_id, at, agent.version, now)
        if _encode(self.events) != before:
            raise Violation(f"a fork at event {at} has changed the journal of the run that was forked (T35)")
        mark = _encode(fork.events)
        after = self._after.get(mark)
        if after is None:
            after = self._after[mark] = Journal(0, (), RunState(), self.patient, 0).extended(fork.events, numbers)
            if digest_of(fork.state) != after.digest:
                raise Violation(f"the state of a fork at event {at} is not the fold of its events:\n{fork.state}\n{after.state}")
        return after

    def extended(self, events: Sequence[Event], numbers: Numbers) -> Journal:
        """The journal with these events added. Raises Violation if these events are not allowed there."""
        if not events:
            return self
        mark = _encode(events)
        after = self._after.get(mark)
        if after is None:
            state = _clone(self.state)
            cancelled_at = self.cancelled_at
            if state.created is not None and state.created.agent in HEARING:
                _check_together(events)
            for place, event in enumerate(events):
                self._check(state, event, (*self.events, *events[:place]))
                try:
                    state.apply(event)
                except StoreCorrupt as error:
                    raise Violation(f"{error} (G3, G10)") from None
                if not cancelled_at and isinstance(event.body, CancelRequested):
                    cancelled_at = event.seq
                elif isinstance(event.body, RunReopened):
                    cancelled_at = 0
            after = Journal(numbers.next(), (*self.events, *events), state, self.patient, cancelled_at)
            self._after[mark] = after
        return after

    def _check(self, state: RunState, event: Event, so_far: Sequence[Event]) -> None:
        body = event.body
        # Every cause is an earlier event, so that the causes of each event lead to `run_created`.
        if not isinstance(body, RunCreated) and (event.cause is None or not 0 < event.cause < event.seq):
            raise Violation(f"event {event.seq} ({event.type}) was caused by event {event.cause} (T36)")
        if event.epoch != state.epoch + isinstance(body, RunClaimed):
            raise Violation(f"event {event.seq} has epoch {event.epoch} after {state.epoch} (G3)")
        if isinstance(body, AttentionNeeded) and body.reason not in _FINE and (self.patient or body.reason != "poison"):
            raise Violation(f"the run needs attention: {body.reason}: {body.detail} (G7)")
        if isinstance(body, ToolCallInitiated) and body.approval is not None and state.created and state.created.agent in HEARING:
            self._check_considered(event, so_far)
        if isinstance(body, ToolCallInitiated) and body.attempt > 1:
            self._check_again(state.calls[event.call or 0], body, event.ts)
        if isinstance(body, CheckpointTaken) and (problem := image_problem(state, body, so_far)) is not None:
            raise Violation(f"event {event.seq}: {problem}")
        if isinstance(body, SignalReceived) and any(event.event_id == one.event_id for one in self.events):
            raise Violation(f"the signal of event {event.seq} is in the journal already")

    @staticmethod
    def _check_considered(event: Event, so_far: Sequence[Event]) -> None:
        """No approved call begins after a message, unless its agent has considered the message and keeps the call."""
        message = max((one.seq for one in so_far if isinstance(one.body, SignalReceived)), default=0)
        kept = max((one.seq for one in so_far if isinstance(one.body, CallKept) and one.body.number == event.call), default=0)
        if kept < message:
            raise Violation(f"call {event.call} begins after the message of event {message}, which its agent has not considered (G9)")

    @staticmethod
    def _check_again(call: CallState, body: ToolCallInitiated, ts: int) -> None:
        """Another attempt of a call is made only where its class, its key, its hook or a person allows that (G5)."""
        if body.attempt != call.attempt + 1:
            raise Violation(f"attempt {body.attempt} of call {call.number} comes after attempt {call.attempt} (T1)")
        if call.effect == "once" and (call.phase in ("started", "in_doubt") or call.doubtful):
            raise Violation(f"call {call.number}, of class once, is begun again, and is {call.phase} (G5)")
        if call.effect == "keyed" and call.phase == "started" and call.has_reconcile:
            raise Violation(f"call {call.number} is begun again, and its hook was not asked (G5)")
        age_us = ts - call.first_ts
        if call.effect == "keyed" and (call.doubtful or call.phase == "started") and not -60 * SECOND <= age_us <= KEY_WINDOW_S * SECOND:
            raise Violation(f"call {call.number} is begun again under a key that is {age_us / SECOND:.0f} s old (T14)")


def _check_together(events: Sequence[Event]) -> None:
    """An approved call does not begin with a message of its own commit: the message may have been sent first."""
    last = {event.call: event for event in events}
    for event in events:
        begins = isinstance(event.body, ToolCallInitiated) and event.body.approval is not None and last[event.call] is event
        if begins and any(isinstance(one.body, SignalReceived) for one in events[events.index(event) :]):
            raise Violation(f"call {event.call} begins, and a message is in the same commit (G9)")


def _inline(payload: codec.Payload) -> bytes:
    return payload.inline or b""


HEARING = ("heard", "heard_twice")  # agents that consider each message before their approved calls begin


class Numbers:
    """One number for each journal."""

    def __init__(self) -> None:
        self._last = 0

    def next(self) -> int:
        self._last += 1
        return self._last


def digest_of(state: RunState, like: RunState | None = None) -> bytes:
    """Two states are the same if their digests are. A worker has forgotten the arguments of calls that have ended.

    After a checkpoint it has forgotten these calls. `like`: a state, whose calls alone count.
    """
    without = copy(state)
    known = state if like is None else like
    without.calls = {
        number: _without_args(call) if call.args and number not in state.open else call
        for number, call in state.calls.items()
        if number in known.calls
    }
    without.asks = {number: ask for number, ask in state.asks.items() if number in known.asks}
    without.children = {number: child for number, child in state.children.items() if number in known.children}
    if state.checkpoint:
        without.pins, without.pin_changes = dict(sorted(state.pins.items())), []
    return _plain(without)


def _without_args(call: CallState) -> CallState:
    after = copy(call)
    after.args = None
    return after


def _clone(state: RunState) -> RunState:
    after = copy(state)
    after.calls = {number: copy(call) for number, call in state.calls.items()}
    after.open = {number: after.calls[number] for number in state.open}
    after.asks = {number: copy(ask) for number, ask in state.asks.items()}
    after.pending = {number: after.asks[number] for number in state.pending}
    after.children = {number: copy(child) for number, child in state.children.items()}
    after.alive = {number: after.children[number] for number in state.alive}
    after.timers, after.pins = dict(state.timers), dict(state.pins)
    after.pin_changes, after.patches = list(state.pin_changes), set(state.patches)
    return after


# -- the services -------------------------------------------------------------------------------------------------------
class Flight(NamedTuple):
    """A request that was sent and has not arrived."""

    attempt: int
    at: int | None  # it arrives then at the latest, and does, unless it is lost before; None: its sender waits for the answer
    loose: bool = False  # the sender was told to stop, and did not stop


class Service(NamedTuple):
    """What the service of one call knows, and the requests that are under way to it."""

    number: int
    effect: str
    window_us: int  # for how long it remembers the key
    price: int  # of each effect, in micro-dollars
    done: int = 0
    keyed_at: int = 0  # when it first saw the key
    flights: tuple[Flight, ...] = ()

    def without(self, attempt: int) -> Service:
        return self._replace(flights=tuple(one for one in self.flights if one.attempt != attempt))

    def arrived(self, attempt: int, real: int) -> Service:
        """The request of that attempt is there."""
        after = self.without(attempt)
        if self.effect == "keyed" and self.done and real - self.keyed_at <= self.window_us:
            return after  # the service drops it by its key
        if self.done:
            raise Violation(f"call {self.number}, of class {self.effect}, has happened twice (G5)")
        return after._replace(done=1, keyed_at=real)

    def after(self, real: int) -> Service:
        """The service at that time: a request without a sender has arrived if its last moment has come."""
        service = self
        for flight in self.flights:
            if flight.at is not None and flight.at <= real:
                service = service.arrived(flight.attempt, flight.at)
        return service

    def late(self, attempt: int, at: int, *, loose: bool = False) -> Service:
        """Its sender does not wait any more: the request arrives at the last moment."""
        return self._replace(flights=tuple(Flight(attempt, at, loose) if one.attempt == attempt else one for one in self.flights))


def receipt(number: int) -> str:
    return f"receipt {number}"


# -- the world ----------------------------------------------------------------------------------------------------------
class Post(NamedTuple):
    """A row of the inbox. `label` describes its content."""

    label: str
    row: InboxRow


class World:
    """Everything that outlives a worker."""

    __slots__ = (
        *("agent", "distinct", "journal", "numbers", "status", "ready_at", "held", "lost", "crashes", "attention"),
        *("inbox", "posted", "signals", "cancelled", "approvals", "limits", "spent", "reserved", "beside", "rates", "starts"),
        *("services", "written", "paid", "children", "real", "skew", "env", "deaths", "differed"),
        *("parent_keys", "parent_calls"),
    )

    def __init__(self, agent: Agent[Any, Any], env: tuple[str, ...], beside: Amounts, *, patient: bool, distinct: bool = False) -> None:
        self.agent = agent  # the code that goes on with it
        self.distinct = distinct  # no two calls of the agent have the same tool and arguments
        self.numbers = Numbers()
        self.journal = Journal.begun(agent, patient=patient)
        # The row of the run.
        self.status = "queued"
        self.ready_at: int | None = START
        self.held = False
        self.lost = 0  # 1: its worker's lease ran out, 2: its worker is proven dead
        self.crashes = 0
        self.attention: str | None = None
        # Post, approvals, limits.
        self.inbox: tuple[Post, ...] = ()
        self.posted = 0
        self.signals = 0
        self.cancelled = False
        self.approvals: dict[int, Standing] = {}
        self.limits: Limits | None = agent.budget
        self.spent = NOTHING
        self.reserved = NOTHING
        self.beside = beside  # the amount that another run under the same budget has reserved
        self.rates: dict[str, tuple[int, int]] = {}  # key → due, paused until
        self.starts = 0  # attempts that have begun under a rate
        # Outside.
        self.services: dict[int, Service] = {}
        self.written: tuple[int, ...] = ()  # calls of class transaction whose effect is in the database
        self.paid = 0  # cost of `read`, `idempotent` and `transaction` calls, in micro-dollars
        self.children: dict[int, str] = {}  # call → "alive" or "ended"
        self.real = START  # a clock that no one can set
        self.skew = 0  # of the wall clock
        # What may still happen.
        self.env = env
        # How this world came about. This is no part of its identity.
        self.deaths = 0
        self.differed = 0  # moves so far that were not the ordinary course
        # Of the runs that were forked. The journal says the same, so this is no part of the world's identity either.
        self.parent_keys: tuple[CallKeys, ...] = ()
        self.parent_calls: frozenset[int] = frozenset()  # those of class once or keyed that have begun

    def copied(self) -> World:
        other = World.__new__(World)
        for name in World.__slots__:
            setattr(other, name, getattr(self, name))
        other.approvals = self.approvals.copy()
        other.rates = self.rates.copy()
        other.services = self.services.copy()
        other.children = self.children.copy()
        return other

    @property
    def run_id(self) -> str:
        created = self.journal.state.created
        assert created is not None
        return created.run_id

    @property
    def now(self) -> int:
        """The wall clock."""
        return self.real + self.skew

    @property
    def key(self) -> tuple[Any, ...]:
        """What tells this world apart."""
        return (self.mark(self.status, self.ready_at), self.lost, self.real, tuple(self.services.values()))

    def mark(self, status: str, ready_at: int | None) -> tuple[Any, ...]:
        """Everything that distinguishes this world, except how its worker was lost, the time and the services."""
        return (
            self.journal.number,
            status,
            ready_at,
            self.crashes,
            tuple([post.label for post in self.inbox]) if self.inbox else (),
            tuple([_encode(standing) for standing in self.approvals.values()]) if self.approvals else (),
            (self.limits, self.spent, self.reserved, self.beside) if self.limits else None,
            tuple(self.rates.items()) if self.rates else (),
            self.starts,
            self.written,
            self.paid,
            tuple(self.children.values()),
            self.skew,
            self.env,
            self.agent.version,
        )

    @property
    def finished(self) -> bool:
        return self.status in FINISHED

    @property
    def is_ready(self) -> bool:
        """Whether a worker may claim it."""
        return not self.held and self.ready_at is not None and (self.lost > 0 or self.ready_at <= self.now)

    # -- time -----------------------------------------------------------------------------------------------------------
    def pass_until(self, real: int) -> None:
        """Set the time. A request without a sender arrives when its last moment has come."""
        for number, service in self.services.items():
            if service.flights:
                self.services[number] = service.after(real)
        self.real = max(self.real, real)

    def next_arrival(self) -> int | None:
        times = [flight.at for service in self.services.values() for flight in service.flights if flight.at is not None]
        return min(times, default=None)

    def arrive(self, number: int, attempt: int, real: int) -> None:
        self.services[number] = self.services[number].arrived(attempt, real)

    # -- a worker takes the run, and loses it -----------------------------------------------------------------------------
    def claim(self) -> None:
        assert self.is_ready, (self.status, self.ready_at)
        body = RunClaimed("w", "host:1", takeover=self.lost > 0, proven_dead=self.lost == 2)
        self._write([Event(self.journal.seq + 1, _NO_ID, self.now, self.journal.state.epoch + 1, None, self.journal.seq, body)])
        self.crashes += self.lost > 0
        self.held, self.lost, self.ready_at, self.attention = True, 0, None, None
        self.status = "cancelling" if self.status == "cancelling" else "running"

    def lose(self, lost: int) -> None:
        """Its worker is gone."""
        self.held, self.lost, self.ready_at = False, lost, START
        self.status = self.status_if_lost
        self.deaths += 1

    @property
    def status_if_lost(self) -> str:
        return "cancelling" if self.status == "cancelling" else "queued"

    def _write(self, events: Sequence[Event]) -> None:
        self.journal = self.journal.extended(events, self.numbers)

    # -- appends --------------------------------------------------------------------------------------------------------
    def refusal(self, append: StepAppend, at: int) -> str | None:
        """Why the store refuses the append: an approval that one of its intents uses is over. None: it does not."""
        for event in append.events:
            body = event.body
            if isinstance(body, ToolCallInitiated) and body.approval is not None:
                standing = self.approvals[event.call or 0]
                expires_at = standing.request.expires_at
                if standing.status == "approved" and standing.digest != body.digest:
                    raise Violation(f"call {event.call} would start with other arguments than were approved (G9)")
                if standing.status == "consumed":
                    raise Violation(f"call {event.call} would use its approval for the second time (G9)")
                if standing.status != "approved" or (expires_at is not None and expires_at <= max(at, event.ts)):
                    return f"approval {body.approval} is over"
        return None

    def append(self, append: StepAppend, result: Event | None = None) -> None:
        """The append is durable, with the result of the transaction that it held."""
        if append.after_seq != self.journal.seq:
            raise Violation(f"an append after event {append.after_seq}, and the journal ends with event {self.journal.seq} (G3)")
        read = set(append.consumed)
        known = {post.row.inbox_id for post in self.inbox}
        if not known.issuperset(read):
            raise Violation(f"inbox rows {sorted(read - known)} are read for the second time")
        events = append.events if result is None else (*append.events, result)
        for event in append.events:
            body = event.body
            if isinstance(body, ToolCallInitiated) and body.approval is not None:
                self.approvals[event.call or 0] = structs.replace(self.approvals[event.call or 0], status="consumed")
            elif isinstance(body, ApprovalRequested):
                self.approvals[event.call or 0] = Standing(body)
            elif isinstance(body, ChildStarted):
                self.children[event.call or 0] = "alive"
        self._write(events)
        if read:
            self.inbox = tuple(post for post in self.inbox if post.row.inbox_id not in read)
        if append.charge is not None:
            self.reserved, self.spent = self.reserved + append.charge.reserved, self.spent + append.charge.spent
        if append.transaction is not None:
            assert result is not None
            assert result.call is not None
            self.written = (*self.written, result.call)
            self.pay(append.transaction.begin.tool)
            if append.transaction.metered:
                self.reserved = self.reserved + -append.transaction.reserved
                self.spent = self.spent + amounts_of(append.transaction.estimate, busy_us=result.ts - append.transaction.started_at)
        self._check_limits()
        if append.row is not None:
            self._change(append.row, append)
        if self.journal.state.finished:
            self._end()

    def _change(self, row: RowChange, append: StepAppend) -> None:
        self.status = row.status
        if row.progress:
            self.crashes = 0
        self.attention = row.attention
        if row.release or row.status in FINISHED:
            seen = {*append.consumed, *append.left}
            woken = row.attention != "error" and any(post.row.inbox_id not in seen for post in self.inbox)
            self.held = False
            self.ready_at = None if row.status in FINISHED else self.now if woken else row.ready_at
            self._check_rest(row)

    def _check_rest(self, row: RowChange) -> None:
        """G6: a run that is released is over, has a wake time, or says what it waits for."""
        state = self.journal.state
        if state.finished != (row.status in FINISHED) or (state.finished and state.status != row.status):
            raise Violation(f"the row says {row.status}, and the journal {state.status} (G6)")
        if self.finished or self.ready_at is not None or row.status == "paused":
            return
        if row.status == "needs_attention":
            if row.attention is None:
                raise Violation("the run needs attention, and does not say why (G6)")
        elif not row.waiting_for:
            raise Violation(f"the run is {row.status}, and waits for nothing (G6)")
        elif row.status == "waiting_approval" and not state.pending:
            raise Violation("the run waits for an approval, and none is pending (G6)")

    def _end(self) -> None:
        for number, standing in self.approvals.items():
            if standing.status == "pending":
                self.approvals[number] = structs.replace(standing, status="withdrawn")
        self.reserved = NOTHING

    def _check_limits(self) -> None:
        limits = self.limits
        if limits is None:
            return
        used = self.spent + self.reserved
        for name in ("usd_micros", "calls"):
            limit = getattr(limits, name)
            if limit is not None and getattr(used, name) > limit - getattr(self.beside, name):
                raise Violation(f"{name}: {getattr(used, name)} is spent and reserved, and the budget allows {limit} (G14, T33)")

    def pay(self, tool: Any) -> None:
        """A service charges money for an attempt, if no key prevents a second effect."""
        if tool.estimate is not None:
            self.paid += tool.estimate.usd_micros
            self.check_bill()

    @property
    def bill(self) -> int:
        """What the services charge for all that they have done."""
        return self.paid + sum(service.price * service.done for service in self.services.values())

    def check_bill(self) -> None:
        """T33: whichever workers die, the services want no more than the budget allows."""
        if self.limits is not None and self.limits.usd_micros is not None and self.bill > self.limits.usd_micros - self.beside.usd_micros:
            raise Violation(f"the services want {self.bill}, and the budget allows {self.limits.usd_micros} (T33)")

    # -- people end the run, and reopen it ------------------------------------------------------------------------------
    def end_by_force(self) -> None:
        """As store/mailbox.py ends a run that no worker holds."""
        journal = self.journal
        body = RunCancelled("enough", forced_by="ann", unsettled=unsettled(journal.state.open.values()))
        for one in body.unsettled:
            self.spent = self.spent + amounts_of(one.usage)
        self._write([Event(journal.seq + 1, _NO_ID, self.now, journal.state.epoch, None, journal.seq, body)])
        self.status, self.ready_at, self.attention, self.lost, self.crashes = "cancelled", None, None, 0, 0
        for number, how in self.children.items():
            if how == "alive":
                self.children[number] = "ended"
        self._end()

    def reopen(self, back_to: int, agent: Agent[Any, Any], *, fresh: bool = False) -> bool:
        """As reopen.py and store/mailbox.py reopen a run. False: other code than before asks for other calls, and nothing has changed."""
        journal = self.journal
        found = reopening(journal.events, back_to, by="ann", fresh=fresh, ended=journal.ended)
        bodies = list(found.bodies)
        if agent.version != journal.state.version:
            bodies.insert(1, (RunAdopted(agent.version, "ann"), None))
        first = journal.seq + 1
        events = [
            Event(seq, _NO_ID, self.now, journal.state.epoch, call, journal.seq if seq == first else first, body)
            for seq, (body, call) in enumerate(bodies, first)
        ]
        if agent is not self.agent:
            after = [*journal.events, *events]
            try:
                agent.replayed(fold(after), after, lambda payload: payload.inline or b"", SETTINGS.max_steps)
            except Diverged:
                return False
        self._write(events)
        self.agent, self.cancelled = agent, False
        self.status, self.ready_at, self.attention, self.lost, self.crashes = "queued", self.now, None, 0, 0
        self.inbox = tuple(post for post in self.inbox if not isinstance(post.row.body, CancelRequested | RunPaused))
        body = events[0].body
        assert isinstance(body, RunReopened)
        for one in body.unsettled:
            self.spent = self.spent + amounts_of(one.usage)
        for number in body.withdrawn:
            if self.approvals[number].status in ("pending", "approved"):
                self.approvals[number] = structs.replace(self.approvals[number], status="withdrawn")
        for number in body.children:
            self.children[number] = "alive"
        return True

    # -- people fork the run: from then on this is the world of the fork, and no worker claims the other run any more -------
    def fork(self, at: int, agent: Agent[Any, Any]) -> bool:
        """As reopen.py and store/archive.py fork a run. False: other code asks for other calls, and nothing has changed."""
        self._check_rehearsal(at, agent)
        journal = self.journal
        after = journal.forked(f"{self.run_id}-fork", at, agent, self.now, self.numbers)
        try:
            agent.replayed(_clone(after.state), after.events, _inline, SETTINGS.max_steps)
        except Diverged:
            return False
        self.parent_keys = (*self.parent_keys, journal.state.keys)
        calls = journal.state.calls.values()
        self.parent_calls = frozenset(call.number for call in calls if call.begun and call.effect in ("once", "keyed"))
        self.journal, self.agent, self.cancelled = after, agent, False
        self.status, self.ready_at, self.attention, self.lost, self.crashes = "queued", self.now, None, 0, 0
        self.inbox, self.signals = (), after.state.signals
        self.children = dict.fromkeys(self.children, "ended")
        self.limits, self.spent, self.reserved, self.paid = after.state.budget, after.state.spent, NOTHING, 0
        self.services = {number: service._replace(price=0) for number, service in self.services.items()}  # the parent has paid
        reopened = next(event.body for event in reversed(after.events) if isinstance(event.body, RunReopened))
        for number, standing in self.approvals.items():
            status = "withdrawn" if number in reopened.withdrawn and standing.status in ("pending", "approved") else standing.status
            self.approvals[number] = structs.replace(standing, request=after.state.asks[number].request, status=status)
        return True

    def check_not_of_parent(self, begin: Begin) -> None:
        """What the run that was forked has done is not done again, and no call has a key that is, or may be, a key of that run."""
        number, tool = begin.number, begin.tool
        if number in self.parent_calls:
            raise Violation(f"call {number}, of class {tool.effect}, of the run that was forked is attempted in the fork (T35)")
        key = begin.key or begin.keys.key(number, tool.name)
        if any(keys.key(number, tool.name) == key for keys in self.parent_keys):
            raise Violation(f"call {number} of the fork has a key of the run that was forked (T35)")

    def _check_rehearsal(self, at: int, agent: Agent[Any, Any]) -> None:
        """A rehearsal from the same event holds no attempt, and none can follow."""
        events, state = self.journal.events, self.journal.state
        pack = lambda encoded: codec.pack(encoded, 1000)[0]  # noqa: E731
        copied = copies(events[:at], "rehearsal", rehearses=self.run_id)
        journal = ForkJournal(copied, "rehearsal", "t", pack, itertools.repeat(_NO_ID))
        journal.add(RunForked("rehearsal", self.run_id, at, "", "ann"), self.now)
        if agent.version != state.version:
            journal.add(RunAdopted(agent.version, "ann"), self.now)
        machine = agent.machine_of(_clone(state), _inline, SETTINGS.max_steps)
        try:
            rehearsal = Rehearsal(machine, events, at, journal, _inline)
        except Diverged:
            return
        finally:
            machine.close()
        try:
            after = fold(journal.events)
        except StoreCorrupt as error:
            raise Violation(f"a rehearsal from event {at}: {error} (G3)") from None
        intents = [
            (one.number, ToolCallInitiated(one.tool.name, one.tool.effect, args=pack(one.args)))
            for one in rehearsal.questions
            if isinstance(one, CallTool)
        ]
        forbidden: list[tuple[int | None, AnyBody]] = [(None, RunClaimed("w", "host:1")), *intents]
        for number, body in forbidden:
            epoch = after.epoch + (number is None)
            try:
                _clone(after).apply(Event(after.seq + 1, _NO_ID, self.now, epoch, number, after.seq, body))
            except StoreCorrupt:
                continue
            raise Violation(f"{type(body).__name__} can follow in a rehearsal from event {at} (T35)")

    # -- limits ---------------------------------------------------------------------------------------------------------
    def ledgers(self) -> list[Ledger]:
        return [] if self.limits is None else [Ledger(self.run_id, self.limits, self.spent, self.reserved + self.beside)]

    def place(self, rate: Rate, held: int | None) -> int:
        """As engine/local/limits.py answers, for one key."""
        assert rate.key is not None
        due, paused = self.rates.get(rate.key, (0, 0))
        if held is not None and held >= self.now - round(rate.per * 1e6) and not (held <= self.now < paused):
            return held
        at, due = next_start(rate, due=due, paused_until=paused, now=self.now)
        self.rates[rate.key] = (due, paused)
        return at

    # -- post -----------------------------------------------------------------------------------------------------------
    def post(self, label: str, body: AnyBody, call: int | None = None, cause: int | None = None) -> None:
        """Something from outside for the run: durable when this returns."""
        self.posted += 1
        if isinstance(body, BudgetRaised):
            assert self.limits is not None
            self.limits = raised(self.limits, body.added)
        elif isinstance(body, SignalReceived):
            self.signals += 1
        elif isinstance(body, CancelRequested):
            self.cancelled = True
        row = InboxRow(self.posted, self.run_id, call, body, f"{self.posted:032x}")
        if self.held:
            self.inbox = (*self.inbox, Post(f"{self.posted} {label} {encode_body(body).decode()}", row))
            return
        if isinstance(body, _IN_ORDER):
            for post in self.inbox:
                if isinstance(post.row.body, _IN_ORDER):
                    self._land(post.row, None)
                    self.inbox = tuple(one for one in self.inbox if one is not post)
        self._land(row, cause)
        if isinstance(body, ToolCallResolved):
            self.spent = self.spent + amounts_of(body.usage)

    def _land(self, row: InboxRow, cause: int | None) -> None:
        """As store/delivery.py lands post in the journal of a run that no worker holds."""
        body, journal = row.body, self.journal
        assert body is not None
        after, wake = landing(self.status, self.attention, body)  # type: ignore[arg-type]
        if isinstance(body, RunUnpaused) and journal.state.cancel:
            after = "cancelling"
        if wake == "never":
            self.ready_at = None
        elif wake == "now" and not (after == self.status == "queued" and self.ready_at is not None):
            self.ready_at = self.now
        self.status = after
        if after != "needs_attention":
            self.attention = None
        if cause is None and row.call is not None:
            cause = next((event.seq for event in reversed(journal.events) if event.call == row.call), None)
        cause = journal.seq if cause is None else cause
        self._write([Event(journal.seq + 1, row.event_id, self.now, journal.state.epoch, row.call, cause, body)])

    # -- approvals ------------------------------------------------------------------------------------------------------
    def settle(self, number: int, how: Expire | Withdraw) -> bool:
        """The time of the approval is over, or its answer is not wanted; False when it is settled already, or not yet due."""
        if number not in self.approvals:
            return False
        try:
            self.judge(number, how)
        except Conflict:
            return False
        return True

    def judge(self, number: int, judgement: Judgement, ahead_us: int = 0) -> None:
        """Raises Conflict if it is too late. `ahead_us`: how far the clock of the judging process is ahead."""
        standing = self.approvals[number]
        request = standing.request
        facts = ApprovalFacts("ann", request.input.inline, None if request.schema is None else request.schema.inline)
        ruling: Ruling = judge(standing, facts, judgement, self.now + ahead_us)
        self.approvals[number] = ruling.standing
        ask = self.journal.state.asks[number]
        self.post(f"{type(ruling.body).__name__} {number}", ruling.body, number, ask.asked_seq)

    # -- children -------------------------------------------------------------------------------------------------------
    def end_child(self, number: int, how: str) -> None:
        self.children[number] = "ended"
        child = self.journal.state.children[number].run_id
        output = codec.pack(codec.encode("child"), 1000)[0] if how == "succeeded" else None
        self.post(f"child {number} {how}", ChildFinished(child, how, output), number)  # type: ignore[arg-type]

    # -- the end --------------------------------------------------------------------------------------------------------
    def check_whole(self) -> None:
        """The run has ended: what its journal says is what has happened."""
        state = self.journal.state
        for number, call in state.calls.items():
            self._check_call(call, self.services.get(number))
        recorded = tuple(sorted(call.number for call in state.calls.values() if call.effect == "transaction" and call.phase == "completed"))
        if tuple(sorted(self.written)) != recorded:
            raise Violation(f"transactions: {self.written} are in the database, {recorded} in the journal (G5)")
        if self.distinct:
            self._check_effects()
            if state.output is not None:
                self._check_told(codec.decode(state.output.inline or b""))
            elif state.failure is not None and state.failure.type == "Bug":
                self._check_told(state.failure.message.split(", "))
        unread = sum(isinstance(post.row.body, SignalReceived) for post in self.inbox)
        if state.signals + unread != self.signals:
            raise Violation(f"{self.signals} signals were sent, {state.signals} are in the journal and {unread} in the inbox (G1)")
        self.check_bill()
        if state.used.usd_micros < self.bill:
            raise Violation(f"{state.used.usd_micros} was charged, and the services want {self.bill} (T33)")
        unread_calls = {post.row.call for post in self.inbox}
        if self.cancelled and state.cancel is None and not any(isinstance(post.row.body, CancelRequested) for post in self.inbox):
            raise Violation("the run was cancelled, and neither its journal nor its inbox knows (G1)")
        for number, ask in state.asks.items():
            said = self.approvals[number].status
            outcome = "approved" if said == "consumed" else said
            # An approval that is pending when the run ends is withdrawn without an event.
            if ask.superseded and said in ("withdrawn", "rejected", "expired"):
                continue  # it was decided before the run was reopened, and no worker had read that
            if outcome != ask.outcome and number not in unread_calls and not (outcome == "withdrawn" and ask.pending):
                raise Violation(f"the approval of call {number} is {said}, and the journal says {ask.outcome} (G1)")

    def _check_effects(self) -> None:
        """A call that the agent makes once happens once, however often people reopen the run (T35).

        All arguments are different.
        """
        times: dict[tuple[str, str], int] = {}
        for number, call in self.journal.state.calls.items():
            service = self.services.get(number)
            done = (number in self.written) + (0 if service is None else service.done)
            if done:
                asked = self.asked_for(call)
                times[asked] = times.get(asked, 0) + done
        twice = [asked for asked, done in times.items() if done > 1]
        if twice:
            raise Violation(f"{twice[0]} has happened twice, under several numbers (T35)")

    def asked_for(self, call: CallState) -> tuple[str, str]:
        """The tool and the arguments as the agent gave them."""
        body = self.journal.events[call.first_seq - 1].body
        assert isinstance(body, ToolCallInitiated | ToolCallProposed), body
        assert body.args is not None, body
        return call.tool, codec.decode(body.args.inline or b"")["what"]

    def _check_told(self, output: list[str]) -> None:
        """The agent has learned the outcomes of its own calls, and has received each signal once and in order."""
        state = self.journal.state
        heard = [one.partition("=")[2] for one in output if one.startswith("heard=")]
        sent = [event.body for event in self.journal.events if isinstance(event.body, SignalReceived)]
        if heard != [codec.decode(body.payload.inline or b"") for body in sent][: len(heard)]:
            raise Violation(f"the agent has heard {heard} (T35)")
        for one in output:
            name, _, result = one.partition("=")
            if result.startswith("receipt "):
                call = state.calls[int(result.split()[1])]
                if "/".join(self.asked_for(call)) != name:
                    raise Violation(f"{name} has the result of {self.asked_for(call)} (T35)")

    def _check_call(self, call: CallState, service: Service | None) -> None:
        done = 0 if service is None else service.done
        flying = () if service is None else service.flights
        if call.effect not in ("once", "keyed"):
            return
        if call.phase == "completed":
            if done != 1:
                raise Violation(f"call {call.number} is completed, and has happened {done} times (G5)")
            if call.result is not None and codec.decode(call.result.inline or b"") != receipt(call.number):
                raise Violation(f"call {call.number} has the result of another call (T4)")
        elif call.failure is not None and call.failure.kind == "refused" and done == 1 and not flying:
            pass  # the tool itself has raised this after its effect; it is not made again
        elif call.phase == "failed" and call.resolved_by in (None, "reconcile") and (done or flying):
            raise Violation(f"call {call.number} has failed for good, and has happened {done} times; on its way: {flying} (G8)")
        elif not call.begun and done:
            raise Violation(f"call {call.number} has never begun, and has happened (G2)")
