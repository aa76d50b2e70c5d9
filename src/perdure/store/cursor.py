"""The interface between the store's logic and a database: statements by name, inside a transaction.

`Database` begins and ends transactions; the logic only gets a `Cursor`. Statements have the same names and parameters
in every dialect. Parameters are a tuple if each parameter is used once, and a dict if they have names. A statement
whose name ends in `_to_change` or `_to_take` locks the rows that it returns until the transaction ends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol, TypeVar

from msgspec import Struct

from perdure.errors import StoreUnavailable
from perdure.store.api import RunRow

Row = tuple[Any, ...]
Params = Sequence[Any] | Mapping[str, Any]
T = TypeVar("T")


class Locked(StoreUnavailable):
    """Another transaction has locked the rows for too long. Work that does not need these rows can continue."""


class ConnectionGone(StoreUnavailable):
    """The database failed while a tool used a connection. Nothing was written, and the tool is not to blame."""


class Cursor(Protocol):
    """Runs statements in one transaction, by their names in common.sql and in the dialect's queries.sql."""

    def all(self, name: str, params: Params = ()) -> list[Row]:
        """All rows of the statement."""

    def one(self, name: str, params: Params = ()) -> Row | None:
        """The first row of the statement; None if there is no row."""

    def change(self, name: str, params: Params = ()) -> int:
        """Run a statement that writes. Returns how many rows it has changed."""

    def each(self, name: str, many: Sequence[Params]) -> None:
        """Run a statement once for each set of parameters, in order."""

    def alone(self, key: str) -> None:
        """Take an exclusive lock on the key until this transaction ends."""

    def link_chain(self) -> None:
        """Link the new entries of the journal-wide chain to those before them, unless the database does it itself."""

    def ring_at_commit(self) -> None:
        """Let workers hear the bell when this transaction is committed, if the database can do that."""

    def patience(self, seconds: float) -> None:
        """From now on, this transaction waits at most `seconds` for a lock, then raises StoreUnavailable."""


class Words(Struct, frozen=True):
    """How a dialect says what differs between dialects."""

    undriven: str  # before a column: no index of this column is used
    like: str  # {column} has the pattern {value}; upper and lower case differ
    like_folded: str  # the same; the letters A to Z and a to z are the same
    escaped: str  # the characters that have a meaning in a pattern …
    escape: str  # … and how one of them is written, as a literal character
    any: str  # any characters
    one: str  # one character

    def pattern(self, text: str) -> str:
        """The pattern of this text with * and ?."""
        return "".join(
            self.any if char == "*" else self.one if char == "?" else self.escape.format(char) if char in self.escaped else char
            for char in text
        )


class Database(Protocol):
    """Begins and ends every transaction. Thread-safe."""

    where: str  # the name of the database in messages
    words: Words

    def write(self, work: Callable[[Cursor], T], arrived: Callable[[Cursor, T], bool], *, again: bool = True) -> T:
        """Do the work in one transaction. When this method returns, the work is durable.

        If it raises a StoreError, nothing was acknowledged.

        After a COMMIT with unknown outcome, `arrived` is called on a new connection and says whether the work was
        committed. If another transaction made the database roll the work back, the work is done again, unless `again`
        is false. A caller sets `again` to false if a tool is part of the work.
        """

    def read(self, name: str, params: Params = ()) -> list[Row]:
        """All rows of a statement that changes nothing."""

    def read_beside(self, name: str, params: Params = ()) -> list[Row]:
        """Like `read`, for a statement that may take long. No other thread of this process has to wait for it."""

    def select(self, sql: str, params: Mapping[str, Any], *, in_order: bool = False) -> list[Row]:
        """All rows of a statement that store/finding.py has put together.

        `in_order`: read the rows in the order of an index until there are enough, and do not sort all rows that match.
        """

    def lend(self, cursor: Cursor) -> AbstractContextManager[Any]:
        """Lend the transaction's own connection to a tool. The tool can use only its own tables."""

    def join(self, connection: Any) -> AbstractContextManager[Cursor]:
        """Run statements in a transaction that the caller of perdure has begun on its own connection, and will end.

        If an error leaves the context, none of the statements has had an effect, and the caller's transaction can go
        on. InvalidInput if the connection is not to this database, or cannot be used.
        """

    def unguarded(self, cursor: Cursor) -> AbstractContextManager[None]:
        """Inside this context, the transaction may change settled rows. Otherwise triggers refuse such a change."""

    def version(self) -> int:
        """A number that changes whenever any process commits something. This is a cheap question."""

    def close(self) -> None:
        """Close all connections."""


# -- statements by name -----------------------------------------------------------------------------------------------
_MARK = "-- name: "
RUN_COLUMNS = ", ".join((*RunRow.__struct_fields__, "id"))
KEY = len(RunRow.__struct_fields__)  # the place of `id` in RUN_COLUMNS
ENDED = KEY + 1  # the place of {ended} in statements that begin with `SELECT {run}, {ended}`


def load(dialect: str) -> dict[str, str]:
    """Every statement of a dialect by name: the statements in common.sql and in the dialect's own queries.sql."""
    folder = Path(__file__).parent
    return statements(*(file.read_text("utf-8") for file in (folder / "common.sql", folder / dialect / "queries.sql")))


def statements(*files: str) -> dict[str, str]:
    """The statements in these files by name, without comment lines.

    {run} in a statement is replaced by RUN_COLUMNS, and {ended} by the expression that the dialect has under the name `ended`.
    """
    found: dict[str, str] = {}
    for part in (part for text in files for part in text.split(f"\n{_MARK}")[1:]):
        name, *lines = part.splitlines()
        assert name not in found, f"there are two statements named {name}"
        found[name] = "\n".join(line for line in lines if line and not line.startswith("--")).replace("{run}", RUN_COLUMNS)
        assert found[name], f"there is no statement under the name {name}"
    ended = found.pop("ended", "")
    return {name: sql.replace("{ended}", ended) for name, sql in found.items()}
