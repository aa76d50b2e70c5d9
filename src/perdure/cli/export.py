"""`perdure export`: a run and those below it as one portable file, and as a regression test."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import click

from perdure.cli import common
from perdure.cli.target import recorded_target
from perdure.errors import InvalidInput
from perdure.inspect.export import Exported, export_run
from perdure.inspect.view import require
from perdure.inspect.words import plural
from perdure.testing.regression import source_of_test

if TYPE_CHECKING:
    from perdure.store.api import RunRow


@click.command("export")
@common.run_argument
@click.argument("target", metavar="[TARGET]", required=False)
@click.option("-o", "--output", metavar="FILE", help="Where to; without it the file goes to stdout.")
@click.option("--test", metavar="FILE.py", help="Also write a test: that TARGET still does what this run did. The export lies beside it.")
@common.url_option
def command(run_id: str, target: str | None, output: str | None, test: str | None, url: str | None) -> None:
    """Write RUN, its children and its undo to one file: `perdure verify --export` and `perdure replay --export` need nothing else.

    It holds what the journal holds, arguments and results included: as confidential as the database. Nothing is overwritten.
    """
    if target is not None and test is None:
        raise InvalidInput(f"export {run_id} {target}: the code is only needed for a test: --test tests/test_run.py")
    settings = common.settings_with(url=url)
    with common.existing_store(url) as store:
        row = require(store, run_id)
        source = None
        if test is not None:
            where = target or recorded_target(run_id, row.target, settings.url, "export", f" --test {test}{common.url_words(url)}")
            output = output or str(Path(test).with_suffix(".perdure.jsonl"))
            source = source_of_test(Path(test), Path(output), row.run_id, row.agent, _on(row), where)
            _require_new(Path(test))
        if output is None:
            # All ASCII: it can neither move a cursor nor be spoilt on its way through a pipe.
            export_run(store, run_id, lambda line: common.out(line[:-1].decode()))
            return
        with _new_file(Path(output)) as file:
            done = export_run(store, run_id, file.write)
    common.out(common.clean(f"{output}: {_summary(done)}"))
    if test is not None and source is not None:
        with _new_file(Path(test), 0o666) as file:
            file.write(source.encode())
        common.out(common.clean(f"{test}: a test of it; run it with pytest"))


def _on(row: RunRow) -> str:
    return datetime.fromtimestamp(row.created_at / 1e6, UTC).strftime("%Y-%m-%d")


def _summary(done: Exported) -> str:
    below = f" and {plural(done.runs - 1, 'run')} below it" if done.runs > 1 else ""
    blobs = f", {plural(done.blobs, 'blob')}" if done.blobs else ""
    return f"run {done.run_id}{below}, {plural(done.events, 'event')}{blobs}"


def _require_new(path: Path) -> None:
    if path.exists():
        raise InvalidInput(f"{path} is there already, and nothing is overwritten: delete it, or choose another name")
    if not path.parent.is_dir():
        raise InvalidInput(f"{path}: there is no folder {path.parent}")


@contextmanager
def _new_file(path: Path, mode: int = 0o600) -> Iterator[BinaryIO]:
    """A file that is there whole or not at all; of an export for its owner alone, as the database was that has the same."""
    _require_new(path)
    part = path.with_name(f"{path.name}.part-{os.getpid()}")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.link(part, path)  # unlike a rename it refuses to take the place of a file that has come meanwhile
    finally:
        part.unlink(missing_ok=True)
