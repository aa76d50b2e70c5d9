"""Appends on PostgreSQL: the appends of many runs in one statement; and what to do if the answer to an append is lost.

One statement is one transaction and one round trip. A release takes two statements in one round trip: the first locks
the run. An append with consequences (an approval, a child, a budget) takes the common path: a transaction that first
locks everything that it changes.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
import secrets
import struct
import threading
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import psycopg
from msgspec import structs
from psycopg.pq.abc import PGresult

from perdure.core.events import RunCancelled, RunSucceeded, Terminal
from perdure.errors import StoreUnavailable
from perdure.store.api import FINISHED, Append, Appended, Committed, Lease, Refused
from perdure.store.cursor import Cursor, Locked
from perdure.store.journal import Journal, ends_lease, latest, leaves_work, refusal, wake_at
from perdure.store.part import Means
from perdure.store.postgres import wire
from perdure.store.postgres.arrays import Array, Bools, Byteas, Int8s, Texts
from perdure.store.postgres.database import PostgresDatabase
from perdure.store.postgres.faults import is_loss, is_rolled_back, translated, unstorable
from perdure.store.postgres.queries import QUERIES, shown
from perdure.store.projections import consequential
from perdure.store.rows import event_row

log = logging.getLogger("perdure.store")
_COMMITTED = Committed()
_EVENT = "(${0}::bigint, ${1}::bytea, ${2}::bigint, ${3}::bigint, ${4}::bigint, ${5}::bigint, ${6}::text, ${7}::bytea)"
_EVENT_COLUMNS = 8
_FEW_EVENTS = 8
_ID_BYTES = 16
_PATIENCE_S = 0.2
_ENDS = (RunSucceeded, RunCancelled)  # RunFailed is not here: a failure needs a notice, and takes the common path


# The SQL, its values, and the statement that is sent before it.
_Statements = tuple[bytes, Sequence[Any], tuple[bytes, Sequence[Any]] | None]
_Settled = tuple[list[Appended], dict[tuple[str, int], bool]]  # the answers, and which leases were still held


class PostgresJournal(Journal):
    _database: PostgresDatabase

    def __init__(self, means: Means) -> None:
        super().__init__(means)
        # For each lease that this process has fenced: all nonces that may be in the run's row now.
        self._nonces: dict[tuple[str, int], list[bytes]] = {}
        # Tools may take long. They get at most half of the connections; the rest is for everything else, such as
        # heartbeats.
        self._room_for_tools = threading.BoundedSemaphore(max(self._database.connections.limit // 2, 1))
        self._doubtful: set[str] = set()  # appends with unknown outcome, by the id of their first event

    def append(self, batch: Sequence[Append]) -> list[Appended]:
        called_s = time.monotonic()
        if (self._doubtful or self._nonces) and any(map(self._is_doubtful, batch)):
            return self._settle(batch, called_s)
        plain, _ = self._split(batch)
        try:
            committed = self._append_plain(plain) if plain else set()
        except Locked:
            committed = set()  # nothing was written: `_append_rest` tries again, and waits a short time for the lock
        except _Lost as lost:
            # The statement was sent, and its answer was lost.
            log.warning("%s; looking what became of %d appends", lost, len(plain))
            return self._settle(batch, called_s)
        except (UnicodeEncodeError, struct.error) as error:
            raise unstorable(error) from None
        rest = [append for append in batch if id(append) not in committed]
        try:
            answers = dict(zip(map(id, rest), self._append_rest(rest, called_s), strict=True)) if rest else {}
        except Exception:
            # The caller gets one error for the whole batch, and sends all appends again. An append that was already
            # committed must not be refused then.
            self._doubtful.update(name for append in plain if id(append) in committed and (name := _name(append)) is not None)
            raise
        heard = [answers.get(id(append), _COMMITTED) for append in batch]
        self._forget(batch, heard)
        return heard

    def send(self, batch: Sequence[Append], loop: asyncio.AbstractEventLoop, done: Callable[[list[Appended | None]], None]) -> list[Append]:
        """Like writer.Sends.send: send the appends that fit into one statement, over an idle connection.

        An append that needs a ring is not sent.
        """
        if (self._doubtful or self._nonces) and any(map(self._is_doubtful, batch)):
            return list(batch)
        plain, rest = self._split(list(filter(may_be_sent, batch)))
        rest += [append for append in batch if not may_be_sent(append)]
        connection = self._database.connections.take_idle() if plain else None
        if connection is None:
            return list(batch)
        sent_s = time.monotonic()
        sent_appends = list(plain)

        def answered(answer: PGresult | psycopg.Error) -> None:
            error = answer if isinstance(answer, psycopg.Error) else None
            if error is not None and is_loss(error):
                # The statement was sent, and its answer was lost. When the same append is sent again, `_settle` first
                # finds out whether it was committed.
                log.warning("%s; looking what became of %d appends", translated(error, self._database.where).in_full(), len(sent_appends))
                self._doubtful.update(name for append in sent_appends if (name := _name(append)) is not None)
                self._database.connections.lost()
            self._database.connections.give_back(connection)
            committed: set[int] = set()
            if not isinstance(answer, psycopg.Error):
                committed = written(answer)
                self._database.committed_since(sent_s)
                if self._bell.watched:
                    self._bell.moved({append.lease.run_id for append in sent_appends})
            heard: list[Appended | None] = [_COMMITTED if id(append) in committed else None for append in sent_appends]
            self._forget(sent_appends, heard)
            done(heard)

        try:
            statements, written = self._plain_statement(plain)
            wire.send_on_loop(loop, connection, wire.sent(connection, *statements), answered)
        except (UnicodeEncodeError, struct.error):  # nothing was sent: `append` will raise the error
            connection.close()
            self._database.connections.give_back(connection)
            return list(batch)
        return rest

    def transact(self, head: Append, work: Callable[[Any], tuple[Append, Any]]) -> tuple[Appended, Any]:
        asked_s = time.monotonic()
        if not self._room_for_tools.acquire(timeout=self._database.connections.answer_s):
            raise StoreUnavailable(
                "cannot be asked: other transaction tools of this process have taken all connections; try again", where=self._database.where
            )
        try:
            # Add the time that was spent waiting for a connection: an approval may have expired meanwhile.
            waited_us = round((time.monotonic() - asked_s) * 1e6)
            return super().transact(structs.replace(head, at=head.at + waited_us), work)
        finally:
            self._room_for_tools.release()

    # -- many at once -------------------------------------------------------------------------------------------------
    def _split(self, batch: Sequence[Append]) -> tuple[list[Append], list[Append]]:
        """The appends that can be in one statement, at most one per run; and the other appends, which come later."""
        plain: list[Append] = []
        rest: list[Append] = []
        seen: set[str] = set()
        for append in batch:
            run_id = append.lease.run_id
            (plain if run_id not in seen and run_id in self._keys and _is_plain(append) else rest).append(append)
            seen.add(run_id)
        return plain, rest

    def _append_plain(self, plain: list[Append]) -> set[int]:
        """Append in one statement. Returns `id(append)` of each append whose guard held.

        The other appends have changed nothing, and the common path finds out why.
        """
        statements, written = self._plain_statement(plain)
        return self._statement(lambda connection: written(connection.wait(wire.sent(connection, *statements))))

    def _plain_statement(self, plain: list[Append]) -> tuple[_Statements, Callable[[PGresult], set[int]]]:
        """The arguments for `wire.sent`, and a function that reads from the answer which appends were written.

        Sorts `plain` in place.
        """
        given_up = [self._keys[append.lease.run_id] for append in plain if _releases(append)]
        lock = QUERIES["lock_to_release"]
        first = (lock.sql.encode(), lock.values({"keys": Int8s.of(given_up)})) if given_up else None
        if len(plain) == 1 and 0 < len(plain[0].events) <= _FEW_EVENTS and not plain[0].consumed and not _ends(plain[0]):
            append = plain[0]
            return (*self._one(append), first), lambda answer: {id(append)} if wire.count(answer) == len(append.events) else set()
        plain.sort(key=lambda append: self._keys[append.lease.run_id])  # every transaction locks runs in this order
        keys = {self._keys[append.lease.run_id]: id(append) for append in plain}
        many = QUERIES["append_many"]
        return (many.sql.encode(), many.values(self._many(plain)), first), lambda answer: {keys[key] for key in wire.numbers(answer)}

    def _statement(self, run: Callable[[Any], set[int]]) -> set[int]:
        begun_s = time.monotonic()
        for left in range(5, -1, -1):
            try:
                with self._database.connections.lent() as connection:
                    answer = run(connection)
            except psycopg.Error as error:
                if is_loss(error):
                    self._database.connections.lost()
                    raise _Lost(translated(error, self._database.where).in_full()) from None
                if not (left and is_rolled_back(error)):
                    raise translated(error, self._database.where) from None
                time.sleep(random.uniform(0.001, 0.01) * (6 - left))
                continue
            self._database.committed_since(begun_s)
            return answer
        raise AssertionError("unreachable")

    def _one(self, append: Append) -> tuple[bytes, list[Any]]:
        lease, row, events, before = self._current(append.lease), append.row, append.events, append.expected_seq
        last = events[-1]
        key = self._keys[lease.run_id]
        values: list[Any] = [before + len(events), last.hash, latest(append), key, lease.epoch, lease.nonce, lease.worker, before]
        if row is not None:
            values += [row.status, shown(row.waiting_for), shown(row.error), row.progress, row.attention]
        if row is not None and row.release:
            values += [row.ready_at, wake_at(append), Int8s.of(append.left)]
        for event in self._events(append, key):
            values += event[1:]
        guard = "advance" if row is None else "advance_and_park" if row.release else "advance_and_project"
        return _composed(QUERIES[guard].sql, len(events)), values

    def _many(self, plain: Sequence[Append]) -> dict[str, Any]:
        leases = [self._current(append.lease) for append in plain]
        keys = [self._keys[lease.run_id] for lease in leases]
        rows = [append.row for append in plain]
        return {
            "ids": Int8s.of(keys),
            "epochs": Int8s.of([lease.epoch for lease in leases]),
            "nonces": Byteas.of([lease.nonce for lease in leases]),
            "holders": Texts.of([lease.worker for lease in leases]),
            "befores": Int8s.of([append.expected_seq for append in plain]),
            "seqs": Int8s.of([append.expected_seq + len(append.events) for append in plain]),
            "heads": Byteas.of([append.events[-1].hash if append.events else None for append in plain]),
            "times": Int8s.of([latest(append) for append in plain]),
            "projects": Bools.of([row is not None for row in rows]),
            "statuses": Texts.of([row.status if row else None for row in rows]),
            "waits": Texts.of([shown(row.waiting_for) if row else None for row in rows]),
            "errors": Texts.of([shown(row.error) if row else None for row in rows]),
            "progresses": Bools.of([row is not None and row.progress for row in rows]),
            "attentions": Texts.of([row.attention if row else None for row in rows]),
            "ends": Bools.of([_ends(append) for append in plain]),
            "releases": Bools.of([_releases(append) for append in plain]),
            "readies": Int8s.of([row.ready_at if row else None for row in rows]),
            "wakes": Int8s.of([wake_at(append) if _releases(append) else None for append in plain]),
            "seen": Int8s.of([number for append in plain for number in append.consumed + append.left]),
            "consumed": Int8s.of([number for append in plain for number in append.consumed]),
            **_columns(plain, keys),
        }

    def _events(self, append: Append, key: int) -> list[tuple[Any, ...]]:
        for seq, sealed in enumerate(append.events, append.expected_seq + 1):
            assert sealed.event.seq == seq and sealed.event.epoch == append.lease.epoch, (append.lease, sealed.event.seq, seq)
        return [event_row(key, sealed) for sealed in append.events]

    # -- the common path ----------------------------------------------------------------------------------------------
    def _append_rest(self, rest: list[Append], called_s: float) -> list[Appended]:
        try:
            # Wait only briefly: a run whose row is locked by a tool's transaction must not delay the other runs.
            return self._database.write(
                lambda cursor: self._append_all(cursor, rest, called_s),
                lambda cursor, answers: self._arrived(cursor, rest, answers),
                patience_s=min(_PATIENCE_S, self._database.connections.answer_s / 2),
            )
        except Locked:
            raise  # it is certain that nothing was written
        except StoreUnavailable:
            # Probably nothing was written, but this is not certain. When one of these appends is sent again, `_settle`
            # first finds out whether it was committed.
            self._doubtful.update(name for append in rest if (name := _name(append)) is not None)
            raise

    def _append_all(self, cursor: Cursor, batch: Sequence[Append], called_s: float) -> list[Appended]:
        ending = [append for append in batch if any(isinstance(sealed.event.body, Terminal) for sealed in append.events)]
        charging = [append for append in batch if append.charge is not None]
        cursor.all("lock_runs", {"keys": self._keys_of(cursor, batch), "ending": self._keys_of(cursor, ending)})
        if charging or ending:
            cursor.all("lock_budgets", {"keys": self._keys_of(cursor, [*charging, *ending])})
        current = [structs.replace(append, lease=self._current(append.lease)) for append in batch]
        return super()._append_all(cursor, current, called_s)

    def _keys_of(self, cursor: Cursor, batch: Sequence[Append]) -> list[int]:
        keys = [self._keys.get(append.lease.run_id) or self._look_up_key(cursor, append.lease.run_id) for append in batch]
        return [key for key in keys if key is not None]

    # -- appends whose answer was lost --------------------------------------------------------------------------------
    def _settle(self, batch: Sequence[Append], called_s: float) -> list[Appended]:
        """Find out which appends were committed, and append the others.

        A fence (a new nonce in the run's row) makes the server refuse an earlier copy of the append that comes late.
        """
        names = {name for append in batch if (name := _name(append)) is not None}
        self._doubtful |= names
        deadline_s = time.monotonic() + self._database.connections.answer_s / 2
        while True:
            fresh = {_lease_name(append.lease): self._next_nonce(append.lease) for append in batch}
            try:
                answers, held = self._fence_and_append(batch, called_s, fresh)
            except StoreUnavailable:
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(0.1)
                continue
            self._nonces |= {lease: [nonce] for lease, nonce in fresh.items()}
            self._doubtful -= names
            self._forget(batch, answers)
            for lease, is_held in held.items():
                if not is_held:  # the lease is gone, so its nonces are not needed any more
                    self._nonces.pop(lease, None)
            return answers

    def _next_nonce(self, lease: Lease) -> bytes:
        """The nonce for the next fence of this lease.

        The nonce is stored in `_nonces` before it is sent, because the outcome of its own commit may be unknown too.

        A nonce that only a fence has used is used again: no late append has this nonce.
        """
        known = self._nonces.setdefault(_lease_name(lease), [lease.nonce])
        if len(known) == 1:
            known.append(secrets.token_bytes(16))
        return known[-1]

    def _fence_and_append(self, batch: Sequence[Append], called_s: float, fresh: dict[tuple[str, int], bytes]) -> _Settled:
        written: list[Append] = []
        return self._database.write(
            lambda cursor: self._settle_all(cursor, batch, called_s, fresh, written),
            lambda cursor, _: self._settled(cursor, fresh, written),
        )

    def _settled(self, cursor: Cursor, fresh: dict[tuple[str, int], bytes], written: Sequence[Append]) -> bool:
        """Was this very transaction committed? Its new nonces, and the events that it wrote, prove it.

        Events that were in the journal before prove nothing.
        """
        for (run_id, _), nonce in fresh.items():
            key = self._look_up_key(cursor, run_id)
            if key is not None and cursor.all("guard_of_run", (key,))[0][4] == nonce:
                return True
        for append in written:
            key = self._look_up_key(cursor, append.lease.run_id) if append.events else None
            if key is not None and cursor.one("event_at", (key, append.expected_seq + 1)) == (append.events[0].hash,):
                return True
        return False

    def _settle_all(
        self,
        cursor: Cursor,
        batch: Sequence[Append],
        called_s: float,
        fresh: dict[tuple[str, int], bytes],
        written: list[Append],
    ) -> _Settled:
        written.clear()
        answers: list[Appended] = []
        held: dict[tuple[str, int], bool] = {}
        keys = self._keys_of(cursor, batch)
        cursor.all("lock_runs", {"keys": keys, "ending": keys})
        for append in batch:
            lease, name = append.lease, _lease_name(append.lease)
            key = self._look_up_key(cursor, lease.run_id)
            if key is None:
                answers.append(Refused(f"there is no run {lease.run_id}"))
                continue
            if name not in held:
                values = {"id": key, "epoch": lease.epoch, "worker": lease.worker, "nonce": fresh[name], "nonces": self._nonces[name]}
                held[name] = cursor.change("fence", values) == 1
            last = append.expected_seq + len(append.events)
            found = cursor.one("event_at", (key, last)) if append.events else None
            was_ours = held[name] or (append.row is not None and ends_lease(append.row))
            if found is not None and found[0] == append.events[-1].hash and was_ours:
                # The append was one transaction, so its last event proves that the whole append was committed. Its
                # first event proves nothing: an earlier transaction of a tool, whose answer was lost, may have begun
                # with the same events and ended with other events.
                answers.append(_COMMITTED)
            elif found is not None or not held[name]:
                why = refusal(cursor, append, key)
                # The append is refused even if it was committed: another worker has taken the run over since, and this
                # worker must not begin the attempts that follow the append.
                answers.append(why or Refused(f"run {lease.run_id}: something else has been written as event {last}"))
            else:
                owned = structs.replace(append, lease=structs.replace(lease, nonce=fresh[name]))
                answers += super()._append_all(cursor, [owned], called_s)
                if answers[-1] is _COMMITTED:
                    written.append(owned)
        return answers, held

    def _is_doubtful(self, append: Append) -> bool:
        """Is it unknown whether this append was committed, or which nonce its lease has now?"""
        return _name(append) in self._doubtful or len(self._nonces.get(_lease_name(append.lease), ())) > 1

    def _current(self, lease: Lease) -> Lease:
        """The lease with the nonce that the run's row has now."""
        if not self._nonces:
            return lease
        known = self._nonces.get(_lease_name(lease))
        return lease if known is None else structs.replace(lease, nonce=known[-1])

    def _forget(self, batch: Sequence[Append], answers: Sequence[Appended | None]) -> None:
        """Drop the cached keys and nonces of runs that these appends have released."""
        for append, answer in zip(batch, answers, strict=True):
            ends_lease = append.row is not None and (append.row.release or append.row.status in FINISHED)
            if ends_lease and isinstance(answer, Committed):
                self._keys.pop(append.lease.run_id, None)
                self._nonces.pop(_lease_name(append.lease), None)


def _columns(plain: Sequence[Append], keys: Sequence[int]) -> dict[str, Array]:
    """The parameters of append_many for the events of all appends.

    The parameters are built column by column: row by row, this took twice as long.
    """
    sealed = [one for append in plain for one in append.events]
    events = [one.event for one in sealed]
    seqs, epochs = [event.seq for event in events], [event.epoch for event in events]
    assert seqs == [append.expected_seq + place for append in plain for place in range(1, len(append.events) + 1)], seqs
    assert epochs == [append.lease.epoch for append in plain for _ in append.events], epochs
    return {
        "e_runs": Int8s.of([key for append, key in zip(plain, keys, strict=True) for _ in append.events]),
        "e_seqs": Int8s.of(seqs),
        "e_ids": Byteas.of_hex([event.event_id for event in events], _ID_BYTES),
        "e_times": Int8s.of([event.ts for event in events]),
        "e_epochs": Int8s.of(epochs),
        "e_calls": Int8s.of([event.call for event in events]),
        "e_causes": Int8s.of([event.cause for event in events]),
        "e_data": Texts.of_utf8([one.data for one in sealed]),
        "e_hashes": Byteas.of([one.hash for one in sealed]),
    }


class _Lost(Exception):
    """The connection broke while a statement was under way."""


def _lease_name(lease: Lease) -> tuple[str, int]:
    return lease.run_id, lease.epoch


def _name(append: Append) -> str | None:
    return append.events[0].event.event_id if append.events else None


def may_be_sent(append: Append) -> bool:
    """May `send` send this append?"""
    # Two kinds of appends need `append`. An append without events has no event id for `_doubtful`: if its answer is
    # lost, its lease has to be fenced at once. An append that leaves work for other workers has to ring, and a ring
    # may have to wait.
    return bool(append.events) and _is_plain(append) and not leaves_work(append)


def _is_plain(append: Append) -> bool:
    """Is one statement enough for this append, because it has no other consequences?"""
    if append.blobs or append.charge is not None:
        return False
    events = consequential(append)
    return not events or (len(events) == 1 and isinstance(events[0].body, _ENDS) and _ends(append) and "/" not in append.lease.run_id)


def _ends(append: Append) -> bool:
    return append.row is not None and append.row.status in FINISHED


def _releases(append: Append) -> bool:
    return append.row is not None and append.row.release and append.row.status not in FINISHED


@lru_cache(maxsize=64)
def _composed(advance: str, events: int) -> bytes:
    """One statement that checks the guard (with the statement `advance`) and inserts `events` events."""
    first = max(int(number) for number in re.findall(r"\$(\d+)", advance)) + 1
    rows = ", ".join(
        _EVENT.format(*range(start, start + _EVENT_COLUMNS)) for start in range(first, first + events * _EVENT_COLUMNS, _EVENT_COLUMNS)
    )
    return (
        f"WITH moved AS ({advance} RETURNING id) INSERT INTO perdure_events (run, seq, event_id, ts, epoch, call, cause, data, hash) "
        f"SELECT moved.id, e.* FROM moved, (VALUES {rows}) AS e"
    ).encode()
