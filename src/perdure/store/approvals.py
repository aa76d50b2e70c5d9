"""Approvals: the run's commit requests an approval, `decide` changes it, the commit that starts the call consumes it.

The end of the run withdraws the approvals that are still pending.
"""

from __future__ import annotations

import logging
import time
from typing import get_args

import msgspec

from perdure import shell
from perdure.core.approval import ApprovalFacts, Judgement, Standing, Vote, judge
from perdure.core.codec import Payload
from perdure.core.events import ApprovalRequested, CheckpointTaken, Event, ToolCallInitiated
from perdure.core.state import image_in
from perdure.errors import NotFound, RunEnded, StoreCorrupt
from perdure.store.api import FINISHED, ApprovalFilter, ApprovalRow, ApprovalStatus, Refused
from perdure.store.blobs import Blobs
from perdure.store.cursor import Cursor, Row
from perdure.store.delivery import Delivery, Letter
from perdure.store.part import Means
from perdure.store.rows import body_from, check_not_ended, has_arrived, run_row

log = logging.getLogger("perdure.store")
_decode_names = msgspec.json.Decoder(tuple[str, ...]).decode


def insert(cursor: Cursor, key: int, run_id: str, event: Event, request: ApprovalRequested) -> Refused | None:
    """Insert a pending approval; Refused if another approval has this id."""
    values = {
        "approval": request.approval,
        "run": key,
        "seq": event.seq,
        "call": event.call,
        "action": request.action,
        "asked_at": event.ts,
        "deciders": msgspec.json.encode(request.by).decode(),
        "expires_at": request.expires_at,
    }
    if cursor.change("insert_approval", values) == 1:
        return None
    return Refused(f"run {run_id}: call {event.call} would ask for approval {request.approval}, and there is another one with that id")


def consume(cursor: Cursor, key: int, run_id: str, event: Event, start: ToolCallInitiated, at: int) -> Refused | None:
    """Consume the approval.

    Refused unless the approval is approved, not consumed, not expired, and for this very call and arguments.
    """
    # The intent may have waited a long time, for example because the disk was full. The effect begins only after this
    # commit, so the approval must still be valid now.
    begins = max(event.ts, at)
    values = {"approval": start.approval, "run": key, "call": event.call, "tool": start.tool, "digest": start.digest, "ts": begins}
    if cursor.change("consume_approval", values) == 1:
        return None
    found = cursor.one("approval_by_id", (start.approval,))
    call = f"call {event.call} ({start.tool})"
    try:
        row = None if found is None else approval_row(found)
    except StoreCorrupt as error:
        return Refused(f"run {run_id}: {call} may not start: {error}")
    if row is not None and _has_expired(row.standing, begins):
        return Refused(f"approval {start.approval} has expired: {call} of run {run_id} may not start any more")
    return Refused(f"run {run_id}: {call} may not start: approval {start.approval} {_why_not(row, start)}")


def _has_expired(standing: Standing, now: int) -> bool:
    expires_at = standing.request.expires_at
    return standing.status == "expired" or (standing.status == "approved" and expires_at is not None and expires_at <= now)


def _why_not(row: ApprovalRow | None, start: ToolCallInitiated) -> str:
    if row is None:
        return "does not exist"
    if row.standing.status != "approved":
        return f"is {row.standing.status}, not approved"
    if row.standing.digest != start.digest:
        return f"is for the arguments {row.standing.digest[:12]}, not for {str(start.digest)[:12]}"
    return f"is for {row.standing.request.action} (call {row.call} of run {row.run_id})"


def withdraw_rest(cursor: Cursor, key: int, ts: int) -> None:
    """Withdraw the approvals of the run that are still pending, because the run has ended."""
    cursor.change("withdraw_approvals", {"run": key, "ts": ts})


