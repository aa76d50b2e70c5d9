"""What `run`, `resume`, `why` and `migrate` print and refuse.

Start times, versions, silent workers, edited rows, typos.
"""

from __future__ import annotations

import json
import re
import shlex
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import apsw
import pytest
from tests.e2e.test_cli_acting import Shop
from tests.unit.store_tools import raw

from perdure.cli import OTHER_WORDS, VERBS, cli
from perdure.cli.who import os_user

AGENTS = """
import asyncio, os
from pathlib import Path
from perdure import Call, Outcome, Run, agent, tool

HERE = Path(__file__).parent

def note(line):
    with open(HERE / "ledger", "a") as ledger:
        ledger.write(line + "\\n")
    if (HERE / f"kill {line}").exists():
        (HERE / f"kill {line}").unlink()
        os.kill(os.getpid(), 9)

@tool(effect="read")
async def look(what: str) -> str:
    note(f"look {what}")
    while (HERE / "hold").exists():
        await asyncio.sleep(0.01)
    return what

@tool(effect="idempotent")
async def tell(what: str) -> str:
    note(f"tell {what}")
    return what

@tool(effect="keyed")
async def pay(cents: int, call: Call) -> str:
    note(f"pay {cents}")
    return "paid"

@tool(effect="once", timeout=1, settle=0)
async def charge(cents: int, call: Call) -> str:
    note(f"charge {cents}")
    return "charged"

@charge.reconcile
async def _(cents: int, call: Call) -> Outcome:
    return Outcome.happened("charged") if f"charge {cents}" in (HERE / "ledger").read_text() else Outcome.not_happened(final=True)

@tool(effect="once")
async def blind(cents: int) -> str:
    note(f"blind {cents}")
    return "done"

@agent(version="1")
async def shop(run: Run) -> str:
    await tell("a")
    await tell("b")
    await charge(1)
    await pay(2)
    await blind(3)
    return "end"

@agent(version="1")
async def looker(run: Run) -> str:
    return await look("x")

@agent(version="1")
async def pager(run: Run) -> str:
    await tell("page")
    return (await run.receive("go")) or "gone"
"""


class Desk(Shop):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        (folder / "desk.py").write_text(AGENTS)

    def types(self, run_id: str) -> list[str]:
        return [json.loads(line)["type"] for line in self("events", run_id, "--json").stdout.splitlines()]

    @property
    def ledger(self) -> list[str]:
        file = self.folder / "ledger"
        return file.read_text().splitlines() if file.exists() else []

    def kill_at(self, line: str) -> None:
        (self.folder / f"kill {line}").touch()


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    opened = Desk(tmp_path)
    yield opened
    (tmp_path / "hold").unlink(missing_ok=True)
    for child in opened.children:
        if child.poll() is None:
            child.send_signal(signal.SIGCONT)
            child.kill()
        child.communicate()


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


# -- a time to begin ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("given", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_a_run_that_waits_for_its_time_keeps_it_when_its_process_is_told_to_stop(desk: Desk, given: signal.Signals) -> None:
    waiting = desk.begin("run", "desk.py:looker", "--id", "r", "--not-before", "2h")
    assert waiting.stderr is not None
    assert "run r begins at" in waiting.stderr.readline()
    waiting.send_signal(given)
    assert "must not begin before" in waiting.communicate(timeout=60)[1]
    assert desk.types("r") == ["run_created"], "a release would have made it ready at once"
    assert desk.ledger == []


def test_a_run_whose_time_has_not_come_is_not_resumed_before_it_unless_the_user_says_so(desk: Desk) -> None:
    told = desk("run", "desk.py:looker", "--id", "r", "--not-before", "2h", "--detach").stderr
    assert told.rstrip().endswith("or now and here: perdure resume r --now")
    refused = desk("resume", "r", code=3)
    assert refused.stdout == ""
    assert re.search(
        r"^perdure: run r must not begin before \d{4}-\d\d-\d\dT\S+; a worker begins it then, or now and here: ", refused.stderr
    )
    assert desk.ledger == []
    assert desk.types("r") == ["run_created"]  # before it is paused below
    assert json.loads(desk("resume", "r", "--json", code=3).stdout)["status"] == "queued"
    assert "  perdure resume r --now\n      begin it now and here, before its time\n" in desk("why", "r").stdout
    desk("pause", "r")
    assert desk("unpause", "r").stdout.rstrip().endswith("or now and here: perdure resume r --now")
    again = desk("run", "desk.py:looker", "--id", "r", "--no-wait", code=3)  # the time is the run's, not the command's
    assert "must not begin before" in again.stderr
    assert desk.ledger == []
    words = shlex.split(refused.stderr.rpartition("here: ")[2])
    assert words == ["perdure", "resume", "r", "--now"]
    assert desk(*words[1:]).stdout == "x\n"
    assert desk.ledger == ["look x"]
    audited = [json.loads(line) for line in desk("audit", "r").stdout.splitlines()]
    (early,) = [line for line in audited if line["context"].get("early")]
    assert (early["type"], early["actor"], early["context"]["note"]) == ("run_unpaused", os_user(), "perdure resume --now")
    assert audited[early["seq"]]["type"] == "run_claimed"
    assert f"{os_user()} begins the run before its time: perdure resume --now" in desk("events", "r").stdout
    desk("verify")


