"""Columns of many rows as PostgreSQL's own binary arrays. psycopg writes arrays as text, item by item; with a few hundred appends in one
statement that was the larger part of the work."""

from __future__ import annotations

from collections.abc import Iterable
from struct import Struct
from typing import Any, ClassVar

from psycopg.adapt import AdaptersMap, Dumper
from psycopg.pq import Format

_HEAD = Struct(">iiIii").pack  # dimensions, whether there are NULLs, type of the items, how many, number of the first
_EMPTY = Struct(">iiI").pack
_SIZE = Struct(">i").pack
_INT8 = Struct(">iq").pack
_NULL = _SIZE(-1)


class Array(bytes):
    """An array as it goes over the wire."""

    item: ClassVar[int]  # the oid of its items' type
    oid: ClassVar[int]

    @classmethod
    def of(cls, values: Iterable[Any]) -> Array:
        """The array of these values; None is NULL."""
        items = [_NULL if value is None else cls.sized(value) for value in values]
        head = _HEAD(1, 1, cls.item, len(items), 1) if items else _EMPTY(0, 0, cls.item)
        return cls(head + b"".join(items))

    @staticmethod
    def sized(value: Any) -> bytes:
        """One value, after its length."""
        raise NotImplementedError


class Int8s(Array):
    item, oid = 20, 1016

    @staticmethod
    def sized(value: int) -> bytes:
        return _INT8(8, value)


class Texts(Array):
    item, oid = 25, 1009

    @staticmethod
    def sized(value: str) -> bytes:
        text = value.encode()
        return _SIZE(len(text)) + text


class Byteas(Array):
    item, oid = 17, 1001

    @staticmethod
    def sized(value: bytes) -> bytes:
        return _SIZE(len(value)) + value


class Bools(Array):
    item, oid = 16, 1000

    @staticmethod
    def sized(value: bool) -> bytes:
        return b"\0\0\0\1\1" if value else b"\0\0\0\1\0"


def register(adapters: AdaptersMap) -> None:
    """Let these be parameters."""
    for kind in (Int8s, Texts, Byteas, Bools):
        adapters.register_dumper(kind, type(f"{kind.__name__}Dumper", (_Dumper,), {"oid": kind.oid}))


class _Dumper(Dumper):
    format = Format.BINARY

    def dump(self, obj: Any) -> bytes:
        return bytes(obj)
