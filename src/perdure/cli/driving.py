"""Driving one run in this process, for `run` and `resume`: signals, progress, and how it ended.

The first SIGTERM or SIGINT drains: the run is handed over at a step boundary. The second ends the process at once, which the
journal survives like any other crash.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

from perdure import shell
from perdure.cli import common
from perdure.cli.needs import needs, stuck_child
from perdure.cli.target import resume_command
from perdure.core.events import Event, RunCancelled, RunFailed, RunSucceeded
from perdure.errors import AlreadyRunning, StoreUnavailable
from perdure.inspect.serving import name_of
from perdure.store.api import FINISHED, RunRow

if TYPE_CHECKING:
    from perdure.app import Perdure

log = logging.getLogger("perdure")
_LOOK_AGAIN_S = 1.0
_SHOWN = frozenset(
    "tool_call_initiated tool_call_completed tool_call_failed tool_call_in_doubt tool_call_resolved retry_scheduled run_released "
    "model_call_initiated model_call_completed model_call_failed plan_generated "
    "status_reported thought_recorded decision_made cancel_requested attention_needed approval_requested approval_voted approval_decided "
    "approval_escalated approval_expired approval_withdrawn signal_received child_started child_finished run_paused run_unpaused "
    "run_adopted pin_changed budget_exceeded budget_raised".split()
)


def stop_on_signals(loop: asyncio.AbstractEventLoop) -> asyncio.Event:
    """An event that the first SIGTERM or SIGINT sets; the second ends the process at once."""
    stop = asyncio.Event()
    seen = False

    def handle(number: int, _: FrameType | None) -> None:
        nonlocal seen
        if seen:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        seen = True
        loop.call_soon_threadsafe(stop.set)
        try:
            # os.write: a handler may interrupt a print, and a stream's buffer cannot be entered twice.
            os.write(2, f"perdure: {signal.Signals(number).name}: draining; once more ends it at once\n".encode())
        except OSError:
            pass  # nobody reads stderr any more: the run must be handed over all the same

    # Not loop.add_signal_handler: a tool that blocks the loop must not block the second signal.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handle)
    return stop


async def drive(app: Perdure, run_id: str, *, wait: bool) -> RunRow:
    """Drive the run and its children here until it ends or rests, with progress on a terminal; the row it rests with."""
    stop = stop_on_signals(asyncio.get_running_loop())
    async with _progress(app, run_id):
        return await app.drive(run_id, wait=wait, stop=stop)


async def drive_or_follow(app: Perdure, run_id: str, *, not_before: int = 0) -> RunRow:
    """The same, from `not_before` on; while another worker has the run this waits for it, and goes on itself when nobody has it."""
    stop = stop_on_signals(asyncio.get_running_loop())
    while (left_s := (not_before - common.now_us()) / 1e6) > 0 and not stop.is_set():
        if (await app.handle(run_id).status()).epoch > 0:
            break  # a worker, by another clock than ours, has begun with it
        await _pause(min(left_s, 60.0), stop)
    async with _progress(app, run_id):
        told = False
        while True:
            row = await _drive_unless_held(app, run_id, stop)
            if row.holder is None or row.status in FINISHED or stop.is_set():
                return row
            if not told:
                common.note(common.clean(f"perdure: run {run_id} is with the worker {holder_name(app, row)}; waiting for it"))
                told = True
            await _while_held(app, row, stop)
            row = await _status(app, run_id, stop)
            # As at the start: what a person has stopped, or must see to, is not sent back to work by this.
            if row.holder is None and row.status in ("needs_attention", "paused"):
                return row


async def _drive_unless_held(app: Perdure, run_id: str, stop: asyncio.Event) -> RunRow:
    while True:
        try:
            return await app.drive(run_id, wait=True, stop=stop)
        except AlreadyRunning:
            row = await _status(app, run_id, stop)
            if row.holder is not None or row.status in FINISHED or stop.is_set():
                return row  # otherwise it was given up between the two looks


async def _while_held(app: Perdure, row: RunRow, stop: asyncio.Event) -> None:
    """Until the run is in other hands or at its end; for a second at most, since a holder that dies says nothing: a claim finds out."""
    for _ in range(max(round(_LOOK_AGAIN_S / app.settings.poll_s), 1)):
        await _pause(min(app.settings.poll_s, _LOOK_AGAIN_S), stop)
        now = await _status(app, row.run_id, stop)
        if stop.is_set() or now.status in FINISHED or (now.holder, now.epoch) != (row.holder, row.epoch):
            return


async def _status(app: Perdure, run_id: str, stop: asyncio.Event) -> RunRow:
    while True:
        try:
            return await app.handle(run_id).status()
        except StoreUnavailable as error:
            if stop.is_set():
                raise
            # Whoever waits goes on waiting: the run goes on elsewhere, or will when the database is back.
            log.warning("run %s: cannot look how it is: %s; trying again", run_id, error)
            await _pause(_LOOK_AGAIN_S, stop)


async def _pause(seconds: float, stop: asyncio.Event) -> None:
    stopping = asyncio.ensure_future(stop.wait())
    await asyncio.wait([stopping], timeout=seconds)
    stopping.cancel()


def holder_name(app: Perdure, row: RunRow) -> str:
    """Who holds the run, for people: host:pid."""
    workers = app.reading.workers(common.now_at(app.reading), round(app.settings.lease_s * 1e6))
    return name_of(str(row.holder), workers)


@asynccontextmanager
async def _progress(app: Perdure, run_id: str) -> AsyncIterator[None]:
    if not sys.stderr.isatty():
        yield
        return
    showing = asyncio.create_task(_show(app, run_id))
    try:
        yield
    finally:
        await asyncio.wait([showing], timeout=0.2)  # the last events have just been committed
        showing.cancel()
        await asyncio.gather(showing, return_exceptions=True)


async def _show(app: Perdure, run_id: str) -> None:
    from perdure.inspect.timeline import Timeline

    timeline = Timeline(run_id)
    begun = common.now_us()
    async for event in app.handle(run_id).follow():
        said = timeline.say(event)
        # What is older was done by somebody before us: replayed, not performed.
        if event.ts >= begun and event.type in _SHOWN:
            common.note(common.clean(f"  {said}"))


# -- how it ended ------------------------------------------------------------------------------------------------------------
def finish(app: Perdure, row: RunRow, *, as_json: bool, url: str | None) -> int:
    """Print the run's output, or say why there is none and what to type; the exit code."""
    from perdure.inspect.words import places

    last = _last_event(app, row)
    output = _output(app, last)
    if as_json:
        common.out_json({"run_id": row.run_id, "status": row.status, "output": output, "error": row.error})
    elif row.status == "succeeded":
        # Text is shown as text; everything else as the JSON it is.
        common.out(common.clean(output, keep="\n\t") if isinstance(output, str) else common.to_json(output))
    if row.status != "succeeded":
        if last is not None and isinstance(last.body, RunFailed) and os.environ.get("PERDURE_DEBUG"):
            for place in places(last.body.failure):
                common.note(common.clean(f"  {place}"))
        stuck = stuck_child(app.reading, row)
        said = _sentence(app, row, last, url) if stuck is None else _stuck(app, row, stuck, url)
        common.note(f"perdure: {common.clean(said)}")
        for line in needs(app.reading, row, url):
            common.note(f"  {common.clean(line)}")
        if stuck is not None:
            return common.NEEDS_ATTENTION
    return _code(row)


