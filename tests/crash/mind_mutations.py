"""perdure without one of the guards for agents with models, in a victim's own process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec import structs

from perdure.agents.react import agent, transcript, turns
from perdure.core.events import Event, Failure, ModelCallCompleted, ModelCallFailed
from perdure.core.run_core import RunCore
from perdure.models import model
from perdure.store.sql import SqlStore


def answers_in_the_journal_are_taken_for_failures() -> None:
    real = SqlStore.read_life

    def read_life(self: SqlStore, run_id: str) -> list[Event]:
        return [_failed(event) if isinstance(event.body, ModelCallCompleted) else event for event in real(self, run_id)]

    SqlStore.read_life = read_life  # type: ignore[method-assign, assignment]


def _failed(event: Event) -> Event:
    attempt = event.body.attempt  # type: ignore[union-attr]
    return structs.replace(event, body=ModelCallFailed(Failure("reset", "Forgotten", "nobody has looked"), attempt=attempt))


def lost_answers_are_not_recorded() -> None:
    RunCore._was_lost = lambda self, call: False  # type: ignore[method-assign]


def requests_are_not_compared() -> None:
    model.ModelQuestion.rebind = lambda self, recorded: self._packed  # type: ignore[method-assign]


def clients_try_again_on_their_own() -> None:
    import anthropic

    real = anthropic.AsyncAnthropic.__init__

    def init(self: Any, **options: Any) -> None:
        real(self, **{**options, "max_retries": 2})

    anthropic.AsyncAnthropic.__init__ = init  # type: ignore[method-assign]


def _conversations_are_not_checked() -> None:
    """perdure checks its own requests before it sends them.

    This second guard would hide that the other guards are missing.
    """
    for module in (transcript, turns, model):
        module.check = lambda messages: None  # type: ignore[attr-defined]


def what_hangs_at_the_end_of_a_run_is_left_hanging() -> None:
    _conversations_are_not_checked()
    transcript._Conversation._add = lambda self, messages, answer, seq: messages.append(answer.message)  # type: ignore[method-assign]


def what_was_not_called_is_not_told() -> None:
    _conversations_are_not_checked()
    real = agent._Talk.answer
    agent._Talk.answer = lambda self, results: real(self, [one for one in results if not one.error])  # type: ignore[method-assign]


MIND_MUTATIONS: dict[str, Callable[[], None]] = {
    found.__name__: found
    for found in (
        answers_in_the_journal_are_taken_for_failures,
        lost_answers_are_not_recorded,
        requests_are_not_compared,
        clients_try_again_on_their_own,
        what_hangs_at_the_end_of_a_run_is_left_hanging,
        what_was_not_called_is_not_told,
    )
}
