"""What a model hears besides its own words: what came of the tools that it wanted used, and what people have said meanwhile.

Pure, and shared by ReAct, which goes through it live, and `transcript`, which has only the journal: both have to make the same
conversation of the same facts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from msgspec import structs

from perdure.core import codec
from perdure.core.failures import IN_DOUBT_KINDS
from perdure.errors import ChildFailed, InvalidInput, NotApproved, ResultNotEncodable, ToolFailed
from perdure.models.messages import Answer, Assistant, Message, ToolResult, ToolUse, User, check, shown_result

FINAL_ANSWER = "final_answer"  # the tool that takes a structured answer; no tool of anybody's
MESSAGE_TOPIC = "message"
ANSWER_TAKEN = "Taken as the final answer."
CUT_OFF = "Your answer was cut off at the limit of tokens, and nothing came of it. Say it again, shorter."
MAX_USES = 100  # of tools, in one answer
MAX_RESULT_CHARS = 50_000  # of a result, that the model is shown
MAX_ID_CHARS = 256
NAME = re.compile(r"[A-Za-z0-9_-]{1,64}\Z")  # what providers take for the name of a tool
_UNNAMEABLE = re.compile(r"[^A-Za-z0-9_-]+")


# -- what was said -----------------------------------------------------------------------------------------------------
def begun(prompt: str, history: Sequence[Any] | None) -> list[Message]:
    """The conversation that a run begins with; InvalidInput where no provider would take it."""
    try:
        messages: list[Message] = msgspec.convert(list(history or ()), list[Message])
    except msgspec.ValidationError as error:
        raise InvalidInput(f"history: {error}; give what app.transcript(run_id) has given") from None
    if prompt.strip():
        messages.append(User(legible(prompt)))
    elif not messages or isinstance(messages[-1], Assistant):
        raise InvalidInput("prompt: nothing is said in it; give the model something to answer")
    check(messages)
    return messages


def spoken(payload: Any) -> User | None:
    """A signal as something that a person has said: text, {"text": …}, or any other JSON as it is; None if nothing is said in it."""
    if isinstance(payload, dict) and isinstance(payload.get("text"), str) and len(payload) == 1:
        payload = payload["text"]
    text = "" if payload is None else payload if isinstance(payload, str) else codec.encode(payload).decode()
    return User(legible(text)) if text.strip() else None


def is_blank(answer: Answer) -> bool:
    """Whether there is nothing in it. Providers do not take such an answer back, so that it has no place in a conversation."""
    return not answer.uses and not answer.text.strip()


def use_ids(messages: Iterable[Message]) -> set[str]:
    """The ids of all tool uses in a conversation."""
    return {use.id for message in messages if isinstance(message, Assistant) for use in message.uses}


def sound(answer: Answer, taken: set[str]) -> Assistant:
    """The answer as providers take it back: its uses have ids that no other in the conversation has, and names that can be names.

    The new ids are added to `taken`.
    """
    uses = tuple(_sound_use(use, taken) for use in answer.uses)
    if all(ours is theirs for ours, theirs in zip(uses, answer.uses, strict=True)):
        return answer.message
    return Assistant(answer.text, uses)  # without `raw`, which knows the uses by the ids that they had


def _sound_use(use: ToolUse, taken: set[str]) -> ToolUse:
    ident = use.id
    if not ident or ident in taken or len(ident) > MAX_ID_CHARS:
        number = len(taken) + 1
        while (ident := f"use_{number}") in taken:
            number += 1
    taken.add(ident)
    name = use.name if NAME.match(use.name) else (_UNNAMEABLE.sub("_", use.name)[:64] or "unnamed")
    return use if ident == use.id and name == use.name else structs.replace(use, id=ident, name=name)


def legible(text: str) -> str:
    """The text without lone surrogates, which no provider takes; escaped where there are any."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-8", "backslashreplace").decode("utf-8")
    return text


# -- what came of a tool use -------------------------------------------------------------------------------------------
def result(use: ToolUse, encoded: bytes) -> ToolResult:
    """What a tool returned, as the model reads it."""
    text = legible(shown_result(encoded)) or '""'
    if len(text) > MAX_RESULT_CHARS:
        text = f"{text[:MAX_RESULT_CHARS]}\n[cut here: these are the first {MAX_RESULT_CHARS:,} of {len(text):,} characters]"
    return ToolResult(use.id, use.name, text)


def problem(use: ToolUse, text: str) -> ToolResult:
    """Why there is no result."""
    text = legible(text)
    return ToolResult(use.id, use.name, text if len(text) <= MAX_RESULT_CHARS else f"{text[:MAX_RESULT_CHARS]} [cut here]", error=True)


def not_called(use: ToolUse, why: str) -> ToolResult:
    """Nothing has happened."""
    return problem(use, f"{use.name} was not called: {why}")


def failed(use: ToolUse, error: ToolFailed, effect: str) -> ToolResult:
    """What a call that failed is told as: what went wrong, and whether it may have happened all the same."""
    match error:
        case NotApproved():
            return refused(use, error.outcome, error.note, error.message)
        case ResultNotEncodable():
            return problem(use, f"{use.name} has happened, and what it returned could not be recorded: {error.message}")
        case ChildFailed():
            return problem(use, f"{use.name} failed: {error.type}: {error.message}. What it had done before stands.")
        case _:
            return failure(use, error.kind, error.type, error.message, error.attempts, effect)


def failure(use: ToolUse, kind: str, type: str, message: str, attempts: int, effect: str) -> ToolResult:
    """The same for a call that only the journal knows."""
    tried = f" after {attempts} attempts" if attempts > 1 else ""
    doubt = " It may have happened all the same." if kind in IN_DOUBT_KINDS and effect not in ("read", "transaction") and attempts else ""
    return problem(use, f"{use.name} failed{tried}: {type}: {message}{'' if message.endswith('.') else '.'}{doubt}")


def edited(told: ToolResult, by: str | None, before: bytes, after: bytes) -> ToolResult:
    """With what a person has changed before the call was made: else the model would speak of its own figures."""
    old, new = codec.decode(before), codec.decode(after)
    shown = {name: [codec.encode(side[name]).decode() if name in side else "nothing" for side in (old, new)] for name in {**old, **new}}
    changes = ", ".join(f"{name} from {was} to {is_}" for name, (was, is_) in sorted(shown.items()) if was != is_)
    words = legible(f"[Before it was called, {by or 'a person'} changed {changes}.]")
    return structs.replace(told, text=f"{words}\n{told.text}") if changes else told


def refused(use: ToolUse, outcome: str, note: str | None, message: str) -> ToolResult:
    """A call that a person has to agree to, and that was not made: no, silence and a withdrawn question are different answers (T20)."""
    if outcome == "rejected":
        return not_called(use, f"a person said no: {note or message}")
    return not_called(use, message)
