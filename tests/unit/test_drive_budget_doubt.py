"""Budgets after deaths of workers (T33), on both stores.

A call that is resolved as happened is charged. The cost of a call in doubt stays reserved.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from tests.unit.drive_tools import SETTINGS, ManualClock, local, outline, run, status_of, until
from tests.unit.postgres_tools import cleared

from perdure import (
    Agent,
    Budget,
    Call,
    ChildFailed,
    Conflict,
    Fatal,
    NeedsAttention,
    NotSent,
    Outcome,
    Perdure,
    Retry,
    RetryLater,
    Run,
    ToolFailed,
    Usage,
    agent,
    tool,
)
from perdure.core import codec, identity
from perdure.core.budget import NOTHING, Amounts
from perdure.core.events import Event, ToolCallInitiated, ToolCallResolved
from perdure.inspect.verify import verify_run
from perdure.models import Answer, Price, Request, Scripted
from perdure.store.api import Append, Charge, Committed, Ledger, Served

CENT = 10_000  # micro-dollars
CENTS = Usage(usd_micros=10 * CENT)


@pytest.fixture(params=["sqlite", "postgres"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of a new journal."""
    return cleared(request.getfixturevalue("postgres")) if request.param == "postgres" else f"sqlite:///{tmp_path / 'db'}"


def perdure(where: str, agents: Iterable[Agent[Any, Any]], **options: Any) -> Perdure:
    return Perdure(where, agents, settings=SETTINGS, clock=ManualClock(), **options)


