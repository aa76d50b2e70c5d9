"""Approvals that are no longer needed, and answers at the worst moment.

No answer is lost, and no run waits for ever (G6).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.unit.approval_tools import HOUR, approve, check_replay, driven, pending, statuses, the_one, told
from tests.unit.drive_tools import SETTINGS, ManualClock, at_once, local, outline, perdure, run, status_of, until, worker_of

from perdure import Approval, Call, Conflict, NotApproved, Perdure, Rate, Run, RunEnded, Settings, agent, tool
from perdure.core.approval import Vote
from perdure.errors import StoreUnavailable
from perdure.store.api import Append, Appended, ApprovalFilter, RunRow, Store

ASKS = ["run.approve", "tool"]


class Wish:
    """Something that needs a person: asked for by the agent itself, or by a tool's policy."""

    def __init__(self, kind: str, **policy: Any) -> None:
        self.made: list[int] = []

        @tool(effect="once", approval=Approval(**policy))
        async def pay() -> str:
            self.made.append(1)
            return "paid"

        async def ask(run: Run) -> Any:
            return await pay() if kind == "tool" else told(await run.request_approval("go", **policy))

        self.ask: Callable[[Run], Any] = ask


# -- given up by the agent ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ASKS)
@pytest.mark.parametrize("restart", [False, True])
def test_a_timeout_around_an_approval_withdraws_it_and_a_later_yes_is_a_conflict(tmp_path: Path, kind: str, restart: bool) -> None:
    wish = Wish(kind)

    @agent(version="1")
    async def impatient(run: Run) -> str:
        try:
            async with asyncio.timeout(60):
                await wish.ask(run)
        except TimeoutError:
            await asyncio.sleep(60)
            return "went on"
        return "?"

    async def main() -> Any:
        clock = ManualClock()
        async with perdure(tmp_path / "db", [impatient], clock) as app:
            await app.start(impatient, id="r")
            row = await driven(app)
            assert (row.status, row.ready_at) == ("waiting_approval", clock.now() + 60_000_000)
            name = the_one(app)
            clock.advance(60)
            if not restart:
                assert (await driven(app)).status == "waiting"
        async with perdure(tmp_path / "db", [impatient], clock) as app:
            if restart:
                assert (await driven(app)).status == "waiting"
            assert statuses(app) == ["withdrawn"]
            with pytest.raises(Conflict, match=rf"approval {name} was withdrawn by the run at 20\S+Z; there is nothing to decide"):
                await app.approve(name, by="ann")
            clock.advance(60)
            await driven(app)
            check_replay(app, impatient)
            return await app.handle("r").result()

    assert (run(main()), wish.made) == ("went on", [])


@pytest.mark.parametrize("kind", ASKS)
@pytest.mark.parametrize("before", [0, 1])
def test_an_agent_that_returns_before_the_answer_has_the_request_withdrawn(tmp_path: Path, kind: str, before: int) -> None:
    """Also if it asks and returns in the same activation, so that no person has ever seen the request."""
    wish = Wish(kind)

    @agent(version="1")
    async def fickle(run: Run) -> str:
        asked = asyncio.create_task(wish.ask(run))
        await asyncio.sleep(60 * before)
        assert not asked.done()
        return "never mind"

    async def main() -> tuple[str, Any, list[str]]:
        clock = ManualClock()
        async with perdure(tmp_path / "db", [fickle], clock) as app:
            await app.start(fickle, id="r")
            if before:
                assert (await driven(app)).status == "waiting_approval"
                clock.advance(60)
            row = await driven(app)
            check_replay(app, fickle)
            return row.status, await app.handle("r").result(), statuses(app)

    assert run(main()) == ("succeeded", "never mind", ["withdrawn"])
    assert wish.made == []


def test_an_approval_that_nobody_awaits_does_not_keep_the_run_open() -> None:
    @agent(version="1")
    async def careless(run: Run) -> str:
        run.request_approval("go").close()
        return "done"

    async def main() -> tuple[Any, list[str]]:
        async with perdure(None, [careless]) as app:
            await app.start(careless, id="r")
            await driven(app)
            return (await app.handle("r").result()), statuses(app)

    assert run(main()) == ("done", ["withdrawn"])


