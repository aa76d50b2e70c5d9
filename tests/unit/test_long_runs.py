"""Runs with very many calls: what a worker keeps in memory, and what the commands show."""

from __future__ import annotations

import asyncio
import gc
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from perdure import Perdure, Run, agent, tool
from perdure.cli import cli, common, events
from perdure.inspect.why import calls as why_calls
from perdure.inspect.why.page import FIRST_SHOWN, LAST_SHOWN, why
from perdure.settings import Settings

SETTINGS = Settings(park_after_s=0.0)
SIZE = 200_000


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'db'}" if request.param == "sqlite" else request.getfixturevalue("postgres_url")


@tool(effect="once")
async def act(place: int, text: str = "") -> int:
    return place


@tool(effect="read")
async def memory() -> int:
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


@agent(version="1")
async def long(run: Run, steps: int) -> str:
    for place in range(steps):
        await act(place)
    return "done"


def test_a_worker_keeps_no_arguments_of_transactions_that_have_ended(tmp_path: Path) -> None:
    @tool(effect="transaction")
    def book(place: int, text: str) -> int:
        return place

    @agent(version="1")
    async def books(run: Run, steps: int) -> int:
        before = await memory()
        for place in range(steps):
            await book(place, f"{place:>{SIZE}}")
        return await memory() - before

    async def main(steps: int) -> int:
        async with Perdure(f"sqlite:///{tmp_path / 'db'}", [books], settings=SETTINGS) as app:
            return int(await app.run(books, steps, id=f"r-{steps}"))

    tracemalloc.start()
    try:
        few, many = asyncio.run(main(5)), asyncio.run(main(45))
    finally:
        tracemalloc.stop()
    assert many - few < 10 * SIZE


@pytest.mark.parametrize("resumed", [False, True], ids=["live", "resumed"])
def test_a_worker_keeps_the_arguments_of_open_calls_alone(tmp_path: Path, resumed: bool) -> None:
    @agent(version="1")
    async def big(run: Run, steps: int) -> int:
        before = await memory()
        for place in range(steps):
            await act(place, f"{place:>{SIZE}}")
        if resumed:
            await run.receive("go")
        return await memory() - before

    async def main(steps: int) -> int:
        async with Perdure(f"sqlite:///{tmp_path / 'db'}", [big], settings=SETTINGS) as app:
            handle = await app.start(big, steps, id=f"r-{steps}")
            await app.drive(handle.id, wait=False)
            if resumed:
                await app.signal(handle.id, "go")
            return int(await handle.result())

    tracemalloc.start()
    try:
        few, many = asyncio.run(main(5)), asyncio.run(main(45))
    finally:
        tracemalloc.stop()
    # 40 calls more: with their arguments, this would be 40 sizes more.
    assert many - few < 10 * SIZE


def test_a_run_with_many_children_is_not_replayed_for_each_batch_of_them(tmp_path: Path) -> None:
    @agent(version="1")
    async def child(run: Run, place: int) -> int:
        return place

    @agent(version="1")
    async def wide(run: Run, width: int) -> int:
        return len(await asyncio.gather(*(child(place) for place in range(width))))

    async def main() -> tuple[int, int]:
        settings = Settings(concurrency=10, linger_s=30)
        async with Perdure(f"sqlite:///{tmp_path / 'db'}", [wide, child], settings=settings) as app:
            handle = await app.start(wide, 200, id="r")
            return await handle.result(), (await handle.row()).epoch

    width, claims = asyncio.run(main())
    assert width == 200
    assert claims <= 4  # a tenth of the batches


def test_a_journal_is_read_in_pages_and_with_its_hashes(url: str) -> None:
    async def main() -> None:
        async with Perdure(url, [long], settings=SETTINGS) as app:
            await app.run(long, 6, id="a")
            await app.run(long, 2, id="b")
            store = app.store
            whole = store.read("a")
            assert store.read("a", 3, 4) == whole[3:7]
            assert store.read("a", len(whole) - 1, 100) == whole[-1:]
            assert store.read("a", 3, 0) == []
            assert store.hashes("a", 3, 4) == [store.hash_at("a", seq) for seq in range(4, 8)]
            assert store.read_many({"a": 2, "b": 1, "none": 0}, 3) == {"a": whole[2:5], "b": store.read("b")[1:4], "none": []}
            found = store.watched(["a", "b", "none"], ["a"])
            assert {run_id: one.row for run_id, one in found.items()} == {"a": store.get("a"), "b": store.get("b")}

    asyncio.run(main())


