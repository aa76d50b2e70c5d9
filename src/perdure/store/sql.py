"""The Store over any SQL database: one object made of parts, one for each concern (see part.py).

A dialect adds the database.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import msgspec
from msgspec import structs

from perdure.core.events import RunFailed, StatusReported, ToolCallInitiated
from perdure.store.api import Current, OpenAttempt, Place, RunRow, StoreFigures, Unfinished, Waiting, Watched
from perdure.store.approvals import Approvals
from perdure.store.archive import JournalMove, Wholes, as_json
from perdure.store.artifacts import Artifacts
from perdure.store.batches import Batches
from perdure.store.chain import JournalChain
from perdure.store.claims import Claims
from perdure.store.finding import Finding
from perdure.store.journal import Journal
from perdure.store.limits import Budgets, Rates
from perdure.store.mailbox import Mailbox
from perdure.store.notices import Notices
from perdure.store.progress import Progresses
from perdure.store.pruning import Pruning
from perdure.store.repairs import Repairs
from perdure.store.rows import body_or_none, key_of, listed_row, run_row
from perdure.store.schedules import Schedules


class SqlStore(
    Journal,
    Claims,
    Schedules,
    Mailbox,
    Approvals,
    Artifacts,
    Rates,
    Budgets,
    Finding,
    Notices,
    Progresses,
    Batches,
    JournalMove,
    Wholes,
    Pruning,
    JournalChain,
    Repairs,
    ABC,
):
    """The code that all dialects share. A dialect adds its database, and may replace parts by its own."""

    remote = False
    schema_version: int
    pause_s = 0.0
    cut_off_after_s = float("inf")

    @property
    def ahead_us(self) -> int:
        return 0

    def get(self, run_id: str) -> RunRow | None:
        rows = self._database.read("run_by_id", (run_id,))
        return run_row(rows[0]) if rows else None

    def current(self, run_ids: Sequence[str]) -> dict[str, Current]:
        found = {run_id: Current() for run_id in run_ids}
        for run_id, ts, call, data in self._database.read("current_of_runs", {"runs": msgspec.json.encode(run_ids).decode()}):
            now = found[run_id]
            match body_or_none(data, f"an event of run {run_id}"):
                case StatusReported(text=text):
                    found[run_id] = structs.replace(now, said=text)
                case RunFailed(failure=failure):
                    found[run_id] = structs.replace(now, failure=failure)
                case ToolCallInitiated(tool=tool, attempt=attempt):
                    running = sorted((*now.running, OpenAttempt(call, tool, attempt, ts)), key=lambda one: one.call)
                    found[run_id] = structs.replace(now, running=tuple(running))
        for row in self.progress([run_id for run_id, now in found.items() if now.running]):
            now = found[row.run_id]
            running = [
                structs.replace(one, progress=row.progress) if (one.call, one.attempt) == (row.call, row.attempt) else one
                for one in now.running
            ]
            found[row.run_id] = structs.replace(now, running=tuple(running))
        return found

    def family(self, run_id: str) -> list[RunRow]:
        return [listed_row(row) for row in self._database.read("family_of_run", {"run_id": run_id})]

    def watched(self, run_ids: Collection[str], families: Collection[str]) -> dict[str, Watched]:
        wanted = {"run_ids": as_json(sorted(run_ids)), "families": as_json(sorted(families))}
        rows: dict[str, RunRow] = {}
        below: dict[str, dict[str, RunRow]] = {}
        for found in self._database.read("watched_runs", wanted):
            watched = found[-1]
            if found[0] == watched:
                rows[watched] = run_row(found)
            else:
                below.setdefault(watched, {})[found[0]] = listed_row(found)
        return {run_id: Watched(row, tuple(below.get(run_id, {}).values())) for run_id, row in rows.items()}

    def growing(self, after: Place = (0, 0), newest: Place = (0, 0), limit: int = 1000) -> list[tuple[Place, RunRow]]:
        places = {"after_commit": after[0], "after": after[1], "newest_commit": newest[0], "newest": newest[1]}
        rows = self._database.read("growing_runs", {**places, "limit": limit})
        return [((row[-1], key_of(row)), listed_row(row)) for row in rows]

    def version(self) -> int:
        return self._database.version()

    def listen(self, ring: Callable[[], None]) -> Callable[[], None]:
        return self._bell.listen(ring)

    def watch(self, moved: Callable[[Collection[str] | None], None]) -> Callable[[], None]:
        return self._bell.watch(moved)

    @abstractmethod
    def facts(self) -> dict[str, str]:
        """Facts about the database, for `perdure doctor`; they include `common_facts`."""

    @abstractmethod
    def problems(self) -> list[str]: ...

    @abstractmethod
    def snapshot_to(self, file: Path) -> AbstractContextManager[bool]: ...

    @abstractmethod
    def restore_schema(self, *, check: bool = False) -> list[str]: ...

    def common_facts(self) -> dict[str, str]:
        """The part of `facts` that is the same in every dialect."""
        failing, last_error = self._database.read("failing_notices")[0]
        return {"notices_failing": str(failing), "notice_error": last_error or "", **self.pruned_facts(), **self.artifact_facts()}

    def close(self) -> None:
        try:
            self._bell.close()
            self._database.close()  # closing may write, and therefore fail
        finally:
            self._liveness.close()

    def figures(self, now: int) -> StoreFigures:
        read = self._database.read_beside
        return StoreFigures(
            unfinished=[Unfinished(*row) for row in read("unfinished_runs")],
            ready=[Waiting(*row) for row in read("ready_runs", (now,))],
            pending=[Waiting(*row) for row in read("pending_approvals")],
            held=dict(read("held_by_workers")),
        )
