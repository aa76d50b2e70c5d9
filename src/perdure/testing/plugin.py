"""The pytest plugin: fixtures to test agents.

If perdure is installed, every pytest run imports this module. So at its top level it imports nothing of perdure.

    manual_clock   a clock that only the test moves
    stepped        a run that can be held at a boundary: stepped(agent, …) → SteppedRun
    run_until      a run that is held at a boundary: run_until("before_tool_result_persisted", agent, …) → SteppedRun
    crash_matrix   kills the agent at each of its boundaries: crash_matrix(agent, …) → Report, or the test fails
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from perdure.agent import Agent
    from perdure.testing.clock import ManualClock
    from perdure.testing.lab import Report
    from perdure.testing.stepped import SteppedRun


@pytest.fixture
def manual_clock() -> ManualClock:
    """A clock for `Perdure(clock=manual_clock)`: `manual_clock.advance(days=3)` lets three days pass at once."""
    from perdure.testing.clock import ManualClock

    return ManualClock()


@pytest.fixture
def stepped(tmp_path: Path) -> Iterator[Callable[..., SteppedRun]]:
    """stepped(agent, *args, clock=None, settings=…, agents=(), url=None, **kwargs): a run to hold at boundaries.

    The process of the run ends with the test.
    """
    from perdure.testing.stepped import stepping

    numbers = count(1)
    with ExitStack() as running:

        def step(agent: Agent[Any, Any], /, *args: Any, url: str | None = None, **kwargs: Any) -> SteppedRun:
            where = url or f"sqlite:///{tmp_path / f'stepped-{next(numbers)}.db'}"
            return running.enter_context(stepping(agent, *args, url=where, **kwargs))

        yield step


@pytest.fixture
def run_until(stepped: Callable[..., SteppedRun]) -> Callable[..., SteppedRun]:
    """run_until(boundary, agent, *args, tool=None, call=None, nth=1, **kwargs): a stepped run, held at a boundary."""

    def until(
        boundary: str, agent: Agent[Any, Any], /, *args: Any, tool: str | None = None, call: int | None = None, nth: int = 1, **kwargs: Any
    ) -> SteppedRun:
        __tracebackhide__ = True
        run = stepped(agent, *args, **kwargs)
        run.until(boundary, tool=tool, call=call, nth=nth)
        return run

    return until


@pytest.fixture
def crash_matrix() -> CrashMatrix:
    """crash_matrix(agent, *args, ledger=…, **kwargs): kill the agent at every boundary.

    The test fails if something is wrong. To judge the report yourself, call `perdure.testing.crash_matrix`.

    A keyword that names a parameter of the agent is passed to the agent. Every other keyword is an option of
    `perdure.testing.crash_matrix`: ledger, pairs, approve, signals, world, boundaries, limit, timeout_s, … If a
    parameter of the agent has the name of an option, set the option with options(…):
    `crash_matrix.options(ledger=payments)(agent, ledger="2026")`.
    """
    return CrashMatrix({})


class CrashMatrix:
    """The value of the fixture: call it with an agent and the agent's arguments."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options

    def options(self, **options: Any) -> CrashMatrix:
        """A copy with these options of the lab. They are never passed to the agent."""
        _require_options(options)
        return CrashMatrix({**self._options, **options})

    def __call__(self, agent: Agent[Any, Any], /, *args: Any, **kwargs: Any) -> Report:
        __tracebackhide__ = True
        from perdure.testing.lab import crash_matrix as run_matrix

        theirs: frozenset[str] = getattr(agent, "parameter_names", frozenset())
        options = {name: value for name, value in kwargs.items() if name not in theirs}
        _require_options(options)
        given = {name: value for name, value in kwargs.items() if name in theirs}
        report = run_matrix(agent, args, given, **{**self._options, **options})
        if not report.ok:
            pytest.fail(report.table(), pytrace=False)
        return report


def _require_options(given: dict[str, Any]) -> None:
    import inspect

    from perdure.errors import InvalidInput
    from perdure.testing.lab import crash_matrix as run_matrix

    known = [name for name, one in inspect.signature(run_matrix).parameters.items() if one.kind is one.KEYWORD_ONLY]
    for name in given:
        if name not in known:
            raise InvalidInput(f"{name} is neither a parameter of the agent nor an option of crash_matrix, which has {', '.join(known)}")
