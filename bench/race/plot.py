"""The plots: one panel for each workload, a bar for each lane, written by hand as SVG that follows the reader's light or dark mode.

`plot` has every panel, `headline` the four that the README shows.

A README shows it about 900 pixels wide, so one unit here is one pixel there.
"""

from __future__ import annotations

import itertools
import math
import re
import statistics
import textwrap
from collections.abc import Sequence
from typing import Literal
from xml.sax.saxutils import escape

from bench.race.figures import BY_KEY
from bench.race.lanes import NAMES, beside, contestant_of, is_as_shipped, is_ours
from bench.race.results import Cell, Results
from bench.race.sizes import Sizes
from bench.race.wire import ARGUMENT_CHARS
from bench.race.words import number, times, versions
from msgspec import Struct

_WIDTH = 900
_MARGIN = 26
_GAP = 34
_COLUMN = (_WIDTH - 2 * _MARGIN - _GAP) / 2
_TOP = 112
_HEAD = 42  # of a panel, above its first group
_GROUP = 17  # the line above the bars of one kind of store
_ROW = 18
_REMARK = 16  # the line below a bar that has a remark
_BAR = 12
_BELOW = 26  # the scale, and space before the next panel
_LABELS = 92
_VALUES = 140
_ROOM = _COLUMN - _LABELS - _VALUES
_HAIRLINE = 2.0  # the smallest visible bar
_MOST_TICKS = 5  # without the zero
_DIGIT = 7  # width of a digit
_CAPTION_CHARS = 132
_REASON_CHARS = 38
_NOT_THERE = "not there"
_NEVER = "did not finish"

# One colour for each contestant, in both modes; only perdure's colour is strong.
_STYLE = """
text { font-family: -apple-system, BlinkMacSystemFont, "Segoe UI", "Noto Sans", Helvetica, Arial, sans-serif; font-size: 12px; fill: #1f2328;
  paint-order: stroke; stroke: #ffffff; stroke-width: 3px; stroke-linejoin: round }
.page { fill: #ffffff; stroke: #d1d9e0 } .title { font-size: 21px; font-weight: 600 } .name { font-size: 14px; font-weight: 600 }
.quiet { fill: #59636e } .group { fill: #59636e } .tick { fill: #6e7781 } .remark { fill: #6e7781; font-style: italic } .lost { fill: #6e7781; font-style: italic }
.grid { stroke: #e4e8ec } .axis { stroke: #afb8c1 } .whisker { stroke: #1f2328; stroke-width: 1.2; fill: none }
.ours { font-weight: 600; fill: #0a5bd3 } .won { font-weight: 600; fill: #0a5bd3 } .worse { font-weight: 600; fill: #bc4c00 }
.perdure { fill: #1f6feb } .dbos { fill: #8d99ae } .langgraph { fill: #a89cc8 } .temporal { fill: #92b4a7 } .restate { fill: #d0ae86 } .other { fill: #aab2bb }
.pale { fill-opacity: 0.55 } .server { fill-opacity: 0.25 }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3; stroke: #0d1117 } .page { fill: #0d1117; stroke: #3d444d }
.quiet { fill: #9da7b1 } .group { fill: #9da7b1 } .tick { fill: #8b949e } .remark { fill: #9198a1 } .lost { fill: #9198a1 }
.grid { stroke: #21262d } .axis { stroke: #57606a } .whisker { stroke: #f0f6fc }
.ours { fill: #79b8ff } .won { fill: #79b8ff } .worse { fill: #f0883e }
.perdure { fill: #388bfd } .dbos { fill: #66738a } .langgraph { fill: #7b6ea3 } .temporal { fill: #55806f } .restate { fill: #94744c } .other { fill: #6e7681 }
.pale { fill-opacity: 0.6 } .server { fill-opacity: 0.35 }
}
"""


class Bar(Struct, frozen=True):
    """One line of a panel. Without a value, `told` says why. `own` is the part of the value without the contestant's server. `remark` is
    printed below the bar, instead of the asterisk for a note."""

    lane: str
    label: str
    told: str
    value: float | None = None
    own: float | None = None
    low: float = 0.0
    high: float = 0.0
    ratio: float | None = None
    has_note: bool = False
    remark: str = ""

    @property
    def height(self) -> float:
        return _ROW + (_REMARK if self.remark else 0)

    @property
    def star(self) -> str:
        return " *" if self.has_note and not self.remark else ""


class Panel(Struct, frozen=True):
    """The bars of one figure; `measure` describes its unit."""

    title: str
    measure: str
    better: Literal["more", "less"]
    bars: tuple[Bar, ...]

    @property
    def groups(self) -> list[tuple[str, list[Bar]]]:
        """The bars that are compared with perdure on the same kind of store."""
        return [(store, list(bars)) for store, bars in itertools.groupby(self.bars, lambda bar: beside(bar.lane))]

    @property
    def height(self) -> float:
        return _HEAD + sum(bar.height for bar in self.bars) + _GROUP * len(self.groups) + _BELOW


