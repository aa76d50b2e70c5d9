"""`perdure backup` and `perdure restore`: online, verified, killed at every boundary; restored runs wait for a person."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from tests.e2e import test_retry
from tests.e2e.test_bulk import batches, killed, make, statuses
from tests.e2e.test_retry import Desk
from tests.servers import forked
from tests.unit.postgres_tools import empty

from perdure.core.events import RunRestored
from perdure.errors import Conflict, StoreError
from perdure.store.open import open_store

desk, one = test_retry.desk, test_retry.one  # the same fixtures


@pytest.fixture(params=["sqlite", "postgres"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty database, to restore to."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/restored.db"
    return empty(request.getfixturevalue("postgres"))


def lived(desk: Desk) -> None:
    """Runs that have ended, wait, are paused, are in doubt, and wait for an approval; a schedule; a notice."""
    make(desk, "fan", "failed")
    make(desk, "waiter", "waiting", "paused")
    desk("pause", "paused", "--reason", "for now")
    make(desk, "refunder", "asking")
    desk.put("down")
    make(desk, "shipper", "doubt")
    desk.take("down")
    desk("start", "waiter", "--id", "queued")
    desk("schedules", "add", "waiter", "--id", "nightly", "--cron", "* * * * *")


def at(desk: Desk, url: str) -> Desk:
    """The same desk, on another database."""
    other = object.__new__(Desk)
    other.folder, other.url = desk.folder, url
    return other


# -- backup -----------------------------------------------------------------------------------------------------------
def test_a_backup_is_a_file_that_can_be_read_and_verified_and_in_which_nothing_is_driven(desk: Desk) -> None:
    lived(desk)
    told = desk("backup", "b.db")
    assert re.search(r"b\.db: 6 runs \(5 unfinished\) as of .*, verified; to restore it: perdure restore ", told), told
    assert oct((desk.folder / "b.db").stat().st_mode & 0o777) == "0o600"
    assert [path.name for path in desk.folder.glob("b.db*")] == ["b.db"], "nothing is left beside it"
    backup = at(desk, "sqlite:///b.db")
    assert {run: status for run, status in statuses(backup).items() if run != "queued"} == {
        run: status for run, status in statuses(desk).items() if run != "queued"
    }
    assert "is there already, and nothing is overwritten" in desk.refusal("backup", "b.db")
    for words in (("signal", "waiting", "go", "1"), ("resume", "waiting", "shop.py:waiter")):
        refused = backup.run(*words)
        assert (refused.returncode, "is a backup, and accepts no writes" in refused.stderr) == (2, True), refused.stderr
        assert "perdure restore FILE --to URL" in refused.stderr
        assert "was moved" not in refused.stderr
    assert "this is a backup of " in backup.run("backup", "c.db").stderr
    assert not (desk.folder / "c.db").exists()


def test_a_backup_is_taken_while_a_worker_writes_and_is_of_one_moment(desk: Desk) -> None:
    worker = forked.Popen(
        [sys.executable, "-m", "perdure", "worker", "shop.py:fan"],
        cwd=desk.folder,
        env=os.environ | {"PERDURE_URL": desk.url},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        for n in range(12):
            desk("start", "fan", "--id", f"f{n}")
            if n % 4 == 3:
                desk("backup", f"b{n}.db")
                found = open_store(f"sqlite:///{desk.folder}/b{n}.db")
                assert {f"f{m}" for m in range(n + 1)} == {row.run_id for row in found.list()}, "all that was acknowledged is in it"
                assert found.problems() == []
                found.close()
    finally:
        worker.send_signal(signal.SIGTERM)
        worker.wait(60)


NAMED = "perdure.cli.backup:give_name"


@pytest.mark.parametrize(
    ("method", "moment"),
    [("snapshot_to", "after"), ("mark_backup", "before"), ("mark_backup", "after"), (NAMED, "before"), (NAMED, "after")],
)
def test_a_backup_that_is_killed_is_whole_or_has_no_file_of_that_name(desk: Desk, method: str, moment: str) -> None:
    make(desk, "waiter", "w1")
    killed(desk, method, moment, 1, "backup", "b.db")
    assert (desk.folder / "b.db").exists() == ((method, moment) == (NAMED, "after"))
    if not (desk.folder / "b.db").exists():
        desk("backup", "b.db")
    desk("restore", "b.db", "--to", "sqlite:///x.db")
    assert statuses(at(desk, "sqlite:///x.db")) == {"w1": "needs_attention"}


def test_a_damaged_run_is_in_the_backup_and_is_named(one: Desk) -> None:
    make(one, "waiter", "w1", "w2")
    with sqlite3.connect(one.folder / "perdure.db") as database:
        database.execute("DROP TRIGGER perdure_events_no_update")
        database.execute("UPDATE perdure_events SET data = replace(data, 'waiter', 'waiteR') WHERE id >> 32 = 1")
    done = one.run("backup", "b.db")
    assert (done.returncode, "run w1 is not as it was written" in done.stdout) == (7, True), (done.stdout, done.stderr)


# -- restore ----------------------------------------------------------------------------------------------------------
def test_a_restored_run_waits_until_a_person_lets_it_go_on(desk: Desk, target: str) -> None:
    lived(desk)
    desk("backup", "b.db")
    before = (desk.folder / "b.db").read_bytes()
    # After the backup: the run goes on, and pays. The restored journal does not know that.
    desk("signal", "waiting", "go", '"x"')
    told = desk("restore", "b.db", "--to", target, "--by", "ann")
    assert "restored 6 runs with " in told
    assert "5 unfinished runs wait for a person: perdure list --where attention:restored" in told
    assert "1 schedule is paused" in told
    assert (desk.folder / "b.db").read_bytes() == before, "a restore does not write to the backup"
    there = at(desk, target)
    found = {row["run_id"]: (row["status"], row["attention"]) for row in there.lines("list")}
    assert found.pop("failed") == ("failed", None)
    assert set(found.values()) == {("needs_attention", "restored")}
    assert len(there.lines("list", "--where", "attention:restored")) == 5
    assert "all as they were written" in there("verify")
    restored = [event for event in there.lines("events", "waiting") if event["type"] == "run_restored"]
    assert [event["data"]["by"] for event in restored] == ["ann"]
    why = there("why", "waiting")
    assert "restored from a backup of 20" in why
    assert "what happened since is unknown" in why
    assert "perdure unpause waiting" in why
    # No post lets it go on, and no worker takes it.
    there("signal", "waiting", "go", '"x"')
    there("cancel", "paused")
    approval = there.lines("approvals")[0]["approval"]
    there("approve", approval, "--by", "bob")
    there("resolve", "doubt", "1", "--happened", '"shipped"')
    assert {status for run, status in statuses(there).items() if run != "failed"} == {"needs_attention"}
    for run_id in ("waiting", "doubt", "asking", "queued"):
        assert "was restored from a backup" in there.refusal(
            "resume", run_id, "shop.py:waiter" if run_id == "queued" else f"shop.py:{AGENT[run_id]}"
        )
    assert "was restored from a backup" in there.refusal("retry", "waiting", "--yes")
    assert "all as they were written" in there("verify")
    # A person decides: one run, and then all others.
    ledger = desk.ledger
    there("unpause", "doubt", "--note", "looked at the carrier's list")
    assert there("resume", "doubt") == "shipped\n"
    left = there.run("unpause", "--where", "status:needs_attention", "--yes")
    assert "4 left out: restored from a backup" in left.stderr
    assert there("unpause", "--where", "attention:restored -id:waiting", "--yes").startswith("3 runs may go on")
    assert there("resume", "asking") == "refunded\n"
    there("resume", "paused", code=5)  # its cancel counts now
    there("unpause", "waiting")
    assert there("resume", "waiting") == "x\n"
    assert desk.ledger == [*ledger, "refund 100"]
    assert "all as they were written" in there("verify")
    assert there.lines("schedules", "list")[0]["status"] == "paused"


AGENT = {"waiting": "waiter", "doubt": "shipper", "asking": "refunder"}


def test_a_run_that_a_worker_held_at_the_backup_is_taken_over_and_its_old_worker_is_refused(desk: Desk, target: str) -> None:
    store = open_store(desk.url.replace("sqlite:///", f"sqlite:///{desk.folder}/") if desk.url.startswith("sqlite") else desk.url)
    desk("start", "waiter", "--id", "held")
    from perdure.store.api import Served

    store.register("old", "h:1", 1, 10**15)
    (claimed,) = store.claim("old", [Served("waiter", "1")], 1, 10**15 * 2)
    desk("backup", "b.db")
    desk("restore", "b.db", "--to", target)
    there = open_store(target)
    row = there.get("held")
    assert row is not None
    assert (row.holder, row.status, row.attention) == (None, "needs_attention", "restored")
    assert [type(event.body).__name__ for event in there.read("held")][-1] == RunRestored.__name__
    store.close()
    from perdure.core.events import RunUnpaused

    there.post("held", None, RunUnpaused("ann"), event_id="1" * 32, now=10**15 * 3)
    there.register("new", "h:2", 2, 10**15 * 3)
    (again,) = there.claim("new", [Served("waiter", "1")], 1, 10**15 * 4)
    assert again.lease.epoch > claimed.lease.epoch
    assert again.lease.nonce != claimed.lease.nonce
    there.close()


POINTS = [("open_batch", "before", 1), ("open_batch", "after", 1), ("take_in", "before", 1), ("take_in", "after", 1)]
POINTS += [("take_in_schedules", "before", 1), ("change_schedule", "before", 1), ("end_batch", "before", 1)]


@pytest.mark.parametrize(("method", "moment", "nth"), POINTS)
def test_a_restore_that_is_killed_goes_on_and_no_worker_starts_before_it_has_ended(
    one: Desk, target: str, method: str, moment: str, nth: int
) -> None:
    lived(one)
    one("backup", "b.db")
    killed(one, method, moment, nth, "restore", "b.db", "--to", target)
    there = open_store(target)
    assert all(row.status in ("failed", "needs_attention") and row.ready_at is None for row in there.list())
    if (method, moment) != ("open_batch", "before"):
        with pytest.raises(Conflict, match="is being restored from a backup"):
            there.register("w", "h:1", 1, 1)
    there.close()
    one("restore", "b.db", "--to", target)
    found = at(one, target)
    assert {row["run_id"]: row["status"] for row in found.lines("list")} == {
        "failed": "failed",
        **dict.fromkeys(("waiting", "paused", "asking", "doubt", "queued"), "needs_attention"),
    }
    for run_id in ("waiting", "doubt"):
        assert sum(event["type"] == "run_restored" for event in found.lines("events", run_id)) == 1
    assert found.lines("schedules", "list")[0]["status"] == "paused"
    assert "all as they were written" in found("verify")
    assert "is not empty" in one.refusal("restore", "b.db", "--to", target)


def test_only_a_backup_is_restored_and_only_to_an_empty_database(one: Desk, tmp_path: Path) -> None:
    make(one, "waiter", "w1")
    one("backup", "b.db")
    assert "there is no file nosuch.db" in one.refusal("restore", "nosuch.db", "--to", "sqlite:///x.db", code=6)
    assert "is no backup" in one.refusal("restore", "perdure.db", "--to", "sqlite:///x.db")
    assert not (tmp_path / "x.db").exists()
    assert "is not empty" in one.refusal("restore", "b.db", "--to", "sqlite:///perdure.db")
    (tmp_path / "text.db").write_text("no database")
    assert "text.db" in one.refusal("restore", "text.db", "--to", "sqlite:///x.db")
    one("restore", "b.db", "--to", "sqlite:///x.db")
    shutil.copy(tmp_path / "b.db", tmp_path / "c.db")
    assert "is not empty" in one.refusal("restore", "c.db", "--to", "sqlite:///x.db")


def test_notices_that_were_not_sent_are_not_sent_by_the_restored_journal(one: Desk) -> None:
    lived(one)
    with sqlite3.connect(one.folder / "perdure.db") as database:
        database.execute("INSERT INTO perdure_notices (run, seq, next_at) SELECT id, 1, 0 FROM perdure_runs LIMIT 2")
    one("backup", "b.db")
    told = json.loads(one("restore", "b.db", "--to", "sqlite:///x.db", "--json"))
    assert told["notices_not_sent"] == 2
    there = open_store(f"sqlite:///{one.folder}/x.db")
    assert there.next_notice() is None
    there.close()


def test_a_batch_that_lets_restored_runs_go_on_goes_on_by_its_id(one: Desk) -> None:
    make(one, "waiter", "w1", "w2", "w3")
    one("backup", "b.db")
    one("restore", "b.db", "--to", "sqlite:///x.db")
    there = at(one, "sqlite:///x.db")
    killed(there, "post", "after", 1, "unpause", "--where", "attention:restored", "--yes")
    batch = batches(there, "w3")[-1]
    assert there.run("unpause", "--batch", batch, "--yes").stdout.startswith("2 runs may go on")
    assert set(statuses(there).values()) == {"queued"}


def test_a_forced_cancel_ends_a_restored_run(one: Desk) -> None:
    make(one, "waiter", "w1")
    one("backup", "b.db")
    one("restore", "b.db", "--to", "sqlite:///x.db")
    there = at(one, "sqlite:///x.db")
    assert there("cancel", "--where", "attention:restored", "--force", "--yes") == "1 run cancelled\n"
    assert "all as they were written" in there("verify")


def test_a_backup_file_refuses_every_write(one: Desk) -> None:
    make(one, "waiter", "w1")
    one("backup", "b.db")
    store = open_store(f"sqlite:///{one.folder}/b.db")
    with pytest.raises(StoreError, match="is a backup, and accepts no writes"):
        store.register("w", "h:1", 1, 1)
    store.close()
