"""Retry and rewind: a run goes on from an earlier event of its own journal.

`plan` reads the journals of the run and of the children that have to go on too, and computes the events to write
(core/reopen.py). Then it replays each journal with these events, with the agent's present code. So a divergence is
found before anything is written. `Plan.runs` is written in one transaction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from msgspec import Struct

from perdure import shell
from perdure.agent import Agent
from perdure.core.codec import Payload
from perdure.core.events import AnyBody, ChildFinished, Event, RunAdopted, RunFailed, RunSucceeded, Usage
from perdure.core.identity import undo_id, undone_by
from perdure.core.machine import AskApproval, Asked, CallTool, Command, Failed, Finish, StartChild, Succeeded
from perdure.core.prompt_deltas import is_request
from perdure.core.reopen import reopening, retry_point
from perdure.core.replay import Frontier, asked_words
from perdure.core.state import FINISHED, CallState, RunState, fold, is_certain_end, is_repeatable
from perdure.engine.api import Reading, no_such_run
from perdure.engine.local import sandbox
from perdure.errors import AlreadyRunning, Conflict
from perdure.inspect.branches import asked_in_all_branches
from perdure.inspect.resuming import open_call_words
from perdure.store.api import Reopen, RunRow


class ReopenedCall(Struct, frozen=True):
    """One call in the preview of a retry or a rewind."""

    call: int
    tool: str
    effect: str
    state: str  # "completed", "failed", "in_doubt" …
    key: str
    undo: bool | None = None  # only for superseded calls: does the tool have a compensate hook? None: not known


class Reopened(Struct, frozen=True):
    """What a retry or a rewind will do, or has done."""

    run_id: str
    back_to: int  # the event from which the run goes on
    before: str  # the version of the agent's code that has driven the run so far
    version: str  # the version that goes on with the run
    kept: list[ReopenedCall]  # calls with a result that the agent still knows
    again: list[ReopenedCall]  # failed calls: they are attempted again, or are in doubt if they may have happened
    # Calls that were made after `back_to`. If the agent makes such a call again, its recorded result is used. If not,
    # its effect stays in the world.
    superseded: list[ReopenedCall]
    open: list[str]  # for each call without a result for which the agent waits: what happens with it now
    next: list[str]  # what the agent asks for first, in words
    used: Usage  # what the run has used so far
    children: list[Reopened]  # the children that go on too


class Plan(Struct, frozen=True):
    """What a retry or a rewind writes, and the preview of it."""

    reopened: Reopened
    runs: Sequence[Reopen]


def check_reopens(row: RunRow) -> None:
    """Raise Conflict, with the way out, if such a run is never reopened by itself. The agent's code is not needed."""
    row.check_live()
    if (undone := undone_by(row.run_id)) is not None:
        raise Conflict(f"run {row.run_id} is the undo of run {undone}, and is not reopened", hint=shell.command("undo", undone))
    if row.parent is not None:
        raise Conflict(
            f"run {row.run_id} is a child of run {row.parent}, which has been told how it ended: reopen the parent, and its child goes on too",
            hint=shell.command("retry", row.parent.partition("/")[0]),
        )
    if row.status == "succeeded":
        raise Conflict(f"run {row.run_id} has succeeded: its result counts, and it cannot be reopened")


