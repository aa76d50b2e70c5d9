"""Tools with which users test their agents. Inside perdure only the command line imports this package.

    ManualClock                 a clock that only a test moves                         clock.py
    stepping, SteppedRun        a run that is held at a boundary, and killed there     stepped.py
    recorded, Recording         a production run, from a file, as a regression test    recorder.py
    export                      writes a run from a database to such a file            recorder.py
    Rerun, Changed              a recorded run, run again with today's code            rerun.py
    crash_matrix, Report        an agent that is killed at each of its boundaries      lab/

plugin.py is the pytest plugin: it has the clock, stepped runs and the crash matrix as fixtures.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perdure.testing.clock import ManualClock
    from perdure.testing.lab import Report, crash_matrix
    from perdure.testing.recorder import Recording, export, recorded
    from perdure.testing.rerun import Changed, Rerun
    from perdure.testing.stepped import NotReached, SteppedRun, stepping

_HOMES = {
    "Changed": "rerun",
    "ManualClock": "clock",
    "NotReached": "stepped",
    "Recording": "recorder",
    "Report": "lab",
    "Rerun": "rerun",
    "SteppedRun": "stepped",
    "crash_matrix": "lab",
    "export": "recorder",
    "recorded": "recorder",
    "stepping": "stepped",
}

__all__ = [
    "Changed",
    "ManualClock",
    "NotReached",
    "Recording",
    "Report",
    "Rerun",
    "SteppedRun",
    "crash_matrix",
    "export",
    "recorded",
    "stepping",
]


def __getattr__(name: str) -> Any:
    # Import a module on first use: a test that needs only a clock must not import the crash lab.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"perdure.testing.{_HOMES[name]}"), name)
    return value
