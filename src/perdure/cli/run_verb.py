"""`perdure run`: start a run, or resume the run with this id, and drive the run in this process."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence
from typing import Any, NamedTuple, get_args

import click
import msgspec

from perdure import shell
from perdure.agent import Agent
from perdure.cli import common
from perdure.cli.driving import check_version, drive, drive_or_follow, finish
from perdure.cli.plan_order import show_order
from perdure.cli.target import Target, load_target, resume_command, with_children
from perdure.cli.times import parse_future
from perdure.core import codec
from perdure.core.budget import micros
from perdure.core.events import Limits, OnExceed
from perdure.core.times import utc
from perdure.errors import Conflict, InvalidInput, StoreUnavailable
from perdure.inspect.view import begins_later
from perdure.logs import log_to_stderr
from perdure.settings import Settings
from perdure.store.api import FINISHED, RunRow
from perdure.store.open import is_postgres
from perdure.store.postgres.driver import require_psycopg


@click.command("run")
@click.argument("target", metavar="TARGET")
@click.argument("pairs", metavar="[KEY=VALUE | KEY:=JSON]…", nargs=-1)
@click.option(
    "--input",
    "input_text",
    metavar="JSON",
    help="The input: an object is keyword arguments, a list is positional arguments, any other value is one argument.",
)
@click.option("--tools", metavar="FILE.py", help="The file with the tools of a plan (TARGET.toml or .json).")
@click.option("--check", is_flag=True, help="Only check the plan, with the arguments if there are any, and print the order of its steps.")
@click.option("--id", "run_id", metavar="ID", help="The run's id. If a run with this id and the same input exists, it is resumed.")
@click.option("--after", metavar="RUN", help="Continue the conversation of a ReAct run that has ended, in a new run.")
@click.option("--tenant", default="default", show_default=True)
@click.option("--actor", metavar="WHO", help="The person or program for whom the agent acts.")
@common.label_option
@click.option("--queue", metavar="Q", help='The queue of the run. Default: the agent\'s, else "default".')
@click.option("--priority", type=int, default=0, metavar="N", help="In a queue, of one tenant's runs, the highest goes first.")
@click.option("--not-before", metavar="T", help="Do not begin before: 10m, 2h, 1d from now, or an ISO time (UTC if it names no zone).")
@click.option("--budget-usd", metavar="X", help="Dollars that the run and its children may spend together.")
@click.option(
    "--on-exceed",
    type=click.Choice(get_args(OnExceed)),
    help="When the budget is used up: pause until the budget is raised, or fail the call. Default: as the agent declares.",
)
@click.option(
    "--version", metavar="V", help="Only this version of the agent may begin the run. Default: that of the worker that claims it."
)
@click.option("--detach", is_flag=True, help="Only start the run, for a worker to drive, and print its id.")
@click.option(
    "--no-wait", is_flag=True, help="Exit with code 3 at any wait, also for timers and retries; with 8 if a worker holds the run."
)
@common.url_option
@common.json_option
def command(
    target: str,
    pairs: tuple[str, ...],
    input_text: str | None,
    tools: str | None,
    check: bool,
    run_id: str | None,
    after: str | None,
    tenant: str,
    actor: str | None,
    labels: tuple[str, ...],
    queue: str | None,
    priority: int,
    not_before: str | None,
    budget_usd: str | None,
    on_exceed: OnExceed | None,
    version: str | None,
    detach: bool,
    no_wait: bool,
    url: str | None,
    as_json: bool,
) -> int:
    """Start TARGET (FILE.py:NAME, package.module:NAME, or a plan in FILE.toml), and drive it here until it finishes.

    This process waits for the run's timers and retries, and while another worker holds the run. It exits with code 3
    when only something from outside can wake the run.
    """
    settings = common.settings_with(url=url)
    args, kwargs = arguments(pairs, input_text)
    log_to_stderr("", logging.WARNING)
    loaded = load_target(target, tools)
    if check:
        given = (args, kwargs) if pairs or input_text is not None else None
        return show_order(loaded.agent, target, given, as_json=as_json)
    if after is not None:
        kwargs["history"] = _history(settings, loaded.agent, kwargs, after, tenant)
    encoded = loaded.agent.bind(args, kwargs)
    start: dict[str, Any] = {"id": run_id, "tenant": tenant, "actor": actor, "queue": queue, "priority": priority, "version": version}
    start |= {"labels": common.labels_of(labels)}
    typed = " ".join([shell.quote(target), *([] if tools is None else ["--tools", shell.quote(tools)])])
    at = None if not_before is None else parse_future(not_before, common.now_us(), "--not-before")
    wanted = _Wanted(loaded, encoded, at, {**start, "budget": budget_of(loaded.agent.budget, budget_usd, on_exceed)}, typed)
    made = _place_without_journal(settings)
    if made is not None:
        common.open_with(settings).close()
        common.note(common.clean(f"perdure: made a new journal in {made}"))
    return asyncio.run(_run(settings, wanted, detach=detach, wait=not no_wait, url=url, as_json=as_json))


def _history(settings: Settings, agent: Agent[Any, Any], kwargs: dict[str, Any], after: str, tenant: str) -> Any:
    """The conversation of the run `after`."""
    from perdure.app import Perdure

    if "history" not in agent.parameter_names:
        raise InvalidInput(f"--after {after}: agent {agent.name} cannot continue a conversation: it takes no `history`. ReAct agents do")
    if "history" in kwargs:
        raise InvalidInput(f"--after {after} and history both give the conversation to continue; use one of them")

    async def read() -> Any:
        async with Perdure(settings=settings) as app:
            found = await app.handle(after, tenant=tenant).row()
            if found.status not in FINISHED:
                state = found.status.replace("_", " ")
                raise Conflict(f"run {after} is {state}: its conversation is not over. Wait for its end, or cancel it")
            return await app.transcript(after, tenant=tenant)

    return asyncio.run(read())


def _place_without_journal(settings: Settings) -> str | None:
    """The name of the PostgreSQL database and schema, if the schema has no journal yet; else None.

    When `run` creates a new journal, it tells the user, because the URL may be wrong.
    """
    if not is_postgres(settings.url):
        return None
    require_psycopg()
    from perdure.store.postgres.health import schema_version

    try:
        where, version = schema_version(settings.url, settings.answer_s)
    except StoreUnavailable:
        return None  # the server may be starting: the app waits for the server
    return None if version else where


def budget_of(declared: Limits | None, usd: str | None, on_exceed: OnExceed | None) -> Limits | None:
    """The budget of the command line. Without --on-exceed, `on_exceed` comes from the agent's declared budget."""
    if usd is None and on_exceed is None:
        return None
    if usd is not None:
        limits = Limits(usd_micros=micros(usd, "--budget-usd"), on_exceed="pause" if declared is None else declared.on_exceed)
    elif declared is not None:
        limits = declared
    else:
        raise InvalidInput(f"--on-exceed {on_exceed}: the agent declares no budget that could be exceeded; name one with --budget-usd")
    return limits if on_exceed is None else msgspec.structs.replace(limits, on_exceed=on_exceed)


