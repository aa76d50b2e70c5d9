"""The page for the person who is paged at night: what is done, what is in doubt, what it waits for, what never began, what to type.

Built from the run's row, its journal and the list of workers; nothing is guessed. What perdure does not know is said as such.
"""

from __future__ import annotations

from msgspec import Struct

from perdure.core.state import CallState
from perdure.inspect.advice import Step, advise
from perdure.inspect.doubts import Doubt, cut_off, doubts, hook_words
from perdure.inspect.headline import Cancel, cancel_asked, headline
from perdure.inspect.scene import Holder, Scene, look
from perdure.inspect.words import at, called, failed, iso, places, seconds, shown, span
from perdure.store.api import Store

FIRST_SHOWN, LAST_SHOWN = 3, 5


class Done(Struct, frozen=True):
    """A call that has ended, with the evidence."""

    call: int
    asked: str
    outcome: str  # "returned …" or "failed: …"
    places: list[str]  # of a failed one: where it was raised
    key: str
    attempts: int
    at: str
    seq: int
    settled_by: str | None


class Open(Struct, frozen=True):
    """A call that is being performed, or that was cut off and is harmless to run again."""

    call: int
    asked: str
    state: str
    since: str
    age_s: float
    seq: int


class Why(Struct, frozen=True):
    """Everything on the page, in its order."""

    run_id: str
    agent: str
    version: str
    tenant: str
    status: str
    now: str  # when the page was made
    sentence: str
    places: list[str]  # of a failed run: where it was raised
    cancel: Cancel | None
    said: str | None
    holder: Holder | None
    workers_alive: int
    done: list[Done]
    done_count: int
    in_doubt: list[Doubt]
    again: list[Open]  # cut off and never in doubt
    under_way: list[Open]
    waiting: list[str]
    wakes_at: str | None
    never_started: list[str]
    next: list[Step]


def why(store: Store, run_id: str, *, now: int, lease_us: int, max_asks: int = 20, options: str = "", code: str | None = None) -> Why:
    """The page about a run. `options` goes into every command on it, such as ` --url …`.

    `code` is what `resume` must be told about where the agent's code is; "" when it finds it, None when only the run's row tells.
    """
    scene = look(store, run_id, now, lease_us, max_asks)
    row, state = scene.reading.row, scene.reading.state
    open_questions = doubts(scene)
    ended = [call for call in state.calls.values() if call.ended]
    return Why(
        run_id=run_id,
        agent=row.agent,
        version=row.version,
        tenant=row.tenant,
        status=row.status,
        now=iso(now),
        sentence=headline(scene, open_questions),
        places=places(state.failure),
        cancel=cancel_asked(scene),
        said=state.said,
        holder=scene.holder,
        workers_alive=scene.alive,
        done=[_done(call) for call in _ends(ended)],
        done_count=len(ended),
        in_doubt=open_questions,
        again=[_cut_off(call, scene) for call in cut_off(scene)] if not state.finished else [],
        under_way=[_open(call, scene) for call in state.open.values() if scene.held and call.phase == "started"],
        waiting=_waiting(scene),
        wakes_at=iso(row.ready_at) if row.ready_at is not None and row.ready_at > now else None,
        never_started=_never_started(scene),
        next=advise(
            row,
            state,
            {doubt.call: doubt.settles_itself for doubt in open_questions},
            held=scene.held,
            alive=scene.alive,
            now=now,
            options=options,
            code=code,
        ),
    )


def _ends(ended: list[CallState]) -> list[CallState]:
    """The first and the last of many."""
    return ended if len(ended) <= FIRST_SHOWN + LAST_SHOWN + 1 else ended[:FIRST_SHOWN] + ended[-LAST_SHOWN:]


# -- calls --------------------------------------------------------------------------------------------------------------
def _done(call: CallState) -> Done:
    if call.phase == "failed":
        outcome = f"failed: {failed(call.failure, 100)}"
    elif call.result is None:
        outcome = f"happened; its result could not be recorded: {failed(call.failure, 80)}"
    else:
        outcome = f"returned {shown(call.result, 48)}"
    return Done(
        call=call.number,
        asked=called(call.tool, call.args, 48),
        outcome=outcome,
        places=places(call.failure),
        key=call.key,
        attempts=call.attempt,
        at=iso(call.last_ts),
        seq=call.last_seq,
        settled_by=call.resolved_by,
    )


def _open(call: CallState, scene: Scene) -> Open:
    since = scene.reading.events[call.intent_seq - 1].ts
    again = f", attempt {call.attempt}" if call.attempt > 1 else ""
    limit = f", gives up after {span(round(call.timeout_s * 1e6))}" if call.timeout_s else ""
    doing = f"being performed for {span(scene.now - since)}{again}{limit}"
    return Open(call.number, called(call.tool, call.args), doing, iso(since), seconds(scene.now - since), call.intent_seq)


def _cut_off(call: CallState, scene: Scene) -> Open:
    since = scene.reading.events[call.intent_seq - 1].ts
    then = "given up: the run is being cancelled" if scene.reading.state.cancel else "run again by the next worker"
    return Open(call.number, called(call.tool, call.args), f"cut off, {then}", iso(since), seconds(scene.now - since), call.intent_seq)


# -- what it waits for, and what never began ------------------------------------------------------------------------------
def _waiting(scene: Scene) -> list[str]:
    row, state, now = scene.reading.row, scene.reading.state, scene.now
    if state.finished:
        return []
    waits = [f"timer {number} at {at(due, now)}" for number, due in state.timers.items()]
    for call in state.open.values():
        if call.retry_at is None:
            continue
        if call.asks and call.phase == "in_doubt":
            waits.append(f"call {call.number} {call.tool}: {hook_words(call, scene)}")
        else:
            said = failed(call.failure, 100) or call.doubt
            waits.append(
                f"call {call.number} {call.tool}: attempt {call.attempt + 1} at {at(call.retry_at, now)}; the last one said: {said}"
            )
    if not waits and row.waiting_for is not None and row.status in ("waiting", "waiting_approval", "paused"):
        waits.append(row.waiting_for + (f" at {at(row.ready_at, now)}" if row.ready_at is not None else ""))
    return waits


def _never_started(scene: Scene) -> list[str]:
    state = scene.reading.state
    if state.finished:
        return []
    if state.started_seq is None:
        return ["the agent has not begun: no line of its code has run"]
    idle = [
        f"call {call.number}: {called(call.tool, call.args)}: known not to have happened; it follows when a worker has the run"
        for call in state.open.values()
        if call.phase in ("idle", "proposed", "failing")
    ]
    if not state.calls:
        return [*idle, "no call has been made yet"]
    return [
        *idle,
        f"whatever the agent does after event {state.seq} (its last call so far is {_latest(state.calls)}): that code has not run",
    ]


def _latest(calls: dict[int, CallState]) -> str:
    call = calls[max(calls)]
    return f"{call.number} {call.tool}"
