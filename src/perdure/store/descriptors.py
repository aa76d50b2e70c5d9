"""No descriptor left to open anything with: SQLite says "cannot open" to that as to everything else, libpq nothing at all."""

from __future__ import annotations

import errno
import os

OUT_OF_FILES = (errno.EMFILE, errno.ENFILE)
TOO_MANY_FILES = "this process or machine has too many open files; close some, or raise the limit (ulimit -n) and try again"


def are_used_up(wanted: int) -> bool:
    """Whether something could not be opened for want of so many descriptors; it has closed what it had by the time we ask."""
    taken: list[int] = []
    try:
        for _ in range(wanted):
            taken.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))  # noqa: PERF401 – those before a failure must be closed
    except OSError as error:
        return error.errno in OUT_OF_FILES
    finally:
        for descriptor in taken:
            os.close(descriptor)
    return False
