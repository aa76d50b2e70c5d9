"""Stored forks: rehearsals that can be looked at like any run, and live forks, which go on with effects and repeat none."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec import UNSET, structs
from tests.unit import fork_tools
from tests.unit.drive_tools import run
from tests.unit.fork_tools import NAMES, app_at, effects, everything, recorded
from tests.unit.test_reopen import World, journal, seq_of, unsent

from perdure import Agent, Approval, Budget, Call, Perdure, ReAct, Run, agent, tool
from perdure.core.events import (
    ApprovalRequested,
    CallAnswered,
    Event,
    RunClaimed,
    RunForked,
    RunReopened,
    ToolCallCompleted,
    ToolCallInitiated,
    encode_body,
)
from perdure.core.fork import copies, fork_point, live_fork
from perdure.core.state import fold, own_children
from perdure.errors import Conflict, Diverged, InvalidInput, NotFound, PerdureError, RunFailed, StoreCorrupt
from perdure.inspect.audit import Audit
from perdure.inspect.specimen import Packing, new_fork
from perdure.inspect.verify import verify_run
from perdure.inspect.view import read_run
from perdure.models import Scripted
from perdure.models.scripted import use, uses
from perdure.store.api import Filter, Recorded, RunRow, Served


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: Any, tmp_path: Path) -> str:
    return request.getfixturevalue("postgres_url") if request.param == "postgres" else f"sqlite:///{tmp_path / 'journal.db'}"


@pytest.fixture
def sqlite(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'journal.db'}"


def row_of(app: Perdure, run_id: str) -> RunRow:
    row = app.store.get(run_id)
    assert row is not None, run_id
    return row


def is_sound(app: Perdure, run_id: str, agent: Agent[Any, Any]) -> None:
    """Its rows agree with its journal, and its code replays it."""
    verdict = verify_run(app.store, row_of(app, run_id))
    assert verdict.problem is None, (run_id, verdict)
    events = app.store.read(run_id)
    agent.replayed(fold(events), events, app.load, 1_000_000)


def kept(app: Perdure) -> list[Any]:
    """Every run of the journal, with its events."""
    rows = app.store.list(Filter(limit=1000))
    return [(row, [encode_body(event.body) for event in app.store.read(row.run_id)]) for row in rows]


def points(events: list[Event]) -> list[int]:
    """Every event at which the run can be forked."""
    found = []
    for event in events:
        try:
            found.append(fork_point("r", events, event.seq, []))
        except InvalidInput:
            continue
    return found


async def settled(app: Perdure, run_id: str) -> str:
    """Drive the run to its end, and approve everything."""
    for _ in range(20):
        row = await app.drive(run_id)
        if row.status in ("succeeded", "failed"):
            return str(row.status)
        for ask in await app.approvals(run_id=run_id):
            await app.approve(ask.approval, by="ann")
    raise AssertionError(await app.handle(run_id).info())


# -- rehearsals that are stored ---------------------------------------------------------------------------------------
def test_a_stored_fork_parks_at_the_calls_that_it_would_make_and_nothing_can_drive_it(url: str, tmp_path: Path) -> None:
    ledger = tmp_path / "ledger"

    async def main() -> None:
        async with app_at(url) as app:
            await recorded(app, ledger)
            before, done = kept(app), effects(ledger)
            fork = await app.fork("r", input={"ledger": str(ledger), "what": "b"}, id="f", by="ann", reason="what if")
            assert (fork.id, fork.status, [call.name for call in fork.would_call]) == ("f", "stopped", NAMES)
            row, events = row_of(app, "f"), await journal(app, "f")
            assert (row.status, row.ready_at, row.holder, row.parent) == ("waiting", None, None, None)
            assert str(row.waiting_for).startswith("nothing: it would now make call 1: look(")
            made = next(event.body for event in events if isinstance(event.body, RunForked))
            assert (made.run_id, made.parent, made.at, made.by, made.reason, made.input) == ("f", "r", fork.at, "ann", "what if", True)
            assert made.head == app.store.hash_at("r", fork.at).hex()
            after = events[seq_of(events, RunForked) :]
            assert [event.body.until for event in after if hasattr(event.body, "until")] == ["fork"] * 11  # and none has begun
            assert not any(isinstance(event.body, ToolCallInitiated | RunClaimed) for event in after)
            is_sound(app, "f", everything)
            # A worker beside it does not touch it, and neither does a person.
            stop = asyncio.Event()
            worker = asyncio.create_task(app.work(stop=stop))
            await asyncio.sleep(0.3)
            stop.set()
            await worker
            app.store.register("w", "host:1", 1, app.clock.now())
            assert app.store.claim("w", [Served("everything", "1")], 9, app.clock.now() + 10**12) == []
            for act in (app.drive("f"), app.cancel("f"), app.rewind("f", 2), app.live_fork("f"), app.unpause("f")):
                with pytest.raises(Conflict, match="run f is a rehearsal, a fork of run r"):
                    await act
            with pytest.raises(Conflict):
                await app.approve(fold(events).asks[12].request.approval, by="ann")
            assert [one for one in kept(app) if one[0].run_id != "f"] == before
            assert await journal(app, "f") == events
            assert effects(ledger) == done

    run(main())


def test_a_fork_at_every_event_can_be_stored_verified_and_replayed(url: str, tmp_path: Path) -> None:
    ledger = tmp_path / "ledger"

    async def main() -> None:
        async with app_at(url) as app:
            await recorded(app, ledger)
            done = effects(ledger)
            events = await journal(app)
            some = points(events)
            assert len(some) > 10
            for at in some:
                fork = await app.fork("r", at=at, id=f"f{at}")
                assert (fork.status, fork.diff.is_same) == ("succeeded", True), (at, fork)
                is_sound(app, f"f{at}", everything)
                stored = await journal(app, f"f{at}")
                assert [encode_body(event.body) for event in stored[1:at]] == [
                    encode_body(event.body) for event in copies(events, f"f{at}")[1:at]
                ]
                assert own_children(fold(stored)) == []
                assert (await app.diff("r", f"f{at}")).is_same
            assert effects(ledger) == done

    run(main())


def test_a_stored_fork_says_where_each_answer_came_from(sqlite: str) -> None:
    world = World()
    read, act, guess = world.tool("read", "read"), world.tool("act", "once"), world.tool("guess", "once")

    @guess.simulate
    def _(what: str) -> str:
        return f"a guess of {what}"

    @agent(version="1")
    async def one(run: Run, more: bool) -> list[str]:
        found = [await act("a"), await act("b")]
        return [*found, await act("c"), await guess("d"), await read("e")] if more else found

    async def main() -> None:
        async with Perdure(sqlite, [one]) as app:
            await app.run(one, False, id="r")
            answers = [{"tool": "act", "args": {"what": "c"}, "result": "a prepared c"}]
            fork = await app.fork("r", input={"more": True}, edits={2: "another b"}, at=2, answers=answers, reads=True, id="f")
            assert fork.output == ["act of a", "another b", "a prepared c", "a guess of d", "read of e"]
            answered = [event.body.source for event in await journal(app, "f") if isinstance(event.body, CallAnswered)]
            assert answered == ["recorded", "edited", "answers", "simulated", "read"]
            is_sound(app, "f", one)
            # A fork of a fork: its recording is the rehearsal.
            other = await app.fork("f", edits={1: "x"}, id="g")
            assert other.output == ["x", "another b", "a prepared c", "a guess of d", "read of e"]
            is_sound(app, "g", one)
        assert world.log == ["act a", "act b", "read e"]

    run(main())


def test_the_fold_refuses_an_attempt_or_a_worker_in_a_rehearsal(sqlite: str) -> None:
    world = World()
    act = world.tool("act", "once")

    @agent(version="1")
    async def one(run: Run) -> str:
        return str(await act("a"))

    async def main() -> None:
        async with Perdure(sqlite, [one]) as app:
            await app.run(one, id="r")
            await app.fork("r", edits={1: "x"}, at=2, id="f")
            events = (await journal(app, "f"))[:-1]
            last = events[-1]
            for body in (RunClaimed("w"), ToolCallInitiated("act", "once", attempt=2), ToolCallCompleted(), RunReopened("ann", 2)):
                call = 1 if isinstance(body, ToolCallInitiated | ToolCallCompleted) else None
                with pytest.raises(StoreCorrupt, match="the run is a rehearsal, and nothing in it touches the world"):
                    fold([*events, Event(last.seq + 1, last.event_id, last.ts, 1, call, 1, body)])
            with pytest.raises(StoreCorrupt, match="event 1 says that the run is forked here"):
                fold([event for event in events if not isinstance(event.body, RunForked)][:1] + _renumbered(events))

    run(main())


def _renumbered(events: list[Event]) -> list[Event]:
    rest = [event for event in events[1:] if not isinstance(event.body, RunForked)]
    return [structs.replace(event, seq=seq) for seq, event in enumerate(rest, 2)]


def test_what_cannot_be_forked_is_refused_in_one_line_and_changes_nothing(sqlite: str) -> None:
    world = World()
    act = world.tool("act", "once")

    @agent(version="1")
    async def one(run: Run) -> list[str]:
        return list(await asyncio.gather(act("a"), act("b")))

    async def main() -> None:
        async with Perdure(sqlite, [one]) as app:
            await app.run(one, id="r")
            await app.fork("r", id="f")
            before = kept(app)
            wrong: list[tuple[dict[str, Any], str]] = [
                ({"id": "r"}, "run r exists.*choose another id"),
                ({"id": "f"}, "run f exists.*choose another id"),
                ({"id": "a b"}, "is not usable"),
                ({"id": "g", "at": 99}, "has no event 99"),
                ({"id": "g", "at": 3}, "stated the events 3 to 4 at once; take 2 or 4"),
                ({"id": "g", "at": 1}, "begins at event 2"),
                ({"id": "g", "edits": {9: 7}}, "has no call 9"),
            ]
            for options, words in wrong:
                for make in (app.fork, app.live_fork):
                    with pytest.raises((InvalidInput, Conflict), match=words) as refused:
                        await make("r", **options)
                    assert "\n" not in str(refused.value)
            for make in (app.fork, app.live_fork):
                with pytest.raises(NotFound):
                    await make("nothing", id="g")
            assert kept(app) == before

    run(main())


# -- live forks -------------------------------------------------------------------------------------------------------
@pytest.mark.full
def test_a_live_fork_at_every_event_repeats_nothing_that_has_happened(url: str, tmp_path: Path) -> None:
    ledger = tmp_path / "ledger"

    async def main() -> None:
        async with app_at(url) as app:
            await recorded(app, ledger)
            before, done, events = kept(app), effects(ledger), await journal(app)
            for at in points(events):
                plan = await app.live_fork("r", id=f"f{at}", at=at, dry_run=True)
                assert app.store.get(f"f{at}") is None
                assert await app.live_fork("r", id=f"f{at}", at=at) == plan
                is_sound(app, f"f{at}", everything)
                assert row_of(app, f"f{at}").status == "queued"
                assert await settled(app, f"f{at}") == "succeeded"
                is_sound(app, f"f{at}", everything)
                assert effects(ledger) == done, at
            assert [one for one in kept(app) if "f" not in one[0].run_id] == before

    run(main())


def test_a_live_fork_with_another_input_makes_its_own_calls_with_its_own_keys(url: str, tmp_path: Path) -> None:
    ledger = tmp_path / "ledger"

    async def main() -> None:
        async with app_at(url) as app:
            await recorded(app, ledger)
            done = effects(ledger)
            ledger.unlink()
            plan = await app.live_fork("r", id="f", input={"ledger": str(ledger), "what": "b"}, by="ann", reason="b is right")
            assert len(plan.next) == len(NAMES)
            assert effects(ledger) == []
            assert await settled(app, "f") == "succeeded"
            is_sound(app, "f", everything)
            assert [line.replace(" b", " a") for line in effects(ledger) if "oracle" not in line] == [
                line for line in done if "oracle" not in line
            ]
            mine, others = fold(await journal(app, "f")), fold(await journal(app))
            keys = {call.key for call in mine.calls.values() if not call.inherited}
            assert len(keys) == len(fork_tools.ALL) + 1
            assert not keys & {call.key for call in others.calls.values()}
            # Nor has the parent one of these keys for a call that it may still make.
            assert not keys & {others.keys.key(call.number, call.tool) for call in mine.calls.values() if not call.inherited}
            assert {call.key for call in mine.calls.values() if call.inherited} == {call.key for call in others.calls.values()}
            assert own_children(mine) == [f"f/{max(mine.children)}"]

    run(main())


def scene(world: World) -> tuple[Agent[Any, Any], Any]:
    act = world.tool("act", "once")

    @agent(version="1")
    async def one(run: Run, words: list[str]) -> list[str]:
        found = []
        for word in words:
            try:
                found.append(await act(word))
            except Exception as error:
                found.append(type(error).__name__)
        world.fail_if_broken()
        return found

    return one, act


def test_a_call_that_may_have_happened_is_never_made_by_a_live_fork(sqlite: str) -> None:
    """It failed without proof: the fork gets the failure. With proof that nothing was sent, it makes a call of its own."""
    world = World()
    world.bug = False
    one, _ = scene(world)
    world.broken = {"act a": lambda: ValueError("after the effect?"), "act b": unsent}

    async def main() -> None:
        async with Perdure(sqlite, [one]) as app:
            assert await app.run(one, ["a", "b", "c"], id="r") == ["ToolFailed", "ToolFailed", "act of c"]
            world.broken = {}
            plan = await app.live_fork("r", id="f", at=2)
            assert any("call 2 act (once) failed in r: if the fork makes it and r is retried" in line for line in plan.twice)
            assert await app.handle("f").result() == ["ToolFailed", "act of b", "act of c"]
            assert world.log == ["act c", "act b"]
            is_sound(app, "f", one)
            # Also if the agent waits for the failed call at the point.
            events = await journal(app)
            await app.live_fork("r", id="g", at=seq_of(events, ToolCallInitiated, 1))
            assert await app.handle("g").result() == ["ToolFailed", "act of b", "act of c"]
            assert world.log == ["act c", "act b", "act b"]  # b: another run, another call

    run(main())


@pytest.mark.parametrize("effect", ["read", "idempotent"])
def test_a_call_that_may_be_repeated_and_failed_is_attempted_again_with_a_key_of_the_fork(effect: str, sqlite: str) -> None:
    world = World()
    look = world.tool("look", effect)

    @agent(version="1")
    async def one(run: Run) -> str:
        return str(await look("a"))

    world.broken = {"look a": lambda: ValueError("down")}

    async def main() -> None:
        async with Perdure(sqlite, [one]) as app:
            with pytest.raises(RunFailed):
                await app.run(one, id="r")
            world.broken = {}
            await app.live_fork("r", id="f", at=3)  # the agent waits for the call
            assert await app.handle("f").result() == "look of a"
            is_sound(app, "f", one)
            call, parent = fold(await journal(app, "f")).calls[1], fold(await journal(app)).calls[1]
            assert call.key != parent.key
            assert not call.inherited

    run(main())


def test_a_call_in_doubt_or_under_way_is_in_the_way_of_a_live_fork(sqlite: str, tmp_path: Path) -> None:
    go, begun = asyncio.Event(), asyncio.Event()

    @tool(effect="once", timeout=30)
    async def pay(what: str) -> str:
        begun.set()
        await go.wait()
        raise TimeoutError

    @agent(version="1")
    async def one(run: Run) -> str:
        return await pay("a")

    async def main() -> None:
        async with Perdure(sqlite, [one]) as app:
            await app.start(one, id="r")
            driven = asyncio.create_task(app.drive("r"))
            await begun.wait()
            with pytest.raises(Conflict, match=r"call 1 \(pay\) of run r is under way, so no live fork can be made"):
                await app.live_fork("r", id="f")
            go.set()
            assert (await driven).status == "needs_attention"
            with pytest.raises(Conflict, match=r"call 1 \(pay\) of run r is in doubt.*resolve it first"):
                await app.live_fork("r", id="f")
            assert app.store.get("f") is None
            assert (await app.fork("r", id="g")).status == "stopped"  # a rehearsal touches nothing
            is_sound(app, "g", one)
            await app.resolve("r", 1, happened="paid", by="ann")
            await app.drive("r")
            await app.live_fork("r", id="f")
            assert await app.handle("f").result() == "paid"

    run(main())


def test_the_undo_of_a_live_fork_undoes_what_the_fork_did_and_not_what_its_parent_did(sqlite: str) -> None:
    log: list[str] = []

    @tool(effect="once")
    async def pay(what: str) -> str:
        log.append(f"pay {what}")
        return what

    @pay.compensate
    async def _(what: str) -> None:
        log.append(f"pay back {what}")

    @agent(version="1")
    async def below(run: Run) -> str:
        return await pay("below")

    @agent(version="1")
    async def one(run: Run, last: str) -> str:
        await pay("a")
        await below()
        return await pay(last)

    async def main() -> None:
        async with Perdure(sqlite, [one, below]) as app:
            await app.run(one, "b", id="r")
            await app.live_fork("r", id="f", input={"last": "c"})
            assert await app.handle("f").result() == "c"
            assert log == ["pay a", "pay below", "pay b", "pay c"]
            await app.undo("f")
            assert log[4:] == ["pay back c"]
            is_sound(app, "f", one)
            await app.undo("r")
            assert log[5:] == ["pay back b", "pay back below", "pay back a"]

    run(main())


def test_a_live_fork_has_a_budget_and_costs_of_its_own(url: str) -> None:
    @tool(effect="keyed")
    async def pay(what: str, call: Call) -> str:
        call.spend(usd=0.4)
        return what

    @agent(version="1", budget=Budget(usd=1))
    async def one(run: Run, words: list[str]) -> list[str]:
        return [await pay(word) for word in words]

    async def main() -> None:
        async with Perdure(url, [one]) as app:
            await app.run(one, ["a", "b"], id="r")
            await app.live_fork("r", id="f", input={"words": ["a", "b", "c", "d"]})
            assert await app.handle("f").result() == ["a", "b", "c", "d"]
            is_sound(app, "f", one)
            assert {row.group: (row.calls, row.usd_micros) for row in await app.costs("run")} == {"r": (2, 800_000), "f": (2, 800_000)}
            (ledger,) = app.store.ledgers("f")
            assert (ledger.run_id, ledger.spent.usd_micros) == ("f", 800_000)
            lines = [line for line in Audit(app.store).more() if line["run_id"] == "f"]
            assert lines[0]["type"] == "run_forked"
            assert (lines[0]["actor"], lines[0]["context"]["parent"]) == ("app", "r")

    run(main())


def test_approvals_of_the_parent_are_not_approvals_of_a_live_fork(url: str) -> None:
    log: list[str] = []

    @tool(effect="once", approval=Approval())
    async def wire(what: str) -> str:
        log.append(what)
        return what

    @agent(version="1")
    async def one(run: Run) -> list[Any]:
        first = await wire("a")
        said = await run.request_approval("go on", {"first": first})
        return [first, said.granted, await wire("b")]

    async def main() -> None:
        async with Perdure(url, [one]) as app:
            await app.start(one, id="r")
            await app.drive("r")
            events = await journal(app)
            asked = seq_of(events, ApprovalRequested)
            with pytest.raises(InvalidInput, match="the approval of call 1 is about the run that was forked, and a fork asks for its own"):
                await app.live_fork("r", id="f", at=asked)
            await app.live_fork("r", id="f", at=2)  # before it is asked for
            await app.drive("f")
            (mine,) = await app.approvals(run_id="f")
            (theirs,) = await app.approvals(run_id="r")
            assert mine.approval != theirs.approval
            await app.approve(theirs.approval, by="ann")
            assert (await app.drive("f")).status == "waiting_approval"
            assert log == []
            assert await settled(app, "r") == "succeeded"
            assert log == ["a", "b"]
            # What a person agreed to in the parent: its result is used. A question is asked again.
            await app.live_fork("r", id="g", at=2)
            assert (await app.drive("g")).status == "waiting_approval"
            (again,) = await app.approvals(run_id="g")
            assert again.action == "go on"
            assert await settled(app, "g") == "succeeded"
            assert log == ["a", "b"]
            is_sound(app, "g", one)
            is_sound(app, "f", one)

    run(main())


def test_a_child_of_the_parent_is_no_child_of_a_live_fork(url: str) -> None:
    log: list[str] = []

    @tool(effect="once")
    async def pay(what: str) -> str:
        log.append(what)
        return what

    @agent(version="1")
    async def below(run: Run, what: str) -> str:
        if what == "slow":
            await run.receive("go")
        return await pay(what)

    @agent(version="1")
    async def one(run: Run) -> list[str]:
        return [await below("quick"), await below("slow")]

    async def main() -> None:
        async with Perdure(url, [one, below]) as app:
            await app.start(one, id="r")
            for name in ("r", "r/1", "r", "r/2"):
                await app.drive(name)
            events = await journal(app)
            with pytest.raises(Conflict, match=r"waits at event .* for its child r/2, which has not ended"):
                await app.live_fork("r", id="f", at=events[-1].seq)
            plan = await app.live_fork("r", id="f", at=2)
            assert any("child r/2 has not ended: if the fork starts it too" in line for line in plan.twice)
            assert any("run r is waiting and goes on too" in line for line in plan.twice)
            for name in ("f", "f/3"):
                await app.drive(name)
            assert log == ["quick"]
            assert own_children(fold(await journal(app, "f"))) == ["f/3"]
            for name in ("f/3", "r/2"):
                await app.signal(name, "go")
            for name in ("f/3", "f", "r/2", "r"):
                await app.drive(name)
            assert (row_of(app, "f").status, row_of(app, "r").status, log) == ("succeeded", "succeeded", ["quick", "slow", "slow"])
            is_sound(app, "f", one)
            is_sound(app, "r", one)

    run(main())


def test_a_live_fork_that_fails_is_retried_and_rewound_and_repeats_nothing(sqlite: str) -> None:
    world = World()
    world.bug = False
    one, _ = scene(world)

    async def main() -> None:
        async with Perdure(sqlite, [one]) as app:
            await app.run(one, ["a", "b"], id="r")
            world.bug = True
            await app.live_fork("r", id="f", input={"words": ["a", "c"]})
            with pytest.raises(RunFailed):
                await app.handle("f").result()
            assert world.log == ["act a", "act b", "act c"]
            world.bug = False
            await app.retry("f")
            assert await app.handle("f").result() == ["act of a", "act of c"]
            with pytest.raises(Conflict, match="has succeeded"):
                await app.rewind("f", 2)
            world.bug = True
            await app.live_fork("f", id="g", at=2)  # a fork of a fork
            with pytest.raises(RunFailed):
                await app.handle("g").result()
            world.bug = False
            await app.rewind("g", 2)
            assert await app.handle("g").result() == ["act of a", "act of c"]
            assert world.log == ["act a", "act b", "act c"]
            for name in ("f", "g"):
                is_sound(app, name, one)
            state = fold(await journal(app, "g"))
            keys = [fold(await journal(app, name)).calls for name in ("r", "f")]
            assert [call.key for call in state.calls.values()] == [keys[0][1].key, keys[0][2].key, keys[1][3].key]

    run(main())


def test_edits_of_a_live_fork_reach_its_agent_and_are_no_attempts(sqlite: str) -> None:
    world = World()
    world.bug = False
    one, _ = scene(world)

    async def main() -> None:
        async with Perdure(sqlite, [one]) as app:
            await app.run(one, ["a", "b", "c"], id="r")
            plan = await app.live_fork("r", id="f", edits={1: "x", 3: "z"})
            assert (plan.edits, plan.at) == ([1, 3], 3)
            assert await app.handle("f").result() == ["x", "act of b", "z"]
            assert world.log == ["act a", "act b", "act c"]
            is_sound(app, "f", one)
            with pytest.raises(InvalidInput, match="call 1 has no outcome after event 5, so that nothing can be edited"):
                await app.live_fork("r", id="g", at=5, edits={1: "x"})

    run(main())


def test_an_edit_that_does_not_fit_is_refused_for_a_call_before_and_after_the_point(sqlite: str) -> None:
    @tool(effect="once")
    async def count(what: str) -> int:
        return 1

    @agent(version="1")
    async def one(run: Run) -> int:
        return await count("a") + await count("b")

    async def main() -> None:
        async with Perdure(sqlite, [one]) as app:
            await app.run(one, id="r")
            for at, number in ((3, 1), (3, 2), (2, 1)):
                with pytest.raises(InvalidInput, match=f"the edited result of call {number} does not fit count"):
                    await app.live_fork("r", id="f", at=at, edits={number: "text"})
            assert app.store.get("f") is None

    run(main())


def test_random_numbers_go_on_and_the_id_of_a_live_fork_is_its_own(sqlite: str) -> None:
    world = World()
    act = world.tool("act", "once")

    @agent(version="1")
    async def one(run: Run, names: bool) -> list[str]:
        first = await act(str(run.uuid()))
        await act(run.id if names else "x")
        return [first, await act(f"{run.uuid()} {run.random.random()}"), run.id]

    async def main() -> None:
        async with Perdure(sqlite, [one]) as app:
            expected = await app.run(one, False, id="r")
            await app.live_fork("r", id="f", at=5)
            assert await app.handle("f").result() == [*expected[:2], "f"]
            assert len(world.log) == 3
            fork = await app.fork("r", at=5, id="s")
            assert fork.output == expected
            is_sound(app, "s", one)
            await app.run(one, True, id="n")
            with pytest.raises(Diverged):  # a copied call has the id of the parent: it is not guessed whether that is right
                await app.live_fork("n", id="g", at=6)
            assert app.store.get("g") is None

    run(main())


def test_signals_after_the_point_reach_a_live_fork_too(sqlite: str) -> None:
    @agent(version="1")
    async def one(run: Run) -> list[Any]:
        return [await run.receive("go"), await run.receive("go")]

    async def main() -> None:
        async with Perdure(sqlite, [one]) as app:
            await app.start(one, id="r")
            await app.drive("r")
            await app.signal("r", "go", 1, key="k")
            await app.drive("r")
            await app.live_fork("r", id="f", at=2)
            await app.drive("f")
            await app.signal("f", "go", 2, key="k")  # the same key, and another run
            assert await app.handle("f").result() == [1, 2]
            assert row_of(app, "r").status == "waiting"
            is_sound(app, "f", one)

    run(main())


def test_a_live_fork_goes_on_with_other_code(tmp_path: Path) -> None:
    world = World()
    act = world.tool("act", "once")
    url = f"sqlite:///{tmp_path / 'journal.db'}"

    def code(version: str, last: str) -> Agent[Any, Any]:
        @agent(version=version, name="one")
        async def one(run: Run) -> str:
            await act("a")
            return str(await act(last))

        return one

    async def main() -> None:
        async with Perdure(url, [code("1", "b")]) as app:
            await app.run("one", id="r")
        other = code("2", "c")
        async with Perdure(url, [other]) as app:
            plan = await app.live_fork("r", id="f")
            assert (plan.before, plan.version) == ("1", "2")
            assert await app.handle("f").result() == "act of c"
            is_sound(app, "f", other)
            stored = await app.fork("r", id="s", answers=[{"tool": "act", "result": "a c"}])
            assert (stored.output, row_of(app, "s").version) == ("a c", "2")
            is_sound(app, "s", other)
        assert world.log == ["act a", "act b", "act c"]

    run(main())


def test_children_specimens_and_undo_runs_have_no_live_fork(sqlite: str) -> None:
    log: list[str] = []

    @tool(effect="once")
    async def pay(what: str) -> str:
        log.append(what)
        return what

    @pay.compensate
    async def _(what: str) -> None:
        log.append("back")

    @agent(version="1")
    async def below(run: Run) -> str:
        return await pay("a")

    @agent(version="1")
    async def one(run: Run) -> str:
        return await below()

    async def main() -> None:
        async with Perdure(sqlite, [one, below]) as app:
            await app.run(one, id="r")
            with pytest.raises(Conflict, match="is a child of run r, and has no live fork of its own: fork the run at the top"):
                await app.live_fork("r/1", id="f")
            assert (await app.fork("r/1", id="s")).status == "succeeded"
            is_sound(app, "s", below)
            await app.undo("r")
            with pytest.raises(PerdureError):
                await app.live_fork("r/undo", id="f")

    run(main())


def test_of_two_forks_with_one_id_one_is_made(url: str) -> None:
    world = World()
    world.bug = False
    one, _ = scene(world)

    async def main() -> None:
        async with Perdure(url, [one]) as first, Perdure(url, [one]) as second:
            await first.run(one, ["a"], id="r")
            found = await asyncio.gather(first.live_fork("r", id="f"), second.live_fork("r", id="f"), return_exceptions=True)
            failed = [one for one in found if isinstance(one, Exception)]
            assert [type(one) for one in failed] == [Conflict], found
            assert "run f exists; nothing was written" in str(failed[0])
            is_sound(first, "f", one)
            assert await first.handle("f").result() == ["act of a"]
        assert world.log == ["act a"]

    run(main())


def test_a_fork_outlives_the_prune_of_its_parent_with_its_blobs_and_artifacts(url: str) -> None:
    @tool(effect="once")
    async def make(what: str, call: Call) -> Any:
        saved = await call.save(what.encode() * 1000)
        return {"file": saved, "text": "x" * 100_000}

    @agent(version="1")
    async def one(run: Run) -> str:
        found = await make("a")
        return str(found["text"])

    async def main() -> None:
        async with Perdure(url, [one]) as app:
            await app.run(one, id="r")
            await app.live_fork("r", id="f", at=2)
            await app.fork("r", id="s")
            app.store.prune(["r"], app.clock.now() + 1, by="ann", now=app.clock.now() + 1)
            assert app.store.get("r") is None
            assert await app.handle("f").result() == "x" * 100_000
            is_sound(app, "f", one)
            is_sound(app, "s", one)

    run(main())


def test_the_fork_is_said_on_every_page(sqlite: str) -> None:
    world = World()
    world.bug = False
    one, _ = scene(world)

    async def main() -> None:
        async with Perdure(sqlite, [one]) as app:
            await app.run(one, ["a"], id="r")
            await app.live_fork("r", id="f", by="ann")
            await app.fork("r", id="s", by="bob")
            live, stored = (read_run(app.store, name).fork or "" for name in ("f", "s"))
            assert live.startswith("a fork of run r at event 2, made by ann: it is live")
            assert stored == "a fork of run r at event 2, made by bob: a rehearsal, and nothing in it has touched the world"
            assert read_run(app.store, "r").fork is None

    run(main())


# -- runs of every kind, forked at every event ------------------------------------------------------------------------
async def fork_everywhere(app: Perdure, code: Agent[Any, Any], log: Callable[[], Any], run_id: str = "r") -> None:
    """At every event: a stored rehearsal that takes the recorded path, and a live fork that repeats nothing."""
    events, done, end = await journal(app, run_id), log(), row_of(app, run_id)
    output = fold(events).output
    tried = 0
    for at in points(events):
        stored = await app.fork(run_id, at=at, id=f"s{at}")
        assert (stored.status, stored.diff.is_same) == (end.status, True), (at, stored)
        is_sound(app, f"s{at}", code)
        await app.live_fork(run_id, at=at, id=f"f{at}")
        is_sound(app, f"f{at}", code)
        assert await settled(app, f"f{at}") == end.status
        is_sound(app, f"f{at}", code)
        assert fold(await journal(app, f"f{at}")).output == output
        assert log() == done, at
        tried += 1
    assert tried > 3


def test_a_run_that_was_reopened_is_forked_at_every_event(url: str) -> None:
    world = World()
    one, act = scene(world)
    look = world.tool("look", "read")

    @agent(version="1")
    async def two(run: Run) -> list[str]:
        first, second = await asyncio.gather(act("a"), look("b"))
        third = await act("c")
        world.fail_if_broken()
        return [first, second, third]

    async def main() -> None:
        async with Perdure(url, [one, two]) as app:
            await app.start(two, id="r")
            await app.drive("r")
            await app.rewind("r", 2)
            await app.drive("r")
            world.bug = False
            await app.retry("r")
            assert await app.handle("r").result() == ["act of a", "look of b", "act of c"]
            await fork_everywhere(app, two, lambda: list(world.log))

    run(main())


def test_a_run_with_timers_signals_and_statements_is_forked_at_every_event(sqlite: str) -> None:
    world = World()
    act = world.tool("act", "once")

    @agent(version="1")
    async def one(run: Run) -> list[Any]:
        run.status("it begins")
        run.note("a thought")
        found = []
        try:
            async with asyncio.timeout(0.05):
                found.append(await run.receive("never"))
        except TimeoutError:
            found.append("in vain")
        run.decide("left", among=["left", "right"], reason="why not")
        found.append(await act("a") if run.patched("new") else "old")
        await asyncio.sleep(0.05)
        found.append(await run.receive("go"))
        return [*found, await act("b"), str(run.now())]

    async def main() -> None:
        async with Perdure(sqlite, [one]) as app:
            await app.start(one, id="r")
            await app.signal("r", "go", {"x": 1})
            await app.handle("r").result()
            done = list(world.log)
            events = await journal(app)
            for at in points(events):
                stored = await app.fork("r", at=at, id=f"s{at}")
                assert (stored.status, stored.output[:4]) == ("succeeded", ["in vain", "act of a", {"x": 1}, "act of b"]), (at, stored)
                is_sound(app, f"s{at}", one)
                await app.live_fork("r", at=at, id=f"f{at}")
                assert (await app.handle(f"f{at}").result())[:4] == ["in vain", "act of a", {"x": 1}, "act of b"]
                is_sound(app, f"f{at}", one)
                assert world.log == done

    run(main())


def test_a_conversation_with_a_model_is_forked_at_every_event(url: str, tmp_path: Path) -> None:
    ledger = tmp_path / "ledger"
    lines: list[Any] = [uses(use("look", ledger=str(ledger), what="x" * 2000)), uses(use("pay", ledger=str(ledger), what="y")), "done"]
    one = ReAct("one", model=Scripted(lines), tools=[fork_tools.look, fork_tools.pay], instructions="be kind " * 100)

    async def main() -> None:
        async with app_at(url, one) as app:
            await app.run("one", "hello " * 300, id="r")
            done = effects(ledger)
            await fork_everywhere(app, one, lambda: effects(ledger))
            assert effects(ledger) == done
            # Another answer of the model: from there on it is asked really, in the live fork.
            edit = {"text": "", "uses": [{"id": "1", "name": "pay", "arguments": {"ledger": str(ledger), "what": "z"}}], "stop": "tools"}
            stored = await app.fork("r", edits={1: edit}, id="other")
            assert (stored.status, stored.would_call[0].name) == ("stopped", "pay")
            is_sound(app, "other", one)

    run(main())


def test_a_run_that_was_undone_has_no_live_fork(url: str) -> None:
    log: list[str] = []

    @tool(effect="once")
    async def pay(what: str) -> str:
        log.append(what)
        return what

    @pay.compensate
    async def _(what: str) -> None:
        log.append("back")

    @agent(version="1")
    async def one(run: Run) -> str:
        return await pay("a")

    async def main() -> None:
        async with Perdure(url, [one]) as app:
            await app.run(one, id="r")
            planned = await asyncio.to_thread(
                lambda: app._planner().fork("r", "f", None, by="ann", reason=None, edits={}, input=UNSET, agent=one, inline_bytes=9999)
            )
            await app.undo("r")
            with pytest.raises(Conflict, match="run r has been undone, or is being undone"):
                await app.live_fork("r", id="f")
            with pytest.raises(Conflict, match="run r has been undone, or is being undone"):
                await app.engine.fork(planned.new)  # the undo came between the plan and the write
            assert app.store.get("f") is None
            assert (await app.fork("r", id="s")).status == "succeeded"

    run(main())


def test_verify_finds_a_fork_whose_copies_are_not_those_of_its_parent(sqlite: str) -> None:
    world = World()
    world.bug = False
    one, _ = scene(world)

    async def main() -> None:
        async with Perdure(sqlite, [one]) as app:
            await app.run(one, ["a"], id="r")
            await app.run(one, ["b"], id="other")
            events = [*app.store.read("other")]
            forked = RunForked("f", "r", 2, row_of(app, "r").head.hex(), "ann")
            ids = iter(app.clock.new_id, None)
            made = live_fork(events, fold(events), forked, {}, version="1", input=None, target=None, now=app.clock.now(), ids=ids)
            app.store.insert_fork(new_fork(Recorded("r", [], []), made.state, made.events, None, Packing(1000, app.load)))
            verdict = verify_run(app.store, row_of(app, "f"))
            assert verdict.problem is not None
            assert "copied from run r" in verdict.problem

    run(main())
