"""The rules: what each effect class promises (docs/tools-and-effects.md) against what was seen. One function per rule.

A rule yields a Problem for each violation, each open question and each note that the rule finds in one trial.
"""

from __future__ import annotations

from collections.abc import Iterator

from perdure.core.codec import shown
from perdure.testing.lab.comparing import differences, why_not
from perdure.testing.lab.facts import HARMLESS, INSIDE, Place, TrialFacts, Undisturbed
from perdure.testing.lab.records import Problem, Repeat
from perdure.testing.lab.spec import Resolution
from perdure.testing.lab.trials import BROKEN

REPORT_IT = "this is a bug of perdure, please report it; --keep leaves the journal and the logs of each trial"
_MAKE_ROOM = "free space below TMPDIR, and let no tool remove its working folder"
_LOOK_FOR_IT = "let the hook look for exactly this call, by call.key"
NOT_FINAL = "say final=True only when the service refuses the request from then on; else not_happened(), which is believed after timeout= and settle="
_CLOCKS_S = 0.1  # the journal uses the system clock, which may be adjusted by up to this much during a trial
_NOT_CARRIED = (
    "a function that needs the event loop, the threads or the connections of its own process cannot run in another one; "
    "try its hook against a service that is slow"
)
_MAY_REPEAT = {
    "read": "a read may be repeated",
    "idempotent": "declared as harmless to repeat",
    "keyed": "with the same key, which the service drops",
    "transaction": "what it had written was rolled back with the process",
    "model": "its answer was lost with the process",
}


def wrong(rule: str, case: TrialFacts, sentence: str, way_out: str, tool: str = "") -> Problem:
    return Problem(rule, "wrong", tool, sentence, way_out, case.where)


def note(rule: str, case: TrialFacts, sentence: str, way_out: str, tool: str = "") -> Problem:
    return Problem(rule, "note", tool, sentence, way_out, case.where)


def unknown(rule: str, case: TrialFacts, sentence: str, way_out: str, tool: str = "") -> Problem:
    return Problem(rule, "open", tool, sentence, way_out, case.where)


def repeats(case: TrialFacts, base: Undisturbed) -> list[Repeat]:
    """The calls whose function was called more often than in the undisturbed run, and whether that is allowed."""
    found = []
    for place in case.places if case.told else ():  # without the journal the declared effect class is not known
        begun, effect = case.begun(place), case.effect(place)
        if begun > base.expected(place):
            fault = broken_promise(case, base, place)
            why = fault or _MAY_REPEAT.get(effect) or _who_said_no(case, place)
            found.append(Repeat(place[2], effect, place[0], place[1], begun, base.expected(place), why, fault is None))
    return found


def _who_said_no(case: TrialFacts, place: Place) -> str:
    by = {resolution.by for resolution in case.calls[place].resolutions if resolution.outcome == "did_not_happen"}
    return "its reconcile hook said that it had not happened" if "reconcile" in by else "the lab's ledger said that it had never begun"


def broken_promise(case: TrialFacts, base: Undisturbed, place: Place) -> str | None:
    """The promise of perdure that was broken for this call. None if no promise was broken."""
    call = case.calls.get(place)
    if call is None:
        return None if case.told is None else "its function was called, and the journal knows of no such call"
    begun = case.of(place, "begun")
    if call.completed_by is not None and any(case.age_of(entry.pid) > case.age_of(call.completed_by) for entry in begun):
        return "its function was called again although its result was on record"
    if len({entry.key for entry in begun}) > 1:
        return "its key was not the same each time"
    if call.effect in ("idempotent", "keyed", "once", "model"):
        intents = {(intent.attempt, intent.pid) for intent in call.intents}
        if any((entry.attempt, entry.pid) not in intents for entry in begun):
            return "its function was called before the intent was durable"
    settled = sum(resolution.outcome == "did_not_happen" for resolution in call.resolutions)
    if call.effect == "once" and len(begun) > base.expected(place) + settled:
        return "it is declared once, and its function was called again before a hook or a person had said that it did not happen"
    if any(resolution.after_s < call.quiet_s - _CLOCKS_S for resolution in _denials(case, place)):
        return "its reconcile hook did not find it, and was believed before its time-out and settle were over"
    return None


def _denials(case: TrialFacts, place: Place) -> list[Resolution]:
    """The resolutions in which perdure believed the hook's "not found" about a late request, without final=True."""
    late = {sent.attempt for sent in case.late(place) if not case.is_ruled_out(place, sent)}
    found = case.calls[place].resolutions if place in case.calls else ()
    return [one for one in found if (one.by, one.outcome) == ("reconcile", "did_not_happen") and one.attempt in late]


