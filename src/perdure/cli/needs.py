"""What people can do for a run that waits, and for those below it: the commands to type."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from itertools import islice

from perdure.cli import common
from perdure.cli.inbox import commands
from perdure.inspect.words import clip
from perdure.store.api import FINISHED, ApprovalFilter, RunRow, Store

SHOWN = 10


def needs(store: Store, row: RunRow, url: str | None) -> list[str]:
    """One line for each thing that the run, or one below it, cannot go on without; the first few of them."""
    if row.status in FINISHED or row.holder is not None:
        return []
    found = list(islice(_needs(store, row, url), SHOWN + 1))
    return found if len(found) <= SHOWN else [*found[:SHOWN], f"… and more: perdure approvals{common.url_words(url)}"]


def _needs(store: Store, row: RunRow, url: str | None) -> Iterator[str]:
    for one in (row, *store.family(row.run_id)):
        run = shlex.quote(one.run_id)
        if one.status == "waiting_approval":
            for asked in store.approvals(ApprovalFilter(run_id=one.run_id, limit=SHOWN + 1)):
                yes, no = commands(asked, url)
                yield f"{yes}   or: {no}"
        elif one is row:
            continue  # the sentence above these lines is about it
        elif one.status == "needs_attention":
            yield f"child {one.run_id} needs attention: {clip(one.error or one.waiting_for or '', 100)}: perdure why {run}{common.url_words(url)}"
        elif one.status == "paused":
            yield f"child {one.run_id} is paused: perdure unpause {run}{common.url_words(url)}"