def test_a_request_that_expires_before_it_is_even_written_down_expires(tmp_path: Path) -> None:
    """Its time is a microsecond, and the clock of this test is the real one."""

    @agent(version="1")
    async def hasty(run: Run) -> list[Any]:
        return told(await run.request_approval("go", expires=0.000_001))

    async def main() -> Any:
        # With these settings a worker keeps a run that continues soon: it must not check such a run needlessly.
        async with Perdure(f"sqlite:///{tmp_path / 'db'}", [hasty], settings=Settings(poll_s=0.01)) as app:
            return await (await app.start(hasty, id="r")).result(timeout=60)

    assert run(main())[1] == "expired"


@pytest.mark.parametrize("kind", ASKS)
@pytest.mark.parametrize("moment", ["before the timer is recorded", "after it, before the withdrawal"])
def test_a_crash_around_a_withdrawal_leads_to_the_same_end(tmp_path: Path, kind: str, moment: str) -> None:
    """The agent has given up; its worker dies before, or after, that is in the journal. The request must not stay for ever."""
    wish = Wish(kind)

    @agent(version="1")
    async def impatient(run: Run) -> str:
        try:
            async with asyncio.timeout(60):
                await wish.ask(run)
        except TimeoutError:
            run.note("gave up")
            return "timed out"
        except NotApproved as error:
            return f"the agent saw {error.outcome}"
        return "?"

    async def main() -> tuple[Any, list[str]]:
        clock = ManualClock()
        async with perdure(tmp_path / "db", [impatient], clock) as app:
            await app.start(impatient, id="r")
            await driven(app)
            clock.advance(60)
            dies_at(app, "append" if moment.startswith("before") else "decide")
            driving = asyncio.create_task(app.engine.drive("r", wait=False))
            await until(lambda: app.store.died)  # type: ignore[attr-defined]
            app.abort()
            await driving
        async with perdure(tmp_path / "db", [impatient], clock) as app:
            row = await driven(app)
            assert row.status == "succeeded", (row.status, row.waiting_for)
            check_replay(app, impatient)
            return await app.handle("r").result(), statuses(app)

    assert run(main()) == ("timed out", ["withdrawn"])
    assert wish.made == []


def dies_at(app: Perdure, method: str) -> None:
    """From here on the store of this app writes nothing more through this method: as if the process had died right there."""
    store: Any = app.store
    store.died = False

    def dead(*_: Any, **__: Any) -> Any:
        store.died = True
        raise StoreUnavailable("this process is dead")

    setattr(store, method, dead)


@pytest.mark.parametrize("give_up", ["timeout", "cancel", "expiry"])
@pytest.mark.parametrize("park", [True, False])
def test_an_approved_call_that_waits_for_its_turn_can_still_be_given_up(give_up: str, park: bool) -> None:
    """Its rate allows the second call only in a minute.

    By then the agent no longer waits for it, or its approval has expired.
    """
    made: list[int] = []

    @tool(effect="once", approval=Approval(expires=30 if give_up == "expiry" else HOUR), rate=Rate(limit=1, per=60))
    async def pay(n: int) -> int:
        made.append(n)
        return n

    @agent(version="1")
    async def payer(run: Run) -> list[Any]:
        async def second() -> Any:
            try:
                async with asyncio.timeout(20 if give_up == "timeout" else None):
                    return await pay(2)
            except TimeoutError:
                return "timed out"
            except NotApproved as error:
                return error.outcome

        both = await asyncio.gather(pay(1), second())
        await asyncio.sleep(120)  # past the time at which its turn would have come
        return list(both)

    async def main() -> tuple[str, list[str]]:
        clock = ManualClock()
        settings = SETTINGS if park else Settings(poll_s=0.002, park_after_s=1e6)
        async with perdure(None, [payer], clock, settings=settings) as app:
            await app.start(payer, id="r")
            await driven(app) if park else None
            driving = asyncio.create_task(driven(app))
            await until(lambda: len(pending(app)) == 2)
            for asked in pending(app):
                await app.approve(asked.approval, by="ann")
            await until(lambda: made)
            await driving if park else None
            if give_up == "cancel":
                await app.cancel("r")
            for _ in range(12):
                await asyncio.sleep(0.01)
                await driven(app) if park else nudge(app)
                clock.advance(20)
            await driven(app) if park else await driving
            check_replay(app, payer)
            return status_of(app, "r"), statuses(app)

    assert run(main()) == (
        "cancelled" if give_up == "cancel" else "succeeded",
        ["consumed", "expired" if give_up == "expiry" else "withdrawn"],
    )
    assert made == [1]


