"""A sentence for every event: what it says happened."""

from __future__ import annotations

from collections.abc import Mapping
from typing import assert_never

from perdure.core.events import (
    ApprovalDecided,
    ApprovalEscalated,
    ApprovalExpired,
    ApprovalRequested,
    ApprovalVoted,
    ApprovalWithdrawn,
    AttentionNeeded,
    BudgetExceeded,
    BudgetRaised,
    CancelRequested,
    ChildFinished,
    ChildStarted,
    DecisionMade,
    Event,
    Limits,
    ModelCallCompleted,
    ModelCallFailed,
    ModelCallInitiated,
    PatchMarked,
    PinChanged,
    PlanGenerated,
    RetryScheduled,
    RunAdopted,
    RunCancelled,
    RunClaimed,
    RunCreated,
    RunFailed,
    RunPaused,
    RunReleased,
    RunRequeued,
    RunSucceeded,
    RunUnpaused,
    SignalReceived,
    StatusReported,
    ThoughtRecorded,
    TimerFired,
    TimerSet,
    ToolCallCompleted,
    ToolCallFailed,
    ToolCallInDoubt,
    ToolCallInitiated,
    ToolCallProposed,
    ToolCallResolved,
)
from perdure.core.prompts import is_request
from perdure.core.state import LOST
from perdure.inspect.models import Load, answer_words, request_words
from perdure.inspect.plans import plan_words
from perdure.inspect.words import amount, called, clip, failed, iso, money, people, plural, shown, span, used

_UNTIL = {
    "approval": "until somebody approves it",
    "rate": "until its rate allows it",
    "budget": "until there is enough left in the budget",
    "handover": "until another worker has the run",
}
ApprovalSettled = ApprovalDecided | ApprovalEscalated | ApprovalExpired | ApprovalWithdrawn | ApprovalVoted


def sentence(event: Event, names: Mapping[int, str], began: Mapping[int, int] | None = None, load: Load | None = None) -> str:
    """What this event says happened.

    `names` are the tool, model, action or agent of each call so far, and `began` says when its last attempt began. `load` brings what
    lies in the blob store; without it that is told by its size.
    """
    if event.call is None:
        return _about_run(event, load)
    call = f"call {event.call} {names.get(event.call, '?')}"
    match event.body:
        case ModelCallInitiated() | ModelCallCompleted() | ModelCallFailed():
            since = None if began is None else began.get(event.call)
            return _about_model(event.body, call, None if since is None else event.ts - since, load)
        case _:
            return _about_call(event, call, load)


def _about_model(body: ModelCallInitiated | ModelCallCompleted | ModelCallFailed, call: str, took: int | None, load: Load | None) -> str:
    match body:
        case ModelCallInitiated(attempt=1):
            return f"{call} is asked" + (f" ({request_words(body.args, load)})" if body.args is not None else "")
        case ModelCallInitiated():
            return f"{call} is asked again (attempt {body.attempt})"
        case ModelCallCompleted(result=None):
            return f"{call} answered, but its answer could not be recorded: {failed(body.failure)}"
        case ModelCallCompleted():
            took_words = "" if took is None else f" in {_length(took)}"
            cost = f" ({used(body.usage)})" if used(body.usage) else ""
            return f"{call} answered{took_words}: {answer_words(body.result, load)}{cost}"
        case ModelCallFailed(final=True, attempt=0):
            return f"{call} was never asked: {failed(body.failure)}"
        case ModelCallFailed() if body.failure.type == LOST:
            counted = (
                f"; it counts as what was reserved for it: {used(body.usage)}"
                if used(body.usage)
                else ", and nobody knows what it has used"
            )
            return f"{call}: the answer to attempt {body.attempt} was lost with its worker{counted}"
        case ModelCallFailed():
            cost = f" ({used(body.usage)})" if used(body.usage) else ""
            return f"{call} gave no answer at attempt {body.attempt}{', for good' if body.final else ''}: {failed(body.failure)}{cost}"
        case _:
            assert_never(body)


def _length(us: int) -> str:
    return f"{us / 1e6:.1f} s" if 1_000_000 <= us < 60_000_000 else span(us)


