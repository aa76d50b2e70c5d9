"""Why a run is to be given up."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from perdure.core.events import Reason


class Closing(Struct, frozen=True):
    """Why the run is to be given up at the next step boundary."""

    status: Literal["queued", "paused", "needs_attention"]
    waiting_for: str
    attention: Reason | None = None
