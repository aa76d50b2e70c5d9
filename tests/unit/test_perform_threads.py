"""Threads for sync tools: limited, fair, and no obstacle to the end of the process."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

import pytest

from perdure.engine.threads import Threads

T = TypeVar("T")


class Begun(Generic[T]):
    """A job, and a future for its result."""

    def __init__(self, threads: Threads, work: Callable[[], T]) -> None:
        self.future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self.job = threads.start(work, self.future.set_result)


def test_no_more_than_the_limit_run_at_a_time_and_all_of_them_run():
    lock, running, most = threading.Lock(), 0, 0

    def work() -> int:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.005)
        with lock:
            running -= 1
        return 1

    async def main() -> int:
        threads = Threads(3)
        return sum(await asyncio.gather(*(Begun(threads, work).future for _ in range(30))))

    assert asyncio.run(main()) == 30
    assert most == 3


def test_a_thread_is_used_again():
    async def main() -> set[int]:
        threads = Threads(8)
        seen = set()
        for _ in range(20):
            seen.add(await Begun(threads, threading.get_ident).future)
            await asyncio.sleep(0.002)  # until the thread is back and idle
        return seen

    assert len(asyncio.run(main())) <= 2


def test_an_abandoned_job_gives_its_place_to_the_next_and_its_thread_ends_with_it():
    release = threading.Event()

    async def main() -> tuple[str, int]:
        threads = Threads(1)
        stuck = Begun(threads, lambda: release.wait(30))
        waiting = Begun(threads, lambda: "served")
        await asyncio.sleep(0.02)
        assert not waiting.future.done()
        threads.abandon(stuck.job)
        threads.abandon(stuck.job)  # twice is once: the limit stays
        served = await asyncio.wait_for(waiting.future, 60)
        release.set()
        await stuck.future
        counted = await asyncio.gather(*(Begun(threads, threading.active_count).future for _ in range(5)))
        return served, max(counted)

    before = threading.active_count()
    served, most = asyncio.run(main())
    assert served == "served"
    assert most <= before + 2  # the thread that counts, and the abandoned thread that is ending


def test_an_abandoned_job_gives_its_place_to_one_that_comes_later():
    release = threading.Event()

    async def main() -> str:
        threads = Threads(1)
        stuck = Begun(threads, lambda: release.wait(30))
        await asyncio.sleep(0.02)
        threads.abandon(stuck.job)
        return await asyncio.wait_for(Begun(threads, lambda: "served").future, 60)

    assert asyncio.run(main()) == "served"
    release.set()


def test_a_job_that_ended_before_it_was_abandoned_frees_nothing_twice():
    lock, running, most = threading.Lock(), 0, 0

    def work() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.01)
        with lock:
            running -= 1

    async def main() -> None:
        threads = Threads(1)
        ended = Begun(threads, lambda: None)
        await ended.future
        await asyncio.sleep(0.01)
        threads.abandon(ended.job)
        await asyncio.gather(*(Begun(threads, work).future for _ in range(4)))

    asyncio.run(main())
    assert most == 1


def test_a_job_that_no_thread_has_begun_can_be_taken_back():
    ran: list[int] = []
    release = threading.Event()

    async def main() -> tuple[bool, bool]:
        threads = Threads(1)
        first = Begun(threads, lambda: release.wait(30))
        second = Begun(threads, lambda: ran.append(1))
        await asyncio.sleep(0.02)
        taken = threads.withdraw(second.job), threads.withdraw(first.job)
        release.set()
        await first.future
        await Begun(threads, lambda: None).future
        return taken

    assert asyncio.run(main()) == (True, False)
    assert ran == []


def test_an_answer_for_a_closed_loop_is_dropped_with_a_word(caplog):
    release = threading.Event()

    async def main() -> None:
        Threads(1).start(lambda: release.wait(30), print)
        await asyncio.sleep(0.01)

    with caplog.at_level(logging.WARNING, "perdure.worker"):
        asyncio.run(main())
        release.set()
        until = time.monotonic() + 60
        while not caplog.records and time.monotonic() < until:
            time.sleep(0.005)
    assert "its outcome True is dropped" in caplog.text


@pytest.mark.parametrize("way", ["asyncio.run(main())", "asyncio.run(main()); sys.exit(7)"])
def test_a_tool_that_never_returns_does_not_keep_the_process_alive(way):
    program = (
        "import asyncio, sys, threading\n"
        "from perdure.engine.threads import Threads\n"
        "async def main():\n    Threads(1).start(threading.Event().wait, print)\n    await asyncio.sleep(0.05)\n" + way
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == (7 if "exit" in way else 0), done.stderr
    assert done.stderr == ""
