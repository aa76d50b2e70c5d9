"""Verbs that are killed: a small server forks a process for each verb, so that hundreds of kills take only seconds.

`python -m tests.e2e.mortal` reads lines of JSON: the arguments of `perdure`, and when to die: before, inside or after
the nth transaction. Inside means: everything was written, and nothing is committed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[2]


class Mortals:
    """One verb at a time, each in a separate process."""

    def __init__(self) -> None:
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("PERDURE_", "PG"))}
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.e2e.mortal"],
            cwd=ROOT,
            env={**environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, *args: str, dies: tuple[int, str] | None = None, constants: dict[str, int] | None = None) -> tuple[int, str, str]:
        """The exit code (-9: it was killed), stdout and stderr of the verb."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps([args, dies, constants or {}]) + "\n")
        self._server.stdin.flush()
        code, out, err = json.loads(self._server.stdout.readline())
        return code, out, err

    def close(self) -> None:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.close()
        self._server.wait(60)
        self._server.stdout.close()


def _serve() -> None:
    import perdure.cli.copy
    import perdure.cli.prune  # noqa: F401 – loaded before the fork, so that no child has to
    from perdure.store.postgres.store import PostgresStore  # noqa: F401
    from perdure.store.sqlite.store import SqliteStore  # noqa: F401

    for line in sys.stdin:
        args, dies, constants = json.loads(line)
        (out, out_end), (err, err_end) = os.pipe(), os.pipe()
        pid = os.fork()
        if pid == 0:
            os.dup2(out_end, 1)
            os.dup2(err_end, 2)
            # The old streams belong to other files.
            sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
            _be_mortal(args, dies, constants)
        os.close(out_end)
        os.close(err_end)
        said = [_read(end) for end in (out, err)]
        _, status = os.waitpid(pid, 0)
        print(json.dumps([os.waitstatus_to_exitcode(status), *said]), flush=True)


def _read(end: int) -> str:
    with os.fdopen(end) as stream:
        return stream.read()


def _be_mortal(args: list[str], dies: tuple[int, str] | None, constants: dict[str, int]) -> NoReturn:
    import perdure.cli
    from perdure.store import pruning, transfer
    from perdure.store.postgres.database import PostgresDatabase
    from perdure.store.sqlite.database import SqliteDatabase

    for name, value in constants.items():
        for module in (transfer, pruning):
            if hasattr(module, name):
                setattr(module, name, value)
    if dies is not None:
        left = [dies[0]]
        for database in (SqliteDatabase, PostgresDatabase):
            setattr(database, "write", _dying(database.write, left, dies[1]))  # noqa: B010
    try:
        perdure.cli.cli.main(args)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _dying(write: Callable[..., Any], left: list[int], moment: str) -> Callable[..., Any]:
    def mortal(self: Any, work: Callable[[Any], Any], *args: Any, **options: Any) -> Any:
        left[0] -= 1
        if left[0] == 0 and moment == "before":
            os.kill(os.getpid(), signal.SIGKILL)

        def last(cursor: Any) -> Any:
            done = work(cursor)
            os.kill(os.getpid(), signal.SIGKILL)
            return done

        done = write(self, last if left[0] == 0 and moment == "inside" else work, *args, **options)
        if left[0] == 0 and moment == "after":
            os.kill(os.getpid(), signal.SIGKILL)
        return done

    return mortal


if __name__ == "__main__":
    _serve()
