"""The first line of the page, one sentence: the run's status, since when, and why."""

from __future__ import annotations

from msgspec import Struct

from perdure.core.events import CancelRequested, Reason, RunCancelled, place_of
from perdure.inspect.text import at, clip, clock, failed, iso, moment, plural, shown, span
from perdure.inspect.why.calls import CallInDoubt, cut_off
from perdure.inspect.why.context import Holder, Scene, shortage_words, stopped_words
from perdure.inspect.why.waiting import asked, child_in_short, children, in_short
from perdure.inspect.workers import serves


class Cancel(Struct, frozen=True):
    """Who asked to cancel the run, when and why."""

    by: str
    at: str
    reason: str | None


def headline(scene: Scene, doubts: list[CallInDoubt]) -> str:
    """The run's status in one sentence. A request to cancel the run, if there is one, comes first."""
    imported = scene.reading.row.imported
    if imported is not None and imported.fork_of is not None:
        return _standing(scene, doubts)  # the next line of the page says that it is a fork
    if imported is not None:
        copy = "a redacted specimen" if imported.original_head is not None else "a specimen"
        status = scene.reading.row.status
        stood = f"it was {status}" if status in ("running", "queued", "cancelling") else _standing(scene, doubts)
        return f"{copy}, to be looked at (exported at {moment(imported.exported_at, scene.now)}); as of its last event: {stood}"
    cancel = cancel_asked(scene)
    if cancel is None or scene.reading.state.finished:
        return _standing(scene, doubts)
    reason = f": {clip(cancel.reason, 120)}" if cancel.reason else ""
    return f"being cancelled ({cancel.by} asked at {moment(cancel.at, scene.now)}{reason}): {_standing(scene, doubts)}"


def cancel_asked(scene: Scene) -> Cancel | None:
    """The first request to cancel the run; None if there is none. Later requests change nothing.

    A request from before the run was reopened does not count.
    """
    reopened = max((one.seq for one in scene.reading.reopenings), default=0)
    for event in scene.reading.events[place_of(scene.reading.events, reopened) :]:
        if isinstance(event.body, CancelRequested):
            return Cancel(event.body.by, iso(event.ts), event.body.reason)
    return None


def _standing(scene: Scene, doubts: list[CallInDoubt]) -> str:
    row, state, now = scene.reading.row, scene.reading.state, scene.now
    for_long = f"since {clock(row.updated_at, now)} ({span(now - row.updated_at)})"
    if scene.reading.row_was_edited:
        ended = f"ended at {clock(state.updated_at, now)} (event {state.seq}, {state.status})" if state.finished else "has not ended"
        return f"its row was edited: the row says {row.status}, and by its journal the run {ended}; no worker goes on with it"
    match row.status:
        case "succeeded":
            return f"succeeded at {clock(state.updated_at, now)} with {shown(state.output, 200)}"
        case "failed":
            return f"failed at {clock(state.updated_at, now)}: {failed(state.failure, 300)}"
        case "cancelled":
            return _cancelled_sentence(scene)
        case "needs_attention":
            return _attention_sentence(scene, doubts, for_long)
        case "running" | "cancelling":
            return _running_sentence(scene, doubts)
        case "queued":
            return _queued_sentence(scene)
        case "paused":
            return _paused_sentence(scene, for_long)
        case "waiting_approval":
            return _approval_sentence(scene, for_long)
        case "waiting":
            return _waiting_sentence(scene, for_long)


def _cancelled_sentence(scene: Scene) -> str:
    state, end = scene.reading.state, scene.reading.events[-1].body
    when = clock(state.updated_at, scene.now)
    if isinstance(end, RunCancelled) and end.forced_by is not None:
        reason = f": {clip(end.reason, 200)}" if end.reason else ""
        left = f"; left open: {plural(len(state.open), 'call')}" if state.open else ""
        return f"ended by force at {when} by {end.forced_by}, without its agent{reason}{left}"
    by = f" by {state.cancel.by}" if state.cancel else ""
    reason = f": {state.cancel.reason}" if state.cancel and state.cancel.reason else ""
    return f"cancelled{by} at {when}{reason}"


_MEANING: dict[Reason, str] = {
    "diverged": "the code asks for something else than the journal has, so it was stopped before it could do harm",
    "poison": "it seems to kill its workers",
    "stuck": "the agent does not come to rest, or waits for nothing",
    "error": "it cannot be driven",
    "restored": "any effect may have happened that the journal does not have",
    "circling": "it is going in circles, so it was stopped before it could spend more",
}


def _attention_sentence(scene: Scene, doubts: list[CallInDoubt], for_long: str) -> str:
    state = scene.reading.state
    attention = state.attention
    recorded = [doubt for doubt in doubts if doubt.recorded]
    if attention is None or attention.reason == "in_doubt":
        if not recorded:
            return f"needs attention {for_long}: {scene.reading.row.waiting_for or scene.reading.row.error or 'it does not say why'}"
        first = recorded[0]
        more = f"; so {'is' if len(recorded) == 2 else 'are'} {plural(len(recorded) - 1, 'other call')}" if len(recorded) > 1 else ""
        return f"needs attention: call {first.call} {first.tool} is in doubt since {moment(first.since, scene.now)} ({first.age}): {first.why}{more}"
    if attention.reason == "budget":
        why = attention.detail if scene.short is None else shortage_words(scene.short)
        return f"needs attention {for_long} (budget): {why}; the run waits until the budget is raised"
    return f"needs attention {for_long} ({attention.reason}): {_MEANING[attention.reason]}: {attention.detail}"


