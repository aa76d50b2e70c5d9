"""The race for a program: every repeat as it was measured, and beside it what follows from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from bench.race.figures import FIGURES
from bench.race.results import Results
from bench.race.targets import TARGETS


def read(path: Path) -> Results:
    """What was measured; what followed from it is reckoned anew."""
    return msgspec.json.decode(path.read_bytes(), type=Results)


def write(results: Results, path: Path) -> None:
    whole = msgspec.to_builtins(results) | {"summary": _summary(results), "targets": _targets(results)}
    path.write_bytes(msgspec.json.format(msgspec.json.encode(whole), indent=1) + b"\n")


def _summary(results: Results) -> dict[str, dict[str, Any]]:
    return {
        figure.key: {lane: msgspec.to_builtins(found) for lane in results.lanes if (found := results.summary(figure.key, lane)) is not None}
        for figure in FIGURES
    }


def _targets(results: Results) -> list[dict[str, Any]]:
    return [msgspec.to_builtins(target) | {"measured": target.measured(results), "verdict": target.verdict(results)} for target in TARGETS]
