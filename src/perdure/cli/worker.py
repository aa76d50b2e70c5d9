"""`perdure worker`: serve the queue until a signal, then drain."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from pathlib import Path

import click

from perdure.cli import common
from perdure.cli.driving import log_to_stderr, stop_on_signals
from perdure.cli.target import Target, load_targets, with_children
from perdure.core.keys import check_id
from perdure.errors import InvalidInput
from perdure.inspect.words import plural
from perdure.settings import Settings
from perdure.store.url import shown_url


@click.command("worker")
@click.argument("targets", metavar="TARGET…", nargs=-1, required=True)
@click.option("--concurrency", type=int, metavar="N", help="Runs that it drives at a time.")
@click.option("--queue", "queues", multiple=True, metavar="Q", help="Serve only this queue; may be repeated. Default: all.")
@click.option(
    "--drain-timeout", "drain_timeout_s", type=float, metavar="S", help="Seconds that runs get to reach a step boundary after a signal."
)
@click.option(
    "--audit-log", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="Append every event to it, as JSON lines."
)
@common.url_option
def command(
    targets: tuple[str, ...],
    concurrency: int | None,
    queues: tuple[str, ...],
    drain_timeout_s: float | None,
    audit_log: Path | None,
    url: str | None,
) -> int:
    """Serve the agents of each TARGET (FILE.py, FILE.py:NAME or package.module:NAME) until SIGTERM or SIGINT, then drain.

    A TARGET without a name serves every agent of its module. A second signal ends it at once.
    """
    wanted = [check_id(queue, "--queue") for queue in dict.fromkeys(queues)] or None
    settings = common.settings_with(url=url, concurrency=concurrency, drain_timeout_s=drain_timeout_s)
    log_to_stderr(logging.INFO)
    served = [one for target in targets for one in load_targets(target)]
    _check_names(served)
    asyncio.run(_serve(settings, served, wanted, audit_log))
    return common.SUCCEEDED


async def _serve(settings: Settings, served: list[Target], queues: list[str] | None, audit_log: Path | None) -> None:
    from perdure.app import Perdure

    stop = stop_on_signals(asyncio.get_running_loop())
    async with Perdure(agents=with_children(one.agent for one in served), settings=settings, audit_log=audit_log, queues=queues) as app:
        for one in served:
            common.note(common.clean(f"perdure: serving {one.agent.name}@{one.agent.version} ({one.recorded})"))
        only = f", of {plural(len(queues), 'queue')} alone: {', '.join(queues)}" if queues else ""
        common.note(
            common.clean(f"perdure: worker {socket.gethostname()}:{os.getpid()} on {shown_url(settings.url)}{only}; SIGTERM drains it")
        )
        await app.work(stop=stop)
    common.note("perdure: drained")


def _check_names(served: list[Target]) -> None:
    """Two different agents of one name would get each other's runs."""
    by_name: dict[str, Target] = {}
    for one in served:
        other = by_name.setdefault(one.agent.name, one)
        if other.agent is not one.agent:
            raise InvalidInput(
                f"{other.recorded} and {one.recorded} are both agent {one.agent.name!r}; serve them from two workers, or rename one"
            )
