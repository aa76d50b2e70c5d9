"""What the providers refuse, and with which words: Anthropic and OpenAI would accept a request that passes here.

Each `…_error` returns the message of the 400, or None. These rules are at least as strict as the providers: a
transcript that is valid here is valid there.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from typing import Any

_ANTHROPIC_FIELDS = frozenset(
    "model max_tokens messages system tools tool_choice stream temperature top_p top_k stop_sequences metadata thinking service_tier "
    "cache_control output_config container inference_geo speed".split()
)
_CHAT_FIELDS = frozenset(
    "model messages tools tool_choice stream stream_options temperature top_p max_tokens max_completion_tokens n stop seed user metadata "
    "store parallel_tool_calls response_format reasoning_effort frequency_penalty presence_penalty logit_bias logprobs service_tier "
    "verbosity prompt_cache_key safety_identifier".split()
)
_RESPONSES_FIELDS = frozenset(
    "model input instructions tools tool_choice stream stream_options temperature top_p max_output_tokens include store reasoning text "
    "metadata parallel_tool_calls previous_response_id truncation user service_tier prompt_cache_key safety_identifier".split()
)
_ID = re.compile(r"[a-zA-Z0-9_-]+")
_TOOL_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


def signature(thought: str) -> str:
    """What proves that a thought came from here."""
    return "sig" + hashlib.sha256(thought.encode()).hexdigest()


# -- Anthropic ------------------------------------------------------------------------------------------------------------
def anthropic_error(body: Any) -> str | None:
    return next(_anthropic_errors(body), None)


def _anthropic_errors(body: Any) -> Iterator[str]:
    if not isinstance(body, dict):
        yield "Input should be a valid dictionary"
        return
    for field in body.keys() - _ANTHROPIC_FIELDS:
        yield f"{field}: Extra inputs are not permitted"
    for field in ("model", "max_tokens", "messages"):
        if field not in body:
            yield f"{field}: Field required"
            return
    if not isinstance(body["max_tokens"], int) or body["max_tokens"] < 1:
        yield "max_tokens: Input should be greater than or equal to 1"
    if body.get("system") is not None and not _blocks(body["system"]):
        yield "system: text content blocks must be non-empty"
    temperature = body.get("temperature", 1.0)
    if not isinstance(temperature, (int, float)) or not 0 <= temperature <= 1:
        yield "temperature: range: 0..1"
    yield from _anthropic_tool_errors(body)
    yield from _anthropic_message_errors(body["messages"])


def _anthropic_tool_errors(body: dict[str, Any]) -> Iterator[str]:
    names = []
    for at, tool in enumerate(body.get("tools", [])):
        if not isinstance(tool, dict) or tool.keys() - {"name", "description", "input_schema", "cache_control", "strict", "type"}:
            yield f"tools.{at}.custom: Extra inputs are not permitted"
            continue
        if not isinstance(tool.get("name"), str) or not _TOOL_NAME.fullmatch(tool["name"]):
            yield f"tools.{at}.custom.name: String should match pattern '^[a-zA-Z0-9_-]{{1,64}}$'"
        if not isinstance(tool.get("input_schema"), dict) or tool["input_schema"].get("type") != "object":
            yield f"tools.{at}.custom.input_schema.type: Field required"
        names.append(tool.get("name"))
    if len(set(names)) != len(names):
        yield "tools: Tool names must be unique."
    choice = body.get("tool_choice")
    if choice is not None:
        if not names:
            yield "tool_choice: may only be specified while providing tools"
        if choice.get("type") not in ("auto", "any", "tool", "none"):
            yield "tool_choice: Input tag does not match any of the expected tags"
        if choice.get("type") == "tool" and choice.get("name") not in names:
            yield f"Tool '{choice.get('name')}' not found in provided tools"


def _anthropic_message_errors(messages: Any) -> Iterator[str]:
    if not isinstance(messages, list) or not messages:
        yield "messages: at least one message is required"
        return
    asked: list[str] = []
    seen: set[str] = set()
    for at, (role, blocks) in enumerate(_turns(messages)):
        if role not in ("user", "assistant"):
            yield f"messages.{at}.role: Input should be 'user' or 'assistant'"
            return
        if at == 0 and role != "user":
            yield 'messages: first message must use the "user" role'
        if not blocks:
            yield f"messages.{at}: all messages must have non-empty content except for the optional final assistant message"
            return
        yield from _block_errors(at, role, blocks)
        answered = [block.get("tool_use_id", "") for block in blocks if block.get("type") == "tool_result"]
        leading = [block.get("tool_use_id") for block in blocks[: len(answered)]]
        if missing := [ident for ident in asked if ident not in leading]:
            yield (
                f"messages.{at - 1}: `tool_use` ids were found without `tool_result` blocks immediately after: {', '.join(missing)}. "
                "Each `tool_use` block must have a corresponding `tool_result` block in the next message."
            )
        for ident in answered:
            if ident not in asked or answered.count(ident) > 1:
                yield (
                    f"messages.{at}.content.0: unexpected `tool_use_id` found in `tool_result` blocks: {ident}. "
                    "Each `tool_result` block must have a corresponding `tool_use` block in the previous message."
                )
        asked = [block.get("id", "") for block in blocks if block.get("type") == "tool_use"]
        if len(set(asked)) != len(asked) or seen & set(asked):
            yield "messages: `tool_use` ids must be unique"
        seen.update(asked)
    if asked:
        yield f"messages.{len(messages) - 1}: `tool_use` ids were found without `tool_result` blocks immediately after: {', '.join(asked)}."


def _block_errors(at: int, role: str, blocks: list[dict[str, Any]]) -> Iterator[str]:
    allowed = {"user": ("text", "tool_result", "image"), "assistant": ("text", "tool_use", "thinking", "redacted_thinking")}[role]
    for place, block in enumerate(blocks):
        where = f"messages.{at}.content.{place}"
        kind = block.get("type")
        if kind not in allowed:
            yield f"{where}: Input tag '{kind}' found using 'type' does not match any of the expected tags for {role}: {allowed}"
        elif kind == "text":
            if not block.get("text", "").strip():
                yield "messages: text content blocks must contain non-whitespace text"
            yield from _extra(where, block, "type text cache_control citations")
        elif kind == "tool_use":
            if not isinstance(block.get("input"), dict):
                yield f"{where}.tool_use.input: Input should be a valid dictionary"
            if not isinstance(block.get("id"), str) or not _ID.fullmatch(block["id"]):
                yield f"{where}.tool_use.id: String should match pattern '^[a-zA-Z0-9_-]+$'"
            yield from _extra(where, block, "type id name input cache_control")
        elif kind == "thinking" and block.get("signature") != signature(block.get("thinking", "")):
            yield f"{where}: Invalid `signature` in `thinking` block"
        elif kind == "tool_result":
            if not isinstance(block.get("content", ""), str) and not _blocks(block["content"]):
                yield f"{where}.tool_result.content: text content blocks must be non-empty"
            yield from _extra(where, block, "type tool_use_id content is_error cache_control")
    if blocks[-1].get("type") in ("thinking", "redacted_thinking"):
        yield f"messages.{at}: The final block in an assistant message cannot be `thinking`."


def _extra(where: str, block: dict[str, Any], known: str) -> Iterator[str]:
    for field in block.keys() - set(known.split()):
        yield f"{where}.{block.get('type')}.{field}: Extra inputs are not permitted"


def _turns(messages: list[Any]) -> Iterable[tuple[str, list[dict[str, Any]]]]:
    """Neighbours of one role are one turn, as Anthropic has it."""
    turns: list[tuple[str, list[dict[str, Any]]]] = []
    for message in messages:
        role = message.get("role", "") if isinstance(message, dict) else ""
        blocks = _blocks(message.get("content")) if isinstance(message, dict) else []
        if turns and turns[-1][0] == role and blocks:
            turns[-1][1].extend(blocks)
        else:
            turns.append((role, list(blocks)))
    return turns


def _blocks(content: Any) -> list[dict[str, Any]]:
    """The blocks of a content; none where one of them says nothing."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        return []
    return content if all(block.get("text", "x") for block in content) else []


