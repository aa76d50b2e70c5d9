"""`perdure schedules` as a user types it: a schedule from the shell, a worker that starts its ticks, and what people see."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

SHOP = """
from perdure import Cron, Run, Schedule, Tick, agent

@agent(version="1", schedule=Schedule(Cron("0 7 * * mon-fri", tz="Europe/Berlin"), input={"date": Tick("%Y-%m-%d")}))
async def report(run: Run, date: str) -> str:
    return f"{date} {run.scheduled_for}"
"""


def perdure(folder: Path, *words: str, code: int = 0) -> str:
    done = subprocess.run([sys.executable, "-m", "perdure", *words], cwd=folder, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == code, (words, done.returncode, done.stdout, done.stderr)
    return done.stdout if code == 0 else done.stderr


def test_a_schedule_from_the_shell_starts_runs_and_its_life_can_be_read(tmp_path):
    (tmp_path / "shop.py").write_text(SHOP)
    perdure(tmp_path, "schedules", "add", "report", 'date:={"$tick": "%H:%M:%S"}', "--every", "1s", "--id", "often", "--by", "ann")
    worker = subprocess.Popen([sys.executable, "-m", "perdure", "worker", "shop.py"], cwd=tmp_path, stderr=subprocess.DEVNULL)
    try:
        deadline_s = time.monotonic() + 60
        while True:
            shown = json.loads(perdure(tmp_path, "schedules", "show", "often", "--json"))
            if shown["last_tick"] is not None:
                break
            assert time.monotonic() < deadline_s, shown
        listed = {one["id"]: one for one in map(json.loads, perdure(tmp_path, "schedules", "list", "--json").splitlines())}
        assert listed["report"]["when"] == "0 7 * * mon-fri (Europe/Berlin)"
        assert "ok    schedules     2 schedules are active" in perdure(tmp_path, "doctor")
    finally:
        worker.send_signal(signal.SIGTERM)
        worker.wait(60)
    perdure(tmp_path, "schedules", "pause", "often", "--note", "enough", "--by", "bob")
    assert "paused by bob: enough" in perdure(tmp_path, "schedules", "show", "often")
    run_id = shown["last_run"]
    assert f"started by schedule often for its tick {run_id.partition('@')[2]}" in perdure(tmp_path, "why", run_id)
    lines = [json.loads(line) for line in perdure(tmp_path, "audit", "--type", "schedule_set", "--type", "schedule_paused").splitlines()]
    assert {(line["schedule"], line["actor"]) for line in lines} == {("often", "ann"), ("often", "bob"), ("report", "code:report@1")}
    assert "all as they were written" in perdure(tmp_path, "verify")
    assert "report: no live worker serves agent report" in perdure(tmp_path, "doctor")


def test_the_next_ticks_are_shown_in_local_time_and_utc(tmp_path):
    said = perdure(
        tmp_path, "schedules", "next", "--cron", "30 2 * * *", "--tz", "Europe/Berlin", "--after", "2026-10-24T12:00Z", "-n", "2"
    )
    assert said.splitlines()[1:] == [
        "Sun 2026-10-25 02:30:00 +0200  2026-10-25T00:30:00Z  at once",
        "Mon 2026-10-26 02:30:00 +0100  2026-10-26T01:30:00Z  at once",
    ]


def test_mistakes_are_one_line_that_says_what_is_wrong(tmp_path):
    (tmp_path / "shop.py").write_text(SHOP)
    for words, said in (
        (("add", "report", "--cron", "0 7 * * mo"), "field 5 (day of week), 'mo'"),
        (("add", "report", "--cron", "0 7 * * *", "--tz", "Mars/Base"), "there is no such time zone"),
        (("add", "report"), "say when"),
        (("add", "report", "--every", "5m", "--tz", "UTC"), "--tz belongs to --cron"),
        (("add", "shop.py:report", "--every", "5m"), "the argument date is missing"),
        (("add", "report", "--declared"), "declares no schedule"),
    ):
        error = perdure(tmp_path, "schedules", *words, code=2)
        assert said in error
        assert len(error.splitlines()) == 1
    perdure(tmp_path, "schedules", "add", "shop.py:report", "--declared")
    assert "--replace" in perdure(tmp_path, "schedules", "add", "report", "--every", "5m", code=2)
    perdure(tmp_path, "schedules", "remove", "report")
    assert "was removed" in perdure(tmp_path, "schedules", "resume", "report", code=6)
    assert "there is no schedule x" in perdure(tmp_path, "schedules", "run-now", "x", code=6)
