"""Faults of a provider become the right kind of failure, with the id of the request and without the key."""

from __future__ import annotations

import asyncio
import socket
import traceback
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from tests.models.adapters import Api, ask, every_api, model_for
from tests.servers.providers import Provider, say, use
from tests.unit.drive_tools import run

from perdure.core.events import Failure, Usage
from perdure.core.failures import describe
from perdure.models import Answer, Anthropic, Model, OpenAI, Price
from perdure.tool.call import Call

TURN = say("one two three four", use("lookup", order="o-1"))


async def failure_of(model: Model, call: Call | None = None) -> Failure:
    try:
        answer = await ask(model, call=call)
    except Exception as error:
        return describe(error)
    raise AssertionError(f"no failure, but {answer}")


# fault, its options, the kind of the failure, seconds to wait
REFUSALS: tuple[tuple[str, dict[str, Any], str, float | None], ...] = (
    ("429", {"retry_after": 7}, "rate_limited", 7.0),
    ("429", {"retry_after_ms": 1500}, "rate_limited", 1.5),
    ("429", {"retry_after": -1}, "rate_limited", None),
    ("429", {"retry_after": "1e9"}, "rate_limited", 86_400.0),
    ("429", {}, "rate_limited", None),
    *((status, {}, "server_error", None) for status in ("500", "502", "503", "504", "529")),
    ("408", {}, "timeout", None),
    ("401", {}, "not_sent", None),  # a key that is not taken any more is nothing that a run could help
    *((status, {}, "refused", None) for status in ("400", "403", "404", "413", "422")),
)
BREAKS: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("reset_body", {}, "reset"),
    ("close", {}, "reset"),
    ("truncate", {}, "reset"),
    ("truncate", {"after": 0}, "reset"),
    ("truncate", {"after": 1}, "reset"),
    ("garbage", {}, "reset"),
    ("error_event", {"type": "overloaded_error"}, "server_error"),
    ("error_event", {"type": "api_error"}, "server_error"),
    ("error_event", {"type": "server_error", "failed": True}, "server_error"),
    ("error_event", {"type": "something new"}, "server_error"),
    ("error_event", {"type": "rate_limit_error"}, "rate_limited"),
    ("error_event", {"type": "rate_limit_exceeded", "failed": True}, "rate_limited"),
    ("error_event", {"type": "invalid_request_error"}, "refused"),
    ("error_event", {"type": "invalid_prompt", "failed": True}, "refused"),
    ("error_event", {"type": "insufficient_quota"}, "not_sent"),
)


@every_api
def test_a_refusal_is_told_by_its_status_with_the_wait_that_was_asked_for(api: Api, provider: Provider) -> None:
    async def main() -> None:
        model = model_for(api)
        for number, (status, options, kind, wait_s) in enumerate(REFUSALS, 1):
            provider.fault(status, **options)
            failure = await failure_of(model)
            assert (failure.kind, failure.retry_after_s) == (kind, wait_s), (status, failure)
            assert f"req_{number}" in failure.message

    run(main())
    assert len(provider.requests()) == len(REFUSALS), "the SDK has tried again on its own"


@every_api
def test_an_answer_that_is_not_whole_is_no_answer(api: Api, provider: Provider) -> None:
    async def main() -> None:
        model = model_for(api)
        for number, (fault, options, kind) in enumerate(BREAKS, 1):
            provider.fault(fault, **options)
            failure = await failure_of(model)
            assert failure.kind == kind, (fault, options, failure)
            assert f"req_{number}" in failure.message, failure
        assert (await ask(model)).stop == "tools"

    provider.script([TURN])
    run(main())
    assert [line.complete for line in provider.requests()] == [False] * len(BREAKS) + [True]


@every_api
def test_every_prefix_of_a_stream_is_a_failure_and_only_the_whole_an_answer(api: Api, provider: Provider) -> None:
    """A cut stream is never taken for an answer, wherever the cut is.

    After the end, only the token count can be missing.
    """

    async def main() -> list[Answer]:
        model = model_for(api)
        answers = []
        for after in range(40):
            provider.fault("truncate", after=after)
            try:
                answers.append(await ask(model))
            except ConnectionResetError:
                assert not answers, after
        return answers

    provider.script([TURN])
    answers = run(main())
    whole = provider.requests()[-1]
    assert whole.complete
    assert {(answer.text, len(answer.uses), answer.stop) for answer in answers} == {("one two three four", 1, "tools")}
    cut = [line for line in provider.requests() if not line.complete]
    # For chat, only the usage and [DONE] come after the stop reason.
    assert len(answers) == 40 - len(cut) + (2 if api == "chat" else 0)


