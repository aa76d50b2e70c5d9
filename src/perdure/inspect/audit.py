"""The audit trail: one JSON line per event of all runs, from the journal or live from a worker.

A line says who acted, what went wrong, and the details of the event, such as the decisions and thoughts of the agent.
Arguments and results are in a line only with `payloads`. docs/journal.md lists the fields.
"""

from __future__ import annotations

import heapq
import json
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from perdure.core.codec import Payload
from perdure.core.events import (
    ApprovalDecided,
    ApprovalEscalated,
    ApprovalExpired,
    ApprovalRequested,
    ApprovalVoted,
    ApprovalWithdrawn,
    AttentionNeeded,
    BudgetDeclared,
    BudgetExceeded,
    BudgetRaised,
    CallAnswered,
    CallKept,
    CallRequestedAgain,
    CancelRequested,
    CheckpointTaken,
    ChildFinished,
    ChildStarted,
    DecisionMade,
    Event,
    FrameChanged,
    LabelsChanged,
    OutcomeReused,
    PatchMarked,
    PinChanged,
    PlanGenerated,
    RetryScheduled,
    RunAdopted,
    RunCancelled,
    RunClaimed,
    RunCreated,
    RunFailed,
    RunForked,
    RunPaused,
    RunReleased,
    RunReopened,
    RunRequeued,
    RunRestored,
    RunUnpaused,
    SignalReceived,
    StatusReported,
    Terminal,
    ThoughtRecorded,
    TimerFired,
    TimerSet,
    ToolCallCompleted,
    ToolCallFailed,
    ToolCallInDoubt,
    ToolCallInitiated,
    ToolCallProposed,
    ToolCallResolved,
    Usage,
    batch_of,
)
from perdure.core.state import image_in
from perdure.engine.api import Reading
from perdure.inspect.text import Load, failed, iso, over_budget, plain
from perdure.inspect.timeline import EventNames
from perdure.inspect.view import PAGE, loader
from perdure.store.api import FINISHED, Place, RunRow

# -- What a line says about one event


def person(event: Event) -> str | None:
    """The person or program outside the run that caused the event; None if the run itself caused the event."""
    match event.body:
        case ToolCallResolved(by=by) | CancelRequested(by=by) | RunRequeued(by=by) | RunPaused(by=by) | RunUnpaused(by=by):
            return by
        case ApprovalVoted(by=by) | ApprovalDecided(by=by) | SignalReceived(by=by) | RunAdopted(by=by) | BudgetRaised(by=by):
            return by
        case FrameChanged(by=by):
            return by
        case RunReopened(by=by) | RunForked(by=by) | RunCancelled(forced_by=by) | RunRestored(by=by):
            return by
        case _:
            return None


def error(event: Event) -> str | None:
    """The problem in one line; None if the event reports no problem."""
    match event.body:
        case ToolCallFailed(failure=failure) | RunFailed(failure=failure):
            return failed(failure, 500)
        case ToolCallCompleted(failure=failure) | ToolCallResolved(failure=failure) | ChildFinished(failure=failure) if failure is not None:
            return failed(failure, 500)
        case ToolCallInDoubt(why=why):
            return why
        case AttentionNeeded(detail=words):
            return words
        case BudgetExceeded() as over:
            return over_budget(over)
        case _:
            return None


def detail(event: Event) -> dict[str, Any]:
    """The details of the event, without arguments and results."""
    return _of_call(event) if event.call is not None else _of_run(event)


def _of_call(event: Event) -> dict[str, Any]:
    body = event.body
    match body:
        case ToolCallProposed():
            return {"effect": body.effect, "args_digest": body.digest, "until": body.until, **_at(body.at)}
        case ToolCallInitiated():
            approved = {"approval": body.approval} if body.approval else {}
            digest = body.digest or (None if body.args is None else body.args.digest)
            return {"attempt": body.attempt, "effect": body.effect, **({"args_digest": digest} if digest else {}), **approved}
        case ToolCallCompleted() | ToolCallFailed() | ToolCallInDoubt():
            return {"attempt": body.attempt, **_usage(body.usage)}
        case ToolCallResolved():
            return {
                "attempt": body.attempt,
                "outcome": body.outcome,
                "by": body.by,
                "note": body.note,
                "final": body.final,
                **_usage(body.usage),
            }
        case RetryScheduled():
            return {"attempt": body.attempt, "at": iso(body.at), "reconcile": body.reconcile}
        case ChildStarted():
            return {"child": body.run_id, "agent_called": body.agent, "version_called": body.version, "args_digest": body.digest}
        case ChildFinished():
            return {"child": body.run_id, "status": body.status}
        case CallRequestedAgain():
            return {"anew": body.anew}
        case CallAnswered():
            return {"source": body.source, **_usage(body.usage)}
        case OutcomeReused():
            return {"of_seq": body.of}
        case _:
            return _of_approval(event)


