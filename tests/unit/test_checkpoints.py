"""run.checkpoint: the run goes on from the state, what is open goes on, and what reads a journal knows several lives."""

from __future__ import annotations

import asyncio
import io
import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from msgspec import structs

from perdure import Agent, Call, Outcome, Perdure, Run, agent, tool
from perdure.cli import cli
from perdure.cli.driving import _resuming
from perdure.core.events import CheckpointTaken, OutcomeReused, TimerFired
from perdure.core.state import fold, image_in, image_problem
from perdure.errors import Conflict, InvalidInput, NotFound, RunCancelled, RunFailed, StoreCorrupt
from perdure.inspect.chain import chain_problems, missing_ends
from perdure.inspect.export import export_run
from perdure.inspect.redact import read_rules
from perdure.inspect.verify import verify_run
from perdure.store.api import Store
from perdure.store.open import open_store
from perdure.store.transfer import Copying

DONE: list[Any] = []
LIVES: list[Any] = []
OPEN = asyncio.Event


@tool(effect="once")
async def work(n: int, call: Call) -> str:
    DONE.append(n)
    return f"{n} by {call.key}"


@work.compensate
async def unwork(n: int, call: Call) -> None:
    DONE.append(-n)


@work.reconcile
async def find_work(n: int) -> Outcome:
    return Outcome.not_happened(final=True) if n not in DONE else Outcome.happened("found")


@agent(version="1")
async def turns(run: Run, count: int) -> list[str]:
    """Three calls in each life, and a signal before each of them."""
    done: list[str] = run.restored or []
    LIVES.append(len(done))
    for _ in range(3):
        if len(done) == count:
            return done
        await run.receive("go")
        done.append(await work(len(done) + 1))
    return await run.checkpoint(done)


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    DONE.clear()
    LIVES.clear()
    if request.param == "postgres":
        found: str = request.getfixturevalue("postgres_url")
        return found
    return f"sqlite:///{tmp_path}/journal.db"


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    opened = open_store(url)
    yield opened
    opened.close()


async def rests(url: str, *agents: Agent[Any, Any], run_id: str = "r", then: Any = None) -> None:
    """A worker of its own takes the run as far as it comes."""
    async with Perdure(url, agents=agents) as app:
        if then is not None:
            await then(app)
        async with asyncio.timeout(10):
            await app.drive(run_id, wait=False)


def go(url: str, count: int, signals: int) -> None:
    """The run gets its signals one after the other, each in a worker of its own: so each is a resume."""

    async def start(app: Perdure) -> None:
        await app.start(turns, count, id="r")

    async def signal(app: Perdure) -> None:
        await app.signal("r", "go", 1)

    asyncio.run(rests(url, turns, then=start))
    for _ in range(signals):
        asyncio.run(rests(url, turns, then=signal))


def check(store: Store, run_id: str = "r") -> None:
    row = store.get(run_id)
    assert row is not None
    assert verify_run(store, row).problem is None
    assert list(chain_problems(store)) == []
    assert missing_ends(store) == ({}, [])


def test_a_resume_goes_on_from_the_state_and_reads_from_the_checkpoint_on(url: str, store: Store) -> None:
    go(url, 8, 8)
    row = store.get("r")
    assert row is not None
    assert row.status == "succeeded"
    assert DONE == [1, 2, 3, 4, 5, 6, 7, 8]
    events, life = store.read("r"), store.read_life("r")
    taken = [event for event in events if isinstance(event.body, CheckpointTaken)]
    assert len(taken) == 2
    assert life == [events[0], *events[taken[-1].seq - 1 :]]
    state = fold(life)
    assert (state.numbers, state.checkpoints, state.attempts, state.status) == (8, 2, 8, "succeeded")
    assert structs.asdict(fold(events))["used"] == state.used
    assert LIVES[-2:] == [6, 6], "each resume began with the last state"
    check(store)


