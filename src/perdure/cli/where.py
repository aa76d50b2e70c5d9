"""A query over runs, as people type it after `--where`: status:failed agent:support error:*503*.

All terms must match. The store selects by the fields of its Filter. The other terms are compared row by row, while the
rows are read page by page. So a query over very many runs needs little memory.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from typing import Any, TypeVar, get_args

import click
from msgspec import Struct

from perdure.cli.times import parse_past
from perdure.engine.api import Reading
from perdure.errors import InvalidInput
from perdure.inspect.view import all_rows
from perdure.store.api import Filter, RunRow, Status

KEYS = {
    "status": "failed, or several: failed,cancelled",
    "agent": "the name of the agent",
    "version": "the version of the agent's code",
    "tenant": "the tenant",
    "queue": "the queue",
    "error": "a part of the error, or a pattern of the whole error with * and ?",
    "id": "the id of the run, or a pattern with * and ?",
    "since": "the last event is not older than 2h, 7d, or an ISO time",
    "until": "the last event is older than that",
    "parent": "the id of the parent, or none",
}
_REPEATABLE = ("error", "id")
_STATUSES: tuple[str, ...] = get_args(Status)
_TERM = re.compile(r"""\s*(?:([^\s:"']+):)?(?:"([^"]*)"|'([^']*)'|([^\s"']+))(?=\s|\Z)""")
_WILD = re.compile(r"[*?\[]")


F = TypeVar("F", bound=Callable[..., Any])


def where_option(words: str) -> Callable[[F], F]:
    """The option `--where QUERY`. The parameter is `where: str | None`; pass it to `parse_query`."""
    return click.option("--where", metavar="QUERY", help=f"{words} KEY:VALUE …; the keys: {', '.join(KEYS)}.")


class Query(Struct, frozen=True):
    """The terms of a query. An empty field selects all runs."""

    statuses: tuple[str, ...] = ()
    agent: str | None = None
    version: str | None = None
    tenant: str | None = None
    queue: str | None = None
    errors: tuple[str, ...] = ()
    ids: tuple[str, ...] = ()
    since: int | None = None
    until: int | None = None
    parent: str | None = None  # "none": only runs without a parent

    @property
    def filter(self) -> Filter:
        """The part of the query that the store selects.

        No run is created after its last event, so `until` bounds both times.
        """
        return Filter(self.statuses[0] if len(self.statuses) == 1 else None, self.agent, self.tenant, before=self.until)

    def matches(self, row: RunRow) -> bool:
        """Does this run match all terms? The terms that the store selects are compared too."""
        return (
            (not self.statuses or row.status in self.statuses)
            and self.agent in (None, row.agent)
            and self.version in (None, row.version)
            and self.tenant in (None, row.tenant)
            and self.queue in (None, row.queue)
            and (self.since is None or row.updated_at >= self.since)
            and (self.until is None or row.updated_at < self.until)
            and (self.parent is None or self.parent == (row.parent or "none"))
            and all(_is_like(row.run_id, pattern) for pattern in self.ids)
            and all(_is_in(row.error or "", pattern) for pattern in self.errors)
        )

    def rows(self, store: Reading) -> Iterator[RunRow]:
        """The runs that match, newest first, read page by page."""
        return (row for row in all_rows(store, self.filter) if self.matches(row))


def parse_query(text: str, now: int) -> Query:
    """Parse a query. InvalidInput names the known keys if a key or a value is unknown."""
    found: dict[str, list[str]] = {}
    place = 0
    while text[place:].strip():
        term = _TERM.match(text, place)
        if term is None:
            raise InvalidInput(f"--where: {text[place:].strip()!r:.60} has a quote that is not closed, or text right after one; {_help()}")
        key, place = term[1], term.end()
        value = next(part for part in term.groups()[1:] if part is not None)
        if key is None:
            raise InvalidInput(f"--where: {value!r:.60} is not KEY:VALUE; {_help()}")
        if key not in KEYS:
            raise InvalidInput(f"--where: there is no key {key!r:.60}; {_help()}")
        if not value:
            raise InvalidInput(f"--where: {key}: needs a value: {KEYS[key]}")
        if key in found and key not in _REPEATABLE:
            several = f"; for either of them: status:{found[key][0]},{value}" if key == "status" else ""
            raise InvalidInput(f"--where: {key} is there twice, and a run has only one{several}")
        found.setdefault(key, []).append(value)
    if not found:
        raise InvalidInput(f"--where: there is no term in it; {_help()}")
    one = {key: values[0] for key, values in found.items()}
    return Query(
        statuses=_statuses(one["status"]) if "status" in one else (),
        agent=one.get("agent"),
        version=one.get("version"),
        tenant=one.get("tenant"),
        queue=one.get("queue"),
        errors=tuple(found.get("error", ())),
        ids=tuple(found.get("id", ())),
        since=parse_past(one["since"], now, "--where since:") if "since" in one else None,
        until=parse_past(one["until"], now, "--where until:") if "until" in one else None,
        parent=one.get("parent"),
    )


def _statuses(text: str) -> tuple[str, ...]:
    wanted = tuple(dict.fromkeys(text.split(",")))
    unknown = [one for one in wanted if one not in _STATUSES]
    if unknown:
        raise InvalidInput(f"--where: there is no status {unknown[0]!r:.60}; a status is one of: {', '.join(_STATUSES)}")
    return wanted


def _is_like(text: str, pattern: str) -> bool:
    return fnmatchcase(text, pattern) if _WILD.search(pattern) else text == pattern


def _is_in(text: str, pattern: str) -> bool:
    """Is the pattern in the text? Upper and lower case are the same, because providers write errors in many ways."""
    text, pattern = text.casefold(), pattern.casefold()
    return fnmatchcase(text, pattern) if _WILD.search(pattern) else pattern in text


def _help() -> str:
    return f"write KEY:VALUE, in quotes if the value has blanks; the keys: {', '.join(KEYS)}"
