"""Results of calls: when they are committed, what the agent gets, and which values a tool may return."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import decimal
import enum
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pydantic
import pytest
from tests.unit.drive_tools import ManualClock, local, outline, perdure, run, until

from perdure import Call, Perdure, ResultNotEncodable, Run, RunFailed, ToolFailed, agent, tool
from perdure.core.events import Event, ToolCallCompleted, ToolCallInitiated
from perdure.store.api import Append, Appended, Store


class Watched:
    """The real store, with a look at every append before and after it is durable."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.appends: list[list[str]] = []
        self.durable: list[Event] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def append(self, batch: Sequence[Append]) -> list[Appended]:
        answers = self._store.append(batch)
        events = [sealed.event for append in batch for sealed in append.events]
        self.appends.append(outline(events))
        self.durable += events
        return answers


def watch(app: Perdure) -> Watched:
    watched = Watched(app.store)
    local(app)._store = watched
    return watched


@tool(effect="read")
async def read(what: Any = None) -> Any:
    return what


@tool(effect="once")
async def act(what: Any = None) -> Any:
    return what


# -- commits ------------------------------------------------------------------------------------------------------------
def test_results_of_reads_are_not_committed_one_by_one() -> None:
    @agent(version="1")
    async def reader(run: Run) -> int:
        for at in range(200):
            await read(at)
        return 200

    async def main() -> tuple[Watched, list[str]]:
        async with perdure(None, [reader]) as app:
            watched = watch(app)
            handle = await app.start(reader)
            assert await handle.result() == 200
            return watched, outline(await handle.events())

    watched, lines = run(main())
    assert len([line for line in lines if line.startswith("completed")]) == 200
    assert len(watched.appends) < 100, "far fewer commits than results"


def test_results_of_reads_go_out_within_the_flush_time_though_the_agent_waits_on() -> None:
    seen = asyncio.Event()

    @tool(effect="read")
    async def slow_read() -> None:
        await seen.wait()

    @agent(version="1")
    async def reader(run: Run) -> None:
        await read("buffered")
        await slow_read()

    async def main() -> None:
        async with perdure(None, [reader]) as app:
            watched = watch(app)
            handle = await app.start(reader)
            driving = asyncio.create_task(app.engine.drive(handle.id))
            await until(lambda: any(isinstance(event.body, ToolCallCompleted) for event in watched.durable))
            seen.set()
            await driving

    run(main())


def test_a_step_of_an_effect_is_one_commit_with_the_intent_before_the_effect() -> None:
    """The completion that wakes the agent and the intent of its next call share a commit."""
    performed: list[list[str]] = []

    async def main() -> tuple[Watched, list[list[str]]]:
        watched: Watched

        @tool(effect="once")
        async def effect(number: int) -> int:
            performed.append(outline(watched.durable))
            return number

        @agent(version="1")
        async def worker(run: Run) -> None:
            for number in range(3):
                await effect(number)

        async with perdure(None, [worker]) as app:
            watched = watch(app)
            await app.run(worker)
            return watched, performed

    watched, seen = run(main())
    assert watched.appends == [
        ["initiated effect 1/1"],
        ["completed 1/1", "initiated effect 2/1"],
        ["completed 2/1", "initiated effect 3/1"],
        ["completed 3/1", "run_succeeded"],
    ]
    assert [lines[-1] for lines in seen] == ["initiated effect 1/1", "initiated effect 2/1", "initiated effect 3/1"]


def test_the_result_of_an_effect_is_durable_before_the_agent_waits_for_anything_else() -> None:
    async def main() -> bool:
        watched: Watched

        @tool(effect="read")
        async def look_at_the_journal() -> bool:
            await asyncio.sleep(0)  # a read starts at once; the commit of what came before it is made in the same turn
            return any(isinstance(event.body, ToolCallCompleted) and event.call == 1 for event in watched.durable)

        @agent(version="1")
        async def worker(run: Run) -> bool:
            await act()
            return bool(await look_at_the_journal())

        async with perdure(None, [worker]) as app:
            watched = watch(app)
            return bool(await app.run(worker))

    assert run(main())


def test_parallel_effects_share_one_commit() -> None:
    @agent(version="1")
    async def worker(run: Run) -> None:
        await asyncio.gather(*(act(at) for at in range(50)))

    async def main() -> Watched:
        async with perdure(None, [worker]) as app:
            watched = watch(app)
            await app.run(worker)
            return watched

    watched = run(main())
    assert len(watched.appends[0]) == 50
    assert len(watched.appends) <= 53


