"""The events of a journal: a closed union of frozen records, named in the past tense.

The body of an event says what happened. The envelope (`Event`) says when that happened, in which order, in which
epoch, for which call and because of which event. A journal is read by later versions of perdure: so fields are only
added, always with a default, and types are never renamed.

`cause` is the `seq` of the event that led to this event. Every event but `run_created` has one, and it is an earlier
event of the same journal, so that every event can be traced back to `run_created`. An intent is caused by the
completion that woke the agent, a completion by its intent, and a retry by the failure before that retry. Post that
answers nothing has the event before it as its cause. docs/journal.md has the whole list. perdure 0.1 left out the
cause of releases and of some post.

`batch` is the id of a bulk operation: a person has sent the same to many runs with one command (`perdure cancel --where`),
or a program with one app (`Perdure(batch=…)`). Empty: the event belongs to no batch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeVar

import msgspec
from msgspec import Struct, structs

from perdure.core.codec import Payload

Effect = Literal["read", "idempotent", "keyed", "transaction", "once"]
FailureKind = Literal[
    "not_sent",  # proof that nothing was sent
    "rate_limited",  # refused for now
    "timeout",  # no answer in time: in doubt
    "reset",  # the connection broke: in doubt
    "server_error",  # 5xx: in doubt
    "not_saved",  # an artifact could not be stored, maybe after the effect: in doubt
    "process_died",  # an isolated tool's process ended without an answer: in doubt
    "refused",  # 4xx, validation, permission: the effect did not happen, and the same request would be refused again
    "fatal",  # the tool raised Fatal
    "cancelled",  # the attempt was stopped: the agent stopped waiting, or the run was cancelled, or the worker drained
    "error",  # the tool raised another exception
    "not_encodable",  # the effect happened, but its result cannot be recorded
    "rejected",  # a person rejected the approval
    "expired",  # the approval expired
    "withdrawn",  # the approval was withdrawn
    "over_budget",  # the budget does not cover the call
]
Status = Literal[
    "queued", "running", "waiting_approval", "waiting", "paused", "needs_attention", "cancelling", "succeeded", "failed", "cancelled"
]
OnExpiry = Literal["reject", "escalate", "wait"]
OnExceed = Literal["pause", "fail"]
Reason = Literal["in_doubt", "diverged", "poison", "stuck", "error", "budget", "circling", "restored"]


class Failure(Struct, frozen=True, gc=False, omit_defaults=True):
    """Why an attempt or a run failed, as data that outlives the process."""

    kind: FailureKind
    type: str
    message: str
    lineage: tuple[str, ...] = ()  # names of the exception's other base classes, so that Retry(on=…) can match them
    retry_after_s: float | None = None
    traceback: str | None = None
    over: BudgetExceeded | None = None  # kind "over_budget": which budget does not cover the call


class Usage(Struct, frozen=True, gc=False, omit_defaults=True):
    """What an attempt has used, in integers: money in micro-dollars."""

    usd_micros: int = 0
    tokens_in: int = 0
    tokens_out: int = 0
    tokens_cached: int = 0
    model: str | None = None


class Limits(Struct, frozen=True, gc=False, omit_defaults=True):
    """How much a run and its children may use together. A field that is None sets no limit."""

    usd_micros: int | None = None
    tokens: int | None = None  # input and output tokens together
    calls: int | None = None
    busy_us: int | None = None  # total duration of attempts
    on_exceed: OnExceed = "pause"


class TraceContext(Struct, frozen=True, gc=False, omit_defaults=True):
    """Which trace of OpenTelemetry something belongs to, and below which span: the two headers of W3C Trace Context."""

    parent: str  # traceparent
    state: str = ""  # tracestate


class Body(Struct, frozen=True, gc=False, omit_defaults=True, tag_field="type"):
    """Base class of all bodies."""


class RunCreated(Body, frozen=True, tag="run_created"):
    run_id: str
    agent: str
    version: str  # empty: the version of the first worker that claims the run
    tenant: str
    input: Payload
    actor: str | None = None
    target: str | None = None  # where the agent's code is, for `perdure resume` without a TARGET
    queue: str = "default"
    priority: int = 0
    not_before: int | None = None
    parent: str | None = None  # run id
    parent_call: int | None = None
    depth: int = 0  # number of ancestors
    budget: Limits | None = None
    key_scheme: int = 1  # how the keys of the run's calls are derived: see core/identity.py
    key_namespace: str = ""
    # Only of a fork: the run with which its history began. The events up to `inherited` are copies of events of the run
    # that was forked; the next event is `run_forked`.
    forked_from: str | None = None
    inherited: int = 0
    # Only of a fork that is a rehearsal, in which nothing touches the world: the run that is rehearsed. Its agent sees that id.
    rehearses: str | None = None
    # The run was started by the agent's name, without its code. The worker that begins the run checks the input, and
    # records the budget that the agent declares.
    by_name: bool = False
    labels: dict[str, str] = {}
    # Only of a run that a schedule has started: the schedule's id, and the tick (µs since 1970).
    schedule: str | None = None
    tick: int | None = None
    trace: TraceContext | None = None  # of the program that started the run; of a child: below the span of its parent


class RunClaimed(Body, frozen=True, tag="run_claimed"):
    worker: str
    name: str = ""  # "host:pid", for people
    takeover: bool = False  # the previous worker did not release the run: that worker died, or its lease expired
    proven_dead: bool = False  # the kernel has proved that the previous worker is dead
    # How many other runs may have killed the previous worker. If this run is a suspect, this number counts only the
    # other suspects of that worker. If not, it counts all other runs that the worker held.
    lost_with: int = 0
    # The version of the worker's code, which the run takes with this claim: only if the run had no version before.
    version: str = ""


class RunReleased(Body, frozen=True, tag="run_released"):
    """The worker released the run: the run is parked, or needs a person, or another worker is to claim it."""

    status: Literal["queued", "waiting", "waiting_approval", "paused", "needs_attention", "cancelling"]
    waiting_for: str
    wake_at: int | None = None
    abrupt: bool = False  # the worker did not wait for the attempts under way: these attempts may still be running
    short_since: int | None = None  # the time since when calls have waited for money that other calls have reserved


class ToolCallProposed(Body, frozen=True, tag="tool_call_proposed"):
    """The agent made the call, but the call may not start yet. Nothing has been sent."""

    tool: str
    effect: Effect
    key: str
    args: Payload
    digest: str
    until: Literal["approval", "rate", "budget", "handover", "fork"]  # "fork": for ever, because the run is a rehearsal
    at: int | None = None  # only for `until="rate"`: when the rate limit allows the call to start


class ToolCallInitiated(Body, frozen=True, tag="tool_call_initiated"):
    """The intent of an attempt: durable before the effect begins, except for `read` and `transaction`."""

    tool: str
    effect: Effect
    # The idempotency key. It is recorded if the service may know the call by this key. If it is empty,
    # core/identity.py derives the key.
    key: str = ""
    attempt: int = 1
    # The arguments, only in attempt 1. If the call was proposed, the proposal has the arguments, and this field is set
    # only if a person edited them.
    args: Payload | None = None
    digest: str | None = None  # the digest of the approved arguments; without an approval, `args` gives the digest
    timeout_s: float | None = None
    settle_s: float | None = None  # the tool's `settle`; None: the setting reconcile_margin_s
    reconcile: bool = False  # the tool has a reconcile hook
    approval: str | None = None  # the id of the approval that the commit of this event consumes
    pinned: str | None = None  # digest of the tool's schema and effect class; only in the run's first call of the tool
    # The expected cost of the attempt. It is reserved in the budget until the outcome of the attempt is known.
    estimate: Usage | None = None
    keyless: bool = False  # the tool of this `once` or `keyed` call takes no `call`, so no service can know the key


class ToolCallCompleted(Body, frozen=True, tag="tool_call_completed"):
    result: Payload | None = None  # None: the effect happened, but its result was not encodable
    failure: Failure | None = None
    attempt: int = 1
    usage: Usage | None = None
    progress: Payload | None = None  # the last progress that the attempt reported with `call.heartbeat`


class ToolCallFailed(Body, frozen=True, tag="tool_call_failed"):
    failure: Failure
    attempt: int = 1
    final: bool = False
    usage: Usage | None = None
    # As in ToolCallCompleted; the next attempt gets this progress as `call.last_progress`.
    progress: Payload | None = None


class ModelCallInitiated(ToolCallInitiated, frozen=True, tag="model_call_initiated"):
    """A request to a model.

    `tool` is the name of the model. `args` is what the request adds to an earlier request (core/prompt_deltas.py).
    """


class ModelCallCompleted(ToolCallCompleted, frozen=True, tag="model_call_completed"):
    """The complete answer of a model."""


class ModelCallFailed(ToolCallFailed, frozen=True, tag="model_call_failed"):
    """A model gave no answer or an incomplete answer, or the answer was lost with the worker.

    Usage that is known is counted.
    """


class ToolCallInDoubt(Body, frozen=True, tag="tool_call_in_doubt"):
    """It is not known whether an attempt of this call happened."""

    attempt: int
    why: str
    failure: Failure | None = None
    loose: bool = False  # the attempt was told to stop and did not: the attempt may still be running, in a live worker
    usage: Usage | None = None
    # The last progress of the attempt. If the worker was lost, this is the last progress that was stored before the
    # loss. The progress proves nothing about the effect.
    progress: Payload | None = None


class ToolCallResolved(Body, frozen=True, tag="tool_call_resolved"):
    """A reconcile hook or a person has said whether an attempt in doubt happened."""

    outcome: Literal["happened", "did_not_happen", "failed"]
    by: str
    attempt: int = 1
    result: Payload | None = None
    failure: Failure | None = None
    note: str | None = None
    # Only for `did_not_happen`: the request of the attempt cannot arrive at the service later. So the call may be made
    # again at once.
    final: bool = False
    # What this event charges: the estimate minus the usage that the attempts in doubt reported.
    usage: Usage | None = None
    batch: str = ""  # the id of the batch: a person has settled calls of many runs with one command


class RetryScheduled(Body, frozen=True, tag="retry_scheduled"):
    """The call continues at the time `at`: attempt number `attempt` begins, or the reconcile hook is asked again."""

    attempt: int
    at: int
    reconcile: bool = False
    # `at` is the start time of the call under its rate limit. The call keeps this start time when another worker takes
    # over the run.
    turn: bool = False


class ApprovalRequested(Body, frozen=True, tag="approval_requested"):
    """Exactly what is to be approved, and who may decide."""

    approval: str  # its id
    action: str  # the tool's name, or the action that the agent named
    input: Payload
    digest: str  # the digest of the input; for a tool call, the digest of its arguments
    reason: str | None = None
    by: tuple[str, ...] = ()  # who may decide, such as "ann" or "role:finance"; if empty, every person may decide
    quorum: int = 1
    expires_at: int | None = None
    on_expiry: OnExpiry = "reject"
    escalate_to: tuple[str, ...] = ()
    escalate_us: int | None = None  # how long the people in `escalate_to` have for their decision, in microseconds
    editable: tuple[str, ...] = ()  # fields of the input that a decision may change
    schema: Payload | None = None  # JSON Schema of the editable fields
    four_eyes: bool = False  # the person for whom the run acts may not approve
    tool: str | None = None  # the tool whose call needs the approval; None: the agent called run.request_approval


class ApprovalVoted(Body, frozen=True, tag="approval_voted"):
    """One person agreed, and the quorum is not reached yet."""

    approval: str
    by: str
    digest: str
    note: str | None = None
    source: str | None = None


class ApprovalDecided(Body, frozen=True, tag="approval_decided"):
    approval: str
    granted: bool
    by: str
    digest: str  # the digest of the input, or of the edited input if the person edited it
    note: str | None = None
    source: str | None = None  # where the decision came from: "cli", "app", an address
    input: Payload | None = None  # the edited input


class ApprovalEscalated(Body, frozen=True, tag="approval_escalated"):
    """No decision came in time: other people are asked, or the same people are reminded."""

    approval: str
    to: tuple[str, ...]
    expires_at: int | None = None


class ApprovalExpired(Body, frozen=True, tag="approval_expired"):
    approval: str
    lapsed: bool = False  # the approval was granted, but the call could not start in time


class ApprovalWithdrawn(Body, frozen=True, tag="approval_withdrawn"):
    """The run no longer waits for the decision about this approval."""

    approval: str


class CallHeld(Body, frozen=True, tag="call_held"):
    """The agent considers again whether it wants this call, which needs an approval and has not begun.

    Until `call_kept`, no attempt of the call begins, even if the approval is granted.
    """


class CallKept(Body, frozen=True, tag="call_kept"):
    """The agent still wants the call that is held: it begins as soon as its approval is granted."""

    number: int


class SignalReceived(Body, frozen=True, tag="signal_received"):
    topic: str
    payload: Payload
    by: str
    key: str | None = None  # a second signal with the same key is ignored


class ChildStarted(Body, frozen=True, tag="child_started"):
    """A child was started. The same commit creates the child's run."""

    agent: str
    version: str  # as in RunCreated
    run_id: str
    input: Payload
    digest: str
    target: str | None = None
    queue: str | None = None  # None: the queue of the parent
    budget: Limits | None = None
    key_scheme: int = 1  # the child's key scheme
    key_namespace: str = ""
    rehearsed: bool = False  # the run is a rehearsal: no child was started, and there is no run with this id
    trace: TraceContext | None = None  # as in RunCreated: for the child


