"""What runs have used, summed from their journals. Replay writes no second event, so each attempt counts once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from itertools import groupby
from typing import Literal

import msgspec
from msgspec import Struct

from perdure.core.events import CheckpointTaken, Unsettled, Usage
from perdure.core.state import LOST, Image, image_in
from perdure.errors import StoreCorrupt
from perdure.store.api import ONE_GROUP_EACH, CostRow
from perdure.store.cursor import Database, Row
from perdure.store.part import Part
from perdure.store.rows import body_from

_PAGE = 2000  # how many events are in memory at a time, however long a journal is
_NOTHING = Usage()
REMOVED = "removed before a checkpoint"  # in place of a tool or a model
_LIFE = ("run_created", "run_claimed", "run_released", "run_forked", "run_succeeded", "run_failed")


class _Failure(Struct, frozen=True, gc=False):
    type: str = ""


class _Told(Struct, frozen=True, gc=False):
    """The fields that are needed of an event that begins, ends or settles an attempt. Other fields are not decoded."""

    tool: str = ""
    attempt: int = 1
    usage: Usage | None = None
    failure: _Failure | None = None
    unsettled: tuple[Unsettled, ...] = ()  # only in `run_reopened`, and in the last event of a run that was ended by force


_decode = msgspec.json.Decoder(_Told).decode


class _Attempt:
    """One attempt.

    The attempt's usage counts once, however often it was recorded. If the attempt was in doubt and was resolved, the
    usage in its resolution is added.
    """

    __slots__ = ("began", "calls", "ended", "lost", "model", "tokens_cached", "tokens_in", "tokens_out", "tool", "usd_micros")

    def __init__(self) -> None:
        self.tool = ""
        self.calls = 1
        self.began: int | None = None
        self.ended: int | None = None
        self.model: str | None = None
        self.lost = False
        self.usd_micros = self.tokens_in = self.tokens_out = self.tokens_cached = 0

    def add(self, kind: str, ts: int, told: _Told) -> None:
        if kind in ("tool_call_initiated", "model_call_initiated"):
            self.tool = told.tool
            self.model = told.tool if kind == "model_call_initiated" else self.model
            self.began = ts if self.began is None else min(self.began, ts)
        elif told.failure is not None and told.failure.type == LOST:
            # The attempt's worker died, so the end and the duration of the attempt are unknown.
            self.lost = kind == "model_call_failed"
        elif kind != "tool_call_in_doubt" or told.failure is not None:
            # The duration of the attempt counts only if a worker observed its end.
            self.ended = ts if self.ended is None else min(self.ended, ts)
        usage = told.usage or _NOTHING
        self.model = usage.model if self.model is None else max(self.model, usage.model or "")
        self.usd_micros = max(self.usd_micros, usage.usd_micros)
        self.tokens_in = max(self.tokens_in, usage.tokens_in)
        self.tokens_out = max(self.tokens_out, usage.tokens_out)
        self.tokens_cached = max(self.tokens_cached, usage.tokens_cached)

    def settle(self, usage: Usage) -> None:
        self.model = usage.model if self.model is None else max(self.model, usage.model or "")
        self.usd_micros += usage.usd_micros
        self.tokens_in += usage.tokens_in
        self.tokens_out += usage.tokens_out
        self.tokens_cached += usage.tokens_cached


def _before_checkpoint(image: Image, ts: int) -> dict[tuple[int, int], _Attempt]:
    """What an image knows about the attempts whose events were removed: those under way, and all others as one."""
    found: dict[tuple[int, int], _Attempt] = {}
    for call in image.calls:
        if call.number in image.open and call.attempt > 0:
            attempt = found[call.number, call.attempt] = _Attempt()
            attempt.tool, attempt.model, attempt.began = call.tool, call.tool if call.of_model else None, call.started_at
    rest = found[0, 0] = _Attempt()
    rest.tool = REMOVED
    rest.calls = max(image.attempts - len(found) + 1, 0)
    rest.began, rest.ended = ts, ts + image.busy_us
    rest.settle(image.used)
    rest.model = REMOVED
    return found


class _Life:
    """How long a run has existed, and for how much of that time no worker held it."""

    def __init__(self) -> None:
        self.began: int | None = None
        self.last = 0
        self.waiting_us = 0
        self._free_since: int | None = None

    def add(self, kind: str, ts: int) -> None:
        # `max`: a clock may have been set back.
        self.last = max(self.last, ts)
        if kind in ("run_created", "run_forked"):
            self.began, self.waiting_us = ts, 0
        if kind in ("run_created", "run_forked", "run_released", "run_reopened"):
            self._free_since = ts
        elif kind == "checkpoint_taken":
            # The events before it were removed, and a worker held the run. How long it had waited is not known.
            self._free_since = None
        elif kind == "run_claimed" and self._free_since is not None:
            self.waiting_us += max(ts - self._free_since, 0)
            self._free_since = None

    @property
    def wall_us(self) -> int:
        return 0 if self.began is None else max(self.last - self.began, self.waiting_us)


class _Sums:
    """The sums of one group."""

    def __init__(self) -> None:
        self.wall_us = self.waiting_us = 0
        self.runs = self.calls = self.busy_us = self.usd_micros = self.tokens_in = self.tokens_out = self.tokens_cached = self.lost = 0

    def add(self, attempt: _Attempt, began: int) -> None:
        self.busy_us += max((began if attempt.ended is None else attempt.ended) - began, 0)
        self.usd_micros += attempt.usd_micros
        self.tokens_in += attempt.tokens_in
        self.tokens_out += attempt.tokens_out
        self.tokens_cached += attempt.tokens_cached
        self.lost += attempt.lost

    def row(self, group: str) -> CostRow:
        tokens = (self.tokens_in, self.tokens_out, self.tokens_cached)
        return CostRow(group, self.runs, self.calls, self.busy_us, self.usd_micros, *tokens, self.lost, self.wall_us, self.waiting_us)


class Costs(Part):
    def costs(
        self, by: Literal["agent", "tenant", "model", "day", "run", "root", "tool"], *, since: int = 0, tenant: str | None = None
    ) -> list[CostRow]:
        """What runs have used, by group, the most expensive first. An attempt counts for the day on which it began."""
        groups: dict[str, _Sums] = {}
        for (_, run_id, agent, its_tenant), rows in groupby(_told(self._database, since, tenant), lambda row: (row[0], *row[2:5])):
            calls: dict[tuple[str, int], int] = {}
            life = _Life()
            for (call, _), attempt in _attempts(run_id, rows, life).items():
                if attempt.began is None or attempt.began < since:
                    continue
                group = _group(by, run_id, agent, its_tenant, attempt, attempt.began)
                groups.setdefault(group, _Sums()).add(attempt, attempt.began)
                calls[group, call] = attempt.calls
            for (group, _), count in calls.items():
                groups[group].calls += count
            for group in {group for group, _ in calls}:
                groups[group].runs += 1
                if by in ONE_GROUP_EACH and (by != "root" or group == run_id):
                    groups[group].wall_us += life.wall_us
                    groups[group].waiting_us += life.waiting_us
        found = [sums.row(group) for group, sums in groups.items()]
        return sorted(found, key=lambda row: (-row.usd_micros, -row.tokens_in - row.tokens_out, -row.calls, row.group))

    def cost_of_runs(self, runs: Sequence[int]) -> dict[int, int]:
        """What each of these runs (by their database keys) has cost by itself, in micro-dollars."""
        keys = msgspec.json.encode(sorted(runs)).decode()
        found: dict[int, int] = {}
        for (run, run_id), rows in groupby(_pages(self._database, "attempts_told_of_runs", {"runs": keys}), lambda row: (row[0], row[2])):
            found[run] = sum(attempt.usd_micros for attempt in _attempts(run_id, rows, _Life()).values())
        return found


def _told(database: Database, since: int, tenant: str | None) -> Iterator[Row]:
    """The events that begin, end and settle attempts, or begin, release and end a run: run by run, in order."""
    return _pages(database, "attempts_told", {"since": since, "tenant": tenant})


def _pages(database: Database, statement: str, wanted: dict[str, object]) -> Iterator[Row]:
    run = seq = 0
    while True:
        page = database.read(statement, {**wanted, "run": run, "seq": seq, "limit": _PAGE})
        yield from page
        if len(page) < _PAGE:
            return
        run, seq = page[-1][:2]


def _attempts(run_id: str, rows: Iterator[Row], life: _Life) -> dict[tuple[int, int], _Attempt]:
    """The attempts of one run, by (call, number of the attempt). All events are added to `life`."""
    found: dict[tuple[int, int], _Attempt] = {}
    for _, seq, _, _, _, call, kind, ts, data in rows:
        life.add(kind, ts)
        if kind == "run_forked":
            found = {}  # all events so far are copies: they count for the run that was forked
        if kind in _LIFE:
            continue
        if kind == "checkpoint_taken":
            taken = body_from(data, f"event {seq} of run {run_id}")
            assert isinstance(taken, CheckpointTaken), taken
            found = _before_checkpoint(image_in(taken), ts)
            continue
        try:
            told = _decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, TypeError) as error:
            raise StoreCorrupt(
                f"event {seq} of run {run_id} cannot be decoded ({error})", hint="see what else is damaged: perdure verify"
            ) from None
        if call is None:
            for one in told.unsettled:
                found.setdefault((one.call, one.attempt), _Attempt()).settle(one.usage)
            continue
        attempt = found.get((call, told.attempt))
        if attempt is None:
            attempt = found[call, told.attempt] = _Attempt()
        if kind == "tool_call_resolved":
            attempt.settle(told.usage or _NOTHING)
        else:
            attempt.add(kind, ts, told)
    return found


def _group(by: str, run_id: str, agent: str, tenant: str, attempt: _Attempt, began: int) -> str:
    match by:
        case "agent":
            return agent
        case "tenant":
            return tenant
        case "run":
            return run_id
        case "root":
            return run_id.partition("/")[0]
        case "tool":
            return attempt.tool
        case "model":
            return attempt.model or "no model"
        case _:
            return datetime.fromtimestamp(began // 1_000_000, UTC).date().isoformat()
