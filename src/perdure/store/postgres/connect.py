"""Opening a connection: what durability rests on is looked at before the first statement, and no wait is without an end."""

from __future__ import annotations

import itertools
import os
import re
import socket
from typing import Any

import psycopg
from psycopg import conninfo
from psycopg.abc import PQGen
from psycopg.types.numeric import Int8BinaryDumper, Int8Dumper
from psycopg.types.string import StrDumper

from perdure.errors import InvalidInput, StoreError, StoreUnavailable
from perdure.store.descriptors import OUT_OF_FILES, TOO_MANY_FILES
from perdure.store.liveness import closed_in_children
from perdure.store.postgres import arrays
from perdure.store.postgres.clocks import Ahead, Asking
from perdure.store.postgres.faults import translated
from perdure.store.url import shown_url

OLDEST = 130000  # xid8 and pg_current_xact_id came with version 13
CONNECT_S = 5
ANSWER_S = 10.0  # how long a server may take to answer before its connection is closed
# How a server may ask who we are. Not in this list: "password", for which libpq would send the password as it is, and "md5", whose
# answer is as good as the password to whoever has seen it; a hostile server asks for one of these. By SCRAM the server learns neither.
# "none" is a server that does not ask (trust, peer, client certificates) and so learns nothing; "gss" is Kerberos.
REQUIRE_AUTH = "scram-sha-256,gss,none"
# Both give up by themselves on a peer that has vanished, also while nobody waits.
_KEEP_ALIVE = {"keepalives_idle": "10", "keepalives_interval": "5", "keepalives_count": "3", "tcp_user_timeout": "15000"}
_LOOK = """
SELECT current_setting('server_version_num')::int, current_setting('server_encoding'), current_setting('client_encoding'), pg_is_in_recovery(),
    current_setting('transaction_read_only') = 'on', current_setting('synchronous_commit'),
    (extract(epoch FROM clock_timestamp()) * 1000000)::bigint, host(inet_client_addr()), inet_client_port(), pg_backend_pid(),
    current_schema()
"""


class Connection(psycopg.Connection[tuple[Any, ...]]):
    """A connection that is closed when the server does not answer in time: a half-open peer would never answer at all."""

    answer_s = ANSWER_S
    ahead: Ahead  # of ours the server's clock was when this connection was made
    direct = False  # nobody stands between us and our server process: what the session remembers is ours
    schema = ""
    number = ""  # of the transaction that it is in
    for_tools = False  # a tool may have it in its hands
    _descriptor = -1

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.statements: dict[object, bytes] = {}  # what `wire` has prepared, and under which name
        self.numbers = itertools.count()

    def wait(self, gen: PQGen[Any], interval: float = 0.1, timeout: float | None = None) -> Any:
        try:
            return super().wait(gen, interval, self.answer_s if timeout is None else timeout)
        except psycopg.errors._WaitTimeout:
            if timeout is not None:
                raise  # whoever waits for notifications has asked for it
            self.close()
            raise psycopg.OperationalError(f"no answer within {self.answer_s:g} s") from None
        except psycopg.OperationalError:  # after the time-out, which is one of these too
            self._not_to_be_closed()
            raise

    def close(self) -> None:
        self._not_to_be_closed()
        super().close()

    def keep_from_children(self) -> None:
        """A child that a tool forks would keep the connection alive after this process has died, and with it the session's lock."""
        self._descriptor = self.fileno()
        closed_in_children.add(self._descriptor)

    def _not_to_be_closed(self) -> None:
        # libpq closes the socket of a connection that broke, and the number may belong to another file the next moment.
        closed_in_children.discard(self._descriptor)


