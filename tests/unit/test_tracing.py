"""Spans of runs, as a real collector gets them: once each, in one trace, with derived ids, and nothing secret."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx2
import pytest
from opentelemetry import trace as otel
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.instrumentation.httpx import HTTPX2ClientInstrumentor
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, Sampler, TraceIdRatioBased
from tests.golden.files import Golden, versions
from tests.servers.collector import Collector, Received
from tests.unit.drive_tools import SETTINGS, ManualClock, local, run, until, worker_of
from tests.unit.postgres_tools import cleared

from perdure import Call, InvalidInput, Outcome, Perdure, Retry, Run, RunFilter, Settings, agent, tool
from perdure.core.codec import Payload, pack
from perdure.core.events import (
    ApprovalDecided,
    ApprovalRequested,
    Event,
    RunClaimed,
    RunCreated,
    RunReleased,
    RunSucceeded,
    ToolCallCompleted,
    ToolCallInitiated,
    TraceContext,
)
from perdure.core.state import fold
from perdure.core.trace_context import RunTrace
from perdure.errors import StoreUnavailable
from perdure.models import Answer, Scripted, Tokens
from perdure.otel import RunSpans, Span, Telemetry
from perdure.store.api import Append, Appended
from perdure.sync import Perdure as Blocking

STARTER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
INPUT: Payload = pack(b"{}", 100)[0]


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.full)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return cleared(request.getfixturevalue("postgres")) if request.param == "postgres" else f"sqlite:///{tmp_path / 'db'}"


@pytest.fixture(scope="module")
def listening() -> Iterator[Collector]:
    with Collector() as collector:
        yield collector


class Traced:
    """A collector, and processes (here: providers) that report to it."""

    def __init__(self, collector: Collector) -> None:
        collector.spans.clear()
        self._collector = collector
        self._providers: list[TracerProvider] = []

    def provider(self, service: str = "one", sampler: Sampler | None = None) -> TracerProvider:
        provider = TracerProvider(resource=Resource({"service.name": service}), sampler=sampler, shutdown_on_exit=False)
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(self._collector.endpoint), schedule_delay_millis=60_000))
        self._providers.append(provider)
        return provider

    def telemetry(self, service: str = "one", *, payloads: bool = False, sampler: Sampler | None = None) -> Telemetry:
        return Telemetry(self.provider(service, sampler), payloads=payloads)

    @property
    def spans(self) -> list[Received]:
        """What the collector has received; no id is there twice."""
        for provider in self._providers:
            assert provider.force_flush()
        found = list(self._collector.spans)
        assert [one for one, times in Counter((span.trace, span.id) for span in found).items() if times > 1] == []
        return found

    def named(self, name: str) -> list[Received]:
        return [span for span in self.spans if span.name == name]

    def close(self) -> None:
        for provider in self._providers:
            provider.shutdown()


@pytest.fixture
def traced(listening: Collector) -> Iterator[Traced]:
    made = Traced(listening)
    yield made
    made.close()


def app_of(url: str, agents: list[Any], telemetry: Telemetry | None, **settings: Any) -> Perdure:
    wanted = Settings(**{name: getattr(SETTINGS, name) for name in SETTINGS.__struct_fields__} | settings)
    return Perdure(url, agents, settings=wanted, telemetry=telemetry)


def journal(app: Perdure, run_id: str) -> list[Event]:
    return app.store.read(run_id)


@tool(effect="idempotent")
async def look(order: str) -> int:
    return 4_900


@tool(effect="keyed", approval=lambda cents: cents > 10_000 and "over $100")
async def refund(cents: int, call: Call) -> str:
    return "receipt-77"


@agent(version="3")
async def support(run: Run, order: str, cents: int) -> str:
    await look(order)
    return await refund(cents)


# -- what a trace shows -----------------------------------------------------------------------------------------------
def test_a_run_is_one_trace_with_a_span_for_the_run_each_attempt_and_each_commit(url: str, traced: Traced) -> None:
    async def main() -> list[Event]:
        async with app_of(url, [support], traced.telemetry()) as app:
            assert await app.run(support, "o-7", 500, id="r", tenant="acme") == "receipt-77"
            return journal(app, "r")

    events = run(main())
    created = events[0].body
    assert isinstance(created, RunCreated)
    ids, spans = RunTrace(created), traced.spans
    assert {span.trace for span in spans} == {ids.trace_id}
    (whole,) = traced.named("invoke_agent support")
    assert (whole.id, whole.parent, whole.kind) == (ids.run_span(0).span_id, "", 1)
    assert (whole.start_us, whole.end_us) == (events[0].ts, events[-1].ts)
    assert whole.attributes == {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.agent.name": "support",
        "gen_ai.agent.version": "3",
        "perdure.run.id": "r",
        "perdure.tenant": "acme",
        "perdure.queue": "default",
        "perdure.status": "succeeded",
    }
    (looked,), (paid,) = traced.named("execute_tool look"), traced.named("execute_tool refund")
    assert [looked.id, paid.id] == [ids.attempt_span(1, 1).span_id, ids.attempt_span(2, 1).span_id]
    assert looked.parent == paid.parent == whole.id
    times = {type(event.body): event.ts for event in events if event.call == 2}
    assert (paid.start_us, paid.end_us) == (times[ToolCallInitiated], times[ToolCallCompleted])
    assert paid.attributes == {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": "refund",
        "gen_ai.tool.type": "function",
        "gen_ai.tool.call.id": "r#2",
        "gen_ai.agent.name": "support",
        "perdure.run.id": "r",
        "perdure.tenant": "acme",
        "perdure.call": 2,
        "perdure.attempt": 1,
        "perdure.effect": "keyed",
        "perdure.outcome": "completed",
    }
    commits = traced.named("perdure.commit")
    # Everything but the first two events (the start and the claim) is in a commit of this worker.
    assert sum(span.attributes["perdure.commit.events"] for span in commits) == len(events) - 2
    assert all(span.parent == whole.id and span.start_us <= span.end_us for span in commits)


def test_an_approval_and_a_wait_are_spans_and_the_process_that_goes_on_reports_them(url: str, traced: Traced) -> None:
    """One process parks the run, one without telemetry decides, a third goes on: one trace, and no span twice."""

    async def main() -> None:
        async with app_of(url, [support], traced.telemetry("first")) as app:
            await app.start(support, "o-7", 50_000, id="r")
            await app.drive("r")
        async with app_of(url, [], None) as app:
            (asked,) = await app.approvals()
            await app.approve(asked.approval, by="ann")
        async with app_of(url, [support], traced.telemetry("second")) as app:
            assert await app.handle("r").result() == "receipt-77"

    run(main())
    by_process = {(span.service, span.name) for span in traced.spans if span.name != "perdure.commit"}
    assert by_process == {
        ("first", "execute_tool look"),
        ("second", "perdure.approval refund"),
        ("second", "perdure.wait"),
        ("second", "execute_tool refund"),
        ("second", "invoke_agent support"),
    }
    assert len({span.trace for span in traced.spans}) == 1
    (asked,), (waited,), (whole,) = (traced.named(name) for name in ("perdure.approval refund", "perdure.wait", "invoke_agent support"))
    assert asked.parent == waited.parent == whole.id
    assert asked.attributes["perdure.approval.outcome"] == "granted"
    assert "perdure.approval.by" not in asked.attributes
    assert waited.attributes["perdure.wait.status"] == "waiting_approval"
    assert whole.start_us <= asked.start_us <= asked.end_us <= waited.end_us <= whole.end_us


@pytest.mark.parametrize("cache", [0, 256], ids=["replayed", "kept in memory"])
def test_a_run_that_parks_again_and_again_reports_nothing_twice(url: str, traced: Traced, cache: int) -> None:
    """With a replay at each claim, and without: the spans are the same."""

    @agent(version="1")
    async def sleepy(run: Run) -> None:
        for _ in range(3):
            await look("o")
            await asyncio.sleep(0.01)
        assert await run.receive("go") == "now"

    async def main() -> None:
        async with app_of(url, [sleepy], traced.telemetry(), cache_runs=cache) as app:
            await app.start(sleepy, id="r")
            await app.drive("r")
            await app.signal("r", "go", "now")
            await app.drive("r")

    run(main())
    names = Counter(span.name for span in traced.spans)
    assert (names["execute_tool look"], names["invoke_agent sleepy"], names["perdure.wait"]) == (3, 1, 4)


def test_short_waits_that_do_not_park_are_spans_too(traced: Traced) -> None:
    @agent(version="1")
    async def napping(run: Run) -> None:
        await look("o")
        await asyncio.sleep(0.02)

    async def main() -> None:
        async with app_of("sqlite://", [napping], traced.telemetry(), park_after_s=30.0) as app:
            await app.run(napping, id="r")

    run(main())
    (waited,), (looked,) = traced.named("perdure.wait"), traced.named("execute_tool look")
    assert waited.attributes["perdure.wait.for"] == "timer"
    assert waited.start_us == looked.end_us
    assert waited.end_us - waited.start_us >= 20_000


def test_each_attempt_is_a_span_and_a_failure_names_its_type_only(traced: Traced) -> None:
    tries: list[int] = []

    @tool(effect="idempotent", retry=Retry(attempts=2, base=0.0))
    async def weak() -> None:
        tries.append(1)
        raise ConnectionRefusedError("the password was hunter2")

    @agent(version="1")
    async def unlucky(run: Run) -> None:
        await weak()

    async def main() -> None:
        async with app_of("sqlite://", [unlucky], traced.telemetry()) as app:
            with contextlib.suppress(Exception):
                await app.run(unlucky, id="r")

    run(main())
    attempts = traced.named("execute_tool weak")
    assert len(tries) == 2
    assert [span.attributes["perdure.attempt"] for span in attempts] == [1, 2]
    assert {(span.attributes["error.type"], span.status, span.message) for span in attempts} == {("ConnectionRefusedError", 2, "")}
    (whole,) = traced.named("invoke_agent unlucky")
    assert (whole.attributes["perdure.status"], whole.attributes["error.type"], whole.status) == ("failed", "ToolFailed", 2)


def test_a_doubt_ends_its_attempt_and_its_resolution_is_a_span(traced: Traced) -> None:
    @tool(effect="once")
    async def lost() -> None:
        raise TimeoutError("no answer")

    @lost.reconcile
    async def _() -> Outcome:
        return Outcome.happened(None)

    @agent(version="1")
    async def doubtful(run: Run) -> None:
        await lost()

    async def main() -> None:
        async with app_of("sqlite://", [doubtful], traced.telemetry()) as app:
            await app.run(doubtful, id="r")

    run(main())
    (attempt,), (doubt,) = traced.named("execute_tool lost"), traced.named("perdure.doubt")
    assert (attempt.attributes["perdure.outcome"], attempt.attributes["error.type"]) == ("in_doubt", "InDoubt")
    assert doubt.attributes["perdure.outcome"] == "happened"
    assert doubt.start_us == attempt.end_us


def test_a_request_to_a_model_is_a_chat_span_with_its_tokens(traced: Traced) -> None:
    model = Scripted([Answer(text="hello", tokens=Tokens(output=5))], name="small-1")

    @agent(version="1")
    async def talk(run: Run) -> None:
        await model.ask("hi")

    async def main() -> None:
        async with app_of("sqlite://", [talk], traced.telemetry()) as app:
            await app.run(talk, id="r")

    run(main())
    (chat,) = traced.named("chat small-1")
    assert chat.kind == 3
    assert chat.attributes["gen_ai.operation.name"] == "chat"
    assert chat.attributes["gen_ai.request.model"] == "small-1"
    assert chat.attributes["gen_ai.usage.output_tokens"] > 0
    assert "perdure.model.answer" not in chat.attributes


# -- children and the program that starts a run -----------------------------------------------------------------------
@agent(version="1")
async def kid(run: Run) -> dict[str, str]:
    return await seen()


@tool(effect="idempotent")
async def seen(call: Call) -> dict[str, str]:
    return call.headers


@agent(version="1")
async def parent(run: Run) -> dict[str, str]:
    return await kid()


@pytest.mark.parametrize("trace", [None, STARTER], ids=["a trace of its own", "the trace of the starter"])
def test_a_child_belongs_to_the_trace_of_its_parent(url: str, traced: Traced, trace: str | None) -> None:
    async def main() -> None:
        async with app_of(url, [parent, kid], traced.telemetry()) as app:
            await app.run(parent, id="r", trace=trace)

    run(main())
    (top,), (below,) = traced.named("invoke_agent parent"), traced.named("invoke_agent kid")
    assert len({span.trace for span in traced.spans}) == 1
    assert (top.trace == STARTER[3:35], top.parent) == ((False, "") if trace is None else (True, STARTER[36:52]))
    assert below.parent == top.id
    assert {span.parent for span in traced.spans if span.attributes.get("perdure.run.id") == "r/1" and span is not below} >= {below.id}


def test_the_current_span_of_the_program_that_starts_a_run_is_recorded(url: str, traced: Traced) -> None:
    provider = traced.provider("web")

    async def main() -> RunCreated:
        async with app_of(url, [kid], None) as starter:  # it reports no spans itself
            with provider.get_tracer("web").start_as_current_span("POST /refunds"):
                await starter.start(kid, id="r")
            await starter.start(kid, id="other", trace=None)
            assert journal(starter, "other")[0].body.trace is None  # type: ignore[union-attr]
        async with app_of(url, [kid], traced.telemetry("worker")) as app:
            await app.drive("r")
            created = journal(app, "r")[0].body
            assert isinstance(created, RunCreated)
            return created

    created = run(main())
    (request,), (whole,) = traced.named("POST /refunds"), traced.named("invoke_agent kid")
    assert created.trace is not None
    assert created.trace.parent.startswith(f"00-{request.trace}-{request.id}-0")
    assert (whole.trace, whole.parent) == (request.trace, request.id)


def test_blocking_code_starts_runs_in_its_current_span(tmp_path: Path, traced: Traced) -> None:
    provider = traced.provider("web")
    with (
        Blocking(f"sqlite:///{tmp_path / 'db'}", [kid], telemetry=Telemetry(provider)) as app,
        provider.get_tracer("web").start_as_current_span("request"),
    ):
        app.run(kid, id="r")
    (request,), (whole,) = traced.named("request"), traced.named("invoke_agent kid")
    assert (whole.trace, whole.parent) == (request.trace, request.id)


def test_the_headers_of_a_call_name_its_attempt(traced: Traced) -> None:
    async def main() -> Any:
        async with app_of("sqlite://", [kid], traced.telemetry()) as app:
            return await app.run(kid, id="r", trace={"Traceparent": STARTER, "TraceState": "a=1,b=2"})

    headers = run(main())
    (attempt,) = traced.named("execute_tool seen")
    assert headers == {"traceparent": f"00-{STARTER[3:35]}-{attempt.id}-01", "tracestate": "a=1,b=2"}


@pytest.mark.parametrize(("trace", "headers"), [(None, {}), (STARTER, {"traceparent": STARTER})], ids=["without", "with a starter"])
def test_without_telemetry_the_headers_of_a_call_are_those_of_the_starter(trace: str | None, headers: dict[str, str]) -> None:
    async def main() -> Any:
        async with app_of("sqlite://", [kid], None) as app:
            return await app.run(kid, id="r", trace=trace)

    assert run(main()) == headers


# -- the current span inside a tool -----------------------------------------------------------------------------------
def current() -> list[str]:
    found = otel.get_current_span().get_span_context()
    return [f"{found.trace_id:032x}", f"{found.span_id:016x}"]


@tool(effect="idempotent")
async def in_task() -> list[str]:
    await asyncio.sleep(0)
    return current()


@tool(effect="idempotent")
def in_thread() -> list[str]:
    return current()


@tool(effect="transaction")
def in_transaction(call: Call) -> list[str]:
    return current()


@tool(effect="idempotent", isolate=True)
def in_process(call: Call) -> list[str]:
    assert call.headers["traceparent"] == "00-" + "-".join(current()) + "-01"
    return current()


@agent(version="1")
async def everywhere(run: Run, isolated: bool) -> list[list[str]]:
    if isolated:
        return [await in_process()]
    return [await in_task(), await in_thread(), await in_transaction(), await in_thread(), await in_task()]


@pytest.mark.parametrize("isolated", [False, pytest.param(True, marks=pytest.mark.full)])
def test_while_a_tool_runs_the_span_of_its_attempt_is_the_current_one(tmp_path: Path, traced: Traced, isolated: bool) -> None:
    async def main() -> tuple[Any, list[str]]:
        async with app_of(f"sqlite:///{tmp_path / 'db'}", [everywhere], traced.telemetry()) as app:
            return await app.run(everywhere, isolated, id="r"), current()

    inside, outside = run(main())
    ended = [span for span in traced.spans if span.name.startswith("execute_tool")]
    assert inside == [[span.trace, span.id] for span in sorted(ended, key=lambda span: span.attributes["perdure.call"])]
    assert outside == ["0" * 32, "0" * 16]


def test_an_instrumented_client_sends_the_span_of_the_attempt_by_itself(traced: Traced) -> None:
    asked: list[str | None] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.headers.get("traceparent"))
            self.send_response(204)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    provider = traced.provider()
    client = httpx2.Client(base_url=f"http://127.0.0.1:{server.server_port}", trust_env=False)
    HTTPX2ClientInstrumentor.instrument_client(client, tracer_provider=provider)

    @tool(effect="read")
    def ask() -> int:
        return client.get("/").status_code

    @agent(version="1")
    async def asker(run: Run) -> int:
        return await ask()

    async def main() -> Any:
        async with app_of("sqlite://", [asker], Telemetry(provider)) as app:
            return await app.run(asker, id="r")

    try:
        assert run(main()) == 204
    finally:
        client.close()
        server.shutdown()
        server.server_close()
    (attempt,), (sent,) = traced.named("execute_tool ask"), traced.named("GET")
    assert (sent.trace, sent.parent) == (attempt.trace, attempt.id)
    assert asked == [f"00-{sent.trace}-{sent.id}-01"]


# -- never twice ------------------------------------------------------------------------------------------------------
def test_an_append_that_is_sent_again_reports_its_spans_once(url: str, traced: Traced) -> None:
    async def main() -> list[int]:
        async with app_of(url, [support], traced.telemetry()) as app:
            failed = await fails(app)
            assert await app.run(support, "o-7", 500, id="r") == "receipt-77"
            return failed

    assert len(run(main())) == 2
    names = Counter(span.name for span in traced.spans)
    assert names == {"execute_tool look": 1, "execute_tool refund": 1, "invoke_agent support": 1, "perdure.commit": 3}


def test_an_append_that_was_written_although_the_store_denied_it_reports_no_span_twice(tmp_path: Path, traced: Traced) -> None:
    """The second try is refused, since the first one is in the journal. The run is claimed again, and replayed."""

    async def main() -> list[Event]:
        async with app_of(f"sqlite:///{tmp_path / 'db'}", [support], traced.telemetry()) as app:
            await fails(app, written=True)
            assert await app.run(support, "o-7", 500, id="r") == "receipt-77"
            return journal(app, "r")

    assert sum(event.type == "run_claimed" for event in run(main())) > 1
    assert len(traced.named("invoke_agent support")) == 1  # and `named` checks that no id is there twice


async def fails(app: Perdure, *, written: bool = False) -> list[int]:
    """Two appends of the app's worker are answered with StoreUnavailable. They are not written, unless `written`."""
    store: Any = app.store
    group: Any = (await local(app)._working()).group
    append, send_now, failed = store.append, group.send_now, list[int]()

    def fail(appends: Sequence[Append]) -> bool:
        if len(failed) == 2 or sum(len(one.events) for one in appends) < 2:
            return False
        failed.append(1)
        return True

    def failing(appends: Sequence[Append]) -> Sequence[Appended]:
        if not fail(appends):
            return append(appends)  # type: ignore[no-any-return]
        if written:
            append(appends)
        raise StoreUnavailable("disk I/O error in COMMIT")

    def send(one: Append, done: Callable[[Appended | Exception], None]) -> None:
        if fail([one]):
            done(StoreUnavailable("the server does not answer"))
        else:
            send_now(one, done)

    store.append, group.send_now = failing, send
    return failed


