"""The page about a parked run: what it waits for, until when, what happens then, and what to type."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tests.unit.inspect_tools import HOLDER, HOSTILE, LEASE_US, WAITERS, approval_of, at_work, hold, make_waiting, parent, url_of

from perdure import Perdure, Run, agent, tool
from perdure.cli import cli
from perdure.core.events import RunCancelled
from perdure.engine.clock import Clock
from perdure.inspect.health import check_runs
from perdure.inspect.verify import verify_run
from perdure.inspect.view import loader, read_run, run_record
from perdure.inspect.why.page import Why, why
from perdure.inspect.workers import missing
from perdure.store.api import Served, Store
from perdure.store.open import open_store

HOUR_US = 3_600_000_000


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("waiting") / "journal.db"
    make_waiting(path)
    return path


@pytest.fixture
def path(zoo: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(zoo, tmp_path / "journal.db"))


@pytest.fixture
def store(path: Path) -> Iterator[Store]:
    opened = open_store(url_of(path))
    yield opened
    opened.close()


def page_of(store: Store, run_id: str, later_us: int = 0) -> Why:
    return why(store, run_id, now=Clock().now() + later_us)


def commands(page: Why) -> list[str]:
    return [step.command for step in page.next]


def told(path: Path, *words: str) -> str:
    result = CliRunner().invoke(cli, [*words, "--url", url_of(path)])
    assert result.exit_code == 0, result.output
    return result.output


# -- approvals ----------------------------------------------------------------------------------------------------------------
def test_an_approval_is_told_with_what_exactly_who_decides_how_many_have_agreed_and_what_happens_when_nobody_does(store: Store) -> None:
    page = page_of(store, "asks")
    (one,) = page.approvals
    assert (one.approval, one.call, one.action) == (approval_of(store, "asks"), 1, "publish")
    assert one.input == {"text": HOSTILE, "copies": 3}
    assert (one.by, one.quorum, one.voters, one.status) == (["ann", "bob", "role:press"], 2, ["bob"], "pending")
    assert one.then.endswith("(in 4 h), then cleo or dora will be asked")
    assert page.sentence.startswith("waiting for ann or bob or role:press to decide publish(copies=3, ")
    assert commands(page)[:2] == [f"perdure approve {one.approval}", f"perdure reject {one.approval} --reason 'TEXT'"]
    assert not any("--edit" in command for command in commands(page))  # nothing of it may be edited
    assert page.never_started == [
        f"whatever the agent does after event 5 (its last call so far is 1, approval {one.approval}): that code has not run"
    ]


def test_a_call_that_waits_for_an_approval_says_so_and_offers_its_editable_fields_to_be_filled_in(store: Store) -> None:
    page = page_of(store, "refund")
    (one,) = page.approvals
    assert one.asked == 'refund(cents=900, order="o-1")'
    assert one.tool
    assert "then it counts as expired: refund is not made" in one.then
    assert page.never_started[0] == f'call 1: refund(cents=900, order="o-1"): not sent: approval {one.approval} is needed'
    # A suggested command must not approve the proposed values under the name of an edit, if it is pasted unchanged.
    assert shlex.split(commands(page)[1])[-2:] == ["--edit", '{"cents": NEW}']
    assert page.next[1].does == "say yes with other values: cents is 900 now"
    assert re.search(r" since .* UTC \(.*\): until .* \(in .*\), then it counts as expired", page.sentence)
    assert one.digest[:12] in page.next[0].does


def test_an_approval_whose_time_is_over_is_not_offered_any_more_and_says_that_a_worker_is_missing(store: Store) -> None:
    page = page_of(store, "refund", later_us=2 * HOUR_US)
    assert page.approvals[0].expired
    assert "its time was over at " in page.sentence
    assert page.sentence.endswith("no worker is alive")
    assert not any(command.startswith("perdure approve") for command in commands(page))
    assert commands(page)[0] == "perdure resume refund"


def test_a_decision_that_the_holder_has_not_read_yet_is_told_as_on_its_way(path: Path, store: Store) -> None:
    approval = approval_of(store, "refund")
    hold(store, "refund", "refunds")

    async def approve(app: Perdure) -> None:
        await app.approve(approval, by="ann")

    at_work(path, approve)
    page = page_of(store, "refund")
    assert (page.approvals[0].status, page.approvals[0].said_by) == ("approved", "ann")
    assert commands(page)[0] == "perdure events refund --follow"
    assert f"{approval}: approved by ann, and the run has not been told yet" in told(path, "why", "refund")
    store.unregister(HOLDER, Clock().now())


def test_what_was_approved_edited_rejected_and_spent_is_evidence(store: Store) -> None:
    (bought,) = page_of(store, "bought").done
    assert bought.asked == 'refund(cents=700, order="o-2")'
    assert bought.approval is not None
    assert bought.cost == "1,200 tokens in, 34 out, $0.0123"
    page = page_of(store, "bought")
    assert (page.cost.calls, page.cost.tokens_in, page.cost.usd_micros, page.cost.usd) == (1, 1200, 12_300, 0.0123)
    assert bought.approved == "approved by ann with cents 900 → 700; note: less"
    assert (page_of(store, "refused").done, page_of(store, "refused").done_count) == ([], 0)
    (refused,) = page_of(store, "refused").not_done
    assert refused.outcome == "was not made: NotApproved: rejected by ann: fraud"
    assert page_of(store, "refused").cost.calls == 0


def test_the_page_says_who_approved_and_with_what_and_counts_as_done_only_what_happened(path: Path) -> None:
    bought = told(path, "why", "bought")
    assert "\ndone: 1\n" in bought
    assert "approved by ann with cents 900 → 700; note: less" in bought
    assert "not made, or failed" not in bought
    refused = told(path, "why", "refused")
    assert "\ndone: nothing\n" in refused
    assert "\nnot made, or failed: 1\n" in refused


def test_text_that_imitates_an_approval_or_carries_escapes_stays_data(path: Path, store: Store) -> None:
    real = approval_of(store, "asks")
    for verb in (("why", "asks"), ("show", "asks"), ("events", "asks"), ("trace", "asks", "5"), ("why", "asks", "--json")):
        output = told(path, *verb)
        assert "\x1b" not in output
        assert "\u202e" not in output
        assert not [line for line in output.splitlines() if line.strip().startswith("ap-0000")]
    assert [line for line in told(path, "why", "asks").splitlines() if line.strip().startswith("perdure approve")] == [
        f"  perdure approve {real} --url {url_of(path)}"
    ]
    (line,) = [line for line in told(path, "why", "asks").splitlines() if "reason, in the agent's words: “the editor said yes" in line]
    assert line.endswith("”")


def test_an_action_that_imitates_a_signal_is_no_topic(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"

    @agent(version="1")
    async def sly(run: Run) -> str:
        return (await run.request_approval("x or signal 'fake'")).outcome

    async def drive(app: Perdure) -> None:
        await app.start(sly, id="r")
        await app.engine.drive("r", wait=False)

    at_work(path, drive, agents=[sly])
    store = open_store(url_of(path))
    page = page_of(store, "r")
    store.close()
    assert page.listens == []
    assert not any(command.startswith("perdure signal") for command in commands(page))


# -- signals, children --------------------------------------------------------------------------------------------------------
def test_the_topic_that_a_run_listens_to_and_how_to_send_one(path: Path, store: Store) -> None:
    page = page_of(store, "listens")
    assert page.listens == ["chat"]
    assert page.waiting == ["a signal on 'chat'"]
    assert commands(page)[0] == "perdure signal listens chat 'JSON'"
    assert (page.queue, page.priority) == ("chat", 5)
    assert "queue chat, priority 5" in told(path, "why", "listens").splitlines()[0]


def test_a_child_that_needs_attention_is_the_news_and_its_page_the_first_command(store: Store) -> None:
    page = page_of(store, "parent")
    assert page.sentence.endswith(
        "for a child that will not go on by itself: child parent/1 needs attention: call 2 (charge): TimeoutError: no answer"
    )
    assert commands(page)[0] == "perdure why parent/1"
    assert page.children is not None
    assert (page.children.total, page.children.by_status) == (1, {"needs_attention": 1})
    child = page_of(store, "parent/1")
    assert (child.parent, child.parent_call) == ("parent", 1)


def test_so_is_a_child_of_a_child(store: Store) -> None:
    page = page_of(store, "grand")
    assert "child grand/1/1 needs attention" in page.sentence
    assert commands(page)[0] == "perdure why grand/1/1"


def test_children_that_have_ended_are_done_with_what_they_brought(store: Store) -> None:
    assert [(done.asked, done.outcome) for done in page_of(store, "squares").done] == [
        ("square@1(number=2)", "succeeded with 4"),
        ("square@1(number=3)", "succeeded with 9"),
    ]
    assert page_of(store, "negative").done == []
    assert page_of(store, "negative").not_done[0].outcome == "failed: ValueError: negative"
    assert page_of(store, "squares").cost_words == "2 calls, no tokens or money, with its children; itself: nothing"


def test_of_many_children_the_page_has_numbers_and_the_few_that_matter(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"

    async def many(app: Perdure) -> None:
        await app.start(parent, [f"o-{number}" for number in range(40)], id="many")
        await app.engine.drive("many", wait=False)
        await app.resolve("many/7", 2, happened={}, by="ann")

    at_work(path, many, agents=WAITERS)
    store = open_store(url_of(path))
    page = page_of(store, "many")
    store.close()
    assert page.children is not None
    assert (page.children.total, page.children.by_status) == (40, {"needs_attention": 39, "queued": 1})
    assert len(page.children.shown) == 8
    assert [command for command in commands(page) if " why " in command] == [f"perdure why many/{number}" for number in (1, 2, 3)]
    assert len(told(path, "why", "many").splitlines()) < 40


# -- stopped ------------------------------------------------------------------------------------------------------------------
def test_a_paused_run_says_who_paused_it_and_is_not_offered_what_would_be_refused(store: Store) -> None:
    page = page_of(store, "paused")
    assert page.sentence.startswith("paused by ann since ")
    assert ": the bank is closed; " in page.sentence
    assert page.paused is not None
    assert (page.paused.by, page.paused.reason) == ("ann", "the bank is closed")
    assert commands(page) == ["perdure unpause paused", "perdure cancel paused"]


def test_an_exceeded_budget_says_whose_how_much_and_how_to_add_to_it(path: Path, store: Store) -> None:
    page = page_of(store, "thrifty")
    assert "the budget of run thrifty is used up: 2 of 2 calls, and 1 call more wanted" in page.sentence
    assert commands(page)[0] == "perdure unpause thrifty --add-calls N"
    assert "needs at least 1 call" in page.next[0].does
    assert page.never_started[0] == 'call 3: poll(order="2"): not sent: there is not enough left in the budget'
    assert "its own budget: $0.00 of $5.00, 2 of 2 calls; when it is used up: pause" in told(path, "why", "thrifty")


def test_a_run_that_goes_in_circles_says_which_one(store: Store) -> None:
    page = page_of(store, "circling")
    assert (
        'going in circles, so it was stopped before it could spend more: poll(order="o-1") has returned the same result 3 times'
        in page.sentence
    )
    assert "perdure unpause circling" in commands(page)


def test_a_call_that_waits_for_its_turn_says_until_when(store: Store) -> None:
    page = page_of(store, "hurried")
    (wait,) = page.waiting
    assert wait.startswith("call 2 slow_service: its turn under the rate limit, at ")
    assert page.never_started[0] == "call 2: slow_service(number=2): not sent: it waits for its turn under the rate limit"
    assert page.wakes_at is not None
    assert datetime.fromisoformat(page.wakes_at) > datetime.fromisoformat(page.now)


def test_a_run_that_was_ended_by_force_says_who_and_what_stays_in_doubt(store: Store) -> None:
    page = page_of(store, "forced")
    assert page.sentence.startswith("ended by force at ")
    assert page.sentence.endswith("by bob, without its agent: its code is gone; left open: 1 call")
    (doubt,) = page.in_doubt
    assert doubt.by_itself.startswith("nothing: the run has ended")
    assert commands(page) == ["perdure show forced", "perdure retry forced"]


def test_a_run_that_shall_not_begin_yet_says_when_it_may(store: Store) -> None:
    assert page_of(store, "later").sentence.startswith("queued in default: it shall not begin before ")


# -- versions and pins --------------------------------------------------------------------------------------------------------
def test_a_version_that_no_worker_serves_is_named_with_both_ways_out(store: Store) -> None:
    store.register("w", "host:1", 1, Clock().now(), [Served("sleeper", "2")])
    page = page_of(store, "later", later_us=0)
    assert page.unserved == "no worker serves version 1 of sleeper: 1 worker is alive, with version 2"
    assert page.unserved in page.sentence
    assert commands(page)[0].startswith("perdure worker ")
    # The recorded file has the old version: only a person knows where the new code is.
    assert commands(page)[1:3] == ["perdure adopt later NEW_FILE.py:sleeper", "perdure replay later NEW_FILE.py:sleeper"]
    store.register("w", "host:1", 1, Clock().now(), [Served("sleeper", "1")], ["slow"])
    page = page_of(store, "later", later_us=0)
    assert page.unserved == "no worker takes from queue default: 1 worker is alive, for slow"
    # Nothing is wrong with its version: a worker only has to serve its queue.
    assert not [command for command in commands(page) if "adopt" in command or "replay" in command]
    assert [command.split()[1] for command in commands(page)] == ["worker", "resume", "cancel"]
    store.register("w", "host:1", 1, Clock().now(), [Served("sleeper", "1")])
    assert page_of(store, "later").unserved is None
    row = store.get("later")
    assert row is not None
    assert missing(row, []) is None  # no worker is alive: this is another problem


def test_a_tool_that_has_changed_and_a_version_that_was_adopted_are_told(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"

    def made(version: str, default: int) -> Any:
        @tool(effect="read", name="price")
        async def price(order: str, cents: int = default) -> int:
            return cents

        @agent(name="seller", version=version)
        async def seller(run: Run) -> int:
            first = await price("a", 5)
            await run.receive("go")
            return first + await price("b", 1)

        return seller

    async def begin(app: Perdure) -> None:
        await app.start("seller", id="r")
        await app.engine.drive("r", wait=False)

    async def go_on(app: Perdure) -> None:
        await app.adopt("r", by="ann", note="only the default differs")
        await app.signal("r", "go", by="bob")
        await app.engine.drive("r")

    at_work(path, begin, agents=[made("1", 5)])
    at_work(path, go_on, agents=[made("2", 6)])
    store = open_store(url_of(path))
    page = page_of(store, "r")
    row = store.get("r")
    assert row is not None
    assert verify_run(store, row).problem is None
    store.close()
    assert page.version == "2"
    assert [line.split(" (")[0] for line in page.changed] == [
        "version 2 goes on with it: ann says so",
        "tool price has changed since the run first used it",
    ]
    assert "changed under it" in told(path, "why", "r")


# -- show and doctor ----------------------------------------------------------------------------------------------------------
def test_show_has_approvals_children_cost_and_budget(path: Path, store: Store) -> None:
    bought = json.loads(told(path, "show", "bought", "--json"))
    for key in "run_id agent version tenant actor status input output error created_at updated_at seq epoch calls cost".split():
        assert key in bought
    (approval,) = bought["approvals"]
    assert (approval["status"], approval["by"], approval["source"]) == ("consumed", "ann", "10.0.0.7")
    assert (approval["input"]["cents"], approval["approved_input"]["cents"]) == (900, 700)
    assert bought["cost"] | {"seconds": 0} == {
        "calls": 1,
        "attempts": 1,
        "seconds": 0,
        "tokens_in": 1200,
        "tokens_out": 34,
        "tokens_cached": 0,
        "usd_micros": 12_300,
        "usd": 0.0123,
        "lost": 0,
    }
    parent_ = json.loads(told(path, "show", "parent", "--json"))
    assert [(child["run_id"], child["status"]) for child in parent_["children"]] == [("parent/1", "needs_attention")]
    thrifty = json.loads(told(path, "show", "thrifty", "--json"))
    assert thrifty["budget"]["limits"][1] == {"what": "calls", "limit": 2, "spent": 2, "reserved": 0}
    child = json.loads(told(path, "show", "squares/2", "--json"))
    assert (child["parent"], child["parent_call"], child["queue"], child["priority"]) == ("squares", 2, "default", 0)
    before = run_record(read_run(store, "bought", 5), loader(store))
    assert [one["status"] for one in before["approvals"]] == ["pending"]


def test_show_for_people_has_a_line_for_each_of_them(path: Path) -> None:
    assert "pending: ann or bob or role:press, 1 of 2 have agreed" in told(path, "show", "asks")
    assert "approved by ann with cents 900 → 700; note: less" in told(path, "show", "bought")
    assert "1     squares/1  square@1(number=2)  succeeded with 4" in told(path, "show", "squares")
    assert "parent   squares (its call 1)" in told(path, "show", "squares/1")
    assert "budget   its own budget: $0.00 of $5.00, 2 of 2 calls" in told(path, "show", "thrifty")


def test_signals_that_arrived_as_the_run_ended_are_shown_with_what_they_said(path: Path, store: Store) -> None:
    hold(store, "listens", "listens")
    assert page_of(store, "listens").unread == []

    async def speak(app: Perdure) -> None:
        await app.signal("listens", "chat", {"text": "are you there?"}, by="ann")
        await app.signal("listens", "stop", 1, by="bob")

    at_work(path, speak, agents=WAITERS)
    assert page_of(store, "listens").unread == [], "while somebody holds it they are on their way"
    store.unregister(HOLDER, Clock().now())
    store.end("listens", RunCancelled(forced_by="ann"), event_id=Clock().new_id(), now=Clock().now())
    lines = [
        "2 signals arrived as it ended and were not read:",
        'signal \'chat\' from ann: {"text":"are you there?"}',
        "signal 'stop' from bob: 1",
    ]
    assert page_of(store, "listens").unread == lines
    for verb in ("why", "show"):
        page = told(path, verb, "listens")
        assert all(line in page for line in lines), page
    record = json.loads(told(path, "show", "listens", "--json"))
    assert [(one["type"], one["topic"], one["payload"], one["by"]) for one in record["unread"]] == [
        ("signal_received", "chat", {"text": "are you there?"}, "ann"),
        ("signal_received", "stop", 1, "bob"),
    ]
    assert json.loads(told(path, "show", "bought", "--json"))["unread"] == []


def test_the_doctor_knows_what_waits_for_an_approval_and_what_has_run_out_of_time(store: Store) -> None:
    def approvals(later_us: int) -> Any:
        return next(check for check in check_runs(store, Clock().now() + later_us, LEASE_US) if check.name == "approvals")

    assert approvals(0).verdict == "ok"
    assert approvals(0).found.startswith("2 approvals pending, the oldest for ")
    late = approvals(2 * HOUR_US)
    assert (late.verdict, late.way_out) == ("warn", "perdure why refund")
    assert "1 has run out of time, and no worker has noticed" in late.found


@pytest.mark.parametrize("run_id", ["asks", "listens", "parent"])
def test_a_run_that_waited_and_is_held_now_says_who_holds_it_and_still_what_a_person_can_do(store: Store, run_id: str) -> None:
    hold(store, run_id, run_id)
    page = page_of(store, run_id)
    assert "worker host:1 holds it and is alive" in page.sentence
    expected = {"asks": f"perdure approve {approval_of(store, 'asks')}", "parent": "perdure why parent/1"}
    assert commands(page)[0] == expected.get(run_id, "perdure events listens --follow")
