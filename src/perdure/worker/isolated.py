"""The program that runs one isolated tool. Started by isolate.py, as a file; only the standard library until it has forked.

The first process stays outside as the supervisor: it loads no code of the user, so that nothing a tool does can keep it from
killing all that the tool has started. Lines to the worker: B begun, H heartbeat, U used (each time something was, since what is spent
is spent, also by a process that is killed), R result, F failure, E how the tool's process ended (written by the supervisor, when nothing
that the tool has started is left). A line carries its length: a process that dies while it writes leaves the beginning of one, and
the beginning of a number is a number. The worker trusts none of it: the tool's code can write into the pipe as well as this can.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perdure.tool import Tool

_ORPHAN_CHECK_S = 1.0
_END_S = 2.0
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def main() -> int:
    worker = os.getppid()
    request = _read_request()
    if request is None:
        return 0  # the worker has gone, or has changed its mind, before anything began
    # Whatever the tool's processes leave behind becomes our child, also what has left its session.
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    child = os.fork()
    if child == 0:
        _become_tool(request)
    supervise(child, worker, request["limit_s"])
    return 0


# -- the supervisor -----------------------------------------------------------------------------------------------------------
def _prctl(option: int, value: int) -> None:
    import ctypes

    try:
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
    except (OSError, AttributeError):
        pass  # not Linux: there the process group, and the end of a pipe, have to do


def supervise(child: int, worker: int, limit_s: float | None) -> None:
    """Wait for the tool's end, for the worker's, or until its time is over, and leave nothing behind that the tool has started."""
    over_s = float("inf") if limit_s is None else time.monotonic() + limit_s
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    wake, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while not _has_ended(child):
        ready, _, _ = select.select([0, wake], [], [], max(min(_ORPHAN_CHECK_S, over_s - time.monotonic()), 0.0))
        if wake in ready:
            os.read(wake, 4096)
        # A copy of the pipe's other end in a forked sibling would hide the worker's death; a new parent cannot be hidden.
        if (0 in ready and not os.read(0, 1)) or os.getppid() != worker or time.monotonic() >= over_s:
            break
    # The child is not reaped yet, so that its number, which is the group's, cannot belong to somebody else.
    _kill(os.killpg, child)
    _kill(os.kill, child)  # it may not have come as far as its own group
    status = _reap_all(child)
    try:
        os.write(1, b"\n" + framed(b"E", b"%d" % os.waitstatus_to_exitcode(status)))
    except BrokenPipeError:
        pass  # the worker is dead


def _has_ended(child: int) -> bool:
    while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
        if ended.si_pid == child:
            return True
        os.waitpid(ended.si_pid, 0)  # an orphan that we have adopted
    return False


def _reap_all(child: int) -> int:
    """The tool's status, when it and everything that we have adopted from it are gone. A killed process ends soon, not at once."""
    status: int = signal.SIGKILL
    until = time.monotonic() + _END_S
    while time.monotonic() < until:
        try:
            ended, how = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            break
        if ended == child:
            status = how
        elif ended == 0:
            for orphan in _children():
                _kill(os.kill, orphan)
            time.sleep(0.002)
    return status


def _children() -> list[int]:
    """Our own children. None of them is reaped while we look, so that each number is still theirs."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as listed:
            return [int(word) for word in listed.read().split()]
    except OSError:
        return []


def _kill(kill: Callable[[int, int], None], number: int) -> None:
    try:
        kill(number, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass


# -- the tool's process -------------------------------------------------------------------------------------------------------
def _become_tool(request: dict[str, Any]) -> None:
    """Run the tool and end the process. Nothing of this stack may be left to raise into the supervisor's code."""
    code = 1
    try:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # should the supervisor die before us, nobody else would end us
        os.setsid()
        answers = os.dup(1)
        os.dup2(2, 1)  # what the tool prints is not an answer
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        sys.path[:] = request["path"]
        sys.argv[:] = [request["file"]]
        _run(request, answers)
        code = 0
    except BaseException:  # perdure itself cannot be loaded, or the worker does not listen any more
        sys.excepthook(*sys.exc_info())
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except Exception:  # a stream that the tool has closed or broken
                pass
        os._exit(code)