def asked_too_late(case: TrialFacts) -> bool:
    """Was a hook asked for the first time when perdure already believed a "not found"?

    Then the late request, which arrives after the first question to the hook, came later than the tool declares.
    """
    return any(
        sum(entry.attempt == denial.attempt for entry in case.of(place, "asked")) == 1
        for place in case.lines
        for denial in _denials(case, place)
        if denial.after_s >= case.calls[place].quiet_s - _CLOCKS_S
    )


def promises(case: TrialFacts, base: Undisturbed) -> Iterator[Problem]:
    """Rule: perdure keeps its own promises."""
    for place in case.places:
        if (fault := broken_promise(case, base, place)) is not None:
            yield wrong("promise", case, f"in call {place[1]}, {fault}", REPORT_IT, place[2])
    for fault in case.told.faults if case.told else ():
        yield wrong("promise", case, f"perdure verify finds a fault: {fault}", REPORT_IT)


def rest(case: TrialFacts, base: Undisturbed) -> Iterator[Problem]:
    """Rule: the run ends or parks with the same status as the undisturbed run."""
    told, end = case.told, case.evidence.end
    if end == BROKEN:
        yield unknown("not_made", case, f"this trial could not be made: {case.evidence.log}", _MAKE_ROOM)
    elif told is None and end == "timeout":
        yield wrong(
            "stuck",
            case,
            f"after the kill it neither ended nor parked in time: {_last_words(case)}",
            "raise --timeout if it takes that long; else --keep leaves its log",
        )
    elif told is None:
        yield wrong("died", case, f"the process that resumed it ended with {end}: {_last_words(case)}", "--keep leaves its whole log")
    elif told.attention == "diverged":
        sentence = f"on replay the agent asks for other calls than before: {told.error}"
        yield wrong(
            "diverged", case, sentence, "what it decides must follow from its arguments and its calls: perdure check names what does not"
        )
    elif told.status != base.status and not case.in_doubt:
        yield from _other_end(case, base)


def _last_words(case: TrialFacts) -> str:
    return next((line for line in reversed(case.evidence.log.splitlines()) if line.strip()), "it said nothing")


def _other_end(case: TrialFacts, base: Undisturbed) -> Iterator[Problem]:
    assert case.told is not None
    words = f"{case.told.status}{f' ({case.told.error})' if case.told.error else ''} instead of {base.status}"
    again = [place for place in case.places if len(case.of(place, "begun")) > base.expected(place) and case.of(place, "raised")]
    for place in again:
        tool, effect, error = place[2], case.effect(place), case.of(place, "raised")[-1].result
        sentence = f"declared {effect}, but called again it raises {error}, so that the run is {words}"
        yield wrong("raises_again", case, sentence, "let a repeated call answer as the first call did, or declare it once", tool)
    if not again:
        yield wrong("status", case, f"the run is {words}", f"if no tool of yours can make that difference: {REPORT_IT}")


def results(case: TrialFacts, base: Undisturbed) -> Iterator[Problem]:
    """Rule: a call that was made twice returns the same result."""
    for place in case.places:
        effect, tool = case.effect(place), place[2]
        seen = [case.value(entry.result) for entry in case.of(place, "returned") if entry.result is not None]
        if effect not in ("keyed", "idempotent") or all(one == seen[0] for one in seen):
            continue
        other = next(one for one in seen if one != seen[0])
        sentence = f"declared {effect}, and called again it returned {shown(other)} after {shown(seen[0])}"
        if effect == "keyed":
            sentence += ", with the same key"
            yield wrong(
                "result_differs",
                case,
                sentence,
                "send call.key to the service; if the service makes something new each time, declare it once",
                tool,
            )
        elif base.is_steady(place):
            yield wrong("result_differs", case, sentence, "declare it keyed and send call.key, or once with a reconcile hook", tool)
        else:
            way_out = "fine if it is a time or a measurement; if each call made something new, it is not idempotent"
            yield note("result_differs", case, sentence, way_out, tool)


def hooks(case: TrialFacts, base: Undisturbed) -> Iterator[Problem]:
    """Rule: a reconcile hook tells the truth."""
    for place, lines in case.lines.items():
        for at, line in enumerate(lines):
            if line.fact != "told":
                continue
            before = [entry.fact for entry in lines[:at] if entry.attempt <= line.attempt]
            if line.result == "not_happened" and "returned" in before:
                sentence = "its reconcile hook says that it did not happen, and its function had returned"
            elif line.result == "happened" and "begun" not in before and not _is_unseen(case, place):
                sentence = "its reconcile hook says that it happened, and its function had never been called"
            elif (
                line.result == "happened"
                and "late" in before
                and "returned" not in before
                and before.count("begun") == before.count("late")
            ):
                sentence = "its reconcile hook says that it happened, and its request had not arrived yet"
            else:
                continue
            way_out = f"{_LOOK_FOR_IT}; if the service shows it later, say so: settle=" if case.late(place) else _LOOK_FOR_IT
            yield wrong("reconcile_wrong", case, sentence, way_out, place[2])


