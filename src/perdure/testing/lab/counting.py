"""Tools, models and reconcile hooks with a line in the ledger for each time that they are called and return."""

from __future__ import annotations

import copy
import inspect
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

from perdure.core.events import OF_MODEL
from perdure.errors import NotEncodable
from perdure.models.prices import is_priced
from perdure.testing.lab.ledger import Ledger
from perdure.testing.lab.warp import Warp
from perdure.tool import Call, Hook, Outcome

Begun = Callable[[Call, Any], Callable[[], None]]  # told right after the line that says so; what it returns, right before the end is noted
_MOST_BYTES = 65_536  # of a file that is looked into, to see that it has changed
_OURS_OUTSIDE = ("perdure.models.anthropic", "perdure.models.openai")


class Counting:
    """What is performed in the place of each tool, in one process."""

    def __init__(self, ledger: Ledger, warp: Warp, begun: Begun, world: Path | None = None) -> None:
        """`world`: the working folder, where it is to be noted which calls change something there."""
        self._world = world
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
            over()
            self._ledger.note("returned", **about, result=_shown(tool, value))
            return value

        before = None if self._world is None else _look_of(self._world)
        with self._warp.real_time():
            self._ledger.note("begun", **about)
            over = self._begun(call, tool)
            try:
                yield returned
            except BaseException as error:
                over()
                self._ledger.note("raised", **about, result=type(error).__name__)
                raise
            finally:
                if self._world is not None and _look_of(self._world) != before:
                    self._ledger.note("changed", tool=tool.name)

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
            said = self._heard(value, about)
            self._ledger.note("told", **about, result=said.kind if isinstance(said, Outcome) else type(said).__name__)
            return said

        with self._warp.real_time():
            self._ledger.note("asked", **about)
            yield told

    def _heard(self, said: Any, about: dict[str, Any]) -> Any:
        """What the hook has said; "not found" only if there was the time that perdure gives an effect to be found."""
        place, kind = (about["run"], about["call"]), said.kind if isinstance(said, Outcome) else ""
        if kind == "in_progress":
            self._warp.expect(place, about["tool"])
        else:
            self._warp.settle(place)
        if kind != "not_happened" or not self._warp.is_hurried(about["tool"]):
            return said
        self._ledger.note("unwaited", **about)
        return Outcome.unknown("it found nothing, and the crash lab has not waited as long as it takes to believe that")


def _look_of(folder: Path) -> dict[str, tuple[int, ...]]:
    """What is in the folder, as far as it takes to see that a call has changed something. A clock that ticks too slowly hides nothing small."""
    found: dict[str, tuple[int, ...]] = {}
    for root, folders, names in os.walk(folder):
        found.update((os.path.join(root, name), ()) for name in folders)
        for name in names:
            path = os.path.join(root, name)
            try:
                stat = os.lstat(path)
                small = Path(path).read_bytes() if os.path.isfile(path) and stat.st_size <= _MOST_BYTES else b""
            except OSError:
                continue  # somebody else's call has removed it
            found[path] = (stat.st_size, stat.st_mtime_ns, stat.st_ino, zlib.crc32(small))
    return found


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
    """Whether asking costs money: a model of ours that goes to a provider, or one of the user's that has a price there or of its own."""
    if tool.events is not OF_MODEL:
        return False
    model = tool.model
    if any(base.__module__.startswith(_OURS_OUTSIDE) for base in type(model).__mro__):
        return True
    if model.price is not None:
        return any(getattr(model.price, name) for name in ("input", "output", "cached", "stored"))
    return is_priced(model.provider, model.name, None)
