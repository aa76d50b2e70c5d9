"""The conversation of a run, rebuilt from its journal: the last request, its answer, and the results.

A run can end at any point, and its conversation can be read before its end. If a tool use has no result, a result is
added here that says what is known about the call. So the conversation of a run that has ended can be continued:
providers refuse a tool use without a result (threat T28).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from perdure.agents.react.turns import (
    ANSWER_TAKEN,
    CUT_OFF,
    FINAL_ANSWER,
    MESSAGE_TOPIC,
    begun,
    edited,
    failure,
    is_blank,
    not_called,
    problem,
    refused,
    result,
    sound,
    spoken,
    use_ids,
)
from perdure.core import codec, prompt_deltas
from perdure.core.codec import Payload
from perdure.core.events import (
    CheckpointTaken,
    ChildFinished,
    DecisionMade,
    Event,
    ModelCallCompleted,
    ModelCallInitiated,
    OutcomeReused,
    SignalReceived,
    ToolCallCompleted,
    ToolCallResolved,
    event_at,
)
from perdure.core.history import history, is_stated
from perdure.core.state import CallState, ChildState, fold
from perdure.errors import InvalidInput
from perdure.models.messages import Answer, Message, ToolResult, ToolUse, answer_of, check, request_of, shown_result

Load = Callable[[Payload], bytes]


def transcript(run_id: str, events: Sequence[Event], load: Load) -> list[dict[str, Any]]:
    """The conversation of a run so far. If the run has ended, another ReAct run can take it as its `history`."""
    messages = _Conversation(run_id, events, load).messages()
    check(messages)
    plain: list[dict[str, Any]] = codec.decode(codec.encode(msgspec.to_builtins(messages)))
    return plain


class _Conversation:
    """The journal of a run, read as a conversation."""

    def __init__(self, run_id: str, events: Sequence[Event], load: Load) -> None:
        self._run_id = run_id
        self._events = events
        self._load = load
        self._state = fold(events)
        past = history(events)  # if the run was reopened, the agent does not know all events
        self._known = [(event, past.sources[event.body.of] if isinstance(event.body, OutcomeReused) else event) for event in past.events]
        self._requests = [event for event in past.events if event.call is not None and is_stated(event)]
        taken = None if past.checkpoint is None else past.checkpoint.body
        self._restored = codec.decode(load(taken.state)) if isinstance(taken, CheckpointTaken) else None
        self._models = {event.call for event in events if isinstance(event.body, ModelCallInitiated)}
        self._answered = {
            event.call: event for event in events if isinstance(event.body, ModelCallCompleted) and event.body.result is not None
        }

    def messages(self) -> list[Message]:
        last = next((event for event in reversed(self._requests) if event.call in self._models), None)
        if last is None or last.call is None:
            return self._with_unheard(self._never_asked(), 0)
        whole = prompt_deltas.unpack(last.call, self._packed, lambda number: msgspec.to_builtins(self._answer(number).message), self._text)
        messages = list(request_of(whole).messages)
        answer = self._answered.get(last.call)
        woke = next((event.seq for event, source in reversed(self._known) if source is answer), None)
        if woke is not None:
            self._add(messages, self._answer(last.call), woke)
        return self._with_unheard(messages, last.cause or 0)

    def _never_asked(self) -> list[Message]:
        assert self._state.created is not None
        if self._restored is not None:
            messages: list[Message] = msgspec.convert(self._restored["messages"], list[Message])
            return messages
        given = codec.decode(self._load(self._state.created.input))
        if not isinstance(given, dict) or not isinstance(given.get("prompt"), str) or not given.keys() <= {"prompt", "history"}:
            raise InvalidInput(f"run {self._run_id} of agent {self._state.created.agent} has asked no model: there is no conversation")
        return begun(given["prompt"], given.get("history"))

    def _add(self, messages: list[Message], answer: Answer, seq: int) -> None:
        """Add the last answer of the model, and for each tool use in it a result that says what is known."""
        if is_blank(answer):
            return
        said = sound(answer, use_ids(messages))
        messages.append(said)
        chosen = self._chosen(seq)
        made = iter(self._made(seq))
        for place, use in enumerate(said.uses):
            name = chosen[place] if chosen is not None and place < len(chosen) else None
            call = None if name is None else next(made, None)
            messages.append(self._unmade(use, answer, chosen) if call is None else self._outcome(use, call))

    def _chosen(self, seq: int) -> list[str | None] | None:
        """The tools that were chosen after the answer in event `seq`, one entry per tool use.

        None if the journal has no decision about this answer: the run ended first, or the answer was final.
        """
        bodies = (event.body for event, _ in self._known if event.cause == seq)
        choice = next((body.choice for body in bodies if isinstance(body, DecisionMade)), None)
        return None if choice is None else codec.decode(self._load(choice))

    def _made(self, seq: int) -> list[CallState | ChildState]:
        """The calls and children that the agent has requested after the answer in event `seq`, in order."""
        state = self._state
        numbers = [event.call or 0 for event in self._requests if event.cause == seq and event.call not in self._models]
        return [
            state.calls.get(number) or state.children[number] for number in numbers if number in state.calls or number in state.children
        ]

    def _unmade(self, use: ToolUse, answer: Answer, chosen: list[str | None] | None) -> ToolResult:
        if use.name == FINAL_ANSWER and chosen is None and self._state.status == "succeeded":
            return ToolResult(use.id, use.name, ANSWER_TAKEN)
        if answer.stop == "length":
            return problem(use, CUT_OFF)
        if chosen is None:
            return self._not_made(use)
        return not_called(use, "there is no such tool, or its arguments do not fit")

    def _not_made(self, use: ToolUse) -> ToolResult:
        if self._state.finished:
            return not_called(use, "the run was ended first")
        return problem(use, f"{use.name} was not called yet: the run goes on")

    def _outcome(self, use: ToolUse, made: CallState | ChildState) -> ToolResult:
        if isinstance(made, ChildState):
            return self._of_child(use, made)
        ask = self._state.asks.get(made.number)
        if ask is not None and ask.edited and ask.input is not None and ask.outcome == "approved":
            return edited(self._of_call(use, made), ask.by, self._load(ask.request.input), self._load(ask.input))
        return self._of_call(use, made)

    def _of_call(self, use: ToolUse, made: CallState) -> ToolResult:
        if made.phase == "completed":
            if made.result is None:
                return problem(use, f"{use.name} has happened, and what it returned could not be recorded")
            return result(use, self._load(made.result))
        ask, ended = self._state.asks.get(made.number), made.failure
        if ask is not None and ask.outcome not in (None, "approved") and ended is not None:
            return refused(use, str(ask.outcome), ask.note, ended.message)
        if not made.ended and not self._state.finished:
            return self._so_far(use, made)
        if not made.begun:
            return not_called(use, "the run was ended first" if ended is None or ended.kind == "cancelled" else ended.message)
        if ended is not None and made.ended:
            return failure(use, ended.kind, ended.type, ended.message, made.attempt, made.effect)
        return failure(use, "cancelled", "Cancelled", "the run was ended while it was under way", made.attempt, made.effect)

    def _so_far(self, use: ToolUse, made: CallState) -> ToolResult:
        """What is known about an open call of a run that goes on."""
        match made.phase:
            case "awaiting_approval":
                return problem(use, f"{use.name} was not called yet: it waits for an approval")
            case "in_doubt":
                return problem(use, f"{use.name} has no result yet: it is not known whether it has happened ({made.doubt})")
            case _:
                return problem(use, f"{use.name} has no result yet: it is under way") if made.begun else self._not_made(use)

    def _of_child(self, use: ToolUse, child: ChildState) -> ToolResult:
        ended = child.ended
        if ended is None and not self._state.finished:
            return problem(use, f"{use.name} has no result yet: it is under way")
        if ended is not None and ended.output is not None:
            return result(use, self._load(ended.output))
        why = f"{ended.failure.type}: {ended.failure.message}" if ended is not None and ended.failure is not None else "it was cancelled"
        return problem(use, f"{use.name} failed: {why}. What it had done before stands.")

    def _with_unheard(self, messages: list[Message], since: int) -> list[Message]:
        """The messages, plus the messages of people that arrived too late for the last request to the model."""
        bodies = [source.body for event, source in self._known if event.seq > since and isinstance(source.body, SignalReceived)]
        said = [spoken(codec.decode(self._load(body.payload))) for body in bodies if body.topic == MESSAGE_TOPIC]
        return messages + [one for one in said if one is not None]

    def _packed(self, number: int) -> bytes:
        args = self._state.calls[number].args
        assert args is not None, number
        return self._load(args)

    def _answer(self, number: int) -> Answer:
        body = self._answered[number].body
        assert isinstance(body, ModelCallCompleted) and body.result is not None
        return answer_of(self._load(body.result))

    def _text(self, seq: int) -> str:
        match getattr(event_at(self._events, seq), "body", None):
            case ToolCallCompleted(result=Payload() as payload) | ToolCallResolved(result=Payload() as payload):
                return shown_result(self._load(payload))
            case ChildFinished(output=Payload() as payload) | SignalReceived(payload=payload):
                return shown_result(self._load(payload))
            case other:
                raise LookupError(f"event {seq} ({type(other).__name__}) holds no text")
