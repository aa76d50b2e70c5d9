"""Shared by `retry` and `rewind`: the preview, the question before anything is written, and the next command."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click
import msgspec

from perdure import shell
from perdure.cli import common
from perdure.cli.steering import who_goes_on
from perdure.core.budget import Budget
from perdure.core.events import Event
from perdure.core.history import history
from perdure.core.state import fold, happened
from perdure.errors import Conflict, Diverged
from perdure.inspect.cost import budget_words
from perdure.inspect.text import clip, limits_words, plural, used

if TYPE_CHECKING:
    from perdure.app import Perdure
    from perdure.reopen import Reopened, ReopenedCall, ReopenedChild

SHOWN = 10  # at most this many calls of a kind


class Order(msgspec.Struct, frozen=True):
    """The options that the person gave, without the run."""

    by: str
    reason: str | None
    fresh: bool
    url: str | None
    as_json: bool
    yes: bool
    dry_run: bool
    given: str = ""  # the TARGET that the user typed, quoted, with its --tools
    add: Budget | None = None  # what to add to the budget that the run has used up


async def reopen_one(app: Perdure, run_id: str, to: int | None, order: Order) -> int:
    """Preview, ask, reopen, and say who goes on with the run. Returns the exit code."""
    seen = (await app.handle(run_id).row()).seq
    plan = await reopened(app, run_id, to, order, dry_run=True)
    if order.dry_run:
        if order.as_json:
            common.out_json(record(plan, dry_run=True))
        else:
            for line in preview(plan):
                common.out(common.clean(line))
        return common.SUCCEEDED
    if to is None:
        check_goes_on(plan)
    common.check_terminal("retry" if to is None else "rewind", yes=order.yes)
    for line in preview(plan):
        common.note(common.clean(line))
    if not order.yes and not click.confirm(f"let run {run_id} go on from event {plan.back_to}?", err=True):
        common.fail("nothing was written")
    if (await app.handle(run_id).row()).seq != seen:
        raise Conflict(f"run {run_id} has moved on since the preview, so nothing was written; look at it again")
    done = await reopened(app, run_id, to, order, dry_run=False)
    row = await app.handle(run_id).row()
    if order.as_json:
        common.out_json({**record(done, dry_run=False), "status": row.status})
        return common.SUCCEEDED
    then = who_goes_on(app.reading, row, app.settings, order.url)
    if order.given:
        # The code that continues the run may be in another file than the recorded target.
        resume = f"{shell.command('resume', run_id)} {order.given}{common.url_words(order.url)}"
        then = f"a worker that serves version {done.version} goes on with it, or here: {resume}"
    common.out(common.clean(f"run {run_id} is queued, from event {done.back_to}; {then}"))
    return common.SUCCEEDED


def check_goes_on(plan: Reopened) -> None:
    """Conflict if the replay of the run ends in a failure before any call: a worker would only repeat that failure."""
    if plan.fails is not None:
        raise Conflict(
            f"run {plan.run_id} fails again with this code, before it makes any call: {clip(plan.fails, 200)}; nothing was written",
            hint=f"change the code first, or go back further: {shell.command('rewind', plan.run_id)} --to SEQ",
        )


async def reopened(app: Perdure, run_id: str, to: int | None, order: Order, *, dry_run: bool) -> Reopened:
    """Calls app.retry or app.rewind. If the code diverges, the error has a way out."""
    try:
        if to is None:
            return await app.retry(run_id, by=order.by, reason=order.reason, dry_run=dry_run, fresh=order.fresh, add=order.add)
        return await app.rewind(run_id, to, by=order.by, reason=order.reason, dry_run=dry_run, fresh=order.fresh, add=order.add)
    except Diverged as diverged:
        events = await app.handle(run_id).events()
        raise Diverged(
            f"run {run_id} cannot go on with this code, which is different: {diverged}; nothing was written",
            seq=diverged.seq,
            call=diverged.call,
            hint=_way_out(run_id, events, diverged, order),
        ) from diverged


def _way_out(run_id: str, events: list[Event], diverged: Diverged, order: Order) -> str:
    """The way out of a divergence: restore the code or, if possible, go back to an event before the difference."""
    known = {event.seq: event for event in history(events).events}
    at = known.get(diverged.seq)
    back = None if at is None else at.cause
    as_it_was = "put the code back as it was up to there"
    if back is None or back <= 2:
        return as_it_was
    command = f"{shell.command('rewind', run_id)} --to {back}{f' {order.given}' if order.given else ''}"
    return f"{as_it_was}, or go back to before the difference{_warning(events, back)}: {command}"


def _warning(events: list[Event], back: int) -> str:
    """A clause about the calls after the event `back` that have happened, or may have happened."""
    calls = [call for _, call in sorted(fold(events).calls.items()) if call.asked_seq > back and happened(call) != "no"]
    if not calls:
        return ""
    names = ", ".join(f"{call.tool} (call {call.number})" for call in calls[:3]) + (" …" if len(calls) > 3 else "")
    return f" (made since then: {names}; with other arguments this code makes one more)"


# -- the preview ------------------------------------------------------------------------------------------------------
def record(plan: Reopened, *, dry_run: bool) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.to_builtins(plan)
    return {**found, "dry_run": dry_run}


def preview(plan: Reopened, indent: str = "") -> Iterator[str]:
    """The preview of a retry or a rewind for a person: what happens with each call, the cost, and the version."""
    versions = f"version {plan.version}" + (f" instead of version {plan.before}" if plan.before != plan.version else ", as before")
    yield f"{indent}run {plan.run_id} goes on from event {plan.back_to}, with {versions}"
    effects = sum(call.effect not in ("read", "model") for call in plan.kept)
    yield f"{indent}  kept, and not made again: {plural(len(plan.kept), 'call')} with a result" + (
        f" ({effects:,} with an effect)" if effects else ""
    )
    for title, lines in (
        ("open", plan.open),
        ("used again, and nothing is sent", plan.reused),
        ("will run", plan.next),
    ):
        yield from _part(indent, title, lines)
    known = {call.call for call in plan.again} | {call.call for call in plan.superseded if call.next}
    superseded = [call for call in plan.superseded if call.call not in known]
    yield from _part(
        indent,
        "made before, and not known to the agent any more (the same call again: its recorded result is used; with other arguments: "
        "one more)",
        [_superseded(call) for call in superseded],
    )
    yield from _part(indent, "started before, and not known to the agent any more", [_child(child) for child in plan.superseded_children])
    if plan.superseded_children or any(call.undo and call.happened == "yes" for call in superseded):
        yield f"{indent}    what the agent does not make again stays done; when the run has ended: {shell.command('undo', plan.run_id)}"
    yield from _part(indent, "withdrawn, so that the agent has to ask again", plan.withdrawn)
    spent = ", ".join(part for part in (plural(plan.calls, "call") if plan.calls else "", used(plan.used)) if part)
    if spent:
        yield f"{indent}  used so far, and not refunded: {spent}"
    if used(plan.may_cost):
        yield f"{indent}  what will run first may cost: {used(plan.may_cost)}"
    for budget in plan.budgets:
        yield f"{indent}  {budget_words(budget, plan.run_id)}"
    if plan.added is not None:
        yield f"{indent}  added to its budget: {limits_words(plan.added)}"
    for child in plan.children:
        yield from preview(child, indent + "  ")
    # This comes last: it is the last line before the question.
    yield from _part(indent, "may happen twice", plan.twice)


def _part(indent: str, title: str, lines: list[str]) -> Iterator[str]:
    if not lines:
        return
    yield f"{indent}  {title}:"
    for line in lines[:SHOWN]:
        yield f"{indent}    {line}"
    if len(lines) > SHOWN:
        yield f"{indent}    … and {len(lines) - SHOWN:,} more (--json has all)"


def _child(child: ReopenedChild) -> str:
    return f"call {child.call}, child {child.run_id} ({child.agent}): {child.status or 'ended by force'}"


def _superseded(call: ReopenedCall) -> str:
    doubt = call.state in ("in_doubt", "started", "failing", "retry_wait", "idle") and call.effect in ("once", "keyed")
    state = "in doubt: it may have happened, and stays so until the agent makes it again" if doubt else call.state
    if call.state == "failed" and call.happened != "no":
        state = "happened; its result could not be recorded" if call.happened == "yes" else "failed, and may have happened"
    undo = ""
    if call.happened == "yes":
        undo = {True: "; its tool has an undo", False: "; its tool has no undo", None: "; whether it has an undo is not known"}[call.undo]
    return f"call {call.call} {call.tool} ({call.effect}): {state}{undo}; made with {call.args}"