@pytest.mark.parametrize("kind", ASKS)
@pytest.mark.parametrize("database", ["sqlite", "postgres"])
@pytest.mark.parametrize("order", ["message", "yes, message", "message, yes"])
def test_an_agent_that_waits_for_a_message_too_withdraws_the_request_when_the_message_comes(
    tmp_path: Path, request: pytest.FixtureRequest, database: str, kind: str, order: str
) -> None:
    """Of a tool call also after the yes: the call has not begun. The agent's own request is answered by a yes that comes first."""
    wish = Wish(kind)
    url = f"sqlite:///{tmp_path / 'db'}" if database == "sqlite" else str(request.getfixturevalue("postgres_url"))

    @agent(version="1")
    async def attentive(run: Run) -> Any:
        asked = asyncio.ensure_future(wish.ask(run))
        message = asyncio.ensure_future(run.receive("user"))
        await asyncio.wait([asked, message], return_when=asyncio.FIRST_COMPLETED)
        if asked.done():
            return asked.result()
        asked.cancel()
        return message.result()

    async def main() -> tuple[Any, list[str]]:
        async with Perdure(url, [attentive], settings=SETTINGS, clock=ManualClock()) as app:
            await app.start(attentive, id="r")
            await driven(app)
            name = the_one(app)
            for what in order.split(", "):
                await (app.approve(name, by="ann") if what == "yes" else app.signal("r", "user", "stop"))
            while (await driven(app)).status != "succeeded":
                await asyncio.sleep(0.005)
            check_replay(app, attentive)
            return await app.handle("r").result(), statuses(app)

    result, after = run(main())
    answered = kind != "tool" and order == "yes, message"
    assert (result, after) == (([True, "approved", "ann", None, None], ["approved"]) if answered else ("stop", after))
    assert answered or after in (["withdrawn"], ["approved"] if kind != "tool" and order == "message, yes" else ["withdrawn"])
    assert wish.made == []


def nudge(app: Perdure) -> None:
    """The clock is ours: tell the drives that it has moved."""
    for drive in list(worker_of(app)._drives.values()) if local(app)._worker is not None else ():
        asyncio.get_running_loop().call_soon(drive.look_at_clock)


# -- cancelled ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ASKS)
@pytest.mark.parametrize("restart", [False, True])
def test_a_cancel_while_it_waits_for_an_approval_withdraws_it(tmp_path: Path, kind: str, restart: bool) -> None:
    wish = Wish(kind)

    @agent(version="1")
    async def patient(run: Run) -> None:
        await wish.ask(run)

    async def main() -> tuple[str, list[str], list[str]]:
        async with perdure(tmp_path / "db", [patient]) as app:
            await app.start(patient, id="r")
            await driven(app)
            name = the_one(app)
            await app.cancel("r", by="bob")
            if not restart:
                await driven(app)
        async with perdure(tmp_path / "db", [patient]) as app:
            if restart:
                await driven(app)
            with pytest.raises(RunEnded):
                await app.approve(name, by="ann")
            check_replay(app, patient)
            return (await app.handle("r").row()).status, statuses(app), outline(await app.handle("r").events())

    status, after, lines = run(main())
    assert (status, after, wish.made) == ("cancelled", ["withdrawn"], [])
    assert lines[-3:] == ["cancel_requested", "approval_withdrawn", "run_cancelled"]


def test_a_cancel_after_the_yes_and_before_the_start_makes_no_call(tmp_path: Path) -> None:
    wish = Wish("tool")

    @agent(version="1")
    async def patient(run: Run) -> None:
        await wish.ask(run)

    async def main() -> tuple[str, list[str]]:
        async with perdure(tmp_path / "db", [patient]) as app:
            await app.start(patient, id="r")
            await driven(app)
            await approve(app)
            await app.cancel("r", by="bob")
            row = await driven(app)
            check_replay(app, patient)
            return row.status, statuses(app)

    assert run(main()) == ("cancelled", ["withdrawn"])
    assert wish.made == []


def test_an_agent_may_ask_for_an_approval_while_it_cleans_up(tmp_path: Path) -> None:
    wish = Wish("tool")

    @agent(version="1")
    async def tidy(run: Run) -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            await wish.ask(run)

    async def main() -> str:
        async with perdure(tmp_path / "db", [tidy]) as app:
            await app.start(tidy, id="r")
            await driven(app)
            await app.cancel("r")
            row = await driven(app)
            assert pending(app), row
            await approve(app)
            return (await driven(app)).status

    assert run(main()) == "cancelled"
    assert wish.made == [1]


