"""Drives one run in this process, for `run` and `resume`: signals, progress, the result, and what to type next.

Also here: `stop_on_signals`, which `worker` and `undo` use too.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from itertools import islice
from types import FrameType
from typing import TYPE_CHECKING, Any

from perdure import shell
from perdure.cli import common
from perdure.cli.inbox import commands
from perdure.cli.target import resume_command
from perdure.core.events import CheckpointTaken, Event, RunCancelled, RunFailed, RunSucceeded
from perdure.core.history import history, inherited, is_stated, life_at
from perdure.core.state import fold
from perdure.engine.api import Reading
from perdure.errors import AlreadyRunning, Conflict, PerdureError, StoreCorrupt, StoreUnavailable, WrongVersion
from perdure.inspect.branches import known_calls
from perdure.inspect.resuming import open_call_words
from perdure.inspect.text import clip, plural
from perdure.inspect.view import begins_later
from perdure.store.api import FINISHED, NO_VERSION, ApprovalFilter, RunRow, Served, WorkerRow

if TYPE_CHECKING:
    from perdure.app import Perdure

SHOWN = 10


# -- What a waiting run needs from a person


def needs(store: Reading, row: RunRow, url: str | None) -> list[str]:
    """The first SHOWN things that a person must do before the run, or a run below it, can continue: one line each."""
    if row.status in FINISHED or row.holder is not None:
        return []
    found = list(islice(_needs(store, row, url), SHOWN + 1))
    return found if len(found) <= SHOWN else [*found[:SHOWN], f"… and more: {_all(store, row, url)}"]


def _needs(store: Reading, row: RunRow, url: str | None) -> Iterator[str]:
    broke = set(store.over_budget(row.run_id)) - {row.run_id}
    if broke:
        yield short_of_budget(store, row, sorted(broke), url)
    for one in (row, *store.family(row.run_id)):
        if one.run_id in broke:
            continue  # short_of_budget makes one line for all these runs
        if one.status == "waiting_approval":
            for asked in store.approvals(ApprovalFilter(run_id=one.run_id, limit=SHOWN + 1)):
                yield "   or: ".join(commands(store, asked, common.now_us(), url))
        elif one is row:
            continue  # `finish` has printed a sentence about the run itself
        elif one.status == "needs_attention":
            why = shell.command("why", one.run_id) + common.url_words(url)
            yield f"child {one.run_id} needs attention: {clip(one.error or one.waiting_for or '', 100)}: {why}"
        elif one.status == "paused":
            yield f"child {one.run_id} is paused: {shell.command('unpause', one.run_id)}{common.url_words(url)}"


def short_of_budget(store: Reading, row: RunRow, broke: list[str], url: str | None) -> str:
    """One line about the children that this run's budget stopped, with the command that continues all of them."""
    over = fold(store.read(broke[0])).over
    who = f"child {broke[0]} was" if len(broke) == 1 else f"{len(broke):,} children were"
    what = over.what if over is not None else "usd"
    unpause = shell.command("unpause", row.run_id)
    return f"{who} stopped by the budget of {row.run_id}: {unpause} {shell.quote(f'--add-{what}')} N{common.url_words(url)}"


def _all(store: Reading, row: RunRow, url: str | None) -> str:
    """The commands that list all runs and approvals which need a person."""
    found = {one.status for one in (row, *store.family(row.run_id))}
    verbs = {"waiting_approval": "approvals", "needs_attention": "list --status needs_attention", "paused": "list --status paused"}
    return ", ".join(f"perdure {verb}{common.url_words(url)}" for status, verb in verbs.items() if status in found)


def stuck_child(store: Reading, row: RunRow) -> RunRow | None:
    """A run below this run that needs attention. None if this run does not wait, or a run below can still wake it."""
    if row.status != "waiting" or row.ready_at is not None or row.holder is not None:
        return None
    family = store.family(row.run_id)
    moving = any(one.holder is not None or one.ready_at is not None or one.status == "waiting_approval" for one in family)
    return None if moving else next((one for one in family if one.status == "needs_attention"), None)


