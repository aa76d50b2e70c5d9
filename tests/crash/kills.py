"""How many processes that ran perdure have died of a real SIGKILL in this test run: counted where their end is seen, told at the end.

What is promised is told by a command: the whole of `make test` with fewer than MINIMUM of them fails, so that nobody can lose them unnoticed.
"""

from __future__ import annotations

from typing import Any

import pytest

MINIMUM = 300
SHIPPED = "real kills"  # under which a process of pytest-xdist hands its number to the one that started it
_seen = 0


def seen() -> None:
    """A victim has died of SIGKILL."""
    global _seen
    _seen += 1


class KillCount:
    """A plugin of pytest: the sum over all of its processes."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._elsewhere = 0

    @property
    def total(self) -> int:
        return _seen + self._elsewhere

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        # A process that was ended by the watchdog hands over nothing: its kills are not counted, and its test has failed.
        self._elsewhere += getattr(node, "workeroutput", {}).get(SHIPPED, 0)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        shipped = getattr(self._config, "workeroutput", None)
        if shipped is not None:
            shipped[SHIPPED] = _seen
        elif session.exitstatus == pytest.ExitCode.OK and is_too_few(self.total, self._config):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.total:
            terminalreporter.write_line(f"real kills: {self.total}")
        if is_too_few(self.total, self._config):
            terminalreporter.write_line(f"FAILED: the whole suite is to kill at least {MINIMUM} processes", red=True)


def is_too_few(total: int, config: pytest.Config) -> bool:
    return total < MINIMUM and is_whole(config)


def is_whole(config: pytest.Config) -> bool:
    """Whether nobody has chosen among the tests: those that pyproject.toml names were run, but for the soak, to their end."""
    chosen = ("keyword", "deselect", "ignore", "ignore_glob", "lf", "last_failed", "stepwise", "collectonly", "maxfail")
    return (
        config.args_source is pytest.Config.ArgsSource.TESTPATHS
        and config.getoption("markexpr") == "not soak"
        and not any(config.getoption(option, None) for option in chosen)
    )
