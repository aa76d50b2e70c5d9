"""Several people decide at once, in any order and from any process.

The first decision counts, and the journal names it.
"""

from __future__ import annotations

import random
import threading
import uuid
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.conformance.suite_waiting import HOUR, NOW, Hand, approval, asking, expire, hold, starting, vote, withdraw

from perdure.core.approval import Withdraw
from perdure.core.events import ApprovalDecided, ApprovalExpired, ApprovalWithdrawn, Event, RunReleased
from perdure.errors import Conflict
from perdure.store.api import Committed, RowChange, Store
from perdure.store.open import open_store

RUNS, EACH = 100, 100  # 10,000 approvals, four deciders each
OUTCOMES = {"approve": "approved", "reject": "rejected", "expire": "expired", "withdraw": "withdrawn"}
DECIDE: dict[str, Callable[[Store, str], object]] = {
    "approve": lambda store, name: vote(store, name, "ann"),
    "reject": lambda store, name: vote(store, name, "bob", granted=False),
    "expire": lambda store, name: expire(store, name, NOW + HOUR),
    "withdraw": lambda store, name: withdraw(store, name),
}


def settlements(events: list[Event]) -> Counter[str]:
    """How many events settle each approval."""
    return Counter(event.body.approval for event in events if isinstance(event.body, ApprovalDecided | ApprovalExpired | ApprovalWithdrawn))


def release_run(store: Store, hand: Hand) -> None:
    """Journal all that has arrived and release the run."""
    letters = store.inbox("w")
    bodies = [letter.body for letter in letters if letter.body is not None]
    row = RowChange("waiting_approval", release=True)
    consumed = tuple(letter.inbox_id for letter in letters)
    assert hand.write(*bodies, RunReleased("waiting_approval", "people"), row=row, consumed=consumed) == Committed()


@pytest.mark.full
@pytest.mark.parametrize("seed", range(4))
def test_of_all_who_decide_in_any_order_one_wins_and_the_journal_has_one_settlement(seed: int) -> None:
    chance = random.Random(seed)
    store = open_store("sqlite://")
    for n in range(RUNS // 4):
        names = [f"{n}-{m}" for m in range(EACH)]
        hand: Hand | None = hold(store, f"r{n}")
        for call, name in enumerate(names, 1):
            # No tool is named: a granted approval cannot expire or be withdrawn, so the first decision is final.
            assert hand is not None
            hand.write(asking(name, tool=None, expires_at=NOW + HOUR), call=call)
        steps = [(name, way) for name in names for way in DECIDE]
        chance.shuffle(steps)
        won: dict[str, str] = {}
        for name, way in steps:
            if chance.random() < 0.05:  # the run changes its worker meanwhile
                if hand is None:
                    hand = hold(store, f"r{n}")
                else:
                    release_run(store, hand)
                    hand = None
            try:
                DECIDE[way](store, name)
            except Conflict:
                assert name in won, "nobody had decided before"
                continue
            assert name not in won, f"{way} after {won[name]}"
            won[name] = way
        if hand is not None:
            release_run(store, hand)
        assert settlements(store.read(f"r{n}")) == Counter(names)
        assert {name: approval(store, name).standing.status for name in names} == {name: OUTCOMES[way] for name, way in won.items()}
    store.close()


@pytest.mark.parametrize("held", [False, True])
def test_two_who_decide_at_the_same_instant_through_connections_of_their_own(tmp_path: Path, held: bool) -> None:
    url = f"sqlite:///{tmp_path}/journal.db"
    stores = [open_store(url), open_store(url)]
    hand = hold(stores[0], "r")
    for n in range(60):
        hand.write(asking(f"ap{n}"), call=n + 1)
    if not held:
        hand.rest("waiting_approval")
    start = threading.Barrier(2)
    won: list[tuple[int, str]] = []

    def decider(store: Store, granted: bool) -> None:
        for n in range(60):
            start.wait()
            try:
                vote(store, f"ap{n}", "ann" if granted else "bob", granted=granted)
            except Conflict:
                continue
            won.append((n, "approved" if granted else "rejected"))

    threads = [threading.Thread(target=decider, args=(store, store is stores[0])) for store in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(n for n, _ in won) == list(range(60))
    assert all(approval(stores[0], f"ap{n}").standing.status == outcome for n, outcome in won)
    if held:
        release_run(stores[0], hand)
    assert set(settlements(stores[1].read("r")).values()) == {1}
    for store in stores:
        store.close()


def test_a_yes_is_used_or_withdrawn_but_not_both(tmp_path: Path) -> None:
    """The holder starts the call while the approval is withdrawn: the second of the two is refused."""
    url = f"sqlite:///{tmp_path}/journal.db"
    stores = [open_store(url), open_store(url)]
    hand = hold(stores[0], "r")
    for n in range(60):
        hand.write(asking(f"ap{n}"), call=n + 1)
        vote(stores[0], f"ap{n}", "ann")
    start = threading.Barrier(2)
    withdrawn: set[int] = set()

    def quitter() -> None:
        for n in range(60):
            start.wait()
            try:
                stores[1].decide(f"ap{n}", Withdraw(), event_id=uuid.uuid4().hex, now=NOW)
            except Conflict:
                continue
            withdrawn.add(n)

    thread = threading.Thread(target=quitter)
    thread.start()
    started: set[int] = set()
    for n in range(60):
        start.wait()
        if hand.write(starting(f"ap{n}"), call=n + 1) == Committed():
            started.add(n)
    thread.join()
    assert started | withdrawn == set(range(60))
    assert not started & withdrawn
    for store in stores:
        store.close()
