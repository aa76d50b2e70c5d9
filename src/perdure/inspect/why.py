"""The page for the person who is paged at night: what is done, what is in doubt, what it waits for, what never began, what to type.

Built from the run's row, its journal and the list of workers; nothing is guessed. What perdure does not know is said as such.
"""

from __future__ import annotations

from msgspec import Struct

from perdure.core.events import PinChanged, RunAdopted
from perdure.core.prompts import is_request
from perdure.core.state import CallState
from perdure.engine.api import Reading
from perdure.inspect import advice
from perdure.inspect.asks import Asked, asked
from perdure.inspect.children import Children, children
from perdure.inspect.cost import BudgetView, Cost, CostAll, budget_view, cost_of, cost_words
from perdure.inspect.doubts import Doubt, cut_off, doubts
from perdure.inspect.ended import Done, ended
from perdure.inspect.headline import Cancel, cancel_asked, headline
from perdure.inspect.models import asked_words
from perdure.inspect.orders import Step
from perdure.inspect.scene import Holder, Scene, look
from perdure.inspect.shortage import shortage_words
from perdure.inspect.undone import Undoing
from perdure.inspect.waits import Heard, heard, never_started, strays, topics, unread_words, waiting
from perdure.inspect.words import iso, places, seconds, span
from perdure.settings import Settings

FIRST_SHOWN, LAST_SHOWN = 3, 5


class Open(Struct, frozen=True):
    """A call that is being performed, or that was cut off and is harmless to run again."""

    call: int
    asked: str
    state: str
    since: str
    age_s: float
    seq: int


class Paused(Struct, frozen=True):
    """Who paused the run, and why."""

    by: str
    reason: str | None


class Why(Struct, frozen=True):
    """Everything on the page, in its order."""

    run_id: str
    agent: str
    version: str
    tenant: str
    queue: str
    priority: int
    parent: str | None
    parent_call: int | None
    status: str
    now: str  # when the page was made
    sentence: str
    places: list[str]  # of a failed run: where it was raised
    cancel: Cancel | None
    paused: Paused | None
    said: str | None
    holder: Holder | None
    workers_alive: int
    unserved: str | None  # what no worker has that the run needs
    no_room: str | None  # the limit of its queue that keeps it, though it is ready
    suspect: str | None  # why it waits, though it is ready: its workers died, and it may be the cause
    done: list[Done]  # what happened
    done_count: int
    not_done: list[Done]  # what failed, was refused, or was given up
    not_done_count: int
    undoing: Undoing | None  # what has become of it since
    in_doubt: list[Doubt]
    again: list[Open]  # cut off and never in doubt
    under_way: list[Open]
    approvals: list[Asked]
    children: Children | None
    listens: list[str]  # signal topics
    heard: list[Heard]  # signals that have reached it
    strays: list[str]  # those of them that it has never waited for
    waiting: list[str]
    wakes_at: str | None
    never_started: list[str]
    unread: list[str]  # what arrived as it ended, after a line that counts it
    changed: list[str]  # what is not any more as it was when the run began
    over_budget: str | None
    cost: Cost
    cost_all: CostAll | None  # with its children, if it has any
    cost_words: str
    budgets: list[BudgetView]
    next: list[Step]


_DEFAULTS = Settings()


def why(
    store: Reading,
    run_id: str,
    *,
    now: int,
    settings: Settings = _DEFAULTS,
    options: str = "",
    code: str | None = None,
) -> Why:
    """The page about a run. `options` goes into every command on it, such as ` --url …`.

    `code` is what `resume` must be told about where the agent's code is; "" when it finds it, None when only the run's row tells.
    `settings` are those of the process that asks; workers may have others.
    """
    scene = look(store, run_id, now, settings)
    row, state = scene.reading.row, scene.reading.state
    open_questions, approvals, family = doubts(scene), asked(scene), children(scene)
    done, not_done = ended(scene)
    what = advice.Open(
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
        queue=row.queue,
        priority=row.priority,
        parent=row.parent,
        parent_call=row.parent_call,
        status=row.status,
        now=iso(now),
        sentence=headline(scene, open_questions),
        places=places(state.failure),
        cancel=cancel_asked(scene),
        paused=Paused(state.paused.by, state.paused.reason) if state.paused is not None else None,
        said=state.said,
        holder=scene.holder,
        workers_alive=scene.alive,
        unserved=None if state.finished or scene.held else scene.missing,
        no_room=scene.no_room,
        suspect=scene.suspect,
        done=_ends(done),
        done_count=len(done),
        not_done=_ends(not_done),
        not_done_count=len(not_done),
        undoing=scene.undoing,
        in_doubt=open_questions,
        again=[_cut_off(call, scene) for call in cut_off(scene)] if not state.finished else [],
        under_way=[_open(call, scene) for call in state.open.values() if scene.held and call.phase == "started"],
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


def _ends(ended: list[Done]) -> list[Done]:
    """The first and the last of many."""
    return ended if len(ended) <= FIRST_SHOWN + LAST_SHOWN + 1 else ended[:FIRST_SHOWN] + ended[-LAST_SHOWN:]


def _changed(scene: Scene) -> list[str]:
    """Tools that are not what they were, and versions that went on with the run."""
    told = []
    for event in scene.reading.events:
        match event.body:
            case PinChanged() as pin:
                told.append(f"{pin.what} has changed since the run first used it ({pin.before} → {pin.after}, event {event.seq})")
            case RunAdopted() as adopted:
                told.append(f"version {adopted.version} goes on with it: {adopted.by} says so (event {event.seq})")
    return told


# -- what is open -----------------------------------------------------------------------------------------------------------
def _open(call: CallState, scene: Scene) -> Open:
    since = scene.reading.events[call.intent_seq - 1].ts
    again = f", attempt {call.attempt}" if call.attempt > 1 else ""
    limit = f", gives up after {span(round(call.timeout_s * 1e6))}" if call.timeout_s else ""
    doing = f"being {'asked' if is_request(call.args) else 'performed'} for {span(scene.now - since)}{again}{limit}"
    return Open(call.number, asked_words(call, scene.load), doing, iso(since), seconds(scene.now - since), call.intent_seq)


def _cut_off(call: CallState, scene: Scene) -> Open:
    since = scene.reading.events[call.intent_seq - 1].ts
    again = (
        "asked again by the next worker; an answer that was on its way is lost" if is_request(call.args) else "run again by the next worker"
    )
    then = "given up: the run is being cancelled" if scene.reading.state.cancel else again
    return Open(call.number, asked_words(call, scene.load), f"cut off, {then}", iso(since), seconds(scene.now - since), call.intent_seq)
