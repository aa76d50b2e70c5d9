"""A report as text: what is wrong first, then the table, then the figures in sentences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from perdure.inspect.words import plural
from perdure.testing.lab.records import Findings, Problem, Trial

HEADERS = ("killed at", "of", "repeated", "called", "output", "resumed in", "outcome")
_OUTPUT = {True: "equal", False: "differs", None: "–"}
_WORDS = {"ok": "as declared", "doubt": "asks a person", "wrong": "WRONG", "not_reached": "not reached"}


def rows(report: Findings) -> list[tuple[str, ...]]:
    """The trials; those that differ in nothing but the call are one row."""
    groups: dict[tuple[str, ...], list[Trial]] = {}
    for trial in report.trials:
        names = " → ".join(name_of(boundary) for boundary in trial.boundaries)
        key = (names, repeated(trial), called(trial), _OUTPUT[trial.output_equal], _WORDS[trial.outcome])
        groups.setdefault(key, []).append(trial)
    return [
        (names, _whose(trials), again, begun, output, _span(trials), outcome)
        for (names, again, begun, output, outcome), trials in groups.items()
    ]


def name_of(boundary: str) -> str:
    return boundary.partition(":")[0]


def about(boundary: str) -> str:
    """What the boundary is about: a tool and its call; the run itself."""
    return boundary.partition(": ")[2] or "the run"


def _whose(trials: Sequence[Trial]) -> str:
    whose = list(dict.fromkeys(" → ".join(about(boundary) for boundary in trial.boundaries) for trial in trials))
    more = f", and {len(whose) - 3} more" if len(whose) > 3 else ""
    return ", ".join(whose[:3]) + more


def repeated(trial: Trial) -> str:
    return ", ".join(f"{one.tool}{'' if one.allowed else '!'}" for one in trial.repeated) or "nothing"


def called(trial: Trial) -> str:
    """How often tools were called, where that is not as in the undisturbed run."""
    more = {one.tool: trial.effects[one.tool] for one in trial.repeated}
    return ", ".join(f"{tool} {count}×" for tool, count in more.items()) or "as undisturbed"


def _span(trials: Sequence[Trial]) -> str:
    times = sorted(trial.resume_s * 1e3 for trial in trials)
    return f"{times[0]:.0f} ms" if len(times) == 1 else f"{times[0]:.0f}–{times[-1]:.0f} ms"


def findings(problems: Sequence[Problem]) -> Iterator[str]:
    """Each problem in two lines: what, and what to do."""
    for problem in problems:
        who = f"tool {problem.tool}: " if problem.tool else ""
        trials = f" (and {problem.trials - 1} more)" if problem.trials > 1 else ""
        yield f"{who}{problem.sentence}"
        yield f"  killed at {problem.boundary}{trials}; {problem.way_out}"


def summary(report: Findings) -> Iterator[str]:
    """The figures, in sentences."""
    figures, base = report.figures, report.baseline
    drawn = "" if figures.trials == figures.planned else f" of {figures.planned:,} possible ones"
    yield (
        f"{plural(figures.kills, 'kill')} in {plural(figures.trials, 'trial')}{drawn}, at {plural(figures.boundaries, 'boundary', 'boundaries')}, in {figures.seconds:.1f} s: "
        f"{figures.ok:,} as declared, {figures.doubt:,} asked a person, {figures.wrong:,} wrong, {figures.not_reached:,} not reached"
    )
    if figures.trials:
        yield f"resumed in {figures.resume_median_ms:.0f} ms (median), {figures.resume_most_ms:.0f} ms at most"
    if base.status != "succeeded":
        yield f"undisturbed, it rests: {base.status.replace('_', ' ')}, for {base.waiting_for}; what comes after that was not tried"
    yield from base.remarks


def text(report: Findings) -> str:
    """All of it."""
    lines = list(findings(report.problems))
    cells = [HEADERS, *rows(report)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(HEADERS))]
    table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    notes = [f"note: {line}" if not line.startswith(" ") else line for line in findings(report.notes)]
    return "\n".join([*lines, *([""] if lines else []), *table, "", *notes, *summary(report)])
