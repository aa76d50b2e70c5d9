"""Opens connections, checks the settings that durability needs, and compares the server's clock with the machine's."""

from __future__ import annotations

import itertools
import os
import re
import socket
import time
from typing import Any, NamedTuple, TypeVar

import psycopg
from psycopg import conninfo
from psycopg.abc import PQGen
from psycopg.adapt import AdaptersMap
from psycopg.types.numeric import Int8BinaryDumper, Int8Dumper
from psycopg.types.string import StrDumper

from perdure.errors import InvalidInput, StoreError, StoreUnavailable
from perdure.store.descriptors import OUT_OF_FILES, TOO_MANY_FILES
from perdure.store.liveness import closed_in_children
from perdure.store.postgres import arrays
from perdure.store.postgres.faults import translated
from perdure.store.url import shown_url

# -- the server's clock. This machine's wall clock may be set at any moment, even while the server is asked.
_SAME_US = 100_000  # clocks that differ by less count as equal
# The steady clock: a clock that cannot be set. If possible, a clock that also counts while the machine sleeps.
_STEADY = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class Ahead(NamedTuple):
    """How far the server's clock was ahead of this machine's wall clock when the server was asked."""

    us: int
    beyond_us: int  # how far the wall clock was ahead of the steady clock when the server was asked

    @classmethod
    def nothing(cls) -> Ahead:
        return cls(0, _beyond_us())

    def by_now_us(self) -> int:
        """How far the server's clock is ahead now: corrected if this machine's wall clock was set since then."""
        set_us = _beyond_us() - self.beyond_us
        return self.us - set_us if abs(set_us) > _SAME_US else self.us


class RoundTripClock:
    """Measures the difference of the clocks. Create the object right before the server is asked for its time."""

    def __init__(self) -> None:
        self._asked_us = _steady_us()

    def heard(self, server_us: int) -> Ahead:
        """The difference, given the server's answer.

        The difference is 0 if it is within the error of measurement, so that the time does not jitter.
        """
        heard_us, beyond_us = _steady_us(), _beyond_us()
        # Measure by the steady clock. The wall clock may be set between the question and this line: then this process
        # would have a wrong time, and sleeping runs would wake early.
        difference_us = server_us - (self._asked_us + heard_us) // 2 - beyond_us
        return Ahead(difference_us if abs(difference_us) > heard_us - self._asked_us + _SAME_US else 0, beyond_us)


def _steady_us() -> int:
    return time.clock_gettime_ns(_STEADY) // 1000


def _beyond_us() -> int:
    return time.time_ns() // 1000 - _steady_us()


# -- connections: the server's settings are checked first, and every wait has a timeout


OLDEST = 130000  # xid8 and pg_current_xact_id came with version 13
CONNECT_S = 5
ANSWER_S = 10.0  # how long a server may take to answer before its connection is closed
# The authentication methods that a server may ask for. "password" and "md5" are not in this list, because a hostile
# server would ask for them: with "password" libpq sends the password in clear text, and an answer to "md5" can be used
# like the password. With SCRAM the server learns nothing that it could use. "none": the server asks for no password
# (trust, peer, client certificates). "gss": Kerberos.
REQUIRE_AUTH = "scram-sha-256,gss,none"
# With these settings, the kernel closes a connection whose peer has vanished, even if no statement is under way.
_KEEP_ALIVE = {"keepalives_idle": "10", "keepalives_interval": "5", "keepalives_count": "3", "tcp_user_timeout": "15000"}
_LOOK = """
SELECT current_setting('server_version_num')::int, current_setting('server_encoding'), current_setting('client_encoding'), pg_is_in_recovery(),
    current_setting('transaction_read_only') = 'on', current_setting('synchronous_commit'),
    (extract(epoch FROM clock_timestamp()) * 1000000)::bigint, host(inet_client_addr()), inet_client_port(), pg_backend_pid(),
    current_schema()
"""