def test_a_run_that_another_worker_takes_over_is_one_trace_without_a_span_twice(url: str, traced: Traced) -> None:
    """The first worker dies inside a call. The second ends the span of the lost attempt, and reports the takeover."""
    begun = threading.Event()
    once: list[int] = []

    @tool(effect="idempotent")
    async def slow(call: Call) -> int:
        if not once:
            once.append(1)
            begun.set()
            await asyncio.sleep(60)
        return call.attempt

    @agent(version="1")
    async def mortal(run: Run) -> int:
        await look("o")
        return await slow()

    async def main() -> Any:
        async with app_of(url, [mortal], traced.telemetry("first"), lease_s=1.0) as first:
            await first.start(mortal, id="r")
            driving = asyncio.create_task(first.engine.drive("r"))
            await until(begun.is_set)
            worker_of(first).abort()  # writes nothing more, like a crash
            driving.cancel()
            await asyncio.gather(driving, return_exceptions=True)
        async with app_of(url, [mortal], traced.telemetry("second"), lease_s=1.0) as second:
            return await second.handle("r").result()

    assert run(main()) == 2
    spans = traced.spans
    assert len({span.trace for span in spans}) == 1
    attempts = {span.attributes["perdure.attempt"]: span for span in spans if span.name == "execute_tool slow"}
    assert {number: (span.service, span.attributes["perdure.outcome"]) for number, span in attempts.items()} == {
        1: ("second", "lost"),
        2: ("second", "completed"),
    }
    assert Counter((span.service, span.name) for span in spans if span.name != "perdure.commit") == {
        ("first", "execute_tool look"): 1,
        ("second", "execute_tool slow"): 2,
        ("second", "perdure.takeover"): 1,
        ("second", "invoke_agent mortal"): 1,
    }


