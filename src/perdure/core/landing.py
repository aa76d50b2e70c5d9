"""What becomes of a run that nobody holds when something from outside reaches it."""

from __future__ import annotations

from typing import Literal

from perdure.core.events import (
    AnyBody,
    ApprovalVoted,
    BudgetRaised,
    CancelRequested,
    Reason,
    RunAdopted,
    RunPaused,
    RunRequeued,
    RunUnpaused,
    Status,
    ToolCallResolved,
)

Wake = Literal["now", "keep", "never"]  # what becomes of ready_at


def landing(status: Status, attention: Reason | None, body: AnyBody) -> tuple[Status, Wake]:
    """The run's new status, and whether anybody may claim it now."""
    match body:
        case CancelRequested():
            return "cancelling", "now"  # also when it is paused or needs a person: its agent cleans up, or says why it cannot
        case RunPaused() if status == "cancelling":
            return "cancelling", "keep"  # what shall end is not made to wait, and nobody has to remember that it shall
        case RunPaused():
            return "paused", "never"
        case RunUnpaused():
            return ("cancelling" if status == "cancelling" else "queued"), "now"
        case ApprovalVoted() | BudgetRaised() | RunAdopted():
            return status, "keep"
        case RunRequeued() | ToolCallResolved() if status == "needs_attention":
            return "queued", "now"
    if status == "paused":
        return "paused", "keep"
    if status == "needs_attention" and attention != "in_doubt":
        # It would come to the same end again, or take another worker with it: what arrives waits for the person too.
        return "needs_attention", "keep"
    if status == "queued":
        return "queued", "keep"  # it goes on by itself: now, or not before the time that somebody has set
    return ("cancelling" if status == "cancelling" else "queued"), "now"
