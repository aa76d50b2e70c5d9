"""Lines: where ready runs wait, and which tenant's turn it is.

A line is all runs of one agent, version, queue, tenant and priority. The runs that take the version of the worker that
claims them have a line of their own: its version is empty, and the claim moves the run to the line of its version. A worker that looks for work reads only the head
of each line that it serves. So the cost does not grow with the number of runs behind the heads, or in lines that the
worker does not serve. Tenants take turns in a queue, run by run, so that a tenant with many runs does not delay the
other tenants. The limits of queues are checked here too, and the limit on the suspects that a worker may hold.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from perdure.core.suspects import SUSPECT_CRASHES, Group
from perdure.settings import Queue
from perdure.store.api import NO_VERSION, RunRow, Served
from perdure.store.cursor import Cursor, Row
from perdure.store.rows import is_sound, key_of, lost_of, lost_with_of

_READY_AT, _CRASHES = 10, 15  # the positions of ready_at and crashes in the columns {run} of a statement
Party = tuple[str, str]  # queue, tenant
Kind = tuple[str, str, str, str, int]  # the kind of the runs in a line: agent, version, queue, tenant, priority
_FIRST_OF_ALL = (-(2**63), 0)  # sorts before every (ready_at, id)


def line_of(cursor: Cursor, agent: str, version: str, queue: str, tenant: str, priority: int) -> int:
    """The line for runs of this kind. If there is no such line yet, it is created."""
    kind = (agent, version, queue, tenant, priority)
    found = cursor.one("line", kind)
    if found is None:
        # If another transaction has inserted the same line first, this changes nothing, and the next query finds that
        # line.
        cursor.change("insert_line", kind)
        found = cursor.all("line", kind)[0]
    line: int = found[0]
    return line


def move(cursor: Cursor, run_key: int, version: str) -> None:
    """Move the run to the line of another version, which adopts the run."""
    agent, queue, tenant, priority = cursor.all("kind_of_run", (run_key,))[0]
    line = line_of(cursor, agent=agent, version=version, queue=queue, tenant=tenant, priority=priority)
    cursor.change("move_run", (version, line, run_key))


def which(served: Iterable[Served], queues: Sequence[str] | None) -> dict[str, str | None]:
    """The query parameters that select lines by served agents and queues.

    A worker that serves any version of an agent also serves the agent's runs without a version.
    """
    # Name each agent and version only once: with a duplicate, the query would return the same runs twice.
    lines = dict.fromkeys((one.agent, version) for one in served for version in (one.version, NO_VERSION))
    return {
        "served": msgspec.json.encode(list(lines)).decode(),
        "queues": None if queues is None else msgspec.json.encode(list(queues)).decode(),
    }


def version_taken(row: RunRow, served: Sequence[Served]) -> str:
    """The version that the run takes when a worker that serves these agents claims it; empty if it has a version.

    If the worker serves several versions of the agent, it is the last of them.
    """
    if row.version != NO_VERSION:
        return ""
    return next(one.version for one in reversed(served) if one.agent == row.agent)


class Room:
    """Do the limits leave room for one more run? Counts the runs that all workers hold, per queue and tenant."""

    def __init__(self, cursor: Cursor, limits: Mapping[str, Queue]) -> None:
        self._cursor = cursor
        self._limits = limits
        self._of_tenant: Counter[Party] = Counter()
        self._of_queue: Counter[str] = Counter()

    def look(self, queues: Iterable[str]) -> None:
        """Count the held runs, if one of these queues has a limit.

        A queue with a limit stays locked until the transaction ends: no other transaction can claim from it.
        """
        limited = sorted({queue for queue in queues if queue in self._limits})
        # Every transaction locks the queues in the same order, so that two transactions cannot deadlock.
        for queue in limited:
            self._cursor.alone(f"queue {queue}")
        if limited:
            for queue, tenant, held in self._cursor.all("held_by_party"):
                self.count(queue, tenant, held)

    def count(self, queue: str, tenant: str, held: int) -> None:
        self._of_tenant[queue, tenant] += held
        self._of_queue[queue] += held

    def has(self, queue: str, tenant: str) -> bool:
        """May one more run of this queue and tenant be held?"""
        limit = self._limits.get(queue)
        if limit is None:
            return True
        if limit.per_tenant is not None and self._of_tenant[queue, tenant] >= limit.per_tenant:
            return False
        return limit.concurrency is None or self._of_queue[queue] < limit.concurrency


class Choice:
    """Chooses the ready runs that a worker gets, inside the transaction that claims them, so that the limits hold."""

    def __init__(self, cursor: Cursor, worker: str, limits: Mapping[str, Queue], now: int) -> None:
        self._cursor = cursor
        self._room = Room(cursor, limits)
        self._now = now
        self._suspects = HeldSuspects(cursor, worker)

    def take(self, served: Sequence[Served], queues: Sequence[str] | None, limit: int) -> list[Row]:
        """Up to `limit` runs, in the order of the tenants' turns. The new turns are stored."""
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
            # Among tenants that had no turn yet, the tenant whose run has been ready longest is first.
            last[party] = min(last.get(party, (turn, ready_at)), (turn, ready_at))
        order = [(turn, ready_at, party, self._of_party(waiting[party], page)) for party, (turn, ready_at) in last.items()]
        return self._round_robin(order, limit)

    def _round_robin(self, order: list[tuple[int, int, Party, Iterator[Row]]], limit: int) -> list[Row]:
        """Take one run from each party in turn. A party (queue, tenant) that had a turn moves to the end."""
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
        """A tenant's ready runs in a queue: the highest priority first; of equal priority, the longest ready first."""
        for priority in sorted({priority for priority, _ in waiting}, reverse=True):
            lines = [self._of_line(line, page) for one, line in waiting if one == priority]
            yield from filter(self._suspects.may_take, heapq.merge(*lines, key=_place))

    def _of_line(self, line: int, page: int) -> Iterator[Row]:
        # Read page by page. With an open cursor for each line, the cursors could not share one prepared statement.
        after = _FIRST_OF_ALL
        while True:
            wanted = {"line": line, "now": self._now, "after_ready": after[0], "after_id": after[1], "limit": page}
            rows = self._cursor.all("ready_of_line", {**wanted, "suspects": not self._suspects.is_full})
            yield from rows
            if len(rows) < page:
                return
            after = _place(rows[-1])


class HeldSuspects:
    """The suspects that a worker holds or is about to claim. May the worker claim one more run?"""

    def __init__(self, cursor: Cursor, worker: str) -> None:
        self._group = Group((crashes, lost_with) for crashes, lost_with in cursor.all("suspects_of_worker", (worker,)))

    @property
    def is_full(self) -> bool:
        return self._group.is_full

    def may_take(self, row: Row) -> bool:
        """May the run be claimed? If the answer is yes, the run counts as claimed."""
        if not is_sound(row):
            return False  # a damaged row cannot be claimed, and must not stop the claims of other runs
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
    """The number of crashes (`RunRow.crashes`) that the run has after a claim now."""
    crashes: int = row[_CRASHES] + (lost_of(row) > 0)
    return crashes