@every_api
def test_a_connection_that_is_reset_refused_or_leads_nowhere(api: Api, provider: Provider, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> list[str]:
        provider.fault("reset")
        kinds: list[str] = [(await failure_of(model_for(api))).kind]
        for host in ("127.0.0.1:1", "no.such.host.invalid"):
            monkeypatch.setenv("ANTHROPIC_BASE_URL", f"http://{host}")
            monkeypatch.setenv("OPENAI_BASE_URL", f"http://{host}/v1")
            kinds.append((await failure_of(model_for(api))).kind)
        return kinds

    assert run(main()) == ["reset", "not_sent", "not_sent"]


def _call(seconds: float) -> Call:
    deadline = datetime.now(UTC) + timedelta(seconds=seconds)
    return Call(key="k" * 64, run_id="r", number=1, attempt=1, deadline=deadline, tenant="t", actor=None)


@every_api
def test_silence_lasts_until_the_deadline_of_the_call(api: Api, provider: Provider) -> None:
    async def main() -> None:
        for after in (None, 2):
            provider.fault("hold", after=after)
            failure = await failure_of(model_for(api), _call(0.3))
            assert failure.kind == "timeout", failure

    provider.script([TURN])
    run(main(), 10)


@every_api
def test_a_slow_stream_is_waited_for(api: Api, provider: Provider) -> None:
    provider.script([TURN])
    provider.fault("slow", delay_s=0.06)
    # Each silence is shorter than the time that is left, though all of them together are not.
    assert run(ask(model_for(api), call=_call(0.75))).text == "one two three four"
    assert provider.requests()[0].seconds > 0.75


@every_api
def test_a_stream_that_goes_silent_behind_a_whole_answer_does_not_cost_it(
    api: Api, provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("perdure.models.streams.LINGER_S", 0.05)
    provider.script(["yes"])
    # The end of the answer has been said and the end of the body never comes.
    provider.fault("hold", after=1.0)
    assert run(ask(model_for(api)), 5).text == "yes"


@every_api
def test_a_cancelled_call_leaves_no_connection_behind(api: Api, provider: Provider) -> None:
    async def main() -> None:
        model = model_for(api)
        provider.fault("hold", after=2)
        asking = asyncio.create_task(ask(model))
        await asyncio.to_thread(provider.wait_for, held=1)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await asyncio.to_thread(provider.requests)  # returns once no request is open any more: the provider has seen us go

    provider.script([TURN])
    run(main())


@pytest.mark.parametrize(("fault", "options"), [("reset_body", {}), ("truncate", {}), ("error_event", {}), ("hold", {"after": 5})])
def test_what_is_known_to_be_spent_is_counted_though_the_answer_is_lost(provider: Provider, fault: str, options: dict[str, Any]) -> None:
    async def main() -> Usage | None:
        call = _call(0.5)
        provider.fault(fault, **options)
        await failure_of(model_for("anthropic", price=Price(input=10, output=100, cached=1)), call)
        return call.usage

    provider.script([say("one two three", cached=40)])
    usage, charged = run(main()), provider.requests()[0].tokens
    assert usage is not None
    # Anthropic reports the input at the beginning; at that time it has counted one token of the answer.
    assert (usage.tokens_in, usage.tokens_cached, usage.tokens_out, usage.model) == (charged["input"], 40, 1, "claude-test")
    assert usage.usd_micros == (charged["input"] - 40) * 10 + 40 * 1 + 100


@every_api
def test_a_refusal_spends_nothing(api: Api, provider: Provider) -> None:
    call = Call.outside()
    provider.fault("500")
    run(failure_of(model_for(api), call))
    assert call.usage is None


@every_api
def test_no_key_is_in_any_error(api: Api, provider: Provider, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = "sk-live-0123456789abcdef"
    other = "plain-text-token-without-a-prefix"

    async def main() -> None:
        for key in (wrong, other):
            monkeypatch.setenv("ANTHROPIC_API_KEY", key)
            monkeypatch.setenv("OPENAI_API_KEY", key)
            for number, told in enumerate((None, f"you sent {key} and sk-proj-****abcd")):
                if told is not None:
                    provider.fault("400", message=told)
                with pytest.raises(Exception, match=r"\[key\]") as raised:
                    await ask(model_for(api))
                shown = "".join(traceback.format_exception(raised.value)) + describe(raised.value).message + repr(raised.value)
                assert key not in shown, number
                assert "abcd" not in shown, number

    run(main())
    assert [line.status for line in provider.requests()] == [401, 400] * 2


@pytest.mark.parametrize("kind", [Anthropic, OpenAI])
def test_without_a_key_the_way_out_is_said(kind: type[Anthropic | OpenAI]) -> None:
    failure = run(failure_of(kind("some-model")))
    assert (failure.kind, failure.type) == ("not_sent", "NotReady")
    assert f"set {kind.__name__.upper()}_API_KEY" in failure.message


@pytest.mark.parametrize("kind", [Anthropic, OpenAI])
def test_a_key_with_a_line_break_is_refused_without_being_shown(kind: type[Anthropic | OpenAI], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"{kind.__name__.upper()}_API_KEY", "hush-hush-hush\n")
    failure = run(failure_of(kind("some-model")))
    assert (failure.kind, failure.type) == ("not_sent", "NotReady")
    assert "line break" in failure.message
    assert "hush" not in failure.message


def test_a_server_that_does_not_speak_http_is_a_broken_line() -> None:
    """A port that answers with something else entirely: not an error of ours, and worth another try."""

    async def main() -> Failure:
        async def mumble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read(10)
            writer.write(b"220 mail.example.com ESMTP\r\n")
            await writer.drain()
            writer.close()

        async with await asyncio.start_server(mumble, "127.0.0.1", 0, family=socket.AF_INET) as server:
            port = server.sockets[0].getsockname()[1]
            return await failure_of(OpenAI("x", base_url=f"http://127.0.0.1:{port}/v1", api_key="none"))

    assert run(main()).kind == "reset"
