"""The other tables (approvals, budgets, parents, children) are compared with the journal.

A run that moves on during the check causes no false alarm.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path

import apsw
import pytest
from tests.unit.inspect_tools import HOLDER, WAITERS, approval_of, at_work, hold, make_waiting, url_of

from perdure import Budget, Perdure, Run, agent
from perdure.core import codec, identity
from perdure.core.events import BudgetRaised, Event, Limits, RunReleased, RunSucceeded, RunUnpaused
from perdure.engine.clock import Clock
from perdure.inspect.consistency import Relatives
from perdure.inspect.verify import Verdict, verify_run
from perdure.inspect.view import all_rows
from perdure.store.api import Append, Claimed, Committed, RowChange, Served, Store
from perdure.store.open import open_store


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("waiting") / "journal.db"
    make_waiting(path)
    return path


@pytest.fixture
def path(zoo: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(zoo, tmp_path / "journal.db"))


@pytest.fixture
def store(path: Path) -> Iterator[Store]:
    opened = open_store(url_of(path))
    yield opened
    opened.close()


@pytest.fixture
def other(path: Path, store: Store) -> Iterator[apsw.Connection]:
    """Direct access to the file, with all its guards removed."""
    connection = apsw.Connection(str(path))
    connection.set_busy_timeout(5000)
    for (name,) in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'trigger'").fetchall():
        connection.execute(f"DROP TRIGGER {name}")
    connection.pragma("ignore_check_constraints", 1)
    yield connection
    connection.close()


def verdict_on(store: Store, run_id: str) -> Verdict:
    row = store.get(run_id)
    assert row is not None
    return verify_run(store, row)


def all_sound(store: Store) -> None:
    kin = Relatives(store)
    assert {row.run_id: verify_run(store, row, kin).problem for row in all_rows(store) if verify_run(store, row, kin).problem} == {}


def test_whatever_a_run_waits_for_it_is_as_it_was_written(store: Store) -> None:
    all_sound(store)


def test_every_step_that_people_and_workers_take_leaves_everything_as_it_should_be(path: Path) -> None:
    async def steps(app: Perdure) -> None:
        first = approval_of(app.store, "asks")
        for step in (
            app.pause("asks", by="ann"),
            app.approve(first, by="ann"),
            app.unpause("asks", by="ann"),
            app.engine.drive("asks", wait=False),
            app.pause("listens", by="ann"),
            app.signal("listens", "chat", 1),
            app.unpause("listens"),
            app.engine.drive("listens", wait=False),
            app.signal("later", "anything", 1),
            app.unpause("thrifty", add=Budget(calls=3, usd="0.5")),
            app.engine.drive("thrifty", wait=False),
            app.unpause("circling"),
            app.engine.drive("circling", wait=False),
            app.unpause("circling"),
            app.cancel("circling"),
            app.engine.drive("circling", wait=False),
            app.resolve("parent/1", 2, happened={"id": 1}),
            app.engine.drive("parent/1", wait=False),
            app.engine.drive("parent", wait=False),
            app.cancel("grand", reason="enough"),
            app.engine.drive("grand", wait=False),
            app.resolve("grand/1/1", 2, fail="never mind"),
            app.engine.drive("grand/1/1", wait=False),
            app.engine.drive("grand", wait=False),
            app.cancel("hurried"),
            app.engine.drive("hurried", wait=False),
            app.cancel("refund"),
            app.engine.drive("refund", wait=False),
            app.cancel("later", force=True),
            app.cancel("paused"),
        ):
            await step
            all_sound(app.store)
        assert {row.run_id: row.status for row in all_rows(app.store)} | {"circling": ""} == {
            "asks": "succeeded",
            "refund": "cancelled",
            "listens": "succeeded",
            "parent": "succeeded",
            "parent/1": "succeeded",
            "grand": "cancelled",
            "grand/1": "cancelled",
            "grand/1/1": "cancelled",
            "squares": "succeeded",
            "squares/1": "succeeded",
            "squares/2": "succeeded",
            "negative": "failed",
            "negative/1": "failed",
            "paused": "cancelling",
            "thrifty": "needs_attention",
            "circling": "",
            "hurried": "cancelled",
            "forced": "cancelled",
            "later": "cancelled",
            "bought": "succeeded",
            "refused": "failed",
        }

    at_work(path, steps, agents=WAITERS)


def test_what_reaches_a_run_that_is_held_or_whose_worker_is_lost_raises_no_alarm(path: Path, store: Store) -> None:
    for run_id, name in (("asks", "asks"), ("refund", "refunds"), ("thrifty", "thrifty"), ("parent", "parent"), ("later", "sleeper")):
        hold(store, run_id, name)
    approval = approval_of(store, "refund")

    async def speak(app: Perdure) -> None:
        await app.approve(approval, by="ann")
        await app.approve(approval_of(app.store, "asks"), by="ann")
        await app.resolve("parent/1", 2, happened={})
        await app.engine.drive("parent/1", wait=False)
        await app.pause("later", by="ann")

    at_work(path, speak, agents=WAITERS)
    all_sound(store)
    assert store.approval(approval).standing.status == "approved"  # type: ignore[union-attr]
    store.unregister(HOLDER, Clock().now())  # unread post waits for the next worker
    all_sound(store)


def test_what_was_still_asked_when_somebody_ended_the_run_is_withdrawn_without_a_word_in_the_journal(path: Path) -> None:
    async def end(app: Perdure) -> None:
        approval = approval_of(app.store, "refund")
        await app.cancel("refund", by="ann", force=True)
        assert app.store.approval(approval).standing.status == "withdrawn"  # type: ignore[union-attr]
        all_sound(app.store)

    at_work(path, end, agents=WAITERS)


def test_a_run_that_was_given_up_while_a_decision_arrived_is_ready_at_once_and_raises_no_alarm(path: Path, store: Store) -> None:
    clock, approval = Clock(), approval_of(store, "refund")
    store.register(HOLDER, "host:1", 1, clock.now())
    (claimed,) = store.claim(HOLDER, [Served("refunds", "1")], 1, clock.now(), run_id="refund")

    async def approve(app: Perdure) -> None:
        await app.approve(approval, by="ann")

    at_work(path, approve, agents=WAITERS)
    seq, words = claimed.row.seq, f"approval {approval} (refund)"
    released = Event(seq + 1, clock.new_id(), clock.now(), claimed.lease.epoch, None, seq, RunReleased("waiting_approval", words))
    sealed = tuple(identity.seal_all(claimed.row.head, [released]))
    change = RowChange("waiting_approval", waiting_for=words, release=True)
    assert store.append([Append(claimed.lease, seq, sealed, row=change)]) == [Committed()]
    assert store.get("refund").ready_at == released.ts  # type: ignore[union-attr]
    all_sound(store)


def test_a_run_that_is_paused_after_its_worker_was_lost_raises_no_alarm(path: Path, store: Store) -> None:
    hold(store, "listens", "listens")
    store.unregister(HOLDER, Clock().now())

    async def pause(app: Perdure) -> None:
        await app.pause("listens", by="ann")
        all_sound(app.store)
        await app.unpause("listens", by="ann")
        all_sound(app.store)

    at_work(path, pause, agents=WAITERS)


def test_a_run_that_is_told_to_go_on_before_its_time_keeps_its_time(store: Store) -> None:
    before = store.get("later")
    assert before is not None
    store.post("later", None, RunUnpaused(by="ann"), event_id=Clock().new_id(), now=Clock().now(), expect=lambda row: None)
    assert store.get("later").ready_at == before.ready_at  # type: ignore[union-attr]
    all_sound(store)


def test_a_run_that_ends_before_its_approval_is_read_raises_no_alarm(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"

    @agent(version="1")
    async def impatient(run: Run) -> str:
        try:
            async with asyncio.timeout(0.05):
                await run.request_approval("go")
        except TimeoutError:
            return "nobody came"
        return "somebody came"

    async def drive(app: Perdure) -> None:
        await app.start(impatient, id="r")
        await app.engine.drive("r")

    at_work(path, drive, agents=[impatient])
    store = open_store(url_of(path))
    all_sound(store)
    assert store.get("r").status == "succeeded"  # type: ignore[union-attr]
    store.close()


def finish(store: Store, claimed: Claimed) -> None:
    """The run ends while its worker holds it and has not read its inbox."""
    clock, seq = Clock(), claimed.row.seq
    last = Event(seq + 1, clock.new_id(), clock.now(), claimed.lease.epoch, None, seq, RunSucceeded(codec.pack(b"null")[0]))
    sealed = tuple(identity.seal_all(claimed.row.head, [last]))
    assert store.append([Append(claimed.lease, seq, sealed, row=RowChange("succeeded", progress=True))]) == [Committed()]


def claim(store: Store, run_id: str, agent: str) -> Claimed:
    store.register(HOLDER, "host:1", 1, Clock().now())
    (claimed,) = store.claim(HOLDER, [Served(agent, "1")], 1, Clock().now(), run_id=run_id)
    return claimed


def test_what_was_decided_as_the_run_ended_raises_no_alarm_and_whoever_edits_it_later_is_found(
    path: Path, store: Store, other: apsw.Connection
) -> None:
    held = {run_id: claim(store, run_id, name) for run_id, name in (("refund", "refunds"), ("asks", "asks"), ("thrifty", "thrifty"))}
    decided = approval_of(store, "refund")

    async def speak(app: Perdure) -> None:
        await app.approve(decided, by="ann")
        await app.approve(approval_of(app.store, "asks"), by="ann")
        app.store.post(
            "thrifty", None, BudgetRaised(Limits(calls=3), "ann"), event_id=Clock().new_id(), now=Clock().now(), expect=lambda row: None
        )

    at_work(path, speak, agents=WAITERS)
    for claimed in held.values():
        finish(store, claimed)
    assert store.approval(decided).standing.status == "approved"  # type: ignore[union-attr]
    all_sound(store)
    for change in ("status = 'rejected'", "settled_by = 'mallory'", "digest = 'of other arguments'"):
        (before,) = next(other.execute(f"SELECT {change.split()[0]} FROM perdure_approvals WHERE approval = ?", (decided,)))
        other.execute(f"UPDATE perdure_approvals SET {change} WHERE approval = ?", (decided,))
        assert "it was edited" in str(verdict_on(store, "refund").problem), change
        other.execute(f"UPDATE perdure_approvals SET {change.split()[0]} = ? WHERE approval = ?", (before, decided))
    all_sound(store)


def test_a_yes_that_was_written_into_the_row_of_a_finished_run_is_found(store: Store, other: apsw.Connection) -> None:
    """Even if its time fits: a vote that was not posted does not count."""
    claimed, wanted = claim(store, "refund", "refunds"), approval_of(store, "refund")
    finish(store, claimed)
    all_sound(store)
    other.execute(
        "UPDATE perdure_approvals SET status = 'approved', settled_by = 'ann', settled_at = ? WHERE approval = ?",
        (claimed.row.updated_at + 1, wanted),
    )
    assert "it says approved by ann, and the journal has no decision: it was edited" in str(verdict_on(store, "refund").problem)


def test_a_run_that_is_paused_and_unpaused_before_its_time_raises_no_alarm(path: Path) -> None:
    async def pause(app: Perdure) -> None:
        before = app.store.get("later")
        await app.pause("later", by="ann")
        all_sound(app.store)
        await app.unpause("later", by="ann")
        all_sound(app.store)
        assert app.store.get("later").ready_at == before.ready_at  # type: ignore[union-attr]

    at_work(path, pause, agents=WAITERS)


# -- approvals ----------------------------------------------------------------------------------------------------------------
def test_a_row_that_says_approved_without_a_decision_in_the_journal_was_edited(store: Store, other: apsw.Connection) -> None:
    other.execute(
        "UPDATE perdure_approvals SET status = 'approved', settled_by = 'ann', settled_at = 1 WHERE approval = ?",
        (approval_of(store, "refund"),),
    )
    verdict = verdict_on(store, "refund")
    assert verdict.projection
    assert "it says approved by ann, and the journal has no decision: it was edited" in str(verdict.problem)
    assert verdict.seq == 4  # the request


@pytest.mark.parametrize("run_id", ["asks", "refund", "bought", "refused"])
def test_every_edit_of_an_approval_is_found(store: Store, other: apsw.Connection, run_id: str) -> None:
    (key,) = next(
        other.execute("SELECT a.id FROM perdure_approvals AS a JOIN perdure_runs AS r ON r.id = a.run WHERE r.run_id = ?", (run_id,))
    )
    columns = [name for _, name, *_ in other.execute("PRAGMA table_info(perdure_approvals)")]
    assert len(columns) == 16
    # The number of an approval means nothing. Its action is compared with the call only in the commit that consumes
    # it.
    for column in set(columns) - {"id", "action"}:
        (before,) = next(other.execute(f"SELECT {column} FROM perdure_approvals WHERE id = ?", (key,)))
        for edited in _others(column, before):
            other.execute(f"UPDATE perdure_approvals SET {column} = ? WHERE id = ?", (edited, key))
            verdict = verdict_on(store, run_id)
            assert verdict.problem is not None, (column, before, edited)
            assert verdict.projection
            other.execute(f"UPDATE perdure_approvals SET {column} = ? WHERE id = ?", (before, key))
    assert verdict_on(store, run_id).problem is None


def _others(column: str, before: object) -> list[object]:
    match column:
        case "status":
            return [one for one in ("pending", "approved", "rejected", "expired", "withdrawn", "consumed") if one != before]
        case "deciders" | "voters":
            return ['["mallory"]', '["ann","mallory"]']
        case "settled_at":
            return [None] if before is not None else [5]
        case _:
            return ["mallory"] if isinstance(before, str) or (before is None and column in ("settled_by", "note")) else [(before or 0) + 1]  # type: ignore[operator]


# -- the family ---------------------------------------------------------------------------------------------------------------
def test_a_child_that_is_gone_and_a_child_that_nobody_started_are_named(store: Store, other: apsw.Connection) -> None:
    other.execute("PRAGMA foreign_keys = OFF")
    other.execute("UPDATE perdure_runs SET run_id = 'elsewhere' WHERE run_id = 'squares/2'")
    verdict = verdict_on(store, "squares")
    assert verdict.seq == 4
    assert "it starts run squares/2 as a child, and there is no such run" in str(verdict.problem)
    other.execute("UPDATE perdure_runs SET run_id = 'squares/2' WHERE run_id = 'elsewhere'")
    all_sound(store)
    other.execute("UPDATE perdure_runs SET run_id = 'gone' WHERE run_id = 'squares'")
    orphan = verdict_on(store, "squares/1")
    assert "it was created as child of run squares (its call 1), and there is no such run" in str(orphan.problem)


def test_a_child_that_its_parents_journal_does_not_have_is_named(store: Store, other: apsw.Connection) -> None:
    (key,) = next(other.execute("SELECT id FROM perdure_runs WHERE run_id = 'parent'"))
    other.execute("DELETE FROM perdure_events WHERE id > ? AND id < ?", (key << 32 | 2, (key + 1) << 32))
    verdict = verdict_on(store, "parent/1")
    assert verdict.seq == 1
    assert "and the journal of parent does not have it: that call is no child" in str(verdict.problem)


def test_a_parent_that_was_never_told_of_its_childs_end_is_named(store: Store, other: apsw.Connection) -> None:
    other.execute("UPDATE perdure_runs SET status = 'succeeded' WHERE run_id = 'parent/1'")
    verdict = verdict_on(store, "parent")
    assert "its child parent/1 has succeeded, and the run was never told: it would wait for ever" in str(verdict.problem)


def test_a_child_whose_end_was_changed_is_named_by_its_parent(store: Store, other: apsw.Connection) -> None:
    other.execute("UPDATE perdure_runs SET status = 'failed' WHERE run_id = 'squares/1'")
    assert "it says that its child squares/1 succeeded, and that run is failed" in str(verdict_on(store, "squares").problem)


# -- budgets ------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("limit_usd_micros = 900000000", "its budget allows $900.00, 2 calls, and by the journal $5.00, 2 calls"),
        ("limit_calls = NULL", "its budget allows $5.00, and by the journal $5.00, 2 calls"),
        ("spent_calls = 0", "as spent, and by the journal the run alone has spent"),
        ("on_exceed = 'fail'", "it was edited"),
    ],
)
def test_a_budget_that_was_raised_or_emptied_behind_the_journals_back_is_found(
    store: Store, other: apsw.Connection, change: str, words: str
) -> None:
    other.execute(f"UPDATE perdure_budgets SET {change}")
    verdict = verdict_on(store, "thrifty")
    assert words in str(verdict.problem)
    assert verdict.projection


def test_a_budget_that_is_gone_is_found(store: Store, other: apsw.Connection) -> None:
    other.execute("PRAGMA foreign_keys = OFF")
    other.execute("DELETE FROM perdure_budgets")
    assert "the run has no budget, and by its journal it has one" in str(verdict_on(store, "thrifty").problem)
