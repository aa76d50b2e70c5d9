"""Translates PostgreSQL's errors into errors of perdure: one line that says what happened, why, and what to do.

Only the SQL of a transaction tool can raise an error of psycopg out of this package.
"""

from __future__ import annotations

import re
import struct

import psycopg

from perdure.errors import InvalidInput, StoreCorrupt, StoreError, StoreUnavailable
from perdure.store.api import Moved
from perdure.store.archive import moved_error
from perdure.store.cursor import Locked
from perdure.store.descriptors import TOO_MANY_FILES, are_used_up

# The server rolled the whole transaction back because of a concurrent transaction: do the work again.
_ROLLED_BACK = frozenset(("40001", "40P01"))
_FILES_OF_A_CONNECTION = 2  # the socket, and one file for the lookup of the host
_MOVED = "PM001"  # raised by perdure_check_open in the schema
_BUSY = {
    "53300": "has no connection left for us; raise max_connections, or use fewer or smaller workers (perdure keeps a few for each process)",
    "53100": "has no room on its disk; nothing was written: make room and try again",
    "53200": "is out of memory; nothing was written",
    "55P03": "kept us waiting for a row that another transaction has locked for too long; nothing was written: try again",
    "25P03": "ended our transaction because we had paused in it; nothing was written",
    "57014": "cancelled the statement; nothing was written: see statement_timeout and who cancels statements there",
    "25006": "takes no writes: it is a read-only standby, or default_transaction_read_only is on; connect to the primary",
}
_REFUSED = {
    "28": ("does not let us in", "check user and password in the URL, and pg_hba.conf"),
    "3D": ("has no such database", "create it first: createdb NAME"),
}
# If a connection cannot be made, libpq reports the server's message without its SQLSTATE. So the SQLSTATE is found by
# the words of the message. Without it, a wrong password is retried like a server that cannot be reached. This happens
# if the server's messages are not in English; the log shows the server's message.
_CONNECT_ERRORS = (
    (re.compile(r'database "[^"]*" does not exist'), "3D000"),
    (
        re.compile(
            r'authentication failed|authentication method requirement|no password supplied|no pg_hba\.conf entry|role "[^"]*" (?:does not exist|is not permitted to log in)'
            r"|pg_hba\.conf rejects connection|permission denied for database|server does not support SSL, but SSL was required"
        ),
        "28000",
    ),
    (re.compile("too many clients|too many connections|connection slots are reserved"), "53300"),
)

# Messages of libpq when it could not connect: nothing was sent, so the error need not say that nothing was
# acknowledged.
_NOT_REACHED = re.compile(
    "Connection refused|failed to resolve host|could not translate host name|Name or service not known|No route to host"
    "|Network is unreachable|No such file or directory"
)
_HOW_TO_GET_IN = (
    (
        re.compile("authentication method requirement"),
        (
            "the password was not sent: it goes out by SCRAM alone, not in clear text or as MD5; have pg_hba.conf ask for scram-sha-256, or, "
            "if you trust this server and the way to it, name its method in PERDURE_URL or --url: ?require_auth=METHOD"
        ),
    ),
    (re.compile("no password supplied"), "put the password into ~/.pgpass (mode 600) or PGPASSWORD"),
    (
        re.compile("server does not support SSL"),
        "sslmode in the URL asks for encryption, and the server offers none: switch ssl on there, or ask for less",
    ),
    (re.compile("no encryption"), "check user and password, and pg_hba.conf; if it wants encryption: sslmode=require in the URL"),
)


def is_loss(error: psycopg.Error) -> bool:
    """Is the connection gone, so that the outcome of the statement is unknown?"""
    state = error.sqlstate
    if state is None:
        return isinstance(error, psycopg.OperationalError | psycopg.InterfaceError)
    return state.startswith("08") or state in ("57P01", "57P02", "57P03", "57P04", "57P05", "25P03", "25P04")


def is_rolled_back(error: psycopg.Error) -> bool:
    """Was the error a deadlock or a serialization failure?

    Then nothing was written, and the work may be done again at once.
    """
    return error.sqlstate in _ROLLED_BACK


def is_crowded(error: psycopg.Error) -> bool:
    """Does the server lack something at the moment: are rows locked, or connections, memory or disk space used up?"""
    return error.sqlstate == "55P03" or (error.sqlstate or "").startswith("53")


def translated(error: psycopg.Error, where: str) -> StoreError:
    """The StoreError that tells the caller what to do. The type of the error says whether a retry makes sense."""
    said = _one_line(error)
    state = error.sqlstate or _connect_state(error, said)
    if state in _BUSY:
        return (Locked if state == "55P03" else StoreUnavailable)(_BUSY[state], where=where)
    if state[:2] in _REFUSED:
        refused, usual = _REFUSED[state[:2]]
        way_out = next((way_out for words, way_out in _HOW_TO_GET_IN if words.search(said)), usual)
        return StoreError(refused, where=where, hint=f"({said}); {way_out}")
    if not error.sqlstate and _NOT_REACHED.search(said):
        return StoreUnavailable("cannot be reached", where=where, hint=f"({said}); check host and port, and that the server is up")
    if not error.sqlstate and are_used_up(_FILES_OF_A_CONNECTION):
        return StoreUnavailable(f"cannot be reached: {TOO_MANY_FILES}", where=where)
    if is_loss(error) or state[:2] in ("53", "57", "58"):
        return StoreUnavailable("cannot be reached; nothing was acknowledged, so that it can be tried again", where=where, hint=f"({said})")
    if is_rolled_back(error):
        return StoreUnavailable(f"rolled our transaction back because of another one ({said}); nothing was written: try again", where=where)
    if state == _MOVED:
        moved, at, to_url = (error.diag.message_primary or "moved 0 ?").split(" ", 2)
        return moved_error(where, Moved(to_url, "", int(at), done=moved == "moved"))
    if state == "42501":
        return StoreError(
            f"cannot be used: this user may not do that ({said}); let the owner of the tables migrate and GRANT it: docs/security.md has the "
            "statements for workers, for who prunes or moves, and for who only looks",
            where=where,
            hint="perdure doctor lists what a worker lacks",
        )
    if state == "22003":
        return StoreError(
            f"cannot hold a number that large ({said}); nothing was written. Amounts and times have 64 bits; events, calls and epochs "
            "of a run are counted up to 2,147,483,647: end this run, and continue with a new run",
            where=where,
        )
    if state in ("42P01", "42703", "42883"):
        return StoreCorrupt(
            f"does not have perdure's tables as perdure created them ({said}); they were changed by hand: restore a backup", where=where
        )
    return StoreError(f"cannot do that: {said}", where=where)


def _connect_state(error: psycopg.Error, said: str) -> str:
    if not isinstance(error, psycopg.OperationalError):
        return ""
    return next((state for words, state in _CONNECT_ERRORS if words.search(said)), "")


def unstorable(error: UnicodeEncodeError | struct.error) -> InvalidInput:
    """The error for a value that no column can store."""
    if isinstance(error, UnicodeEncodeError):
        return InvalidInput(f"text with a lone surrogate cannot be stored: {ascii(error.object)[:80]}")
    return InvalidInput(f"a number of more than 64 bits cannot be stored ({error})")


def _one_line(error: psycopg.Error) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
