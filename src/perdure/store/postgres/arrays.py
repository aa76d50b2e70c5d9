"""Encodes columns of many rows as PostgreSQL's own binary arrays.

psycopg writes arrays as text, item by item. With a few hundred appends in one statement, this took most of the time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from struct import Struct
from typing import Any, ClassVar

from psycopg.adapt import AdaptersMap, Dumper
from psycopg.pq import Format

# The number of dimensions, whether there are NULLs, the type of the items, the number of items, the index of the first
# item.
_HEAD = Struct(">iiIii").pack
_EMPTY = Struct(">iiI").pack
_SIZE = Struct(">i").pack
_INT8 = Struct(">iq").pack
_NULL = _SIZE(-1)


class Array(bytes):
    """An array in PostgreSQL's binary format."""

    item: ClassVar[int]  # the oid of the items' type
    oid: ClassVar[int]  # the oid of the array's type

    @classmethod
    def of(cls, values: Iterable[Any]) -> Array:
        """The array of these values; None is NULL."""
        return cls._made([_NULL if value is None else cls.sized(value) for value in values])

    @classmethod
    def _made(cls, items: Sequence[bytes]) -> Array:
        head = _HEAD(1, 1, cls.item, len(items), 1) if items else _EMPTY(0, 0, cls.item)
        return cls(head + b"".join(items))

    @staticmethod
    def sized(value: Any) -> bytes:
        """The length of one value, and then the value, in bytes."""
        raise NotImplementedError


class Int8s(Array):
    item, oid = 20, 1016

    @classmethod
    def of(cls, values: Iterable[int | None]) -> Array:
        # Like Array.of, but without a Python call for each number: a batch has a few thousand numbers.
        return cls._made([_NULL if value is None else _INT8(8, value) for value in values])


class Texts(Array):
    item, oid = 25, 1009

    @classmethod
    def of_utf8(cls, values: Iterable[bytes]) -> Array:
        """The array of texts that are already encoded in UTF-8."""
        return cls._made([_SIZE(len(value)) + value for value in values])

    @staticmethod
    def sized(value: str) -> bytes:
        text = value.encode()
        return _SIZE(len(text)) + text


class Byteas(Array):
    item, oid = 17, 1001

    @classmethod
    def of_hex(cls, values: Sequence[str], size: int) -> Array:
        """The array of these values, given in hexadecimal, each of `size` bytes."""
        length = _SIZE(size).hex()
        # All values are decoded in one call, so each must have the right length: otherwise it shifts the next values.
        assert all(len(value) == 2 * size for value in values), values
        head = _HEAD(1, 1, cls.item, len(values), 1) if values else _EMPTY(0, 0, cls.item)
        return cls(head + bytes.fromhex("".join([length + value for value in values])))

    @staticmethod
    def sized(value: bytes) -> bytes:
        return _SIZE(len(value)) + value


class Bools(Array):
    item, oid = 16, 1000

    @staticmethod
    def sized(value: bool) -> bytes:
        return b"\0\0\0\1\1" if value else b"\0\0\0\1\0"


def register(adapters: AdaptersMap) -> None:
    """Let psycopg accept these arrays as parameters."""
    for kind in (Int8s, Texts, Byteas, Bools):
        adapters.register_dumper(kind, type(f"{kind.__name__}Dumper", (_Dumper,), {"oid": kind.oid}))


class _Dumper(Dumper):
    format = Format.BINARY

    def dump(self, obj: Any) -> bytes:
        return bytes(obj)
