"""What a run that nothing is being done for is waiting for. Every run that is not finished has an answer (G6)."""

from __future__ import annotations

from msgspec import Struct

from perdure.core.state import CallState, RunState


class Stay(Struct, frozen=True):
    """It goes on so soon that giving it up is not worth it."""


class Sleep(Struct, frozen=True):
    """It goes on at a known time; until then nobody needs to hold it."""

    wake_at: int
    waiting_for: str
    timer: int | None  # the agent's own timer, if that is what comes first


class Ask(Struct, frozen=True):
    """A person has to say what became of a call; a timer may still bring the run on before that."""

    calls: tuple[CallState, ...]
    wake_at: int | None

    @property
    def names(self) -> str:
        return ", ".join(f"call {call.number} ({call.tool})" for call in self.calls)


class Stuck(Struct, frozen=True):
    """It waits for something that nothing can bring about."""


def at_rest(
    state: RunState, *, next_timer: tuple[int, int] | None, waits: dict[int, int], now: int, park_after_us: int
) -> Stay | Sleep | Ask | Stuck:
    """The answer for an unfinished run with no attempt under way. `next_timer` is (due, number); `waits` are calls and their times."""
    first_wait = min(((at, number) for number, at in waits.items()), default=None)
    wake_at = min((first[0] for first in (next_timer, first_wait) if first is not None), default=None)
    if wake_at is not None and wake_at - now <= park_after_us:
        return Stay()
    doubts = tuple(call for call in state.open.values() if call.phase == "in_doubt" and call.number not in waits)
    if doubts:
        return Ask(doubts, wake_at)
    if wake_at is None:
        return Stuck()
    if next_timer is not None and next_timer[0] == wake_at:
        return Sleep(wake_at, "timer", next_timer[1])
    assert first_wait is not None
    call = state.calls[first_wait[1]]
    return Sleep(wake_at, f"{'answer about' if call.phase == 'in_doubt' else 'retry of'} {call.tool} (call {call.number})", None)
