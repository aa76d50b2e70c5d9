"""Special cases of transactions on PostgreSQL.

Late commits, failed statements, any text, large batches, large numbers.
"""

from __future__ import annotations

import hashlib
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from tests.conformance.suite import T0, Held, found, grown, hold_one, new_run, payload, post, register, serving
from tests.servers.postgres import Server
from tests.servers.proxy import Cut, Proxy
from tests.unit.postgres_tools import cleared, opened, raw

from perdure.core.codec import pack
from perdure.core.events import Failure, RunFailed, SignalReceived, ThoughtRecorded, ToolCallCompleted
from perdure.core.query import EVERYTHING, Query, Term
from perdure.errors import InvalidInput, NotFound, StoreError, StoreUnavailable
from perdure.inspect.projection import same
from perdure.store.api import ApprovalFilter, Committed, Refused, RowChange
from perdure.store.postgres.queries import PostgresCursor
from perdure.store.postgres.store import PostgresStore, open_postgres

LONE = "half a pair: \ud800"
NUL = "before\0after"


@pytest.fixture
def url(postgres: Server) -> str:
    return cleared(postgres)


@pytest.fixture
def store(url: str) -> Iterator[PostgresStore]:
    store = opened(url)
    yield store
    store.close()


# -- growing ---------------------------------------------------------------------------------------------------------------------------------
def test_a_run_whose_transaction_commits_late_is_never_missed(store: PostgresStore) -> None:
    """It has the older number and the older transaction, and is seen last."""
    store.create_run(new_run("first"))
    known = {row.run_id for _, row in grown(store, 1)}
    newest = grown(store, 1)[-1][0]
    with psycopg.connect(store.url) as slow:
        copy_of(slow, "first", "late")
        store.create_run(new_run("second"))
        seen = store.growing(newest=newest)
        known |= {row.run_id for _, row in seen}
        newest = max([newest, *(place for place, _ in seen)])
        assert "late" not in known
        slow.commit()
    deadline_s = time.monotonic() + 60
    while known != {"first", "second", "late"} and time.monotonic() < deadline_s:
        seen = store.growing(after=newest, newest=newest)  # only runs with a later place than all known runs
        known |= {row.run_id for _, row in seen}
        newest = max([newest, *(place for place, _ in seen)])
    assert known == {"first", "second", "late"}


def test_a_run_from_a_transaction_that_this_server_has_not_reached_yet_counts_as_old(store: PostgresStore) -> None:
    """A dump that was restored into a younger server: its runs must not hide until the server has counted that far."""
    store.create_run(new_run("r"))
    with raw(store.url) as outside:
        outside.execute("UPDATE perdure_runs SET born = '99999999'::xid8")
    ((place, row),) = store.growing()
    assert (place[0], row.run_id) == (0, "r")
    store.create_run(new_run("young"))
    (_, old), (newest, young) = grown(store, 2)
    assert (old.run_id, young.run_id, newest[0] > 0) == ("r", "young", True)
    assert [row.run_id for _, row in store.growing(after=place)] == ["young"]
    assert [row.run_id for _, row in store.growing(limit=1)] == ["r"]
    assert store.growing(after=newest) == []
    with raw(store.url) as outside:
        outside.execute("UPDATE perdure_runs SET status = 'failed', ready_at = NULL")
    assert [row.run_id for _, row in store.growing(newest=place)] == ["young"]
    assert store.growing(newest=newest) == []


def copy_of(connection: psycopg.Connection[Any], run_id: str, other: str) -> None:
    connection.execute(
        "INSERT INTO perdure_runs (run_id, agent, version, tenant, queue, input_digest, status, ready_at, seq, head, epoch, created_at, "
        "updated_at, line) SELECT %s, agent, version, tenant, queue, input_digest, status, ready_at, seq, head, epoch, created_at, updated_at, "
        "line FROM perdure_runs WHERE run_id = %s",
        (other, run_id),
    )


