"""`perdure pause`: stop a run at its next step, until the run is unpaused."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from perdure import shell
from perdure.cli import common
from perdure.cli.steering import by_option, speak, speaker

if TYPE_CHECKING:
    from perdure.app import Perdure
    from perdure.store.api import RunRow


@click.command("pause")
@common.run_argument
@click.option("--reason", metavar="TEXT", help="Why; a note for the journal.")
@by_option("Who asks.")
@common.url_option
@common.json_option
def command(run_id: str, reason: str | None, by: str | None, url: str | None, as_json: bool) -> None:
    """Pause RUN at its next step. Calls that are under way end first. Post to a paused run is kept."""
    settings = common.settings_with(url=url)

    async def pause(app: Perdure) -> tuple[bool, RunRow]:
        stood_still = (await app.handle(run_id).row()).status == "paused"
        await app.pause(run_id, by=speaker(by), reason=reason)
        return stood_still, await app.handle(run_id).row()

    stood_still, row = speak(settings, pause)
    if as_json:
        common.out_json({"run_id": run_id, "status": row.status})
        return
    on = shell.command("unpause", run_id) + common.url_words(url)
    if stood_still and row.status == "paused":
        # A second pause records nothing. If the user gave a reason, say that this reason is not recorded.
        kept = "; the first reason stays" if reason is not None else ""
        common.out(common.clean(f"run {run_id} is paused already{kept}; let it go on: {on}"))
    elif row.status == "paused":
        common.out(common.clean(f"run {run_id} is paused; let it go on: {on}"))
    else:
        common.out(common.clean(f"run {run_id}: the worker that holds it has been asked to pause it; let it go on: {on}"))
