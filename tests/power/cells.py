"""Where the rows of a table are in a SQLite file: every byte of each row's cell, with its overflow pages.

This is computed from the description of the file format, because SQLite does not tell it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

_INTERIOR, _LEAF = 5, 13


@dataclass(frozen=True, slots=True)
class Cell:
    rowid: int
    places: list[int]  # of all its bytes in the file: its size, its key, its record
    record: int  # how many of them come before the record


def cells(file: bytes, root: int) -> Iterator[Cell]:
    """Every row of the table whose tree begins at that page."""
    page_size = int.from_bytes(file[16:18], "big")
    assert file[20] == 0, "pages have no reserved bytes at their end"
    begin = (root - 1) * page_size
    header = begin + (100 if root == 1 else 0)
    kind, count = file[header], int.from_bytes(file[header + 3 : header + 5], "big")
    pointers = header + (12 if kind == _INTERIOR else 8)
    offsets = [begin + int.from_bytes(file[at : at + 2], "big") for at in range(pointers, pointers + 2 * count, 2)]
    if kind == _INTERIOR:
        for offset in offsets:
            yield from cells(file, int.from_bytes(file[offset : offset + 4], "big"))
        yield from cells(file, int.from_bytes(file[header + 8 : header + 12], "big"))
    else:
        assert kind == _LEAF, kind
        for offset in offsets:
            yield _cell(file, offset, page_size)


def _cell(file: bytes, offset: int, page_size: int) -> Cell:
    size, after = _varint(file, offset)
    rowid, begin = _varint(file, after)
    local = _local(size, page_size)
    places = list(range(offset, begin + local))
    left = size - local
    at = begin + local
    if left:
        places += range(at, at + 4)  # the number of the next page is part of the cell
    while left:
        at = (int.from_bytes(file[at : at + 4], "big") - 1) * page_size
        here = min(left, page_size - 4)
        left -= here
        places += range(at if left else at + 4, at + 4 + here)
    return Cell(rowid, places, begin - offset)


def _local(size: int, page_size: int) -> int:
    """How many bytes of a record lie in the leaf itself."""
    most, least = page_size - 35, (page_size - 12) * 32 // 255 - 23
    if size <= most:
        return size
    kept = least + (size - least) % (page_size - 4)
    return kept if kept <= most else least


def _varint(file: bytes, at: int) -> tuple[int, int]:
    """The number, and where it ends."""
    value = 0
    for place in range(at, at + 8):
        value = value << 7 | file[place] & 0x7F
        if file[place] < 0x80:
            return value, place + 1
    return value << 8 | file[at + 8], at + 9
