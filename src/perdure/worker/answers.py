"""The four answers that there are about an attempt. None of them is an exception."""

from __future__ import annotations

import inspect
from typing import Any

from msgspec import Struct

from perdure.core.events import Failure
from perdure.core.failures import describe
from perdure.errors import NotEncodable
from perdure.interrupts import is_interrupt
from perdure.tool import Tool


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


def recordable(tool: Tool[..., Any], value: Any) -> Returned | Unrecordable:
    """The answer for a call that returned this value."""
    try:
        return Returned(tool.encode_result(value))
    except BaseException as error:  # it has happened, so that nothing that goes wrong now may look like a failed call
        if inspect.iscoroutine(value):
            value.close()
        if is_interrupt(error):
            raise
        kind = "NotEncodable" if isinstance(error, NotEncodable) else type(error).__name__
        return Unrecordable(Failure(kind="not_encodable", type=kind, message=describe(error).message))