def test_what_is_looked_at_beside_a_run_is_what_is_unfinished_below_it(url: str) -> None:
    @agent(version="1")
    async def child(run: Run, place: int) -> int:
        return place if place == 0 else int(await run.receive("go"))

    @agent(version="1")
    async def parent(run: Run) -> int:
        return sum(await asyncio.gather(child(0), child(1), child(2)))

    async def main() -> None:
        async with Perdure(url, [parent, child], settings=SETTINGS) as app:
            for run_id in ("p", "p-other"):
                await app.start(parent, id=run_id)
                await app.drive(run_id, wait=False)
            found = app.store.watched(["p", "p-other"], ["p"])
            assert {row.run_id for row in found["p"].family} == {row.run_id for row in app.store.family("p")} == {"p/2", "p/3"}
            assert found["p-other"].family == ()

    asyncio.run(main())


# -- the commands


@pytest.fixture
def journal(tmp_path: Path) -> str:
    url = f"sqlite:///{tmp_path / 'db'}"

    async def main() -> None:
        async with Perdure(url, [long], settings=SETTINGS) as app:
            await app.run(long, 30, id="r")

    asyncio.run(main())
    return url


def run(*words: str) -> Result:
    done = CliRunner().invoke(cli, words)
    assert done.exit_code == 0, done.output
    return done


def test_events_shows_the_last_ones_with_the_names_of_earlier_calls(journal: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "PAGE", 7)
    whole = run("events", "r", "--url", journal).stdout.splitlines()
    assert [int(line.split()[0]) for line in whole] == list(range(1, len(whole) + 1))
    assert run("events", "r", "-n", "3", "--url", journal).stdout.splitlines() == whole[-3:]
    assert run("events", "r", "--last", "0", "--url", journal).stdout == ""


def test_on_a_terminal_events_and_show_leave_out_what_is_long_ago_and_say_so(journal: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run("events", "r", "--url", journal).stdout.splitlines()
    table = run("show", "r", "--url", journal).stdout
    monkeypatch.setattr(common, "most_shown", lambda: 5)
    short = run("events", "r", "--url", journal)
    assert short.stdout.splitlines() == whole[-5:]
    assert "--all" in short.stderr
    assert run("events", "r", "--all", "--url", journal).stdout.splitlines() == whole
    shown = run("show", "r", "--url", journal)
    assert "act(place=25," in shown.stdout
    assert "act(place=24," not in shown.stdout
    assert "25 earlier lines" in shown.stderr
    assert "act(place=0," in table
    assert "act(place=0," in run("show", "r", "--all", "--url", journal).stdout


def test_events_reads_hashes_by_the_page(journal: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "PAGE", 10)

    async def hashes() -> list[str]:
        async with Perdure(journal) as app:
            return [app.store.hash_at("r", seq).hex() for seq in range(1, (await app.handle("r").info()).seq + 1)]

    lines = run("events", "r", "--json", "--url", journal).stdout.splitlines()
    assert [json.loads(line)["hash"] for line in lines] == asyncio.run(hashes())


def test_why_describes_only_the_calls_that_it_shows(journal: str, monkeypatch: pytest.MonkeyPatch) -> None:
    described = 0
    real = why_calls._done

    def counted(*args: Any) -> Any:
        nonlocal described
        described += 1
        return real(*args)

    monkeypatch.setattr(why_calls, "_done", counted)

    async def main() -> Any:
        async with Perdure(journal) as app:
            return why(app.reading, "r", now=0)

    page = asyncio.run(main())
    assert page.done_count == 30
    assert described == len(page.done) == FIRST_SHOWN + LAST_SHOWN
