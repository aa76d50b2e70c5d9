"""`perdure list`: the runs, newest first. With --workers: the workers and the queues."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, get_args

import click
import msgspec

from perdure import shell
from perdure.cli import common
from perdure.cli.serving import gap, stranded, unserved
from perdure.core.codec import decode
from perdure.core.events import RunCreated, RunForked
from perdure.core.query import EVERYTHING, GROUPS, Query, checked_group, parse_query
from perdure.core.suspects import Group
from perdure.engine.api import Reading
from perdure.errors import InvalidInput, StoreCorrupt
from perdure.inspect.text import clip, clock, moment, plural, progress_words, span, versioned
from perdure.inspect.view import failure_record
from perdure.inspect.workers import Crew, Lag, WorkerView, crew, deaths_words, name_of, suspect_words, waits_as_suspect
from perdure.settings import Settings
from perdure.store.api import FINISHED, Current, RunRow, Status, WorkerRow

_PAGE = 500  # of how many runs the beginning is read at once


# -- `perdure list --workers`


def show_crew(settings: Settings, as_json: bool) -> None:
    """Print the workers with their leases, then the queues. With --json: one object per line, each with a `kind`."""
    with common.existing_runs(settings.url) as store:
        now = common.now_at(store)
        found = crew(store, now, round(settings.lease_s * 1e6), settings.queues)
    if as_json:
        for kind, rows in (("worker", found.workers), ("queue", found.queues)):
            for row in rows:
                record: dict[str, Any] = msgspec.to_builtins(row)
                common.out_json({"kind": kind, **record})
        return
    _print(found, now)


def _print(found: Crew, now: int) -> None:
    if found.workers:
        common.table(("worker", "state", "since", "lease", "runs", "serves", "queues"), [_member(one, now) for one in found.workers])
    else:
        common.note("there is no worker: perdure worker FILE.py starts one")
    if found.queues:
        common.out()
        common.table(("queue", "ready", "oldest waits", "held", "tenants"), [_queue(one) for one in found.queues])
    else:
        common.note("no run is ready, and none is held")


def _member(one: WorkerView, now: int) -> tuple[str, ...]:
    silent = span(round(one.silent_s * 1e6))
    left = span(round(one.lease_left_s * 1e6))
    return (
        one.name,
        "alive" if one.alive else "dead" if one.dead else f"silent for {silent}",
        moment(one.since, now),
        f"{left} left" if one.alive else "ran out" if one.lease_left_s <= 0 else f"{left} left, but its runs can be claimed",
        f"{one.runs:,}",
        ", ".join(one.serves) or "nothing",
        "all" if one.queues is None else ", ".join(one.queues),
    )


def _queue(one: Lag) -> tuple[str, ...]:
    held = f"{one.held:,}" if one.limit is None else f"{one.held:,} of {one.limit:,}"
    return (one.queue, f"{one.ready:,}", span(round(one.waited_s * 1e6)) if one.ready else "–", held, plural(one.tenants, "tenant"))


# -- `perdure list`


@click.command("list")
@click.option("--status", type=click.Choice(get_args(Status)), help="Only runs with this status.")
@click.option("--agent", metavar="NAME", help="Only runs of this agent.")
@click.option("--tenant", metavar="NAME", help="Only runs of this tenant.")
@common.where_option("Only runs that match all terms of the query:")
@click.option(
    "--unserved", "stuck", is_flag=True, help="Only unfinished runs that no live worker can go on with, or whose worker is dead or silent."
)
@click.option("--workers", "who_works", is_flag=True, help="Instead of runs: the workers with their leases, and the queues.")
@click.option("--count-by", metavar="WHAT", help=f"Instead of runs: how many there are, by {', '.join(GROUPS)} or label.KEY.")
@click.option("--sort", type=click.Choice(("created", "-created")), default="created", help="The newest first, or with - the oldest.")
@click.option("--after", metavar="CURSOR", help="The next page: go on after the run with this cursor.")
@click.option("--limit", type=click.IntRange(min=1, max=1_000_000), default=50, show_default=True, metavar="N", help="At most N runs.")
@common.url_option
@common.json_option
def command(
    status: str | None,
    agent: str | None,
    tenant: str | None,
    where: str | None,
    stuck: bool,
    who_works: bool,
    count_by: str | None,
    sort: str,
    after: str | None,
    limit: int,
    url: str | None,
    as_json: bool,
) -> None:
    """Runs, newest first. `perdure why RUN` tells all about one run."""
    settings = common.settings_with(url=url)
    narrowed = bool(status or agent or tenant or where is not None or stuck)
    if who_works:
        if narrowed or count_by is not None or after is not None:
            raise InvalidInput("--workers lists no runs, so leave out the options that select runs")
        show_crew(settings, as_json)
        return
    if stuck and (after is not None or sort != "created" or count_by is not None):
        raise InvalidInput("--unserved looks at each unfinished run, and goes with neither --after, --sort nor --count-by")
    with common.existing_runs(url) as store:
        now = common.now_at(store)
        query = (EVERYTHING if where is None else parse_query(where, now)).also(status=status, agent=agent, tenant=tenant)
        if count_by is not None:
            _count(store, query, checked_group(count_by, "--count-by"), limit, as_json)
            return
        workers = store.workers(now, round(settings.lease_s * 1e6))
        found: list[tuple[str, RunRow]]
        if stuck:
            found = [("", row) for row in islice(unserved(store, workers, query), limit + 1)]
        else:
            found = store.find(query, limit + 1, after, oldest_first=sort == "-created")
        groups = store.suspects()
        shown = [row for _, row in found[:limit]]
        run_ids = [row.run_id for row in shown]
        forks = _forks(store, shown)
        # Without --json, only the runs that have not ended say what they do.
        current = store.current(run_ids if as_json else [row.run_id for row in shown if row.status not in FINISHED])
        labels = store.labels(run_ids) if as_json else {}
    if as_json:
        for cursor, row in found[:limit]:
            beside = {"fork_of": forks.get(row.run_id), "labels": labels[row.run_id], "cursor": cursor}
            common.out_json(_record(row, workers, groups, now) | beside | _current(current[row.run_id]))
        return
    if not shown:
        how = f" yet: perdure run FILE.py:agent{common.url_words(url)} starts one"
        common.note("no runs" + (" that match" if narrowed else " after that one" if after is not None else how))
        return
    headers = ("run", "status", "agent", "waiting for / error", "events", "age", "worker")
    common.table(headers, [_cells(row, workers, groups, now, stuck, current.get(row.run_id), forks) for row in shown])
    if len(found) > limit:
        given = (
            ("--status", status),
            ("--agent", agent),
            ("--tenant", tenant),
            ("--where", where),
            ("--sort", sort if sort != "created" else None),
        )
        same = "".join(f" {option} {shell.quote(value)}" for option, value in given if value)
        more = f"--limit {limit * 10} --unserved" if stuck else f"--limit {limit} --after {found[limit - 1][0]}"
        end = "oldest" if sort == "-created" else "newest"
        those = "" if after is None else " of the rest"
        common.note(
            f"the {end} {limit}{those} are shown; more: perdure list{same} {more}{common.url_words(url)}, or narrow it with --where"
        )


def _count(store: Reading, query: Query, by: str, limit: int, as_json: bool) -> None:
    found = store.count(query, by, limit + 1)
    for group, number in list(found.items())[:limit]:
        if as_json:
            common.out_json({by: group, "runs": number})
    if as_json:
        return
    if not found:
        common.note("no runs that match")
        return
    common.table(
        (by, "runs"), [("–" if group is None else clip(group, 100), f"{number:,}") for group, number in list(found.items())[:limit]]
    )
    if len(found) > limit:
        common.note(f"the {limit} most frequent are shown; more: --limit {limit * 10}")


def _forks(store: Reading, rows: Sequence[RunRow]) -> dict[str, str]:
    """Each fork among these runs → the run that was forked. The journal of a live fork says so, its row does not."""
    found = {row.run_id: row.imported.fork_of for row in rows if row.imported is not None and row.imported.fork_of is not None}
    others = [row.run_id for row in rows if row.specimen is None and row.parent is None]
    for start in range(0, len(others), _PAGE):
        try:
            first = store.read_many(dict.fromkeys(others[start : start + _PAGE], 0), 1)
            copied = {
                run_id: event.body.inherited for run_id, some in first.items() for event in some if isinstance(event.body, RunCreated)
            }
            made = store.read_many({run_id: seq for run_id, seq in copied.items() if seq}, 1)
        except StoreCorrupt:
            continue  # the list is shown also if a journal is damaged: `perdure verify` tells about that
        found |= {run_id: event.body.parent for run_id, some in made.items() for event in some if isinstance(event.body, RunForked)}
    return found


def _cells(
    row: RunRow,
    workers: Sequence[WorkerRow],
    groups: Mapping[str, Group],
    now: int,
    stuck: bool,
    current: Current | None,
    forks: Mapping[str, str],
) -> tuple[str, ...]:
    fork = f"live fork of {forks[row.run_id]}" if row.specimen is None and row.run_id in forks else ""
    said = [] if current is None or current.said is None else [f"“{clip(current.said, 60)}”"]
    if current is not None:
        reported = [one for one in current.running if one.progress is not None]
        said += [f"call {one.call}: {progress_words(one.progress or b'', 60)}" for one in reported[:2]]
    return (
        row.run_id,
        row.status,
        versioned(row.agent, row.version),
        "; ".join(words for words in (fork, _about(row, workers, groups, now, stuck), *said) if words),
        f"{row.seq:,}",
        span(now - row.created_at),
        _worker(row, workers),
    )


def _about(row: RunRow, workers: Sequence[WorkerRow], groups: Mapping[str, Group], now: int, stuck: bool) -> str:
    """What the run waits for, or its error. If the run is ready, or with --unserved: also why no worker claims it."""
    imported = row.imported
    if imported is not None:
        kind = "specimen" if imported.fork_of is None else f"rehearsal, fork of {imported.fork_of}"
        return "; ".join(words for words in (kind, clip(row.error or row.waiting_for or "", 60)) if words)
    own = row.error if row.status in ("failed", "needs_attention") else row.waiting_for
    if row.status == "queued" and row.ready_at is not None and row.ready_at > now:
        own = f"not before {clock(row.ready_at, now)}"
    unclaimed = gap(row, workers) if stuck else stranded(row, workers, now)
    suspect = f"a suspect: {deaths_words(row)}" if waits_as_suspect(row, workers, groups, now) else None
    return "; ".join(words for words in (clip(own or "", 60), unclaimed, suspect) if words)


def _worker(row: RunRow, workers: Sequence[WorkerRow]) -> str:
    if row.holder is None:
        return ""
    worker = next((worker for worker in workers if worker.worker == row.holder), None)
    if worker is None:
        return "gone"
    return worker.name if worker.alive else f"{worker.name} ({'dead' if worker.dead else 'silent'})"


def _current(now: Current) -> dict[str, Any]:
    running = [
        {
            "call": one.call,
            "tool": one.tool,
            "attempt": one.attempt,
            "since": common.iso(one.since),
            "progress": None if one.progress is None else decode(one.progress),
        }
        for one in now.running
    ]
    return {"said": now.said, "failure": failure_record(now.failure), "running": running}


def _record(row: RunRow, workers: Sequence[WorkerRow], groups: Mapping[str, Group], now: int) -> dict[str, Any]:
    return {
        "run_id": row.run_id,
        "agent": row.agent,
        "version": row.version,
        "tenant": row.tenant,
        "actor": row.actor,
        "status": row.status,
        "specimen": row.specimen is not None,
        "waiting_for": row.waiting_for,
        "attention": row.attention,
        "error": row.error,
        "created_at": common.iso(row.created_at),
        "updated_at": common.iso(row.updated_at),
        "seq": row.seq,
        "epoch": row.epoch,
        "worker": row.holder,
        "worker_name": None if row.holder is None else name_of(row.holder, workers),
        "queue": row.queue,
        "priority": row.priority,
        "parent": row.parent,
        "ready_at": None if row.ready_at is None else common.iso(row.ready_at),
        "unserved": gap(row, workers),
        "suspect": suspect_words(row, workers, groups) if waits_as_suspect(row, workers, groups, now) else None,
    }
