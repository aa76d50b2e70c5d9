"""Approvals as text and as JSON: what exactly is proposed, who may decide, and until when.

Text from a tool or a model is shown on separate lines with a label, so that it cannot look like another field.
"""

from __future__ import annotations

from typing import Any

from perdure import shell
from perdure.cli import common
from perdure.cli.target import resume_command, top
from perdure.cli.verdict import CHARS_SHOWN, approved_input, settled
from perdure.cli.who import is_among, os_user
from perdure.engine.api import Reading
from perdure.errors import InvalidInput, NotFound
from perdure.inspect.text import plain, plural, span
from perdure.inspect.view import loader
from perdure.store.api import ApprovalFilter, ApprovalRow

DIGEST_SHOWN = 12
LINES_SHOWN = 60
LINE_CHARS_SHOWN = 2000
SHORTEST_PREFIX = 6
_PREFIX = "ap-"
_ALL = 1_000_000


def which_approval(store: Reading, given: str, tenant: str | None) -> ApprovalRow:
    """The approval with this id, or the only approval whose id begins with `given`.

    NotFound if there is no such approval, or if it belongs to another tenant (G16).
    """
    found = store.approval(given)
    if found is not None and tenant in (None, found.tenant):
        return found
    begins = given.removeprefix(_PREFIX)
    nothing = f"there is no approval {given}; `perdure approvals` lists them"
    if given == begins or len(begins) < SHORTEST_PREFIX:
        raise NotFound(f"{nothing}, and an id may be cut to {_PREFIX} and its first {SHORTEST_PREFIX} characters, but not more")
    # Search the settled approvals too: if the user types the beginning of an old id, a new approval with the same
    # beginning must not be decided.
    alike = [row for row in store.approvals(ApprovalFilter(status=None, tenant=tenant, limit=_ALL)) if row.approval.startswith(given)]
    if not alike:
        raise NotFound(nothing)
    if len(alike) > 1:
        raise InvalidInput(
            f"{given} is the beginning of {len(alike)} approvals ({', '.join(row.approval for row in alike[:3])}); write more of it"
        )
    return alike[0]


def record(store: Reading, row: ApprovalRow) -> dict[str, Any]:
    """The approval as one JSON object, with the whole proposed input."""
    standing, request = row.standing, row.standing.request
    return {
        "approval": row.approval,
        "status": standing.status,
        "run_id": row.run_id,
        "call": row.call,
        "agent": row.agent,
        "tenant": row.tenant,
        "actor": row.actor,
        "action": request.action,
        "tool": request.tool,
        "input": plain(request.input, loader(store)),
        "approved_input": approved_input(store, row),
        "digest": request.digest,
        "reason": request.reason,
        "by": list(request.by),
        "quorum": request.quorum,
        "voters": list(standing.voters),
        "four_eyes": request.four_eyes,
        "editable": list(request.editable),
        "asked_at": common.iso(row.asked_at),
        "expires_at": None if request.expires_at is None else common.iso(request.expires_at),
        "on_expiry": request.on_expiry,
        "escalate_to": list(request.escalate_to),
        "escalated": standing.escalated,
        "settled_at": None if row.settled_at is None else common.iso(row.settled_at),
        "settled_by": standing.settled_by,
        "note": standing.note,
    }


def show(store: Reading, row: ApprovalRow, now: int, url: str | None) -> None:
    """Print the approval for the person who decides."""
    request = row.standing.request
    common.out(f"{common.style(common.clean(row.approval), bold=True)}  {common.clean(request.action)}  ({_state(store, row, now)})")
    acts_for = f", for {row.actor}" if row.actor else ""
    _field("asked by", f"run {row.run_id}, call {row.call}, of {row.agent}, tenant {row.tenant}{acts_for}, {span(now - row.asked_at)} ago")
    common.out(f"    proposed   {_proposed(row)}")
    for line in _input(store, row, url):
        common.out(f"      {line}")
    if request.reason:
        words = "from the tool's policy" if request.tool else "in the agent's words"
        common.out(f"    reason, {words}: {common.clean(_cut(request.reason))}")
    _field("decides", _deciders(row))
    if request.editable:
        _field("may edit", ", ".join(request.editable))
    _field("digest", request.digest[:DIGEST_SHOWN])
    if row.standing.note:
        _field("note", _cut(row.standing.note))
    if row.standing.status == "pending":
        for command in commands(store, row, now, url):
            common.out(f"    {common.style(command, 'cyan')}")


