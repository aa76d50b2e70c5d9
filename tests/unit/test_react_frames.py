"""A ReAct run goes on with other instructions, tools, limits or another model: its recorded turns keep their frame."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.unit.drive_tools import run, status_of
from tests.unit.react_tools import ByTurn, add, app_of, lookup, texts, wants

from perdure import Approval, Call, Conflict, Diverged, Perdure, ReAct, Run, agent, tool
from perdure.core import codec
from perdure.core.events import CheckpointTaken, FrameChanged, PinChanged, RunAdopted, SignalReceived
from perdure.core.state import fold
from perdure.inspect.replay import Same, compare
from perdure.inspect.verify import verify_run
from perdure.models import Answer

PAID: list[tuple[str, int]] = []


@tool(effect="keyed", approval=Approval())
async def refund(order: str, cents: int = 100, call: Call | None = None) -> str:
    """Give money back."""
    PAID.append((order, cents))
    return f"paid {cents}"


def refund_as(effect: Any, fn: Any) -> Any:
    return tool(effect=effect, name="refund", approval=Approval())(fn)


@pytest.fixture(autouse=True)
def nothing_is_paid() -> None:
    PAID.clear()


def bodies(app: Perdure, kind: type) -> list[Any]:
    return [event.body for event in app.store.read("r") if isinstance(event.body, kind)]


def old(*lines: Any, **more: Any) -> ReAct:
    given: dict[str, Any] = {"tools": [lookup, refund], "instructions": "Be brief.", "version": "1", **more}
    return ReAct("support", model=ByTurn(lines), **given)


def new(*lines: Any, name: str = "scripted", **more: Any) -> ReAct:
    given: dict[str, Any] = {"tools": [lookup, refund, add], "instructions": "Be kind.", "version": "2", **more}
    return ReAct("support", model=ByTurn(lines, name=name), **given)


FIRST = wants(("lookup", {"order": "o-1"}), text="I look")
SECOND = wants(("refund", {"order": "o-1", "cents": 500}))


async def parked(path: Path, agent: ReAct) -> None:
    """The run `r`, which waits for the approval of its second turn's call."""
    async with app_of(path, agent) as app:
        await app.start(agent, "go", id="r")
        await app.engine.drive("r", wait=False)
        assert status_of(app, "r") == "waiting_approval"


def replays(app: Perdure, code: ReAct) -> None:
    events = app.store.read("r")
    found = compare("r", events, fold(events), lambda state: code.machine_of(state, app.load, 10**6), app.load)
    assert isinstance(found, Same), found


def test_the_next_turn_has_the_new_frame_and_the_pending_approval_stays(tmp_path: Path) -> None:
    code = new("done")

    async def main() -> None:
        await parked(tmp_path / "db", old(FIRST, SECOND))
        async with app_of(tmp_path / "db", code) as app:
            (asked,) = await app.approvals(run_id="r")
            await app.adopt("r", by="ann", note="the new prompt")
            (changed,) = bodies(app, FrameChanged)
            assert (changed.version, changed.by, changed.note) == ("2", "ann", "the new prompt")
            assert bodies(app, RunAdopted) == []
            assert (await app.handle("r").info()).version == "2"
            assert [one.approval for one in await app.approvals(run_id="r")] == [asked.approval]
            replays(app, code)
            await app.approve(asked.approval, by="ben")
            assert await app.handle("r").result() == "done"
            assert PAID == [("o-1", 500)]
            (request,) = code.model.asked  # type: ignore[attr-defined]
            assert (request.system, [spec.name for spec in request.tools]) == ("Be kind.", ["lookup", "refund", "add"])
            assert texts(request.messages) == [
                "user go",
                "assistant I look →lookup",
                'tool {"cents":500,"order":"o-1"}',
                "assistant  →refund",
                "tool paid 500",
            ]
            replays(app, code)
            row = app.store.get("r")
            assert row is not None
            assert verify_run(app.store, row).problem is None
            assert [one.get("text") for one in await app.transcript("r")][-1] == "done"

    run(main())


