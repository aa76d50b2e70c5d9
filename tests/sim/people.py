"""People: they start runs, decide, signal, cancel, pause, and resolve calls.

They act late, twice, and against each other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any

from tests.sim import cast
from tests.sim.checker import Shadow

from perdure import Budget, Perdure, PerdureError
from perdure.core.state import CallState

if TYPE_CHECKING:
    from tests.sim.world import World

AT_ONCE = 6  # runs that are under way


class People:
    """One process: a client of the journal.

    It remembers its own runs; everything that it does goes through the store.
    """

    def __init__(self, world: World, chance: Random) -> None:
        self._world = world
        self._chance = chance
        self._said: list[tuple[str, str, str]] = []  # signals that may be sent again

    async def live(self, app: Perdure) -> None:
        """Do this and that until the end."""
        while True:
            await asyncio.sleep(0.02 + self._chance.random() * 0.2)
            try:
                await self._act(app)
            except PerdureError as refused:
                self._world.outside.counts[f"people: {type(refused).__name__}"] += 1

    async def _act(self, app: Perdure) -> None:
        world, chance = self._world, self._chance
        unfinished = [run for run in world.checker.runs.values() if not run.finished]
        if world.calm:
            if world.begun < world.least_runs:
                await self._start(app)
            await self._tidy_up(app, unfinished)
            return
        if len([run for run in unfinished if "/" not in run.run_id]) < AT_ONCE and world.begun < world.most_runs:
            await self._start(app)
            return
        if not unfinished:
            return
        run = chance.choice(unfinished)
        pending = [run for run in unfinished if run.state.pending]
        roll = chance.random()
        if pending and roll < 0.5:
            await self._decide(app, chance.choice(pending))
        elif roll < 0.65:
            await self._signal(app, run)
        elif roll < 0.70:
            await app.cancel(run.run_id, by="ann", reason="enough")
        elif roll < 0.75:
            await app.pause(run.run_id, by="ann")
        elif roll < 0.80:
            await app.unpause(run.run_id, by="bob")
        else:
            await self._look_after(app, run)

    async def _start(self, app: Perdure) -> None:
        """A run whose start has no answer is started again, under the same id."""
        number = self._world.begun
        which = Random(f"run {self._world.seed} {number}").choice(cast.STARTED)
        await app.start(which, *cast.arguments(which, number), id=f"r{number}", tenant="t", actor="cy")
        self._world.begun += 1

    async def _decide(self, app: Perdure, run: Shadow) -> None:
        ask = self._chance.choice(list(run.state.pending.values()))
        who = self._chance.choice(("ann", "bob", "mallory"))
        if self._chance.random() < 0.75:
            await app.approve(ask.request.approval, by=who)
        else:
            await app.reject(ask.request.approval, by=who, reason="no")
        if self._chance.random() < 0.3:  # the same again, or the opposite
            await app.reject(ask.request.approval, by="bob", reason="on second thoughts")

    async def _signal(self, app: Perdure, run: Shadow) -> None:
        if self._said and self._chance.random() < 0.4:
            run_id, key, what = self._chance.choice(self._said)
        else:
            run_id, key, what = run.run_id, f"k{len(self._said)}", f"word {len(self._said)}"
            self._said.append((run_id, key, what))
        await app.signal(run_id, "post", what, key=key)

    async def _look_after(self, app: Perdure, run: Shadow) -> None:
        """What a person does about a run that needs attention."""
        if run.status == "paused":
            await app.unpause(run.run_id, by="bob")
        if run.status != "needs_attention":
            return
        doubts = [call for call in run.state.open.values() if call.phase in ("in_doubt", "started") and call.effect in ("once", "keyed")]
        for call in doubts:
            await self._resolve(app, run, call)
        if run.attention == "budget":
            await app.unpause(run.run_id, by="ann", add=Budget(calls=3, usd="0.20"))
        elif not doubts:
            await app.unpause(run.run_id, by="ann")

    async def _resolve(self, app: Perdure, run: Shadow, call: CallState) -> None:
        """The truth about the call, as the service has it, once nothing is on its way any more."""
        deed = self._world.outside.deeds.get(call.key)
        if deed is not None and deed.flying:
            return
        answer: dict[str, Any] = {"happened": deed.receipt} if deed is not None and deed.done else {"did_not_happen": True, "final": True}
        if deed is None and self._chance.random() < 0.2:
            answer = {"fail": "nobody will ever know"}
        await app.resolve(run.run_id, call.number, by="ann", **answer)

    async def _tidy_up(self, app: Perdure, unfinished: list[Shadow]) -> None:
        """All people do what they are asked."""
        for run in unfinished:
            asked: list[Callable[[], Awaitable[Any]]] = [
                partial(app.approve, ask.request.approval, by="ann") for ask in run.state.pending.values()
            ]
            if run.holder is None:
                asked.append(partial(self._look_after, app, run))
            for step in asked:
                try:
                    await step()
                except PerdureError as refused:
                    self._world.outside.counts[f"people: {type(refused).__name__}"] += 1
