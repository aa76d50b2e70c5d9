"""Did a signal raise the exception, or the running code?"""

from __future__ import annotations

import functools
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from perdure.interrupts import is_interrupt


class Handler:
    def method(self, *_: object) -> None:
        raise KeyboardInterrupt

    __call__ = method


def function(*_: object) -> None:
    sys.exit(3)


def through_another(*_: object) -> None:
    function()


def resets_itself(*_: object) -> None:
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    sys.exit(3)


@pytest.fixture
def handled() -> Iterator[Callable[[Any], object]]:
    before = signal.getsignal(signal.SIGUSR1)
    yield lambda handler: signal.signal(signal.SIGUSR1, handler)
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize(
    "handler",
    [
        *(signal.default_int_handler, function, through_another, resets_itself, lambda number, frame: sys.exit(3)),
        *(Handler(), Handler().method, functools.partial(Handler().method, 1)),
    ],
    ids=["Python's own", "function", "through another", "resets itself", "named", "object", "method", "partial"],
)
def test_what_a_handler_raises_is_an_interrupt_wherever_it_strikes(handled: Callable[[Any], object], handler: Any) -> None:
    handled(handler)

    def struck() -> None:
        try:
            signal.raise_signal(signal.SIGUSR1)
        finally:
            len("some code that cleans up")

    with pytest.raises((KeyboardInterrupt, SystemExit)) as raised:
        struck()
    assert is_interrupt(raised.value)


@pytest.mark.parametrize(
    "code", ["raise KeyboardInterrupt", "raise KeyboardInterrupt('x') from None", "sys.exit(1)", "raise SystemExit", "1 / 0"]
)
def test_what_code_raises_by_itself_is_none(handled: Callable[[Any], object], code: str) -> None:
    handled(function)
    with pytest.raises(BaseException) as raised:
        exec(code, {"sys": sys})
    assert not is_interrupt(raised.value)


def test_one_that_was_never_raised_is_none() -> None:
    assert not is_interrupt(KeyboardInterrupt())
