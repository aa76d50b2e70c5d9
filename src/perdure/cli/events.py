"""`perdure events`: the journal of a run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

import click

from perdure.cli import common
from perdure.core.events import Event
from perdure.engine.api import Reading
from perdure.inspect.text import iso
from perdure.inspect.timeline import Timeline
from perdure.inspect.view import loader, require
from perdure.store.api import FINISHED

POLL_S = 0.25
PAGE = 500


@click.command("events")
@common.run_argument
@click.option("--follow", is_flag=True, help="Go on with what happens, until the run ends.")
@common.url_option
@common.json_option
def command(run_id: str, follow: bool, url: str | None, as_json: bool) -> None:
    """The journal of RUN, one line per event."""
    with common.existing_runs(url) as store, _waiting(store, run_id) as wait:
        require(store, run_id)
        timeline = Timeline(run_id, loader(store))
        for event in _events(store, run_id, wait if follow else None):
            if as_json:
                common.out_json(timeline.record(event, store.hash_at(run_id, event.seq)))
            else:
                common.out(common.clean(f"{event.seq:>5}  {iso(event.ts)[:23]}Z  {timeline.say(event)}"))
            if follow:
                common.flush()


def _events(store: Reading, run_id: str, wait: Callable[[int], None] | None) -> Iterator[Event]:
    """All events. With `wait`, also what comes later, until the run has ended."""
    seen = 0
    while True:
        version = store.version()
        row = require(store, run_id)
        while seen < row.seq:
            for event in store.read(run_id, seen, PAGE):
                seen = event.seq
                yield event
        # The row was read before the journal. So if the row says that the run is finished, this loop has yielded all
        # events.
        if wait is None or row.status in FINISHED:
            return
        wait(version)


@contextmanager
def _waiting(store: Reading, run_id: str) -> Iterator[Callable[[int], None]]:
    """A function that waits until the run may have a new event. It gets the store's version before the last look."""
    hinted, root = threading.Event(), run_id.partition("/")[0]
    stop: Callable[[], None] | None = None

    def moved(run_ids: Collection[str] | None) -> None:
        if run_ids is None or any(other.partition("/")[0] == root for other in run_ids):
            hinted.set()

    def wait(version: int) -> None:
        nonlocal stop
        if stop is None:
            # Only now, since most runs have ended. Look once more: an event may have come before this.
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
