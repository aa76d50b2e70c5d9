"""The logic of the store on any database, beyond the conformance suite.

Pages, and writes of other processes in between.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.conformance.suite import StoreConformance, new_run
from tests.conformance.suite_waiting import child, hold, payload, started
from tests.unit.store_tools import raw

from perdure.core.events import ToolCallCompleted, Usage
from perdure.errors import StoreCorrupt
from perdure.store import costs
from perdure.store.creation import insert_run
from perdure.store.sqlite.store import SqliteStore

SUITE = StoreConformance()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.db"


@pytest.fixture
def store(path: Path) -> Iterator[SqliteStore]:
    store = SqliteStore(f"sqlite:///{path}", path)
    yield store
    store.close()


@pytest.mark.parametrize("events", [1, 2, 3, 4])
def test_costs_are_the_same_however_small_the_pages_are_in_which_they_are_read(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch, events: int
) -> None:
    monkeypatch.setattr(costs, "_PAGE", events)
    SUITE.test_costs_are_added_up_by_group_and_counted_once(store)


def test_the_costs_of_children_count_for_the_run_that_was_started(store: SqliteStore) -> None:
    hold(store, "p").write(child("p/1"), call=1)
    one = hold(store, "p/1", worker="w1")
    one.write(started("ask"), call=1)
    one.write(ToolCallCompleted(payload(1), usage=Usage(7)), call=1)
    assert [(row.group, row.runs, row.usd_micros) for row in store.costs("root")] == [("p", 1, 7)]
    assert [row.group for row in store.costs("run")] == ["p/1"]


def test_an_end_of_an_attempt_that_was_edited_is_named_and_not_left_out(store: SqliteStore, path: Path) -> None:
    hand = hold(store, "r")
    hand.write(started("ask"), call=1)
    hand.write(ToolCallCompleted(payload(1), usage=Usage(7)), call=1)
    with raw(path) as other:
        other.execute("DROP TRIGGER perdure_events_no_update")
        other.execute('UPDATE perdure_events SET data = replace(data, \'"usd_micros":7\', \'"usd_micros":"x"\') WHERE seq = 4')
    with pytest.raises(StoreCorrupt, match="event 4 of run r cannot be decoded"):
        store.costs("run")


def test_an_id_that_somebody_else_has_taken_by_now_is_not_taken_twice(store: SqliteStore) -> None:
    first, second = new_run("r"), new_run("r")
    done = store._database.write(lambda cursor: (insert_run(cursor, first), insert_run(cursor, second)), lambda *_: False)
    assert done == (True, False)
    assert [event.event_id for event in store.read("r")] == [first.event_id]
