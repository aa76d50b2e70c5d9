"""A journal that moves: closed before anything is copied, so that no run ever goes on in two places.

Closed is a row in the database, and triggers that refuse every write while it is there: it holds for processes that know nothing of it.
"""

from __future__ import annotations

from perdure.errors import AlreadyRunning, Conflict, StoreError, StoreUnavailable
from perdure.store.api import Moved
from perdure.store.cursor import Cursor, Row
from perdure.store.losing import LEASE_RAN_OUT, PROVEN_DEAD, lose_runs
from perdure.store.part import Part


class Closing(Part):
    """From open to moving to moved; and back, as long as the move has not ended."""

    def moved(self) -> Moved | None:
        return moved_from(self._database.read("moved"))

    def close_journal(self, to_url: str, *, by: str, now: int, lease_us: int) -> Moved:
        """One transaction: nobody who lives works here, what the dead have held is free, and from its commit on nothing is written."""

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

    def reopen_journal(self) -> None:
        def open_again(cursor: Cursor) -> None:
            found = moved_from(cursor.all("moved"))
            if found is not None and found.done:
                raise Conflict(f"{self._database.where}: {found.words}; a move that has ended is not taken back: copy it back instead")
            cursor.change("reopen_journal")

        self._database.write(open_again, lambda cursor, _: not cursor.all("moved"))
        self._bell.ring()

    def _free_runs(self, cursor: Cursor, now: int, lease_us: int) -> None:
        workers = cursor.all("list_workers", {"now": now, "lease_us": lease_us})
        gone = {row[0] for row in workers if self._liveness.is_dead(row[0])}
        alive = [row for row in workers if row[0] not in gone and not row[-1]]
        if alive:
            names = ", ".join(f"{row[1]} ({row[5]} run{'' if row[5] == 1 else 's'})" for row in alive[:10])
            raise AlreadyRunning(
                f"{self._database.where} has live workers: {names}; stop them first (SIGTERM drains them), or wait for that with --wait"
            )
        silent = {row[0] for row in workers} - gone
        for dead in gone:
            lose_runs(cursor, dead, now, PROVEN_DEAD)
            cursor.change("delete_worker", (dead,))
        for other in [*silent, *(row[0] for row in cursor.all("holders_without_worker"))]:
            lose_runs(cursor, other, now, LEASE_RAN_OUT)
        ((held,),) = cursor.all("count_held")
        if held:
            raise StoreUnavailable(f"{self._database.where}: {held} runs are just being written to; nothing was changed: try again")


_NEVER = Moved("", "", 0, done=False)


def moved_from(rows: list[Row]) -> Moved | None:
    """From the rows of `moved`."""
    if not rows:
        return None
    state, to_url, by, at = rows[0]
    return Moved(to_url, by, at, done=state == "moved")


def _same_place(found: Moved, to_url: str, where: str) -> Moved:
    if found.to_url != to_url:
        raise Conflict(f"{where}: {found.words}, and cannot be moved to {to_url} as well")
    return found


def moved_error(where: str, moved: Moved | None) -> StoreError:
    """For whoever was refused by the database itself."""
    return StoreError(f"{where}: {moved.words}" if moved is not None else f"{where} was closed for a move and is open again; try again")