# -- what `run` and `resume` say --------------------------------------------------------------------------------------------------
def test_the_id_that_perdure_chose_is_said_before_the_agent_acts(desk: Desk) -> None:
    desk.kill_at("look x")
    killed = desk("run", "desk.py:looker", code=-signal.SIGKILL)
    (line,) = killed.stderr.splitlines()
    found = re.fullmatch(r"perdure: run ([0-9a-f]{32}); if this process ends first: (perdure resume \1)", line)
    assert found, line
    assert desk(*shlex.split(found[2])[1:]).stdout == "x\n"
    assert desk("run", "desk.py:looker", "--id", "mine").stderr == ""


@pytest.mark.parametrize(
    ("line", "said", "code"),
    [
        ("tell a", "no call has a result yet; call 1 tell is made again", 0),
        ("tell b", "1 call comes from the journal; call 2 tell is made again", 0),
        ("charge 1", "2 calls come from the journal; call 3 charge is asked about: its reconcile hook says whether it happened", 0),
        ("pay 2", "3 calls come from the journal; call 4 pay is made again, with the same key", 0),
        (
            "blind 3",
            (
                "4 calls come from the journal; call 5 blind stays in doubt, and a person has to say what became of it: "
                "it may or may not have happened, and the tool has no reconcile hook"
            ),
            4,
        ),
    ],
)
def test_resume_says_what_comes_from_the_journal_and_what_happens_to_the_open_call(desk: Desk, line: str, said: str, code: int) -> None:
    desk.kill_at(line)
    desk("run", "desk.py:shop", "--id", "r", code=-signal.SIGKILL)
    before = len(desk.ledger)
    resumed = desk("resume", "r", code=code)
    assert resumed.stderr.splitlines()[0] == f"perdure: resuming run r: {said}"
    again = desk.ledger[before:]
    assert (line in again) == ("made again" in said), again  # and it does what the line says


def test_resume_of_a_run_without_an_open_call_says_so_and_of_a_finished_one_nothing(desk: Desk) -> None:
    desk("run", "desk.py:pager", "--id", "r", code=3)
    desk("signal", "r", "go", '"well"')
    assert desk("resume", "r").stderr == "perdure: resuming run r: 1 call comes from the journal, and its agent goes on\n"
    assert desk("resume", "r").stderr == ""


# -- versions ---------------------------------------------------------------------------------------------------------------------
def test_adopt_is_suggested_with_the_file_that_was_given_and_only_where_it_fits(desk: Desk) -> None:
    desk("run", "desk.py:pager", "--id", "r", code=3)
    code = AGENTS.replace('"1")\nasync def pager(run: Run) -> str:\n', '"2")\nasync def pager(run: Run) -> str:\n    # another one\n')
    (desk.folder / "new.py").write_text(code)
    (desk.folder / "other.py").write_text(code.replace("    # another one\n", '    await tell("first")\n'))
    fits = desk.refusal("resume", "r", "new.py:pager")
    words = shlex.split(fits.rpartition(": ")[2])
    assert words == ["perdure", "adopt", "r", "new.py:pager"]
    assert "adopt" not in (differs := desk.refusal("resume", "r", "other.py:pager"))
    assert "it cannot go on with the run, because it asks for something else: " in differs
    assert differs.endswith("the difference again: perdure replay r other.py:pager")
    assert "adopt" not in desk.refusal("run", "other.py:pager", "--id", "r")
    told = desk(*words[1:]).stdout
    assert told.endswith("or here: perdure resume r new.py:pager\n")
    assert desk.types("r")[-1] == "run_adopted"
    assert "there is nothing to adopt" in desk(*words[1:]).stdout
    desk("signal", "r", "go", '"well"')
    assert desk(*shlex.split(told.rpartition("here: ")[2])[1:]).stdout == "well\n"


