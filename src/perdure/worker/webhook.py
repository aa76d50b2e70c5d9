"""One signed POST to the one place that the settings name, and what came of it. Never raises for what the other side does.

Where it may go is an allow-list; redirects, proxies and credentials in the URL are not for it (the place could be anywhere then).
However the other side behaves, it is over after GIVE_UP_S.
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

from perdure.errors import InvalidInput
from perdure.webhooks import ID_HEADER, SIGNATURE_HEADER, TIMESTAMP_HEADER, sign
from perdure.worker.threads import Threads

TIMEOUT_S = 10.0  # for connecting, and for every wait for an answer
GIVE_UP_S = 20.0  # for all of it: an answer that drips in byte by byte never runs into the time-out above
_LOOKUP_S = 2.0  # on top of it, where the look-up of a name is what hangs
_POLITENESS_S = 2.0  # for reading an answer that nobody is interested in
_MAX_ANSWER_BYTES = 64 * 1024
MIN_SECRET_CHARS = 32
_LOOPBACK = frozenset(("127.0.0.1", "::1", "localhost"))


class Accepted(Struct, frozen=True, gc=False):
    """The receiver has it."""


class Gone(Struct, frozen=True, gc=False):
    """The receiver does not want notices any more (410)."""


class NotDelivered(Struct, frozen=True, gc=False):
    """It has to be sent again. It may have arrived all the same."""

    why: str


Answer = Accepted | Gone | NotDelivered
_TOO_LATE = NotDelivered(f"no answer within {GIVE_UP_S:.0f} s")


class Endpoint:
    """Where webhooks go. InvalidInput says what is wrong with the settings, without the secret and without what follows the host."""

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
        """Where it leads to, for a log: what follows the host may be a secret."""
        return f"{self.scheme}://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    async def post(self, threads: Threads, notice_id: str, body: bytes, now_s: int) -> Answer:
        """Send it once. Cancelled: the line is cut."""
        line = _Line(self.host, self.port, self._context)
        request = self._headers(notice_id, body, now_s)
        loop = asyncio.get_running_loop()
        answered: asyncio.Future[Answer] = loop.create_future()
        job = threads.start(
            lambda: _exchange(line, self.path, request, body), lambda answer: None if answered.done() else answered.set_result(answer)
        )
        alarm = loop.call_later(GIVE_UP_S, line.cut)
        try:
            # A look-up of the host's name cannot be cut: then the thread is left to end by itself.
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
    """A connection that another thread can cut at any moment after the look-up of the name, the TLS handshake included."""

    def __init__(self, host: str, port: int, context: ssl.SSLContext | None) -> None:
        super().__init__(host, port, timeout=TIMEOUT_S)
        self._context = context
        if context is not None:
            self.default_port = 443  # not named in the Host header
        self._lock = threading.Lock()
        self._wire: socket.socket | None = None
        self.is_cut = False

    def connect(self) -> None:
        """Called by request()."""
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
        """End every wait on this line, now and later."""
        with self._lock:
            self.is_cut = True
            try:
                if self._wire is not None:
                    # Of the plain socket: that of a TLS socket would take its state away under the thread that uses it.
                    socket.socket.shutdown(self._wire, socket.SHUT_RDWR)
            except OSError:
                pass  # the other side, or our thread, was faster


def _exchange(line: _Line, path: str, headers: dict[str, str], body: bytes) -> Answer:
    try:
        line.request("POST", path, body, headers)
        response = line.getresponse()
        _skim(response)
        return _verdict(response.status)
    except Exception as error:  # whatever the network, TLS and the other side's idea of HTTP can come up with
        return _TOO_LATE if line.is_cut else NotDelivered(f"{type(error).__name__}: {error}"[:300])
    finally:
        line.close()


def _skim(response: http.client.HTTPResponse) -> None:
    """Read a little of what the receiver says, so that it is not cut off in mid-sentence; its status has been said already."""
    until, read = time.monotonic() + _POLITENESS_S, 0
    try:
        while read < _MAX_ANSWER_BYTES and time.monotonic() < until and (chunk := response.read1(8192)):
            read += len(chunk)
    except Exception:
        pass  # nobody is interested in it
    finally:
        response.close()


def _verdict(status: int) -> Answer:
    if 200 <= status < 300:
        return Accepted()
    if status == http.client.GONE:
        return Gone()
    return NotDelivered(f"HTTP {status}" + ("; redirects are not followed" if 300 <= status < 400 else ""))


def _parsed(url: str) -> tuple[str, str, int, str]:
    """Scheme, host, port and the rest; InvalidInput for anything but a plain http or https URL."""
    try:
        parts = urlsplit(url)
        port, host = parts.port, parts.hostname
    except ValueError:
        raise InvalidInput("webhook_url is not a URL") from None
    if parts.scheme not in ("http", "https") or not host:
        raise InvalidInput("webhook_url must begin with https:// or http:// and name a host")
    if not url.isascii() or not url.isprintable() or " " in url:
        raise InvalidInput("webhook_url may hold printable ASCII alone, and no blank; percent-encode the rest")
    if "@" in parts.netloc:
        raise InvalidInput("webhook_url must not hold a user name or password; the signature says who sends")
    if "#" in url:
        raise InvalidInput("webhook_url must not hold a #fragment: it would never be sent")
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return parts.scheme, host, port if port is not None else 443 if parts.scheme == "https" else 80, path
