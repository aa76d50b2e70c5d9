"""Tools of every kind that write each effect into a file, an agent that uses all of them, and its recorded run."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from tests.unit.drive_tools import SETTINGS

from perdure import Agent, Approval, Call, Perdure, ReAct, Run, agent, tool
from perdure.core.events import encode_body
from perdure.models import Answer, Model, Tokens
from perdure.models.messages import Request
from perdure.models.prices import Price
from perdure.store.api import Filter


def _note(ledger: str, word: str) -> str:
    with open(ledger, "a") as file:
        file.write(word + "\n")
    return f"{word}: done"


@tool(effect="read")
async def look(ledger: str, what: str) -> str:
    return _note(ledger, f"look {what}")


@tool(effect="read")
def look_in_thread(ledger: str, what: str) -> str:
    return _note(ledger, f"look_in_thread {what}")


@tool(effect="read", isolate=True)
def look_apart(ledger: str, what: str) -> str:
    return _note(ledger, f"look_apart {what}")


@tool(effect="read", approval=True)
async def peek(ledger: str, what: str) -> str:
    return _note(ledger, f"peek {what}")


@tool(effect="idempotent")
async def put(ledger: str, what: str) -> str:
    return _note(ledger, f"put {what}")


@tool(effect="keyed")
async def refund(ledger: str, what: str, call: Call) -> str:
    return _note(ledger, f"refund {what}")


@tool(effect="transaction")
def book(ledger: str, what: str, call: Call) -> str:
    return _note(ledger, f"book {what}")


@tool(effect="once")
async def pay(ledger: str, what: str) -> str:
    return _note(ledger, f"pay {what}")


@tool(effect="once", isolate=True)
def pay_apart(ledger: str, what: str) -> str:
    return _note(ledger, f"pay_apart {what}")


@tool(effect="once", approval=Approval())
async def wire(ledger: str, what: str) -> str:
    return _note(ledger, f"wire {what}")


# Read tools whose bodies call another tool.
@tool(effect="read")
async def hiding(ledger: str, what: str) -> str:
    return f"{await look(ledger, what)} {await pay(ledger, what)}"


@tool(effect="read")
def hiding_in_thread(ledger: str, what: str) -> str:
    return asyncio.run(hiding(ledger, what))


@tool(effect="read", isolate=True)
def hiding_apart(ledger: str, what: str) -> str:
    return asyncio.run(hiding(ledger, what))


ONE_DOLLAR = Price(input=100_000, output=0)  # for ten tokens


class Oracle(Model):
    """A model that counts its requests outside of perdure. Each answer costs a dollar."""

    def __init__(self, ledger: str, name: str = "oracle", price: Price | None = ONE_DOLLAR, text: str = "yes") -> None:
        super().__init__(name, price=price)
        self.ledger = ledger
        self.text = text

    async def answer(self, request: Request, call: Call) -> Answer:
        _note(self.ledger, f"{request.model} {call.number}")
        return Answer(self.text, tokens=Tokens(input=10, output=1))


@agent(version="1")
async def helper(run: Run, ledger: str, what: str) -> str:
    return await pay(ledger, f"{what} of a child")


@agent(version="1")
async def everything(run: Run, ledger: str, what: str) -> list[Any]:
    calls = [one(ledger, what) for one in ALL]
    asked = Oracle(ledger).ask(what)
    approval = run.request_approval("go on", {"what": what})
    found = await asyncio.gather(*calls, asked, approval, helper(ledger, what), return_exceptions=True)
    return [str(one) for one in found]


ALL = (look, look_in_thread, look_apart, peek, put, refund, book, pay, pay_apart, wire)
READS = ("look", "look_in_thread", "look_apart")
NAMES = [one.name for one in ALL] + ["oracle", "go on", "helper"]


def app_at(url: str, *agents: Agent[Any, Any]) -> Perdure:
    return Perdure(url, agents or (everything, helper), settings=SETTINGS)


async def recorded(app: Perdure, ledger: Path, what: str = "a", run_id: str = "r") -> None:
    """A run of `everything` that has succeeded."""
    await app.start(everything, str(ledger), what, id=run_id)
    for _ in range(20):
        if (await app.drive(run_id)).status == "succeeded":
            return
        for row in await app.approvals(run_id=run_id):
            await app.approve(row.approval, by="ann")
    raise AssertionError(await app.handle(run_id).info())


def effects(ledger: Path) -> list[str]:
    return sorted(ledger.read_text().splitlines()) if ledger.exists() else []


def stored(app: Perdure) -> list[Any]:
    """Everything in the journals: each event with its bytes, and each row."""
    rows = app.store.list(Filter(limit=1000))
    events = [
        (row.run_id, event.seq, event.ts, event.cause, encode_body(event.body)) for row in rows for event in app.store.read(row.run_id)
    ]
    return [rows, events, app.store.progress([row.run_id for row in rows])]


def chatting(ledger: Path, **options: Any) -> ReAct:
    return ReAct("chatting", model=Oracle(str(ledger), **options), tools=[look], instructions="be kind")
