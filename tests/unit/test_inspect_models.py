"""Model calls, plans and decisions as people see them; and a long conversation in the database."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import apsw
import pytest
from msgspec import structs
from tests.conformance.suite_waiting import HOUR, NOW, hold, payload
from tests.unit.drive_tools import SETTINGS, perdure, run
from tests.unit.inspect_tools import forge
from tests.unit.postgres_tools import empty
from tests.unit.postgres_tools import raw as raw_postgres

from perdure import Agent, Budget, Rate, Retry, Run, Settings, agent, tool
from perdure.core import codec
from perdure.core.events import (
    Event,
    Failure,
    ModelCallCompleted,
    ModelCallFailed,
    ModelCallInitiated,
    PlanGenerated,
    RetryScheduled,
    ToolCallCompleted,
    ToolCallProposed,
    Usage,
)
from perdure.core.prompt_deltas import Prompts
from perdure.core.state import LOST
from perdure.errors import Fatal, InvalidInput, NotFound, RetryLater, StoreCorrupt
from perdure.inspect.audit import Trail
from perdure.inspect.cost import cost_of, cost_words
from perdure.inspect.prompt import request_of_call
from perdure.inspect.text import sentence
from perdure.inspect.timeline import Timeline
from perdure.inspect.trace import trace
from perdure.inspect.verify import verify_run
from perdure.inspect.view import loader, read_run, run_record
from perdure.inspect.why.page import Why, why
from perdure.models import Answer, Assistant, Price, Request, Scripted, Tokens, ToolResult, ToolSpec, User
from perdure.models.messages import Message, encoded, shown_result
from perdure.models.scripted import use, uses
from perdure.store import pruning
from perdure.store.api import CostRow, Store
from perdure.store.open import open_store
from perdure.store.transfer import Copying
from perdure.tool.call import Call

LONG = "a long line about orders; " * 20
SPECS = [ToolSpec("lookup", "finds an order", {"type": "object"}), ToolSpec("refund", "pays it back", {"type": "object"})]


class Heard(Scripted):
    """A scripted model that keeps its requests, byte for byte."""

    def __init__(self, *lines: Any, **options: Any) -> None:
        super().__init__(lines, **options)
        self.heard: list[bytes] = []

    async def answer(self, request: Request, call: Call) -> Answer:
        self.heard.append(encoded(request))
        return await super().answer(request, call)


@tool(effect="read")
async def lookup(order: str) -> dict[str, Any]:
    return {"order": order, "notes": LONG}


@tool(effect="idempotent")
async def refund(order: str, cents: int) -> str:
    return f"refunded {order}"


TOOLS: dict[str, Any] = {"lookup": lookup, "refund": refund}


def chatting(model: Scripted) -> Agent[..., str]:
    @agent(version="1", name="chat")
    async def chat(run: Run, prompt: str) -> str:
        messages: list[Message] = [User(prompt)]
        while True:
            answer = await model.ask(messages, system="be kind", tools=SPECS)
            messages.append(answer.message)
            if not answer.uses:
                run.decide("stop", among=["stop", "go on"], reason="nothing is left to do")
                return answer.text
            results = await asyncio.gather(*(TOOLS[one.name](**cast(dict[str, Any], one.arguments)) for one in answer.uses))
            messages += [
                ToolResult(one.id, one.name, shown_result(codec.encode(result))) for one, result in zip(answer.uses, results, strict=True)
            ]

    return chat


def clever() -> Heard:
    return Heard(
        Answer("Let me see.", (use("lookup", order="o-1"), use("lookup", order="o-2")), "tools", tokens=Tokens(1204, 35)),
        uses(use("refund", order="o-1", cents=500)),
        Answer("Done \x1b[2J\u202e", tokens=Tokens(10, 5, cached=4)),
        name="claude-x",
        price=Price(3, 15),
    )


def finished(path: Path, model: Heard, settings: Settings = SETTINGS) -> Store:
    """A run of a conversation with tools, to its end."""
    chat = chatting(model)

    async def main() -> None:
        async with perdure(path, [chat], settings=settings) as app:
            await (await app.start(chat, "my order is broken", id="r", tenant="acme")).row()
            await app.engine.drive("r")

    run(main())
    return open_store(f"sqlite:///{path}")


Ask = Callable[[str], list[Any]]


@pytest.fixture(params=["sqlite", "postgres"])
def journal(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Store, Ask]]:
    """A store, and direct SQL on its database."""
    if request.param == "sqlite":
        store = open_store(f"sqlite:///{tmp_path}/journal.db")
        with apsw.Connection(str(tmp_path / "journal.db")) as prompt:
            yield store, lambda sql: list(prompt.execute(sql))
    else:
        url = empty(request.getfixturevalue("postgres"))
        store = open_store(url)
        with raw_postgres(url) as other:
            yield store, lambda sql: other.execute(sql.encode()).fetchall()
    store.close()


def lines(store: Store) -> list[str]:
    timeline = Timeline("r", loader(store))
    return [timeline.say(event) for event in store.read("r")]


# -- the requests, byte for byte --------------------------------------------------------------------------------------
@pytest.mark.parametrize("inline_bytes", [64 * 1024, 100])
def test_every_request_comes_out_of_the_journal_as_it_went_to_the_model(tmp_path: Path, inline_bytes: int) -> None:
    """Also if requests, answers and results are blobs."""
    model = clever()
    store = finished(tmp_path / "j.db", model, Settings(inline_bytes=inline_bytes))
    reading = read_run(store, "r")
    assert [request_of_call(reading, call, loader(store)) for call in (1, 4, 6)] == model.heard
    row = store.get("r")
    assert row is not None
    assert verify_run(store, row).problem is None
    store.close()
    assert bool(count(tmp_path / "j.db", "SELECT count(*) FROM perdure_blobs")) == (inline_bytes == 100)


def test_a_call_that_asked_no_model_is_told_apart_from_one_that_is_not_there(tmp_path: Path) -> None:
    store = finished(tmp_path / "j.db", clever())
    reading = read_run(store, "r")
    with pytest.raises(
        InvalidInput, match="call 2 of run r is one of tool lookup, and no question to a model; its calls to models are 1, 4, 6"
    ):
        request_of_call(reading, 2, loader(store))
    with pytest.raises(NotFound, match="run r has no call 7"):
        request_of_call(reading, 7, loader(store))
    # As of an event before the second request, there was no such request.
    with pytest.raises(NotFound, match="has no call 4"):
        request_of_call(read_run(store, "r", 6), 4, loader(store))
    store.close()


@pytest.mark.parametrize("what", ["an answer", "a result", "a question"])
def test_a_journal_that_was_rewritten_does_not_lead_to_the_request(tmp_path: Path, what: str) -> None:
    """Also if the forger has computed the hashes again."""
    store = finished(tmp_path / "j.db", clever())
    events = store.read("r")
    kind = {"an answer": ModelCallCompleted, "a result": ToolCallCompleted, "a question": ModelCallInitiated}[what]
    event = next(one for one in events if type(one.body) is kind)
    body: Any = event.body
    name = "args" if what == "a question" else "result"
    forged = bytes(getattr(body, name).json).replace(b"see", b"look").replace(b"orders", b"errors").replace(b"broken", b"fixed")
    store.close()
    changed = type(body)(**{field: getattr(body, field) for field in body.__struct_fields__} | {name: codec.pack(forged)[0]})
    forge(tmp_path / "j.db", "r", {event.seq: changed})
    store = open_store(f"sqlite:///{tmp_path / 'j.db'}")
    with pytest.raises(StoreCorrupt, match="the request of call 6 cannot be made again as it was"):
        request_of_call(read_run(store, "r"), 6, loader(store))
    store.close()


# -- in words --------------------------------------------------------------------------------------------------------------
def test_a_conversation_reads_like_one(tmp_path: Path) -> None:
    store = finished(tmp_path / "j.db", clever())
    told = lines(store)
    assert told[2] == "call 1 claude-x is asked (1 message)"
    answered = 'call 1 claude-x answered in moments: “Let me see.” and wants lookup(order="o-1"), lookup(order="o-2")'
    assert told[3] == f"{answered} (1,204 tokens in, 35 out, $0.004137)"
    assert "call 4 claude-x is asked (4 messages, 3 of them new)" in told
    assert 'call 4 claude-x answered in moments: wants refund(cents=500, order="o-1")' in told
    assert 'the agent decided "stop" among ["stop","go on"], because nothing is left to do' in told
    assert not [line for line in told if "digest" in line or "again_of" in line or "frame" in line]
    page = page_of(store)
    assert page.done[0].asked == "claude-x (1 message)"
    assert page.done[3].outcome == 'answered: wants refund(cents=500, order="o-1")'
    record = run_record(read_run(store, "r"), loader(store))
    assert [call["kind"] for call in record["calls"]] == ["model", "tool", "tool", "model", "tool", "model"]
    store.close()


def test_a_run_that_has_only_asked_has_nothing_to_undo(tmp_path: Path) -> None:
    def line(request: Request) -> str:
        if request.messages != (User("one"),):
            raise Fatal("no more")
        return "fine"

    page = waiting(tmp_path / "j.db", Scripted([line], name="claude-x"))
    assert page.status == "failed"
    assert not [step.command for step in page.next if "undo" in step.command]


def test_what_a_model_was_told_before_it_wanted_a_tool_is_in_the_trace(tmp_path: Path) -> None:
    store = finished(tmp_path / "j.db", clever(), Settings(inline_bytes=100))
    events = store.read("r")
    refunded = next(event for event in events if event.call == 5)
    links = trace("r", events, refunded.seq, store.read, loader(store))
    assert links[0].type == "run_created"
    assert links[-1].because is not None
    assert links[-1].because.endswith('wanted it: refund(cents=500, order="o-1")')
    asked = [link for link in links if link.type == "model_call_initiated"]
    assert [link.call for link in asked] == [1, 4]
    assert asked[0].heard == ["the user said: “my order is broken”"]
    assert [heard[:30] for heard in asked[1].heard] == ['the result of lookup: {"notes"'] * 2
    # Of two uses of the same tool, this call is the second.
    second = trace("r", events, next(event.seq for event in events if event.call == 3), store.read, loader(store))
    assert str(second[-1].because).endswith('wanted it: lookup(order="o-2")')
    store.close()


BOOM = Failure("server_error", "Overloaded", "529")
LOST_ANSWER = ModelCallFailed(Failure("process_died", LOST, "its worker ended while the model was asked"), attempt=1)


def test_an_answer_that_was_lost_with_its_worker_is_told() -> None:
    names = {4: "claude-x"}
    assert sentence(Event(9, "0", 0, 1, 4, 8, LOST_ANSWER), names) == (
        "call 4 claude-x: the answer to attempt 1 was lost with its worker, and its cost is unknown"
    )
    charged = structs.replace(LOST_ANSWER, usage=Usage(150_000, 0, 1000))
    assert sentence(Event(9, "0", 0, 1, 4, 8, charged), names) == (
        "call 4 claude-x: the answer to attempt 1 was lost with its worker; it counts as what was reserved for it: 0 tokens in, 1,000 out, $0.15"
    )
    again = ModelCallInitiated("claude-x", "idempotent", "k", attempt=2)
    assert sentence(Event(10, "0", 0, 1, 4, 9, again), names) == "call 4 claude-x is asked again (attempt 2)"
    refused = ModelCallFailed(Failure("refused", "BadRequest", "too long"), attempt=2, final=True, usage=Usage(tokens_in=9))
    told = "call 4 claude-x gave no answer at attempt 2, for good: BadRequest: too long (9 tokens in, 0 out)"
    assert sentence(Event(11, "0", 0, 1, 4, 10, refused), names) == told


def test_a_plan_is_told_by_its_steps() -> None:
    plan, _ = codec.pack(codec.encode({"name": "deploy", "steps": [{"name": "build", "tool": "make"}, {"name": "lb", "tool": "update"}]}))
    event = Event(3, "0", 0, 1, None, 2, PlanGenerated(plan, "d" * 64, by="claude-x"))
    assert sentence(event, {}) == "the run follows the plan deploy: build, lb (2 steps), which claude-x has written"
    line = Trail("r").line(event)
    assert (line["context"]["plan_digest"], line["context"]["by"]) == ("d" * 64, "claude-x")
    odd, _ = codec.pack(codec.encode([1]))
    assert sentence(Event(3, "0", 0, 1, None, 2, PlanGenerated(odd, "d")), {}) == "the run follows a plan: [1]"


# -- a run that waits in a question ----------------------------------------------------------------------------------------
def page_of(store: Store, now: int | None = None) -> Why:
    row = store.get("r")
    assert row is not None
    return why(store, "r", now=row.updated_at if now is None else now)


def waiting(path: Path, model: Scripted, **options: Any) -> Why:
    """The page about a run that has asked until it rested."""

    @agent(version="1", name="chat", **options)
    async def chat(run: Run) -> str:
        await model.ask("one")
        return (await model.ask("two")).text

    async def main() -> Why:
        async with perdure(path, [chat]) as app:
            await app.start(chat, id="r")
            await app.engine.drive("r", wait=False)
            return page_of(app.store)

    return run(main())


def test_why_says_that_a_model_is_asked_again_later(tmp_path: Path) -> None:
    model = Scripted([RetryLater("overloaded", after=60)], name="claude-x", retry=Retry(attempts=3))
    page = waiting(tmp_path / "j.db", model)
    assert page.sentence.startswith("waiting since")
    assert "retry of claude-x (call 1)" in page.sentence
    (wait,) = page.waiting
    assert "call 1 claude-x: asked again at" in wait
    assert "(attempt 2)" in wait
    assert "overloaded" in wait


def test_why_says_that_a_question_waits_for_its_turn(tmp_path: Path) -> None:
    model = Scripted(["fine", "fine"], name="claude-x", rate=Rate(limit=1, per=3600))
    page = waiting(tmp_path / "j.db", model)
    assert "its turn under the rate limit: claude-x (call 2)" in page.sentence
    (wait,) = page.waiting
    assert wait.startswith("call 2 claude-x: its turn under the rate limit, at")
    assert "call 2: claude-x (1 message): not sent: it waits for its turn under the rate limit" in page.never_started
    store = open_store(f"sqlite:///{tmp_path / 'j.db'}")
    assert [line for line in lines(store) if "call 2 claude-x (1 message) is to be asked, and waits until its rate allows it, " in line]
    assert len(request_of_call(read_run(store, "r"), 2, loader(store))) > 10
    store.close()
    assert effects(tmp_path / "j.db") == [(1, "claude-x", "done", 1, "model"), (2, "claude-x", "waiting for rate", 0, "model")]


def test_why_says_that_there_is_no_money_left_for_a_question(tmp_path: Path) -> None:
    page = waiting(tmp_path / "j.db", Scripted(["fine", "fine"], name="claude-x"), budget=Budget(calls=1))
    assert "(budget)" in page.sentence
    assert "1 of 1 call" in page.sentence
    assert [line for line in page.never_started if "claude-x (1 message): not sent: there is not enough left in the budget" in line]


def test_why_says_what_a_model_is_being_asked_and_what_was_cut_off(tmp_path: Path) -> None:
    path, pages = tmp_path / "j.db", []

    class Slow(Scripted):
        async def answer(self, request: Request, call: Call) -> Answer:
            other = open_store(f"sqlite:///{path}")
            pages.append(page_of(other))
            other.close()
            return await super().answer(request, call)

    waiting(path, Slow(["fine", "fine"], name="claude-x"))
    (under_way,) = pages[0].under_way
    assert (under_way.asked, under_way.state.split(" for ")[0]) == ("claude-x (1 message)", "being asked")


@pytest.mark.parametrize("inline_bytes", [64 * 1024, 100])
def test_a_run_whose_prompt_has_changed_stops_and_says_so_in_words(tmp_path: Path, inline_bytes: int) -> None:
    path, settings = tmp_path / "j.db", Settings(inline_bytes=inline_bytes)
    for system in ("be kind", "be cruel"):
        run(asked_under(system, path, settings))
    store = open_store(f"sqlite:///{path}")
    page = page_of(store)
    store.close()
    assert "needs attention" in page.sentence
    assert (
        "the code asks for call 1: claude-x(1 message, the last from user: 'one', with a system prompt, tools or settings that are new)"
        in page.sentence
    )
    assert "digest" not in page.sentence


async def asked_under(system: str, path: Path, settings: Settings) -> None:
    model = Scripted(["fine"], name="claude-x")

    @agent(version="1", name="chat")
    async def chat(run: Run) -> None:
        await model.ask("one", system=system)
        await run.receive("go")

    async with perdure(path, [chat], settings=settings) as app:
        await app.start(chat, id="r")
        await app.engine.drive("r", wait=False)
        await app.signal("r", "go", None)


# -- costs
# --------------------------------------------------------------------------------------------------------------
def test_questions_are_counted_by_model_agent_tenant_and_day(tmp_path: Path) -> None:
    store = finished(tmp_path / "j.db", clever())
    by_model = {row.group: row for row in store.costs("model")}
    asked = by_model["claude-x"]
    assert (asked.calls, asked.tokens_in, asked.tokens_out, asked.tokens_cached, asked.lost) == (3, 1214, 40, 4, 0)
    assert by_model["no model"].calls == 3
    for by, group in (("agent", "chat"), ("tenant", "acme"), ("day", "2023-11-14"), ("run", "r"), ("root", "r")):
        (row,) = store.costs(by)  # type: ignore[arg-type]  # one of the words
        assert (row.group, row.calls, row.tokens_in, row.usd_micros) == (group, 6, 1214, asked.usd_micros)
    assert {row.group for row in store.costs("tool")} == {"claude-x", "lookup", "refund"}
    cost = run_record(read_run(store, "r"), loader(store))["cost"]
    assert (cost["calls"], cost["tokens_in"], cost["usd_micros"], cost["lost"]) == (6, 1214, asked.usd_micros, 0)
    store.close()


def test_a_lost_request_counts_with_what_was_reserved_for_it(journal: tuple[Store, Ask]) -> None:
    store, _ = journal
    hand = hold(store, "r")
    hand.write(ModelCallInitiated("claude-x", "idempotent", "k", args=payload({})), call=1, ts=NOW)
    hand.write(structs.replace(LOST_ANSWER, usage=Usage(3, 0, 10, 0, "claude-x")), call=1, ts=NOW + HOUR)
    hand.write(ModelCallInitiated("claude-x", "idempotent", "k", attempt=2), call=1, ts=NOW + HOUR)
    hand.write(ModelCallCompleted(payload({}), attempt=2, usage=Usage(7, 100, 20, 0, "claude-x")), call=1, ts=NOW + HOUR + 5)
    assert store.costs("model") == [CostRow("claude-x", 1, 1, 5, 10, 100, 30, 0, lost=1)]
    reading = read_run(store, "r")
    assert cost_of(reading.state, reading.events).lost == 1
    words = cost_words(reading.state, reading.events)
    assert words.endswith(", with 1 lost request to models, counted with what was reserved for them")


# -- other tables
# -------------------------------------------------------------------------------------------------------
def effects(path: Path) -> list[Any]:
    return list(apsw.Connection(str(path)).execute("SELECT call, tool, state, attempts, kind FROM perdure_effects ORDER BY call"))


def test_at_a_prompt_questions_are_told_apart_from_effects(tmp_path: Path) -> None:
    finished(tmp_path / "j.db", clever()).close()
    questions = [(number, "claude-x", "done", 1, "model") for number in (1, 4, 6)]
    assert [row for row in effects(tmp_path / "j.db") if row[4] == "model"] == questions
    assert [row[:3] for row in effects(tmp_path / "j.db") if row[4] == "tool"] == [
        (2, "lookup", "done"),
        (3, "lookup", "done"),
        (5, "refund", "done"),
    ]


def test_what_became_of_a_question_is_seen_on_both_databases(journal: tuple[Store, Ask]) -> None:
    store, ask = journal
    hand = hold(store, "r")
    packed = payload(codec.decode(Prompts().pack(lambda _: 1, {"model": "m"}, [User("hi")])))
    large, _ = codec.pack(Prompts().pack(lambda _: 1, {"model": "m"}, [User("hi " * 200)]), inline_bytes=100)

    def asked(attempt: int = 1) -> ModelCallInitiated:
        return ModelCallInitiated("m", "idempotent", "k", attempt=attempt, args=packed)

    hand.write(asked(), ModelCallCompleted(payload({})), call=1)
    hand.write(asked(), LOST_ANSWER, asked(2), call=2)
    hand.write(asked(), ModelCallFailed(BOOM, final=True), call=3)
    hand.write(asked(), ModelCallFailed(BOOM), RetryScheduled(2, NOW), call=4)
    hand.write(ToolCallProposed("m", "idempotent", "k", packed, "d", "rate", NOW), call=5)
    hand.write(ToolCallProposed("m", "idempotent", "k", large, "d", "budget"), call=6)
    hand.write(ToolCallProposed("pay", "once", "k", payload({"digest": "x"}), "d", "approval"), call=7)
    assert ask("SELECT call, state, attempts, kind FROM perdure_effects WHERE run_id = 'r' ORDER BY call") == [
        (1, "done", 1, "model"),
        (2, "started", 2, "model"),
        (3, "failed", 1, "model"),
        (4, "waiting to be tried again", 1, "model"),
        (5, "waiting for rate", 0, "model"),
        (6, "waiting for budget", 0, "model"),
        (7, "waiting for approval", 0, "tool"),
    ]


def test_what_was_said_goes_with_its_run_and_with_no_other(tmp_path: Path) -> None:
    """Large questions and answers lie in the blob store: a copy takes them along, and a prune deletes them with the last run that had them."""
    model, path = clever(), tmp_path / "j.db"
    store = finished(path, model, Settings(inline_bytes=100))
    blobs = "SELECT count(*) FROM perdure_blobs"
    assert count(path, blobs) > 6
    there = open_store(f"sqlite:///{tmp_path / 'there.db'}")
    Copying(store, there, to_url=there.url, by="ann").move(now=NOW, lease_us=1)
    reading = read_run(there, "r")
    assert [request_of_call(reading, call, loader(there)) for call in (1, 4, 6)] == model.heard
    found = pruning.found(there, reading.row.updated_at + 1, ["succeeded"], None)
    assert pruning.prune(there, found, reading.row.updated_at + 1, by="ann", clock=lambda: NOW).families == 1
    assert count(tmp_path / "there.db", blobs) == 0
    store.close()
    there.close()


def count(path: Path, sql: str) -> int:
    found: int = apsw.Connection(str(path)).execute(sql).get
    return found


# -- a long conversation ---------------------------------------------------------------------------------------------------
TURNS, CHARS = 200, 2000


@tool(effect="read")
async def page(turn: int) -> str:
    return f"page {turn}: " + "p" * CHARS


def talking(with_tools: bool) -> Agent[..., int]:
    def line(request: Request) -> Answer:
        turn = sum(isinstance(message, Assistant) for message in request.messages)
        text = f"answer {turn}: " + "a" * CHARS
        return uses(use("page", turn=turn), text=text) if with_tools else Answer(text)

    model = Scripted([line] * TURNS)

    @agent(version="1", name="talk")
    async def talk(run: Run) -> int:
        messages: list[Message] = []
        while len(messages) < TURNS * (3 if with_tools else 2):
            messages.append(User(await run.receive("chat")))
            answer = await model.ask(messages)
            messages.append(answer.message)
            messages += [ToolResult(one.id, one.name, await page(**cast(dict[str, Any], one.arguments))) for one in answer.uses]
        return len(messages)

    return talk


@pytest.mark.full
@pytest.mark.parametrize("with_tools", [True, False])
def test_a_conversation_of_200_turns_takes_at_most_twice_its_unique_bytes(tmp_path: Path, with_tools: bool) -> None:
    talk, path = talking(with_tools), tmp_path / "j.db"

    async def main() -> int:
        async with perdure(path, [talk], settings=Settings(synchronous="normal")) as app:
            await app.start(talk, id="r")
            for turn in range(TURNS):
                await app.signal("r", "chat", f"question {turn}: " + "q" * CHARS)
            await app.engine.drive("r")
            return len(request_of_call(read_run(app.store, "r"), last_question(app.store), loader(app.store)))

    # The last request has everything but the last answer and what came of it: the unique bytes, counted from below.
    unique = run(main())
    assert unique > (3 if with_tools else 2) * (TURNS - 1) * CHARS
    with apsw.Connection(str(path)) as prompt:
        prompt.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    empty = tmp_path / "empty.db"
    open_store(f"sqlite:///{empty}").close()
    taken = path.stat().st_size - empty.stat().st_size  # each table and index of an empty journal has a page
    assert taken < 2 * unique, taken / unique


def last_question(store: Store) -> int:
    return max(event.call or 0 for event in store.read("r") if isinstance(event.body, ModelCallInitiated))
