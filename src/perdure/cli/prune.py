"""`perdure prune`: delete runs that have ended: old ones, named ones, those of a tenant or a query. A tombstone of each stays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import get_args

import click
import msgspec

from perdure import shell
from perdure.cli import common
from perdure.cli.bulk import SAMPLE, counts
from perdure.cli.common import where_option
from perdure.cli.times import parse_past
from perdure.cli.who import os_user
from perdure.core.query import EVERYTHING, Query, Term, parse_query
from perdure.errors import Conflict, InvalidInput
from perdure.inspect.artifacts import orphans as lost
from perdure.inspect.text import plural
from perdure.inspect.view import require
from perdure.store import pruning
from perdure.store.api import FINISHED, Checkpointed, Kept, Prunable, Pruned, RunRow, Status, Store
from perdure.store.artifacts import sweep

_ENDED = tuple(status for status in get_args(Status) if status in FINISHED)


@click.command("prune")
@click.option("--older-than", "age", metavar="T", help="Runs that ended before then: 90d, 12h ago, or an ISO time.")
@click.option(
    "--status",
    "statuses",
    metavar="S,…",
    default=",".join(_ENDED),
    help=f"Only families whose first run ended with this status. Default: {','.join(_ENDED)}.",
)
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="At most N families.")
@click.option("--run", "named", multiple=True, metavar="RUN", help="The family of this run, however old. Can be repeated.")
@click.option("--tenant", metavar="T", help="Only families of this tenant; without --older-than, however old.")
@where_option("Only families whose first run matches; without --older-than, however old.")
@click.option("--orphans", is_flag=True, help="Instead: delete artifacts that no event names, of calls that have ended.")
@click.option(
    "--specimen", "specimens", multiple=True, metavar="RUN", help="Instead: delete this specimen and the runs below it. Can be repeated."
)
@click.option(
    "--before-checkpoint",
    "checkpoints",
    is_flag=True,
    help="Instead: remove the events before the last checkpoint, of these RUNs, or of all runs that rest since --older-than.",
)
@click.argument("runs", nargs=-1, metavar="[RUN]…")
@click.option("--yes", is_flag=True, help="Do not ask. With --older-than alone, prune does not ask in any case.")
@click.option("--dry-run", is_flag=True, help="Only print how much would be deleted.")
@common.url_option
@common.json_option
def command(
    age: str | None,
    statuses: str,
    limit: int | None,
    named: tuple[str, ...],
    tenant: str | None,
    where: str | None,
    orphans: bool,
    specimens: tuple[str, ...],
    checkpoints: bool,
    runs: tuple[str, ...],
    yes: bool,
    dry_run: bool,
    url: str | None,
    as_json: bool,
) -> None:
    """Delete runs that have ended, each with its children, its undo and its artifacts: all of them or none.

    A family with an unfinished run, or with a notice that was not sent, is never deleted. A tombstone of each run
    stays: the id is not used again, and `show` says when the run was pruned. An artifact that another family got with
    its input stays until that family is pruned. This command also deletes bytes outside of the database, so it needs
    the same folder or bucket as the workers. A specimen (perdure import) is never pruned by its age: name it with
    --specimen. It leaves no tombstone, because no run was executed under its id here.

    With --run, --tenant or --where a preview comes first, and a question (--yes: none). --where looks at the first run of
    each family.

    --before-checkpoint keeps the runs, finished or not. It removes the events between the first event of a run and its
    last checkpoint (run.checkpoint). The hash of the last removed event stays, so that `verify` proves the rest. After
    that, the run cannot go back to before the checkpoint, be undone or be exported. A run is left out while a worker
    holds it, an undo of it has not ended, or a notice about one of these events was not sent. An approval that is
    still open can be decided as before.
    """
    chosen = bool(named) or tenant is not None or where is not None
    if checkpoints:
        if specimens or orphans or limit is not None or chosen:
            raise InvalidInput(
                "prune --before-checkpoint takes RUNs or --older-than; leave --run, --tenant, --where, --orphans, --specimen and --limit out"
            )
        _prune_before_checkpoints(runs, age, url, dry_run, yes, as_json)
        return
    if runs:
        raise InvalidInput(f"to prune the family of a run: perdure prune --run {shell.quote(runs[0])}")
    if specimens:
        if age is not None or orphans or chosen:
            raise InvalidInput(
                "prune --specimen deletes imported copies, however old; leave --older-than, --orphans, --run, --tenant and --where out"
            )
        _prune_specimens(specimens, url, dry_run, as_json)
        return
    if orphans:
        if age is not None or chosen:
            raise InvalidInput(
                "prune --orphans deletes artifacts that no event names, however old; leave --older-than, --run, --tenant and --where out"
            )
        _prune_orphans(url, dry_run, as_json)
        return
    if named and (tenant is not None or where is not None or age is not None):
        raise InvalidInput("prune --run names the families; leave --older-than, --tenant and --where out")
    if age is None and not chosen:
        raise InvalidInput(
            "say what to prune: --older-than 90d, --run RUN, --tenant T, --where QUERY, --orphans, --specimen RUN, or --before-checkpoint RUN"
        )
    _prune_families(age, _statuses(statuses), limit, named, tenant, where, url, yes=yes, dry_run=dry_run, as_json=as_json)


def _prune_families(
    age: str | None,
    wanted: list[str],
    limit: int | None,
    named: tuple[str, ...],
    tenant: str | None,
    where: str | None,
    url: str | None,
    *,
    yes: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    chosen = bool(named) or tenant is not None or where is not None
    with common.existing_store(url) as store:
        now = common.now_at(store)
        before = now + 1 if age is None else parse_past(age, now, "--older-than")
        kept, done = _Kept(), pruning.NOTHING

        def families() -> Iterator[Prunable]:
            kept.clear()
            if named:
                return iter(_named(store, named, before))
            if not chosen:
                return pruning.found(store, before, wanted, limit)
            query = _query(where, tenant, wanted, before, now)
            return pruning.selected(store, query, before, limit, kept.add)

        if dry_run or chosen:
            for family in families():
                done += Pruned(1, family.runs, family.events, 0)
        if not dry_run and chosen and done.families:
            common.check_terminal("prune", yes=yes, asks="before it deletes")
            _preview(store, families(), done)
            kept.tell()
            if not yes and not click.confirm("delete them? They cannot be brought back", err=True):
                common.fail("nothing was deleted")
        if not dry_run:
            done = pruning.prune(
                store,
                families(),
                before,
                by=os_user(),
                clock=lambda: common.now_at(store),
                progress=_progress if not as_json else _silent,
            )
            sweep(store)
    if as_json:
        common.out_json(
            {"before": None if age is None else common.iso(before), "dry_run": dry_run, **msgspec.to_builtins(done), "kept": kept.count}
        )
        return
    kept.tell()
    blobs = "" if dry_run else f", {plural(done.blobs, 'blob')}"
    blobs += f", {plural(done.artifacts, 'artifact')}" if done.artifacts else ""
    what = f"{plural(done.families, 'family', 'families')}, {plural(done.runs, 'run')}, {plural(done.events, 'event')}{blobs}"
    ended = "" if age is None else f" that ended before {common.iso(before)}"
    common.out(f"{'would prune' if dry_run else 'pruned'} {what}{ended}")


class _Kept:
    """The families that match and cannot be pruned: how many, and the first few reasons."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.count, self._first = 0, list[str]()

    def add(self, root: str, why: str) -> None:
        self.count += 1
        if len(self._first) < SAMPLE:
            self._first.append(why)

    def tell(self) -> None:
        for why in self._first:
            common.note(common.clean(f"  kept: {why}"))
        if self.count > len(self._first):
            common.note(f"  kept: {self.count - len(self._first):,} more")


