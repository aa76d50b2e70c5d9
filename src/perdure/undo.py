"""Undo: call the compensate hooks of a finished run's completed calls, in reverse order, in the run RUN/undo.

Nothing is appended to a run that has ended (G10). So an undo is a separate run: it survives a crash, and the same
command continues it. The steps of the undo are the input of this run, and are fixed before the first hook is called.
To find the tool of each call, the journal is replayed with the agent's code. There is no registry of tools, and code
that cannot replay the journal is refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, NamedTuple

from msgspec import Struct

from perdure import shell
from perdure.agent import Agent
from perdure.control import Control
from perdure.core import codec
from perdure.core.approval import Vote
from perdure.core.codec import Payload
from perdure.core.events import ChildFinished, Effect, Event, RunCreated
from perdure.core.identity import KEY_SCHEME, undo_id, undone_by
from perdure.core.machine import Asked, CallTool, StartChild
from perdure.core.state import CallState, RunState, fold, happened, is_repeatable_class
from perdure.core.taken_back import UNDO, taken_back
from perdure.core.trace_context import RunTrace
from perdure.engine.api import AskReading, Engine, Reading, no_such_run
from perdure.engine.clock import Clock
from perdure.engine.local import sandbox
from perdure.errors import Conflict, Diverged, InvalidInput, PerdureError, ResultNotEncodable, ToolFailed, UnknownAgent
from perdure.inspect.branches import asked_in_all_branches
from perdure.run import Run
from perdure.settings import Settings
from perdure.store.api import FINISHED, ApprovalFilter, NewRun, RunRow
from perdure.tool import Tool

_VERSION = "undo-1"  # the version of undo_agent; the steps are input of the run, so they are no part of the version
# The position of a child whose end is not in its parent's journal: such a child comes after all acts of the parent.
_NEVER = 1 << 62


class Deed(Struct, frozen=True):
    """A call that had an effect, or may have had an effect."""

    run_id: str  # the id of the run that is undone, or of one of its children
    call: int
    tool: str
    effect: Effect
    arguments: Any
    result: Any
    at: int  # when the call ended, in microseconds since 1970
    why: str | None = None  # why the call is not undone; None: the call is undone
    in_doubt: bool = False  # the call may have happened, and there is no result

    @property
    def name(self) -> str:
        return f"call {self.call} ({self.tool}) of run {self.run_id}"


class UndoPlan(Struct, frozen=True):
    """What an undo of the run would do, and what it cannot undo."""

    run_id: str
    irreversible: tuple[Deed, ...]  # completed calls that cannot be undone
    doubtful: tuple[Deed, ...]  # calls that may have happened
    steps: tuple[Deed, ...]  # the calls that are undone, in this order

    @property
    def left(self) -> tuple[Deed, ...]:
        return (*self.irreversible, *self.doubtful)


class Progress(Struct, frozen=True):
    """The progress of an undo."""

    steps: list[dict[str, Any]]  # the planned steps, each with run, call and tool
    done: int  # how many steps are settled: undone, or skipped because a person rejected another attempt
    given_up: list[dict[str, Any]]  # the steps that were skipped
    left: list[dict[str, Any]]  # calls that the plan did not include, because they cannot be undone


class _Found(NamedTuple):
    deed: Deed
    happened: bool  # False: the call may have happened
    hook: Tool[..., Any] | None


class Survey:
    """What a run has done, according to its journal and this code."""

    def __init__(self, row: RunRow, created: RunCreated, found: Sequence[_Found]) -> None:
        self.row = row
        # The namespace of the run that is undone. The undo uses the same one, because it uses the same account at the
        # provider. It also belongs to the same trace.
        self.key_namespace = created.key_namespace
        self.trace = None if created.trace is None else RunTrace(created).run_span(0).recorded
        self.hooks = {(one.deed.run_id, one.deed.call): one for one in found if one.hook is not None}
        left = [one for one in found if one.hook is None]
        self.plan = UndoPlan(
            row.run_id,
            irreversible=tuple(one.deed for one in left if one.happened),
            doubtful=tuple(one.deed for one in left if not one.happened),
            steps=tuple(one.deed for one in found if one.hook is not None),
        )


# -- finding what has to be undone ------------------------------------------------------------------------------------
def undoable(reading: Reading, run_id: str) -> RunRow:
    """The row of a run that may be undone. If it may not be undone, an error says why, and what to do."""
    row = reading.get(run_id)
    if row is None:
        raise no_such_run(run_id, reading)
    row.check_live()
    undone = undone_by(run_id)
    if undone is not None:
        raise InvalidInput(f"run {run_id} is the undo of run {undone}, and an undo cannot be undone; start the agent again instead")
    if row.parent is not None:
        raise InvalidInput(
            f"run {run_id} is a child, and is undone with the run that it belongs to",
            hint=f"undo that: {shell.command('undo', run_id.partition('/')[0])}",
        )
    if row.status == "needs_attention":
        raise Conflict(
            f"run {run_id} has not ended, it needs attention ({row.error or row.waiting_for})",
            hint=f"settle that, {shell.command('why', run_id)} says how, or end it without its agent: {shell.command('cancel', run_id)} --force",
        )
    if row.status not in FINISHED:
        raise Conflict(
            f"run {run_id} has not ended, it is {row.status.replace('_', ' ')}; only a run that has ended can be undone",
            hint=_how_to_end(row),
        )
    return row


def _how_to_end(row: RunRow) -> str:
    """The command that ends an unfinished run."""
    if row.status != "cancelling":
        return f"end it: {shell.command('cancel', row.run_id)}"
    resume, cancel = shell.command("resume", row.run_id), shell.command("cancel", row.run_id)
    return f"have it end: {resume}, or without its agent: {cancel} --force"


def survey(reading: Reading, row: RunRow, agent: Agent[Any, Any], max_steps: int) -> Survey:
    """All effects of the run and its children, in reverse order of completion.

    This function blocks, and replays the journals of the run and its children.
    """
    if agent.name != row.agent:
        raise UnknownAgent(f"run {row.run_id} belongs to agent {row.agent!r}, not to {agent.name!r}; name the code of its agent")
    sandbox.guard()  # an agent must not do I/O while it is replayed either
    created = fold(reading.read(row.run_id)).created
    assert created is not None
    return Survey(row, created, _Surveyor(reading, max_steps).deeds(row.run_id, agent))


class _Surveyor:
    def __init__(self, reading: Reading, max_steps: int) -> None:
        self._reading = reading
        self._max_steps = max_steps

    def deeds(self, run_id: str, agent: Agent[Any, Any] | None) -> list[_Found]:
        """The effects of a run and its children, the last effect first. None: this code does not have the agent.

        The position of a child is the event that recorded its end in the parent's journal. Effects of the parent after
        that event are undone before the child. If the run was reopened, the effects of superseded calls count too.
        """
        events = self._reading.read(run_id)
        state = fold(events)
        if len(events) > 1 and events[1].seq > 2:
            raise Conflict(
                f"run {run_id} cannot be undone: its events 2 to {events[1].seq - 1} were removed by prune --before-checkpoint, and with them "
                "what its calls did before that checkpoint; undo these effects by hand"
            )
        asked = {} if agent is None else self._asked(agent, state, events)
        found: list[tuple[int, list[_Found]]] = []
        undone = taken_back(state, self._load)
        settled = {*undone, *undone.values()}
        for call in state.calls.values():
            if call.number in settled or call.inherited:
                continue  # the run that this one was forked from has made an inherited call: its own undo undoes it
            # Only a superseded call can be missing here: this code makes neither this call nor another call of its
            # tool.
            made = asked.get(call.number)
            one = self._judge(run_id, call, made.tool if isinstance(made, CallTool) else None)
            if one is not None:
                found.append((call.last_seq, [one]))
        ended = {event.call: event.seq for event in events if isinstance(event.body, ChildFinished)}
        for child in [child for child in state.children.values() if not child.inherited]:
            self._require_end(run_id, child.run_id)
            started = asked.get(child.number)
            below = self.deeds(child.run_id, started.agent if isinstance(started, StartChild) else None)
            found.append((ended.get(child.number, _NEVER), below))
        # Sort by seq and not by time: clocks may have been set back (T11).
        return [one for _, some in sorted(found, key=lambda item: item[0], reverse=True) for one in some]

    def _require_end(self, parent: str, run_id: str) -> None:
        row = self._reading.get(run_id)
        assert row is not None, run_id  # the commit that recorded the child also created its run
        if row.status not in FINISHED:
            # This is possible if the parent was ended by force.
            raise Conflict(
                f"run {parent} has ended, but its child {run_id} has not, it is {row.status.replace('_', ' ')}: {_how_to_end(row)}"
            )

    def _asked(self, agent: Agent[Any, Any], state: RunState, events: Sequence[Event]) -> dict[int, Asked]:
        try:
            return asked_in_all_branches(agent, state, events, self._load, self._max_steps)
        except PerdureError as error:
            seq, call = (error.seq, error.call) if isinstance(error, Diverged) else (1, None)
            assert state.created is not None
            raise Diverged(
                f"run {state.created.run_id} cannot be undone with this code, which is not its own (version {state.version}): {error}",
                seq=seq,
                call=call,
            ) from error

    def _judge(self, run_id: str, call: CallState, tool: Tool[..., Any] | None) -> _Found | None:
        """The call, and the hook that undoes it. None if there is nothing to undo."""
        certain, why, hook = happened(call), None, None
        if certain == "no" or (certain == "maybe" and call.tool.endswith(UNDO) and is_repeatable_class(call)):
            # The second case: a plan has called this hook to undo a call, and it failed. The undo calls the hook again.
            return None
        arguments, result = self._value(call.args), self._value(call.result)
        if certain == "yes":
            hook, why = _hook(call, tool, arguments, result)
        else:
            why = _doubt(call)
        return _Found(
            Deed(run_id, call.number, call.tool, call.effect, arguments, result, at=call.last_ts, why=why, in_doubt=certain == "maybe"),
            certain == "yes",
            hook,
        )

    def _value(self, payload: Payload | None) -> Any:
        return None if payload is None else codec.decode(self._load(payload))

    def _load(self, payload: Payload) -> bytes:
        inline = payload.inline
        return self._reading.blob(str(payload.blob)) if inline is None else inline


def _hook(call: CallState, tool: Tool[..., Any] | None, arguments: Any, result: Any) -> tuple[Tool[..., Any] | None, str | None]:
    """The hook that undoes a completed call, or the reason why the call cannot be undone."""
    if tool is None:
        return None, "it was made before the run was reopened, and its tool is not in this code"
    hook = tool.compensation()
    if hook is None or tool.compensator is None:
        return None, "its tool has no compensate hook"
    if call.result is None and tool.compensator.takes_result:
        return None, "its result could not be recorded, and its compensate hook needs it"
    try:
        hook.bind((), {"arguments": arguments, "result": result})
    except InvalidInput as error:
        # Arguments and result together may exceed the size limit. The plan must show that, before the undo begins
        # (G14).
        return None, f"its compensate hook cannot take its arguments and result: {error}"
    return hook, None


def _doubt(call: CallState) -> str:
    """Why a call that did not complete may have happened."""
    if call.ended and call.failure is not None:
        return f"it failed, but it may have happened: {call.failure.type}: {call.failure.message}"
    return f"it may have happened: {call.doubt or 'the run was ended while it was under way'}"


# -- the run that undoes ----------------------------------------------------------------------------------------------
def undo_agent(surveyed: Survey) -> Agent[Any, Any]:
    """The agent of RUN/undo. The agent calls the hooks of the planned steps, one after the other.

    If a hook fails, the agent requests an approval. If a person approves, the agent calls the hook again; otherwise it
    skips the step. Steps that were undone stay undone.
    """
    hooks = surveyed.hooks

    async def undo(run: Run, of: str, by: str, steps: list[dict[str, Any]], left: list[dict[str, Any]]) -> dict[str, Any]:
        undone: list[dict[str, Any]] = []
        given_up: list[dict[str, Any]] = []
        for number, step in enumerate(steps, 1):
            run.status(f"undoing {_name(step)}: {number} of {len(steps)}")
            found = hooks[step["run"], step["call"]]
            assert found.hook is not None
            (undone if await _undo_one(run, step, found.deed, found.hook) else given_up).append(step)
        return {"of": of, "undone": undone, "given_up": given_up, "left": left}

    return Agent(undo, name=f"{surveyed.row.agent}.undo", version=_VERSION)


async def _undo_one(run: Run, step: dict[str, Any], deed: Deed, hook: Tool[..., Any]) -> bool:
    while True:
        try:
            await hook(arguments=deed.arguments, result=deed.result)
            return True
        except ResultNotEncodable:
            return True  # the hook has run, and this code does not need its result
        except ToolFailed as failed:
            decision = await run.request_approval(
                f"retry {hook.name}",
                {**step, "error": f"{failed.type}: {failed.message}"},
                reason=f"{_name(step)} could not be undone; approve: its hook is called again; reject: the undo goes on without it",
            )
            if not decision.granted:
                return False


def _name(step: dict[str, Any]) -> str:
    return f"call {step['call']} ({step['tool']}) of run {step['run']}"


def progress(reading: Reading, run_id: str) -> Progress:
    """The progress of the undo of this run."""
    state = fold(reading.read(undo_id(run_id)))
    assert state.created is not None
    payload = state.created.input
    planned = codec.decode(payload.inline if payload.inline is not None else reading.blob(str(payload.blob)))
    given_up = [ask.number for ask in state.asks.values() if ask.outcome not in (None, "approved")]
    undone = [call.number for call in state.calls.values() if call.phase == "completed"]
    # Steps are settled one after the other. So the numbers of the calls and approvals that settled the steps are in
    # the order of the steps.
    settled = sorted((*given_up, *undone))
    steps = planned["steps"]
    return Progress(steps, len(settled), [steps[at] for at, number in enumerate(settled) if number in given_up], planned["left"])


async def begin(engine: Engine, clock: Clock, surveyed: Survey, settings: Settings, *, by: str) -> RunRow:
    """Create the run RUN/undo, and return its row. If the run exists already, return the row of that run."""
    plan, row = surveyed.plan, surveyed.row
    planned = {
        "of": plan.run_id,
        "by": by,
        "steps": [{"run": deed.run_id, "call": deed.call, "tool": deed.tool} for deed in plan.steps],
        "left": [{"run": deed.run_id, "call": deed.call, "tool": deed.tool, "why": deed.why} for deed in plan.left],
    }
    agent = undo_agent(surveyed)
    encoded = agent.bind((), planned)
    payload, blob = codec.pack(encoded, settings.inline_bytes)
    run_id = undo_id(plan.run_id)
    created = RunCreated(
        *(run_id, agent.name, agent.version, row.tenant, payload),
        actor=row.actor,
        target=row.target,
        queue=row.queue,
        priority=row.priority,
        key_scheme=KEY_SCHEME,
        key_namespace=surveyed.key_namespace,
        trace=surveyed.trace,
    )
    new = NewRun(run_id, created, clock.new_id(), clock.now(), codec.digest(encoded), () if blob is None else (blob,), undoes=row.seq)
    return (await engine.start(new))[0]


class Undoer:
    """Undoes runs in this process. Each undo has its own agent, which is built from the run that is undone."""

    def __init__(self, engine: Engine, ask: AskReading, settings: Settings, clock: Clock, control: Control) -> None:
        self._engine = engine
        self._reading = engine.reading
        self._ask = ask
        self._settings = settings
        self._clock = clock
        self._control = control

    async def survey(self, row: RunRow, agent: Agent[Any, Any]) -> Survey:
        # `survey` runs in a thread, because it reads whole journals and replays them.
        return await asyncio.to_thread(survey, self._reading, row, agent, self._settings.max_steps)

    async def undo(self, row: RunRow, agent: Agent[Any, Any], *, by: str, accept: bool, wait: bool, stop: asyncio.Event | None) -> RunRow:
        """Start or continue the undo, and drive its run until the run ends, needs a person, or waits."""
        run_id = undo_id(row.run_id)
        begun = await self._ask(lambda: self._reading.get(run_id))
        if begun is not None and begun.status in FINISHED:
            return begun
        surveyed = await self.survey(row, agent)
        if begun is None:
            _check_accepted(surveyed.plan, accept)
            begun = await begin(self._engine, self._clock, surveyed, self._settings, by=by)
        await self._check_hooks(surveyed)
        await self._continue_stopped(begun, by)
        return await self._engine.drive(run_id, wait=wait, stop=stop, agents=[undo_agent(surveyed)])

    async def _check_hooks(self, surveyed: Survey) -> None:
        """Raise Conflict if this code has no hook for a planned step."""
        found = await self._ask(lambda: progress(self._reading, surveyed.row.run_id))
        for step in found.steps[found.done :]:
            if (step["run"], step["call"]) not in surveyed.hooks:
                raise Conflict(
                    f"{_name(step)} is to be undone, and its tool has no compensate hook in this code; use the code that the undo was begun with"
                )

    async def _continue_stopped(self, row: RunRow, by: str) -> None:
        """Let an undo that has stopped continue, and approve its pending retries: a second undo means "try again"."""
        row.check_not_restored()
        try:
            if row.status == "needs_attention":
                await self._control.unpause(row.run_id, add=None, tenant=None, by=by, note="undo")
            for asked in await self._ask(lambda: self._reading.approvals(ApprovalFilter(run_id=row.run_id))):
                await self._control.vote(asked.approval, Vote(by, True, note="undo", source="undo"))
        except Conflict:
            pass  # in the meantime a person has decided, or another worker drives the undo: `drive` finds that out


def _check_accepted(plan: UndoPlan, accept: bool) -> None:
    if not plan.steps:
        raise Conflict(
            f"run {plan.run_id} has done nothing that can be undone" + (f", and {_listed(plan.left)} stays" if plan.left else "")
        )
    if plan.left and not accept:
        raise Conflict(f"run {plan.run_id} cannot be undone completely: {_listed(plan.left)} stays; say accept=True to undo the rest")


def _listed(deeds: Sequence[Deed]) -> str:
    return ", ".join(f"{deed.name} [{deed.why}]" for deed in deeds[:5]) + (f" and {len(deeds) - 5} more" if len(deeds) > 5 else "")
