"""Bulk operations as people use them: preview, question, batch, skipped and failed runs, kill -9; on both databases."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.e2e import test_retry
from tests.e2e.test_retry import Desk, typed
from tests.servers import forked

desk, one = test_retry.desk, test_retry.one  # the same fixtures

# Several runs in one process: started, and driven as far as they go.
MAKE = """
import asyncio, sys
import shop
from perdure import Perdure
async def main():
    async with Perdure(agents=[getattr(shop, sys.argv[1])]) as app:
        for run_id in sys.argv[2:]:
            await app.start(sys.argv[1], id=run_id)
            await app.drive(run_id, wait=False)
asyncio.run(main())
"""


def make(desk: Desk, agent: str, *run_ids: str) -> None:
    (desk.folder / "make.py").write_text(MAKE)
    command = [sys.executable, "make.py", agent, *run_ids]
    env = os.environ | {"PERDURE_URL": desk.url}
    subprocess.run(command, cwd=desk.folder, env=env, check=True, timeout=60, capture_output=True)


def killed(desk: Desk, method: str, moment: str, nth: int, *args: str) -> None:
    """The command, which is killed before or after the nth call of this method of the store."""
    command = [sys.executable, "-m", "tests.crash.bulked", method, moment, str(nth), *args]
    paths = [*filter(None, [os.environ.get("PYTHONPATH")]), str(Path(__file__).parents[2])]
    env = os.environ | {"PERDURE_URL": desk.url, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(command, cwd=desk.folder, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGKILL, (done.returncode, done.stdout, done.stderr)


def batches(desk: Desk, run_id: str) -> list[str]:
    """The batches of the events of this run, in order."""
    return [event["data"]["batch"] for event in desk.lines("events", run_id) if event["data"].get("batch")]


def statuses(desk: Desk) -> dict[str, str]:
    return {row["run_id"]: row["status"] for row in desk.lines("list")}


def in_batch(desk: Desk, run_ids: Sequence[str]) -> str:
    """The one batch of these runs: each has exactly one event of it."""
    found = [batches(desk, run_id) for run_id in run_ids]
    assert len(set(map(tuple, found))) == 1, found
    assert list(map(len, found)) == [1] * len(run_ids), found
    return found[0][0]


# -- what a person sees -----------------------------------------------------------------------------------------------
def test_runs_are_paused_unpaused_and_cancelled_by_a_query_under_one_batch_each(desk: Desk) -> None:
    make(desk, "waiter", "w1", "w2", "w3")
    make(desk, "order", "o1")
    dry = desk.run("pause", "--where", "agent:waiter", "--dry-run")
    assert dry.stdout == "3 runs can be paused\n"
    assert dry.stderr.startswith("3 runs to pause\n  3 waiting\n  3 of waiter@1\n  w3  waiting ")
    assert "this is no terminal" in desk.refusal("pause", "--where", "agent:waiter")
    assert set(statuses(desk).values()) == {"waiting", "failed"}
    done = desk.run("pause", "--where", "agent:waiter", "--yes", "--by", "ann", "--reason", "deploy")
    assert done.stdout == "3 runs paused, or will be at their next step\n", done.stderr
    assert statuses(desk) == {"w1": "paused", "w2": "paused", "w3": "paused", "o1": "failed"}
    first = in_batch(desk, ["w1", "w2", "w3"])
    assert re.search(rf"\nbatch {first}\n", done.stderr)
    paused = next(event for event in desk.lines("events", "w1") if event["type"] == "run_paused")
    assert (paused["data"]["by"], paused["data"]["reason"]) == ("ann", "deploy")
    *lines, last = desk.lines("unpause", "--where", "agent:waiter", "--limit", "2", "--yes")
    assert [line["run_id"] for line in lines] == ["w3", "w2"]
    assert (last["done"], last["skipped"], last["failed"], last["interrupted"]) == (2, 0, 0, False)
    assert statuses(desk)["w1"] == "paused"
    assert batches(desk, "w3") == [first, last["batch"]]
    assert desk("cancel", "--where", "agent:waiter", "--yes").startswith("3 runs asked to stop; each ends when its agent has cleaned up")
    assert desk("cancel", "--where", "agent:waiter", "--force", "--yes") == "3 runs cancelled\n"
    assert "no runs that match" in desk.run("cancel", "--where", "agent:waiter", "--yes").stderr
    assert statuses(desk) == {"w1": "cancelled", "w2": "cancelled", "w3": "cancelled", "o1": "failed"}
    assert "all as they were written" in desk("verify")


def test_the_audit_log_has_the_batch(one: Desk) -> None:
    make(one, "waiter", "w1")
    batch = one.lines("pause", "--where", "agent:waiter", "--yes")[-1]["batch"]
    assert [line["context"].get("batch") for line in one.lines("audit", "w1") if line["type"] == "run_paused"] == [batch]
    assert f"in batch {batch}" in one("events", "w1")


def test_no_is_the_default_and_writes_nothing(one: Desk) -> None:
    make(one, "waiter", *(f"w{n}" for n in range(7)))
    code, said = typed(one, "\n", "cancel", "--where", "agent:waiter")
    assert (code, "nothing was written" in said) == (2, True), said
    assert "… and 2 more\n" in said
    assert "cancel 7 runs? [y/N]" in said
    assert set(statuses(one).values()) == {"waiting"}
    code, said = typed(one, "y\n", "cancel", "--where", "agent:waiter")
    assert (code, "100%" in said, "7 runs asked to stop" in said) == (0, True, True), said


def test_what_the_person_has_not_seen_is_not_touched(one: Desk) -> None:
    make(one, "waiter", "w1", "w2")

    def meanwhile() -> None:
        make(one, "waiter", "new")
        one("cancel", "w2", "--force")

    code, said = typed(one, "y\n", "cancel", "--where", "agent:waiter", meanwhile=meanwhile)
    assert (code, "1 run asked to stop" in said) == (0, True), said
    assert statuses(one) == {"w1": "cancelling", "w2": "cancelled", "new": "waiting"}


def test_a_run_to_which_the_verb_does_not_apply_any_more_is_skipped_with_the_reason(one: Desk) -> None:
    make(one, "waiter", "w1", "w2", "w3")
    one("pause", "--where", "agent:waiter", "--yes")
    code, said = typed(one, "y\n", "unpause", "--where", "agent:waiter", meanwhile=lambda: one("signal", "w2", "go", "1"))
    assert code == 0, said
    assert "skipped: run w2: it has changed since the preview" in said
    assert "2 runs may go on; 1 skipped" in said
    assert statuses(one) == {"w1": "queued", "w2": "paused", "w3": "queued"}


def test_a_run_that_cannot_be_changed_is_a_failure_with_its_reason(one: Desk) -> None:
    one.put("down")
    make(one, "shipper", "s1", "s2")
    make(one, "saver", "b1")
    done = one.run("unpause", "--where", "status:needs_attention", "--yes")
    assert done.returncode == 1
    assert done.stdout == "0 runs may go on; 3 failed\n"
    assert "failed: run b1 needs attention: its budget is used up" in done.stderr
    assert "failed: run s2 needs attention: call 1 (ship) may have happened" in done.stderr
    assert "the same for 1 more run: s1" in done.stderr
    assert "  2 needs_attention (in_doubt), 1 needs_attention (budget)\n" in done.stderr


def test_one_run_or_many_and_nothing_in_between(one: Desk) -> None:
    make(one, "waiter", "w1")
    for verb in ("cancel", "pause", "unpause"):
        assert f"name the run to {verb}" in one.refusal(verb)
        assert "leave out one of the two" in one.refusal(verb, "w1", "--where", "agent:waiter")
        assert "leave out one of the two" in one.refusal(verb, "w1", "--dry-run")
        assert "there is no batch nosuch" in one.refusal(verb, "--batch", "nosuch", "--yes", code=6)
    assert "cancel is for runs that are queued" in one.refusal("cancel", "--where", "status:failed", "--yes")
    assert "unpause is for runs that are paused, needs_attention" in one.refusal("unpause", "--where", "status:queued", "--yes")
    assert set(statuses(one).values()) == {"waiting"}


def test_children_and_undo_runs_follow_the_rules_of_the_verb(one: Desk) -> None:
    one.put("down")
    make(one, "family", "f1")
    one.failed("reader", "r1")
    one("undo", "r1", "--yes")
    told = one.run("retry", "--where", "status:failed", "--dry-run")
    assert "1 left out: children, which go on with their parents" in told.stderr


# -- calls in doubt ---------------------------------------------------------------------------------------------------
def test_the_calls_in_doubt_of_many_runs_are_settled_with_one_outcome_and_a_reason(desk: Desk) -> None:
    desk.put("down")
    make(desk, "shipper", "s1", "s2", "s3")
    where = ("resolve", "--where", "agent:shipper")
    assert "needs exactly one answer" in desk.refusal(*where, "--yes", "--note", "x")
    assert "say how you know that, with --note TEXT" in desk.refusal(*where, "--happened", '"x"', "--yes")
    assert "this is no terminal" in desk.refusal(*where, "--happened", '"x"', "--note", "x")
    dry = desk.run(*where, "--happened", '"shipped"', "--note", "the carrier's list", "--dry-run")
    assert "  3 calls of ship: it happened; the agent goes on with that result\n" in dry.stderr
    assert dry.stdout.startswith("run s3: call 1: it happened\n  the same for 2 more runs: s2, s1\n")
    assert set(statuses(desk).values()) == {"needs_attention"}
    *lines, last = desk.lines(*where, "--happened", '"shipped"', "--note", "the carrier's list", "--by", "ann", "--limit", "2", "--yes")
    assert [(line["run_id"], line["calls"]) for line in lines] == [("s3", [1]), ("s2", [1])]
    assert in_batch(desk, ["s2", "s3"]) == last["batch"]
    settled = next(event for event in desk.lines("events", "s2") if event["type"] == "tool_call_resolved")
    assert (settled["data"]["by"], settled["data"]["note"]) == ("ann", "the carrier's list")
    assert desk("resume", "s2") == "shipped\n"
    assert statuses(desk)["s1"] == "needs_attention"
    assert desk.ledger == ["ship rome"] * 3


TWO_TOOLS = """
@agent(version="1")
async def sender(run: Run) -> str:
    await asyncio.gather(ship("rome"), post("rome"))
    return "end"

