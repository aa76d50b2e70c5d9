"""The Store over any SQL database: each part of the protocol in its own module, joined here. A dialect brings the database."""

from __future__ import annotations

from abc import ABC, abstractmethod
from asyncio import AbstractEventLoop
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from perdure.core.approval import Ruling, Standing
from perdure.core.budget import Amounts
from perdure.core.events import AnyBody, Event, Terminal
from perdure.core.rate import Rate
from perdure.core.suspects import Group
from perdure.settings import Queue
from perdure.store import blobs, budgets
from perdure.store.api import (
    Append,
    Appended,
    ApprovalFilter,
    ApprovalRow,
    Backlog,
    Claimed,
    CostRow,
    Family,
    Filter,
    Head,
    InboxRow,
    Ledger,
    Moved,
    NewRun,
    NoticeRow,
    Place,
    Prunable,
    Pruned,
    RateRow,
    RunRow,
    Served,
    Status,
    Stored,
    Tombstone,
    Whole,
    WorkerRow,
)
from perdure.store.approvals import Approvals
from perdure.store.bell import Bell, concerns_others
from perdure.store.claims import Claims
from perdure.store.closing import Closing
from perdure.store.consequences import Consequences
from perdure.store.costs import costs
from perdure.store.cursor import Database
from perdure.store.delivery import Delivery
from perdure.store.journal import Journal
from perdure.store.liveness import Liveness
from perdure.store.mailbox import Mailbox
from perdure.store.notices import Notices
from perdure.store.pruning import Pruning
from perdure.store.rates import Rates
from perdure.store.rows import key_of, listed_row, run_row
from perdure.store.wholes import Wholes


