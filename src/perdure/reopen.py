"""Retry, rewind and live fork: a run goes on from an earlier event of its own journal, or of a copy of it.

`plan` reads the journals of the run and of the children that have to go on too, and computes the events to write
(core/reopen.py). Then it replays each journal with these events, with the agent's present code. So a divergence is
found before anything is written. `Plan.runs` is written in one transaction. `fork` plans a live fork in the same way
(core/fork.py), and a live fork is written in one transaction too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct, UnsetType, structs

from perdure import shell
from perdure.agent import Agent
from perdure.control import check_helps
from perdure.core.codec import Payload, shown
from perdure.core.events import (
    AnyBody,
    BudgetExceeded,
    ChildFinished,
    Event,
    Limits,
    RunAdopted,
    RunFailed,
    RunForked,
    RunSucceeded,
    Usage,
    in_batch,
)
from perdure.core.fork import LiveFork as Forked
from perdure.core.fork import check_copies, edited_result, fork_point, live_fork
from perdure.core.history import history
from perdure.core.identity import undo_id, undone_by
from perdure.core.machine import AskApproval, Asked, CallTool, Command, Failed, Finish, StartChild, Succeeded
from perdure.core.prompt_deltas import is_request
from perdure.core.rehearsal import check_edit
from perdure.core.reopen import Reopening, reopening, retry_point
from perdure.core.replay import Frontier, args_words, asked_words, completion_of, replay
from perdure.core.state import (
    FINISHED,
    AskState,
    CallState,
    ChildState,
    Happened,
    RunState,
    added,
    fold,
    happened,
    is_certain_end,
    is_made_anew,
    is_repeatable,
    is_repeatable_class,
)
from perdure.core.taken_back import check_not_taken_back
from perdure.engine.api import Reading, no_such_run
from perdure.engine.local import sandbox
from perdure.errors import AlreadyRunning, Conflict, Diverged, InvalidInput
from perdure.inspect.branches import asked_in_all_branches
from perdure.inspect.cost import BudgetView, budget_view
from perdure.inspect.resuming import open_call_words
from perdure.store.api import NewFork, Reopen, RunRow, undone

_Body = tuple[AnyBody, int | None]  # an event to be written, and the number of its call


class _Fitting(Struct, frozen=True):
    """What is written so that the code goes on with a run, and what follows from it."""

    bodies: list[_Body]
    frontier: Frontier  # where the agent stands then
    pending: list[Command]  # as `Planner._stand` returns it
    state: RunState  # of the run, with these events
    events: list[Event]


class ReopenedCall(Struct, frozen=True):
    """One call in the preview of a retry or a rewind."""

    call: int
    tool: str
    effect: str
    state: str  # "completed", "failed", "in_doubt" …
    key: str
    undo: bool | None = None  # only for superseded calls: does the tool have a compensate hook? None: not known
    happened: Happened = "no"  # has it changed something outside? "no" for reads and requests to models, too
    args: str = ""  # its arguments as JSON, cut
    next: bool = False  # the agent makes this superseded call again first: it is in `Reopened.next` or in `Reopened.reused`


class ReopenedChild(Struct, frozen=True):
    """A child that was started after the event from which the run goes on. It has ended, or its run is ended by force."""

    call: int
    run_id: str
    agent: str
    status: str | None  # "succeeded", "failed" or "cancelled"; None: the run was not told how it ended


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
    added: Limits | None = None  # what is added to the run's own budget
    superseded_children: list[ReopenedChild] = []  # as `superseded`; what they did stays too
    reused: list[str] = []  # superseded calls that the agent asks for first: their outcomes are used, and nothing is sent
    # New calls that the agent asks for first, if a superseded call of the same tool has happened or may have happened: one more effect.
    twice: list[str] = []
    fails: str | None = None  # the failure with which the run ends again at once, before it makes any call
    withdrawn: list[str] = []  # approvals after `back_to` that were not used yet: they are withdrawn
    calls: int = 0  # how many calls the run has made so far
    may_cost: Usage = Usage()  # the declared `cost=` of the calls that will run first, together
    budgets: list[BudgetView] = []  # the budgets that apply to the run, without what is added now


class LiveFork(Struct, frozen=True):
    """What a live fork means, before or after it was made: a real run, which goes on from a copy of another run's events."""

    run_id: str  # the fork
    parent: str
    at: int  # the event of the parent after which the fork goes on
    before: str  # the version of the agent's code that has driven the parent
    version: str  # the version that goes on with the fork
    kept: int  # how many calls of the parent have a result that the fork's agent keeps
    # Calls that the parent has made after `at`. If the fork's agent makes one too, the recorded outcome is used. If it
    # makes another call instead, that is one more effect.
    done: list[ReopenedCall]
    twice: list[str]  # what may happen twice, in words
    next: list[str]  # what the fork's agent asks for first
    edits: list[int]
    done_children: list[ReopenedChild] = []  # as `done`
    reused: list[str] = []  # as in `Reopened`
    used: Usage = Usage()  # what the parent has used so far
    may_cost: Usage = Usage()  # as in `Reopened`
    budget: Limits | None = None  # the budget of the fork, which has used nothing of it


