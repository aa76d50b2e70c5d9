"""`perdure worker`: serve the queues until SIGTERM or SIGINT, then drain."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from perdure.cli import common
from perdure.cli.driving import log_to_stderr, stop_on_signals
from perdure.cli.target import Target, load_targets, with_children
from perdure.core.identity import check_id
from perdure.errors import InvalidInput, StoreUnavailable
from perdure.inspect.text import plural
from perdure.settings import Settings
from perdure.store.api import Served
from perdure.store.open import is_postgres
from perdure.store.url import shown_url

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 5.0  # the pause between two attempts to connect to the server


@click.command("worker")
@click.argument("targets", metavar="TARGET…", nargs=-1, required=True)
@click.option("--tools", metavar="FILE.py", help="The file with the tools of the plans among the TARGETs.")
@click.option("--concurrency", type=int, metavar="N", help="How many runs to drive at a time.")
@click.option("--queue", "queues", multiple=True, metavar="Q", help="Serve only this queue; may be repeated. Default: all.")
@click.option(
    "--drain-timeout", "drain_timeout_s", type=float, metavar="S", help="Seconds that runs get to reach a step boundary after a signal."
)
@click.option(
    "--audit-log", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="Append every event to FILE, as JSON lines."
)
@common.url_option
def command(
    targets: tuple[str, ...],
    tools: str | None,
    concurrency: int | None,
    queues: tuple[str, ...],
    drain_timeout_s: float | None,
    audit_log: Path | None,
    url: str | None,
) -> int:
    """Serve the agents of each TARGET until SIGTERM or SIGINT, then drain.

    A TARGET is FILE.py, FILE.py:NAME, package.module:NAME or PLAN.toml. Without a name every agent of the module is
    served. A second signal ends the worker at once.
    """
    wanted = [check_id(queue, "--queue") for queue in dict.fromkeys(queues)] or None
    settings = common.settings_with(url=url, concurrency=concurrency, drain_timeout_s=drain_timeout_s)
    log_to_stderr(logging.INFO)
    served = [one for target in targets for one in load_targets(target, tools)]
    _check_names(served)
    asyncio.run(_serve(settings, served, wanted, audit_log))
    return common.SUCCEEDED


async def _serve(settings: Settings, served: list[Target], queues: list[str] | None, audit_log: Path | None) -> None:
    """Serve until a signal. If a PostgreSQL server is unavailable, wait for the server. Other errors are raised."""
    stop = stop_on_signals(asyncio.get_running_loop())
    since_s, pause_s = None, FIRST_PAUSE_S
    while True:
        try:
            await _serve_once(settings, served, queues, audit_log, stop, since_s)
            break
        except StoreUnavailable as error:
            if not is_postgres(settings.url) or stop.is_set():
                raise
            if since_s is None:
                since_s = time.monotonic()
                common.note(common.clean(f"perdure: waiting for the database: {error.in_full()}"))
            await asyncio.wait([stopping := asyncio.ensure_future(stop.wait())], timeout=pause_s)
            stopping.cancel()
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            if stop.is_set():
                break
    common.note("perdure: drained")


async def _serve_once(
    settings: Settings, served: list[Target], queues: list[str] | None, audit_log: Path | None, stop: asyncio.Event, since_s: float | None
) -> None:
    from perdure.app import Perdure

    async with Perdure(agents=with_children(one.agent for one in served), settings=settings, audit_log=audit_log, queues=queues) as app:
        facts = app.reading.facts()
        if since_s is not None:
            common.note(f"perdure: the database is available after {time.monotonic() - since_s:.0f} s")
        for line in _banner(settings, served, list(app.versions), queues, facts):
            common.note(common.clean(f"perdure: {line}"))
        # Modules, agents and the open store stay in memory until the process ends. gc.freeze makes each full garbage
        # collection skip these objects. Without it, garbage collection would take a twentieth of the time of a busy
        # worker.
        gc.collect()
        gc.freeze()
        await app.work(stop=stop)


def _banner(
    settings: Settings, served: list[Target], versions: Sequence[Served], queues: list[str] | None, facts: dict[str, str]
) -> Iterator[str]:
    """The lines that the worker prints at its start: the agents that it serves, and its database."""
    for one in served:
        yield f"serving {one.agent.name}@{one.agent.version} ({one.recorded})"
    named = {(one.agent.name, one.agent.version) for one in served}
    for other in versions:
        if (other.agent, other.version) not in named:
            yield f"serving {other.agent}@{other.version} (a child of the agents above)"
    place = f"{facts['database']}, schema {facts['schema']}" if is_postgres(settings.url) else shown_url(settings.url)
    library = f"server {facts['server']}" if is_postgres(settings.url) else f"SQLite {facts['sqlite']}"
    only = f"{plural(len(queues), 'queue')} alone: {', '.join(queues)}" if queues else "all queues"
    yield (
        f"worker {socket.gethostname()}:{os.getpid()} on {place} ({library}, schema version {facts['schema_version']}); {only}, "
        f"{plural(settings.concurrency, 'run')} at a time, lease {settings.lease_s:g} s; SIGTERM drains it"
    )


def _check_names(served: list[Target]) -> None:
    """InvalidInput if two different agents have the same name: each agent would get runs of the other agent."""
    by_name: dict[str, Target] = {}
    for one in served:
        other = by_name.setdefault(one.agent.name, one)
        if other.agent is not one.agent:
            raise InvalidInput(
                f"{other.recorded} and {one.recorded} are both agent {one.agent.name!r}; serve them from two workers, or rename one"
            )
