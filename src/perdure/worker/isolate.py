"""The worker's side of a tool that runs in its own process (`isolate=True`). The other side is isolated.py.

    worker ── stdin: one line, the request; then held open, and its end means: stop ──▶ supervisor ── fork ──▶ tool
           ◀───────────────────── stdout: lines, each with one letter in front ─────────────┴────────────────────┘

The tool's process is a session of its own. Its supervisor kills it and all that it has started when the tool has ended, when
stdin ends (we say stop, or this worker has died), and when the supervisor finds itself adopted by another process.
"""

from __future__ import annotations

import inspect
import json
import os
import signal
import subprocess
import sys
import threading
from typing import Any

import msgspec

from perdure.core.codec import decode
from perdure.core.events import Failure, Usage
from perdure.tool import Call, Tool
from perdure.worker import isolated


class Isolated:
    """One attempt in a process of its own. `run` blocks until nothing of it is left; `stop` may be called from any thread."""

    def __init__(self, tool: Tool[..., Any], args: bytes, call: Call) -> None:
        self._what = f"the process of tool {tool.name}"
        self._call = call
        self._request = json.dumps(
            {
                # What to load comes from the function itself; nothing that lies in a journal names code.
                "module": _module_name(tool),
                "file": os.path.abspath(inspect.unwrap(tool.fn).__globals__["__file__"]),
                "function": tool.fn.__name__,
                "path": [os.path.abspath(entry) for entry in sys.path],
                "args": args.decode("utf-8"),
                "call": {
                    **{name: getattr(call, name) for name in ("key", "run_id", "number", "attempt", "tenant", "actor")},
                    "deadline": None if call.deadline is None else call.deadline.isoformat(),
                },
            }
        )
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped = False

    def run(self) -> bytes | Failure:
        """Canonical JSON of the result, or why there is none."""
        with self._lock:
            if self._stopped:
                return self._failure("not_sent", "was stopped before it had begun")
            try:
                # A session of its own: a signal for the worker's whole group must not reach the one who cleans up after the worker.
                command = [sys.executable, "-P", isolated.__file__]
                self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
            except OSError as error:
                return self._failure("not_sent", f"could not be started: {error}")
        process = self._process
        try:
            assert process.stdin is not None
            process.stdin.write(self._request.encode("ascii") + b"\n")
            process.stdin.flush()
        except (OSError, ValueError):
            pass  # it is gone, or was stopped just now; what it has written says which
        try:
            return self._read(process)
        finally:
            self.stop()
            process.wait()

    def stop(self) -> None:
        """End the process and everything that it has started."""
        with self._lock:
            self._stopped = True
            if self._process is not None and self._process.stdin is not None and not self._process.stdin.closed:
                try:
                    self._process.stdin.close()
                except OSError:
                    pass  # the rest of a request that nobody reads any more

    def _read(self, process: subprocess.Popen[bytes]) -> bytes | Failure:
        assert process.stdout is not None
        begun, status = False, None
        answer: bytes | Failure | None = None
        with process.stdout as lines:
            for line in lines:
                match isolated.unframed(line):
                    case b"B", _:
                        begun = True
                    case b"H", progress:
                        self._call.progress = decode(progress)
                    case b"U", usage:
                        self._call.add_usage(msgspec.json.decode(usage, type=Usage))
                    case b"R", result:
                        answer = result
                    case b"F", failure:
                        answer = msgspec.json.decode(failure, type=Failure)
                    case b"E", code:
                        status = int(code)
                        break  # a process that the supervisor could not end may hold the pipe open for ever
        if answer is not None:
            return answer
        return self._failure("process_died" if begun else "not_sent", _how_it_ended(status))

    def _failure(self, kind: Any, how: str) -> Failure:
        return Failure(kind=kind, type="ProcessDied", message=f"{self._what} {how}")


def _module_name(tool: Tool[..., Any]) -> str | None:
    """The name under which the tool's process can import the module; None for a script, which only has a file."""
    name = tool.fn.__module__
    if name != "__main__":
        return name
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return None if spec is None else spec.name


def _how_it_ended(status: int | None) -> str:
    if status is None:
        return "ended together with its supervisor, without an answer"
    if status < 0:
        return f"was killed by {_signal_name(-status)} before it answered"
    return f"ended with exit code {status} before it answered"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
