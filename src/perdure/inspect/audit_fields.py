"""What an audit line says about one event: who acted, what went wrong, and the particulars. No arguments and no results."""

from __future__ import annotations

from typing import Any

import msgspec

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
    Event,
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
    RunUnpaused,
    SignalReceived,
    ToolCallCompleted,
    ToolCallFailed,
    ToolCallInDoubt,
    ToolCallInitiated,
    ToolCallProposed,
    ToolCallResolved,
    Usage,
)
from perdure.inspect.sentences import over_budget
from perdure.inspect.words import failed, iso


def person(event: Event) -> str | None:
    """Who acted, when it was not the run itself."""
    match event.body:
        case ToolCallResolved(by=by) | CancelRequested(by=by) | RunRequeued(by=by) | RunPaused(by=by) | RunUnpaused(by=by):
            return by
        case ApprovalVoted(by=by) | ApprovalDecided(by=by) | SignalReceived(by=by) | RunAdopted(by=by) | BudgetRaised(by=by):
            return by
        case RunCancelled(forced_by=by):
            return by
        case _:
            return None


def error(event: Event) -> str | None:
    """What went wrong, in one line."""
    match event.body:
        case ToolCallFailed(failure=failure) | RunFailed(failure=failure):
            return failed(failure, 500)
        case ToolCallCompleted(failure=failure) | ToolCallResolved(failure=failure) | ChildFinished(failure=failure) if failure is not None:
            return failed(failure, 500)
        case ToolCallInDoubt(why=why):
            return why
        case AttentionNeeded(detail=words):
            return words
        case BudgetExceeded() as over:
            return over_budget(over)
        case _:
            return None


def detail(event: Event) -> dict[str, Any]:
    """The event's particulars."""
    return _of_call(event) if event.call is not None else _of_run(event)


def _of_call(event: Event) -> dict[str, Any]:
    body = event.body
    match body:
        case ToolCallProposed():
            return {"effect": body.effect, "args_digest": body.digest, "until": body.until, **_at(body.at)}
        case ToolCallInitiated():
            approved = {"approval": body.approval} if body.approval else {}
            digest = body.digest or (None if body.args is None else body.args.digest)
            return {"attempt": body.attempt, "effect": body.effect, **({"args_digest": digest} if digest else {}), **approved}
        case ToolCallCompleted() | ToolCallFailed() | ToolCallInDoubt():
            return {"attempt": body.attempt, **_usage(body.usage)}
        case ToolCallResolved():
            return {
                "attempt": body.attempt,
                "outcome": body.outcome,
                "by": body.by,
                "note": body.note,
                "final": body.final,
                **_usage(body.usage),
            }
        case RetryScheduled():
            return {"attempt": body.attempt, "at": iso(body.at), "reconcile": body.reconcile}
        case ChildStarted():
            return {"child": body.run_id, "agent_called": body.agent, "version_called": body.version, "args_digest": body.digest}
        case ChildFinished():
            return {"child": body.run_id, "status": body.status}
        case _:
            return _of_approval(event)


def _of_approval(event: Event) -> dict[str, Any]:
    body = event.body
    match body:
        case ApprovalRequested():
            asked = {"approval": body.approval, "action": body.action, "digest": body.digest, "asked_of": list(body.by)}
            return {**asked, "quorum": body.quorum, "four_eyes": body.four_eyes, **_at(body.expires_at, "expires_at")}
        case ApprovalVoted():
            return {"approval": body.approval, "by": body.by, "digest": body.digest, "source": body.source, "note": body.note}
        case ApprovalDecided():
            said = {"approval": body.approval, "granted": body.granted, "by": body.by, "digest": body.digest}
            return {**said, "edited": body.input is not None, "source": body.source, "note": body.note}
        case ApprovalEscalated():
            return {"approval": body.approval, "asked_of": list(body.to), **_at(body.expires_at, "expires_at")}
        case ApprovalExpired():
            return {"approval": body.approval, "lapsed": body.lapsed}
        case ApprovalWithdrawn():
            return {"approval": body.approval}
        case _:
            return {}


def _of_run(event: Event) -> dict[str, Any]:
    body = event.body
    match body:
        case RunCreated():
            return {"queue": body.queue, "parent": body.parent, "parent_call": body.parent_call}
        case RunClaimed():
            took = {"worker": body.worker, "name": body.name, "takeover": body.takeover, "proven_dead": body.proven_dead}
            return {**took, "lost_with": body.lost_with}
        case RunReleased():
            return {"status": body.status, "waiting_for": body.waiting_for}
        case AttentionNeeded():
            return {"reason": body.reason}
        case CancelRequested() | RunPaused():
            return {"reason": body.reason}
        case RunRequeued() | RunUnpaused():
            return {"note": body.note}
        case RunAdopted():
            return {"version_adopted": body.version, "note": body.note}
        case RunCancelled():
            charged = {"unsettled": msgspec.to_builtins(body.unsettled)} if body.unsettled else {}
            return {"reason": body.reason, "forced": body.forced_by is not None, **charged}
        case SignalReceived():
            return {"topic": body.topic, "key": body.key}
        case BudgetRaised():
            return {"added": msgspec.to_builtins(body.added), "note": body.note}
        case BudgetExceeded():
            return {"budget_of": body.budget_of, "what": body.what, "limit": body.limit, "used": body.used, "wanted": body.wanted}
        case PinChanged():
            return {"what": body.what, "before": body.before, "after": body.after}
        case PlanGenerated():
            return {"plan_digest": body.digest, "by": body.by}
        case PatchMarked():
            return {"patch": body.name}
        case _:
            return {}


def _at(when: int | None, name: str = "at") -> dict[str, Any]:
    return {} if when is None else {name: iso(when)}


def _usage(usage: Usage | None) -> dict[str, Any]:
    return {} if usage is None else {"usage": msgspec.to_builtins(usage)}