def _of_approval(event: Event) -> dict[str, Any]:
    body = event.body
    match body:
        case ApprovalRequested():
            asked = {"approval": body.approval, "action": body.action, "digest": body.digest, "asked_of": list(body.by)}
            terms = {"reason": body.reason, "quorum": body.quorum, "four_eyes": body.four_eyes}
            return {**asked, **terms, **_at(body.expires_at, "expires_at")}
        case ApprovalVoted():
            return {"approval": body.approval, "by": body.by, "digest": body.digest, "source": body.source, "note": body.note}
        case ApprovalDecided():
            said = {"approval": body.approval, "granted": body.granted, "by": body.by, "digest": body.digest}
            return {**said, "edited": body.input is not None, "source": body.source, "note": body.note}
        case ApprovalEscalated():
            return {"approval": body.approval, "asked_of": list(body.to), **_at(body.expires_at, "expires_at")}
        case ApprovalExpired():
            return {"approval": body.approval, "lapsed": body.lapsed}
        case ApprovalWithdrawn():
            return {"approval": body.approval}
        case _:
            return {}


def _of_run(event: Event) -> dict[str, Any]:
    body = event.body
    match body:
        case RunCreated():
            labels = {"labels": body.labels} if body.labels else {}
            return {"queue": body.queue, "parent": body.parent, "parent_call": body.parent_call, **labels}
        case RunClaimed():
            took = {"worker": body.worker, "name": body.name, "takeover": body.takeover, "proven_dead": body.proven_dead}
            return {**took, "lost_with": body.lost_with}
        case RunReleased():
            return {"status": body.status, "waiting_for": body.waiting_for}
        case AttentionNeeded():
            return {"reason": body.reason}
        case CancelRequested() | RunPaused():
            return {"reason": body.reason}
        case RunUnpaused(early=True):
            return {"note": body.note, "early": True}
        case RunRequeued() | RunUnpaused():
            return {"note": body.note}
        case RunRestored():
            return {"backup_of": iso(body.taken_at)}
        case RunForked():
            made = {"parent": body.parent, "at": body.at, "parent_head": body.head, "reason": body.reason, "edits": list(body.edits)}
            return {**made, "other_input": body.input, "model": body.model}
        case RunReopened():
            calls = {"again": list(body.again), "children": list(body.children), "withdrawn": list(body.withdrawn)}
            return {"back_to": body.back_to, "reason": body.reason, "fresh": body.fresh, **calls}
        case OutcomeReused():
            return {"of_seq": body.of}
        case CheckpointTaken():
            left = len(image_in(body).requests)
            return {"state_digest": body.state.digest, "open_calls": left, "unread_signals": len(body.signals), "timers": len(body.timers)}
        case RunAdopted() | FrameChanged():
            return {"version_adopted": body.version, "note": body.note}
        case BudgetDeclared():
            return {"limits": msgspec.to_builtins(body.limits)}
        case RunCancelled():
            charged = {"unsettled": msgspec.to_builtins(body.unsettled)} if body.unsettled else {}
            return {"reason": body.reason, "forced": body.forced_by is not None, **charged}
        case SignalReceived():
            return {"topic": body.topic, "key": body.key}
        case BudgetRaised():
            return {"added": msgspec.to_builtins(body.added), "note": body.note}
        case BudgetExceeded():
            return {"budget_of": body.budget_of, "what": body.what, "limit": body.limit, "used": body.used, "wanted": body.wanted}
        case PinChanged():
            return {"what": body.what, "before": body.before, "after": body.after}
        case PlanGenerated():
            return {"plan_digest": body.digest, "by": body.by}
        case PatchMarked():
            return {"patch": body.name}
        case LabelsChanged():
            return {"labels": body.labels}
        case CallKept():
            return {"kept": body.number}
        case DecisionMade():
            return {"choice": plain(body.choice), "among": plain(body.among), "reason": body.reason}
        case ThoughtRecorded() | StatusReported():
            return {"text": body.text}
        case TimerSet():
            return {"timer": body.timer, **_at(body.due, "due")}
        case TimerFired():
            return {"timer": body.timer}
        case _:
            return {}


