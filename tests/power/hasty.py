"""An event loop with short waits: a worker waits before it tries a disk again, and the tests must not wait."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
FASTER = 40


class _Selector(selectors.DefaultSelector):
    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        return super().select(None if timeout is None else timeout / FASTER)


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        super().__init__(_Selector())

    def time(self) -> float:
        return super().time() * FASTER


def run(main: Coroutine[Any, Any, T]) -> T:
    """As asyncio.run."""
    with asyncio.Runner(loop_factory=_Loop) as runner:
        return runner.run(main)
