"""Shipped to users: how to test agents, and what holds an implementation to perdure's promises. Of perdure itself only the command line imports it.

    ManualClock                 a clock that stands still until it is told            clock.py
    stepping, SteppedRun        a run that is held at a boundary, and killed there     stepped.py
    recorded, Recording         a production run as a regression test                  recorder.py
    export                      a run of a database into such a file                   recorder.py
    crash_matrix, Report        an agent killed at every one of its boundaries         lab/

The pytest plugin has them as fixtures: plugin.py.
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
    # Not before they are asked for: whoever wants a clock shall not pay for the crash lab.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"perdure.testing.{_HOMES[name]}"), name)
    return value
