"""What to type next, complete with ids, and what each command would do."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from perdure.core.taken_back import taken_back
from perdure.inspect.asks import Asked
from perdure.inspect.children import Child
from perdure.inspect.doubts import Doubt
from perdure.inspect.orders import Orders, Step
from perdure.inspect.scene import Scene
from perdure.inspect.shortage import Shortage
from perdure.inspect.waits import topics
from perdure.store.api import FINISHED

SHOWN_EACH = 3  # approvals, children or topics with commands of their own; the rest is one command away


class Open(Struct, frozen=True):
    """What is open about a run, as far as commands are concerned."""

    doubts: Sequence[Doubt]  # calls to settle
    asked: Sequence[Asked]
    news: Sequence[Child]  # children that go on only when a person does something
    short: Sequence[Shortage] = ()  # budgets that children stand still for


def advise(scene: Scene, what: Open, *, options: str = "", code: str | None = None) -> list[Step]:
    """The commands that make sense for the run as it is, the most likely one first.

    `options` goes into every command, such as ` --url …`. `code` is what `resume` must be told about where the agent's code is;
    "" when it finds it by itself.
    """
    row, state = scene.reading.row, scene.reading.state
    orders = Orders(row, options, code, cancelled=state.cancel is not None)
    if row.status in FINISHED:
        return orders.after_the_end(state, scene.undoing, taken_back(state, scene.load))
    stop = _stop(scene, orders)
    add = [orders.top_up_below(short) for short in what.short if scene.short is None or scene.short.budget_of != short.budget_of]
    people = [*_decide(what.asked, orders), *add, *_look_below(what.news, orders)]
    settle = [step for doubt in what.doubts for step in orders.settle(doubt.call, doubt.too_early)]
    settling = [doubt.settles_itself for doubt in what.doubts]  # by the next worker, without a person
    go_on = _go_on(scene, orders, then=bool(people), settling=any(settling))
    if row.status == "needs_attention":
        if settling and all(settling):
            return [*go_on, *settle, *people, *stop]
        if settle:
            return [*settle, *orders.go_on(served=scene.served, then=True), *people, *stop]
        return [*_attend(scene, orders), *people, *stop]
    if row.status == "paused":
        return [orders.unpause("let it go on where it stands"), *people, *stop]
    if scene.held:
        stay = [] if state.paused is None else [orders.unpause("let it go on after all, without standing still")]
        return [*people, *stay, orders.follow(), *settle, *stop]
    if row.status in ("waiting", "waiting_approval") and (row.ready_at is None or row.ready_at > scene.now):
        return [*people, *_signals(scene, orders), *([] if people else [orders.nothing()]), *([] if scene.served else go_on), *stop]
    return [*go_on, *people, *settle, *stop]


def _stop(scene: Scene, orders: Orders) -> list[Step]:
    # Asking twice changes nothing; what is left then is to end it without its agent.
    if scene.reading.state.cancel is None:
        return [orders.cancel()]
    return [] if scene.held else [orders.force()]


def _go_on(scene: Scene, orders: Orders, *, then: bool, settling: bool) -> list[Step]:
    if scene.missing is not None and not scene.version_served:
        return orders.another_version(scene.reading.row.version)
    return orders.go_on(served=scene.served, then=then, settling=settling)


def _attend(scene: Scene, orders: Orders) -> list[Step]:
    if scene.short is not None:
        return [*orders.top_up(scene.short), orders.budgets()]
    return orders.attend(scene.reading.state)


def _decide(asked: Sequence[Asked], orders: Orders) -> list[Step]:
    pending = [one for one in asked if one.status == "pending" and not one.expired]
    steps = [step for one in pending[:SHOWN_EACH] for step in orders.decide(one)]
    return steps if len(pending) <= SHOWN_EACH else [*steps, orders.approvals(len(pending))]


def _look_below(news: Sequence[Child], orders: Orders) -> list[Step]:
    return [orders.why(child) for child in news[:SHOWN_EACH]]


def _signals(scene: Scene, orders: Orders) -> list[Step]:
    return [orders.signal(topic) for topic in topics(scene)[:SHOWN_EACH]]
