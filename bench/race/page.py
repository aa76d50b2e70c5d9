"""The page: when each contestant makes what durable, the race on each kind of store, slow tools, the targets, and all notes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bench.race import machine
from bench.race.figures import BY_KEY, FIGURES, Figure, titles
from bench.race.lanes import NAMES, beside
from bench.race.results import Results, Summary
from bench.race.sizes import Sizes
from bench.race.targets import TARGETS, Bound, Target
from bench.race.words import counted, number, times, versions, with_unit

_SLOW = ("T1", "T2")
_RULE = (
    "The rule for everybody: a crash repeats at most the last step that ended, and only if the process dies before the next one begins. "
    "A step that was interrupted is run again."
)
_HOW_TO_READ = (
    "Medians, with lowest and highest in brackets. In bold, how many times better perdure is on the same kind of store: the median of the "
    "ratios of each repeat, with the lowest and the highest of these ratios behind it; below 1 perdure is worse. Servers of one's own stand "
    "beside perdure on its file."
)
_TARGETS = (
    "They were set before anything was measured, as multiples of each peer and, twice, as a bound in milliseconds. What is missed is shown "
    "like what is met."
)


class Footnotes:
    """Notes, numbered in the order of their first use; the same text is one note."""

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
        _section("What is durable when", _RULE, [_durability(results)] if results.contestants else []),
        _section("The race", _HOW_TO_READ, _groups(results, notes, slow=False)),
        _section(f"Tools that take {results.sizes.tool_ms:.0f} ms", _slow_tools(results.sizes), _groups(results, notes, slow=True)),
        f"## Targets\n\n{_TARGETS}\n\n{_targets(results)}",
        "## Notes\n\n" + ("\n".join(notes.lines()) or "None."),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _section(title: str, before: str, tables: Sequence[str]) -> str:
    """Empty if nothing was measured."""
    return "\n\n".join([f"## {title}", before, *tables]) if tables else ""


def _slow_tools(sizes: Sizes) -> str:
    alone_s, together_s = (steps * sizes.tool_ms / 1000 for steps in (sizes.slow_steps, sizes.slow_steps_of_a_run))
    return (
        f"The share of the time that the tools themselves take: {number(alone_s)} s in T1, {number(together_s)} s in T2. That of T2 is short, and most of "
        f"what comes on top is the start of {sizes.slow_runs} runs at once; for who is below {sizes.slow_runs * 1000 / sizes.tool_ms:,.0f} steps/s "
        "in W2 it is the steps as well."
    )


def _head(results: Results) -> str:
    told = [f"- {name}: {value}" for name, value in results.machine.items()]
    if unasked := [name for name in NAMES if name not in results.contestants and name not in results.left_out]:
        told.append(f"- not asked to take part: {', '.join(unasked)}")
    minutes = f"{results.seconds / 60:.0f} min"
    if results.interrupted is None:
        told.append(f"- measured in {minutes}, {counted(results.repeats, 'repeat')} of everything, by turns")
    left_out = [f"- left out: {name}: {reason}" for name, reason in results.left_out.items()]
    warnings = [
        results.quick and "Small sizes: this shows that it works, and measures nothing.",
        results.interrupted is not None and f"{_sentence(results.interrupted.told())} ({minutes}).",
        machine.busy(results.load_before),
    ]
    title = f"# perdure beside its peers, {results.date[:10]}"
    return "\n\n".join([title, *(f"**{warning}**" for warning in warnings if warning), "\n".join(told + left_out)])


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]


def _durability(results: Results) -> str:
    rows = [
        (
            _who(results, about),
            about["durable"],
            about["how"] + ("; resume: " + about["resume"] if "resume" in about else ""),
        )
        for about in results.contestants.values()
    ]
    return _table(("", "what is durable when", "how it was used"), rows)


def _who(results: Results, about: Mapping[str, Any]) -> str:
    """With its Python version, if that differs from the one at the top of the page."""
    python = about.get("python", results.machine.get("Python"))
    return versions(about) + ("" if python == results.machine.get("Python") else f" on {python}")


def _groups(results: Results, notes: Footnotes, *, slow: bool) -> list[str]:
    """A table for the lanes that are compared with perdure on SQLite, and one for those on PostgreSQL."""
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
    mark = notes.mark(results.remarks(figure.key, lane))
    found = results.summary(figure.key, lane)
    if found is not None:
        return _shown(found) + mark
    if any(cell.failed for cell in results.without(figure.key, lane)):
        return f"did not finish{mark}"
    return f"–{mark}"


def _shown(found: Summary) -> str:
    spread = f" ({number(found.low)}–{number(found.high)})" if found.repeats > 1 else ""
    return number(found.median) + spread + _ratio(found)


def _ratio(found: Summary) -> str:
    if found.times is None or found.times_low is None or found.times_high is None:
        return ""
    low, high = (times(value).removesuffix("×") for value in (found.times_low, found.times_high))
    return f" **{times(found.times)}**" + (f" ({low}–{high})" if low != high else "")


def _targets(results: Results) -> str:
    """All targets for a complete race; for a partial race only those with a measured figure."""
    told = [target for target in TARGETS if results.is_whole or _was_tried(target, results)]
    rest = len(TARGETS) - len(told)
    if not told:
        return f"All {rest} are about what was not part of this run."
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
                return f"{figure.title}: at least {number(target.at_least)}× {as_fast} {target.lane}"
            assert target.at_most is not None
            return f"{figure.title}: at most {number(target.at_most)}× that of {target.lane}"


def _measure_of(target: Target | Bound, figure: Figure, measured: float) -> str:
    """With all digits: two digits could round a figure that misses its target up to the target."""
    return with_unit(measured, figure.unit if isinstance(target, Bound) else "×")


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(map(_escaped, row))} |" for row in lines)


def _escaped(cell: str) -> str:
    """Escape text of a contestant, so that it cannot break the table cell."""
    return cell.replace("|", "\\|").replace("\n", " ")
