"""Backups: a whole journal in one file, and its restore into an empty database. Both databases may have any dialect.

A backup is a journal in a SQLite file that is closed for ever: it can be read and verified, but nothing is driven from it.

    restore:  the batch is open → page by page: copy the families, mark the unfinished runs → schedules are paused → the batch has ended

A restored journal is older than the world: after the backup was taken, runs may have had effects that it does not have.
So every unfinished run is marked (`run_restored`) in the commit that inserts it, and stops until a person lets it go on. No
worker can register before the batch has ended. If a restore is killed, the same call continues it.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

from msgspec import Struct, structs

from perdure.core.events import Event, RunRestored
from perdure.core.identity import seal
from perdure.core.state import RESTORED, restored_words
from perdure.core.times import iso
from perdure.errors import Conflict, InvalidInput
from perdure.store.api import BACKUP, FINISHED, Batch, Moved, Store, Stored, Whole
from perdure.store.claims import LEASE_RAN_OUT
from perdure.store.open import open_store
from perdure.store.transfer import PAGE, Copied, Copying, Progress, head_of, silent
from perdure.store.url import shown_url

_HOLDING, _HELD = (b'{"type":"run_claimed"', b'{"type":"run_released"'), b'{"type":"run_claimed"'
# The places of these columns in Whole.run.
_STATUS, _WAITING_FOR, _READY_AT, _SEQ, _HEAD, _EPOCH, _LOST, _ERROR, _UPDATED_AT, _ATTENTION = 8, 9, 10, 11, 12, 13, 14, 16, 18, 20


class Backup(Struct, frozen=True):
    """What a backup has."""

    runs: int
    unfinished: int
    taken_at: int
    outside: int  # artifacts whose bytes lie in a folder or bucket: the backup names them, and does not have them
    damaged: tuple[str, ...] = ()  # runs whose hash chain is broken, in the journal and in the backup alike
    problems: tuple[str, ...] = ()  # what is wrong with the file as a whole
    tables: tuple[str, ...] = ()  # tables beside the journal that the backup does not have


class Restored(Struct, frozen=True):
    batch: str
    taken_at: int
    copied: Copied
    notices: int  # notices that were not sent when the backup was taken, and are not sent now


def write_backup(store: Store, part: Path, *, by: str, now: int, progress: Progress = silent) -> Backup:
    """Write a backup into the new file `part`, and verify it. The caller gives the file its name."""
    if (moved := store.moved()) is not None:
        raise Conflict(f"{shown_url(store.url)}: {moved.words}; nothing was written")
    url, tables = f"sqlite:///{part}", tuple[str, ...]()
    with store.snapshot_to(part) as complete:
        if not complete:
            target = open_store(url)
            try:
                tables = Copying(store, target, to_url=url, by=by, progress=progress).everything().tables
            finally:
                target.close()
    copy = open_store(url)
    try:
        copy.mark_backup(shown_url(store.url), by=by, now=now)
        runs = unfinished = 0
        damaged: list[str] = []
        for member_id, seq, head, finished in _members(copy):
            runs, unfinished = runs + 1, unfinished + (not finished)
            stored = [one for one in copy.stored(member_id) if one.seq <= seq]
            if head_of(member_id, stored, copy.checkpoint(member_id)) != head:
                damaged.append(member_id)
            progress("verifying", runs, 0)
        return Backup(runs, unfinished, now, _outside(copy), tuple(damaged), tuple(copy.problems()), tables)
    finally:
        copy.close()


def _members(store: Store) -> Iterator[tuple[str, int, bytes, bool]]:
    after = 0
    while page := store.families(after, PAGE):
        after = page[-1].place
        for member in (member for family in page for member in family.members):
            yield member.run_id, member.seq, member.head, member.finished


def _outside(store: Store) -> int:
    count, after = 0, ""
    while page := store.outside_artifacts(after):
        count, after = count + len(page), page[-1].artifact
    return count


def check_backup(source: Store) -> Moved:
    """When the backup was taken. InvalidInput if the file is no backup."""
    moved = source.moved()
    if moved is None or not moved.is_backup:
        raise InvalidInput(f"{shown_url(source.url)} is no backup: perdure backup FILE makes one; perdure copy moves a journal")
    return moved


def restore(
    source: Store, target: Store, *, to_url: str, by: str, now: int, new_id: Callable[[], str], progress: Progress = silent
) -> Restored:
    """Restore the backup into an empty database. The caller pauses the schedules, and then ends the batch."""
    taken = check_backup(source)
    batch = _begin(target, taken, by=by, now=now)
    restoring = Restoring(source, target, to_url=to_url, by=by, progress=progress)
    restoring.mark, restoring.now, restoring.new_id = RunRestored(by, taken.at, batch.batch), now, new_id
    copied = restoring.everything()
    return Restored(batch.batch, taken.at, copied, restoring.notices)


def _begin(target: Store, taken: Moved, *, by: str, now: int) -> Batch:
    """The batch of this restore: a new one in an empty database, or the one that was interrupted."""
    what = f"{taken.to_url.removeprefix(BACKUP)} {iso(taken.at)}"
    if (moved := target.moved()) is not None:
        raise Conflict(f"{shown_url(target.url)}: {moved.words}; restore to another database")
    for batch in target.interrupted_batches("restore"):
        if batch.query != what:
            raise Conflict(f"{shown_url(target.url)} is being restored from another backup: that of {batch.query}; use another database")
        return batch
    if target.count_runs() or target.tombstones(limit=1) or target.schedules():
        raise Conflict(f"{shown_url(target.url)} is not empty, and a backup is restored only to an empty database; nothing was written")
    stamp = iso(now)[:19].replace("-", "").replace(":", "").replace("T", "-")
    batch = Batch(f"restore-{stamp}-{secrets.token_hex(2)}", "restore", what, "{}", by, now)
    target.open_batch(batch)
    return batch


class Restoring(Copying):
    """Copies the runs of a backup. Each unfinished run is marked in the commit that inserts it."""

    mark: RunRestored
    now: int
    new_id: Callable[[], str]
    notices = 0

    def _changed(self, whole: Whole, only_finished: bool) -> Whole:
        # Notices that were not sent then may have been sent since, and they tell of a state that may be over.
        self.notices += len(whole.notices)
        whole = structs.replace(whole, notices=[])
        if whole.run[_STATUS] in FINISHED or whole.run[-1] is not None:  # ended, or a specimen: it is never driven
            return whole
        run = list(whole.run)
        event = Event(run[_SEQ] + 1, self.new_id(), self.now, run[_EPOCH], None, run[_SEQ], self.mark)
        sealed = seal(run[_HEAD], event)
        held = next((one.data for one in reversed(whole.events) if one.data.startswith(_HOLDING)), b"").startswith(_HELD)
        run[_STATUS], run[_WAITING_FOR], run[_READY_AT], run[_ATTENTION] = "needs_attention", RESTORED, None, "restored"
        run[_SEQ], run[_HEAD], run[_ERROR] = event.seq, sealed.hash, restored_words(self.mark.taken_at)
        run[_UPDATED_AT] = max(run[_UPDATED_AT], self.now)
        if held:
            # Its worker held it when the backup was taken, and may still live. The next claim is a takeover.
            run[_LOST] = run[_LOST] or LEASE_RAN_OUT
        stored = Stored(event.seq, bytes.fromhex(event.event_id), event.ts, event.epoch, None, event.cause, sealed.data, sealed.hash)
        return structs.replace(whole, run=tuple(run), events=[*whole.events, stored])
