"""The first runs of a line, claimed in one statement where there is nothing to weigh.

Whose turn it is, limits and suspects are weighed inside a transaction, which takes ten round trips. Where one line alone has ready runs, its
queue has no limit and nobody in it is suspect, there is nothing to weigh; and what is taken comes with its journal and its inbox.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import msgspec
import psycopg

from perdure.core.events import Event, RunClaimed, encode_body
from perdure.core.suspects import SUSPECT_CRASHES
from perdure.errors import StoreCorrupt
from perdure.settings import Queue
from perdure.store.api import Claimed, Lease, Served
from perdure.store.cursor import Cursor, Row
from perdure.store.lines import which
from perdure.store.postgres.cursor import PostgresCursor
from perdure.store.postgres.database import PostgresDatabase
from perdure.store.postgres.faults import is_loss
from perdure.store.rows import event_from, inbox_row, key_of, run_row

_LOOKS = 3
_FEW_EVENTS = 200  # a longer journal is read when its run begins, as it may be one of a hundred that are claimed together
_SEEN, _RUN, _MORE = slice(0, 3), slice(3, 31), slice(31, None)  # the columns of claim_at_once
_NONCE, _EVENT_ID = 26, 27  # behind those of a run


class Unheard(Exception):
    """Nobody knows what was taken, and it may be so yet: whoever claims next, in a transaction, either takes it, and what comes later finds
    it held, or passes it by, since it is taken by now or just being taken. What `arrived` tells is ours."""

    def __init__(self, arrived: Callable[[], list[tuple[int, Claimed]]]) -> None:
        self.arrived = arrived


class _Lost(Exception):
    """The connection broke while the statement was under way."""


class _Ask(NamedTuple):
    """One claim."""

    worker: str
    now: int
    body: RunClaimed
    secret: bytes  # what it takes is known by this

    @property
    def token(self) -> int:
        return int.from_bytes(self.secret[:8], signed=True)


class _Next(NamedTuple):
    served: Mapping[str, object]
    commits: int  # of this process, when it was so
    ready_at: int | None  # of the next run of these lines


class Taking:
    """Claims where there is nothing to weigh."""

    def __init__(self, database: PostgresDatabase) -> None:
        self._database = database
        self._next: _Next | None = None
        self.names: dict[str, str] = {}  # of the workers that were registered here

    def claim(
        self, worker: str, served: Sequence[Served], limit: int, now: int, queues: Sequence[str] | None, limits: Mapping[str, Queue]
    ) -> list[tuple[int, Claimed]] | None:
        """What was taken, with its numbers; None when it has to be found out in a transaction."""
        self._next = None
        if worker not in self.names:
            return None
        lines = which(served, queues)
        choice = {"limit": limit, "limited": msgspec.json.encode(list(limits)).decode(), **lines}
        for _ in range(_LOOKS):
            commits = self._database.commits
            ask = _Ask(worker, now, RunClaimed(worker, self.names[worker]), secrets.token_bytes(16))
            try:
                rows = self._send({**_values(ask), **choice})
            except _Lost:
                # The crash window: runs may be taken, or be it yet, and nobody has heard so. What is there is ours.
                if there := self._arrived(ask, wait=False):
                    return there
                raise Unheard(partial(self._arrived, ask, wait=True)) from None
            if not rows:
                return None  # there is a row in any case, except for what cannot be stored, or is refused
            runs, to_be_weighed, later = next(row[_SEEN] for row in rows if row[0] is not None)
            if to_be_weighed:
                return None
            taken = _taken(ask, rows)
            if runs < limit and len(taken) == runs:
                # Nothing is left that is ready. Good for as long as nothing else is committed here, or heard of.
                self._next = _Next(lines, commits + bool(taken), later)
            if taken or not runs:
                return taken
            # Others were faster, and another look shows what they have left.
        return None

    def next_ready(self, served: Sequence[Served], queues: Sequence[str] | None) -> _Next | None:
        """What the last claim has seen of it, if nothing was committed here since."""
        known = self._next
        return known if known is not None and (which(served, queues), self._database.commits) == known[:2] else None

    def _send(self, values: Mapping[str, object]) -> list[Row]:
        """What claim_at_once answers; nothing when it was refused."""
        begun_s = time.monotonic()
        try:
            with self._database.connections.lent() as connection:
                rows = PostgresCursor(connection).all("claim_at_once", values)
        except UnicodeEncodeError:
            return []
        except psycopg.Error as error:
            if is_loss(error):
                self._database.connections.lost()
                raise _Lost from None
            return []  # nothing was written, and the transaction meets the reason again
        if any(row[_RUN][0] is not None for row in rows):
            self._database.committed_since(begun_s)
        return rows

    def _arrived(self, ask: _Ask, *, wait: bool) -> list[tuple[int, Claimed]]:
        """What the claim has taken: it was one transaction, so that with one of them all are there."""

        def look(cursor: Cursor) -> list[tuple[int, Claimed]]:
            if wait:  # for the lost statement, should it be under way
                cursor.one("claim_is_over", {"token": ask.token})
            rows = cursor.all("claimed_at_once", {"worker": ask.worker, "secret": ask.secret})
            return [(key_of(row), _claimed(ask, row)) for row in rows]

        return self._database.write(look, lambda *_: True) if wait else self._database.reading(look)


def _values(ask: _Ask) -> dict[str, object]:
    return {
        "worker": ask.worker,
        "name": ask.body.name,
        "now": ask.now,
        "secret": ask.secret,
        "token": ask.token,
        "data": encode_body(ask.body).decode(),
        "suspect": SUSPECT_CRASHES,
        "few": _FEW_EVENTS,
    }


def _claimed(ask: _Ask, found: Row) -> Claimed:
    row = run_row(found)
    return Claimed(Lease(row.run_id, ask.worker, row.epoch, found[_NONCE]), row)


def _taken(ask: _Ask, rows: Sequence[Row]) -> list[tuple[int, Claimed]]:
    """Those rows that are runs, in the order of their numbers, each with what came along of its journal and its inbox."""
    runs = sorted([row[_RUN] for row in rows if row[_RUN][0] is not None], key=key_of)
    journals: dict[int, list[Row]] = {key_of(run): [] for run in runs}
    inboxes: dict[int, list[Row]] = {key_of(run): [] for run in runs}
    for row in rows:
        if row[_RUN][0] is None and (key := key_of(row[_RUN])) is not None:
            seq, event_id, ts, epoch, call, cause, data, inbox_id = row[_MORE]
            if inbox_id is None:
                journals[key].append((seq, event_id, ts, epoch, call, cause, data))
            else:
                inboxes[key].append((inbox_id, call, data, event_id))
    return [(key, _coming_with(ask, run, sorted(journals[key]), sorted(inboxes[key]))) for run in runs if (key := key_of(run)) in journals]


def _coming_with(ask: _Ask, run: Row, journal: Sequence[Row], inbox: Sequence[Row]) -> Claimed:
    """With its inbox, and with its whole journal if that came along. One that cannot be read is met again by whoever drives the run."""
    claimed = _claimed(ask, run)
    run_id, row = claimed.lease.run_id, claimed.row
    post = tuple([inbox_row((inbox_id, run_id, call, data, event_id)) for inbox_id, call, data, event_id in inbox])
    claimed = msgspec.structs.replace(claimed, post=post)
    if len(journal) != row.seq - 1:
        return claimed
    try:
        events = [event_from(run_id, event) for event in journal]
    except StoreCorrupt:
        return claimed
    claim = Event(row.seq, run[_EVENT_ID].hex(), ask.now, row.epoch, None, row.seq - 1, ask.body)
    return msgspec.structs.replace(claimed, events=(*events, claim))
