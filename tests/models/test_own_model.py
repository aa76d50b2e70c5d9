"""A user's own model, a scripted model and the adapters, as durable calls.

A recorded answer is never requested again.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.models.adapters import Api, every_api, model_for
from tests.servers.providers import Provider, say, use
from tests.unit.approval_tools import driven
from tests.unit.drive_tools import ManualClock, outline, perdure, run

from perdure import Agent, Perdure, Retry, Run, RunFailed, ToolFailed, agent
from perdure.errors import Fatal, InvalidInput
from perdure.models import Answer, Assistant, Model, Price, Request, Scripted, Tokens, User
from perdure.models.scripted import use as wanted
from perdure.models.scripted import uses
from perdure.tool.call import Call

HOUR = 3600.0


class Parrot(Model):
    """Ten lines are a model."""

    asked = 0

    async def answer(self, request: Request, call: Call) -> Answer:
        self.asked += 1
        said = request.messages[-1]
        assert isinstance(said, User)
        self.say(call, said.text)
        return Answer(said.text.upper(), tokens=Tokens(input=len(said.text), output=1))


def talker(model: Model) -> Agent[Any, Any]:
    """Asks, waits for an hour, and asks again."""

    @agent(version="1")
    async def talk(run: Run, text: str) -> list[str]:
        first = await model.ask(text)
        await asyncio.sleep(HOUR)
        second = await model.ask([User(text), first.message, User("and?")])
        return [first.text, second.text]

    return talk


async def resumed(where: Path, code: Agent[Any, Any]) -> tuple[Any, list[str], Any]:
    """The run's result, its journal and its costs, driven by three processes one after another."""
    clock = ManualClock()
    async with perdure(where, [code], clock) as app:
        await app.start(code, "hi", id="r")
    for _ in range(2):
        async with perdure(where, [code], clock) as app:
            await driven(app)
        clock.advance(HOUR)
    async with perdure(where, [code], clock) as app:
        handle = app.handle("r")
        return await handle.result(), outline(await handle.events()), (await app.costs("model"))[0]


def test_a_model_in_ten_lines_is_asked_once_for_each_answer(tmp_path: Path) -> None:
    heard: list[str] = []
    parrot = Parrot("parrot", price=Price(input=1, output=1), listener=lambda _, text: heard.append(text))
    result, journal, costs = run(resumed(tmp_path / "db", talker(parrot)))
    assert result == ["HI", "AND?"]
    assert (parrot.asked, heard) == (2, ["hi", "and?"])
    assert [line for line in journal if "parrot" in line] == ["initiated parrot 1/1", "initiated parrot 2/1"]
    assert (costs.tokens_in, costs.tokens_out, costs.usd_micros) == (6, 2, 8)


@every_api
def test_an_answer_that_is_recorded_is_not_asked_for_again(api: Api, provider: Provider, tmp_path: Path) -> None:
    provider.script([say("Hello.", thought="friendly" if api != "chat" else None), "Goodbye."])
    result, _, costs = run(resumed(tmp_path / "db", talker(model_for(api))))
    assert result == ["Hello.", "Goodbye."]
    lines = provider.requests()
    assert [(line.status, line.turn) for line in lines] == [(200, 0), (200, 1)]
    assert (costs.tokens_in, costs.tokens_out) == tuple(sum(line.tokens[name] for line in lines) for name in ("input", "output"))


@every_api
def test_a_fault_that_passes_is_tried_again_with_the_same_key_and_one_that_does_not_is_not(api: Api, provider: Provider) -> None:
    model = model_for(api, retry=Retry(attempts=4, base=0, jitter=0))

    @agent(version="1")
    async def asks(run: Run) -> str:
        said = (await model.ask("one")).text
        try:
            await model.ask("two")
        except ToolFailed as error:
            return f"{said} {error.kind} {error.attempts}"
        return "no failure"

    async def main() -> tuple[Any, list[str]]:
        async with perdure(None, [asks]) as app:
            handle = await app.start(asks)
            return await handle.result(), outline(await handle.events())

    provider.script(["yes"])
    for fault in ("529", "error_event", "truncate"):
        provider.fault(fault)
    provider.fault("400", nth=5)
    result, journal = run(main())
    assert result == "yes refused 1"
    assert [line.split(" ", 1)[1] for line in journal if line.startswith("failing")] == [
        "1/1 server_error",
        "1/2 server_error",
        "1/3 reset",
    ]
    lines = provider.requests()
    assert [line.injected for line in lines] == ["529", "error_event", "truncate", None, "400"]
    assert len({line.key for line in lines[:4]}) == 1
    assert lines[4].key != lines[0].key


