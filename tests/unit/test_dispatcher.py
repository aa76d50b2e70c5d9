"""Notices are sent: in words, signed, at least once. A slow or failing receiver delays nothing else."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.conformance.suite import T0, found, new_run
from tests.stalls import Stalls
from tests.unit.drive_tools import ManualClock, run, until
from tests.unit.notice_tools import SECRET, Receiver, failing_run, notice, receiver, says
from tests.unit.store_tools import FaultyDisk, end, first_line, output, python, raw

from perdure.core.codec import Payload, encode, pack
from perdure.core.events import AnyBody, ApprovalEscalated, ApprovalRequested, AttentionNeeded, BudgetExceeded, Failure, RunFailed
from perdure.engine.notify import dispatcher as module
from perdure.engine.notify import messages, webhook
from perdure.engine.notify.dispatcher import HOLD_S, Dispatcher, retry_delay_s
from perdure.engine.threads import ReadingThreads
from perdure.settings import Settings
from perdure.store.api import Store
from perdure.store.open import open_store
from perdure.webhooks import verify

MINUTE = 60_000_000


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = open_store(f"sqlite:///{tmp_path}/journal.db")
    yield opened
    opened.close()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(T0 / 1e6 + 1)


def settings_for(there: Receiver, **more: Any) -> Settings:
    return Settings(poll_s=0.01, webhook_url=there.url, webhook_secret=SECRET, **more)


def flush(store: Store, settings: Settings, clock: ManualClock, timeout_s: float = 60.0) -> None:
    async def main() -> None:
        await Dispatcher(store, settings, clock, ReadingThreads()).flush(timeout_s)

    run(main())


# --- words -----------------------------------------------------------------------------------------------------------------


def payload(value: Any, inline_bytes: int = 65536) -> Payload:
    return pack(encode(value), inline_bytes)[0]


ASKED = ApprovalRequested(
    approval="ap-1",
    action="refund.issue",
    input=payload({"order": "o-81", "cents": 4900}),
    digest="d",
    reason="over $50",
    by=("ann", "role:finance"),
    quorum=2,
    expires_at=T0 + 240 * MINUTE,
)
OVER = BudgetExceeded(budget_of="r", what="usd", limit=2_000_000, used=1_900_000, wanted=200_000)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (
            ASKED,
            'approval wanted by run r (a, tenant acme): refund.issue {"cents":4900,"order":"o-81"}, because "over $50"; asked of ann, role:finance, 2 of them must agree, until 2023-11-15 02:13:20 UTC: perdure approve ap-1 --by WHO',
        ),
        (
            ApprovalRequested("ap-2", "ping", payload(None), "d"),
            "approval wanted by run r (a, tenant acme): ping null; asked of any person, without a time limit: perdure approve ap-2",
        ),
        (
            ApprovalEscalated("ap-1", ("eve",), T0 + MINUTE),
            "approval still wanted by run r (a, tenant acme), there was no decision in time; asked of eve, until 2023-11-14 22:14:20 UTC: perdure approve ap-1 --by WHO",
        ),
        (
            AttentionNeeded("in_doubt", "call 4 (charge) may have happened"),
            "run r (a, tenant acme) needs attention (in_doubt): call 4 (charge) may have happened: perdure why r",
        ),
        (OVER, "run r (a, tenant acme) has come to the end of its budget: $1.90 used and $0.20 wanted of $2.00: perdure why r"),
        (
            msgspec.structs.replace(OVER, budget_of="parent", what="seconds"),
            "run r (a, tenant acme) has come to the end of the budget of run parent: 1.9 s used and 0.2 s wanted of 2.0 s: perdure why r",
        ),
        (
            msgspec.structs.replace(OVER, what="tokens"),
            "run r (a, tenant acme) has come to the end of its budget: 1,900,000 tokens used and 200,000 tokens wanted of 2,000,000 tokens: perdure why r",
        ),
        (
            RunFailed(Failure("error", "ValueError", "no such\norder")),
            "run r (a, tenant acme) failed: ValueError: no such order: perdure why r",
        ),
    ],
)
def test_the_line_says_what_is_asked_of_whom_until_when_and_what_to_type(store, body, expected):
    row, _ = store.create_run(new_run("r", tenant="acme"))
    assert messages.line(notice(body, row)) == expected


def test_a_line_is_one_line_whatever_a_model_has_written(store):
    row, _ = store.create_run(new_run("r"))
    evil = '\x1b[2J\x00 "; asked of nobody: perdure approve ap-9\r\nINFO all is well \u202e\u2800\ufe0f\u180b\U000e0100 ' + "x" * 5000
    words = messages.line(notice(msgspec.structs.replace(ASKED, reason=evil, action=evil, by=(evil,)), row))
    assert words.isprintable()
    assert "\\x1b[2J" in words or "\\u001b[2J" in words
    assert not {*"\u202e\u2800\ufe0f\u180b\U000e0100"} & set(words)
    assert "\\ufe0f\\u180b\\U000e0100" in words
    assert len(words) < 1500
    assert words.endswith(": perdure approve ap-1 --by WHO")


def test_ids_are_quoted_for_the_shell(store):
    row, _ = store.create_run(new_run("r"))
    assert messages.line(notice(msgspec.structs.replace(ASKED, approval="a b; rm x"), row)).endswith("perdure approve 'a b; rm x' --by WHO")


def told(store: Store, body: AnyBody) -> dict[str, Any]:
    row, _ = store.create_run(new_run("r", tenant="acme"))
    document: dict[str, Any] = json.loads(messages.document(notice(body, row)))
    return document


def test_the_document_has_the_run_the_event_and_its_fields(store):
    document = told(store, ASKED)
    data = document.pop("data")
    assert document == {
        "id": "ab" * 16,
        "type": "approval_requested",
        "run_id": "r",
        "agent": "a",
        "tenant": "acme",
        "ts": "2023-11-14T22:13:20.000000Z",
        "seq": 7,
    }
    assert data["input"] == {"order": "o-81", "cents": 4900}
    assert (data["approval"], data["by"], data["expires_at"]) == ("ap-1", ["ann", "role:finance"], "2023-11-15T02:13:20.000000Z")


def test_the_document_leaves_out_how_a_request_is_escalated_that_is_not(store):
    assert (
        not {"escalate_to", "escalate_us"} & told(store, msgspec.structs.replace(ASKED, on_expiry="reject", escalate_us=5))["data"].keys()
    )
    escalating = msgspec.structs.replace(ASKED, on_expiry="escalate", escalate_to=("eve",), escalate_us=5)
    with_it = told(store, escalating)["data"]
    assert (with_it["escalate_to"], with_it["escalate_us"]) == (["eve"], 5)


def test_money_in_a_notice_is_exact(store):
    row, _ = store.create_run(new_run("r"))
    over = msgspec.structs.replace(OVER, used=12_300, wanted=1, limit=1_234_000_000)
    assert "$0.0123 used and $0.000001 wanted of $1,234.00" in messages.line(notice(over, row))


@pytest.mark.parametrize("inline_bytes", [65536, 100], ids=["in place", "blob"])
def test_a_large_input_is_a_preview_that_says_so(store, inline_bytes):
    data = told(store, msgspec.structs.replace(ASKED, input=payload("x" * 20_000, inline_bytes)))["data"]
    assert "input" not in data
    assert data["input_bytes"] == 20_002
    assert data["input_preview"].startswith('"xxx')
    assert len(data["input_preview"]) == 200


def test_the_largest_input_that_goes_along_whole(store):
    text = "x" * (messages.MAX_INPUT_BYTES - 2)
    assert told(store, msgspec.structs.replace(ASKED, input=payload(text)))["data"]["input"] == text


def test_a_failure_goes_out_without_its_traceback(store):
    failure = Failure("error", "ValueError", "boom", lineage=("Base",), traceback="secret/path.py line 4")
    assert told(store, RunFailed(failure))["data"] == {"failure": {"kind": "error", "type": "ValueError", "message": "boom"}}


def test_a_lone_surrogate_in_the_input_goes_out(store):
    assert told(store, msgspec.structs.replace(ASKED, input=payload({"name": "\ud800"})))["data"]["input"] == {"name": "\ud800"}


def test_neither_line_nor_document_holds_a_link(store):
    row, _ = store.create_run(new_run("r"))
    for body in (ASKED, ApprovalEscalated("ap-1", ("eve",)), OVER, AttentionNeeded("stuck", "x")):
        assert "://" not in messages.line(notice(body, row)) + messages.document(notice(body, row)).decode()


# --- delivery --------------------------------------------------------------------------------------------------------------


def test_without_a_webhook_a_notice_is_a_line_in_the_log_and_done(store, clock, caplog):
    failing_run(store, "r-1")
    with caplog.at_level(logging.INFO, "perdure.notify"):
        flush(store, Settings(), clock)
        flush(store, Settings(), clock)
    lines = [record for record in caplog.records if record.name == "perdure.notify"]
    assert [record.getMessage() for record in lines] == ["run r-1 (a, tenant default) failed: ValueError: boom: perdure why r-1"]
    assert store.next_notice() is None


def test_a_notice_whose_courier_died_before_its_line_was_written_gets_its_line(store, clock, caplog):
    failing_run(store, "r-1")
    assert store.take_notices(clock.now(), 1, round(HOLD_S * 1e6))  # and the process that took it disappears
    clock.advance(HOLD_S)
    with caplog.at_level(logging.INFO, "perdure.notify"):
        flush(store, Settings(), clock)
    assert "run r-1" in caplog.text


def test_a_webhook_is_sent_once_and_can_be_verified(store, clock, caplog):
    notice_id = failing_run(store, "r-1")
    with receiver() as there, caplog.at_level(logging.INFO, "perdure.notify"):
        flush(store, settings_for(there), clock)
        clock.advance(7200)
        flush(store, settings_for(there), clock)
    assert there.ids == [notice_id]
    [got] = there.received
    document = verify(SECRET, got.headers, got.body, now=T0 / 1e6)
    assert (document["id"], document["type"], document["run_id"]) == (notice_id, "run_failed", "r-1")
    assert caplog.text.count("perdure why r-1") == 1  # in the log as well


def test_after_a_500_it_comes_again_later_under_the_same_id_and_in_the_log_once(store, clock, caplog):
    notice_id = failing_run(store, "r-1")
    with receiver(says(500), says(200)) as there, caplog.at_level(logging.INFO):
        flush(store, settings_for(there), clock)
        flush(store, settings_for(there), clock)  # not due yet
        assert there.ids == [notice_id]
        due = store.next_notice()
        assert due is not None
        assert due - clock.now() == round(retry_delay_s(notice_id, 1) * 1e6)
        clock.now_us = due
        flush(store, settings_for(there), clock)
    assert there.ids == [notice_id, notice_id]
    assert there.received[0].body == there.received[1].body
    assert there.received[0].headers["Perdure-Timestamp"] != there.received[1].headers["Perdure-Timestamp"]
    assert store.next_notice() is None
    assert caplog.text.count("perdure why r-1") == 1
    [warning] = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "HTTP 500; again in 2 s" in warning.getMessage()


def test_410_ends_it_with_a_warning(store, clock, caplog):
    failing_run(store, "r-1")
    with receiver(says(410)) as there:
        flush(store, settings_for(there), clock)
    assert "410 Gone" in caplog.text
    assert store.next_notice() is None


def test_a_receiver_that_stays_away_is_tried_for_ever_and_complained_about_now_and_then(store, clock, caplog):
    notice_id = failing_run(store, "r-1")
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        settings = Settings(webhook_url=f"http://127.0.0.1:{closed.getsockname()[1]}/", webhook_secret=SECRET)
        for _ in range(25):
            flush(store, settings, clock)
            due = store.next_notice()
            assert due is not None
            clock.now_us = due
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [int(number) for line in told for number in re.findall(r"failure (\d+): ConnectionRefusedError", line)] == [1, 5, 20, 24]
    with receiver() as there:
        flush(store, settings_for(there), clock)
    assert there.ids == [notice_id]


def test_the_schedule_doubles_up_to_an_hour_and_is_spread_by_id():
    delays = [retry_delay_s("n", failures) for failures in range(1, 15)]
    whole = [2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 3600.0, 3600.0, 3600.0]
    assert all(0.8 * most < delay <= most for delay, most in zip(delays, whole, strict=True))
    assert retry_delay_s("n", 10**9) <= 3600
    assert len({retry_delay_s(f"n{n}", 5) for n in range(100)}) == 100
    assert retry_delay_s("n", 5) == delays[4]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"webhook_secret": ""}, "PERDURE_WEBHOOK_SECRET"),
        ({"webhook_hosts": ("hooks.example.com",)}, "webhook_hosts allows hooks.example.com"),
        ({"webhook_url": "http://hooks.example.com/token-canary"}, "only loopback is allowed"),
    ],
)
def test_wrong_settings_are_said_once_send_nothing_and_lose_nothing(store, clock, caplog, wrong, words):
    ids = {failing_run(store, f"r-{n}") for n in range(3)}
    with receiver() as there:
        flush(store, msgspec.structs.replace(settings_for(there), **wrong), clock)
        assert there.received == []
        [error] = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
        assert words in error
        assert "canary" not in error
        clock.advance(3)
        flush(store, settings_for(there), clock)
    assert set(there.ids) == ids


def test_the_secret_is_in_no_log_no_error_and_not_in_the_file(store, clock, caplog, tmp_path):
    caplog.set_level(logging.DEBUG)

    def nonsense(handler):
        handler.wfile.write(b"nonsense\r\n")

    failing_run(store, "r-1")
    with receiver(says(500), says(302, Location="http://127.0.0.1:1/"), nonsense, says(410)) as there:
        made = Dispatcher(store, settings_for(there), clock, ReadingThreads())
        assert SECRET not in repr(made) + repr(vars(made).get("_endpoint"))
        for _ in range(4):
            flush(store, settings_for(there), clock)
            clock.advance(60)
    flush(store, Settings(webhook_url="http://127.0.0.1/#x", webhook_secret=SECRET), clock)
    assert len(there.received) == 4
    assert "HTTP 500" in caplog.text
    assert SECRET not in caplog.text
    written = raw(tmp_path / "journal.db")
    assert [
        row for (table,) in written.execute("SELECT name FROM sqlite_schema WHERE type = 'table'") for row in everything(written, table)
    ]
    assert not [
        row
        for (table,) in written.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")
        for row in everything(written, table)
        if SECRET in repr(row)
    ]
    written.close()


def everything(connection: Any, table: str) -> list[Any]:
    return list(connection.execute(f'SELECT * FROM "{table}"'))


# --- for a worker's lifetime -----------------------------------------------------------------------------------------------


def serving(store: Store, settings: Settings, clock: ManualClock, busy: bool = False) -> tuple[Dispatcher, asyncio.Task[None]]:
    courier = Dispatcher(store, settings, clock, ReadingThreads(), busy=lambda: busy)
    return courier, asyncio.ensure_future(courier.run())


async def ended(task: asyncio.Task[None], within_s: float = 60.0) -> None:
    task.cancel()
    async with asyncio.timeout(within_s):
        with pytest.raises(asyncio.CancelledError):
            await task


def test_a_poke_is_enough_and_a_retry_needs_none(store, clock, monkeypatch):
    monkeypatch.setattr(module, "_FIRST_RETRY_S", 0.2)

    async def main() -> None:
        courier, task = serving(store, settings_for(there), clock)
        await asyncio.sleep(0.05)  # asleep: nothing is due
        notice_id = failing_run(store, "r-1")
        courier.poke()
        await until(lambda: there.ids == [notice_id])
        await until(lambda: (due := store.next_notice()) is not None and due < clock.now() + 1_000_000)
        clock.advance(1)
        await until(lambda: store.next_notice() is None)
        assert there.ids == [notice_id, notice_id]
        await ended(task)

    with receiver(says(503), says(200)) as there:
        run(main())


def test_a_burst_of_pokes_is_one_look(store, clock, monkeypatch):
    looks = 0
    next_notice = store.next_notice

    def counted(*args: Any) -> Any:
        nonlocal looks
        looks += 1
        return next_notice(*args)

    async def main() -> None:
        courier, task = serving(store, Settings(), clock)
        await until(lambda: looks == 1)
        for _ in range(20):
            courier.poke()
            await asyncio.sleep(0)
        assert looks == 1  # the loop has run twenty iterations for other callbacks
        await until(lambda: looks == 2)
        await asyncio.sleep(2 * module._AFTER_YOU_S)
        assert looks == 2
        await ended(task)

    monkeypatch.setattr(store, "next_notice", counted)
    run(main())


def test_one_receiver_that_hangs_holds_up_neither_the_others_nor_the_end(store, clock):
    def hang(handler):
        there.closing.wait(30)

    async def main() -> None:
        ids = {failing_run(store, f"r-{n}") for n in range(20)}
        _, task = serving(store, settings_for(there), clock)
        await until(lambda: set(there.ids) == ids)
        await until(lambda: store.next_notice() == clock.now() + round(HOLD_S * 1e6))  # the three that hang are all that is left
        await ended(task)

    with receiver(hang, hang, hang, says(200)) as there:
        run(main())


def test_many_at_a_time_but_not_more_than_eight(store, clock):
    most = now = 0

    def count(handler):
        nonlocal most, now
        now += 1
        most = max(most, now)
        time.sleep(0.03)
        now -= 1
        says(200)(handler)

    ids = {failing_run(store, f"r-{n}") for n in range(40)}
    with receiver(count) as there:
        flush(store, settings_for(there), clock)
    assert set(there.ids) == ids
    assert len(there.ids) == 40
    assert 2 <= most <= 8


def test_what_there_is_no_room_for_stays_in_the_store_for_others(store, clock):
    def hang(handler):
        there.closing.wait(30)

    async def main() -> None:
        for n in range(20):
            failing_run(store, f"r-{n}")
        _, task = serving(store, settings_for(there), clock)
        await until(lambda: len(there.received) == 8)
        assert len(store.take_notices(clock.now(), 100, MINUTE)) == 12
        await ended(task)

    with receiver(hang) as there:
        run(main())


def test_flush_leaves_in_time_and_what_was_under_way_goes_out_again(store, clock):
    def hang(handler):
        there.closing.wait(200)

    notice_id = failing_run(store, "r-1")
    with receiver(hang) as there:
        started = time.monotonic()
        flush(store, settings_for(there), clock, timeout_s=2.0)  # time to begin with it, also on a busy machine
        assert time.monotonic() - started < webhook.GIVE_UP_S, "it was waited for the receiver"
        assert there.ids == [notice_id]
    clock.advance(HOLD_S)
    with receiver() as there:
        flush(store, settings_for(there), clock)
    assert there.ids == [notice_id]


def test_flush_waits_for_what_a_running_courier_has_under_way(store, clock):
    def slowly(handler):
        time.sleep(0.3)
        says(200)(handler)

    async def main() -> None:
        failing_run(store, "r-1")
        courier, task = serving(store, settings_for(there), clock)
        await until(lambda: there.received)
        await courier.flush(5)
        assert store.next_notice() is None
        await ended(task)

    with receiver(slowly) as there:
        run(main())
    assert len(there.received) == 1


def test_flush_waits_for_a_notice_that_is_just_being_taken(store, clock, monkeypatch):
    """The notice is taken on a thread, over a network.

    It is held, so no other process sends it before the hold ends.
    """
    take, taken = store.take_notices, threading.Event()

    def slowly(*args: Any) -> Any:
        found = take(*args)
        taken.set()
        time.sleep(0.3)
        return found

    async def main() -> None:
        failing_run(store, "r-1")
        monkeypatch.setattr(store, "take_notices", slowly)
        courier, task = serving(store, settings_for(there), clock, busy=True)
        await until(taken.is_set)
        assert courier.at_work
        await courier.flush(5)
        assert store.next_notice() is None
        await ended(task)

    with receiver() as there:
        run(main())
    assert len(there.received) == 1


def test_a_send_takes_less_than_the_hold():
    assert webhook.GIVE_UP_S + webhook._LOOKUP_S < HOLD_S


def test_the_loop_turns_while_somebody_holds_the_write_lock(store, clock, tmp_path):
    async def main() -> int:
        turns = 0
        lock = raw(tmp_path / "journal.db")
        lock.execute("BEGIN IMMEDIATE")
        _, task = serving(store, settings_for(there), clock, busy=True)
        watching = asyncio.ensure_future(stalls.watch())
        for _ in range(20):
            await asyncio.sleep(0.01)
            turns += 1
        watching.cancel()
        assert stalls.longest_s < 1, "the loop stood still"
        assert there.received == []
        lock.execute("COMMIT")
        lock.close()
        await until(lambda: store.next_notice() is None)
        await ended(task)
        return turns

    failing_run(store, "r-1")
    with receiver() as there, Stalls() as stalls:
        assert run(main()) == 20


def test_a_full_disk_stops_no_courier(tmp_path, clock, caplog, monkeypatch):
    monkeypatch.setattr(module, "_STORE_AGAIN_S", 0.05)
    disk = FaultyDisk()
    store = open_store(f"sqlite:///{tmp_path}/journal.db")

    async def main() -> None:
        failing_run(store, "r-1")
        disk.full = True
        _, task = serving(store, settings_for(there), clock)
        await until(lambda: "cannot look for notices" in caplog.text)
        assert not task.done()
        disk.full = False
        await until(lambda: store.next_notice() is None)
        await ended(task)

    try:
        with receiver() as there:
            run(main())
        assert len(there.received) == 1
    finally:
        store.close()
        disk.unregister()


def test_a_notice_that_cannot_be_put_into_words_stops_no_other(store, clock, caplog, monkeypatch):
    whole = messages.line

    def line(one):
        if one.row.run_id == "r-1":
            raise ValueError("no words")
        return whole(one)

    monkeypatch.setattr(messages, "line", line)
    failing_run(store, "r-1")
    other = failing_run(store, "r-2")
    with receiver() as there:
        flush(store, settings_for(there), clock)
        assert there.ids == [other]
        due = store.next_notice()
        assert due is not None
        assert clock.now() < due <= clock.now() + 2_000_000
        monkeypatch.undo()
        clock.advance(2)
        flush(store, settings_for(there), clock)
    assert len(there.ids) == 2
    assert found(store, "r-1").status == "failed"
    assert "an error of perdure's own" in caplog.text


# --- real processes --------------------------------------------------------------------------------------------------------

COURIER = """
import asyncio, os, sys
from perdure.settings import Settings
from perdure.store.open import open_store
from perdure.engine.threads import ReadingThreads
from perdure.engine.clock import Clock
from perdure.engine.notify.dispatcher import Dispatcher

