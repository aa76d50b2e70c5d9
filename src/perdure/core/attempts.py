"""The four ways in which an attempt at a call can end. They are plain data, and none of them is an exception."""

from __future__ import annotations

from msgspec import Struct

from perdure.core.events import Failure


class Returned(Struct, frozen=True, gc=False):
    """It happened. `result` is canonical JSON of what the tool returned."""

    result: bytes


class Unrecordable(Struct, frozen=True, gc=False):
    """It happened, but what it returned cannot be recorded. It must never be repeated for that reason (T2)."""

    failure: Failure


class Raised(Struct, frozen=True, gc=False):
    """It ended without a result. `failure.kind` says whether it may have happened."""

    failure: Failure


class Abandoned(Struct, frozen=True, gc=False):
    """It was told to stop and did not stop. It may have happened, and may still be running."""

    failure: Failure


Performed = Returned | Unrecordable | Raised | Abandoned
