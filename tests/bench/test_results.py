"""What is computed from the cells: medians, ratios, verdicts, the page and the plot."""

from __future__ import annotations

import io
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import msgspec
import pytest
from bench.race import document, page, plot
from bench.race.__main__ import main
from bench.race.figures import BY_KEY, FIGURES
from bench.race.interruption import Interruption
from bench.race.lanes import NAMES, ROOT, Contestant, beside, contestant_of, lanes_of
from bench.race.measurements import MEASUREMENTS
from bench.race.plot import Scale
from bench.race.progress import Bar, Forecast, bar_on
from bench.race.results import Cell, Results
from bench.race.sizes import WHOLE
from bench.race.targets import TARGETS, Bound, Target
from bench.race.words import number, times
from rich.console import Console

_LANES = [
    *("perdure/sqlite", "perdure/postgres", "dbos/sqlite", "dbos/sqlite, as shipped", "dbos/postgres"),
    *("langgraph/sqlite", "temporal", "temporal, as shipped"),
]


def _results(cells: list[Cell]) -> Results:
    dbos = {"name": "DBOS", "version": "9", "durable": "a | b", "how": "plainly", "python": "CPython 3.99"}
    temporal = {"name": "Temporal", "version": "1.2", "server": "3.4", "durable": "all", "how": "plainly"}
    temporal["notes"] = {"W4": "its history has a limit", "W5": "free pages count"}  # type: ignore[assignment]
    return Results(
        date="2026-11-16T00:00:00+00:00",
        quick=False,
        repeats=3,
        sizes=WHOLE,
        machine={"processor": "2 cores & more", "Python": "CPython 3.11.7"},
        contestants={"dbos": dbos, "temporal": temporal},
        left_out={"restate": "no npm"},
        lanes=_LANES,
        cells=cells,
        is_whole=True,
    )


def _cells(lane: str, key: str, *values: float) -> list[Cell]:
    return [Cell("m", lane, repeat, 1.0, (key,), {key: value}) for repeat, value in enumerate(values, 1)]


def test_a_ratio_is_taken_repeat_by_repeat_and_its_median_counts() -> None:
    key = "W1.steps_per_s"
    # The machine was three times slower in the second repeat: medians alone would say 1000 / 300.
    found = _results(_cells("perdure/sqlite", key, 1000, 300, 1200) + _cells("dbos/sqlite", key, 100, 33, 300))
    summary = found.summary(key, "dbos/sqlite")
    assert summary is not None
    assert (summary.median, summary.low, summary.high, summary.repeats) == (100, 33, 300, 3)
    assert summary.times == pytest.approx(300 / 33)


def test_a_ratio_above_one_means_that_perdure_is_better_whichever_direction_is() -> None:
    more = _results(_cells("perdure/sqlite", "W1.steps_per_s", 1000) + _cells("temporal", "W1.steps_per_s", 10))
    less = _results(_cells("perdure/postgres", "W4.long_s", 0.5) + _cells("dbos/postgres", "W4.long_s", 5))
    worse = _results(_cells("perdure/sqlite", "W5.bytes_per_step", 900) + _cells("dbos/sqlite", "W5.bytes_per_step", 450))
    assert more.times("W1.steps_per_s", "temporal") == 100
    assert less.times("W4.long_s", "dbos/postgres") == 10
    assert worse.times("W5.bytes_per_step", "dbos/sqlite") == 0.5


def test_a_lane_stands_beside_perdure_on_its_own_kind_of_store() -> None:
    key = "W1.steps_per_s"
    both = _cells("perdure/sqlite", key, 1000) + _cells("perdure/postgres", key, 500)
    found = _results(both + _cells("dbos/postgres", key, 100))
    assert found.times(key, "dbos/postgres") == 5
    assert found.times(key, "perdure/postgres") is None


