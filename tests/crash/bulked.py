"""The command line in a process that kills itself at one boundary: before or after the nth call of a method of the store.

python -m tests.crash.bulked METHOD before|after NTH ARGS…

METHOD may also be a function of a module: perdure.cli.backup:give_name.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from typing import Any

from perdure import cli
from perdure.store.postgres.store import PostgresStore
from perdure.store.sqlite.store import SqliteStore


def mortal(method: str, moment: str, nth: int) -> None:
    seen = 0
    module, _, function = method.rpartition(":")
    places: list[Any] = [importlib.import_module(module)] if module else [SqliteStore, PostgresStore]
    for place in places:
        real = getattr(place, function)

        def dying(*args: Any, real: Any = real, **kwargs: Any) -> Any:
            nonlocal seen
            seen += 1
            if (seen, moment) == (nth, "before"):
                os.kill(os.getpid(), signal.SIGKILL)
            answer = real(*args, **kwargs)
            if (seen, moment) == (nth, "after"):
                os.kill(os.getpid(), signal.SIGKILL)
            return answer

        setattr(place, function, dying)


if __name__ == "__main__":
    mortal(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    cli.cli.main(sys.argv[4:])
