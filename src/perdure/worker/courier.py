"""Takes notices out of the store and tells people: a line in the log "perdure.notify", and a signed webhook where one is set.

A notice was written in the commit of the event that it is about, so none is lost and none is about something that did not happen
(T25). From taking one until it is marked as done, a crash leaves it to whoever takes it after the hold: it goes out at least
once, always under the same id. The store has the only queue; at most _AT_A_TIME notices are out of it here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, ParamSpec, TypeVar, assert_never

from perdure.core.events import ApprovalEscalated, ApprovalRequested, AttentionNeeded, BudgetExceeded, Event, RunFailed
from perdure.core.identity import jitter
from perdure.core.invisible import escaped
from perdure.errors import InvalidInput, StoreError
from perdure.settings import Settings
from perdure.store.api import NoticeRow, Store
from perdure.worker.asking import Asking
from perdure.worker.clock import Clock
from perdure.worker.threads import Threads

if TYPE_CHECKING:
    from perdure.worker.webhook import Answer, Endpoint

HOLD_S = 30.0  # above the longest that a send can take: nobody else sends it meanwhile
_AT_A_TIME = 8
_LONGEST_REST_S = 30.0  # another process may have died with notices in its hands
_STORE_AGAIN_S = 5.0
_AFTER_YOU_S = 0.02  # the same ring wakes whoever looks for runs: that one goes first, and one look serves a burst of rings
_FIRST_RETRY_S = 2.0
_LONGEST_RETRY_S = 3600.0
_TOLD = frozenset((1, 5, 20))  # failures that are worth a warning; after those about one a day
_TOLD_EVERY = 24

P = ParamSpec("P")
T = TypeVar("T")

# What the store writes a notice for, with the event itself. A failed run is told of when it has no parent.
TOLD = frozenset((ApprovalRequested, ApprovalEscalated, AttentionNeeded, BudgetExceeded, RunFailed))

notify = logging.getLogger("perdure.notify")
log = logging.getLogger("perdure.worker")


class Courier:
    """Delivers the notices of a store for as long as `run` runs. `busy` says whether a store call could block for long."""

    def __init__(self, store: Store, settings: Settings, clock: Clock, asking: Asking, *, busy: Callable[[], bool] = lambda: False) -> None:
        self._store = store
        self._settings = settings
        self._clock = clock
        self._asking = asking
        self._busy = busy
        self._threads = Threads(_AT_A_TIME)
        self._changed = asyncio.Event()
        self._out = 0  # notices that have been taken and not been put back
        self._taking = asyncio.Lock()  # from asking for some until they count as out: on a thread that may be a while
        self._misfit: InvalidInput | None = None
        self._endpoint = self._find_endpoint()

    def _find_endpoint(self) -> Endpoint | None:
        if not self._settings.webhook_url:
            return None
        # Not before it is needed: http.client costs a fifth of what the rest of perdure takes to import.
        from perdure.worker.webhook import Endpoint

        try:
            return Endpoint(self._settings.webhook_url, self._settings.webhook_secret, self._settings.webhook_hosts)
        except InvalidInput as error:
            log.error("no webhook can be sent, and notices wait for one: %s", escaped(str(error)))
            self._misfit = error
            return None

    @property
    def at_work(self) -> bool:
        """Whether a notice is on its way, or may be: one that is just being taken is nobody else's any more."""
        return self._out > 0 or self._taking.locked()

    def poke(self) -> None:
        """Something was committed: look again. To be called on the loop's thread; it costs nothing."""
        self._changed.set()

    async def run(self) -> None:
        """Deliver whatever is due, until cancelled. What is under way then is delivered again, here or elsewhere, after the hold."""
        async with asyncio.TaskGroup() as senders:
            while True:
                self._changed.clear()
                try:
                    rest_s = await self._round(senders)
                except StoreError as error:
                    log.error("cannot look for notices: %s; trying again in %.0f s", error, _STORE_AGAIN_S)
                    rest_s = _STORE_AGAIN_S
                except Exception:  # an error of ours: without this the worker would go on and nobody ever hear of anything again
                    log.exception("cannot look for notices; trying again in %.0f s", _STORE_AGAIN_S)
                    rest_s = _STORE_AGAIN_S
                await self._rest(rest_s)

    async def flush(self, timeout_s: float) -> None:
        """Deliver what is due now, each once; what is not through after `timeout_s` is left to the next process."""
        try:
            async with asyncio.timeout(timeout_s), asyncio.TaskGroup() as senders:
                while True:
                    self._changed.clear()
                    try:
                        await self._start_due(senders)
                    except StoreError as error:
                        log.error("cannot look for notices: %s", error)
                        return
                    if not self._out:
                        return
                    await self._changed.wait()
        except TimeoutError:
            log.info("notices are still under way; whoever works on this journal next sends them again")

    # -- rounds -------------------------------------------------------------------------------------------------------
    async def _round(self, senders: asyncio.TaskGroup) -> float:
        """Start what is due, as far as there is room; how long to rest then."""
        due = await self._ask(self._store.next_notice)  # first: at most rings there is none
        if due is not None and due <= self._clock.now():
            await self._start_due(senders)
            if self._out >= _AT_A_TIME:
                return _LONGEST_REST_S  # a send that ends makes room, and says so
            due = await self._ask(self._store.next_notice)
        left_s = _LONGEST_REST_S if due is None else (due - self._clock.now()) / 1e6
        # Due and not given to us: somebody else's clock, or hands. Without a real wait here this would spin.
        return min(max(left_s, self._settings.poll_s), _LONGEST_REST_S)

    async def _start_due(self, senders: asyncio.TaskGroup) -> None:
        async with self._taking:
            while (room := _AT_A_TIME - self._out) > 0:
                taken = await self._ask(self._store.take_notices, self._clock.now(), room, round(HOLD_S * 1e6))
                for notice in taken:
                    self._out += 1
                    task = senders.create_task(self._deliver(notice), name=f"perdure notice {notice.notice_id}")
                    task.add_done_callback(self._returned)
                if len(taken) < room:
                    return

    def _returned(self, _: asyncio.Task[None]) -> None:
        self._out -= 1
        self._changed.set()

    async def _rest(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._changed.wait()
            if not self._out:  # else it was a send that has ended, and the next notice has waited for its place
                await asyncio.sleep(_AFTER_YOU_S)
        except TimeoutError:
            pass  # time to look

    async def _ask(self, question: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """A store call, on this thread while it cannot take long."""
        if self._busy() or self._store.remote:
            return await self._asking.ask(partial(question, *args, **kwargs))
        return question(*args, **kwargs)

    # -- one notice ---------------------------------------------------------------------------------------------------
    async def _deliver(self, notice: NoticeRow) -> None:
        try:
            why = await self._tell(notice)
        except Exception as error:  # an error of ours: it must neither stop the others nor come back without end
            log.exception("notice %s: an error of perdure's own", notice.event.event_id)
            why = f"{type(error).__name__}: {error}"
        try:
            # Until this is durable a crash has it sent once more, under the same id.
            if why is None:
                await self._ask(self._store.notice_done, notice.notice_id)
            else:
                await self._postpone(notice, why)
        except StoreError as error:
            log.error("notice %s: cannot be marked: %s; it goes out again in %.0f s", notice.event.event_id, error, HOLD_S)

    async def _tell(self, notice: NoticeRow) -> str | None:
        """Why it has to be sent again; None when it is done."""
        from perdure.worker import wording  # here: most workers never have anything to tell

        # One that comes again for the sake of its webhook has been in the log; without a webhook it comes again only after a crash.
        if notice.attempts == 0 or not self._settings.webhook_url:
            notify.info("%s", wording.line(notice))
        if self._misfit is not None:
            return str(self._misfit)
        if self._endpoint is None:
            return None
        answer = await self._endpoint.post(self._threads, notice.event.event_id, wording.document(notice), self._clock.now() // 1_000_000)
        return self._reading(answer, notice.event)

    def _reading(self, answer: Answer, event: Event) -> str | None:
        from perdure.worker.webhook import Accepted, Gone, NotDelivered

        assert self._endpoint is not None
        match answer:
            case Accepted():
                return None
            case Gone():
                log.warning("%s says 410 Gone: notice %s (%s) is not sent again", self._endpoint.place, event.event_id, event.type)
                return None
            case NotDelivered(why):
                return why
            case _:
                assert_never(answer)

    async def _postpone(self, notice: NoticeRow, why: str) -> None:
        failures = notice.attempts + 1
        delay_s = retry_delay_s(notice.event.event_id, failures)
        if self._endpoint is not None and (failures in _TOLD or failures % _TOLD_EVERY == 0):
            words = "notice %s (%s of run %s) could not be delivered to %s, failure %d: %s; again in %.0f s"
            event, place = notice.event, self._endpoint.place
            log.warning(words, event.event_id, event.type, notice.row.run_id, place, failures, escaped(why), delay_s)
        next_at = self._clock.now() + round(delay_s * 1e6)
        await self._ask(self._store.notice_failed, notice.notice_id, next_at=next_at, error=escaped(why))


def retry_delay_s(event_id: str, failures: int) -> float:
    """How long to wait after that many failures in a row: 2 s, 4 s, 8 s, … up to an hour, each up to a fifth less."""
    whole = min(_FIRST_RETRY_S * 2.0 ** min(failures - 1, 20), _LONGEST_RETRY_S)
    return whole * (1.0 - 0.2 * jitter(event_id, failures))
