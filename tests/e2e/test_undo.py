"""`perdure undo` as a person uses it: real processes, killed at every boundary of an undo of three calls.

A separate ledger counts the effects.
"""

from __future__ import annotations

import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.servers import forked

from perdure.core.events import ToolCallCompleted, ToolCallInitiated
from perdure.store.open import open_store

ROOT = Path(__file__).parents[2]
AGENTS = """
import os
import time
from pathlib import Path
from perdure import Call, Fatal, Run, agent, tool

HERE = Path(__file__).parent

def note(line):
    with open(HERE / "ledger", "a") as ledger:
        ledger.write(line + "\\n")

def undo(what, key=""):
    # The nth visit of a hook may be its process's last moment, before or after it has done what it does.
    if (HERE / "broken").exists():
        raise Fatal(f"{what} is down")
    fate = (HERE / "die").read_text() if (HERE / "die").exists() else ""
    if fate == f"before {what}":
        (HERE / "die").unlink()
        os.kill(os.getpid(), 9)
    seen = (HERE / "ledger").read_text().splitlines()
    note(f"dropped {what}" if key and f"un{what} {key}" in seen else f"un{what} {key}".strip())
    if fate == f"after {what}":
        (HERE / "die").unlink()
        os.kill(os.getpid(), 9)

@tool(effect="once")
async def pay(cents: int) -> str:
    note(f"pay {cents}")
    return f"r-{cents}"

@pay.compensate(effect="keyed")
async def _(result: str, call: Call) -> None:
    assert result == "r-900"
    undo("pay", call.key)

@tool(effect="once")
async def ship(to: str) -> None:
    note(f"ship {to}")

@ship.compensate
def _(to: str) -> None:
    while (HERE / "hold").exists():
        time.sleep(0.01)
    undo("ship")

@tool(effect="idempotent")
async def tag(order: str) -> None:
    note(f"tag {order}")

@tag.compensate(effect="idempotent")
async def _(order: str) -> None:
    undo("tag")

@tool(effect="once")
async def mail(to: str) -> str:
    note(f"mail {to}")
    return "sent \\x1b[31m"

@tool(effect="once")
async def gamble() -> None:
    raise TimeoutError("no answer")

@tool(effect="read")
async def look() -> str:
    return "nothing"

@agent(version="1")
async def trip(run: Run) -> None:
    await pay(900)
    await look()
    await ship("ann")
    await tag("o-1")

@agent(version="1")
async def letter(run: Run) -> None:
    await pay(900)
    await mail("bob")

@agent(version="1")
async def risky(run: Run) -> None:
    await gamble()

@agent(version="1")
async def idle(run: Run) -> None:
    await look()

@agent(version="1")
async def waiter(run: Run) -> None:
    await pay(900)
    await run.receive("go")
"""
DYING = "import sys; from tests.crash import fate; fate.seal({die!r}); from perdure.cli import main; main()"


class Office:
    """A folder with agents and a journal in it, and the real program run inside."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, *args: str, code: int = 0, die: list[Any] | None = None) -> subprocess.CompletedProcess[str]:
        """Run `perdure ARGS` to its end, which must be this exit code."""
        program = ["-m", "perdure"] if die is None else ["-c", DYING.format(die=die)]
        env = os.environ | {"PYTHONPATH": str(ROOT)}
        done = forked.run(
            [sys.executable, *program, *args], cwd=self.folder, env=env, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
        assert "Traceback" not in done.stderr, done.stderr
        return done

    @property
    def undone(self) -> list[str]:
        return [line for line in (self.folder / "ledger").read_text().splitlines() if line.startswith(("un", "dropped"))]

    def events(self, run_id: str) -> list[Any]:
        store = open_store(f"sqlite:///{self.folder}/perdure.db")
        try:
            return store.read(run_id) if store.get(run_id) is not None else []
        finally:
            store.close()

    def is_in_doubt(self, call: int) -> bool:
        """Whether the undo of `t` has an intent of this call and no result."""
        about = [event.body for event in self.events("t/undo") if event.call == call]
        return any(isinstance(body, ToolCallInitiated) for body in about) and not any(isinstance(body, ToolCallCompleted) for body in about)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs that have ended.

    `t` with three calls to undo, `l` with a call that cannot be undone, `i` without such calls.

    The run `w` waits.
    """
    office = Office(tmp_path_factory.mktemp("office"))
    (office.folder / "trip.py").write_text(AGENTS)
    for agent, run_id in (("trip", "t"), ("letter", "l"), ("idle", "i")):
        office("run", f"trip.py:{agent}", "--id", run_id)
    office("run", "trip.py:waiter", "--id", "w", code=3)
    return office.folder