def test_a_decision_that_a_dead_worker_has_committed_is_not_reported_by_the_next() -> None:
    """The run was held when it was decided, so that the decision was part of an append, with which it was reported."""

    def event(seq: int, body: Any, call: int | None = None) -> Event:
        return Event(seq, f"{seq:032x}", seq * 1_000_000, 1, call, None, body)

    created, asked = RunCreated("r", "a", "1", "t", INPUT), ApprovalRequested("ap-1", "pay", INPUT, "d")
    begun = [event(1, created), event(2, RunClaimed("w1"))]
    appends = [[event(3, asked, 1)], [event(4, ApprovalDecided("ap-1", True, "ann", "d"), 1)]]
    first = RunSpans.of(begun)
    assert [span.name for append in appends for span in first.committed(append)] == ["perdure.approval pay"]
    second = RunSpans.of([*begun, *appends[0], *appends[1], event(5, RunClaimed("w2", takeover=True))])
    assert [span.name for span in second.committed([event(6, RunSucceeded(INPUT))])] == ["perdure.takeover", "invoke_agent a"]
    # A decision between two workers was reported by neither: the next one reports it.
    released = [event(4, RunReleased("waiting_approval", "approval")), event(5, appends[1][0].body, 1), event(6, RunClaimed("w2"))]
    third = RunSpans.of([*begun, *appends[0], *released])
    assert [span.name for span in third.committed([])] == ["perdure.approval pay", "perdure.wait"]


