"""Refuses I/O inside an agent: a hook on the interpreter's audit events.

The agent's loop refuses async I/O. A blocking call (`socket.create_connection`, `subprocess.run`, `open(…, "w")`)
does not use any loop. A replay would repeat such a call, and the journal would not show it. The interpreter announces
the call to audit hooks before it happens, and a hook may refuse the call. Tools are not affected, because no tool runs
inside an agent's activation.
"""

from __future__ import annotations

import os
import sys
from types import FrameType
from typing import Any

from perdure.core.agent_loop import AgentLoop
from perdure.core.compat import running_loop
from perdure.errors import NotAllowedInAgent

_REFUSED = {
    **dict.fromkeys(("socket.connect", "socket.bind", "socket.sendto", "socket.sendmsg"), "use the network"),
    **dict.fromkeys(("socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr"), "look up a host"),
    "urllib.Request": "open a URL",
    **dict.fromkeys(("subprocess.Popen", "os.system", "os.posix_spawn", "os.spawn", "os.startfile"), "start a process"),
    **dict.fromkeys(("os.fork", "os.forkpty", "os.exec"), "start a process"),
    # CPython announces the start of a thread from version 3.12 on.
    **dict.fromkeys(("_thread.start_new_thread", "_thread.start_joinable_thread"), "start a thread"),
    "sqlite3.connect": "open a database",
    "open": "open a file for writing",
    # `os.unlink` is announced as `os.remove`, and `os.replace` as `os.rename`.
    **dict.fromkeys(("os.mkdir", "os.rmdir", "os.remove", "os.rename", "os.link", "os.symlink", "os.truncate"), "change files"),
    **dict.fromkeys(("os.chmod", "os.chown", "os.chflags", "os.utime", "os.setxattr", "os.removexattr"), "change files"),
    **dict.fromkeys(("shutil.copyfile", "shutil.copymode", "shutil.copystat", "shutil.copytree", "shutil.move"), "change files"),
    **dict.fromkeys(("shutil.rmtree", "shutil.chown", "shutil.make_archive", "shutil.unpack_archive"), "change files"),
}
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_TRUNC
_ACTIVATION = AgentLoop.run_until_quiet.__code__
_installed = False  # global, since an audit hook belongs to the process and cannot be removed


def guard() -> None:
    """From now on, refuse I/O in every agent of this process."""
    global _installed
    if not _installed:
        _installed = True
        sys.addaudithook(_audit)


def refuse_app() -> None:
    """Raise NotAllowedInAgent if the caller is an agent.

    Every use of the app calls this, since perdure's stores cause no audit event.
    """
    if type(running_loop()) is AgentLoop:
        raise NotAllowedInAgent(
            "an agent may not use the app: agents are replayed, and each replay would do it again, without a record in the journal. "
            "To start another run, call its agent, `await other(…)`, which makes it a child; everything else belongs in a tool"
        )


def _audit(event: str, args: tuple[Any, ...]) -> None:
    # Python calls this for every audit event of the process: this test must come first, to keep the hook cheap.
    if event not in _REFUSED or type(running_loop()) is not AgentLoop:
        return
    if event == "open" and not _is_new_writing(*args):
        return
    if not _is_tolerated(sys._getframe(1)):
        raise NotAllowedInAgent(
            f"an agent may not {_REFUSED[event]} ({event}): agents are replayed, so whatever touches the world belongs in a tool"
        )


def _is_new_writing(path: object, mode: object, flags: int) -> bool:
    """Does this `open` open a new file for writing?

    Reads are harmless. If the path is an int, it is a file descriptor that is already open.
    """
    return not isinstance(path, int) and bool(flags & _WRITING)


def _is_tolerated(frame: FrameType | None) -> bool:
    """Is the call part of an import (which may write its cache) or of logging (whose handlers may open a file)?"""
    while frame is not None and frame.f_code is not _ACTIVATION:
        if frame.f_globals.get("__name__") in ("importlib._bootstrap", "logging", "logging.handlers"):
            return True
        frame = frame.f_back
    return False
