"""Retention: prunes whole families that ended long ago, and leaves a tombstone for each of their runs.

A family is pruned whole or not at all, because its journals refer to each other. The tombstone has three uses. The
triggers of the database allow the deletion only if there is a tombstone. The id cannot be used again. The tombstone
has the head of the hash chain, to check a copy in another place.

A blob is deleted if no other run uses it. Every commit that stores a blob also stores which run uses the blob
(`perdure_blob_uses`), so a prune need not scan the remaining events.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from msgspec import structs

from perdure import shell
from perdure.core.identity import undo_id
from perdure.core.query import Query
from perdure.core.state import payloads
from perdure.errors import Conflict, NotFound
from perdure.store.api import FINISHED, ArchiveStore, Checkpointed, Kept, Prunable, Pruned, Store, Tombstone
from perdure.store.archive import as_json
from perdure.store.artifacts import doom_unused
from perdure.store.cursor import Cursor, Row
from perdure.store.part import Part
from perdure.store.rows import body_from, key_of, run_row

NOTHING = Pruned(0, 0, 0, 0)
BATCH_FAMILIES, BATCH_EVENTS = 100, 5_000  # at most this many per transaction, unless a single family has more events
_TURN_S = 0.02
_BY_AGE = "runs are pruned by their age: perdure prune --older-than 90d"


def found(store: ArchiveStore, before: int, statuses: Sequence[str], limit: int | None) -> Iterator[Prunable]:
    """The families that a prune would delete, the oldest first."""
    after, left = 0, limit
    while page := store.prunable(before, statuses, after=after, limit=BATCH_FAMILIES if left is None else min(left, BATCH_FAMILIES)):
        yield from page
        after = page[-1].place
        left = None if left is None else left - len(page)
        if left == 0:
            return


def checkpointed(store: ArchiveStore) -> Iterator[Checkpointed]:
    """The runs of which events before a checkpoint can be removed."""
    after = 0
    while page := store.checkpointed(after=after):
        yield from page
        after = page[-1].place


def selected(store: Store, query: Query, before: int, limit: int | None, left: Callable[[str, str], None]) -> Iterator[Prunable]:
    """The families of the first runs that match the query and that can be pruned, the oldest first.

    `left` is told the root of each other family, and why that family stays.
    """
    after, taken = None, 0
    while page := store.find(query, BATCH_FAMILIES, after, oldest_first=True):
        after = page[-1][0]
        for family in store.judged([row.run_id for _, row in page if "/" not in row.run_id], before):
            if isinstance(family, Kept):
                left(family.root, family.why)
                continue
            yield family
            taken += 1
            if taken == limit:
                return


def prune(
    store: ArchiveStore,
    families: Iterator[Prunable],
    before: int,
    *,
    by: str,
    clock: Callable[[], int],
    progress: Callable[[Pruned], None] = lambda done: None,
) -> Pruned:
    """Prune these families, several per transaction. If the process is killed, the same call continues the prune."""
    done = NOTHING
    for batch in _batches(families):
        begun_s = time.monotonic()
        done += store.prune([family.root for family in batch], before, by=by, now=clock())
        progress(done)
        # Pause for as long as the transaction took, so that other writers get SQLite's write lock: a process that
        # waits for the lock tries only from time to time.
        time.sleep(max(_TURN_S, time.monotonic() - begun_s))
    return done


def _batches(families: Iterator[Prunable]) -> Iterator[list[Prunable]]:
    batch: list[Prunable] = []
    for family in families:
        if batch and (len(batch) == BATCH_FAMILIES or sum(one.events for one in batch) + family.events > BATCH_EVENTS):
            yield batch
            batch = []
        batch.append(family)
    if batch:
        yield batch


class Pruning(Part):
    """The store's part of pruning, and its tombstones."""

    def prunable(self, before: int, statuses: Sequence[str], *, after: int = 0, limit: int = 100) -> list[Prunable]:
        values = {"before": before, "statuses": as_json(statuses), "after": after, "limit": limit}
        return [Prunable(*row) for row in self._database.read("prunable", values)]

    def judged(self, roots: Sequence[str], before: int) -> list[Prunable | Kept]:
        families: dict[str, list[Row]] = {root: [] for root in roots}
        for row in self._database.read("families", {"roots": as_json(roots)}):
            families[row[0]].append(row)
        keys = [row[2] for family in families.values() for row in family]
        untold = {run for (run,) in self._database.read("unsent_notices", {"runs": as_json(keys)})}
        specimens = {run_id for (run_id,) in self._database.read("specimens_among", {"runs": as_json(keys)})}
        return [_judged(root, family, before, untold, specimens) for root, family in families.items() if family]

    def prune(self, roots: Sequence[str], before: int, *, by: str, now: int) -> Pruned:
        """Prune these families in one transaction.

        A family with an unfinished run, or with a notice left to send, is not deleted.
        """

        def bury(cursor: Cursor) -> tuple[Pruned, str | None]:
            families = _locked(cursor, roots)
            untold = {run for (run,) in cursor.all("unsent_notices", {"runs": as_json(row[2] for family in families for row in family)})}
            over = [family for family in families if all(_is_over(row, before) and row[2] not in untold for row in family)]
            done = _delete(cursor, over, {"status": None, "now": now, "by": by}, at_once=False)
            return done, over[0][0][1] if over else None

        def arrived(cursor: Cursor, buried: tuple[Pruned, str | None]) -> bool:
            return buried[1] is not None and cursor.one("tombstone", (buried[1],)) is not None

        return self._database.write(bury, arrived)[0]

    def checkpointed(self, *, after: int = 0, limit: int = 100) -> list[Checkpointed]:
        found = [Checkpointed(*row) for row in self._database.read("checkpointed_runs", {"after": after, "limit": limit})]
        needed = [self._database.read("needed_before_checkpoint", _asked(one.place, one.run_id)) for one in found]
        return [structs.replace(one, needed=_why(one.run_id, rows)) for one, rows in zip(found, needed, strict=True)]

    def remove_before_checkpoint(self, run_id: str, *, by: str, now: int) -> Pruned:
        """Remove the events of this run from its second one to the one before its last checkpoint, in one transaction.

        The hash of the last of these events stays, so that `verify` proves the rest. A run that a worker holds is left
        as it is: the worker may be reading these events.
        """

        def take_out(cursor: Cursor) -> Pruned:
            # The lock of the first run of the family: no undo of the family begins between this look and the commit.
            cursor.one("run_to_change", (run_id.partition("/")[0],))
            found = cursor.one("run_to_change", (run_id,))
            if found is None:
                raise NotFound(f"there is no run {run_id}", hint="`perdure list` shows the runs")
            row, key = run_row(found), key_of(found)
            row.check_live()
            place = cursor.one("checkpoint_to_change", (key,))
            if place is None or row.holder is not None or place[0] < 3 or place[0] <= place[1] + 1:
                return NOTHING
            needed = _why(run_id, cursor.all("needed_before_checkpoint", _asked(key, run_id)))
            if needed is not None:
                raise Conflict(f"{needed}; nothing was removed of this run")
            removed = place[0] - 1
            head = cursor.all("hash_of_event", (key, removed))[0][0]
            cursor.change("prune_up_to", {"run": key, "removed": removed, "head": head, "by": by, "now": now})
            used = {row[1].hex() for row in cursor.all("whole_blob_uses", {"runs": as_json([key])})}
            if used:
                left = [
                    body_from(data, f"an event of run {run_id}") for (data,) in cursor.all("events_left", {"run": key, "removed": removed})
                ]
                kept = {payload.blob for body in left for payload in payloads(body)}
                # Post that no worker has read may name a blob, too.
                kept |= {blob for row in cursor.all("unread_of_run", (key,)) for blob in used if blob.encode() in row[3]}
                digests = {"digests": as_json(sorted(used - kept))}
                cursor.change("prune_some_blob_uses", {"run": key, **digests})
                blobs = cursor.change("prune_blobs", digests) if cursor.all("blobs_to_prune", digests) else 0
            else:
                blobs = 0
            return Pruned(0, 1, cursor.change("prune_events_before", {"run": key, "removed": removed}), blobs)

        return self._database.write(take_out, lambda cursor, _: False)

    def delete_copies(self, families: Sequence[Sequence[tuple[str, int, bytes]]], *, by: str, now: int) -> list[str]:
        """Delete copies that are exactly as they were copied.

        If some runs have continued since, delete nothing, and return the ids of these runs.
        """
        was = {run_id: (seq, head) for copied in families for run_id, seq, head in copied}

        def take_out(cursor: Cursor) -> list[str]:
            here = _locked(cursor, [copied[0][0] for copied in families])
            moved_on = [row[1] for family in here for row in family if was.get(row[1]) != (row[3], row[4])]
            if not moved_on:
                _delete(cursor, here, {"status": "returned", "now": now, "by": by}, at_once=True)
            return moved_on

        return self._database.write(take_out, lambda cursor, _: False)

    def delete_specimens(self, roots: Sequence[str], *, by: str, now: int) -> Pruned:
        """Delete these families of specimens in one transaction.

        Their ids are free again: no run was executed under them.
        """

        def take_out(cursor: Cursor) -> Pruned:
            for root in roots:
                found = cursor.one("run_to_change", (root,))
                if found is None:
                    raise NotFound(f"there is no run {root}", hint="`perdure list` shows the runs")
                if run_row(found).specimen is None:
                    raise Conflict(f"run {root} is no specimen: it ran in this journal, and nothing was deleted", hint=_BY_AGE)
            # A run of this journal may use the same artifact, with bytes in another place. So the caller sweeps, as
            # after a prune.
            return _delete(cursor, _locked(cursor, roots), {"status": "returned", "now": now, "by": by}, at_once=False)

        return self._database.write(take_out, lambda cursor, _: cursor.one("run_key", (roots[0],)) is None)

    def tombstone(self, run_id: str) -> Tombstone | None:
        rows = self._database.read("tombstone", (run_id,))
        return Tombstone(*rows[0][1:]) if rows else None

    def tombstones(self, after: int = 0, limit: int = 1000) -> list[tuple[int, Tombstone]]:
        return [(row[0], Tombstone(*row[1:])) for row in self._database.read("tombstones", {"after": after, "limit": limit})]

    def take_in_tombstones(self, tombstones: Sequence[Tombstone]) -> None:
        """Insert tombstones of runs that were pruned before the journal was moved to this database.

        So the ids of these runs cannot be used again.
        """

        def write(cursor: Cursor) -> None:
            known = {row[0] for row in cursor.all("pruned_heads", {"run_ids": as_json([one.run_id for one in tombstones])})}
            for one in tombstones:
                if one.run_id not in known:
                    cursor.change("take_in_tombstone", _columns(one))

        self._database.write(write, lambda cursor, _: False)

    def pruned_facts(self) -> dict[str, str]:
        ((pruned, last_at),) = self._database.read("count_pruned")
        return {"pruned": str(pruned), "pruned_at": "" if last_at is None else str(last_at)}


