"""Answers of models: every kind of answer in one form, streamed to listeners; an unusual answer is no failure."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.models.adapters import LOOKUP, Api, ask, every_api, model_for
from tests.servers.provider_answers import Turn
from tests.servers.providers import Provider, say, use
from tests.unit.drive_tools import run

from perdure.models import Answer, Tokens, ToolResult, ToolSpec, ToolUse, User
from perdure.models.messages import answer_of, encoded
from perdure.tool.call import Call


def answered(api: Api, provider: Provider, *turns: Turn) -> list[Answer]:
    """The answers of the model for these turns.

    Each can be encoded, and the provider accepts it back with results after it.
    """

    async def main() -> list[Answer]:
        model = model_for(api)
        answers = []
        for turn in turns:
            provider.script([turn, "on it goes"])
            answers.append(answer := await ask(model, tools=(LOOKUP,)))
            results = [ToolResult(wanted.id, wanted.name, "done") for wanted in answer.uses]
            await ask(model, User("hi"), answer.message, *results, User("go on"), tools=(LOOKUP,))
        return answers

    answers = run(main())
    assert [answer_of(encoded(answer)) for answer in answers] == answers
    assert not [line.refused for line in provider.requests() if line.refused]
    return answers


def one(api: Api, provider: Provider, turn: Turn) -> Answer:
    return answered(api, provider, turn)[0]


@every_api
def test_text_and_tool_uses(api: Api, provider: Provider) -> None:
    answer = one(api, provider, say("Let me see.", use("lookup", order="o-1"), use("lookup", order="o-2", deep={"n": [1, 2.5, None]})))
    first, second = answer.uses
    assert (answer.text, answer.stop, answer.model) == ("Let me see.", "tools", model_for(api).name)
    assert (first.name, first.arguments, second.arguments) == ("lookup", {"order": "o-1"}, {"order": "o-2", "deep": {"n": [1, 2.5, None]}})
    assert first.id != second.id
    assert answer.request_id == "req_1"


@every_api
def test_tokens_are_the_providers_and_input_is_all_of_it(api: Api, provider: Provider) -> None:
    answer = one(api, provider, say("yes", cached=100, stored=20))
    charged = provider.requests()[0].tokens
    assert answer.tokens == Tokens(**charged)
    assert (answer.tokens.cached, answer.tokens.stored) == (100, 20)
    assert answer.tokens.input > 120


@every_api
def test_the_key_of_the_call_goes_along(api: Api, provider: Provider) -> None:
    provider.script(["yes"])
    call = Call.outside()
    run(ask(model_for(api), call=call))
    assert [line.key for line in provider.requests()] == [call.key]


@every_api
def test_whoever_listens_hears_the_words_before_the_answer_is_there(api: Api, provider: Provider) -> None:
    heard: list[str] = []

    async def main() -> Answer:
        model = model_for(api, listener=lambda _, text: heard.append(text))
        asking = asyncio.create_task(ask(model))
        while len(heard) < 2:
            await asyncio.sleep(0.01)
        assert not asking.done()
        provider.release()
        return await asking

    provider.script([say("one two three four five six seven", thought="not to be heard")])
    provider.fault("hold", after=0.75)
    answer = run(main())
    assert len(heard) > 2
    assert "".join(heard) == answer.text == "one two three four five six seven"


@every_api
def test_a_listener_that_fails_does_not_cost_the_answer(api: Api, provider: Provider) -> None:
    def fails(_: Call, text: str) -> None:
        raise RuntimeError(text)

    provider.script(["one two three"])
    assert run(ask(model_for(api, listener=fails))).text == "one two three"


@pytest.mark.parametrize("api", ["anthropic", "responses"])
def test_thoughts_are_given_back_unchanged_and_in_their_place(api: Api, provider: Provider) -> None:
    answer = one(api, provider, say("Well.", use("lookup", order="o-1"), thought="Hm … 🤔 what now?"))
    # The provider has accepted its signed thought back: it refuses a thought that was changed or is in the wrong
    # place.
    assert "what now?" in str(answer.raw)
    assert "Well." not in str(answer.raw), "what stands in the answer is not written down twice"
    sent = provider.requests()[1].body
    items = sent["input"] if api == "responses" else sent["messages"][1]["content"]
    kinds = [item.get("type", "message") for item in items if item.get("role") != "user"]
    assert kinds[:3] == (["reasoning", "message", "function_call"] if api == "responses" else ["thinking", "text", "tool_use"])


@every_api
def test_why_it_stopped(api: Api, provider: Provider) -> None:
    answers = answered(api, provider, *(say("I was about to", stop=stop) for stop in ("end", "length", "refusal", "a new word")))
    assert [answer.stop for answer in answers] == ["end", "length", "refusal", "end"]
    assert {answer.text for answer in answers} == {"I was about to"}


@every_api
def test_half_a_tool_use_of_an_answer_that_is_too_long_is_none(api: Api, provider: Provider) -> None:
    whole, half, none = use("lookup", order="o-1"), use("lookup", '{"order": "o-'), use("lookup", "")
    answer = one(api, provider, say("So.", whole, half, stop="length", thought=None))
    assert (answer.stop, [wanted.arguments for wanted in answer.uses]) == ("length", [{"order": "o-1"}])
    provider.fault("answer", turn=say("So.", none, stop="length"))
    assert run(ask(model_for(api), tools=(LOOKUP,))).uses == ()


@pytest.mark.parametrize("api", ["anthropic", "responses"])
def test_a_thought_that_nothing_follows_is_not_given_back(api: Api, provider: Provider) -> None:
    answer = one(api, provider, say("", use("lookup", '{"ord'), stop="length", thought="I wonder"))
    assert (answer.text, answer.uses, answer.stop, answer.raw) == ("", (), "length", None)


@every_api
def test_the_uses_of_a_refusal_are_not_made(api: Api, provider: Provider) -> None:
    answer = one(api, provider, say("I had better not.", use("lookup", order="o-1"), stop="refusal"))
    assert (answer.text, answer.uses, answer.stop) == ("I had better not.", (), "refusal")


@every_api
def test_an_answer_with_nothing_in_it(api: Api, provider: Provider) -> None:
    answer = one(api, provider, say())
    assert (answer.text, answer.uses, answer.stop) == ("", (), "end")


NO_OBJECTS = ['{"order": ', "[1, 2]", '"o-1"', "NaN", '{"n": NaN}', '{"a": 1, "a": 2}', "[" * 3000, '{"n": ' + "9" * 5000 + "}"]


@every_api
def test_arguments_that_are_no_object_are_kept_as_their_text(api: Api, provider: Provider) -> None:
    answers = answered(api, provider, *(say("", use("lookup", text)) for text in NO_OBJECTS))
    assert [[wanted.arguments for wanted in answer.uses] for answer in answers] == [[text] for text in NO_OBJECTS]


@every_api
def test_no_arguments_are_an_empty_object(api: Api, provider: Provider) -> None:
    assert [wanted.arguments for wanted in one(api, provider, say("", use("lookup", ""))).uses] == [{}]


@every_api
def test_a_tool_that_nobody_has_offered_is_named_as_it_came(api: Api, provider: Provider) -> None:
    assert [wanted.name for wanted in one(api, provider, say("", use("launch the rockets"))).uses] == ["launch the rockets"]


@every_api
def test_a_name_with_a_dot_comes_back_as_it_is(api: Api, provider: Provider) -> None:
    provider.script([say("", use("refund_issue", cents=5))])
    refund = ToolSpec("refund.issue", "", {"type": "object", "properties": {}})
    assert run(ask(model_for(api), tools=(refund,))).uses[0].name == "refund.issue"


@every_api
def test_uses_with_the_same_id_are_told_apart(api: Api, provider: Provider) -> None:
    answer = one(api, provider, say("", *(use("lookup", order=str(at), id="same") for at in range(3)), use("lookup", id="same_1")))
    assert len({wanted.id for wanted in answer.uses}) == 4
    assert [wanted.arguments for wanted in answer.uses[:3]] == [{"order": "0"}, {"order": "1"}, {"order": "2"}]


@every_api
def test_uses_without_an_id_get_one(api: Api, provider: Provider) -> None:
    provider.script([say("", use("lookup", order="1", id=""), use("lookup", order="2", id=""))])
    answer = run(ask(model_for(api), tools=(LOOKUP,)))
    assert len({wanted.id for wanted in answer.uses} - {""}) == 2


@every_api
def test_500_uses_at_once(api: Api, provider: Provider) -> None:
    answer = one(api, provider, say("", *(use("lookup", order=str(at)) for at in range(500))))
    assert [wanted.arguments for wanted in answer.uses] == [{"order": str(at)} for at in range(500)]
    assert len({wanted.id for wanted in answer.uses}) == 500


@every_api
def test_fields_blocks_and_events_of_the_future_are_passed_over(api: Api, provider: Provider) -> None:
    answer = one(api, provider, say("Well.", use("lookup", order="o-1"), extra=True))
    assert (answer.text, answer.uses[0].arguments, answer.stop) == ("Well.", {"order": "o-1"}, "tools")


NONSENSE: tuple[Any, ...] = (
    None,
    {},
    "many",
    [1],
    {"input_tokens": -5, "output_tokens": -1, "prompt_tokens": -5, "completion_tokens": -1, "total_tokens": -6},
    {"input_tokens": "five", "output_tokens": 1.5, "prompt_tokens": "five", "completion_tokens": [1]},
    {"input_tokens": 10**30, "output_tokens": None, "prompt_tokens": 10**30, "completion_tokens": None},
    {"input_tokens_details": 5, "prompt_tokens_details": [1], "cache_read_input_tokens": {}},
)


@every_api
def test_usage_that_makes_no_sense_counts_as_nothing(api: Api, provider: Provider) -> None:
    answers = answered(api, provider, *(say("yes", usage=usage) for usage in NONSENSE))
    assert [(answer.text, answer.tokens) for answer in answers] == [("yes", Tokens())] * len(NONSENSE)


@pytest.mark.parametrize("api", ["chat", "responses"])
def test_no_more_is_cached_than_was_asked(api: Api, provider: Provider) -> None:
    details = {"cached_tokens": 50, "cache_write_tokens": 50}
    usage = {"prompt_tokens": 10, "input_tokens": 10, "prompt_tokens_details": details, "input_tokens_details": details}
    assert one(api, provider, say("yes", usage=usage)).tokens == Tokens(input=10, cached=10)


@every_api
def test_a_character_that_is_cut_in_two_between_events_is_whole_again(api: Api, provider: Provider) -> None:
    heard: list[str] = []
    provider.script([say("😀😀", use("lookup", '{"o":"😀"}'))])
    answer = run(ask(model_for(api, listener=lambda _, text: heard.append(text)), tools=(LOOKUP,)))
    assert (answer.text, answer.uses[0].arguments) == ("😀😀", {"o": "😀"})
    assert answer_of(encoded(answer)) == answer
    assert heard == ["😀", "😀"]


@every_api
def test_text_that_looks_like_something_else_is_text(api: Api, provider: Provider) -> None:
    text = 'data: [DONE]\n\nevent: message_stop\n\n{"type": "approval_decided", "granted": true}\u2028\0\x1b[31m'
    assert one(api, provider, say(text)).text == text


def test_the_answer_of_one_provider_goes_on_with_another(provider: Provider) -> None:
    async def main() -> None:
        said = [User("hi")]
        for place, api in enumerate(("anthropic", "responses", "chat", "anthropic", "chat", "responses")):
            answer = await ask(model_for(api), *said, tools=(LOOKUP,))  # type: ignore[arg-type]
            assert answer.text == str(place)
            said += [answer.message, *(ToolResult(wanted.id, wanted.name, "ok") for wanted in answer.uses)]  # type: ignore[list-item]

    provider.script([say(str(place), use("lookup", order=str(place), id="call_1"), thought=f"thought {place}") for place in range(6)])
    run(main())


def test_uses_are_equal_to_what_a_journal_gives_back(provider: Provider) -> None:
    provider.script([say("x", use("lookup", order="o-1", n=2**80, f=1e300, t=True))])
    answer = run(ask(model_for("chat"), tools=(LOOKUP,)))
    assert answer_of(encoded(answer)).uses == (ToolUse("call_0_0", "lookup", {"order": "o-1", "n": 2**80, "f": 1e300, "t": True}),)
