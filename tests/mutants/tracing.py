"""Mutants of spans: none is reported twice or before it is durable, none says too much, and none breaks a run."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

SPANS = "tests/unit/test_tracing.py::test_"
HEADERS = "tests/unit/test_trace_context.py::test_"

TRACING = (
    Mutant(
        name="a_replay_reports_spans",
        guard="events that are only read in a replay end no span that is reported",
        promise="operating",
        file="otel.py",
        where="RunSpans.read",
        old="        of_worker = kind is not RunClaimed and (kind not in _POST or self._held)\n",
        new="        of_worker = False\n",
        red=f"{SPANS}a_run_that_parks_again_and_again_reports_nothing_twice[sqlite-replayed]",
        store="sqlite",
    ),
    Mutant(
        name="post_that_a_dead_worker_has_committed_is_reported_again",
        guard="post that a worker has committed in an append was reported by that worker",
        promise="operating",
        file="otel.py",
        where="RunSpans.read",
        old="(kind not in _POST or self._held)",
        new="kind not in _POST",
        red=f"{SPANS}a_decision_that_a_dead_worker_has_committed_is_not_reported_by_the_next",
    ),
    Mutant(
        name="an_append_that_is_sent_again_reports_again",
        guard="spans are reported when their append is durable, not when it is sent",
        promise="operating",
        file="engine/local/drive.py",
        where="Drive._send",
        old="        host = self._host\n        if not host.commits_here or host.group.under_way:\n",
        new=(
            "        host = self._host\n"
            "        if self._spans is not None and host.telemetry is not None:\n"
            "            host.telemetry.committed(self._spans, [one.event for one in append.events], 0, 0)\n"
            "        if not host.commits_here or host.group.under_way:\n"
        ),
        red=f"{SPANS}an_append_that_is_sent_again_reports_its_spans_once[sqlite]",
        store="sqlite",
    ),
    Mutant(
        name="the_end_of_a_run_by_force_is_reported_by_the_next_worker_too",
        guard="the end of a run by force is reported by the process that ends the run, and by no worker",
        promise="operating",
        file="otel.py",
        where="_POST",
        old="        RunReopened,\n    )\n",
        new="        RunReopened,\n        RunCancelled,\n    )\n",
        red=f"{SPANS}the_process_that_ends_a_run_by_force_reports_its_end_and_no_other_does[sqlite]",
        store="sqlite",
    ),
    Mutant(
        name="payloads_are_in_spans_by_default",
        guard="arguments and results are in spans only if they are asked for",
        promise="security",
        file="otel.py",
        where="RunSpans._payload",
        old="        if not self._payloads or payload is None or payload.inline is None:\n",
        new="        if payload is None or payload.inline is None:\n",
        red=f"{SPANS}payloads_are_in_spans_only_if_they_are_wanted[False]",
        store="sqlite",
    ),
    Mutant(
        name="messages_of_exceptions_are_in_spans_by_default",
        guard="the message of an exception is in a span only if payloads are asked for",
        promise="security",
        file="otel.py",
        where="RunSpans._words",
        old='        return message[:_MOST_ERROR_CHARS] if self._payloads else ""\n',
        new="        return message[:_MOST_ERROR_CHARS]\n",
        red=f"{SPANS}each_attempt_is_a_span_and_a_failure_names_its_type_only",
        store="sqlite",
    ),
    Mutant(
        name="a_broken_exporter_breaks_the_run",
        guard="an exception of the SDK of OpenTelemetry is logged, and the run goes on",
        promise="operating",
        file="otel.py",
        where="Telemetry._report_all",
        old="                self._report(tracer, span)\n        except Exception:\n",
        new="                self._report(tracer, span)\n        except ImportError:\n",
        red=f"{SPANS}a_broken_exporter_breaks_no_run_and_is_logged_once",
        store="sqlite",
        says="NeedsAttention",
    ),
    Mutant(
        name="ids_of_spans_are_random",
        guard="ids of spans are derived from the run, so that every process has the same ones",
        promise="operating",
        file="otel.py",
        where="Telemetry._tracer",
        old="            tracer.id_generator = _DerivedIds(before)\n",
        new="            pass\n",
        red=f"{SPANS}a_run_is_one_trace_with_a_span_for_the_run_each_attempt_and_each_commit[sqlite]",
        store="sqlite",
    ),
    Mutant(
        name="a_traceparent_of_zeros_is_taken",
        guard="a traceparent that OpenTelemetry would not take is ignored",
        promise="operating",
        file="core/trace_context.py",
        where="span_context",
        old=" or not int(trace_id, 16) or not int(span_id, 16)",
        new="",
        red=f"{HEADERS}a_header_is_taken_exactly_if_opentelemetry_takes_it",
    ),
)