def _asked(key: int, run_id: str) -> dict[str, int | str]:
    return {"run": key, "undo": undo_id(run_id.partition("/")[0])}


def _why(run_id: str, rows: Sequence[Row]) -> str | None:
    """Why the events before the run's last checkpoint must stay; None if they can be removed."""
    match [needed for (needed,) in rows if needed is not None]:
        case ["notice"]:
            return f"run {run_id}: a notice about one of its events was not sent yet: start a worker, which sends it"
        case ["undo"]:
            undo = undo_id(run_id.partition("/")[0])
            return f"run {run_id} is being undone by run {undo}, which needs all of its events: try again when that has ended"
    return None


def _columns(one: Tombstone) -> Row:
    return (
        *(one.run_id, one.agent, one.tenant, one.status, one.events, one.head),
        *(one.created_at, one.finished_at, one.pruned_at, one.by),
    )


def _locked(cursor: Cursor, roots: Sequence[str]) -> list[list[Row]]:
    """Lock these families and read them.

    Until this transaction ends, no other transaction can change the runs of these families, or add runs to them.
    """
    wanted = {"roots": as_json(roots)}
    cursor.all("runs_to_prune", {"runs": as_json(row[2] for row in cursor.all("families", wanted))})
    # Read the families again: before this transaction had the locks, another transaction may have written to a run, or
    # added an undo run.
    families: dict[str, list[Row]] = {}
    for row in cursor.all("families", wanted):
        families.setdefault(row[0], []).append(row)
    return list(families.values())