def _run(request: dict[str, Any], answers: int) -> None:
    import asyncio
    import threading

    import msgspec

    from perdure.core.attempts import Returned
    from perdure.core.events import Failure
    from perdure.core.failures import describe
    from perdure.tool.call import recordable

    one_at_a_time = threading.Lock()

    def tell(letter: bytes, line: bytes = b"") -> None:
        # A thread that the tool has left behind may still speak while the result, in several pieces, is on its way.
        with one_at_a_time:
            _write(answers, framed(letter, line))

    try:
        tool = _load_tool(request)
        kwargs = tool.with_call(tool.arguments(request["args"].encode()), _call(request, tell))
    except BaseException as error:  # loading it has failed, so that the tool itself has not begun
        found = describe(error)
        message = f"the tool could not be loaded from {request['file']}: {found.message}"
        tell(b"F", msgspec.json.encode(Failure(kind="not_sent", type=found.type, message=message, traceback=found.traceback)))
        return
    tell(b"B")
    try:
        value = asyncio.run(tool.fn(**kwargs)) if tool.is_async else tool.fn(**kwargs)
    except BaseException as error:  # SystemExit and KeyboardInterrupt are failures of the call like any other
        tell(b"F", msgspec.json.encode(describe(error)))
        return
    answer = recordable(tool, value)
    if isinstance(answer, Returned):
        tell(b"R", answer.result)
    else:
        tell(b"F", msgspec.json.encode(answer.failure))


def _call(request: dict[str, Any], tell: Any) -> Any:
    from datetime import datetime

    import msgspec

    from perdure.core.codec import encode
    from perdure.tool import Call

    fields = request["call"]
    deadline = None if fields["deadline"] is None else datetime.fromisoformat(fields["deadline"])
    return Call(
        **{**fields, "deadline": deadline},
        on_heartbeat=lambda progress: tell(b"H", encode(progress)),
        on_spend=lambda usage: tell(b"U", msgspec.json.encode(usage)),
    )


def _load_tool(request: dict[str, Any]) -> Tool[..., Any]:
    from perdure.tool import Tool

    found = getattr(_load_module(request["module"], request["file"]), request["function"])
    return found if isinstance(found, Tool) else Tool(found)  # `charge = tool(plain)` leaves the plain function under its name


def _load_module(name: str | None, file: str) -> ModuleType:
    """The module by its name if that leads to this very file, else the file itself. A script does not become `__main__` again."""
    import importlib
    import importlib.util

    if name is not None:
        try:
            spec = importlib.util.find_spec(name)
        except (ImportError, ValueError):
            spec = None
        if spec is not None and spec.origin is not None and os.path.exists(spec.origin) and os.path.samefile(spec.origin, file):
            return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(name or "__perdure_main__", file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pydantic look their own module up while it loads
    spec.loader.exec_module(module)
    return module


# -- the pipe -----------------------------------------------------------------------------------------------------------------
def framed(letter: bytes, text: bytes) -> bytes:
    """One line to the worker."""
    return b"%s%d:%s\n" % (letter, len(text), text)


def unframed(line: bytes) -> tuple[bytes, bytes] | None:
    """Letter and text of a line; None for one that its process did not live to finish."""
    size, colon, text = line[1:-1].partition(b":")
    whole = line.endswith(b"\n") and colon and size == b"%d" % len(text)
    return (line[:1], text) if whole else None


def _read_request() -> dict[str, Any] | None:
    received = bytearray()
    while not received.endswith(b"\n"):
        piece = os.read(0, 1 << 16)
        if not piece:
            return None
        received += piece
    request: dict[str, Any] = json.loads(received)
    return request


def _write(fd: int, line: bytes) -> None:
    view = memoryview(line)
    while view:
        view = view[os.write(fd, view) :]


if __name__ == "__main__":
    sys.exit(main())
