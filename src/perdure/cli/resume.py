"""`perdure resume`: drive an existing run in this process, or adopt it for this code."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import click

from perdure import shell
from perdure.cli import common
from perdure.cli.adopt import adopt_one
from perdure.cli.driving import check_version, drive_or_take_over, finish, what_resuming_does
from perdure.cli.target import load_target, recorded_target, with_children, with_tools
from perdure.cli.who import os_user
from perdure.core.events import RunUnpaused, Terminal
from perdure.core.identity import undone_by
from perdure.engine.api import Reading
from perdure.errors import Conflict, InvalidInput, StoreCorrupt
from perdure.inspect.view import begins_later, require
from perdure.logs import log_to_stderr
from perdure.settings import Settings
from perdure.store.api import FINISHED, RunRow

if TYPE_CHECKING:
    from perdure.agent import Agent
    from perdure.app import Perdure


@click.command("resume")
@common.run_argument
@click.argument("target", metavar="[TARGET]", required=False)
@click.option("--tools", metavar="FILE.py", help="If TARGET is a plan: the file with its tools.")
@click.option("--adopt", is_flag=True, help="Only record that this code continues a run of another version; drive nothing.")
@click.option("--now", is_flag=True, help="Begin a run whose time to begin has not come.")
@click.option("--no-wait", is_flag=True, help="Exit with code 3 at any wait, also for timers and retries.")
@common.url_option
@common.json_option
def command(
    run_id: str, target: str | None, tools: str | None, adopt: bool, now: bool, no_wait: bool, url: str | None, as_json: bool
) -> int:
    """Drive RUN in this process until it ends, even if it needs attention. If RUN has ended, print its result.

    Without TARGET the recorded code of the run is used. The file of this code must be your own file below this folder
    or beside the database, it must declare the agent, and no other user may be able to write to it or to its folder.
    """
    settings = common.settings_with(url=url)
    log_to_stderr("", logging.WARNING)
    with common.existing_runs(url) as store:
        row = require(store, run_id)
        row.check_live()
        _check_not_ended(store, row)
        where = None if row.status in FINISHED else _where(store, row, target, tools, settings, url)
    # Load the target before asyncio.run: the import of a module may run a loop.
    agents = [] if where is None else with_children([load_target(where, tools).agent])
    given = with_tools(target, tools)
    return asyncio.run(_resume(settings, row, agents, given, adopt=adopt, now=now, wait=not no_wait, url=url, as_json=as_json))


def _check_not_ended(store: Reading, row: RunRow) -> None:
    """StoreCorrupt if the journal has the end of the run and the row does not: then the row was edited."""
    last = store.read(row.run_id, after=row.seq - 1)
    if row.status not in FINISHED and last and isinstance(last[-1].body, Terminal):
        raise StoreCorrupt(
            f"run {row.run_id} has ended (event {last[-1].seq}, {last[-1].type}), and its row says {row.status}: the row was edited; "
            "nothing was written",
            hint=f"write the row again from the journal: {shell.command('verify', row.run_id)} --repair",
        )


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
    settings: Settings,
    row: RunRow,
    agents: list[Agent[Any, Any]],
    given: str,
    *,
    adopt: bool,
    now: bool,
    wait: bool,
    url: str | None,
    as_json: bool,
) -> int:
    from perdure.app import Perdure

    run_id = row.run_id
    async with Perdure(agents=agents, settings=settings) as app:
        if row.status in FINISHED:
            return finish(app, row, as_json=as_json, url=url)  # reading a result needs no code
        if adopt:
            return await adopt_one(app, row, given, by=os_user(), note="perdure resume --adopt", dry_run=False, url=url, as_json=as_json)
        if row.status == "paused" or (begins_later(row, common.now_at(app.reading)) and not now):
            return finish(app, row, as_json=as_json, url=url)  # code 3: the run waits, and the line says for what
        await check_version(app, row, given)
        row.check_not_restored()  # `resume` lets a run go on that needs attention; but not one whose effects are unknown
        if row.status == "needs_attention":
            await app.unpause(run_id, by=os_user(), note="perdure resume")
        if begins_later(row, common.now_at(app.reading)):
            await _record_early(app, run_id)
        await what_resuming_does(app, row)
        return finish(app, await drive_or_take_over(app, run_id, wait=wait), as_json=as_json, url=url)


async def _record_early(app: Perdure, run_id: str) -> None:
    """Record who lets the run begin before its time. The next claim begins the run."""
    try:
        await app.engine.post(run_id, RunUnpaused(by=os_user(), note="perdure resume --now", early=True))
    except Conflict:
        pass  # the run has begun meanwhile
