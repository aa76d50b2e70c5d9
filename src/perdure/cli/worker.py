"""`perdure worker`: serve the queues until SIGTERM or SIGINT, then drain."""

from __future__ import annotations

import asyncio
import gc
import inspect
import logging
import os
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import click

from perdure.app import Perdure
from perdure.cli import common
from perdure.cli.driving import stop_on_signals
from perdure.cli.target import Target, load_function, load_targets, with_children
from perdure.core.identity import check_id
from perdure.errors import InvalidInput, StoreUnavailable
from perdure.inspect.text import plural
from perdure.logs import json_message, log_to_stderr
from perdure.metrics import MetricsServer
from perdure.settings import Settings
from perdure.store.api import Served
from perdure.store.open import is_postgres
from perdure.store.url import shown_url

log = logging.getLogger("perdure.worker")
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
@click.option("--http", metavar="HOST:PORT", help="Serve /metrics, /livez and /readyz there, such as 127.0.0.1:9464.")
@click.option(
    "--log-format", type=click.Choice(["text", "json"]), help="Log also what agents, tools and libraries log, each line with its run."
)
@click.option(
    "--setup",
    "setups",
    multiple=True,
    metavar="FILE.py:FUNCTION",
    help="Call this function at the start; if it returns a context manager, leave that at the end. May be repeated.",
)
@common.url_option
def command(
    targets: tuple[str, ...],
    tools: str | None,
    concurrency: int | None,
    queues: tuple[str, ...],
    drain_timeout_s: float | None,
    audit_log: Path | None,
    http: str | None,
    log_format: str | None,
    setups: tuple[str, ...],
    url: str | None,
) -> int:
    """Serve the agents of each TARGET until SIGTERM or SIGINT, then drain.

    A TARGET is FILE.py, FILE.py:NAME, package.module:NAME or PLAN.toml. Without a name every agent of the module is
    served. A second signal ends the worker at once.
    """
    wanted = [check_id(queue, "--queue") for queue in dict.fromkeys(queues)] or None
    settings = common.settings_with(url=url, concurrency=concurrency, drain_timeout_s=drain_timeout_s, log_format=log_format)
    served = [one for target in targets for one in load_targets(target, tools)]
    _check_names(served)
    hooks = [(target, load_function(target)) for target in setups]
    if settings.log_format:
        os.environ["PERDURE_LOG_FORMAT"] = settings.log_format  # for the processes of isolated tools
    log_to_stderr(settings.log_format, logging.INFO)
    asyncio.run(_serve(settings, served, wanted, audit_log, http, hooks))
    return common.SUCCEEDED


async def _serve(
    settings: Settings,
    served: list[Target],
    queues: list[str] | None,
    audit_log: Path | None,
    http: str | None,
    hooks: list[tuple[str, Callable[[], Any]]],
) -> None:
    """Serve until a signal. If a PostgreSQL server is unavailable, wait for the server. Other errors are raised."""
    as_json = settings.log_format == "json"
    stop = stop_on_signals(asyncio.get_running_loop(), json_message) if as_json else stop_on_signals(asyncio.get_running_loop())
    say = log.info if as_json else _note
    async with AsyncExitStack() as stack:
        server: MetricsServer | None = None
        if http is not None:
            # First of all: the probes are answered while the hooks begin, and while the worker waits for its database.
            server = stack.enter_context(MetricsServer(None, http, stuck_s=settings.lease_s))
            say(f"metrics on http://{http.rpartition(':')[0]}:{server.port}/metrics")
        for target, hook in hooks:
            await stack.enter_async_context(_set_up(target, hook))
        await _serve_when_available(settings, served, queues, audit_log, stop, server, say)
    say("drained")


async def _serve_when_available(
    settings: Settings,
    served: list[Target],
    queues: list[str] | None,
    audit_log: Path | None,
    stop: asyncio.Event,
    server: MetricsServer | None,
    say: Callable[[str], None],
) -> None:
    since_s, pause_s = None, FIRST_PAUSE_S
    while True:
        try:
            async with Perdure(
                agents=with_children(one.agent for one in served), settings=settings, audit_log=audit_log, queues=queues
            ) as app:
                if since_s is not None:
                    say(f"the database is available after {time.monotonic() - since_s:.0f} s")
                for line in _banner(settings, served, list(app.versions), queues, app.reading.facts()):
                    say(line)
                if server is not None:
                    server.show(app, works=True)
                # Modules, agents and the open store stay in memory until the process ends. gc.freeze makes each full
                # garbage collection skip these objects. Without it, garbage collection would take a twentieth of the
                # time of a busy worker.
                gc.collect()
                gc.freeze()
                await app.work(stop=stop)
                if server is not None:
                    server.show(None, "the worker has ended")
            return
        except StoreUnavailable as error:
            if not is_postgres(settings.url) or stop.is_set():
                raise
            if server is not None:
                server.show(None, "the worker waits for its database")
            if since_s is None:
                since_s = time.monotonic()
                say(f"waiting for the database: {error.in_full()}")
            await asyncio.wait([stopping := asyncio.ensure_future(stop.wait())], timeout=pause_s)
            stopping.cancel()
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            if stop.is_set():
                return


def _note(line: str) -> None:
    common.note(common.clean(f"perdure: {line}"))


@asynccontextmanager
async def _set_up(target: str, hook: Callable[[], Any]) -> AsyncIterator[None]:
    """Call the hook. If it returns a context manager, enter it now and leave it at the end.

    It is left without an exception, also if the worker fails: what the hook does at the end must happen then too.
    """
    leave: Callable[[None, None, None], Any] | None = None
    try:
        found = hook()
        if inspect.isgenerator(found) or inspect.isasyncgen(found):
            raise InvalidInput("it is a generator; decorate it with @contextlib.contextmanager or @contextlib.asynccontextmanager")
        if inspect.isawaitable(found):
            found = await found
        if isinstance(found, AbstractAsyncContextManager):
            await found.__aenter__()
            leave = found.__aexit__
        elif isinstance(found, AbstractContextManager):
            found.__enter__()
            leave = found.__exit__
    except Exception as error:
        raise common.ExitWith(f"--setup {target}: the worker does not start: {_said(error)}", common.FAILED) from error
    try:
        yield
    finally:
        if leave is not None:
            try:
                left = leave(None, None, None)
                if inspect.isawaitable(left):
                    await left
            except Exception as error:
                raise common.ExitWith(f"--setup {target}: at the end of the worker: {_said(error)}", common.FAILED) from error


def _said(error: Exception) -> str:
    return str(error) if isinstance(error, InvalidInput) else f"{type(error).__name__}: {error}"


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
