"""Rates: one line of starts per key, over all workers, and a pause that holds for everybody."""

from __future__ import annotations

from perdure.core.rate import Rate, next_start
from perdure.store.cursor import Cursor
from perdure.store.part import Part

# Whoever has waited for the write lock is seconds behind the others. A clock that is further behind than this was set back.
_SET_BACK_US = 60_000_000
_PATIENCE_S = 0.1  # for a rate that somebody else has locked: a worker asks on its event loop, and asks again later


class Rates(Part):
    def admit(self, rate: Rate, now: int) -> int:
        """Take the next place; the time (µs) from which the attempt may start. A place that was taken is not given back."""
        assert rate.key is not None, "a tool gives its rate a key before anybody asks for a place"
        if rate.limit is None:
            # Nothing is taken, so that nothing has to be written.
            rows = self._database.read("rate", (rate.key,))
            return max(now, rows[0][1]) if rows else now
        key = rate.key

        def book(cursor: Cursor) -> tuple[int, int]:
            cursor.patience(_PATIENCE_S)
            cursor.change("make_rate", (key,))
            due, paused_until, seen_at = cursor.all("rate_to_change", (key,))[0]
            lag = seen_at - now
            if lag > _SET_BACK_US:
                # The line goes back with the clock, or everybody would wait for the time that it has lost.
                due, paused_until = due - lag, paused_until - lag
            at, due = next_start(rate, due=due, paused_until=paused_until, now=now)
            seen_at = now if lag > _SET_BACK_US else max(now, seen_at)
            cursor.change("book_rate", {"key": key, "due": due, "paused_until": paused_until, "seen_at": seen_at})
            return at, due

        def arrived(cursor: Cursor, booked: tuple[int, int]) -> bool:
            found = cursor.one("rate", (key,))
            return found is not None and bool(found[0] >= booked[1])

        return self._database.write(book, arrived)[0]

    def hold_back(self, key: str, until: int) -> None:
        """Nobody starts anything under the key before then; a longer pause stays."""

        def pause(cursor: Cursor) -> None:
            cursor.patience(_PATIENCE_S)
            cursor.change("hold_rate_back", {"key": key, "until": until})

        def arrived(cursor: Cursor, _: None) -> bool:
            found = cursor.one("rate", (key,))
            return found is not None and bool(found[1] >= until)

        self._database.write(pause, arrived)
