"""`perdure resolve`: resolve a call that is in doubt."""

from __future__ import annotations

import asyncio
from typing import Any

import click

from perdure.cli import common
from perdure.cli.target import resume_command
from perdure.cli.who import os_user
from perdure.core import codec
from perdure.errors import InvalidInput, NotEncodable
from perdure.settings import Settings
from perdure.store.api import RunRow


@click.command("resolve")
@common.run_argument
@click.argument("call", type=click.IntRange(min=1), metavar="CALL")
@click.option("--happened", metavar="JSON", help="The call happened: the agent gets JSON as its result, and its cost is charged.")
@click.option("--did-not-happen", is_flag=True, help="The call did not happen: it is performed again.")
@click.option(
    "--final",
    is_flag=True,
    help="With --did-not-happen: its request can never arrive, for example because the service has cancelled its key.",
)
@click.option(
    "--fail",
    "failure",
    metavar="TEXT",
    help="The call failed: the agent gets ToolFailed with TEXT. Its cost is charged, because it may have happened.",
)
@click.option("--by", metavar="WHO", help="Who says so. Default: the user of this process.")
@click.option("--note", metavar="TEXT", help="How you know; a note for the journal.")
@common.url_option
@common.json_option
def command(
    run_id: str,
    call: int,
    happened: str | None,
    did_not_happen: bool,
    final: bool,
    failure: str | None,
    by: str | None,
    note: str | None,
    url: str | None,
    as_json: bool,
) -> None:
    """Resolve CALL of RUN, which is in doubt, with exactly one of --happened, --did-not-happen and --fail."""
    if (happened is not None) + did_not_happen + (failure is not None) != 1:
        raise InvalidInput(f"call {call} needs exactly one answer: --happened JSON, --did-not-happen or --fail TEXT")
    if final and not did_not_happen:
        raise InvalidInput("--final goes with --did-not-happen: it says that the request cannot arrive any more")
    answer: dict[str, Any] = {}
    if happened is not None:
        answer["happened"] = _result(happened)
        outcome, then = "it happened", "the agent goes on with that result"
    elif did_not_happen:
        answer |= {"did_not_happen": True, "final": final}
        outcome, then = "it did not happen", "it is performed again"
    else:
        answer["fail"] = failure
        outcome, then = "it failed", "the agent gets ToolFailed"
    settings = common.settings_with(url=url)
    common.require_journal(settings.url)
    row, cancelled = asyncio.run(_resolve(settings, run_id, call, answer, by or os_user(), note))
    if cancelled:
        again = "it is not performed again" if did_not_happen else "that is recorded"
        then = f"{again}, and the run, which is being cancelled, goes on to its end"
    if as_json:
        common.out_json({"run_id": run_id, "call": call, "resolved": outcome, "status": row.status})
        return
    common.out(f"call {call} of run {run_id}: {outcome}; {then}{_by_whom(row, settings, url)}")


def _result(happened: str) -> Any:
    try:
        return codec.parse(happened, "--happened")
    except NotEncodable as error:
        raise InvalidInput(f"{error}; text is written '\"like this\"'") from None


async def _resolve(settings: Settings, run_id: str, call: int, answer: dict[str, Any], by: str, note: str | None) -> tuple[RunRow, bool]:
    from perdure.app import Perdure

    async with Perdure(settings=settings) as app:
        await app.resolve(run_id, call, **answer, by=by, note=note)
        handle = app.handle(run_id)
        return await handle.row(), (await handle.state()).cancel is not None


def _by_whom(row: RunRow, settings: Settings, url: str | None) -> str:
    if row.holder is not None:
        return " by the worker that holds the run"
    with common.existing_runs(url) as store:
        return f" when a worker takes the run, or here: {resume_command(store, row, settings.url, url)}"
