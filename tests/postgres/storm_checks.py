"""What must be true after a storm.

Nothing lost, nothing doubled, no gap, and no run without a worker that can claim it.
"""

from __future__ import annotations

import json
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
from tests.postgres import storm_service
from tests.postgres.storm_agents import chore, errand, expected

from perdure import Agent
from perdure.core.codec import Payload
from perdure.core.events import Event, RunClaimed, RunSucceeded, Terminal, ToolCallResolved
from perdure.core.machine import Facts, Machine
from perdure.core.state import RunState, fold
from perdure.inspect.replay import Same, compare
from perdure.inspect.verify import verify_run
from perdure.store.api import FINISHED, RunRow, Store
from perdure.store.open import open_store

_AGENTS: dict[str, Agent[Any, Any]] = {"errand": errand, "chore": chore}


def check(folder: Path, url: str) -> dict[str, int]:
    """Raise AssertionError for the first thing that is not as it should be; otherwise how much of everything there was."""
    store = open_store(url, create=False)
    try:
        rows = list(_all(store))
        assert store.problems() == []
        journals = {row.run_id: _check_journal(store, row) for row in rows}
    finally:
        store.close()
    started = int((folder / "started").read_text())
    assert {row.run_id for row in rows if row.parent is None} >= {f"storm-{seed}" for seed in range(started)}, "a run is lost"
    _check_acknowledged(folder, journals)
    states = {run_id: fold(events) for run_id, events in journals.items()}
    for row in rows:
        _check_outcome(row, journals[row.run_id], states[row.run_id])
    counts = _check_effects(folder, states)
    counts |= _check_bookings(url, states)
    bodies = [event.body for events in journals.values() for event in events]
    claims = [body for body in bodies if isinstance(body, RunClaimed)]
    settled = Counter(body.by for body in bodies if isinstance(body, ToolCallResolved))
    return {
        "runs": len(rows),
        "events": sum(map(len, journals.values())),
        "claims": len(claims),
        "takeovers": sum(claim.takeover for claim in claims),
        "of proven dead": sum(claim.proven_dead for claim in claims),
        "settled by a person": settled["ann"],
        "reconciled": settled["reconcile"],
        **counts,
    }


def _all(store: Store) -> Iterator[RunRow]:
    place = (0, 0)
    while found := store.growing(after=place):
        yield from (row for _, row in found)
        place = found[-1][0]


def _check_journal(store: Store, row: RunRow) -> list[Event]:
    """Complete, in order, with epochs that never fall, and nothing after its end.

    `perdure verify` agrees (G3, G10, G11).
    """
    verdict = verify_run(store, row)
    assert verdict.problem is None, f"{row.run_id}: {verdict}"
    events = store.read(row.run_id)
    assert [event.seq for event in events] == list(range(1, len(events) + 1)), f"{row.run_id}: a gap"
    epochs = [event.epoch for event in events]
    assert epochs == sorted(epochs), f"{row.run_id}: epochs fall: {epochs}"
    assert epochs[-1] == sum(isinstance(event.body, RunClaimed) for event in events) == row.epoch, f"{row.run_id}: {epochs[-1]}, {row}"
    ends = [event.seq for event in events if isinstance(event.body, Terminal)]
    assert ends == [len(events)], f"{row.run_id} ({row.status}) has its end at {ends} of {len(events)}: {row}"
    return events


def _check_acknowledged(folder: Path, journals: dict[str, list[Event]]) -> None:
    """Acknowledged events are there, whatever happened to the server (G1)."""
    promised: dict[str, set[str]] = defaultdict(set)
    for line in (folder / "acknowledged").read_text().splitlines():
        run_id, event_id = line.split()
        promised[run_id].add(event_id)
    for run_id, ids in promised.items():
        missing = ids - {event.event_id for event in journals[run_id]}
        assert not missing, f"{run_id}: {len(missing)} events were acknowledged and are not there: {missing}"


