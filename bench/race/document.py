"""The race as JSON: every repeat as it was measured, and the medians and ratios that are computed from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from bench.race.figures import FIGURES
from bench.race.results import Results
from bench.race.targets import TARGETS


class Unreadable(Exception):
    """The file is not there, is damaged, or was written by another version of the race."""


def read(path: Path) -> Results:
    """The measured values; everything else is computed again."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Results)
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        raise Unreadable(f"{path} cannot be read: {error}; it takes a race-….json of this version: run the race again") from None


def write(results: Results, path: Path) -> None:
    whole = msgspec.to_builtins(results) | {"summary": _summary(results), "targets": _targets(results)}
    replace(path, msgspec.json.format(msgspec.json.encode(whole), indent=1) + b"\n")


def replace(path: Path, content: bytes) -> None:
    """Replace the file atomically: after an interrupt the old file is still there."""
    new = path.with_name(f".{path.name}.new")
    try:
        new.write_bytes(content)
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


def _summary(results: Results) -> dict[str, dict[str, Any]]:
    return {
        figure.key: {lane: msgspec.to_builtins(found) for lane in results.lanes if (found := results.summary(figure.key, lane)) is not None}
        for figure in FIGURES
    }


def _targets(results: Results) -> list[dict[str, Any]]:
    return [msgspec.to_builtins(target) | {"measured": target.measured(results), "verdict": target.verdict(results)} for target in TARGETS]