@pytest.mark.full
def test_a_resume_reads_as_many_events_after_300_lives_as_after_3(url: str, store: Store) -> None:
    @agent(version="1")
    async def looping(run: Run, lives: int) -> None:
        n: int = run.restored or 0
        await work(n)
        if n < lives:
            await run.checkpoint(n + 1)
        await run.receive("never")

    async def main_() -> None:
        async with Perdure(url, agents=[looping]) as app:
            for lives in (3, 300):
                await app.start(looping, lives, id=f"r{lives}")
                await app.drive(f"r{lives}", wait=False)

    asyncio.run(main_())
    few, many = store.read_life("r3"), store.read_life("r300")
    assert [event.type for event in few] == [event.type for event in many]
    assert many[-1].seq > 900
    sizes = [len(image_in(life[1].body).calls) for life in (few, many) if isinstance(life[1].body, CheckpointTaken)]
    assert sizes == [0, 0], "a checkpoint holds no call that has ended"
    check(store, "r300")


def test_the_keys_of_calls_and_the_uuids_of_lives_are_all_different(url: str, store: Store) -> None:
    seen: list[tuple[uuid.UUID, float]] = []

    @agent(version="1")
    async def unique(run: Run) -> list[str]:
        seen.append((run.uuid(), run.random.random()))
        done: list[str] = run.restored or []
        if len(done) == 3:
            return done
        return await run.checkpoint([*done, await work(7)])

    async def main_() -> list[str]:
        async with Perdure(url, agents=[unique]) as app:
            told: list[str] = await app.run(unique, id="r")
            return told

    assert len(set(asyncio.run(main_()))) == 3
    assert len(seen) == len(set(seen)) == 4


def test_what_is_open_goes_on_and_is_the_same_when_it_is_asked_for_again(url: str, store: Store) -> None:
    gate: list[asyncio.Event] = []

    @tool(effect="once")
    async def slow(what: str) -> str:
        DONE.append(what)
        await gate[0].wait()
        return f"{what} is done"

    @agent(version="1")
    async def below(run: Run) -> str:
        return str(await run.receive("go"))

    @agent(version="1")
    async def many(run: Run) -> dict[str, Any]:
        tasks = [asyncio.create_task(one) for one in (slow("a"), below())]
        asked = asyncio.create_task(run.request_approval("go", {"n": 1}))
        alarm = asyncio.create_task(asyncio.sleep(3.0), name="alarm")
        if (run.restored or 0) < 2:
            await asyncio.sleep(1.4)
            await run.checkpoint((run.restored or 0) + 1)
        gate[0].set()
        await alarm
        decision = await asked
        return {"told": [*await asyncio.gather(*tasks), await run.receive("late")], "by": decision.by}

    async def main_() -> dict[str, Any]:
        gate.append(asyncio.Event())
        async with Perdure(url, agents=[many, below]) as app:
            handle = await app.start(many, id="r")
            await app.signal("r", "late", "heard")
            driving = asyncio.create_task(app.work())
            await asyncio.sleep(3.2)  # in the third life
            assert not driving.done()
            await app.signal("r/2", "go", "child")
            (pending,) = await app.approvals()
            await app.approve(pending.approval, by="ann")
            told: dict[str, Any] = await handle.result(timeout=10)
            return told

    told = asyncio.run(main_())
    assert told["told"] == ["a is done", "child", "heard"]
    assert told["by"] == "ann"
    assert DONE == ["a"]
    events = store.read("r")
    assert sum(isinstance(event.body, CheckpointTaken) for event in events) == 2
    assert fold(events).numbers == 3, "no call was made twice"
    last_life = [event.ts for event in events if isinstance(event.body, CheckpointTaken)][-1]
    fired = [event.ts for event in events if isinstance(event.body, TimerFired)][-1]
    # 3 seconds after the start, and so about 0.2 seconds after the second checkpoint. A new timer would take 3 more seconds.
    assert fired - events[0].ts > 2.9e6
    assert fired - last_life < 3e6, "the timer of another task keeps its time"
    check(store)


