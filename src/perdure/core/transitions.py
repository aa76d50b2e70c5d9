"""Two rules about post: which post a run accepts, and how post changes the status of a run that no worker holds."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from perdure.core.events import (
    AnyBody,
    ApprovalVoted,
    BudgetRaised,
    CancelRequested,
    FrameChanged,
    Reason,
    RunAdopted,
    RunPaused,
    RunRequeued,
    RunRestored,
    RunUnpaused,
    Status,
    ToolCallResolved,
)
from perdure.errors import Conflict

Wake = Literal["now", "keep", "never"]  # the new ready_at: now, unchanged, or none


class Reached(Struct, frozen=True, gc=False):
    """A run at the moment when post arrives for it."""

    run_id: str
    status: Status
    version: str
    driven: bool = False  # a live worker holds the run
    pausing: bool = False  # a pause was requested, and attempts are still under way


def is_news(run: Reached, body: AnyBody) -> bool:
    """Does this post change anything?

    False: the same was requested before. Raises Conflict if the run's status does not allow this post.
    """
    match body:
        case CancelRequested():
            return run.status != "cancelling"
        case RunPaused() if run.status in ("cancelling", "needs_attention"):
            raise Conflict(f"run {run.run_id} is {run.status.replace('_', ' ')}; it cannot be paused")
        case RunPaused():
            return run.status != "paused"
        case RunUnpaused(early=True) if run.status == "queued":
            return True
        case RunUnpaused() if run.status not in ("paused", "needs_attention") and not run.pausing:
            raise Conflict(f"run {run.run_id} is {run.status}; only a paused run, or one that needs attention, can be unpaused")
        case RunRequeued() if run.status != "needs_attention":
            raise Conflict(f"run {run.run_id} is {run.status}; only a run that needs attention can be requeued")
        case RunAdopted() | FrameChanged() if run.driven:
            raise Conflict(f"run {run.run_id} is being driven in version {run.version}; wait until it rests, or stop that worker")
    return True


def landing(status: Status, attention: Reason | None, body: AnyBody) -> tuple[Status, Wake]:
    """The new status of a run that no worker holds, and how `ready_at` changes: when the run may be claimed."""
    if attention == "restored" and not isinstance(body, RunUnpaused | RunRequeued):
        # What the run did since its backup is unknown. No post, not even a cancel, lets its agent go on before a person says so.
        return "needs_attention", "keep"
    match body:
        case RunRestored():
            return "needs_attention", "never"
        case CancelRequested():
            # This also holds for a run that is paused or needs attention: its agent cleans up, or fails visibly.
            return "cancelling", "now"
        case RunPaused() if status == "cancelling":
            return "cancelling", "keep"  # a cancel wins over a pause
        case RunPaused():
            return "paused", "never"
        case RunUnpaused():
            return ("cancelling" if status == "cancelling" else "queued"), "now"
        case ApprovalVoted() | BudgetRaised() | RunAdopted() | FrameChanged():
            return status, "keep"
        case RunRequeued() | ToolCallResolved() if status == "needs_attention":
            return "queued", "now"
    if status == "paused":
        return "paused", "keep"
    if status == "needs_attention" and attention != "in_doubt":
        # The run would fail in the same way again, or kill another worker. So the post waits until a person has
        # looked.
        return "needs_attention", "keep"
    if status == "queued":
        return "queued", "keep"  # ready_at stays: the run is ready already, or it begins at the time that was set for it
    return ("cancelling" if status == "cancelling" else "queued"), "now"
