"""The agent behind the web service: a model that looks an order up and pays it back, after a person has agreed.

    perdure worker examples/service/agents.py
    perdure check examples/service/agents.py

The workers drive this agent. The web process imports this file too, but only for the agent's name, its version and the
types of its arguments. A script stands for the model and a file for the payment service, so that no key is needed.
"""

from __future__ import annotations

import asyncio
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

from perdure import Approval, Call, ReAct, tool
from perdure.models import Answer, Request, Scripted, ToolResult, ToolUse, User

PAYMENTS = Path(os.environ.get("SERVICE_PAYMENTS", "payments.log"))
PAYMENT_S = float(os.environ.get("SERVICE_PAYMENT_S", "0"))  # how long the payment service takes to answer
ORDERS: dict[str, dict[str, Any]] = {"o-81": {"cents": 4_900, "state": "delivered"}, "o-82": {"cents": 1_200, "state": "lost"}}


@tool(effect="read")
async def look_up(order: str) -> dict[str, Any]:
    """The order as the shop has it."""
    return ORDERS[order]


@tool(
    effect="keyed",
    timeout=30,
    approval=Approval(by="role:finance", four_eyes=True, editable="cents", expires=timedelta(days=2)),
)
async def pay_back(order: str, cents: int, call: Call) -> dict[str, Any]:
    """Give money back to the customer."""
    known = PAYMENTS.read_text() if PAYMENTS.exists() else ""
    if call.key not in known:  # a real payment service does the same with its idempotency key
        with PAYMENTS.open("a") as ledger:
            ledger.write(f"{call.key} {order} {cents}\n")
    await asyncio.sleep(PAYMENT_S)  # paid, and not answered yet: kill -9 is worst here
    return {"cents": cents}


def order_in(request: Request) -> str:
    """The order's number in the first message. A real model finds it itself."""
    first = next(message.text for message in request.messages if isinstance(message, User))
    return next((order for order in ORDERS if order in first), "o-81")


def look(request: Request) -> Answer:
    """The script's first line."""
    return Answer("Let me look at the order.", (ToolUse("use_1", "look_up", {"order": order_in(request)}),), "tools")


def refund(request: Request) -> Answer:
    order = order_in(request)
    wanted = ToolUse(f"use_{len(request.messages)}", "pay_back", {"order": order, "cents": ORDERS[order]["cents"]})
    return Answer("I propose to pay it back.", (wanted,), "tools")


def close(request: Request) -> Answer:
    """The last line: what became of the refund, and each message that arrived after the first one."""
    last = [message for message in request.messages if isinstance(message, ToolResult)][-1]
    if "was not called yet" in last.text:
        # A message has arrived before the refund was made. The same call again: the refund keeps its approval.
        return refund(request)
    later = [message.text for message in request.messages if isinstance(message, User)][1:]
    return Answer(" ".join([f"The refund: {last.text}.", *(f"You also wrote: {text}" for text in later)]))


support = ReAct(
    "support",
    # Write the version yourself. A worker serves only runs of its own version, and without `version=` the version is
    # computed from the model among other things: a web process without the model's key could compute another one.
    version="1",
    model=Scripted([look, refund, *[close] * 50]),  # or Anthropic(…), OpenAI(…)
    tools=[look_up, pay_back],
    instructions="You work for a small shop. Look an order up before you say anything about it.",
)
