"""A message reaches a ReAct run that waits for an approval: the model is asked before the call begins.

The model keeps the call by asking for it again; every other answer withdraws it. Never does a call begin that was
withdrawn, no call is made twice, and no person is asked twice.
"""

from __future__ import annotations

import asyncio
import inspect
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from tests.unit.approval_tools import check_replay, pending, rows, statuses, the_one
from tests.unit.drive_tools import SETTINGS, ManualClock, run, until
from tests.unit.react_tools import ByTurn, texts, wants

from perdure import Approval, Call, Conflict, Perdure, ReAct, tool
from perdure.core.events import CallHeld, CallKept, Event, ToolCallInitiated
from perdure.errors import RunEnded, StoreUnavailable
from perdure.inspect.why.page import why
from perdure.models import Answer
from perdure.models.messages import Request, ToolResult, User, check

PAID: list[int] = []
WAITS = "pay was not called yet: it waits for the approval of a person"


@pytest.fixture(autouse=True)
def _nothing_paid() -> None:
    PAID.clear()


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'db'}" if request.param == "sqlite" else str(request.getfixturevalue("postgres_url"))


@tool(effect="once", approval=Approval(editable="cents"))
async def pay(cents: int, to: str = "ann") -> str:
    """Pay a person."""
    PAID.append(cents)
    return f"paid {cents} to {to}"


class Lines(ByTurn):
    """A line may also be an async function of the request."""

    async def answer(self, request: Request, call: Call) -> Any:
        line = self._lines[len(self.asked)]
        if inspect.iscoroutinefunction(line):
            check(request.messages)
            self.asked.append(request)
            return _answer(await line(request))
        return await super().answer(request, call)


def _answer(line: Any) -> Answer:
    return line if isinstance(line, Answer) else Answer(line)


def types(app: Perdure) -> list[str]:
    return [event.type for event in app.store.read("r")]


def opened(url: str, *agents: ReAct, clock: ManualClock | None = None) -> Perdure:
    return Perdure(url, agents, settings=SETTINGS, clock=clock or ManualClock())


def asks(cents: int = 900, **more: Any) -> Any:
    return wants(("pay", {"cents": cents, **more}))


def payer(*lines: Any, tools: tuple[Any, ...] = (pay,), **options: Any) -> tuple[ReAct, ByTurn]:
    model = Lines(list(lines))
    return ReAct("payer", model=model, tools=tools, **options), model


async def driven(app: Perdure) -> str:
    status: str = (await app.engine.drive("r", wait=False)).status
    return status


async def driven_until(app: Perdure, status: str, *approvals: str) -> None:
    """Drive the run until it has this status, and its approvals have these. A withdrawal may arrive after the run was parked."""
    async with asyncio.timeout(60):
        while (await driven(app), statuses(app)) != (status, list(approvals)):
            await asyncio.sleep(0.005)


async def waiting(app: Perdure, agent: ReAct) -> str:
    """Start the run, and drive it until it waits. The id of its approval."""
    await app.start(agent, "go", id="r")
    assert await driven(app) == "waiting_approval"
    return the_one(app)


def kinds(events: list[Event], *types: type) -> list[str]:
    return [event.type for event in events if isinstance(event.body, types)]


def test_a_message_reaches_the_model_and_the_call_that_it_wants_again_is_the_same_call(url: str) -> None:
    agent, model = payer(asks(), asks(), "done")

    async def main() -> None:
        async with opened(url, agent) as app:
            approval = await waiting(app, agent)
            await app.signal("r", "message", "Is that right?", by="bob")
            assert await driven(app) == "waiting_approval"
            *_, told, said = model.asked[-1].messages
            assert isinstance(told, ToolResult)
            assert (told.error, told.text.partition(",")[0]) == (True, WAITS)
            assert said == User("Is that right?")
            assert (the_one(app), PAID) == (approval, []), "the same approval is asked for, once"
            await app.approve(approval, by="ann")
            assert await driven(app) == "succeeded"
            assert texts(model.asked[-1].messages)[-2:] == ["assistant  →pay", "tool paid 900 to ann"]
            events = await app.handle("r").events()
            assert kinds(events, CallHeld, CallKept, ToolCallInitiated).count("tool_call_initiated") == 1
            assert kinds(events, CallHeld, CallKept) == ["call_held", "call_kept"]
            check_replay(app, agent)
            assert (
                texts([ToolResult(**_plain(one)) for one in await app.transcript("r") if one["role"] == "tool"])[-1]
                == "tool paid 900 to ann"
            )

    run(main())
    assert PAID == [900]


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in message.items() if name != "role"}


