"""`perdure export`: a run and the runs below it as one portable file, and as a regression test."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from perdure import shell
from perdure.cli import common
from perdure.cli.target import Target, load_target, recorded_target, with_children
from perdure.core.redaction import MIN_CHARS, MIN_DIGITS
from perdure.errors import InvalidInput, UnknownAgent
from perdure.inspect.export import Exported, export_run
from perdure.inspect.newfile import new_file, require_new
from perdure.inspect.redact import read_rules
from perdure.inspect.text import plural
from perdure.inspect.view import require
from perdure.testing.regression import check_places, source_of_test

if TYPE_CHECKING:
    from perdure.agent import Agent
    from perdure.engine.api import Reading
    from perdure.store.api import RunRow


@click.command("export")
@common.run_argument
@click.argument("target", metavar="[TARGET]", required=False)
@click.option("-o", "--output", metavar="FILE", help="The file to write. Default: stdout.")
@click.option(
    "--redact",
    "redact",
    multiple=True,
    metavar="RULES",
    help="Replace values before the file is written: key:NAME, path:A.B.*, text:REGEX, or a file with one rule on each line. Can be repeated.",
)
@click.option("--test", metavar="FILE.py", help="Also write a test that TARGET still does what this run did; the export goes beside it.")
@common.url_option
def command(run_id: str, target: str | None, output: str | None, redact: tuple[str, ...], test: str | None, url: str | None) -> None:
    """Write RUN, its children and its undo to one file, which `import`, `verify --export` and `replay --export` read.

    The file has everything that the journal has, with arguments, results and artifacts. So it is as confidential as
    the database. With --redact, secret values are replaced by [redacted], and artifacts are left out; read
    docs/incidents.md before you rely on it. No file is overwritten. With --test the code is loaded and compared once:
    code 7, and nothing is written, when the code already does something else.
    """
    if target is not None and test is None:
        raise InvalidInput(f"export {run_id} {target}: the code is only needed for a test: --test tests/test_run.py")
    if redact and test is not None:
        raise InvalidInput("--redact does not go with --test: a test compares the recorded values with those of the code")
    rules = read_rules(redact) if redact else None
    settings = common.settings_with(url=url)
    with common.existing_runs(url) as store:
        row = require(store, run_id)
        if test is not None:
            more = f" --test {shell.quote(test)}{common.url_words(url)}"
            where = target or recorded_target(store, row, settings.url, "export", more)
            _with_test(store, row, where, Path(test), Path(output) if output else Path(test).with_suffix(".perdure.jsonl"))
        elif output is None:
            # The lines are ASCII. So they are safe on a terminal, and the encoding of a pipe cannot change them.
            done = export_run(store, run_id, lambda line: common.out(line[:-1].decode()), rules)
            _note_redacted(done)
        else:
            with new_file(Path(output)) as file:
                done = export_run(store, run_id, file.write, rules)
            common.out(common.clean(f"{output}: {_summary(done)}"))
            _note_redacted(done)


def _with_test(store: Reading, row: RunRow, where: str, test: Path, export: Path) -> None:
    """Write the export and the test. If the test would fail now, write neither: the target is the wrong code."""
    check_places(test, export, where)
    require_new(test)
    require_new(export)
    target = load_target(where)
    with tempfile.TemporaryDirectory(prefix="perdure-export-") as folder:
        draft = Path(folder) / export.name
        with draft.open("wb") as file:
            done = export_run(store, row.run_id, file.write)
        source = source_of_test(test, export, row.run_id, row.agent, _on(row), _compared(draft, target, where))
        with new_file(test, 0o666) as written, new_file(export) as copied, draft.open("rb") as file:
            written.write(source.encode())
            shutil.copyfileobj(file, copied)
    common.out(common.clean(f"{export}: {_summary(done)}"))
    common.out(common.clean(f"{test}: a test of it, which passes now; run it with pytest {shell.quote(str(test))}"))


def _compared(draft: Path, target: Target, where: str) -> list[str]:
    """Replay and rerun all runs of the export, and return the targets of their agents."""
    from perdure.testing.recorder import recorded
    from perdure.testing.rerun import Changed

    recording = recorded(draft)
    if target.agent.name != recording.agent:
        raise UnknownAgent(
            f"run {recording.run_id} belongs to agent {recording.agent!r}, but {where} is agent {target.agent.name!r}; name the right agent"
        )
    known = {**_loaded(), **{agent.name: agent for agent in reversed(with_children([target.agent]))}}
    targets = [where]
    for name in recording.agents[1:]:
        found = _importable(known[name], target, where) if name in known else None
        if found is None:
            raise InvalidInput(
                f"run {recording.run_id} has children of agent {name!r}, and {where} does not show where to import it from; "
                "export the run without --test, and write the test by hand: recorded(FILE).replay(agent, its_child)"
            )
        targets.append(found)
    agents = [known[name] for name in recording.agents]
    try:
        recording.replay(*agents)
        recording.rerun(*agents).check()
    except Changed as changed:
        raise common.ExitWith(
            f"{where} no longer does what run {recording.run_id} did, so no test was written: {changed}", common.DIFFERENT
        ) from None
    return targets


def _loaded() -> dict[str, Agent[Any, Any]]:
    """The agents in all loaded modules, by name. Needed if the code calls an agent as `kids.clerk(…)`.

    If two agents have the same name, this name is left out.
    """
    from perdure.agent import Agent

    modules = [vars(module) for module in list(sys.modules.values()) if hasattr(module, "__dict__")]
    found = {id(value): value for names in modules for value in list(names.values()) if isinstance(value, Agent)}
    times = Counter(agent.name for agent in found.values())
    return {agent.name: agent for agent in found.values() if times[agent.name] == 1}


def _importable(agent: Agent[Any, Any], target: Target, where: str) -> str | None:
    """`module:NAME` of a child's agent, in the parent's module or else in the module that declares the agent.

    None if no such module has a name for the agent.
    """
    module, _, _ = where.rpartition(":")
    file, _, _ = target.recorded.rpartition(":")
    parents = [loaded for loaded in list(sys.modules.values()) if getattr(loaded, "__file__", None) == file]
    own = [(module, vars(loaded)) for loaded in parents] + [(agent.home, vars(sys.modules[agent.home]))] * (agent.home in sys.modules)
    return next((f"{place}:{name}" for place, names in own for name, value in names.items() if value is agent), None)


def _on(row: RunRow) -> str:
    return datetime.fromtimestamp(row.created_at / 1e6, UTC).strftime("%Y-%m-%d")


def _note_redacted(done: Exported) -> None:
    if done.redacted is None:
        return
    if not done.redacted:
        common.note("nothing was redacted: no rule matches anything in this run")
    else:
        common.note(f"{plural(done.redacted, 'value was', 'values were')} redacted; look into the file before you hand it out")
    if done.short:
        common.note(
            f"{plural(done.short, 'redacted value is', 'redacted values are')} short (fewer than {MIN_CHARS} characters, or a number of fewer "
            f"than {MIN_DIGITS} digits): replaced only where a rule has found them, not in other texts"
        )
    if done.left_out:
        common.note(f"{plural(done.left_out, 'artifact was', 'artifacts were')} left out: their bytes cannot be redacted")


def _summary(done: Exported) -> str:
    below = f" and {plural(done.runs - 1, 'run')} below it" if done.runs > 1 else ""
    blobs = f", {plural(done.blobs, 'blob')}" if done.blobs else ""
    blobs += f", {plural(done.artifacts, 'artifact')}" if done.artifacts else ""
    copy = "" if done.redacted is None else " (a redacted copy)"
    return f"run {done.run_id}{below}, {plural(done.events, 'event')}{blobs}{copy}"
