"""Keeps the garbage collector out of measurements.

After a long suite, one collection takes longer than the test itself.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def own_garbage() -> Iterator[None]:
    """The collector ignores existing objects; objects that are created inside the block are collected as usual."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
