"""The page of `perdure why`: what a run did, what is in doubt, what the run waits for, what never began, what to type.

The page is for the person on call. It is built from the `Scene`: the run's row, its journal, the workers and more. The
page guesses nothing: if perdure does not know something, the page says so.
"""

from __future__ import annotations

from msgspec import Struct

from perdure.core.events import FrameChanged, PinChanged, RunAdopted
from perdure.core.prompt_deltas import is_request
from perdure.core.state import CallState
from perdure.engine.api import Reading
from perdure.inspect.branches import Reopening
from perdure.inspect.cost import BudgetView, Cost, CostAll, budget_view, cost_of, cost_words
from perdure.inspect.inside import InspectedFrame
from perdure.inspect.schedules import schedule_line
from perdure.inspect.text import asked_words, checkpoint_words, iso, places, seconds, span
from perdure.inspect.why import advice
from perdure.inspect.why.advice import AdviceStep
from perdure.inspect.why.calls import (
    CallInDoubt,
    Done,
    Ended,
    TopicSignals,
    cut_off,
    doubts,
    ended,
    heard,
    never_started,
    reached,
    strays,
    superseded,
    topics,
    unread_words,
    waiting,
)
from perdure.inspect.why.context import Holder, Scene, Undoing, look, shortage_words
from perdure.inspect.why.headline import Cancel, cancel_asked, headline
from perdure.inspect.why.waiting import Asked, Children, asked, children
from perdure.settings import Settings

FIRST_SHOWN, LAST_SHOWN = 3, 5


class Open(Struct, frozen=True):
    """A call that is being performed, or a call that was cut off and is safe to run again."""

    call: int
    asked: str
    state: str
    since: str
    age_s: float
    seq: int
    progress: str | None = None  # in words, with its age: what the attempt reported with `call.heartbeat`


class Paused(Struct, frozen=True):
    """Who paused the run, and why."""

    by: str
    reason: str | None


class Why(Struct, frozen=True):
    """Everything on the page, in the order of the page."""

    run_id: str
    agent: str
    version: str
    tenant: str
    labels: dict[str, str]
    queue: str
    priority: int
    parent: str | None
    parent_call: int | None
    specimen: bool  # an imported copy: no command can change it
    status: str
    now: str  # when the page was made
    sentence: str
    places: list[str]  # if the run failed: where the exception was raised
    # If the run failed and its code can be loaded: the line that failed, and its variables.
    failing: InspectedFrame | None
    cancel: Cancel | None
    paused: Paused | None
    said: str | None
    holder: Holder | None
    workers_alive: int
    unserved: str | None  # what the run needs and no live worker serves
    no_room: str | None  # the queue limit that blocks the ready run
    suspect: str | None  # why the ready run waits as a suspect: its workers died, and the run may be the cause
    done: list[Done]  # calls, approvals and children that succeeded
    done_count: int
    not_done: list[Done]  # calls, approvals and children that failed, were rejected, expired or were cancelled
    not_done_count: int
    schedule: str | None  # in words: the schedule and the tick that have started the run
    fork: str | None  # in words: of which run this is a fork
    checkpoints: str | None  # in words: how many checkpoints the run has taken, and where the last one is
    reopened: list[Reopening]  # where people let the run go on from an earlier event
    superseded: list[Done]  # superseded calls that happened or may have happened: their effects stay
    undoing: Undoing | None  # the run that undoes this run
    in_doubt: list[CallInDoubt]
    again: list[Open]  # calls that were cut off, and are safe to run again
    under_way: list[Open]
    approvals: list[Asked]
    children: Children | None
    listens: list[str]  # the signal topics that the parked run waits for
    heard: list[TopicSignals]  # signals that the journal has, by topic
    strays: list[str]  # signals on topics that the run has never waited for
    waiting: list[str]
    wakes_at: str | None
    never_started: list[str]
    unread: list[str]  # post that the finished run never read: a line with the count, then one line each
    changed: list[str]  # tools that changed since the run first used them, and versions that were adopted
    over_budget: str | None
    cost: Cost
    cost_all: CostAll | None  # the cost together with the children, if the run has children
    cost_words: str
    budgets: list[BudgetView]
    next: list[AdviceStep]


_DEFAULTS = Settings()


