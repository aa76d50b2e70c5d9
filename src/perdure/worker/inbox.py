"""What has arrived from outside for a run that somebody holds: journaled by the holder, and told to the agent."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from msgspec import structs

from perdure.core.events import (
    ApprovalDecided,
    ApprovalEscalated,
    ApprovalExpired,
    ApprovalVoted,
    ApprovalWithdrawn,
    BudgetRaised,
    CancelRequested,
    ChildFinished,
    Event,
    Reason,
    RunPaused,
    RunUnpaused,
    SignalReceived,
    ToolCallResolved,
    tag_of,
)
from perdure.core.state import CallState, RunState
from perdure.store.api import InboxRow
from perdure.worker.asks import Asks
from perdure.worker.calls import Calls
from perdure.worker.closing import Closing
from perdure.worker.orders import Orders
from perdure.worker.pen import Pen

log = logging.getLogger("perdure.worker")


class Driving(Protocol):
    """What is needed of the drive."""

    run_id: str
    closing: Closing | None
    last_news_s: float

    def deliver(self, event: Event) -> None: ...

    def attend(self, reason: Reason, detail: str) -> None: ...

    def guarded(self, work: Callable[..., None], *args: Any) -> None: ...


class Inbox:
    """Reads the post of one run."""

    def __init__(
        self, drive: Driving, loop: asyncio.AbstractEventLoop, state: RunState, pen: Pen, calls: Calls, asks: Asks, orders: Orders
    ) -> None:
        self.state = state
        self._drive = drive
        self._loop = loop
        self._pen = pen
        self._calls = calls
        self._asks = asks
        self._orders = orders

    def read(self, row: InboxRow) -> None:
        body = row.body
        if body is None:
            self._pen.leave(row.inbox_id)
            self._drive.attend(
                "error", f"something from outside (inbox row {row.inbox_id}) was written by a newer perdure; upgrade this worker"
            )
            return
        if self.state.finished:
            log.info("run %s: %s came too late and changes nothing", self._drive.run_id, tag_of(body))
            self._pen.leave(row.inbox_id)
            return
        self._pen.consume(row.inbox_id)
        # Under the sender's own id: a sender that does not know whether its commit took effect finds it there.
        record = partial(self._pen.record, event_id=row.event_id or None)
        match body:
            case CancelRequested() if self.state.cancel is None:
                event = record(body)
                if self._drive.closing is not None and self._drive.closing.status != "queued":
                    # It was to stand still when its calls have ended; whoever cancels does not wait for them, nor for another person.
                    # The agent is told by the next worker: this one may have kept answers from it.
                    self._drive.closing = Closing("queued", "another worker: it is to be cancelled")
                    self._calls.stop_all()
                self._drive.guarded(self._drive.deliver, event)
            case RunPaused() if self.state.cancel is None:
                record(body)
                if self._drive.closing is None or self._drive.closing.status == "queued":
                    self._drive.closing = Closing("paused", f"somebody who unpauses it; {body.by} paused it")
            case RunUnpaused() if self.state.paused is not None:
                record(body)
                if self._drive.closing is not None and self._drive.closing.status == "paused":
                    # Calls that were only proposed meanwhile are the next worker's to start.
                    self._drive.closing = Closing("queued", "another worker: it was unpaused")
            case BudgetRaised():
                record(body)
            case SignalReceived():
                self._drive.guarded(self._drive.deliver, record(body))
            case ToolCallResolved() if row.call in self.state.open and self._is_about(body, self.state.open[row.call]):
                call = self.state.open[row.call]
                self._calls.forget(row.call)
                # What it costs is known here, where the call stands now, and not where the answer was given.
                event = record(structs.replace(body, usage=call.cost_if(body.outcome)), call=row.call, cause=call.last_seq)
                self._drive.guarded(self._drive.deliver, event)
                if not call.ended and self._drive.closing is None:
                    self._drive.guarded(self._orders.consider, call)
            case ApprovalVoted() | ApprovalEscalated() | ApprovalDecided() | ApprovalExpired() | ApprovalWithdrawn() if (
                row.call in self.state.asks
            ):
                self._drive.guarded(self._hear_of_approval, row.call, body, record)
            case ChildFinished() if row.call in self.state.alive:
                self._drive.last_news_s = self._loop.time()
                event = record(body, call=row.call, cause=self.state.alive[row.call].started_seq)
                self._drive.guarded(self._drive.deliver, event)
            case _:
                log.warning("run %s: %s came too late and changes nothing", self._drive.run_id, tag_of(body))

    def _hear_of_approval(
        self,
        number: int,
        body: ApprovalVoted | ApprovalEscalated | ApprovalDecided | ApprovalExpired | ApprovalWithdrawn,
        record: Callable[..., Event],
    ) -> None:
        ask = self.state.asks[number]
        if self._orders.can_take_back(number):
            # The yes and its end were read one right after the other: the commit that starts the call would be refused.
            self._orders.take_back(number)
        event = record(body, call=number, cause=ask.asked_seq)
        if ask.pending:
            self._asks.watch(ask)
            return
        self._asks.settled(number)
        self._calls.forget(number)  # it may have been waiting for its turn
        self._drive.last_news_s = self._loop.time()
        self._drive.deliver(event)
        call = self.state.open.get(number)
        if call is not None and self._drive.closing is None:
            self._orders.consider(call)

    def _is_about(self, answer: ToolCallResolved, call: CallState) -> bool:
        """Whether the answer is about the attempt that is in doubt now, or was cut off, and not about one before it."""
        cut_off = call.phase == "started" and not self._calls.busy(call.number) and call.number not in self._orders.due
        return (call.phase == "in_doubt" or cut_off) and answer.attempt == call.attempt
