"""The guards that other tests remove in the running process: the promise of each, and the check that must fail without it.

The mutations and their checks are in those tests; this file has only what the table needs in addition. A test fails if a mutation
is not listed here, or is listed and does not exist.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tests.conformance import test_guard_is_needed as predicates
from tests.conformance import test_postgres_guards_are_needed as on_postgres
from tests.conformance import test_waiting_guards_are_needed as waiting
from tests.crash import test_guards_can_fail, test_mind_guards_can_fail, test_waiting_guards_can_fail
from tests.mutants.mutant import Known, Store
from tests.postgres import test_storm_guards

# name → (the purpose of the guard, the promise that it keeps)
CRASH = {
    "effects_start_before_their_intent_is_durable": ("an effect begins when its intent is durable", "G2"),
    "keys_do_not_contain_the_call_number": ("two intended identical calls have two keys", "T4"),
    "falsy_results_are_no_results": ("a falsy result is a result", "T3"),
    "a_result_that_cannot_be_encoded_is_a_failed_call": ("an effect whose result cannot be recorded has happened", "T2"),
    "replay_does_not_compare": ("the run stops if the code asks for other calls than the journal has", "G7"),
    "replay_delivers_in_order_of_calls": ("completions are replayed in their recorded order", "G7"),
    "hooks_are_not_asked": ("a hook is asked before a call is made again", "G5"),
    "once_is_repeated": ("a once call in doubt is not made again", "G5"),
    "the_guard_is_off": ("only the holder of the lease appends", "G4"),
    "locks_prove_nothing": ("a run is not taken over from a live worker", "G4"),
    "leases_are_not_renewed": ("a tool that blocks the event loop does not cost its worker the lease", "T13"),
    "poison_is_never_noticed": ("a run that kills every worker is parked", "T26"),
}
WAITING = {
    "any_answer_is_a_yes": ("only an approval that was granted starts a call", "G9"),
    "a_start_does_not_look_at_the_expiry": ("an approval that has expired starts nothing", "G9"),
    "a_start_does_not_compare_arguments": ("only the approved arguments run", "T18"),
    "workers_do_not_look_at_the_expiry": ("a worker ends an approval that was granted and has expired", "G9"),
    "what_is_settled_is_decided_again": ("of two decisions the first counts", "T17"),
    "decisions_are_judged_before_their_transaction": ("a decision is checked against the state that its own transaction reads", "T17"),
    "a_park_ignores_the_inbox": ("a post that arrives while a run is being released wakes a worker", "G6"),
    "parents_are_told_afterwards": ("the end of a child and its event for the parent are one commit", "T25"),
    "charges_are_made_afterwards": ("a charge is made in the commit of its event", "T24"),
    "every_signal_is_news": ("a signal that is sent again counts once", "duplicates"),
}
MIND = {
    "answers_in_the_journal_are_taken_for_failures": ("an answer in the journal is not asked for again", "G5"),
    "lost_answers_are_not_recorded": ("an answer that was lost with its worker is recorded as lost", "G8"),
    "requests_are_not_compared": ("the run stops if a request differs from the recorded one", "T30"),
    "clients_try_again_on_their_own": ("every request to a provider is a recorded attempt", "G2"),
    "what_hangs_at_the_end_of_a_run_is_left_hanging": ("every tool use of an ended conversation has a result", "T28"),
    "what_was_not_called_is_not_told": ("a model is told which calls were not made", "T28"),
}
PREDICATES = {"epoch": "G4", "nonce": "G4", "worker": "G4", "seq": "G3"}
CONFORMANCE = {
    **dict.fromkeys(("consumed once", "granted", "in time", "in time when it is sent", "an approval is consumed at all"), "G9"),
    **dict.fromkeys(("the approved arguments", "the approved tool"), "T18"),
    **dict.fromkeys(("the approved call", "the approved run"), "T16"),
    **dict.fromkeys(("nothing stays pending at the end", "a finished parent is left alone"), "G10"),
    **dict.fromkeys(("a taken notice is one taker's", "a notice goes out in the commit", "a transaction rings"), "T25"),
    **dict.fromkeys(("a charge counts above", "a child stands under its parent's budget", "reservations end with the run"), "G14"),
    **dict.fromkeys(("post does not wake a paused run", "a child's end is told", "a pause does not forget the time to begin"), "G6"),
    "a refused append is undone": "storage",
    "the decision is stored": "T17",
    "a key is taken once": "duplicates",
    "who holds a run reads its post": "G4",
    "what came first is journaled first": "T11",
    "limits count for a run that is asked for by name": "G14",
}
POSTGRES = {
    **{f"many at once: {part}": promise for part, promise in PREDICATES.items()},
    "many at once: the events of those that moved": "G4",
    "many at once: budgets are settled elsewhere": "G14",
    "many at once: nothing stays pending": "G10",
    **{f"the fence is {what}": "storage" for what in ("of this epoch", "of this worker", "of this lease", "a new nonce")},
    "a worker that is silent no longer": "G4",
    "a worker that holds something is remembered": "G6",
    **{f"{who} by": "G6" for who in ("claims pass", "claims below pass", "reaping passes", "notices pass", "turns pass")},
    **{f"{who} at once pass by": "G6" for who in ("claims", "turns")},
    **dict.fromkeys(("claims at once are of what was seen", "takeovers are weighed"), "G4"),
    **{f"signals at once {what}": "T11" for what in ("are of what was seen", "come after what is unread")},
    "a signal that was given up is refused": "duplicates",
    **{f"signals at once are for {whose} runs": promise for whose, promise in (("nobody's", "G4"), ("parked", "G6"))},
    "the id of a pruned run is taken": "G5",
    **dict.fromkeys(("whoever posts holds the run", "whoever gives up holds the run", "whoever gives up at once holds the run"), "G6"),
    **dict.fromkeys(("whoever gives up at once sees what is there", "many at once: whoever gives up sees what is there"), "G6"),
    "many at once: post wakes": "G6",
    # Also on SQLite, and for the same reasons.
    **{name: CONFORMANCE[name] for name in CONFORMANCE if name in on_postgres.GUARDS},
}


def known() -> Iterator[Known]:
    """All of them, in the order of the files that hold them."""
    yield from _crashing("tests/crash/mutations.py", CRASH, test_guards_can_fail.GUARDS, "both")
    yield from _crashing("tests/crash/waiting_mutations.py", WAITING, test_waiting_guards_can_fail.GUARDS, "both")
    yield from _crashing("tests/crash/mind_mutations.py", MIND, test_mind_guards_can_fail.GUARDS, "sqlite")
    yield from _predicates("tests/conformance/test_guard_is_needed.py", predicates.STATEMENTS, "sqlite")
    yield from _statements(
        "tests/conformance/test_waiting_guards_are_needed.py", CONFORMANCE, waiting.STATEMENTS | waiting.FUNCTIONS, "sqlite"
    )
    yield from _predicates("tests/conformance/test_postgres_guards_are_needed.py", on_postgres.ADVANCES, "postgres")
    yield from _statements("tests/conformance/test_postgres_guards_are_needed.py", POSTGRES, on_postgres.GUARDS, "postgres")
    yield Known(
        name="leases_are_not_looked_at",
        guard="a worker that slept past its lease is refused at its first write",
        promise="G4",
        where="the guarded statements",
        removed_in="tests/postgres/storm_guards.py",
        red=test_storm_guards.check_a_late_write_is_refused.__name__,
        store="postgres",
    )


def _crashing(
    file: str, words: Mapping[str, tuple[str, str]], checks: Mapping[str, tuple[Callable[..., None], str]], store: Store
) -> Iterator[Known]:
    assert words.keys() == checks.keys(), f"{file}: {sorted(words.keys() ^ checks.keys())}"
    for name, (guard, promise) in words.items():
        check = checks[name][0].__name__
        yield Known(name=name, guard=guard, promise=promise, where="in a process that is killed", removed_in=file, red=check, store=store)


def _predicates(file: str, statements: Mapping[str, Any], store: Store) -> Iterator[Known]:
    for statement in statements:
        for part, promise in PREDICATES.items():
            check = "test_an_append_that_expects_another_seq_is_refused" if part == "seq" else "test_a_lease_that_differs_only_in_its"
            guard = f"{'the expected' if part == 'seq' else 'the lease’s'} {part} is compared"
            yield Known(
                name=f"{statement} without its {part}",
                guard=guard,
                promise=promise,
                where=statement,
                removed_in=file,
                red=check,
                store=store,
            )


def _statements(file: str, promises: Mapping[str, str], guards: Mapping[str, tuple[Any, ...]], store: Store) -> Iterator[Known]:
    assert promises.keys() == guards.keys(), f"{file}: {sorted(promises.keys() ^ guards.keys())}"
    for name, promise in promises.items():
        where = guards[name][0] if isinstance(guards[name][0], str) else f"{guards[name][0].__name__}.{guards[name][1]}"
        check = getattr(guards[name][3], "__name__", "check")
        yield Known(name=f"without: {name}", guard=name, promise=promise, where=where, removed_in=file, red=check, store=store)
