"""Checks the journal-wide chain: was the end of a journal cut off, was a run deleted, was the chain itself changed?

If the last events of a run were deleted, and its row was changed to match, the run's own hash chain cannot show that.
The journal-wide chain can show it: at each release it gets the last event of the run. A user with write access to
everything can compute the whole chain again. Only heads of the chain that were kept elsewhere reveal such a change
(`verify --against`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from perdure.core.identity import ChainEntry, chain_link
from perdure.engine.api import Reading
from perdure.errors import InvalidInput
from perdure.store.api import MissingHead


class ChainHead(Struct, frozen=True):
    """One hash that stands for a chain up to entry `n`."""

    chain: int
    n: int
    link: str


def chain_heads(store: Reading) -> list[ChainHead]:
    """The current head of each chain, to be kept in another place."""
    ends = [(end.chain, end.n, end.link or b"") for end in store.chain_ends()] or [(0, 0, b"")]
    heads = []
    for chain, n, link in ends:
        rest = list(_entries(store, (chain, n), chain))
        if rest or n:
            heads.append(ChainHead(chain, rest[-1].n if rest else n, (chain_link(link, rest) if rest else link).hex()))
    return heads


def read_heads(file: str) -> list[ChainHead]:
    """The heads in a file that `perdure verify --heads` has written."""
    try:
        lines = Path(file).read_bytes().splitlines()
        heads = [msgspec.json.decode(line, type=ChainHead) for line in lines if line.strip()]
    except OSError as error:
        raise InvalidInput(f"{file}: {error.strerror or error}") from None
    except msgspec.MsgspecError as error:
        raise InvalidInput(f"{file} does not hold heads of a chain ({error}); write them with: perdure verify --heads > FILE") from None
    if not heads:
        raise InvalidInput(f"{file} is empty; write heads of the chain into it with: perdure verify --heads > FILE")
    return heads


def chain_problems(store: Reading, kept: Sequence[ChainHead] = ()) -> Iterator[str]:
    """What is wrong with the chain itself, in words. A kept head that is not in the chain is a problem too."""
    wanted = {(head.chain, head.n): head.link for head in kept}
    chain, n, before = None, 0, b""
    open_: list[ChainEntry] = []  # the entries since the last link
    broken: set[int] = set()
    for entry in _entries(store, (-(2**31), 0), None):
        if entry.chain != chain:
            chain, n, before, open_ = entry.chain, 0, b"", []
        if entry.n != n + 1 and chain not in broken:
            broken.add(entry.chain)
            gone = f"entry {n + 1} was" if entry.n == n + 2 else f"entries {n + 1} to {entry.n - 1} were"
            yield f"the journal-wide chain{_number(entry.chain)}: {gone} deleted"
        n = entry.n
        open_.append(entry)
        computed = chain_link(before, open_) if entry.link is not None or (entry.chain, n) in wanted else None
        if entry.link is not None:
            if entry.link != computed and chain not in broken:
                broken.add(entry.chain)
                yield f"the journal-wide chain{_number(entry.chain)}: entry {n}, or one before it, is not what was written"
            before, open_ = entry.link, []
        link = wanted.pop((entry.chain, n), None)
        if link is not None and computed is not None and link != computed.hex():
            yield f"the journal-wide chain{_number(entry.chain)} up to entry {n} is not the one whose head was kept: history was rewritten"
    for chain, n in wanted:
        yield (
            f"the journal-wide chain{_number(chain)} has no entry {n}, whose head was kept: the journal was cut, replaced, restored from "
            "an older copy, or copied to this database (`perdure copy` begins a new chain)"
        )


def missing_ends(store: Reading, run_id: str | None = None) -> tuple[dict[str, str], list[str]]:
    """The problem of each run whose end was cut off or is in no chain. Also, in words, the runs that were deleted."""
    cut: dict[str, str] = {}
    deleted: list[str] = []
    for run, seq in store.unchained(run_id).items():
        cut[run] = (
            f"its last event, {seq}, is not in the journal-wide chain: the end of the chain was cut off, or the event was written while "
            "the database's triggers were switched off"
        )
    for missing in store.missing_heads(run_id):
        if missing.run_id is None or missing.name not in (None, missing.run_id):
            deleted.append(_deleted(missing))
        else:
            cut[missing.run_id] = _cut(missing)
    return cut, deleted


def _deleted(missing: MissingHead) -> str:
    name = f"run number {missing.number}" if missing.name is None else f"run {missing.name!r}"
    return (
        f"{name}: the journal-wide chain has it with {missing.last_seq:,} events, and it is gone without a tombstone: it was "
        "deleted; restore it from a backup"
    )


def _cut(missing: MissingHead) -> str:
    assert missing.seq is not None
    if missing.seq < missing.last_seq:
        return (
            f"its end was cut off: the journal-wide chain has event {missing.last_seq}, and the journal ends with event {missing.seq}; "
            "restore it from a backup, or what it did after that may be done again"
        )
    return f"its journal was rewritten: event {missing.first_seq} is not the one that the journal-wide chain has"


def _entries(store: Reading, after: tuple[int, int], only: int | None) -> Iterator[ChainEntry]:
    while page := store.chain(after):
        for entry in page:
            if only is not None and entry.chain != only:
                return
            yield entry
        after = (page[-1].chain, page[-1].n)


def _number(chain: int) -> str:
    return "" if chain == 0 else f" {chain}"
