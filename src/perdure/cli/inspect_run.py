"""`perdure inspect`: the tasks, lines and variables of an agent at an event of its journal."""

from __future__ import annotations

import os
import pdb  # noqa: T100 – the debugger that `--pdb` opens
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from types import TracebackType
from typing import TYPE_CHECKING

import click
import msgspec

from perdure import shell
from perdure.cli import common
from perdure.cli.target import load_target, recorded_target
from perdure.core.identity import undone_by
from perdure.core.times import micros_of
from perdure.errors import InvalidInput, UnknownAgent
from perdure.inspect.inside import (
    InspectedFrame,
    InspectedTask,
    Inspection,
    Moment,
    RaisedError,
    Variable,
    agent_frames,
    journal_at,
    look_inside,
    moment_of,
)
from perdure.inspect.text import iso, plural
from perdure.inspect.view import loader, require

if TYPE_CHECKING:
    from perdure.engine.api import Reading
    from perdure.settings import Settings
    from perdure.store.api import RunRow


@click.command("inspect")
@common.run_argument
@click.argument("target", required=False)
@click.option("--at", type=int, metavar="SEQ", help="The moment after this event was delivered. Default: the end of the journal.")
@click.option("--all-frames", is_flag=True, help="Also the frames of perdure and of the standard library.")
@click.option("--pdb", "debug", is_flag=True, help="Open a debugger at that moment. It shows values as they are, secrets included.")
@click.option("--tools", metavar="FILE.py", help="If TARGET is a plan: the file with its tools.")
@common.url_option
@common.json_option
def command(
    run_id: str, target: str | None, at: int | None, all_frames: bool, debug: bool, tools: str | None, url: str | None, as_json: bool
) -> None:
    """Look into the agent of RUN at an event: its tasks, lines and variables, and what it waits for.

    Without --at, the event is the last event of the journal. There a failed run shows the line that failed. The
    recorded events are given to the code again; nothing is performed or written. TARGET is the code; without it, the
    code is the file that the journal names. Code 7 when the code asks for something else than the journal has.
    """
    if debug and as_json:
        raise InvalidInput("--pdb is for people and --json for programs; give one of them")
    settings = common.settings_with(url=url)
    with common.existing_runs(url) as store:
        row = require(store, run_id)
        # The output of the agent's module and of the agent itself is not the result: stdout has only the result.
        with redirect_stdout(sys.stderr):
            typed = "".join([*([] if at is None else [f" --at {at}"]), " --all-frames" * all_frames, " --pdb" * debug, " --json" * as_json])
            named = target or recorded_target(store, row, settings.url, "inspect", f"{typed}{common.url_words(url)}")
            with opened_run(store, row, named, tools, settings, at) as moment:
                inspection = look_inside(moment, all_frames=all_frames)
                if debug:
                    _debug(moment, inspection, all_frames)
                    return
    if as_json:
        common.out_json(msgspec.to_builtins(inspection))
    else:
        _print(inspection)


@contextmanager
def opened_run(store: Reading, row: RunRow, target: str, tools: str | None, settings: Settings, at: int | None = None) -> Iterator[Moment]:
    """The agent of the run at event `at`, made again with the code of the target."""
    if undone_by(row.run_id) is not None:
        raise InvalidInput(f"run {row.run_id} is an undo, which runs no code of yours; its calls: {shell.command('show', row.run_id)}")
    agent = load_target(target, tools).agent
    if agent.name != row.agent:
        raise UnknownAgent(f"run {row.run_id} belongs to agent {row.agent!r}, but the target is agent {agent.name!r}; name the right agent")
    journal = journal_at(row.run_id, store.read(row.run_id), at)
    with moment_of(agent, journal, loader(store), max_steps=settings.max_steps) as moment:
        yield moment


# -- the page ---------------------------------------------------------------------------------------------------------
def _headline(inspection: Inspection) -> str:
    woken = f"; its agent was last woken by event {inspection.woken_by} ({inspection.woken_type}) at {iso(micros_of(inspection.now))}"
    return f"run {inspection.run_id}  {inspection.agent}@{inspection.version}, at event {inspection.at}{woken}"


