"""`perdure replay`: check recorded runs against this code."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, get_args

import click
import msgspec

from perdure import shell
from perdure.cli import common
from perdure.cli.target import load_target, load_targets, recorded_target, with_children
from perdure.core.query import EVERYTHING
from perdure.engine.api import Reading
from perdure.engine.local.sandbox import guard
from perdure.errors import Conflict, InvalidInput, PerdureError, UnknownAgent
from perdure.inspect.replay import Different, Same, compare
from perdure.inspect.text import plural
from perdure.inspect.view import all_rows, loader, read_run, require
from perdure.settings import Settings
from perdure.store.api import FINISHED, NO_VERSION, RunRow

if TYPE_CHECKING:
    from perdure.agent import Agent
    from perdure.inspect.export import ExportedJournal


@click.command("replay")
@click.argument("words", nargs=-1, required=True, metavar="RUN [TARGET]")
@click.option("--export", "file", metavar="FILE", help="Check the runs in a file of `perdure export`; all arguments are TARGETs then.")
@click.option("--all", "every", is_flag=True, help="Check every run of the agents of TARGET, instead of one RUN.")
@click.option("--live-only", is_flag=True, help="With --all: only unfinished runs, with a verdict for each. A check before a deploy.")
@click.option("--tools", metavar="FILE.py", help="If TARGET is a plan: the file with its tools.")
@common.url_option
@common.json_option
def command(
    words: tuple[str, ...], file: str | None, every: bool, live_only: bool, tools: str | None, url: str | None, as_json: bool
) -> int:
    """Check recorded runs against this code: RUN [TARGET], --all TARGET, or --export FILE TARGET.

    Nothing is performed or written. With --all, finished runs of another declared version are left out, because a new
    version may ask for other calls on purpose. Code 7 when the code asks for something else than a journal has.

    With --all --live-only, every unfinished run gets one of three verdicts: it continues with this code; it continues
    if this version adopts it; or it diverges, and needs its own version. Code 7 if a run diverges.
    """
    settings = common.settings_with(url=url)
    guard()  # an agent must not do I/O in a replay either
    if live_only and not every:
        raise InvalidInput("--live-only goes with --all: perdure replay --all --live-only TARGET")
    if file is not None:
        if every:
            raise InvalidInput("--all means the runs of a database, and --export those of a file; give one of them")
        return _exported(file, words, tools, settings, as_json)
    if live_only:
        return _before_a_deploy(words, tools, settings, url, as_json)
    different = total = passed_over = 0
    with common.existing_runs(url) as store:
        for row, agent in _every(store, words, tools) if every else _one(store, words, tools, settings, common.url_words(url)):
            if every and _is_history(row, agent):
                passed_over += 1
                continue
            found = _compare(store, row, agent, settings)
            total, different = total + 1, different + (not found.same)
            if as_json:
                common.out_json(msgspec.to_builtins(found))
            elif not found.same or not every:
                common.out(common.clean(_line(found, row, agent)))
    if every and not as_json:
        others = f"; {plural(passed_over, 'finished run')} of other versions left out" if passed_over else ""
        common.out(
            f"{plural(total, 'run')}: "
            + (f"{different:,} would go another way with this code" if different else "all the same with this code")
            + others
        )
    return common.DIFFERENT if different else common.SUCCEEDED


def _exported(file: str, words: tuple[str, ...], tools: str | None, settings: Settings, as_json: bool) -> int:
    """Compare the runs of an export with the agents of the targets, and with the agents that their code names."""
    from perdure.inspect.export import load

    exported = load(file)
    targets = with_children([loaded.agent for target in words for loaded in load_targets(target, tools)])
    agents = {agent.name: agent for agent in reversed(targets)}  # if two agents have one name, the first counts
    if exported.root.agent not in agents:
        raise UnknownAgent(
            f"{file} is of agent {exported.root.agent!r}, but {' '.join(words)} has {', '.join(agents)}; name the right agent"
        )
    different = 0
    for run in exported.runs.values():
        agent = agents.get(run.agent)
        if agent is None:
            common.note(common.clean(f"run {run.run_id} left out: it belongs to agent {run.agent}, which {' '.join(words)} does not have"))
            continue
        make = partial(agent.machine_of, load=exported.load, max_steps=settings.max_steps)
        found = compare(run.run_id, run.events, run.state, make, exported.load)
        different += not found.same
        if as_json:
            common.out_json(msgspec.to_builtins(found))
        else:
            common.out(common.clean(_line(found, run, agent)))
    return common.DIFFERENT if different else common.SUCCEEDED


Verdict = Literal["goes on", "goes on if adopted", "diverges"]


def _before_a_deploy(words: tuple[str, ...], tools: str | None, settings: Settings, url: str | None, as_json: bool) -> int:
    """Replay every unfinished run with this code. Say for each run what happens to it if this code is deployed."""
    counts: Counter[Verdict] = Counter()
    with common.existing_runs(url) as store:
        live = [(row, agent) for row, agent in _every(store, words, tools) if row.status not in FINISHED and row.specimen is None]
        found: Iterator[Same | Different] = (_preview(store, row, agent, settings) for row, agent in live)
        if len(live) >= _MANY and (cores := len(os.sched_getaffinity(0))) > 1:
            found = _in_processes(live, words, tools, url, cores)
        for (row, agent), one in zip(live, common.with_progress(found, len(live)), strict=True):
            without = row.version in (NO_VERSION, *agent.former_versions, agent.version)
            verdict: Verdict = "diverges" if not one.same else "goes on" if without else "goes on if adopted"
            counts[verdict] += 1
            if as_json:
                versions = {"version": row.version, "this_version": agent.version}
                common.out_json({**msgspec.to_builtins(one), "verdict": verdict, **versions})
            elif verdict != "goes on" and counts[verdict] <= common.most_shown():
                for line in _verdict(verdict, one, row, agent, common.url_words(url)):
                    common.out(common.clean(line))
    if not as_json:
        counted = ", ".join(
            f"{counts[verdict]:,} {_WORDS[verdict][counts[verdict] != 1]}" for verdict in get_args(Verdict) if counts[verdict]
        )
        common.out(f"{plural(len(live), 'unfinished run')}{f': {counted}' if counted else ''}")
    return common.DIFFERENT if counts["diverges"] else common.SUCCEEDED


_WORDS: dict[Verdict, tuple[str, str]] = {
    "goes on": ("goes on with this code", "go on with this code"),
    "goes on if adopted": ("goes on if this version adopts it", "go on if this version adopts them"),
    "diverges": ("diverges", "diverge"),
}
_MANY = 64  # for fewer runs, it takes longer to start more processes than they save


def _verdict(verdict: Verdict, found: Same | Different, row: RunRow, agent: Agent[Any, Any], options: str) -> Iterator[str]:
    if isinstance(found, Same):
        yield f"run {row.run_id} ({row.status}): has version {row.version}; this code is {agent.version} and can go on with it"
        yield f"    adopt it: {shell.command('adopt', row.run_id)}{options}"
        return
    if row.version == NO_VERSION:
        yield f"run {row.run_id} ({row.status}): has not begun, and would fail with this code"
        yield f"    {found.difference}"
        return
    place = "" if found.seq is None else f" at event {found.seq}"
    yield f"run {row.run_id} ({row.status}): diverges{place}; it needs version {row.version}"
    if found.seq is None:
        yield f"    {found.difference}"
    else:
        yield f"    journal: {found.recorded or 'nothing'}"
        yield f"    code:    {found.asked or 'nothing'}"


def _in_processes(
    live: Sequence[tuple[RunRow, Agent[Any, Any]]], words: tuple[str, ...], tools: str | None, url: str | None, cores: int
) -> Iterator[Same | Different]:
    """The same comparisons in several processes, because a replay needs the processor and does not wait."""
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    # "spawn" and not "fork", because the target's code may have started threads.
    with ProcessPoolExecutor(cores, get_context("spawn"), _begin_process, (words, tools, url)) as pool:
        yield from pool.map(_compare_there, [(row.run_id, agent.name) for row, agent in live], chunksize=8)


_here: dict[str, Any] = {}  # only in a process of `_in_processes`: the agents, and a function that reads the journal


def _begin_process(words: tuple[str, ...], tools: str | None, url: str | None) -> None:
    guard()
    opened = ExitStack()
    _here["store"] = opened.enter_context(common.existing_runs(url))
    _here["agents"] = {loaded.agent.name: loaded.agent for target in words for loaded in load_targets(target, tools)}
    _here["settings"] = common.settings_with(url=url)
    _here["opened"] = opened  # the end of the process closes it


def _compare_there(which: tuple[str, str]) -> Same | Different:
    run_id, agent = which
    return _preview(_here["store"], require(_here["store"], run_id), _here["agents"][agent], _here["settings"])


def _one(
    store: Reading, words: tuple[str, ...], tools: str | None, settings: Settings, options: str
) -> Iterator[tuple[RunRow, Agent[Any, Any]]]:
    if len(words) > 2:
        raise InvalidInput("give one run and at most one target: perdure replay RUN [TARGET]")
    row = require(store, words[0])
    target = words[1] if len(words) == 2 else recorded_target(store, row, settings.url, "replay", options)
    agent = load_target(target, tools).agent
    if agent.name != row.agent:
        raise UnknownAgent(f"run {row.run_id} belongs to agent {row.agent!r}, but the target is agent {agent.name!r}; name the right agent")
    yield row, agent


def _every(store: Reading, words: tuple[str, ...], tools: str | None) -> Iterator[tuple[RunRow, Agent[Any, Any]]]:
    for target in words:
        for loaded in load_targets(target, tools):
            for row in all_rows(store, EVERYTHING.also(agent=loaded.agent.name)):
                yield row, loaded.agent


def _is_history(row: RunRow, agent: Agent[Any, Any]) -> bool:
    """Is this a finished run of another version, and does this code declare its version? Then the run need not replay.

    A version is declared if it is not the digest of the source.
    """
    from perdure.agent import source_digest

    return row.status in FINISHED and row.version != agent.version and agent.version != source_digest(agent.fn)


def _preview(store: Reading, row: RunRow, agent: Agent[Any, Any], settings: Settings) -> Same | Different:
    """What a deploy of this code means for an unfinished run: can the run begin with it, or go on with it?"""
    reading, load = read_run(store, row.run_id), loader(store)
    state = reading.state
    if state.started_seq is None and state.created is not None:
        misfit = agent.input_misfit(state.created, load)
        return Same(row.run_id, state.status, 0, 0) if misfit is None else Different(row.run_id, state.status, None, None, misfit)
    found = _compare(store, row, agent, settings)
    if found.same or row.version == agent.version:
        return found
    try:
        agent.adoption(state, reading.events, load, settings.max_steps, by="perdure", note=None)
    except Conflict as error:
        return Different(row.run_id, state.status, None, None, str(error))
    except PerdureError:
        return found
    return Same(row.run_id, state.status, 0, len(state.calls))


def _compare(store: Reading, row: RunRow, agent: Agent[Any, Any], settings: Settings) -> Same | Different:
    reading = read_run(store, row.run_id)
    load = loader(store)
    return compare(row.run_id, reading.events, reading.state, partial(agent.machine_of, load=load, max_steps=settings.max_steps), load)


def _line(found: Same | Different, row: RunRow | ExportedJournal, agent: Agent[Any, Any]) -> str:
    versions = "" if row.version == agent.version else f" (it began with version {row.version}; this code is {agent.version})"
    if isinstance(found, Same):
        return f"run {found.run_id}: same: {plural(found.activations, 'activation')}, {plural(found.calls, 'call')}{versions}"
    place = f" at call {found.call}" if found.call is not None else ""
    return f"run {found.run_id}: different{place}{versions}: {found.difference}"
