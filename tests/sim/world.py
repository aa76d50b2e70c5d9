"""One seed: a journal, workers and people. At first there are all kinds of faults, and then none.

In the calm at the end every run must end. The promises are checked after every operation, and as a whole at the end.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import Any

from tests.sim import cast
from tests.sim.checker import Checker, Shadow
from tests.sim.faults import CRASH_POINTS, Fault, draw
from tests.sim.ground import Ground, Truth
from tests.sim.kernel import Kernel, Killed, Process, Strand, TooLittle, Violation
from tests.sim.loop import run as run_loop
from tests.sim.outside import Outside
from tests.sim.people import People
from tests.sim.staging import SimClock, staged
from tests.sim.store import SimStore
from tests.sim.threads import Time

from perdure import Perdure, Settings
from perdure.core import codec
from perdure.errors import StoreError
from perdure.inspect.verify import verify_run
from perdure.store.liveness import InProcess
from perdure.store.part import Means

LEASE_S = 2.0
OPERATIONS = 500  # while things go wrong
CALM_S = 400.0
LEAST_CALLS = 3
MOST_OPERATIONS = 5000  # until all runs have ended: a simulation that needs more goes in circles
SETTINGS = Settings(
    lease_s=LEASE_S,
    poll_s=0.5,
    park_after_s=0.3,
    cancel_grace_s=0.3,
    reconcile_margin_s=0.5,
    unknown_deadline_s=3.0,
    drain_timeout_s=3.0,
    concurrency=8,
    answer_s=2.0,
)


_COMMITS = frozenset(("append", "send", "transact"))
_WORST_AT_COMMITS = frozenset(("crash", "lose", "stop"))


class World:
    def __init__(self, seed: int, plan: Sequence[Fault] | None = None, trace: list[str] | None = None) -> None:
        chance = Random(f"world {seed}")
        self.seed = seed
        self.kernel = Kernel(seed)
        self.remote = chance.random() < 0.5
        self.url = "postgresql://sim/journal" if self.remote else "sqlite://"
        self.slow_disk = chance.random() < 0.3
        self.ids = Random(f"ids {seed}")
        self.plan = {fault.at: fault for fault in (draw(seed, OPERATIONS) if plan is None else plan)}
        self.most_runs = 14
        self.begun = 0
        self.least_runs = 0
        self.calm = False  # nothing goes wrong any more
        self.closing = False  # no more processes are started
        self.number = 0  # operations so far
        self.version = 0
        self.transacting: Process | None = None
        self.asked_us: int | None = None
        self.inside: Strand | None = None  # the strand inside an operation that cannot be interrupted
        self.time: Time
        self.points: Counter[str] = Counter()
        self.trace = trace
        self._digest = hashlib.blake2b(digest_size=12)
        self._dice = Random(f"dice {seed}")
        self._processes: list[Process] = []  # all there ever were
        self._owed: list[Fault] = []
        self._stops: dict[Process, Callable[[], None]] = {}
        self._rings: dict[Process, Callable[[], None]] = {}
        self._workers = chance.choice((1, 2, 2, 3))
        self._liveness = InProcess()
        database = Ground.new()
        self.truth = Truth(Means("sqlite://", database, self, self._liveness))  # type: ignore[arg-type]
        assert database._writer is not None
        self._connection = database._writer
        self.checker = Checker(self.kernel, database._writer, self.remote)
        self.outside = Outside(self.kernel, seed, self.checker)

    # -- the course of it ---------------------------------------------------------------------------------------------
    def run(self) -> None:
        """Run the simulation. Raises the violation, if there is one."""
        cast.Stage.outside = self.outside
        gc.disable()  # otherwise the collector would run code of dead processes at random moments
        with staged(self):
            for _ in range(self._workers):
                self._start_worker()
            self._start_people()
            try:
                self._chaos()
                self._quiet()
                self._check_whole()
            finally:
                self._end()

    def _chaos(self) -> None:
        until_us = self.kernel.now_us + 120_000_000
        while self.number < OPERATIONS and self.kernel.now_us < until_us:
            self.kernel.sleep(200_000)

    def _quiet(self) -> None:
        """Nothing goes wrong any more: within a while, every run ends (G6)."""
        self.plan = {}
        self.calm = self.outside.calm = True
        self.least_runs = max(self.begun + 2, 6)  # whatever happened to the others: some work must be done
        for process in self._alive():
            process.skew_us = process.cut_off_until_us = 0
        self._start_worker()  # a worker with all agents
        until_us = self.kernel.now_us + round(CALM_S * 1e6)
        while (unfinished := [run for run in self.checker.runs.values() if not run.finished]) or self._wants_more():
            if self.kernel.now_us > until_us or self.number > MOST_OPERATIONS:
                raise Violation(f"{len(unfinished)} runs do not end: " + "; ".join(map(self._shown, unfinished)) + " (G6)")
            until_us += self._skip_waiting(unfinished)
            self.kernel.sleep(250_000)
        self.closing = True
        for process in self._alive():
            self._terminate(process)
        for _ in range(60):
            if not any(process in self._stops for process in self._alive()):
                return
            self.kernel.sleep(200_000)
        left = [process.name for process in self._alive() if process in self._stops]
        if left:
            raise Violation(f"{left} were told to stop and did not (G13)")

    def _wants_more(self) -> bool:
        """Whether more runs are to begin: what has happened so far would mean too little."""
        if self.begun >= self.least_runs and self.checker.counts["calls completed"] < LEAST_CALLS:
            self.least_runs = self.begun + 2
        return self.begun < self.least_runs

    def _skip_waiting(self, unfinished: list[Shadow]) -> int:
        """When all only wait for a time, it is that time; how much later it is then."""
        wakes = [run.ready_at for run in unfinished if run.ready_at is not None]
        all_wait = wakes and all(run.holder is None and run.status != "needs_attention" for run in unfinished)
        ahead_us = min(wakes) - self.kernel.wall_us - 1_000_000 if all_wait else 0
        if ahead_us < 20_000_000:
            return 0
        self.kernel.now_us += ahead_us
        return ahead_us

    def _shown(self, run: Shadow) -> str:
        open_calls = {call.number: f"{call.tool} {call.phase}" for call in run.state.open.values()}
        return (
            f"{run.run_id} is {run.status}, held by {run.holder}, ready at {run.ready_at}, waits for {run.waiting_for}, open: {open_calls}"
        )

    def _check_whole(self) -> None:
        if self.checker.counts["calls completed"] < LEAST_CALLS:
            raise TooLittle(f"only {self.checker.counts['calls completed']} calls were completed: too little to mean anything")
        for run_id in self.checker.runs:
            row = self.truth.get(run_id)
            assert row is not None
            verdict = verify_run(self.truth, row)
            if verdict.problem is not None:
                raise Violation(f"run {run_id}: event {verdict.seq}: {verdict.problem} (G11)")
        self._check_transactions()
        self._check_results()
        self._check_charges()

    def _check_transactions(self) -> None:
        """G5: the rows in the journal's own database agree with the events, each once."""
        written = Counter((run, call) for run, call in self._connection.execute("SELECT run, call FROM effects"))
        recorded = Counter(
            (run.run_id, call.number)
            for run in self.checker.runs.values()
            for call in run.state.calls.values()
            if call.effect == "transaction" and call.phase == "completed"
        )
        if written != recorded:
            raise Violation(f"transactions: written {written - recorded}, recorded {recorded - written} (G5)")

    def _check_results(self) -> None:
        """The recorded result of a call is what a service has done and answered."""
        for run in self.checker.runs.values():
            for call in run.state.calls.values():
                deed = self.outside.deeds.get(call.key)
                if call.phase != "completed" or deed is None or deed.effect == "model":
                    continue
                result = None if call.result is None or call.result.inline is None else codec.decode(call.result.inline)
                if result != deed.receipt or (deed.effect != "transaction" and not deed.done):
                    raise Violation(f"run {run.run_id}: call {call.number} has the result {result!r}, and was done {deed.done} times (G5)")

    def _check_charges(self) -> None:
        """T33: for everything that a service has done for a run, the run and its children were charged.

        Without a budget a `read` does not wait for its intent: a read that is lost with its worker may be in no
        journal.
        """
        for run in self.checker.runs.values():
            reads = run.state.budget is not None
            family = [one for one in self.checker.runs.values() if one is run or one.run_id.startswith(f"{run.run_id}/")]
            charged, wanted = sum(one.state.used.usd_micros for one in family), self.outside.bill(run.run_id, reads=reads)
            if charged < wanted:
                raise Violation(f"run {run.run_id}: {charged} micro-dollars were charged for effects that cost {wanted} (T33)")

    def _end(self) -> None:
        for process in self._processes:
            if not process.dead:
                self.kernel.kill(process)
        self._connection.set_update_hook(None)
        for process in self._processes:
            _dead.append(process.keeps)
            process.keeps = []
        # A reference to this world, or to the error that ended it, must not keep the dead processes alive.
        self._processes.clear()
        self._stops.clear()
        self._rings.clear()
        self.kernel.forget()

    @property
    def digest(self) -> str:
        """Of every operation with its outcome, in order."""
        return self._digest.hexdigest()

    def note(self, process: str, name: str, outcome: str, touched: Sequence[Shadow]) -> None:
        runs = " ".join(f"{run.run_id}:{len(run.ids)}:{run.hashes[-1].hex()[:8]}:{run.status}" for run in touched)
        line = f"{self.kernel.now_us} {process} {name} {outcome} {runs}"
        self._digest.update(line.encode())
        if self.trace is not None:
            self.trace.append(f"{self.number:5} {line}")

    # -- processes ----------------------------------------------------------------------------------------------------
    def _alive(self) -> list[Process]:
        return [process for process in self._processes if not process.dead]

    def _workers_alive(self) -> list[Process]:
        return [process for process in self._alive() if process in self._stops or process.name.startswith("w")]

    def _new_process(self, kind: str) -> Process:
        process = Process(f"{kind}{len(self._processes)}", self.kernel)
        self._processes.append(process)
        return process

    def _start_worker(self) -> None:
        process = self._new_process("w")
        number = len(self._processes)
        whole = bool(number % 2) or self.calm
        agents = [*cast.AGENTS, cast.elder] if whole else cast.AGENTS
        process.lacks = frozenset() if whole else frozenset((cast.elder.name,))

        async def main() -> None:
            stop = asyncio.Event()
            loop = asyncio.get_running_loop()

            def terminate() -> None:
                loop.call_soon_threadsafe(stop.set)

            self._stops[process] = terminate
            if self.closing:
                return
            app = Perdure(self.url, agents, settings=SETTINGS, clock=SimClock(self.kernel, process, number))
            process.keeps.append(app)
            async with app:
                await app.work(stop=stop)

        self.kernel.spawn(process, lambda: self._live(process, main, self._start_worker))

    def _start_people(self) -> None:
        process = self._new_process("p")
        number = len(self._processes)
        people = People(self, Random(f"people {self.seed} {number}"))

        async def main() -> None:
            app = Perdure(self.url, [*cast.AGENTS, cast.elder], settings=SETTINGS, clock=SimClock(self.kernel, process, number))
            process.keeps.append(app)
            async with app:
                await people.live(app)

        self.kernel.spawn(process, lambda: self._live(process, main, self._start_people))

    def _live(self, process: Process, main: Callable[[], Any], again: Callable[[], None]) -> None:
        """The life of a process, from its start to its end. If it ended by itself, its successor starts."""
        try:
            run_loop(self.kernel, process, main())
        except StoreError:
            pass  # it could not even begin
        self._bury(process, again)
        self.kernel.kill(process)

    def _bury(self, process: Process, again: Callable[[], None]) -> None:
        if not self.remote:
            for worker, owner in self.checker.workers.items():
                if owner is process:
                    self._liveness.free(worker)  # the kernel frees its lock
        self._rings.pop(process, None)
        self._stops.pop(process, None)
        if not self.closing:
            self.kernel.at(self.kernel.now_us + 20_000 + int(self._dice.random() * 1_500_000), self._unless_closing(again))

    def _unless_closing(self, again: Callable[[], None]) -> Callable[[], None]:
        return lambda: None if self.closing else again()

    def crash(self, process: Process) -> None:
        again = self._start_people if process.name.startswith("p") else self._start_worker
        if self.transacting is process:
            self.transacting = None
        self._bury(process, again)
        self.kernel.kill(process)

    def _terminate(self, process: Process) -> None:
        stop = self._stops.get(process)
        if stop is not None:
            stop()

    # -- what goes wrong ----------------------------------------------------------------------------------------------
    def next_fault(self, name: str) -> Fault | None:
        """One more operation, and its fault. Half of the worst faults for a commit wait for a commit."""
        self.number += 1
        if self.slow_disk:
            self.time.work_us += 2000
        if not self.plan:
            return None
        fault = self.plan.get(self.number)
        if name in _COMMITS:
            return fault or (self._owed.pop(0) if self._owed else None)
        if fault is not None and fault.kind in _WORST_AT_COMMITS and fault.which % 2:
            self._owed.append(fault)
            return None
        return fault

    def count(self, fault: Fault) -> None:
        self.points[fault.kind] += 1
        if self.trace is not None:
            self.trace.append(f"{self.number:5} {self.kernel.now_us} *** {fault}")

    @property
    def crash_points(self) -> int:
        return sum(count for kind, count in self.points.items() if kind in CRASH_POINTS)

    def befall(self, fault: Fault, process: Process) -> None:
        """Let it happen to the process, or to others, at this very moment."""
        match fault.kind:
            case "crash":
                self.count(fault)
                self.crash(process)
            case "crash other":
                others = [other for other in self._alive() if other is not process]
                if others:
                    self.count(fault)
                    self.crash(others[fault.which % len(others)])
            case "power":
                self.count(fault)
                for other in self._alive():
                    if other is not process:
                        self.crash(other)
                self.crash(process)
            case "stop":
                self.count(fault)
                process.stop(self.kernel.now_us + int((0.05 + fault.size * 2.5) * LEASE_S * 1e6))
                self.kernel.sleep(1)
            case "cut":
                self.count(fault)
                process.cut_off_until_us = self.kernel.now_us + int((0.02 + fault.size * 1.5) * LEASE_S * 1e6)
            case "drain":
                others = [other for other in self._alive() if other in self._stops]
                if others:
                    self.count(fault)
                    self._terminate(others[fault.which % len(others)])
            case "skew":
                self.count(fault)
                process.skew_us = int((fault.size - 0.5) * (7200 if fault.which % 4 == 0 else 60) * 1e6)
                process.was_skewed = True
            case _:
                pass

    def latency_us(self) -> int:
        return 100 + int(self._dice.random() * 900)

    def dice(self) -> float:
        return self._dice.random()

    # -- the store of every process
    # --------------------------------------------------------------------------------------
    def open_store(self) -> SimStore:
        process = self.kernel.current.process
        if process is None or process.dead:
            raise Killed
        return SimStore(self, process)

    def listen(self, process: Process, ring: Callable[[], None]) -> Callable[[], None]:
        self._rings[process] = ring
        return lambda: self._rings.pop(process, None) and None

    def ring(self) -> None:
        """The doorbell: it may come late, or never."""
        for process, ring in list(self._rings.items()):
            if self._dice.random() < 0.9:
                self.kernel.at(self.kernel.now_us + 100 + int(self._dice.random() * 2000), partial(self._rung, process, ring))

    watched = False  # no caller in the simulation waits for a run of another process

    def watch(self, moved: Callable[..., None]) -> Callable[[], None]:
        return lambda: None

    def _rung(self, process: Process, ring: Callable[[], None]) -> None:
        if not process.dead and process in self._rings:
            ring()

    def close(self) -> None:
        """The bell belongs to the world, and is not closed."""


_dead: list[list[Any]] = []  # what processes have left behind


def let_go() -> None:
    """Let the collector free the dead processes here, where their warnings do not matter.

    Unfinished tasks and coroutines.
    """
    heard, sys.unraisablehook = sys.unraisablehook, _say_nothing
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _dead.clear()
            gc.collect()
    finally:
        sys.unraisablehook = heard
        gc.enable()


def _say_nothing(_: Any) -> None:
    pass


def outcome(seed: int, plan: Sequence[Fault] | None = None, trace: list[str] | None = None) -> tuple[World, BaseException | None]:
    """Play a seed. Returns the world afterwards, and the violation."""
    world = World(seed, plan, trace)
    try:
        world.run()
    except Exception as error:
        traceback.clear_frames(error.__traceback__)
        return world, error
    return world, None
