"""A run whose journal has ended, but whose row was edited: no code appends to it, and no worker tries it in a loop."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.conformance.suite import Held, claim_one, found, hold_one, new_run, park, payload, register, serving
from tests.conformance.suite_waiting import NOW, asking, end, family, hand_of, hold, post, vote
from tests.unit.drive_tools import SETTINGS, run, until
from tests.unit.inspect_tools import Forge, forging, url_of
from tests.unit.postgres_tools import empty

from perdure import Perdure, Run, agent
from perdure.core.events import (
    AnyBody,
    CancelRequested,
    Failure,
    RunAdopted,
    RunCancelled,
    RunFailed,
    RunReopened,
    RunSucceeded,
    SignalReceived,
    Status,
)
from perdure.errors import StoreCorrupt
from perdure.inspect.repair import plan_repair
from perdure.inspect.verify import verify_run
from perdure.settings import Queue
from perdure.store.api import Committed, Reopen, RowChange, Store
from perdure.store.open import open_store

UNFINISHED = ("queued", "running", "waiting", "waiting_approval", "needs_attention", "cancelling", "paused")
ENDS: dict[Status, AnyBody] = {
    "succeeded": RunSucceeded(payload("done")),
    "failed": RunFailed(Failure("fatal", "E", "boom")),
    "cancelled": RunCancelled("ann"),
}
SIGNAL = SignalReceived("go", payload(1), by="ann")
LIMITS = {None: {}, "a limit": {"default": Queue(concurrency=9)}}


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return url_of(tmp_path / "journal.db") if request.param == "sqlite" else empty(request.getfixturevalue("postgres"))


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    opened = open_store(url)
    register(opened, "w")
    yield opened
    opened.close()


@pytest.fixture
def forge(store: Store, url: str) -> Iterator[Forge]:
    with forging(url) as hand:
        yield hand


def finish(store: Store, run_id: str, status: Status = "succeeded") -> None:
    assert store.append([hold_one(store, run_id).append(ENDS[status], row=RowChange(status))]) == [Committed()]


def edit(forge: Forge, run_id: str, status: str, ready_at: str = "1") -> None:
    forge(f"UPDATE perdure_runs SET status = '{status}', ready_at = {ready_at} WHERE run_id = '{run_id}'")


def written(store: Store, run_id: str) -> tuple[list[str], list[str]]:
    return [event.type for event in store.read(run_id)], [str(letter.body) for letter in store.unread(run_id)]


# -- claims -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("ended", ENDS)
def test_a_claim_from_the_queue_sets_the_run_aside_and_takes_the_others(
    store: Store, forge: Forge, ended: Status, limits: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    finish(store, "r", ended)
    before = written(store, "r")
    edit(forge, "r", "queued")
    store.create_run(new_run("other"))
    claims = [store.claim("w", serving("a"), 9, NOW * 2, limits=LIMITS[limits]) for _ in range(3)]
    assert [[one.row.run_id for one in claimed] for claimed in claims] == [["other"], [], []]
    assert written(store, "r") == before
    row = found(store, "r")
    assert (row.status, row.attention, row.ready_at, row.holder) == ("needs_attention", "error", None, None)
    assert row.error is not None
    assert row.error.endswith("write the row again: perdure verify r --repair")
    assert store.next_ready(serving("a")) is None, "no worker looks at it again"
    assert [record.getMessage() for record in caplog.records if "run r: not claimed" in record.getMessage()] == [
        f"run r: not claimed, because {row.error}"
    ]
    planned = plan_repair(store, row)
    assert planned is not None
    store.repair(planned)
    assert found(store, "r").status == ended
    assert verify_run(store, found(store, "r")).problem is None


def test_a_claim_of_the_runs_below_a_run_sets_an_edited_child_aside(store: Store, forge: Forge) -> None:
    family(store, parent="waiting")
    hold(store, "p/1").write(ENDS["succeeded"], row=RowChange("succeeded"))
    before = written(store, "p/1")
    edit(forge, "p/1", "waiting")
    assert store.claim("w", serving("a"), 9, NOW * 2, below="p") == []
    assert written(store, "p/1") == before
    assert found(store, "p/1").status == "needs_attention"


def test_a_finished_run_that_is_ready_by_an_edit_is_not_claimed(store: Store, forge: Forge, caplog: pytest.LogCaptureFixture) -> None:
    """The triggers refuse to change such a row, so the run is only left out."""
    finish(store, "r")
    before = written(store, "r")
    edit(forge, "r", "succeeded")
    store.create_run(new_run("other"))
    claims = [store.claim("w", serving("a"), 9, NOW * 2) for _ in range(3)]
    assert [[one.row.run_id for one in claimed] for claimed in claims] == [["other"], [], []]
    assert written(store, "r") == before
    assert caplog.text.count("run r: not claimed") == 1


@pytest.mark.parametrize("status", UNFINISHED[:-1])
def test_a_claim_by_name_is_refused(store: Store, forge: Forge, status: str) -> None:
    finish(store, "r")
    before = written(store, "r")
    edit(forge, "r", status)
    with pytest.raises(StoreCorrupt, match=r"has ended \(event 3, run_succeeded\), and its row says .*: the row was edited") as refused:
        claim_one(store, "r")
    assert "perdure verify r --repair" in refused.value.in_full()
    assert written(store, "r") == before


def test_a_run_with_a_forged_holder_is_not_taken_over(store: Store, forge: Forge) -> None:
    finish(store, "r")
    before = written(store, "r")
    forge("UPDATE perdure_runs SET status = 'running', holder = 'nobody' WHERE run_id = 'r'")
    assert store.reap("w", 1, NOW) == 1
    assert store.claim("w", serving("a"), 9, NOW * 2) == []
    assert written(store, "r") == before
    assert found(store, "r").status == "needs_attention"


# -- post, decisions and ends -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("status", UNFINISHED)
@pytest.mark.parametrize("body", [CancelRequested("ann", "enough"), SIGNAL, RunAdopted("2", "ann")], ids=lambda body: type(body).__name__)
def test_post_is_refused(store: Store, forge: Forge, status: str, body: AnyBody) -> None:
    finish(store, "r")
    before = written(store, "r")
    edit(forge, "r", status, "NULL")
    with pytest.raises(StoreCorrupt, match="the row was edited") as refused:
        store.post("r", None, body, event_id=uuid.uuid4().hex, now=NOW)  # without `expect`: on PostgreSQL a signal is one statement
    assert "perdure verify r --repair" in refused.value.in_full()
    assert written(store, "r") == before
    assert found(store, "r").version == "1"


def test_post_to_a_run_with_a_forged_holder_is_refused(store: Store, forge: Forge) -> None:
    finish(store, "r")
    before = written(store, "r")
    forge("UPDATE perdure_runs SET status = 'running', holder = 'w' WHERE run_id = 'r'")
    with pytest.raises(StoreCorrupt, match="the row was edited"):
        post(store, "r", SIGNAL)
    assert written(store, "r") == before


def test_a_decision_is_refused(store: Store, forge: Forge) -> None:
    hand = hold(store, "r")
    hand.write(asking("ap"), call=1)
    hand.write(ENDS["cancelled"], row=RowChange("cancelled"))
    before = written(store, "r")
    edit(forge, "r", "waiting_approval", "NULL")
    forge("UPDATE perdure_approvals SET status = 'pending', settled_at = NULL")
    with pytest.raises(StoreCorrupt, match="the row was edited"):
        vote(store, "ap", "ann")
    assert written(store, "r") == before
    assert [row.standing.status for row in [store.approval("ap")] if row is not None] == ["pending"]


@pytest.mark.parametrize("status", UNFINISHED)
def test_an_end_by_force_is_refused(store: Store, forge: Forge, status: str) -> None:
    finish(store, "r")
    before = written(store, "r")
    edit(forge, "r", status, "NULL")
    with pytest.raises(StoreCorrupt, match="the row was edited"):
        end(store, "r", ENDS["cancelled"])
    assert written(store, "r") == before


@pytest.mark.parametrize("status", ["failed", "cancelled", "needs_attention", "queued"])
def test_a_run_that_has_succeeded_is_not_reopened_whatever_its_row_says(store: Store, forge: Forge, status: str) -> None:
    finish(store, "r")
    before = written(store, "r")
    edit(forge, "r", status, "NULL")
    with pytest.raises(StoreCorrupt, match=r"has ended \(event 3, run_succeeded\), and its row says .*: the row was edited"):
        store.reopen([Reopen("r", 3, [(RunReopened("ann", 1), None, uuid.uuid4().hex)])], now=NOW)
    assert written(store, "r") == before


def test_a_run_that_has_failed_is_reopened(store: Store) -> None:
    """The control: its row says so too."""
    finish(store, "r", "failed")
    store.reopen([Reopen("r", 3, [(RunReopened("ann", 2), None, uuid.uuid4().hex)])], now=NOW)
    assert len(store.claim("w", serving("a"), 9, NOW * 2)) == 1


def test_the_end_of_a_child_is_not_posted_to_a_parent_that_has_ended(store: Store, forge: Forge) -> None:
    family(store, parent="running")
    hand_of(store, "p").write(ENDS["failed"], row=RowChange("failed"))
    before = written(store, "p")
    edit(forge, "p", "waiting", "NULL")
    register(store, "w")
    hold(store, "p/1").write(ENDS["succeeded"], row=RowChange("succeeded"))
    assert written(store, "p") == before
    assert found(store, "p/1").status == "succeeded"


def test_the_forced_end_of_a_parent_does_not_cancel_a_child_that_has_ended(store: Store, forge: Forge) -> None:
    family(store, parent="waiting")
    hold(store, "p/1").write(ENDS["succeeded"], row=RowChange("succeeded"))
    before = written(store, "p/1")
    edit(forge, "p/1", "waiting", "NULL")
    end(store, "p", ENDS["cancelled"])
    assert written(store, "p/1") == before
    assert found(store, "p").status == "cancelled"


def test_a_run_that_waits_is_claimed_and_gets_its_post(store: Store) -> None:
    """The control: the same paths write to a run that has not ended."""
    park(store, hold_one(store, "r"))
    assert post(store, "r", SIGNAL)
    (claimed,) = store.claim("w", serving("a"), 9, NOW * 2)
    assert store.append([Held.of(claimed).append(ENDS["succeeded"], row=RowChange("succeeded"))]) == [Committed()]


# -- a worker -----------------------------------------------------------------------------------------------------------
@agent(version="1")
async def brief(run: Run) -> str:
    return "done"


def test_a_worker_leaves_it_alone_says_so_once_and_goes_on(store: Store, forge: Forge, url: str, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with Perdure(url, [brief], settings=SETTINGS) as app:
            assert await app.run(brief, id="r") == "done"
            before = written(app.store, "r")
            edit(forge, "r", "queued")
            caplog.set_level(logging.ERROR)
            working = asyncio.create_task(app.work())
            await until(lambda: found(app.store, "r").status == "needs_attention")
            assert await app.run(brief, id="next") == "done"
            app.drain()
            await working
            assert written(app.store, "r") == before

    run(main())
    assert [record.name for record in caplog.records] == ["perdure.store"], caplog.text
