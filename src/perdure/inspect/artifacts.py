"""Checks artifacts: finds orphans, and damaged artifacts that events name."""

from __future__ import annotations

import math
from collections.abc import Iterator

from msgspec import Struct

from perdure.core.codec import Payload
from perdure.core.events import Event
from perdure.core.state import fold, payloads
from perdure.engine.api import Reading
from perdure.engine.artifacts import opened
from perdure.errors import NotFound, StoreError
from perdure.inspect.health import Check
from perdure.inspect.text import plural
from perdure.store.api import FINISHED, ArtifactRow
from perdure.tool.artifact import ids_in, pointers_in

_LOOKED_AT = 1_000  # how many runs `perdure doctor` checks; `perdure prune --orphans` checks all runs


class Orphan(Struct, frozen=True):
    """An artifact that no event names, and that no event will name any more."""

    artifact: str
    run_id: str
    call: int
    attempt: int
    size: int | None


def orphans(store: Reading, runs: float = math.inf) -> Iterator[Orphan]:
    """All orphans, or only the orphans of the first `runs` runs that have saved artifacts.

    An artifact of an attempt under way is no orphan: an event may still name it. So only artifacts of calls that have
    ended count. A call in doubt has not ended: a reconcile hook or a person may still name the artifact.
    """
    after, seen = "", 0
    while seen < runs and (page := store.artifact_runs(after)):
        after, seen = page[-1], seen + len(page)
        for run_id in page:
            # Read the artifacts before the journal. If an attempt ends between these two reads, the journal has its
            # end.
            rows = [row for row in store.artifacts_of(run_id) if row.state != "deleting"]
            yield from (Orphan(row.artifact, row.run_id, row.call, row.attempt, row.size) for row in _orphans(store, run_id, rows))


def _orphans(store: Reading, run_id: str, rows: list[ArtifactRow]) -> Iterator[ArtifactRow]:
    run = store.get(run_id)
    if run is None:
        # The run was pruned. If the artifact is still there and saved, another family uses it. If it is not saved, an
        # interrupted copy has left it.
        yield from (row for row in rows if row.state == "saving")
        return
    events = store.read(run_id)
    state, named = fold(events), set(_named(store, events))
    for row in rows:
        call = state.calls.get(row.call)
        # A call that is not known although it was made has ended before a checkpoint, and its events were removed.
        ended = run.status in FINISHED or (call.ended if call is not None else row.call <= state.numbers)
        if ended and row.artifact not in named:
            yield row


def _named(store: Reading, events: list[Event]) -> Iterator[str]:
    for payload in (payload for event in events for payload in payloads(event.body)):
        yield from ids_in(_json(store, payload))


def _json(store: Reading, payload: Payload) -> bytes:
    inline = payload.inline
    return store.blob(str(payload.blob)) if inline is None else inline


def artifact_problem(store: Reading, run_id: str, events: list[Event]) -> str | None:
    """The first damaged artifact that the run saved and its journal names, in words; None if there is none."""
    own = {row.artifact for row in store.artifacts_of(run_id)}
    if not own:
        return None
    seen: set[str] = set()
    for payload in (payload for event in events for payload in payloads(event.body)):
        for pointer in pointers_in(_json(store, payload)):
            if pointer.id in own and pointer.id not in seen:
                seen.add(pointer.id)
                try:
                    for _ in opened(store, pointer, run_id):
                        pass
                except (NotFound, StoreError) as error:
                    return str(error)
    return None


def check_artifacts(store: Reading) -> Iterator[Check]:
    """The checks of `perdure doctor`."""
    facts = store.facts()
    count, whole, here, doomed = (int(facts[name]) for name in ("artifacts", "artifact_bytes", "artifact_bytes_here", "artifacts_doomed"))
    lost = list(orphans(store, _LOOKED_AT)) if count else []
    found = f"{plural(count, 'artifact')}, {whole:,} bytes, of them {here:,} in this database"
    if not lost and not doomed:
        yield Check("artifacts", "ok", found)
        return
    size = sum(orphan.size or 0 for orphan in lost)
    what = (
        f"{found}; {plural(len(lost), 'orphan')} that no event names ({size:,} bytes and what was not finished), {doomed:,} to be deleted"
    )
    yield Check("artifacts", "warn", what, "perdure prune --orphans")
