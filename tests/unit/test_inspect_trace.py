"""The causes of an event, and the journal in words."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.unit.inspect_tools import AGENTS, SETTINGS, at_work, hold, make_waiting, make_zoo, url_of

from perdure import Perdure, Run, agent
from perdure.core import codec
from perdure.core.events import AnyBody, Event, RunClaimed, ToolCallInitiated, encode_body
from perdure.core.query import EVERYTHING
from perdure.errors import NotFound
from perdure.inspect.text import amount, called, clip, clock, iso, money, sentence, shown, span
from perdure.inspect.timeline import Timeline
from perdure.inspect.trace import trace
from perdure.inspect.view import all_rows, loader, read_run, run_record
from perdure.store.api import Store
from perdure.store.open import open_store


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("zoo") / "journal.db"
    make_zoo(path)
    return path


@pytest.fixture
def store(path: Path) -> Iterator[Store]:
    opened = open_store(url_of(path))
    yield opened
    opened.close()


def test_every_event_of_every_run_leads_back_to_the_first(store: Store) -> None:
    for row in all_rows(store):
        events = store.read(row.run_id)
        for event in events:
            links = trace(row.run_id, events, event.seq)
            assert [link.step for link in links] == list(range(1, len(links) + 1))
            assert (links[0].seq, links[0].type, links[-1].seq) == (1, "run_created", event.seq)
            assert [link.cause for link in links[1:]] == [link.seq for link in links[:-1]]
            assert not any(link.inferred for link in links)


def test_a_result_goes_back_over_its_intent_to_the_result_before(store: Store) -> None:
    events = store.read("doubt")
    links = trace("doubt", events, next(event.seq for event in events if event.type == "tool_call_in_doubt"))
    assert [(link.type, link.call) for link in links] == [
        ("run_created", None),
        ("run_claimed", None),
        ("tool_call_initiated", 1),
        ("tool_call_completed", 1),
        ("tool_call_initiated", 2),
        ("tool_call_in_doubt", 2),
    ]
    assert links[-1].tool == "charge"
    assert "TimeoutError: no answer" in links[-1].says


def test_a_resolution_is_told_with_who_said_so(store: Store) -> None:
    events = store.read("resolved")
    last = trace("resolved", events, len(events))[-1]
    assert last.type == "tool_call_resolved"
    assert 'ann says that it happened, and returned {"id":"ch_7"} (seen at the bank)' in last.says
    assert last.because == "ann, outside the run, settled the doubt"


def test_the_decisions_and_thoughts_of_the_agent_stand_between_the_links(store: Store) -> None:
    events = store.read("done")
    stated = {one.seq: one for link in trace("done", events, len(events)) for one in link.stated}
    assert [one.says for one in stated.values()] == [
        'the agent decided "go on" among ["go on","stop"], because it is due',
        "the agent noted: all done",
    ]
    for seq, one in stated.items():
        assert (one.type, one.event_id) == (events[seq - 1].type, events[seq - 1].event_id)
    (decided,) = [event for event in events if event.type == "decision_made"]
    before = trace("done", events, decided.seq - 1)
    assert not any(link.stated for link in before), "a decision is no part of what came before it"
    (after,) = [link for link in trace("done", events, len(events)) if any(one.seq == decided.seq for one in link.stated)]
    assert after.cause == decided.cause, "it stands with the call that the agent made in the same activation"


def test_without_a_number_the_last_event_is_explained_or_the_one_that_stopped_the_run(store: Store, waiting: Store) -> None:
    assert trace("done", store.read("done"))[-1].type == "run_succeeded"
    assert trace("failed", store.read("failed"))[-1].type == "run_failed"
    assert trace("doubt", store.read("doubt"))[-1].type == "attention_needed"
    assert trace("resolved", store.read("resolved"))[-1].type == "tool_call_resolved"
    assert trace("thrifty", waiting.read("thrifty"))[-2].type == "budget_exceeded"
    assert trace("circling", waiting.read("circling"))[-2].type != "run_claimed", "the call that repeated itself, and not the claim"


def test_an_event_that_is_not_there_is_refused(store: Store) -> None:
    for seq in (0, 999):
        with pytest.raises(NotFound, match=f"there is no event {seq}"):
            trace("done", store.read("done"), seq)


def test_a_takeover_says_who_took_over_from_whom_and_why(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"

    async def begin(app: Perdure) -> None:
        await app.start(AGENTS[0], "o-1", id="r")

    async def go_on(app: Perdure) -> None:
        await app.engine.drive("r")

    at_work(path, begin)
    store = open_store(url_of(path))
    hold(store, "r", "shop")
    store.unregister("w-alive", 1)
    store.close()
    at_work(path, go_on)
    store = open_store(url_of(path))
    events = store.read("r")
    store.close()
    taken = next(event.seq for event in events if isinstance(event.body, RunClaimed) and event.body.takeover)
    assert "took the run over from worker host:1, which had not released it" in trace("r", events, taken)[-1].says
    assert "gave no sign of life" in trace("r", events, taken)[-1].says
    after = next(event for event in events if event.seq > taken and event.cause is not None and event.cause < taken)
    assert trace("r", events, after.seq)[-1].meanwhile == [f"event {taken}: {trace('r', events, taken)[-1].says}"]


# -- what people, children and budgets did --------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def waiting_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("waiting") / "journal.db"
    make_waiting(path)
    return path


@pytest.fixture
def waiting(waiting_path: Path) -> Iterator[Store]:
    opened = open_store(url_of(waiting_path))
    yield opened
    opened.close()


def test_every_event_of_every_waiting_run_leads_back_to_the_first_and_has_a_sentence(waiting: Store) -> None:
    types = set()
    for row in all_rows(waiting):
        events = waiting.read(row.run_id)
        timeline = Timeline(row.run_id)
        for event in events:
            types.add(event.type)
            assert event.type not in timeline.say(event)
            links = trace(row.run_id, events, event.seq, waiting.read)
            assert (links[0].seq, links[-1].seq) == (1, event.seq)
    assert types >= {
        "tool_call_proposed",
        "approval_requested",
        "approval_voted",
        "approval_decided",
        "child_started",
        "child_finished",
        "run_paused",
        "budget_exceeded",
        "run_cancelled",
    }


def test_a_call_goes_back_over_its_approval_to_what_was_asked(waiting: Store) -> None:
    events = waiting.read("bought")
    links = trace("bought", events, next(event.seq for event in events if event.type == "tool_call_completed"))
    assert [link.type for link in links] == [
        "run_created",
        "run_claimed",
        "tool_call_proposed",
        "approval_requested",
        "approval_decided",
        "tool_call_initiated",
        "tool_call_completed",
    ]
    assert 'approved by ann (from 10.0.0.7), edited to {"cents":700,"order":"o-2"}: less' in links[4].says
    assert links[4].because == "it was asked for in event 4, and a decider answered"
    assert str(links[5].because).startswith("approval ap-")


def test_the_end_of_a_child_is_shown_beside_its_parents_event_and_the_other_way_round(waiting: Store) -> None:
    events = waiting.read("negative")
    (end,) = [event for event in events if event.type == "child_finished"]
    links = trace("negative", events, end.seq, waiting.read)
    assert [link.type for link in links[-2:]] == ["child_started", "child_finished"]
    assert links[-1].elsewhere == "run negative/1, event 3: the run failed: ValueError: negative"
    first = trace("negative/1", waiting.read("negative/1"), 1, waiting.read)[0]
    assert first.elsewhere == "run negative, event 3: call 1: run negative/1 of square@1(number=-1) begins as its child"
    assert trace("negative", events, end.seq)[-1].elsewhere is None  # without the other journal there is still a chain


def test_what_comes_from_outside_while_a_worker_holds_the_run_is_told_with_who_said_it(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"

    @agent(version="1")
    async def chat(run: Run) -> list[str]:
        return [await run.receive("chat"), await run.receive("chat")]

    async def talk(app: Perdure) -> None:
        await app.start(chat, id="r")
        driving = asyncio.ensure_future(app.engine.drive("r"))
        await asyncio.sleep(0.05)
        await app.signal("r", "chat", "one", by="ann")
        await app.signal("r", "chat", "two", by="bob", key="k-2")
        await driving

    at_work(path, talk, agents=[chat])
    store = open_store(url_of(path))
    events = store.read("r")
    store.close()
    signals = [trace("r", events, event.seq)[-1] for event in events if event.type == "signal_received"]
    assert [link.says for link in signals] == ["ann sent a signal on 'chat': \"one\"", "bob sent a signal on 'chat' (key k-2): \"two\""]
    assert [link.because for link in signals] == ["ann, outside the run, asked for it", "bob, outside the run, asked for it"]


# -- words ----------------------------------------------------------------------------------------------------------------
def test_every_event_of_the_zoo_has_a_sentence_and_a_record(store: Store) -> None:
    types = set()
    for row in all_rows(store):
        timeline = Timeline(row.run_id)
        for event in store.read(row.run_id):
            types.add(event.type)
            said = timeline.say(event)
            assert said
            assert event.type not in said
            record = timeline.record(event, store.hash_at(row.run_id, event.seq))
            assert list(record) == "run_id seq event_id type ts call tool plan_step cause superseded_by key epoch data hash".split()
            assert (record["tool"] is None) == (record["key"] is None) == (event.call is None)
            assert codec.encode(record["data"]) == codec.encode(codec.decode(encode_body(event.body)))
    assert len(types) >= 17, sorted(types)


def test_times_are_told_for_people_and_for_machines() -> None:
    assert iso(0) == "1970-01-01T00:00:00.000000Z"
    assert iso(10**18) == f"{10**18} µs since 1970"  # after the year 9999
    assert clock(3_600_000_000, 0) == "01:00:00 UTC"
    assert clock(86_400_000_000, 0) == "1970-01-02 00:00:00 UTC"
    assert clock(10**18, 0) == f"{10**18} µs"
    spans = {
        0: "moments",
        5_000: "5 ms",
        1_000_000: "1 s",
        480_000_000: "8 min",
        5_400_000_000: "1.5 h",
        86_400_000_000: "1 day",
        -5: "moments",
    }
    assert {us: span(us) for us in spans} == spans
    assert span(20 * 86_400_000_000) == "20 days"


def test_payloads_are_shown_short_and_calls_as_one_would_write_them() -> None:
    packed = codec.pack(codec.encode({"order": "o-7", "cents": 500}))[0]
    assert called("refund", packed) == 'refund(cents=500, order="o-7")'
    assert called("refund", codec.pack(b"[1,2]")[0]) == "refund([1,2])"
    assert called("refund", None) == "refund()"
    large = codec.pack(codec.encode("x" * 5000), 100)[0]
    assert shown(large, 20) == '"xxxxxxxxxxxxxxxxxx… (4.9 KiB)'
    assert called("refund", large, 20) == 'refund("xxxxxxxxxxxxxxxxxx… (4.9 KiB))'
    assert clip("a\n b\t c", 4) == "a b…"
    surrogate = codec.pack(codec.encode({"a": "\ud800"}))[0]
    assert shown(surrogate) == '{"a":"\\ud800"}'


def test_amounts_are_told_exactly() -> None:
    assert [money(micros) for micros in (0, 12_300, 2_000_000, 1_234_567_890, 1, -500_000)] == [
        "$0.00",
        "$0.0123",
        "$2.00",
        "$1,234.56789",
        "$0.000001",
        "-$0.50",
    ]
    assert [
        amount(*one)
        for one in (("usd", 5), ("tokens", 1), ("tokens", 1200), ("calls", 2), ("seconds", 1_500_000), ("seconds", 100_000_000))
    ] == [
        "$0.000005",
        "1 token",
        "1,200 tokens",
        "2 calls",
        "1.5 s",
        "100 s",
    ]


def test_an_event_about_a_call_that_names_none_does_not_break_the_telling() -> None:
    body: AnyBody = ToolCallInitiated("t", "read", "k")
    assert sentence(Event(1, "0", 0, 0, None, None, body), {}) == "tool_call_initiated without a call"


# -- views ----------------------------------------------------------------------------------------------------------------
def test_any_prefix_can_be_looked_at_and_the_whole_is_the_row(store: Store) -> None:
    load = loader(store)
    for row in all_rows(store):
        for at in range(1, row.seq + 1):
            record = run_record(read_run(store, row.run_id, at), load)
            assert (record["seq"], record["run_id"]) == (at, row.run_id)
        whole = run_record(read_run(store, row.run_id), load)
        assert (whole["status"], whole["seq"], whole["epoch"], whole["error"]) == (row.status, row.seq, row.epoch, row.error)
    done = run_record(read_run(store, "done"), load)
    assert done["output"] == "x" * 2000  # loaded from the blob store
    assert done["input"] == {"order": "o-1"}
    assert (done["cost"]["calls"], done["cost"]["attempts"], done["cost"]["usd_micros"]) == (4, 5, 0)  # one of them was tried again
    past = run_record(read_run(store, "done", 2), load)
    assert (past["status"], past["output"], past["calls"]) == ("running", None, [])


def test_an_event_that_is_not_there_cannot_be_looked_at(store: Store) -> None:
    with pytest.raises(NotFound, match="has the events 1 to 1; there is no event 2"):
        read_run(store, "queued", 2)


def test_all_rows_come_once_each_even_when_they_were_created_in_the_same_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.conformance.suite import new_run

    monkeypatch.setattr("perdure.inspect.view.PAGE", 3)
    store = open_store(url_of(tmp_path / "journal.db"))
    for number in range(20):
        store.create_run(new_run(f"r{number}", agent="even" if number % 2 == 0 else "odd", ts=1000 + number // 8))
    assert [row.run_id for row in all_rows(store)] == [f"r{number}" for number in reversed(range(20))]
    assert len(list(all_rows(store, EVERYTHING.also(agent="even")))) == 10
    store.close()
    assert SETTINGS.inline_bytes < 2000


def test_the_decision_of_a_react_agent_stands_with_the_calls_that_it_is_about(tmp_path: Path) -> None:
    from perdure import ReAct, tool
    from perdure.models import Scripted
    from perdure.models.scripted import use, uses

    @tool(effect="read")
    async def look_up(order: str) -> str:
        return f"{order} is there"

    helper = ReAct("helper", model=Scripted([uses(use("look_up", order="o-1")), "it is there"]), tools=[look_up])

    async def work(app: Perdure) -> None:
        await app.run(helper, "where is o-1?", id="r")

    at_work(tmp_path / "journal.db", work, agents=[helper])
    store = open_store(url_of(tmp_path / "journal.db"))
    events = store.read("r")
    links = trace("r", events, load=loader(store))
    store.close()
    (called_,) = [link for link in links if link.type == "tool_call_initiated"]
    assert [one.says for one in called_.stated] == ['the agent decided ["look_up"] among ["look_up"]']