@pytest.fixture
def office(finished: Path, tmp_path: Path) -> Office:
    return Office(Path(shutil.copytree(finished, tmp_path / "office")))


# -- killed -------------------------------------------------------------------------------------------------------------------
BOUNDARIES: list[tuple[str, str, int]] = [
    *(("create", moment, 1) for moment in ("before", "half", "kept")),
    *(("claim", moment, 1) for moment in ("before", "kept")),
    *(("append", moment, nth) for nth in (1, 2, 3, 4) for moment in ("before", "half", "kept")),
    *(("start", "before", nth) for nth in (1, 2, 3)),
    *(("arrive", "before", nth) for nth in (1, 2, 3)),
]


@pytest.mark.parametrize(("place", "moment", "nth"), BOUNDARIES)
def test_killed_at_a_boundary_the_same_command_goes_on(office: Office, place: str, moment: str, nth: int) -> None:
    before = office.events("t")
    office("undo", "t", "trip.py:trip", die=[place, moment, nth, "*"], code=-signal.SIGKILL)
    go_on(office)
    assert office.events("t") == before  # G10


@pytest.mark.parametrize("what", ["tag", "ship", "pay"])
@pytest.mark.parametrize("moment", ["before", "after"])
def test_killed_inside_a_hook_the_same_command_goes_on(office: Office, what: str, moment: str) -> None:
    (office.folder / "die").write_text(f"{moment} {what}")
    office("undo", "t", "trip.py:trip", code=-signal.SIGKILL)
    assert office.is_in_doubt(2) == (what == "ship")
    go_on(office)


def go_on(office: Office) -> None:
    """Continue by the effect class of the hook under way: `keyed` and `idempotent` hooks are called again.

    For a `once` hook, a person answers.
    """
    if office.is_in_doubt(2):
        happened = "unship" in office.undone
        stopped = office("undo", "t", "trip.py:trip", code=4)
        assert "perdure why t/undo" in stopped.stderr
        assert "then: perdure undo t" in stopped.stderr
        answer = ("--happened", "null") if happened else ("--did-not-happen", "--final")
        assert "perdure undo t" in office("resolve", "t/undo", "2", *answer).stdout
    assert office("undo", "t", "trip.py:trip").stdout == "run t is undone: 3 calls\n"
    undone = [line.split()[0] for line in office.undone]
    assert undone.count("unship") == 1
    assert undone.count("unpay") == 1  # the service drops the second one of a key
    assert undone.count("untag") >= 1
    assert list(dict.fromkeys(line for line in undone if line != "dropped")) == ["untag", "unship", "unpay"]
    office("verify")


def test_killed_again_and_again_it_still_ends(office: Office) -> None:
    for place, nth in (("create", 1), ("append", 1), ("append", 2), ("arrive", 1)):
        if office.is_in_doubt(2):
            break
        office("undo", "t", "trip.py:trip", die=[place, "before", nth, "*"], code=-signal.SIGKILL)
    go_on(office)


# -- said ---------------------------------------------------------------------------------------------------------------------
def test_a_second_undo_says_that_it_is_done_and_needs_no_code(office: Office) -> None:
    office("undo", "t", "trip.py:trip")
    (office.folder / "trip.py").unlink()
    assert office("undo", "t").stdout == "run t is undone: 3 calls\n"
    said = json.loads(office("undo", "t", "--json").stdout)
    assert (said["run_id"], said["undo"], said["status"], said["error"]) == ("t", "t/undo", "succeeded", None)
    assert [step["tool"] for step in said["undone"]] == ["tag", "ship", "pay"]
    assert len(office.undone) == 3


