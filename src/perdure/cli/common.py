"""What every verb shares: exit codes, errors in one line, output that is safe to look at, `--url` and `--json`."""

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
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO, TypeVar, cast

import click

from perdure import errors, shell
from perdure.core.invisible import all_printable, escaped, is_visible

if TYPE_CHECKING:
    from perdure.engine.api import Reading
    from perdure.settings import Settings
    from perdure.store.api import Store

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")
R = TypeVar("R", bound="Reading")

# -- exit codes -------------------------------------------------------------------------------------------------------------
SUCCEEDED = 0
FAILED = 1
USAGE = 2
WAITING = 3
NEEDS_ATTENTION = 4
CANCELLED = 5
NOT_FOUND = 6
DIFFERENT = 7
HELD = 8
BUG = 70  # EX_SOFTWARE: nobody shall read a bug of ours as a failed run
PIPE_CLOSED = 141  # what a shell reports for SIGPIPE

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

# The first match counts: a subclass stands above its base.
_CODE_OF_ERROR: tuple[tuple[type[errors.PerdureError], int], ...] = (
    (errors.NotFound, NOT_FOUND),
    (errors.AlreadyRunning, HELD),
    (errors.Diverged, DIFFERENT),
    (errors.RunFailed, FAILED),
    (errors.RunCancelled, CANCELLED),
    (errors.NeedsAttention, NEEDS_ATTENTION),
    (errors.ResultTimeout, WAITING),
    (errors.Fenced, HELD),
    (errors.PerdureError, USAGE),  # InvalidInput, Conflict, UnknownAgent, StoreError: something must be set right first
)


def code_of_error(error: errors.PerdureError) -> int:
    """The exit code that stands for this error."""
    return next(code for kind, code in _CODE_OF_ERROR if isinstance(error, kind))


# -- errors -----------------------------------------------------------------------------------------------------------------
class Stop(click.ClickException):
    """Ends the program with one line on stderr and this exit code."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class PipeClosed(click.ClickException):
    """Nobody reads stdout any more."""

    def __init__(self) -> None:
        super().__init__("stdout is closed")


class OutputLost(OSError):
    """What went to stdout could not be written; of itself an error of a write does not say to which file."""


class Stdout:
    """A stream whose own errors are OutputLost; a pipe that nobody reads stays BrokenPipeError."""

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
    """End the program: `perdure: message` on stderr, and this exit code."""
    raise Stop(message, code)


def report(error: BaseException) -> int:
    """Say in one line what went wrong; the exit code for it."""
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
            _let_go_of(1)
            return PIPE_CLOSED
        case Stop():
            return _line(error.message, error.code)
        case click.ClickException():
            return _line(error.format_message(), USAGE)
        case errors.InvalidPlan():
            first, *others = error.lines
            _line(first, USAGE)
            for other in others:
                note(clean(f"  {other}"))
            return code_of_error(error)
        case errors.PerdureError():
            return _line(str(error), code_of_error(error))
        case KeyboardInterrupt() | click.Abort():
            return 130
        case OutputLost():
            _let_go_of(1)
            return _line(f"cannot write the output (stdout): {error.strerror}; make room there, or send it elsewhere", USAGE)
        case OSError():
            way_out = "; raise the limit for this process (ulimit -n)" if error.errno in (errno.EMFILE, errno.ENFILE) else ""
            return _line((f"{error.filename}: {error.strerror}" if error.filename else str(error)) + way_out, USAGE)
        case _:
            return _line(f"a bug: {type(error).__name__}: {error} (PERDURE_DEBUG=1 shows the traceback)", BUG)


def let_go_of_stderr() -> None:
    """Lose what stderr cannot take, at the end of the program: the exit code still tells."""
    try:
        sys.stderr.flush()
    except OSError:
        _let_go_of(2)


def _let_go_of(descriptor: int) -> None:
    # What is still buffered must not fail once more when the interpreter flushes it at exit, which would end it with code 120.
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, descriptor)
    os.close(devnull)


def _line(message: str, code: int) -> int:
    try:
        print(f"perdure: {clean(message)}", file=sys.stderr)
    except OSError:
        pass  # stderr is closed as well: the exit code still tells
    return code


# -- text that is safe to look at ---------------------------------------------------------------------------------------------
def clean(text: str, keep: str = "") -> str:
    """The text with every control, bidi, zero-width and otherwise invisible character shown as its escape, except those in `keep`.

    Whatever tools and models have written is shown through this: it can neither move the cursor nor reorder a line.
    """
    return escaped(text, keep)


def to_json(value: Any) -> str:
    """One line of JSON; characters that a terminal would act on, or not show, are written as \\u escapes."""
    return _json_escaped(json.dumps(value, ensure_ascii=False, allow_nan=False))


def json_lines(value: Any, width: int = 100) -> list[str]:
    """JSON for people, as safe to look at as to_json: on one line where that fits, else indented."""
    short = to_json(value)
    if len(short) <= width:
        return [short]
    # The only line ends are the indentation's own: those inside a text are written as \\n.
    lines = json.dumps(value, ensure_ascii=False, allow_nan=False, indent=2).split("\n")
    return [_json_escaped(line) for line in lines]


def _json_escaped(text: str) -> str:
    return text if all_printable(text) else "".join(char if is_visible(char) else _json_escape(char) for char in text)


def _json_escape(char: str) -> str:
    units = char.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2))


# -- output -----------------------------------------------------------------------------------------------------------------
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
    """A line of the result, on stdout. The caller has cleaned what it did not write itself."""
    print(line, file=_results or sys.stdout)


def flush() -> None:
    """What has been written to stdout is on its way; raises what a closed or full one makes of that."""
    (_results or sys.stdout).flush()


def out_json(value: Any) -> None:
    """One JSON document on stdout, on a line of its own."""
    print(to_json(value), file=_results or sys.stdout)


def out_exact(data: bytes) -> None:
    """These very bytes on stdout, so that they can be hashed; a terminal gets a line end behind them."""
    stream = _results or sys.stdout
    stream.flush()
    stream.buffer.write(data + b"\n" if stream.isatty() else data)


def note(line: str) -> None:
    """A line of progress or advice, on stderr; lost when nobody reads it, because work must not end for want of a listener."""
    try:
        print(line, file=sys.stderr, flush=True)
    except OSError:
        pass


def coloured() -> bool:
    """Whether stdout shows colours: only a terminal does, and not where NO_COLOR or a dumb one forbids it."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def style(text: str, colour: str | None = None, *, bold: bool = False, dim: bool = False) -> str:
    """The text in a colour, where stdout shows colours."""
    return click.style(text, fg=colour, bold=bold or None, dim=dim or None) if coloured() else text