def test_a_run_that_a_person_reopens_has_a_span_for_each_time(url: str, traced: Traced) -> None:
    fine: list[int] = []

    @tool(effect="idempotent")
    async def sometimes() -> str:
        if not fine:
            raise ValueError("down")
        return "up"

    @agent(version="1")
    async def stubborn(run: Run) -> str:
        await look("o")
        return await sometimes()

    async def main() -> Any:
        async with app_of(url, [stubborn], traced.telemetry()) as app:
            with contextlib.suppress(Exception):
                await app.run(stubborn, id="r")
            fine.append(1)
            await app.retry("r", by="ann")
            return await app.handle("r").result()

    assert run(main()) == "up"
    first, second = traced.named("invoke_agent stubborn")
    assert [span.attributes.get("perdure.reopened") for span in (first, second)] == [None, 1]
    assert first.trace == second.trace
    assert {span.attributes["perdure.attempt"]: span.parent for span in traced.named("execute_tool sometimes")} == {
        1: first.id,
        2: second.id,
    }
    assert len(traced.named("execute_tool look")) == 1


def test_the_process_that_ends_a_run_by_force_reports_its_end_and_no_other_does(url: str, traced: Traced) -> None:
    async def main() -> None:
        async with app_of(url, [support], traced.telemetry("worker")) as app:
            await app.start(support, "o-7", 50_000, id="r")
            await app.drive("r")
        async with app_of(url, [support], traced.telemetry("person")) as app:
            await app.cancel("r", by="ann", force=True)
            await app.retry("r", by="ann")
            await app.drive("r")

    run(main())
    (whole,) = traced.named("invoke_agent support")
    assert (whole.service, whole.attributes["perdure.status"]) == ("person", "cancelled")


