"""Plans that run.

The order and the arguments of steps, what happens when a step fails, and that a run keeps its plan.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from tests.unit.approval_tools import check_replay, pending, statuses, the_one
from tests.unit.drive_tools import ManualClock, outline, perdure, run, until

from perdure import (
    Agent,
    Approval,
    Call,
    Fatal,
    InvalidInput,
    NotSent,
    Perdure,
    Plan,
    Retry,
    Run,
    RunFailed,
    Settings,
    Step,
    WrongVersion,
    agent,
    param,
    ref,
    tool,
)
from perdure.core import codec
from perdure.core.events import ApprovalRequested, PlanGenerated

Main = Callable[[Perdure], Coroutine[Any, Any, Any]]
DONE: list[str] = []  # the effects of the tools, in order


@pytest.fixture(autouse=True)
def _fresh() -> None:
    DONE.clear()


@tool(effect="keyed")
async def build(service: str, tag: str = "v1") -> dict[str, Any]:
    DONE.append(f"build {service}")
    return {"image_tag": f"{service}:{tag}", "layers": [{"size": 7}], "passed": True, "failures": 0}


@build.compensate
async def _(service: str, result: dict[str, Any]) -> None:
    DONE.append(f"unbuild {result['image_tag']}")


@tool(effect="once")
async def update(image: str, size: int = 0) -> str:
    DONE.append(f"update {image} {size}")
    return f"live {image}"


@tool(effect="once")
async def push(image: str) -> str:
    DONE.append(f"push {image}")
    return image


@push.compensate
async def _(image: str) -> None:
    DONE.append(f"unpush {image}")


@tool(effect="once")
async def fail(why: str = "no") -> str:
    DONE.append("fail")
    raise Fatal(why)


@tool(effect="read")
async def look(at: Any = None) -> Any:
    return at


async def once(plan: Agent[Any, Any], *args: Any, **kwargs: Any) -> Any:
    async with perdure(None, [plan]) as app:
        handle = await app.start(plan, *args, id="r", **kwargs)
        await app.engine.drive("r", wait=False)
        check_replay(app, plan)
        return await handle.result()


def failure_of(plan: Agent[Any, Any], **kwargs: Any) -> str:
    with pytest.raises(RunFailed) as caught:
        run(once(plan, **kwargs))
    return str(caught.value)


# -- results and references ---------------------------------------------------------------------------------------------------
def test_a_plan_is_an_agent_and_its_result_is_every_steps_result_by_name() -> None:
    plan = Plan(
        "deploy",
        steps=[
            Step("build", build, {"service": param("service")}),
            Step("lb", update, {"image": ref("build", "image_tag"), "size": ref("build", "layers", 0, "size")}),
        ],
        params={"service": str},
    )
    assert isinstance(plan, Agent)
    result = run(once(plan, service="shop"))
    assert result["lb"] == "live shop:v1"
    assert list(result) == ["build", "lb"]
    assert DONE == ["build shop", "update shop:v1 7"]


def test_parameters_have_types_and_defaults() -> None:
    plan = Plan("p", [Step("a", look, {"at": [param("n"), param("tags", 0)]})], params={"n": {"type": int, "default": 2}, "tags": list})
    assert run(once(plan, tags=["x"]))["a"] == [2, "x"]
    assert run(once(plan, n=3, tags=["x"]))["a"] == [3, "x"]

    async def wrong() -> None:
        async with perdure(None, [plan]) as app:
            await app.start(plan, n="many", tags=[])

    with pytest.raises(InvalidInput, match="parameter n: Input should be a valid integer"):
        run(wrong())


@pytest.mark.parametrize(
    "data",
    [
        {"$ref": ["build", "image_tag"]},
        {"$param": "x"},
        {"$$ref": 1},
        {"deep": [{"$ref": ["build"], "and": {"$data": 1}}]},
        "$ref",
        "{build.image_tag}",
        'ref("build")',
        {"ref": ["build"], "is": True},
    ],
)
def test_data_that_looks_like_a_reference_stays_data(data: Any) -> None:
    plan = Plan("p", [Step("build", build, {"service": "s"}), Step("a", look, {"at": {"data": data, "real": ref("build", "image_tag")}})])
    assert run(once(plan))["a"] == {"data": data, "real": "s:v1"}


def test_what_a_step_returned_is_never_read_as_a_reference() -> None:
    hostile = {"$ref": ["secret"], "x": {"$param": "y"}}
    plan = Plan("p", [Step("secret", look, {"at": "hidden"}), Step("a", look, {"at": hostile}), Step("b", look, {"at": ref("a")})])
    assert run(once(plan))["b"] == hostile


@pytest.mark.parametrize("value", [0, "", False, None, [], {}])
def test_falsy_results_are_results(value: Any) -> None:
    plan = Plan("p", [Step("a", look, {"at": {"value": value}}), Step("b", look, {"at": ref("a", "value")})])
    assert run(once(plan)) == {"a": {"value": value}, "b": value}


@pytest.mark.parametrize(
    ("path", "said"),
    [
        (
            ("image",),
            r"step lb \(update\) failed: ref\('build', 'image'\): there is no 'image' in what step build returned, which is an object with",
        ),
        (("layers", 3), r"there is no 3 in what step build returned at \['layers'\], which is a list of 1"),
        (("layers", "0"), r"there is no '0' in .* which is a list of 1"),
        ((0,), r"there is no 0 in .* an object with"),
        (("image_tag", 0), r"there is no 0 in .* at \['image_tag'\], which is text"),
    ],
)
def test_a_field_that_is_not_there_fails_the_plan_and_never_is_none(path: tuple[Any, ...], said: str) -> None:
    plan = Plan("p", [Step("build", build, {"service": "s"}), Step("lb", update, {"image": ref("build", *path)})])
    with pytest.raises(RunFailed, match=said):
        run(once(plan))
    assert DONE == ["build s"]


def test_a_reference_to_a_value_of_the_wrong_type_fails_the_step_before_its_effect() -> None:
    plan = Plan("p", [Step("build", build, {"service": "s"}), Step("lb", update, {"image": "i", "size": ref("build", "image_tag")})])
    assert "parameter size" in failure_of(plan)
    assert DONE == ["build s"]


class Image(BaseModel):
    tag: str
    digest: str = "d"


@tool(effect="read")
async def typed() -> Image:
    return Image(tag="t")


@tool(effect="read")
async def takes(image: Image) -> str:
    return f"{image.tag}@{image.digest}"


def test_typed_results_are_referred_to_by_their_fields() -> None:
    plan = Plan("p", [Step("a", typed), Step("b", look, {"at": ref("a", "tag")}), Step("c", takes, {"image": ref("a")})])
    assert run(once(plan)) == {"a": {"tag": "t", "digest": "d"}, "b": "t", "c": "t@d"}


def test_arguments_changed_after_the_plan_was_made_change_nothing() -> None:
    args: dict[str, Any] = {"at": ["as it was"]}
    plan = Plan("p", [Step("a", look, args)])
    args["at"].append("later")
    assert run(once(plan)) == {"a": ["as it was"]}


# -- order ------------------------------------------------------------------------------------------------------------------
class Meeting:
    """A tool that returns when as many are inside at a time as are expected."""

    def __init__(self, expected: int) -> None:
        self.inside = self.most = 0
        self.names: list[str] = []
        self.all_here = asyncio.Event()

        @tool(effect="read")
        async def meet(name: str, before: Any = None) -> str:
            self.names.append(name)
            self.inside += 1
            self.most = max(self.most, self.inside)
            if self.inside == expected:
                self.all_here.set()
            async with asyncio.timeout(5):
                await self.all_here.wait()
            self.inside -= 1
            return name

        self.tool = meet


def test_steps_that_do_not_depend_on_each_other_run_at_the_same_time() -> None:
    async def main() -> None:
        meeting = Meeting(3)
        steps = [Step(name, meeting.tool, {"name": name}) for name in ("a", "b", "c")]
        steps.append(Step("d", look, {"at": [ref("a"), ref("b"), ref("c")]}))
        assert (await once(Plan("p", steps)))["d"] == ["a", "b", "c"]
        assert meeting.most == 3

    run(main())


def test_without_parallel_they_run_one_after_the_other_in_the_order_given() -> None:
    async def main() -> None:
        meeting = Meeting(1)
        steps = [Step(name, meeting.tool, {"name": name}) for name in ("c", "a", "b")]
        await once(Plan("p", steps, parallel=False))
        assert (meeting.most, meeting.names) == (1, ["c", "a", "b"])

    run(main())


def test_after_orders_without_data_whatever_became_of_the_other_step() -> None:
    plan = Plan(
        "p",
        [
            Step("smoke", fail, on_failure="continue"),
            Step("lb", update, {"image": "i"}, after=["smoke"]),
            Step("report", look, {"at": ref("smoke")}),
        ],
    )
    result = run(once(plan))
    assert DONE == ["fail", "update i 0"]
    assert result == {
        "lb": "live i",
        "$not_done": {
            "smoke": {"outcome": "failed", "why": "Fatal: no"},
            "report": {"outcome": "skipped", "why": "it needs step smoke, which was failed"},
        },
    }


@pytest.mark.full
def test_a_hundred_steps_in_parallel_and_a_thousand_in_a_row() -> None:
    wide = Plan("wide", [Step(f"s{n}", look, {"at": n}) for n in range(100)])
    assert sum(run(once(wide)).values()) == sum(range(100))
    long = Plan("long", [Step("s0", look, {"at": 0}), *(Step(f"s{n}", look, {"at": ref(f"s{n - 1}")}) for n in range(1, 1000))])
    assert run(once(long))["s999"] == 0


def test_an_agent_can_be_a_step_and_a_plan_a_child() -> None:
    inner = Plan("inner", [Step("a", look, {"at": param("what")})], params={"what": str})

    @agent(version="1")
    async def shout(run: Run, text: str) -> str:
        return text.upper()

    plan = Plan("outer", [Step("in", inner, {"what": "x"}), Step("loud", shout, {"text": ref("in", "a")})])
    assert plan.agents == (inner, shout)
    assert run(once(plan)) == {"in": {"a": "x"}, "loud": "X"}


# -- conditions -----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("when", "made"),
    [
        (ref("build", "passed"), True),
        (ref("build", "failures") == 0, True),
        (ref("build", "failures") == 0.0, True),
        (ref("build", "failures") == False, False),  # noqa: E712 – 0 is not false, which is the point
        (ref("build", "failures") != 0, False),
        (ref("build", "failures") < 1, True),
        (ref("build", "failures") >= 1, False),
        (ref("build", "image_tag") > "a", True),
        (ref("build", "image_tag").one_of("x", "s:v1"), True),
        (ref("build", "layers") == [{"size": 7}], True),
        ([ref("build", "passed"), ref("build", "failures") > 3], False),
        (param("env") == "prod", False),
    ],
)
def test_a_step_is_made_when_its_conditions_hold(when: Any, made: bool) -> None:
    steps = [Step("build", build, {"service": "s"}), Step("lb", update, {"image": "i"}, when=when)]
    result = run(once(Plan("p", steps, params={"env": str}), env="test"))
    assert ("lb" in result) == made
    assert ("update i 0" in DONE) == made
    if not made:
        assert result["$not_done"]["lb"]["outcome"] == "skipped"
        assert result["$not_done"]["lb"]["why"].startswith("its condition does not hold: ")


@pytest.mark.parametrize(
    ("when", "said"),
    [
        (ref("build", "failures"), "neither true nor false"),
        (ref("build", "image_tag") < 3, "cannot be compared with 3"),
        (ref("build", "missing") == 1, "there is no 'missing'"),
    ],
)
def test_a_condition_that_cannot_be_decided_is_a_failure_and_no_guess(when: Any, said: str) -> None:
    plan = Plan("p", [Step("build", build, {"service": "s"}), Step("lb", update, {"image": "i"}, when=when)])
    assert said in failure_of(plan)
    assert DONE == ["build s"]


def test_a_condition_is_nothing_to_branch_on_in_python() -> None:
    with pytest.raises(InvalidInput, match="not known before the plan runs"):
        assert ref("a") == 1
    with pytest.raises(InvalidInput, match="not known before the plan runs"):
        bool(ref("a"))


# -- failures --------------------------------------------------------------------------------------------------------------------
def test_a_failure_stops_the_plan_and_says_what_is_done_and_what_is_not() -> None:
    plan = Plan(
        "p",
        [
            Step("build", build, {"service": "s"}),
            Step("check", fail, {"why": "broken"}, after=["build"]),
            Step("lb", update, {"image": ref("build", "image_tag")}, after=["check"]),
        ],
    )
    assert "PlanFailed: step check (fail) failed: Fatal: broken; done: build; not begun: lb" in failure_of(plan)
    assert DONE == ["build s", "fail"]


def test_a_stopping_plan_waits_for_what_is_under_way_and_records_it() -> None:
    async def main() -> None:
        begun, release = asyncio.Event(), asyncio.Event()

        @tool(effect="once")
        async def slow() -> str:
            begun.set()
            await release.wait()
            DONE.append("slow")
            return "slow"

        @tool(effect="once")
        async def fail_then() -> None:
            await begun.wait()
            asyncio.get_running_loop().call_later(0.05, release.set)
            raise Fatal("no")

        plan = Plan("p", [Step("slow", slow), Step("bad", fail_then), Step("next", update, {"image": ref("slow")})])
        with pytest.raises(RunFailed, match=r"step bad .*; done: slow; not begun: next"):
            await once(plan)
        assert DONE == ["slow"]

    run(main())


@pytest.mark.parametrize("on_failure", ["stop", "undo"])
@pytest.mark.parametrize("effect", ["once", "idempotent"])
def test_a_call_that_waits_for_a_person_is_withdrawn_with_its_plan_and_cannot_be_approved_any_more(effect: Any, on_failure: Any) -> None:
    """Its tool asks, not its step: the plan cannot know that it waits."""

    async def main() -> None:
        failing = asyncio.Event()

        @tool(effect=effect, approval=True)
        async def delete_db() -> None:
            DONE.append("deleted")

        @tool(effect="once")
        async def check() -> None:
            await failing.wait()
            raise Fatal("no")

        steps = [Step("check", check, on_failure=on_failure), Step("del", delete_db, on_failure="undo"), Step("b", build, {"service": "s"})]
        plan = Plan("p", steps)
        async with perdure(None, [plan]) as app:
            await app.start(plan, id="r")
            driving = asyncio.create_task(app.engine.drive("r", wait=False))
            await until(lambda: pending(app) and DONE)
            failing.set()
            row = await driving
            assert row.status == "failed"
            assert "step check (check) failed: Fatal: no; done: b; not begun: del" in (row.error or "")
            assert statuses(app) == ["withdrawn"]
            check_replay(app, plan)
        undone = ["unbuild s:v1"] if on_failure == "undo" else []
        assert DONE[0] == "build s"
        assert DONE[1:] == undone

    run(main())


@pytest.mark.parametrize("effect", ["once", "keyed", "idempotent"])
def test_a_step_between_two_attempts_makes_no_other_once_the_plan_has_stopped(effect: Any) -> None:
    async def main() -> None:
        failing = asyncio.Event()

        @tool(effect=effect, retry=Retry(attempts=5, base=0.05))
        async def busy() -> None:
            DONE.append("busy")
            failing.set()
            raise NotSent("the line is engaged")

        @tool(effect="once")
        async def check() -> None:
            await failing.wait()
            await asyncio.sleep(0.01)
            raise Fatal("no")

        plan = Plan("p", [Step("busy", busy), Step("check", check)])
        with pytest.raises(RunFailed, match=r"step check \(check\) failed: Fatal: no; given up: busy"):
            await once(plan)
        assert DONE == ["busy"]

    run(main())


@pytest.mark.parametrize("effect", ["read", "idempotent", "keyed", "once"])
def test_an_attempt_that_is_under_way_ends_and_counts_but_is_not_repeated(effect: Any) -> None:
    """An effect that could be stopped half-way would be neither done, nor undone."""

    async def main() -> None:
        begun, release = asyncio.Event(), asyncio.Event()

        @tool(effect=effect)
        async def slow() -> str:
            begun.set()
            await release.wait()
            DONE.append("slow")
            return "slow"

        @tool(effect=effect, retry=Retry(attempts=3, base=0.01))
        async def flaky() -> None:
            await release.wait()
            DONE.append("flaky")
            raise NotSent("the line is engaged")

        @tool(effect="once")
        async def bad() -> None:
            await begun.wait()
            asyncio.get_running_loop().call_later(0.05, release.set)
            raise Fatal("no")

        plan = Plan("p", [Step("slow", slow), Step("bad", bad), Step("flaky", flaky)])
        with pytest.raises(RunFailed, match=r"step bad .*; done: slow; failed too: flaky"):
            await once(plan)
        assert sorted(DONE) == ["flaky", "slow"]

    run(main())


@pytest.mark.parametrize("asks", [False, True])
def test_a_call_that_is_asked_for_in_the_breath_in_which_the_plan_stops_is_not_made(asks: bool) -> None:
    async def main() -> None:
        @tool(effect="once", approval=asks)
        async def delete_db() -> None:
            DONE.append("deleted")

        steps = [Step("x", look, {"at": {}}), Step("del", delete_db, after=["x"]), Step("bad", look, {"at": ref("x", "nope")})]
        plan = Plan("p", steps)
        async with perdure(None, [plan]) as app:
            await app.start(plan, id="r")
            row = await app.engine.drive("r", wait=False)
            assert row.status == "failed"
            assert (row.error or "").endswith("; done: x; not begun: del" if asks else "; done: x; given up: del")
            check_replay(app, plan)
        assert DONE == []

    run(main())


def test_a_plan_that_stopped_has_withdrawn_its_calls_wherever_the_run_goes_on(tmp_path: Path) -> None:
    """The worker that learns of the stop is not the worker that made the request."""

    async def main() -> None:
        @tool(effect="once", approval=True)
        async def delete_db() -> None:
            DONE.append("deleted")

        plan = Plan("p", [Step("del", delete_db), Step("lb", update, {"image": "i"}, approval=True)])
        async with perdure(tmp_path / "db", [plan]) as app:
            await app.start(plan, id="r")
            assert (await app.engine.drive("r", wait=False)).status == "waiting_approval"
            (asked,) = [row.approval for row in pending(app) if row.standing.request.tool is None]
            await app.reject(asked, by="ann", reason="no")
        async with perdure(tmp_path / "db", [plan]) as app:
            assert (await app.engine.drive("r", wait=False)).status == "failed"
            assert sorted(statuses(app)) == ["rejected", "withdrawn"]
            check_replay(app, plan)
        assert DONE == []

    run(main())


def test_undo_takes_back_what_is_done_in_reverse_order_and_says_what_it_could_not() -> None:
    plan = Plan(
        "p",
        [
            Step("look", look),
            Step("build", build, {"service": "s"}, after="look"),
            Step("push", push, {"image": ref("build", "image_tag")}),
            Step("lb", update, {"image": ref("push")}),
            Step("check", fail, after=["lb"], on_failure="undo"),
        ],
    )
    said = failure_of(plan)
    assert DONE == ["build s", "push s:v1", "update s:v1 0", "fail", "unpush s:v1", "unbuild s:v1"]
    assert "; undone: push, build; could not be undone: lb [its tool has no compensate hook]; once that is mended: perdure undo r" in said


def test_an_undo_says_which_step_may_have_happened_though_it_failed() -> None:
    @tool(effect="idempotent", retry=Retry(attempts=1))
    async def cut_off() -> None:
        raise ConnectionResetError("gone")

    plan = Plan("p", [Step("build", build, {"service": "s"}), Step("x", cut_off, after=["build"], on_failure="undo")])
    assert failure_of(plan).endswith("; undone: build; may have happened all the same: x")


def test_a_hook_that_fails_does_not_keep_the_others_from_being_undone() -> None:
    @tool(effect="once")
    async def stubborn() -> str:
        return "done"

    @stubborn.compensate
    async def _() -> None:
        raise Fatal("it will not")

    plan = Plan(
        "p",
        [
            Step("build", build, {"service": "s"}),
            Step("stubborn", stubborn, after=["build"]),
            Step("x", fail, after=["stubborn"], on_failure="undo"),
        ],
    )
    said = failure_of(plan)
    assert "undone: build; could not be undone: stubborn [Fatal: it will not]" in said
    assert DONE == ["build s", "fail", "unbuild s:v1"]


def test_perdure_undo_does_not_undo_again_what_the_plan_has_undone_itself() -> None:
    broken = [True]

    @tool(effect="once")
    async def fragile(n: int) -> int:
        return n

    @fragile.compensate
    async def _(n: int) -> None:
        if broken[0]:
            raise Fatal("not yet")
        DONE.append(f"unfragile {n}")

    plan = Plan(
        "p",
        [
            Step("b1", build, {"service": "s"}),
            Step("b2", build, {"service": "s"}),
            Step("f", fragile, {"n": 1}, after=["b1", "b2"]),
            Step("x", fail, after=["f"], on_failure="undo"),
        ],
    )

    async def main() -> None:
        async with perdure(None, [plan]) as app:
            await app.start(plan, id="r")
            await app.engine.drive("r", wait=False)
            assert DONE.count("unbuild s:v1") == 2
            broken[0] = False
            surveyed = await app.plan_undo("r")
            assert [deed.tool for deed in surveyed.steps] == ["fragile"]
            # Both are `once`, and failed without proof that nothing happened. So a person has to accept that.
            assert [(deed.tool, deed.in_doubt) for deed in surveyed.left] == [("fragile.undo", True), ("fail", True)]
            await app.undo("r", by="ann", accept=True)
            assert DONE.count("unbuild s:v1") == 2
            assert DONE.count("unfragile 1") == 1

    run(main())


@tool(effect="idempotent", retry=Retry(attempts=1), name="cut_off")
async def lost_line() -> None:
    raise ConnectionResetError("gone")


DOUBT = "ConnectionResetError: gone. It may have happened all the same"


def test_a_step_that_failed_and_may_have_happened_is_told_so_wherever_its_failure_is() -> None:
    assert f"step x (cut_off) failed: {DOUBT}" in failure_of(Plan("p", [Step("x", lost_line)]))
    gone_on = run(once(Plan("p", [Step("x", lost_line, on_failure="continue")])))
    assert gone_on["$not_done"]["x"] == {"outcome": "failed", "why": DOUBT}

    async def asked() -> Any:
        plan = Plan("p", [Step("x", lost_line, on_failure="ask")])
        async with perdure(None, [plan]) as app:
            await app.start(plan, id="r")
            await app.engine.drive("r", wait=False)
            (event,) = [event for event in app.store.read("r") if isinstance(event.body, ApprovalRequested)]
            assert isinstance(event.body, ApprovalRequested)
            return codec.decode(app.load(event.body.input))

    assert run(asked())["error"] == DOUBT


@pytest.mark.parametrize("effect", ["read", "transaction"])
def test_what_cannot_have_happened_is_not_doubted(effect: Any) -> None:
    @tool(effect=effect, retry=Retry(attempts=1))
    def harmless(call: Call) -> None:
        raise ConnectionResetError("gone")

    assert "all the same" not in failure_of(Plan("p", [Step("x", harmless, on_failure="undo")]))


def test_a_result_that_the_plans_own_cannot_hold_is_left_out_and_the_run_succeeds() -> None:
    @tool(effect="once")
    async def deep() -> Any:
        value: Any = 1
        for _ in range(codec.MAX_DEPTH):
            value = [value]
        DONE.append("deep")
        return value

    plan = Plan("p", [Step("deep", deep), Step("b", look, {"at": ref("deep", 0, 0)}), Step("c", look, {"at": 3})])
    result = run(once(plan))
    assert result["c"] == 3
    assert "b" in result
    assert "deep" not in result
    assert result["$left_out"] == {
        "deep": "it is nested too deeply, or too large, to be part of another result; it is recorded with its call"
    }
    assert DONE == ["deep"]


def test_results_that_are_too_large_together_are_left_out_from_the_first_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "MAX_BYTES", 300_000)  # as many as there are take seconds

    @tool(effect="read")
    async def large(char: str) -> str:
        return char * (codec.MAX_BYTES // 3)

    plan = Plan("p", [*(Step(name, large, {"char": name}) for name in "abc"), Step("d", look, {"at": 4})])
    result = run(once(plan))
    assert sorted(result) == ["$left_out", "a", "b", "d"]
    assert result["$left_out"]["c"].startswith("its 100,008 bytes are too many")


# -- people ----------------------------------------------------------------------------------------------------------------------
def ask_plan(times: int) -> Plan:
    failures = [times]

    @tool(effect="once")
    async def flaky() -> str:
        DONE.append("flaky")
        if failures[0]:
            failures[0] -= 1
            raise Fatal("down")
        return "up"

    return Plan("p", [Step("a", flaky, on_failure="ask"), Step("b", look, {"at": ref("a")}), Step("c", look, {"at": 3}, after=["a"])])


@pytest.mark.parametrize(
    ("edits", "result"),
    [
        ([None], {"a": "up", "b": "up", "c": 3}),
        ([{"choice": "maybe"}, {"choice": "retry"}], {"a": "up", "b": "up", "c": 3}),
        ([{"choice": "skip"}], {"c": 3}),
        ([{"choice": "stop"}], None),
        (["reject"], None),
    ],
)
def test_a_person_is_asked_whether_to_retry_to_skip_or_to_stop(edits: list[Any], result: dict[str, Any] | None) -> None:
    async def main() -> None:
        plan = ask_plan(1)
        async with perdure(None, [plan]) as app:
            await app.start(plan, id="r")
            for edit in edits:
                assert (await app.engine.drive("r", wait=False)).status == "waiting_approval"
                if edit == "reject":
                    await app.reject(the_one(app), by="ann", reason="leave it")
                else:
                    await app.approve(the_one(app), by="ann", edit=edit)
            row = await app.engine.drive("r", wait=False)
            check_replay(app, plan)
            if result is None:
                assert row.status == "failed"
                assert "step a (flaky) failed: Fatal: down; not begun: b, c" in (row.error or "")
                return
            output = await app.handle("r").result()
            not_done = output.pop("$not_done", None)
            assert output == result
            if "a" not in result:
                assert not_done["a"]["why"] == "ann chose to go on without it, after it had failed: Fatal: down"
                assert not_done["b"] == {"outcome": "skipped", "why": "it needs step a, which was skipped"}

    run(main())


def test_an_approval_is_about_the_exact_arguments_and_only_the_approved_ones_are_used() -> None:
    plan = Plan(
        "p",
        [
            Step("build", build, {"service": "s"}),
            Step(
                "lb",
                update,
                {"image": ref("build", "image_tag"), "size": 1},
                approval=Approval(by="ann", editable="size", reason="traffic"),
            ),
        ],
    )

    async def main() -> None:
        async with perdure(None, [plan]) as app:
            handle = await app.start(plan, id="r")
            assert (await app.engine.drive("r", wait=False)).status == "waiting_approval"
            assert DONE == ["build s"]
            (asked,) = (event.body for event in await handle.events() if isinstance(event.body, ApprovalRequested))
            assert (asked.action, asked.reason, asked.by) == ("step lb: update", "traffic", ("ann",))
            assert asked.input.inline == codec.encode({"image": "s:v1", "size": 1})
            with pytest.raises(InvalidInput, match="may not be edited"):
                await app.approve(the_one(app), by="ann", edit={"image": "other"})
            await app.approve(the_one(app), by="ann", edit={"size": 5})
            await app.engine.drive("r", wait=False)
            check_replay(app, plan)
            assert DONE == ["build s", "update s:v1 5"]

    run(main())


@pytest.mark.parametrize("outcome", ["rejected", "expired"])
def test_a_step_that_is_not_approved_fails_and_says_how(outcome: str) -> None:
    plan = Plan("p", [Step("lb", update, {"image": "i"}, approval=Approval(expires=60)), Step("next", look, {"at": ref("lb")})])

    async def main() -> None:
        clock = ManualClock()
        async with perdure(None, [plan], clock) as app:
            await app.start(plan, id="r")
            await app.engine.drive("r", wait=False)
            if outcome == "rejected":
                await app.reject(the_one(app), by="ann", reason="not today")
            else:
                clock.advance(61)
            row = await app.engine.drive("r", wait=False)
            by = " by ann: not today" if outcome == "rejected" else ""
            assert f"step lb (update) failed: it was not approved: {outcome}{by}; not begun: next" in (row.error or "")
            assert DONE == []

    run(main())


def test_an_approval_that_waits_is_withdrawn_when_another_step_stops_the_plan() -> None:
    async def main() -> None:
        asked, failing = asyncio.Event(), asyncio.Event()

        @tool(effect="once")
        async def fail_later() -> None:
            await failing.wait()
            raise Fatal("no")

        plan = Plan("p", [Step("lb", update, {"image": "i"}, approval=True), Step("bad", fail_later)])
        async with perdure(None, [plan]) as app:
            await app.start(plan, id="r")
            driving = asyncio.create_task(app.engine.drive("r", wait=False))
            await until(lambda: pending(app))
            asked.set()
            failing.set()
            row = await driving
            assert row.status == "failed"
            assert "step bad (fail_later) failed: Fatal: no; not begun: lb" in (row.error or "")
            assert statuses(app) == ["withdrawn"]
            check_replay(app, plan)
        assert DONE == []

    run(main())


def test_four_eyes_that_could_never_agree_are_noticed_before_the_first_effect() -> None:
    steps = [Step("build", build, {"service": "s"}), Step("lb", update, {"image": "i"}, approval=Approval(four_eyes=True), after=["build"])]
    assert "step lb: its approval could never be granted" in failure_of(Plan("p", steps))
    assert DONE == []


def test_cancelling_a_run_cancels_its_plan() -> None:
    async def main() -> None:
        plan = Plan("p", [Step("lb", update, {"image": "i"}, approval=True), Step("b", build, {"service": "s"}, on_failure="undo")])
        async with perdure(None, [plan]) as app:
            await app.start(plan, id="r")
            await app.engine.drive("r", wait=False)
            await app.cancel("r")
            assert (await app.engine.drive("r", wait=False)).status == "cancelled"
            assert statuses(app) == ["withdrawn"]
            assert DONE == ["build s"]

    run(main())


# -- the plan of a run ---------------------------------------------------------------------------------------------------------
async def journal(app: Perdure) -> list[str]:
    return [event.type for event in await app.handle("r").events()]


def test_the_plan_is_journaled_once_before_its_first_step_and_reads_back_as_a_plan() -> None:
    plan = Plan(
        "p",
        [
            Step("a", look, {"at": {"$odd": 1}}),
            Step("b", look, {"at": ref("a")}, when=ref("a") != 7, approval=Approval(by="x", expires=5)),
        ],
    )

    async def main() -> None:
        async with perdure(None, [plan]) as app:
            handle = await app.start(plan, id="r")
            await app.engine.drive("r", wait=False)
            (body,) = (event.body for event in await handle.events() if isinstance(event.body, PlanGenerated))
            assert body.digest == plan.digest
            assert codec.decode(app.load(body.plan)) == plan.document
            assert (await journal(app)).index("plan_generated") < (await journal(app)).index("tool_call_initiated")
            assert "status_reported" in await journal(app)

    run(main())


def test_a_plan_larger_than_the_inline_limit_is_a_blob_and_the_run_resumes(tmp_path: Path) -> None:
    plan = Plan("p", [Step("a", look, {"at": "x" * 3000}), Step("b", update, {"image": "i"}, approval=True)])
    small = Settings(poll_s=0.002, park_after_s=0, flush_s=0.005, inline_bytes=1024)

    async def main() -> None:
        async with perdure(tmp_path / "db", [plan], settings=small) as app:
            await app.start(plan, id="r")
            await app.engine.drive("r", wait=False)
            (body,) = (event.body for event in await app.handle("r").events() if isinstance(event.body, PlanGenerated))
            assert body.plan.inline is None
            assert codec.decode(app.load(body.plan)) == plan.document
        # With another limit the plan is recorded differently (inline or as a blob), but it is the same plan.
        async with perdure(tmp_path / "db", [plan]) as app:
            await app.approve(the_one(app), by="ann")
            assert (await app.engine.drive("r", wait=False)).status == "succeeded"

    run(main())


def two_plans(version: str | None) -> tuple[Plan, Plan]:
    def made(image: str) -> Plan:
        return Plan(
            "p", [Step("ask", look, {"at": 1}, approval=True), Step("lb", update, {"image": image}, after=["ask"])], version=version
        )

    return made("one"), made("two")


def test_another_plan_is_another_version_and_does_not_get_the_run(tmp_path: Path) -> None:
    first, second = two_plans(None)
    assert first.version != second.version
    assert first.version == two_plans(None)[0].version

    async def main() -> None:
        async with perdure(tmp_path / "db", [first]) as app:
            await app.start(first, id="r")
            await app.engine.drive("r", wait=False)
        async with perdure(tmp_path / "db", [second]) as app:
            await app.approve(the_one(app), by="ann")
            with pytest.raises(WrongVersion):
                await app.engine.drive("r", wait=False)

    run(main())


def test_another_plan_under_the_same_version_stops_as_diverged_and_names_both(tmp_path: Path) -> None:
    first, second = two_plans("7")

    async def main() -> None:
        async with perdure(tmp_path / "db", [first]) as app:
            await app.start(first, id="r")
            await app.engine.drive("r", wait=False)
        async with perdure(tmp_path / "db", [second]) as app:
            await app.approve(the_one(app), by="ann")
            row = await app.engine.drive("r", wait=False)
            assert (row.status, row.attention) == ("needs_attention", "diverged")
            said = row.error or ""
            assert first.digest[:12] in said
            assert second.digest[:12] in said
            assert "resume it with that one, or adopt it as a new version" in said
        assert DONE == []
        async with perdure(tmp_path / "db", [first]) as app:
            await app.unpause("r")
            assert (await app.engine.drive("r", wait=False)).status == "succeeded"
        assert DONE == ["update one 0"]

    run(main())


def test_the_version_changes_with_what_the_tools_are() -> None:
    def made(effect: Any) -> Plan:
        @tool(effect=effect)
        async def act() -> None: ...

        return Plan("p", [Step("a", act)])

    assert made("once").version == made("once").version != made("keyed").version
    assert made("once").digest == made("keyed").digest


def test_a_step_is_told_by_its_name_in_the_journal() -> None:
    plan = Plan("p", [Step("greet", look, {"at": 1}), Step("never", look, when=ref("greet") == 2)])

    async def main() -> None:
        async with perdure(None, [plan]) as app:
            handle = await app.start(plan, id="r")
            await app.engine.drive("r", wait=False)
            lines = outline(await handle.events())
            assert lines[:5] == ["run_created", "plan_generated", "status_reported", "initiated look 1/1", "completed 1/1"]
            assert lines[5:] == ["decision_made", "run_succeeded"]

    run(main())
