"""The connection of an effect="transaction" tool: only for its own tables, in a transaction that perdure ends.

SQLite has an authorizer, which can refuse every object of a statement. PostgreSQL has no authorizer, so the text of
each statement is checked here. This prevents mistakes: a tool cannot end perdure's transaction, or use perdure's
tables. It does not stop code that hides names (in a function, or in a string that is executed): against that, only the
server's own privileges help.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import psycopg
from psycopg.pq import TransactionStatus
from psycopg.types.numeric import IntDumper
from psycopg.types.string import StrDumperUnknown

from perdure.errors import InvalidInput, StoreError
from perdure.store.cursor import ConnectionGone
from perdure.store.postgres.connect import Connection
from perdure.store.postgres.faults import is_crowded, is_loss, is_rolled_back, translated

_ALLOWED = frozenset(
    ("select", "insert", "update", "delete", "merge", "with", "values", "table", "create", "alter", "drop", "truncate", "comment", "lock")
)
# The kinds of objects that a tool may create, alter and drop. Temporary objects are not allowed: they belong to the
# session, which another caller uses next.
_OWN = frozenset(("table", "unlogged", "index", "unique", "view", "materialized", "sequence", "type", "domain"))
_IDLE = "SET LOCAL idle_in_transaction_session_timeout = '60s'"  # the longest pause of a tool between two statements
_TOKEN = re.compile(
    r"""
    (?P<skip> --[^\r\n]* | /\*(?:[^*]|\*(?!/))*\*/ | \s+ )
  | (?P<text> [eE]'(?:[^'\\]|\\.|'')*' | '(?:[^']|'')*' | (?P<dollar>\$(?:[^\W\d]\w*)?\$)(?:.|\n)*?(?P=dollar) )
  | (?P<quoted> [uU]&"(?:[^"]|"")*" | "(?:[^"]|"")*" )
  | (?P<cast> :: )
  | :(?P<name> [A-Za-z_]\w* )
  | (?P<mark> \?\d* )
  | (?P<word> [A-Za-z_\u0080-\uffff][\w$\u0080-\uffff]* )
  | (?P<other> . )
    """,
    re.VERBOSE | re.DOTALL,
)


# Functions whose effect would stay in the session, for the connection's next user.
_SESSION = ("set_config", "pg_advisory_lock", "pg_try_advisory_lock")
_TEMPORARY = frozenset((("into", "temp"), ("into", "temporary")))


class ToolConnection:
    """SQL on the journal's own database.

    What the tool writes is committed together with the call's result, or not at all.

    Parameters are written as on SQLite, so that one tool works with both databases: `?` with a list, or `:name` with
    a dict.
    """

    def __init__(self, connection: Connection, where: str, alchemy: Callable[[], Any]) -> None:
        self._connection: Connection | None = connection
        self._where = where
        self._gone: ConnectionGone | None = None
        self._one_at_a_time = threading.Lock()
        self._alchemy = alchemy
        self._made: Any = None  # the Connection of SQLAlchemy …
        self._session: Any = None  # … and the Session
        self._rolled_back = False

    def execute(self, sql: str, params: Any = ()) -> list[tuple[Any, ...]]:
        """Run the statement. Returns all rows of the statement."""
        return self._run(sql, [params])

    def executemany(self, sql: str, params: Iterable[Any]) -> list[tuple[Any, ...]]:
        """Run the statement once for each set of parameters. Returns all rows."""
        return self._run(sql, list(params))

    def sqlalchemy(self) -> Any:
        """A Connection of SQLAlchemy in this transaction."""
        if self._made is None:
            self._made = self._alchemy().connect(self, self._open())
        return self._made

    def session(self) -> Any:
        """A Session of SQLAlchemy in this transaction."""
        if self._session is None:
            self._session = self._alchemy().session(self.sqlalchemy())
        return self._session

    def give_up(self) -> None:
        """SQLAlchemy has rolled back: nothing more can be written, and the call has failed, whatever the tool returns."""
        self._rolled_back = True

    @contextmanager
    def permitted(self, sql: Any) -> Iterator[None]:
        """Run a statement of SQLAlchemy. InvalidInput if a tool may not run it."""
        _numbered(sql if isinstance(sql, str) else str(sql), numbers=False)
        try:
            with self._one_at_a_time:
                self._open()
                yield
        except psycopg.Error as error:
            if is_loss(error) or is_rolled_back(error) or is_crowded(error):
                self._gone = translated(error, self._where).again(ConnectionGone)
            raise

    def _flush(self) -> None:
        if self._session is not None:
            self._session.flush()

    def _end(self) -> None:
        with self._one_at_a_time:
            self._connection = None
        for opened in (self._session, self._made):
            if opened is not None:
                opened.close()

    def _run(self, sql: str, many: Sequence[Any]) -> list[tuple[Any, ...]]:
        text, names = _numbered(sql)
        cursor = psycopg.RawCursor(self._open())
        # Send text without a type, so that the server converts the text to the column's type: a date, a uuid, JSON.
        cursor.adapters.register_dumper(str, StrDumperUnknown)
        cursor.adapters.register_dumper(int, IntDumper)
        rows: list[tuple[Any, ...]] = []
        for params in many:
            try:
                with self._one_at_a_time:
                    self._open()  # check each time: a thread of the tool must not continue after the tool has returned
                    cursor.execute(text.encode(), _in_order(sql, names, params), prepare=False)
            except psycopg.Error as error:
                if not (is_loss(error) or is_rolled_back(error) or is_crowded(error)):
                    raise
                self._gone = translated(error, self._where).again(ConnectionGone)
                raise self._gone from None
            rows += cursor.fetchall() if cursor.description is not None else []
        return rows

    def _open(self) -> Connection:
        if self._connection is None:
            raise StoreError("call.connection was used after its tool had returned; do all the work inside the tool")
        if self._rolled_back or self._connection.closed or self._connection.pgconn.transaction_status != TransactionStatus.INTRANS:
            raise StoreError(
                "the tool's transaction has failed: after an error no statement can run in it; do not catch the error inside the tool"
            )
        return self._connection


@contextmanager
def confined(connection: Connection, where: str, alchemy: Callable[[], Any]) -> Iterator[ToolConnection]:
    """The connection for the tool, until the tool ends. `alchemy` returns an object of tool_alchemy."""
    handle = ToolConnection(connection, where, alchemy)
    ours(connection, where, _IDLE)
    try:
        yield handle
        handle._flush()
        # Even if the tool has caught an error of the server, the server rolls the transaction back: the call has
        # failed.
        if handle._rolled_back or connection.pgconn.transaction_status != TransactionStatus.INTRANS:
            raise StoreError("one of the tool's statements failed, so that its transaction was rolled back; nothing has happened")
    except BaseException:
        if handle._gone is not None:  # the database failed, even if the tool has raised another error instead
            raise handle._gone from None
        raise
    finally:
        handle._end()


def ours(connection: Connection, where: str, statement: str) -> tuple[Any, ...] | None:
    """Run a statement of perdure in the tool's transaction. If the statement fails, the tool is not to blame."""
    try:
        cursor = connection.execute(statement.encode())
        return cursor.fetchone() if cursor.description is not None else None
    except psycopg.Error as error:
        raise ConnectionGone(str(translated(error, where))) from None


def _numbered(sql: str, *, numbers: bool = True) -> tuple[str, list[str] | None]:
    """The statement with numbered parameters, and the parameters' names. InvalidInput if a tool may not run it."""
    out: list[str] = []
    names: list[str] = []
    words: list[str] = []
    marks = 0
    ended = False
    for token in _TOKEN.finditer(sql):
        kind, text = token.lastgroup, token[0]
        if kind == "word":
            words.append(text.lower())
        # If a text has no parameters, the server would run several statements in it, even a COMMIT after a semicolon.
        if (ended and kind != "skip") or (kind in ("word", "quoted") and _is_ours(text.lower())):
            raise _not_allowed(sql)
        ended = ended or text == ";"
        if kind == "name":
            if token["name"] not in names:
                names.append(token["name"])
            text = f"${names.index(token['name']) + 1}"
        elif kind == "mark":
            marks += 1
            text = f"${text[1:] or marks}"
        out.append(text)
    if not _is_allowed(words):
        raise _not_allowed(sql)
    if names and marks and numbers:
        raise InvalidInput(f"{' '.join(sql.split())[:80]!r} mixes ? and :name; use one of them")
    return "".join(out), names or None


def _is_ours(word: str) -> bool:
    return "perdure" in word or word.startswith("u&")


def _is_allowed(words: list[str]) -> bool:
    if any(word.startswith(_SESSION) for word in words) or any(pair in _TEMPORARY for pair in pairwise(words)):
        return False
    if words[:1] in (["create"], ["alter"], ["drop"]):
        made = words[3:] if words[1:3] == ["or", "replace"] else words[1:]
        return bool(made) and made[0] in _OWN
    return bool(words) and words[0] in _ALLOWED


def _in_order(sql: str, names: list[str] | None, params: Any) -> list[Any]:
    if names is None:
        if isinstance(params, Mapping):
            if params:
                raise InvalidInput(
                    f"{' '.join(sql.split())[:80]!r} has no :name, and was given {', '.join(map(str, params))}; use ? and a list"
                )
            return []
        return list(params)
    if not isinstance(params, Mapping):
        raise InvalidInput(f"{' '.join(sql.split())[:80]!r} has named parameters; give a dict")
    missing = [name for name in names if name not in params]
    if missing:
        raise InvalidInput(f"{' '.join(sql.split())[:80]!r} needs a value for :{missing[0]}")
    return [params[name] for name in names]


def _not_allowed(sql: str) -> InvalidInput:
    return InvalidInput(
        f"a transaction tool may not run {' '.join(sql.split())[:80]!r}: one statement at a time, no transaction control, no SET, no COPY, "
        "no DO or CALL, nothing in perdure's own tables and nothing temporary; use tables of your own"
    )