def ruled_out(case: TrialFacts, base: Undisturbed) -> Iterator[Problem]:
    """Rule: if a hook says with final=True that an attempt can never happen, it does not happen later.

    It is no problem if the request arrives later, but the effects show that the service dropped it.
    """
    for place in case.lines:
        ends = [case.arrival(place, sent) for sent in case.late(place) if case.is_ruled_out(place, sent)]
        if not any(end is not None and end.fact == "returned" for end in ends) or _shows_nothing(case, base, place[2]):
            continue
        sentence = "its reconcile hook ruled the call out for good (final=True), and the request arrived afterwards"
        yield wrong("reconcile_final", case, sentence, NOT_FINAL, place[2])


def _shows_nothing(case: TrialFacts, base: Undisturbed, tool: str) -> bool:
    return why_not(case, base) is None and base.shows(tool) and not differences(case, base)


def missed(case: TrialFacts, base: Undisturbed) -> Iterator[Problem]:
    """Rule: a note for each late request that could not be tried."""
    for place, end in case.missed:
        how = "did not end in time" if end is None else f"raised {end.result}"
        sentence = f"a late request was not tried: its function was called in another process, and {how}"
        yield note("late_missed", case, sentence, _NOT_CARRIED, place[2])


def _is_unseen(case: TrialFacts, place: Place) -> bool:
    return any(entry.fact == "unseen" and entry.tool == place[2] for entry in case.evidence.entries)


def doubts(case: TrialFacts, base: Undisturbed) -> Iterator[Problem]:
    """Rule: a note for each call that only a person could resolve. That is as declared, but a hook would be better."""
    for place in case.doubted:
        tool, call = place[2], case.calls[place]
        if call.reconcile:
            sentence = "its reconcile hook did not know whether it had happened, and a person was asked"
            yield note("reconcile_unsure", case, sentence, _LOOK_FOR_IT, tool)
        else:
            sentence = f"declared {call.effect}, and after the kill it was not known whether it had happened: the run waited for a person"
            yield note("no_reconcile", case, sentence, f"give it a hook that finds out: @{tool}.reconcile", tool)


def unseen(case: TrialFacts, base: Undisturbed) -> Iterator[Problem]:
    """Rule: a note for each tool that was called again and whose effects cannot be seen. It may have acted twice."""
    for tool in unseen_again(case, base):
        sentence = (
            "it was called again, and its effect was not seen: in the undisturbed run it changes neither the working folder nor the ledger"
        )
        yield note(
            "not_seen",
            case,
            sentence,
            "say --ledger, or have it write below the working folder; perdure check names keys that are ignored",
            tool,
        )


def unseen_again(case: TrialFacts, base: Undisturbed) -> list[str]:
    again = dict.fromkeys(one.tool for one in repeats(case, base) if one.effect not in (*HARMLESS, INSIDE))
    return [tool for tool in again if not base.shows(tool)]


def output(case: TrialFacts, base: Undisturbed) -> Iterator[Problem]:
    """Rule: the output is the same as in the undisturbed run. If it is not: which tool returned another result?"""
    if not base.same_output or case.output is None or case.output == base.first.output or not base.went_the_same_way(case):
        return
    changed = [place for place in case.calls if base.is_steady(place) and case.result(place) != base.first.result(place)]
    free = [place for place in case.calls if not base.is_steady(place)]
    for place in changed:
        sentence = f"declared {case.effect(place)}, and after the kill it returned {shown(case.result(place))} instead of {shown(base.first.result(place))}"
        if case.effect(place) in ("read", "model"):
            yield note("output_differs", case, f"{sentence}, and so the output differs", "as declared: the world may change", place[2])
        else:
            yield wrong("result_differs", case, sentence, "let a repeated call answer as the first call did", place[2])
    if not changed and not free:
        sentence = f"the output is {shown(case.output)} instead of {shown(base.first.output)}, though every call returned the same"
        yield wrong("output_differs", case, sentence, "the agent depends on something that is not recorded: perdure check names it")


RULES = (promises, rest, results, hooks, ruled_out, missed, doubts, unseen, output)
