"""Children that nobody claims, since only their parents' code leads to theirs: found again in the parents' journals.

A worker that was given a parent alone learns of its children's agents when it drives the parent. After a restart the parent may be
parked until a child has ended, and the child waits for a worker that knows it: neither would ever go on (G6).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from perdure.agent import Agent
from perdure.core.codec import Payload
from perdure.core.machine import Facts, StartChild
from perdure.core.replay import replay
from perdure.core.state import fold
from perdure.store.api import Served, Store

log = logging.getLogger("perdure.worker")


class Kin:
    """Which children's agents come along with the agents that a worker serves."""

    def __init__(self, store: Store, served: Mapping[Served, Agent[Any, Any]], max_steps: int) -> None:
        self._store = store
        self._served = served
        self._max_steps = max_steps
        self._asked: set[tuple[Served, Served]] = set()  # parents and children: what a parent's code does not lead to, it never will

    def parents_to_ask(self, now: int) -> list[str]:
        """Runs with a child that is ready and not served, one for each kind of both; each kind is named once."""
        asked: list[str] = []
        for parent, child, run_id in self._store.left_behind(list(self._served), now):
            if (parent, child) not in self._asked:
                self._asked.add((parent, child))
                asked.append(run_id)
        return asked

    def agents_of(self, run_id: str) -> list[Agent[Any, Any]]:
        """The agents that the run has called, found by replaying it: nothing is performed, and nothing is recorded."""
        try:
            return self._replayed(run_id)
        except Exception as error:  # whoever drives the run is told; here it only means that nothing was learned
            log.info("run %s: cannot be asked for its children's agents: %s: %s", run_id, type(error).__name__, error)
            return []

    def _replayed(self, run_id: str) -> list[Agent[Any, Any]]:
        events = self._store.read(run_id)
        state = fold(events)
        created = state.created
        assert created is not None
        agent = self._served[Served(created.agent, state.version)]
        facts = Facts(run_id, created.tenant, created.actor, created.agent, state.version, created.parent, created.depth)
        machine = agent.machine(facts, self._load(created.input), self._max_steps)
        try:
            asked = replay(machine, events, self._load).calls.values()
        finally:
            machine.close()
        return [one.agent for one in asked if isinstance(one, StartChild)]

    def _load(self, payload: Payload) -> bytes:
        inline = payload.inline
        return self._store.blob(str(payload.blob)) if inline is None else inline
