"""Metrics of a worker, in the text format of Prometheus and in OpenMetrics; and a small HTTP server for them.

    async with Perdure(agents=[support]) as app:
        with MetricsServer(app, "127.0.0.1:9464"):      # /metrics, /livez, /readyz
            await app.work()

`FAMILIES` is the one list of all metrics. There are two kinds of figures. Counters belong to this process, and begin at
zero with it. The figures of the database are the same in every worker; they are read with grouped queries, at most once
in FRESH_S seconds, however many programs ask.

The server has threads of its own, because /livez must answer while the event loop is stuck.
"""

from __future__ import annotations

import asyncio
import logging
import os
import platform
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Generic, Literal, NamedTuple, Self, TypeVar

from msgspec import Struct

from perdure.app import Perdure
from perdure.core.codec import shown
from perdure.core.failures import describe
from perdure.engine.api import Activity
from perdure.engine.counts import Counter, Histogram, Key
from perdure.errors import InvalidInput, StoreError, StoreUnavailable
from perdure.settings import Settings
from perdure.store.api import StoreFigures, WorkerRow

T = TypeVar("T")
log = logging.getLogger("perdure.metrics")
FRESH_S = 10.0  # for so long the figures of the database are not read again
READY_S = 2.0  # how long the database may take to answer before the worker is not ready
_FIGURES_S = 5.0  # how long a scrape waits for the figures of the database
_PULSE_S = 0.5
_MOST_REQUESTS = 16  # at a time; further ones are refused at once
_MOST_BYTES = 8192  # of a request
_REQUEST_S = 10.0  # how long a request and its answer may take
TEXT = "text/plain; version=0.0.4; charset=utf-8"
OPEN_METRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"


# -- what there is to show --------------------------------------------------------------------------------------------
class Database(Struct, frozen=True):
    """The figures of the database, at one time."""

    figures: StoreFigures
    workers: Sequence[WorkerRow]
    now: int  # by the clock of the app, in microseconds


class Snapshot(Struct, frozen=True):
    """Everything from which the metrics are made."""

    app: Perdure
    activity: Activity
    database: Database | None  # None: the database has not answered
    ready: bool | None = None  # None: the caller has no such question
    stuck_s: float | None = None  # how long the event loop has not turned; None: it is not watched

    def bounded(self, rows: Iterable[tuple[Key, float]], labels: Key, merge: Callable[[float, float], float]) -> dict[Key, float]:
        """The rows with bounded labels: rows that have the same labels then are merged."""
        found: dict[Key, float] = {}
        for values, number in rows:
            key = self.activity.counts.seen.bounded(labels, values)
            found[key] = merge(found[key], number) if key in found else number
        return found

    def age_s(self, since: int) -> float:
        assert self.database is not None
        return max(self.database.now - since, 0) / 1e6


Values = dict[Key, float] | Histogram


