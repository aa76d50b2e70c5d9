"""Refund an order: parallel reads, a wait of a day without a process, a payment that cannot happen twice.

    perdure run examples/refund.py:refund order=o-81 --id refund-day --no-wait    code 3: it waits for a day
    perdure run examples/refund.py:refund order=o-81 pause_s:=2 --id refund-2s

A file that drops duplicates of a key stands for the payment service; real payment services do the same.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

from perdure import Call, Outcome, Retry, RetryLater, Run, ToolFailed, agent, tool

PAYMENTS = Path(os.environ.get("REFUND_PAYMENTS", "payments.log"))
ORDERS: dict[str, dict[str, Any]] = {"o-81": {"cents": 4_900, "customer": "ann"}, "o-82": {"cents": 120, "customer": "bob"}}


@tool(effect="read")
async def look_up(order: str) -> dict[str, Any]:
    """The order as the shop has it."""
    return ORDERS[order]


@tool(effect="read", timeout=10, retry=Retry(attempts=5, base=0.1))
async def fraud_score(customer: str, call: Call) -> float:
    """How suspicious the customer is. The service is busy for the first two attempts."""
    if call.attempt < 3:
        raise RetryLater("the score is being computed", after=0.1)
    return 0.1


@tool(effect="keyed", timeout=30)
async def pay_back(order: str, cents: int, call: Call) -> str:
    """Send the money. The service drops duplicates of `call.key`."""
    known = PAYMENTS.read_text().splitlines() if PAYMENTS.exists() else []
    if not any(line.startswith(call.key) for line in known):
        with PAYMENTS.open("a") as ledger:
            ledger.write(f"{call.key} {order} {cents}\n")
    return f"receipt-{call.key[:8]}"


@pay_back.reconcile
async def _(order: str, cents: int, call: Call) -> Outcome:
    # perdure asks this hook before it sends anything again.
    paid = PAYMENTS.exists() and call.key in PAYMENTS.read_text()
    return Outcome.happened(f"receipt-{call.key[:8]}") if paid else Outcome.not_happened()


@tool  # no declared effect: `once`, the careful default
async def send_mail(to: str, text: str) -> None:
    """Tell the customer. A mail server cannot be asked whether a mail was sent, so there is no reconcile hook."""
    print(f"mail to {to}: {text}", file=sys.stderr)  # stdout belongs to `perdure run`


@agent(version="1")
async def refund(run: Run, order: str, pause_s: float = 86_400.0) -> str:
    """Give the money back, unless fraud is likely."""
    details = await look_up(order)
    async with asyncio.TaskGroup() as group:
        score = group.create_task(fraud_score(details["customer"]))
        again = group.create_task(look_up(order))
    run.note(f"{order}: {again.result()['cents']} cents, score {score.result()}")
    if run.decide(score.result() < 0.5, among=[True, False], reason=f"fraud score {score.result()}") is False:
        return "refused"

    run.status("waiting for the cooling-off period")
    await asyncio.sleep(pause_s)  # a durable timer: the process may end during the wait
    try:
        receipt = await pay_back(order, details["cents"])
    except ToolFailed as failure:  # the same on every replay
        return f"not refunded: {failure.type}"
    await send_mail(details["customer"], f"refunded, {receipt}")
    return receipt
