"""What the next worker does about a call without a result, in words. core/decide.py gives the verdict."""

from __future__ import annotations

from perdure.core.decide import GiveUp, Park, Perform, Reconcile, Wait, decide
from perdure.core.machine import CallTool
from perdure.core.replay import Frontier
from perdure.core.state import CallState, RunState
from perdure.inspect.text import iso


def open_call_words(call: CallState, frontier: Frontier, state: RunState, *, max_asks: int, now: int) -> str:
    """What happens next with this open call, in words.

    `frontier` is the end of a replay, and has the tool of the call.
    """
    name, asked = f"call {call.number} {call.tool}", frontier.calls.get(call.number)
    if call.held:
        return f"{name} is held: the agent considers whether it still wants it"
    if call.phase == "awaiting_approval":
        return f"{name} waits for approval {call.approval}"
    if call.phase == "approved":
        return f"{name} is made: it was approved"
    if not isinstance(asked, CallTool):
        return f"{name} is open"
    verdict = decide(
        call,
        has_reconcile=asked.tool.reconciler is not None,
        key_window_s=asked.tool.key_window_s,
        max_asks=max_asks,
        wanted=call.number not in frontier.abandoned,
        cancelling=state.cancel is not None,
        now=now,
    )
    match verdict:
        case Perform():
            if not call.begun:
                return f"{name} is made"
            return f"{name} is made again{', with the same key' if call.effect == 'keyed' else ''}"
        case Wait(until):
            return f"{name} goes on at {iso(until)}"
        case Reconcile():
            return f"{name} is asked about: its reconcile hook says whether it happened"
        case Park(why):
            return f"{name} stays in doubt, and a person has to say what became of it: {why}"
        case GiveUp():
            return f"{name} is given up: its agent no longer waits for it"
