"""Does this code still ask for the calls that the journal has? The agent runs, and the journal answers each call."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import Struct

from perdure.core.codec import Payload
from perdure.core.events import Event
from perdure.core.machine import Machine
from perdure.core.replay import replay
from perdure.core.state import RunState
from perdure.errors import Diverged, PerdureError

MakeMachine = Callable[[RunState], Machine]


class Same(Struct, frozen=True):
    """The code asks for the calls that the journal has, up to the end of the journal."""

    run_id: str
    status: str
    activations: int
    calls: int
    same: bool = True


class Different(Struct, frozen=True):
    """The first event at which the code and the journal differ."""

    run_id: str
    status: str
    seq: int | None
    call: int | None
    difference: str
    same: bool = False
    recorded: str | None = None  # what the journal has there, in words; None: nothing
    asked: str | None = None  # what the code asks for there, in words; None: nothing


def compare(run_id: str, events: Sequence[Event], state: RunState, make: MakeMachine, load: Callable[[Payload], bytes]) -> Same | Different:
    """Replay the whole journal on a new machine. The agent's code runs, and the journal answers every call."""
    machine: Machine | None = None
    try:
        machine = make(state)
        frontier = replay(machine, events, load)
    except Diverged as diverged:
        return Different(run_id, state.status, diverged.seq, diverged.call, str(diverged), recorded=diverged.recorded, asked=diverged.asked)
    except PerdureError as error:
        # The code rejects the input, never becomes idle, or does I/O itself. So the run was made with other code.
        return Different(run_id, state.status, None, None, f"{type(error).__name__}: {error}")
    finally:
        if machine is not None:
            machine.close()
    return Same(run_id, state.status, frontier.activations, len(state.calls))
