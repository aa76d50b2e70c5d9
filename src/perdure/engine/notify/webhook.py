"""Sends one signed POST to the webhook URL of the settings. No failure of the receiver raises an exception.

The host must be in an allow-list. Redirects, proxies and credentials in the URL are not supported, because they would
let the request go to another host. The request ends after GIVE_UP_S seconds, even if the receiver does not answer.
"""

from __future__ import annotations

import asyncio
import http.client
import socket
import ssl
import threading
import time
from urllib.parse import urlsplit

from msgspec import Struct

from perdure.engine.threads import Threads
from perdure.errors import InvalidInput
from perdure.webhooks import ID_HEADER, SIGNATURE_HEADER, TIMESTAMP_HEADER, sign

TIMEOUT_S = 10.0  # the timeout of the connect, and of every wait for data
GIVE_UP_S = 20.0  # the limit for the whole request: if an answer comes byte by byte, TIMEOUT_S never ends it
_LOOKUP_S = 2.0  # added to GIVE_UP_S, because the lookup of the host's name may hang
_POLITENESS_S = 2.0  # how long to read the body of the answer, which is not used
_MAX_ANSWER_BYTES = 64 * 1024
MIN_SECRET_CHARS = 32
_LOOPBACK = frozenset(("127.0.0.1", "::1", "localhost"))


class Accepted(Struct, frozen=True, gc=False):
    """The receiver has accepted the notice (2xx)."""


class ReceiverGone(Struct, frozen=True, gc=False):
    """The receiver does not want notices any more (410)."""


class NotDelivered(Struct, frozen=True, gc=False):
    """The notice has to be sent again, although it may have arrived."""

    why: str


Answer = Accepted | ReceiverGone | NotDelivered
_TOO_LATE = NotDelivered(f"no answer within {GIVE_UP_S:.0f} s")


class Endpoint:
    """The receiver of webhooks.

    InvalidInput says what is wrong with the settings; it never shows the secret or the path.
    """

    def __init__(self, url: str, secret: str, hosts: tuple[str, ...]) -> None:
        if not secret:
            raise InvalidInput(
                "webhook_url is set and webhook_secret is not; set PERDURE_WEBHOOK_SECRET to what the receiver verifies with"
            )
        if len(secret) < MIN_SECRET_CHARS:
            raise InvalidInput(
                f"webhook_secret has {len(secret)} characters and can be guessed; at least {MIN_SECRET_CHARS} random ones: "
                'python -c "import secrets; print(secrets.token_hex(32))"'
            )
        self._secret = secret
        self.scheme, self.host, self.port, self.path = _parsed(url)
        allowed = {host.lower() for host in hosts} or _LOOPBACK
        if self.host not in allowed:
            rule = f"webhook_hosts allows {', '.join(sorted(allowed))}" if hosts else "without webhook_hosts only loopback is allowed"
            raise InvalidInput(f'webhook_url leads to {self.host!a}; {rule}: set webhook_hosts = ["{ascii(self.host)[1:-1]}"]')
        self._context = ssl.create_default_context() if self.scheme == "https" else None

    @property
    def place(self) -> str:
        """Scheme, host and port, for a log. The path is left out, because it may contain a secret."""
        return f"{self.scheme}://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    async def post(self, threads: Threads, notice_id: str, body: bytes, now_s: int) -> Answer:
        """Send the notice once. If this call is cancelled, the connection is cut."""
        line = _Line(self.host, self.port, self._context)
        request = self._headers(notice_id, body, now_s)
        loop = asyncio.get_running_loop()
        answered: asyncio.Future[Answer] = loop.create_future()
        job = threads.start(
            lambda: _exchange(line, self.path, request, body), lambda answer: None if answered.done() else answered.set_result(answer)
        )
        alarm = loop.call_later(GIVE_UP_S, line.cut)
        try:
            # The lookup of the host's name cannot be cut. If the lookup hangs, its thread is abandoned.
            async with asyncio.timeout(GIVE_UP_S + _LOOKUP_S):
                return await answered
        except TimeoutError:
            return _TOO_LATE
        finally:
            alarm.cancel()
            if answered.cancelled():
                line.cut()
                if not threads.withdraw(job):
                    threads.abandon(job)

    def _headers(self, notice_id: str, body: bytes, now_s: int) -> dict[str, str]:
        timestamp = str(now_s)
        return {
            "Content-Type": "application/json",
            "User-Agent": "perdure",
            "Connection": "close",
            ID_HEADER: notice_id,
            TIMESTAMP_HEADER: timestamp,
            SIGNATURE_HEADER: sign(self._secret, timestamp=timestamp, notice_id=notice_id, body=body),
        }


