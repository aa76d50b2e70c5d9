"""`perdure crashtest`: kill the process of an agent at each of its boundaries, and resume the run."""

from __future__ import annotations

import importlib
import inspect
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click
import msgspec

from perdure import shell
from perdure.cli import common
from perdure.cli.run_verb import arguments
from perdure.cli.target import load_function, load_target, with_children
from perdure.core import codec
from perdure.errors import InvalidInput
from perdure.store.url import shown_url

if TYPE_CHECKING:
    from perdure.testing.lab import Report


_WIDE = 140  # columns; on a narrower terminal the table would not fit


@click.command("crashtest")
@click.argument("target", metavar="TARGET")
@click.argument("pairs_given", metavar="[KEY=VALUE | KEY:=JSON]…", nargs=-1)
@click.option("--input", "input_text", metavar="JSON", help="The input, as for `perdure run`.")
@click.option("--tools", metavar="FILE.py", help="The file with the tools of a plan (TARGET.toml or .json).")
@click.option("--pairs", is_flag=True, help="Kill the resumed process too, at each of its own boundaries.")
@click.option("--limit", type=click.IntRange(1), metavar="N", default=500, show_default=True, help="At most N trials, chosen by --seed.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--boundary", "wanted", multiple=True, metavar="NAME", help="Only boundaries whose name contains NAME; may be repeated.")
@click.option("--list", "only_list", is_flag=True, help="Only run TARGET undisturbed, and print its boundaries.")
@click.option("--world", metavar="DIR", type=click.Path(exists=True, file_okay=False), help="Every trial works in a copy of this folder.")
@click.option(
    "--ledger", metavar="FILE.py:FUNCTION", help="A function that reads the effects outside: from a trial's folder to JSON values."
)
@click.option(
    "--approve", type=click.Choice(("all", "reject", "none")), default="all", show_default=True, help="How approvals are decided."
)
@click.option("--signal", "signals", multiple=True, metavar="TOPIC=JSON", help="A signal to send when the run waits; may be repeated.")
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(0.1),
    default=30.0,
    show_default=True,
    metavar="S",
    help="The limit for each process; half of it for effects that show late outside.",
)
@click.option("--jobs", type=click.IntRange(1), metavar="N", help="Trials at a time. Default: one for each core.")
@click.option("--allow-models", is_flag=True, help="Allow requests to models that cost money, again in every trial.")
@click.option("--report", "report_file", metavar="FILE.html", type=click.Path(dir_okay=False), help="Also write the report as a page.")
@click.option("--keep", metavar="DIR", type=click.Path(file_okay=False), help="Keep every trial's journal, ledger, log and files there.")
@click.option(
    "--url", metavar="URL", help="postgresql://…: the journals are runs with new ids in this database. Default: a SQLite file each."
)
@common.json_option
def command(
    target: str,
    pairs_given: tuple[str, ...],
    input_text: str | None,
    tools: str | None,
    pairs: bool,
    limit: int,
    seed: int,
    wanted: tuple[str, ...],
    only_list: bool,
    world: str | None,
    ledger: str | None,
    approve: Any,
    signals: tuple[str, ...],
    timeout_s: float,
    jobs: int | None,
    allow_models: bool,
    report_file: str | None,
    keep: str | None,
    url: str | None,
    as_json: bool,
) -> int:
    """Run TARGET undisturbed to find its boundaries. Then run it once per boundary, kill it there, and resume it.

    Reports what was repeated. Every process works in its own folder: the files that tools write below the working
    folder are compared, and deleted afterwards. Every trial is a run with a new id. At late_tool_effect the request of
    the killed process takes effect only after its reconcile hook has looked for it, or after the call was made again
    with its key. Code 7 when something is not as declared or a tool could be neither tried nor compared, 1 when the
    undisturbed run fails.
    """
    args, kwargs = arguments(pairs_given, input_text)
    sent = [_signal(word) for word in signals]
    if report_file is not None:
        _check_writable(Path(report_file))
    loaded = load_target(target, tools)
    seen = None if ledger is None else _asked(ledger)
    from perdure.testing.lab import crash_matrix

    with _ended_cleanly(), _progress() as progress:
        report = crash_matrix(
            loaded.agent,
            args,
            kwargs,
            agents=with_children([loaded.agent]),
            pairs=pairs,
            limit=limit,
            seed=seed,
            boundaries=wanted or None,
            learn_only=only_list,
            ledger=seen,
            world=world,
            approve=approve,
            signals=sent,
            timeout_s=timeout_s,
            jobs=jobs,
            url=url,
            settings=common.settings_with(),
            allow_models=allow_models,
            fresh=(sys.executable, "-m", "perdure.cli.crash_victim"),
            target=loaded.recorded,
            progress=progress,
            keep=keep,
        )
    report = _with_command(report, url)
    _say(report, only_list=only_list, as_json=as_json)
    if keep is not None:
        common.note(common.clean(f"perdure: the trials are in {keep}"))
    if report_file is not None:
        Path(report_file).write_text(report.as_html(), encoding="utf-8")
        common.note(common.clean(f"perdure: the report is in {report_file}"))
    return common.SUCCEEDED if report.ok or only_list else common.DIFFERENT


