"""Requests in the journal: packed to their new messages, and rebuilt byte for byte."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs, to_builtins

from perdure.core import codec
from perdure.core.codec import Payload
from perdure.core.prompt_deltas import LONG_CHARS, Prompts, is_request, joined, told, unpack
from perdure.errors import NotEncodable, StoreCorrupt
from perdure.models.messages import Assistant, Message, Request, ToolResult, ToolSpec, ToolUse, User, encoded, shown_result

FRAME = {"model": "m", "system": "be kind"}
LONG = "a long result " * 40
Frame = dict[str, Any]


class Journal:
    """The requests of a run in its journal, and the requests that are rebuilt from it."""

    def __init__(self) -> None:
        self.prompts = Prompts()
        self.packed: dict[int, bytes] = {}
        self.whole: dict[int, bytes] = {}
        self.answers: dict[int, Message] = {}
        self.payloads: list[bytes] = []  # of event n at place n - 1

    def ask(self, messages: Sequence[Any], frame: Frame = FRAME) -> int:
        number = len(self.packed) + 1
        self.packed[number] = self.prompts.pack(lambda _: number, frame, messages)
        self.whole[number] = codec.encode({**frame, "messages": [to_builtins(message) for message in messages]})
        return number

    def answer(self, number: int, message: Message) -> None:
        self.answers[number] = message
        self.prompts.answered(number, message)

    def record(self, value: object) -> str:
        """A tool's result, or a signal; how a model reads it."""
        payload = codec.encode(value)
        self.payloads.append(payload)
        self.prompts.recorded(payload, len(self.payloads))
        return shown_result(payload)

    def unpack(self, number: int) -> bytes:
        return unpack(
            number,
            self.packed.__getitem__,
            lambda call: to_builtins(self.answers[call]),
            lambda seq: shown_result(self.payloads[seq - 1]),
        )

    def tamper(self, number: int, change: Callable[[dict[str, Any]], object]) -> None:
        own = codec.decode(self.packed[number])
        change(own)
        self.packed[number] = codec.encode(own)


# -- every request is rebuilt
# -------------------------------------------------------------------------------------------
texts = st.one_of(
    st.sampled_from(["", "ok", LONG, LONG + "!", "\ud800 alone", "é 🙂 \u202e", '"quoted"', "\\ud800 in words", "\x00"]),
    st.text(max_size=20),
    st.text(alphabet="ab\ud800é", min_size=LONG_CHARS, max_size=LONG_CHARS + 9),
)
arguments = st.one_of(st.dictionaries(st.text(max_size=3), st.integers() | texts, max_size=2), texts)
uses = st.builds(ToolUse, texts, st.sampled_from(["look", "pay"]), arguments)
messages = st.one_of(
    st.builds(User, texts),
    st.builds(Assistant, texts, st.lists(uses, max_size=2).map(tuple), st.none() | st.dictionaries(texts, st.floats(-9, 9), max_size=1)),
    st.builds(ToolResult, texts, st.just("look"), texts, st.booleans()),
)
frames = st.lists(
    st.sampled_from([FRAME, {"model": "m"}, {"model": "m", "choice": "é"}, {"model": "m", "options": {"é": "\ud800"}, "zeal": 1.5}]),
    min_size=1,
    max_size=3,
)
# What a program does with its conversations: it continues one, begins another, branches, edits, repeats, drops the
# oldest messages, or learns of a text that it then uses.
steps = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 2), st.lists(messages, max_size=3)),
        st.tuples(st.just("edit"), st.integers(0, 2), st.integers(0, 9), messages),
        st.tuples(st.just("drop"), st.integers(0, 2), st.integers(0, 3)),
        st.tuples(st.just("branch"), st.integers(0, 2), st.integers(0, 9), st.integers(0, 2)),
        st.tuples(st.just("again"), st.integers(0, 2)),
        st.tuples(st.just("answer"), st.integers(0, 2), messages),
        st.tuples(st.just("result"), st.integers(0, 2), texts | st.dictionaries(texts, texts, max_size=2)),
    ),
    max_size=14,
)