def test_a_repeat_that_one_of_the_two_does_not_have_counts_for_nothing() -> None:
    key = "W1.steps_per_s"
    ours = [Cell("m", "perdure/sqlite", 1, 1.0, (key,), failed="no"), *_cells("perdure/sqlite", key, 0, 200)[1:]]
    found = _results(ours + _cells("dbos/sqlite", key, 10, 20))
    assert found.times(key, "dbos/sqlite") == 10


def test_less_than_nothing_has_no_ratio_and_nothing_at_all_has_one() -> None:
    key = "W5.bytes_per_step"
    found = _results(_cells("perdure/sqlite", key, 700) + _cells("dbos/sqlite", key, -12) + _cells("temporal", key, 0))
    assert found.times(key, "dbos/sqlite") is None
    assert found.times(key, "temporal") == 0


def test_a_verdict_is_about_the_bound_itself_and_says_when_nothing_was_measured() -> None:
    key = "W1.steps_per_s"
    found = _results(_cells("perdure/sqlite", key, 1000) + _cells("dbos/sqlite", key, 100))
    assert Target(key, "dbos/sqlite", 10).verdict(found) == "ok"
    assert Target(key, "dbos/sqlite", 10.01).verdict(found) == "miss"
    assert Target(key, "temporal", 10).verdict(found) == "not measured"


def test_at_most_is_about_ours_in_theirs() -> None:
    key = "W5.bytes_per_step"
    found = _results(_cells("perdure/sqlite", key, 900) + _cells("dbos/sqlite", key, 600))
    assert Target(key, "dbos/sqlite", at_most=1.5).measured(found) == pytest.approx(1.5)
    assert Target(key, "dbos/sqlite", at_most=1.5).verdict(found) == "ok"
    assert Target(key, "dbos/sqlite", at_most=1.4).verdict(found) == "miss"
    assert Bound(key, "perdure/sqlite", 900).verdict(found) == "ok"
    assert Bound(key, "perdure/sqlite", 899).verdict(found) == "miss"


def test_every_target_is_about_a_figure_that_is_measured() -> None:
    given = {key for one in MEASUREMENTS for key in one.gives}
    assert given == {figure.key for figure in FIGURES}
    assert {target.key for target in TARGETS} <= given


def _full() -> Results:
    """Every figure in every lane that takes part in it; temporal did not finish some, langgraph has no queue, dbos parked too few."""
    cells = []
    for one in MEASUREMENTS:
        for place, lane in enumerate(_LANES, 1):
            if lane.endswith("as shipped") and not one.as_shipped:
                continue
            figures = [dict.fromkeys(one.gives, 7.0 * place * spread) for spread in (1.0, 1.3, 0.8)]
            told: dict[str, Any] = {}
            if lane == "temporal" and one.name != "many runs":
                told = {"failed": "cut off after 150 s, <really> & truly"}
            elif lane.startswith("langgraph") and one.name == "a queue":
                told = {"absent": "it has no queue"}
            elif lane.startswith("dbos") and one.name == "parked runs":
                told = {"why": ("no more were started in 60 s",)}
            kept = [{} if told.keys() & {"failed", "absent"} else values for values in figures]
            cells += [Cell(one.name, lane, repeat, 1.0, one.gives, kept[repeat - 1], **told) for repeat in (1, 2, 3)]
    return _results(cells)


_SVG = "{http://www.w3.org/2000/svg}"


def _texts(results: Results) -> list[str]:
    return ["".join(element.itertext()) for element in ElementTree.fromstring(plot.plot(results)).iter(f"{_SVG}text")]


def test_the_plot_is_well_formed_and_has_every_lane_and_says_who_did_not_finish() -> None:
    texts = _texts(_full())
    assert {"perdure", "DBOS", "langgraph", "Temporal", "as shipped"} <= set(texts)
    assert "did not finish *" in texts
    assert "it has no queue *" in texts
    assert any("2026-11-16" in text and "2 cores & more" in text for text in texts)
    assert any("DBOS 9, Temporal 1.2, server 3.4" in text for text in texts)


