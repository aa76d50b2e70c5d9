"""examples/service, really executed.

Uvicorn in one process, workers in others, people with tokens, and a killed worker.

The same run on the async program and on the sync program, on SQLite and on PostgreSQL.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import pytest
from tests.servers import forked
from tests.servers.postgres import Server

ROOT = Path(__file__).resolve().parents[2]
SERVICE = ROOT / "examples" / "service"
PATIENCE_S = 60.0
PROGRAMS = ["web", pytest.param("web_sync", marks=pytest.mark.full)]


class Frame(NamedTuple):
    """One server-sent event."""

    id: int | None
    event: str
    data: dict[str, Any]


class Service:
    """The web process and the workers of one folder, with the demo's people."""

    def __init__(self, folder: Path, url: str, program: str) -> None:
        self.folder, self.url = folder, url
        self.payments = folder / "payments.log"
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("PERDURE_", "SERVICE_", "PG"))}
        self.env = clean | {
            "PYTHONPATH": str(ROOT / "src"),
            "PERDURE_URL": url,
            "PERDURE_ANSWER_S": "3",
            "SERVICE_PEOPLE": str(SERVICE / "people.demo.json"),
            "SERVICE_PAYMENTS": str(self.payments),
        }
        self.children: list[subprocess.Popen[Any]] = []
        self.log = folder / "web.log"
        # Port 0: the kernel chooses a free one, and uvicorn logs it.
        command = ["-m", "uvicorn", "--app-dir", str(SERVICE), f"{program}:app", "--port", "0", "--timeout-graceful-shutdown", "50"]
        with self.log.open("wb") as log:
            self.web = subprocess.Popen([sys.executable, *command], cwd=folder, env=self.env, stdout=log, stderr=log)
        self.children.append(self.web)
        self.address = until(self._address)

    def _address(self) -> str | None:
        assert self.web.poll() is None, self.log.read_text()
        found = re.search(r"running on (http://127\.0\.0\.1:\d+)", self.log.read_text())
        return found and found[1]

    def worker(self, payment_s: float = 0.0) -> subprocess.Popen[Any]:
        env = {**self.env, "SERVICE_PAYMENT_S": str(payment_s)}
        with (self.folder / "worker.log").open("ab") as log:
            command = [sys.executable, "-m", "perdure", "worker", str(SERVICE / "agents.py")]
            started = forked.Popen(command, cwd=self.folder, env=env, stdout=log, stderr=log)
        self.children.append(started)
        return started

    def ask(self, who: str | None, method: str, path: str, **body: Any) -> httpx2.Response:
        headers = {} if who is None else {"Authorization": f"Bearer demo-{who}"}
        return httpx2.request(method, self.address + path, headers=headers, json=body or None, timeout=PATIENCE_S)

    def get(self, who: str | None, path: str) -> httpx2.Response:
        return self.ask(who, "GET", path)

    def post(self, who: str | None, path: str, **body: Any) -> httpx2.Response:
        return self.ask(who, "POST", path, **body)

    @contextmanager
    def events(self, who: str, run_id: str, after: int | None = None) -> Iterator[Iterator[Frame]]:
        """The frames of an event stream. The end of the block closes the connection, like a client that goes away."""
        headers = {"Authorization": f"Bearer demo-{who}"} | ({} if after is None else {"Last-Event-ID": str(after)})
        with httpx2.stream("GET", f"{self.address}/runs/{run_id}/events", headers=headers, timeout=PATIENCE_S) as answer:
            assert (answer.status_code, answer.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
            yield parsed(answer.iter_lines())

    def pending(self, run_id: str) -> dict[str, Any] | None:
        return next((one for one in self.get("bob", "/approvals").json() if one["run"] == run_id), None)

    def health(self, *words: str) -> int:
        env = {**self.env, "PORT": self.address.rpartition(":")[2]}
        return forked.run([sys.executable, str(SERVICE / "health.py"), *words], cwd=self.folder, env=env, capture_output=True).returncode

    def close(self) -> None:
        for child in self.children:
            child.kill()
            child.wait()


def until(look: Callable[[], Any]) -> Any:
    """What `look` finds, as soon as it finds something."""
    deadline = time.monotonic() + PATIENCE_S
    while not (found := look()):
        assert time.monotonic() < deadline, look
        time.sleep(0.05)
    return found


def parsed(lines: Iterator[str]) -> Iterator[Frame]:
    fields: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(": ")
        if line and name:  # a line that begins with a colon is a comment
            fields[name] = value
        elif not line and "data" in fields:
            yield Frame(int(fields["id"]) if "id" in fields else None, fields.get("event", "message"), json.loads(fields["data"]))
            fields = {}
        elif not line:
            fields = {}


def read_until(frames: Iterator[Frame], **wanted: Any) -> list[Frame]:
    """The frames up to the first one with these fields."""
    read: list[Frame] = []
    for one in frames:
        read.append(one)
        if all(one.data.get(name) == value for name, value in wanted.items()):
            return read
    raise AssertionError(f"no {wanted} in {read}")


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.full)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/perdure.db"
    found: str = request.getfixturevalue("postgres_url")
    return found


