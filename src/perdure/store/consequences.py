"""What follows from events, written in their own commit: approvals asked for and used up, children, parents, notices.

Most events have no consequence; finding that out costs one look at their type.
"""

from __future__ import annotations

from perdure.core.budget import NOTHING, amounts_of
from perdure.core.events import (
    ApprovalRequested,
    ChildStarted,
    Event,
    RunCancelled,
    RunFailed,
    RunSucceeded,
    Terminal,
    ToolCallInitiated,
)
from perdure.store import approvals, budgets, family, notices
from perdure.store.api import Append, Charge, Refused
from perdure.store.cursor import Cursor
from perdure.store.delivery import Delivery

CONSEQUENTIAL = frozenset((*notices.TOLD, ChildStarted, RunSucceeded, RunFailed, RunCancelled))


def consequential(append: Append) -> list[Event]:
    """Those of its events from which something follows."""
    return [
        sealed.event
        for sealed in append.events
        if type(sealed.event.body) in CONSEQUENTIAL
        or (type(sealed.event.body) is ToolCallInitiated and sealed.event.body.approval is not None)
    ]


def may_be_refused(events: list[Event]) -> bool:
    """Whether what follows can come to nothing, so that the append has to be undone."""
    return any(isinstance(event.body, (ToolCallInitiated, ApprovalRequested, ChildStarted)) for event in events)


class Consequences:
    """Inside the transaction of the append, after its guard has held."""

    def __init__(self, delivery: Delivery) -> None:
        self._delivery = delivery

    def follow(self, cursor: Cursor, key: int, events: list[Event], at: int) -> Refused | None:
        """Write what follows of events that were sent at that time; Refused means that the whole append must be undone."""
        run = family.relations(cursor, key)
        for event in events:
            body, refused = event.body, None
            match body:
                case ToolCallInitiated():
                    refused = approvals.consume(cursor, key, run.run_id, event, body, at)
                case ApprovalRequested():
                    refused = approvals.insert(cursor, key, run.run_id, event, body)
                case ChildStarted():
                    refused = family.start_child(cursor, run, event, body)
                case RunSucceeded() | RunFailed() | RunCancelled():
                    self.end(cursor, key, run, event, body)
            if refused is not None:
                return refused
            if notices.is_told(body):
                notices.tell(cursor, key, event)
        return None

    def end(self, cursor: Cursor, key: int, run: family.Relations, event: Event, end: Terminal) -> None:
        """Whoever waits for the run hears of its end: its parent, or people when it has none and has failed."""
        if run.asking:
            approvals.withdraw_rest(cursor, key, event.ts)
        if run.metered:
            budgets.give_back(cursor, key)
            if isinstance(end, RunCancelled):
                for one in end.unsettled:
                    budgets.charge(cursor, key, Charge(reserved=NOTHING, spent=amounts_of(one.usage)))
        if run.parent is not None and run.parent_call is not None:
            family.tell_parent(cursor, self._delivery, run, event, end)
        elif isinstance(end, RunFailed):
            notices.tell(cursor, key, event)
