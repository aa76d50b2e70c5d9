"""The plot: one panel for each workload, a bar for each lane, written by hand as SVG that follows the reader's light or dark mode."""

from __future__ import annotations

import math
from collections.abc import Sequence
from xml.sax.saxutils import escape

from bench.race.figures import BY_KEY
from bench.race.lanes import beside, is_ours
from bench.race.results import Results
from bench.race.words import number, times
from msgspec import Struct

_WIDTH = 800
_MARGIN = 20
_GAP = 24
_COLUMN = (_WIDTH - 2 * _MARGIN - _GAP) / 2
_TOP = 84
_HEAD = 40  # of a panel, above its bars
_ROW = 17
_BAR = 11
_BETWEEN = 6  # the two kinds of stores
_AXIS = 18
_LABELS = 122
_VALUES = 108
_LOG_FROM = 20  # factor between the shortest and the longest bar
_NEVER = "did not finish"

_STYLE = """
text { font-family: -apple-system, BlinkMacSystemFont, "Segoe UI", Helvetica, Arial, sans-serif; font-size: 11px; fill: #1f2328 }
.page { fill: #ffffff; stroke: #d1d9e0 } .title { font-size: 17px; font-weight: 600 } .name { font-size: 13px; font-weight: 600 }
.quiet { fill: #656d76 } .tick { font-size: 9.5px; fill: #818b98 } .grid { stroke: #d1d9e0; stroke-width: 1 } .lost { fill: #818b98; font-style: italic }
.ours { font-weight: 600; fill: #0b5fc0 } .perdure { fill: #1f7ae0 } .dbos { fill: #7d8590 } .langgraph { fill: #98a0a9 } .temporal { fill: #b1b8bf }
.restate { fill: #c4cad0 } .server { fill-opacity: 0.45 }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 } .page { fill: #0d1117; stroke: #3d444d } .quiet { fill: #9198a1 } .tick { fill: #7d8590 } .grid { stroke: #2a3038 } .lost { fill: #7d8590 }
.ours { fill: #79b8ff } .perdure { fill: #4493f8 } .dbos { fill: #8b949e } .langgraph { fill: #747d87 } .temporal { fill: #5f6872 } .restate { fill: #4c545d }
}
"""


class Bar(Struct, frozen=True):
    """One line of a panel. Without a value it says why."""

    lane: str
    label: str
    value: float | None
    plus: float = 0.0
    told: str = ""


class Panel(Struct, frozen=True):
    title: str
    measure: str  # in which the bars are, in words
    better: str
    bars: tuple[Bar, ...]

    @property
    def height(self) -> float:
        return _HEAD + len(self.bars) * _ROW + _BETWEEN * self._groups + _AXIS

    @property
    def _groups(self) -> int:
        return len({beside(bar.lane) for bar in self.bars}) - 1


class Scale(Struct, frozen=True):
    """From a value to a length: from nothing where the bars are comparable, by powers of ten where they are not."""

    low: float
    high: float
    is_log: bool

    @classmethod
    def of(cls, values: Sequence[float]) -> Scale:
        above = [value for value in values if value > 0] or [1.0]
        low, high = min(above), max(above)
        if high / low < _LOG_FROM:
            return cls(0.0, high, is_log=False)
        # A decade of room, so that the shortest bar can be seen.
        return cls(10.0 ** math.floor(math.log10(low / 2)), high, is_log=True)

    def length(self, value: float, room: float) -> float:
        if self.is_log:
            share = math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
        else:
            share = max(value, 0.0) / self.high
        return max(share * room, 1.0)

    def ticks(self) -> list[float]:
        if not self.is_log:
            return []
        return [10.0**power for power in range(math.floor(math.log10(self.low)), math.floor(math.log10(self.high)) + 1)]


def plot(results: Results) -> str:
    """The whole picture, from what was measured."""
    panels = [panel for panel in _panels(results) if any(bar.value is not None for bar in panel.bars)]
    drawn: list[str] = []
    y = float(_TOP)
    for left, right in zip(panels[::2], [*panels[1::2], None], strict=False):
        drawn += _panel(left, _MARGIN, y)
        drawn += [] if right is None else _panel(right, _MARGIN + _COLUMN + _GAP, y)
        y += max(left.height, 0 if right is None else right.height) + 14
    height = y + 46
    caption = _captions(results, height - 34)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height:.0f}" viewBox="0 0 {_WIDTH} {height:.0f}" role="img">',
            f"<title>{escape(_title(results))}</title>",
            f"<style>{_STYLE}</style>",
            f'<rect class="page" x="0.5" y="0.5" width="{_WIDTH - 1}" height="{height - 1:.0f}" rx="8"/>',
            _text(_MARGIN, 34, _title(results), "title"),
            _text(_MARGIN, 54, "Tools that do nothing, so that only the runtime is measured; every step survives a crash.", "quiet"),
            _text(_MARGIN, 69, "Behind each value: how many times better perdure is on the same kind of store.", "quiet"),
            *drawn,
            *caption,
            "</svg>",
            "",
        ]
    )


def _title(results: Results) -> str:
    return "perdure beside its peers" + (": a trial at small sizes, which measures nothing" if results.quick else "")


def _captions(results: Results, y: float) -> list[str]:
    machine = [
        results.machine[name] for name in ("processor", "file system", "disk, 4 KiB at the end of a file") if name in results.machine
    ]
    repeats = f"medians of {results.repeats} repeats by turns" if results.repeats > 1 else "one repeat"
    versions = ", ".join(f"{about['name']} {about['version']}" for about in results.contestants.values())
    return [
        _text(_MARGIN, y, f"{results.date[:10]} · {' · '.join(machine)} · {repeats}", "quiet"),
        _text(_MARGIN, y + 16, versions, "quiet"),
    ]


