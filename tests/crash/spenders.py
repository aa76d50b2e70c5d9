"""Victims that spend money: every call costs ten cents.

The process is killed right after the service has done its work and noted the price.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

from tests.crash import victims
from tests.crash.ledger import Ledger

from perdure import Agent, Budget, Call, Outcome, Run, agent, tool
from perdure.models import Answer, Price, Request, Scripted, Tokens

COST = "0.10"
BUDGET = "0.50"
CALLS = 20


def _pay(call: Call, *, by_key: bool = False) -> str:
    """The service works, and charges money. A process that gets the first answer to a call dies at once."""
    ledger = Ledger.here()
    first = not any(line["key"] == call.key for line in ledger.lines())
    receipt = ledger.perform("paid", call, by_key=by_key)
    if first:
        os.kill(os.getpid(), signal.SIGKILL)
    return receipt


@tool(name="buy_once", cost=COST)
async def once(call: Call) -> str:
    return _pay(call)


@once.reconcile
async def _found(call: Call) -> Outcome:
    return Outcome.happened("paid done") if Ledger.here().has_happened(call.key) else Outcome.not_happened()


@tool(name="buy_keyed", effect="keyed", cost=COST)
async def keyed(call: Call) -> str:
    return _pay(call, by_key=True)


@tool(name="buy_idempotent", effect="idempotent", cost=COST)
async def idempotent(call: Call) -> str:
    return _pay(call)


@tool(name="buy_read", effect="read", cost=COST)
async def read(call: Call) -> str:
    return _pay(call)


class Paid(Scripted):
    """A model whose answers cost ten cents each, at most and always."""

    async def answer(self, request: Request, call: Call) -> Answer:
        _pay(call)
        return await super().answer(request, call)


MODEL = Paid([Answer("well", tokens=Tokens(output=1000))] * CALLS, name="paid", price=Price(input=0, output=100), max_tokens=1000)


def _agent(kind: str, ask: Callable[[], Any]) -> Agent[Any, Any]:
    async def spend(run: Run) -> int:
        for _ in range(CALLS):
            await ask()
        return CALLS

    spend.__name__ = f"spend_{kind}"
    return agent(version="1", budget=Budget(usd=BUDGET))(spend)


AGENTS: dict[str, Agent[Any, Any]] = {
    "once": _agent("once", once),
    "keyed": _agent("keyed", keyed),
    "idempotent": _agent("idempotent", idempotent),
    "read": _agent("read", read),
    "model": _agent("model", lambda: MODEL.ask("well?")),
}


def rest(folder: str, **args: Any) -> None:
    victims.AGENTS.update({found.name: found for found in AGENTS.values()})  # of this process alone
    victims.rest(folder=folder, **args)
