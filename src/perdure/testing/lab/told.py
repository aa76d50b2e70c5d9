"""Reads the journals of a run and of the runs below it, at the end of a process. The judge compares them later."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence

from perdure.app import Perdure
from perdure.core.decide import Patience, settle_s
from perdure.core.events import (
    ChildStarted,
    Event,
    ModelCallCompleted,
    ModelCallInitiated,
    RunClaimed,
    RunSucceeded,
    ToolCallCompleted,
    ToolCallInitiated,
    ToolCallResolved,
)
from perdure.core.state import CallState, fold
from perdure.inspect.verify import verify_run
from perdure.testing.lab.spec import CallTold, Intent, Resolution, TrialTold


def tell(app: Perdure, run_id: str, settled: Sequence[str], began_at: float) -> TrialTold:
    """The run's status, output and calls, from its journals."""
    row = app.reading.get(run_id)
    assert row is not None, run_id
    journals = {one: app.reading.read(one) for one in _family(app, run_id)}
    ended = [event.body for event in journals[run_id] if isinstance(event.body, RunSucceeded)]
    return TrialTold(
        status=row.status,
        output=app.load(ended[-1].output).decode() if ended else None,
        error=row.error,
        waiting_for=row.waiting_for,
        attention=row.attention,
        calls=tuple(call for one, events in journals.items() for call in _calls(app, one, events)),
        faults=tuple(_faults(app, journals)),
        settled=tuple(settled),
        began_at=began_at,
        rested_at=time.time(),
    )


def _family(app: Perdure, run_id: str) -> Iterator[str]:
    """The run and all runs below it, including runs that have ended."""
    yield run_id
    for event in app.reading.read(run_id):
        if isinstance(event.body, ChildStarted):
            yield from _family(app, event.body.run_id)


def _faults(app: Perdure, runs: Iterable[str]) -> Iterator[str]:
    for run_id in runs:
        row = app.reading.get(run_id)
        if row is None:
            yield f"run {run_id} is lost"
        elif (problem := verify_run(app.reading, row).problem) is not None:
            yield f"run {run_id}: {problem}"


def _calls(app: Perdure, run_id: str, events: Sequence[Event]) -> Iterator[CallTold]:
    state = fold(events)
    claims = {event.epoch: event for event in events if isinstance(event.body, RunClaimed)}
    for call in state.calls.values():
        yield _call(app, run_id, call, [event for event in events if event.call == call.number], claims)


def _call(app: Perdure, run_id: str, call: CallState, events: Sequence[Event], claims: dict[int, Event]) -> CallTold:
    pids = {epoch: int(event.body.name.rpartition(":")[2] or 0) for epoch, event in claims.items() if isinstance(event.body, RunClaimed)}
    patience = Patience.of(app.settings)
    intents = [(event.epoch, event.body) for event in events if isinstance(event.body, ToolCallInitiated)]
    results = [event for event in events if isinstance(event.body, ToolCallCompleted)]
    is_model = any(isinstance(event.body, (ModelCallInitiated, ModelCallCompleted)) for event in events)
    return CallTold(
        run=run_id,
        number=call.number,
        tool=call.tool,
        effect="model" if is_model else call.effect,
        key=call.key,
        phase=call.phase,
        digest=call.digest,
        reconcile=call.has_reconcile,
        intents=tuple(Intent(body.attempt, pids.get(epoch, 0)) for epoch, body in intents),
        completed_by=pids.get(results[-1].epoch) if results else None,
        resolutions=tuple(
            Resolution(body.attempt, body.outcome, body.by, _since_s(claims.get(event.epoch), event))
            for event, body in ((event, event.body) for event in events)
            if isinstance(body, ToolCallResolved)
        ),
        result=None if call.result is None else app.load(call.result).decode(),
        args=None if call.args is None else app.load(call.args).decode(),
        quiet_s=(patience.timeout_s if call.timeout_s is None else call.timeout_s) + settle_s(call, patience),
    )


def _since_s(claim: Event | None, event: Event) -> float:
    return 0.0 if claim is None else (event.ts - claim.ts) / 1e6
