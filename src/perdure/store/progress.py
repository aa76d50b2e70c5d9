"""The last progress of attempts under way, as `call.heartbeat` reported it. It is not part of the journals.

Progress is only a hint: for people, and for the next attempt of the call if the worker dies. No decision depends on
it. When an attempt ends, the event of its end contains its last progress, and the row is deleted soon after.
"""

from __future__ import annotations

from collections.abc import Sequence

from perdure.store.api import EndedAttempt, KeptProgress, Lease, ProgressRow
from perdure.store.archive import as_json
from perdure.store.cursor import Cursor
from perdure.store.part import Part


class Progresses(Part):
    """Stores the progress of attempts, and reads it."""

    def keep_progress(self, kept: Sequence[KeptProgress], ended: Sequence[EndedAttempt], now: int) -> None:
        written = [_row(one.lease, one, now) for one in sorted(kept, key=lambda one: (one.lease.run_id, one.call))]

        def write(cursor: Cursor) -> None:
            if written:
                cursor.each("keep_progress", written)
            if ended:
                cursor.each("forget_progress", [(one.run_id, one.call, one.attempt) for one in ended])

        # If the answer to COMMIT is lost, the caller gets an error and writes the progress again later.
        self._database.write(write, lambda cursor, _: False)

    def progress(self, run_ids: Sequence[str]) -> list[ProgressRow]:
        rows = self._database.read("progress_of_runs", {"run_ids": as_json(run_ids)})
        return [ProgressRow(run_id, call, attempt, text.encode(), at) for run_id, call, attempt, text, at in rows]


def _row(lease: Lease, one: KeptProgress, now: int) -> tuple[object, ...]:
    return (one.call, one.attempt, one.progress.decode(), now, lease.run_id, lease.worker, lease.epoch)
