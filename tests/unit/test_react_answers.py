"""Any answer of a model: the provider accepts the next request, and only tools that the model asked for are called."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.unit.approval_tools import check_replay
from tests.unit.drive_tools import run
from tests.unit.react_tools import ByTurn, Model, add, app_of, ended, texts, wants

from perdure import Budget, ReAct, tool
from perdure.models import Answer, Assistant, Request, Tokens, ToolResult, ToolUse, User
from perdure.store.api import RunRow


def finished(model: Model, *, tools: list[Any] | None = None, **more: Any) -> RunRow:
    """The row of a run with this model. Its journal replays to the same end without a request."""
    agent = ReAct("agent", model=model, tools=[add] if tools is None else tools, **more)

    async def main() -> RunRow:
        async with app_of(None, agent) as app:
            row = await ended(app, agent, "go")
            asked = len(model.asked)
            check_replay(app, agent)
            assert len(model.asked) == asked
            return row

    return run(main())


def results(model: Model, at: int = -1) -> list[ToolResult]:
    return [message for message in model.asked[at].messages if isinstance(message, ToolResult)]


@pytest.mark.parametrize(
    ("name", "arguments", "why"),
    [
        ("nobody", {}, "nobody was not called: there is no tool of that name; there are add"),
        ("Add", {"a": 1}, "there is no tool of that name"),  # names are matched exactly
        ("add ", {"a": 1}, "there is no tool of that name"),
        ("", {}, "there is no tool of that name"),
        ("add", '{"a": 1', "add was not called: its arguments are not a JSON object: '{\"a\": 1'"),
        ("add", {}, "tool add: the argument a is missing; it takes a, b"),
        ("add", {"a": "many"}, "tool add, parameter a: "),
        ("add", {"a": 1, "c": 2}, "the argument c is unknown; it takes a, b"),
        ("add", {"a": 1, "self": 2}, "the argument self is unknown"),
        ("add", {"a": 1, "args": 2}, "the argument args is unknown"),
        ("add", {"a": [[]]}, "tool add, parameter a: "),
        ("add", {"a": 1, "\ud800": 2}, "is unknown"),
    ],
)
def test_what_cannot_be_called_is_answered_without_a_call(name, arguments, why):
    model = ByTurn([wants((name, arguments), ("add", {"a": 1})), "ok"])
    assert finished(model).status == "succeeded"
    wrong, right = results(model)
    assert wrong.error
    assert why in wrong.text
    assert (right.text, right.error) == ("2", False)


@pytest.mark.parametrize("ids", [("same", "same", "same"), ("", "", ""), ("x" * 300, "use_1", "ok")])
def test_ids_are_made_unique(ids):
    model = ByTurn([Answer("", tuple(ToolUse(ident, "add", {"a": at}) for at, ident in enumerate(ids)), raw={"ids": list(ids)}), "ok"])
    assert finished(model).status == "succeeded"
    said = model.asked[-1].messages[1]
    assert isinstance(said, Assistant)
    assert len({use.id for use in said.uses}) == 3
    assert all(0 < len(use.id) <= 256 for use in said.uses)
    assert said.raw is None  # it would give the provider other ids than the tool uses have
    assert [(one.id, one.text) for one in results(model)] == [(use.id, str(at + 1)) for at, use in enumerate(said.uses)]


def test_an_id_that_comes_again_in_a_later_answer_is_made_unique_too():
    model = ByTurn([wants(("add", {"a": 1})), wants(("add", {"a": 2})), "ok"])
    assert finished(model).status == "succeeded"
    ids = [use.id for message in model.asked[-1].messages if isinstance(message, Assistant) for use in message.uses]
    assert ids[0] == "u1"
    assert len(set(ids)) == 2


def test_what_is_sound_is_given_back_unchanged():
    said = Answer("hm", (ToolUse("call-1", "add", {"a": 1}),), raw={"signed": "thought"})
    model = ByTurn([said, "ok"])
    finished(model)
    assert model.asked[-1].messages[1] == said.message


def test_a_name_that_cannot_be_one_is_given_back_as_one_that_can():
    model = ByTurn([wants(("functions.add!", {"a": 1}), ("é" * 99, {})), "ok"])
    assert finished(model).status == "succeeded"
    assert [one.name for one in results(model)] == ["functions_add_", "_"]


def test_of_500_tools_in_one_answer_100_are_called():
    called: list[int] = []

    @tool(effect="read")
    async def note(n: int) -> int:
        called.append(n)
        return n

    model = ByTurn([Answer("", tuple(ToolUse(f"u{n}", "note", {"n": n}) for n in range(500))), "ok"])
    assert finished(model, tools=[note]).status == "succeeded"
    assert sorted(called) == list(range(100))
    assert len(results(model)) == 500
    assert results(model)[99].text == "99"
    assert results(model)[100].text == "note was not called: 100 tools in one answer are the most; this is one too many"


# --- no answer ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nothing", [Answer(), Answer("  \n"), Answer(stop="tools"), Answer(stop="length")])
def test_an_empty_answer_is_asked_for_again_and_has_no_place_in_the_conversation(nothing):
    model = ByTurn([nothing, nothing, nothing, "here"])
    assert finished(model).status == "succeeded"
    assert not any(isinstance(message, Assistant) for message in model.asked[-1].messages)
    assert len(model.asked) == 4


def test_after_four_empty_answers_in_a_row_the_run_fails():
    model = ByTurn([Answer()] * 9)
    row = finished(model)
    assert row.status == "failed"
    assert row.error == "NoAnswer: agent agent: the model was asked 4 times in a row, and its answer was empty"
    assert len(model.asked) == 4


def test_only_what_comes_in_a_row_counts():
    model = ByTurn([*(line for n in range(5) for line in (Answer(), wants(("add", {"a": n})))), "ok"])
    assert finished(model).status == "succeeded"


def test_of_an_answer_that_was_cut_off_nothing_is_called():
    model = ByTurn([Answer("I will", (ToolUse("u1", "add", {"a": 1}), ToolUse("u2", "add", '{"a"')), stop="length"), "ok"])
    assert finished(model).status == "succeeded"
    cut = "Your answer was cut off at the limit of tokens, and nothing came of it. Say it again, shorter."
    assert [(one.text, one.error) for one in results(model)] == [(cut, True)] * 2


def test_half_a_text_is_no_answer():
    model = ByTurn([Answer("The first half of", stop="length"), "all of it"])
    assert finished(model).status == "succeeded"
    assert texts(model.asked[-1].messages)[1] == "assistant The first half of"
    assert isinstance(model.asked[-1].messages[2], User)


def test_answers_that_are_cut_off_again_and_again_fail_the_run_with_the_way_out():
    row = finished(ByTurn([Answer("half", stop="length")] * 9))
    assert row.status == "failed"
    assert "raise max_tokens" in str(row.error)


def test_a_refusal_ends_the_run_and_nothing_of_it_is_called():
    model = ByTurn([Answer("I must not.", (ToolUse("u1", "add", {"a": 1}),), stop="refusal")])
    row = finished(model)
    assert row.status == "failed"
    assert row.error == "ModelRefused: model scripted will not answer this: I must not."


# --- odd figures ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [Tokens(), Tokens(input=-5, output=-1), Tokens(input=1, cached=99), Tokens(input=1 << 80)])
def test_usage_that_cannot_be_right_harms_nothing(tokens):
    assert finished(ByTurn([Answer("ok", tokens=tokens)]), budget=Budget(usd=1)).status == "succeeded"


def test_an_answer_in_two_hundred_levels_is_an_error_and_not_a_crash():
    deep: Any = 1
    for _ in range(150):
        deep = [deep]
    model = ByTurn([wants(("add", {"a": deep})), "ok"])
    assert finished(model).status == "succeeded"
    assert results(model)[0].error


@pytest.mark.parametrize(
    "odd",
    [
        Answer("x", (ToolUse(None, "add", {}),)),  # type: ignore[arg-type]
        Answer(None),  # type: ignore[arg-type]
        Answer("x", stop="weird"),  # type: ignore[arg-type]
        Answer("x", (ToolUse("1", "add", [1]),)),  # type: ignore[arg-type]
        Answer("x", (ToolUse("1", "add", {"a": float("nan")}),)),
        Answer("x", raw=object()),
    ],
)
def test_what_is_no_answer_fails_the_run_and_is_never_recorded_as_one(odd):
    row = finished(ByTurn([odd]))
    assert row.status == "failed"
    assert "ResultNotEncodable" in str(row.error)


def test_a_model_that_is_given_up_by_a_cancel_is_not_told_to_anybody():
    asked = asyncio.Event()

    class Slow(ByTurn):
        async def answer(self, request: Request, call: Any) -> Answer:
            asked.set()
            await asyncio.sleep(60)
            raise AssertionError("nobody waits for it")

    agent = ReAct("agent", model=Slow(["never"]))

    async def main() -> Any:
        async with app_of(None, agent) as app:
            await app.start(agent, "go", id="r")
            driving = asyncio.create_task(app.engine.drive("r"))
            await asked.wait()
            await app.cancel("r")
            row = await driving
            check_replay(app, agent)
            return row.status, await app.transcript("r")

    assert run(main()) == ("cancelled", [{"role": "user", "text": "go"}])
