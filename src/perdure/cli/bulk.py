"""Bulk operations: one verb for all runs that a query finds. The verbs cancel, pause, unpause, retry, adopt and resolve use this.

    preview and question → the batch is recorded → run after run, each in a commit of its own → the batch has ended

Every event that a bulk operation writes has the id of its batch. A batch that was interrupted has not ended: the same
command, or `--batch ID`, goes on with it. It leaves out the runs that have an event of this batch, so nothing is done twice.
The runs are read page by page, so that their number does not matter for the memory.
"""

from __future__ import annotations

import asyncio
import secrets
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, TypeVar

import click
import msgspec
from msgspec import Struct, field

from perdure.cli import common
from perdure.cli.driving import stop_on_signals
from perdure.cli.steering import by_option
from perdure.core.events import batch_of
from perdure.core.identity import undone_by
from perdure.core.query import Query, Term, parse_query
from perdure.engine.api import Reading
from perdure.errors import Conflict, InvalidInput, NotFound, PerdureError, StoreUnavailable
from perdure.inspect.text import clip, plural, span, versioned
from perdure.inspect.view import all_rows, require
from perdure.settings import Settings
from perdure.store.api import Batch, RunRow

if TYPE_CHECKING:
    from perdure.agent import Agent
    from perdure.app import Perdure

F = TypeVar("F", bound=Callable[..., Any])
SAMPLE = 5  # how many runs are named as examples
REASONS_SHOWN = 20
REASONS_KEPT = 200  # more different reasons than that are only counted
DONE_BEFORE = "it was done in this batch already"


class BulkOrder(Struct, frozen=True):
    """Which runs, by whom, and how to ask: the options that all bulk operations share."""

    by: str
    url: str | None
    as_json: bool
    yes: bool
    dry_run: bool
    where: str | None = None
    batch: str | None = None  # the batch to go on with
    limit: int | None = None
    run_ids: tuple[str, ...] = ()  # instead of `where`: these runs


def asking_options(who: str) -> Callable[[F], F]:
    """The options of a verb that shows a preview and asks. The parameters: dry_run, yes, by, url, as_json."""
    return _all_of(
        click.option("--dry-run", is_flag=True, help="Only show what would be done."),
        click.option("--yes", is_flag=True, help="Do not ask."),
        by_option(who),
        common.url_option,
        common.json_option,
    )


def many_options(words: str, who: str = "Who says so.") -> Callable[[F], F]:
    """The options of a bulk operation. The parameters: where, limit, batch, and those of `asking_options`."""
    return _all_of(
        common.where_option(words),
        click.option("--limit", type=click.IntRange(min=1), metavar="N", help="With --where: at most N runs."),
        click.option("--batch", metavar="ID", help="Go on with this batch, which was interrupted; the other options as before."),
        asking_options(who),
    )


