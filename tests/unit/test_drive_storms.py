"""Faults in the driving of a run that the storm tests found."""

from __future__ import annotations

import asyncio
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from tests.unit.drive_tools import SETTINGS, local, outline, perdure, run, until, worker_of

from perdure import Call, Run, agent, tool
from perdure.core.events import Effect, ToolCallResolved
from perdure.engine.clock import Clock
from perdure.engine.local.leases import Renewer, Watchdog
from perdure.errors import StoreUnavailable
from perdure.store.open import open_store


@pytest.mark.parametrize("effect", ["once", "keyed"])
def test_a_call_that_a_person_says_did_not_happen_begins_again_once(tmp_path: Path, effect: Effect) -> None:
    """The answer came while its worker was only silent.

    The worker that takes over reads it, makes the call, and has no doubt.
    """
    made: list[int] = []

    @tool(effect=effect)
    async def pay(call: Call) -> str:
        made.append(call.attempt)
        if call.attempt == 1:
            await asyncio.sleep(30)
        return "paid"

    @agent(version="1")
    async def payer(run: Run) -> str:
        return str(await pay())

    async def main() -> Any:
        async with perdure(tmp_path / "db", [payer]) as first:
            await first.start(payer, id="r")
            driving = asyncio.create_task(first.engine.drive("r"))
            await until(lambda: made == [1])
            worker_of(first)._stop_listening()
            body = ToolCallResolved("did_not_happen", by="ann", attempt=1)
            assert not first.store.post("r", 1, body, event_id="0" * 32, now=first.clock.now(), expect=lambda row: None)
            first.abort()  # as a crash would
            driving.cancel()
        async with perdure(tmp_path / "db", [payer]) as second:
            return await second.handle("r").result(), outline(await second.handle("r").events())

    result, journal = run(main())
    assert result == "paid"
    assert made == [1, 2]
    assert journal[2:] == ["resolved 1/1 did_not_happen by ann", "initiated pay 1/2", "completed 1/2", "run_succeeded"]


@agent(version="1")
async def quick(run: Run) -> str:
    return "done"


def test_leases_that_ran_out_once_were_not_held_all_the_time_however_often_they_are_renewed_after(tmp_path: Path) -> None:
    async def main() -> None:
        with closing(open_store(f"sqlite:///{tmp_path}/db")) as store:
            clock = Clock()
            store.register("w", "w", 1, clock.now())
            renewer = Renewer(store, "w", clock, 0.2, Watchdog(asyncio.get_running_loop(), lambda: ""))
            begun_s = time.monotonic()
            assert renewer.has_held_since(begun_s)
            time.sleep(0.25)  # like a process that is stopped: no thread renews the lease
            assert not renewer.has_held_since(begun_s)
            renewer.start()
            await until(lambda: renewer.has_held_since(time.monotonic()))
            assert not renewer.has_held_since(begun_s)
            again_s = time.monotonic()
            await asyncio.sleep(0.3)
            assert renewer.has_held_since(again_s)
            renewer.stop()

    run(main())


def test_a_worker_that_cannot_renew_its_leases_claims_nothing_until_it_can(tmp_path: Path) -> None:
    async def main() -> list[str]:
        seen: list[str] = []
        async with perdure(tmp_path / "db", [quick], clock=Clock(), settings=structs.replace(SETTINGS, lease_s=0.3)) as app:
            serving = asyncio.create_task(app.work())
            await until(lambda: local(app)._worker is not None)
            store, renew = app.store, app.store.renew

            def fail(worker: str, now: int) -> None:
                raise StoreUnavailable("nobody answers")

            store.renew = fail  # type: ignore[method-assign]
            await asyncio.sleep(0.45)
            await app.start(quick, id="r")
            await asyncio.sleep(0.5)
            seen.append((await app.handle("r").row()).status)
            store.renew = renew  # type: ignore[method-assign]
            await until(lambda: store.get("r").status == "succeeded")  # type: ignore[union-attr]
            seen.append("succeeded")
            app.drain()
            await serving
        return seen

    assert run(main()) == ["queued", "succeeded"]


