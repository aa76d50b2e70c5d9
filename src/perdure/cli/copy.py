"""`perdure copy`: move a journal to another database, or copy its history there."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import click
import msgspec

from perdure import shell
from perdure.cli import common
from perdure.cli.who import os_user
from perdure.errors import InvalidInput, StoreCorrupt
from perdure.inspect.text import plural
from perdure.settings import Settings
from perdure.store.api import Store
from perdure.store.open import is_postgres, sqlite_path
from perdure.store.transfer import Copied, Copying, CopySurvey, some_tables
from perdure.store.url import shown_url

_NO_JOURNAL = "has no perdure journal"  # a part of the error of both kinds of database


@click.command("copy")
@click.option("--from", "source_url", metavar="URL", help="The journal that moves. Default: PERDURE_URL, then the settings file.")
@click.option(
    "--to",
    "target_url",
    metavar="URL",
    required=True,
    help="Where to: sqlite:///FILE or postgresql://…. A journal is created there if there is none.",
)
@click.option("--only-finished", is_flag=True, help="Copy finished runs, and leave the source open: for an archive, or to try it out.")
@click.option(
    "--wait",
    "wait_s",
    type=click.FloatRange(min=0),
    default=0.0,
    metavar="S",
    help="Wait up to S seconds for live workers to end, instead of refusing.",
)
@click.option(
    "--leave-tables",
    is_flag=True,
    help="Move although unfinished runs may need tables beside the journal: you have copied these tables yourself.",
)
@click.option("--dry-run", is_flag=True, help="Compare both sides and say what would be copied; nothing is written.")
@click.option("--abandon", is_flag=True, help="Undo a move that was interrupted: reopen the source, if no run has gone on in the target.")
@common.json_option
def command(
    source_url: str | None,
    target_url: str,
    only_finished: bool,
    wait_s: float,
    leave_tables: bool,
    dry_run: bool,
    abandon: bool,
    as_json: bool,
) -> int:
    """Move a whole journal to another database: every run, finished or waiting, with its chain intact.

    Stop the workers of the source first. The command closes the source, and the source stays closed, so that no run
    goes on in two places. If the command is killed, run it again: it continues. Code 8 while live workers use the
    source, 7 when a journal is not as it was written (verify names it). Your own tables beside the journal are not
    copied; they are listed.
    """
    if abandon and (dry_run or only_finished):
        raise InvalidInput("--abandon undoes a move; it does not go with --dry-run or --only-finished: leave them out")
    source, target = _settings(source_url), _settings(target_url)
    if source.url == target.url:
        raise InvalidInput(f"--from and --to are both {shown_url(source.url)}; name another database with --to")
    common.require_database(source.url)
    with _opened(source, create=False) as journal, _opened_target(target, dry_run or abandon) as other:
        bar = Bar()
        copying = Copying(journal, other, to_url=target.url, by=os_user(), progress=bar.show)
        now = common.now_at(journal)
        try:
            if dry_run:
                return _tell_survey(copying.survey(only_finished=only_finished, gone_on=journal.moved() is not None), target, as_json)
            if abandon:
                return _tell_abandoned(copying.abandon(now=now), source, as_json)
            if only_finished:
                copied = copying.history()
            else:
                copied = copying.move(now=now, lease_us=round(source.lease_s * 1e6), wait_s=wait_s, leave_tables=leave_tables)
        finally:
            bar.end()
    return _tell_copied(copied, target, only_finished, as_json)


def _settings(url: str | None) -> Settings:
    """The settings for this URL, with an absolute path: the URL is recorded, and must be right in every folder."""
    settings = common.settings_with(url=url)
    if is_postgres(settings.url):
        return settings
    path = sqlite_path(settings.url)
    if path is None:
        raise InvalidInput("a database in memory is gone with its process; name a file or a server: sqlite:///FILE, postgresql://…")
    return msgspec.structs.replace(settings, url=f"sqlite:///{Path(path).resolve()}")


@contextmanager
def _opened(settings: Settings, *, create: bool) -> Iterator[Store]:
    store = common.open_with(settings, create=create)
    try:
        yield store
    finally:
        store.close()


@contextmanager
def _opened_target(settings: Settings, read_only: bool) -> Iterator[Store]:
    if not read_only:
        with _opened(settings, create=True) as store:
            yield store
        return
    try:
        file = None if is_postgres(settings.url) else sqlite_path(settings.url)
        store = common.open_with(settings if file is None or file.exists() else _empty(settings), create=False)
    except StoreCorrupt as error:
        if _NO_JOURNAL not in str(error):
            raise
        store = common.open_with(_empty(settings))
    try:
        yield store
    finally:
        store.close()


def _empty(settings: Settings) -> Settings:
    return msgspec.structs.replace(settings, url="sqlite://")  # an empty journal, to compare the source with


class Bar:
    """Progress on stderr. If stderr is a terminal: one line that is overwritten. If not: a line for each step."""

    def __init__(self) -> None:
        self._is_watched = sys.stderr.isatty()
        self._said = ""
        self._step = ""

    def show(self, what: str, done: int, whole: int) -> None:
        line = f"{what} {done:,} of {whole:,} runs" if whole else f"{what} {plural(done, 'run')}"
        if self._is_watched:
            sys.stderr.write(f"\r{line:<{len(self._said)}}")
            sys.stderr.flush()
            self._said = line
        elif what != self._step or done == whole:
            common.note(line)
        self._step = what

    def end(self) -> None:
        if self._said:
            sys.stderr.write("\n")
            self._said = ""


def _tell_survey(survey: CopySurvey, target: Settings, as_json: bool) -> int:
    if as_json:
        common.out_json({"to": shown_url(target.url), "dry_run": True, **msgspec.to_builtins(survey)})
        return common.SUCCEEDED
    there = f"; {survey.there:,} of them are there already" if survey.there else ""
    common.out(
        common.clean(
            f"would copy {plural(survey.runs, 'run')} with {plural(survey.events, 'event')} ({survey.unfinished:,} unfinished) "
            f"to {shown_url(target.url)}{there}"
        )
    )
    _tell_tables(survey.tables)
    return common.SUCCEEDED


def _tell_tables(tables: Sequence[str]) -> None:
    if tables:
        common.out(
            common.clean(
                f"{plural(len(tables), 'table')} beside the journal: {some_tables(tables)}; not copied: copy those of your transaction tools "
                "yourself, or a waiting run will not find them there"
            )
        )


def _tell_abandoned(taken: int, source: Settings, as_json: bool) -> int:
    if as_json:
        common.out_json({"url": shown_url(source.url), "abandoned": True, "taken_back": taken})
    else:
        common.out(common.clean(f"{shown_url(source.url)} is open again; unfinished runs there: {taken:,}"))
    return common.SUCCEEDED


def _tell_copied(copied: Copied, target: Settings, only_finished: bool, as_json: bool) -> int:
    to = shown_url(target.url)
    if as_json:
        common.out_json({"to": to, "moved": not only_finished, **msgspec.to_builtins(copied)})
    else:
        there = f", {copied.there:,} were there already" if copied.there else ""
        artifacts = f", {plural(copied.artifacts, 'artifact')}" if copied.artifacts else ""
        buried = f", {plural(copied.tombstones, 'tombstone')}" if copied.tombstones else ""
        buried += f", {plural(copied.schedules, 'schedule')}" if copied.schedules else ""
        common.out(
            common.clean(
                f"copied {plural(copied.runs, 'run')}, {plural(copied.events, 'event')}, {plural(copied.blobs, 'blob')}{artifacts}{buried} to {to}{there}"
            )
        )
        for run_id in copied.damaged:
            common.out(common.clean(f"run {run_id} is not as it was written, in source and copy: {shell.command('verify', run_id)}"))
        _tell_tables(copied.tables)
        if not only_finished:
            pasted = common.url_words(target.url).strip()
            common.note(common.clean(f"the source is closed for good; from now on: {pasted}, or PERDURE_URL, or url in perdure.toml"))
    return common.DIFFERENT if copied.damaged else common.SUCCEEDED
