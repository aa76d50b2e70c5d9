"""`perdure retry` and `rewind` as people use them, and what the other verbs say about a reopened run; on both databases."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.servers import forked

AGENTS = """
import asyncio, os, time
from pathlib import Path
from perdure import Budget, Call, Outcome, Run, agent, tool

HERE = Path(__file__).parent

def note(line):
    with open(HERE / "ledger", "a") as ledger:
        ledger.write(line + "\\n")

@tool(effect="read")
async def look(what: str) -> str:
    note(f"look {what}")
    if (HERE / "down").exists():
        raise RuntimeError("503 the provider is down")
    return what

@tool(effect="keyed")
async def pay(n: int, call: Call) -> str:
    note(f"pay {n}")
    return f"paid {n}"

@pay.compensate(effect="keyed")
async def _(n: int, call: Call) -> None:
    note(f"unpay {n}")

@tool(effect="once")
async def mail(to: str) -> str:
    note(f"mail {to}")
    return "sent"

@tool(effect="once")
async def ship(to: str) -> str:
    note(f"ship {to}")
    if (HERE / "down").exists():
        raise TimeoutError("no answer")
    return f"shipped {to}"

BROKEN = True

@agent(version="1")
async def order(run: Run) -> str:
    for n in range(3):
        await pay(n)
    await mail("bob" if BROKEN else "ann")
    if BROKEN:
        raise KeyError("bug")
    return "end"

@agent(version="1")
async def reader(run: Run, what: str = "x") -> str:
    await pay(1)
    return await look(what)

@agent(version="1")
async def family(run: Run) -> str:
    return await reader("below")

@agent(version="1")
async def shipper(run: Run) -> str:
    return await ship("rome")

@agent(version="1", budget=Budget(calls=1, on_exceed="fail"))
async def spender(run: Run) -> str:
    await pay(1)
    return await pay(2)

@agent(version="1", budget=Budget(calls=1))
async def saver(run: Run) -> str:
    await pay(1)
    return await pay(2)

@tool(effect="keyed", cost=0.25)
async def order_goods(n: int, call: Call) -> str:
    note(f"order_goods {n}")
    return f"ordered {n}"

@tool(effect="once", approval=True)
async def refund(n: int) -> str:
    note(f"refund {n}")
    return "refunded"

@agent(version="1", budget=Budget(usd=2, calls=9))
async def buyer(run: Run) -> str:
    await order_goods(1)
    await look("x")
    return await order_goods(2)

@agent(version="1")
async def refunder(run: Run) -> str:
    await pay(1)
    return await refund(100)

@agent(version="1")
async def holding(run: Run) -> str:
    return await spender()

@agent(version="1")
async def fan(run: Run) -> str:
    await asyncio.gather(pay(1), pay(2), pay(3))
    raise ValueError("x")

@agent(version="1")
async def waiter(run: Run) -> str:
    await pay(1)
    return await run.receive("go")
