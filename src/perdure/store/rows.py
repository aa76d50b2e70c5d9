"""Rows of the database as records, and records as rows."""

from __future__ import annotations

from types import NoneType
from typing import Any

import msgspec

from perdure import shell
from perdure.core.events import AnyBody, Event, decode_body
from perdure.core.identity import Sealed
from perdure.errors import StoreCorrupt
from perdure.store.api import InboxRow, RunRow
from perdure.store.cursor import Cursor, Row

_TEXT, _MAYBE_TEXT, _NUMBER, _MAYBE_NUMBER, _BYTES = (str,), (str, NoneType), (int,), (int, NoneType), (bytes,)
_COLUMNS: tuple[tuple[type, ...], ...] = (
    *(_TEXT, _TEXT, _TEXT, _TEXT, _MAYBE_TEXT, _TEXT, _MAYBE_TEXT, _TEXT, _TEXT, _MAYBE_TEXT, _MAYBE_NUMBER),  # run_id to ready_at
    *(_NUMBER, _BYTES, _NUMBER, _MAYBE_TEXT, _NUMBER, _MAYBE_TEXT, _NUMBER, _NUMBER),  # seq to updated_at
    *(_NUMBER, _MAYBE_TEXT, _MAYBE_TEXT, _MAYBE_NUMBER, _NUMBER, _NUMBER),  # priority to lost_with
)


_EMPTY: dict[tuple[type, ...], Any] = {_TEXT: "", _MAYBE_TEXT: None, _NUMBER: 0, _MAYBE_NUMBER: None, _BYTES: b""}
_UNDECODABLE = (msgspec.MsgspecError, UnicodeDecodeError, TypeError)
_WIDTH = len(_COLUMNS)
_STATUS, _ATTENTION, _ERROR = (RunRow.__struct_fields__.index(name) for name in ("status", "attention", "error"))
_sound: set[tuple[type, ...]] = set()  # types of columns that were found in order before: a few dozen at most


def is_sound(row: Row) -> bool:
    """Whether each column of a run is of a type that perdure writes; in a damaged page it may be anything."""
    types = tuple(map(type, row[:_WIDTH]))
    if types in _sound:
        return True
    if not all(map(isinstance, row, _COLUMNS)):
        return False
    _sound.add(types)
    return True


def run_row(row: Row) -> RunRow:
    """A run from the columns that every query for whole runs begins with, as run_by_id does. StoreCorrupt when it is damaged."""
    if not is_sound(row):
        raise StoreCorrupt(f"the row of run {row[0]!r} is damaged; see what else is: perdure verify")
    return RunRow(*row[:_WIDTH])


def listed_row(row: Row) -> RunRow:
    """The same among others, which must not be hidden by one that is damaged: that one is there, and says so."""
    if is_sound(row):
        return RunRow(*row[:_WIDTH])
    values: list[Any] = [value if isinstance(value, types) else _EMPTY[types] for value, types in zip(row, _COLUMNS, strict=False)]
    values[_STATUS], values[_ATTENTION], values[_ERROR] = "needs_attention", "error", "the run's row is damaged; restore a backup"
    return RunRow(*values)


def key_of(row: Row) -> int:
    """The run's number in the database, from the same columns."""
    key: int = row[25]
    return key


def lost_of(row: Row) -> int:
    """How its last holder was lost, from the same columns; 0: it was not."""
    lost: int = row[23]
    return lost


def lost_with_of(row: Row) -> int:
    """How many other runs may be to blame for that, from the same columns."""
    lost_with: int = row[24]
    return lost_with


def as_lost(row: Row, lost: int, lost_with: int) -> Row:
    """The same columns of a run whose holder is known to be gone, as they would be if that had been written down."""
    return (*row[:23], lost, lost_with, *row[25:])


def event_row(key: int, sealed: Sealed) -> Row:
    """The parameters of insert_event."""
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
    """An event from seq, event_id, ts, epoch, call, cause, data."""
    seq, event_id, ts, epoch, call, cause, data = row
    if not (isinstance(event_id, bytes) and isinstance(ts, int) and isinstance(epoch, int)):
        raise StoreCorrupt(f"event {seq} of run {run_id} is damaged; see what else is: {shell.command('verify', run_id)}")
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
    return StoreCorrupt(f"{what} cannot be decoded ({error}); see what else is damaged: perdure verify")


def body_or_none(data: bytes, what: str) -> AnyBody | None:
    try:
        return body_from(data, what)
    except StoreCorrupt:
        return None  # that run's trouble alone: whoever drives it stops it for a person


def inbox_row(row: Row) -> InboxRow:
    """What lies in an inbox, from its number, run_id, call, data, event_id. A body that cannot be read is that run's trouble alone."""
    inbox_id, run_id, call, data, event_id = row
    return InboxRow(inbox_id, run_id, call, body_or_none(data, f"inbox row {inbox_id} of run {run_id}"), event_id.hex())


def has_arrived(cursor: Cursor, run_id: str, event_id: str) -> bool:
    """Whether what somebody handed to the run is there, in its journal or its inbox; asked after a COMMIT with an unknown outcome."""
    wanted = {"run_id": run_id, "event_id": bytes.fromhex(event_id)}
    return any(cursor.one(name, wanted) is not None for name in ("event_of_run", "inbox_event_of_run"))
