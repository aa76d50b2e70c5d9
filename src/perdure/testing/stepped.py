"""A run that is held at a boundary: there the test looks at its journal, kills its process, or lets it continue.

The run is driven in its own process. The test and this process exchange lines of JSON on a pair of sockets:

    the test → Go(stop)                          continue as far as this boundary
    the run  → Came(boundaries, held=…)          at each point. If held: the run waits for the next Go
    the run  → StoodStill(status, waiting_for)   the run has ended or parked. After the next Go it is driven again
    the run  → Broke(traceback)                  an error outside the run, such as a database that cannot be opened

While one thread is held at a boundary, any other thread that reaches a boundary waits too. So the whole run stands
still. When the test closes its socket, the process ends.
"""

from __future__ import annotations

import asyncio
import difflib
import os
import select
import signal
import socket
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, Self, TypeVar

import msgspec
from msgspec import Struct

from perdure.agent import Agent
from perdure.core import codec
from perdure.core.events import Event, RunSucceeded
from perdure.core.state import RunState, fold
from perdure.errors import InvalidInput, NeedsAttention, NotFound, RunCancelled, RunFailed
from perdure.settings import Settings
from perdure.store.api import RunRow, Store
from perdure.store.open import open_store
from perdure.testing.boundaries import Boundary, names
from perdure.testing.clock import ManualClock, at
from perdure.testing.forking import fork, unblock_signals
from perdure.testing.recorder import Recording, export
from perdure.testing.watched import WatchedPerdure

GONE = 71  # the exit code of the process when the test has closed its socket
_BUFFER = 1 << 16


# -- The process of the run


class StepStop(Struct, frozen=True):
    """The boundary at which the run is held. A field that is None matches any value."""

    name: str
    tool: str | None = None
    call: int | None = None
    run: str | None = None
    nth: int = 1

    def is_at(self, boundary: Boundary) -> bool:
        wanted = ((self.name, boundary.name), (self.tool, boundary.tool), (self.call, boundary.call), (self.run, boundary.run))
        return all(want is None or want == have for want, have in wanted)

    def __str__(self) -> str:
        about = {"": self.tool, "call ": self.call, "child ": self.run, "visit ": self.nth if self.nth > 1 else None}
        words = ", ".join(f"{what}{value}" for what, value in about.items() if value is not None)
        return f"{self.name}: {words}" if words else self.name


class Go(Struct, frozen=True, tag=True):
    stop: StepStop | None
    now_us: int | None  # the time of the manual clock, if there is one


class Came(Struct, frozen=True, tag=True):
    boundaries: list[Boundary]
    held: bool


class StoodStill(Struct, frozen=True, tag=True):
    status: str
    waiting_for: str | None


class Broke(Struct, frozen=True, tag=True):
    trace: str


Told = Came | StoodStill | Broke
told = msgspec.json.Decoder(Told)
_asked = msgspec.json.Decoder(Go)


class StepLine:
    """One socket of the pair. It sends and receives whole messages."""

    def __init__(self, end: socket.socket) -> None:
        self.end = end
        self._read = b""

    def say(self, message: Go | Told) -> None:
        self.end.sendall(msgspec.json.encode(message) + b"\n")

    def hear(self) -> bytes | None:
        """The next message. None if the other socket is closed. TimeoutError after the socket's timeout."""
        while b"\n" not in self._read:
            some = self.end.recv(_BUFFER)
            if not some:
                return None
            self._read += some
        message, _, self._read = self._read.partition(b"\n")
        return message


class Errand(Struct, frozen=True):
    """Everything that the process needs to drive the run."""

    agent: Agent[Any, Any]
    agents: tuple[Agent[Any, Any], ...]
    encoded: bytes
    run_id: str
    url: str
    settings: Settings
    now_us: int | None


