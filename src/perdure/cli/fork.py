"""`perdure fork`: rehearse a recorded run from any event on. No tool touches the world, and nothing is stored."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec
from msgspec import UNSET

from perdure.cli import common
from perdure.cli.target import load_target, recorded_target
from perdure.core import codec
from perdure.errors import InvalidInput, NotEncodable, UnknownAgent
from perdure.inspect.diff import DiffCall, diff_lines, diff_page, diff_record, end_words
from perdure.inspect.newfile import new_file, require_new
from perdure.inspect.text import used
from perdure.inspect.view import require

if TYPE_CHECKING:
    from perdure.agent import Agent
    from perdure.engine.api import Reading
    from perdure.fork import Fork, Stub
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
    url: str | None,
    as_json: bool,
) -> int:
    """Rehearse RUN from an event on, with this code: what would its agent do? Nothing is called, nothing is stored.

    A call with a recorded outcome gets that outcome. For any other call, the answer comes from --answers, or else from
    the tool's stand-in (@tool.simulate), or else, only with --reads, from `read` tools and models. At a call without
    an answer the rehearsal stops, and shows the call with its exact arguments. Then it prints the diff to the recorded
    run.
    """
    if len(words) > 2:
        raise InvalidInput("give one run and at most one target: perdure fork RUN [TARGET]")
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
        if model is not None:
            agent = agent.with_model(model)
        options: dict[str, Any] = {"at": at, "edits": changed, "input": arguments}
        found = asyncio.run(_forked(store, settings, answers, reads, model is not None, row.run_id, agent, options))
    if page is not None:
        with new_file(Path(page)) as file:
            file.write(diff_page(found.diff).encode())
    if as_json:
        common.out_json(_record(found))
        return common.SUCCEEDED
    _show(found)
    return common.SUCCEEDED


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
        return await forks.fork(run_id, agent, **options)


def _record(found: Fork) -> dict[str, Any]:
    record: dict[str, Any] = {**msgspec.to_builtins(found), "asked": msgspec.structs.asdict(found.asked)}
    return {**record, "diff": diff_record(found.diff)}


def _show(found: Fork) -> None:
    common.out(common.clean(f"a rehearsal, not stored: {found.diff.right.name}, agent {found.agent}@{found.version}"))
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
        raise InvalidInput(f"{option}: {error}") from None


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
