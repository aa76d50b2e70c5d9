"""Tests of the local provider.

It refuses what the real providers refuse, its ledger is true, and it outlives its clients.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from typing import Any

import pytest
from tests.servers.provider_rules import anthropic_error, chat_error, responses_error
from tests.servers.providers import Provider, say, use

TOOL = {"name": "t", "input_schema": {"type": "object"}}
HI = {"role": "user", "content": "hi"}
CALL = {"type": "tool_use", "id": "a", "name": "t", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "a", "content": "x"}


def anthropic(*messages: Any, **more: Any) -> str | None:
    return anthropic_error({"model": "m", "max_tokens": 1, "messages": list(messages), **more})


def by(role: str, *blocks: Any) -> dict[str, Any]:
    return {"role": role, "content": list(blocks)}


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


def test_valid_requests_to_anthropic_are_taken() -> None:
    assert anthropic(HI) is None
    assert anthropic(HI, HI, by("assistant", CALL), by("user", RESULT, text("and?")), tools=[TOOL], tool_choice={"type": "any"}) is None


@pytest.mark.parametrize(
    ("words", "messages", "more"),
    [
        ("at least one message", (), {}),
        ("first message must use the", (by("assistant", text("x")),), {}),
        ("Extra inputs are not permitted", (HI,), {"surprise": 1}),
        ("greater than or equal to 1", (HI,), {"max_tokens": 0}),
        ("non-empty content", (HI, by("assistant"), HI), {}),
        ("non-whitespace text", (by("user", text(" ")),), {}),
        ("without `tool_result` blocks", (HI, by("assistant", CALL)), {}),
        ("without `tool_result` blocks", (HI, by("assistant", CALL), HI), {}),
        ("without `tool_result` blocks", (HI, by("assistant", CALL), by("user", text("x"), RESULT)), {}),
        ("unexpected `tool_use_id`", (by("user", RESULT),), {}),
        ("unexpected `tool_use_id`", (HI, by("assistant", CALL), by("user", RESULT, RESULT)), {}),
        ("ids must be unique", (HI, by("assistant", CALL, CALL), by("user", RESULT)), {}),
        ("ids must be unique", (HI, *(by("assistant", CALL), by("user", RESULT)) * 2), {}),
        ("valid dictionary", (HI, by("assistant", CALL | {"input": "{}"}), by("user", RESULT)), {}),
        ("should match pattern", (HI, by("assistant", CALL | {"id": "a b"}), by("user", RESULT | {"tool_use_id": "a b"})), {}),
        ("Invalid `signature`", (HI, by("assistant", {"type": "thinking", "thinking": "x", "signature": "y"}, text("z")), HI), {}),
        ("does not match any of the expected tags", (by("user", CALL),), {}),
        ("String should match pattern", (HI,), {"tools": [TOOL | {"name": "a.b"}]}),
        ("names must be unique", (HI,), {"tools": [TOOL, TOOL]}),
        ("input_schema.type", (HI,), {"tools": [{"name": "t", "input_schema": {}}]}),
        ("not found in provided tools", (HI,), {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "u"}}),
    ],
)
def test_what_anthropic_refuses(words: str, messages: tuple[Any, ...], more: dict[str, Any]) -> None:
    assert words in (anthropic(*messages, **more) or "taken")


CHAT_CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "a", "type": "function", "function": {"name": "t", "arguments": "{}"}}],
}
CHAT_RESULT = {"role": "tool", "tool_call_id": "a", "content": "x"}


@pytest.mark.parametrize(
    ("words", "messages", "more"),
    [
        ("taken", (HI, CHAT_CALL, CHAT_RESULT, HI), {}),
        ("empty array", (), {}),
        ("Unrecognized request argument", (HI,), {"surprise": 1}),
        ("did not have response messages: a", (HI, CHAT_CALL), {}),
        ("did not have response messages: a", (HI, CHAT_CALL, HI), {}),
        ("must be a response to a preceeding message", (HI, CHAT_RESULT), {}),
        ("must be a response to a preceeding message", (HI, CHAT_CALL, CHAT_RESULT, CHAT_RESULT), {}),
        ("got null", (HI, {"role": "assistant", "content": None}), {}),
        ("too short", (HI, {"role": "assistant", "content": "x", "tool_calls": []}), {}),
        ("Supported values", ({"role": "robot", "content": "x"},), {}),
        ("does not match pattern", (HI,), {"tools": [{"type": "function", "function": {"name": "a.b", "parameters": {"type": "object"}}}]}),
        ("schema must be", (HI,), {"tools": [{"type": "function", "function": {"name": "t", "parameters": {}}}]}),
        ("only allowed when 'stream'", (HI,), {"stream_options": {}}),
    ],
)
def test_what_chat_completions_refuse(words: str, messages: tuple[Any, ...], more: dict[str, Any]) -> None:
    assert words in (chat_error({"model": "m", "messages": list(messages), **more}) or "taken")


ITEM = {"type": "function_call", "call_id": "a", "name": "t", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "a", "output": "x"}
THOUGHT = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "made up"}


@pytest.mark.parametrize(
    ("words", "items"),
    [
        ("taken", (HI, ITEM, OUTPUT, HI)),
        ("No tool output found for function call a", (HI, ITEM)),
        ("No tool output found for function call a", (HI, ITEM, HI, OUTPUT)),
        ("No tool call found", (HI, OUTPUT)),
        ("unique string", (HI, ITEM, OUTPUT, ITEM, OUTPUT)),
        ("not persisted", (HI, THOUGHT, ITEM, OUTPUT)),
        ("empty", ({"role": "user", "content": ""},)),
    ],
)
def test_what_responses_refuse(words: str, items: tuple[Any, ...]) -> None:
    assert words in (responses_error({"model": "m", "input": list(items), "store": False}) or "taken")


def post(provider: Provider, body: Any, **headers: str) -> tuple[int, Any]:
    request = urllib.request.Request(f"{provider.url}/v1/messages", json.dumps(body).encode(), {"x-api-key": provider.key, **headers})
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


def asked(*messages: Any) -> dict[str, Any]:
    return {"model": "m", "max_tokens": 1, "messages": list(messages)}


def test_the_place_in_the_script_is_read_from_the_request(provider: Provider) -> None:
    provider.script(["first", "second"])
    provider.script([say("for Ann", use("t"))], when="Ann")
    later = asked(HI, by("assistant", text("first")), HI)
    assert [
        post(provider, body)[1]["content"][0]["text"] for body in (later, asked(HI), later, asked({"role": "user", "content": "I am Ann"}))
    ] == [
        *("second", "first", "second", "for Ann"),
    ]
    status, refused = post(provider, asked(HI, by("assistant", text("first")), HI, by("assistant", text("second")), HI))
    assert (status, refused["error"]["message"]) == (400, "the script has 2 turns, and is asked for number 3")


def test_the_ledger_says_what_was_asked_and_what_was_charged(provider: Provider) -> None:
    provider.script([say("yes", cached=5)])
    provider.fault("529", nth=2)
    provider.fault("answer", when="odd", turn=say("odd indeed"))
    answers = [
        post(provider, body, **{"Idempotency-Key": "k"}) for body in (asked(HI), asked(HI), asked({"role": "user", "content": "odd"}), {})
    ]
    assert [status for status, _ in answers] == [200, 529, 200, 400]
    lines = provider.requests()
    assert [(line.number, line.status, line.injected, line.complete, line.key) for line in lines] == [
        *((1, 200, None, True, "k"), (2, 529, "529", True, "k"), (3, 200, "answer", True, "k"), (4, 400, None, True, "k")),
    ]
    usage = answers[0][1]["usage"]
    assert lines[0].tokens == {
        "input": usage["input_tokens"] + 5,
        "output": usage["output_tokens"],
        "cached": 5,
        "stored": 0,
    }
    assert [line.tokens["input"] > 0 for line in lines] == [True, False, True, False]
    assert lines[0].digest == lines[1].digest != lines[2].digest


def test_a_client_that_is_killed_is_noticed_and_the_provider_lives_on(provider: Provider) -> None:
    provider.script(["yes"])
    provider.fault("hold")
    code = f"import urllib.request as u; u.urlopen(u.Request({provider.url + '/v1/messages'!r}, {json.dumps(asked(HI)).encode()!r}, {{'x-api-key': {provider.key!r}}}))"
    client = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    provider.wait_for(arrived=1, held=1)
    client.kill()
    client.wait()
    assert [(line.complete, line.status) for line in provider.requests()] == [(False, None)]
    assert post(provider, asked(HI))[0] == 200


def test_it_ends_with_the_process_that_started_it() -> None:
    script = "import os, time; from tests.servers.providers import Provider; p = Provider(); print(p.pid, p.folder, flush=True); os.kill(os.getpid(), 9)"
    started = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, timeout=60, check=False)
    assert started.returncode == -signal.SIGKILL
    deadline = time.monotonic() + 60
    pid, folder = started.stdout.split()
    while _lives(int(pid)):
        assert time.monotonic() < deadline, "it has outlived its test"
        time.sleep(0.02)
    assert not os.path.exists(folder)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
