"""Who raised a KeyboardInterrupt or a SystemExit: a person, through a signal, or the code that was running.

A signal strikes between any two lines, in whoever's code that is. What it raises there says nothing about that code, and belongs to
the process; what the code raises by itself is its own doing. They look alike but for their tracebacks.
"""

from __future__ import annotations

import functools
import opcode
import signal
from types import CodeType
from typing import Any

_RAISE = opcode.opmap["RAISE_VARARGS"]


def is_interrupt(error: BaseException) -> bool:
    """Whether the handler of a signal has raised it: Python's own for Ctrl-C, asyncio's, or one of the user's."""
    trace = error.__traceback__
    if trace is None or not isinstance(error, KeyboardInterrupt | SystemExit):
        return False
    handlers = {_code(signal.getsignal(number)) for number in signal.valid_signals()}
    while trace.tb_next is not None and trace.tb_frame.f_code not in handlers:
        trace = trace.tb_next
    code = trace.tb_frame.f_code
    # Python's own handler is not written in Python and leaves no frame: then the last line is one that raises nothing itself.
    return code in handlers or (isinstance(error, KeyboardInterrupt) and code.co_code[trace.tb_lasti] != _RAISE)


def _code(handler: Any) -> CodeType | None:
    if not callable(handler):
        return None  # ignored, or left to the system
    while isinstance(handler, functools.partial):
        handler = handler.func
    handler = getattr(handler, "__func__", handler)
    if not hasattr(handler, "__code__"):
        handler = type(handler).__call__
    return getattr(handler, "__code__", None)
