"""kill -9 at every boundary of a call with an approval.

Requested, notified, parked, decided, started, expired, withdrawn.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from tests.crash import people, victims
from tests.crash.checks import check_attention, check_intent_first
from tests.crash.errands import OUTPUT
from tests.crash.waiting_checks import check_approvals, check_effects_of, check_not_begun, check_waits
from tests.crash.waiting_scenarios import APPROVAL, LATER, check_a_decision_is_heard_while_parking, say
from tests.crash.world import KILLED, RUN, World
from tests.crash.worlds import Worlds

from perdure.webhooks import ID_HEADER

COMMIT = ("before", "half", "handed", "kept", "after")
DURABLE = ("handed", "kept", "after")
Decided = Callable[[str], World]


def check_done(world: World, kind: str, told: dict[str, object]) -> None:
    assert told["output"] == OUTPUT, f"{told}\n{world.log()}"
    assert check_approvals(world) == {APPROVAL: "consumed"}
    check_effects_of(world, kind)


# -- asking -------------------------------------------------------------------------------------------------------------------
ASKING = [("claim", "after"), *(("request", moment) for moment in COMMIT)]


@pytest.mark.parametrize(("place", "moment"), ASKING)
@pytest.mark.parametrize("granted", [True, False])
def test_killed_while_it_asks_the_run_waits_for_one_answer_and_takes_it(world: World, place: str, moment: str, granted: bool) -> None:
    world.rest("petition", "once", die=[place, moment, 1, "asked_once"])
    if place == "request" and moment in DURABLE:
        check_waits(world)  # the question and the rest are one commit: no process is needed for it to wait
    told = world.rest("petition", "once")
    assert told["status"] == "waiting_approval", f"{told}\n{world.log()}"
    assert APPROVAL in str(told["waiting_for"])
    check_not_begun(world)
    assert say(world, granted) == "counted"
    told = world.rest("petition", "once")
    if granted:
        check_done(world, "once", told)
    else:
        assert told["output"] == {**OUTPUT, "receipt": "not approved: rejected"}, told
        assert check_approvals(world) == {APPROVAL: "rejected"}
        check_not_begun(world)


class Receiver:
    """Where webhooks go: the ids that have reached it."""

    def __init__(self) -> None:
        self.ids: list[str] = []
        ids = self.ids

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                ids.append(self.headers[ID_HEADER])
                self.send_response(204)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Nothing to say."""

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.settings = {"webhook_url": f"http://127.0.0.1:{self._server.server_port}/hook", "webhook_secret": "shared" * 6}
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    opened = Receiver()
    yield opened
    opened.close()


@pytest.mark.parametrize(
    ("place", "moment", "sent"),
    [
        ("request", "half", [0, 1]),
        ("request", "kept", [0, 1]),
        ("taken", "before", [0, 1]),
        ("sent", "before", [1, 2]),
        ("told", "before", [1, 2]),
        ("told", "half", [1, 2]),
        ("told", "kept", [1, 1]),
        ("told", "after", [1, 1]),
    ],
)
def test_killed_around_the_notification_somebody_hears_of_it_and_copies_have_one_id(
    world: World, receiver: Receiver, place: str, moment: str, sent: list[int]
) -> None:
    """T25: a notice is sent at least once for every request, and for nothing else."""
    world.rest("petition", "once", die=[place, moment, 1, "asked_once"], settings=receiver.settings)
    assert len(receiver.ids) == sent[0]
    # Notices that the dead process had taken stay taken until the hold is over: the next process comes a minute later.
    world.rest("petition", "once", settings=receiver.settings, clock=[60.0])
    asked = [event.event_id for event in world.look()[1] if event.type == "approval_requested"]
    assert receiver.ids == asked * sent[1], (receiver.ids, asked)
    world.rest("petition", "once", settings=receiver.settings, clock=[120.0])
    assert len(receiver.ids) == sent[1], "told again although it was done"
    assert say(world) == "counted"
    check_done(world, "once", world.rest("petition", "once", clock=[120.0]))


# -- deciding -----------------------------------------------------------------------------------------------------------------
class Petitions:
    """Worlds in which an approval is pending, or is decided and no worker drives the run.

    They are made once for each store and kind, and copied.
    """

    def __init__(self) -> None:
        self._sources: dict[str, Worlds] = {}
        self._made: dict[tuple[str, str, bool], World] = {}

    def copy(self, worlds: Worlds, kind: str, *, decided: bool, folders: pytest.TempPathFactory) -> World:
        name = (worlds.dialect, kind, decided)
        if name not in self._made:
            if worlds.dialect not in self._sources:
                self._sources[worlds.dialect] = worlds.elsewhere(folders.mktemp(worlds.dialect))
            self._made[name] = self._make(self._sources[worlds.dialect].new(), kind, decided)
        return worlds.copy(self._made[name])

    def _make(self, world: World, kind: str, decided: bool) -> World:
        assert world.rest("petition", kind)["status"] == "waiting_approval"
        if decided:
            assert say(world) == "counted"
        return world


