"""`perdure list`: runs, newest first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_args

import click

from perdure.cli import common
from perdure.cli.list_workers import show_crew
from perdure.cli.serving import gap, stranded, unserved
from perdure.core.suspects import Group
from perdure.errors import InvalidInput
from perdure.inspect.serving import name_of
from perdure.inspect.suspects import deaths_words, suspect_words, waits_as_suspect
from perdure.inspect.words import clip, clock, span
from perdure.store.api import Filter, RunRow, Status, WorkerRow


@click.command("list")
@click.option("--status", type=click.Choice(get_args(Status)), help="Only runs with this status.")
@click.option("--agent", metavar="NAME", help="Only runs of this agent.")
@click.option("--tenant", metavar="NAME", help="Only runs of this tenant.")
@click.option(
    "--unserved", "stuck", is_flag=True, help="Only unfinished runs that no live worker can go on with, or whose worker is dead or silent."
)
@click.option("--workers", "who_works", is_flag=True, help="Instead of runs: who works on what, and what waits for them, by queue.")
@click.option("--limit", type=click.IntRange(min=1, max=1_000_000), default=50, show_default=True, metavar="N", help="At most so many.")
@common.url_option
@common.json_option
def command(
    status: str | None, agent: str | None, tenant: str | None, stuck: bool, who_works: bool, limit: int, url: str | None, as_json: bool
) -> None:
    """Runs, newest first. `perdure why RUN` tells all about one of them."""
    settings = common.settings_with(url=url)
    if who_works:
        if status or agent or tenant or stuck:
            raise InvalidInput("--workers lists no runs, so that nothing about runs can be asked for with it; use one of them")
        show_crew(settings, as_json)
        return
    wanted = Filter(status, agent, tenant, limit + 1)
    with common.existing_runs(url) as store:
        now = common.now_at(store)
        workers = store.workers(now, round(settings.lease_s * 1e6))
        rows = unserved(store, workers, wanted) if stuck else store.list(wanted)
        groups = store.suspects()
    shown = rows[:limit]
    if as_json:
        for row in shown:
            common.out_json(_record(row, workers, groups, now))
        return
    if not shown:
        how = f" yet: perdure run FILE.py:agent{common.url_words(url)} starts one"
        common.note("no runs" + (" that match" if status or agent or tenant or stuck else how))
        return
    headers = ("run", "status", "agent", "waiting for / error", "events", "age", "worker")
    common.table(headers, [_cells(row, workers, groups, now, stuck) for row in shown])
    if len(rows) > limit:
        wider = f"perdure list --limit {limit * 10}{common.url_words(url)}"
        common.note(f"the newest {limit} are shown; more: {wider}, or narrow it with --status, --agent, --tenant")


def _cells(row: RunRow, workers: Sequence[WorkerRow], groups: Mapping[str, Group], now: int, stuck: bool) -> tuple[str, ...]:
    return (
        row.run_id,
        row.status,
        f"{row.agent}@{row.version}",
        _about(row, workers, groups, now, stuck),
        f"{row.seq:,}",
        span(now - row.created_at),
        _worker(row, workers),
    )


def _about(row: RunRow, workers: Sequence[WorkerRow], groups: Mapping[str, Group], now: int, stuck: bool) -> str:
    """What it waits for or has come to; and why nobody goes on with it, where it is ready or that was asked for."""
    own = row.error if row.status in ("failed", "needs_attention") else row.waiting_for
    if row.status == "queued" and row.ready_at is not None and row.ready_at > now:
        own = f"not before {clock(row.ready_at, now)}"
    nobody = gap(row, workers) if stuck else stranded(row, workers, now)
    suspect = f"a suspect: {deaths_words(row)}" if waits_as_suspect(row, workers, groups, now) else None
    return "; ".join(words for words in (clip(own or "", 60), nobody, suspect) if words)


def _worker(row: RunRow, workers: Sequence[WorkerRow]) -> str:
    if row.holder is None:
        return ""
    worker = next((worker for worker in workers if worker.worker == row.holder), None)
    if worker is None:
        return "gone"
    return worker.name if worker.alive else f"{worker.name} (dead)"


def _record(row: RunRow, workers: Sequence[WorkerRow], groups: Mapping[str, Group], now: int) -> dict[str, Any]:
    return {
        "run_id": row.run_id,
        "agent": row.agent,
        "version": row.version,
        "tenant": row.tenant,
        "actor": row.actor,
        "status": row.status,
        "waiting_for": row.waiting_for,
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
