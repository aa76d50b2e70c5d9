"""`perdure approvals`: the approvals that wait for a decision."""

from __future__ import annotations

import click

from perdure.cli import common
from perdure.cli.inbox import record, show
from perdure.inspect.view import require
from perdure.store.api import ApprovalFilter


@click.command("approvals")
@click.option("--all", "settled_too", is_flag=True, help="Also approvals that are settled.")
@click.option("--tenant", metavar="NAME", help="Only approvals of this tenant.")
@click.option("--run", "run_id", metavar="RUN", help="Only approvals of this run.")
@click.option("--limit", type=click.IntRange(min=1, max=1_000_000), default=50, show_default=True, metavar="N", help="At most N approvals.")
@common.url_option
@common.json_option
def command(settled_too: bool, tenant: str | None, run_id: str | None, limit: int, url: str | None, as_json: bool) -> None:
    """Approvals that wait for a decision; those that expire first come first.

    The proposal is shown exactly as it was recorded. `perdure approve ID` approves exactly this proposal.
    """
    now = common.now_us()
    with common.existing_runs(url) as store:
        if run_id is not None:
            require(store, run_id)
        rows = store.approvals(ApprovalFilter(None if settled_too else "pending", tenant, run_id, limit + 1))
        for place, row in enumerate(rows[:limit]):
            if as_json:
                common.out_json(record(store, row))
                continue
            if place:
                common.out()
            show(store, row, now, url)
    if not rows and not as_json:
        common.note("no approvals" + (" that match" if tenant or run_id else "") + ("" if settled_too else " are pending"))
    if len(rows) > limit and not as_json:
        common.note(f"the first {limit} are shown; more: --limit {limit * 10}")