class Planner:
    """Computes what a retry or a rewind would write. The planner only reads."""

    def __init__(
        self,
        reading: Reading,
        agent_of: Callable[[str], Agent[Any, Any]],
        load: Callable[[Payload], bytes],
        *,
        max_steps: int,
        max_asks: int,
        now: int,
        new_id: Callable[[], str],
    ) -> None:
        self._reading = reading
        self._agent_of = agent_of
        self._load = load
        self._max_steps = max_steps
        self._max_asks = max_asks
        self._now = now
        self._new_id = new_id

    def plan(
        self,
        run_id: str,
        to: int | None,
        *,
        by: str,
        reason: str | None,
        fresh: bool,
        tenant: str | None,
        agent: Agent[Any, Any] | None = None,
    ) -> Plan:
        """The plan to go back to the event `to`. If `to` is None, to the event to which a retry goes back.

        Errors: NotFound, Conflict, InvalidInput, AlreadyRunning; UnknownAgent; Diverged if the code asks for other
        calls than the journal has up to that point.
        """
        row = self._row(run_id, tenant)
        check_reopens(row)
        sandbox.guard()  # an agent must not do I/O while it is replayed either
        runs: list[Reopen] = []
        agent = agent or self._agent_of(row.agent)
        return Plan(self._reopened(row, to, by, reason, fresh, agent, runs), runs)

    def _row(self, run_id: str, tenant: str | None = None) -> RunRow:
        row = self._reading.get(run_id)
        if row is None or tenant not in (None, row.tenant):
            raise no_such_run(run_id, self._reading)
        return row

    def _reopened(
        self, row: RunRow, to: int | None, by: str, reason: str | None, fresh: bool, agent: Agent[Any, Any], runs: list[Reopen]
    ) -> Reopened:
        if row.status == "running" or row.holder is not None:
            raise AlreadyRunning(f"run {row.run_id} is held by a worker", hint=f"pause it first: {shell.command('pause', row.run_id)}")
        if self._reading.get(undo_id(row.run_id)) is not None:
            # According to the journal the calls have results. The agent would rely on these effects, but they are
            # undone.
            raise Conflict(
                f"run {row.run_id} has been undone, or is being undone, by run {undo_id(row.run_id)}, so it cannot go on; start a new run"
            )
        events = self._reading.read(row.run_id)
        state = fold(events)
        back_to = retry_point(events, state) if to is None else to
        found = reopening(events, back_to, by=by, reason=reason, fresh=fresh, ended=self._ended_meanwhile(state), state=state)
        kept, again = ([_call(call) for call in calls] for calls in (found.kept, found.again))  # before the state changes
        bodies = list(found.bodies)
        version = agent.version if agent.version != row.version else None
        if version is not None:
            bodies.insert(1, (RunAdopted(version, by, reason), None))
        more = _would_be(events, bodies, self._now, row.epoch)
        for event in more:
            state.apply(event)
        state.version = agent.version
        frontier = agent.replayed(state, [*events, *more], self._load, self._max_steps)
        hooks = self._hooks(agent, state, [*events, *more]) if found.superseded else {}
        runs.append(Reopen(row.run_id, found.seen, [(body, call, self._new_id()) for body, call in bodies], version))
        return Reopened(
            row.run_id,
            found.back_to,
            row.version,
            agent.version,
            kept=kept,
            again=again,
            superseded=[_call(call, hooks.get(call.number)) for call in found.superseded],
            open=[open_call_words(call, frontier, state, max_asks=self._max_asks, now=self._now) for _, call in sorted(state.open.items())],
            next=list(_next(frontier, state, fresh)),
            used=state.used,
            children=[
                self._reopened(self._row(child), None, by, reason, fresh, self._agent_of_child(child, frontier, state), runs)
                for child in found.children
            ],
        )

    def _hooks(self, agent: Agent[Any, Any], state: RunState, events: Sequence[Event]) -> dict[int, bool]:
        """Number of a call → does its tool have a compensate hook in this code?"""
        asked = asked_in_all_branches(agent, state, events, self._load, self._max_steps)
        return {number: call.tool.compensator is not None for number, call in asked.items() if isinstance(call, CallTool)}

    def _agent_of_child(self, run_id: str, frontier: Frontier, state: RunState) -> Agent[Any, Any]:
        number = next(number for number, child in state.children.items() if child.run_id == run_id)
        asked = frontier.calls.get(number)
        return asked.agent if isinstance(asked, StartChild) else self._agent_of(state.children[number].agent)

    def _ended_meanwhile(self, state: RunState) -> dict[int, ChildFinished]:
        """The ends of children that ended after this run was ended by force. The run was not told about them."""
        if not state.finished:
            return {}
        assert state.created is not None
        ended: dict[int, ChildFinished] = {}
        for number, child in state.alive.items():
            row = self._row(child.run_id)
            if row.status not in FINISHED:
                raise Conflict(f"run {state.created.run_id}: its child {child.run_id} is still {row.status}; try again when it has ended")
            end = self._reading.read(child.run_id, after=row.seq - 1)[0].body
            match end:
                case RunSucceeded(output):
                    ended[number] = ChildFinished(child.run_id, "succeeded", output=output)
                case RunFailed(failure):
                    ended[number] = ChildFinished(child.run_id, "failed", failure=failure)
                case _:
                    ended[number] = ChildFinished(child.run_id, "cancelled")
        return ended


def _would_be(events: Sequence[Event], bodies: Sequence[tuple[AnyBody, int | None]], now: int, epoch: int) -> list[Event]:
    """The events as they would be written."""
    last = events[-1].seq
    return [
        Event(seq, "0" * 32, now, epoch, call, last if seq == last + 1 else last + 1, body)
        for seq, (body, call) in enumerate(bodies, last + 1)
    ]


def _call(call: CallState, undo: bool | None = None) -> ReopenedCall:
    effect = "model" if is_request(call.args) else call.effect
    return ReopenedCall(call.number, call.tool, effect, call.phase, call.key, undo)


def _next(frontier: Frontier, state: RunState, fresh: bool) -> Iterator[str]:
    """What the agent asks for at the frontier, in words."""
    for _, command in frontier.pending:
        words = _words(command)
        if words is not None:
            if isinstance(command, Asked) and command.number <= state.numbers:
                words = f"{words}: {_made_before(state.calls.get(command.number), fresh)}"
            yield words


def _made_before(call: CallState | None, fresh: bool) -> str:
    """In words: what happens with a superseded call that the agent requests again."""
    if call is None or (call.phase == "completed" and not (fresh and call.effect == "read")):
        return "made before, its outcome is used again"
    if call.phase == "completed":
        return "made before, and made again"
    if call.phase != "failed":
        return "made before, and may have happened: this doubt is settled first"
    if is_certain_end(call):
        return "made before, its failure is used again"
    return (
        "failed before, and is attempted again"
        if is_repeatable(call)
        else "failed before, and may have happened: this doubt is settled first"
    )


def _words(command: Command) -> str | None:
    match command:
        case CallTool() | AskApproval() | StartChild():
            return asked_words(command)
        case Finish(Succeeded()):
            return "the run succeeds"
        case Finish(Failed(failure)):
            return f"nothing: the run fails again with this code: {failure.type}: {failure.message}"
        case Finish():
            return "nothing: the run ends as cancelled"
        case _:
            return None
