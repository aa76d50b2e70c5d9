"""perdure without one of its guards, in this process until the change is undone: the simulation must notice it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from msgspec import structs
from tests.sim import outside, world
from tests.sim.outside import LONGEST_FLIGHT_US, Outside

from perdure.core import decide as deciding
from perdure.core import identity, run_core, suspects
from perdure.core.decide import Perform, Reconcile, settle_s
from perdure.core.events import Event, ToolCallCompleted
from perdure.core.run_core import RunCore
from perdure.core.state import CallState
from perdure.engine.local.drive import Drive
from perdure.errors import StoreUnavailable
from perdure.store import claims, projections
from perdure.store.api import Appended, Committed
from perdure.store.sqlite import queries

Mutant = Callable[[pytest.MonkeyPatch], None]


def _weaken(patch: pytest.MonkeyPatch, name: str, *conditions: str) -> None:
    statement = queries.QUERIES[name]
    for condition in conditions:
        assert statement.count(condition) == 1, f"{condition!r} in {statement}"
        statement = statement.replace(condition, f"({condition} OR TRUE)")
    patch.setitem(queries.QUERIES, name, statement)


_ADVANCES = ("advance", "advance_and_project", "advance_and_release")


def anybody_may_write(patch: pytest.MonkeyPatch) -> None:
    for name in _ADVANCES:
        _weaken(patch, name, "epoch = ?5", "nonce = ?6", "holder = ?7", "seq = ?8")


def the_epoch_and_the_holder_are_not_compared(patch: pytest.MonkeyPatch) -> None:
    for name in _ADVANCES:
        _weaken(patch, name, "epoch = ?5", "nonce = ?6", "holder = ?7")


def effects_begin_before_their_intent_is_durable(patch: pytest.MonkeyPatch) -> None:
    def ready(self: Any, call: Any) -> None:
        self._running.add(call.number)
        self._out.begin_now.append(self._begin_of(call))
        self._dirty_since = self._mono  # the flush of earlier events must not come before the effect

    patch.setattr(RunCore, "_ready", ready)


def once_is_repeated(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(deciding, "_REPEATABLE", deciding._REPEATABLE | {"once"})


def hooks_are_not_asked(patch: pytest.MonkeyPatch) -> None:
    real: Any = run_core.decide  # type: ignore[attr-defined]

    def decide(call: Any, **told: Any) -> Any:
        verdict = real(call, **told)
        return Perform(call.attempt + 1) if isinstance(verdict, Reconcile) else verdict

    patch.setattr(run_core, "decide", decide)


def services_are_slow(patch: pytest.MonkeyPatch) -> None:
    """Not a mutant: requests take long."""
    patch.setattr(Outside, "_flight_us", lambda self: LONGEST_FLIGHT_US // 2 + int(self.chance.random() * LONGEST_FLIGHT_US / 2))


def hooks_are_believed_at_once(patch: pytest.MonkeyPatch) -> None:
    services_are_slow(patch)
    patch.setattr(RunCore, "_quiet_at", lambda self, call: -(2**62))
    patch.setattr(deciding, "never_quiet", lambda call: False)
    patch.setattr(world, "SETTINGS", structs.replace(world.SETTINGS, reconcile_margin_s=0.0))


def a_reset_is_believed_to_end_what_was_sent(patch: pytest.MonkeyPatch) -> None:
    """An attempt that has ended is taken to have nothing on its way any more."""
    real = RunCore._quiet_at

    def quiet_at(self: Any, call: Any) -> int | None:
        if call.number not in self._ended_mono:
            return real(self, call)
        ended: int = self._ended_mono[call.number]
        return ended + round(settle_s(call, self._settings.patience) * 1e6)

    services_are_slow(patch)
    patch.setattr(outside, "_FATES", (("broken early", 0.3),))
    patch.setattr(RunCore, "_quiet_at", quiet_at)


def keys_do_not_contain_the_call_number(patch: pytest.MonkeyPatch) -> None:
    real = identity.CallKeys.key
    patch.setattr(identity.CallKeys, "key", lambda self, call, tool: real(self, 1, tool))


def an_unknown_commit_is_taken_for_one(patch: pytest.MonkeyPatch) -> None:
    real = Drive._answered

    def answered(self: Any, append: Any, said: Appended | Exception) -> None:
        real(self, append, Committed() if isinstance(said, StoreUnavailable) else said)

    patch.setattr(Drive, "_answered", answered)


def a_park_ignores_the_inbox(patch: pytest.MonkeyPatch) -> None:
    statement = queries.QUERIES["unread_inbox_of_run"]
    assert "WHERE run = ?" in statement
    patch.setitem(queries.QUERIES, "unread_inbox_of_run", statement.replace("WHERE run = ?", "WHERE FALSE AND run = ?"))


def parents_are_not_told(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(projections.family, "tell_parent", lambda *_: None)  # type: ignore[attr-defined]


def budgets_are_not_asked(patch: pytest.MonkeyPatch) -> None:
    def barrier(*_: Any) -> Any:
        """Nothing is in the way, and nothing is asked."""
        return
        yield

    patch.setattr(RunCore, "_budget_barrier", barrier)


def a_settled_doubt_costs_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CallState, "cost_if", lambda self, outcome: None)


def a_lost_attempt_costs_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RunCore, "_was_lost", lambda self, call: False)


def the_dead_are_never_noticed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(claims.Claims, "reap", lambda *_: 0)


def a_park_forgets_when_to_wake(patch: pytest.MonkeyPatch) -> None:
    real = RunCore._release

    def release(self: Any, status: Any, waiting_for: str, wake: int | None, attention: Any = None) -> None:
        real(self, status, waiting_for, None if status == "waiting" else wake, attention)

    patch.setattr(RunCore, "_release", release)


def replay_delivers_in_order_of_calls(patch: pytest.MonkeyPatch) -> None:
    real: Any = run_core.replay  # type: ignore[attr-defined]

    def replay(machine: Any, events: Sequence[Event], load: Any) -> Any:
        places = [place for place, event in enumerate(events) if isinstance(event.body, ToolCallCompleted)]
        shuffled = list(events)
        for place, event in zip(places, sorted((events[place] for place in places), key=lambda event: -(event.call or 0)), strict=True):
            shuffled[place] = event
        return real(machine, shuffled, load)

    patch.setattr(run_core, "replay", replay)


def approvals_do_not_expire(patch: pytest.MonkeyPatch) -> None:
    _weaken(patch, "consume_approval", "(expires_at IS NULL OR expires_at > :ts)")
    patch.setattr(RunCore, "_has_lapsed", lambda self, number, now: False)
    real = RunCore._start_approved

    def start(self: Any, call: Any) -> Any:
        ask = self.state.asks[call.number]
        known, ask.request = ask.request, structs.replace(ask.request, expires_at=None)
        yield from real(self, call)
        ask.request = known

    patch.setattr(RunCore, "_start_approved", start)


def groups_of_suspects_do_not_halve(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(suspects.Group, "admits", lambda *_: True)


def nobody_remembers_who_was_lost_together(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(claims.Load, "beside", lambda *_: 0)


def deaths_beside_others_count(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(run_core, "is_poison", lambda crashes, alone, limit: crashes >= limit)


MUTANTS: list[Mutant] = [
    anybody_may_write,
    the_epoch_and_the_holder_are_not_compared,
    effects_begin_before_their_intent_is_durable,
    once_is_repeated,
    hooks_are_not_asked,
    hooks_are_believed_at_once,
    a_reset_is_believed_to_end_what_was_sent,
    keys_do_not_contain_the_call_number,
    an_unknown_commit_is_taken_for_one,
    a_park_ignores_the_inbox,
    parents_are_not_told,
    budgets_are_not_asked,
    a_settled_doubt_costs_nothing,
    a_lost_attempt_costs_nothing,
    the_dead_are_never_noticed,
    a_park_forgets_when_to_wake,
    replay_delivers_in_order_of_calls,
    approvals_do_not_expire,
    groups_of_suspects_do_not_halve,
    nobody_remembers_who_was_lost_together,
    deaths_beside_others_count,
]