@pytest.fixture(params=PROGRAMS)
def service(request: pytest.FixtureRequest, tmp_path: Path, url: str) -> Iterator[Service]:
    opened = None
    try:
        yield (opened := Service(tmp_path, url, request.param))
    finally:
        if opened is not None:
            opened.close()


def test_a_run_is_started_followed_steered_and_approved_and_ends_once_although_its_worker_is_killed(service):
    first_worker = service.worker(payment_s=600)  # pays, and does not come back from it

    # Start. The same request again returns the same run; another request with the same id is refused.
    started = service.post("ann", "/runs", prompt="Order o-81 arrived broken.", id="case-1")
    assert (started.status_code, started.headers["location"]) == (202, "/runs/case-1")
    assert service.post("ann", "/runs", prompt="Order o-81 arrived broken.", id="case-1").json()["id"] == "case-1"
    assert service.post("ann", "/runs", prompt="Order o-82 is lost.", id="case-1").status_code == 409
    assert service.post("ann", "/runs", prompt="").status_code == 422
    assert service.post("ann", "/runs", prompt="x", actor="bob").status_code == 422

    # Only people who have logged in, and only of this tenant.
    assert service.get(None, "/runs/case-1").status_code == 401
    assert service.get("nobody", "/runs/case-1").status_code == 401
    assert service.get("eve", "/runs/case-1").status_code == 404
    assert service.get("eve", "/runs/case-1/events").status_code == 404
    assert service.get("eve", "/approvals").json() == []

    # Follow it to the approval; then the client goes away.
    with service.events("ann", "case-1") as frames:
        seen = read_until(frames, type="approval_requested")
    assert [one.id for one in seen] == list(range(1, len(seen) + 1))

    # A message to the run while it waits. The same key is the same message.
    for _ in range(2):
        told = service.post("ann", "/runs/case-1/messages", text="and I have moved house", key="m-1")
        assert told.status_code == 202
    assert service.post("eve", "/runs/case-1/messages", text="hello").status_code == 404

    # The login says who decides; a body cannot.
    asked = until(lambda: service.pending("case-1"))
    door = f"/approvals/{asked['id']}"
    assert asked["proposed"] == {"order": "o-81", "cents": 4_900}
    assert service.post("ann", f"{door}/approve", digest=asked["digest"]).status_code == 403  # the run acts for ann
    assert service.post("cat", f"{door}/approve", digest=asked["digest"]).status_code == 403  # cat is not in finance
    assert service.post("cat", f"{door}/reject", digest=asked["digest"], reason="no").status_code == 403
    assert service.post("eve", f"{door}/approve", digest=asked["digest"]).status_code == 404  # finance of another tenant
    assert service.post("cat", f"{door}/approve", digest=asked["digest"], by="bob").status_code == 422
    assert service.post("cat", f"{door}/approve?by=bob&roles=finance", digest=asked["digest"]).status_code == 403
    assert service.post("bob", f"{door}/approve", digest="0" * 64).status_code == 409  # not what bob has seen
    assert not service.payments.exists()
    approved = service.post("bob", f"{door}/approve", digest=asked["digest"], note="fine")
    assert (approved.status_code, approved.json()["agreed"]) == (200, ["bob"])

    # Connect again at the last event of the stream. The worker is killed inside the payment, and another worker takes
    # over.
    with service.events("ann", "case-1", after=seen[-1].id) as frames:
        seen += read_until(frames, type="tool_call_initiated", tool="pay_back")
        until(service.payments.exists)
        os.kill(first_worker.pid, signal.SIGKILL)
        first_worker.wait()
        service.worker()
        seen += list(frames)  # until the service ends the stream

    *events, end = seen
    assert end == Frame(None, "end", {"status": "succeeded"})
    assert [one.id for one in events] == list(range(1, len(events) + 1)), "no gap, and nothing twice"
    types = [one.data["type"] for one in events]
    assert [types.count(kind) for kind in ("signal_received", "approval_decided", "run_succeeded")] == [1, 1, 1]
    assert next(one.data["by"] for one in events if one.data["type"] == "approval_decided") == "bob"
    assert [line.split()[1:] for line in service.payments.read_text().splitlines()] == [["o-81", "4900"]], "paid once"

    # After the end.
    shown = service.get("ann", "/runs/case-1").json()
    assert (shown["status"], shown["seq"], shown["started_by"]) == ("succeeded", len(events), "ann")
    assert shown["result"].count("You also wrote: and I have moved house") == 1
    assert service.post("ann", "/runs/case-1/messages", text="thanks").status_code == 409
    assert service.post("bob", f"{door}/reject", digest=asked["digest"], reason="late").status_code == 409
    over = httpx2.get(
        f"{service.address}/runs/case-1/events", headers={"Authorization": "Bearer demo-ann", "Last-Event-ID": str(len(events))}
    )
    assert over.status_code == 204, "a browser that connects again is told that nothing more will come"
    beyond = httpx2.get(f"{service.address}/runs/case-1/events", headers={"Authorization": "Bearer demo-ann", "Last-Event-ID": "999"})
    assert beyond.status_code == 422


