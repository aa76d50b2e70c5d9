"""`perdure events`: the journal of a run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

import click

from perdure.cli import common
from perdure.core.events import Event
from perdure.engine.api import Reading
from perdure.inspect.branches import Reopening, Superseded, reopenings
from perdure.inspect.text import iso, progress_words
from perdure.inspect.timeline import Timeline
from perdure.inspect.view import loader, require
from perdure.store.api import FINISHED, ProgressRow

POLL_S = 0.25
PAGE = 500


@click.command("events")
@common.run_argument
@click.option("--follow", is_flag=True, help="Also print new events, and the progress of calls under way, until the run ends.")
@click.option("-n", "--last", type=click.IntRange(min=0), metavar="N", help="Only the last N events.")
@click.option("--all", "whole", is_flag=True, help=f"All events on a terminal, too. Without it, a terminal shows the last {common.SHOWN}.")
@common.url_option
@common.json_option
def command(run_id: str, follow: bool, last: int | None, whole: bool, url: str | None, as_json: bool) -> None:
    """The journal of RUN, one line per event.

    If the run was reopened, superseded events are marked, and on a terminal they are struck through.
    """
    if last is not None and whole:
        raise click.UsageError("--last and --all exclude each other")
    with common.existing_runs(url) as store, _waiting(store, run_id) as wait:
        events = require(store, run_id).seq
        first = 1 if whole else max(events - (common.most_shown() if last is None else last), 0) + 1
        timeline = Timeline(run_id, loader(store), Superseded(_reopenings(store, run_id, events)))
        if first > 1 and last is None:
            common.note(f"perdure: the last {common.SHOWN} of {events:,} events; all of them: --all")
        for event, hash_ in _events(store, run_id, wait if follow else None, hashed=as_json):
            if isinstance(event, ProgressRow):
                if as_json:
                    continue  # with --json, every line is an event
                what = f"call {event.call} {timeline.names.calls.get(event.call, '')} reports {progress_words(event.progress)}"
                common.out(common.clean(f"{'':>5}  {iso(event.at)[:23]}Z  {what}"))
            elif event.seq < first:
                timeline.learn(event)
                continue
            elif as_json:
                common.out_json(timeline.record(event, hash_))
            else:
                line = common.clean(f"{event.seq:>5}  {iso(event.ts)[:23]}Z  {timeline.say(event)}")
                by = timeline.superseded.by(event.seq)
                common.out(line if by is None else common.struck(line, f"  [superseded by event {by}]"))
            if follow:
                common.flush()


def _reopenings(store: Reading, run_id: str, seq: int) -> list[Reopening]:
    """The reopenings up to event `seq`.

    The journal is read once for this, page by page, before anything is printed.
    """
    found: list[Reopening] = []
    after = 0
    while after < seq:
        page = store.read(run_id, after, PAGE)
        if not page:
            break  # the run was pruned since its row was read
        found += [one for one in reopenings(page) if one.seq <= seq]
        after = page[-1].seq
    return found


def _events(
    store: Reading, run_id: str, wait: Callable[[int], None] | None, *, hashed: bool
) -> Iterator[tuple[Event | ProgressRow, bytes]]:
    """All events, with their hashes if `hashed`. With `wait`, also the later events, until the run has ended.

    With `wait`, also each new progress of a call under way. Progress has no hash.
    """
    seen, told = 0, frozenset[ProgressRow]()
    while True:
        version = store.version()
        row = require(store, run_id)
        while seen < row.seq:
            # Read page by page, so that the whole journal is never in memory.
            events = store.read(run_id, seen, PAGE)
            if not events:
                require(store, run_id)  # NotFound, if the run was pruned since its row was read
                return
            hashes = store.hashes(run_id, seen, events[-1].seq - seen) if hashed else [b""] * len(events)
            if len(hashes) < len(events):
                continue  # events before a checkpoint were removed between the two reads
            for event, hash_ in zip(events, hashes, strict=True):
                seen = event.seq
                yield event, hash_
        # The row was read before the journal. So if the row says that the run is finished, this loop has yielded all
        # events.
        if wait is None or row.status in FINISHED:
            return
        reported = frozenset(store.progress([run_id]))
        yield from ((one, b"") for one in sorted(reported - told, key=lambda one: one.call))
        told = reported
        wait(version)


@contextmanager
def _waiting(store: Reading, run_id: str) -> Iterator[Callable[[int], None]]:
    """A function that waits until the run may have a new event.

    Its argument is the store's version before the last read.
    """
    hinted, root = threading.Event(), run_id.partition("/")[0]
    stop: Callable[[], None] | None = None

    def moved(run_ids: Collection[str] | None) -> None:
        if run_ids is None or any(other.partition("/")[0] == root for other in run_ids):
            hinted.set()

    def wait(version: int) -> None:
        nonlocal stop
        if stop is None:
            # The watch begins only here, because a run that has ended needs no watch, and most runs have ended. Return
            # at once, so that the caller reads the journal again: an event may have come before the watch began.
            stop = store.watch(moved)
            return
        while not hinted.wait(POLL_S) and store.version() == version:
            pass
        hinted.clear()

    try:
        yield wait
    finally:
        if stop is not None:
            stop()
