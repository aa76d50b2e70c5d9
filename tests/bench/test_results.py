"""What follows from the cells: medians, ratios, verdicts, the page and the plot."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from bench.race import document, page, plot
from bench.race.figures import BY_KEY, FIGURES
from bench.race.lanes import Contestant, beside, lanes_of
from bench.race.measurements import MEASUREMENTS
from bench.race.plot import Scale
from bench.race.progress import Forecast
from bench.race.results import Cell, Results
from bench.race.sizes import WHOLE
from bench.race.targets import TARGETS, Bound, Target
from bench.race.words import number

_LANES = ["perdure/sqlite", "perdure/postgres", "dbos/sqlite", "dbos/postgres", "langgraph/sqlite", "temporal"]


def _results(cells: list[Cell]) -> Results:
    about = {"name": "DBOS", "version": "9", "durable": "a | b", "how": "plainly"}
    return Results(
        date="2026-11-16T00:00:00+00:00",
        quick=False,
        repeats=3,
        sizes=WHOLE,
        machine={"processor": "2 cores & more"},
        contestants={"dbos": about},
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
    """Every figure in every lane; temporal did not finish, langgraph has no queue."""
    cells = []
    for one in MEASUREMENTS:
        for place, lane in enumerate(_LANES, 1):
            told: dict[str, Any] = {"figures": dict.fromkeys(one.gives, 7.0 * place)}
            if lane == "temporal":
                told = {"failed": "cut off after 150 s, <really> & truly"}
            elif lane.startswith("langgraph") and one.name == "a queue":
                told = {"absent": "it has no queue"}
            cells += [Cell(one.name, lane, repeat, 1.0, one.gives, **told) for repeat in (1, 2, 3)]
    return _results(cells)


def test_the_plot_is_well_formed_and_has_every_lane_and_says_who_did_not_finish() -> None:
    root = ElementTree.fromstring(plot.plot(_full()))
    texts = [element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert set(_LANES) <= set(texts)
    assert "did not finish" in texts
    assert "has none" in texts
    assert any("2026-11-16" in text and "2 cores & more" in text for text in texts)
    assert "prefers-color-scheme: dark" in plot.plot(_full())


def test_no_bar_leaves_the_picture() -> None:
    root = ElementTree.fromstring(plot.plot(_full()))
    bars = [element for element in root.iter("{http://www.w3.org/2000/svg}rect") if element.get("class") != "page"]
    assert len(bars) > 50
    assert all(0 < float(bar.attrib["width"]) < 300 and float(bar.attrib["x"]) + float(bar.attrib["width"]) < 800 for bar in bars)


def test_a_longer_bar_is_a_larger_value_on_either_scale() -> None:
    for values in ([10.0, 40.0, 90.0], [0.4, 7.0, 9000.0]):
        scale = Scale.of(values)
        lengths = [scale.length(value, 100) for value in values]
        assert lengths == sorted(lengths)
        assert len(set(lengths)) == 3
        assert lengths[-1] == pytest.approx(100)
    assert not Scale.of([10, 40]).is_log
    assert Scale.of([1, 400]).is_log


def test_the_page_shows_what_was_lost_like_what_was_won() -> None:
    text = page.page(_full())
    assert "left out: restate: no npm" in text
    assert "did not finish<sup>" in text
    assert "temporal, one run, repeat 1: cut off after 150 s, <really> & truly" in text
    assert "langgraph, a queue: it has no queue" in text
    assert "a \\| b" in text  # a contestant's words do not end its cell
    assert text.count("**miss**") + text.count("| ok |") + text.count("**not measured**") == len(TARGETS)


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


def test_numbers_have_three_digits_that_count() -> None:
    assert [number(value) for value in (12345.6, 99.96, 1.2345, 0.01234)] == ["12,346", "100", "1.23", "0.0123"]
    assert set(BY_KEY) == {figure.key for figure in FIGURES}


def test_a_contestant_runs_as_it_is_shipped_too_where_its_documentation_does_not_tell_of_what_makes_it_fast() -> None:
    lanes = lanes_of(Contestant.called("dbos"), {"stores": ["sqlite", "postgres"], "as_shipped": ["sqlite"]})
    assert [lane.name for lane in lanes] == ["dbos/sqlite", "dbos/sqlite, as shipped", "dbos/postgres"]
    assert {beside(lane.name) for lane in lanes[:2]} == {"perdure/sqlite"}
    taken = [one.name for one in MEASUREMENTS if one.takes(lanes[1])]
    assert taken == ["one run", "many runs", "a queue"]
