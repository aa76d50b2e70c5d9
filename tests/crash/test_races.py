"""Two events at the same time.

Cancel and end, cancel and park, signal and journal read, transaction and next intent.
"""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import apsw
import pytest
from tests.crash import ledger, victims
from tests.crash.checks import check_journal
from tests.crash.chores import chores, hasty, sleeper
from tests.crash.world import KILLED, World

from perdure import Perdure, RunCancelled
from perdure.core.events import CancelRequested
from perdure.core.outcomes import Performed
from perdure.core.steps import AttemptEnded
from perdure.engine.local.drive import Drive
from perdure.settings import Settings
from perdure.store.open import is_postgres
from perdure.store.postgres.store import PostgresStore
from perdure.store.sql import SqlStore
from perdure.store.sqlite.database import SqliteDatabase
from perdure.store.sqlite.store import SqliteStore
from perdure.tool import Call

LONG = [["step", str(n), 0] for n in range(260)]  # a journal that is read on a thread


@pytest.mark.parametrize("kind", ["deed", "work", "step"])
def test_what_a_transaction_leads_to_waits_for_a_commit_of_its_own(world: World, kind: str) -> None:
    world.begin(r=[["book", "b", 0], [kind, "d", 0]])
    assert world.run(victims.drive, run_id="r", report=world.report(), die=["intent", "before", 1, kind]) == KILLED
    assert not world.ledger.lines("begun"), "an effect began before its intent was durable"
    assert world.finish("r")["r"]["output"] == ["b done", "d done"]
    assert len(world.ledger.effects("d")) == len(world.paid()) == 1
    check_journal(world, "r")


def test_a_signal_that_arrives_while_a_long_journal_is_being_read_hands_the_run_over(world: World) -> None:
    world.begin(r=[*LONG, ["deed", "last", 0.2]])
    victim = world.start(victims.serve)
    world.ledger.wait_for(lambda lines: lines[-1:] != [] and lines[-1]["what"] == "last")
    os.kill(victim, signal.SIGTERM)
    assert world.wait(victim) == 0
    reader = world.start(victims.serve, slow_read_s=0.3)
    world.ledger.wait_for(lambda lines: lines[-1]["fact"] == "reading")
    os.kill(reader, signal.SIGTERM)
    assert world.wait(reader) == 0
    row, _ = world.look("r")
    assert row is not None
    assert row.status in ("queued", "succeeded"), row
    assert len(world.finish("r")["r"]["output"]) == 261
    assert len(world.ledger.effects("last")) == 1
    check_journal(world, "r")


def test_a_cancel_that_arrives_while_a_long_journal_is_being_read_is_heard(world: World) -> None:
    world.begin(r=[*LONG, ["work", "last", 30]])
    victim = world.start(victims.serve)
    world.ledger.wait_for(lambda lines: lines[-1:] != [] and lines[-1]["what"] == "last")
    os.kill(victim, signal.SIGKILL)
    assert world.wait(victim) == KILLED
    reader = world.start(victims.serve, until=["r"], slow_read_s=0.3)
    world.ledger.wait_for(lambda lines: lines[-1]["fact"] == "reading")
    assert world.run(victims.cancel, run_id="r") == 0
    assert world.wait(reader) == 0, world.log()
    row, _ = world.look("r")
    assert row is not None
    assert row.status in ("cancelled", "needs_attention"), row
    check_journal(world, "r")


