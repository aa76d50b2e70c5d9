"""Wraps tools, models and reconcile hooks: each call and each return writes a line to the ledger."""

from __future__ import annotations

import asyncio
import copy
import inspect
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial, wraps
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct

from perdure.core.events import OF_MODEL
from perdure.core.outcomes import Returned
from perdure.models.prices import is_priced
from perdure.testing.lab.carrier import Late, Note, Perform
from perdure.testing.lab.ledger import EffectLedger
from perdure.testing.lab.warp import Warp
from perdure.tool import Call, Hook, Outcome
from perdure.tool.call import recordable

# A Begun is called right after the line `begun` was written to the ledger. It gets a Perform, which calls the tool's
# function, and a Note, which writes the end to the ledger. It returns a function to call right before that end.
Begun = Callable[[Call, Any, Perform, Note], Callable[[], None]]
_MOST_BYTES = 65_536  # for a larger file, only the size and the times are compared
_OURS_OUTSIDE = ("perdure.models.anthropic", "perdure.models.openai")


class Around(Struct, frozen=True):
    """What is done around a function. `before` and `after` may block. For an async function they run in a thread."""

    noted: Callable[[Any], Any]  # gets the function's result, and returns the result that the caller gets
    before: Callable[[], None] | None = None
    after: Callable[[], None] | None = None


class Counting:
    """Makes the counted versions of tools, in one process."""

    def __init__(self, ledger: EffectLedger, warp: Warp, begun: Begun, late: Late, settle_s: float, world: Path | None = None) -> None:
        """`settle_s`: for tools without `settle`. `world`: the working folder; None: its changes are not noted."""
        self._late = late
        self._settle_s = settle_s
        self._world = world
        self._ledger = ledger
        self._warp = warp
        self._begun = begun

    def counted(self, tool: Any) -> Any:
        """A copy of the tool or model call. The copy and its reconcile hook write their calls to the ledger."""
        if tool.isolate:
            # The tool's function runs in another process, which imports the function by name. So its calls cannot be
            # counted. This process does not know whether the function is under way, so the clock must not jump any
            # more.
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
        counted.fn = self._around(tool.fn, lambda perform: self._calling(tool, given[0], perform))
        if tool.reconciler is not None:
            counted.reconciler = self._hook(tool, tool.reconciler)
        return counted

    def _around(self, fn: Callable[..., Any], calling: Callable[[Perform], AbstractContextManager[Around]]) -> Callable[..., Any]:
        if inspect.iscoroutinefunction(fn):

            @wraps(fn)
            async def counting_async(**kwargs: Any) -> Any:
                with calling(partial(fn, **kwargs)) as around:
                    if around.before is not None:
                        await asyncio.to_thread(around.before)
                    value = around.noted(await fn(**kwargs))
                    if around.after is not None:
                        await asyncio.to_thread(around.after)
                    return value

            return counting_async

        @wraps(fn)
        def counting(**kwargs: Any) -> Any:
            with calling(partial(fn, **kwargs)) as around:
                if around.before is not None:
                    around.before()
                value = around.noted(fn(**kwargs))
                if around.after is not None:
                    around.after()
                return value

        return counting

    @contextmanager
    def _calling(self, tool: Any, call: Call, perform: Perform) -> Iterator[Around]:
        about = {**_about(tool, call), "outside": _is_paid(tool)}
        ended = False

        def note(fact: Literal["returned", "raised"], value: Any) -> None:
            result = _shown(tool, value, call) if fact == "returned" else call.scrub(type(value).__name__)
            self._ledger.note(fact, **about, result=result)

        def returned(value: Any) -> Any:
            nonlocal ended
            over()
            note("returned", value)
            ended = True
            return value

        before = None if self._world is None else _look_of(self._world)
        with self._warp.real_time():
            self._ledger.note("begun", **about)
            over = self._begun(call, tool, perform, note)
            try:
                # If a late request of this call still waits, no hook was asked, and the call is made again with its
                # key. The late request arrives right after the call.
                yield Around(returned, after=self._arrival(call))
            except BaseException as error:
                if not ended:
                    over()
                    note("raised", error)
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
        counted.fn = self._around(hook.fn, lambda perform: self._asking(tool, given[0]))
        return counted

    @contextmanager
    def _asking(self, tool: Any, call: Call) -> Iterator[Around]:
        about = _about(tool, call)
        settle_s = self._settle_s if tool.settle_s is None else tool.settle_s
        hurried = False

        def show() -> None:
            nonlocal hurried
            hurried = not self._late.show(call.run_id, call.number, settle_s)

        def told(value: Any) -> Any:
            said = self._heard(value, about, hurried=hurried)
            kind, final = (said.kind, said.final) if isinstance(said, Outcome) else (type(said).__name__, False)
            self._ledger.note("told", **about, result=kind, final=final)
            return said

        with self._warp.real_time():
            self._ledger.note("asked", **about)
            yield Around(told, before=show if self._late.has_sent(call.run_id, call.number) else None, after=self._arrival(call))

    def _arrival(self, call: Call) -> Callable[[], None] | None:
        waiting = self._late.is_waiting(call.run_id, call.number)
        return partial(self._late.arrive, call.run_id, call.number) if waiting else None

    def _heard(self, said: Any, about: dict[str, Any], *, hurried: bool) -> Any:
        """The hook's answer. If the lab has waited less than perdure would have, a "not found" becomes unknown."""
        place, kind = (about["run"], about["call"]), said.kind if isinstance(said, Outcome) else ""
        if kind == "in_progress":
            self._warp.expect(place, about["tool"])
        else:
            self._warp.settle(place)
        if kind != "not_happened" or not (hurried or self._warp.is_hurried(about["tool"])):
            return said
        self._ledger.note("unwaited", **about)
        return Outcome.unknown("the hook found nothing, but the crash lab has not waited long enough to believe that")


def _look_of(folder: Path) -> dict[str, tuple[int, ...]]:
    """The state of the folder: names, sizes, times, and checksums of small files.

    The checksum finds a change that is so soon after another change that the file has the same time.
    """
    found: dict[str, tuple[int, ...]] = {}
    for root, folders, names in os.walk(folder):
        found.update((os.path.join(root, name), ()) for name in folders)
        for name in names:
            path = os.path.join(root, name)
            try:
                stat = os.lstat(path)
                small = Path(path).read_bytes() if os.path.isfile(path) and stat.st_size <= _MOST_BYTES else b""
            except OSError:
                continue  # another call has removed the file meanwhile
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


def _shown(tool: Any, value: Any, call: Call) -> str | None:
    """The result as the journal has it: without secrets."""
    answer = recordable(tool, value, call)
    return answer.result.decode() if isinstance(answer, Returned) else None


def _is_paid(tool: Any) -> bool:
    """Does a call cost money? Yes for perdure's own providers, and for a user's model that has a price."""
    if tool.events is not OF_MODEL:
        return False
    model = tool.model
    if any(base.__module__.startswith(_OURS_OUTSIDE) for base in type(model).__mro__):
        return True
    if model.price is not None:
        return any(getattr(model.price, name) for name in ("input", "output", "cached", "stored"))
    return is_priced(model.provider, model.name, None)
