"""Undoing a run: which calls, in which order, with which arguments, and which effects stay."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.unit.drive_tools import perdure, run, until

from perdure import Agent, Approval, Call, Fatal, Perdure, Retry, Run, Tool, agent, sync, tool
from perdure.core import codec
from perdure.core.events import RunSucceeded
from perdure.core.identity import undo_id, undone_by
from perdure.errors import Conflict, Diverged, InvalidInput, NotFound, UnknownAgent
from perdure.store.api import FINISHED


class World:
    """The effects of the tools, and the effects that were undone."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.broken: set[str] = set()

    def tool(self, name: str, *, effect: Any = "idempotent", undo: Any = "idempotent", **options: Any) -> Tool[..., Any]:
        @tool(effect=effect, name=name, **options)
        async def act(what: str) -> str:
            self.log.append(f"{name} {what}")
            return f"{name} of {what}"

        if undo is not None:

            @act.compensate(effect=undo)
            async def back(what: str, result: str, call: Call) -> None:
                if name in self.broken:
                    raise Fatal(f"{name} is down")
                self.log.append(f"un{name} {what} [{result}]")

        return act


async def undone(app: Perdure, run_id: str, **options: Any) -> list[str]:
    """Undo the run, which must succeed. Returns the tools of the undo, in order."""
    row = await app.undo(run_id, **options)
    assert row.status == "succeeded", row
    state = await app.handle(undo_id(run_id)).state()
    return [call.tool for call in state.calls.values()]


async def output(app: Perdure, run_id: str) -> Any:
    body = (await app.handle(undo_id(run_id)).events())[-1].body
    assert isinstance(body, RunSucceeded), body
    return codec.decode(app.load(body.output))


def test_completed_calls_are_undone_last_one_first_with_their_arguments_and_results():
    world = World()
    book, pay, look = world.tool("book"), world.tool("pay"), world.tool("look", effect="read")

    @agent
    async def trip(run: Run) -> str:
        await book("room")
        await look("weather")
        await pay("bill")
        return "gone"

    async def main() -> None:
        async with perdure(None, [trip]) as app:
            await app.run(trip, id="t")
            before = await app.handle("t").events()
            world.log.clear()
            plan = await app.plan_undo("t")
            assert [(deed.call, deed.tool, deed.arguments, deed.result) for deed in plan.steps] == [
                (3, "pay", {"what": "bill"}, "pay of bill"),
                (1, "book", {"what": "room"}, "book of room"),
            ]
            assert not plan.left
            assert world.log == []
            assert await undone(app, "t") == ["pay.undo", "book.undo"]
            assert world.log == ["unpay bill [pay of bill]", "unbook room [book of room]"]
            assert await app.handle("t").events() == before  # G10

    run(main())


def test_calls_made_at_the_same_time_are_undone_in_reverse_order_of_completion():
    world = World()

    async def main() -> None:
        first = asyncio.Event()

        @tool(effect="idempotent", name="slow")
        async def slow() -> None:
            await first.wait()
            world.log.append("slow")

        @slow.compensate(effect="idempotent")
        async def unslow() -> None:
            world.log.append("unslow")

        @tool(effect="idempotent", name="quick")
        async def quick() -> None:
            world.log.append("quick")

        @quick.compensate(effect="idempotent")
        async def unquick() -> None:
            world.log.append("unquick")
            first.set()

        @agent
        async def both(run: Run) -> None:
            await asyncio.gather(slow(), quick())

        async with perdure(None, [both]) as app:
            handle = await app.start(both, id="b")
            driving = asyncio.ensure_future(app.engine.drive("b"))
            await until(lambda: world.log == ["quick"])
            await asyncio.sleep(0.05)
            first.set()
            await driving
            await handle.result()
            # Call 1 has ended after call 2.
            assert await undone(app, "b") == ["slow.undo", "quick.undo"]

    run(main())


