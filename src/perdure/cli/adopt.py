"""`perdure adopt`: let the code of another version go on with unfinished runs; one run, several, or all of a query."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from perdure import shell
from perdure.cli import common
from perdure.cli.bulk import Bulk, BulkOrder, Done, Skip, go, many_options
from perdure.cli.reopening import Order
from perdure.cli.retry import WithCode, split
from perdure.cli.steering import speaker
from perdure.cli.target import load_target, recorded_target, with_children, with_tools
from perdure.core.query import UNFINISHED
from perdure.engine.api import Reading
from perdure.errors import Conflict, InvalidInput, UnknownAgent
from perdure.inspect.text import plural
from perdure.inspect.view import begins_later, require
from perdure.logs import log_to_stderr
from perdure.settings import Settings
from perdure.store.api import FINISHED, NO_VERSION, RunRow

if TYPE_CHECKING:
    from perdure.agent import Agent
    from perdure.app import Perdure


@click.command("adopt")
@click.argument("words", nargs=-1, metavar="[RUN…] [TARGET]", shell_complete=common.complete_run)
@click.option("--version", metavar="V", help="The version that goes on: refused if the code in TARGET has another one.")
@click.option("--tools", metavar="FILE.py", help="If TARGET is a plan: the file with its tools.")
@click.option("--note", metavar="TEXT", help="Why; a note for the journal.")
@many_options("Instead of RUNs: all unfinished runs that match.")
def command(
    words: tuple[str, ...],
    version: str | None,
    tools: str | None,
    note: str | None,
    where: str | None,
    limit: int | None,
    batch: str | None,
    dry_run: bool,
    yes: bool,
    by: str | None,
    url: str | None,
    as_json: bool,
) -> int:
    """Let the code in TARGET go on with unfinished runs of another version. Nothing is driven here.

    Each run is replayed with this code first. If the code asks for other calls than the journal has, nothing is written.
    A run of a ReAct agent keeps its conversation, and has the new instructions, tools, model and limits from its next
    turn on. A run that follows a plan keeps the steps that have begun, which must be the same in the new plan, and has
    the new ones from then on. Pending approvals and open calls stay, if their tools still fit. A run without a version
    needs no adoption: it takes that of the worker that begins it. A child has a version before it has begun, the one
    that its parent's code means. Without TARGET the code recorded with each run is used, as by `perdure resume`.
    """
    settings = common.settings_with(url=url)
    log_to_stderr("", logging.WARNING)
    with common.existing_runs(url) as store:
        run_ids, target = split(store, words, where is not None or batch is not None, "adopt")
        rows = [require(store, run_id) for run_id in run_ids]
        for row in rows:
            _check(row)
        order = Order(speaker(by), note, False, url, as_json, yes, dry_run, with_tools(target, tools))
        if len(rows) == 1 and limit is None:  # one run that is named needs no question
            words_of_code = target or recorded_target(store, rows[0], settings.url, "adopt", common.url_words(url))
            agents = with_children([load_target(words_of_code, tools).agent])
            return asyncio.run(_one(settings, rows[0], agents, version, order))
    many = BulkOrder(order.by, url, as_json, yes, dry_run, where, batch, limit, tuple(run_ids))
    return go(settings, Adopting(order, target, tools, version), many)


async def _one(settings: Settings, row: RunRow, agents: list[Agent[Any, Any]], version: str | None, order: Order) -> int:
    from perdure.app import Perdure

    async with Perdure(agents=agents, settings=settings) as app:
        if row.agent not in app.agents:
            raise UnknownAgent(f"run {row.run_id} belongs to agent {row.agent!r}, and the target has {', '.join(app.agents)}")
        _check_version(row, app.agents[row.agent], version)
        more: dict[str, Any] = {"dry_run": order.dry_run, "url": order.url, "as_json": order.as_json}
        return await adopt_one(app, row, order.given, by=order.by, note=order.reason, **more)


def _check_version(row: RunRow, code: Agent[Any, Any], version: str | None) -> None:
    if version not in (None, code.version):
        raise InvalidInput(f"run {row.run_id}: this code is version {code.version} of agent {row.agent}, not {version}")


async def adopt_one(
    app: Perdure, row: RunRow, given: str, *, by: str, note: str | None, dry_run: bool, url: str | None, as_json: bool
) -> int:
    """Adopt the run and the unfinished runs below it, except the runs whose version this process has.

    `given`: the TARGET that the user typed.
    """
    adopted = []
    for one in (row, *app.reading.family(row.run_id)):
        here = [served.version for served in app.versions if served.agent == one.agent]
        if here and one.version not in (NO_VERSION, *here) and one.status not in FINISHED:
            await app.adopt(one.run_id, by=by, note=note, dry_run=dry_run)
            adopted.append(one.run_id)
    after = await app.handle(row.run_id).row()
    version = app.agents[row.agent].version if row.run_id in adopted else after.version
    if as_json:
        common.out_json({"run_id": row.run_id, "status": after.status, "version": version, "adopted": adopted, "dry_run": dry_run})
        return common.SUCCEEDED
    others = len([one for one in adopted if one != row.run_id])
    also = f", and {plural(others, 'run')} below it" if others else ""
    if not version:
        said = f"run {row.run_id} has not begun, and takes the version of the worker that begins it: there is nothing to adopt"
    elif adopted and dry_run:
        common.out(common.clean(f"run {row.run_id} can go on with version {version}{also}; nothing was written"))
        return common.SUCCEEDED
    elif adopted:
        said = f"run {row.run_id} goes on with version {version}{also}; nothing of it has run yet"
    else:
        said = f"run {row.run_id} has version {version}, which this code is: there is nothing to adopt"
    early = "--now" if begins_later(after, common.now_at(app.reading)) else ""
    resume = " ".join(word for word in (shell.command("resume", row.run_id), given, early) if word) + common.url_words(url)
    common.out(common.clean(f"{said}; a worker that serves it goes on with it, or here: {resume}"))
    return common.SUCCEEDED


def _check(row: RunRow) -> None:
    row.check_live()
    if row.status in FINISHED:
        way_out = "" if row.status == "succeeded" else f": {shell.command('retry', row.run_id)} goes on with it, also with other code"
        raise Conflict(f"run {row.run_id} has ended ({row.status}) and is not adopted{way_out}")


class Adopting(WithCode):
    verb, question, did, could = "adopt", "let this code go on with", "adopted", "can be adopted"
    then = "a worker goes on with them: perdure worker TARGET, if none serves them"
    statuses = UNFINISHED
    instead = "; a run that failed goes on with perdure retry, also with other code"

    def __init__(self, order: Order, target: str | None, tools: str | None, version: str | None) -> None:
        super().__init__(order, target, tools)
        self._version = version

    def given(self) -> dict[str, Any]:
        return {**super().given(), "version": self._version}

    def named_rows(self, reading: Reading, run_ids: Sequence[str]) -> Iterator[RunRow]:
        """With a named run, the unfinished runs below it are adopted too."""
        for row in super().named_rows(reading, run_ids):
            yield row
            yield from (one for one in reading.family(row.run_id) if one.status not in FINISHED)

    def leaves_out(self, row: RunRow, *, named: bool) -> str | None:
        if row.version == NO_VERSION:
            return "runs without a version, which take that of the worker that begins them"
        here = [one.version for one in self.agents or () if one.name == row.agent]
        if row.version in here:
            return "runs of this version"
        if self.agents is not None and not here and row.parent is not None:
            return "children of agents that this code does not have"
        return super().leaves_out(row, named=False)

    async def act(self, bulk: Bulk, row: RunRow) -> Done:
        order, app = self.order, await self.app_for(bulk, row)
        code = app.agents[row.agent]
        if row.parent is None:
            _check_version(row, code, self._version)
        if code.version == row.version:
            raise Skip(f"version {code.version} is this code")
        await app.adopt(row.run_id, by=order.by, note=order.reason, dry_run=order.dry_run)
        can = f"run {row.run_id} ({row.status}): version {code.version} of {row.agent} can go on with it, after {row.version}"
        return Done({"before": row.version, "version": code.version}, [can])
