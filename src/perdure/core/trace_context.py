"""Trace contexts: which trace of OpenTelemetry a run belongs to, and the ids of its spans.

Everything here is pure, and needs no OpenTelemetry. The ids are derived from the run. So every process that drives the
run, now or after a crash, finds the same ids, and no id has to be stored.

A trace context crosses processes as two HTTP headers (W3C Trace Context): `traceparent` has the ids of the trace and of
a span, and `tracestate` has what vendors add.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from perdure.core import codec
from perdure.core.events import RunCreated, TraceContext
from perdure.core.identity import derived
from perdure.errors import InvalidInput

SAMPLED = 1
KNOWN_FLAGS = 3  # sampled, and: the id of the trace is random
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_TRACESTATE = re.compile(r"[\x20-\x7e]{0,512}")
_LONGEST = 512


class SpanContext(Struct, frozen=True, gc=False):
    """One span of a trace: what the headers of a request say."""

    trace_id: str  # 32 hexadecimal digits
    span_id: str  # 16 hexadecimal digits
    flags: int = SAMPLED
    state: str = ""

    @property
    def recorded(self) -> TraceContext:
        """The same, as a journal holds it."""
        return TraceContext(f"00-{self.trace_id}-{self.span_id}-{self.flags:02x}", self.state)

    @property
    def headers(self) -> dict[str, str]:
        context = self.recorded
        return {"traceparent": context.parent} | ({"tracestate": context.state} if context.state else {})


class RunTrace:
    """The trace of one run: its id, the span that has started the run, and the ids of the run's own spans.

    A run that was started inside a trace belongs to that trace. Any other run has a trace of its own, together with its
    children, and its id follows from the id of the topmost run and the journal's `key_namespace`.
    """

    def __init__(self, created: RunCreated, flags: int = SAMPLED) -> None:
        self._run_id = created.run_id
        self.started_by = None if created.trace is None else span_context(created.trace)
        if self.started_by is not None:
            self.trace_id, self.flags, self.state = self.started_by.trace_id, self.started_by.flags, self.started_by.state
        else:
            root = created.run_id.partition("/")[0]
            self.trace_id = derived("perdure-trace-1", created.key_namespace, created.tenant, root)[:32]
            self.flags, self.state = flags, ""
        below = created.parent is not None and self.started_by is None
        # The run was started by a worker that recorded no trace context. It belongs below its parent all the same.
        self.parent_id = _span_id(self.trace_id, str(created.parent), "run", 0) if below else None

    def span_id(self, kind: str, *which: int) -> str:
        """The id of a span: the same in every process. `which` are the numbers of a call and an attempt, for example."""
        return _span_id(self.trace_id, self._run_id, kind, *which)

    def span(self, kind: str, *which: int) -> SpanContext:
        return SpanContext(self.trace_id, self.span_id(kind, *which), self.flags, self.state)

    def run_span(self, reopened: int) -> SpanContext:
        """The span of the run itself. A run that a person has reopened has one span for each time."""
        return self.span("run", reopened)

    def attempt_span(self, call: int, attempt: int) -> SpanContext:
        return self.span("attempt", call, attempt)


def _span_id(trace_id: str, run_id: str, kind: str, *which: int) -> str:
    return derived("perdure-span-1", trace_id, run_id, kind, *map(str, which))[:16]


def span_context(context: TraceContext) -> SpanContext | None:
    """The span that the context names; None if it names none. A journal may come from another program: nothing is raised."""
    found = _TRACEPARENT.fullmatch(context.parent) if len(context.parent) <= _LONGEST else None
    if found is None:
        return None
    version, trace_id, span_id, flags, rest = found.groups()
    # Version ff is forbidden, and version 00 has exactly four parts. Later versions may add parts at the end.
    if version == "ff" or (version == "00" and rest is not None) or not int(trace_id, 16) or not int(span_id, 16):
        return None
    state = context.state if _TRACESTATE.fullmatch(context.state) else ""
    return SpanContext(trace_id, span_id, int(flags, 16) & KNOWN_FLAGS, state)


def read_headers(headers: Mapping[str, str] | str, what: str) -> tuple[TraceContext | None, str | None]:
    """The trace context in these headers (or in this traceparent), and a complaint about a header that cannot be used.

    Headers come from other programs, so a wrong header is ignored, as W3C demands. InvalidInput if it is no headers at all.
    """
    if isinstance(headers, str):
        parent, state = headers, ""
    elif isinstance(headers, Mapping):
        parent, state = _header(headers, "traceparent"), _header(headers, "tracestate")
    else:
        raise InvalidInput(f"{what}{codec.shown(headers)}: the headers of a request, or the text of a traceparent")
    if not parent:
        return None, None
    found = span_context(TraceContext(parent.strip(" \t"), state.strip(" \t")))
    if found is None:
        return None, f"the traceparent {codec.shown(parent)} is not valid and is ignored: 00-, 32 digits, 16 digits, 2 digits (0-9 a-f)"
    return found.recorded, None


def _header(headers: Mapping[Any, Any], name: str) -> str:
    for key, value in headers.items():
        if isinstance(key, str) and key.lower() == name:
            return value if isinstance(value, str) else ""
    return ""