def test_a_dry_run_names_everything_and_does_nothing(office: Office) -> None:
    said = office("undo", "l", "trip.py:letter", "--dry-run").stdout.splitlines()
    assert said[0] == "cannot be undone:"
    assert said[1] == '  call 2 of l: mail({"to": "bob"}) → "sent \\u001b[31m"'
    assert said[2].endswith("; its tool has no compensate hook")
    assert said[3] == "would be undone, in this order:"
    assert said[4] == '  call 1 of l: pay({"cents": 900}) → "r-900"'
    plan = json.loads(office("undo", "l", "trip.py:letter", "--dry-run", "--json").stdout)
    assert [deed["tool"] for deed in plan["irreversible"]] == ["mail"]
    assert [(deed["tool"], deed["args"], deed["result"]) for deed in plan["steps"]] == [("pay", {"cents": 900}, "r-900")]
    assert office.undone == []
    assert office.events("l/undo") == []


def test_what_cannot_be_undone_needs_a_yes_without_a_terminal(office: Office) -> None:
    refused = office("undo", "l", "trip.py:letter", code=2)
    assert "mail" in refused.stderr
    assert refused.stderr.splitlines()[-1].endswith("say --yes to undo the other 1")
    assert office.undone == []
    done = office("undo", "l", "trip.py:letter", "--yes")
    assert "its tool has no compensate hook" in done.stderr
    assert done.stdout == "run l is undone: 1 call; not undone: call 2 (mail) of run l\n"
    assert len(office.undone) == 1


@pytest.mark.parametrize(("answer", "code", "undone"), [("y", 0, 1), ("n", 2, 0)])
def test_on_a_terminal_it_is_asked_about(office: Office, answer: str, code: int, undone: int) -> None:
    leader, follower = pty.openpty()
    try:
        asking = subprocess.Popen(
            [sys.executable, "-m", "perdure", "undo", "l", "trip.py:letter"],
            cwd=office.folder,
            stdin=follower,
            stdout=follower,
            stderr=follower,
        )
        os.write(leader, f"{answer}\n".encode())
        assert asking.wait(30) == code
        shown = os.read(leader, 65536).decode()
    finally:
        os.close(follower)
        os.close(leader)
    assert "cannot be undone:" in shown
    assert "undo the other 1 call, and leave these?" in shown
    assert len(office.undone) == undone


def test_a_run_that_has_changed_nothing_has_nothing_to_undo(office: Office) -> None:
    assert office("undo", "i", "trip.py:idle").stdout == "run i has changed nothing: there is nothing to undo\n"
    assert office.events("i/undo") == []


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (("w", "trip.py:waiter"), 2, "has not ended, it is waiting; only a run that has ended can be undone; end it: perdure cancel w"),
        (("nobody",), 6, "there is no run nobody"),
        (("t", "trip.py:letter"), 2, "belongs to agent 'trip', but the target is agent 'letter'"),
    ],
)
def test_what_cannot_be_undone_at_all_is_refused(office: Office, args: tuple[str, ...], code: int, words: str) -> None:
    assert words in office("undo", *args, code=code).stderr


def test_changed_code_is_refused(office: Office) -> None:
    file = office.folder / "trip.py"
    file.write_text(file.read_text().replace('await ship("ann")', 'await ship("bob")'))
    assert "run t cannot be undone with this code" in office("undo", "t", "trip.py:trip", code=7).stderr


def test_a_hook_that_fails_stops_it_there_and_the_same_command_tries_again(office: Office) -> None:
    (office.folder / "broken").touch()
    stopped = office("undo", "t", "trip.py:trip", code=3)
    assert "0 of 3 calls, and call 4 (tag) of run t could not be undone; try again: perdure undo t " in stopped.stderr
    assert "tag is down" in stopped.stderr
    (office.folder / "broken").unlink()
    assert office("undo", "t", "trip.py:trip").stdout == "run t is undone: 3 calls\n"
    assert [line.split()[0] for line in office.undone] == ["untag", "unship", "unpay"]


