"""Functions with which the tests of the lab call the lab."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.lab import wards

from perdure import Agent
from perdure.testing.lab import Report, crash_matrix


def about(*words: str) -> Callable[[str], bool]:
    """Boundaries that have all of these words: thrift.

    Not the middle of an effect, unless it is named: on a busy machine any function is slow enough to be killed in its middle.
    """
    return lambda boundary: all(word in boundary for word in words) and ("during" in "".join(words) or "during_" not in boundary)


def matrix(agent: Agent[Any, Any], *args: Any, **options: Any) -> Report:
    return crash_matrix(agent, args, **{"jobs": 1, **options})


def says(tool: str, **options: Any) -> Report:
    """The agent that calls this one tool, killed at every boundary of that call."""
    return matrix(wards.says, tool, boundaries=about(f"{tool} (call 2)"), **options)


def rules(report: Report) -> set[tuple[str, str]]:
    """The findings: which rule, and which tool."""
    return {(problem.rule, problem.tool) for problem in report.problems}


def advice(report: Report) -> set[tuple[str, str]]:
    return {(note.rule, note.tool) for note in report.notes}
