"""Are the runs and their workers healthy? The checks of `perdure doctor` that only read the store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Literal

from msgspec import Struct

from perdure import shell
from perdure.core.suspects import SUSPECT_CRASHES
from perdure.engine.api import Reading
from perdure.inspect.text import plural, span
from perdure.inspect.view import all_rows
from perdure.inspect.workers import waits_as_suspect
from perdure.store.api import FINISHED, ApprovalFilter, RunRow, WorkerRow

Verdict = Literal["ok", "warn", "FAIL"]
IGNORED_AFTER_US = 10_000_000  # a run that has been ready for longer counts as ignored by the workers
CLOCK_SKEW_US = 60_000_000
PENDING_LOOKED_AT = 10_000


class Check(Struct, frozen=True):
    """One line of `perdure doctor`: what was checked, what was found, and what to do if the verdict is not "ok"."""

    name: str
    verdict: Verdict
    found: str
    way_out: str | None = None


def check_runs(store: Reading, now: int, lease_us: int) -> list[Check]:
    """Check workers, run counts, runs that need a person, approvals, ignored runs, suspects, leases and the clock."""
    workers = store.workers(now, lease_us)
    counts: Counter[str] = Counter()
    attention: list[str] = []
    ignored: list[RunRow] = []
    orphaned: list[RunRow] = []
    newest = 0
    suspects: list[RunRow] = []
    groups = store.suspects()
    alive = {worker.worker for worker in workers if worker.alive}
    for row in all_rows(store):
        if row.specimen is not None:
            counts["specimen"] += 1
            continue
        counts[row.status] += 1
        newest = max(newest, row.updated_at)
        if row.status == "needs_attention":
            attention.append(row.run_id)
        if waits_as_suspect(row, workers, groups, now):
            suspects.append(row)
        elif row.status not in FINISHED and row.ready_at is not None and row.ready_at < now - IGNORED_AFTER_US:
            ignored.append(row)
        if row.holder is not None and row.holder not in alive:
            orphaned.append(row)
    return [
        # Runs that need a person are not counted here: they need no worker, and the check "attention" reports them.
        _workers(workers, now, sum(count for status, count in counts.items() if status not in (*FINISHED, "needs_attention", "specimen"))),
        Check("runs", "ok", ", ".join(f"{count:,} {status}" for status, count in sorted(counts.items())) or "none yet"),
        _attention(attention),
        _approvals(store, now),
        _ignored(ignored, now),
        _suspects(suspects),
        _orphaned(orphaned, {worker.worker for worker in workers if not worker.dead}),
        _clock(newest, now),
    ]


def check_guards(store: Reading) -> Check:
    """Does the database still have the triggers that protect the journal?

    Does every journal still have the row of its run?
    """
    problems = store.problems()
    if not problems:
        return Check("guards", "ok", "every journal has its run, and every trigger that keeps it append-only is there")
    more = f"; and {plural(len(problems) - 1, 'thing')} more" if len(problems) > 1 else ""
    return Check("guards", "FAIL", f"{problems[0]}{more}", "perdure verify")


def _workers(workers: list[WorkerRow], now: int, unfinished: int) -> Check:
    alive = [worker for worker in workers if worker.alive]
    dead = sum(worker.dead for worker in workers)
    silent = [worker for worker in workers if not worker.alive and not worker.dead]
    each = ", ".join(f"{w.name} ({plural(w.runs, 'run')}, up {span(now - w.started_at)})" for w in alive[:10])
    gone = f"; {dead} dead, which the next worker clears away" if dead else ""
    if silent:
        names = ", ".join(f"{worker.name} for {span(now - worker.beat_at)}" for worker in silent[:10])
        gone += f"; {len(silent)} silent, suspended or cut off from the database: {names}"
    if not alive and unfinished:
        found = (
            f"none is alive, and {plural(unfinished, 'run is', 'runs are')} unfinished: timers, decisions and signals wait for one{gone}"
        )
        return Check("workers", "warn", found, "perdure worker FILE.py")
    return Check("workers", "ok", f"{len(alive)} alive" + (f": {each}" if each else "") + gone)


def _approvals(store: Reading, now: int) -> Check:
    """Pending approvals are ok. If an approval has expired and no worker has recorded this, the verdict is "warn"."""
    pending = store.approvals(ApprovalFilter(limit=PENDING_LOOKED_AT))
    if not pending:
        return Check("approvals", "ok", "nothing waits for an approval")
    more = "at least " if len(pending) == PENDING_LOOKED_AT else ""
    oldest = min(row.asked_at for row in pending)
    found = f"{more}{plural(len(pending), 'approval')} pending, the oldest for {span(now - oldest)}"
    overdue = [row for row in pending if (row.standing.request.expires_at or now) < now - IGNORED_AFTER_US]
    if not overdue:
        return Check("approvals", "ok", found)
    late = f"{found}; {plural(len(overdue), 'has', 'have')} run out of time, and no worker has noticed: {_some(row.approval for row in overdue)}"
    return Check("approvals", "warn", late, shell.command("why", overdue[0].run_id))


def _attention(run_ids: list[str]) -> Check:
    if not run_ids:
        return Check("attention", "ok", "no run needs a person")
    return Check(
        "attention",
        "warn",
        f"{plural(len(run_ids), 'run needs', 'runs need')} a person: {_some(run_ids)}",
        shell.command("why", run_ids[0]),
    )


def _ignored(rows: list[RunRow], now: int) -> Check:
    if not rows:
        return Check("queue", "ok", "no ready run is left lying")
    oldest = min(rows, key=lambda row: row.ready_at or 0)
    agents = ", ".join(sorted({row.agent for row in rows}))
    found = f"{plural(len(rows), 'ready run')} that no worker claims, of {agents}; the oldest ({oldest.run_id}) for {span(now - (oldest.ready_at or now))}"
    return Check("queue", "warn", found, shell.command("worker", f"FILE.py:{oldest.agent}"))


def _suspects(rows: list[RunRow]) -> Check:
    if not rows:
        return Check("suspects", "ok", "no run waits because workers died with it")
    with_whom = "it: it may be what kills them, and suspects" if len(rows) == 1 else "them: one may be what kills them, and suspects"
    found = (
        f"{plural(len(rows), 'ready run waits', 'ready runs wait')} because {SUSPECT_CRASHES} or more workers in a row died with {with_whom} "
        f"are driven in groups ({_some(row.run_id for row in rows)})"
    )
    return Check(
        "suspects", "warn", found, f"{shell.command('why', rows[0].run_id)}; the logs of the workers that died say more (out of memory?)"
    )


def _orphaned(rows: list[RunRow], silent: set[str]) -> Check:
    """Runs that are held by workers which are not alive. `silent`: the registered workers that are not proven dead."""
    if not rows:
        return Check("leases", "ok", "every run that is held is held by a worker that lives")
    kinds = {
        "dead": [row.run_id for row in rows if row.holder not in silent],
        "silent": [row.run_id for row in rows if row.holder in silent],
    }
    found = "; ".join(f"{plural(len(ids), 'run')} held by {kind} workers: {_some(ids)}" for kind, ids in kinds.items() if ids)
    after = ", from a silent worker when its lease has run out" if kinds["silent"] else ""
    return Check("leases", "warn", found, f"the next worker takes them over{after}; here: {shell.command('resume', rows[0].run_id)}")


def _clock(newest: int, now: int) -> Check:
    if newest > now + CLOCK_SKEW_US:
        found = f"the newest run was written {span(newest - now)} in the future: a clock was wrong, now or then"
        return Check("clock", "warn", found, "set this machine's clock (NTP); order is not affected, timers are late by the difference")
    return Check("clock", "ok", "no run was written in the future")


def _some(run_ids: Iterable[str]) -> str:
    listed = list(run_ids)
    return ", ".join(listed[:5]) + (f" and {len(listed) - 5:,} more" if len(listed) > 5 else "")
