"""Effects that show twice: the world after a trial beside the world after the undisturbed run, and which tool is to blame."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from perdure.testing.lab.facts import Facts, Place, Undisturbed
from perdure.testing.lab.records import Problem, Repeat
from perdure.testing.lab.rules import wrong
from perdure.testing.lab.world import FileSeen

Seen = tuple[Facts, tuple[Repeat, ...], list[str]]  # a trial, what was called again in it, and how the world differs

_TWICE: Mapping[str, tuple[str, str]] = {
    "idempotent": (
        "declared idempotent, and its effect shows twice",
        "declare it keyed and pass call.key on to a service that drops duplicates, or once with a reconcile hook",
    ),
    "keyed": (
        "declared keyed, and its effect shows twice though the key was the same: it ignores its key, or the service does",
        "pass call.key on; if the service drops no duplicates, declare it once with a reconcile hook",
    ),
    "read": ("declared read, and it changes the world", "declare what it does: idempotent, keyed, transaction or once"),
    "transaction": (
        "declared transaction, and it changes something that is not rolled back",
        "write through call.connection alone, and do the rest in a tool of its own",
    ),
    "once": (
        "its reconcile hook said that it had not happened, and its effect shows twice",
        "have the hook look for this very call, by call.key, and say unknown when it cannot tell",
    ),
}


def differences(case: Facts, base: Undisturbed) -> list[str]:
    """How the world is not as it should be, in words.

    While a call is in doubt, or when the agent has gone another way, nobody can say how it should be.
    """
    if case.told is None or case.in_doubt or case.told.status != base.status or set(case.calls) != set(base.first.calls):
        return []
    first, second = base.first.evidence, base.second.evidence
    found = []
    for path in sorted({*first.files, *case.evidence.files}):
        said = _file(path, case.evidence.files.get(path), first.files.get(path), second.files.get(path))
        if said is not None:
            found.append(said)
    return [*found, *_seen(case.evidence.world, first.world, second.world)]


def _file(path: str, now: FileSeen | None, first: FileSeen | None, second: FileSeen | None) -> str | None:
    if (first is None) != (second is None):
        return None  # it comes and goes by itself
    if now is None or first is None or second is None:
        return None if now is first else f"{path} is {'missing' if now is None else 'there, and should not be'}"
    if now.lines != first.lines and first.lines == second.lines:
        return f"{path} has {now.lines} lines instead of {first.lines}"
    if first.digest == second.digest != now.digest:
        return f"{path} has another content"
    return None


def _seen(now: Any, first: Any, second: Any) -> Iterator[str]:
    """What the user's own ledger has: the same, or where two undisturbed runs differ by themselves, as much of it."""
    if isinstance(now, list) and isinstance(first, list) and isinstance(second, list):
        if len(now) != len(first) == len(second):
            yield f"the ledger has {len(now)} entries instead of {len(first)}"
        elif _sorted(first) == _sorted(second) != _sorted(now):
            yield "the ledger has other entries"
    elif first == second and now != first:
        yield f"the ledger says {str(now)[:200]} instead of {str(first)[:200]}"


def _sorted(entries: list[Any]) -> list[str]:
    return sorted(map(repr, entries))


class Suspects:
    """Finds out which tool has had its effect twice. Trials in which one tool alone was called again are heard first."""

    def __init__(self, seen: Sequence[Seen], base: Undisturbed) -> None:
        self._guilty: set[str] = set()
        self._innocent = {place[2] for case, _, found in seen if not found for place in case.places if _returned_again(case, base, place)}

    def accuse(self, case: Facts, repeated: Sequence[Repeat], found: Sequence[str]) -> Iterator[Problem]:
        """The problem with each tool that may have done this."""
        detail = "; ".join(found)
        twice = "shows twice" if "instead of" in detail else "is not the same again"
        candidates = [one for one in repeated if one.effect != "model"]
        # Whoever has been guilty before is so again; whoever was called again elsewhere, and the world was as it should be, is not; and
        # whoever declares that it changes something is suspected before a read.
        candidates = [one for one in candidates if one.tool in self._guilty] or candidates
        candidates = [one for one in candidates if one.tool not in self._innocent] or candidates
        candidates = [one for one in candidates if one.effect != "read"] or candidates
        for one in candidates:
            if len(candidates) == 1:
                self._guilty.add(one.tool)
            sentence, way_out = _TWICE[one.effect]
            sentence = sentence.replace("shows twice", twice)
            among = "" if len(candidates) == 1 else " (or another one that was called again with it)"
            yield wrong("effect_twice", case, f"{sentence}{among}: {detail}", way_out, one.tool)
        if not candidates:
            sentence = f"no tool was called twice, and the world is not as after the undisturbed run: {detail}"
            way_out = "what a tool leaves in its process (a buffer, a task, a variable) dies with it: have it in the world when it returns"
            yield wrong("effect_lost", case, sentence, way_out)


def _returned_again(case: Facts, base: Undisturbed, place: Place) -> bool:
    return len(case.of(place, "returned")) > base.expected(place)
