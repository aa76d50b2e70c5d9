"""Every public exception: one type for each different reaction of a caller.

PerdureError
├── InvalidInput            the caller gave something that cannot be accepted; nothing was recorded
│   ├── InvalidPlan         a plan with problems; `problems` has all of them
│   ├── InvalidQuery        a query over runs that cannot be understood
│   └── NotEncodable        a value that canonical JSON cannot hold
├── NotFound                no such run, call, worker or file
├── Conflict                the id is taken by another run; or the state of the run or approval does not allow this
│   └── RunEnded            the run has finished and accepts no more post
├── AlreadyRunning          a live worker holds the run
├── UnknownAgent            this process does not serve the agent that the run belongs to
│   └── WrongVersion        this process serves another version of the agent than the version of the run
├── NotPermitted            this person may not decide about this approval
├── NotAllowedInAgent       an agent did I/O or similar directly; do it in a tool
├── StoreError              the journal cannot be used
│   ├── StoreUnavailable    try again: locked, full disk, lost connection
│   ├── StoreCorrupt        not a perdure database, or damaged
│   └── StoreVersion        written by a newer perdure, or needs `perdure migrate`
├── Fenced                  another worker has taken over the run; this worker must stop
├── Diverged                on replay the code asked for something that the journal does not have
├── raised by tools
│   ├── NotSent             proof that nothing left the process: safe to try again
│   ├── NotReady            this process cannot make the call: the run waits for a person
│   ├── RetryLater          the service refused for now; try again after `after` seconds
│   ├── Fatal               another attempt would fail too
│   └── ArtifactNotSaved    call.save could not store the bytes; the tool may have acted before
├── seen by agents
│   ├── PlanFailed          a plan stopped at a step; the message lists the steps that are done, undone or never begun
│   └── ToolFailed          a call failed and is not tried again; the same on replay
│       ├── ResultNotEncodable   the effect happened, but its result could not be recorded
│       ├── NotApproved     the approval was rejected, expired or withdrawn; `outcome` says which
│       ├── BudgetExceeded  the budget does not cover the call
│       └── ChildFailed     a child agent failed or was cancelled
├── ends the run of a ReAct agent
│   └── NoAnswer            its model gave no usable answer, even after repeated requests
│       ├── ModelRefused    the model refuses to answer
│       ├── OutputInvalid   the answers did not have the requested type
│       └── TurnsExceeded   the model did not finish within max_turns
└── seen by code that waits for a run
    └── RunNotSucceeded
        ├── RunFailed
        ├── RunCancelled
        ├── NeedsAttention
        └── ResultTimeout
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

StoreErrorT = TypeVar("StoreErrorT", bound="StoreError")
MAX_PROBLEMS = 20  # how many problems one message lists at most


class PerdureError(Exception):
    """The base class of all exceptions that perdure raises on purpose.

    `str(error)` says what is wrong. It can be shown to the client of an API: it names no database, no host and no
    command. `hint` is for the people who operate perdure: what to type, where to look. The command line and tracebacks
    show both.
    """

    hint: str = ""

    def __init__(self, *args: object, hint: str = "") -> None:
        super().__init__(*args)
        if hint:
            self.hint = hint
            self.add_note(hint)

    def in_full(self) -> str:
        """The message and the hint in one line, for the command line and for logs."""
        return f"{self}; {self.hint}" if self.hint else str(self)


def in_full(error: BaseException) -> str:
    """The text of an error for a log. For an error of perdure, the text includes the hint."""
    return error.in_full() if isinstance(error, PerdureError) else str(error)


class InvalidInput(PerdureError, ValueError):
    """The caller gave something that cannot be accepted; nothing was recorded."""


class NotEncodable(InvalidInput):
    """A value that canonical JSON cannot hold; the message says where in the value and why."""


class InvalidPlan(InvalidInput):
    """A plan that cannot be followed. No step of the plan has begun. `problems` lists all problems of the plan."""

    def __init__(self, plan: str, problems: Sequence[str]) -> None:
        more = len(problems) - MAX_PROBLEMS
        rest = [f"and {more} more"] if more > 0 else []
        several = (f"{plan} has {len(problems)} problems:", *(f"- {one}" for one in [*problems[:MAX_PROBLEMS], *rest]))
        self.problems = tuple(problems)
        self.lines = several if len(problems) > 1 else (f"{plan} has 1 problem: {problems[0]}",)
        super().__init__("\n".join(self.lines))


class InvalidQuery(InvalidInput):
    """A query over runs that cannot be understood. The message shows the query, and points at the wrong character."""

    def __init__(self, message: str, *, query: str | None = None, caret: int = 0) -> None:
        self.lines: tuple[str, ...] = (message,) if query is None else (message, f"  {query}", f"  {' ' * caret}^")
        super().__init__("\n".join(self.lines))


class NotFound(PerdureError, LookupError):
    """No such run, call, worker or file."""


class Conflict(PerdureError):
    """The id is taken by another run, or the state of the run or approval does not allow this."""


class RunEnded(Conflict):
    """The run has finished and accepts no more post."""


class AlreadyRunning(PerdureError):
    """A live worker holds the run."""


class UnknownAgent(PerdureError):
    """This process does not serve the agent that the run belongs to."""


class WrongVersion(UnknownAgent):
    """This process serves another version of the agent than the version of the run."""


class NotPermitted(PerdureError):
    """This person may not decide about this approval."""


class NotAllowedInAgent(PerdureError):
    """An agent itself did something that only a tool may do, such as I/O, threads, or the use of an app."""


class StoreError(PerdureError):
    """The journal cannot be used.

    `where` is the database (a file, or a host and a name); the message does not name it.
    """

    def __init__(self, *args: object, where: str = "", hint: str = "") -> None:
        # With `where`, the only argument is a text about the database: "is locked by another process".
        super().__init__(*([f"the database {args[0]}"] if where else args), hint=hint)
        self.where = where
        self._said = str(args[0]) if args else ""
        if where:
            self.add_note(f"the database is {where}")

    def in_full(self) -> str:
        told = f"{self.where} {self._said}" if self.where else str(self)
        return f"{told}; {self.hint}" if self.hint else told

    def again(self, kind: type[StoreErrorT]) -> StoreErrorT:
        """A new error of this kind with the same message, for another caller."""
        return kind(self._said, where=self.where, hint=self.hint)


class StoreUnavailable(StoreError):
    """The journal cannot be used right now: locked, disk full, read-only."""


class StoreCorrupt(StoreError):
    """The file is not a perdure journal, or it is damaged."""


class StoreVersion(StoreError):
    """The journal has a schema that this version of perdure cannot use without a change."""


class Fenced(PerdureError):
    """Another worker has taken over the run. This worker must stop."""


class Diverged(PerdureError):
    """On replay the code asked for something that the journal does not have.

    `recorded` and `asked` are what the journal has and what the code asks for, in words; None if there is nothing.
    """

    def __init__(
        self, message: str, *, seq: int, call: int | None = None, recorded: str | None = None, asked: str | None = None, hint: str = ""
    ) -> None:
        super().__init__(message, hint=hint)
        self.seq = seq
        self.call = call
        self.recorded = recorded
        self.asked = asked


class NotSent(PerdureError):
    """Raised by a tool: it is certain that nothing was sent, so another attempt is safe."""


class NotReady(PerdureError):
    """Raised by a tool: this process cannot make the call, because a key, a package or a program is missing.

    Nothing was sent, and this does not count as an attempt. The run stops with the status `needs_attention` and this
    message, until a person continues it.
    """


class RetryLater(PerdureError):
    """Raised by a tool: the service refused for now. Try again in `after` seconds."""

    def __init__(self, message: str = "the service asked to try again later", *, after: float = 1.0) -> None:
        super().__init__(message)
        self.after = after


class Fatal(PerdureError):
    """Raised by a tool: another attempt would fail too."""


class ArtifactNotSaved(PerdureError):
    """`call.save` could not store the bytes: they are too large, or the place for them cannot be reached.

    The tool may have acted before it tried to save. So if the tool does not catch this exception, a `once` or `keyed`
    call is in doubt, and does not count as failed. `final`: another attempt would fail too.
    """

    def __init__(self, message: str, *, final: bool = False) -> None:
        super().__init__(message)
        self.final = final


class PlanFailed(PerdureError):
    """A plan stopped at a step that failed. The message says which steps are done and which are not."""


class ToolFailed(PerdureError):
    """A call failed and is not tried again. `type` and `message` are those of the tool's exception.

    A replay raises the same exception.
    """

    def __init__(self, tool: str, call: int, *, kind: str, type: str, message: str, attempts: int, what: str = "tool") -> None:
        super().__init__(f"{what} {tool} (call {call}) failed after {attempts} attempt{'s' if attempts != 1 else ''}: {type}: {message}")
        self.tool = tool
        self.call = call
        self.kind = kind
        self.type = type
        self.message = message
        self.attempts = attempts


class ResultNotEncodable(ToolFailed):
    """The effect happened, but its result could not be recorded. The call is not repeated."""


class NotApproved(ToolFailed):
    """The call was not made: its approval was rejected, expired or withdrawn. `outcome` says which."""

    def __init__(self, tool: str, call: int, *, outcome: str, by: str | None, note: str | None, message: str) -> None:
        super().__init__(tool, call, kind=outcome, type="NotApproved", message=message, attempts=0)
        # The message does not say "failed", because the call was never made. It names the outcome, because expired and
        # rejected are different answers.
        said = message if outcome in message else f"{outcome}, {message}"
        self.args = (f"{tool} (call {call}) was not approved: {said}",)
        self.outcome = outcome
        self.by = by
        self.note = note


class BudgetExceeded(ToolFailed):
    """The call was not made, because the budget does not cover it."""


class ChildFailed(ToolFailed):
    """A child agent failed or was cancelled. `run_id` is the id of the child's run."""

    def __init__(self, agent: str, call: int, *, run_id: str, kind: str, type: str, message: str) -> None:
        super().__init__(agent, call, kind=kind, type=type, message=message, attempts=1)
        self.run_id = run_id
        # If a child of the child failed, its message is used without a change, because nested messages would hide the
        # cause.
        self.args = (message if type == "ChildFailed" else f"child {run_id} ({agent}) failed: {type}: {message}",)


class NoAnswer(PerdureError):
    """The model gave no usable answer, even after repeated requests: no answer, or an answer that was cut off."""


class ModelRefused(NoAnswer):
    """The model refuses to answer."""


class OutputInvalid(NoAnswer):
    """The model's answers did not have the requested type, even after the model was told what was wrong."""


class TurnsExceeded(NoAnswer):
    """The model did not finish within `max_turns`."""


class RunNotSucceeded(PerdureError):
    """A caller waited for the result of a run, and there is no result."""

    def __init__(self, run_id: str, message: str, *, hint: str = "") -> None:
        super().__init__(f"run {run_id}: {message}", hint=hint)
        self.run_id = run_id


class RunFailed(RunNotSucceeded):
    """The agent raised an exception."""


class RunCancelled(RunNotSucceeded):
    """The run was cancelled."""


class NeedsAttention(RunNotSucceeded):
    """The run waits for a person. `perdure why RUN` says why."""


class ResultTimeout(RunNotSucceeded, TimeoutError):
    """The time to wait is over. The run continues."""