class Scale(Struct, frozen=True):
    """Converts a value to a length. The scale starts at zero: a bar twice as long is twice as much."""

    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Scale:
        return cls(max((value for value in values if value > 0), default=1.0))

    def length(self, value: float, room: float) -> float:
        return max(max(value, 0.0) / self.high * room, _HAIRLINE)

    def ticks(self) -> list[float]:
        """Round values up to the longest bar, without the zero."""
        most = min(_MOST_TICKS, _ROOM / (_DIGIT * (len(number(self.high)) + 1)))  # their labels must not touch
        power = 10.0 ** math.floor(math.log10(self.high / most))
        step = next(power * factor for factor in (1, 2, 5, 10) if self.high / (power * factor) <= most)
        return [step * count for count in range(1, math.floor(self.high / step + 1e-9) + 1)]


# One run, many runs, the recovery after a kill, and a start.
_HEADLINE = ("W1.steps_per_s", "W2.steps_per_s", "W4.long_s", "W3.idle_ms")


def plot(results: Results) -> str:
    """The whole picture, from what was measured."""
    return _picture(results, _panels(results))


def headline(results: Results) -> str:
    """Four panels of the same picture, from the same figures."""
    return _picture(results, [_simple(results, key) for key in _HEADLINE])


def _picture(results: Results, wanted: Sequence[Panel]) -> str:
    panels = [panel for panel in wanted if any(bar.value is not None for bar in panel.bars)]
    drawn: list[str] = []
    y = float(_TOP)
    for row in (panels[at : at + 2] for at in range(0, len(panels), 2)):
        for place, panel in enumerate(row):
            drawn += _panel(panel, _MARGIN + place * (_COLUMN + _GAP), y)
        y += max(panel.height for panel in row)
    captions = _captions(results, has_notes=any(bar.star for panel in panels for bar in panel.bars))
    height = y + 17 * len(captions) + 18
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height:.0f}" viewBox="0 0 {_WIDTH} {height:.0f}" role="img">',
            f"<title>{escape(_title(results))}</title>",
            f"<style>{_STYLE}</style>",
            f'<rect class="page" x="0.5" y="0.5" width="{_WIDTH - 1}" height="{height - 1:.0f}" rx="8"/>',
            _text(_MARGIN, 40, _title(results), "title"),
            _text(
                _MARGIN,
                63,
                f"Tools that do nothing, {ARGUMENT_CHARS} characters per step: only the runtime is measured. "
                "A crash repeats at most the last step that ended.",
                "quiet",
            ),
            _key(_MARGIN, 82),
            *drawn,
            *(_text(_MARGIN, y + 12 + 17 * place, line, "quiet") for place, line in enumerate(captions)),
            "</svg>",
            "",
        ]
    )


def _title(results: Results) -> str:
    return f"perdure beside its peers, {results.date[:10]}" + (": a trial that measures nothing" if results.quick else "")


def _key(x: float, y: float) -> str:
    """The explanation of the lines of a panel."""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" class="quiet">Behind each value, how many times better perdure is on the same kind of store: '
        '<tspan class="won">2×</tspan> twice as good, <tspan class="worse">0.5×</tspan> half as good.</text>'
    )


def _captions(results: Results, *, has_notes: bool) -> list[str]:
    """The lines below the panels: date, machine, versions, and missing contestants."""
    named = ("processor", "file system", "disk, 4 KiB at the end of a file")
    machine = [results.machine[name] for name in named if name in results.machine]
    repeats = (
        f"medians of {results.repeats} repeats by turns, lines from the lowest to the highest" if results.repeats > 1 else "one repeat"
    )
    if results.interrupted is not None:
        repeats = results.interrupted.told()
    told = [
        " · ".join([results.date[:10], *machine, repeats]),
        "The ratios are medians of each repeat's ratio.",
        ", ".join(versions(about) for about in results.contestants.values()),
    ]
    if missing := _missing(results):
        told.append(f"Left out: {', '.join(missing)}; the page beside this plot says why.")
    if any(is_as_shipped(lane) for lane in results.lanes):
        told.append("As shipped: without settings that make it faster and that its documentation does not tell of.")
    if has_notes:
        told.append("* There is a note about it on the page beside this plot.")
    return [line for text in told for line in textwrap.wrap(text, _CAPTION_CHARS)]


