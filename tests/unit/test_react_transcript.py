"""A conversation after the end of its run.

Open calls get a text with what is known, and the conversation can continue.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.unit.approval_tools import the_one
from tests.unit.drive_tools import ManualClock, run, until
from tests.unit.react_tools import ByTurn, Model, add, app_of, ended, lookup, wants

from perdure import Budget, InvalidInput, NotFound, Perdure, ReAct, Run, Settings, agent, tool
from perdure.models import Answer
from perdure.sync import Perdure as BlockingPerdure

Plain = list[dict[str, Any]]


def tail(conversation: Plain, count: int) -> list[str]:
    return [one["text"] for one in conversation[-count:]]


def test_a_finished_conversation_is_continued_by_another_run():
    model = Model([wants(("lookup", {"order": "o-1"}), text="hm"), "500", "and 600"])
    helper = ReAct("helper", model=model, tools=[lookup])

    async def main() -> Any:
        async with app_of(None, helper) as app:
            await app.run(helper, "how much?", id="r")
            first = await app.transcript("r")
            handle = await app.start(helper, "and now?", history=first, id="s")
            return first, await handle.result(), await app.transcript("s")

    first, answer, second = run(main())
    assert first == [
        {"role": "user", "text": "how much?"},
        {"role": "assistant", "text": "hm", "uses": [{"id": "u1", "name": "lookup", "arguments": {"order": "o-1"}}]},
        {"role": "tool", "id": "u1", "name": "lookup", "text": '{"cents":500,"order":"o-1"}'},
        {"role": "assistant", "text": "500"},
    ]
    assert answer == "and 600"
    assert second == [*first, {"role": "user", "text": "and now?"}, {"role": "assistant", "text": "and 600"}]


def test_what_lies_in_blobs_is_read_from_there(tmp_path):
    @tool(effect="read")
    async def book() -> str:
        return "x" * 3_000

    small = Settings(inline_bytes=512, poll_s=0.002, park_after_s=0, flush_s=0.005)
    reader = ReAct("reader", model=Model([wants(("book", {}), text="y" * 3_000), "done"]), tools=[book])

    async def main() -> Plain:
        async with Perdure(f"sqlite:///{tmp_path / 'j.db'}", [reader], settings=small) as app:
            await app.run(reader, "z" * 3_000, id="r")
            return await app.transcript("r")

    assert [one["text"] for one in run(main())] == ["z" * 3_000, "y" * 3_000, "x" * 3_000, "done"]


def test_a_structured_answer_ends_a_conversation_that_can_go_on():
    typed = ReAct("typed", model=ByTurn([wants(("final_answer", {"answer": 5}))]), output=int)

    async def main() -> Plain:
        async with app_of(None, typed) as app:
            await app.run(typed, "go", id="r")
            return await app.transcript("r")

    assert run(main())[-1] == {"role": "tool", "id": "u1", "name": "final_answer", "text": "Taken as the final answer."}


def test_each_use_is_answered_by_its_own_call_although_one_before_it_was_malformed():
    """Two uses of one tool, of which the first was never called: the result must not go to the wrong one."""
    gate = asyncio.Event()

    @tool(effect="idempotent")
    async def pay(cents: int) -> str:
        if cents == 3:
            await gate.wait()
        return f"paid {cents}"

    model = Model([wants(("pay", {"cents": "many"}), ("pay", {"cents": 2}), ("pay", {"cents": 3}), ("pay", {})), "never"])
    payer = ReAct("payer", model=model, tools=[pay])

    async def main() -> Plain:
        async with app_of(None, payer) as app:
            await app.start(payer, "pay", id="r")
            driving = asyncio.create_task(app.engine.drive("r"))
            await until(lambda: any(event.type == "tool_call_completed" for event in app.store.read("r")))
            await app.cancel("r")
            await driving
            return await app.transcript("r")

    first, second, third, fourth = tail(run(main()), 4)
    assert first == fourth == "pay was not called: there is no such tool, or its arguments do not fit"
    assert second == "paid 2"
    assert third.startswith("pay failed: ")
    assert third.endswith("It may have happened all the same.")


def test_a_call_that_waited_for_a_person_and_a_child_are_told_as_what_became_of_them():
    @tool(approval=True)
    async def pay(cents: int) -> str:
        raise AssertionError("nobody has agreed")

    @agent(version="1")
    async def writer(run: Run) -> str:
        await run.receive("never")
        return "x"

    @agent(version="1")
    async def quick(run: Run) -> str:
        return "quick"

    model = Model([wants(("pay", {"cents": 1}), ("pay", {"cents": 2}), ("writer", {}), ("quick", {})), "never"])
    boss = ReAct("boss", model=model, tools=[pay, writer, quick])

    async def main() -> Plain:
        async with app_of(None, boss, writer, quick) as app:
            await app.start(boss, "go", id="r")
            await app.engine.drive("r", wait=False)
            first = min(await app.approvals(run_id="r"), key=lambda row: row.call)
            await app.reject(first.approval, by="ann", reason="not today")
            await app.engine.drive("r", wait=False)
            await app.signal("r", "message", "stop it")
            await app.signal("r", "other", "nobody's")
            await app.cancel("r")
            for _ in range(5):
                await app.engine.drive("r", wait=False)
                for child in ("r/3", "r/4", "r/5"):
                    if app.store.get(child) is not None:
                        await app.engine.drive(child, wait=False)
            assert (await app.engine.drive("r", wait=False)).status == "cancelled"
            return await app.transcript("r")

    rejected, unmade, child, quickly, said = tail(run(main()), 5)
    assert rejected == "pay was not called: a person said no: not today"
    assert unmade == "pay was not called: the approval was withdrawn"
    assert child.startswith("writer failed: ")
    assert child.endswith("What it had done before stands.")
    assert quickly == "quick"
    assert said == "stop it"


def test_a_run_that_was_ended_by_force_leaves_its_doubt_in_the_conversation(tmp_path):
    clock = ManualClock()

    @tool
    async def pay(cents: int) -> str:
        raise TimeoutError("no answer")

    payer = ReAct("payer", model=Model([wants(("pay", {"cents": 1})), "never"]), tools=[pay])

    async def main() -> Plain:
        async with app_of(tmp_path / "j.db", payer, clock=clock) as app:
            assert (await ended(app, payer, "pay")).status == "needs_attention"
            open_ = tail(await app.transcript("r"), 1)
            assert open_ == ["pay has no result yet: it is not known whether it has happened (TimeoutError: no answer)"]
            await app.cancel("r", force=True)
            return await app.transcript("r")

    assert tail(run(main()), 1) == ["pay failed: Cancelled: the run was ended while it was under way. It may have happened all the same."]


def test_a_run_that_failed_while_it_asked_has_what_it_asked():
    broken = ReAct("broken", model=ByTurn([wants(("add", {"a": 1})), ValueError("no")]), tools=[add])

    async def main() -> Plain:
        async with app_of(None, broken) as app:
            assert (await ended(app, broken, "go")).status == "failed"
            return await app.transcript("r")

    assert [one["role"] for one in run(main())] == ["user", "assistant", "tool"]


def test_a_refusal_and_an_empty_answer_leave_a_valid_conversation():
    refusing = ReAct("refusing", model=ByTurn([Answer("no", wants(("add", {"a": 1})).uses, stop="refusal")]), tools=[add])
    silent = ReAct("silent", model=ByTurn([Answer()] * 4))

    async def main() -> Any:
        async with app_of(None, refusing, silent) as app:
            await app.start(refusing, "go", id="a")
            await app.start(silent, "go", id="b")
            for ident in ("a", "b"):
                assert (await app.engine.drive(ident, wait=False)).status == "failed"
            return await app.transcript("a"), await app.transcript("b")

    refused, silence = run(main())
    assert tail(refused, 1) == ["add was not called: the run was ended first"]
    assert {one["role"] for one in silence} == {"user"}


def test_a_run_that_was_cancelled_before_it_began_has_what_was_said_to_it():
    talker = ReAct("talker", model=Model(["hi"]))
    history = [{"role": "user", "text": "one"}, {"role": "assistant", "text": "two"}]

    async def main() -> Plain:
        async with app_of(None, talker) as app:
            await app.start(talker, "three", history=history, id="r")
            await app.signal("r", "message", {"text": "four"})
            await app.cancel("r")
            await app.engine.drive("r", wait=False)
            return await app.transcript("r")

    assert [one["text"] for one in run(main())] == ["one", "two", "three", "four"]


def test_a_model_call_that_never_began_for_want_of_money_loses_nothing():
    model = ByTurn([wants(("add", {"a": 1})), "never"])
    poor = ReAct("poor", model=model, tools=[add], budget=Budget(calls=2, on_exceed="fail"))

    async def main() -> Plain:
        async with app_of(None, poor) as app:
            assert (await ended(app, poor, "go")).status == "failed"
            return await app.transcript("r")

    assert tail(run(main()), 1) == ["2"]


def test_what_has_no_conversation_says_so():
    @agent(version="1")
    async def plain(run: Run, order: str) -> str:
        return order

    async def main() -> None:
        async with app_of(None, plain) as app:
            await app.run(plain, "o-1", id="r")
            with pytest.raises(InvalidInput, match="has asked no model"):
                await app.transcript("r")
            with pytest.raises(NotFound):
                await app.transcript("nobody")
            with pytest.raises(NotFound):
                await app.transcript("r", tenant="other")

    run(main())


def test_the_blocking_app_has_it_too(tmp_path):
    talker = ReAct("talker", model=Model(["hi", "again"]))
    with BlockingPerdure(f"sqlite:///{tmp_path / 'j.db'}", [talker]) as app:
        app.run(talker, "hello", id="r")
        conversation = app.transcript("r")
        assert [one["text"] for one in conversation] == ["hello", "hi"]
        assert app.run(talker, "once more", history=conversation) == "again"


def test_a_conversation_with_an_approval_goes_on_after_a_rejection():
    @tool(approval=True)
    async def pay() -> str:
        raise AssertionError("nobody has agreed")

    payer = ReAct("payer", model=Model([wants(("pay", {})), "then not", "fine"]), tools=[pay])

    async def main() -> Any:
        async with app_of(None, payer) as app:
            await ended(app, payer, "pay")
            await app.reject(the_one(app), by="ann", reason="no money")
            assert (await app.engine.drive("r", wait=False)).status == "succeeded"
            conversation = await app.transcript("r")
            return conversation, await app.run(payer, "ok", history=conversation)

    conversation, answer = run(main())
    assert answer == "fine"
    assert conversation[2]["text"] == "pay was not called: a person said no: no money"