def test_the_recorded_turns_are_compared_with_the_recorded_frame(tmp_path: Path) -> None:
    code = new("done")

    async def main() -> None:
        await parked(tmp_path / "db", old(FIRST, SECOND))
        async with app_of(tmp_path / "db", code) as app:
            await app.adopt("r")
            events = app.store.read("r")
            changed = events[-1]
            assert isinstance(changed.body, FrameChanged)
            # Another frame than the one of these turns is a divergence, and so is a turn of the old frame too many.
            for body in (
                FrameChanged("2", "ann", _other_system(changed.body), changed.body.after),
                FrameChanged("2", "ann", changed.body.frame, 1),
            ):
                forged = [*events[:-1], type(changed)(changed.seq, changed.event_id, changed.ts, changed.epoch, None, changed.cause, body)]
                with pytest.raises(Diverged):
                    code.replayed(fold(forged), forged, app.load, 10**6)

    run(main())


def _other_system(body: FrameChanged) -> Any:
    whole = codec.decode(body.frame.inline or b"")
    whole["request"]["system"] = "Be rude."
    return codec.pack(codec.encode(whole))[0]


def test_tools_of_ended_calls_may_be_gone_or_changed(tmp_path: Path) -> None:
    @tool(effect="once", name="lookup")
    async def other_lookup(number: int) -> int:
        return number

    async def main() -> None:
        for at, tools in enumerate(([refund], [other_lookup, refund])):
            path, code = tmp_path / f"db{at}", new(lambda request: Answer(" ".join(texts(request.messages)[-3:])), tools=tools)
            await parked(path, old(FIRST, SECOND))
            async with app_of(path, code) as app:
                await app.adopt("r")
                (asked,) = await app.approvals(run_id="r")
                await app.approve(asked.approval, by="ben")
                said = await app.handle("r").result()
                assert said == 'tool {"cents":500,"order":"o-1"} assistant  →refund tool paid 500'
                assert [one.what for one in bodies(app, PinChanged)] == ([] if at == 0 else ["tool lookup"])
                replays(app, code)
        assert PAID == [("o-1", 500)] * 2

    run(main())


async def _more(order: str, cents: int = 100, why: str = "", call: Call | None = None) -> str:
    return ""


async def _fewer(order: str, call: Call | None = None) -> str:
    return ""


async def _same(order: str, cents: int = 100, call: Call | None = None) -> str:
    return ""


@pytest.mark.parametrize(
    ("tools", "why"),
    [
        ([lookup], "this code has no tool refund"),
        ([lookup, refund_as("once", _same)], "in this code refund is once, not keyed"),
        ([lookup, refund_as("keyed", _fewer)], "its arguments do not fit refund"),
        ([lookup, refund_as("keyed", _more)], "its arguments do not fit refund"),
    ],
)
def test_an_open_call_that_cannot_go_on_is_named_and_nothing_is_written(tmp_path: Path, tools: list[Any], why: str) -> None:
    async def main() -> None:
        await parked(tmp_path / "db", old(FIRST, SECOND))
        async with app_of(tmp_path / "db", new("done", tools=tools)) as app:
            before = app.store.get("r")
            with pytest.raises(
                Conflict, match=rf"run r cannot go on with version 2 of agent support yet: its call 4 \(refund\) is open, and {why}"
            ):
                await app.adopt("r")
            assert app.store.get("r") == before

    run(main())


def test_an_open_call_goes_on_with_a_tool_whose_description_alone_has_changed(tmp_path: Path) -> None:
    async def described(order: str, cents: int = 100, call: Call | None = None) -> str:
        """Give the money back, at last."""
        PAID.append((order, cents))
        return "paid by the new tool"

    code = new("done", tools=[lookup, refund_as("keyed", described)])

    async def main() -> None:
        await parked(tmp_path / "db", old(FIRST, SECOND))
        async with app_of(tmp_path / "db", code) as app:
            await app.adopt("r")
            (asked,) = await app.approvals(run_id="r")
            await app.approve(asked.approval, by="ben")
            assert await app.handle("r").result() == "done"
            assert texts(code.model.asked[0].messages)[-1] == "tool paid by the new tool"  # type: ignore[attr-defined]
            assert PAID == [("o-1", 500)]

    run(main())


