"""The children of a run: which it waits for, how they stand, and which of them is the news."""

from __future__ import annotations

from collections import Counter

from msgspec import Struct

from perdure.core.state import ChildState
from perdure.inspect.scene import Scene
from perdure.inspect.shortage import Shortage
from perdure.inspect.words import called, clip, failed, shown
from perdure.store.api import RunRow

CHILDREN_SHOWN = 8
# The first is what somebody must look at now.
_URGENCY = {"needs_attention": 0, "paused": 1, "waiting_approval": 2, "cancelling": 3, "queued": 4, "running": 5, "waiting": 6}

_STANDS = {"needs_attention": "needs attention", "waiting_approval": "waits for an approval", "waiting": "waits", "ended": "has ended"}


class Child(Struct, frozen=True):
    """A child that has not ended, or anything below one that stands still and needs a person."""

    run_id: str
    call: int | None  # of this run; None for a child of a child
    asked: str | None
    status: str
    about: str | None  # what it waits for, or what is wrong with it


class Children(Struct, frozen=True):
    """All children of a run in numbers, and those worth a line."""

    total: int
    by_status: dict[str, int]
    shown: list[Child]  # without those that stand still for a budget: they have one cause
    short: list[Shortage]

    @property
    def news(self) -> list[Child]:
        """Those that go on only when a person does something."""
        return [child for child in self.shown if _URGENCY.get(child.status, 9) <= 2]


def children(scene: Scene) -> Children | None:
    """How the run's children stand; None when it never had any."""
    state = scene.reading.state
    if not state.children:
        return None
    below = {row.run_id: row for row in scene.below}
    stopped = {run_id for short in scene.short_below for run_id in short.runs}
    counts: Counter[str] = Counter()
    alive = []
    for child in state.children.values():
        row = below.pop(child.run_id, None)
        if child.ended is not None:
            counts[child.ended.status] += 1
            continue
        # It is in no list of unfinished runs: it has ended, and that it has is on its way here.
        status = row.status if row is not None else "ended"
        counts[status] += 1
        if child.run_id in stopped:
            continue
        asked = called(f"{child.agent}@{child.version}", child.input, 60)
        alive.append(Child(child.run_id, child.number, asked, status, _about(row)))
    urgent = [row for row in below.values() if _URGENCY.get(row.status, 9) <= 2 and row.run_id not in stopped]
    deeper = [Child(row.run_id, None, None, row.status, _about(row)) for row in urgent]
    listed = sorted([*alive, *deeper], key=lambda child: (_URGENCY.get(child.status, 9), child.call or 0))
    return Children(len(state.children), dict(sorted(counts.items())), listed[:CHILDREN_SHOWN], scene.short_below)


def _about(row: RunRow | None) -> str | None:
    if row is None:
        return None
    about = row.error if row.status == "needs_attention" else row.waiting_for
    return clip(about, 200) if about else None


def in_short(child: Child) -> str:
    """The child in half a sentence."""
    about = f": {child.about}" if child.about else ""
    return f"child {child.run_id} {_STANDS.get(child.status, f'is {child.status}')}{about}"


def outcome(child: ChildState) -> str:
    """What a child that has ended has brought."""
    ended = child.ended
    assert ended is not None, child
    return f"succeeded with {shown(ended.output, 48)}" if ended.status == "succeeded" else f"{ended.status}: {failed(ended.failure, 100)}"