def test_a_call_that_the_next_life_does_not_ask_for_ends_before_the_run(url: str, store: Store) -> None:
    begun, gate = asyncio.Event(), asyncio.Event()

    @tool(effect="once")
    async def slow(what: str) -> str:
        begun.set()
        await gate.wait()
        DONE.append(what)
        return what

    @agent(version="1")
    async def leaving(run: Run) -> str:
        if run.restored is None:
            left = asyncio.create_task(slow("left"))
            await run.receive("begun")
            assert not left.done()
            await run.checkpoint(1)
        return "done"

    async def main_() -> str:
        async with Perdure(url, agents=[leaving]) as app, asyncio.timeout(60):
            handle = await app.start(leaving, id="r")
            driving = asyncio.create_task(app.drive("r"))
            await begun.wait()
            await app.signal("r", "begun", 1)
            while not any(isinstance(event.body, CheckpointTaken) for event in await handle.events()):
                await asyncio.sleep(0.01)
            gate.set()
            await driving
            told: str = await handle.result()
            return told

    assert asyncio.run(main_()) == "done"
    assert DONE == ["left"]
    state = fold(store.read("r"))
    assert (state.status, state.calls[1].phase) == ("succeeded", "completed")
    check(store)


@pytest.mark.parametrize(
    ("state", "words"),
    [(None, "the state is None"), ({1, 2}, "cannot be written|NotEncodable|set"), (1, "nothing has happened since the last checkpoint")],
)
def test_a_checkpoint_that_cannot_be_taken_is_refused_with_words(url: str, state: Any, words: str) -> None:
    @agent(version="1")
    async def bad(run: Run) -> None:
        await run.checkpoint(state)

    async def main_() -> None:
        async with Perdure(url, agents=[bad]) as app:
            await app.run(bad, id="r")

    with pytest.raises(RunFailed, match=words):
        asyncio.run(main_())


def test_a_cancel_reaches_the_life_that_goes_on_and_it_cleans_up(url: str, store: Store) -> None:
    @agent(version="1")
    async def tidy(run: Run) -> None:
        try:
            if run.restored is None:
                await work(1)
                await run.checkpoint(1)
            await run.receive("never")
        finally:
            await work(2)
            if run.cancelled:
                await run.checkpoint(2)

    async def main_() -> None:
        async with Perdure(url, agents=[tidy]) as app:
            handle = await app.start(tidy, id="r")
            await app.drive("r", wait=False)
            await app.cancel("r", by="ann")
            with pytest.raises(RunCancelled):
                await handle.result(timeout=5)

    asyncio.run(main_())
    assert DONE == [1, 2]
    assert fold(store.read("r")).checkpoints == 1


def test_a_run_goes_back_to_before_its_checkpoint_and_nothing_happens_twice(url: str, store: Store) -> None:
    go(url, 8, 5)
    events = store.read("r")
    (taken,) = [event for event in events if isinstance(event.body, CheckpointTaken)]
    first = next(event for event in events if event.call == 2)

    async def back(app: Perdure) -> None:
        await app.rewind("r", first.seq - 1, by="ann")

    asyncio.run(rests(url, turns, then=back))
    checkpoint = store.checkpoint("r")
    assert checkpoint is not None
    assert checkpoint.seq > taken.seq, "the run has taken the checkpoint again, on its new way"
    assert DONE == [1, 2, 3, 4, 5], "the results of its calls were reused"
    assert any(isinstance(event.body, OutcomeReused) for event in store.read("r"))
    check(store)
    for _ in range(3):
        asyncio.run(rests(url, turns, then=lambda app: app.signal("r", "go", 1)))
    row = store.get("r")
    assert row is not None
    assert (row.status, DONE) == ("succeeded", [1, 2, 3, 4, 5, 6, 7, 8])
    check(store)


def test_an_undo_compensates_the_calls_of_all_lives(url: str, store: Store) -> None:
    go(url, 8, 8)

    async def main_() -> None:
        async with Perdure(url, agents=[turns]) as app:
            undo = await app.undo("r", by="ann")
            await app.handle(undo.id).result(timeout=10)

    asyncio.run(main_())
    assert DONE == [1, 2, 3, 4, 5, 6, 7, 8, -8, -7, -6, -5, -4, -3, -2, -1]


