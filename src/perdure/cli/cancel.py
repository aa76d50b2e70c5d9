"""`perdure cancel`: ask a run to stop, or end the run without its agent; one run, or all of a query."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click
from msgspec import Struct

from perdure import shell
from perdure.cli import common
from perdure.cli.bulk import Bulk, BulkOrder, BulkVerb, Done, go, is_for_many, many_options
from perdure.cli.steering import speak, speaker, who_goes_on
from perdure.core.query import UNFINISHED
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


class Cancelling(BulkVerb):
    verb, question, did, could = "cancel", "cancel", "cancelled", "can be cancelled"
    rests = False  # runs go on while they are cancelled

    def __init__(self, reason: str | None, force: bool) -> None:
        self._reason, self._force = reason, force
        self.statuses = tuple(status for status in UNFINISHED if force or status != "cancelling")
        if not force:
            self.did, self.then = "asked to stop", "each ends when its agent has cleaned up: a worker drives it"

    def given(self) -> dict[str, Any]:
        return {"reason": self._reason, "force": self._force}

    async def act(self, bulk: Bulk, row: RunRow) -> Done:
        app = await bulk.app()
        if not bulk.order.dry_run:
            await app.cancel(row.run_id, by=bulk.order.by, reason=self._reason, force=self._force)
        return Done({"before": row.status})


@click.command("cancel")
@common.optional_run_argument
@click.option("--reason", metavar="TEXT", help="Why; a note for the journal.")
@click.option(
    "--force", is_flag=True, help="End the run at once, without its agent, for example if its code is lost. Code 8 while a worker holds it."
)
@many_options("Instead of RUN: all unfinished runs that match.", "Who asks.")
def command(
    run_id: str | None,
    reason: str | None,
    force: bool,
    where: str | None,
    limit: int | None,
    batch: str | None,
    dry_run: bool,
    yes: bool,
    by: str | None,
    url: str | None,
    as_json: bool,
) -> int:
    """Cancel RUN and its children.

    The agent is cancelled at its next step and may still clean up; a call that has begun is not undone. With --force
    there is no cleanup. Calls in doubt stay in doubt: the output names them, and their cost is charged.
    """
    settings = common.settings_with(url=url)
    order = BulkOrder(speaker(by), url, as_json, yes, dry_run, where, batch, limit)
    if is_for_many("cancel", run_id, order):
        return go(settings, Cancelling(reason, force), order)
    assert run_id is not None

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
        return common.SUCCEEDED
    common.out(common.clean(_sentence(asked, force)))
    for call in unsure:
        common.out(common.clean(f"  stays in doubt: call {call.number} {called(call.tool, call.args)}, key {call.key}"))
    if asked.row.status in FINISHED:
        for child in asked.family:
            now = f"{shell.command('cancel', child.run_id)} --force{common.url_words(url)}"
            common.out(common.clean(f"  child {child.run_id} was asked to stop; it ends when a worker claims it, or at once: {now}"))
    return common.SUCCEEDED


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