# -- Driving


log = logging.getLogger("perdure")
_LOOK_AGAIN_S = 1.0
_SHOWN = frozenset(
    "tool_call_initiated tool_call_completed tool_call_failed tool_call_in_doubt tool_call_resolved retry_scheduled run_released "
    "model_call_initiated model_call_completed model_call_failed plan_generated "
    "status_reported thought_recorded decision_made cancel_requested attention_needed approval_requested approval_voted approval_decided "
    "approval_escalated approval_expired approval_withdrawn signal_received child_started child_finished run_paused run_unpaused "
    "run_adopted pin_changed budget_exceeded budget_raised run_reopened run_forked".split()
)


def stop_on_signals(loop: asyncio.AbstractEventLoop, line: Callable[[str], str] = "perdure: {}".format) -> asyncio.Event:
    """An event that the first SIGTERM or SIGINT sets. The second signal ends the process at once.

    `line` makes a line for stderr from a message.
    """
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
            # Use os.write: this handler may have interrupted a print, and the buffer of a stream is not reentrant.
            os.write(2, f"{line(f'{signal.Signals(number).name}: draining; a second signal ends it at once')}\n".encode())
        except OSError:
            pass  # stderr is closed; the run must still be released

    # Do not use loop.add_signal_handler: if a tool blocks the loop, the second signal must still end the process.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handle)
    return stop


# -- before a run is driven: may it begin, may this code continue it, and what happens to its open calls?


async def check_version(app: Perdure, row: RunRow, given: str) -> None:
    """Raise WrongVersion if this process has only other versions of the agent.

    `given`: the TARGET that the user typed.

    The hint suggests --adopt only if this code asks for the calls that the journal has.
    """
    here = [served for served in app.versions if served.agent == row.agent]
    if not here or row.version in [NO_VERSION, *(served.version for served in here)] or row.status in FINISHED:
        return
    agent = app.versions[here[-1]]

    def in_the_way() -> PerdureError | None:
        events = app.reading.read(row.run_id)
        try:
            agent.adoption(fold(events), events, app.load, app.settings.max_steps, by="perdure", note=None)
        except PerdureError as error:
            return error
        return None

    found = await asyncio.to_thread(in_the_way)  # in a thread, because it runs an agent: see Perdure.adopt
    message = f"run {row.run_id} was begun with version {row.version} of agent {row.agent}, and this code is {_versions(here)}"
    words = f" {given}" if given else ""
    if found is None:
        adopt = f"{shell.command('adopt', row.run_id)}{words}"
        raise WrongVersion(message, hint=f"use the old code, or let this code go on with it, which fits its journal: {adopt}")
    if isinstance(found, Conflict):
        raise WrongVersion(f"{message}; {found}", hint=found.hint)
    raise WrongVersion(
        f"{message}; it cannot go on with the run, because it asks for something else: {clip(str(found), 200)}",
        hint=f"use the code of version {row.version}, or end the run ({shell.command('cancel', row.run_id)}) and begin another one; "
        f"the difference again: {shell.command('replay', row.run_id)}{words}",
    )


def _versions(here: Sequence[Served]) -> str:
    return " and ".join(f"version {served.version}" for served in here)


async def what_resuming_does(app: Perdure, row: RunRow) -> None:
    """Say on stderr what comes from the journal, and what happens to each call that has no result."""
    if row.holder is not None and (holder := worker_of(app, row)) is not None and holder.alive:
        return  # nothing is resumed: the holder goes on
    if (said := await asyncio.to_thread(_resuming, app, row)) is not None:
        common.note(common.clean(f"perdure: resuming run {row.run_id}: {said}"))


