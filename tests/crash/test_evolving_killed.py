"""SIGKILL around the first claim of a run, around its adoption, and at every commit of the turns after that."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest
from tests.servers import forked

from perdure.core.events import BudgetDeclared, FrameChanged, RunClaimed
from perdure.core.state import fold
from perdure.inspect.verify import verify_run
from perdure.store.open import open_store

PROGRAM = '''
import asyncio, os, signal, sys
from perdure import Approval, Budget, Call, Perdure, Plan, ReAct, Run, Settings, Step, agent, ref, tool
from perdure.models import Answer, Scripted, ToolUse

url, version, what, deadly, place, moment = sys.argv[1:7]

@tool(effect="read")
async def look_up(order: str) -> int:
    return 500

@tool(effect="keyed", timeout=5, approval=Approval())
async def refund(order: str, cents: int, call: Call) -> str:
    fd = os.open("paid", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    os.write(fd, f"{order} {cents} {call.key}\\n".encode())
    os.close(fd)
    return "paid"

@refund.reconcile
async def _(order: str, cents: int, call: Call):
    from perdure import Outcome
    there = os.path.exists("paid") and call.key in open("paid").read()
    return Outcome.happened("paid") if there else Outcome.not_happened(final=True)

@tool(effect="keyed", timeout=5)
async def refund_more(order: str, cents: int, why: str, call: Call) -> str:
    fd = os.open("paid", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    os.write(fd, f"{order} {cents} {call.key}\\n".encode())
    os.close(fd)
    return "paid"

@refund_more.reconcile
async def _(order: str, cents: int, why: str, call: Call):
    from perdure import Outcome
    there = os.path.exists("paid") and call.key in open("paid").read()
    return Outcome.happened("paid") if there else Outcome.not_happened(final=True)

@agent(version=version, budget=Budget(calls=9))
async def plain(run: Run, order: str) -> str:
    await look_up(order)
    return run.version

uses = lambda name, n, **args: Answer("", (ToolUse(f"u{n}", name, args),), stop="tools")
LINES = [uses("look_up", 1, order="o"), uses("refund", 2, order="o", cents=500), uses("look_up", 3, order="p"), "done"]
chat = ReAct("chat", model=Scripted(LINES), tools=[look_up, refund], instructions=f"Be {version}.", version=version)

steps = [Step("look", look_up, {"order": "o"}), Step("pay", refund, {"order": "o", "cents": ref("look")})]
steps += [] if version == "1" else [Step("again", refund_more, {"order": "p", "cents": ref("look"), "why": ref("pay")})]
route = Plan("route", steps, version=version)

count = 0

def guard(store):
    """Kill this process before or after call number `place` of the store's method `deadly`."""
    plain_method = getattr(store, deadly, None)
    if plain_method is None:
        return
    def method(*args, **options):
        global count
        count += 1
        if count == int(place) and moment == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        done = plain_method(*args, **options)
        if count == int(place) and moment == "after":
            os.kill(os.getpid(), signal.SIGKILL)
        return done
    setattr(store, deadly, method)

async def main():
    async with Perdure(url, [] if what == "name" else [plain, chat, route], settings=Settings(lease_s=1.0, poll_s=0.02)) as app:
        guard(app.store)
        if what == "drive":
            print(await app.handle("r").result(60))
        elif what == "rest":
            print((await app.drive("r", wait=False)).status)
        elif what == "adopt":
            await app.adopt("r", by="ann")
        elif what == "approve":
            (asked,) = await app.approvals(run_id="r")
            await app.approve(asked.approval, by="ben")
        elif what == "name":
            await app.start("plain", order="o", id="r")
        elif what == "chat":
            await app.start(chat, "go", id="r")
        elif what == "route":
            await app.start(route, id="r")

