"""Verdicts: every trial against the undisturbed run, and what follows from all of them together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import structs

from perdure.testing.lab.effects import Seen, Suspects, differences
from perdure.testing.lab.facts import Facts, Undisturbed
from perdure.testing.lab.records import Outcome, Problem, Repeat, ToolSeen, Trial
from perdure.testing.lab.rules import RULES, repeats
from perdure.testing.lab.trials import Evidence


def judge(evidence: Iterable[Evidence], base: Undisturbed) -> list[Trial]:
    """The trials, in the order of their numbers."""
    cases = [Facts(one) for one in sorted(evidence, key=lambda one: one.planned.number)]
    seen: list[Seen] = [(case, tuple(repeats(case, base)), differences(case, base)) for case in cases]
    suspects, accused = Suspects(seen, base), {}
    for case, repeated, found in sorted(seen, key=lambda one: (len(one[1]), one[0].evidence.planned.number)):
        number = case.evidence.planned.number
        accused[number] = list(suspects.accuse(case, repeated, found)) if found else []
    return [_trial(case, base, repeated, accused[case.evidence.planned.number]) for case, repeated, _ in seen]


def _trial(case: Facts, base: Undisturbed, repeated: tuple[Repeat, ...], accused: Sequence[Problem]) -> Trial:
    evidence = case.evidence
    problems = tuple(dict.fromkeys([*accused, *(problem for rule in RULES for problem in rule(case, base))]))
    return Trial(
        number=evidence.planned.number,
        boundaries=tuple(str(kill.boundary) for kill in evidence.planned.kills),
        also=evidence.planned.also,
        status=case.told.status if case.told else evidence.end,
        outcome=_outcome(case, problems),
        output_equal=case.output == base.first.output if base.same_output and case.told and not case.in_doubt else None,
        repeated=repeated,
        effects=case.effects(),
        world=evidence.world,
        resume_s=evidence.resume_s,
        settled=case.told.settled if case.told else (),
        problems=problems,
        fresh=evidence.planned.fresh,
    )


def _outcome(case: Facts, problems: Sequence[Problem]) -> Outcome:
    if any(problem.severity == "wrong" for problem in problems):
        return "wrong"
    if case.evidence.reached < len(case.evidence.planned.kills):
        return "not_reached"
    return "doubt" if case.doubted else "ok"


def once_each(trials: Iterable[Trial], severity: str) -> tuple[Problem, ...]:
    """What was found, each thing about each tool once, with the number of trials that show it."""
    found: dict[tuple[str, str], Problem] = {}
    for trial in trials:
        for key, problem in {(one.rule, one.tool): one for one in reversed(trial.problems) if one.severity == severity}.items():
            first = found.get(key)
            found[key] = problem if first is None else structs.replace(first, trials=first.trials + 1)
    return tuple(sorted(found.values(), key=lambda one: (-one.trials, one.tool, one.rule)))


def tools_seen(base: Undisturbed, trials: Sequence[Trial], problems: Sequence[Problem]) -> tuple[ToolSeen, ...]:
    """Every tool that was called, with what was seen of it."""
    found = {}
    for place, call in base.first.calls.items():
        name = place[2]
        if name not in found:
            doubts = sum(
                any(one.tool == name and one.rule in ("no_reconcile", "reconcile_unsure") for one in trial.problems) for trial in trials
            )
            repeated = sum(any(one.tool == name for one in trial.repeated) for trial in trials)
            calls = sum(other[2] == name for other in base.first.calls)
            blamed = any(problem.tool == name and problem.rule != "promise" for problem in problems)
            verdict = "not as declared" if blamed else "as declared; a person is asked" if doubts else "as declared"
            found[name] = ToolSeen(name, call.effect, call.reconcile, calls, repeated, doubts, verdict)
    return tuple(found.values())
