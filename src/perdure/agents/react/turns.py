"""The messages that a model gets: the results of its tool uses, and the messages of people.

The functions are pure. ReAct uses them during a run, and `transcript` uses them with the journal of a run that has
ended. Both must build the same conversation from the same facts.
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

FINAL_ANSWER = "final_answer"  # the tool that takes a structured answer; no other tool may have this name
MESSAGE_TOPIC = "message"
ANSWER_TAKEN = "Taken as the final answer."
CUT_OFF = "Your answer was cut off at the limit of tokens, and nothing came of it. Say it again, shorter."
MAX_USES = 100  # the most tool uses in one answer of a model that are called
MAX_RESULT_CHARS = 50_000  # a longer result of a tool is cut before the model gets it
MAX_ID_CHARS = 256
NAME = re.compile(r"[A-Za-z0-9_-]{1,64}\Z")  # tool names that providers accept
_UNNAMEABLE = re.compile(r"[^A-Za-z0-9_-]+")


# -- messages of people and answers of models -------------------------------------------------------------------------
def begun(prompt: str, history: Sequence[Any] | None) -> list[Message]:
    """The conversation at the start of a run. InvalidInput if providers would refuse this conversation."""
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
    """The payload of a signal, as a message of a person. None if the payload is empty.

    The payload is text, `{"text": …}`, or any other JSON, which becomes text.
    """
    if isinstance(payload, dict) and isinstance(payload.get("text"), str) and len(payload) == 1:
        payload = payload["text"]
    text = "" if payload is None else payload if isinstance(payload, str) else codec.encode(payload).decode()
    return User(legible(text)) if text.strip() else None


def is_blank(answer: Answer) -> bool:
    """Is the answer empty? An empty answer is left out of the conversation, because providers refuse it."""
    return not answer.uses and not answer.text.strip()


def use_ids(messages: Iterable[Message]) -> set[str]:
    """The ids of all tool uses in a conversation."""
    return {use.id for message in messages if isinstance(message, Assistant) for use in message.uses}


def sound(answer: Answer, taken: set[str]) -> Assistant:
    """The answer in a form that providers accept: its tool uses have unique ids and valid names.

    The new ids are added to `taken`.
    """
    uses = tuple(_sound_use(use, taken) for use in answer.uses)
    if all(ours is theirs for ours, theirs in zip(uses, answer.uses, strict=True)):
        return answer.message
    return Assistant(answer.text, uses)  # `raw` is left out, because it contains the original ids


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
    """The text with lone surrogates escaped, because providers do not accept lone surrogates."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-8", "backslashreplace").decode("utf-8")
    return text


# -- results of tool uses ---------------------------------------------------------------------------------------------
def result(use: ToolUse, encoded: bytes) -> ToolResult:
    """The result of a tool, as the model gets it."""
    text = legible(shown_result(encoded)) or '""'
    if len(text) > MAX_RESULT_CHARS:
        text = f"{text[:MAX_RESULT_CHARS]}\n[cut here: these are the first {MAX_RESULT_CHARS:,} of {len(text):,} characters]"
    return ToolResult(use.id, use.name, text)


def problem(use: ToolUse, text: str) -> ToolResult:
    """A tool result that is an error with this text."""
    text = legible(text)
    return ToolResult(use.id, use.name, text if len(text) <= MAX_RESULT_CHARS else f"{text[:MAX_RESULT_CHARS]} [cut here]", error=True)


def not_called(use: ToolUse, why: str) -> ToolResult:
    """The error for a tool use for which no call was made. Nothing has happened."""
    return problem(use, f"{use.name} was not called: {why}")


def failed(use: ToolUse, error: ToolFailed, effect: str) -> ToolResult:
    """The error for a failed call. The text says if the effect may have happened although the call failed."""
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
    """The error for a failed call, from the fields of its recorded failure."""
    tried = f" after {attempts} attempts" if attempts > 1 else ""
    doubt = " It may have happened all the same." if kind in IN_DOUBT_KINDS and effect not in ("read", "transaction") and attempts else ""
    return problem(use, f"{use.name} failed{tried}: {type}: {message}{'' if message.endswith('.') else '.'}{doubt}")


def edited(told: ToolResult, by: str | None, before: bytes, after: bytes) -> ToolResult:
    """The result, with a note about the arguments that a person has edited.

    Without the note the model would believe that the call was made with the arguments of the model.
    """
    old, new = codec.decode(before), codec.decode(after)
    shown = {name: [codec.encode(side[name]).decode() if name in side else "nothing" for side in (old, new)] for name in {**old, **new}}
    changes = ", ".join(f"{name} from {was} to {is_}" for name, (was, is_) in sorted(shown.items()) if was != is_)
    words = legible(f"[Before it was called, {by or 'a person'} changed {changes}.]")
    return structs.replace(told, text=f"{words}\n{told.text}") if changes else told


def held_back(use: ToolUse) -> ToolResult:
    """The result of a call that waits for its approval, while the model answers a new message of a person."""
    return problem(
        use,
        f"{use.name} was not called yet: it waits for the approval of a person, and a new message has arrived meanwhile. If it is still "
        f"right, call {use.name} again in your answer, with the same arguments: it keeps its approval, and no person is asked twice. "
        "Otherwise it is withdrawn, and is not made.",
    )


def ended_meanwhile(told: ToolResult) -> User:
    """The message about a call that the model has not kept, and that had ended before the model answered."""
    return User(legible(f"[About {told.name}, which waited for an approval before the last answer: {told.text}]"))


def refused(use: ToolUse, outcome: str, note: str | None, message: str) -> ToolResult:
    """The error for a call that was not approved. Rejected, expired and withdrawn give different texts (T20)."""
    if outcome == "rejected":
        return not_called(use, f"a person said no: {note or message}")
    return not_called(use, message)
