"""Compares the effects of a trial (files, the user's ledger) with those of two undisturbed runs.

If something already differs between the two undisturbed runs, it "differs by itself". Then it is compared only in part
or not at all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any, Literal

from msgspec import Struct

from perdure.testing.lab.contents import MOST_BYTES, FileSeen
from perdure.testing.lab.facts import TrialFacts, Undisturbed

Kind = Literal["more", "fewer", "extra", "missing", "other"]
_TOLERANCE = 0.25  # if a file differs between undisturbed runs, its size may differ by this share


class Difference(Struct, frozen=True):
    """A difference in the effects. "extra" and "missing" are about whole files, "more" and "fewer" about lines."""

    kind: Kind
    words: str


class Unsure(Struct, frozen=True):
    """A thing that differs by itself, so it is not known what would be right."""

    words: str


Said = Difference | Unsure


def why_not(case: TrialFacts, base: Undisturbed) -> str | None:
    """Why the effects of this trial cannot be compared. None if they must be the same as in the undisturbed run."""
    if case.told is None:
        return "the run neither ended nor parked"
    if case.in_doubt:
        return "a call is in doubt"
    if case.told.status != base.status:
        return "the run ended in another way"
    if not base.changed_the_same(case):
        return "the agent made other calls with effects than in the undisturbed run"
    return None


def differences(case: TrialFacts, base: Undisturbed) -> list[Said]:
    """What differs from the undisturbed runs, and what could not be compared."""
    if why_not(case, base) is not None:
        return []
    now, first, second = (facts.evidence for facts in (case, base.first, base.second))
    paired = first.files.keys() & second.files.keys()
    folders = _folders(paired)
    loose = {_folder(path, folders) for path in first.files.keys() ^ second.files.keys()}
    found: list[Said] = []
    for path in sorted(paired | {path for path in now.files if _folder(path, folders) not in loose}):
        found.extend(_file(path, now.files.get(path), first.files.get(path), second.files.get(path)))
    for folder in sorted(loose):
        bags = [
            [file for path, file in one.files.items() if path not in paired and _folder(path, folders) == folder]
            for one in (now, first, second)
        ]
        found.extend(_bag(f"{folder}/" if folder != "." else "the working folder", *bags))
    said = list(_ledger(now.world, first.world, second.world))
    if first.world is not None and not any(isinstance(one, Unsure) for one in said):
        # The user's ledger says which effects count, and the ledger could be compared. So files that differ by
        # themselves do not matter.
        found = [one for one in found if not isinstance(one, Unsure)]
    return [*found, *said]


def loose(base: Undisturbed) -> Iterator[str]:
    """Remarks for the report: which effects could be compared only in part, or not at all."""
    first, second = base.first.evidence, base.second.evidence
    for path in sorted(first.files.keys() & second.files.keys()):
        one, other = first.files[path], second.files[path]
        if one.digest != other.digest:
            yield f"{path} differs by itself between two undisturbed runs: {_how(one, other)}"
    for path in sorted(path for path, file in first.files.items() if file.large):
        yield f"{path} is larger than {MOST_BYTES // 1_000_000} MB: it was compared byte by byte, or by its lines if it differs by itself"
    if unpaired := sorted(first.files.keys() ^ second.files.keys()):
        yield f"{unpaired[0]} exists in only one of two undisturbed runs: such files were compared without their names"
    tools = {place[2] for place, call in base.first.changing.items() if call.effect != "transaction"}
    if tools and not first.files and first.world is None:
        yield "no file was written in the working folder, and there is no ledger: what the tools did elsewhere was not seen"


def _how(one: FileSeen, other: FileSeen) -> str:
    if "bytes" in (one.unit, other.unit) or (one.unit, one.count) != (other.unit, other.count) or one.count == 0:
        return "it was not compared"
    if one.parts:
        return f"it was compared by its number of {one.unit}, and by the parts that are the same in both"
    return "it was compared by its number of lines, and roughly by its size"


# -- files ------------------------------------------------------------------------------------------------------------
def _folders(paths: Any) -> set[str]:
    return {".", *(str(parent) for path in paths for parent in PurePath(path).parents)}


def _folder(path: str, known: set[str]) -> str:
    """The nearest folder above the path that both undisturbed runs have."""
    return next(str(parent) for parent in PurePath(path).parents if str(parent) in known)


def _file(path: str, now: FileSeen | None, first: FileSeen | None, second: FileSeen | None) -> Iterator[Said]:
    if first is None or second is None:
        yield Difference("extra", f"{path} exists, and should not")
    elif now is None:
        yield Difference("missing", f"{path} is missing")
    elif first.digest == second.digest:
        if now.digest != first.digest:
            shown = f': "{now.text}" instead of "{first.text}"' if now.text and first.text else ""
            yield _counted(path, now, first) or Difference("other", f"{path} has another content{shown}")
    else:
        yield from _unsteady(path, now, first, second)


def _counted(path: str, now: FileSeen, first: FileSeen) -> Difference | None:
    if now.unit != first.unit or now.unit == "bytes" or now.count == first.count:
        return None
    return Difference("more" if now.count > first.count else "fewer", f"{path} has {now.count} {now.unit} instead of {first.count}")


def _unsteady(path: str, now: FileSeen, first: FileSeen, second: FileSeen) -> Iterator[Said]:
    """Compare a file that differs by itself.

    The number of lines, entries or rows must be equal. The parts that are equal in both undisturbed runs must be equal
    in the trial too.
    """
    units = {one.unit for one in (now, first, second)}
    if len(units) > 1 or "bytes" in units or first.count != second.count:
        yield Unsure(f"{path} differs by itself")
    elif (counted := _counted(path, now, first)) is not None:
        yield counted
    elif first.parts:
        yield from _parts(path, now.parts, first.parts, second.parts)
    elif first.count == 0:
        yield Unsure(f"{path} differs by itself, and has no lines to count")
    elif not _is_about(now.size, first.size, second.size):
        yield Unsure(f"{path} differs by itself, and has {now.size} bytes instead of {first.size}")


def _parts(path: str, now: Mapping[str, Any], first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterator[Said]:
    if first.keys() != second.keys():
        if not len(now) == len(first) == len(second):
            yield Unsure(f"{path} differs by itself")
        return
    if now.keys() != first.keys():
        kind: Kind = "more" if now.keys() > first.keys() else "fewer" if now.keys() < first.keys() else "other"
        yield Difference(kind, f"{path} has {_named(now.keys() - first.keys())} and lacks {_named(first.keys() - now.keys())}")
        return
    changed = {part for part in first if first[part] == second[part] != now[part]}
    if changed:
        yield Difference("other", f"{path} has another content in {_named(changed)}")


def _named(parts: Any) -> str:
    return ", ".join(part.lstrip(".") for part in sorted(parts)[:3]) or "nothing"


def _is_about(now: int, first: int, second: int) -> bool:
    return min(first, second) * (1 - _TOLERANCE) <= now <= max(first, second) * (1 + _TOLERANCE)


def _bag(where: str, now: Sequence[FileSeen], first: Sequence[FileSeen], second: Sequence[FileSeen]) -> Iterator[Said]:
    """Compare files whose names differ in each run.

    Their number must be equal. If their contents are equal in both undisturbed runs, the contents must be equal too.
    """
    if len(first) != len(second):
        yield Unsure(f"the number of files in {where} differs by itself")
    elif len(now) != len(first):
        kind: Kind = "extra" if len(now) > len(first) else "missing"
        yield Difference(kind, f"{where} has {len(now)} files with names that always differ, instead of {len(first)}")
    elif (bag := _digests(first)) == _digests(second):
        if _digests(now) != bag:
            yield _sums(where, now, first) or Difference("other", f"files in {where} have another content")
    elif "bytes" in {file.unit for file in (*now, *first, *second)} or _sum(first) != _sum(second):
        yield Unsure(f"files in {where} differ by themselves")
    elif (counted := _sums(where, now, first)) is not None:
        yield counted


def _sums(where: str, now: Sequence[FileSeen], first: Sequence[FileSeen]) -> Difference | None:
    have, expected = _sum(now), _sum(first)
    if have == expected:
        return None
    return Difference("more" if have > expected else "fewer", f"files in {where} have {have} lines or entries instead of {expected}")


def _sum(files: Sequence[FileSeen]) -> int:
    return sum(file.count for file in files)


def _digests(files: Sequence[FileSeen]) -> Counter[str]:
    return Counter(file.digest for file in files)


# -- the user's own ledger --------------------------------------------------------------------------------------------
def _ledger(now: Any, first: Any, second: Any) -> Iterator[Said]:
    """Compare the user's ledger. If it is a list that differs by itself, only the length is compared."""
    if isinstance(now, list) and isinstance(first, list) and isinstance(second, list):
        if len(first) != len(second):
            yield Unsure("the ledger differs by itself")
        elif len(now) != len(first):
            kind: Kind = "more" if len(now) > len(first) else "fewer"
            yield Difference(kind, f"the ledger has {len(now)} entries instead of {len(first)}")
        elif _sorted(first) == _sorted(second) != _sorted(now):
            yield Difference("other", "the ledger has other entries")
    elif first != second:
        yield Unsure("the ledger differs by itself")
    elif now != first:
        numbers = all(isinstance(one, (int, float)) for one in (now, first))
        way: Kind = "other" if not numbers else "more" if now > first else "fewer"
        yield Difference(way, f"the ledger says {str(now)[:200]} instead of {str(first)[:200]}")


def _sorted(entries: list[Any]) -> list[str]:
    return sorted(map(repr, entries))
