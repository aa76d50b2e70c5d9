"""What an exception means for its call: real exceptions of the standard library, and imitations of HTTP libraries."""

from __future__ import annotations

import asyncio
import copy
import http.client
import http.server
import socket
import ssl
import threading
import urllib.error
import urllib.request
from datetime import UTC, datetime, timedelta

import msgspec
import pydantic
import pytest

from perdure.core.events import Failure
from perdure.core.failures import IN_DOUBT_KINDS, MAX_MESSAGE_CHARS, describe
from perdure.errors import Fatal, InvalidInput, NotEncodable, NotSent, RetryLater


def raised_by(work) -> BaseException:
    try:
        work()
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# --- real exceptions of the standard library -------------------------------------------------------------------------


def test_a_refused_connection_is_proof_that_nothing_was_sent():
    error = raised_by(lambda: socket.create_connection(("127.0.0.1", closed_port())))
    assert describe(error).kind == "not_sent"


def test_urllib_hides_a_refused_connection_in_its_reason():
    error = raised_by(lambda: urllib.request.urlopen(f"http://127.0.0.1:{closed_port()}/"))
    assert isinstance(error, urllib.error.URLError)
    assert describe(error).kind == "not_sent"


def test_asyncio_hides_several_refused_connections_in_a_text():
    async def connect() -> None:
        await asyncio.open_connection(host="localhost", port=closed_port())

    assert describe(raised_by(lambda: asyncio.run(connect()))).kind == "not_sent"
    both = OSError("Multiple exceptions: [Errno 111] Connect call failed ('::1', 1), [Errno 111] Connect call failed ('127.0.0.1', 1)")
    assert describe(both).kind == "not_sent"


