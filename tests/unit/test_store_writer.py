"""Group commit: which writes share a commit, who gets the result, and what a failure does."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from tests.conformance.suite import Held, found, hold_one
from tests.unit.store_tools import raw

from perdure.core.events import ThoughtRecorded
from perdure.errors import StoreError, StoreUnavailable
from perdure.store import writer
from perdure.store.api import Append, Appended, Committed, Refused
from perdure.store.sqlite.store import SqliteStore
from perdure.store.writer import GroupCommit


class CountedStore(SqliteStore):
    """The real store; it says how large its groups were, and can be held up before a commit."""

    def __init__(self, path: Path) -> None:
        super().__init__("sqlite:", path, busy_s=0.05)
        self.groups: list[int] = []
        self.times: list[int] = []
        self.threads: list[str] = []
        self.may_go = threading.Event()
        self.may_go.set()
        self.arrived = threading.Event()

    def append(self, batch: Sequence[Append]) -> list[Appended]:
        self.arrived.set()
        self.may_go.wait()
        self.groups.append(len(batch))
        self.times += [append.at for append in batch]
        self.threads.append(threading.current_thread().name)
        return super().append(batch)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[CountedStore]:
    opened = CountedStore(tmp_path / "journal.db")
    yield opened
    opened.close()


@pytest.fixture(autouse=True)
def on_the_writers_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """No commit counts as cheap, as on a slow disk; tests of commits on the loop's own thread set it themselves."""
    monkeypatch.setattr(writer, "CHEAP_S", -1.0)


def thought(held: Held) -> Append:
    return held.append(ThoughtRecorded("x"))


def submit(group: GroupCommit, append: Append) -> asyncio.Future[Any]:
    future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    group.submit(append, future.set_result)
    return future


def test_what_queues_up_during_a_commit_shares_the_next_one(store: CountedStore) -> None:
    runs = [hold_one(store, f"r{n}") for n in range(10)]

    async def main() -> list[Any]:
        group = GroupCommit(store, asyncio.get_running_loop())
        store.may_go.clear()
        first = submit(group, thought(runs[0]))
        await asyncio.to_thread(store.arrived.wait)
        rest = [submit(group, thought(held)) for held in runs[1:]]
        assert not group.idle
        store.may_go.set()
        answers = await asyncio.gather(first, *rest)
        group.close()
        return answers

    assert asyncio.run(main()) == [Committed()] * 10
    assert store.groups == [1, 9]
    assert set(store.threads) == {"perdure-writer"}


@pytest.mark.parametrize("waits", [True, False])
def test_what_has_waited_in_the_queue_goes_out_with_a_later_time(store: CountedStore, waits: bool) -> None:
    """An approval that has expired meanwhile must not be used (G9)."""
    first, second = hold_one(store, "r1"), hold_one(store, "r2")

    async def main() -> None:
        group = GroupCommit(store, asyncio.get_running_loop())
        store.may_go.clear()
        blocker = submit(group, structs.replace(thought(first), at=1_000_000))
        await asyncio.to_thread(store.arrived.wait)
        queued = submit(group, structs.replace(thought(second), at=1_000_000))
        await asyncio.sleep(0.3 if waits else 0.0)
        store.may_go.set()
        assert await blocker == await queued == Committed()
        group.close()

    asyncio.run(main())
    assert store.times[0] == 1_000_000, "what did not wait is sent as it is"
    assert (store.times[1] >= 1_250_000) == waits, store.times


def test_each_gets_its_own_answer_on_the_loops_thread_in_one_hop(store: CountedStore) -> None:
    one, two = hold_one(store, "r1"), hold_one(store, "r2")
    heard: list[tuple[str, str]] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        hops = 0
        hop = loop.call_soon_threadsafe

        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal hops
            hops += threading.current_thread().name == "perdure-writer"
            return hop(*args, **kwargs)

        loop.call_soon_threadsafe = counted  # type: ignore[method-assign,assignment]
        group = GroupCommit(store, loop)
        store.may_go.clear()
        blocker = submit(group, thought(hold_one(store, "r3")))
        await asyncio.to_thread(store.arrived.wait)
        done = loop.create_future()

        def hear(answer: Appended | Exception) -> None:
            heard.append((type(answer).__name__, threading.current_thread().name))
            if len(heard) == 2:
                done.set_result(None)

        group.submit(thought(one), hear)
        group.submit(thought(Held(two.lease, two.seq - 1, two.head)), hear)
        store.may_go.set()
        await done
        await blocker
        assert hops == 2
        group.close()

    asyncio.run(main())
    assert heard == [("Committed", "MainThread"), ("Refused", "MainThread")]


def test_alone_it_commits_on_the_calling_thread(store: CountedStore) -> None:
    held = hold_one(store, "r")

    async def main() -> None:
        group = GroupCommit(store, asyncio.get_running_loop())
        assert group.idle
        assert group.commit_now(thought(held)) == Committed()
        assert isinstance(group.commit_now(thought(held)), Refused)
        group.close()

    asyncio.run(main())
    assert store.threads == ["MainThread", "MainThread"]


def test_commit_now_joins_the_next_group_when_others_wait_even_on_the_loops_own_thread(store: CountedStore) -> None:
    runs = [hold_one(store, f"r{n}") for n in range(3)]

    async def main() -> None:
        group = GroupCommit(store, asyncio.get_running_loop())
        store.may_go.clear()
        first = submit(group, thought(runs[0]))
        await asyncio.to_thread(store.arrived.wait)
        second = submit(group, thought(runs[1]))
        threading.Timer(0.05, store.may_go.set).start()
        assert group.commit_now(thought(runs[2])) == Committed()
        assert await first == await second == Committed()
        group.close()

    asyncio.run(main())
    assert store.groups[:2] == [1, 2]


