"""`perdure import`: an exported run becomes a specimen in a local journal, so that people can look at it."""

from __future__ import annotations

from pathlib import Path

import click

from perdure import shell
from perdure.cli import common
from perdure.cli.who import os_user
from perdure.inspect.specimen import chunks, is_there, read_family
from perdure.inspect.text import plural


@click.command("import")
@click.argument("file", metavar="FILE")
@common.url_option
@common.json_option
def command(file: str, url: str | None, as_json: bool) -> None:
    """Import the run in FILE, written by `perdure export`, as a specimen: a copy in this journal, to look at.

    The whole file is checked first; if it is damaged, the first bad event is named and nothing is written. The
    children, blobs and artifacts of the run are imported with it. `show`, `events`, `why`, `trace`, `replay` and
    `verify` read a specimen like any run. No worker ever drives it, and every verb that acts on a run refuses it.
    `perdure prune --specimen RUN` deletes it. If you import the same file again, nothing changes. If there is no
    journal yet, it is created.
    """
    path = Path(file)
    family = read_family(path, by=os_user(), now=common.now_us())
    header, runs = family.export.header, list(family.export.runs)
    store = common.open_with(common.settings_with(url=url), create=True)
    try:
        found = store.heads(runs)
        rows = [row for run_id in found if (row := store.get(run_id)) is not None]
        there = is_there(family, found, specimens=[row.run_id for row in rows if row.specimen is not None])
        if not there:
            store.take_in_specimen(family.wholes, list(family.export.blobs.values()), lambda: chunks(path, family))
    finally:
        store.close()
    events = sum(len(run.stored) for run in family.export.runs.values())
    if as_json:
        common.out_json(
            {
                "run_id": header.run_id,
                "imported": not there,
                "runs": runs,
                "events": events,
                "blobs": len(family.export.blobs),
                "artifacts": len(family.artifacts),
                "redacted": header.redacted,
                "original_head": header.original_head,
            }
        )
        return
    below = f" and {plural(len(runs) - 1, 'run')} below it" if len(runs) > 1 else ""
    copy = f", a redacted copy ({plural(header.redacted, 'value')} replaced)" if header.redacted is not None else ""
    how = "is here already, with the same content" if there else f"is here as a specimen, with {plural(events, 'event')}"
    common.out(common.clean(f"run {header.run_id}{below} {how}{copy}"))
    common.note(common.clean(common.with_url(f"look at it: {shell.command('why', header.run_id)}", url)))