# -- rows that were edited ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("status", ["running", "queued", "needs_attention"])
def test_a_finished_run_whose_row_says_otherwise_is_reported_and_not_appended_to(desk: Desk, status: str) -> None:
    desk("run", "desk.py:looker", "--id", "r")
    before = desk.types("r")
    with raw(desk.folder / "perdure.db") as other:
        for (name,) in other.execute("SELECT name FROM sqlite_schema WHERE type = 'trigger'").fetchall():
            other.execute(f"DROP TRIGGER {name}")
        other.execute("UPDATE perdure_runs SET status = ?, ready_at = 1", (status,))
    for verb in (("resume", "r", "desk.py:looker"), ("resume", "r"), ("run", "desk.py:looker", "--id", "r")):
        if status == "needs_attention" and verb[0] == "run":
            continue  # `run` leaves such a run alone
        refused = desk(*verb, code=2).stderr
        assert f"has ended (event {len(before)}, run_succeeded), and its row says {status}: the row was edited" in refused
        assert refused.endswith("perdure verify r --repair\n")
    for verb in (("signal", "r", "go", "1"), ("cancel", "r"), ("cancel", "r", "--force")):
        assert "the row was edited; nothing was written" in desk(*verb, code=2).stderr
    worker = desk.begin("worker", "desk.py")
    until(lambda: "needs_attention" in desk("list").stdout)
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(60) == 0
    page = desk("why", "r").stdout
    assert "its row was edited: the row says needs_attention, and by its journal the run ended at" in page
    assert page.count("perdure ") == 1, page
    assert "perdure verify r --repair" in page
    assert desk.types("r") == before
    desk("verify", "r", "--repair", "--yes")
    assert desk("resume", "r").stdout == "x\n"
    assert desk.ledger == ["look x"]


# -- workers that are suspended, and leases by the setting of their holder --------------------------------------------------------------
def test_a_suspended_worker_is_called_silent_and_resume_takes_its_run_over_when_its_lease_has_run_out(desk: Desk) -> None:
    (desk.folder / "hold").touch()
    (desk.folder / "perdure.toml").write_text("lease_s = 2\n")
    worker = desk.begin("worker", "desk.py")
    desk("run", "desk.py:looker", "--id", "r", "--detach")
    until(lambda: desk.ledger == ["look x"])
    until(lambda: "tool_call_initiated" in desk.types("r"))  # the intent of a `read` is written a little later
    assert "is held by another worker" in desk.refusal("resume", "r", code=8)
    worker.send_signal(signal.SIGSTOP)
    until(lambda: f":{worker.pid} (silent)" in desk("list").stdout)
    page = desk("why", "r").stdout
    assert "is silent, inside call 1 look, last seen" in page
    assert "dead" not in page
    assert "wait here until the silent worker's lease has run out, take the run over, and drive the run here" in page
    doctor = desk("doctor").stdout
    assert "1 silent, suspended or cut off from the database" in doctor
    assert "1 run held by silent workers: r" in doctor
    assert " dead" not in doctor.partition("1 silent")[2]
    assert re.search(r"silent for \d", desk("list", "--workers").stdout)
    assert "is silent (suspended, or cut off from the database)" in desk("list", "--unserved").stdout
    (desk.folder / "hold").unlink()
    desk.refusal("resume", "r", "--no-wait", code=8)
    taken = desk("resume", "r")
    assert taken.stdout == "x\n"
    assert f":{worker.pid}, which is silent since " in taken.stderr
    worker.send_signal(signal.SIGCONT)
    assert desk.types("r").count("run_succeeded") == 1


def test_a_worker_with_a_long_lease_is_shown_by_its_own_setting(desk: Desk) -> None:
    (desk.folder / "hold").touch()
    worker = desk.begin("run", "desk.py:looker", "--id", "r")  # lease_s = 30, by default
    until(lambda: desk.ledger == ["look x"])
    with raw(desk.folder / "perdure.db") as other:
        ((own,),) = other.execute("SELECT lease_us FROM perdure_workers").fetchall()
        assert own == 30_000_000
        time.sleep(0.3)  # longer than the lease of the process that looks
    for verb in (("why", "r"), ("list",), ("list", "--workers"), ("doctor",)):
        said = desk(*verb, PERDURE_LEASE_S="0.1").stdout
        assert not re.search(r"\bdead\b|silent|no worker is up|ran out", said.replace("no webhook", "")), said
    shown = json.loads(desk("list", "--workers", "--json", PERDURE_LEASE_S="0.1").stdout.splitlines()[0])
    assert (shown["alive"], shown["lease_s"], shown["lease_left_s"] > 20) == (True, 30.0, True)
    (desk.folder / "hold").unlink()
    assert worker.wait(60) == 0


