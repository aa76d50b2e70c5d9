"""Exports: one portable file with a run and the runs below it. Verify and replay read the file without the database.

The file has lines of JSON in ASCII. Each line has a kind:

    {"kind": "perdure_export", "format": 1, "perdure": "0.1.0", "exported_at": …, "run_id": …, "agent": …, …}
    {"kind": "run", "run_id": …, "seq": 12, "hash": …, …}      then the blobs and events of this run; parents first
    {"kind": "blob", "digest": …, "base64": …}                 before the first event that names this blob
    {"kind": "artifact", "uri": …, "sha256": …, "size": …, …}  before the first event that names it; its bytes follow
    {"kind": "bytes", "base64": …}                             a chunk of that artifact
    {"kind": "event", "seq": 1, …, "data": …, "hash": …}       the stored columns; `data` is the text that was hashed
    {"kind": "end", "runs": 1, "events": 12, "blobs": 1, "sha256": of all bytes before this line}

A redacted export has format 2. Its header says how many values were replaced (inspect/redact.py). Each of its runs has
`original_head`: the head of the run in the original journal. The hashes in the file are computed from the redacted
events. They show damage of the file, but prove nothing about the original events.

A file without its last line was cut off. The checksum finds damage, but it does not find a forged file. To find a
forged file, compare the heads in the file with copies of the heads from another place.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import BinaryIO

import msgspec
from msgspec import Struct, structs

from perdure import shell
from perdure.core import codec, identity
from perdure.core.codec import Payload
from perdure.core.events import AnyBody, Event, decode_body
from perdure.core.redaction import Rules
from perdure.core.state import RunState, own_children, payloads
from perdure.engine.api import Reading
from perdure.engine.artifacts import allowed, opened
from perdure.errors import InvalidInput, NotFound, StoreCorrupt
from perdure.inspect.redact import Redactor
from perdure.inspect.text import iso
from perdure.inspect.verify import Verdict, Verified, verify_journal
from perdure.inspect.view import require
from perdure.store.api import RunRow, Stored
from perdure.tool.artifact import CHUNK_BYTES, Artifact, pointers_in

FORMAT = 1
# A version that knows only format 1 would take the hashes of a redacted copy for the original hashes of the run.
REDACTED_FORMAT = 2
MOST_BYTES = 1 << 30  # `load` reads at most this many bytes of events and blobs into memory
_LONGEST_LINE = codec.MAX_BYTES * 3 // 2  # enough for the largest blob in base64


# -- The lines of the file


class ExportLine(Struct, frozen=True, tag_field="kind", forbid_unknown_fields=True):
    """The base class of all lines. It has no fields."""


class Header(ExportLine, frozen=True, omit_defaults=True, tag="perdure_export"):
    format: int
    perdure: str
    exported_at: str
    run_id: str
    agent: str
    version: str
    target: str | None
    # How many values were replaced; None: nothing is redacted, and the hashes are the original hashes.
    redacted: int | None = None
    original_head: str | None = None  # only in a redacted export: the head of the exported run in the original journal


class RunLine(ExportLine, frozen=True, omit_defaults=True, tag="run"):
    run_id: str
    agent: str
    version: str
    tenant: str
    status: str
    parent: str | None
    seq: int
    hash: str  # the hash of the run's last event
    original_head: str | None = None  # only in a redacted export: the hash in the original journal

    @property
    def head(self) -> bytes:
        return _from_hex(self.hash)


class BlobLine(ExportLine, frozen=True, tag="blob"):
    digest: str
    base64: bytes


class ArtifactLine(ExportLine, frozen=True, tag="artifact"):
    """An artifact that this run has saved. Its bytes follow in lines of kind `bytes`."""

    uri: str
    sha256: str
    size: int
    content_type: str


class BytesLine(ExportLine, frozen=True, tag="bytes"):
    base64: bytes


class EventLine(ExportLine, frozen=True, tag="event"):
    seq: int
    event_id: str
    ts: int
    epoch: int
    call: int | None
    cause: int | None
    data: str
    hash: str


class EndLine(ExportLine, frozen=True, omit_defaults=True, tag="end"):
    runs: int
    events: int
    blobs: int
    sha256: str
    artifacts: int = 0


AnyLine = Header | RunLine | BlobLine | ArtifactLine | BytesLine | EventLine | EndLine
_decoder = msgspec.json.Decoder(AnyLine)


class _Begins(Struct):
    """The fields that the header of every format has."""

    kind: str
    format: int


class Writer:
    """Writes lines, counts the lines of each kind, and computes the checksum."""

    def __init__(self, write: Callable[[bytes], object]) -> None:
        self._write = write
        self._sum = hashlib.sha256()
        self.runs = self.events = self.blobs = self.artifacts = 0

    def put(self, line: Header | RunLine | BlobLine | ArtifactLine | BytesLine | EventLine) -> None:
        encoded = _encoded(line)
        self._sum.update(encoded)
        self._write(encoded)
        match line:
            case RunLine():
                self.runs += 1
            case EventLine():
                self.events += 1
            case BlobLine():
                self.blobs += 1
            case ArtifactLine():
                self.artifacts += 1

    def end(self) -> None:
        self._write(_encoded(EndLine(self.runs, self.events, self.blobs, self._sum.hexdigest(), self.artifacts)))


def read_lines(path: Path) -> Iterator[AnyLine]:
    """The lines of the file, one by one.

    InvalidInput if the file is no export. StoreCorrupt if the file is damaged or cut off.
    """
    try:
        with path.open("rb") as file:
            first = file.readline(_LONGEST_LINE + 1)
            yield _header(path, first)
            yield from _rest(path, file, first)
    except OSError as error:
        raise InvalidInput(f"{path}: {error.strerror}") from None


def _header(path: Path, first: bytes) -> Header:
    try:
        begins = msgspec.json.decode(first, type=_Begins)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        packed = first[:2] in (b"\x1f\x8b", b"PK", b"BZ") or first[:4] == b"\x28\xb5\x2f\xfd"
        how = "; it is compressed: unpack it first" if packed else ""
        raise InvalidInput(f"{path} is no export of perdure{how}", hint="make one with `perdure export RUN -o FILE`") from None
    if begins.kind == "perdure_export" and begins.format not in (FORMAT, REDACTED_FORMAT):
        raise InvalidInput(
            f"{path} has format {begins.format}, and this version of perdure reads {FORMAT} and {REDACTED_FORMAT}; update perdure"
        )
    header = _decoded(path, 1, first)
    if not isinstance(header, Header):
        raise InvalidInput(f"{path} is no export of perdure: it does not begin with a line of kind perdure_export")
    is_redacted = header.format == REDACTED_FORMAT
    if {header.redacted is not None, header.original_head is not None} != {is_redacted}:
        raise StoreCorrupt(f"{path}, line 1: format {header.format} does not go with what the header says about redaction")
    return header


def _rest(path: Path, file: BinaryIO, first: bytes) -> Iterator[AnyLine]:
    counts, total, number = [0, 0, 0, 0], hashlib.sha256(first), 1
    while True:
        number += 1
        raw = file.readline(_LONGEST_LINE + 1)
        if len(raw) > _LONGEST_LINE:
            raise StoreCorrupt(
                f"{path}, line {number}: longer than {_LONGEST_LINE:,} bytes, the limit of a line; the file is not an export, or is damaged"
            )
        if not raw.endswith(b"\n"):
            raise StoreCorrupt(f"{path} was cut off in line {number}: an export ends with a line of kind end. Export the run again")
        line = _decoded(path, number, raw)
        if isinstance(line, EndLine):
            yield line
            _check_end(path, file, line, counts, total.hexdigest())
            return
        total.update(raw)
        for kind, of in enumerate((RunLine, EventLine, BlobLine, ArtifactLine)):
            counts[kind] += isinstance(line, of)
        yield line


def _check_end(path: Path, file: BinaryIO, end: EndLine, counts: list[int], total: str) -> None:
    if file.read(1):
        raise StoreCorrupt(f"{path} has more lines after the line of kind end: it was changed after the export")
    if [end.runs, end.events, end.blobs, end.artifacts] != counts or end.sha256 != total:
        raise StoreCorrupt(f"{path} was changed: its lines do not have the checksum in the last line")


def _decoded(path: Path, number: int, raw: bytes) -> AnyLine:
    try:
        line: AnyLine = _decoder.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise StoreCorrupt(f"{path}, line {number}: {error}; the file was changed or is damaged") from None
    return line


def _encoded(line: AnyLine) -> bytes:
    return json.dumps(msgspec.to_builtins(line), ensure_ascii=True, separators=(",", ":")).encode() + b"\n"


def _from_hex(text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError:
        return b""  # equal to no hash, so the check fails


# -- Writing and loading an export


class Exported(Struct, frozen=True):
    """How many runs, events, blobs and artifacts were written."""

    run_id: str
    runs: int
    events: int
    blobs: int
    artifacts: int = 0
    redacted: int | None = None  # how many values were replaced
    left_out: int = 0  # how many artifacts a redacted export leaves out
    # How many secrets are too short to be searched for: they are replaced only where a rule has found them.
    short: int = 0


class ExportedJournal(Struct, frozen=True):
    """One run of an export, after the check of its journal."""

    run_id: str
    agent: str
    version: str
    events: list[Event]
    state: RunState
    stored: list[Stored]
    input_digest: str
    original_head: str | None = None  # only in a redacted export

    @property
    def head(self) -> bytes:
        return bytes(self.stored[-1].hash)


class ExportedArtifact(Struct, frozen=True):
    """An artifact of the file, without its bytes. `artifact_chunks` reads the bytes."""

    line: ArtifactLine
    run_id: str  # the first run that names it
    seq: int  # the event that names it


class Export(Struct, frozen=True):
    """A whole export. Every hash, every blob and the order of the events were checked."""

    header: Header
    runs: dict[str, ExportedJournal]  # first the run that was exported, then the runs below it
    blobs: dict[str, bytes]
    artifacts: list[ExportedArtifact] = []
    sha256: str = ""  # the checksum of the file

    @property
    def root(self) -> ExportedJournal:
        return self.runs[self.header.run_id]

    def load(self, payload: Payload) -> bytes:
        """The JSON of a recorded payload, from its event or from the blobs."""
        inline = payload.inline
        return self.blobs[str(payload.blob)] if inline is None else inline


# -- out --------------------------------------------------------------------------------------------------------------
_Journal = tuple[RunLine, list[tuple[EventLine, AnyBody]], RunState]


def export_run(store: Reading, run_id: str, write: Callable[[bytes], object], rules: Rules | None = None) -> Exported:
    """Write the run, the runs below it, and the undos of these runs. Raises StoreCorrupt if a journal was changed.

    With `rules`, values are redacted first. If that is not possible, InvalidInput is raised and nothing is written.
    """
    if rules is not None:
        return _export_redacted(store, run_id, write, rules)
    writer = Writer(write)
    written: set[str] = set()
    redacted = _redacted_before(store, run_id)
    for run, lines, state in _family(store, run_id):
        if run.run_id == run_id:
            writer.put(_new_header(run, state, redacted))
        _put_run(store, run, lines, writer, written)
    writer.end()
    return Exported(run_id, writer.runs, writer.events, writer.blobs, writer.artifacts)


def _redacted_before(store: Reading, run_id: str) -> int | None:
    """How many values of this specimen had been redacted when it was imported; None if it is no redacted specimen."""
    imported = require(store, run_id).imported
    return None if imported is None or imported.original_head is None else imported.redacted


def _new_header(run: RunLine, state: RunState, redacted: int | None) -> Header:
    number = FORMAT if redacted is None else REDACTED_FORMAT
    return Header(number, _version(), iso(time.time_ns() // 1000), run.run_id, *_headed(state), redacted, run.original_head)


def _family(store: Reading, run_id: str) -> Iterator[_Journal]:
    waiting = [run_id]
    while waiting:
        one = waiting.pop(0)
        run, lines, state = _journal(require(store, one), store.stored(one))
        yield run, lines, state
        waiting += own_children(state)
        if store.get(undo := identity.undo_id(one)) is not None:
            waiting.append(undo)


def _export_redacted(store: Reading, run_id: str, write: Callable[[bytes], object], rules: Rules) -> Exported:
    """Redact the whole family before the first line is written.

    All journals are read only once. If a run went on between two reads, the second read could bring a secret that the
    first pass has not seen.
    """
    family = list(_family(store, run_id))
    redactor = Redactor(rules, lambda payload: store.blob(str(payload.blob)) if (inline := payload.inline) is None else inline)
    for _, lines, _ in family:
        for _, body in lines:
            redactor.collect(body)
    artifacts = {pointer.uri for _, lines, _ in family for _, body in lines for pointer in _pointers(store, body)}
    redacted = [_redacted(run, lines, redactor) for run, lines, _ in family]
    written = set[str]()
    header = _new_header(redacted[0][0], redacted[0][2], redactor.count + (_redacted_before(store, run_id) or 0))
    redactor.check("the run", header)
    writer = Writer(write)
    writer.put(header)
    for run, lines, _ in redacted:
        writer.put(run)
        for line, body in lines:
            for payload in payloads(body):
                if isinstance(payload.blob, str) and payload.blob not in written:
                    writer.put(BlobLine(payload.blob, redactor.blobs[payload.blob]))
                    written.add(payload.blob)
            writer.put(line)
    writer.end()
    return Exported(run_id, writer.runs, writer.events, writer.blobs, 0, redactor.count, len(artifacts), redactor.short)


def _redacted(run: RunLine, lines: list[tuple[EventLine, AnyBody]], redactor: Redactor) -> _Journal:
    state, events, fresh = RunState(), list[Event](), list[tuple[EventLine, AnyBody]]()
    head = identity.genesis(run.run_id)
    for line, whole in lines:
        event = Event(line.seq, line.event_id, line.ts, line.epoch, line.call, line.cause, whole)
        body = redactor.redact(event, state, events)
        redactor.check(f"event {line.seq} of run {run.run_id}", body)
        sealed = identity.seal(head, structs.replace(event, body=body))
        head = sealed.hash
        state.apply(sealed.event)
        events.append(sealed.event)
        fresh.append((structs.replace(line, data=sealed.data.decode(), hash=head.hex()), body))
    return RunLine(run.run_id, *_told(state), run.seq, head.hex(), run.original_head or run.hash), fresh, state


def _pointers(store: Reading, body: AnyBody) -> Iterator[Artifact]:
    for payload in payloads(body):
        inline = payload.inline
        yield from pointers_in(store.blob(str(payload.blob)) if inline is None else inline)


def _version() -> str:
    try:
        return version("perdure")
    except PackageNotFoundError:  # perdure runs from its source, and is not installed
        return "unknown"


def _journal(row: RunRow, stored: list[Stored]) -> tuple[RunLine, list[tuple[EventLine, AnyBody]], RunState]:
    """One run as lines, and the fold of its journal.

    The row was read first, so the journal has at least `row.seq` events. Later events are left out. Only the length
    and the head come from the row. The other fields of the run's line come from the fold of the journal, because the
    reader of the file compares these fields with the fold.
    """
    lines: list[tuple[EventLine, AnyBody]] = []
    state = RunState()
    head = identity.genesis(row.run_id)
    if len(stored) > 1 and stored[1].seq != 2 and b'"checkpoint_taken"' in stored[1].data[:40]:
        raise InvalidInput(
            f"run {row.run_id} cannot be exported: its events 2 to {stored[1].seq - 1} were removed by prune --before-checkpoint, so that no "
            "reader of the file could verify it"
        )
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
            f"run {row.run_id}, event {min(len(lines) + 1, row.seq)}: it was changed after it was written, and cannot be exported",
            hint=f"{shell.command('verify', row.run_id)} says more",
        )
    imported = row.imported
    return RunLine(row.run_id, *_told(state), row.seq, head.hex(), None if imported is None else imported.original_head), lines, state


def _put_run(store: Reading, run: RunLine, lines: list[tuple[EventLine, AnyBody]], writer: Writer, written: set[str]) -> None:
    writer.put(run)
    for line, body in lines:
        for payload in payloads(body):
            if isinstance(payload.blob, str) and payload.blob not in written:
                writer.put(BlobLine(payload.blob, store.blob(payload.blob)))
                written.add(payload.blob)
            inline = payload.inline
            for pointer in pointers_in(store.blob(str(payload.blob)) if inline is None else inline):
                if pointer.uri not in written:
                    _put_artifact(store, run.run_id, pointer, writer)
                    written.add(pointer.uri)
        writer.put(line)


def _put_artifact(store: Reading, run_id: str, pointer: Artifact, writer: Writer) -> None:
    """Write an artifact that this run names and may open, chunk by chunk.

    A pointer that the run may not open is left out: a model or a caller has invented it, or its artifact was pruned.
    """
    try:
        allowed(store, pointer, run_id)
    except NotFound:
        return
    writer.put(ArtifactLine(pointer.uri, pointer.sha256, pointer.size, pointer.content_type))
    for chunk in opened(store, pointer, run_id):
        for start in range(0, len(chunk), CHUNK_BYTES):
            writer.put(BytesLine(chunk[start : start + CHUNK_BYTES]))


def _told(state: RunState) -> tuple[str, str, str, str, str | None]:
    """The fields of a run's line that come from the journal: agent, version, tenant, status, parent."""
    created = state.created
    assert created is not None
    return created.agent, state.version, created.tenant, state.status, created.parent


