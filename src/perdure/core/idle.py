"""What does an idle run wait for? Every unfinished run without an attempt under way gets exactly one answer (G6)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

from perdure.core.state import AskState, CallState, RunState


class Stay(Struct, frozen=True):
    """Keep holding the run: the run continues so soon that parking it would cost more than waiting."""


class Sleep(Struct, frozen=True):
    """Park the run: it continues at a known time, or when post arrives."""

    status: Literal["waiting", "waiting_approval"]
    waiting_for: str
    wake_at: int | None


class Ask(Struct, frozen=True):
    """A person has to say whether these calls happened. At `wake_at` the run wakes even without that answer."""

    calls: tuple[CallState, ...]
    wake_at: int | None

    @property
    def names(self) -> str:
        return ", ".join(f"call {call.number} ({call.tool})" for call in self.calls)


class Stuck(Struct, frozen=True):
    """The run waits for something that can never happen."""


def at_rest(
    state: RunState,
    *,
    next_timer: tuple[int, int] | None,
    waits: dict[int, int],
    topics: Sequence[str] = (),
    now: int,
    park_after_us: int,
) -> Stay | Sleep | Ask | Stuck:
    """What to do with an unfinished run without an attempt under way.

    `next_timer`: (due, number). `waits`: number of a call or approval → when the run considers it again. `topics`: the
    topics of the signals for which the agent waits.
    """
    first_wait = min(((at, number) for number, at in waits.items()), default=None)
    wake_at = min((first[0] for first in (next_timer, first_wait) if first is not None), default=None)
    if wake_at is not None and wake_at - now <= park_after_us:
        return Stay()
    doubts = tuple(call for call in state.open.values() if call.phase == "in_doubt" and call.number not in waits)
    if doubts:
        return Ask(doubts, wake_at)
    if state.pending:
        return Sleep("waiting_approval", _several("approval", [_asked(ask) for ask in state.pending.values()]), wake_at)
    outside = []
    if state.alive:
        outside.append(_several("child", [child.run_id for child in state.alive.values()], plural="children"))
    if topics:
        outside.append(_several("signal", [repr(topic) for topic in topics]))
    if outside:
        return Sleep("waiting", " or ".join(outside), wake_at)
    if wake_at is None:
        return Stuck()
    if next_timer is not None and next_timer[0] == wake_at:
        return Sleep("waiting", "timer", wake_at)
    assert first_wait is not None
    return Sleep("waiting", _going_on(state.calls[first_wait[1]]), wake_at)


def _going_on(call: CallState) -> str:
    words = {"in_doubt": "answer about", "proposed": "its turn under the rate limit:", "approved": "its turn under the rate limit:"}
    return f"{words.get(call.phase, 'retry of')} {call.tool} (call {call.number})"


def _asked(ask: AskState) -> str:
    of = f" by {', '.join(ask.request.by)}" if ask.request.by else ""
    return f"{ask.request.approval} ({ask.request.action}{of})"


def _several(what: str, names: Sequence[str], *, plural: str | None = None) -> str:
    if len(names) == 1:
        return f"{what} {names[0]}"
    return f"{len(names):,} {plural or what + 's'}: {', '.join(names[:3])}{', …' if len(names) > 3 else ''}"
