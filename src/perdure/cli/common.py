"""Shared by all verbs: exit codes, errors in one line, escaped output, times, `--url`, `--json`, and completion."""

from __future__ import annotations

import errno
import functools
import json
import logging
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO, TypeVar, cast

import click

from perdure import errors, shell
from perdure.core.invisible import all_printable, escaped, is_visible
from perdure.core.times import iso as iso

if TYPE_CHECKING:
    from perdure.engine.api import Reading
    from perdure.settings import Settings
    from perdure.store.api import Store

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")
R = TypeVar("R", bound="Reading")

# -- exit codes -------------------------------------------------------------------------------------------------------
SUCCEEDED = 0
FAILED = 1
USAGE = 2
WAITING = 3
NEEDS_ATTENTION = 4
CANCELLED = 5
NOT_FOUND = 6
DIFFERENT = 7
HELD = 8
BUG = 70  # EX_SOFTWARE: a bug in perdure, and not a failed run
PIPE_CLOSED = 141  # the code that a shell reports after SIGPIPE

CODE_OF_STATUS: dict[str, int] = {
    "succeeded": SUCCEEDED,
    "failed": FAILED,
    "cancelled": CANCELLED,
    "needs_attention": NEEDS_ATTENTION,
    "queued": WAITING,
    "running": WAITING,
    "waiting": WAITING,
    "waiting_approval": WAITING,
    "paused": WAITING,
    "cancelling": WAITING,
}

# The first match counts, so a subclass comes before its base.
_CODE_OF_ERROR: tuple[tuple[type[errors.PerdureError], int], ...] = (
    (errors.NotFound, NOT_FOUND),
    (errors.AlreadyRunning, HELD),
    (errors.Diverged, DIFFERENT),
    (errors.RunFailed, FAILED),
    (errors.RunCancelled, CANCELLED),
    (errors.NeedsAttention, NEEDS_ATTENTION),
    (errors.ResultTimeout, WAITING),
    (errors.Fenced, HELD),
    (errors.PerdureError, USAGE),  # InvalidInput, Conflict, StoreError and others: the user must correct something
)


def code_of_error(error: errors.PerdureError) -> int:
    """The exit code for this error."""
    return next(code for kind, code in _CODE_OF_ERROR if isinstance(error, kind))


# -- errors -----------------------------------------------------------------------------------------------------------
class ExitWith(click.ClickException):
    """Ends the program with one line on stderr and this exit code."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class PipeClosed(click.ClickException):
    """The program that reads stdout has closed the pipe."""

    def __init__(self) -> None:
        super().__init__("stdout is closed")


class OutputLost(OSError):
    """A write to stdout failed. This is a separate class, because the OSError of a write does not name the file."""


class Stdout:
    """A stream that raises OutputLost if a write fails. If the pipe is closed, it raises BrokenPipeError."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        return self._do(lambda: self._stream.write(text))

    def flush(self) -> None:
        self._do(self._stream.flush)

    def _do(self, work: Callable[[], T]) -> T:
        try:
            return work()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise OutputLost(error.errno, error.strerror) from None


def fail(message: str, code: int = USAGE) -> NoReturn:
    """End the program with this exit code, and print `perdure: message` on stderr."""
    raise ExitWith(message, code)