# -- OpenAI chat completions ----------------------------------------------------------------------------------------------
def chat_error(body: Any) -> str | None:
    return next(_chat_errors(body), None)


def _chat_errors(body: Any) -> Iterator[str]:
    if not isinstance(body, dict):
        yield "We could not parse the JSON body of your request."
        return
    for field in body.keys() - _CHAT_FIELDS:
        yield f"Unrecognized request argument supplied: {field}"
    if not body.get("model"):
        yield "you must provide a model parameter"
    if "stream_options" in body and not body.get("stream"):
        yield "The 'stream_options' parameter is only allowed when 'stream' is enabled."
    functions = [tool.get("function", {}) if tool.get("type") == "function" else {} for tool in body.get("tools", [])]
    yield from _function_errors(functions, "tools[{}].function", body.get("tool_choice"), nested=True)
    if body.get("tools") == []:
        yield "Invalid 'tools': empty array. Expected an array with minimum length 1, but got an empty array instead."
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        yield "Invalid 'messages': empty array. Expected an array with minimum length 1, but got an empty array instead."
        return
    open_calls: list[str] = []
    for at, message in enumerate(messages):
        role = message.get("role")
        if role == "tool":
            if message.get("tool_call_id") not in open_calls:
                yield "Invalid parameter: messages with role 'tool' must be a response to a preceeding message with 'tool_calls'."
                return
            open_calls.remove(message["tool_call_id"])
            yield from _chat_message_errors(at, message, "role tool_call_id content")
            continue
        if open_calls:
            yield _unanswered_chat(open_calls)
        if role == "assistant":
            yield from _chat_assistant_errors(at, message)
            open_calls = [call.get("id", "") for call in message.get("tool_calls", [])]
            if len(set(open_calls)) != len(open_calls):
                yield f"Invalid parameter: messages[{at}] has duplicate tool_call_ids"
        elif role in ("user", "system", "developer"):
            yield from _chat_message_errors(at, message, "role content name")
        else:
            yield f"Invalid value: '{role}'. Supported values are: 'system', 'assistant', 'user', 'tool', and 'developer'."
    if open_calls:
        yield _unanswered_chat(open_calls)


