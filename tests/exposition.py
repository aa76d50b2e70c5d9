"""A strict reader of the text format of Prometheus 0.0.4 and of OpenMetrics 1.0, for the tests of metrics.

It refuses what a lenient parser lets pass: samples before their TYPE, families that are not in one piece, a sample
twice, wrong names, unknown escapes, a histogram that is not cumulative, a counter that does not end in _total.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
_LABEL = r"[a-zA-Z_][a-zA-Z0-9_]*"
_SAMPLE = re.compile(rf"({_NAME})(?:\{{(.*)\}})? (\S+)")
_PAIR = re.compile(rf'({_LABEL})="((?:[^"\\\n]|\\["\\n])*)"(?:,|$)')
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?|\+Inf|-Inf|NaN")
_ENDINGS = {"histogram": ("_bucket", "_sum", "_count"), "counter": ("",), "gauge": ("",)}
Labels = frozenset[tuple[str, str]]


class Read(NamedTuple):
    """One exposition."""

    kinds: dict[str, str]
    helps: dict[str, str]
    samples: dict[tuple[str, Labels], float]

    def value(self, name: str, /, **labels: str) -> float:
        """The sum of the samples that have these labels; 0 if there is none."""
        wanted = set(labels.items())
        return sum(value for (one, found), value in self.samples.items() if one == name and wanted <= found)

    def has(self, name: str) -> bool:
        return any(one == name for one, _ in self.samples)

    def labels_of(self, name: str) -> set[str]:
        return {label for one, found in self.samples if one == name for label, _ in found}


def read(text: str, *, openmetrics: bool = False) -> Read:
    """The exposition. AssertionError at the first thing that is not as the format says."""
    assert text.endswith("\n"), "the last line has no end"
    lines = text[:-1].split("\n")
    if openmetrics:
        assert lines.pop() == "# EOF", "OpenMetrics ends with # EOF"
    found = Read({}, {}, {})
    family, over = "", set[str]()
    for line in lines:
        if line.startswith("# HELP "):
            name, _, words = line.removeprefix("# HELP ").partition(" ")
            assert re.fullmatch(_NAME, name), line
            assert name not in found.helps, line
            assert words, line
            assert not re.search(r'\\[^\\n"]', words), line
            found.helps[name] = words
        elif line.startswith("# TYPE "):
            name, _, kind = line.removeprefix("# TYPE ").partition(" ")
            assert kind in _ENDINGS, line
            assert name in found.helps, line
            assert name not in found.kinds, line
            assert name not in over, f"{name} is not in one piece"
            over.add(family)
            family, found.kinds[name] = name, kind
        else:
            _sample(line, family, found, openmetrics)
    _check_histograms(found)
    return found


def _sample(line: str, family: str, found: Read, openmetrics: bool) -> None:
    matched = _SAMPLE.fullmatch(line)
    assert matched is not None, f"no sample: {line!r}"
    name, inside, number = matched.groups()
    kind = found.kinds[family]
    endings = ("_total",) if openmetrics and kind == "counter" else _ENDINGS[kind]
    assert name in [family + ending for ending in endings], f"{line!r} is below the TYPE of {family}"
    assert kind != "counter" or name.endswith("_total"), f"a counter ends in _total: {line!r}"
    assert _NUMBER.fullmatch(number), line
    pairs: list[tuple[str, str]] = []
    at = 0
    while inside and at < len(inside):
        pair = _PAIR.match(inside, at)
        assert pair is not None, f"no labels: {line!r}"
        pairs.append((pair[1], re.sub(r"\\(.)", lambda one: "\n" if one[1] == "n" else one[1], pair[2])))
        at = pair.end()
    assert len(dict(pairs)) == len(pairs), f"a label twice: {line!r}"
    key = (name, frozenset(pairs))
    assert key not in found.samples, f"twice: {line!r}"
    value = float(number)
    assert kind != "counter" or value >= 0, line
    found.samples[key] = value


def _check_histograms(found: Read) -> None:
    for family in (name for name, kind in found.kinds.items() if kind == "histogram"):
        buckets = [(dict(labels)["le"], value) for (name, labels), value in found.samples.items() if name == f"{family}_bucket"]
        bounds = [float(bound) for bound, _ in buckets]
        counts = [value for _, value in buckets]
        assert bounds == sorted(bounds), family
        assert bounds[-1] == float("inf"), family
        assert counts == sorted(counts), family
        assert counts[-1] == found.value(f"{family}_count"), family
