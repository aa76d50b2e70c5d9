"""The seam above the stores: `Engine`, which moves runs, and `Reading`, which shows them.

The app, the command line and `inspect` know these two and nothing below them. The local engine is the first implementation: a store of
ours and a worker in this process. An engine over a workflow server would be another one, so that nothing of ours may leak through here:

- Data goes in and data comes out. What is said to a run is an event's body, and a vote is a `Vote`: the engine judges them where it can
  do so at one moment (the store's transaction, a step of the workflow), by the rules of the core (`core.landing`, `core.approval`).
- No lease, epoch, nonce or inbox: who may write is the engine's own affair. `seen` is the number of an event that a person has read.
- What may wait is async. `Reading` is blocking, because everything that reads (`inspect`, the command line) is plain code; a loop asks it
  through `AskReading`, on a thread where `Reading.remote` says that an answer may take long.

`Reading` is declared in perdure.store.api, since every store is one.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

from msgspec import Struct

from perdure.core.approval import Vote
from perdure.core.events import AnyBody, Event, RunCancelled
from perdure.errors import NotFound
from perdure.store.api import ApprovalRow, NewRun, RunRow
from perdure.store.api import Reading as Reading
from perdure.store.url import shown_url

if TYPE_CHECKING:  # whoever only reads need not import them
    import asyncio

    from perdure.agent import Agent

T = TypeVar("T")


class RunResult(Struct, frozen=True, gc=False):
    """How a run has come to rest for whoever waits for it."""

    row: RunRow  # of the run; or of a child that needs a person and that the run waits for
    output: bytes | None = None  # JSON, of a run that has succeeded


class AskReading(Protocol):
    """A question to a `Reading`, asked from an event loop without stopping it."""

    def __call__(self, question: Callable[[], T], /) -> Awaitable[T]: ...


class Engine(Protocol):
    """Starts, steers and drives runs. Used as an async context manager on the loop that it is to work on."""

    @property
    def reading(self) -> Reading:
        """What this engine's runs can be read with, while it is open."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exc: Any) -> None: ...

    # -- runs, from outside ---------------------------------------------------------------------------------------------------
    async def start(self, new: NewRun) -> tuple[RunRow, bool]:
        """Create the run, durable when this returns (True); or return the one that has this id already (False).

        Conflict when the id was used by a run that has been deleted.
        """

    async def post(
        self, run_id: str, body: AnyBody, *, call: int | None = None, seen: int | None = None, tenant: str | None = None
    ) -> None:
        """Tell an unfinished run something: durable when this returns, and counted once.

        What was asked for before changes nothing, and neither does a signal whose key the run has had on that topic. Conflict when
        `core.landing.is_news` refuses it; or when `seen` is given and the run has gone on beyond that event while nothing drives it.
        NotFound, also when it is another tenant's; RunEnded.
        """

    async def vote(self, approval: str, vote: Vote, *, tenant: str | None = None) -> ApprovalRow:
        """Count a vote, by `core.approval.judge`; of two who decide at once the second one is judged by what the first has left.

        NotFound, also when it is another tenant's; RunEnded; Conflict, NotPermitted, InvalidInput.
        """

    async def end(self, run_id: str, body: RunCancelled, *, seen: int | None = None) -> None:
        """End a run that nothing drives, at once and without its agent. Its parent hears of it; its children are asked to stop.

        NotFound, RunEnded; AlreadyRunning; Conflict when it has gone on beyond the event `seen`.
        """

    async def result(self, run_id: str) -> RunResult:
        """Wait until the run has ended, or it or a child that it waits for needs a person. Drives it here where its agent is known."""

    def follow(self, run_id: str, after: int = 0) -> AsyncIterator[Event]:
        """The events after `after`, and those that come, until the run has ended."""

    # -- driving them in this process -----------------------------------------------------------------------------------------
    async def drive(
        self, run_id: str, *, wait: bool = True, stop: asyncio.Event | None = None, agents: Sequence[Agent[Any, Any]] | None = None
    ) -> RunRow:
        """Drive one run until it ends, needs a person, or waits for something from outside; its row then.

        `agents`, where given, is the code that it is driven with, and not the engine's own. When `stop` is set, it is handed over.
        """

    async def work(self, *, stop: asyncio.Event | None = None) -> None:
        """Serve the queues until `stop` is set or `drain` is called; then hand over what is under way."""

    def drain(self) -> None:
        """End every `work` under way, or else the next one. May be called by a signal's handler."""

    def abort(self) -> None:
        """Stop driving at once and write nothing more, as a crash would. May be called by a signal's handler."""


def no_such_run(run_id: str, reading: Reading | None = None) -> NotFound:
    """With where it was looked for, if that is given."""
    where = "" if reading is None else f" in {shown_url(reading.url)}"
    return NotFound(f"there is no run {run_id}{where}; `perdure list` shows those that there are")