# -- transactions ----------------------------------------------------------------------------------------------------------------------------
def test_a_commit_that_the_server_answers_with_rollback_is_no_commit(store: PostgresStore) -> None:
    def work(cursor: Any) -> None:
        cursor.change("make_lock", ("x",))
        with pytest.raises(psycopg.Error):
            cursor.change("insert_event", (1, 1, b"", 1, 1, None, None, "", b""))

    with pytest.raises(StoreError, match="rolled the transaction back: one of its statements had failed; nothing was written"):
        store._database.write(work, lambda cursor, _: True)
    with raw(store.url) as outside:
        assert outside.execute("SELECT count(*) FROM perdure_locks").fetchone() == (0,)
    assert store.create_run(new_run("r"))[1]  # the connection is as good as before


def test_work_that_raises_leaves_nothing_and_no_transaction(store: PostgresStore) -> None:
    def work(cursor: Any) -> None:
        cursor.change("make_lock", ("x",))
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        store._database.write(work, lambda cursor, _: True)
    with raw(store.url) as outside:
        assert outside.execute("SELECT count(*) FROM perdure_locks").fetchone() == (0,)
        busy = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND state LIKE 'idle in transaction%'"
        assert outside.execute(busy.encode()).fetchone() == (0,)


def test_a_deadlock_is_rolled_back_by_the_server_and_done_again_unless_that_is_forbidden(store: PostgresStore) -> None:
    """Whatever another program does to the rows: our work is repeated as often as needed."""
    attempts = []

    def work(cursor: Any) -> str:
        attempts.append(1)
        cursor.change("make_lock", ("x",))
        if len(attempts) < 3:
            assert isinstance(cursor, PostgresCursor)
            cursor.connection.execute("DO $$ BEGIN RAISE EXCEPTION USING ERRCODE = 'deadlock_detected'; END $$")
        return "done"

    assert store._database.write(work, lambda cursor, _: False) == "done"
    assert len(attempts) == 3
    attempts.clear()
    with pytest.raises(StoreUnavailable, match="because of another one"):
        store._database.write(work, lambda cursor, _: False, again=False)
    assert len(attempts) == 1


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_transaction_without_an_answer_is_looked_up_by_its_number(url: str, moment: Any) -> None:
    opened(url).close()
    with Proxy(url) as proxy:
        store = open_postgres(proxy.url(url), answer_s=100.0)
        proxy.rule(Cut("^COMMIT", moment))
        began_s = time.monotonic()
        if moment == "after":
            assert store.create_run(new_run("r"))[1]
        else:
            with pytest.raises(StoreUnavailable, match="nothing was acknowledged"):
                store.create_run(new_run("r"))
        assert time.monotonic() - began_s < 60  # the outcome is known, so the caller need not wait for the time-out
        assert (store.get("r") is not None) == (moment == "after")
        store.close()


def test_everybody_who_commits_when_the_server_breaks_finds_out_what_became_of_it(url: str) -> None:
    """As many callers as connections: dead connections must not block the callers that look their transactions up."""
    opened(url).close()
    with Proxy(url) as proxy:
        store = open_postgres(proxy.url(url), connections=4, answer_s=100.0)
        proxy.rule(Cut("^COMMIT", "after", times=4))
        created: list[bool] = []
        threads = [threading.Thread(target=lambda n=n: created.append(store.create_run(new_run(f"r{n}"))[1])) for n in range(4)]
        began_s = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert created == [True] * 4
        assert time.monotonic() - began_s < 60
        store.close()


# -- any text --------------------------------------------------------------------------------------------------------------------------------
def test_text_with_nul_is_kept_exactly_in_the_journal_and_shown_in_the_projection(store: PostgresStore) -> None:
    held = hold_one(store, "r")
    for many in (1, 9):  # by the statement for one run, and by that for many
        append = held.append(*[ThoughtRecorded(NUL)] * many, row=RowChange("running", waiting_for=NUL, error=NUL))
        assert store.append([append]) == [Committed()]
        held = Held(held.lease, held.seq + many, append.events[-1].hash)
        assert store.read("r")[-1].body == ThoughtRecorded(NUL)
        assert (found(store, "r").waiting_for, found(store, "r").error) == ("before␀after", "before␀after")
    release = held.append(ThoughtRecorded(NUL), row=RowChange("waiting", waiting_for=NUL, error=NUL, release=True))
    assert store.append([release]) == [Committed()]
    assert found(store, "r").error == "before␀after"


