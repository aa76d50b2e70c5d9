"""Spans for OpenTelemetry, made of what is committed: `PERDURE_TELEMETRY=on`, or `Perdure(…, telemetry=Telemetry())`.

Needs `perdure[otel]`, which is the API of OpenTelemetry alone. The program starts the SDK and chooses where spans go.

A span is reported at its end, by the process that has committed the event that ends it. Its start is in the journal, so
that it may lie in another process. How no span is reported twice:

- `RunSpans` is a fold over the journal. In it, each span is ended by exactly one event.
- Each event is reported by at most one process. The events of an append are reported by the worker that has committed the
  append, after it has learned that they are durable. A worker that reads them in a replay reports nothing.
- Events that no worker has committed (a claim, or post to a run that was not held, such as a decision) are reported by
  the worker that claims the run next, with its first append. Whether it has made one can be seen in the journal. The end
  of a run by force is reported by the process that ends the run.

So a process that dies between a commit and its report loses these spans, and none is reported twice.

Ids are derived from the run (`RunTrace`). The API has no way to set the id of a span, but a tracer of the SDK asks its
`id_generator`. perdure replaces that of its own tracer; other tracers of the program keep theirs.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

from msgspec import Struct

from perdure.core.codec import Payload
from perdure.core.events import (
    ApprovalDecided,
    ApprovalEscalated,
    ApprovalExpired,
    ApprovalRequested,
    ApprovalVoted,
    ApprovalWithdrawn,
    BudgetRaised,
    CancelRequested,
    CheckpointTaken,
    ChildFinished,
    Event,
    Failure,
    FrameChanged,
    ModelCallInitiated,
    RunAdopted,
    RunCancelled,
    RunClaimed,
    RunCreated,
    RunFailed,
    RunForked,
    RunPaused,
    RunReleased,
    RunReopened,
    RunRequeued,
    RunSucceeded,
    RunUnpaused,
    SignalReceived,
    TimerFired,
    ToolCallCompleted,
    ToolCallFailed,
    ToolCallInDoubt,
    ToolCallInitiated,
    ToolCallProposed,
    ToolCallResolved,
    Usage,
)
from perdure.core.state import CallState, RunState, image_in
from perdure.core.steps import ParkedRun
from perdure.core.trace_context import KNOWN_FLAGS, SAMPLED, RunTrace, SpanContext
from perdure.errors import InvalidInput

try:
    from opentelemetry import context as otel_context
    from opentelemetry import trace as otel
    from opentelemetry.context import Context
except ImportError:
    raise InvalidInput("telemetry needs the API of OpenTelemetry: pip install 'perdure[otel]'") from None

log = logging.getLogger("perdure.otel")

# What can be posted to a run that no worker holds: these events are in a journal without an append of a worker.
_POST = frozenset(
    (
        *(ApprovalVoted, ApprovalDecided, ApprovalEscalated, ApprovalExpired, ApprovalWithdrawn, SignalReceived, ChildFinished),
        *(CancelRequested, RunPaused, RunUnpaused, RunRequeued, RunAdopted, FrameChanged, BudgetRaised, ToolCallResolved),
        RunReopened,
    )
)
_MOST_ERROR_CHARS = 500


class Span(Struct, frozen=True):
    """A span that has ended. Times are in microseconds since 1970."""

    name: str
    start: int
    end: int
    context: SpanContext
    parent: SpanContext | None
    attributes: dict[str, Any]
    error: str | None = None
    to_model: bool = False


class _Attempt(Struct, gc=False):
    """An attempt that has begun, and has no recorded end."""

    began: int
    number: int
    name: str
    of_model: bool
    effect: str
    args: Payload | None = None


# -- which spans events end -------------------------------------------------------------------------------------------
class RunSpans:
    """Which spans the events of one run end. Give it every event of the run, in order."""

    def __init__(self, created: RunCreated, created_at: int, *, payloads: bool = False, flags: int = SAMPLED) -> None:
        self.trace = RunTrace(created, flags)
        self._created = created
        self._payloads = payloads
        self._version = created.version
        self._life = 0  # how often people have reopened the run
        self._life_began = created_at
        self._of_run: tuple[int, SpanContext] | None = None  # the span of the run in this life: the parent of the others
        self._attempts: dict[int, _Attempt] = {}
        self._args: dict[int, Payload] = {}  # of calls that were proposed, and whose first attempt has not begun
        self._doubts: dict[int, tuple[int, str]] = {}
        self._asks: dict[int, tuple[int, ApprovalRequested]] = {}
        self._released: tuple[int, RunReleased] | None = None
        self._last = created_at
        self._seq = 0
        self._since = 0  # the seq before the first time in `_times`
        self._times = array("q")  # the times of the events since the run was last released
        self._held = False
        self._gap: list[Span] = []  # ended by events that no worker has committed

    @classmethod
    def of(cls, events: Sequence[Event], *, payloads: bool = False, flags: int = SAMPLED) -> RunSpans:
        """The spans of a run with this journal, from its beginning or from its last checkpoint on."""
        created = events[0].body
        assert isinstance(created, RunCreated)
        spans = cls(created, events[0].ts, payloads=payloads, flags=flags)
        for event in events:
            spans.read(event)
        return spans

    @classmethod
    def parked(cls, state: RunState, last: Event, events: Sequence[Event], *, payloads: bool = False, flags: int = SAMPLED) -> RunSpans:
        """The spans of a run that this worker has parked: `last` is its release, and `events` came after that."""
        assert state.created is not None
        assert isinstance(last.body, RunReleased)
        spans = cls(state.created, state.created_at, payloads=payloads, flags=flags)
        spans._version, spans._last = state.version, last.ts
        spans._seq = spans._since = last.seq
        spans._released = (last.ts, last.body)
        if state.reopened:
            spans._life, spans._life_began = state.reopened, state.reopened_at
        for call in state.open.values():
            spans._know(call)
        spans._asks = {number: (ask.asked_at, ask.request) for number, ask in state.pending.items()}
        for event in events:
            spans.read(event)
        return spans

    def read(self, event: Event) -> None:
        """An event that is in the journal, and that this process has not committed in an append of this run."""
        kind = type(event.body)
        # A worker reports what was written before its first append. Post to a run that is held is part of an append.
        of_worker = kind is not RunClaimed and (kind not in _POST or self._held)
        if of_worker:
            self._gap.clear()
        self._gap.extend(self._take(event, not of_worker))

    def committed(self, events: Sequence[Event]) -> list[Span]:
        """The spans to report: an append of this process with these events is durable."""
        ended, self._gap = self._gap, []
        for event in events:
            ended.extend(self._take(event, True))
        return ended

    def commit(self, events: Sequence[Event], start: int, end: int) -> Span:
        """The span of the commit of these events."""
        attributes = {"perdure.commit.events": len(events), "perdure.commit.first_seq": events[0].seq}
        return self._span("perdure.commit", start, end, ("commit", events[0].seq), attributes)

    def _take(self, event: Event, report: bool) -> Iterator[Span]:
        """Fold the event. Without `report`, no span is made: most events of a replay end a span that was reported before."""
        body, at, number = event.body, event.ts, event.call or 0
        if event.seq != self._seq + 1 and isinstance(body, CheckpointTaken):
            self._restore(body, event.seq)
        self._seq, before, self._last = event.seq, self._last, at
        self._times.append(at)
        ended: Span | None = None
        match body:
            case ToolCallInitiated():
                lost = self._attempts.get(number)
                args = body.args if self._payloads else None
                self._attempts[number] = _Attempt(
                    at, body.attempt, body.tool, isinstance(body, ModelCallInitiated), body.effect, args or self._args.pop(number, None)
                )
                self._doubts.pop(number, None)
                if lost is not None and report:
                    ended = self._attempt(lost, number, at, "lost", error="LostWithWorker", says="its worker died before its end was known")
            case ToolCallProposed():
                if self._payloads:
                    self._args[number] = body.args
            case ToolCallCompleted() | ToolCallFailed():
                done = self._attempts.pop(number, None)
                self._doubts.pop(number, None)
                if done is not None and report:
                    ended = self._completed(done, number, at, body)
            case ToolCallInDoubt():
                done = self._attempts.pop(number, None)
                if done is not None:
                    self._doubts[number] = (at, done.name)
                    if report:
                        ended = self._attempt(done, number, at, "in_doubt", usage=body.usage, error="InDoubt", says=body.why)
            case ToolCallResolved():
                done, doubt = self._attempts.pop(number, None), self._doubts.pop(number, None)
                if report and done is not None:
                    ended = self._attempt(done, number, at, body.outcome, usage=body.usage, failure=body.failure, result=body.result)
                elif report and doubt is not None:
                    since, name = doubt
                    attributes = {"gen_ai.tool.name": name, "perdure.call": number, "perdure.outcome": body.outcome}
                    ended = self._span("perdure.doubt", since, at, ("doubt", number, event.seq), attributes)
            case ApprovalRequested():
                self._asks[number] = (at, body)
            case ApprovalDecided():
                ended = self._asked(number, at, "granted" if body.granted else "rejected", body.by)
            case ApprovalExpired():
                ended = self._asked(number, at, "expired")
            case ApprovalWithdrawn():
                ended = self._asked(number, at, "withdrawn")
            case TimerFired():
                # If the run was released meanwhile, the wait is the time until its next claim, which is a span already.
                if report and event.cause is not None and self._since < event.cause:
                    start = self._times[event.cause - self._since - 1]
                    attributes = {"perdure.wait.for": "timer"}
                    ended = self._span("perdure.wait", start, at, ("timer", event.seq), attributes)
            case RunReleased():
                self._held, self._released = False, (at, body)
                self._since, self._times = event.seq, array("q")
            case RunClaimed():
                self._held, released, self._released = True, self._released, None
                self._version = body.version or self._version
                if report:
                    ended = self._claimed(event, body, released, before)
            case RunReopened():
                withdrawn = [self._asked(one, at, "withdrawn") for one in body.withdrawn]
                if report:
                    yield from (one for one in withdrawn if one is not None)
                self._life, self._life_began = self._life + 1, at
            case RunAdopted() | FrameChanged():
                self._version = body.version
            case RunForked():
                # What is open in the run that was forked never ends here.
                self._held, self._released = False, None
                self._attempts, self._doubts, self._asks, self._args = {}, {}, {}, {}
                self._life_began = at
            case RunSucceeded() | RunFailed() | RunCancelled():
                self._held = False
                if report:
                    ended = self._run(body, at)
            case _:
                pass
        if ended is not None and report:
            yield ended

    def _restore(self, body: CheckpointTaken, seq: int) -> None:
        """The events before the checkpoint were not read. Its image has what is still open."""
        image = image_in(body)
        self._version, self._held, self._released = image.version, image.worker is not None, None
        self._since, self._times = seq - 1, array("q")
        if image.reopened:
            self._life, self._life_began = image.reopened, image.reopened_at
        for call in image.calls:
            if call.number in image.open:
                self._know(call)
        self._asks = {ask.number: (ask.asked_at, ask.request) for ask in image.asks if ask.pending}

    def _know(self, call: CallState) -> None:
        if call.phase == "started":
            args = call.args if self._payloads else None
            self._attempts[call.number] = _Attempt(call.started_at, call.attempt, call.tool, call.of_model, call.effect, args)
        elif call.phase == "in_doubt":
            self._doubts[call.number] = (call.last_ts, call.tool)

    # -- one span each ------------------------------------------------------------------------------------------------
    def _span(
        self, name: str, start: int, end: int, key: tuple[Any, ...], attributes: dict[str, Any], error: str | None = None, **more: Any
    ) -> Span:
        created = self._created
        known = {"perdure.run.id": created.run_id, "gen_ai.agent.name": created.agent, "perdure.tenant": created.tenant}
        if self._of_run is None or self._of_run[0] != self._life:
            self._of_run = (self._life, self.trace.run_span(self._life))
        # The clock may have been set back in between: no span ends before it begins.
        return Span(name, min(start, end), end, self.trace.span(*key), self._of_run[1], known | attributes, error, **more)

    def _completed(self, done: _Attempt, number: int, at: int, body: ToolCallCompleted | ToolCallFailed) -> Span:
        if isinstance(body, ToolCallFailed):
            return self._attempt(done, number, at, "failed", usage=body.usage, failure=body.failure)
        return self._attempt(done, number, at, "completed", usage=body.usage, failure=body.failure, result=body.result)

    def _attempt(
        self,
        done: _Attempt,
        number: int,
        at: int,
        outcome: str,
        *,
        usage: Usage | None = None,
        failure: Failure | None = None,
        result: Payload | None = None,
        error: str | None = None,
        says: str = "",
    ) -> Span:
        attributes: dict[str, Any] = {"perdure.call": number, "perdure.attempt": done.number, "perdure.outcome": outcome}
        if done.of_model:
            name = f"chat {done.name}"
            attributes |= {"gen_ai.operation.name": "chat", "gen_ai.request.model": done.name}
        else:
            name = f"execute_tool {done.name}"
            attributes |= {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": done.name, "gen_ai.tool.type": "function"}
            attributes |= {"gen_ai.tool.call.id": f"{self._created.run_id}#{number}", "perdure.effect": done.effect}
        attributes |= _used(usage)
        if failure is not None:
            error, says = failure.type, failure.message
        if error is not None:
            attributes["error.type"] = error
        asked, answered = (
            ("perdure.model.request", "perdure.model.answer")
            if done.of_model
            else ("gen_ai.tool.call.arguments", "gen_ai.tool.call.result")
        )
        attributes |= self._payload(asked, done.args) | self._payload(answered, result)
        key = ("attempt", number, done.number)
        return self._span(name, done.began, at, key, attributes, None if error is None else self._words(says), to_model=done.of_model)

    def _asked(self, number: int, at: int, outcome: str, by: str | None = None) -> Span | None:
        since, request = self._asks.pop(number, (0, None))
        if request is None:
            return None
        attributes: dict[str, Any] = {"perdure.approval.id": request.approval, "perdure.approval.action": request.action}
        attributes |= {"perdure.approval.outcome": outcome, "perdure.call": number}
        if by is not None and self._payloads:
            attributes["perdure.approval.by"] = by
        # A call that is made again after `run_reopened` may be asked about again: the time tells the requests apart.
        return self._span(f"perdure.approval {request.action}", since, at, ("approval", number, since), attributes)

    def _claimed(self, event: Event, body: RunClaimed, released: tuple[int, RunReleased] | None, before: int) -> Span | None:
        if body.takeover:
            attributes = {"perdure.takeover.epoch": event.epoch, "perdure.takeover.proven_dead": body.proven_dead}
            return self._span("perdure.takeover", before, event.ts, ("takeover", event.seq), attributes)
        if released is None:
            return None
        since, release = released
        waited = {"perdure.wait.for": release.waiting_for[:200], "perdure.wait.status": release.status}
        return self._span("perdure.wait", since, event.ts, ("wait", event.seq), waited)

    def _run(self, end: RunSucceeded | RunFailed | RunCancelled, at: int) -> Span:
        created = self._created
        attributes: dict[str, Any] = {"gen_ai.operation.name": "invoke_agent", "perdure.queue": created.queue}
        if self._version:
            attributes["gen_ai.agent.version"] = self._version
        if created.parent is not None:
            attributes["perdure.parent.run.id"] = created.parent
        if self._life:
            attributes["perdure.reopened"] = self._life
        if created.schedule is not None:
            attributes["perdure.schedule"] = created.schedule
        attributes |= self._payload("perdure.run.input", created.input)
        error: str | None = None
        match end:
            case RunSucceeded():
                attributes |= {"perdure.status": "succeeded"} | self._payload("perdure.run.output", end.output)
            case RunFailed():
                attributes |= {"perdure.status": "failed", "error.type": end.failure.type}
                error = self._words(end.failure.message)
            case RunCancelled():
                attributes["perdure.status"] = "cancelled"
        trace = self.trace
        parent = trace.started_by
        if parent is None and trace.parent_id is not None:
            parent = SpanContext(trace.trace_id, trace.parent_id, trace.flags, trace.state)
        span = self._span(f"invoke_agent {created.agent}", self._life_began, at, ("run", self._life), attributes, error)
        return Span(span.name, span.start, span.end, span.context, parent, span.attributes, span.error)

    def _payload(self, name: str, payload: Payload | None) -> dict[str, str]:
        """The payload as an attribute, if payloads are wanted. A payload that is stored as a blob is left out."""
        if not self._payloads or payload is None or payload.inline is None:
            return {}
        return {name: payload.inline.decode("utf-8", "replace")}

    def _words(self, message: str) -> str:
        # The message of an exception may hold what a service has answered: it is a payload too.
        return message[:_MOST_ERROR_CHARS] if self._payloads else ""


def _used(usage: Usage | None) -> dict[str, Any]:
    if usage is None:
        return {}
    found: dict[str, Any] = {}
    if usage.tokens_in or usage.tokens_out:
        found = {"gen_ai.usage.input_tokens": usage.tokens_in, "gen_ai.usage.output_tokens": usage.tokens_out}
    if usage.tokens_cached:
        found["gen_ai.usage.cache_read.input_tokens"] = usage.tokens_cached
    if usage.usd_micros:
        found["perdure.usage.usd"] = usage.usd_micros / 1e6
    if usage.model:
        found["gen_ai.response.model"] = usage.model
    return found


# -- reporting --------------------------------------------------------------------------------------------------------
_wanted: ContextVar[SpanContext | None] = ContextVar("perdure_wanted_span", default=None)


class _DerivedIds:
    """The id generator of perdure's tracer: the ids of the span that is about to be made."""

    def __init__(self, before: Any) -> None:
        self._before = before

    def generate_trace_id(self) -> int:
        span = _wanted.get()
        return self._before.generate_trace_id() if span is None else int(span.trace_id, 16)

    def generate_span_id(self) -> int:
        span = _wanted.get()
        return self._before.generate_span_id() if span is None else int(span.span_id, 16)

    def is_trace_id_random(self) -> bool:
        return False


