"""Detects agents that go in circles: a call has the same answer repeatedly, or money is spent without a new effect.

The detector is a second fold over the journal. It sees every event once, in order. It keeps digests and no payloads,
and it gives the same result on every replay.

An observation is a call's tool, arguments and outcome, or a child's agent, input and outcome. There are two kinds of
counters. The following events reset them:

    repeats      an observation that is new in this run · a timer that fired · anything from outside
    usd, tokens  a new observation of a child, or of a completed call that is not a `read` · a new status or choice ·
                 anything from outside

"From outside" means: signals, decisions about approvals, and people who requeue or unpause the run.
"""

from __future__ import annotations

import hashlib

import msgspec
from msgspec import Struct

from perdure.core import codec
from perdure.core.budget import NOTHING, amounts_of, micros
from perdure.core.codec import Payload
from perdure.core.events import (
    ApprovalDecided,
    CancelRequested,
    ChildFinished,
    ChildStarted,
    DecisionMade,
    Event,
    Failure,
    ModelCallCompleted,
    ModelCallFailed,
    RunRequeued,
    RunUnpaused,
    SignalReceived,
    StatusReported,
    TimerFired,
    ToolCallCompleted,
    ToolCallFailed,
    ToolCallInDoubt,
    ToolCallResolved,
    Usage,
)
from perdure.core.state import CallState
from perdure.errors import InvalidInput

RECONCILED = "reconcile"  # ToolCallResolved.by of a hook; every other value is a person
_SHOWN_CHARS = 80


class Circles(Struct, frozen=True):
    """When a run counts as going in circles. Such a run stops until a person has looked.

    `repeats`: the run stops when the same call has returned the same answer this many times and nothing else changed.
    `usd`, `tokens`: the run may spend this much without a new effect. A limit that is not given is not checked.
    """

    repeats: int | None = None
    usd: float | int | str | None = None
    tokens: int | None = None

    def __post_init__(self) -> None:
        for name, low in (("repeats", 2), ("tokens", 1)):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or not low <= value <= 10**15):
                raise InvalidInput(f"Circles({name}={codec.shown(value)}): a whole number of at least {low}")
        if self.usd is not None and self.usd_micros == 0:
            raise InvalidInput("Circles(usd=0): an amount of at least a millionth; with 0, every cost would count as a circle")
        if self.repeats is None and self.usd is None and self.tokens is None:
            raise InvalidInput("Circles(): say what counts as a circle: repeats=, usd= or tokens=")

    @property
    def usd_micros(self) -> int | None:
        return None if self.usd is None else micros(self.usd, "Circles(usd=)")


class _Deed(Struct, frozen=True, gc=False):
    """What a call or a child was asked to do."""

    number: int
    name: str  # the name of the tool or the agent
    digest: str  # the digest of the arguments
    args: Payload | None


class _Streak(Struct):
    """How often one observation was made since the last change."""

    times: int
    first_call: int