def test_children_are_undone_where_they_ended_whether_they_succeeded_or_failed():
    world = World()
    act = world.tool("act")

    @agent
    async def leaf(run: Run, name: str) -> None:
        await act(f"{name} 1")
        await act(f"{name} 2")
        if name == "bad":
            raise ValueError("no")

    @agent
    async def branch(run: Run, name: str) -> None:
        await act(f"{name} before")
        await leaf(f"{name} leaf")

    @agent
    async def root(run: Run) -> None:
        await act("first")
        await branch("branch")
        await act("between")
        try:
            await leaf("bad")
        except Exception:
            await act("last")

    async def main() -> None:
        async with perdure(None, [root]) as app:
            await app.run(root, id="r")
            done = [line.removeprefix("act ") for line in world.log]
            world.log.clear()
            await undone(app, "r")
            assert [line.removeprefix("unact ").partition(" [")[0] for line in world.log] == done[::-1]
            with pytest.raises(InvalidInput, match=r"undone with the run that it belongs to\nundo that: perdure undo r$"):
                await app.plan_undo("r/2/2")

    run(main())


def test_what_has_no_hook_is_named_and_must_be_accepted():
    world = World()
    mail, pay = world.tool("mail", effect="once", undo=None), world.tool("pay")

    @agent
    async def shop(run: Run) -> None:
        await pay("bill")
        await mail("ann")

    async def main() -> None:
        async with perdure(None, [shop]) as app:
            await app.run(shop, id="s")
            (deed,) = (await app.plan_undo("s")).irreversible
            assert (deed.name, deed.arguments, deed.result) == ("call 2 (mail) of run s", {"what": "ann"}, "mail of ann")
            with pytest.raises(Conflict, match=r"call 2 \(mail\) of run s \[its tool has no compensate hook\] stays"):
                await app.undo("s")
            assert app.store.get("s/undo") is None
            assert await undone(app, "s", accept=True) == ["pay.undo"]
            assert [left["tool"] for left in (await output(app, "s"))["left"]] == ["mail"]

    run(main())


def test_a_run_that_has_changed_nothing_has_no_undo():
    world = World()
    look = world.tool("look", effect="read")

    @agent
    async def reader(run: Run) -> None:
        await look("up")

    async def main() -> None:
        async with perdure(None, [reader]) as app:
            await app.run(reader, id="r")
            with pytest.raises(Conflict, match="nothing that can be undone"):
                await app.undo("r")
            assert app.store.get("r/undo") is None

    run(main())


def test_a_failed_run_is_undone_as_far_as_it_came():
    world = World()
    pay, ship = world.tool("pay"), world.tool("ship", retry=Retry(attempts=1))

    @agent
    async def shop(run: Run) -> None:
        await pay("bill")
        raise RuntimeError("out of stock")
        await ship("box")

    async def main() -> None:
        async with perdure(None, [shop]) as app:
            handle = await app.start(shop, id="s")
            await app.engine.drive("s")
            assert (await handle.row()).status == "failed"
            assert await undone(app, "s") == ["pay.undo"]

    run(main())


def test_a_call_that_was_left_in_doubt_is_named_and_never_compensated():
    world = World()
    pay = world.tool("pay")

    @tool(effect="once")
    async def wire(what: str) -> None:
        raise TimeoutError("no answer")

    @wire.compensate
    async def unwire(what: str) -> None:
        world.log.append("unwire")

    @agent
    async def shop(run: Run) -> None:
        await pay("bill")
        await wire("money")

    async def main() -> None:
        async with perdure(None, [shop]) as app:
            await app.start(shop, id="s")
            assert (await app.engine.drive("s")).status == "needs_attention"
            with pytest.raises(
                Conflict,
                match=r"(?s)has not ended, it needs attention .*perdure why s says how, or end it without its agent: perdure cancel s --force",
            ):
                await app.undo("s")
            await app.cancel("s", force=True)
            plan = await app.plan_undo("s")
            assert [(deed.tool, deed.arguments) for deed in plan.doubtful] == [("wire", {"what": "money"})]
            assert str(plan.doubtful[0].why).startswith("it may have happened")
            with pytest.raises(Conflict, match=r"call 2 \(wire\)"):
                await app.undo("s")
            assert await undone(app, "s", accept=True) == ["pay.undo"]
            assert "unwire" not in world.log

    run(main())