def payloads(event: Event, load: Load | None) -> dict[str, Any]:
    """The payloads of the event by the names of their fields: arguments, results, input, output."""
    body = event.body
    if isinstance(body, DecisionMade):
        return {}  # the line has the choice and its alternatives already
    fields = {name: getattr(body, name) for name in body.__struct_fields__}
    return {name: plain(value, load) for name, value in fields.items() if isinstance(value, Payload)}


def _at(when: int | None, name: str = "at") -> dict[str, Any]:
    return {} if when is None else {name: iso(when)}


def _usage(usage: Usage | None) -> dict[str, Any]:
    return {} if usage is None else {"usage": msgspec.to_builtins(usage)}


# -- The lines of one run


log = logging.getLogger("perdure.audit")
MAX_KNOWN_RUNS = 10_000
# Only ASCII: if a user prints the file with cat, the text of a tool cannot send escape sequences to the terminal.
_encode = json.JSONEncoder(ensure_ascii=True, separators=(",", ":")).encode


def _in_batch(event: Event) -> dict[str, str]:
    return {"batch": batch} if (batch := batch_of(event.body)) else {}


class Trail:
    """The lines of one run. Call `line` for every event in order, even if you do not need every line.

    With `payloads` the lines have a field `payloads`. `load` reads payloads from the blob store.
    """

    def __init__(self, run_id: str, load: Load | None = None, *, payloads: bool = False) -> None:
        self.run_id = run_id
        self._load = load if payloads else None
        self.seq = 0
        self._event_ids: dict[int, str] = {}
        self._names = EventNames(load)
        self.reopened = False
        self._created: RunCreated | None = None
        self._version = ""  # the version of the agent that drives the run now

    def line(self, event: Event) -> dict[str, Any]:
        """The event as one line."""
        self._learn(event)
        call, created = event.call, self._created
        return {
            "ts": iso(event.ts),
            "run_id": self.run_id,
            "event_id": event.event_id,
            "seq": event.seq,
            "type": event.type,
            "call": call,
            "tool": None if call is None else self._names.tools.get(call),
            "caused_by": None if event.cause is None else self._event_ids.get(event.cause),
            "idempotency_key": None if call is None else self._names.keys.get(call),
            "actor": person(event) or (created.actor if created else None),
            "error": error(event),
            "context": {**self._about_run(), "epoch": event.epoch, **self._about_step(call), **detail(event), **_in_batch(event)},
            **({} if self._load is None else {"payloads": payloads(event, self._load)}),
        }

    def _about_run(self) -> dict[str, Any]:
        created = self._created
        return {} if created is None else {"agent": created.agent, "version": self._version, "tenant": created.tenant}

    def _about_step(self, call: int | None) -> dict[str, Any]:
        step = None if call is None else self._names.steps.get(call)
        return {} if step is None else {"plan_step": msgspec.to_builtins(step)}

    def _learn(self, event: Event) -> None:
        self.seq = event.seq
        self._event_ids[event.seq] = event.event_id
        self._names.learn(event)
        match event.body:
            case RunCreated():
                self._created, self._version = event.body, event.body.version
            case RunAdopted(version=version) | FrameChanged(version=version):
                self._version = version
            case RunClaimed(version=version):
                self._version = version or self._version
            case CheckpointTaken():
                # If the events before it were removed, no other event says which version had driven the run.
                self._version = image_in(event.body).version
            case RunReopened():
                self.reopened = True


# -- from the journal -------------------------------------------------------------------------------------------------
class AuditFilter(Struct, frozen=True):
    """Which lines are wanted. A field that is None or empty excludes nothing."""

    since: int = 0  # µs since 1970
    until: int | None = None
    run_id: str | None = None
    tenant: str | None = None
    agent: str | None = None
    types: frozenset[str] = frozenset()

    def has_run(self, run_id: str, agent: str, tenant: str) -> bool:
        return self.run_id in (None, run_id) and self.agent in (None, agent) and self.tenant in (None, tenant)

    def has_line(self, type_: str, ts: int) -> bool:
        return self.since <= ts and (self.until is None or ts <= self.until) and (not self.types or type_ in self.types)


