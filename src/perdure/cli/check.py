"""`perdure check`: find code that breaks replay or safety in files, and never run these files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click
import msgspec

from perdure.check.finding import Finding
from perdure.check.look import Seen, look
from perdure.check.source import files_at, read
from perdure.cli import common
from perdure.errors import InvalidInput
from perdure.inspect.text import plural

_COLOURS = {"error": "red", "note": "yellow"}


@click.command("check")
@click.argument("paths", nargs=-1, required=True, metavar="FILE…", type=click.Path())
@click.option("--strict", is_flag=True, help="Code 7 also for notes.")
@common.json_option
def command(paths: tuple[str, ...], strict: bool, as_json: bool) -> int:
    """Find what breaks replay or safety in the agents and tools of FILE…, or of every *.py below a folder.

    None of the code is run. Code 7 when there are errors. To accept a line: `# perdure: ignore[RULE] why`.
    """
    unreadable: list[InvalidInput] = []
    seen = list(_all_seen(paths, unreadable))
    findings = [finding for one in seen for finding in one.findings]
    errors = sum(finding.severity == "error" for finding in findings)
    if not as_json:
        for finding in findings:
            _print(finding)
        if seen:
            common.out(_summary(seen, errors, len(findings) - errors))
    if unreadable:
        for other in unreadable[1:]:
            common.note(common.clean(f"perdure: {other}"))
        # Raise this before any JSON is printed: a program must not get only a part of the findings.
        raise unreadable[0]
    if as_json:
        for finding in findings:
            common.out_json(msgspec.to_builtins(finding))
    return common.DIFFERENT if errors or (strict and findings) else common.SUCCEEDED


def _all_seen(paths: tuple[str, ...], unreadable: list[InvalidInput]) -> Iterator[Seen]:
    """Check each file once, in the order of `paths`. If a file cannot be read, add the error to `unreadable`."""
    done: set[Path] = set()
    for path in paths:
        try:
            files = list(files_at(Path(path)))
            if not files:
                raise InvalidInput(f"{path}: there is no *.py file below this folder")
        except InvalidInput as refused:
            unreadable.append(refused)
            continue
        for file in files:
            if (real := file.resolve()) in done:
                continue
            done.add(real)
            try:
                data = read(file)
            except InvalidInput as refused:
                unreadable.append(refused)
                continue
            yield look(file, data)


def _print(finding: Finding) -> None:
    place = common.style(common.clean(f"{finding.path}:{finding.line}:{finding.column}"), bold=True)
    rule = common.style(finding.rule, _COLOURS[finding.severity])
    about = f"{finding.where}: " if finding.where else ""
    common.out(f"{place} {rule}  {common.clean(f'{about}{finding.message}.')}")
    common.out(common.style(common.clean(f"    {finding.severity}; {finding.way_out}."), dim=True))


def _summary(seen: list[Seen], errors: int, notes: int) -> str:
    agents, tools = sum(one.agents for one in seen), sum(one.tools for one in seen)
    looked_at = f"{plural(len(seen), 'file')}, {plural(agents, 'agent')}, {plural(tools, 'tool')}"
    if not errors and not notes:
        return f"{looked_at}: nothing found"
    return f"{looked_at}: {plural(errors, 'error')}, {plural(notes, 'note')}"