"""


class Desk:
    """A folder with agents, and the program run in it on one database."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder, self.url = folder, url
        (folder / "shop.py").write_text(AGENTS)
        # The same agents after the bug was fixed: a new version in another file.
        (folder / "fixed.py").write_text(AGENTS.replace("BROKEN = True", "BROKEN = False").replace('version="1"', 'version="2"'))

    def __call__(self, *args: str, code: int = 0) -> str:
        done = self.run(*args)
        assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
        return done.stdout

    def refusal(self, *args: str, code: int = 2) -> str:
        done = self.run(*args)
        assert (done.returncode, done.stdout) == (code, ""), (done.returncode, done.stdout, done.stderr)
        told, *pointed = done.stderr.splitlines()
        # What is wrong with a query is pointed at below the message.
        assert not pointed or (told.startswith("perdure: --where:") and pointed[-1].strip() == "^"), done.stderr
        return done.stderr

    def run(self, *args: str) -> subprocess.CompletedProcess[str]:
        done = forked.run(
            [sys.executable, "-m", "perdure", *args],
            cwd=self.folder,
            env=os.environ | {"PERDURE_URL": self.url},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert not re.search("Traceback|a bug:", done.stderr), done.stderr
        return done

    def failed(self, agent: str, run_id: str, *args: str) -> None:
        self("run", f"shop.py:{agent}", "--id", run_id, *args, code=1)

    def lines(self, *args: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self(*args, "--json").splitlines()]

    def show(self, run_id: str) -> dict[str, Any]:
        return self.lines("show", run_id)[0]

    def put(self, name: str) -> None:
        (self.folder / name).touch()

    def take(self, name: str) -> None:
        (self.folder / name).unlink()

    @property
    def ledger(self) -> list[str]:
        return (self.folder / "ledger").read_text().splitlines()


@pytest.fixture(params=["sqlite", "postgres"])
def desk(request: pytest.FixtureRequest, tmp_path: Path) -> Desk:
    url = "sqlite:///perdure.db" if request.param == "sqlite" else request.getfixturevalue("postgres_url")
    if request.param == "postgres":
        forked.run(
            [sys.executable, "-m", "perdure", "migrate"],
            env=os.environ | {"PERDURE_URL": url},
            cwd=tmp_path,
            capture_output=True,
            check=True,
        )
    return Desk(tmp_path, url)


@pytest.fixture
def one(tmp_path: Path) -> Desk:
    return Desk(tmp_path, "sqlite:///perdure.db")


# -- retry ----------------------------------------------------------------------------------------------------------------------------
def test_a_provider_that_was_down_is_asked_again_and_what_was_paid_is_not_paid_again(desk: Desk) -> None:
    desk.put("down")
    desk.failed("reader", "r1")
    desk.take("down")
    preview = desk("retry", "r1", "--dry-run")
    assert "call 2 look is made again" in preview
    assert "1 call with a result (1 with an effect)" in preview
    assert desk.show("r1")["status"] == "failed", "a preview writes nothing"
    assert "perdure resume r1" in desk("retry", "r1", "--yes", "--reason", "they are up again", "--by", "ann")
    assert desk("resume", "r1") == "x\n"
    assert desk.ledger == ["pay 1", "look x", "look x"]
    assert [(one["by"], one["reason"]) for one in desk.show("r1")["reopened"]] == [("ann", "they are up again")]


def test_a_bug_after_paid_steps_is_fixed_and_the_new_code_goes_on(desk: Desk) -> None:
    desk.failed("order", "o1")
    told = desk("retry", "o1", "--dry-run")
    assert "the run fails again with this code: KeyError" in told
    # The fixed code sends another mail: so the run goes back to before it, and the first mail stays sent.
    different = desk.refusal("retry", "o1", "fixed.py:order", "--yes", code=7)
    assert "different" in different
    assert "nothing was written" in different
    command = re.search(r"perdure (rewind o1 --to \d+ fixed.py:order)", different)
    assert command is not None, different
    preview = desk(*command[1].split(), "--dry-run")
    assert "version 2 instead of version 1" in preview
    assert 'call 4 mail (once): completed; its tool has no undo; made with {"to":"bob"}\n' in preview
    assert 'will run:\n    call 5: mail({"to":"ann"})\n' in preview
    # The refusal that proposes the rewind, and the end of its preview, say that the mail goes out once more.
    assert "(made since then: mail (call 4); with other arguments this code makes one more)" in different
    assert preview.endswith('  may happen twice:\n    mail was made already with {"to":"bob"} (call 4): call 5 is one more\n')
    assert desk.lines(*command[1].split(), "--dry-run")[0]["twice"] == [
        'mail was made already with {"to":"bob"} (call 4): call 5 is one more'
    ]
    done = desk.run(*command[1].split(), "--yes", "--reason", "fixed")
    assert (done.stderr, "perdure resume o1 fixed.py:order" in done.stdout) == (preview, True), "with --yes the preview is shown too"
    assert desk("resume", "o1", "fixed.py:order") == "end\n"
    assert desk.ledger == ["pay 0", "pay 1", "pay 2", "mail bob", "mail ann"]


def test_a_retry_that_would_only_repeat_its_failure_is_refused(desk: Desk) -> None:
    for run_id in ("o1", "o2"):
        desk.failed("order", run_id)
    refused = desk.refusal("retry", "o1", "--yes")
    assert "run o1 fails again with this code, before it makes any call: KeyError: 'bug'; nothing was written; change the code" in refused
    assert "KeyError" in desk.lines("retry", "o1", "--dry-run")[0]["fails"]
    *lines, last = map(json.loads, desk.run("retry", "o1", "o2", "--yes", "--json").stdout.splitlines())
    assert [line["failed"][:6] for line in lines] == ["run o1", "run o2"]
    assert (last["done"], last["skipped"], last["failed"]) == (0, 0, 2)
    assert {row["status"] for row in desk.lines("list")} == {"failed"}


def test_the_preview_goes_on_with_outcomes_that_are_used_again_and_lists_them_once(one: Desk) -> None:
    one.failed("order", "o1")
    preview = one("rewind", "o1", "--to", "2", "fixed.py:order", "--dry-run")
    assert [line.strip() for line in preview.splitlines()[1:]] == [
        "kept, and not made again: 0 calls with a result",
        "used again, and nothing is sent:",
        *(f'call {n + 1}: pay({{"n":{n}}})' for n in range(3)),
        "will run:",
        'call 5: mail({"to":"ann"})',
        "made before, and not known to the agent any more (the same call again: its recorded result is used; with other arguments: one more):",
        'call 4 mail (once): completed; its tool has no undo; made with {"to":"bob"}',
        "used so far, and not refunded: 4 calls",
        "may happen twice:",
        'mail was made already with {"to":"bob"} (call 4): call 5 is one more',
    ]
    one("rewind", "o1", "--to", "2", "fixed.py:order", "--yes")
    one("resume", "o1", "fixed.py:order")
    assert one.ledger == ["pay 0", "pay 1", "pay 2", "mail bob", "mail ann"]


def test_the_preview_says_what_was_used_what_may_be_used_and_what_is_left(desk: Desk) -> None:
    desk.put("down")
    desk.failed("buyer", "b1")
    preview = desk("rewind", "b1", "--to", "2", "--fresh", "--dry-run")
    said = "used so far, and not refunded: 2 calls, $0.25\n  its own budget: $0.25 of $2.00, "
    assert said in preview, preview
    assert "may cost" not in preview, "the first payment is used again, and the read has no cost"
    shop = (desk.folder / "shop.py").read_text()
    (desk.folder / "shop.py").write_text(shop.replace("await order_goods(1)", "await order_goods(3)"))
    preview = desk("rewind", "b1", "--to", "2", "--dry-run")
    assert "$0.25\n  what will run first may cost: $0.25\n  its own budget: $0.25 of $2.00, " in preview
    assert desk.lines("rewind", "b1", "--to", "2", "--dry-run")[0]["may_cost"]["usd_micros"] == 250_000
    forked = desk("fork", "b1", "--at", "2", "--live", "--dry-run")
    assert (
        "run b1 has used so far: $0.25\n  what will run first may cost: $0.25\n  its own budget, of which nothing is used: $2.00" in forked
    )


def test_the_preview_says_that_a_granted_approval_is_withdrawn(desk: Desk) -> None:
    desk("run", "shop.py:refunder", "--id", "r1", "--no-wait", code=3)
    assert "withdrawn, so that the agent has to ask again:\n    call 2, approval " in desk("rewind", "r1", "--to", "2", "--dry-run")
    approval = desk.lines("approvals")[0]["approval"]
    desk("approve", approval, "--by", "ann")
    preview = desk("rewind", "r1", "--to", "2", "--dry-run")
    assert f"    call 2, approval {approval} (refund) was granted by ann, and not used yet\n" in preview
    desk("rewind", "r1", "--to", "2", "--yes")
    desk("resume", "r1", "--no-wait", code=3)
    assert desk.ledger == ["pay 1"]
    assert desk.lines("approvals")[0]["approval"] != approval


def test_the_reason_of_a_refusal_comes_before_the_question_for_a_terminal(one: Desk) -> None:
    one("run", "fixed.py:order", "--id", "done")
    assert "has succeeded" in one.refusal("rewind", "done", "--to", "3")
    assert "has succeeded" in one.refusal("retry", "done")
    assert one.run("retry", "--where", "agent:nosuch").stderr == "no runs that match\n"
    one.put("down")
    one.failed("reader", "r1")
    assert "has no event 99" in one.refusal("rewind", "r1", "--to", "99")
    for words in (("rewind", "r1", "--to", "3"), ("retry", "r1"), ("retry", "--where", "agent:reader")):
        assert "this is no terminal" in one.refusal(*words)


def test_a_cancelled_run_goes_on_after_all(desk: Desk) -> None:
    desk("run", "shop.py:waiter", "--id", "w1", "--no-wait", code=3)
    desk("cancel", "w1")
    desk("resume", "w1", code=5)
    page = desk.lines("why", "w1")[0]
    assert page["next"][-1]["command"] == "perdure retry w1"
    assert "as if its cancel had not been asked for" in page["next"][-1]["does"]
    desk("retry", "w1", "--yes")
    assert "being cancelled" not in desk("why", "w1")
    desk("signal", "w1", "go", '"now"')
    assert desk("resume", "w1") == "now\n"
    assert desk.ledger == ["pay 1"]
    assert "all as they were written" in desk("verify")


def test_the_children_that_failed_go_on_with_their_parent(desk: Desk) -> None:
    desk.put("down")
    desk.failed("family", "f1")
    refused = desk.refusal("retry", "f1/1", "--yes")
    assert "is a child of run f1" in refused
    assert "perdure retry f1" in refused
    desk.take("down")
    assert "run f1/1 goes on from event" in desk("retry", "f1", "--dry-run")
    desk("retry", "f1", "--yes")
    assert "all as they were written" in desk("verify")
    assert desk("resume", "f1") == "below\n"
    assert desk.ledger == ["pay 1", "look below", "look below"]
    assert "all as they were written" in desk("verify")


def test_a_budget_is_raised_together_with_a_retry_and_why_says_how(desk: Desk) -> None:
    desk.failed("spender", "s1")
    step = desk.lines("why", "s1")[0]["next"][0]
    assert step["command"] == "perdure retry s1 --add-calls N"
    assert step["does"].startswith("add N to the budget of run s1 (it needs at least 1 call), and let the run go on; 1 call with a result")
    assert "run s1 would stop again" not in desk("retry", "s1", "--dry-run")
    preview = desk("retry", "s1", "--add-calls", "1", "--dry-run")
    assert "  added to its budget: 1 call\n" in preview
    assert "limits calls and not usd" in desk.refusal("retry", "s1", "--add-usd", "5", "--yes")
    assert desk.show("s1")["status"] == "failed"
    desk("retry", "s1", "--add-calls", "1", "--yes", "--by", "ann", "--reason", "worth it")
    assert desk("resume", "s1") == "paid 2\n"
    assert desk.ledger == ["pay 1", "pay 2"]
    assert "ann added 1 call to the run's budget: worth it" in desk("events", "s1")
    # A child with a budget of its own: the run at the top is retried, and the budget of the child is raised.
    desk.failed("holding", "h1")
    for run_id in ("h1", "h1/1"):
        assert desk.lines("why", run_id)[0]["next"][0]["command"] == "perdure retry h1 --add-calls N"
    assert "run h1/1 has no budget" not in desk("retry", "h1", "--add-calls", "1", "--yes")
    assert desk("resume", "h1") == "paid 2\n"
    assert "all as they were written" in desk("verify")


def test_a_rewind_raises_the_budget_too_and_a_run_without_one_is_refused(one: Desk) -> None:
    one.failed("spender", "s1")
    one("rewind", "s1", "--to", "2", "--add-calls", "1", "--yes")
    assert one("resume", "s1") == "paid 2\n"
    assert one.ledger == ["pay 1", "pay 2"]
    one.failed("order", "o1")
    assert "run o1 has no budget, so nothing can be added to it" in one.refusal("retry", "o1", "--add-usd", "5", "--yes")
    assert "--add-usd '0' adds nothing" in one.refusal("retry", "o1", "--add-usd", "0", "--yes")


def test_a_retry_with_a_raise_of_a_run_that_its_budget_has_stopped_is_the_unpause_that_it_needs(one: Desk) -> None:
    one("run", "shop.py:saver", "--id", "s1", code=4)
    assert "add to it with perdure unpause" in one.refusal("retry", "s1", "--yes")
    assert "added to the budget that it has used up: 1 call" in one("retry", "s1", "--add-calls", "1", "--dry-run")
    assert one.lines("retry", "--where", "status:needs_attention", "--add-calls", "1", "--yes")[0] == {"run_id": "s1", "dry_run": False}
    assert one("resume", "s1") == "paid 2\n"
    one.put("down")
    one("run", "shop.py:shipper", "--id", "d1", code=4)
    assert "may have happened" in one.refusal("retry", "d1", "--add-calls", "1", "--yes")


def test_a_call_in_doubt_must_be_resolved_first(one: Desk) -> None:
    one.put("down")
    one("run", "shop.py:shipper", "--id", "s1", code=4)
    refused = one.refusal("retry", "s1", "--yes")
    assert "call 2 (ship)" not in refused
    assert "call 1 (ship) may have happened" in refused
    assert "perdure why s1" in refused
    # If the person says that the call failed, the run fails. A retry then does not send the call again: a person's
    # word is no proof, so the call is in doubt.
    one("resolve", "s1", "1", "--fail", "look later")
    one("resume", "s1", code=1)
    assert "a person has to say what became of it" in one("retry", "s1", "--dry-run")
    one("retry", "s1", "--yes")
    one("resume", "s1", code=4)
    assert one.ledger == ["ship rome"]


def test_a_run_that_needs_attention_for_another_reason_goes_on_as_after_unpause(one: Desk) -> None:
    one("run", "shop.py:waiter", "--id", "w1", "--no-wait", code=3)
    shop = (one.folder / "shop.py").read_text()
    (one.folder / "shop.py").write_text(
        shop.replace("    await pay(1)\n    return await run.receive", "    await pay(2)\n    return await run.receive")
    )
    one("signal", "w1", "go", "1")
    one("resume", "w1", code=4)
    (one.folder / "shop.py").write_text(shop)
    assert "goes on where it stands" in one("retry", "w1", "--dry-run")
    assert "may go on" in one("retry", "w1", "--yes")
    assert one("resume", "w1") == "1\n"


def test_what_cannot_be_reopened_is_refused_with_one_line(one: Desk) -> None:
    one.failed("fan", "f1")
    one("run", "fixed.py:order", "--id", "done")
    assert "has no event 99: its events are 1 to" in one.refusal("rewind", "f1", "--to", "99", "--yes")
    assert "stated the events 3 to 5 at once; go back to event 2 or 5" in one.refusal("rewind", "f1", "--to", "4", "--yes")
    assert "has succeeded" in one.refusal("retry", "done", "--yes")
    assert "has succeeded" in one.refusal("rewind", "done", "--to", "3", "--yes")
    assert "there is no run nosuch" in one.refusal("retry", "nosuch", "--yes", code=6)
    assert "belongs to agent 'fan'" in one.refusal("retry", "f1", "shop.py:order", "--yes")
    (one.folder / "broken.py").write_text("import nosuch_module\n")
    assert "No module named" in one.refusal("retry", "f1", "broken.py:fan", "--yes")
    assert "--dry-run" in one.refusal("rewind", "f1", "--to", "6"), "it is no terminal, and there is no --yes"
    one("rewind", "f1", "--to", "6", "--yes")
    assert "event was superseded" in one.refusal("rewind", "f1", "--to", "8", "--yes")
    assert "it is ready already" in one.refusal("retry", "f1", "--yes")
    assert one.ledger[:3] == ["pay 1", "pay 2", "pay 3"]
    assert len(one.ledger) == 7


def test_an_undone_run_is_not_reopened(one: Desk) -> None:
    one.put("down")
    one.failed("reader", "r1")
    one("undo", "r1", "--yes")
    assert one.ledger[-1] == "unpay 1"
    assert "undone" in one.refusal("retry", "r1", "--yes")
    assert "perdure retry" not in one("why", "r1")


# -- asking ---------------------------------------------------------------------------------------------------------------------------
def typed(desk: Any, answer: str, *args: str, meanwhile: Callable[[], object] = lambda: None) -> tuple[int, str]:
    """Run the program on a terminal, type the answer to its question, and return its exit code and all that it wrote.

    `meanwhile` is called when the question is there, before the answer.
    """
    leader, follower = pty.openpty()
    child = subprocess.Popen(
        [sys.executable, "-m", "perdure", *args],
        cwd=desk.folder,
        env=os.environ | {"PERDURE_URL": desk.url, "TERM": "xterm"},
        stdin=follower,
        stdout=follower,
        stderr=follower,
        start_new_session=True,
    )
    os.close(follower)
    seen, deadline, asked = b"", time.monotonic() + 60, False
    while time.monotonic() < deadline:
        ready, _, _ = select.select([leader], [], [], 0.1)
        if ready:
            try:
                data = os.read(leader, 65536)
            except OSError:
                break  # EIO: the program has ended
            if not data:
                break
            seen += data
            if not asked and b"[y/N]" in seen:
                asked = True
                meanwhile()
                os.write(leader, answer.encode())
    os.close(leader)
    return child.wait(60), seen.decode().replace("\r\n", "\n")


def test_on_a_terminal_the_preview_comes_first_and_no_is_the_default(one: Desk) -> None:
    one.failed("order", "o1")
    code, said = typed(one, "\n", "rewind", "o1", "--to", "6")
    assert code == 2
    assert "nothing was written" in said
    assert said.index("kept, and not made again: 2 calls") < said.index("[y/N]")
    assert 'used again, and nothing is sent:\n    call 3: pay({"n":2})\n    call 4: mail({"to":"bob"})\n' in said
    assert one.show("o1")["status"] == "failed"
    one.failed("spender", "s1")
    code, said = typed(one, "n\n", "retry", "s1", "--add-calls", "2")
    assert (code, said.index("added to its budget: 2 calls") < said.index("[y/N]")) == (2, True)
    code, said = typed(one, "y\n", "rewind", "o1", "--to", "6")
    assert code == 0
    assert "is queued, from event 6" in said
    code, said = typed(one, "", "events", "o1")
    assert "\x1b[9m    7  " in said
    assert "\x1b[9m    6  " not in said, "only superseded events are struck through"


def test_a_yes_to_an_old_preview_writes_nothing(one: Desk) -> None:
    one.failed("order", "o1")
    code, said = typed(one, "y\n", "rewind", "o1", "--to", "6", meanwhile=lambda: one("rewind", "o1", "--to", "8", "--yes"))
    assert code == 2
    assert "has moved on since the preview, so nothing was written" in said
    assert [found["back_to"] for found in one.show("o1")["reopened"]] == [8]


def test_two_people_at_once_reopen_the_run_once(one: Desk) -> None:
    one.put("down")
    one.failed("reader", "o1")
    both = [
        forked.Popen(
            [sys.executable, "-m", "perdure", "retry", "o1", "--yes", "--by", who],
            cwd=one.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for who in ("ann", "bob")
    ]
    ends = [child.communicate(timeout=60) for child in both]
    assert sorted(child.returncode for child in both) == [0, 2], ends
    assert len(one.show("o1")["reopened"]) == 1


# -- many runs ------------------------------------------------------------------------------------------------------------------------
def test_a_query_retries_the_failed_runs_and_lists_those_that_it_cannot(desk: Desk) -> None:
    desk.put("down")
    for number in range(3):
        desk.failed("reader", f"r{number}")
    desk.failed("family", "f1")
    desk.failed("order", "o1")
    desk.take("down")
    assert [row["run_id"] for row in desk.lines("list", "--where", "status:failed error:503 parent:none")] == ["f1", "r2", "r1", "r0"]
    # One of them cannot go on: its agent asks for something else now.
    desk.put("down")
    (desk.folder / "other.py").write_text(AGENTS)
    desk("run", "other.py:reader", "--id", "changed", code=1)
    (desk.folder / "other.py").write_text(
        AGENTS.replace("    await pay(1)\n    return await look", "    await pay(5)\n    return await look")
    )
    desk.take("down")
    done = desk.run("retry", "--where", "error:*503* parent:none", "--yes", "--reason", "up again")
    assert done.returncode == 1
    assert done.stdout.startswith("4 runs queued; 1 failed"), done.stdout
    assert "failed: run changed cannot go on with this code" in done.stderr
    # The same command again finds only the remaining runs.
    again = desk.run("retry", "--where", "error:*503*", "--yes", "--json")
    assert again.returncode == 1
    assert [json.loads(line).get("run_id") for line in again.stdout.splitlines()] == ["changed", None]
    assert desk("resume", "r1") == "x\n"
    assert desk("resume", "f1") == "below\n"
    assert desk.show("o1")["status"] == "failed", "its error is another one"
    assert all(one["reason"] == "up again" for one in desk.show("r0")["reopened"])


def test_a_query_raises_the_budget_of_each_run_and_lists_the_runs_that_have_none(desk: Desk) -> None:
    for run_id in ("s1", "s2"):
        desk.failed("spender", run_id)
    desk.failed("order", "o1")
    done = desk.run("retry", "--where", "status:failed", "--add-calls", "3", "--yes")
    assert (done.returncode, done.stdout.startswith("2 runs queued; 1 failed")) == (1, True), done.stdout
    assert "failed: run o1 has no budget" in done.stderr
    for run_id in ("s1", "s2"):
        assert desk.lines("why", run_id)[0]["budgets"][0]["limits"][0]["limit"] == 4
        assert desk("resume", run_id) == "paid 2\n"


def test_a_query_without_a_status_leaves_cancelled_runs_alone(one: Desk) -> None:
    one.put("down")
    one.failed("reader", "o1")
    one("run", "shop.py:waiter", "--id", "w1", "--no-wait", code=3)
    one("cancel", "w1")
    one("resume", "w1", code=5)
    assert [found.get("run_id") for found in one.lines("retry", "--where", "id:*1", "--yes")] == ["o1", None]
    assert [found.get("run_id") for found in one.lines("retry", "--where", "id:*1", "--dry-run", "--yes")] == [None]
    assert [found.get("run_id") for found in one.lines("retry", "--where", "id:*1 status:cancelled", "--yes")] == ["w1", None]


def test_a_dry_run_of_many_runs_shows_equal_plans_and_equal_refusals_once(one: Desk) -> None:
    one.put("down")
    for number in range(8):
        one.failed("reader", f"r{number}")
    one.failed("reader", "other", "what=y")
    for number in range(3):
        one.failed("order", f"o{number}")
    lines = one("retry", "--where", "agent:reader", "--dry-run").splitlines()
    assert [line.strip() for line in lines if "run other" in line or "run r" in line or "more" in line] == [
        "run other goes on from event 5, with version 1, as before",
        "the same for 8 more runs: r7, r6, r5, r4, r3 …",
    ], "what a call is given is the same plan, if it is only attempted again"
    assert sum("call 2 look is made again" in line for line in lines) == 1
    assert lines[-1] == "9 runs can be retried"
    refused = one.run("retry", "--where", "agent:order", "--yes")
    assert [line.strip()[:55] for line in refused.stderr.splitlines() if "KeyError" in line and "failed: run" in line] == [
        "failed: run o2 fails again with this code, before it ma"
    ]
    assert "\n  the same for 2 more runs: o1, o0\n" in refused.stderr
    assert refused.stdout == "0 runs queued; 3 failed\n"


def test_the_bulk_question_shows_the_count_and_a_sample(one: Desk) -> None:
    one.put("down")
    for number in range(7):
        one.failed("reader", f"r{number}")
    code, said = typed(one, "n\n", "retry", "--where", "agent:reader")
    assert code == 2
    assert "7 runs to retry\n  7 failed\n  7 of reader@1\n" in said
    assert "… and 2 more" in said
    assert "503" in said
    assert "nothing was written" in said
    assert {row["status"] for row in one.lines("list")} == {"failed"}
    code, said = typed(one, "y\n", "retry", "r1", "r2")
    assert code == 0
    assert "2 runs queued" in said
    assert "100%" in said


def test_ctrl_c_stops_between_two_runs_and_the_same_command_goes_on(one: Desk) -> None:
    one.put("down")
    for number in range(4):
        one.failed("reader", f"r{number}")
    # A replay of the first run stops the program for a moment: the journal is not touched meanwhile.
    slow = AGENTS.replace("    await pay(1)\n    return await look", "    time.sleep(0.5)\n    await pay(1)\n    return await look")
    (one.folder / "shop.py").write_text(slow)
    child = forked.Popen(
        [sys.executable, "-m", "perdure", "retry", "--where", "agent:reader", "--yes", "--json"],
        cwd=one.folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not any(row["status"] == "queued" for row in one.lines("list")):
        assert time.monotonic() < deadline
        assert child.poll() is None
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=60)
    assert child.returncode == 130, (out, err)
    queued = {row["run_id"] for row in one.lines("list") if row["status"] == "queued"}
    *lines, last = map(json.loads, out.splitlines())
    assert queued == {line["run_id"] for line in lines}
    assert (last["interrupted"], last["done"]) == (True, len(queued))
    assert 0 < len(queued) < 4
    one("retry", "--where", "agent:reader", "--yes")
    assert {row["status"] for row in one.lines("list")} == {"queued"}
    assert all(len(one.show(f"r{number}")["reopened"]) == 1 for number in range(4))


def test_a_query_says_what_is_wrong_with_it(one: Desk) -> None:
    one.failed("order", "o1")
    assert "there is no key 'colour'; write KEY:VALUE" in one.refusal("retry", "--where", "colour:red", "--yes")
    assert "there is no key 'colour'" in one.refusal("list", "--where", "colour:red")
    assert "is for runs that are failed, cancelled, needs_attention" in one.refusal("retry", "--where", "status:running", "--yes")
    assert "and not both" in one.refusal("retry", "o1", "--where", "status:failed", "--yes")
    assert "name the runs to retry" in one.refusal("retry", "--yes")


# -- the output of other verbs ----------------------------------------------------------------------------------------
@pytest.fixture
def twice(desk: Desk) -> Desk:
    """The run `o1`, reopened twice: it went on from event 6, failed again, and goes on from event 4 with the fixed code."""
    desk.failed("order", "o1")
    desk("rewind", "o1", "--to", "6", "--yes", "--reason", "one")
    desk("resume", "o1", code=1)
    desk("rewind", "o1", "fixed.py:order", "--to", "4", "--yes", "--reason", "two", "--by", "ann")
    return desk


def test_events_mark_what_is_superseded_and_by_which_event(twice: Desk) -> None:
    events = twice.lines("events", "o1")
    reopened = [event["seq"] for event in events if event["type"] == "run_reopened"]
    by = {event["seq"]: event["superseded_by"] for event in events}
    assert [by[seq] for seq in (1, 4, 5, 6)] == [None, None, reopened[1], reopened[1]]
    assert by[7] == by[reopened[0] - 1] == reopened[0]
    assert by[reopened[0]] == by[reopened[1] - 1] == reopened[1]
    assert by[reopened[1]] is None
    text = twice("events", "o1").splitlines()
    assert [f"[superseded by event {by[n]}]" in line for n, line in enumerate(text, 1)] == [
        by[n] is not None for n in range(1, len(text) + 1)
    ]


def test_show_and_why_separate_what_is_superseded(twice: Desk) -> None:
    shown = twice.show("o1")
    assert [(one["by"], one["back_to"], one["reason"]) for one in shown["reopened"]][1] == ("ann", 4, "two")
    assert [call["call"] for call in shown["calls"] if call["superseded"]] == [2, 3, 4]
    text = twice("show", "o1")
    assert text.index("pay(n=0)") < text.index("superseded: made before") < text.index("pay(n=1)")
    page = twice.lines("why", "o1")[0]
    assert [done["call"] for done in page["done"]] == [1]
    assert [done["call"] for done in page["superseded"]] == [2, 3, 4]
    text = twice("why", "o1")
    assert "reopened by ann" in text
    assert "superseded, and what it did stays: 3" in text
    assert "perdure undo o1 --dry-run" in text
    twice("resume", "o1", "fixed.py:order")
    page = twice.lines("why", "o1")[0]
    assert [done["call"] for done in page["done"]] == [1, 2, 3, 5]
    assert [done["call"] for done in page["superseded"]] == [4]


def test_every_check_accepts_a_reopened_run(twice: Desk) -> None:
    def checks() -> None:
        assert "all as they were written" in twice("verify")
        assert "all as they were written" in twice("verify", "--repair", "--yes")
        assert ": same: " in twice("replay", "o1", "fixed.py:order")
        (twice.folder / "o1.export").unlink(missing_ok=True)
        twice("export", "o1", "-o", "o1.export")
        assert "intact: 1 run" in twice("verify", "--export", "o1.export")
        assert ": same: " in twice("replay", "--export", "o1.export", "fixed.py:order")
        events = twice.lines("events", "o1")
        assert [line["seq"] for line in twice.lines("audit", "o1")] == [event["seq"] for event in events]
        assert twice("trace", "o1")
        assert twice("costs", "--by", "run")
        cost = twice.lines("costs", "--by", "run")[0]
        assert cost["calls"] == len({event["call"] for event in events if event["type"] == "tool_call_initiated"})

    checks()
    reopened = [line for line in twice.lines("audit", "o1") if line["type"] == "run_reopened"][1]
    assert (reopened["actor"], reopened["context"]["back_to"], reopened["context"]["reason"]) == ("ann", 4, "two")
    twice("resume", "o1", "fixed.py:order")
    checks()


def test_an_undo_takes_back_what_a_superseded_branch_did_once_each(twice: Desk) -> None:
    twice("resume", "o1", "fixed.py:order")
    plan = twice.lines("undo", "o1", "fixed.py:order", "--dry-run")[0]
    assert [step["call"] for step in plan["steps"]] == [3, 2, 1]
    assert sorted(step["call"] for step in plan["irreversible"]) == [4, 5]
    twice("undo", "o1", "fixed.py:order", "--yes")
    assert twice.ledger[-3:] == ["unpay 2", "unpay 1", "unpay 0"]


def test_an_undo_takes_back_a_superseded_call_that_the_new_code_never_makes(one: Desk) -> None:
    one.failed("order", "o1")
    (one.folder / "short.py").write_text(
        AGENTS.replace("BROKEN = True", "BROKEN = False").replace("range(3)", "range(1)").replace('version="1"', 'version="3"')
    )
    one("rewind", "o1", "short.py:order", "--to", "4", "--yes")
    one("resume", "o1", "short.py:order")
    plan = one.lines("undo", "o1", "short.py:order", "--dry-run")[0]
    assert [step["call"] for step in plan["steps"]] == [3, 2, 1], "pay 1 and pay 2 were made by the old code only"


def test_following_a_run_goes_past_an_end_in_the_middle_of_its_journal(desk: Desk) -> None:
    desk.put("down")
    desk.failed("reader", "r1")
    desk.take("down")
    desk("retry", "r1", "--yes")
    follower = forked.Popen(
        [sys.executable, "-m", "perdure", "events", "r1", "--follow", "--json"],
        cwd=desk.folder,
        env=os.environ | {"PERDURE_URL": desk.url},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    desk("resume", "r1")
    out, err = follower.communicate(timeout=60)
    assert follower.returncode == 0, err
    types = [json.loads(line)["type"] for line in out.splitlines()]
    assert types.count("run_failed") == 1
    assert types[-1] == "run_succeeded"


def test_why_of_a_failed_run_offers_the_retry_that_would_work(one: Desk) -> None:
    one.put("down")
    one.failed("reader", "r1")
    steps = {step["command"]: step["does"] for step in one.lines("why", "r1")[0]["next"]}
    assert steps["perdure retry r1"].startswith("attempt call 2 (look) again, and go on; 1 call with a result is not made again")
    assert not any(command.startswith("perdure run") for command in steps)
    one.failed("family", "f1")
    steps = {step["command"]: step["does"] for step in one.lines("why", "f1")[0]["next"]}
    assert steps["perdure retry f1"].startswith("let its child f1/1 go on")
    assert "perdure retry f1" in {step["command"] for step in one.lines("why", "f1/1")[0]["next"]}


@pytest.mark.parametrize(
    ("agent", "why", "preview"),
    [
        (
            "posts",
            "reopen the run; call 1 (post) may have happened: the run stops there in doubt until a person says what became of it (with perdure",
            "call 1 post stays in doubt, and a person has to say what became of it",
        ),
        ("charges", "send call 1 (charge) again with the same key, if the key is still inside its window", "call 1 charge is made again"),
        ("asks", "ask the reconcile hook what became of call 1 (asked), and go on", "call 1 asked is asked about: its reconcile hook"),
    ],
)
def test_why_promises_no_attempt_of_a_call_that_may_have_happened(one: Desk, agent: str, why: str, preview: str) -> None:
    file = one.folder / "shop.py"
    file.write_text(
        file.read_text()
        + """
@tool(effect="once")
async def post(to: str) -> str:
    raise ValueError("bad template")

@tool(effect="keyed")
async def charge(to: str, call: Call) -> str:
    raise ValueError("bad template")

@tool(effect="once")
async def asked(to: str) -> str:
    raise ValueError("bad template")

@asked.reconcile
async def _(to: str, call: Call) -> Outcome:
    return Outcome.unknown("no record")

@agent(version="1")
async def posts(run: Run) -> str:
    return await post("rome")

@agent(version="1")
async def charges(run: Run) -> str:
    return await charge("rome")

@agent(version="1")
async def asks(run: Run) -> str:
    return await asked("rome")
"""
    )
    one.failed(agent, "r")
    steps = {step["command"]: step["does"] for step in one.lines("why", "r")[0]["next"]}
    assert steps["perdure retry r"].startswith(why)
    assert preview in one("retry", "r", "--dry-run")
