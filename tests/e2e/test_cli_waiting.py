"""The verbs for runs that wait for people: decisions, signals, pauses, money.

Real processes; a separate ledger of effects.
"""

from __future__ import annotations

import json
import os
import pwd
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.e2e.test_cli_acting import Shop, until
from tests.servers import forked

from perdure.core.approval import ApprovalFacts, Ruling, Standing, Vote
from perdure.core.events import ApprovalVoted
from perdure.store import approvals
from perdure.store.open import open_store

AGENTS = """
import asyncio
from pathlib import Path
from perdure import Approval, Budget, Call, Run, agent, tool

HERE = Path(__file__).parent

def note(line):
    with open(HERE / "ledger", "a") as ledger:
        ledger.write(line + "\\n")

FINANCE = Approval(by=("ann", "role:finance"), expires=3600, editable="cents", when=lambda order, cents: cents > 500 and "over $5")

@tool(effect="once", approval=FINANCE)
async def refund(order: str, cents: int) -> str:
    note(f"refund {order} {cents}")
    return f"{order} {cents}"

@agent(version="1")
async def shop(run: Run, order: str = "o-7", cents: int = 900) -> str:
    return await refund(order, cents)

@agent(version="1")
async def asker(run: Run, text: str = "x", quorum: int = 1, by: str = "", expires: float | None = None, eyes: bool = False) -> list:
    decision = await run.request_approval(
        "deploy", {"text": text, "n": 1}, reason=f"because of {text}"[:200], quorum=quorum, by=by.split(",") if by else (),
        expires=expires, editable="n" if quorum == 1 else (), four_eyes=eyes,
    )
    return [decision.granted, decision.outcome, decision.by, decision.note, decision.input]

@agent(version="1")
async def kid(run: Run, number: int) -> str:
    return await refund(f"k{number}", 600 + number)

@agent(version="1")
async def boss(run: Run) -> list:
    return list(await asyncio.gather(kid(1), kid(2)))

@tool(effect="once")
async def unsure() -> None:
    raise TimeoutError("no answer")

@agent(version="1")
async def doubtful(run: Run) -> None:
    await unsure()

@agent(version="1")
async def careful(run: Run) -> None:
    await doubtful()

@agent(version="1")
async def chat(run: Run) -> list:
    return [await run.receive("chat"), await run.receive("chat")]

@agent(version="1")
async def patient(run: Run) -> str:
    await asyncio.sleep(1.5)
    return await refund("late", 700)

@agent(version="1")
async def busy(run: Run) -> str:
    _, receipt = await asyncio.gather(asyncio.sleep(4), refund("busy", 800))
    return receipt

@tool(effect="idempotent")
async def think(call: Call) -> None:
    note("think")
    call.spend(usd="0.0123", tokens_in=1000, tokens_out=200, model="big")

@agent(version="1")
async def thinker(run: Run, times: int = 3) -> int:
    for _ in range(times):
        await think()
    return times

@agent(version="1", budget=Budget(usd=5, on_exceed="fail"))
async def strict(run: Run) -> None:
    await think()
    await think()
    await think()

@agent(version="1")
async def two_thoughts(run: Run, number: int) -> None:
    await think()
    await think()

@agent(version="1")
async def team(run: Run) -> None:
    await asyncio.gather(*(two_thoughts(number) for number in range(8)))

@tool(effect="read")
async def hold() -> str:
    note("hold")
    while (HERE / "hold").exists():
        await asyncio.sleep(0.01)
    return "let go"

@agent(version="1")
async def both(run: Run) -> list:
    return list(await asyncio.gather(hold(), refund("busy", 800)))

@agent(version="1")
async def holder(run: Run) -> str:
    return await hold()
"""
ME = pwd.getpwuid(os.geteuid()).pw_name