asyncio.run(main())
'''


class Place:
    def __init__(self, folder: Path, url: str) -> None:
        self.folder, self.url = folder, url
        (folder / "program.py").write_text(PROGRAM)

    def __call__(self, version: str, what: str, deadly: str = "", place: int = 0, moment: str = "before") -> tuple[int, str]:
        command = [sys.executable, "program.py", self.url, version, what, deadly, str(place), moment]
        done = forked.run(command, cwd=self.folder, capture_output=True, text=True, timeout=120, check=False, env=dict(os.environ))
        assert done.returncode in (0, 1, -signal.SIGKILL), done
        return done.returncode, done.stdout.strip() + done.stderr.strip()[-300:]

    @property
    def paid(self) -> list[str]:
        file = self.folder / "paid"
        return file.read_text().splitlines() if file.exists() else []


@pytest.fixture(params=["sqlite", "postgres"])
def place(tmp_path: Path, request: pytest.FixtureRequest) -> Place:
    return Place(tmp_path, f"sqlite:///{tmp_path}/journal.db" if request.param == "sqlite" else request.getfixturevalue("postgres_url"))


def check(place: Place) -> dict[str, list[object]]:
    """The journal is sound and agrees with its row. Returns its bodies by type."""
    store = open_store(place.url)
    try:
        row = store.get("r")
        assert row is not None
        assert verify_run(store, row).problem is None
        events = store.read("r")
        assert fold(events).version == row.version
        found: dict[str, list[object]] = {}
        for event in events:
            found.setdefault(type(event.body).__name__, []).append(event.body)
        return found
    finally:
        store.close()


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_worker_that_dies_around_the_first_claim_leaves_no_version_or_its_own(place: Place, moment: str) -> None:
    assert place("0", "name")[0] == 0
    assert place("1", "drive", "claim", 1, moment)[0] == -signal.SIGKILL
    claims = check(place).get("RunClaimed", [])
    assert [isinstance(one, RunClaimed) and one.version for one in claims] == ([] if moment == "before" else ["1"])
    code, said = place("2", "drive")
    if moment == "before":
        assert (code, said) == (0, "2")
    else:
        assert code == 1, "the run has begun with version 1"
        assert place("1", "drive") == (0, "1")


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_the_budget_of_the_code_is_declared_once_wherever_its_worker_dies(place: Place, number: int, moment: str) -> None:
    assert place("0", "name")[0] == 0
    place("1", "drive", "append", number, moment)
    assert place("1", "drive") == (0, "1")
    assert len(check(place)[BudgetDeclared.__name__]) == 1
    store = open_store(place.url)
    try:
        (ledger,) = store.ledgers("r")
        assert (ledger.limits.calls, ledger.reserved.calls) == (9, 0)
        assert ledger.spent.calls in (1, 2), "a read that was cut off is attempted again"
    finally:
        store.close()


@pytest.mark.parametrize("moment", ["before", "after"])
def test_an_adoption_that_is_cut_off_is_there_whole_or_not_at_all(place: Place, moment: str) -> None:
    assert place("1", "chat")[0] == 0
    assert place("1", "rest")[1] == "waiting_approval"
    assert place("2", "adopt", "post", 1, moment)[0] == -signal.SIGKILL
    assert len(check(place).get(FrameChanged.__name__, [])) == (moment == "after")
    if moment == "before":
        assert place("2", "adopt")[0] == 0
    assert place("2", "approve")[0] == 0
    assert place("2", "drive") == (0, "done")
    check(place)
    assert len(place.paid) == 1


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("number", range(1, 6))
def test_the_turns_after_an_adoption_survive_a_kill_at_every_commit(place: Place, number: int, moment: str) -> None:
    assert place("1", "chat")[0] == 0
    assert place("1", "rest")[1] == "waiting_approval"
    assert place("2", "adopt")[0] == 0
    assert place("2", "approve")[0] == 0
    place("2", "drive", "append", number, moment)
    assert place("2", "drive") == (0, "done")
    found = check(place)
    assert len(found[FrameChanged.__name__]) == 1
    assert len({line.split()[-1] for line in place.paid}) == len(place.paid) == 1
    requests = [json.loads(json.dumps(getattr(one, "tool", ""))) for one in found["ModelCallInitiated"]]
    assert len(requests) >= 4


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize(("deadly", "number"), [("post", 1), *(("append", number) for number in range(1, 6))])
def test_a_plan_that_is_adopted_survives_a_kill_at_every_commit(place: Place, deadly: str, number: int, moment: str) -> None:
    assert place("1", "route")[0] == 0
    assert place("1", "rest")[1] == "waiting_approval"
    code, _ = place("2", "adopt", deadly if deadly == "post" else "", number, moment)
    if code:
        assert code == -signal.SIGKILL
        assert len(check(place).get(FrameChanged.__name__, [])) == (moment == "after")
        if moment == "before":
            assert place("2", "adopt")[0] == 0
    assert place("2", "approve")[0] == 0
    place("2", "drive", deadly if deadly == "append" else "", number, moment)
    assert place("2", "drive") == (0, "{'again': 'paid', 'look': 500, 'pay': 'paid'}")
    found = check(place)
    assert len(found[FrameChanged.__name__]) == 1
    assert len(found["PlanGenerated"]) == 2
    assert [line.split()[:2] for line in place.paid] == [["o", "500"], ["p", "500"]]
    assert len({line.split()[-1] for line in place.paid}) == 2
