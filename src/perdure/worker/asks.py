"""The approvals of one run: what to do when their time is over, or when nobody wants them any more.

Nothing is settled here. Every change goes through `Store.decide`, as the decisions of people do, and comes back through the run's
inbox: whoever is first there has decided, and the journal has one answer (T17).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

from perdure.core.approval import Expire, Judgement, Withdraw
from perdure.core.state import AskState, RunState
from perdure.errors import Conflict, NotFound, RunEnded, StoreError
from perdure.worker.clock import Clock

log = logging.getLogger("perdure.worker")
_AGAIN_US = 1_000_000


class Decides(Protocol):
    def decide(self, approval: str, judgement: Judgement, done: Callable[[Exception | None], None]) -> None: ...


class Asks:
    """Which approvals of the run go on by themselves, and when."""

    def __init__(self, state: RunState, host: Decides, clock: Clock) -> None:
        self._state = state
        self._host = host
        self._clock = clock
        self.waits: dict[int, int] = {}  # number → when it expires
        self._unwanted: set[int] = set()
        self._sent: set[int] = set()  # settled as far as we are concerned; the answer is on its way

    def watch(self, ask: AskState) -> None:
        """Be there when its time is over. Also after an escalation, which gives it another time."""
        self._sent.discard(ask.number)
        if ask.number in self._unwanted:
            self.withdraw(ask)
        elif ask.request.expires_at is not None:
            self.waits[ask.number] = ask.request.expires_at
        else:
            self.waits.pop(ask.number, None)

    def settled(self, number: int) -> None:
        self.waits.pop(number, None)
        self._sent.discard(number)

    def withdraw(self, ask: AskState) -> None:
        """Nobody wants the answer any more."""
        self._unwanted.add(ask.number)
        self._settle(ask, Withdraw())

    def expire(self, ask: AskState) -> None:
        """Its time is over: pending, or granted and not started."""
        self._settle(ask, Expire())

    def settle_due(self, now: int) -> None:
        """Settle what has expired, and what could not be settled when it was tried before."""
        for number in [number for number, at in self.waits.items() if at <= now]:
            ask = self._state.asks[number]
            self.withdraw(ask) if number in self._unwanted else self.expire(ask)

    def next_due(self) -> int | None:
        return min(self.waits.values(), default=None)

    def _settle(self, ask: AskState, judgement: Judgement) -> None:
        number = ask.number
        # Kept until the answer is here: a run that came to rest meanwhile would have nothing to wake it, should this fail.
        self.waits[number] = self._clock.now() + _AGAIN_US
        if number in self._sent:
            return
        self._sent.add(number)

        def done(error: Exception | None) -> None:
            match error:
                case None | RunEnded():
                    return  # the inbox has it
                case Conflict() | NotFound() | StoreError():
                    # Somebody was faster, and the inbox has it; or the clock was set back, the request itself is not durable yet, or
                    # the store is busy: then look again.
                    log.info("approval %s: %s", ask.request.approval, error)
                    self._sent.discard(number)
                case _:
                    raise error

        self._host.decide(ask.request.approval, judgement, done)