class ChildFinished(Body, frozen=True, tag="child_finished"):
    """A child ended. This event is written in the commit that ends the child's run."""

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
    """The only plan that this run follows. It is recorded once, before the first step of the plan."""

    plan: Payload
    digest: str
    by: str | None = None  # the model that wrote the plan


class DecisionMade(Body, frozen=True, tag="decision_made"):
    choice: Payload
    among: Payload | None = None
    reason: str | None = None


class StatusReported(Body, frozen=True, tag="status_reported"):
    text: str


class LabelsChanged(Body, frozen=True, tag="labels_changed"):
    """The agent has set labels of its run. None: it has removed the label."""

    labels: dict[str, str | None]


class PatchMarked(Body, frozen=True, tag="patch_marked"):
    """This run uses the new code of a code change: `run.patched(name)` returned True."""

    name: str


class RunPaused(Body, frozen=True, tag="run_paused"):
    by: str
    reason: str | None = None
    batch: str = ""


class RunUnpaused(Body, frozen=True, tag="run_unpaused"):
    by: str
    note: str | None = None
    # The run had not begun, and a person lets it begin before its `not_before`, with the next claim.
    early: bool = False
    batch: str = ""


class RunAdopted(Body, frozen=True, tag="run_adopted"):
    """A person allowed another version of the agent to continue the run."""

    version: str
    by: str
    note: str | None = None
    batch: str = ""


