"""`perdure costs`: the cost of runs, by agent, tenant, model, day and more."""

from __future__ import annotations

from typing import Any, cast

import click
import msgspec

from perdure.cli import common
from perdure.cli.times import parse_past
from perdure.inspect.retention import pruned_runs
from perdure.inspect.text import money, plural, span
from perdure.store.api import ONE_GROUP_EACH, CostRow

GROUPS = ("agent", "tenant", "model", "day", "run", "root", "tool")


@click.command("costs")
@click.option(
    "--by",
    type=click.Choice(GROUPS),
    default="agent",
    show_default=True,
    help="How to group the sums; root: each started run with its children and its undo.",
)
@click.option("--since", metavar="T", help="Only from then on: an ISO time (UTC if it names no zone), or 15m, 2h, 1d ago.")
@click.option("--tenant", metavar="NAME", help="Only runs of this tenant.")
@common.url_option
@common.json_option
def command(by: str, since: str | None, tenant: str | None, url: str | None, as_json: bool) -> None:
    """Calls, time, tokens and money, the most expensive first. Counted from the journals, so a replay adds nothing.

    `time` is the time in calls. `wall` is the time from the beginning of the runs to their last event. `waiting` is
    the part of `wall` in which no worker held the runs.
    """
    after = 0 if since is None else parse_past(since, common.now_us(), "--since")
    with common.existing_runs(url) as store:
        rows = store.costs(cast(Any, by), since=after, tenant=tenant)
        pruned = pruned_runs(store)
    if pruned:
        common.note(f"without {plural(pruned, 'run that was', 'runs that were')} pruned: their costs were deleted with their journals")
    if as_json:
        for row in rows:
            common.out_json({"by": by, **msgspec.to_builtins(row)})
        return
    if not rows:
        common.note("no calls" + (" that match" if since or tenant else " yet"))
        return
    headers = (by, "runs", "calls", "time", "wall", "waiting", "tokens in", "out", "cached", "cost", "lost")
    lines = [headers, *map(_cells, rows), _total(rows, by)]
    if by not in ONE_GROUP_EACH:
        # Leave out `wall` and `waiting`: a run can be in several of these groups.
        lines = [(*line[:4], *line[6:]) for line in lines]
    lost = sum(row.lost for row in rows)
    if not lost:
        lines = [line[:-1] for line in lines]  # leave out the column `lost`: all its values are 0
    common.table(lines[0], lines[1:])
    if lost:
        common.note(f"{plural(lost, 'request')} to models lost with a worker: each counts what was reserved for it, 0 without max_tokens")


def _cells(row: CostRow) -> tuple[str, ...]:
    return (row.group or "–", f"{row.runs:,}", *_sums(row))


def _total(rows: list[CostRow], by: str) -> tuple[str, ...]:
    summed = {name: sum(getattr(row, name) for row in rows) for name in CostRow.__struct_fields__ if name != "group"}
    whole = CostRow(group="total", **summed)
    return ("total", f"{whole.runs:,}" if by in ONE_GROUP_EACH else "", *_sums(whole))


def _sums(row: CostRow) -> tuple[str, ...]:
    tokens = (f"{count:,}" for count in (row.tokens_in, row.tokens_out, row.tokens_cached))
    return (f"{row.calls:,}", span(row.busy_us), span(row.wall_us), span(row.waiting_us), *tokens, money(row.usd_micros), f"{row.lost:,}")
