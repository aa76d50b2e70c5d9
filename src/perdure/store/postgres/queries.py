"""The statements of queries.sql by name, with their parameters numbered as PostgreSQL wants them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from perdure.store.cursor import Params
from perdure.store.statements import load

_PARAMETER = re.compile(r"(?<![:\w]):([a-z_]+)|\?(\d*)")  # :name, ?, ?3; and not the cast ::type


class Statement(Struct, frozen=True):
    sql: str
    names: tuple[str, ...] = ()  # in the order of their numbers; empty when they come in a row

    def values(self, params: Params) -> Sequence[Any]:
        """The parameters in the order of their numbers."""
        if isinstance(params, Mapping):
            return [shown(params[name]) for name in self.names]
        return [shown(value) for value in params]


def numbered(sql: str) -> Statement:
    """`:name` and `?` as `$1`, `$2` …"""
    names: list[str] = []
    count = 0

    def number(found: re.Match[str]) -> str:
        nonlocal count
        if found[1] is None:
            count += 1
            return f"${found[2] or count}"
        if found[1] not in names:
            names.append(found[1])
        return f"${names.index(found[1]) + 1}"

    return Statement(_PARAMETER.sub(number, sql), tuple(names))


def shown(value: Any) -> Any:
    """The value as PostgreSQL can hold it."""
    # PostgreSQL's text holds every character but this one. It occurs in what people read (an error, a note), never in the journal's
    # own JSON, where it is escaped.
    return value.replace("\0", "\u2400") if type(value) is str and "\0" in value else value


QUERIES: dict[str, Statement] = {
    name: numbered(sql) for name, sql in load(Path(__file__).with_name("queries.sql").read_text("utf-8")).items()
}
