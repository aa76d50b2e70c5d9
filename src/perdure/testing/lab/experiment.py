"""The whole experiment: two undisturbed runs, then the trials, then the judgement and the records of the report."""

from __future__ import annotations

import hashlib
import platform
import random
import statistics
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_args

from msgspec import Struct

from perdure import __version__
from perdure.agent import Agent
from perdure.core import codec
from perdure.errors import InvalidInput, RunFailed
from perdure.testing.lab.comparing import loose
from perdure.testing.lab.facts import TrialFacts, Undisturbed
from perdure.testing.lab.judge import judge, once_each, tools_seen
from perdure.testing.lab.records import Baseline, Figures, Outcome, Problem, Subject, Trial
from perdure.testing.lab.report import Report
from perdure.testing.lab.spec import RUN_ID
from perdure.testing.lab.trials import BROKEN, Evidence, Given, Lab, Planned, Point, points

# -- The facts and figures of the report


def baseline_of(
    first: Evidence, base: Undisturbed, models: dict[str, int], all_points: Sequence[Point], remarks: tuple[str, ...]
) -> Baseline:
    told = first.told
    assert told is not None
    return Baseline(
        status=told.status,
        output=base.first.output,
        waiting_for=told.waiting_for,
        calls=len(told.calls),
        boundaries=tuple(str(point.kill.boundary) for point in all_points),
        seconds=round(told.rested_at - told.began_at, 4),
        same_output=base.same_output,
        models=models,
        world=first.world,
        also=tuple(tuple(map(str, point.names[1:])) for point in all_points),
        remarks=(*remarks, *loose(base)),
    )


def figures_of(trials: Sequence[Trial], evidence: Sequence[Evidence], boundaries: int, planned: int, seconds: float) -> Figures:
    resumed = [trial.resume_s * 1e3 for trial in trials] or [0.0]
    count = {outcome: sum(trial.outcome == outcome for trial in trials) for outcome in get_args(Outcome)}
    return Figures(
        boundaries=boundaries,
        tried=len({trial.boundaries[0] for trial in trials if trial.kills and trial.outcome != "not_reached"}),
        trials=len(trials),
        planned=planned,
        kills=sum(one.reached for one in evidence),
        **count,
        unkilled=sum(trial.outcome == "wrong" and trial.kills < len(trial.boundaries) for trial in trials),
        seconds=round(seconds, 2),
        resume_median_ms=round(statistics.median(resumed), 2),
        resume_most_ms=round(max(resumed), 2),
    )


def subject_of(agent: Agent[Any, Any], target: str, given: Given, started_at: datetime) -> Subject:
    target = target or agent.target or f"{agent.home}:{agent.name}"
    # The target is "/folder/file.py:name". For a plan it is "/folder/plan.toml --tools /folder/tools.py".
    file = Path(target.partition(" --tools ")[0].rpartition(":")[0] or target.partition(" --tools ")[0])
    return Subject(
        target=target,
        agent=agent.name,
        version=agent.version,
        source_digest=hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else None,
        input=codec.decode(given.input),
        store="PostgreSQL" if given.shared else "SQLite",
        perdure=__version__,
        python=platform.python_version(),
        platform=f"{platform.system()} {platform.machine()}",
        started_at=started_at.isoformat(timespec="seconds"),
    )


# -- The course of the experiment


Progress = Callable[[int, int, str], None]  # gets: trials done, trials in all, what is done now


class Setup(Struct, frozen=True):
    """The options of `crash_matrix`."""

    agent: Agent[Any, Any]
    fresh: tuple[str, ...]
    target: str
    limit: int
    seed: int
    pairs: bool
    boundaries: Callable[[str], bool] | Sequence[str] | None
    allow_models: bool
    learn_only: bool
    progress: Progress


