"""Changes to a worker, in its own process: one guard is removed, or the worker sleeps at the worst moment."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable

from msgspec import structs

from perdure.core.identity import Sealed
from perdure.engine.local.drive import Drive
from perdure.store.api import Append
from perdure.store.postgres.queries import QUERIES

_GUARDED = ("advance", "advance_and_project", "advance_and_release", "advance_and_park", "append_many")


def _blind(name: str, column: str) -> None:
    """The statement without that predicate; its parameter stays, since they are counted."""
    sql = QUERIES[name].sql
    blind = re.sub(rf"\b(r\.)?{column} = (\$\d+|g\.\w+)(?=\s+AND)", r"(\g<0> OR TRUE)", sql)
    assert blind != sql, f"{name} does not look at {column}"
    QUERIES[name] = structs.replace(QUERIES[name], sql=blind)


def leases_are_not_looked_at() -> None:
    """An append with the right seq is accepted, whichever worker holds the run."""
    for name in _GUARDED:
        for column in ("epoch", "nonce", "holder"):
            _blind(name, column)


def sleeps_before_its_first_effect() -> None:
    """Stops when the first intent is durable and not acknowledged yet, until the test wakes it."""
    real = Drive._durable

    def durable(self: Drive, append: Append, result: Sealed | None) -> None:
        if self._begin:
            Drive._durable = real  # type: ignore[method-assign]
            os.kill(os.getpid(), signal.SIGSTOP)
        real(self, append, result)

    Drive._durable = durable  # type: ignore[method-assign]


CHANGES: dict[str, Callable[[], None]] = {found.__name__: found for found in (leases_are_not_looked_at, sleeps_before_its_first_effect)}
