"""`perdure backup`: write the whole journal to one file, while workers write."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
import msgspec

from perdure import shell
from perdure.cli import common
from perdure.cli.copy import Bar
from perdure.cli.who import os_user
from perdure.errors import StoreCorrupt
from perdure.inspect.newfile import give_name, require_new
from perdure.inspect.text import plural
from perdure.store.backup import write_backup
from perdure.store.transfer import some_tables


@click.command("backup")
@click.argument("file", type=click.Path(path_type=Path), metavar="FILE")
@common.url_option
@common.json_option
def command(file: Path, url: str | None, as_json: bool) -> int:
    """Write the whole journal to FILE: all runs, blobs, schedules, and the artifacts that lie in the database.

    Workers may go on meanwhile: the backup is the journal of one moment. FILE is a SQLite file, also for PostgreSQL. It is
    verified (the file, and the hash chain of every run) and on the disk before it gets its name; nothing is overwritten.
    It can be read (perdure list --url sqlite:///FILE), and no worker can use it: perdure restore FILE --to URL. Artifacts in
    a folder or bucket are named, and their bytes are not in FILE. Code 7 if a run is not as it was written; FILE has it
    as it is.
    """
    file = file.absolute()
    require_new(file)
    bar = Bar()
    with common.existing_store(url) as store, part_of(file) as part:
        try:
            made = write_backup(store, part, by=os_user(), now=common.now_at(store), progress=bar.show)
        finally:
            bar.end()
        known = store.problems() if made.problems else []
        if new := [problem for problem in made.problems if problem not in known]:
            raise StoreCorrupt(f"the backup is not sound, and was not kept: {new[0]}; look at the journal: perdure doctor")
        _to_disk(part)
        give_name(part, file)
        _to_disk(file.parent)
    if as_json:
        common.out_json({"file": str(file), **msgspec.to_builtins(made), "taken_at": common.iso(made.taken_at)})
        return common.DIFFERENT if made.damaged or made.problems else common.SUCCEEDED
    common.out(
        common.clean(
            f"{file}: {plural(made.runs, 'run')} ({made.unfinished:,} unfinished) as of {common.iso(made.taken_at)}, {file.stat().st_size:,} "
            f"bytes, verified; to restore it: perdure restore {shell.quote(str(file))} --to URL"
        )
    )
    if made.outside:
        common.note(
            f"{plural(made.outside, 'artifact')} in a folder or bucket: named in the backup, and not copied; back that place up, too"
        )
    if made.tables:
        common.note(common.clean(f"tables beside the journal, which are not in the backup: {some_tables(made.tables)}"))
    for run_id in made.damaged:
        common.out(common.clean(f"run {run_id} is not as it was written: {shell.command('verify', run_id)}"))
    for problem in made.problems:
        common.out(common.clean(f"in the journal, and so in the backup: {problem}"))
    return common.DIFFERENT if made.damaged or made.problems else common.SUCCEEDED


@contextmanager
def part_of(file: Path) -> Iterator[Path]:
    """The name of a SQLite file that is removed at the end, with all that SQLite and perdure put beside it.

    After SIGKILL the file stays, under a name that begins like that of `file`; it can be deleted.
    """
    part = file.with_name(f"{file.name}.part-{os.getpid()}-{secrets.token_hex(4)}")
    os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))  # only its owner can read it, like the database
    try:
        yield part
    finally:
        for beside in ("", "-wal", "-shm"):
            part.with_name(part.name + beside).unlink(missing_ok=True)
        shutil.rmtree(part.with_name(f"{part.name}-workers"), ignore_errors=True)


def _to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
