"""What an agent must not touch directly: a guard on the interpreter's own audit events.

The agent's loop refuses what goes through a loop. A blocking call (`socket.create_connection`, `subprocess.run`, `open(…, "w")`)
does not ask any loop, and on replay it would happen again without a word in the journal. The interpreter announces it before it
does it, to hooks that may refuse. Tools are unaffected: no tool runs inside an agent's activation.
"""

from __future__ import annotations

import os
import sys
from asyncio.events import _get_running_loop
from types import FrameType
from typing import Any

from perdure.core.loop import AgentLoop
from perdure.errors import NotAllowedInAgent

_REFUSED = {
    **dict.fromkeys(("socket.connect", "socket.bind", "socket.sendto", "socket.sendmsg"), "use the network"),
    **dict.fromkeys(("socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr"), "look up a host"),
    "urllib.Request": "open a URL",
    **dict.fromkeys(("subprocess.Popen", "os.system", "os.posix_spawn", "os.spawn", "os.startfile"), "start a process"),
    **dict.fromkeys(("os.fork", "os.forkpty", "os.exec"), "start a process"),
    # Announced from CPython 3.12 on.
    **dict.fromkeys(("_thread.start_new_thread", "_thread.start_joinable_thread"), "start a thread"),
    "sqlite3.connect": "open a database",
    "open": "open a file for writing",
}
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_TRUNC
_ACTIVATION = AgentLoop.run_until_quiet.__code__
_installed = False  # a fact about the process: Python has no way to take an audit hook back


def guard() -> None:
    """From now on refuse, in every agent of this process, what belongs in a tool."""
    global _installed
    if not _installed:
        _installed = True
        sys.addaudithook(_audit)


def refuse_app() -> None:
    """NotAllowedInAgent in an agent's own code. Who opens, asks or tells an app calls this first: a store of ours announces nothing."""
    if type(_get_running_loop()) is AgentLoop:
        raise NotAllowedInAgent(
            "an agent may not use the app: agents are replayed, and each replay would do it again, without a word in the journal. "
            "To start another run, call its agent, `await other(…)`, which makes it a child; everything else belongs in a tool"
        )


def _audit(event: str, args: tuple[Any, ...]) -> None:
    # Called for every audit event of the process: nothing may stand before this test.
    if event not in _REFUSED or type(_get_running_loop()) is not AgentLoop:
        return
    if event == "open" and not _is_new_writing(*args):
        return
    if not _is_tolerated(sys._getframe(1)):
        raise NotAllowedInAgent(
            f"an agent may not {_REFUSED[event]} ({event}): agents are replayed, so whatever touches the world belongs in a tool"
        )


def _is_new_writing(path: object, mode: object, flags: int) -> bool:
    """Reading repeats nothing, and what is open already (a number instead of a path) was opened by somebody else."""
    return not isinstance(path, int) and bool(flags & _WRITING)


def _is_tolerated(frame: FrameType | None) -> bool:
    """An import may write its cache and do what its modules do; a log handler may open its file."""
    while frame is not None and frame.f_code is not _ACTIVATION:
        if frame.f_globals.get("__name__") in ("importlib._bootstrap", "logging", "logging.handlers"):
            return True
        frame = frame.f_back
    return False
