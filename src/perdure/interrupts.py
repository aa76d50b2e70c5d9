"""Who raised a KeyboardInterrupt or a SystemExit: a person, through a signal, or the code that was running.

A signal strikes between any two lines, in whoever's code that is. What it raises there says nothing about that code, and belongs to
the process; what the code raises by itself is its own doing. They look alike but for their tracebacks.
"""

from __future__ import annotations

import inspect
import opcode
from types import FrameType

_RAISE = opcode.opmap["RAISE_VARARGS"]


def is_interrupt(error: BaseException) -> bool:
    """Whether the handler of a signal has raised it: Python's own for Ctrl-C, asyncio's, or one of the user's."""
    trace = error.__traceback__
    if trace is None or not isinstance(error, KeyboardInterrupt | SystemExit):
        return False
    while not _is_handler(trace.tb_frame):
        if trace.tb_next is None:
            # Python's own handler is not written in Python and leaves no frame: then the last line is one that raises nothing itself.
            return isinstance(error, KeyboardInterrupt) and trace.tb_frame.f_code.co_code[trace.tb_lasti] != _RAISE
        trace = trace.tb_next
    return True


def _is_handler(frame: FrameType) -> bool:
    """Whether it was called as handlers are, with the frame that it has interrupted. Who is a handler now does not tell: many reset it."""
    code, struck = frame.f_code, frame.f_back
    if struck is None:
        return False
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & inspect.CO_VARARGS)]
    given = [frame.f_locals.get(name) for name in names]
    return any(one is struck or (type(one) is tuple and any(each is struck for each in one)) for one in given)
