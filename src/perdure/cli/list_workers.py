"""`perdure list --workers`: who works on what, and what waits for them."""

from __future__ import annotations

from typing import Any

import msgspec

from perdure.cli import common
from perdure.inspect.crew import Crew, Lag, Member, crew
from perdure.inspect.words import moment, plural, span
from perdure.settings import Settings


def show_crew(settings: Settings, as_json: bool) -> None:
    """Workers with their leases, then queues with what is ready in them; with --json one object per line, told apart by `kind`."""
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
        common.table(("worker", "state", "since", "lease", "runs", "serves", "queues"), [_worker(one, now) for one in found.workers])
    else:
        common.note("no worker has signed on: perdure worker FILE.py starts one")
    if found.queues:
        common.out()
        common.table(("queue", "ready", "oldest waits", "held", "tenants"), [_queue(one) for one in found.queues])
    else:
        common.note("nothing is ready, and nobody holds a run")


def _worker(one: Member, now: int) -> tuple[str, ...]:
    silent = span(round(one.silent_s * 1e6))
    left = span(round(one.lease_left_s * 1e6))
    return (
        one.name,
        "alive" if one.alive else f"dead, or silent for {silent}",
        moment(one.since, now),
        f"{left} left" if one.alive else "ran out" if one.lease_left_s <= 0 else f"{left} left, and not waited for",
        f"{one.runs:,}",
        ", ".join(one.serves) or "nothing",
        "all" if one.queues is None else ", ".join(one.queues),
    )


def _queue(one: Lag) -> tuple[str, ...]:
    held = f"{one.held:,}" if one.limit is None else f"{one.held:,} of {one.limit:,}"
    return (one.queue, f"{one.ready:,}", span(round(one.waited_s * 1e6)) if one.ready else "–", held, plural(one.tenants, "tenant"))
