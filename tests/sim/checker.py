"""Checks after every operation what must hold: a second interpretation of the journal, from its rows alone.

Every run that an operation has changed is read again, and its new events are folded onto the earlier state.
GUARANTEES.md explains the numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import apsw
from tests.sim.kernel import Kernel, Process, Violation

from perdure import Call
from perdure.core import identity
from perdure.core.events import (
    AttentionNeeded,
    ChildStarted,
    Event,
    RunClaimed,
    RunCreated,
    ToolCallCompleted,
    ToolCallInDoubt,
    ToolCallInitiated,
    ToolCallResolved,
    decode_body,
)
from perdure.core.state import FINISHED, RunState
from perdure.errors import StoreCorrupt
from perdure.store.api import Append

_ROW = """SELECT run_id, status, waiting_for, ready_at, seq, head, epoch, holder, attention, crashes
FROM perdure_runs WHERE id = ?"""
_EVENTS = "SELECT seq, event_id, ts, epoch, call, cause, data, hash FROM perdure_events WHERE id > ? AND id <= ? ORDER BY id"
_FINE = frozenset(("in_doubt", "poison", "budget"))  # reasons to need attention that our agents can have
_SUSPECT, _POISON, _ALONE = 2, 5, 3  # crashes from which on a run is a suspect; and to be called poison, so many of them alone
_SLACK_US = 500_000  # the most time between the send of an append and its arrival


class Shadow:
    """One run as the checker knows it."""

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self.state = RunState()
        self.ids: list[str] = []  # of events
        self.hashes = [identity.genesis(run_id)]
        self.epoch = 0
        self.holder: str | None = None
        self.status = "queued"
        self.ready_at: int | None = None
        self.waiting_for: str | None = None
        self.attention: str | None = None
        self.intents: dict[tuple[int, int], int] = {}  # (call, attempt) → when it became durable
        self.consumed: set[str] = set()  # approvals
        self.crashes = 0
        # When its worker was last lost: how many other runs it held; for a suspect, how many other suspects.
        self.beside = 0
        self.alone = 0  # takeovers in a row, without progress, in which no other run can be the cause

    @property
    def finished(self) -> bool:
        return self.status in FINISHED

    @property
    def largest_group(self) -> int:
        return 1 << 62 if self.crashes <= _SUSPECT else max((self.beside + 1) // 2, 1)


class Checker:
    """All runs, and what has been promised about them."""

    def __init__(self, kernel: Kernel, connection: apsw.Connection, remote: bool) -> None:
        self.kernel = kernel
        self.remote = remote
        self.runs: dict[str, Shadow] = {}
        self.counts: Counter[str] = Counter()
        self.workers: dict[str, Process] = {}  # by the ids under which they have registered
        self.began_us: int | None = None  # when the tool inside the transaction that is looked at began; else it is now
        self._connection = connection
        self._by_key: dict[int, Shadow] = {}
        self._touched: dict[int, None] = {}
        connection.set_update_hook(self._note)

    def _note(self, kind: int, database: str, table: str, rowid: int) -> None:
        if table == "perdure_runs":
            self._touched[rowid] = None
        elif table == "perdure_events" and kind != apsw.SQLITE_INSERT:
            self.kernel.fail(Violation(f"event {rowid & 0xFFFFFFFF} of run {rowid >> 32} was changed or deleted (G1)"))

    # -- after an operation -------------------------------------------------------------------------------------------
    def look(self, name: str, process: Process, appends: Sequence[Append] = ()) -> list[Shadow]:
        """Check what the operation of that process has changed. Returns the runs that it has changed."""
        if not self._touched:
            return []
        touched, self._touched = self._touched, {}
        leases = {append.lease.run_id: append.lease for append in appends}
        held = [(run.holder, run.crashes >= _SUSPECT) for run in self.runs.values() if run.holder is not None]  # before it
        found = [shadow for key in touched if (shadow := self._look_at(key, name, process, leases, held)) is not None]
        if name == "claim":
            self._check_groups({shadow.holder for shadow in found if shadow.holder is not None})
        return found

    def _look_at(
        self, key: int, name: str, process: Process, leases: dict[str, Any], held: Sequence[tuple[str | None, bool]]
    ) -> Shadow | None:
        row = self._connection.execute(_ROW, (key,)).fetchone()
        if row is None:
            return None  # rolled back
        run_id, status, waiting_for, ready_at, seq, head, epoch, holder, attention, crashes = row
        shadow = self._by_key.get(key)
        if shadow is None:
            shadow = self._by_key[key] = self.runs[run_id] = Shadow(run_id)
        before = len(shadow.ids)
        if epoch < shadow.epoch:
            raise Violation(f"run {run_id}: its epoch fell from {shadow.epoch} to {epoch} (G3)")
        if seq < before:
            raise Violation(f"run {run_id}: it is at event {seq}, and was at {before} (G1)")
        if shadow.holder not in (None, holder) and run_id not in leases:
            suspect = shadow.crashes >= _SUSPECT
            shadow.beside = sum(worker == shadow.holder and (other or not suspect) for worker, other in held) - 1
        if seq > before:
            self._check_writer(shadow, name, process, leases.get(run_id))
            for found in self._connection.execute(_EVENTS, (key << 32 | before, key << 32 | seq)).fetchall():
                self._fold(shadow, found, process)
        if len(shadow.ids) != seq or shadow.hashes[-1] != head:
            raise Violation(f"run {run_id}: its row speaks of event {seq}, its journal ends with {len(shadow.ids)} (G3, G11)")
        shadow.epoch, shadow.status, shadow.ready_at = epoch, status, ready_at
        shadow.waiting_for, shadow.attention, shadow.crashes = waiting_for, attention, crashes
        self._check_row(shadow, holder, given_up=name == "append" and shadow.holder is not None)
        shadow.holder = holder
        return shadow

    def _check_groups(self, workers: set[str]) -> None:
        """T34: no worker holds more suspects than half of those that any of them was lost with."""
        for worker in workers:
            group = [run for run in self.runs.values() if run.holder == worker and run.crashes >= _SUSPECT]
            self.counts["suspects beside others"] += len(group) if len(group) > 1 else 0
            for run in group:
                if len(group) > run.largest_group:
                    raise Violation(
                        f"run {run.run_id} is one of {len(group)} suspects of {worker}, and was lost with {run.beside} others (T34)"
                    )

    def _check_writer(self, shadow: Shadow, name: str, process: Process, lease: Any) -> None:
        """G4: only the holder writes to a run that is held. G10: no process writes to a run that has ended."""
        if shadow.finished:
            raise Violation(f"run {shadow.run_id}: {name} has written to it after its end (G10)")
        if lease is not None and name in ("append", "transact", "send"):
            holder = self.workers.get(lease.worker)
            if shadow.holder != lease.worker or shadow.epoch != lease.epoch or holder is not process:
                raise Violation(
                    f"run {shadow.run_id}: {process.name} has written under epoch {lease.epoch}, and the run is held by "
                    f"{shadow.holder} under {shadow.epoch} (G4)"
                )
        elif shadow.holder is not None and name != "claim":
            holder = self.workers.get(shadow.holder)
            if holder is None or not holder.dead or self.remote:
                raise Violation(f"run {shadow.run_id}: {process.name} has written to it ({name}), and {shadow.holder} holds it (G4)")

    def _fold(self, shadow: Shadow, found: tuple[Any, ...], process: Process) -> None:
        seq, event_id, ts, epoch, call, cause, data, digest = found
        link = identity.link(shadow.hashes[-1], seq, event_id.hex(), ts, epoch, call, cause, data.encode())
        if link != digest:
            raise Violation(f"run {shadow.run_id}: event {seq} breaks the chain (G11)")
        body = decode_body(data)
        event = Event(seq, event_id.hex(), ts, epoch, call, cause, body)
        if (cause is None) != isinstance(body, RunCreated) or (cause is not None and not 0 < cause < seq):
            raise Violation(f"run {shadow.run_id}: event {seq} ({event.type}) was caused by event {cause} (T36)")
        claims = isinstance(body, RunClaimed)
        if epoch != shadow.state.epoch + claims:
            raise Violation(f"run {shadow.run_id}: event {seq} has epoch {epoch} after {shadow.state.epoch} (G3)")
        self._before(shadow, event, process)
        try:
            shadow.state.apply(event)
        except StoreCorrupt as error:
            raise Violation(f"{error} (G3, G10)") from None
        if shadow.state.crashes == 0:
            shadow.alone = 0
        shadow.ids.append(event.event_id)
        shadow.hashes.append(digest)
        self._after(shadow, event)

    def _before(self, shadow: Shadow, event: Event, process: Process) -> None:
        """What an event must find before it."""
        body = event.body
        if isinstance(body, ToolCallInitiated) and body.approval is not None:
            self._check_approval(shadow, event, body, process)
        if isinstance(body, RunClaimed) and body.takeover:
            if body.lost_with != shadow.beside:
                raise Violation(
                    f"run {shadow.run_id}: event {event.seq} says {body.lost_with} were lost with it, it was {shadow.beside} (T34)"
                )
            shadow.alone += shadow.beside == 0
        if isinstance(body, AttentionNeeded) and body.reason == "poison":
            self.counts["poison"] += 1
            if shadow.state.crashes < _POISON or shadow.alone < _ALONE:
                raise Violation(
                    f"run {shadow.run_id} is called poison after {shadow.state.crashes} deaths, {shadow.alone} of them alone (T34)"
                )
        if isinstance(body, AttentionNeeded) and body.reason not in _FINE:
            raise Violation(f"run {shadow.run_id} needs attention: {body.reason}: {body.detail} (G7)")

    def _after(self, shadow: Shadow, event: Event) -> None:
        body, counts = event.body, self.counts
        match body:
            case ToolCallInitiated():
                assert event.call is not None
                shadow.intents[event.call, body.attempt] = self.kernel.now_us
                counts["intents"] += 1
                self._check_budget(shadow)
            case ToolCallCompleted():
                counts["calls completed"] += 1
            case ToolCallInDoubt():
                counts["doubts"] += 1
            case ToolCallResolved():
                counts["reconciles" if body.by == "reconcile" else "resolved by a person"] += 1
            case RunClaimed():
                created = shadow.state.created
                if created is not None and created.agent in self.workers[body.worker].lacks:
                    raise Violation(f"run {shadow.run_id}: claimed by {body.worker}, which does not have the agent {created.agent} (G12)")
                counts["claims"] += 1
                counts["takeovers"] += body.takeover
                counts["takeovers of an open intent"] += body.takeover and any(one.phase == "started" for one in shadow.state.open.values())
            case ChildStarted():
                counts["children"] += 1
            case _:
                pass
        if shadow.state.finished:
            counts[f"runs {shadow.state.status}"] += 1

    def _check_approval(self, shadow: Shadow, event: Event, body: ToolCallInitiated, process: Process) -> None:
        """G9: only the approved call, once, in time, by a person who may decide."""
        ask = shadow.state.asks.get(event.call or 0)
        name = f"run {shadow.run_id}: call {event.call} was started under approval {body.approval}"
        if ask is None or ask.request.approval != body.approval or ask.outcome != "approved":
            raise Violation(f"{name}, which is {ask and ask.outcome} (G9)")
        if body.approval in shadow.consumed:
            raise Violation(f"{name} for the second time (G9)")
        if ask.request.by and ask.by not in ask.request.by:
            raise Violation(f"{name}, which {ask.by} gave, and only {ask.request.by} may (G9)")
        call = shadow.state.calls[event.call or 0]
        if (body.digest or call.digest) != ask.digest:
            raise Violation(f"{name}, with other arguments (G9)")
        expires = ask.request.expires_at
        began_us = self.kernel.wall_us if self.began_us is None else self.began_us
        if expires is not None and began_us > expires + _SLACK_US and not process.was_skewed:
            raise Violation(f"{name} {(began_us - expires) / 1e6:.3f} s after its time was over (G9)")
        shadow.consumed.add(str(body.approval))
        self.counts["approvals consumed"] += 1

    def _check_budget(self, shadow: Shadow) -> None:
        """G14: no attempt begins beyond a limit on calls, of its own run or of a run above it."""
        owner: Shadow | None = shadow
        while owner is not None:
            created = owner.state.created
            assert created is not None
            limit = None if owner.state.budget is None else owner.state.budget.calls
            if limit is not None:
                used = sum(one.state.attempts for one in self.runs.values() if one is owner or one.run_id.startswith(f"{owner.run_id}/"))
                if used > limit and used > self._limit_of(owner.run_id):
                    raise Violation(f"run {shadow.run_id}: {used} calls under the budget of {owner.run_id}, which allows {limit} (G14)")
            owner = None if created.parent is None else self.runs.get(created.parent)

    def over_budget(self, run_id: str, bill: Callable[[str], int]) -> str | None:
        """T33.

        Even if workers die, the services never charge more for a run than its budget, or a budget above it, allows.
        """
        owner: Shadow | None = self.runs[run_id]
        while owner is not None:
            created = owner.state.created
            assert created is not None
            limit = None if owner.state.budget is None else owner.state.budget.usd_micros
            if limit is not None:
                wanted = bill(owner.run_id)
                self.counts["effects that a budget pays for"] += 1
                if wanted > limit and wanted > self._limit_of(owner.run_id, "usd_micros"):
                    return f"run {run_id}: effects for {wanted} under the budget of {owner.run_id}, which allows {limit} (T33)"
            owner = None if created.parent is None else self.runs.get(created.parent)
        return None

    def _is_unread(self, shadow: Shadow) -> bool:
        sql = "SELECT 1 FROM perdure_inbox i JOIN perdure_runs r ON r.id = i.run WHERE r.run_id = ?"
        return self._connection.execute(sql, (shadow.run_id,)).fetchone() is not None

    def _limit_of(self, run_id: str, what: str = "calls") -> int:
        """The present limit: an added amount may still be in the run's inbox."""
        sql = f"SELECT b.limit_{what} FROM perdure_budgets b JOIN perdure_runs r ON r.id = b.run WHERE r.run_id = ?"
        ((found,),) = self._connection.execute(sql, (run_id,)).fetchall()
        assert isinstance(found, int)
        return found

    def _check_row(self, shadow: Shadow, holder: str | None, given_up: bool) -> None:
        """G6: the run is over, held, ready, or says what it waits for."""
        name = f"run {shadow.run_id} ({shadow.status})"
        if shadow.finished:
            if holder is not None or shadow.ready_at is not None or not shadow.state.finished:
                raise Violation(f"{name} has ended, and is held by {holder} or ready at {shadow.ready_at} (G10)")
            return
        if holder is not None:
            if holder not in self.workers or shadow.ready_at is not None:
                raise Violation(f"{name} is held by {holder}, whom nobody knows, or ready (G6)")
            return
        soon = max(shadow.state.updated_at, self.kernel.wall_us)
        if given_up and (shadow.ready_at or 1 << 62) > soon and self._is_unread(shadow):
            raise Violation(f"{name} was given up with something unread, and is ready at {shadow.ready_at} (G6)")
        if shadow.ready_at is not None or shadow.status == "paused":
            return
        if shadow.status == "needs_attention":
            if shadow.attention is None:
                raise Violation(f"{name} does not say why (G6)")
            return
        if not shadow.waiting_for:
            raise Violation(f"{name} is neither held nor ready, and waits for nothing (G6)")
        state = shadow.state
        if shadow.status == "waiting_approval" and not state.pending:
            raise Violation(f"{name} waits for an approval, and none is pending (G6)")

    # -- acknowledgements and operations
    # ---------------------------------------------------------------------------------
    def acknowledged(self, appends: Iterable[Append]) -> None:
        """G1: a process was told that these appends are durable."""
        for append in appends:
            shadow = self.runs[append.lease.run_id]
            for sealed in append.events:
                seq = sealed.event.seq
                if seq >= len(shadow.hashes) or shadow.hashes[seq] != sealed.hash:
                    raise Violation(f"run {shadow.run_id}: event {seq} was acknowledged, and is not there (G1)")

    def begins(self, call: Call, effect: str, process: Process) -> bool:
        """G2: the intent of what begins is durable. Whether the process has stood still since it was."""
        if effect in ("read", "transaction"):
            return False  # needs none; is in the same commit
        shadow = self.runs[call.run_id]
        then_us = shadow.intents.get((call.number, call.attempt))
        if then_us is None:
            failure = Violation(f"run {call.run_id}: attempt {call.attempt} at call {call.number} ({effect}) begins without an intent (G2)")
            self.kernel.fail(failure)
            raise failure
        return process.stood_still_since(then_us)
