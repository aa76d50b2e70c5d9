"""Keeps the garbage collector out of measurements.

After a long suite, one collection takes longer than the test itself.
"""

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
