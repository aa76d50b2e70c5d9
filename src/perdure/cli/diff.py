"""`perdure diff`: compare two runs."""

from __future__ import annotations

from pathlib import Path

import click

from perdure.cli import common
from perdure.inspect.diff import diff_lines, diff_of, diff_page, diff_record, path_of
from perdure.inspect.newfile import new_file, require_new
from perdure.inspect.view import loader, read_run


@click.command("diff")
@click.argument("left", metavar="RUN")
@click.argument("right", metavar="RUN")
@click.option("--html", "page", metavar="FILE", help="Also write the diff to this new HTML file: no scripts, nothing from elsewhere.")
@common.url_option
@common.json_option
def command(left: str, right: str, page: str | None, url: str | None, as_json: bool) -> int:
    """Compare two runs: calls, arguments and results from the first difference on, then outcome and cost.

    Lines with - belong to the first run, lines with + to the second. Events that were superseded when a run was
    reopened are left out. Code 7 if the runs differ. `perdure fork` shows the diff between a run and its fork.
    """
    if page is not None:
        require_new(Path(page))
    with common.existing_runs(url) as store:
        one, other = (path_of(f"run {run_id}", read_run(store, run_id).events, loader(store)) for run_id in (left, right))
    found = diff_of(one, other)
    if page is not None:
        with new_file(Path(page)) as file:
            file.write(diff_page(found).encode())
    if as_json:
        common.out_json(diff_record(found))
    else:
        for line in diff_lines(found):
            common.out(common.clean(line))
    return common.SUCCEEDED if found.is_same else common.DIFFERENT
