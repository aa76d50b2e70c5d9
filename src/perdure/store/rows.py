"""Converts database rows to records, and records to rows."""

from __future__ import annotations

from types import NoneType
from typing import Any

import msgspec

from perdure import shell
from perdure.core.events import AnyBody, Event, decode_body
from perdure.core.identity import Sealed
from perdure.errors import StoreCorrupt
from perdure.store.api import InboxRow, RunRow
from perdure.store.cursor import ENDED, KEY, Cursor, Row

_TEXT, _MAYBE_TEXT, _NUMBER, _MAYBE_NUMBER, _BYTES = (str,), (str, NoneType), (int,), (int, NoneType), (bytes,)
_COLUMNS: tuple[tuple[type, ...], ...] = (
    # The columns from run_id to ready_at.
    *(_TEXT, _TEXT, _TEXT, _TEXT, _MAYBE_TEXT, _TEXT, _MAYBE_TEXT, _TEXT, _TEXT, _MAYBE_TEXT, _MAYBE_NUMBER),
    *(_NUMBER, _BYTES, _NUMBER, _MAYBE_TEXT, _NUMBER, _MAYBE_TEXT, _NUMBER, _NUMBER),  # columns seq to updated_at
    *(_NUMBER, _MAYBE_TEXT, _MAYBE_TEXT, _MAYBE_NUMBER, _NUMBER, _NUMBER, _MAYBE_TEXT),  # the columns from priority to specimen
)


_EMPTY: dict[tuple[type, ...], Any] = {_TEXT: "", _MAYBE_TEXT: None, _NUMBER: 0, _MAYBE_NUMBER: None, _BYTES: b""}
_UNDECODABLE = (msgspec.MsgspecError, UnicodeDecodeError, TypeError)
_WIDTH = len(_COLUMNS)
_STATUS, _ATTENTION, _ERROR, _LOST, _LOST_WITH = map(RunRow.__struct_fields__.index, ("status", "attention", "error", "lost", "lost_with"))
_sound: set[tuple[type, ...]] = set()  # a cache: the tuples of column types that are sound, a few dozen at most


def is_sound(row: Row) -> bool:
    """Does each column of a run have a type that perdure writes? On a damaged page a column may have any type."""
    types = tuple(map(type, row[:_WIDTH]))
    if types in _sound:
        return True
    if not all(map(isinstance, row, _COLUMNS)):
        return False
    _sound.add(types)
    return True


def run_row(row: Row) -> RunRow:
    """A run, from a row of any query for whole runs. StoreCorrupt if the row is damaged.

    The columns of such a query begin with {run}, as in run_by_id.
    """
    if not is_sound(row):
        raise StoreCorrupt(f"the row of run {row[0]!r} is damaged", hint="see what else is: perdure verify")
    return RunRow(*row[:_WIDTH])


def listed_row(row: Row) -> RunRow:
    """Like run_row, for lists of runs: a damaged row must not hide the other runs.

    So a damaged row gives a run with an error in it.
    """
    if is_sound(row):
        return RunRow(*row[:_WIDTH])
    values: list[Any] = [value if isinstance(value, types) else _EMPTY[types] for value, types in zip(row, _COLUMNS, strict=False)]
    values[_STATUS], values[_ATTENTION], values[_ERROR] = "needs_attention", "error", "the run's row is damaged; restore a backup"
    return RunRow(*values)


def key_of(row: Row) -> int:
    """The run's database key, from the same row as in run_row."""
    key: int = row[KEY]
    return key


def has_ended(row: Row) -> bool:
    """Is the run's last event terminal, whatever its status says? For a row of a statement with {ended}."""
    return row[ENDED] is not None


def check_not_ended(row: Row) -> None:
    """StoreCorrupt if the run has ended by its journal, and its row says otherwise. For a row of a statement with {ended}.

    The row was edited then. An event after the terminal event would make the journal worthless.
    """
    run = run_row(row)
    if has_ended(row) and row[ENDED] != f"run_{run.status}":
        raise StoreCorrupt(
            f"run {run.run_id} has ended (event {run.seq}, {row[ENDED]}), and its row says {run.status}: the row was edited; nothing was written",
            hint=f"write the row again from the journal: {shell.command('verify', run.run_id)} --repair",
        )


def lost_of(row: Row) -> int:
    """How the run's last holder was lost (`RunRow.lost`), from the same row as in run_row. 0: it was not lost."""
    lost: int = row[_LOST]
    return lost


def lost_with_of(row: Row) -> int:
    """How many other runs may be to blame for the loss (`RunRow.lost_with`), from the same row as in run_row."""
    lost_with: int = row[_LOST_WITH]
    return lost_with


def as_lost(row: Row, lost: int, lost_with: int) -> Row:
    """The row as it will be once the loss of its dead holder is recorded. The database does not have this row yet."""
    return (*row[:_LOST], lost, lost_with, *row[_LOST_WITH + 1 :])


def event_row(key: int, sealed: Sealed) -> Row:
    """The parameters of the statement insert_event."""
    event = sealed.event
    return (
        key,
        event.seq,
        bytes.fromhex(event.event_id),
        event.ts,
        event.epoch,
        event.call,
        event.cause,
        sealed.data.decode(),
        sealed.hash,
    )


def event_from(run_id: str, row: Row) -> Event:
    """An event, from the columns seq, event_id, ts, epoch, call, cause, data. StoreCorrupt if they are damaged."""
    seq, event_id, ts, epoch, call, cause, data = row
    if not (isinstance(event_id, bytes) and isinstance(ts, int) and isinstance(epoch, int)):
        raise StoreCorrupt(f"event {seq} of run {run_id} is damaged", hint=f"see what else is: {shell.command('verify', run_id)}")
    try:
        return Event(seq, event_id.hex(), ts, epoch, call, cause, decode_body(data))
    except _UNDECODABLE as error:
        raise _undecodable(f"event {seq} of run {run_id}", error) from None


def body_from(data: bytes, what: str) -> AnyBody:
    try:
        body: AnyBody = decode_body(data)
    except _UNDECODABLE as error:
        raise _undecodable(what, error) from None
    return body


def _undecodable(what: str, error: Exception) -> StoreCorrupt:
    return StoreCorrupt(f"{what} cannot be decoded ({error})", hint="see what else is damaged: perdure verify")


def body_or_none(data: bytes, what: str) -> AnyBody | None:
    try:
        return body_from(data, what)
    except StoreCorrupt:
        return None  # only this run is affected: its worker stops it, and a person must look at it


def inbox_row(row: Row) -> InboxRow:
    """An inbox row, from the columns inbox_id, run_id, call, data, event_id.

    If its data cannot be decoded, its body is None.
    """
    inbox_id, run_id, call, data, event_id = row
    return InboxRow(inbox_id, run_id, call, body_or_none(data, f"inbox row {inbox_id} of run {run_id}"), event_id.hex())


def has_arrived(cursor: Cursor, run_id: str, event_id: str) -> bool:
    """Is the posted event in the run's journal or its inbox? The code asks after a COMMIT with unknown outcome."""
    wanted = {"run_id": run_id, "event_id": bytes.fromhex(event_id)}
    return any(cursor.one(name, wanted) is not None for name in ("event_of_run", "inbox_event_of_run"))