def test_a_client_that_goes_away_leaves_nothing_behind(service):
    service.worker()
    assert service.post("ann", "/runs", prompt="Order o-81 arrived broken.", id="case-1").status_code == 202
    for _ in range(3):
        with service.events("ann", "case-1") as frames:
            read_until(frames, type="run_released", status="waiting_approval")  # parked: no event will come
    # uvicorn waits for requests under way before it ends. A stream without a client would be such a request.
    asked = time.monotonic()
    service.web.terminate()
    service.web.wait(timeout=PATIENCE_S)
    log = service.log.read_text()
    assert time.monotonic() - asked < 40, log  # the time-out of the shutdown is 50 s
    assert "Application shutdown complete" in log
    assert [words for words in ("Traceback", "ERROR", "Cancel ", "never retrieved") if words in log] == [], log


ABANDONED = """
import asyncio
from agents import support
from perdure import Perdure
from web import frames
from wire import EventStream

async def left_by_its_client(handle, event):
    gone = asyncio.Event()

    async def receive():
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        if event in message.get("body", b""):
            gone.set()
            if WHERE == "while it sends":
                await asyncio.Event().wait()  # a client that reads no more

    await EventStream(frames(handle, 0))({"type": "http", "asgi": {"spec_version": "2.3"}}, receive, send)

async def main():
    async with Perdure() as app:
        handle = await app.start(support.input("Order o-81 is lost."), id="case-1")  # no worker: one event, and no more
        before = asyncio.all_tasks()
        for _ in range(3):
            await left_by_its_client(handle, b"id: 1")
        async with asyncio.timeout(60):
            while asyncio.all_tasks() != before:
                await asyncio.sleep(0.05)

asyncio.run(main())
"""


@pytest.mark.parametrize("where", ["while it waits", "while it sends"])
def test_a_read_ends_when_its_client_has_gone(where, tmp_path):
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PERDURE_", "SERVICE_"))}
    path = os.pathsep.join((str(ROOT / "src"), str(SERVICE)))
    ran = subprocess.run(
        [sys.executable, "-X", "dev", "-c", f"WHERE = {where!r}\n{ABANDONED}"],
        cwd=tmp_path,
        env={**env, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_S,
        check=False,
    )
    assert (ran.returncode, ran.stdout) == (0, ""), ran.stderr
    assert "never retrieved" not in ran.stderr


@pytest.mark.full
def test_the_probes_say_whether_the_web_process_and_the_worker_are_well(service):
    assert service.health("web") == 0
    assert service.health("worker") == 1  # there is no worker
    worker = service.worker()
    until(lambda: service.health("worker") == 0)
    assert service.health("worker", "--live") == 0
    os.kill(worker.pid, signal.SIGKILL)
    worker.wait()
    until(lambda: service.health("worker") == 1)
    assert service.health("worker", "--live") == 1
    assert service.health("wrong") == 1
    os.kill(service.web.pid, signal.SIGKILL)
    service.web.wait()
    assert service.health("web") == 1


@pytest.mark.full
@pytest.mark.parametrize("program", ["web", "web_sync"])
def test_a_client_reads_nothing_of_the_database_and_gets_503_while_it_is_down(program, tmp_path, postgres: Server, postgres_url):
    service = Service(tmp_path, postgres_url, program)
    try:
        unknown = service.get("ann", "/runs/none")
        assert (unknown.status_code, unknown.json()) == (404, {"detail": "there is no run none"})
        assert service.get("bob", "/health/ready").status_code == 200
        postgres.stop()
        down = until(lambda: (found := service.get("ann", "/runs/none")).status_code == 503 and found)
        assert down.json() == {"detail": "the database does not answer; try again"}
        assert down.headers["retry-after"] == "1"
        assert service.get(None, "/health/ready").status_code == 503
        assert service.get(None, "/health/live").status_code == 200
        assert (service.health("worker"), service.health("worker", "--live")) == (1, 0), "an outage kills no worker"
        postgres.revive()
        until(lambda: service.get("ann", "/runs/none").status_code == 404)
    finally:
        service.close()


def test_without_people_the_service_does_not_start(tmp_path):
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PERDURE_", "SERVICE_"))}
    (tmp_path / "plain.json").write_text('{"demo-ann": {"name": "ann", "tenant": "shop", "roles": []}}')
    for people, said in [("", "SERVICE_PEOPLE is not set"), (str(tmp_path / "plain.json"), "is not the SHA-256 of a token")]:
        ran = subprocess.run(
            [sys.executable, "-m", "uvicorn", "--app-dir", str(SERVICE), "web:app", "--port", "0"],
            cwd=tmp_path,
            env={**env, "PYTHONPATH": str(ROOT / "src"), "SERVICE_PEOPLE": people},
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert ran.returncode != 0
        assert said in ran.stderr