def _missing(results: Results) -> list[str]:
    """Contestants that could not take part, were not selected, or gave no figure."""
    unasked = [name for name in NAMES if name not in results.contestants and name not in results.left_out]
    return [*results.left_out, *unasked, *results.silent()]


# -- what is in a panel -----------------------------------------------------------------------------------------------------
def _panels(results: Results) -> list[Panel]:
    simple = {key: _simple(results, key) for key in _titles(results.sizes)}
    slow = simple.pop("T2.share")
    return [*simple.values(), _workers(results), slow]


def _titles(sizes: Sizes) -> dict[str, tuple[str, str]]:
    """Title and measure of each figure that has a panel of its own."""
    slow = f"{sizes.slow_runs} runs of {sizes.slow_steps_of_a_run} steps that take {sizes.tool_ms:.0f} ms"
    return {
        "W1.steps_per_s": (f"One run, {sizes.steps:,} steps one after the other", "steps/s"),
        "W2.steps_per_s": (f"{sizes.runs:,} runs of {sizes.steps_of_a_run} steps at the same time", "steps/s"),
        "W3.through_per_s": (f"{sizes.queued:,} runs of one step through a queue", "runs/s, enqueued and worked off"),
        "W3.idle_ms": ("A queued run begins on an idle system", "milliseconds"),
        "W4.long_s": (f"A killed run of {sizes.long_run:,} steps goes on", "seconds, with the start of the process"),
        "W5.bytes_per_step": ("Stored for a step", "bytes"),
        "W6.worker_mb": (f"Peak memory of those {sizes.runs:,} runs", "MB, process + own server; ratio of processes"),
        "W7.times_said": (f"Stored for {sizes.turns:,} turns of a conversation", "times what was said"),
        "W7.resume_s": (f"A killed conversation of {sizes.turns:,} turns goes on", "seconds, with the start of the process"),
        "W8.wake_ms": (f"One of {sizes.parked:,} parked runs wakes up", "milliseconds"),
        "T2.share": (slow, "% of the ideal time"),
    }


def _simple(results: Results, key: str) -> Panel:
    lanes = sorted(results.lanes, key=lambda lane: beside(lane) == "perdure/postgres")  # stable: the order is otherwise kept
    shown = [lane for lane in lanes if not is_as_shipped(lane) or results.was_tried(key, lane)]
    better = BY_KEY[key].better
    assert better is not None, f"{key} is drawn, and neither more nor less of it is better"
    title, measure = _titles(results.sizes)[key]
    return Panel(title, measure, better, tuple(_bar(results, key, lane, _label(results, lane)) for lane in shown))


def _workers(results: Results) -> Panel:
    """Lanes on PostgreSQL, each with one, two and four processes; one line for a contestant without workers."""
    bars: list[Bar] = []
    for lane in (lane for lane in results.lanes if beside(lane) == "perdure/postgres" and not is_as_shipped(lane)):
        name = _label(results, lane)
        counted = [_bar(results, f"W9.steps_per_s_{count}", lane, f"{name}, {count}") for count in (1, 2, 4)]
        bars += (
            counted
            if any(bar.value is not None or bar.told == _NEVER for bar in counted)
            else [_bar(results, "W9.steps_per_s_1", lane, name)]
        )
    title = f"{results.sizes.shared_runs:,} queued runs of {results.sizes.shared_steps} steps, shared"
    return Panel(title, "steps/s of 1, 2 and 4 worker processes", "more", tuple(bars))


def _label(results: Results, lane: str) -> str:
    if is_as_shipped(lane):
        return "as shipped"  # its line comes after the one of the same contestant
    contestant = contestant_of(lane)
    return str(results.contestants.get(contestant, {}).get("name", contestant))


def _bar(results: Results, key: str, lane: str, label: str) -> Bar:
    found = results.summary(key, lane)
    has_note, remark = bool(results.remarks(key, lane)), _remark(results, key, lane)
    if found is None:
        return Bar(lane, label, _why_not(results.without(key, lane)), has_note=has_note)
    own, served = found.median, results.values("W6.server_mb", lane) if key == "W6.worker_mb" else {}
    if not served:
        return Bar(lane, label, number(own), own, own, found.low, found.high, found.times, has_note, remark)
    server = statistics.median(served.values())
    both = [value + served[repeat] for repeat, value in results.values(key, lane).items() if repeat in served]
    return Bar(lane, label, f"{number(own)} + {number(server)}", own + server, own, min(both), max(both), found.times, has_note)


def _why_not(missing: Sequence[Cell]) -> str:
    if any(cell.failed for cell in missing):
        return _NEVER
    absent = [cell.absent for cell in missing if cell.absent]
    if not absent:
        return "not measured"
    reason = re.split("[;:,] ", absent[0])[0]
    return reason if len(reason) <= _REASON_CHARS else _NOT_THERE  # the whole remark or none; the page has all of them


