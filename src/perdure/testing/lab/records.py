"""What the crash lab reports: one record per trial, the findings over all trials, and the figures."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct, to_builtins

Outcome = Literal["ok", "doubt", "wrong", "not_reached", "not_compared", "not_seen"]
Severity = Literal["wrong", "open", "note"]


class Problem(Struct, frozen=True):
    """A problem that the trials found.

    Severity "wrong": a tool, an agent or perdure does not do what was declared. Severity "open": something could not
    be found out, but nothing is known to be wrong. Severity "note": advice.
    """

    rule: str  # "effect_twice", "result_differs", "reconcile_wrong", "no_reconcile", "output_differs", "promise", …
    severity: Severity
    tool: str  # "" if the problem is not about one tool
    sentence: str
    way_out: str
    boundary: str  # where the process was killed in the first trial that shows the problem
    trials: int = 1  # how many trials show the problem


class Repeat(Struct, frozen=True):
    """A function that was called more often than in the undisturbed run."""

    tool: str
    effect: str
    run: str  # the run's id relative to the run that was started; "" is that run itself
    call: int
    begun: int  # how often the function was called in the trial
    expected: int  # how often the function was called in the undisturbed run
    why: str  # why the repetition is allowed, or which rule it breaks
    allowed: bool


class Trial(Struct, frozen=True):
    """One run that was killed once or twice, and resumed until it ended or parked."""

    number: int
    boundaries: tuple[str, ...]  # where the run was to be killed
    also: tuple[str, ...]  # the other names of the first of these points
    status: str  # the status of the run at the end of the trial
    outcome: Outcome
    output_equal: bool | None  # None: outputs could not be compared
    repeated: tuple[Repeat, ...]
    effects: dict[str, int]  # tool → how often its function was called, in all processes of the trial
    world: Any  # what the user's ledger function returned; None if there is no such function
    resume_s: float  # seconds from the start of the last process until the run continued
    settled: tuple[str, ...] = ()  # the doubts that the lab has settled with its own ledger
    problems: tuple[Problem, ...] = ()
    compared: bool = True  # True if the effects could be compared with those of the undisturbed run
    kills: int = 0  # how many of the planned kills happened
    asked: tuple[str, ...] = ()  # the calls that needed a person
    fresh: bool = False  # True if a fresh interpreter, and not a forked process, resumed the run


class ToolSeen(Struct, frozen=True):
    """A tool: what it declares, and what the trials showed."""

    name: str
    effect: str  # "model" for a model
    reconcile: bool
    calls: int  # the number of its calls in the undisturbed run
    repeated: int  # the number of trials in which the tool was called more often than in the undisturbed run
    doubts: int  # the number of trials in which a person had to say whether a call had happened
    verdict: str  # "as declared", "not as declared", "not seen", "not compared", "not tried"
    compared: int = 0  # how many of the `repeated` trials could be compared


class Baseline(Struct, frozen=True):
    """The undisturbed run."""

    status: str
    output: Any
    waiting_for: str | None
    calls: int
    boundaries: tuple[str, ...]
    seconds: float
    same_output: bool  # True if a second undisturbed run had the same output, so that outputs can be compared
    models: dict[str, int]  # model → number of its calls
    world: Any = None
    also: tuple[tuple[str, ...], ...] = ()  # for each boundary: the other names of the same point
    remarks: tuple[str, ...] = ()  # remarks about how the trials were made and compared


class Figures(Struct, frozen=True):
    boundaries: int  # how many boundaries the undisturbed run reaches
    tried: int  # at how many boundaries a process was killed
    trials: int
    planned: int  # the number of possible trials, with those of two kills; `trials` is the number of trials made
    kills: int
    ok: int
    doubt: int
    wrong: int
    not_reached: int
    not_compared: int
    not_seen: int
    unkilled: int  # how many of the wrong trials did not reach all boundaries at which they were to be killed
    seconds: float
    resume_median_ms: float
    resume_most_ms: float


class Subject(Struct, frozen=True):
    """What was tested, and with which versions."""

    target: str
    agent: str
    version: str
    source_digest: str | None  # sha256 of the file that contains the agent
    input: Any
    store: str
    perdure: str
    python: str
    platform: str
    started_at: str
    command: str = ""  # the command line that reproduces the report


class Findings(Struct, frozen=True):
    """All results of one crash matrix."""

    subject: Subject
    baseline: Baseline
    trials: tuple[Trial, ...]
    tools: tuple[ToolSeen, ...]
    problems: tuple[Problem, ...]  # the problems of severity "wrong" and "open", each once
    notes: tuple[Problem, ...]  # the problems of severity "note": as declared, but it could be better
    figures: Figures

    @property
    def ok(self) -> bool:
        """Were trials made, and no problems found? There may still be notes, and trials that needed a person."""
        return bool(self.trials) and not self.problems

    @property
    def untried(self) -> int:
        """How many boundaries were not tried: they were not chosen, not drawn, or never reached."""
        return self.figures.boundaries - self.figures.tried

    def as_json(self) -> dict[str, Any]:
        """The findings as plain JSON values, including `ok` and `untried`."""
        plain: dict[str, Any] = to_builtins(self)
        return {"ok": self.ok, "untried": self.untried, **plain}
