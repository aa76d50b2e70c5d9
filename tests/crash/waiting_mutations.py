"""perdure without one of the guards of waiting runs, in a victim's own process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from msgspec import structs
from tests.crash.mutations import weaken

from perdure.core import approval as approving
from perdure.core.run_core import RunCore
from perdure.store import approvals, family, limits, mailbox, projections
from perdure.store.api import Append, Appended, Charge
from perdure.store.postgres.store import PostgresStore
from perdure.store.sql import SqlStore


def _without(*guards: str) -> None:
    """Take conditions out of the statement that uses an approval up."""
    weaken("consume_approval", dict.fromkeys(guards, "TRUE"))


def _without_trigger() -> None:
    """The database itself refuses to change settled rows.

    This second guard would hide that the other guards are missing.
    """
    real = SqlStore.__init__

    def init(self: Any, *args: Any) -> None:
        real(self, *args)
        if self.remote:
            with self._database.connections.lent() as connection:
                connection.execute(b"DROP TRIGGER IF EXISTS perdure_approvals_settled ON perdure_approvals")
        else:
            self._database._writer.execute("DROP TRIGGER IF EXISTS perdure_approvals_settled")

    SqlStore.__init__ = init  # type: ignore[method-assign,assignment]


def any_answer_is_a_yes() -> None:
    _without_trigger()
    _without("status = 'approved'", "digest = :digest")  # a rejected approval has no digest of an approved input


def a_start_does_not_look_at_the_expiry() -> None:
    _without("(expires_at IS NULL OR expires_at > :ts)")


def a_start_does_not_compare_arguments() -> None:
    _without("digest = :digest")


def workers_do_not_look_at_the_expiry() -> None:
    real = RunCore._start_approved

    def start(self: Any, call: Any) -> Any:
        ask = self.state.asks[call.number]
        known, ask.request = ask.request, structs.replace(ask.request, expires_at=None)
        yield from real(self, call)
        ask.request = known

    RunCore._start_approved = start  # type: ignore[method-assign]
    RunCore._has_lapsed = lambda self, number, now: False  # type: ignore[method-assign]  # nor when the store has refused it


def what_is_settled_is_decided_again() -> None:
    _without_trigger()
    approving._check_pending = lambda *_: None


def decisions_are_judged_before_their_transaction() -> None:
    _without_trigger()
    real = approvals.Approvals.decide

    def decide(self: Any, approval: str, judgement: Any, **told: Any) -> Any:
        before = self.approval(approval)
        approvals.judge = lambda standing, *rest: approving.judge(before.standing, *rest)  # type: ignore[attr-defined]
        return real(self, approval, judgement, **told)

    approvals.Approvals.decide = decide  # type: ignore[method-assign]


def a_park_ignores_the_inbox() -> None:
    weaken("unread_inbox_of_run", {"WHERE run = ?": "WHERE FALSE AND run = ?"})
    weaken("advance_and_park", {"WHERE i.run = ?4": "WHERE FALSE AND i.run = ?4"})
    weaken("append_many", {"WHERE i.run = r.id": "WHERE FALSE AND i.run = r.id"})


def _afterwards(work: list[Callable[[Any], None]]) -> None:
    """Do in a separate commit what belongs into the commit of the append."""
    for owner in (SqlStore, PostgresStore):  # each has its own

        def append(self: Any, batch: Sequence[Append], real: Any = owner.append) -> list[Appended]:
            answers: list[Appended] = real(self, batch)
            while work:
                self._database.write(work.pop(0), lambda *_: True)
            return answers

        owner.append = append  # type: ignore[method-assign]


def parents_are_told_afterwards() -> None:
    real = family.tell_parent
    later: list[Callable[[Any], None]] = []
    projections.family.tell_parent = lambda cursor, *told: later.append(lambda cursor: real(cursor, *told))  # type: ignore[attr-defined]
    _afterwards(later)


def charges_are_made_afterwards() -> None:
    real = limits.charge
    later: list[Callable[[Any], None]] = []

    def charge(cursor: Any, key: int, differences: Charge) -> None:
        later.append(lambda cursor: real(cursor, key, differences))

    limits.charge = charge
    _afterwards(later)


def every_signal_is_news() -> None:
    mailbox._is_news = lambda *_: True


WAITING_MUTATIONS: dict[str, Callable[[], None]] = {
    found.__name__: found
    for found in (
        any_answer_is_a_yes,
        a_start_does_not_look_at_the_expiry,
        a_start_does_not_compare_arguments,
        workers_do_not_look_at_the_expiry,
        what_is_settled_is_decided_again,
        decisions_are_judged_before_their_transaction,
        a_park_ignores_the_inbox,
        parents_are_told_afterwards,
        charges_are_made_afterwards,
        every_signal_is_news,
    )
}
