"""Finds runs: compiles a query to SQL, and reads the runs page by page.

The SQL is put together from the fixed texts in this file and in `Words`; values are bound as parameters, never written
into the text. Each statement reads its runs in the order of one index (its driver), so that the first page costs no
more than the runs that are looked at for it. PostgreSQL knows how the values are distributed and may take another index.
SQLite does not know it: so this module looks first whether a term has few runs, and a `+` before the columns of the
other terms keeps SQLite from their indexes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from perdure.core.query import EVERYTHING, GROUPS, STATUSES, Query, Term
from perdure.errors import InvalidInput
from perdure.store.api import RunRow
from perdure.store.costs import Costs
from perdure.store.cursor import RUN_COLUMNS, Row, Words
from perdure.store.labels import Labels
from perdure.store.rows import key_of, listed_row

COST_PAGE = 500  # how many runs are read at a time if their costs have to be summed
FEW = 20_000  # a term with so many runs or fewer drives, and the runs of an id pattern are sorted in memory
_COLUMNS = ", ".join(f"r.{name}" for name in RUN_COLUMNS.split(", "))
_OLDEST, _NEWEST = "ASC", "DESC"
_CURSOR = re.compile(r"([no])([0-9a-f]{1,16})\.([0-9a-f]{1,16})\Z")
_TEXT_COLUMNS = {
    "agent": "agent",
    "version": "version",
    "tenant": "tenant",
    "queue": "queue",
    "id": "run_id",
    "error": "error",
    "attention": "attention",
}
_NUMBER_COLUMNS = {"created": "created_at", "updated": "updated_at"}
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_FOLD = str.maketrans(_LETTERS.upper(), _LETTERS)
_GROUPED = {name: f"r.{name}" for name in GROUPS}


class _Statement:
    """One statement while it is put together: its text, and its bound parameters."""

    def __init__(self, words: Words) -> None:
        self.words = words
        self.params: dict[str, Any] = {}

    def bind(self, value: str | int) -> str:
        name = f"p_{_LETTERS[len(self.params) % 26]}{'_' * (len(self.params) // 26)}"
        self.params[name] = value
        return f":{name}"

    # -- the conditions of one term -----------------------------------------------------------------------------------
    def condition(self, term: Term, *, driven: bool = False) -> str:
        plus = "" if driven else self.words.undriven
        match term.key:
            case "created" | "updated":
                return f"{plus}r.{_NUMBER_COLUMNS[term.key]} {term.compare} {self.bind(term.number)}"
            case "label":
                matches = f"EXISTS (SELECT 1 FROM perdure_labels AS x WHERE x.run = r.id AND {self._label('x', term)})"
            case "parent":
                parent = "NULL" if term.values == ("none",) else self.bind(term.values[0])
                return f"{plus}r.parent IS {'' if term.negated else 'NOT '}DISTINCT FROM {parent}"
            case "error":
                pattern = term.values[0] if term.compare == "like" else f"*{term.values[0]}*"
                like = self.words.like_folded.format(column="r.error", value=self.bind(self.words.pattern(pattern.translate(_FOLD))))
                return f"(r.error IS NULL OR NOT {like})" if term.negated else f"r.error IS NOT NULL AND {like}"
            case "attention":
                return f"{plus}r.attention IS {'' if term.negated else 'NOT '}DISTINCT FROM {self.bind(term.values[0])}"
            case _:
                matches = self._text(f"{plus}r.{_TEXT_COLUMNS[term.key]}", term)
        return f"NOT ({matches})" if term.negated else matches

    def _text(self, column: str, term: Term) -> str:
        if term.compare == "like":
            return self.words.like.format(column=column, value=self.bind(self.words.pattern(term.values[0])))
        return f"{column} = {self.bind(term.values[0])}"

    def _label(self, alias: str, term: Term) -> str:
        return f"{alias}.key = {self.bind(term.label)} AND {self._text(f'{alias}.value', term)}"

    def statuses(self, wanted: Iterable[str]) -> str:
        # A fixed text for each of the known statuses: SQLite uses an index of some statuses only if the text names them.
        return f"{self.words.undriven}r.status IN ({', '.join(_LITERALS[one] for one in wanted)})"

    # -- one SELECT ---------------------------------------------------------------------------------------------------
    def where(self, query: Query, wanted: Sequence[str], rare: Term | None) -> tuple[str, str, str]:
        """FROM, WHERE, and the alias whose created_at gives the order. `rare`: this term has few runs, and drives."""
        source, ordered, conditions = "perdure_runs AS r", "r", []
        terms = [term for term in query.terms if term.key not in ("status", "cost")]
        driver = rare or next((term for key in ("id", "parent", "label") for term in terms if term.key == key and _drives(term)), None)
        status = wanted[0] if driver is None and len(wanted) == 1 and wanted[0] != "succeeded" else None
        if driver is None and status is None:
            keys = ("error", "tenant", "queue", "agent")
            driver = next((term for key in keys for term in terms if term.key == key and _drives(term)), None)
        for term in terms:
            if term is not driver:
                conditions.append(
                    self.condition(term, driven=term.key == "created" and (driver is None or driver.key not in ("id", "parent")))
                )
            elif term.key == "label":
                source = "perdure_labels AS l CROSS JOIN perdure_runs AS r"
                ordered = "l"
                conditions.append(f"r.id = l.run AND {self._label('l', term)}")
            elif term.key == "parent":
                # The id of a child is the id of its parent, a slash and a number; '0' is the character after '/'.
                parent = self.bind(term.values[0])
                conditions.append(f"r.run_id > {parent} || '/' AND r.run_id < {parent} || '0' AND r.parent = {parent}")
            elif term.key == "id" and term.compare == "like":
                conditions.append(f"{self._id_range(term)} AND {self.condition(term)}")
            elif term.key in ("tenant", "queue"):
                conditions.append(f"r.{term.key} <> 'default' AND {self.condition(term, driven=True)}")
            else:
                conditions.append(self.condition(term, driven=True))
        if status is not None:
            conditions.append(f"r.status = {_LITERALS[status]} AND r.status <> 'succeeded'")
        elif len(wanted) < len(STATUSES):
            conditions.append(self.statuses(wanted))
        latest = min((term.number for term in terms if term.key == "updated" and term.compare == "<"), default=None)
        if latest is not None:
            conditions.append(f"{ordered}.created_at < {self.bind(latest)}")  # no run is created after its last event
        return source, " AND ".join(conditions) or "1 = 1", ordered

    def _id_range(self, term: Term) -> str:
        first = re.split(r"[*?]", term.values[0], maxsplit=1)[0]
        return f"r.run_id >= {self.bind(first)} AND r.run_id < {self.bind(first[:-1] + chr(ord(first[-1]) + 1))}"

    def few(self, term: Term) -> str:
        """How many runs the term has, counted up to one more than FEW."""
        if term.key == "label":
            of = f"perdure_labels AS l WHERE {self._label('l', term)}"
        elif term.key == "id":
            of = f"perdure_runs AS r WHERE {self._id_range(term)}"
        else:
            beside = "" if term.key == "agent" else f"r.{term.key} <> 'default' AND "
            of = f"perdure_runs AS r WHERE {beside}{self.condition(term, driven=True)}"
        return f"SELECT count(*) FROM (SELECT 1 FROM {of} LIMIT {self.bind(FEW + 1)}) AS few"

    def select(self, query: Query, limit: int, after: tuple[int, int] | None, order: str, rare: Term | None) -> str:
        wanted = query.statuses
        # The runs of several statuses are read from the index of statuses one after the other, and merged.
        other = rare is not None or any(_drives(term) for term in query.terms if term.key in ("label", "parent", "id", "error"))
        separate = "succeeded" not in wanted and not other
        branches = [(status,) for status in wanted] if separate else [wanted]
        most = self.bind(limit)
        selects = [self._branch(query, branch, most, after, order, rare) for branch in branches if branch]
        if len(selects) == 1:
            return selects[0]
        merged = " UNION ALL ".join(f"SELECT * FROM ({one}) AS b{number}" for number, one in enumerate(selects))
        return f"{merged} ORDER BY created_at {order}, id {order} LIMIT {most}" if selects else ""

    def _branch(self, query: Query, wanted: Sequence[str], most: str, after: tuple[int, int] | None, order: str, rare: Term | None) -> str:
        source, conditions, by = self.where(query, wanted, rare)
        key = "l.run" if by == "l" else "r.id"
        beyond = ""
        if after is not None:
            beyond = f" AND ({by}.created_at, {key}) {'>' if order == _OLDEST else '<'} ({self.bind(after[0])}, {self.bind(after[1])})"
        return f"SELECT {_COLUMNS} FROM {source} WHERE {conditions}{beyond} ORDER BY {by}.created_at {order}, {key} {order} LIMIT {most}"


_LITERALS = {status: f"'{status}'" for status in STATUSES}


def _drives(term: Term) -> bool:
    """Can the runs of this term be read in their order from an index, without looking how many they are?"""
    if term.negated:
        return False
    match term.key:
        case "label" | "id":
            return term.compare == "="
        case "parent":
            return term.values != ("none",)
        case "tenant" | "queue":
            return term.values != ("default",)  # most runs have it, and the index does not have these runs
        case "error" | "agent":
            return True
        case _:
            return False


def _is_range(term: Term) -> bool:
    """Is this an id pattern that begins with some characters, so that its runs are a range of the index of ids?"""
    if term.key != "id" or term.compare != "like" or term.negated:
        return False
    first = re.split(r"[*?]", term.values[0], maxsplit=1)[0]
    return bool(first) and ord(first[-1]) < 0xD7FF


def cursor_of(row: Row, *, oldest_first: bool) -> str:
    """Where the next page begins, after this row."""
    return f"{'o' if oldest_first else 'n'}{row[_CREATED_AT]:x}.{key_of(row):x}"


def _place(cursor: str, *, oldest_first: bool) -> tuple[int, int]:
    found = _CURSOR.match(cursor) if isinstance(cursor, str) else None
    if found is None:
        raise InvalidInput(f"{cursor!r:.60} is not the cursor of a page: take it as the page before has it")
    if (found[1] == "o") != oldest_first:
        raise InvalidInput("the cursor is of a list in the other direction: keep the order from page to page")
    return int(found[2], 16) & _MOST, int(found[3], 16) & _MOST


_MOST = (1 << 63) - 1
_CREATED_AT = RunRow.__struct_fields__.index("created_at")


class Finding(Labels, Costs):
    """Lists and counts the runs that match a query."""

    def find(self, query: Query, limit: int = 100, after: str | None = None, *, oldest_first: bool = False) -> list[tuple[str, RunRow]]:
        rows = self._found(query, limit, after, oldest_first)
        return [(cursor_of(row, oldest_first=oldest_first), listed_row(row)) for row in rows]

    def _found(self, query: Query, limit: int, after: str | None, oldest_first: bool) -> list[Row]:
        place = None if after is None else _place(after, oldest_first=oldest_first)
        costs = [term for term in query.terms if term.key == "cost"]
        if not costs:
            return self._page(query, limit, place, oldest_first)
        found: list[Row] = []
        for row, usd_micros in self._with_costs(query, place, oldest_first):
            if all(_compare(usd_micros, term) for term in costs):
                found.append(row)
                if len(found) == limit:
                    break
        return found

    def _with_costs(self, query: Query, place: tuple[int, int] | None, oldest_first: bool) -> Iterator[tuple[Row, int]]:
        """The runs that match all terms but those of cost, and what each run itself has cost."""
        while True:
            page = self._page(query, COST_PAGE, place, oldest_first)
            costs = self.cost_of_runs([key_of(row) for row in page])
            yield from ((row, costs.get(key_of(row), 0)) for row in page)
            if len(page) < COST_PAGE:
                return
            place = page[-1][_CREATED_AT], key_of(page[-1])

    def _page(self, query: Query, limit: int, place: tuple[int, int] | None, oldest_first: bool) -> list[Row]:
        rare = self._rare(query)
        since = max((term.number for term in query.terms if term.key == "updated" and term.compare == ">="), default=None)
        if since is not None and not oldest_first:
            # All runs that were created since then match, and come first. Only if they do not fill the page, all older
            # runs have to be looked at: no index has the time of the last event, since every append would change it.
            recent = self._select(Query((*query.terms, Term("created", ">=", number=since))), limit, place, _NEWEST, rare)
            if len(recent) == limit:
                return recent
        return self._select(query, limit, place, _OLDEST if oldest_first else _NEWEST, rare)

    def _select(self, query: Query, limit: int, place: tuple[int, int] | None, order: str, rare: Term | None) -> list[Row]:
        statement = _Statement(self._database.words)
        sql = statement.select(query, limit, place, order, rare)
        # The runs of an id pattern, and of a parent, are few: they are sorted.
        sorts = any(term.key in ("id", "parent") and (term is rare or _drives(term)) for term in query.terms)
        return self._database.select(sql, statement.params, in_order=not sorts) if sql else []

    def _rare(self, query: Query) -> Term | None:
        """A term that only few runs have, if that has to be looked up."""
        ranges = [term for term in query.terms if _is_range(term)]
        indexed = [term for term in query.terms if term.key in ("label", "agent", "tenant", "queue") and _drives(term)]
        if self._database.words.undriven and len(indexed) + query.has("status") + query.has("error") > 1:
            ranges += indexed  # several terms could drive, and the database does not know which of them has few runs
        for term in ranges:
            statement = _Statement(self._database.words)
            ((number,),) = self._database.select(statement.few(term), statement.params)
            if number <= FEW:
                return term
        return None

    def count(self, query: Query, by: str = "status", limit: int = 1000) -> dict[str | None, int]:
        costs = [term for term in query.terms if term.key == "cost"]
        if costs:
            return self._count_one_by_one(query, by, limit)
        statement = _Statement(self._database.words)
        wanted = query.statuses
        if not wanted:
            return {}
        source, conditions, _ = statement.where(query, wanted, next(filter(_is_range, query.terms), None))
        group, join = self._group(statement, by)
        sql = (
            f"SELECT {group}, count(*) FROM {source}{join} WHERE {conditions} AND r.specimen IS NULL GROUP BY {group} "
            f"ORDER BY count(*) DESC, {group} LIMIT {statement.bind(limit)}"
        )
        return {group: int(number) for group, number in self._database.select(sql, statement.params)}

    def _group(self, statement: _Statement, by: str) -> tuple[str, str]:
        if by in _GROUPED:
            return _GROUPED[by], ""
        return "g.value", f" LEFT JOIN perdure_labels AS g ON g.run = r.id AND g.key = {statement.bind(by.removeprefix('label.'))}"

    def _count_one_by_one(self, query: Query, by: str, limit: int) -> dict[str | None, int]:
        costs = [term for term in query.terms if term.key == "cost"]
        found: dict[str | None, int] = {}
        for row, usd_micros in self._with_costs(query, None, False):
            run = listed_row(row)
            if run.specimen is None and all(_compare(usd_micros, term) for term in costs):
                group = getattr(run, by) if by in _GROUPED else self.labels([run.run_id])[run.run_id].get(by.removeprefix("label."))
                found[group] = found.get(group, 0) + 1
        return dict(sorted(found.items(), key=lambda one: (-one[1], one[0] or ""))[:limit])

    # `list` comes last: below it, the name `list` would mean this method and not the type.
    def list(self, query: Query = EVERYTHING, limit: int = 100) -> list[RunRow]:
        return [row for _, row in self.find(query, limit)]


def _compare(number: int, term: Term) -> bool:
    match term.compare:
        case ">":
            return number > term.number
        case ">=":
            return number >= term.number
        case "<":
            return number < term.number
        case _:
            return number <= term.number
