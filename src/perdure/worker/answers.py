"""The four answers that there are about an attempt. None of them is an exception."""

from __future__ import annotations

import inspect
from typing import Any

from perdure.core.attempts import Abandoned as Abandoned
from perdure.core.attempts import Performed as Performed
from perdure.core.attempts import Raised as Raised
from perdure.core.attempts import Returned as Returned
from perdure.core.attempts import Unrecordable as Unrecordable
from perdure.core.events import Failure
from perdure.core.failures import describe
from perdure.errors import NotEncodable
from perdure.interrupts import is_interrupt
from perdure.tool import Tool


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
