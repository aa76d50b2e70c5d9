"""`perdure undo`: call the compensate hooks for the calls of a finished run, the last call first."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from perdure import shell
from perdure.cli import common
from perdure.cli.driving import command as command_to
from perdure.cli.driving import stop_on_signals
from perdure.cli.target import load_target, recorded_target, resume_command
from perdure.cli.who import os_user
from perdure.core.events import Event, StatusReported, ToolCallFailed, ToolCallInDoubt
from perdure.core.identity import undo_id, undone_by
from perdure.engine.api import Reading
from perdure.errors import InvalidInput, UnknownAgent
from perdure.logs import log_to_stderr
from perdure.settings import Settings
from perdure.store.api import FINISHED, RunRow

if TYPE_CHECKING:
    from perdure.agent import Agent
    from perdure.app import Perdure
    from perdure.undo import Deed, Progress, UndoPlan

_WIDTH = 100  # at most this many characters of arguments or of a result


@click.command("undo")
@common.run_argument
@click.argument("target", metavar="[TARGET]", required=False)
@click.option("--tools", metavar="FILE.py", help="If TARGET is a plan: the file with its tools.")
@click.option("--yes", is_flag=True, help="Undo what can be undone, and do not ask about the rest.")
@click.option("--dry-run", is_flag=True, help="Only print what would be undone, and what cannot be undone.")
@common.url_option
@common.json_option
def command(run_id: str, target: str | None, tools: str | None, yes: bool, dry_run: bool, url: str | None, as_json: bool) -> int:
    """Undo RUN, which has ended: call the @tool.compensate hooks for the completed calls of RUN and of its children.

    The last call is undone first. The hooks are calls of a separate run, RUN/undo. If you run the command again, it
    continues where it stopped, and tries a failed hook again. Without TARGET the recorded code of the run is used, as
    in `perdure resume`.
    """
    from perdure.undo import undoable

    settings = common.settings_with(url=url)
    log_to_stderr("", logging.WARNING)
    with common.existing_runs(url) as store:
        row = undoable(store, run_id)
        begun = store.get(undo_id(run_id))
        if begun is not None and begun.status in FINISHED:
            if not as_json:
                common.note(f"the undo of run {run_id} has ended already; nothing is done")
            return _finish(store, run_id, begun, settings.url, url, as_json)  # reading the result needs no code
        words = target or recorded_target(store, row, settings.url, "undo", common.url_words(url))
    agent = load_target(words, tools).agent  # before asyncio.run: the import of a module may run a loop
    if agent.name != row.agent:
        raise UnknownAgent(f"run {run_id} belongs to agent {row.agent!r}, but the target is agent {agent.name!r}; name the right agent")
    return asyncio.run(_undo(settings, run_id, agent, yes=yes, dry_run=dry_run, url=url, as_json=as_json))


async def _undo(
    settings: Settings, run_id: str, agent: Agent[Any, Any], *, yes: bool, dry_run: bool, url: str | None, as_json: bool
) -> int:
    from perdure.app import Perdure
    from perdure.undo import progress

    async with Perdure(agents=[agent], settings=settings, observers=[_show]) as app:
        begun = app.reading.get(undo_id(run_id)) is not None
        if dry_run and begun:
            _show_progress(run_id, progress(app.reading, run_id), as_json)
            return common.SUCCEEDED
        if not begun:
            plan = await app.plan_undo(run_id)
            if dry_run:
                _show_plan(plan, as_json)
                return common.SUCCEEDED
            if not plan.steps and not plan.left:
                _say_nothing(run_id, as_json)
                return common.SUCCEEDED
            _ask(plan, yes)
            if not plan.steps:
                raise InvalidInput(f"perdure can undo nothing that run {run_id} has done; undo the calls above by hand")
        return await _drive(app, run_id, url, as_json)


async def _drive(app: Perdure, run_id: str, url: str | None, as_json: bool) -> int:
    stop = stop_on_signals(asyncio.get_running_loop())
    undone = await app.undo(run_id, by=os_user(), accept=True, stop=stop)
    return _finish(app.reading, run_id, await app.handle(undone.id).row(), app.url, url, as_json)


# -- before -----------------------------------------------------------------------------------------------------------
def _ask(plan: UndoPlan, yes: bool) -> None:
    """Print the calls that cannot be undone. Return only with --yes, or after the user has confirmed."""
    if not plan.left:
        return
    for line in _left_lines(plan):
        common.note(line)
    if yes:
        return
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise InvalidInput(
            f"{_calls(len(plan.left))} of run {plan.run_id}, named above, would stay; say --yes to undo the other {len(plan.steps)}"
        )
    if not click.confirm(f"undo the other {_calls(len(plan.steps))}, and leave these?", err=True):
        common.fail("nothing was undone")


def _left_lines(plan: UndoPlan) -> list[str]:
    lines: list[str] = []
    for words, deeds in (("cannot be undone", plan.irreversible), ("in doubt, and not undone", plan.doubtful)):
        if deeds:
            lines += [f"{words}:", *_deed_lines(deeds)]
    return lines


def _deed_lines(deeds: Sequence[Deed]) -> list[str]:
    lines: list[str] = []
    for deed in deeds:
        lines.append(common.clean(f"  call {deed.call} of {deed.run_id}: {deed.tool}({_short(deed.arguments)}){_outcome(deed)}"))
        lines.append(common.clean(f"    {common.iso(deed.at)}{f'; {deed.why}' if deed.why else ''}"))
    return lines


def _outcome(deed: Deed) -> str:
    # Do not test `deed.result`: null is a result too. Only a call in doubt has no result.
    return "" if deed.in_doubt else f" → {_short(deed.result)}"


def _show_plan(plan: UndoPlan, as_json: bool) -> None:
    if as_json:
        kinds = {"irreversible": plan.irreversible, "in_doubt": plan.doubtful, "steps": plan.steps}
        common.out_json({"run_id": plan.run_id, **{kind: [_record(deed) for deed in deeds] for kind, deeds in kinds.items()}})
        return
    for line in _left_lines(plan):
        common.out(line)
    if not plan.steps:
        common.out("nothing to undo" if not plan.left else "nothing else to undo")
        return
    common.out("would be undone, in this order:")
    for line in _deed_lines(plan.steps):
        common.out(line)


def _record(deed: Deed) -> dict[str, Any]:
    return {
        "run_id": deed.run_id,
        "call": deed.call,
        "tool": deed.tool,
        "effect": deed.effect,
        "args": deed.arguments,
        "result": deed.result,
        "at": common.iso(deed.at),
        "why": deed.why,
    }


def _show_progress(run_id: str, found: Progress, as_json: bool) -> None:
    if as_json:
        common.out_json({"run_id": run_id, "done": found.steps[: found.done], "steps": found.steps[found.done :]})
        return
    common.out(f"the undo of run {run_id} has begun: {found.done} of {_calls(len(found.steps))} done; to be undone, in this order:")
    for step in found.steps[found.done :]:
        common.out(common.clean(f"  {_step(step)}"))


def _say_nothing(run_id: str, as_json: bool) -> None:
    if as_json:
        common.out_json({"run_id": run_id, "undo": None, "status": None, "undone": [], "given_up": [], "left": [], "error": None})
    else:
        common.out(f"run {run_id} has changed nothing: there is nothing to undo")


# -- meanwhile --------------------------------------------------------------------------------------------------------
def _show(run_id: str, events: Sequence[Event]) -> None:
    """Print failures and doubts of the hooks. If stderr is a terminal, also print the steps of the undo."""
    for event in events:
        body = event.body
        if isinstance(body, StatusReported) and sys.stderr.isatty():
            common.note(common.clean(f"  {body.text}"))
        elif isinstance(body, ToolCallFailed):
            common.note(common.clean(f"  its hook failed: {body.failure.type}: {body.failure.message}"))
        elif isinstance(body, ToolCallInDoubt):
            common.note(common.clean(f"  its hook is in doubt: {body.why}"))


# -- afterwards -------------------------------------------------------------------------------------------------------
def _finish(store: Reading, run_id: str, row: RunRow, settings_url: str, url: str | None, as_json: bool) -> int:
    """Print which calls were undone, or why the undo stopped and what to type. Return the exit code."""
    from perdure.undo import progress

    found = progress(store, run_id)
    done = [step for step in found.steps[: found.done] if step not in found.given_up]
    if as_json:
        parts = {"undone": done, "given_up": found.given_up, "left": found.left}
        common.out_json({"run_id": run_id, "undo": row.run_id, "status": row.status, **parts, "error": row.error})
    elif row.status == "succeeded":
        stays = [*found.given_up, *found.left]
        said = f"run {run_id} is undone: {_calls(len(done))}" if done else f"nothing of run {run_id} was undone"
        common.out(common.clean(said + (f"; not undone: {_steps(stays)}" if stays else "")))
    if row.status != "succeeded":
        common.note(common.clean(f"perdure: {_why_stopped(store, row, found, resume_command(store, row, settings_url, url), url)}"))
    return common.HELD if row.holder is not None and row.status not in FINISHED else common.CODE_OF_STATUS[row.status]


def _why_stopped(store: Reading, row: RunRow, found: Progress, again: str, url: str | None) -> str:
    from perdure.store.api import ApprovalFilter

    how_far = f"the undo of run {undone_by(row.run_id)} has done {found.done} of {_calls(len(found.steps))}"
    match row.status:
        case "waiting_approval":
            asked = store.approvals(ApprovalFilter(run_id=row.run_id))
            reject = f"{shell.command('reject', asked[0].approval if asked else 'ID')} --reason TEXT{common.url_words(url)}"
            return f"{how_far}, and {_step(found.steps[found.done])} could not be undone; try again: {again}; or leave that call as it is: {reject}"
        case "needs_attention":
            return f"{how_far} and needs attention: {row.error or row.waiting_for}; {command_to('why', row.run_id, url)} says how to settle it, then: {again}"
        case "cancelled" | "failed":
            # The undo has ended, and an ended run never continues (G10). A second undo could call a hook twice.
            return f"{how_far}, and was {row.status}: the rest stays as it is"
        case _:
            return f"{how_far} and is {row.status.replace('_', ' ')}{f': {row.waiting_for}' if row.waiting_for else ''}; go on: {again}"


def _step(step: dict[str, Any]) -> str:
    return f"call {step['call']} ({step['tool']}) of run {step['run']}"


def _steps(steps: Sequence[dict[str, Any]]) -> str:
    return ", ".join(map(_step, steps))


def _calls(count: int) -> str:
    return f"{count} call{'' if count == 1 else 's'}"


def _short(value: Any) -> str:
    from perdure.inspect.text import clip

    return clip(common.to_json(value), _WIDTH)
