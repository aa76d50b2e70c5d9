"""The text of a notice: one line for people, and one JSON object for programs.

The line says what is asked, who is asked, until when, and which command to type. Neither form contains a link: mail
scanners and chat previews follow links, and they would also follow a link that decides an approval.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from perdure import shell
from perdure.core import codec
from perdure.core.codec import Payload
from perdure.core.events import (
    AnyBody,
    ApprovalEscalated,
    ApprovalRequested,
    AttentionNeeded,
    BudgetExceeded,
    Event,
    Failure,
    RunFailed,
)
from perdure.core.invisible import escaped
from perdure.core.times import iso
from perdure.store.api import NoticeRow, RunRow

MAX_INPUT_BYTES = 16 * 1024


def line(notice: NoticeRow) -> str:
    """The notice for a log: always one line, even if tools or models have written line breaks."""
    return escaped(f"{_words(notice.event, notice.row)}: {_command(notice)}")


def document(notice: NoticeRow) -> bytes:
    """The notice as the JSON that a webhook gets."""
    row, event = notice.row, notice.event
    whole = {
        "id": event.event_id,
        "type": event.type,
        "run_id": row.run_id,
        "agent": row.agent,
        "tenant": row.tenant,
        "ts": iso(event.ts),
        "seq": event.seq,
        "data": _public(event.body),
    }
    return json.dumps(whole, allow_nan=False, separators=(",", ":")).encode("ascii")


# -- words ------------------------------------------------------------------------------------------------------------
def _words(event: Event, row: RunRow) -> str:
    of_run = f"run {row.run_id} ({row.agent}, tenant {row.tenant})"
    match event.body:
        case ApprovalRequested() as asked:
            because = f", because {_quoted(asked.reason)}" if asked.reason else ""
            number = f", {asked.quorum} of them must agree" if asked.quorum > 1 else ""
            who = f"{_people(asked.by)}{number}, {_until(asked.expires_at)}"
            return f"approval wanted by {of_run}: {_clip(asked.action, 100)} {_shown(asked.input)}{because}; asked of {who}"
        case ApprovalEscalated(to=to, expires_at=expires_at):
            return f"approval still wanted by {of_run}, there was no decision in time; asked of {_people(to)}, {_until(expires_at)}"
        case AttentionNeeded(reason=reason, detail=detail):
            return f"{of_run} needs attention ({reason}): {_clip(detail, 400)}"
        case BudgetExceeded(budget_of=owner, what=what) as over:
            of_whom = "its budget" if owner == row.run_id else f"the budget of run {owner}"
            used, wanted, limit = (_amount(what, number) for number in (over.used, over.wanted, over.limit))
            return f"{of_run} has come to the end of {of_whom}: {used} used and {wanted} wanted of {limit}"
        case RunFailed(failure=failure):
            return f"{of_run} failed: {failure.type}: {_clip(failure.message, 400)}"
        case _:
            return f"{of_run}: {event.type}"


def _command(notice: NoticeRow) -> str:
    match notice.event.body:
        case ApprovalRequested(approval=approval, by=who) | ApprovalEscalated(approval=approval, to=who):
            # Without --by, the vote counts for the user who types the command, and this user may not be one of those
            # who were asked.
            return shell.command("approve", approval) + (" --by WHO" if who else "")
        case _:
            return shell.command("why", notice.row.run_id)


def _people(who: tuple[str, ...]) -> str:
    return _clip(", ".join(who), 300) or "any person"


def _until(expires_at: int | None) -> str:
    return "without a time limit" if expires_at is None else f"until {_clock(expires_at)}"


def _amount(what: str, number: int) -> str:
    match what:
        case "usd":
            whole, part = divmod(number, 1_000_000)
            # Show the exact amount: a rounded amount may look sufficient although it is not.
            return f"${whole:,}.{f'{part:06d}'.rstrip('0'):0<2}"
        case "seconds":
            return f"{number / 1e6:.1f} s"
        case _:
            return f"{number:,} {what.removesuffix('s') if number == 1 else what}"


def _shown(payload: Payload) -> str:
    inline = payload.inline
    return _clip(inline.decode("utf-8"), 300) if inline is not None else f"{_clip(str(payload.preview), 300)} ({payload.size:,} bytes)"


def _quoted(text: str) -> str:
    # Use quotes, because these words come from the agent or its author, not from perdure.
    return json.dumps(_clip(text, 200), ensure_ascii=False)


def _clip(text: str, width: int) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= width else flat[: width - 1] + "…"


def _clock(ts: int) -> str:
    return iso(ts)[:19].replace("T", " ") + " UTC"


# -- JSON -------------------------------------------------------------------------------------------------------------
def _public(body: AnyBody) -> dict[str, Any]:
    """The event's fields. A payload becomes its JSON value; a payload that is too long becomes a preview and size."""
    fields: dict[str, Any] = {}
    for name in body.__struct_fields__:
        value = getattr(body, name)
        if _does_not_apply(body, name):
            continue
        if isinstance(value, Payload):
            fields |= _payload(name, value)
        elif isinstance(value, Failure):
            # Leave out the traceback: it shows machines and folders, and it is in the journal.
            fields[name] = {"kind": value.kind, "type": value.type, "message": value.message}
        elif name.endswith("_at") and value is not None:
            fields[name] = iso(value)
        else:
            fields[name] = msgspec.to_builtins(value)
    return fields


def _does_not_apply(body: AnyBody, name: str) -> bool:
    """Is this a field about escalation, in a request that is not escalated?"""
    return isinstance(body, ApprovalRequested) and name in ("escalate_to", "escalate_us") and body.on_expiry != "escalate"


def _payload(name: str, payload: Payload) -> dict[str, Any]:
    inline = payload.inline
    if inline is not None and len(inline) <= MAX_INPUT_BYTES:
        return {name: codec.decode(inline)}
    preview = payload.preview if inline is None else inline.decode("utf-8")[: codec.PREVIEW_CHARS]
    return {f"{name}_preview": preview, f"{name}_bytes": payload.size if inline is None else len(inline)}
