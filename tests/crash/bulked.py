"""The command line in a process that kills itself at one boundary: before or after the nth call of a method of the store.

python -m tests.crash.bulked METHOD before|after NTH ARGS…
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from perdure import cli
from perdure.store.postgres.store import PostgresStore
from perdure.store.sqlite.store import SqliteStore


def mortal(method: str, moment: str, nth: int) -> None:
    seen = 0
    for store in (SqliteStore, PostgresStore):
        real = getattr(store, method)

        def dying(self: Any, *args: Any, real: Any = real, **kwargs: Any) -> Any:
            nonlocal seen
            seen += 1
            if (seen, moment) == (nth, "before"):
                os.kill(os.getpid(), signal.SIGKILL)
            answer = real(self, *args, **kwargs)
            if (seen, moment) == (nth, "after"):
                os.kill(os.getpid(), signal.SIGKILL)
            return answer

        setattr(store, method, dying)


if __name__ == "__main__":
    mortal(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    cli.cli.main(sys.argv[4:])
