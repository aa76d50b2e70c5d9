"""Finds the agents of children that no worker serves, by replaying the parents' journals.

If a worker has only the parent's agent, it learns the children's agents while it drives the parent. After a restart,
the parent may be parked until a child has ended, and the child waits for a worker that serves its agent. Without this
module, neither the parent nor the child would ever continue.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from perdure.agent import Agent
from perdure.core.codec import Payload
from perdure.core.machine import StartChild
from perdure.core.state import fold
from perdure.errors import StoreCorrupt, StoreError
from perdure.store.api import NO_VERSION, Served, Store

log = logging.getLogger("perdure.worker")
_Pair = tuple[Served, Served]  # (agent and version of a parent, agent and version of its child)
_AT_ONCE = 10
_AGAIN_US = 5_000_000


class ChildAgents:
    """Finds the agents of children, by replays of runs whose agents are served."""

    def __init__(self, store: Store, served: Mapping[Served, Agent[Any, Any]], max_steps: int) -> None:
        self._store = store
        self._served = served
        self._max_steps = max_steps
        self._known: set[_Pair] = set()  # pairs for which a replay of a parent has found the child's agent
        self._asking: dict[str, list[_Pair]] = {}
        # Runs that cannot be replayed, or whose replay does not reach the child's agent.
        self._useless: set[str] = set()
        self._failures: dict[_Pair, int] = {}
        self._not_before: dict[_Pair, int] = {}
        self._now = 0

    def parents_to_ask(self, now: int) -> list[str]:
        """The runs to replay: below each of them, there is a ready run whose agent is not served.

        There is one run per pair of agents; if that run is useless, the next call returns another run.
        """
        self._now = now
        self._asking = {}
        for parent, child, run_id in self._store.parents_to_replay(list(self._served), now, but=sorted(self._useless)):
            pair = (parent, child)
            if pair not in self._known and self._not_before.get(pair, now) <= now:
                self._asking.setdefault(run_id, []).append(pair)
        return list(self._asking)

    def agents_of(self, run_id: str) -> list[Agent[Any, Any]]:
        """The agents that the run has called, found by a replay. Nothing is performed, and nothing is recorded."""
        pairs = self._asking.pop(run_id, [])
        try:
            found = self._replayed(run_id)
        except Exception as error:  # the worker that drives the run reports the error; here the run is only useless
            log.info("run %s: cannot be asked for its children's agents: %s: %s", run_id, type(error).__name__, error)
            if isinstance(error, StoreError) and not isinstance(error, StoreCorrupt):
                # The store has failed, which says nothing about the run: replay the run again later.
                self._not_before.update((pair, self._now + _AGAIN_US) for pair in pairs)
                return []
            found = []
        kinds = {Served(agent.name, version) for agent in found for version in (agent.version, NO_VERSION)}
        for pair in pairs:
            if pair[1] in kinds:
                self._known.add(pair)
            else:
                self._no_use(run_id, pair)
        return found

    def _no_use(self, run_id: str, pair: _Pair) -> None:
        """Try another run of this pair next.

        After ten failures, wait 5 s before each further run: otherwise the worker would do nothing else.
        """
        self._useless.add(run_id)
        self._failures[pair] = self._failures.get(pair, 0) + 1
        if self._failures[pair] >= _AT_ONCE:
            self._not_before[pair] = self._now + _AGAIN_US

    def _replayed(self, run_id: str) -> list[Agent[Any, Any]]:
        events = self._store.read(run_id)
        state = fold(events)
        assert state.created is not None
        agent = self._served[Served(state.created.agent, state.version)]
        asked = agent.replayed(state, events, self._load, self._max_steps).calls.values()
        return [one.agent for one in asked if isinstance(one, StartChild)]

    def _load(self, payload: Payload) -> bytes:
        inline = payload.inline
        return self._store.blob(str(payload.blob)) if inline is None else inline
