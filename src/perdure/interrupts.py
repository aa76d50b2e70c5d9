"""Did an OS signal raise this KeyboardInterrupt or SystemExit, or did the running code raise it itself?

The handler of a signal runs between two instructions of any code, and may raise an exception there. That exception is
a request to the process, and no error of the interrupted code. An exception that the code raises itself is an error of
the code. Only their tracebacks show the difference.
"""

from __future__ import annotations

import inspect
import opcode
from types import FrameType

_RAISE = opcode.opmap["RAISE_VARARGS"]


def is_interrupt(error: BaseException) -> bool:
    """Did a signal handler raise this exception? It may be Python's handler for Ctrl-C, asyncio's, or the user's."""
    trace = error.__traceback__
    if trace is None or not isinstance(error, KeyboardInterrupt | SystemExit):
        return False
    while not _is_handler(trace.tb_frame):
        if trace.tb_next is None:
            # Python's own handler is written in C and has no frame, so the last frame is the interrupted code. If
            # Python's handler raised the exception, the instruction at which this frame stopped is not a `raise`.
            return isinstance(error, KeyboardInterrupt) and trace.tb_frame.f_code.co_code[trace.tb_lasti] != _RAISE
        trace = trace.tb_next
    return True


def _is_handler(frame: FrameType) -> bool:
    """Was this frame called like a signal handler, with the interrupted frame as an argument?

    signal.getsignal() does not help here: many handlers install another handler when they are called.
    """
    code, struck = frame.f_code, frame.f_back
    if struck is None:
        return False
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & inspect.CO_VARARGS)]
    given = [frame.f_locals.get(name) for name in names]
    return any(one is struck or (type(one) is tuple and any(each is struck for each in one)) for one in given)
