"""The file that a run travels in: lines of JSON, all ASCII, each of one kind.

    {"kind": "perdure_export", "format": 1, "perdure": "0.1.0", "exported_at": …, "run_id": …, "agent": …, "version": …, "target": …}
    {"kind": "run", "run_id": …, "seq": 12, "hash": …, …}      then what belongs to that run, then the next run, its parent before it
    {"kind": "blob", "digest": …, "base64": …}                 before the first event that names it
    {"kind": "event", "seq": 1, …, "data": …, "hash": …}       the stored columns; `data` is the very text that was hashed
    {"kind": "end", "runs": 1, "events": 12, "blobs": 1, "sha256": of all bytes before this line}

A file without its last line was cut off. The sum finds damage; who must find malice compares the heads with some that were kept elsewhere.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec
from msgspec import Struct

from perdure.core import codec
from perdure.errors import InvalidInput, StoreCorrupt

FORMAT = 1
_LONGEST_LINE = codec.MAX_BYTES * 3 // 2  # the largest blob there can be, in base64, and room around it


class Line(Struct, frozen=True, tag_field="kind", forbid_unknown_fields=True):
    """Base of all lines; it holds nothing."""


class Header(Line, frozen=True, tag="perdure_export"):
    format: int
    perdure: str
    exported_at: str
    run_id: str
    agent: str
    version: str
    target: str | None


class RunLine(Line, frozen=True, tag="run"):
    run_id: str
    agent: str
    version: str
    tenant: str
    status: str
    parent: str | None
    seq: int
    hash: str  # of the last event

    @property
    def head(self) -> bytes:
        return _from_hex(self.hash)


class BlobLine(Line, frozen=True, tag="blob"):
    digest: str
    base64: bytes


class EventLine(Line, frozen=True, tag="event"):
    seq: int
    event_id: str
    ts: int
    epoch: int
    call: int | None
    cause: int | None
    data: str
    hash: str


class EndLine(Line, frozen=True, tag="end"):
    runs: int
    events: int
    blobs: int
    sha256: str


AnyLine = Header | RunLine | BlobLine | EventLine | EndLine
_line = msgspec.json.Decoder(AnyLine)


class _Begins(Struct):
    """As much of a header as any version of it has."""

    kind: str
    format: int


class Writer:
    """Writes lines, counts them and sums them up."""

    def __init__(self, write: Callable[[bytes], object]) -> None:
        self._write = write
        self._sum = hashlib.sha256()
        self.runs = self.events = self.blobs = 0

    def put(self, line: Header | RunLine | BlobLine | EventLine) -> None:
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

    def end(self) -> None:
        self._write(_encoded(EndLine(self.runs, self.events, self.blobs, self._sum.hexdigest())))


def read_lines(path: Path) -> Iterator[AnyLine]:
    """The lines of the file, one at a time. InvalidInput when it is none of ours, StoreCorrupt when it is damaged or was cut off."""
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
        raise InvalidInput(f"{path} is no export of perdure: make one with `perdure export RUN -o FILE`") from None
    if begins.kind == "perdure_export" and begins.format != FORMAT:
        raise InvalidInput(f"{path} has format {begins.format}, and this version of perdure reads {FORMAT}; update perdure")
    header = _decoded(path, 1, first)
    if not isinstance(header, Header):
        raise InvalidInput(f"{path} is no export of perdure: it does not begin with a line of kind perdure_export")
    return header


def _rest(path: Path, file: BinaryIO, first: bytes) -> Iterator[AnyLine]:
    counts, total, number = [0, 0, 0], hashlib.sha256(first), 1
    while True:
        number += 1
        raw = file.readline(_LONGEST_LINE + 1)
        if len(raw) > _LONGEST_LINE:
            raise StoreCorrupt(f"{path}, line {number}: longer than {_LONGEST_LINE:,} bytes, which nothing in an export is")
        if not raw.endswith(b"\n"):
            raise StoreCorrupt(f"{path} was cut off in line {number}: an export ends with a line of kind end. Export the run again")
        line = _decoded(path, number, raw)
        if isinstance(line, EndLine):
            yield line
            _check_end(path, file, line, counts, total.hexdigest())
            return
        total.update(raw)
        for kind, of in enumerate((RunLine, EventLine, BlobLine)):
            counts[kind] += isinstance(line, of)
        yield line


def _check_end(path: Path, file: BinaryIO, end: EndLine, counts: list[int], total: str) -> None:
    if file.read(1):
        raise StoreCorrupt(f"{path} goes on after its last line: it is not what was exported")
    if [end.runs, end.events, end.blobs] != counts or end.sha256 != total:
        raise StoreCorrupt(f"{path} is not what was exported: its lines do not have the sum that its last one says")


def _decoded(path: Path, number: int, raw: bytes) -> AnyLine:
    try:
        line: AnyLine = _line.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise StoreCorrupt(f"{path}, line {number}: {error}; an export is read as it was written, or not at all") from None
    return line


def _encoded(line: AnyLine) -> bytes:
    return json.dumps(msgspec.to_builtins(line), ensure_ascii=True, separators=(",", ":")).encode() + b"\n"


def _from_hex(text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError:
        return b""  # no hash is that
