"""A process that forks victims. It has imported everything and opened nothing, so a victim needs no new interpreter.

Requests and answers are lines of JSON on its stdin and stdout:

    {"start": "victims:errand", "args": {…}, "log": path, "journal": url, "mutation": name}  → {"pid": n}
    {"wait": n, "within_s": s}                                                               → {"code": exit code, or minus the signal, or null}

When its stdin ends, it kills all its children that are still alive, and ends.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, cast

from tests import figures
from tests.crash.mind_mutations import MIND_MUTATIONS
from tests.crash.mutations import MUTATIONS
from tests.crash.waiting_mutations import WAITING_MUTATIONS

Victim = Callable[..., None]
JOURNAL = "CRASH_JOURNAL"  # how a victim finds its journal: the URL in its environment


# -- the tests' side ----------------------------------------------------------------------------------------------------------
class Nursery:
    """Starts victims and waits for their end."""

    def __init__(self, more: Mapping[str, str] = MappingProxyType({})) -> None:
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **more}
        command = [sys.executable, "-c", "from tests.crash.nursery import main; main()"]
        self._process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._requests, self._answers = cast(IO[bytes], self._process.stdin), cast(IO[bytes], self._process.stdout)

    def start(self, victim: Victim, log: Path, journal: str, mutation: str = "", **args: Any) -> int:
        """The process id of a new process that runs the function with these arguments; with a mutation, without one of our guards."""
        name = f"{victim.__module__}:{victim.__name__}"
        request = {"start": name, "args": args, "log": str(log), "journal": journal, "mutation": mutation}
        return cast(int, self._ask(request)["pid"])

    def wait(self, pid: int, within_s: float = 60.0) -> int | None:
        """How it ended: its exit code, or minus the signal that killed it; None when it still lives."""
        code = cast("int | None", self._ask({"wait": pid, "within_s": within_s})["code"])
        if code == -signal.SIGKILL:
            figures.seen(figures.KILLS)
        return code

    def close(self) -> None:
        self._requests.close()
        self._process.wait(timeout=60)
        self._answers.close()

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        self._requests.write(json.dumps(request).encode() + b"\n")
        self._requests.flush()
        answer = self._answers.readline()
        assert answer, "the nursery has died"
        return cast("dict[str, Any]", json.loads(answer))


# -- its own side -------------------------------------------------------------------------------------------------------------
def main() -> None:
    """Serve requests until stdin ends."""
    importlib.import_module("tests.crash.people")
    importlib.import_module("perdure.store.sqlite.store")
    alive: set[int] = set()
    for line in sys.stdin.buffer:
        request = json.loads(line)
        if "start" in request:
            pid = _bear(request)
            alive.add(pid)
            answer: dict[str, Any] = {"pid": pid}
        else:
            code = _wait(request["wait"], request["within_s"])
            if code is not None:
                alive.discard(request["wait"])
            answer = {"code": code}
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()
    for pid in alive:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _bear(request: dict[str, Any]) -> int:
    path, _, name = request["start"].rpartition(":")
    module = importlib.import_module(path)  # imported here, so that slow imports happen only once
    importlib.import_module(getattr(module, "BRINGS", path))
    gc.freeze()  # or every collection in a child would touch, and so copy, all that is here
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((nothing, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        os.closerange(3, 64)
        os.environ[JOURNAL] = request["journal"]
        if request["mutation"]:
            {**MUTATIONS, **WAITING_MUTATIONS, **MIND_MUTATIONS}[request["mutation"]]()
        getattr(module, name)(**request["args"])
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wait(pid: int, within_s: float) -> int | None:
    descriptor = os.pidfd_open(pid)
    try:
        if not select.select([descriptor], [], [], within_s)[0]:
            return None
    finally:
        os.close(descriptor)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
