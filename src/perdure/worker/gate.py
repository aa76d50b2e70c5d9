"""Whether a call may start now: its rate, and the budgets above it. Asked before the intent is recorded (G14)."""

from __future__ import annotations

from msgspec import Struct

from perdure.core.budget import NOTHING, Amounts, amounts_of, exceeded
from perdure.core.events import BudgetExceeded, Limits, Usage
from perdure.core.rate import Rate
from perdure.store.api import Store
from perdure.worker.clock import Clock
from perdure.worker.pen import Pen


class Later(Struct, frozen=True):
    """Its rate allows it from this time on."""

    at: int


class Over(Struct, frozen=True):
    """There is not enough left for it."""

    what: BudgetExceeded
    limits: Limits


class Gate:
    """The limits on one run's calls. What it hands out for a time is kept: whoever waited until then does not queue again."""

    def __init__(self, run_id: str, store: Store, pen: Pen, clock: Clock) -> None:
        self._run_id = run_id
        self._store = store
        self._pen = pen
        self._clock = clock
        self._places: dict[int, int] = {}  # call → when its place in the line comes up

    def open(self) -> None:
        """The run has been claimed: find out whether anything is charged for it."""
        created = self._pen.state.created
        assert created is not None
        may_have = created.budget is not None or created.parent is not None  # the run's own, or one above it
        self._pen.metered = may_have and bool(self._store.ledgers(self._run_id))
        # Whoever was parked until its turn has it now: taking another place, behind all who came since, it might never start.
        self._places = {call.number: call.turn for call in self._pen.state.open.values() if call.turn is not None}

    def check(self, number: int, rate: Rate | None, estimate: Usage | None) -> Later | Over | None:
        """None: it may start now."""
        if self._pen.metered:
            call = self._pen.state.calls.get(number)
            # What an attempt that was cut off had reserved is its successor's.
            over = self._over(amounts_of(estimate, calls=1), NOTHING if call is None else call.reserved)
            if over is not None:
                return over
        return None if rate is None else self._turn(number, rate)

    def hold_back(self, rate: Rate, until: int) -> None:
        """The service has refused us for now: that goes for everybody who uses it."""
        assert rate.key is not None
        self._store.hold_back(rate.key, until)

    def forget(self, number: int) -> None:
        self._places.pop(number, None)

    def _over(self, wanted: Amounts, held: Amounts) -> Over | None:
        # What this run has recorded and not committed yet is in no ledger: a whole fan-out may be waiting for one commit.
        uncharged = self._pen.uncharged
        more = uncharged.reserved + uncharged.spent + -held
        for ledger in self._store.ledgers(self._run_id):
            found = exceeded(ledger.run_id, ledger.limits, ledger.spent + ledger.reserved + more, wanted)
            if found is not None:
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
