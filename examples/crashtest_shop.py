"""Two shops that sell the same thing. One survives every kill; in the other, four tools do not keep their declaration.

    perdure crashtest examples/crashtest_shop.py:shop order=o-1
    perdure crashtest examples/crashtest_shop.py:careless order=o-1 --report careless.html     code 7: names the tools

Files in the working folder stand for the services; every trial has its own working folder.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from perdure import Call, Outcome, Run, agent, tool

PAYMENTS, PARCELS, POLICIES = Path("payments.log"), Path("parcels.log"), Path("policies.log")
MAILS, STOCK = Path("mails.log"), Path("stock.txt")


def lines(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.exists() else []


def add(file: Path, line: str) -> None:
    with file.open("a") as log:
        log.write(f"{line}\n")


# -- tools that keep their declaration --------------------------------------------------------------------------------
@tool(effect="read")
async def price_of(order: str) -> int:
    """What the order costs."""
    return 4_900


@tool(effect="keyed", timeout=30)
async def charge(order: str, cents: int, call: Call) -> str:
    """Take the money. The service drops a request with a known key, and answers as for the first request."""
    if not any(line.startswith(call.key) for line in lines(PAYMENTS)):
        add(PAYMENTS, f"{call.key} {order} {cents}")
    return f"receipt-{call.key[:8]}"


@tool(effect="idempotent")
def reserve(order: str, pieces: int) -> int:
    """Set the stock that is reserved for the order: a repeated call gives the same state."""
    STOCK.write_text(f"{order} {pieces}\n")
    return pieces


@tool(timeout=3)  # `once`: the parcel service has no keys, but its hook can look the parcel up
async def send(order: str) -> str:
    """Send the parcel."""
    await asyncio.sleep(0.02)  # long enough to be killed in the middle
    add(PARCELS, order)
    return f"parcel for {order}"


@send.reconcile
async def _(order: str) -> Outcome:
    return Outcome.happened(f"parcel for {order}") if order in lines(PARCELS) else Outcome.not_happened()


@tool  # `once` without a hook, because a mail server cannot be asked: after a kill inside it a person must decide
def mail(order: str, text: str) -> None:
    """Tell the customer."""
    add(MAILS, f"{order}: {text}")


@agent(version="1")
async def shop(run: Run, order: str) -> str:
    """Sell the order with the correct tools."""
    cents, pieces = await asyncio.gather(price_of(order), reserve(order, 1))
    receipt = await charge(order, cents)
    await asyncio.sleep(3600)  # a durable timer; the crash test skips the wait
    parcel = await send(order)
    await mail(order, f"{pieces} piece: {receipt}, {parcel}")
    return receipt


# -- tools that do not keep their declaration -------------------------------------------------------------------------
@tool(effect="idempotent")
def count_sale(order: str) -> int:
    """Wrong: every call adds a line, so a repeated call counts the sale twice."""
    add(Path("sales.log"), order)
    return len(lines(Path("sales.log")))


@tool(effect="keyed")
def charge_carelessly(order: str, cents: int, call: Call) -> str:
    """Wrong: it gets a key, and does not send it to the service."""
    add(PAYMENTS, f"{order} {cents}")
    return f"receipt-{len(lines(PAYMENTS))}"


@tool(timeout=3)
def send_carelessly(order: str) -> str:
    """Sends the parcel."""
    add(PARCELS, order)
    return f"parcel for {order}"


@send_carelessly.reconcile
async def _(order: str) -> Outcome:
    return Outcome.not_happened()  # wrong: the hook does not look for the parcel


@tool(timeout=20)
def insure_hastily(order: str) -> str:
    """Insures the parcel."""
    add(POLICIES, order)
    return f"policy for {order}"


@insure_hastily.reconcile
async def _(order: str) -> Outcome:
    if order in lines(POLICIES):
        return Outcome.happened(f"policy for {order}")
    return Outcome.not_happened(final=True)  # wrong: the request may still arrive, and nothing prevents that


@agent(version="1")
async def careless(run: Run, order: str) -> str:
    """Sell the order with the wrong tools."""
    cents = await price_of(order)
    receipt = await charge_carelessly(order, cents)
    await count_sale(order)
    await send_carelessly(order)
    await insure_hastily(order)
    return receipt