def test_another_model_answers_the_next_turn(tmp_path: Path) -> None:
    code = new("from the other model", name="other")

    async def main() -> None:
        await parked(tmp_path / "db", old(FIRST, SECOND))
        async with app_of(tmp_path / "db", code) as app:
            await app.adopt("r")
            (asked,) = await app.approvals(run_id="r")
            await app.reject(asked.approval, by="ben", reason="no")
            assert await app.handle("r").result() == "from the other model"
            assert code.model.asked[0].model == "other"  # type: ignore[attr-defined]
            replays(app, code)

    run(main())


def test_the_frame_can_change_again_and_every_turn_keeps_its_own(tmp_path: Path) -> None:
    second, third = new(SECOND, tools=[refund, add]), new("done", version="3", tools=[refund], instructions="Be quick.")

    async def main() -> None:
        await parked(tmp_path / "db", old(wants(("refund", {"order": "o-0"}))))
        for code in (second, third):
            async with app_of(tmp_path / "db", code) as app:
                await app.adopt("r")
                (asked,) = await app.approvals(run_id="r")
                await app.approve(asked.approval, by="ben")
                await app.engine.drive("r", wait=False)
                replays(app, code)
        assert PAID == [("o-0", 100), ("o-1", 500)]
        async with app_of(tmp_path / "db", third) as app:
            assert await app.handle("r").result() == "done"
            assert [one.version for one in bodies(app, FrameChanged)] == ["2", "3"]

    run(main())


def test_more_turns_are_a_limit_that_can_change(tmp_path: Path) -> None:
    few, many = old(FIRST, FIRST, "late", max_turns=2, tools=[lookup]), new(FIRST, "at last", tools=[lookup], max_turns=9)

    async def main() -> None:
        async with app_of(tmp_path / "db", few) as app:
            await app.start(few, "go", id="r")
            await app.engine.drive("r")
            assert status_of(app, "r") == "failed"
        async with app_of(tmp_path / "db", many) as app:
            await app.retry("r", by="ann", reason="more turns")
            assert len(bodies(app, FrameChanged)) == 1
            assert await app.handle("r").result() == "at last"
            assert [request.system for request in many.model.asked] == ["Be kind.", "Be kind."]  # type: ignore[attr-defined]
            replays(app, many)

    run(main())


def test_a_rewind_with_a_new_prompt_takes_the_turn_again_with_it(tmp_path: Path) -> None:
    code = new("better")

    async def main() -> None:
        await parked(tmp_path / "db", old(FIRST, SECOND))
        async with app_of(tmp_path / "db", code) as app:
            looked = next(event.seq for event in app.store.read("r") if event.type == "tool_call_completed")
            await app.rewind("r", looked, by="ann")
            assert await app.handle("r").result() == "better"
            assert code.model.asked[0].system == "Be kind."  # type: ignore[attr-defined]
            assert texts(code.model.asked[0].messages)[-1] == 'tool {"cents":500,"order":"o-1"}'  # type: ignore[attr-defined]
            assert PAID == []
            replays(app, code)

    run(main())


def test_a_rewind_behind_the_change_takes_those_turns_with_the_frame_of_now(tmp_path: Path) -> None:
    code = new(SECOND, "done")

    async def main() -> None:
        await parked(tmp_path / "db", old(FIRST, SECOND))
        async with app_of(tmp_path / "db", code) as app:
            await app.adopt("r")
            looked = next(event.seq for event in app.store.read("r") if event.type == "tool_call_completed")
            await app.rewind("r", looked, by="ann")
            await app.engine.drive("r", wait=False)
            assert code.model.asked[0].system == "Be kind."  # type: ignore[attr-defined]
            replays(app, code)
            (asked,) = await app.approvals(run_id="r")
            await app.approve(asked.approval, by="ben")
            assert await app.handle("r").result() == "done"
            assert PAID == [("o-1", 500)]
            replays(app, code)

    run(main())