@pytest.mark.parametrize("granted", ["before the message", "after it", "never"])
@pytest.mark.parametrize("answer", ["other arguments", "text"])
def test_every_other_answer_withdraws_the_call_also_if_a_person_has_approved_it(url: str, granted: str, answer: str) -> None:
    agent, _ = payer(asks(), asks(100) if answer == "other arguments" else "I leave it.", "done")
    clock = ManualClock()

    async def main() -> None:
        async with opened(url, agent, clock=clock) as app:
            approval = await waiting(app, agent)
            if granted == "before the message":
                await app.approve(approval, by="ann")
            await app.signal("r", "message", "Stop, it was 100.", by="bob")
            if granted == "after it":
                await app.approve(approval, by="ann")
            clock.advance(1)
            if answer == "text":
                await driven_until(app, "succeeded", "withdrawn")
                with pytest.raises(RunEnded):
                    await app.approve(approval, by="ann")
            else:
                await driven_until(app, "waiting_approval", "withdrawn", "pending")
                with pytest.raises(Conflict, match=rf"approval {approval} was withdrawn by the run at 20\S+Z; "):
                    await app.approve(approval, by="ann")
                with pytest.raises(Conflict, match="was withdrawn by the run at"):
                    await app.reject(approval, by="ann", reason="late")
                assert PAID == []
                await app.approve(the_one(app), by="ann")
                assert await driven(app) == "succeeded"
            check_replay(app, agent)

    run(main())
    assert ([100] if answer == "other arguments" else []) == PAID


@pytest.mark.parametrize("order", ["yes, message", "message, yes"])
def test_a_call_that_was_approved_and_is_kept_begins_without_another_question(url: str, order: str) -> None:
    agent, model = payer(asks(), asks(), "done")

    async def main() -> None:
        async with opened(url, agent) as app:
            approval = await waiting(app, agent)
            for what in order.split(", "):
                if what == "yes":
                    await app.approve(approval, by="ann", edit={"cents": 300})
                else:
                    await app.signal("r", "message", "Hello?", by="bob")
            assert (await driven(app), statuses(app)) == ("succeeded", ["consumed"])
            check_replay(app, agent)
            assert model.told[-1] == "[Before it was called, ann changed cents from 900 to 300.]\npaid 300 to ann"

    run(main())
    assert (PAID, len(model.asked)) == ([300], 3)


@pytest.mark.parametrize("answer", [asks(), asks(100), "I leave it."])
def test_a_no_that_comes_while_the_model_answers_is_told_and_no_person_is_asked_again(answer: Any) -> None:
    async def rejected(request: Request) -> Any:
        await app.reject(the_one(app), by="ann", reason="too much")
        await until(lambda: "approval_decided" in types(app))
        return answer

    agent, model = payer(asks(), rejected, "done", "done")
    app = opened("sqlite://", agent)

    async def main() -> list[str]:
        async with app:
            await waiting(app, agent)
            await app.signal("r", "message", "Hello?", by="bob")
            await driven(app)
            check_replay(app, agent)
            return statuses(app)

    after = run(main())
    if answer == asks():
        assert (after, model.told[-1]) == (["rejected"], "pay was not called: a person said no: too much")
    elif answer == asks(100):
        assert after == ["rejected", "pending"]
    else:
        about = "[About pay, which waited for an approval before the last answer: pay was not called: a person said no: too much]"
        assert (after, texts(model.asked[-1].messages)[-1]) == (["rejected"], f"user {about}")
    assert PAID == []