class MetricFamily(NamedTuple):
    """One metric: its name, what it means, its labels, and how its values follow from a snapshot."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: Key
    read: Callable[[Snapshot], Values | None]  # None: not known now


def _counter(name: str, help: str, labels: Key, of: Callable[[Activity], Counter], scale: float = 1.0) -> MetricFamily:
    def read(now: Snapshot) -> Values:
        counter = of(now.activity)
        assert counter.labels == labels, name
        return {key: number * scale if scale != 1.0 else number for key, number in counter.values.copy().items()}

    return MetricFamily(name, "counter", help, labels, read)


def _number(name: str, kind: Literal["counter", "gauge"], help: str, of: Callable[[Snapshot], float | None]) -> MetricFamily:
    def read(now: Snapshot) -> Values | None:
        value = of(now)
        return None if value is None else {(): value}

    return MetricFamily(name, kind, help, (), read)


def _histogram(name: str, help: str, of: Callable[[Activity], Histogram]) -> MetricFamily:
    return MetricFamily(name, "histogram", help, (), lambda now: of(now.activity))


def _of_database(
    name: str,
    help: str,
    labels: Key,
    rows: Callable[[Snapshot, Database], Iterable[tuple[Key, float]]],
    merge: Callable[[float, float], float] = lambda one, other: one + other,
) -> MetricFamily:
    def read(now: Snapshot) -> Values | None:
        return None if now.database is None else now.bounded(rows(now, now.database), labels, merge)

    return MetricFamily(name, "gauge", help, labels, read)


def _oldest(one: float, other: float) -> float:
    return max(one, other)


def _build(now: Snapshot) -> Values:
    from perdure import __version__

    store = "postgresql" if now.app.reading.remote else "sqlite"
    return {(__version__, platform.python_version(), store, str(now.app.reading.schema_version)): 1}


def _workers(_: Snapshot, database: Database) -> Iterator[tuple[Key, float]]:
    for state in ("alive", "silent", "dead"):
        yield (state,), sum(state == ("alive" if one.alive else "dead" if one.dead else "silent") for one in database.workers)


def _leases(now: Snapshot) -> float | None:
    if now.database is None or now.activity.worker is None:
        return None
    return now.database.figures.held.get(now.activity.worker, 0)


_OF_RUNS = ("agent", "queue")
_OF_CALLS = ("agent", "tool")

FAMILIES: tuple[MetricFamily, ...] = (
    MetricFamily(
        "perdure_build_info",
        "gauge",
        "Always 1. The versions of perdure, of Python and of the schema, and the kind of the database.",
        ("version", "python", "store", "schema_version"),
        _build,
    ),
    # -- of the database: the same in every worker
    _number(
        "perdure_database_up",
        "gauge",
        "1: the database has answered this scrape, or one shortly before it. 0: the metrics that come from it are missing.",
        lambda now: int(now.database is not None),
    ),
    _of_database(
        "perdure_runs",
        "Unfinished runs, by status. Finished runs are counted by perdure_runs_ended_total.",
        ("agent", "queue", "status"),
        lambda _, database: (((row.agent, row.queue, row.status), row.runs) for row in database.figures.unfinished),
    ),
    _of_database(
        "perdure_runs_needing_attention",
        "Runs that need a person, by reason: in_doubt, diverged, poison, stuck, error, budget or circling.",
        ("agent", "queue", "reason"),
        lambda _, database: (
            ((row.agent, row.queue, row.attention or ""), row.runs)
            for row in database.figures.unfinished
            if row.status == "needs_attention"
        ),
    ),
    _of_database(
        "perdure_queue_runs",
        "Runs that are ready and wait for a worker.",
        _OF_RUNS,
        lambda _, database: (((row.agent, row.queue), row.number) for row in database.figures.ready),
    ),
    _of_database(
        "perdure_queue_oldest_seconds",
        "How long the run that has waited longest has been ready.",
        _OF_RUNS,
        lambda now, database: (((row.agent, row.queue), now.age_s(row.since)) for row in database.figures.ready),
        _oldest,
    ),
    _of_database(
        "perdure_approvals_pending",
        "Approvals that wait for a decision.",
        _OF_RUNS,
        lambda _, database: (((row.agent, row.queue), row.number) for row in database.figures.pending),
    ),
    _of_database(
        "perdure_approvals_oldest_seconds",
        "How long the oldest pending approval has waited.",
        _OF_RUNS,
        lambda now, database: (((row.agent, row.queue), now.age_s(row.since)) for row in database.figures.pending),
        _oldest,
    ),
    _of_database("perdure_workers", "Registered workers: alive, silent or dead.", ("state",), _workers),
    # -- of this process
    _number(
        "perdure_worker_ready",
        "gauge",
        "1: /readyz says that the worker is ready.",
        # The drain may have begun after the probe was asked: one scrape must not say both.
        lambda now: None if now.ready is None else int(now.ready and not now.activity.draining),
    ),
    _number("perdure_worker_draining", "gauge", "1: the worker drains.", lambda now: int(now.activity.draining)),
    _number("perdure_worker_runs", "gauge", "Runs that the worker drives now.", lambda now: now.activity.driven),
    _number("perdure_worker_runs_limit", "gauge", "The setting concurrency.", lambda now: now.app.settings.concurrency),
    _number("perdure_worker_leases", "gauge", "Runs that the worker holds, as the database has it.", _leases),
    _number("perdure_worker_drains_total", "counter", "Drains that have begun.", lambda now: now.activity.counts.drains),
    _counter("perdure_claims_total", "Runs that the worker has claimed.", _OF_RUNS, lambda of: of.counts.claims),
    _counter(
        "perdure_takeovers_total",
        "Of these, runs whose worker before had died or had been silent for too long.",
        _OF_RUNS,
        lambda of: of.counts.takeovers,
    ),
    _counter(
        "perdure_resumes_total",
        'How claimed runs began here: "new", replayed from the "journal", or from "memory" without a replay.',
        ("source",),
        lambda of: of.counts.resumes,
    ),
    _counter(
        "perdure_runs_ended_total",
        "Runs that the worker has brought to an end: succeeded, failed or cancelled.",
        ("agent", "queue", "status"),
        lambda of: of.counts.ended,
    ),
    _counter(
        "perdure_schedule_ticks_total",
        'Ticks of schedules that the worker has handled: "started", "skipped" (the run before has not ended) or "missed" (too late).',
        ("agent", "outcome"),
        lambda of: of.counts.ticks,
    ),
    _number(
        "perdure_fenced_writes_total",
        "counter",
        "Appends that the database refused, because another worker has taken the run over.",
        lambda now: now.activity.counts.fenced_writes,
    ),
    _counter("perdure_call_attempts_total", "Attempts of calls of tools and models.", _OF_CALLS, lambda of: of.counts.attempts),
    _counter("perdure_call_retries_total", "Of these, attempts after the first one.", _OF_CALLS, lambda of: of.counts.retries),
    _counter("perdure_calls_in_doubt_total", "Times that a call was recorded as in doubt.", _OF_CALLS, lambda of: of.counts.doubts),
    _counter(
        "perdure_tokens_total",
        'Tokens of models: "input", "output", and "cached", which is a part of "input".',
        ("agent", "model", "kind"),
        lambda of: of.counts.tokens,
    ),
    _counter(
        "perdure_cost_usd_total",
        "Money that calls have reported, in US dollars. The model is empty for a tool that is no model.",
        ("agent", "model"),
        lambda of: of.counts.usd_micros,
        1e-6,
    ),
    _histogram(
        "perdure_commit_seconds",
        "From the moment that an append is sent until it is durable. Transactions of tools are left out.",
        lambda of: of.counts.commit_s,
    ),
    _histogram("perdure_commit_appends", "How many appends one commit holds.", lambda of: of.counts.batch),
    _histogram("perdure_replay_seconds", "How long the replay of a claimed run took.", lambda of: of.counts.replay_s),
    _histogram(
        "perdure_event_loop_lag_seconds",
        "How late the event loop runs a callback; measured twice a second by the HTTP server.",
        lambda of: of.counts.lag_s,
    ),
    _number(
        "perdure_event_loop_stuck_seconds",
        "gauge",
        "How long the event loop has not turned; 0 if it turns.",
        lambda now: now.stuck_s,
    ),
)


# -- as text ----------------------------------------------------------------------------------------------------------
def _text(families: Iterable[tuple[MetricFamily, Values]], *, openmetrics: bool) -> str:
    lines: list[str] = []
    for family, values in families:
        name = family.name.removesuffix("_total") if openmetrics and family.kind == "counter" else family.name
        lines.append(f"# HELP {name} {_escaped(family.help) if openmetrics else _escaped_help(family.help)}")
        lines.append(f"# TYPE {name} {family.kind}")
        if isinstance(values, Histogram):
            lines.extend(_histogram_lines(family.name, values))
        else:
            lines.extend(f"{family.name}{_labels(family.labels, key)} {_digits(value)}" for key, value in sorted(values.items()))
    return "\n".join([*lines, "# EOF", ""] if openmetrics else [*lines, ""])


def _histogram_lines(name: str, histogram: Histogram) -> Iterator[str]:
    counts, total = histogram.counts.copy(), 0
    for bound, count in zip((*histogram.bounds, float("inf")), counts, strict=True):
        total += count
        yield f'{name}_bucket{{le="{"+Inf" if bound == float("inf") else _digits(float(bound))}"}} {total}'
    yield f"{name}_sum {_digits(histogram.sum)}"
    yield f"{name}_count {total}"


def _labels(labels: Key, values: Key) -> str:
    return "" if not labels else "{" + ",".join(f'{label}="{_escaped(value)}"' for label, value in zip(labels, values, strict=True)) + "}"


def _escaped(text: str) -> str:
    return _escaped_help(text).replace('"', '\\"')


def _escaped_help(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n")


def _digits(value: float) -> str:
    return repr(round(value, 9)) if isinstance(value, float) else str(int(value))


# -- questions that must not take long --------------------------------------------------------------------------------
class _Question(Generic[T]):
    """Asks a question on a thread, one at a time, however many threads want the answer. Its answer counts for some time."""

    def __init__(self, ask: Callable[[], T], fresh_s: float) -> None:
        self._ask = ask
        self._fresh_s = fresh_s
        self._changed = threading.Condition()
        self._asking = False
        self._asked = 0  # how many questions were answered
        self._answer: T | Exception | None = None
        self._at_s = float("-inf")

    def answer(self, timeout_s: float) -> T:
        """The answer. Raises what the question raised, or StoreUnavailable if it is not answered in time."""
        with self._changed:
            if time.monotonic() - self._at_s > self._fresh_s:
                if not self._asking:
                    threading.Thread(target=self._run, name="perdure-metrics-question", daemon=True).start()
                    self._asking = True
                before = self._asked
                if not self._changed.wait_for(lambda: self._asked > before, timeout_s):
                    raise StoreUnavailable(f"has not answered within {timeout_s:g} s")
            answer = self._answer
        if isinstance(answer, Exception):
            raise answer
        return answer  # type: ignore[return-value]

    def _run(self) -> None:
        try:
            answer: T | Exception = self._ask()
        except Exception as error:
            answer = error
        with self._changed:
            # An error counts only for the callers that wait for it now: the next caller asks again.
            self._answer, self._at_s = answer, float("-inf") if isinstance(answer, Exception) else time.monotonic()
            self._asking = False
            self._asked += 1
            self._changed.notify_all()


class Metrics:
    """The metrics of an app as text, for a server of your own. Its methods block: call them on a thread.

    Keep one object for each app: it remembers the figures of the database for some seconds. With `works`, the process is
    not ready before its worker has registered itself.
    """

    def __init__(self, app: Perdure, *, works: bool = False) -> None:
        self._app = app
        self._works = works
        self._database = _Question(self._read_database, FRESH_S)
        self._open = _Question(lambda: app.reading.check_open(), 0.0)

    def _read_database(self) -> Database:
        app = self._app
        reading, now = app.reading, app.clock.now()
        return Database(reading.figures(now), reading.workers(now, round(app.settings.lease_s * 1e6)), now)

    def text(self, *, openmetrics: bool = False) -> str:
        """All metrics that are known now. If the database does not answer, the others: it is then not an error."""
        return self.exposition(openmetrics=openmetrics)

    def lagged(self, seconds: float) -> None:
        """The event loop has run a callback so much later than it was scheduled. Call this on the loop."""
        self._app.engine.activity().counts.lag_s.add(seconds)

    def exposition(self, *, openmetrics: bool, ready: bool | None = None, stuck_s: float | None = None) -> str:
        try:
            database = self._database.answer(_FIGURES_S)
        except Exception:
            database = None
        now = Snapshot(self._app, self._app.engine.activity(), database, ready, stuck_s)
        found = ((family, family.read(now)) for family in FAMILIES)
        return _text(((family, values) for family, values in found if values is not None), openmetrics=openmetrics)

    def not_ready(self) -> str | None:
        """Why this process is not ready: its worker starts or drains, or the database does not answer. None: it is."""
        try:
            activity = self._app.engine.activity()
            if self._works and activity.worker is None:
                return "the worker starts"
            if activity.draining:
                return "the worker drains"
            self._open.answer(READY_S)
        except (StoreError, InvalidInput) as error:
            return str(error)  # without the address of the database: everyone who reaches the port reads this text
        except Exception as error:
            return f"{type(error).__name__}: {describe(error).message}"
        return None


# -- is the event loop alive? -----------------------------------------------------------------------------------------
class _Pulse:
    """Asks the event loop twice a second to run a callback, and measures how late the callback runs.

    If the whole process does not run (SIGSTOP, a suspended machine), the thread of the pulse does not run either. That
    time is not counted as time in which the loop was stuck.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, lag: Callable[[float], None]) -> None:
        self._loop = loop
        self._lag = lag
        self._sent_s: float | None = None  # when the callback was scheduled that has not run yet
        self._stuck_s = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="perdure-pulse", daemon=True)

    @property
    def stuck_s(self) -> float:
        return self._stuck_s if self._sent_s is not None else 0.0

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        looked_s = time.monotonic()
        while not self._stop.wait(_PULSE_S):
            since_s, looked_s = looked_s, time.monotonic()
            if self._sent_s is not None:
                self._stuck_s += min(looked_s - since_s, 2 * _PULSE_S)
                continue
            self._stuck_s, self._sent_s = 0.0, looked_s
            try:
                self._loop.call_soon_threadsafe(self._turned)
            except RuntimeError:
                pass  # the loop is closed, and stays stuck

    def _turned(self) -> None:
        if self._sent_s is not None:
            self._lag(time.monotonic() - self._sent_s)
        self._sent_s = None


