"""`perdure unpause`: let a run continue, and raise its budget if the user asks for this; one run, or all of a query."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click
import msgspec

from perdure.cli import common
from perdure.cli.bulk import Bulk, BulkOrder, BulkVerb, Done, go, is_for_many, many_options
from perdure.cli.steering import add_options, check_can_go_on, speak, speaker, who_goes_on
from perdure.core.budget import Budget
from perdure.core.query import Term
from perdure.inspect.text import plural
from perdure.store.api import RunRow

if TYPE_CHECKING:
    from perdure.app import Perdure


class Unpausing(BulkVerb):
    verb, question, did, could = "unpause", "unpause", "may go on", "can go on"
    then = "a worker goes on with them: perdure worker TARGET, if none serves them"
    statuses, usual = ("paused", "needs_attention"), ("paused",)

    def __init__(self, note: str | None, add: Budget | None) -> None:
        self._note, self._add = note, add

    def given(self) -> dict[str, Any]:
        return {"note": self._note, "add": None if self._add is None else msgspec.to_builtins(self._add.limits)}

    def leaves_out(self, row: RunRow, *, named: bool) -> str | None:
        terms = () if self.query is None else self.query.terms
        if row.attention == "restored" and Term("attention", values=("restored",)) not in terms:
            return "restored from a backup; what they did since is unknown: select them with attention:restored"
        return "specimens, which are never driven" if row.specimen is not None else None

    async def act(self, bulk: Bulk, row: RunRow) -> Done:
        app = await bulk.app()
        if row.status == "needs_attention":
            check_can_go_on(row, await app.handle(row.run_id).state(), self._add)
        if not bulk.order.dry_run:
            await app.unpause(row.run_id, by=bulk.order.by, note=self._note, add=self._add)
        return Done({"before": row.status})


@click.command("unpause")
@common.optional_run_argument
@click.option("--note", metavar="TEXT", help="A note for the journal.")
@add_options
@many_options("Instead of RUN: all paused runs that match (status:needs_attention: these instead).")
def command(
    run_id: str | None,
    note: str | None,
    add: Budget | None,
    where: str | None,
    limit: int | None,
    batch: str | None,
    dry_run: bool,
    yes: bool,
    by: str | None,
    url: str | None,
    as_json: bool,
) -> int:
    """Continue a run that is paused or needs attention.

    The --add options raise the budget that RUN has used up, its own or a parent's. Every run that this budget stopped
    continues.
    """
    settings = common.settings_with(url=url)
    order = BulkOrder(speaker(by), url, as_json, yes, dry_run, where, batch, limit)
    if is_for_many("unpause", run_id, order):
        return go(settings, Unpausing(note, add), order)
    assert run_id is not None

    async def continue_run(app: Perdure) -> tuple[list[str], RunRow, str]:
        going_on = await app.unpause(run_id, by=speaker(by), note=note, add=add)
        row = await app.handle(run_id).row()
        return going_on, row, who_goes_on(app.reading, row, settings, url)

    going_on, row, then = speak(settings, continue_run)
    if as_json:
        common.out_json({"run_id": run_id, "status": row.status, "going_on": going_on})
        return common.SUCCEEDED
    others = len([one for one in going_on if one != run_id])
    added = "has more to spend, and " if add is not None else ""
    also = f", and {plural(others, 'other run')} with it" if others else ""
    if run_id in going_on:
        common.out(common.clean(f"run {run_id} {added}may go on{also}; {then}"))
    else:
        common.out(common.clean(f"run {run_id} has more to spend{also}; {then}"))
    return common.SUCCEEDED
