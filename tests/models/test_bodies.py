"""Requests to models.

The provider accepts every conversation, and the same conversation always gives the same request.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.models.adapters import APIS, LOOKUP, Api, every_api, model_for
from tests.servers import provider_rules as rules

from perdure.models import Assistant, Message, Request, ToolResult, ToolSpec, ToolUse, User
from perdure.models.messages import check

RULES = {"anthropic": rules.anthropic_error, "chat": rules.chat_error, "responses": rules.responses_error}
USE = ToolUse("toolu_1", "lookup", {"order": "o-1"})
RESULT = ToolResult("toolu_1", "lookup", "sent")


def body(api: Api, *messages: Message, **more: Any) -> dict[str, Any]:
    """The body of the request, which the provider takes."""
    check(messages)
    sent = model_for(api).body(Request("m-1", messages, **more))
    assert RULES[api]({**sent, "stream": True}) is None, RULES[api]({**sent, "stream": True})
    return sent


def test_a_request_to_anthropic() -> None:
    sent = body("anthropic", User("hi"), system="Be kind.", tools=(LOOKUP,), choice="lookup", max_tokens=100, temperature=0.5)
    assert sent == {
        "model": "m-1",
        "max_tokens": 100,
        "system": "Be kind.",
        "temperature": 0.5,
        "tools": [{"name": "lookup", "description": "Look an order up.", "input_schema": LOOKUP.schema}],
        "tool_choice": {"type": "tool", "name": "lookup"},
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
    }


def test_a_request_to_chat_completions() -> None:
    sent = body("chat", User("hi"), system="Be kind.", tools=(LOOKUP,), choice="any", max_tokens=100)
    assert sent == {
        "model": "m-1",
        "stream_options": {"include_usage": True},
        "max_completion_tokens": 100,
        "tools": [{"type": "function", "function": {"name": "lookup", "description": LOOKUP.description, "parameters": LOOKUP.schema}}],
        "tool_choice": "required",
        "messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "hi"}],
    }


def test_a_request_to_responses() -> None:
    sent = body("responses", User("hi"), system="Be kind.", tools=(LOOKUP,), choice="lookup", max_tokens=100)
    assert sent == {
        "model": "m-1",
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "instructions": "Be kind.",
        "max_output_tokens": 100,
        "tools": [{"type": "function", "name": "lookup", "description": LOOKUP.description, "parameters": LOOKUP.schema, "strict": False}],
        "tool_choice": {"type": "function", "name": "lookup"},
        "input": [{"role": "user", "content": "hi"}],
    }


def test_a_model_without_thoughts_is_not_asked_for_them() -> None:
    assert "include" not in model_for("responses").body(Request("gpt-4o-mini", (User("hi"),)))


def test_anthropic_gets_8192_tokens_unless_it_is_said() -> None:
    assert body("anthropic", User("hi"))["max_tokens"] == 8192


@every_api
def test_options_go_along_as_they_are_and_have_the_last_word(api: Api) -> None:
    sent = body(api, User("hi"), options={"top_p": 0.3, "model": "m-2"})
    assert (sent["top_p"], sent["model"]) == (0.3, "m-2")


def test_results_and_words_behind_them_are_one_turn_for_anthropic() -> None:
    second = ToolUse("toolu_2", "lookup", {"order": "o-2"})
    failed = ToolResult("toolu_2", "lookup", "no such order", error=True)
    sent = body("anthropic", User("one"), User("two"), Assistant("Looking.", (USE, second)), RESULT, failed, User("well?"))
    assert sent["messages"] == [
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "Looking."},
                {"type": "tool_use", "id": "toolu_1", "name": "lookup", "input": {"order": "o-1"}},
                {"type": "tool_use", "id": "toolu_2", "name": "lookup", "input": {"order": "o-2"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": "sent"},
                {"type": "tool_result", "tool_use_id": "toolu_2", "content": "no such order", "is_error": True},
                {"type": "text", "text": "well?"},
            ],
        },
    ]


ODD: dict[str, tuple[Message, ...]] = {
    "nothing said": (User(""),),
    "only spaces": (User("hi"), Assistant("  \n"), User(" ")),
    "an empty answer": (User("hi"), Assistant(), User("well?")),
    "the model begins": (Assistant("Hello."), User("hi")),
    "the model has the last word, with a space": (User("hi"), Assistant("So ")),
    "the model alone": (Assistant(""),),
    "arguments that are no JSON": (User("hi"), Assistant("", (ToolUse("a", "lookup", '{"order": '),)), ToolResult("a", "lookup", "bad")),
    "an empty result": (User("hi"), Assistant("", (USE,)), ToolResult("toolu_1", "lookup", "")),
    "an odd id": (User("hi"), Assistant("", (ToolUse("a b:c/é", "lookup", {}),)), ToolResult("a b:c/é", "lookup", "x")),
    "a long id": (User("hi"), Assistant("", (ToolUse("a" * 300, "lookup", {}),)), ToolResult("a" * 300, "lookup", "x")),
    "an id twice": (User("hi"), *(message for _ in range(3) for message in (Assistant("", (USE,)), RESULT))),
    "an id that is made up here": (
        *(User("hi"), Assistant("", (ToolUse("use_3_0", "lookup", {}),)), ToolResult("use_3_0", "lookup", "x")),
        *(Assistant("", (ToolUse("use_3_0", "lookup", {}),)), ToolResult("use_3_0", "lookup", "x")),
    ),
    "a tool that nobody knows": (User("hi"), Assistant("", (ToolUse("a", "no such tool!", {}),)), ToolResult("a", "no such tool!", "x")),
    "a tool without a name": (User("hi"), Assistant("", (ToolUse("a", "", {}),)), ToolResult("a", "", "x")),
    "lone surrogates": (
        User("a\ud800b"),
        Assistant("c\udfff", (ToolUse("a", "lookup", {"\udc00": ["\ud800"]}),)),
        ToolResult("a", "x", "\ud900"),
    ),
    "NUL and a BOM": (User("a\0b\ufeff"),),
    "another provider's thoughts": (User("hi"), Assistant("x", (USE,), {"elsewhere": [{"type": "thinking"}, 1, "use"]}), RESULT),
    "thoughts that do not fit any more": (
        *(User("hi"), Assistant("edited", (), {"anthropic": [{"type": "thinking"}, 3], "openai": [{"type": "reasoning"}, 3]})),
        User("well?"),
    ),
    "no layout at all": (User("hi"), Assistant("x", (USE,), ["what is", 5]), RESULT),
}


@pytest.mark.parametrize("name", ODD)
@every_api
def test_whatever_stands_in_a_conversation_the_provider_takes_it(api: Api, name: str) -> None:
    sent = body(api, *ODD[name], tools=(LOOKUP,))
    json.dumps(sent, ensure_ascii=False).encode()  # no lone surrogate is left
    assert sent == body(api, *ODD[name], tools=(LOOKUP,))


@every_api
def test_names_with_dots_are_sent_as_the_provider_takes_them_and_stay_apart(api: Api) -> None:
    tools = [ToolSpec(name, "", {"type": "object", "properties": {}}) for name in ("a.b", "a_b", "a-b", "x" * 80 + "1", "x" * 80 + "2")]
    sent = body(api, User("hi"), tools=tuple(tools), choice="a_b")
    names = [(tool.get("function") or tool)["name"] for tool in sent["tools"]]
    assert names[:3] == ["a_b", "a_b_2", "a-b"]
    assert len(set(names)) == 5
    choice = sent["tool_choice"]
    assert (choice.get("function") or choice)["name"] == "a_b_2"


def test_the_earlier_part_of_a_conversation_is_sent_the_same_however_it_goes_on() -> None:
    """A provider's cache knows the beginning of a request by its bytes."""
    whole = (User("hi"), Assistant("", (USE,)), RESULT, Assistant("", (USE,)), RESULT, Assistant("done"), User("and now?"), Assistant("x"))
    for api in APIS:
        field = "input" if api == "responses" else "messages"
        longer = model_for(api).body(Request("m", whole))[field]
        for length in (1, 3, 5, 7):
            shorter = model_for(api).body(Request("m", whole[:length]))[field]
            assert longer[: len(shorter)] == shorter, (api, length)