def test_people_see_what_was_in_earlier_lives(url: str, store: Store) -> None:
    go(url, 8, 5)

    async def main_() -> None:
        async with Perdure(url, agents=[turns]) as app:
            handle = app.handle("r")
            events = await handle.events()
            (taken,) = [event for event in events if isinstance(event.body, CheckpointTaken)]
            before = next(event for event in events if event.call == 2 and event.type == "tool_call_initiated")
            assert "done = ['1 by" in str((await handle.inspect(at=before.seq)).tasks) or (await handle.inspect(at=before.seq)).tasks
            assert (await handle.inspect(at=taken.seq)).tasks
            assert (await handle.inspect()).tasks
            assert (await handle.state(at=before.seq)).numbers == 2
            diff = await app.diff("r", "r")
            assert diff.is_same

    asyncio.run(main_())
    for words in (["show"], ["why"], ["trace"], ["events"], ["verify"], ["show", "--json"]):
        told = CliRunner().invoke(cli, [words[0], "r", *words[1:], "--url", url])
        assert told.exit_code in (0, 3, 4), (words, told.output)
        assert "Traceback" not in told.output


def test_show_why_and_resume_say_what_a_checkpoint_means(url: str, store: Store, tmp_path: Path) -> None:
    """A resume replays the last life alone: the calls of earlier lives do not count."""
    go(url, 8, 4)
    (taken,) = [event.seq for event in store.read("r") if isinstance(event.body, CheckpointTaken)]
    for verb in ("show", "why"):
        assert f"1 checkpoint, the last at event {taken}\n" in CliRunner().invoke(cli, [verb, "r", "--url", url]).output
    assert json.loads(CliRunner().invoke(cli, ["why", "r", "--json", "--url", url]).output)["checkpoints"].startswith("1 checkpoint")

    async def resumed() -> str | None:
        async with Perdure(url, agents=[turns]) as app:
            row = store.get("r")
            assert row is not None
            return _resuming(app, row)

    assert str(asyncio.run(resumed())).startswith(f"1 call since its checkpoint (event {taken}) comes from the journal")
    asyncio.run(rests(url, turns, then=lambda app: app.signal("r", "go", 1)))
    assert str(asyncio.run(resumed())).startswith(f"2 calls since its checkpoint (event {taken}) come from the journal")


# -- events before a checkpoint are removed -----------------------------------------------------------------------------
def prune(url: str, *more: str) -> Any:
    return CliRunner().invoke(cli, ["prune", "--before-checkpoint", *more, "--url", url])


def test_events_before_a_checkpoint_are_removed_and_the_rest_is_proven(url: str, store: Store) -> None:
    go(url, 8, 5)
    events = store.read("r")
    (taken,) = [event for event in events if isinstance(event.body, CheckpointTaken)]
    told = prune(url, "r", "--dry-run")
    assert told.exit_code == 0, told.output
    assert f"would remove {taken.seq - 2} events" in told.output
    assert store.read("r") == events
    told = prune(url, "r")
    assert (told.exit_code, "this is no terminal: see what it would do with --dry-run, then say --yes" in told.output) == (2, True)
    assert store.read("r") == events
    told = prune(url, "r", "--yes")
    assert told.exit_code == 0, told.output
    assert f"removed {taken.seq - 2} events" in told.output
    left = [events[0], *events[taken.seq - 1 :]]
    assert store.read("r") == store.read_life("r") == left
    assert store.read("r", 0, 3) == left[:3]
    assert store.read("r", 1, 2) == left[1:3]
    assert store.read("r", taken.seq + 1, 1) == [events[taken.seq + 1]]
    assert store.read_many({"r": 0}, 3) == {"r": left[:3]}
    assert store.hash_at("r", taken.seq - 1) is not None
    check(store)
    assert "removed 0 events" in prune(url, "--older-than", "0s", "--yes").output
    for _ in range(3):
        asyncio.run(rests(url, turns, then=lambda app: app.signal("r", "go", 1)))
    row = store.get("r")
    assert row is not None
    assert (row.status, DONE) == ("succeeded", [1, 2, 3, 4, 5, 6, 7, 8])
    check(store)
    before = len(store.read("r"))
    assert prune(url, "--older-than", "0s", "--yes").exit_code == 0
    assert len(store.read("r")) < before
    check(store)
    for words in (["show"], ["why"], ["trace"], ["events"], ["verify"], ["audit"], ["cost"]):
        seen = CliRunner().invoke(cli, [words[0], *([] if words[0] in ("audit", "cost") else ["r"]), "--url", url])
        assert "Traceback" not in seen.output, seen.output
        assert seen.exception is None or isinstance(seen.exception, SystemExit), (words, seen.exception)


