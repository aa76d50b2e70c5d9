"""The crash lab: an agent is killed at every one of its boundaries, by SIGKILL in a process of its own, and resumed.

matrix.py      crash_matrix, the way in             experiment.py  its course: undisturbed, trials, judgement
trials.py      what one trial is                    launch.py      processes: forked, or fresh interpreters
victim.py      what such a process does             spec.py        what it is told, and tells
counting.py    tools with a line in ledger.py       ledger.py      what they really did, out of perdure's reach
carrier.py     requests that arrive late            warp.py        waits that cost no time
attending.py   approvals, signals, timers, doubts   lifeline.py    no process outlives the lab
told.py        what the journal says in the end     world.py       the files that a trial leaves behind
facts.py       both, side by side                   rules.py, effects.py, judge.py   what to think of them
records.py     what is found                        summary.py, table.py, page.py, report.py   for people
"""

from __future__ import annotations

from perdure.testing.lab.matrix import crash_matrix
from perdure.testing.lab.records import Baseline, Figures, Findings, Problem, Repeat, Subject, ToolSeen, Trial
from perdure.testing.lab.report import Report

__all__ = ["Baseline", "Figures", "Findings", "Problem", "Repeat", "Report", "Subject", "ToolSeen", "Trial", "crash_matrix"]
