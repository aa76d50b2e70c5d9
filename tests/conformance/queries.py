"""Rows and queries for the tests of queries, and the meaning of a query in the plainest way."""

from __future__ import annotations

import random
import re
import string
from functools import cache
from typing import Any

from hypothesis import strategies as st

from perdure.core.query import STATUSES, Query, Term
from perdure.inspect.specimen import columns
from perdure.store.api import RunRow, Store, Whole

NOW = 1_700_000_000_000_000  # as in suite.py
HOUR = 3_600_000_000
NAMES = ("a", "A", "b_c", "default", "none")
ERRORS = ("HTTP 503", "Http 503: [x] 100% a_b", "timeout \\ of `x`", "ÄÖ ä", "x*y?z", "a]b[c", "")
IDS = ("run-1", "run_1", "order-7", "o%", "run-22")


@cache
def rows_and_labels(number: int = 150) -> list[tuple[RunRow, dict[str, str]]]:
    """Rows as no agent makes them, always the same: every column varies by itself, and many have the same time."""
    chance = random.Random(7)
    found = []
    for n in range(number):
        parent = f"run-{chance.randrange(5)}" if chance.random() < 0.2 else None
        created = NOW - chance.randrange(6) * HOUR
        row = RunRow(
            run_id=f"{parent}/{n}" if parent else f"{chance.choice(IDS)}{chance.choice(('', '-x', '.Y'))}{n}",
            agent=chance.choice(NAMES),
            version=chance.choice(("1", "2", "")),
            tenant=chance.choice(NAMES),
            actor=None,
            queue=chance.choice(NAMES),
            target=None,
            input_digest="",
            status=chance.choice(STATUSES),  # type: ignore[arg-type]
            waiting_for=None,
            ready_at=None,
            seq=1,
            head=bytes(32),
            epoch=0,
            holder=None,
            crashes=0,
            error=chance.choice(ERRORS) if chance.random() < 0.6 else None,
            created_at=created,
            updated_at=created + chance.randrange(3) * HOUR,
            parent=parent,
        )
        labels = {key: chance.choice(("c-1", "c-2", "C-1", "a*b", "a%b", "[x]")) for key in ("customer", "x.y-z") if chance.random() < 0.6}
        found.append((row, labels))
    return found


def fill(store: Store) -> None:
    store.take_in(lambda: [[_whole(row, labels) for row, labels in rows_and_labels()]])


def _whole(row: RunRow, labels: dict[str, str]) -> Whole:
    nothing: dict[str, Any] = {name: [] for name in ("events", "approvals", "signals", "budgets", "reserved", "inbox", "notices", "blobs")}
    return Whole(run=columns(row, None, 0), ledger_of=None, labels=list(labels.items()), **nothing)


# -- the meaning of a query, in the plainest way ------------------------------------------------------------------------
FOLDED = str.maketrans(string.ascii_uppercase, string.ascii_lowercase)


def matches(query: Query, row: RunRow, labels: dict[str, str]) -> bool:
    return all(_matches(term, row, labels) for term in query.terms)


def _matches(term: Term, row: RunRow, labels: dict[str, str]) -> bool:
    if term.key in ("created", "updated", "cost"):
        number = {"created": row.created_at, "updated": row.updated_at, "cost": 0}[term.key]
        wanted = term.number
        return {">": number > wanted, ">=": number >= wanted, "<": number < wanted, "<=": number <= wanted}[term.compare]
    value = {"label": labels.get(term.label), "id": row.run_id}.get(term.key) if term.key in ("label", "id") else getattr(row, term.key)
    if term.key == "parent":
        value = value or "none"
    if term.key == "error":
        text = term.values[0] if term.compare == "like" else f"*{term.values[0]}*"
        found = value is not None and _like(value.translate(FOLDED), text.translate(FOLDED))
    elif term.compare == "like":
        found = value is not None and _like(value, term.values[0])
    else:
        found = value in term.values
    return found != term.negated


def _like(text: str, pattern: str) -> bool:
    parts = (".*" if char == "*" else "." if char == "?" else re.escape(char) for char in pattern)
    return re.fullmatch("".join(parts), text, re.DOTALL) is not None


# -- queries ------------------------------------------------------------------------------------------------------------
PIECES = st.sampled_from(
    (*NAMES, *IDS, *ERRORS[:-1], "c-1", "C-1", "c-*", "?-1", "*", "a*b", "[x]", "503", "run-*", "RUN*", "run-1", "%", "_", "]")
)
TEXTS = st.one_of(PIECES, st.text(string.ascii_letters + string.digits + "*?[]%_\\-/. äÄ", min_size=1, max_size=6)).filter(
    lambda text: text.strip() == text and text.count("*") < 8
)
LENGTHS = st.sampled_from(("0s", "30m", "1h", "90m", "2h", "5h", "6h", "7d"))


def quoted(text: str) -> str:
    return f'"{text}"'


PLAIN = st.builds(lambda key, value: f"{key}:{quoted(value)}", st.sampled_from(("agent", "version", "tenant", "queue", "parent")), TEXTS)
PATTERNS = st.builds(
    lambda key, value: f"{key}:{quoted(value)}", st.sampled_from(("id", "error", "label.customer", "label.x.y-z", "label.none")), TEXTS
)
STATUS = st.lists(st.sampled_from(STATUSES), min_size=1, max_size=4, unique=True).map(lambda some: f"status:{','.join(some)}")
TIMES = st.one_of(
    st.builds(lambda key, value: f"{key}:{value}", st.sampled_from(("since", "until")), LENGTHS),
    st.builds(lambda compare, value: f"created:{compare}{value}", st.sampled_from((">", ">=", "<", "<=")), LENGTHS),
)
COSTS = st.builds(lambda compare, value: f"cost:{compare}{value}", st.sampled_from((">", ">=", "<", "<=")), st.sampled_from(("0", "0.5")))
TERMS = st.builds(lambda minus, term: f"{minus}{term}", st.sampled_from(("", "", "-")), st.one_of(PLAIN, PATTERNS, STATUS, TIMES, COSTS))
# A key that a run has only one of occurs once.
QUERIES = st.lists(TERMS, min_size=1, max_size=4, unique_by=lambda term: term.partition(":")[0]).map(" ".join)