def test_in_every_journal_of_every_release_each_span_is_ended_by_one_event() -> None:
    """Also in forks, rewound runs, runs with checkpoints, and journals of which only the last life is read."""
    seen: Counter[str] = Counter()
    for version in versions():
        for lines in Golden(version).journals().values():
            events = [line.event for line in lines]
            spans = RunSpans(events[0].body, events[0].ts)  # type: ignore[arg-type]
            ended = spans.committed(events)
            assert [one for one, times in Counter(span.context.span_id for span in ended).items() if times > 1] == []
            assert all(span.start <= span.end for span in ended)
            seen.update(span.name.partition(" ")[0] for span in ended)
            for at, event in enumerate(events):
                if event.type == "checkpoint_taken":
                    since = RunSpans(events[0].body, events[0].ts).committed([events[0], *events[at:]])  # type: ignore[arg-type]
                    assert _known(since) <= _known(ended)
                if event.type == "run_released" and events[at + 1 :]:
                    later = [RunSpans.of(events[: at + 1]), RunSpans.parked(fold(events[: at + 1]), event, [])]
                    assert _known(later[0].committed(events[at + 1 :])) == _known(later[1].committed(events[at + 1 :]))
            # A worker that reads the whole journal reports at most the claim and the post before it.
            assert all(span.name.startswith("perdure.") for span in RunSpans.of(events).committed([]))
    assert set(seen) >= {"invoke_agent", "execute_tool", "chat", "perdure.wait", "perdure.approval", "perdure.takeover", "perdure.doubt"}


