"""The state of a run, now or as of any event: a fold of its journal, or of the events up to this event."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from perdure.core.codec import Payload, decode
from perdure.core.events import DecisionMade, Event, Failure, ThoughtRecorded, place_of
from perdure.core.prompt_deltas import is_request
from perdure.core.query import EVERYTHING, Query
from perdure.core.state import AskState, CallState, ChildState, RunState, fold
from perdure.engine.api import Reading, no_such_run
from perdure.errors import NotFound
from perdure.inspect.branches import Reopening, known_calls, reopenings
from perdure.inspect.cost import budget_view, cost_of
from perdure.inspect.text import failed, iso, places, plain, pruned_words, seconds
from perdure.inspect.timeline import PlanStep, steps_of
from perdure.store.api import FINISHED, Ledger, ProgressRow, RunRow, Status

PAGE = 1000


class RunView(Struct, frozen=True):
    """A run's row, its journal up to some event, and the state as of that event."""

    row: RunRow
    events: list[Event]
    state: RunState
    past: bool  # True: the state is as of an event before the last event, so the row is newer than the state

    @property
    def reopenings(self) -> list[Reopening]:
        """Where people let the run go on from an earlier event."""
        return reopenings(self.events) if self.state.reopened else []

    @property
    def reopened_since(self) -> list[Reopening]:
        """The reopenings of this run itself: without those of the run that it was forked from, and the first one of a live fork."""
        forked = self.state.forked
        return [one for one in self.reopenings if forked is None or one.seq > self.state.inherited + len(forked.edits) + 2]

    @property
    def fork(self) -> str | None:
        """In words: of which run this is a fork, and what that means. None if it is no fork."""
        forked, created = self.state.forked, self.state.created
        if forked is None or created is None:
            return None
        made = f"a fork of run {forked.parent} at event {forked.at}, made by {forked.by}"
        if created.rehearses is not None:
            return f"{made}: a rehearsal, and nothing in it has touched the world"
        return f"{made}: it is live; the events up to {self.state.inherited} were copied, and what they did was done by {forked.parent}"

    @property
    def inherited(self) -> set[int]:
        """Of `superseded`: the calls and children of the run that this one was forked from."""
        return {number for number in self.superseded if number <= self.state.forked_numbers}

    @property
    def superseded(self) -> set[int]:
        """The numbers of the superseded calls, approvals and children, which the agent does not know any more."""
        if not self.state.reopened:
            return set()
        return {*self.state.calls, *self.state.asks, *self.state.children} - known_calls(self.events)

    @property
    def status(self) -> str:
        return self.state.status if self.past else self.row.status

    @property
    def row_was_edited(self) -> bool:
        """Do the row and the journal contradict each other about whether and how the run has ended?"""
        return not self.past and self.row.status != self.state.status and (self.state.finished or self.row.status in FINISHED)


def begins_later(row: RunRow, now: int) -> bool:
    """Was the run never claimed, and is its `not_before` still in the future?

    Only `resume --now` lets it begin earlier.
    """
    return row.epoch == 0 and row.ready_at is not None and row.ready_at > now


def require(store: Reading, run_id: str) -> RunRow:
    """The run's row. NotFound if there is no such run, or if the run was pruned."""
    row = store.get(run_id)
    if row is None and (tombstone := store.tombstone(run_id)) is not None:
        raise NotFound(pruned_words(tombstone))
    if row is None:
        raise no_such_run(run_id, store)
    return row


def read_run(store: Reading, run_id: str, at: int | None = None) -> RunView:
    """The run as of its last event, or as of event `at`."""
    row = require(store, run_id)
    # The row is read first, so the journal has at least `row.seq` events. Later events are left out.
    events = [event for event in store.read(run_id) if event.seq <= row.seq]
    if at is not None and not 1 <= at <= row.seq:
        raise NotFound(f"run {run_id} has the events 1 to {row.seq}; there is no event {at}")
    seen = events if at is None else events[: place_of(events, at)]
    if at is not None and seen[-1].seq != at:
        raise NotFound(
            f"run {run_id}: event {at} was removed; the first event after its first one is its checkpoint, event {events[1].seq}"
        )
    return RunView(row, seen, fold(seen), past=seen[-1].seq < row.seq)


