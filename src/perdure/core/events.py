"""The journal's vocabulary: a closed union of frozen records. Facts, in the past tense.

A body says what happened; the envelope (`Event`) says when, in which order, under which lease, about which call and because
of what. Journals outlive versions: fields are only ever added, with a default, and types are never renamed.

`cause` is the `seq` of the event that made this one happen, so that any event can be walked back to `run_created`:
an intent was caused by the completion that woke the agent, a completion by its intent, a retry by the failure before it.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

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
    "rejected",  # a person said no
    "expired",  # nobody said yes in time
    "withdrawn",  # the approval is not wanted any more
    "over_budget",  # there is not enough left for it
]
Status = Literal[
    "queued", "running", "waiting_approval", "waiting", "paused", "needs_attention", "cancelling", "succeeded", "failed", "cancelled"
]
OnExpiry = Literal["reject", "escalate", "wait"]
OnExceed = Literal["pause", "fail"]
Reason = Literal["in_doubt", "diverged", "poison", "stuck", "error", "budget", "circling"]


class Failure(Struct, frozen=True, gc=False, omit_defaults=True):
    """Why an attempt or a run failed, in words that survive the process."""

    kind: FailureKind
    type: str
    message: str
    lineage: tuple[str, ...] = ()  # names of the exception's other base classes, so that Retry(on=…) can match them
    retry_after_s: float | None = None
    traceback: str | None = None


class Usage(Struct, frozen=True, gc=False, omit_defaults=True):
    """What an attempt has used up, in whole numbers: money in micro-dollars."""

    usd_micros: int = 0
    tokens_in: int = 0
    tokens_out: int = 0
    tokens_cached: int = 0
    model: str | None = None


class Limits(Struct, frozen=True, gc=False, omit_defaults=True):
    """How much a run and its children may use together; None: no limit."""

    usd_micros: int | None = None
    tokens: int | None = None  # in and out
    calls: int | None = None
    busy_us: int | None = None  # time that attempts took
    on_exceed: OnExceed = "pause"


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
    priority: int = 0
    not_before: int | None = None
    parent: str | None = None  # run id
    parent_call: int | None = None
    depth: int = 0  # how many parents there are above it
    budget: Limits | None = None
    key_scheme: int = 1  # how the keys of its calls are made: core/identity.py
    key_namespace: str = ""


class RunClaimed(Body, frozen=True, tag="run_claimed"):
    worker: str
    name: str = ""  # "host:pid", for people
    takeover: bool = False  # the worker before did not give the run up: it died, or its lease ran out
    proven_dead: bool = False  # the kernel says that the worker before is gone
    lost_with: int = 0  # other runs of that worker that may be to blame for its death: all that it held; of a suspect, the other suspects


class RunReleased(Body, frozen=True, tag="run_released"):
    """The worker gave the run up: it waits, needs a person, or is handed over."""

    status: Literal["queued", "waiting", "waiting_approval", "paused", "needs_attention", "cancelling"]
    waiting_for: str
    wake_at: int | None = None
    abrupt: bool = False  # the worker could not wait for its attempts: those under way may still be running
    short_since: int | None = None  # since then calls have waited for money that other calls have reserved


class ToolCallProposed(Body, frozen=True, tag="tool_call_proposed"):
    """The agent wants the call, and it may not start yet. Nothing has been sent."""

    tool: str
    effect: Effect
    key: str
    args: Payload
    digest: str
    until: Literal["approval", "rate", "budget", "handover"]
    at: int | None = None  # when the rate allows it


class ToolCallInitiated(Body, frozen=True, tag="tool_call_initiated"):
    """The intent. Durable before the first byte of the effect, except for `read` and `transaction`."""

    tool: str
    effect: Effect
    # Empty: the one that core/identity.py makes. Recorded where somebody else may know the call by it.
    key: str = ""
    attempt: int = 1
    args: Payload | None = None  # attempt 1 only; not after a proposal, unless a person has edited them
    digest: str | None = None  # of the arguments that were approved; without an approval `args` has it
    timeout_s: float | None = None
    settle_s: float | None = None  # the tool's `settle`; None: the setting reconcile_margin_s
    reconcile: bool = False  # the tool has a hook that can be asked what became of an attempt
    approval: str | None = None  # consumed by this commit
    pinned: str | None = None  # digest of the tool's schema and effect class; with the run's first call of the tool
    # What the attempt is expected to cost. It is reserved in the budget until it is known what came of the attempt.
    estimate: Usage | None = None


class ToolCallCompleted(Body, frozen=True, tag="tool_call_completed"):
    result: Payload | None = None  # None: it happened, but the result was not encodable
    failure: Failure | None = None
    attempt: int = 1
    usage: Usage | None = None


class ToolCallFailed(Body, frozen=True, tag="tool_call_failed"):
    failure: Failure
    attempt: int = 1
    final: bool = False
    usage: Usage | None = None


class ModelCallInitiated(ToolCallInitiated, frozen=True, tag="model_call_initiated"):
    """A model is asked: `tool` is its name, and `args` what the request adds to an earlier one (core/prompts.py)."""


class ModelCallCompleted(ToolCallCompleted, frozen=True, tag="model_call_completed"):
    """The whole answer."""


class ModelCallFailed(ToolCallFailed, frozen=True, tag="model_call_failed"):
    """No answer, or half of one, or one that was lost with its worker; what is known of its usage is counted."""


class ToolCallInDoubt(Body, frozen=True, tag="tool_call_in_doubt"):
    """We do not know whether this attempt happened."""

    attempt: int
    why: str
    failure: Failure | None = None
    loose: bool = False  # the attempt did not stop when it was told to: it may still be running, in a worker that lives
    usage: Usage | None = None


class ToolCallResolved(Body, frozen=True, tag="tool_call_resolved"):
    """The doubt about an attempt has ended: a reconcile hook or a person knows."""

    outcome: Literal["happened", "did_not_happen", "failed"]
    by: str
    attempt: int = 1
    result: Payload | None = None
    failure: Failure | None = None
    note: str | None = None
    final: bool = False  # it did not happen, and its request cannot arrive any more: believed at once
    usage: Usage | None = None  # charged by this event: the estimate, without what the attempts in doubt have said themselves


class RetryScheduled(Body, frozen=True, tag="retry_scheduled"):
    """At `at` the call goes on: attempt `attempt`, or the reconcile hook is asked again."""

    attempt: int
    at: int
    reconcile: bool = False
    turn: bool = False  # then its place in the line of its rate limit comes up; it keeps that, whoever drives the run by then


class ApprovalRequested(Body, frozen=True, tag="approval_requested"):
    """The exact thing that somebody is to say yes or no to, and who may."""

    approval: str  # its id
    action: str  # the tool's name, or what the agent calls it
    input: Payload
    digest: str  # of the input; for a tool the same digest as its arguments have
    reason: str | None = None
    by: tuple[str, ...] = ()  # who may decide: "ann", "role:finance"; nobody named: anybody
    quorum: int = 1
    expires_at: int | None = None
    on_expiry: OnExpiry = "reject"
    escalate_to: tuple[str, ...] = ()
    escalate_us: int | None = None  # how long those have
    editable: tuple[str, ...] = ()  # fields of the input that a decision may change
    schema: Payload | None = None  # JSON Schema of the editable fields
    four_eyes: bool = False  # whoever the run acts for may not decide
    tool: str | None = None  # the call itself waits; None: the agent asked with run.approve


class ApprovalVoted(Body, frozen=True, tag="approval_voted"):
    """One of several who must agree has agreed."""

    approval: str
    by: str
    digest: str
    note: str | None = None
    source: str | None = None


class ApprovalDecided(Body, frozen=True, tag="approval_decided"):
    approval: str
    granted: bool
    by: str
    digest: str  # of what was decided about; after an edit, of what is approved
    note: str | None = None
    source: str | None = None  # from where: "cli", "app", an address
    input: Payload | None = None  # as edited


class ApprovalEscalated(Body, frozen=True, tag="approval_escalated"):
    """Nobody has decided in time: others are asked, or the same people once more."""

    approval: str
    to: tuple[str, ...]
    expires_at: int | None = None


class ApprovalExpired(Body, frozen=True, tag="approval_expired"):
    approval: str
    lapsed: bool = False  # it was granted, and the call could not start in time


class ApprovalWithdrawn(Body, frozen=True, tag="approval_withdrawn"):
    """Nobody wants the answer any more."""

    approval: str


class SignalReceived(Body, frozen=True, tag="signal_received"):
    topic: str
    payload: Payload
    by: str
    key: str | None = None  # the same key is taken once


class ChildStarted(Body, frozen=True, tag="child_started"):
    """The child run is created in the same commit."""

    agent: str
    version: str
    run_id: str
    input: Payload
    digest: str
    target: str | None = None
    queue: str | None = None  # None: the parent's
    budget: Limits | None = None
    key_scheme: int = 1  # of the child
    key_namespace: str = ""


class ChildFinished(Body, frozen=True, tag="child_finished"):
    """Written in the commit that ends the child."""

    run_id: str
    status: Literal["succeeded", "failed", "cancelled"]
    output: Payload | None = None
    failure: Failure | None = None


class TimerSet(Body, frozen=True, tag="timer_set"):
    timer: int
    due: int


class TimerFired(Body, frozen=True, tag="timer_fired"):
    timer: int


class ThoughtRecorded(Body, frozen=True, tag="thought_recorded"):
    text: str


class PlanGenerated(Body, frozen=True, tag="plan_generated"):
    """The plan that this run follows, and no other: recorded once, before its first step."""

    plan: Payload
    digest: str
    by: str | None = None  # the model that has written it


class DecisionMade(Body, frozen=True, tag="decision_made"):
    choice: Payload
    among: Payload | None = None
    reason: str | None = None


class StatusReported(Body, frozen=True, tag="status_reported"):
    text: str


class PatchMarked(Body, frozen=True, tag="patch_marked"):
    """This run takes the new side of a change in the code."""

    name: str


class RunPaused(Body, frozen=True, tag="run_paused"):
    by: str
    reason: str | None = None


class RunUnpaused(Body, frozen=True, tag="run_unpaused"):
    by: str
    note: str | None = None


class RunAdopted(Body, frozen=True, tag="run_adopted"):
    """A person lets another version of the agent go on with the run."""

    version: str
    by: str
    note: str | None = None


class PinChanged(Body, frozen=True, tag="pin_changed"):
    """Something that the run was begun with is not the same any more: said, not ignored."""

    what: str  # "tool refund"
    before: str
    after: str


class BudgetExceeded(Body, frozen=True, tag="budget_exceeded"):
    budget_of: str  # run id: this run or one above it
    what: str  # "usd", "tokens", "calls" or "seconds"
    limit: int
    used: int  # spent and reserved
    wanted: int


class BudgetRaised(Body, frozen=True, tag="budget_raised"):
    added: Limits
    by: str
    note: str | None = None


class CancelRequested(Body, frozen=True, tag="cancel_requested"):
    by: str
    reason: str | None = None


class AttentionNeeded(Body, frozen=True, tag="attention_needed"):
    """The run stops until a person has looked: `why` shows the detail."""

    reason: Reason
    detail: str


class RunRequeued(Body, frozen=True, tag="run_requeued"):
    """A person sends a run that needed attention back to work."""

    by: str
    note: str | None = None


class RunSucceeded(Body, frozen=True, tag="run_succeeded"):
    output: Payload


class RunFailed(Body, frozen=True, tag="run_failed"):
    failure: Failure


class Unsettled(Struct, frozen=True, gc=False, omit_defaults=True):
    """A call that was in doubt, or under way, when its run was ended by force: what it may have cost is charged."""

    call: int
    attempt: int
    usage: Usage


class RunCancelled(Body, frozen=True, tag="run_cancelled"):
    reason: str | None = None
    forced_by: str | None = None  # ended by a person without its agent; what was in doubt stays so
    unsettled: tuple[Unsettled, ...] = ()  # charged by this event


AnyBody = (
    RunCreated
    | RunClaimed
    | RunReleased
    | ToolCallProposed
    | ToolCallInitiated
    | ToolCallCompleted
    | ToolCallFailed
    | ModelCallInitiated
    | ModelCallCompleted
    | ModelCallFailed
    | PlanGenerated
    | ToolCallInDoubt
    | ToolCallResolved
    | RetryScheduled
    | ApprovalRequested
    | ApprovalVoted
    | ApprovalDecided
    | ApprovalEscalated
    | ApprovalExpired
    | ApprovalWithdrawn
    | SignalReceived
    | ChildStarted
    | ChildFinished
    | TimerSet
    | TimerFired
    | PatchMarked
    | RunPaused
    | RunUnpaused
    | RunAdopted
    | PinChanged
    | BudgetExceeded
    | BudgetRaised
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


class CallEvents(NamedTuple):
    """How the life of a call is told: a model's differs from a tool's in its names alone."""

    initiated: type[ToolCallInitiated]
    completed: type[ToolCallCompleted]
    failed: type[ToolCallFailed]


OF_TOOL = CallEvents(ToolCallInitiated, ToolCallCompleted, ToolCallFailed)
OF_MODEL = CallEvents(ModelCallInitiated, ModelCallCompleted, ModelCallFailed)


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
