"""The judge's rules about perdure itself, with evidence that only a broken perdure would leave."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from perdure.testing.boundaries import Boundary
from perdure.testing.lab.comparing import Difference, Said, differences
from perdure.testing.lab.facts import TrialFacts, Undisturbed
from perdure.testing.lab.judge import judge
from perdure.testing.lab.ledger import Entry
from perdure.testing.lab.spec import CallTold, Intent, Kill, Resolution, TrialTold
from perdure.testing.lab.trials import Evidence, Planned
from perdure.testing.lab.world import FileSeen

FIRST, SECOND = 101, 102  # the killed process, and the process that continued
CALL = CallTold("r", 1, "pay", "keyed", "k", "completed", "d", False, (Intent(1, FIRST), Intent(2, SECOND)), SECOND, (), '"ok"')
TOLD = TrialTold("succeeded", '"ok"', None, None, None, (CALL,), (), (), 0.0, 1.0)


def line(fact: Any, pid: int, attempt: int = 1, **more: Any) -> Entry:
    return Entry(fact, pid, 0.0, "pay", False, "r", 1, attempt, **{"key": "k", **more})


TWICE = (
    line("begun", FIRST),
    line("returned", FIRST, result='"ok"'),
    Entry("killed", FIRST, 0.0),
    line("begun", SECOND, 2),
    line("returned", SECOND, 2, result='"ok"'),
)


def evidence(told: TrialTold | None = TOLD, entries: tuple[Entry, ...] = TWICE, **more: Any) -> Evidence:
    given: dict[str, Any] = {
        "planned": Planned(2, (Kill(Boundary("after_tool_effect", "", 1, "pay")),)),
        "run_id": "r",
        "reached": 1,
        "end": "rested",
        "log": "",
        "pids": (FIRST, SECOND),
        "visits": (),
        "files": {},
        "world": None,
        "known": {},
        "resume_s": 0.0,
    }
    return Evidence(told=told, entries=entries, **{**given, **more})


def undisturbed(**more: Any) -> Undisturbed:
    one = evidence(structs.replace(TOLD, calls=(call(intents=(Intent(1, FIRST),), completed_by=FIRST),)), TWICE[:2], **more)
    return Undisturbed(TrialFacts(one), TrialFacts(one))


def call(**changed: Any) -> CallTold:
    return structs.replace(CALL, **changed)


def found(told: TrialTold | None = TOLD, entries: tuple[Entry, ...] = TWICE, **more: Any) -> list[tuple[str, str]]:
    (trial,) = judge([evidence(told, entries, **more)], undisturbed())
    return [(problem.rule, problem.sentence) for problem in trial.problems if problem.severity == "wrong"]


def told(changed: CallTold) -> TrialTold:
    return structs.replace(TOLD, calls=(changed,))


def test_the_sound_case_is_not_accused() -> None:
    assert found() == []


@pytest.mark.parametrize(
    ("changed", "entries", "words"),
    [
        (call(completed_by=FIRST), TWICE, "although its result was on record"),
        (call(intents=(Intent(1, FIRST),)), TWICE, "before the intent was durable"),
        (call(), (*TWICE[:3], line("begun", SECOND, 2, key="other")), "key was not the same"),
        (call(effect="once"), TWICE, "declared once"),
    ],
)
def test_what_perdure_promises_of_every_call_is_held_against_the_ledger(changed: CallTold, entries: Any, words: str) -> None:
    ((rule, sentence),) = found(told(changed), entries)
    assert rule == "promise"
    assert words in sentence


def test_a_once_call_may_be_made_again_when_somebody_said_that_it_did_not_happen() -> None:
    assert found(told(call(effect="once", resolutions=(Resolution(1, "did_not_happen", "reconcile"),)))) == []


def test_a_call_that_the_journal_does_not_know_is_a_broken_promise() -> None:
    ((rule, sentence),) = found(structs.replace(TOLD, calls=()))
    assert (rule, sentence) == ("promise", "in call 1, its function was called, and the journal knows of no such call")


@pytest.mark.parametrize(
    ("changed", "more", "rule", "words"),
    [
        (None, {"end": "timeout"}, "stuck", "neither ended nor parked in time"),
        (None, {"end": "exit code 1", "log": "Traceback\nValueError: x\n\n"}, "died", "exit code 1: ValueError: x"),
        (structs.replace(TOLD, faults=("run r: hash",)), {}, "promise", "perdure verify finds a fault: run r: hash"),
        (structs.replace(TOLD, status="needs_attention", attention="diverged", error="call 3"), {}, "diverged", "call 3"),
        (
            structs.replace(TOLD, status="needs_attention", attention="poison", output=None),
            {},
            "status",
            "needs_attention instead of succeeded",
        ),
        (structs.replace(TOLD, output='"other"'), {}, "output_differs", "though every call returned the same"),
    ],
)
def test_a_run_that_does_not_come_to_the_same_end_is_wrong(changed: TrialTold | None, more: Any, rule: str, words: str) -> None:
    ((found_rule, sentence),) = found(changed, **more)
    assert found_rule == rule
    assert words in sentence


def _words(said: list[Said]) -> list[str]:
    return [one.words for one in said if isinstance(one, Difference)]


def test_only_what_two_undisturbed_runs_agree_on_is_expected_of_a_file() -> None:
    same, other, more = FileSeen("a", 1), FileSeen("b", 1), FileSeen("c", 2)
    first = undisturbed(files={"f": same})
    moving = Undisturbed(first.first, TrialFacts(structs.replace(first.second.evidence, files={"f": other})))
    assert [_words(differences(TrialFacts(evidence(files={"f": now})), first)) for now in (same, other, more)] == [
        [],
        ["f has another content"],
        ["f has 2 lines instead of 1"],
    ]
    assert [_words(differences(TrialFacts(evidence(files={"f": now})), moving)) for now in (other, FileSeen("z", 1), more)] == [
        [],
        [],
        ["f has 2 lines instead of 1"],
    ]
    assert _words(differences(TrialFacts(evidence()), first)) == ["f is missing"]


def test_of_two_that_were_called_again_the_one_that_did_no_harm_elsewhere_is_not_accused() -> None:
    look = call(number=2, tool="look", effect="read", key="l", intents=(), completed_by=SECOND)
    told_both = structs.replace(TOLD, calls=(CALL, look))
    looks = tuple(structs.replace(entry, tool="look", call=2, key="l") for entry in (*TWICE[:2], *TWICE[3:]))
    first = evidence(told_both, (*TWICE[:2], *looks[:2]), files={"f": FileSeen("a", 1)})
    harmless = evidence(told_both, (*TWICE[:2], *looks), planned=Planned(3, ()), files={"f": FileSeen("a", 1)})
    harmful = evidence(told_both, (*TWICE, *looks), files={"f": FileSeen("b", 2)})
    for effect in ("keyed", "read"):
        changed = structs.replace(told_both, calls=(call(effect=effect), look))
        quiet = TrialFacts(structs.replace(first, told=changed))
        trials = judge([structs.replace(one, told=changed) for one in (harmful, harmless)], Undisturbed(quiet, quiet))
        assert [problem.tool for problem in trials[0].problems if problem.rule == "effect_twice"] == ["pay"]
    both_read = structs.replace(told_both, calls=(call(effect="read"), look))
    quiet = TrialFacts(structs.replace(first, told=both_read))
    alone = judge([structs.replace(harmful, told=both_read)], Undisturbed(quiet, quiet))
    assert sorted(problem.tool for problem in alone[0].problems if problem.rule == "effect_twice") == ["look", "pay"]
