"""Python programs in separate processes, ten times cheaper: a server that has imported perdure forks each of them.

    done = forked.run([sys.executable, "-m", "perdure", "list"], cwd=folder, capture_output=True, text=True, timeout=60)
    worker = forked.Popen([sys.executable, "-m", "perdure", "worker", "shop.py"], cwd=folder, stdout=subprocess.PIPE, text=True)

As with subprocess, the program has its own pid, arguments, environment, folder, streams and exit code, and gets
signals. But the start and the end of an interpreter are missing: of all PYTHON… variables only PYTHONPATH is used, the
locale and the hash seed are those of the server, the modules of perdure are already loaded, and they are not cleaned
up after the last line. Tests of these things start a real interpreter.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Mapping, Sequence
from typing import IO, Any, NoReturn, TextIO

_LARGEST_REQUEST = 1 << 20
Stream = int | IO[Any] | None


# -- the tests' side ----------------------------------------------------------------------------------------------------------
class Popen(subprocess.Popen[Any]):
    """subprocess.Popen for `[sys.executable, "-m" | "-c" | FILE, …]`: its pipes, waiting and signals, but the process comes from a fork."""

    def __init__(
        self,
        args: Sequence[str | os.PathLike[str]],
        *,
        cwd: str | os.PathLike[str] | None = None,
        env: Mapping[str, str] | None = None,
        stdin: Stream = None,
        stdout: Stream = None,
        stderr: Stream = None,
        text: bool | None = None,
        start_new_session: bool = False,
        brings: tuple[str, ...] = (),
    ) -> None:
        """With `brings` these modules are there already too, in a server that is kept for those who bring the same."""
        assert args[0] == sys.executable, f"a fork is a copy of this interpreter, and cannot be {args[0]}"
        self._brings, self._has_own_session = brings, start_new_session
        super().__init__(args, cwd=cwd, env=env, stdin=stdin, stdout=stdout, stderr=stderr, text=text)

    def _execute_child(self, args: Sequence[str], *rest: Any) -> None:
        # (executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell, and two ends of each stream, …)
        cwd, env = rest[4], rest[5]
        ends = rest[9:15]
        given = ends[0], ends[3], ends[5]
        streams = [number if end == -1 else end for number, end in enumerate(given)]
        request = {
            "args": [os.fspath(arg) for arg in args[1:]],
            "cwd": os.fspath(cwd or os.getcwd()),
            "env": dict(os.environ if env is None else env),
            "session": self._has_own_session,
        }
        self._one_at_a_time = threading.Lock()
        self._told, telling = os.pipe()
        try:
            self.pid = _server(self._brings).ask(request, [*streams, telling])
        finally:
            os.close(telling)
            self._close_pipe_fds(*ends)  # type: ignore[attr-defined]
        self._child_created = True

    def _internal_poll(self, _deadstate: int | None = None, **_: Any) -> int | None:
        # Of a Popen that never came to be there is nothing to ask; subprocess asks on its way out.
        if self.returncode is None and hasattr(self, "_told") and select.select([self._told], [], [], 0)[0]:
            self._learn()
        code: int | None = self.returncode
        return code

    def _wait(self, timeout: float | None) -> int:
        if self.returncode is None:
            if not select.select([self._told], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            self._learn()
        code: int = self.returncode
        return code

    def _learn(self) -> None:
        with self._one_at_a_time:  # one thread may wait while another sends a request
            if self.returncode is None:
                said = os.read(self._told, 64)
                self.returncode = int(said) if said else -signal.SIGKILL  # the server has ended, and has killed it

    def __del__(self) -> None:
        super().__del__()
        # Subprocess keeps a list of processes that are alive, and asks again.
        if getattr(self, "returncode", None) is not None:
            os.close(self._told)


def run(
    args: Sequence[str | os.PathLike[str]],
    *,
    input: Any = None,
    capture_output: bool = False,
    timeout: float | None = None,
    check: bool = False,
    **options: Any,
) -> subprocess.CompletedProcess[Any]:
    """subprocess.run with a fork."""
    if capture_output:
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    if input is not None:
        options["stdin"] = subprocess.PIPE
    with Popen(args, **options) as process:
        try:
            out, err = process.communicate(input, timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(process.args, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done


class _Server:
    def __init__(self, brings: tuple[str, ...]) -> None:
        self._one_at_a_time = threading.Lock()
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            theirs.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _LARGEST_REQUEST)
            self._requests.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LARGEST_REQUEST)
            environ = {name: value for name, value in os.environ.items() if not name.startswith(("PERDURE_", "PG"))}
            # In a separate session: Ctrl-C is for pytest, and the server notices the end of pytest by its socket.
            command = [sys.executable, __file__, str(theirs.fileno()), *brings]
            self._process = subprocess.Popen(command, env=environ, pass_fds=[theirs.fileno()], start_new_session=True)

    def ask(self, request: dict[str, Any], streams: Sequence[int]) -> int:
        """The pid of the new process, with these as stdin, stdout, stderr; its exit code will be written to the fourth."""
        with self._one_at_a_time:
            socket.send_fds(self._requests, [json.dumps(request).encode()], streams)
            answer = self._requests.recv(64)
        assert answer, "the server of forks has died"
        return int(answer)

    def close(self) -> None:
        self._requests.close()
        self._process.wait()


@functools.cache
def _server(brings: tuple[str, ...]) -> _Server:
    """One for each process of the test run, started by the first test that asks for it."""
    server = _Server(brings)
    atexit.register(server.close)
    return server


# -- its own side -------------------------------------------------------------------------------------------------------------
def _serve(requests: socket.socket, base: list[str]) -> None:
    """Fork until the tests close their end of the socket; then kill all children.

    A child runs its program and never returns.
    """
    alive: dict[int, tuple[int, int]] = {}  # the pidfd → the pid, where to tell its exit code
    ours: set[int] = set()  # a child with its own session is not in this set
    while True:
        for ready in select.select([requests.fileno(), *alive], [], [])[0]:
            if ready != requests.fileno():
                _bury(ready, *alive.pop(ready))
                continue
            said, fds, _, _ = socket.recv_fds(requests, _LARGEST_REQUEST, 4)
            if not said:
                for pidfd in ours & alive.keys():
                    os.kill(alive[pidfd][0], signal.SIGKILL)
                return
            request = json.loads(said)
            pid = os.fork()
            if pid == 0:
                requests.detach()  # its number may soon be another file's
                try:
                    _become(request, fds[:3], base)
                except SystemExit as wish:
                    _leave(wish.code)
                _leave(None)
            pidfd = os.pidfd_open(pid)
            alive[pidfd] = pid, fds[3]
            # The descriptor number may have belonged to another child.
            (ours.discard if request["session"] else ours.add)(pidfd)
            for fd in fds[:3]:
                os.close(fd)
            requests.send(str(pid).encode())


def _bury(pidfd: int, pid: int, telling: int) -> None:
    os.close(pidfd)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    try:
        os.write(telling, str(code).encode())
    except BrokenPipeError:
        pass  # no caller has waited for it
    os.close(telling)


def _become(request: dict[str, Any], streams: Sequence[int], base: list[str]) -> None:
    """Do everything that a new interpreter would do for this command line.

    Exceptions of the program go to our own end.
    """
    for number, fd in enumerate(streams):
        os.dup2(fd, number)
    os.closerange(3, 256)
    if request["session"]:
        os.setsid()
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    time.tzset()
    sys.dont_write_bytecode = True  # a cache distinguishes files by the second, and tests write several in one second
    sys.stdin, sys.stdout, sys.stderr = _text(sys.stdin, 0), _text(sys.stdout, 1), _text(sys.stderr, 2)
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr  # type: ignore[misc]
    path = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder] + base
    what, *words = request["args"]
    if what == "-c":
        sys.path[:], sys.argv[:] = ["", *path], ["-c", *words[1:]]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(words[0], "<string>", "exec"), main.__dict__)
    elif what == "-m":
        sys.path[:], sys.argv[:] = [os.getcwd(), *path], ["-m", *words[1:]]
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[:], sys.argv[:] = [os.path.dirname(os.path.abspath(what)), *path], [what, *words]
        runpy.run_path(what, run_name="__main__")


def _leave(wish: str | int | None) -> NoReturn:
    """The end of an interpreter without its cleanup, which would copy every shared page.

    Any other error ends it completely.
    """
    if isinstance(wish, str):
        print(wish, file=sys.stderr)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1 if isinstance(wish, str) else wish or 0)


def _text(old: TextIO, number: int) -> Any:
    mode, buffering = ("r", -1) if number == 0 else ("w", 1 if number == 2 or os.isatty(number) else -1)
    return open(number, mode, buffering, encoding=old.encoding, errors=old.errors, closefd=False)


def _main() -> None:
    del sys.path[0]  # this folder, which only the server uses
    base = sys.path[len([folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]) :]
    from perdure.cli import VERBS

    stores = ["perdure.store.sqlite.store", "perdure.store.postgres.store"]
    for name in ["perdure", "perdure.app", *stores, *(module for module, _ in VERBS.values()), *sys.argv[2:]]:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # or every collection in a child would touch, and so copy, all that is here
    _serve(socket.socket(fileno=int(sys.argv[1])), base)


if __name__ == "__main__":
    _main()