def live(end: socket.socket, errand: Errand) -> NoReturn:
    """Everything that the process does, from its fork to its end."""
    line = StepLine(end)
    try:
        signal.set_wakeup_fd(-1)  # the inherited wakeup descriptor belongs to the test's event loop
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the test, which then ends this process
        unblock_signals()
        threading.Thread(target=_end_with, args=(end,), name="perdure-held", daemon=True).start()
        asyncio.run(_drive(line, errand))
    except BaseException:
        line.say(Broke(traceback.format_exc()))
    finally:
        os._exit(0)  # do not run the test's fixtures and exit handlers, and do not flush the test's buffers


def _end_with(end: socket.socket) -> None:
    """End this process as soon as the test closes its socket, also while the run is under way."""
    poll = select.poll()
    poll.register(end, getattr(select, "POLLRDHUP", 0))
    poll.poll()
    os._exit(GONE)


async def _drive(line: StepLine, errand: Errand) -> None:
    clock = None if errand.now_us is None else ManualClock()
    gate = _Gate(line, clock)
    gate.obey()
    app = WatchedPerdure(
        errand.url, [errand.agent, *errand.agents], settings=errand.settings, clock=clock, watch=gate.watch, root=errand.run_id
    )
    async with app:
        # An earlier process may have started the run. The same id and the same input mean the same run.
        await app.start_encoded(errand.agent, errand.encoded, id=errand.run_id, target=errand.agent.target)
        while True:
            row = await app.engine.drive(errand.run_id, wait=clock is None)
            line.say(StoodStill(row.status, row.waiting_for))
            gate.obey()


class _Gate:
    """Reports each boundary to the test, and holds the run at the wanted boundary."""

    def __init__(self, line: StepLine, clock: ManualClock | None) -> None:
        self._line = line
        self._clock = clock
        self._stop: StepStop | None = None
        self._left = 0
        self._one_at_a_time = threading.Lock()

    def watch(self, boundaries: Sequence[Boundary]) -> None:
        with self._one_at_a_time:
            held = self._is_wanted(boundaries)
            self._line.say(Came(list(boundaries), held))
            if held:
                self.obey()

    def obey(self) -> None:
        message = self._line.hear()
        if message is None:
            os._exit(GONE)
        go = _asked.decode(message)
        self._stop, self._left = go.stop, 0 if go.stop is None else go.stop.nth
        if self._clock is not None and go.now_us is not None:
            self._clock.set_to(at(go.now_us))

    def _is_wanted(self, boundaries: Sequence[Boundary]) -> bool:
        if self._stop is None or not any(map(self._stop.is_at, boundaries)):
            return False
        self._left -= 1
        return self._left == 0


# -- The test's side


T = TypeVar("T")
TIMEOUT_S = 60.0
# The margins are 0: the effects of a test's tools are local, so no request arrives after its process was killed.
SETTINGS = Settings(reconcile_margin_s=0.0, unknown_deadline_s=0.0)
_SHOWN = 60


class NotReached(AssertionError):
    """The run has not reached the wanted boundary: it has ended or parked, or it took too long."""


