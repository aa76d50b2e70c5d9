"""Tools, models and reconcile hooks with a line in the ledger for each time that they are called and return."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from perdure.core.events import OF_MODEL
from perdure.errors import NotEncodable
from perdure.testing.lab.ledger import Ledger
from perdure.testing.lab.warp import Warp
from perdure.tool import Call, Hook, Outcome

Begun = Callable[[Call, Any], None]  # told right after the line that says so
_OURS_OUTSIDE = ("perdure.models.anthropic", "perdure.models.openai")


class Counting:
    """What is performed in the place of each tool, in one process."""

    def __init__(self, ledger: Ledger, warp: Warp, begun: Begun) -> None:
        self._ledger = ledger
        self._warp = warp
        self._begun = begun

    def counted(self, tool: Any) -> Any:
        """The tool, or the question to a model, whose calls are written down; its reconcile hook too."""
        if tool.isolate:
            # Its function runs in another process, which loads it by its name. Whether that goes on cannot be seen from here either.
            self._ledger.note("unseen", tool=tool.name)
            self._warp.allowed = False
            return tool
        counted = copy.copy(tool)
        given: list[Call] = []
        with_call = tool.with_call

        def noting(arguments: dict[str, Any], call: Call) -> dict[str, Any]:
            given[:] = [call]
            kwargs: dict[str, Any] = with_call(arguments, call)
            return kwargs

        counted.with_call = noting
        counted.fn = self._around(tool.fn, lambda: self._calling(tool, given[0]))
        if tool.reconciler is not None:
            counted.reconciler = self._hook(tool, tool.reconciler)
        return counted

    def _around(self, fn: Callable[..., Any], calling: Callable[[], Any]) -> Callable[..., Any]:
        if inspect.iscoroutinefunction(fn):

            @wraps(fn)
            async def counting_async(**kwargs: Any) -> Any:
                with calling() as returned:
                    return returned(await fn(**kwargs))

            return counting_async

        @wraps(fn)
        def counting(**kwargs: Any) -> Any:
            with calling() as returned:
                return returned(fn(**kwargs))

        return counting

    @contextmanager
    def _calling(self, tool: Any, call: Call) -> Iterator[Callable[[Any], Any]]:
        about = {**_about(tool, call), "outside": _is_paid(tool)}

        def returned(value: Any) -> Any:
            self._ledger.note("returned", **about, result=_shown(tool, value))
            return value

        with self._warp.real_time():
            self._ledger.note("begun", **about)
            self._begun(call, tool)
            try:
                yield returned
            except BaseException as error:
                self._ledger.note("raised", **about, result=type(error).__name__)
                raise

    def _hook(self, tool: Any, hook: Hook) -> Hook:
        counted = copy.copy(hook)
        given: list[Call] = []

        def noting(arguments: dict[str, Any], call: Call) -> dict[str, Any]:
            given[:] = [call]
            return hook.with_call(arguments, call)

        counted.with_call = noting  # type: ignore[method-assign]
        counted.fn = self._around(hook.fn, lambda: self._asking(tool, given[0]))
        return counted

    @contextmanager
    def _asking(self, tool: Any, call: Call) -> Iterator[Callable[[Any], Any]]:
        about = _about(tool, call)

        def told(value: Any) -> Any:
            self._ledger.note("told", **about, result=value.kind if isinstance(value, Outcome) else type(value).__name__)
            return value

        with self._warp.real_time():
            self._ledger.note("asked", **about)
            yield told


def _about(tool: Any, call: Call) -> dict[str, Any]:
    return {
        "tool": tool.name,
        "model": tool.events is OF_MODEL,
        "run": call.run_id,
        "call": call.number,
        "attempt": call.attempt,
        "key": call.key,
    }


def _shown(tool: Any, value: Any) -> str | None:
    try:
        encoded: bytes = tool.encode_result(value)
    except NotEncodable:
        return None
    return encoded.decode()


def _is_paid(tool: Any) -> bool:
    """Whether asking costs money: a model of ours that goes to a provider, or one of the user's own that is priced there."""
    return tool.events is OF_MODEL and type(tool.model).__module__.startswith(_OURS_OUTSIDE)