class FrameChanged(Body, frozen=True, tag="frame_changed"):
    """A person let another version of an agent continue the run: what comes next has the frame of that version.

    The frame of a ReAct turn is what the request to the model has beside its messages: instructions, tools, model, limits.
    The frame of a step is its plan. What is before this event is replayed with the frame that is recorded here.
    """

    version: str
    by: str
    frame: Payload
    # The seq of an event. `frame` applies to everything that the agent has asked for because of that event, or because
    # of an earlier one. It is the highest cause of the calls and other statements that the agent has made so far.
    after: int
    note: str | None = None
    batch: str = ""


class PinChanged(Body, frozen=True, tag="pin_changed"):
    """A tool has changed since the run first called it."""

    what: str  # "tool refund"
    before: str
    after: str


class BudgetExceeded(Body, frozen=True, tag="budget_exceeded"):
    budget_of: str  # run id: this run or an ancestor
    what: str  # "usd", "tokens", "calls" or "seconds"
    limit: int
    used: int  # spent plus reserved
    wanted: int


class BudgetDeclared(Body, frozen=True, tag="budget_declared"):
    """The budget that the agent's code declares, for a run that was started by name. It applies from this event on."""

    limits: Limits


class BudgetRaised(Body, frozen=True, tag="budget_raised"):
    added: Limits
    by: str
    note: str | None = None
    batch: str = ""


