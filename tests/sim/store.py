"""A store that can fail at any operation, in front of a store that never fails: real logic, real database in memory.

Each process has its own store. A near store is like SQLite: an operation is done when it returns. A remote store is
like PostgreSQL: requests and answers take time, both can be lost, and a request may arrive after the death of its
sender.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from tests.sim.faults import Fault, Injected
from tests.sim.kernel import Killed, Process, Violation

from perdure.errors import PerdureError
from perdure.store.api import Append, Appended, Committed, Refused
from perdure.store.postgres.journal import may_be_sent

if TYPE_CHECKING:
    from tests.sim.world import World

ANSWER_US = 2_000_000  # an operation without an answer is given up after this
_POLLS = frozenset(("next_ready", "next_schedules", "parents_to_replay", "next_notice", "held", "take_notices", "workers"))
_COMMITTED = Committed()
_BY_THE_DATABASES_CLOCK = {"renew": 1, "reap": 2, "register": 3}  # where `now` stands among the arguments


class SimStore:
    """The store of one process."""

    def __init__(self, world: World, process: Process) -> None:
        self.url = world.url
        self.remote = world.remote
        self.cut_off_after_s = float("inf")  # workers here are judged by their silence alone
        self.pause_s = 0.0
        self.ahead_us = 0
        self._world = world
        self._process = process
        self._kernel = world.kernel
        self._doubtful: set[str] = set()  # the first events of appends whose outcome is unknown
        self._flights: dict[str, list[bool]] = {}  # the same, on their way: [still counts]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        operation = partial(self._operate, name)
        setattr(self, name, operation)
        return operation

    def version(self) -> int:
        return self._world.version

    def listen(self, ring: Callable[[], None]) -> Callable[[], None]:
        return self._world.listen(self._process, ring)

    def watch(self, moved: Callable[..., None]) -> Callable[[], None]:
        return self._world.watch(moved)

    def close(self) -> None:
        pass

    def send(self, batch: Sequence[Append], loop: asyncio.AbstractEventLoop, done: Callable[[list[Appended | None]], None]) -> list[Append]:
        """What goes in one statement is on its way when this returns; the rest comes back, as from the real one."""
        self._check_alive()
        fault = self._world.next_fault("send")
        if fault is not None and not fault.after:
            self._world.befall(fault, self._process)
        plain = [append for append in batch if may_be_sent(append) and append.events[0].event.event_id not in self._doubtful]
        if not self.remote or not plain or self._is_cut_off or len({append.lease.run_id for append in plain}) < len(plain):
            return list(batch)
        counts = [True]
        for append in plain:
            self._flights[append.events[0].event.event_id] = counts
        lost = fault is not None and fault.kind == "lose"
        if fault is not None and lost:
            self._world.count(fault)
        late_us = int(fault.size * 3e6) if fault is not None and fault.kind in ("delay", "lose") and fault.which % 2 else 0
        heard: list[Appended | None] = [None] * len(plain)

        def arrive() -> None:
            # A fence that was written meanwhile refuses it, like a new nonce.
            if not counts[0] or (lost and fault is not None and not fault.after):
                return
            if self._world.transacting:
                self._kernel.at(self._kernel.now_us + 1000, arrive)
                return
            answers = self._apply("append", lambda: self._world.truth.append(plain), plain, "send")
            heard[:] = [answer if answer == _COMMITTED else None for answer in answers]

        def answer() -> None:
            if self._process.dead or loop.is_closed():
                return
            if self._world.transacting and not lost:
                self._kernel.at(self._kernel.now_us + 1000, answer)
                return
            if lost or self._is_cut_off:
                self._doubtful.update(append.events[0].event.event_id for append in plain)
                unknown: list[Appended | None] = [None] * len(plain)
                loop.call_soon_threadsafe(done, unknown)
            else:
                loop.call_soon_threadsafe(self._heard, plain, heard, done)

        arrives_us = self._kernel.now_us + self._world.latency_us() + (late_us if lost else 0)
        answers_us = arrives_us + self._world.latency_us() + (0 if lost else late_us)
        self._kernel.at(arrives_us, arrive)
        self._kernel.at(self._kernel.now_us + 2000 if lost else answers_us, answer)
        if fault is not None and fault.after and not lost:
            # A process that dies here does not take back its requests under way.
            self._world.befall(fault, self._process)
        sent = set(map(id, plain))
        return [append for append in batch if id(append) not in sent]

    def _heard(self, plain: Sequence[Append], heard: list[Appended | None], done: Callable[[list[Appended | None]], None]) -> None:
        self._world.checker.acknowledged(append for append, answer in zip(plain, heard, strict=True) if answer == _COMMITTED)
        done(heard)

    # -- one operation ------------------------------------------------------------------------------------------------
    @property
    def _is_cut_off(self) -> bool:
        return self._process.cut_off_until_us > self._kernel.now_us

    def _check_alive(self) -> None:
        if self._process.dead:
            raise Killed

    def _operate(self, name: str, *args: Any, **kwargs: Any) -> Any:
        self._check_alive()
        world, kernel = self._world, self._kernel
        if world.inside is kernel.current:
            return getattr(world.truth, name)(*args, **kwargs)  # asked by what runs inside a transaction: part of that
        asked_us = kernel.now_us
        fault = None if name in _POLLS else world.next_fault(name)
        if fault is not None and not fault.after:
            world.befall(fault, self._process)
        self._travel()
        self._reach(name)
        while world.transacting is not None:
            kernel.sleep(1000)
        if fault is not None and fault.kind == "fail":
            raise Injected(f"{name} failed, as ordered")
        if fault is not None and fault.kind == "lose" and not fault.after:
            return self._lose(fault, name, args, None)
        answer = self._perform(name, args, kwargs, asked_us)
        if fault is not None and fault.after:
            if fault.kind == "lose":
                return self._lose(fault, name, args, answer)
            world.befall(fault, self._process)
        if fault is not None and fault.kind == "delay":
            kernel.sleep(int(fault.size * 3e6))
        self._travel()
        self._check_alive()
        if name == "append":
            world.checker.acknowledged(append for append, one in zip(args[0], answer, strict=True) if one == _COMMITTED)
        return answer

    def _travel(self) -> None:
        if self.remote:
            self._kernel.sleep(self._world.latency_us())
        elif self._world.dice() < 0.1:
            self._kernel.sleep(1 + int(self._world.dice() * 300))  # the disk

    def _reach(self, name: str) -> None:
        if self._is_cut_off:
            self._kernel.sleep(min(ANSWER_US if self.remote else 1000, self._process.cut_off_until_us - self._kernel.now_us))
            raise Injected(f"{name} did not reach the store, as ordered")

    def _perform(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], asked_us: int) -> Any:
        truth, world = self._world.truth, self._world
        if self.remote and name in _BY_THE_DATABASES_CLOCK:
            place = _BY_THE_DATABASES_CLOCK[name]
            args = (*args[:place], self._kernel.wall_us, *args[place + 1 :])
        if name == "register":
            world.checker.workers[args[0]] = self._process
        appends: Sequence[Append] = ()
        if name == "append":
            appends = args[0]
            if self.remote and any(self._is_doubtful(append) for append in appends):
                return self._settle(appends)
        elif name == "transact":
            head, work = args
            return self._transact(head, work, asked_us)
        world.asked_us = asked_us  # the real journal counts the time since it was asked, and this is when
        return self._apply(name, lambda: getattr(truth, name)(*args, **kwargs), appends)

    def _apply(self, name: str, work: Callable[[], Any], appends: Sequence[Append] = (), shown: str = "") -> Any:
        """Let the operation take effect, and check what it has done."""
        world = self._world
        world.inside = self._kernel.current
        try:
            answer = work()
        except PerdureError as error:
            self._note(shown or name, type(error).__name__, ())
            raise
        finally:
            world.asked_us = world.inside = None
        if appends:
            committed = [append for append, one in zip(appends, answer, strict=True) if one == _COMMITTED]
            world.checker.counts["refused"] += len(appends) - len(committed)
            appends = committed
        self._note(shown or name, "", appends)
        return answer

    def _note(self, name: str, outcome: str, appends: Sequence[Append]) -> None:
        world = self._world
        try:
            touched = world.checker.look(name, self._process, appends)
        except Violation as violation:
            self._kernel.fail(violation)
            raise
        if touched:
            world.version += 1
        world.note(self._process.name, name, outcome, touched)

    def _transact(self, head: Append, work: Callable[[Any], tuple[Append, Any]], asked_us: int) -> Any:
        """Other writers wait until the transaction is over, as for SQLite's single lock.

        No reader sees a half of it.
        """
        world = self._world
        written = [head]

        def kept(connection: Any) -> tuple[Append, Any]:
            # Its approval was compared with this time; its later duration does not matter.
            world.checker.began_us = self._kernel.wall_us
            tail, value = work(connection)
            self._check_alive()
            written.append(tail)
            return tail, value

        def transact() -> Any:
            world.transacting = self._process
            try:
                return world.truth.transact(head, kept)
            except BaseException:
                self._check_alive()
                raise
            finally:
                world.transacting = None

        world.asked_us = asked_us
        try:
            answer = transact()
        except Exception as error:
            self._note("transact", type(error).__name__, ())
            raise
        else:
            self._note("transact", "" if answer[0] == _COMMITTED else "refused", written if answer[0] == _COMMITTED else ())
            return answer
        finally:
            world.asked_us = world.checker.began_us = None

    # -- answers that are lost ----------------------------------------------------------------------------------------
    def _lose(self, fault: Fault, name: str, args: tuple[Any, ...], answer: Any) -> Any:
        """The answer is lost. The following lines do what the real stores do in this case."""
        self._world.count(fault)
        if self.remote and name == "append":
            self._doubtful.update(append.events[0].event.event_id for append in args[0] if append.events)
            self._kernel.sleep(int(fault.size * ANSWER_US))  # a new connection
            if fault.which % 2 == 0 and not self._is_cut_off and self._world.transacting is None:
                self._check_alive()
                return self._settle(args[0])
        raise Injected(f"{name}: the answer was lost, as ordered")

    def _is_doubtful(self, append: Append) -> bool:
        return bool(append.events) and append.events[0].event.event_id in self._doubtful

    def _settle(self, batch: Sequence[Append]) -> list[Appended]:
        """Find out what has arrived, append what has not, and make sure that nothing of it arrives later."""
        world = self._world
        answers: list[Appended] = []
        for append in batch:
            name = append.events[0].event.event_id if append.events else ""
            self._flights.get(name, [True])[0] = False  # fenced
            shadow, seq = world.checker.runs[append.lease.run_id], append.expected_seq + len(append.events)
            if name and seq <= len(shadow.ids) and shadow.hashes[seq] == append.events[-1].hash:
                world.checker.counts["settled: it was there"] += 1
                answers.append(_COMMITTED)
            elif name and seq <= len(shadow.ids):
                world.checker.counts["settled: another's is there"] += 1
                answers.append(Refused(f"run {append.lease.run_id}: another worker has written event {seq}"))
            else:
                world.checker.counts["settled: it was not there"] += 1
                answers += self._apply("append", lambda append=append: world.truth.append([append]), [append])  # type: ignore[misc]
            self._doubtful.discard(name)
        return answers