@pytest.mark.parametrize("row", [RowChange("running", error=LONE), RowChange("running", waiting_for=LONE), RowChange("failed", error=LONE)])
@pytest.mark.parametrize("many", [1, 9])
def test_half_a_surrogate_pair_in_an_append_is_refused_in_words_and_nothing_is_written(
    store: PostgresStore, row: RowChange, many: int
) -> None:
    held = hold_one(store, "r")
    with pytest.raises(InvalidInput, match="lone surrogate cannot be stored"):
        store.append([held.append(*[ThoughtRecorded("x")] * many, row=row)])
    assert found(store, "r").seq == 2
    assert store.append([held.append(ThoughtRecorded("x"))]) == [Committed()]


WRITES: dict[str, Callable[[PostgresStore, str], object]] = {
    "run": lambda store, text: store.create_run(new_run(f"r{time.monotonic_ns()}", tenant=text, actor=text)),
    "agent": lambda store, text: store.create_run(new_run(f"r{time.monotonic_ns()}", agent=text)),
    "worker": lambda store, text: store.register("w9", text, 1, T0),
    "pause of a rate": lambda store, text: store.hold_back(text, T0),
    "notice": lambda store, text: store.notice_failed(1, next_at=1, error=text),
    "signal": lambda store, text: store.post(
        "r", None, SignalReceived(text, pack(b"1")[0], "ann", key=text), event_id=uuid.uuid4().hex, now=T0, expect=lambda row: None
    ),
}


@pytest.mark.parametrize("what", WRITES)
def test_any_text_is_stored_or_refused_in_words(store: PostgresStore, what: str) -> None:
    store.create_run(new_run("r"))
    WRITES[what](store, NUL)
    WRITES[what](store, "\U0010ffff ' \" \\ % $1 :a ? ␀ \u202e")
    with pytest.raises((InvalidInput, UnicodeEncodeError)):
        WRITES[what](store, LONE)
    assert store.problems() == []


READS: dict[str, tuple[Callable[[PostgresStore, str], object], object]] = {
    "run": (lambda store, text: store.get(text), None),
    "events": (lambda store, text: store.read(text), []),
    "family": (lambda store, text: store.family(text), []),
    "list": (lambda store, text: store.list(EVERYTHING.also(agent=text, tenant=text)), []),
    "approval": (lambda store, text: store.approval(text), None),
    "approvals": (lambda store, text: store.approvals(ApprovalFilter(tenant=text, run_id=text)), []),
    "inbox": (lambda store, text: store.inbox(text), []),
    "ledgers": (lambda store, text: store.ledgers(text), []),
}


@pytest.mark.parametrize("what", READS)
def test_nothing_is_called_what_no_text_can_hold(store: PostgresStore, what: str) -> None:
    look, nothing = READS[what]
    hold_one(store, "r")
    assert look(store, NUL) == nothing
    assert look(store, "␀' \U0010ffff") == nothing
    assert look(store, LONE) == nothing


