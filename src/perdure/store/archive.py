"""Reads whole runs from one journal and writes them into another; also closes a journal before a move.

Events are copied byte for byte, with all rows that belong to the run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
from msgspec import structs

from perdure import shell
from perdure.core.identity import undo_id
from perdure.errors import AlreadyRunning, Conflict, NotFound, StoreCorrupt, StoreError, StoreUnavailable
from perdure.store.api import BACKUP, FINISHED, ArtifactRow, Family, Head, Member, Moved, NewFork, RateRow, Stored, Whole, undone
from perdure.store.artifacts import keep, take_in_bytes
from perdure.store.blobs import put_unused
from perdure.store.claims import LEASE_RAN_OUT, PROVEN_DEAD, lose_runs
from perdure.store.cursor import Cursor, Row
from perdure.store.part import Part
from perdure.store.queues import line_of
from perdure.store.rows import has_arrived

_AGENT, _VERSION, _TENANT, _QUEUE, _PRIORITY = 1, 2, 3, 5, 19  # the positions of these columns in Whole.run
_FEW_BLOBS = 500
_NO_HASH = bytes(32)


class Wholes(Part):
    """Reads and writes runs with all rows that belong to them.

    The copied rows refer to runs by run id, because a database key is valid in one database only.
    """

    def count_runs(self) -> int:
        ((runs,),) = self._database.read("count_runs")
        assert isinstance(runs, int)
        return runs

    def other_tables(self) -> list[str]:
        return [str(name) for (name,) in self._database.read("other_tables")]

    def families(self, after: int = 0, limit: int = 500) -> list[Family]:
        roots = self._database.read("roots", {"after": after, "limit": limit})
        members: dict[str, list[Member]] = defaultdict(list)
        for root, run_id, _, seq, head, status, _ in self._database.read("families", {"roots": as_json([row[1] for row in roots])}):
            members[root].append(Member(run_id, seq, head, finished=status in FINISHED))
        return [Family(place, root, tuple(members[root])) for place, root in roots if root in members]

    def heads(self, run_ids: Sequence[str]) -> dict[str, Head]:
        wanted = {"run_ids": as_json(run_ids)}
        found = {row[0]: Head(row[1], row[2], pruned=True) for row in self._database.read("pruned_heads", wanted)}
        return found | {row[0]: Head(row[1], row[2], pruned=False) for row in self._database.read("heads", wanted)}

    def wholes(self, run_ids: Sequence[str]) -> list[Whole]:
        rows = self._database.read("whole_runs", {"run_ids": as_json(run_ids)})
        keys = {"runs": as_json([row[0] for row in rows])}
        beside = {name: self._beside(name, keys) for name in _BESIDE}
        return [
            Whole(
                run=row[1:-1],
                ledger_of=row[-1],
                events=[Stored(*event) for event in beside["whole_events"][row[0]]],
                approvals=beside["whole_approvals"][row[0]],
                signals=beside["whole_signals"][row[0]],
                budgets=beside["whole_budgets"][row[0]],
                reserved=beside["whole_reserved"][row[0]],
                inbox=beside["whole_inbox"][row[0]],
                notices=beside["whole_notices"][row[0]],
                blobs=[digest.hex() for (digest,) in beside["whole_blob_uses"][row[0]]],
                artifacts=[artifact for (artifact,) in beside["whole_artifact_uses"][row[0]]],
                checkpoints=beside["whole_checkpoints"][row[0]],
                labels=[(key, value) for key, value in beside["whole_labels"][row[0]]],
            )
            for row in rows
        ]

    def _beside(self, name: str, keys: dict[str, str]) -> dict[int, list[Row]]:
        found: dict[int, list[Row]] = defaultdict(list)
        for row in self._database.read(name, keys):
            found[row[0]].append(row[1:])
        return found

    def take_in(self, parts: Callable[[], Iterable[Sequence[Whole]]]) -> None:
        """Insert all runs in one transaction. If the id of a run is taken: Conflict, and nothing is inserted."""
        first: list[str] = []

        def write(cursor: Cursor) -> None:
            lines: dict[Row, int] = {}
            for part in parts():
                events: list[Row] = []
                for whole in part:
                    events += _insert(cursor, whole, lines)
                    first[:1] = [whole.run_id]
                if events:
                    self._take_in_events(cursor, events)

        self._database.write(write, lambda cursor, _: not first or cursor.one("run_key", (first[0],)) is not None)
        self._bell.ring()

    def take_in_specimen(
        self, wholes: Sequence[Whole], blobs: Sequence[bytes], artifacts: Callable[[], Iterable[tuple[ArtifactRow, Iterable[bytes]]]]
    ) -> None:
        """Insert specimens, and their blobs and artifacts, in one transaction: a crash leaves all of it or nothing."""
        taken = Conflict("the run was created here, or pruned, while its file was read; nothing was imported: try again")

        def write(cursor: Cursor) -> None:
            if cursor.all("pruned_heads", {"run_ids": as_json([whole.run_id for whole in wholes])}):
                raise taken
            put_unused(cursor, blobs)
            for row, chunks in artifacts():
                take_in_bytes(cursor, row, chunks)
            lines: dict[Row, int] = {}
            for whole in wholes:
                assert whole.run[-1] is not None, whole.run_id  # this is a specimen: no worker may ever claim it
                if cursor.one("run_key", (whole.run_id,)) is not None:
                    raise taken
                self._take_in_events(cursor, _insert(cursor, whole, lines))

        self._database.write(write, lambda cursor, _: cursor.one("run_key", (wholes[0].run_id,)) is not None)

    def insert_fork(self, new: NewFork) -> None:
        """Insert a fork: a crash leaves all of it or nothing."""
        run_id = new.whole.run_id
        taken = Conflict(f"run {run_id} exists; nothing was written: choose another id for the fork")

        def write(cursor: Cursor) -> None:
            if cursor.all("pruned_heads", {"run_ids": as_json([run_id])}):
                raise Conflict(f"run {run_id} ran in this journal and was pruned: its id is not used again; choose another id")
            if cursor.one("run_key", (run_id,)) is not None:
                raise taken
            # While the parent's row is locked, no prune can delete the blobs and artifacts that both use.
            root = new.parent.partition("/")[0]
            keys = [cursor.one("run_to_keep", (name,)) for name in dict.fromkeys((root, new.parent))]
            if None in keys:
                raise NotFound(f"run {new.parent} was pruned meanwhile; nothing was written")
            # A prune --before-checkpoint waits for this lock: it deletes blobs that no other run uses. An undo whose transaction
            # has not ended yet comes after the fork: that is allowed.
            cursor.one("run_to_change", (new.parent,))
            if new.is_live and cursor.one("run_key", (undo_id(new.parent),)) is not None:
                raise undone(new.parent, "no live fork can be made of it")
            shared = {"runs": as_json([key[0] for key in keys if key is not None])}
            artifacts = {str(artifact) for _, artifact in cursor.all("whole_artifact_uses", shared)}
            put_unused(cursor, new.blobs)
            events = _insert(cursor, structs.replace(new.whole, artifacts=sorted(artifacts)), {}, taken)
            self._take_in_events(cursor, events)
            _copy_events(cursor, new, key=events[0][0])

        # No other run has the fork's last event: it is not a copy.
        self._database.write(write, lambda cursor, _: has_arrived(cursor, run_id, new.whole.events[-1].event_id.hex()))
        self._bell.ring()

    def _take_in_events(self, cursor: Cursor, events: Sequence[Row]) -> None:
        cursor.each("insert_event", events)

    def missing_blobs(self, digests: Iterable[str]) -> list[str]:
        wanted = sorted(set(digests))
        missing: list[str] = []
        for start in range(0, len(wanted), _FEW_BLOBS):
            page = wanted[start : start + _FEW_BLOBS]
            known = {row[0].hex() for row in self._database.read("known_blobs", {"digests": as_json(page)})}
            missing += [digest for digest in page if digest not in known]
        return missing

    def put_blobs(self, blobs: Sequence[bytes]) -> None:
        """Store blobs that no run uses yet.

        A prune does not delete these blobs, because it only looks at the blobs of the runs that it deletes.
        """
        self._database.write(lambda cursor: put_unused(cursor, blobs), lambda cursor, _: False)

    def rates(self) -> list[RateRow]:
        return [RateRow(*row) for row in self._database.read("rates")]

    def take_in_rates(self, rates: Sequence[RateRow]) -> None:
        """Merge rate limits: each key gets the later times, so that both journals together keep the rate."""

        def write(cursor: Cursor) -> None:
            for rate in rates:
                cursor.change("make_rate", (rate.key,))
                due, paused_until, seen_at = cursor.all("rate_to_change", (rate.key,))[0]
                later = {
                    "due": max(due, rate.due),
                    "paused_until": max(paused_until, rate.paused_until),
                    "seen_at": max(seen_at, rate.seen_at),
                }
                cursor.change("book_rate", {"key": rate.key, **later})

        self._database.write(write, lambda cursor, _: False)


_BESIDE = (
    *("whole_events", "whole_approvals", "whole_signals", "whole_budgets"),
    *("whole_reserved", "whole_inbox", "whole_notices", "whole_blob_uses", "whole_artifact_uses", "whole_checkpoints", "whole_labels"),
)


def as_json(values: Iterable[Any]) -> str:
    """A list of values as one query parameter."""
    return msgspec.json.encode(list(values)).decode()


def _insert(cursor: Cursor, whole: Whole, lines: dict[Row, int], taken: Conflict | None = None) -> list[Row]:
    """Insert the run without its events. `taken`: the error if another transaction has just used its id.

    Returns the rows of the events, so that the caller can insert the events of many runs together.
    """
    run = whole.run
    kind = (run[_AGENT], run[_VERSION], run[_QUEUE], run[_TENANT], run[_PRIORITY])
    if kind not in lines:
        lines[kind] = line_of(cursor, agent=kind[0], version=kind[1], queue=kind[2], tenant=kind[3], priority=kind[4])
    inserted = cursor.all("take_in_run", (*run, lines[kind], whole.ledger_of))
    if not inserted:
        raise taken or Conflict(
            f"run {whole.run_id} was created in the target during the copy; nothing of its family was copied: try again"
        )
    key = inserted[0][0]
    cursor.each("take_in_approval", [(key, *row) for row in whole.approvals])
    for topic, name in whole.signals:
        cursor.change("remember_signal", (key, topic, name))
    for budget in whole.budgets:
        cursor.change("take_in_budget", (key, *budget))
        cursor.change("own_ledger", (key,))
    for reserved in whole.reserved:
        cursor.change("reserve", (key, *reserved))
    cursor.each("take_in_inbox", [(key, *row[:-1], row[-1].decode()) for row in whole.inbox])
    cursor.each("take_in_checkpoint", [(key, *row) for row in whole.checkpoints])
    cursor.each("set_label", [(name, value, key) for name, value in whole.labels])
    cursor.each("take_in_notice", [(key, *row) for row in whole.notices])
    cursor.each("use_blob", [(key, bytes.fromhex(digest)) for digest in whole.blobs])
    keep(cursor, key, whole.artifacts, whole.outside)
    return [_event(key, whole.run_id, stored) for stored in whole.events]


def _copy_events(cursor: Cursor, new: NewFork, key: int) -> None:
    """Copy the events that are the same in the parent. Their bytes do not leave the database."""
    last = max(new.copied, default=0)
    others = [seq for seq in range(1, last + 1) if seq not in new.copied]
    copied = cursor.change(
        "copy_events",
        {
            "run": key,
            "parent": new.parent,
            "last": last,
            "others": as_json(others),
            "hashes": b"".join(new.copied.get(seq, _NO_HASH) for seq in range(1, last + 1)),
        },
    )
    if copied != len(new.copied):
        raise NotFound(f"events of run {new.parent} were removed meanwhile; nothing was written")


def _event(key: int, run_id: str, stored: Stored) -> Row:
    try:
        data = stored.data.decode()
    except UnicodeDecodeError:
        raise StoreCorrupt(
            f"event {stored.seq} of run {run_id} is not text any more and cannot be copied",
            hint=f"see what is damaged: {shell.command('verify', run_id)}",
        ) from None
    return (key, stored.seq, stored.event_id, stored.ts, stored.epoch, stored.call, stored.cause, data, stored.hash)


# -- closing a journal before it moves, so that no run ever continues in two journals


class JournalMove(Part):
    """The states of a journal: open, moving, moved. Until the move has finished, the journal can be reopened."""

    def moved(self) -> Moved | None:
        return moved_from(self._database.read("moved"))

    def check_open(self) -> None:
        if (moved := self.moved()) is not None:
            raise moved_error(self._database.where, moved)

    def close_journal(self, to_url: str, *, by: str, now: int, lease_us: int) -> Moved:
        """In one transaction: check that no worker is alive, free the runs of dead workers, and close the journal.

        After the commit of this transaction, no run can be written to.
        """

        def shut(cursor: Cursor) -> Moved:
            cursor.change("lock_journal")
            cursor.change("lock_workers")
            found = moved_from(cursor.all("moved"))
            if found is not None:
                return _same_place(found, to_url, self._database.where)
            self._free_runs(cursor, now, lease_us)
            cursor.change("close_journal", (to_url, by, now))
            return Moved(to_url, by, now, done=False)

        return self._database.write(shut, lambda cursor, _: bool(cursor.all("moved")))

    def finish_move(self) -> None:
        self._database.write(
            lambda cursor: cursor.change("finish_move"), lambda cursor, _: (moved_from(cursor.all("moved")) or _NEVER).done
        )

    def mark_backup(self, of: str, *, by: str, now: int) -> None:
        def shut(cursor: Cursor) -> None:
            cursor.change("close_journal", (f"{BACKUP}{of}", by, now))
            cursor.change("finish_move")

        self._database.write(shut, lambda cursor, _: bool(cursor.all("moved")))

    def reopen_journal(self) -> None:
        def open_again(cursor: Cursor) -> None:
            found = moved_from(cursor.all("moved"))
            if found is not None and found.done:
                raise Conflict(f"{self._database.where}: {found.words}; a finished move cannot be undone: copy the journal back instead")
            cursor.change("reopen_journal")

        self._database.write(open_again, lambda cursor, _: not cursor.all("moved"))
        self._bell.ring()

    def _free_runs(self, cursor: Cursor, now: int, lease_us: int) -> None:
        workers = cursor.all("list_workers", {"now": now})
        gone = {row[0] for row in workers if self._liveness.is_dead(row[0])}
        alive = [row for row in workers if row[0] not in gone and row[-1] <= (row[8] or lease_us)]
        if alive:
            names = ", ".join(f"{row[1]} ({row[5]} run{'' if row[5] == 1 else 's'})" for row in alive[:10])
            raise AlreadyRunning(
                "the journal has live workers", hint=f"{names}: stop them first (SIGTERM drains them), or wait for that with --wait"
            )
        silent = {row[0] for row in workers} - gone
        for dead in gone:
            lose_runs(cursor, dead, now, PROVEN_DEAD)
            cursor.change("delete_worker", (dead,))
        for other in [*silent, *(row[0] for row in cursor.all("holders_without_worker"))]:
            lose_runs(cursor, other, now, LEASE_RAN_OUT)
        ((held,),) = cursor.all("count_held")
        if held:
            raise StoreUnavailable(
                f"is in use: {held} runs are locked by other transactions; nothing was changed: try again", where=self._database.where
            )


_NEVER = Moved("", "", 0, done=False)


def moved_from(rows: list[Row]) -> Moved | None:
    """The `Moved` from the rows of the statement `moved`. None: the journal is open."""
    if not rows:
        return None
    state, to_url, by, at = rows[0]
    return Moved(to_url, by, at, done=state == "moved")


def _same_place(found: Moved, to_url: str, where: str) -> Moved:
    if found.to_url != to_url:
        raise Conflict(f"{where}: {found.words}, and cannot be moved to {to_url} as well")
    return found


def moved_error(where: str, moved: Moved | None) -> StoreError:
    """The error for a write that the triggers of the database refused because the journal is closed."""
    if moved is None:
        return StoreError("was closed for a move and is open again; try again", where=where)
    if moved.is_backup:
        return StoreError("is a backup, and accepts no writes", where=where, hint=moved.words)
    how = "is closed: its journal was moved" if moved.done else "is closed: its journal is being moved, and accepts no more writes"
    return StoreError(how, where=where, hint=moved.words)