def test_an_idempotent_call_that_failed_without_an_answer_may_have_happened():
    @tool(effect="idempotent", retry=Retry(attempts=1))
    async def put(what: str) -> None:
        raise TimeoutError("no answer")

    @put.compensate
    async def unput(what: str) -> None: ...

    @agent
    async def writer(run: Run) -> None:
        await put("x")

    async def main() -> None:
        async with perdure(None, [writer]) as app:
            await app.start(writer, id="w")
            assert (await app.engine.drive("w")).status == "failed"
            plan = await app.plan_undo("w")
            assert [deed.tool for deed in plan.doubtful] == ["put"]
            assert not plan.steps

    run(main())


def test_what_people_have_edited_is_what_is_undone():
    world = World()
    pay = world.tool("pay", effect="keyed", approval=Approval(editable="what"))

    @agent
    async def shop(run: Run) -> None:
        await pay("much")

    async def main() -> None:
        async with perdure(None, [shop]) as app:
            await app.start(shop, id="s")
            await app.engine.drive("s")
            (asked,) = await app.approvals()
            await app.approve(asked.approval, by="ann", edit={"what": "little"})
            await app.engine.drive("s")
            world.log.clear()
            await undone(app, "s")
            assert world.log == ["unpay little [pay of little]"]

    run(main())


def test_a_hook_that_fails_stops_the_undo_there_and_asking_again_goes_on():
    world = World()
    one, two, three = world.tool("one"), world.tool("two"), world.tool("three")

    @agent
    async def chain(run: Run) -> None:
        await one("a")
        await two("b")
        await three("c")

    async def main() -> None:
        async with perdure(None, [chain]) as app:
            await app.run(chain, id="c")
            world.log.clear()
            world.broken.add("two")
            row = await app.undo("c", by="ann")
            assert row.status == "waiting_approval"
            assert world.log == ["unthree c [three of c]"]
            (asked,) = await app.approvals(run_id="c/undo")
            assert asked.standing.request.action == "retry two.undo"
            assert "two is down" in codec.decode(app.load(asked.standing.request.input))["error"]
            assert (await app.undo("c", by="ann")).status == "waiting_approval"  # it is still down
            world.broken.clear()
            assert await undone(app, "c", by="ann") == ["three.undo", "two.undo", "two.undo", "two.undo", "one.undo"]
            assert world.log == ["unthree c [three of c]", "untwo b [two of b]", "unone a [one of a]"]

    run(main())


def test_a_hook_that_fails_can_be_given_up_and_the_rest_is_undone():
    world = World()
    one, two = world.tool("one"), world.tool("two")

    @agent
    async def pair(run: Run) -> None:
        await one("a")
        await two("b")

    async def main() -> None:
        async with perdure(None, [pair]) as app:
            await app.run(pair, id="p")
            world.log.clear()
            world.broken.add("two")
            await app.undo("p")
            (asked,) = await app.approvals(run_id="p/undo")
            await app.reject(asked.approval, by="ann", reason="done by hand")
            assert (await app.undo("p")).status == "succeeded"
            assert world.log == ["unone a [one of a]"]
            said = await output(app, "p")
            assert ([step["call"] for step in said["undone"]], [step["call"] for step in said["given_up"]]) == ([1], [2])

    run(main())


def test_another_process_goes_on_where_the_undo_stopped(tmp_path: Path):
    world = World()
    one, two = world.tool("one"), world.tool("two")

    @agent
    async def pair(run: Run) -> None:
        await one("a")
        await two("b")

    async def begin() -> None:
        async with perdure(tmp_path / "j.db", [pair]) as app:
            await app.run(pair, id="p")
            world.broken.add("one")
            assert (await app.undo("p")).status == "waiting_approval"

    async def go_on() -> None:
        world.broken.clear()
        async with perdure(tmp_path / "j.db", [pair]) as app:
            assert (await app.undo("p")).status == "succeeded"

    run(begin())
    world.log.clear()
    run(go_on())
    assert world.log == ["unone a [one of a]"]


def test_once_it_is_done_it_is_done():
    world = World()
    pay = world.tool("pay", undo="once")

    @agent
    async def shop(run: Run) -> None:
        await pay("bill")

    async def main() -> None:
        async with perdure(None, [shop]) as app:
            await app.run(shop, id="s")
            first = await app.undo("s")
            assert await app.undo("s") == first
            assert world.log.count("unpay bill [pay of bill]") == 1
            with pytest.raises(InvalidInput, match="run s/undo is the undo of run s, and an undo cannot be undone"):
                await app.undo("s/undo")

    run(main())


