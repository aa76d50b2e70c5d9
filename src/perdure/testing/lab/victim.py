"""What a process of the lab does: start the run, or find it started, and drive it until it rests; unless it is killed before."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import msgspec

from perdure.agent import Agent
from perdure.store.api import Store
from perdure.testing.boundaries import Boundary
from perdure.testing.lab.attending import Attendant
from perdure.testing.lab.carrier import Late, Note, Perform, leave_behind
from perdure.testing.lab.counting import Counting
from perdure.testing.lab.ledger import Ledger
from perdure.testing.lab.likeness import Chance
from perdure.testing.lab.spec import VARIABLE, Spec, Visit
from perdure.testing.lab.told import tell
from perdure.testing.lab.warp import Warp, WarpedClock, WarpedLoop
from perdure.testing.watched import WatchedPerdure
from perdure.tool import Call

DURING = "during_tool_effect"
LATE = "late_tool_effect"  # its process dies where the function would be called, and the effect comes later all the same


def live(spec: Spec, agent: Agent[Any, Any], agents: Iterable[Agent[Any, Any]]) -> None:
    """Do it, and leave word in `spec.told`. Does not return when the process is to die."""
    os.environ[VARIABLE] = str(spec.world)
    fate = Fate(spec)
    warp = Warp(spec.home / "ahead", allowed=spec.warp, patience_s=spec.patience_s, begun=fate.ledger.has_begun)
    with asyncio.Runner(loop_factory=lambda: WarpedLoop(warp)) as runner:
        runner.run(_live(spec, agent, agents, warp, fate))


async def _live(spec: Spec, agent: Agent[Any, Any], agents: Iterable[Agent[Any, Any]], warp: Warp, fate: Fate) -> None:
    began_at = time.time()
    chance = Chance(spec.run_id)
    chance.take_over()
    undisturbed = spec.process == 1 and spec.kill is None
    late = Late(spec.home, fate.ledger, warp, spec.patience_s)
    settle_s = spec.settings.reconcile_margin_s
    counting = Counting(fate.ledger, warp, fate.begun, late, settle_s, spec.world if undisturbed else None)
    app = LabPerdure(
        spec.settings.url,
        [*agents, agent],
        settings=spec.settings,
        clock=WarpedClock(warp) if spec.warp else None,
        watch=fate.visit,
        root=spec.run_id,
        counting=counting,
    )
    async with app:
        fate.app = app
        await app.start_encoded(agent, spec.input, id=spec.run_id, target=spec.target or agent.target)
        attendant = Attendant(app, spec, warp, fate.ledger, late)
        wait = not spec.warp  # where time cannot be turned, timers are sat through
        row = await app.drive(spec.run_id, wait=wait)
        while await attendant.attend(row):
            row = await app.drive(spec.run_id, wait=wait)
        await asyncio.to_thread(late.arrive_all)
        told = tell(app, spec.run_id, attendant.settled, began_at)
        told = msgspec.structs.replace(told, uuids=chance.uuids)
    new = spec.told.with_suffix(".new")
    new.write_bytes(msgspec.json.encode(told))
    new.replace(spec.told)


class LabPerdure(WatchedPerdure):
    """Perdure, watched, with the ledger around every tool; nobody is notified of what happens in a laboratory."""

    def __init__(self, *args: Any, counting: Counting, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._counting = counting

    def performing(self, tool: Any) -> Any:
        # Inside the boundaries: "begun" is written after before_tool_effect, "returned" before after_tool_effect.
        return super().performing(self._counting.counted(tool))

    def watched(self, store: Store) -> Store:
        return cast(Store, _Quiet(super().watched(store)))


class _Quiet:
    """A store whose notices nobody takes: they would be somebody's whom the lab does not know."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def next_notice(self) -> int | None:
        return None

    def take_notices(self, *_: Any, **__: Any) -> list[Any]:
        return []


class Fate:
    """Keeps the list of points that this process came to, and ends it at the one it was told."""

    def __init__(self, spec: Spec) -> None:
        self.ledger = Ledger(spec.home / "ledger")
        self.app: LabPerdure | None = None
        self._home = spec.home
        self._kill = spec.kill
        self._visits = os.open(spec.visits, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._begun: dict[tuple[str, int], int] = {}

    def visit(self, names: Sequence[Boundary]) -> None:
        os.write(self._visits, msgspec.json.encode(Visit(tuple(names), time.time())) + b"\n")
        if self._kill is not None and self._kill.boundary in names:
            self.die()

    def begun(self, call: Call, tool: Any, perform: Perform, note: Note) -> Callable[[], None]:
        """An effect is under way: die in the middle of it, if that is what was told, or leave it to a carrier and die.

        What this returns says that it is over.
        """
        assert self.app is not None
        below = self.app.points.below(call.run_id)
        nth = self._begun[below, call.number] = self._begun.get((below, call.number), 0) + 1
        if self._kill is not None and self._kill.boundary == Boundary(DURING, below, call.number, tool.name, nth):
            return _Fuse(self._kill.after_s, self.die).put_out
        if self._kill is not None and self._kill.boundary == Boundary(LATE, below, call.number, tool.name, nth):
            self.ledger.note("late", tool=tool.name, run=call.run_id, call=call.number, attempt=call.attempt, key=call.key)
            leave_behind(self._home, perform, note)
            self.die()
        return lambda: None

    def die(self) -> None:
        """As kill -9 does."""
        self.ledger.note("killed")
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)  # nothing of this process runs any further, whichever thread the signal meets first


class _Fuse:
    """Burns for so long and then ends the process; never after `put_out` has returned."""

    def __init__(self, seconds: float, die: Callable[[], None]) -> None:
        self._die = die
        self._out = False
        self._lock = threading.Lock()
        self._timer = threading.Timer(seconds, self._go_off)
        self._timer.daemon = True
        self._timer.start()

    def put_out(self) -> None:
        with self._lock:  # whoever is about to die has it, and does not give it back
            self._out = True
        self._timer.cancel()

    def _go_off(self) -> None:
        with self._lock:
            if not self._out:
                self._die()