# -- what is in a panel -----------------------------------------------------------------------------------------------------
def _panels(results: Results) -> list[Panel]:
    sizes = results.sizes
    simple = [
        ("W1.steps_per_s", f"One run, {sizes.steps:,} steps one after the other", "steps/s"),
        ("W2.steps_per_s", f"{sizes.runs:,} runs of {sizes.steps_of_a_run} steps at the same time", "steps/s"),
        ("W3.runs_per_s", f"{sizes.queued:,} queued runs of one step", "runs/s"),
        ("W3.idle_ms", "A queued run begins on an idle system", "milliseconds"),
        ("W4.long_s", f"A run of {sizes.long_run:,} steps resumes", "seconds, start of the process included"),
        ("W5.bytes_per_step", "Stored for a step", "bytes"),
        ("W6.worker_mb", f"Peak memory of the {sizes.runs:,} runs", "MB: the process + its own server"),
        ("W7.times_said", f"Stored for {sizes.turns:,} turns of a conversation", "times what was said"),
        ("W7.resume_s", f"A conversation of {sizes.turns:,} turns resumes", "seconds, start of the process included"),
        ("W8.wake_ms", f"One of {sizes.parked:,} parked runs wakes up", "milliseconds"),
    ]
    panels = [_simple(results, key, title, measure) for key, title, measure in simple]
    slow = f"{sizes.slow_runs} runs of {sizes.slow_steps_of_a_run} steps with tools of {sizes.tool_ms:.0f} ms"
    return [*panels, _workers(results), _simple(results, "T2.share", slow, "% of the ideal time")]


def _simple(results: Results, key: str, title: str, measure: str) -> Panel:
    lanes = sorted(results.lanes, key=lambda lane: beside(lane) == "perdure/postgres")  # stable: the order is otherwise kept
    return Panel(title, measure, BY_KEY[key].better, tuple(_bar(results, key, lane, lane) for lane in lanes))


def _workers(results: Results) -> Panel:
    """Lanes on PostgreSQL, each with one, two and four processes."""
    bars = [
        _bar(results, f"W9.steps_per_s_{count}", lane, f"{lane.partition('/')[0]}, {count}")
        for lane in results.lanes
        if lane.endswith("/postgres")
        for count in (1, 2, 4)
    ]
    title = f"{results.sizes.shared_runs:,} queued runs of {results.sizes.shared_steps} steps, PostgreSQL"
    shown = tuple(bar for bar in bars if bar.value is not None or bar.told == _NEVER)
    return Panel(title, "steps/s of 1, 2 and 4 worker processes", "more", shown)


def _bar(results: Results, key: str, lane: str, label: str) -> Bar:
    found = results.summary(key, lane)
    if found is None:
        missing = results.without(key, lane)
        told = _NEVER if any(cell.failed for cell in missing) else "has none" if missing else "not measured"
        return Bar(lane, label, None, told=told)
    server = results.summary("W6.server_mb", lane) if key == "W6.worker_mb" else None
    ratio = "" if found.times is None else f" · {times(found.times)}"
    shown = number(found.median) if server is None else f"{number(found.median)} + {number(server.median)}"
    return Bar(lane, label, found.median, 0.0 if server is None else server.median, shown + ratio)


# -- how it is drawn --------------------------------------------------------------------------------------------------------
def _panel(panel: Panel, x: float, y: float) -> list[str]:
    scale = Scale.of([bar.value + bar.plus for bar in panel.bars if bar.value is not None])
    room = _COLUMN - _LABELS - _VALUES
    direction = f"{panel.better} is better" + (", logarithmic" if scale.is_log else "")
    lines = [_text(x, y + 12, panel.title, "name"), _text(x, y + 27, f"{panel.measure} · {direction}", "quiet")]
    bottom = y + panel.height - _AXIS
    for tick in scale.ticks():
        at = x + _LABELS + (scale.length(tick, room) if tick > scale.low else 0)
        lines.append(f'<line class="grid" x1="{at:.1f}" y1="{y + _HEAD - 4:.1f}" x2="{at:.1f}" y2="{bottom:.1f}"/>')
        lines.append(_text(at, bottom + 11, number(tick), "tick", "middle"))
    at_y, before = y + _HEAD, beside(panel.bars[0].lane)
    for bar in panel.bars:
        at_y += _BETWEEN if beside(bar.lane) != before else 0
        before = beside(bar.lane)
        lines += _line(bar, scale, x, at_y, room)
        at_y += _ROW
    return lines


def _line(bar: Bar, scale: Scale, x: float, y: float, room: float) -> list[str]:
    contestant = bar.lane.partition("/")[0]
    words = "ours" if is_ours(bar.lane) else ""
    lines = [_text(x + _LABELS - 6, y + _BAR - 1, bar.label, words or "quiet", "end")]
    begin = x + _LABELS
    if bar.value is None:
        return [*lines, _text(begin + 4, y + _BAR - 1, bar.told, "lost")]
    whole = scale.length(bar.value + bar.plus, room)
    own = whole * bar.value / (bar.value + bar.plus) if bar.plus else whole
    lines.append(_rect(contestant, begin, y, own))
    if bar.plus:
        lines.append(_rect(f"{contestant} server", begin + own, y, whole - own))
    return [*lines, _text(begin + whole + 5, y + _BAR - 1, bar.told, words)]


def _rect(kind: str, x: float, y: float, width: float) -> str:
    return f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{_BAR}" rx="1.5"/>'


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    named = f' class="{kind}"' if kind else ""
    placed = f' text-anchor="{anchor}"' if anchor != "start" else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{named}{placed}>{escape(text)}</text>'
