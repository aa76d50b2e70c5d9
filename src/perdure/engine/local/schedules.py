"""The schedules of a worker: it registers those that its code declares, and starts the runs of ticks that are due.

A worker looks at the schedules of its agents about once a second, and at the moment when the next tick is due. It
needs no leader: every change is guarded by the seq of the schedule (see perdure.engine.schedules).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

from perdure.agent import Agent
from perdure.core.schedule import ticks_of
from perdure.engine.clock import Clock
from perdure.engine.schedules import ScheduleChanges, is_current, state_of
from perdure.errors import InvalidInput, StoreCorrupt
from perdure.schedule import calendar_of
from perdure.settings import Settings
from perdure.store.api import FINISHED, ScheduleChange, ScheduleRow, Served, Store

log = logging.getLogger("perdure.schedules")
_LOOK_EVERY_S = 1.0
_COMPLAIN_EVERY_S = 30.0
_TRIES = 20  # how many times a change is tried if other writers are faster
_TICKS_AT_A_TIME = 100  # then the worker does its other work before it goes on


class Ticking:
    """Starts ticks. `look` blocks; it is called by one thread at a time."""

    def __init__(self, store: Store, clock: Clock, settings: Settings) -> None:
        self._store = store
        self._clock = clock
        self._changes = ScheduleChanges(clock, settings)
        self._next_us: int | None = None  # when the next tick is due, as far as known
        self._looked_s = float("-inf")
        self._declared = False
        self._complained_s: dict[str, float] = {}
        self._ticks: list[tuple[str, str, int]] = []  # (agent, what became of them, how many) since `taken_ticks`

    def is_due(self, mono_s: float) -> bool:
        """Is it time to look at the schedules? `mono_s`: the clock of the worker's loop."""
        if mono_s - self._looked_s >= _LOOK_EVERY_S:
            return True
        return self._next_us is not None and self._next_us <= self._clock.now()

    def left_s(self) -> float:
        """How long the worker may sleep, so that the next tick starts at its time."""
        return float("inf") if self._next_us is None else max((self._next_us - self._clock.now()) / 1e6, 0.0)

    def look(self, agents: Mapping[Served, Agent[Any, Any]], served: Sequence[Served], queues: Sequence[str] | None, mono_s: float) -> None:
        """Start what is due. StoreError if the database cannot be used; the next look goes on."""
        self._looked_s = mono_s
        if not self._declared:
            self._declare(agents, served)
            self._declared = True
        started = 0
        blocked: set[str] = set()  # schedules that this worker cannot start
        while True:
            rows = [row for row in self._store.next_schedules(served, queues) if row.schedule_id not in blocked]
            now = self._clock.now()
            self._next_us = next((row.due_at for row in rows), None)
            due = [row for row in rows if row.due_at is not None and row.due_at <= now]
            if not due or started >= _TICKS_AT_A_TIME:
                return
            for row in due:
                if self._start(row, now):
                    started += 1
                else:
                    blocked.add(row.schedule_id)

    def _start(self, row: ScheduleRow, now: int) -> bool:
        """Start the next tick of this schedule. False: this worker cannot do anything about it now."""
        try:
            change = self._changes.due(row, self._is_open, now)
            if change is None:
                return False
            answer = self._store.change_schedule(change)
            if answer == "taken":
                change = self._changes.taken(row, change, now)
                answer = self._store.change_schedule(change)
            if answer == "done":
                self._count(change)
        except (InvalidInput, StoreCorrupt) as error:
            # An edited row, or a time zone that this machine does not know: other schedules are not affected.
            self._complain(row.schedule_id, error)
            return False
        return True

    def _count(self, change: ScheduleChange) -> None:
        spec = state_of(change.row).spec
        found = [ticks_of(event.body, calendar_of(spec)) for event in change.events]
        self._ticks += [(spec.agent, *one) for one in found if one is not None]

    def taken_ticks(self) -> list[tuple[str, str, int]]:
        """The ticks that this worker has handled since the last call: (agent, what became of them, how many)."""
        taken, self._ticks = self._ticks, []
        return taken

    def _is_open(self, run_id: str) -> bool:
        row = self._store.get(run_id)
        return row is not None and row.specimen is None and row.status not in FINISHED

    def _declare(self, agents: Mapping[Served, Agent[Any, Any]], served: Sequence[Served]) -> None:
        """Register the schedules in the code. If there are several versions of an agent, the last one counts."""
        by_name = {one.agent: agents[one] for one in served}
        for agent in by_name.values():
            declared = agent.scheduled
            if declared is None:
                continue
            for _ in range(_TRIES):
                row = self._store.schedule(declared.schedule_id)
                try:
                    change = self._changes.declared(declared, row, f"code:{agent.name}@{agent.version}", self._clock.now())
                except (InvalidInput, StoreCorrupt) as error:
                    self._complain(declared.schedule_id, error)
                    break
                if change is None:
                    if row is not None and not is_current(row, declared.spec):
                        log.warning(
                            "schedule %s: this code declares it otherwise than it is now, and that declaration was replaced or removed before; "
                            "to use it again: perdure schedules add FILE.py:%s --declared",
                            declared.schedule_id,
                            agent.name,
                        )
                    break
                if self._store.change_schedule(change) == "done":
                    log.info("schedule %s: registered from the code of agent %s", declared.schedule_id, agent.name)
                    break

    def _complain(self, schedule_id: str, error: Exception) -> None:
        now_s = time.monotonic()
        if now_s - self._complained_s.get(schedule_id, float("-inf")) >= _COMPLAIN_EVERY_S:
            self._complained_s[schedule_id] = now_s
            log.error("schedule %s: cannot start its tick: %s; trying again", schedule_id, error)
