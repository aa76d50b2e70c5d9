"""What may be said to a run from outside, and what becomes of one that nobody holds when something reaches it."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

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
from perdure.errors import Conflict

Wake = Literal["now", "keep", "never"]  # what becomes of ready_at


class Reached(Struct, frozen=True, gc=False):
    """A run at the moment at which something from outside reaches it."""

    run_id: str
    status: Status
    version: str
    driven: bool = False  # a live worker has it
    pausing: bool = False  # it was asked to pause, and ends what is under way first


def is_news(run: Reached, body: AnyBody) -> bool:
    """Whether the run has to hear of it; False when the same was asked for before. Conflict says why it may not be said now."""
    match body:
        case CancelRequested():
            return run.status != "cancelling"
        case RunPaused() if run.status in ("cancelling", "needs_attention"):
            raise Conflict(f"run {run.run_id} is {run.status.replace('_', ' ')}, and stands still or ends without a pause")
        case RunPaused():
            return run.status != "paused"
        case RunUnpaused() if run.status not in ("paused", "needs_attention") and not run.pausing:
            raise Conflict(f"run {run.run_id} is {run.status}; only a paused run, or one that needs attention, can be let go on")
        case RunRequeued() if run.status != "needs_attention":
            raise Conflict(f"run {run.run_id} is {run.status}; only a run that needs attention can be sent back to work")
        case RunAdopted() if run.driven:
            raise Conflict(f"run {run.run_id} is being driven in version {run.version}; wait until it rests, or stop that worker")
    return True


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
