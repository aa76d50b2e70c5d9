"""`perdure events`: the journal of a run."""

from __future__ import annotations

import time
from collections.abc import Iterator

import click

from perdure.cli import common
from perdure.core.events import Event
from perdure.engine.api import Reading
from perdure.inspect.text import iso
from perdure.inspect.timeline import Timeline
from perdure.inspect.view import loader, require
from perdure.store.api import FINISHED

POLL_S = 0.05


@click.command("events")
@common.run_argument
@click.option("--follow", is_flag=True, help="Also print new events, until the run ends.")
@common.url_option
@common.json_option
def command(run_id: str, follow: bool, url: str | None, as_json: bool) -> None:
    """The journal of RUN, one line per event."""
    with common.existing_runs(url) as store:
        require(store, run_id)
        timeline = Timeline(run_id, loader(store))
        for event in _events(store, run_id, follow):
            if as_json:
                common.out_json(timeline.record(event, store.hash_at(run_id, event.seq)))
            else:
                common.out(common.clean(f"{event.seq:>5}  {iso(event.ts)[:23]}Z  {timeline.say(event)}"))
            if follow:
                common.flush()


def _events(store: Reading, run_id: str, follow: bool) -> Iterator[Event]:
    seen = 0
    while True:
        version = store.version()
        row = require(store, run_id)
        for event in store.read(run_id, seen):
            seen = event.seq
            yield event
        # The row was read before the journal. So if the row says that the run is finished, this loop has yielded all
        # events.
        if not follow or row.status in FINISHED:
            return
        while store.version() == version:
            time.sleep(POLL_S)
