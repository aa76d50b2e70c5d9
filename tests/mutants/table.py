"""The table of docs/mutants.md, made of the registry: `python -m tests.mutants.table > docs/mutants.md`."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable

from tests.mutants.mutant import Known, Mutant
from tests.mutants.registry import ALL, KNOWN, SOURCE

_HEAD = """\
# Guards are tested by removing them

A test of a guard is worth what it says when the guard is gone. So each dangerous line of perdure is taken out, one at a time, and a
test must go red: {source} of them in a copy of the sources, {known} more in the running process of a test, {total} in all.

This page is made of the registry in `tests/mutants` (`python -m tests.mutants.table > docs/mutants.md`), and a test compares the two.
`make test-full` runs all of it. One mutant alone: `pytest "tests/mutants/test_mutants.py::test_the_named_test_goes_red_when[NAME]"`.

What the guards keep; G… are [promises](what-is-promised.md), T… are traps that others have fallen into:

| | | guards |
|---|---|---|
{summary}

## In a copy of the sources

The text of the line is replaced in a copy, and the named test runs against that copy in a process of its own. It must fail with an
assertion, or with the error that the mutant leads to; an import that fails proves nothing. Where the text does not stand in its file
exactly once, the test fails: a line that has moved is noticed.

| guard | promise | line | without it | the test that goes red | store |
|---|---|---|---|---|---|
"""
_MIDDLE = """
## In the running process of a test

Statements without one of their conditions, and functions replaced in a process that is then killed, paused
or raced with. The named check is run with the guard in place, too, and is green then.

| guard | promise | where | without it | the check that goes red | store |
|---|---|---|---|---|---|
"""
_WORDS = {
    "G1": "what was acknowledged survives",
    "G2": "an intent is durable before its effect begins",
    "G3": "events have no gap, epochs never go back",
    "G4": "only the holder of the lease writes",
    "G5": "after a crash a call behaves as its effect class says",
    "G6": "no run is stranded",
    "G7": "replay takes the same decisions, or says where it does not",
    "G8": "a doubt is shown, and never guessed away",
    "G9": "only what was approved runs, once, in time, by the word of somebody who may give it",
    "G10": "a finished run stays finished",
    "G11": "every edit of the journal is detected",
    "G12": "a run goes on with the version that it was begun with",
    "G13": "a drain abandons nothing",
    "G14": "limits are checked before the effect",
    "G15": "no secret is written down",
    "G16": "a tenant sees nothing of another",
    "T1": "the second failure is not recorded",
    "T2": "a result that cannot be recorded repeats its effect",
    "T3": "a falsy result is taken for none",
    "T4": "two identical calls share a key",
    "T5": "the parts of a key can be shifted",
    "T6": "a hole below the last completed call",
    "T8": "a changed plan, or changed code, skips a step",
    "T10": "what differs between live and replay: tuples, keys that are numbers",
    "T11": "order by time",
    "T13": "a lease that is not renewed any more, and nobody hears of it",
    "T14": "a key that the service has forgotten",
    "T16": "an approval that is found by its run and not by its id",
    "T17": "of two decisions the last one wins",
    "T18": "other arguments than the approved ones",
    "T20": "rejected and expired are told as one",
    "T22": "“not found” while the request is on its way",
    "T23": "an effect that a cancel keeps from being recorded",
    "T24": "cost that is counted twice, or lost",
    "T25": "news in another transaction than what they are about",
    "T26": "a run that kills its workers, one after the other",
    "T27": "a message after the end",
    "T28": "a conversation that no provider takes any more",
    "T30": "a tool or a request that changes under a run",
    "T31": "“not found” that is believed while a request may still arrive",
    "T32": "two journals that make the same key for different effects",
    "T33": "a budget without a bound across deaths",
    "T34": "innocent runs that wait in line for the poisonous one",
    "bad input": "what cannot be meant is refused",
    "calls": "a call moves as its table says",
    "duplicates": "what is sent twice counts once",
    "security": "text, files and servers of others decide nothing here",
    "storage": "one commit, whole or not at all; an unknown outcome is looked up",
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
