"""An engine in memory: one claimed run, from its claim to its rest or to the death of its worker.

`Life` keeps the three rules of an engine (core/steps.py). In a real engine the network, the disk and the clock decide
what happens next. Here each such event is a *move*: `moves` lists the moves that are possible now, the ordinary one
first, and `make` makes one of them. `deaths` lists what a worker that dies now can leave behind.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from msgspec import structs
from tests.core import people
from tests.core.scenario import Scenario
from tests.core.world import (
    EVER_US,
    GRACE_S,
    SECOND,
    SETTINGS,
    SETTLE_S,
    START,
    Flight,
    Service,
    Violation,
    World,
    digest_of,
    receipt,
)

from perdure.core import codec
from perdure.core.approval import Expire, Withdraw
from perdure.core.events import Event, Failure, RunUnpaused, ToolCallCompleted
from perdure.core.outcomes import Abandoned, Outcome, Performed, Raised, Returned, Unrecordable
from perdure.core.run_core import RunCore, has_room_again
from perdure.core.state import CallState
from perdure.core.steps import (
    AppendCommitted,
    AppendRefused,
    AttemptEnded,
    Begin,
    Broken,
    ClockReached,
    Crowded,
    Drain,
    HookAnswered,
    InboxRow,
    Input,
    JournalRead,
    LedgersRead,
    NotNow,
    NotSettled,
    ParkedRun,
    PlaceGiven,
    Posted,
    Question,
    ReadLedgers,
    RolledBack,
    Step,
    StepAppend,
    StopAttempts,
    goes_on_from,
)

Move = tuple[str, int] | tuple[str, int, int]
_IDS = itertools.repeat("0" * 32)
_PATIENCE = 6  # how many alarms in a row may come in time
_LATE_US = 300 * SECOND
_OUTSIDE = ("once", "keyed")  # the effect classes whose effects the services count
_FAILURES = {
    "not_sent": Failure("not_sent", "NotSent", "the line was busy"),
    "reset": Failure("reset", "ConnectionResetError", "reset by peer"),
    "timeout": Failure("timeout", "TimeoutError", "no answer in time"),
    "busy": Failure("rate_limited", "RetryLater", "come back", retry_after_s=3.0),
    "refused": Failure("fatal", "Fatal", "no"),
    "denied": Failure("refused", "ValidationError", "the answer of the service does not fit"),
    "cancelled": Failure("cancelled", "Cancelled", "it was told to stop"),
    "stuck": Failure("timeout", "TimeoutError", "it did not stop"),
    "mistake": Failure("error", "ValueError", "a mistake"),
}
_GARBAGE = Unrecordable(Failure("not_encodable", "NotEncodable", "a set"))


class Trying(NamedTuple):
    """An attempt under way."""

    begin: Begin
    since: int
    arrived: bool  # its request is there: the service has done its work


class Asking(NamedTuple):
    """A hook that is being asked."""

    attempt: int
    due: int  # it looks no sooner
    begin: Begin
    seen: HookAnswered | None = None  # what the hook has found


class Death(NamedTuple):
    """What a worker leaves behind."""

    durable: bool  # the append that was under way
    base: World
    lost: int  # 1: the worker is silent, 2: it is proven dead
    real: int  # when the next worker comes
    services: Sequence[Sequence[Service]]  # for each call all that may be so

    def __str__(self) -> str:
        words = ["append durable"] if self.durable else []
        words.append("finished" if not self.lost else "dead" if self.lost == 2 else "silent")
        if self.real > self.base.real:
            words.append(f"for {(self.real - self.base.real) / SECOND:.0f} s")
        return ", ".join(words)

    @property
    def mark(self) -> tuple[Any, ...]:
        base = self.base
        return base.mark(base.status_if_lost, START) if self.lost else base.mark(base.status, base.ready_at)

    def world(self, services: Sequence[Service]) -> World:
        world = self.base.copied()
        if self.lost:
            world.lose(self.lost)
        world.real = self.real
        world.services = {service.number: service for service in services}
        return world


class Life:
    """One worker's time with the run.

    `keeps`: when the run is parked, its machine is in `parked` and stays open, as in a worker that keeps it. `before`:
    such a machine, which the worker has kept since it parked the run.
    """

    def __init__(self, scenario: Scenario, world: World, before: ParkedRun | None = None, *, keeps: bool = False) -> None:
        self.scenario = scenario
        self.world = world
        self.over: str | None = None
        self.parked: ParkedRun | None = None
        self._before = before
        self._keeps = keeps
        world.claim()
        self._core = RunCore(world.run_id, world.agent, SETTINGS, _IDS, {})
        self._read = False
        self._delivered: set[int] = set()
        self._append: StepAppend | None = None
        self._begin: Sequence[Begin] = ()
        self._sent_at = 0
        self._durable: tuple[tuple[Any, ...], World] | None = None  # the world with the append that is under way
        self._question: Question | None = None
        self._trying: dict[int, Trying] = {}
        self._told_to_stop: set[int] = set()
        self._asking: dict[int, Asking] = {}
        self._settling: dict[int, Expire | Withdraw] = {}
        self._unsettled: list[int] = []
        self._alarm: int | None = None
        self._alarms = 0
        self._yields = False
        self._drained = False

    # -- what can happen next -------------------------------------------------------------------------------------------
    def moves(self) -> list[Move]:
        """All that can happen now; the first is the ordinary course."""
        world, scenario = self.world, self.scenario
        post = next((one for one in world.inbox if one.row.inbox_id not in self._delivered), None)
        if not self._read:
            # A worker gives the core its post first, or it might rest before it has read it, again and again.
            return [("deliver", post.row.inbox_id), ("read", 0)] if post is not None else [("read", 0)]
        moves: list[Move] = []
        rare: list[Move] = []
        if post is not None:
            if not scenario.late_post:
                moves.append(("deliver", post.row.inbox_id))
            if len(world.inbox) > 1:
                rare.append(("deliver all", 0))
        if self._append is not None:
            moves.append(("commit", 0))
            if self._begin:
                rare.append(("in doubt", 0))
            if self._append.transaction is not None:
                rare += [("tool fails", 0), ("rolled back", 0)]
            rare.append(("fenced", 0))
        if self._question is not None:
            moves.append(("answer", 0))
            rare.append(("not now", 0))
        if self._alarm is not None and self._alarm <= world.real:
            moves.append(("clock", 0))
        moves += [("hook", number) for number, asking in self._asking.items() if asking.seen is not None]
        moves += [("settle", number) for number in self._settling]
        moves += [("not settled", number) for number in self._unsettled]
        for number, trying in self._trying.items():
            effect = trying.begin.tool.effect
            if effect in _OUTSIDE and not trying.arrived:
                moves.append(("arrive", number))
                if "not_sent" in scenario.fates:
                    rare.append(("not_sent", number))
                if "busy" in scenario.fates:
                    rare.append(("busy", number))
                if "refused" in scenario.fates:
                    rare.append(("refused", number))
            else:
                moves.append(("ok", number))
                if "garbage" in scenario.fates:
                    rare.append(("garbage", number))
                if "denied" in scenario.fates:
                    rare.append(("denied", number))  # after the effect: a refusal is no proof that nothing happened
            for fate in ("reset", "timeout", "stuck", "mistake"):
                if fate in scenario.fates and (fate != "mistake" or effect not in _OUTSIDE):
                    rare.append((fate, number))
            if number in self._told_to_stop:
                moves.insert(0, ("cancelled", number))
        for number, asking in self._asking.items():
            if asking.seen is None and asking.due <= world.real:
                moves.append(("look", number))
                rare += [(fate, number) for fate in scenario.hooks]
        if self._drained and self._trying:
            rare.append(("stop all", 0))
        for number, service in world.services.items():
            for flight in service.flights:
                if flight.at is not None:
                    rare += [("arrives", number, flight.attempt), ("vanishes", number, flight.attempt)]
        if self._yields and scenario.crowds:
            rare.append(("crowded", 0))
        if scenario.drains and not self._drained:
            rare.append(("drain", 0))
        if post is not None and scenario.late_post:
            moves.append(("deliver", post.row.inbox_id))
        for place, what in enumerate(world.env):
            if people.can(world, what) and not (self._trying and what.startswith("later")):
                rare.append(("env", place))
        if not moves or scenario.ticks:
            time = self._next_time()
            if time is not None and time <= self._first_timeout():
                moves.append(("tick", 0))
        return moves + rare

    def _first_timeout(self) -> int:
        """No more time passes than an attempt under way has."""
        ends = [one.since + round(one.begin.tool.timeout_s * 1e6) for one in self._trying.values() if one.begin.tool.timeout_s]
        return min(ends, default=self.world.real + EVER_US)

    def _next_time(self) -> int | None:
        """When the next thing is due. A core that looks again and again is at times only woken when there is something to see."""
        real, alarm = self.world.real, self._alarm
        times = [asking.due for asking in self._asking.values() if asking.seen is None]
        arrival = self.world.next_arrival()
        if arrival is not None:
            times.append(arrival)
        time = min((time for time in times if time > real), default=None)
        if alarm is None or alarm <= real:
            return time
        if self._alarms > _PATIENCE:
            return alarm + _LATE_US if time is None else max(time, alarm)
        return alarm if time is None else min(time, alarm)

    # -- what happens ---------------------------------------------------------------------------------------------------
    def make(self, move: Move) -> None:
        """Let it happen; Violation when a promise is broken by it."""
        name, number = move[0], move[1]
        world = self.world
        match name:
            case "read":
                self._read = True
                budgets = frozenset((world.run_id,)) if world.limits is not None else frozenset()
                self._begin_run(budgets)
            case "deliver":
                self._deliver([next(one.row for one in world.inbox if one.row.inbox_id == number)])
            case "deliver all":
                self._deliver([one.row for one in world.inbox if one.row.inbox_id not in self._delivered])
            case "commit" | "in doubt":
                self._commit(in_doubt=name == "in doubt")
            case "tool fails":
                self._answer_append(RolledBack(_FAILURES["mistake"]))
            case "rolled back":
                self._answer_append(RolledBack())
            case "fenced":
                self._hear_of_fence()
            case "answer":
                question, self._question = self._question, None
                assert question is not None
                if isinstance(question, ReadLedgers):
                    self._feed(LedgersRead(world.ledgers()))
                else:
                    self._feed(PlaceGiven(world.place(question.rate, question.held)))
            case "not now":
                self._question = None
                self._feed(NotNow(world.now + SECOND // 2))
            case "clock":
                self._alarm = None
                self._alarms += 1
                self._feed(ClockReached())
            case "tick":
                time = self._next_time()
                assert time is not None
                world.pass_until(time)
            case "hook":
                asking = self._asking.pop(number)
                assert asking.seen is not None
                self._feed(asking.seen)
            case "look" | "unknown" | "in progress":
                self._look(number, name)
            case "settle":
                if not world.settle(number, self._settling.pop(number)):
                    self._unsettled.append(number)
            case "not settled":
                self._unsettled.remove(number)
                self._feed(NotSettled(number))
            case "arrive":
                trying = self._trying[number]
                self._trying[number] = trying._replace(arrived=True)
                world.arrive(number, trying.begin.attempt, world.real)
            case "arrives":
                world.arrive(number, move[2], world.real)  # type: ignore[misc]
            case "vanishes":
                world.services[number] = world.services[number].without(move[2])  # type: ignore[misc]
            case "crowded":
                self._feed(Crowded())
            case "drain":
                self._drained = True
                self._core.begin_release()
                self._feed(Drain())
            case "stop all":
                self._feed(StopAttempts())
            case "env":
                people.do(world, number)
            case _:
                self._end_attempt(name, number)

    def _deliver(self, rows: Sequence[InboxRow]) -> None:
        """Post that comes at once. A worker may look at its post again before it is gone from the inbox: then it comes twice."""
        self._delivered.update(row.inbox_id for row in rows)
        given = [row for row in rows for _ in range(1 + self.scenario.twice)]
        for place, row in enumerate(given, 1):
            if self.over is None:
                self._feed(Posted(row), more=place < len(given))

    def _begin_run(self, budgets: frozenset[str]) -> None:
        world, before = self.world, self._before
        journal = JournalRead(world.journal.life, budgets, world.reserved, world.crashes)
        since = () if before is None else world.journal.events[before.last.seq - 1 :]
        if before is None or not goes_on_from(before, since):
            if before is not None:
                before.machine.close()
            if world.journal.state.checkpoint and not self._delivered:
                self._check_whole_journal(journal)
            self._feed(journal)
            return
        step = self._core.step(structs.replace(journal, events=since[1:], parked=before), world.now, world.real)
        if not self._delivered:
            fresh = RunCore(world.run_id, world.agent, SETTINGS, _IDS, {})
            replayed = fresh.step(journal, world.now, world.real)
            if replayed != step or digest_of(fresh.state, self._core.state) != digest_of(self._core.state, fresh.state):
                raise Violation(f"a machine that was kept goes on otherwise than a replay:\n{step}\n{replayed}")
            fresh.close()
        self._carry_out(step)

    def _check_whole_journal(self, life: JournalRead) -> None:
        """What a checkpoint holds is all that a worker needs: with the whole journal it does the same."""
        world = self.world
        cores = [RunCore(world.run_id, world.agent, SETTINGS, _IDS, {}) for _ in range(2)]
        with_whole = structs.replace(life, events=world.journal.events)
        steps = [core.step(journal, world.now, world.real) for core, journal in zip(cores, (life, with_whole), strict=True)]
        states = [core.state for core in cores]
        if steps[0] != steps[1] or digest_of(states[0], states[1]) != digest_of(states[1], states[0]):
            told = "\n".join(str(one) for pair in zip(steps, states, strict=True) for one in pair)
            raise Violation(f"a replay from the checkpoint goes on otherwise than one of the whole journal:\n{told}")
        for core in cores:
            core.close()

    def _feed(self, given: Input, *, more: bool = False) -> None:
        world = self.world
        self._carry_out(self._core.step(given, world.now, world.real, more=more))

    def _carry_out(self, step: Step) -> None:
        world = self.world
        for number in step.stop:
            if number in self._trying:
                self._told_to_stop.add(number)
        for number in step.forget:
            self._asking.pop(number, None)
        for settle in step.settle:
            self._settling[settle.number] = settle.how
        for child in step.cancel:
            number = next(one.number for one in world.journal.state.children.values() if one.run_id == child.run_id)
            if world.children[number] == "alive":
                world.end_child(number, "cancelled")
        for held in step.hold_back:
            assert held.rate.key is not None
            due, paused = world.rates.get(held.rate.key, (0, 0))
            world.rates[held.rate.key] = (due, max(paused, held.until))
        for begin in step.ask:
            if begin.number in self._trying or begin.number in self._asking:
                raise Violation(f"the hook of call {begin.number} is asked while an attempt, or the hook, is under way")
            self._asking[begin.number] = Asking(begin.attempt, world.real + begin.after_us, begin)
        for begin in step.begin_now:
            if begin.tool.effect != "read" or world.limits is not None:
                raise Violation(f"call {begin.number} ({begin.tool.effect}) begins without a durable intent (G2)")
            self._start(begin)
        if step.question is not None:
            self._question = step.question
        if step.append is not None:
            if self._append is not None:
                raise Violation("an append is sent while another one is under way")
            self._append, self._begin, self._sent_at, self._durable = step.append, step.begin, world.real, None
        elif step.begin:
            raise Violation("attempts are to begin after no append (G2)")
        if step.wake_after_us is not None:
            at = world.real + step.wake_after_us
            self._alarm = at if self._alarm is None else min(self._alarm, at)
        self._yields = step.yields
        if step.end is not None:
            self._rest(step.end)

    # -- attempts -------------------------------------------------------------------------------------------------------
    def _start(self, begin: Begin) -> None:
        """Begin the effect: its first byte leaves."""
        world, number = self.world, begin.number
        if number in self._trying:
            raise Violation(f"call {number} begins while an attempt of it is under way")
        if begin.tool.effect != "read" or begin.tool.approval is not None:
            self._check_may_begin(begin)
        if self._drained:
            raise Violation(f"call {number} begins after a drain (G13)")
        world.check_not_of_parent(begin)
        if begin.tool.rate is not None:
            self._check_rate(begin)
        self._trying[number] = Trying(begin, world.real, arrived=False)
        if begin.tool.effect in _OUTSIDE:
            self._send(begin)
        else:
            world.pay(begin.tool)

    def _send(self, begin: Begin) -> None:
        services, tool = self.world.services, begin.tool
        service = services.get(begin.number) or self._service(begin)
        if tool.effect == "once" and (service.done or service.flights):
            raise Violation(f"call {begin.number}, of class once, is begun again; done: {service.done}, on its way: {service.flights} (G5)")
        services[begin.number] = service._replace(flights=(*service.flights, Flight(begin.attempt, None)))

    def _service(self, begin: Begin) -> Service:
        estimate = begin.tool.estimate
        return Service(begin.number, begin.tool.effect, self.scenario.key_memory_us, 0 if estimate is None else estimate.usd_micros)

    def _check_may_begin(self, begin: Begin) -> None:
        journal = self.world.journal
        call = journal.state.calls.get(begin.number)
        name = f"attempt {begin.attempt} of call {begin.number} begins"
        if call is None or call.phase != "started" or call.attempt != begin.attempt:
            raise Violation(f"{name}, and its intent is not durable (G2)")
        if journal.cancelled_at and call.asked_seq < journal.cancelled_at:
            raise Violation(f"{name} after the run was cancelled")
        if journal.state.paused is not None:
            raise Violation(f"{name}, and the run is paused")
        ask = journal.state.asks.get(begin.number)
        if begin.tool.approval is not None:
            if ask is None or ask.outcome != "approved":
                raise Violation(f"{name}, and was not approved (G9)")
            if codec.digest(begin.args) != ask.digest:
                raise Violation(f"{name} with other arguments than were approved (G9)")
            expires_at = ask.request.expires_at
            if not call.doubtful and call.attempt - call.withdrawn == 1 and expires_at is not None and expires_at <= self.world.now:
                raise Violation(f"{name} after the time of its approval (G9)")

    def _check_rate(self, begin: Begin) -> None:
        world, rate = self.world, begin.tool.rate
        world.starts += 1
        most = (rate.burst or rate.limit) + (world.now - world.journal.events[0].ts) // rate.step_us
        if world.starts > most:
            raise Violation(f"{world.starts} calls have begun under a rate that allows {most}")

    def _end_attempt(self, how: str, number: int) -> None:
        """The attempt ends. A request under way without an answer may still arrive."""
        trying = self._trying.pop(number)
        self._told_to_stop.discard(number)
        begin, world = trying.begin, self.world
        timeout_us = round((begin.tool.timeout_s or SETTINGS.patience.timeout_s) * 1e6)
        if how in ("timeout", "stuck"):
            world.pass_until(max(world.real, trying.since + timeout_us))
        if begin.tool.effect in _OUTSIDE and not trying.arrived:
            service = world.services[number]
            if how in ("not_sent", "busy", "refused"):
                world.services[number] = service.without(begin.attempt)
            else:
                last_us = EVER_US if how == "stuck" else timeout_us + round(SETTLE_S * 1e6) - 1
                world.services[number] = service.late(begin.attempt, world.real + last_us, loose=how == "stuck")
        self._feed(AttemptEnded(number, begin.attempt, _performed(how, number)))

    def _look(self, number: int, name: str) -> None:
        """The hook looks now, and reports later what it has seen."""
        asking, world = self._asking[number], self.world
        service = world.services.get(number)
        if name == "unknown":
            outcome = Outcome.unknown("the service does not say")
        elif service is not None and service.done:
            outcome = Outcome.happened(receipt(number))
        else:
            outcome = Outcome.in_progress() if name == "in progress" else Outcome.not_happened()
        self._asking[number] = asking._replace(seen=HookAnswered(number, asking.attempt, outcome, world.real))

    # -- appends --------------------------------------------------------------------------------------------------------
    def _commit(self, *, in_doubt: bool) -> None:
        append, world = self._append, self.world
        assert append is not None
        refused = world.refusal(append, world.now)
        if refused is not None:
            self._answer_append(AppendRefused(refused, True, [post.row for post in world.inbox]))
            return
        result = self._result_of(append)
        world.append(append, result)
        begin, self._begin, self._append = self._begin, (), None
        in_doubt = bool(begin) and (in_doubt or world.real - self._sent_at > round(SETTLE_S * 1e6))
        begun = not in_doubt and self._core.may_begin
        if begun:
            for one in begin:
                self._start(one)
        self._feed(AppendCommitted(begun, in_doubt, result))

    def _result_of(self, append: StepAppend) -> Event | None:
        transaction = append.transaction
        if transaction is None:
            return None
        begin, world = transaction.begin, self.world
        body = ToolCallCompleted(result=_payload(begin.number), attempt=begin.attempt, usage=transaction.estimate)
        seq = append.after_seq + len(append.events) + 1
        epoch = world.journal.state.epoch
        return Event(seq, transaction.event_id, world.now, epoch, begin.number, transaction.cause, body)

    def _answer_append(self, answer: RolledBack | AppendRefused) -> None:
        self._append, self._begin = None, ()
        self._feed(answer)

    def _hear_of_fence(self) -> None:
        """Another worker has the run: this worker is refused, begins nothing more and ends.

        The other worker continues.
        """
        self._leave_flights()
        self.world.lose(1)
        self._append, self._begin = None, ()
        trying, self._trying = set(self._trying), {}
        step = self._core.step(AppendRefused("the run is held by another worker", False), self.world.now, self.world.real)
        if step.begin or step.begin_now or step.append or not isinstance(step.end, Broken):
            raise Violation(f"a worker that has lost its run goes on: {step} (G4); under way: {trying}")
        self._close("fenced")

    # -- the end --------------------------------------------------------------------------------------------------------
    def _rest(self, end: Any) -> None:
        world = self.world
        if isinstance(end, Broken):
            if end.kind == "conflict":
                raise Violation(f"the core cannot go on: {end.why}")
            self._leave_flights()
            world.lose(1)
            self._close("broken")
            return
        if self._trying:
            raise Violation(f"the run rests, and attempts are under way: {sorted(self._trying)} (G13)")
        if digest_of(self._core.state) != digest_of(world.journal.state, self._core.state):
            raise Violation(f"the core's state is not what its journal folds to:\n{self._core.state}\n{world.journal.state}")
        if end.check_budget is not None and has_room_again(end.check_budget, LedgersRead(world.ledgers())):
            world.post("let go on", RunUnpaused(by="perdure"))
        self._close("rested")

    def _close(self, how: str) -> None:
        self.over = how
        if self._keeps and how == "rested":
            self.parked = self._core.parked()
        self._core.close()

    def close(self) -> None:
        """Let go of the core where it stands."""
        if self.over is None:
            self._close("left")

    # -- death ----------------------------------------------------------------------------------------------------------
    def _leave_flights(self) -> None:
        """The worker is silent: requests under way continue without it."""
        world = self.world
        for number, service in world.services.items():
            world.services[number] = self._options(world.journal.state.calls[number], service, (), 1)[0]

    def _last_arrival(self, call: CallState, lost: int, *, loose: bool = False) -> int:
        """The last moment at which the request of an attempt can arrive, if its worker is lost now.

        A worker that is only silent continues until the time-out. An attempt that did not stop when it was told to
        continues for ever, if its worker lives. Nothing protects against that before it is recorded: if a worker
        becomes silent before, its attempts are expected to end in time.
        """
        timeout_s = call.timeout_s
        if lost == 1 and ((loose and call.loose) or timeout_s is None):
            return self.world.real + EVER_US
        timeout_s = SETTINGS.patience.timeout_s if timeout_s is None else timeout_s
        after_s = timeout_s + SETTLE_S + (timeout_s + GRACE_S if lost == 1 else 0.0)
        return self.world.real + round(after_s * 1e6) - 1

    def deaths(self, away_us: Sequence[int]) -> Iterator[Death]:
        """Everything that a worker which dies now can leave behind.

        An append under way is durable or not. The worker is proven dead or only silent. Each request under way has
        arrived, is lost, or comes at the last moment. The next worker comes after one of these times.
        """
        for durable, base in self._bases():
            if base.finished:
                yield Death(durable, base, 0, base.real, [[one] for one in self.world.services.values()])
                continue
            calls = base.journal.state.calls
            for lost in (2, 1):
                begins = self._begin if durable and lost == 1 and self._begins_yet else ()
                options = [self._options(calls[number], service, begins, lost) for number, service in self.world.services.items()]
                fresh = [one for one in begins if one.tool.effect in _OUTSIDE and one.number not in base.services]
                options += [self._options(calls[one.number], self._service(one), begins, lost) for one in fresh]
                for us in away_us:
                    real = base.real + us
                    later = [[one.after(real) for one in some] for some in options] if us else options
                    yield Death(durable, base, lost, real, later)

    def _bases(self) -> list[tuple[bool, World]]:
        """The present world, and the world with the append under way as durable."""
        append, world = self._append, self.world
        if append is None or world.refusal(append, world.now) is not None:
            return [(False, world)]
        mark = (world.posted, world.real, world.skew, world.env)
        if self._durable is None or self._durable[0] != mark:
            durable = world.copied()
            durable.append(append, self._result_of(append))
            self._durable = (mark, durable)
        return [(False, world), (True, self._durable[1])]

    @property
    def _begins_yet(self) -> bool:
        """Whether the attempts begin that wait for the append. A worker that may have lost its lease meanwhile begins none."""
        return self._core.may_begin and self.world.real - self._sent_at <= round(SETTLE_S * 1e6)

    def _options(self, call: CallState, service: Service, begins: Sequence[Begin], lost: int) -> list[Service]:
        """What can happen to the request of this call that is under way.

        Only the present service if there is no request.
        """
        number = call.number
        for flight in service.flights:
            if flight.loose:
                service = service.late(flight.attempt, self._last_arrival(call, lost, loose=True))
        trying = self._trying.get(number)
        if trying is not None and not trying.arrived:
            attempt = trying.begin.attempt
        else:
            # The worker is silent, and begins it before the next one has the run.
            begin = next((one for one in begins if one.number == number and one.tool.effect in _OUTSIDE), None)
            if begin is None:
                return [service]
            attempt = begin.attempt
            service = service._replace(flights=(*service.flights, Flight(attempt, None)))
        return [
            service.late(attempt, self._last_arrival(call, lost)),
            service.arrived(attempt, self.world.real),
            service.without(attempt),
        ]


def _performed(how: str, number: int) -> Performed:
    if how == "ok":
        return Returned(codec.encode(receipt(number)))
    if how == "garbage":
        return _GARBAGE
    failure = _FAILURES[how]
    return Abandoned(failure) if how == "stuck" else Raised(failure)


def _payload(number: int) -> codec.Payload:
    return codec.pack(codec.encode(receipt(number)), 1000)[0]
