"""`perdure rewind`: let a run go on from an earlier event of its journal."""

from __future__ import annotations

import asyncio
import logging

import click

from perdure.cli import common
from perdure.cli.bulk import asking_options
from perdure.cli.reopening import Order, reopen_one
from perdure.cli.retry import agents_of, reopening_options
from perdure.cli.steering import speaker
from perdure.cli.target import with_tools
from perdure.core.budget import Budget
from perdure.inspect.view import require
from perdure.logs import log_to_stderr


@click.command("rewind")
@common.run_argument
@click.argument("target", metavar="[TARGET]", required=False)
@click.option("--to", type=click.IntRange(min=1), required=True, metavar="SEQ", help="The last event that the agent keeps.")
@reopening_options
@asking_options("Who says so.")
def command(
    run_id: str,
    target: str | None,
    to: int,
    tools: str | None,
    reason: str | None,
    fresh: bool,
    add: Budget | None,
    dry_run: bool,
    yes: bool,
    by: str | None,
    url: str | None,
    as_json: bool,
) -> int:
    """Let RUN go on from event SEQ. RUN must not be running, and must not have succeeded.

    No effect happens a second time: if the agent makes a call again (the same tool with the same arguments), its
    recorded result is used. The effects of calls that the agent does not make again stay. `perdure events RUN` shows
    the events. Without TARGET the recorded code of the run is used, as in `perdure resume`.
    """
    settings = common.settings_with(url=url)
    log_to_stderr("", logging.WARNING)
    order = Order(speaker(by), reason, fresh, url, as_json, yes, dry_run, with_tools(target, tools), add)
    with common.existing_runs(url) as store:
        row = require(store, run_id)
        agents = agents_of(store, row, target, tools, settings, "rewind", f" --to {to}{common.url_words(url)}")

    async def rewind() -> int:
        from perdure.app import Perdure

        async with Perdure(agents=agents, settings=settings) as app:
            return await reopen_one(app, run_id, to, order)

    return asyncio.run(rewind())
