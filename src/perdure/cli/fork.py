"""`perdure fork`: rehearse a recorded run from any event on, without effects; or, with --live, go on from there as a new run."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec
from msgspec import UNSET

from perdure.cli import common
from perdure.cli.reopening import SHOWN, Order
from perdure.cli.steering import by_option, speaker, who_goes_on
from perdure.cli.target import load_target, recorded_target, with_tools
from perdure.core import codec
from perdure.errors import Conflict, InvalidInput, NotEncodable, UnknownAgent
from perdure.inspect.diff import DiffCall, diff_lines, diff_page, diff_record, end_words
from perdure.inspect.newfile import new_file, require_new
from perdure.inspect.text import limits_words, plural, used
from perdure.inspect.view import require

if TYPE_CHECKING:
    from perdure.agent import Agent
    from perdure.engine.api import Reading
    from perdure.fork import Fork, Stub
    from perdure.reopen import LiveFork
    from perdure.settings import Settings


@click.command("fork")
@click.argument("words", nargs=-1, required=True, metavar="RUN [TARGET]")
@click.option("--at", type=int, metavar="SEQ", help="Begin after this event. Default: before the first edited outcome, or the beginning.")
@click.option("--edit", "edits", multiple=True, metavar="CALL=JSON", help="The result that this call has instead. Can be repeated.")
@click.option("--input", "given", metavar="JSON", help="Other arguments of the agent, as an object.")
@click.option("--set-model", "model", metavar="NAME", help="Another model for a ReAct agent; models are asked then.")
@click.option("--answers", "answers_file", metavar="FILE", help="Prepared answers: a JSON list of {tool, args, result or error}.")
@click.option("--reads", is_flag=True, help="Call `read` tools and ask models. All other tools are never called.")
@click.option("--tools", metavar="FILE.py", help="If TARGET is a plan: the file with its tools.")
@click.option("--html", "page", metavar="FILE", help="Also write the diff to this new HTML file.")
@click.option("--id", "new_id", metavar="ID", help="Store the fork as a run with this id. With --live: the id of the new run.")
@click.option("--live", is_flag=True, help="Make a real run that goes on from there, WITH effects. Shows first what may happen twice.")
@click.option("--dry-run", is_flag=True, help="With --live: only show what may happen twice.")
@click.option("--yes", is_flag=True, help="With --live: do not ask.")
@click.option("--reason", metavar="TEXT", help="Why; a note for the journal of the fork.")
@by_option("Who makes the fork.")
@common.url_option
@common.json_option
def command(
    words: tuple[str, ...],
    at: int | None,
    edits: tuple[str, ...],
    given: str | None,
    model: str | None,
    answers_file: str | None,
    reads: bool,
    tools: str | None,
    page: str | None,
    new_id: str | None,
    live: bool,
    dry_run: bool,
    yes: bool,
    reason: str | None,
    by: str | None,
    url: str | None,
    as_json: bool,
) -> int:
    """Rehearse RUN from an event on, with this code: what would its agent do? No tool touches the world.

    A call with a recorded outcome gets that outcome. For any other call, the answer comes from --answers, or else from
    the tool's stand-in (@tool.simulate), or else, only with --reads, from `read` tools and models. At a call without
    an answer the rehearsal stops, and shows the call with its exact arguments. Then it prints the diff to the recorded
    run. With --id the rehearsal is stored, so that people can look at it like at any run; no worker ever drives it.

    With --live a new run goes on from there, with effects and with keys of its own. What RUN has done does not happen
    again: if the fork makes the same call, the recorded result is used.
    """
    if len(words) > 2:
        raise InvalidInput("give one run and at most one target: perdure fork RUN [TARGET]")
    _check_options(live, dry_run, yes, answers_file, reads, model, page)
    settings = common.settings_with(url=url)
    changed = edits_of(edits)
    arguments: Any = UNSET if given is None else parsed(given, "--input")
    answers = read_answers(answers_file)
    if page is not None:
        require_new(Path(page))
    with common.existing_runs(url) as store:
        row = require(store, words[0])
        target = words[1] if len(words) == 2 else recorded_target(store, row, settings.url, "fork", common.url_words(url))
        agent = load_target(target, tools).agent
        if agent.name != row.agent:
            raise UnknownAgent(
                f"run {row.run_id} belongs to agent {row.agent!r}, but the target is agent {agent.name!r}; name the right agent"
            )
        order = Order(speaker(by), reason, False, url, as_json, yes, dry_run, "" if len(words) == 1 else with_tools(words[1], tools))
        options: dict[str, Any] = {"at": at, "edits": changed}
        given_input = {} if arguments is UNSET else {"input": arguments}
        if live:
            return asyncio.run(_go_live(settings, row.run_id, new_id, agent, order, options | given_input))
        if new_id is not None:
            options |= given_input
            options |= {"answers": answers, "reads": reads, "model": model, "id": new_id, "by": order.by, "reason": reason}
            found = asyncio.run(_stored(settings, row.run_id, agent, options))
        else:
            used_agent = agent if model is None else agent.with_model(model)
            options["input"] = arguments
            found = asyncio.run(_forked(store, settings, answers, reads, model is not None, row.run_id, used_agent, options))
    if page is not None:
        with new_file(Path(page)) as file:
            file.write(diff_page(found.diff).encode())
    if as_json:
        common.out_json(_record(found))
        return common.SUCCEEDED
    _show(found)
    return common.SUCCEEDED


def _check_options(live: bool, dry_run: bool, yes: bool, answers: str | None, reads: bool, model: str | None, page: str | None) -> None:
    """InvalidInput if the options do not go together."""
    if not live and (dry_run or yes):
        raise InvalidInput(f"{'--dry-run' if dry_run else '--yes'} goes with --live only: a rehearsal touches nothing")
    if live and (answers is not None or reads):
        raise InvalidInput(
            "--live makes real calls, so a prepared answer would be an effect that never happened; leave --answers and --reads out"
        )
    if live and model is not None:
        raise InvalidInput("--live goes on with the code that its worker has: set the model in the code, and name that code as TARGET")
    if live and page is not None:
        raise InvalidInput("--html shows a rehearsal; leave it out, or leave --live out")


async def _stored(settings: Settings, run_id: str, agent: Agent[Any, Any], options: dict[str, Any]) -> Fork:
    from perdure.app import Perdure

    async with Perdure(agents=[agent], settings=settings) as app:
        return await app.fork(run_id, **options)


async def _go_live(
    settings: Settings, run_id: str, new_id: str | None, agent: Agent[Any, Any], order: Order, options: dict[str, Any]
) -> int:
    """Show what may happen twice, ask, and make the new run."""
    from perdure.app import Perdure

    async with Perdure(agents=[agent], settings=settings) as app:
        said = {"id": new_id or app.clock.new_id(), "by": order.by, "reason": order.reason, **options}
        seen = (await app.handle(run_id).row()).seq
        plan = await app.live_fork(run_id, dry_run=True, **said)
        if order.dry_run and order.as_json:
            common.out_json({**msgspec.to_builtins(plan), "dry_run": True})
            return common.SUCCEEDED
        if not order.dry_run:
            common.check_terminal("fork --live", yes=order.yes)
        for line in _live_preview(plan):
            (common.out if order.dry_run else common.note)(common.clean(line))
        if order.dry_run:
            return common.SUCCEEDED
        if not order.yes and not click.confirm(f"make run {plan.run_id}, with effects?", err=True):
            common.fail("nothing was written")
        if not order.yes and (await app.handle(run_id).row()).seq != seen:
            raise Conflict(f"run {run_id} has moved on since the list was shown, so nothing was written; look at it again")
        done = await app.live_fork(run_id, **said)
        row = await app.handle(done.run_id).row()
        if order.as_json:
            common.out_json({**msgspec.to_builtins(done), "dry_run": False, "status": row.status})
            return common.SUCCEEDED
        then = who_goes_on(app.reading, row, app.settings, order.url)
        common.out(common.clean(f"run {done.run_id} is queued: it goes on from event {done.at} of run {run_id}; {then}"))
        return common.SUCCEEDED


def _live_preview(plan: LiveFork) -> Iterator[str]:
    """What a live fork means, for a person."""
    versions = f"version {plan.version}" + (f" instead of version {plan.before}" if plan.before != plan.version else ", as before")
    yield f"run {plan.run_id} goes on from event {plan.at} of run {plan.parent}, WITH effects, with {versions}"
    yield f"  kept, and not made again: {plural(plan.kept, 'call')} with a result"
    if plan.edits:
        yield f"  with another result: call {', '.join(map(str, plan.edits))}"
    if plan.reused:
        yield from _listed("used again, and nothing is sent", plan.reused)
    yield from _listed("will run first", plan.next)
    if used(plan.used):
        yield f"  run {plan.parent} has used so far: {used(plan.used)}"
    if used(plan.may_cost):
        yield f"  what will run first may cost: {used(plan.may_cost)}"
    if plan.budget is not None:
        yield f"  its own budget, of which nothing is used: {limits_words(plan.budget)}"
    yield from _listed("may happen twice", plan.twice or ["nothing that is known"])


def _listed(title: str, lines: Sequence[str]) -> Iterator[str]:
    yield f"  {title}:"
    yield from (f"    {line}" for line in lines[:SHOWN])
    if len(lines) > SHOWN:
        yield f"    … and {len(lines) - SHOWN:,} more (--dry-run --json has all)"


async def _forked(
    store: Reading,
    settings: Settings,
    answers: Sequence[Stub],
    reads: bool,
    models: bool,
    run_id: str,
    agent: Agent[Any, Any],
    options: dict[str, Any],
) -> Fork:
    from perdure.fork import Forks

    async with Forks(store, settings, answers=answers, reads=reads, models=models) as forks:
        return (await forks.fork(run_id, agent, **options))[0]


def _record(found: Fork) -> dict[str, Any]:
    fields = {name: getattr(found, name) for name in found.__struct_fields__ if name not in ("asked", "diff")}
    return {**msgspec.to_builtins(fields), "asked": msgspec.structs.asdict(found.asked), "diff": diff_record(found.diff)}


def _show(found: Fork) -> None:
    stored = "not stored" if found.id is None else f"stored as run {found.id}"
    common.out(common.clean(f"a rehearsal, {stored}: {found.diff.right.name}, agent {found.agent}@{found.version}"))
    common.out(common.clean(end_words(found.diff.right)))
    for call in found.would_call:
        for line in would_call_lines(call):
            common.out(line)
    if found.unused_edits:
        numbers = ", ".join(map(str, found.unused_edits))
        common.out(f"not used: the edit of call {numbers}, which the agent did not make again")
    if used(found.asked):
        common.out(f"this rehearsal has used {used(found.asked)}")
    common.out()
    for line in diff_lines(found.diff):
        common.out(common.clean(line))


def would_call_lines(call: DiffCall) -> list[str]:
    """The call that the agent would make now, with its exact arguments."""
    verb = {"tool": "call", "model": "ask the model", "approval": "ask for the approval", "child": "start the child"}[call.kind]
    first, *rest = common.json_lines(call.args) if not isinstance(call.args, str) else [common.clean(call.args)]
    return [common.clean(f"would now {verb} {call.name}: ") + first, *rest]


# -- what the user typed ----------------------------------------------------------------------------------------------
def parsed(text: str, option: str) -> Any:
    """The JSON value of an option. InvalidInput if the text is not JSON."""
    try:
        return codec.parse(text, option)
    except NotEncodable as error:
        raise InvalidInput(str(error)) from None


def edits_of(words: Iterable[str]) -> dict[int, Any]:
    """Number of a call → its edited result."""
    found: dict[int, Any] = {}
    for one in words:
        number, separator, text = one.partition("=")
        if not separator or not number.strip().isdecimal() or not number.isascii():
            raise InvalidInput(f"--edit {codec.shown(one)}: write CALL=JSON, such as --edit 3='\"done\"'")
        if int(number) in found:
            raise InvalidInput(f"--edit: call {int(number)} is edited twice; give one result for it")
        found[int(number)] = parsed(text, f"--edit {int(number)}")
    return found


def read_answers(file: str | None) -> Sequence[Stub]:
    """The prepared answers in this file; no answers if no file is given."""
    if file is None:
        return ()
    from perdure.fork import stubs_of

    try:
        text = Path(file).read_bytes()
    except OSError as error:
        raise InvalidInput(f"--answers {file}: {error.strerror}") from None
    try:
        return stubs_of(parsed(text.decode("utf-8", "replace"), "the file"))
    except InvalidInput as wrong:
        raise InvalidInput(f"--answers {file}: {wrong}") from None
