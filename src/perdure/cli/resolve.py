"""`perdure resolve`: resolve a call that is in doubt, or the calls in doubt of all runs that a query finds."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import click
from msgspec import Struct

from perdure import shell
from perdure.cli import common
from perdure.cli.bulk import DONE_BEFORE, Bulk, BulkOrder, BulkVerb, Done, Fail, Skip, go, is_for_many, many_options
from perdure.cli.steering import speaker
from perdure.cli.target import resume_command
from perdure.core import codec
from perdure.core.events import AnyBody, ToolCallResolved, batch_of
from perdure.core.state import fold
from perdure.engine.api import Reading
from perdure.errors import InvalidInput, NotEncodable, PerdureError
from perdure.inspect.text import plural
from perdure.settings import Settings
from perdure.store.api import RunRow


class _Verdict(Struct, frozen=True):
    """The outcome that the person has given, for `app.resolve`, and in words."""

    answer: dict[str, Any]
    outcome: str
    then: str


class Resolving(BulkVerb):
    """Settles the calls in doubt of many runs with one outcome.

    Only a call that the preview has counted is settled, and only the attempt that was in doubt then: what came into doubt
    later was not looked at by the person.
    """

    verb, question, did, could = "resolve", "settle the calls in doubt of", "resolved", "can be resolved"
    then = "a worker goes on with them: perdure worker TARGET, if none serves them"
    statuses = ("needs_attention",)

    def __init__(self, verdict: _Verdict, note: str, tool: str | None) -> None:
        self._verdict, self._note, self._tool = verdict, note, tool
        self._seen: dict[str, list[tuple[int, int]]] = {}  # run → (call, attempt) in doubt at the preview
        self._tools: Counter[str] = Counter()

    def given(self) -> dict[str, Any]:
        return {"outcome": self._verdict.answer, "note": self._note, "tool": self._tool}

    def leaves_out(self, row: RunRow, *, named: bool) -> str | None:
        if row.attention != "in_doubt":
            return "runs that need attention for another reason than a doubt"
        return super().leaves_out(row, named=named)

    def is_done(self, reading: Reading, row: RunRow, batch: str) -> bool:
        return False  # a run may have several calls in doubt, and `look` leaves out each of them that was settled

    def look(self, reading: Reading, row: RunRow, batch: str) -> str | None:
        events = reading.read(row.run_id)
        bodies: list[tuple[int | None, AnyBody | None]] = [(event.call, event.body) for event in events]
        bodies += [(letter.call, letter.body) for letter in reading.unread(row.run_id)]
        before = {call for call, body in bodies if batch and isinstance(body, ToolCallResolved) and batch_of(body) == batch}
        doubts = [call for call in fold(events).open.values() if call.phase == "in_doubt" and self._tool in (None, call.tool)]
        meant = [call for call in doubts if call.number not in before]
        if not meant:
            return DONE_BEFORE if doubts else f"no call of {self._tool or 'it'} is in doubt"
        self._seen[row.run_id] = [(call.number, call.attempt) for call in meant]
        self._tools.update(call.tool for call in meant)
        return None

    def breakdown(self) -> Iterator[str]:
        tools = ", ".join(f"{plural(count, 'call')} of {tool}" for tool, count in self._tools.most_common())
        if len(self._tools) > 1:
            raise InvalidInput(f"these runs have calls in doubt of several tools: {tools}; settle one tool at a time: --tool NAME")
        yield f"{tools}: {self._verdict.outcome}; {self._verdict.then}"

    async def act(self, bulk: Bulk, row: RunRow) -> Done:
        if row.run_id not in self._seen:
            raise Skip("it was not in doubt at the preview")
        app, settled = await bulk.app(), list[int]()
        for call, attempt in self._seen[row.run_id]:
            try:
                if not bulk.order.dry_run:
                    await app.resolve(row.run_id, call, **self._verdict.answer, attempt=attempt, by=bulk.order.by, note=self._note)
            except PerdureError as error:
                if not settled:
                    raise
                # Each call is a commit of its own: what was settled before stays so.
                raise Fail(f"run {row.run_id}: {_calls(settled)} settled, and then: {error.in_full()}") from error
            settled.append(call)
        return Done({"calls": settled}, [f"run {row.run_id}: {_calls(settled)}: {self._verdict.outcome}"])


def _calls(numbers: Sequence[int]) -> str:
    return f"{'call' if len(numbers) == 1 else 'calls'} {', '.join(map(str, numbers))}"


@click.command("resolve")
@common.optional_run_argument
@click.argument("call", type=click.IntRange(min=1), metavar="[CALL]", required=False)
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
@click.option("--note", metavar="TEXT", help="How you know; a note for the journal. With --where it is needed.")
@click.option("--tool", metavar="NAME", help="With --where: only the calls of this tool; needed if calls of several tools are in doubt.")
@many_options("Instead of RUN and CALL: the calls in doubt of all runs that match. One outcome counts for all of them.")
def command(
    run_id: str | None,
    call: int | None,
    happened: str | None,
    did_not_happen: bool,
    final: bool,
    failure: str | None,
    note: str | None,
    tool: str | None,
    where: str | None,
    limit: int | None,
    batch: str | None,
    dry_run: bool,
    yes: bool,
    by: str | None,
    url: str | None,
    as_json: bool,
) -> int:
    """Resolve CALL of RUN, which is in doubt, with exactly one of --happened, --did-not-happen and --fail.

    With --where, all calls in doubt of many runs get this one outcome: look at each of them first. Only what was in doubt
    at the preview is settled.
    """
    settings = common.settings_with(url=url)
    order = BulkOrder(speaker(by), url, as_json, yes, dry_run, where, batch, limit)
    many = is_for_many("resolve", run_id, order)
    verdict = _verdict(happened, did_not_happen, final, failure, "resolve --where" if many else f"call {call}")
    if many:
        if not note:
            raise InvalidInput("resolve --where settles what no call has answered: say how you know that, with --note TEXT")
        return go(settings, Resolving(verdict, note, tool), order)
    assert run_id is not None
    if call is None:
        raise InvalidInput(f"name the call of run {run_id} that is in doubt: {shell.command('why', run_id)} shows it")
    if tool is not None:
        raise InvalidInput("--tool goes with --where: CALL says which call is meant")
    common.require_journal(settings.url)
    row, cancelled = asyncio.run(_resolve(settings, run_id, call, verdict.answer, order.by, note))
    then = verdict.then
    if cancelled:
        again = "it is not performed again" if did_not_happen else "that is recorded"
        then = f"{again}, and the run, which is being cancelled, goes on to its end"
    if as_json:
        common.out_json({"run_id": run_id, "call": call, "resolved": verdict.outcome, "status": row.status})
        return common.SUCCEEDED
    common.out(f"call {call} of run {run_id}: {verdict.outcome}; {then}{_by_whom(row, settings, url)}")
    return common.SUCCEEDED


def _verdict(happened: str | None, did_not_happen: bool, final: bool, failure: str | None, what: str) -> _Verdict:
    if (happened is not None) + did_not_happen + (failure is not None) != 1:
        raise InvalidInput(f"{what} needs exactly one answer: --happened JSON, --did-not-happen or --fail TEXT")
    if final and not did_not_happen:
        raise InvalidInput("--final goes with --did-not-happen: it says that the request cannot arrive any more")
    if happened is not None:
        return _Verdict({"happened": _result(happened)}, "it happened", "the agent goes on with that result")
    if did_not_happen:
        return _Verdict({"did_not_happen": True, "final": final}, "it did not happen", "it is performed again")
    return _Verdict({"fail": failure}, "it failed", "the agent gets ToolFailed")


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
