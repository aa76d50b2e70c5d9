"""One commit of one run at a time: sent, answered, sent again when nothing was written, or refused for good.

The answers are the things that can be true: durable; not written (a full disk: the very same append goes out again, so nothing that
happened is lost); refused (somebody else has the run: stop at once); rolled back (a transaction's tool raised); or an error that
trying again would only repeat.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from perdure.core.events import Event
from perdure.errors import StoreUnavailable
from perdure.store.api import Append, Appended, Committed, RowChange
from perdure.worker.pen import Pen

log = logging.getLogger("perdure.worker")
Transaction = Callable[[Any], tuple[Append, Any]]


class ToolRaised(Exception):
    """What a tool raised inside a transaction, which was rolled back for it."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(repr(error))
        self.error = error


class Writes(Protocol):
    """Whoever owns the connection to the store."""

    loop: asyncio.AbstractEventLoop

    def commit(self, append: Append, done: Callable[[Appended | Exception], None]) -> None: ...

    def transact(self, head: Append, work: Transaction, done: Callable[[tuple[Appended, Any] | Exception], None]) -> None: ...


class Driving(Protocol):
    """What is needed of the drive: to be told what became of a commit."""

    run_id: str

    def saved(self, events: Sequence[Event], row: RowChange | None, result: Event | None) -> None:
        """These events are durable, and so is the change of the row; `result` is the one of a transaction that was among them."""

    def lost(self, why: str) -> None: ...

    def broke(self, error: Exception) -> None: ...


class Commits:
    """The commits of one run. Tells the drive what became of each; after `stop` it tells nothing more."""

    def __init__(self, drive: Driving, pen: Pen, host: Writes) -> None:
        self.under_way = False
        self.sent_s = 0.0  # when the last commit went out, by the monotonic clock
        self._drive = drive
        self._pen = pen
        self._host = host
        self._stopped = False
        self._failures = 0
        self._again: asyncio.TimerHandle | None = None

    def write(self, row: RowChange | None) -> None:
        """Make everything recorded so far durable."""
        assert not self.under_way, "one commit at a time"
        self.under_way = True
        self._send(self._pen.append(row))

    def transact(self, make: Callable[[Append], Transaction], rolled_back: Callable[[BaseException | None], None]) -> None:
        """Make everything recorded so far, the transaction's own writes and its result event durable in one commit.

        `rolled_back` hears why nothing happened: what the tool raised, or None when only the store could not be written.
        """
        assert not self.under_way, "one commit at a time"
        self.under_way = True
        head = self._pen.append()
        self.sent_s = time.monotonic()
        self._host.transact(head, make(head), lambda answer: self._transacted(head, answer, rolled_back))

    def change(self) -> None:
        """The commit under way was refused, and what it held is not as it was: it goes out with the next one."""
        self.under_way = False

    def stop(self) -> None:
        """Answers that are still on their way reach nobody."""
        self._stopped = True
        if self._again is not None:
            self._again.cancel()

    def _send(self, append: Append) -> None:
        self.sent_s = time.monotonic()
        self._host.commit(append, partial(self._answered, append))

    def _answered(self, append: Append, answer: Appended | Exception) -> None:
        if self._stopped:
            return
        match answer:
            case Committed():
                self._done(self._pen.saved(append), append.row, None)
            case StoreUnavailable():
                # The time at which it goes out counts, and not when it was recorded: an approval may have expired meanwhile (G9).
                self._failed(answer, lambda: self._send(self._pen.anew(append)))
            case Exception():
                self._drive.broke(answer)
            case _:
                self._drive.lost(answer.why)

    def _transacted(
        self, head: Append, answer: tuple[Appended, Any] | Exception, rolled_back: Callable[[BaseException | None], None]
    ) -> None:
        if self._stopped:
            return
        match answer:
            case (Committed(), sealed):
                before, result = self._pen.saved(head), self._pen.adopt(sealed)
                self._done([*before, result], None, result)
            case StoreUnavailable():
                # Nothing was written. The call is given back as one that has not happened, and tried again with the rest.
                self._failed(answer, lambda: self._roll_back(None, rolled_back))
            case ToolRaised():
                self._roll_back(answer.error, rolled_back)
            case Exception():
                self._roll_back(answer, rolled_back)
            case (refused, _):
                self._drive.lost(refused.why)

    def _roll_back(self, error: BaseException | None, rolled_back: Callable[[BaseException | None], None]) -> None:
        self.under_way = False
        rolled_back(error)

    def _done(self, events: Sequence[Event], row: RowChange | None, result: Event | None) -> None:
        self.under_way, self._failures = False, 0
        self._drive.saved(events, row, result)

    def _failed(self, error: Exception, again: Callable[[], None]) -> None:
        """Nothing was written. What happened is still in memory, so keep it and try the very same again."""
        self._failures += 1
        delay_s = min(0.1 * 2**self._failures, 5.0)
        # The first time, and about twice a minute after that: an outage is one thing to know, not one for each try.
        level = logging.ERROR if self._failures % 6 == 1 else logging.DEBUG
        log.log(level, "run %s: cannot write the journal: %s; nothing is lost, trying again in %.1f s", self._drive.run_id, error, delay_s)
        self._again = self._host.loop.call_later(delay_s, again)