def _is_over(row: Row, before: int) -> bool:
    status, updated_at = row[5:7]
    return status in FINISHED and updated_at < before


def _judged(root: str, family: Sequence[Row], before: int, untold: set[int], specimens: set[str]) -> Prunable | Kept:
    """Can this family be pruned? The same rules as in `Pruning.prune`, which looks again."""
    for _, run_id, key, _, _, status, updated_at in family:
        if run_id in specimens:
            return Kept(root, f"run {run_id} is a specimen, and is deleted by name: perdure prune --specimen {shell.quote(root)}")
        if status not in FINISHED:
            below = "" if run_id == root else f" of the family of run {root}"
            return Kept(root, f"run {run_id}{below} has not ended: it is {status.replace('_', ' ')}")
        if updated_at >= before:
            return Kept(root, f"run {run_id} ended later than that")
        if key in untold:
            return Kept(root, f"run {run_id}: a notice about it was not sent yet: start a worker, which sends it")
    return Prunable(family[0][2], root, len(family), sum(row[3] for row in family))


def _delete(cursor: Cursor, families: Sequence[Sequence[Row]], tombstone: dict[str, str | int | None], *, at_once: bool) -> Pruned:
    if not families:
        return NOTHING
    keys = [row[2] for family in families for row in family]
    runs = {"runs": as_json(keys)}
    cursor.change("bury", {**runs, **tombstone})
    digests = {"digests": as_json(sorted({row[1].hex() for row in cursor.all("whole_blob_uses", runs)}))}
    for name in (
        *("prune_notices", "prune_inbox", "prune_signals", "prune_reserved"),
        *("prune_progress", "prune_approvals", "prune_budgets", "prune_blob_uses", "prune_checkpoints", "prune_labels"),
    ):
        cursor.change(name, runs)
    artifacts = doom_unused(cursor, runs, at_once=at_once)
    events = cursor.change("prune_events", runs)
    cursor.change("prune_runs", runs)
    blobs = cursor.change("prune_blobs", digests) if cursor.all("blobs_to_prune", digests) else 0
    return Pruned(len(families), len(keys), events, blobs, artifacts)