def test_the_plot_says_who_is_left_out_and_who_gave_nothing_at_all() -> None:
    found = _full()
    found.cells = [msgspec.structs.replace(cell, figures={}) if cell.lane == "dbos/postgres" else cell for cell in found.cells]
    (told,) = [text for text in _texts(found) if text.startswith("Left out")]
    assert told == "Left out: restate, perdure, langgraph, dbos/postgres; the page beside this plot says why."
    found.left_out, found.contestants, found.cells = {}, dict.fromkeys(NAMES, found.contestants["dbos"]), _full().cells
    assert not [text for text in _texts(found) if text.startswith("Left out")]


def test_every_shape_has_a_colour_of_its_contestant_in_light_and_in_dark() -> None:
    drawn = plot.plot(_full())
    light, _, dark = drawn.partition("@media (prefers-color-scheme: dark)")
    shapes = ElementTree.fromstring(drawn).iter(f"{_SVG}rect")
    first = {(element.get("class") or "").split()[0] for element in shapes}
    assert first == {"page", "perdure", "dbos", "langgraph", "temporal"}
    for mode in (light, dark.partition("</style>")[0]):
        colours = re.findall(r"\.(\w+) \{[^}]*fill: (#\w{6})", mode)
        assert first <= {name for name, _ in colours}
        assert len({colour for name, colour in colours if name in first}) == len(first)


def test_a_lane_as_shipped_is_shown_where_it_is_measured_and_nowhere_else() -> None:
    shown: dict[str, int] = {}
    title = ""
    for element in ElementTree.fromstring(plot.plot(_full())).iter(f"{_SVG}text"):
        text = "".join(element.itertext())
        title = text if element.get("class") == "name" else title
        shown[title] = shown.get(title, 0) + (text == "as shipped")
    assert shown["One run, 1,000 steps one after the other"] == 2
    assert shown["One of 10,000 parked runs wakes up"] == 0
    assert "not measured" not in _texts(_full())


def test_bars_with_a_note_have_an_asterisk_and_the_others_have_none() -> None:
    key, why = "W8.wake_ms", ("no more were started in 60 s",)
    noted = [msgspec.structs.replace(cell, why=why) for cell in _cells("dbos/sqlite", key, 80.0)]
    texts = _texts(_results(_cells("perdure/sqlite", key, 20.0) + noted))
    assert {"20", "80 4× *", "* There is a note about it on the page beside this plot."} <= set(texts)
    assert not [text for text in _texts(_results(_cells("perdure/sqlite", key, 20.0))) if "*" in text]


def test_what_must_be_known_to_read_a_bar_stands_below_it_in_place_of_an_asterisk() -> None:
    key, why = "W8.wake_ms", ("no more were started in 60 s",)
    noted = [msgspec.structs.replace(cell, why=why) for cell in _cells("dbos/sqlite", key, 80.0)]
    parked = _cells("dbos/sqlite", "W8.parked", 5600) + _cells("perdure/sqlite", "W8.parked", 10_000)
    found = _results(_cells("perdure/sqlite", key, 20.0) + noted + parked)
    found.contestants["dbos"]["in_short"] = {"dbos/sqlite": {key: "polls every second"}}
    texts = _texts(found)
    assert {"20", "80 4×", "of 5,600 runs, polls every second"} <= set(texts)
    assert not [text for text in texts if "*" in text or "of 10,000 runs" in text]


def test_why_a_bar_is_missing_is_told_whole_or_not_at_all() -> None:
    key = "W4.long_s"
    ours = _cells("perdure/sqlite", key, 0.5)
    short = Cell("m", "temporal", 1, 1.0, (key,), absent="refused at 8,533 steps: its history limit is 51,200 events")
    long = msgspec.structs.replace(short, absent="what it has for this cannot be told in a few words and so it is told elsewhere")
    assert "refused at 8,533 steps *" in _texts(_results([*ours, short]))
    texts = _texts(_results([*ours, long]))
    assert "not there *" in texts
    assert not [text for text in texts if "…" in text]


