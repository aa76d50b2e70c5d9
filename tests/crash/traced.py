"""A worker with telemetry, in a process of its own, which may kill itself at a point that the test names.

python -m tests.crash.traced URL ENDPOINT SERVICE [before NUMBER | after NUMBER | inside NAME]

`before` and `after`: SIGKILL when the append with this number is durable, before or after its spans are reported.
`inside`: in the first attempt of the call with this name. Spans leave the process at once.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

from perdure import Call, Perdure, Run, Settings, agent, tool
from perdure.otel import Telemetry

DIES_IN = ""


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@tool(effect="keyed", timeout=5)
async def step(name: str, call: Call) -> str:
    if name == DIES_IN and call.attempt == 1:
        die()
    return call.headers["traceparent"]


@agent(version="1")
async def quote(run: Run) -> str:
    return await step("in the child")


@agent(version="1")
async def errand(run: Run) -> list[str]:
    said = [await step("first")]
    await asyncio.sleep(0.01)
    said.append(await quote())
    said += await asyncio.gather(step("left"), step("right"))
    return said


class Dying(Telemetry):
    def __init__(self, provider: TracerProvider, moment: str, number: int) -> None:
        super().__init__(provider)
        self._moment, self._left = moment, number

    def committed(self, spans: Any, events: Sequence[Any], start: int, end: int) -> None:
        self._left -= 1
        if self._moment == "before" and self._left == 0:
            die()
        super().committed(spans, events, start, end)
        if self._moment == "after" and self._left == 0:
            die()


async def main(url: str, telemetry: Telemetry) -> None:
    settings = Settings(park_after_s=0, poll_s=0.01, lease_s=2.0, reconcile_margin_s=0)
    async with Perdure(url, [errand, quote], settings=settings, telemetry=telemetry) as app:
        handle, stop = await app.start(errand, id="r"), asyncio.Event()
        working = asyncio.create_task(app.work(stop=stop))
        await handle.result()
        stop.set()
        await working


if __name__ == "__main__":
    where, endpoint, service, *point = sys.argv[1:]
    moment, what = (point[0], point[1]) if point else ("", "0")
    DIES_IN = what if moment == "inside" else ""
    exporting = TracerProvider(resource=Resource({"service.name": service}), shutdown_on_exit=False)
    exporting.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter(endpoint)))
    asyncio.run(main(where, Dying(exporting, moment, 0 if moment == "inside" else int(what))))
