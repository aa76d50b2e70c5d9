"""`perdure verify`: was a journal changed after it was written?"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import cast

import click
import msgspec
from msgspec import structs

from perdure.cli import common
from perdure.errors import InvalidInput, StoreCorrupt
from perdure.inspect.chain import chain_heads, chain_problems, missing_ends, read_heads
from perdure.inspect.consistency import Relatives
from perdure.inspect.repair import plan_repair
from perdure.inspect.retention import pruned_runs
from perdure.inspect.schedules import schedule_problems
from perdure.inspect.signed import NAMED, Book, Comparison, PublicKey, compare, kept_heads
from perdure.inspect.text import plural
from perdure.inspect.verify import Verdict, verify_run
from perdure.inspect.view import all_rows, require
from perdure.store.api import Store


@click.command("verify")
@common.optional_run_argument
@click.option("--heads", is_flag=True, help="Only print the heads of the journal-wide chain, to be kept in another place.")
@click.option("--against", metavar="FILE", help="Also compare with heads of the chain that were kept in FILE.")
@click.option("--signatures", metavar="FILE", help="Also compare with the statements that `perdure sign` has written to FILE.")
@click.option("--public-key", metavar="FILE", help="With --signatures: the public key of the signer.")
@click.option("--repair", is_flag=True, help="Write rows that contradict a sound journal again, from the journal. Asks first.")
@click.option("--yes", is_flag=True, help="Repair without asking.")
@click.option("--export", "file", metavar="FILE", help="Verify the runs in a file of `perdure export`, without a database.")
@common.url_option
@common.json_option
def command(
    run_id: str | None,
    file: str | None,
    heads: bool,
    against: str | None,
    signatures: str | None,
    public_key: str | None,
    repair: bool,
    yes: bool,
    url: str | None,
    as_json: bool,
) -> int:
    """Recompute the hash chain of RUN, or of every run, from the stored bytes.

    Code 7 when something is not as it was written; the first bad event is named. The journal-wide chain shows whether
    the end of a journal was cut off. Without RUN it also checks whether a run was deleted, whether every journal has
    its run, whether the journals and rows of schedules are as they were written, and whether the database still has the
    triggers that keep journals append-only.

    --repair never changes an event. It refuses a run that a worker holds. It does not repair what only a backup can
    restore.
    """
    if yes and not repair:
        raise InvalidInput("--yes belongs to --repair: without it nothing is changed, and nothing is asked")
    if file is not None:
        if run_id is not None or heads or against is not None or signatures is not None or repair:
            raise InvalidInput("give a run of the database, or a file: perdure verify RUN, or perdure verify --export FILE")
        return _exported(file, as_json)
    if run_id is not None and (heads or against is not None or signatures is not None):
        raise InvalidInput("heads and signatures are those of the whole journal: leave RUN out, or leave out these options")
    if (signatures is None) != (public_key is None):
        raise InvalidInput("--signatures FILE and --public-key FILE belong together: a statement counts if this key has signed it")
    kept = [] if against is None else read_heads(against)
    book = None if signatures is None or public_key is None else Book.read(Path(signatures), PublicKey.read(Path(public_key)))
    bad = wrong_rows = runs = events = redacted = 0
    with common.existing_store(url) if repair else common.existing_runs(url) as store:
        if heads:
            for head in chain_heads(store):
                common.out_json(msgspec.to_builtins(head))
            return common.SUCCEEDED
        relatives = Relatives(store)
        cut, deleted = missing_ends(store, run_id)
        for row in [require(store, run_id)] if run_id is not None else all_rows(store):
            verdict = verify_run(store, row, relatives)
            ends = cut
            redacted += verdict.original_head is not None
            if repair and verdict.projection and row.specimen is None:
                verdict = _repaired(cast(Store, store), verdict, yes, as_json)
                ends = missing_ends(store, row.run_id)[0]
            if row.run_id in ends and (verdict.problem is None or verdict.projection):
                verdict = structs.replace(verdict, problem=ends[row.run_id], projection=False)
            runs, events, bad = runs + 1, events + verdict.events, bad + (verdict.problem is not None)
            wrong_rows += verdict.problem is not None and verdict.projection
            if as_json:
                common.out_json(msgspec.to_builtins(verdict))
            elif verdict.problem is not None or run_id is not None:
                common.out(common.clean(_line(verdict)))
        kept += [] if book is None else kept_heads(book)
        problems = [*store.problems(), *deleted, *schedule_problems(store), *chain_problems(store, kept)] if run_id is None else []
        compared = None if book is None else compare(store, book)
        problems += [] if book is None or compared is None else _unsigned(str(signatures), book, compared)
        pruned = pruned_runs(store)
    for problem in problems:
        if as_json:
            common.out_json({"run_id": None, "problem": problem})
        else:
            common.out(common.clean(problem))
    if book is not None and not as_json:
        common.out(common.clean(_told(str(signatures), book)))
    if compared is not None and compared.uncompared:
        if as_json:
            common.out_json({"run_id": None, "problem": None, "uncompared": compared.uncompared})
        else:
            common.out(common.clean(_removed(compared.uncompared)))
    if run_id is None and not as_json:
        damaged = bad - wrong_rows
        found = [
            *([f"{plural(damaged, 'journal is', 'journals are')} not as written"] if damaged else []),
            *([f"{plural(wrong_rows, 'row contradicts its', 'rows contradict their')} sound journal"] if wrong_rows else []),
        ]
        written = ", ".join(found) or "all as they were written"
        whole = f"; {plural(len(problems), 'thing is', 'things are')} wrong with the database as a whole" if problems else ""
        gone = f"; {plural(pruned, 'run was', 'runs were')} pruned before" if pruned else ""
        copies = (
            f"; {plural(redacted, 'run is a redacted copy', 'runs are redacted copies')}, whose content cannot be verified"
            if redacted
            else ""
        )
        common.out(f"checked {plural(runs, 'run')} with {plural(events, 'event')}: {written}{copies}{whole}{gone}")
    return common.DIFFERENT if bad or problems else common.SUCCEEDED


def _removed(runs: list[str]) -> str:
    more = f" and {len(runs) - NAMED:,} more" if len(runs) > NAMED else ""
    return (
        f"not comparable with the statements: signed events of {plural(len(runs), 'run')}, which prune --before-checkpoint removed before "
        f"a later statement: {', '.join(runs[:NAMED])}{more}"
    )


def _unsigned(file: str, book: Book, compared: Comparison) -> list[str]:
    """How the journal contradicts the statements, in words. At most NAMED runs are named one by one."""
    empty = None if book.statements else f"{file} holds no statement that this key has signed"
    found = [problem for problem in (book.problem or empty,) if problem is not None]
    wrong = compared.problems
    more = len(wrong) - NAMED
    return [*found, *wrong[:NAMED], *([f"and {plural(more, 'more run')} that contradict the statements"] if more > 0 else [])]


def _told(file: str, book: Book) -> str:
    if not book.statements:
        return f"{file}: no statement was compared"
    last = book.statements[-1]
    torn = f"; {plural(book.torn_bytes, 'byte')} after it are of a statement that was never finished" if book.torn_bytes else ""
    return f"{file}: {plural(len(book.statements), 'statement')}, the last of {last.at} about {plural(last.runs, 'run')}{torn}"


def _repaired(store: Store, verdict: Verdict, yes: bool, as_json: bool) -> Verdict:
    """Show the repair, if there is one, and write it if the user agrees. Returns the verdict after the repair."""
    row = require(store, verdict.run_id)
    planned = plan_repair(store, row)
    if planned is None:
        return verdict
    common.note(common.clean(f"run {planned.run_id}: {verdict.problem}"))
    for line in planned.words:
        common.note(common.clean(f"  {line}"))
    if not yes:
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            raise InvalidInput(f"the rows of run {planned.run_id} would be written as named above; say --yes to do it")
        if not click.confirm(f"write these rows of run {planned.run_id}?", err=True):
            return verdict
    store.repair(planned)
    after = verify_run(store, require(store, verdict.run_id))
    if as_json:
        common.out_json({"run_id": planned.run_id, "repaired": list(planned.words)})
    else:
        common.out(common.clean(f"run {planned.run_id}: repaired from its journal: {'; '.join(planned.words)}"))
    return after


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
    if verdict.problem is None and verdict.original_head is not None:
        return (
            f"run {verdict.run_id}: redacted copy: content cannot be verified, original head {verdict.original_head}; "
            f"all {verdict.events:,} events are as they were redacted"
        )
    if verdict.problem is None:
        return f"run {verdict.run_id}: all {verdict.events:,} events are as they were written; head {verdict.head}"
    place = f", event {verdict.seq}" if verdict.seq is not None else ""
    return f"run {verdict.run_id}{place}: {verdict.problem}"