class SteppedRun:
    """One run, in a process that can be held at a boundary and killed there. Use `with`, or call `close`."""

    def __init__(
        self,
        agent: Agent[Any, Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        *,
        url: str,
        id: str = "stepped",
        agents: Sequence[Agent[Any, Any]] = (),
        clock: ManualClock | None = None,
        settings: Settings = SETTINGS,
    ) -> None:
        if not isinstance(agent, Agent):
            raise InvalidInput(f"{codec.shown(agent)} is not an agent: decorate the coroutine function with @agent")
        if url == "sqlite://":
            raise InvalidInput("sqlite:// is a journal in memory, and a stepped run lives in another process; give it a file: sqlite:////…")
        self.id = id
        self.url = url
        self.at: tuple[Boundary, ...] = ()  # where the run is held; empty if it has no process, has ended or is parked
        self.passed: list[Boundary] = []  # every boundary that the run has reached, in all its processes
        self._agent, self._agents = agent, tuple(agents)
        self._encoded = agent.bind(tuple(args), kwargs)
        self._clock, self._settings = clock, settings
        self._pid: int | None = None
        self._line: StepLine | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- going on -----------------------------------------------------------------------------------------------------
    def until(
        self,
        name: str,
        *,
        tool: str | None = None,
        call: int | None = None,
        run: str | None = None,
        nth: int = 1,
        timeout_s: float = TIMEOUT_S,
    ) -> Boundary:
        """Let the run continue to the nth such boundary from here, and hold it there.

        If the run does not reach the boundary: NotReached, with the boundaries that the run reached. `run` names a
        child relative to this run: "/2" is the child of call 2.
        """
        __tracebackhide__ = True
        stop = StepStop(_known(name), tool, call, run, nth)
        answer = self._go(stop, timeout_s)
        if isinstance(answer, StoodStill):
            waits = f" and waits for {answer.waiting_for}" if answer.waiting_for else ""
            raise NotReached(f"run {self.id} is {answer.status}{waits}, and has not come to {stop}; {self._came_to()}")
        return next(one for one in answer.boundaries if stop.is_at(one))

    def rest(self, *, timeout_s: float = TIMEOUT_S) -> RunRow:
        """Let the run continue until it ends, needs a person, or parks. Returns its row."""
        __tracebackhide__ = True
        self._go(None, timeout_s)
        return self.row()

    def finish(self, *, timeout_s: float = TIMEOUT_S) -> Any:
        """Let the run continue to its end, and return its result.

        RunFailed, RunCancelled or NeedsAttention if the run has no result. NotReached if the run waits.
        """
        __tracebackhide__ = True
        row = self.rest(timeout_s=timeout_s)
        match row.status:
            case "succeeded":
                return self._agent.decode_result(self._look(lambda store: _output(store, self.id)))
            case "failed":
                raise RunFailed(self.id, row.error or "failed")
            case "cancelled":
                raise RunCancelled(self.id, "cancelled")
            case "needs_attention":
                raise NeedsAttention(self.id, f"needs attention: {row.error or row.waiting_for}")
            case _:
                raise NotReached(
                    f"run {self.id} has not ended: it waits for {row.waiting_for}. Make that happen (advance the clock, or open {self.url} "
                    "and decide or signal), and go on"
                )

    def crash(self) -> None:
        """Kill the run's process, as `kill -9` does. The next `until`, `rest` or `finish` starts a new process."""
        if self._pid is None:
            raise InvalidInput(f"run {self.id} has no process to kill: let it go on first, run.until(…)")
        self._end()

    def close(self) -> None:
        """Kill the run's process, if there is one. The journal stays as it is."""
        if self._pid is not None:
            self._end()

    # -- looking ------------------------------------------------------------------------------------------------------
    @property
    def effects(self) -> Counter[str]:
        """How often each tool's function, and each model, was called. The journal is not used for this count."""
        return Counter(one.tool for one in self.passed if one.name in ("before_tool_effect", "before_model_effect"))

    def events(self) -> list[Event]:
        """The journal as it is in the database now. Empty if the run is not created yet."""
        return self._look(lambda store: store.read(self.id))

    def state(self) -> RunState:
        """The fold of the journal."""
        return fold(self.events())

    def row(self) -> RunRow:
        row = self._look(lambda store: store.get(self.id))
        if row is None:
            raise NotFound(f"run {self.id} is not in {self.url} yet: its process was held, or killed, before it was created")
        return row

    def export(self, path: Path | str) -> Recording:
        """Export the run and the runs below it, as they are now, to a new file. Returns its Recording."""
        return export(self.url, self.id, path)

    def _look(self, look: Callable[[Store], T]) -> T:
        # Open the store each time: this process must not have the database open while it forks.
        store = open_store(self.url)
        try:
            return look(store)
        finally:
            store.close()

    # -- its process --------------------------------------------------------------------------------------------------
    def _go(self, stop: StepStop | None, timeout_s: float) -> Came | StoodStill:
        __tracebackhide__ = True
        if self._line is None:
            self._line = self._begin()
        until = time.monotonic() + timeout_s
        self.at = ()
        self._line.say(Go(stop, None if self._clock is None else self._clock.now_us))
        while True:
            answer = self._hear(self._line, until, stop, timeout_s)
            if isinstance(answer, Broke):
                self._end()
                raise RuntimeError(f"the process of run {self.id} has broken:\n{answer.trace}")
            if isinstance(answer, StoodStill):
                return answer
            self.passed += answer.boundaries
            if answer.held:
                self.at = tuple(answer.boundaries)
                return answer

    def _hear(self, line: StepLine, until: float, stop: StepStop | None, timeout_s: float) -> Came | StoodStill | Broke:
        __tracebackhide__ = True
        wanted = "its end" if stop is None else str(stop)
        try:
            line.end.settimeout(max(until - time.monotonic(), 0.001))
            message = line.hear()
        except TimeoutError:
            self._end()
            raise NotReached(f"run {self.id} has not come to {wanted} within {timeout_s:g} s; {self._came_to()}") from None
        if message is None:
            code = self._end()
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            raise NotReached(f"the process of run {self.id} has ended ({how}) on its way to {wanted}; {self._came_to()}")
        answer: Came | StoodStill | Broke = told.decode(message)
        return answer

    def _begin(self) -> StepLine:
        ours, theirs = socket.socketpair()
        now_us = None if self._clock is None else self._clock.now_us
        errand = Errand(self._agent, self._agents, self._encoded, self.id, self.url, self._settings, now_us)
        # Another thread may hold a lock at the fork, and in the child this lock is never released. So of all objects
        # that exist before the fork, the child uses only the errand and its socket.
        pid = fork()
        if pid == 0:
            ours.close()
            live(theirs, errand)
        theirs.close()
        self._pid = pid
        return StepLine(ours)

    def _end(self) -> int:
        """Kill the process and reap it. Returns its exit code."""
        assert self._pid is not None
        assert self._line is not None
        os.kill(self._pid, signal.SIGKILL)
        _, status = os.waitpid(self._pid, 0)
        self._line.end.close()
        self._pid, self._line, self.at = None, None, ()
        return os.waitstatus_to_exitcode(status)

    def _came_to(self) -> str:
        if not self.passed:
            return "it came to no boundary at all"
        seen = list(dict.fromkeys(map(str, self.passed)))
        more = [f"and {len(seen) - _SHOWN} more"] if len(seen) > _SHOWN else []
        return "it came to\n  " + "\n  ".join([*seen[:_SHOWN], *more])


@contextmanager
def stepping(
    agent: Agent[Any, Any],
    /,
    *args: Any,
    url: str | None = None,
    agents: Sequence[Agent[Any, Any]] = (),
    clock: ManualClock | None = None,
    settings: Settings = SETTINGS,
    **kwargs: Any,
) -> Iterator[SteppedRun]:
    """A run of the agent with these arguments. The run begins with the first `until`, `rest` or `finish`.

    The journal is a new file, unless `url` names a database. With a `clock` the run parks when it has to wait for a
    time. Without a clock the run waits for its timers in real time.
    """
    with tempfile.TemporaryDirectory(prefix="perdure-stepping-") as folder:
        where = url or f"sqlite:///{Path(folder) / 'journal.db'}"
        with SteppedRun(agent, args, kwargs, url=where, agents=agents, clock=clock, settings=settings) as run:
            yield run


def _known(name: str) -> str:
    known = names()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3)
        meant = f"did you mean {' or '.join(near)}? " if near else ""
        raise InvalidInput(f"there is no boundary {name!r}; {meant}All of them: perdure.testing.boundaries.names()")
    return name


def _output(store: Store, run_id: str) -> bytes:
    body = store.read(run_id)[-1].body
    assert isinstance(body, RunSucceeded), body
    inline = body.output.inline
    return store.blob(str(body.output.blob)) if inline is None else inline
