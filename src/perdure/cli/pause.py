"""`perdure pause`: stop a run at its next step, until the run is unpaused; one run, or all of a query."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from perdure import shell
from perdure.cli import common
from perdure.cli.bulk import Bulk, BulkOrder, BulkVerb, Done, go, is_for_many, many_options
from perdure.cli.steering import speak, speaker
from perdure.core.query import UNFINISHED
from perdure.store.api import RunRow

if TYPE_CHECKING:
    from perdure.app import Perdure


class Pausing(BulkVerb):
    verb, question, did, could = "pause", "pause", "paused, or will be at their next step", "can be paused"
    statuses = tuple(status for status in UNFINISHED if status not in ("paused", "cancelling", "needs_attention"))
    rests = False  # runs go on until they are paused

    def __init__(self, reason: str | None) -> None:
        self._reason = reason

    def given(self) -> dict[str, Any]:
        return {"reason": self._reason}

    async def act(self, bulk: Bulk, row: RunRow) -> Done:
        app = await bulk.app()
        if not bulk.order.dry_run:
            await app.pause(row.run_id, by=bulk.order.by, reason=self._reason)
        return Done({"before": row.status})


@click.command("pause")
@common.optional_run_argument
@click.option("--reason", metavar="TEXT", help="Why; a note for the journal.")
@many_options("Instead of RUN: all runs that match and can be paused.", "Who asks.")
def command(
    run_id: str | None,
    reason: str | None,
    where: str | None,
    limit: int | None,
    batch: str | None,
    dry_run: bool,
    yes: bool,
    by: str | None,
    url: str | None,
    as_json: bool,
) -> int:
    """Pause RUN at its next step. Calls that are under way end first. Post to a paused run is kept."""
    settings = common.settings_with(url=url)
    order = BulkOrder(speaker(by), url, as_json, yes, dry_run, where, batch, limit)
    if is_for_many("pause", run_id, order):
        return go(settings, Pausing(reason), order)
    assert run_id is not None

    async def pause(app: Perdure) -> tuple[bool, RunRow]:
        stood_still = (await app.handle(run_id).row()).status == "paused"
        await app.pause(run_id, by=speaker(by), reason=reason)
        return stood_still, await app.handle(run_id).row()

    stood_still, row = speak(settings, pause)
    if as_json:
        common.out_json({"run_id": run_id, "status": row.status})
        return common.SUCCEEDED
    on = shell.command("unpause", run_id) + common.url_words(url)
    if stood_still and row.status == "paused":
        # A second pause records nothing. If the user gave a reason, say that this reason is not recorded.
        kept = "; the first reason stays" if reason is not None else ""
        common.out(common.clean(f"run {run_id} is paused already{kept}; let it go on: {on}"))
    elif row.status == "paused":
        common.out(common.clean(f"run {run_id} is paused; let it go on: {on}"))
    else:
        common.out(common.clean(f"run {run_id}: the worker that holds it has been asked to pause it; let it go on: {on}"))
    return common.SUCCEEDED