def _unanswered_chat(open_calls: list[str]) -> str:
    return (
        "An assistant message with 'tool_calls' must be followed by tool messages responding to each 'tool_call_id'. "
        f"The following tool_call_ids did not have response messages: {', '.join(open_calls)}"
    )


def _chat_message_errors(at: int, message: dict[str, Any], known: str) -> Iterator[str]:
    for field in message.keys() - set(known.split()):
        yield f"Additional properties are not allowed ('{field}' was unexpected) - 'messages.{at}'"
    if not isinstance(message.get("content"), (str, list)):
        yield f"Invalid value for 'content': expected a string, got null. - 'messages.{at}.content'"
    if message.get("content") == "" and message.get("role") == "user":
        yield f"Invalid 'messages[{at}].content': text content must be non-empty"


def _chat_assistant_errors(at: int, message: dict[str, Any]) -> Iterator[str]:
    for field in message.keys() - {"role", "content", "tool_calls", "refusal", "name"}:
        yield f"Additional properties are not allowed ('{field}' was unexpected) - 'messages.{at}'"
    if "tool_calls" in message and not message["tool_calls"]:
        yield f"[] is too short - 'messages.{at}.tool_calls'"
    if not message.get("content") and not message.get("tool_calls"):
        yield f"Invalid value for 'content': expected a string, got null. - 'messages.{at}.content'"
    for place, call in enumerate(message.get("tool_calls", [])):
        if not isinstance(call.get("id"), str) or not 0 < len(call["id"]) <= 40:
            yield f"Invalid 'messages[{at}].tool_calls[{place}].id': string too long. Expected a string with maximum length 40."
        if not isinstance(call.get("function", {}).get("arguments"), str):
            yield f"Invalid type for 'messages[{at}].tool_calls[{place}].function.arguments': expected a string."
        if not _TOOL_NAME.fullmatch(call.get("function", {}).get("name", "")):
            yield f"Invalid 'messages[{at}].tool_calls[{place}].function.name': string does not match pattern '^[a-zA-Z0-9_-]+$'."
        if call.get("type") != "function" or call.keys() - {"id", "type", "function"}:
            yield f"Additional properties are not allowed - 'messages.{at}.tool_calls.{place}'"