def why(
    store: Reading,
    run_id: str,
    *,
    now: int,
    settings: Settings = _DEFAULTS,
    options: str = "",
    code: str | None = None,
    failing: InspectedFrame | None = None,
) -> Why:
    """The page about a run. `options` is added to every command on the page, such as ` --url …`.

    `code` is the argument that tells `resume` where the agent's code is. It is "" if `resume` finds the code without
    the argument, and None to take the argument from the run's row. `failing` is the frame of a failed run that a replay
    of its code has found. `settings` are the settings of this process; workers may have other settings.
    """
    scene = look(store, run_id, now, settings)
    row, state = scene.reading.row, scene.reading.state
    open_questions, approvals, family = doubts(scene), asked(scene), children(scene)
    done, not_done = ended(scene)
    what = advice.OpenAdvice(
        doubts=open_questions,
        asked=approvals,
        news=family.news if family else [],
        short=scene.short_below,
    )
    return Why(
        run_id=run_id,
        agent=row.agent,
        version=row.version,
        tenant=row.tenant,
        labels=state.labels,
        queue=row.queue,
        priority=row.priority,
        parent=row.parent,
        parent_call=row.parent_call,
        specimen=row.specimen is not None,
        status=row.status,
        now=iso(now),
        sentence=headline(scene, open_questions),
        places=places(state.failure),
        failing=failing,
        cancel=cancel_asked(scene),
        paused=Paused(state.paused.by, state.paused.reason) if state.paused is not None else None,
        said=state.said,
        holder=scene.holder,
        workers_alive=scene.alive,
        unserved=None if state.finished or scene.held or row.specimen is not None else scene.missing,
        no_room=scene.no_room,
        suspect=scene.suspect,
        done=_ends(done),
        done_count=len(done),
        not_done=_ends(not_done),
        not_done_count=len(not_done),
        schedule=schedule_line(state.created),
        fork=scene.reading.fork,
        checkpoints=checkpoint_words(state),
        reopened=scene.reading.reopened_since,
        superseded=superseded(scene),
        undoing=scene.undoing,
        in_doubt=open_questions,
        again=[_cut_off(call, scene) for call in cut_off(scene)] if not state.finished and row.specimen is None else [],
        under_way=[_open(call, scene) for call in state.open.values() if _is_under_way(scene) and call.phase == "started"],
        approvals=approvals,
        children=family,
        listens=topics(scene),
        heard=heard(scene.reading),
        strays=strays(scene.reading),
        waiting=waiting(scene, approvals),
        wakes_at=iso(row.ready_at) if row.ready_at is not None and row.ready_at > now else None,
        never_started=never_started(scene),
        unread=unread_words(scene.unread),
        changed=_changed(scene),
        over_budget=None if scene.short is None else shortage_words(scene.short),
        cost=cost_of(state, scene.reading.events),
        cost_all=scene.cost_all,
        cost_words=cost_words(state, scene.reading.events, scene.cost_all),
        budgets=[budget_view(ledger) for ledger in scene.ledgers],
        next=advice.advise(scene, what, options=options, code=code),
    )


def _ends(ended: list[Ended]) -> list[Done]:
    """All entries. If there are many: only the first FIRST_SHOWN and the last LAST_SHOWN."""
    shown = ended if len(ended) <= FIRST_SHOWN + LAST_SHOWN + 1 else ended[:FIRST_SHOWN] + ended[-LAST_SHOWN:]
    return [describe() for _, describe in shown]


def _changed(scene: Scene) -> list[str]:
    """Tools that changed since the run first used them, and versions of the agent that were adopted."""
    told = []
    for event in scene.reading.events:
        match event.body:
            case PinChanged() as pin:
                told.append(f"{pin.what} has changed since the run first used it ({pin.before} → {pin.after}, event {event.seq})")
            case RunAdopted() as adopted:
                told.append(f"version {adopted.version} goes on with it: {adopted.by} says so (event {event.seq})")
            case FrameChanged() as changed:
                told.append(
                    f"version {changed.version} goes on with it from its next turn or step on: {changed.by} says so (event {event.seq})"
                )
    return told


# -- open calls -------------------------------------------------------------------------------------------------------
def _is_under_way(scene: Scene) -> bool:
    """Does a worker perform the open calls? For a specimen: did a worker hold the run when it was exported?"""
    return scene.held or (scene.reading.row.specimen is not None and scene.reading.state.worker is not None)


def _open(call: CallState, scene: Scene) -> Open:
    since = call.started_at
    again = f", attempt {call.attempt}" if call.attempt > 1 else ""
    limit = f", times out after {span(round(call.timeout_s * 1e6))}" if call.timeout_s else ""
    doing = f"being {'asked' if is_request(call.args) else 'performed'} for {span(scene.now - since)}{again}{limit}"
    if scene.reading.row.specimen is not None:
        doing = f"had begun when the run was exported{again}; what came of it is not in the file"
    return Open(
        call.number, asked_words(call, scene.load), doing, iso(since), seconds(scene.now - since), call.intent_seq, reached(call, scene)
    )


def _cut_off(call: CallState, scene: Scene) -> Open:
    since = call.started_at
    again = (
        "asked again by the next worker; an answer that was on its way is lost" if is_request(call.args) else "run again by the next worker"
    )
    then = "not repeated: the run is being cancelled" if scene.reading.state.cancel else again
    return Open(
        call.number,
        asked_words(call, scene.load),
        f"cut off, {then}",
        iso(since),
        seconds(scene.now - since),
        call.intent_seq,
        reached(call, scene),
    )
