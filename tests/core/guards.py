"""The guards of the run core, each with a function that removes it. See test_explorer.py.

A guard is removed by replacing one function or method of the core. Without it, the explorer must find a broken
promise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
from msgspec import structs
from tests.core import world

from perdure.core import decide, fork, history, machine, reopen, run_core, state
from perdure.core.budget import amounts_of, exceeded
from perdure.core.decide import After, Perform
from perdure.core.events import OutcomeReused, RunReleased
from perdure.core.identity import CallKeys
from perdure.core.machine import CallTool
from perdure.core.outcomes import Outcome, Raised, Unrecordable
from perdure.core.run_core import Over, RunCore
from perdure.core.steps import AppendRefused, LedgersRead, Posted, ReadLedgers

Patch = pytest.MonkeyPatch


class Guard(NamedTuple):
    """What is removed, the scenario that shows it, and the promise that breaks."""

    off: Callable[[Patch], None]
    scenario: str
    breaks: str


def _nothing(*_: Any) -> Iterator[Any]:
    """A turn that does nothing."""
    yield from ()


# -- intents ------------------------------------------------------------------------------------------------------------
def calls_begin_before_their_intent_is_durable(patch: Patch) -> None:
    def ready(self: Any, call: Any) -> None:
        self._running.add(call.number)
        self._out.begin_now = [*self._out.begin_now, self._begin_of(call)]

    patch.setattr(RunCore, "_ready", ready)


def a_worker_that_lost_its_run_goes_on(patch: Patch) -> None:
    unwritten = RunCore._unwritten

    def without(self: Any, answer: Any) -> Any:
        if not isinstance(answer, AppendRefused):
            return (yield from unwritten(self, answer))
        self._sent, self._due, self._starting = None, self._starting + self._due, []
        self._append(None)

    patch.setattr(RunCore, "_unwritten", without)


def what_has_not_begun_counts_as_begun(patch: Patch) -> None:
    take = RunCore._take_commit
    patch.setattr(RunCore, "_take_commit", lambda self, answer: take(self, structs.replace(answer, begun=True)))


def a_drain_stops_nothing(patch: Patch) -> None:
    patch.setattr(RunCore, "may_begin", property(lambda self: True))


def post_is_read_twice(patch: Patch) -> None:
    keep = RunCore._keep

    def without(self: Any, given: Any) -> None:
        if isinstance(given, Posted):
            self._arrived.append(given)
        else:
            keep(self, given)

    patch.setattr(RunCore, "_keep", without)


# -- unknown outcomes -----------------------------------------------------------------------------------------------------
def a_doubtful_call_is_made_again(patch: Patch) -> None:
    patch.setattr(decide, "_about_doubt", lambda call, *_: Perform(call.attempt + 1))


def hooks_are_not_asked(patch: Patch) -> None:
    patch.setattr(decide, "_about_doubt", lambda call, hook, window, asks, now: decide.about_unknown(call, window, now))


def not_found_is_believed_at_once(patch: Patch) -> None:
    patch.setattr(run_core, "quiet_after_s", lambda call, patience: 0.0)


def the_wait_for_not_found_is_too_short(patch: Patch) -> None:
    after_s = decide.quiet_after_s
    patch.setattr(run_core, "quiet_after_s", lambda call, patience: max((after_s(call, patience) or 0.0) - 1.0, 0.0))


def a_silent_worker_counts_as_dead(patch: Patch) -> None:
    after_s = decide.quiet_after_s

    def without(call: Any, patience: Any) -> Any:
        lives, call.worker_may_live = call.worker_may_live, False
        try:
            return after_s(call, patience)
        finally:
            call.worker_may_live = lives

    patch.setattr(run_core, "quiet_after_s", without)


def attempts_that_do_not_stop_are_forgotten(patch: Patch) -> None:
    patch.setattr(decide, "never_quiet", lambda call: False)


def a_hook_that_does_not_know_is_taken_for_a_no(patch: Patch) -> None:
    after_hook = decide.after_hook

    def without(call: Any, outcome: Outcome, tool: Any, **rest: Any) -> After:
        no = Outcome.not_happened(final=True) if outcome.kind == "unknown" else outcome
        return after_hook(call, no, tool, **rest)

    patch.setattr(run_core, "after_hook", without)


def an_old_key_is_used(patch: Patch) -> None:
    patch.setattr(decide, "about_unknown", lambda call, window, now, why="": Perform(call.attempt + 1))


def a_key_from_the_future_is_used(patch: Patch) -> None:
    patch.setattr(decide, "_CLOCK_SLACK_S", 1e9)


def a_doubt_is_told_as_a_failure(patch: Patch) -> None:
    def without(call: Any, failure: Any, usage: Any, tool: Any, **_: Any) -> After:
        return After([tool.events.failed(failure, attempt=call.attempt, final=True, usage=usage)])

    patch.setattr(run_core, "after_failed_attempt", without)


def what_cannot_be_recorded_is_a_failure(patch: Patch) -> None:
    take_end = RunCore._take_end

    def without(self: Any, ended: Any) -> Any:
        result = Raised(ended.result.failure) if isinstance(ended.result, Unrecordable) else ended.result
        return take_end(self, structs.replace(ended, result=result))

    patch.setattr(RunCore, "_take_end", without)


def an_answer_counts_for_any_attempt(patch: Patch) -> None:
    patch.setattr(RunCore, "_is_about", lambda self, answer, call: True)


# -- cancel, pause and rest -----------------------------------------------------------------------------------------------
def a_doubtful_call_is_made_again_after_a_cancel(patch: Patch) -> None:
    def without(self: Any, call: Any, asked: Any, wanted: bool) -> Any:
        tool = asked.tool
        return decide.decide(
            call, has_reconcile=tool.reconciler is not None, key_window_s=tool.key_window_s, max_asks=2, wanted=wanted, now=self._now
        )

    patch.setattr(RunCore, "_verdict", without)


def calls_that_wait_for_their_commit_begin_after_a_cancel(patch: Patch) -> None:
    patch.setattr(RunCore, "_give_up_if_idle", _nothing)


def a_run_rests_without_its_wake_up(patch: Patch) -> None:
    release = RunCore._release
    patch.setattr(RunCore, "_release", lambda self, status, what, wake, attention=None: release(self, status, what, None, attention))


# -- approvals ------------------------------------------------------------------------------------------------------------
def a_call_begins_after_the_time_of_its_approval(patch: Patch) -> None:
    again = RunCore._attempt_again

    def without(self: Any, call: Any, attempt: int) -> Any:
        ask = self.state.asks.pop(call.number, None)
        yield from again(self, call, attempt)
        if ask is not None:
            self.state.asks[call.number] = ask

    patch.setattr(RunCore, "_attempt_again", without)


def other_bytes_run_than_were_approved(patch: Patch) -> None:
    consume = RunCore._consume

    def without(self: Any, call: Any, ask: Any, asked: Any) -> None:
        consume(self, call, ask, asked)
        self._asked[call.number] = CallTool(asked.number, asked.tool, b'{"what":"swapped"}')

    patch.setattr(RunCore, "_consume", without)


def edited_arguments_are_forgotten_with_the_worker(patch: Patch) -> None:
    consider = RunCore._consider

    def without(self: Any, call: Any) -> Any:
        ask = self.state.asks.get(call.number)
        if ask is None or not call.attempt:
            return (yield from consider(self, call))
        edited, ask.edited = ask.edited, False
        yield from consider(self, call)
        ask.edited = edited

    patch.setattr(RunCore, "_consider", without)


def a_yes_and_its_end_are_not_weighed_together(patch: Patch) -> None:
    patch.setattr(RunCore, "_can_take_back", lambda self, number: False)


# -- limits ---------------------------------------------------------------------------------------------------------------
def lost_attempts_are_free(patch: Patch) -> None:
    patch.setattr(RunCore, "_was_lost", lambda self, call: False)


def calls_of_one_turn_do_not_see_each_other_s_cost(patch: Patch) -> None:
    def without(self: Any, number: int, tool: Any) -> Any:
        read = yield ReadLedgers()
        for ledger in read.ledgers if isinstance(read, LedgersRead) else ():
            found = exceeded(ledger.run_id, ledger.limits, ledger.spent + ledger.reserved, amounts_of(tool.estimate, calls=1))
            if found is not None:
                return Over(found, ledger.limits)
        return None

    patch.setattr(RunCore, "_budget_barrier", without)


def a_place_in_line_is_not_waited_for(patch: Patch) -> None:
    patch.setattr(RunCore, "_barrier", lambda self, number, tool: _nothing())


# -- causes ---------------------------------------------------------------------------------------------------------------
def a_release_names_no_cause(patch: Patch) -> None:
    record = RunCore._record

    def without(self: Any, body: Any, *, cause: Any, **more: Any) -> Any:
        return record(self, body, cause=None if isinstance(body, RunReleased) else cause, **more)  # type: ignore[arg-type]

    patch.setattr(RunCore, "_record", without)


# -- reopened runs --------------------------------------------------------------------------------------------------------
def a_call_that_is_made_again_is_a_new_call(patch: Patch) -> None:
    patch.setattr(history.Superseded, "take", lambda self, *_: None)


def superseded_calls_are_found_by_their_tool_alone(patch: Patch) -> None:
    take = history.Superseded.take

    def without(self: Any, kind: str, name: str, args: bytes, callee: Any, digest: Any) -> Any:
        found = take(self, kind, name, args, callee, digest)
        others = (number for number, payload in self._inputs.get((kind, name), {}).items() if number in self.left)
        if found is None and (found := next(others, None)) is not None:
            self.left.remove(found)
        return found

    patch.setattr(history.Superseded, "take", without)


def numbers_go_on_where_the_agent_goes_back_to(patch: Patch) -> None:
    reopen = machine.Machine.reopen

    def without(self: Any, earlier: Any, load: Any) -> None:
        last = self._calls
        reopen(self, earlier, load)
        self._calls = last

    patch.setattr(machine.Machine, "reopen", without)


def a_failed_call_is_attempted_again_whatever_has_happened(patch: Patch) -> None:
    for module in (state, history, reopen):
        patch.setattr(module, "is_repeatable", lambda call: True)


def signals_are_superseded_with_the_rest(patch: Patch) -> None:
    patch.setattr(world, "reopening", _without_bodies(OutcomeReused, lambda call: call is None))


def the_cost_of_superseded_calls_is_forgotten(patch: Patch) -> None:
    patch.setattr(reopen, "unsettled", lambda calls: ())


def any_point_will_do(patch: Patch) -> None:
    patch.setattr(reopen, "split_at", lambda events, point: None)


# -- forks --------------------------------------------------------------------------------------------------------------
def a_fork_takes_the_calls_of_its_parent_for_its_own(patch: Patch) -> None:
    make = state.RunState._fork

    def without(self: Any, event: Any, body: Any) -> None:
        make(self, event, body)
        for call in self.calls.values():
            call.inherited = False

    patch.setattr(state.RunState, "_fork", without)


def a_fork_does_not_wait_until_calls_are_settled(patch: Patch) -> None:
    patch.setattr(fork, "_check_settled", lambda parent, state, at: None)


def a_fork_has_the_keys_of_its_parent(patch: Patch) -> None:
    of = CallKeys.of.__func__  # type: ignore[attr-defined]
    patch.setattr(CallKeys, "of", classmethod(lambda cls, created, fork=None: of(cls, created)))


def a_worker_may_claim_a_rehearsal(patch: Patch) -> None:
    patch.setattr(state.RunState, "_check_fork", lambda self, event: None)


def approvals_of_the_parent_count_in_a_fork(patch: Patch) -> None:
    patch.setattr(history, "_is_the_same", lambda state, number: True)


def _without_bodies(kind: type, of: Callable[[int | None], bool]) -> Any:
    reopening = reopen.reopening

    def without(*given: Any, **more: Any) -> Any:
        found = reopening(*given, **more)
        return structs.replace(found, bodies=[(body, call) for body, call in found.bodies if not (isinstance(body, kind) and of(call))])

    return without


# -- calls that are held ------------------------------------------------------------------------------------------------
def a_message_holds_no_call(patch: Patch) -> None:
    patch.setattr(RunCore, "_hold", lambda self, number, cause: None)


def a_call_that_is_held_begins_when_it_is_approved(patch: Patch) -> None:
    patch.setattr(state.CallState, "held", property(lambda self: False))


def a_call_is_not_held_after_the_worker_has_died(patch: Patch) -> None:
    rebuild = RunCore._rebuild

    def without(self: Any, events: Any) -> Any:
        hold, self_hold = RunCore._hold, lambda self, number, cause: None
        patch.setattr(RunCore, "_hold", self_hold)
        try:
            yield from rebuild(self, events)
        finally:
            patch.setattr(RunCore, "_hold", hold)

    patch.setattr(RunCore, "_rebuild", without)


def a_start_that_was_recorded_before_a_message_is_not_taken_back(patch: Patch) -> None:
    hold = RunCore._hold

    def without(self: Any, number: int, cause: int) -> None:
        if not self._can_take_back(number):
            hold(self, number, cause)

    patch.setattr(RunCore, "_hold", without)


GUARDS = [
    Guard(calls_begin_before_their_intent_is_durable, "once", "G2"),
    Guard(a_worker_that_lost_its_run_goes_on, "a pair", "G4"),
    Guard(what_has_not_begun_counts_as_begun, "a pair", "G6"),
    Guard(a_drain_stops_nothing, "drained", "G13"),
    Guard(post_is_read_twice, "signals", "already|signals were sent"),
    Guard(a_doubtful_call_is_made_again, "once", "G5"),
    Guard(hooks_are_not_asked, "keyed with a hook", "G5"),
    Guard(not_found_is_believed_at_once, "once with a hook", "G5"),
    Guard(the_wait_for_not_found_is_too_short, "once with a hook", "G5"),
    Guard(a_silent_worker_counts_as_dead, "once with a hook", "G5"),
    Guard(attempts_that_do_not_stop_are_forgotten, "once with a hook, attempts that do not stop", "G5"),
    Guard(a_hook_that_does_not_know_is_taken_for_a_no, "once with a hook", "G5"),
    Guard(an_old_key_is_used, "keyed", "T14|G5"),
    Guard(a_key_from_the_future_is_used, "keyed, and the clock is set", "T14"),
    Guard(a_doubt_is_told_as_a_failure, "once", "G8"),
    Guard(what_cannot_be_recorded_is_a_failure, "once", "G8"),
    Guard(an_answer_counts_for_any_attempt, "a person and a hook", "."),
    Guard(a_doubtful_call_is_made_again_after_a_cancel, "cancelled", "cancelled"),
    Guard(calls_that_wait_for_their_commit_begin_after_a_cancel, "cancelled with a signal", "cancelled"),
    Guard(a_run_rests_without_its_wake_up, "timers", "G6"),
    Guard(a_call_begins_after_the_time_of_its_approval, "an approval and a drain", "G9"),
    Guard(other_bytes_run_than_were_approved, "an approval", "G9"),
    Guard(edited_arguments_are_forgotten_with_the_worker, "an approval", "G9"),
    Guard(a_yes_and_its_end_are_not_weighed_together, "an approval and another clock", "."),
    Guard(a_message_holds_no_call, "a message while it asks", "G9"),
    Guard(a_call_that_is_held_begins_when_it_is_approved, "a message while it asks", "G9"),
    Guard(a_call_is_not_held_after_the_worker_has_died, "a message while it asks", "G9"),
    Guard(a_start_that_was_recorded_before_a_message_is_not_taken_back, "messages while two calls wait", "G9"),
    Guard(lost_attempts_are_free, "a budget", "T33"),
    Guard(calls_of_one_turn_do_not_see_each_other_s_cost, "a budget that fails, and another run", "G14|T33"),
    Guard(a_place_in_line_is_not_waited_for, "a rate", "rate"),
    Guard(a_release_names_no_cause, "timers", "run_released.*caused by event None"),
    Guard(a_call_that_is_made_again_is_a_new_call, "reopened: once", "T35"),
    Guard(superseded_calls_are_found_by_their_tool_alone, "reopened: once", "T35|G7"),
    Guard(numbers_go_on_where_the_agent_goes_back_to, "reopened: once", "."),
    Guard(a_failed_call_is_attempted_again_whatever_has_happened, "reopened: once", "G5"),
    Guard(signals_are_superseded_with_the_rest, "reopened: signals", "T35|heard"),
    Guard(the_cost_of_superseded_calls_is_forgotten, "reopened: a budget", "T33|G14"),
    Guard(any_point_will_do, "reopened: gathered", "G7"),
    Guard(a_fork_takes_the_calls_of_its_parent_for_its_own, "forked: once", "T35"),
    Guard(a_fork_does_not_wait_until_calls_are_settled, "forked: once", "T35|G5"),
    Guard(a_fork_has_the_keys_of_its_parent, "forked: each effect", "T35"),
    Guard(a_worker_may_claim_a_rehearsal, "forked: once", "T35"),
    Guard(approvals_of_the_parent_count_in_a_fork, "forked: the agent asks", "G9"),
]
