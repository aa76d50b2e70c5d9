"""`perdure whatif`: rehearse many recorded runs with the present code, prompt or model. No tool touches the world."""

from __future__ import annotations

import asyncio
import fcntl
import math
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

import click
import msgspec
from msgspec import Struct, structs

from perdure.agent import Agent, source_digest
from perdure.cli import common
from perdure.cli.common import where_option
from perdure.cli.fork import read_answers
from perdure.cli.target import load_targets
from perdure.core import codec
from perdure.core.events import Usage
from perdure.core.query import EVERYTHING, Query, parse_query
from perdure.errors import InvalidInput, NotReady, PerdureError
from perdure.inspect.diff import DiffCall, call_words, end_words, same_effects
from perdure.inspect.text import clip, money, plural
from perdure.inspect.view import all_rows
from perdure.store.api import RunRow

if TYPE_CHECKING:
    from perdure.engine.api import Reading
    from perdure.fork import Fork, Forks, Purse, Stub
    from perdure.settings import Settings

Kind = Literal["same", "other_path", "different", "would_call", "failed", "checkpoint"]
PARALLEL = 8  # how many rehearsals run at a time: most of the time they wait for a model
_WORDS: dict[Kind, str] = {
    "same": "same path",
    "other_path": "same outcome, another path",
    "different": "different outcome",
    "would_call": "would call something else",
    "failed": "could not be rehearsed",
    "checkpoint": "not rehearsed to its end",
}
_DIFFER = ("different", "would_call", "failed")


class Verdict(Struct, frozen=True):
    """The result of the rehearsal of one run."""

    run_id: str
    verdict: Kind
    was: str  # the recorded outcome in words
    now: str  # the outcome of the rehearsal in words, or why the run could not be rehearsed
    before: Usage
    after: Usage
    asked: Usage  # what this rehearsal itself has used
    would_call: list[DiffCall]  # calls of tools, children and approvals that the recorded run did not make


class _Outcome(Struct):
    verdicts: list[Verdict]
    total: int
    left: str | None = None  # why runs were left out; None: all runs were rehearsed


@click.command("whatif")
@click.argument("target", metavar="TARGET")
@click.option("--agent", "name", metavar="NAME", help="If TARGET has several agents: the agent whose runs are rehearsed.")
@where_option("Only runs that match all terms of the query (without status: those that have succeeded or failed):")
@click.option("--set-model", "model", metavar="NAME", help="Another model, for a ReAct agent.")
@click.option("--limit", type=click.IntRange(min=1, max=1_000_000), default=100, show_default=True, metavar="N", help="The newest N runs.")
@click.option("--budget", type=click.FloatRange(min=0, min_open=True), metavar="USD", help="Stop when the models have cost this much.")
@click.option("--answers", "answers_file", metavar="FILE", help="Prepared answers: a JSON list of {tool, args, result or error}.")
@click.option("--reads", is_flag=True, help="Call `read` tools too. All other tools are never called.")
@click.option("--ignore-text", is_flag=True, help="Do not compare the text of a ReAct agent without output=: models vary their words.")
@click.option("--state", "state_file", metavar="FILE", help="Keep finished verdicts here: the same command goes on after an interruption.")
@click.option("--tools", metavar="FILE.py", help="If TARGET is a plan: the file with its tools.")
@common.url_option
@common.json_option
def command(
    target: str,
    name: str | None,
    where: str | None,
    model: str | None,
    limit: int,
    budget: float | None,
    answers_file: str | None,
    reads: bool,
    ignore_text: bool,
    state_file: str | None,
    tools: str | None,
    url: str | None,
    as_json: bool,
) -> int:
    """Rehearse recorded runs of an agent with this code, prompt or model: which of them would end differently?

    Each run is rehearsed from its beginning. Calls with a recorded outcome get that outcome. Models are asked about
    everything else, and no other tool is called (see perdure fork --help). Code 7 if a run would end differently,
    would call something else, or could not be rehearsed. Code 3 if runs were left out, and no other run differs.
    """
    if budget is not None and not math.isfinite(budget):
        raise InvalidInput(f"--budget {budget}: a number of dollars, such as 2.50")
    settings = common.settings_with(url=url)
    agent = _agent(target, tools, name)
    asked = agent if model is None else agent.with_model(model)
    answers = read_answers(answers_file)
    query = _query(where, agent.name)
    compares_text = not (ignore_text and getattr(agent, "output", agent) is None)
    question = {
        "agent": agent.name,
        "version": agent.version,
        "code": getattr(agent, "digest", None) or source_digest(agent.fn),
        "model": model,
        "answers": codec.digest(msgspec.json.encode(list(answers))),
        "reads": reads,
        "text": compares_text,
        "rules": 2,  # of the verdicts: a state file with other rules is not used
    }
    with common.existing_runs(url) as store, _kept(state_file, question) as kept:
        # A stored rehearsal is no recorded run.
        recorded = (row for row in all_rows(store, query) if (made := row.imported) is None or made.fork_of is None)
        rows = list(islice(recorded, limit))
        work = _Work(rows, kept, asked, compares_text)
        interrupted = False
        try:
            asyncio.run(work.run(store, settings, answers, reads, budget))
        except KeyboardInterrupt:
            interrupted, work.found.left = True, "it was interrupted"
    _show(work.found, as_json, work.spent, state_file is not None)
    if interrupted:
        return 130
    if any(verdict.verdict in _DIFFER for verdict in work.found.verdicts):
        return common.DIFFERENT
    return common.WAITING if work.found.left else common.SUCCEEDED