def _headed(state: RunState) -> tuple[str, str, str | None]:
    """The fields of the header about the exported run: agent, version, target."""
    created = state.created
    assert created is not None
    return created.agent, state.version, created.target


def _line(before: bytes, seq: int, stored: Stored) -> EventLine | None:
    """The event as a line; None if the hash of the stored event is not right for this seq."""
    event_id = stored.event_id.hex() if isinstance(stored.event_id, bytes) else stored.event_id
    try:
        data = stored.data.decode()
        hash_ = identity.link(before, seq, event_id, stored.ts, stored.epoch, stored.call, stored.cause, stored.data)
    except (UnicodeDecodeError, TypeError, AttributeError):
        return None
    if stored.seq != seq or stored.hash != hash_:
        return None
    return EventLine(seq, event_id, stored.ts, stored.epoch, stored.call, stored.cause, data, hash_.hex())


# -- in ---------------------------------------------------------------------------------------------------------------
def load(path: Path | str) -> Export:
    """The export in this file, with the same checks as `perdure verify --export`.

    Raises InvalidInput if the file is no export, or is too large for the memory. Raises StoreCorrupt if the file is
    damaged or cut off.
    """
    reading = _Reading(Path(path), MOST_BYTES)
    runs: dict[str, ExportedJournal] = {}
    for verdict, checked, _, stored in reading.runs():
        if verdict.problem is not None:
            place = f", event {verdict.seq}" if verdict.seq is not None else ""
            raise StoreCorrupt(f"{path}: run {verdict.run_id}{place}: {verdict.problem}")
        agent, goes_on_with, *_ = _told(checked.state)
        runs[verdict.run_id] = ExportedJournal(
            verdict.run_id, agent, goes_on_with, checked.events, checked.state, stored, checked.input_digest, verdict.original_head
        )
    assert reading.header is not None
    return Export(reading.header, runs, reading.blobs, reading.artifacts, reading.sha256)