def drive(journal: Journal, happens: Sequence[tuple[Any, ...]], framed: Sequence[Frame]) -> list[tuple[Frame, list[Message]]]:
    """Take the steps, with a request after each. Returns the requests."""
    talks: list[list[Message]] = [[], [], []]
    asked: list[tuple[Frame, list[Message]]] = []
    for kind, which, *rest in happens:
        talk = talks[which]
        match kind:
            case "add":
                talk += rest[0]
            case "edit" if talk:
                talk[rest[0] % len(talk)] = rest[1]
            case "drop":
                del talk[: rest[0]]
            case "branch":
                talks[rest[1]] = talk[: rest[0]]
            case "answer" if journal.packed:
                journal.answer(len(journal.packed), rest[0])
                talk.append(rest[0])
            case "result":
                talk.append(ToolResult("u", "look", journal.record(rest[0])))
        frame = framed[len(asked) % len(framed)]
        journal.ask(talks[which], frame)
        asked.append((frame, list(talks[which])))
    return asked


@settings(max_examples=300, deadline=None)
@given(steps, frames)
def test_every_request_comes_back_to_the_byte_and_is_canonical(happens: list[tuple[Any, ...]], framed: list[Frame]) -> None:
    journal = Journal()
    for number, (frame, talk) in enumerate(drive(journal, happens, framed), 1):
        whole = codec.encode({**frame, "messages": [to_builtins(message) for message in talk]})
        assert joined(frame, [codec.encode(to_builtins(message)) for message in talk]) == journal.whole[number] == whole
        assert journal.unpack(number) == whole
        assert codec.decode(journal.packed[number])["digest"] == codec.digest(whole)
        assert told(journal.packed[number]).messages == len(talk)
    # In any order: what one request is made of must not depend on which was asked for before.
    assert [journal.unpack(number) for number in reversed(journal.whole)] == list(reversed(journal.whole.values()))


@settings(max_examples=100, deadline=None)
@given(steps, frames)
def test_the_same_requests_are_packed_to_the_same_bytes(happens: list[tuple[Any, ...]], framed: list[Frame]) -> None:
    """Also if the messages are other objects, as on a replay."""
    first, second = Journal(), Journal()
    drive(first, happens, framed)
    drive(second, [tuple(copied(part) for part in step) for step in happens], framed)
    assert first.packed == second.packed


def copied(part: Any) -> Any:
    if isinstance(part, list):
        return [copied(one) for one in part]
    return structs.replace(part) if isinstance(part, User | Assistant | ToolResult) else part


def test_the_whole_is_the_canonical_request() -> None:
    request = Request("m", (User("é"), Assistant("x", (ToolUse("1", "look", {"b": 1, "a": 2.0}),))), "be kind", (ToolSpec("t", "d", {}),))
    frame = to_builtins(request)
    del frame["messages"]
    assert codec.decode(Prompts().pack(lambda _: 1, frame, request.messages))["digest"] == codec.digest(encoded(request))


# -- it stays small --------------------------------------------------------------------------------------------------------
def test_what_was_said_before_is_not_said_again() -> None:
    journal = Journal()
    talk: list[Message] = []
    for turn in range(50):
        talk.append(User(f"{turn} " + "x" * 2000))
        number = journal.ask(talk)
        journal.answer(number, Assistant(f"{turn} " + "y" * 2000))
        talk.append(journal.answers[number])
    assert max(map(len, journal.packed.values())) < 2500
    assert told(journal.packed[50]) == (99, 2)


def test_a_long_text_that_an_event_holds_is_named_by_its_event() -> None:
    journal = Journal()
    text, data = journal.record(LONG), journal.record({"rows": [LONG]})
    number = journal.ask([User("?"), ToolResult("1", "look", text), ToolResult("2", "look", data), User(text)])
    assert len(journal.packed[number]) < 500
    assert journal.unpack(number) == journal.whole[number]