class ForkPlan(Struct, frozen=True):
    """The writes of a live fork, and what they mean."""

    fork: LiveFork
    new: NewFork


class Plan(Struct, frozen=True):
    """What a retry or a rewind writes, and the preview of it."""

    reopened: Reopened
    runs: Sequence[Reopen]
    raised: Sequence[str]  # the runs whose budgets are raised


class _Draft(Struct, frozen=True):
    """A plan in the making, for a run and the children that go on with it."""

    by: str
    reason: str | None
    fresh: bool
    adding: Mapping[str, Limits] = {}  # run → what is added to its budget
    runs: list[Reopen] = []
    over: list[BudgetExceeded] = []  # the budgets that stopped these runs


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
        batch: str = "",
    ) -> None:
        self._reading = reading
        self._agent_of = agent_of
        self._load = load
        self._max_steps = max_steps
        self._max_asks = max_asks
        self._now = now
        self._new_id = new_id
        self._batch = batch  # the id of the bulk operation, for the events

    def plan(
        self,
        run_id: str,
        to: int | None,
        *,
        by: str,
        reason: str | None,
        fresh: bool,
        tenant: str | None,
        add: Limits | None = None,
        agent: Agent[Any, Any] | None = None,
    ) -> Plan:
        """The plan to go back to the event `to`. If `to` is None, to the event to which a retry goes back.

        `add` is added to each budget that stopped the run, or a child that goes on too. If there is none, it is added
        to the run's own budget.

        Errors: NotFound, Conflict, InvalidInput, AlreadyRunning; UnknownAgent; Diverged if the code asks for other
        calls than the journal has up to that point.
        """
        row = self._row(run_id, tenant)
        check_reopens(row)
        sandbox.guard()  # an agent must not do I/O while it is replayed either
        agent, draft = agent or self._agent_of(row.agent), _Draft(by, reason, fresh)
        reopened = self._reopened(row, to, agent, draft)
        if add is not None:
            # Only the plan says which runs go on, and which budgets have stopped them. So it is made again, with the raise.
            draft = _Draft(by, reason, fresh, self._adding(row.run_id, to, add, draft))
            reopened = self._reopened(row, to, agent, draft)
        return Plan(reopened, draft.runs, list(draft.adding))

    def _adding(self, run_id: str, to: int | None, add: Limits, draft: _Draft) -> dict[str, Limits]:
        """Run → what is added to its own budget. Conflict if there is no such budget, or if this does not help."""
        here = {one.run_id for one in draft.runs}
        # A fork has copies of events that name the budget of another run.
        over = [one for one in draft.over if one.budget_of in here]
        verb = shell.command("retry", run_id) if to is None else f"{shell.command('rewind', run_id)} --to {to}"
        stopped: list[tuple[str, BudgetExceeded | None]] = [(one.budget_of, one) for one in over]
        for owner, why in stopped or [(run_id, None)]:
            own = next((ledger for ledger in self._reading.ledgers(owner) if ledger.run_id == owner), None)
            if own is None:
                raise Conflict(f"run {owner} has no budget, so nothing can be added to it")
            check_helps(run_id, own, add, why, verb)
        return dict.fromkeys((one.budget_of for one in over), add) or {run_id: add}

    def fork(
        self,
        run_id: str,
        new_id: str,
        at: int | None,
        *,
        by: str,
        reason: str | None,
        edits: Mapping[int, Any],
        input: Mapping[str, Any] | UnsetType,
        agent: Agent[Any, Any],
        inline_bytes: int,
        tenant: str | None = None,
    ) -> ForkPlan:
        """The plan of a live fork. Errors: as for `plan`; Conflict if the outcome of a call of the run is not known."""
        from perdure.inspect.specimen import Packing, new_fork  # imported only if needed

        row = self._row(run_id, tenant)
        _check_forks(row)
        if self._reading.get(undo_id(row.run_id)) is not None:
            raise undone(row.run_id, "no live fork can be made of it")
        if self._reading.get(new_id) is not None:
            raise Conflict(f"run {new_id} exists; nothing was written: choose another id for the fork")
        sandbox.guard()
        recorded = self._reading.recorded(run_id)
        events = [event for event in recorded.events if event.seq <= row.seq]
        check_copies(events)
        before = fold(events)
        spent = before.used  # `live_fork` changes the state
        changed = {number: edited_result(before, number, value) for number, value in edits.items()}
        point = fork_point(run_id, events, at, list(changed))
        check_not_taken_back(before, point, self._load)
        packing = Packing(inline_bytes, self._load)
        if not isinstance(input, UnsetType | Mapping):
            raise InvalidInput(f"input={shown(input)}: the arguments of agent {agent.name} by name, such as {{'order': 'o-7'}}")
        given = None if isinstance(input, UnsetType) else packing.pack(agent.bind((), input))
        made = RunForked(new_id, run_id, point, row.head.hex(), by, reason, tuple(sorted(changed)), given is not None)
        packed = {number: packing.pack(result) for number, result in changed.items()}
        fork = live_fork(
            events,
            before,
            made,
            packed,
            version=agent.version,
            input=given,
            target=agent.target,
            now=self._now,
            ids=iter(self._new_id, None),
        )
        fork.state.version = agent.version
        frontier, pending = self._stand(agent, fork.state, fork.events, packing.load, fresh=False)
        self._check_edits(changed, agent, fork, frontier, packing.load)
        first = _first(pending, fork.state, fresh=False)
        found = LiveFork(
            *(new_id, run_id, point, row.version, agent.version),
            kept=len(fork.reopening.kept),
            done=[_call(call) for call in fork.reopening.superseded],
            twice=list(_twice(row, fork)),
            next=first.run,
            edits=sorted(changed),
            done_children=[_child(child) for child in fork.reopening.superseded_children],
            reused=first.reused,
            used=spent,
            may_cost=_may_cost(pending, frontier, fork.state, fresh=False),
            budget=fork.state.budget,
        )
        return ForkPlan(found, new_fork(recorded, fork.state, fork.events, None, packing))

    def _check_edits(
        self, edits: Mapping[int, bytes], agent: Agent[Any, Any], fork: Forked, frontier: Frontier, load: Callable[[Payload], bytes]
    ) -> None:
        """InvalidInput if an edited result does not fit the tool or the child in this code."""
        asked = frontier.calls
        if any(number not in asked for number in edits):
            asked = asked_in_all_branches(agent, fork.state, fork.events, load, self._max_steps)
        for number, result in edits.items():
            if number not in asked:
                raise InvalidInput(
                    f"call {number} cannot be edited: its tool or agent is not in this code, so that the result cannot be checked"
                )
            check_edit(asked[number], number, result)

    def _row(self, run_id: str, tenant: str | None = None) -> RunRow:
        row = self._reading.get(run_id)
        if row is None or tenant not in (None, row.tenant):
            raise no_such_run(run_id, self._reading)
        return row

    def _reopened(self, row: RunRow, to: int | None, agent: Agent[Any, Any], draft: _Draft) -> Reopened:
        if row.status == "running" or row.holder is not None:
            raise AlreadyRunning(f"run {row.run_id} is held by a worker", hint=f"pause it first: {shell.command('pause', row.run_id)}")
        if self._reading.get(undo_id(row.run_id)) is not None:
            raise undone(row.run_id, "it cannot go on")
        events = self._reading.read(row.run_id)
        state = fold(events)
        if state.seq != row.seq:
            # The row says which version has driven the run, and decides which code is checked: it must not be older.
            raise Conflict(f"run {row.run_id} has moved on while its journal was read, so nothing was written; try again")
        back_to = retry_point(events, state) if to is None else to
        by, reason, fresh, add = draft.by, draft.reason, draft.fresh, draft.adding.get(row.run_id)
        ended = self._ended_meanwhile(state)
        found = reopening(events, back_to, by=by, reason=reason, fresh=fresh, ended=ended, state=state, add=add)
        check_not_taken_back(state, back_to, self._load)
        if found.over is not None:
            draft.over.append(found.over)
        kept, again = ([_call(call) for call in calls] for calls in (found.kept, found.again))  # before the state changes
        left = [_child(child) for child in found.superseded_children]
        withdrawn = [_withdrawn(state.asks[number]) for number in found.withdrawn]
        fitting = self._fitting(agent, row, events, state, found.bodies, by, reason, fresh)
        frontier, pending, state = fitting.frontier, fitting.pending, fitting.state
        version = agent.version if agent.version != row.version else None
        hooks = self._hooks(agent, state, fitting.events, [*frontier.calls.values(), *pending], found.superseded)
        first = _first(pending, state, fresh)
        draft.runs.append(
            Reopen(row.run_id, found.seen, [(in_batch(body, self._batch), call, self._new_id()) for body, call in fitting.bodies], version)
        )
        return Reopened(
            row.run_id,
            found.back_to,
            row.version,
            agent.version,
            kept=kept,
            again=again,
            superseded=[_call(call, hooks.get(call.number), call.number in first.numbers) for call in found.superseded],
            open=[open_call_words(call, frontier, state, max_asks=self._max_asks, now=self._now) for _, call in sorted(state.open.items())],
            next=first.run,
            used=state.used,
            children=[
                self._reopened(self._row(child), None, self._agent_of_child(child, frontier, state), draft) for child in found.children
            ],
            added=add,
            superseded_children=left,
            reused=first.reused,
            twice=list(_one_more(pending, state, found, first.numbers)),
            fails=first.fails,
            withdrawn=withdrawn,
            calls=sum(call.begun and not call.inherited for call in state.calls.values()),
            may_cost=_may_cost(pending, frontier, state, fresh),
            budgets=[budget_view(ledger) for ledger in self._reading.ledgers(row.run_id)],
        )

    def _fitting(
        self,
        agent: Agent[Any, Any],
        row: RunRow,
        events: Sequence[Event],
        state: RunState,
        bodies: Sequence[_Body],
        by: str,
        reason: str | None,
        fresh: bool,
    ) -> _Fitting:
        """What is written so that this code can go on with the reopened run, and where the agent stands then.

        `state`: the fold of `events`; it becomes that of the reopened run. If the code has another version, that is
        recorded. If a frame applies to turns that are superseded now, or if only another frame lets the code replay
        the turns that stay, the change of the frame is recorded, too.
        """
        reopened, *others = bodies
        whole = [*events, *_would_be(events, [reopened], self._now, row.epoch)]
        state.apply(whole[-1])
        changed = agent.frame_change(state, whole, self._load, by=by, note=reason)
        shorter = changed is not None and bool(state.frames) and changed.after < state.frames[-1].after
        adopted = [] if agent.version == row.version else [(RunAdopted(agent.version, by, reason), None)]
        if not shorter:
            try:
                fitting = self._replayed(agent, row, events, state, [reopened, *adopted, *others], fresh)
                if state.frames:
                    agent.check_open_calls(fitting.frontier, state, self._load)
                return fitting
            except Diverged:
                if changed is None or not adopted:
                    raise
                state = fold(whole)
        assert changed is not None
        fitting = self._replayed(agent, row, events, state, [reopened, (changed, None), *others], fresh)
        agent.check_open_calls(fitting.frontier, state, self._load)
        return fitting

    def _replayed(
        self, agent: Agent[Any, Any], row: RunRow, events: Sequence[Event], state: RunState, bodies: list[_Body], fresh: bool
    ) -> _Fitting:
        """`state`: the fold of `events` and of the first of `bodies`, the `run_reopened`."""
        written = _would_be(events, bodies, self._now, row.epoch)
        for event in written[1:]:
            state.apply(event)
        state.version = agent.version
        whole = [*events, *written]
        return _Fitting(bodies, *self._stand(agent, state, whole, self._load, fresh), state, whole)

    def _stand(
        self, agent: Agent[Any, Any], state: RunState, events: Sequence[Event], load: Callable[[Payload], bytes], fresh: bool
    ) -> tuple[Frontier, list[Command]]:
        """Where the agent stands at the end of these events, and what it asks for then.

        If recorded outcomes are used again, this includes what the agent asks for after them.
        """
        machine = agent.machine_of(state, load, self._max_steps)
        try:
            frontier = replay(machine, events, load, past=history(events, state=state))
            pending = [command for _, command in frontier.pending]
            with machine.replayed():
                for command in pending:  # it grows: each outcome may lead to more commands
                    if not isinstance(command, Asked) or not _is_used_again(command, state, fresh):
                        continue
                    for end in machine.earlier.outcomes.get(command.number, ()):
                        completion = completion_of(end, load)
                        if completion is None or machine.finished or machine.left or command.number not in machine.waits_for:
                            continue
                        machine.cause, machine.source = events[-1].seq, end.seq
                        pending += machine.deliver(self._now, completion)
        finally:
            machine.close()
        return frontier, pending

    def _hooks(
        self, agent: Agent[Any, Any], state: RunState, events: Sequence[Event], known: Sequence[Command], superseded: Sequence[CallState]
    ) -> dict[int, bool]:
        """Number of a superseded call → does its tool have a compensate hook in this code?"""
        found: dict[str, set[bool]] = {}
        for asked in known:
            if isinstance(asked, CallTool):
                found.setdefault(asked.tool.name, set()).add(asked.tool.compensator is not None)
        if all(len(found.get(call.tool, ())) == 1 for call in superseded):
            # The agent calls these tools before the point, or next. So the superseded events need not be replayed.
            return {call.number: True in found[call.tool] for call in superseded}
        everything = asked_in_all_branches(agent, state, events, self._load, self._max_steps)
        return {number: call.tool.compensator is not None for number, call in everything.items() if isinstance(call, CallTool)}

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


