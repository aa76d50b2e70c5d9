"""Workers that do not check an approval themselves, so that only the store protects it.

Two layers check an approval before its call begins, and each layer must be enough alone. A test removes the layer of
the worker with this module, and the layer of the store with a mutation. Only without both layers the effect happens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec import structs

from perdure.core import codec
from perdure.core.events import ApprovalDecided, Event, ToolCallInitiated
from perdure.core.machine import CallTool
from perdure.core.run_core import RunCore
from perdure.store.sql import SqlStore


def expiry() -> None:
    """An approved call starts, however late it is."""
    real = RunCore._start_approved

    def start(self: Any, call: Any) -> Any:
        ask = self.state.asks[call.number]
        known, ask.request = ask.request, structs.replace(ask.request, expires_at=None)
        yield from real(self, call)
        ask.request = known

    RunCore._start_approved = start  # type: ignore[method-assign]


def arguments() -> None:
    """An approved call starts with other arguments than those that were approved."""

    def consume(self: Any, call: Any, ask: Any, asked: Any) -> None:
        other = CallTool(asked.number, asked.tool, codec.encode({"what": "something else"}))
        self._asked[asked.number] = other
        body = ToolCallInitiated(
            tool=asked.tool.name,
            effect=asked.tool.effect,
            key=call.key,
            args=self._pack(other.args),
            digest=codec.digest(other.args),
            approval=ask.request.approval,
        )
        self._record(body, call=call.number, cause=call.last_seq)
        self._due.append(call.number)

    RunCore._consume = consume  # type: ignore[method-assign]


def verdict() -> None:
    """A call starts although it was rejected: the worker takes any answer for a yes."""
    real = SqlStore.read_life

    def read_life(self: Any, run_id: str) -> list[Event]:
        return [
            structs.replace(event, body=structs.replace(event.body, granted=True)) if isinstance(event.body, ApprovalDecided) else event
            for event in real(self, run_id)
        ]

    SqlStore.read_life = read_life  # type: ignore[method-assign]


CARELESS: dict[str, Callable[[], None]] = {found.__name__: found for found in (expiry, arguments, verdict)}