def test_a_text_that_only_looks_like_the_json_of_a_result_is_not_taken_for_it() -> None:
    journal = Journal()
    journal.record(LONG)
    number = journal.ask([User(json.dumps(LONG))])
    assert journal.unpack(number) == journal.whole[number]
    assert "text_of" not in journal.packed[number].decode()


@pytest.mark.parametrize("change", ["the first message is new every time", "a window of the last 20"])
def test_a_conversation_that_does_not_only_grow_at_its_end_stays_small(change: str) -> None:
    journal = Journal()
    talk: list[Message] = []
    for turn in range(100):
        talk += [User("go on"), Assistant(f"{turn} " + "y" * 1000), User(f"{turn} " + "x" * 1000)]
        journal.ask([User(f"it is {turn}"), *talk] if "first" in change else talk[-21:])
    unique = 200 * 1000
    assert sum(map(len, journal.packed.values())) < 1.3 * unique
    assert all(journal.unpack(number) == journal.whole[number] for number in (1, 50, 100))


def test_messages_that_are_made_anew_for_every_request_are_not_kept_for_ever() -> None:
    prompts = Prompts()
    numbers = iter(range(1, 400))
    for _ in range(1, 400):
        prompts.pack(lambda _: next(numbers), FRAME, [User(f"{place}") for place in range(20)])
    assert len(prompts._known) < 400


# -- what an agent may do to its messages ----------------------------------------------------------------------------------
def test_arguments_that_were_changed_after_they_were_sent_are_seen() -> None:
    """A message is frozen, but its arguments are a dictionary."""
    journal = Journal()
    wanted: dict[str, Any] = {"order": "o-1", "n": 1}
    talk = [User("?"), Assistant("", (ToolUse("1", "look", wanted),))]
    journal.ask(talk)
    for changed in ({"order": "o-2", "n": 1}, {"order": "o-2", "n": True}, {"order": "o-2", "n": 1.0}, {"order": "\ud800", "n": 1}):
        wanted |= changed
        number = journal.ask(talk)
        assert codec.decode(journal.whole[number])["messages"][1]["uses"][0]["arguments"] == changed
        assert journal.unpack(number) == journal.whole[number] == codec.encode({**FRAME, "messages": [to_builtins(one) for one in talk]})


@pytest.mark.parametrize("frame", [FRAME, {"model": "m", "system": "x" * 100}])
def test_a_request_that_cannot_be_journaled_leaves_no_trace(monkeypatch: pytest.MonkeyPatch, frame: Frame) -> None:
    """The next one gets its number, and must not refer to it."""
    journal = Journal()
    talk = [User("first"), User("y" * 99), User("z" * 99)]
    journal.ask(talk[:1])
    with monkeypatch.context() as patch:
        patch.setattr(codec, "MAX_BYTES", 200)
        with pytest.raises(NotEncodable):
            journal.ask(talk, frame)  # each part of it is small enough
    with pytest.raises(NotEncodable):
        journal.ask([*talk, Assistant("", raw={"x": float("nan")})], frame)
    number = journal.ask(talk, frame)
    assert number == 2
    assert journal.unpack(number) == journal.whole[number]


# -- a journal that was changed
# -----------------------------------------------------------------------------------------
def conversation() -> Journal:
    journal = Journal()
    result = journal.record(LONG)
    journal.ask([User("one")])
    journal.answer(1, Assistant("two"))
    journal.ask([User("one"), Assistant("two"), ToolResult("1", "look", result)])
    journal.ask([User("new"), Assistant("two"), ToolResult("1", "look", result)])
    return journal


