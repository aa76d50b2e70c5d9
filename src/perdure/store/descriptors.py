"""Are there file descriptors left? If none is left, SQLite only says "cannot open", and libpq says nothing."""

from __future__ import annotations

import errno
import os

OUT_OF_FILES = (errno.EMFILE, errno.ENFILE)
TOO_MANY_FILES = "this process or machine has too many open files; close some, or raise the limit (ulimit -n) and try again"


def are_used_up(wanted: int) -> bool:
    """Are fewer than `wanted` descriptors left?

    Call this after an open has failed, when the failed open has closed its descriptors again.
    """
    taken: list[int] = []
    try:
        for _ in range(wanted):
            taken.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))  # noqa: PERF401 – after a failure, `taken` must be closed
    except OSError as error:
        return error.errno in OUT_OF_FILES
    finally:
        for descriptor in taken:
            os.close(descriptor)
    return False
