"""The quick set and the full set: `make test` runs exactly one real process for each kind of boundary and fault."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests import sets

ROOT = Path(__file__).parents[2]


def collected(markexpr: str, *what: str) -> set[str]:
    """The ids below tests/ that pytest finds there and would run; an id that it does not find is an error."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "-m", markexpr, *what]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert "ERROR" not in done.stdout + done.stderr, done.stdout + done.stderr
    return {line.removeprefix("tests/") for line in done.stdout.splitlines() if "::" in line}


def test_what_is_named_for_each_boundary_and_fault_exists_and_is_quick() -> None:
    assert collected(sets.QUICK, *(f"tests/{test}" for test in sets.ONE_OF_EACH_KIND)) == sets.ONE_OF_EACH_KIND


def test_every_test_is_in_one_of_the_two_sets() -> None:
    file = "crash/test_boundaries.py"
    quick, full = collected(sets.QUICK, f"tests/{file}"), collected(sets.FULL, f"tests/{file}")
    assert quick == {test for test in sets.ONE_OF_EACH_KIND if test.startswith(file)}
    assert quick | full == collected(sets.BOTH, f"tests/{file}")
    assert not quick & full
    assert len(full) > 300
