"""The page: who makes what durable when, the race on each kind of store, tools that take their time, the targets, and every note."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from bench.race.figures import BY_KEY, FIGURES, Figure, titles
from bench.race.lanes import beside
from bench.race.results import Results, Summary
from bench.race.targets import TARGETS, Bound, Target
from bench.race.words import number, times, with_unit

_SLOW = ("T1", "T2")
_HOW_TO_READ = (
    "Medians, with lowest and highest in brackets. In bold, how many times better perdure is on the same kind of store: the median of the "
    "ratios of each repeat; below 1 perdure is worse. Servers of one's own stand beside perdure on its file."
)


class Footnotes:
    """Notes in the order in which they are met; the same text is one note."""

    def __init__(self) -> None:
        self._texts: list[str] = []

    def mark(self, texts: Iterable[str]) -> str:
        numbers = []
        for text in texts:
            if text not in self._texts:
                self._texts.append(text)
            numbers.append(self._texts.index(text) + 1)
        return f"<sup>{', '.join(map(str, sorted(set(numbers))))}</sup>" if numbers else ""

    def lines(self) -> list[str]:
        return [f"{place}. {text}" for place, text in enumerate(self._texts, 1)]


def page(results: Results) -> str:
    notes = Footnotes()
    parts = [
        _head(results),
        "## What is durable when\n\n" + _durability(results),
        "## The race\n\n" + _HOW_TO_READ + "\n\n" + "\n\n".join(_groups(results, notes, slow=False)),
        f"## Tools that take {results.sizes.tool_ms:.0f} ms\n\nWhere the work is real, everybody should be near 100 % of the ideal time.\n\n"
        + "\n\n".join(_groups(results, notes, slow=True)),
        "## Targets\n\n" + _targets(results),
        "## Notes\n\n" + ("\n".join(notes.lines()) or "None."),
    ]
    return "\n\n".join(parts) + "\n"


def _head(results: Results) -> str:
    told = [f"- {name}: {value}" for name, value in results.machine.items()]
    told.append(f"- measured in {results.seconds / 60:.0f} min, {results.repeats} repeats of everything, by turns")
    left_out = [f"- left out: {name}: {reason}" for name, reason in results.left_out.items()]
    warning = "\n\n**Small sizes and one repeat: this shows that it works, and measures nothing.**" if results.quick else ""
    return f"# perdure beside its peers, {results.date[:10]}{warning}\n\n" + "\n".join(told + left_out)


def _durability(results: Results) -> str:
    rows = [
        (
            f"{about['name']} {about['version']}",
            about["durable"],
            about["how"] + ("; resume: " + about["resume"] if "resume" in about else ""),
        )
        for about in results.contestants.values()
    ]
    return _table(("", "what is durable when", "how it was used"), rows)


def _groups(results: Results, notes: Footnotes, *, slow: bool) -> list[str]:
    """A table for the lanes that stand beside perdure on SQLite, and one for those on PostgreSQL."""
    figures = [figure for figure in FIGURES if (figure.workload in _SLOW) == slow]
    groups = [[lane for lane in results.lanes if beside(lane) == yardstick] for yardstick in ("perdure/sqlite", "perdure/postgres")]
    return [table for lanes in groups if (table := _race_table(results, notes, figures, lanes))]


def _race_table(results: Results, notes: Footnotes, figures: Sequence[Figure], lanes: Sequence[str]) -> str:
    named = titles(results.sizes)
    rows: list[tuple[str, ...]] = []
    workload = ""
    for figure in figures:
        if not any(results.summary(figure.key, lane) or results.without(figure.key, lane) for lane in lanes):
            continue
        if figure.workload != workload:
            workload = figure.workload
            rows.append((f"**{workload}** {named[workload]}", *("" for _ in lanes)))
        rows.append((f"{figure.title}, {figure.unit}", *(_cell(results, notes, figure, lane) for lane in lanes)))
    return _table(("", *lanes), rows) if rows else ""


def _cell(results: Results, notes: Footnotes, figure: Figure, lane: str) -> str:
    mark = notes.mark(_remarks(results, figure, lane))
    found = results.summary(figure.key, lane)
    if found is not None:
        return _shown(found) + mark
    if any(cell.failed for cell in results.without(figure.key, lane)):
        return f"did not finish{mark}"
    return f"–{mark}"


def _shown(found: Summary) -> str:
    spread = f" ({number(found.low)}–{number(found.high)})" if found.repeats > 1 else ""
    ratio = f" **{times(found.times)}**" if found.times is not None else ""
    return number(found.median) + spread + ratio


def _remarks(results: Results, figure: Figure, lane: str) -> list[str]:
    """What there is to say about one figure of one lane: why it is missing, and what the contestant itself remarks."""
    cells = [cell for cell in results.cells if cell.lane == lane and figure.key in cell.gives]
    failed = [f"{lane}, {cell.measurement}, repeat {cell.repeat}: {cell.failed}" for cell in cells if cell.failed]
    tried = [text for text in failed if "not tried again" not in text]
    name = lane.partition("/")[0]
    absent = [f"{name}, {cell.measurement}: {cell.absent}" for cell in cells if cell.absent]
    why = [f"{name}, {cell.measurement}: {text}" for cell in cells for text in cell.why]
    return list(dict.fromkeys([*tried, *absent, *why]))


def _targets(results: Results) -> str:
    """All of them for a whole race; for a part of it those that it says anything about."""
    told = [target for target in TARGETS if results.is_whole or _was_tried(target, results)]
    rest = len(TARGETS) - len(told)
    rows = [_target_row(target, results) for target in told]
    after = f"\n\n{rest} more are about what was not part of this run." if rest else ""
    return _table(("", "target", "measured", ""), rows) + after


def _was_tried(target: Target | Bound, results: Results) -> bool:
    return target.measured(results) is not None or bool(results.without(target.key, target.lane))


def _target_row(target: Target | Bound, results: Results) -> tuple[str, ...]:
    figure = BY_KEY[target.key]
    measured, verdict = target.measured(results), target.verdict(results)
    shown = "–" if measured is None else _measure_of(target, figure, measured)
    return (figure.workload, _wanted(target, figure), shown, verdict if verdict == "ok" else f"**{verdict}**")


def _wanted(target: Target | Bound, figure: Figure) -> str:
    match target:
        case Bound():
            return f"{target.lane}: {figure.title}: at most {with_unit(target.at_most, figure.unit)}"
        case Target():
            if target.at_least is not None:
                as_fast = "that of" if figure.better == "more" else "as fast as"
                return f"{figure.title}: at least {times(target.at_least)} {as_fast} {target.lane}"
            assert target.at_most is not None
            return f"{figure.title}: at most {times(target.at_most)} that of {target.lane}"


def _measure_of(target: Target | Bound, figure: Figure, measured: float) -> str:
    return with_unit(measured, figure.unit) if isinstance(target, Bound) else times(measured)


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(map(_escaped, row))} |" for row in lines)


def _escaped(cell: str) -> str:
    """What a contestant says must not end its cell."""
    return cell.replace("|", "\\|").replace("\n", " ")
