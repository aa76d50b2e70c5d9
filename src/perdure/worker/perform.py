"""One effect, performed: a tool, its reconcile hook, or a tool inside the journal's own transaction."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from perdure.core.events import Failure
from perdure.errors import InvalidInput
from perdure.tool import Call, Outcome, Tool
from perdure.worker.answers import Abandoned, Performed, Raised, Returned, Unrecordable, recordable
from perdure.worker.attempt import Attempt, Body, InThread, OnLoop, begin, called
from perdure.worker.isolate import Isolated
from perdure.worker.threads import Threads

__all__ = [
    "Abandoned",
    "Attempt",
    "Performed",
    "Raised",
    "Returned",
    "Unrecordable",
    "attempt",
    "perform",
    "perform_in_transaction",
    "reconcile",
    "recordable",
]

_Answer = Returned | Unrecordable | Raised
RECONCILE_TIMEOUT_S = 60.0


def attempt(
    tool: Tool[..., Any], args: bytes, call: Call, *, threads: Threads, grace_s: float, is_too_late: Callable[[], bool] | None = None
) -> Attempt[Returned | Unrecordable]:
    """An attempt at the call, ready to run. `is_too_late` is asked when a thread is free for it: then it is not begun."""
    # Partials and not closures here: there is one of these for every call in flight, and each cell is one more for the collector.
    start = partial(_start, tool, args, call, threads, grace_s, is_too_late)
    return Attempt(start, call, what=f"tool {tool.name}", timeout_s=tool.timeout_s, grace_s=grace_s)


def _start(
    tool: Tool[..., Any], args: bytes, call: Call, threads: Threads, grace_s: float, is_too_late: Callable[[], bool] | None
) -> Body[Returned | Unrecordable | Raised]:
    if tool.isolate:
        process = Isolated(tool, args, call, None if tool.timeout_s is None else tool.timeout_s + grace_s)
        return InThread(threads, partial(_unless_too_late, is_too_late, process.run), process.stop)
    kwargs = tool.with_call(tool.arguments(args), call)
    if tool.is_async:
        return OnLoop(tool.fn(**kwargs), partial(recordable, tool))
    work = partial(called, tool.fn, kwargs, partial(recordable, tool))
    return InThread(threads, partial(_unless_too_late, is_too_late, work), _nothing)


def _nothing() -> None:
    pass


def _unless_too_late(is_too_late: Callable[[], bool] | None, work: Callable[[], _Answer]) -> _Answer:
    # The crash window: it waited for a free thread while this process slept past its lease. Another worker may have the run by now,
    # and have made the call.
    if is_too_late is not None and is_too_late():
        why = "it waited for a thread while its worker gave no sign of life for longer than its lease, and was not begun"
        return Raised(Failure(kind="not_sent", type="NotSent", message=why))
    return work()


async def perform(tool: Tool[..., Any], args: bytes, call: Call, *, threads: Threads, grace_s: float) -> Performed:
    """Perform the call once. Always returns, also when it is cancelled."""
    return await attempt(tool, args, call, threads=threads, grace_s=grace_s).run()


async def reconcile(tool: Tool[..., Any], args: bytes, call: Call, *, threads: Threads, grace_s: float) -> Outcome:
    """Ask the tool's reconcile hook what became of the call. Whatever goes wrong with the hook is `unknown`."""
    hook = tool.reconciler
    assert hook is not None, tool
    what = f"the reconcile hook of {tool.name}"
    timeout_s = tool.timeout_s or RECONCILE_TIMEOUT_S

    def start() -> Body[Outcome | Raised]:
        return begin(hook.fn, hook.is_async, hook.with_call(tool.arguments(args), call), lambda value: _outcome(value, what), threads)

    answer = await Attempt(start, call, what=what, timeout_s=timeout_s, grace_s=grace_s).run()
    if isinstance(answer, Outcome):
        return answer
    return Outcome.unknown(f"{what} failed: {answer.failure.type}: {answer.failure.message}")


def perform_in_transaction(tool: Tool[..., Any], args: bytes, call: Call) -> bytes:
    """Run the tool right here, inside the journal's transaction; when it raises, the transaction has to be rolled back."""
    kwargs = tool.with_call(tool.arguments(args), call)
    try:
        value = _stepped(tool, tool.fn(**kwargs)) if tool.is_async else tool.fn(**kwargs)
    except StopIteration as error:
        raise RuntimeError(f"tool {tool.name} raised StopIteration") from error  # no future and no coroutine can carry it
    return tool.encode_result(value)


def _outcome(value: Any, what: str) -> Outcome:
    if isinstance(value, Outcome) and value.kind in ("happened", "not_happened", "in_progress", "unknown"):
        return value
    if inspect.iscoroutine(value):
        value.close()
    return Outcome.unknown(
        f"{what} returned a {type(value).__name__}; it must return Outcome.happened(…), not_happened(), in_progress() or unknown(…)"
    )


def _stepped(tool: Tool[..., Any], coroutine: Coroutine[Any, Any, Any]) -> Any:
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value
    coroutine.close()
    raise InvalidInput(
        f"tool {tool.name}: a transaction tool may only use call.connection; it awaited something else, and nothing was written"
    )
