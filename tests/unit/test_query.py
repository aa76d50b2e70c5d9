"""Queries over runs: what can be parsed, what is refused and how; labels; errors that are alike."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.conformance.queries import QUERIES, matches, rows_and_labels
from tests.unit.inspect_tools import url_of

from perdure import Fatal, Perdure, Retry, Run, agent, tool
from perdure.cli.errors import normalised, pattern_of
from perdure.core.codec import encode, pack
from perdure.core.events import Event, LabelsChanged, RunCreated
from perdure.core.labels import MAX_LABELS
from perdure.core.query import KEYS, Query, Term, parse_query
from perdure.core.state import RunState, fold
from perdure.errors import InvalidInput, InvalidQuery
from perdure.inspect import view
from perdure.inspect.redact import MARKER, Redactor, read_rules
from perdure.inspect.repair import plan_repair
from perdure.inspect.verify import verify_run
from perdure.store.open import open_store

NOW = 1_800_000_000_000_000
HOUR = 3_600_000_000


# -- the language -------------------------------------------------------------------------------------------------------
def test_a_query_is_parsed_into_terms() -> None:
    assert parse_query("status:failed,cancelled -agent:a label.x:1 since:1h -created:>2h cost:<=$0.25", NOW) == Query(
        (
            Term("status", values=("failed", "cancelled")),
            Term("agent", values=("a",), negated=True),
            Term("label", values=("1",), label="x"),
            Term("updated", ">=", number=NOW - HOUR),
            Term("created", "<=", number=NOW - 2 * HOUR),
            Term("cost", "<=", number=250_000),
        )
    )
    assert parse_query("""error:"a b" id:'x"y*' """, NOW).terms == (Term("error", values=("a b",)), Term("id", "like", ('x"y*',)))


@pytest.mark.parametrize(
    ("text", "words", "caret"),
    [
        ("", "there is no term in it", 0),
        ("failed", "'failed' is not KEY:VALUE", 0),
        ("status:failed colour:red", "there is no key 'colour'", 14),
        ("-colour:red", "there is no key 'colour'", 1),
        ("label.KEY:", "is not KEY:VALUE", 0),
        ("label.:x", "cannot be the key of a label", 0),
        ("label.a/b:x", "cannot be the key of a label", 0),
        ("status:failed,broken", "there is no status 'broken'; a status is one of: queued, running", 14),
        ("status:failed status:cancelled", "for either of them: status:failed,cancelled", 14),
        ("agent:a agent:b", "agent is there twice", 8),
        ('error:""', "error: needs a value", 7),
        ('error:"half', "a quote that is not closed", 0),
        ('error:"a"b', "text right after one", 0),
        ("since:soon", "since: 'soon' is not a time", 6),
        ("since:10000-01-01", "is not a time", 6),
        ("created:2d", "created: needs > or <", 8),
        ("cost:>much", "'much' is no amount of dollars", 6),
        ("cost:>0.0000001", "is no amount of dollars", 6),
        ("cost:>-1", "is no amount of dollars", 6),
        ("agent:a\x00b", "a character that cannot be seen", 7),
        ("agent:a\tid:b", "a character that cannot be seen", 7),
        ("error:" + "*a" * 9, "more than 8 stars", 6),
    ],
)
def test_what_is_wrong_is_said_and_pointed_at(text: str, words: str, caret: int) -> None:
    with pytest.raises(InvalidQuery) as refused:
        parse_query(text, NOW)
    message, shown, pointer = refused.value.lines
    assert words in message
    assert str(refused.value) == f"{message}\n{shown}\n{pointer}"
    assert pointer == f"  {' ' * caret}^"
    if "KEY:VALUE" in message:
        assert ", ".join(KEYS) in message


def test_a_long_query_is_shown_around_the_place_that_is_wrong() -> None:
    with pytest.raises(InvalidQuery) as refused:
        parse_query("agent:a " * 1 + "id:x " * 100 + "colour:red " + "id:y " * 50, NOW)
    _, shown, pointer = refused.value.lines
    assert shown[len(pointer) - 1 :].startswith("colour:red")
    assert len(shown) < 130
    with pytest.raises(InvalidQuery, match="longer than"):
        parse_query("id:x " * 1000, NOW)


@given(st.one_of(st.text(), st.text("abcdelorstu:-,.<>=*?\"' 0123456789", max_size=40), QUERIES))
@example("cost:>1e999999999")
@example("cost:>1e-999999999")
@example("cost:>NaN")
@example("since:0001-01-01T00:00+23:59")
@example("since:9999-12-31T23:59:59.999999-23:59")
@example("id:\ud800")
@example("created:>\u0661d")
def test_every_text_is_a_query_or_is_refused_and_a_query_stays_itself_when_it_is_printed(text: str) -> None:
    try:
        query = parse_query(text, NOW)
    except InvalidInput:
        return
    printed = str(query)
    again = parse_query(printed, NOW + 5 * HOUR)
    assert again == query
    assert str(again) == printed


@given(QUERIES)
def test_a_further_term_only_narrows_a_query(text: str) -> None:
    query = parse_query(text, NOW)
    narrow = query.also(tenant="a")
    for row, labels in rows_and_labels():
        assert matches(narrow, row, labels) == (matches(query, row, labels) and row.tenant == "a")


# -- the app ------------------------------------------------------------------------------------------------------------
@agent(version="1")
async def labelled(run: Run, n: int) -> int:
    run.label({"order.id": f"o-{n}", "tier": "gold"}, customer=f"c-{n % 2}")
    run.label(tier=None)
    run.label()
    return n


@agent(version="1")
async def greedy(run: Run) -> str:
    run.label({f"k{n}": "v" for n in range(MAX_LABELS - 1)})
    try:
        run.label(one="more", two="more")
    except InvalidInput as error:
        run.label(k0=None, one="more")
        return str(error)
    return "all of them"


@agent(version="1")
async def counting(run: Run) -> int:
    done = run.restored or 0
    run.label(done=str(done), **{f"of-{done}": "x"})
    if done < 3:
        run.status("go on")
        await run.receive("next")
        await run.checkpoint(done + 1)
    return int(done)


def test_labels_of_a_run_are_found_shown_replayed_and_checked(tmp_path: Path) -> None:
    async def main() -> None:
        async with Perdure(url_of(tmp_path / "j.db"), agents=[labelled, greedy]) as app:
            for n in range(4):
                await app.run(labelled, n, id=f"r{n}", labels={"batch": "b"}, tenant="t1" if n else "t0")
            assert [run.id for run in await app.list(where="label.customer:c-1")] == ["r3", "r1"]
            info = await app.handle("r3").info()
            assert info.labels == {"batch": "b", "customer": "c-1", "order.id": "o-3"}
            assert (await app.list(where="id:r3"))[0].labels == info.labels
            assert (await app.handle("r3").state()).labels == info.labels
            assert "has at most 32" in await app.run(greedy, id="g")
            assert len((await app.handle("g").info()).labels) == MAX_LABELS - 1
            assert await app.count(by="label.customer") == {"c-0": 2, "c-1": 2, None: 1}
            assert await app.count(where="label.batch:b", tenant="t1", by="agent") == {"labelled": 3}
            page = await app.list(limit=2, oldest_first=True)
            rest = await app.list(limit=10, oldest_first=True, after=page[-1].cursor)
            assert [run.id for run in [*page, *rest]] == ["r0", "r1", "r2", "r3", "g"]
            for row in app.store.list():
                assert verify_run(app.store, row).problem is None

    asyncio.run(main())


def test_a_query_finds_nothing_of_another_tenant(tmp_path: Path) -> None:
    async def main() -> None:
        async with Perdure(url_of(tmp_path / "j.db"), agents=[labelled]) as app:
            for tenant in ("ours", "theirs"):
                await app.start(labelled, 1, id=tenant, tenant=tenant, labels={"secret": "x"})
            for where in ("tenant:theirs", "id:theirs", "-tenant:ours", "label.secret:x", "id:*", "status:queued,failed"):
                assert {run.tenant for run in await app.list(where=where, tenant="ours")} <= {"ours"}
                assert set(await app.count(where=where, tenant="ours", by="tenant")) <= {"ours"}

    asyncio.run(main())


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        ({"a b": "x"}, "cannot be the key of a label"),
        ({"-a": "x"}, "cannot be the key of a label"),
        ({"k" * 65: "x"}, "cannot be the key of a label"),
        ({"": "x"}, "cannot be the key of a label"),
        ({"k": ""}, "cannot be the value of label k"),
        ({"k": "v" * 257}, "cannot be the value of label k"),
        ({"k": "a\nb"}, "cannot be the value of label k"),
        ({"k": "a\u200bb"}, "cannot be the value of label k"),
        ({"k": "\ud800"}, "cannot be the value of label k"),
        ({"k": 7}, "cannot be the value of label k"),
        ({"k": None}, "cannot be the value of label k"),
        (["k"], "is not a dict of labels"),
        ({f"k{n}": "v" for n in range(33)}, "a run has at most 32"),
    ],
)
def test_labels_that_cannot_be_used_are_refused(tmp_path: Path, labels: object, words: str) -> None:
    async def main() -> None:
        async with Perdure(url_of(tmp_path / "j.db"), agents=[labelled]) as app:
            with pytest.raises(InvalidInput, match=words):
                await app.start(labelled, 1, labels=labels)  # type: ignore[arg-type]
            assert await app.list() == []

    asyncio.run(main())


def test_labels_outlive_checkpoints_and_the_events_before_them(tmp_path: Path) -> None:
    async def main() -> None:
        async with Perdure(url_of(tmp_path / "j.db"), agents=[counting]) as app:
            handle = await app.start(counting, id="r", labels={"batch": "b"})
            for _ in range(3):
                await app.drive("r", wait=False)
                await handle_signal(app)
            assert await handle.result(timeout=30) == 3
            expected = {"batch": "b", "done": "3", "of-0": "x", "of-1": "x", "of-2": "x", "of-3": "x"}
            assert app.store.labels(["r"])["r"] == expected
            app.store.remove_before_checkpoint("r", by="ann", now=NOW)
            assert fold(app.store.read("r")).labels == expected
            (row,) = app.store.list()
            assert verify_run(app.store, row).problem is None

    async def handle_signal(app: Perdure) -> None:
        await app.signal("r", "next", None)

    asyncio.run(main())


def test_labels_that_were_edited_are_found_and_repaired(tmp_path: Path) -> None:
    path = tmp_path / "j.db"

    async def main() -> None:
        async with Perdure(url_of(path), agents=[labelled]) as app:
            await app.run(labelled, 1, id="r")

    asyncio.run(main())
    import apsw

    for edit in (
        "DELETE FROM perdure_labels",
        "UPDATE perdure_labels SET value = 'x'",
        "UPDATE perdure_labels SET key = 'other' WHERE key = 'customer'",
    ):
        outside = apsw.Connection(str(path))
        outside.execute(edit)
        outside.close()
        store = open_store(url_of(path))
        try:
            (row,) = store.list()
            assert "its label customer is" in str(verify_run(store, row).problem)
            repair = plan_repair(store, row)
            assert repair is not None
            assert repair.words == ("its labels: become customer=c-1, order.id=o-1",)
            store.repair(repair)
            assert verify_run(store, row).problem is None
            assert store.labels(["r"])["r"] == {"customer": "c-1", "order.id": "o-1"}
        finally:
            store.close()


def test_a_redacted_copy_has_no_secret_labels() -> None:
    created = RunCreated("r", "a", "1", "t", pack(encode({"customer": "c-4711"}))[0], labels={"customer": "c-4711", "batch": "b"})
    changed = LabelsChanged({"note": "of c-4711", "customer": None})
    redactor = Redactor(read_rules(["key:customer"]), lambda payload: payload.inline or b"")
    for body in (created, changed):
        redactor.collect(body)
    first, second = (redactor.redact(Event(1, "0" * 32, 1, 0, None, None, body), RunState(), []) for body in (created, changed))
    assert isinstance(first, RunCreated)
    assert first.labels == {"customer": MARKER, "batch": "b"}
    assert second == LabelsChanged({"note": f"of {MARKER}", "customer": None})


def test_all_rows_are_read_page_by_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view, "PAGE", 5)
    url = url_of(tmp_path / "journal.db")

    async def start() -> None:
        async with Perdure(url, agents=[labelled]) as app:
            for number in range(23):
                await app.start(labelled, number, id=f"run-{number}", tenant="even" if number % 2 == 0 else "odd")

    asyncio.run(start())
    store = open_store(url)
    try:
        assert len({row.run_id for row in view.all_rows(store)}) == 23
        assert len(list(view.all_rows(store, parse_query("tenant:odd", NOW)))) == 11
    finally:
        store.close()


# -- errors that are alike ----------------------------------------------------------------------------------------------
def test_what_differs_from_run_to_run_becomes_a_placeholder() -> None:
    one = "HTTP 503 from https://api.example/o/1?x=2 for 'order 7' at 550e8400-e29b-41d4-a716-446655440001 (0xdeadBEEF, 9f86d081884c7d65, 1.5 s)"
    assert normalised(one) == "HTTP <n> from <url> for <text> at <uuid> (<hex>, <hex>, <n> s)"
    assert normalised("no deadbeef here") == "no deadbeef here"


@given(st.text(max_size=300))
@example("a \"b\" 'c' *d? \n 1 2 3 4 5 6 7 8 9 10 11")
@example("<n><n>")
def test_the_query_for_an_error_matches_that_error(error: str) -> None:
    pattern = pattern_of(error)
    if not pattern.strip("* "):
        return
    (row, labels) = rows_and_labels()[0]
    import msgspec

    query = parse_query(str(Term("error", values=(pattern,))), NOW)
    assert matches(query, msgspec.structs.replace(row, error=error), labels)


def test_the_list_says_where_the_next_page_begins(tmp_path: Path) -> None:
    url = url_of(tmp_path / "journal.db")

    async def start() -> None:
        async with Perdure(url, agents=[labelled]) as app:
            for number in range(5):
                await app.start(labelled, number, id=f"r{number}")

    asyncio.run(start())
    found: list[str] = []
    after: list[str] = []
    for _ in range(3):
        told = [sys.executable, "-m", "perdure", "list", "--url", url, "--limit", "2", "--json", "--where", "-status:failed", *after]
        records = [json.loads(line) for line in subprocess.run(told, capture_output=True, check=True, timeout=60).stdout.splitlines()]
        found += [record["run_id"] for record in records]
        after = ["--after", records[-1]["cursor"]]
    assert found == ["r4", "r3", "r2", "r1", "r0"]


@tool(effect="read", retry=Retry(attempts=1))
async def fetch(n: int) -> str:
    raise Fatal(f"HTTP 503 from https://api.example/orders/{n}")


@agent(version="1")
async def failing(run: Run, n: int) -> str:
    if n % 2:
        return await fetch(n)
    raise ValueError(f"order {n} is unknown")


def test_runs_that_failed_alike_are_one_group_with_a_query_for_all_of_them(tmp_path: Path) -> None:
    url = url_of(tmp_path / "journal.db")

    async def main() -> None:
        async with Perdure(url, agents=[failing]) as app:
            for number in range(5):
                await app.start(failing, number, id=f"r{number}")
                await app.drive(f"r{number}")

    asyncio.run(main())
    told = subprocess.run([sys.executable, "-m", "perdure", "errors", "--url", url, "--json"], capture_output=True, check=True, timeout=60)
    unknown, unreachable = map(json.loads, told.stdout.splitlines())
    assert (unknown["type"], unknown["tool"], unknown["message"], unknown["runs"], unknown["example"]) == (
        *("ValueError", None, "order <n> is unknown", 3),
        "r4",
    )
    assert (unreachable["type"], unreachable["tool"], unreachable["runs"]) == ("ToolFailed", "fetch", 2)
    assert "in failing" in unknown["place"]
    store = open_store(url)
    try:
        for group, runs in ((unknown, ["r4", "r2", "r0"]), (unreachable, ["r3", "r1"])):
            assert [row.run_id for row in store.list(parse_query(group["where"], NOW))] == runs
    finally:
        store.close()