def test_json_does_not_mean_yes(url: str, store: Store) -> None:
    go(url, 8, 5)
    events = store.read("r")
    told = prune(url, "r", "--json")
    assert (told.exit_code, "this is no terminal" in told.output) == (2, True), told.output
    assert store.read("r") == events
    assert prune(url, "r", "--json", "--yes").exit_code == 0
    assert len(store.read("r")) < len(events)


def test_replay_all_compares_the_last_lives_also_of_pruned_runs(url: str, store: Store, tmp_path: Path) -> None:
    """One run waits, one has ended, and one has lost the events before its checkpoint. Code that differs is found in each."""

    async def others(app: Perdure) -> None:
        for run_id in ("ended", "pruned"):
            await app.start(turns, 4, id=run_id)
            for _ in range(4):
                await app.signal(run_id, "go", 1)
            await app.drive(run_id, wait=False)

    go(url, 8, 5)
    asyncio.run(rests(url, turns, then=others))
    assert prune(url, "pruned", "--yes").exit_code == 0
    assert len(store.read("pruned")) == len(store.read_life("pruned")) < len(store.read("ended"))
    replay = ["replay", "--all", f"{__file__}:turns", "--url", url]
    told = CliRunner().invoke(cli, replay)
    assert (told.exit_code, "3 runs: all the same" in told.output) == (0, True), told.output
    told = CliRunner().invoke(cli, [*replay, "--live-only"])
    assert (told.exit_code, told.output) == (0, "1 unfinished run: 1 goes on with this code\n"), told.output
    assert DONE == [1, 2, 3, 4, 5, 1, 2, 3, 4, 1, 2, 3, 4], "a replay makes no call"
    changed = tmp_path / "changed.py"
    changed.write_text(Path(__file__).read_text().replace("await work(len(done) + 1)", "await work(len(done) + 100)"))
    told = CliRunner().invoke(cli, ["replay", "--all", f"{changed}:turns", "--url", url])
    assert told.exit_code == 7, told.output
    assert all(f"run {run_id}: different at call 4" in told.output for run_id in ("r", "ended", "pruned")), told.output


def test_what_needs_the_removed_events_is_refused_with_one_line(url: str, store: Store) -> None:
    go(url, 4, 4)
    assert prune(url, "r", "--yes").exit_code == 0

    async def main_() -> None:
        async with Perdure(url, agents=[turns]) as app:
            with pytest.raises(Conflict, match="were removed by prune --before-checkpoint"):
                await app.undo("r", by="ann")
            with pytest.raises(NotFound, match="event 3 was removed"):
                await app.handle("r").state(at=3)

    asyncio.run(main_())
    with pytest.raises(InvalidInput, match="were removed by prune"):
        export_run(store, "r", io.BytesIO().write)
    go_on = CliRunner().invoke(cli, ["show", "r", "--at", "3", "--url", url])
    assert "was removed" in go_on.output


def test_a_rewind_to_before_what_was_removed_is_refused(url: str, store: Store) -> None:
    go(url, 8, 4)
    assert prune(url, "r", "--yes").exit_code == 0
    (_, taken, *_) = store.read("r")

    async def main_() -> None:
        async with Perdure(url, agents=[turns]) as app:
            with pytest.raises(InvalidInput, match=rf"the events before its checkpoint at event {taken.seq} were removed"):
                await app.rewind("r", 4, by="ann")
            await app.rewind("r", taken.seq, by="ann")

    asyncio.run(main_())
    asyncio.run(rests(url, turns))
    assert DONE == [1, 2, 3, 4]
    check(store)


