"""Makes rows for a local journal from an export: the family becomes specimens, so that people can look at it.

Also makes the rows of forks.

This module writes nothing. The whole file was checked before (`export.load`), and the store's `take_in_specimen`
writes all rows in one transaction. A specimen has the bytes of its events exactly as they were hashed. So `perdure
verify` checks them here as in the original journal. The rows are computed from the journal, as of its last event.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct, structs

from perdure import shell
from perdure.core import codec, identity
from perdure.core.budget import NOTHING, Amounts
from perdure.core.codec import Payload
from perdure.core.events import ChildStarted, Event, Limits, encode_body
from perdure.core.state import RunState, payloads
from perdure.errors import Conflict, InvalidInput, PerdureError, StoreCorrupt
from perdure.inspect.export import Export, ExportedArtifact, ExportedJournal, artifact_chunks, load
from perdure.inspect.projection import row_of, specimen_row
from perdure.inspect.repair import right_approval
from perdure.inspect.text import Load
from perdure.store.api import ArtifactRow, Head, NewFork, Recorded, RunRow, Specimen, Stored, Whole
from perdure.tool.artifact import CHUNK_BYTES, SCHEME, Artifact


class Family(Struct, frozen=True):
    """A family of specimens, ready to be inserted."""

    export: Export
    wholes: list[Whole]  # the parents before their children
    artifacts: dict[str, ArtifactRow]  # by URI


def read_family(path: Path, *, by: str, now: int) -> Family:
    """The specimens in this file.

    InvalidInput if the file is no export, or cannot become a specimen. StoreCorrupt if the file is damaged or cut off.
    """
    _check_file(path)
    try:
        export = load(path)
    except StoreCorrupt as damage:
        raise StoreCorrupt(f"{damage}; nothing was imported") from None
    root = export.header.run_id
    if "/" in root:
        whole = root.partition("/")[0]
        raise InvalidInput(
            f"{path} holds run {root}, which is a part of the family of {whole}; nothing was imported: export the whole family, "
            f"in the journal that it came from: perdure export {shell.quote(whole)} -o FILE"
        )
    for name in (*export.runs, *(ask.request.approval for run in export.runs.values() for ask in run.state.asks.values())):
        if not identity.is_id(name):
            raise InvalidInput(f"{path} has a run or an approval with the id {name!r:.80}, which perdure never gives; nothing was imported")
    made = Specimen(export.sha256, export.header.exported_at, now, by, export.header.redacted or 0)
    artifacts = {one.line.uri: _artifact(one, export) for one in export.artifacts}
    wholes = [_whole(run, export, made) for run in export.runs.values()]
    wholes[0].artifacts.extend(row.artifact for row in artifacts.values())
    return Family(export, wholes, artifacts)


def chunks(path: Path, family: Family) -> Iterator[tuple[ArtifactRow, Iterable[bytes]]]:
    """The artifacts with their bytes.

    The file is read again; StoreCorrupt if the file was changed since the first time.
    """
    for line, data in artifact_chunks(path):
        if line.uri not in family.artifacts:
            raise StoreCorrupt(f"{path} was changed while it was imported; nothing was imported: try again")
        yield family.artifacts[line.uri], _even(data)
        for _ in data:  # read the bytes that the store has not read because it already has the artifact
            pass


def _even(data: Iterable[bytes]) -> Iterator[bytes]:
    """The same bytes in chunks of CHUNK_BYTES: the store finds a chunk by its number."""
    held = b""
    for piece in data:
        held += piece
        while len(held) >= CHUNK_BYTES:
            yield held[:CHUNK_BYTES]
            held = held[CHUNK_BYTES:]
    if held:
        yield held


def is_there(family: Family, found: dict[str, Head], *, specimens: Sequence[str]) -> bool:
    """Is exactly this family in the journal already, as specimens?

    Raises Conflict if another run has one of its ids.
    """
    runs = family.export.runs
    if not found:
        return False
    for run_id, head in found.items():
        if head.pruned:
            raise Conflict(f"run {run_id} ran in this journal and was pruned: its id is not used again; nothing was imported: {_ELSEWHERE}")
        if run_id not in specimens:
            raise Conflict(f"run {run_id} is a run of this journal; nothing was imported: {_ELSEWHERE}")
        if (head.seq, head.head) != (len(runs[run_id].stored), runs[run_id].head):
            raise Conflict(
                f"specimen {run_id} is here with other content ({head.seq:,} events, head {head.head.hex()[:12]}…); nothing was imported: "
                f"delete it first (perdure prune --specimen {shell.quote(family.export.header.run_id)}), or {_ELSEWHERE}"
            )
    missing = sorted(set(runs) - set(found))
    if missing:
        raise Conflict(
            f"specimen {family.export.header.run_id} is here without run {missing[0]} of this file; nothing was imported: delete it first "
            f"(perdure prune --specimen {shell.quote(family.export.header.run_id)}), or {_ELSEWHERE}"
        )
    return True


_ELSEWHERE = "import it into another database: --url sqlite:///incident.db"


def _check_file(path: Path) -> None:
    try:
        if not path.is_file():
            raise InvalidInput(f"{path} is {'no file' if path.exists() else 'not there'}; name a file that `perdure export` has written")
    except OSError as error:
        raise InvalidInput(f"{path}: {error.strerror}") from None


def _whole(run: ExportedJournal, export: Export, made: Specimen) -> Whole:
    state, created = run.state, run.state.created
    assert created is not None
    specimen = structs.replace(made, original_head=run.original_head)
    row = specimen_row(run.run_id, state, run.events, run.input_digest, run.head, msgspec.json.encode(specimen).decode())
    parent = export.runs.get(created.parent or "")
    started = [event.seq for event in parent.events if _starts(event.body, run.run_id)] if parent is not None else []
    return Whole(
        run=columns(row, started[0] if started else None, created.depth),
        ledger_of=_payer(run, export),
        events=[structs.replace(one, event_id=_event_id(one)) for one in run.stored],
        approvals=approval_rows(run.state),
        signals=[],
        budgets=_budgets(run, export),
        reserved=[],
        inbox=[],
        notices=[],
        blobs=sorted({payload.blob for event in run.events for payload in payloads(event.body) if isinstance(payload.blob, str)}),
        artifacts=[],
        checkpoints=[(run.state.checkpoint, 0, None, None, None)] if run.state.checkpoint else [],
        labels=list(run.state.labels.items()),
    )


class Packing:
    """Packs payloads for the events of a fork, and keeps the blobs that do not fit into an event."""

    def __init__(self, inline_bytes: int, load: Load) -> None:
        self.blobs: dict[str, bytes] = {}
        self._inline_bytes = inline_bytes
        self._load = load

    def pack(self, encoded: bytes) -> Payload:
        payload, blob = codec.pack(encoded, self._inline_bytes)
        if blob is not None:
            self.blobs[str(payload.blob)] = blob
        return payload

    def load(self, payload: Payload) -> bytes:
        new = None if payload.inline is not None else self.blobs.get(str(payload.blob))
        return self._load(payload) if new is None else new


def new_fork(parent: Recorded, state: RunState, events: Sequence[Event], specimen: Specimen | None, packing: Packing) -> NewFork:
    """The rows of a fork with this journal. `specimen`: it is a rehearsal; else a worker goes on with it."""
    created = state.created
    assert created is not None
    head = identity.genesis(created.run_id)
    copied: dict[int, bytes] = {}
    own: list[Stored] = []
    named: set[str] = set()
    for place, one in enumerate(events):
        # An event that is the same object was not changed for the fork (core/fork.py), so its bytes are the same, too.
        same = place < len(parent.events) and parent.events[place] is one
        data = parent.data[place] if same else encode_body(one.body)
        head = identity.link(head, one.seq, one.event_id, one.ts, one.epoch, one.call, one.cause, data)
        if same:
            copied[one.seq] = head
        else:
            own.append(Stored(one.seq, bytes.fromhex(one.event_id), one.ts, one.epoch, one.call, one.cause, data, head))
        if b'"blob":' in data:
            named.update(payload.blob for payload in payloads(one.body) if isinstance(payload.blob, str))
    digest = codec.digest(packing.load(created.input))
    if specimen is None:
        row = row_of(created.run_id, state, events, digest, head)
    else:
        row = specimen_row(created.run_id, state, events, digest, head, msgspec.json.encode(specimen).decode())
    whole = Whole(
        run=columns(row, None, created.depth),
        ledger_of=None,
        events=own,
        approvals=approval_rows(state),
        signals=[],
        budgets=budget_rows(state.budget, None, state.spent),
        reserved=[],
        inbox=[],
        notices=[],
        blobs=sorted(named),
        labels=list(state.labels.items()),
    )
    return NewFork(whole, parent.run_id, copied, list(packing.blobs.values()))


def columns(row: RunRow, parent_seq: int | None, depth: int) -> tuple[object, ...]:
    """`Whole.run` of a run with this row."""
    return (
        *(row.run_id, row.agent, row.version, row.tenant, row.actor, row.queue, row.target, row.input_digest, row.status),
        *(row.waiting_for, row.ready_at, row.seq, row.head, row.epoch, row.lost, row.crashes, row.error, row.created_at),
        *(row.updated_at, row.priority, row.attention, row.parent, row.parent_call, parent_seq),
        *(depth, row.lost_with, row.specimen),
    )


def _starts(body: object, run_id: str) -> bool:
    return isinstance(body, ChildStarted) and body.run_id == run_id


def _event_id(stored: Stored) -> bytes:
    try:
        return bytes.fromhex(stored.event_id)
    except ValueError:
        raise StoreCorrupt(
            f"event {stored.seq} has the id {stored.event_id!r:.60}, and an id has 32 hexadecimal digits; nothing was imported"
        ) from None


def approval_rows(state: RunState) -> list[tuple[object, ...]]:
    """`Whole.approvals` of a run, as its journal has them."""
    rows = [right_approval(state, ask, None) for ask in state.asks.values()]
    return [
        (
            *(one.approval, one.seq, one.call, one.action, one.asked_at, one.status, msgspec.json.encode(one.deciders).decode()),
            *(one.expires_at, int(one.escalated), msgspec.json.encode(one.voters).decode(), one.digest, one.settled_by, one.note),
            one.settled_at,
        )
        for one in rows
    ]


def _payer(run: ExportedJournal, export: Export) -> str | None:
    """The run that has the budget: this run, or else its nearest ancestor with a budget."""
    at: ExportedJournal | None = run
    while at is not None and at.state.budget is None:
        assert at.state.created is not None
        at = export.runs.get(at.state.created.parent or "")
    return None if at is None else at.run_id


def _budgets(run: ExportedJournal, export: Export) -> list[tuple[object, ...]]:
    created = run.state.created
    assert created is not None
    above = export.runs.get(created.parent or "")
    below = [one.state.spent for one in export.runs.values() if one.run_id == run.run_id or one.run_id.startswith(f"{run.run_id}/")]
    return budget_rows(run.state.budget, None if above is None else _payer(above, export), sum(below, start=NOTHING))


def budget_rows(limits: Limits | None, above: str | None, spent: Amounts) -> list[tuple[object, ...]]:
    """`Whole.budgets` of a run with these limits. Nothing is reserved: no attempt is under way."""
    if limits is None:
        return []
    return [
        (
            *(above, limits.usd_micros, limits.tokens, limits.calls, limits.busy_us, limits.on_exceed),
            *(spent.usd_micros, spent.tokens, spent.calls, spent.busy_us),
            *(0, 0, 0, 0),
        )
    ]


def _artifact(one: ExportedArtifact, export: Export) -> ArtifactRow:
    event = export.runs[one.run_id].events[one.seq - 1]
    created = export.runs[one.run_id].state.created
    assert created is not None
    try:
        pointer = Artifact(one.line.uri, one.line.sha256, one.line.size, one.line.content_type)
    except PerdureError as error:
        raise StoreCorrupt(
            f"event {one.seq} of run {one.run_id} names an artifact that none can be ({error}); nothing was imported"
        ) from None
    return ArtifactRow(
        artifact=pointer.uri.removeprefix(SCHEME),
        run_id=one.run_id,
        tenant=created.tenant,
        call=event.call or 0,
        attempt=getattr(event.body, "attempt", 0),
        state="saving",
        place=None,
        object=None,
        sha256=bytes.fromhex(one.line.sha256),
        size=one.line.size,
        content_type=one.line.content_type,
        created_at=event.ts,
    )