store = open_store(sys.argv[1])
settings = Settings(webhook_url=sys.argv[2], webhook_secret=sys.argv[3])

async def main():
    print(os.getpid(), flush=True)
    sys.stdin.readline()
    await Dispatcher(store, settings, Clock(), ReadingThreads()).flush(float(sys.argv[4]))

asyncio.run(main())
store.close()
"""


def another(tmp_path: Path, there: Receiver, timeout_s: float = 20.0) -> Any:
    return python(COURIER, f"sqlite:///{tmp_path}/journal.db", there.url, SECRET, timeout_s)


def test_a_courier_killed_between_its_post_and_its_mark_is_followed_by_one_that_sends_the_same_id(store, tmp_path):
    def kill_the_sender(handler):
        os.kill(process.pid, signal.SIGKILL)
        process.wait()

    notice_id = failing_run(store, "r-1")
    clock = ManualClock(time.time())
    with receiver(kill_the_sender, says(200)) as there:
        process = another(tmp_path, there)
        first_line(process)
        process.stdin.write("go\n")
        process.stdin.flush()
        process.wait(timeout=60)
        assert process.returncode == -signal.SIGKILL
        end(process)
        assert there.ids == [notice_id]
        flush(store, settings_for(there), clock)  # the dead one's hold still counts
        assert there.ids == [notice_id]
        clock.now_us = ManualClock(time.time()).now() + round(HOLD_S * 1e6)
        flush(store, settings_for(there), clock)
    assert there.ids == [notice_id, notice_id]
    assert store.next_notice() is None


def test_couriers_of_several_processes_send_each_notice_once(store, tmp_path):
    ids = sorted(failing_run(store, f"r-{n}") for n in range(60))
    with receiver() as there:
        processes = [another(tmp_path, there) for _ in range(3)]
        for process in processes:
            first_line(process)
        for process in processes:
            process.stdin.write("go\n")
            process.stdin.flush()
        for process in processes:
            output(process)
    assert sorted(there.ids) == ids


def test_a_process_with_a_hanging_receiver_can_end(store, tmp_path):
    def hang(handler):
        there.closing.wait(30)

    failing_run(store, "r-1")
    with receiver(hang) as there:
        process = another(tmp_path, there, timeout_s=2.0)  # time to begin with it, also on a busy machine
        first_line(process)
        started = time.monotonic()
        process.stdin.write("go\n")
        process.stdin.flush()
        output(process)
        assert time.monotonic() - started < webhook.GIVE_UP_S, "it was waited for the receiver"
        assert len(there.received) == 1
