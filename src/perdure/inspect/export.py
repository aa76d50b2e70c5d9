"""One portable file of a run and of those below it: what verify and replay need, without the database that it came from.

What it holds is the journal, byte for byte; approvals, costs and the run's row are folds of that. Not in it is what somebody has sent and
the run has not read yet. Secrets are in it as far as they are in the journal: not at all (G15); everything else of the journal is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from msgspec import Struct, structs

from perdure.core import chain, codec, keys
from perdure.core.codec import Payload
from perdure.core.events import ChildStarted, Event, decode_body
from perdure.core.state import RunState
from perdure.errors import StoreCorrupt
from perdure.inspect.portable import FORMAT, BlobLine, EndLine, EventLine, Header, RunLine, Writer, read_lines
from perdure.inspect.verify import Checked, Verdict, payloads, verify_journal
from perdure.inspect.view import require
from perdure.inspect.words import iso
from perdure.store.api import RunRow, Store, Stored


class Exported(Struct, frozen=True):
    """How much was written."""

    run_id: str
    runs: int
    events: int
    blobs: int


class Journal(Struct, frozen=True):
    """One run of an export, checked."""

    run_id: str
    agent: str
    version: str
    events: list[Event]
    state: RunState


class Export(Struct, frozen=True):
    """A whole export, checked: every hash, every blob, and that each event may follow the one before."""

    header: Header
    runs: dict[str, Journal]  # the run that was exported first, then those below it
    blobs: dict[str, bytes]

    @property
    def root(self) -> Journal:
        return self.runs[self.header.run_id]

    def load(self, payload: Payload) -> bytes:
        """The JSON of a recorded payload, wherever it lies."""
        inline = payload.inline
        return self.blobs[str(payload.blob)] if inline is None else inline


# -- out ------------------------------------------------------------------------------------------------------------------------
def export_run(store: Store, run_id: str, write: Callable[[bytes], object]) -> Exported:
    """Write the run and those below it, its undo included. StoreCorrupt when a journal is not as it was written."""
    row = require(store, run_id)
    writer = Writer(write)
    writer.put(Header(FORMAT, _version(), iso(time.time_ns() // 1000), run_id, row.agent, row.version, row.target))
    written: set[str] = set()
    waiting = [run_id]
    while waiting:
        one = waiting.pop(0)
        waiting += _put_run(store, row if one == run_id else require(store, one), writer, written)
        if store.get(undo := keys.undo_id(one)) is not None:
            waiting.append(undo)
    writer.end()
    return Exported(run_id, writer.runs, writer.events, writer.blobs)


def _version() -> str:
    try:
        return version("perdure")
    except PackageNotFoundError:  # run from its source, without being installed
        return "unknown"


def _put_run(store: Store, row: RunRow, writer: Writer, written: set[str]) -> list[str]:
    """Write one run; its children. The row was read first, so that the journal has at least what it speaks of; the rest is left out."""
    writer.put(RunLine(row.run_id, row.agent, row.version, row.tenant, row.status, row.parent, row.seq, row.head.hex()))
    children: list[str] = []
    head, expected = chain.genesis(row.run_id), 1
    for stored in store.stored(row.run_id)[: row.seq]:
        line = _line(head, expected, stored)
        if line is None:
            break
        body = decode_body(stored.data)
        for payload in payloads(body):
            if isinstance(payload.blob, str) and payload.blob not in written:
                writer.put(BlobLine(payload.blob, store.blob(payload.blob)))
                written.add(payload.blob)
        writer.put(line)
        if isinstance(body, ChildStarted):
            children.append(body.run_id)
        head, expected = stored.hash, expected + 1
    if expected <= row.seq or head != row.head:
        raise StoreCorrupt(
            f"run {row.run_id}, event {min(expected, row.seq)}: it is not as it was written, and cannot be exported; "
            f"perdure verify {row.run_id} says more"
        )
    return children


def _line(before: bytes, seq: int, stored: Stored) -> EventLine | None:
    """The event as it travels; None when it is not the one that was written there."""
    event_id = stored.event_id.hex() if isinstance(stored.event_id, bytes) else stored.event_id
    try:
        data = stored.data.decode()
        hash_ = chain.link(before, seq, event_id, stored.ts, stored.epoch, stored.call, stored.cause, stored.data)
    except (UnicodeDecodeError, TypeError, AttributeError):
        return None
    if stored.seq != seq or stored.hash != hash_:
        return None
    return EventLine(seq, event_id, stored.ts, stored.epoch, stored.call, stored.cause, data, hash_.hex())


# -- in -------------------------------------------------------------------------------------------------------------------------
def load(path: Path | str) -> Export:
    """The export in this file, checked as `perdure verify` does. InvalidInput when it is no export, StoreCorrupt when it is not whole."""
    runs: dict[str, Journal] = {}
    blobs: dict[str, bytes] = {}
    header: Header | None = None
    for part in _parts(Path(path), blobs):
        if isinstance(part, Header):
            header = part
            continue
        run, verdict, checked = part
        if verdict.problem is not None:
            place = f", event {verdict.seq}" if verdict.seq is not None else ""
            raise StoreCorrupt(f"{path}: run {verdict.run_id}{place}: {verdict.problem}")
        runs[run.run_id] = Journal(run.run_id, run.agent, run.version, checked.events, checked.state)
    assert header is not None
    if header.run_id not in runs:
        raise StoreCorrupt(f"{path} is an export of run {header.run_id}, which is not in it")
    return Export(header, runs, blobs)


def verdicts(path: Path | str) -> Iterator[Verdict]:
    """What `perdure verify` says about each run of the file. StoreCorrupt, at the end too, when the file is not whole."""
    for part in _parts(Path(path), {}):
        if not isinstance(part, Header):
            yield part[1]


def _parts(path: Path, blobs: dict[str, bytes]) -> Iterator[Header | tuple[RunLine, Verdict, Checked]]:
    """The header, then each run with what was found about it; one journal at a time is in memory as it lay in the file."""
    run: RunLine | None = None
    seen: set[str] = set()
    stored: list[Stored] = []
    for line in read_lines(path):
        match line:
            case Header():
                if seen:
                    raise StoreCorrupt(f"{path} has a second header: an export is one file of one run")
                seen.add("")
                yield line
            case RunLine() | EndLine():
                if run is not None:
                    yield run, *_judge(run, stored, blobs)
                run, stored = (line, []) if isinstance(line, RunLine) else (None, [])
                if run is not None and run.run_id in seen:
                    raise StoreCorrupt(f"{path} has run {run.run_id} twice")
                seen.add("" if run is None else run.run_id)
            case BlobLine():
                blobs[line.digest] = line.base64
            case EventLine() if run is not None:
                stored.append(_stored(line))
            case EventLine():
                raise StoreCorrupt(f"{path} has an event that belongs to no run")


def _judge(run: RunLine, stored: list[Stored], blobs: dict[str, bytes]) -> tuple[Verdict, Checked]:
    verdict, checked = verify_journal(run, stored, partial(_blob, blobs))
    if verdict.problem is None and (len(stored), checked.head) != (run.seq, run.head):
        problem = f"it ends with event {len(stored)}, and the line of the run says {run.seq}, and another hash"
        verdict = structs.replace(verdict, seq=min(len(stored), run.seq) + 1, problem=problem)
    return verdict, checked


def _stored(line: EventLine) -> Stored:
    try:
        hash_ = bytes.fromhex(line.hash)
    except ValueError:
        hash_ = b""  # no hash is that, and whoever checks says so
    data = line.data.encode("utf-8", "surrogatepass")
    return Stored(line.seq, line.event_id, line.ts, line.epoch, line.call, line.cause, data, hash_)


def _blob(blobs: dict[str, bytes], digest: str) -> bytes:
    found = blobs.get(digest)
    if found is None:
        raise StoreCorrupt(f"blob {digest} is missing")
    if codec.digest(found) != digest:
        raise StoreCorrupt(f"blob {digest} does not have the content that its digest says")
    return found
