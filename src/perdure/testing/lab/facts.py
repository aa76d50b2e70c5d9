"""One trial as the rules look at it: ledger and journal side by side, by call, under names that are the same in every trial."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from perdure.core import codec
from perdure.testing.lab.ledger import Entry
from perdure.testing.lab.spec import RUN_ID, CallTold
from perdure.testing.lab.trials import Evidence
from perdure.testing.lab.world import normal

Place = tuple[str, int, str]  # the run below the one that was started, the number of the call, its tool


class Facts:
    """What is known about one trial."""

    def __init__(self, evidence: Evidence) -> None:
        self.evidence = evidence
        self.told = evidence.told
        self.where = " and then ".join(str(kill.boundary) for kill in evidence.planned.kills) or "nowhere"
        self.calls: dict[Place, CallTold] = {}
        self.lines: dict[Place, list[Entry]] = defaultdict(list)
        for call in self.told.calls if self.told else ():
            self.calls[self._below(call.run), call.number, call.tool] = call
        for entry in evidence.entries:
            if entry.call:
                self.lines[self._below(entry.run), entry.call, entry.tool].append(entry)

    def _below(self, run_id: str) -> str:
        return run_id.removeprefix(self.evidence.run_id)

    def begun(self, place: Place) -> int:
        """How often the function was called; where nobody counts, how often the journal says that it was to be."""
        seen = len(self.of(place, "begun"))
        return seen if seen or place not in self.calls else len(self.calls[place].intents)

    def of(self, place: Place, fact: str) -> list[Entry]:
        return [entry for entry in self.lines.get(place, ()) if entry.fact == fact]

    @property
    def places(self) -> list[Place]:
        return list(dict.fromkeys([*self.calls, *self.lines]))

    @property
    def asked(self) -> dict[Place, str | None]:
        """The calls, with what they were given; where every run has another id that may be in there, without."""
        own = self.evidence.run_id == RUN_ID
        return {place: call.digest if own else None for place, call in self.calls.items()}

    def effect(self, place: Place) -> str:
        """The effect class that the tool declares; "model" for a model."""
        if place in self.calls:
            return self.calls[place].effect
        return "model" if self.lines[place][0].model else "once"

    def result(self, place: Place) -> Any:
        """What the journal has as the call's result, comparable between trials."""
        call = self.calls.get(place)
        return None if call is None or call.result is None else self.value(call.result)

    def value(self, encoded: str) -> Any:
        return normal(codec.decode(encoded.encode()), self.evidence.known)

    @property
    def output(self) -> Any:
        return None if self.told is None or self.told.output is None else self.value(self.told.output)

    @property
    def in_doubt(self) -> bool:
        """Whether the run rests because nobody knows what became of a call."""
        return self.told is not None and self.told.status == "needs_attention" and self.told.attention == "in_doubt"

    @property
    def doubted(self) -> list[Place]:
        """The calls that a person was asked about: those that the lab has settled in their place too."""
        return [
            place
            for place, call in self.calls.items()
            if call.phase == "in_doubt" or any(resolution.by == "crashtest" for resolution in call.resolutions)
        ]

    def age_of(self, pid: int | None) -> int:
        """Which of the trial's processes it is; one that has left no line in the ledger is the last."""
        pids = self.evidence.pids
        return pids.index(pid) if pid in pids else len(pids)

    def effects(self) -> dict[str, int]:
        """By tool: how often its function was called."""
        total: dict[str, int] = {}
        for place in self.places:
            total[place[2]] = total.get(place[2], 0) + self.begun(place)
        return total


class Undisturbed:
    """Two runs that nobody has killed: what they agree on can be expected of every other."""

    def __init__(self, first: Facts, second: Facts) -> None:
        self.first = first
        self.second = second
        assert first.told is not None and second.told is not None
        self.status = first.told.status
        self.same_output = first.output == second.output
        self.same_calls = first.asked == second.asked

    def is_steady(self, place: Place) -> bool:
        """Whether the call's result is the same whenever nobody is killed."""
        return bool(self.first.result(place) == self.second.result(place))

    def expected(self, place: Place) -> int:
        """How often the function is called when nobody is killed."""
        return max(self.first.begun(place), self.second.begun(place), 1)
