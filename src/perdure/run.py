"""Run: what an agent sees of the run that it is. Everything here is the same on every replay."""

from __future__ import annotations

import random
import uuid
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import TypeVar

from perdure.core import codec, keys
from perdure.core.events import DecisionMade, StatusReported, ThoughtRecorded
from perdure.core.machine import Machine
from perdure.errors import InvalidInput

T = TypeVar("T")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MAX_TEXT_BYTES = 64 * 1024


class Run:
    """The first argument of every agent."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._uuids = 0

    @property
    def id(self) -> str:
        return self._machine.facts.run_id

    @property
    def tenant(self) -> str:
        return self._machine.facts.tenant

    @property
    def actor(self) -> str | None:
        return self._machine.facts.actor

    @property
    def version(self) -> str:
        return self._machine.facts.version

    @property
    def cancelled(self) -> bool:
        """Whether somebody has asked for this run to be cancelled."""
        return self._machine.cancel_asked

    def now(self) -> datetime:
        """The recorded time of what woke the agent; never the wall clock."""
        return _EPOCH + timedelta(microseconds=self._machine.now)

    @cached_property
    def random(self) -> random.Random:
        """Chance that comes out the same on replay."""
        return random.Random(keys.seed(self.id, "random"))

    def uuid(self) -> uuid.UUID:
        """A UUID that comes out the same on replay, and differs for every call of this."""
        self._uuids += 1
        return uuid.UUID(int=keys.seed(self.id, f"uuid {self._uuids}") >> 128, version=4)

    def note(self, text: str) -> None:
        """Write a thought into the journal."""
        self._machine.record(ThoughtRecorded(_text(text, "run.note")))

    def status(self, text: str) -> None:
        """What users see while they wait."""
        self._machine.record(StatusReported(_text(text, "run.status")))

    def decide(self, choice: T, *, among: Sequence[T] | None = None, reason: str | None = None) -> T:
        """Write a decision, its alternatives and its reason into the journal, and return the choice."""
        if among is not None and choice not in among:
            raise InvalidInput(f"run.decide: the choice {choice!r:.80} is not among the alternatives")
        self._machine.record(
            DecisionMade(
                choice=_payload(choice),
                among=None if among is None else _payload(list(among)),
                reason=None if reason is None else _text(reason, "run.decide(reason=)"),
            )
        )
        return choice


def _text(text: str, what: str) -> str:
    if not isinstance(text, str):
        raise InvalidInput(f"{what} takes text, not {type(text).__name__}")
    clean = text.encode("utf-8", "replace")
    if len(clean) > MAX_TEXT_BYTES:
        raise InvalidInput(
            f"{what}: {len(clean):,} bytes of text; the limit is {MAX_TEXT_BYTES:,}: keep it short, or return it from a tool"
        )
    return clean.decode()


def _payload(value: object) -> codec.Payload:
    encoded = codec.encode(value)
    if len(encoded) > MAX_TEXT_BYTES:
        raise InvalidInput(
            f"run.decide: {len(encoded):,} bytes; the limit is {MAX_TEXT_BYTES:,}: name the alternatives instead of embedding them"
        )
    return codec.pack(encoded, inline_bytes=MAX_TEXT_BYTES)[0]
