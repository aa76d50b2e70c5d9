"""What a process of the lab does: start the run, if it is not started yet, and drive it until it ends or parks.

If the spec of the process names a kill, the process kills itself there.
"""

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
from perdure.testing.lab.ledger import EffectLedger
from perdure.testing.lab.likeness import Chance
from perdure.testing.lab.spec import VARIABLE, Spec, Visit
from perdure.testing.lab.told import tell
from perdure.testing.lab.warp import Warp, WarpedClock, WarpedLoop
from perdure.testing.watched import WatchedPerdure
from perdure.tool import Call

DURING = "during_tool_effect"
LATE = "late_tool_effect"  # the process is killed where it would call the function, and the effect happens later


def live(spec: Spec, agent: Agent[Any, Any], agents: Iterable[Agent[Any, Any]]) -> None:
    """Run this process of the trial, and write the report file `spec.told`. Never returns if the process is killed."""
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
        wait = not spec.warp  # without the warp, timers are waited for in real time
        row = await app.engine.drive(spec.run_id, wait=wait)
        while await attendant.attend(row):
            row = await app.engine.drive(spec.run_id, wait=wait)
        await asyncio.to_thread(late.arrive_all)
        told = tell(app, spec.run_id, attendant.settled, began_at)
        told = msgspec.structs.replace(told, uuids=chance.uuids)
    new = spec.told.with_suffix(".new")
    new.write_bytes(msgspec.json.encode(told))
    new.replace(spec.told)


class LabPerdure(WatchedPerdure):
    """WatchedPerdure that writes every tool call to the ledger. It sends no notices, because a trial is only a test."""

    def __init__(self, *args: Any, counting: Counting, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._counting = counting

    def performing(self, tool: Any) -> Any:
        # The counted tool is inside the boundaries: the line "begun" is written after the boundary before_tool_effect,
        # and the line "returned" before the boundary after_tool_effect.
        return super().performing(self._counting.counted(tool))

    def watched(self, store: Store) -> Store:
        return cast(Store, _Quiet(super().watched(store)))


class _Quiet:
    """A store that gives out no notices: their receivers must get no notices of trials."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def next_notice(self) -> int | None:
        return None

    def take_notices(self, *_: Any, **__: Any) -> list[Any]:
        return []


class Fate:
    """Records the points that this process reaches, and kills the process at the point in its spec."""

    def __init__(self, spec: Spec) -> None:
        self.ledger = EffectLedger(spec.home / "ledger")
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
        """Called when an effect begins.

        If the spec has a kill inside this effect, the process is killed `after_s` seconds later. If the spec has a
        late effect here, a carrier is forked for the effect, and the process is killed at once.

        The function that this returns must be called when the effect has ended.
        """
        assert self.app is not None
        below = self.app.points.below(call.run_id)
        nth = self._begun[below, call.number] = self._begun.get((below, call.number), 0) + 1
        if self._kill is not None and self._kill.boundary == Boundary(DURING, below, call.number, tool.name, nth):
            return _KillTimer(self._kill.after_s, self.die).cancel
        if self._kill is not None and self._kill.boundary == Boundary(LATE, below, call.number, tool.name, nth):
            self.ledger.note("late", tool=tool.name, run=call.run_id, call=call.number, attempt=call.attempt, key=call.key)
            leave_behind(self._home, perform, note)
            self.die()
        return lambda: None

    def die(self) -> None:
        """Kill this process, as kill -9 does."""
        self.ledger.note("killed")
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)  # this thread must do nothing more before the signal arrives


class _KillTimer:
    """Kills the process after `seconds` seconds. If `cancel` has returned before, the process is not killed."""

    def __init__(self, seconds: float, die: Callable[[], None]) -> None:
        self._die = die
        self._cancelled = False
        self._lock = threading.Lock()
        self._timer = threading.Timer(seconds, self._kill)
        self._timer.daemon = True
        self._timer.start()

    def cancel(self) -> None:
        with self._lock:  # `_kill` keeps the lock while it kills the process
            self._cancelled = True
        self._timer.cancel()

    def _kill(self) -> None:
        with self._lock:
            if not self._cancelled:
                self._die()
