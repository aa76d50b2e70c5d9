"""The verdicts: on each trial, on the tool that caused a difference, and on all trials together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec import Struct, structs

from perdure.testing.lab.comparing import Difference, Unsure, differences, why_not
from perdure.testing.lab.facts import HARMLESS, Place, TrialFacts, Undisturbed
from perdure.testing.lab.records import Outcome, Problem, Repeat, ToolSeen, Trial
from perdure.testing.lab.rules import NOT_FINAL, RULES, asked_too_late, note, repeats, unknown, wrong
from perdure.testing.lab.spec import CallTold
from perdure.testing.lab.trials import BROKEN, Evidence
from perdure.testing.lab.victim import LATE

_IN_ITS_PROCESS = "what a tool leaves in its process (a buffer, a task, a variable) is lost with it: complete the effect before it returns"


# -- Which tool had its effect twice, or not at all


class EffectsSeen(Struct, frozen=True):
    """A trial: which calls were repeated, how the effects differ, and why something could not be compared."""

    case: TrialFacts
    repeated: tuple[Repeat, ...]
    found: tuple[Difference, ...]
    unsure: tuple[str, ...]

    @property
    def words(self) -> str:
        return "; ".join(one.words for one in self.found)

    def is_all(self, *kinds: str) -> bool:
        return all(one.kind in kinds for one in self.found)


def look(case: TrialFacts, base: Undisturbed) -> EffectsSeen:
    """Compare the effects of a trial with those of the undisturbed runs."""
    repeated = tuple(repeats(case, base))
    said = differences(case, base)
    found = tuple(one for one in said if isinstance(one, Difference))
    unsure = [one.words for one in said if isinstance(one, Unsure)] if any(one.effect not in HARMLESS for one in repeated) else []
    if (why := why_not(case, base)) is not None:
        unsure.append(why)
    seen = EffectsSeen(case, repeated, found, tuple(unsure))
    if found and (why := _other_reason(seen, base)) is not None:
        return EffectsSeen(case, repeated, (), (*unsure, f"{why}: {seen.words}"))
    return seen


def _other_reason(seen: EffectsSeen, base: Undisturbed) -> str | None:
    """A reason for the different effects that is not the fault of a tool. None if there is no such reason."""
    if seen.is_all("fewer", "missing") and base.called_less(seen.case):
        return "a function was called less often than in the undisturbed run"
    if asked_too_late(seen.case):
        return "the machine was slow: a reconcile hook was asked for the first time when a late request could no longer arrive"
    if not base.went_the_same_way(seen.case) and all(one.effect in HARMLESS for one in seen.repeated):
        return "the agent made other calls than in the undisturbed run"
    return None


_TWICE: Mapping[str, tuple[str, str]] = {
    "idempotent": (
        "declared idempotent, and its effect shows twice",
        "declare it keyed and send call.key to a service that drops duplicates, or once with a reconcile hook",
    ),
    "keyed": (
        "declared keyed, and its effect shows twice though the key was the same: it ignores its key, or the service does",
        "send call.key; if the service drops no duplicates, declare it once with a reconcile hook",
    ),
    "read": ("declared read, and it changes the world", "declare what it does: idempotent, keyed, transaction or once"),
    "transaction": (
        "declared transaction, and it changes something that is not rolled back",
        "write only through call.connection, and do the rest in another tool",
    ),
    "once": (
        "its reconcile hook said that it had not happened, and its effect shows twice",
        "let the hook look for exactly this call, by call.key, and say unknown when it cannot tell",
    ),
}


class EffectSuspects:
    """Finds the tool that had its effect twice, or not at all.

    The trials in which only one tool was called again must be passed first: they show clearly which tool it was.
    """

    def __init__(self, seen: Sequence[EffectsSeen], base: Undisturbed) -> None:
        self._guilty: set[str] = set()
        clean = [one.case for one in seen if not one.found and not one.unsure]
        self._innocent = {place[2] for case in clean for place in case.places if _returned_again(case, base, place)}

    def accuse(self, seen: EffectsSeen) -> Iterator[Problem]:
        """One problem for each tool that may have caused the differences."""
        if seen.is_all("extra") and (cut := seen.case.cut_off):
            # The extra file is probably the temporary file of an atomic write. If the tool does create a second real
            # file, another trial shows that: the trial that kills the process after the function has returned.
            sentence = f"killed in its middle, it leaves something behind that is not removed: {seen.words}"
            yield note("left_behind", seen.case, sentence, "fine if it is a temporary file: remove old ones now and then", cut[0][2])
        elif seen.is_all("fewer", "missing"):
            yield from self._lost(seen)
        else:
            yield from self._twice(seen)

    def _candidates(self, seen: EffectsSeen) -> list[Repeat]:
        # Prefer tools that were found guilty in an earlier trial. Then leave out tools that were called again in
        # another trial without a difference. Then prefer tools that declare an effect to tools that declare `read`.
        found = [one for one in seen.repeated if one.effect != "model"]
        found = [one for one in found if one.tool in self._guilty] or found
        found = [one for one in found if one.tool not in self._innocent] or found
        return [one for one in found if one.effect != "read"] or found

    def _twice(self, seen: EffectsSeen) -> Iterator[Problem]:
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
            sentence = f"no tool was called twice, but the world is not as after the undisturbed run: {seen.words}"
            yield wrong("effect_lost", seen.case, sentence, _IN_ITS_PROCESS)

    def _lost(self, seen: EffectsSeen) -> Iterator[Problem]:
        candidates = [one for one in self._candidates(seen) if one.effect != "read"]
        for one in candidates:
            sentence = f"declared {one.effect}, but called again after the kill it does not do what the killed process had not done"
            way_out = "write the mark that it is done after the effect, or together with it, never before"
            yield wrong("effect_lost", seen.case, f"{sentence}{_among(candidates)}: {seen.words}", way_out, one.tool)
        if not candidates:
            sentence = f"no tool with effects was called twice, but a part of the effects is missing: {seen.words}"
            yield wrong("effect_lost", seen.case, sentence, _IN_ITS_PROCESS)


def _among(candidates: Sequence[Repeat]) -> str:
    return "" if len(candidates) == 1 else " (or another tool that was called again with it)"


def _returned_again(case: TrialFacts, base: Undisturbed, place: Place) -> bool:
    return len(case.of(place, "returned")) > base.expected(place)


# -- The verdict on each trial


# The boundaries at which an effect may have happened while its result is not recorded.
_CUTS = ("during_tool_effect", "after_tool_effect", "before_tool_result_persisted")
_CUTS_OF_MODELS = ("after_model_effect", "before_model_answer_persisted")
_NO_BLAME = ("promise", "not_reached", "not_compared")
_SAME_EACH_TIME = "a Scripted model, or an agent that depends only on its arguments, makes every run the same"
_WAY_OUT = f"where a file differs by itself, --ledger says what counts; where the calls differ, {_SAME_EACH_TIME}"


def judge(evidence: Iterable[Evidence], base: Undisturbed) -> list[Trial]:
    """The judged trials, in the order of their numbers."""
    seen = [look(TrialFacts(one), base) for one in sorted(evidence, key=lambda one: one.planned.number)]
    suspects, accused = EffectSuspects(seen, base), {}
    for one in sorted(seen, key=lambda one: (len(one.repeated), one.case.evidence.planned.number)):
        accused[one.case.evidence.planned.number] = list(suspects.accuse(one)) if one.found else []
    trials = [_trial(one, base, accused[one.case.evidence.planned.number]) for one in seen]
    return _never_compared(seen, _never_reached(seen, trials))


def _trial(seen: EffectsSeen, base: Undisturbed, accused: Sequence[Problem]) -> Trial:
    case, evidence = seen.case, seen.case.evidence
    equal = case.output == base.first.output if base.same_output and case.told and not case.in_doubt else None
    unsure = seen.unsure
    if equal is False and not unsure and not base.went_the_same_way(case):
        unsure = ("the agent made other calls than in the undisturbed run, and its output differs",)
    by_rule = (problem for rule in RULES for problem in rule(case, base))
    problems = tuple(dict.fromkeys([*accused, *by_rule, *_unsaid(case, base, unsure)]))
    return Trial(
        number=evidence.planned.number,
        boundaries=tuple(str(kill.boundary) for kill in evidence.planned.kills),
        also=evidence.planned.also,
        status=case.told.status if case.told else evidence.end,
        outcome=_outcome(case, problems, unsure),
        output_equal=equal,
        repeated=seen.repeated,
        effects=case.effects(),
        world=evidence.world,
        resume_s=evidence.resume_s,
        settled=case.told.settled if case.told else (),
        problems=problems,
        compared=not unsure,
        kills=evidence.reached,
        asked=tuple(_call_words(place) for place in case.doubted),
        fresh=evidence.planned.fresh,
    )


def _call_words(place: Place) -> str:
    return f"{place[2]} (call {place[1]}{f', child {place[0]}' if place[0] else ''})"


def _unsaid(case: TrialFacts, base: Undisturbed, unsure: Sequence[str]) -> Iterator[Problem]:
    """A note that the trial was not compared. No note if another problem already says so (stuck, in doubt, …)."""
    if unsure and case.told is not None and not case.in_doubt and case.told.status == base.status:
        yield note("not_compared", case, f"this could not be compared with the undisturbed run: {'; '.join(unsure)}", _WAY_OUT)


def _outcome(case: TrialFacts, problems: Sequence[Problem], unsure: Sequence[str]) -> Outcome:
    if any(problem.severity == "wrong" for problem in problems):
        return "wrong"
    if case.evidence.end == BROKEN:
        return "not_compared"
    if case.evidence.reached < len(case.evidence.planned.kills) or case.missed:
        return "not_reached"
    if unsure and not case.in_doubt:
        return "not_compared"
    if any(problem.rule == "not_seen" for problem in problems):
        return "not_seen"
    return "doubt" if case.doubted else "ok"


# -- what only all trials together show -------------------------------------------------------------------------------
def _never_compared(seen: Sequence[EffectsSeen], trials: Sequence[Trial]) -> list[Trial]:
    """Add a problem for each tool that was called again only in trials that could not be compared."""
    again = _by_tool((repeat.tool, trial) for trial in trials for repeat in trial.repeated if repeat.effect not in HARMLESS)
    unseen = {tool for tool, of_tool in again.items() if not any(trial.compared or _blames(trial, tool) for trial in of_tool)}
    found = []
    for one, trial in zip(seen, trials, strict=True):
        sentence = f"it was called again, but the world could be compared in none of these trials: {'; '.join(one.unsure)}"
        tools = sorted(unseen & {repeat.tool for repeat in trial.repeated})
        found.append(_with(trial, [unknown("not_compared", one.case, sentence, _WAY_OUT, tool) for tool in tools]))
    return found


def _never_reached(seen: Sequence[EffectsSeen], trials: Sequence[Trial]) -> list[Trial]:
    """Add a problem for each tool for which no planned kill between effect and result has happened."""
    cuts = [(kill.boundary, at < one.case.evidence.reached, one) for one in seen for at, kill in enumerate(one.case.evidence.planned.kills)]
    cuts = [cut for cut in cuts if cut[0].name in _CUTS and cut[0].tool and cut[2].case.evidence.end != BROKEN]
    reached = {boundary.tool for boundary, was_reached, _ in cuts if was_reached}
    sentence = "no trial was killed between its effect and its result: the agent makes this call at another place each time"
    found = {}
    for boundary, _, one in cuts:
        if boundary.tool not in reached:
            found[one.case.evidence.planned.number] = unknown("not_reached", one.case, sentence, _SAME_EACH_TIME, boundary.tool)
    return [_with(trial, [found[trial.number]] if trial.number in found else []) for trial in trials]


def _with(trial: Trial, more: Sequence[Problem]) -> Trial:
    return structs.replace(trial, problems=(*trial.problems, *more)) if more else trial


def _by_tool(pairs: Iterable[tuple[str, Trial]]) -> dict[str, list[Trial]]:
    found: dict[str, list[Trial]] = {}
    for tool, trial in pairs:
        found.setdefault(tool, []).append(trial)
    return found


def _blames(trial: Trial, tool: str) -> bool:
    return any(one.tool == tool and one.severity == "wrong" and one.rule not in _NO_BLAME for one in trial.problems)


def once_each(trials: Iterable[Trial], severity: str) -> tuple[Problem, ...]:
    """Each problem of each tool once, with the number of trials that show it. "wrong" includes "open" problems."""
    wanted = ("wrong", "open") if severity == "wrong" else (severity,)
    found: dict[tuple[str, str], Problem] = {}
    for trial in trials:
        for key, problem in {(one.rule, one.tool): one for one in reversed(trial.problems) if one.severity in wanted}.items():
            first = found.get(key)
            found[key] = problem if first is None else structs.replace(first, trials=first.trials + 1)
    return tuple(sorted(found.values(), key=lambda one: (one.severity == "open", -one.trials, one.tool, one.rule)))


def tools_seen(base: Undisturbed, trials: Sequence[Trial], problems: Sequence[Problem]) -> tuple[ToolSeen, ...]:
    """Every tool that was called, with its verdict."""
    calls = {place[2]: call for place, call in reversed(base.first.calls.items())}
    return tuple(_tool_seen(calls[name], base, trials, problems) for name in dict.fromkeys(place[2] for place in base.first.calls))


def _tool_seen(call: CallTold, base: Undisturbed, trials: Sequence[Trial], problems: Sequence[Problem]) -> ToolSeen:
    name = call.tool
    asked = ("no_reconcile", "reconcile_unsure")
    doubts = sum(any(one.tool == name and one.rule in asked for one in trial.problems) for trial in trials)
    repeated = [trial for trial in trials if any(one.tool == name for one in trial.repeated)]
    compared = sum(trial.compared for trial in repeated)
    if any(problem.tool == name and problem.rule not in _NO_BLAME for problem in problems):
        verdict = "not as declared"
    elif repeated and not compared and call.effect != "model":
        verdict = "not compared"
    elif not doubts and not any(_cuts(trial, name) or (trial in repeated and trial.outcome != "not_reached") for trial in trials):
        verdict = "not tried"
    elif any(one.tool == name and one.rule == "not_seen" for trial in trials for one in trial.problems):
        verdict = "not seen"
    else:
        verdict = "as declared; a person is asked" if doubts else "as declared"
    calls = sum(place[2] == name for place in base.first.calls)
    return ToolSeen(name, call.effect, call.reconcile, calls, len(repeated), doubts, verdict, compared)


def _cuts(trial: Trial, tool: str) -> bool:
    """Did this trial kill a process between the tool's effect and its result, or did the effect come late?"""
    cuts = (*_CUTS, *_CUTS_OF_MODELS, *(() if trial.outcome == "not_reached" else (LATE,)))
    names = [boundary.partition(": ") for boundary in (*trial.boundaries, *trial.also)]
    return trial.kills > 0 and any(name in cuts and whose.startswith(f"{tool} (call ") for name, _, whose in names)
