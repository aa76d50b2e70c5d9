"""The worker's side of a tool that runs in its own process (`isolate=True`). The other side is isolated_main.py.

    worker ── stdin: one line, the request; then held open, and its end means: stop ──▶ supervisor ── fork ──▶ tool
           ◀───────────────────── stdout: lines, each with one letter in front ─────────────┴────────────────────┘
           ◀───────────────────── a socket for artifacts (isolated_vault.py) ────────────────────────────────────▶

The tool's process has a session of its own. The supervisor kills this process, and every process that it has started,
in four cases: the tool has ended; stdin ends, because the worker says stop or has died; the supervisor has got another
parent process; the time limit is over.

The supervisor is started by exec, not as a copy of the worker, and gets only the variables that `environment` returns:
a secret that is left out is nowhere in the supervisor's memory. The output is not trusted, because the tool's own code
can write into the same pipe.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Collection, Mapping
from typing import Any

import msgspec
from msgspec import structs

from perdure.core import codec
from perdure.core.events import Failure, Usage
from perdure.core.failures import MAX_MESSAGE_CHARS, clean, describe, received
from perdure.core.outcomes import Raised, Returned, Unrecordable
from perdure.core.redaction import Scrubber
from perdure.engine.local import isolated_main
from perdure.engine.local.isolated_vault import Service
from perdure.errors import NotEncodable
from perdure.store.url import without_password
from perdure.tool import Call, Tool
from perdure.tool.redact import BY_WORKER, KEY_FILE_VARIABLE, KEY_VARIABLE
from perdure.tool.spend import checked

MAX_LINE_BYTES = codec.MAX_BYTES + 64  # the longest value that can be recorded, plus its letter and its length
# The names of secrets of perdure itself, of its database and of the model providers: the names that libpq and the SDKs
# read. Cloud credentials (AWS_SECRET_ACCESS_KEY, …) are not in this list: they belong to the user, and many tools need
# them.
_SECRETS = re.compile(
    r"PERDURE_WEBHOOK_\w+|PERDURE_\w*SECRET\w*|PGPASSWORD|PGPASSFILE"
    r"|(ANTHROPIC|OPENAI|AZURE_OPENAI)_\w*(KEY|TOKEN|SECRET|HEADERS)\w*|AWS_BEARER_TOKEN_BEDROCK"
)


def environment(whole: Mapping[str, str], passed: Collection[str]) -> dict[str, str]:
    """The environment of a tool's process: all variables except the secrets in `_SECRETS`.

    A variable whose name is in `passed` is always kept.
    """
    kept = {name: value for name, value in whole.items() if name in passed or not _SECRETS.fullmatch(name)}
    if "PERDURE_URL" in kept and "PERDURE_URL" not in passed:
        # Keep the URL without its password: without a URL, the tool would use the default journal, without a warning.
        url = without_password(kept.pop("PERDURE_URL"))
        kept |= {} if url is None else {"PERDURE_URL": url}
    return kept


class Isolated:
    """One attempt in a process of its own.

    `run` blocks until the process has ended; `stop` may be called from any thread.
    """

    def __init__(self, tool: Tool[..., Any], args: bytes, call: Call, limit_s: float | None = None) -> None:
        self._what = f"the process of tool {tool.name}"
        self._call = call
        self._redact = tool.redact_encoded
        scrubber = call.scrubber or Scrubber({})
        self._secrets = {"values": scrubber.values, "redacted": scrubber.redacted}
        self._environment = environment(os.environ, tool.pass_env)
        if self._environment.pop(KEY_FILE_VARIABLE, None) or KEY_VARIABLE in self._environment:
            self._environment[KEY_VARIABLE] = BY_WORKER  # the key of digests stays in the worker, which redacts the result
        self._request: dict[str, Any] = {
            # The module and function to load come from the function object itself, never from a journal.
            "module": _module_name(tool),
            "file": os.path.abspath(inspect.unwrap(tool.fn).__globals__["__file__"]),
            "function": tool.fn.__name__,
            # After this time the supervisor kills the tool. The limit is needed if this worker is suspended and misses
            # the timeout.
            "limit_s": limit_s,
            "path": [os.path.abspath(entry) for entry in sys.path],
            "args": args.decode("utf-8"),
            "call": {
                **{name: getattr(call, name) for name in ("key", "run_id", "number", "attempt", "tenant", "actor", "agent")},
                "deadline": None if call.deadline is None else call.deadline.isoformat(),
                "reads_only": call.reads_only,
                "last_progress": call.last_progress,
            },
            "headers": call.headers,
            "traced": call.on_enter is not None,
        }
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped = False

    def run(self) -> Returned | Unrecordable | Raised:
        """The tool's answer, or a failure. The kind of the failure says whether the effect may have happened.

        The process has removed its secrets already. The worker does it again, because it does not trust the process.
        """
        ended, scrubber = self._run(), self._call.scrubber
        if scrubber is None:
            return ended
        if isinstance(ended, Returned):
            return Returned(scrubber.json(ended.result))
        return structs.replace(ended, failure=scrubber.failure(ended.failure))

    def _run(self) -> Returned | Unrecordable | Raised:
        with self._lock:
            if self._stopped:
                return self._raised("not_sent", "was stopped before it had begun")
            artifacts: Service | None = None
            try:
                artifacts = Service(lambda: self._call.vault)
                self._process = subprocess.Popen(
                    [sys.executable, "-P", isolated_main.__file__],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    env=self._environment,
                    # The supervisor gets a session of its own: a signal to the worker's process group must not reach
                    # the supervisor, which cleans up after the worker.
                    start_new_session=True,
                    pass_fds=[artifacts.there.fileno()],
                )
            except (OSError, RuntimeError) as error:  # no process, no descriptor or no thread is left
                if artifacts is not None:
                    artifacts.close()
                return self._raised("not_sent", f"could not be started: {error}")
        process = self._process
        asked = artifacts.there.fileno()
        artifacts.there.close()  # so that the connection ends when the process ends
        try:
            assert process.stdin is not None
            process.stdin.write(json.dumps({**self._request, "artifacts": asked, "secrets": self._secrets}).encode("ascii") + b"\n")
            process.stdin.flush()
        except (OSError, ValueError):
            pass  # the process has ended, or was stopped just now: its output shows how
        try:
            return self._read(process)
        except Exception as error:
            # The output is broken, but the tool has run, and its effect may have happened: the call is in doubt.
            return self._raised(
                "process_died",
                f"was ended, because it wrote something that is no message into perdure's own pipe: {describe(error).message}. "
                "The tool, or a library that it uses, writes to a file descriptor that it has not opened",
            )
        finally:
            self.stop()
            process.wait()
            artifacts.close()

    def stop(self) -> None:
        """End the process and every process that it has started."""
        with self._lock:
            self._stopped = True
            if self._process is not None and self._process.stdin is not None and not self._process.stdin.closed:
                try:
                    self._process.stdin.close()
                except OSError:
                    pass  # the process is gone and cannot read the rest of the request

    def _read(self, process: subprocess.Popen[bytes]) -> Returned | Unrecordable | Raised:
        """The one answer in the lines of the output.

        A line that breaks the protocol is a ValueError; a truncated line is skipped.
        """
        assert process.stdout is not None
        begun, status = False, None
        answer: Returned | Unrecordable | Raised | None = None
        with process.stdout as pipe:
            while line := pipe.readline(MAX_LINE_BYTES):
                if len(line) == MAX_LINE_BYTES:
                    raise ValueError(f"a line of {MAX_LINE_BYTES:,} bytes or more")
                match isolated_main.unframed(line):
                    case None:
                        pass
                    case b"B", b"":
                        begun = True
                        self._call.hear(None)  # the time to load the tool does not count as silence of the tool
                    case b"H", progress:
                        self._call.hear(progress)
                    case b"U", usage:
                        self._call.add_usage(_usage(usage))
                    case b"R", result if begun and answer is None:
                        answer = self._returned(result)
                    case b"F", failure if answer is None:
                        answer = self._failed(received(failure))
                    case b"E", code if re.fullmatch(rb"-?\d{1,3}", code):
                        status = int(code)
                        # Do not read until the end of file: a process that could not be killed may keep the pipe open
                        # for ever.
                        break
                    case letter, text:
                        raise ValueError(f"{letter!r} with {len(text):,} bytes, which the protocol does not allow, or not now")
        if answer is not None:
            return answer
        return self._raised("process_died" if begun else "not_sent", _how_it_ended(status))

    def _returned(self, result: bytes) -> Returned | Unrecordable:
        """The result in canonical JSON. If it cannot be recorded: Unrecordable, since the effect has happened."""
        try:
            return Returned(self._redact(codec.canonical(result, f"what {self._what} returned")))
        except NotEncodable as error:
            return Unrecordable(Failure(kind="not_encodable", type=type(error).__name__, message=describe(error).message))

    def _failed(self, failure: Failure) -> Unrecordable | Raised:
        """The tool's failure. If it names a variable that the tool did not get, the message says how to pass it."""
        missed = [name for name in os.environ if name in failure.message and name not in self._environment]
        if missed:
            hint = f"; it was not given {', '.join(missed)}: name it in @tool(isolate=True, pass_env=[…]) if it needs it"
            message = clean(failure.message, MAX_MESSAGE_CHARS // 2) + hint
            failure = structs.replace(failure, message=clean(message, MAX_MESSAGE_CHARS))
        return Unrecordable(failure) if failure.kind == "not_encodable" else Raised(failure)

    def _raised(self, kind: Any, how: str) -> Raised:
        return Raised(Failure(kind=kind, type="ProcessDied", message=clean(f"{self._what} {how}", MAX_MESSAGE_CHARS)))


def _usage(text: bytes) -> Usage:
    return checked(msgspec.convert(codec.parse(text, "the usage"), Usage), "the usage")


def _module_name(tool: Tool[..., Any]) -> str | None:
    """The name by which the tool's process can import the tool's module. None: a script, which only has a file."""
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
