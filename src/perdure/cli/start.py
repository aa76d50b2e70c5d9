"""`perdure start`: start a run by its agent's name, without the agent's code. A worker drives the run."""

from __future__ import annotations

import asyncio
import os
from typing import Any, get_args

import click

from perdure import shell
from perdure.cli import common
from perdure.cli.run_verb import arguments, budget_of
from perdure.cli.times import parse_future
from perdure.core.events import OnExceed
from perdure.core.times import utc
from perdure.errors import InvalidInput
from perdure.settings import Settings


@click.command("start")
@click.argument("agent", metavar="AGENT")
@click.argument("pairs", metavar="[KEY=VALUE | KEY:=JSON]…", nargs=-1)
@click.option("--input", "input_text", metavar="JSON", help="The arguments of the agent, as a JSON object.")
@click.option("--id", "run_id", metavar="ID", help="The run's id. If a run with this id and the same input exists, nothing is started.")
@click.option(
    "--version", metavar="V", help="Only this version of the agent may begin the run. Default: that of the worker that claims it."
)
@click.option("--tenant", default="default", show_default=True)
@click.option("--actor", metavar="WHO", help="The person or program for whom the agent acts.")
@common.label_option
@click.option("--queue", metavar="Q", default="default", show_default=True, help="The queue of the run.")
@click.option("--priority", type=int, default=0, metavar="N", help="In a queue, of one tenant's runs, the highest goes first.")
@click.option("--not-before", metavar="T", help="Do not begin before: 10m, 2h, 1d from now, or an ISO time (UTC if it names no zone).")
@click.option("--budget-usd", metavar="X", help="Dollars that the run and its children may spend together. Default: as the agent declares.")
@click.option("--on-exceed", type=click.Choice(get_args(OnExceed)), help="With --budget-usd, when the budget is used up: pause, or fail.")
@common.url_option
@common.json_option
def command(
    agent: str,
    pairs: tuple[str, ...],
    input_text: str | None,
    run_id: str | None,
    version: str | None,
    tenant: str,
    actor: str | None,
    labels: tuple[str, ...],
    queue: str,
    priority: int,
    not_before: str | None,
    budget_usd: str | None,
    on_exceed: OnExceed | None,
    url: str | None,
    as_json: bool,
) -> int:
    """Start a run of AGENT (its name, not its file) for a worker to drive, and print its id.

    The code of the agent is not needed here. The worker that begins the run checks the arguments: if they do not fit,
    the run fails. To start a run with its code, and to drive it here: perdure run TARGET.
    """
    settings = common.settings_with(url=url)
    args, kwargs = arguments(pairs, input_text)
    if ":" in agent or "/" in agent or agent.endswith((".py", ".toml", ".json")):
        raise InvalidInput(
            f"{agent!r} looks like a file; `perdure start` takes the name of an agent. To start a file: perdure run {shell.quote(agent)} --detach"
        )
    if args:
        raise InvalidInput(
            '--input: without the agent\'s code the arguments need their names: give an object, such as \'{"order": "o-7"}\''
        )
    at = None if not_before is None else utc(parse_future(not_before, common.now_us(), "--not-before"))
    options: dict[str, Any] = {"id": run_id, "version": version, "tenant": tenant, "actor": actor, "queue": queue, "priority": priority}
    options["labels"] = common.labels_of(labels)
    return asyncio.run(
        _start(settings, agent, kwargs, {**options, "not_before": at, "budget": budget_of(None, budget_usd, on_exceed)}, as_json=as_json)
    )


async def _start(settings: Settings, agent: str, arguments: dict[str, Any], options: dict[str, Any], *, as_json: bool) -> int:
    from perdure.app import Perdure, named_input

    async with Perdure(settings=settings) as app:
        trace = os.environ  # TRACEPARENT and TRACESTATE, as OpenTelemetry names them
        handle = await app.start_encoded(agent, named_input(agent, (), arguments), trace=trace, **options)
        row = await handle.row()
    if as_json:
        common.out_json({"run_id": row.run_id, "status": row.status, "output": None, "error": None})
    else:
        common.out(row.run_id)
    words = (
        "a worker that serves the agent begins it" if row.status == "queued" else f"it exists already: {shell.command('why', row.run_id)}"
    )
    common.note(common.clean(f"perdure: run {row.run_id} of agent {row.agent} is {row.status}; {words}"))
    return common.SUCCEEDED
