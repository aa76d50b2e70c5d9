"""One trial as the rules see it: for each call, the ledger and the journal. The ids are the same in every trial."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

from perdure.core import codec
from perdure.testing.lab.ledger import Entry, attempt_of
from perdure.testing.lab.spec import CallTold
from perdure.testing.lab.trials import Evidence
from perdure.testing.lab.world import normal

Place = tuple[str, int, str]  # the run's id relative to the run that was started, the call's number, the call's tool

INSIDE = "transaction"  # such an effect is only in the journal's database, and is rolled back when the process dies
HARMLESS = ("read", "model")  # calls that are declared to have no effect


class TrialFacts:
    """Everything that is known about one trial."""

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
        """How often the function was called. If its calls are not counted (isolate=True): the number of intents."""
        seen = len(self.of(place, "begun"))
        return seen if seen or place not in self.calls else len(self.calls[place].intents)

    def of(self, place: Place, fact: str) -> list[Entry]:
        return [entry for entry in self.lines.get(place, ()) if entry.fact == fact]

    @property
    def places(self) -> list[Place]:
        return list(dict.fromkeys([*self.calls, *self.lines]))

    @property
    def asked(self) -> dict[Place, str | None]:
        """All calls, each with the digest of its arguments."""
        return {place: call.digest for place, call in self.calls.items()}

    @property
    def changing(self) -> dict[Place, CallTold]:
        """The calls that are declared to have an effect."""
        return {place: call for place, call in self.calls.items() if call.effect not in HARMLESS}

    @property
    def cut_off(self) -> list[Place]:
        """The calls whose function was under way when a process was killed."""
        killed = {entry.pid for entry in self.evidence.entries if entry.fact == "killed"}
        return [place for place in self.lines if any(self._is_open(place, pid) for pid in killed)]

    def _is_open(self, place: Place, pid: int) -> bool:
        facts = [entry.fact for entry in self.lines[place] if entry.pid == pid]
        return facts.count("begun") > facts.count("returned") + facts.count("raised")

    def late(self, place: Place) -> list[Entry]:
        """The ledger's lines `late` of this call: one for each attempt whose request was planned to arrive late."""
        return self.of(place, "late")

    def arrival(self, place: Place, sent: Entry) -> Entry | None:
        """The line `returned` or `raised` about the end of a late request. None if there is no such line."""
        ends = [entry for entry in self.lines[place] if entry.fact in ("returned", "raised") and attempt_of(entry) == attempt_of(sent)]
        return ends[0] if ends else None

    def is_ruled_out(self, place: Place, sent: Entry) -> bool:
        """Has the hook said that this attempt can never happen (final=True)?"""
        return any(entry.final and entry.attempt == sent.attempt for entry in self.of(place, "told"))

    @property
    def missed(self) -> list[tuple[Place, Entry | None]]:
        """The late requests that did not arrive, each with the line about its error, or None if there is no line.

        A service may refuse a late request if the hook said that the attempt can never happen, or if it has seen the
        key before. Such a request counts as arrived.
        """
        found = []
        for place in self.lines:
            for sent in self.late(place):
                end = self.arrival(place, sent)
                before = [] if end is None else self.lines[place][: self.lines[place].index(end)]
                may_be_refused = self.is_ruled_out(place, sent) or any(entry.fact == "returned" for entry in before)
                if end is None or (end.fact == "raised" and not may_be_refused):
                    found.append((place, end))
        return found

    def effect(self, place: Place) -> str:
        """The effect class that the tool declares. "model" for a model."""
        if place in self.calls:
            return self.calls[place].effect
        return "model" if self.lines[place][0].model else "once"

    def result(self, place: Place) -> Any:
        """The call's result from the journal, with the run's own ids replaced."""
        call = self.calls.get(place)
        return None if call is None or call.result is None else self.value(call.result)

    def value(self, encoded: str) -> Any:
        return normal(codec.decode(encoded.encode()), self.evidence.known)

    @property
    def output(self) -> Any:
        return None if self.told is None or self.told.output is None else self.value(self.told.output)

    @property
    def in_doubt(self) -> bool:
        """Is the run parked because a call is in doubt?"""
        return self.told is not None and self.told.status == "needs_attention" and self.told.attention == "in_doubt"

    @property
    def doubted(self) -> list[Place]:
        """The calls that needed a person, including the calls that the lab settled in the place of a person."""
        return [
            place
            for place, call in self.calls.items()
            if call.phase == "in_doubt" or any(resolution.by == "crashtest" for resolution in call.resolutions)
        ]

    def age_of(self, pid: int | None) -> int:
        """The position of this process among the trial's processes. A process without a line in the ledger is last."""
        pids = self.evidence.pids
        return pids.index(pid) if pid in pids else len(pids)

    def effects(self) -> dict[str, int]:
        """A dict: tool → how often its function was called."""
        total: dict[str, int] = {}
        for place in self.places:
            total[place[2]] = total.get(place[2], 0) + self.begun(place)
        return total


class Undisturbed:
    """The two runs without a kill. What is the same in both must be the same in every trial."""

    def __init__(self, first: TrialFacts, second: TrialFacts) -> None:
        self.first = first
        self.second = second
        assert first.told is not None and second.told is not None
        self.status = first.told.status
        self.same_output = first.output == second.output
        self.same_calls = first.asked == second.asked
        mine, others = (_given_by_tool(facts) for facts in (first, second))
        self._asked_alike = {tool for tool in mine if mine[tool] == others.get(tool)}

    def went_the_same_way(self, case: TrialFacts) -> bool:
        """Did the trial make the calls that the undisturbed run made?"""
        return set(case.calls) == set(self.first.calls)

    def changed_the_same(self, case: TrialFacts) -> bool:
        """Should the effects be the same? Yes, if the same tools with effects were called with equal arguments."""
        return self._changes(case) == self._changes(self.first)

    def _changes(self, case: TrialFacts) -> Counter[tuple[str, str | None]]:
        # Arguments that differ between the undisturbed runs, such as a time, may differ in a trial too.
        return Counter((place[2], call.digest if place[2] in self._asked_alike else None) for place, call in case.changing.items())

    def called_less(self, case: TrialFacts) -> bool:
        """Was a function called less often than in the undisturbed runs?

        That is possible if a retry was not needed, or if an attempt never began.
        """
        return any(case.begun(place) < min(self.first.begun(place), self.second.begun(place)) for place in case.calls)

    def shows(self, tool: str) -> bool:
        """Can an effect of the tool be seen, in the user's ledger or in the working folder?"""
        both = [facts.evidence for facts in (self.first, self.second)]
        if any(one.world for one in both):
            return True
        lines = [entry for one in both for entry in one.entries if entry.tool == tool]
        if any(entry.fact == "unseen" for entry in lines):  # the tool's calls are not seen: any file may be its effect
            return any(one.files for one in both)
        return any(entry.fact == "changed" for entry in lines)

    def is_steady(self, place: Place) -> bool:
        """Is the call's result the same in both undisturbed runs?"""
        return bool(self.first.result(place) == self.second.result(place))

    def expected(self, place: Place) -> int:
        """How often the function is called without a kill."""
        return max(self.first.begun(place), self.second.begun(place), 1)


def _given_by_tool(facts: TrialFacts) -> dict[str, Counter[str | None]]:
    found: dict[str, Counter[str | None]] = defaultdict(Counter)
    for place, call in facts.changing.items():
        found[place[2]][call.digest] += 1
    return found
