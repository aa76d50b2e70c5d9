"""The parts of a report that are figures and facts: what was tested, undisturbed and in all."""

from __future__ import annotations

import hashlib
import platform
import statistics
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, get_args

from perdure import __version__
from perdure.agent import Agent
from perdure.core import codec
from perdure.testing.lab.comparing import loose
from perdure.testing.lab.facts import Undisturbed
from perdure.testing.lab.records import Baseline, Figures, Outcome, Subject, Trial
from perdure.testing.lab.trials import Evidence, Given, Point


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
    # "/folder/file.py:name", or of a plan "/folder/plan.toml --tools /folder/tools.py"
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