class Audit:
    """The lines of all runs of a store. The first call of `more` yields all lines, a later call only new lines.

    Only unfinished runs are kept in memory. For reopened runs, and for the runs that ended last, only the last yielded
    seq is kept, because a person may reopen them. If a person reopens a run that ended earlier, all its lines are
    yielded again. `payloads`: the lines have arguments and results.
    """

    def __init__(self, store: Reading, wanted: AuditFilter = AuditFilter(), *, payloads: bool = False) -> None:  # noqa: B008
        self._store = store
        self._wanted = wanted
        self._payloads = payloads
        self._load = loader(store)
        self._newest: Place = (0, 0)  # the place of the newest run that was listed so far
        # Run → (place, created_at), for runs whose end was not yielded yet.
        self._unfinished: dict[str, tuple[Place, int]] = {}
        self._trails: dict[str, Trail] = {}
        self._ended: dict[str, int] = {}  # run → its last yielded seq, for the last MAX_KNOWN_RUNS runs that ended
        self._reopened: dict[str, int] = {}  # the same, for all runs that were reopened and have ended again
        self._run_seq = 0  # if only one run is wanted: the seq of the last event that was read

    def more(self) -> Iterator[dict[str, Any]]:
        """Lines that were not yielded before. The lines of one run are in order of seq.

        The lines of different runs are merged by time; do not rely on this order.
        """
        grown = self._grown()
        grown.sort(reverse=True)
        # The events of a run are read only when the merge reaches the run's first event. So only runs that overlap in
        # time are in memory together.
        waiting: list[tuple[int, str, int]] = []  # (ts, run, position)
        opened: dict[str, list[Event]] = {}
        while grown or waiting:
            while grown and (not waiting or grown[-1][0] <= waiting[0][0]):
                run_id = grown.pop()[1]
                opened[run_id] = events = self._unseen(run_id)
                if events:
                    heapq.heappush(waiting, (events[0].ts, run_id, 0))
            if not waiting:
                continue
            _, run_id, position = heapq.heappop(waiting)
            events = opened[run_id]
            last = position + 1 == len(events)
            if not last:
                heapq.heappush(waiting, (events[position + 1].ts, run_id, position + 1))
            else:
                del opened[run_id]
            event = events[position]
            line = self._line(run_id, event, last=last)
            if self._wanted.has_line(event.type, event.ts):
                yield line

    def _grown(self) -> list[tuple[int, str]]:
        """(created_at, run id) of each wanted run that has events which were not yielded yet."""
        if self._wanted.run_id is not None:
            return self._grown_run(self._wanted.run_id)
        grown: list[tuple[int, str]] = []
        # If a run was unfinished at the last call and is not listed now, the run has ended in the meantime.
        ended = dict(self._unfinished)
        # Begin at the first run: an old run that had ended may have been reopened.
        newest, after = self._newest, (0, 0)
        while page := self._store.growing(after, newest, PAGE):
            after = page[-1][0]
            self._newest = max(self._newest, after)
            for place, row in page:
                ended.pop(row.run_id, None)
                told = self._told(row.run_id)
                if not self._may_have_lines(row) or (row.status in FINISHED and row.seq == told):
                    continue
                self._unfinished.setdefault(row.run_id, (place, row.created_at))
                if row.seq > told and row.updated_at >= self._wanted.since:
                    grown.append((row.created_at, row.run_id))
        return grown + [(created_at, run_id) for run_id, (_, created_at) in ended.items()]

    def _told(self, run_id: str) -> int:
        """The seq of the last line of this run that was yielded."""
        trail = self._trails.get(run_id)
        return self._ended.get(run_id, self._reopened.get(run_id, 0)) if trail is None else trail.seq

    def _grown_run(self, run_id: str) -> list[tuple[int, str]]:
        """The same for a single run. The other runs of the journal are not read."""
        row = self._store.get(run_id)
        if row is None or row.seq <= self._run_seq or not self._may_have_lines(row):
            return []
        self._run_seq = row.seq
        return [(row.created_at, run_id)]

    def _may_have_lines(self, row: RunRow) -> bool:
        wanted = self._wanted
        if row.specimen is not None:
            # The events of a specimen happened in another journal, and the audit trail of that journal has them.
            return False
        if not wanted.has_run(row.run_id, row.agent, row.tenant) or (wanted.until is not None and row.created_at > wanted.until):
            return False
        return row.updated_at >= wanted.since or row.status not in FINISHED

    def _unseen(self, run_id: str) -> list[Event]:
        trail = self._trails.setdefault(run_id, Trail(run_id, self._load, payloads=self._payloads))
        events = self._store.read(run_id, trail.seq)
        # The first events of a fork are copies: the lines of the run that was forked have them.
        told = max(self._ended.pop(run_id, 0), self._reopened.pop(run_id, 0), copied_events(events))
        for event in events[:told]:
            trail.line(event)  # this line was yielded before the run was reopened
        return events[told:]

    def _line(self, run_id: str, event: Event, *, last: bool) -> dict[str, Any]:
        """The line of the event. `last`: no later event of its run was read."""
        line = self._trails[run_id].line(event)
        if last and isinstance(event.body, Terminal):
            trail = self._trails.pop(run_id)
            self._unfinished.pop(run_id, None)
            (self._reopened if trail.reopened else self._ended)[run_id] = event.seq
            if len(self._ended) > MAX_KNOWN_RUNS:
                del self._ended[next(iter(self._ended))]
        return line