def _check_writable(report: Path) -> None:
    """InvalidInput if the report cannot be written. This is checked before the trials, because they take minutes."""
    if report.suffix.lower() not in (".html", ".htm"):
        raise InvalidInput(f"--report {report}: the report is a page; name a file that ends in .html")
    if report.exists() and not _is_ours(report):
        raise InvalidInput(f"--report {report}: this file is not the page of a crash test; name another file")
    if not report.parent.is_dir():
        raise InvalidInput(f"--report {report}: there is no folder {report.parent}; make it first")
    if not os.access(report if report.exists() else report.parent, os.W_OK):
        raise InvalidInput(f"--report {report}: it cannot be written there; name another file")


def _is_ours(report: Path) -> bool:
    """May the file be replaced? Yes, if the file is empty or is the page of an earlier crash test."""
    with report.open("rb") as file:
        beginning = file.read(2_000)
    return not beginning or b"<title>Crash test of " in beginning


@contextmanager
def _ended_cleanly() -> Iterator[None]:
    """Make SIGTERM and SIGHUP raise an exception, as Ctrl-C does. Then no processes and no folders are left behind."""

    def leave(number: int, frame: Any) -> NoReturn:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _signal(word: str) -> tuple[str, Any]:
    topic, equals, payload = word.partition("=")
    if not equals or not topic:
        raise InvalidInput(f"--signal {word}: write TOPIC=JSON, such as --signal 'reply={{\"ok\": true}}'")
    return topic, codec.parse(payload, f"--signal {topic}")


def _with_command(report: Report, url: str | None) -> Report:
    """The report with the command that makes it again. The secrets of the URL are removed: others read the report."""
    words = [word if url is None else word.replace(url, shown_url(url)) for word in sys.argv[2:]]
    command_line = " ".join(["perdure", "crashtest", *map(shell.quote, words)])
    return msgspec.structs.replace(report, subject=msgspec.structs.replace(report.subject, command=command_line))


def _asked(ledger: str) -> Callable[[Path], Any]:
    """A function that calls the user's ledger function, with the trial's folder if that function has a parameter."""
    if not ledger.rpartition(":")[0]:
        raise InvalidInput(f"--ledger {ledger}: it names no function; write FILE.py:FUNCTION")
    function = load_function(ledger)
    if inspect.iscoroutinefunction(function):
        raise InvalidInput(f"--ledger {ledger}: it is async, and is called outside of any loop; write it with def")
    takes_folder = bool(inspect.signature(function).parameters)

    def ask(folder: Path) -> Any:
        try:
            seen = function(folder) if takes_folder else function()
            return codec.decode(codec.encode(seen))
        except (Exception, SystemExit) as error:
            raise InvalidInput(f"--ledger {ledger}: {type(error).__name__}: {error}") from error

    return ask


def _say(report: Report, *, only_list: bool, as_json: bool) -> None:
    if as_json:
        common.out_json(report.as_json())
    elif only_list:
        for boundary, also in zip(report.baseline.boundaries, report.baseline.also, strict=True):
            common.out(common.clean(f"{boundary} (with {', '.join(also)})" if also else boundary))
    else:
        _show(report)


def _show(report: Report) -> None:
    """Print the report. The problems come first, because the table may have a hundred rows."""
    from perdure.testing.lab.table import HEADERS, findings, rows, stacked, summary

    for line in findings(report.problems):
        common.out(common.style(common.clean(line), None if line.startswith(" ") else "red"))
    if report.problems:
        common.out()
    if sys.stdout.isatty() and shutil.get_terminal_size().columns < _WIDE:
        for line in stacked(report):
            common.out(common.clean(line))
    else:
        common.table(HEADERS, rows(report))
    common.out()
    for line in findings(report.notes):
        common.out(common.clean(line if line.startswith(" ") else f"note: {line}"))
    for line in summary(report):
        common.out(common.clean(line))


@contextmanager
def _progress() -> Iterator[Callable[[int, int, str], None]]:
    """A progress bar on stderr, if stderr is a terminal."""
    if not sys.stderr.isatty():
        with _counted(None) as told:
            yield told
        return
    rich = importlib.import_module("rich.progress")
    columns = (rich.TextColumn("{task.description}"), rich.BarColumn(), rich.MofNCompleteColumn(), rich.TimeRemainingColumn())
    console = importlib.import_module("rich.console").Console(stderr=True)
    # auto_refresh would start a thread. This process forks, and a process with threads cannot fork safely.
    with rich.Progress(*columns, console=console, auto_refresh=False, transient=True) as bar:
        task = bar.add_task("undisturbed", total=None)

        def told(done: int, of: int, what: str) -> None:
            bar.update(task, completed=done, total=of or None, description="killing" if of else what)
            bar.refresh()

        with _counted(told) as counted:
            yield counted


@contextmanager
def _counted(show: Callable[[int, int, str], None] | None) -> Iterator[Callable[[int, int, str], None]]:
    """Report the progress to `show`. If the user interrupts, print how many trials were done."""
    at = (0, 0)

    def told(done: int, of: int, what: str) -> None:
        nonlocal at
        at = (done, of)
        if show is not None:
            show(done, of, what)

    try:
        yield told
    except (KeyboardInterrupt, SystemExit):
        common.note(f"perdure: interrupted after {at[0]:,} of {at[1]:,} trials" if at[1] else "perdure: interrupted in the undisturbed run")
        raise
