"""One portable file of a run and of those below it: what verify and replay need, without the database that it came from.

What it holds is the journal, byte for byte; approvals, costs and the run's row are folds of that. Not in it is what somebody has sent and
the run has not read yet. Secrets are in it as far as they are in the journal: not at all (G15); everything else of the journal is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from msgspec import Struct, structs

from perdure import shell
from perdure.core import codec, identity
from perdure.core.codec import Payload
from perdure.core.events import AnyBody, Event, decode_body
from perdure.core.state import RunState
from perdure.engine.api import Reading
from perdure.errors import StoreCorrupt
from perdure.inspect.portable import FORMAT, BlobLine, EndLine, EventLine, Header, RunLine, Writer, read_lines
from perdure.inspect.verify import Checked, Verdict, payloads, verify_journal
from perdure.inspect.view import require
from perdure.inspect.words import iso
from perdure.store.api import RunRow, Stored


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
def export_run(store: Reading, run_id: str, write: Callable[[bytes], object]) -> Exported:
    """Write the run and those below it, its undo included. StoreCorrupt when a journal is not as it was written."""
    writer = Writer(write)
    written: set[str] = set()
    waiting = [run_id]
    while waiting:
        one = waiting.pop(0)
        run, lines, state = _journal(require(store, one), store.stored(one))
        if one == run_id:
            writer.put(Header(FORMAT, _version(), iso(time.time_ns() // 1000), one, *_headed(state)))
        _put_run(store, run, lines, writer, written)
        waiting += [child.run_id for child in state.children.values()]
        if store.get(undo := identity.undo_id(one)) is not None:
            waiting.append(undo)
    writer.end()
    return Exported(run_id, writer.runs, writer.events, writer.blobs)


def _version() -> str:
    try:
        return version("perdure")
    except PackageNotFoundError:  # run from its source, without being installed
        return "unknown"


def _journal(row: RunRow, stored: list[Stored]) -> tuple[RunLine, list[tuple[EventLine, AnyBody]], RunState]:
    """One run as it travels. The row was read first, so that the journal has at least what it speaks of; the rest is left out.

    Of the row only the end of the journal is believed: everything else that a run's line says is a fold, as whoever reads it finds out.
    """
    lines: list[tuple[EventLine, AnyBody]] = []
    state = RunState()
    head = identity.genesis(row.run_id)
    for one in stored[: row.seq]:
        line = _line(head, len(lines) + 1, one)
        if line is None:
            break
        body = decode_body(one.data)
        state.apply(Event(line.seq, line.event_id, line.ts, line.epoch, line.call, line.cause, body))
        lines.append((line, body))
        head = one.hash
    if len(lines) < row.seq or head != row.head or state.created is None:
        raise StoreCorrupt(
            f"run {row.run_id}, event {min(len(lines) + 1, row.seq)}: it is not as it was written, and cannot be exported; "
            f"{shell.command('verify', row.run_id)} says more"
        )
    return RunLine(row.run_id, *_told(state), row.seq, head.hex()), lines, state


def _put_run(store: Reading, run: RunLine, lines: list[tuple[EventLine, AnyBody]], writer: Writer, written: set[str]) -> None:
    writer.put(run)
    for line, body in lines:
        for payload in payloads(body):
            if isinstance(payload.blob, str) and payload.blob not in written:
                writer.put(BlobLine(payload.blob, store.blob(payload.blob)))
                written.add(payload.blob)
        writer.put(line)


def _told(state: RunState) -> tuple[str, str, str, str, str | None]:
    """What the line of a run says about it, by its journal: agent, version, tenant, status, parent."""
    created = state.created
    assert created is not None
    return created.agent, state.version, created.tenant, state.status, created.parent


def _headed(state: RunState) -> tuple[str, str, str | None]:
    """What the header says about the run that was asked for: agent, version, target."""
    created = state.created
    assert created is not None
    return created.agent, state.version, created.target


def _line(before: bytes, seq: int, stored: Stored) -> EventLine | None:
    """The event as it travels; None when it is not the one that was written there."""
    event_id = stored.event_id.hex() if isinstance(stored.event_id, bytes) else stored.event_id
    try:
        data = stored.data.decode()
        hash_ = identity.link(before, seq, event_id, stored.ts, stored.epoch, stored.call, stored.cause, stored.data)
    except (UnicodeDecodeError, TypeError, AttributeError):
        return None
    if stored.seq != seq or stored.hash != hash_:
        return None
    return EventLine(seq, event_id, stored.ts, stored.epoch, stored.call, stored.cause, data, hash_.hex())


# -- in -------------------------------------------------------------------------------------------------------------------------
def load(path: Path | str) -> Export:
    """The export in this file, checked as `perdure verify` does. InvalidInput when it is no export, StoreCorrupt when it is not whole."""
    reading = _Reading(Path(path))
    runs: dict[str, Journal] = {}
    for verdict, checked in reading.runs():
        if verdict.problem is not None:
            place = f", event {verdict.seq}" if verdict.seq is not None else ""
            raise StoreCorrupt(f"{path}: run {verdict.run_id}{place}: {verdict.problem}")
        agent, goes_on_with, *_ = _told(checked.state)
        runs[verdict.run_id] = Journal(verdict.run_id, agent, goes_on_with, checked.events, checked.state)
    assert reading.header is not None
    return Export(reading.header, runs, reading.blobs)


def verdicts(path: Path | str) -> Iterator[Verdict]:
    """What `perdure verify` says about each run of the file. StoreCorrupt, at the end too, when the file is not whole."""
    for verdict, _ in _Reading(Path(path)).runs():
        yield verdict


class _Reading:
    """Walks the file once; one journal at a time is in memory as it lay in it."""

    def __init__(self, path: Path) -> None:
        self.header: Header | None = None
        self.blobs: dict[str, bytes] = {}
        self._path = path
        self._bad: set[str] = set()  # blobs that are not what their digest says
        self._seen: set[str] = set()
        self._expected: set[str] = set()  # runs that the journals so far have started, and that have not come yet
        self._all_sound = True

    def runs(self) -> Iterator[tuple[Verdict, Checked]]:
        """Each run with what was found about it; StoreCorrupt as soon as the file cannot be what was written."""
        run: RunLine | None = None
        stored: list[Stored] = []
        for line in read_lines(self._path):
            match line:
                case Header():
                    self._begin(line)
                case RunLine() | EndLine():
                    if run is not None:
                        yield self._judge(run, stored)
                    run, stored = (line, []) if isinstance(line, RunLine) else (None, [])
                    if run is not None:
                        self._enter(run.run_id)
                case BlobLine() if run is not None:
                    self._keep(line)
                case EventLine() if run is not None:
                    stored.append(_stored(line))
                case _:
                    raise StoreCorrupt(f"{self._path} has a line of kind {line.__struct_config__.tag} that belongs to no run")
        if self._expected:
            raise StoreCorrupt(f"{self._path} is an export with run {min(self._expected)}, which is not in it")

    def _begin(self, header: Header) -> None:
        if self.header is not None:
            raise StoreCorrupt(f"{self._path} has a second header: an export is one file of one run")
        self.header = header
        self._expected.add(header.run_id)

    def _enter(self, run_id: str) -> None:
        if run_id in self._seen:
            raise StoreCorrupt(f"{self._path} has run {run_id} twice")
        # A journal that is damaged, which was said, does not tell any more what it has started.
        if self._all_sound and run_id not in self._expected and identity.undone_by(run_id) not in self._seen:
            raise StoreCorrupt(f"{self._path} has run {run_id}, which no run before it has started: it does not belong there")
        self._seen.add(run_id)
        self._expected.discard(run_id)

    def _keep(self, blob: BlobLine) -> None:
        """A second content for a digest would take the place of the one that the runs before were judged by."""
        if blob.digest in self.blobs or blob.digest in self._bad:
            raise StoreCorrupt(f"{self._path} has blob {blob.digest} twice")
        if codec.digest(blob.base64) == blob.digest:
            self.blobs[blob.digest] = blob.base64
        else:
            self._bad.add(blob.digest)

    def _judge(self, run: RunLine, stored: list[Stored]) -> tuple[Verdict, Checked]:
        verdict, checked = verify_journal(run, stored, self._blob)
        if verdict.problem is None:
            seq, problem = self._problem(run, len(stored), checked)
            verdict = structs.replace(verdict, seq=seq, problem=problem, projection=problem is not None and seq is None)
        if verdict.problem is None and self._bad:
            raise StoreCorrupt(f"{self._path}: {_other_content(min(self._bad))}")
        self._all_sound = self._all_sound and verdict.problem is None
        self._expected |= {child.run_id for child in checked.state.children.values()} - self._seen
        return verdict, checked

    def _problem(self, run: RunLine, events: int, checked: Checked) -> tuple[int | None, str | None]:
        """What does not fit a sound journal: where, and what."""
        if (events, checked.head) != (run.seq, run.head) or checked.state.created is None:
            seq = min(events, run.seq) + 1
            return seq, f"it ends with event {events}, and the line of the run says {run.seq}, and another hash"
        problem = _differs("the line of the run", run, ("agent", "version", "tenant", "status", "parent"), _told(checked.state))
        if problem is None and self.header is not None and run.run_id == self.header.run_id:
            problem = _differs("the header", self.header, ("agent", "version", "target"), _headed(checked.state))
        return None, problem

    def _blob(self, digest: str) -> bytes:
        if digest in self._bad:
            raise StoreCorrupt(_other_content(digest))
        found = self.blobs.get(digest)
        if found is None:
            raise StoreCorrupt(f"blob {digest} is missing")
        return found


def _other_content(digest: str) -> str:
    return f"blob {digest} does not have the content that its digest says"


def _differs(what: str, line: Header | RunLine, names: tuple[str, ...], told: tuple[str | None, ...]) -> str | None:
    """The first thing that the line says and the journal does not."""
    for name, expected in zip(names, told, strict=True):
        if (found := getattr(line, name)) != expected:
            return f"the journal is sound, but {what} is not: {name} is {found!r:.80}, and by the journal it is {expected!r:.80}"
    return None


def _stored(line: EventLine) -> Stored:
    try:
        hash_ = bytes.fromhex(line.hash)
    except ValueError:
        hash_ = b""  # no hash is that, and whoever checks says so
    data = line.data.encode("utf-8", "surrogatepass")
    return Stored(line.seq, line.event_id, line.ts, line.epoch, line.call, line.cause, data, hash_)