def _print(inspection: Inspection) -> None:
    _title(_headline(inspection))
    most = common.most_shown()
    for task in inspection.tasks[:most]:
        common.out()
        _title(_standing(task))
        for line in _task(task):
            common.out(common.clean(line))
    if len(inspection.tasks) > most:
        common.out(f"\n… {len(inspection.tasks) - most:,} more tasks; a file or a pipe gets all of them")
    _rest("open, and no task waits for it", [one.words for one in inspection.not_awaited])
    _rest("signals that have arrived and are not received yet", [f"{topic}: {count:,}" for topic, count in inspection.unread.items()])


def _title(line: str) -> None:
    common.out(common.style(common.clean(line), bold=True))


def _rest(title: str, lines: list[str]) -> None:
    if lines:
        common.out()
        _title(title)
        for line in lines:
            common.out(common.clean(f"  {line}"))


def _standing(task: InspectedTask) -> str:
    name = task.name if task.name == "agent" else f"task {task.name}"
    match task.state:
        case "waiting":
            return f"{name} waits for {'something that is not known' if task.awaits is None else task.awaits.words}"
        case "returned":
            return f"{name} returned {task.returned}"
        case "cancelled":
            return f"{name} was cancelled"
        case "raised":
            assert task.raised is not None
            return f"{name} failed: {_error(task.raised)}"


def _task(task: InspectedTask) -> Iterator[str]:
    for due in task.time_outs:
        yield f"  its asyncio.timeout ends at {iso(micros_of(due))}"
    yield from _variables(task.facts, "  ")
    yield from _frames(task.frames, "  ")
    if task.raised is not None:
        yield from _raised(task.raised, "  ")


def _raised(raised: RaisedError, indent: str) -> Iterator[str]:
    yield from _frames(raised.frames, indent)
    for number, member in enumerate(raised.members, 1):
        yield f"{indent}{number} of {plural(len(raised.members), 'exception')}: {_error(member)}"
        yield from _raised(member, indent + "  ")
    if raised.cause is not None:
        yield f"{indent}raised after {_error(raised.cause)}"
        yield from _raised(raised.cause, indent + "  ")


def _error(raised: RaisedError) -> str:
    return f"{raised.type}: {raised.message}" if raised.message else raised.type


def _frames(frames: tuple[InspectedFrame, ...], indent: str) -> Iterator[str]:
    for frame in frames:
        if frame.left_out:
            yield f"{indent}… {plural(frame.left_out, 'more frame')}"
        yield f"{indent}{_short(frame.file)}:{frame.line} in {frame.function}"
        for number, text in enumerate(frame.source, frame.first_line):
            yield f"{indent}{'>' if number == frame.line else ' '}{number:>5}  {text}".rstrip()
        yield from _variables(frame.variables, indent + "    ")


def _short(file: str) -> str:
    here = os.path.join(os.getcwd(), "")
    return file.removeprefix(here)


def _variables(variables: tuple[Variable, ...], indent: str) -> Iterator[str]:
    width = min(max((len(one.name) for one in variables), default=0), 20)
    yield from (f"{indent}{one.name:<{width}} = {one.value}" for one in variables)


# -- the debugger -----------------------------------------------------------------------------------------------------
class _Pdb(pdb.Pdb):
    """A debugger that cannot continue the code, because the frames belong to a recorded moment."""

    def do_step(self, _: str) -> None:
        self.message("this is a recorded moment, and nothing goes on from here; q ends the look")

    do_s = do_next = do_n = do_return = do_r = do_until = do_unt = do_jump = do_j = do_run = do_restart = do_step  # type: ignore[assignment]


def _debug(moment: Moment, inspection: Inspection, all_frames: bool) -> None:
    """Open the debugger at the innermost frame of the agent. Tools that are called in it are not performed."""
    frames = agent_frames(moment, all_frames=all_frames)
    if not frames:
        raise InvalidInput(f"run {inspection.run_id}: at event {inspection.at} its agent has no frame to look at; --all-frames shows all")
    trace: TracebackType | None = None
    for frame, line in reversed(frames):
        trace = TracebackType(trace, frame, frame.f_lasti, line)
    # The debugger gets the real stdout: `input` edits lines and keeps a history only on a real terminal.
    with redirect_stdout(sys.__stdout__ or sys.stdout), moment.machine.entered():
        print(common.clean(_headline(inspection)))
        print(common.clean(_standing(inspection.tasks[0])), flush=True)
        # No .pdbrc is read: the current folder may be shared, and must not choose what this process runs.
        debugger = _Pdb(nosigint=True, readrc=False)
        debugger.reset()
        debugger.interaction(None, trace)
