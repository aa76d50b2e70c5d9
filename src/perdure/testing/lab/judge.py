"""Verdicts: every trial against the undisturbed run, and what follows from all of them together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from msgspec import structs

from perdure.testing.lab.effects import Seen, Suspects, look
from perdure.testing.lab.facts import HARMLESS, Facts, Place, Undisturbed
from perdure.testing.lab.records import Outcome, Problem, ToolSeen, Trial
from perdure.testing.lab.rules import RULES, note, unknown
from perdure.testing.lab.spec import CallTold
from perdure.testing.lab.trials import BROKEN, Evidence
from perdure.testing.lab.victim import LATE

_CUTS = ("during_tool_effect", "after_tool_effect", "before_tool_result_persisted")  # where an effect may be there, and no result is
_CUTS_OF_MODELS = ("after_model_effect", "before_model_answer_persisted")
_NO_BLAME = ("promise", "not_reached", "not_compared")
_SAME_EACH_TIME = "a Scripted model, or arguments alone to depend on, make every run the same"
_WAY_OUT = f"where a file differs by itself, --ledger says what counts; where the calls differ, {_SAME_EACH_TIME}"


def judge(evidence: Iterable[Evidence], base: Undisturbed) -> list[Trial]:
    """The trials, in the order of their numbers."""
    seen = [look(Facts(one), base) for one in sorted(evidence, key=lambda one: one.planned.number)]
    suspects, accused = Suspects(seen, base), {}
    for one in sorted(seen, key=lambda one: (len(one.repeated), one.case.evidence.planned.number)):
        accused[one.case.evidence.planned.number] = list(suspects.accuse(one)) if one.found else []
    trials = [_trial(one, base, accused[one.case.evidence.planned.number]) for one in seen]
    return _never_compared(seen, _never_reached(seen, trials))


def _trial(seen: Seen, base: Undisturbed, accused: Sequence[Problem]) -> Trial:
    case, evidence = seen.case, seen.case.evidence
    equal = case.output == base.first.output if base.same_output and case.told and not case.in_doubt else None
    unsure = seen.unsure
    if equal is False and not unsure and not base.went_the_same_way(case):
        unsure = ("the agent made other calls than undisturbed, and its output is another one",)
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


def _unsaid(case: Facts, base: Undisturbed, unsure: Sequence[str]) -> Iterator[Problem]:
    """The note that a trial was not compared, unless it is known by another name: stuck, in doubt, another end."""
    if unsure and case.told is not None and not case.in_doubt and case.told.status == base.status:
        yield note("not_compared", case, f"this could not be compared with the undisturbed run: {'; '.join(unsure)}", _WAY_OUT)


def _outcome(case: Facts, problems: Sequence[Problem], unsure: Sequence[str]) -> Outcome:
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


# -- what only all of them together show --------------------------------------------------------------------------------------
def _never_compared(seen: Sequence[Seen], trials: Sequence[Trial]) -> list[Trial]:
    """Trials with the problem of each tool that was called again, and never where that could be seen: it may be anything."""
    again = _by_tool((repeat.tool, trial) for trial in trials for repeat in trial.repeated if repeat.effect not in HARMLESS)
    unseen = {tool for tool, of_tool in again.items() if not any(trial.compared or _blames(trial, tool) for trial in of_tool)}
    found = []
    for one, trial in zip(seen, trials, strict=True):
        sentence = f"it was called again, and in no such trial could the world be compared: {'; '.join(one.unsure)}"
        tools = sorted(unseen & {repeat.tool for repeat in trial.repeated})
        found.append(_with(trial, [unknown("not_compared", one.case, sentence, _WAY_OUT, tool) for tool in tools]))
    return found


def _never_reached(seen: Sequence[Seen], trials: Sequence[Trial]) -> list[Trial]:
    """Trials with the problem of each tool that was to be killed about its effect, and never was."""
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
    """What was found, each thing about each tool once, with the number of trials that show it. To what is wrong belongs what is open."""
    wanted = ("wrong", "open") if severity == "wrong" else (severity,)
    found: dict[tuple[str, str], Problem] = {}
    for trial in trials:
        for key, problem in {(one.rule, one.tool): one for one in reversed(trial.problems) if one.severity in wanted}.items():
            first = found.get(key)
            found[key] = problem if first is None else structs.replace(first, trials=first.trials + 1)
    return tuple(sorted(found.values(), key=lambda one: (one.severity == "open", -one.trials, one.tool, one.rule)))


def tools_seen(base: Undisturbed, trials: Sequence[Trial], problems: Sequence[Problem]) -> tuple[ToolSeen, ...]:
    """Every tool that was called, with what was seen of it."""
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
    """Whether a process was killed there between the tool's effect and its result, or its effect came after that."""
    cuts = (*_CUTS, *_CUTS_OF_MODELS, *(() if trial.outcome == "not_reached" else (LATE,)))
    names = [boundary.partition(": ") for boundary in (*trial.boundaries, *trial.also)]
    return trial.kills > 0 and any(name in cuts and whose.startswith(f"{tool} (call ") for name, _, whose in names)
