"""The journal's vocabulary: a closed union of frozen records. Facts, in the past tense.

A body says what happened; the envelope (`Event`) says when, in which order, under which lease, about which call and because
of what. Journals outlive versions: fields are only ever added, with a default, and types are never renamed.

`cause` is the `seq` of the event that made this one happen, so that any event can be walked back to `run_created`:
an intent was caused by the completion that woke the agent, a completion by its intent, a retry by the failure before it.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import Struct

from perdure.core.codec import Payload

Effect = Literal["read", "idempotent", "keyed", "transaction", "once"]
FailureKind = Literal[
    "not_sent",  # proof that nothing was sent
    "rate_limited",  # refused for now
    "timeout",  # no answer in time: in doubt
    "reset",  # the line broke: in doubt
    "server_error",  # 5xx: in doubt
    "process_died",  # an isolated tool's process ended without an answer: in doubt
    "refused",  # 4xx, validation, permission: no
    "fatal",  # the tool says so
    "cancelled",  # given up by the agent or by a person
    "error",  # the tool raised anything else
    "not_encodable",  # it happened, but its result cannot be recorded
]


class Failure(Struct, frozen=True, gc=False, omit_defaults=True):
    """Why an attempt or a run failed, in words that survive the process."""

    kind: FailureKind
    type: str
    message: str
    lineage: tuple[str, ...] = ()  # names of the exception's other base classes, so that Retry(on=…) can match them
    retry_after_s: float | None = None
    traceback: str | None = None


class Body(Struct, frozen=True, gc=False, omit_defaults=True, tag_field="type"):
    """Base of all bodies; it holds nothing."""


class RunCreated(Body, frozen=True, tag="run_created"):
    run_id: str
    agent: str
    version: str
    tenant: str
    input: Payload
    actor: str | None = None
    target: str | None = None  # where the code was, for `perdure resume` without a TARGET
    queue: str = "default"


class RunClaimed(Body, frozen=True, tag="run_claimed"):
    worker: str
    name: str = ""  # "host:pid", for people
    takeover: bool = False  # the worker before did not give the run up: it died, or its lease ran out
    proven_dead: bool = False  # the kernel says that the worker before is gone


class RunReleased(Body, frozen=True, tag="run_released"):
    """The worker gave the run up: it waits, needs a person, or is handed over."""

    status: Literal["queued", "waiting", "needs_attention"]
    waiting_for: str
    wake_at: int | None = None
    abrupt: bool = False  # the worker could not wait for its attempts: those under way may still be running


class ToolCallInitiated(Body, frozen=True, tag="tool_call_initiated"):
    """The intent. Durable before the first byte of the effect, except for `read` and `transaction`."""

    tool: str
    effect: Effect
    key: str
    attempt: int = 1
    args: Payload | None = None  # attempt 1 only
    digest: str | None = None  # of the arguments; attempt 1 only
    timeout_s: float | None = None
    reconcile: bool = False  # the tool has a hook that can be asked what became of an attempt


class ToolCallCompleted(Body, frozen=True, tag="tool_call_completed"):
    result: Payload | None = None  # None: it happened, but the result was not encodable
    failure: Failure | None = None
    attempt: int = 1


class ToolCallFailed(Body, frozen=True, tag="tool_call_failed"):
    failure: Failure
    attempt: int = 1
    final: bool = False


class ToolCallInDoubt(Body, frozen=True, tag="tool_call_in_doubt"):
    """We do not know whether this attempt happened."""

    attempt: int
    why: str
    failure: Failure | None = None
    loose: bool = False  # the attempt did not stop when it was told to: it may still be running, in a worker that lives


class ToolCallResolved(Body, frozen=True, tag="tool_call_resolved"):
    """The doubt about an attempt has ended: a reconcile hook or a person knows."""

    outcome: Literal["happened", "did_not_happen", "failed"]
    by: str
    attempt: int = 1
    result: Payload | None = None
    failure: Failure | None = None
    note: str | None = None


class RetryScheduled(Body, frozen=True, tag="retry_scheduled"):
    """At `at` the call goes on: attempt `attempt`, or the reconcile hook is asked again."""

    attempt: int
    at: int
    reconcile: bool = False


class TimerSet(Body, frozen=True, tag="timer_set"):
    timer: int
    due: int


class TimerFired(Body, frozen=True, tag="timer_fired"):
    timer: int


class ThoughtRecorded(Body, frozen=True, tag="thought_recorded"):
    text: str


class DecisionMade(Body, frozen=True, tag="decision_made"):
    choice: Payload
    among: Payload | None = None
    reason: str | None = None


class StatusReported(Body, frozen=True, tag="status_reported"):
    text: str


class CancelRequested(Body, frozen=True, tag="cancel_requested"):
    by: str
    reason: str | None = None


class AttentionNeeded(Body, frozen=True, tag="attention_needed"):
    """The run stops until a person has looked: `why` shows the detail."""

    reason: Literal["in_doubt", "diverged", "poison", "stuck", "error"]
    detail: str


class RunRequeued(Body, frozen=True, tag="run_requeued"):
    """A person sends a run that needed attention back to work."""

    by: str
    note: str | None = None


class RunSucceeded(Body, frozen=True, tag="run_succeeded"):
    output: Payload


class RunFailed(Body, frozen=True, tag="run_failed"):
    failure: Failure


class RunCancelled(Body, frozen=True, tag="run_cancelled"):
    reason: str | None = None


AnyBody = (
    RunCreated
    | RunClaimed
    | RunReleased
    | ToolCallInitiated
    | ToolCallCompleted
    | ToolCallFailed
    | ToolCallInDoubt
    | ToolCallResolved
    | RetryScheduled
    | TimerSet
    | TimerFired
    | ThoughtRecorded
    | DecisionMade
    | StatusReported
    | CancelRequested
    | AttentionNeeded
    | RunRequeued
    | RunSucceeded
    | RunFailed
    | RunCancelled
)
Terminal = RunSucceeded | RunFailed | RunCancelled


class Event(Struct, frozen=True, gc=False):
    """One line of a journal."""

    seq: int
    event_id: str  # 32 hex digits, made by the writer before the commit, so that a lost COMMIT can be looked up
    ts: int  # microseconds since 1970, for people; order comes from seq alone
    epoch: int
    call: int | None
    cause: int | None
    body: AnyBody

    @property
    def type(self) -> str:
        return tag_of(self.body)


encode_body = msgspec.json.Encoder().encode
decode_body = msgspec.json.Decoder(AnyBody).decode


def tag_of(body: AnyBody) -> str:
    """The public name of an event's type, such as `tool_call_initiated`."""
    tag = body.__struct_config__.tag
    assert isinstance(tag, str)
    return tag