DAMAGE: dict[str, tuple[int, Callable[[dict[str, Any]], object]]] = {
    "another text": (1, lambda own: own["then"][0]["message"].update(text="three")),
    "another system": (1, lambda own: own["frame"].update(system="be cruel")),
    "another digest": (3, lambda own: own.update(digest="0" * 64)),
    "no digest": (3, lambda own: own.pop("digest")),
    "no frame": (1, lambda own: own.pop("frame")),
    "nothing behind": (1, lambda own: own.pop("then")),
    "a message less": (2, lambda own: own["then"].pop()),
    "a beginning that is itself": (2, lambda own: own["then"][0].update(again_of=2)),
    "a beginning that comes later": (2, lambda own: own["then"][0].update(again_of=3)),
    "a beginning that is not there": (2, lambda own: own["then"][0].update(again_of=-1)),
    "a beginning of another kind": (2, lambda own: own["then"][0].update(again_of="1")),
    "more than there was": (2, lambda own: own["then"][0].update(count=2)),
    "a frame of itself": (2, lambda own: own.update(frame_of=2)),
    "an answer to come": (2, lambda own: own["then"][1].update(answer_of=3)),
    "an event that is not there": (2, lambda own: own["then"][2].update(text_of=99)),
    "more messages than there can be": (3, lambda own: own["then"][1].update(count=10**9)),
    "a place that is not there": (3, lambda own: own["then"][1].update(at=7)),
    "places before the first": (3, lambda own: own["then"][1].update(at=-1)),
    "messages again of itself": (3, lambda own: own["then"][1].update(again_of=3)),
    "items that are none": (2, lambda own: own.update(then=[1, None])),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_request_that_was_tampered_with_is_told(what: str) -> None:
    """There is an error.

    No damaged request is shown as the real one, and no circle of references is followed for ever.
    """
    journal = conversation()
    assert all(journal.unpack(number) == journal.whole[number] for number in (1, 2, 3))
    which, change = DAMAGE[what]
    journal.tamper(which, change)
    with pytest.raises(StoreCorrupt, match=f"the request of call {which} cannot be made again"):
        journal.unpack(which)


def test_a_damaged_journal_cannot_fill_the_memory() -> None:
    """Forty requests, each twice as large as the one before."""
    journal = Journal()
    journal.ask([User("hello")])
    for number in range(2, 42):
        again = {"again_of": number - 1, "at": 0, "count": 2 ** (number - 2)}
        journal.packed[number] = codec.encode({"digest": "0" * 64, "frame_of": 1, "then": [again, again]})
    with pytest.raises(StoreCorrupt, match="is no number of messages"):
        journal.unpack(41)


@pytest.mark.parametrize("what", ["answer", "result"])
def test_an_answer_or_a_result_that_was_tampered_with_is_told(what: str) -> None:
    journal = conversation()
    if what == "answer":
        journal.answers[1] = Assistant("too")
    else:
        journal.payloads[0] = codec.encode(LONG + ".")
    with pytest.raises(StoreCorrupt, match=re.escape("cannot be made again as it was: its digest is ")):
        journal.unpack(2)


# -- how it is recognised --------------------------------------------------------------------------------------------------
def test_arguments_that_are_a_request_are_recognised_wherever_they_lie() -> None:
    journal = conversation()
    for packed in journal.packed.values():
        assert is_request(codec.pack(packed)[0])
        in_a_blob, _ = codec.pack(packed, inline_bytes=10)
        assert in_a_blob.inline is None
        assert is_request(in_a_blob)
    surrogate = codec.pack(Prompts().pack(lambda _: 1, FRAME, [User("\ud800")]))[0]
    assert surrogate.text
    assert is_request(surrogate)
    for args in ({}, {"digest": "0" * 64}, {"digest": "0" * 64, "then": []}, {"digest": "x", "frame": {}}, [1], "x"):
        assert not is_request(codec.pack(codec.encode(args))[0])
    assert not is_request(None)
    assert not is_request(Payload(blob="0" * 64, size=1, preview='{"order":'))
