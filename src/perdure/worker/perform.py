"""One effect, performed: a tool, its reconcile hook, or a tool inside the journal's own transaction."""

from __future__ import annotations

import inspect
from collections.abc import Coroutine
from functools import partial
from typing import Any

from perdure.errors import InvalidInput
from perdure.tool import Call, Outcome, Tool
from perdure.worker.answers import Abandoned, Performed, Raised, Returned, Unrecordable, recordable
from perdure.worker.attempt import Attempt, Body, InThread, begin
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

RECONCILE_TIMEOUT_S = 60.0


def attempt(tool: Tool[..., Any], args: bytes, call: Call, *, threads: Threads, grace_s: float) -> Attempt[Returned | Unrecordable]:
    """An attempt at the call, ready to run."""
    # Partials and not closures here: there is one of these for every call in flight, and each cell is one more for the collector.
    start = partial(_start, tool, args, call, threads)
    return Attempt(start, call, what=f"tool {tool.name}", timeout_s=tool.timeout_s, grace_s=grace_s)


def _start(tool: Tool[..., Any], args: bytes, call: Call, threads: Threads) -> Body[Returned | Unrecordable | Raised]:
    if tool.isolate:
        process = Isolated(tool, args, call)
        return InThread(threads, process.run, process.stop)
    kwargs = tool.with_call(tool.arguments(args), call)
    return begin(tool.fn, tool.is_async, kwargs, partial(recordable, tool), threads)


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
