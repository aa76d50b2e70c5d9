"""Run: what an agent sees of its own run. Everything here is the same on every replay."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import uuid
import warnings
from collections.abc import Coroutine, Mapping, Sequence
from datetime import datetime, timedelta
from functools import cached_property
from typing import Any, NoReturn, TypeVar

from perdure.core import codec, identity
from perdure.core.approval import Approval, Decision
from perdure.core.events import AnyBody, DecisionMade, OnExpiry, StatusReported, ThoughtRecorded
from perdure.core.labels import checked_labels
from perdure.core.machine import Edit, Machine
from perdure.core.times import utc
from perdure.errors import InvalidInput

T = TypeVar("T")
MAX_TEXT_BYTES = 64 * 1024
MAX_ACTION_CHARS = 200


class RunLog(logging.LoggerAdapter[logging.Logger]):
    """What `run.log` is: a logger that is silent while the agent repeats its recorded steps."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(logging.getLogger("perdure.agent"))
        self._machine = machine

    def isEnabledFor(self, level: int) -> bool:  # a name of the standard library
        return self._machine.is_live and super().isEnabledFor(level)


class Run:
    """The first argument of every agent: what the agent sees of its own run. All of it is the same on every replay."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._uuids = 0

    @property
    def id(self) -> str:
        """The id of this run."""
        return self._machine.facts.run_id

    @property
    def tenant(self) -> str:
        """The tenant of this run: "default" if no tenant was named when the run was started."""
        return self._machine.facts.tenant

    @property
    def actor(self) -> str | None:
        """The person or program for whom this run acts, as named at the start of the run."""
        return self._machine.facts.actor

    @property
    def version(self) -> str:
        """The version of the agent that drives this run now."""
        return self._machine.facts.version

    @property
    def parent(self) -> str | None:
        """The id of the parent run, if this run is a child."""
        return self._machine.facts.parent

    @property
    def scheduled_for(self) -> datetime | None:
        """The tick, in UTC, for which a schedule has started this run. None: no schedule has started it."""
        tick = self._machine.facts.tick
        return None if tick is None else utc(tick)

    @property
    def cancelled(self) -> bool:
        """Was a cancel of this run requested?"""
        return self._machine.cancel_asked

    def now(self) -> datetime:
        """The time in UTC: the recorded time of the event that woke the agent. It is never the wall clock."""
        return utc(self._machine.now)

    @property
    def _origin(self) -> str:
        """The run with which the history of this run began: the run itself, unless it is a fork."""
        return self._machine.facts.origin or self.id

    @cached_property
    def random(self) -> random.Random:
        """A random generator that gives the same numbers on every replay."""
        return random.Random(identity.seed(self._origin, self._of_this_life("random")))

    def uuid(self) -> uuid.UUID:
        """A new UUID with each call. On every replay the UUIDs are the same."""
        self._uuids += 1
        return uuid.UUID(int=identity.seed(self._origin, self._of_this_life(f"uuid {self._uuids}")) >> 128, version=4)

    @cached_property
    def log(self) -> RunLog:
        """A logger for the agent: `run.log.info("…")`. In a replay it logs nothing, so that no line comes again.

        Its records belong to the logger "perdure.agent". After a crash, lines of the last step may come a second time.
        """
        return RunLog(self._machine)

    def request_approval(
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
        policy: Approval | None = None,
    ) -> Coroutine[Any, Any, Decision]:
        """Ask people about an action, and wait for their `Decision`. While the run waits, it is parked.

        `input` is what these people see and approve: any value that JSON can hold. The other options are the options
        of `Approval`. `policy` is an `Approval` that replaces all these options. To ask before every call of a risky
        tool, with the exact arguments of the call, use `@tool(approval=…)` instead. Raises InvalidInput if the
        approval could never be granted.
        """
        if not isinstance(action, str) or not 0 < len(action) <= MAX_ACTION_CHARS or not action.isprintable():
            raise InvalidInput(
                f"run.request_approval({action!r:.60}): the action is a name of 1 to {MAX_ACTION_CHARS} printable characters"
            )
        policy = policy or Approval(
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
            raise InvalidInput(f"run.request_approval({action!r:.60}) could never be granted: {impossible}")
        encoded = codec.encode(input)
        _check_editable(action, codec.decode(encoded), policy.editable)
        return self._machine.ask_approval(
            action, encoded, policy, None if reason is None else _text(reason, "run.request_approval(reason=)")
        )

    def approve(self, action: str, input: Any = None, **options: Any) -> Coroutine[Any, Any, Decision]:
        """Deprecated since 0.2: use `request_approval`. (A person says yes with `app.approve`.)"""
        warnings.warn("run.approve is called run.request_approval since 0.2", DeprecationWarning, stacklevel=2)
        return self.request_approval(action, input, **options)

    async def receive(self, topic: str, *, timeout: float | timedelta | None = None) -> Any:
        """Wait for the next signal on this topic, and return its payload.

        Signals are received in the order in which they were sent. A signal that arrives before the agent calls
        `receive` is kept. `timeout` is in seconds or a timedelta; after that time TimeoutError is raised.
        """
        identity.check_id(topic, "run.receive: the topic")
        if timeout is None:
            return await self._machine.receive(topic)
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        if not isinstance(seconds, (int, float)) or isinstance(seconds, bool) or not math.isfinite(seconds):
            raise InvalidInput(f"run.receive(timeout={timeout!r:.60}): seconds or a timedelta")
        async with asyncio.timeout(max(seconds, 0)):
            return await self._machine.receive(topic)

    def receive_all(self, topic: str) -> list[Any]:
        """The payloads of all signals on this topic that have arrived and were not received yet. Does not wait."""
        return self._machine.take_signals(identity.check_id(topic, "run.receive_all: the topic"))

    @property
    def restored(self) -> Any:
        """The state of the last checkpoint; None as long as the agent has taken none."""
        return self._machine.restored

    async def checkpoint(self, state: Any) -> NoReturn:
        """Let the run go on from `state`: the agent begins again from the top, and `run.restored` is that state.

        For agents that run for a long time: a resume replays only what came after the last checkpoint. `state` is any
        value that JSON can hold. This call never returns. Calls, approvals and children that other tasks of the agent
        still wait for go on. If the agent makes the same call again, it is the same call. Signals that were not
        received are kept.
        """
        if state is None:
            raise InvalidInput(
                "run.checkpoint: the state is None, and run.restored is None as long as there is no checkpoint; give another"
            )
        await self._machine.checkpoint(codec.encode(state))
        raise AssertionError("run.checkpoint does not return")

    def patched(self, name: str) -> bool:
        """Should this run use the new code of a change in the agent?

        True if the run reaches this place in the code for the first time. False if the run passed this place with the
        old code, before the change.
        """
        return self._machine.patched(identity.check_id(name, "run.patched: the name"))

    def note(self, text: str) -> None:
        """Write a text into the journal, for people who read the journal later."""
        self._machine.record(ThoughtRecorded(_text(text, "run.note")))

    def status(self, text: str) -> None:
        """Say what the agent does now, for people who wait. `perdure show` and `perdure why` show the last status."""
        self._machine.record(StatusReported(_text(text, "run.status")))

    def label(self, labels: Mapping[str, str | None] | None = None, /, **more: str | None) -> None:
        """Set labels of this run, so that people find it: `run.label(customer="c-7")`. None removes a label.

        A label whose key is no Python name goes into a dict: `run.label({"order.id": "o-1"})`. A run has at most 32
        labels. `perdure list --where label.customer:c-7` finds the run.
        """
        changes = checked_labels({**({} if labels is None else labels), **more}, "run.label", removable=True)
        if changes:
            self._machine.label(changes, "run.label")

    def decide(self, choice: T, *, among: Sequence[T] | None = None, reason: str | None = None) -> T:
        """Record a decision, its alternatives and its reason in the journal, and return the choice."""
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

    def _of_this_life(self, what: str) -> str:
        life = self._machine.life
        return f"{what} after {life}" if life else what

    # -- for agents that are built from parts, such as ReAct and Plan -------------------------------------------------
    @property
    def calls(self) -> int:
        """The number of the newest call. Right after `tool(…)` this is the number of the call that was just made."""
        return self._machine.calls

    def edit_of(self, call: int) -> Edit | None:
        """How the person who approved this call has changed its arguments; None if nothing was changed."""
        return self._machine.edits.get(call)

    def begin_no_more(self, call: int) -> None:
        """Begin no further attempt of this call. An attempt under way continues, and the call still has a result."""
        self._machine.begin_no_more(call)

    def arrival(self, topic: str) -> asyncio.Future[None]:
        """A future that is done when a signal on this topic has arrived. The signal stays for `receive` and `receive_all`.

        An agent must wait for something else beside it.
        """
        return self._machine.arrival(topic)

    def hold(self, call: int) -> asyncio.Future[None]:
        """Let this call not begin before `keep`. The future is done when the call is held.

        Only a call that needs an approval and has not begun can be held. The future of any other call is never done, and
        the call ends: wait for either. To withdraw a call that is held, cancel the task that waits for it.
        """
        return self._machine.hold(call)

    def keep(self, call: int) -> None:
        """Record that the agent still wants this call, which is held: it begins as soon as it is approved."""
        self._machine.keep(call)

    def arguments_of(self, call: int) -> bytes:
        """The arguments of this call, which has not ended, as JSON."""
        return self._machine.arguments(call)

    def record(self, body: AnyBody) -> None:
        """Write an event into the journal. `body` is one of the types in perdure.core.events."""
        self._machine.record(body)


def _check_editable(action: str, value: Any, editable: tuple[str, ...]) -> None:
    missing = [name for name in editable if not isinstance(value, dict) or name not in value]
    if missing:
        raise InvalidInput(f"run.request_approval({action!r:.60}): {missing[0]} is to be editable, but the input has no such field")


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