def _check_forks(row: RunRow) -> None:
    """Conflict, with the way out, if no live fork of this run can be made. Its code is not needed to know."""
    row.check_live()
    if (undone := undone_by(row.run_id)) is not None:
        raise Conflict(f"run {row.run_id} is the undo of run {undone}: it has no live fork")
    if row.parent is not None:
        raise Conflict(
            f"run {row.run_id} is a child of run {row.parent}, and has no live fork of its own: fork the run at the top",
            hint=f"{shell.command('fork', row.parent.partition('/')[0])} --at SEQ --live",
        )


def _twice(row: RunRow, fork: Forked) -> Iterator[str]:
    """What may happen twice: in the run that was forked, and in the fork."""
    for call in fork.reopening.superseded:
        what = f"call {call.number} {call.tool} ({call.effect})"
        match happened(call):
            case "yes":
                yield (
                    f"{what} has happened in {row.run_id}: its result is used if the fork makes the same call; with other arguments the fork "
                    "makes one more"
                )
            case "maybe" if is_repeatable_class(call):
                yield f"{what} may have happened in {row.run_id}: if the fork makes it too, it happens in both"
            case "maybe":
                yield (
                    f"{what} failed in {row.run_id}, and may have happened: its failure is used if the fork makes the same call; with other "
                    "arguments the fork makes one more"
                )
            case "no":
                if call.phase == "failed" and call.effect != "read" and not call.of_model:
                    yield f"{what} failed in {row.run_id}: if the fork makes it and {row.run_id} is retried, both make it"
    superseded = {child.number for child in fork.reopening.superseded_children}
    for child in fork.state.children.values():
        if child.asked_seq > fork.reopening.back_to and child.ended is None:
            yield f"child {child.run_id} has not ended: if the fork starts it too, what it does happens twice"
        elif child.number in superseded:
            yield (
                f"child {child.run_id} ({child.agent}) has run: its outcome is used if the fork starts the same child; with another input the "
                "fork starts one more"
            )
    if row.status not in FINISHED:
        yield f"run {row.run_id} is {row.status.replace('_', ' ')} and goes on too: a call that both make from here on happens in both"
    elif row.status != "succeeded":
        yield f"run {row.run_id} has {row.status}: if it is retried, a call that both make from here on happens in both"


