"""Answers with a type: what the model sees, what is accepted, and what the model is told about a wrong answer."""

from __future__ import annotations

import dataclasses
import json
import uuid
from datetime import date
from typing import Any, TypedDict

import msgspec
import pydantic
import pytest
from tests.unit.approval_tools import check_replay
from tests.unit.drive_tools import perdure, run, until
from tests.unit.react_tools import ByTurn, Model, add, app_of, ended, texts, wants

from perdure import Perdure, ReAct
from perdure.models import Answer, ToolResult


class Person(pydantic.BaseModel):
    name: str
    born: date


@dataclasses.dataclass
class Point:
    x: int
    y: int = 0


class Pair(TypedDict):
    left: int
    right: int


class Leaf(msgspec.Struct):
    value: int
    below: list[Leaf] = []


class Tree(pydantic.BaseModel):
    value: int
    below: list[Tree] = []


def of(output: Any, model: Model, **more: Any) -> tuple[Any, ReAct]:
    """The result of a run for a caller, and again from the journal alone."""
    agent = ReAct("typed", model=model, tools=[add], output=output, **more)

    async def main() -> Any:
        async with app_of(None, agent) as app:
            result = await app.run(agent, "go", id="r")
            check_replay(app, agent)
            assert await app.handle("r").result() == result
            return result

    return run(main()), agent


@pytest.mark.parametrize(
    ("output", "arguments", "expected"),
    [
        (Person, {"name": "Ann", "born": "1980-01-02"}, Person(name="Ann", born=date(1980, 1, 2))),
        (Point, {"x": "3"}, Point(3)),
        (Pair, {"left": 1, "right": 2}, {"left": 1, "right": 2}),
        (Leaf, {"value": 1, "below": [{"value": 2}]}, Leaf(1, [Leaf(2)])),
        (Tree, {"value": 1, "below": [{"value": 2}]}, Tree(value=1, below=[Tree(value=2)])),
        (dict[str, int], {"a": 1}, {"a": 1}),
        (list[Point], {"answer": [{"x": 1, "y": 2}]}, [Point(1, 2)]),
        (list[Leaf], {"answer": [{"value": 1}]}, [Leaf(1)]),
        (int, {"answer": 5}, 5),
        (bool, {"answer": False}, False),
        (Point | None, {"answer": None}, None),
    ],
)
def test_the_answer_comes_as_a_value_of_its_type(output, arguments, expected):
    model = ByTurn([wants(("final_answer", arguments))])
    result, _ = of(output, model)
    assert result == expected
    assert type(result) is type(expected)
    spec = model.asked[0].tools[-1]
    assert spec.name == "final_answer"
    assert spec.schema["type"] == "object"
    assert set(arguments) <= set(spec.schema.get("properties", arguments))


@pytest.mark.parametrize("text", ['{"x": 1, "y": 2}', '```json\n{"x": 1, "y": 2}\n```', '  {"x":1,"y":2}\n'])
def test_words_that_are_json_of_the_type_are_taken_too(text):
    assert of(Point, ByTurn([text]))[0] == Point(1, 2)


def test_what_does_not_fit_is_told_with_every_error_and_asked_for_again():
    model = ByTurn(
        [
            wants(("final_answer", {"born": "soon"})),
            "in words",
            wants(("final_answer", '{"na')),
            wants(("final_answer", {"name": "A", "born": "2000-01-01"})),
        ]
    )
    result, _ = of(Person, model)
    assert result == Person(name="A", born=date(2000, 1, 1))
    told = texts(model.asked[-1].messages)
    assert told[2].startswith("tool! This is not the answer that is wanted: name: Field required; born: Input should be a valid date")
    assert told[4].startswith("user This is not the answer that is wanted: the answer is words, and not JSON")
    assert told[6] == "tool! This is not the answer that is wanted: the arguments are not a JSON object"


def test_the_fourth_answer_that_does_not_fit_fails_the_run():
    model = ByTurn([wants(("final_answer", {"x": "many"}))] * 9)
    agent = ReAct("typed", model=model, output=Point)

    async def main() -> Any:
        async with app_of(None, agent) as app:
            row = await ended(app, agent, "go")
            check_replay(app, agent)
            return row, await app.transcript("r")

    row, conversation = run(main())
    assert row.status == "failed"
    assert str(row.error).startswith("OutputInvalid: agent typed: 4 answers were not of the type that is wanted; of the last one: x: ")
    assert len(model.asked) == 4
    assert conversation[-1]["error"]


def test_a_final_answer_beside_other_tools_waits_until_their_results_are_seen():
    model = ByTurn([wants(("add", {"a": 1}), ("final_answer", {"x": 1})), wants(("final_answer", {"x": 2}))])
    assert of(Point, model)[0] == Point(2)
    added, early = (message for message in model.asked[-1].messages if isinstance(message, ToolResult))
    assert (added.text, early.error) == ("2", True)
    assert "give the final answer alone" in early.text


def test_a_message_that_has_arrived_by_then_goes_before_the_end():
    class Late(ByTurn):
        async def answer(self, request: Any, call: Any) -> Answer:
            if not self.asked:
                await app.signal("r", "message", "no, the other one")
                await until(lambda: any(event.type == "signal_received" for event in app.store.read("r")))
            return await super().answer(request, call)

    model = Late([wants(("final_answer", {"x": 1})), wants(("final_answer", {"x": 2}))])
    agent = ReAct("typed", model=model, output=Point)

    app: Perdure = None  # type: ignore[assignment]

    async def main() -> Any:
        nonlocal app
        async with perdure(None, [agent]) as app:
            return await app.run(agent, "go", id="r")

    assert run(main()) == Point(2)
    assert texts(model.asked[-1].messages)[1:] == [
        "assistant  →final_answer",
        "tool Taken as the final answer.",
        "user no, the other one",
    ]


class Stamped(pydantic.BaseModel):
    name: str
    id: uuid.UUID = pydantic.Field(default_factory=uuid.uuid4)


def test_a_default_that_is_new_each_time_does_not_make_a_replay_differ():
    agent = ReAct("typed", model=ByTurn([wants(("final_answer", {"name": "a"}))]), output=Stamped)

    async def main() -> Any:
        async with app_of(None, agent) as app:
            result = await app.run(agent, "go", id="r")
            check_replay(app, agent)
            return result

    assert run(main()).name == "a"


def test_whoever_does_not_know_the_type_gets_plain_json(tmp_path):
    agent = ReAct("typed", model=ByTurn([wants(("final_answer", {"name": "Ann", "born": "1980-01-02"}))]), output=Person)
    other = ReAct("other", model=ByTurn([]))

    async def main() -> Any:
        async with app_of(tmp_path / "j.db", agent) as app:
            await app.run(agent, "go", id="r")
        async with app_of(tmp_path / "j.db", other) as app:
            return await app.handle("r").result()

    assert run(main()) == {"name": "Ann", "born": "1980-01-02"}


def test_a_typed_agent_is_a_tool_whose_answer_is_told_as_json():
    inner = ReAct("inner", model=ByTurn([wants(("final_answer", {"x": 1}))]), output=Point)
    model = Model([wants(("inner", {"prompt": "where?"})), "ok"])
    outer = ReAct("outer", model=model, tools=[inner])

    async def main() -> None:
        async with app_of(None, outer, inner) as app:
            await app.run(outer, "go", id="r")
            check_replay(app, outer)

    run(main())
    assert json.loads(model.told[0]) == {"x": 1, "y": 0}
