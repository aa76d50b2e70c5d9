"""A local model provider in a separate process: Anthropic Messages, OpenAI chat completions and OpenAI responses.

    with Provider([say("Looking.", use("lookup", order="o-1")), say("It is on its way.")]) as provider:
        model = Anthropic("claude-test", client=AsyncAnthropic(base_url=provider.url, api_key=provider.key))
        provider.fault("429", retry_after=0)            # the next request
        …
        assert [line.status for line in provider.requests()] == [429, 200, 200]

The nth answer of a conversation is the nth turn of the script. The server reads n from the request (how often the
model has spoken) and does not count requests: so a process that resumes after a kill gets the right turn. Requests
that the real providers would refuse are refused with their words and a 400. Only the server writes the ledger file: it
says what was asked, whatever the journal says.

In another process: pass `provider.env`, which makes both SDKs use this server.
"""

from __future__ import annotations

import json
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from tests.servers import forked
from tests.servers.provider_answers import Count, Turn, Use

_ROOT = Path(__file__).parents[2]
_UNSAID: Any = object()

Kind = Literal["429", "529", "500", "reset", "reset_body", "close", "truncate", "garbage", "error_event", "slow", "hold", "answer"]


def use(name: str, arguments: dict[str, Any] | str | None = None, /, *, id: str | None = None, **named: Any) -> Use:
    """A tool use in a turn. Arguments by name, as an object, or as a text that need not be JSON. Ids are unique unless they are named."""
    return {"name": name, "arguments": arguments if isinstance(arguments, str) else json.dumps((arguments or {}) | named), "id": id}


def say(
    text: str = "",
    *uses: Use,
    stop: str | None = None,
    thought: str | None = None,
    cached: int = 0,
    stored: int = 0,
    extra: bool = False,
    usage: Any = _UNSAID,
) -> Turn:
    """A turn of the script. `say()` is an answer with nothing in it.

    stop:    end, tools, length or refusal in the provider's own word, or any other word as it is; by default what fits
    thought: signed reasoning before the answer, which the server wants back unchanged
    cached, stored: tokens that count as read from the cache and written to it
    extra:   unknown fields, events and blocks everywhere
    usage:   what is said about tokens instead of the truth; None leaves it out
    """
    turn: Turn = {
        "text": text,
        "uses": list(uses),
        "stop": stop,
        "thought": thought,
        "cached": cached,
        "stored": stored,
        "extra": extra,
    }
    if usage is not _UNSAID:
        turn["usage"] = usage
    return turn


@dataclass(frozen=True, slots=True)
class Line:
    """A request in the ledger."""

    number: int
    """From 1, in the order of arrival."""
    provider: str | None
    """anthropic, chat or responses; None for a path that there is not."""
    key: str | None
    """Its Idempotency-Key."""
    digest: str
    """SHA-256 of the body."""
    status: int | None
    """None when it was cut off before there was one."""
    turn: int | None
    """Which turn of the script it got, from 0; None if none."""
    tokens: Count
    """What is charged: nothing for a refusal, everything as soon as the answer has begun."""
    injected: str | None
    """The kind of the fault, if there was one."""
    complete: bool
    """Whether the answer was written to the end, with the client still there."""
    seconds: float
    at: float
    refused: str | None = None
    """The message of the refusal."""
    body: Any = None
    """The request's body, with keep_bodies."""


