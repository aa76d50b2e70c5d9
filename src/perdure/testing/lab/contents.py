"""What a file contains: lines, the entries of a JSON document, or the rows of a SQLite database.

A file that contains a time differs from run to run. But one more entry in the file is still one more effect. So files
are split into parts. The parts that are equal in two undisturbed runs must be equal in every trial.
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

SIDECARS = ("-wal", "-shm", "-journal")  # the files beside a SQLite database that belong to it
_SQLITE = b"SQLite format 3\0"
MOST_BYTES = 16_000_000  # a larger file is not split into parts
_CHUNK = 1 << 20
_SHORT = 40  # a file of at most this many bytes is shown whole in the report

Part = tuple[int, str]  # the number of values, and a digest of all values that does not depend on their order


class FileSeen(Struct, frozen=True):
    digest: str
    count: int
    size: int = 0
    unit: str = "lines"  # or "entries", "rows"; "bytes" for binary files
    parts: dict[str, Part] = {}  # the keys are paths in the JSON document, or columns of the database
    large: bool = False  # the file is too large to be split, so its bytes are compared in their order
    text: str = ""  # the whole content, if it is short


def seen(path: Path, content: bytes, plain: Callable[[str], str]) -> FileSeen:
    """Describe the file. In `content` the run's ids and keys are already replaced. `plain` replaces them in a text."""
    if content.startswith(_SQLITE):
        try:
            return _apart(_columns(path), content, "rows", plain)
        except sqlite3.Error:
            pass  # the header says that this is a database, but it cannot be read as one
    if content[:1] in (b"[", b"{"):
        try:
            return _apart(_leaves("", json.loads(content)), content, "entries", plain)
        except (ValueError, RecursionError):
            pass  # not one JSON document: perhaps one document per line, which is compared as lines
    # Sort the lines: concurrent calls may write their lines in any order.
    lines = sorted(content.split(b"\n"))
    unit = "bytes" if b"\0" in content or not _is_text(content) else "lines"
    text = b"\n".join(lines).decode().strip() if unit == "lines" and len(content) <= _SHORT else ""
    return FileSeen(_digest(b"\n".join(lines)), len(content) if unit == "bytes" else len(lines) - 1, len(content), unit, text=text)


def seen_large(path: Path) -> FileSeen:
    """Describe a file that is too large for memory, chunk by chunk. The holes of a sparse file are skipped."""
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
    """The offsets of all chunks that contain data, and not only a hole."""
    offset = 0
    while offset < size:
        yield offset
        offset += _CHUNK
        try:
            data = os.lseek(descriptor, offset, os.SEEK_DATA)
        except OSError:  # the rest of the file is a hole
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
    # Each entry has several paths, and each row has several columns. So the number of entries or rows is the largest
    # count of any path or column.
    counts: dict[str, int] = {}
    for path, (many, _) in parts.items():
        table = path.partition(".")[0] if unit == "rows" else ""
        counts[table] = max(many, counts.get(table, 0))
    return FileSeen(_digest(repr(parts).encode()), sum(counts.values()), len(content), unit, parts)


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The leaves of a JSON value. All items of a list have the same path: concurrent calls add items in any order."""
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
    """Every value of every table, read from a copy of the database.

    If the original were opened, SQLite could roll back what the killed process had begun.
    """
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
                    yield f"{table}.", row  # also the whole row: without it, values swapped between rows are not found
                    yield from ((f"{table}.{name}", value) for name, value in zip(names, row, strict=True))


def _is_text(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