def table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Aligned columns on stdout; cells are cleaned here. On a terminal long cells are wrapped and a `status` column is coloured."""
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
        # Text, never str: recorded text must not be read as markup.
        grid.add_row(
            *(Text(cell, STATUS_COLOURS.get(cell, "") if header == "status" else "") for header, cell in zip(headers, row, strict=True))
        )
    Console(no_color=not coloured(), highlight=False).print(grid)


# -- times: µs since 1970 -----------------------------------------------------------------------------------------------------
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def now_us() -> int:
    """The wall clock, for telling ages; nothing else may depend on it."""
    return int(datetime.now(UTC).timestamp() * 1e6)


def now_at(store: Reading) -> int:
    """The time by the database's clock, by which it judges leases and readiness."""
    return now_us() + store.ahead_us


def iso(us: int) -> str:
    """ISO 8601 in UTC, to the microsecond."""
    try:
        return (_EPOCH + timedelta(microseconds=us)).isoformat(timespec="microseconds").replace("+00:00", "Z")
    except OverflowError:
        return f"{us} µs since 1970"  # beyond the year 9999 there are no datetimes, but a timer may well be set there


# -- what the verbs take --------------------------------------------------------------------------------------------------------
def url_option(function: F) -> F:
    """`--url`: which database. The parameter is `url: str | None`; give it to settings_with or existing_runs.

    Where it was given, the commands that an error names have it too.
    """

    @functools.wraps(function)
    def verb(*args: Any, url: str | None, **kwargs: Any) -> Any:
        try:
            return function(*args, url=url, **kwargs)
        except errors.PerdureError as error:
            if url is None:
                raise
            raise Stop(with_url(str(error), url), code_of_error(error)) from error

    return click.option(
        "--url", metavar="URL", help="The database: sqlite:///FILE or postgresql://…. Default: PERDURE_URL, then the settings file."
    )(cast(F, verb))


def with_url(text: str, url: str | None) -> str:
    """The text, with the database that the command line named in every command that it tells the reader to type."""
    return shell.with_options(text, url_words(url))


def url_words(url: str | None) -> str:
    """What a command to type needs so that it means the database that this one was given, without a password: that is for ~/.pgpass."""
    return f" --url {shell.quote(_pasted(url))}" if url else ""


def _pasted(url: str) -> str:
    from perdure.store.url import shown_url

    found = re.fullmatch(r"(postgres(?:ql)?://)([\w.-]+)(?::[^@/?]*)?@([^@]*)", url)
    # A user's name alone lets nobody in, and without it the command would not work. Where it is not plain which part is the name, it goes.
    return f"{found[1]}{found[2]}@{shown_url(found[3])}" if found else shown_url(url)