def test_a_call_whose_hook_fails_can_be_left_as_it_is(office: Office) -> None:
    (office.folder / "broken").touch()
    stopped = office("undo", "t", "trip.py:trip", code=3)
    approval = stopped.stderr.partition("perdure reject ")[2].split()[0]
    assert "; go on with it: perdure undo t " in office("reject", approval, "--reason", "by hand").stdout
    (office.folder / "broken").unlink()
    assert office("undo", "t", "trip.py:trip").stdout == "run t is undone: 2 calls; not undone: call 4 (tag) of run t\n"


def test_an_undo_in_which_everything_was_given_up_says_so_and_no_worker_is_asked_for(office: Office) -> None:
    (office.folder / "broken").touch()
    stopped = office("undo", "l", "trip.py:letter", "--yes", code=3)
    assert office("list", "--unserved", "--agent", "letter.undo").stdout == ""
    doctor = office("doctor").stdout
    assert "1 undo unfinished: of l" in doctor
    assert "→ perdure undo l" in doctor
    office("reject", stopped.stderr.partition("perdure reject ")[2].split()[0], "--reason", "by hand")
    said = office("undo", "l", "trip.py:letter").stdout
    assert said == "nothing of run l was undone; not undone: call 1 (pay) of run l, call 2 (mail) of run l\n"
    assert "no undo is unfinished" in office("doctor").stdout


def test_a_run_that_is_being_cancelled_is_not_to_be_cancelled_again(office: Office) -> None:
    office("cancel", "w")
    said = office("undo", "w", "trip.py:waiter", code=2).stderr
    assert (
        "it is cancelling; only a run that has ended can be undone; have it end: perdure resume w, or without its agent: perdure cancel w --force"
        in said
    )


def test_a_doubt_is_shown_without_a_result_and_its_run_is_ended_by_force(office: Office) -> None:
    office("run", "trip.py:risky", "--id", "d", code=4)
    said = office("undo", "d", "trip.py:risky", code=2).stderr
    assert "perdure why d says how, or end it without its agent: perdure cancel d --force" in said
    office("cancel", "d", "--force")
    plan = office("undo", "d", "trip.py:risky", "--dry-run").stdout.splitlines()
    assert plan[:2] == ["in doubt, and not undone:", "  call 1 of d: gamble({})"]
    assert plan[-1] == "nothing else to undo"


def test_whoever_comes_second_is_told_that_somebody_is_at_it(office: Office) -> None:
    (office.folder / "hold").touch()
    first = forked.Popen(
        [sys.executable, "-m", "perdure", "undo", "t", "trip.py:trip"], cwd=office.folder, stdout=subprocess.PIPE, text=True
    )
    try:
        deadline = time.monotonic() + 30
        while not office.is_in_doubt(2):
            assert time.monotonic() < deadline, "the hook was never called"
            time.sleep(0.02)
        assert "run t/undo" in office("undo", "t", "trip.py:trip", code=8).stderr
    finally:
        (office.folder / "hold").unlink()
        said, _ = first.communicate(timeout=60)
    assert (first.returncode, said) == (0, "run t is undone: 3 calls\n")
    assert len(office.undone) == 3


def test_a_cancelled_undo_says_how_far_it_came(office: Office) -> None:
    (office.folder / "broken").touch()
    office("undo", "t", "trip.py:trip", code=3)
    assert "perdure undo t" in office("cancel", "t/undo").stdout
    said = office("undo", "t", "trip.py:trip", code=5).stderr
    assert "the undo of run t has done 0 of 3 calls, and was cancelled: the rest stays as it is" in said


def test_an_undo_is_neither_undone_nor_resumed(office: Office) -> None:
    (office.folder / "die").write_text("before tag")
    office("undo", "t", "trip.py:trip", code=-signal.SIGKILL)
    assert "run t/undo is the undo of run t; continue it with: perdure undo t" in office("resume", "t/undo", code=2).stderr
    assert "an undo cannot be undone" in office("undo", "t/undo", code=2).stderr
    assert "perdure undo t" in office("why", "t/undo").stdout
    left = office("undo", "t", "trip.py:trip", "--dry-run").stdout
    assert left.splitlines()[1:] == ["  call 4 (tag) of run t", "  call 3 (ship) of run t", "  call 1 (pay) of run t"]