def test_the_plot_says_what_a_step_is_given_and_what_a_ratio_is() -> None:
    texts = _texts(_full())
    assert any("200 characters per step" in text for text in texts)
    assert any("ratios are medians of each repeat's ratio" in text for text in texts)


def test_a_whisker_goes_from_the_lowest_to_the_highest_repeat() -> None:
    found = _results(_cells("perdure/sqlite", "W1.steps_per_s", 500, 1000, 700))
    root = ElementTree.fromstring(plot.plot(found))
    (whisker,) = [element.attrib["d"] for element in root.iter(f"{_SVG}path")]
    (bar,) = [element for element in root.iter(f"{_SVG}rect") if element.get("class") == "perdure"]
    begin, length = float(bar.attrib["x"]), float(bar.attrib["width"])
    low, high = float(whisker[1:].split()[0]), float(whisker.partition("H")[2].partition("M")[0])
    assert [low - begin, high - begin] == pytest.approx([length * 5 / 7, length * 10 / 7], abs=0.2)
    assert not list(ElementTree.fromstring(plot.plot(_results(_cells("perdure/sqlite", "W1.steps_per_s", 5)))).iter(f"{_SVG}path"))


def test_a_ratio_that_is_lost_is_shown_like_one_that_is_won() -> None:
    key = "W5.bytes_per_step"
    cells = _cells("perdure/sqlite", key, 900) + _cells("dbos/sqlite", key, 450) + _cells("temporal", key, 1800)
    drawn = plot.plot(_results(cells))
    assert '<tspan dx="3" class="worse">0.5×</tspan>' in drawn
    assert '<tspan dx="3" class="won">2×</tspan>' in drawn


def test_nothing_leaves_its_column() -> None:
    """By letters as wide as those of the widest usual font; a bar, a whisker, a label and a value."""
    found = _full()
    found.cells += [
        Cell("many runs", lane, repeat, 1.0, ("W6.worker_mb", "W6.server_mb"), {"W6.worker_mb": 123.4, "W6.server_mb": 1234.5 + repeat})
        for lane in ("temporal", "temporal, as shipped")
        for repeat in (1, 2, 3)
    ]
    root = ElementTree.fromstring(plot.plot(found))
    bars = [element for element in root.iter(f"{_SVG}rect") if element.get("class") != "page"]
    assert len(bars) > 50
    edges = [(float(bar.attrib["x"]), float(bar.attrib["x"]) + float(bar.attrib["width"])) for bar in bars]
    sizes = {"title": 21, "name": 14}
    for text in root.iter(f"{_SVG}text"):
        width = len("".join(text.itertext())) * 0.62 * sizes.get(text.get("class") or "", 12)
        x = float(text.attrib["x"])
        begin = {"end": x - width, "middle": x - width / 2}.get(text.get("text-anchor", "start"), x)
        if float(text.attrib["y"]) > 90 and text.get("class") != "quiet":
            edges.append((begin, begin + width))
    columns = [(26, 433), (467, 874)]
    assert [edge for edge in edges if not any(left <= edge[0] and edge[1] <= right for left, right in columns)] == []


def test_a_bar_twice_as_long_is_twice_as_much_and_the_smallest_can_still_be_seen() -> None:
    scale = Scale.of([0.4, 4500.0, 9000.0])
    assert [scale.length(value, 100) for value in (0.4, 4500.0, 9000.0)] == [2.0, 50.0, 100.0]
    assert Scale.of([0.0]).length(0.0, 100) == 2.0


@pytest.mark.parametrize(
    ("high", "ticks"),
    [
        (2666, [1000, 2000]),
        (6080, [2000, 4000, 6000]),
        (80.1, [20, 40, 60, 80]),
        (0.83, [0.2, 0.4, 0.6, 0.8]),
        (13.7, [5, 10]),
        (1.0, [0.2, 0.4, 0.6, 0.8, 1.0]),
        (45_000, [20_000, 40_000]),
    ],
)
def test_an_axis_has_round_values_and_few_enough_to_be_read(high: float, ticks: list[float]) -> None:
    assert Scale.of([high]).ticks() == pytest.approx(ticks)