def _agent(target: str, tools: str | None, name: str | None) -> Agent[Any, Any]:
    agents = {loaded.agent.name: loaded.agent for loaded in load_targets(target, tools)}
    if name is not None and name not in agents:
        raise InvalidInput(f"{target} has no agent {name}; it has {', '.join(agents)}")
    if name is None and len(agents) > 1:
        raise InvalidInput(f"{target} has {len(agents)} agents ({', '.join(agents)}); say which: --agent NAME")
    return agents[name] if name is not None else next(iter(agents.values()))


def _query(where: str | None, agent: str) -> Query:
    query = EVERYTHING if where is None else parse_query(where, common.now_us())
    other = next((term.values[0] for term in query.terms if term.key == "agent" and (agent in term.values) == term.negated), None)
    if other is not None:
        raise InvalidInput(f"--where agent:{other}: the target is agent {agent}, and only its runs can be rehearsed with it")
    return (query if query.has("status") else query.within(status=("succeeded", "failed"))).also(agent=agent)


# -- rehearsing -------------------------------------------------------------------------------------------------------
class _Work:
    """Rehearses runs, several at a time, and keeps each verdict as soon as there is one."""

    def __init__(self, rows: Sequence[RunRow], kept: _Kept, agent: Agent[Any, Any], compares_text: bool) -> None:
        done = [kept.verdicts[row.run_id] for row in rows if row.run_id in kept.verdicts]
        self.found = _Outcome(done, len(rows))
        self.spent = 0
        self._rows = iter([row for row in rows if row.run_id not in kept.verdicts])
        self._kept = kept
        self._agent = agent
        self._compares_text = compares_text
        self._error: PerdureError | None = None

    async def run(self, store: Reading, settings: Settings, answers: Sequence[Stub], reads: bool, budget: float | None) -> None:
        from perdure.fork import Forks, Purse

        purse = Purse(None if budget is None else round(budget * 1_000_000))
        self._tell()
        try:
            async with (
                Forks(store, settings, answers=answers, reads=reads, models=True, purse=purse) as forks,
                asyncio.TaskGroup() as group,
            ):
                for _ in range(PARALLEL):
                    group.create_task(self._work(forks, purse))
        finally:
            self.spent = purse.spent
            if sys.stderr.isatty():
                common.note("")
        if self._error is not None:
            raise self._error

    async def _work(self, forks: Forks, purse: Purse) -> None:
        from perdure.fork import OverBudget, UnknownPrice

        for row in self._rows:  # all tasks share this iterator
            try:
                verdict = judged((await forks.fork(row.run_id, self._agent))[0], self._compares_text)
            except OverBudget:
                self.found.left = f"the budget of {money(purse.limit or 0)} is used up"
            except NotReady as error:
                self.found.left = str(error)
            except UnknownPrice as error:
                self._error = error
            except PerdureError as error:
                verdict = Verdict(row.run_id, "failed", row.status, f"{type(error).__name__}: {error}", Usage(), Usage(), Usage(), [])
                self._keep(verdict)
            else:
                self._keep(verdict)
            if self.found.left is not None or self._error is not None:
                return

    def _keep(self, verdict: Verdict) -> None:
        self._kept.keep(verdict)
        self.found.verdicts.append(verdict)
        self._tell()

    def _tell(self) -> None:
        if sys.stderr.isatty():
            done, total = len(self.found.verdicts), self.found.total
            differ = sum(verdict.verdict in _DIFFER for verdict in self.found.verdicts)
            bar = "#" * (30 * done // max(total, 1))
            sys.stderr.write(f"\r[{bar:<30}] {done:,} of {plural(total, 'run')} rehearsed, {differ:,} differ ")
            sys.stderr.flush()


def judged(fork: Fork, compares_text: bool = True) -> Verdict:
    """The verdict on a rehearsal. With `compares_text=False`, two results that are texts count as equal."""
    left, right = fork.diff.left, fork.diff.right
    texts = isinstance(left.output, str) and isinstance(right.output, str)
    same_outcome = fork.diff.same_outcome or (not compares_text and texts and left.status == right.status)
    other = [
        call for call in right.calls if call.kind != "model" and (not call.answered or call.source in ("answers", "simulated", "read"))
    ]
    kind: Kind
    # A new call with an effect counts also if a stand-in or a prepared answer let the rehearsal go on to the same outcome.
    if fork.status == "stopped" or any(call.effect not in (None, "read") for call in other):
        kind = "would_call"
    elif fork.status == "checkpoint":
        kind = "checkpoint"  # this says nothing about the rest of the run: it is no difference
    elif not same_outcome:
        kind = "different"
    else:
        kind = "same" if same_effects(left, right) else "other_path"
    return Verdict(fork.run_id, kind, end_words(left), end_words(right), left.used, right.used, fork.asked, other)


# -- finished verdicts ------------------------------------------------------------------------------------------------
class _Kept:
    """The verdicts in a state file. The first line is the question, and each other line is one verdict."""

    def __init__(self, file: BinaryIO | None, verdicts: dict[str, Verdict]) -> None:
        self.verdicts = verdicts
        self._file = file

    def keep(self, verdict: Verdict) -> None:
        if self._file is not None:
            self._file.write(msgspec.json.encode(verdict) + b"\n")
            self._file.flush()


@contextmanager
def _kept(path: str | None, question: dict[str, Any]) -> Iterator[_Kept]:
    """The verdicts so far. InvalidInput if the file belongs to another question, or if another process uses it."""
    if path is None:
        yield _Kept(None, {})
        return
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise InvalidInput(f"--state {path}: {error.strerror}") from None
    with os.fdopen(descriptor, "r+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InvalidInput(f"--state {path}: another process uses this file") from None
        whole, _, _ = (text := file.read()).rpartition(b"\n")
        first, *lines = whole.split(b"\n")
        header = msgspec.json.encode(question)
        try:
            if text and msgspec.json.decode(first) != msgspec.json.decode(header):
                raise InvalidInput(f"--state {path} has the verdicts of another question (agent, code, model or options); name a new file")
            verdicts = [msgspec.json.decode(line, type=Verdict) for line in lines]
        except msgspec.MsgspecError:
            raise InvalidInput(f"--state {path} is not a state file of perdure whatif; name a new file") from None
        # If a process was killed, there may be half a line at the end: remove it.
        file.seek(len(whole) + 1 if whole else 0)
        file.truncate()
        if not whole:
            file.write(header + b"\n")
            file.flush()
        yield _Kept(file, {verdict.run_id: verdict for verdict in verdicts})


# -- output -----------------------------------------------------------------------------------------------------------
def _show(found: _Outcome, as_json: bool, spent: int, resumable: bool) -> None:
    verdicts = found.verdicts
    counts = Counter(verdict.verdict for verdict in verdicts)
    before, after = (_sum([getattr(verdict, name) for verdict in verdicts]) for name in ("before", "after"))
    if as_json:
        for verdict in verdicts:
            costs = {name: structs.asdict(getattr(verdict, name)) for name in ("before", "after", "asked")}
            common.out_json({"kind": "run", **msgspec.to_builtins(verdict), **costs})
        summary: dict[str, Any] = {kind: counts[kind] for kind in _WORDS}
        summary |= {"before": structs.asdict(before), "after": structs.asdict(after), "spent_usd_micros": spent}
        common.out_json({"kind": "summary", "runs": found.total, **summary, "left_out": found.total - len(verdicts), "why": found.left})
        return
    if not found.total:
        common.note("no runs that match")
        return
    shown = [(words, f"{counts[kind]:,}") for kind, words in _WORDS.items() if kind != "checkpoint" or counts[kind]]
    common.table(("verdict", "runs"), shown)
    common.out()
    cells = (("tokens in", "tokens_in"), ("tokens out", "tokens_out"))
    rows = [(title, f"{getattr(before, name):,}", f"{getattr(after, name):,}") for title, name in cells]
    common.table(("of these runs", "recorded", "now"), [*rows, ("cost", money(before.usd_micros), money(after.usd_micros))])
    differing = [verdict for verdict in verdicts if verdict.verdict != "same"]
    if differing:
        common.out()
        common.table(("run", "verdict", "recorded", "now"), [_cells(verdict) for verdict in differing])
    if found.left is not None:
        more = "the same command goes on" if resumable else "with --state FILE the same command goes on where it stopped"
        common.note(common.clean(f"perdure: {plural(found.total - len(verdicts), 'run')} left out: {found.left}; {more}"))
    if spent:
        common.note(f"perdure: these rehearsals have cost {money(spent)}")


def _cells(verdict: Verdict) -> tuple[str, ...]:
    called = "; ".join(f"would call {call_words(call, 120)}" for call in verdict.would_call)
    ended = "" if verdict.now.startswith("stopped") else clip(verdict.now, 120)
    now = "; ".join(part for part in ((called, ended) if verdict.verdict == "would_call" else (ended, called)) if part)
    return verdict.run_id, _WORDS[verdict.verdict], clip(verdict.was, 120), now


def _sum(each: Sequence[Usage]) -> Usage:
    names = ("usd_micros", "tokens_in", "tokens_out", "tokens_cached")
    return Usage(**{name: sum(getattr(one, name) for one in each) for name in names})