def _query(where: str | None, tenant: str | None, wanted: list[str], before: int, now: int) -> Query:
    query = (EVERYTHING if where is None else parse_query(where, now)).also(tenant=tenant)
    if open_ := [status for status in query.statuses if query.has("status") and status not in FINISHED]:
        raise InvalidInput(f"--where status:{open_[0]}: only runs that have ended are pruned: {', '.join(_ENDED)}")
    if not query.has("parent"):
        query = query.also(parent="none")
    return Query((*query.within(status=tuple(wanted)).terms, Term("updated", "<", number=before)))


def _named(store: Store, named: tuple[str, ...], before: int) -> list[Prunable]:
    """The families of these runs. Conflict, with the way out, if one of them cannot be pruned."""
    for run_id in named:
        require(store, run_id)
        if "/" in run_id:
            root = run_id.partition("/")[0]
            raise InvalidInput(f"run {run_id} is part of a family, which is pruned as a whole: --run {shell.quote(root)}")
    judged = store.judged(list(dict.fromkeys(named)), before)
    for one in judged:
        if isinstance(one, Kept):
            way_out = f"what it needs: {shell.command('why', one.root)}; to end it: {shell.command('cancel', one.root)}"
            raise Conflict(f"{one.why}; nothing was deleted", hint=way_out)
    return [one for one in judged if isinstance(one, Prunable)]