class CancelRequested(Body, frozen=True, tag="cancel_requested"):
    by: str
    reason: str | None = None
    batch: str = ""


class AttentionNeeded(Body, frozen=True, tag="attention_needed"):
    """The run stops until a person has looked at it. `perdure why` shows `detail`."""

    reason: Reason
    detail: str


class RunRequeued(Body, frozen=True, tag="run_requeued"):
    """A person put a run that needed attention back into the queue."""

    by: str
    note: str | None = None


class Unsettled(Struct, frozen=True, gc=False, omit_defaults=True):
    """A call that was in doubt or under way when its run was ended by force, or when the call was superseded.

    `usage`: what the call may have cost.
    """

    call: int
    attempt: int
    usage: Usage


class RunRestored(Body, frozen=True, tag="run_restored"):
    """The run comes from a backup, and was unfinished when the backup was taken. It stops until a person has looked at it.

    Nothing is known about what it did after that time, in the journal that was lost: any effect may have happened.
    """

    by: str
    taken_at: int  # when the backup was taken
    batch: str = ""  # the same for all runs of one `perdure restore`


class RunReopened(Body, frozen=True, tag="run_reopened"):
    """A person let the run go on from an earlier point: the events between `back_to` and this event are superseded.

    Superseded events stay in the journal. Their facts about the world stay true: a call that was made was made, and a
    used approval stays used. But the agent does not know superseded events: it is replayed up to `back_to`, and goes
    on from there (core/history.py).
    """

    by: str
    back_to: int  # the seq of the last event that the agent knows
    reason: str | None = None
    # Calls that failed after `back_to` while the agent waited for them: they are attempted again.
    again: tuple[int, ...] = ()
    children: tuple[int, ...] = ()  # calls whose children failed after `back_to`: the same commit reopens these children
    withdrawn: tuple[int, ...] = ()  # approvals that this event withdraws: the agent no longer waits for them
    fresh: bool = False  # `read` calls and requests to models are made again; their recorded results are not reused
    # Superseded calls that may have happened, and what each of them may have cost. These costs are charged now,
    # because the agent may never make these calls again.
    unsettled: tuple[Unsettled, ...] = ()
    batch: str = ""