def test_every_axis_begins_at_zero_and_no_letter_is_smaller_than_twelve() -> None:
    drawn = plot.plot(_full())
    root = ElementTree.fromstring(drawn)
    assert "logarithmic" not in drawn
    panels = [element for element in root.iter(f"{_SVG}text") if element.get("class") == "name"]
    zeros = [element for element in root.iter(f"{_SVG}text") if element.get("class") == "tick" and element.text == "0"]
    assert len(zeros) == len(panels) == 12
    assert min(float(size) for size in re.findall(r"font-size: ([\d.]+)px", drawn)) == 12


def test_the_headline_has_four_panels_with_the_bars_of_the_whole_plot() -> None:
    drawn, whole = (ElementTree.fromstring(made(_full())) for made in (plot.headline, plot.plot))
    assert [element.text for element in drawn.iter(f"{_SVG}text") if element.get("class") == "name"] == [
        "One run, 1,000 steps one after the other",
        "200 runs of 20 steps at the same time",
        "A killed run of 10,000 steps goes on",
        "A queued run begins on an idle system",
    ]
    assert _told_by_panel(drawn).items() <= _told_by_panel(whole).items()


def _told_by_panel(picture: ElementTree.Element) -> dict[str, list[str]]:
    """The texts of every panel, its title excepted; those above the first panel and below the last one are left out."""
    told: dict[str, list[str]] = {}
    title = ""
    for element in picture.iter(f"{_SVG}text"):
        text = "".join(element.itertext())
        if element.get("class") == "name":
            title = text
            told[title] = []
        elif title and (element.get("class") != "quiet" or "is better" in text or text == "as shipped"):
            told[title].append(text)
    return told


def test_the_page_and_both_plots_that_are_kept_are_those_of_the_figures_that_are_kept() -> None:
    kept = ROOT / "bench" / "results"
    found = document.read(kept / "race.json")
    again = "they are made again by: python -m bench.race --render bench/results/race.json"
    assert (kept / "race.md").read_text() == page.page(found), again
    assert (kept / "race.svg").read_text() == plot.plot(found), again
    assert (kept / "headline.svg").read_text() == plot.headline(found), again


def test_results_are_rendered_as_a_page_and_two_plots(tmp_path: Path) -> None:
    for name, headline in (("race", "headline"), ("race-2026-11-16T000000Z", "headline-2026-11-16T000000Z"), ("mine", "mine-headline")):
        path = tmp_path / f"{name}.json"
        document.write(_full(), path)
        assert main(["--render", str(path)]) == 0
        assert path.with_suffix(".md").read_text() == page.page(_full())
        assert path.with_suffix(".svg").read_text() == plot.plot(_full())
        assert (tmp_path / f"{headline}.svg").read_text() == plot.headline(_full())


def _interrupted() -> Results:
    """One run is measured, many runs in part, and the rest was not reached."""
    chosen = [one for one in MEASUREMENTS if one.workloads & {"W1", "W2", "W3", "T1"}]
    found = _results(_cells("perdure/sqlite", "W1.steps_per_s", 1000))
    done = ["one run", "one run", "many runs"]
    found.interrupted = Interruption.of(chosen, [one.name for one in chosen for _ in range(2)], done)
    found.seconds, found.is_whole = 130.0, False
    return found


def test_an_interrupted_race_says_so_and_names_what_is_missing(tmp_path: Path) -> None:
    found = _interrupted()
    told = "after 3 of 10 cells; not finished: W2, W6; not reached: W3, T1"
    text = page.page(found)
    assert f"**Interrupted {told} (2 min).**" in text
    assert "of everything" not in text
    (caption,) = [text for text in (" ".join(_texts(found)),) if f"interrupted {told}" in text]
    assert "medians of 3 repeats" not in caption
    document.write(found, tmp_path / "race.json")
    kept = msgspec.json.decode((tmp_path / "race.json").read_bytes())["interrupted"]
    assert kept == {"cells": 3, "planned": 10, "unfinished": ["W2", "W6"], "not_reached": ["W3", "T1"]}
    assert document.read(tmp_path / "race.json") == found