def experiment(lab: Lab, setup: Setup, given: Given, *, forks: bool) -> Report:
    started_at, began_s = datetime.now(UTC), time.monotonic()
    setup.progress(0, 0, "undisturbed")
    first = _undisturbed(lab, 0, fresh=False)
    models = _models(first, setup)
    # Use a fresh interpreter if possible: in a fresh interpreter the order of a set differs, as after a real crash.
    second = first if setup.learn_only else _undisturbed(lab, 1, fresh=bool(setup.fresh))
    base = Undisturbed(TrialFacts(first), TrialFacts(second))
    all_points = points(first, second)
    chosen = _chosen(all_points, setup)
    evidence, planned = _trials(lab, setup, chosen)
    trials = judge(evidence, base)
    problems = (*_unreached(trials), *once_each(trials, "wrong"))
    remarks = (*_remarks(setup, base, forks=forks), *_unwaited(evidence))
    return Report(
        subject=subject_of(setup.agent, setup.target, given, started_at),
        baseline=baseline_of(first, base, models, all_points, remarks),
        trials=tuple(trials),
        tools=tools_seen(base, trials, problems),
        problems=problems,
        notes=once_each(trials, "note"),
        figures=figures_of(trials, evidence, len(all_points), planned, time.monotonic() - began_s),
    )


# -- the undisturbed run ----------------------------------------------------------------------------------------------
def _undisturbed(lab: Lab, number: int, *, fresh: bool) -> Evidence:
    (evidence,) = lab.make([Planned(number, (), fresh=fresh)])
    told = evidence.told
    if told is None:
        last = next((line for line in reversed(evidence.log.splitlines()) if line.strip()), "it said nothing")
        raise RunFailed(RUN_ID, f"without any kill, it {_how_it_ended(evidence.end, last, lab)}")
    if told.status not in ("succeeded", "waiting", "waiting_approval"):
        raise RunFailed(
            RUN_ID, f"without any kill, it is {told.status.replace('_', ' ')}: {told.error or told.waiting_for or 'no reason given'}"
        )
    if told.faults:
        raise RunFailed(RUN_ID, f"without any kill, perdure verify finds a fault: {told.faults[0]}")
    return evidence


def _how_it_ended(end: str, last: str, lab: Lab) -> str:
    if end == BROKEN:
        return f"could not be run: {last}"
    if end != "timeout":
        return f"ended its process ({end}): {last}"
    timers = "; with --url timers are waited for in real time" if lab.is_shared else ""
    return (
        f"neither ended nor parked in time, which is --timeout (timeout_s), {lab.timeout_s:g} s: {last}; "
        f"raise it if a tool takes that long{timers}"
    )


def _models(first: Evidence, setup: Setup) -> dict[str, int]:
    """A dict: model → number of calls. InvalidInput if the trials would cost money and `allow_models` is not set."""
    asked: dict[str, int] = {}
    paid: dict[str, int] = {}
    for entry in first.entries:
        if entry.fact == "begun" and entry.model:
            asked[entry.tool] = asked.get(entry.tool, 0) + 1
            paid[entry.tool] = paid.get(entry.tool, 0) + entry.outside
    if any(paid.values()) and not setup.allow_models:
        name, times = max(paid.items(), key=lambda item: item[1])
        raise InvalidInput(
            f"the undisturbed run has asked model {name} {times} times, and the trials would ask it up to {min(len(points(first)), setup.limit):,} "
            f"times as often; allow that with --allow-models (allow_models=True), or use a Scripted model, which costs nothing"
        )
    return asked


def _remarks(setup: Setup, base: Undisturbed, *, forks: bool) -> tuple[str, ...]:
    said = []
    if not base.same_calls:
        said.append("two undisturbed runs made different calls: what differs after a kill need not come from the kill")
    if not base.same_output:
        said.append("two undisturbed runs had different outputs, so that outputs are not compared")
    if not forks:
        said.append("importing the target leaves threads behind, so that every process is a fresh interpreter, which takes longer")
    elif not setup.fresh:
        said.append("every process was forked from a process that had imported the agent")
    said.extend(f"tool {tool} runs in its own process (isolate=True): its late requests were not tried" for tool in _isolated(base.first))
    return tuple(said)


def _isolated(facts: TrialFacts) -> list[str]:
    """The tools whose effects may come late, but that run in their own process: there the lab cannot delay effects."""
    apart = {entry.tool for entry in facts.evidence.entries if entry.fact == "unseen"}
    return sorted({call.tool for call in facts.calls.values() if call.tool in apart and call.meets_late_effects})