class Connection(psycopg.Connection[tuple[Any, ...]]):
    """A connection that is closed if the server does not answer in time: a vanished peer would never answer."""

    answer_s = ANSWER_S
    ahead: Ahead  # how far the server's clock was ahead of this machine's when this connection was made
    direct = False  # there is no proxy in between: the session on the server belongs to this connection alone
    schema = ""
    number = ""  # the id of the connection's present transaction
    for_tools = False  # this connection is lent to tools
    _descriptor = -1

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.statements: dict[object, bytes] = {}  # the statements that `wire` has prepared, with their names
        self.numbers = itertools.count()

    def wait(self, gen: PQGen[Any], interval: float = 0.1, timeout: float | None = None) -> Any:
        try:
            return super().wait(gen, interval, self.answer_s if timeout is None else timeout)
        except psycopg.errors._WaitTimeout:
            if timeout is not None:
                raise  # the caller waits for notifications and has set this timeout
            self.close()
            raise psycopg.OperationalError(f"no answer within {self.answer_s:g} s") from None
        except psycopg.OperationalError:  # must come after _WaitTimeout, which is a subclass
            self._not_to_be_closed()
            raise

    def close(self) -> None:
        self._not_to_be_closed()
        super().close()

    def keep_from_children(self) -> None:
        """Close the socket in forked children.

        Otherwise a child would keep the connection and its session lock open after the death of this process.
        """
        self._descriptor = self.fileno()
        closed_in_children.add(self._descriptor)

    def _not_to_be_closed(self) -> None:
        # libpq closes the socket of a broken connection. After that, its descriptor number may belong to another file.
        closed_in_children.discard(self._descriptor)


class JoinedConnection(Connection):
    """A second object around a connection that belongs to another object of psycopg."""

    def __del__(self, *_: Any) -> None:
        """psycopg would warn that this connection is still open. It is not ours to close."""


J = TypeVar("J", bound=JoinedConnection)


def around(kind: type[J], theirs: Any) -> J:
    """An object of this kind around the same connection of libpq."""
    pgconn = theirs.pgconn
    handlers = pgconn.notice_handler, pgconn.notify_handler
    ours = kind(pgconn)
    pgconn.notice_handler, pgconn.notify_handler = handlers  # what the server tells meanwhile is meant for the other object
    ours.prepare_threshold = None  # the session belongs to the other object, and may be behind a proxy
    return ours


def parameters(url: str) -> dict[str, Any]:
    """The connection parameters of the URL. If the URL has no timeouts, they are added."""
    try:
        said = conninfo.conninfo_to_dict(url)
    except psycopg.Error as error:
        words = " ".join(str(error).split())
        # The message quotes the text that libpq did not understand, and this text may be a part of the password. It is
        # shown only if it is clearly the name of a setting.
        if "@" not in url.partition("?")[2] and (named := re.search(r'invalid URI query parameter: "(\w+)"', words)):
            raise InvalidInput(
                f"{shown_url(url)!r}: there is no setting {named[1]!r} for a connection; remove it or correct its spelling"
            ) from None
        raise _not_a_url(url, re.sub(r'"[^"]*"', '"…"', words)) from None
    address = url.partition("://")[2].partition("?")[0]
    if re.search("[/@]", address.rpartition("@")[0]) or not re.fullmatch(r"[\d,]*", str(said.get("port") or "")):
        # libpq would treat a part of the password as a part of the address, and messages would show it.
        raise _not_a_url(url, "the user, the password or the port has a character that must be percent-encoded")
    # If PGREQUIREAUTH is set, libpq reads it itself: the user's choice counts.
    own_word = {} if os.environ.get("PGREQUIREAUTH") else {"require_auth": REQUIRE_AUTH}
    return {
        **own_word,
        "connect_timeout": CONNECT_S,
        "application_name": "perdure",
        "gssencmode": "disable",
        **_KEEP_ALIVE,
        **said,
        "client_encoding": "UTF8",
    }


def _not_a_url(url: str, why: str) -> InvalidInput:
    return InvalidInput(
        f"{shown_url(url)!r} is not the URL of a PostgreSQL database ({why}); its form is postgresql://user:password@host:port/database, and "
        "special characters in a part of it are written in percents: / as %2F, @ as %40"
    )


def where(said: dict[str, Any]) -> str:
    """The name of the database for messages, never with a password."""
    host = said.get("host") or said.get("hostaddr") or "the local socket"
    return f"PostgreSQL at {host}:{said.get('port') or 5432}/{said.get('dbname') or said.get('user') or ''}"


