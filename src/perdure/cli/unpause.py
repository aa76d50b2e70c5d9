"""`perdure unpause`: let a run continue, and raise its budget if the user asks for this."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from perdure.cli import common
from perdure.cli.steering import add_options, by_option, speak, speaker, who_goes_on
from perdure.core.budget import Budget
from perdure.inspect.text import plural

if TYPE_CHECKING:
    from perdure.app import Perdure
    from perdure.store.api import RunRow


@click.command("unpause")
@common.run_argument
@click.option("--note", metavar="TEXT", help="A note for the journal.")
@add_options
@by_option("Who says so.")
@common.url_option
@common.json_option
def command(
    run_id: str,
    note: str | None,
    add: Budget | None,
    by: str | None,
    url: str | None,
    as_json: bool,
) -> None:
    """Continue a run that is paused or needs attention.

    The --add options raise the budget that RUN has used up, its own or a parent's. Every run that this budget stopped
    continues.
    """
    settings = common.settings_with(url=url)

    async def continue_run(app: Perdure) -> tuple[list[str], RunRow, str]:
        going_on = await app.unpause(run_id, by=speaker(by), note=note, add=add)
        row = await app.handle(run_id).row()
        return going_on, row, who_goes_on(app.reading, row, settings, url)

    going_on, row, then = speak(settings, continue_run)
    if as_json:
        common.out_json({"run_id": run_id, "status": row.status, "going_on": going_on})
        return
    others = len([one for one in going_on if one != run_id])
    added = "has more to spend, and " if add is not None else ""
    also = f", and {plural(others, 'other run')} with it" if others else ""
    if run_id in going_on:
        common.out(common.clean(f"run {run_id} {added}may go on{also}; {then}"))
    else:
        common.out(common.clean(f"run {run_id} has more to spend{also}; {then}"))