# -- large ones ------------------------------------------------------------------------------------------------------------------------------
def test_a_thousand_runs_in_one_batch(store: PostgresStore) -> None:
    with raw(store.url) as outside:
        store.create_run(new_run("r0"))
        outside.execute(
            "INSERT INTO perdure_runs (run_id, agent, version, tenant, queue, input_digest, status, ready_at, seq, head, epoch, created_at, "
            "updated_at, line) SELECT 'r' || n, agent, version, tenant, queue, input_digest, status, ready_at, seq, head, epoch, created_at, "
            "updated_at, line FROM perdure_runs, generate_series(1, 999) AS n"
        )
    register(store, "w")
    held = [Held.of(claimed) for claimed in store.claim("w", serving("a"), 1000, T0)]
    assert len(held) == 1000
    batch = [each.append(ThoughtRecorded(f"{n} \0 'x' {{}} \\ \" NULL"), row=RowChange("running")) for n, each in enumerate(held)]
    stale = Held(held[7].lease, held[7].seq - 1, held[7].head).append(ThoughtRecorded("stale"))
    batch[7] = stale
    commits = store._database.commits
    answers = store.append(batch)
    assert [place for place, answer in enumerate(answers) if isinstance(answer, Refused)] == [7]
    # One commit for all of them, and another for the append that was refused.
    assert store._database.commits - commits == 2
    with raw(store.url) as outside:
        assert outside.execute("SELECT count(*) FROM perdure_events AS e WHERE e.type = 'thought_recorded'").fetchone() == (999,)
    assert store.stored(held[999].lease.run_id)[-1].data == batch[999].events[0].data


def test_ten_thousand_events_in_one_append(store: PostgresStore) -> None:
    held = hold_one(store, "r")
    append = held.append(*[ThoughtRecorded(f"{n}") for n in range(10_000)])
    assert store.append([append]) == [Committed()]
    assert found(store, "r").seq == 10_002
    assert [event.seq for event in store.read("r", after=9_990)] == list(range(9_991, 10_003))


def test_a_blob_of_thirty_megabytes(store: PostgresStore) -> None:
    large = bytes(range(256)) * 120_000
    held = hold_one(store, "r")
    assert store.append([held.append(ToolCallCompleted(payload(1)), blobs=(large,))]) == [Committed()]
    assert store.blob(hashlib.sha256(large).hexdigest()) == large


@pytest.mark.parametrize("number", [2**63 - 1, -(2**63)])
def test_the_largest_numbers_come_back_as_they_went(store: PostgresStore, number: int) -> None:
    held = hold_one(store, "r")
    for many in (1, 9):
        append = held.append(*[ThoughtRecorded("x")] * many, ts=number)
        assert store.append([append]) == [Committed()]
        held = Held(held.lease, held.seq + many, append.events[-1].hash)
        assert store.read("r")[-1].ts == number
    assert store.append([held.append(ThoughtRecorded("x"), row=RowChange("waiting", ready_at=number, release=True))]) == [Committed()]
    assert found(store, "r").ready_at == number


@pytest.mark.parametrize("number", [2**63, -(2**63) - 1, 2**200])
def test_numbers_that_no_column_can_hold_are_an_error_and_nothing_is_written(store: PostgresStore, number: int) -> None:
    held = hold_one(store, "r")
    for many in (1, 9):
        with pytest.raises((StoreError, InvalidInput)):
            store.append([held.append(*[ThoughtRecorded("x")] * many, ts=number)])
    with pytest.raises((StoreError, InvalidInput)):
        post(store, "r", now=number)
    with pytest.raises((StoreError, InvalidInput)):
        store.list(Query((Term("created", "<", number=number),)))
    assert found(store, "r").seq == 2
    assert store.append([held.append(ThoughtRecorded("x"))]) == [Committed()]


def test_what_is_not_there_is_said_as_on_sqlite(store: PostgresStore) -> None:
    with pytest.raises(NotFound, match="no event 7"):
        store.hash_at("r", 7)


def test_a_nul_in_an_error_is_no_edit_to_verify(store: PostgresStore) -> None:
    """The row shows it as another character; the journal has it."""
    held = hold_one(store, "r")
    failed = RunFailed(Failure("error", "ValueError", "a\0b"))
    assert store.append([held.append(failed, row=RowChange("failed", error="ValueError: a\0b"))]) == [Committed()]
    shown = found(store, "r").error
    assert shown == "ValueError: a\u2400b"
    assert same(shown, "ValueError: a\0b")
    assert not same(shown, "ValueError: ab")