@pytest.fixture(scope="session")
def petitions() -> Petitions:
    return Petitions()


@pytest.fixture
def asked(worlds: Worlds, petitions: Petitions, tmp_path_factory: pytest.TempPathFactory) -> Decided:
    return lambda kind: petitions.copy(worlds, kind, decided=False, folders=tmp_path_factory)


@pytest.fixture
def decided(worlds: Worlds, petitions: Petitions, tmp_path_factory: pytest.TempPathFactory) -> Decided:
    return lambda kind: petitions.copy(worlds, kind, decided=True, folders=tmp_path_factory)


@pytest.mark.parametrize("moment", COMMIT)
def test_a_decider_who_is_killed_has_decided_or_has_not_and_asks_again_to_find_out(asked: Decided, moment: str) -> None:
    world = asked("once")
    assert world.run(people.decide, report=world.report(), approval=APPROVAL, granted=False, die=["decide", moment, 1]) == KILLED
    again = say(world)
    assert again == ("Conflict" if moment in DURABLE else "counted")
    told = world.rest("petition", "once")
    if again == "counted":
        check_done(world, "once", told)
    else:
        assert told["output"] == {**OUTPUT, "receipt": "not approved: rejected"}, told
        assert check_approvals(world) == {APPROVAL: "rejected"}
        check_not_begun(world)


# -- starting -----------------------------------------------------------------------------------------------------------------
STARTING = [
    *(("claim", moment) for moment in ("before", "half", "kept", "after")),
    *(("intent", moment) for moment in COMMIT),
    ("start", "before"),
    ("effect", "before"),
    ("effect", "after"),
    ("arrive", "before"),
    *(("result", moment) for moment in ("before", "half", "kept", "after")),
    *(("end", moment) for moment in ("before", "kept")),
]
KINDS = ("read", "idempotent", "keyed", "once", "once_reconcile", "transaction")
NOT_FOR = {"transaction": {"start", "arrive", "result"}}
FAR, INSIDE = ("claim", "end"), ("half", "handed")  # where the kind of the call makes no difference, two of them take turns


def kinds_for(number: int, place: str, moment: str) -> list[str]:
    """Whose calls die at this boundary."""
    return [KINDS[(number + step) % len(KINDS)] for step in (0, 3)] if place in FAR or moment in INSIDE else list(KINDS)


CASES = [
    (kind, *boundary)
    for number, boundary in enumerate(STARTING)
    for kind in kinds_for(number, *boundary)
    if boundary[0] not in NOT_FOR.get(kind, set())
]


def leaves_doubt(place: str, moment: str) -> bool:
    match place:
        case "intent":
            return moment in DURABLE
        case "start" | "effect" | "arrive":
            return True
        case "result":
            return moment not in DURABLE
        case _:
            return False


@pytest.mark.parametrize(("kind", "place", "moment"), CASES)
def test_killed_between_the_decision_and_the_end_the_approved_call_is_made_as_its_class_says(
    decided: Decided, kind: str, place: str, moment: str
) -> None:
    world = decided(kind)
    world.rest("petition", kind, die=[place, moment, 1, f"asked_{kind}"])
    # Also a read: its approval is used up, durably, before anything is done with it.
    check_intent_first(world, "once" if kind == "read" else kind)
    check_approvals(world if world.dialect == "postgres" else world.copy())  # where looking repairs nothing
    told = world.rest("petition", kind)
    if kind == "once" and leaves_doubt(place, moment):
        happened = (place, moment) == ("effect", "after") or place in ("arrive", "result")
        check_attention(world, told, effects=int(happened))
        assert check_approvals(world) == {APPROVAL: "consumed"}
    else:
        check_done(world, kind, told)


@pytest.mark.parametrize(("kind", "first"), [("keyed", "after"), ("once_reconcile", "after"), ("transaction", "before")])
@pytest.mark.parametrize(("place", "moment"), [("claim", "kept"), ("append", "before"), ("append", "half"), ("append", "kept")])
def test_killed_again_while_another_process_resumes_the_approved_call(
    decided: Decided, kind: str, first: str, place: str, moment: str
) -> None:
    world = decided(kind)
    tool = f"asked_{kind}"
    world.rest("petition", kind, die=["effect", first, 1, tool])
    # A transaction has only one commit in which it can die, and this commit counts as a separate append.
    world.rest("petition", kind, die=[place, moment, 1, tool])
    check_done(world, kind, world.rest("petition", kind))