# -- over HTTP --------------------------------------------------------------------------------------------------------
class _Answer(NamedTuple):
    status: str
    text: str
    kind: str = "text/plain; charset=utf-8"


class MetricsServer:
    """Serves /metrics, /livez and /readyz while it is entered: `with MetricsServer(app, "127.0.0.1:9464"):`.

    Enter it on the event loop of the app. `address` is HOST:PORT; port 0 takes a free port, and `port` says which. The
    server has no password and no encryption, so that everyone who reaches the address can read the names of agents,
    queues, tools and models: bind it to 127.0.0.1, or to a network that is your own.

    /livez fails if the event loop has not turned for `stuck_s` seconds (None: for the setting lease_s). /readyz fails
    if the worker drains, or if the database does not answer within two seconds.
    """

    def __init__(self, app: Perdure | None, address: str, *, stuck_s: float | None = None) -> None:
        self._place = _host_and_port(address)
        self._address = address
        self._metrics: Metrics | None = None
        self._stuck_s = stuck_s or (Settings().lease_s if app is None else app.settings.lease_s)
        self._socket: socket.socket | None = None
        self._pulse: _Pulse | None = None
        self._busy = threading.BoundedSemaphore(_MOST_REQUESTS)
        self._closing = threading.Event()
        self._why = "the worker starts"
        self.port = 0
        if app is not None:
            self.show(app)

    def show(self, app: Perdure | None, why: str = "", *, works: bool = False) -> None:
        """From now on, show this app. None: there is no app, for the reason `why`, and the worker is not ready."""
        self._why = why
        self._metrics = None if app is None else Metrics(app, works=works)

    def __enter__(self) -> Self:
        host, port = self._place
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            raise InvalidInput("enter MetricsServer on the event loop of its app: inside `async with Perdure(…) as app:`") from None
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._socket = socket.create_server((host, port), family=family, backlog=64)
        except OSError as error:
            # Not `strerror` alone: for a busy port it says the address a second time.
            why = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror or str(error)
            raise InvalidInput(
                f"cannot serve metrics on {self._address}: {why}; choose another address, or stop the process that uses it"
            ) from None
        self.port = self._socket.getsockname()[1]
        _listening.add(self._socket)
        self._pulse = _Pulse(loop, self._lag)
        self._pulse.start()
        threading.Thread(target=self._serve, args=(self._socket,), name="perdure-metrics", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._socket is not None and self._pulse is not None
        self._closing.set()
        self._pulse.stop()
        self._socket.shutdown(socket.SHUT_RDWR)  # this wakes the thread in `accept`, which a close alone does not
        self._socket.close()

    def _lag(self, seconds: float) -> None:
        if self._metrics is not None:
            self._metrics.lagged(seconds)

    def _serve(self, listening: socket.socket) -> None:
        while not self._closing.is_set():
            try:
                connection, _ = listening.accept()
            except OSError:
                self._closing.wait(0.1)  # the server ends; or no file descriptor is left: then try again soon
                continue
            if not self._busy.acquire(blocking=False):
                connection.close()
                continue
            try:
                threading.Thread(target=self._handle, args=(connection,), name="perdure-metrics-request", daemon=True).start()
            except RuntimeError:  # no thread is left
                self._busy.release()
                connection.close()

    def _handle(self, connection: socket.socket) -> None:
        try:
            with connection:
                _converse(connection, self._answer)
        except OSError:
            pass  # the client is gone, or too slow
        finally:
            self._busy.release()

    def _answer(self, path: str, accepts: str) -> _Answer:
        match path:
            case "/metrics":
                return self._exposition(openmetrics="application/openmetrics-text" in accepts)
            case "/livez":
                return _verdict(self._not_alive())
            case "/readyz":
                return _verdict(self._not_ready())
            case _:
                return _Answer("404 Not Found", "there are /metrics, /livez and /readyz\n")

    def _exposition(self, *, openmetrics: bool) -> _Answer:
        metrics, pulse = self._metrics, self._pulse
        if metrics is None or pulse is None:
            return _verdict(self._why)
        text = metrics.exposition(openmetrics=openmetrics, ready=self._not_ready() is None, stuck_s=pulse.stuck_s)
        return _Answer("200 OK", text, OPEN_METRICS if openmetrics else TEXT)

    def _not_ready(self) -> str | None:
        metrics = self._metrics
        return self._why if metrics is None else metrics.not_ready()

    def _not_alive(self) -> str | None:
        pulse, limit_s = self._pulse, self._stuck_s
        return None if pulse is None or pulse.stuck_s <= limit_s else f"the event loop has not turned for {pulse.stuck_s:.0f} s"


# A process that a tool forks inherits all descriptors. If it lived longer than the worker, the port would stay in use.
_listening: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _close_in_child() -> None:
    for one in list(_listening):
        one.close()


os.register_at_fork(after_in_child=_close_in_child)


def _verdict(problem: str | None) -> _Answer:
    return _Answer("200 OK", "ok\n") if problem is None else _Answer("503 Service Unavailable", f"{problem}\n")


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":") if isinstance(address, str) else ("", "", "")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise InvalidInput(f"{shown(address)} is not HOST:PORT; write an address such as 127.0.0.1:9464 or [::1]:9464")
    return host, int(port)


