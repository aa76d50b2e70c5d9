"""A run that goes as far as a boundary and stands still there: look at its journal, kill its process, let it go on.

    with stepping(support, "o-7") as run:
        run.until("before_tool_result_persisted", tool="charge")
        run.crash()                         # kill -9, while the answer of the payment service is in nobody's journal
        assert run.finish() == "refunded"   # another process takes it up
        assert run.effects["charge"] == 2   # keyed: asked again with the same key

The run lives in a process of its own, forked from the test, so that the agent may be any object that the test has; what its tools put
into variables stays over there. The methods block, in sync and async tests alike.
"""

from __future__ import annotations

import difflib
import os
import signal
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self, TypeVar

from perdure.agent import Agent
from perdure.core import codec
from perdure.core.events import Event, RunSucceeded
from perdure.core.state import RunState, fold
from perdure.errors import InvalidInput, NeedsAttention, NotFound, RunCancelled, RunFailed
from perdure.settings import Settings
from perdure.store.api import RunRow, Store
from perdure.store.open import open_store
from perdure.testing.boundaries import Boundary, names
from perdure.testing.clock import ManualClock
from perdure.testing.forking import fork
from perdure.testing.held import Broke, Came, Errand, Go, Line, Rested, Stop, live, told
from perdure.testing.recorder import Recording, export

T = TypeVar("T")
TIMEOUT_S = 60.0
# A process that was killed here has nothing on its way: its tools' effects are local, and need not be waited for.
SETTINGS = Settings(reconcile_margin_s=0.0, unknown_deadline_s=0.0)
_SHOWN = 60


class NotReached(AssertionError):
    """The run has ended, or rests, or took too long, and did not come to where the test wanted it."""


class SteppedRun:
    """One run, in a process that can be held at a boundary and killed there. To be closed, or used with `with`."""

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
        self.at: tuple[Boundary, ...] = ()  # where it stands; empty: it has no process, or rests
        self.passed: list[Boundary] = []  # every boundary that it has come to, in all its processes
        self._agent, self._agents = agent, tuple(agents)
        self._encoded = agent.bind(tuple(args), kwargs)
        self._clock, self._settings = clock, settings
        self._pid: int | None = None
        self._line: Line | None = None

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
        """Go on as far as the nth such boundary from here, and stand still there. NotReached names those that it came to instead.

        `run` is a child, named from below: "/2" is that of call 2.
        """
        __tracebackhide__ = True
        stop = Stop(_known(name), tool, call, run, nth)
        answer = self._go(stop, timeout_s)
        if isinstance(answer, Rested):
            waits = f" and waits for {answer.waiting_for}" if answer.waiting_for else ""
            raise NotReached(f"run {self.id} is {answer.status}{waits}, and has not come to {stop}; {self._came_to()}")
        return next(one for one in answer.boundaries if stop.is_at(one))

    def rest(self, *, timeout_s: float = TIMEOUT_S) -> RunRow:
        """Go on until it ends, needs a person, or waits; its row then."""
        __tracebackhide__ = True
        self._go(None, timeout_s)
        return self.row()

    def finish(self, *, timeout_s: float = TIMEOUT_S) -> Any:
        """Go on to the end, and return the run's result. RunFailed, RunCancelled, NeedsAttention; NotReached when it waits."""
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
                    f"run {self.id} has not ended: it waits for {row.waiting_for}. Bring that about (advance the clock, or open {self.url} "
                    "and decide or signal), and go on"
                )

    def crash(self) -> None:
        """Kill its process, as `kill -9` does. Whatever goes on next does so in another one."""
        if self._pid is None:
            raise InvalidInput(f"run {self.id} has no process to kill: let it go on first, run.until(…)")
        self._end()

    def close(self) -> None:
        """Kill its process, if it has one. What it has written stays where it is."""
        if self._pid is not None:
            self._end()

    # -- looking ------------------------------------------------------------------------------------------------------
    @property
    def effects(self) -> Counter[str]:
        """How often the function of each tool, and each model, was called; counted where it is called, and not out of the journal."""
        return Counter(one.tool for one in self.passed if one.name in ("before_tool_effect", "before_model_effect"))

    def events(self) -> list[Event]:
        """The journal, as whoever looks into the database sees it at this moment; empty when the run is not there yet."""
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
        """Its journal as it is now, with those below it, in a new file: what `perdure export` writes, as a Recording."""
        return export(self.url, self.id, path)

    def _look(self, look: Callable[[Store], T]) -> T:
        # Opened for each look: while a process is forked, this one must not have the database open.
        store = open_store(self.url)
        try:
            return look(store)
        finally:
            store.close()

    # -- its process --------------------------------------------------------------------------------------------------
    def _go(self, stop: Stop | None, timeout_s: float) -> Came | Rested:
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
            if isinstance(answer, Rested):
                return answer
            self.passed += answer.boundaries
            if answer.held:
                self.at = tuple(answer.boundaries)
                return answer

    def _hear(self, line: Line, until: float, stop: Stop | None, timeout_s: float) -> Came | Rested | Broke:
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
        answer: Came | Rested | Broke = told.decode(message)
        return answer

    def _begin(self) -> Line:
        ours, theirs = socket.socketpair()
        now_us = None if self._clock is None else self._clock.now_us
        errand = Errand(self._agent, self._agents, self._encoded, self.id, self.url, self._settings, now_us)
        pid = fork()  # there may be threads, one of which may hold a lock: the child uses nothing that was there before but the agent
        if pid == 0:
            ours.close()
            live(theirs, errand)
        theirs.close()
        self._pid = pid
        return Line(ours)

    def _end(self) -> int:
        """Kill the process and see it buried; how it ended."""
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
    """A run of the agent with these arguments, which begins with the first `until`, `rest` or `finish`.

    Its journal is a file of its own, unless `url` names another. With a `clock` it rests instead of waiting for a time; without one it
    waits as long as its timers say.
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