def _resuming(app: Perdure, row: RunRow) -> str | None:
    events = app.reading.read(row.run_id)
    state = fold(events)
    if state.started_seq is None:
        return "its agent begins: no line of it has run yet"
    ended = {call.number for call in state.calls.values() if call.ended}
    ended |= {child.number for child in state.children.values() if child.ended is not None}
    ended |= {ask.number for ask in state.asks.values() if ask.request.tool is None and not ask.pending}
    if state.reopened:
        ended &= known_calls(events)
    since = ""
    life = life_at(history(events).whole, None)
    if isinstance(life[0].body, CheckpointTaken):
        # Only this life is replayed. The calls of earlier lives are over.
        ended &= inherited(life) | {event.call for event in life if event.call is not None and is_stated(event)}
        since = f" since its checkpoint (event {life[0].seq})"
    kept = (
        f"{plural(len(ended), f'call{since} comes', f'calls{since} come')} from the journal"
        if ended
        else f"no call{since} has a result yet"
    )
    if (agent := app.versions.get(Served(row.agent, row.version))) is None:
        return None  # `drive` will refuse the run
    if not state.open:
        waits = f"waits for {plural(len(state.alive), 'child', 'children')}"
        return f"{kept}, and its agent {waits if state.alive else 'goes on'}"
    try:
        # The replay finds the tool of each call in the code: its reconcile hook, and how long its keys are valid.
        frontier = agent.replayed(state, events, app.load, app.settings.max_steps)
    except PerdureError:
        return None  # the code does not fit the journal: `drive` says so, and stops
    now, asks = common.now_at(app.reading), app.settings.reconcile_asks
    told = [open_call_words(call, frontier, state, max_asks=asks, now=now) for call in list(state.open.values())[:SHOWN]]
    more = f"; and {plural(len(state.open) - SHOWN, 'more call')}" if len(state.open) > SHOWN else ""
    return f"{kept}; {'; '.join(told)}{more}"


async def drive(app: Perdure, run_id: str, *, wait: bool) -> RunRow:
    """Drive the run and its children until the run ends or parks. Show progress on a terminal; return the row."""
    stop = stop_on_signals(asyncio.get_running_loop())
    async with _progress(app, run_id):
        return await app.engine.drive(run_id, wait=wait, stop=stop)


async def drive_or_take_over(app: Perdure, run_id: str, *, wait: bool) -> RunRow:
    """Like `drive`.

    If a silent worker holds the run, wait until the lease of that worker has ended, and take over the run.

    Raises AlreadyRunning if the worker is alive, or if `wait` is False.
    """
    stop = stop_on_signals(asyncio.get_running_loop())
    async with _progress(app, run_id):
        told = False
        while True:
            try:
                return await app.engine.drive(run_id, wait=wait, stop=stop)
            except Conflict:
                row = await app.handle(run_id).row()
                if row.status != "paused":
                    raise
                return row  # the run was paused meanwhile
            except AlreadyRunning:
                row = await _status(app, run_id, stop)
                holder = worker_of(app, row)
                if not wait or stop.is_set() or (holder is not None and holder.alive):
                    raise
            if holder is not None and not told:
                lease_s = (holder.lease_us or round(app.settings.lease_s * 1e6)) / 1e6
                common.note(common.clean(f"perdure: {_silent_words(holder, row)}; taking the run over when {lease_s:g} s have passed here"))
                told = True
            await _pause(_LOOK_AGAIN_S, stop)


def _silent_words(holder: WorkerRow, row: RunRow) -> str:
    seen = common.iso(holder.beat_at)
    return f"run {row.run_id} is held by worker {holder.name}, which is silent since {seen} (suspended, or cut off from the database)"