@pytest.mark.parametrize("kind", ["keyed", "once"])
def test_killed_from_outside_while_the_approved_call_is_under_way(decided: Decided, kind: str) -> None:
    world = decided(kind)
    args = {"report": world.report(), "agent": "petition", "args": [kind], "run_id": RUN}
    pid = world.start(victims.rest, die=["flight", "never", 1], **args)
    world.ledger.wait_for(lambda lines: any(line["fact"] == "begun" for line in lines))
    os.kill(pid, signal.SIGKILL)
    assert world.wait(pid) == KILLED
    told = world.rest("petition", kind)
    if kind == "once":
        check_attention(world, told, effects=0)
    else:
        check_done(world, kind, told)


# -- expiring and withdrawing -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("moment", COMMIT)
@pytest.mark.parametrize("granted", [False, True])
def test_killed_while_it_notices_that_the_time_is_over_nothing_starts_and_it_expires_once(world: World, moment: str, granted: bool) -> None:
    """The approval is pending, or granted and not started in time.

    A worker settles it and dies, and another one continues.
    """
    world.rest("petition", "brief", die=["request", "after", 1])
    if granted:
        assert say(world) == "counted"
    world.rest("petition", "brief", die=["decide", moment, 1], clock=LATER)
    assert world.rest("petition", "brief", clock=LATER)["output"] == {**OUTPUT, "receipt": "not approved: expired"}, world.log()
    assert check_approvals(world) == {APPROVAL: "expired"}
    check_not_begun(world)


def test_a_yes_after_the_expiry_that_nobody_has_noticed_yet_comes_too_late(world: World) -> None:
    world.rest("petition", "brief", die=["request", "after", 1])
    assert say(world, clock=LATER) == "Conflict"
    assert world.rest("petition", "brief", clock=LATER)["output"] == {**OUTPUT, "receipt": "not approved: expired"}
    check_not_begun(world)


@pytest.mark.parametrize("moment", COMMIT)
def test_killed_while_it_withdraws_what_a_cancelled_run_has_asked_for(asked: Decided, moment: str) -> None:
    world = asked("once")
    assert world.run(victims.cancel, run_id=RUN) == 0
    world.rest("petition", "once", die=["decide", moment, 1])
    told = world.rest("petition", "once")
    assert told["status"] == "cancelled", f"{told}\n{world.log()}"
    assert check_approvals(world) == {APPROVAL: "withdrawn"}
    check_not_begun(world)
    assert say(world) == "RunEnded"


@pytest.mark.parametrize("moment", ["before", "half", "kept"])
def test_a_yes_to_a_run_that_is_being_cancelled_starts_nothing(decided: Decided, moment: str) -> None:
    """Approved, then cancelled, and the worker that withdraws it dies: the yes is not used by the next one."""
    world = decided("once")
    assert world.run(victims.cancel, run_id=RUN) == 0
    world.rest("petition", "once", die=["decide", moment, 1])
    told = world.rest("petition", "once")
    assert told["status"] == "cancelled", f"{told}\n{world.log()}"
    assert check_approvals(world) == {APPROVAL: "withdrawn"}
    check_not_begun(world)


# -- the lost wake-up ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("killed", [False, True])
def test_a_decision_that_meets_the_park_is_heard(world: World, killed: bool) -> None:
    check_a_decision_is_heard_while_parking(world, killed=killed)


def test_decisions_and_parks_that_race_for_many_rounds_lose_no_wake_up(world: World, tmp_path: Path) -> None:
    """Workers are killed and replaced meanwhile; each decision is made as soon as there is a request."""
    runs = {f"v{n}": [6, 0.001 * n] for n in range(10)}
    assert world.run(victims.start, runs=runs, agent="vigil") == 0
    over = tmp_path / "over"
    deciders = [world.start(people.hasty_decider, by=by, until=str(over)) for by in ("ann", "bob")]
    worker = world.start(victims.serve, until=list(runs))
    for effects in (8, 16, 24, 32, 40):
        world.ledger.wait_for(lambda lines, effects=effects: sum(line["fact"] == "effect" for line in lines) >= effects)  # type: ignore[misc]
        os.kill(worker, signal.SIGKILL)
        world.wait(worker)
        worker = world.start(victims.serve, until=list(runs))
    assert world.wait(worker) == 0, world.log()
    over.touch()
    assert [world.wait(decider) for decider in deciders] == [0, 0], world.log()
    for run_id in runs:
        row, _ = world.peek(run_id)
        assert row is not None
        assert row.status == "succeeded", f"{row}\n{world.log()}"
        assert list(check_approvals(world, run_id).values()) == ["approved"] * 6
        assert len(world.ledger.effects(run=run_id)) == 6
