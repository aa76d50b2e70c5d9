"""What people, children and other runs do to the run.

During the faults, each of them acts once if the scenario says so. In the calm afterwards, they do whatever the run
needs.
"""

from __future__ import annotations

from typing import Any

from msgspec import structs
from tests.core.world import RUN, SECOND, World, receipt

from perdure.core import codec
from perdure.core.approval import Expire, Vote
from perdure.core.budget import NOTHING
from perdure.core.events import (
    BudgetRaised,
    CancelRequested,
    Failure,
    Limits,
    RunPaused,
    RunUnpaused,
    SignalReceived,
    ToolCallResolved,
)
from perdure.core.state import CallState

HOUR = 3600 * SECOND
_MORE = Limits(usd_micros=1_000_000, calls=100)
_VOTES = {
    "grant": Vote("bob", True),
    "reject": Vote("bob", False, note="no"),
    "edit": Vote("bob", True, edit={"what": "edited"}),
}


FORKS = ("fork", "fork to new code")
REOPENS = ("retry", "rewind", "rewind fresh", "rewind to new code", *FORKS)  # what may be done to a run that has ended too


def can(world: World, what: str) -> bool:
    """Whether that can be done now."""
    if what in FORKS:
        return not world.held
    if what in REOPENS:
        return not world.held and world.status != "succeeded"
    if world.finished:
        return False
    match what.partition(" ")[0]:
        case "signal":
            return True
        case "end":
            return not world.held
        case "cancel":
            return world.status != "cancelling"
        case "pause":
            return world.status not in ("paused", "cancelling", "needs_attention")
        case "unpause":
            return world.status in ("paused", "needs_attention") or (world.held and any("pause" in post.label for post in world.inbox))
        case "grant" | "reject" | "edit":
            return _undecided(world) is not None
        case "expire":
            return _expiring(world) is not None
        case "resolve" | "fail":
            return _doubt(world) is not None
        case "child":
            return "alive" in world.children.values()
        case "raise":
            return world.limits is not None
        case "other":
            return bool(world.beside)
        case _:
            return True  # the clock


def ways(world: World, what: str) -> list[str]:
    """All ways to do this: a run can be reopened at several events. A point that is refused is left out."""
    if what == "retry":
        return [f"reopen {world.journal.retried_at}"] if world.journal.retried_at is not None else []
    if what in FORKS:
        return [f"fork {point}{what.removeprefix('fork')}" for point in world.journal.fork_points]
    if what in REOPENS:
        return [f"reopen {point}{what.removeprefix('rewind')}" for point in world.journal.points]
    return [what]


def do(world: World, place: int, how: str | None = None, new_code: Any = None) -> None:
    """Do what the scenario says at this place, in this way. It is done only once."""
    what = world.env[place]
    world.env = (*world.env[:place], *world.env[place + 1 :])
    act(world, how or what, new_code)


def act(world: World, what: str, new_code: Any = None) -> None:
    word, _, more = what.partition(" ")
    match word:
        case "reopen":
            point, _, how = more.partition(" ")
            world.reopen(int(point), new_code if how == "to new code" else world.agent, fresh=how == "fresh")
        case "fork":
            point, _, how = more.partition(" ")
            world.fork(int(point), new_code if how == "to new code" else world.agent)
        case "end":
            world.end_by_force()
        case "signal":
            payload = codec.pack(codec.encode(more), 1000)[0]
            world.post(what, SignalReceived("go", payload, by="ann"))
        case "cancel":
            world.post(what, CancelRequested(by="ann"))
        case "pause":
            world.post(what, RunPaused(by="ann"))
        case "unpause":
            world.post(what, RunUnpaused(by="ann"))
        case "grant" | "reject" | "edit":
            number = _undecided(world)
            assert number is not None
            world.judge(number, _VOTES[word])
        case "expire":
            number = _expiring(world)
            assert number is not None
            world.judge(number, Expire(), HOUR)  # by a clock that is ahead
        case "resolve":
            call = _doubt(world)
            assert call is not None
            world.post(f"{what} {call.number}.{call.attempt}", _truth(world, call), call.number)
        case "fail":
            # Like `perdure resolve --fail`: the run goes on as if the call had failed. The call may still have
            # happened.
            call = _doubt(world)
            assert call is not None
            failure = Failure("fatal", "Resolved", "it does not matter")
            body = ToolCallResolved("failed", by="ann", attempt=call.attempt, failure=failure, usage=call.cost_if("failed"))
            world.post(f"{what} {call.number}.{call.attempt}", body, call.number)
        case "child":
            number = next(number for number, how in world.children.items() if how == "alive")
            world.end_child(number, "succeeded" if more == "ok" else "failed" if more == "fails" else "cancelled")
        case "raise":
            world.post(what, BudgetRaised(_MORE, by="ann"))
            if world.status == "needs_attention" and world.attention == "budget":
                world.post("go on", RunUnpaused(by="ann"))
        case "other":
            world.beside = NOTHING
        case "later":
            world.pass_until(world.real + round(float(more) * SECOND))
        case "clock":
            world.skew = HOUR if more == "forward" else -HOUR if more == "back" else 0
        case _:
            raise AssertionError(what)


def _undecided(world: World) -> int | None:
    """An approval that can be decided, by the clock too."""
    for number, standing in world.approvals.items():
        expires_at = standing.request.expires_at
        if standing.status == "pending" and (expires_at is None or expires_at > world.now):
            return number
    return None


def _expiring(world: World) -> int | None:
    """An approval with a time, of a call that has not begun."""
    for number, standing in world.approvals.items():
        if standing.status in ("pending", "approved") and standing.request.expires_at is not None and standing.request.tool is not None:
            return number
    return None


def _doubt(world: World) -> CallState | None:
    """A call about which a person can tell the truth: nothing of it is on its way any more."""
    for number, call in world.journal.state.open.items():
        asked = call.phase == "in_doubt" or (call.phase == "started" and call.effect in ("once", "keyed") and not world.held)
        if asked and not any(post.row.call == number for post in world.inbox):
            service = world.services.get(number)
            if service is None or not service.flights:
                return call
    return None


def _truth(world: World, call: CallState) -> ToolCallResolved:
    service = world.services.get(call.number)
    if service is not None and service.done:
        result = codec.pack(codec.encode(receipt(call.number)), 1000)[0]
        body = ToolCallResolved("happened", by="ann", attempt=call.attempt, result=result)
    else:
        body = ToolCallResolved("did_not_happen", by="ann", attempt=call.attempt)
    return structs.replace(body, usage=call.cost_if(body.outcome))


def next_need(world: World) -> str | None:
    """What a resting run finally waits for, if no time wakes it. None: people can do nothing."""
    state = world.journal.state
    if world.status == "paused":
        return "unpause"
    if world.attention == "budget":
        return "raise"
    if world.attention == "poison":
        return "unpause"
    if world.status == "needs_attention" and world.attention == "in_doubt":
        arrival = world.next_arrival()
        if _doubt(world) is not None:
            return "resolve"
        return None if arrival is None else f"later {(arrival - world.real) / SECOND + 1}"
    if _undecided(world) is not None:
        return "grant"
    if "alive" in world.children.values():
        return "child ok"
    if world.status in ("waiting", "cancelling") and state.waiting_for is not None and "signal" in state.waiting_for:
        return f"signal {RUN}"
    return None
