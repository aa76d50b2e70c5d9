"""The facts about limits that the run core asks for: what is left in the budgets, and places in the line of a rate."""

from __future__ import annotations

import logging
from typing import Protocol

from msgspec import Struct

from perdure.core.budget import NOTHING, Amounts
from perdure.core.events import AnyBody, RunCreated
from perdure.core.rate import Rate
from perdure.core.steps import Answer, LedgersRead, NoAnswer, NotNow, PlaceGiven, Question, ReadLedgers
from perdure.errors import StoreError
from perdure.store.api import Store

log = logging.getLogger("perdure.worker")
_AGAIN_US = 500_000
_BUSY_US = 20_000


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
    """The answer, right now: between it and what the core records for it no other run of this worker may record anything.

    Whatever is wrong with the store, there is an answer: half of what an agent asks for at a time must not be left unrecorded.
    """
    if neighbours.transacting:
        return NotNow(now + _BUSY_US)  # a tool's transaction has the write lock, and the loop must not wait
    try:
        if isinstance(question, ReadLedgers):
            ledgers = store.ledgers(run_id)
            return LedgersRead(ledgers, {one.run_id: neighbours.uncharged_beside(run_id, one.run_id) for one in ledgers})
        return PlaceGiven(_place(store, question.rate, question.held, now))
    except StoreError as error:
        log.error("run %s: cannot tell whether a call may start: %s; trying again", run_id, error)
        return NotNow(now + _AGAIN_US)
    except Exception as error:
        return NoAnswer(error)


def _place(store: Store, rate: Rate, held: int | None, now: int) -> int:
    if held is None or held < now - round(rate.per * 1e6):
        # New in line; or its place has long gone by, and all that waited with it must not start at once now.
        return store.admit(rate, now)
    if held <= now and store.admit(Rate(key=rate.key), now) > now:
        # Its place has come up while everybody is told to wait: then all stand in line anew, or they would start at once after it.
        return store.admit(rate, now)
    return held
