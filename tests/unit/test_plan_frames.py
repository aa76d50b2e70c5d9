"""A run that follows a plan goes on with another plan, or with other tools: its recorded steps keep their plan."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.unit.drive_tools import perdure, run, status_of
from tests.unit.react_tools import ByTurn, Model, app_of, lookup, wants

from perdure import Agent, Approval, Call, Conflict, Diverged, Perdure, Plan, ReAct, Run, RunFailed, Step, agent, param, ref, tool
from perdure.core import codec
from perdure.core.events import FrameChanged, PlanGenerated, RunAdopted
from perdure.core.state import fold
from perdure.errors import Fatal
from perdure.inspect.replay import Same, compare
from perdure.inspect.verify import verify_run

DONE: list[str] = []


@pytest.fixture(autouse=True)
def _fresh() -> None:
    DONE.clear()


@tool(effect="once")
async def build(service: str) -> dict[str, str]:
    DONE.append(f"build {service}")
    return {"tag": f"{service}:1"}


@build.compensate
async def _(service: str) -> None:
    DONE.append(f"unbuild {service}")


@tool(effect="keyed")
async def release(tag: str, percent: int = 10, call: Call | None = None) -> str:
    DONE.append(f"release {tag} {percent}")
    return "live"


@tool(effect="once")
async def tell(text: str) -> str:
    DONE.append(f"tell {text}")
    return text


@tool(effect="once")
async def fail(text: str = "") -> str:
    DONE.append("fail")
    raise Fatal("no")


BUILD = Step("build", build, {"service": param("service")})
GO = Step("go", release, {"tag": ref("build", "tag")}, approval=Approval(editable="percent"))
SAY = Step("say", tell, {"text": ref("go")})


def plan_of(version: str, *steps: Step, **more: Any) -> Plan:
    return Plan("deploy", steps, params={"service": {"type": str, "default": "shop"}}, version=version, **more)


OLD = plan_of("1", BUILD, GO, SAY)


def bodies(app: Perdure, kind: type) -> list[Any]:
    return [event.body for event in app.store.read("r") if isinstance(event.body, kind)]


async def parked(path: Path, plan: Agent[..., Any] = OLD, *others: Agent[..., Any], status: str = "waiting_approval") -> None:
    """The run `r`, which waits for the approval of its step `go`."""
    async with perdure(path, [plan, *others]) as app:
        await app.start(plan, id="r")
        await app.engine.drive("r", wait=False)
        assert status_of(app, "r") == status


async def approve(app: Perdure, **more: Any) -> Any:
    (asked,) = await app.approvals(run_id="r")
    await app.approve(asked.approval, by="ben", **more)
    return await app.engine.drive("r", wait=False)


def sound(app: Perdure, code: Agent[..., Any]) -> None:
    """The journal verifies, and this code replays all of it."""
    events = app.store.read("r")
    found = compare("r", events, fold(events), lambda state: code.machine_of(state, app.load, 10**6), app.load)
    assert isinstance(found, Same), found
    row = app.store.get("r")
    assert row is not None
    assert verify_run(app.store, row).problem is None


def test_the_steps_that_have_not_begun_are_those_of_the_new_plan(tmp_path: Path) -> None:
    code = plan_of(
        "2", BUILD, GO, Step("note", tell, {"text": ref("build", "tag")}), Step("say", tell, {"text": "new words"}, after=["go"])
    )

    async def main() -> None:
        await parked(tmp_path / "db")
        async with perdure(tmp_path / "db", [code]) as app:
            (asked,) = await app.approvals(run_id="r")
            await app.adopt("r", by="ann", note="new words")
            (changed,) = bodies(app, FrameChanged)
            assert (changed.version, changed.by, changed.note) == ("2", "ann", "new words")
            assert bodies(app, RunAdopted) == []
            assert [one.approval for one in await app.approvals(run_id="r")] == [asked.approval]
            sound(app, code)
            row = await approve(app, edit={"percent": 50})
            assert row.status == "succeeded"
            assert sorted(DONE[1:]) == ["release shop:1 50", "tell new words", "tell shop:1"]
            assert DONE[0] == "build shop"
            assert await app.handle("r").result() == {
                "build": {"tag": "shop:1"},
                "go": "live",
                "note": "shop:1",
                "say": "new words",
            }
            assert [one.digest for one in bodies(app, PlanGenerated)] == [OLD.digest, code.digest]
            sound(app, code)

    run(main())


def test_a_step_that_has_not_begun_may_be_gone_and_a_tool_of_an_ended_step_may_have_changed(tmp_path: Path) -> None:
    @tool(effect="once", name="build")
    async def other(service: str, where: str = "here") -> dict[str, str]:
        raise AssertionError("it is done")

    code = plan_of("2", Step("build", other, {"service": param("service")}, description="once more"), GO)

    async def main() -> None:
        await parked(tmp_path / "db")
        async with perdure(tmp_path / "db", [code]) as app:
            await app.adopt("r")
            assert (await approve(app)).status == "succeeded"
            assert DONE == ["build shop", "release shop:1 10"]
            sound(app, code)

    run(main())


def test_the_recorded_steps_are_compared_with_the_recorded_plan(tmp_path: Path) -> None:
    code = plan_of("2", BUILD, GO)

    async def main() -> None:
        await parked(tmp_path / "db")
        async with perdure(tmp_path / "db", [code]) as app:
            await app.adopt("r")
            events = app.store.read("r")
            last = events[-1]
            assert isinstance(last.body, FrameChanged)
            whole = codec.decode(last.body.frame.inline or b"")
            whole["plan"]["steps"][0]["args"] = {"service": "other"}
            other = codec.pack(codec.encode(whole))[0]
            for body in (FrameChanged("2", "ann", other, last.body.after), FrameChanged("2", "ann", last.body.frame, 1)):
                forged = [*events[:-1], type(last)(last.seq, last.event_id, last.ts, last.epoch, None, last.cause, body)]
                with pytest.raises(Diverged):
                    code.replayed(fold(forged), forged, app.load, 10**6)

    run(main())


def _with(step: Step, **other: Any) -> Step:
    words: dict[str, Any] = {"when": step.when, "approval": step.approval, "after": step.after, **other}
    return Step(step.name, words.pop("tool", step.tool), words.pop("args", step.args), **words)


@pytest.mark.parametrize(
    ("steps", "why"),
    [
        ([Step("make", build, {"service": "x"}), _with(GO, args={"tag": "x"})], "its step build has begun, and this plan has no such step"),
        ([_with(BUILD, args={"service": "x"}), GO], "its step build has begun, and in this plan it has other arguments"),
        ([_with(BUILD, tool=tool(effect="once", name="make")(build.fn)), GO], "step build has begun, and in this plan it has another tool"),
        ([_with(BUILD, when=param("service") == "shop"), GO], "its step build has begun, and in this plan it has another condition"),
        ([BUILD, _with(GO, approval=None)], "its step go has begun, and in this plan it has another approval"),
        (
            [BUILD, Step("first", tell, {"text": "x"}), _with(GO, after="first")],
            "its step go has begun, and in this plan it waits for other",
        ),
    ],
)
def test_a_step_that_has_begun_and_is_another_one_is_named_and_nothing_is_written(tmp_path: Path, steps: list[Step], why: str) -> None:
    async def main() -> None:
        await parked(tmp_path / "db")
        async with perdure(tmp_path / "db", [plan_of("2", *steps)]) as app:
            before = app.store.get("r")
            with pytest.raises(Conflict, match=f"run r cannot go on with version 2 of agent deploy: .*{why}") as refused:
                await app.adopt("r")
            assert "perdure rewind r --to SEQ (perdure events r has the numbers)" in str(refused.value.hint)
            assert app.store.get("r") == before

    run(main())


def test_an_approval_is_not_used_for_arguments_that_nobody_has_seen(tmp_path: Path) -> None:
    @tool(effect="keyed", name="release")
    async def wider(tag: str, percent: int = 10, region: str = "everywhere", call: Call | None = None) -> str:
        raise AssertionError("this was not approved")

    # The decision may come before the adoption, too: no worker has seen it yet.
    async def main(decided: bool) -> None:
        path = tmp_path / f"db {decided}"
        await parked(path)
        async with perdure(path, [plan_of("2", BUILD, _with(GO, tool=wider))]) as app:
            if decided:
                (asked,) = await app.approvals(run_id="r")
                await app.approve(asked.approval, by="ben")
            with pytest.raises(Conflict, match="the approval of its step go is about arguments that do not fit release in this code"):
                await app.adopt("r")
            assert bodies(app, FrameChanged) == []

    run(main(False))
    run(main(True))


def test_a_new_step_whose_approval_could_never_be_granted_is_named(tmp_path: Path) -> None:
    async def main() -> None:
        await parked(tmp_path / "db")
        never = Step("say", tell, {"text": "x"}, approval=Approval(four_eyes=True))
        async with perdure(tmp_path / "db", [plan_of("2", BUILD, GO, never)]) as app:
            with pytest.raises(Conflict, match="step say: its approval could never be granted"):
                await app.adopt("r")

    run(main())


@tool(effect="keyed", name="release", approval=Approval())
async def asks_itself(tag: str, percent: int = 10, call: Call | None = None) -> str:
    DONE.append(f"release {tag} {percent}")
    return "live"


def test_an_open_call_stays_if_its_tool_still_fits_and_is_named_if_not(tmp_path: Path) -> None:
    def go(of: Any) -> Step:
        return Step("go", of, {"tag": ref("build", "tag")})

    def other(effect: Any) -> Any:
        async def fn(tag: str, percent: int = 10, call: Call | None = None) -> str:
            """Other words."""
            DONE.append(f"release by the new tool {tag} {percent}")
            return "live"

        return tool(effect=effect, name="release", approval=Approval())(fn)

    async def main() -> None:
        await parked(tmp_path / "db", plan_of("1", BUILD, go(asks_itself)))
        async with perdure(tmp_path / "db", [plan_of("2", BUILD, go(other("once")), SAY)]) as app:
            with pytest.raises(Conflict, match=r"its call 2 \(release\) is open, and in this code release is once, not keyed"):
                await app.adopt("r")
        code = plan_of("2", BUILD, go(other("keyed")), SAY)
        async with perdure(tmp_path / "db", [code]) as app:
            await app.adopt("r")
            assert (await approve(app)).status == "succeeded"
            assert DONE == ["build shop", "release by the new tool shop:1 10", "tell live"]
            sound(app, code)

    run(main())


def test_a_plan_can_be_adopted_again_and_every_step_keeps_its_plan(tmp_path: Path) -> None:
    ask = Approval()
    second = plan_of("2", BUILD, GO, Step("more", tell, {"text": ref("go")}, approval=ask), SAY)
    third = plan_of("3", BUILD, GO, Step("more", tell, {"text": ref("go")}, approval=ask), Step("end", tell, {"text": ref("more")}))

    async def main() -> None:
        await parked(tmp_path / "db")
        async with perdure(tmp_path / "db", [second]) as app:
            await app.adopt("r")
            assert (await approve(app)).status == "waiting_approval"
            sound(app, second)
        async with perdure(tmp_path / "db", [third]) as app:
            # `say` of the second plan has begun, since it does not wait for `more`; the third plan does not have it.
            with pytest.raises(Conflict, match="its step say has begun, and this plan has no such step"):
                await app.adopt("r")
        third_with = plan_of("3", *(step for step in (BUILD, GO, Step("more", tell, {"text": ref("go")}, approval=ask), SAY)), END)
        async with perdure(tmp_path / "db", [third_with]) as app:
            await app.adopt("r")
            sound(app, third_with)
            assert (await approve(app)).status == "succeeded"
            assert DONE == ["build shop", "release shop:1 10", "tell live", "tell live", "tell end"]
            digests = [OLD.digest, second.digest, third_with.digest]
            assert [one.digest for one in bodies(app, PlanGenerated)] == digests
            sound(app, third_with)

    run(main())


END = Step("end", tell, {"text": "end"}, after=["more"])


def test_a_second_adoption_before_the_next_step_is_checked_like_the_first(tmp_path: Path) -> None:
    second, third = plan_of("2", BUILD, GO), plan_of("3", BUILD, GO, Step("end", tell, {"text": ref("go")}))
    wrong = plan_of("3", Step("build", build, {"service": "other"}), GO)

    async def main() -> None:
        await parked(tmp_path / "db")
        async with perdure(tmp_path / "db", [second]) as app:
            await app.adopt("r")
        async with perdure(tmp_path / "db", [wrong]) as app:
            with pytest.raises(Conflict, match="its step build has begun"):
                await app.adopt("r")
        async with perdure(tmp_path / "db", [third]) as app:
            await app.adopt("r")
            assert (await approve(app)).status == "succeeded"
            assert DONE == ["build shop", "release shop:1 10", "tell live"]
            assert [one.digest for one in bodies(app, PlanGenerated)] == [OLD.digest, third.digest]
            sound(app, third)

    run(main())


def test_code_that_changes_after_the_adoption_without_a_new_version_stops_as_diverged(tmp_path: Path) -> None:
    @tool(effect="keyed", name="release")
    async def wider(tag: str, percent: int = 10, region: str = "everywhere", call: Call | None = None) -> str:
        raise AssertionError("this was not approved")

    async def main() -> None:
        # Another plan, and then the same plan with a tool that takes other arguments than the approved ones.
        changed = plan_of("2", BUILD, GO, Step("more", tell, {"text": "x"}))
        for number, code in enumerate((changed, plan_of("2", BUILD, _with(GO, tool=wider)))):
            path = tmp_path / f"db{number}"
            await parked(path)
            async with perdure(path, [plan_of("2", BUILD, GO)]) as app:
                await app.adopt("r")
            async with perdure(path, [code]) as app:
                row = await approve(app)
                assert (row.status, row.attention) == ("needs_attention", "diverged")
            async with perdure(path, [plan_of("2", BUILD, GO)]) as app:
                await app.unpause("r")
                assert (await app.engine.drive("r", wait=False)).status == "succeeded"
        assert DONE == ["build shop", "release shop:1 10"] * 2

    run(main())


def test_a_new_step_begins_with_the_next_event_that_wakes_the_plan(tmp_path: Path) -> None:
    @agent(version="1")
    async def helper(run: Run, what: str) -> str:
        return str(await run.receive("go"))

    old = plan_of("1", Step("one", helper, {"what": "a"}), Step("two", helper, {"what": "b"}))
    code = plan_of("2", Step("one", helper, {"what": "a"}), Step("two", helper, {"what": "b"}), Step("new", tell, {"text": "new"}),
                   Step("then", tell, {"text": ref("one")}))  # fmt: skip

    async def main() -> None:
        await parked(tmp_path / "db", old, helper, status="waiting")
        async with perdure(tmp_path / "db", [code, helper]) as app:
            await app.adopt("r")
            await app.engine.drive("r", wait=False)
            assert DONE == []
            await app.signal("r/1", "go", "done")
            await app.engine.drive("r/1", wait=False)
            await app.engine.drive("r", wait=False)
            assert sorted(DONE) == ["tell done", "tell new"]
            sound(app, code)
            await app.signal("r/2", "go", "done")
            assert (await app.handle("r").result())["then"] == "done"
            sound(app, code)

    run(main())


def test_a_step_whose_outcome_is_new_to_the_plan_goes_on_with_the_new_one_at_once(tmp_path: Path) -> None:
    @agent(version="1")
    async def helper(run: Run, what: str) -> str:
        return str(await run.receive("go"))

    steps = [Step("one", helper, {"what": "a"}), Step("two", helper, {"what": "b"})]
    old = plan_of("1", *steps, Step("both", tell, {"text": "both"}, after=["one", "two"]))
    code = plan_of("2", *steps, Step("early", tell, {"text": ref("one")}))

    async def main() -> None:
        await parked(tmp_path / "db", old, helper, status="waiting")
        async with perdure(tmp_path / "db", [old, helper]) as app:
            await app.signal("r/1", "go", "done")
            await app.engine.drive("r/1", wait=False)
            await app.engine.drive("r", wait=False)  # the plan waits for the other child, and states nothing
        async with perdure(tmp_path / "db", [code, helper]) as app:
            await app.adopt("r")
            await app.engine.drive("r", wait=False)
            assert DONE == ["tell done"]
            sound(app, code)
            await app.signal("r/2", "go", "done")
            assert await app.handle("r").result() == {"one": "done", "two": "done", "early": "done"}
            sound(app, code)

    run(main())


def test_a_plan_that_has_stopped_is_not_adopted(tmp_path: Path) -> None:
    @agent(version="1")
    async def helper(run: Run, what: str) -> str:
        return str(await run.receive("go"))

    old = plan_of("1", Step("one", helper, {"what": "a"}), Step("bad", fail, on_failure="undo"))

    async def main() -> None:
        await parked(tmp_path / "db", old, helper, status="waiting")
        code = plan_of("2", Step("one", helper, {"what": "a"}), Step("bad", fail), Step("new", tell, {"text": "new"}))
        async with perdure(tmp_path / "db", [code, helper]) as app:
            with pytest.raises(Conflict, match="its plan has stopped, because step bad failed"):
                await app.adopt("r")

    run(main())


def test_steps_that_were_done_with_the_old_plan_are_undone_with_the_new_one(tmp_path: Path) -> None:
    code = plan_of("2", BUILD, GO, Step("bad", fail, {"text": ref("go")}, on_failure="undo"))

    async def main() -> None:
        await parked(tmp_path / "db")
        async with perdure(tmp_path / "db", [code]) as app:
            await app.adopt("r")
            assert (await approve(app)).status == "failed"
            assert DONE == ["build shop", "release shop:1 10", "fail", "unbuild shop"]
            with pytest.raises(RunFailed, match="undone: build; could not be undone: go"):
                await app.handle("r").result()
            sound(app, code)

    run(main())


def test_what_to_do_if_an_open_step_fails_is_said_by_the_new_plan(tmp_path: Path) -> None:
    old = plan_of("1", BUILD, Step("bad", fail, {"text": ref("build", "tag")}, approval=True))
    code = plan_of("2", BUILD, Step("bad", fail, {"text": ref("build", "tag")}, approval=True, on_failure="continue"), END_ALONE)

    async def main() -> None:
        await parked(tmp_path / "db", old)
        async with perdure(tmp_path / "db", [code]) as app:
            await app.adopt("r")
            assert (await approve(app)).status == "succeeded"
            assert sorted(DONE) == ["build shop", "fail", "tell end"]
            sound(app, code)

    run(main())


END_ALONE = Step("end", tell, {"text": "end"})


def test_a_failed_plan_is_retried_with_another_plan_and_nothing_is_done_twice(tmp_path: Path) -> None:
    old = plan_of("1", BUILD, Step("bad", fail, {"text": ref("build", "tag")}))
    code = plan_of("2", BUILD, Step("go", release, {"tag": ref("build", "tag")}))

    async def main() -> None:
        await parked(tmp_path / "db", old, status="failed")
        async with perdure(tmp_path / "db", [code]) as app:
            with pytest.raises(Conflict, match="its step bad has begun, and this plan has no such step"):
                await app.retry("r", by="ann")
            built = next(event.seq for event in app.store.read("r") if event.type == "tool_call_completed")
            await app.rewind("r", built, by="ann")
            assert len(bodies(app, FrameChanged)) == 1
            assert await app.handle("r").result() == {"build": {"tag": "shop:1"}, "go": "live"}
            assert DONE == ["build shop", "fail", "release shop:1 10"]
            sound(app, code)

    run(main())


def test_a_retry_attempts_the_failed_step_again_and_goes_on_with_the_new_plan(tmp_path: Path) -> None:
    @tool(effect="idempotent", name="flaky")
    async def broken(text: str) -> str:
        DONE.append("fail")
        raise Fatal("no")

    @tool(effect="idempotent", name="flaky")
    async def mended(text: str) -> str:
        DONE.append("mended")
        return "ok"

    old = plan_of("1", BUILD, Step("bad", broken, {"text": ref("build", "tag")}))
    code = plan_of("2", BUILD, Step("bad", mended, {"text": ref("build", "tag")}), Step("end", tell, {"text": ref("bad")}))

    async def main() -> None:
        await parked(tmp_path / "db", old, status="failed")
        async with perdure(tmp_path / "db", [code]) as app:
            await app.retry("r", by="ann")
            assert (await app.handle("r").result())["end"] == "ok"
            assert DONE == ["build shop", "fail", "mended", "tell ok"]
            sound(app, code)

    run(main())


def test_a_rewind_behind_the_change_follows_the_plan_of_now_from_there(tmp_path: Path) -> None:
    code = plan_of("2", BUILD, GO, Step("end", tell, {"text": ref("go")}))

    async def main() -> None:
        await parked(tmp_path / "db")
        async with perdure(tmp_path / "db", [code]) as app:
            await app.adopt("r")
            built = next(event.seq for event in app.store.read("r") if event.type == "tool_call_completed")
            await app.rewind("r", built, by="ann")
            await app.engine.drive("r", wait=False)
            sound(app, code)
            assert (await approve(app)).status == "succeeded"
            assert DONE == ["build shop", "release shop:1 10", "tell live"]
            sound(app, code)

    run(main())


def test_the_input_of_the_run_must_fit_the_new_plan(tmp_path: Path) -> None:
    def code(**params: Any) -> Plan:
        return Plan("deploy", [BUILD, GO, Step("say", tell, {"text": param("text")})], params={"service": str, **params}, version="2")

    async def main() -> None:
        await parked(tmp_path / "db")
        async with perdure(tmp_path / "db", [code(text=str)]) as app:
            with pytest.raises(Conflict, match="its input does not fit: agent deploy, parameter text: the recorded call does not have it"):
                await app.adopt("r")
        fits = code(text={"type": str, "default": "hello"})
        async with perdure(tmp_path / "db", [fits]) as app:
            await app.adopt("r")
            assert (await approve(app)).status == "succeeded"
            assert sorted(DONE) == ["build shop", "release shop:1 10", "tell hello"]
            sound(app, fits)

    run(main())


def test_a_plan_of_a_thousand_words_in_its_arguments_is_adopted_from_a_blob(tmp_path: Path) -> None:
    long = plan_of("1", _with(BUILD, args={"service": "x" * 200_000}), GO, SAY)
    code = plan_of("2", _with(BUILD, args={"service": "x" * 200_000}), GO)

    async def main() -> None:
        await parked(tmp_path / "db", long)
        async with perdure(tmp_path / "db", [code]) as app:
            await app.adopt("r")
            assert (await approve(app)).status == "succeeded"
            sound(app, code)

    run(main())


# -- plans that a model has written -----------------------------------------------------------------------------------
WRITTEN: list[dict[str, Any]] = [
    {"name": "build", "tool": "build", "args": {"service": "shop"}},
    {"name": "go", "tool": "release", "args": {"tag": {"$ref": ["build", "tag"]}}},
    {"name": "say", "tool": "tell", "args": {"text": {"$ref": ["go"]}}},
]
BAD: list[dict[str, Any]] = [{"name": "build", "tool": "biuld", "args": {}}]


def submits(*plans: Sequence[Any]) -> Model:
    return ByTurn([wants(("submit_plan", {"steps": plan})) for plan in plans], name="planner")


def written(version: str, model: Model, tools: Sequence[Any] = (build, asks_itself, tell), **more: Any) -> Agent[..., Any]:
    return Plan.from_model(model, list(tools), "Release shop.", name="deploy", version=version, **more)


def test_a_plan_that_a_model_wrote_stays_and_goes_on_with_the_new_tools(tmp_path: Path) -> None:
    @tool(effect="once", name="tell")
    async def shout(text: str, loud: bool = True) -> str:
        DONE.append(f"shout {text}")
        return text

    never = Model([], name="other")
    code = written("2", never, (asks_itself, shout), instructions="Be careful.", approval=True)

    async def main() -> None:
        await parked(tmp_path / "db", written("1", submits(BAD, WRITTEN)))
        async with perdure(tmp_path / "db", [code]) as app:
            await app.adopt("r")
            assert len(bodies(app, FrameChanged)) == 1
            sound(app, code)
            assert (await approve(app)).status == "succeeded"
            assert DONE == ["build shop", "release shop:1 10", "shout live"]
            assert never.asked == []
            assert {one.digest for one in bodies(app, PlanGenerated)} == {bodies(app, PlanGenerated)[0].digest}
            sound(app, code)

    run(main())


def test_a_step_of_a_written_plan_whose_tool_is_gone_is_named(tmp_path: Path) -> None:
    async def main() -> None:
        await parked(tmp_path / "db", written("1", submits(WRITTEN)))
        async with perdure(tmp_path / "db", [written("2", submits(), (build, asks_itself), instructions="x")]) as app:
            with pytest.raises(Conflict, match=r"its plan does not fit the tools of this code: .*step say: there is no tool 'tell'"):
                await app.adopt("r")
        async with perdure(tmp_path / "db", [written("2", submits(), (build, tell), instructions="x")]) as app:
            with pytest.raises(Conflict, match=r"its call \d \(release\) is open, and this code has no tool release"):
                await app.adopt("r")

    run(main())


@pytest.mark.parametrize("how", ["as it is", "edited", "edited wrongly"])
def test_the_approval_of_a_plan_stays_and_its_plan_is_followed_with_the_new_code(tmp_path: Path, how: str) -> None:
    code = written("2", submits(), (build, release, tell), instructions="Be careful.", approval=None if how == "as it is" else True)
    edit = {"as it is": None, "edited": {"plan": {"steps": WRITTEN[:1]}}, "edited wrongly": {"plan": {"steps": BAD}}}[how]

    async def main() -> None:
        await parked(tmp_path / "db", written("1", submits(BAD, WRITTEN), (build, release, tell), approval=True))
        async with perdure(tmp_path / "db", [code]) as app:
            await app.adopt("r")
            sound(app, code)
            row = await approve(app, **({} if edit is None else {"edit": edit}))
            if how == "edited wrongly":
                assert (row.status, DONE) == ("waiting_approval", [])
                sound(app, code)
                row = await approve(app)
            assert row.status == "succeeded"
            done = ["build shop"] if how == "edited" else ["build shop", "release shop:1 10", "tell live"]
            assert done == DONE
            sound(app, code)
            assert bodies(app, PlanGenerated)[0].by == ("planner, edited by ben" if how == "edited" else "planner")

    run(main())


def test_edits_before_the_change_are_replayed_as_they_were(tmp_path: Path) -> None:
    old = written("1", submits(WRITTEN), approval=True)
    code = written("2", submits(), (build, asks_itself, tell), instructions="Be careful.", max_attempts=1)

    async def main() -> None:
        await parked(tmp_path / "db", old)
        async with perdure(tmp_path / "db", [old]) as app:
            assert (await approve(app, edit={"plan": {"steps": BAD}})).status == "waiting_approval"
            assert (await approve(app, edit={"plan": {"steps": WRITTEN[:2]}})).status == "waiting_approval"
            assert DONE == ["build shop"]
        async with perdure(tmp_path / "db", [code]) as app:
            await app.adopt("r")
            sound(app, code)
            assert (await approve(app)).status == "succeeded"
            assert DONE == ["build shop", "release shop:1 10"]
            assert {one.by for one in bodies(app, PlanGenerated)} == {"planner, edited by ben"}
            sound(app, code)

    run(main())


def test_a_plan_that_waits_for_its_approval_must_fit_the_new_tools(tmp_path: Path) -> None:
    async def main() -> None:
        await parked(tmp_path / "db", written("1", submits(WRITTEN), approval=True))
        async with perdure(tmp_path / "db", [written("2", submits(), (build, tell), approval=True)]) as app:
            with pytest.raises(Conflict, match="step go: there is no tool 'release'"):
                await app.adopt("r")

    run(main())


def test_more_attempts_are_a_limit_that_can_change(tmp_path: Path) -> None:
    code = written("2", submits(WRITTEN), (build, release, tell), instructions="Be careful.", max_attempts=5)

    async def main() -> None:
        await parked(tmp_path / "db", written("1", submits(BAD, BAD), (build, release, tell), max_attempts=2), status="failed")
        async with perdure(tmp_path / "db", [code]) as app:
            await app.retry("r", by="ann")
            assert (await app.handle("r").result())["say"] == "live"
            assert DONE == ["build shop", "release shop:1 10", "tell live"]
            sound(app, code)

    run(main())


# -- a second adoption of a conversation -------------------------------------------------------------------------------
def test_a_second_adoption_of_a_conversation_is_checked_like_the_first(tmp_path: Path) -> None:
    """The recorded turns keep their frame, so they say nothing about the tools of the newest code."""

    def chat(version: str, *tools: Any) -> ReAct:
        model = Model([wants(("release", {"tag": "x"})), "done"])
        return ReAct("chat", model=model, tools=tools, instructions=f"Be {version}.", version=version)

    async def main() -> None:
        async with app_of(tmp_path / "db", old := chat("1", lookup, asks_itself)) as app:
            await app.start(old, "go", id="r")
            await app.engine.drive("r", wait=False)
        async with app_of(tmp_path / "db", chat("2", asks_itself)) as app:
            await app.adopt("r")
        async with app_of(tmp_path / "db", chat("3", lookup)) as app:
            with pytest.raises(Conflict, match=r"its call 2 \(release\) is open, and this code has no tool release"):
                await app.adopt("r")
            # A rewind to the same place goes the same way.
            rested = next(event.seq for event in app.store.read("r") if event.type == "run_released")
            with pytest.raises(Conflict, match="this code has no tool release"):
                await app.rewind("r", rested, by="ann")

    run(main())
