"""What a file holds, where that can be told: lines, the entries of a JSON document, the rows of a SQLite database.

A file with a time in it differs from run to run, and yet one entry more in it is an effect more. So it is taken apart: what two
undisturbed runs agree on in it, part by part, is expected of every trial.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sqlite3
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from msgspec import Struct

SIDECARS = ("-wal", "-shm", "-journal")  # of a SQLite database; they belong to it
_SQLITE = b"SQLite format 3\0"
MOST_BYTES = 16_000_000  # what is larger is not taken apart
_CHUNK = 1 << 20
_SHORT = 40  # characters of a file that are shown

Part = tuple[int, str]  # how many values, and the digest of them all, whatever their order


class FileSeen(Struct, frozen=True):
    digest: str
    count: int
    size: int = 0
    unit: str = "lines"  # or "entries", "rows"; "bytes" of what cannot be read
    parts: dict[str, Part] = {}  # by path in the document, or by column
    large: bool = False  # it was not taken apart, and its lines were compared in their order
    text: str = ""  # all of it, if that is little


def seen(path: Path, content: bytes, plain: Callable[[str], str]) -> FileSeen:
    """The file; `content` is what it has with the run's own ids and keys taken out, which `plain` does to a text."""
    if content.startswith(_SQLITE):
        try:
            return _apart(_columns(path), content, "rows", plain)
        except sqlite3.Error:
            pass  # it says that it is one
    if content[:1] in (b"[", b"{"):
        try:
            return _apart(_leaves("", json.loads(content)), content, "entries", plain)
        except (ValueError, RecursionError):
            pass  # one document in each line, perhaps
    # Sorted: calls that run side by side may come to their lines in any order.
    lines = sorted(content.split(b"\n"))
    unit = "bytes" if b"\0" in content or not _is_text(content) else "lines"
    text = b"\n".join(lines).decode().strip() if unit == "lines" and len(content) <= _SHORT else ""
    return FileSeen(_digest(b"\n".join(lines)), len(content) if unit == "bytes" else len(lines) - 1, len(content), unit, text=text)


def seen_large(path: Path) -> FileSeen:
    """A file that is too large to be held in memory, piece by piece; what nobody has written into it is passed over."""
    digest, lines, is_text = hashlib.sha256(), 0, True
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        for offset in _written(file.fileno(), size):
            chunk = os.pread(file.fileno(), _CHUNK, offset)
            if chunk.strip(b"\0"):
                digest.update(offset.to_bytes(8, "big") + chunk)
            is_text = is_text and b"\0" not in chunk
            lines += chunk.count(b"\n")
        is_text = is_text and next(_holes(file.fileno(), size), None) is None
    digest.update(size.to_bytes(8, "big"))
    return FileSeen(digest.hexdigest(), lines if is_text else size, size, "lines" if is_text else "bytes", large=True)


def _written(descriptor: int, size: int) -> Iterator[int]:
    """Where there are pieces that are more than a hole."""
    offset = 0
    while offset < size:
        yield offset
        offset += _CHUNK
        try:
            data = os.lseek(descriptor, offset, os.SEEK_DATA)
        except OSError:  # nothing but a hole from here on
            return
        offset = max(offset, data - data % _CHUNK)


def _holes(descriptor: int, size: int) -> Iterator[int]:
    if (hole := os.lseek(descriptor, 0, os.SEEK_HOLE)) < size:
        yield hole


def _apart(values: Iterator[tuple[str, Any]], content: bytes, unit: str, plain: Callable[[str], str]) -> FileSeen:
    found: dict[str, list[str]] = defaultdict(list)
    for path, value in values:
        found[path].append(plain(repr(value)))
    parts = {path: (len(texts), _digest("\n".join(sorted(texts)).encode())) for path, texts in sorted(found.items())}
    # Of a list of entries with three fields each, or of a table with three columns, the longest path is how many there are.
    counts: dict[str, int] = {}
    for path, (many, _) in parts.items():
        table = path.partition(".")[0] if unit == "rows" else ""
        counts[table] = max(many, counts.get(table, 0))
    return FileSeen(_digest(repr(parts).encode()), sum(counts.values()), len(content), unit, parts)


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The leaves of a JSON value. The places in a list are one path: calls that run side by side come there in any order."""
    match value:
        case dict() if value:
            for key, one in value.items():
                yield from _leaves(f"{path}.{key}", one)
        case list() if value:
            for one in value:
                yield from _leaves(f"{path}[]", one)
        case _:
            yield path, value


def _columns(path: Path) -> Iterator[tuple[str, Any]]:
    """Every value of every table, read from a copy: a reader may have to finish what the dead process began."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "copy.db")
        for suffix in ("", *SIDECARS[::2]):
            if (beside := path.with_name(path.name + suffix)).is_file():
                shutil.copyfile(beside, f"{copy}{suffix}")
        with closing(sqlite3.connect(copy)) as database:
            database.text_factory = lambda raw: raw.decode(errors="replace")
            tables = database.execute("SELECT name FROM sqlite_schema WHERE type = 'table' AND name NOT LIKE 'sqlite\\_%' ESCAPE '\\'")
            for (table,) in tables.fetchall():
                cursor = database.execute('SELECT * FROM "{}"'.format(table.replace('"', '""')))
                names = [column[0] for column in cursor.description]
                for row in cursor:
                    yield f"{table}.", row  # what belongs together
                    yield from ((f"{table}.{name}", value) for name, value in zip(names, row, strict=True))


def _is_text(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