@pytest.fixture
def here(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test's own process is the victim."""
    monkeypatch.setenv(ledger.VARIABLE, str(world.ledger.path))


@pytest.mark.usefixtures("here")
def test_a_cancel_that_meets_the_last_result_comes_too_late_and_harms_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> Any:
        async with Perdure(world.journal.url, agents=[chores]) as app:

            def both(drive: Drive, told: Call, performed: Performed) -> None:
                # Both inputs are there when the core handles them: first the end of the last call, then the cancel of
                # a person.
                drive._core._arrived.append(AttemptEnded(told.number, told.attempt, performed, told.usage))
                app.store.post(
                    "r",
                    None,
                    CancelRequested(by="ann"),
                    event_id=app.clock.new_id(),
                    now=app.clock.now(),
                    status="cancelling",
                    expect=lambda _: None,
                )
                for row in app.store.inbox(drive.lease.worker):
                    drive.receive(row)

            monkeypatch.setattr(Drive, "_ended", both)
            return await app.run(chores, [["deed", "paid", 0]], id="r")

    assert asyncio.run(main()) == ["paid done"]
    assert len(world.ledger.effects("paid")) == 1
    check_journal(world, "r")


@pytest.mark.usefixtures("here")
def test_a_call_that_waits_for_another_attempt_does_not_keep_its_run_from_ending(world: World) -> None:
    async def main() -> Any:
        async with Perdure(world.journal.url, agents=[hasty]) as app:
            return await app.run(hasty, id="r")

    assert asyncio.run(main()) == "done: False"
    assert "thought_recorded" in [event.type for event in check_journal(world, "r")]


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("dialect", ["sqlite"], indirect=True)
@pytest.mark.parametrize(("kind", "status"), [("work", "succeeded"), ("deed", "needs_attention")])
def test_a_commit_that_took_effect_and_was_taken_for_lost_strands_no_run(
    world: World, monkeypatch: pytest.MonkeyPatch, kind: str, status: str
) -> None:
    """SQLite's COMMIT reports an error after it took effect, and no connection can be opened to check this.

    When the append is sent again, it is refused.
    """
    append, connect = SqliteStore.append, SqliteDatabase._connect
    appends, failures = 0, 0

    def broken_connect(database: SqliteDatabase) -> Any:
        nonlocal failures
        if failures:
            failures -= 1
            raise apsw.CantOpenError("too many open files, as ordered")
        return connect(database)

    def broken_append(store: SqliteStore, batch: Any) -> Any:
        nonlocal appends, failures
        appends += 1
        if appends == 2:  # the result of the first call, and the intent of the second
            failures = 1
            store._database._connection().set_wal_hook(lambda *_: apsw.SQLITE_IOERR)
        return append(store, batch)

    async def main() -> dict[str, Any]:
        async with Perdure(world.journal.url, agents=[chores]) as app:
            handle = await app.start(chores, [[kind, "a", 0], [kind, "b", 0]], id="r")
            monkeypatch.setattr(SqliteDatabase, "_connect", broken_connect)
            monkeypatch.setattr(SqliteStore, "append", broken_append)
            return await victims.result(handle.result(timeout=10), app, "r")

    told = asyncio.run(main())
    assert appends > 2
    assert not failures
    # The second call never began, but this cannot be known: it is sent again with its key, or a person is asked.
    assert told["status"] == status, told
    assert [line["what"] for line in world.ledger.effects()] == (["a", "b"] if kind == "work" else ["a"])
    check_journal(world, "r")


def check_cancel_is_heard_while_parking(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cancel that arrives between the holder's last look and its commit of the park ends the run at once, not an hour later."""
    url = world.journal.url
    owner: type[SqlStore] = PostgresStore if is_postgres(url) else SqlStore
    appending, sending = owner.append, PostgresStore.send

    async def main() -> None:
        async with Perdure(url, agents=[sleeper], settings=Settings(park_after_s=0)) as app:

            def cancel(store: SqlStore) -> None:
                monkeypatch.setattr(owner, "append", appending)
                monkeypatch.setattr(PostgresStore, "send", sending)
                store.post(
                    "r",
                    None,
                    CancelRequested(by="ann"),
                    event_id=app.clock.new_id(),
                    now=app.clock.now(),
                    status="cancelling",
                    expect=lambda _: None,
                )

            def cancelled_first(store: SqlStore, batch: Any) -> Any:
                cancel(store)
                return appending(store, batch)

            def cancelled_before_it_is_sent(store: PostgresStore, *args: Any) -> Any:
                cancel(store)
                return sending(store, *args)

            handle = await app.start(sleeper, 3600.0, id="r")
            monkeypatch.setattr(owner, "append", cancelled_first)
            monkeypatch.setattr(PostgresStore, "send", cancelled_before_it_is_sent)
            await handle.result(timeout=3)

    try:
        asyncio.run(main())
    except RunCancelled:
        check_journal(world, "r")
        return
    except Exception as error:
        raise AssertionError(f"the cancel was not heard: {error!r}") from error
    raise AssertionError("the run succeeded")


@pytest.mark.usefixtures("here")
def test_a_cancel_that_meets_a_park_is_heard(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    check_cancel_is_heard_while_parking(world, monkeypatch)
