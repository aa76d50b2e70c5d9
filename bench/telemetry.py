"""What spans cost: the same work with telemetry off and on. Alone: `.venv/bin/python bench/telemetry.py`.

CPU time counts, because it varies less than wall time on a shared machine. With telemetry on, the SDK of OpenTelemetry
makes the spans and hands them to a batch processor, whose exporter encodes them for OTLP and drops the bytes.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import agents
import here
import litter
from figures import Figure, Sample
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from perdure import Perdure
from perdure.otel import Telemetry

ROUNDS, RUNS, CALLS = 5, 50, 20


class _Nowhere(SpanExporter):
    """Encodes the spans, and sends them nowhere."""

    def __init__(self) -> None:
        self.spans = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        encode_spans(spans).SerializeToString()
        self.spans += len(spans)
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        pass


async def _work(url: str, telemetry: Telemetry | None) -> float:
    async with Perdure(url, [agents.steps], telemetry=telemetry) as app:
        begun_s = time.process_time()
        await asyncio.gather(*(app.run(agents.steps, CALLS, id=f"r{number}") for number in range(RUNS)))
        return time.process_time() - begun_s


def _off(folder: Path) -> float:
    litter.collect()
    return asyncio.run(_work(here.url_of(here.new_path(folder)), None))


def _on(folder: Path) -> tuple[float, int]:
    litter.collect()
    exporter = _Nowhere()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter, max_queue_size=100_000))
    begun_s = asyncio.run(_work(here.url_of(here.new_path(folder)), Telemetry(provider)))
    flushing_s = time.process_time()
    provider.shutdown()
    return begun_s + time.process_time() - flushing_s, exporter.spans


def on_and_off(folder: Path) -> list[Figure]:
    """50 runs of 20 calls with telemetry off and on: the CPU time of a call with its commit."""
    _on(folder)  # the first round pays for imports
    off: list[float] = []
    again: list[float] = []
    on: list[float] = []
    spans = 0
    for _ in range(ROUNDS):
        off.append(_off(folder))
        took_s, spans = _on(folder)
        on.append(took_s)
        again.append(_off(folder))
    calls = RUNS * CALLS
    each, noise = Sample.of([1e6 * one / calls for one in off]), Sample.of(again).over(Sample.of(off))
    note = f"the same work twice differs by {abs(noise.median - 1):.0%}; nothing of OpenTelemetry is imported, and no call asks for it"
    per_span = (Sample.of(on).median - Sample.of(off).median) / max(spans, 1) * 1e6
    return [
        Figure("telemetry off: CPU time of a call", each, "µs", note=note),
        Figure(
            "telemetry on, compared with off",
            Sample.of(on).over(Sample.of(off)),
            "×",
            note=f"{spans / calls:.1f} spans for a call, {per_span:.0f} µs for a span, with the SDK and the encoding",
        ),
    ]


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="scratch-", dir=Path(__file__).resolve().with_name("results")) as folder:
        for figure in on_and_off(Path(folder)):
            print(f"{figure.name}: {figure.sample.median:.2f} {figure.unit} ({figure.note})")


if __name__ == "__main__":
    main()
