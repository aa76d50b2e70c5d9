"""Every public exception. One type per choice that a caller has.

PerdureError
├── InvalidInput            the caller gave something that cannot be accepted; nothing was recorded
│   ├── InvalidPlan         a plan with problems; `problems` are all of them
│   └── NotEncodable        a value that canonical JSON cannot hold
├── NotFound                no such run, call, worker or file
├── Conflict                the id is taken by a run with another agent or input; or the run has moved on
├── RunEnded                the run has finished and takes nothing more
├── AlreadyRunning          a live worker holds the run
├── UnknownAgent            this process does not serve the agent that the run belongs to
│   └── WrongVersion        it serves the agent, in another version than the run was begun with
├── NotPermitted            whoever asks may not decide this
├── NotAllowedInAgent       an agent touched the world directly; do it in a tool
├── StoreError              the journal cannot be used
│   ├── StoreUnavailable    try again: locked, full disk, lost connection
│   ├── StoreCorrupt        not a database of ours, or damaged
│   └── StoreVersion        written by a newer perdure, or needs `perdure migrate`
├── Fenced                  another worker has taken the run over; this one must stop
├── Diverged                replay asked for something else than the journal has
├── said by tools
│   ├── NotSent             proof that nothing left the process: safe to try again
│   ├── NotReady            this process cannot make the call: the run waits for a person
│   ├── RetryLater          the service refused for now; `after` seconds
│   └── Fatal               trying again is pointless
├── seen by agents
│   ├── PlanFailed          a plan has stopped at a step; says what is done, what was undone, and what was never begun
│   └── ToolFailed          a call failed for good; the same on replay
│       ├── ResultNotEncodable   the effect happened, its result could not be recorded
│       ├── NotApproved     a person said no, nobody said yes in time, or it was withdrawn; `outcome` says which
│       ├── BudgetExceeded  there is not enough left for the call
│       └── ChildFailed     a child agent failed or was cancelled
├── ends the run of a ReAct agent
│   └── NoAnswer            its model gave none that could be used, however often it was asked
│       ├── ModelRefused    the model will not answer
│       ├── OutputInvalid   the answers were not of the type that is wanted
│       └── TurnsExceeded   there was no end of it after max_turns
└── seen by who waits for a run
    └── RunNotSucceeded
        ├── RunFailed
        ├── RunCancelled
        ├── NeedsAttention
        └── ResultTimeout
"""

from __future__ import annotations

from collections.abc import Sequence

MAX_PROBLEMS = 20  # that one message names


class PerdureError(Exception):
    """The root of everything perdure raises on purpose."""


class InvalidInput(PerdureError, ValueError):
    """The caller gave something that cannot be accepted; nothing was recorded."""


class NotEncodable(InvalidInput):
    """A value that canonical JSON cannot hold; the message says where in the value and why."""


class InvalidPlan(InvalidInput):
    """A plan that cannot be followed; nothing of it has begun. `problems` names every one of them."""

    def __init__(self, plan: str, problems: Sequence[str]) -> None:
        more = len(problems) - MAX_PROBLEMS
        rest = [f"and {more} more"] if more > 0 else []
        several = (f"{plan} has {len(problems)} problems:", *(f"- {one}" for one in [*problems[:MAX_PROBLEMS], *rest]))
        self.problems = tuple(problems)
        self.lines = several if len(problems) > 1 else (f"{plan} has 1 problem: {problems[0]}",)
        super().__init__("\n".join(self.lines))


class NotFound(PerdureError, LookupError):
    """No such run, call, worker or file."""


class Conflict(PerdureError):
    """The id is taken by a run with another agent or input, or the run has moved on meanwhile."""


class RunEnded(Conflict):
    """The run has finished and takes nothing more."""


class AlreadyRunning(PerdureError):
    """A live worker holds the run."""


class UnknownAgent(PerdureError):
    """This process does not serve the agent that the run belongs to."""


class WrongVersion(UnknownAgent):
    """This process serves the agent, in another version than the run was begun with."""


class NotPermitted(PerdureError):
    """Whoever asks may not decide this."""


class NotAllowedInAgent(PerdureError):
    """An agent touched the world directly; the same thing belongs in a tool."""


class StoreError(PerdureError):
    """The journal cannot be used."""


