"""`perdure show`: the state of a run, now or as of an event."""

from __future__ import annotations

import click

from perdure.cli import common
from perdure.core.state import CallState
from perdure.inspect.view import Reading, loader, read_run, run_record
from perdure.inspect.words import called, clip, failed, places, plural, shown, span


@click.command("show")
@common.run_argument
@click.option("--at", type=click.IntRange(min=1), metavar="SEQ", help="As of this event instead of now.")
@common.url_option
@common.json_option
def command(run_id: str, at: int | None, url: str | None, as_json: bool) -> None:
    """The state of RUN with all its calls, now or as of event SEQ."""
    with common.existing_store(url) as store:
        reading = read_run(store, run_id, at)
        if as_json:
            common.out_json(run_record(reading, loader(store)))
            return
    for line in _head(reading, url):
        common.out(common.clean(line))
    calls = reading.state.calls.values()
    if calls:
        common.out()
        common.table(("call", "asked", "effect", "phase", "tries", "outcome", "key"), [_cells(call) for call in calls])
    for line in _failed_where(reading):
        common.out(common.clean(line))


def _head(reading: Reading, url: str | None) -> list[str]:
    row, state, now = reading.row, reading.state, common.now_us()
    as_of = f" as of event {state.seq} of {row.seq}" if reading.past else ""
    lines = [
        f"run      {row.run_id}{as_of}",
        f"agent    {row.agent}@{row.version}, tenant {row.tenant}" + (f", for {row.actor}" if row.actor else ""),
        f"status   {reading.status}" + _about(reading, url),
        f"input    {shown(state.created.input, 200) if state.created else ''}",
    ]
    if state.output is not None:
        lines.append(f"output   {shown(state.output, 400)}")
    if state.failure is not None:
        lines.append(f"error    {failed(state.failure, 400)}")
        lines += [f"         {place}" for place in places(state.failure)]
    if state.said is not None:
        lines.append(f"said     {clip(state.said, 200)}")
    lines.append(f"created  {common.iso(row.created_at)} ({span(now - row.created_at)} ago), last event {common.iso(state.updated_at)}")
    lines.append(f"journal  {plural(state.seq, 'event')}, {plural(len(state.calls), 'call')}, epoch {state.epoch}")
    return lines


def _failed_where(reading: Reading) -> list[str]:
    """Where the calls that failed for good were raised."""
    lines = []
    for call in reading.state.calls.values():
        if call.phase == "failed" and (found := places(call.failure)):
            lines += ["", f"call {call.number} {call.tool} failed: {failed(call.failure, 200)}", *(f"  {place}" for place in found)]
    return lines


def _about(reading: Reading, url: str | None) -> str:
    waiting = reading.state.waiting_for if reading.past else reading.row.waiting_for
    if not reading.past and reading.row.status == "needs_attention":
        return f": {reading.row.error or waiting} (perdure why {reading.row.run_id}{common.url_words(url)})"
    return f": {waiting}" if waiting else ""


def _cells(call: CallState) -> tuple[str, ...]:
    outcome = failed(call.failure, 60) if call.result is None else shown(call.result, 60)
    if call.phase == "in_doubt":
        outcome = clip(call.doubt or "", 60)
    return (str(call.number), called(call.tool, call.args, 50), call.effect, call.phase, str(call.attempt), outcome, call.key[:12])