def _stuck(app: Perdure, row: RunRow, child: RunRow, url: str | None) -> str:
    if child.attention == "budget" and child.run_id in app.reading.over_budget(row.run_id):
        return f"run {row.run_id} waits for children that its budget does not suffice for; {command('why', row.run_id, url)} tells more"
    return f"run {row.run_id} waits for {child.run_id}, which needs attention; next: {command('why', child.run_id, url)}"


def _last_event(app: Perdure, row: RunRow) -> Event | None:
    return app.reading.read(row.run_id, after=row.seq - 1)[0] if row.status in FINISHED else None


def _output(app: Perdure, last: Event | None) -> Any:
    from perdure.inspect.view import loader
    from perdure.inspect.words import plain

    return plain(last.body.output, loader(app.reading)) if last is not None and isinstance(last.body, RunSucceeded) else None


def _sentence(app: Perdure, row: RunRow, last: Event | None, url: str | None) -> str:
    """What became of a run that has not succeeded, and the way on."""
    run, resume = f"run {row.run_id}", resume_command(app.reading, row, app.url, url)
    body = last.body if last is not None else None
    if isinstance(body, RunFailed):
        return f"{run} failed: {body.failure.type}: {body.failure.message}; {command('why', row.run_id, url)} tells more"
    if isinstance(body, RunCancelled):
        return f"{run} was cancelled{f': {body.reason}' if body.reason else ''}"
    if row.status == "needs_attention":
        return f"{run} needs attention: {row.error or row.waiting_for or 'see why'}; next: {command('why', row.run_id, url)}"
    if row.holder is not None:
        return f"{run} is with the worker {holder_name(app, row)}; {command('why', row.run_id, url)} tells how it goes on"
    if row.status == "paused":
        return f"{run} is paused; let it go on: {command('unpause', row.run_id, url)}"
    if row.status == "waiting_approval":
        return f"{run} waits for {row.waiting_for}; after the decision a worker goes on with it, or here: {resume}"
    if row.status == "waiting" and row.ready_at is None:
        return f"{run} waits for {row.waiting_for}; after that a worker goes on with it, or here: {resume}"
    if row.status == "waiting":
        return f"{run} waits: {row.waiting_for}; a worker goes on with it when it is time, or here: {resume}"
    if row.ready_at is not None and row.ready_at > common.now_us():
        return f"{run} is not to begin before {common.iso(row.ready_at)}; a worker begins it then, or here: {resume}"
    return f"{run} is {row.status} and was handed over; a worker goes on with it, or here: {resume}"


def _code(row: RunRow) -> int:
    return common.HELD if row.holder is not None and row.status not in FINISHED else common.CODE_OF_STATUS[row.status]


def command(verb: str, run_id: str, url: str | None) -> str:
    """The command to type next, with the database that this one was given."""
    return shell.command(verb, run_id) + common.url_words(url)


# -- the log -----------------------------------------------------------------------------------------------------------------
class _CleanFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return common.clean(super().format(record), keep="\n")


def log_to_stderr(level: int) -> None:
    """Send what perdure logs to stderr, safe to look at."""
    handler = logging.StreamHandler()
    handler.setFormatter(_CleanFormatter("%(asctime)s %(levelname)s %(message)s"))
    logger = logging.getLogger("perdure")
    logger.addHandler(handler)
    logger.setLevel(level)
    logger.propagate = False  # an agent's file may set up logging of its own; nothing shall be said twice
