"""`perdure verify`: was a journal changed after it was written?"""

from __future__ import annotations

import click
import msgspec

from perdure.cli import common
from perdure.errors import InvalidInput, StoreCorrupt
from perdure.inspect.consistency import Relatives
from perdure.inspect.retention import pruned_runs
from perdure.inspect.text import plural
from perdure.inspect.verify import Verdict, verify_run
from perdure.inspect.view import all_rows, require


@click.command("verify")
@common.optional_run_argument
@click.option("--export", "file", metavar="FILE", help="Verify the runs in a file of `perdure export`, without a database.")
@common.url_option
@common.json_option
def command(run_id: str | None, file: str | None, url: str | None, as_json: bool) -> int:
    """Recompute the hash chain of RUN, or of every run, from the stored bytes.

    Code 7 when something is not as it was written; the first bad event is named. Without RUN also: whether every
    journal has its run, and whether the database still has the triggers that keep journals append-only.
    """
    if file is not None:
        if run_id is not None:
            raise InvalidInput("give a run of the database, or a file: perdure verify RUN, or perdure verify --export FILE")
        return _exported(file, as_json)
    bad = runs = events = 0
    with common.existing_runs(url) as store:
        relatives = Relatives(store)
        for row in [require(store, run_id)] if run_id is not None else all_rows(store):
            verdict = verify_run(store, row, relatives)
            runs, events, bad = runs + 1, events + verdict.events, bad + (verdict.problem is not None)
            if as_json:
                common.out_json(msgspec.to_builtins(verdict))
            elif verdict.problem is not None or run_id is not None:
                common.out(common.clean(_line(verdict)))
        problems = store.problems() if run_id is None else []
        pruned = pruned_runs(store)
    for problem in problems:
        if as_json:
            common.out_json({"run_id": None, "problem": problem})
        else:
            common.out(common.clean(problem))
    if run_id is None and not as_json:
        written = f"{bad:,} not as they were written" if bad else "all as they were written"
        whole = f"; {plural(len(problems), 'thing is', 'things are')} wrong with the database as a whole" if problems else ""
        gone = f"; {plural(pruned, 'run was', 'runs were')} pruned before" if pruned else ""
        common.out(f"{plural(runs, 'run')}, {plural(events, 'event')}: {written}{whole}{gone}")
    return common.DIFFERENT if bad or problems else common.SUCCEEDED


def _exported(file: str, as_json: bool) -> int:
    from perdure.inspect.export import verdicts

    bad = runs = 0
    whole = True
    try:
        for verdict in verdicts(file):
            runs, bad = runs + 1, bad + (verdict.problem is not None)
            if as_json:
                common.out_json(msgspec.to_builtins(verdict))
            else:
                common.out(common.clean(_line(verdict)))
    except StoreCorrupt as damage:
        whole = False
        if as_json:
            common.out_json({"run_id": None, "problem": str(damage)})
        else:
            common.out(common.clean(str(damage)))
    if not as_json:
        # This is always the last line: the lines before are about single runs, and this line is about the whole file.
        broken = f"{bad:,} of {plural(runs, 'run')} not as written" if bad else "the file was changed, even if its runs were not"
        found = f"intact: {plural(runs, 'run')}" if whole and not bad else f"NOT INTACT: {broken}"
        common.out(common.clean(f"{file}: {found}"))
    return common.SUCCEEDED if whole and not bad else common.DIFFERENT


def _line(verdict: Verdict) -> str:
    if verdict.problem is None:
        return f"run {verdict.run_id}: all {verdict.events:,} events are as they were written; head {verdict.head}"
    place = f", event {verdict.seq}" if verdict.seq is not None else ""
    return f"run {verdict.run_id}{place}: {verdict.problem}"
