"""What a receiver can rely on, and what the sender does with any kind of receiver."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import socket
import subprocess
import sys
import threading
import time

import pytest
from tests.unit.notice_tools import SECRET, receiver, says

from perdure.engine.notify import webhook
from perdure.engine.notify.webhook import Accepted, Answer, Endpoint, NotDelivered, ReceiverGone
from perdure.engine.threads import Threads
from perdure.errors import InvalidInput
from perdure.webhooks import InvalidWebhook, sign, verify

NOW = 1_700_000_000
BODY = b'{"id":"n-1","type":"run_failed"}'


def signed(body: bytes = BODY, *, secret: str = SECRET, at: int | str = NOW, notice_id: str = "n-1") -> dict[str, str]:
    signature = sign(secret, timestamp=str(at), notice_id=notice_id, body=body)
    return {"Perdure-Id": notice_id, "Perdure-Timestamp": str(at), "Perdure-Signature": signature}


# --- verifying -------------------------------------------------------------------------------------------------------------


def test_what_was_signed_is_verified_and_comes_back_decoded():
    assert verify(SECRET, signed(), BODY, now=NOW + 5) == {"id": "n-1", "type": "run_failed"}


def test_the_signature_is_what_the_documentation_says():
    by_hand = hmac.new(SECRET.encode(), b"1700000000.n-1." + BODY, hashlib.sha256).hexdigest()
    assert signed()["Perdure-Signature"] == f"v1={by_hand}"


def test_every_flipped_bit_of_the_body_is_noticed():
    for at in range(len(BODY)):
        flipped = bytearray(BODY)
        flipped[at] ^= 1
        with pytest.raises(InvalidWebhook, match="signature"):
            verify(SECRET, signed(), bytes(flipped), now=NOW)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("Perdure-Id", "n-2", "signature"),
        ("Perdure-Timestamp", str(NOW + 1), "signature"),
        ("Perdure-Signature", "v1=" + "0" * 64, "signature"),
        ("Perdure-Signature", "v1=ünïcode", "not plain text"),
        ("Perdure-Signature", "", "signature"),
    ],
)
def test_a_header_that_was_changed_is_noticed(name, value, says):
    with pytest.raises(InvalidWebhook, match=says):
        verify(SECRET, {**signed(), name: value}, BODY, now=NOW)


@pytest.mark.parametrize("name", ["Perdure-Id", "Perdure-Timestamp", "Perdure-Signature"])
def test_a_header_that_is_missing_or_there_twice_is_refused(name):
    headers = signed()
    with pytest.raises(InvalidWebhook, match=f"{name} is present more than once"):
        verify(SECRET, {**headers, name.upper(): headers[name]}, BODY, now=NOW)
    del headers[name]
    with pytest.raises(InvalidWebhook, match=f"{name} is missing"):
        verify(SECRET, headers, BODY, now=NOW)


def test_headers_count_whatever_their_case():
    assert verify(SECRET, {name.lower(): value for name, value in signed().items()}, BODY, now=NOW)["id"] == "n-1"


@pytest.mark.parametrize(("off_s", "words"), [(301, "301 s ago"), (-301, "301 s in the future")])
def test_what_is_old_or_from_the_future_is_refused(off_s, words):
    assert verify(SECRET, signed(), BODY, now=NOW + off_s - off_s // 301)
    with pytest.raises(InvalidWebhook, match=words):
        verify(SECRET, signed(), BODY, now=NOW + off_s)


def test_now_is_now_unless_told_otherwise():
    assert verify(SECRET, signed(at=int(time.time())), BODY)
    with pytest.raises(InvalidWebhook, match="ago"):
        verify(SECRET, signed(), BODY)


@pytest.mark.parametrize("timestamp", ["", "soon", "-5", "1e9", "1" * 13, " 1700000000"])
def test_a_signed_timestamp_that_is_no_number_of_seconds_is_refused(timestamp):
    with pytest.raises(InvalidWebhook, match="number of seconds"):
        verify(SECRET, signed(at=timestamp), BODY, now=NOW)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"{", "not JSON"),
        (b"[]", "not the id in the header"),
        (b"{}", "not the id in the header"),
        (b'{"id":"n-2"}', "not the id in the header"),
    ],
)
def test_a_signed_body_that_is_about_something_else_is_refused(body, says):
    with pytest.raises(InvalidWebhook, match=says):
        verify(SECRET, signed(body), body, now=NOW)


def test_an_empty_secret_verifies_nothing():
    by_nobody = hmac.new(b"", b"1700000000.n-1." + BODY, hashlib.sha256).hexdigest()
    with pytest.raises(ValueError, match="empty secret"):
        verify("", {**signed(), "Perdure-Signature": f"v1={by_nobody}"}, BODY, now=NOW)


def test_another_secret_is_refused_and_neither_is_named():
    with pytest.raises(InvalidWebhook) as refused:
        verify("another", signed(), BODY, now=NOW)
    assert SECRET not in repr(refused.value)
    assert "another" not in str(refused.value).replace("another secret", "")


def test_the_module_needs_nothing_of_perdure():
    program = "import runpy, sys; runpy.run_path(sys.argv[1]); print(*(name for name in sys.modules if name.startswith('perdure')))"
    import perdure.webhooks

    path = str(perdure.webhooks.__file__)
    ran = subprocess.run([sys.executable, "-I", "-c", program, path], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout.split() == []


# --- where it may go -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "hosts"),
    [
        ("http://127.0.0.1:9/x", ()),
        ("http://[::1]:9/x", ()),
        ("http://LocalHost/x", ()),
        ("https://Hooks.Example.com/x?y=1", ("hooks.example.COM",)),
    ],
)
def test_loopback_and_hosts_that_are_listed_are_allowed(url, hosts):
    assert Endpoint(url, SECRET, hosts).host == url.split("//")[1].split("/")[0].lower().removesuffix(":9").strip("[]")


@pytest.mark.parametrize(
    ("url", "hosts", "says"),
    [
        ("http://hooks.example.com/", (), "only loopback"),
        ("http://127.0.0.2/", (), "only loopback"),
        ("http://localhost.evil.com/", (), "only loopback"),
        ("http://169.254.169.254/latest", ("hooks.example.com",), "webhook_hosts allows hooks.example.com"),
        ("http://127.0.0.1/", ("hooks.example.com",), "webhook_hosts allows"),
        ("http://a.hooks.example.com/", ("hooks.example.com",), "webhook_hosts allows"),
        ("http://hooks.example.com@evil.com/", ("hooks.example.com",), "user name"),
        ("http://ann:pw-canary@127.0.0.1/", (), "user name"),
        ("ftp://127.0.0.1/", (), "https:// or http://"),
        ("file:///etc/passwd", (), "https:// or http://"),
        ("127.0.0.1/x", (), "https:// or http://"),
        ("http:///x", (), "https:// or http://"),
        ("http://127.0.0.1:port/", (), "not a URL"),
        ("http://[::1/", (), "not a URL"),
        ("http://127.0.0.1/a b", (), "printable ASCII"),
        ("http://127.0.0.1/\r\nHost: evil", (), "printable ASCII"),
        ("http://127.0.0.1/ü", (), "printable ASCII"),
        ("http://127.0.0.1/#x", (), "fragment"),
    ],
)
def test_any_other_place_is_refused_by_name(url, hosts, says):
    with pytest.raises(InvalidInput, match=says) as refused:
        Endpoint(url, SECRET, hosts)
    assert "canary" not in str(refused.value)


def test_without_a_secret_nothing_is_sent_and_the_error_says_how_to_set_one():
    with pytest.raises(InvalidInput, match="PERDURE_WEBHOOK_SECRET"):
        Endpoint("http://127.0.0.1/", "", ())


def test_a_secret_that_can_be_guessed_is_refused_and_not_repeated():
    with pytest.raises(InvalidInput, match="has 31 characters and can be guessed; at least 32") as refused:
        Endpoint("http://127.0.0.1/", "k" * 31, ())
    assert "kkk" not in str(refused.value)
    Endpoint("http://127.0.0.1/", "k" * 32, ())


def test_an_endpoint_shows_neither_its_secret_nor_what_follows_the_host():
    endpoint = Endpoint("https://127.0.0.1/services/T0/token-canary", SECRET, ())
    assert endpoint.place == "https://127.0.0.1:443"
    assert "canary" not in repr(endpoint)


# --- sending ---------------------------------------------------------------------------------------------------------------


def post(url: str, hosts: tuple[str, ...] = (), body: bytes = BODY) -> Answer:
    async def main() -> Answer:
        return await Endpoint(url, SECRET, hosts).post(Threads(2), "n-1", body, NOW)

    return asyncio.run(main())


def test_what_is_sent_can_be_verified_by_the_receiver():
    with receiver() as there:
        assert post(there.url + "?team=7") == Accepted()
    [got] = there.received
    assert got.path == "/hook?team=7"
    assert got.headers["Content-Type"] == "application/json"
    assert got.headers["Host"] == f"127.0.0.1:{there.port}"
    assert verify(SECRET, got.headers, got.body, now=NOW)["id"] == "n-1"


@pytest.mark.parametrize(
    ("status", "answer"),
    [
        (201, Accepted()),
        (204, Accepted()),
        (410, ReceiverGone()),
        (400, NotDelivered("HTTP 400")),
        (429, NotDelivered("HTTP 429")),
        (500, NotDelivered("HTTP 500")),
    ],
)
def test_the_status_decides(status, answer):
    with receiver(says(status)) as there:
        assert post(there.url) == answer


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_a_failure_and_nobody_goes_there(status):
    with receiver() as elsewhere, receiver(says(status, Location=elsewhere.url)) as there:
        assert post(there.url) == NotDelivered(f"HTTP {status}; redirects are not followed")
    assert elsewhere.received == []


def test_a_proxy_of_the_environment_is_not_used(monkeypatch):
    with receiver() as proxy, receiver() as there:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "https_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.port}")
        assert post(there.url) == Accepted()
    assert (len(there.received), proxy.received) == (1, [])


def test_nobody_at_home_is_a_failure_with_its_reason():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: refused
        answer = post(f"http://127.0.0.1:{taken.getsockname()[1]}/")
    assert isinstance(answer, NotDelivered)
    assert "ConnectionRefusedError" in answer.why


def test_something_that_is_not_http_is_a_failure():
    def nonsense(handler):
        handler.wfile.write(b"SSH-2.0-OpenSSH_9.2\r\n")

    with receiver(nonsense) as there:
        answer = post(there.url)
    assert isinstance(answer, NotDelivered)
    assert "BadStatusLine" in answer.why


def test_an_answer_without_end_is_not_read_to_its_end(monkeypatch):
    monkeypatch.setattr(webhook, "_POLITENESS_S", 600.0)  # so that it is the size that ends it, and not the time
    sent, far_too_much = 0, 64 * 1024 * 1024

    def chatter(handler):
        nonlocal sent
        handler.send_response(200)
        handler.end_headers()
        while not there.closing.is_set() and sent < far_too_much:
            handler.wfile.write(b"x" * 65536)
            sent += 65536

    with receiver(chatter) as there:
        assert post(there.url) == Accepted()
    assert sent < far_too_much


def test_a_body_that_drips_in_does_not_undo_a_200(monkeypatch):
    monkeypatch.setattr(webhook, "_POLITENESS_S", 0.2)
    monkeypatch.setattr(webhook, "GIVE_UP_S", 600.0)  # so that only the politeness can end it

    def drip(handler):
        handler.send_response(200)
        handler.end_headers()
        while not there.closing.wait(0.02):
            handler.wfile.write(b".")

    with receiver(drip) as there:
        assert post(there.url) == Accepted()


@pytest.mark.parametrize(
    ("first", "answer"),
    [
        (b"", NotDelivered("no answer within 20 s")),
        (b"HTTP/1.1 2", NotDelivered("no answer within 20 s")),
        (b"HTTP/1.1 200 OK\r\nX-Drip: ", Accepted()),  # the rest never comes, but the receiver has said that it has it
    ],
    ids=["never answers", "status without end", "headers without end"],
)
def test_a_receiver_that_hangs_is_given_up_and_the_line_is_cut(monkeypatch, first, answer):
    monkeypatch.setattr(webhook, "GIVE_UP_S", 2.0)  # enough to connect and to write a line, also on a busy machine
    hung_up = threading.Event()

    def hang(handler):
        handler.wfile.write(first)
        handler.connection.settimeout(0.02)
        while not there.closing.is_set() and not hung_up.is_set():
            try:
                if handler.connection.recv(1) == b"":
                    hung_up.set()
            except TimeoutError:
                handler.wfile.write(b"." if first else b"")

    async def main() -> Answer:
        threads = Threads(1)
        first_answer = await Endpoint(there.url, SECRET, ()).post(threads, "n-1", BODY, NOW)
        monkeypatch.setattr(webhook, "GIVE_UP_S", 60.0)
        # The only thread is free again.
        assert await Endpoint(calm.url, SECRET, ()).post(threads, "n-2", BODY, NOW) == Accepted()
        return first_answer

    with receiver(hang) as there, receiver() as calm:
        assert asyncio.run(main()) == answer
        assert hung_up.wait(60)


def test_a_cancelled_send_cuts_the_line():
    hung_up = threading.Event()

    def wait(handler):
        if handler.connection.recv(1) == b"":
            hung_up.set()

    async def main() -> None:
        sending = asyncio.ensure_future(Endpoint(there.url, SECRET, ()).post(Threads(1), "n-1", BODY, NOW))
        async with asyncio.timeout(60):
            while not there.received:
                await asyncio.sleep(0.01)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        assert await asyncio.to_thread(hung_up.wait, 60)

    with receiver(wait) as there:
        asyncio.run(main())


# --- TLS -------------------------------------------------------------------------------------------------------------------


def test_a_certificate_that_nobody_vouches_for_is_refused(tmp_path):
    with receiver(tls=tmp_path / "localhost.pem") as there:
        answer = post(f"https://localhost:{there.port}/hook")
    assert isinstance(answer, NotDelivered)
    assert "CERTIFICATE_VERIFY_FAILED" in answer.why
    assert there.received == []


def test_a_certificate_must_be_for_the_host_and_then_it_is_sent(tmp_path, monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "localhost.pem"))
    with receiver(tls=tmp_path / "localhost.pem") as there:
        wrong = post(f"https://127.0.0.1:{there.port}/hook")
        right = post(f"https://localhost:{there.port}/hook")
    assert isinstance(wrong, NotDelivered)
    assert "CERTIFICATE_VERIFY_FAILED" in wrong.why
    assert right == Accepted()
    [got] = there.received
    assert json.loads(got.body)["id"] == "n-1"


def test_a_handshake_that_hangs_is_given_up(monkeypatch):
    monkeypatch.setattr(webhook, "GIVE_UP_S", 0.4)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        answer = post(f"https://127.0.0.1:{silent.getsockname()[1]}/")
    assert answer == NotDelivered("no answer within 20 s")
