"""The process that a stepped run lives in: it tells of each boundary that it comes to, and stands still at the one that is wanted.

    the test → Go(stop)                      go on, as far as this boundary
    the run  → Came(boundaries, held=…)      at each point; when held, nothing goes on until the next Go
    the run  → Rested(status, waiting_for)   it has ended, or waits; with the next Go it is driven again
    the run  → Broke(traceback)              an error that is no run's, such as a database that cannot be opened

Lines of JSON on a pair of sockets. Whichever thread comes to a boundary while another one is held waits behind it, so that the whole run
stands still. When the test's end closes, the process ends.
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
import socket
import threading
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

import msgspec
from msgspec import Struct

from perdure.agent import Agent
from perdure.settings import Settings
from perdure.testing.boundaries import Boundary
from perdure.testing.clock import ManualClock, at
from perdure.testing.forking import let_signals_in
from perdure.testing.watched import WatchedPerdure

GONE = 71  # the exit code when nobody holds the other end any more
_BUFFER = 1 << 16


class Stop(Struct, frozen=True):
    """Where to stand still; what is None does not matter."""

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
    stop: Stop | None
    now_us: int | None  # what a manual clock shows


class Came(Struct, frozen=True, tag=True):
    boundaries: list[Boundary]
    held: bool


class Rested(Struct, frozen=True, tag=True):
    status: str
    waiting_for: str | None


class Broke(Struct, frozen=True, tag=True):
    trace: str


Told = Came | Rested | Broke
told = msgspec.json.Decoder(Told)
_asked = msgspec.json.Decoder(Go)


class Line:
    """One end of the pair: whole messages, in order."""

    def __init__(self, end: socket.socket) -> None:
        self.end = end
        self._read = b""

    def say(self, message: Go | Told) -> None:
        self.end.sendall(msgspec.json.encode(message) + b"\n")

    def hear(self) -> bytes | None:
        """The next message; None when the other end is closed. TimeoutError after the socket's own time."""
        while b"\n" not in self._read:
            some = self.end.recv(_BUFFER)
            if not some:
                return None
            self._read += some
        message, _, self._read = self._read.partition(b"\n")
        return message


class Errand(Struct, frozen=True):
    """What the process is for."""

    agent: Agent[Any, Any]
    agents: tuple[Agent[Any, Any], ...]
    encoded: bytes
    run_id: str
    url: str
    settings: Settings
    now_us: int | None


def live(end: socket.socket, errand: Errand) -> NoReturn:
    """Everything that a process does between its fork and its end."""
    line = Line(end)
    try:
        signal.set_wakeup_fd(-1)  # it belongs to the test's own loop
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the test, whose end is ours
        let_signals_in()
        threading.Thread(target=_end_with, args=(end,), name="perdure-held", daemon=True).start()
        asyncio.run(_drive(line, errand))
    except BaseException:
        line.say(Broke(traceback.format_exc()))
    finally:
        os._exit(0)  # nothing of the test's own ends here: no fixture, no exit handler, no buffer


def _end_with(end: socket.socket) -> None:
    """A process that is under way notices as well that nobody waits for it any more."""
    poll = select.poll()
    poll.register(end, getattr(select, "POLLRDHUP", 0))
    poll.poll()
    os._exit(GONE)


async def _drive(line: Line, errand: Errand) -> None:
    clock = None if errand.now_us is None else ManualClock()
    gate = _Gate(line, clock)
    gate.obey()
    app = WatchedPerdure(
        errand.url, [errand.agent, *errand.agents], settings=errand.settings, clock=clock, watch=gate.watch, root=errand.run_id
    )
    async with app:
        # The same id and input are the same run: the one that a process before this one may have begun.
        await app.start_encoded(errand.agent, errand.encoded, id=errand.run_id, target=errand.agent.target)
        while True:
            row = await app.drive(errand.run_id, wait=clock is None)
            line.say(Rested(row.status, row.waiting_for))
            gate.obey()


class _Gate:
    """Lets the run pass, one point after the other, as far as it may go."""

    def __init__(self, line: Line, clock: ManualClock | None) -> None:
        self._line = line
        self._clock = clock
        self._stop: Stop | None = None
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
