"""`perdure audit`: what happened in all runs, as JSON lines."""

from __future__ import annotations

import time
from itertools import chain

import click

from perdure.cli import common
from perdure.cli.times import parse_past
from perdure.inspect.audit import Audit
from perdure.inspect.retention import PrunedRuns

POLL_S = 0.25


@click.command("audit")
@click.option("--since", metavar="T", help="Only events from then on: an ISO time (UTC if it names no zone), or 15m, 2h, 1d ago.")
@click.option("--follow", is_flag=True, help="Also print new events, until interrupted.")
@common.url_option
@common.json_option
def command(since: str | None, follow: bool, url: str | None, as_json: bool) -> None:
    """Every event of every run as one JSON object per line, with or without --json."""
    start = 0 if since is None else parse_since(since, common.now_us())
    with common.existing_runs(url) as store:
        audit, buried = Audit(store, start), PrunedRuns(store, start)
        while True:
            version, begun_s = store.version(), time.monotonic()
            for line in chain(audit.more(), buried.more()):
                common.out_json(line)
            if not follow:
                return
            common.flush()
            # If there are very many unfinished runs, one pass takes long. A pass must use at most a fifth of the time.
            time.sleep(max(POLL_S, 4 * (time.monotonic() - begun_s)))
            while store.version() == version:
                time.sleep(POLL_S)


def parse_since(text: str, now: int) -> int:
    """The time that `--since` names, in µs since 1970."""
    return parse_past(text, now, "--since")
