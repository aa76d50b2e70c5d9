"""Of what a test measures, the collector's part: one pass over all that a long suite has left behind costs more than the test itself."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def own_garbage() -> Iterator[None]:
    """What is there already is not looked at by the collector; what comes to be within is, as ever."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