def _running_sentence(scene: Scene, doubts: list[CallInDoubt]) -> str:
    row, state, now, holder = scene.reading.row, scene.reading.state, scene.now, scene.holder
    # If the run is being cancelled, the caller writes this fact before the sentence.
    what, on_paper = ("", "on paper") if row.status == "cancelling" else (f"{row.status}: ", f"{row.status} on paper")
    if state.paused is not None and holder is not None:
        reason = f": {clip(state.paused.reason, 120)}" if state.paused.reason else ""
        what = f"pausing ({state.paused.by} asked{reason}), when what is under way has ended: "
    last = f"its last event is {span(now - state.updated_at)} old"
    if holder is None:
        return f"{what}no worker holds it, and {scene.missing or scene.suspect or 'any worker may take it'}; {last}"
    if holder.alive:
        return f"{what}worker {holder.name} holds it and is alive, {_last_seen(holder, now)}; {last}"
    seen = f", {_last_seen(holder, now)}" if holder.last_seen else ""
    if scene.silent:
        where = f"is silent{_inside(scene, doubts)}{seen}: suspended, or cut off from the database"
        return f"{on_paper}: worker {holder.name} holds it and {where}; another worker takes the run over when the lease has run out"
    return f"{on_paper}: worker {holder.name} held it and is dead{_inside(scene, doubts)}{seen}; no worker has taken the run over yet"


def _inside(scene: Scene, doubts: list[CallInDoubt]) -> str:
    left_open = [(doubt.call, doubt.tool) for doubt in doubts] or [(call.number, call.tool) for call in cut_off(scene)]
    return f", inside call {left_open[0][0]} {left_open[0][1]}" if left_open else ""


def _last_seen(holder: Holder, now: int) -> str:
    return f"last seen {moment(holder.last_seen or '', now)} ({span(round((holder.silent_s or 0) * 1e6))} ago)"


def _queued_sentence(scene: Scene) -> str:
    row, state, now = scene.reading.row, scene.reading.state, scene.now
    since = row.ready_at if row.ready_at is not None else row.updated_at
    if since > now:
        begun = "begin" if state.started_seq is None else "go on"
        return f"queued in {row.queue}: it shall not {begun} before {at(since, now)}; {_workers(scene)}"
    if state.worker is not None:
        return f"queued for {span(now - since)}: worker {state.worker_name} died while it drove the run, and no other worker has taken it over yet; {_workers(scene)}"
    begun = "has not begun yet" if state.started_seq is None else "is ready to go on"
    return f"queued for {span(now - since)}: it {begun}, and no worker has taken it; {_workers(scene)}"


def _workers(scene: Scene) -> str:
    """How many workers would claim the run, or why no worker does."""
    if not scene.alive:
        return "no worker is alive"
    if scene.missing is not None:
        return scene.missing
    would = [worker for worker in scene.workers if serves(worker, scene.reading.row)]
    if scene.no_room is not None:
        return f"{scene.no_room}; {plural(len(would), 'worker')} would take it then"
    if scene.suspect is not None:
        return scene.suspect
    return f"{plural(len(would), 'worker')} would, and may be busy"


def _paused_sentence(scene: Scene, for_long: str) -> str:
    paused = scene.reading.state.paused
    if paused is None:
        return f"paused {for_long}: {scene.reading.row.waiting_for or 'by a person'}; no process holds it"
    reason = f": {clip(paused.reason, 200)}" if paused.reason else ""
    return f"paused by {paused.by} {for_long}{reason}; what is posted to it meanwhile is kept"


def _approval_sentence(scene: Scene, for_long: str) -> str:
    asks = asked(scene)
    if not asks:
        return _waiting_sentence(scene, for_long)
    first = asks[0]
    more = f"; and {plural(len(asks) - 1, 'more approval')}" if len(asks) > 1 else ""
    if first.status != "pending" or first.expired:
        going = f"its time was over at {clock(scene.reading.state.pending[first.call].request.expires_at or 0, scene.now)}"
        return f"waiting for an approval {for_long}: {in_short(first) if first.status != 'pending' else going}; {_workers(scene)}{more}"
    return f"waiting for {in_short(first)} {for_long}: {first.then}{more}"


def _waiting_sentence(scene: Scene, for_long: str) -> str:
    row, now = scene.reading.row, scene.now
    what = row.waiting_for or "something from outside"
    if (news := _news_of_children(scene)) is not None:
        return f"waiting {for_long}{news}"
    if row.ready_at is None:
        then = "no process holds it" if scene.served or not scene.alive else _workers(scene)
        return f"{row.status.replace('_', ' ')} {for_long}: for {what}; {then}"
    if row.ready_at > now:
        then = "no process holds it" if scene.served else _workers(scene) if scene.alive else "no worker is alive that would go on then"
        return f"waiting {for_long}: for {what}, until {at(row.ready_at, now)}; {then}"
    return f"waiting: for {what}, which was due at {clock(row.ready_at, now)} ({span(now - row.ready_at)} ago); {_no_worker(scene)}"


def _no_worker(scene: Scene) -> str:
    return _workers(scene) if scene.alive else "no worker is alive to go on"


def _news_of_children(scene: Scene) -> str | None:
    found = children(scene)
    if found is None:
        return None
    still = [f": {stopped_words(short)}; they wait until the budget is raised" for short in found.short]
    if found.news:
        more = f"; and {plural(len(found.news) - 1, 'other')}" if len(found.news) > 1 else ""
        still.append(f" for a child that will not go on by itself: {child_in_short(found.news[0])}{more}")
    return "; and".join(still) or None
