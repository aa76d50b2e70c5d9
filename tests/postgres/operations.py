"""Every kind of commit that a store makes, each with a check that it has happened exactly once."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from typing import Any

from tests.conformance.suite import new_run
from tests.conformance.suite_waiting import NOW, SECOND, Hand, asking, child, found, hold, payload, vote
from tests.postgres.tools import rows, value

from perdure.core.events import Failure, RunCancelled, RunFailed, RunReleased, RunReopened, RunSucceeded, SignalReceived, ThoughtRecorded
from perdure.core.rate import Rate
from perdure.errors import Conflict
from perdure.settings import Queue
from perdure.store.api import Append, Committed, Reopen, RowChange, Served, Store

COMMIT, ONE, MANY = "^COMMIT$", "^WITH moved AS", "^WITH given AS"
CREATE, CLAIM, SIGNAL = "^WITH made AS", "^WITH served AS", "^WITH seen AS"  # each in one statement, where there is nothing to weigh
PREPARED = tuple[Callable[[], object], Callable[[], None]]
Operation = Callable[[Store, str, str], PREPARED]
OPERATIONS: dict[str, tuple[str, Operation]] = {}


def operation(marker: str) -> Callable[[Operation], Operation]:
    """Named for the commit that is lost. It prepares everything, and returns what to do and how to see that it has happened once."""

    def add(prepare: Operation) -> Operation:
        OPERATIONS[prepare.__name__] = (marker, prepare)
        return prepare

    return add


def types(store: Store, run_id: str) -> list[str]:
    return [event.type for event in store.read(run_id)]


def commits(store: Store, *appends: Append) -> Callable[[], None]:
    def do() -> None:
        assert store.append(appends) == [Committed()] * len(appends)

    return do


@operation(ONE)
def append_of_one_run(store: Store, name: str, url: str) -> PREPARED:
    hand = hold(store, name)
    do = commits(store, hand.sealed(ThoughtRecorded("a"), ThoughtRecorded("b")))

    def check() -> None:
        assert types(store, name) == ["run_created", "run_claimed", "thought_recorded", "thought_recorded"]

    return do, check


@operation(ONE)
def append_with_a_projection(store: Store, name: str, url: str) -> PREPARED:
    hand = hold(store, name)
    do = commits(store, hand.sealed(ThoughtRecorded("a"), row=RowChange("running", waiting_for="retry")))

    def check() -> None:
        assert (len(types(store, name)), found(store, name).waiting_for) == (3, "retry")

    return do, check


@operation(MANY)
def append_of_many_runs(store: Store, name: str, url: str) -> PREPARED:
    hands = [hold(store, f"{name}-{n}") for n in range(5)]
    do = commits(store, *(hand.sealed(ThoughtRecorded("a")) for hand in hands))

    def check() -> None:
        assert [len(types(store, f"{name}-{n}")) for n in range(5)] == [3] * 5

    return do, check


@operation(MANY)
def end_of_a_run(store: Store, name: str, url: str) -> PREPARED:
    hand = hold(store, name)
    do = commits(store, hand.sealed(RunSucceeded(payload("done")), row=RowChange("succeeded")))

    def check() -> None:
        row = found(store, name)
        assert (row.status, row.holder, types(store, name)[-1], row.seq) == ("succeeded", None, "run_succeeded", 3)

    return do, check


@operation(ONE)
def release(store: Store, name: str, url: str) -> PREPARED:
    hand = hold(store, name)
    do = commits(store, hand.sealed(RunReleased("waiting", "x"), row=RowChange("waiting", release=True)))

    def check() -> None:
        row = found(store, name)
        assert (row.status, row.holder, row.ready_at, row.seq) == ("waiting", None, None, 3)

    return do, check


@operation(MANY)
def release_of_many_runs(store: Store, name: str, url: str) -> PREPARED:
    hands = [hold(store, f"{name}-{n}") for n in range(3)]
    do = commits(store, *(hand.sealed(RunReleased("waiting", "x"), row=RowChange("waiting", release=True)) for hand in hands))

    def check() -> None:
        rows = [found(store, f"{name}-{n}") for n in range(3)]
        assert [(row.status, row.holder, row.ready_at, row.seq) for row in rows] == [("waiting", None, None, 3)] * 3

    return do, check


@operation(COMMIT)
def release_with_a_question(store: Store, name: str, url: str) -> PREPARED:
    hand = hold(store, name)
    row = RowChange("waiting_approval", release=True)
    do = commits(store, hand.sealed(asking(f"ap-{name}"), RunReleased("waiting_approval", "x"), call=1, row=row))

    def check() -> None:
        row = found(store, name)
        assert (row.status, row.holder, row.seq, types(store, name).count("approval_requested")) == ("waiting_approval", None, 4, 1)

    return do, check


@operation(COMMIT)
def question(store: Store, name: str, url: str) -> PREPARED:
    hand = hold(store, name)
    do = commits(store, hand.sealed(asking(f"ap-{name}"), call=1))

    def check() -> None:
        assert types(store, name).count("approval_requested") == 1
        assert value(url, "SELECT count(*) FROM perdure_approvals WHERE approval = %s", f"ap-{name}") == 1
        assert value(url, "SELECT count(*) FROM perdure_notices AS n JOIN perdure_runs AS r ON r.id = n.run WHERE r.run_id = %s", name) == 1

    return do, check


@operation(COMMIT)
def start_of_a_child(store: Store, name: str, url: str) -> PREPARED:
    hand = hold(store, name)
    do = commits(store, hand.sealed(child(f"{name}/1")))

    def check() -> None:
        assert types(store, name).count("child_started") == 1
        assert types(store, f"{name}/1") == ["run_created"]

    return do, check


@operation(COMMIT)
def transaction(store: Store, name: str, url: str) -> PREPARED:
    hand = hold(store, name)
    head = hand.sealed(ThoughtRecorded("intent"))

    def work(connection: Any) -> tuple[Append, None]:
        connection.execute("INSERT INTO notes (what) VALUES (?)", [name])
        after = Hand(store, hand.lease, head.events[-1].event.seq, head.events[-1].hash)
        return after.sealed(ThoughtRecorded("result")), None

    def do() -> None:
        answer, _ = store.transact(head, work)
        assert answer == Committed()

    def check() -> None:
        assert len(types(store, name)) == 4
        assert value(url, "SELECT count(*) FROM notes WHERE what = %s", name) == 1

    return do, check


@operation(COMMIT)
def creation(store: Store, name: str, url: str) -> PREPARED:
    new = new_run(name, agent=name)  # the first in its line

    def check() -> None:
        assert types(store, name) == ["run_created"]

    return lambda: store.create_run(new), check


@operation(CREATE)
def creation_at_once(store: Store, name: str, url: str) -> PREPARED:
    store.create_run(new_run(f"{name}-before"))  # makes their line
    new = new_run(name)
    created: list[bool] = []

    def check() -> None:
        assert types(store, name) == ["run_created"]
        assert created == [True], "whoever made it hears that it is new"

    return lambda: created.append(store.create_run(new)[1]), check


@operation(COMMIT)
def signal_to_a_resting_run(store: Store, name: str, url: str) -> PREPARED:
    hold(store, name).rest("waiting")
    return signal(store, name), lambda: check_signal(store, name, ["run_created", "run_claimed", "run_released", "signal_received"], 0)


@operation(SIGNAL)
def signal_at_once(store: Store, name: str, url: str) -> PREPARED:
    hold(store, name).rest("waiting")
    event_id, body = uuid.uuid4().hex, SignalReceived("t", payload(1), "ann")

    def check() -> None:
        check_signal(store, name, ["run_created", "run_claimed", "run_released", "signal_received"], 0)
        assert found(store, name).status == "queued"

    return lambda: store.post(name, None, body, event_id=event_id, now=NOW), check


@operation(SIGNAL)
def signal_at_once_with_a_key(store: Store, name: str, url: str) -> PREPARED:
    hold(store, name).rest("waiting")
    event_id, body = uuid.uuid4().hex, SignalReceived("t", payload(1), "ann", "once")

    def check() -> None:
        check_signal(store, name, ["run_created", "run_claimed", "run_released", "signal_received"], 0)
        assert value(url, "SELECT count(*) FROM perdure_signals AS s JOIN perdure_runs AS r ON r.id = s.run WHERE r.run_id = %s", name) == 1

    return lambda: store.post(name, None, body, event_id=event_id, now=NOW), check


@operation(COMMIT)
def signal_to_a_held_run(store: Store, name: str, url: str) -> PREPARED:
    hold(store, name)
    return signal(store, name), lambda: check_signal(store, name, ["run_created", "run_claimed"], 1)


def signal(store: Store, name: str, key: str | None = "once") -> Callable[[], object]:
    event_id, body = uuid.uuid4().hex, SignalReceived("t", payload(1), "ann", key)
    return lambda: store.post(name, None, body, event_id=event_id, now=NOW, expect=lambda row: None)


def check_signal(store: Store, name: str, journal: list[str], inbox: int) -> None:
    assert (types(store, name), len(store.unread(name))) == (journal, inbox)


@operation(COMMIT)
def decision(store: Store, name: str, url: str) -> PREPARED:
    hand = hold(store, name)
    hand.write(asking(f"ap-{name}", quorum=2), call=1)
    hand.rest("waiting_approval")

    def check() -> None:
        assert types(store, name).count("approval_voted") == 1
        asked = store.approval(f"ap-{name}")
        assert asked is not None
        assert asked.voters == ("ann",)

    return lambda: vote(store, f"ap-{name}", "ann"), check


@operation(COMMIT)
def reopening(store: Store, name: str, url: str) -> PREPARED:
    hold(store, name).write(RunFailed(Failure("error", "E", "x")), row=RowChange("failed"))
    plan = Reopen(name, found(store, name).seq, [(RunReopened("ann", 2), None, uuid.uuid4().hex)])

    def do() -> None:
        try:
            store.reopen([plan], now=NOW)
        except Conflict:  # the first try was not acknowledged, and has happened
            assert found(store, name).status == "queued"

    def check() -> None:
        assert types(store, name).count("run_reopened") == 1
        assert found(store, name).status == "queued"

    return do, check


@operation(COMMIT)
def claim(store: Store, name: str, url: str) -> PREPARED:
    return _claim(store, name, {"default": Queue(concurrency=10**6)})


@operation(CLAIM)
def claim_at_once(store: Store, name: str, url: str) -> PREPARED:
    return _claim(store, name, {})


def _claim(store: Store, name: str, limits: Mapping[str, Queue]) -> PREPARED:
    store.create_run(new_run(name, agent=name))
    store.register("w", "host:1", 1, NOW)
    taken: list[Any] = []

    def do() -> None:
        taken.extend(store.claim("w", [Served(name, "1")], 5, NOW + SECOND, limits=limits))

    def check() -> None:
        # Before: nothing was taken, and it is still there for the next claim. Otherwise this very claim has it, and knows its nonce.
        assert types(store, name) == ["run_created", "run_claimed"]
        (claimed,) = taken
        hand = Hand(store, claimed.lease, claimed.row.seq, claimed.row.head)
        assert hand.write(ThoughtRecorded("mine")) == Committed()

    return do, check


@operation(COMMIT)
def end_from_outside(store: Store, name: str, url: str) -> PREPARED:
    hold(store, name).rest("waiting")
    event_id = uuid.uuid4().hex

    def check() -> None:
        assert types(store, name)[-1] == "run_cancelled"
        assert (found(store, name).status, found(store, name).seq) == ("cancelled", 4)

    return lambda: store.end(name, RunCancelled("ann", None), event_id=event_id, now=NOW), check


@operation(COMMIT)
def place_in_a_line(store: Store, name: str, url: str) -> PREPARED:
    places: list[int] = []
    rate = Rate(1, per=1.0, key=name)
    store.admit(rate, NOW)

    def check() -> None:
        # If a place was taken and the answer was lost, the place must not be taken again: one place is between the
        # first and the next.
        assert store.admit(rate, NOW) == places[-1] + SECOND == NOW + 2 * SECOND

    return lambda: places.append(store.admit(rate, NOW)), check


@operation(COMMIT)
def taking_of_a_notice(store: Store, name: str, url: str) -> PREPARED:
    _tell_all(store)
    hold(store, name).write(asking(f"ap-{name}"), call=1)
    taken: list[Any] = []

    def check() -> None:
        assert [notice.row.run_id for notice in taken] == [name]
        assert store.take_notices(NOW + SECOND, 99, 600 * SECOND) == []

    return lambda: taken.extend(store.take_notices(NOW + SECOND, 99, 600 * SECOND)), check


@operation(COMMIT)
def end_of_a_notice(store: Store, name: str, url: str) -> PREPARED:
    _tell_all(store)
    hold(store, name).write(asking(f"ap-{name}"), call=1)
    (notice,) = store.take_notices(NOW + SECOND, 99, SECOND)

    def check() -> None:
        assert store.take_notices(NOW + 9 * SECOND, 99, SECOND) == []

    return lambda: store.notice_done(notice.notice_id), check


def _tell_all(store: Store) -> None:
    for notice in store.take_notices(NOW + 1000 * SECOND, 999, 1):
        store.notice_done(notice.notice_id)


@operation(COMMIT)
def registration(store: Store, name: str, url: str) -> PREPARED:
    def check() -> None:
        assert [worker.worker for worker in store.workers(NOW, SECOND)].count(f"w-{name}") == 1

    return lambda: store.register(f"w-{name}", "host:1", 1, NOW), check


@operation(COMMIT)
def sign_of_life(store: Store, name: str, url: str) -> PREPARED:
    store.register("w", "host:1", 1, NOW)
    rows(url, "UPDATE perdure_workers SET beat_at = 7 WHERE worker = 'w' RETURNING 1")

    def check() -> None:
        assert value(url, "SELECT beat_at FROM perdure_workers WHERE worker = 'w'") > 7

    return lambda: store.renew("w", NOW), check