def json_option(function: F) -> F:
    """`--json`: for programs. The parameter is `as_json: bool`."""
    return click.option(
        "--json", "as_json", is_flag=True, callback=_keep_stdout, help="JSON on stdout: one document, or one object per line for lists."
    )(function)


_results: TextIO | None = None  # stdout, while it is kept for the result alone


def _keep_stdout(_: click.Context, __: click.Parameter, as_json: bool) -> bool:
    """With --json stdout is for the document alone: what agents, tools and their files print goes to stderr."""
    global _results
    _results, sys.stdout = (sys.stdout, sys.stderr) if as_json else (None, sys.stdout)
    return as_json


def run_argument(function: F) -> F:
    """RUN: the id of a run, completed from the database. The parameter is `run_id: str`."""
    return click.argument("run_id", metavar="RUN", shell_complete=_complete_run)(function)


def approval_argument(function: F) -> F:
    """ID: an approval, completed from those that are pending. The parameter is `approval: str`; give it to `which_approval`."""
    return click.argument("approval", metavar="ID", shell_complete=_complete_approval)(function)


def settings_with(**flags: Any) -> Settings:
    """The settings in force; flags that are None were not given."""
    from perdure.config import load_settings

    return load_settings({name: value for name, value in flags.items() if value is not None}, os.environ, Path.cwd())


@contextmanager
def existing_runs(url: str | None) -> Iterator[Reading]:
    """The runs that are there; NotFound where there are none, StoreCorrupt where it is not ours. Nothing is made and no file changed."""
    from perdure.engine.open import open_reading

    settings = settings_with(url=url)
    require_database(settings.url)
    with _opened(open_reading(settings)) as reading:
        yield reading


@contextmanager
def existing_store(url: str | None) -> Iterator[Store]:
    """The same for a verb that looks after the database itself."""
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
    """The database that the settings name, opened as they say."""
    from perdure.store.open import open_store

    return open_store(
        settings.url, synchronous=settings.synchronous, busy_s=settings.answer_s, create=create, connections=settings.connections
    )


def database_file(url: str) -> Path | None:
    """The file of a SQLite URL; None for a database that is no file."""
    path = url.removeprefix("sqlite:///")
    return Path(path) if path != url and path else None


def require_database(url: str) -> None:
    """NotFound unless the database exists: only a verb that starts runs may make one."""
    file = database_file(url)
    if file is not None and not file.exists():
        where = f"{file.name} in {file.absolute().parent}"
        raise errors.NotFound(f"there is no database {where}; `perdure run` makes one, and --url or PERDURE_URL names another")


def require_journal(url: str) -> None:
    """NotFound unless the database exists, StoreCorrupt unless it is ours; for verbs that steer runs through the app."""
    from perdure.store.open import is_postgres, sqlite_path
    from perdure.store.sqlite import owner

    if is_postgres(url):
        with existing_runs(url):
            return
    require_database(url)
    if (path := sqlite_path(url)) is not None:
        owner.require_journal(path)


# -- completion -------------------------------------------------------------------------------------------------------------
def _complete_approval(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    from perdure.store.api import ApprovalFilter

    return _complete(ctx, incomplete, lambda store: [row.approval for row in store.approvals(ApprovalFilter(limit=1000))])


def _complete_run(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    from perdure.store.api import Filter

    return _complete(ctx, incomplete, lambda store: [row.run_id for row in store.list(Filter(limit=1000))])


def _complete(ctx: click.Context, incomplete: str, ids: Callable[[Reading], list[str]]) -> list[str]:
    """Those of the ids that begin so; none where anything is wrong. A shell that waits for a completion wants words or silence.

    bash puts a word on the command line as it is, and executes a `$(…)` in it on Enter: what is no id is not offered.
    """
    from perdure.core.identity import is_id

    logging.disable()  # the process ends with the completion
    try:
        with _store_for_completion(ctx.params.get("url")) as store:
            return [one for one in ids(store) if is_id(one) and one.startswith(incomplete)]
    except Exception:
        return []


@contextmanager
def _store_for_completion(url: str | None) -> Iterator[Reading]:
    """The database that TAB may look into: a file, or the server that this user has named by --url or PERDURE_URL.

    Not a server that a settings file of the current folder names: libpq would log in there with the user's PGPASSWORD.
    That holds for loopback and local sockets too, where the server may belong to another user of this machine.
    """
    from perdure.engine.open import open_reading

    settings = settings_with(url=url)
    named = url or os.environ.get("PERDURE_URL")
    if not named and not settings.url.startswith("sqlite:"):
        raise errors.NotFound(f"{settings.url} comes from a settings file, and completion connects to no server for that")
    require_database(settings.url)
    with closing(open_reading(settings)) as store:
        yield store
