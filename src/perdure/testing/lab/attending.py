"""What the lab does for a waiting run, the same in every trial: approvals, signals, skipped time, settled doubts."""

from __future__ import annotations

import asyncio
from itertools import count

from perdure.app import Perdure
from perdure.core import codec
from perdure.core.approval import Standing
from perdure.core.state import fold
from perdure.errors import Conflict, InvalidInput, NotPermitted, RunEnded
from perdure.store.api import FINISHED, ApprovalRow, RunRow
from perdure.testing.lab.carrier import Late
from perdure.testing.lab.ledger import EffectLedger, of_call
from perdure.testing.lab.spec import Spec
from perdure.testing.lab.warp import Warp

WHO = "crashtest"
_ROLE = "role:"


class Attendant:
    """Attends to one run in one process. `settled` are the doubts that this object has settled."""

    def __init__(self, app: Perdure, spec: Spec, warp: Warp, ledger: EffectLedger, late: Late) -> None:
        self._app = app
        self._spec = spec
        self._warp = warp
        self._ledger = ledger
        self._late = late
        self._sent = 0
        self.settled: list[str] = []

    async def attend(self, row: RunRow) -> bool:
        """Do one thing that lets the run continue. False if the run has ended, or if the lab can do nothing for it."""
        if row.status in FINISHED:
            return False
        family = [row, *await self._app.ask(lambda: self._app.store.family(row.run_id))]
        return await self._settle(family) or await self._decide(family) or await self._signal(family) or await self._let_time_pass(family)

    # -- doubts -------------------------------------------------------------------------------------------------------
    async def _settle(self, family: list[RunRow]) -> bool:
        """Settle calls in doubt if the ledger says that the function has returned, or that it was never called."""
        found = False
        for row in family:
            if row.status == "needs_attention" and row.attention == "in_doubt":
                state = fold(await self._app.ask(lambda run_id=row.run_id: self._app.store.read(run_id)))  # type: ignore[misc]
                for call in [call for call in state.open.values() if call.phase == "in_doubt"]:
                    found = await self._settle_call(row.run_id, call.number, call.attempt, call.tool) or found
        return found

    async def _settle_call(self, run_id: str, number: int, attempt: int, tool: str) -> bool:
        # First let the late request arrive. Before a person looks at the service, the late effect would have happened.
        await asyncio.to_thread(self._late.arrive, run_id, number)
        entries = self._ledger.entries()
        facts = {entry.fact: entry for entry in of_call(entries, run_id, number) if entry.attempt == attempt}
        returned = facts.get("returned")
        if returned is not None and returned.result is not None:
            await self._app.resolve(run_id, number, happened=codec.decode(returned.result.encode()), by=WHO)
            self.settled.append(f"{tool} (call {number}): it happened")
            return True
        if "begun" not in facts and not any(entry.fact == "unseen" and entry.tool == tool for entry in entries):
            await self._app.resolve(run_id, number, did_not_happen=True, final=True, by=WHO)
            self.settled.append(f"{tool} (call {number}): it did not happen")
            return True
        return False  # the function was cut off in its middle: only a person could find out whether it happened

    # -- people -------------------------------------------------------------------------------------------------------
    async def _decide(self, family: list[RunRow]) -> bool:
        if self._spec.approve == "none":
            return False
        asked = [one for row in family for one in await self._app.approvals(run_id=row.run_id)]
        decided = [one for one in asked if await self._answer(one)]
        return bool(decided)

    async def _answer(self, asked: ApprovalRow) -> bool:
        """Approve or reject in the name of each person who may decide, until the approval is settled."""
        standing = asked.standing
        roles = [one.removeprefix(_ROLE) for one in standing.request.by if one.startswith(_ROLE)]
        for who in _deciders(standing):
            try:
                if self._spec.approve == "all":
                    row = await self._app.approve(asked.approval, by=who, roles=roles)
                else:
                    row = await self._app.reject(asked.approval, by=who, roles=roles, reason="the crash lab says no")
            except (NotPermitted, InvalidInput):
                continue
            except Conflict:
                return True  # the approval has expired: the run continues without a decision
            if row.status != "pending":
                return True
        return False

    # -- signals and time ---------------------------------------------------------------------------------------------
    async def _signal(self, family: list[RunRow]) -> bool:
        if self._sent >= len(self._spec.signals) or any(row.status == "needs_attention" for row in family):
            return False
        topic, payload = self._spec.signals[self._sent]
        self._sent += 1
        try:
            # The signal has a key: a resumed process sends all signals again, and each signal must count only once.
            await self._app.signal(self._spec.run_id, topic, payload, key=f"{WHO}-{self._sent}", by=WHO)
        except RunEnded:
            return False
        return True

    async def _let_time_pass(self, family: list[RunRow]) -> bool:
        """Jump to the next timer or retry. While an effect may still become visible outside, wait in real time."""
        due = [row.ready_at for row in family if row.ready_at is not None and row.status != "waiting_approval"]
        if not due or not self._spec.warp:
            return False
        left_s = max((min(due) - self._app.clock.now()) / 1e6, 0.0) + 0.001
        if self._warp.outside_s > 0.0:
            await asyncio.sleep(min(left_s, self._warp.outside_s))
        else:
            self._warp.jump(left_s)
        return True


def _deciders(standing: Standing) -> list[str]:
    named = [one for one in standing.request.by if not one.startswith(_ROLE)]
    numbers = count(2)
    return [*named, WHO, *(f"{WHO}-{next(numbers)}" for _ in range(standing.request.quorum))]