def parameters(url: str) -> dict[str, Any]:
    """What the URL says, with an end to every wait where it says nothing about it."""
    try:
        said = conninfo.conninfo_to_dict(url)
    except psycopg.Error as error:
        words = " ".join(str(error).split())
        # It quotes what it did not understand, which may be a part of the password; not so a setting's name in its place.
        if "@" not in url.partition("?")[2] and (named := re.search(r'invalid URI query parameter: "(\w+)"', words)):
            raise InvalidInput(
                f"{shown_url(url)!r}: there is no setting {named[1]!r} for a connection; leave it out, or see to its spelling"
            ) from None
        raise _not_a_url(url, re.sub(r'"[^"]*"', '"…"', words)) from None
    address = url.partition("://")[2].partition("?")[0]
    if re.search("[/@]", address.rpartition("@")[0]) or not re.fullmatch(r"[\d,]*", str(said.get("port") or "")):
        # Somebody's password would be taken for a part of the address, and shown as such.
        raise _not_a_url(url, "something in it is not where it belongs")
    own_word = {} if os.environ.get("PGREQUIREAUTH") else {"require_auth": REQUIRE_AUTH}  # libpq reads the variable by itself
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
    """The database in messages: never with a password."""
    host = said.get("host") or said.get("hostaddr") or "the local socket"
    return f"PostgreSQL at {host}:{said.get('port') or 5432}/{said.get('dbname') or said.get('user') or ''}"


def connect(said: dict[str, Any], place: str, answer_s: float = ANSWER_S) -> Connection:
    """A connection on which every statement is a transaction of its own unless somebody begins one."""
    try:
        connection = Connection.connect(**said, autocommit=True, cursor_factory=psycopg.RawCursor)
    except psycopg.Error as error:
        raise translated(error, place) from None
    except OSError as error:
        # While it waits for the server psycopg has a descriptor of its own, and no error of its own for when there is none.
        why = TOO_MANY_FILES if error.errno in OUT_OF_FILES else f"{error.strerror}; nothing was sent, so that it can be tried again"
        raise StoreUnavailable(f"{place} cannot be reached: {why}") from None
    connection.answer_s = answer_s
    try:
        asking = Asking()
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
    # Behind a proxy that pools transactions the next statement may meet another server process, which has never heard of what was
    # prepared on this one. The number of the process tells, which a proxy makes up, and address and port, which are its own. Neither is
    # enough alone: a proxy on this machine may well get the same port number for its side that we have got for ours.
    connection.direct = process == connection.info.backend_pid and (host, port) == _own_address(connection)
    # A migration must see what others have committed while it waited for its turn, whatever the default is there.
    connection.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
    connection.prepare_threshold = 1 if connection.direct else None
    # One type for all numbers: PostgreSQL would choose by their size, and every choice is another statement to prepare.
    connection.adapters.register_dumper(int, Int8BinaryDumper)
    connection.adapters.register_dumper(int, Int8Dumper)
    connection.adapters.register_dumper(str, StrDumper)
    arrays.register(connection.adapters)
    return connection


def _check(place: str, version: int, encoding: str, ours: str, read_only: bool, commits: str, schema: str | None) -> None:
    if version < OLDEST:
        raise StoreError(f"{place} is PostgreSQL {version // 10000}, and perdure needs {OLDEST // 10000} or newer; upgrade the server")
    if encoding != "UTF8":
        raise StoreError(f"{place} keeps text as {encoding}, and a journal is UTF-8; create a database for it with ENCODING 'UTF8'")
    if ours != "UTF8":
        # What we send as UTF-8 would be kept as something else, and its hash would not be that of what is read.
        raise StoreError(f"{place} takes our text for {ours}; whatever stands in between must let client_encoding=UTF8 through")
    if read_only:
        raise StoreUnavailable(
            f"{place} takes no writes: it is a read-only standby, or default_transaction_read_only is on; connect to the primary"
        )
    if commits == "off":
        # G1: an acknowledged append survives what the server's own commit survives, and such a commit survives nothing.
        raise StoreError(
            f"{place}: synchronous_commit is off, so that a commit is told before it is kept; ALTER ROLE … SET synchronous_commit = on"
        )
    if schema is None:
        raise StoreError(f"{place}: this user has no schema to keep the journal in; create one and put it into its search_path")


def _own_address(connection: Connection) -> tuple[Any, Any]:
    """As the server would see it; a local socket has none."""
    try:
        with socket.socket(fileno=os.dup(connection.fileno())) as ours:
            address = ours.getsockname()
    except OSError:
        return (None, None)
    return (address[0], address[1]) if isinstance(address, tuple) else (None, None)