def test_a_failure_reaches_every_append_of_its_group_and_the_thread_lives_on(store: CountedStore) -> None:
    runs = [hold_one(store, f"r{n}") for n in range(3)]

    async def main() -> None:
        group = GroupCommit(store, asyncio.get_running_loop())
        with raw_lock(store):
            answers = await asyncio.gather(*(submit(group, thought(held)) for held in runs))
        assert [type(answer) for answer in answers] == [StoreUnavailable] * 3
        assert [found(store, held.lease.run_id).seq for held in runs] == [2, 2, 2]
        assert await submit(group, thought(runs[0])) == Committed()
        group.close()

    asyncio.run(main())


def test_one_callback_that_raises_does_not_keep_the_others_from_their_answers(store: CountedStore) -> None:
    one, two, blocker = hold_one(store, "r1"), hold_one(store, "r2"), hold_one(store, "r3")
    reported: list[Any] = []

    def boom(answer: Appended | Exception) -> None:
        raise ZeroDivisionError(answer)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: reported.append(context["exception"]))
        group = GroupCommit(store, loop)
        store.may_go.clear()
        first = submit(group, thought(blocker))
        await asyncio.to_thread(store.arrived.wait)
        group.submit(thought(one), boom)
        second = submit(group, thought(two))
        store.may_go.set()
        assert await first == await second == Committed()
        group.close()

    asyncio.run(main())
    assert [type(error) for error in reported] == [ZeroDivisionError]


def test_closing_commits_what_is_queued_and_refuses_what_comes_after(store: CountedStore) -> None:
    runs = [hold_one(store, f"r{n}") for n in range(5)]

    async def main() -> None:
        group = GroupCommit(store, asyncio.get_running_loop())
        store.may_go.clear()
        futures = [submit(group, thought(held)) for held in runs]
        threading.Timer(0.05, store.may_go.set).start()
        group.close()
        assert [found(store, held.lease.run_id).seq for held in runs] == [3] * 5
        assert await asyncio.gather(*futures) == [Committed()] * 5
        with pytest.raises(StoreError, match="closed"):
            group.submit(thought(runs[0]), print)
        group.close()

    asyncio.run(main())


def test_a_hundred_runs_from_many_threads_are_all_committed_in_few_groups(store: CountedStore) -> None:
    runs = [hold_one(store, f"r{n}") for n in range(100)]

    async def main() -> None:
        loop = asyncio.get_running_loop()
        group = GroupCommit(store, loop)
        answers: list[Any] = []

        def some(part: list[Held]) -> None:
            for held in part:
                group.submit(thought(held), answers.append)

        await asyncio.gather(*(asyncio.to_thread(some, runs[n::4]) for n in range(4)))
        group.close()
        await asyncio.sleep(0)
        assert answers == [Committed()] * 100

    asyncio.run(main())
    assert sum(store.groups) == 100
    assert all(found(store, f"r{n}").seq == 3 for n in range(100))


class raw_lock:
    """A write transaction of another program on the file."""

    def __init__(self, store: CountedStore) -> None:
        assert store._database.path is not None
        self._connection = raw(store._database.path)

    def __enter__(self) -> None:
        self._connection.execute("BEGIN IMMEDIATE")

    def __exit__(self, *_: object) -> None:
        self._connection.execute("ROLLBACK")
        self._connection.close()


def test_what_one_turn_of_the_loop_submits_shares_one_commit_on_its_own_thread(
    store: CountedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "CHEAP_S", 1.0)
    runs = [hold_one(store, f"r{n}") for n in range(10)]

    async def main() -> list[Any]:
        group = GroupCommit(store, asyncio.get_running_loop())
        answers = await asyncio.gather(*[submit(group, thought(held)) for held in runs])
        group.close()
        return answers

    assert asyncio.run(main()) == [Committed()] * 10
    assert (store.groups, store.threads) == ([10], ["MainThread"])


def test_a_commit_that_costs_each_append_much_moves_the_next_ones_to_the_writers_thread(
    store: CountedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "CHEAP_S", 1e-9)
    held = hold_one(store, "r")

    async def main() -> None:
        group = GroupCommit(store, asyncio.get_running_loop())
        first = thought(held)
        assert await submit(group, first) == Committed()
        again = Held(held.lease, held.seq + 1, first.events[-1].hash)
        assert await submit(group, thought(again)) == Committed()
        group.close()

    asyncio.run(main())
    assert store.threads == ["MainThread", "perdure-writer"]


def test_closing_commits_what_this_turn_of_the_loop_has_submitted(store: CountedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "CHEAP_S", 1.0)
    held = hold_one(store, "r")

    async def main() -> Any:
        group = GroupCommit(store, asyncio.get_running_loop())
        answer = submit(group, thought(held))
        group.close()
        return await answer

    assert asyncio.run(main()) == Committed()
    assert found(store, "r").seq == held.seq + 1


@pytest.mark.parametrize("since", ["before it was submitted", "since it was submitted"])
def test_the_loops_own_thread_does_not_wait_for_a_lock_that_somebody_may_have_for_long(
    store: CountedStore, monkeypatch: pytest.MonkeyPatch, since: str
) -> None:
    """A tool's transaction has begun, at the latest in the same turn of the loop: the writer's thread waits for its end."""
    monkeypatch.setattr(writer, "CHEAP_S", 1.0)
    held = hold_one(store, "r")
    locked = [since == "before it was submitted"]

    async def main() -> Any:
        group = GroupCommit(store, asyncio.get_running_loop(), lambda: locked[0])
        answer = submit(group, thought(held))
        locked[0] = True
        assert await answer == Committed()
        group.close()

    asyncio.run(main())
    assert store.threads == ["perdure-writer"]