def _about_call(event: Event, call: str, load: Load | None) -> str:
    body = event.body
    match body:
        case ToolCallProposed() if is_request(body.args):
            until = f", {iso(body.at)}" if body.at is not None else ""
            return f"{call} ({request_words(body.args, load)}) is to be asked, and waits {_UNTIL[body.until]}{until}"
        case ToolCallProposed():
            until = f", {iso(body.at)}" if body.at is not None else ""
            return f"call {event.call}: {called(body.tool, body.args)} ({body.effect}) is wanted, and waits {_UNTIL[body.until]}{until}"
        case ToolCallInitiated(attempt=1):
            return f"{_first_attempt(event, body, call)} is about to be performed"
        case ToolCallInitiated():
            return f"{call}: attempt {body.attempt} is about to be performed"
        case ToolCallCompleted(result=None):
            return f"{call} happened, but its result could not be recorded: {failed(body.failure)}"
        case ToolCallCompleted():
            cost = f" ({used(body.usage)})" if used(body.usage) else ""
            return f"{call} returned {shown(body.result)}{cost}"
        case ToolCallFailed(final=True, attempt=0):
            return f"{call} was never made: {failed(body.failure)}"
        case ToolCallFailed(final=True):
            return f"{call} failed for good at attempt {body.attempt}: {failed(body.failure)}"
        case ToolCallFailed():
            return f"{call} failed at attempt {body.attempt}: {failed(body.failure)}"
        case ToolCallInDoubt():
            return f"{call} is in doubt (attempt {body.attempt}): {body.why}"
        case ToolCallResolved():
            return f"{call}: {_resolution(body)}"
        case RetryScheduled(reconcile=True):
            return f"{call}: whether it happened is asked again at {iso(body.at)}"
        case RetryScheduled():
            return f"{call}: attempt {body.attempt} follows at {iso(body.at)}"
        case ApprovalRequested():
            return _request(event, body)
        case ApprovalVoted() | ApprovalDecided() | ApprovalEscalated() | ApprovalExpired() | ApprovalWithdrawn():
            return f"{call}: approval {body.approval} {_settling(body)}"
        case ChildStarted():
            return f"call {event.call}: run {body.run_id} of {called(f'{body.agent}@{body.version}', body.input)} begins as its child"
        case ChildFinished(status="succeeded"):
            return f"{call}: its child {body.run_id} succeeded with {shown(body.output)}"
        case ChildFinished():
            return f"{call}: its child {body.run_id} {'was ' if body.status == 'cancelled' else ''}{body.status}: {failed(body.failure)}"
        case _:
            return f"{call}: {event.type}"


def _first_attempt(event: Event, body: ToolCallInitiated, call: str) -> str:
    # After a proposal the arguments stand there, unless a person has edited them.
    what = call if body.args is None else f"call {event.call}: {called(body.tool, body.args)}"
    approved = f", as approved ({body.approval})," if body.approval else ""
    return f"{what} ({body.effect}){approved}"


def _resolution(body: ToolCallResolved) -> str:
    told = {
        "happened": f"it happened, and returned {shown(body.result)}",
        "did_not_happen": f"it did not happen{' and never will' if body.final else ''}",
        "failed": "it counts as failed",
    }
    note = f" ({body.note})" if body.note else ""
    cost = f"; charged: {used(body.usage)}" if used(body.usage) else ""
    who = "its reconcile hook says" if body.by == "reconcile" else f"{body.by} says"
    return f"{who} that {told[body.outcome]}{note}{cost}"


def _request(event: Event, body: ApprovalRequested) -> str:
    number = f", {body.quorum} of them must agree" if body.quorum > 1 else ""
    until = f", until {iso(body.expires_at)}" if body.expires_at is not None else ""
    reason = f", because “{clip(body.reason, 120)}”" if body.reason else ""
    return f"call {event.call}: approval {body.approval} is asked of {people(body.by)}{number}{until}: {called(body.action, body.input)}{reason}"


def _settling(body: ApprovalSettled) -> str:
    match body:
        case ApprovalVoted():
            return f"has {body.by}'s yes{_from(body.source)}, and needs more{_note(body.note)}"
        case ApprovalDecided():
            edited = f", edited to {shown(body.input)}" if body.input is not None else ""
            return f"was {'approved' if body.granted else 'rejected'} by {body.by}{_from(body.source)}{edited}{_note(body.note)}"
        case ApprovalEscalated():
            until = f", until {iso(body.expires_at)}" if body.expires_at is not None else ""
            return f"was decided by nobody in time; it is asked of {people(body.to)} now{until}"
        case ApprovalExpired(lapsed=True):
            return "was given, and expired before the call could start"
        case ApprovalExpired():
            return "expired: nobody decided in time"
        case ApprovalWithdrawn():
            return "was withdrawn: nobody wants the answer any more"


def _from(source: str | None) -> str:
    return f" (from {clip(source, 60)})" if source else ""


def _note(note: str | None) -> str:
    return f": {clip(note, 120)}" if note else ""


