"""`perdure retry`: let runs that have failed or were cancelled go on: one run, several, or all that match a query."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click
import msgspec

from perdure import shell
from perdure.cli import common
from perdure.cli.bulk import Bulk, BulkOrder, BulkVerb, Done, go, many_options
from perdure.cli.reopening import Order, check_goes_on, preview, record, reopen_one, reopened
from perdure.cli.steering import add_options, check_can_go_on, speaker, who_goes_on
from perdure.cli.target import load_target, load_targets, recorded_target, with_children, with_tools
from perdure.core.budget import Budget
from perdure.engine.api import Reading
from perdure.errors import Conflict, InvalidInput, UnknownAgent
from perdure.inspect.text import clip, limits_words
from perdure.inspect.view import read_run, require
from perdure.logs import log_to_stderr
from perdure.settings import Settings
from perdure.store.api import FINISHED, RunRow

if TYPE_CHECKING:
    from perdure.agent import Agent
    from perdure.app import Perdure

F = TypeVar("F", bound=Callable[..., Any])
_TARGET = re.compile(r".*\.(?:py|toml|json)(?::\w+)?\Z", re.DOTALL)


def reopening_options(function: F) -> F:
    """The options that `retry` and `rewind` share."""
    for option in reversed(
        (
            click.option("--tools", metavar="FILE.py", help="If TARGET is a plan: the file with its tools."),
            click.option("--reason", metavar="TEXT", help="Why; a note for the journal."),
            click.option("--fresh", is_flag=True, help="Make `read` calls and requests to models again, instead of using their results."),
            add_options,
        )
    ):
        function = cast(F, option(function))
    return function


@click.command("retry")
@click.argument("words", nargs=-1, metavar="[RUN…] [TARGET]", shell_complete=common.complete_run)
@reopening_options
@many_options("Instead of RUNs: all failed runs that match (status:cancelled or status:needs_attention: these instead).")
def command(
    words: tuple[str, ...],
    tools: str | None,
    reason: str | None,
    fresh: bool,
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
    """Let runs that have failed or were cancelled go on.

    Calls that failed are attempted again, by the rules of their effect class. Calls that have a result are not made
    again. If the agent itself failed, it takes its last step again, with the present code. A run that needs attention
    goes on as after `perdure unpause`. Without TARGET the recorded code of each run is used, as in `perdure resume`.
    """
    settings = common.settings_with(url=url)
    log_to_stderr("", logging.WARNING)
    with common.existing_runs(url) as store:
        run_ids, target = split(store, words, where is not None or batch is not None, "retry")
        order = Order(speaker(by), reason, fresh, url, as_json, yes, dry_run, with_tools(target, tools), add)
        if len(run_ids) == 1 and limit is None:
            row = require(store, run_ids[0])
            if row.status == "needs_attention":
                return asyncio.run(_unpause_one(settings, store, row, order))
            _check_ended(row)
            agents = agents_of(store, row, target, tools, settings, "retry", common.url_words(url))
            return asyncio.run(_one(settings, row.run_id, agents, order))
    many = BulkOrder(order.by, url, as_json, yes, dry_run, where, batch, limit, tuple(run_ids))
    return go(settings, Retrying(order, target, tools), many)


def split(store: Reading, words: tuple[str, ...], many: bool, verb: str) -> tuple[list[str], str | None]:
    """(runs, TARGET). `many`: the runs are those of a query.

    The last word is a TARGET if it names a file, or a module with a name, and is not the id of a run.
    """
    run_ids, target = list(dict.fromkeys(words)), None
    if run_ids and (many or len(run_ids) > 1):
        last = run_ids[-1]
        if _TARGET.match(last) or (":" in last and store.get(last) is None):
            target = run_ids.pop()
    if many and run_ids:
        raise InvalidInput(f"give the runs or --where, and not both: {run_ids[0]!r:.60} and --where")
    if not many and not run_ids:
        raise InvalidInput(
            f"name the runs to {verb}, or select them: perdure {verb} --where '{'status:failed ' if verb == 'retry' else ''}agent:NAME'"
        )
    return run_ids, target


def _check_ended(row: RunRow) -> None:
    """Conflict, with the way out, if the run has not ended, or is a rehearsal or a specimen."""
    row.check_live()
    way_out = {
        "queued": f"it is ready already: {shell.command('resume', row.run_id)}, or a worker goes on with it",
        "paused": f"let it go on: {shell.command('unpause', row.run_id)}",
        "running": f"a worker holds it: {shell.command('why', row.run_id)}",
    }
    if row.status not in FINISHED:
        back = f"to let it go on from an earlier event: {shell.command('rewind', row.run_id)} --to SEQ"
        raise Conflict(
            f"run {row.run_id} is {row.status.replace('_', ' ')}, and only a run that has failed or was cancelled is retried",
            hint=way_out.get(row.status, back),
        )


def agents_of(
    store: Reading, row: RunRow, target: str | None, tools: str | None, settings: Settings, verb: str, options: str
) -> list[Agent[Any, Any]]:
    """The code that continues the run: the TARGET that the user typed, or the recorded target of the run."""
    from perdure.reopen import check_reopens

    check_reopens(row)
    words = target or recorded_target(store, row, settings.url, verb, options)
    agents = with_children([load_target(words, tools).agent])
    if agents[0].name != row.agent:
        raise UnknownAgent(
            f"run {row.run_id} belongs to agent {row.agent!r}, but the target is agent {agents[0].name!r}; name the right agent"
        )
    return agents


async def _one(settings: Settings, run_id: str, agents: list[Agent[Any, Any]], order: Order) -> int:
    from perdure.app import Perdure

    async with Perdure(agents=agents, settings=settings) as app:
        return await reopen_one(app, run_id, None, order)


# -- a run that needs attention ---------------------------------------------------------------------------------------
def _added(order: Order) -> str:
    return "" if order.add is None else f"; added to the budget that it has used up: {limits_words(order.add.limits)}"


async def _unpause_one(settings: Settings, store: Reading, row: RunRow, order: Order) -> int:
    from perdure.app import Perdure

    row.check_not_restored()
    check_can_go_on(row, read_run(store, row.run_id).state, order.add)
    said = f"run {row.run_id} needs attention: {clip(row.error or row.waiting_for or '', 200)}; it goes on where it stands, as after perdure unpause"
    said += _added(order)
    if order.dry_run:
        if order.as_json:
            common.out_json({"run_id": row.run_id, "status": row.status, "dry_run": True})
        else:
            common.out(common.clean(said))
        return common.SUCCEEDED
    common.check_terminal("retry", yes=order.yes)
    common.note(common.clean(said))
    if not order.yes and not click.confirm(f"let run {row.run_id} go on?", err=True):
        common.fail("nothing was written")
    async with Perdure(settings=settings) as app:
        await app.unpause(row.run_id, by=order.by, note=order.reason, add=order.add)
        after = await app.handle(row.run_id).row()
        if order.as_json:
            common.out_json({"run_id": row.run_id, "status": after.status, "dry_run": False})
        else:
            common.out(common.clean(f"run {row.run_id} may go on; {who_goes_on(app.reading, after, settings, order.url)}"))
    return common.SUCCEEDED


# -- many runs --------------------------------------------------------------------------------------------------------
class WithCode(BulkVerb):
    """A verb that needs the code of the runs: the TARGET that the person typed, or the recorded target of each run."""

    def __init__(self, order: Order, target: str | None, tools: str | None) -> None:
        self.order = order
        # With a TARGET, all runs use its agents. Without it, each run uses its own recorded target.
        self.agents = None if target is None else with_children([one.agent for one in load_targets(target, tools)])
        self._loaded: dict[str, list[Agent[Any, Any]]] = {}

    def given(self) -> dict[str, Any]:
        return {"target": self.order.given, "reason": self.order.reason}

    async def app_for(self, bulk: Bulk, row: RunRow) -> Perdure:
        """An app with the code of this run. UnknownAgent if TARGET does not have its agent."""
        if self.agents is not None:
            if row.agent not in {agent.name for agent in self.agents}:
                names = ", ".join(sorted({agent.name for agent in self.agents}))
                raise UnknownAgent(f"run {row.run_id} belongs to agent {row.agent!r}, and the target has {names}")
            return await bulk.app("TARGET", self.agents)
        options = common.url_words(self.order.url)
        reading = (await bulk.app()).reading
        words = await asyncio.to_thread(recorded_target, reading, row, bulk.settings.url, self.verb, options)
        if words not in self._loaded:
            self._loaded[words] = with_children([load_target(words).agent])
        return await bulk.app(words, self._loaded[words])


class Retrying(WithCode):
    verb, question, did, could = "retry", "retry", "queued", "can be retried"
    then = "a worker goes on with them: perdure worker TARGET, if none serves them"
    statuses = ("failed", "cancelled", "needs_attention")
    usual = ("failed",)  # people cancel runs on purpose

    def given(self) -> dict[str, Any]:
        add = None if self.order.add is None else msgspec.to_builtins(self.order.add.limits)
        return {**super().given(), "fresh": self.order.fresh, "add": add}

    def leaves_out(self, row: RunRow, *, named: bool) -> str | None:
        if row.parent is not None and not named:
            return "children, which go on with their parents"
        return super().leaves_out(row, named=named)

    async def act(self, bulk: Bulk, row: RunRow) -> Done:
        order = self.order
        if row.status == "needs_attention":
            row.check_not_restored()
            app = await bulk.app()
            check_can_go_on(row, await app.handle(row.run_id).state(), order.add)
            if not order.dry_run:
                await app.unpause(row.run_id, by=order.by, note=order.reason, add=order.add)
            return Done({}, [f"run {row.run_id} needs attention, and goes on where it stands{_added(order)}"])
        app = await self.app_for(bulk, row)
        plan = await reopened(app, row.run_id, None, order, dry_run=True)
        if not order.dry_run:
            check_goes_on(plan)
            plan = await reopened(app, row.run_id, None, order, dry_run=False)
        return Done(record(plan, dry_run=order.dry_run), list(preview(plan)) if order.dry_run else ())
