"""`perdure retry`: let runs that have failed or were cancelled go on: one run, several, or all that match a query."""

from __future__ import annotations

import asyncio
import logging
import re
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click
from msgspec import Struct, field

from perdure import shell
from perdure.cli import common
from perdure.cli.common import where_option
from perdure.cli.driving import stop_on_signals
from perdure.cli.reopening import Order, check_goes_on, preview, record, reopen_one, reopened
from perdure.cli.steering import add_options, by_option, speaker, who_goes_on
from perdure.cli.target import load_target, load_targets, recorded_target, with_children, with_tools
from perdure.core.budget import Budget
from perdure.core.identity import undone_by
from perdure.core.query import Query, parse_query
from perdure.core.state import RunState
from perdure.engine.api import Reading
from perdure.errors import Conflict, InvalidInput, PerdureError, StoreUnavailable, UnknownAgent
from perdure.inspect.text import clip, limits_words, plural, span, versioned
from perdure.inspect.view import all_rows, read_run, require
from perdure.logs import log_to_stderr
from perdure.settings import Settings
from perdure.store.api import FINISHED, RunRow

if TYPE_CHECKING:
    from perdure.agent import Agent
    from perdure.app import Perdure
    from perdure.reopen import Reopened

F = TypeVar("F", bound=Callable[..., Any])
SAMPLE = 5
REFUSED_SHOWN = 20
_STATUSES = ("failed", "cancelled", "needs_attention")
_TARGET = re.compile(r".*\.(?:py|toml|json)(?::\w+)?\Z", re.DOTALL)


def reopening_options(function: F) -> F:
    """The options that `retry` and `rewind` share."""
    for option in reversed(
        (
            click.option("--tools", metavar="FILE.py", help="If TARGET is a plan: the file with its tools."),
            click.option("--dry-run", is_flag=True, help="Only print what would be kept and what would run."),
            click.option("--yes", is_flag=True, help="Do not ask."),
            click.option("--reason", metavar="TEXT", help="Why; a note for the journal."),
            click.option("--fresh", is_flag=True, help="Make `read` calls and requests to models again, instead of using their results."),
            add_options,
            by_option("Who says so."),
            common.url_option,
            common.json_option,
        )
    ):
        function = cast(F, option(function))
    return function


