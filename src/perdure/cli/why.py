"""`perdure why`: prints one page about a run, for the person who takes care of the run."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from typing import TYPE_CHECKING

import click
import msgspec

from perdure import shell
from perdure.cli import common
from perdure.cli.target import recorded_target, words_for
from perdure.errors import PerdureError
from perdure.inspect.cost import budget_words
from perdure.inspect.inside import InspectedFrame, failing_frame, look_inside
from perdure.inspect.text import clip, labels_words, moment, place_words, plural, span, versioned
from perdure.inspect.view import require
from perdure.inspect.why.calls import CallInDoubt, Done
from perdure.inspect.why.context import Holder, stopped_words
from perdure.inspect.why.page import FIRST_SHOWN, Open, Why, why
from perdure.inspect.why.waiting import Asked, deciders, in_short
from perdure.store.api import FINISHED

if TYPE_CHECKING:
    from perdure.engine.api import Reading
    from perdure.settings import Settings
    from perdure.store.api import RunRow

KEY_SHOWN = 12
AGAIN_SHOWN = 3
APPROVALS_SHOWN = 5
DIGEST_SHOWN = 12
REOPENED_SHOWN = 3
SUPERSEDED_SHOWN = 8
VARIABLES_SHOWN = 8
VALUE_SHOWN = 100


@click.command("why")
@common.run_argument
@common.url_option
@common.json_option
def command(run_id: str, url: str | None, as_json: bool) -> None:
    """One page about RUN: what is done, in doubt, waited for and never started, and what to type next."""
    settings = common.settings_with(url=url)
    options = common.url_words(url)
    with common.existing_runs(url) as store:
        now = common.now_at(store)
        row = require(store, run_id)
        code = words_for(store, row, settings.url)
        failing = _failing(store, row, settings) if row.status == "failed" and not code else None
        page = why(store, run_id, now=now, settings=settings, options=options, code=code, failing=failing)
    if as_json:
        common.out_json(msgspec.to_builtins(page))
    else:
        _print(page, now, options)


def _failing(store: Reading, row: RunRow, settings: Settings) -> InspectedFrame | None:
    """The line that failed and its variables, if the code that `resume` would load is still the code of the run."""
    from perdure.cli.inspect_run import opened_run  # imported only for runs that failed

    try:
        with redirect_stdout(sys.stderr), opened_run(store, row, recorded_target(store, row, settings.url), None, settings) as moment:
            return failing_frame(look_inside(moment))
    except PerdureError:
        return None  # the code is gone, has another version, or diverges: the page is complete without it


def _print(page: Why, now: int, options: str) -> None:
    common.out(
        common.style(common.clean(f"run {page.run_id}"), bold=True)
        + common.clean(f"  {versioned(page.agent, page.version)}, tenant {page.tenant}{place_words(page.queue, page.priority)}")
    )
    if page.labels:
        common.out(common.clean(f"labels: {labels_words(page.labels)}"))
    common.out(common.style(common.clean(page.sentence), common.STATUS_COLOURS.get(page.status), bold=True))
    if page.holder is not None and page.holder.lease_until is not None:
        common.out(common.clean(f"      {_held(page.holder, now)}"))
    for place in page.places:
        common.out(common.clean(f"      {place}"))
    for line in _failed_line(page, options):
        common.out(common.clean(f"      {line}"))
    if page.schedule is not None:
        common.out(common.clean(shell.with_options(page.schedule, options)))
    if page.parent is not None:
        common.out(common.clean(f"child of run {page.parent} (its call {page.parent_call}): {shell.command('why', page.parent)}{options}"))
    if page.fork is not None:
        common.out(common.clean(page.fork))
    if page.said:
        common.out(common.clean(f'the agent last reported: "{page.said}"'))
    if page.checkpoints is not None:
        common.out(page.checkpoints)
    for one in page.reopened[-REOPENED_SHOWN:]:
        reason = f": {clip(one.reason, 200)}" if one.reason else ""
        common.out(common.clean(f"reopened by {one.by} at {moment(one.at, now)} (event {one.seq}), from event {one.back_to}{reason}"))
    if page.undoing is not None:
        common.out(common.clean(f"{page.undoing.words}: {shell.command('why', page.undoing.run_id)}{options}"))
    nothing = "done: nothing" if page.status in FINISHED else "done: nothing yet"
    _section(f"done: {page.done_count:,}" if page.done_count else nothing, _ended(page, page.done, page.done_count, now, options))
    _section(f"not made, or failed: {page.not_done_count:,}", _ended(page, page.not_done, page.not_done_count, now, options))
    _section(f"superseded, and what it did stays: {len(page.superseded):,}", _superseded(page, now, options))
    _section("in doubt: it is not known whether it happened", [line for doubt in page.in_doubt for line in _doubt(doubt, now)])
    _section("cut off, and not repeated: the run is being cancelled" if page.cancel else "cut off, and will be run again", _again(page))
    _section("under way", [line for open_ in page.under_way for line in _under_way(open_)])
    _section("waiting for approval", [line for one in page.approvals[:APPROVALS_SHOWN] for line in _approval(one, now)])
    _section("waiting for children", _children(page))
    _section("waiting for", [f"      {wait}" for wait in page.waiting])
    _section("arrived, and perhaps not read", [f"      {line}" for line in page.strays])
    _section("never started", [f"      {what}" for what in page.never_started])
    _section("arrived too late", [f"      {line}" for line in page.unread])
    _section("changed under it", [f"      {what}" for what in page.changed])
    _section("cost so far", [f"      {line}" for line in (page.cost_words, *(budget_words(view, page.run_id) for view in page.budgets))])
    common.out()
    common.out(common.style("next", bold=True))
    for step in page.next:
        common.out(f"  {common.style(common.clean(step.command), 'cyan')}")
        common.out(common.clean(f"      {step.does}"))


def _held(holder: Holder, now: int) -> str:
    """Since when the worker holds the run, when its last heartbeat was, and when another worker may take over."""
    since = f"since {moment(holder.since, now)}" if holder.since else "for an unknown time"
    seen = f"last sign of life {span(round((holder.silent_s or 0) * 1e6))} ago"
    until = moment(holder.lease_until or "", now)
    if holder.alive:
        lease = f"lease until {until}, and it renews it"
    else:
        lease = (
            f"its lease counts until {until} at the latest"
            if holder.dead
            else f"lease until {until}; after that another worker may take over"
        )
    return f"held by {holder.name} {since}; {seen}; {lease}; {plural(holder.runs, 'run')} held in all"


def _failed_line(page: Why, options: str) -> list[str]:
    frame = page.failing
    if frame is None:
        return []
    line = frame.source[frame.line - frame.first_line].strip() if frame.source else ""
    variables = [f"  {one.name} = {clip(one.value, VALUE_SHOWN)}" for one in frame.variables[:VARIABLES_SHOWN]]
    return [f"line {frame.line} of {frame.function}: {line}", *variables, f"  all of it: {shell.command('inspect', page.run_id)}{options}"]


def _section(title: str, lines: list[str]) -> None:
    if lines or title.startswith("done"):
        common.out()
        common.out(common.style(title, bold=True))
        for line in lines:
            common.out(common.clean(line))


def _ended(page: Why, ended: list[Done], count: int, now: int, options: str) -> list[str]:
    lines = []
    hidden = count - len(ended)
    for place, done in enumerate(ended):
        if hidden and place == FIRST_SHOWN:
            lines.append(f"   …  {hidden:,} more: {shell.command('show', page.run_id)}{options}")
        tries = f", {done.attempts} attempts" if done.attempts > 1 else ""
        settled = f", settled by {done.settled_by}" if done.settled_by else ""
        key = f", key {done.key[:KEY_SHOWN]}…" if done.key else ""
        approved = f", {done.approval}{f' {done.approved}' if done.approved else ''}" if done.approval else ""
        cost = f", {done.cost}" if done.cost else ""
        evidence = f"event {done.seq}, {moment(done.at, now)}{key}{tries}{settled}{approved}{cost}"
        since = f" – {done.undone}" if done.undone else ""
        lines.append(f"{done.call:>4}  {done.asked} {done.outcome}{since}  ({evidence})")
        lines += [f"        {place}" for place in done.places]
    return lines


def _superseded(page: Why, now: int, options: str) -> list[str]:
    """What the run did before it was reopened, and how to undo that."""
    if not page.superseded:
        return []
    shown = page.superseded[-SUPERSEDED_SHOWN:]
    lines = _ended(page, shown, len(shown), now, options)
    if len(page.superseded) > len(shown):
        lines.insert(0, f"   …  {len(page.superseded) - len(shown):,} more: {shell.command('show', page.run_id)}{options}")
    root = page.run_id.partition("/")[0]
    when = "" if page.status in FINISHED else "when the run has ended: "
    undo = f"{shell.command('undo', root)} --dry-run{options}"
    return [*lines, f"      undone with the rest of the run, where the tools say how; {when}{undo}"]


def _under_way(one: Open) -> list[str]:
    return [f"{one.call:>4}  {one.asked}: {one.state} (event {one.seq})", *([f"      {one.progress}"] if one.progress else ())]


def _again(page: Why) -> list[str]:
    if not page.again:
        return []
    more = f" and {plural(len(page.again) - AGAIN_SHOWN, 'more call')}" if len(page.again) > AGAIN_SHOWN else ""
    shown = page.again[:AGAIN_SHOWN]
    progress = [f"      {call.call} had reported {call.progress}" for call in shown if call.progress]
    return ["      " + ", ".join(f"{call.call} {call.asked}" for call in shown) + more, *progress]


def _approval(one: Asked, now: int) -> list[str]:
    """The lines of an approval. Recorded text has separate lines, so that it cannot look like another field."""
    if one.status != "pending":
        return [f"{one.call:>4}  {in_short(one)} (event {one.seq})"]
    lines = [f"{one.call:>4}  {one.asked}"]
    if not one.whole:
        lines.append(f"      this is not all of {one.approval}: perdure approvals --json shows the whole")
    lines.append(
        f"      {one.approval}, asked at {moment(one.asked_at, now)} ({one.age} ago, event {one.seq}), digest {one.digest[:DIGEST_SHOWN]}"
    )
    if one.reason:
        lines.append(f"      reason, in the {'tool' if one.tool else 'agent'}'s words: “{clip(one.reason, 400)}”")
    lines.append(f"      may decide: {deciders(one)}")
    lines.append(f"      time: {one.then}")
    if one.editable:
        lines.append(f"      may be edited: {', '.join(one.editable)}")
    return lines


def _children(page: Why) -> list[str]:
    family = page.children
    if family is None or not (family.shown or family.short):
        return []
    counts = ", ".join(f"{count:,} {status.replace('_', ' ')}" for status, count in family.by_status.items())
    lines = [f"      {plural(family.total, 'child', 'children')}: {counts}"]
    lines += [f"      {stopped_words(short)}" for short in family.short]
    for child in family.shown:
        what = f"  {child.asked}" if child.asked else ""
        about = f": {child.about}" if child.about else ""
        lines.append(f"{child.call or '…':>4}  {child.run_id}{what}  {child.status.replace('_', ' ')}{about}")
    return lines


def _doubt(doubt: CallInDoubt, now: int) -> list[str]:
    by = f" by worker {doubt.worker}" if doubt.worker else ""
    since = f"in doubt since {moment(doubt.since, now)} ({doubt.age})" if doubt.recorded else f"open for {doubt.age}"
    return [
        f"{doubt.call:>4}  {doubt.asked}",
        f"      asked at {moment(doubt.asked_at, now)}{by}, attempt {doubt.attempt}; {since}: {doubt.why}",
        *(f"        {place}" for place in doubt.places),
        *([f"      it had reported {doubt.progress}, which proves nothing about the effect"] if doubt.progress else ()),
        *([] if doubt.keyless else [f"      key {doubt.key}"]),
        f"      {doubt.effect}: {doubt.meaning}",
        f"      by itself: {doubt.by_itself}",
        f"      check: {doubt.check}",
    ]
