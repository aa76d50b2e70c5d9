"""Decides an approval: the code that `approve` and `reject` share."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from perdure.cli import common
from perdure.cli.inbox import DIGEST_SHOWN, which_approval
from perdure.cli.steering import by_option, source, speak, speaker, who_goes_on
from perdure.cli.verdict import approved_input, edited, noted, settled
from perdure.cli.who import is_among, who_is_meant
from perdure.engine.api import Reading
from perdure.errors import Conflict, NotPermitted
from perdure.inspect.text import called
from perdure.settings import Settings
from perdure.store.api import ApprovalRow

if TYPE_CHECKING:
    from perdure.app import Perdure

F = TypeVar("F", bound=Callable[..., object])
Decide = Callable[["Perdure", str, dict[str, Any]], Awaitable[ApprovalRow]]


def decider_options(function: F) -> F:
    """The options `--by --role --digest --tenant`. Pass the parameters `by roles digest tenant` to `decide`."""
    options = (
        by_option("Who decides."),
        click.option(
            "--role", "roles", multiple=True, metavar="R", help="A role of this person, besides the roles in the settings; may be repeated."
        ),
        click.option(
            "--digest", metavar="D", help="The digest that `perdure approvals` shows: refused if the approval is about something else."
        ),
        click.option("--tenant", metavar="NAME", help="The tenant of the approval; an approval of another tenant is not found."),
    )
    for option in reversed(options):
        function = option(function)
    return function


def decide(
    approval: str,
    say: Decide,
    *,
    by: str | None,
    roles: tuple[str, ...],
    digest: str | None,
    tenant: str | None,
    url: str | None,
    as_json: bool,
) -> None:
    """Find the approval, post the vote with `say`, and print the result and what happens next."""
    settings = common.settings_with(url=url)
    who = {"by": speaker(by), "roles": roles, "source": source(), "tenant": tenant}
    speak(settings, lambda app: _decide(app, approval, say, {**who, "digest": digest}, settings, url, as_json))


async def _decide(app: Perdure, given: str, say: Decide, who: dict[str, Any], settings: Settings, url: str | None, as_json: bool) -> None:
    asked = which_approval(app.reading, given, who["tenant"])
    try:
        after = await say(app, asked.approval, {**who, "digest": _whole(who["digest"], asked)})
    except Conflict:
        found = app.reading.approval(asked.approval)
        if found is None or found.standing.status == "pending":
            raise
        said = f"{settled(app.reading, found, common.now_us())}{noted(found)}"
        left = "there is nothing to decide any more" if found.standing.status == "withdrawn" else "one decision counts"
        raise Conflict(f"approval {asked.approval} was {said}; {left}") from None
    except NotPermitted as error:
        deciders = asked.standing.request.by
        if is_among(deciders, who["by"], who["roles"], settings):
            raise  # refused because of four_eyes: do not suggest another name or role
        raise NotPermitted(f"{error}; {who_is_meant(deciders, settings)}") from None
    run = await app.handle(after.run_id).row()
    standing = after.standing
    if as_json:
        common.out_json(
            {
                "approval": after.approval,
                "status": standing.status,
                "by": who["by"],
                "voters": list(standing.voters),
                "quorum": standing.request.quorum,
                "digest": standing.digest or standing.request.digest,
                "approved_input": approved_input(app.reading, after),
                "note": standing.note,
                "run_id": after.run_id,
                "run_status": run.status,
            }
        )
        return
    common.out(common.clean(f"{_said(app.reading, after)}; {_then(after, who_goes_on(app.reading, run, settings, url))}"))


def _whole(digest: str | None, asked: ApprovalRow) -> str | None:
    """The whole digest, if the user gave its beginning. Any other text is returned unchanged, and refused later."""
    whole = asked.standing.request.digest
    return whole if digest is not None and len(digest) >= DIGEST_SHOWN and whole.startswith(digest) else digest


def _said(store: Reading, after: ApprovalRow) -> str:
    standing, request = after.standing, after.standing.request
    about = f"{after.approval} ({called(request.action, request.input, 60)} of run {after.run_id})"
    if standing.status == "pending":
        return f"{about}: {standing.agreed} of {request.quorum} have approved ({', '.join(standing.voters)})"
    return f"{about} is {standing.status} by {standing.settled_by}{edited(store, after)}{noted(after)}"


def _then(after: ApprovalRow, goes_on: str) -> str:
    if after.standing.status == "pending":
        return f"{after.standing.request.quorum - after.standing.agreed} more must agree"
    return goes_on
