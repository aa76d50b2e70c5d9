"""What the store's logic asks of a database: statements by name, inside a transaction that somebody else begins and ends.

The names are the same in every dialect, and so are the parameters: a tuple where each is used once, a dict where they have names.
A name says what the statement does to others as well: what ends in `_to_change` or `_to_take` lies locked until the transaction ends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

from perdure.errors import StoreUnavailable

Row = tuple[Any, ...]
Params = Sequence[Any] | Mapping[str, Any]
T = TypeVar("T")


class Locked(StoreUnavailable):
    """Somebody else has locked what is wanted, for longer than one was ready to wait. What does not want it can go on."""


class Gone(StoreUnavailable):
    """The database gave out while a tool had its connection. Nothing has happened, and it is not the tool's fault."""


class Cursor(Protocol):
    """Statements of one transaction, by their names in the dialect's file."""

    def all(self, name: str, params: Params = ()) -> list[Row]:
        """All rows."""

    def one(self, name: str, params: Params = ()) -> Row | None:
        """The first row; None when there is none."""

    def change(self, name: str, params: Params = ()) -> int:
        """How many rows it has changed."""

    def each(self, name: str, many: Sequence[Params]) -> None:
        """Once for each set of parameters, in order."""

    def alone(self, key: str) -> None:
        """Until this transaction ends nobody else who asks for the same key goes on."""

    def patience(self, seconds: float) -> None:
        """From now on wait no longer than this, in this transaction, for what others have locked; then StoreUnavailable."""


class Database(Protocol):
    """Thread-safe. The only place where a transaction begins and ends."""

    where: str  # in messages

    def write(self, work: Callable[[Cursor], T], arrived: Callable[[Cursor, T], bool], *, again: bool = True) -> T:
        """Do the work in one transaction, durable when it returns. When it raises a StoreError, nothing was acknowledged.

        `arrived` is asked on a fresh connection after a COMMIT whose outcome is unknown: are the traces of this work there?
        Work that was rolled back because of somebody else's is done again, unless `again` forbids it: a tool may be part of it.
        """

    def read(self, name: str, params: Params = ()) -> list[Row]:
        """All rows of a statement that changes nothing."""

    def lend(self, cursor: Cursor) -> AbstractContextManager[Any]:
        """The transaction's own connection in a tool's hands, confined to the tool's own tables."""

    def version(self) -> int:
        """A number that changes when anything was committed, by any process. Cheap."""

    def close(self) -> None:
        """End all connections."""