def test_a_process_that_was_suspended_is_not_told_that_its_agent_blocked_the_loop(desk: Desk) -> None:
    (desk.folder / "busy.py").write_text(
        "import os, time\nfrom pathlib import Path\nfrom perdure import Run, agent, tool\n"
        '@tool(effect="read")\nasync def think() -> str:\n'
        '    Path("thinking").touch()\n'
        "    while not Path('go').exists():\n        time.sleep(0.01)\n    return 'thought'\n"
        '@agent(version="1")\nasync def thinker(run: Run) -> str:\n    return await think()\n'
    )
    # The loop is blocked for a moment when the process is suspended; a heartbeat is due every 2 s, and patience is 4 s.
    (desk.folder / "perdure.toml").write_text("lease_s = 8\n")
    process = desk.begin("run", "busy.py:thinker", "--id", "r")
    until((desk.folder / "thinking").exists)
    time.sleep(2.5)  # the watchdog has asked the loop for a sign
    process.send_signal(signal.SIGSTOP)
    time.sleep(9)
    process.send_signal(signal.SIGCONT)
    time.sleep(0.3)  # its heartbeat looks at the loop
    (desk.folder / "go").touch()
    out, err = process.communicate(timeout=60)
    assert out == "thought\n"
    assert "has not turned" not in err


# -- migrate ------------------------------------------------------------------------------------------------------------------------
def test_migrate_makes_the_file_and_with_check_only_says_that_there_is_none(desk: Desk) -> None:
    file = desk.folder / "perdure.db"
    told = desk("migrate", "--check", code=7).stdout
    assert told == f"{file}: there is no journal; nothing was changed: perdure migrate\n"
    assert not file.exists()
    made = json.loads(desk("migrate", "--json").stdout)
    assert (made["from"], made["up_to_date"]) == (0, True)
    assert file.stat().st_mode & 0o777 == 0o600
    assert "up to date" in desk("migrate").stdout
    assert desk("list").stdout == ""
    assert "`perdure migrate --url sqlite:///none.db` creates it" in desk.refusal("list", "--url", "sqlite:///none.db", code=6)
    with raw(file) as other:
        assert isinstance(other, apsw.Connection)


# -- other words --------------------------------------------------------------------------------------------------------------------
ASKED_FOR = (
    "lease checkpoint branch state history status reset reopen effects time-travel heartbeat ps logs kill stop abort rerun rollback".split()
)


@pytest.mark.parametrize("word", ASKED_FOR)
def test_a_word_of_another_tool_finds_its_verb(desk: Desk, word: str) -> None:
    refused = desk.refusal(word, "RUN")
    assert refused.startswith(f"perdure: there is no verb {word!r}; ")
    assert re.search(r"perdure [a-z]+ ", refused.removesuffix("all verbs: perdure --help"))


def test_every_command_behind_another_word_exists_with_its_options() -> None:
    assert not OTHER_WORDS.keys() & VERBS.keys()
    for word, said in OTHER_WORDS.items():
        commands = re.findall(r"perdure ([a-z]+)((?: (?:--?)?[A-Za-z_=-]+)*)", said)
        assert commands or "perdure --" in said, word
        for verb, rest in commands:
            assert verb in VERBS, (word, verb)
            command = cli.get_command(None, verb)  # type: ignore[arg-type]
            assert command is not None
            known = {option for one in command.params for option in one.opts}
            for option in re.findall(r"--[a-z-]+", rest):
                assert option in known, (word, verb, option)


# -- help, times, types -------------------------------------------------------------------------------------------------------------
def test_help_is_a_verb_too(desk: Desk) -> None:
    assert desk("help").stdout == desk("--help").stdout
    assert desk("help", "run").stdout == desk("run", "--help").stdout
    assert "there is no verb 'nope'" in desk.refusal("help", "nope")


def test_a_time_without_a_zone_is_taken_as_utc_and_that_is_said(desk: Desk) -> None:
    told = desk("run", "desk.py:looker", "--id", "r", "--detach", "--not-before", "2090-01-01T10:00").stderr
    assert "perdure: --not-before 2090-01-01T10:00 names no zone, and is taken as UTC: 2090-01-01T10:00:00Z\n" in told
    assert "names no zone" in desk("audit", "--since", "2026-01-01").stderr
    for named in ("2026-01-01T00:00Z", "2026-01-01T00:00+01:00", "2h"):
        assert desk("audit", "--since", named).stderr == ""


def test_an_unknown_type_of_events_is_refused_with_the_closest_types(desk: Desk) -> None:
    desk("run", "desk.py:looker", "--id", "r", "--detach")
    refused = desk.refusal("audit", "--type", "run_crated")
    assert "there is no type of events 'run_crated'; close to it: run_created" in refused
    assert refused.rstrip().endswith("perdure audit --help ends with all types")
    assert len(refused) < 250
    assert len(desk.refusal("audit", "--type", "nope")) < 150
    listed = " ".join(desk("audit", "--help").stdout.split())
    assert "run_created" in listed
    assert "tool_call_resolved." in listed
