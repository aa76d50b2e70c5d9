"""`perdure resume`: drive an existing run in this process."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import click

from perdure import shell
from perdure.cli import common
from perdure.cli.driving import drive, finish, log_to_stderr
from perdure.cli.target import load_target, recorded_target, with_children
from perdure.cli.who import os_user
from perdure.core.identity import undone_by
from perdure.engine.api import Reading
from perdure.errors import InvalidInput
from perdure.settings import Settings
from perdure.store.api import FINISHED, RunRow

if TYPE_CHECKING:
    from perdure.agent import Agent
    from perdure.app import Perdure


@click.command("resume")
@common.run_argument
@click.argument("target", metavar="[TARGET]", required=False)
@click.option("--tools", metavar="FILE.py", help="If TARGET is a plan: the file with its tools.")
@click.option("--adopt", is_flag=True, help="Let this code continue a run of another version; the journal records this.")
@click.option("--no-wait", is_flag=True, help="Exit with code 3 at any wait, also for timers and retries.")
@common.url_option
@common.json_option
def command(run_id: str, target: str | None, tools: str | None, adopt: bool, no_wait: bool, url: str | None, as_json: bool) -> int:
    """Drive RUN here until it ends, also if it needs attention. For a run that has ended, print the result.

    Without TARGET the code recorded with the run is used, if it is your own file below this folder or beside the
    database, declares the agent, and no other user can write to it or to its folder.
    """
    settings = common.settings_with(url=url)
    log_to_stderr(logging.WARNING)
    from perdure.inspect.view import require

    with common.existing_runs(url) as store:
        row = require(store, run_id)
        where = None if row.status in FINISHED else _where(store, row, target, tools, settings, url)
    # Load the target before asyncio.run: the import of a module may run a loop.
    agents = [] if where is None else with_children([load_target(where, tools).agent])
    return asyncio.run(_resume(settings, row, agents, adopt=adopt, wait=not no_wait, url=url, as_json=as_json))


def _where(store: Reading, row: RunRow, target: str | None, tools: str | None, settings: Settings, url: str | None) -> str:
    """The TARGET that the user typed, or the target that the run has recorded."""
    run_id = row.run_id
    if (undone := undone_by(run_id)) is not None:
        # An undo has no target: `perdure undo` builds the agent of the undo from the run that is undone.
        raise InvalidInput(f"run {run_id} is the undo of run {undone}; continue it with: {shell.command('undo', undone)}")
    if tools is not None and target is None:
        whole = f"{shell.command('resume', run_id)} PLAN.toml --tools {shell.quote(tools)}"
        raise InvalidInput(f"--tools {tools} goes with the plan that they belong to: {whole}")
    return target or recorded_target(store, row, settings.url, options=common.url_words(url))


async def _resume(
    settings: Settings, row: RunRow, agents: list[Agent[Any, Any]], *, adopt: bool, wait: bool, url: str | None, as_json: bool
) -> int:
    from perdure.app import Perdure

    run_id = row.run_id
    async with Perdure(agents=agents, settings=settings) as app:
        if row.status in FINISHED:
            return finish(app, row, as_json=as_json, url=url)  # reading a result needs no code
        if adopt:
            await _adopt(app, row)
        if row.status == "needs_attention":
            await app.unpause(run_id, by=os_user(), note="perdure resume")
        return finish(app, await drive(app, run_id, wait=wait), as_json=as_json, url=url)


async def _adopt(app: Perdure, row: RunRow) -> None:
    """Adopt the run and the unfinished runs below it, except the runs whose version this process has."""
    for one in (row, *app.reading.family(row.run_id)):
        here = [served.version for served in app.versions if served.agent == one.agent]
        if here and one.version not in here:
            await app.adopt(one.run_id, by=os_user(), note="perdure resume --adopt")
