"""The verbs that read, as a person on call uses them.

The real program in real processes, and a run that was killed.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import apsw
import pytest
from tests.servers import forked

ROOT = Path(__file__).resolve().parents[2]
AGENTS = """
import asyncio, os
from pathlib import Path
from perdure import Run, agent, tool

HERE = Path(__file__).parent

@tool(effect="read")
async def lookup(order: str) -> dict:
    return {"order": order, "cents": 500}

@tool(effect="once")
async def charge(order: str, cents: int) -> dict:
    with open(HERE / "ledger", "a") as ledger:
        ledger.write(f"{order} {cents}\\n")
    if (HERE / "kill").exists():
        (HERE / "kill").unlink()
        os.kill(os.getpid(), 9)
    while (HERE / "hold").exists():
        await asyncio.sleep(0.01)
    return {"id": "ch_1"}

@agent(version="1")
async def shop(run: Run, order: str) -> str:
    run.status("looking it up")
    details = await lookup(order)
    run.decide("charge", among=["charge", "wait"], reason="it is due")
    receipt = await charge(order, details["cents"])
    return receipt["id"]

@agent(version="1")
async def many(run: Run, calls: int) -> int:
    for number in range(calls):
        await lookup(str(number))
    return calls
"""


class Desk:
    """A folder with a journal in it, and the program run there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.children: list[subprocess.Popen[str]] = []
        (folder / "shop.py").write_text(AGENTS)

    def __call__(self, *args: str, code: int = 0) -> str:
        """What `perdure ARGS` says on stdout; it must end with this code, and never with a traceback."""
        done = forked.run(self._command(args), cwd=self.folder, env=self._env, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
        assert "Traceback" not in done.stderr, done.stderr
        return str(done.stdout)

    def refusal(self, *args: str, code: int) -> str:
        """The only line on stderr with which the program refuses; stdout is empty."""
        done = forked.run(self._command(args), cwd=self.folder, env=self._env, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stdout) == (code, ""), (done.returncode, done.stdout, done.stderr)
        assert re.fullmatch(r"perdure: [^\n]+\n", done.stderr), done.stderr
        return str(done.stderr)

    def json(self, *args: str, code: int = 0) -> Any:
        return json.loads(self(*args, "--json", code=code))

    def lines(self, *args: str, code: int = 0) -> list[Any]:
        return [json.loads(line) for line in self(*args, "--json", code=code).splitlines()]

    def begin(self, *args: str) -> subprocess.Popen[str]:
        child = forked.Popen(self._command(args), cwd=self.folder, env=self._env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.children.append(child)
        return child

    def edit(self, sql: str) -> None:
        """Change the file directly, without perdure."""
        with apsw.Connection(str(self.folder / "perdure.db")) as other:
            for (name,) in other.execute("SELECT name FROM sqlite_schema WHERE type = 'trigger'").fetchall():
                other.execute(f"DROP TRIGGER {name}")
            other.execute(sql)

    @property
    def ledger(self) -> list[str]:
        return (self.folder / "ledger").read_text().splitlines()

    @property
    def _env(self) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": str(ROOT / "src")}

    def _command(self, args: tuple[str, ...]) -> list[str]:
        return [sys.executable, "-m", "perdure", *args]

    def end(self) -> None:
        for child in self.children:
            if child.poll() is None:
                child.kill()
            child.communicate()


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    desk = Desk(tmp_path)
    yield desk
    desk.end()


@pytest.fixture
def killed(desk: Desk) -> Desk:
    """A run `r` whose process was killed inside its charge."""
    (desk.folder / "kill").touch()
    desk("run", "shop.py:shop", "order=o-7", "--id", "r", code=-signal.SIGKILL)
    assert desk.ledger == ["o-7 500"]
    return desk


def next_commands(page: str) -> list[list[str]]:
    """The commands that the page suggests, as words."""
    return [shlex.split(line) for line in page.splitlines() if line.startswith("  perdure ")]


def test_from_the_kill_to_the_end_by_typing_only_what_why_says(killed: Desk) -> None:
    desk = killed
    page = desk("why", "r")
    assert re.search(r"running on paper: worker \S+ held it and is dead, inside call 2 charge", page)
    assert "(dead)" in desk("list")
    words = next_commands(page)[0]
    assert words == ["perdure", "resume", "r"]
    desk(*words[1:], code=4)

    page = desk("why", "r")
    assert re.search(r"^needs attention: call 2 charge is in doubt since .+: the worker died inside it$", page, re.M)
    assert 'charge(cents=500, order="o-7")' in page
    assert desk.ledger == ["o-7 500"]
    told = desk.json("why", "r")
    assert told["in_doubt"][0]["keyless"]  # `charge` takes no `call`, so no service can know its key
    assert told["in_doubt"][0]["key"] not in page
    assert "the tool was not given the key, so look at the service behind charge for what this call would have left there" in page
    assert len(page.splitlines()) <= 40

    happened, not_happened = next_commands(page)[:2]
    assert happened[:5] == ["perdure", "resolve", "r", "2", "--happened"]
    assert "its request may still arrive until" in desk.refusal(*not_happened[1:], code=2)
    assert "refused while its request may still arrive" in " ".join(page.split())
    desk(*not_happened[1:], "--final")
    assert "queued" in desk("why", "r")
    desk(*next_commands(desk("why", "r"))[0][1:])
    assert desk.ledger == ["o-7 500", "o-7 500"]
    assert "succeeded at" in desk("why", "r")
    assert desk("verify", "r").startswith("run r: all ")
    assert "same" in desk("replay", "r")


def test_show_tells_the_run_now_and_as_of_any_event(killed: Desk) -> None:
    shown = killed.json("show", "r")
    wanted = "run_id agent version tenant actor status input output error created_at updated_at seq epoch calls cost".split()
    assert set(wanted) <= set(shown)
    assert [(call["call"], call["tool"], call["phase"], call["effect"]) for call in shown["calls"]] == [
        (1, "lookup", "completed", "read"),
        (2, "charge", "started", "once"),
    ]
    assert shown["input"] == {"order": "o-7"}
    before = killed.json("show", "r", "--at", "2")
    assert (before["seq"], before["status"], before["calls"]) == (2, "running", [])
    assert "as of event 1 of" in killed("show", "r", "--at", "1")
    assert "there is no event 99" in killed.refusal("show", "r", "--at", "99", code=6)


def test_events_are_json_lines_with_the_tool_and_the_key_of_their_call(killed: Desk) -> None:
    events = killed.lines("events", "r")
    assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
    assert all(
        set(event) == set("run_id seq event_id type ts call tool plan_step cause superseded_by key epoch data hash".split())
        for event in events
    )
    completed = next(event for event in events if event["type"] == "tool_call_completed")
    assert (completed["call"], completed["tool"]) == (1, "lookup")
    assert re.fullmatch("[0-9a-f]{64}", completed["key"])
    assert completed["data"]["result"] == {"json": {"cents": 500, "order": "o-7"}}
    assert len(killed("events", "r").splitlines()) == len(events)


def test_events_follow_streams_until_the_run_ends(desk: Desk) -> None:
    (desk.folder / "hold").touch()
    running = desk.begin("run", "shop.py:shop", "order=o-1", "--id", "r")
    deadline = time.monotonic() + 60
    while not (desk.folder / "ledger").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    following = desk.begin("events", "r", "--follow", "--json")
    assert following.stdout is not None
    seen = [json.loads(following.stdout.readline())["type"] for _ in range(3)]
    assert seen[0] == "run_created"
    assert re.search(r"running: worker \S+ holds it and is alive", desk("why", "r"))
    assert following.poll() is None
    (desk.folder / "hold").unlink()
    rest, errors = following.communicate(timeout=60)
    assert (following.returncode, errors) == (0, "")
    assert json.loads(rest.splitlines()[-1])["type"] == "run_succeeded"
    assert running.wait(timeout=60) == 0


def test_trace_tells_who_took_over_from_whom(killed: Desk) -> None:
    killed("resume", "r", code=4)
    events = killed.lines("events", "r")
    doubt = next(event["seq"] for event in events if event["type"] == "tool_call_in_doubt")
    links = killed.lines("trace", "r", str(doubt))
    assert (links[0]["seq"], links[-1]["seq"]) == (1, doubt)
    workers = [event["data"]["name"] for event in events if event["type"] == "run_claimed"]
    told = killed("trace", "r", str(doubt))
    assert f"worker {workers[1]} took the run over from worker {workers[0]}, which had not released it: its process is gone" in told
    assert "there is no event 99" in killed.refusal("trace", "r", "99", code=6)


def test_list_is_a_table_that_says_how_to_see_more(desk: Desk) -> None:
    for number in range(3):
        desk("run", "shop.py:many", "calls=1", "--id", f"r{number}")
    assert [line.split()[0] for line in desk("list").splitlines()] == ["run", "r2", "r1", "r0"]
    assert [run["run_id"] for run in desk.lines("list", "--limit", "2")] == ["r2", "r1"]
    assert desk.lines("list", "--status", "failed") == []
    assert len(desk.lines("list", "--agent", "many", "--tenant", "default", "--status", "succeeded")) == 3
    few = forked.run(desk._command(("list", "--limit", "1")), cwd=desk.folder, env=desk._env, capture_output=True, text=True, check=True)
    after = few.stderr.partition("more: perdure list --limit 1 --after ")[2].partition(",")[0]
    assert [run["run_id"] for run in desk.lines("list", "--after", after)] == ["r1", "r0"]
    few = forked.run(
        desk._command(("list", "--limit", "1", "--url", "sqlite:///perdure.db")),
        cwd=desk.folder,
        env=desk._env,
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"perdure list --limit 1 --after {after} --url sqlite:///perdure.db," in few.stderr
    assert "--status" in desk.refusal("list", "--status", "nonsense", code=2)


def test_verify_names_the_event_that_was_edited(killed: Desk) -> None:
    assert "all as they were written" in killed("verify")
    killed.edit("UPDATE perdure_events SET data = replace(data, '500', '900') WHERE seq = 5")
    told = killed("verify", "r", code=7)
    assert told.startswith("run r, event 5: it is not what was written")
    assert killed.json("verify", "r", code=7)["seq"] == 5
    assert re.search(r"^checked 1 run with \d+ events: 1 journal is not as written; 45 things", killed("verify", code=7), re.MULTILINE)


def test_verify_names_a_journal_whose_run_is_gone_and_the_guards_that_were_taken_away(killed: Desk) -> None:
    killed("run", "shop.py:many", "calls=1", "--id", "kept")
    killed.edit("DELETE FROM perdure_runs WHERE run_id = 'r'")
    told = killed("verify", code=7).splitlines()
    (gone,) = [line for line in told if "run 'r'" in line]
    assert "its row is gone" in gone
    assert len([line for line in told if line.startswith("the trigger perdure_")]) == 45
    assert told[-1].startswith("checked 1 run with ")
    assert told[-1].endswith("as they were written; 46 things are wrong with the database as a whole")
    problems = [line["problem"] for line in killed.lines("verify", code=7) if line["run_id"] is None]
    assert problems == told[:-1]
    failed = {check["name"]: check for check in killed.lines("doctor", code=1) if check["verdict"] == "FAIL"}
    assert failed["guards"]["found"] == f"{told[0]}; and 45 things more"
    assert failed["guards"]["way_out"] == "perdure verify"


def test_replay_tells_where_changed_code_parts_from_the_journal(desk: Desk) -> None:
    desk("run", "shop.py:shop", "order=o-1", "--id", "a")
    desk("run", "shop.py:shop", "order=o-2", "--id", "b")
    assert re.match(r"run a: same: \d+ activations, 2 calls\n", desk("replay", "a"))
    assert "2 runs: all the same" in desk("replay", "--all", "shop.py:shop")
    (desk.folder / "changed.py").write_text(
        AGENTS.replace('details["cents"]', 'details["cents"] + 1').replace('version="1"', 'version="2"')
    )
    told = desk("replay", "a", "changed.py:shop", code=7)
    assert "different at call 2 (it began with version 1; this code is 2)" in told
    assert '"cents":500' in told
    assert '"cents":501' in told
    assert desk("replay", "--all", "changed.py:shop") == "0 runs: all the same with this code; 2 finished runs of other versions left out\n"
    changed = desk.folder / "changed.py"
    for other in (AGENTS, AGENTS.replace('version="1"', "")):  # the version stays, or every edit makes one
        changed.write_text(other.replace('details["cents"]', 'details["cents"] + 1'))
        different = desk.lines("replay", "--all", "changed.py:shop", code=7)
        assert [(one["run_id"], one["call"], one["same"]) for one in different] == [("b", 2, False), ("a", 2, False)]
    assert "belongs to agent 'shop'" in desk.refusal("replay", "a", "shop.py:many", code=2)
    assert desk.ledger == ["o-1 500", "o-2 500"]  # replay performs nothing


WAITERS = """
import asyncio
from perdure import Run, agent, tool

@tool(effect="read")
async def look(order: str) -> str:
    return order

@agent(version="1")
async def waiter(run: Run, order: str) -> str:
    return await look(order) + await run.receive("go")
"""
START_MANY = """
import asyncio
from waiters import waiter
from perdure import Perdure

async def main() -> None:
    async with Perdure("sqlite:///perdure.db", agents=[waiter]) as app:
        for number in range({count}):
            await app.start(waiter, str(number), id=f"w{{number}}")
        stop = asyncio.Event()
        working = asyncio.create_task(app.work(stop=stop))
        while len(await app.list(status="waiting", limit=500)) < {count}:
            await asyncio.sleep(0.05)
        stop.set()
        await working

asyncio.run(main())
"""


@pytest.mark.parametrize("count", [2, 70])  # from 64 runs on, several processes compare
def test_before_a_deploy_every_unfinished_run_gets_a_verdict(desk: Desk, count: int) -> None:
    (desk.folder / "waiters.py").write_text(WAITERS)
    subprocess.run([sys.executable, "-c", START_MANY.format(count=count)], cwd=desk.folder, check=True, timeout=120)
    desk("run", "shop.py:shop", "order=o-1", "--id", "over")
    (desk.folder / "same.py").write_text(WAITERS)
    assert desk("replay", "--all", "--live-only", "same.py") == f"{count} unfinished runs: {count} go on with this code\n"
    (desk.folder / "newer.py").write_text(WAITERS.replace('version="1"', 'version="2"'))
    told = desk("replay", "--all", "--live-only", "newer.py")
    assert "run w1 (waiting): has version 1; this code is 2 and can go on with it\n    adopt it: perdure adopt w1" in told
    assert told.endswith(f"{count} unfinished runs: {count} go on if this version adopts them\n")
    (desk.folder / "broken.py").write_text(WAITERS.replace("await look(order)", 'await look("?" + order)'))
    told = desk("replay", "--all", "--live-only", "broken.py", code=7)
    expected = 'run w0 (waiting): diverges at event 3; it needs version 1\n    journal: call 1: look({"order":"0"})\n    code:    call 1: look({"order":"?0"})'
    assert expected in told
    verdicts = desk.lines("replay", "--all", "--live-only", "broken.py", code=7)
    assert {(one["verdict"], one["seq"], one["version"]) for one in verdicts} == {("diverges", 3, "1")}
    assert len(verdicts) == count
    assert "--live-only goes with --all" in desk.refusal("replay", "--live-only", "w1", code=2)


def test_audit_follows_all_runs(desk: Desk) -> None:
    desk("run", "shop.py:many", "calls=1", "--id", "before")
    assert {line["run_id"] for line in desk.lines("audit", "--since", "1h")} == {"before"}
    following = desk.begin("audit", "--follow", "--since", "0s")
    time.sleep(1.0)
    desk("run", "shop.py:many", "calls=2", "--id", "after")
    assert following.stdout is not None
    types = []
    while "run_succeeded" not in types:
        line = json.loads(following.stdout.readline())
        assert line["run_id"] == "after"
        types.append(line["type"])
    assert types[0] == "run_created"
    assert following.poll() is None
    assert "is not a time" in desk.refusal("audit", "--since", "soon", code=2)


def test_a_worker_writes_its_audit_log_live(desk: Desk) -> None:
    worker = desk.begin("worker", "shop.py", "--audit-log", "audit.jsonl")
    desk("run", "shop.py:many", "calls=2", "--id", "r", "--detach")
    deadline = time.monotonic() + 60
    while desk.json("show", "r")["status"] != "succeeded":
        assert time.monotonic() < deadline
    worker.send_signal(signal.SIGTERM)
    worker.communicate(timeout=60)
    assert [json.loads(line) for line in (desk.folder / "audit.jsonl").read_text().splitlines()] == desk.lines("audit")


def test_doctor_says_what_is_well_and_what_is_not(killed: Desk) -> None:
    killed("resume", "r", code=4)
    checks = {check["name"]: check for check in killed.lines("doctor")}
    assert {name for name, check in checks.items() if check["verdict"] != "ok"} == {"attention"}
    assert checks["attention"]["way_out"] == "perdure why r"
    named = {check["name"]: check for check in killed.lines("doctor", "--url", "sqlite:///perdure.db")}
    assert named["attention"]["way_out"] == "perdure why r --url sqlite:///perdure.db"
    os.chmod(killed.folder / "perdure.db", 0o644)
    assert "chmod 600" in killed("doctor")


def test_doctor_fails_on_a_file_that_is_no_database(desk: Desk) -> None:
    assert {check["verdict"] for check in desk.lines("doctor")} == {"ok", "warn"}  # there is no database yet
    (desk.folder / "perdure.db").write_text("this is not a database, and it is long enough to be read as one" * 50)
    (failed,) = [check for check in desk.lines("doctor", code=1) if check["verdict"] == "FAIL"]
    assert "not a SQLite database" in failed["found"]


def test_migrate_says_from_where_to_where_and_check_changes_nothing(desk: Desk) -> None:
    (desk.folder / "perdure.db").touch(mode=0o600)
    before = desk.json("migrate", "--check", code=7)
    assert (before["from"], before["to"], before["up_to_date"]) == (0, 0, False)
    assert (desk.folder / "perdure.db").stat().st_size == 0
    assert "made a journal, schema version" in desk("migrate")
    assert "up to date" in desk("migrate", "--check")
    desk.edit("INSERT INTO perdure_schema VALUES (99, 'x', 0)")
    assert "upgrade perdure" in desk.refusal("migrate", code=2)
    assert "upgrade perdure" in desk.refusal("list", code=2)


def test_migrate_makes_triggers_and_indexes_again_that_are_missing_and_says_so(desk: Desk) -> None:
    desk("run", "shop.py:many", "calls=0", "--id", "r")
    desk.edit("DROP INDEX perdure_runs_created")  # and all triggers
    assert "`perdure migrate` makes it again" in desk("verify", code=7)
    checked = desk("migrate", "--check", code=7)
    assert "the trigger perdure_runs_finished is missing: nothing was changed: perdure migrate" in checked
    assert "up to date" not in checked
    found = desk.json("migrate", "--check", code=7)
    assert (found["up_to_date"], found["to_restore"][0]) == (False, "the index perdure_runs_created is missing")
    assert len(found["to_restore"]) > 20
    assert "the trigger perdure_runs_finished is missing: made again" in desk("migrate")
    assert "up to date" in desk("migrate", "--check")
    desk("verify")


@pytest.mark.parametrize("status", ["failed", "cancelled"])
def test_a_row_that_was_edited_to_another_end_is_reported_with_the_way_out(desk: Desk, status: str) -> None:
    desk("run", "shop.py:many", "calls=0", "--id", "r")
    desk.edit(f"UPDATE perdure_runs SET status = '{status}'")
    for verb in (("resume", "r"), ("run", "shop.py:many", "calls=0", "--id", "r")):
        said = desk.refusal(*verb, code=2)
        assert f"run r is {status} by its row, and event 3 of its journal is run_succeeded: the row was edited" in said
        assert said.endswith("perdure verify r --repair\n")
    assert "perdure verify r --repair" in desk("why", "r")
    assert "checked 1 run with 3 events: 1 row contradicts its sound journal; 45 things are wrong" in desk("verify", code=7)
    desk("migrate")
    desk("verify", "r", "--repair", "--yes")
    desk("resume", "r")


def test_a_run_or_a_database_that_is_not_there_is_code_6(desk: Desk) -> None:
    assert f"there is no database perdure.db in {desk.folder};" in desk.refusal("list", code=6)
    assert not (desk.folder / "perdure.db").exists()
    desk("run", "shop.py:many", "calls=0", "--id", "r")
    for verb in (["show", "x"], ["events", "x"], ["why", "x"], ["trace", "x", "1"], ["verify", "x"], ["replay", "x"]):
        assert "there is no run x; `perdure list` shows the runs of sqlite:///perdure.db" in desk.refusal(*verb, code=6)


def test_a_reader_that_leaves_early_is_no_error(desk: Desk) -> None:
    desk("run", "shop.py:many", "calls=2000", "--id", "r")
    child = desk.begin("events", "r", "--json")
    assert child.stdout is not None
    assert child.stderr is not None
    child.stdout.readline()
    child.stdout.close()
    assert child.stderr.read() == ""
    assert child.wait(timeout=60) == 141


def forge(path: Path, *statements: str) -> None:
    """What a person with write access does: drop the triggers, change rows, create the triggers again."""
    connection = apsw.Connection(str(path))
    triggers = connection.execute("SELECT name, sql FROM sqlite_schema WHERE type = 'trigger'").fetchall()
    for name, _ in triggers:
        connection.execute(f"DROP TRIGGER {name}")
    for sql in statements:
        connection.execute(sql)
    for _, made in triggers:
        connection.execute(str(made))
    connection.close()


def test_verify_shows_a_cut_end_a_deleted_run_and_a_forged_row_and_repairs_the_row(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    for run_id in ("a", "b", "c"):
        desk("run", "shop.py:many", "calls=2", "--id", run_id)
    heads = desk("verify", "--heads")
    (tmp_path / "heads").write_text(heads)
    assert [json.loads(line)["n"] for line in heads.splitlines()] == [3]
    assert "all as they were written" in desk("verify", "--against", "heads")
    path = tmp_path / "perdure.db"

    forge(path, "UPDATE perdure_runs SET status = 'failed', tenant = 'rival' WHERE run_id = 'a'")
    assert "status is 'failed'" in desk("verify", "a", code=7) or "tenant is 'rival'" in desk("verify", "a", code=7)
    assert desk("verify", "--repair", code=2) == "", "without a terminal it does not ask, and does nothing without --yes"
    assert "tenant is 'rival'" in desk("verify", "a", code=7), "nothing was changed"
    assert "run a: repaired from its journal: " in desk("verify", "--repair", "--yes")
    assert "all as they were written" in desk("verify", "--against", "heads")
    desk.refusal("verify", "--yes", code=2)
    desk.refusal("verify", "a", "--heads", code=2)

    forge(
        path,
        "UPDATE perdure_runs SET seq = 3, status = 'queued', ready_at = 1, "
        "head = (SELECT hash FROM perdure_events WHERE run = perdure_runs.id AND seq = 3) WHERE run_id = 'b'",
        "DELETE FROM perdure_events WHERE seq > 3 AND run = (SELECT id FROM perdure_runs WHERE run_id = 'b')",
    )
    assert "its end was cut off: the journal-wide chain has event" in desk("verify", "b", code=7)
    assert "repaired" not in desk("verify", "b", "--repair", "--yes", code=7)
    forge(path, "DELETE FROM perdure_events WHERE run = 3", "DELETE FROM perdure_runs WHERE id = 3")
    told = desk("verify", code=7)
    assert "run b: its end was cut off" in told
    assert "run 'c': the journal-wide chain has it with" in told
    forge(path, "DELETE FROM perdure_chain WHERE n = 3")
    assert "'c'" not in desk("verify", code=7), "the last entry of a chain can be cut off with its run …"
    assert "has no entry 3, whose head was kept" in desk("verify", "--against", "heads", code=7), "… and a head that was kept shows it"


def test_the_record_of_a_run_that_was_killed_and_resolved_explains_itself(killed: Desk) -> None:
    killed("resume", "r", "shop.py:shop", code=4)
    stopped = killed("trace", "r")
    assert 'the agent decided "charge" among ["charge","wait"], because it is due' in stopped
    assert "the run needs attention (in_doubt)" in stopped.splitlines()[-1]
    killed("resolve", "r", "2", "--happened", '{"id": "ch_1"}', "--by", "ann")
    killed("resume", "r", "shop.py:shop")
    assert "the run succeeded" in killed("trace", "r").splitlines()[-1]
    assert not any(link["inferred"] for link in killed.lines("trace", "r"))

    lines = killed.lines("audit", "r")
    by_id = {line["event_id"]: line for line in lines}
    for line in lines:
        while line["caused_by"] is not None:
            line = by_id[line["caused_by"]]
        assert line["type"] == "run_created"
    (decided,) = killed.lines("audit", "--type", "decision_made", "--agent", "shop", "--tenant", "default")
    assert (decided["context"]["choice"], decided["context"]["reason"]) == ("charge", "it is due")
    assert killed.lines("audit", "--agent", "many") == []
    assert killed.lines("audit", "--until", "2020-01-01") == []
    assert "o-7" not in killed("audit", "r")
    assert killed.lines("audit", "r", "--type", "run_created", "--payloads")[0]["payloads"] == {"input": {"order": "o-7"}}
    assert "there is no run x" in killed.refusal("audit", "x", code=6)
    assert "use one of them" in killed.refusal("audit", "--follow", "--until", "1h", code=2)

    shown = killed("show", "r")
    assert 'decided "charge" among ["charge","wait"], because it is due' in shown
    (listed,) = killed.lines("list")
    assert (listed["said"], listed["failure"], listed["running"]) == ("looking it up", None, [])


def test_what_runs_now_is_in_show_and_list_for_programs(desk: Desk) -> None:
    (desk.folder / "hold").touch()
    desk.begin("run", "shop.py:shop", "order=o-8", "--id", "h")
    deadline = time.monotonic() + 60
    while not (desk.folder / "ledger").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    (listed,) = desk.lines("list")
    record = json.loads(desk("show", "h", "--json"))
    for one in (listed, record):
        assert [(call["call"], call["tool"], call["attempt"]) for call in one["running"]] == [(2, "charge", 1)]
        assert one["said"] == "looking it up"
    (desk.folder / "hold").unlink()