def progress_now(reading: RunView, rows: Sequence[ProgressRow]) -> dict[int, ProgressRow]:
    """The stored progress of attempts under way or cut off, by call. Rows of attempts that have ended do not count."""
    if reading.past:
        return {}
    opened = reading.state.open
    return {
        row.call: row
        for row in rows
        if row.run_id == reading.row.run_id
        and (call := opened.get(row.call)) is not None
        and (call.phase, call.attempt) == ("started", row.attempt)
    }


def loader(store: Reading) -> Callable[[Payload], bytes]:
    """A function that returns the bytes of a payload, from the payload itself or from the blob store."""

    def load(payload: Payload) -> bytes:
        inline = payload.inline
        if inline is not None:
            return inline
        assert isinstance(payload.blob, str)
        return store.blob(payload.blob)

    return load


def run_record(
    reading: RunView,
    load: Callable[[Payload], bytes],
    ledgers: Sequence[Ledger] = (),
    below: Sequence[RunRow] = (),
    progress: Sequence[ProgressRow] = (),
) -> dict[str, Any]:
    """A run as one JSON object.

    `ledgers` are the budgets that apply to the run now. `below` are the unfinished runs below the run. `progress` is
    what the store has of attempts under way.
    """
    at_work = progress_now(reading, progress)
    row, state = reading.row, reading.state
    now_at = {} if reading.past else {child.run_id: child.status for child in below}
    error = failed(state.failure) or None if reading.past else row.error
    steps = steps_of(reading.events, load)
    stated = statements(reading.events)
    superseded = reading.superseded
    holder = state.worker if reading.past else row.holder
    # Without a worker no attempt is under way: an attempt that began was cut off with the worker that made it.
    under_way = [call for call in state.open.values() if call.phase == "started" and holder is not None and not state.finished]
    running = [{"call": call.number, "tool": call.tool, "attempt": call.attempt, "since": iso(call.started_at)} for call in under_way]
    return {
        "run_id": row.run_id,
        "agent": row.agent,
        "version": state.version if reading.past else row.version,
        "tenant": row.tenant,
        "actor": row.actor,
        "queue": row.queue,
        "priority": row.priority,
        "parent": row.parent,
        "parent_call": row.parent_call,
        "status": reading.status,
        "specimen": msgspec.to_builtins(row.imported),
        "waiting_for": state.waiting_for if reading.past else row.waiting_for,
        "input": plain(state.created.input, load) if state.created else None,
        "output": plain(state.output, load),
        "error": error,
        "failure": failure_record(state.failure),
        "places": places(state.failure),
        "said": state.said,
        "labels": state.labels,
        "running": running,
        "created_at": iso(row.created_at),
        "updated_at": iso(state.updated_at),
        "seq": state.seq,
        "epoch": state.epoch,
        "worker": state.worker if reading.past else row.holder,
        "forked": None if state.forked is None else {**msgspec.structs.asdict(state.forked), "inherited": state.inherited},
        "reopened": [msgspec.structs.asdict(one) for one in reading.reopenings],
        "calls": [
            call_record(call, load, steps.get(call.number), at_work.get(call.number)) | {"superseded": call.number in superseded}
            for call in state.calls.values()
        ],
        "approvals": [
            approval_record(ask, state, load, steps.get(ask.number)) | {"superseded": ask.number in superseded}
            for ask in state.asks.values()
        ],
        "children": [
            child_record(child, load, now_at.get(child.run_id), steps.get(child.number)) | {"superseded": child.number in superseded}
            for child in state.children.values()
        ],
        "thoughts": [{"seq": one.seq, "ts": iso(one.ts), "text": one.body.text} for one in stated if isinstance(one.body, ThoughtRecorded)],
        "decisions": [_decision(one, one.body, load) for one in stated if isinstance(one.body, DecisionMade)],
        "paused": None if state.paused is None else {"by": state.paused.by, "reason": state.paused.reason},
        "attention": None if state.attention is None else {"reason": state.attention.reason, "detail": state.attention.detail},
        "pins": dict(state.pins),
        "pin_changes": [msgspec.structs.asdict(change) for change in state.pin_changes],
        "cost": msgspec.structs.asdict(cost_of(state, reading.events)),
        "budget": _budget(reading, ledgers),
    }


def statements(events: Sequence[Event]) -> list[Event]:
    """The thoughts and decisions that the agent recorded."""
    return [event for event in events if isinstance(event.body, ThoughtRecorded | DecisionMade)]


def _decision(event: Event, body: DecisionMade, load: Callable[[Payload], bytes]) -> dict[str, Any]:
    return {
        "seq": event.seq,
        "ts": iso(event.ts),
        "choice": plain(body.choice, load),
        "among": plain(body.among, load),
        "reason": body.reason,
    }