@pytest.mark.full
@pytest.mark.parametrize("effect", ["read", "idempotent"])
def test_ten_thousand_parallel_calls(effect: Any) -> None:
    @tool(effect=effect)
    async def number(at: int) -> int:
        return at

    @agent(version="1")
    async def wide(run: Run) -> int:
        return sum(await asyncio.gather(*(number(at) for at in range(10_000))))

    async def main() -> tuple[int, int]:
        async with perdure(None, [wide]) as app:
            handle = await app.start(wide)
            return await handle.result(), len((await handle.state()).calls)

    began = time.monotonic()
    assert run(main(), 60) == (sum(range(10_000)), 10_000)
    assert time.monotonic() - began < 40


@pytest.mark.full
def test_ten_thousand_calls_abandoned_at_once() -> None:
    """Giving one up must not search through all the others."""

    performed: list[int] = []

    @tool(effect="once")
    async def never() -> None:
        performed.append(1)

    @agent(version="1")
    async def fickle(run: Run) -> str:
        tasks = [asyncio.create_task(never()) for _ in range(10_000)]
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        return "never mind"

    async def main() -> str:
        async with perdure(None, [fickle]) as app:
            return str(await app.run(fickle))

    assert run(main(), 60) == "never mind"
    assert performed == []


# -- what comes back ----------------------------------------------------------------------------------------------------
FALSY = [0, "", False, None, [], {}, 0.0, -0.0]


@pytest.mark.parametrize("effect", ["read", "once"])
def test_falsy_results_are_results(tmp_path: Path, effect: Any) -> None:
    performed: list[int] = []

    @tool(effect=effect)
    async def answer(at: int) -> Any:
        performed.append(at)
        return FALSY[at]

    @agent(version="1")
    async def asker(run: Run) -> list[Any]:
        found = [await answer(at) for at in range(len(FALSY))]
        await asyncio.sleep(10)
        return found

    async def main() -> Any:
        clock = ManualClock()
        async with perdure(tmp_path / "db", [asker], clock) as app:
            await app.start(asker, id="r")
            assert (await app.engine.drive("r", wait=False)).status == "waiting"
        clock.advance(11)
        async with perdure(tmp_path / "db", [asker], clock) as app:
            return await app.handle("r").result()

    assert repr(run(main())) == repr(FALSY)
    assert performed == list(range(len(FALSY))), "none was taken for missing and asked again"


class Colour(enum.Enum):
    RED = "red"


@dataclasses.dataclass
class Point:
    x: int
    y: int


class Model(pydantic.BaseModel):
    name: str
    at: datetime.datetime | None = None


ODD: list[tuple[Any, Any]] = [
    ((1, 2), [1, 2]),
    ({"a": (1,)}, {"a": [1]}),
    (Colour.RED, "red"),
    (Point(1, 2), {"x": 1, "y": 2}),
    (Model(name="x"), {"at": None, "name": "x"}),
    (datetime.datetime(2024, 3, 10, 2, 30, tzinfo=datetime.UTC), "2024-03-10T02:30:00+00:00"),
    (datetime.date(9999, 12, 31), "9999-12-31"),
    (decimal.Decimal("0.10"), "0.10"),
    (uuid.UUID(int=1), "00000000-0000-0000-0000-000000000001"),
    (Path("/a/b"), "/a/b"),
    (2**63, 2**63),
    (-(2**200), -(2**200)),
    (1e308, 1e308),
    (5e-324, 5e-324),
    ("\0", "\0"),
    ("\ud800", "\ud800"),
    ("e\u0301", "e\u0301"),
    ("\ufeff\u202e\u200b", "\ufeff\u202e\u200b"),
    ({"": {"": [[]]}}, {"": {"": [[]]}}),
    (True, True),
    ([1, 1.0, True], [1, 1.0, True]),
]


@pytest.mark.parametrize(("result", "expected"), ODD, ids=[ascii(result)[:30] for result, _ in ODD])
def test_live_and_replay_see_the_same_value(result: Any, expected: Any) -> None:
    seen: list[Any] = []

    @tool(effect="once")
    async def odd() -> Any:
        return result

    @agent(version="1")
    async def asker(run: Run) -> None:
        seen.append(await odd())
        await asyncio.sleep(10)

    async def main() -> None:
        clock = ManualClock()
        async with perdure(None, [asker], clock) as app:
            handle = await app.start(asker)
            await app.engine.drive(handle.id, wait=False)
            clock.advance(11)
            assert (await app.engine.drive(handle.id, wait=False)).status == "succeeded"

    run(main())
    live, again = seen
    assert repr(live) == repr(again) == repr(expected)


