"""`perdure approve`: say yes to what is proposed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from perdure.cli import common
from perdure.cli.deciding import decide, decider_options
from perdure.core import codec
from perdure.errors import InvalidInput
from perdure.store.api import ApprovalRow

if TYPE_CHECKING:
    from perdure.app import Perdure


@click.command("approve")
@common.approval_argument
@click.option("--edit", metavar="JSON", help="Other values for fields that may be edited, such as '{\"cents\": 500}'.")
@click.option("--note", metavar="TEXT", help="For the agent, and for whoever reads the journal later.")
@decider_options
@common.url_option
@common.json_option
def command(approval: str, edit: str | None, note: str | None, url: str | None, as_json: bool, **who: Any) -> None:
    """Say yes to the approval ID, which may be cut to its first 6 characters after "ap-". One decision counts."""
    changes = None if edit is None else codec.parse(edit, "--edit")
    if edit is not None and not isinstance(changes, dict):
        raise InvalidInput(f"--edit {edit!r:.60} is not an object of the fields to change, such as '{{\"cents\": 500}}'")

    async def yes(app: Perdure, found: str, voter: dict[str, Any]) -> ApprovalRow:
        return await app.approve(found, edit=changes, note=note, **voter)

    decide(approval, yes, **who, url=url, as_json=as_json)
