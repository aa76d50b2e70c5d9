"""What a disk may hold after a power loss: the model.

The power fails at some point of the log of disk.py. Then:

- Data that was written to a file before its last successful sync is there.
- Each write, extension and truncation after that sync is there or not, independently of all others, in this file and
  in other files. The order does not matter: a later write may have reached the disk, and an earlier one not.
- A write may be there in part, in pieces of 512 or of 4096 bytes, any of them. In place of the missing pieces there is
  the earlier content, or zeros where the file was shorter.
- The creation or deletion of a file is durable when its folder was synced. Until then the name may refer to the file
  that it referred to after any of the changes to that name.
- After a sync that failed, the system may have dropped the data of that sync (the system reports this once). No later
  sync writes this data; the data has to be written again.

A power loss in the middle of a sync has the same results as one right before it: a part of the data has arrived.

The model assumes the same as SQLite does by default: a write does not change the bytes beside it (powersafe
overwrite), and data on the disk can be read back unchanged. A disk that reports a sync without doing it is outside of
this model; test_checks_can_fail.py shows the damage.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.power.disk import Created, Cut, FolderSynced, Found, Noted, Op, Synced, Unlinked, Written

Image = dict[str, bytes]  # a folder: contents by name
SECTORS = (512, 4096)


@dataclass(slots=True)
class _Change:
    op: Written | Cut
    settled: bool = False  # it is certainly on the disk
    doubtful: bool = False  # a sync of it has failed


@dataclass(frozen=True, slots=True)
class _Lost:
    """What of a change does not arrive: all of it, or some sectors."""

    sector: int = 0  # 0: all of it
    arrived: frozenset[int] = frozenset()


_WHOLLY = _Lost()


@dataclass(slots=True)
class _File:
    base: bytes = b""
    changes: list[_Change] = field(default_factory=list)

    def synced(self) -> None:
        for change in self.changes:
            change.settled = change.settled or not change.doubtful
        rewritten = {(change.op.offset, len(change.op.data)): change for change in self.changes if isinstance(change.op, Written)}
        for change in self.changes:
            if change.doubtful and isinstance(change.op, Written):
                newest = rewritten[change.op.offset, len(change.op.data)]
                change.settled = change.settled or (newest is not change and newest.settled)
        while self.changes and self.changes[0].settled:
            self.base = bytes(_applied(bytearray(self.base), self.changes.pop(0).op))

    def sync_failed(self) -> None:
        for change in self.changes:
            change.doubtful = change.doubtful or not change.settled

    def content(self, lost: dict[int, _Lost]) -> bytes:
        content = bytearray(self.base)
        for change in self.changes:
            missing = lost.get(id(change))
            if missing is None:
                _applied(content, change.op)
            elif missing.sector:
                assert isinstance(change.op, Written)
                _torn(content, change.op, missing)
        return bytes(content)


class Medium:
    """A disk on the way through the log: what has surely arrived, and what may have."""

    def __init__(self) -> None:
        self._files: dict[int, _File] = {}
        # Name → the files that it may refer to: the first is certain, the others until a sync of the folder.
        self._names: dict[str, list[int | None]] = {}

    def take(self, op: Op) -> None:
        """The next operation."""
        match op:
            case Created(name, inode):
                self._files[inode] = _File()
                self._names.setdefault(name, [None]).append(inode)
            case Found(name, inode, content):
                self._files[inode] = _File(content)
                self._names[name] = [inode]
            case Unlinked(name):
                self._names[name].append(None)
            case Written(inode) | Cut(inode):
                self._files[inode].changes.append(_Change(op))
            case Synced(inode, failed=True):
                self._files[inode].sync_failed()
            case Synced(inode):
                self._files[inode].synced()
            case FolderSynced():
                self._names = {name: stages[-1:] for name, stages in self._names.items()}
            case Noted():
                pass

    def extremes(self) -> Iterator[tuple[str, Image]]:
        """All of it has arrived; nothing has that may not have; all of one file has, and nothing of the others."""
        unsure = [[change for change in file.changes if not change.settled] for file in self._reachable()]
        yield "all arrived", self._image({}, {})
        if any(unsure):
            yield "nothing arrived", self._image({id(change): _WHOLLY for each in unsure for change in each}, {})
        if sum(map(bool, unsure)) > 1:
            for kept in unsure:
                yield "one file", self._image({id(change): _WHOLLY for other in unsure if other is not kept for change in other}, {})

    def between(self, chance: random.Random, each: int) -> Iterator[tuple[str, Image]]:
        """Some of it has arrived: so many folders of every kind, each with its kind."""
        unsure = [change for file in self._reachable() for change in file.changes if not change.settled]
        wide = [change for change in unsure if isinstance(change.op, Written) and len(change.op.data) > SECTORS[0]]
        moving = {name: len(stages) for name, stages in self._names.items() if len(stages) > 1}
        for _ in range(each):
            if wide:
                torn = chance.choice(wide)
                yield "one torn", self._image({id(torn): _tear(chance, torn)}, {})
            if len(unsure) > 1:
                # The last operation is the one that the point before did not have.
                yield "one lost", self._image({id(chance.choice(unsure[:-1])): _WHOLLY}, {})
                kept = chance.choice(unsure)
                yield "one alone", self._image({id(change): _WHOLLY for change in unsure if change is not kept}, {})
                yield "any of them", self._image(_any_lost(chance, unsure), {})
            if moving:
                stages = {name: chance.randrange(count) for name, count in moving.items()}
                yield "names", self._image(_any_lost(chance, unsure), stages)

    def _reachable(self) -> list[_File]:
        return [self._files[inode] for inode in sorted({inode for stages in self._names.values() for inode in stages if inode})]

    def _image(self, lost: dict[int, _Lost], stages: dict[str, int]) -> Image:
        """The folder without the lost operations; a name refers to its last file, unless `stages` says another."""
        chosen = {name: options[stages.get(name, -1)] for name, options in self._names.items()}
        return {name: self._files[inode].content(lost) for name, inode in chosen.items() if inode is not None}


def _applied(content: bytearray, op: Written | Cut) -> bytearray:
    match op:
        case Written(offset=offset, data=data):
            _grow(content, offset)
            content[offset : offset + len(data)] = data
        case Cut(size=size):
            del content[size:]
            _grow(content, size)
    return content


def _torn(content: bytearray, op: Written, lost: _Lost) -> None:
    for sector in lost.arrived:
        begin, end = max(op.offset, sector * lost.sector), min(op.offset + len(op.data), (sector + 1) * lost.sector)
        _grow(content, begin)
        content[begin:end] = op.data[begin - op.offset : end - op.offset]


def _grow(content: bytearray, size: int) -> None:
    if len(content) < size:
        content.extend(bytes(size - len(content)))


def _any_lost(chance: random.Random, unsure: list[_Change]) -> dict[int, _Lost]:
    """Each arrives, or does not, or in part; how likely is a matter of chance too."""
    arrives = chance.choice((0.2, 0.5, 0.8, 0.95))
    return {id(change): _tear(chance, change) if chance.random() < 0.3 else _WHOLLY for change in unsure if chance.random() > arrives}


def _tear(chance: random.Random, change: _Change) -> _Lost:
    op = change.op
    if isinstance(op, Cut):
        return _WHOLLY
    size = chance.choice(SECTORS)
    sectors = range(op.offset // size, (op.offset + len(op.data) - 1) // size + 1)
    if len(sectors) == 1:
        return _WHOLLY
    if chance.random() < 0.5:
        cut = chance.randrange(1, len(sectors))
        arrived = sectors[:cut] if chance.random() < 0.7 else sectors[cut:]
    else:
        arrived = [sector for sector in sectors if chance.random() < 0.5]  # type: ignore[assignment]
    return _Lost(size, frozenset(arrived))
