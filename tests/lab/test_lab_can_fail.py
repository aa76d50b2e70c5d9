"""The lab notices when perdure lacks one of its guards: a lab that cannot fail proves nothing."""

from __future__ import annotations

from typing import Any

import pytest
from tests.crash.mutations import MUTATIONS
from tests.lab.matrices import rules, says

from perdure.testing.lab import victim


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Remove that guard in every victim, and in no other process."""
    real = victim.live

    def weaken(mutation: str) -> None:
        def weakened(*args: Any) -> None:
            MUTATIONS[mutation]()
            real(*args)

        monkeypatch.setattr(victim, "live", weakened)

    return weaken


@pytest.mark.parametrize(
    ("mutation", "tool", "words"),
    [
        ("effects_start_before_their_intent_is_durable", "heeds_key", "before the intent was durable"),
        ("once_is_repeated", "nobody_knows", "declared once, and its function was called again"),
        ("hooks_are_not_asked", "looks_for_it", "declared once, and its function was called again"),
    ],
)
def test_a_missing_guard_is_a_broken_promise(without: Any, mutation: str, tool: str, words: str) -> None:
    without(mutation)
    report = says(tool)
    assert ("promise", tool) in rules(report)
    (broken,) = [problem for problem in report.problems if problem.rule == "promise" and problem.tool == tool]
    assert words in broken.sentence
    assert "report it" in broken.way_out