def _would_be(events: Sequence[Event], bodies: Sequence[_Body], now: int, epoch: int) -> list[Event]:
    """The events as they would be written."""
    last = events[-1].seq
    return [
        Event(seq, "0" * 32, now, epoch, call, last if seq == last + 1 else last + 1, body)
        for seq, (body, call) in enumerate(bodies, last + 1)
    ]


def _call(call: CallState, undo: bool | None = None, next: bool = False) -> ReopenedCall:
    effect = "model" if is_request(call.args) else call.effect
    return ReopenedCall(call.number, call.tool, effect, call.phase, call.key, undo, happened(call), args_words(call.args), next)


def _child(child: ChildState) -> ReopenedChild:
    return ReopenedChild(child.number, child.run_id, child.agent, None if child.ended is None else child.ended.status)


class _First(Struct, frozen=True):
    """What the agent asks for first, in words."""

    run: list[str] = []  # what is done
    reused: list[str] = []  # superseded calls whose outcomes are used: nothing is sent
    numbers: set[int] = set()  # the calls of both
    fails: str | None = None  # the run ends with this failure, and no call is made before


def _first(pending: Sequence[Command], state: RunState, fresh: bool) -> _First:
    first = _First()
    for command in pending:
        words = _words(command)
        if words is None:
            continue
        if isinstance(command, Asked):
            first.numbers.add(command.number)
            call = state.calls.get(command.number)
            if _is_used_again(command, state, fresh):
                first.reused.append(words + ("" if call is None or call.phase == "completed" else ": its failure"))
                continue
            if call is not None:
                words = f"{words}: {_made_before(call)}"
        first.run.append(words)
    ends = [command.outcome.failure for command in pending if isinstance(command, Finish) and isinstance(command.outcome, Failed)]
    if ends and len(first.run) == 1 and not state.open:
        return structs.replace(first, fails=f"{ends[0].type}: {ends[0].message}")
    return first