def report(error: BaseException) -> int:
    """Print the error in one line on stderr, and return the exit code for the error."""
    if isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        return report(error.exceptions[0])
    if os.environ.get("PERDURE_DEBUG") and not isinstance(error, (SystemExit, click.exceptions.Exit)):
        traceback.print_exception(error)
    match error:
        case SystemExit():
            return error.code if isinstance(error.code, int) else int(error.code is not None)
        case click.exceptions.NoArgsIsHelpError():
            click.echo(error.format_message(), err=True)
            return USAGE
        case click.UsageError():
            verb = error.ctx.command_path if error.ctx else "perdure"
            return _line(f"{error.format_message().rstrip('.')}; usage: {verb} --help", USAGE)
        case PipeClosed() | BrokenPipeError():
            _send_to_devnull(1)
            return PIPE_CLOSED
        case ExitWith():
            return _line(error.message, error.code)
        case click.ClickException():
            return _line(error.format_message(), USAGE)
        case errors.InvalidPlan() | errors.InvalidQuery():
            first, *others = error.lines
            _line(first, USAGE)
            for other in others:
                note(clean(f"  {other}"))
            return code_of_error(error)
        case errors.PerdureError():
            return _line(error.in_full(), code_of_error(error))
        case KeyboardInterrupt() | click.Abort():
            return 130
        case OutputLost():
            _send_to_devnull(1)
            return _line(f"cannot write the output (stdout): {error.strerror}; free space there, or write it to another place", USAGE)
        case OSError():
            way_out = "; raise the limit for this process (ulimit -n)" if error.errno in (errno.EMFILE, errno.ENFILE) else ""
            return _line((f"{error.filename}: {error.strerror}" if error.filename else str(error)) + way_out, USAGE)
        case _:
            return _line(f"a bug: {type(error).__name__}: {error} (PERDURE_DEBUG=1 shows the traceback)", BUG)


def flush_stderr() -> None:
    """Flush stderr at the end of the program. If a write fails, drop the rest: the exit code still shows the error."""
    try:
        sys.stderr.flush()
    except OSError:
        _send_to_devnull(2)


def _send_to_devnull(descriptor: int) -> None:
    # Send the rest to /dev/null: otherwise the interpreter's flush at exit fails, and the process exits with 120.
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, descriptor)
    os.close(devnull)


def _line(message: str, code: int) -> int:
    try:
        print(f"perdure: {clean(message)}", file=sys.stderr)
    except OSError:
        pass  # stderr is closed too; the exit code still shows the error
    return code


# -- escaping text for terminals --------------------------------------------------------------------------------------
def clean(text: str, keep: str = "") -> str:
    """The text with all control, bidi, zero-width and other invisible characters escaped, except those in `keep`.

    Call this for all text from tools and models before the text is printed. Then the text can neither move the cursor
    nor reorder a line.
    """
    return escaped(text, keep)


def to_json(value: Any) -> str:
    """One line of JSON; control characters and invisible characters are written as \\u escapes."""
    return _json_escaped(json.dumps(value, ensure_ascii=False, allow_nan=False))


def json_lines(value: Any, width: int = 100) -> list[str]:
    """JSON for people, escaped like `to_json`. It is one line if this line fits into `width`; else it is indented."""
    short = to_json(value)
    if len(short) <= width:
        return [short]
    # A line end inside a string is written as \\n, so this splits only at the line ends of the indentation.
    lines = json.dumps(value, ensure_ascii=False, allow_nan=False, indent=2).split("\n")
    return [_json_escaped(line) for line in lines]


def _json_escaped(text: str) -> str:
    return text if all_printable(text) else "".join(char if is_visible(char) else _json_escape(char) for char in text)


def _json_escape(char: str) -> str:
    units = char.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2))


# -- output -----------------------------------------------------------------------------------------------------------
STATUS_COLOURS: Mapping[str, str] = {
    "succeeded": "green",
    "failed": "red",
    "needs_attention": "red",
    "cancelled": "yellow",
    "cancelling": "yellow",
    "running": "cyan",
    "waiting_approval": "magenta",
}


def out(line: str = "") -> None:
    """Print a line of the result on stdout. The caller must `clean` all recorded text and all text of the user."""
    print(line, file=_results or sys.stdout)


def flush() -> None:
    """Flush stdout. BrokenPipeError if the pipe is closed; OutputLost if the write fails, as on a full disk."""
    (_results or sys.stdout).flush()


def out_json(value: Any) -> None:
    """Print one JSON document on stdout, as one line."""
    print(to_json(value), file=_results or sys.stdout)


