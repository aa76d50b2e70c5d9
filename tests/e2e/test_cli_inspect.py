"""`perdure inspect` as a person types it: real processes, real journals, a real terminal for the debugger."""

from __future__ import annotations

import hashlib
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import apsw
import pytest
from tests.e2e.test_cli_reading import Desk

CANARY = "canary-4711-value"
SHOP = f"""
import asyncio, os
from dataclasses import dataclass
from pathlib import Path
from perdure import Approval, Run, agent, tool

HERE = Path(__file__).parent
print("the module prints")

@dataclass
class Login:
    user: str
    password: str

class Hostile:
    def __repr__(self):
        os.abort()

@tool(effect="read")
async def lookup(order: str) -> dict:
    with open(HERE / "ledger", "a") as ledger:
        ledger.write(f"lookup {{order}}\\n")
    return {{"order": order, "cents": 500, "note": "\\x1b[2J\\u202e"}}

@tool(effect="once", approval=Approval(by="ann"))
async def refund(order: str, cents: int) -> str:
    with open(HERE / "ledger", "a") as ledger:
        ledger.write(f"refund {{order}}\\n")
    return "r-1"

@tool(effect="once")
async def die() -> None:
    os.kill(os.getpid(), 9)

@agent(version="1")
async def support(run: Run, order: str) -> str:
    print("the agent prints")
    api_key = "{CANARY}"
    login = Login("ann", api_key)
    header = {{"Authorization": f"Bearer {{api_key}}", "text": f"with {{api_key}}"}}
    hostile = Hostile()
    details = await lookup(order)
    try:
        return await refund(order, details["cents"])
    finally:
        with open(HERE / "ledger", "a") as ledger:
            ledger.write("the agent wrote\\n")
        await lookup("cleaning up")

@agent(version="1")
async def fails(run: Run, order: str, api_key: str) -> float:
    details = await lookup(order)
    def share(cents: int, parts: int) -> float:
        return cents / parts
    return share(details["cents"], 0)

@agent(version="1")
async def dies(run: Run) -> None:
    before = "the crash"
    await die()
"""


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    desk = Desk(tmp_path)
    (tmp_path / "shop.py").write_text(SHOP)
    yield desk
    desk.end()


@pytest.fixture
def waiting(desk: Desk) -> Desk:
    """A run `r` that waits for an approval."""
    desk("run", "shop.py:support", "order=o-7", "--id", "r", "--no-wait", code=3)
    return desk


@pytest.fixture
def failed(desk: Desk) -> Desk:
    """A run `f` that has failed."""
    desk("run", "shop.py:fails", "order=o-7", f"api_key={CANARY}", "--id", "f", code=1)
    return desk


def contents(desk: Desk) -> dict[str, str]:
    """Every table of the journal as text, the bytes of the file, and the ledger."""
    with apsw.Connection(str(desk.folder / "perdure.db")) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")]
        found = {table: repr(connection.execute(f"SELECT * FROM {table}").fetchall()) for table in tables}
    found["bytes"] = hashlib.sha256((desk.folder / "perdure.db").read_bytes()).hexdigest()
    found["ledger"] = (desk.folder / "ledger").read_text()
    return found


def test_a_waiting_run_shows_its_line_its_variables_and_what_it_waits_for(waiting: Desk) -> None:
    page = waiting("inspect", "r")
    assert re.search(r"^run r  support@1, at event 7; its agent was last woken by event 4 \(tool_call_completed\) at 20\S+Z$", page, re.M)
    assert re.search(r"^agent waits for call 2 refund\(cents=500, order='o-7'\), which waits for ap-[0-9a-f]{20}$", page, re.M)
    line = SHOP.split("return await refund")[0].count("\n") + 1
    assert f"\n  shop.py:{line} in support\n" in page
    assert f'\n  >{line:>5}          return await refund(order, details["cents"])\n' in page
    assert "\n      order   = 'o-7'\n" in page
    assert "hostile = <Hostile>" in page
    assert "\\x1b[2J\\u202e" in page
    assert "\x1b" not in page
    assert "prints" not in page  # output of the module and of the agent goes to stderr


def test_an_earlier_moment_and_json(waiting: Desk) -> None:
    found = waiting.json("inspect", "r", "--at", "3")
    [task] = found["tasks"]
    assert (found["at"], found["woken_by"], task["awaits"]["tool"], task["awaits"]["call"]) == (3, 2, "lookup", 1)
    assert "details" not in [one["name"] for one in task["frames"][0]["variables"]]
    everything = waiting.json("inspect", "r", "--all-frames")
    assert len(everything["tasks"][0]["frames"]) > 1


def test_a_failed_run_shows_the_failing_line_and_why_shows_it_shortly(failed: Desk) -> None:
    page = failed("inspect", "f")
    assert "\nagent failed: ZeroDivisionError: division by zero\n" in page
    assert "return cents / parts\n" in page
    assert re.search(r"^ +cents = 500\n +parts = 0$", page, re.M)
    why = failed("why", "f")
    assert re.search(r"^      line \d+ of fails.<locals>.share: return cents / parts\n        cents = 500\n        parts = 0\n", why, re.M)
    assert "all of it: perdure inspect f\n" in why
    assert failed.json("why", "f")["failing"]["variables"] == [{"name": "cents", "value": "500"}, {"name": "parts", "value": "0"}]