class SqlStore(ABC):
    """Everything but what only the dialect knows: how to look after its database, and how a part of this is done better there."""

    remote = False
    pause_s = 0.0

    def __init__(self, url: str, database: Database, bell: Bell, liveness: Liveness) -> None:
        self.url = url
        self._database = database
        self._bell = bell
        self._liveness = liveness
        delivery = Delivery(liveness)
        consequences = Consequences(delivery)
        self._journal = self._make_journal(consequences)
        self._claims = self._make_claims(self._journal)
        self._mailbox = Mailbox(database, delivery, consequences)
        self._approvals = Approvals(database, delivery)
        self._notices = Notices(database)
        self._rates = Rates(database)
        self._closing = Closing(database, liveness)
        self._wholes = self._make_wholes()
        self._pruning = Pruning(database)

    @property
    def ahead_us(self) -> int:
        return 0

    def _make_journal(self, consequences: Consequences) -> Journal:
        return Journal(self._database, consequences)

    def _make_claims(self, journal: Journal) -> Claims:
        return Claims(self._database, journal, self._liveness)

    def _make_wholes(self) -> Wholes:
        return Wholes(self._database)

    def create_run(self, new: NewRun) -> tuple[RunRow, bool]:
        row, created = self._mailbox.create_run(new)
        if created:
            self._bell.ring()
        return row, created

    def create_runs(self, news: Sequence[NewRun]) -> list[tuple[RunRow, bool]]:
        answers = self._mailbox.create_runs(news)
        if any(created for _, created in answers):
            self._bell.ring()
        return answers

    def get(self, run_id: str) -> RunRow | None:
        rows = self._database.read("run_by_id", (run_id,))
        return run_row(rows[0]) if rows else None

    def family(self, run_id: str) -> list[RunRow]:
        return [listed_row(row) for row in self._database.read("family_of_run", {"run_id": run_id})]

    def append(self, batch: Sequence[Append]) -> list[Appended]:
        answers = self._journal.append(batch)
        if concerns_others(batch, answers):
            self._bell.ring()
        return answers

    def send(self, batch: Sequence[Append], loop: AbstractEventLoop, done: Callable[[list[Appended | None]], None]) -> list[Append]:
        return list(batch)

    def transact(self, head: Append, work: Callable[[Any], tuple[Append, Any]]) -> tuple[Appended, Any]:
        written = [head]

        def kept(connection: Any) -> tuple[Append, Any]:
            tail, value = work(connection)
            written.append(tail)
            return tail, value

        answer, value = self._journal.transact(head, kept)
        if concerns_others(written, [answer] * len(written)):
            self._bell.ring()
        return answer, value

    def read(self, run_id: str, after: int = 0) -> list[Event]:
        return self._journal.read(run_id, after)

    def stored(self, run_id: str) -> list[Stored]:
        return self._journal.stored(run_id)

    def hash_at(self, run_id: str, seq: int) -> bytes:
        return self._journal.hash_at(run_id, seq)

    def growing(self, after: Place = (0, 0), newest: Place = (0, 0), limit: int = 1000) -> list[tuple[Place, RunRow]]:
        places = {"after_commit": after[0], "after": after[1], "newest_commit": newest[0], "newest": newest[1]}
        rows = self._database.read("growing_runs", {**places, "limit": limit})
        return [((row[-1], key_of(row)), listed_row(row)) for row in rows]

    def blob(self, digest: str) -> bytes:
        return blobs.get(self._database, digest)

    def register(
        self, worker: str, name: str, pid: int, now: int, serves: Sequence[Served] = (), queues: Sequence[str] | None = None
    ) -> None:
        self._claims.register(worker, name, pid, now, serves, queues)

    def unregister(self, worker: str, now: int) -> None:
        self._claims.unregister(worker, now)
        self._bell.ring()

    def renew(self, worker: str, now: int) -> None:
        self._claims.renew(worker, now)

    def claim(
        self,
        worker: str,
        served: Sequence[Served],
        limit: int,
        now: int,
        *,
        run_id: str | None = None,
        below: str | None = None,
        queues: Sequence[str] | None = None,
        limits: Mapping[str, Queue] | None = None,
    ) -> list[Claimed]:
        if run_id is not None:
            return self._claims.claim_this(worker, served, run_id, now, limits or {})
        if below is not None:
            return self._claims.claim_below(worker, served, below, limit, now)
        return self._claims.claim(worker, served, limit, now, queues, limits or {})

    def reap(self, worker: str, lease_us: int, now: int) -> int:
        lost = self._claims.reap(worker, lease_us, now)
        if lost:
            self._bell.ring()
        return lost

    def held(self, worker: str) -> list[tuple[str, int]]:
        return self._claims.held(worker)

    def let_go(self, worker: str, runs: Sequence[tuple[str, int]], now: int) -> int:
        lost = self._claims.let_go(worker, runs, now)
        if lost:
            self._bell.ring()
        return lost

    def workers(self, now: int, lease_us: int) -> list[WorkerRow]:
        return self._claims.workers(now, lease_us)

    def backlog(self, now: int) -> list[Backlog]:
        return self._claims.backlog(now)

    def suspects(self) -> dict[str, Group]:
        return self._claims.suspects()

    def post(
        self,
        run_id: str,
        call: int | None,
        body: AnyBody,
        *,
        event_id: str,
        now: int,
        status: Status | None = None,
        expect: Callable[[RunRow], None] | None = None,
    ) -> bool:
        appended = self._mailbox.post(run_id, call, body, event_id=event_id, now=now, status=status, expect=expect)
        self._bell.ring()
        return appended

    def end(self, run_id: str, body: AnyBody, *, event_id: str, now: int, expect: Callable[[RunRow], None] | None = None) -> None:
        assert isinstance(body, Terminal), body
        self._mailbox.end(run_id, body, event_id=event_id, now=now, expect=expect)
        self._bell.ring()

    def decide(
        self,
        approval: str,
        judge: Callable[[Standing, ApprovalRow], Ruling],
        *,
        event_id: str,
        now: int,
        tenant: str | None = None,
        blobs: tuple[bytes, ...] = (),
    ) -> ApprovalRow:
        decided = self._approvals.decide(approval, judge, event_id=event_id, now=now, tenant=tenant, blobs=blobs)
        self._bell.ring()
        return decided

    def approval(self, approval: str) -> ApprovalRow | None:
        return self._approvals.get(approval)

    def approvals(self, wanted: ApprovalFilter) -> list[ApprovalRow]:
        return self._approvals.list(wanted)

    def inbox(self, worker: str) -> list[InboxRow]:
        return self._mailbox.inbox(worker)

    def unread(self, run_id: str) -> list[InboxRow]:
        return self._mailbox.unread(run_id)

    def next_ready(self, served: Sequence[Served], queues: Sequence[str] | None = None) -> int | None:
        return self._claims.next_ready(served, queues)

    def left_behind(self, served: Sequence[Served], now: int, *, but: Sequence[str] = ()) -> list[tuple[Served, Served, str]]:
        return self._claims.left_behind(served, now, but)

    def version(self) -> int:
        return self._database.version()

    def listen(self, ring: Callable[[], None]) -> Callable[[], None]:
        return self._bell.listen(ring)

    def admit(self, rate: Rate, now: int) -> int:
        return self._rates.admit(rate, now)

    def hold_back(self, key: str, until: int) -> None:
        self._rates.hold_back(key, until)

    def ledgers(self, run_id: str) -> list[Ledger]:
        return budgets.ledgers(self._database, run_id)

    def reserved(self, run_id: str) -> Amounts:
        return budgets.reserved(self._database, run_id)

    def over_budget(self, run_id: str) -> list[str]:
        return budgets.over_budget(self._database, run_id)

    def costs(
        self, by: Literal["agent", "tenant", "model", "day", "run", "root", "tool"], *, since: int = 0, tenant: str | None = None
    ) -> list[CostRow]:
        return costs(self._database, by, since, tenant)

    def take_notices(self, now: int, limit: int, hold_us: int) -> list[NoticeRow]:
        return self._notices.take(now, limit, hold_us)

    def notice_done(self, notice_id: int) -> None:
        self._notices.done(notice_id)

    def notice_failed(self, notice_id: int, *, next_at: int, error: str) -> None:
        self._notices.failed(notice_id, next_at, error)

    def next_notice(self) -> int | None:
        return self._notices.next_at()

    def moved(self) -> Moved | None:
        return self._closing.moved()

    def close_journal(self, to_url: str, *, by: str, now: int, lease_us: int) -> Moved:
        return self._closing.close(to_url, by=by, now=now, lease_us=lease_us)

    def finish_move(self) -> None:
        self._closing.finish()

    def reopen_journal(self) -> None:
        self._closing.reopen()
        self._bell.ring()

    def count_runs(self) -> int:
        return self._wholes.count()

    def other_tables(self) -> list[str]:
        return [str(name) for (name,) in self._database.read("other_tables")]

    def families(self, after: int = 0, limit: int = 500) -> list[Family]:
        return self._wholes.families(after, limit)

    def heads(self, run_ids: Sequence[str]) -> dict[str, Head]:
        return self._wholes.heads(run_ids)

    def wholes(self, run_ids: Sequence[str]) -> list[Whole]:
        return self._wholes.get(run_ids)

    def take_in(self, parts: Callable[[], Iterable[Sequence[Whole]]]) -> None:
        self._wholes.take_in(parts)
        self._bell.ring()

    def missing_blobs(self, digests: Iterable[str]) -> list[str]:
        return self._wholes.missing_blobs(digests)

    def put_blobs(self, blobs: Sequence[bytes]) -> None:
        self._wholes.put_blobs(blobs)

    def give_back(self, families: Sequence[Sequence[tuple[str, int, bytes]]], *, by: str, now: int) -> list[str]:
        return self._pruning.give_back(families, by=by, now=now)

    def rates(self) -> list[RateRow]:
        return self._wholes.rates()

    def take_in_rates(self, rates: Sequence[RateRow]) -> None:
        self._wholes.take_in_rates(rates)

    def prunable(self, before: int, statuses: Sequence[str], *, after: int = 0, limit: int = 100) -> list[Prunable]:
        return self._pruning.prunable(before, statuses, after, limit)

    def prune(self, roots: Sequence[str], before: int, *, by: str, now: int) -> Pruned:
        return self._pruning.prune(roots, before, by=by, now=now)

    def tombstone(self, run_id: str) -> Tombstone | None:
        return self._pruning.tombstone(run_id)

    def tombstones(self, after: int = 0, limit: int = 1000) -> list[tuple[int, Tombstone]]:
        return self._pruning.tombstones(after, limit)

    def take_in_tombstones(self, tombstones: Sequence[Tombstone]) -> None:
        self._pruning.take_in(tombstones)

    @abstractmethod
    def facts(self) -> dict[str, str]:
        """What the dialect knows of its database; `notice_facts` go with it."""

    @abstractmethod
    def problems(self) -> list[str]: ...

    def notice_facts(self) -> dict[str, str]:
        """The part of `facts` that is the same in every dialect."""
        failing, last_error = self._database.read("failing_notices")[0]
        return {"notices_failing": str(failing), "notice_error": last_error or "", **self._pruning.facts()}

    def close(self) -> None:
        try:
            self._bell.close()
            self._database.close()  # which may write, and so fail
        finally:
            self._liveness.close()

    # Last, because inside the class the name `list` means this method from here on.
    def list(self, wanted: Filter) -> list[RunRow]:
        return [listed_row(row) for row in self._database.read("list_runs", msgspec.structs.asdict(wanted))]
