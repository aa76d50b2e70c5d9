"""Why a tool was called: the answer of a model that wanted it, and what the model had been told before it answered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from perdure.core.codec import Payload
from perdure.core.events import ChildStarted, Event, ModelCallCompleted, ModelCallInitiated, ToolCallInitiated, ToolCallProposed
from perdure.core.prompts import Sources, added, is_request
from perdure.core.state import fold
from perdure.errors import StoreCorrupt
from perdure.inspect.models import Load, answer_in, use_words
from perdure.inspect.prompt import sources
from perdure.inspect.words import clip, plain

SHOWN_EACH = 160
MOST_SHOWN = 12


class Heard:
    """What models were told before they answered, out of a run's journal."""

    def __init__(self, events: Sequence[Event], load: Load | None) -> None:
        self._events = events
        self._load = load
        self._sources: Sources | None = None

    def before(self, event: Event) -> list[str]:
        """Of an event that asks a model: what it was told since its last answer. Empty for any other."""
        body = event.body
        if (
            self._load is None
            or event.call is None
            or not isinstance(body, ToolCallProposed | ToolCallInitiated)
            or not is_request(body.args)
        ):
            return []
        if self._sources is None:
            self._sources = sources(fold(self._events).calls, self._events, self._load)
        try:
            messages = added(event.call, self._sources)
        except StoreCorrupt as error:
            return [str(error)]
        answers = [place for place, message in enumerate(messages) if message.get("role") == "assistant"]
        since = messages[answers[-1] + 1 :] if answers else messages
        skipped = [f"… {len(since) - MOST_SHOWN:,} more"] if len(since) > MOST_SHOWN else []
        return skipped + [_words(message) for message in since[-MOST_SHOWN:]]


def _words(message: dict[str, Any]) -> str:
    text = clip(str(message.get("text", "")), SHOWN_EACH)
    if message.get("role") == "tool":
        return f"{'the error' if message.get('error') else 'the result'} of {message.get('name')}: {text}"
    return f"somebody said: “{text}”"


def wanted_by(event: Event, chain: Sequence[Event], load: Load | None) -> str | None:
    """The answer in the chain that wanted this call, in words; None when it is no model's wish."""
    args: Payload | None
    match event.body:
        case ModelCallInitiated():
            return None
        case ToolCallProposed(tool=name, args=args) | ToolCallInitiated(tool=name, args=args, attempt=1, approval=None):
            pass
        case ChildStarted(agent=name, input=args):
            pass
        case _:
            return None
    answered = next((before for before in reversed(chain) if isinstance(before.body, ModelCallCompleted)), None)
    answer = answer_in(answered.body.result, load) if answered is not None and isinstance(answered.body, ModelCallCompleted) else None
    if answered is None or answer is None:
        return None
    uses = [use for use in answer.uses if use.name == name]
    if not uses:
        return None
    # Of several uses of one tool it is the one with these arguments; where they were completed or edited, all are named.
    same = [use for use in uses if use.arguments == plain(args, load)]
    return f"the answer in event {answered.seq} wanted it: {', '.join(use_words(use) for use in same[:1] or uses)}"