# -- Scripted -----------------------------------------------------------------------------------------------------------
def test_a_script_goes_on_where_each_conversation_is(tmp_path: Path) -> None:
    scripted = Scripted(["one", lambda request: f"two of {len(request.messages)}"])
    result, *_ = run(resumed(tmp_path / "db", talker(scripted)))
    assert result == ["one", "two of 3"]


def test_a_script_says_raises_and_ends() -> None:
    async def main() -> None:
        model = Scripted([uses(wanted("lookup", order="o-1"), wanted("lookup", order="o-1"), text="Hm."), ValueError("boom")])
        answer = await model.ask("hi")
        assert (answer.text, answer.stop, [use.arguments for use in answer.uses]) == ("Hm.", "tools", [{"order": "o-1"}] * 2)
        assert len({use.id for use in answer.uses}) == 2
        with pytest.raises(ValueError, match="boom"):
            await model.ask([User("hi"), Assistant("x"), User("y")])
        with pytest.raises(Fatal, match="2 lines, and is asked for one more"):
            await model.ask([User("hi"), Assistant("x"), User("y"), Assistant("z"), User("!")])

    run(main())


@pytest.mark.parametrize("lines", ["a text", [1], [None]])
def test_what_is_no_script_is_refused(lines: Any) -> None:
    with pytest.raises(InvalidInput, match="list of lines"):
        Scripted(lines)


def test_what_is_no_answer_is_a_clear_error() -> None:
    class Broken(Model):
        async def answer(self, request: Request, call: Call) -> Answer:
            return "text"  # type: ignore[return-value]

    model = Broken("broken")

    @agent(version="1")
    async def asks(run: Run) -> str:
        try:
            await model.ask("hi")
        except ToolFailed as error:
            return error.message
        return "no failure"

    async def main() -> Any:
        async with perdure(None, [asks]) as app:
            return await app.run(asks)

    assert run(main()) == "model broken: its answer() returned a str; return Answer(text=…)"


def test_a_use_that_is_asked_for_reaches_the_agent_as_it_is(provider: Provider) -> None:
    model = model_for("anthropic")

    @agent(version="1")
    async def asks(run: Run) -> Any:
        answer = await model.ask("hi")
        return [[use.name, use.arguments] for use in answer.uses]

    async def main() -> Any:
        async with perdure(None, [asks]) as app:
            return await app.run(asks)

    provider.script([say("", use("lookup", order="o-1"), use("lookup", '{"order'))])
    assert run(main()) == [["lookup", {"order": "o-1"}], ["lookup", '{"order']]


def test_a_model_that_is_not_async_is_told_how_to_be() -> None:
    class Blocking(Model):
        def answer(self, request: Request, call: Call) -> Answer:  # type: ignore[override]
            return Answer("here")

    blocking = Blocking("blocking")

    @agent(version="1")
    async def asks(run: Run) -> str:
        return (await blocking.ask("hello")).text

    async def main() -> None:
        async with Perdure("sqlite://", [asks]) as app:
            with pytest.raises(RunFailed, match="write `async def answer"):
                await app.run(asks, id="r")

    run(main())


def test_a_model_whose_price_nobody_knows_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    class Costly(Model):
        async def answer(self, request: Request, call: Call) -> Answer:
            return Answer("here", tokens=Tokens(1000, 1000))

    costly = Costly("costly")

    @agent(version="1")
    async def asks(run: Run) -> str:
        return (await costly.ask("hello")).text + (await costly.ask("again")).text

    async def main() -> None:
        async with Perdure("sqlite://", [asks]) as app:
            await app.run(asks, id="r")

    run(main())
    assert caplog.text.count("model costly: its price is not known") == 1
