"""`perdure show`: the state of a run, now or as of an event. With --prompt: the exact request of a model call."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import click

from perdure import shell
from perdure.cli import common
from perdure.core import codec
from perdure.core.approval import count_people
from perdure.core.codec import Payload
from perdure.core.prompt_deltas import is_request
from perdure.core.state import AskState, CallState, ChildState, own_children
from perdure.engine.api import Reading
from perdure.errors import StoreCorrupt
from perdure.inspect.cost import budget_view, budget_words, cost_with_children, cost_words
from perdure.inspect.prompt import request_of_call
from perdure.inspect.text import (
    asked_words,
    called,
    checkpoint_words,
    clip,
    failed,
    labels_words,
    people,
    place_words,
    places,
    plural,
    progress_words,
    result_words,
    sentence,
    shown,
    span,
    versioned,
)
from perdure.inspect.timeline import PlanStep, steps_of
from perdure.inspect.view import RunView, loader, progress_now, read_run, run_record, statements
from perdure.inspect.why.calls import strays, unread_record, unread_words
from perdure.inspect.why.waiting import outcome, verdict
from perdure.store.api import ProgressRow

_STATED_SHOWN = 20
_SHOWN_APART = ("model", "messages", "system", "tools")


# -- `perdure show RUN --prompt CALL`


def show_prompt(reading: RunView, number: int, load: Callable[[Payload], bytes], *, as_json: bool) -> None:
    """Print the request of this call. Exit code 7 if the rebuilt request does not have the recorded digest."""
    try:
        whole = request_of_call(reading, number, load)
    except StoreCorrupt as error:
        raise common.ExitWith(f"run {reading.row.run_id}: {error}; see what else is damaged: perdure verify", common.DIFFERENT) from None
    if as_json:
        common.out_exact(whole)
        return
    for line in _lines(reading.row.run_id, number, whole):
        common.out(line)


def _lines(run_id: str, number: int, whole: bytes) -> Iterator[str]:
    request: dict[str, Any] = codec.decode(whole)
    yield common.clean(f"run {run_id}, call {number}: {request.get('model')} was asked this, {plural(len(request['messages']), 'message')}")
    yield f"rebuilt from the journal; SHA-256 {codec.digest(whole)}, as recorded"
    options = {name: value for name, value in request.items() if name not in _SHOWN_APART}
    if options:
        yield common.clean("with " + ", ".join(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in options.items()))
    if request.get("system"):
        yield from _part("system", request["system"])
    for tool in request.get("tools", ()):
        yield from _part(f"tool {tool.get('name')}", str(tool.get("description", "")), *common.json_lines(tool.get("schema")))
    for place, message in enumerate(request["messages"], 1):
        yield from _message(place, message)


def _message(place: int, message: dict[str, Any]) -> Iterator[str]:
    role = str(message.get("role"))
    if role == "tool":
        role = f"{'error' if message.get('error') else 'result'} of {message.get('name')} (use {message.get('id')})"
    uses = (f"wants {use.get('name')} (use {use.get('id')}): {common.to_json(use.get('arguments'))}" for use in message.get("uses", ()))
    raw = [f"and for its provider: {common.to_json(message['raw'])}"] if "raw" in message else []
    yield from _part(f"{place}. {role}", str(message.get("text", "")), *uses, *raw)


def _part(title: str, text: str, *more: str) -> Iterator[str]:
    """A title line, then the text, indented, so that recorded text cannot look like a title."""
    yield ""
    yield common.style(common.clean(title), bold=True)
    for line in [*(text.split("\n") if text else ()), *more]:
        yield common.clean(f"  {line}")


# -- `perdure show RUN`


@click.command("show")
@common.run_argument
@click.option("--prompt", "call", type=click.IntRange(min=1), metavar="CALL", help="Print the exact request of this model call instead.")
@click.option(
    "--all", "whole", is_flag=True, help=f"All calls on a terminal, too. Without it, a terminal shows the last {common.SHOWN} of a kind."
)
@click.option("--at", type=click.IntRange(min=1), metavar="SEQ", help="The state right after this event, instead of now.")
@common.url_option
@common.json_option
def command(run_id: str, call: int | None, whole: bool, at: int | None, url: str | None, as_json: bool) -> None:
    """The state of RUN with all its calls, now or as of event SEQ; or what exactly a model was asked."""
    with common.existing_runs(url) as store:
        reading = read_run(store, run_id, at)
        if call is not None:
            show_prompt(reading, call, loader(store), as_json=as_json)
            return
        unread = store.unread(run_id) if reading.state.finished else []
        if as_json:
            record = run_record(reading, loader(store), store.ledgers(run_id), store.family(run_id), store.progress([run_id]))
            common.out_json({**record, "unread": [unread_record(letter, loader(store)) for letter in unread]})
            return
        most, state = sys.maxsize if whole else common.most_shown(), reading.state
        cost, asks = _cost(reading, store), [_ask(ask, loader(store)) for ask in list(state.asks.values())[-most:]]
        at_work = progress_now(reading, store.progress([run_id]))
        steps = steps_of(reading.events, loader(store))
        superseded, inherited = reading.superseded, reading.inherited
        shown_calls = list(state.calls.values())[-most:]
        cells = {one.number: _cells(one, loader(store), steps, at_work.get(one.number)) for one in shown_calls}
        children = [_child(child) for child in list(state.children.values())[-most:]]
    signals = [f"signals  {line}" for line in strays(reading)]
    for line in [*_head(reading, url), *cost, *signals, *(f"late     {line}" for line in unread_words(unread))]:
        common.out(common.clean(line))
    header = ("call", *(("step",) if steps else ()), "asked", "effect", "phase", "tries", "outcome", "key")
    if calls := [cells[number] for number in cells if number not in superseded]:
        common.out()
        common.table(header, calls)
    if old := [cells[number] for number in cells if number in superseded - inherited]:
        common.out()
        common.out("superseded: made before the run was reopened, and not known to the agent; what they did stays done")
        common.table(header, old)
    for title, rows in (("approval", asks), ("child", children)):
        if rows:
            common.out()
            common.table(("call", title, "asked", "outcome"), rows)
    left_out = max(len(state.calls) - most, 0) + max(len(state.asks) - most, 0) + max(len(state.children) - most, 0)
    if left_out:
        common.note(f"perdure: {plural(left_out, 'earlier line')} left out; all of them: --all")
    stated = _stated(reading)
    if stated:
        common.out()
        common.table(("event", "the agent"), stated)
    for line in _failed_where(reading):
        common.out(common.clean(line))


def _head(reading: RunView, url: str | None) -> list[str]:
    row, state, now = reading.row, reading.state, common.now_us()
    as_of = f" as of event {state.seq} of {row.seq}" if reading.past else ""
    lines = [
        f"run      {row.run_id}{as_of}",
        f"agent    {versioned(row.agent, state.version)}{'' if state.version else ' in the version of the worker that begins it'}, tenant {row.tenant}{place_words(row.queue, row.priority)}"
        + (f", for {row.actor}" if row.actor else ""),
        *([f"labels   {labels_words(state.labels)}"] if state.labels else []),
        f"status   {reading.status}" + _about(reading, url),
        f"input    {shown(state.created.input, 200) if state.created else ''}",
    ]
    imported = row.imported
    if reading.fork is not None:
        lines.insert(1, f"fork     {reading.fork.removeprefix('a fork of ')}")
    elif imported is not None:
        lines.insert(
            1,
            f"specimen exported at {imported.exported_at}, imported at {common.iso(imported.imported_at)} by {imported.by}: nothing drives it",
        )
    if imported is not None and imported.original_head is not None:
        lines.insert(2, f"redacted {plural(imported.redacted, 'value')} of the file; original head {imported.original_head}")
    if row.parent is not None:
        lines.insert(1, f"parent   {row.parent} (its call {row.parent_call})")
    if state.output is not None:
        lines.append(f"output   {shown(state.output, 400)}")
    if state.failure is not None:
        lines.append(f"error    {failed(state.failure, 400)}")
        lines += [f"         {place}" for place in places(state.failure)]
    if state.said is not None:
        lines.append(f"said     {clip(state.said, 200)}")
    lines.append(f"created  {common.iso(row.created_at)} ({span(now - row.created_at)} ago), last event {common.iso(state.updated_at)}")
    lines.append(f"journal  {plural(state.seq, 'event')}, {plural(len(state.calls), 'call')}, epoch {state.epoch}")
    if checkpoints := checkpoint_words(state):
        lines.append(f"         {checkpoints}")
    for one in reading.reopened_since:
        why = f": {clip(one.reason, 200)}" if one.reason else ""
        lines.append(f"reopened at event {one.seq}, {one.at}, by {one.by}: it went on from event {one.back_to}{why}")
    lines += [f"changed  {change.what}: {change.before} → {change.after}" for change in state.pin_changes]
    return lines


def _cost(reading: RunView, store: Reading) -> list[str]:
    known = bool(own_children(reading.state)) and not reading.past
    lines = [f"cost     {cost_words(reading.state, reading.events, cost_with_children(store, reading.row) if known else None)}"]
    ledgers = [] if reading.past else store.ledgers(reading.row.run_id)
    return lines + [f"budget   {budget_words(budget_view(ledger), reading.row.run_id)}" for ledger in ledgers]


def _ask(ask: AskState, load: Callable[[Payload], bytes]) -> tuple[str, ...]:
    return (str(ask.number), ask.request.approval, called(ask.request.action, ask.request.input, 50), _answer(ask, load))


def _answer(ask: AskState, load: Callable[[Payload], bytes]) -> str:
    if ask.pending:
        votes = f", {count_people(ask.voters)} of {ask.request.quorum} have agreed" if ask.request.quorum > 1 else ""
        return f"pending: {people(ask.request.by)}{votes}"
    return verdict(ask, load)


def _child(child: ChildState) -> tuple[str, ...]:
    asked = called(versioned(child.agent, child.version), child.input, 50)
    return (str(child.number), child.run_id, asked, outcome(child) if child.ended else "")


def _stated(reading: RunView) -> list[tuple[str, ...]]:
    """The thoughts and decisions of the agent. If there are many: the first and the last ones."""
    events = statements(reading.events)
    left_out = len(events) - _STATED_SHOWN
    rows: list[tuple[str, ...]] = [(str(event.seq), sentence(event, {}).removeprefix("the agent ")) for event in events]
    if left_out <= 1:
        return rows
    half = _STATED_SHOWN // 2
    return [*rows[:half], ("…", f"{left_out:,} more: {shell.command('events', reading.row.run_id)}"), *rows[-half:]]


def _failed_where(reading: RunView) -> list[str]:
    """For each failed call: where its exception was raised."""
    lines = []
    for call in reading.state.calls.values():
        if call.phase == "failed" and (found := places(call.failure)):
            lines += ["", f"call {call.number} {call.tool} failed: {failed(call.failure, 200)}", *(f"  {place}" for place in found)]
    return lines


def _about(reading: RunView, url: str | None) -> str:
    waiting = reading.state.waiting_for if reading.past else reading.row.waiting_for
    if not reading.past and reading.row.status == "needs_attention":
        return f": {reading.row.error or waiting} ({shell.command('why', reading.row.run_id)}{common.url_words(url)})"
    return f": {waiting}" if waiting else ""


def _cells(call: CallState, load: Callable[[Payload], bytes], steps: Mapping[int, PlanStep], now: ProgressRow | None) -> tuple[str, ...]:
    outcome = clip(call.doubt or "", 60) if call.phase == "in_doubt" else result_words(call, load)
    if now is not None:
        outcome = progress_words(now.progress, 60)
    elif call.progress is not None and not call.ended:
        outcome = "; ".join(words for words in (outcome, progress_words(load(call.progress), 60)) if words)
    effect = "model" if is_request(call.args) else call.effect
    step = steps.get(call.number)
    of_plan = (clip(step.words.replace("step ", "", 1), 50) if step is not None else "",) if steps else ()
    return (str(call.number), *of_plan, asked_words(call, load, 50), effect, call.phase, str(call.attempt), outcome, call.key[:12])
