"""The audit trail: complete, in order, with event ids to join; and a live log whose disk errors stop no run."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.unit.inspect_tools import at_work, hold, make_waiting, make_zoo, shop, url_of

from perdure import Perdure
from perdure.cli.audit import parse_since
from perdure.core.events import Event
from perdure.engine.clock import Clock
from perdure.errors import InvalidInput
from perdure.inspect.audit import Audit, AuditFilter, AuditLog
from perdure.inspect.text import iso
from perdure.inspect.view import all_rows
from perdure.store.api import FINISHED, Place, RunRow, Store
from perdure.store.open import open_store

FIELDS = "ts run_id event_id seq type call tool caused_by idempotency_key actor error context".split()


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("zoo") / "journal.db"
    make_zoo(path)
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
def log_file(tmp_path: Path) -> Path:
    return tmp_path / "audit.jsonl"


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


# -- from the journal -----------------------------------------------------------------------------------------------------
def test_every_event_of_every_run_is_there_once_in_its_order(store: Store) -> None:
    lines = list(Audit(store).more())
    assert all(list(line) == FIELDS for line in lines)
    for row in all_rows(store):
        mine = [line for line in lines if line["run_id"] == row.run_id]
        assert [line["seq"] for line in mine] == list(range(1, row.seq + 1))
        ids = {line["seq"]: line["event_id"] for line in mine}
        causes = {event.seq: event.cause for event in store.read(row.run_id)}
        assert [line["caused_by"] for line in mine] == [ids.get(causes[line["seq"]] or 0) for line in mine]
    assert [line["ts"] for line in lines] == sorted(line["ts"] for line in lines)


def test_lines_say_who_acted_on_what_and_what_went_wrong(store: Store) -> None:
    lines = list(Audit(store).more())
    (resolved,) = [line for line in lines if line["type"] == "tool_call_resolved"]
    assert (resolved["actor"], resolved["tool"], resolved["call"]) == ("ann", "charge", 2)
    assert len(resolved["idempotency_key"]) == 64
    assert resolved["context"]["outcome"] == "happened"
    doubts = [line for line in lines if line["type"] == "tool_call_in_doubt"]
    assert {line["error"] for line in doubts} == {"TimeoutError: no answer"}
    assert {line["actor"] for line in lines if line["run_id"] == "done"} == {"user:17"}
    assert {line["actor"] for line in lines if line["type"] == "cancel_requested"} == {"ann"}


def test_lines_say_who_decided_what_from_where_and_which_child_or_budget_it_was(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    make_waiting(path)
    store = open_store(url_of(path))
    lines = list(Audit(store).more())
    store.close()

    def one(run_id: str, type_: str) -> dict[str, Any]:
        return next(line for line in lines if (line["run_id"], line["type"]) == (run_id, type_))

    decided = one("bought", "approval_decided")
    assert (decided["actor"], decided["tool"], decided["call"]) == ("ann", "refund", 1)
    assert decided["context"] | {"digest": "", "approval": ""} == {
        "agent": "refunds",
        "version": "1",
        "tenant": "default",
        "epoch": 1,
        "approval": "",
        "granted": True,
        "by": "ann",
        "digest": "",
        "edited": True,
        "source": "10.0.0.7",
        "note": "less",
    }
    assert decided["caused_by"] == one("bought", "approval_requested")["event_id"]
    started = one("bought", "tool_call_initiated")
    assert started["context"]["approval"] == decided["context"]["approval"]
    assert started["context"]["args_digest"] == decided["context"]["digest"]
    assert one("bought", "tool_call_completed")["context"]["usage"]["usd_micros"] == 12_300
    assert (one("asks", "approval_voted")["actor"], one("asks", "approval_voted")["context"]["source"]) == ("bob", "cli")
    assert (one("paused", "run_paused")["actor"], one("paused", "run_paused")["context"]["reason"]) == ("ann", "the bank is closed")
    assert (one("forced", "run_cancelled")["actor"], one("forced", "run_cancelled")["context"]["forced"]) == ("bob", True)
    assert (one("negative", "child_finished")["error"], one("negative", "child_finished")["context"]["child"]) == (
        "ValueError: negative",
        "negative/1",
    )
    assert one("negative/1", "run_created")["context"]["parent"] == "negative"
    assert one("thrifty", "budget_exceeded")["context"]["what"] == "calls"
    # Arguments and results are in the journal, not here.
    assert "o-2" not in json.dumps([line for line in lines if line["run_id"] == "bought"])


def test_lines_have_what_the_agent_decided_thought_and_reported(store: Store) -> None:
    said = {line["type"]: line["context"] for line in Audit(store).more() if line["run_id"] == "done"}
    about = {"agent": "shop", "version": "1", "tenant": "acme", "epoch": 1}
    assert said["decision_made"] == {**about, "choice": "go on", "among": ["go on", "stop"], "reason": "it is due"}
    assert said["thought_recorded"] == {**about, "text": "all done"}
    assert said["status_reported"] == {**about, "text": "looking it up"}


def test_the_line_of_an_approval_has_its_reason(tmp_path: Path) -> None:
    make_waiting(tmp_path / "journal.db")
    with closing(open_store(url_of(tmp_path / "journal.db"))) as store:
        asked = {line["run_id"]: line["context"] for line in Audit(store).more() if line["type"] == "approval_requested"}
    assert asked["refund"]["reason"] == "over $5"
    assert asked["asks"]["reason"].startswith("the editor said yes")


def test_arguments_and_results_are_in_a_line_only_if_that_is_asked_for(store: Store) -> None:
    without = json.dumps([line for line in Audit(store).more() if line["run_id"] in ("done", "resolved")])
    assert not [word for word in ("o-1", "history", "xxxx", "ch_7", "payloads") if word in without]
    lines = [line for line in Audit(store, payloads=True).more() if line["run_id"] in ("done", "resolved")]
    assert all(list(line) == [*FIELDS, "payloads"] for line in lines)
    by_type = {(line["run_id"], line["type"], line["call"]): line["payloads"] for line in lines}
    assert by_type["done", "run_created", None] == {"input": {"order": "o-1"}}
    assert by_type["done", "tool_call_initiated", 1] == {"args": {"order": "o-1"}}
    assert by_type["done", "tool_call_completed", 1] == {"result": {"order": "o-1", "cents": 500}}
    assert by_type["done", "tool_call_completed", 3] == {"result": "x" * 2000}, "it lies in a blob"
    assert by_type["done", "run_succeeded", None] == {"output": "x" * 2000}
    assert by_type["done", "decision_made", None] == {}
    assert by_type["resolved", "tool_call_resolved", 2] == {"result": {"id": "ch_7"}}


def test_lines_are_chosen_by_run_tenant_agent_type_and_time(store: Store) -> None:
    everything = list(Audit(store).more())

    def chosen(**wanted: Any) -> list[dict[str, Any]]:
        audit = Audit(store, AuditFilter(**wanted))
        lines = list(audit.more())
        assert not list(audit.more())
        return lines

    assert chosen(run_id="doubt") == [line for line in everything if line["run_id"] == "doubt"]
    assert chosen(run_id="doubt", tenant="acme") == []
    assert chosen(tenant="acme") == [line for line in everything if line["context"]["tenant"] == "acme"] != []
    assert chosen(agent="buy") == [line for line in everything if line["context"]["agent"] == "buy"] != []
    types = frozenset(("decision_made", "run_created"))
    assert chosen(types=types) == [line for line in everything if line["type"] in types] != []
    middle = store.read("doubt")[3].ts
    assert chosen(until=middle) == [line for line in everything if line["ts"] <= iso(middle)] != []
    assert chosen(since=middle + 1, until=store.read("resolved")[-1].ts)[-1]["type"] == "tool_call_resolved"


def test_the_lines_of_one_run_are_followed_by_its_new_ones(store: Store) -> None:
    audit = Audit(store, AuditFilter(run_id="queued"))
    assert [line["type"] for line in audit.more()] == ["run_created"]
    hold(store, "queued", "shop")
    assert [line["type"] for line in audit.more()] == ["run_claimed"]
    assert not list(audit.more())


def test_since_leaves_the_older_lines_out_and_still_knows_their_tools(store: Store) -> None:
    resolution = store.read("resolved")[-1]
    lines = list(Audit(store, AuditFilter(since=resolution.ts)).more())
    assert [(line["run_id"], line["type"]) for line in lines] == [("resolved", "tool_call_resolved"), ("queued", "run_created")]
    assert lines[0]["tool"] == "charge"
    assert lines[0]["caused_by"] is not None


def test_what_comes_later_is_given_once(store: Store) -> None:
    audit = Audit(store)
    assert len(list(audit.more())) > 50
    assert list(audit.more()) == []
    hold(store, "queued", "shop")
    (line,) = audit.more()
    assert (line["run_id"], line["type"], line["seq"]) == ("queued", "run_claimed", 2)
    assert list(audit.more()) == []


def test_runs_that_end_and_runs_that_come_between_two_looks_are_told_to_the_end(path: Path, store: Store) -> None:
    audit = Audit(store)
    told = list(audit.more())

    class SetBack(Clock):
        def now(self) -> int:
            return super().now() - 3_600_000_000  # completeness must come from no clock

    async def more(app: Perdure) -> None:
        await app.engine.drive("resolved")
        await app.start(shop, "o-9", id="quick")
        await app.engine.drive("quick")
        await app.start(shop, "o-10", id="created-only")

    at_work(path, more, clock=SetBack())
    told += audit.more()
    for row in all_rows(store):
        assert [line["seq"] for line in told if line["run_id"] == row.run_id] == list(range(1, row.seq + 1)), row.run_id
    assert list(audit.more()) == []


def test_a_look_that_was_broken_off_is_made_up_for(store: Store) -> None:
    audit = Audit(store)
    looking = audit.more()
    told = [next(looking) for _ in range(5)]
    told += audit.more()
    assert sorted(line["event_id"] for line in told) == sorted(line["event_id"] for line in Audit(store).more())


def test_what_was_old_at_first_is_told_when_it_goes_on(path: Path, store: Store) -> None:
    audit = Audit(store, AuditFilter(since=max(row.updated_at for row in all_rows(store)) + 1))
    assert list(audit.more()) == []
    at_work(path, lambda app: app.cancel("waiting"))
    at_work(path, lambda app: app.engine.drive("waiting"))
    lines = list(audit.more())
    assert [line["type"] for line in lines] == ["cancel_requested", "run_claimed", "run_cancelled"]
    assert all(line["caused_by"] for line in lines if line["type"] == "run_cancelled")


def test_following_reads_only_what_has_grown_and_forgets_what_has_ended(path: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    audit = Audit(store)
    list(audit.more())
    read: list[str] = []
    listed: list[str] = []
    reading, growing = store.read, store.growing

    def watched_read(run_id: str, after: int = 0) -> list[Event]:
        read.append(run_id)
        return reading(run_id, after)

    def watched_growing(after: Place = (0, 0), newest: Place = (0, 0), limit: int = 1000) -> list[tuple[Place, RunRow]]:
        page = growing(after, newest, limit)
        listed.extend(row.run_id for _, row in page)
        return page

    monkeypatch.setattr(store, "read", watched_read)
    monkeypatch.setattr(store, "growing", watched_growing)
    at_work(path, lambda app: app.engine.drive("queued"))
    assert list(audit.more())[-1]["type"] == "run_succeeded"
    assert read == ["queued"]
    listed.clear()
    assert list(audit.more()) == []
    assert sorted(listed) == sorted(row.run_id for row in all_rows(store) if row.status not in FINISHED) == ["doubt", "resolved", "waiting"]
    assert set(audit._trails) == set(listed), "whoever follows for months must not keep the runs of months"


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("15m", 10**15 - 900_000_000),
        ("2h", 10**15 - 7_200_000_000),
        ("1d", 10**15 - 86_400_000_000),
        ("0s", 10**15),
        ("1970-01-01T00:00:01Z", 1_000_000),
        ("1970-01-01T00:00:01", 1_000_000),
        ("1970-01-01T02:00:00+02:00", 0),
        ("1970-01-02", 86_400_000_000),
        ("999999999d", 0),
    ],
)
def test_since_takes_spans_and_iso_times(text: str, moment: int) -> None:
    assert parse_since(text, 10**15) == moment


@pytest.mark.parametrize("text", ["", "yesterday", "15", "-5m", "1.5h", "2026-13-01"])
def test_since_refuses_what_is_no_time(text: str) -> None:
    with pytest.raises(InvalidInput, match="is not a time"):
        parse_since(text, 10**15)


# -- live -----------------------------------------------------------------------------------------------------------------
def test_a_worker_writes_the_lines_that_the_journal_gives_later(tmp_path: Path, log_file: Path) -> None:
    path = tmp_path / "live.db"
    store = open_store(url_of(path))
    log = AuditLog(log_file, store.read)

    async def drive(app: Perdure) -> None:
        await app.start(shop, "o-1", id="r", actor="user:1")
        await app.engine.drive("r")

    at_work(path, drive, log.committed)
    log.close()
    assert lines_of(log_file) == list(Audit(store).more())
    store.close()
    assert log_file.stat().st_mode & 0o777 == 0o600


def test_earlier_events_may_come_first_and_nothing_is_written_twice(store: Store, log_file: Path) -> None:
    events = store.read("done")
    log = AuditLog(log_file)
    log.committed("done", events[:3])
    log.committed("done", events[:5])
    log.committed("done", events[5:])
    log.committed("done", [])
    assert lines_of(log_file) == [line for line in Audit(store).more() if line["run_id"] == "done"]


def test_what_a_worker_before_gave_up_in_good_order_is_not_written_again(store: Store, log_file: Path) -> None:
    hold(store, "waiting", "sleeper")  # it was released by the worker before
    events = store.read("waiting")
    AuditLog(log_file, store.read).committed("waiting", events[-1:])
    assert [line["type"] for line in lines_of(log_file)] == ["run_claimed"]


def test_what_a_dead_worker_may_not_have_written_is_written_again(store: Store, log_file: Path) -> None:
    hold(store, "queued", "shop")
    store.unregister("w-alive", 1)
    hold(store, "queued", "shop")
    AuditLog(log_file, store.read).committed("queued", store.read("queued")[-1:])
    assert [line["type"] for line in lines_of(log_file)] == ["run_created", "run_claimed", "run_claimed"]


def test_a_run_met_in_the_middle_without_history_is_told_as_far_as_it_is_known(store: Store, log_file: Path) -> None:
    events = store.read("doubt")
    AuditLog(log_file).committed("doubt", events[4:])
    lines = lines_of(log_file)
    assert [line["seq"] for line in lines] == [event.seq for event in events[4:]]
    assert (lines[0]["tool"], lines[0]["caused_by"], lines[0]["actor"]) == ("charge", None, None)


def test_a_rotated_log_is_opened_again(store: Store, log_file: Path, tmp_path: Path) -> None:
    log = AuditLog(log_file)
    log.committed("failed", store.read("failed"))
    log_file.rename(tmp_path / "audit.1")
    log.committed("queued", store.read("queued"))
    assert [line["run_id"] for line in lines_of(log_file)] == ["queued"]
    log_file.unlink()
    log_file.write_text("")
    log.committed("doubt", store.read("doubt"))
    assert {line["run_id"] for line in lines_of(log_file)} == {"doubt"}


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_said_once_and_stops_nothing(store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    link = tmp_path / "audit"
    link.symlink_to("/dev/full")
    log = AuditLog(link)
    with caplog.at_level(logging.WARNING, "perdure.audit"):
        for run_id in ("done", "failed", "doubt"):
            log.committed(run_id, store.read(run_id))
    assert [os.strerror(errno.ENOSPC) in record.getMessage() for record in caplog.records] == [True]
    link.unlink()
    log.committed("queued", store.read("queued"))
    assert [line["run_id"] for line in lines_of(link)] == ["queued"]


def test_a_history_that_cannot_be_read_stops_nothing(store: Store, log_file: Path, caplog: pytest.LogCaptureFixture) -> None:
    def broken(run_id: str) -> list[Any]:
        raise OSError("gone")

    with caplog.at_level(logging.WARNING, "perdure.audit"):
        AuditLog(log_file, broken).committed("doubt", store.read("doubt")[4:])
    assert "cannot read the history of run doubt" in caplog.text
    assert len(lines_of(log_file)) > 1


def test_a_folder_that_does_not_exist_is_told_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        AuditLog(tmp_path / "no" / "audit.jsonl")


def test_lines_of_a_hostile_text_stay_ascii(store: Store, log_file: Path) -> None:
    from perdure.core.events import CancelRequested, Event

    AuditLog(log_file).committed("r", [Event(1, "0" * 32, 0, 0, None, None, CancelRequested("\x1b[2J\u202eeve"))])
    assert log_file.read_bytes().isascii()
    assert b"\x1b" not in log_file.read_bytes()
    assert lines_of(log_file)[0]["actor"] == "\x1b[2J\u202eeve"