def _all_of(*options: Callable[[F], F]) -> Callable[[F], F]:
    def with_options(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return with_options


def is_for_many(verb: str, run_id: str | None, order: BulkOrder) -> bool:
    """False: for one RUN that was named. InvalidInput if the runs are named in two ways, or not at all."""
    many = order.where is not None or order.batch is not None
    if run_id is None and not many:
        raise InvalidInput(f"name the run to {verb}, or select runs: perdure {verb} --where 'agent:NAME'")
    if run_id is not None and (many or order.limit is not None or order.dry_run):
        raise InvalidInput(f"{verb} RUN is for one run; --where, --batch, --limit and --dry-run are for many: leave out one of the two")
    return many


class Done(Struct, frozen=True):
    """What was done with a run, or would be done in a dry run."""

    record: Mapping[str, Any] = {}  # for --json
    lines: Sequence[str] = ()  # for a person, in a dry run


class BulkVerb:
    """What a verb does with each run. The subclasses are in the modules of the verbs."""

    verb = ""
    question = ""  # "cancel": cancel 3 runs?
    did = ""  # "3 runs cancelled"
    could = ""
    then = ""  # how it goes on, for the last line
    statuses: tuple[str, ...] = ()  # the verb applies only to runs with these statuses …
    usual: tuple[str, ...] = ()  # … and a query without a status selects these
    instead = ""  # what to do with runs of another status
    # A run that has changed since the preview is skipped, because the person has not seen it as it is now. False: the verb
    # is for runs that go on meanwhile.
    rests = True

    query: Query | None = None  # of this operation; if it goes on with a batch, that of the batch. None: the runs are named

    def given(self) -> dict[str, Any]:
        """The arguments and options that belong to the order: a batch goes on only with the same."""
        return {}

    def leaves_out(self, row: RunRow, *, named: bool) -> str | None:
        """Why this run is not meant, in the plural; None if it is. `named`: the person has named the run."""
        if row.specimen is not None and not named:
            return "specimens, which are never driven"
        return "undo runs: name them one by one" if undone_by(row.run_id) is not None and not named else None

    def look(self, reading: Reading, row: RunRow, batch: str) -> str | None:
        """Look at a run for the preview. Returns why it is skipped; None if it is not."""
        return None

    def breakdown(self) -> Iterable[str]:
        """Further lines for the preview, after `look` has seen all runs. InvalidInput if the order is not clear."""
        return ()

    def is_done(self, reading: Reading, row: RunRow, batch: str) -> bool:
        """Does the run have an event of this batch, in its journal or in its inbox?"""
        if any(batch_of(letter.body) == batch for letter in reading.unread(row.run_id)):
            return True
        return any(batch_of(event.body) == batch for event in reading.read(row.run_id))

    def named_rows(self, reading: Reading, run_ids: Sequence[str]) -> Iterator[RunRow]:
        yield from (require(reading, run_id) for run_id in run_ids)

    async def act(self, bulk: Bulk, row: RunRow) -> Done:
        """Do it with this run, in one commit. Any PerdureError says why that cannot be."""
        raise NotImplementedError


class _Tally(Struct):
    """How many runs have the same reason or the same preview, and the ids of the first few."""

    words: str
    count: int = 0
    ids: list[str] = []

    def add(self, run_id: str) -> None:
        self.count += 1
        if len(self.ids) <= SAMPLE:
            self.ids.append(run_id)

    def others(self) -> list[str]:
        more = self.count - 1
        if not more:
            return []
        return [f"  the same for {plural(more, 'more run')}: {', '.join(self.ids[1:])}{' …' if self.count > len(self.ids) else ''}"]


class _Reasons(Struct):
    """The runs with which nothing was done, by reason."""

    count: int = 0
    tallies: dict[str, _Tally] = field(default_factory=dict)

    def add(self, run_id: str, why: str) -> None:
        self.count += 1
        pattern = why.replace(run_id, "RUN")
        if pattern in self.tallies or len(self.tallies) < REASONS_KEPT:
            words = why if run_id in why else f"run {run_id}: {why}"
            self.tallies.setdefault(pattern, _Tally(words)).add(run_id)

    def lines(self, title: str) -> Iterator[str]:
        shown = list(self.tallies.values())[:REASONS_SHOWN]
        for tally in shown:
            yield f"  {title}: {tally.words}"
            yield from tally.others()
        if (more := self.count - sum(tally.count for tally in shown)) > 0:
            yield f"  {title}: {more:,} more"


class _Found(Struct):
    """A summary of the runs that the query finds."""

    count: int = 0
    more: bool = False  # there are more runs than --limit allows
    statuses: Counter[str] = field(default_factory=Counter)
    agents: Counter[str] = field(default_factory=Counter)
    left_out: Counter[str] = field(default_factory=Counter)
    first: list[RunRow] = []


class Bulk:
    """One bulk operation."""

    def __init__(self, settings: Settings, verb: BulkVerb, order: BulkOrder) -> None:
        self.settings = settings
        self.order = order
        self._verb = verb
        self._apps: dict[str, Perdure] = {}
        self._skipped = _Reasons()
        self._failed = _Reasons()
        self._would: dict[str, _Tally] = {}
        self._done = 0
        self._batch = ""
        self._resumed = False
        self._at = 0
        self._query: Query | None = None

    async def go(self) -> int:
        """Preview, ask, and do it. Returns the exit code."""
        order = self.order
        async with AsyncExitStack() as self._open:
            app = await self._read_only()
            reading, store = app.reading, app.store
            now = common.now_at(reading)
            self._at = await asyncio.to_thread(self._prepare, app, now)
            found = await asyncio.to_thread(self._look, reading)
            if not found.count:
                self._tell_left_out(found)
                if self._resumed and not order.dry_run:
                    await asyncio.to_thread(store.end_batch, self._batch, now)
                common.note("no runs that match" if not self._skipped.count else "no runs are left")
                return self._report(found, stopped=False)
            if not order.dry_run:
                common.check_terminal(self._verb.verb, yes=order.yes)
            self._show(found)
            if not order.dry_run:
                self._ask(found)
                if not self._resumed:
                    # The batch is durable before its first event: a crash leaves a batch that the same command goes on with.
                    self._batch = _new_id(self._verb.verb, self._at)
                    new = Batch(self._batch, self._verb.verb, order.where, self._given(), order.by, self._at)
                    await asyncio.to_thread(store.open_batch, new)
                common.note(f"batch {self._batch}")
            # From here on a signal stops the work between two runs. Before this line, Ctrl-C ends the question.
            stop = stop_on_signals(asyncio.get_running_loop())
            self._skipped = _Reasons()
            hidden = order.dry_run or not sys.stderr.isatty()
            with click.progressbar(length=found.count, file=sys.stderr, hidden=hidden) as bar:
                async for row in self._each(reading):
                    if stop.is_set():
                        break
                    await self._take(row)
                    bar.update(1)
            if self._batch and not stop.is_set():
                await asyncio.to_thread(store.end_batch, self._batch, common.now_at(reading))
            return self._report(found, stopped=stop.is_set())

    async def app(self, name: str = "", agents: Iterable[Agent[Any, Any]] = ()) -> Perdure:
        """The app that acts, with these agents. Everything that it tells runs has the id of the batch."""
        from perdure.app import Perdure

        if name not in self._apps:
            opened = Perdure(agents=list(agents), settings=self.settings, batch="" if self.order.dry_run else self._batch)
            self._apps[name] = await self._open.enter_async_context(opened)
        return self._apps[name]

    async def _read_only(self) -> Perdure:
        from perdure.app import Perdure

        return await self._open.enter_async_context(Perdure(settings=self.settings))

    # -- which runs ---------------------------------------------------------------------------------------------------
    def _prepare(self, app: Perdure, now: int) -> int:
        """Find the batch to go on with, if there is one, and parse the query. Returns the time of the first preview."""
        order, verb = self.order, self._verb.verb
        found = self._interrupted(app) if order.batch is None else app.store.batch(order.batch)
        if order.batch is not None:
            if found is None:
                raise NotFound(f"there is no batch {order.batch}; leave --batch out for a new one")
            self._check_same(found)
        if found is not None:
            self._batch, self._resumed = found.batch, True
            self.order = order = msgspec.structs.replace(order, where=found.query)
            common.note(common.clean(f"batch {found.batch} of {found.by} was interrupted: this goes on with the runs that are left"))
        at = now if found is None else found.at
        if order.where is not None:
            self._query = self._verb.query = self._narrowed(parse_query(order.where, at), at)
        assert self._query is not None or order.run_ids, verb
        return at

    def _interrupted(self, app: Perdure) -> Batch | None:
        """The batch of the same command that has not ended. A dry run is of no batch."""
        same = (self.order.where, self._given())
        batches = [] if self.order.dry_run else app.store.interrupted_batches(self._verb.verb)
        return next((one for one in batches if (one.query, one.given) == same), None)

    def _check_same(self, found: Batch) -> None:
        if found.verb != self._verb.verb:
            raise InvalidInput(f"batch {found.batch} is of perdure {found.verb}, and not of perdure {self._verb.verb}")
        if found.ended_at is not None:
            raise Conflict(f"batch {found.batch} has ended at {common.iso(found.ended_at)}; leave --batch out for a new one")
        if self.order.where not in (None, found.query):
            raise InvalidInput(f"batch {found.batch} is of the runs --where {found.query!r}; leave --where out, or type the same")
        before, now = msgspec.json.decode(found.given), msgspec.json.decode(self._given())
        if other := sorted(name for name in {*before, *now} if before.get(name) != now.get(name)):
            name = other[0]
            raise InvalidInput(
                f"batch {found.batch} was begun with other options, and goes on only with the same: {name} was {before.get(name)!r}, "
                f"and is {now.get(name)!r} now"
            )

    def _given(self) -> str:
        given = {**self._verb.given(), **({"runs": list(self.order.run_ids)} if self.order.run_ids else {})}
        return msgspec.json.encode(given, order="sorted").decode()

    def _narrowed(self, query: Query, at: int) -> Query:
        """The query, of the runs that were there at the preview, with a status to which the verb applies."""
        verb = self._verb
        if not query.has("status"):
            # Only runs with the status needs_attention have an attention.
            query = query.within(status=verb.statuses if query.has("attention") else verb.usual or verb.statuses)
        elif other := [status for status in query.statuses if status not in verb.statuses]:
            raise InvalidInput(
                f"--where status:{other[0]}: perdure {verb.verb} is for runs that are {', '.join(verb.statuses)}{verb.instead}"
            )
        return Query((*query.terms, Term("created", "<=", number=at)))

    def _rows(self, reading: Reading) -> Iterator[tuple[RunRow, str | None]]:
        """The runs that are meant, newest first, each with the reason why it is skipped, or None."""
        named = self._query is None
        rows = self._verb.named_rows(reading, self.order.run_ids) if self._query is None else all_rows(reading, self._query)
        taken = 0
        for row in rows:
            if (why := self._verb.leaves_out(row, named=named)) is not None:
                yield row, f"{_LEFT_OUT}{why}"
                continue
            reason = self._why_skipped(reading, row)
            if reason is None:
                taken += 1
                if self.order.limit is not None and taken > self.order.limit:
                    yield row, _BEYOND
                    return
            yield row, reason

    def _why_skipped(self, reading: Reading, row: RunRow) -> str | None:
        if self._resumed and self._verb.is_done(reading, row, self._batch):
            return DONE_BEFORE
        if self._verb.rests and self._query is not None and row.updated_at > self._at:
            return "it has changed since the preview"
        return None

    # -- the preview --------------------------------------------------------------------------------------------------
    def _look(self, reading: Reading) -> _Found:
        found = _Found()
        for row, why in self._rows(reading):
            if why == _BEYOND:
                found.more = True
            elif why is not None and why.startswith(_LEFT_OUT):
                found.left_out[why.removeprefix(_LEFT_OUT)] += 1
            elif why is not None or (why := self._verb.look(reading, row, self._batch if self._resumed else "")) is not None:
                self._skipped.add(row.run_id, why)
            else:
                found.count += 1
                found.statuses[_status(row)] += 1
                found.agents[versioned(row.agent, row.version)] += 1
                if len(found.first) < SAMPLE:
                    found.first.append(row)
        return found

    def _show(self, found: _Found) -> None:
        """What a person sees before the question. It goes to stderr, since a program reads stdout."""
        lines = [f"{plural(found.count, 'run')} to {self._verb.verb}" + (f", with --limit {self.order.limit}" if found.more else "")]
        lines += [f"  {counts(found.statuses)}", f"  {counts(found.agents, ' of ')}"]
        lines += [f"  {line}" for line in self._verb.breakdown()]
        for row in found.first:
            error = f": {clip(row.error, 80)}" if row.error else ""
            lines.append(f"  {row.run_id}  {_status(row)} {span(max(0, self._at - row.updated_at))} ago{error}")
        if found.count > len(found.first):
            lines.append(f"  … and {found.count - len(found.first):,} more")
        for line in lines:
            common.note(common.clean(line))
        self._tell_left_out(found)

    def _tell_left_out(self, found: _Found) -> None:
        for why, count in found.left_out.most_common():
            common.note(common.clean(f"  {count:,} left out: {why}"))

    def _ask(self, found: _Found) -> None:
        if not self.order.yes and not click.confirm(f"{self._verb.question} {plural(found.count, 'run')}?", err=True):
            common.fail("nothing was written")

    # -- run after run ------------------------------------------------------------------------------------------------
    async def _each(self, reading: Reading) -> AsyncIterator[RunRow]:
        rows = self._rows(reading)
        while (one := await asyncio.to_thread(next, rows, None)) is not None:
            row, why = one
            if why is None:
                yield row
            elif not why.startswith((_LEFT_OUT, _BEYOND)):
                self._leave(row.run_id, self._skipped, "skipped", why)

    async def _take(self, row: RunRow) -> None:
        order = self.order
        try:
            done = await self._verb.act(self, row)
        except StoreUnavailable:
            raise  # the batch has not ended: the same command goes on with it
        except Skip as skip:
            self._leave(row.run_id, self._skipped, "skipped", str(skip))
            return
        except Fail as fail:
            self._leave(row.run_id, self._failed, "failed", str(fail))
            return
        except PerdureError as error:
            if (changed := await self._has_changed(row)) is not None:
                self._leave(row.run_id, self._skipped, "skipped", changed)
            else:
                self._leave(row.run_id, self._failed, "failed", error.in_full())
            return
        self._done += 1
        if order.as_json:
            common.out_json({"run_id": row.run_id, **done.record, "dry_run": order.dry_run})
        elif order.dry_run and done.lines:
            tally = self._would.setdefault("\n".join(done.lines).replace(row.run_id, "RUN"), _Tally("\n".join(done.lines)))
            tally.add(row.run_id)

    async def _has_changed(self, row: RunRow) -> str | None:
        """Why the verb does not apply to the run any more, if that is so: the run has changed since it was read."""
        reading = (await self.app()).reading
        now = await asyncio.to_thread(reading.get, row.run_id)
        if now is None:
            return "it was pruned meanwhile"
        if now.seq != row.seq and (self._verb.rests or now.status not in self._verb.statuses):
            return f"it has changed meanwhile, and is {now.status.replace('_', ' ')} now"
        return None

    def _leave(self, run_id: str, among: _Reasons, how: str, why: str) -> None:
        among.add(run_id, why)
        if self.order.as_json:
            common.out_json({"run_id": run_id, how: why, "dry_run": self.order.dry_run})

    # -- the end ------------------------------------------------------------------------------------------------------
    def _report(self, found: _Found, *, stopped: bool) -> int:
        order, verb = self.order, self._verb
        for tally in self._would.values():
            for line in (*tally.words.splitlines(), *tally.others()):
                common.out(common.clean(line))
        for line in (*self._skipped.lines("skipped"), *self._failed.lines("failed")):
            common.note(common.clean(line))
        if order.as_json:
            counts = {"done": self._done, "skipped": self._skipped.count, "failed": self._failed.count}
            left_out = sum(found.left_out.values())
            common.out_json(
                {"batch": self._batch or None, **counts, "left_out": left_out, "interrupted": stopped, "dry_run": order.dry_run}
            )
        elif found.count or self._skipped.count:
            parts = [f"{plural(self._done, 'run')} {verb.could if order.dry_run else verb.did}"]
            parts += [f"{self._skipped.count:,} skipped"] if self._skipped.count else []
            parts += [f"{self._failed.count:,} failed"] if self._failed.count else []
            if stopped:
                parts.append(f"interrupted: the same command goes on with the rest, or --batch {self._batch}")
            elif self._done and not order.dry_run and verb.then:
                parts.append(verb.then)
            common.out("; ".join(parts))
        return 130 if stopped else common.FAILED if self._failed.count else common.SUCCEEDED


def go(settings: Settings, verb: BulkVerb, order: BulkOrder) -> int:
    """The whole bulk operation. Returns the exit code."""
    common.require_journal(settings.url)
    return asyncio.run(Bulk(settings, verb, order).go())


class Skip(Exception):
    """With this run there is nothing to do. The text says why."""


class Fail(Exception):
    """Only a part was done with this run. The text says what, and why not the rest."""


_LEFT_OUT, _BEYOND = "left out: ", "beyond the limit"


def _new_id(verb: str, at: int) -> str:
    when = common.iso(at)[:19].replace("-", "").replace(":", "").replace("T", "-")
    return f"{verb}-{when}-{secrets.token_hex(2)}"


def _status(row: RunRow) -> str:
    return f"{row.status} ({row.attention})" if row.attention else row.status


def counts(counted: Counter[str], of: str = " ") -> str:
    """The most frequent of these, each with its number: 80 of support@1, 40 of billing@2."""
    shown = ", ".join(f"{count:,}{of}{what}" for what, count in counted.most_common(SAMPLE))
    return shown + (f" and {len(counted) - SAMPLE:,} more" if len(counted) > SAMPLE else "")
