"""Clients of models.

Created when they are needed, one for each loop, closed with the loop; and the error without one.
"""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import warnings
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest
from anthropic import Anthropic as BlockingClient
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI
from tests.models.adapters import Api, ask, every_api, model_for
from tests.servers.providers import Provider
from tests.unit.drive_tools import run

from perdure.errors import InvalidInput
from perdure.models import Anthropic, OpenAI


@every_api
def test_a_model_works_in_one_loop_after_another_and_leaves_nothing_open(api: Api, provider: Provider) -> None:
    provider.script(["yes"])
    model = model_for(api)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(3):
            assert run(ask(model)).text == "yes"
        del model
        gc.collect()
    assert not [str(warning.message) for warning in seen]
    assert len(provider.requests()) == 3


def test_a_model_that_ends_with_its_loop_leaves_nothing_open(provider: Provider) -> None:
    async def main() -> None:
        model = model_for("anthropic")
        await asyncio.gather(*(ask(model) for _ in range(5)))

    provider.script(["yes"])
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        run(main())
        gc.collect()
    assert not [str(warning.message) for warning in seen]


def test_models_that_are_dropped_while_the_loop_goes_on_leave_nothing_open(provider: Provider, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perdure.models.clients._AFTER_S", 0.01)

    async def main() -> None:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for fault in (None, "400", "reset_body"):
                if fault is not None:
                    provider.fault(fault)
                try:
                    await ask(model_for("anthropic"))
                except Exception:
                    pass  # an exception holds on to everything that its traceback has seen, the model too
                gc.collect()
                await asyncio.sleep(0.1)
            gc.collect()
        assert not [str(warning.message) for warning in seen]
        assert not [link for link in psutil.Process().net_connections("tcp") if link.raddr and link.raddr.port == port]

    port = int(provider.url.rpartition(":")[2])
    provider.script(["yes"])
    run(main())


@every_api
def test_calls_at_the_same_time_share_a_client_and_one_after_another_a_connection(api: Api, provider: Provider) -> None:
    async def main() -> None:
        model = model_for(api)
        await asyncio.gather(*(ask(model) for _ in range(5)))
        assert len(model._clients._own) == 1
        (client, _), *_ = model._clients._own.values()
        pool = client._client._transport._pool
        await ask(model)
        used = len(pool.connections)
        for _ in range(5):
            await ask(model)
        assert len(pool.connections) == used

    provider.script(["yes"])
    run(main())


def test_a_client_of_the_users_own_is_used_and_left_open(provider: Provider) -> None:
    async def main() -> None:
        claude = AsyncAnthropic(base_url=provider.url, api_key=provider.key)
        gpt = AsyncOpenAI(base_url=provider.openai_url, api_key=provider.key)
        async with claude, gpt:
            models: list[Any] = [Anthropic("a", claude), OpenAI("b", gpt), OpenAI("c", gpt, api="chat")]
            for model in models:
                provider.fault("500")
                with pytest.raises(Exception, match="500"):
                    await ask(model)
                await ask(model)
            assert not claude.is_closed()
            assert not gpt.is_closed()
            assert (claude.max_retries, gpt.max_retries) == (2, 2), "the user's own client is as it was"

    provider.script(["yes"])
    run(main())
    assert [line.status for line in provider.requests()] == [500, 200] * 3
    assert [line.provider for line in provider.requests()][::2] == ["anthropic", "responses", "chat"]


def test_a_base_url_speaks_chat_with_the_key_that_was_given(provider: Provider, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_BASE_URL", "OPENAI_API_KEY"):
        monkeypatch.delenv(name)
    provider.script(["yes"])
    run(ask(OpenAI("local", base_url=provider.openai_url, api_key=provider.key), max_tokens=50))
    line = provider.requests()[0]
    assert (line.provider, line.body["max_tokens"]) == ("chat", 50)


def test_what_cannot_be_a_client_is_said_at_once() -> None:
    with pytest.raises(InvalidInput, match="give an async one"):
        Anthropic("a", BlockingClient(api_key="x"))  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="instead of a client"):
        OpenAI("b", AsyncOpenAI(api_key="x"), base_url="http://127.0.0.1")
    with pytest.raises(InvalidInput, match="responses"):
        OpenAI("b", api="completions")  # type: ignore[arg-type]


def test_no_sdk_is_imported_before_a_model_is_asked_and_a_missing_one_is_named() -> None:
    script = """
import asyncio, sys
import perdure
from perdure.models import Anthropic, OpenAI
loaded = {"anthropic", "openai", "httpx2", "pydantic"} & set(sys.modules)
assert not loaded, loaded
for kind, extra in ((Anthropic, "anthropic"), (OpenAI, "openai")):
    sys.modules[extra] = None
    try:
        asyncio.run(kind("m").ask("hi"))
    except perdure.NotReady as error:
        assert f"pip install 'perdure[{extra}]'" in str(error), error
    else:
        raise AssertionError(kind)
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
