"""The decision about an approval: who decided, when, and with which edited values."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

from perdure import shell
from perdure.cli.common import to_json
from perdure.core.codec import Payload
from perdure.core.events import ApprovalDecided
from perdure.engine.api import Reading
from perdure.errors import StoreCorrupt
from perdure.inspect.text import clip, clock, plain, plural
from perdure.inspect.view import loader
from perdure.store.api import ApprovalRow

CHARS_SHOWN = 400
_VALUE_SHOWN = 60
_CHANGES_SHOWN = 6


def settled(store: Reading, row: ApprovalRow, now: int) -> str:
    """The outcome of a settled approval: who decided, when, and with which edited values."""
    standing = row.standing
    what = "approved" if standing.status == "consumed" else standing.status
    by = f" by {standing.settled_by}" if standing.settled_by else " by the run" if standing.status == "withdrawn" else ""
    at = f" at {clock(row.settled_at, now)}" if row.settled_at is not None else ""
    then = ", and its call has been started" if standing.status == "consumed" else ""
    return f"{what}{by}{at}{edited(store, row)}{then}"


def noted(row: ApprovalRow) -> str:
    """The note of the decision, as the end of a sentence; "" if there is no note."""
    return f"; note: {clip(row.standing.note, CHARS_SHOWN)}" if row.standing.note else ""


def edited(store: Reading, row: ApprovalRow) -> str:
    """The edited values, such as " with cents 9900 → 2500"; "" if no value was edited or nothing was approved."""
    if not _is_edited(row):
        return ""
    before, after = plain(row.standing.request.input, loader(store)), approved_input(store, row)
    # `before` and `after` are JSON objects: only fields can be edited.
    found = [change for name in after for change in _changes(name, before.get(name), after[name])]
    more = f" and {plural(len(found) - _CHANGES_SHOWN, 'more change')}" if len(found) > _CHANGES_SHOWN else ""
    return f" with {', '.join(found[:_CHANGES_SHOWN])}{more}"


def _changes(where: str, before: Any, after: Any) -> list[str]:
    """How two values differ. For large values, such as plans: only the parts that differ."""
    old, new = to_json(before), to_json(after)
    if old == new:
        return []
    if max(len(old), len(new)) > _VALUE_SHOWN:
        if isinstance(before, dict) and isinstance(after, dict):
            keys = dict.fromkeys([*before, *after])
            return [change for key in keys for change in _changes(f"{where}.{key}", before.get(key), after.get(key))]
        if isinstance(before, list) and isinstance(after, list):
            both = zip_longest(before, after)
            return [change for place, pair in enumerate(both) for change in _changes(f"{where}[{place}]", *pair)]
    return [f"{where} {clip(old, _VALUE_SHOWN)} → {clip(new, _VALUE_SHOWN)}"]


def approved_input(store: Reading, row: ApprovalRow) -> Any:
    """The whole input that was approved; None if nothing was approved."""
    if not row.standing.digest:
        return None
    return plain(_decided(store, row) if _is_edited(row) else row.standing.request.input, loader(store))


def _is_edited(row: ApprovalRow) -> bool:
    return bool(row.standing.digest) and row.standing.digest != row.standing.request.digest


def _decided(store: Reading, row: ApprovalRow) -> Payload:
    """The edited input of the decision, from the run's inbox or from its journal."""
    # Read the inbox first: if the holder moves the message from the inbox to the journal now, the second read finds
    # the message in the journal.
    bodies = [letter.body for letter in store.unread(row.run_id)]
    bodies += [event.body for event in store.read(row.run_id)]
    for body in bodies:
        if isinstance(body, ApprovalDecided) and body.approval == row.approval and body.input is not None:
            return body.input
    see = shell.command("verify", row.run_id)
    raise StoreCorrupt(f"the decision about {row.approval} is not in the journal of run {row.run_id}; see: {see}")