def test_a_cancelled_undo_stays_where_it_was():
    world = World()
    one, two = world.tool("one"), world.tool("two")

    @agent
    async def pair(run: Run) -> None:
        await one("a")
        await two("b")

    async def main() -> None:
        async with perdure(None, [pair]) as app:
            await app.run(pair, id="p")
            world.broken.add("one")
            assert (await app.undo("p")).status == "waiting_approval"
            await app.cancel("p/undo")
            world.broken.clear()
            assert (await app.undo("p")).status == "cancelled"
            assert (await app.undo("p")).status == "cancelled"
            assert world.log[2:] == ["untwo b [two of b]"]

    run(main())


def test_a_hook_in_doubt_that_somebody_gives_up_is_asked_about_like_one_that_failed():
    world = World()

    @tool(effect="idempotent")
    async def act() -> None: ...

    @act.compensate
    async def back() -> None:
        world.log.append("back")
        raise TimeoutError("no answer")

    @agent
    async def acting(run: Run) -> None:
        await act()

    async def main() -> None:
        async with perdure(None, [acting]) as app:
            await app.run(acting, id="a")
            assert (await app.undo("a")).status == "needs_attention"
            assert (await app.undo("a")).status == "needs_attention"  # nothing new is known
            await app.resolve("a/undo", 1, fail="nobody knows")
            assert (await app.undo("a")).status == "waiting_approval"
            assert world.log == ["back"]
            (asked,) = await app.approvals(run_id="a/undo")
            await app.reject(asked.approval, by="ann", reason="it was seen to be back")
            assert (await app.undo("a")).status == "succeeded"
            assert world.log == ["back"]

    run(main())


def test_two_runs_are_undone_at_the_same_time_each_with_its_own_calls():
    world = World()
    pay = world.tool("pay")

    @agent
    async def shop(run: Run, what: str) -> None:
        await pay(what)

    async def main() -> None:
        async with perdure(None, [shop]) as app:
            await app.run(shop, "a", id="a")
            await app.run(shop, "b", id="b")
            world.log.clear()
            rows = await asyncio.gather(app.undo("a"), app.undo("b"))
            assert [row.status for row in rows] == ["succeeded", "succeeded"]
            assert sorted(world.log) == ["unpay a [pay of a]", "unpay b [pay of b]"]

    run(main())


def test_a_run_that_has_not_ended_is_refused():
    world = World()
    pay = world.tool("pay")

    @agent
    async def waiter(run: Run) -> None:
        await pay("bill")
        await run.receive("go")

    async def main() -> None:
        async with perdure(None, [waiter]) as app:
            await app.start(waiter, id="w")
            await app.engine.drive("w")
            with pytest.raises(Conflict, match=r"(?s)run w has not ended, it is waiting; .*: perdure cancel w$"):
                await app.undo("w")
            with pytest.raises(NotFound):
                await app.undo("nobody")
            await app.cancel("w")
            assert (await app.engine.drive("w")).status in FINISHED
            assert await undone(app, "w") == ["pay.undo"]

    run(main())


def test_a_child_that_outlived_a_parent_ended_by_force_has_to_end_first():
    world = World()
    pay = world.tool("pay")

    @agent
    async def kid(run: Run) -> None:
        await pay("toy")
        await run.receive("go")

    @agent
    async def parent(run: Run) -> None:
        await kid()

    async def main() -> None:
        async with perdure(None, [parent, kid]) as app:
            await app.start(parent, id="p")
            await app.engine.drive("p")
            await app.cancel("p", force=True)
            with pytest.raises(
                Conflict,
                match=r"its child p/1 has not, it is cancelling: have it end: perdure resume p/1, or without its agent: perdure cancel p/1 --force$",
            ):
                await app.undo("p")
            await app.engine.drive("p/1")
            assert await undone(app, "p") == ["pay.undo"]

    run(main())


def declare(world: World, *, first: str, hook: Any = "idempotent") -> Agent[Any, Any]:
    act = world.tool(first, undo=hook)

    @agent(name="shop", version="1")
    async def shop(run: Run) -> None:
        await act("x")

    return shop


