"""Whether a call may start now: its rate, and the budgets above it. Asked before the intent is recorded (G14)."""

from __future__ import annotations

import logging
from typing import Protocol

from msgspec import Struct

from perdure.core.budget import NOTHING, Amounts, amounts_of, exceeded, most_of
from perdure.core.events import AnyBody, BudgetExceeded, Limits, RunCreated, Usage
from perdure.core.rate import Rate
from perdure.errors import StoreError
from perdure.store.api import Store
from perdure.worker.clock import Clock
from perdure.worker.pen import Pen

log = logging.getLogger("perdure.worker")
_AGAIN_US = 500_000
_BUSY_US = 20_000
_PATIENCE_US = 900_000_000  # longer than a doubt about an ordinary call lasts: what it may cost is reserved until then
_FIELDS = {"usd": "usd_micros", "tokens": "tokens", "calls": "calls", "seconds": "busy_us"}


class Later(Struct, frozen=True):
    """Look again at this time."""

    at: int
    has_place: bool = True  # in the line of its rate; otherwise it only looks again then


class Over(Struct, frozen=True):
    """There is not enough left for it."""

    what: BudgetExceeded
    limits: Limits


class Debts(Struct, frozen=True):
    """What a run was found with when it was claimed."""

    budgets: frozenset[str] = frozenset()  # whose budgets apply: its own, and those above it
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


class Beside(Protocol):
    """What is going on beside this run in its worker."""

    @property
    def transacting(self) -> bool: ...

    def uncharged_beside(self, run_id: str, budget_of: str) -> Amounts: ...


class Gate:
    """The limits on one run's calls. What it hands out for a time is kept: whoever waited until then does not queue again."""

    def __init__(self, run_id: str, store: Store, pen: Pen, clock: Clock, host: Beside) -> None:
        self._host = host
        self._budgets: frozenset[str] = frozenset()
        self._run_id = run_id
        self._store = store
        self._pen = pen
        self._clock = clock
        self._waiting: dict[int, int] = {}  # call → since when it has waited for what others have reserved
        self._waited: dict[int, int] = {}  # the same, of the calls that were open when the run was claimed
        self._places: dict[int, int] = {}  # call → when its place in the line comes up

    def open(self, debts: Debts) -> None:
        """The run has been claimed, and this is charged for it."""
        self._budgets = debts.budgets
        self._pen.metered = bool(self._budgets)
        if self._pen.metered:
            self._pen.owe(debts.reserved)
        if self._pen.state.short_since is not None:
            # Or a run that is parked meanwhile would be claimed and parked for as long as some other call is in doubt.
            self._waited = dict.fromkeys(self._pen.state.open, self._pen.state.short_since)
        # Whoever was parked until its turn has it now: taking another place, behind all who came since, it might never start.
        self._places = {call.number: call.turn for call in self._pen.state.open.values() if call.turn is not None}

    def check(self, number: int, rate: Rate | None, estimate: Usage | None) -> Later | Over | None:
        """None: it may start now. Whatever is wrong with the store, the answer is an answer: half of what an agent asks for at a time
        must not be left unrecorded."""
        if self._host.transacting:
            return Later(
                self._clock.now() + _BUSY_US, has_place=False
            )  # a tool's transaction has the write lock, and the loop must not wait
        try:
            return self._check(number, rate, estimate)
        except StoreError as error:
            log.error("run %s: cannot tell whether call %d may start: %s; trying again", self._run_id, number, error)
            return Later(self._clock.now() + _AGAIN_US, has_place=False)

    def _check(self, number: int, rate: Rate | None, estimate: Usage | None) -> Later | Over | None:
        if self._pen.metered:
            call = self._pen.state.calls.get(number)
            # A key makes one effect of several attempts: what is reserved for those in doubt is enough for the next one too.
            kept = None if call is None else call.may_cost
            over = self._over(number, amounts_of(most_of(estimate, kept), calls=1), amounts_of(kept))
            if over is not None:
                return over
            self._waiting.pop(number, None)
        return None if rate is None else self._turn(number, rate)

    def hold_back(self, rate: Rate, until: int) -> None:
        """The service has refused us for now: that goes for everybody who uses it."""
        assert rate.key is not None
        try:
            self._store.hold_back(rate.key, until)
        except StoreError as error:
            log.error("others cannot be told that %s wants no more for now: %s", rate.key, error)

    def has_room_again(self, over: BudgetExceeded) -> bool:
        """Whether somebody has added to the budget that was used up."""
        try:
            ledgers = self._store.ledgers(self._run_id)
        except StoreError:
            return False
        limits = [getattr(ledger.limits, _FIELDS[over.what]) for ledger in ledgers if ledger.run_id == over.budget_of]
        return any(limit is None or limit > over.limit for limit in limits)

    @property
    def waiting(self) -> bool:
        """Whether some call waits for what other calls have reserved."""
        return bool(self._waiting)

    @property
    def short_since(self) -> int | None:
        """Since when some call has waited for that; None if none does."""
        return min(self._waiting.values(), default=None)

    def uncharged(self, budget_of: str) -> Amounts:
        """What is recorded in this run under that budget and not durable yet."""
        if budget_of not in self._budgets:
            return NOTHING
        charge = self._pen.uncharged
        return charge.reserved + charge.spent

    def forget(self, number: int) -> None:
        self._places.pop(number, None)

    def _over(self, number: int, wanted: Amounts, held: Amounts) -> Later | Over | None:
        """What stands against reserving `wanted` in the place of `held`."""
        # What this run has recorded and not committed yet is in no ledger: a whole fan-out may be waiting for one commit.
        uncharged = self._pen.uncharged
        more = uncharged.reserved + uncharged.spent + -held
        for ledger in self._store.ledgers(self._run_id):
            found = exceeded(ledger.run_id, ledger.limits, ledger.spent + ledger.reserved + more, wanted)
            if found is None:
                beside = self._host.uncharged_beside(self._run_id, ledger.run_id)
                if beside and exceeded(ledger.run_id, ledger.limits, ledger.spent + ledger.reserved + more + beside, wanted) is not None:
                    # It is promised to other runs of this worker, whose commit is under way: a moment later the ledger knows.
                    return Later(self._clock.now(), has_place=False)
                continue
            if exceeded(ledger.run_id, ledger.limits, ledger.spent + uncharged.spent, wanted) is None:
                # Nothing is used up: others have reserved what they may not need. When they have ended, there is room or there is not;
                # and whoever has died with a reservation does not keep the others waiting for ever.
                now = self._clock.now()
                if now - self._waiting.setdefault(number, self._waited.get(number, now)) < _PATIENCE_US:
                    return Later(now + _AGAIN_US, has_place=False)
            return Over(found, ledger.limits)
        return None

    def _turn(self, number: int, rate: Rate) -> Later | None:
        now = self._clock.now()
        place = self._places.pop(number, None)
        if place is None or place < now - round(rate.per * 1e6):
            # New in line; or its place has long gone by, and all that waited with it must not start at once now.
            place = self._store.admit(rate, now)
        elif place <= now and self._store.admit(Rate(key=rate.key), now) > now:
            # Its place has come up while everybody is told to wait: then all stand in line anew, or they would start at once after it.
            place = self._store.admit(rate, now)
        if place <= now:
            return None
        self._places[number] = place
        return Later(place)
