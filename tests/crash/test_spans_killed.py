"""A worker with telemetry is killed with SIGKILL, and another goes on: one trace, no span twice, and few are missing."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.servers.collector import Collector
from tests.servers.postgres import Server
from tests.unit.postgres_tools import empty

from perdure.core.events import Event, RunCreated
from perdure.otel import RunSpans, Span
from perdure.store.open import open_store

POINTS = [
    *(("before", str(number)) for number in (1, 2, 4, 6)),
    *(("after", str(number)) for number in (1, 3, 5)),
    *(("inside", name) for name in ("first", "in the child", "right")),
]
ON_POSTGRES = POINTS[1], POINTS[5], POINTS[8]


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as opened:
        yield opened


@pytest.fixture
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'db'}"
    server: Server = request.getfixturevalue("postgres")
    return empty(server)


@pytest.mark.parametrize(
    ("url", "point"),
    [*(("sqlite", point) for point in POINTS), *(("postgres", point) for point in ON_POSTGRES)],
    indirect=["url"],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_a_killed_worker_and_the_next_one_report_one_trace(url: str, point: tuple[str, str], collector: Collector) -> None:
    assert _work(url, collector, "first", *point) == -signal.SIGKILL
    assert _work(url, collector, "second") == 0
    store = open_store(url)
    try:
        journals = {run_id: store.read(run_id) for run_id in ("r", "r/2")}
    finally:
        store.close()
    received = collector.spans
    assert [one for one, times in Counter(span.id for span in received).items() if times > 1] == []
    assert len({span.trace for span in received}) == 1
    expected = {span.context.span_id: span.name for events in journals.values() for span in _ended(events)}
    reported = {span.id: span.name for span in received if span.name != "perdure.commit"}
    assert reported.items() <= expected.items()
    missing = [name for one, name in expected.items() if one not in reported]
    if point[0] == "before":
        assert len(missing) <= 2  # what the last append of the killed worker has ended
    else:
        assert missing == []
    assert {span.service for span in received if span.name == "invoke_agent errand"} == {"second"}
    taken_over = any(getattr(event.body, "takeover", False) for events in journals.values() for event in events)
    assert ("perdure.takeover" in reported.values()) is taken_over
    assert taken_over or point[0] != "inside"  # a worker that dies after a release held nothing
    # The services that the tools called know the attempts by the same ids.
    asked = {name: text for name, text in _headers(journals["r"]).items() if name in reported}
    assert all(text == f"00-{received[0].trace}-{name}-01" for name, text in asked.items())
    assert len(asked) >= 2


def _work(url: str, collector: Collector, *more: str) -> int:
    command = [sys.executable, "-m", "tests.crash.traced", url, collector.endpoint, *more]
    return subprocess.run(command, timeout=60, check=False, stderr=subprocess.DEVNULL).returncode


def _ended(events: list[Event]) -> list[Span]:
    created = events[0].body
    assert isinstance(created, RunCreated)
    return RunSpans(created, events[0].ts).committed(events)


def _headers(events: list[Event]) -> dict[str, str]:
    """What the calls of the run returned, by the id of the span in it."""
    results = [getattr(event.body, "result", None) for event in events if event.type == "tool_call_completed"]
    texts = [result.inline.decode().strip('"') for result in results if result is not None]
    return {text.split("-")[2]: text for text in texts}
