"""Plans in files: which files are accepted, and which are refused with which message."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.unit.drive_tools import perdure, run

from perdure import Approval, InvalidInput, InvalidPlan, NotFound, Plan, Step, param, ref, tool


@tool(effect="once")
async def act(order: str, cents: int = 1) -> dict[str, Any]:
    return {"order": order, "cents": cents}


@tool(effect="read")
async def look(at: Any = None) -> Any:
    return at


TOOLS = [act, look]


def load(folder: Path, text: str | bytes, name: str = "plan.toml") -> Plan:
    file = folder / name
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    return Plan.from_file(file, TOOLS)


def test_a_file_and_python_can_say_the_same_plan_whatever_the_layout(tmp_path: Path) -> None:
    from_file = load(
        tmp_path,
        """
        name = "p"
        parallel = true
        [params]
        n = "integer"
        [[steps]]
        name = "a"
        tool = "act"
        args = { order = "o", cents = { "$param" = "n" } }
        on_failure = "stop"
        [[steps]]
        name = "b"
        tool = "look"
        args.at = [{ x = { "$ref" = ["a", "order"] }, "$$ref" = ["data"] }]
        when = { ref = ["a", "cents"], at_least = 3 }
        approval = { by = "ann", expires = 60 }
        after = "a"
        on_failure = "ask"
        """,
    )
    in_python = Plan(
        "p",
        [
            Step("a", act, {"order": "o", "cents": param("n")}),
            Step(
                "b",
                look,
                {"at": [{"x": ref("a", "order"), "$ref": ["data"]}]},
                when=ref("a", "cents") >= 3,
                approval=Approval(by="ann", expires=60),
                after=["a"],
                on_failure="ask",
            ),
        ],
        params={"n": int},
    )
    assert from_file.document == in_python.document
    assert from_file.version == in_python.version
    # The recorded document can be used as a file.
    as_json = load(tmp_path, json.dumps(from_file.document), "plan.json")
    assert as_json.digest == from_file.digest


def test_a_plan_without_a_name_has_that_of_its_file_and_may_pin_its_version(tmp_path: Path) -> None:
    plan = load(tmp_path, 'version = "7"\n[[steps]]\nname = "a"\ntool = "look"\n', "tidy_up.toml")
    assert (plan.name, plan.version) == ("tidy_up", "7")
    assert "version" not in plan.document

    async def main() -> Any:
        async with perdure(None, [plan]) as app:
            return await app.run(plan)

    assert run(main()) == {"a": None}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("steps = [", r"plan\.toml is not valid TOML: .*end of document"),
        ("a = 1\nb = oops", r"plan\.toml is not valid TOML: .*line 2"),
        ("a = 1\na = 2", "not valid TOML: Cannot overwrite a value"),
        (b"\xff\xfe", "is not UTF-8 text: byte 0"),
        ("x = " + "[" * 5000 + "]" * 5000, "nested deeper than 200 levels"),
        ("x = " + "9" * 5000, "not valid TOML|digits"),
        ("x = nan\n[[steps]]\n", "JSON cannot hold"),
        ("version = 7\n[[steps]]\n", "version is a text"),
        ("#" * (4 * 1024 * 1024 + 1), "is larger than 4,194,304 bytes"),
    ],
)
def test_a_broken_file_is_told_with_its_name(tmp_path: Path, text: str | bytes, said: str) -> None:
    with pytest.raises(InvalidInput, match=said) as caught:
        load(tmp_path, text)
    assert "plan.toml" in str(caught.value)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"steps": [}', "is not valid JSON"),
        ('{"steps": [], "steps": []}', "the key 'steps' occurs twice"),
        ("[" * 5000, "nested deeper|not valid JSON"),
        ("[]", r"a plan is an object with its steps, not \[\]"),
        ('{"n": NaN}', "NaN is not a number"),
    ],
)
def test_broken_json_is_told_with_its_name(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(InvalidInput, match=said) as caught:
        load(tmp_path, text, "plan.json")
    assert "plan.json" in str(caught.value)


def test_a_file_that_is_no_plan_by_its_name_or_not_there(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"ends in \.toml or \.json"):
        load(tmp_path, "", "plan.yaml")
    with pytest.raises(NotFound, match="there is no file"):
        Plan.from_file(tmp_path / "none.toml", TOOLS)
    (tmp_path / "folder.toml").mkdir()
    with pytest.raises(InvalidInput, match="cannot be read: Is a directory"):
        Plan.from_file(tmp_path / "folder.toml", TOOLS)


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ("", "it has no steps"),
        ("steps = 3", "it has no steps"),
        ("steps = [3]", "step 1 is 3, and not an object"),
        ("steps = [{}]", "step 1 is called None"),
        ('steps = [{name = "a"}]', "step a: it names no tool; there are act, look"),
        ('steps = [{name = "a", tool = "lok"}]', "step a: there is no tool 'lok', did you mean look?; there are act, look"),
        ('steps = [{name = "a", tool = ["x"]}]', "step a: there is no tool ['x']"),
        ('steps = [{name = "a", tool = "look", arg = {}}]', "step a: 'arg' is unknown, did you mean args?"),
        ('steps = [{name = "a", tool = "look", args = []}]', "args are the tool's arguments by name, not []"),
        ('step = [{name = "a"}]', "'step' is unknown, did you mean steps?"),
        ('steps = [{name = "a", tool = "look", args = {at = {"$ref" = "b"}}}]', "step a: ref('b'): there is no step 'b'"),
        ('steps = [{name = "a", tool = "look", args = {at = {"$ref" = 3}}}]', "$ref takes a list that begins with a name"),
        ('steps = [{name = "a", tool = "look", args = {at = {"$ref" = []}}}]', "$ref takes a list that begins with a name"),
        ('steps = [{name = "a", tool = "look", args = {at = {"$ref" = ["b"], x = 1}}}]', "nothing beside it"),
        ('steps = [{name = "a", tool = "look", args = {at = {"$env" = "HOME"}}}]', "for data whose key begins with $ write $$env"),
        ('steps = [{name = "a", tool = "look", args = {"$ref" = ["b"]}}]', "args are the tool's arguments by name"),
        ('steps = [{name = "a", tool = "look", when = {is = 1}}]', "is no condition"),
        ('steps = [{name = "a", tool = "look"}, {name = "b", tool = "look", when = {ref = "a", is = 1, above = 0}}]', "one comparison"),
        (
            'steps = [{name = "a", tool = "look"}, {name = "b", tool = "look", when = {ref = "a", like = 1}}]',
            "one comparison of is, is_not",
        ),
        ('steps = [{name = "a", tool = "look", approval = "yes"}]', "approval is true, or who and how"),
        ('steps = [{name = "a", tool = "look", approval = {who = "ann"}}]', "approval has no 'who'; it has by, quorum"),
        ('steps = [{name = "a", tool = "look", approval = {quorum = 0}}]', "Approval(quorum=0)"),
        ('steps = [{name = "a", tool = "look", after = [1]}]', "after is a list of names"),
        ('steps = [{name = "a", tool = "act", args = {order = "o", cents = "x"}}]', "step a: tool act: parameter cents"),
        ('parallel = "no"\nsteps = [{name = "a", tool = "look"}]', "parallel is true or false, not 'no'"),
        ("params = 3\nsteps = [{name = 'a', tool = 'look'}]", "params are at most 100"),
        ("name = 3\nsteps = [{name = 'a', tool = 'look'}]", "it has no name"),
        (
            'steps = [{name = "a", tool = "look", after = ["b"]}, {name = "b", tool = "look", args = {at = {"$ref" = ["a"]}}}]',
            "the steps a → b → a wait for each other",
        ),
    ],
)
def test_every_problem_names_the_file_the_step_and_the_rule(tmp_path: Path, steps: str, said: str) -> None:
    with pytest.raises(InvalidPlan) as caught:
        load(tmp_path, steps)
    assert any(said in problem for problem in caught.value.problems), caught.value.problems
    assert str(tmp_path / "plan.toml") in str(caught.value)


@pytest.mark.parametrize("key", ["ref", "param"])
@pytest.mark.parametrize(
    "args", ["at = { KEY = ['a', 'x'] }", "at = [1, { deep = { KEY = 'a' } }]", "at = { '$data' = { KEY = { KEY = 1 } } }"]
)
def test_a_reference_whose_dollar_was_forgotten_does_not_pass_for_data(tmp_path: Path, key: str, args: str) -> None:
    args = args.replace("KEY", key)
    with pytest.raises(InvalidPlan) as caught:
        load(tmp_path, f"steps = [{{name = 'a', tool = 'look'}}, {{name = 'b', tool = 'look', args = {{ {args} }}}}]")
    (problem,) = caught.value.problems
    assert problem.startswith("step b: ")
    assert f'did you mean "${key}"?' in problem
    assert f'data whose only key is {key} is written {{"$data": {{"{key}": …}}}}' in problem


def test_it_is_told_instead_of_what_the_tool_says_about_it(tmp_path: Path) -> None:
    with pytest.raises(InvalidPlan) as caught:
        load(tmp_path, "steps = [{name = 'a', tool = 'act', args = { order = 'o', cents = { ref = ['a'] } }}]")
    (problem,) = caught.value.problems
    assert 'did you mean "$ref"?' in problem


def test_data_with_a_lone_ref_has_a_way_to_be_written_and_an_argument_of_that_name_needs_none(tmp_path: Path) -> None:
    @tool(effect="read")
    async def fetch(ref: str) -> str:
        return ref

    data = "at = { '$data' = { ref = { '$ref' = ['a'] } } }"
    text = f"steps = [{{name = 'a', tool = 'fetch', args = {{ ref = 'main' }}}}, {{name = 'b', tool = 'look', args = {{ {data} }}}}]"
    (tmp_path / "p.toml").write_text(text)
    plan = Plan.from_file(tmp_path / "p.toml", [fetch, look])

    async def main() -> Any:
        async with perdure(None, [plan]) as app:
            return await app.run(plan)

    assert run(main()) == {"a": "main", "b": {"ref": "main"}}
    in_python = Plan("p", [Step("a", fetch, {"ref": "main"}), Step("b", look, {"at": {"ref": ref("a")}})])
    assert in_python.digest == plan.digest


def test_two_tools_of_one_name_are_refused_in_a_file_too(tmp_path: Path) -> None:
    @tool(name="look")
    async def other() -> None: ...

    (tmp_path / "p.toml").write_text('steps = [{name = "a", tool = "look"}]')
    with pytest.raises(InvalidInput, match="two different tools are called look"):
        Plan.from_file(tmp_path / "p.toml", [look, other])
