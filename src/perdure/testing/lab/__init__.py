"""The crash lab: an agent is killed by SIGKILL at each of its boundaries, each time in a new process, and resumed.

matrix.py       crash_matrix, the entry point
experiment.py   the whole experiment: undisturbed runs, trials, judgement, report
trials.py       the trials: their folders, their processes, and the evidence that they leave
launch.py       starts the processes of a trial: forks or fresh interpreters
victim.py       what a process of a trial does
spec.py         what a process gets, and what it reports
counting.py     wraps tools, so that their calls are written to the ledger
ledger.py       the lab's ledger: what tools really did. perdure itself does not write it
carrier.py      requests that arrive late
warp.py         a clock that skips waits
attending.py    decides approvals, sends signals, skips time, settles doubts
lifeline.py     ends all processes of the lab when the lab has ended
told.py         the journals at the end of a trial
world.py        the files that a trial leaves behind
contents.py     what is in such a file
likeness.py     replaces ids by aliases that are the same in all trials
comparing.py    the files of a trial against the files of the undisturbed runs
facts.py        ledger and journal, side by side
rules.py        the rules
judge.py        the verdicts
records.py      the findings as records
table.py        the findings as text
report.py       the findings as an HTML page
"""

from __future__ import annotations

from perdure.testing.lab.matrix import crash_matrix
from perdure.testing.lab.records import Baseline, Figures, Findings, Problem, Repeat, Subject, ToolSeen, Trial
from perdure.testing.lab.report import Report

__all__ = ["Baseline", "Figures", "Findings", "Problem", "Repeat", "Report", "Subject", "ToolSeen", "Trial", "crash_matrix"]
