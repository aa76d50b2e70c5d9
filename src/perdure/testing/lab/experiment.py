"""The course of the experiment: twice undisturbed, then one trial after another, and the judge at the end."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

from msgspec import Struct

from perdure.agent import Agent
from perdure.errors import InvalidInput, RunFailed
from perdure.testing.lab.facts import Facts, Undisturbed
from perdure.testing.lab.judge import judge, once_each, tools_seen
from perdure.testing.lab.records import Problem, Trial
from perdure.testing.lab.report import Report
from perdure.testing.lab.spec import RUN_ID
from perdure.testing.lab.summary import baseline_of, figures_of, subject_of
from perdure.testing.lab.trials import BROKEN, Evidence, Given, Lab, Planned, Point, points

Progress = Callable[[int, int, str], None]  # done, of how many, what now


class Setup(Struct, frozen=True):
    """What the caller wants."""

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
    # In an interpreter of its own where there is one: the order of a set differs there, as it will after a crash.
    second = first if setup.learn_only else _undisturbed(lab, 1, fresh=bool(setup.fresh))
    base = Undisturbed(Facts(first), Facts(second))
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


# -- the undisturbed run ------------------------------------------------------------------------------------------------------
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
    timers = "; with --url timers are sat through" if lab.is_shared else ""
    return (
        f"did not come to rest in time, which is --timeout (timeout_s), {lab.timeout_s:g} s: {last}; "
        f"raise it if a tool takes that long{timers}"
    )


def _models(first: Evidence, setup: Setup) -> dict[str, int]:
    """Questions by model; InvalidInput when going on would cost money that nobody has agreed to."""
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
            f"times as often; --allow-models (allow_models=True) goes on, a Scripted model costs nothing"
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
        said.append("every process was forked from one that had imported the agent")
    said.extend(
        f"tool {tool} runs in a process of its own (isolate=True): what comes of a request of it that arrives late was not tried"
        for tool in _isolated(base.first)
    )
    return tuple(said)


def _isolated(facts: Facts) -> list[str]:
    """Tools whose effects may come late, and run where the lab cannot hold them up."""
    apart = {entry.tool for entry in facts.evidence.entries if entry.fact == "unseen"}
    return sorted({call.tool for call in facts.calls.values() if call.tool in apart and call.meets_late_effects})


def _unwaited(evidence: Sequence[Evidence]) -> tuple[str, ...]:
    tools = sorted({entry.tool for one in evidence for entry in one.entries if entry.fact == "unwaited"})
    return tuple(
        f"tool {tool}: after a kill, perdure gives its effect longer to show than the lab waits, so that what its reconcile hook "
        f"did not find counts as unknown; a higher --timeout waits longer"
        for tool in tools
    )


def _chosen(all_points: Sequence[Point], setup: Setup) -> list[Point]:
    """The points to kill it at."""
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
        raise InvalidInput(
            f"none of its boundaries {f'has {missing!r} in its words' if missing else 'is wanted'}; those that it comes to are {known}"
        )
    return chosen


# -- the trials -----------------------------------------------------------------------------------------------------------------
def _trials(lab: Lab, setup: Setup, chosen: Sequence[Point]) -> tuple[list[Evidence], int]:
    """The evidence, and how many trials there would be without the limit."""
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
    """So many of them, in their order; the same ones for the same chance."""
    if len(items) <= limit:
        return items
    return [items[at] for at in sorted(chance.sample(range(len(items)), limit))]


def _numbered(kills: Sequence[Any], first: int, *, fresh: bool) -> list[Planned]:
    # Two of them are resumed by an interpreter that has nothing in common with the one that was killed.
    fresh_ones = {len(kills) // 2, len(kills) - 1} if fresh else set()
    return [Planned(first + at, where, also, at in fresh_ones) for at, (where, also) in enumerate(kills)]


def _make(lab: Lab, setup: Setup, planned: Sequence[Planned], evidence: list[Evidence], of: int) -> None:
    for one in lab.make(planned):
        evidence.append(one)
        setup.progress(len(evidence), of, str(one.planned.kills[-1].boundary))


def _unreached(trials: Sequence[Trial]) -> tuple[Problem, ...]:
    if not trials or any(trial.outcome != "not_reached" for trial in trials):
        return ()
    sentence = "no trial came to the boundary at which it was to be killed: the agent goes another way each time"
    way_out = "make what it does depend on its arguments alone"
    if missed := [problem for trial in trials for problem in trial.problems if problem.rule == "late_missed"]:
        sentence, way_out = "nothing was tried: no late request arrived", missed[0].way_out
    return (Problem("not_reached", "wrong", "", sentence, way_out, trials[0].boundaries[0]),)