def test_calls_that_need_no_approval_keep_their_results_and_are_waited_for(url: str) -> None:
    go, looked = asyncio.Event(), asyncio.Event()

    @tool(effect="read")
    async def look(call: Call) -> str:
        """Look."""
        looked.set()
        await go.wait()
        return "seen"

    agent, model = payer(wants(("pay", {"cents": 900}), ("look", {})), asks(), "done", tools=(pay, look))

    async def main() -> None:
        async with opened(url, agent) as app:
            await app.start(agent, "go", id="r")
            driving = asyncio.create_task(driven(app))
            await looked.wait()
            await until(lambda: pending(app))
            approval = the_one(app)
            await app.signal("r", "message", "Hello?", by="bob")
            await until(lambda: any(event.type == "call_held" for event in app.store.read("r")))
            await app.approve(approval, by="ann")
            await until(lambda: any(event.type == "approval_decided" for event in app.store.read("r")))
            assert (PAID, len(model.asked)) == ([], 1), "it is approved, and held; the other call is still under way"
            go.set()
            assert await driving == "succeeded"
            check_replay(app, agent)

    run(main())
    conversation = texts(model.asked[1].messages)
    assert conversation[-3].startswith(f"tool! {WAITS}")
    assert conversation[-2:] == ["tool seen", "user Hello?"]
    assert PAID == [900]


def test_a_message_that_comes_while_the_model_answers_is_heard_before_the_call_begins(url: str) -> None:
    async def interrupted(request: Request) -> Any:
        await app.signal("r", "message", "And now?", by="bob")
        await until(lambda: types(app).count("signal_received") == 2)
        return asks()

    agent, model = payer(asks(), interrupted, asks(), "done")
    app = opened(url, agent)

    async def main() -> None:
        async with app:
            approval = await waiting(app, agent)
            await app.signal("r", "message", "Hello?", by="bob")
            await app.approve(approval, by="ann")
            assert (await driven(app), statuses(app)) == ("succeeded", ["consumed"])
            assert kinds(await app.handle("r").events(), CallHeld, CallKept) == ["call_held", "call_kept"] * 2
            check_replay(app, agent)

    run(main())
    assert [texts(one.messages)[-1] for one in model.asked] == ["user go", "user Hello?", "user And now?", "tool paid 900 to ann"]
    assert PAID == [900]


def test_why_says_that_a_call_is_held_and_its_cause_is_the_message(tmp_path: Path) -> None:
    seen: list[Any] = []

    async def looks(request: Request) -> Any:
        await app.approve(the_one(app), by="ann")
        await until(lambda: "approval_decided" in types(app))
        seen.extend(why(app.reading, "r", now=app.clock.now()).never_started)
        return asks()

    agent, _ = payer(asks(), looks, "done")
    app = opened(f"sqlite:///{tmp_path / 'db'}", agent)

    async def main() -> list[Event]:
        async with app:
            await waiting(app, agent)
            await app.signal("r", "message", "Hello?", by="bob")
            assert await driven(app) == "succeeded"
            return await app.handle("r").events()

    events = run(main())
    (held,) = [event for event in events if isinstance(event.body, CallHeld)]
    assert [event.seq for event in events if event.type == "signal_received"] == [held.cause]
    assert (
        seen[0] == f'call 2: pay(cents=900, to="ann"): not sent yet; the agent considers since event {held.seq} whether it still wants it'
    )


def test_the_same_arguments_may_be_written_in_another_way() -> None:
    agent, _ = payer(asks(), asks(to="ann"), "done")

    async def main() -> list[str]:
        async with opened("sqlite://", agent) as app:
            await waiting(app, agent)
            await app.signal("r", "message", "Hello?", by="bob")
            await driven(app)
            return statuses(app)

    assert run(main()) == ["pending"]


def test_of_two_calls_one_may_be_kept_and_an_empty_answer_decides_nothing(url: str) -> None:
    both = wants(("pay", {"cents": 1}), ("pay", {"cents": 2}))
    agent, model = payer(both, "", asks(2), "done")

    async def main() -> None:
        async with opened(url, agent) as app:
            await app.start(agent, "go", id="r")
            await driven(app)
            for asked in pending(app):
                await app.approve(asked.approval, by="ann")
            await app.signal("r", "message", "Only the second.", by="bob")
            await driven_until(app, "succeeded", "withdrawn", "consumed")
            check_replay(app, agent)

    run(main())
    assert (PAID, model.told[-1]) == ([2], "paid 2 to ann")


