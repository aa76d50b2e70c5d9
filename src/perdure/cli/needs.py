"""What people can do for a run that waits, and for those below it: the commands to type."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from perdure import shell
from perdure.cli import common
from perdure.cli.inbox import commands
from perdure.core.state import fold
from perdure.engine.api import Reading
from perdure.inspect.words import clip
from perdure.store.api import FINISHED, ApprovalFilter, RunRow

SHOWN = 10


def needs(store: Reading, row: RunRow, url: str | None) -> list[str]:
    """One line for each thing that the run, or one below it, cannot go on without; the first few of them."""
    if row.status in FINISHED or row.holder is not None:
        return []
    found = list(islice(_needs(store, row, url), SHOWN + 1))
    return found if len(found) <= SHOWN else [*found[:SHOWN], f"… and more: {_all(store, row, url)}"]


def _needs(store: Reading, row: RunRow, url: str | None) -> Iterator[str]:
    broke = set(store.over_budget(row.run_id)) - {row.run_id}
    if broke:
        yield short_of_budget(store, row, sorted(broke), url)
    for one in (row, *store.family(row.run_id)):
        if one.run_id in broke:
            continue  # one command frees them all
        if one.status == "waiting_approval":
            for asked in store.approvals(ApprovalFilter(run_id=one.run_id, limit=SHOWN + 1)):
                yield "   or: ".join(commands(store, asked, common.now_us(), url))
        elif one is row:
            continue  # the sentence above these lines is about it
        elif one.status == "needs_attention":
            why = shell.command("why", one.run_id) + common.url_words(url)
            yield f"child {one.run_id} needs attention: {clip(one.error or one.waiting_for or '', 100)}: {why}"
        elif one.status == "paused":
            yield f"child {one.run_id} is paused: {shell.command('unpause', one.run_id)}{common.url_words(url)}"


def short_of_budget(store: Reading, row: RunRow, broke: list[str], url: str | None) -> str:
    """The children that stand still because this run's budget is used up, in one line, with the one command that helps them all."""
    over = fold(store.read(broke[0])).over
    who = f"child {broke[0]} stands" if len(broke) == 1 else f"{len(broke):,} children stand"
    what = over.what if over is not None else "usd"
    unpause = shell.command("unpause", row.run_id)
    return f"{who} still for the budget of {row.run_id}: {unpause} {shell.quote(f'--add-{what}')} N{common.url_words(url)}"


def _all(store: Reading, row: RunRow, url: str | None) -> str:
    """What lists the rest."""
    found = {one.status for one in (row, *store.family(row.run_id))}
    verbs = {"waiting_approval": "approvals", "needs_attention": "list --status needs_attention", "paused": "list --status paused"}
    return ", ".join(f"perdure {verb}{common.url_words(url)}" for status, verb in verbs.items() if status in found)


def stuck_child(store: Reading, row: RunRow) -> RunRow | None:
    """A child that needs a person, when nothing else of the family can bring the waiting run on."""
    if row.status != "waiting" or row.ready_at is not None or row.holder is not None:
        return None
    family = store.family(row.run_id)
    moving = any(one.holder is not None or one.ready_at is not None or one.status == "waiting_approval" for one in family)
    return None if moving else next((one for one in family if one.status == "needs_attention"), None)
