"""What a tool's function is told about its call, and how what it returns is recorded."""

from __future__ import annotations

import inspect
import secrets
import threading
from collections.abc import Callable, Coroutine, Hashable
from datetime import datetime
from decimal import Decimal
from typing import Any

from perdure.core.attempts import Returned, Unrecordable
from perdure.core.budget import micros
from perdure.core.codec import decode, encode
from perdure.core.events import Failure, Usage
from perdure.core.failures import describe
from perdure.errors import InvalidInput, NotEncodable
from perdure.interrupts import is_interrupt
from perdure.tool.spend import added, capped, checked

Closer = Callable[[], Coroutine[Any, Any, None]]

# One for all calls: it is held for an addition, and there is a Call for everything in flight.
_ADDING = threading.Lock()


class Call:
    """One attempt at one call, as its tool sees it. A parameter annotated with `Call` receives it; it is never an argument."""

    def __init__(
        self,
        *,
        key: str | Callable[[], str],
        run_id: str,
        number: int,
        attempt: int,
        deadline: datetime | None,
        tenant: str,
        actor: str | None,
        connection: Any = None,
        on_heartbeat: Callable[[Any], None] | None = None,
        on_spend: Callable[[Usage], None] | None = None,
        closers: dict[Hashable, Closer] | None = None,
    ) -> None:
        self._key = key
        self.run_id = run_id
        self.number = number
        self.attempt = attempt
        self.deadline = deadline
        self.tenant = tenant
        self.actor = actor
        self.progress: Any = None
        self._connection = connection
        self._on_heartbeat = on_heartbeat
        self._on_spend = on_spend
        self._closers = closers
        self._usage: Usage | None = None
        self._cancelled = False

    @classmethod
    def outside(cls) -> Call:
        """A call that belongs to no run: the tool was called outside an agent. Its key is random."""
        return cls(key=secrets.token_hex(32), run_id="", number=0, attempt=1, deadline=None, tenant="", actor=None)

    @property
    def key(self) -> str:
        """The same for every attempt, different for every call: send it as the idempotency key."""
        if not isinstance(self._key, str):
            self._key = self._key()
        return self._key

    @property
    def cancelled(self) -> bool:
        """True once a time-out, a cancel or a drain wants the tool to stop. A sync tool that works for long looks at it."""
        return self._cancelled

    @property
    def connection(self) -> Any:
        """The journal's own transaction: what is written through it commits together with the call's result."""
        if self._connection is None:
            raise InvalidInput('call.connection exists only in a tool with effect="transaction" that an agent has called')
        return self._connection

    def heartbeat(self, progress: Any = None) -> None:
        """Say how far the tool has come, in anything that JSON can hold. From any thread."""
        self.progress = decode(encode(progress))
        if self._on_heartbeat is not None:
            self._on_heartbeat(self.progress)

    def spend(
        self,
        *,
        usd: float | str | Decimal = 0,
        tokens_in: int = 0,
        tokens_out: int = 0,
        tokens_cached: int = 0,
        model: str | None = None,
    ) -> None:
        """Add to what this attempt has used. From any thread, as often as there is something to add, and before a failure too.

        What is said here takes the place of the tool's `cost=`, also when it is nothing: `call.spend(usd=0)`.
        What is no amount is InvalidInput, raised before anything is added. Left to fly it fails the attempt, though its effect may
        have happened: catch it where the figures are somebody else's.
        """
        more = checked(Usage(micros(usd, "call.spend(usd=)"), tokens_in, tokens_out, tokens_cached, model), "call.spend()")
        with _ADDING:
            self._usage = checked(added(self._usage, more), "call.spend(), with what was spent before")
        if self._on_spend is not None:
            self._on_spend(more)

    @property
    def usage(self) -> Usage | None:
        """What this attempt has used so far; None if it has said nothing."""
        return self._usage

    def add_usage(self, more: Usage) -> None:
        """Count what the tool's own process has spent. Never refuses: the money is gone, and so would be the tool's answer."""
        with _ADDING:
            self._usage = capped(added(self._usage, more))

    def at_end(self, owner: Hashable, close: Closer) -> bool:
        """Have `close` awaited when the worker that makes this call ends, once for each owner; whether that is news.

        For what outlives a call: connections, processes. On the loop's own thread. Outside a run there is no worker, and it is False.
        """
        if self._closers is None or owner in self._closers:
            return False
        self._closers[owner] = close
        return True

    def ask_to_stop(self) -> None:
        """Make `cancelled` True. Nothing is interrupted by it."""
        self._cancelled = True

    def __repr__(self) -> str:
        return f"<Call {self.number} of run {self.run_id or '(none)'}, attempt {self.attempt}>"


def recordable(tool: Any, value: Any) -> Returned | Unrecordable:
    """The answer for a call whose function returned this value."""
    try:
        return Returned(tool.encode_result(value))
    except BaseException as error:  # the call has happened: whatever goes wrong from here on must not look like a failed call
        if inspect.iscoroutine(value):
            value.close()
        if is_interrupt(error):
            raise
        kind = "NotEncodable" if isinstance(error, NotEncodable) else type(error).__name__
        return Unrecordable(Failure(kind="not_encodable", type=kind, message=describe(error).message))