def test_why_is_as_before_without_the_code_of_the_run(failed: Desk) -> None:
    (failed.folder / "shop.py").write_text(SHOP.replace('@agent(version="1")', '@agent(version="2")'))
    assert failed.json("why", "f")["failing"] is None
    (failed.folder / "shop.py").write_text("raise SystemExit(3)\n" + SHOP)
    assert failed.json("why", "f")["failing"] is None
    (failed.folder / "shop.py").unlink()
    page = failed("why", "f")
    assert "failed at " in page
    assert "line " not in page


def test_a_run_that_was_killed_shows_where_it_was(desk: Desk) -> None:
    desk("run", "shop.py:dies", "--id", "d", code=-signal.SIGKILL)
    page = desk("inspect", "d")
    assert "agent waits for call 1 die(), attempt 1 has begun" in page
    assert "before = 'the crash'" in page


@pytest.mark.parametrize("store", ["sqlite", "postgres"])
def test_no_secret_is_shown_on_the_page_in_json_or_by_why(desk: Desk, store: str, request: pytest.FixtureRequest) -> None:
    url = () if store == "sqlite" else ("--url", request.getfixturevalue("postgres_url"))
    desk("run", "shop.py:support", "order=o-7", "--id", "r", "--no-wait", *url, code=3)
    desk("run", "shop.py:fails", "order=o-7", f"api_key={CANARY}", "--id", "f", *url, code=1)
    for words in (["inspect", "r"], ["inspect", "r", "--json"], ["inspect", "r", "--all-frames", "--json"], ["inspect", "f"], ["why", "f"]):
        page = desk(*words, *url)
        assert CANARY not in page, words
        assert "order" in page
    assert "[redacted]" in desk("inspect", "r", *url)


def test_a_look_performs_nothing_and_writes_nothing(waiting: Desk, failed: Desk) -> None:
    before = contents(waiting)
    for words in (["inspect", "r"], ["inspect", "r", "--at", "2"], ["inspect", "r", "--json"], ["inspect", "f"], ["why", "f"]):
        waiting(*words)
    assert contents(waiting) == before
    assert waiting.ledger == ["lookup o-7", "lookup o-7"]  # of the two runs


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["nope"], 6, "there is no run nope"),
        (["r", "--at", "99"], 6, "run r has the events 1 to 7; there is no event 99"),
        (["r", "--at", "0"], 6, "run r has the events 1 to 7; there is no event 0"),
        (["r", "--at", "1"], 6, "its agent began at event 2; at event 1 there is nothing to look at"),
        (["q"], 6, "run q has not begun"),
        (["r", "shop.py:fails"], 2, "run r belongs to agent 'support', but the target is agent 'fails'"),
        (["r", "gone.py:support"], 6, "there is no file gone.py"),
        (["r", "--pdb", "--json"], 2, "give one of them"),
        (["r", "broken.py:support"], 2, "broken.py, line 1: syntax error"),
        (["r", "newer.py:support"], 2, "run r is a run of support@1, and this code is support@2"),
        (["r", "other.py:support"], 7, "at event 5 the journal has call 2: refund"),
    ],
)
def test_what_cannot_be_shown_is_refused_in_one_line_and_changes_nothing(waiting: Desk, words: list[str], code: int, says: str) -> None:
    waiting("run", "shop.py:support", "order=o-8", "--id", "q", "--detach")
    (waiting.folder / "broken.py").write_text("def (:\n")
    (waiting.folder / "newer.py").write_text(SHOP.replace('version="1"', 'version="2"'))
    (waiting.folder / "other.py").write_text(SHOP.replace('return await refund(order, details["cents"])', "return await refund(order, 1)"))
    before = contents(waiting)
    done = waiting.begin("inspect", *words)
    out, err = done.communicate(timeout=60)
    lines = [line for line in err.splitlines() if "prints" not in line]
    assert (done.returncode, out, len(lines)) == (code, "", 1), (out, err)
    assert says in lines[0]
    assert contents(waiting) == before


def test_the_code_that_a_database_names_is_loaded_only_if_it_may_be(waiting: Desk) -> None:
    (waiting.folder / "shop.py").chmod(0o666)
    assert "a database alone must not choose code" in waiting.refusal("inspect", "r", code=2)


def test_why_imports_no_code_that_another_user_could_have_changed(failed: Desk) -> None:
    file = failed.folder / "shop.py"
    file.write_text(f"from pathlib import Path\nPath({str(failed.folder / 'imported')!r}).touch()\n" + SHOP)
    file.chmod(0o666)
    assert failed.json("why", "f")["failing"] is None
    assert not (failed.folder / "imported").exists()
    file.chmod(0o600)
    assert failed.json("why", "f")["failing"] is not None
    assert (failed.folder / "imported").exists()