def test_an_annotated_result_comes_back_as_its_type_live_and_on_replay() -> None:
    seen: list[Any] = []

    @tool(effect="once")
    async def model() -> Model:
        return Model(name="x", at=datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC))

    @agent(version="1")
    async def asker(run: Run) -> None:
        seen.append(await model())
        await asyncio.sleep(10)

    async def main() -> None:
        clock = ManualClock()
        async with perdure(None, [asker], clock) as app:
            handle = await app.start(asker)
            await app.engine.drive(handle.id, wait=False)
            clock.advance(11)
            await app.engine.drive(handle.id, wait=False)

    run(main())
    assert seen == [Model(name="x", at=datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC))] * 2


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")

    __str__ = __repr__


def _deep(levels: int) -> list[Any]:
    nested: list[Any] = []
    for _ in range(levels):
        nested = [nested]
    return nested


def _circular() -> list[Any]:
    ring: list[Any] = []
    ring.append(ring)
    return ring


UNRECORDABLE: dict[str, Any] = {
    "set": {1, 2},
    "bytes": b"raw",
    "nan": float("nan"),
    "infinity": [1, float("inf")],
    "int keys": {1: "a"},
    "object": object(),
    "hostile": Unprintable(),
    "hostile key": {Unprintable(): 1},
    "circular": _circular(),
    "deep": _deep(5000),
    "generator": (at for at in (1, 2)),
    "digits": 10**5000,
    "surrogates": "\ud83d\ude00",
}


@pytest.mark.parametrize("name", UNRECORDABLE)
@pytest.mark.parametrize("effect", ["once", "keyed", "idempotent"])
def test_an_effect_whose_result_cannot_be_recorded_is_not_repeated_for_that(tmp_path: Path, name: str, effect: Any) -> None:
    performed: list[int] = []

    @tool(effect=effect)
    async def act_oddly(call: Call) -> Any:
        performed.append(call.attempt)
        return UNRECORDABLE[name]

    @agent(version="1")
    async def asker(run: Run) -> list[Any]:
        try:
            await act_oddly()
        except ResultNotEncodable as failed:
            await asyncio.sleep(10)
            return [failed.kind, failed.attempts, failed.tool]
        return []

    async def main() -> tuple[Any, list[str]]:
        clock = ManualClock()
        async with perdure(tmp_path / "db", [asker], clock) as app:
            await app.start(asker, id="r")
            assert (await app.engine.drive("r", wait=False)).status == "waiting"
        clock.advance(11)
        async with perdure(tmp_path / "db", [asker], clock) as app:
            return await app.handle("r").result(), outline(await app.handle("r").events())

    output, lines = run(main())
    assert output == ["not_encodable", 1, "act_oddly"]
    assert lines[1:3] == ["initiated act_oddly 1/1", "completed 1/1 unrecordable"]
    assert performed == [1]


def test_a_coroutine_that_was_not_awaited_in_a_tool_is_named() -> None:
    async def inner() -> int:
        return 1

    @tool(effect="once")
    async def forgetful() -> Any:
        return inner()

    @agent(version="1")
    async def asker(run: Run) -> str:
        try:
            await forgetful()
        except ToolFailed as failed:
            return failed.message
        return ""

    async def main() -> str:
        async with perdure(None, [asker]) as app:
            return str(await app.run(asker))

    assert "was an await forgotten?" in run(main())


# -- large payloads -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("size", [65_534, 65_536, 65_537, 2_000_000])
def test_payloads_above_the_limit_go_to_the_blob_store_and_come_back_whole(tmp_path: Path, size: int) -> None:
    """The same for arguments, results, inputs and outputs; the event has digest, size and a preview."""

    @agent(version="1")
    async def copier(run: Run, text: str) -> str:
        copied = await act(text)
        await asyncio.sleep(10)
        return f"{copied}!"

    async def main() -> tuple[Any, list[Event]]:
        clock = ManualClock()
        async with perdure(tmp_path / "db", [copier], clock) as app:
            await app.start(copier, "é" * (size // 2), id="r")
            await app.engine.drive("r", wait=False)
        clock.advance(11)
        async with perdure(tmp_path / "db", [copier], clock) as app:
            return await app.handle("r").result(), await app.handle("r").events()

    output, events = run(main())
    assert output == "é" * (size // 2) + "!"
    intent = next(event.body for event in events if isinstance(event.body, ToolCallInitiated))
    assert intent.args is not None
    assert isinstance(intent.args.blob, str) == (size >= 65_534 - 20)
    if isinstance(intent.args.blob, str):
        assert intent.args.inline is None
        assert isinstance(intent.args.preview, str)
        assert len(intent.args.preview) <= 200


def test_an_agent_that_returns_too_much_has_failed_and_says_so() -> None:
    @agent(version="1")
    async def wordy(run: Run) -> str:
        return "x" * (64 * 1024 * 1024)

    async def main() -> None:
        async with perdure(None, [wordy]) as app:
            await app.run(wordy)

    with pytest.raises(RunFailed, match="store it elsewhere and record a reference"):
        run(main())
