"""The four answers that there are about an attempt. None of them is an exception."""

from __future__ import annotations

from msgspec import Struct

from perdure.core.events import Failure


class Returned(Struct, frozen=True, gc=False):
    """It happened; canonical JSON of what it returned."""

    result: bytes


class Unrecordable(Struct, frozen=True, gc=False):
    """It happened, but what it returned cannot be recorded. It must never be repeated for that (T2)."""

    failure: Failure


class Raised(Struct, frozen=True, gc=False):
    """It has ended without a result; failure.kind says whether it may have happened."""

    failure: Failure


class Abandoned(Struct, frozen=True, gc=False):
    """It was told to stop and did not: it may have happened, and may still be running."""

    failure: Failure


Performed = Returned | Unrecordable | Raised | Abandoned