class CircleWatch:
    """Watches one run. `circling` says why the run goes in circles; None: the run does not.

    `circling` is None again when a person requeues, unpauses or cancels the run, or resolves one of its calls. The
    reason is computed from the journal: if a worker dies before it could stop the run, the next worker finds the same
    reason on replay.
    """

    def __init__(self, circles: Circles) -> None:
        self._repeats = circles.repeats
        self._usd_micros = circles.usd_micros
        self._tokens = circles.tokens
        self._seen: set[bytes] = set()  # observations, statuses and choices since the run began
        self._streaks: dict[bytes, _Streak] = {}
        self._children: dict[int, _Deed] = {}  # children that have not ended
        self._changed_seq = 1  # the seq of the last event that was new; at first that is `run_created`
        self._effect_seq = 1
        self._spent = NOTHING
        self.circling: str | None = None

    def observe(self, event: Event, call: CallState | None) -> str | None:
        """If this event is the first that shows that the run goes in circles, the reason; None for every other event.

        `call` is the call that the event is about, if there is such a call.
        """
        body = event.body
        said = self.circling
        match body:
            case RunRequeued() | RunUnpaused() | CancelRequested():
                self._sent_on(event)
            case SignalReceived() | ApprovalDecided():
                self._changed(event)
                self._took_effect(event)
            case ChildStarted():
                assert event.call is not None, event
                self._children[event.call] = _Deed(event.call, body.agent, body.digest, body.input)
            case ChildFinished():
                assert event.call is not None, event
                self._came(event, "child", self._children.pop(event.call), body.output, _same_failure(body), effect=True)
            case TimerFired():
                self._changed(event)
            case StatusReported():
                self._said(event, "status", body.text)
            case DecisionMade():
                self._said(event, "choice", _digest(body.choice))
            case ModelCallCompleted() | ModelCallFailed():
                # An answer of a model changes nothing by itself: only its cost and the agent's next calls count.
                self._spend(body.usage)
            case ToolCallCompleted():
                self._spend(body.usage)
                self._ended(event, call, body.result, body.failure, happened=True)
            case ToolCallFailed():
                self._spend(body.usage)
                if body.final:
                    self._ended(event, call, None, body.failure, happened=False)
            case ToolCallInDoubt():
                self._spend(body.usage)
            case ToolCallResolved():
                if body.by != RECONCILED:
                    self._sent_on(event)
                self._spend(body.usage)
                if body.outcome != "did_not_happen":
                    self._ended(event, call, body.result, body.failure, happened=body.outcome == "happened")
        self._check_spending()
        return self.circling if said is None else None

    # -- events that reset the counters -----------------------------------------------------------------------------------
    def _sent_on(self, event: Event) -> None:
        self.circling = None
        self._changed(event)
        self._took_effect(event)

    def _changed(self, event: Event) -> None:
        self._streaks.clear()
        self._changed_seq = event.seq

    def _took_effect(self, event: Event) -> None:
        self._spent = NOTHING
        self._effect_seq = event.seq

    def _said(self, event: Event, kind: str, text: str) -> None:
        if self._is_new(_mark(kind, text)):
            self._took_effect(event)

    def _is_new(self, mark: bytes) -> bool:
        before = len(self._seen)
        self._seen.add(mark)
        return len(self._seen) > before

    # -- events that increase the counters --------------------------------------------------------------------------------
    def _spend(self, usage: Usage | None) -> None:
        if usage is not None:
            self._spent = self._spent + amounts_of(usage)

    def _ended(self, event: Event, call: CallState | None, result: Payload | None, failure: Failure | None, *, happened: bool) -> None:
        assert call is not None, event
        deed = _Deed(call.number, call.tool, call.digest or "", call.args)
        self._came(event, "call", deed, result, failure, effect=happened and call.effect != "read")

    def _came(self, event: Event, kind: str, deed: _Deed, result: Payload | None, failure: Failure | None, *, effect: bool) -> None:
        came = ("failed", failure.type, failure.message) if failure is not None else ("returned", _digest(result))
        mark = _mark(kind, deed.name, deed.digest, *came)
        if self._is_new(mark):
            self._changed(event)
            if effect:
                self._took_effect(event)
        streak = self._streaks.setdefault(mark, _Streak(0, deed.number))
        streak.times += 1
        if self._repeats is not None and streak.times >= self._repeats and self.circling is None:
            self.circling = self._about(deed, streak, result, failure)

    def _about(self, deed: _Deed, streak: _Streak, result: Payload | None, failure: Failure | None) -> str:
        came = f"failed in the same way {streak.times} times" if failure else f"returned the same result {streak.times} times"
        what = f"{failure.type}: {_cut(failure.message)}" if failure else _shown(result)
        in_a_row = " in a row" if len(self._streaks) == 1 else ""
        return (
            f"{deed.name}({_arguments(deed.args)}) has {came}{in_a_row}, calls {streak.first_call} to {deed.number}, "
            f"and nothing else has changed since event {self._changed_seq}: {what}"
        )

    def _check_spending(self) -> None:
        if self.circling is not None:
            return
        spent, limit = self._spent.usd_micros, self._usd_micros
        if limit is not None and spent > limit:
            self.circling = self._idle(f"{_dollars(spent)} spent", _dollars(limit))
        elif self._tokens is not None and self._spent.tokens > self._tokens:
            self.circling = self._idle(f"{self._spent.tokens:,} tokens used", f"{self._tokens:,}")

    def _idle(self, spent: str, limit: str) -> str:
        return f"{spent} since event {self._effect_seq} without progress (at most {limit}): no new effect, answer from outside, status or choice"


def _same_failure(ended: ChildFinished) -> Failure | None:
    """Why the child did not succeed. The message has no run id, because every child has a different run id."""
    failure = ended.failure
    return failure and msgspec.structs.replace(failure, message=failure.message.replace(ended.run_id, "…"))


def _digest(payload: Payload | None) -> str:
    """The digest of the payload's content. An inline payload and a blob with the same content have the same digest."""
    if payload is None:
        return ""
    inline = payload.inline
    return codec.digest(inline) if inline is not None else str(payload.blob)


def _mark(*parts: str) -> bytes:
    # Each part is prefixed with its length: otherwise ("a", "bc") and ("ab", "c") would be equal (T5).
    whole = "".join(f"{len(part)}:{part}" for part in parts)
    return hashlib.blake2b(whole.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _arguments(args: Payload | None) -> str:
    inline = None if args is None else args.inline
    value = codec.decode(inline) if inline is not None and len(inline) <= codec.INLINE_BYTES else None
    if not isinstance(value, dict):
        return "…"
    return _cut(", ".join(f"{name}={codec.encode(item)[: 4 * _SHOWN_CHARS].decode('utf-8', 'ignore')}" for name, item in value.items()))


def _shown(payload: Payload | None) -> str:
    if payload is None:
        return "nothing that could be recorded"
    inline = payload.inline
    return _cut(inline[: 4 * _SHOWN_CHARS].decode("utf-8", "ignore") if inline is not None else str(payload.preview))


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "…"


def _dollars(usd_micros: int) -> str:
    whole, part = divmod(usd_micros, 1_000_000)
    decimals = f"{part:06d}".rstrip("0")
    return f"${whole:,}.{decimals:0<2}"