class StoreUnavailable(StoreError):
    """The journal cannot be used right now: locked, disk full, read-only."""


class StoreCorrupt(StoreError):
    """The file is not a perdure journal, or it is damaged."""


class StoreVersion(StoreError):
    """The journal has a schema that this perdure cannot use as it is."""


class Fenced(PerdureError):
    """Another worker has taken the run over; this one must stop."""


class Diverged(PerdureError):
    """Replay asked for something else than the journal has."""

    def __init__(self, message: str, *, seq: int, call: int | None = None) -> None:
        super().__init__(message)
        self.seq = seq
        self.call = call


class NotSent(PerdureError):
    """Raised by a tool: proof that nothing left the process, so trying again is safe."""


class NotReady(PerdureError):
    """Raised by a tool: this process cannot make the call, for want of a key, a package or a program. Nothing was sent.

    It counts as no attempt. The run stops as `needs_attention` with these words, and goes on where somebody resumes it.
    """


class RetryLater(PerdureError):
    """Raised by a tool: the service refused for now. Try again in `after` seconds."""

    def __init__(self, message: str = "the service asked to try again later", *, after: float = 1.0) -> None:
        super().__init__(message)
        self.after = after


class Fatal(PerdureError):
    """Raised by a tool: trying again is pointless."""


class PlanFailed(PerdureError):
    """A plan has stopped at a step that could not be done; the message says what is done and what is not."""


class ToolFailed(PerdureError):
    """A call failed for good. Carries the original type, message and attempts; the same on replay."""

    def __init__(self, tool: str, call: int, *, kind: str, type: str, message: str, attempts: int, what: str = "tool") -> None:
        super().__init__(f"{what} {tool} (call {call}) failed after {attempts} attempt{'s' if attempts != 1 else ''}: {type}: {message}")
        self.tool = tool
        self.call = call
        self.kind = kind
        self.type = type
        self.message = message
        self.attempts = attempts


class ResultNotEncodable(ToolFailed):
    """The effect happened, but its result could not be recorded; it is never repeated for that."""


class NotApproved(ToolFailed):
    """The call was not made: rejected, expired or withdrawn, which are different answers."""

    def __init__(self, tool: str, call: int, *, outcome: str, by: str | None, note: str | None, message: str) -> None:
        super().__init__(tool, call, kind=outcome, type="NotApproved", message=message, attempts=0)
        # It has not failed, it was never made; and silence is an answer that must be told from a no.
        said = message if outcome in message else f"{outcome}, {message}"
        self.args = (f"{tool} (call {call}) was not approved: {said}",)
        self.outcome = outcome
        self.by = by
        self.note = note


class BudgetExceeded(ToolFailed):
    """The call was not made: there is not enough left for it."""


class ChildFailed(ToolFailed):
    """A child agent failed or was cancelled; `run_id` is its run."""

    def __init__(self, agent: str, call: int, *, run_id: str, kind: str, type: str, message: str) -> None:
        super().__init__(agent, call, kind=kind, type=type, message=message, attempts=1)
        self.run_id = run_id
        # What comes from a child's own child is told as it was there: a chain of these would bury its cause.
        self.args = (message if type == "ChildFailed" else f"child {run_id} ({agent}) failed: {type}: {message}",)


class NoAnswer(PerdureError):
    """The model gave no answer that could be used, however often it was asked: nothing at all, or one that was cut off."""


class ModelRefused(NoAnswer):
    """The model will not answer this."""


class OutputInvalid(NoAnswer):
    """The model's answers were not of the type that is wanted, also after it was told why."""


class TurnsExceeded(NoAnswer):
    """The model has not come to an end within `max_turns`."""


class RunNotSucceeded(PerdureError):
    """Somebody waited for a run's result and there is none."""

    def __init__(self, run_id: str, message: str) -> None:
        super().__init__(f"run {run_id}: {message}")
        self.run_id = run_id


class RunFailed(RunNotSucceeded):
    """The agent raised."""


class RunCancelled(RunNotSucceeded):
    """The run was cancelled."""


class NeedsAttention(RunNotSucceeded):
    """The run waits for a person: `perdure why RUN` says for what."""


class ResultTimeout(RunNotSucceeded, TimeoutError):
    """The run is still going on; only the waiting has ended."""
