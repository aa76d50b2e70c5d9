"""`perdure list`: runs, newest first."""

from __future__ import annotations

from typing import Any, get_args

import click

from perdure.cli import common
from perdure.inspect.words import clip, span
from perdure.store.api import Filter, RunRow, Status, WorkerRow


@click.command("list")
@click.option("--status", type=click.Choice(get_args(Status)), help="Only runs with this status.")
@click.option("--agent", metavar="NAME", help="Only runs of this agent.")
@click.option("--tenant", metavar="NAME", help="Only runs of this tenant.")
@click.option("--limit", type=click.IntRange(min=1, max=1_000_000), default=50, show_default=True, metavar="N", help="At most so many.")
@common.url_option
@common.json_option
def command(status: str | None, agent: str | None, tenant: str | None, limit: int, url: str | None, as_json: bool) -> None:
    """Runs, newest first. `perdure why RUN` tells all about one of them."""
    settings = common.settings_with(url=url)
    now = common.now_us()
    with common.existing_store(url) as store:
        rows = store.list(Filter(status, agent, tenant, limit + 1))
        workers = {worker.worker: worker for worker in store.workers(now, round(settings.lease_s * 1e6))}
    shown, more = rows[:limit], len(rows) > limit
    if as_json:
        for row in shown:
            common.out_json(_record(row))
        return
    if not shown:
        common.note(
            "no runs"
            + (" that match" if status or agent or tenant else f" yet: perdure run FILE.py:agent{common.url_words(url)} starts one")
        )
        return
    common.table(("run", "status", "agent", "waiting for / error", "events", "age", "worker"), [_cells(row, workers, now) for row in shown])
    if more:
        wider = f"perdure list --limit {limit * 10}{common.url_words(url)}"
        common.note(f"the newest {limit} are shown; more: {wider}, or narrow it with --status, --agent, --tenant")


def _cells(row: RunRow, workers: dict[str, WorkerRow], now: int) -> tuple[str, ...]:
    about = row.error if row.status in ("failed", "needs_attention") else row.waiting_for
    return (
        row.run_id,
        row.status,
        f"{row.agent}@{row.version}",
        clip(about or "", 60),
        f"{row.seq:,}",
        span(now - row.created_at),
        _worker(row, workers),
    )


def _worker(row: RunRow, workers: dict[str, WorkerRow]) -> str:
    if row.holder is None:
        return ""
    worker = workers.get(row.holder)
    if worker is None:
        return f"{row.holder} (gone)"
    return worker.name if worker.alive else f"{worker.name} (dead)"


def _record(row: RunRow) -> dict[str, Any]:
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
    }