async def drive_or_follow(app: Perdure, run_id: str, *, not_before: int = 0) -> RunRow:
    """Like `drive`, but begin at the time `not_before`. While another worker holds the run, wait for the release."""
    stop = stop_on_signals(asyncio.get_running_loop())
    if not_before > common.now_at(app.reading):
        common.note(common.clean(f"perdure: run {run_id} begins at {common.iso(not_before)}; waiting, and Ctrl-C leaves it as it is"))
    while (left_s := (not_before - common.now_at(app.reading)) / 1e6) > 0 and not stop.is_set():
        if (await app.handle(run_id).row()).epoch > 0:
            break  # a worker with a faster clock has already claimed the run
        await _pause(min(left_s, 60.0), stop)
    async with _progress(app, run_id):
        told = False
        while True:
            row = await _drive_unless_held(app, run_id, stop)
            if row.holder is None or row.status in FINISHED or stop.is_set():
                return row
            if not told:
                common.note(common.clean(f"perdure: run {run_id} is held by the worker {holder_name(app, row)}; waiting for it"))
                told = True
            await _while_held(app, row, stop)
            row = await _status(app, run_id, stop)
            # Do not requeue a run that is paused or needs a person: `perdure run` never does this.
            if row.holder is None and row.status in ("needs_attention", "paused"):
                return row


async def _drive_unless_held(app: Perdure, run_id: str, stop: asyncio.Event) -> RunRow:
    while True:
        try:
            return await app.engine.drive(run_id, wait=True, stop=stop)
        except AlreadyRunning:
            row = await _status(app, run_id, stop)
            if row.holder is not None or row.status in FINISHED or stop.is_set():
                return row  # else the run was released after the attempt to drive it: try again


async def _while_held(app: Perdure, row: RunRow, stop: asyncio.Event) -> None:
    """Wait until the run has ended or has another holder, but at most _LOOK_AGAIN_S seconds.

    If the holder dies, no row changes. Only the next attempt to claim the run finds this out, so the wait is short.
    """
    for _ in range(max(round(_LOOK_AGAIN_S / app.settings.poll_s), 1)):
        await _pause(min(app.settings.poll_s, _LOOK_AGAIN_S), stop)
        now = await _status(app, row.run_id, stop)
        if stop.is_set() or now.status in FINISHED or (now.holder, now.epoch) != (row.holder, row.epoch):
            return


async def _status(app: Perdure, run_id: str, stop: asyncio.Event) -> RunRow:
    while True:
        try:
            return await app.handle(run_id).row()
        except StoreUnavailable as error:
            if stop.is_set():
                raise
            # Try again: another worker may be driving the run, or will drive it when the database is available again.
            log.warning("run %s: cannot read its status: %s; trying again", run_id, error.in_full())
            await _pause(_LOOK_AGAIN_S, stop)


async def _pause(seconds: float, stop: asyncio.Event) -> None:
    stopping = asyncio.ensure_future(stop.wait())
    await asyncio.wait([stopping], timeout=seconds)
    stopping.cancel()


def worker_of(app: Perdure, row: RunRow) -> WorkerRow | None:
    """The worker that holds the run; None if no worker holds it, or if that worker is not registered any more."""
    workers = app.reading.workers(common.now_at(app.reading), round(app.settings.lease_s * 1e6))
    return next((worker for worker in workers if worker.worker == row.holder), None)


def holder_name(app: Perdure, row: RunRow) -> str:
    """The name of the worker that holds the run: host:pid."""
    holder = worker_of(app, row)
    return str(row.holder) if holder is None else holder.name


@asynccontextmanager
async def _progress(app: Perdure, run_id: str) -> AsyncIterator[None]:
    if not sys.stderr.isatty():
        yield
        return
    showing = asyncio.create_task(_show(app, run_id))
    try:
        yield
    finally:
        await asyncio.wait([showing], timeout=0.2)  # time to show the last events, which were just committed
        showing.cancel()
        await asyncio.gather(showing, return_exceptions=True)


async def _show(app: Perdure, run_id: str) -> None:
    from perdure.inspect.timeline import Timeline

    timeline = Timeline(run_id)
    begun = common.now_us()
    async for event in app.handle(run_id).follow():
        said = timeline.say(event)
        # Events before `begun` are not from this process: this process only replays them.
        if event.ts >= begun and event.type in _SHOWN:
            common.note(common.clean(f"  {said}"))


