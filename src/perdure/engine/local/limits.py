"""Answers the run core's questions about limits: what is left in the budgets, and when a rate limit admits a call."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from msgspec import Struct

from perdure.core.budget import NOTHING, Amounts, Charge
from perdure.core.events import AnyBody, RunCreated
from perdure.core.rate import Rate
from perdure.core.steps import Answer, LedgersRead, LimitUnanswered, NotNow, PlaceGiven, Question, ReadLedgers
from perdure.errors import StoreError
from perdure.store.api import Store

log = logging.getLogger("perdure.worker")
_AGAIN_US = 500_000
_BUSY_US = 20_000
Moved = tuple[frozenset[str], Amounts]  # the budgets that a commit has charged, and the amounts


class Debts(Struct, frozen=True):
    """The budgets that apply to a run, and the amounts that were reserved there when the run was claimed."""

    budgets: frozenset[str] = frozenset()  # the ids of the runs whose budgets apply: the run itself, and runs above it
    reserved: Amounts = NOTHING  # the amounts that are reserved in these budgets for the run's open calls


def may_owe(created: AnyBody) -> bool:
    """May a budget apply to the run (its own budget, or one above it), so that the store has to be asked?"""
    assert isinstance(created, RunCreated)
    return created.budget is not None or created.parent is not None or created.by_name


def debts_of(store: Store, created: AnyBody) -> Debts:
    """The run's debts, read from the store. Call this on the thread that reads the run's journal."""
    assert isinstance(created, RunCreated)
    if not may_owe(created):
        return Debts()
    budgets = frozenset(ledger.run_id for ledger in store.ledgers(created.run_id))
    return Debts(budgets, store.reserved(created.run_id)) if budgets else Debts()


class Neighbours(Protocol):
    """What a run needs to know about the other runs of its worker."""

    @property
    def transacting(self) -> bool: ...

    def uncharged_beside(self, run_id: str, budget_of: str) -> Amounts: ...


def answer(question: Question, run_id: str, store: Store, neighbours: Neighbours, now: int) -> Answer:
    """The answer to a question, found on this thread.

    Until the core has recorded what follows from the answer, no other run of this worker may record anything.
    """
    if neighbours.transacting:
        return NotNow(now + _BUSY_US)  # a tool's transaction has the write lock, and the loop must not wait
    return beside(look(question, run_id, store, now), run_id, neighbours)


def look(question: Question, run_id: str, store: Store, now: int) -> Answer:
    """The store's answer, without amounts that other runs of this worker have recorded and not committed.

    Call this from any thread. It never raises: an exception would end the turn after the first call of the agent, and
    the other calls of that turn would not be recorded.
    """
    try:
        if isinstance(question, ReadLedgers):
            return LedgersRead(store.ledgers(run_id))
        return PlaceGiven(_place(store, question.rate, question.held, now))
    except StoreError as error:
        log.error("run %s: cannot tell whether a call may start: %s; trying again", run_id, error.in_full())
        return NotNow(now + _AGAIN_US)
    except Exception as error:
        return LimitUnanswered(error)


def beside(found: Answer, run_id: str, neighbours: Neighbours, moved: Sequence[Moved] = ()) -> Answer:
    """The answer, with the amounts that other runs of this worker have recorded and not committed.

    `moved` are the amounts that these runs have committed since the store was asked. The store may have counted some
    of them already. If an amount is counted twice, the call only waits for a moment, until it asks again.
    """
    if not isinstance(found, LedgersRead):
        return found
    promised = {one.run_id: neighbours.uncharged_beside(run_id, one.run_id) for one in found.ledgers}
    for budgets, amounts in moved:
        for budget_of in budgets & promised.keys():
            promised[budget_of] = promised[budget_of] + amounts
    return LedgersRead(found.ledgers, promised)


class OneAtATime:
    """Puts the questions to a remote store in order: one turn of one run at a time. Questions are asked on a thread.

    Until the core has recorded what follows from an answer, no other run of this worker may record anything under the
    same budget. So if a turn has asked a question, this turn must end before another run may ask.
    """

    def __init__(self, neighbours: Neighbours) -> None:
        self._neighbours = neighbours
        self._asker: object | None = None
        self._waiting: deque[tuple[object, Callable[[], None]]] = deque()
        self._moved: list[Moved] = []

    def ask(self, asker: object, begin: Callable[[], None]) -> None:
        """Call `begin`: now, or later when it is the turn of this asker."""
        if self._asker is None or self._asker is asker:
            self._asker = asker
            self._moved = []
            begin()
        else:
            self._waiting.append((asker, begin))

    def complete(self, found: Answer, run_id: str) -> Answer:
        """The store's answer to the question under way, with the amounts that other runs have recorded meanwhile."""
        return beside(found, run_id, self._neighbours, self._moved)

    def committed(self, budgets: frozenset[str], charge: Charge) -> None:
        """Count a charge that a run has just committed: a ledger that is being read right now may not contain it."""
        if self._asker is not None:
            both = charge.reserved + charge.spent
            # Leave out amounts that were freed: if the ledger has counted them already, it would look emptier than it
            # is.
            amounts = Amounts(max(both.usd_micros, 0), max(both.tokens, 0), max(both.calls, 0), max(both.busy_us, 0))
            self._moved.append((budgets, amounts))

    def end_turn(self, asker: object) -> None:
        """End the turn of this asker: the next asker may ask."""
        self._waiting = deque(one for one in self._waiting if one[0] is not asker)
        if self._asker is asker:
            self._asker = None
            if self._waiting:
                self.ask(*self._waiting.popleft())


def _place(store: Store, rate: Rate, held: int | None, now: int) -> int:
    if held is None or held < now - round(rate.per * 1e6):
        # The call is new, or the time of its place is long past. In the second case, other calls may have waited too,
        # and they must not all start at once now.
        return store.admit(rate, now)
    if held <= now and store.admit(Rate(key=rate.key), now) > now:
        # The time of the call's place has come, but the service has asked for a pause. All calls get new places:
        # otherwise they would all start at once after the pause.
        return store.admit(rate, now)
    return held