def verdicts(path: Path | str) -> Iterator[Verdict]:
    """The verdict of `perdure verify --export` on each run of the file.

    StoreCorrupt if the file is damaged or cut off. This error may come only after the verdict on the last run.
    """
    for verdict, *_ in _Reading(Path(path)).runs():
        yield verdict


def artifact_chunks(path: Path) -> Iterator[tuple[ArtifactLine, Iterator[bytes]]]:
    """The artifacts of the file, each with its bytes in chunks.

    Read all bytes of an artifact before you ask for the next.

    Raises StoreCorrupt if the bytes do not have the recorded hash.
    """
    lines = read_lines(path)
    waiting: AnyLine | None = None
    while (line := waiting or next(lines, None)) is not None:
        waiting = None
        if isinstance(line, ArtifactLine):
            check, after = _ArtifactCheck(path, line), list[AnyLine]()
            yield line, _bytes_of(lines, check, after)
            waiting = after[0] if after else None


def _bytes_of(lines: Iterator[AnyLine], check: _ArtifactCheck, after: list[AnyLine]) -> Iterator[bytes]:
    for line in lines:
        if not isinstance(line, BytesLine):
            after.append(line)
            break
        check.add(line.base64)
        yield line.base64
    check.end()


class _Reading:
    """Reads and checks the file once. The bytes of artifacts are in memory one chunk at a time."""

    def __init__(self, path: Path, most: float = math.inf) -> None:
        self._left = most  # how many bytes of events and blobs may still be read into memory
        self.header: Header | None = None
        self.blobs: dict[str, bytes] = {}
        self.artifacts: list[ExportedArtifact] = []
        self.sha256 = ""  # the checksum of the file
        self._path = path
        self._bad: set[str] = set()  # digests of blobs whose content does not match
        self._artifact: _ArtifactCheck | None = None  # the artifact whose bytes are being read
        self._seen: set[str] = set()
        self._expected: set[str] = set()  # runs that were started, but are not read yet
        self._all_sound = True

    def runs(self) -> Iterator[tuple[Verdict, Verified, RunLine, list[Stored]]]:
        """Each run with its verdict. StoreCorrupt at the first line that shows that the file itself is damaged."""
        run: RunLine | None = None
        stored: list[Stored] = []
        named: list[ArtifactLine] = []  # artifacts that the next event names
        for line in read_lines(self._path):
            if isinstance(line, BytesLine) and self._artifact is not None:
                self._artifact.add(line.base64)
                continue
            if self._artifact is not None:
                self._artifact.end()
                self._artifact = None
            match line:
                case Header():
                    self._begin(line)
                case RunLine() | EndLine():
                    if run is not None:
                        yield *self._judge(run, stored), run, stored
                    if isinstance(line, EndLine):
                        self.sha256 = line.sha256
                    run, stored = (line, []) if isinstance(line, RunLine) else (None, [])
                    if run is not None:
                        self._enter(run.run_id)
                case BlobLine() if run is not None:
                    self._count(len(line.base64))
                    self._keep(line)
                case ArtifactLine() if run is not None:
                    self._artifact = _ArtifactCheck(self._path, line)
                    named.append(line)
                case EventLine() if run is not None:
                    self._count(len(line.data))
                    stored.append(_stored(line))
                    self.artifacts += [ExportedArtifact(one, run.run_id, line.seq) for one in named]
                    named.clear()
                case _:
                    raise StoreCorrupt(f"{self._path} has a line of kind {line.__struct_config__.tag} that belongs to no run")
        if self._expected:
            raise StoreCorrupt(f"{self._path} lacks run {min(self._expected)}, which its header or another run names")

    def _count(self, read: int) -> None:
        self._left -= read
        if self._left < 0:
            raise InvalidInput(f"{self._path} has more than {MOST_BYTES:,} bytes of events and blobs: too large to be loaded")

    def _begin(self, header: Header) -> None:
        if self.header is not None:
            raise StoreCorrupt(f"{self._path} has a second header: an export is one file of one run")
        self.header = header
        self._expected.add(header.run_id)

    def _enter(self, run_id: str) -> None:
        if run_id in self._seen:
            raise StoreCorrupt(f"{self._path} has run {run_id} twice")
        # If the journal of an earlier run is damaged, it is not known which runs that run started: skip this check.
        if self._all_sound and run_id not in self._expected and identity.undone_by(run_id) not in self._seen:
            raise StoreCorrupt(f"{self._path} has run {run_id}, which no run before it has started: it does not belong there")
        self._seen.add(run_id)
        self._expected.discard(run_id)

    def _keep(self, blob: BlobLine) -> None:
        """Keep the blob.

        A second blob with the same digest is refused, because the first may already have been used.
        """
        if blob.digest in self.blobs or blob.digest in self._bad:
            raise StoreCorrupt(f"{self._path} has blob {blob.digest} twice")
        if codec.digest(blob.base64) == blob.digest:
            self.blobs[blob.digest] = blob.base64
        else:
            self._bad.add(blob.digest)

    def _judge(self, run: RunLine, stored: list[Stored]) -> tuple[Verdict, Verified]:
        verdict, checked = verify_journal(run, stored, self._blob)
        verdict = structs.replace(verdict, original_head=run.original_head)
        if verdict.problem is None:
            seq, problem = self._problem(run, len(stored), checked)
            verdict = structs.replace(verdict, seq=seq, problem=problem, projection=problem is not None and seq is None)
        if verdict.problem is None and self._bad:
            raise StoreCorrupt(f"{self._path}: {_other_content(min(self._bad))}")
        self._all_sound = self._all_sound and verdict.problem is None
        self._expected |= set(own_children(checked.state)) - self._seen
        return verdict, checked

    def _problem(self, run: RunLine, events: int, checked: Verified) -> tuple[int | None, str | None]:
        """(the seq, the problem in words), if the run's line or the header contradicts the sound journal."""
        if (events, checked.head) != (run.seq, run.head) or checked.state.created is None:
            seq = min(events, run.seq) + 1
            return seq, f"it ends with event {events}, and the line of the run says {run.seq}, and another hash"
        problem = _differs("the line of the run", run, ("agent", "version", "tenant", "status", "parent"), _told(checked.state))
        assert self.header is not None
        if problem is None and run.run_id == self.header.run_id:
            told = (*_headed(checked.state), run.original_head)
            problem = _differs("the header", self.header, ("agent", "version", "target", "original_head"), told)
        if problem is None and (run.original_head is None) != (self.header.redacted is None):
            problem = "the journal is sound, but the line of the run and the header do not agree about whether it is redacted"
        return None, problem

    def _blob(self, digest: str) -> bytes:
        if digest in self._bad:
            raise StoreCorrupt(_other_content(digest))
        found = self.blobs.get(digest)
        if found is None:
            raise StoreCorrupt(f"blob {digest} is missing")
        return found


