"""A support agent with a model and three tools; a person has to approve larger refunds.

    perdure run examples/support.py:support prompt="My order o-81 arrived broken." --id case-81 --no-wait
    perdure approvals                                             who is asked, with the exact arguments
    perdure approve ID --by bob --edit '{"cents": 2500}'          or: perdure reject ID --by bob --reason "it is fine"
    perdure signal case-81 message '"and I moved house since"'    the model gets this with its next request
    perdure resume case-81                                        or run `perdure worker examples/support.py`
    perdure trace case-81 12                                      why a tool was called: the chain of causes

With ANTHROPIC_API_KEY or OPENAI_API_KEY set, the agent asks a real model (`pip install 'perdure[anthropic]'` or
`[openai]`); without a key, a script stands for the model. You can kill the process at any point: recorded answers are
not requested again. A file that drops duplicates of a key stands for the payment service.
"""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

from perdure import Approval, Budget, Call, ReAct, tool
from perdure.models import Answer, Anthropic, Model, OpenAI, Request, Scripted, Tokens, ToolResult, ToolUse

PAYMENTS = Path(os.environ.get("SUPPORT_PAYMENTS", "refunds.log"))
ORDERS: dict[str, dict[str, Any]] = {
    "o-81": {"cents": 4_900, "customer": "ann", "state": "delivered"},
    "o-82": {"cents": 1_200, "customer": "bob", "state": "lost"},
}


@tool(effect="read")
async def look_up(order: str) -> dict[str, Any]:
    """The order as the shop has it.

    Args:
        order: the number of the order, such as o-81
    """
    return ORDERS[order]


def is_large(cents: int) -> bool | str:
    """The policy: a plain function of the call's arguments."""
    return cents > 2_000 and f"${cents / 100:.2f} is over $20"


@tool(
    effect="keyed",
    timeout=30,
    approval=Approval(when=is_large, by=["bob", "role:finance"], expires=timedelta(days=2), editable="cents"),
)
async def pay_back(order: str, cents: int, call: Call) -> dict[str, Any]:
    """Give money back to the customer. Never more than the order has cost.

    Args:
        order: the number of the order
        cents: the amount
    """
    if cents > ORDERS[order]["cents"]:
        raise ValueError(f"order {order} has cost {ORDERS[order]['cents']} cents, and {cents} are more than that")
    known = PAYMENTS.read_text() if PAYMENTS.exists() else ""
    if call.key not in known:
        with PAYMENTS.open("a") as ledger:
            ledger.write(f"{call.key} {order} {cents}\n")
    return {"receipt": call.key[:8], "cents": cents}


@tool(effect="read")
async def policy(topic: str) -> str:
    """What the shop promises its customers about a topic: delivery, damage, returns."""
    return {"damage": "Broken goods are paid back in full, within 30 days."}.get(topic, "Nothing is promised about that.")


def order_in(request: Request) -> str:
    """The order number in the customer's message; a real model would find it itself."""
    words = " ".join(message.text for message in request.messages[:1] if hasattr(message, "text"))
    return next((order for order in ORDERS if order in words), "o-81")


def look(request: Request) -> Answer:
    """The script's first line: two tools in parallel."""
    order = order_in(request)
    wanted = (ToolUse("use_1", "look_up", {"order": order}), ToolUse("use_2", "policy", {"topic": "damage"}))
    return Answer("Let me look at the order, and at what we promise.", wanted, "tools", tokens=Tokens(input=410, output=42))


def refund(request: Request) -> Answer:
    order = order_in(request)
    wanted = ToolUse(f"use_{len(request.messages)}", "pay_back", {"order": order, "cents": ORDERS[order]["cents"]})
    return Answer("It arrived broken, and broken goods are paid back in full.", (wanted,), "tools", tokens=Tokens(input=520, output=35))


def close(request: Request) -> Answer:
    last = [message for message in request.messages if isinstance(message, ToolResult)][-1]
    if "was not called yet" in last.text:
        # The customer has written again before the refund was made. The same call again: the refund keeps its approval.
        return refund(request)
    text = f"I am sorry: {last.text}" if last.error else f"We have paid you back: {last.text}"
    return Answer(text, tokens=Tokens(input=580, output=24))


def chosen_model() -> Model:
    """A real model if there is a key for it; otherwise the script."""
    if os.environ.get("ANTHROPIC_API_KEY"):
        return Anthropic(os.environ.get("SUPPORT_MODEL", "claude-sonnet-4-5"), max_tokens=2_000)
    if os.environ.get("OPENAI_API_KEY"):
        return OpenAI(os.environ.get("SUPPORT_MODEL", "gpt-5-mini"), max_tokens=2_000)
    return Scripted([look, refund, *[close] * 50])


support = ReAct(
    "support",
    model=chosen_model(),
    tools=[look_up, pay_back, policy],
    instructions="You work for a small shop. Look an order up before you say anything about it. Be brief and kind.",
    budget=Budget(usd="0.50"),
    max_turns=12,
)