def test_a_race_that_came_to_its_end_is_not_called_interrupted() -> None:
    assert "Interrupted" not in page.page(_full())
    assert "interrupted" not in plot.plot(_full())


def test_a_load_before_the_race_is_a_warning_at_the_head_of_the_page_and_a_usual_one_is_none() -> None:
    found = _full()
    found.load_before = 1.5
    assert "busy" not in page.page(found)
    found.load_before = 1.51
    assert "**The machine was busy in the minute before this began (load 1.51)" in page.page(found)


def test_a_ratio_has_two_digits_and_the_spread_of_the_ratios_behind_it() -> None:
    key = "W1.steps_per_s"
    found = _results(_cells("perdure/sqlite", key, 1000, 300, 1200) + _cells("dbos/sqlite", key, 100, 33, 300))
    assert "| 100 (33–300) **9.1×** (4–10) |" in page.page(found)
    even = _results(_cells("perdure/sqlite", key, 1000, 1001) + _cells("dbos/sqlite", key, 100, 100))
    assert "**10×** |" in page.page(even)
    shown = [times(value) for value in (3.49, 9.96, 28.4, 99.6, 131.2, 1249, 0.693, 0.0317, 0.0)]
    assert shown == ["3.5×", "10×", "28×", "100×", "130×", "1,200×", "0.69×", "0.032×", "0×"]


def test_a_target_that_is_missed_narrowly_is_not_rounded_to_what_it_misses() -> None:
    key = "W5.bytes_per_step"
    text = page.page(_results(_cells("perdure/sqlite", key, 906) + _cells("dbos/sqlite", key, 600)))
    assert "| a step: at most 1.5× that of dbos/sqlite | 1.51× | **miss** |" in text
    assert "They were set before anything was measured" in text


def test_of_what_is_neither_better_with_more_nor_with_less_there_is_no_ratio() -> None:
    found = _results(_cells("perdure/sqlite", "W8.parked", 10_000) + _cells("dbos/sqlite", "W8.parked", 5600))
    assert found.times("W8.parked", "dbos/sqlite") is None
    assert "| parked, runs | 10,000 | 5,600 |" in page.page(found)


def test_the_page_says_what_the_ideal_of_slow_tools_is() -> None:
    text = page.page(_full())
    assert "1 s in T1, 0.5 s in T2" in text
    assert "start of 50 runs at once" in text
    assert "below 1,000 steps/s in W2" in text


def test_the_page_shows_what_was_lost_like_what_was_won() -> None:
    text = page.page(_full())
    assert "left out: restate: no npm" in text
    assert "did not finish<sup>" in text
    assert "temporal, one run, repeat 1, 2, 3: cut off after 150 s, <really> & truly" in text
    assert "langgraph, a queue: it has no queue" in text
    assert "a \\| b" in text  # a contestant's words do not end its cell
    assert "Temporal 1.2, server 3.4" in text
    assert "DBOS 9 on CPython 3.99" in text
    assert text.count("**miss**") + text.count("| ok |") + text.count("**not measured**") == len(TARGETS)


def test_what_a_contestant_says_of_a_workload_is_a_note_at_its_cells_and_only_there_also_where_it_failed() -> None:
    lines = page.page(_full()).splitlines()
    notes = {text: number for number, _, text in (line.partition(". ") for line in lines if re.match(r"\d+\. ", line))}
    limit, pages = notes["temporal, W4: its history has a limit"], notes["temporal, W5: free pages count"]
    (resumes,) = [line.split(" | ") for line in lines if line.startswith("| the longer run resumes") and "did not finish" in line]
    failed, as_shipped = resumes[-2:]
    assert failed.startswith("did not finish<sup>")
    assert limit in _marks(failed)
    assert as_shipped == "– |"
    (stored,) = [line.split(" | ") for line in lines if line.startswith("| a step, bytes") and "did not finish" in line]
    assert _marks(stored[-1]) == [pages]
    assert sum(_marks(line).count(limit) for line in lines) == 2  # the shorter and the longer run


