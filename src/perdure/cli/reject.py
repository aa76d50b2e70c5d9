"""`perdure reject`: reject what an approval proposes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from perdure.cli import common
from perdure.cli.deciding import decide, decider_options
from perdure.store.api import ApprovalRow

if TYPE_CHECKING:
    from perdure.app import Perdure


@click.command("reject")
@common.approval_argument
@click.option("--reason", required=True, metavar="TEXT", help="Why; the agent sees it.")
@decider_options
@common.url_option
@common.json_option
def command(approval: str, reason: str, url: str | None, as_json: bool, **who: Any) -> None:
    """Reject the approval ID, which may be cut to its first 6 characters after "ap-".

    One rejection is enough, for any quorum.
    """

    async def no(app: Perdure, found: str, voter: dict[str, Any]) -> ApprovalRow:
        return await app.reject(found, reason=reason, **voter)

    decide(approval, no, **who, url=url, as_json=as_json)