def failure_record(failure: Failure | None) -> dict[str, Any] | None:
    """Why a run failed, for programs: the type of the exception, the kind of failure, and the message."""
    return None if failure is None else {"type": failure.type, "kind": failure.kind, "message": failure.message}


def _budget(reading: RunView, ledgers: Sequence[Ledger]) -> dict[str, Any] | None:
    """The first budget that applies to the run, and the budgets above it.

    If the state is as of an earlier event: only the limits of the run's own budget.
    """
    state = reading.state
    if reading.past or not ledgers:
        return None if state.budget is None else {"run_id": reading.row.run_id, "limits": msgspec.structs.asdict(state.budget)}
    first, *above = (msgspec.to_builtins(budget_view(ledger)) for ledger in ledgers)
    return {**first, "above": above}


def approval_record(ask: AskState, state: RunState, load: Callable[[Payload], bytes], step: PlanStep | None = None) -> dict[str, Any]:
    """One approval and its status, as one JSON object."""
    request = ask.request
    call = state.calls.get(ask.number)
    used_up = request.tool is not None and ask.outcome == "approved" and call is not None and call.attempt > 0
    return {
        "approval": request.approval,
        "call": ask.number,
        "action": request.action,
        "tool": request.tool,
        "plan_step": msgspec.to_builtins(step),
        "status": "consumed" if used_up else ask.outcome or "pending",
        "input": plain(request.input, load),
        "digest": request.digest,
        "reason": request.reason,
        "asked_of": list(request.by),
        "quorum": request.quorum,
        "voters": list(ask.voters),
        "expires_at": None if request.expires_at is None else iso(request.expires_at),
        "on_expiry": request.on_expiry,
        "escalated": ask.escalated,
        "editable": list(request.editable),
        "four_eyes": request.four_eyes,
        "by": ask.by,
        "note": ask.note,
        "source": ask.source,
        "approved_input": plain(ask.input, load) if ask.outcome == "approved" else None,
        "asked_at": iso(ask.asked_at),
        "settled_at": iso(ask.settled_at) if ask.outcome is not None else None,
    }


def child_record(
    child: ChildState, load: Callable[[Payload], bytes], now_at: Status | None = None, step: PlanStep | None = None
) -> dict[str, Any]:
    """One child as one JSON object. `now_at`: the child's status, if the parent's journal does not have its end yet."""
    ended = child.ended
    return {
        "run_id": child.run_id,
        "call": child.number,
        "agent": child.agent,
        "version": child.version,
        "plan_step": msgspec.to_builtins(step),
        "input": plain(child.input, load),
        "status": now_at if ended is None else ended.status,
        "output": None if ended is None else plain(ended.output, load),
        "error": None if ended is None else failed(ended.failure, 2000) or None,
        "started_at": iso(child.started_at),
        "ended_at": None if ended is None else iso(child.ended_at),
    }


def call_record(
    call: CallState, load: Callable[[Payload], bytes], step: PlanStep | None = None, now: ProgressRow | None = None
) -> dict[str, Any]:
    """One call as a JSON object. `now`: the last progress that the attempt under way has stored, if there is one."""
    return {
        "call": call.number,
        "kind": "model" if is_request(call.args) else "tool",
        "tool": call.tool,
        "plan_step": msgspec.to_builtins(step),
        "effect": call.effect,
        "phase": call.phase,
        "attempts": call.attempt,
        "args": plain(call.args, load),
        "result": plain(call.result, load),
        "error": failed(call.failure, 2000) or None,
        "places": places(call.failure),
        "progress": plain(call.progress, load) if now is None else decode(now.progress),
        "progress_at": None if now is None else iso(now.at),
        "doubt": call.doubt,
        "resolved_by": call.resolved_by,
        "key": call.key,
        "approval": call.approval,
        "cost": msgspec.structs.asdict(call.used) | {"seconds": seconds(call.busy_us)},
        "first_seq": call.first_seq,
        "last_seq": call.last_seq,
        "started_at": iso(call.first_ts),
        "updated_at": iso(call.last_ts),
    }


def all_rows(store: Reading, query: Query = EVERYTHING) -> Iterator[RunRow]:
    """Every run that matches the query, newest first, read page by page."""
    after: str | None = None
    while True:
        page = store.find(query, PAGE, after)
        for after, row in page:  # noqa: B007
            yield row
        if len(page) < PAGE:
            return
