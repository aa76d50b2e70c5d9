"""prune --before-checkpoint: what still needs the removed events keeps them, or finds what it needs in the checkpoint."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from tests.unit.postgres_tools import raw as raw_postgres
from tests.unit.test_checkpoints import DONE, check, go, prune, rests, turns, work

from perdure import Budget, Perdure, Run, agent, tool
from perdure.cli import cli
from perdure.core.events import ApprovalRequested, CheckpointTaken, OutcomeReused, RunReopened
from perdure.core.query import parse_query
from perdure.core.state import payloads
from perdure.errors import Conflict, NotFound
from perdure.inspect.verify import verify_run
from perdure.store.api import ApprovalFilter, NewFork, NewRun, Reopen, Store
from perdure.store.archive import Wholes
from perdure.store.mailbox import Mailbox
from perdure.store.open import open_store

BROKEN: list[str] = []


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    DONE.clear()
    BROKEN.clear()
    if request.param == "postgres":
        found: str = request.getfixturevalue("postgres_url")
        return found
    return f"sqlite:///{tmp_path}/journal.db"


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    opened = open_store(url)
    yield opened
    opened.close()


def perdure(url: str, *words: str) -> Result:
    return CliRunner().invoke(cli, [*words, "--url", url])


def send_notices(store: Store) -> None:
    """As a worker does that has no webhook."""
    for notice in store.take_notices(time.time_ns() // 1000 + 10**9, 100, 1):
        store.notice_done(notice.notice_id)


# -- approvals ----------------------------------------------------------------------------------------------------------
@agent(version="1")
async def asking(run: Run) -> str:
    """One approval is settled before the checkpoint, and another one is open when it is taken."""
    if run.restored is None:
        await run.request_approval("first", {"n": 0})
    asked = asyncio.create_task(run.request_approval("go", {"n": 1}))
    if run.restored is None:
        await work(1)
        await run.checkpoint(1)
    await run.receive("more")
    return str((await asked).by)


def start_asking(url: str, store: Store) -> str:
    """The id of the approval that is open, with its request before the checkpoint."""
    asyncio.run(rests(url, asking, then=lambda app: app.start(asking, id="r")))
    (first,) = store.approvals(ApprovalFilter(status="pending"))
    asyncio.run(rests(url, asking, then=lambda app: app.approve(first.approval, by="bob")))
    send_notices(store)
    (pending,) = store.approvals(ApprovalFilter(status="pending"))
    return pending.approval


def test_an_approval_that_is_open_at_the_checkpoint_can_be_decided_after_a_prune(url: str, store: Store) -> None:
    approval = start_asking(url, store)
    before = store.approval(approval)
    assert prune(url, "r", "--yes").exit_code == 0
    assert not any(isinstance(event.body, ApprovalRequested) for event in store.read("r"))
    assert store.approval(approval) == before
    assert [one.approval for one in store.approvals(ApprovalFilter(status=None))] == [approval]
    assert approval in perdure(url, "approvals").output
    check(store)
    told = perdure(url, "approve", approval, "--by", "ann")
    assert told.exit_code == 0, told.output
    check(store)
    asyncio.run(rests(url, asking, then=lambda app: app.signal("r", "more", 1)))
    row = store.get("r")
    assert row is not None
    assert row.status == "succeeded", row
    check(store)


@agent(version="1")
async def asking_on(run: Run) -> str:
    """An approval is open over two checkpoints."""
    asked = asyncio.create_task(run.request_approval("go", {"n": 1}))
    if (taken := run.restored or 0) < 2:
        await run.receive("more")
        await run.checkpoint(taken + 1)
    return str((await asked).by)


def test_an_approval_stays_open_over_a_prune_and_the_next_checkpoint(url: str, store: Store) -> None:
    asyncio.run(rests(url, asking_on, then=lambda app: app.start(asking_on, id="r")))
    send_notices(store)
    for _ in range(2):
        asyncio.run(rests(url, asking_on, then=lambda app: app.signal("r", "more", 1)))
        check(store)
        assert prune(url, "r", "--yes").exit_code == 0
        check(store)
    (pending,) = store.approvals(ApprovalFilter(status="pending"))
    asyncio.run(rests(url, asking_on, then=lambda app: app.approve(pending.approval, by="ann")))
    row = store.get("r")
    assert row is not None
    assert row.status == "succeeded", row
    check(store)


def test_an_approval_that_was_settled_before_a_checkpoint_is_gone_after_a_prune(url: str, store: Store) -> None:
    start_asking(url, store)
    (settled,) = store.approvals(ApprovalFilter(status="approved"))
    assert prune(url, "r", "--yes").exit_code == 0
    assert store.approval(settled.approval) is None
    told = perdure(url, "approve", settled.approval, "--by", "ann")
    assert f"there is no approval {settled.approval}" in told.output


# -- notices ------------------------------------------------------------------------------------------------------------
def test_a_run_with_a_notice_that_was_not_sent_is_left_as_it_is(url: str, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    # A webhook without a secret: the notices wait.
    monkeypatch.setenv("PERDURE_WEBHOOK_URL", "https://hooks.example/perdure")
    asyncio.run(rests(url, asking, then=lambda app: app.start(asking, id="r")))
    (first,) = store.approvals(ApprovalFilter(status="pending"))
    asyncio.run(rests(url, asking, then=lambda app: app.approve(first.approval, by="bob")))
    events = store.read("r")
    told = prune(url, "r", "--yes")
    assert told.exit_code == 2
    assert "run r: a notice about one of its events was not sent yet" in told.output
    for more in ("--dry-run", "--yes"):
        told = prune(url, "--older-than", "0s", more)
        assert told.exit_code == 0
        assert "left as it is: run r: a notice" in told.output
        assert "0 events" in told.output
    assert '"left":["run r: a notice' in prune(url, "--older-than", "0s", "--json").output.replace(": [", ":[")
    with pytest.raises(Conflict, match="was not sent yet"):
        store.remove_before_checkpoint("r", by="ann", now=1)
    assert store.read("r") == events
    notices = store.take_notices(time.time_ns() // 1000 + 10**9, 10, 1)
    assert [notice.event.type for notice in notices] == ["approval_requested", "approval_requested"]
    for notice in notices:
        store.notice_done(notice.notice_id)
    assert prune(url, "r", "--yes").exit_code == 0


# -- undo ---------------------------------------------------------------------------------------------------------------
@tool(effect="once")
async def act(n: int) -> int:
    DONE.append(n)
    return n


@act.compensate
async def unact(n: int) -> None:
    if n == 1 and BROKEN:
        raise ValueError("not now")
    DONE.append(-n)


@agent(version="1")
async def below(run: Run) -> int:
    if run.restored is None:
        await act(1)
        await act(2)
        await run.checkpoint(1)
    return 1


@agent(version="1")
async def acts(run: Run, child: bool) -> int:
    if child:
        await below()
    elif run.restored is None:
        await act(1)
        await act(2)
        await run.checkpoint(1)
    await act(3)
    raise ValueError("a bug")


async def fails(url: str, child: bool) -> None:
    async with Perdure(url, agents=[acts, below]) as app:
        await app.start(acts, child, id="r")
        await app.drive("r", wait=False)


@pytest.mark.parametrize("run_id", ["r", "r/1"])
def test_a_run_is_left_as_it_is_until_its_undo_has_ended(url: str, store: Store, run_id: str) -> None:
    BROKEN.append("yes")

    async def undo() -> None:
        async with Perdure(url, agents=[acts, below]) as app:
            await app.undo("r", by="ann", wait=False)

    asyncio.run(fails(url, run_id != "r"))
    asyncio.run(undo())
    assert DONE == [1, 2, 3, -3, -2]
    send_notices(store)
    told = prune(url, run_id, "--yes")
    assert told.exit_code == 2
    assert f"run {run_id} is being undone by run r/undo" in told.output
    with pytest.raises(Conflict, match="is being undone by run r/undo"):
        store.remove_before_checkpoint(run_id, by="ann", now=1)
    BROKEN.clear()
    asyncio.run(undo())
    assert DONE == [1, 2, 3, -3, -2, -1]
    assert prune(url, run_id, "--yes").exit_code == 0


@pytest.mark.parametrize("run_id", ["r", "r/1"])
def test_an_undo_that_was_planned_before_the_prune_does_not_begin(
    url: str, store: Store, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asyncio.run(fails(url, run_id != "r"))
    send_notices(store)
    create = Mailbox.create_run

    def late(self: Mailbox, new: NewRun) -> Any:
        assert prune(url, run_id, "--yes").exit_code == 0
        return create(self, new)

    async def undo() -> None:
        async with Perdure(url, agents=[acts, below]) as app:
            monkeypatch.setattr(Mailbox, "create_run", late)
            with pytest.raises(Conflict, match=f"events 2 to [0-9]+ of run {run_id} were removed"):
                await app.undo("r", by="ann")

    asyncio.run(undo())
    assert store.get("r/undo") is None
    assert DONE == [1, 2, 3]


# -- retry and rewind ---------------------------------------------------------------------------------------------------
def test_a_rewind_that_was_planned_before_the_prune_is_refused(url: str, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    go(url, 8, 4)
    reopen = Mailbox.reopen

    def late(self: Mailbox, runs: list[Reopen], *, now: int) -> None:
        assert prune(url, "r", "--yes").exit_code == 0
        reopen(self, runs, now=now)

    async def rewind() -> None:
        async with Perdure(url, agents=[turns]) as app:
            monkeypatch.setattr(Mailbox, "reopen", late)
            with pytest.raises(Conflict, match=r"run r cannot go back to event 4: its events 2 to [0-9]+ were removed"):
                await app.rewind("r", 4, by="ann")

    asyncio.run(rewind())
    check(store)
    for _ in range(4):
        asyncio.run(rests(url, turns, then=lambda app: app.signal("r", "go", 1)))
    assert DONE == [1, 2, 3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize("body", [RunReopened("ann", 4), OutcomeReused(4)])
def test_verify_finds_events_that_need_removed_events(url: str, store: Store, body: RunReopened | OutcomeReused) -> None:
    go(url, 8, 4)
    assert prune(url, "r", "--yes").exit_code == 0
    store.post("r", None, body, event_id="0" * 32, now=1)
    row = store.get("r")
    assert row is not None
    verdict = verify_run(store, row)
    assert verdict.seq == row.seq
    assert verdict.problem is not None
    assert "event 4" in verdict.problem
    assert "removed" in verdict.problem


# -- forks --------------------------------------------------------------------------------------------------------------
@agent(version="1")
async def large(run: Run) -> str:
    if run.restored is None:
        for n in range(3):
            await run.receive("go")
            await echo("x" * 100_000 + str(n))
        await run.checkpoint(1)
    await run.receive("more")
    return "done"


@tool(effect="once")
async def echo(text: str) -> str:
    return text


def signal(url: str, topic: str) -> None:
    asyncio.run(rests(url, large, then=lambda app: app.signal("r", topic, 1)))


def fork_of_large(url: str) -> None:
    async def main_() -> None:
        async with Perdure(url, agents=[large]) as app:
            await app.live_fork("r", id="f", by="ann")

    asyncio.run(main_())


def test_a_fork_is_sound_after_the_events_that_it_copied_were_removed(url: str, store: Store) -> None:
    asyncio.run(rests(url, large, then=lambda app: app.start(large, id="r")))
    signal(url, "go")
    fork_of_large(url)
    signal(url, "go")
    signal(url, "go")
    assert any(isinstance(event.body, CheckpointTaken) for event in store.read("r"))
    assert prune(url, "r", "--yes").exit_code == 0
    check(store, "f")
    check(store)


def test_a_fork_that_was_planned_before_the_prune_is_not_stored(url: str, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    asyncio.run(rests(url, large, then=lambda app: app.start(large, id="r")))
    signal(url, "go")
    insert = Wholes.insert_fork

    def late(self: Wholes, new: NewFork) -> None:
        # The run goes on and takes its checkpoint between the plan and the prune.
        for _ in range(2):
            other = threading.Thread(target=signal, args=(url, "go"))
            other.start()
            other.join(20)
        assert prune(url, "r", "--yes").exit_code == 0
        insert(self, new)

    monkeypatch.setattr(Wholes, "insert_fork", late)
    with pytest.raises(NotFound, match="events of run r were removed meanwhile"):
        fork_of_large(url)
    assert store.get("f") is None


def test_a_fork_and_a_prune_of_the_same_run_wait_for_each_other(postgres_url: str) -> None:
    asyncio.run(rests(postgres_url, large, then=lambda app: app.start(large, id="r")))
    signal(postgres_url, "go")
    prunes = raw_postgres(postgres_url)
    prunes.execute(b"BEGIN")
    prunes.execute(b"SELECT 1 FROM perdure_runs WHERE run_id = 'r' FOR NO KEY UPDATE")  # as a prune does first
    forks = threading.Thread(target=fork_of_large, args=(postgres_url,))
    forks.start()
    forks.join(2)
    assert forks.is_alive()
    prunes.execute(b"ROLLBACK")
    forks.join(20)
    assert not forks.is_alive()
    prunes.close()


# -- what users have in payloads ----------------------------------------------------------------------------------------
@tool(effect="once")
async def upload(file: dict[str, Any]) -> str:
    await asyncio.sleep(0.3)
    return "up"


@agent(version="1")
async def uploads(run: Run) -> str:
    up = asyncio.create_task(upload({"blob": "report.pdf", "size": 12}))
    large = asyncio.create_task(upload({"text": "x" * 100_000}))
    if run.restored is None:
        await work(1)
        await run.checkpoint(1)
    await run.receive("go")
    return await up + await large


def test_data_of_users_in_a_checkpoint_is_not_taken_for_a_blob(url: str, store: Store, tmp_path: Path) -> None:
    asyncio.run(rests(url, uploads, then=lambda app: app.start(uploads, id="r")))
    (taken,) = [event.body for event in store.read("r") if isinstance(event.body, CheckpointTaken)]
    assert len({payload.blob for payload in payloads(taken) if isinstance(payload.blob, str)}) == 1
    check(store)
    told = perdure(url, "export", "r", "-o", str(tmp_path / "r.jsonl"))
    assert told.exit_code == 0, told.output
    there = perdure(f"sqlite:///{tmp_path}/there.db", "import", str(tmp_path / "r.jsonl"))
    assert there.exit_code == 0, there.output
    assert prune(url, "r", "--yes").exit_code == 0
    check(store)
    asyncio.run(rests(url, uploads, then=lambda app: app.signal("r", "go", 1)))
    row = store.get("r")
    assert row is not None
    assert row.status == "succeeded", row
    check(store)


# -- costs --------------------------------------------------------------------------------------------------------------
@tool(effect="once", cost=0.10)
async def paid(n: int) -> int:
    await asyncio.sleep(0.05 * n)
    return n


@agent(version="1", budget=Budget(usd=1.0))
async def spends(run: Run) -> str:
    slow = asyncio.create_task(paid(4))
    if run.restored is None:
        await paid(1)
        await paid(2)
        await run.checkpoint(1)
    await slow
    await paid(0)
    await run.receive("go")
    return "done"


def test_costs_count_what_was_used_before_a_checkpoint(url: str, store: Store) -> None:
    asyncio.run(rests(url, spends, then=lambda app: app.start(spends, id="r")))
    by: tuple[Any, ...] = ("agent", "tenant", "run", "root", "day")
    before = {one: store.costs(one) for one in by}
    assert [(row.calls, row.usd_micros) for row in before["run"]] == [(4, 400_000)]
    events = len(store.read("r"))
    assert prune(url, "r", "--yes").exit_code == 0
    assert len(store.read("r")) < events
    for one in by:
        (was,), (is_now,) = before[one], store.costs(one)
        assert (is_now.group, is_now.runs, is_now.calls, is_now.usd_micros) == (was.group, 1, 4, 400_000)
        assert abs(is_now.busy_us - was.busy_us) < 20_000
        assert is_now.wall_us == was.wall_us
        assert is_now.waiting_us <= was.waiting_us
    # The call that was open at the checkpoint is known, and the two before it are not.
    assert [(row.group, row.calls, row.usd_micros) for row in store.costs("tool")] == [
        ("paid", 2, 200_000),
        ("removed before a checkpoint", 2, 200_000),
    ]
    assert "$0.40" in perdure(url, "costs").output
    assert [row.run_id for row in store.list(parse_query("cost:>=0.4 cost:<=0.4", 0))] == ["r"], "a query counts them too"


# -- what people see ----------------------------------------------------------------------------------------------------
def test_verbs_show_a_run_whose_events_were_removed(url: str, store: Store) -> None:
    go(url, 8, 4)
    whole = [json.loads(line) for line in perdure(url, "events", "r", "--json").output.splitlines()]
    audited = [json.loads(line) for line in perdure(url, "audit", "r").output.splitlines()]
    traced = perdure(url, "trace", "r").output
    assert prune(url, "r", "--yes").exit_code == 0
    left = [event.seq for event in store.read("r")]
    told = perdure(url, "events", "r", "--json")
    assert told.exit_code == 0, told.output
    assert [json.loads(line) for line in told.output.splitlines()] == [line for line in whole if line["seq"] in left]
    told = perdure(url, "trace", "r")
    assert told.exit_code == 0, told.output
    assert f"event {left[-1]}," in told.output
    assert told.output.splitlines()[-1].partition("event")[2] == traced.splitlines()[-1].partition("event")[2]
    told = perdure(url, "trace", "r", "5")
    assert told.exit_code == 6
    assert f"event 5 was removed; the first event after its first one is its checkpoint, event {left[1]}" in told.output
    told = perdure(url, "trace", "r", str(left[-1] + 1))
    assert f"has the events 1 to {left[-1]}" in told.output
    now = [json.loads(line) for line in perdure(url, "audit", "r").output.splitlines()]
    was = {line["seq"]: line["context"] for line in audited}
    assert [line["seq"] for line in now] == left
    assert [line["context"]["version"] for line in now] == [was[seq]["version"] for seq in left]


def test_calls_that_are_open_at_the_checkpoint_keep_their_names(url: str, store: Store) -> None:
    asyncio.run(rests(url, uploads, then=lambda app: app.start(uploads, id="r")))
    whole = [json.loads(line) for line in perdure(url, "audit", "r").output.splitlines()]
    assert prune(url, "r", "--yes").exit_code == 0
    now = [json.loads(line) for line in perdure(url, "audit", "r").output.splitlines()]
    was = {line["seq"]: (line["tool"], line["idempotency_key"]) for line in whole}
    assert any(line["type"] == "tool_call_completed" for line in now)
    assert {line["seq"]: (line["tool"], line["idempotency_key"]) for line in now} == {line["seq"]: was[line["seq"]] for line in now}
