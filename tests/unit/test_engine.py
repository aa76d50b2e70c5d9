"""The Engine protocol: what an engine gets and what it answers. The tests run against every engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.unit.drive_tools import SETTINGS, ManualClock, run

from perdure import Agent, Approval, Conflict, NotFound, Run, RunEnded, agent, tool
from perdure.core import codec
from perdure.core.approval import Vote
from perdure.core.events import CancelRequested, RunCancelled, RunCreated, RunPaused, RunUnpaused, SignalReceived
from perdure.engine.api import Engine
from perdure.engine.open import new_engine, open_reading
from perdure.settings import Settings
from perdure.store.api import ApprovalFilter, NewRun, Served


@tool(effect="once", approval=Approval(by=["ann"]))
async def pay(cents: int) -> int:
    return cents


@agent(version="1")
async def adds(run: Run) -> int:
    return int(await run.receive("n")) + int(await run.receive("n"))


@agent(version="1")
async def pays(run: Run) -> int:
    return await pay(5)


@asynccontextmanager
async def engine(url: str = "sqlite://", *agents: Agent[Any, Any]) -> AsyncIterator[Engine]:
    served = {Served(one.name, one.version): one for one in agents or (adds, pays)}
    async with new_engine(url, served, SETTINGS, ManualClock(), [], None) as opened:
        yield opened


def new(code: Agent[Any, Any], run_id: str = "r", tenant: str = "acme") -> NewRun:
    payload = codec.pack(code.bind((), {}))[0]
    created = RunCreated(run_id, code.name, code.version, tenant, payload)
    return NewRun(run_id, created, f"{run_id.encode().hex():0>32}", 1, codec.digest(code.bind((), {})))


def number(n: int, key: str | None = None) -> SignalReceived:
    return SignalReceived("n", codec.pack(codec.encode(n))[0], "ann", key)


def test_a_run_is_started_told_and_waited_for() -> None:
    async def main() -> None:
        async with engine() as opened:
            row, is_new = await opened.start(new(adds))
            assert (row.status, is_new) == ("queued", True)
            assert (await opened.start(new(adds)))[1] is False
            waiting = asyncio.create_task(opened.result("r"))
            await opened.post("r", number(1, key="k"))
            await opened.post("r", number(1, key="k"))  # the same again
            await opened.post("r", number(2))
            found = await waiting
            assert (found.row.status, found.output) == ("succeeded", b"3")
            events = [event async for event in opened.follow("r")]
            assert events == opened.reading.read("r")
            assert (await opened.result("r")) == found
            with pytest.raises(RunEnded):
                await opened.post("r", number(3))

    run(main())


def test_a_vote_is_data_and_counts_once() -> None:
    async def main() -> None:
        async with engine() as opened:
            await opened.start(new(pays))
            assert (await opened.drive("r", wait=False)).status == "waiting_approval"
            (asked,) = opened.reading.approvals(ApprovalFilter())
            with pytest.raises(NotFound):
                await opened.vote(asked.approval, Vote("ann", True), tenant="another")
            assert (await opened.vote(asked.approval, Vote("ann", True))).status == "approved"
            with pytest.raises(Conflict, match="one decision counts"):
                await opened.vote(asked.approval, Vote("ann", False))
            assert (await opened.result("r")).output == b"5"

    run(main())


def test_what_was_asked_for_before_changes_nothing() -> None:
    async def main() -> None:
        async with engine() as opened:
            await opened.start(new(adds))
            await opened.post("r", RunPaused("ann"))
            paused = opened.reading.read("r")
            await opened.post("r", RunPaused("bob"))
            assert opened.reading.read("r") == paused
            await opened.post("r", RunUnpaused("ann"))
            with pytest.raises(Conflict, match="only a paused run"):
                await opened.post("r", RunUnpaused("ann"))
            await opened.post("r", CancelRequested("ann"))
            with pytest.raises(Conflict, match="cannot be paused"):
                await opened.post("r", RunPaused("ann"))

    run(main())


SAYING: dict[str, Callable[[Engine, int], Coroutine[Any, Any, None]]] = {
    "post": lambda opened, seen: opened.post("r", number(1), seen=seen),
    "end": lambda opened, seen: opened.end("r", RunCancelled(forced_by="ann"), seen=seen),
}


@pytest.mark.parametrize("how", SAYING)
def test_what_rests_on_an_older_state_of_the_run_is_refused(how: str) -> None:
    async def main() -> None:
        async with engine() as opened:
            await opened.start(new(adds))
            await opened.post("r", number(1))
            with pytest.raises(Conflict, match=r"run r has moved on meanwhile \(event 2, not 1\)"):
                await SAYING[how](opened, 1)
            await SAYING[how](opened, 2)
            assert len(opened.reading.read("r")) == 3

    run(main())


@pytest.mark.parametrize("ended", [False, True])
def test_another_tenants_run_is_not_there(ended: bool) -> None:
    async def main() -> None:
        async with engine() as opened:
            await opened.start(new(adds))
            if ended:
                await opened.end("r", RunCancelled(forced_by="ann"))
            with pytest.raises(NotFound, match="there is no run r\n"):
                await opened.post("r", number(1), tenant="another")

    run(main())


def test_a_run_is_driven_with_code_that_the_engine_does_not_have() -> None:
    async def main() -> None:
        async with engine("sqlite://", adds) as opened:
            await opened.start(new(pays))
            assert (await opened.drive("r", wait=False, agents=[pays])).status == "waiting_approval"

    run(main())


def test_what_an_engine_has_written_is_read_without_one(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'journal.db'}"

    async def main() -> None:
        async with engine(url) as opened:
            await opened.start(new(adds))

    run(main())
    reading = open_reading(Settings(url=url))
    try:
        row = reading.get("r")
        assert row is not None
        assert [event.type for event in reading.read("r")] == ["run_created"]
    finally:
        reading.close()