class _Wanted(NamedTuple):
    """The run to start."""

    target: Target
    encoded_input: bytes
    not_before: int | None
    options: dict[str, Any]
    given: str  # the TARGET that the user typed, quoted


async def _run(settings: Settings, wanted: _Wanted, *, detach: bool, wait: bool, url: str | None, as_json: bool) -> int:
    from perdure.app import Perdure

    agent, recorded = wanted.target
    async with Perdure(agents=with_children([agent]), settings=settings) as app:
        not_before = None if wanted.not_before is None else utc(wanted.not_before)
        options = {**wanted.options, "trace": os.environ}  # TRACEPARENT and TRACESTATE, as OpenTelemetry names them
        handle = await app.start_encoded(agent, wanted.encoded_input, target=recorded, not_before=not_before, **options)
        row = await handle.row()
        if detach:
            _started(row, resume_command(app.reading, row, settings.url, url), common.now_at(app.reading), as_json)
            return common.SUCCEEDED
        if wanted.options["id"] is None:
            # Print the id before the agent acts: after a crash, the user needs this id to find the run.
            common.note(f"perdure: run {handle.id}; if this process ends first: {resume_command(app.reading, row, settings.url, url)}")
        await check_version(app, row, wanted.given)
        # Do not requeue a run that needs a person: a script may run this command twice. `resume` and `unpause` requeue
        # such a run. The run's own `not_before` counts, even if an earlier command has created the run.
        begins = (row.ready_at or 0) if begins_later(row, common.now_at(app.reading)) else 0
        if row.status not in ("needs_attention", "paused") and wait:
            row = await drive_or_follow(app, handle.id, not_before=begins)
        elif row.status not in ("needs_attention", "paused") and not begins:
            row = await drive(app, handle.id, wait=False)
        return finish(app, row, as_json=as_json, url=url)


def _started(row: RunRow, resume: str, now: int, as_json: bool) -> None:
    run_id, status = row.run_id, row.status
    if as_json:
        common.out_json({"run_id": run_id, "status": status, "output": None, "error": None})
    else:
        common.out(run_id)
    if status in FINISHED:
        common.note(f"perdure: run {run_id} exists already and is {status}; its result: {resume}")
    elif begins_later(row, now):
        at = common.iso(row.ready_at or 0)
        common.note(f"perdure: run {run_id} is {status}; a worker begins it at {at}, or now and here: {resume} --now")
    else:
        common.note(f"perdure: run {run_id} is {status}; a worker drives it, or here: {resume}")


def arguments(pairs: Sequence[str], input_text: str | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments from `key=value` pairs or from `--input`."""
    if input_text is not None:
        if pairs:
            raise InvalidInput(f"--input and {pairs[0]!r} both give the input; use one of them")
        value = codec.parse(input_text, "--input")
        if isinstance(value, dict):
            return (), value
        return (tuple(value), {}) if isinstance(value, list) else ((value,), {})
    named: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        as_json = key.endswith(":")
        key = key.removesuffix(":")
        if not equals or not key.isidentifier():
            raise InvalidInput(f"{pair!r} is not an argument; write key=value for text or key:=json for JSON")
        if key in named:
            raise InvalidInput(f"the argument {key!r} is given twice")
        named[key] = codec.parse(value, key) if as_json else value
    return (), named
