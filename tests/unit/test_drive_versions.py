"""Which code may continue a run: versions, adoption, patches, and tools that have changed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.unit.drive_tools import outline, perdure, run, status_of, until

from perdure import Agent, Approval, Conflict, Diverged, InvalidInput, Perdure, Run, RunFailed, UnknownAgent, agent, tool
from perdure.core.events import PatchMarked, PinChanged, RunAdopted
from perdure.errors import WrongVersion
from perdure.tool import Tool

Fn = Callable[..., Any]


@asynccontextmanager
async def at_work(*apps: Perdure) -> AsyncIterator[None]:
    stop = asyncio.Event()
    working = [asyncio.create_task(app.work(stop=stop)) for app in apps]
    try:
        yield
    finally:
        stop.set()
        await asyncio.gather(*working)


@tool(effect="once")
async def act(what: str) -> str:
    return what


def flow(fn: Fn, version: str | None) -> Agent[Any, Any]:
    return Agent(fn, name="flow", version=version)


# -- the version of a run -----------------------------------------------------------------------------------------------
def test_without_a_version_the_source_is_it() -> None:
    async def one(run: Run) -> str:
        return "one"

    async def two(run: Run) -> str:
        return "two"

    digests = [flow(fn, None).version for fn in (one, one, two)]
    assert digests[0] == digests[1] != digests[2]
    assert len(digests[0]) == 12


def test_a_run_waits_for_the_code_that_it_was_begun_with(tmp_path: Path) -> None:
    async def old(run: Run) -> str:
        await act("a")
        return str(await run.receive("go"))

    async def new(run: Run) -> str:
        return "new"

    async def main() -> None:
        async with perdure(tmp_path / "db", [flow(old, None)]) as app:
            await app.start("flow", id="r")
            await app.engine.drive("r")
            await app.signal("r", "go", "on")
        async with perdure(tmp_path / "db", [flow(new, None)]) as app:
            async with at_work(app):
                await asyncio.sleep(0.05)
                row = await app.handle("r").row()
                assert (row.status, row.holder) == ("queued", None)  # ready, and no worker here claims it
            before, after = flow(old, None).version, flow(new, None).version
            said = rf"run r was begun with version {before} of agent flow, and here is {after}\nuse the old code, .* perdure adopt r FILE\.py:flow"
            with pytest.raises(WrongVersion, match=said):
                await app.engine.drive("r")
            assert [event.type for event in await app.handle("r").events()].count("run_claimed") == 1
        async with perdure(tmp_path / "db", [flow(old, None)]) as app:
            assert await app.handle("r").result() == "on"

    run(main())


def test_another_version_is_an_unknown_agent_of_a_kind_of_its_own() -> None:
    assert issubclass(WrongVersion, UnknownAgent)


def test_starting_the_same_id_under_another_version_is_the_same_run_in_the_version_that_was_named_first(tmp_path: Path) -> None:
    async def either(run: Run) -> str:
        return run.version

    async def main() -> None:
        async with perdure(tmp_path / "db", [flow(either, "1")]) as app:
            await app.start("flow", id="r", version="1")
        async with perdure(tmp_path / "db", [flow(either, "2")]) as app:
            handle = await app.start("flow", id="r")
            assert (await handle.row()).version == "1"
            with pytest.raises(WrongVersion):
                await app.engine.drive("r")

    run(main())


def test_two_versions_are_served_side_by_side_and_the_last_one_given_is_started(tmp_path: Path) -> None:
    def versioned(version: str) -> Agent[Any, Any]:
        async def fn(run: Run) -> str:
            await run.receive("go")
            return f"by {version}, {run.version}"

        return flow(fn, version)

    async def main() -> None:
        async with perdure(tmp_path / "db", [versioned("1")]) as app:
            await app.start("flow", id="old")
            await app.engine.drive("old")
        async with perdure(tmp_path / "db", [versioned("1"), versioned("2")]) as app, at_work(app):
            await app.start("flow", id="new")
            for run_id in ("old", "new"):
                await app.signal(run_id, "go")
            await until(lambda: status_of(app, "old") == status_of(app, "new") == "succeeded")
            assert await app.handle("old").result() == "by 1, 1"
            assert await app.handle("new").result() == "by 2, 2"

    run(main())


def test_two_agents_of_one_name_and_version_are_refused() -> None:
    async def one(run: Run) -> None: ...

    async def two(run: Run) -> None: ...

    with pytest.raises(InvalidInput, match=r"two agents are called flow \(version 1\)"):
        Perdure("sqlite://", [flow(one, "1"), flow(two, "1")])


# -- adopting -----------------------------------------------------------------------------------------------------------
def test_an_adopted_run_goes_on_with_the_other_code_and_that_is_recorded(tmp_path: Path) -> None:
    def versioned(version: str) -> Agent[Any, Any]:
        async def fn(run: Run) -> str:
            await act("a")
            await run.receive("go")
            return f"by {version}, {run.version}"

        return flow(fn, version)

    async def main() -> None:
        async with perdure(tmp_path / "db", [versioned("1")]) as app:
            await app.start("flow", id="r")
            await app.engine.drive("r")
        async with perdure(tmp_path / "db", [versioned("2")]) as app:
            await app.adopt("r", by="ann", note="only the greeting has changed")
            (adopted,) = [event.body for event in await app.handle("r").events() if isinstance(event.body, RunAdopted)]
            assert (adopted.version, adopted.by, adopted.note) == ("2", "ann", "only the greeting has changed")
            row = await app.handle("r").row()
            assert (row.version, row.status) == ("2", "waiting")  # an adoption alone wakes no worker
            await app.signal("r", "go")
            assert await app.handle("r").result() == "by 2, 2"
            assert (await app.handle("r").state()).version == "2"
        async with perdure(tmp_path / "db", [versioned("1")]) as app:
            assert (await app.handle("r").row()).version == "2"

    run(main())


def test_code_that_does_something_else_cannot_be_adopted(tmp_path: Path) -> None:
    async def old(run: Run) -> str:
        await act("a")
        return str(await run.receive("go"))

    async def other(run: Run) -> str:
        await act("b")
        return str(await run.receive("go"))

    async def main() -> None:
        async with perdure(tmp_path / "db", [flow(old, "1")]) as app:
            await app.start("flow", id="r")
            await app.engine.drive("r")
        async with perdure(tmp_path / "db", [flow(other, "2")]) as app:
            with pytest.raises(
                Diverged, match=r'the journal has call 1: act\({"what":"a"}\); the code asks for call 1: act\({"what":"b"}\)'
            ):
                await app.adopt("r")
            assert (await app.handle("r").row()).version == "1", "nothing was recorded"
        async with perdure(tmp_path / "db", [flow(old, "1")]) as app:
            await app.signal("r", "go", "on")
            assert await app.handle("r").result() == "on"

    run(main())


@pytest.mark.parametrize("widened", [False, True])
def test_a_call_that_waits_for_an_approval_keeps_the_arguments_that_people_are_asked_about(widened: bool, tmp_path: Path) -> None:
    paid: list[Any] = []

    @tool(effect="once", name="pay", approval=Approval())
    async def pay(cents: int) -> None:
        paid.append(cents)

    @tool(effect="once", name="pay", approval=Approval())
    async def pay_in(cents: int, currency: str = "USD") -> None:
        paid.append((cents, currency))

    def paying(pay: Any, version: str) -> Agent[Any, Any]:
        async def fn(run: Run) -> None:
            await pay(5)

        return flow(fn, version)

    async def main() -> None:
        async with perdure(tmp_path / "db", [paying(pay, "1")]) as app:
            await app.start("flow", id="r")
            await app.drive("r", wait=False)
        async with perdure(tmp_path / "db", [paying(pay_in if widened else pay, "2")]) as app:
            (asked,) = await app.approvals()
            if widened:
                before = await app.handle("r").events()
                with pytest.raises(
                    Conflict, match=r"its call 1 \(pay\) waits for an approval, and this code would make it with other arguments"
                ):
                    await app.adopt("r", by="ann")
                assert await app.handle("r").events() == before
            else:
                await app.adopt("r", by="ann")
                await app.approve(asked.approval, by="ann")
                assert (await app.drive("r")).status == "succeeded"
                assert paid == [5]

    run(main())


def test_a_run_that_is_being_driven_cannot_be_adopted(tmp_path: Path) -> None:
    begun, finish = asyncio.Event(), asyncio.Event()

    @tool(effect="once")
    async def slow() -> None:
        begun.set()
        await finish.wait()

    async def fn(run: Run) -> None:
        await slow()

    async def main() -> None:
        async with perdure(tmp_path / "db", [flow(fn, "1")]) as one, perdure(tmp_path / "db", [flow(fn, "2")]) as two:
            await one.start("flow", id="r")
            driving = asyncio.create_task(one.engine.drive("r"))
            await begun.wait()
            with pytest.raises(Conflict, match="is being driven in version 1"):
                await two.adopt("r")
            finish.set()
            assert (await driving).status == "succeeded"

    run(main())


# -- patched ------------------------------------------------------------------------------------------------------------
async def unpatched(run: Run) -> list[str]:
    done = [await act("first")]
    await run.receive("one")
    done.append(await act("second"))
    await run.receive("two")
    return done


async def patched_early(run: Run) -> list[str]:
    done = []
    if run.patched("greet"):
        done.append(await act("greeting"))
    done.append(await act("first"))
    await run.receive("one")
    done.append(await act("second"))
    await run.receive("two")
    return done


async def patched_late(run: Run) -> list[str]:
    done = [await act("first")]
    await run.receive("one")
    done.append(await act("better" if run.patched("better") else "second"))
    await run.receive("two")
    return done


async def _begun_before(where: Path, signals: list[str], after: Fn) -> tuple[Any, list[str], list[str]]:
    """A run begun with the old code, sent so far; then the patched code goes on, over restarts. Its result, its patches, its journal."""
    async with perdure(where, [flow(unpatched, "1")]) as app:
        await app.start("flow", id="r")
        for topic in signals:
            await app.signal("r", topic)
        await app.engine.drive("r")
    async with perdure(where, [flow(after, "2")]) as app:
        await app.adopt("r")
    for topic in ("one", "two"):
        async with perdure(where, [flow(after, "2")]) as app:
            if topic not in signals:
                await app.signal("r", topic)
            row = await app.engine.drive("r")
            assert row.status in ("waiting", "succeeded"), row.error
    async with perdure(where, [flow(after, "2")]) as app:
        handle = app.handle("r")
        events = await handle.events()
        return await handle.result(), [event.body.name for event in events if isinstance(event.body, PatchMarked)], outline(events)


def test_a_run_that_came_past_before_the_change_keeps_to_the_old_side(tmp_path: Path) -> None:
    result, marks, _ = run(_begun_before(tmp_path / "db", [], patched_early))
    assert (result, marks) == (["first", "second"], [])
    result, marks, _ = run(_begun_before(tmp_path / "db2", ["one"], patched_late))
    assert (result, marks) == (["first", "second"], [])


def test_a_run_that_has_not_come_past_yet_takes_the_new_side(tmp_path: Path) -> None:
    result, marks, lines = run(_begun_before(tmp_path / "db", [], patched_late))
    assert (result, marks) == (["first", "better"], ["better"])
    assert lines.index("patch_marked") < lines.index("initiated act 2/1")


@pytest.mark.parametrize("code", [patched_early, patched_late])
def test_a_new_run_takes_the_new_side_and_does_so_on_every_replay(code: Fn, tmp_path: Path) -> None:
    wanted = ["greeting", "first", "second"] if code is patched_early else ["first", "better"]

    async def main() -> None:
        async with perdure(tmp_path / "db", [flow(code, "2")]) as app:
            await app.start("flow", id="r")
            await app.engine.drive("r")
        for topic in ("one", "two"):
            async with perdure(tmp_path / "db", [flow(code, "2")]) as app:
                await app.signal("r", topic)
                await app.engine.drive("r")
        async with perdure(tmp_path / "db", [flow(code, "2")]) as app:
            assert await app.handle("r").result() == wanted
            assert sum(event.type == "patch_marked" for event in await app.handle("r").events()) == 1

    run(main())


def test_the_new_side_of_a_patch_may_lose_its_if_and_not_its_body(tmp_path: Path) -> None:
    async def without_if(run: Run) -> list[str]:
        done = [await act("greeting"), await act("first")]
        await run.receive("one")
        return done

    async def patched(run: Run) -> list[str]:
        done = [await act("greeting")] if run.patched("early") else []
        done.append(await act("first"))
        await run.receive("one")
        return done

    async def main() -> None:
        async with perdure(tmp_path / "db", [flow(patched, "2")]) as app:
            await app.start("flow", id="r")
            await app.engine.drive("r")
        async with perdure(tmp_path / "db", [flow(unpatched, "3")]) as app:
            with pytest.raises(Diverged, match="greeting"):
                await app.adopt("r")
        async with perdure(tmp_path / "db", [flow(without_if, "3")]) as app:
            await app.adopt("r")
            await app.signal("r", "one")
            assert await app.handle("r").result() == ["greeting", "first"]

    run(main())


def test_two_patches_are_decided_each_for_itself(tmp_path: Path) -> None:
    async def twice(run: Run) -> list[str]:
        done = []
        if run.patched("early"):
            done.append(await act("greeting"))
        done.append(await act("first"))
        await run.receive("one")
        done.append(await act("better" if run.patched("late") else "second"))
        await run.receive("two")
        return done

    result, marks, _ = run(_begun_before(tmp_path / "db", [], twice))
    assert (result, marks) == (["first", "better"], ["late"])


def test_a_patch_inside_a_loop_is_decided_once_for_all_rounds(tmp_path: Path) -> None:
    """Otherwise a run that began before the change would use the old code in some rounds and the new code in others.

    Then no replay could tell which.
    """

    async def before(run: Run) -> list[str]:
        return [await act(str(await run.receive("round"))) for _ in range(4)]

    async def after(run: Run) -> list[str]:
        done = []
        for _ in range(4):
            word = str(await run.receive("round"))
            done.append(await act(word.upper() if run.patched("upper") else word))
        return done

    async def main(begin_old: bool, where: Path) -> Any:
        async with perdure(where, [flow(before if begin_old else after, "1")]) as app:
            await app.start("flow", id="r")
            for word in "ab":
                await app.signal("r", "round", word)
            await app.engine.drive("r")
        async with perdure(where, [flow(after, "2")]) as app:
            await app.adopt("r")
        for word in "cd":
            async with perdure(where, [flow(after, "2")]) as app:
                await app.signal("r", "round", word)
                await app.engine.drive("r")
        async with perdure(where, [flow(after, "2")]) as app:
            return await app.handle("r").result()

    assert run(main(True, tmp_path / "old")) == ["a", "b", "c", "d"]
    assert run(main(False, tmp_path / "new")) == ["A", "B", "C", "D"]


def test_a_patch_asked_for_twice_in_one_place_is_recorded_once(tmp_path: Path) -> None:
    async def asking(run: Run) -> list[bool]:
        answers = [run.patched("a"), run.patched("a")]
        await act("x")
        return [*answers, run.patched("a")]

    async def main() -> None:
        async with perdure(tmp_path / "db", [flow(asking, "1")]) as app:
            assert await app.run("flow", id="r") == [True, True, True]
            assert outline(await app.handle("r").events()).count("patch_marked") == 1

    run(main())


def test_a_patch_in_a_child_is_the_child_s_own(tmp_path: Path) -> None:
    def kid(version: str, fn: Fn) -> Agent[Any, Any]:
        return Agent(fn, name="kid", version=version)

    def parent(child: Agent[Any, Any]) -> Agent[Any, Any]:
        async def fn(run: Run) -> list[Any]:
            first = await child()
            await run.receive("again")
            return [first, await child()]

        return flow(fn, "1")

    async def old(run: Run) -> str:
        return str(await act("old"))

    async def new(run: Run) -> str:
        return str(await act("new" if run.patched("x") else "old"))

    async def main() -> Any:
        async with perdure(tmp_path / "db", [parent(kid("1", old))]) as app:
            await app.start("flow", id="r")
            await app.engine.drive("r")
        async with perdure(tmp_path / "db", [parent(kid("2", new))]) as app:
            await app.signal("r", "again")
            result = await app.handle("r").result()
            assert "patch_marked" not in outline(await app.handle("r").events())
            assert "patch_marked" in outline(await app.handle("r/2").events())
            return result

    assert run(main()) == ["old", "new"]


@pytest.mark.parametrize("name", ["", "a b", None, 5])
def test_a_name_that_is_none_is_refused(name: Any) -> None:
    @agent(version="1")
    async def asking(run: Run) -> None:
        run.patched(name)

    async def main() -> None:
        async with perdure(None, [asking]) as app:
            with pytest.raises(RunFailed, match=r"InvalidInput: run\.patched: the name"):
                await app.run(asking)

    run(main())


# -- tools that have changed --------------------------------------------------------------------------------------------
def acting(effect: Any, **more: Any) -> Tool[..., Any]:
    async def pay(cents: int) -> str:
        return f"paid {cents}"

    async def pay_with_note(cents: int, note: str = "") -> str:
        return f"paid {cents}"

    fn: Fn = pay_with_note if more.pop("note", False) else pay
    return tool(effect=effect, name="pay", **more)(fn)


def payer(used: Tool[..., Any]) -> Agent[Any, Any]:
    async def paying(run: Run) -> list[str]:
        done = [await used(cents=1)]
        await run.receive("again")
        done.append(await used(cents=2))
        await run.receive("end")
        return done

    return Agent(paying, name="paying", version="1")


@pytest.mark.parametrize(
    "changed",
    [acting("idempotent"), acting("once", note=True), acting("once", approval=lambda cents: False)],
    ids=["effect", "schema", "approval"],
)
def test_a_tool_that_has_changed_under_a_run_is_reported_once_and_recorded(
    changed: Tool[..., Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with perdure(tmp_path / "db", [payer(acting("once"))]) as app:
            await app.start("paying", id="r")
            await app.engine.drive("r")
        with caplog.at_level(logging.WARNING, "perdure.worker"):
            for topic in ("again", "other", "end"):
                async with perdure(tmp_path / "db", [payer(changed)]) as app:
                    await app.signal("r", topic)
                    await app.engine.drive("r")
        async with perdure(tmp_path / "db", [payer(changed)]) as app:
            assert await app.handle("r").result() == ["paid 1", "paid 2"]
            events = await app.handle("r").events()
            (said,) = [event.body for event in events if isinstance(event.body, PinChanged)]
            assert (said.what, said.before, said.after) == ("tool pay", acting("once").pin(), changed.pin())
            (warned,) = [record.getMessage() for record in caplog.records]
            assert "run r: tool pay has changed since the run first called it" in warned

    run(main())


def test_a_tool_that_has_not_changed_is_not_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        for topic in ("none", "again", "end"):
            async with perdure(tmp_path / "db", [payer(acting("once"))]) as app:
                await app.start("paying", id="r")
                await app.signal("r", topic)
                await app.engine.drive("r")
        async with perdure(tmp_path / "db", [payer(acting("once"))]) as app:
            events = await app.handle("r").events()
            assert events[-1].type == "run_succeeded"
            assert not any(isinstance(event.body, PinChanged) for event in events)

    with caplog.at_level(logging.WARNING, "perdure.worker"):
        run(main())
    assert caplog.records == []


@pytest.mark.parametrize(("before", "now"), [("once", "idempotent"), ("idempotent", "once"), ("once", "read"), ("read", "once")])
def test_an_attempt_that_was_cut_off_is_judged_by_what_the_tool_was_when_it_began(before: Any, now: Any, tmp_path: Path) -> None:
    """A call begun as `once` must not be repeated because the code says `idempotent` today (G5)."""
    begun: list[str] = []
    hang = [True]

    def paying(effect: Any) -> Agent[Any, Any]:
        @tool(effect=effect)
        async def pay() -> str:
            begun.append(effect)
            if hang[0]:
                await asyncio.Event().wait()
            return "paid"

        async def fn(run: Run) -> str:
            return str(await pay())

        return flow(fn, "1")

    async def main() -> None:
        async with perdure(tmp_path / "db", [paying(before)]) as app:
            await app.start("flow", id="r")
            driving = asyncio.create_task(app.engine.drive("r"))
            await until(lambda: begun)
            await asyncio.sleep(0.02)  # so that the intent of a read is durable, too
            app.abort()
            await driving
        hang[0] = False
        async with perdure(tmp_path / "db", [paying(now)]) as app:
            row = await app.engine.drive("r")
            if before == "once":
                assert (row.status, row.attention, begun) == ("needs_attention", "in_doubt", [before])
            else:
                assert (row.status, begun) == ("succeeded", [before, now])

    run(main())
