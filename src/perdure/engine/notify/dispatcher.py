"""Takes notices from the store and sends them: a line in the log "perdure.notify", and a signed webhook if one is set.

A notice is written in the commit of its event, so no notice is lost, and no notice is about an event that did not
happen. If a process takes a notice and crashes before it marks the notice as done, another process takes the notice
after HOLD_S seconds. So each notice is sent at least once, always under the same id. The only queue is in the store; a
dispatcher takes at most _AT_A_TIME notices at a time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, ParamSpec, TypeVar, assert_never

from perdure.core.events import Event, RunFailed
from perdure.core.identity import jitter
from perdure.core.invisible import escaped
from perdure.engine.clock import Clock
from perdure.engine.threads import ReadingThreads, Threads
from perdure.errors import InvalidInput, StoreError, in_full
from perdure.settings import Settings
from perdure.store import notices
from perdure.store.api import NoticeRow, Store

if TYPE_CHECKING:
    from perdure.engine.notify.webhook import Answer, Endpoint

# For how long a notice belongs to the process that took it: longer than the longest send, so that no other process
# sends the notice meanwhile.
HOLD_S = 30.0
_AT_A_TIME = 8
_LONGEST_REST_S = 30.0  # the longest time between two looks: another process may have died after it took notices
_STORE_AGAIN_S = 5.0
# The pause after a ring. The same ring wakes the worker, which should claim first. Several rings need only one look.
_AFTER_YOU_S = 0.02
_FIRST_RETRY_S = 2.0
_LONGEST_RETRY_S = 3600.0
_TOLD = frozenset((1, 5, 20))  # which failures in a row are logged as a warning; later failures about once a day
_TOLD_EVERY = 24

P = ParamSpec("P")
T = TypeVar("T")

# The events for which the store writes a notice, in the same commit. A failed run gets a notice only if the run has no
# parent.
TOLD = frozenset((*notices.TOLD, RunFailed))

notify = logging.getLogger("perdure.notify")
log = logging.getLogger("perdure.worker")


class Dispatcher:
    """Sends the notices of a store while `run` runs.

    `busy` says whether a call of the store could block for long.
    """

    def __init__(
        self, store: Store, settings: Settings, clock: Clock, asking: ReadingThreads, *, busy: Callable[[], bool] = lambda: False
    ) -> None:
        self._store = store
        self._settings = settings
        self._clock = clock
        self._asking = asking
        self._busy = busy
        self._threads = Threads(_AT_A_TIME)
        self._changed = asyncio.Event()
        self._out = 0  # how many notices are taken, and not yet marked as done or failed
        # This lock is held from the question to the store until `_out` counts the taken notices, which may take long.
        self._taking = asyncio.Lock()
        self._misfit: InvalidInput | None = None
        self._endpoint = self._find_endpoint()

    def _find_endpoint(self) -> Endpoint | None:
        if not self._settings.webhook_url:
            return None
        # Imported late: http.client takes a fifth of the import time of the rest of perdure.
        from perdure.engine.notify.webhook import Endpoint

        try:
            return Endpoint(self._settings.webhook_url, self._settings.webhook_secret, self._settings.webhook_hosts)
        except InvalidInput as error:
            log.error("no webhook can be sent, and notices wait for one: %s", escaped(str(error)))
            self._misfit = error
            return None

    @property
    def at_work(self) -> bool:
        """Is a notice being sent, or being taken from the store?"""
        return self._out > 0 or self._taking.locked()

    def poke(self) -> None:
        """Look for notices again, because something was committed. Call this on the loop's thread; it is cheap."""
        self._changed.set()

    async def run(self) -> None:
        """Send the notices that are due, until this call is cancelled.

        Notices that are under way at that moment are sent again by another process, after HOLD_S seconds.
        """
        async with asyncio.TaskGroup() as senders:
            while True:
                self._changed.clear()
                try:
                    rest_s = await self._round(senders)
                except StoreError as error:
                    log.error("cannot look for notices: %s; trying again in %.0f s", in_full(error), _STORE_AGAIN_S)
                    rest_s = _STORE_AGAIN_S
                except Exception:  # a bug: without this, the worker would continue but never send a notice again
                    log.exception("cannot look for notices; trying again in %.0f s", _STORE_AGAIN_S)
                    rest_s = _STORE_AGAIN_S
                await self._rest(rest_s)

    async def flush(self, timeout_s: float) -> None:
        """Send the notices that are due now. After `timeout_s` seconds, the rest is left to another process."""
        try:
            async with asyncio.timeout(timeout_s), asyncio.TaskGroup() as senders:
                while True:
                    self._changed.clear()
                    try:
                        await self._start_due(senders)
                    except StoreError as error:
                        log.error("cannot look for notices: %s", in_full(error))
                        return
                    if not self._out:
                        return
                    await self._changed.wait()
        except TimeoutError:
            log.info("notices are still under way; the next worker on this journal sends them again")

    # -- rounds -------------------------------------------------------------------------------------------------------
    async def _round(self, senders: asyncio.TaskGroup) -> float:
        """Start to send the notices that are due, as far as there is room. Returns how many seconds to wait then."""
        due = await self._ask(self._store.next_notice)  # a cheap check first: after most rings no notice is due
        if due is not None and due <= self._clock.now():
            await self._start_due(senders)
            if self._out >= _AT_A_TIME:
                return _LONGEST_REST_S  # a send that ends makes room, and sets `_changed`
            due = await self._ask(self._store.next_notice)
        left_s = _LONGEST_REST_S if due is None else (due - self._clock.now()) / 1e6
        # A notice may be due although `take_notices` did not return it: another process has taken it, or clocks
        # differ. Wait at least poll_s: otherwise this would be a busy loop.
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
            if not self._out:  # if notices are under way, a send has ended and made room: look again at once
                await asyncio.sleep(_AFTER_YOU_S)
        except TimeoutError:
            pass  # the time is over

    async def _ask(self, question: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call the store: on this thread if the call is quick, else on another thread."""
        if self._busy() or self._store.remote:
            return await self._asking.ask(partial(question, *args, **kwargs))
        return question(*args, **kwargs)

    # -- one notice ---------------------------------------------------------------------------------------------------
    async def _deliver(self, notice: NoticeRow) -> None:
        try:
            why = await self._tell(notice)
        except Exception as error:  # a bug: it must not stop the other sends, and the retry must wait
            log.exception("notice %s: an error of perdure's own", notice.event.event_id)
            why = f"{type(error).__name__}: {error}"
        try:
            # If the process crashes before this is durable, the notice is sent again, under the same id.
            if why is None:
                await self._ask(self._store.notice_done, notice.notice_id)
            else:
                await self._postpone(notice, why)
        except StoreError as error:
            log.error("notice %s: cannot be marked: %s; it goes out again in %.0f s", notice.event.event_id, in_full(error), HOLD_S)

    async def _tell(self, notice: NoticeRow) -> str | None:
        """Send one notice. Returns why the notice has to be sent again; None: the notice is done."""
        from perdure.engine.notify import messages  # imported late: most workers never send a notice

        # If this is a retry of the webhook, the notice is in the log already. Without a webhook there is a retry only
        # after a crash, and the crash may have happened before the notice was in the log.
        if notice.attempts == 0 or not self._settings.webhook_url:
            notify.info("%s", messages.line(notice))
        if self._misfit is not None:
            return str(self._misfit)
        if self._endpoint is None:
            return None
        answer = await self._endpoint.post(self._threads, notice.event.event_id, messages.document(notice), self._clock.now() // 1_000_000)
        return self._reading(answer, notice.event)

    def _reading(self, answer: Answer, event: Event) -> str | None:
        from perdure.engine.notify.webhook import Accepted, NotDelivered, ReceiverGone

        assert self._endpoint is not None
        match answer:
            case Accepted():
                return None
            case ReceiverGone():
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
    """The wait after `failures` failures in a row: 2 s, 4 s, 8 s, … up to an hour, each shortened by up to a fifth."""
    whole = min(_FIRST_RETRY_S * 2.0 ** min(failures - 1, 20), _LONGEST_RETRY_S)
    return whole * (1.0 - 0.2 * jitter(event_id, failures))