class Provider:
    """The server, until close().

    `url` is Anthropic's base URL, `openai_url` OpenAI's; `key` is the only valid API key.
    """

    def __init__(self, script: Sequence[Turn | str] = (), *, keep_bodies: bool = True) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="provider-"))
        self.ledger = self.folder / "ledger.jsonl"
        self.key = f"sk-test-{secrets.token_hex(16)}"
        self._process = forked.Popen(
            [sys.executable, "-m", "tests.servers.provider_server", str(self.ledger), self.key, "bodies" if keep_bodies else "digests"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=_ROOT,
            # Signals that a test sends to its own group, or to a victim's group, must not reach the provider.
            start_new_session=True,
        )
        self.pid = self._process.pid
        assert self._process.stdout is not None
        port = self._process.stdout.readline().strip().decode()
        assert port, "the provider has not started"
        self.url = f"http://127.0.0.1:{port}"
        self.openai_url = f"{self.url}/v1"
        self.script(script)

    @property
    def env(self) -> dict[str, str]:
        """Environment variables that send both SDKs here."""
        return {
            "ANTHROPIC_BASE_URL": self.url,
            "ANTHROPIC_API_KEY": self.key,
            "OPENAI_BASE_URL": self.openai_url,
            "OPENAI_API_KEY": self.key,
            "NO_PROXY": "127.0.0.1",
        }

    def script(self, turns: Sequence[Turn | str], *, when: str | None = None) -> None:
        """From now on answer by these turns; with `when`, only conversations whose first message contains that text."""
        said = [say(turn) if isinstance(turn, str) else turn for turn in turns]
        self._order("script", {"when": when, "turns": said})

    def fault(
        self,
        kind: Kind | str,
        *,
        nth: int | None = None,
        when: str | None = None,
        times: int = 1,
        after: float | int | None = None,
        delay_s: float = 0.0,
        retry_after: float | str | None = None,
        retry_after_ms: float | None = None,
        message: str = "injected",
        type: str = "overloaded_error",
        failed: bool = False,
        turn: Turn | None = None,
    ) -> None:
        """Have this happen to the next request, to the nth since the start, or to one whose body contains the text `when`; `times` times.

        "429" (any status)  refused with that status, `message`, and the headers retry-after and retry-after-ms if given
        "reset"       the connection is reset before the headers
        "reset_body"  … in the middle of the answer; `after` so many chunks (int) or that part of them (float, half by default)
        "close"       closed there in order, but without the end of the body
        "truncate"    the body ends there properly: only the last events of the stream are missing
        "garbage"     an event that is not JSON, then the end
        "error_event" an error inside the stream, of that `type`; responses with failed=True: as response.failed
        "slow"        `delay_s` after each chunk
        "hold"        nothing is answered (with `after`: nothing from there on) until release() or until the client is gone;
                      after=1.0: everything is said, and only the end of the body is held back
        "answer"      the answer is `turn`, whatever the script says

        Faults in the middle need a request that streams. The first fault that fits is taken.
        """
        middle = {"reset_body", "close", "truncate", "garbage", "error_event"}
        headers = {} if retry_after is None else {"retry-after": str(retry_after)}
        headers |= {} if retry_after_ms is None else {"retry-after-ms": str(retry_after_ms)}
        order: dict[str, Any] = {
            "kind": kind,
            "nth": nth,
            "when": when,
            "times": times,
            "after": 0.5 if after is None and kind in middle else after,
        }
        order |= {"delay_s": delay_s, "headers": headers, "message": message, "type": type, "failed": failed, "turn": turn}
        self._order("fault", order)

    def release(self) -> None:
        """Let everything go on that is held."""
        self._order("release", {})

    def wait_for(self, *, arrived: int = 0, held: int = 0, within_s: float = 20.0) -> None:
        """Return when this many requests have arrived since the start, and this many are held now."""
        self._until(lambda state: state["arrived"] >= arrived and state["held"] >= held, within_s)

    def requests(self, within_s: float = 20.0, *, containing: str = "") -> list[Line]:
        """The ledger in the order of arrival, once no request is open any more; of all, or of those that this word stands in."""
        self._until(lambda state: state["open"] == 0, within_s)
        told = self.ledger.read_text(encoding="utf-8").splitlines()
        lines = [Line(**json.loads(line)) for line in told if containing in line]
        return sorted(lines, key=lambda line: line.number)

    def close(self) -> None:
        """End the process, by the end of its standard input; its folder goes with it."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _until(self, holds: Any, within_s: float) -> None:
        deadline = time.monotonic() + within_s
        while not holds(state := self._order("state", {})):
            if time.monotonic() > deadline:
                raise TimeoutError(f"the provider, {within_s} s later: {state}")
            time.sleep(0.005)

    def _order(self, name: str, order: dict[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(f"{self.url}/control/{name}", json.dumps(order).encode(), {"Content-Type": "application/json"})
        # No proxy of the developer's shell stands between a test and its own server.
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=10) as answer:
            state: dict[str, Any] = json.loads(answer.read())
            return state
