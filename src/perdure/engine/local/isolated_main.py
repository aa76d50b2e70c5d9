"""The program that runs one isolated tool. isolation.py starts it as a file.

The program uses only the standard library until it forks. The first process is the supervisor. The supervisor loads no
code of the user, so that nothing in a tool can stop it from killing all processes that the tool has started.

The lines to the worker are: B begun; H heartbeat; U usage (sent each time, so that the usage counts even if the
process is killed later); R result; F failure; E how the tool's process ended (the supervisor writes this line when no
process of the tool is left). A line contains its length: if a process dies while it writes, the line is truncated, and
a truncated number still looks like a number. The worker trusts no line, because the tool's own code can write into the
pipe too.
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
        return 0  # the worker has died, or has said stop, before anything began
    # If a process of the tool becomes an orphan, it becomes a child of the supervisor, even if it has left the tool's
    # session.
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    child = os.fork()
    if child == 0:
        _become_tool(request)
    os.close(request["artifacts"])  # so that the worker sees when the tool has ended
    supervise(child, worker, request["limit_s"])
    return 0


# -- the supervisor ---------------------------------------------------------------------------------------------------
def _prctl(option: int, value: int) -> None:
    import ctypes

    try:
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
    except (OSError, AttributeError):
        pass  # the system is not Linux: the process group and the end of stdin have to be enough


def supervise(child: int, worker: int, limit_s: float | None) -> None:
    """Wait until the tool or the worker has ended, or `limit_s` seconds are over.

    Then kill every process that the tool has started.
    """
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
        # If another process, forked by the worker, has a copy of the pipe's other end, stdin does not end when the
        # worker dies. But a change of the parent process always shows that the worker has died.
        if (0 in ready and not os.read(0, 1)) or os.getppid() != worker or time.monotonic() >= over_s:
            break
    # waitpid was not called for the child yet. So its pid, which is also the group's id, cannot belong to another
    # process.
    _kill(os.killpg, child)
    _kill(os.kill, child)  # the child may not have created its own group yet
    status = _reap_all(child)
    try:
        os.write(1, b"\n" + framed(b"E", b"%d" % os.waitstatus_to_exitcode(status)))
    except BrokenPipeError:
        pass  # the worker is dead


def _has_ended(child: int) -> bool:
    while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
        if ended.si_pid == child:
            return True
        os.waitpid(ended.si_pid, 0)  # an orphan that has become a child of the supervisor
    return False


def _reap_all(child: int) -> int:
    """Kill the tool and all orphans again and again, until they are gone, or for at most _END_S seconds.

    Returns the status of the tool's process.
    """
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
    """The pids of the supervisor's children.

    waitpid is not called before the pids are used, so a pid cannot belong to another process.
    """
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


# -- the tool's process -----------------------------------------------------------------------------------------------
def _become_tool(request: dict[str, Any]) -> None:
    """Run the tool and end the process. This function never returns and never raises."""
    code = 1
    try:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # if the supervisor dies first, the kernel kills this process
        os.setsid()
        answers = os.dup(1)
        os.dup2(2, 1)  # the output of the tool goes to stderr, not into the pipe
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        os.set_inheritable(request["artifacts"], False)
        sys.path[:] = request["path"]
        sys.argv[:] = [request["file"]]
        _run(request, answers)
        code = 0
    except BaseException:  # perdure itself cannot be loaded, or the worker does not read any more
        sys.excepthook(*sys.exc_info())
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except Exception:  # the tool has closed or broken the stream
                pass
        os._exit(code)


def _run(request: dict[str, Any], answers: int) -> None:
    import asyncio
    import logging
    import threading

    import msgspec

    from perdure.core.events import Failure
    from perdure.core.failures import describe
    from perdure.core.outcomes import Returned
    from perdure.tool.artifact import in_call
    from perdure.tool.call import recordable

    one_at_a_time = threading.Lock()

    def tell(letter: bytes, line: bytes = b"") -> None:
        # A long result is written in several pieces, and another thread of the tool may write at the same time.
        with one_at_a_time:
            _write(answers, framed(letter, line))

    try:
        tool = _load_tool(request)
        if log_format := os.environ.get("PERDURE_LOG_FORMAT"):  # after the module: it may configure logging itself
            from perdure.logs import log_to_stderr

            log_to_stderr(log_format, logging.INFO)
        call = _call(request, tell)
        in_call.set(call)  # before the arguments are decoded: artifacts in them have the rights of this call
        if call.on_enter is not None:
            call.on_enter(call)
        kwargs = tool.with_call(tool.arguments(request["args"].encode()), call)
    except BaseException as error:  # loading failed, so the tool itself has not begun
        found = describe(error, scrub=_scrub(request))
        message = f"the tool could not be loaded from {request['file']}: {found.message}"
        tell(b"F", msgspec.json.encode(Failure(kind="not_sent", type=found.type, message=message, traceback=found.traceback)))
        return
    tell(b"B")
    try:
        value = asyncio.run(tool.fn(**kwargs)) if tool.is_async else tool.fn(**kwargs)
    except BaseException as error:  # SystemExit and KeyboardInterrupt are also failures of the call
        tell(b"F", msgspec.json.encode(describe(error, scrub=call.scrub)))
        return
    answer = recordable(tool, value, call)
    if isinstance(answer, Returned):
        tell(b"R", answer.result)
    else:
        tell(b"F", msgspec.json.encode(answer.failure))


def _call(request: dict[str, Any], tell: Any) -> Any:
    from datetime import datetime

    import msgspec

    from perdure.core.events import TraceContext
    from perdure.core.redaction import Scrubber
    from perdure.core.trace_context import span_context
    from perdure.engine.local.isolated_vault import AskedVault
    from perdure.tool import Call

    on_enter: Any = None
    if request["traced"]:
        from perdure import otel

        on_enter = otel.enter
    headers = request["headers"]
    fields = request["call"]
    deadline = None if fields["deadline"] is None else datetime.fromisoformat(fields["deadline"])
    asked = AskedVault(request["artifacts"])
    call = Call(
        **{**fields, "deadline": deadline},
        on_heartbeat=lambda call: tell(b"H", call.progress_json or b""),
        on_spend=lambda usage: tell(b"U", msgspec.json.encode(usage)),
        vaults=lambda call: asked,
        span=span_context(TraceContext(headers["traceparent"], headers.get("tracestate", ""))) if headers else None,
        on_enter=on_enter,
    )
    # The worker has resolved the secrets. They come through the pipe: a command line, an environment or a file could be
    # read by others.
    if any(request["secrets"].values()):
        call.scrubber = Scrubber(**request["secrets"])
    return call


def _scrub(request: dict[str, Any]) -> Any:
    from perdure.core.redaction import Scrubber

    return Scrubber(**request["secrets"]).text


def _load_tool(request: dict[str, Any]) -> Tool[..., Any]:
    from perdure.tool import Tool

    found = getattr(_load_module(request["module"], request["file"]), request["function"])
    # After `charge = tool(plain)`, the name `plain` still stands for the plain function.
    return found if isinstance(found, Tool) else Tool(found)


def _load_module(name: str | None, file: str) -> ModuleType:
    """The module: imported by its name if this name belongs to the very same file, else loaded from the file.

    A script is not run as `__main__`.
    """
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
    sys.modules[spec.name] = module  # dataclasses and pydantic look up their own module while it loads
    spec.loader.exec_module(module)
    return module


# -- the pipe ---------------------------------------------------------------------------------------------------------
def framed(letter: bytes, text: bytes) -> bytes:
    """One line to the worker."""
    return b"%s%d:%s\n" % (letter, len(text), text)


def unframed(line: bytes) -> tuple[bytes, bytes] | None:
    """The letter and the text of a line. None: the line is truncated, because its process died while it wrote."""
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