def test_while_calls_are_held_the_run_takes_no_checkpoint_and_its_turns_still_count() -> None:
    agent, _ = payer(asks(), asks(), asks(), checkpoint_bytes=1, max_turns=2)

    async def main() -> tuple[str, list[str]]:
        async with opened("sqlite://", agent) as app:
            await waiting(app, agent)
            await app.signal("r", "message", "Hello?", by="bob")
            status = await driven(app)
            check_replay(app, agent)
            assert "checkpoint_taken" not in [event.type for event in await app.handle("r").events()]
            return status, statuses(app)

    assert run(main()) == ("failed", ["withdrawn"])
    assert PAID == []


def test_a_cancel_while_a_call_is_held_withdraws_it() -> None:
    async def cancelled(request: Request) -> Any:
        await app.cancel("r", by="bob")
        await asyncio.Event().wait()

    agent, _ = payer(asks(), cancelled, "done")
    app = opened("sqlite://", agent)

    async def main() -> tuple[str, list[str]]:
        async with app:
            approval = await waiting(app, agent)
            await app.signal("r", "message", "Hello?", by="bob")
            await app.approve(approval, by="ann")
            status = await driven(app)
            check_replay(app, agent)
            return status, statuses(app)

    assert run(main()) == ("cancelled", ["withdrawn"])
    assert PAID == []


# -- killed -------------------------------------------------------------------------------------------------------------
@tool(effect="keyed", approval=True)
async def give(cents: int, call: Call) -> str:
    """Give a person something."""
    GIVEN[call.key] = cents
    return "given"


GIVEN: dict[str, int] = {}  # key → what a service has done


class Mortal:
    """A process that dies at its nth write: before the write, or right after it."""

    def __init__(self, app: Perdure, at: int, after: bool) -> None:
        self.left, self.died = at, False
        for name in ("append", "decide"):
            setattr(app.store, name, self._wrapped(getattr(app.store, name), after))

    def _wrapped(self, write: Callable[..., Any], after: bool) -> Callable[..., Any]:
        def writes(*args: Any, **more: Any) -> Any:
            self.left -= 1
            if self.left < 0 or self.died:
                if after and not self.died:
                    write(*args, **more)
                self.died = True
                raise StoreUnavailable("this process is dead")
            return write(*args, **more)

        return writes


@pytest.mark.full  # the explorer (tests/core) has more of these in the quick tests
@pytest.mark.parametrize("order", ["yes, message", "message, yes", "message"])
@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("after", [True, False])
def test_killed_at_any_write_the_call_is_made_once_if_it_is_kept_and_never_if_it_is_withdrawn(
    tmp_path: Path, order: str, keeps: bool, after: bool
) -> None:
    deaths = 0
    for at in range(12):
        GIVEN.clear()
        agent = ReAct("payer", model=Answering(keeps), tools=[give])
        deaths += run(_killed(f"sqlite:///{tmp_path / f'db{at}'}", agent, order, at, after))
        assert list(GIVEN.values()) == ([900] if keeps else []), at
    assert 3 <= deaths < 12, "some of the numbers are beyond the last write"


class Answering(ByTurn):
    """Asks for the call; keeps it or not after a message; ends after a result. The same answer to the same conversation."""

    def __init__(self, keeps: bool) -> None:
        super().__init__([])
        self._keeps = keeps

    async def answer(self, request: Request, call: Call) -> Any:
        last = request.messages[-1]
        if isinstance(last, User):
            self._lines = (wants(("give", {"cents": 900})) if last.text == "go" or self._keeps else "I leave it.",)
        else:
            self._lines = ("done",)
        self.asked.clear()
        return await super().answer(request, call)