# -- at the worst moment ------------------------------------------------------------------------------------------------
class Interleaved:
    """Does something right before the append that gives a run up is written: what comes between `at_rest` and its commit."""

    def __init__(self, store: Store, then: Callable[[], None]) -> None:
        self._append = store.append
        self._then: Callable[[], None] | None = then
        store.append = self.append  # type: ignore[method-assign]

    def append(self, batch: Sequence[Append]) -> list[Appended]:
        then = self._then
        if then is not None and any(append.row is not None and append.row.release for append in batch):
            self._then = None
            then()
        return self._append(batch)


@pytest.mark.parametrize("kind", ASKS)
def test_a_decision_between_the_resolve_to_park_and_the_park_is_not_lost(kind: str) -> None:
    wish = Wish(kind)
    release = asyncio.Event()

    @tool(effect="read")
    async def companion() -> None:
        await release.wait()

    @agent(version="1")
    async def asker(run: Run) -> Any:
        other = asyncio.create_task(companion())
        answer = await wish.ask(run)
        await other
        return answer

    async def main() -> Any:
        async with perdure(None, [asker]) as app:
            handle = await app.start(asker, id="r")
            driving = asyncio.create_task(app.engine.drive("r", wait=False))
            await until(lambda: pending(app))
            Interleaved(app.store, lambda: decide_here(app, the_one(app)))
            release.set()
            row = await driving
            assert (row.status, row.ready_at) != ("waiting_approval", None), "nobody would ever look again"
            return await handle.result(timeout=60)

    assert run(main()) in ("paid", [True, "approved", "ann", None, None])


def decide_here(app: Perdure, approval: str) -> None:
    at_once(app._control.vote(approval, Vote("ann", True)))


@pytest.mark.full
def test_of_a_thousand_decisions_made_the_moment_they_are_asked_for_none_is_lost() -> None:
    """Another thread says yes as soon as it can see the request: sometimes before the park, sometimes right in it, sometimes after."""
    many = 1000
    made: list[str] = []

    @tool(effect="read")
    async def glance() -> None:
        await asyncio.sleep(0)

    @tool(effect="idempotent", approval=True)
    async def pay(call: Call) -> str:
        made.append(call.key)
        return "paid"

    @agent(version="1")
    async def asker(run: Run) -> str:
        paying = asyncio.create_task(pay())
        for _ in range(3):
            await glance()
        return str(await paying)

    async def main() -> list[str]:
        settings = Settings(poll_s=0.05, park_after_s=0, flush_s=0)
        async with perdure(None, [asker], settings=settings) as app:
            for n in range(many):
                await app.start(asker, id=f"r{n}")
            stop = threading.Event()
            deciding = asyncio.create_task(asyncio.to_thread(decide_all, app, stop))
            working = asyncio.create_task(app.work())
            try:
                await until(lambda: len(made) == many, 60)
            finally:
                stop.set()
                await deciding
                app.drain()
                await working
            return [row.status for n in range(many) if (row := app.store.get(f"r{n}")) is not None]

    assert set(run(main(), 90)) <= {"succeeded", "queued"}
    assert len(set(made)) == many


def decide_all(app: Perdure, stop: threading.Event) -> None:
    while not stop.is_set():
        for row in app.store.approvals(ApprovalFilter()):
            decide_here(app, row.approval)


