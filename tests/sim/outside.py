"""The services outside of perdure. They have their own memory, which the tables of perdure do not have.

A request is sent in the first step of a tool. Then it arrives or is lost, even if the process that sent it dies.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any

from tests.sim.kernel import Kernel, Killed, Process, Violation

from perdure import Call, Fatal, NotSent, Outcome, RetryLater

if TYPE_CHECKING:
    from tests.sim.checker import Checker

PRICE = 100_000  # micro-dollars: the price of each effect, which every tool declares
# A request arrives within the tool's time-out and the margin after it, counted from the moment at which its sender could last have sent.
LONGEST_FLIGHT_US = 2_300_000


@dataclass
class Deed:
    """What the services know about one idempotency key."""

    run_id: str
    number: int
    effect: str
    receipt: str
    begun: int = 0  # attempts that have sent their first byte
    done: int = 0
    flying: int = 0
    # Attempts that began after their process had stood still: there is no limit for how late a stopped process is.
    late: int = 0
    attempts: list[int] = field(default_factory=list)


class Outside:
    """All services, and what each of them has done."""

    def __init__(self, kernel: Kernel, seed: int, checker: Checker) -> None:
        self.chance = Random(f"outside {seed}")
        self.kernel = kernel
        self.checker = checker
        self.calm = False  # everything works
        self.deeds: dict[str, Deed] = {}
        self.counts: Counter[str] = Counter()

    # -- what tools call ----------------------------------------------------------------------------------------------
    async def perform(self, call: Call, effect: str) -> str:
        """Do it, as far as the network allows; the receipt."""
        fate = self._fate()
        deed = self._begin(call, effect, self._process(), sends=fate not in ("not sent", "error"))
        if fate == "not sent":
            raise NotSent("the line was busy")
        if fate == "error":
            raise ValueError("a mistake, found before anything was sent")
        loop = asyncio.get_running_loop()
        reply = loop.create_future()
        away_us = self._flight_us()
        deed.flying += 1

        def answer(error: Exception | None) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(_settle, reply, deed.receipt, error)

        def arrive() -> None:
            deed.flying -= 1
            if fate in ("busy", "refused"):
                error = RetryLater("come back", after=0.2) if fate == "busy" else Fatal("no")
                self.kernel.at(self.kernel.now_us + away_us, lambda: answer(error))
                return
            if fate == "request lost":
                return
            self._do(deed)
            if fate not in ("reply lost", "broken early"):
                reset = ConnectionResetError("reset by peer") if fate == "reset" else None
                self.kernel.at(self.kernel.now_us + away_us, lambda: answer(reset))

        self.kernel.at(self.kernel.now_us + away_us, arrive)
        if fate == "broken early":
            # The sender's line breaks, and the request stays where it is: in some queue on its way.
            self.kernel.at(self.kernel.now_us + 1000, lambda: answer(ConnectionResetError("reset before it arrived")))
        await reply
        return deed.receipt

    async def find(self, call: Call) -> Outcome:
        """A reconcile hook: what the service has under that key. It does not know requests that are under way."""
        self._process()
        self.counts["asked"] += 1
        await asyncio.sleep(0.002)
        deed = self.deeds.get(call.key)
        return Outcome.happened(deed.receipt) if deed is not None and deed.done else Outcome.not_happened()

    def write(self, call: Call) -> str:
        """The effect of a transaction: a row in the journal's database."""
        deed = self._begin(call, "transaction", self._process(), sends=True)
        call.connection.execute("INSERT INTO effects VALUES (?, ?, ?, ?)", (call.key, call.run_id, call.number, call.attempt))
        if self._chance() < 0.3:
            self.kernel.sleep(int(self._chance() * 200_000))  # while it holds the write lock
        if self._chance() < 0.06:
            raise ValueError("a mistake: everything is rolled back")
        return deed.receipt

    async def think(self, call: Call) -> None:
        """A model is asked."""
        self._begin(call, "model", self._process(), sends=True)
        await asyncio.sleep(0.01 + self._chance() * 0.3)
        if not self.calm:
            fate = self.chance.random()
            if fate < 0.05:
                raise RetryLater("429", after=0.3)
            if fate < 0.1:
                raise ConnectionResetError("reset by peer")

    # -- the true state
    # --------------------------------------------------------------------------------------------------
    def _begin(self, call: Call, effect: str, process: Process, *, sends: bool) -> Deed:
        deed = self.deeds.get(call.key)
        if deed is None:
            deed = self.deeds[call.key] = Deed(call.run_id, call.number, effect, f"receipt {call.run_id} {call.number}")
        if (deed.run_id, deed.number) != (call.run_id, call.number):
            raise self._failed(f"call {call.number} of run {call.run_id} has the key of call {deed.number} of run {deed.run_id}")
        late = self.checker.begins(call, effect, process)
        deed.attempts.append(call.attempt)
        if sends:
            deed.begun += 1
            deed.late += late
            self.counts[f"begun {effect}"] += 1
            if effect == "once" and deed.done and not deed.late:
                raise self._failed(
                    f"run {call.run_id}: call {call.number} is begun again (attempt {call.attempt}), and it has happened (G5)"
                )
        return deed

    def _do(self, deed: Deed) -> None:
        if deed.effect == "keyed" and deed.done:
            self.counts["dropped by key"] += 1
            return
        deed.done += 1
        self.counts[f"done {deed.effect}"] += 1
        over = self.checker.over_budget(deed.run_id, self.bill)
        if over is not None:
            raise self._failed(over)
        if deed.effect == "once" and deed.done > 1 and not deed.late:
            raise self._failed(f"run {deed.run_id}: call {deed.number}, of class once, has happened {deed.done} times (G5)")

    def bill(self, run_id: str, *, reads: bool = True) -> int:
        """What the services charge for the run and all runs below it.

        Requests of a process that had stood still do not count.
        """
        family = [deed for deed in self.deeds.values() if deed.run_id == run_id or deed.run_id.startswith(f"{run_id}/")]
        family = [deed for deed in family if reads or deed.effect != "read"]
        return PRICE * sum(max(deed.done - deed.late, 0) for deed in family)

    def _failed(self, why: str) -> Violation:
        failure = Violation(why)
        self.kernel.fail(failure)
        return failure

    def _process(self) -> Process:
        process = self.kernel.current.process
        if process is None or process.dead:
            raise Killed
        return process

    def _chance(self) -> float:
        return 1.0 if self.calm else self.chance.random()

    def _flight_us(self) -> int:
        if self.chance.random() < 0.15:
            return int(self.chance.random() * LONGEST_FLIGHT_US)
        return 1000 + int(self.chance.random() * 20_000)

    def _fate(self) -> str:
        if self.calm:
            return "done"
        roll = self.chance.random()
        for fate, share in _FATES:
            roll -= share
            if roll < 0:
                self.counts[f"tool {fate}"] += 1
                return fate
        return "done"


_FATES = (
    ("not sent", 0.03),
    ("error", 0.02),
    ("busy", 0.03),
    ("refused", 0.02),
    ("request lost", 0.03),
    ("reply lost", 0.03),
    ("reset", 0.03),
    ("broken early", 0.03),
)


def _settle(reply: asyncio.Future[Any], receipt: str, error: Exception | None) -> None:
    if reply.done():
        return
    if error is None:
        reply.set_result(receipt)
    else:
        reply.set_exception(error)
