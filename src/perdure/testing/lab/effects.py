"""Effects that show twice, or not at all: which tool is to blame for a world that is not as after the undisturbed run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from msgspec import Struct

from perdure.testing.lab.comparing import Difference, Unsure, differences, why_not
from perdure.testing.lab.facts import HARMLESS, Facts, Place, Undisturbed
from perdure.testing.lab.records import Problem, Repeat
from perdure.testing.lab.rules import NOT_FINAL, asked_too_late, note, repeats, wrong

_IN_ITS_PROCESS = "what a tool leaves in its process (a buffer, a task, a variable) dies with it: have it in the world when it returns"


class Seen(Struct, frozen=True):
    """A trial, what was called again in it, how the world differs, and what kept it from being compared."""

    case: Facts
    repeated: tuple[Repeat, ...]
    found: tuple[Difference, ...]
    unsure: tuple[str, ...]

    @property
    def words(self) -> str:
        return "; ".join(one.words for one in self.found)

    def is_all(self, *kinds: str) -> bool:
        return all(one.kind in kinds for one in self.found)


def look(case: Facts, base: Undisturbed) -> Seen:
    """Hold the world of a trial against that of the undisturbed run."""
    repeated = tuple(repeats(case, base))
    said = differences(case, base)
    found = tuple(one for one in said if isinstance(one, Difference))
    unsure = [one.words for one in said if isinstance(one, Unsure)] if any(one.effect not in HARMLESS for one in repeated) else []
    if (why := why_not(case, base)) is not None:
        unsure.append(why)
    seen = Seen(case, repeated, found, tuple(unsure))
    if found and (why := _nobodys_fault(seen, base)) is not None:
        return Seen(case, repeated, (), (*unsure, f"{why}: {seen.words}"))
    return seen


def _nobodys_fault(seen: Seen, base: Undisturbed) -> str | None:
    """Why the world is another one for a reason that is none of a tool's."""
    if seen.is_all("fewer", "missing") and base.called_less(seen.case):
        return "a function was called less often than undisturbed"
    if asked_too_late(seen.case):
        return "the machine was slow: a reconcile hook was asked for the first time when a late request could no longer have come"
    if not base.went_the_same_way(seen.case) and all(one.effect in HARMLESS for one in seen.repeated):
        return "the agent made other calls than undisturbed"
    return None


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


class Suspects:
    """Finds out which tool has had its effect twice. Trials in which one tool alone was called again are heard first."""

    def __init__(self, seen: Sequence[Seen], base: Undisturbed) -> None:
        self._guilty: set[str] = set()
        clean = [one.case for one in seen if not one.found and not one.unsure]
        self._innocent = {place[2] for case in clean for place in case.places if _returned_again(case, base, place)}

    def accuse(self, seen: Seen) -> Iterator[Problem]:
        """The problem with each tool that may have done this."""
        if seen.is_all("extra") and (cut := seen.case.cut_off):
            # What an atomic write had not yet moved to its place: nobody looks at it. Had the tool made a second one of what counts, it
            # would show where it is killed after it has returned.
            sentence = f"cut off in its middle, it leaves something behind that nobody clears away: {seen.words}"
            yield note("left_behind", seen.case, sentence, "fine if it is a temporary file: clear old ones away now and then", cut[0][2])
        elif seen.is_all("fewer", "missing"):
            yield from self._lost(seen)
        else:
            yield from self._twice(seen)

    def _candidates(self, seen: Seen) -> list[Repeat]:
        # Whoever has been guilty before is so again; whoever was called again elsewhere, and the world was as it should be, is not; and
        # whoever declares that it changes something is suspected before a read.
        found = [one for one in seen.repeated if one.effect != "model"]
        found = [one for one in found if one.tool in self._guilty] or found
        found = [one for one in found if one.tool not in self._innocent] or found
        return [one for one in found if one.effect != "read"] or found

    def _twice(self, seen: Seen) -> Iterator[Problem]:
        candidates = self._candidates(seen)
        shows = "is not the same again" if seen.is_all("other", "fewer", "missing") else "shows twice"
        for one in candidates:
            if len(candidates) == 1:
                self._guilty.add(one.tool)
            sentence, way_out = _TWICE[one.effect]
            place = (one.run, one.call, one.tool)
            if any(seen.case.is_ruled_out(place, sent) for sent in seen.case.late(place)):
                way_out = NOT_FINAL
            sentence = f"{sentence.replace('shows twice', shows)}{_among(candidates)}: {seen.words}"
            yield wrong("effect_twice", seen.case, sentence, way_out, one.tool)
        if not candidates:
            sentence = f"no tool was called twice, and the world is not as after the undisturbed run: {seen.words}"
            yield wrong("effect_lost", seen.case, sentence, _IN_ITS_PROCESS)

    def _lost(self, seen: Seen) -> Iterator[Problem]:
        candidates = [one for one in self._candidates(seen) if one.effect != "read"]
        for one in candidates:
            sentence = f"declared {one.effect}, and called again after the kill it leaves out what the killed process had not done"
            way_out = "have the mark that it is done come after the effect, or together with it, never before"
            yield wrong("effect_lost", seen.case, f"{sentence}{_among(candidates)}: {seen.words}", way_out, one.tool)
        if not candidates:
            sentence = f"no tool that changes something was called twice, and a part of the effects is missing: {seen.words}"
            yield wrong("effect_lost", seen.case, sentence, _IN_ITS_PROCESS)


def _among(candidates: Sequence[Repeat]) -> str:
    return "" if len(candidates) == 1 else " (or another one that was called again with it)"


def _returned_again(case: Facts, base: Undisturbed, place: Place) -> bool:
    return len(case.of(place, "returned")) > base.expected(place)
