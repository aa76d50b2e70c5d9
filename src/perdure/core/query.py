"""Queries over runs: `status:failed agent:support -label.tier:free error:*503* since:2d`. All terms must match.

This is the one query language: of `perdure list`, of the verbs that act on many runs, and of `app.list(where=…)`. A query
is parsed once, into terms. The store compiles the terms to SQL (store/finding.py).
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation
from typing import Literal, get_args

from msgspec import Struct

from perdure.core.events import Reason, Status
from perdure.core.invisible import all_printable, escaped
from perdure.core.labels import MAX_KEY_CHARS, is_label_key
from perdure.core.state import FINISHED
from perdure.core.times import LATEST_US, iso, length_us, micros_of
from perdure.errors import InvalidInput, InvalidQuery

KEYS = {
    "status": "failed, or several: failed,cancelled",
    "agent": "the name of the agent",
    "version": "the version of the agent's code",
    "tenant": "the tenant",
    "queue": "the queue",
    "id": "the id of the run, or a pattern with * and ?",
    "parent": "the id of the parent, or none",
    "label.KEY": "the value of that label, or a pattern with * and ?",
    "attention": "why the run needs attention: in_doubt, budget, diverged, error, poison, stuck, circling, restored",
    "error": "a part of the error, or a pattern of the whole error with * and ?",
    "cost": ">0.5 or <=2: what the run itself has cost, in dollars",
    "created": ">2d or <=2026-01-31: created after or before that time",
    "since": "the last event is not older than 2h, 7d, or an ISO time",
    "until": "the last event is older than that",
}
STATUSES: tuple[str, ...] = get_args(Status)
REASONS: tuple[str, ...] = get_args(Reason)
Comparison = Literal["=", "like", ">", ">=", "<", "<="]
MAX_QUERY_CHARS = 4000
MAX_STARS = 8  # databases need exponential time for a pattern with very many stars
_ONE_EACH = ("status", "agent", "version", "tenant", "queue", "parent", "attention")  # a run has only one
_WORD = re.compile(r"""(-?)(?:([^\s:"']+):)?(?:"([^"]*)"|'([^']*)'|([^\s"']+))(?=\s|\Z)""")
_WILD = re.compile(r"[*?]")
_COMPARED = re.compile(r"(>=|<=|>|<)(.+)\Z", re.DOTALL)
_OPPOSITE: dict[str, Comparison] = {">": "<=", ">=": "<", "<": ">=", "<=": ">"}
_MOST_USD = Decimal(10**12)


class Term(Struct, frozen=True, gc=False):
    """One condition. A term of cost, created or updated compares a number; the other terms compare texts."""

    key: str  # a column of a run, or: id, label, cost
    compare: Comparison = "="
    values: tuple[str, ...] = ()  # of "=" and "like": one of these; only `status` has several
    number: int = 0  # micro-dollars, or microseconds since 1970
    negated: bool = False
    label: str = ""  # the key of the label

    def __str__(self) -> str:
        if self.key == "cost":
            return f"cost:{self.compare}{Decimal(self.number).scaleb(-6):f}"
        if self.key == "created":
            return f"created:{self.compare}{iso(self.number)}"
        if self.key == "updated":
            return f"{'since' if self.compare == '>=' else 'until'}:{iso(self.number)}"
        name = f"label.{self.label}" if self.key == "label" else self.key
        return f"{'-' if self.negated else ''}{name}:{_quoted(','.join(self.values))}"


class Query(Struct, frozen=True, gc=False):
    """Terms that must all match. No terms: all runs."""

    terms: tuple[Term, ...] = ()

    def __str__(self) -> str:
        """The query as text. Parsed again, it is the same query; times are absolute then."""
        return " ".join(map(str, self.terms))

    def also(self, **fields: str | None) -> Query:
        """This query with a further term for each field that is given, such as `tenant="acme"`. It can only get narrower."""
        more = tuple(Term(key, values=(value,)) for key, value in fields.items() if value is not None)
        return Query((*self.terms, *more)) if more else self

    def within(self, **texts: tuple[str, ...]) -> Query:
        """Like `also`, with several values of which one must match: `status=("failed", "cancelled")`."""
        return Query((*self.terms, *(Term(key, values=values) for key, values in texts.items())))

    @property
    def statuses(self) -> tuple[str, ...]:
        """The statuses that the terms of status leave: all of them, if there is no such term."""
        terms = [term for term in self.terms if term.key == "status"]
        return tuple(status for status in STATUSES if all((status in term.values) != term.negated for term in terms))

    def has(self, key: str) -> bool:
        return any(term.key == key for term in self.terms)


EVERYTHING = Query()
UNFINISHED = tuple(status for status in STATUSES if status not in FINISHED)
GROUPS = ("status", "agent", "version", "tenant", "queue", "error")  # and label.KEY


def checked_group(by: str, what: str) -> str:
    """By what runs are counted. InvalidInput if there is no such group."""
    if not isinstance(by, str) or not (by in GROUPS or (by.startswith("label.") and is_label_key(by.removeprefix("label.")))):
        raise InvalidInput(f"{what} {by!r:.60}: runs are counted by {', '.join(GROUPS)} or label.KEY")
    return by


def parse_query(text: str, now: int, what: str = "--where") -> Query:
    """Parse a query. InvalidQuery points at the character that is wrong, and names the known keys.

    `now` is the time from which lengths such as 2d count. `what` is the name of the option or argument.
    """
    return _Parser(text, now, what).query()


class _Parser:
    def __init__(self, text: str, now: int, what: str) -> None:
        if not isinstance(text, str):
            raise InvalidQuery(f"{what}: a text such as 'status:failed agent:support', not {type(text).__name__}")
        self._text, self._now, self._what = text, now, what

    def query(self) -> Query:
        text = self._text
        if len(text) > MAX_QUERY_CHARS:
            raise self._wrong(MAX_QUERY_CHARS, f"the query is longer than {MAX_QUERY_CHARS:,} characters")
        unseen = next((place for place, char in enumerate(text) if not all_printable(char)), None)
        if unseen is not None:
            raise self._wrong(unseen, "a character that cannot be seen; blanks separate the terms")
        terms: list[Term] = []
        place = 0
        while True:
            place += len(text[place:]) - len(text[place:].lstrip(" "))
            if place == len(text):
                break
            word = _WORD.match(text, place)
            if word is None:
                raise self._wrong(place, "a quote that is not closed, or text right after one")
            terms.append(self._term(word, terms))
            place = word.end()
        if not terms:
            raise self._wrong(0, f"there is no term in it; {_help()}")
        return Query(tuple(terms))

    def _term(self, word: re.Match[str], before: list[Term]) -> Term:
        negated, key = bool(word[1]), word[2]
        group = next(number for number in (3, 4, 5) if word[number] is not None)
        value, at, key_at = word[group], word.start(group), word.end(1)
        if key is None:
            raise self._wrong(word.start(), f"{word[0]!r:.60} is not KEY:VALUE; {_help()}")
        if key.startswith("label."):
            name = key.removeprefix("label.")
            if not is_label_key(name):
                raise self._wrong(key_at, f"{name!r:.60} cannot be the key of a label: up to {MAX_KEY_CHARS} letters, digits and _ - .")
            if not value:
                raise self._wrong(at, f"{key:.60}: needs a value: {KEYS['label.KEY']}")
            return Term("label", self._pattern(value, at), (value,), negated=negated, label=name)
        if key not in KEYS or key == "label.KEY":
            raise self._wrong(key_at, f"there is no key {key!r:.60}; {_help()}")
        if not value:
            raise self._wrong(at, f"{key}: needs a value: {KEYS[key]}")
        if key in ("cost", "created", "since", "until"):
            return self._compared(key, value, at, negated)
        if key in _ONE_EACH and not negated and (twice := next((one for one in before if one.key == key and not one.negated), None)):
            several = f"; for either of them: status:{','.join(twice.values)},{value}" if key == "status" else ""
            raise self._wrong(key_at, f"{key} is there twice, and a run has only one{several}")
        if key == "attention" and value not in REASONS:
            raise self._wrong(at, f"attention: {value!r:.60} is none of {', '.join(REASONS)}")
        if key == "status":
            return Term(key, values=self._statuses(value, at), negated=negated)
        return Term(key, self._pattern(value, at) if key in ("id", "error") else "=", (value,), negated=negated)

    def _statuses(self, text: str, at: int) -> tuple[str, ...]:
        for one in (wanted := text.split(",")):
            if one not in STATUSES:
                raise self._wrong(at, f"there is no status {one!r:.60}; a status is one of: {', '.join(STATUSES)}")
            at += len(one) + 1
        return tuple(dict.fromkeys(wanted))

    def _pattern(self, value: str, at: int) -> Comparison:
        if value.count("*") > MAX_STARS:
            raise self._wrong(at, f"a pattern with more than {MAX_STARS} stars")
        return "like" if _WILD.search(value) else "="

    def _compared(self, key: str, value: str, at: int, negated: bool) -> Term:
        compare: Comparison
        if key in ("since", "until"):
            compare, number, key = (">=" if key == "since" else "<"), self._time(value, at, key), "updated"
        else:
            found = _COMPARED.match(value)
            if found is None:
                raise self._wrong(at, f"{key}: needs > or <: {KEYS[key]}")
            compare = found[1]  # type: ignore[assignment]
            inner = at + found.start(2)
            number = self._dollars(found[2], inner) if key == "cost" else self._time(found[2], inner, key)
        return Term(key, _OPPOSITE[compare] if negated else compare, number=number)

    def _dollars(self, text: str, at: int) -> int:
        try:
            usd = Decimal(text.removeprefix("$"))
        except InvalidOperation:
            usd = Decimal("NaN")
        if not usd.is_finite() or not 0 <= usd <= _MOST_USD or usd != usd.quantize(Decimal("0.000001")):
            raise self._wrong(at, f"{text!r:.60} is no amount of dollars, such as 0.25")
        return int(usd.scaleb(6))

    def _time(self, text: str, at: int, key: str) -> int:
        length = length_us(text)
        if length is not None:
            return max(0, self._now - length)
        try:
            moment = datetime.fromisoformat(text)
            micros = micros_of(moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC))
        except (ValueError, OverflowError):
            raise self._wrong(
                at, f"{key}: {text!r:.60} is not a time; write 15m, 2h, 1d, or an ISO time such as 2026-01-31T14:00Z"
            ) from None
        return min(max(0, micros), LATEST_US)

    def _wrong(self, place: int, why: str) -> InvalidQuery:
        # Long queries are shown around the place that is wrong.
        first = max(0, place - 60)
        before, after = escaped(self._text[first:place]), escaped(self._text[place : first + 110])
        more = "…" if first else ""
        return InvalidQuery(f"{self._what}: {why}", query=f"{more}{before}{after}", caret=len(more) + len(before))


def _quoted(value: str) -> str:
    if '"' in value:
        return f"'{value}'"
    return f'"{value}"' if not value or re.search(r"[\s']", value) else value


def _help() -> str:
    return f"write KEY:VALUE, in quotes if the value has blanks, with a - before it for runs that do not match; the keys: {', '.join(KEYS)}"