def _preview(store: Store, families: Iterator[Prunable], found: Pruned) -> None:
    """What a person sees before the question: how many, of which agents and statuses, and the first few."""
    agents, statuses, first = Counter[str](), Counter[str](), list[str]()
    for family in families:
        row = store.get(family.root)
        if row is None:
            continue  # another process has pruned it
        agents[row.agent] += 1
        statuses[row.status] += 1
        if len(first) < SAMPLE:
            first.append(f"  {row.run_id}  {row.status} {common.iso(row.updated_at)}  {plural(family.runs, 'run')}")
    total = f"{plural(found.families, 'family', 'families')} with {plural(found.runs, 'run')} and {plural(found.events, 'event')}"
    lines = [total, f"  {counts(statuses)}", f"  {counts(agents, ' of ')}", *first]
    if found.families > len(first):
        lines.append(f"  … and {found.families - len(first):,} more")
    for line in lines:
        common.note(common.clean(line))


def _prune_specimens(roots: tuple[str, ...], url: str | None, dry_run: bool, as_json: bool) -> None:
    with common.existing_store(url) as store:
        for root in roots:
            row = require(store, root)
            if row.specimen is not None and "/" in root:
                raise InvalidInput(
                    f"specimen {root} is part of a family; delete the family: --specimen {shell.quote(root.partition('/')[0])}"
                )
            if row.specimen is None:
                raise Conflict(
                    f"run {root} is no specimen: it ran in this journal, and nothing was deleted; prune it by age: --older-than 90d"
                )
        families = len(set(roots))
        done = Pruned(families, 0, 0, 0)
        if not dry_run:
            done = store.delete_specimens(sorted(set(roots)), by=os_user(), now=common.now_at(store))
            sweep(store)
    if as_json:
        common.out_json({"dry_run": dry_run, "specimens": sorted(set(roots)), **msgspec.to_builtins(done)})
        return
    what = f"; {plural(done.runs, 'run')}, {plural(done.events, 'event')} are gone" if not dry_run else ""
    common.out(
        common.clean(f"{'would delete' if dry_run else 'deleted'} {plural(families, 'specimen')}: {', '.join(sorted(set(roots)))}{what}")
    )


