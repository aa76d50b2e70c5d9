"""The facts about limits that the run core asks for: what is left in the budgets, and places in the line of a rate."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from msgspec import Struct

from perdure.core.budget import NOTHING, Amounts, Charge
from perdure.core.events import AnyBody, RunCreated
from perdure.core.rate import Rate
from perdure.core.steps import Answer, LedgersRead, NoAnswer, NotNow, PlaceGiven, Question, ReadLedgers
from perdure.errors import StoreError
from perdure.store.api import Store

log = logging.getLogger("perdure.worker")
_AGAIN_US = 500_000
_BUSY_US = 20_000
Moved = tuple[frozenset[str], Amounts]  # the budgets that a commit has charged, and with what


class Debts(Struct, frozen=True):
    """What a run was found with when it was claimed."""

    budgets: frozenset[str] = frozenset()  # the runs whose budgets apply: its own, and those above it
    reserved: Amounts = NOTHING  # what its open calls keep free there


def may_owe(created: AnyBody) -> bool:
    """Whether there may be a budget above the run, so that the store has to be asked."""
    assert isinstance(created, RunCreated)
    return created.budget is not None or created.parent is not None


def debts_of(store: Store, created: AnyBody) -> Debts:
    """Read with the journal, wherever that is read."""
    assert isinstance(created, RunCreated)
    if not may_owe(created):
        return Debts()
    budgets = frozenset(ledger.run_id for ledger in store.ledgers(created.run_id))
    return Debts(budgets, store.reserved(created.run_id)) if budgets else Debts()


class Neighbours(Protocol):
    """What goes on beside this run in its worker."""

    @property
    def transacting(self) -> bool: ...

    def uncharged_beside(self, run_id: str, budget_of: str) -> Amounts: ...


def answer(question: Question, run_id: str, store: Store, neighbours: Neighbours, now: int) -> Answer:
    """The answer, right now: between it and what the core records for it no other run of this worker may record anything."""
    if neighbours.transacting:
        return NotNow(now + _BUSY_US)  # a tool's transaction has the write lock, and the loop must not wait
    return beside(look(question, run_id, store, now), run_id, neighbours)


def look(question: Question, run_id: str, store: Store, now: int) -> Answer:
    """What the store says. From any thread, and without what other runs of this worker have recorded and not committed yet.

    Whatever is wrong with the store, there is an answer: half of what an agent asks for at a time must not be left unrecorded.
    """
    try:
        if isinstance(question, ReadLedgers):
            return LedgersRead(store.ledgers(run_id))
        return PlaceGiven(_place(store, question.rate, question.held, now))
    except StoreError as error:
        log.error("run %s: cannot tell whether a call may start: %s; trying again", run_id, error)
        return NotNow(now + _AGAIN_US)
    except Exception as error:
        return NoAnswer(error)


def beside(found: Answer, run_id: str, neighbours: Neighbours, moved: Sequence[Moved] = ()) -> Answer:
    """The answer with what other runs of this worker have recorded. `moved`: what they have committed since the store was asked.

    The store may have seen that already. What is counted twice makes the call wait for a moment, and then it is asked for again.
    """
    if not isinstance(found, LedgersRead):
        return found
    promised = {one.run_id: neighbours.uncharged_beside(run_id, one.run_id) for one in found.ledgers}
    for budgets, amounts in moved:
        for budget_of in budgets & promised.keys():
            promised[budget_of] = promised[budget_of] + amounts
    return LedgersRead(found.ledgers, promised)


class OneAtATime:
    """Questions to a store that may not answer for long, on a thread: those of one turn of one run, then those of the next.

    Between the answer and what the core records for it no other run of this worker may record anything under the same budget. A turn that
    has asked something is over before another one may ask.
    """

    def __init__(self, neighbours: Neighbours) -> None:
        self._neighbours = neighbours
        self._asker: object | None = None
        self._waiting: deque[tuple[object, Callable[[], None]]] = deque()
        self._moved: list[Moved] = []

    def ask(self, asker: object, begin: Callable[[], None]) -> None:
        """Call `begin`, now or when it is this one's turn."""
        if self._asker is None or self._asker is asker:
            self._asker = asker
            self._moved = []
            begin()
        else:
            self._waiting.append((asker, begin))

    def complete(self, found: Answer, run_id: str) -> Answer:
        """The answer to the question under way."""
        return beside(found, run_id, self._neighbours, self._moved)

    def committed(self, budgets: frozenset[str], charge: Charge) -> None:
        """Some run has charged its budgets: a ledger that is being read may not have it."""
        if self._asker is not None:
            both = charge.reserved + charge.spent
            # What was given back is left out: a ledger that has it already would be counted as emptier than it is.
            amounts = Amounts(max(both.usd_micros, 0), max(both.tokens, 0), max(both.calls, 0), max(both.busy_us, 0))
            self._moved.append((budgets, amounts))

    def end_turn(self, asker: object) -> None:
        """This one asks nothing more for now."""
        self._waiting = deque(one for one in self._waiting if one[0] is not asker)
        if self._asker is asker:
            self._asker = None
            if self._waiting:
                self.ask(*self._waiting.popleft())


def _place(store: Store, rate: Rate, held: int | None, now: int) -> int:
    if held is None or held < now - round(rate.per * 1e6):
        # New in line; or its place has long gone by, and all that waited with it must not start at once now.
        return store.admit(rate, now)
    if held <= now and store.admit(Rate(key=rate.key), now) > now:
        # Its place has come up while everybody is told to wait: then all stand in line anew, or they would start at once after it.
        return store.admit(rate, now)
    return held
