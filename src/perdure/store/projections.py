"""The consequences of events, written in the commit of the events.

The consequences: an approval is created or consumed, a child is created, a parent gets the end of its child, a notice
is written, the budget of a run that has ended is settled, claims read from a checkpoint on, and labels are set. Most
events have no consequence; the type of an event says whether it has one.
"""

from __future__ import annotations

from perdure.core.budget import NOTHING, amounts_of
from perdure.core.events import (
    ApprovalRequested,
    BudgetDeclared,
    CheckpointTaken,
    ChildStarted,
    Event,
    LabelsChanged,
    RunCancelled,
    RunFailed,
    RunSucceeded,
    Terminal,
    ToolCallInitiated,
)
from perdure.store import approvals, family, labels, limits, notices
from perdure.store.api import Append, Charge, Refused
from perdure.store.cursor import Cursor
from perdure.store.delivery import Delivery

CONSEQUENTIAL = frozenset(
    (*notices.TOLD, BudgetDeclared, CheckpointTaken, ChildStarted, LabelsChanged, RunSucceeded, RunFailed, RunCancelled)
)


def consequential(append: Append) -> list[Event]:
    """The events of the append that have consequences."""
    return [
        sealed.event
        for sealed in append.events
        if type(sealed.event.body) in CONSEQUENTIAL
        or (type(sealed.event.body) is ToolCallInitiated and sealed.event.body.approval is not None)
    ]


def may_be_refused(events: list[Event]) -> bool:
    """Can a consequence of these events be refused, so that the append has to be undone?"""
    return any(isinstance(event.body, (ToolCallInitiated, ApprovalRequested, ChildStarted)) for event in events)


class Consequences:
    """Writes consequences in the transaction that writes the events. In an append, the guard was checked before."""

    def __init__(self, delivery: Delivery) -> None:
        self._delivery = delivery

    def follow(self, cursor: Cursor, key: int, events: list[Event], at: int) -> Refused | None:
        """Write the consequences of the events; `at` is now. If it returns Refused, the caller undoes the append."""
        run = family.relations(cursor, key)
        for event in events:
            body, refused = event.body, None
            match body:
                case ToolCallInitiated():
                    refused = approvals.consume(cursor, key, run.run_id, event, body, at)
                case ApprovalRequested():
                    refused = approvals.insert(cursor, key, run.run_id, event, body)
                case BudgetDeclared():
                    limits.open_ledger(cursor, key, None, body.limits)  # only a run without a parent is started by name
                case ChildStarted():
                    refused = family.start_child(cursor, run, event, body)
                case CheckpointTaken():
                    cursor.change("set_checkpoint", (key, event.seq))
                case LabelsChanged():
                    labels.change(cursor, key, body.labels)
                case RunSucceeded() | RunFailed() | RunCancelled():
                    self.end(cursor, key, run, event, body)
            if refused is not None:
                return refused
            if notices.is_told(body):
                notices.tell(cursor, key, event)
        return None

    def end(self, cursor: Cursor, key: int, run: family.Relations, event: Event, end: Terminal) -> None:
        """Settle the approvals and the budget of a run that has ended.

        Post the end to the run's parent. If the run has no parent and failed, write a notice for people.
        """
        if run.asking:
            approvals.withdraw_rest(cursor, key, event.ts)
        if run.metered:
            limits.free_reserved(cursor, key)
            if isinstance(end, RunCancelled):
                for one in end.unsettled:
                    limits.charge(cursor, key, Charge(reserved=NOTHING, spent=amounts_of(one.usage)))
        if run.parent is not None and run.parent_call is not None:
            family.tell_parent(cursor, self._delivery, run, event, end)
        elif isinstance(end, RunFailed):
            notices.tell(cursor, key, event)