def _remark(results: Results, key: str, lane: str) -> str:
    """The remark for this bar: that fewer runs were parked than the panel says, or a short remark of the contestant."""
    parked = results.summary("W8.parked", lane) if BY_KEY[key].workload == "W8" else None
    of = [f"of {parked.median:,.0f} runs"] if parked is not None and parked.median < results.sizes.parked else []
    said = results.contestants.get(contestant_of(lane), {}).get("in_short", {}).get(lane, {}).get(key)
    return ", ".join([*of, *([said] if said else [])])


# -- how it is drawn --------------------------------------------------------------------------------------------------------
def _panel(panel: Panel, x: float, y: float) -> list[str]:
    scale = Scale.of([length for bar in panel.bars if bar.value is not None for length in (bar.value, bar.low, bar.high)])
    lines = [_text(x, y + 13, panel.title, "name"), _text(x, y + 30, f"{panel.measure} · {panel.better} is better", "quiet")]
    at_y = y + _HEAD
    for store, bars in panel.groups:
        named = "PostgreSQL" if store == "perdure/postgres" else "SQLite, or a server of its own"
        bottom = at_y + _GROUP + sum(bar.height for bar in bars)
        lines += [_text(x + _LABELS, at_y + 11, named, "group"), *_grid(scale, x + _LABELS, at_y + _GROUP - 2, bottom - 2)]
        at_y += _GROUP
        for bar in bars:
            lines += _line(bar, scale, x, at_y)
            at_y += bar.height
    ticks = [0.0, *scale.ticks()]
    return [*lines, *(_text(x + _LABELS + _at(scale, tick), at_y + 11, number(tick), "tick", "middle") for tick in ticks)]


def _grid(scale: Scale, x: float, top: float, bottom: float) -> list[str]:
    """The scale with round values, and the line at which the bars begin."""
    return [*(_rule("grid", x + _at(scale, tick), top, bottom) for tick in scale.ticks()), _rule("axis", x, top, bottom)]


def _at(scale: Scale, tick: float) -> float:
    return tick / scale.high * _ROOM


def _line(bar: Bar, scale: Scale, x: float, y: float) -> list[str]:
    base = y + _BAR - 2
    lines = [_text(x + _LABELS - 7, base, bar.label, "ours" if is_ours(bar.lane) else "quiet" if is_as_shipped(bar.lane) else "", "end")]
    begin = x + _LABELS
    if bar.value is None or bar.own is None:
        return [*lines, _text(begin + 6, base, bar.told + bar.star, "lost")]
    end = scale.length(bar.value, _ROOM)
    own = end * bar.own / bar.value if bar.value else end
    lines.append(_rect(_kind(bar.lane), begin, y, own))
    if own < end:
        lines.append(_rect(f"{_kind(bar.lane)} server", begin + own, y, end - own))
    if bar.low < bar.high:
        low, high = (begin + scale.length(value, _ROOM) for value in (bar.low, bar.high))
        lines.append(_whisker(low, high, y + _BAR / 2))
        end = max(end, high - begin)
    lines.append(_values(bar, begin + end + 6, base))
    return [*lines, _text(begin + 6, base + _REMARK - 1, bar.remark, "remark")] if bar.remark else lines


def _kind(lane: str) -> str:
    """The CSS class of its colour; paler for a lane as shipped."""
    contestant = contestant_of(lane)
    return (contestant if contestant in NAMES else "other") + (" pale" if is_as_shipped(lane) else "")


def _values(bar: Bar, x: float, y: float) -> str:
    ratio = ""
    if bar.ratio is not None:
        ratio = f' <tspan dx="3" class="{"won" if bar.ratio >= 1 else "worse"}">{times(bar.ratio)}</tspan>'
    ours = ' class="ours"' if is_ours(bar.lane) else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{ours}>{escape(bar.told)}{ratio}{bar.star}</text>'


def _whisker(low: float, high: float, y: float) -> str:
    return f'<path class="whisker" d="M{low:.1f} {y - 3:.1f}v6M{low:.1f} {y:.1f}H{high:.1f}M{high:.1f} {y - 3:.1f}v6"/>'


def _rect(kind: str, x: float, y: float, width: float) -> str:
    return f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{_BAR}" rx="1.5"/>'


def _rule(kind: str, x: float, top: float, bottom: float) -> str:
    return f'<line class="{kind}" x1="{x:.1f}" y1="{top:.1f}" x2="{x:.1f}" y2="{bottom:.1f}"/>'


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    named = f' class="{kind}"' if kind else ""
    placed = f' text-anchor="{anchor}"' if anchor != "start" else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{named}{placed}>{escape(text)}</text>'