class _ArtifactCheck:
    """Hashes the bytes of one artifact while they are read. Only one chunk is in memory at a time."""

    def __init__(self, path: Path, line: ArtifactLine) -> None:
        self._path = path
        self._line = line
        self._sum = hashlib.sha256()
        self._size = 0

    def add(self, data: bytes) -> None:
        self._sum.update(data)
        self._size += len(data)

    def end(self) -> None:
        if (self._sum.hexdigest(), self._size) != (self._line.sha256, self._line.size):
            raise StoreCorrupt(f"{self._path}: artifact {self._line.uri} does not have the bytes that its hash says")


def _other_content(digest: str) -> str:
    return f"blob {digest} does not have the content that its digest says"


def _differs(what: str, line: Header | RunLine, names: tuple[str, ...], told: tuple[str | None, ...]) -> str | None:
    """In words: the first field of the line that contradicts the journal; None if all fields agree."""
    for name, expected in zip(names, told, strict=True):
        if (found := getattr(line, name)) != expected:
            return f"the journal is sound, but {what} is not: {name} is {found!r:.80}, and by the journal it is {expected!r:.80}"
    return None


def _stored(line: EventLine) -> Stored:
    try:
        hash_ = bytes.fromhex(line.hash)
    except ValueError:
        hash_ = b""  # equal to no hash, so the check fails
    data = line.data.encode("utf-8", "surrogatepass")
    return Stored(line.seq, line.event_id, line.ts, line.epoch, line.call, line.cause, data, hash_)
