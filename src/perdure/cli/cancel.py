"""`perdure cancel`: ask a run to stop."""

from __future__ import annotations

import asyncio

import click

from perdure.cli import common
from perdure.cli.driving import os_user
from perdure.cli.target import resume_command
from perdure.settings import Settings
from perdure.store.api import RunRow


@click.command("cancel")
@common.run_argument
@click.option("--reason", metavar="TEXT", help="Why, for whoever reads the journal later.")
@click.option("--by", metavar="WHO", help="Who asks. Default: the user of this process.")
@common.url_option
@common.json_option
def command(run_id: str, reason: str | None, by: str | None, url: str | None, as_json: bool) -> None:
    """Ask RUN to stop. Its agent is cancelled at its next step and may still clean up; a call that has begun is not undone."""
    settings = common.settings_with(url=url)
    common.require_journal(settings.url)
    row = asyncio.run(_cancel(settings, run_id, by or os_user(), reason))
    if as_json:
        common.out_json({"run_id": run_id, "status": row.status})
    elif row.holder is not None:
        common.out(f"run {run_id}: the worker that holds it has been asked to cancel it")
    elif row.status == "cancelled":
        common.out(f"run {run_id} is cancelled")
    else:
        common.out(f"run {run_id} will be cancelled when a worker takes it, or here: {resume_command(row, settings.url, url)}")


async def _cancel(settings: Settings, run_id: str, by: str, reason: str | None) -> RunRow:
    from perdure.app import Perdure

    async with Perdure(settings=settings) as app:
        await app.cancel(run_id, by=by, reason=reason)
        return await app.handle(run_id).status()
