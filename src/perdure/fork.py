"""Fork: an agent goes on from a point of a recorded run, with other answers, another input, model or code.

A fork is a rehearsal (core/rehearsal.py) behind the effect firewall: no tool touches the world. It is
stored only if it gets an id. Then it is a specimen, which no worker can claim. reopen.py plans live forks. If the
recording has no outcome for a call, the fork looks for an answer in this order:

1. the answers that the caller gave (`Stub`);
2. the tool's stand-in (`@tool.simulate`), which runs on the loop of an agent: it cannot do I/O or call tools;
3. the tool itself if it is a `read`, or the model, but only if the caller allows that (`_perform`).

If it finds no answer, the rehearsal stops there, and shows the exact call that the agent would make now.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Hashable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

import msgspec
from msgspec import UNSET, Struct, UnsetType, structs

from perdure.agent import Agent
from perdure.core import codec
from perdure.core.codec import Payload, shown
from perdure.core.events import (
    OF_MODEL,
    AnswerSource,
    Event,
    Failure,
    FrameChanged,
    RunAdopted,
    RunClaimed,
    RunCreated,
    RunForked,
    Usage,
    place_of,
)
from perdure.core.fork import check_copies, copies, edited_result, fork_point
from perdure.core.machine import (
    Asked,
    CallCompleted,
    CallFailed,
    CallTool,
    Cancelled,
    Completion,
    Facts,
    Failed,
    Finish,
    Machine,
    Succeeded,
)
from perdure.core.outcomes import Performed, Returned
from perdure.core.rehearsal import ForkJournal, Rehearsal, described
from perdure.core.replay import asked_words
from perdure.core.retry import Again, after_failure
from perdure.core.state import RunState, fold
from perdure.engine.api import Reading, no_such_run
from perdure.engine.artifacts import RunVault
from perdure.engine.local.attempts import Attempt
from perdure.engine.local.sandbox import guard
from perdure.engine.threads import ReadingThreads, Threads
from perdure.errors import InvalidInput, NotEncodable, NotReady
from perdure.inspect.diff import CallPath, Calls, Diff, DiffCall, EncodedCall, call_of, diff_of, path_of, spent
from perdure.inspect.specimen import Packing, new_fork
from perdure.interrupts import is_interrupt
from perdure.settings import Settings
from perdure.store.api import NewFork, RunRow, Specimen
from perdure.tool.call import Call, Closer
from perdure.tool.secret import Resolver, source_of
from perdure.tool.spend import added

T = TypeVar("T")
ForkStatus = Literal["succeeded", "failed", "cancelled", "stopped", "waiting", "checkpoint"]
_THREADS = 8
_WAITING_CHARS = 500
_TRIES = 5  # the most attempts of a `read` or of a model in a rehearsal
# The world did not answer. This says nothing about the agent, so the rehearsal ends with an error.
_AWAY = frozenset(("not_sent", "rate_limited", "timeout", "reset", "server_error", "process_died"))


class Fork(Struct, frozen=True):
    """What an agent would do after a point of a recorded run. No effect of the fork happens."""

    run_id: str  # the run that was forked
    agent: str
    version: str  # the version of the code that was rehearsed
    at: int  # the event after which the fork begins
    # "stopped": at the calls in `would_call`; "waiting": for post that the recording does not have; "checkpoint": the agent
    # takes a checkpoint, where a rehearsal ends
    status: ForkStatus
    output: Any
    error: str | None
    would_call: list[DiffCall]  # the calls that the agent would make now, and that have no answer
    asked: Usage  # what this rehearsal itself has used, by asking models and calling `read` tools
    unused_edits: list[int]  # edited calls that the agent did not make again
    diff: Diff  # left: the recorded run; right: the fork
    id: str | None = None  # the run as which the fork is stored


class Stub(Struct, frozen=True, forbid_unknown_fields=True):
    """A prepared answer for calls of a tool or a model in a rehearsal.

    With `args`, only for calls with these arguments.
    """

    tool: str
    args: dict[str, Any] = {}
    result: Any = UNSET
    error: str | None = None


class Keep(Struct, frozen=True):
    """The fork is to be stored: as this run, for this person."""

    id: str
    by: str
    now: int
    new_id: Callable[[], str]  # makes ids of events
    reason: str | None = None
    model: str | None = None  # the model that was set


class Purse(Struct):
    """How much rehearsals may spend together, in micro-dollars. `limit` None: there is no limit."""

    limit: int | None = None
    spent: int = 0
    reserved: int = 0
    dearest: int = 0  # the cost of the most expensive call so far; a call without an estimate may cost as much

    def reserve(self, estimate: Usage | None) -> int:
        """Reserve what a call may cost. Raises OverBudget if less than that is left."""
        amount = max(self.dearest, 0 if estimate is None else estimate.usd_micros)
        if self.limit is not None and self.spent + self.reserved + amount > self.limit:
            raise OverBudget
        self.reserved += amount
        return amount

    def settle(self, reserved: int, used: Usage) -> None:
        self.reserved -= reserved
        self.spent += used.usd_micros
        self.dearest = max(self.dearest, used.usd_micros)


class OverBudget(Exception):
    """Too little money is left for the rehearsals. The rehearsal stops without a verdict."""


class UnknownPrice(InvalidInput):
    """There is a budget, but the rehearsal would have to ask a model whose price is not known."""


def stubs_of(answers: Any) -> tuple[Stub, ...]:
    """Prepared answers from a JSON value. InvalidInput says which entry is wrong, and why."""
    if not isinstance(answers, (list, tuple)):
        raise InvalidInput(f'answers={shown(answers)}: a list such as [{{"tool": "refund", "args": {{"order": "o-7"}}, "result": "done"}}]')
    found: list[Stub] = []
    for place, entry in enumerate(answers, 1):
        try:
            stub = entry if isinstance(entry, Stub) else msgspec.convert(codec.decode(codec.encode(entry)), Stub)
        except (msgspec.ValidationError, NotEncodable) as error:
            raise InvalidInput(f"answer {place}: {error}; an answer has tool, args (optional), and result or error") from None
        if (stub.result is UNSET) == (stub.error is None):
            raise InvalidInput(f"answer {place}, of tool {stub.tool}: give it a result or an error, and not both")
        found.append(stub)
    return tuple(found)


class Forks:
    """Makes forks. Use it as `async with Forks(…) as forks:`."""

    def __init__(
        self,
        reading: Reading,
        settings: Settings,
        *,
        answers: Sequence[Stub] = (),
        reads: bool = False,
        models: bool = False,
        purse: Purse | None = None,
        resolver: Resolver | None = None,
    ) -> None:
        """`reads`: call `read` tools, and ask models. `models`: ask models. All other tools are never called."""
        self._reading = reading
        self._settings = settings
        self._answers = answers
        self._reads = reads
        self._models = models or reads
        self._purse = purse or Purse()
        self._resolver = resolver or source_of(settings.secrets)
        self._threads = Threads(_THREADS)
        self._asking = ReadingThreads()
        self._closers: dict[Hashable, Closer] = {}
        guard()  # an agent must not do I/O in a rehearsal either

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._asking.close()
        for close in list(self._closers.values()):
            await close()

    # -- one fork -----------------------------------------------------------------------------------------------------
    async def fork(
        self,
        run_id: str,
        agent: Agent[Any, Any],
        *,
        at: int | None = None,
        edits: Mapping[int, Any] | None = None,
        input: Mapping[str, Any] | UnsetType = UNSET,
        tenant: str | None = None,
        keep: Keep | None = None,
    ) -> tuple[Fork, NewFork | None]:
        """Rehearse the run with this agent from the event `at` on. Nothing is written: `keep` asks for what to store.

        Without `at`, the fork begins before the first outcome that is edited, or else at the beginning of the run.
        `edits`: number of a call → the result to use instead. `input`: arguments of the agent that replace the
        recorded arguments. Errors: NotFound, InvalidInput; Diverged if the code asks for other calls than the journal
        has up to that point; NotReady if a `read` tool or a model cannot be reached.
        """
        row, recorded = await self._ask(lambda: (self._row(run_id, tenant), self._reading.recorded(run_id)))
        events = [event for event in recorded.events if event.seq <= row.seq]
        state = fold(events)
        changed = {number: edited_result(state, number, value) for number, value in (edits or {}).items()}
        point = fork_point(run_id, events, at, list(changed))
        if keep is not None:
            check_copies(events[: place_of(events, point)])
        created = state.created
        assert created is not None
        seen, origin = created.rehearses or row.run_id, created.forked_from or ""
        frames = tuple((one.after, self._load(one.frame)) for one in state.frames)
        facts = Facts(
            seen, row.tenant, row.actor, row.agent, agent.version, row.parent, created.depth, origin, frames, created.labels, created.tick
        )
        given = self._input(agent, state, input)
        machine = agent.machine(facts, given, self._settings.max_steps)
        packing = Packing(self._settings.inline_bytes, self._load)
        journal = None
        if keep is not None:
            other = packing.pack(given) if input is not UNSET else None
            head = await self._ask(lambda: self._reading.hash_at(run_id, point).hex())
            made = RunForked(keep.id, run_id, point, head, keep.by, keep.reason, tuple(sorted(changed)), other is not None, keep.model)
            journal = self._journal(events[: place_of(events, point)], made, seen, other, agent, keep, packing)
        try:
            rehearsal = Rehearsal(machine, events, point, journal, self._load, changed)
            asked = await self._answer_all(rehearsal, row)
            if journal is not None and rehearsal.outcome is None:
                journal.park(_parked(rehearsal), rehearsal.now)
            left = path_of(f"run {row.run_id}", events, self._load, state)
            right = self._path(rehearsal, left, state, events, point, asked)
            unanswered = [call_of(one.number, *described(one)) for one in rehearsal.questions]
        finally:
            machine.close()
        made_again = {taken.recorded for taken in rehearsal.taken.values()}
        fork = Fork(
            row.run_id,
            row.agent,
            agent.version,
            point,
            right.status,  # type: ignore[arg-type]
            right.output,
            right.error,
            unanswered,
            asked,
            [number for number in changed if number not in made_again],
            diff_of(left, right),
            None if keep is None else keep.id,
        )
        if keep is None or journal is None:
            return fork, None
        specimen = Specimen("", "", keep.now, keep.by, fork_of=row.run_id, at=point)
        return fork, new_fork(recorded, fold(journal.events), journal.events, specimen, packing)

    def _journal(
        self,
        events: Sequence[Event],
        made: RunForked,
        rehearses: str,
        other: Payload | None,
        agent: Agent[Any, Any],
        who: Keep,
        packing: Packing,
    ) -> ForkJournal:
        """The journal of the fork up to `run_forked`."""
        created = events[0].body
        assert isinstance(created, RunCreated), created
        copied = copies(events, made.run_id, rehearses=rehearses, input=other)
        journal = ForkJournal(copied, made.run_id, created.tenant, packing.pack, iter(who.new_id, None))
        seq = journal.add(made, who.now)
        if agent.version != _version_in(events):
            journal.add(RunAdopted(agent.version, made.by, made.reason), who.now, cause=seq)
        return journal

    async def _ask(self, question: Callable[[], T]) -> T:
        return await self._asking.ask(question) if self._reading.remote else question()

    def _row(self, run_id: str, tenant: str | None) -> RunRow:
        row = self._reading.get(run_id)
        if row is None or tenant not in (None, row.tenant):
            raise no_such_run(run_id, self._reading)
        return row

    def _load(self, payload: Payload) -> bytes:
        inline = payload.inline
        return self._reading.blob(str(payload.blob)) if inline is None else inline

    def _input(self, agent: Agent[Any, Any], state: RunState, given: Mapping[str, Any] | UnsetType) -> bytes:
        if isinstance(given, UnsetType):
            assert state.created is not None
            recorded = self._load(state.created.input)
            bound = agent.rebind(recorded)
            if bound is None:
                misfits = "; ".join(agent.misfits(codec.decode(recorded), ()))
                raise InvalidInput(f"the recorded input of run {state.created.run_id} does not fit this code: {misfits}")
            return bound
        if not isinstance(given, Mapping):
            raise InvalidInput(f"input={shown(given)}: the arguments of agent {agent.name} by name, such as {{'order': 'o-7'}}")
        return agent.bind((), given)

    def _path(
        self, rehearsal: Rehearsal, recorded: CallPath, state: RunState, events: Sequence[Event], point: int, asked: Usage
    ) -> CallPath:
        # A call that had ended at the point, or that an earlier life made, is the same on both sides. The rehearsal knows
        # all others.
        life = rehearsal.machine.life
        earlier = fold(event for event in events if event.seq < life).numbers if life else 0
        assert isinstance(recorded.calls, Calls)
        calls = {call.number: call for call in recorded.calls.encoded if call.number in rehearsal.ended or call.number <= earlier}
        kept = [number for number in calls if number not in rehearsal.taken]
        for number, taken in rehearsal.taken.items():
            answer = None if taken.source is None else taken.answer
            calls[number] = EncodedCall(number, taken.kind, taken.name, taken.args, answer, taken.source, taken.effect)
        again = [one.recorded for one in rehearsal.taken.values() if one.recorded is not None and one.source == "recorded"]
        output: Any = None
        error: str | None = None
        match rehearsal.outcome:
            case Succeeded(encoded):
                output = codec.decode(encoded)
            case Failed(failure):
                error = f"{failure.type}: {failure.message}" if failure.message else failure.type
            case Cancelled() | None:
                pass
        run_id = state.created.run_id if state.created else ""
        name = f"fork of run {run_id} at event {point}"
        return CallPath(
            name, Calls([calls[n] for n in sorted(calls)]), _status(rehearsal), added(spent(state, [*kept, *again]), asked), output, error
        )

    # -- answers ------------------------------------------------------------------------------------------------------
    async def _answer_all(self, rehearsal: Rehearsal, row: RunRow) -> Usage:
        """Answer questions until the agent has ended, or no question can be answered.

        Returns the usage of all answers.
        """
        total = Usage()
        while rehearsal.outcome is None:
            questions = rehearsal.questions
            asked = (self._answer(one, rehearsal.machine.facts, row) for one in questions)
            # Wait for all answers: if one of them raises an exception, no other attempt may go on in the background.
            answers = await asyncio.gather(*asked, return_exceptions=True)
            for problem in answers:
                if isinstance(problem, BaseException):
                    raise problem
            found = [(one.number, answer) for one, answer in zip(questions, answers, strict=True) if isinstance(answer, tuple)]
            for number, (completion, source, used) in found:
                total = added(total, used)
                # After an earlier answer of this loop, the agent may have ended, or may no longer wait for this call.
                if rehearsal.outcome is None and number in rehearsal.machine.waits_for:
                    rehearsal.answer(number, completion, source, used)
            if not found:
                break
        return structs.replace(total, model=None)

    async def _answer(self, asked: Asked, facts: Facts, row: RunRow) -> tuple[Completion, AnswerSource, Usage] | None:
        if not isinstance(asked, CallTool):
            return None  # a child or an approval has only its recorded outcome; without one the rehearsal stops here
        stub = next((stub for stub in self._answers if _is_for(stub, asked)), None)
        if stub is not None:
            return _stubbed(stub, asked), "answers", Usage()
        simulated = _simulated(asked, facts, self._settings.max_steps)
        if simulated is not None:
            return simulated, "simulated", Usage()
        performed = await self._perform(asked, row)
        return None if performed is None else (performed[0], "read", performed[1])

    async def _perform(self, asked: CallTool, row: RunRow) -> tuple[Completion, Usage] | None:
        """Call the `read` tool or ask the model, if the caller allows it. None: it is not allowed.

        Only this method lets a rehearsal reach the world.
        """
        tool = asked.tool
        if tool.events is OF_MODEL:
            if not self._models:
                return None
        elif not self._reads or tool.effect != "read" or tool.asks(asked.args):
            return None
        if self._purse.limit is not None and tool.events is OF_MODEL and not tool.model.is_priced:
            raise UnknownPrice(
                f"the price of model {tool.name} is not known, so that no budget can limit it; give it price=Price(…), "
                "install perdure[prices], or leave the budget out"
            )
        total = Usage()
        attempt = 0
        while True:
            attempt += 1
            reserved, used = self._purse.reserve(tool.estimate), Usage()
            call = self._call(asked, attempt, row)
            try:
                ended = await Attempt(tool, asked.args, call, threads=self._threads, grace_s=self._settings.cancel_grace_s).run()
                used = call.usage or tool.estimate or Usage()
            finally:
                self._purse.settle(reserved, used)
            total = added(total, used)
            if isinstance(ended, Returned):
                return CallCompleted(asked.number, ended.result), total
            again = self._again(ended, tool, attempt, call.key)
            if again is None:
                return CallFailed(asked.number, ended.failure, attempt), total
            await asyncio.sleep(again)

    def _again(self, ended: Performed, tool: Any, attempt: int, key: str) -> float | None:
        """Seconds until the next attempt; None: the agent gets the failure.

        NotReady: the tool or model cannot be reached.
        """
        assert not isinstance(ended, Returned)
        failure: Failure = ended.failure
        verdict = after_failure(failure, effect="read", attempt=attempt, retry=tool.retry, key=key, has_reconcile=False)
        if isinstance(verdict, Again) and attempt < _TRIES and failure.type != NotReady.__name__:
            return verdict.delay_s
        if failure.kind in _AWAY:
            raise NotReady(f"{tool.name} was asked {attempt} times in the rehearsal, without an answer: {failure.type}: {failure.message}")
        return None

    def _call(self, asked: CallTool, attempt: int, row: RunRow) -> Call:
        timeout_s = asked.tool.timeout_s
        return Call(
            # With a key of the run, a service would take this request for a call of the run.
            key=secrets.token_hex(32),
            run_id=row.run_id,
            number=asked.number,
            attempt=attempt,
            deadline=None if timeout_s is None else datetime.now(UTC) + timedelta(seconds=timeout_s),
            tenant=row.tenant,
            actor=row.actor,
            closers=self._closers,
            vaults=lambda _: RunVault(self._reading, row.run_id, self._asking.ask, row.tenant),  # opens artifacts, saves none
            secrets=self._resolver,
            reads_only=True,
        )


def _parked(rehearsal: Rehearsal) -> str:
    """What the agent would do now, in words. The events have the exact arguments."""
    asked = "; ".join(asked_words(one) for one in rehearsal.questions)
    return f"nothing: it would now make {asked}"[:_WAITING_CHARS] if asked else "something that the recording does not have"


def _version_in(events: Sequence[Event]) -> str:
    """The version that drove the run at the last of these events; empty if no worker had claimed it."""
    for event in reversed(events):
        body = event.body
        if isinstance(body, RunAdopted | FrameChanged | RunCreated) or (isinstance(body, RunClaimed) and body.version):
            return body.version
    raise AssertionError("the first event of a journal is run_created")


def _status(rehearsal: Rehearsal) -> ForkStatus:
    match rehearsal.outcome:
        case Succeeded():
            return "succeeded"
        case Failed():
            return "failed"
        case Cancelled():
            return "cancelled"
        case None:
            if rehearsal.machine.left:
                return "checkpoint"
            return "stopped" if rehearsal.questions else "waiting"


# -- answers without the world ----------------------------------------------------------------------------------------
def _is_for(stub: Stub, asked: CallTool) -> bool:
    if stub.tool != asked.tool.name:
        return False
    return not stub.args or (asked.tool.events is not OF_MODEL and _holds(codec.decode(asked.args), stub.args))


def _holds(whole: Any, part: Any) -> bool:
    """Does `whole` contain `part`? An object may have more fields than `part` has; everything else must be equal."""
    if isinstance(part, dict) and isinstance(whole, dict):
        return all(name in whole and _holds(whole[name], value) for name, value in part.items())
    return codec.encode(whole) == codec.encode(part)


def _stubbed(stub: Stub, asked: CallTool) -> Completion:
    if stub.error is not None:
        return CallFailed(asked.number, Failure(kind="error", type="Error", message=stub.error), 1)
    value = {"text": stub.result} if asked.tool.events is OF_MODEL and isinstance(stub.result, str) else stub.result
    result = codec.encode(value)
    if (misfit := asked.tool.result_misfit(result)) is not None:
        raise InvalidInput(f"the answer for tool {stub.tool} does not fit its result: {misfit}")
    return CallCompleted(asked.number, result)


def _simulated(asked: CallTool, facts: Facts, max_steps: int) -> Completion | None:
    """The answer of the tool's stand-in; None if the tool has no stand-in.

    The stand-in runs as an agent on its own machine: the sandbox refuses I/O, and a tool that it calls is never
    performed.
    """
    tool = asked.tool
    simulator = getattr(tool, "simulator", None)
    if simulator is None:
        return None
    arguments = tool.arguments(tool.clear(asked.args))
    machine = Machine(facts, lambda _: simulator.run(arguments), max_steps, tool.encode_result, is_interrupt)
    try:
        commands = machine.start(0)
    finally:
        machine.close()
    match commands[-1] if commands else None:
        case Finish(Succeeded(result)):
            if (misfit := tool.result_misfit(result)) is not None:
                raise InvalidInput(f"what the stand-in of tool {tool.name} returns does not fit the tool's result: {misfit}")
            return CallCompleted(asked.number, result)
        case Finish(Failed(failure)):
            return CallFailed(asked.number, failure, 1)
        case _:
            raise InvalidInput(
                f"the stand-in of tool {tool.name} waits or calls a tool; it must compute its result from its arguments alone"
            )
