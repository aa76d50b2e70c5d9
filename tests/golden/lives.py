"""A life is one process that works on the journals to be made, and ends or is killed.

Everything in it is deterministic.

Ids, nonces, names and the time are derived from the number of the life, so that making the journals twice gives the
same bytes. The kills are real: the process gets SIGKILL inside a tool, and the next life takes over its runs, because
the kernel has freed its lock.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import os
import secrets
import signal
import socket
import sys
import traceback
import types
import uuid
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from perdure import Perdure, Settings
from perdure.core import failures
from perdure.engine.clock import Clock
from perdure.store import writer
from perdure.store.api import FINISHED, RunRow

T0_S = 1_700_000_000
SETTINGS = Settings(
    poll_s=0.002,
    park_after_s=0,
    reconcile_margin_s=0,
    unknown_deadline_s=0,
    cancel_grace_s=0.05,
    flush_s=0.005,
    inline_bytes=512,
    roles={"finance": ("ann", "bob")},
)
Scene = Callable[["Stage"], Awaitable[None]]


class Life(NamedTuple):
    """What happens in one process, at its own time."""

    scene: Scene
    # The behaviour of the world for the agents: see WORLD in their module.
    world: Mapping[str, Any] = MappingProxyType({})
    killed: bool = False
    served: tuple[str, ...] | None = None  # names in the module of agents; None: all that it has


class FixedClock(Clock):
    """A clock that only moves when it is set, and whose ids begin with the number of the life."""

    def __init__(self, life: int) -> None:
        super().__init__()
        self._prefix = f"{life:022x}"
        self.now_us = (T0_S + 3600 * life) * 1_000_000

    def now(self) -> int:
        return self.now_us

    def advance(self, seconds: float) -> None:
        self.now_us += round(seconds * 1e6)


class Stage:
    """What a scene can use."""

    def __init__(self, app: Perdure, clock: FixedClock, agents: types.ModuleType) -> None:
        self.app = app
        self.clock = clock
        self.agents = agents

    async def start(self, name: str, run_id: str, *args: Any, actor: str | None = None, labels: Mapping[str, str] | None = None) -> None:
        """A new run. The place of its code is not recorded, because it is different on every machine."""
        found = getattr(self.agents, name)
        await self.app.start_encoded(found, found.bind(args, {}), id=run_id, tenant="acme", actor=actor, labels=labels)

    async def drive(self, run_id: str) -> RunRow:
        """Drive the run until it ends or waits for something from outside; the time moves as needed."""
        while True:
            row = await self.app.engine.drive(run_id, wait=False)
            if row.status in FINISHED or row.ready_at is None or row.status not in ("waiting", "waiting_approval", "queued", "cancelling"):
                return row
            if row.ready_at > self.clock.now_us:
                if row.status == "waiting_approval":
                    return row
                self.clock.now_us = row.ready_at

    async def asked(self, run_id: str, call: int) -> str:
        """The id of the approval that this call waits for."""
        (pending,) = [one for one in await self.app.approvals(run_id=run_id) if one.call == call]
        return pending.approval


def load_agents(file: Path) -> types.ModuleType:
    """The module in that file, compiled under its short name: its recorded values must not depend on the folder."""
    module = types.ModuleType("golden_agents")
    sys.modules[module.__name__] = module
    exec(compile(file.read_text("utf-8"), file.name, "exec"), module.__dict__)
    return module


def live(number: int, life: Life, database: Path, agents: Path) -> None:
    """Run the life in a separate process. Raises AssertionError if it does not end as it should."""
    pid = os.fork()
    if not pid:
        code = 1
        try:
            _be(number, life, database, agents)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    expected = -signal.SIGKILL if life.killed else 0
    assert os.waitstatus_to_exitcode(status) == expected, f"life {number} ended with {os.waitstatus_to_exitcode(status)}, not {expected}"


def _be(number: int, life: Life, database: Path, agents: Path) -> None:
    pid = os.getpid()
    _fix(number)
    module = load_agents(agents)
    clock = FixedClock(number)
    module.WORLD.update(copy.deepcopy(dict(life.world)))
    module.TICK.append(lambda: clock.advance(0.25))
    module.DIE.append(lambda: os.kill(pid, signal.SIGKILL))
    served = module.AGENTS if life.served is None else [getattr(module, name) for name in life.served]

    async def main() -> None:
        async with asyncio.timeout(60), Perdure(f"sqlite:///{database}", served, settings=SETTINGS, clock=clock) as app:
            await life.scene(Stage(app, clock, module))

    asyncio.run(main())


def _fix(number: int) -> None:
    """Everything that differs between processes is derived from the number of the life."""
    ids, nonces = itertools.count(1), itertools.count(1)
    uuid.uuid4 = lambda: uuid.UUID(int=(number << 64) + next(ids), version=4)
    secrets.token_bytes = lambda nbytes=None: next(nonces).to_bytes(nbytes or 16, "big")
    socket.gethostname = lambda: "golden"
    os.getpid = lambda: 1000 + number
    writer.CHEAP_S = float("inf")  # every commit on the loop: what completes while one is under way does not depend on the disk
    plain = failures._traceback

    def places(error: BaseException, scrub: Any) -> str | None:
        """Without the folders that the sources lie in."""
        found = plain(error, scrub)
        return None if found is None else "\n".join(line.rpartition("/")[2] for line in found.splitlines())

    failures._traceback = places
