"""How much this test run has tested: counted in each process, added up, and printed in one line at the end.

The documentation promises minimum numbers. A whole run with less than one of these minimums fails, so that tests
cannot get lost unnoticed.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from tests import sets

KILLS = "real kills"  # processes that ran perdure, and have died of SIGKILL
POINTS = "crash points in simulation"
STATES = "states after a power loss"
CORE_POINTS = "crash points of the run core"
CORE_RECOVERIES = "recoveries from them that differ"
# By the `-m` option of a whole test run. The quick set has one real process for each kind of boundary and fault.
_FULL_FLOORS = {KILLS: 300, POINTS: 50_000, STATES: 20_000}
FLOORS = {
    sets.QUICK: {KILLS: 40, STATES: 1_500, CORE_POINTS: 1_000_000},
    sets.FULL: _FULL_FLOORS,
    sets.BOTH: {**_FULL_FLOORS, CORE_POINTS: 1_000_000},
}
_SHIPPED = "figures"  # the key under which a process of pytest-xdist passes its numbers to its parent
_seen: Counter[str] = Counter()


def seen(what: str, count: int = 1) -> None:
    """So many of these were tried."""
    _seen[what] += count


class Figures:
    """A plugin of pytest: the sums over all of its processes."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._elsewhere: Counter[str] = Counter()

    @property
    def total(self) -> Counter[str]:
        return _seen + self._elsewhere

    @property
    def too_few(self) -> list[str]:
        total, floors = self.total, FLOORS[self._config.getoption("markexpr")] if is_whole(self._config) else {}
        return [f"{least:,} {what}" for what, least in floors.items() if total[what] < least]

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        # A process that the watchdog has ended passes no numbers: its part is not counted, and its test has failed.
        self._elsewhere.update(getattr(node, "workeroutput", {}).get(_SHIPPED, {}))

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        shipped = getattr(self._config, "workeroutput", None)
        if shipped is not None:
            shipped[_SHIPPED] = dict(_seen)
        elif session.exitstatus == pytest.ExitCode.OK and self.too_few:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.total:
            terminalreporter.write_line("tried: " + ", ".join(f"{count:,} {what}" for what, count in sorted(self.total.items())))
        if self.too_few:
            terminalreporter.write_line(f"FAILED: a whole run is to come to at least {', '.join(self.too_few)}", red=True)


def is_whole(config: pytest.Config) -> bool:
    """Whether all tests of a set were run to their end: those that pyproject.toml names, chosen by the set's `-m` alone."""
    chosen = ("keyword", "deselect", "ignore", "ignore_glob", "lf", "last_failed", "stepwise", "collectonly", "maxfail")
    return (
        config.args_source is pytest.Config.ArgsSource.TESTPATHS
        and config.getoption("markexpr") in FLOORS
        and not any(config.getoption(option, None) for option in chosen)
    )
