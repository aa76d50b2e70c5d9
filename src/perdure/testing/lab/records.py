"""What the crash lab reports: one record for each trial, what was found over all of them, and the figures."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct, to_builtins

Outcome = Literal["ok", "doubt", "wrong", "not_reached", "not_compared", "not_seen"]
Severity = Literal["wrong", "open", "note"]


class Problem(Struct, frozen=True):
    """Something that a tool, an agent or perdure does otherwise than was declared.

    Of severity "open" it is something that could not be found out, for which nobody is to blame; of severity "note", a piece of advice.
    """

    rule: str  # "effect_twice", "result_differs", "reconcile_wrong", "no_reconcile", "output_differs", "promise", …
    severity: Severity
    tool: str  # "" when it is not about one tool
    sentence: str
    way_out: str
    boundary: str  # where the process was killed when it was first seen
    trials: int = 1  # that show it


class Repeat(Struct, frozen=True):
    """A function that was called more often than in the undisturbed run."""

    tool: str
    effect: str
    run: str  # below the run that was started: "" itself
    call: int
    begun: int
    expected: int  # in the undisturbed run
    why: str  # why that is allowed, or which rule it breaks
    allowed: bool


class Trial(Struct, frozen=True):
    """One run that was killed, once or twice, and resumed until it rested."""

    number: int
    boundaries: tuple[str, ...]  # where it was killed
    also: tuple[str, ...]  # other names of the first of these points
    status: str  # of the run when it rested
    outcome: Outcome
    output_equal: bool | None  # None: there is nothing to compare it with
    repeated: tuple[Repeat, ...]
    effects: dict[str, int]  # by tool: how often its function was called, over all processes
    world: Any  # what the user's ledger says; None without one
    resume_s: float  # from the start of the last process until it went on where the dead one had stopped
    settled: tuple[str, ...] = ()  # doubts that the lab has settled, since its ledger knows
    problems: tuple[Problem, ...] = ()
    compared: bool = True  # the world could be held against that of the undisturbed run
    kills: int = 0  # that happened
    asked: tuple[str, ...] = ()  # the calls that a person was asked about
    fresh: bool = False  # it was resumed by a new interpreter instead of a forked process


class ToolSeen(Struct, frozen=True):
    """A tool, what it declares, and what was seen of it."""

    name: str
    effect: str  # "model" for a model
    reconcile: bool
    calls: int  # in the undisturbed run
    repeated: int  # trials in which it was called more often
    doubts: int  # trials in which nobody knew whether it had happened
    verdict: str  # "as declared", "not as declared", "not seen", "not compared", "not tried"
    compared: int = 0  # of the trials in which it was called more often, those that could be compared


class Baseline(Struct, frozen=True):
    """The undisturbed run."""

    status: str
    output: Any
    waiting_for: str | None
    calls: int
    boundaries: tuple[str, ...]
    seconds: float
    same_output: bool  # a second undisturbed run had the same output, so that outputs can be compared
    models: dict[str, int]  # questions by model
    world: Any = None
    also: tuple[tuple[str, ...], ...] = ()  # for each of the boundaries, the other names of that point
    remarks: tuple[str, ...] = ()  # about how the trials were made


class Figures(Struct, frozen=True):
    boundaries: int  # that the undisturbed run comes to
    tried: int  # of these, those at which a process was killed
    trials: int
    planned: int  # all that there would be, pairs included; `trials` of them were made
    kills: int
    ok: int
    doubt: int
    wrong: int
    not_reached: int
    not_compared: int
    not_seen: int
    unkilled: int  # of those that are wrong, the ones whose process never came to its boundary
    seconds: float
    resume_median_ms: float
    resume_most_ms: float


class Subject(Struct, frozen=True):
    """What was tested, with what."""

    target: str
    agent: str
    version: str
    source_digest: str | None  # sha256 of the file that has the agent
    input: Any
    store: str
    perdure: str
    python: str
    platform: str
    started_at: str
    command: str = ""  # that reproduces it


class Findings(Struct, frozen=True):
    """Everything about one crash matrix. `ok`: whatever was killed where, everything went as declared."""

    subject: Subject
    baseline: Baseline
    trials: tuple[Trial, ...]
    tools: tuple[ToolSeen, ...]
    problems: tuple[Problem, ...]  # what is wrong, or could not be found out, each once
    notes: tuple[Problem, ...]  # what is as declared, and could be better
    figures: Figures

    @property
    def ok(self) -> bool:
        """Something was tried, nothing is wrong, and no tool was called again without being compared. Advice may be there, and doubts."""
        return bool(self.trials) and not self.problems

    @property
    def untried(self) -> int:
        """Boundaries at which nobody was killed: those that were not chosen or drawn, and those that no process came to."""
        return self.figures.boundaries - self.figures.tried

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values; `ok` and `untried` are among them."""
        plain: dict[str, Any] = to_builtins(self)
        return {"ok": self.ok, "untried": self.untried, **plain}
