"""`perdure cancel`: ask a run to stop, or end the run without its agent."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
from msgspec import Struct

from perdure import shell
from perdure.cli import common
from perdure.cli.steering import by_option, speak, speaker, who_goes_on
from perdure.core.state import CallState, RunState
from perdure.inspect.text import called
from perdure.store.api import FINISHED, RunRow

if TYPE_CHECKING:
    from perdure.app import Perdure


class _Asked(Struct, frozen=True):
    """The run and the unfinished runs below it, after the request to cancel."""

    row: RunRow
    state: RunState
    family: list[RunRow]
    then: str


@click.command("cancel")
@common.run_argument
@click.option("--reason", metavar="TEXT", help="Why; a note for the journal.")
@click.option(
    "--force", is_flag=True, help="End the run at once, without its agent, for example if its code is lost. Code 8 while a worker holds it."
)
@by_option("Who asks.")
@common.url_option
@common.json_option
def command(run_id: str, reason: str | None, force: bool, by: str | None, url: str | None, as_json: bool) -> None:
    """Cancel RUN and its children.

    The agent is cancelled at its next step and may still clean up; a call that has begun is not undone. With --force
    there is no cleanup. Calls in doubt stay in doubt: the output names them, and their cost is charged.
    """
    settings = common.settings_with(url=url)

    async def cancel(app: Perdure) -> _Asked:
        await app.cancel(run_id, by=speaker(by), reason=reason, force=force)
        handle = app.handle(run_id)
        row = await handle.row()
        return _Asked(row, await handle.state(), app.reading.family(run_id), who_goes_on(app.reading, row, settings, url))

    asked = speak(settings, cancel)
    unsure = _unsure(asked.state) if asked.row.status in FINISHED else []
    if as_json:
        doubts = [{"call": call.number, "tool": call.tool, "key": call.key} for call in unsure]
        common.out_json({"run_id": run_id, "status": asked.row.status, "in_doubt": doubts})
        return
    common.out(common.clean(_sentence(asked, force)))
    for call in unsure:
        common.out(common.clean(f"  stays in doubt: call {call.number} {called(call.tool, call.args)}, key {call.key}"))
    if asked.row.status in FINISHED:
        for child in asked.family:
            now = f"{shell.command('cancel', child.run_id)} --force{common.url_words(url)}"
            common.out(common.clean(f"  child {child.run_id} was asked to stop; it ends when a worker claims it, or at once: {now}"))


def _sentence(asked: _Asked, force: bool) -> str:
    run = f"run {asked.row.run_id}"
    if asked.row.status == "cancelled":
        return f"{run} is cancelled" + (", without its agent" if force else "")
    if asked.row.holder is not None:
        return f"{run}: the worker that holds it has been asked to cancel it"
    return f"{run} will be cancelled: {asked.then}"


def _unsure(state: RunState) -> list[CallState]:
    """The calls of an ended run that may or may not have happened."""
    return [
        call
        for call in state.calls.values()
        if call.phase == "in_doubt" or (call.phase in ("started", "retry_wait") and call.effect in ("keyed", "once", "idempotent"))
    ]