def _may_cost(pending: Sequence[Command], frontier: Frontier, state: RunState, fresh: bool) -> Usage:
    """The declared cost of the calls that will run first, and of the open calls, together."""
    asked = [command for command in pending if not _is_used_again(command, state, fresh)]
    asked += [frontier.calls[number] for number in state.open if number in frontier.calls]
    total = Usage()
    for command in asked:
        if isinstance(command, CallTool) and command.tool.estimate is not None:
            total = added(total, command.tool.estimate)
    return structs.replace(total, model=None)


def _withdrawn(ask: AskState) -> str:
    state = "is still pending" if ask.outcome is None else f"was granted by {ask.by}, and not used yet"
    return f"call {ask.number}, approval {ask.request.approval} ({ask.request.action}) {state}"


def _one_more(pending: Sequence[Command], state: RunState, found: Reopening, again: set[int]) -> Iterator[str]:
    """For each new call among these: the superseded calls of its tool that have happened, or may have happened."""
    for command in pending:
        if not isinstance(command, CallTool | StartChild) or command.number <= state.numbers:
            continue
        if isinstance(command, StartChild):
            for child in found.superseded_children:
                if child.agent == command.agent.name and child.number not in again:
                    yield f"child {child.run_id} ({child.agent}) was started already with another input: child {command.number} is one more"
            continue
        for call in found.superseded:
            if call.tool == command.tool.name and call.number not in again and (was := happened(call)) != "no":
                verb = "was made already" if was == "yes" else "may have been made already"
                yield f"{call.tool} {verb} with {args_words(call.args)} (call {call.number}): call {command.number} is one more"


def _is_used_again(command: Command, state: RunState, fresh: bool) -> bool:
    """Is this a superseded call whose recorded outcome is used, so that nothing is sent?"""
    if not isinstance(command, Asked) or command.number > state.numbers:
        return False
    call = state.calls.get(command.number)
    if call is None:
        return True  # an approval or a child
    if call.phase == "completed":
        return not is_made_anew(call, fresh)
    return call.inherited or (call.phase == "failed" and is_certain_end(call))


def _made_before(call: CallState) -> str:
    """In words: what happens with a superseded call that the agent requests again, if its outcome is not used."""
    if call.phase == "completed":
        return "made before, and made again"
    if call.phase != "failed":
        return "made before, and may have happened: this doubt is settled first"
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