_ENDS: dict[type, str] = {RunSucceeded: "succeeded", RunFailed: "failed", RunCancelled: "cancelled"}


# -- how the run ended ------------------------------------------------------------------------------------------------
def finish(app: Perdure, row: RunRow, *, as_json: bool, url: str | None) -> int:
    """Print the run's output. If there is no output, print why, and what to type. Return the exit code."""
    from perdure.inspect.text import places

    last = _last_event(app, row)
    output = _output(app, last)
    if as_json:
        common.out_json({"run_id": row.run_id, "status": row.status, "output": output, "error": row.error})
    elif row.status == "succeeded":
        # A string is printed as text, any other output as JSON.
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
        return f"run {row.run_id} waits for children that its budget has stopped; {command('why', row.run_id, url)} tells more"
    return f"run {row.run_id} waits for {child.run_id}, which needs attention; next: {command('why', child.run_id, url)}"


def _last_event(app: Perdure, row: RunRow) -> Event | None:
    """The terminal event of a finished run; None if the run has not finished. StoreCorrupt if the row was edited."""
    if row.status not in FINISHED:
        return None
    last = next(iter(app.reading.read(row.run_id, after=row.seq - 1)), None)
    if last is None or _ENDS.get(type(last.body)) != row.status:
        ends = "has no such event" if last is None else f"is {last.type}"
        raise StoreCorrupt(
            f"run {row.run_id} is {row.status} by its row, and event {row.seq} of its journal {ends}: the row was edited",
            hint=f"write the row again from the journal: {shell.command('verify', row.run_id)} --repair",
        )
    return last


def _output(app: Perdure, last: Event | None) -> Any:
    from perdure.inspect.text import plain
    from perdure.inspect.view import loader

    return plain(last.body.output, loader(app.reading)) if last is not None and isinstance(last.body, RunSucceeded) else None


def _sentence(app: Perdure, row: RunRow, last: Event | None, url: str | None) -> str:
    """The status of a run that has not succeeded, and the command to type next."""
    run, resume = f"run {row.run_id}", resume_command(app.reading, row, app.url, url)
    body = last.body if last is not None else None
    if isinstance(body, RunFailed):
        return f"{run} failed: {body.failure.type}: {body.failure.message}; {command('why', row.run_id, url)} tells more"
    if isinstance(body, RunCancelled):
        return f"{run} was cancelled{f': {body.reason}' if body.reason else ''}"
    if row.status == "needs_attention":
        return f"{run} needs attention: {row.error or row.waiting_for or 'see why'}; next: {command('why', row.run_id, url)}"
    if row.holder is not None:
        return f"{run} is held by the worker {holder_name(app, row)}; {command('why', row.run_id, url)} tells how it goes on"
    if row.status == "paused":
        return f"{run} is paused; let it go on: {command('unpause', row.run_id, url)}"
    if row.status == "waiting_approval":
        return f"{run} waits for {row.waiting_for}; after the decision a worker goes on with it, or here: {resume}"
    if row.status == "waiting" and row.ready_at is None:
        return f"{run} waits for {row.waiting_for}; after that a worker goes on with it, or here: {resume}"
    if row.status == "waiting":
        return f"{run} waits: {row.waiting_for}; a worker goes on with it when it is time, or here: {resume}"
    if begins_later(row, common.now_at(app.reading)):
        return f"{run} must not begin before {common.iso(row.ready_at or 0)}; a worker begins it then, or now and here: {resume} --now"
    return f"{run} is {row.status} and was released; a worker goes on with it, or here: {resume}"


def _code(row: RunRow) -> int:
    return common.HELD if row.holder is not None and row.status not in FINISHED else common.CODE_OF_STATUS[row.status]


def command(verb: str, run_id: str, url: str | None) -> str:
    """The command to type next, with the same `--url` as the current command."""
    return shell.command(verb, run_id) + common.url_words(url)
