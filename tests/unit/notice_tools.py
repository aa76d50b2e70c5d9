"""Shared by the tests of notices: a real HTTP server with scripted answers, and notices to send."""

from __future__ import annotations

import ssl
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple

from tests.conformance.suite import T0, new_run

from perdure.core.events import AnyBody, Event, Failure, RunFailed
from perdure.store.api import NoticeRow, RunRow, Store

SECRET = "canary-4711-do-not-tell-anybody-at-all"

# Only for these tests, and trusted nowhere else: a certificate for "localhost", and its key.
LOCALHOST = """\
-----BEGIN CERTIFICATE-----
MIIBcDCCARegAwIBAgIBATAKBggqhkjOPQQDAjAUMRIwEAYDVQQDDAlsb2NhbGhv
c3QwIBcNMjAwMTAxMDAwMDAwWhgPMjEyMDAxMDEwMDAwMDBaMBQxEjAQBgNVBAMM
CWxvY2FsaG9zdDBZMBMGByqGSM49AgEGCCqGSM49AwEHA0IABNfIpgV9PSE/Jg5p
0oZZhQ54V7PM5NpCrJYwIV3ins5Ad7DAOQYjh20p+OzRRtFNb1JD0c9psveAfb0q
zPqn7umjWDBWMBQGA1UdEQQNMAuCCWxvY2FsaG9zdDAPBgNVHRMBAf8EBTADAQH/
MA4GA1UdDwEB/wQEAwIChDAdBgNVHQ4EFgQUJWS++rS5H2MqaisStUPRsrDLmq4w
CgYIKoZIzj0EAwIDRwAwRAIgRYP96dHisC4M6izdX+f0VODy+RMqpOxJaew7RYBv
QKoCICa48BAlfjbtl/2EjGC8aOeOwbUuwUl0tBENn1MyvbZu
-----END CERTIFICATE-----
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgl7WDSR/1Yx2vUIgt
C8gLte9bftRBgYiwzrLzliTRgiChRANCAATXyKYFfT0hPyYOadKGWYUOeFezzOTa
QqyWMCFd4p7OQHewwDkGI4dtKfjs0UbRTW9SQ9HPabL3gH29Ksz6p+7p
-----END PRIVATE KEY-----
"""


class Received(NamedTuple):
    path: str
    headers: Message
    body: bytes


Reply = Callable[[BaseHTTPRequestHandler], None]


def says(status: int, **headers: str) -> Reply:
    """An answer with this status and nothing more."""

    def reply(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name, value)
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    return reply


class _Server(ThreadingHTTPServer):
    request_queue_size = 128  # with five, as it comes, several couriers at once get a reset from the kernel

    def handle_error(self, *_: object) -> None: ...  # a handshake that fails is the test, not an error


class Receiver:
    """A webhook's other end on 127.0.0.1. Replies come in the order given, the last one again and again."""

    def __init__(self, *replies: Reply, tls: Path | None = None) -> None:
        self.received: list[Received] = []
        self.closing = threading.Event()  # replies that wait look at it
        self._replies = list(replies) or [says(200)]
        self._server = _Server(("127.0.0.1", 0), self._handler())
        if tls is not None:
            tls.write_text(LOCALHOST)
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(tls)
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.port: int = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}/hook"

    @property
    def ids(self) -> list[str]:
        return [str(one.headers["Perdure-Id"]) for one in self.received]

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver.received.append(Received(self.path, self.headers, body))
                reply = receiver._replies.pop(0) if len(receiver._replies) > 1 else receiver._replies[0]
                try:
                    reply(self)
                except OSError:
                    pass  # the sender has hung up

            do_GET = do_POST

            def log_message(self, *_: object) -> None: ...

        return Handler


@contextmanager
def receiver(*replies: Reply, tls: Path | None = None) -> Iterator[Receiver]:
    """A receiver that listens as long as the block lasts."""
    made = Receiver(*replies, tls=tls)
    thread = threading.Thread(target=made._server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield made
    finally:
        made.closing.set()
        made._server.shutdown()
        made._server.server_close()
        thread.join()


def failing_run(store: Store, run_id: str, message: str = "boom") -> str:
    """A run that has failed, and so is worth a notice; the id of the notice."""
    store.create_run(new_run(run_id))
    event_id = uuid.uuid4().hex
    store.end(run_id, RunFailed(Failure("error", "ValueError", message)), event_id=event_id, now=T0)
    return event_id


def notice(body: AnyBody, row: RunRow, attempts: int = 0) -> NoticeRow:
    """A notice about an event of this run."""
    return NoticeRow(1, row, Event(7, "ab" * 16, T0, 1, 4, 6, body), attempts)