def _converse(connection: socket.socket, answer: Callable[[str, str], _Answer]) -> None:
    """Read one request, and send one answer. A request that is too large or too slow gets none.

    The time counts from the first byte to the last: a client that sends a byte now and then keeps no thread for long.
    """
    until_s = time.monotonic() + _REQUEST_S
    data = b""
    while b"\r\n\r\n" not in data and b"\n\n" not in data:
        connection.settimeout(max(until_s - time.monotonic(), 0.001))
        more = connection.recv(_MOST_BYTES)
        data += more
        if not more or len(data) > _MOST_BYTES:
            return
    first, *headers = data.decode("latin-1").splitlines()
    method, path, version = [*first.split(" "), "", "", ""][:3]
    accepts = next((line.partition(":")[2] for line in headers if line.lower().startswith("accept:")), "")
    if not version.startswith("HTTP/1."):
        found = _Answer("400 Bad Request", "this is no request of HTTP/1\n")
    elif method not in ("GET", "HEAD"):
        found = _Answer("405 Method Not Allowed", "only GET and HEAD are answered here\n")
    else:
        try:
            found = answer(path.partition("?")[0], accepts)
        except Exception as error:
            found = _Answer("500 Internal Server Error", f"{type(error).__name__}\n")
            log.exception("metrics: %s cannot be answered", path[:80])
    body = found.text.encode("utf-8", "replace")
    head = f"HTTP/1.1 {found.status}\r\nContent-Type: {found.kind}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n"
    if found.status.startswith("405"):
        head += "Allow: GET, HEAD\r\n"
    connection.settimeout(max(until_s - time.monotonic(), 0.001))
    connection.sendall(head.encode("ascii") + b"\r\n" + (b"" if method == "HEAD" else body))
