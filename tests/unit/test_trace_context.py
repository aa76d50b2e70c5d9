"""Trace contexts: headers of other programs never break a start, and the ids of spans follow from the run."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from opentelemetry.trace import get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from tests.unit.drive_tools import run

from perdure import InvalidInput, Perdure, Run, agent
from perdure.core.codec import Payload, pack
from perdure.core.events import RunCreated, TraceContext, decode_body, encode_body
from perdure.core.trace_context import RunTrace, read_headers, span_context

GOOD = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
INPUT: Payload = pack(b"{}", 100)[0]


@agent(version="1")
async def nothing(run: Run) -> None: ...


def created(run_id: str = "r", **more: Any) -> RunCreated:
    return RunCreated(run_id, "a", "1", "default", INPUT, **more)


# -- headers ----------------------------------------------------------------------------------------------------------
_hex = st.text("0123456789abcdefABCDEFg", max_size=40)
_parent = st.one_of(
    st.text(max_size=80),
    st.builds("{}-{}-{}-{}".format, _hex, _hex, _hex, _hex),
    st.builds("-".join, st.lists(st.sampled_from(["00", "01", "ff", "0" * 32, "a" * 32, "0" * 16, "b" * 16, "", "\x00", " "]), max_size=7)),
    st.builds(lambda at, what: GOOD[:at] + what + GOOD[at + 1 :], st.integers(0, len(GOOD)), st.characters()),
)


@given(_parent, st.text(max_size=700))
@example(GOOD, "a=1")
@example(f" {GOOD}\t", "a=\x00")
@example(f"00-{'0' * 32}-{'b' * 16}-01", "")
@example(f"00-{'a' * 32}-{'0' * 16}-01", "")
@example("ff" + GOOD[2:], "")
@example(GOOD + "-more", "")
@example("01" + GOOD[2:] + "-more", "")
@example("01" + GOOD[2:] + "-" + "m" * 600, "")
@example(GOOD.upper(), "")
def test_a_header_is_taken_exactly_if_opentelemetry_takes_it(parent: str, state: str) -> None:
    """Its own propagator is the reference. What is recorded is valid, whatever came in."""
    assume(not parent.endswith("\n"))  # their pattern takes a newline at the end, and ours does not
    context, complaint = read_headers({"traceparent": parent, "tracestate": state}, "trace=")
    carrier = {"traceparent": parent.strip(" \t")}
    theirs = get_current_span(TraceContextTextMapPropagator().extract(carrier)).get_span_context()
    assert (context is None) is (not theirs.is_valid)
    if context is None:
        assert complaint is None if not parent else "is not valid and is ignored" in str(complaint)
        return
    found = span_context(context)
    assert found is not None
    assert (int(found.trace_id, 16), int(found.span_id, 16), found.flags) == (theirs.trace_id, theirs.span_id, theirs.trace_flags & 3)
    assert all(" " <= letter <= "~" for letter in context.parent + context.state)
    assert decode_body(encode_body(created(trace=context))) == created(trace=context)


@given(st.one_of(_parent, st.dictionaries(st.one_of(st.text(), st.just("traceparent")), st.one_of(st.none(), _parent, st.binary()))))
def test_no_headers_at_all_break_the_reading(headers: Any) -> None:
    context, _ = read_headers(headers, "trace=")
    assert context is None or span_context(context) is not None


@given(st.builds(TraceContext, _parent, st.text()))
def test_a_damaged_context_in_a_journal_breaks_no_run(context: TraceContext) -> None:
    found = RunTrace(created(trace=context))
    assert len(found.trace_id) == 32
    assert int(found.run_span(0).span_id, 16)


def test_a_bad_traceparent_is_ignored_with_one_line_and_the_run_starts(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> Any:
        async with Perdure("sqlite://", [nothing]) as app:
            await app.run(nothing, id="r", trace={"traceparent": "00-zz-1-2", "tracestate": "a=1"})
            return app.store.read("r")[0].body

    with caplog.at_level(logging.WARNING):
        assert run(main()).trace is None
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("run r: the traceparent '00-zz-1-2' is not valid and is ignored")


def test_a_newline_never_gets_into_a_header() -> None:
    for header in (GOOD + "\n", GOOD + "\nX-Evil: 1", "01" + GOOD[2:] + "-a\nX-Evil: 1"):
        assert read_headers(header, "trace=")[0] is None
    context, _ = read_headers({"traceparent": GOOD, "tracestate": "a=1\r\nX-Evil: 1"}, "trace=")
    assert context == TraceContext(GOOD)


@pytest.mark.parametrize("trace", [5, b"00-", ["traceparent"], object()])
def test_what_is_no_headers_is_refused(trace: Any) -> None:
    async def main() -> None:
        async with Perdure("sqlite://", [nothing]) as app:
            await app.run(nothing, id="r", trace=trace)

    with pytest.raises(InvalidInput, match=r"trace=.*: the headers of a request, or the text of a traceparent"):
        run(main())


def test_a_second_start_with_another_trace_is_the_same_run() -> None:
    """A client that sends its request again has another span; the run keeps the first."""

    async def main() -> Any:
        async with Perdure("sqlite://", [nothing]) as app:
            for trace in (GOOD, GOOD.replace("b7", "c8")):
                await app.start(nothing, id="r", trace=trace)
            return app.store.read("r")[0].body

    assert run(main()).trace == TraceContext(GOOD)


def test_a_run_without_a_trace_has_no_byte_for_it() -> None:
    assert b"trace" not in encode_body(created())


# -- ids --------------------------------------------------------------------------------------------------------------
def test_the_ids_of_a_run_are_the_same_in_every_process_and_release() -> None:
    """These values are fixed: a worker of the next release goes on in the same trace."""
    found = RunTrace(created("refund-o-81"))
    assert found.trace_id == "b93d664df28ff581ac87736fd06320d2"
    assert [found.run_span(0).span_id, found.run_span(1).span_id, found.attempt_span(3, 1).span_id] == [
        "982d557ddad7d13b",
        "ffbed75ad2903190",
        "1f53150c5662502a",
    ]


def test_other_runs_tenants_and_namespaces_have_other_ids() -> None:
    others = [created(), created("s"), created(key_namespace="shop"), RunCreated("r", "a", "1", "acme", INPUT)]
    assert len({RunTrace(one).trace_id for one in others}) == 4
    same_trace = [RunTrace(created(one, trace=TraceContext(GOOD))) for one in ("r", "s")]
    assert len({one.trace_id for one in same_trace}) == 1
    assert len({one.run_span(0).span_id for one in same_trace}) == 2


def test_a_child_without_a_recorded_context_is_below_its_parent() -> None:
    top, below = RunTrace(created()), RunTrace(created("r/1", parent="r", parent_call=1, depth=1))
    assert (below.trace_id, below.parent_id) == (top.trace_id, top.run_span(0).span_id)