def _marks(text: str) -> list[str]:
    """The numbers of the notes in a line."""
    return [number for marks in re.findall(r"<sup>(.*?)</sup>", text) for number in marks.split(", ")]


def test_the_page_of_a_part_has_no_empty_sections() -> None:
    text = page.page(_results(_cells("perdure/sqlite", "W1.steps_per_s", 1000)))
    assert "## The race" in text
    assert "## Tools that take" not in text
    single = _results([])
    single.repeats, single.is_whole = 1, False
    assert "1 repeat of everything" in page.page(single)
    assert "## The race" not in page.page(single)
    assert f"All {len(TARGETS)} are about what was not part of this run" in page.page(single)


def test_a_part_of_the_race_tells_only_of_targets_that_it_has_tried() -> None:
    key = "W1.steps_per_s"
    found = _results(_cells("perdure/sqlite", key, 1000) + _cells("dbos/sqlite", key, 100))
    found.is_whole = False
    text = page.page(found)
    assert "steps: at least 10× that of dbos/sqlite" in text
    assert f"{len(TARGETS) - 1} more are about what was not part of this run" in text


def test_results_are_read_back_as_they_were_written(tmp_path: Path) -> None:
    found = _full()
    document.write(found, tmp_path / "race.json")
    assert document.read(tmp_path / "race.json") == found


def test_the_time_that_is_left_goes_by_what_was_taken_then_by_an_earlier_race_then_by_neighbours() -> None:
    forecast = Forecast([("a", "x"), ("a", "x"), ("a", "y"), ("b", "y")], {("b", "y"): 100.0})
    forecast.took(("a", "x"), 10.0)
    assert forecast.count == 3
    assert forecast.left_s() == 10.0 + 10.0 + 100.0


def test_at_80_columns_neither_the_time_that_has_passed_nor_what_is_left_is_cut() -> None:
    stream = io.StringIO()
    long = ("workers sharing: 4", "langgraph/postgres, as shipped")
    with bar_on(Console(file=stream, width=80, force_terminal=True, color_system=None)) as shown:
        bar = Bar(Forecast([long] * 153, {}), shown)
        bar.begin(*long, 3)
    lines = [line.strip() for line in re.sub(r"\x1b\[[^A-Za-z]*[A-Za-z]|\r", "\n", stream.getvalue()).splitlines()]
    assert "workers sharing: 4: langgraph/postgres, as shipped, repeat 3" in lines
    assert any(re.search(r"0/153 0:00:0\d about 00:20:24 left$", line) for line in lines)
    assert max(map(len, lines)) <= 80


def test_numbers_have_three_digits_that_count() -> None:
    assert [number(value) for value in (12345.6, 99.96, 1.2345, 0.01234)] == ["12,346", "100", "1.23", "0.0123"]
    assert set(BY_KEY) == {figure.key for figure in FIGURES}


def test_a_contestant_runs_as_it_is_shipped_too_where_its_documentation_does_not_tell_of_what_makes_it_fast() -> None:
    lanes = lanes_of(Contestant.called("dbos"), {"stores": ["sqlite", "postgres"], "as_shipped": ["sqlite"]})
    assert [lane.name for lane in lanes] == ["dbos/sqlite", "dbos/sqlite, as shipped", "dbos/postgres"]
    assert {beside(lane.name) for lane in lanes[:2]} == {"perdure/sqlite"}
    assert {contestant_of(name) for name in ("dbos", "dbos, as shipped", "dbos/sqlite, as shipped")} == {"dbos"}
    assert beside("dbos/postgres, as shipped") == "perdure/postgres"
    taken = [one.name for one in MEASUREMENTS if one.takes(lanes[1])]
    assert taken == ["one run", "many runs", "a queue"]