class Desk(Shop):
    """A folder with agents that ask, and the real program run inside."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        (folder / "control.py").write_text(AGENTS)

    def lines(self, *args: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self(*args, "--json").stdout.splitlines()]

    def asks(self, agent: str, run_id: str, *args: str) -> str:
        """Start a run that waits for one approval. Returns the id of the approval."""
        self("run", f"control.py:{agent}", "--id", run_id, *args, code=3)
        (approval,) = self.lines("approvals", "--run", run_id)
        return str(approval["approval"])


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    desk = Desk(tmp_path)
    yield desk
    for child in desk.children:
        if child.poll() is None:
            child.kill()
        child.communicate()


# --- the inbox --------------------------------------------------------------------------------------------------------------


def test_a_run_whose_child_needs_attention_leaves_with_that_code_and_names_the_child_s_command(desk: Desk) -> None:
    left = desk("run", "control.py:careful", "--id", "c", code=4)
    assert "run c waits for c/1, which needs attention; next: perdure why c/1" in left.stderr
    resuming = "perdure: resuming run c: no call has a result yet, and its agent waits for 1 child\n"
    assert desk("resume", "c", code=4).stderr == resuming + left.stderr
    desk("resolve", "c/1", "1", "--happened", "null")
    desk("resume", "c", code=0)


def test_the_inbox_shows_the_exact_call_who_may_decide_and_what_to_type(desk):
    waiting = desk("run", "control.py:shop", "--id", "s", code=3)
    page = desk("approvals").stdout
    (approval,) = re.findall(r"ap-[0-9a-f]{20}", page.splitlines()[0])
    assert f"perdure approve {approval} " in waiting.stderr
    assert waiting.stdout == ""
    assert '{"cents": 900, "order": "o-7"}' in page
    assert "run s, call 1, of shop, tenant default" in page
    assert "reason, from the tool's policy: over $5" in page
    assert re.search(r"decides +ann, role:finance$", page, re.M)
    assert re.search(r"may edit +cents$", page, re.M)
    assert "expires in" in page
    assert f"perdure approve {approval} --by WHO\n" in page
    assert f"perdure reject {approval} --by WHO --reason TEXT\n" in page
    (record,) = desk.lines("approvals")
    assert record["input"] == {"cents": 900, "order": "o-7"}
    assert re.search(rf"digest +{record['digest'][:12]}$", page, re.M)
    assert (record["status"], record["by"], record["quorum"], record["voters"]) == ("pending", ["ann", "role:finance"], 1, [])


def test_what_an_agent_writes_neither_acts_on_the_terminal_nor_passes_for_another_field(desk):
    text = "a\x1b[2J\u202eb\n    decides    anybody\nap-00000000000000000000  nothing"
    approval = desk.asks("asker", "e", "--input", json.dumps({"text": text, "by": "ann"}))
    page = desk("approvals").stdout
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f\u202e]", page)
    assert "\\u001b[2J\\u202eb\\n" in page
    assert "reason, in the agent's words: because of a\\x1b[2J" in page
    assert re.findall("^ap-.*", page, re.M) == [page.splitlines()[0]]
    assert page.startswith(approval)
    assert re.findall(r"^    decides +(.*)", page, re.M) == ["ann"]
    assert desk.lines("approvals")[0]["input"]["text"] == text


INVISIBLE = re.compile(
    "[\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f\u2800\u3164\ufe00-\ufe0f\ufeff\uffa0"
    "\ufff0-\ufff8\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)


def test_approvers_see_every_invisible_character_in_every_verb_that_shows_what_is_asked(desk):
    text = "pay bob\ufe0f\u180b\U000e0100\U000e01ef\u3164\u200b"
    approval = desk.asks("asker", "i", "--input", json.dumps({"text": text, "by": "ann"}))
    asked = len(desk.lines("events", "i"))
    pages = [desk(*words).stdout for words in (("approvals",), ("events", "i"), ("show", "i"), ("why", "i"), ("trace", "i", str(asked)))]
    pages += [desk(*words, "--json").stdout for words in (("approvals",), ("events", "i"), ("show", "i"), ("why", "i"), ("audit",))]
    for page in pages:
        assert INVISIBLE.findall(page) == [], page
    assert "because of pay bob\\ufe0f\\u180b\\U000e0100\\U000e01ef\\u3164\\u200b" in pages[0]
    assert desk.lines("approvals")[0]["input"]["text"] == text
    said = desk("reject", approval, "--by", "ann", "--reason", f"no: {text}").stdout
    for page in (said, desk("approvals", "--all").stdout, desk("events", "i").stdout, desk("resume", "i").stdout):
        assert INVISIBLE.findall(page) == [], page
        assert "no: pay bob\\ufe0f" in page
    refusal = desk.refusal("approve", approval, "--by", "ann\ufe0f")
    assert "by='ann\\ufe0f': say who" in refusal
    assert "none of them invisible" in refusal


def test_a_journal_in_which_an_older_version_counted_one_person_twice_is_shown_and_goes_on_with_the_true_number(desk, monkeypatch):
    approval = desk.asks("asker", "old", "--input", json.dumps({"quorum": 3}))
    store = open_store(f"sqlite:///{desk.folder}/perdure.db", create=False)
    for number, voter in enumerate(("ann", "ann\ufe0f")):  # as 0.1 took the votes

        def took(standing: Standing, facts: ApprovalFacts, vote: Vote, now: int) -> Ruling:
            voted = ApprovalVoted(approval, vote.by, standing.request.digest, source="cli")
            return Ruling(msgspec.structs.replace(standing, voters=(*standing.voters, vote.by)), voted)

        monkeypatch.setattr(approvals, "judge", took)
        store.decide(approval, Vote(voter, True), event_id=f"{number:032x}", now=time.time_ns() // 1000)
    store.close()
    assert "1 of 3 have agreed (ann, ann\\ufe0f)" in desk("approvals").stdout
    for words in (("events", "old"), ("why", "old"), ("show", "old"), ("verify", "old")):
        assert INVISIBLE.findall(desk(*words).stdout) == []
    assert "1 has so far (ann, ann\\ufe0f)" in desk("why", "old").stdout
    assert "ann has already approved" in desk.refusal("approve", approval, "--by", "ann")
    assert "1 more must agree" in desk("approve", approval, "--by", "bob").stdout
    desk("approve", approval, "--by", "eve")
    assert json.loads(desk("resume", "old").stdout)[:2] == [True, "approved"]
    desk("verify", "old")


def test_an_input_that_is_too_long_to_show_says_so_and_json_has_all_of_it(desk):
    desk.asks("asker", "long", "text=" + "x" * 70_000)
    page = desk("approvals").stdout
    assert "not all of it is shown; the whole: perdure approvals --run long --json" in page
    assert len(page) < 10_000
    assert len(desk.lines("approvals", "--run", "long")[0]["input"]["text"]) == 70_000


def test_the_inbox_is_narrowed_by_run_tenant_and_limit_and_all_shows_the_settled_ones(desk):
    first = desk.asks("asker", "one", "--tenant", "acme")
    second = desk.asks("asker", "two")
    assert [row["approval"] for row in desk.lines("approvals")] == [first, second]
    assert [row["approval"] for row in desk.lines("approvals", "--tenant", "acme")] == [first]
    assert [row["approval"] for row in desk.lines("approvals", "--run", "two")] == [second]
    assert "the first 1 are shown" in desk("approvals", "--limit", "1").stderr
    assert "there is no run three" in desk.refusal("approvals", "--run", "three", code=6)
    desk("approve", first, "--by", "ann", "--note", "fine")
    assert [row["approval"] for row in desk.lines("approvals")] == [second]
    settled = desk.lines("approvals", "--all", "--run", "one")[0]
    assert (settled["status"], settled["settled_by"], settled["note"]) == ("approved", "ann", "fine")
    desk("reject", second, "--reason", "no")
    assert desk("approvals").stdout == ""
    assert "no approvals are pending" in desk("approvals").stderr
    assert "rejected by" in desk("approvals", "--all").stdout


# --- deciding ---------------------------------------------------------------------------------------------------------------


def test_approve_is_acted_on_once_by_whoever_resumes(desk):
    approval = desk.asks("shop", "s")
    assert desk.ledger == []
    said = desk("approve", approval, "--by", "ann").stdout
    assert f"{approval} (refund(" in said
    assert "is approved by ann" in said
    assert "perdure resume s" in said
    assert desk("resume", "s").stdout == "o-7 900\n"
    assert desk.ledger == ["refund o-7 900"]
    (decided,) = [event for event in desk.events("s") if event["type"] == "approval_decided"]
    assert decided["source"] == f"cli {ME}@{socket.gethostname()}"


def test_reject_reaches_the_agent_with_its_reason(desk):
    approval = desk.asks("asker", "a")
    said = desk("reject", approval, "--reason", "not today", "--json").stdout
    assert json.loads(said) | {"digest": ""} == {
        "approval": approval,
        "status": "rejected",
        "by": ME,
        "voters": [],
        "quorum": 1,
        "digest": "",
        "approved_input": None,
        "note": "not today",
        "run_id": "a",
        "run_status": "queued",
    }
    output = json.loads(desk("resume", "a").stdout)
    assert output[:4] == [False, "rejected", ME, "not today"]
    assert "--reason" in desk.refusal("reject", approval)


def test_an_edit_is_what_happens_and_only_what_may_be_edited_is(desk):
    approval = desk.asks("shop", "s")
    as_ann = ("approve", approval, "--by", "ann")
    assert "'order' may not be edited; cents may" in desk.refusal(*as_ann, "--edit", '{"order": "o-8"}')
    assert 'cents = "x": must be a whole number' in desk.refusal(*as_ann, "--edit", '{"cents": "x"}')
    assert "--edit is not valid JSON" in desk.refusal(*as_ann, "--edit", "{cents: 1}")
    assert "is not an object of the fields to change" in desk.refusal(*as_ann, "--edit", "[1]")
    assert desk.lines("approvals")[0]["status"] == "pending"
    said = desk(*as_ann, "--edit", '{"cents": 501}', "--note", "half of it").stdout
    assert (
        f'{approval} (refund(cents=900, order="o-7") of run s) is approved by ann with cents 900 → 501; note: half of it; a worker' in said
    )
    for after in ("approved by ann at", "501, and its call has been started"):
        page = desk("approvals", "--all").stdout
        assert re.search(r"approved by ann at \d\d:\d\d:\d\d UTC with cents 900 → 501", page)
        assert re.search(r"note +half of it$", page, re.M)
        assert after in page
        (record,) = desk.lines("approvals", "--all")
        assert (record["input"]["cents"], record["approved_input"]) == (900, {"cents": 501, "order": "o-7"})
        assert "with cents 900 → 501" in desk.refusal(*as_ann)
        assert desk("resume", "s").stdout == "o-7 501\n"
    assert desk.ledger == ["refund o-7 501"]


def test_an_edit_may_be_written_as_pairs(desk):
    approval = desk.asks("asker", "a", "by=ann")
    as_ann = ("approve", approval, "--by", "ann", "--json")
    assert "'n' twice" in desk.refusal(*as_ann, "--edit", "n:=2", "--edit", '{"n": 3}')
    assert """such as '{"cents": 500}' or cents:=500""" in desk.refusal(*as_ann, "--edit", '"n"')
    assert 'n = "2": must be a whole number' in desk.refusal(*as_ann, "--edit", "n=2")
    assert json.loads(desk(*as_ann, "--edit", "n:=2").stdout)["approved_input"] == {"n": 2, "text": "x"}
    assert json.loads(desk("resume", "a").stdout)[4] == {"n": 2, "text": "x"}


def test_what_was_approved_is_shown_while_the_run_is_held_and_has_not_read_it(desk):
    """Its holder is stopped, so that the decision stays in the inbox."""
    desk.put("hold")
    child = desk.begin("run", "control.py:both", "--id", "b")
    until(lambda: desk.has_journal() and desk.lines("approvals"))
    (asked,) = desk.lines("approvals")
    desk.freeze(child)
    try:
        said = desk("approve", asked["approval"], "--by", "ann", "--edit", "cents:=700").stdout
        assert "with cents 800 → 700; the worker that holds it goes on" in said
        assert "approval_decided" not in [event["type"] for event in desk.events("b")]
        assert desk.lines("approvals", "--all")[0]["approved_input"] == {"cents": 700, "order": "busy"}
    finally:
        child.send_signal(signal.SIGCONT)
    desk.take("hold")
    child.communicate(timeout=60)
    assert sorted(desk.ledger) == ["hold", "refund busy 700"]


def test_only_those_who_may_decide_do_and_a_role_counts_from_the_flag_or_the_settings(desk):
    flag, settings = desk.asks("shop", "s"), desk.asks("shop", "t")
    assert "is for ann, role:finance to decide; bob is not among them" in desk.refusal("approve", flag, "--by", "bob")
    assert "role:finance is not among them" in desk.refusal("approve", flag, "--by", "role:finance")
    assert "bob is not among them" in desk.refusal("reject", flag, "--by", "bob", "--reason", "no", "--role", "sales")
    unknown = "no role finance is known here ([roles] in perdure.toml); say who decides: --by NAME, or vouch for the role: --role finance"
    assert unknown in desk.refusal("approve", flag)
    desk("approve", flag, "--by", "bob", "--role", "sales", "--role", "finance")
    (desk.folder / "perdure.toml").write_text('[roles]\nfinance = ["bob", "eve"]\n')
    assert "finance is bob, eve (the settings); say who decides: --by NAME" in desk.refusal("approve", settings)
    assert f"perdure approve {settings} --by WHO\n" in desk("approvals").stdout
    (desk.folder / "perdure.toml").write_text(f'[roles]\nfinance = ["bob", "{ME}"]\n')
    assert f"perdure approve {settings}\n" in desk("approvals").stdout
    desk("approve", settings)


def test_whoever_the_run_acts_for_may_not_decide_under_four_eyes(desk):
    approval = desk.asks("asker", "a", "eyes:=true", "--actor", "ann")
    assert "not the person for whom the run acts" in desk("approvals").stdout
    assert "needs a second person (four_eyes)" in desk.refusal("approve", approval, "--by", "ann")
    desk("approve", approval, "--by", "bob")


def test_a_quorum_counts_different_people(desk):
    approval = desk.asks("asker", "a", "quorum:=2", "by=ann,bob,eve")
    first = desk("approve", approval, "--by", "ann").stdout
    assert "1 of 2 have approved (ann); 1 more must agree" in first
    assert "ann has already approved" in desk.refusal("approve", approval, "--by", "ann")
    assert "1 of 2 have agreed (ann)" in desk("approvals").stdout
    desk("resume", "a", code=3)
    assert json.loads(desk("approve", approval, "--by", "eve", "--json").stdout)["status"] == "approved"
    assert json.loads(desk("resume", "a").stdout)[2] == "ann, eve"


def test_a_second_decision_is_told_who_decided_what_whatever_has_become_of_the_run(desk):
    approval = desk.asks("shop", "s")
    desk("approve", approval, "--by", "ann", "--note", "fine")
    again = rf"approval {approval} was approved by ann at \d\d:\d\d:\d\d UTC"
    assert re.search(rf"{again}; note: fine; one decision counts", desk.refusal("reject", approval, "--by", "ann", "--reason", "wait"))
    desk("resume", "s")
    assert re.search(rf"{again}, and its call has been started; note: fine; one", desk.refusal("approve", approval, "--by", "ann"))
    other = desk.asks("asker", "a")
    desk("reject", other, "--by", "eve", "--reason", "no")
    assert "was rejected by eve" in desk.refusal("approve", other)


def test_an_expired_approval_cannot_be_decided_and_the_agent_is_told_which(desk):
    approval = desk.asks("asker", "a", "expires:=1.2")
    time.sleep(1.3)
    page = desk("approvals").stdout
    assert "expired" in page.splitlines()[0]
    assert page.splitlines()[-1] == "    perdure resume a"
    assert "perdure approve" not in page
    assert f"approval {approval} has expired" in desk.refusal("approve", approval)
    assert json.loads(desk("resume", "a").stdout)[:2] == [False, "expired"]
    assert f"approval {approval} was expired" in desk.refusal("approve", approval)


def test_an_id_may_be_cut_to_six_characters_and_nothing_shorter_or_unknown_is_guessed(desk):
    approval = desk.asks("asker", "a")
    assert "but not more" in desk.refusal("approve", approval[: 3 + 5], code=6)
    assert "there is no approval ap-000000000000" in desk.refusal("approve", "ap-000000000000", code=6)
    assert "there is no approval nonsense" in desk.refusal("reject", "nonsense", "--reason", "no", code=6)
    desk("approve", approval[: 3 + 6])


def test_another_tenants_approval_does_not_exist(desk):
    approval = desk.asks("asker", "a", "--tenant", "acme")
    for given in (approval, approval[:10]):
        assert f"there is no approval {given};" in desk.refusal("approve", given, "--tenant", "other", code=6)
    assert f"there is no approval {approval};" in desk.refusal("reject", approval, "--tenant", "other", "--reason", "x", code=6)
    desk("approve", approval, "--tenant", "acme")


def test_a_digest_of_something_else_is_refused(desk):
    approval = desk.asks("asker", "a")
    digest = desk.lines("approvals")[0]["digest"]
    assert "not about 000000000000" in desk.refusal("approve", approval, "--digest", "0" * 12)
    assert "not about" in desk.refusal("approve", approval, "--digest", digest[:11])
    desk("approve", approval, "--digest", digest[:12])


def test_a_database_that_was_named_is_named_in_every_command_to_type(desk):
    url = f"sqlite:///{desk.folder}/other.db"
    asked = desk("run", "control.py:asker", "--id", "a", "--url", url, code=3).stderr
    (approval,) = set(re.findall(r"ap-[0-9a-f]+", asked))
    assert f"perdure approve {approval} --url {url} " in asked
    assert f"perdure reject {approval} --reason TEXT --url {url}\n" in desk("approvals", "--url", url).stdout
    assert f"perdure resume a --url {url}" in desk("approve", approval, "--url", url).stdout
    assert f"`perdure approvals --url {url}`" in desk.refusal("approve", "ap-000000", "--url", url, code=6)


@pytest.mark.parametrize(
    "verb", [("approvals",), ("approve", "ap-123456"), ("signal", "r", "t"), ("pause", "r"), ("unpause", "r"), ("costs",)]
)
def test_no_verb_makes_a_database(desk, verb):
    assert "there is no database perdure.db" in desk.refusal(*verb, code=6)
    assert not list(desk.folder.glob("*.db"))


# --- crashes ----------------------------------------------------------------------------------------------------------------


def test_a_run_killed_while_it_waits_is_decided_and_resumed_by_others(desk):
    """It stays for its own timer, and has asked meanwhile: what counts is in the journal."""
    child = desk.begin("run", "control.py:busy", "--id", "b")
    until(lambda: desk.has_journal() and desk.lines("approvals"))
    assert child.poll() is None
    child.send_signal(signal.SIGKILL)
    child.wait()
    desk("approve", desk.lines("approvals")[0]["approval"], "--by", "ann")
    assert desk.ledger == []
    assert desk("resume", "b").stdout == "busy 800\n"
    assert desk.ledger == ["refund busy 800"]


def test_a_run_killed_before_it_asks_asks_once(desk):
    child = desk.begin("run", "control.py:patient", "--id", "p")
    until(lambda: desk.has_journal() and "timer_set" in [event["type"] for event in desk.events("p")])
    child.send_signal(signal.SIGKILL)
    child.wait()
    approval = desk.asks("patient", "p")
    desk("approve", approval, "--by", "ann")
    assert desk("resume", "p").stdout == "late 700\n"
    assert desk.ledger == ["refund late 700"]


def test_two_processes_decide_at_once_and_one_of_them_counts(desk):
    approval = desk.asks("asker", "a")
    deciders = [desk.begin("approve", approval, "--by", f"p{number}", "--json") for number in range(4)]
    codes = sorted(child.wait(30) for child in deciders)
    assert codes == [0, 2, 2, 2]
    assert [event["type"] for event in desk.events("a")].count("approval_decided") == 1


def test_a_worker_acts_on_a_decision_while_it_runs(desk):
    desk.begin("worker", "control.py:shop")
    desk("run", "control.py:shop", "--id", "s", "--detach")
    until(lambda: desk.lines("approvals"))
    desk("approve", desk.lines("approvals")[0]["approval"], "--by", "ann")
    until(lambda: desk.ledger)
    assert desk.ledger == ["refund o-7 900"]


# --- children ---------------------------------------------------------------------------------------------------------------


def test_run_drives_the_children_too_and_names_what_they_ask(desk):
    asked = desk("run", "control.py:boss", "--id", "b", code=3).stderr
    approvals = re.findall(r"perdure approve (ap-[0-9a-f]+)", asked)
    assert len(approvals) == 2
    for approval in approvals:
        assert "or here: perdure resume b\n" in desk("approve", approval, "--by", "ann").stdout
    assert json.loads(desk("resume", "b").stdout) == ["k1 601", "k2 602"]
    assert sorted(desk.ledger) == ["refund k1 601", "refund k2 602"]


def test_a_worker_that_serves_the_parent_goes_on_with_children_that_it_did_not_start(desk):
    """The parent rests until the children have ended, and nothing else tells the worker about them."""
    asked = desk("run", "control.py:boss", "--id", "b", code=3).stderr
    for approval in re.findall(r"perdure approve (ap-[0-9a-f]+)", asked):
        desk("approve", approval, "--by", "ann")
    desk.begin("worker", "control.py:boss")
    until(lambda: desk.lines("list", "--agent", "boss")[0]["status"] == "succeeded")
    assert sorted(desk.ledger) == ["refund k1 601", "refund k2 602"]


# --- signals ----------------------------------------------------------------------------------------------------------------


def test_signals_arrive_in_order_once_per_key_and_from_stdin(desk):
    waiting = desk("run", "control.py:chat", "--id", "c", code=3).stderr
    assert "waits for signal 'chat'" in waiting
    assert "perdure resume c" in desk("signal", "c", "chat", '{"text": "hi"}', "--key", "k", "--by", "ann").stdout
    desk("signal", "c", "chat", '{"text": "again"}', "--key", "k")
    piped = forked.run(
        [sys.executable, "-m", "perdure", "signal", "c", "chat", "-", "--json"],
        cwd=desk.folder,
        input=b'["ho"]',
        capture_output=True,
        check=True,
    )
    assert json.loads(piped.stdout) == {"run_id": "c", "topic": "chat", "key": None, "status": "queued"}
    assert json.loads(desk("resume", "c").stdout) == [{"text": "hi"}, ["ho"]]
    assert "has finished (succeeded) and accepts no more post" in desk.refusal("signal", "c", "chat", "1")


def test_a_signal_without_json_is_null_and_wrong_ones_are_refused(desk):
    desk("run", "control.py:chat", "--id", "c", "--detach")
    assert "text is written '\"like this\"'" in desk.refusal("signal", "c", "chat", "hello")
    assert "the topic 'a b'" in desk.refusal("signal", "c", "a b", "1")
    assert "the signal's key" in desk.refusal("signal", "c", "chat", "1", "--key", " ")
    assert "there is no run nobody" in desk.refusal("signal", "nobody", "chat", "1", code=6)
    desk("signal", "c", "chat")
    desk("signal", "c", "chat", '"two"')
    assert json.loads(desk("resume", "c").stdout) == [None, "two"]


# --- pause, unpause, cancel -------------------------------------------------------------------------------------------------


def test_a_paused_run_stands_still_until_it_is_unpaused(desk):
    desk("run", "control.py:thinker", "--id", "t", "--detach")
    assert "perdure unpause t" in desk("pause", "t", "--reason", "lunch").stdout
    assert json.loads(desk("pause", "t", "--json").stdout) == {"run_id": "t", "status": "paused"}
    assert "perdure unpause t" in desk("resume", "t", code=3).stderr
    assert "is paused; let it go on: perdure unpause t" in desk("run", "control.py:thinker", "--id", "t", code=3).stderr
    assert desk.ledger == []
    assert json.loads(desk("unpause", "t", "--json").stdout) == {"run_id": "t", "status": "queued", "going_on": ["t"]}
    assert "only a paused run" in desk.refusal("unpause", "t")
    assert desk("resume", "t").stdout == "3\n"
    assert "has finished" in desk.refusal("pause", "t")
    assert "there is no run nobody" in desk.refusal("pause", "nobody", code=6)


def test_a_run_over_its_budget_goes_on_after_a_top_up(desk):
    over = desk("run", "control.py:thinker", "--id", "t", "--budget-usd", "0.02", code=4).stderr
    assert "budget" in over
    assert "--add-usd '0' adds nothing" in desk.refusal("unpause", "t", "--add-usd", "0")
    assert "--add-usd: 'x' is not an amount" in desk.refusal("unpause", "t", "--add-usd", "x")
    assert "--add-tokens" in desk.refusal("unpause", "t", "--add-tokens", "0")
    said = desk("unpause", "t", "--add-usd", "0.03", "--note", "from ann").stdout
    assert "run t has more to spend, and may go on" in said
    assert desk("resume", "t").stdout == "3\n"
    assert desk.ledger == ["think"] * 3
    desk("run", "control.py:thinker", "--id", "free", "--detach")
    assert "has no budget" in desk.refusal("unpause", "free", "--add-usd", "1")


def test_cancel_asks_the_agent_and_is_confirmed_when_it_has_ended(desk):
    desk("run", "control.py:asker", "--id", "a", code=3)
    assert "run a will be cancelled: a worker goes on with it, or here: perdure resume a" in desk("cancel", "a", "--reason", "late").stdout
    assert json.loads(desk("cancel", "a", "--json").stdout) == {"run_id": "a", "status": "cancelling", "in_doubt": []}
    assert "was cancelled" in desk("resume", "a", code=5).stderr
    assert "has finished (cancelled)" in desk.refusal("cancel", "a", "--force")
    assert "there is no run nobody" in desk.refusal("cancel", "nobody", "--force", code=6)


def test_force_ends_what_a_dead_worker_held_and_names_what_it_was_at(desk):
    desk.in_doubt("d")
    ended = json.loads(desk("cancel", "d", "--force", "--json").stdout)
    assert (ended["status"], [(call["call"], call["tool"]) for call in ended["in_doubt"]]) == ("cancelled", [(1, "charge")])
    assert desk.events("d")[-1] | {"forced_by": ME} == desk.events("d")[-1]


def test_force_names_the_call_that_nobody_knows_about(desk):
    desk.in_doubt("d")
    desk("resume", "d", code=4)
    said = desk("cancel", "d", "--force").stdout
    assert "run d is cancelled, without its agent" in said
    assert "stays in doubt: call 1 charge(cents=5), key " in said


def test_force_does_not_end_what_a_worker_holds(desk):
    desk.put("hold")
    child = desk.begin("run", "control.py:holder", "--id", "h")
    until(lambda: desk.ledger == ["hold"])
    assert "is held by" in desk.refusal("cancel", "h", "--force", code=8)
    desk.take("hold")
    assert child.communicate(timeout=60)[0] == "let go\n"


def test_a_forced_end_has_the_children_stop_too(desk):
    desk("run", "control.py:boss", "--id", "b", code=3)
    said = desk("cancel", "b", "--force").stdout
    assert [row["status"] for row in desk.lines("list", "--agent", "kid")] == ["cancelling", "cancelling"]
    assert "perdure cancel b/1 --force" in said
    assert desk.lines("approvals") != []  # asked until the children have ended
    for child in ("b/1", "b/2"):
        desk("cancel", child, "--force")
    assert desk.lines("approvals") == []


def test_what_a_budget_does_at_its_end_stays_as_the_agent_declares_it(desk):
    desk("run", "control.py:strict", "--id", "s", "--budget-usd", "0.02", code=1)
    desk("run", "control.py:strict", "--id", "p", "--budget-usd", "0.02", "--on-exceed", "pause", code=4)
    desk("run", "control.py:thinker", "--id", "t", "--budget-usd", "0.02", "--on-exceed", "fail", code=1)
    desk("run", "control.py:strict", "--id", "own", "--on-exceed", "pause", "--detach")
    (created,) = [event["budget"] for event in desk.events("own") if event["type"] == "run_created"]
    assert (created["usd_micros"], created.get("on_exceed", "pause")) == (5_000_000, "pause")
    assert "declares no budget" in desk.refusal("run", "control.py:thinker", "--on-exceed", "fail")


def test_children_that_one_budget_stops_are_named_in_one_line_with_one_command(desk):
    over = desk("run", "control.py:team", "--id", "q", "--budget-usd", "0.02", code=4).stderr
    assert "run q waits for children that its budget has stopped" in over
    assert re.search(r"\n  \d children were stopped by the budget of q: perdure unpause q --add-usd N\n", over)
    assert "q/" not in over
    desk("unpause", "q", "--add-usd", "1")
    desk("resume", "q")
    (root,) = desk.lines("costs", "--by", "root")
    assert (root["group"], root["runs"], root["calls"], root["usd_micros"]) == ("q", 8, 16, 16 * 12_300)
    assert {row["group"] for row in desk.lines("costs", "--by", "run")} == {f"q/{number}" for number in range(1, 9)}


def test_a_second_pause_does_not_claim_to_have_kept_its_reason(desk):
    desk("run", "control.py:thinker", "--id", "t", "--detach")
    desk("pause", "t", "--reason", "lunch")
    assert "is paused already; the first reason stays" in desk("pause", "t", "--reason", "fire").stdout
    assert [event["reason"] for event in desk.events("t") if event["type"] == "run_paused"] == ["lunch"]


# --- costs ------------------------------------------------------------------------------------------------------------------


def test_costs_add_up_exactly_by_whatever_is_asked(desk):
    desk("run", "control.py:thinker", "--id", "t")
    desk("run", "control.py:thinker", "times:=1", "--id", "u", "--tenant", "acme")
    desk("resume", "t")  # reads the result: nothing is counted again
    (by_agent,) = desk.lines("costs")
    assert {name: by_agent[name] for name in ("by", "group", "runs", "calls", "usd_micros", "tokens_in", "tokens_out")} == {
        "by": "agent",
        "group": "thinker",
        "runs": 2,
        "calls": 4,
        "usd_micros": 49_200,
        "tokens_in": 4_000,
        "tokens_out": 800,
    }
    assert {row["group"]: row["usd_micros"] for row in desk.lines("costs", "--by", "run")} == {"t": 36_900, "u": 12_300}
    assert [row["group"] for row in desk.lines("costs", "--by", "tenant", "--tenant", "acme")] == ["acme"]
    assert [row["group"] for row in desk.lines("costs", "--by", "model")] == ["big"]
    assert [row["group"] for row in desk.lines("costs", "--by", "tool")] == ["think"]
    table = desk("costs", "--by", "tenant").stdout.splitlines()
    assert [line.split()[0] for line in table] == ["tenant", "default", "acme", "total"]
    assert [line.split()[-1] for line in table[1:]] == ["$0.0369", "$0.0123", "$0.0492"]
    assert len(desk.lines("costs", "--since", "1h", "--by", "day")) == 1
    assert desk.lines("costs", "--since", "2099-01-01") == []
    assert "--since 'soon' is not a time" in desk.refusal("costs", "--since", "soon")
    assert "--by" in desk.refusal("costs", "--by", "moon")


# --- queues, times and versions ---------------------------------------------------------------------------------------------


def test_a_run_is_started_with_queue_priority_and_time(desk):
    desk("run", "control.py:thinker", "--id", "t", "--detach", "--queue", "slow", "--priority", "3", "--not-before", "10m")
    (row,) = desk.lines("list")
    assert (row["queue"], row["priority"], row["status"]) == ("slow", 3, "queued")
    assert row["ready_at"] > row["created_at"]
    assert "not before" in desk("list").stdout
    assert "must not begin before" in desk("run", "control.py:thinker", "--id", "t", "--not-before", "10m", "--no-wait", code=3).stderr
    assert desk.ledger == []
    assert "priority" in desk.refusal("run", "control.py:thinker", "--priority", "5000")
    assert "the queue" in desk.refusal("run", "control.py:thinker", "--queue", "a b")
    assert "--not-before 'soon'" in desk.refusal("run", "control.py:thinker", "--not-before", "soon")
    assert "--budget-usd" in desk.refusal("run", "control.py:thinker", "--budget-usd", "lots")


def test_run_stays_until_it_may_begin(desk):
    begun = time.monotonic()
    desk("run", "control.py:thinker", "--not-before", "2s")
    assert time.monotonic() - begun >= 2
    assert desk.ledger == ["think"] * 3


def test_a_worker_takes_only_from_its_queues_and_list_says_what_nobody_serves(desk):
    assert desk.lines("run", "control.py:thinker", "--id", "slow", "--detach", "--queue", "slow")
    desk.begin("worker", "control.py:thinker", "--queue", "fast", "--queue", "faster")
    desk("run", "control.py:thinker", "--id", "quick", "--detach", "--queue", "faster")
    until(lambda: {row["run_id"]: row["status"] for row in desk.lines("list")}["quick"] == "succeeded")
    assert [row["run_id"] for row in desk.lines("list", "--unserved")] == ["slow"]
    assert "no worker takes from queue slow" in desk("list").stdout
    assert desk.ledger == ["think"] * 3
    assert "--queue" in desk.refusal("worker", "control.py:thinker", "--queue", "a b")


def test_runs_of_a_version_that_nobody_serves_are_shown_and_adopted(desk):
    desk("run", "control.py:thinker", "--id", "old", "--detach", "--version", "1")
    desk("run", "control.py:chat", "--id", "talk", code=3)
    code = (desk.folder / "control.py").read_text()
    (desk.folder / "control.py").write_text(code.replace('"1")\nasync def thinker', '"2")\nasync def thinker'))
    worker = desk.begin("worker", "control.py")
    until(lambda: [row["run_id"] for row in desk.lines("list", "--unserved")] == ["old"])
    assert "no worker serves version 1 of thinker" in desk("list").stdout
    doctor = desk("doctor").stdout
    assert "no worker serves version 1 of thinker: 1 run" in doctor
    assert "thinker@2" in doctor
    worker.terminate()
    worker.wait(20)
    refused = desk.refusal("resume", "old")
    assert refused.rstrip().endswith("which fits its journal: perdure adopt old")
    assert desk.refusal("resume", "old", "control.py:thinker").rstrip().endswith("perdure adopt old control.py:thinker")
    said = desk("resume", "old", "control.py:thinker", "--adopt").stdout
    assert said.startswith("run old goes on with version 2; nothing of it has run yet; a worker that serves it goes on with it, or here: ")
    assert said.rstrip().endswith("perdure resume old control.py:thinker")
    assert [event["type"] for event in desk.events("old")] == ["run_created", "run_adopted"]  # it is not driven
    assert desk("resume", "old").stdout == "3\n"
    (adopted,) = [event for event in desk.events("old") if event["type"] == "run_adopted"]
    assert (adopted["version"], adopted["by"]) == ("2", ME)


def test_adopting_a_parent_adopts_what_is_below_it(desk):
    asked = desk("run", "control.py:boss", "--id", "b", code=3).stderr
    for approval in re.findall(r"perdure approve (ap-[0-9a-f]+)", asked):
        desk("approve", approval, "--by", "ann")
    code = (desk.folder / "control.py").read_text()
    for name in ("kid", "boss"):
        code = code.replace(f'"1")\nasync def {name}', f'"2")\nasync def {name}')
    (desk.folder / "control.py").write_text(code)
    desk.refusal("resume", "b")
    adopted = json.loads(desk("resume", "b", "--adopt", "--json").stdout)
    assert (adopted["version"], sorted(adopted["adopted"])) == ("2", ["b", "b/1", "b/2"])
    assert json.loads(desk("resume", "b").stdout) == ["k1 601", "k2 602"]


# --- doctor and completion --------------------------------------------------------------------------------------------------


def test_doctor_says_whether_notices_go_out_and_never_the_secret(desk):
    desk.asks("asker", "a")
    assert "none is set: notices go to the workers' log alone" in desk("doctor").stdout
    hidden = {"PERDURE_WEBHOOK_SECRET": "hush-hush-and-not-a-word-to-anybody", "PERDURE_WEBHOOK_URL": "http://127.0.0.1:9/token-of-ours"}
    said = desk("doctor", **hidden).stdout
    assert re.search(r"ok +webhook +http://127.0.0.1:9", said)
    desk("run", "control.py:asker", "--id", "b", code=3, **hidden)
    after = desk("doctor", **hidden).stdout
    assert re.search(r"warn +notices +1 notice could not be sent yet; the last one: .*[Rr]efused", after)
    outside = desk("doctor", code=1, **{**hidden, "PERDURE_WEBHOOK_URL": "https://hooks.example.com/token-of-ours"}).stdout
    assert re.search(r"FAIL +webhook +no notice can be sent", outside)
    short = desk("doctor", code=1, **{**hidden, "PERDURE_WEBHOOK_SECRET": "hush-hush"}).stdout
    assert "webhook_secret has 9 characters and can be guessed; at least 32 random ones" in short
    assert "hush-hush" not in said + after + outside + short
    assert "token-of-ours" not in said + after + outside


def test_pending_approvals_are_completed(desk):
    approval = desk.asks("asker", "a")
    environ = os.environ | {"_PERDURE_COMPLETE": "bash_complete", "COMP_WORDS": "perdure approve ap-", "COMP_CWORD": "2"}
    program = "from perdure.cli import cli; from click.shell_completion import shell_complete; shell_complete(cli, {}, 'perdure', '_PERDURE_COMPLETE', 'bash_complete')"
    done = subprocess.run([sys.executable, "-c", program], cwd=desk.folder, env=environ, capture_output=True, text=True, check=True)
    assert done.stdout == f"plain,{approval}\n"


def test_a_program_that_runs_a_loop_of_its_own_when_it_is_imported_is_resumed_and_undone_all_the_same(desk):
    (desk.folder / "bare.py").write_text(
        (desk.folder / "control.py").read_text() + "\n\nasync def main():\n    pass\n\nasyncio.run(main())\n"
    )
    desk("run", "bare.py:chat", "--id", "bare", code=3)
    for word in ('"one"', '"two"'):
        desk("signal", "bare", "chat", word)
    assert json.loads(desk("resume", "bare", "--json").stdout)["output"] == ["one", "two"]
    assert "nothing" in desk("undo", "bare", "--dry-run").stdout