def test_an_undo_has_no_code_to_look_into(desk: Desk) -> None:
    code = """
from perdure import Run, agent, tool

@tool(effect="idempotent")
async def book(room: str) -> str:
    return room

@book.compensate
async def cancel(room: str) -> None: ...

@agent(version="1")
async def trip(run: Run) -> str:
    return await book("12")
"""
    (desk.folder / "trip.py").write_text(code)
    desk("run", "trip.py:trip", "--id", "t")
    desk("undo", "t")
    assert "run t/undo is an undo, which runs no code of yours; its calls: perdure show t/undo" in desk.refusal("inspect", "t/undo", code=2)


def test_a_word_of_other_debuggers_leads_here(desk: Desk) -> None:
    assert "perdure inspect RUN --at SEQ" in desk.refusal("debug", "r", code=2)


# --- the debugger ---------------------------------------------------------------------------------------------------------


class Terminal:
    """`perdure` in its own terminal, and a person who types."""

    def __init__(self, desk: Desk, *args: str) -> None:
        self._fd, theirs = pty.openpty()
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "HOME": str(desk.folder), "TERM": "dumb"}
        command = [sys.executable, "-m", "perdure", *args]
        self._child = subprocess.Popen(
            command, cwd=desk.folder, env=environ, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
        )
        os.close(theirs)
        self.text = ""

    def until(self, words: str, within_s: float = 60.0) -> str:
        """The output on the terminal since the last call, up to these words."""
        deadline, begun = time.monotonic() + within_s, len(self.text)
        while words not in self.text[begun:]:
            assert time.monotonic() < deadline, self.text
            if select.select([self._fd], [], [], 0.1)[0]:
                try:
                    self.text += os.read(self._fd, 4096).decode("utf-8", "replace")
                except OSError:  # the other end of the terminal is closed
                    raise AssertionError(f"the program has ended: {self.text}") from None
        return self.text[begun:]

    def type(self, line: str) -> str:
        os.write(self._fd, f"{line}\n".encode())
        return self.until("(Pdb) ")

    def end(self) -> int:
        os.write(self._fd, b"q\n")
        try:
            return self._child.wait(60)
        finally:
            self._child.kill()
            os.close(self._fd)


def test_the_debugger_stands_in_the_innermost_frame_of_a_waiting_agent(waiting: Desk) -> None:
    before = contents(waiting)
    (waiting.folder / ".pdbrc").write_text("p 'chosen by ' + 'the folder'\n")
    terminal = Terminal(waiting, "inspect", "r", "--pdb")
    opened = terminal.until("(Pdb) ")
    assert "chosen by the folder" not in opened
    assert "agent waits for call 2 refund(cents=500, order='o-7')" in opened
    assert '-> return await refund(order, details["cents"])' in opened
    assert "'o-7'" in terminal.type("p order")
    assert "500" in terminal.type("p details['cents']")
    assert "nothing goes on from here" in terminal.type("n")
    assert "nothing goes on from here" in terminal.type("step")
    # A tool that is called here is not performed, and I/O is refused as in an agent.
    assert "coroutine object refund" in terminal.type("refund('o-9', 1)")
    assert "RuntimeError" in terminal.type("asyncio.run(lookup('o-9'))")
    assert "NotAllowedInAgent" in terminal.type("open('written', 'w')")
    assert "NotAllowedInAgent" in terminal.type("os.system('true')")
    assert terminal.end() == 0
    assert "Traceback" not in terminal.text
    assert not (waiting.folder / "written").exists()
    assert contents(waiting) == before


def test_the_debugger_opens_after_the_exception_of_a_failed_agent(failed: Desk) -> None:
    terminal = Terminal(failed, "inspect", "f", "--pdb")
    opened = terminal.until("(Pdb) ")
    assert "agent failed: ZeroDivisionError: division by zero" in opened
    assert "-> return cents / parts" in opened
    assert "0" in terminal.type("p parts")
    assert "fails()" in terminal.type("up")
    assert "'o-7'" in terminal.type("p order")
    assert terminal.end() == 0


def test_the_debugger_works_on_a_pipe(failed: Desk) -> None:
    child = failed.begin("inspect", "f", "--pdb")
    out, err = child.communicate(timeout=60)  # the end of the input ends the debugger
    assert (child.returncode, "-> return cents / parts" in out) == (0, True), (out, err)


def test_a_run_without_a_frame_opens_no_debugger(desk: Desk) -> None:
    (desk.folder / "quick.py").write_text("from perdure import Run, agent\n\n@agent\nasync def quick(run: Run) -> int:\n    return 3\n")
    desk("run", "quick.py", "--id", "q")
    assert "returned 3" in desk("inspect", "q")
    assert "no frame to look at" in desk.refusal("inspect", "q", "--pdb", code=2)


def test_the_json_is_one_document(waiting: Desk) -> None:
    assert json.loads(waiting("inspect", "r", "--json"))["run_id"] == "r"