@pytest.fixture
def server():
    """Answers with the status in the path and a Retry-After; /cut closes the line without an answer."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/cut":
                self.connection.close()
                return
            self.send_response(int(self.path[1:]))
            self.send_header("Retry-After", "7")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("status", "kind", "retry_after_s"),
    [(429, "rate_limited", 7.0), (500, "server_error", 7.0), (503, "server_error", 7.0), (404, "refused", 7.0), (408, "timeout", 7.0)],
)
def test_the_status_of_an_answer_decides(server, status, kind, retry_after_s):
    error = raised_by(lambda: urllib.request.urlopen(f"{server}/{status}"))
    assert isinstance(error, urllib.error.HTTPError)
    found = describe(error)
    error.close()
    assert (found.kind, found.retry_after_s) == (kind, retry_after_s)


def test_a_line_that_breaks_before_the_answer_is_in_doubt(server):
    error = raised_by(lambda: urllib.request.urlopen(f"{server}/cut"))
    assert isinstance(error, http.client.RemoteDisconnected)
    assert describe(error).kind == "reset"


def test_a_time_out_of_a_real_socket_is_in_doubt():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        client = socket.create_connection(listening.getsockname(), timeout=0.01)
        error = raised_by(lambda: client.recv(1))
        client.close()
    assert describe(error).kind == "timeout"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (NotSent("x"), "not_sent"),
        (socket.gaierror(-2, "Name or service not known"), "not_sent"),
        (OSError(99, "Cannot assign requested address"), "not_sent"),
        (ssl.SSLCertVerificationError("certificate verify failed"), "not_sent"),
        (RetryLater(after=3), "rate_limited"),
        (TimeoutError(), "timeout"),
        (OSError(110, "Connection timed out"), "timeout"),
        (ConnectionResetError(), "reset"),
        (ConnectionAbortedError(), "reset"),
        (BrokenPipeError(), "reset"),
        (OSError(113, "No route to host"), "reset"),
        (asyncio.IncompleteReadError(b"", 4), "reset"),
        (http.client.IncompleteRead(b""), "reset"),
        (PermissionError(13, "no"), "refused"),
        (InvalidInput("x"), "refused"),
        (NotEncodable("x"), "refused"),
        (raised_by(lambda: pydantic.TypeAdapter(int).validate_python("x")), "refused"),
        (raised_by(lambda: msgspec.json.decode(b'"x"', type=int)), "refused"),
        (Fatal("x"), "fatal"),
        (asyncio.CancelledError(), "cancelled"),
        (ValueError("x"), "error"),
        (KeyError("x"), "error"),
        (FileNotFoundError(2, "no"), "error"),
        (KeyboardInterrupt(), "error"),
        (SystemExit(500), "error"),
        (StopIteration(), "error"),
        (GeneratorExit(), "error"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_kinds(error, kind):
    assert describe(error).kind == kind


# --- libraries that are not imported: the same names, bases and attributes --------------------------------------------------


class Response:
    def __init__(self, status_code: int, headers: dict[str, str] | None = None) -> None:
        self.status_code = status_code
        self.headers = headers or {}


def like(path: str, *args: object, **attributes: object) -> Exception:
    """An exception whose class has these names, outermost base first: "HTTPError > TransportError > ConnectError"."""
    kind: type[Exception] = Exception
    for name in path.split(" > "):
        kind = type(name, (kind,), {})
    error = kind(*args)
    for name, value in attributes.items():
        setattr(error, name, value)
    return error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (like("HTTPError > RequestError > TransportError > NetworkError > ConnectError"), "not_sent"),
        (like("RequestError > TransportError > TimeoutException > ConnectTimeout"), "not_sent"),
        (like("RequestError > TransportError > TimeoutException > PoolTimeout"), "not_sent"),
        (like("RequestError > TransportError > TimeoutException > ReadTimeout"), "timeout"),
        (like("RequestError > TransportError > TimeoutException > WriteTimeout"), "timeout"),
        (like("RequestError > TransportError > NetworkError > ReadError"), "reset"),
        (like("RequestError > TransportError > ProtocolError > RemoteProtocolError"), "reset"),
        (like("HTTPError > HTTPStatusError", response=Response(502)), "server_error"),
        (like("HTTPError > HTTPStatusError", response=Response(422)), "refused"),
        (like("RequestException > ConnectionError", like("MaxRetryError", reason=like("HTTPError > NewConnectionError"))), "not_sent"),
        (like("RequestException > ConnectionError", like("ProtocolError", "aborted", ConnectionResetError())), "reset"),
        (like("RequestException > ConnectionError", "who knows"), "reset"),
        (like("RequestException > Timeout > ReadTimeout"), "timeout"),
        (like("ClientError > ClientConnectionError > ClientOSError > ClientConnectorError"), "not_sent"),
        (like("ClientError > ClientConnectionError > ServerConnectionError > ServerDisconnectedError"), "reset"),
        (like("ClientError > ClientResponseError", status=503, headers={}), "server_error"),
        (like("ClientError > ClientResponseError > ContentTypeError", status=200), "error"),
        (
            like("OpenAIError > APIError > APIStatusError > RateLimitError", status_code=429, response=Response(429), code="quota"),
            "rate_limited",
        ),
        (like("OpenAIError > APIError > APIConnectionError"), "reset"),
        (like("OpenAIError > APIError > APIConnectionError > APITimeoutError"), "timeout"),
        (like("Anything", status_code=True, status="500", code=lambda: 503), "error"),
    ],
)
def test_http_libraries_are_known_by_the_look_of_their_exceptions(error, kind):
    assert describe(error).kind == kind


def test_a_wrapper_knows_less_than_its_cause():
    error = like("APIError > APIConnectionError > APITimeoutError")
    error.__cause__ = like("TransportError > TimeoutException > ConnectTimeout")
    assert describe(error).kind == "not_sent"
    error.__cause__ = like("TransportError > TimeoutException > ReadTimeout")
    assert describe(error).kind == "timeout"


def test_an_error_of_the_tool_itself_is_not_explained_by_what_it_was_handling():
    def fall_back() -> None:
        try:
            raise ConnectionRefusedError
        except ConnectionRefusedError:
            raise KeyError("fallback")  # noqa: B904 – that there is no `from` is the point

    assert describe(raised_by(fall_back)).kind == "error"


def test_causes_that_lead_in_a_circle_end():
    one, two = ValueError("one"), ValueError("two")
    one.__cause__, two.__cause__ = two, one
    assert describe(one).kind == "error"


# --- how long to wait -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("after", "waits_s"),
    [
        (3, 3.0),
        (0, 0.0),
        (-1, None),
        (1e9, 86_400.0),
        (float("nan"), None),
        (float("inf"), 86_400.0),
        (timedelta(minutes=2), 120.0),
        ("x", None),
    ],
)
def test_what_a_tool_says_about_waiting_is_made_sane(after, waits_s):
    assert describe(RetryLater(after=after)).retry_after_s == waits_s


@pytest.mark.parametrize(
    ("headers", "waits_s"),
    [
        ({"retry-after": "12"}, 12.0),
        ({"Retry-After": "0.5"}, 0.5),
        ({"retry-after-ms": "1500", "retry-after": "9"}, 1.5),
        ({"retry-after": "-1"}, None),
        ({"retry-after": "1e9"}, 86_400.0),
        ({"retry-after": "nan"}, None),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "Wed, 21 Oct 2015 07:28:30 GMT", "date": "Wed, 21 Oct 2015 07:28:00 GMT"}, 30.0),
        ({"retry-after": "Wed, 21 Oct 2015 07:28:30 GMT"}, 90.0),  # no Date: our own clock has to do
        ({"retry-after": "Wed, 21 Oct 2015 06:00:00 GMT"}, 0.0),
        ({"retry-after": "Wed, 99 Oct 2015 06:00:00 GMT"}, None),
        ({}, None),
    ],
)
def test_what_a_server_says_about_waiting_is_made_sane(headers, waits_s):
    now = datetime(2015, 10, 21, 7, 27, 0, tzinfo=UTC)
    assert describe(like("HTTPStatusError", response=Response(429, headers)), now).retry_after_s == waits_s


# --- groups -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("members", "kind"),
    [
        ([NotSent(), ConnectionRefusedError()], "not_sent"),
        ([NotSent(), TimeoutError()], "timeout"),
        ([Fatal(), ConnectionResetError()], "reset"),
        ([NotSent(), RetryLater(after=5)], "rate_limited"),
        ([ValueError(), NotSent()], "error"),
        ([ExceptionGroup("inner", [NotSent(), TimeoutError()]), NotSent()], "timeout"),
    ],
)
def test_of_several_errors_the_most_doubtful_one_decides(members, kind):
    assert describe(ExceptionGroup("several", members)).kind == kind


def test_the_message_of_a_group_names_its_members():
    message = describe(ExceptionGroup("both failed", [ValueError("left"), KeyError("right")])).message
    assert "both failed" in message
    assert "ValueError: left" in message
    assert "KeyError: 'right'" in message


def test_a_group_as_the_cause_is_looked_into():
    error = OSError("All connection attempts failed")
    error.__cause__ = ExceptionGroup("multiple", [ConnectionRefusedError(), ConnectionRefusedError()])
    assert describe(error).kind == "not_sent"


# --- what is recorded ------------------------------------------------------------------------------------------------


def test_everything_about_a_failure_can_be_stored():
    class Broken(Exception):
        def __str__(self) -> str:
            raise SystemExit

    for error in (Broken(), ValueError("\ud800 \0 " + "x" * 10_000), type("N" * 999, (Exception,), {})("m")):
        found = describe(error)
        assert msgspec.json.decode(msgspec.json.encode(found), type=Failure) == found
        assert len(found.message) <= MAX_MESSAGE_CHARS
        assert len(found.type) <= 200


def test_a_str_that_is_not_a_plain_str_is_made_one():
    class Odd(str):
        __slots__ = ()

        def __getitem__(self, key: object) -> str:
            raise RuntimeError("hostile")

    class Error(Exception):
        def __str__(self) -> str:
            return Odd("words")

    assert describe(Error()).message == "words"


def test_a_property_that_raises_does_not_hide_the_failure():
    class Sneaky(Exception):
        @property
        def response(self) -> object:
            raise RuntimeError("not loaded")

    found = describe(Sneaky("original"))
    assert (found.kind, found.type, found.message) == ("error", "Sneaky", "original")


def test_type_and_lineage_let_a_policy_match_base_classes():
    found = describe(ConnectionResetError("x"))
    assert found.type == "ConnectionResetError"
    assert found.lineage == ("ConnectionError", "OSError", "Exception")


def test_the_traceback_is_the_innermost_five_places():
    def dig(depth: int) -> None:
        if depth == 0:
            raise ValueError("bottom")
        dig(depth - 1)

    lines = (describe(raised_by(lambda: dig(20))).traceback or "").splitlines()
    assert len(lines) == 5
    assert all(line.endswith("dig") and "test_failures.py:" in line for line in lines)
    assert describe(ValueError("never raised")).traceback is None


def test_the_innermost_place_of_the_users_code_is_kept_if_the_others_are_of_libraries():
    def deep() -> None:
        copy.deepcopy([[[[[[threading.Lock()]]]]]])  # a lock cannot be copied, and the library says so far inside

    lines = (describe(raised_by(deep)).traceback or "").splitlines()
    assert len(lines) == 5
    assert lines[0].endswith("deep"), lines
    assert all("copy.py:" in line for line in lines[1:])


def test_the_kinds_in_doubt_are_those_after_which_it_may_have_happened():
    assert {"timeout", "reset", "server_error", "not_saved", "process_died", "cancelled"} == IN_DOUBT_KINDS
