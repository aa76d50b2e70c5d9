"""Forks: where they begin, what answers their calls, and that no tool touches the world."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.unit import fork_tools
from tests.unit.drive_tools import ManualClock, perdure, run
from tests.unit.fork_tools import NAMES, READS, Oracle, app_at, chatting, effects, recorded, stored

from perdure import Approval, Artifact, Call, Diverged, Fatal, InvalidInput, NotFound, NotReady, ReAct, Retry, Run, agent, sync, tool
from perdure.cli.whatif import judged
from perdure.core.events import CheckpointTaken, RunClaimed
from perdure.fork import Forks, OverBudget, Purse, UnknownPrice, stubs_of
from perdure.inspect.diff import end_words
from perdure.models import Scripted
from perdure.models.scripted import use, uses


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: Any, tmp_path: Path) -> str:
    return request.getfixturevalue("postgres_url") if request.param == "postgres" else f"sqlite:///{tmp_path / 'journal.db'}"


@pytest.fixture
def sqlite(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'journal.db'}"


# -- the effect firewall ----------------------------------------------------------------------------------------------
def test_no_tool_child_approval_or_model_is_touched_by_a_fork(url: str, tmp_path: Path) -> None:
    ledger = tmp_path / "ledger"

    async def main() -> None:
        async with app_at(url) as app:
            await recorded(app, ledger)
            before, done = stored(app), effects(ledger)
            assert len(done) == len(fork_tools.ALL) + 2  # with the child's and the model's
            fork = await app.fork("r", input={"ledger": str(ledger), "what": "b"})
            assert (fork.status, [call.name for call in fork.would_call]) == ("stopped", NAMES)
            assert fork.would_call[5].args == {"ledger": str(ledger), "what": "b"}
            assert effects(ledger) == done
            assert stored(app) == before
            again = await app.fork("r")
            assert (again.status, again.diff.is_same, again.diff.same) == ("succeeded", True, len(NAMES))
            assert effects(ledger) == done
            assert stored(app) == before

    run(main())


def test_with_reads_only_reads_without_approval_and_models_are_performed(url: str, tmp_path: Path) -> None:
    ledger = tmp_path / "ledger"

    async def main() -> None:
        async with app_at(url) as app:
            await recorded(app, ledger)
            before = stored(app)
            ledger.unlink()
            fork = await app.fork("r", input={"ledger": str(ledger), "what": "b"}, reads=True)
            assert [call.name for call in fork.would_call] == [name for name in NAMES if name not in (*READS, "oracle")]
            assert effects(ledger) == sorted([*(f"{name} b" for name in READS), f"oracle {len(fork_tools.ALL) + 1}"])
            assert fork.asked.usd_micros == 1_000_000
            assert stored(app) == before

    run(main())


@pytest.mark.parametrize("name", [name for name in NAMES if name not in (*READS, "oracle", "helper", "go on")])
def test_the_only_door_is_closed_for_a_tool_that_is_no_read_or_needs_an_approval(name: str, sqlite: str, tmp_path: Path) -> None:
    called = next(one for one in fork_tools.ALL if one.name == name)
    ledger = tmp_path / "ledger"

    @agent(version="1")
    async def one(run: Run, act: bool) -> str:
        return str(await called(str(ledger), "x")) if act else "nothing"

    async def main() -> None:
        async with app_at(sqlite, one) as app:
            await app.run(one, False, id="r")
            fork = await app.fork("r", input={"act": True}, reads=True)
            assert [call.name for call in fork.would_call] == [name]
        assert effects(ledger) == []

    run(main())


@pytest.mark.parametrize("hiding", [fork_tools.hiding, fork_tools.hiding_in_thread, fork_tools.hiding_apart])
def test_the_body_of_a_read_tool_calls_no_tool_with_an_effect(hiding: Any, sqlite: str, tmp_path: Path) -> None:
    ledger = tmp_path / "ledger"

    @agent(version="1")
    async def one(run: Run, act: bool) -> str:
        return str(await hiding(str(ledger), "x")) if act else "nothing"

    async def main() -> None:
        async with app_at(sqlite, one) as app:
            await app.run(one, False, id="r")
            fork = await app.fork("r", input={"act": True}, reads=True)
            assert fork.status == "failed"
            assert "tool pay (once) is not called: a rehearsal calls only read tools" in str(fork.error)
        assert effects(ledger) == ["look x"]

    run(main())


def test_models_are_asked_only_with_reads_or_with_another_model(sqlite: str, tmp_path: Path) -> None:
    ledger = tmp_path / "ledger"

    async def main() -> None:
        async with app_at(sqlite, chatting(ledger)) as app:
            await app.run("chatting", "hello", id="r")
            ledger.unlink()
            fork = await app.fork("r", input={"prompt": "goodbye"})
            assert (fork.status, [call.name for call in fork.would_call], effects(ledger)) == ("stopped", ["oracle"], [])
            fork = await app.fork("r", model="pythia")
            assert (fork.status, fork.output, effects(ledger)) == ("succeeded", "yes", ["pythia 1"])
            assert fork.asked.usd_micros == 0  # the price of another model is not known
            fork = await app.fork("r", input={"prompt": "goodbye"}, reads=True)
            assert (fork.status, effects(ledger)) == ("succeeded", ["oracle 1", "pythia 1"])
            assert app.agents["chatting"].model.name == "oracle"  # type: ignore[attr-defined]

    run(main())


def test_a_model_alone_is_asked_for_another_model_and_no_read_tool(sqlite: str, tmp_path: Path) -> None:
    ledger = tmp_path / "ledger"
    model = Scripted([uses(use("look", ledger=str(ledger), what="x")), "done"])
    one = ReAct("one", model=model, tools=[fork_tools.look])

    async def main() -> None:
        async with app_at(sqlite, one) as app:
            await app.run("one", "hello", id="r")
            ledger.unlink()
            fork = await app.fork("r", input={"prompt": "other"}, model="other")
            assert fork.status == "succeeded"  # the call of look has the recorded arguments
            assert [(call.kind, call.source) for call in fork.diff.right.calls] == [
                ("model", "read"),
                ("tool", "recorded"),
                ("model", "read"),
            ]
            assert effects(ledger) == []

    run(main())


def test_a_stand_in_can_neither_call_a_tool_nor_wait(sqlite: str, tmp_path: Path) -> None:
    ledger = tmp_path / "ledger"

    @tool(effect="once")
    async def act(what: str) -> str:
        return "acted"

    @act.simulate
    async def _(what: str) -> Any:
        if what == "wait":
            return await asyncio.sleep(1)
        return await fork_tools.pay(str(ledger), "from a stand-in")

    @agent(version="1")
    async def one(run: Run, what: str) -> str:
        return await act(what)

    async def main() -> None:
        async with app_at(sqlite, one) as app:
            await app.run(one, "a", id="r")
            for what in ("wait", "pay"):
                with pytest.raises(InvalidInput, match="the stand-in of tool act waits or calls a tool"):
                    await app.fork("r", input={"what": what}, reads=True)
        assert effects(ledger) == []

    run(main())


def test_a_read_in_a_rehearsal_has_a_key_of_its_own_and_saves_no_artifact(sqlite: str) -> None:
    keys: list[str] = []

    @tool(effect="read")
    async def fetch(what: str, call: Call) -> str:
        keys.append(call.key)
        if what == "b":
            await call.save(b"large")
        return what

    @agent(version="1")
    async def one(run: Run, what: str) -> str:
        return await fetch(what)

    async def main() -> None:
        async with app_at(sqlite, one) as app:
            await app.run(one, "a", id="r")
            before = stored(app)
            fork = await app.fork("r", input={"what": "b"}, reads=True)
            assert (fork.status, len(set(keys))) == ("failed", 2)
            assert "ArtifactNotSaved" in str(fork.error) or "only a call of a tool saves" in str(fork.error)
            assert stored(app) == before

    run(main())


def test_a_read_opens_the_artifacts_of_its_run(sqlite: str) -> None:
    @tool(effect="read")
    async def make(call: Call) -> Artifact:
        return await call.save(b"large")

    @tool(effect="read")
    async def count(file: Artifact, more: int) -> int:
        return len(await file.read()) + more

    @agent(version="1")
    async def one(run: Run, more: int) -> int:
        return await count(await make(), more)

    async def main() -> None:
        async with app_at(sqlite, one) as app:
            assert await app.run(one, 1, id="r") == 6
            assert (await app.fork("r", input={"more": 2}, reads=True)).output == 7

    run(main())


# -- what answers -----------------------------------------------------------------------------------------------------
@tool(effect="once")
async def price(order: str, cents: int = 0) -> int:
    return 500


@tool(effect="once")
async def send(order: str, cents: int) -> str:
    return f"sent {cents}"


@tool(effect="once")
async def standing(order: str, cents: int) -> str:
    return f"sent {cents}"


@standing.simulate
def _(cents: int) -> str:
    if cents < 0:
        raise Fatal("too little")
    return f"would send {cents}"


@agent(version="1")
async def shop(run: Run, order: str) -> str:
    cents = await price(order)
    return await (standing if order.startswith("s") else send)(order, cents)


async def forked(url: str, order: str = "o-7", **options: Any) -> Any:
    async with app_at(url, shop) as app:
        if app.store.get("r") is None:
            await app.run(shop, order, id="r")
        return await app.fork("r", **options)


def test_an_edited_result_shows_the_exact_call_that_would_follow(sqlite: str) -> None:
    fork = run(forked(sqlite, edits={1: 700}))
    assert (fork.status, fork.at) == ("stopped", 3)
    assert [(call.call, call.name, call.args) for call in fork.would_call] == [(2, "send", {"order": "o-7", "cents": 700})]
    assert [call.source for call in fork.diff.right.calls] == ["edited", None]


def test_an_edit_lets_every_other_call_keep_its_recorded_outcome(sqlite: str) -> None:
    fork = run(forked(sqlite, edits={2: "lost"}))
    assert (fork.status, fork.output, fork.diff.same) == ("succeeded", "lost", 1)


def test_a_stand_in_answers_and_may_fail(sqlite: str) -> None:
    assert run(forked(sqlite, "s-7", edits={1: 700})).output == "would send 700"
    fork = run(forked(sqlite, "s-7", edits={1: -1}))
    assert (fork.status, fork.diff.right.calls[1].error) == ("failed", "Fatal: too little")


@pytest.mark.parametrize(
    ("answers", "output"),
    [
        ([{"tool": "send", "result": "prepared"}], "prepared"),
        ([{"tool": "send", "args": {"cents": 701}, "result": "no"}, {"tool": "send", "args": {"cents": 700}, "result": "yes"}], "yes"),
        ([{"tool": "price", "result": 1}, {"tool": "send", "result": "first"}, {"tool": "send", "result": "second"}], "first"),
    ],
)
def test_the_first_prepared_answer_that_fits_counts(sqlite: str, answers: list[Any], output: str) -> None:
    assert run(forked(sqlite, edits={1: 700}, answers=answers)).output == output


def test_a_prepared_answer_comes_before_a_stand_in_and_may_be_an_error(sqlite: str) -> None:
    answers = [{"tool": "standing", "error": "the service is closed"}]
    fork = run(forked(sqlite, "s-7", edits={1: 700}, answers=answers))
    assert (fork.status, fork.diff.right.calls[1].error) == ("failed", "Error: the service is closed")


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ({"tool": "send"}, "a list such as"),
        ([{"tool": "send"}], "give it a result or an error"),
        ([{"tool": "send", "result": 1, "error": "x"}], "and not both"),
        ([{"name": "send", "result": 1}], "answer 1: Object contains unknown field `name`"),
        ([{"tool": "send", "result": 5}], "the answer for tool send does not fit its result"),
    ],
)
def test_prepared_answers_that_are_wrong_are_refused(sqlite: str, answers: Any, words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        run(forked(sqlite, edits={1: 700}, answers=answers))


def test_the_answer_of_a_model_can_be_edited_and_prepared_as_text(sqlite: str, tmp_path: Path) -> None:
    ledger = tmp_path / "ledger"

    async def main() -> None:
        async with app_at(sqlite, chatting(ledger)) as app:
            await app.run("chatting", "hello", id="r")
            assert (await app.fork("r", edits={1: "no"})).output == "no"
            assert (await app.fork("r", edits={1: {"text": "maybe"}})).output == "maybe"
            answers = [{"tool": "oracle", "result": "prepared"}]
            assert (await app.fork("r", input={"prompt": "x"}, answers=answers)).output == "prepared"
            with pytest.raises(InvalidInput, match="does not fit oracle"):
                await app.fork("r", edits={1: 5})
            assert effects(ledger) == ["oracle 1"]

    run(main())


# -- where a fork begins, and what is refused
# ---------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"at": 99}, InvalidInput, "run r has no event 99: its events are 1 to 7"),
        ({"at": 0}, InvalidInput, "run r has no event 0"),
        ({"at": True}, InvalidInput, "run r has no event"),
        ({"at": 1}, InvalidInput, "its agent begins at event 2"),
        ({"at": 7}, InvalidInput, "it has ended there; fork it at event 6 or before"),
        ({"edits": {9: 1}}, InvalidInput, "run r has no call 9: its calls are 1 to 2"),
        ({"edits": {1: "much"}}, InvalidInput, "the edited result of call 1 does not fit price: Input should be a valid integer"),
        ({"edits": {1: 1}, "at": 4}, InvalidInput, "call 1 has no outcome after event 4"),
        ({"input": {"order": 7}}, InvalidInput, "order"),
        ({"input": ["o-7"]}, InvalidInput, "the arguments of agent shop by name"),
        ({"input": {"order": "o-8"}, "at": 4}, Diverged, "at event 3 the journal has call 1: price"),
        ({"model": "other"}, InvalidInput, "agent shop is not a ReAct agent"),
        ({"reads": 1}, InvalidInput, "neither True nor False"),
    ],
)
def test_a_fork_that_cannot_be_made_is_refused_in_words_and_changes_nothing(
    sqlite: str, options: dict[str, Any], error: type[Exception], words: str
) -> None:
    async def main() -> None:
        async with app_at(sqlite, shop) as app:
            await app.run(shop, "o-7", id="r")
            before = stored(app)
            with pytest.raises(error, match=words):
                await app.fork("r", **options)
            assert stored(app) == before

    run(main())


def test_a_fork_of_a_run_that_is_not_there_or_has_not_begun_is_refused(sqlite: str) -> None:
    async def main() -> None:
        async with app_at(sqlite, shop) as app:
            with pytest.raises(NotFound):
                await app.fork("nothing")
            await app.start(shop, "o-7", id="r")
            with pytest.raises(InvalidInput, match="run r has not begun"):
                await app.fork("r")

    run(main())


def test_a_fork_cannot_begin_inside_what_the_agent_stated_at_once(sqlite: str) -> None:
    @agent(version="1")
    async def two(run: Run) -> list[Any]:
        return list(await asyncio.gather(price("a"), price("b")))

    async def main() -> None:
        async with app_at(sqlite, two) as app:
            await app.run(two, id="r")
            with pytest.raises(InvalidInput, match="its agent stated the events 3 to 4 at once; take 2 or 4"):
                await app.fork("r", at=3)
            fork = await app.fork("r", at=4, edits={2: 9})
            assert fork.output == [500, 9]
            assert (await app.fork("r", edits={2: 9})).output == [500, 9]

    run(main())


def test_a_fork_can_begin_at_every_other_event_and_does_what_the_run_did(sqlite: str) -> None:
    @agent(version="1")
    async def long(run: Run) -> list[Any]:
        first = await asyncio.gather(price("a"), price("b"))
        run.note("between")
        await asyncio.sleep(5)
        return [*first, await price("c"), (await run.request_approval("go on", None)).by, await run.receive("word")]

    async def main() -> None:
        clock = ManualClock()
        async with perdure(Path(sqlite.removeprefix("sqlite:///")), [long], clock) as app:
            await app.start(long, id="r")
            for _ in range(10):
                info = await app.drive("r", wait=False)
                if info.status == "succeeded":
                    break
                clock.advance(10)
                for row in await app.approvals():
                    await app.approve(row.approval, by="ann")
                if info.waiting_for is not None and "signal" in info.waiting_for:
                    await app.signal("r", "word", "now")
            begun = 0
            for seq in range(1, (await app.handle("r").info()).seq):
                try:
                    fork = await app.fork("r", at=seq)
                except InvalidInput:
                    continue
                begun += 1
                assert (fork.status, fork.output, fork.diff.is_same) == ("succeeded", [500, 500, 500, "ann", "now"], True), seq
            assert begun > 8

    run(main())


def test_runs_that_failed_wait_or_are_in_doubt_can_be_forked(sqlite: str) -> None:
    @tool(effect="once")
    async def lose(order: str) -> str:
        raise TimeoutError("no answer")

    @agent(version="1")
    async def trouble(run: Run, what: str) -> str:
        if what == "fail":
            raise ValueError(await send("o", 1))
        return await (lose("o") if what == "doubt" else run.receive("word"))

    async def main() -> None:
        async with app_at(sqlite, trouble) as app:
            for what in ("fail", "doubt", "wait"):
                await app.start(trouble, what, id=what)
                await app.drive(what, wait=False)
            failed = await app.fork("fail")
            assert (failed.status, failed.error, failed.diff.is_same) == ("failed", "ValueError: sent 1", True)
            doubt = await app.fork("doubt")
            assert (doubt.status, [call.name for call in doubt.would_call]) == ("stopped", ["lose"])
            assert (await app.fork("wait")).status == "waiting"

    run(main())


def test_a_rejected_approval_is_the_recorded_outcome_of_its_call(sqlite: str) -> None:
    @tool(effect="once", approval=Approval())
    async def risky(what: str) -> str:
        return what

    @agent(version="1")
    async def asker(run: Run, what: str) -> str:
        try:
            return await risky(what)
        except Exception as error:
            return type(error).__name__

    async def main() -> None:
        async with app_at(sqlite, asker) as app:
            await app.start(asker, "a", id="r")
            await app.drive("r", wait=False)
            [row] = await app.approvals()
            await app.reject(row.approval, by="ann", reason="no")
            assert (await app.drive("r")).status == "succeeded"
            fork = await app.fork("r")
            assert (fork.output, fork.diff.is_same, fork.would_call) == ("NotApproved", True, [])
            assert [call.source for call in fork.diff.right.calls] == ["recorded"]
            assert [call.name for call in (await app.fork("r", input={"what": "b"})).would_call] == ["risky"]

    run(main())


def test_a_run_that_was_reopened_is_forked_without_what_was_superseded(sqlite: str) -> None:
    bug = [True]

    @agent(version="1")
    async def fragile(run: Run) -> list[Any]:
        found = [await price("a"), await price("b")]
        if bug:
            raise ValueError("a bug")
        return [*found, await price("c")]

    async def main() -> None:
        async with app_at(sqlite, fragile) as app:
            handle = await app.start(fragile, id="r")
            assert (await app.drive("r")).status == "failed"
            bug.clear()
            claim = next(event.seq for event in await handle.events() if isinstance(event.body, RunClaimed))
            await app.rewind("r", claim)
            assert (await app.drive("r")).status == "succeeded"
            last = (await handle.info()).seq
            superseded = 0
            for at in (None, *range(claim, last)):
                try:
                    fork = await app.fork("r", at=at)
                except InvalidInput as error:
                    superseded += "was superseded" in str(error)
                    continue
                assert (fork.output, fork.diff.is_same) == ([500, 500, 500], True), at
            assert superseded == 5
            assert (await app.fork("r", edits={2: 7})).output == [500, 7, 500]

    run(main())


def test_a_run_that_was_reopened_and_not_driven_yet_keeps_what_was_superseded(sqlite: str) -> None:
    bug = [True]

    @agent(version="1")
    async def fragile(run: Run) -> list[Any]:
        found = [await price("a"), await price("b")]
        if bug:
            raise ValueError("a bug")
        return [*found, await price("c")]

    async def main() -> None:
        async with app_at(sqlite, fragile) as app:
            handle = await app.start(fragile, id="r")
            await app.drive("r")
            bug.clear()
            claim = next(event.seq for event in await handle.events() if isinstance(event.body, RunClaimed))
            await app.rewind("r", claim)
            before = stored(app)
            fork = await app.fork("r", at=(await handle.info()).seq)
            assert [(call.args["order"], call.source) for call in fork.diff.right.calls] == [
                ("a", "recorded"),
                ("b", "recorded"),
                ("c", None),
            ]
            assert (fork.status, [call.args["order"] for call in fork.would_call]) == ("stopped", ["c"])
            assert stored(app) == before

    run(main())


def test_the_recorded_input_may_no_longer_fit(sqlite: str) -> None:
    @agent(name="shop", version="2")
    async def other(run: Run, order: str, customer: str) -> str:
        return order

    async def main() -> None:
        await forked(sqlite)
        async with app_at(sqlite, other) as app:
            with pytest.raises(InvalidInput, match=r"the recorded input of run r does not fit this code: .*customer"):
                await app.fork("r")

    run(main())


def test_an_edit_of_a_call_that_is_not_made_again_is_told(sqlite: str) -> None:
    fork = run(forked(sqlite, edits={1: 700, 2: "never"}))
    assert (fork.unused_edits, fork.status) == ([2], "stopped")


def test_a_model_that_cannot_be_reached_ends_the_fork_with_an_error(sqlite: str) -> None:
    one = ReAct("one", model=Scripted([lambda request: "a" if "hello" in str(request) else _away()], retry=None), tools=[])

    async def main() -> None:
        async with app_at(sqlite, one) as app:
            await app.run("one", "hello", id="r")
            with pytest.raises(NotReady, match="scripted was asked 1 times in the rehearsal, without an answer: NotReady: no key"):
                await app.fork("r", input={"prompt": "bye"}, reads=True)

    run(main())


def _away() -> str:
    raise NotReady("no key")


def test_a_read_that_fails_for_a_moment_is_tried_again_and_another_failure_is_told_to_the_agent(sqlite: str) -> None:
    attempts: list[str] = []

    @tool(effect="read", retry=Retry(attempts=9, base=0.001))
    async def shaky(what: str) -> str:
        attempts.append(what)
        if what == "never" or (what == "soon" and len(attempts) < 3):
            raise ConnectionResetError("the line broke")
        if what == "wrong":
            raise Fatal("no such thing")
        return what

    @agent(version="1")
    async def one(run: Run, what: str) -> str:
        return await shaky(what)

    async def main() -> None:
        async with app_at(sqlite, one) as app:
            await app.run(one, "a", id="r")
            attempts.clear()
            assert (await app.fork("r", input={"what": "soon"}, reads=True)).output == "soon"
            attempts.clear()
            with pytest.raises(NotReady, match="shaky was asked 5 times in the rehearsal"):
                await app.fork("r", input={"what": "never"}, reads=True)
            assert len(attempts) == 5
            assert (await app.fork("r", input={"what": "wrong"}, reads=True)).status == "failed"

    run(main())


def test_an_error_in_one_answer_leaves_no_attempt_behind(sqlite: str) -> None:
    ended: list[str] = []

    @tool(effect="read")
    async def slow(what: str) -> str:
        await asyncio.sleep(0.05)
        ended.append(what)
        return what

    @agent(version="1")
    async def one(run: Run, what: str) -> list[Any]:
        return list(await asyncio.gather(slow(what), send(what, 1)))

    async def main() -> None:
        async with app_at(sqlite, one) as app:
            await app.run(one, "a", id="r")
            with pytest.raises(InvalidInput, match="does not fit its result"):
                await app.fork("r", input={"what": "b"}, reads=True, answers=[{"tool": "send", "result": 5}])
            assert ended == ["a", "b"]

    run(main())


def test_a_run_is_forked_while_a_worker_drives_it(sqlite: str) -> None:
    go, begun = asyncio.Event(), asyncio.Event()

    @tool(effect="once")
    async def block(order: str) -> str:
        begun.set()
        await go.wait()
        return "done"

    @agent(version="1")
    async def busy(run: Run, order: str) -> str:
        return f"{await price(order)} {await block(order)}"

    async def main() -> None:
        async with app_at(sqlite, busy) as app:
            await app.start(busy, "o-7", id="r")
            driving = asyncio.create_task(app.drive("r"))
            await begun.wait()
            fork = await app.fork("r")
            assert (fork.status, [call.name for call in fork.would_call]) == ("stopped", ["block"])
            assert (await app.fork("r", answers=[{"tool": "block", "result": "soon"}])).output == "500 soon"
            go.set()
            assert (await driving).status == "succeeded"

    run(main())


def test_a_stand_in_takes_arguments_of_its_tool_and_does_not_change_its_pin() -> None:
    @tool(effect="once")
    async def act(order: str, cents: int) -> str:
        return order

    pin = act.pin()
    with pytest.raises(InvalidInput, match="the stand-in takes customer; it can have the tool's arguments"):
        act.simulate(lambda_of("customer"))
    with pytest.raises(InvalidInput, match="a rehearsal makes no attempt; leave call out"):

        @act.simulate
        def _(order: str, call: Call) -> str:
            return order

    act.simulate(lambda_of("cents"))
    with pytest.raises(InvalidInput, match="tool act has a stand-in already"):
        act.simulate(lambda_of("order"))
    assert act.pin() == pin


def lambda_of(name: str) -> Any:
    names: dict[str, Any] = {}
    exec(f"def stand_in({name}): return {name}", names)
    return names["stand_in"]


def test_what_a_stand_in_returns_fits_the_result_of_its_tool(sqlite: str) -> None:
    @tool(effect="once")
    async def act(order: str) -> int:
        return 1

    @act.simulate
    def _(order: str) -> Any:
        return "much"

    @agent(version="1")
    async def one(run: Run, order: str) -> int:
        return await act(order)

    async def main() -> None:
        async with app_at(sqlite, one) as app:
            await app.run(one, "a", id="r")
            with pytest.raises(InvalidInput, match="what the stand-in of tool act returns does not fit the tool's result"):
                await app.fork("r", input={"order": "b"})

    run(main())


def test_a_blocking_app_forks_and_compares(tmp_path: Path) -> None:
    with sync.Perdure(f"sqlite:///{tmp_path / 'journal.db'}", [shop]) as app:
        app.run(shop, "o-7", id="r")
        app.run(shop, "o-8", id="s")
        assert app.fork("r", edits={2: "lost"}).output == "lost"
        diff = app.diff("r", "s")
        assert (diff.same, diff.is_same, [line.differs for line in diff.lines]) == (0, False, [("arguments",), ("arguments",)])


# -- money ------------------------------------------------------------------------------------------------------------
def test_a_purse_ends_the_questions_to_models_before_it_is_overdrawn(sqlite: str, tmp_path: Path) -> None:
    ledger = tmp_path / "ledger"

    async def main() -> None:
        async with app_at(sqlite, chatting(ledger)) as app:
            await app.run("chatting", "hello", id="r")
            purse = Purse(limit=2_500_000)
            async with Forks(app.reading, app.settings, models=True, purse=purse) as forks:
                for _ in range(2):
                    await forks.fork("r", app.agents["chatting"], input={"prompt": "x"})
                with pytest.raises(OverBudget):
                    await forks.fork("r", app.agents["chatting"], input={"prompt": "x"})
            assert (purse.spent, purse.reserved, len(effects(ledger))) == (2_000_000, 0, 3)

    run(main())


def test_a_model_without_a_price_is_not_asked_under_a_budget(sqlite: str, tmp_path: Path) -> None:
    ledger = tmp_path / "ledger"

    async def main() -> None:
        async with app_at(sqlite, chatting(ledger)) as app:
            await app.run("chatting", "hello", id="r")
            other = ReAct("chatting", model=Oracle(str(ledger), "cheap", price=None), tools=[fork_tools.look], instructions="be kind")
            async with Forks(app.reading, app.settings, models=True, purse=Purse(limit=5)) as forks:
                with pytest.raises(UnknownPrice, match="the price of model cheap is not known"):
                    await forks.fork("r", other)
            assert effects(ledger) == ["oracle 1"]

    run(main())


def test_the_cost_of_a_fork_has_what_was_recorded_and_what_was_asked(sqlite: str, tmp_path: Path) -> None:
    ledger = tmp_path / "ledger"

    async def main() -> None:
        async with app_at(sqlite, chatting(ledger)) as app:
            await app.run("chatting", "hello", id="r")
            same, other = await app.fork("r"), await app.fork("r", input={"prompt": "x"}, reads=True)
            assert (same.asked.usd_micros, same.diff.right.used.usd_micros) == (0, 1_000_000)
            assert (other.asked.usd_micros, other.diff.right.used.usd_micros) == (1_000_000, 1_000_000)

    run(main())


def test_stubs_can_be_given_as_objects() -> None:
    [stub] = stubs_of([{"tool": "a", "result": None}])
    assert stubs_of([stub]) == (stub,)


@tool(effect="once")
async def put(what: int) -> int:
    return what


@agent(version="1")
async def lives(run: Run) -> int:
    last = run.restored or 0
    await put(last)
    if last < 2:
        await run.checkpoint(last + 1)
    return last


def test_a_checkpoint_is_no_difference_and_calls_of_earlier_lives_stay(url: str) -> None:
    async def main() -> None:
        async with app_at(url, lives) as app:
            assert await app.run(lives, id="r") == 2
            whole = await app.fork("r")
            assert (whole.status, whole.would_call) == ("checkpoint", [])
            assert end_words(whole.diff.right) == "takes a checkpoint, where a rehearsal ends"
            assert judged(whole).verdict == "checkpoint"
            taken = [event.seq for event in await app.handle("r").events() if isinstance(event.body, CheckpointTaken)]
            second = await app.fork("r", at=taken[0])
            # Only what the third life did is missing: the rehearsal ends at the second checkpoint.
            assert [line.left.call for line in second.diff.lines if line.right is None and line.left is not None] == [3]
            third = await app.fork("r", at=taken[1])
            assert (third.status, third.output, third.diff.is_same) == ("succeeded", 2, True)

    asyncio.run(main())
