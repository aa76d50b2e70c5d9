"""perdure without one of its guards: each mutation removes one dangerous line, in a victim's own process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec import structs

from perdure.core import decide as deciding
from perdure.core import identity, run_core
from perdure.core import replay as replaying
from perdure.core.decide import Perform, Reconcile
from perdure.core.events import Event, Failure, ToolCallCompleted
from perdure.core.machine import CallCompleted, Machine
from perdure.core.outcomes import Raised, Returned
from perdure.engine.local import attempts, drive, leases
from perdure.store.cursor import load
from perdure.store.liveness import FileLocks
from perdure.store.postgres import queries as postgres
from perdure.store.sqlite import queries as sqlite

_POSTGRES = load("postgres")  # their parameters not yet numbered


def weaken(name: str, changes: Mapping[str, str]) -> None:
    """Put other words in place of a statement's conditions, in every dialect that has the statement."""
    if name in sqlite.QUERIES:
        sqlite.QUERIES[name] = _changed(sqlite.QUERIES[name], changes)
    postgres.QUERIES[name] = postgres.numbered(_changed(_POSTGRES[name], changes))


def _changed(statement: str, changes: Mapping[str, str]) -> str:
    for old, new in changes.items():
        assert statement.count(old) == 1, f"{old!r} in {statement}"
        statement = statement.replace(old, new)
    return statement


def effects_start_before_their_intent_is_durable() -> None:
    def ready(self: Any, call: Any) -> None:
        self._running.add(call.number)
        self._out.begin_now.append(self._begin_of(call))
        self._dirty_since = self._mono  # the flush of earlier events must not come before the effect

    run_core.RunCore._ready = ready  # type: ignore[method-assign]


def keys_do_not_contain_the_call_number() -> None:
    real = identity.CallKeys.key
    identity.CallKeys.key = lambda self, call, tool: real(self, 1, tool)  # type: ignore[method-assign]


def falsy_results_are_no_results() -> None:
    real = Machine.deliver

    def deliver(self: Any, at: int, completion: Any) -> Any:
        falsy = isinstance(completion, CallCompleted) and completion.result in (b"0", b'""', b"false", b"null", b"[]", b"{}")
        return [] if falsy else real(self, at, completion)

    Machine.deliver = deliver  # type: ignore[method-assign,assignment]


def a_result_that_cannot_be_encoded_is_a_failed_call() -> None:
    real = attempts.recordable  # type: ignore[attr-defined]

    def recordable(tool: Any, value: Any, call: Any) -> Any:
        answer = real(tool, value, call)
        return answer if isinstance(answer, Returned) else Raised(Failure(kind="error", type="TypeError", message="not encodable"))

    attempts.recordable = recordable  # type: ignore[attr-defined]


def replay_does_not_compare() -> None:
    replaying._same = lambda *_: True


def replay_delivers_in_order_of_calls() -> None:
    real = replaying.replay

    def replay(machine: Any, events: Sequence[Event], load: Any, begun: Any = None, *, until: int | None = None, past: Any = None) -> Any:
        assert past is None, "a history in the right order would undo this"
        places = [place for place, event in enumerate(events) if isinstance(event.body, ToolCallCompleted)]
        shuffled = list(events)
        for place, event in zip(places, sorted((events[place] for place in places), key=lambda event: event.call or 0), strict=True):
            shuffled[place] = event
        return real(machine, shuffled, load, begun, until=until)

    run_core.replay = replay  # type: ignore[attr-defined]


def hooks_are_not_asked() -> None:
    real = run_core.decide  # type: ignore[attr-defined]

    def decide(call: Any, **told: Any) -> Any:
        verdict = real(call, **told)
        return Perform(call.attempt + 1) if isinstance(verdict, Reconcile) else verdict

    run_core.decide = decide  # type: ignore[attr-defined]


def once_is_repeated() -> None:
    deciding._REPEATABLE = deciding._REPEATABLE | {"once"}


def the_guard_is_off() -> None:
    # Each value that the guard compares is still a parameter with a type.
    off = {
        f"AND {column} = {parameter}": f"AND (CAST({parameter} AS {kind}) IS NULL OR TRUE)"
        for column, parameter, kind in (
            ("epoch", "?5", "BIGINT"),
            ("nonce", "?6", "BYTEA"),
            ("holder", "?7", "TEXT"),
            ("seq", "?8", "BIGINT"),
        )
    }
    for name in ("advance", "advance_and_project", "advance_and_release", "advance_and_park"):
        weaken(name, off)
    weaken("append_many", {" AND r.epoch = g.epoch AND r.nonce = g.nonce AND r.holder = g.holder AND r.seq = g.before": ""})


def locks_prove_nothing() -> None:
    FileLocks.is_dead = lambda self, worker: True  # type: ignore[method-assign]


def leases_are_not_renewed() -> None:
    leases.Renewer._run = lambda self: None  # type: ignore[method-assign]
    # Without this, the worker would notice that it sent no heartbeat, and release its run: a separate guard.
    leases.Renewer.has_held_since = lambda self, then_s: True  # type: ignore[method-assign]
    leases.Renewer.is_heard = lambda self: True  # type: ignore[method-assign]
    leases.Renewer.silence = lambda self: self._lease_s  # type: ignore[method-assign]


def poison_is_never_noticed() -> None:
    real = drive.Drive.__init__

    def without_limit(self: Any, claimed: Any, agent: Any, host: Any) -> None:
        host.run_settings = structs.replace(host.run_settings, poison_limit=2**40)
        real(self, claimed, agent, host)

    drive.Drive.__init__ = without_limit  # type: ignore[method-assign]


MUTATIONS: dict[str, Callable[[], None]] = {
    found.__name__: found
    for found in (
        effects_start_before_their_intent_is_durable,
        keys_do_not_contain_the_call_number,
        falsy_results_are_no_results,
        a_result_that_cannot_be_encoded_is_a_failed_call,
        replay_does_not_compare,
        replay_delivers_in_order_of_calls,
        hooks_are_not_asked,
        once_is_repeated,
        the_guard_is_off,
        locks_prove_nothing,
        leases_are_not_renewed,
        poison_is_never_noticed,
    )
}