def connect(said: dict[str, Any], place: str, answer_s: float = ANSWER_S) -> Connection:
    """A connection in autocommit mode: outside of a transaction, every statement is a transaction of its own."""
    try:
        connection = Connection.connect(**said, autocommit=True, cursor_factory=psycopg.RawCursor)
    except psycopg.Error as error:
        raise translated(error, place) from None
    except OSError as error:
        # psycopg needs a descriptor to wait for the server, and raises a plain OSError if no descriptor is left.
        why = TOO_MANY_FILES if error.errno in OUT_OF_FILES else f"{error.strerror}; nothing was sent, so that it can be tried again"
        raise StoreUnavailable(f"cannot be reached: {why}", where=place) from None
    connection.answer_s = answer_s
    try:
        asking = RoundTripClock()
        found = connection.execute(_LOOK).fetchone()
        assert found is not None
        version, encoding, ours, standby, read_only, commits, server_us, host, port, process, schema = found
        connection.ahead = asking.heard(server_us)
        _check(place, version, encoding, ours, standby or read_only, commits, schema)
    except psycopg.Error as error:
        connection.close()
        raise translated(error, place) from None
    except BaseException:
        connection.close()
        raise
    connection.keep_from_children()
    connection.schema = schema
    # Behind a proxy that pools transactions, the next statement may reach another server process, which does not have
    # this connection's prepared statements. There are two signs of a proxy: the proxy invents the process id that it
    # reports, and the server sees the proxy's address and port instead of this connection's. One sign alone is not
    # enough: a proxy on this machine may by chance use the same port number to the server.
    connection.direct = process == connection.info.backend_pid and (host, port) == _own_address(connection)
    # Do not use the server's default: a migration must see what other processes have committed while it waited for its
    # lock.
    connection.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
    connection.prepare_threshold = 1 if connection.direct else None
    adapt(connection.adapters)
    return connection


def adapt(adapters: AdaptersMap) -> None:
    """Let psycopg send the parameters of perdure's statements."""
    # Use one type for all numbers: psycopg would choose the type by the size of the number, and the statement would be
    # prepared once for each type.
    adapters.register_dumper(int, Int8BinaryDumper)
    adapters.register_dumper(int, Int8Dumper)
    adapters.register_dumper(str, StrDumper)
    arrays.register(adapters)


def _check(place: str, version: int, encoding: str, ours: str, read_only: bool, commits: str, schema: str | None) -> None:
    if version < OLDEST:
        raise StoreError(f"is PostgreSQL {version // 10000}, and perdure needs {OLDEST // 10000} or newer; upgrade the server", where=place)
    if encoding != "UTF8":
        raise StoreError(f"stores text as {encoding}, and a journal is UTF-8; create a database with ENCODING 'UTF8'", where=place)
    if ours != "UTF8":
        # The server would convert the text that perdure sends as UTF-8, and the hash would not match the stored text.
        raise StoreError(
            f"has client_encoding {ours}, although perdure asked for UTF8; let the proxy in between pass client_encoding on", where=place
        )
    if read_only:
        raise StoreUnavailable(
            "takes no writes: it is a read-only standby, or default_transaction_read_only is on; connect to the primary", where=place
        )
    if commits == "off":
        # An acknowledged append must survive a crash of the server. With this setting, a commit may not survive it.
        raise StoreError(
            "cannot be used: synchronous_commit is off, so a commit is acknowledged before it is durable; "
            "ALTER ROLE … SET synchronous_commit = on",
            where=place,
        )
    if schema is None:
        raise StoreError(
            "cannot be used: this user has no schema for the journal; create a schema, and put it into the user's search_path", where=place
        )


def _own_address(connection: Connection) -> tuple[Any, Any]:
    """The connection's own address and port, as the server would see them; (None, None) for a local socket."""
    try:
        with socket.socket(fileno=os.dup(connection.fileno())) as ours:
            address = ours.getsockname()
    except OSError:
        return (None, None)
    return (address[0], address[1]) if isinstance(address, tuple) else (None, None)
