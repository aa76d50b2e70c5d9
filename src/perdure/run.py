"""Run: what an agent sees of the run that it is. Everything here is the same on every replay."""

from __future__ import annotations

import asyncio
import math
import random
import uuid
from collections.abc import Coroutine, Sequence
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import Any, TypeVar

from perdure.core import codec, identity
from perdure.core.approval import Approval, Decision
from perdure.core.events import DecisionMade, OnExpiry, StatusReported, ThoughtRecorded
from perdure.core.machine import Machine
from perdure.errors import InvalidInput

T = TypeVar("T")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MAX_TEXT_BYTES = 64 * 1024
MAX_ACTION_CHARS = 200


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
    def parent(self) -> str | None:
        """The id of the run that has started this one as its child."""
        return self._machine.facts.parent

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
        return random.Random(identity.seed(self.id, "random"))

    def uuid(self) -> uuid.UUID:
        """A UUID that comes out the same on replay, and differs for every call of this."""
        self._uuids += 1
        return uuid.UUID(int=identity.seed(self.id, f"uuid {self._uuids}") >> 128, version=4)

    def approve(
        self,
        action: str,
        input: Any = None,
        *,
        reason: str | None = None,
        by: str | Sequence[str] = (),
        quorum: int = 1,
        expires: float | timedelta | None = None,
        on_expiry: OnExpiry = "reject",
        escalate_to: str | Sequence[str] = (),
        escalate_expires: float | timedelta | None = None,
        editable: str | Sequence[str] = (),
        four_eyes: bool = False,
    ) -> Coroutine[Any, Any, Decision]:
        """Ask people, and wait for their Decision without a process. `granted` is True for "approved" alone; `input` is what they approved.

        To have every call of a risky tool asked about, bound to its exact arguments, say @tool(approval=…) instead.
        """
        if not isinstance(action, str) or not 0 < len(action) <= MAX_ACTION_CHARS or not action.isprintable():
            raise InvalidInput(f"run.approve({action!r:.60}): the action is a name of 1 to {MAX_ACTION_CHARS} printable characters")
        policy = Approval(
            by=by,
            quorum=quorum,
            expires=expires,
            on_expiry=on_expiry,
            escalate_to=escalate_to,
            escalate_expires=escalate_expires,
            editable=editable,
            four_eyes=four_eyes,
        )
        impossible = policy.check_for(self.actor)
        if impossible is not None:
            raise InvalidInput(f"run.approve({action!r:.60}) could never be granted: {impossible}")
        encoded = codec.encode(input)
        _check_editable(action, codec.decode(encoded), policy.editable)
        return self._machine.ask_approval(action, encoded, policy, None if reason is None else _text(reason, "run.approve(reason=)"))

    async def receive(self, topic: str, *, timeout: float | timedelta | None = None) -> Any:
        """The next signal on this topic, in the order in which they were sent; those sent before are kept. TimeoutError after `timeout`."""
        identity.check_id(topic, "run.receive: the topic")
        if timeout is None:
            return await self._machine.receive(topic)
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        if not isinstance(seconds, (int, float)) or isinstance(seconds, bool) or not math.isfinite(seconds):
            raise InvalidInput(f"run.receive(timeout={timeout!r:.60}): seconds or a timedelta")
        async with asyncio.timeout(max(seconds, 0)):
            return await self._machine.receive(topic)

    def patched(self, name: str) -> bool:
        """Whether this run takes the new side of a change in the code: True for runs that have not come past here before the change."""
        return self._machine.patched(identity.check_id(name, "run.patched: the name"))

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


def _check_editable(action: str, value: Any, editable: tuple[str, ...]) -> None:
    missing = [name for name in editable if not isinstance(value, dict) or name not in value]
    if missing:
        raise InvalidInput(f"run.approve({action!r:.60}): {missing[0]} is to be editable, but the input has no such field")


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