class Approvals(Blobs):
    """Reads approvals and decides them.

    It also reads blobs: to judge a vote with an edit, it needs the proposed input, which may be a blob.
    """

    def __init__(self, means: Means) -> None:
        super().__init__(means)
        self._delivery = Delivery(means.liveness)

    def decide(self, approval: str, judgement: Judgement, *, event_id: str, now: int, tenant: str | None = None) -> ApprovalRow:
        called_s = time.monotonic()

        def rule(cursor: Cursor) -> ApprovalRow:
            known = cursor.one("approval_by_id", (approval,))
            # If the approval belongs to another tenant, the error is the same: the caller must not learn that the
            # approval exists.
            if known is None or tenant not in (None, known[4]):
                raise _no_such(approval)
            # Lock the run first and then the approval, as the appends of the run's holder do. With another order the
            # two transactions could deadlock.
            run = cursor.all("run_to_change", (known[1],))[0]
            found = cursor.all("approval_to_change", (approval,))[0]
            row, seq = approval_row(found), found[17]
            if row is None:
                raise _no_such(approval)
            run_row(run).check_live()
            status = run_row(run).status
            if status in FINISHED:
                raise RunEnded(f"approval {approval}: its run {row.run_id} has finished ({status}) and accepts no more post")
            check_not_ended(run)
            # A vote counts at the time when it is written: while the vote waited for the write lock, the approval may
            # have expired.
            waited_us = round((time.monotonic() - called_s) * 1e6) if isinstance(judgement, Vote) else 0
            ruling = judge(row.standing, self._facts(row, judgement), judgement, now + waited_us)
            settled = ruling.standing.status != row.standing.status
            after = msgspec.structs.replace(row, standing=ruling.standing, settled_at=now if settled else row.settled_at)
            _change(cursor, found[16], after)
            self._delivery.deliver(cursor, run, Letter(row.call, ruling.body, event_id, now, cause=seq))
            return after

        decided = self._database.write(rule, lambda cursor, after: has_arrived(cursor, after.run_id, event_id))
        self._bell.ring()
        return decided

    def _facts(self, row: ApprovalRow, judgement: Judgement) -> ApprovalFacts:
        if not isinstance(judgement, Vote) or judgement.edit is None:
            return ApprovalFacts(row.actor, settled_at=row.settled_at)
        request = row.standing.request
        schema = None if request.schema is None else self._load(request.schema)
        return ApprovalFacts(row.actor, self._load(request.input), schema, row.settled_at)

    def _load(self, payload: Payload) -> bytes:
        inline = payload.inline
        return self.blob(str(payload.blob)) if inline is None else inline

    def approval(self, approval: str) -> ApprovalRow | None:
        rows = self._database.read("approval_by_id", (approval,))
        return approval_row(rows[0]) if rows else None

    def approvals(self, wanted: ApprovalFilter) -> list[ApprovalRow]:
        # Name the statuses one by one even if all are wanted, so that the database uses the index on the status. A
        # scan would become slower and slower, because the number of settled approvals only grows.
        statuses = get_args(ApprovalStatus) if wanted.status is None else (wanted.status,)
        values = {**msgspec.structs.asdict(wanted), "statuses": msgspec.json.encode(statuses).decode()}
        found = [_approval_or_none(row) for row in self._database.read("list_approvals", values)]
        return [row for row in found if row is not None]


def approval_row(row: Row) -> ApprovalRow | None:
    """An approval, from the columns that approval_by_id and list_approvals share.

    None: it is settled, and its request was removed by `prune --before-checkpoint`.
    """
    approval, run_id, call, agent, tenant, actor, asked_at, settled_at = row[:8]
    status, deciders, expires_at, escalated, voters, digest, settled_by, note, _, seq, data = row[8:]
    what = f"event {seq} of run {run_id}"
    request: object = body_from(data, what)
    if isinstance(request, CheckpointTaken):
        # The request was removed. The run's agent still waits for the approval if the image of the checkpoint has it.
        request = next((ask.request for ask in image_in(request).asks if ask.request.approval == approval), None)
        if request is None and status != "pending":
            return None
    if not isinstance(request, ApprovalRequested) or request.approval != approval:
        raise StoreCorrupt(
            f"{what} is not the request of approval {approval}", hint=f"see what else is damaged: {shell.command('verify', run_id)}"
        )
    its = f"the row of approval {approval} of run {run_id} was edited:"
    standing = Standing(
        request=msgspec.structs.replace(request, by=_names(deciders, f"{its} who may decide"), expires_at=expires_at),
        status=status,
        digest=digest,
        voters=_names(voters, f"{its} who has agreed"),
        settled_by=settled_by,
        note=note,
        escalated=bool(escalated),
    )
    return ApprovalRow(approval, run_id, call, agent, tenant, actor, asked_at, standing, settled_at)


def _no_such(approval: str) -> NotFound:
    return NotFound(f"there is no approval {approval}", hint="`perdure approvals` shows the pending approvals")


def _approval_or_none(row: Row) -> ApprovalRow | None:
    try:
        return approval_row(row)
    except StoreCorrupt as error:
        # Only one run is affected: the other approvals must still be listed.
        log.error("an approval is left out: %s", error.in_full())
        return None


def _names(data: str, what: str) -> tuple[str, ...]:
    try:
        return _decode_names(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, TypeError) as error:
        raise StoreCorrupt(f"{what} cannot be decoded ({error})", hint="see what else is damaged: perdure verify") from None


def _change(cursor: Cursor, key: int, after: ApprovalRow) -> None:
    standing = after.standing
    values = {
        "id": key,
        "status": standing.status,
        "deciders": msgspec.json.encode(standing.request.by).decode(),
        "expires_at": standing.request.expires_at,
        "escalated": int(standing.escalated),
        "voters": msgspec.json.encode(standing.voters).decode(),
        "digest": standing.digest,
        "settled_by": standing.settled_by,
        "note": standing.note,
        "settled_at": after.settled_at,
    }
    cursor.change("change_approval", values)