def _check_outcome(row: RunRow, events: list[Event], state: RunState) -> None:
    assert row.status == "succeeded", f"{row.run_id} is {row.status}: {row.error}"
    end = events[-1].body
    assert isinstance(end, RunSucceeded)
    assert state.created is not None
    (seed,) = json.loads(_inline(state.created.input)).values()
    told, should = json.loads(_inline(end.output)), expected(seed, leaf=row.parent is not None)
    assert _is_as(told, should), f"{row.run_id} returned {told} instead of {should}"
    facts = Facts(row.run_id, row.tenant, row.actor, row.agent, row.version, row.parent, state.created.depth)

    def make(_: RunState) -> Machine:
        assert state.created is not None
        return _AGENTS[row.agent].machine(facts, _inline(state.created.input), 100_000)

    answer = compare(row.run_id, events, state, make, _inline)
    assert isinstance(answer, Same), answer


def _is_as(told: Any, should: Any) -> bool:
    """The same, but for calls that a person has settled."""
    if isinstance(told, list):
        return isinstance(should, list) and len(told) == len(should) and all(map(_is_as, told, should))
    return bool(told == should or (told == "by hand" and str(should).endswith(" done")))


def _inline(payload: Payload) -> bytes:
    assert payload.inline is not None
    return payload.inline


def _check_effects(folder: Path, states: dict[str, RunState]) -> dict[str, int]:
    """Every call reached the service as often as its class allows; what completed did reach it; and nothing else did (G2, G5)."""
    asked: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in storm_service.facts(folder):
        asked[line["key"]].append(line)
    calls = {call.key: (run_id, call) for run_id, state in states.items() for call in state.calls.values()}
    loose = [lines for key, lines in asked.items() if key not in calls]
    assert not loose, f"effects without an intent: {loose[:3]}"
    for key, (run_id, call) in calls.items():
        assert call.ended, f"{run_id}: {call}"
        lines = asked[key]
        times = sum(line["fact"] == "effect" for line in lines)
        what = f"{run_id}, call {call.number} ({call.tool}, {call.effect}) has {times} effects: {lines}"
        assert len({(line["what"], line["run"], line["number"]) for line in lines}) <= 1, f"one key for different calls: {lines}"
        if call.effect in ("once", "keyed"):
            assert times <= 1, what
        if call.phase == "completed" and call.effect != "transaction":
            assert times >= 1, what
    facts = Counter(line["fact"] for lines in asked.values() for line in lines)
    return {"effects": facts["effect"], "duplicates dropped": facts["dropped"], "refused as late": facts["late"]}


def _check_bookings(url: str, states: dict[str, RunState]) -> dict[str, int]:
    """A transaction in the journal is in its table, once.

    A transaction that is not in the journal is not in the table.
    """
    with psycopg.connect(url) as connection:
        rows = connection.execute("SELECT run, number, key FROM booked").fetchall()
    booked = Counter(rows)
    should = Counter(
        (run_id, call.number, call.key) for run_id, state in states.items() for call in state.calls.values() if call.effect == "transaction"
    )
    assert booked == should, f"booked and not recorded: {booked - should}; recorded and not booked: {should - booked}"
    return {"bookings": len(rows)}


def unfinished(url: str) -> str:
    """The unfinished runs: what they wait for, and their last event."""
    store = open_store(url, create=False)
    try:
        now = time.time_ns() // 1000
        workers = {worker.worker: worker for worker in store.workers(now, 2_000_000)}
        lines = [f"{worker.name} {'lives' if worker.alive else 'is silent'}, holds {worker.runs}" for worker in workers.values()]
        for row in _all(store):
            if row.status not in FINISHED:
                due = None if row.ready_at is None else f"{(row.ready_at - now) / 1e6:.1f} s"
                lines.append(f"{row.run_id}: {row.status}, waits for {row.waiting_for}, ready in {due}, held by {row.holder}")
                lines += [
                    f"    {event.seq} {(event.ts - now) / 1e6:.1f} s {str(event.body)[:200]}" for event in store.read(row.run_id)[-6:]
                ]
    finally:
        store.close()
    return "\n".join(lines)