def commands(store: Reading, row: ApprovalRow, now: int, url: str | None) -> list[str]:
    """The commands to approve and to reject. If the approval has expired: the command that resumes the run."""
    settings, words = common.settings_with(url=url), common.url_words(url)
    if _is_over(row, now):
        run = store.get(row.run_id)
        assert run is not None, row  # one commit writes the approval's row and an event of its run
        return [resume_command(store, top(store, run), settings.url, url)]
    deciders = row.standing.request.by
    by = "" if is_among(deciders, os_user(), (), settings) else " --by WHO"
    yes, no = shell.command("approve", row.approval), shell.command("reject", row.approval)
    return [f"{yes}{by}{words}", f"{no}{by} --reason TEXT{words}"]


def _field(label: str, text: str) -> None:
    common.out(f"    {label:<9}  {common.clean(text)}")


def _state(store: Reading, row: ApprovalRow, now: int) -> str:
    request = row.standing.request
    if row.standing.status != "pending":
        return common.clean(settled(store, row, now))
    if request.expires_at is None:
        return "does not expire" + (", escalated" if row.standing.escalated else "")
    if request.expires_at <= now and request.on_expiry == "wait":
        return f"a reminder is due since {span(now - request.expires_at)}; a worker sends it"
    if _is_over(row, now):
        next_ = f"asks {', '.join(request.escalate_to)}" if request.on_expiry == "escalate" and not row.standing.escalated else "records it"
        return common.clean(f"expired {span(now - request.expires_at)} ago; a worker {next_}, or:")
    escalates = not row.standing.escalated and request.on_expiry != "reject"
    then = {"escalate": f"then {', '.join(request.escalate_to)} are asked", "wait": "then they are reminded"}
    after = common.clean(then[request.on_expiry]) if escalates else "then it counts as no"
    return f"expires in {span(request.expires_at - now)}, {after}"


def _is_over(row: ApprovalRow, now: int) -> bool:
    """Has the approval expired, and no worker has recorded this yet? Then the approval can no longer be decided."""
    request = row.standing.request
    return row.standing.status == "pending" and request.on_expiry != "wait" and request.expires_at is not None and request.expires_at <= now


def _proposed(row: ApprovalRow) -> str:
    request = row.standing.request
    return "this call of the tool, with exactly these arguments:" if request.tool else "this, exactly:"


def _input(store: Reading, row: ApprovalRow, url: str | None) -> list[str]:
    lines = common.json_lines(plain(row.standing.request.input, loader(store)))
    if len(lines) <= LINES_SHOWN and max(map(len, lines)) <= LINE_CHARS_SHOWN:
        return lines
    more = f"… not all of it is shown; the whole: perdure approvals --run {shell.quote(row.run_id)} --json{common.url_words(url)}"
    return [*(line[:LINE_CHARS_SHOWN] for line in lines[:LINES_SHOWN]), common.style(common.clean(more), bold=True)]


def _deciders(row: ApprovalRow) -> str:
    standing, request = row.standing, row.standing.request
    who = ", ".join(request.by) or "anybody"
    votes = f"; {standing.agreed} of {request.quorum} have agreed" + (f" ({', '.join(standing.voters)})" if standing.voters else "")
    eyes = "; not the person for whom the run acts" if request.four_eyes else ""
    return who + (votes if request.quorum > 1 else "") + eyes


def _cut(text: str) -> str:
    return text if len(text) <= CHARS_SHOWN else f"{text[:CHARS_SHOWN]}… ({plural(len(text) - CHARS_SHOWN, 'more character')})"
