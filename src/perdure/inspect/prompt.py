"""The exact request of a past model call. It is rebuilt from the journal and compared with its recorded digest."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec import MsgspecError, to_builtins

from perdure.core.codec import Payload
from perdure.core.events import ChildFinished, Event, SignalReceived, ToolCallCompleted, ToolCallResolved, event_at
from perdure.core.prompt_deltas import Sources, is_request, unpack
from perdure.core.state import CallState
from perdure.errors import InvalidInput, NotFound, StoreCorrupt
from perdure.inspect.view import RunView
from perdure.models.messages import answer_of, shown_result


def request_of_call(reading: RunView, number: int, load: Callable[[Payload], bytes]) -> bytes:
    """The request of this call, byte for byte, as canonical JSON. StoreCorrupt if it cannot be rebuilt."""
    call = _model_call(reading, number)
    assert call.args is not None
    return unpack(number, *sources(reading.state.calls, reading.events, load))


def _model_call(reading: RunView, number: int) -> CallState:
    state, run_id = reading.state, reading.row.run_id
    call = state.calls.get(number)
    models = [str(one.number) for one in state.calls.values() if is_request(one.args)]
    those = (
        f"its calls to models are {', '.join(models[:10])}{', …' if len(models) > 10 else ''}" if models else "it has not asked any model"
    )
    if call is None and not 1 <= number <= state.numbers:
        raise NotFound(f"run {run_id} has no call {number}; {those}")
    if call is None or not is_request(call.args):
        what = f"of tool {call.tool}" if call is not None else "to a child" if number in state.children else "for an approval"
        raise InvalidInput(f"call {number} of run {run_id} is one {what}, and no question to a model; {those}")
    return call


def sources(calls: Mapping[int, CallState], events: Sequence[Event], load: Callable[[Payload], bytes]) -> Sources:
    """Functions that read the parts of a request from the run's calls and events."""

    def packed(number: int) -> bytes:
        args = calls[number].args
        if args is None or not is_request(args):
            raise ValueError(f"call {number} is no question to a model")
        return load(args)

    def answer(number: int) -> Any:
        result = calls[number].result
        if result is None:
            raise ValueError(f"call {number} has no answer")
        try:
            return to_builtins(answer_of(load(result)).message)
        except MsgspecError as error:
            raise ValueError(f"the answer of call {number} cannot be read: {error}") from None

    return Sources(packed, answer, lambda seq: _text(events, seq, load))


def _text(events: Sequence[Event], seq: int, load: Callable[[Payload], bytes]) -> str:
    found = event_at(events, seq) if type(seq) is int else None
    if found is None:
        raise ValueError(f"there is no event {seq!r:.20}")
    match found.body:
        case ToolCallCompleted(result=Payload() as payload) | ToolCallResolved(result=Payload() as payload):
            return shown_result(load(payload))
        case SignalReceived(payload=payload) | ChildFinished(output=Payload() as payload):
            return shown_result(load(payload))
        case _:
            raise StoreCorrupt(f"event {seq} holds no text that a model could have been told", hint="`perdure verify` tells more")