@tool(effect="once")
async def post(to: str) -> str:
    note(f"post {to}")
    raise TimeoutError("no answer")
"""


def test_calls_of_several_tools_are_settled_one_tool_at_a_time(one: Desk) -> None:
    shop = one.folder / "shop.py"
    shop.write_text(shop.read_text() + TWO_TOOLS)
    one.put("down")
    make(one, "sender", "s1", "s2")
    where = ("resolve", "--where", "agent:sender", "--fail", "lost", "--note", "asked them", "--yes")
    refused = one.run(*where)
    assert (refused.returncode, "calls in doubt of several tools: 2 calls of ship, 2 calls of post" in refused.stderr) == (2, True)
    assert set(statuses(one).values()) == {"needs_attention"}
    *lines, _ = one.lines(*where, "--tool", "post")
    assert [line["calls"] for line in lines] == [[2], [2]]
    one("resume", "s1", code=4)
    assert (
        "no call of nosuch is in doubt"
        in one.run("resolve", "--where", "id:s1", "--fail", "x", "--note", "x", "--tool", "nosuch", "--yes").stderr
    )


def test_a_call_that_came_into_doubt_after_the_preview_is_not_settled(one: Desk) -> None:
    one.put("down")
    make(one, "shipper", "s1", "s2")

    def meanwhile() -> None:
        one("resolve", "s2", "1", "--did-not-happen", "--final")
        one("resume", "s2", code=4)  # its second attempt is in doubt now

    answer = ("--happened", '"shipped"', "--note", "the list of yesterday")
    code, said = typed(one, "y\n", "resolve", "--where", "agent:shipper", *answer, meanwhile=meanwhile)
    assert (code, "1 run resolved; 1 skipped" in said) == (0, True), said
    assert statuses(one) == {"s1": "queued", "s2": "needs_attention"}
    assert len(one.ledger) == 3


# -- interrupted ------------------------------------------------------------------------------------------------------
VERBS: dict[str, tuple[str, str, list[str]]] = {
    "cancel": ("waiter", "post", ["cancel", "--where", "agent:waiter"]),
    "cancel by force": ("waiter", "end", ["cancel", "--where", "agent:waiter", "--force"]),
    "retry": ("reader", "reopen", ["retry", "--where", "agent:reader"]),
    "adopt": ("waiter", "post", ["adopt", "--where", "agent:waiter", "fixed.py:waiter"]),
    "resolve": ("shipper", "post", ["resolve", "--where", "agent:shipper", "--fail", "lost", "--note", "asked them"]),
}
# The batch is opened and ended in the same way for all verbs.
POINTS = [(verb, "act", moment, 2) for verb in VERBS for moment in ("before", "after")]
POINTS += [("cancel", "open_batch", "before", 1), ("cancel", "open_batch", "after", 1), ("cancel", "end_batch", "before", 1)]


@pytest.mark.parametrize(("verb", "method", "moment", "nth"), POINTS)
def test_a_bulk_operation_that_is_killed_goes_on_and_does_each_run_once(
    desk: Desk,
    verb: str,
    method: str,
    moment: str,
    nth: int,
) -> None:
    agent, act, words = VERBS[verb]
    runs = ["r1", "r2", "r3"]
    desk.put("down")
    make(desk, agent, *runs)
    killed(desk, act if method == "act" else method, moment, nth, *words, "--yes")
    before = {run_id: batches(desk, run_id) for run_id in runs}
    expected = {"open_batch": 0, "act": 1 if moment == "before" else 2, "end_batch": 3}[method]
    assert sum(map(len, before.values())) == expected, before
    again = desk.run(*words, "--yes")
    assert again.returncode == 0, again.stderr
    in_batch(desk, runs)
    if method == "open_batch" and moment == "before":
        assert "was interrupted" not in again.stderr
    else:
        assert "was interrupted: this goes on with the runs that are left" in again.stderr
    assert "was interrupted" not in desk.run(*words, "--yes").stderr, "the batch has ended"
    assert "all as they were written" in desk("verify")


def test_a_run_that_failed_again_since_is_not_retried_twice_by_one_batch(desk: Desk) -> None:
    desk.put("down")
    make(desk, "reader", "r1", "r2", "r3")
    killed(desk, "reopen", "after", 2, "retry", "--where", "agent:reader", "--yes")
    desk("resume", "r3", code=1)
    desk("resume", "r2", code=1)
    again = desk.run("retry", "--where", "agent:reader", "--yes")
    assert "skipped: run r3: it was done in this batch already\n  the same for 1 more run: r2" in again.stderr
    assert again.stdout.startswith("1 run queued; 2 skipped")
    in_batch(desk, ["r1", "r2", "r3"])
    # The next order is another batch.
    assert desk("retry", "--where", "agent:reader", "--yes").startswith("2 runs queued")


def test_a_batch_goes_on_only_with_the_same_order(one: Desk) -> None:
    make(one, "waiter", "w1", "w2", "w3")
    killed(one, "post", "after", 1, "pause", "--where", "agent:waiter", "--reason", "deploy", "--yes")
    batch = batches(one, "w3")[0]
    assert "is of perdure pause, and not of perdure cancel" in one.refusal("cancel", "--batch", batch, "--yes")
    assert "reason was 'deploy', and is None now" in one.refusal("pause", "--batch", batch, "--yes")
    assert "leave --where out, or type the same" in one.refusal(
        "pause", "--batch", batch, "--where", "id:w1", "--reason", "deploy", "--yes"
    )
    assert one.run("pause", "--batch", batch, "--reason", "deploy", "--yes").stdout.startswith("2 runs paused")
    assert in_batch(one, ["w1", "w2", "w3"]) == batch
    assert "has ended at" in one.refusal("pause", "--batch", batch, "--reason", "deploy", "--yes")


def test_a_batch_that_goes_on_leaves_out_the_runs_that_came_later(one: Desk) -> None:
    make(one, "waiter", "w1", "w2")
    killed(one, "post", "after", 1, "cancel", "--where", "agent:waiter created:>1h", "--yes")
    make(one, "waiter", "later")
    one("cancel", "--where", "agent:waiter created:>1h", "--yes")
    assert statuses(one) == {"w1": "cancelling", "w2": "cancelling", "later": "waiting"}


def test_ctrl_c_leaves_whole_runs_and_the_batch_goes_on(one: Desk) -> None:
    make(one, "waiter", *(f"w{n}" for n in range(6)))
    child = forked.Popen(
        [sys.executable, "-m", "perdure", "cancel", "--where", "agent:waiter", "--yes", "--json"],
        cwd=one.folder,
        env=os.environ | {"PERDURE_URL": one.url},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while child.poll() is None and "cancelling" not in statuses(one).values():
        assert time.monotonic() < deadline
    if child.poll() is None:
        child.send_signal(signal.SIGINT)
    out, _ = child.communicate(timeout=60)
    last: dict[str, Any] = json.loads(out.splitlines()[-1])
    assert child.returncode == (130 if last["interrupted"] else 0)
    one.run("cancel", "--where", "agent:waiter", "--yes")
    assert in_batch(one, [f"w{n}" for n in range(6)]) == last["batch"]