class RunForked(Body, frozen=True, tag="run_forked"):
    """A person made this run out of the events of another run: all events before this one are copies.

    What these events say about the world, the other run has done. Their calls are never attempted here.
    """

    run_id: str  # the run that begins here; a fork of a fork has an event for each of them
    parent: str  # the run that was forked
    at: int  # the event of `parent` after which the agent goes on
    head: str  # the hash of the last event of `parent` that was copied
    by: str
    reason: str | None = None
    edits: tuple[int, ...] = ()  # calls with another result than in `parent`: see `call_answered`
    input: bool = False  # the input is another one than in `parent`
    model: str | None = None  # the model that was set instead of the agent's own


AnswerSource = Literal["recorded", "edited", "answers", "simulated", "read"]


class CallAnswered(Body, frozen=True, tag="call_answered"):
    """The agent of a fork got this answer to its call, and no attempt was made. It says nothing about the world.

    `source`: the recorded run; a person who edited the result; a prepared answer; the tool's stand-in; or the `read` tool or
    the model itself, which a rehearsal may ask.
    """

    source: AnswerSource
    result: Payload | None = None
    failure: Failure | None = None
    attempt: int = 1  # how many attempts the failed call had
    child: str | None = None  # the id of the child whose recorded end this is
    usage: Usage | None = None  # only of `read`: what the rehearsal has really used


class CallRequestedAgain(Body, frozen=True, tag="call_requested_again"):
    """The agent made a call that a superseded event has requested before: the same tool with the same arguments.

    perdure treats both requests as one call: the number, the key and the attempts stay the same.
    """

    anew: bool = False  # the recorded result is not used, because of `RunReopened.fresh`


class OutcomeReused(Body, frozen=True, tag="outcome_reused"):
    """The agent gets the content of a superseded event: the result of a call, the end of a child, or a signal."""

    of: int  # the seq of the superseded event


class UnreadSignal(Struct, frozen=True, gc=False):
    """A signal that had arrived when a checkpoint was taken, and that the agent had not received."""

    topic: str
    payload: Payload


