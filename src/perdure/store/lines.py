"""Lines: where ready runs wait, and whose turn it is.

A line is all runs of one agent, version, queue, tenant and priority. Whoever looks for work goes from line to line and sees the head of
each: how many runs wait behind it, sleep in it, or stand in lines that nobody serves costs nothing. Tenants take turns in a queue, run
by run, so that a long line delays nobody else's.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from perdure.core.suspects import SUSPECT_CRASHES, Group
from perdure.settings import Queue
from perdure.store.api import Served
from perdure.store.cursor import Cursor, Row
from perdure.store.rows import is_sound, key_of, lost_of, lost_with_of

_READY_AT, _CRASHES = 10, 15  # where they are in the columns that run_by_id and ready_of_line share
Party = tuple[str, str]  # queue, tenant
_FIRST_OF_ALL = (-(2**63), 0)  # before every ready_at and id


def line_of(cursor: Cursor, *, agent: str, version: str, queue: str, tenant: str, priority: int) -> int:
    """The line that a run of this kind stands in; made if there is none yet."""
    kind = (agent, version, queue, tenant, priority)
    found = cursor.one("line", kind)
    if found is None:
        cursor.change("insert_line", kind)  # or somebody else does at the same moment: then that one is it
        found = cursor.all("line", kind)[0]
    line: int = found[0]
    return line


def move(cursor: Cursor, run_key: int, version: str) -> None:
    """Another version goes on with the run: from now on it stands in that version's line."""
    agent, queue, tenant, priority = cursor.all("kind_of_run", (run_key,))[0]
    line = line_of(cursor, agent=agent, version=version, queue=queue, tenant=tenant, priority=priority)
    cursor.change("move_run", (version, line, run_key))


def which(served: Iterable[Served], queues: Sequence[str] | None) -> dict[str, str | None]:
    """The parameters that say which lines are meant."""
    return {
        # Each once: what is named twice must not be taken twice.
        "served": msgspec.json.encode(list(dict.fromkeys((one.agent, one.version) for one in served))).decode(),
        "queues": None if queues is None else msgspec.json.encode(list(queues)).decode(),
    }


class Room:
    """How many runs of each queue, and of each tenant in it, are held by whomever, and whether the limits leave room for one more."""

    def __init__(self, cursor: Cursor, limits: Mapping[str, Queue]) -> None:
        self._cursor = cursor
        self._limits = limits
        self._of_tenant: Counter[Party] = Counter()
        self._of_queue: Counter[str] = Counter()

    def look(self, queues: Iterable[str]) -> None:
        """Count what is held, unless none of these queues has a limit. From here on nobody else counts in those that have one."""
        limited = sorted({queue for queue in queues if queue in self._limits})
        # In one order for everybody: two who begin at different ends would wait for each other.
        for queue in limited:
            self._cursor.alone(f"queue {queue}")
        if limited:
            for queue, tenant, held in self._cursor.all("held_by_party"):
                self.count(queue, tenant, held)

    def count(self, queue: str, tenant: str, held: int) -> None:
        self._of_tenant[queue, tenant] += held
        self._of_queue[queue] += held

    def has(self, queue: str, tenant: str) -> bool:
        """Whether one more may be held."""
        limit = self._limits.get(queue)
        if limit is None:
            return True
        if limit.per_tenant is not None and self._of_tenant[queue, tenant] >= limit.per_tenant:
            return False
        return limit.concurrency is None or self._of_queue[queue] < limit.concurrency


class Choice:
    """Which ready runs a worker gets, made inside the transaction that claims them: no limit is exceeded by two who choose at once."""

    def __init__(self, cursor: Cursor, worker: str, limits: Mapping[str, Queue], now: int) -> None:
        self._cursor = cursor
        self._room = Room(cursor, limits)
        self._now = now
        self._suspects = Suspects(cursor, worker)

    def take(self, served: Sequence[Served], queues: Sequence[str] | None, limit: int) -> list[Row]:
        """Up to `limit` runs, in the order in which their tenants had their turns, which are remembered."""
        heads = self._cursor.all("lines_with_ready_runs", {**which(served, queues), "now": self._now})
        if not heads:
            return []
        self._room.look(queue for _, queue, *_ in heads)
        page = -(-limit // len(heads))
        waiting: dict[Party, list[tuple[int, int]]] = {}
        last: dict[Party, tuple[int, int]] = {}
        for line, queue, tenant, priority, ready_at, turn in heads:
            party = (queue, tenant)
            waiting.setdefault(party, []).append((priority, line))
            # Of several that had no turn yet, whoever has waited longest goes first.
            last[party] = min(last.get(party, (turn, ready_at)), (turn, ready_at))
        order = [(turn, ready_at, party, self._of_party(waiting[party], page)) for party, (turn, ready_at) in last.items()]
        return self._round_robin(order, limit)

    def _round_robin(self, order: list[tuple[int, int, Party, Iterator[Row]]], limit: int) -> list[Row]:
        """One run of each in turn; whoever had one goes to the end."""
        taken: list[Row] = []
        turns: dict[Party, int] = {}
        newest: int = self._cursor.all("newest_turn")[0][0]
        heapq.heapify(order)
        while order and len(taken) < limit:
            _, ready_at, party, runs = order[0]
            run = next(runs, None) if self._room.has(*party) else None
            if run is None:
                heapq.heappop(order)
                continue
            taken.append(run)
            self._room.count(*party, 1)
            newest += 1
            turns[party] = newest
            heapq.heapreplace(order, (newest, ready_at, party, runs))
        self._cursor.each("had_turn", [(*party, turn) for party, turn in sorted(turns.items())])
        return taken

    def _of_party(self, waiting: list[tuple[int, int]], page: int) -> Iterator[Row]:
        """A tenant's ready runs in a queue: the higher priority first, then whatever has been ready longest."""
        for priority in sorted({priority for priority, _ in waiting}, reverse=True):
            lines = [self._of_line(line, page) for one, line in waiting if one == priority]
            yield from filter(self._suspects.may_take, heapq.merge(*lines, key=_place))

    def _of_line(self, line: int, page: int) -> Iterator[Row]:
        # By pages and not with an open cursor each: many open at a time could not share their prepared statement.
        after = _FIRST_OF_ALL
        while True:
            wanted = {"line": line, "now": self._now, "after_ready": after[0], "after_id": after[1], "limit": page}
            rows = self._cursor.all("ready_of_line", {**wanted, "suspects": not self._suspects.is_full})
            yield from rows
            if len(rows) < page:
                return
            after = _place(rows[-1])


class Suspects:
    """The suspects that a worker holds, those that it is just taking included, and whether it may take one more run."""

    def __init__(self, cursor: Cursor, worker: str) -> None:
        self._group = Group((crashes, lost_with) for crashes, lost_with in cursor.all("suspects_of_worker", (worker,)))

    @property
    def is_full(self) -> bool:
        return self._group.is_full

    def may_take(self, row: Row) -> bool:
        """Whether the run may be taken; if so, it counts as taken."""
        if not is_sound(row):
            return False  # nobody can take it, and it must not keep the worker from the others
        crashes = crashes_if_taken(row)
        if crashes < SUSPECT_CRASHES:
            return True
        if not self._group.admits(crashes, lost_with_of(row)):
            return False
        self._group.add(crashes, lost_with_of(row))
        return True


def _place(row: Row) -> tuple[int, int]:
    return row[_READY_AT], key_of(row)


def crashes_if_taken(row: Row) -> int:
    """How many claims in a row will have been takeovers, this one included."""
    crashes: int = row[_CRASHES] + (lost_of(row) > 0)
    return crashes