class _Line(http.client.HTTPConnection):
    """A connection that another thread can cut at any time after the lookup of the name, even in the TLS handshake."""

    def __init__(self, host: str, port: int, context: ssl.SSLContext | None) -> None:
        super().__init__(host, port, timeout=TIMEOUT_S)
        self._context = context
        if context is not None:
            self.default_port = 443  # the Host header does not name this port
        self._lock = threading.Lock()
        self._wire: socket.socket | None = None
        self.is_cut = False

    def connect(self) -> None:
        """Connect. `HTTPConnection.request` calls this."""
        wire = socket.create_connection((self.host, self.port), TIMEOUT_S)
        wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._context is not None:
            wire = self._context.wrap_socket(wire, server_hostname=self.host, do_handshake_on_connect=False)
        self.sock = wire
        with self._lock:
            self._wire = wire
            if self.is_cut:
                raise TimeoutError("given up")
        if isinstance(wire, ssl.SSLSocket):
            wire.do_handshake()

    def cut(self) -> None:
        """End every wait on this connection, now and later."""
        with self._lock:
            self.is_cut = True
            try:
                if self._wire is not None:
                    # Call the shutdown of the plain socket: the shutdown of SSLSocket would drop the TLS state while
                    # another thread uses it.
                    socket.socket.shutdown(self._wire, socket.SHUT_RDWR)
            except OSError:
                pass  # the receiver, or the thread that sends, has already closed the connection


def _exchange(line: _Line, path: str, headers: dict[str, str], body: bytes) -> Answer:
    try:
        line.request("POST", path, body, headers)
        response = line.getresponse()
        _skim(response)
        return _verdict(response.status)
    except Exception as error:  # any failure of the network, of TLS, or of the receiver's HTTP
        return _TOO_LATE if line.is_cut else NotDelivered(f"{type(error).__name__}: {error}"[:300])
    finally:
        line.close()


def _skim(response: http.client.HTTPResponse) -> None:
    """Read a little of the answer's body, so that the receiver gets no reset while it sends.

    The status of the answer is already known.
    """
    until, read = time.monotonic() + _POLITENESS_S, 0
    try:
        while read < _MAX_ANSWER_BYTES and time.monotonic() < until and (chunk := response.read1(8192)):
            read += len(chunk)
    except Exception:
        pass  # the body is not used
    finally:
        response.close()


def _verdict(status: int) -> Answer:
    if 200 <= status < 300:
        return Accepted()
    if status == http.client.GONE:
        return ReceiverGone()
    return NotDelivered(f"HTTP {status}" + ("; redirects are not followed" if 300 <= status < 400 else ""))


def _parsed(url: str) -> tuple[str, str, int, str]:
    """Scheme, host, port and path with query. InvalidInput for anything but a plain http or https URL."""
    try:
        parts = urlsplit(url)
        port, host = parts.port, parts.hostname
    except ValueError:
        raise InvalidInput("webhook_url is not a URL") from None
    if parts.scheme not in ("http", "https") or not host:
        raise InvalidInput("webhook_url must begin with https:// or http:// and name a host")
    if not url.isascii() or not url.isprintable() or " " in url:
        raise InvalidInput("webhook_url may contain only printable ASCII and no blank; percent-encode the rest")
    if "@" in parts.netloc:
        raise InvalidInput("webhook_url must not hold a user name or password; the signature says who sends")
    if "#" in url:
        raise InvalidInput("webhook_url must not hold a #fragment: it would never be sent")
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return parts.scheme, host, port if port is not None else 443 if parts.scheme == "https" else 80, path