class OpenTimer(Struct, frozen=True, gc=False):
    """A timer that another task of the agent had set when a checkpoint was taken."""

    task: str  # the name of that task
    delay_us: int
    due: int


class CheckpointTaken(Body, frozen=True, tag="checkpoint_taken"):
    """The agent ended its life with `run.checkpoint(state)`. Its next life begins here, with `run.restored == state`.

    A replay begins at this event. So the event holds everything of the journal before it that the run still needs.
    """

    state: Payload
    image: Payload  # always inline; `Image` in core/state.py
    signals: tuple[UnreadSignal, ...] = ()
    timers: tuple[OpenTimer, ...] = ()


class RunSucceeded(Body, frozen=True, tag="run_succeeded"):
    output: Payload


class RunFailed(Body, frozen=True, tag="run_failed"):
    failure: Failure


class RunCancelled(Body, frozen=True, tag="run_cancelled"):
    reason: str | None = None
    # The person who ended the run by force, without its agent. Calls in doubt stay in doubt.
    forced_by: str | None = None
    unsettled: tuple[Unsettled, ...] = ()  # the calls whose possible cost this event charges
    batch: str = ""


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
    | CallHeld
    | CallKept
    | SignalReceived
    | ChildStarted
    | ChildFinished
    | TimerSet
    | TimerFired
    | PatchMarked
    | RunPaused
    | RunUnpaused
    | RunAdopted
    | FrameChanged
    | PinChanged
    | BudgetExceeded
    | BudgetDeclared
    | BudgetRaised
    | ThoughtRecorded
    | DecisionMade
    | StatusReported
    | LabelsChanged
    | CancelRequested
    | AttentionNeeded
    | RunRequeued
    | RunRestored
    | RunReopened
    | RunForked
    | CallAnswered
    | CallRequestedAgain
    | OutcomeReused
    | CheckpointTaken
    | RunSucceeded
    | RunFailed
    | RunCancelled
)
Terminal = RunSucceeded | RunFailed | RunCancelled
B = TypeVar("B", bound=Body)


class CallEvents(NamedTuple):
    """The event types for a call. The event types of model calls and tool calls differ only in their names."""

    initiated: type[ToolCallInitiated]
    completed: type[ToolCallCompleted]
    failed: type[ToolCallFailed]


OF_TOOL = CallEvents(ToolCallInitiated, ToolCallCompleted, ToolCallFailed)
OF_MODEL = CallEvents(ModelCallInitiated, ModelCallCompleted, ModelCallFailed)


class Event(Struct, frozen=True, gc=False):
    """One event of a journal: the envelope and the body."""

    seq: int
    # 32 hex digits, chosen before the commit. If the answer to COMMIT is lost, the writer searches for this id.
    event_id: str
    ts: int  # microseconds since 1970, for people; only `seq` gives the order of events
    epoch: int
    call: int | None
    cause: int | None
    body: AnyBody

    @property
    def type(self) -> str:
        return tag_of(self.body)


def place_of(events: Sequence[Event], seq: int) -> int:
    """How many of these events of a journal have numbers up to `seq`. Events before a checkpoint may be missing."""
    return bisect_right(events, seq, key=lambda event: event.seq)


def event_at(events: Sequence[Event], seq: int) -> Event | None:
    """The event with this number; None if it is not there."""
    place = place_of(events, seq)
    return events[place - 1] if place and events[place - 1].seq == seq else None


def in_batch(body: B, batch: str) -> B:
    """The body with the id of this batch, if events of its type have one."""
    return structs.replace(body, batch=batch) if batch and "batch" in body.__struct_fields__ else body


def batch_of(body: AnyBody | None) -> str:
    """The id of the batch to which the event belongs. Empty: it belongs to none."""
    batch: str = getattr(body, "batch", "")
    return batch


encode_body = msgspec.json.Encoder().encode
decode_body = msgspec.json.Decoder(AnyBody).decode


def tag_of(body: AnyBody) -> str:
    """The public name of an event's type, such as `tool_call_initiated`."""
    tag = body.__struct_config__.tag
    assert isinstance(tag, str)
    return tag
