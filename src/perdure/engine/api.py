"""The interface above the stores: `Engine`, which starts and drives runs, and `Reading`, which shows them.

The app, the command line and `inspect` know these two protocols and nothing below them. The local engine is the first
implementation: a store and a worker in this process. An engine over a workflow server would be another implementation,
so no detail of perdure's stores may appear in this interface:

- Only data goes in and comes out. A message to a run is an event's body, and a vote is a `Vote`. The engine judges
  messages and votes where this is atomic (in the store's transaction, in a step of a workflow), by the rules of the
  core (`core.transitions`, `core.approval`).
- There is no lease, epoch, nonce or inbox: which process may write is an internal matter of the engine. `seen` is the
  number of the last event that a person has read.
- Methods that may wait are async. `Reading` is blocking, because the code that reads (`inspect`, the command line) is
  plain code. Code on an event loop asks a `Reading` through `AskReading`, on a thread if `Reading.remote` is true.

`Reading` is declared in perdure.store.api, since every store is a `Reading`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, TypeVar

from msgspec import Struct

from perdure.core.approval import Vote
from perdure.core.events import AnyBody, Event, RunCancelled
from perdure.engine.counts import Counts
from perdure.errors import NotFound
from perdure.store.api import ApprovalRow, NewFork, NewRun, OpenAttempt, Reopen, RunRow, ScheduleChange
from perdure.store.api import Reading as Reading
from perdure.store.url import shown_url

if TYPE_CHECKING:  # a process that only reads need not import these modules
    import asyncio

    from perdure.agent import Agent

T = TypeVar("T")


class RunResult(Struct, frozen=True, gc=False):
    """How a run has ended, or for what it waits: the answer to a caller that waits for the run."""

    # The run's row. If the run waits for a child, and the child needs a person: the child's row.
    row: RunRow
    output: bytes | None = None  # JSON, if the run has succeeded


class Activity(Struct, frozen=True, gc=False):
    """What this process does as a worker, for metrics. Any thread may look at it."""

    counts: Counts
    worker: str | None = None  # the id of the worker; None: this process has driven no run yet
    driven: int = 0  # how many runs it drives now
    draining: bool = False


class AskReading(Protocol):
    """Asks a `Reading` from an event loop without blocking the loop."""

    def __call__(self, question: Callable[[], T], /) -> Awaitable[T]: ...


class Engine(Protocol):
    """Starts, steers and drives runs. Use an engine as an async context manager, on the loop where it works."""

    @property
    def reading(self) -> Reading:
        """Reads this engine's runs, while the engine is open."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exc: Any) -> None: ...

    # -- runs, from outside -------------------------------------------------------------------------------------------
    async def start(self, new: NewRun, connection: Any = None) -> tuple[RunRow, bool]:
        """Create the run; it is durable on return (True). Or return the run that already has this id (False).

        Conflict if the id belonged to a run that was pruned. With a connection of the caller, the run is created in
        the transaction of that connection: it exists when the caller has committed.
        """

    async def post(
        self, run_id: str, body: AnyBody, *, call: int | None = None, seen: int | None = None, tenant: str | None = None
    ) -> None:
        """Post an event to an unfinished run. On return the post is durable; it counts once.

        If the request repeats an earlier request, nothing changes. The same is true for a signal with a key that the
        run has had before on that topic. Conflict if `core.transitions.is_news` refuses the event. Conflict also if
        `seen` is given, the run is not held, and the run has newer events than `seen`. Other errors: NotFound, also
        for a run of another tenant; RunEnded.
        """

    async def vote(self, approval: str, vote: Vote, *, tenant: str | None = None) -> ApprovalRow:
        """Count a vote, by `core.approval.judge`.

        Of two votes at the same time, the second is judged by the standing after the first.

        Errors: NotFound, also for an approval of another tenant; RunEnded; Conflict, NotPermitted, InvalidInput.
        """

    async def end(self, run_id: str, body: RunCancelled, *, seen: int | None = None) -> None:
        """End a run that is not held, at once and without its agent. Its parent is told; its children are cancelled.

        Errors: NotFound, RunEnded; AlreadyRunning; Conflict if `seen` is given and is not the run's last event.
        """

    async def reopen(self, runs: Sequence[Reopen]) -> None:
        """Let these runs go on from an earlier event, all of them or none. Each has failed, was cancelled, or waits.

        Errors: NotFound; AlreadyRunning; Conflict if a run has succeeded or has newer events than `Reopen.seen`.
        """

    async def fork(self, new: NewFork) -> None:
        """Store a fork, all of it or nothing. Errors: Conflict if its id is taken; NotFound if its parent is gone."""

    async def change_schedule(self, change: ScheduleChange) -> Literal["done", "moved_on", "taken"]:
        """Commit a change of a schedule, with the run that it starts. On "done" it is durable.

        "moved_on": the schedule has newer events than the change expects. "taken": the id of the run is taken.
        """

    async def result(self, run_id: str) -> RunResult:
        """Wait until the run has ended, or until the run, or a child for which it waits, needs a person.

        If the engine knows the run's agent, it drives the run.
        """

    def follow(self, run_id: str, after: int = 0, *, progress: bool = False) -> AsyncGenerator[Event | OpenAttempt, None]:
        """The events after `after`, then each new event, until the run has ended.

        With `progress`, also each attempt under way that has reported other progress than before.
        """

    # -- driving runs in this process ---------------------------------------------------------------------------------
    async def drive(
        self, run_id: str, *, wait: bool = True, stop: asyncio.Event | None = None, agents: Sequence[Agent[Any, Any]] | None = None
    ) -> RunRow:
        """Drive one run until it ends, needs a person, or waits for something from outside. Returns the run's row.

        `agents`, if given, are used instead of the engine's own agents. When `stop` is set, the run is released.
        """

    async def work(self, *, stop: asyncio.Event | None = None) -> None:
        """Serve the queues until `stop` is set or `drain` is called; then release the runs under way."""

    def activity(self) -> Activity:
        """What this process does and has done as a worker. Any thread may call this."""

    def drain(self) -> None:
        """End every `work` under way. If no `work` is under way, end the next one. A signal handler may call this."""

    def abort(self) -> None:
        """Stop all drives at once and write nothing more, like a crash. A signal handler may call this."""


def no_such_run(run_id: str, reading: Reading | None = None) -> NotFound:
    """The NotFound error for a run. If `reading` is given, the hint names the journal."""
    where = "" if reading is None else f" of {shown_url(reading.url)}"
    return NotFound(f"there is no run {run_id}", hint=f"`perdure list` shows the runs{where}")
