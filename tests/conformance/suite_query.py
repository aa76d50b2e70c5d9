"""What every store must do with queries over runs, and with labels."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from msgspec import structs
from tests.conformance import suite
from tests.conformance.queries import HOUR, NOW, QUERIES, fill, matches, rows_and_labels

from perdure.core.events import LabelsChanged, ModelCallCompleted, ModelCallInitiated, RunCreated, RunSucceeded, Usage
from perdure.core.identity import seal_all
from perdure.core.query import EVERYTHING, Query, Term, parse_query
from perdure.errors import InvalidInput
from perdure.store.api import Append, Committed, NewRun, RowChange, Store


class QueryConformance:
    @pytest.fixture
    def filled(self, store: Store) -> Store:
        fill(store)
        return store

    def test_the_runs_that_are_found_are_those_that_match_page_by_page_each_once(self, filled: Store) -> None:
        @settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
        @given(QUERIES, st.integers(1, 40), st.booleans())
        @example("status:failed,needs_attention -agent:a label.customer:c-1", 3, False)
        @example("status:failed tenant:a since:2h", 2, False)
        @example("-error:503 parent:run-1", 5, True)
        @example("id:run-* until:1h", 7, False)
        @example('error:"100% a_b" -id:*x*', 7, True)
        def check(text: str, limit: int, oldest_first: bool) -> None:
            query = parse_query(text, NOW)
            rows, after = [], None
            while page := filled.find(query, limit, after, oldest_first=oldest_first):
                rows += [row for _, row in page]
                after = page[-1][0]
            wanted = [row.run_id for row, labels in rows_and_labels() if matches(query, row, labels)]
            assert sorted(row.run_id for row in rows) == sorted(wanted)
            times = [row.created_at for row in rows]
            assert times == sorted(times, reverse=not oldest_first)
            assert sum(filled.count(query).values()) == len(wanted)
            assert filled.count(query, "agent") == _counted(query, lambda row, _: row.agent)
            assert filled.count(query, "label.customer") == _counted(query, lambda _, labels: labels.get("customer"))

        check()

    def test_a_page_goes_on_where_the_last_one_ended_whatever_changes_in_between(self, store: Store) -> None:
        for n in range(12):
            store.create_run(suite.new_run(f"r{n}", ts=suite.T0))
        first = store.find(EVERYTHING, 5)
        store.create_run(suite.new_run("new", ts=suite.T0 + 1))
        suite.claim_one(store, first[2][1].run_id)
        rest = [row.run_id for _, row in store.find(EVERYTHING, 100, first[-1][0])]
        assert [row.run_id for _, row in first] + rest == [f"r{n}" for n in reversed(range(12))]

    @pytest.mark.parametrize("cursor", ["", "x", "n1", "n1.g", "n-1.1", "n1.1 ", "o1.1", "n1.1; DROP TABLE perdure_runs"])
    def test_a_cursor_that_is_none_is_refused(self, store: Store, cursor: str) -> None:
        with pytest.raises(InvalidInput, match="cursor"):
            store.find(EVERYTHING, 5, cursor)

    @pytest.mark.parametrize("text", ["'; DROP TABLE perdure_runs; --", "x' OR 1 = 1 --", ":p_a", "$1", "%s", "{0}"])
    def test_a_value_is_never_a_part_of_the_statement(self, filled: Store, text: str) -> None:
        keys = ("agent", "version", "tenant", "queue", "id", "parent", "error")
        terms = [Term(key, values=(text,)) for key in keys] + [
            Term("label", values=(text,), label="k"),
            Term("label", values=("v",), label=text),
        ]
        for term in terms:
            assert filled.find(Query((term,))) == []
            assert len(filled.list(Query((Term(term.key, values=term.values, label=term.label, negated=True),)), 1000)) == 150
        assert filled.count(EVERYTHING, f"label.{text}") == {None: 150}

    def test_labels_follow_from_events_in_their_commit(self, store: Store) -> None:
        created = RunCreated("r", "a", "1", "default", suite.payload(1), labels={"customer": "c-1", "tier": "gold"})
        store.create_run(suite.new_run("other"))
        store.create_run(NewRun("r", created, "0" * 32, suite.T0, "d"))
        assert store.labels(["r", "other"]) == {"r": {"customer": "c-1", "tier": "gold"}, "other": {}}
        held = suite.claim_one(store, "r")
        append = held.append(LabelsChanged({"customer": "c-2", "order": "o-1", "tier": None}), row=RowChange("running"))
        store.append([append])
        assert store.labels(["r"]) == {"r": {"customer": "c-2", "order": "o-1"}}
        store.append([append])  # refused: the run's seq has changed
        late = suite.Held(held.lease, held.seq, held.head)
        store.append([late.append(LabelsChanged({"customer": "late"}))])
        assert [row.run_id for row in store.list(parse_query("label.customer:c-2", NOW))] == ["r"]
        assert store.list(parse_query("label.customer:late", NOW)) == store.list(parse_query("label.tier:*", NOW)) == []

    def test_a_child_does_not_get_the_labels_of_its_parent_and_a_prune_deletes_labels(self, store: Store) -> None:
        created = RunCreated("r", "a", "1", "default", suite.payload(1), labels={"customer": "c-1"})
        store.create_run(NewRun("r", created, "0" * 32, suite.T0, "d"))
        held = suite.claim_one(store, "r")
        store.append([held.append(RunSucceeded(suite.payload("x")), row=RowChange("succeeded"))])
        (whole,) = store.wholes(["r"])
        assert whole.labels == [("customer", "c-1")]
        assert store.prune(["r"], suite.T0 + HOUR, by="ann", now=suite.T0 + HOUR).runs == 1
        assert store.labels(["r"]) == {"r": {}}
        assert store.count(EVERYTHING, "label.customer") == {}

    def test_cost_is_what_the_run_itself_has_used(self, store: Store) -> None:
        for n, micros in enumerate((0, 400_000, 2_000_000)):
            held = suite.hold_one(store, f"r{n}")
            asked = ModelCallInitiated("gpt", "read", "", 1, suite.payload({}))
            told = ModelCallCompleted(suite.payload("x"), usage=Usage(usd_micros=micros))
            events = [structs.replace(one.event, call=1) for one in held.append(asked, told).events]
            append = Append(held.lease, held.seq, tuple(seal_all(held.head, events)))
            assert store.append([append]) == [Committed()]
        assert [row.run_id for row in store.list(parse_query("cost:>0.4", NOW))] == ["r2"]
        assert [row.run_id for row in store.list(parse_query("cost:>=0.4 cost:<1", NOW))] == ["r1"]
        assert [row.run_id for row in store.list(parse_query("-cost:>0", NOW))] == ["r0"]
        assert store.count(parse_query("cost:>0", NOW)) == {"running": 2}


def _counted(query: Query, group: Any) -> dict[Any, int]:
    found: dict[Any, int] = {}
    for row, labels in rows_and_labels():
        if matches(query, row, labels):
            found[group(row, labels)] = found.get(group(row, labels), 0) + 1
    return found