def _unwaited(evidence: Sequence[Evidence]) -> tuple[str, ...]:
    tools = sorted({entry.tool for one in evidence for entry in one.entries if entry.fact == "unwaited"})
    return tuple(
        f"tool {tool}: after a kill, perdure waits longer for its effect than the lab, so that a “not found” of its reconcile "
        f"hook counts as unknown; a higher --timeout waits longer"
        for tool in tools
    )


def _chosen(all_points: Sequence[Point], setup: Setup) -> list[Point]:
    """The points at which the agent is killed."""
    if setup.learn_only:
        return []
    wanted = setup.boundaries
    if wanted is None:
        return list(all_points)
    if callable(wanted):
        chosen, missing = [point for point in all_points if any(wanted(str(name)) for name in point.names)], ""
    else:
        by_part = {part: [point for point in all_points if any(part in str(name) for name in point.names)] for part in wanted}
        chosen = [point for point in all_points if any(point in found for found in by_part.values())]
        missing = next((part for part, found in by_part.items() if not found), "")
    if missing or not chosen:
        known = ", ".join(str(name) for point in all_points for name in point.names)
        raise InvalidInput(f"none of its boundaries {f'contains {missing!r}' if missing else 'is wanted'}; it reaches {known}")
    return chosen


# -- the trials -------------------------------------------------------------------------------------------------------
def _trials(lab: Lab, setup: Setup, chosen: Sequence[Point]) -> tuple[list[Evidence], int]:
    """The evidence of the trials, and how many trials there would be without the limit."""
    chance = random.Random(setup.seed)
    singles = [((point.kill,), tuple(map(str, point.names[1:]))) for point in chosen]
    planned = _numbered(drawn(singles, setup.limit, chance), 2, fresh=bool(setup.fresh))
    evidence: list[Evidence] = []
    _make(lab, setup, planned, evidence, len(planned))
    total = len(singles)
    if setup.pairs:
        doubles = [
            ((*one.planned.kills, point.kill), one.planned.also) for one in _in_order(evidence) if one.reached for point in points(one)
        ]
        total += len(doubles)
        more = _numbered(drawn(doubles, max(setup.limit - len(planned), 0), chance), 2 + len(planned), fresh=False)
        _make(lab, setup, more, evidence, len(planned) + len(more))
    return evidence, total


def _in_order(evidence: Sequence[Evidence]) -> list[Evidence]:
    return sorted(evidence, key=lambda one: one.planned.number)


def drawn(items: list[Any], limit: int, chance: random.Random) -> list[Any]:
    """At most `limit` of the items, drawn at random, in their order. The same seed draws the same items."""
    if len(items) <= limit:
        return items
    return [items[at] for at in sorted(chance.sample(range(len(items)), limit))]


def _numbered(kills: Sequence[Any], first: int, *, fresh: bool) -> list[Planned]:
    # Two of the trials are resumed by a fresh interpreter, which shares no memory with the killed process.
    fresh_ones = {len(kills) // 2, len(kills) - 1} if fresh else set()
    return [Planned(first + at, where, also, at in fresh_ones) for at, (where, also) in enumerate(kills)]


def _make(lab: Lab, setup: Setup, planned: Sequence[Planned], evidence: list[Evidence], of: int) -> None:
    for one in lab.make(planned):
        evidence.append(one)
        setup.progress(len(evidence), of, str(one.planned.kills[-1].boundary))


def _unreached(trials: Sequence[Trial]) -> tuple[Problem, ...]:
    if not trials or any(trial.outcome != "not_reached" for trial in trials):
        return ()
    sentence = "no trial reached the boundary at which it was to be killed: the agent makes other calls each time"
    way_out = "let the agent depend only on its arguments"
    if missed := [problem for trial in trials for problem in trial.problems if problem.rule == "late_missed"]:
        sentence, way_out = "nothing was tried: no late request arrived", missed[0].way_out
    return (Problem("not_reached", "wrong", "", sentence, way_out, trials[0].boundaries[0]),)