def test_a_worker_gives_up_what_it_holds_and_does_not_drive(tmp_path: Path) -> None:
    """G6: its claim has arrived, and the answer was lost for longer than any caller waits."""

    async def main() -> list[str]:
        async with perdure(tmp_path / "db", [quick], clock=Clock()) as app:
            await app.start(quick, id="r")
            worker = await local(app)._working()
            # And the answer is lost.
            assert app.store.claim(worker.id, list(worker.agents), 1, app.clock.now(), run_id="r")
            serving = asyncio.create_task(app.work())
            await until(lambda: app.store.get("r").status == "succeeded")  # type: ignore[union-attr]
            app.drain()
            await serving
            return outline(await app.handle("r").events())

    journal = run(main())
    assert journal.count("run_succeeded") == 1


def test_who_drives_a_run_that_its_own_worker_is_just_claiming_waits_along(tmp_path: Path) -> None:
    async def main() -> str:
        async with perdure(tmp_path / "db", [quick], clock=Clock()) as app:
            await app.start(quick, id="r")
            worker = await local(app)._working()
            assert app.store.claim(worker.id, list(worker.agents), 1, app.clock.now(), run_id="r")  # on its way to the loop
            return (await app.engine.drive("r")).status

    assert run(main()) == "succeeded"


def test_nor_is_it_told_that_its_own_worker_has_it_when_that_has_let_go_since(tmp_path: Path) -> None:
    async def main() -> str:
        async with perdure(tmp_path / "db", [quick], clock=Clock()) as app:
            await app.start(quick, id="r")
            worker, claim = await local(app)._working(), app.store.claim

            def refused(*args: Any, **kwargs: Any) -> Any:
                """Our own claim comes first, and is over when another process asks whose claim it was."""
                app.store.claim = claim  # type: ignore[method-assign]
                (held,) = claim(*args, **kwargs)
                try:
                    return claim(*args, **kwargs)
                finally:
                    app.store.release_undriven(worker.id, [("r", held.lease.epoch)], app.clock.now())

            app.store.claim = refused  # type: ignore[method-assign]
            return (await app.engine.drive("r")).status

    assert run(main()) == "succeeded"


def test_whoever_was_out_of_touch_judges_nobody_by_silence_for_a_whole_lease(tmp_path: Path) -> None:
    async def main() -> None:
        with closing(open_store(f"sqlite:///{tmp_path}/db")) as store:
            clock = Clock()
            store.register("w", "w", 1, clock.now())
            renewer = Renewer(store, "w", clock, 0.4, Watchdog(asyncio.get_running_loop(), lambda: ""))
            assert renewer.silence() == 0.4
            time.sleep(0.45)  # as an outage: no sign of life has got through
            assert renewer.silence() > 1e6
            renewer.start()
            await until(lambda: renewer.has_held_since(time.monotonic()))
            assert renewer.silence() > 1e6, "it is back, and so may be everybody else"
            await until(lambda: renewer.silence() == 0.4)
            renewer.stop()

    run(main())


def test_nobody_is_judged_before_the_others_can_have_noticed_that_the_database_is_back(tmp_path: Path) -> None:
    """Each process tries again after its own pause.

    The last one is silent for longer than the others, but it is alive.
    """

    async def main() -> float:
        with closing(open_store(f"sqlite:///{tmp_path}/db")) as store:
            store.pause_s = 1.0
            clock = Clock()
            store.register("w", "w", 1, clock.now())
            renewer = Renewer(store, "w", clock, 0.4, Watchdog(asyncio.get_running_loop(), lambda: ""))
            time.sleep(0.45)
            back_s = time.monotonic()
            renewer.start()
            await until(lambda: renewer.silence() == 0.4)
            renewer.stop()
            return time.monotonic() - back_s

    assert run(main()) > 1.4


def test_a_worker_that_runs_all_the_time_is_not_told_that_it_was_suspended(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        with closing(open_store(f"sqlite:///{tmp_path}/db")) as store:
            clock, beats = Clock(), 0
            store.register("w", "w", 1, clock.now())
            renewer = Renewer(store, "w", clock, 2.0, Watchdog(asyncio.get_running_loop(), lambda: ""))
            renew = store.renew

            def counted(worker: str, now: int) -> None:
                nonlocal beats
                beats += 1
                renew(worker, now)

            store.renew = counted  # type: ignore[method-assign]
            renewer.start()
            await until(lambda: beats >= 8)  # longer than a lease
            renewer.stop()

    run(main())
    assert "did not run" not in caplog.text