def out_exact(data: bytes) -> None:
    """Write exactly these bytes to stdout, so that a program can hash the output. On a terminal a line end follows."""
    stream = _results or sys.stdout
    stream.flush()
    stream.buffer.write(data + b"\n" if stream.isatty() else data)


SHOWN = 200  # how many events, calls, approvals or children a terminal shows without --all


def most_shown() -> int:
    """How many lines of a kind to show: on a terminal SHOWN, in a file or a pipe all."""
    return SHOWN if sys.stdout.isatty() else sys.maxsize


def note(line: str) -> None:
    """Print a line of progress or advice on stderr. If stderr is closed, drop the line: the work must continue."""
    try:
        print(line, file=sys.stderr, flush=True)
    except OSError:
        pass


def with_progress(items: Iterable[T], total: int) -> Iterator[T]:
    """The items, with a progress bar on stderr if stderr is a terminal."""
    if not sys.stderr.isatty():
        yield from items
        return
    with click.progressbar(length=total, file=sys.stderr) as bar:
        for item in items:
            yield item
            bar.update(1)


def coloured() -> bool:
    """Does stdout show colours? Only if stdout is a terminal, NO_COLOR is not set, and TERM is not "dumb"."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def style(text: str, colour: str | None = None, *, bold: bool = False, dim: bool = False) -> str:
    """The text in this colour and style, if stdout shows colours; else the text unchanged."""
    return click.style(text, fg=colour, bold=bold or None, dim=dim or None) if coloured() else text


def struck(text: str, mark: str) -> str:
    """The text struck through, if stdout shows styles; else the text with this mark after it."""
    return click.style(text, strikethrough=True) if coloured() else text + mark


def table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print aligned columns on stdout. The text of the cells is cleaned here.

    On a terminal, long cells are wrapped, and a `status` column is coloured.
    """
    cells = [[clean(cell) for cell in row] for row in rows]
    if sys.stdout.isatty():
        _rich_table(headers, cells)
        return
    widths = [max(len(line[column]) for line in [list(headers), *cells]) for column in range(len(headers))]
    for line in [list(headers), *cells]:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def _rich_table(headers: Sequence[str], cells: list[list[str]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for header in headers:
        grid.add_column(Text(header), overflow="fold")
    for row in cells:
        # Pass Text and never str: rich would read a str as markup, and the cells have recorded text.
        grid.add_row(
            *(Text(cell, STATUS_COLOURS.get(cell, "") if header == "status" else "") for header, cell in zip(headers, row, strict=True))
        )
    Console(no_color=not coloured(), highlight=False).print(grid)


def check_terminal(verb: str, *, yes: bool, asks: str = "before it writes") -> None:
    """InvalidInput if no person can be asked, and --yes is not given."""
    if not yes and not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise errors.InvalidInput(f"{verb} asks {asks}, and this is no terminal: see what it would do with --dry-run, then say --yes")


# -- times: µs since 1970 ---------------------------------------------------------------------------------------------


def now_us() -> int:
    """The clock of this machine, for ages and for times that the user types. Leases and due times need `now_at`."""
    return int(datetime.now(UTC).timestamp() * 1e6)


def now_at(store: Reading) -> int:
    """The time by the clock of the database. This clock decides about leases and due times."""
    return now_us() + store.ahead_us


# -- options, arguments, and opening the database ---------------------------------------------------------------------
def url_option(function: F) -> F:
    """`--url`: which database. The parameter is `url: str | None`; pass it to settings_with or existing_runs.

    If the user gives `--url`, the option is added to the commands in error messages.
    """

    @functools.wraps(function)
    def verb(*args: Any, url: str | None, **kwargs: Any) -> Any:
        try:
            return function(*args, url=url, **kwargs)
        except errors.PerdureError as error:
            if url is None or isinstance(error, errors.InvalidQuery):
                raise  # the message of a query names no command
            raise ExitWith(with_url(error.in_full(), url), code_of_error(error)) from error

    return click.option(
        "--url", metavar="URL", help="The database: sqlite:///FILE or postgresql://…. Default: PERDURE_URL, then the settings file."
    )(cast(F, verb))


def where_option(words: str) -> Callable[[F], F]:
    """The option `--where QUERY`. The parameter is `where: str | None`; pass it to `parse_query`."""
    from perdure.core.query import KEYS

    return click.option("--where", metavar="QUERY", help=f"{words} KEY:VALUE …; the keys: {', '.join(KEYS)}; -KEY:VALUE excludes.")


def label_option(verb: F) -> F:
    """The option `--label KEY=VALUE`, which may be repeated. The parameter is `labels: tuple[str, ...]`; pass it to `labels_of`."""
    return click.option("--label", "labels", metavar="KEY=VALUE", multiple=True, help="A label, by which the run is found. Repeatable.")(
        verb
    )


def labels_of(given: Sequence[str]) -> dict[str, str]:
    pairs = [one.partition("=") for one in given]
    if wrong := [one for one, (_, equals, _) in zip(given, pairs, strict=True) if not equals]:
        raise errors.InvalidInput(f"--label {wrong[0]!r:.60} is not KEY=VALUE")
    labels = {key: value for key, _, value in pairs}
    if len(labels) < len(pairs):
        twice = next(key for key, _, _ in pairs if [one[0] for one in pairs].count(key) > 1)
        raise errors.InvalidInput(f"--label {twice!r:.60} is there twice, and a label has one value")
    return labels


def with_url(text: str, url: str | None) -> str:
    """The text, with this `--url` added to every perdure command in the text."""
    return shell.with_options(text, url_words(url))


def url_words(url: str | None) -> str:
    """The `--url` option to append to a suggested command. The password is left out: it belongs in ~/.pgpass."""
    return f" --url {shell.quote(_pasted(url))}" if url else ""


def _pasted(url: str) -> str:
    from perdure.store.url import shown_url

    found = re.fullmatch(r"(postgres(?:ql)?://)([\w.-]+)(?::[^@/?]*)?@([^@]*)", url)
    # Keep the user name: it is no secret, and the command needs the name. If this cannot parse the URL, shown_url
    # drops the user name too.
    return f"{found[1]}{found[2]}@{shown_url(found[3])}" if found else shown_url(url)


def json_option(function: F) -> F:
    """`--json`: output for programs. The parameter is `as_json: bool`."""
    return click.option(
        "--json", "as_json", is_flag=True, callback=_keep_stdout, help="JSON on stdout: one document, or one object per line for lists."
    )(function)


_results: TextIO | None = None  # with --json: the real stdout, which only the result uses


def _keep_stdout(_: click.Context, __: click.Parameter, as_json: bool) -> bool:
    """With --json, stdout has only the result. All that agents, tools and their modules print goes to stderr."""
    global _results
    _results, sys.stdout = (sys.stdout, sys.stderr) if as_json else (None, sys.stdout)
    return as_json


def run_argument(function: F) -> F:
    """The argument RUN: the id of a run. The shell completes it from the database. The parameter is `run_id: str`."""
    return click.argument("run_id", metavar="RUN", shell_complete=complete_run)(function)


def optional_run_argument(function: F) -> F:
    """Like `run_argument`, but RUN may be left out. The parameter is `run_id: str | None`."""
    return click.argument("run_id", metavar="[RUN]", required=False, shell_complete=complete_run)(function)


def approval_argument(function: F) -> F:
    """The argument ID: the id of an approval. The shell completes it from the pending approvals.

    The parameter is `approval: str`; pass it to `which_approval`.
    """
    return click.argument("approval", metavar="ID", shell_complete=_complete_approval)(function)


def settings_with(**flags: Any) -> Settings:
    """The settings of this process. A flag with the value None counts as not given."""
    from perdure.config import load_settings

    return load_settings({name: value for name, value in flags.items() if value is not None}, os.environ, Path.cwd())


@contextmanager
def existing_runs(url: str | None) -> Iterator[Reading]:
    """Open an existing journal to read it. Nothing is created or changed.

    NotFound if the database does not exist. StoreCorrupt if the database has no perdure journal.
    """
    from perdure.engine.open import open_reading

    settings = settings_with(url=url)
    require_database(settings.url)
    with _opened(open_reading(settings)) as reading:
        yield reading


@contextmanager
def existing_store(url: str | None) -> Iterator[Store]:
    """Open an existing journal to write to it, for verbs that maintain the database."""
    settings = settings_with(url=url)
    require_database(settings.url)
    with _opened(open_with(settings, create=False)) as store:
        yield store


@contextmanager
def _opened(reading: R) -> Iterator[R]:
    try:
        if (moved := reading.moved()) is not None:
            note(clean(moved.words))
        yield reading
    finally:
        reading.close()


def open_with(settings: Settings, *, create: bool = True) -> Store:
    """Open the database that the settings name, with the options in the settings."""
    from perdure.store.open import open_store

    return open_store(
        settings.url, synchronous=settings.synchronous, busy_s=settings.answer_s, create=create, connections=settings.connections
    )


def database_file(url: str) -> Path | None:
    """The file of a SQLite URL; None if the database is a server or in memory."""
    path = url.removeprefix("sqlite:///")
    return Path(path) if path != url and path else None


def require_database(url: str) -> None:
    """Raise NotFound if the database does not exist: the commands that use this must not create a database."""
    file = database_file(url)
    if file is not None and not file.exists():
        where = f"{file.name} in {file.absolute().parent}"
        raise errors.NotFound(f"there is no database {where}; `perdure migrate` creates it; --url or PERDURE_URL names another database")


def require_journal(url: str) -> None:
    """For verbs that use the app: NotFound if the database does not exist, StoreCorrupt if it has no journal."""
    from perdure.store.open import is_postgres, sqlite_path
    from perdure.store.sqlite import owner

    if is_postgres(url):
        with existing_runs(url):
            return
    require_database(url)
    if (path := sqlite_path(url)) is not None:
        owner.require_journal(path)


# -- completion -------------------------------------------------------------------------------------------------------
def _complete_approval(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    from perdure.store.api import ApprovalFilter

    return complete_ids(ctx, incomplete, lambda store: [row.approval for row in store.approvals(ApprovalFilter(limit=1000))])


def complete_run(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """For the shell: the ids of runs that begin with `incomplete`."""
    from perdure.core.query import EVERYTHING

    return complete_ids(ctx, incomplete, lambda store: [row.run_id for row in store.list(EVERYTHING, 1000)])


def complete_ids(ctx: click.Context, incomplete: str, ids: Callable[[Reading], list[str]]) -> list[str]:
    """The ids that begin with `incomplete`. After any error: no ids, because a shell must not get an error message.

    bash puts a completion on the command line without quotes, and would execute a `$(…)` in it. So only valid ids are
    returned.
    """
    from perdure.core.identity import is_id

    logging.disable()  # for the whole process, which ends after the completion
    try:
        with _store_for_completion(ctx.params.get("url")) as store:
            return [one for one in ids(store) if is_id(one) and one.startswith(incomplete)]
    except Exception:
        return []


@contextmanager
def _store_for_completion(url: str | None) -> Iterator[Reading]:
    """The database that completion may open: a file, or a server that the user named with --url or PERDURE_URL.

    A server from a settings file in the current folder is refused: libpq would send the user's PGPASSWORD to this
    server. Loopback and local sockets are refused too: the server may belong to another user of this machine.
    """
    from perdure.engine.open import open_reading

    settings = settings_with(url=url)
    named = url or os.environ.get("PERDURE_URL")
    if not named and not settings.url.startswith("sqlite:"):
        raise errors.NotFound(f"{settings.url} comes from a settings file; completion does not connect to such a server")
    require_database(settings.url)
    with closing(open_reading(settings)) as store:
        yield store
