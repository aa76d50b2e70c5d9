"""Tests of the tests of the guards on PostgreSQL: without any one predicate or lock, a test fails."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import quote

import msgspec
import psycopg
import pytest
from tests.conformance.suite import (
    LEASE_US,
    RELEASED,
    ROWS,
    T0,
    Held,
    StoreConformance,
    found,
    hold_one,
    new_run,
    post,
    register,
    serving,
)
from tests.conformance.suite_waiting import hold, payload
from tests.servers.postgres import Server
from tests.unit.postgres_tools import Gate, cleared, opened, raw

from perdure.core.budget import Amounts
from perdure.core.events import AttentionNeeded, Limits, RunClaimed, RunPaused, RunSucceeded, SignalReceived, ThoughtRecorded
from perdure.errors import Conflict, StoreError, StoreUnavailable
from perdure.store.api import Charge, Claimed, Committed, Refused, RowChange, RunRow
from perdure.store.claims import Claims
from perdure.store.cursor import load
from perdure.store.delivery import Letter
from perdure.store.postgres import store as store_module
from perdure.store.postgres.fast_writes import LetterLost, signal_at_once, signal_values
from perdure.store.postgres.queries import QUERIES, PostgresCursor, numbered
from perdure.store.postgres.store import PostgresStore

pytestmark = pytest.mark.full

SUITE = StoreConformance()
SOURCE = load("postgres")
Check = Callable[[PostgresStore], object]
PREDICATES = {
    "epoch": ("epoch = ?5", "?5::bigint IS NOT NULL"),
    "nonce": ("nonce = ?6", "?6::bytea IS NOT NULL"),
    "worker": ("holder = ?7", "?7::text IS NOT NULL"),
    "seq": ("seq = ?8", "?8::bigint IS NOT NULL"),
}
ADVANCES = dict(zip(("advance", "advance_and_project", "advance_and_release"), ROWS, strict=True))
ADVANCES["advance_and_park"] = ADVANCES["advance_and_release"]  # the common path comes after it


# -- checks that the suite does not have, since they are about ways that only this dialect goes ----------------------------------------------
def forged(held: Held, part: str) -> Held:
    wrong: dict[str, Any] = {"epoch": held.lease.epoch + 1, "nonce": bytes(16), "worker": "somebody"}
    if part == "seq":
        return Held(held.lease, held.seq - 1, held.head)
    return Held(msgspec.structs.replace(held.lease, **{part: wrong[part]}), held.seq, held.head)


def many_refuse(part: str) -> Check:
    """A forged append among others, which go together in one statement."""

    def check(store: PostgresStore) -> None:
        ours, other = hold_one(store, "r"), hold_one(store, "other")
        before = found(store, "r"), store.read("r")
        answers = store.append([other.append(ThoughtRecorded("x")), forged(ours, part).append(ThoughtRecorded("from a zombie"))])
        assert [type(answer) for answer in answers] == [Committed, Refused]
        assert (found(store, "r"), store.read("r")) == before

    return check


def fence_refuses(part: str) -> Check:
    """The outcome of a forged append is unknown: it did not arrive, and the true holder continues."""

    def check(store: PostgresStore) -> None:
        held = hold_one(store, "r")
        append = forged(held, part).append(ThoughtRecorded("from a zombie"))
        zombie = opened(store.url)
        try:
            zombie._doubtful.add(append.events[0].event.event_id)
            (answer,) = zombie.append([append])
        finally:
            zombie.close()
        assert isinstance(answer, Refused)
        assert store.append([held.append(ThoughtRecorded("the true holder goes on"))]) == [Committed()]

    return check


def a_fenced_append_comes_too_late(store: PostgresStore) -> None:
    """After the fence the same append under the old nonce changes nothing, wherever it was meanwhile."""
    held = hold_one(store, "r")
    append = held.append(ThoughtRecorded("x"))
    store._doubtful.add(append.events[0].event.event_id)
    assert store.append([append]) == [Committed()]
    late = Held(held.lease, held.seq + 1, append.events[-1].hash).append(ThoughtRecorded("late"))
    other = opened(store.url)
    try:
        (answer,) = other.append([late])
        assert isinstance(answer, Refused), "under a nonce that is no longer the run's"
    finally:
        other.close()
    assert store.append([late]) == [Committed()]  # this process knows the new one


def what_a_run_has_reserved_is_given_back_at_its_plain_end(store: PostgresStore) -> None:
    hand = hold(store, "p", budget=Limits(usd_micros=100))
    hand.write(ThoughtRecorded("x"), charge=Charge(Amounts(usd_micros=30), Amounts()))
    hand.write(RunSucceeded(payload(1)), row=RowChange("succeeded"))
    assert store.reserved("p") == Amounts()
    assert store.ledgers("p")[0].reserved == Amounts()


def changes(name: str, params: dict[str, Any], expected: int) -> Check:
    def check(store: PostgresStore) -> None:
        hold_one(store, "r")
        with raw(store.url) as other:
            other.execute("UPDATE perdure_workers SET beat_at = 7000000")
        assert store._database.write(lambda cursor: cursor.change(name, params), lambda cursor, _: False) == expected

    return check


def locked_by_others(store: PostgresStore, lock: str, look: Callable[[], Any]) -> Any:
    """What the query finds, at once, while another transaction has locked some rows."""
    with psycopg.connect(store.url) as other:
        assert other.execute(lock.encode()).fetchall()
        try:
            return look()
        except StoreUnavailable as error:
            raise AssertionError("it has waited for rows that it should have passed by") from error
        finally:
            other.rollback()


def claims_pass_by_what_others_take(store: PostgresStore) -> None:
    """The lines of two tenants, which are weighed."""
    taken = claimed_while_the_first_is_locked(store, "t1", "t2")
    assert [claimed.row.run_id for claimed in taken] == ["r2"]


def claims_at_once_pass_by_what_others_take(store: PostgresStore) -> None:
    def in_a_transaction(*_: Any) -> list[Claimed]:
        raise AssertionError("it has waited in vain, and the rest is weighed afterwards")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Claims, "_claim_by_turns", in_a_transaction)
        taken = claimed_while_the_first_is_locked(store, "t1", "t1")
    assert [claimed.row.run_id for claimed in taken] == ["r2"]


def claimed_while_the_first_is_locked(store: PostgresStore, *tenants: str) -> list[Claimed]:
    for number, tenant in enumerate(tenants, 1):
        store.create_run(new_run(f"r{number}", tenant=tenant))
    register(store, "w")
    lock = "SELECT 1 FROM perdure_runs WHERE run_id = 'r1' FOR UPDATE"
    taken: list[Claimed] = locked_by_others(store, lock, lambda: store.claim("w", serving("a"), 9, T0))
    return taken


def held_up(name: str, place: str, instead: str, doing: Callable[[], Any], meanwhile: Callable[[], Any], url: str) -> Any:
    """What `doing` returns, while its statement waits at that place on the server until `meanwhile` is over."""
    statement, gate, answers = QUERIES[name], Gate(url), []
    assert place in statement.sql
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(QUERIES, name, msgspec.structs.replace(statement, sql=statement.sql.replace(place, instead)))
        working = threading.Thread(target=lambda: answers.append(doing()))
        working.start()
        try:
            gate.wait()
            patch.undo()  # the other transactions must not be delayed
            meanwhile()
        finally:
            gate.open()
            working.join()
    return answers[0]


def what_has_changed_since_it_was_seen_is_not_taken(store: PostgresStore) -> None:
    """Between the look and the claim, which are one statement, another worker has taken the first run, and was cut off from it."""
    for run_id in ("r1", "r2"):
        store.create_run(new_run(run_id))
    for worker in ("w", "w2"):
        register(store, worker)

    def meanwhile() -> None:
        (other,) = Claims._claim_by_turns(store, "w2", serving("a"), 1, T0, None, {})
        assert store.release_undriven("w2", [("r1", other.lease.epoch)], T0) == 1

    place, instead = "FROM first AS f JOIN", f"FROM (SELECT first.*, {Gate.HELD_UP} FROM first) AS f JOIN"
    taken = held_up("claim_at_once", place, instead, lambda: store.claim("w", serving("a"), 9, T0), meanwhile, store.url)
    assert [claimed.row.run_id for claimed in taken] == ["r2"]
    assert [event.seq for event in store.read("r1")] == [1, 2]


def a_run_that_was_lost_is_taken_over(store: PostgresStore) -> None:
    """The next worker must know that the run was lost: its calls may be under way."""
    register(store, "w")
    store.create_run(new_run("r"))
    held = store.claim("w", serving("a"), 9, T0)[0]
    assert store.release_undriven("w", [("r", held.lease.epoch)], T0) == 1
    (again,) = store.claim("w", serving("a"), 9, T0)
    body = store.read("r")[-1].body
    assert isinstance(body, RunClaimed)
    assert (body.takeover, again.row.crashes) == (True, 1)


def signals(store: PostgresStore) -> list[Any]:
    bodies = [event.body for event in store.read("r")] + [letter.body for letter in store.unread("r")]
    return [body.payload.json for body in bodies if isinstance(body, SignalReceived)]


def send(store: PostgresStore, value: int, key: str | None = None, event_id: str = "") -> bool:
    body = SignalReceived("t", payload(value), "ann", key)
    return store.post("r", None, body, event_id=event_id or uuid.uuid4().hex, now=T0)


def hold_again(store: PostgresStore) -> Held:
    (claimed,) = store.claim("w", serving("a"), 1, T0, run_id="r")
    return Held(claimed.lease, claimed.row.seq, claimed.row.head)


def park(store: PostgresStore, held: Held) -> None:
    assert store.append([held.append(RELEASED, row=RowChange("waiting", release=True))]) == [Committed()]


def a_signal_does_not_overtake_what_its_run_has_not_read(store: PostgresStore) -> None:
    held = hold_one(store, "r")
    assert not send(store, 1), "into the inbox"
    park(store, held)
    assert send(store, 2)
    assert signals(store) == [payload(1).json, payload(2).json]


def a_signal_does_not_overtake_what_arrives_while_it_is_sent(store: PostgresStore) -> None:
    """Between the look and the write, which are one statement, the run was held, and given up with something unread."""
    park(store, hold_one(store, "r"))

    def meanwhile() -> None:
        held = hold_again(store)
        assert not send(store, 1), "into the inbox"
        park(store, held)

    place, instead = "FROM seen AS s JOIN", f"FROM (SELECT seen.*, {Gate.HELD_UP} FROM seen) AS s JOIN"
    assert held_up("signal_at_once", place, instead, lambda: send(store, 2), meanwhile, store.url)
    assert signals(store) == [payload(1).json, payload(2).json]


def a_signal_that_was_given_up_as_lost_comes_too_late(store: PostgresStore) -> None:
    """Its sender has heard nothing, found that it had not arrived, and sent it again; the run has gone on since."""
    park(store, hold_one(store, "r"))
    event_id = uuid.uuid4().hex

    def lost(*_: Any) -> bool:
        raise LetterLost

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store_module, "signal_at_once", lost)
        assert send(store, 1, event_id=event_id)
    park(store, hold_again(store))
    letter = Letter(None, SignalReceived("t", payload(1), "ann"), event_id, T0)
    assert not signal_at_once(store._database, store._notify, "r", letter)
    assert signals(store) == [payload(1).json]


def a_signal_to_a_held_run_goes_to_its_holder(store: PostgresStore) -> None:
    held = hold_one(store, "r")
    assert store.append([held.append(ThoughtRecorded("x"), row=RowChange("waiting"))]) == [Committed()]
    letter = Letter(None, SignalReceived("t", payload(1), "ann"), uuid.uuid4().hex, T0)
    values = signal_values("r", letter)
    try:
        with store._notify.commit() as ring:
            assert store._database.reading(lambda cursor: cursor.one("signal_at_once", {**values, **ring})) is None
    except StoreError as error:
        raise AssertionError("only the database's own guard has kept it from the journal") from error


def a_signal_leaves_a_paused_run_where_it_is(store: PostgresStore) -> None:
    park(store, hold_one(store, "r"))
    store.post("r", None, RunPaused("ann"), event_id=uuid.uuid4().hex, now=T0)
    assert send(store, 1)
    assert (found(store, "r").status, found(store, "r").ready_at) == ("paused", None)


def given_up_while_post_arrives(count: int, isolation: str) -> Check:
    """The transaction in which runs are given up has begun; something arrives before it has locked them."""

    def check(store: PostgresStore) -> None:
        options = "-c default_transaction_isolation=" + isolation.replace(" ", "\\ ")
        strict = opened(f"{store.url}&options={quote(options)}", busy_s=1.0)
        try:
            held = [hold_one(strict, f"r{n}") for n in range(count)]
            releases = [one.append(RELEASED, row=RowChange("waiting", release=True)) for one in held]
            place, instead = "FROM perdure_runs WHERE id", f"FROM (SELECT {Gate.HELD_UP}) AS gate, perdure_runs WHERE id"
            answers = held_up("lock_to_release", place, instead, lambda: strict.append(releases), lambda: post(store, "r0"), store.url)
        finally:
            strict.close()
        assert answers == [Committed()] * count
        assert found(store, "r0").ready_at is not None, "something lies in its inbox, and nobody will ever look"

    return check


def the_id_of_a_pruned_run_is_not_used_again(store: PostgresStore) -> None:
    hand = hold(store, "r")
    hand.write(RunSucceeded(payload(1)), row=RowChange("succeeded"))
    store.prune(["r"], T0 + LEASE_US, by="ann", now=T0)
    store.create_run(new_run("another"))  # creates the line: without a line, a run is not created with one statement
    with pytest.raises(Conflict, match="pruned"):
        store.create_run(new_run("r"))


def claims_below_pass_by_what_others_take(store: PostgresStore) -> None:
    for run_id in ("r/1", "r/2"):
        store.create_run(new_run(run_id))
    register(store, "w")
    lock = "SELECT 1 FROM perdure_runs WHERE run_id = 'r/1' FOR UPDATE"
    taken = locked_by_others(store, lock, lambda: store.claim("w", serving("a"), 9, T0, below="r"))
    assert [claimed.row.run_id for claimed in taken] == ["r/2"]


def reaping_passes_by_what_is_written_to(store: PostgresStore) -> None:
    for run_id in ("r1", "r2"):
        hold_one(store, run_id)
    store.register("w2", "host:2", 2, T0)
    lock = "SELECT 1 FROM perdure_runs WHERE run_id = 'r1' FOR UPDATE"
    assert store.reap("w2", LEASE_US, T0) == 0, "seen for the first time"
    assert locked_by_others(store, lock, lambda: store.reap("w2", 1, T0)) == 1
    assert store.reap("w2", 1, T0) == 1


def notices_pass_by_what_others_take(store: PostgresStore) -> None:
    hold_one(store, "r")
    with raw(store.url) as other:
        other.execute("INSERT INTO perdure_notices (run, seq, next_at) SELECT id, 1, n FROM perdure_runs, generate_series(1, 2) AS n")
    taken = locked_by_others(store, "SELECT 1 FROM perdure_notices WHERE next_at = 1 FOR UPDATE", lambda: store.take_notices(T0, 9, 1))
    assert len(taken) == 1


def turns_pass_by_what_others_note(store: PostgresStore) -> None:
    """The lines of two tenants, which are weighed."""
    assert len(claimed_while_turns_are_locked(store, "t1", "t2")) == 2


def turns_at_once_pass_by_what_others_note(store: PostgresStore) -> None:
    (claimed,) = claimed_while_turns_are_locked(store, "t1")
    assert claimed.events is not None, "it has waited in vain, and was taken in a transaction afterwards"


def claimed_while_turns_are_locked(store: PostgresStore, *tenants: str) -> list[Claimed]:
    register(store, "w")
    for times in ("first", "again"):
        for tenant in tenants:
            store.create_run(new_run(f"{times}-{tenant}", tenant=tenant))
        assert len(store.claim("w", serving("a"), 9, T0)) == len(tenants)
    with raw(store.url) as other:
        assert other.execute("SELECT count(*) FROM perdure_turns").fetchone() == (len(tenants),)
    for tenant in tenants:
        store.create_run(new_run(f"last-{tenant}", tenant=tenant))
    lock = "SELECT 1 FROM perdure_turns FOR UPDATE"
    taken: list[Claimed] = locked_by_others(store, lock, lambda: store.claim("w", serving("a"), 9, T0))
    return taken


def post_while_the_run_is_given_up_wakes_somebody(store: PostgresStore) -> None:
    """The post has looked at the run and found it held; its holder gives it up before the post is written."""
    held = hold_one(store, "r")
    release = held.append(RELEASED, row=RowChange("waiting", release=True))
    giving_up = threading.Thread(target=lambda: store.append([release]))

    def meanwhile(row: RunRow) -> None:
        assert row.holder == "w"
        giving_up.start()
        giving_up.join(0.15)

    post(store, "r", expect=meanwhile)
    giving_up.join()
    assert found(store, "r").ready_at is not None, "something lies in its inbox, and nobody will ever look"


def a_run_is_given_up_while_post_arrives_and_somebody_wakes(store: PostgresStore) -> None:
    """The holder has found its inbox empty; a post arrives before the run is given up."""
    held = hold_one(store, "r")
    posting = threading.Thread(target=lambda: post(store, "r"))
    plain = PostgresCursor.one

    def one(self: PostgresCursor, name: str, params: Any = ()) -> Any:
        answer = plain(self, name, params)
        if name == "unread_inbox_of_run" and not posting.ident:
            posting.start()
            posting.join(0.15)
        return answer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PostgresCursor, "one", one)
        asked = AttentionNeeded("in_doubt", "of which people hear, so that it takes the common path")
        store.append([held.append(asked, RELEASED, row=RowChange("needs_attention", attention="in_doubt", release=True))])
    posting.join()
    assert found(store, "r").ready_at is not None, "something lies in its inbox, and nobody will ever look"


SILENT = {"worker": "w", "beat_at": 6_000_000, "now": T0, "lost": 1, "beside": 0, "beside_suspects": 0}
# (the statement, the guard in it, what stands there instead, the check that must notice)
GUARDS: dict[str, tuple[str, str, str, Check]] = {
    **{
        f"many at once: {part}": ("append_many", predicate, "TRUE", many_refuse(part))
        for part, predicate in {
            "epoch": "r.epoch = g.epoch",
            "nonce": "r.nonce = g.nonce",
            "worker": "r.holder = g.holder",
            "seq": "r.seq = g.before",
        }.items()
    },
    "many at once: the events of those that moved": ("append_many", "WHERE e.run IN (SELECT id FROM moved)", "", many_refuse("nonce")),
    "many at once: budgets are settled elsewhere": (
        "append_many",
        "AND (NOT g.ends OR r.parent IS NULL AND r.ledger IS NULL)",
        "",
        what_a_run_has_reserved_is_given_back_at_its_plain_end,
    ),
    "many at once: nothing stays pending": (
        "append_many",
        "a.status = 'pending'",
        "a.status = 'nothing'",
        SUITE.test_what_a_run_has_left_pending_at_its_end_is_asked_of_nobody_any_more,
    ),
    "the fence is of this epoch": ("fence", "epoch = :epoch", ":epoch::bigint > 0", fence_refuses("epoch")),
    "the fence is of this worker": ("fence", "holder = :worker", ":worker::text IS NOT NULL", fence_refuses("worker")),
    "the fence is of this lease": ("fence", "nonce = ANY (:nonces::bytea[])", ":nonces::bytea[] IS NOT NULL", fence_refuses("nonce")),
    "the fence is a new nonce": ("fence", "SET nonce = :nonce", "SET nonce = coalesce(nonce, :nonce)", a_fenced_append_comes_too_late),
    "consumed once": ("consume_approval", "AND status = 'approved'", "", SUITE.test_an_approval_is_consumed_once),
    "in time": (
        "consume_approval",
        "AND (expires_at IS NULL OR expires_at > :ts)",
        "AND :ts::bigint > 0",
        SUITE.test_an_approval_that_has_expired_starts_nothing,
    ),
    "the approved arguments": (
        "consume_approval",
        "digest = :digest",
        ":digest::text IS NOT NULL",
        SUITE.test_an_approval_of_other_arguments_starts_nothing,
    ),
    "the approved tool": (
        "consume_approval",
        "action = :tool",
        ":tool::text IS NOT NULL",
        SUITE.test_an_approval_of_another_tool_or_call_starts_nothing,
    ),
    "the approved call": (
        "consume_approval",
        "call = :call",
        ":call::bigint > 0",
        SUITE.test_an_approval_of_another_tool_or_call_starts_nothing,
    ),
    "the approved run": (
        "consume_approval",
        "run = :run",
        ":run::bigint > 0",
        SUITE.test_an_approval_of_another_run_starts_nothing,
    ),
    "a refused append is undone": (
        "undo_append",
        "ROLLBACK TO SAVEPOINT perdure_append",
        "SELECT 1",
        SUITE.test_a_call_that_may_not_start_does_not_hinder_the_others_of_its_batch,
    ),
    "a key is taken once": (
        "remember_signal",
        "ON CONFLICT DO NOTHING",
        "ON CONFLICT (run, topic, key) DO UPDATE SET key = excluded.key",
        SUITE.test_a_signal_with_a_key_is_taken_once_in_its_topic,
    ),
    "a charge counts above": (
        "charge_budgets",
        "SELECT b.above FROM",
        "SELECT NULL::bigint FROM",
        SUITE.test_a_charge_counts_in_every_budget_above_the_run,
    ),
    "a child stands under its parent's budget": (
        "insert_run",
        "(SELECT ledger FROM perdure_runs WHERE run_id = :parent::text)",
        "NULL",
        SUITE.test_a_charge_counts_in_every_budget_above_the_run,
    ),
    "a taken notice is one taker's": (
        "take_notice",
        "next_at = ?",
        "next_at = least(next_at, ?)",
        SUITE.test_a_notice_is_one_takers_until_its_time_is_over,
    ),
    "a worker that is silent no longer": (
        "lose_runs_of_silent_worker",
        "w.beat_at = :beat_at",
        ":beat_at::bigint > 0",
        changes("lose_runs_of_silent_worker", SILENT, 0),
    ),
    "a worker that holds something is remembered": (
        "forget_workers",
        "AND NOT EXISTS (SELECT 1 FROM perdure_runs AS r WHERE r.holder = w.worker)",
        "",
        changes("forget_workers", {"silent_us": 1}, 0),
    ),
    "claims pass by": ("ready_of_line", "SKIP LOCKED", "", claims_pass_by_what_others_take),
    "claims at once pass by": ("claim_at_once", "OF r SKIP LOCKED", "OF r", claims_at_once_pass_by_what_others_take),
    "claims at once are of what was seen": (
        "claim_at_once",
        "r.seq = f.seq",
        "f.seq > 0",
        what_has_changed_since_it_was_seen_is_not_taken,
    ),
    "takeovers are weighed": ("claim_at_once", "r.lost > 0 OR ", "", a_run_that_was_lost_is_taken_over),
    "signals at once are of what was seen": (
        "signal_at_once",
        "WHERE r.seq = s.seq",
        "WHERE s.seq > 0",
        a_signal_does_not_overtake_what_arrives_while_it_is_sent,
    ),
    "signals at once come after what is unread": (
        "signal_at_once",
        "AND NOT EXISTS (SELECT 1 FROM perdure_inbox AS i WHERE i.run = r.id)",
        "",
        a_signal_does_not_overtake_what_its_run_has_not_read,
    ),
    "a signal that was given up is refused": (
        "signal_at_once",
        "AND NOT EXISTS (SELECT 1 FROM perdure_signals AS s WHERE s.run = r.id AND s.topic = :topic::text AND s.key = :once::text)",
        "AND :topic::text <> '' AND :once::text <> ''",
        a_signal_that_was_given_up_as_lost_comes_too_late,
    ),
    "signals at once are for nobody's runs": ("signal_at_once", "r.holder IS NULL AND ", "", a_signal_to_a_held_run_goes_to_its_holder),
    "signals at once are for parked runs": (
        "signal_at_once",
        "r.status || '' = ANY (:parked::text[])",
        ":parked::text[] IS NOT NULL",
        a_signal_leaves_a_paused_run_where_it_is,
    ),
    "the id of a pruned run is taken": (
        "create_run",
        "AND NOT EXISTS (SELECT 1 FROM perdure_pruned WHERE run_id = :run_id::text AND status <> 'returned')",
        "",
        the_id_of_a_pruned_run_is_not_used_again,
    ),
    "claims below pass by": ("ready_below", "SKIP LOCKED", "", claims_below_pass_by_what_others_take),
    "reaping passes by": ("lose_runs_of_silent_worker", "SKIP LOCKED", "", reaping_passes_by_what_is_written_to),
    "notices pass by": ("notices_to_take", "SKIP LOCKED", "", notices_pass_by_what_others_take),
    "turns pass by": ("had_turn", "SKIP LOCKED", "", turns_pass_by_what_others_note),
    "turns at once pass by": ("claim_at_once", "OF t SKIP LOCKED", "OF t", turns_at_once_pass_by_what_others_note),
    "whoever posts holds the run": ("run_to_change", "FOR NO KEY UPDATE", "", post_while_the_run_is_given_up_wakes_somebody),
    "whoever gives up holds the run": (
        "lock_runs",
        "FOR NO KEY UPDATE",
        "",
        a_run_is_given_up_while_post_arrives_and_somebody_wakes,
    ),
    "whoever gives up at once holds the run": (
        "lock_to_release",
        "FOR NO KEY UPDATE NOWAIT",
        "",
        post_while_the_run_is_given_up_wakes_somebody,
    ),
    "whoever gives up at once sees what is there": (
        "advance_and_park",
        "AND current_setting('transaction_isolation') = 'read committed'",
        "",
        given_up_while_post_arrives(1, "repeatable read"),
    ),
    "many at once: whoever gives up sees what is there": (
        "append_many",
        "AND (NOT g.releases OR current_setting('transaction_isolation') = 'read committed')",
        "",
        given_up_while_post_arrives(2, "repeatable read"),
    ),
    "many at once: post wakes": (
        "append_many",
        "EXISTS (SELECT 1 FROM perdure_inbox AS i WHERE i.run = r.id AND i.id <> ALL (:seen::bigint[]))",
        ":seen::bigint[] IS NULL",
        given_up_while_post_arrives(2, "read committed"),
    ),
}


@pytest.fixture
def fresh(postgres: Server) -> Iterator[Callable[[], PostgresStore]]:
    stores: list[PostgresStore] = []

    def make() -> PostgresStore:
        for old in stores:
            old.close()
        stores.append(opened(cleared(postgres), busy_s=1.0))
        return stores[-1]

    yield make
    for store in stores:
        store.close()


def goes_red(check: Check, store: PostgresStore) -> bool:
    """Does the test itself fail? A statement that is no longer valid SQL does not count."""
    try:
        check(store)
    except (AssertionError, ValueError, pytest.fail.Exception):
        return True
    except StoreError as error:
        # The database has its own guards behind ours: here, a duplicate key.
        return "duplicate key" in str(error) or "takes nothing more" in str(error)
    return False


def bare(store: PostgresStore) -> PostgresStore:
    """The database without its own guards, so that only the guards of the statements count."""
    with raw(store.url) as other:
        for table in ("perdure_approvals", "perdure_events", "perdure_runs"):
            other.execute(f"ALTER TABLE {table} DISABLE TRIGGER USER".encode())
    return store


@pytest.mark.parametrize("part", PREDICATES)
@pytest.mark.parametrize("statement", ADVANCES)
def test_without(statement: str, part: str, monkeypatch: pytest.MonkeyPatch, fresh: Callable[[], PostgresStore]) -> None:
    """… its epoch, nonce, worker or seq each of the three guarded statements lets a forged append through, and a test says so."""

    def check(store: PostgresStore, row: RowChange | None = ADVANCES[statement]) -> None:
        if part == "seq":
            SUITE.test_an_append_that_expects_another_seq_is_refused(store, 1, row)
        else:
            SUITE.test_a_lease_that_differs_only_in_its(store, part, row)

    assert not goes_red(check, bare(fresh()))
    switch_off(monkeypatch, statement, *PREDICATES[part])
    assert goes_red(check, bare(fresh()))


@pytest.mark.parametrize("guard", GUARDS)
def test_without_the_guard(guard: str, monkeypatch: pytest.MonkeyPatch, fresh: Callable[[], PostgresStore]) -> None:
    """… the promise that it is named for is broken, and a test says so."""
    name, predicate, instead, check = GUARDS[guard]
    assert not goes_red(check, bare(fresh()))
    switch_off(monkeypatch, name, predicate, instead)
    assert goes_red(check, bare(fresh()))


def switch_off(monkeypatch: pytest.MonkeyPatch, name: str, predicate: str, instead: str) -> None:
    before, where, guard = SOURCE[name].rpartition("WHERE") if name in ADVANCES else ("", "", SOURCE[name])
    assert predicate in guard
    mutated = numbered(before + where + guard.replace(predicate, instead))
    assert mutated.names == QUERIES[name].names
    monkeypatch.setitem(QUERIES, name, mutated)


def test_nobody_waits_long_for_what_is_locked(fresh: Callable[[], PostgresStore]) -> None:
    """The checks above tell waiting from passing by through the end that every wait for a row has."""
    store = fresh()
    hold_one(store, "r")
    began_s = time.monotonic()
    with psycopg.connect(store.url) as other:
        other.execute("SELECT 1 FROM perdure_runs FOR UPDATE")
        with pytest.raises(StoreUnavailable, match="another transaction has locked"):
            post(store, "r")
    assert 0.4 < time.monotonic() - began_s < 60