def enter(call: Any) -> Callable[[], None]:
    """Make the span of the call's attempt the current one, for instrumented clients. Returns what undoes that."""
    if call.span is None:
        return lambda: None
    token = otel_context.attach(_context(call.span, remote=False))
    return lambda: otel_context.detach(token)


class Telemetry:
    """Reports the spans of runs to OpenTelemetry: `Perdure(url, agents, telemetry=Telemetry())`.

    Without `provider`, the spans go to the program's own tracer provider (`opentelemetry.trace.set_tracer_provider`).
    With `payloads`, spans have the arguments and results of calls, the input and the output of runs, the messages of
    errors, and the names of people who have decided.
    """

    def __init__(self, provider: otel.TracerProvider | None = None, *, payloads: bool = False) -> None:
        if not isinstance(payloads, bool):
            raise InvalidInput(f"Telemetry(payloads={payloads!r:.80}): neither True nor False")
        if provider is not None and not isinstance(provider, otel.TracerProvider):
            raise InvalidInput(
                f"Telemetry({provider!r:.80}): a TracerProvider of OpenTelemetry, or nothing for the one that is set globally"
            )
        self.payloads = payloads
        self._provider = provider
        self._resolved: tuple[Any, otel.Tracer] | None = None
        self._providers: dict[str, str] = {}  # model → the provider's name
        self._has_failed = False

    # -- for drives, on the loop's thread -----------------------------------------------------------------------------
    def spans_of(self, events: Sequence[Event], parked: ParkedRun | None = None) -> RunSpans | None:
        """The spans of a run whose journal was read. With `parked`, only the events after its release were read.

        None: they cannot be found. That is logged, and the run goes on without spans.
        """
        try:
            if parked is not None:
                assert parked.state.created is not None
                return RunSpans.parked(parked.state, parked.last, events, payloads=self.payloads, flags=self._flags(parked.state.created))
            created = events[0].body
            assert isinstance(created, RunCreated)
            return RunSpans.of(events, payloads=self.payloads, flags=self._flags(created))
        except Exception:
            self._complain()
            return None

    def committed(self, spans: RunSpans, events: Sequence[Event], start: int, end: int) -> None:
        """Report what these events have ended. Their commit began at `start` and was known to be durable at `end`."""
        self._report_all(lambda: [*spans.committed(events), spans.commit(events, start, end)])

    def ended_by_force(self, events: Sequence[Event]) -> None:
        """Report the end of a run that this process has ended. `events` is its whole journal."""
        spans = self.spans_of(events[:-1])
        if spans is not None:
            self._report_all(lambda: spans.committed(events[-1:]))

    enter = staticmethod(enter)

    def begins(self, tool: Any) -> None:
        """An attempt of this tool or request begins here: learn who provides the model."""
        model = getattr(tool, "model", None)
        if model is not None and (provider := getattr(model, "provider", "")):
            self._providers[tool.name] = provider

    def _report_all(self, find: Callable[[], Sequence[Span]]) -> None:
        """Report these spans. Whatever fails, here or in the SDK, is logged, and the run goes on."""
        try:
            tracer = self._tracer()
            for span in find():
                self._report(tracer, span)
        except Exception:
            self._complain()

    def _complain(self) -> None:
        level = logging.DEBUG if self._has_failed else logging.ERROR
        self._has_failed = True
        log.log(level, "spans cannot be reported; the runs go on, and further failures are logged at level DEBUG", exc_info=True)

    def _report(self, tracer: otel.Tracer, span: Span) -> None:
        attributes = span.attributes
        if span.to_model and (provider := self._providers.get(attributes["gen_ai.request.model"])):
            attributes = attributes | {"gen_ai.provider.name": provider}
        parent = span.parent
        if parent is None and not isinstance(getattr(tracer, "id_generator", None), _DerivedIds):
            # The tracer takes no ids. Then the id of the trace comes from a parent, which is itself not reported.
            parent = span.context
        token = _wanted.set(span.context)
        try:
            made = tracer.start_span(
                span.name,
                context=Context() if parent is None else _context(parent),
                kind=otel.SpanKind.CLIENT if span.to_model else otel.SpanKind.INTERNAL,
                attributes=attributes,
                start_time=span.start * 1_000,
            )
        finally:
            _wanted.reset(token)
        if span.error is not None:
            made.set_status(otel.Status(otel.StatusCode.ERROR, span.error or None))
        made.end(end_time=span.end * 1_000)

    def _tracer(self) -> otel.Tracer:
        """perdure's own tracer. Its ids are derived from the runs, if it is a tracer of the SDK."""
        provider = self._provider or otel.get_tracer_provider()
        if self._resolved is not None and self._resolved[0] is provider:
            return self._resolved[1]
        tracer: Any = provider.get_tracer("perdure")
        before = getattr(tracer, "id_generator", None)
        if before is not None and not isinstance(before, _DerivedIds):
            tracer.id_generator = _DerivedIds(before)
        elif isinstance(provider, otel.ProxyTracerProvider):
            log.warning(
                "telemetry is on, and no tracer provider is set: spans go nowhere; start the SDK of OpenTelemetry first, "
                "such as with `perdure worker --setup FILE.py:FUNCTION`"
            )
        elif before is None and not isinstance(tracer, otel.NoOpTracer):
            log.warning(
                "the tracer provider %s takes no ids: the spans of a run have a parent that is not in the trace", type(provider).__name__
            )
        self._resolved = (provider, tracer)
        return tracer  # type: ignore[no-any-return]

    def _flags(self, created: RunCreated) -> int:
        """Is a run sampled that was not started inside a trace? Asks the sampler, as for the first span of a trace.

        The answer of a sampler that looks at the id of the trace is the same in every process.
        """
        if created.trace is not None:
            return SAMPLED
        try:
            sampler = getattr(self._tracer(), "sampler", None)
            if sampler is None:
                return SAMPLED
            trace_id = int(RunTrace(created).trace_id, 16)
            answer = sampler.should_sample(Context(), trace_id, f"invoke_agent {created.agent}", otel.SpanKind.INTERNAL, {}, ())
            return SAMPLED if answer.decision.is_sampled() else 0
        except Exception:
            log.debug("the sampler cannot be asked", exc_info=True)
            return SAMPLED


def current_span() -> SpanContext | None:
    """The span that is current now; None: there is none."""
    found = otel.get_current_span().get_span_context()
    if not found.is_valid:
        return None
    trace_id, span_id = otel.format_trace_id(found.trace_id), otel.format_span_id(found.span_id)
    return SpanContext(trace_id, span_id, found.trace_flags & KNOWN_FLAGS, found.trace_state.to_header())


def _context(span: SpanContext, *, remote: bool = True) -> Context:
    state = otel.TraceState.from_header([span.state]) if span.state else None
    flags = otel.TraceFlags(span.flags)
    found = otel.SpanContext(int(span.trace_id, 16), int(span.span_id, 16), remote, flags, state)
    return otel.set_span_in_context(otel.NonRecordingSpan(found), Context())
