"""A report as text: the problems first, then the table, then the figures in sentences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from perdure.inspect.text import plural
from perdure.testing.lab.records import Findings, Problem, Repeat, Trial

HEADERS = ("killed at", "of", "repeated", "function called", "output", "resumed in", "outcome")
_OUTPUT = {True: "equal", False: "differs", None: "–"}
_WORDS = {
    "ok": "as declared",
    "doubt": "asks a person",
    "wrong": "WRONG",
    "not_reached": "not reached",
    "not_compared": "not compared",
    "not_seen": "effect not seen",
}


def rows(report: Findings) -> list[tuple[str, ...]]:
    """The trials as rows.

    Trials that differ only in the call share a row. Pairs with the outcome "ok" share a row for each first kill.
    """
    groups: dict[tuple[str, ...], list[Trial]] = {}
    for trial in report.trials:
        if not _is_quiet_pair(trial):
            names = " → ".join(name_of(boundary) for boundary in trial.boundaries)
            key = (names, repeated(trial), called(trial), _OUTPUT[trial.output_equal], outcome_of(trial))
            groups.setdefault(key, []).append(trial)
    found: list[tuple[str, ...]] = [
        (names, _whose(trials), again, begun, output, _span(trials), outcome)
        for (names, again, begun, output, outcome), trials in groups.items()
    ]
    quiet: dict[str, list[Trial]] = {}
    for trial in report.trials:
        if _is_quiet_pair(trial):
            quiet.setdefault(trial.boundaries[0], []).append(trial)
    return found + [
        (f"{name_of(first)} → {len(pairs)} more", about(first), "–", "–", "–", _span(pairs), _WORDS["ok"]) for first, pairs in quiet.items()
    ]


def _span(trials: Sequence[Trial]) -> str:
    """The time until the resumed run continued. For several trials: the shortest and the longest time."""
    times = sorted(trial.resume_s * 1e3 for trial in trials)
    return f"{times[0]:.0f} ms" if len(times) == 1 else f"{times[0]:.0f}–{times[-1]:.0f} ms"


def _is_quiet_pair(trial: Trial) -> bool:
    return len(trial.boundaries) > 1 and trial.outcome == "ok"


def outcome_of(trial: Trial) -> str:
    """The outcome in words, with the calls that needed a person."""
    whom = f" about {', '.join(trial.asked)}" if trial.outcome == "doubt" and trial.asked else ""
    return _WORDS[trial.outcome] + whom


def stacked(report: Findings) -> Iterator[str]:
    """The rows in two lines each, for a terminal that is too narrow for the table."""
    for names, whose, again, begun, output, resumed, outcome in rows(report):
        yield f"{names}: {whose}"
        yield f"  {outcome}; repeated: {again}; called: {begun}; output: {output}; resumed in {resumed}"


def name_of(boundary: str) -> str:
    return boundary.partition(":")[0]


def about(boundary: str) -> str:
    """The part of a boundary's text that names a tool and its call. "the run" if there is no such part."""
    return boundary.partition(": ")[2] or "the run"


def _whose(trials: Sequence[Trial]) -> str:
    whose = list(dict.fromkeys(" → ".join(about(boundary) for boundary in trial.boundaries) for trial in trials))
    more = f", and {len(whose) - 3} more" if len(whose) > 3 else ""
    return ", ".join(whose[:3]) + more


def repeated(trial: Trial) -> str:
    times = Counter(one.tool for one in trial.repeated)
    return ", ".join(f"{_which(one, times[one.tool])}{'' if one.allowed else '!'}" for one in trial.repeated) or "nothing"


def _which(one: Repeat, of: int) -> str:
    """The tool's name. If several calls of the tool were repeated, the call is named too."""
    return one.tool if of == 1 else f"{one.tool} ({f'child {one.run}, ' if one.run else ''}call {one.call})"


def called(trial: Trial) -> str:
    """The tools that were called more often than in the undisturbed run, and how often."""
    more: Counter[str] = Counter()
    for one in trial.repeated:
        more[one.tool] += one.begun - one.expected
    return (
        ", ".join(f"{tool} {trial.effects[tool]}× instead of {trial.effects[tool] - count}×" for tool, count in more.items())
        or "as undisturbed"
    )


def findings(problems: Sequence[Problem]) -> Iterator[str]:
    """Each problem in two lines: what is wrong, and what to do."""
    for problem in problems:
        who = f"tool {problem.tool}: " if problem.tool else ""
        trials = f" (and {problem.trials - 1} more)" if problem.trials > 1 else ""
        yield f"{who}{problem.sentence}"
        yield f"  {when(problem)} {problem.boundary}{trials}; {problem.way_out}"


def when(problem: Problem) -> str:
    return "to be killed at" if problem.rule == "not_reached" else "killed at"


def unsaid(report: Findings) -> Iterator[str]:
    """The things that this crash matrix did not find out."""
    if report.untried:
        yield f"{plural(report.untried, 'boundary was', 'boundaries were')} not tried"
    if report.figures.not_compared:
        yield f"{plural(report.figures.not_compared, 'trial')} could not be compared"
    if unseen := [tool.name for tool in report.tools if tool.verdict == "not seen"]:
        yield f"the effect of {', '.join(unseen)} was not seen"


def summary(report: Findings) -> Iterator[str]:
    """The figures, in sentences."""
    figures, base = report.figures, report.baseline
    drawn = "" if figures.trials == figures.planned else f" of {figures.planned:,} possible ones"
    of = f" of {figures.boundaries:,}" if report.untried else ""
    yield (
        f"{plural(figures.kills, 'kill')} in {plural(figures.trials, 'trial')}{drawn}, at {figures.tried:,}{of} boundaries, in {figures.seconds:.1f} s: "
        f"{figures.ok:,} as declared, {figures.doubt:,} asked a person, {figures.wrong:,} wrong, {figures.not_reached:,} not reached, "
        f"{figures.not_compared:,} not compared, {figures.not_seen:,} not seen"
    )
    if figures.unkilled:
        yield f"{figures.unkilled:,} of the wrong trials never reached the boundary where they were to be killed"
    if figures.trials:
        yield from unsaid(report)
    if figures.trials:
        yield f"resumed in {figures.resume_median_ms:.0f} ms (median), {figures.resume_most_ms:.0f} ms at most"
    if base.status != "succeeded":
        yield f"the undisturbed run is {base.status.replace('_', ' ')}, for {base.waiting_for}; what comes after that was not tried"
    yield from base.remarks


def text(report: Findings) -> str:
    """The whole report as text."""
    lines = list(findings(report.problems))
    cells = [HEADERS, *rows(report)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(HEADERS))]
    table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    notes = [f"note: {line}" if not line.startswith(" ") else line for line in findings(report.notes)]
    return "\n".join([*lines, *([""] if lines else []), *table, "", *notes, *summary(report)])
