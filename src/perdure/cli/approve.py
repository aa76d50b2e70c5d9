"""`perdure approve`: approve what an approval proposes."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import click

from perdure.cli import common
from perdure.cli.deciding import decide, decider_options
from perdure.cli.run_verb import arguments
from perdure.core import codec
from perdure.errors import InvalidInput
from perdure.store.api import ApprovalRow

if TYPE_CHECKING:
    from perdure.app import Perdure


@click.command("approve")
@common.approval_argument
@click.option(
    "--edit",
    "edits",
    multiple=True,
    metavar="JSON",
    help="New values for editable fields: '{\"cents\": 500}', or cents:=500 for JSON and text=VALUE for text; may be repeated.",
)
@click.option("--note", metavar="TEXT", help="A note for the agent and for the journal.")
@decider_options
@common.url_option
@common.json_option
def command(approval: str, edits: tuple[str, ...], note: str | None, url: str | None, as_json: bool, **who: Any) -> None:
    """Approve the approval ID, which may be cut to its first 6 characters after "ap-". The first decision counts."""
    changes = _changes(edits)

    async def yes(app: Perdure, found: str, voter: dict[str, Any]) -> ApprovalRow:
        return await app.approve(found, edit=changes, note=note, **voter)

    decide(approval, yes, **who, url=url, as_json=as_json)


def _changes(edits: tuple[str, ...]) -> dict[str, Any] | None:
    """The fields to change. Each edit is a JSON object, or a pair such as `key=value` (the form of `perdure run`)."""
    changes: dict[str, Any] = {}
    for edit in edits:
        is_pair = re.match(r"[A-Za-z_]\w*:?=", edit) is not None
        some = arguments([edit], None)[1] if is_pair else codec.parse(edit, "--edit")
        if not isinstance(some, dict):
            raise InvalidInput(f"--edit {edit!r:.60} is not an object of the fields to change, such as '{{\"cents\": 500}}' or cents:=500")
        if twice := changes.keys() & some.keys():
            raise InvalidInput(f"--edit gives {min(twice)!r} twice")
        changes |= some
    return changes if edits else None
