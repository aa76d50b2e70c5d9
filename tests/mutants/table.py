"""Writes docs/mutants.md from the registry: `python -m tests.mutants.table > docs/mutants.md`."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable

from tests.mutants.mutant import Known, Mutant
from tests.mutants.registry import ALL, KNOWN, SOURCE

_HEAD = """\
# Guards are tested by removing them

A test of a guard proves something only if it fails without the guard. So each dangerous line of perdure is removed, one at a time,
and a test must fail: {source} lines in a copy of the sources, {known} more in the running process of a test, {total} in all.

This page is generated from the registry in `tests/mutants` (`python -m tests.mutants.table > docs/mutants.md`), and a test compares
the two. `make test-full` runs all of it. One mutant alone: `pytest "tests/mutants/test_mutants.py::test_the_named_test_goes_red_when[NAME]"`.

What the guards protect; G… are [promises](what-is-promised.md), T… are known mistakes of such systems:

| | | guards |
|---|---|---|
{summary}

## In a copy of the sources

The text of the line is replaced in a copy, and the named test runs against that copy in its own process. It must fail with an
assertion, or with the error that the mutant causes; a failing import proves nothing. If the text is not in its file
exactly once, the test fails, so that a moved line is noticed. “Without it” is the name of the mutant.

| guard | promise | line | without it | the test that must fail | store |
|---|---|---|---|---|---|
"""
_MIDDLE = """
## In the running process of a test

Here a condition is removed from an SQL statement, or a function is replaced, in a process that is then killed, paused
or raced. The named check also runs with the guard in place, and must pass then.

| guard | promise | where | without it | the check that must fail | store |
|---|---|---|---|---|---|
"""
_WORDS = {
    "G1": "acknowledged data stays",
    "G2": "an intent is durable before its effect begins",
    "G3": "events have no gap, epochs never go back",
    "G4": "only the holder of the lease writes",
    "G5": "after a crash the effect class decides about a call",
    "G6": "no run is lost",
    "G7": "replay makes the same decisions, or stops and says where it differs",
    "G8": "an unknown outcome is shown, and never guessed",
    "G9": "only the approved arguments run, once, in time, decided by a person who may decide",
    "G10": "a finished run stays finished",
    "G11": "every edit of the journal is detected",
    "G12": "a run continues with the version that it has begun with",
    "G13": "a drain loses nothing",
    "G14": "limits are checked before the effect",
    "G15": "no secret is recorded or shown",
    "G16": "a tenant sees nothing of another tenant",
    "T1": "the second failure is not recorded",
    "T2": "a result that cannot be recorded repeats its effect",
    "T3": "a falsy result counts as no result",
    "T4": "two identical calls share a key",
    "T5": "text can move from one part of a key into the next without changing the key",
    "T6": "a gap in the numbers of calls",
    "T8": "a changed plan, or changed code, skips a step",
    "T10": "values that differ between the live run and replay: tuples, keys that are numbers",
    "T11": "order by time",
    "T13": "a lease is no longer renewed, and this is not noticed",
    "T14": "a key that the service has forgotten",
    "T16": "an approval is looked up by its run instead of its id",
    "T17": "of two decisions the last one counts",
    "T18": "other arguments than the approved ones are used",
    "T20": "the agent cannot distinguish rejected from expired",
    "T22": "“not found” before the old attempt's deadline",
    "T23": "a cancel prevents the record of an effect",
    "T24": "a cost is counted twice, or lost",
    "T25": "an event and its consequences are in different transactions",
    "T26": "a run kills its workers, one after the other",
    "T27": "a post after the end of a run",
    "T28": "a conversation that the provider refuses",
    "T30": "a tool or a request changes under a run",
    "T31": "“not found” counts while a request may still arrive",
    "T32": "two journals make the same key for different effects",
    "T33": "a budget is exceeded without limit when workers die",
    "T34": "innocent runs wait one by one because of a poisonous run",
    "T35": "a retry, a rewind or a rehearsal repeats an effect",
    "bad input": "invalid input is refused",
    "calls": "a call changes its state only as its table allows",
    "duplicates": "a message that is sent twice counts once",
    "operating": "probes, metrics and logs say what is true, and harm no worker",
    "batches": "a bulk operation does each run once, and only what the person has seen",
    "restored": "a run from a backup goes on only when a person lets it",
    "ticks": "each tick of a schedule starts one run, by the policies of the schedule",
    "security": "text, files and servers of other users cannot control perdure",
    "specimens": "an imported copy of a run is never driven, and accepts no post",
    "storage": "a commit is complete or absent; an unknown outcome is looked up",
}
_STORES = {"none": "–", "sqlite": "SQLite", "postgres": "PostgreSQL", "both": "both"}


def table() -> str:
    """The whole page."""
    promises = Counter(guard.promise for guard in ALL)
    head = _HEAD.format(source=len(SOURCE), known=len(KNOWN), total=len(ALL), summary="\n".join(_summary(promises)))
    rows = [_source_row(mutant) for mutant in SOURCE]
    return head + "\n".join(rows) + "\n" + _MIDDLE + "\n".join(_known_row(guard) for guard in KNOWN) + "\n"


def _summary(promises: Counter[str]) -> Iterable[str]:
    for promise in sorted(promises, key=lambda promise: (re.sub(r"\d", "", promise), int(re.sub(r"\D", "", promise) or 0))):
        yield f"| {promise} | {_WORDS[promise]} | {promises[promise]} |"


def _source_row(mutant: Mutant) -> str:
    file, _, test = mutant.red.partition("::")
    test = test.rpartition("::")[2].partition("[")[0]
    cells = (
        mutant.guard,
        mutant.promise,
        f"`{mutant.file}` `{mutant.where}`",
        mutant.name.replace("_", " "),
        f"`{file.removeprefix('tests/')}` {_words(test)}",
        _STORES[mutant.store],
    )
    return f"| {' | '.join(cells)} |"


def _known_row(guard: Known) -> str:
    name = guard.name if guard.name.startswith("without") else guard.name.replace("_", " ")
    where = f"`{guard.where}`" if re.fullmatch(r"[\w.]+", guard.where) else guard.where
    cells = (
        guard.guard,
        guard.promise,
        f"{where}, `{guard.removed_in.removeprefix('tests/')}`",
        name,
        _words(guard.red),
        _STORES[guard.store],
    )
    return f"| {' | '.join(cells)} |"


def _words(test: str) -> str:
    return test.removeprefix("test_").removeprefix("check_").replace("_", " ")


if __name__ == "__main__":
    sys.stdout.write(table())