async def crash(where: str, agents: Iterable[Agent[Any, Any]], run_id: str, begun: asyncio.Event) -> None:
    """Drive the run until the event is set, and then die."""
    begun.clear()
    async with perdure(where, agents) as app:
        driving = asyncio.create_task(app.engine.drive(run_id, wait=False))
        waiting = asyncio.create_task(begun.wait())
        await asyncio.wait((driving, waiting), return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        app.abort()
        await driving


def ledger(app: Perdure, run_id: str) -> Ledger:
    return app.store.ledgers(run_id)[-1]


def money(app: Perdure, run_id: str) -> tuple[int, int]:
    """Spent and reserved, in cents."""
    found = ledger(app, run_id)
    return found.spent.usd_micros // CENT, found.reserved.usd_micros // CENT


async def shown(app: Perdure) -> int:
    """What `perdure costs` shows, in cents."""
    return sum(row.usd_micros for row in await app.costs("run")) // CENT


def check_verified(app: Perdure) -> None:
    """The journals and the ledgers say the same."""
    for row in app.store.list():
        assert verify_run(app.store, row).problem is None, verify_run(app.store, row)


class Shop:
    """What was really bought."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.bought: list[str] = []
        self.dies = True


def hanging(shop: Shop, **options: Any) -> Any:
    """A tool that costs 10 cents; its effect happens, and its worker dies before it returns."""

    @tool(name="buy", cost="0.10", **options)
    async def buy(call: Call) -> str:
        shop.bought.append(call.key)
        shop.begun.set()
        if shop.dies:
            await asyncio.Event().wait()
        return "bought"

    return buy


def one_call_of(bought: Any) -> Agent[Any, Any]:
    @agent(version="1")
    async def buyer(run: Run) -> str:
        try:
            return str(await bought())
        except ToolFailed as failed:
            return failed.kind

    return buyer


# -- the hole ---------------------------------------------------------------------------------------------------------------
@pytest.mark.full
def test_T33_a_budget_bounds_the_effects_of_workers_that_die_after_each_of_them(where: str) -> None:
    shop = Shop()
    buy = hanging(shop)

    @buy.reconcile
    async def _(call: Call) -> Outcome:
        return Outcome.happened("bought") if call.key in shop.bought else Outcome.not_happened()

    @agent(version="1", budget=Budget(usd="0.50"))
    async def buyer(run: Run) -> list[str]:
        return [await buy() for _ in range(20)]

    async def main() -> None:
        async with perdure(where, [buyer]) as app:
            await app.start(buyer, id="r")
        for _ in range(20):
            await crash(where, [buyer], "r", shop.begun)
        async with perdure(where, [buyer]) as app:
            with pytest.raises(NeedsAttention, match=r"the budget of run r is used up: \$0.50 of \$0.50"):
                await app.handle("r").result()
            assert (len(shop.bought), money(app, "r"), await shown(app)) == (5, (50, 0), 50)
            check_verified(app)

    run(main())


# -- a person settles it ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("answer", "charged"),
    [({"happened": "bought"}, 10), ({"did_not_happen": True, "final": True}, 0), ({"fail": "nobody knows"}, 10)],
    ids=["happened", "did not happen", "failed"],
)
@pytest.mark.parametrize("seen", [True, False], ids=["in doubt", "cut off"])
def test_a_call_in_doubt_stays_reserved_until_a_person_has_settled_it(where: str, answer: Any, charged: int, seen: bool) -> None:
    shop = Shop()
    buyer = one_call_of(hanging(shop))

    async def main() -> None:
        async with perdure(where, [buyer]) as app:
            await app.start(buyer, id="r", budget=Budget(usd="0.50"))
        await crash(where, [buyer], "r", shop.begun)
        shop.dies = False
        async with perdure(where, [buyer]) as app:
            if seen:
                assert (await app.engine.drive("r")).attention == "in_doubt"
            assert (money(app, "r"), await shown(app)) == ((0, 10), 0)
            await app.resolve("r", 1, by="ann", **answer)
            assert (money(app, "r")[0], await shown(app)) == (charged, charged)
            check_verified(app)  # before any worker has seen the answer
            await app.handle("r").result()
            again = 10 * ("did_not_happen" in answer)
            assert (money(app, "r"), await shown(app)) == ((charged + again, 0), charged + again)
            check_verified(app)

    run(main())


def test_what_is_in_doubt_in_a_child_is_missing_for_its_siblings_until_it_is_settled(where: str) -> None:
    shop = Shop()
    buy = hanging(shop)

    @tool(cost="0.10")
    async def other() -> str:
        return "other"

    @agent(version="1")
    async def child(run: Run, which: int) -> str:
        if which == 0:
            return str(await buy())
        await run.receive("go")
        return await other()

    @agent(version="1", budget=Budget(usd="0.15", on_exceed="fail"))
    async def parent(run: Run) -> list[str]:
        return [str(one) for one in await asyncio.gather(child(0), child(1), return_exceptions=True)]

    async def main() -> None:
        async with perdure(where, [parent]) as app:
            await app.start(parent, id="p")
        await crash(where, [parent], "p", shop.begun)
        clock = ManualClock()
        async with Perdure(where, [parent], settings=SETTINGS, clock=clock) as app:
            await app.engine.drive("p", wait=False)
            await until(lambda: status_of(app, "p/1") == "needs_attention")
            assert money(app, "p/1") == (0, 10)
            await app.signal("p/2", "go")
            await app.engine.drive("p/2", wait=False)
            clock.advance(901)  # the run has waited for money that other calls have reserved
            await app.engine.drive("p/2", wait=False)
            assert "the budget of run p is used up" in str((await app.handle("p/2").state()).failure)
            await app.resolve("p/1", 1, happened="bought", by="ann")
            assert (await app.handle("p").result())[0] == "bought"
            assert money(app, "p") == (10, 0)
            check_verified(app)

    run(main())


def test_an_answer_to_a_run_that_is_being_driven_is_charged_once(where: str) -> None:
    """The answer goes through the inbox: the holder charges it, and not its sender."""
    release = asyncio.Event()

    @tool(cost="0.10", timeout=0.01)
    async def buy() -> None:
        await asyncio.Event().wait()

    @tool(effect="read")
    async def slow() -> None:
        await release.wait()

    @agent(version="1", budget=Budget(usd="0.50"))
    async def both(run: Run) -> list[Any]:
        return list(await asyncio.gather(buy(), slow()))

    async def main() -> None:
        async with perdure(where, [both]) as app:
            await app.start(both, id="r")
            driving = asyncio.create_task(app.handle("r").result())
            await until(lambda: any(event.type == "tool_call_in_doubt" for event in app.store.read("r")))
            assert money(app, "r") == (0, 10)
            await app.resolve("r", 1, happened="bought", by="ann")
            await until(lambda: any(event.type == "tool_call_resolved" for event in app.store.read("r")))
            release.set()
            assert await driving == ["bought", None]
            assert (money(app, "r"), await shown(app)) == ((10, 0), 10)
            check_verified(app)

    run(main())


def test_an_answer_from_the_version_before_is_charged_by_the_worker_that_reads_it(where: str) -> None:
    """The old answer has no amount."""
    release = asyncio.Event()

    @tool(cost="0.10", timeout=0.01)
    async def buy() -> None:
        await asyncio.Event().wait()

    @tool(effect="read")
    async def slow() -> None:
        await release.wait()

    @agent(version="1", budget=Budget(usd="0.50"))
    async def both(run: Run) -> list[Any]:
        return list(await asyncio.gather(buy(), slow()))

    async def main() -> None:
        async with perdure(where, [both]) as app:
            await app.start(both, id="r")
            driving = asyncio.create_task(app.handle("r").result())
            await until(lambda: any(event.type == "tool_call_in_doubt" for event in app.store.read("r")))
            answer = ToolCallResolved("happened", "ann", result=codec.pack(b'"bought"')[0])
            app.store.post("r", 1, answer, event_id="a" * 32, now=app.clock.now(), expect=lambda row: None)
            await until(lambda: any(event.type == "tool_call_resolved" for event in app.store.read("r")))
            release.set()
            assert await driving == ["bought", None]
            assert (money(app, "r"), await shown(app)) == ((10, 0), 10)
            check_verified(app)

    run(main())


# -- usage that the tool itself reports -------------------------------------------------------------------------------
@pytest.mark.parametrize(("said", "at_first", "in_the_end"), [("0.02", (2, 8), 10), ("0.30", (30, 0), 30), ("0", (0, 10), 10)])
def test_what_an_attempt_in_doubt_has_said_is_not_charged_twice(where: str, said: str, at_first: Any, in_the_end: int) -> None:
    @tool(cost="0.10", timeout=0.01)
    async def buy(call: Call) -> None:
        call.spend(usd=said)
        await asyncio.Event().wait()

    async def main() -> None:
        async with perdure(where, [buyer := one_call_of(buy)]) as app:
            await app.start(buyer, id="r", budget=Budget(usd="0.50"))
            assert (await app.engine.drive("r")).attention == "in_doubt"
            assert money(app, "r") == at_first
            await app.resolve("r", 1, happened="bought", by="ann")
            await app.handle("r").result()
            assert (money(app, "r"), await shown(app)) == ((in_the_end, 0), in_the_end)
            check_verified(app)

    run(main())


@pytest.mark.parametrize(("said", "charged"), [(None, 10), ("0", 0), ("0.03", 3), ("0.30", 30)])
@pytest.mark.parametrize("effect", ["read", "once", "transaction"])
def test_a_tool_that_says_nothing_is_charged_what_was_declared(where: str, effect: Any, said: str | None, charged: int) -> None:
    @tool(effect=effect, cost="0.10")
    def buy(call: Call) -> str:
        if said is not None:
            call.spend(usd=said)
        return "bought"

    async def main() -> None:
        async with perdure(where, [buyer := one_call_of(buy)]) as app:
            assert await app.run(buyer, id="r", budget=Budget(usd="0.50")) == "bought"
            assert (money(app, "r"), await shown(app)) == ((charged, 0), charged)
            check_verified(app)

    run(main())


# -- several attempts -----------------------------------------------------------------------------------------------------------
def test_attempts_under_one_key_cost_once(where: str) -> None:
    """The service drops duplicates of the key.

    The amount that was reserved for the attempt that was cut off covers the next.
    """
    shop = Shop()
    buyer = one_call_of(hanging(shop, effect="keyed"))

    async def main() -> None:
        async with perdure(where, [buyer]) as app:
            await app.start(buyer, id="r", budget=Budget(usd="0.15"))
        await crash(where, [buyer], "r", shop.begun)
        await crash(where, [buyer], "r", shop.begun)
        assert len(shop.bought) == 2, "there was enough reserved for the second attempt"
        shop.dies = False
        async with perdure(where, [buyer]) as app:
            assert money(app, "r") == (0, 10)
            assert await app.handle("r").result() == "bought"
            assert (len(shop.bought), len(set(shop.bought)), money(app, "r"), await shown(app)) == (3, 1, (10, 0), 10)
            check_verified(app)

    run(main())


def test_a_keyed_call_that_was_cut_off_is_not_free_because_the_next_attempt_was_not_sent(where: str) -> None:
    shop = Shop()

    @tool(effect="keyed", cost="0.10", retry=Retry(attempts=1))
    async def buy(call: Call) -> str:
        shop.begun.set()
        if call.attempt == 1:
            await asyncio.Event().wait()
        raise NotSent("nobody there")

    async def main() -> None:
        async with perdure(where, [buyer := one_call_of(buy)]) as app:
            await app.start(buyer, id="r", budget=Budget(usd="0.50"))
        await crash(where, [buyer], "r", shop.begun)
        async with perdure(where, [buyer]) as app:
            assert (await app.engine.drive("r")).attention == "in_doubt"
            assert money(app, "r") == (0, 10)
            await app.resolve("r", 1, happened="bought", by="ann")
            assert await app.handle("r").result() == "bought"
            assert money(app, "r") == (10, 0)
            check_verified(app)

    run(main())


def test_an_attempt_that_was_not_sent_adds_nothing_to_what_an_attempt_before_it_may_have_cost(where: str) -> None:
    @tool(effect="keyed", cost="0.10", timeout=0.01, retry=Retry(attempts=2, base=0, jitter=0))
    async def buy(call: Call) -> str:
        if call.attempt == 2:
            raise NotSent("nobody there")
        call.spend(usd="0.02")
        await asyncio.Event().wait()
        return "never"

    async def main() -> None:
        async with perdure(where, [buyer := one_call_of(buy)]) as app:
            await app.start(buyer, id="r", budget=Budget(usd="0.50"))
            assert (await app.engine.drive("r")).attention == "in_doubt"
            assert money(app, "r") == (2, 8)
            await app.resolve("r", 1, happened="bought", by="ann")
            assert await app.handle("r").result() == "bought"
            assert (money(app, "r"), await shown(app)) == ((10, 0), 10)
            check_verified(app)

    run(main())


def test_a_keyed_call_that_was_cut_off_may_have_happened_whatever_the_next_attempt_says(where: str) -> None:
    """The agent was told that the call failed, but the attempt in which its worker died may have happened."""
    shop = Shop()

    @tool(effect="keyed", retry=Retry(attempts=1))
    async def buy(call: Call) -> str:
        shop.begun.set()
        if call.attempt == 1:
            await asyncio.Event().wait()
        raise Fatal("no")

    async def main() -> None:
        async with perdure(where, [buyer := one_call_of(buy)]) as app:
            await app.start(buyer, id="r")
        await crash(where, [buyer], "r", shop.begun)
        async with perdure(where, [buyer]) as app:
            assert (await app.engine.drive("r")).attention == "in_doubt"
            assert "in_doubt 1/2" in outline(app.store.read("r"))

    run(main())


@pytest.mark.parametrize("effect", ["read", "idempotent"])
def test_each_attempt_that_is_simply_made_again_costs(where: str, effect: Any) -> None:
    shop = Shop()
    buyer = one_call_of(hanging(shop, effect=effect))

    async def main() -> None:
        async with perdure(where, [buyer]) as app:
            await app.start(buyer, id="r", budget=Budget(usd="0.25"))
        await crash(where, [buyer], "r", shop.begun)
        await crash(where, [buyer], "r", shop.begun)
        async with perdure(where, [buyer]) as app:
            assert (money(app, "r"), await shown(app)) == ((10, 10), 10)
            row = await app.engine.drive("r")
            assert (row.attention, len(shop.bought)) == ("budget", 2)
            shop.dies = False
            await app.unpause("r", add=Budget(usd="0.05"))
            assert await app.handle("r").result() == "bought"
            assert (len(shop.bought), money(app, "r"), await shown(app)) == (3, (30, 0), 30)
            (cost,) = await app.costs("run")
            assert (cost.calls, cost.lost) == (1, 0)
            check_verified(app)

    run(main())


@pytest.mark.parametrize(
    ("error", "charged"),
    [
        (TimeoutError("late"), 10),
        (ConnectionResetError("reset"), 10),
        (NotSent("nobody there"), 0),
        (RetryLater("busy", after=0), 0),
        (PermissionError("no"), 0),
    ],
    ids=lambda one: type(one).__name__ if isinstance(one, Exception) else f"{one} cents",
)
def test_a_reading_without_an_answer_is_charged_and_one_that_was_refused_is_not(where: str, error: Exception, charged: int) -> None:
    @tool(effect="read", cost="0.10", retry=Retry(attempts=1))
    async def search() -> str:
        raise error

    async def main() -> None:
        async with perdure(where, [searcher := one_call_of(search)]) as app:
            await app.run(searcher, id="r", budget=Budget(usd="0.50"))
            assert (money(app, "r"), await shown(app)) == ((charged, 0), charged)
            check_verified(app)

    run(main())


@pytest.mark.parametrize(("said", "charged"), [(None, 10), ("0.03", 3)])
def test_a_reading_that_a_drain_has_stopped_is_charged(where: str, said: str | None, charged: int) -> None:
    begun = asyncio.Event()

    @tool(effect="read", cost="0.10")
    async def search(call: Call) -> str:
        if said is not None:
            call.spend(usd=said)
        begun.set()
        if call.attempt == 1:
            await asyncio.Event().wait()
        return "found"

    async def main() -> None:
        async with perdure(where, [searcher := one_call_of(search)]) as app:
            await app.start(searcher, id="r", budget=Budget(usd="0.50"))
            stop = asyncio.Event()
            working = asyncio.create_task(app.work(stop=stop))
            await begun.wait()
            worker = local(app)._worker
            assert worker is not None
            worker._drives["r"].drain()
            worker._drives["r"].stop_attempts()
            await until(lambda: len(begun_attempts(app)) == 2)
            assert await app.handle("r").result() == "found"
            stop.set()
            await working
            assert (money(app, "r"), await shown(app)) == ((2 * charged, 0), 2 * charged)
            check_verified(app)

    def begun_attempts(app: Perdure) -> list[Any]:
        return [event for event in app.store.read("r") if event.type == "tool_call_initiated"]

    run(main())


# -- models ---------------------------------------------------------------------------------------------------------------------
def test_a_lost_answer_of_a_model_is_charged_as_estimated(where: str) -> None:
    begun = asyncio.Event()

    class Thinking(Scripted):
        dies = True

        async def answer(self, request: Request, call: Call) -> Answer:
            begun.set()
            if self.dies:
                await asyncio.Event().wait()
            return await super().answer(request, call)

    model = Thinking(["yes"], name="small", price=Price(input=1, output=100), max_tokens=1000)  # 10 cents at most

    @agent(version="1", budget=Budget(usd="0.25"))
    async def asker(run: Run) -> str:
        return (await model.ask("well?")).text

    async def main() -> None:
        async with perdure(where, [asker]) as app:
            await app.start(asker, id="r")
        await crash(where, [asker], "r", begun)
        await crash(where, [asker], "r", begun)
        async with perdure(where, [asker]) as app:
            assert money(app, "r") == (10, 10)
            begun.clear()
            assert ((await app.engine.drive("r")).attention, begun.is_set()) == ("budget", False)
            model.dies = False
            await app.unpause("r", add=Budget(usd="0.10"))
            assert await app.handle("r").result() == "yes"
            (cost,) = await app.costs("model")
            assert (cost.group, cost.lost, cost.usd_micros // CENT, cost.tokens_out >= 2000) == ("small", 2, 20, True)
            assert money(app, "r") == (20, 0)
            check_verified(app)

    run(main())


# -- the end of a run -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("effect", "seen"), [("once", True), ("once", False), ("keyed", False), ("read", False)])
def test_a_run_that_is_ended_by_force_is_charged_for_what_may_have_happened(where: str, effect: Any, seen: bool) -> None:
    """No answer about it can come any more: so the parent's budget counts it."""
    shop = Shop()
    buy = hanging(shop, effect=effect)

    @agent(version="1")
    async def child(run: Run) -> None:
        await buy()

    @agent(version="1", budget=Budget(usd="0.50"))
    async def parent(run: Run) -> str:
        try:
            await child()
        except ChildFailed as failed:
            return failed.kind
        return ""

    async def main() -> None:
        async with perdure(where, [parent]) as app:
            await app.start(parent, id="p")
        await crash(where, [parent], "p", shop.begun)
        async with perdure(where, [parent]) as app:
            if seen:
                await app.engine.drive("p", wait=False)
                await until(lambda: status_of(app, "p/1") == "needs_attention")
            await app.cancel("p/1", force=True)
            assert (money(app, "p"), await shown(app)) == ((10, 0), 10)
            assert await app.handle("p").result() == "cancelled"
            assert [(row.group, row.usd_micros // CENT) for row in await app.costs("tool")] == [("buy", 10)]
            assert (await app.handle("p/1").state()).reserved == NOTHING
            check_verified(app)

    run(main())


def test_a_forced_end_that_has_looked_too_early_charges_nothing(where: str) -> None:
    """A person resolves the call between the read of the journal and the end: its cost was charged then."""
    shop = Shop()
    buyer = one_call_of(hanging(shop))

    async def main() -> None:
        async with perdure(where, [buyer]) as app:
            await app.start(buyer, id="r", budget=Budget(usd="0.50"))
        await crash(where, [buyer], "r", shop.begun)
        async with perdure(where, [buyer]) as app:
            assert (await app.engine.drive("r")).attention == "in_doubt"
            end = app.store.end

            def too_late(*args: Any, **options: Any) -> None:
                settled = ToolCallResolved("happened", "bob", result=codec.pack(b'"bought"')[0], usage=CENTS)
                app.store.post("r", 1, settled, event_id="b" * 32, now=app.clock.now(), expect=lambda row: None)
                end(*args, **options)

            app.store.end = too_late  # type: ignore[method-assign]
            with pytest.raises(Conflict, match="has moved on meanwhile"):
                await app.cancel("r", force=True)
            app.store.end = end  # type: ignore[method-assign]
            await app.cancel("r", force=True)
            assert (money(app, "r"), await shown(app)) == ((10, 0), 10)
            check_verified(app)

    run(main())


def test_a_transaction_without_a_result_did_not_happen_and_costs_nothing_at_a_forced_end(where: str) -> None:
    @agent(version="1", budget=Budget(usd="0.50"))
    async def booker(run: Run) -> None: ...

    async def main() -> None:
        async with perdure(where, [booker]) as app:
            await app.start(booker, id="r")
            store, now = app.store, app.clock.now()
            store.register("w", "host:1", 1, now, [Served("booker", "1")])
            (claimed,) = store.claim("w", [Served("booker", "1")], 1, now)
            intents = [ToolCallInitiated("book", "transaction", estimate=CENTS), ToolCallInitiated("buy", "once", estimate=CENTS)]
            events = [
                Event(claimed.row.seq + call, f"{call:032x}", now, claimed.lease.epoch, call, claimed.row.seq, body)
                for call, body in enumerate(intents, 1)
            ]
            sealed = tuple(identity.seal_all(claimed.row.head, events))
            reserved = Charge(reserved=Amounts(usd_micros=20 * CENT), spent=Amounts(calls=2))
            assert store.append([Append(claimed.lease, claimed.row.seq, sealed, charge=reserved)]) == [Committed()]
            store.unregister("w", now)
            await app.cancel("r", force=True)
            assert (money(app, "r"), await shown(app)) == ((10, 0), 10)
            check_verified(app)

    run(main())


# -- journals of the version before ------------------------------------------------------------------------------------------------
def test_a_doubt_that_the_version_before_gave_free_is_reserved_again_by_the_next_worker(tmp_path: Path) -> None:
    """It gave the reservation back when it recorded the doubt, and charged nothing."""
    import apsw

    shop = Shop()
    buyer = one_call_of(hanging(shop))
    where = f"sqlite:///{tmp_path / 'db'}"

    async def main() -> None:
        async with perdure(where, [buyer]) as app:
            await app.start(buyer, id="r", budget=Budget(usd="0.50"))
        await crash(where, [buyer], "r", shop.begun)
        async with perdure(where, [buyer]) as app:
            assert (await app.engine.drive("r")).attention == "in_doubt"
        connection = apsw.Connection(str(tmp_path / "db"))
        connection.execute("UPDATE perdure_budgets SET reserved_usd_micros = 0; DELETE FROM perdure_reserved")
        connection.close()
        async with perdure(where, [buyer]) as app:
            check_verified(app)
            await app.unpause("r", by="ann")
            assert (await app.engine.drive("r")).attention == "in_doubt"
            assert money(app, "r") == (0, 10)
            await app.resolve("r", 1, happened="bought", by="ann")
            assert await app.handle("r").result() == "bought"
            assert money(app, "r") == (10, 0)
            check_verified(app)

    run(main())


def test_a_run_without_a_budget_shows_its_costs_too(where: str) -> None:
    shop = Shop()
    buyer = one_call_of(hanging(shop))

    async def main() -> None:
        async with perdure(where, [buyer]) as app:
            await app.start(buyer, id="r")
        await crash(where, [buyer], "r", shop.begun)
        async with perdure(where, [buyer]) as app:
            await app.engine.drive("r")
            await app.resolve("r", 1, happened="bought", by="ann")
            await app.handle("r").result()
            assert await shown(app) == 10
            assert app.store.ledgers("r") == []
            check_verified(app)

    run(main())