def test_the_database_lets_only_events_before_a_checkpoint_go(url: str, store: Store) -> None:
    go(url, 8, 4)
    (taken,) = [event.seq for event in store.read("r") if isinstance(event.body, CheckpointTaken)]
    for removed in (taken, taken - 2):
        with pytest.raises(Exception, match="only events before a checkpoint can be removed"):
            store._database.write(  # type: ignore[attr-defined]
                lambda cursor, removed=removed: cursor.change(
                    "prune_up_to", {"run": 1, "removed": removed, "head": b"0" * 32, "by": "ann", "now": 1}
                ),
                lambda cursor, _: False,
            )
    with pytest.raises(Exception, match="perdure_events is append-only"):
        store._database.write(  # type: ignore[attr-defined]
            lambda cursor: cursor.change("prune_events_before", {"run": 1, "removed": 3}), lambda cursor, _: False
        )
    assert len(store.read("r")) > taken


def test_a_pruned_run_moves_to_another_database_and_goes_on_there(url: str, store: Store, tmp_path: Path) -> None:
    go(url, 8, 4)
    assert prune(url, "r", "--yes").exit_code == 0
    to_url = f"sqlite:///{tmp_path}/there.db"
    there = open_store(to_url)
    copied = Copying(store, there, to_url=to_url, by="ann").move(now=1, lease_us=1)
    assert copied.damaged == ()
    assert there.read("r") == store.read("r")
    assert there.checkpoint("r") == store.checkpoint("r")
    check(there)
    there.close()
    for _ in range(4):
        asyncio.run(rests(to_url, turns, then=lambda app: app.signal("r", "go", 1)))
    assert DONE == [1, 2, 3, 4, 5, 6, 7, 8]


def test_an_export_with_checkpoints_is_redacted_imported_and_verified(url: str, store: Store, tmp_path: Path) -> None:
    @agent(version="1")
    async def secretive(run: Run) -> str:
        if run.restored is None:
            await run.receive("go")
            await run.checkpoint({"password": "hunter-two", "n": 1})
        return "done"

    async def main_() -> None:
        async with Perdure(url, agents=[secretive]) as app:
            handle = await app.start(secretive, id="r")
            await app.signal("r", "later", {"password": "hunter-two"})
            await app.signal("r", "go", 1)
            await handle.result()

    asyncio.run(main_())
    check(store)
    written = io.BytesIO()
    export_run(store, "r", written.write, read_rules(["key:password"]))
    assert b"hunter-two" not in written.getvalue()
    file = tmp_path / "r.perdure.jsonl"
    file.write_bytes(written.getvalue())
    there = f"sqlite:///{tmp_path}/there.db"
    open_store(there).close()
    told = CliRunner().invoke(cli, ["import", str(file), "--url", there])
    assert told.exit_code == 0, told.output
    told = CliRunner().invoke(cli, ["verify", "r", "--url", there])
    assert told.exit_code == 0, told.output


def test_verify_finds_an_image_that_does_not_hold_what_the_events_say(url: str, store: Store) -> None:
    go(url, 8, 4)
    events = store.read("r")
    (taken,) = [event for event in events if isinstance(event.body, CheckpointTaken)]
    before = events[: taken.seq - 1]
    body = taken.body
    assert isinstance(body, CheckpointTaken)
    assert image_problem(fold(before), body, before) is None
    assert image_problem(fold(before[:-3]), body, before[:-3]) is not None
    assert image_in(body).numbers == 3


def test_verify_finds_a_row_that_leads_a_resume_to_another_event(url: str, store: Store) -> None:
    go(url, 8, 7)
    store._database.write(  # type: ignore[attr-defined]
        lambda cursor: cursor.change("set_checkpoint", (1, 0)), lambda cursor, _: False
    )
    row = store.get("r")
    assert row is not None
    problem = verify_run(store, row).problem
    assert problem is not None
    assert "a resume reads it from event" in problem
    store._database.write(lambda cursor: cursor.change("set_checkpoint", (1, 5)), lambda cursor, _: False)  # type: ignore[attr-defined]
    with pytest.raises(StoreCorrupt, match="event 2 of run r is missing"):
        store.read_life("r")