@agent(version="1")
async def hears_once(run: Run) -> str:
    if run.restored is None:
        await run.checkpoint(await run.receive("word"))
    return str(run.restored)


def test_a_reopened_run_whose_checkpoint_is_read_has_its_span_from_the_reopening_on() -> None:
    async def main() -> list[Event]:
        clock = ManualClock()
        async with Perdure("sqlite://", [hears_once], settings=SETTINGS, clock=clock) as app:
            await app.start(hears_once, id="r")
            await app.drive("r")
            clock.jump(100)
            await app.rewind("r", to=(await app.handle("r").row()).seq)
            clock.jump(100)
            await app.signal("r", "word", "hello")
            assert await app.handle("r").result() == "hello"
            return await app.handle("r").events()

    events = run(main())
    (at,) = [place for place, event in enumerate(events) if event.type == "checkpoint_taken"]
    whole, since = (RunSpans(events[0].body, events[0].ts).committed(some) for some in (events, [events[0], *events[at:]]))  # type: ignore[arg-type]
    (of_run,) = [span for span in since if span.name.startswith("invoke_agent")]
    assert _known([of_run]) <= _known(whole)


def _known(spans: list[Span]) -> set[tuple[str, str, int, int]]:
    return {(span.name, span.context.span_id, span.start, span.end) for span in spans}