def test_code_that_asks_for_something_else_than_the_journal_has_is_refused(tmp_path: Path):
    world = World()

    async def main() -> None:
        async with perdure(tmp_path / "j.db", [declare(world, first="pay")]) as app:
            await app.run("shop", id="s")
        async with perdure(tmp_path / "j.db", [declare(world, first="send")]) as app:
            with pytest.raises(Diverged, match=r"run s cannot be undone with this code.*version 1.*pay"):
                await app.plan_undo("s")
        async with perdure(tmp_path / "j.db", []) as app:
            with pytest.raises(UnknownAgent, match="shop"):
                await app.undo("s")

    run(main())


def test_an_undo_under_way_is_refused_by_code_that_has_lost_a_hook_it_needs(tmp_path: Path):
    world = World()

    async def main() -> None:
        async with perdure(tmp_path / "j.db", [declare(world, first="pay")]) as app:
            await app.run("shop", id="s")
            world.broken.add("pay")
            await app.undo("s")
        async with perdure(tmp_path / "j.db", [declare(world, first="pay", hook=None)]) as app:
            with pytest.raises(
                Conflict, match=r"call 1 \(pay\) of run s is to be undone, and its tool has no compensate hook in this code"
            ):
                await app.undo("s")

    run(main())


def test_a_result_that_could_not_be_recorded_makes_a_call_irreversible_only_if_its_hook_needs_it():
    @tool(effect="idempotent")
    async def odd() -> Any:
        return object()

    @odd.compensate(effect="idempotent")
    async def unodd() -> None: ...

    @tool(effect="idempotent")
    async def odder() -> Any:
        return object()

    @odder.compensate(effect="idempotent")
    async def unodder(result: Any) -> None: ...

    @agent
    async def strange(run: Run) -> None:
        for act in (odd, odder):
            try:
                await act()
            except Exception as error:
                run.note(type(error).__name__)

    async def main() -> None:
        async with perdure(None, [strange]) as app:
            await app.run(strange, id="s")
            plan = await app.plan_undo("s")
            assert [deed.tool for deed in plan.steps] == ["odd"]
            assert [(deed.tool, deed.why) for deed in plan.irreversible] == [
                ("odder", "its result could not be recorded, and its compensate hook needs it")
            ]

    run(main())


def test_a_hook_whose_own_result_cannot_be_recorded_has_undone_its_call():
    @tool(effect="idempotent")
    async def act() -> None: ...

    @act.compensate(effect="once")
    async def back() -> Any:
        return object()

    @agent
    async def acting(run: Run) -> None:
        await act()

    async def main() -> None:
        async with perdure(None, [acting]) as app:
            await app.run(acting, id="a")
            assert await undone(app, "a") == ["act.undo"]

    run(main())


def test_which_run_an_undo_belongs_to():
    assert undo_id("a") == "a/undo"
    assert undone_by("a/undo") == "a"
    assert undone_by("a/2") is None
    assert undone_by("undo") is None


def test_the_blocking_app_undoes_too(tmp_path: Path):
    world = World()
    shop = declare(world, first="pay")
    with sync.Perdure(f"sqlite:///{tmp_path}/j.db", [shop]) as app:
        app.run(shop, id="s")
        assert [deed.tool for deed in app.plan_undo("s").steps] == ["pay"]
        assert app.undo("s", by="ann").status == "succeeded"
    assert world.log == ["pay x", "unpay x [pay of x]"]


def test_a_call_whose_hook_cannot_be_given_what_it_needs_is_named_before_anything_is_undone():
    deep: Any = None
    for _ in range(codec.MAX_DEPTH - 1):
        deep = [deep]

    @tool(effect="idempotent")
    async def store(value: Any) -> None: ...

    @store.compensate(effect="idempotent")
    async def forget(value: Any) -> None: ...

    @agent
    async def storing(run: Run) -> None:
        await store(deep)

    async def main() -> None:
        async with perdure(None, [storing]) as app:
            await app.run(storing, id="s")
            (deed,) = (await app.plan_undo("s")).irreversible
            assert str(deed.why).startswith("its compensate hook cannot take its arguments and result: ")

    run(main())
