"""Refund an order. Above $20 a person has to approve, and no process runs during that wait.

    perdure run examples/approval.py:support order=o-81 --id approval-o-81 --no-wait    code 3: it waits
    perdure approvals                                         who is asked for what
    perdure approve ID --by bob --edit '{"cents": 2500}'      from any shell, a minute or two days later
    perdure resume approval-o-81                              or run `perdure worker examples/approval.py`

`perdure reject ID --by bob --reason "…"` is the other decision, and order=o-82 is small enough to need no approval. A
file that drops duplicates of a key stands for the payment service.
"""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

from perdure import Approval, Call, NotApproved, Run, agent, tool

PAYMENTS = Path(os.environ.get("APPROVAL_PAYMENTS", "refunds.log"))
ORDERS: dict[str, dict[str, Any]] = {"o-81": {"cents": 4_900, "customer": "ann"}, "o-82": {"cents": 120, "customer": "bob"}}


@tool(effect="read")
async def look_up(order: str) -> dict[str, Any]:
    """The order as the shop has it."""
    return ORDERS[order]


def is_large(cents: int) -> bool | str:
    """The policy: a plain function of the call's arguments. Returns False, True, or a reason, which counts as True."""
    return cents > 2_000 and f"${cents / 100:.2f} is over $20"


@tool(
    effect="keyed",
    timeout=30,
    approval=Approval(when=is_large, by=["bob", "role:finance"], expires=timedelta(days=2), editable="cents"),
)
async def pay_back(order: str, cents: int, call: Call) -> str:
    """Send the money. The tool is called once, with exactly the approved arguments."""
    known = PAYMENTS.read_text() if PAYMENTS.exists() else ""
    if call.key not in known:
        with PAYMENTS.open("a") as ledger:
            ledger.write(f"{call.key} {order} {cents}\n")
    return f"${cents / 100:.2f}"


@agent(version="1")
async def support(run: Run, order: str) -> str:
    """Give the money back, if it is approved."""
    details = await look_up(order)
    run.status(f"refunding {order}")
    try:
        paid = await pay_back(order, details["cents"])
    except NotApproved as refused:  # rejected, expired and withdrawn are three different outcomes
        return f"not refunded, {refused.outcome}: {refused.note or 'no answer in time'}"
    return f"{details['customer']} got {paid} back"
