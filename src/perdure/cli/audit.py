"""`perdure audit`: what happened in all runs, or in one, as JSON lines."""

from __future__ import annotations

import difflib
import time
from itertools import chain
from typing import get_args

import click

from perdure.cli import common
from perdure.cli.times import parse_past
from perdure.core.events import AnyBody
from perdure.errors import InvalidInput
from perdure.inspect.audit import Audit, AuditFilter
from perdure.inspect.retention import PRUNED, PrunedRuns
from perdure.inspect.schedules import TYPES as SCHEDULE_TYPES
from perdure.inspect.schedules import ScheduleLines
from perdure.inspect.view import require

POLL_S = 0.25
TYPES = sorted([*(str(kind.__struct_config__.tag) for kind in get_args(AnyBody)), PRUNED, *SCHEDULE_TYPES])


class _EventType(click.Choice[str]):
    """A type of events. The list is long, so an error names only the closest types."""

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value not in TYPES:
            near = difflib.get_close_matches(value, TYPES, n=3) or [name for name in TYPES if value and value in name][:3]
            meant = f"; close to it: {', '.join(near)}" if near else ""
            raise InvalidInput(f"--type: there is no type of events {value!r:.60}{meant}; perdure audit --help ends with all types")
        return value


@click.command("audit", epilog=f"The types of events: {', '.join(TYPES)}.")
@common.optional_run_argument
@click.option("--tenant", metavar="NAME", help="Only runs of this tenant.")
@click.option("--agent", metavar="NAME", help="Only runs of this agent.")
@click.option("--type", "types", metavar="TYPE", multiple=True, type=_EventType(TYPES), help="Only events of this type; may be repeated.")
@click.option("--since", metavar="T", help="Only events from then on: an ISO time (UTC if it names no zone), or 15m, 2h, 1d ago.")
@click.option("--until", metavar="T", help="Only events up to then: a time as for --since.")
@click.option("--payloads", is_flag=True, help="Also print arguments, results, input and output, which may be secret.")
@click.option("--follow", is_flag=True, help="Also print new events, until interrupted.")
@common.url_option
@common.json_option
def command(
    run_id: str | None,
    tenant: str | None,
    agent: str | None,
    types: tuple[str, ...],
    since: str | None,
    until: str | None,
    payloads: bool,
    follow: bool,
    url: str | None,
    as_json: bool,
) -> None:
    """Every event of RUN, or of every run and every schedule, as one JSON object per line, with or without --json."""
    if follow and until is not None:
        raise InvalidInput("--follow goes on with what happens, and --until ends before; use one of them")
    now = common.now_us()
    start = 0 if since is None else parse_since(since, now)
    end = None if until is None else parse_past(until, now, "--until")
    with common.existing_runs(url) as store:
        if run_id is not None and store.tombstone(run_id) is None:
            require(store, run_id)
        wanted = AuditFilter(start, end, run_id, tenant, agent, frozenset(types))
        audit, pruned, schedules = Audit(store, wanted, payloads=payloads), PrunedRuns(store, wanted), ScheduleLines(store, wanted)
        while True:
            version, begun_s = store.version(), time.monotonic()
            for line in chain(audit.more(), pruned.more(), schedules.more()):
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
