"""Queries over runs, as they are typed after `--where`."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.unit.inspect_tools import url_of

from perdure import Perdure, Run, agent
from perdure.cli.where import KEYS, Query, parse_query
from perdure.errors import InvalidInput
from perdure.inspect import view
from perdure.store.api import Filter, RunRow
from perdure.store.open import open_store

NOW = 1_800_000_000_000_000
HOUR = 3_600_000_000


def row(**changes: object) -> RunRow:
    fields: dict[str, object] = {
        "run_id": "refund-7",
        "agent": "support",
        "version": "2",
        "tenant": "acme",
        "actor": None,
        "queue": "slow",
        "target": None,
        "input_digest": "",
        "status": "failed",
        "waiting_for": None,
        "ready_at": None,
        "seq": 9,
        "head": b"",
        "epoch": 1,
        "holder": None,
        "crashes": 0,
        "error": "ToolFailed: HTTP 503 Service Unavailable",
        "created_at": NOW - 9 * HOUR,
        "updated_at": NOW - HOUR,
    }
    return RunRow(**(fields | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text",
    [
        "status:failed",
        "status:cancelled,failed agent:support version:2 tenant:acme queue:slow",
        "error:503",
        "error:*503* error:toolfailed*",
        'error:"503 service"',
        "error:'service UNAVAILABLE'",
        "id:refund-* id:*-7",
        "since:2h until:30m",
        f"  since:{'2027-01-15T06:00Z'}   parent:none ",
    ],
)
def test_all_terms_have_to_match(text: str) -> None:
    assert parse_query(text, NOW).matches(row())


@pytest.mark.parametrize(
    "text",
    [
        "status:cancelled",
        "agent:other",
        "version:1",
        "tenant:other",
        "queue:default",
        "error:504",
        "error:503*",
        "error:503 error:504",
        "id:refund",
        "id:Refund-*",
        "since:30m",
        "until:2h",
        "parent:top",
        "status:failed agent:other",
    ],
)
def test_one_term_that_does_not_match_is_enough(text: str) -> None:
    assert not parse_query(text, NOW).matches(row())


def test_a_parent_is_named_or_there_is_none() -> None:
    child = row(run_id="top/2", parent="top", parent_call=2)
    assert parse_query("parent:top", NOW).matches(child)
    assert not parse_query("parent:none", NOW).matches(child)


def test_the_store_selects_what_it_can() -> None:
    assert parse_query("status:failed agent:a tenant:t until:1h error:x", NOW).filter == Filter("failed", "a", "t", before=NOW - HOUR)
    assert parse_query("status:failed,cancelled", NOW).filter == Filter()
    assert parse_query("id:x", NOW) == Query(ids=("x",))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "there is no term in it"),
        ("failed", "'failed' is not KEY:VALUE"),
        ("colour:red", "there is no key 'colour'"),
        ("status:broken", "there is no status 'broken'; a status is one of: queued, running"),
        ("status:failed status:cancelled", "for either of them: status:failed,cancelled"),
        ("agent:a agent:b", "agent is there twice"),
        ('error:""', "error: needs a value"),
        ('error:"half', "a quote that is not closed"),
        ('error:"a"b', "text right after one"),
        ("since:soon", "--where since: 'soon' is not a time"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(text: str, words: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        parse_query(text, NOW)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)
    if "KEY" in str(refused.value):
        assert ", ".join(KEYS) in str(refused.value)


@agent(version="1")
async def idle(run: Run, n: int) -> int:
    return n


def test_very_many_runs_are_read_page_by_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view, "PAGE", 5)
    url = url_of(tmp_path / "journal.db")

    async def start() -> None:
        async with Perdure(url, agents=[idle]) as app:
            for number in range(23):
                await app.start(idle, number, id=f"run-{number}", tenant="even" if number % 2 == 0 else "odd")

    asyncio.run(start())
    store = open_store(url)
    try:
        pages: list[Filter] = []
        listing = store.list

        def watched(wanted: Filter) -> list[RunRow]:
            pages.append(wanted)
            return listing(wanted)

        monkeypatch.setattr(store, "list", watched)
        rows = parse_query("tenant:even id:run-*", NOW).rows(store)
        assert next(rows).run_id == "run-22"
        assert [(wanted.tenant, wanted.limit) for wanted in pages] == [("even", 5)], "the first page is enough for the first run"
        assert [found.run_id for found in rows] == [f"run-{number}" for number in range(20, -1, -2)]
        assert len(pages) > 2
    finally:
        store.close()