@pytest.mark.parametrize("when", ["in flight", "before the first step"])
def test_a_tool_proposed_while_its_run_is_handed_over_asks_its_person_later(tmp_path: Path, when: str) -> None:
    wish = Wish("tool")
    begun = asyncio.Event()
    release = asyncio.Event()

    @tool(effect="once")
    async def first() -> None:
        begun.set()
        await release.wait()

    @agent(version="1")
    async def asker(run: Run) -> Any:
        if when == "in flight":
            await first()
        return await wish.ask(run)

    async def main() -> tuple[RunRow, Any]:
        async with perdure(tmp_path / "db", [asker]) as app:
            await app.start(asker, id="r")
            stop = asyncio.Event()
            if when == "in flight":
                driving = asyncio.create_task(app.engine.drive("r", stop=stop))
                await begun.wait()
                stop.set()
                await until(lambda: local(app)._worker is not None and worker_of(app)._drives["r"]._core.closing is not None)
                release.set()
                row = await driving
            else:
                claim = app.store.claim

                def claim_and_stop(*args: Any, **kwargs: Any) -> Any:
                    claimed = claim(*args, **kwargs)
                    stop.set()  # the run is claimed, and its agent has not made its first step
                    return claimed

                app.store.claim = claim_and_stop  # type: ignore[method-assign]
                row = await app.engine.drive("r", stop=stop)
            assert (row.status, statuses(app)) == ("queued", [])
            lines = outline(await app.handle("r").events())
            assert ("tool_call_proposed" in lines) == (when != "in flight")
        async with perdure(tmp_path / "db", [asker]) as app:
            row = await driven(app)
            assert (row.status, wish.made) == ("waiting_approval", [])
            await approve(app)
            await driven(app)
            check_replay(app, asker)
            return row, await app.handle("r").result()

    assert (run(main())[1], wish.made) == ("paid", [1])


@pytest.mark.parametrize("kind", ASKS)
def test_a_store_that_is_busy_when_an_approval_expires_is_asked_again(tmp_path: Path, kind: str) -> None:
    wish = Wish(kind, expires=HOUR)
    refusals: list[int] = []

    @agent(version="1")
    async def asker(run: Run) -> Any:
        try:
            return await wish.ask(run)
        except NotApproved as error:
            return [False, error.outcome]

    async def main() -> Any:
        clock = ManualClock()
        async with perdure(tmp_path / "db", [asker], clock) as app:
            await app.start(asker, id="r")
            await driven(app)
            clock.advance(HOUR)
            decide = app.store.decide

            def busy(*args: Any, **more: Any) -> Any:
                if not refusals:
                    refusals.append(1)
                    raise StoreUnavailable("busy")
                return decide(*args, **more)

            app.store.decide = busy  # type: ignore[method-assign]
            row = await driven(app)
            assert row.status == "succeeded" or row.ready_at is not None, "somebody looks again"
            clock.advance(2)
            await driven(app)
            return await app.handle("r").result(timeout=60)

    assert run(main())[:2] == [False, "expired"]
    assert refusals == [1]


def test_a_store_that_is_busy_when_a_request_is_withdrawn_is_asked_again() -> None:
    """Also by a worker that keeps the run meanwhile, since it goes on so soon."""
    wish = Wish("run.approve")
    refusals: list[int] = []

    @agent(version="1")
    async def fickle(run: Run) -> str:
        asked = asyncio.create_task(wish.ask(run))
        await asyncio.sleep(0)
        asked.cancel()
        return "never mind"

    async def main() -> tuple[str, list[str]]:
        async with Perdure("sqlite://", [fickle], settings=Settings(poll_s=0.01)) as app:
            decide = app.store.decide

            def busy(*args: Any, **more: Any) -> Any:
                if not refusals:
                    refusals.append(1)
                    raise StoreUnavailable("busy")
                return decide(*args, **more)

            app.store.decide = busy  # type: ignore[method-assign]
            handle = await app.start(fickle, id="r")
            return await handle.result(timeout=60), statuses(app)

    assert run(main()) == ("never mind", ["withdrawn"])
    assert refusals == [1]


# -- while it is paused -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ASKS)
@pytest.mark.parametrize("restart", [False, True])
def test_a_decision_while_the_run_is_paused_is_kept_and_acted_on_afterwards(tmp_path: Path, kind: str, restart: bool) -> None:
    wish = Wish(kind)

    @agent(version="1")
    async def asker(run: Run) -> Any:
        return await wish.ask(run)

    async def main() -> Any:
        async with perdure(tmp_path / "db", [asker]) as app:
            await app.start(asker, id="r")
            await driven(app)
            await app.pause("r", by="bob")
            await approve(app)
            row = await app.handle("r").row()
            assert (row.status, row.ready_at, wish.made) == ("paused", None, [])
            if not restart:
                assert await app.unpause("r") == ["r"]
                await driven(app)
        async with perdure(tmp_path / "db", [asker]) as app:
            if restart:
                await app.unpause("r")
                await driven(app)
            check_replay(app, asker)
            return await app.handle("r").result()

    assert run(main()) == ("paid" if kind == "tool" else [True, "approved", "ann", None, None])
