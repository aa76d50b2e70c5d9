"""All mistakes of a plan are reported before its first effect, and a run of a plan respects every reference."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.unit.drive_tools import perdure, run

from perdure import Approval, InvalidInput, InvalidPlan, Plan, Run, Step, agent, param, ref, tool
from perdure.agents.plan.check import MAX_PROBLEMS, circles, sound
from perdure.agents.plan.refs import found, read, resolve, written
from perdure.core import codec


@tool(effect="once")
async def act(order: str, cents: int = 1) -> dict[str, Any]:
    return {"order": order, "cents": cents}


@tool(effect="read")
async def look(at: Any = None) -> Any:
    return at


@agent(version="1")
async def child(run: Run, text: str) -> str:
    return text


def problems(*steps: Any, **options: Any) -> tuple[str, ...]:
    with pytest.raises(InvalidPlan) as caught:
        Plan("p", steps=list(steps), **options)
    return caught.value.problems


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ([], "it has no steps"),
        ([Step("", act)], "step 1 is called ''"),
        ([Step("a b", look)], "step 1 is called 'a b'"),
        ([Step("$not_done", look)], "step 1 is called '$not_done'"),
        ([Step("x" * 65, look)], "a name is up to 64"),
        ([Step("a", look), Step("a", look)], "step a stands there twice, as step 1 and step 2; rename one"),
        (["no step"], "step 1 is 'no step'; write Step(name, tool, {…})"),
        ([Step("a", print)], "is neither a tool nor an agent; decorate the function with @tool"),  # type: ignore[arg-type]
        ([Step("a", act)], "step a: tool act: the argument order is missing; it takes order, cents"),
        ([Step("a", act, {"order": "o", "colour": 1})], "step a: tool act: the argument colour is unknown; it takes order, cents"),
        ([Step("a", act, {"order": "o", "cents": "many"})], "step a: tool act: parameter cents: Input should be a valid integer"),
        ([Step("a", look), Step("b", act, {"order": ref("a"), "cents": "many"})], "step b: tool act: parameter cents"),
        ([Step("a", look), Step("b", act, {"cents": ref("a")})], "step b: tool act: the argument order is missing"),
        ([Step("a", child, {"text": 3, "more": 1})], "step a: agent child: the argument more is unknown; it takes text"),
        ([Step("a", act, ["o"])], "its arguments are ['o'], not a dict"),  # type: ignore[arg-type]
        ([Step("a", act, {"order": ref("b")}), Step("c", look)], "step a: ref('b'): there is no step 'b'"),
        ([Step("build", look), Step("b", look, {"at": ref("biuld", "x")})], "there is no step 'biuld', did you mean build?"),
        ([Step("a", look, {"at": [{"x": ref("b")}]}), Step("b", look)], "step a: ref('b'): step b stands after it; move b up"),
        ([Step("a", look, {"at": ref("a")})], "step a: ref('a'): that is the step itself"),
        ([Step("a", look, after=["z"])], "step a: after names 'z': there is no step 'z'"),
        ([Step("a", look, after=[3])], "step a: after is a list of names of steps"),  # type: ignore[list-item]
        ([Step("a", look, {"at": param("x")})], "step a: param('x'): the plan has no such parameter; it has no parameters"),
        ([Step("a", look, when=True)], "when=True is no condition"),  # type: ignore[arg-type]
        ([Step("a", look), Step("b", look, when=ref("a") == ref("a"))], "compared with a value, not with another reference"),
        ([Step("a", look), Step("b", look, when=ref("a") < [1])], "compares with a number or a text, not with [1]"),
        ([Step("a", look), Step("b", look, when=[ref("a")] * 21)], "21 conditions; at most 20"),
        ([Step("a", look), Step("b", look, {"at": ref("a") == 1})], "is a condition: it belongs into when="),
        ([Step("a", look, on_failure="explode")], "on_failure is one of stop, continue, undo, ask, not 'explode'"),  # type: ignore[arg-type]
        ([Step("a", look, approval="ann")], "approval='ann' is neither True nor an Approval"),  # type: ignore[arg-type]
        ([Step("a", look, approval=Approval(when=lambda: True))], "is a function, and a plan is data"),
        ([Step("a", look, approval=Approval(editable="nope"))], "approval: 'nope' cannot be edited; look takes at"),
        ([Step("a", look, {"at": {1: 2}})], "the key 1 is of type int; keys must be strings"),
        ([Step("a", look, {"at": {1, 2}})], "of type set, which JSON cannot hold"),
        ([Step("a", look, {"at": float("nan")})], "JSON cannot hold"),
        ([Step(f"s{n}", look) for n in range(1001)], "it has 1,001 steps; at most 1,000"),
    ],
)
def test_a_plan_with_a_problem_is_refused_where_it_is_made(steps: list[Any], said: str) -> None:
    assert any(said in problem for problem in problems(*steps)), problems(*steps)


def test_a_deep_or_circular_argument_is_refused() -> None:
    deep: Any = []
    deep.append(deep)
    assert any("nested deeper than 100 levels (or contains itself)" in one for one in problems(Step("a", look, {"at": deep})))


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"n": "whole"}, "the parameter n: {'type': 'whole'} is no type"),
        ({"run": str}, "another one than run"),
        ({"a b": str}, "needs a name of letters"),
        ({"class": str}, "needs a name of letters"),
        ({"n": {"type": int, "default": "x"}}, "the parameter n: its default 'x' is no integer"),
        ({"n": {"type": int, "default": True}}, "its default True is no integer"),
        ({"n": {"type": int, "wrong": 1}}, "is no type"),
        ({"n": [1]}, "is no type"),
    ],
)
def test_a_parameter_with_a_problem_is_refused(params: dict[str, Any], said: str) -> None:
    assert any(said in problem for problem in problems(Step("a", look), params=params)), problems(Step("a", look), params=params)


def test_nothing_inside_a_text_can_be_referred_to() -> None:
    assert problems(Step("a", look, {"at": param("s", "x")}), params={"s": str}) == (
        "step a: param('s', 'x'): the parameter s is a string, which has nothing inside",
    )


def test_steps_that_wait_for_each_other_are_told_as_a_circle_and_not_as_wrongly_ordered() -> None:
    found_problems = problems(Step("a", look, {"at": ref("c")}), Step("b", look, {"at": ref("a")}), Step("c", look, after=["b"]))
    assert found_problems == ("the steps a → c → b → a wait for each other",)


def test_one_error_names_all_problems_and_stays_short_however_many_there_are() -> None:
    steps = [Step(f"s{n}", act, {"colour": 1}) for n in range(300)]
    with pytest.raises(InvalidPlan) as caught:
        Plan("p", steps)
    assert len(caught.value.problems) == MAX_PROBLEMS + 1
    assert caught.value.problems[-1] == "and more, which were not looked for; put these right first"
    assert str(caught.value).startswith("plan p has 101 problems:\n- step s0: tool act: the argument colour is unknown")
    assert str(caught.value).endswith("\n- and 81 more")
    assert isinstance(caught.value, InvalidInput)


def test_a_few_problems_more_than_are_named_are_all_there() -> None:
    assert len(problems(*(Step(f"s{n}", act, {"colour": 1}) for n in range(50)))) == 100


@pytest.mark.parametrize(
    "after",
    [
        lambda n, size: [f"step_numbr_{n}_{m}" for m in range(20)],  # misspelt
        lambda n, size: [f"step_number_{m}" for m in range(size) if m != n],  # all wait for all
        lambda n, size: [f"step_number_{m}" for m in range(n + 1, size)],  # all stand in the wrong order
    ],
)
def test_a_wrong_plan_does_not_take_much_longer_to_check_than_a_right_one(after: Callable[[int, int], list[str]]) -> None:
    """A model writes it, and every run of the worker waits."""

    def checked_s(after: Callable[[int, int], list[str]]) -> float:
        size = 150
        steps = [{"name": f"step_number_{n}", "tool": "look", "after": after(n, size)} for n in range(size)]
        begun_s = time.process_time()
        with suppress(InvalidPlan):
            sound({"name": "p", "steps": steps}, {"look": look})
        return time.process_time() - begun_s

    right_s = checked_s(lambda n, size: [f"step_number_{m}" for m in range(n)])
    assert checked_s(after) < 20 * right_s + 1.0


def test_steps_that_wait_for_each_other_are_told_with_one_circle_however_many_there_are() -> None:
    names = [f"s{n}" for n in range(30)]
    told = problems(*(Step(name, look, after=[other for other in names if other != name]) for name in names))
    assert told == ("the steps s0 → s1 → s0 wait for each other",)


def test_two_circles_apart_are_two_problems_and_a_forward_reference_between_them_is_one_too() -> None:
    assert problems(
        Step("a", look, after=["b"]), Step("b", look, after=["a", "c"]), Step("c", look, after=["d"]), Step("d", look, after=["c"])
    ) == (
        "the steps a → b → a wait for each other",
        "step b: after names 'c': step c stands after it; move c up",
        "the steps c → d → c wait for each other",
    )


def test_problems_come_in_the_order_of_the_steps_and_without_what_only_follows_from_them() -> None:
    assert problems(
        Step("a", look, {"at": ref("c")}),
        Step("b c", act, {"order": "o", "colour": 1}),
        Step("c", act, {"order": param("n"), "cents": {1: 2}}),
        Step("d", print),  # type: ignore[arg-type]
        "no step",
        Step("e", look, {"at": [ref("b c"), param("m")]}, after=["nope"]),
        params={"n": "whole"},
    ) == (
        "the parameter n: {'type': 'whole'} is no type; one of string, integer, number, boolean, array, object, any, with a default or without",
        "step a: ref('c'): step c stands after it; move c up",
        "step 2 is called 'b c'; a name is up to 64 letters, digits, _ and -",
        "step b c: tool act: the argument colour is unknown; it takes order, cents",
        "step c: the key 1 is of type int; keys must be strings",
        "step d: <built-in function print> is neither a tool nor an agent; decorate the function with @tool",
        "step 5 is 'no step'; write Step(name, tool, {…})",
        "step e: param('m'): the plan has no such parameter; it has n",
        "step e: after names 'nope': there is no step 'nope'",
    )


def test_steps_that_wait_for_each_other_are_told_where_the_first_of_them_stands() -> None:
    told = problems(Step("a", look, {"x": 1}), Step("b", look, after=["c"]), Step("c", look, after=["b"]), Step("d", look, {"x": 1}))
    assert [one.partition(":")[0] for one in told] == ["step a", "the steps b → c → b wait for each other", "step d"]


def test_data_in_python_stays_data_whatever_its_keys_are_called() -> None:
    @tool(effect="read")
    async def fetch(ref: Any) -> Any:
        return ref

    for data in ({"ref": ["a"]}, {"param": "x"}, {"$data": {"ref": 1}}, {"ref": {"ref": {"param": ref("a")}}}):
        plan = Plan("p", [Step("a", look, {"at": 7}), Step("b", fetch, {"ref": data}), Step("c", look, {"at": data})])

        async def main(plan: Plan = plan) -> Any:
            async with perdure(None, [plan]) as app:
                return await app.run(plan)

        expected = resolve(data, lambda _: 7)
        assert run(main()) == {"a": 7, "b": expected, "c": expected}


def test_two_tools_of_one_name_are_refused() -> None:
    def made() -> Any:
        @tool(name="same")
        async def one() -> None: ...

        return one

    assert problems(Step("a", made()), Step("b", made())) == (
        "step b: another tool of this plan is called same too; give one of them a name= of its own",
    )


@pytest.mark.parametrize("path", [(True,), (-1,), (1.5,), (None,), tuple("x" * 51)])
def test_a_way_into_a_value_is_made_of_names_and_places(path: tuple[Any, ...]) -> None:
    with pytest.raises(InvalidInput):
        ref("a", *path)


# -- references, with any data
# ------------------------------------------------------------------------------------------
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
KEYS = st.text() | st.sampled_from(["$ref", "$param", "$$ref", "$", "$$", "ref", "param", "$data"])
DATA = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4), max_leaves=20)
PATHS = st.lists(st.text() | st.integers(0, 3), max_size=4)


@given(DATA)
def test_any_data_survives_being_written_down_and_is_never_a_reference(data: Any) -> None:
    try:
        encoded = codec.encode(data)
    except InvalidInput:
        return  # surrogates that no JSON can hold
    form = codec.decode(codec.encode(written(data)))
    assert codec.encode(resolve(read(form), lambda _: pytest.fail("there is no reference in it"))) == encoded


@given(DATA, PATHS)
def test_a_reference_gives_exactly_what_is_there_or_an_error(data: Any, path: list[Any]) -> None:
    expected, there = data, True
    for key in path:
        if (isinstance(expected, dict) and isinstance(key, str) and key in expected) or (
            isinstance(expected, list) and isinstance(key, int) and key < len(expected)
        ):
            expected = cast(Any, expected)[key]
        else:
            there = False
            break
    of = ref("a", *path)
    if there:
        assert found(of, lambda _: data) is expected
        assert resolve(read(written({"x": [of]})), lambda _: data) == {"x": [expected]}
    else:
        with pytest.raises(InvalidInput, match="there is no"):
            found(of, lambda _: data)


# -- order, with any plan
# -----------------------------------------------------------------------------------------------
@st.composite
def shapes(draw: st.DrawFn) -> list[tuple[set[int], set[int]]]:
    """For each step: the earlier steps that it refers to, and the steps that it comes after."""
    count = draw(st.integers(1, 8))
    return [
        (draw(st.sets(st.integers(0, n - 1), max_size=3)) if n else set(), draw(st.sets(st.integers(0, n - 1), max_size=2)) if n else set())
        for n in range(count)
    ]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(shapes(), st.booleans(), st.randoms(use_true_random=False))
def test_no_step_begins_before_what_it_waits_for_has_ended(shape: list[tuple[set[int], set[int]]], parallel: bool, chance: Any) -> None:
    log: list[tuple[str, int]] = []
    pauses = [chance.randint(0, 3) for _ in shape]

    @tool(effect="once")
    async def work(n: int, needs: list[int]) -> int:
        log.append(("begun", n))
        for _ in range(pauses[n]):
            await asyncio.sleep(0)
        log.append(("ended", n))
        return n

    steps = [
        Step(
            f"s{n}", work, {"n": n, "needs": [ref(f"s{other}") for other in sorted(needs)]}, after=[f"s{other}" for other in sorted(after)]
        )
        for n, (needs, after) in enumerate(shape)
    ]
    plan = Plan("p", steps, parallel=parallel)

    async def main() -> None:
        async with perdure(None, [plan]) as app:
            assert await app.run(plan) == {f"s{n}": n for n in range(len(shape))}

    run(main())
    assert len(log) == 2 * len(shape)
    for n, (needs, after) in enumerate(shape):
        waits_for = needs | after | (set(range(n)) if not parallel else set())
        for other in waits_for:
            assert log.index(("ended", other)) < log.index(("begun", n)), (shape, log)


@given(st.dictionaries(st.sampled_from("abcdef"), st.lists(st.sampled_from("abcdef"), max_size=3), max_size=6))
def test_a_circle_is_found_whenever_there_is_one(edges: dict[str, list[str]]) -> None:
    left = {name: {other for other in others if other in edges and other != name} for name, others in edges.items()}
    while free := [name for name, others in left.items() if not others]:
        for name in free:
            del left[name]
        for others in left.values():
            others.difference_update(free)
    rounds = circles(edges)
    assert bool(rounds) == bool(left)
    for circle in rounds:
        assert circle[0] == circle[-1]
        assert len(circle) > 2
        assert all(other in edges[one] for one, other in pairwise(circle))
