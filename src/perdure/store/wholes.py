"""Whole runs, out of one journal and into another: the events byte for byte, and everything that lies beside them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from perdure import shell
from perdure.errors import Conflict, StoreCorrupt
from perdure.store.api import FINISHED, Family, Head, Member, RateRow, Stored, Whole
from perdure.store.blobs import put_unused
from perdure.store.cursor import Cursor, Row
from perdure.store.lines import line_of
from perdure.store.part import Part

_AGENT, _VERSION, _TENANT, _QUEUE, _PRIORITY = 1, 2, 3, 5, 19  # where they are in Whole.run
_FEW_BLOBS = 500


class Wholes(Part):
    """Reads and writes runs with everything that belongs to them. What a number means is this database's own affair: run ids travel."""

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
            )
            for row in rows
        ]

    def _beside(self, name: str, keys: dict[str, str]) -> dict[int, list[Row]]:
        found: dict[int, list[Row]] = defaultdict(list)
        for row in self._database.read(name, keys):
            found[row[0]].append(row[1:])
        return found

    def take_in(self, parts: Callable[[], Iterable[Sequence[Whole]]]) -> None:
        """All of it in one transaction; Conflict, and nothing, when an id is taken by now."""
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
        """Nobody uses them yet: a prune asks about the blobs of what it deletes, and leaves these alone."""
        self._database.write(lambda cursor: put_unused(cursor, blobs), lambda cursor, _: False)

    def rates(self) -> list[RateRow]:
        return [RateRow(*row) for row in self._database.read("rates")]

    def take_in_rates(self, rates: Sequence[RateRow]) -> None:
        """Of each key whichever is later: two journals' starts must not add up."""

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
    *("whole_reserved", "whole_inbox", "whole_notices", "whole_blob_uses"),
)


def as_json(values: Iterable[Any]) -> str:
    """A set of parameters as one."""
    return msgspec.json.encode(list(values)).decode()


def _insert(cursor: Cursor, whole: Whole, lines: dict[Row, int]) -> list[Row]:
    """All but its events, which are the answer: those of many runs go together."""
    run = whole.run
    kind = (run[_AGENT], run[_VERSION], run[_QUEUE], run[_TENANT], run[_PRIORITY])
    if kind not in lines:
        lines[kind] = line_of(cursor, agent=kind[0], version=kind[1], queue=kind[2], tenant=kind[3], priority=kind[4])
    inserted = cursor.all("take_in_run", (*run, lines[kind], whole.ledger_of))
    if not inserted:
        raise Conflict(f"run {whole.run_id} is there by now, and was not when we looked; nothing of its family was copied: try again")
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
    cursor.each("take_in_notice", [(key, *row) for row in whole.notices])
    cursor.each("use_blob", [(key, bytes.fromhex(digest)) for digest in whole.blobs])
    return [_event(key, whole.run_id, stored) for stored in whole.events]


def _event(key: int, run_id: str, stored: Stored) -> Row:
    try:
        data = stored.data.decode()
    except UnicodeDecodeError:
        raise StoreCorrupt(
            f"event {stored.seq} of run {run_id} is no text any more and cannot be copied: {shell.command('verify', run_id)}"
        ) from None
    return (key, stored.seq, stored.event_id, stored.ts, stored.epoch, stored.call, stored.cause, data, stored.hash)