@click.command("retry")
@click.argument("words", nargs=-1, metavar="[RUN…] [TARGET]", shell_complete=common.complete_run)
@where_option("Instead of RUNs: all failed runs that match (status:cancelled or status:needs_attention: these instead).")
@reopening_options
def command(
    words: tuple[str, ...],
    where: str | None,
    tools: str | None,
    dry_run: bool,
    yes: bool,
    reason: str | None,
    fresh: bool,
    add: Budget | None,
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
        now = common.now_at(store)
        query = None if where is None else _query(where, now)
        run_ids, target = split(store, words, where, "retry")
        order = Order(speaker(by), reason, fresh, url, as_json, yes, dry_run, with_tools(target, tools), add)
        if query is None and len(run_ids) == 1:
            row = require(store, run_ids[0])
            if row.status == "needs_attention":
                return asyncio.run(_unpause_one(settings, store, row, order))
            _check_ended(row)
            agents = agents_of(store, row, target, tools, settings, "retry", common.url_words(url))
            return asyncio.run(_one(settings, row.run_id, agents, order))
    crowd = Crowd(settings, order, target, tools, query, run_ids, now)
    return asyncio.run(crowd.go())


def _query(where: str, now: int) -> Query:
    """The query. Without a status it selects failed runs only, because people cancel runs on purpose."""
    query = parse_query(where, now)
    if not query.has("status"):
        return query.within(status=("failed",))
    other = [status for status in query.statuses if status not in _STATUSES]
    if other:
        raise InvalidInput(f"--where status:{other[0]}: only runs that are {' or '.join(_STATUSES)} can be retried")
    return query


def split(store: Reading, words: tuple[str, ...], where: str | None, verb: str) -> tuple[list[str], str | None]:
    """(runs, TARGET).

    The last word is a TARGET if it names a file, or a module with a name, and is not the id of a run.
    """
    run_ids, target = list(dict.fromkeys(words)), None
    if run_ids and (where is not None or len(run_ids) > 1):
        last = run_ids[-1]
        if _TARGET.match(last) or (":" in last and store.get(last) is None):
            target = run_ids.pop()
    if where is not None and run_ids:
        raise InvalidInput(f"give the runs or --where, and not both: {run_ids[0]!r:.60} and --where")
    if where is None and not run_ids:
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
def check_can_go_on(row: RunRow, state: RunState, add: Budget | None) -> None:
    """Raise Conflict if a run that needs attention would stop again at once, because a person has to decide first."""
    why = shell.command("why", row.run_id)
    if row.attention == "in_doubt":
        doubts = [f"call {call.number} ({call.tool})" for call in state.open.values() if call.phase == "in_doubt"]
        raise Conflict(f"run {row.run_id} needs attention: {', '.join(doubts[:3])} may have happened; resolve that first: {why} says how")
    if row.attention == "budget" and add is None:
        raise Conflict(f"run {row.run_id} needs attention: its budget is used up; add to it with perdure unpause: {why} says how much")
    if row.attention != "budget" and add is not None:
        raise Conflict(f"run {row.run_id} needs attention, and not because of its budget: {why} says what it needs")


def _added(order: Order) -> str:
    return "" if order.add is None else f"; added to the budget that it has used up: {limits_words(order.add.limits)}"


async def _unpause_one(settings: Settings, store: Reading, row: RunRow, order: Order) -> int:
    from perdure.app import Perdure

    check_can_go_on(row, read_run(store, row.run_id).state, order.add)
    said = f"run {row.run_id} needs attention: {clip(row.error or row.waiting_for or '', 200)}; it goes on where it stands, as after perdure unpause"
    said += _added(order)
    if order.dry_run:
        if order.as_json:
            common.out_json({"run_id": row.run_id, "status": row.status, "dry_run": True})
        else:
            common.out(common.clean(said))
        return common.SUCCEEDED
    order.check_terminal("retry")
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


def _same_for(run_ids: list[str]) -> list[str]:
    """A line about runs with the same plan, or with the same reason of their refusal."""
    if not run_ids:
        return []
    return [
        f"  the same for {len(run_ids):,} more {'run' if len(run_ids) == 1 else 'runs'}: {', '.join(run_ids[:SAMPLE])}"
        + (" …" if len(run_ids) > SAMPLE else "")
    ]


# -- many runs --------------------------------------------------------------------------------------------------------
class Sample(Struct):
    """A summary of the runs that the query finds: how many runs, their agents, and the first few runs."""

    count: int = 0
    left_out: int = 0
    agents: Counter[str] = field(default_factory=Counter)
    first: list[RunRow] = []


class Crowd:
    """Retries many runs, one after the other.

    Each retry is one commit, so a person can type the same command again. `perdure adopt` does the same with other words.
    """

    verb, question, refused_words, could, did = "retry", "go on", "not retried", "can be retried", "queued"
    left_out_words = "a child goes on with its parent, and a specimen never"

    def __init__(
        self, settings: Settings, order: Order, target: str | None, tools: str | None, query: Query | None, run_ids: list[str], now: int
    ) -> None:
        self._settings = settings
        self._order = order
        self._query = query
        self._run_ids = run_ids
        self._now = now
        # With a TARGET, all runs use its agents. Without it, each run uses its own recorded target.
        self.given = None if target is None else with_children([one.agent for one in load_targets(target, tools)])
        self._loaded: dict[str, list[Agent[Any, Any]]] = {}
        self._apps: dict[str, Perdure] = {}
        self._refused: list[tuple[str, str]] = []
        self._plans: dict[str, list[Reopened]] = {}  # in a dry run: the preview without the run and the event → the plans
        self._done = 0

    async def go(self) -> int:
        order = self._order
        async with AsyncExitStack() as self._open:
            reading = await self._reading()
            found = await asyncio.to_thread(self._look, reading)
            if not found.count and not self._refused:
                common.note("no runs that match")
                return common.SUCCEEDED
            if not order.dry_run and found.count:
                self._ask(found)
            # From here on a signal stops the work between two runs. Before this line, Ctrl-C ends the question.
            stop = stop_on_signals(asyncio.get_running_loop())
            async for row in self._each(reading):
                if stop.is_set():
                    break
                await self._take(row)
                if sys.stderr.isatty() and not order.dry_run:
                    total = f"{self._done + len(self._refused):,} of {found.count:,}"
                    print(f"\r  {total}", end="", file=sys.stderr, flush=True)
            if sys.stderr.isatty() and not order.dry_run:
                print(file=sys.stderr)
            return self._report(found, stopped=stop.is_set())

    async def _reading(self) -> Reading:
        """An app without agents, only for reading."""
        from perdure.app import Perdure

        app = await self._open.enter_async_context(Perdure(settings=self._settings))
        return app.reading

    def _rows(self, reading: Reading) -> Iterator[RunRow]:
        """The runs, newest first.

        A run that has changed since the question is left out, because the person has not seen it.
        """
        if self._query is not None:
            yield from (row for row in all_rows(reading, self._query) if row.updated_at <= self._now)
            return
        for run_id in self._run_ids:
            yield require(reading, run_id)

    def _look(self, reading: Reading) -> Sample:
        found = Sample()
        for row in self._rows(reading):
            if self._is_left_out(row):
                found.left_out += 1
                continue
            found.count += 1
            found.agents[versioned(row.agent, row.version)] += 1
            if len(found.first) < SAMPLE:
                found.first.append(row)
        return found

    def _is_left_out(self, row: RunRow) -> bool:
        """Does the query leave out this run?

        A child continues with its parent, an undo with `perdure undo`, a specimen never.

        If the user names such a run, an error says this.
        """
        others = row.parent is not None or row.specimen is not None or undone_by(row.run_id) is not None
        return self._query is not None and others

    def _ask(self, found: Sample) -> None:
        self._order.check_terminal(self.verb)
        agents = ", ".join(f"{count:,} of {agent}" for agent, count in found.agents.most_common(SAMPLE))
        lines = [f"{plural(found.count, 'run')}: {agents}" + (" …" if len(found.agents) > SAMPLE else "")]
        lines += [
            f"  {row.run_id}  {row.status} {span(self._now - row.updated_at)} ago: {clip(row.error or '', 80)}" for row in found.first
        ]
        if found.count > len(found.first):
            lines.append(f"  … and {found.count - len(found.first):,} more; what each would do: --dry-run")
        if sys.stderr.isatty():
            for line in lines:
                common.note(common.clean(line))
        if not self._order.yes and not click.confirm(f"let {'it' if found.count == 1 else 'them'} {self.question}?", err=True):
            common.fail("nothing was written")

    async def _each(self, reading: Reading) -> AsyncIterator[RunRow]:
        rows = self._rows(reading)
        while (row := await asyncio.to_thread(next, rows, None)) is not None:
            if not self._is_left_out(row):
                yield row

    async def _take(self, row: RunRow) -> None:
        order = self._order
        try:
            await self._act(row)
        except StoreUnavailable:
            raise
        except PerdureError as error:
            self._refused.append((row.run_id, error.in_full()))
            if order.as_json:
                common.out_json({"run_id": row.run_id, "refused": error.in_full(), "dry_run": order.dry_run})
            return
        self._done += 1

    async def _act(self, row: RunRow) -> None:
        order = self._order
        if row.status == "needs_attention":
            await self._unpause(row)
            return
        app = await self._app_for(row)
        plan = await reopened(app, row.run_id, None, order, dry_run=True)
        if not order.dry_run:
            check_goes_on(plan)
            plan = await reopened(app, row.run_id, None, order, dry_run=False)
        if order.as_json:
            common.out_json(record(plan, dry_run=order.dry_run))
        elif order.dry_run:
            _, *lines = preview(plan)
            self._plans.setdefault("\n".join([plan.before, plan.version, *lines]).replace(plan.run_id, "RUN"), []).append(plan)

    async def _unpause(self, row: RunRow) -> None:
        order, app = self._order, await self._app("", [])
        check_can_go_on(row, await app.handle(row.run_id).state(), order.add)
        if not order.dry_run:
            await app.unpause(row.run_id, by=order.by, note=order.reason, add=order.add)
        if order.as_json:
            common.out_json({"run_id": row.run_id, "dry_run": order.dry_run})
        elif order.dry_run:
            common.out(common.clean(f"run {row.run_id} needs attention, and goes on where it stands{_added(order)}"))

    async def _app_for(self, row: RunRow) -> Perdure:
        if self.given is not None:
            if row.agent not in {agent.name for agent in self.given}:
                names = ", ".join(sorted({agent.name for agent in self.given}))
                raise UnknownAgent(f"run {row.run_id} belongs to agent {row.agent!r}, and the target has {names}")
            return await self._app("TARGET", self.given)
        options = common.url_words(self._order.url)
        reading = (await self._app("", [])).reading
        words = await asyncio.to_thread(recorded_target, reading, row, self._settings.url, self.verb, options)
        if words not in self._loaded:
            self._loaded[words] = with_children([load_target(words).agent])
        return await self._app(words, self._loaded[words])

    async def _app(self, name: str, agents: Iterable[Agent[Any, Any]]) -> Perdure:
        from perdure.app import Perdure

        if name not in self._apps:
            self._apps[name] = await self._open.enter_async_context(Perdure(agents=list(agents), settings=self._settings))
        return self._apps[name]

    def _report(self, found: Sample, *, stopped: bool) -> int:
        order, refused = self._order, self._refused
        for plans in self._plans.values():
            for line in (*preview(plans[0]), *_same_for([plan.run_id for plan in plans[1:]])):
                common.out(common.clean(line))
        reasons: dict[str, list[tuple[str, str]]] = {}
        for run_id, why in refused:
            reasons.setdefault(why.replace(run_id, "RUN"), []).append((run_id, why))
        for (run_id, why), *others in list(reasons.values())[:REFUSED_SHOWN]:
            common.note(common.clean(f"  {self.refused_words}: {why if run_id in why else f'run {run_id}: {why}'}"))
            for line in _same_for([run_id for run_id, _ in others]):
                common.note(common.clean(line))
        if len(reasons) > REFUSED_SHOWN:
            common.note(f"  … and {sum(map(len, list(reasons.values())[REFUSED_SHOWN:])):,} more")
        if found.left_out:
            common.note(f"  {found.left_out:,} left out: {self.left_out_words}")
        if not order.as_json:
            would = self.could if order.dry_run else self.did
            parts = [f"{plural(self._done, 'run')} {would}"]
            if refused:
                parts.append(f"{len(refused):,} not")
            if stopped:
                parts.append("interrupted: the same command goes on with the rest")
            elif self._done and not order.dry_run:
                parts.append("a worker goes on with them: perdure worker TARGET, if none serves them")
            common.out("; ".join(parts))
        return 130 if stopped else common.FAILED if refused else common.SUCCEEDED