# -- what spans do not say, and what does not break -------------------------------------------------------------------
SECRET = "hunter2"


@tool(effect="keyed", approval=lambda word: "always")
async def tell(word: str, call: Call) -> str:
    return f"told {word}"


@agent(version="1")
async def gossip(run: Run, word: str) -> str:
    return await tell(word)


@pytest.mark.parametrize("payloads", [False, True])
def test_payloads_are_in_spans_only_if_they_are_wanted(traced: Traced, payloads: bool) -> None:
    async def main() -> None:
        async with app_of("sqlite://", [gossip], traced.telemetry(payloads=payloads)) as app:
            await app.start(gossip, SECRET, id="r")
            await app.drive("r")
            (asked,) = await app.approvals()
            await app.approve(asked.approval, by=f"ann-{SECRET}")
            await app.drive("r")

    run(main())
    assert (SECRET in repr(traced.spans)) is payloads
    if payloads:
        (told,), (whole,) = traced.named("execute_tool tell"), traced.named("invoke_agent gossip")
        assert told.attributes["gen_ai.tool.call.arguments"] == '{"word":"hunter2"}'
        assert told.attributes["gen_ai.tool.call.result"] == whole.attributes["perdure.run.output"] == '"told hunter2"'
        assert whole.attributes["perdure.run.input"] == '{"word":"hunter2"}'


class Broken(SpanProcessor):
    def on_end(self, span: ReadableSpan) -> None:
        raise OSError("the exporter is broken")


def test_a_broken_exporter_breaks_no_run_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(Broken())

    async def main() -> Any:
        async with app_of("sqlite://", [support], Telemetry(provider)) as app:
            return await app.run(support, "o-7", 500, id="r")

    with caplog.at_level(logging.INFO, "perdure.otel"):
        assert run(main()) == "receipt-77"
    assert [record.levelname for record in caplog.records if record.name == "perdure.otel"] == ["ERROR"]


