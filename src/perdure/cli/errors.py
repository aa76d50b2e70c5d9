"""`perdure errors`: the runs that failed or need attention, grouped by what went wrong.

Two errors are alike if they have the same type, the same failing line and the same message, apart from what differs from
run to run: numbers, ids, addresses and quoted text.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from itertools import islice
from typing import Any

import click
from msgspec import Struct

from perdure import shell
from perdure.cli import common
from perdure.core.events import Failure
from perdure.core.invisible import all_printable
from perdure.core.query import EVERYTHING, MAX_STARS, Query, Term, parse_query
from perdure.engine.api import Reading
from perdure.errors import InvalidInput
from perdure.inspect.text import clip, places, plural, span
from perdure.inspect.view import all_rows
from perdure.store.api import RunRow

WRONG = ("failed", "needs_attention")
MAX_GROUPS = 1000  # how many different errors are in memory; the runs with other errors are only counted
_AT_ONCE = 200
_SHOWN_CHARS = 300
_PATTERN_CHARS = 200
# The order counts: an address may contain ids, and an id may contain numbers.
_VARIES = tuple(
    (re.compile(pattern), placeholder)
    for pattern, placeholder in (
        (r"\b[a-z][a-z0-9+.-]*://[^\s'\"<>()]+", "<url>"),
        (r"'[^'\n]*'|\"[^\"\n]*\"|`[^`\n]*`", "<text>"),
        (r"\b[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}\b", "<uuid>"),
        (r"\b0[xX][0-9a-fA-F]+\b|\b(?=[0-9a-fA-F]*[0-9])[0-9a-fA-F]{8,}\b", "<hex>"),
        (r"\d+(?:[.,:]\d+)*", "<n>"),
    )
)
_PLACEHOLDER = re.compile(r"<(?:url|text|uuid|hex|n)>")
# How perdure itself names the tool of a failed call, and of a call in doubt.
_TOOL = re.compile(r"(?:tool (\S+) \(call \d+\) failed|call \d+ \((\S+?)\): )")


class ErrorGroup(Struct):
    """Runs with the same error."""

    fingerprint: str
    status: str
    type: str
    tool: str | None
    message: str
    place: str | None
    where: str  # a query for the runs with this error
    runs: int
    first_seen: int
    last_seen: int
    example: str  # the newest run


def normalised(text: str) -> str:
    """The text with placeholders for what differs from run to run."""
    for pattern, placeholder in _VARIES:
        text = pattern.sub(placeholder, text)
    return text


def pattern_of(error: str) -> str:
    """A pattern for the errors that are like this one. It may match other errors too."""
    pattern = ""
    for part in re.split(f"({_PLACEHOLDER.pattern})", normalised(error)):
        if _PLACEHOLDER.fullmatch(part):
            pattern += "*" if not pattern.endswith("*") else ""
        else:
            # A query has no escapes: a quote, a star or an invisible character is written as "any character".
            pattern += "".join(char if char not in "\"'*" and all_printable(char) else "?" for char in part)
        if len(pattern) > _PATTERN_CHARS or pattern.count("*") == MAX_STARS - 1:
            return f"{pattern[:_PATTERN_CHARS].rstrip('*')}*"
    return pattern


def grouped(store: Reading, query: Query) -> tuple[list[ErrorGroup], int]:
    """The groups, the most frequent first; and how many runs have other errors than these."""
    groups: dict[tuple[str, ...], ErrorGroup] = {}
    others = 0
    for row, failure in _wrong(store, query):
        kind = failure.type if failure is not None else row.attention or row.status
        error = row.error or row.waiting_for or row.status
        told = failure.message if failure is not None else error
        where = places(failure)
        key = (row.status, kind, normalised(told), where[-1] if where else "")
        group = groups.get(key)
        if group is not None:
            group.runs += 1
            group.first_seen, group.last_seen = min(group.first_seen, row.updated_at), max(group.last_seen, row.updated_at)
        elif len(groups) == MAX_GROUPS:
            others += 1
        else:
            tool = _TOOL.match(told)
            groups[key] = ErrorGroup(
                fingerprint=hashlib.sha256("\0".join(key).encode("utf-8", "replace")).hexdigest()[:12],
                status=row.status,
                type=kind,
                tool=None if tool is None else tool[1] or tool[2],
                message=clip(key[2], _SHOWN_CHARS),
                place=where[-1] if where else None,
                where=f"status:{row.status} {Term('error', values=(pattern_of(row.error),))}" if row.error else f"status:{row.status}",
                runs=1,
                first_seen=row.updated_at,
                last_seen=row.updated_at,
                example=row.run_id,
            )
    return sorted(groups.values(), key=lambda one: (-one.runs, -one.last_seen, one.fingerprint)), others


def _wrong(store: Reading, query: Query) -> Iterator[tuple[RunRow, Failure | None]]:
    """The runs that match, newest first, each with its failure. A run that needs attention has none."""
    rows = (row for row in all_rows(store, query) if row.specimen is None)
    while page := list(islice(rows, _AT_ONCE)):
        current = store.current([row.run_id for row in page if row.status == "failed"])
        yield from ((row, current[row.run_id].failure if row.run_id in current else None) for row in page)


@click.command("errors")
@common.where_option("Only runs that match all terms of the query:")
@click.option("--limit", type=click.IntRange(min=1, max=MAX_GROUPS), default=20, show_default=True, metavar="N", help="At most N errors.")
@common.url_option
@common.json_option
def command(where: str | None, limit: int, url: str | None, as_json: bool) -> None:
    """The runs that failed or need attention, grouped by their error, the most frequent error first."""
    with common.existing_runs(url) as store:
        now = common.now_at(store)
        query = EVERYTHING if where is None else parse_query(where, now)
        if query.has("status") and (fine := [status for status in query.statuses if status not in WRONG]):
            raise InvalidInput(
                f"--where: runs that are {fine[0]} have no error to group; give status:failed, status:needs_attention, or no status"
            )
        groups, others = grouped(store, query if query.has("status") else query.within(status=WRONG))
    given = "" if where is None else " ".join(str(term) for term in query.terms if term.key != "status")
    options = common.url_words(url)
    for group in groups[:limit]:
        group.where = f"{given} {group.where}".strip()
        if as_json:
            common.out_json(_record(group, options))
        else:
            _print(group, now, options)
    if as_json:
        return
    if not groups:
        common.note("no run has failed or needs attention" if where is None else "no runs that match")
    left = len(groups) - limit
    if left > 0 or others:
        more = [f"{plural(left, 'more error')}: --limit {len(groups)}"] if left > 0 else []
        common.note("; ".join([*more, *([f"{plural(others, 'run')} with other errors: narrow it with --where"] if others else [])]))


def _commands(group: ErrorGroup, options: str) -> list[str]:
    found = [f"{shell.command('why', group.example)}{options}"]
    if group.status == "failed":
        return [*found, f"perdure retry --where {shell.quote(group.where)} --dry-run{options}"]
    return [*found, f"perdure list --where {shell.quote(group.where)}{options}"]


def _print(group: ErrorGroup, now: int, options: str) -> None:
    tool = f" in tool {group.tool}" if group.tool else ""
    words = f"{plural(group.runs, 'run')}  {group.status.replace('_', ' ')}: {group.type}{tool}"
    common.out(common.style(common.clean(words), common.STATUS_COLOURS.get(group.status), bold=True))
    common.out(common.clean(f"    {group.message}"))
    if group.place is not None:
        common.out(common.clean(f"    at {group.place}"))
    first = "" if group.runs == 1 else f"first {span(max(now - group.first_seen, 0))} ago, "
    common.out(common.clean(f"    {first}last {span(max(now - group.last_seen, 0))} ago"))
    for line in _commands(group, options):
        common.out(common.clean(f"    {line}"))
    common.out()


def _record(group: ErrorGroup, options: str) -> dict[str, Any]:
    return {
        "fingerprint": group.fingerprint,
        "status": group.status,
        "type": group.type,
        "tool": group.tool,
        "message": group.message,
        "place": group.place,
        "runs": group.runs,
        "first_seen": common.iso(group.first_seen),
        "last_seen": common.iso(group.last_seen),
        "example": group.example,
        "where": group.where,
        "commands": _commands(group, options),
    }
