"""Agents that ask people: one risky tool for each effect class, and approvals that race with other events."""

from __future__ import annotations

import asyncio
import os
from typing import Any

from tests.crash import errands
from tests.crash.chores import work
from tests.crash.errands import ORDER, ask_the_service, do, look
from tests.crash.ledger import Ledger

from perdure import Approval, Call, NotApproved, Run, Tool, ToolFailed, agent, tool

BRIEF_S = 600.0  # for a busy machine; processes that come late have another clock
CALL = 2  # of the risky tool in every petition


@tool(effect="read", approval=True)
async def asked_read(what: str, call: Call) -> str:
    return await do(what, call)


@tool(effect="idempotent", approval=True)
def asked_idempotent(what: str, call: Call) -> str:
    return asyncio.run(do(what, call))


@tool(effect="keyed", approval=True)
async def asked_keyed(what: str, call: Call) -> str:
    return await do(what, call, by_key=True)


@tool(approval=True)
def asked_once(what: str, call: Call) -> str:
    return asyncio.run(do(what, call))


@tool(approval=True)
async def asked_once_reconcile(what: str, call: Call) -> str:
    return await do(what, call)


asked_once_reconcile.reconcile(ask_the_service)
asked_transaction = tool(effect="transaction", approval=True, name="asked_transaction")(errands.transaction.fn)


@tool(effect="keyed", approval=Approval(expires=BRIEF_S))
async def asked_brief(what: str, call: Call) -> str:
    return await do(what, call, by_key=True)


TOOLS: dict[str, Tool[..., Any]] = {
    found.name.removeprefix("asked_"): found
    for found in (asked_read, asked_idempotent, asked_keyed, asked_once, asked_once_reconcile, asked_transaction, asked_brief)
}


@agent(version="1")
async def petition(run: Run, kind: str) -> dict[str, str]:
    """A read, the call that needs an approval, a read."""
    before = await look("before")
    try:
        receipt = await TOOLS[kind](ORDER)
    except NotApproved as refused:
        receipt = f"not approved: {refused.outcome}"
    except ToolFailed as failed:
        receipt = f"failed: {failed.message}"
    return {"before": before, "receipt": receipt, "after": await look("after")}


@agent(version="1")
async def vigil(run: Run, rounds: int, seconds: float) -> list[str]:
    """Asks while a call is under way, again and again: the answer and the end of the call meet."""
    answers = []
    for place in range(rounds):
        decision, _ = await asyncio.gather(run.request_approval("go", {"round": place}), work(f"beside {place}", seconds))
        answers.append(decision.outcome)
    return answers


@tool(effect="idempotent")
async def stay(call: Call) -> str:
    """Goes on until the test says that it is enough: as long as it does, the run is held."""
    ledger = Ledger.here()
    ledger.note("begun", "stay", call)
    while not os.path.exists(f"{ledger.path}.go"):  # it is another process that makes it
        await asyncio.sleep(0.005)
    return "stayed"


@agent(version="1")
async def forum(run: Run, questions: int, held: bool) -> list[str]:
    """Asks everything at once; with a call under way, so that its worker keeps it, or without."""
    beside = [stay()] if held else []
    decisions = [run.request_approval(f"question {place}", place) for place in range(questions)]
    answers = await asyncio.gather(*decisions, *beside)
    return [decision.outcome for decision in answers[:questions]]


@agent(version="1")
async def council(run: Run, questions: int, first_s: float, step_s: float) -> list[str]:
    """Approvals that expire one after the other."""
    decisions = [run.request_approval(f"question {place}", place, expires=first_s + step_s * place) for place in range(questions)]
    return [decision.outcome for decision in await asyncio.gather(*decisions)]