class Plain(otel.TracerProvider):
    """A provider of another vendor: its tracers take no ids."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider

    def get_tracer(self, *args: Any, **kwargs: Any) -> otel.Tracer:
        inner = self._provider.get_tracer(*args, **kwargs)

        class PlainTracer(otel.Tracer):
            def start_span(self, *args: Any, **kwargs: Any) -> otel.Span:
                return inner.start_span(*args, **kwargs)

            def start_as_current_span(self, *args: Any, **kwargs: Any) -> Any:
                raise NotImplementedError

        return PlainTracer()


def test_without_derived_ids_the_trace_is_the_same_and_the_log_says_what_is_missing(
    traced: Traced, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> RunCreated:
        async with app_of("sqlite://", [support], Telemetry(Plain(traced.provider()))) as app:
            await app.run(support, "o-7", 500, id="r")
            created = journal(app, "r")[0].body
            assert isinstance(created, RunCreated)
            return created

    ids = RunTrace(run(main()))
    assert {span.trace for span in traced.spans} == {ids.trace_id}
    assert {span.parent for span in traced.spans} == {ids.run_span(0).span_id}
    assert "takes no ids" in caplog.text


@pytest.mark.parametrize(
    ("sampler", "trace"),
    [(ParentBased(TraceIdRatioBased(0.0)), None), (None, STARTER[:-1] + "0")],
    ids=["the sampler drops it", "the starter is not sampled"],
)
def test_a_trace_that_is_not_sampled_has_no_span_at_all(traced: Traced, sampler: Sampler | None, trace: str | None) -> None:
    async def main() -> Any:
        async with app_of("sqlite://", [parent, kid], traced.telemetry(sampler=sampler)) as app:
            return await app.run(parent, id="r", trace=trace)

    assert run(main())["traceparent"].endswith("-00")  # and the services that it calls know it
    assert traced.spans == []


def test_log_records_have_the_ids_of_the_trace_and_of_the_span(traced: Traced) -> None:
    records: list[logging.LogRecord] = []
    log = logging.getLogger("test.tracing")

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record)

    @tool(effect="idempotent")
    def speaking() -> None:
        log.info("in a tool")

    @agent(version="1")
    async def speaker(run: Run) -> None:
        log.info("in an agent")
        await speaking()

    async def main() -> None:
        async with app_of("sqlite://", [speaker], traced.telemetry()) as app:
            await app.run(speaker, id="r")
        async with app_of("sqlite://", [speaker], None) as app:
            await app.run(speaker, id="r")
            await app.run(speaker, id="s", trace=STARTER)

    handler = Kept()
    handler.addFilter(RunFilter())
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        run(main())
    finally:
        log.removeHandler(handler)
    (attempt,) = traced.named("execute_tool speaking")
    ids: list[tuple[Any, Any]] = [(getattr(one, "trace_id", 0), getattr(one, "span_id", 0)) for one in records]
    assert ids == [
        *((attempt.trace, None), (attempt.trace, attempt.id)),
        *((None, None), (None, None)),
        *((STARTER[3:35], None), (STARTER[3:35], STARTER[36:52])),
    ]


# -- turning it on ----------------------------------------------------------------------------------------------------
def test_without_telemetry_opentelemetry_is_not_imported(tmp_path: Path) -> None:
    code = f"""
import asyncio, sys
from perdure import Perdure, Run, agent
@agent(version="1")
async def nothing(run: Run) -> None: ...
async def main():
    async with Perdure("sqlite:///{tmp_path}/db", [nothing]) as app:
        await app.run(nothing, id="r")
asyncio.run(main())
print([name for name in sys.modules if name.startswith("opentelemetry")])
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


@pytest.mark.full
def test_without_the_api_of_opentelemetry_the_error_says_what_to_install() -> None:
    code = """
import sys
sys.modules["opentelemetry"] = None
from perdure import Perdure, Settings
try:
    Perdure("sqlite://", settings=Settings(telemetry="on"))
except Exception as error:
    print(type(error).__name__, error)
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said == "InvalidInput telemetry needs the API of OpenTelemetry: pip install 'perdure[otel]'\n"


def test_the_setting_turns_it_on() -> None:
    wanted = {level: Perdure("sqlite://", settings=Settings(telemetry=level)).telemetry for level in ("off", "on", "payloads")}
    assert wanted["off"] is None
    assert [found is not None and found.payloads for found in (wanted["on"], wanted["payloads"])] == [False, True]


def test_a_program_without_a_tracer_provider_is_told_so_once(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with app_of("sqlite://", [kid], Telemetry()) as app:
            await app.run(kid, id="r")
            await app.run(kid, id="s")

    run(main())
    assert caplog.text.count("no tracer provider is set") == 1


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Perdure("sqlite://", telemetry="on"), "Telemetry() of perdure.otel"),  # type: ignore[arg-type]
        (lambda: Telemetry("on"), "a TracerProvider of OpenTelemetry"),  # type: ignore[arg-type]
        (lambda: Telemetry(payloads="no"), "neither True nor False"),  # type: ignore[arg-type]
    ],
)
def test_a_wrong_value_is_refused(make: Callable[[], object], says: str) -> None:
    with pytest.raises(InvalidInput, match=says.replace("(", r"\(").replace(")", r"\)")):
        make()


@pytest.mark.full
def test_the_command_line_takes_the_trace_of_its_environment(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'db'}"
    for run_id, given in (("r", STARTER), ("s", "garbage")):
        command = [sys.executable, "-m", "perdure", "start", "support", "n=1", "--id", run_id, "--url", url]
        ran = subprocess.run(command, env={**os.environ, "TRACEPARENT": given}, cwd=tmp_path, capture_output=True, text=True, check=True)
        assert ("the traceparent 'garbage' is not valid" in ran.stderr) is (run_id == "s")

    async def main() -> list[Any]:
        async with app_of(url, [], None) as app:
            return [getattr(journal(app, run_id)[0].body, "trace", 0) for run_id in ("r", "s")]

    assert run(main()) == [TraceContext(STARTER), None]
