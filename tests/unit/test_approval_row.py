"""An approval's row as a program reads it, and what an agent learns about a call that was not made."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from perdure import Approval, NotApproved, Perdure, Run, Settings, agent, tool
from perdure.core import codec


@tool(effect="once", approval=Approval(by=("ann", "role:finance"), quorum=2, expires=3600, reason="large"))
async def refund(order: str, cents: int) -> None: ...


@tool(effect="once", approval=Approval(editable="text"))
async def send(text: str) -> None: ...


@agent(version="1")
async def shop(run: Run, order: str, cents: int) -> None:
    await refund(order, cents)


@agent(version="1")
async def writer(run: Run, text: str) -> None:
    await send(text)


def test_a_row_says_by_name_what_is_asked_of_whom_and_until_when() -> None:
    asyncio.run(_named())


async def _named() -> None:
    async with Perdure("sqlite://", agents=[shop, writer]) as app:
        await app.start(shop, "o-1", 900, id="s")
        await app.engine.drive("s", wait=False)
        (row,) = await app.approvals()
        assert (row.status, row.action, row.input, row.reason) == ("pending", "refund", {"cents": 900, "order": "o-1"}, "large")
        assert (row.by, row.quorum, row.voters, row.editable) == (("ann", "role:finance"), 2, (), ())
        assert row.expires_at is not None
        assert timedelta(minutes=59) < row.expires_at - datetime.now(UTC) <= timedelta(hours=1)
        assert (await app.approve(row.approval, by="ann")).voters == ("ann",)
        await app.start(writer, "x", id="w")
        await app.engine.drive("w", wait=False)
        (other,) = await app.approvals(run_id="w")
        assert (other.expires_at, other.by, other.editable) == (None, (), ("text",))
        assert (await app.approve(other.approval, by="bob")).status == "approved"


def test_an_input_that_is_too_long_for_the_journal_is_loaded() -> None:
    asyncio.run(_long())


async def _long() -> None:
    async with Perdure("sqlite://", agents=[writer], settings=Settings(inline_bytes=100)) as app:
        await app.start(writer, "x" * 200, id="w")
        await app.engine.drive("w", wait=False)
        (row,) = await app.approvals()
        assert row.input is None
        assert codec.decode(app.load(row.standing.request.input)) == {"text": "x" * 200}


@pytest.mark.parametrize(
    ("outcome", "message", "said"),
    [
        ("expired", "nobody decided in time", "refund (call 3) was not approved: expired, nobody decided in time"),
        ("rejected", "rejected by bob: no", "refund (call 3) was not approved: rejected by bob: no"),
        ("withdrawn", "the approval was withdrawn", "refund (call 3) was not approved: the approval was withdrawn"),
    ],
)
def test_what_was_not_approved_reads_as_that_and_not_as_a_failure(outcome: Any, message: str, said: str) -> None:
    assert str(NotApproved("refund", 3, outcome=outcome, by=None, note=None, message=message)) == said