def copied_events(events: Sequence[Event]) -> int:
    """How many of these events of a run, from its first event on, are copies of events of the run that it was forked from."""
    first = events[0].body if events else None
    return first.inherited if isinstance(first, RunCreated) else 0


# -- live -------------------------------------------------------------------------------------------------------------
class AuditLog:
    """Appends the lines of committed events to a file. A disk error is only logged: the journal has all events.

    `history` reads a run's journal. If this log did not see the beginning of a run, it learns the tools and keys of
    the run's calls from the journal.
    """

    def __init__(self, path: Path | str, history: Callable[[str], Sequence[Event]] | None = None) -> None:
        self._path = Path(path)
        self._history = history
        self._trails: dict[str, Trail] = {}
        self._file: int | None = None
        self._identity: tuple[int, int] | None = None
        self._torn = False  # True: the last write ended in the middle of a line
        self._warned = False
        self._lock = threading.Lock()
        self._open()  # open the file here, so that a wrong path raises at once

    def committed(self, run_id: str, events: Sequence[Event]) -> None:
        """Write the lines of these committed events, each once. First write missing lines of earlier events."""
        if not events:
            return
        with self._lock:
            lines = self._lines(run_id, events)
            if lines:
                self._write("".join(_encode(line) + "\n" for line in lines).encode())

    def close(self) -> None:
        with self._lock:
            if self._file is not None:
                os.close(self._file)
                self._file = None

    # -- which lines --------------------------------------------------------------------------------------------------
    def _lines(self, run_id: str, events: Sequence[Event]) -> list[dict[str, Any]]:
        trail = self._trails.get(run_id)
        told_before = 0
        if trail is None or events[0].seq > trail.seq + 1:
            trail = self._trails[run_id] = Trail(run_id)
            events = self._with_history(run_id, events)
            told_before = max(_told_before(events), copied_events(events))
        made = [(event.seq, trail.line(event)) for event in events if event.seq > trail.seq]
        if isinstance(events[-1].body, RunReleased | Terminal):
            self._trails.pop(run_id, None)
        elif len(self._trails) > MAX_KNOWN_RUNS:
            self._trails.pop(next(iter(self._trails)))
        return [line for seq, line in made if seq > told_before]

    def _with_history(self, run_id: str, events: Sequence[Event]) -> Sequence[Event]:
        if events[0].seq == 1 or self._history is None:
            return events
        try:
            earlier = [event for event in self._history(run_id) if event.seq < events[0].seq]
        except Exception as error:  # after any error the run continues, and its lines have fewer details
            self._warn(f"cannot read the history of run {run_id}: {error}")
            return events
        return [*earlier, *events]

    # -- the file -----------------------------------------------------------------------------------------------------
    def _write(self, data: bytes) -> None:
        try:
            self._reopen_if_moved()
            assert self._file is not None
            if self._torn:
                data = b"\n" + data
            written = os.write(self._file, data)
            while written < len(data):
                self._torn = True
                written += os.write(self._file, data[written:])
            self._torn = self._warned = False
        except OSError as error:
            self._warn(f"cannot write the audit log {self._path}: {error.strerror}; the runs go on, and `perdure audit` has every line")

    def _reopen_if_moved(self) -> None:
        """If log rotation has renamed or removed the file, open the file that has the name now."""
        try:
            status = os.stat(self._path)
            moved = (status.st_dev, status.st_ino) != self._identity
        except FileNotFoundError:
            moved = True
        if moved or self._file is None:
            self._open()

    def _open(self) -> None:
        file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        status = os.fstat(file)
        if self._file is not None:
            os.close(self._file)
        self._file, self._identity, self._torn = file, (status.st_dev, status.st_ino), False

    def _warn(self, message: str) -> None:
        # Warn once until a write succeeds again, and not for every event: if the disk is full, the warnings must not
        # fill the other log too.
        if not self._warned:
            self._warned = True
            log.warning("%s", message)


def _told_before(events: Sequence[Event]) -> int:
    """The seq of the last release or end before the last claim. Earlier workers have written the lines up to this seq.

    A worker that crashed did not release the run, so the lines of its events are written again.
    """
    claim = max((event.seq for event in events if isinstance(event.body, RunClaimed)), default=0)
    return max((event.seq for event in events if isinstance(event.body, RunReleased | Terminal) and event.seq < claim), default=0)