def _about_run(event: Event, load: Load | None) -> str:
    body = event.body
    match body:
        case RunCreated():
            return _creation(body)
        case RunClaimed(takeover=True):
            why = "which is gone (the kernel says so)" if body.proven_dead else "which gave no sign of life"
            others = f"; {plural(body.lost_with, 'other run')} of that worker may be to blame" if body.lost_with else ""
            return f"worker {body.name or body.worker} took the run over from the worker before, {why}{others}"
        case RunClaimed():
            return f"worker {body.name or body.worker} took the run"
        case RunReleased():
            until = f" until {iso(body.wake_at)}" if body.wake_at is not None else ""
            return f"the worker gave the run up as {body.status}: {body.waiting_for}{until}"
        case TimerSet():
            return f"timer {body.timer} set for {iso(body.due)}"
        case TimerFired():
            return f"timer {body.timer} fired"
        case ThoughtRecorded():
            return f"the agent noted: {clip(body.text, 160)}"
        case PlanGenerated():
            by = f", which {body.by} has written" if body.by else ""
            return f"the run follows {plan_words(body.plan, load)}{by}"
        case DecisionMade():
            among = f" among {shown(body.among)}" if body.among is not None else ""
            reason = f", because {clip(body.reason, 120)}" if body.reason else ""
            return f"the agent decided {shown(body.choice)}{among}{reason}"
        case PlanGenerated():
            by = f" written by {clip(body.by, 60)}" if body.by else ""
            return f"the run follows the plan {body.digest[:12]}{by}: {shown(body.plan)}"
        case StatusReported():
            return f"the agent reported: {clip(body.text, 160)}"
        case PatchMarked():
            return f"the run takes the new side of the change {body.name!r}"
        case PinChanged():
            return f"{body.what} has changed since the run first used it (it was {body.before}, and is {body.after} now)"
        case BudgetExceeded():
            return over_budget(body)
        case AttentionNeeded():
            return f"the run needs attention ({body.reason}): {clip(body.detail, 240)}"
        case RunSucceeded():
            return f"the run succeeded with {shown(body.output)}"
        case RunFailed():
            return f"the run failed: {failed(body.failure)}"
        case RunCancelled(forced_by=None):
            return f"the run was cancelled{_note(body.reason)}"
        case RunCancelled():
            return f"{body.forced_by} ended the run without its agent, and what was open stays so{_unsettled(body)}{_note(body.reason)}"
        case CancelRequested() | RunPaused() | RunUnpaused() | RunRequeued() | RunAdopted() | BudgetRaised() | SignalReceived():
            return _said(body)
        case (
            ToolCallProposed()
            | ToolCallInitiated()
            | ToolCallCompleted()
            | ToolCallFailed()
            | ToolCallInDoubt()
            | ToolCallResolved()
            | RetryScheduled()
            | ApprovalRequested()
            | ApprovalVoted()
            | ApprovalDecided()
            | ApprovalEscalated()
            | ApprovalExpired()
            | ApprovalWithdrawn()
            | ChildStarted()
            | ChildFinished()
        ):
            return f"{event.type} without a call"
        case _:
            assert_never(body)


def _unsettled(body: RunCancelled) -> str:
    """What is charged for calls that may have happened."""
    costs = [f"call {one.call} with {used(one.usage)}" for one in body.unsettled if used(one.usage)]
    return f", and is charged: {', '.join(costs)}" if costs else ""


def _creation(body: RunCreated) -> str:
    by = f" for {body.actor}" if body.actor else ""
    child = f" as child of run {body.parent} (its call {body.parent_call})" if body.parent else ""
    queue = f", queue {body.queue}" if body.queue != "default" else ""
    later = f", not before {iso(body.not_before)}" if body.not_before is not None else ""
    limits = f", with a budget of {limits_words(body.budget)}" if body.budget is not None else ""
    where = f"(tenant {body.tenant}{queue}{later}{limits})"
    return f"run of {body.agent}@{body.version} created{by}{child} {where} with input {shown(body.input)}"


def _said(body: CancelRequested | RunPaused | RunUnpaused | RunRequeued | RunAdopted | BudgetRaised | SignalReceived) -> str:
    """What somebody outside told the run."""
    match body:
        case CancelRequested():
            return f"{body.by} asked to cancel the run{_note(body.reason)}"
        case RunPaused():
            return f"{body.by} paused the run{_note(body.reason)}"
        case RunUnpaused():
            return f"{body.by} let the run go on{_note(body.note)}"
        case RunRequeued():
            return f"{body.by} sent the run back to work{_note(body.note)}"
        case RunAdopted():
            return f"{body.by} lets version {body.version} of the agent go on with the run{_note(body.note)}"
        case BudgetRaised():
            return f"{body.by} added {limits_words(body.added)} to the run's budget{_note(body.note)}"
        case SignalReceived():
            key = f" (key {body.key})" if body.key else ""
            return f"{body.by} sent a signal on {body.topic!r}{key}: {shown(body.payload)}"


def over_budget(body: BudgetExceeded) -> str:
    """Whose budget, how much of it is used, and how much was wanted."""
    used_up, limit = amount(body.what, body.used), amount(body.what, body.limit)
    wanted = f", and {amount(body.what, body.wanted)} more wanted" if body.wanted else ""
    return f"the budget of run {body.budget_of} is used up: {used_up} of {limit} used or reserved{wanted}"


def limits_words(limits: Limits) -> str:
    """The limits that are set, such as $2.00, 100 calls."""
    parts = [
        None if limits.usd_micros is None else money(limits.usd_micros),
        None if limits.tokens is None else amount("tokens", limits.tokens),
        None if limits.calls is None else amount("calls", limits.calls),
        None if limits.busy_us is None else amount("seconds", limits.busy_us),
    ]
    return ", ".join(part for part in parts if part is not None) or "nothing"