def test_an_agent_that_is_a_tool_may_be_gone_when_its_child_has_ended_and_not_before(tmp_path: Path) -> None:
    @agent(version="1")
    async def helper(run: Run, what: str) -> str:
        if what == "wait":
            await run.receive("go")
        return f"helped with {what}"

    async def main() -> None:
        path = tmp_path / "ended"
        await parked(path, old(wants(("helper", {"what": "a"})), SECOND, tools=[helper, refund]))
        code = new("done", tools=[refund])
        async with app_of(path, code) as app:
            await app.adopt("r")
            (asked,) = await app.approvals(run_id="r")
            await app.approve(asked.approval, by="ben")
            assert await app.handle("r").result() == "done"
            assert "tool helped with a" in texts(code.model.asked[0].messages)  # type: ignore[attr-defined]
        waiting = old(wants(("helper", {"what": "wait"})), tools=[helper, refund])
        async with app_of(tmp_path / "alive", waiting, helper) as app:
            await app.start(waiting, "go", id="r")
            await app.engine.drive("r", wait=False)
        async with app_of(tmp_path / "alive", code) as app:
            with pytest.raises(Conflict, match="its child r/2 has not ended, and this code has no agent helper"):
                await app.adopt("r")
        kept = new("done", tools=[helper, refund])
        async with app_of(tmp_path / "alive", kept, helper) as app:
            await app.adopt("r")
            await app.signal("r/2", "go")
            assert await app.handle("r").result() == "done"

    run(main())


@pytest.mark.parametrize(("before", "after"), [(None, 1), (1, None)])
def test_a_frame_changes_also_when_checkpoints_are_taken_before_or_after_it(tmp_path: Path, before: int | None, after: int | None) -> None:
    code = new("done", checkpoint_bytes=after)

    async def main() -> None:
        await parked(tmp_path / "db", old(FIRST, SECOND, checkpoint_bytes=before))
        async with app_of(tmp_path / "db", code) as app:
            taken = len(bodies(app, CheckpointTaken))
            assert taken == (before is not None)
            (asked,) = await app.approvals(run_id="r")
            await app.adopt("r", by="ann")
            await app.approve(asked.approval, by="ann")
            assert (await app.engine.drive("r")).status == "succeeded"
            assert PAID == [("o-1", 500)]
            # The turns before the change ended no life that the old code did not end.
            changed = next(event.seq for event in app.store.read("r") if isinstance(event.body, FrameChanged))
            checkpoints = [event.seq for event in app.store.read("r") if isinstance(event.body, CheckpointTaken)]
            assert len([seq for seq in checkpoints if seq > changed]) == (after is not None)
            replays(app, code)
            row = app.store.get("r")
            assert row is not None
            assert verify_run(app.store, row).problem is None

    run(main())


def test_a_run_that_has_moved_on_since_the_check_is_not_adopted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, plain = new("done"), ReAct.adoption

    async def main() -> None:
        await parked(tmp_path / "db", old(FIRST, SECOND))
        async with app_of(tmp_path / "db", code) as app:

            def meanwhile(self: ReAct, *args: Any, **more: Any) -> Any:
                checked = plain(self, *args, **more)
                body = SignalReceived("message", codec.pack(b'"wait"')[0], "ben")
                app.store.post("r", None, body, event_id="a" * 32, now=app.clock.now())
                return checked

            monkeypatch.setattr(ReAct, "adoption", meanwhile)
            with pytest.raises(Conflict, match="has moved on meanwhile"):
                await app.adopt("r")
            assert bodies(app, FrameChanged) == []
            monkeypatch.undo()
            await app.adopt("r", dry_run=True)
            assert bodies(app, FrameChanged) == []
            await app.adopt("r")
            assert len(bodies(app, FrameChanged)) == 1

    run(main())