def _prune_before_checkpoints(runs: tuple[str, ...], age: str | None, url: str | None, dry_run: bool, yes: bool, as_json: bool) -> None:
    if bool(runs) == (age is not None):
        raise InvalidInput("prune --before-checkpoint takes the RUNs, or --older-than T for all runs in which nothing has happened since")
    with common.existing_store(url) as store:
        for run_id in runs:
            row = require(store, run_id)
            if store.checkpoint(run_id) is None:
                raise Conflict(f"run {run_id} has taken no checkpoint, so that all of its events are needed; nothing was removed")
            if row.holder is not None:
                raise Conflict(f"run {run_id} is held by a worker; nothing was removed: {_when_it_rests(store, row, url)}")
        before = None if age is None else parse_past(age, common.now_at(store), "--older-than")
        found, left = list[Checkpointed](), list[str]()
        for one in pruning.checkpointed(store):
            if one.run_id not in runs and (before is None or one.updated_at >= before):
                continue
            if one.needed is None:
                found.append(one)
            elif runs:
                raise Conflict(f"{one.needed}; nothing was removed")
            else:
                left.append(one.needed)
        done = Pruned(0, len(found), sum(one.events for one in found), 0)
        if not dry_run and found:
            what = f"remove {plural(done.events, 'event')} of {plural(done.runs, 'run')}? These runs cannot go back to before their checkpoints"
            common.check_terminal("prune", yes=yes, asks="before it removes events")
            if not yes and not click.confirm(what, err=True):
                common.fail("nothing was removed")
            done = pruning.NOTHING
            for one in found:
                try:
                    done += store.remove_before_checkpoint(one.run_id, by=os_user(), now=common.now_at(store))
                except Conflict as error:  # since the look above, a notice was written, or an undo was begun
                    left.append(str(error))
    if as_json:
        names = [one.run_id for one in found]
        common.out_json({"dry_run": dry_run, "before_checkpoint": names, "left": left, **msgspec.to_builtins(done)})
        return
    for why in left:
        common.note(common.clean(f"left as it is: {why}"))
    blobs = "" if dry_run else f", {plural(done.blobs, 'blob')}"
    common.out(
        f"{'would remove' if dry_run else 'removed'} {plural(done.events, 'event')}{blobs} before checkpoints, of {plural(done.runs, 'run')}"
    )


def _when_it_rests(store: Store, row: RunRow, url: str | None) -> str:
    lease_us = round(common.settings_with(url=url).lease_s * 1e6)
    if any(worker.worker == row.holder and worker.alive for worker in store.workers(common.now_at(store), lease_us)):
        return "try again when it rests, or pause it first"
    resume = f"{shell.command('resume', row.run_id)}{common.url_words(url)}"
    return f"that worker is dead or silent; take the run over, then try again when it rests: {resume}"


def _prune_orphans(url: str | None, dry_run: bool, as_json: bool) -> None:
    with common.existing_store(url) as store:
        found = list(lost(store))
        if not dry_run:
            found = [orphan for orphan in found if store.doom_artifact(orphan.artifact)]
            sweep(store)
    if as_json:
        common.out_json({"dry_run": dry_run, "orphans": [msgspec.to_builtins(orphan) for orphan in found]})
        return
    for orphan in found:
        size = "not finished" if orphan.size is None else f"{orphan.size:,} bytes"
        common.out(
            common.clean(f"perdure:artifact/{orphan.artifact}: run {orphan.run_id}, call {orphan.call}, attempt {orphan.attempt}, {size}")
        )
    common.out(f"{'would delete' if dry_run else 'deleted'} {plural(len(found), 'orphan')}")


def _statuses(text: str) -> list[str]:
    wanted = [one.strip() for one in text.split(",") if one.strip()]
    if not wanted or not set(wanted) <= FINISHED:
        raise InvalidInput(
            f"--status {text!r:.60} is not the status of an ended run; one or more of {', '.join(_ENDED)}, with commas between"
        )
    return wanted


def _progress(done: Pruned) -> None:
    common.note(f"pruned {plural(done.runs, 'run')} so far")


def _silent(done: Pruned) -> None:
    """Show no progress. Used with --json, so that stderr stays empty for programs."""