async def _killed(url: str, agent: ReAct, order: str, at: int, after: bool) -> bool:
    clock = ManualClock()
    async with opened(url, agent, clock=clock) as app:
        approval = await waiting(app, agent)
        await _posted(app, approval, order)
        mortal = Mortal(app, at, after)
        driving: Awaitable[str] = asyncio.ensure_future(driven(app))
        await until(lambda: mortal.died or driving.done())  # type: ignore[attr-defined]
        if mortal.died:
            app.abort()
        await driving
    async with opened(url, agent, clock=clock) as app:
        status = await driven(app)
        if status == "waiting_approval":
            assert GIVEN == {}
            await app.approve(the_one(app), by="ann")
            status = await driven(app)
        assert status == "succeeded"
        assert len(rows(app)) == 1, "no person is asked twice"
        check_replay(app, agent)
    return mortal.died


async def _posted(app: Perdure, approval: str, order: str) -> None:
    for what in order.split(", "):
        if what == "yes":
            await app.approve(approval, by="ann")
        else:
            await app.signal("r", "message", "Hello?", by="bob")


_PROGRAM = """
import asyncio
import inspect
from pathlib import Path
from perdure import Call, ReAct, tool
from perdure.models import Answer, Model
from perdure.models.scripted import use, uses

HERE = Path(__file__).parent

@tool(effect="keyed", approval=True)
async def give(cents: int, call: Call) -> str:
    "Give something."
    with (HERE / "given").open("a") as ledger:
        ledger.write(f"{call.key}\\n")
    return "given"

class Slow(Model):
    async def answer(self, request, call):
        last = request.messages[-1]
        if getattr(last, "text", "") == "Hello?":
            (HERE / "asked").touch()
            while (HERE / "blocked").exists():
                await asyncio.sleep(0.01)
        return Answer("done") if type(last).__name__ == "ToolResult" else uses(use("give", cents=900))

giver = ReAct("giver", model=Slow("slow"), tools=[give], version="1")
"""


@pytest.mark.full
def test_a_worker_that_is_killed_while_the_model_considers_the_message_has_begun_nothing(url: str, tmp_path: Path) -> None:
    """A real process and SIGKILL: the call was approved before, and is made once, after the model has kept it."""
    program, given, blocked = tmp_path / "giving.py", tmp_path / "given", tmp_path / "blocked"
    program.write_text(_PROGRAM)
    command = [sys.executable, "-m", "perdure"]
    at = ["--url", url]
    assert subprocess.run([*command, "run", f"{program}:giver", "prompt=go", "--id", "r", *at], check=False).returncode == 3

    async def post() -> None:
        async with Perdure(url, settings=SETTINGS) as app:
            (asked,) = await app.approvals()
            await app.approve(asked.approval, by="ann")
            await app.signal("r", "message", "Hello?", by="bob")

    run(post())
    blocked.touch()
    worker = subprocess.Popen([*command, "resume", "r", f"{program}:giver", *at])
    try:
        run(until(lambda: (tmp_path / "asked").exists()))
        assert not given.exists()
    finally:
        worker.kill()
        worker.wait()
    assert not given.exists()
    blocked.unlink()
    assert subprocess.run([*command, "resume", "r", f"{program}:giver", *at], check=False).returncode == 0
    assert len(given.read_text().split()) == 1


@pytest.mark.parametrize("keeps", [True, False])
def test_a_rehearsal_goes_the_way_of_the_recorded_run(tmp_path: Path, keeps: bool) -> None:
    agent, _ = payer(asks(), asks() if keeps else "I leave it.", "done")

    async def main() -> list[list[str]]:
        async with opened(f"sqlite:///{tmp_path / 'db'}", agent) as app:
            approval = await waiting(app, agent)
            await app.approve(approval, by="ann")
            await app.signal("r", "message", "Hello?", by="bob")
            await driven_until(app, "succeeded", "consumed" if keeps else "withdrawn")
            first = next(event.seq for event in app.store.read("r") if event.type == "model_call_initiated")
            await app.fork("r", at=first, id="rehearsed", by="ann")
            row = await app.handle("rehearsed").row()
            assert row.status == "succeeded"
            return [kinds(await app.handle(one).events(), CallHeld, CallKept) for one in ("r", "rehearsed")]

    recorded, rehearsed = run(main())
    assert recorded == rehearsed == ["call_held", *(["call_kept"] if keeps else [])]