def _function_errors(functions: list[dict[str, Any]], where: str, choice: Any, *, nested: bool) -> Iterator[str]:
    names = [function.get("name") for function in functions]
    for at, function in enumerate(functions):
        if not isinstance(function.get("name"), str) or not _TOOL_NAME.fullmatch(function["name"]):
            yield f"Invalid '{where.format(at)}.name': string does not match pattern. Expected a string that matches '^[a-zA-Z0-9_-]+$'."
        if function.keys() - {"name", "description", "parameters", "strict", "type"}:
            yield f"Unknown parameter: '{where.format(at)}'."
        if not isinstance(function.get("parameters"), dict) or function["parameters"].get("type") != "object":
            yield f"Invalid schema for function '{function.get('name')}': schema must be a JSON Schema of 'type: \"object\"'."
    if len(set(names)) != len(names):
        yield f"Invalid '{where.format(0)}': Tool names must be unique."
    if choice is not None and not functions:
        yield "Invalid value for 'tool_choice': 'tool_choice' is only allowed when 'tools' are specified."
    if isinstance(choice, dict):
        named = choice.get("function", {}).get("name") if nested else choice.get("name")
        if named not in names:
            yield f"Tool choice '{named}' not found in 'tools' parameter."
    elif choice not in (None, "auto", "required", "none"):
        yield f"Invalid value: '{choice}'. Supported values are: 'none', 'auto', and 'required'."


# -- OpenAI responses -----------------------------------------------------------------------------------------------------
def responses_error(body: Any) -> str | None:
    return next(_responses_errors(body), None)


def _responses_errors(body: Any) -> Iterator[str]:
    if not isinstance(body, dict):
        yield "Invalid body: failed to parse JSON value."
        return
    for field in body.keys() - _RESPONSES_FIELDS:
        yield f"Unknown parameter: '{field}'."
    if not body.get("model"):
        yield "Missing required parameter: 'model'."
    flat = [tool if tool.get("type") == "function" else {} for tool in body.get("tools", [])]
    yield from _function_errors(flat, "tools[{}]", body.get("tool_choice"), nested=False)
    items = body.get("input")
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    if not isinstance(items, list) or not items:
        yield "Missing required parameter: 'input'."
        return
    yield from _item_errors(items, stored=body.get("store", True))


def _item_errors(items: list[dict[str, Any]], stored: bool) -> Iterator[str]:
    calls: set[str] = set()
    answered: set[str] = set()
    for at, item in enumerate(items):
        kind = item.get("type", "message")
        following = items[at + 1].get("type", "message") if at + 1 < len(items) else None
        if kind == "function_call":
            if not isinstance(item.get("arguments"), str) or not _TOOL_NAME.fullmatch(item.get("name", "")):
                yield f"Invalid 'input[{at}]': a function_call has a name and its arguments as a string."
            if item.get("call_id") in calls or not 0 < len(item.get("call_id") or "") <= 64:
                yield f"Invalid 'input[{at}].call_id': a unique string with maximum length 64 is expected."
            calls.add(item.get("call_id", ""))
        elif kind == "function_call_output":
            if item.get("call_id") not in calls - answered:
                yield f"No tool call found for function call output with call_id {item.get('call_id')}."
            if not isinstance(item.get("output"), str):
                yield f"Invalid type for 'input[{at}].output': expected a string."
            answered.add(item.get("call_id", ""))
        elif kind == "reasoning":
            if not stored and item.get("encrypted_content") != signature(item.get("id", "")):
                yield f"Item with id '{item.get('id')}' not found. Items are not persisted when `store` is set to false."
            if following not in ("function_call", "reasoning") and (following != "message" or items[at + 1].get("role") != "assistant"):
                yield f"Item '{item.get('id')}' of type 'reasoning' was provided without its required following item."
        elif kind == "message":
            if not item.get("content"):
                yield f"Invalid 'input[{at}].content': empty."
            if item.get("role") not in ("user", "assistant", "system", "developer"):
                yield f"Invalid value: '{item.get('role')}' for 'input[{at}].role'."
            if missing := calls - answered:
                yield f"No tool output found for function call {min(missing)}."
        else:
            yield f"Invalid value: '{kind}' for 'input[{at}].type'."
    if missing := calls - answered:
        yield f"No tool output found for function call {min(missing)}."
