"""Call: what a tool's function knows about its call. Also: how the result of a tool's function is recorded."""

from __future__ import annotations

import inspect
import secrets
import threading
import time
from collections.abc import Callable, Coroutine, Hashable
from datetime import datetime
from decimal import Decimal
from typing import Any

from msgspec import structs

from perdure.core.budget import micros
from perdure.core.codec import canonical, decode, encode
from perdure.core.events import Failure, Usage
from perdure.core.failures import describe
from perdure.core.outcomes import Returned, Unrecordable
from perdure.core.redaction import Scrubber
from perdure.core.trace_context import SpanContext
from perdure.errors import InvalidInput, NotEncodable
from perdure.interrupts import is_interrupt
from perdure.tool import artifact
from perdure.tool.artifact import Artifact, Data, NoVault, Pending, Vault
from perdure.tool.spend import added, capped, checked

Closer = Callable[[], Coroutine[Any, Any, None]]

MAX_PROGRESS_BYTES = 32_768  # a limit, since progress is stored every few seconds and recorded with the attempt's end
# One lock for all calls: the lock is held only for an addition, and a lock in each Call would take memory.
_ADDING = threading.Lock()
_OUTSIDE = "an artifact belongs to a run: call the tool from an agent"
_IN_TRANSACTION = "a transaction tool cannot save an artifact: the journal's database waits for the end of the transaction. Save it in another tool before"


class Call:
    """One attempt of one call, as the tool sees it.

    If the tool's function has a parameter with the annotation `Call`, that parameter receives this object. That
    parameter is not an argument of the tool.

    A Call has the `run_id`, the `number` of the call in its run, the number of the `attempt` (from 1), the `deadline`
    of the attempt (None: no time-out), and the run's `tenant`, `actor` and `agent` (the agent's name).

    `last_progress` is what an earlier attempt of this call last reported with `heartbeat`; None if it reported
    nothing. After a crash it is the last progress that was stored, which may be some seconds older. It is a hint about
    the tool's own work and proves nothing about the effect. A reconcile hook gets it too.
    """

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
        agent: str = "",
        connection: Any = None,
        last_progress: Any = None,
        on_heartbeat: Callable[[Call], None] | None = None,
        on_spend: Callable[[Usage], None] | None = None,
        closers: dict[Hashable, Closer] | None = None,
        vaults: Callable[[Call], Vault] | None = None,
        secrets: Callable[[str], Any] | None = None,
        reads_only: bool = False,
        span: SpanContext | Callable[[], SpanContext] | None = None,
        on_enter: Callable[[Call], Callable[[], None]] | None = None,
    ) -> None:
        self._key = key
        self._span = span
        # Called where the tool's function is about to run: makes the attempt's span the current one, with telemetry on.
        # What it returns undoes that.
        self.on_enter = on_enter
        self.reads_only = reads_only  # the tool is called by a rehearsal, where no tool with an effect may be called
        self.run_id = run_id
        self.number = number
        self.attempt = attempt
        self.deadline = deadline
        self.tenant = tenant
        self.actor = actor
        self.agent = agent
        self.last_progress = last_progress
        self._progress: bytes | None = None
        self._connection = connection
        self._on_heartbeat = on_heartbeat
        self._on_spend = on_spend
        self._closers = closers
        self._vaults = vaults
        self.secrets = secrets  # the resolver: where the values of secrets come from
        self.scrubber: Scrubber | None = None  # the values of the secrets of this attempt; None: it has no secrets
        self.clock: Callable[[], float] = time.monotonic  # with a heartbeat time-out: the clock of the attempt's loop
        self.heard_s = 0.0  # the time of the last heartbeat, by `clock`
        self.keeps = False  # the keeper of progress was told that there is a new progress (engine/local/progress.py)
        self.over = False  # the attempt has ended: its last progress is recorded with its end
        self._usage: Usage | None = None
        self._cancelled = False

    @classmethod
    def outside(cls) -> Call:
        """The Call of a tool that was called outside of an agent. This Call has no run, and its key is random."""
        return cls(key=secrets.token_hex(32), run_id="", number=0, attempt=1, deadline=None, tenant="", actor=None)

    @property
    def key(self) -> str:
        """The idempotency key to send: the same for every attempt of this call, and different for every other call."""
        if not isinstance(self._key, str):
            self._key = self._key()
        return self._key

    @property
    def span(self) -> SpanContext | None:
        """The span of this attempt; if this worker reports no spans, the one that has started the run, if it is known."""
        if callable(self._span):
            self._span = self._span()
        return self._span

    @property
    def headers(self) -> dict[str, str]:
        """The trace context to send with a request: `traceparent`, and `tracestate` if there is one (W3C Trace Context).

        Empty if this worker reports no spans and the run was not started inside a trace. Clients that are instrumented with
        OpenTelemetry send these headers themselves.
        """
        return {} if self.span is None else self.span.headers

    @property
    def cancelled(self) -> bool:
        """Should the tool stop, because of a time-out, a cancel or a drain? A slow sync tool should check this."""
        return self._cancelled

    @property
    def connection(self) -> Any:
        """Only for `effect="transaction"`: the connection of the journal's own transaction.

        Everything that the tool writes with this connection is committed together with the result of the call.
        """
        if self._connection is None:
            raise InvalidInput('call.connection exists only in a tool with effect="transaction" that an agent has called')
        return self._connection

    def sqlalchemy(self) -> Any:
        """Only for `effect="transaction"` and a journal in PostgreSQL: a Connection of SQLAlchemy in that transaction.

        It has the limits of `connection`: no transaction control, and nothing in perdure's own tables. SQLAlchemy 2 must
        be installed. Each use in a call returns the same object, which ends with the tool.
        """
        return self.connection.sqlalchemy()

    def session(self) -> Any:
        """Like `sqlalchemy`, for the ORM: a Session in the transaction of this tool.

        What is pending is sent when the tool has returned, or by `session.flush()`. `session.commit()` is refused: the
        journal commits the rows together with the result of the call.
        """
        return self.connection.session()

    def save(self, data: Data, *, content_type: str = "application/octet-stream") -> Pending[Artifact]:
        """Store large bytes. Returns a pointer: `await call.save(…)`, or `call.save(…).wait()` in a sync tool.

        `data` is bytes, the path of a file, a binary file, or an iterator of bytes, sync or async. Of a file or an
        iterator, only some chunks are in memory at a time. The bytes are durable before the call's result is recorded.
        Return the artifact, or a value that contains it: an artifact that no result of its call names is an orphan,
        which `perdure prune --orphans` deletes. ArtifactNotSaved if the bytes are too large for the database and the
        setting `artifacts` names no other place, if that place cannot be reached, or if a secret of this attempt is in the
        bytes.
        """
        if self._connection is not None:
            return artifact.save(NoVault(_IN_TRANSACTION), data, content_type)
        return artifact.save(self.vault, data, self.scrub(content_type), self.scrubber)

    @property
    def vault(self) -> Vault:
        """Saves and opens the artifacts of this call. Tools use `Call.save` and `Artifact.open` instead."""
        return NoVault(_OUTSIDE) if self._vaults is None else self._vaults(self)

    def heartbeat(self, progress: Any = None) -> None:
        """Give a sign of life, and report the progress of the tool: any value of at most 32 KiB that JSON can hold.

        Without a value, this is only a sign of life, and the last progress stays. Any thread may call this, any number
        of times. The last progress is shown to people, is stored every few seconds, is recorded with the end of the
        attempt, and the next attempt gets it as `last_progress`. NotEncodable is raised if the value is too large, or
        not JSON; then the last progress stays. If the tool does not catch this exception, the attempt has failed,
        although its effect may have happened.
        """
        if progress is not None:
            encoded = self._without_secrets(encode(progress))
            if len(encoded) > MAX_PROGRESS_BYTES:
                raise NotEncodable(
                    f"call.heartbeat: the progress takes {len(encoded):,} bytes as JSON; the limit is {MAX_PROGRESS_BYTES:,}: "
                    "store it elsewhere and report a reference"
                )
            self._progress = encoded
        self.heard_s = self.clock()
        if self._on_heartbeat is not None:
            self._on_heartbeat(self)

    def hear(self, progress: bytes | None) -> None:
        """Take a heartbeat from the isolated process of the tool. ValueError if the progress in it is not valid."""
        if progress:
            if len(progress) > MAX_PROGRESS_BYTES:
                raise ValueError(f"a heartbeat of {len(progress):,} bytes")
            self._progress = self._without_secrets(canonical(progress, "the heartbeat"))
        self.heard_s = self.clock()
        if self._on_heartbeat is not None:
            self._on_heartbeat(self)

    @property
    def progress(self) -> Any:
        """What this attempt last reported with `heartbeat`; None if it reported nothing."""
        return None if self._progress is None else decode(self._progress)

    @property
    def progress_json(self) -> bytes | None:
        return self._progress

    def spend(
        self,
        *,
        usd: float | str | Decimal = 0,
        tokens_in: int = 0,
        tokens_out: int = 0,
        tokens_cached: int = 0,
        model: str | None = None,
    ) -> None:
        """Add to what this attempt has used. Any thread may call this, any number of times, also before a failure.

        The sum of these amounts replaces the tool's `cost=`, even if the sum is zero: `call.spend(usd=0)`.
        InvalidInput is raised if a value is not an amount; then nothing is added. If the tool does not catch this
        exception, the attempt has failed, although its effect may have happened. So catch the exception if the values
        come from a service.
        """
        more = checked(Usage(micros(usd, "call.spend(usd=)"), tokens_in, tokens_out, tokens_cached, self.scrub(model)), "call.spend()")
        with _ADDING:
            self._usage = checked(added(self._usage, more), "call.spend(), with what was spent before")
        if self._on_spend is not None:
            self._on_spend(more)

    @property
    def usage(self) -> Usage | None:
        """What this attempt has used so far; None if `spend` was not called."""
        return self._usage

    def add_usage(self, more: Usage) -> None:
        """Add what the isolated process of the tool has spent.

        A sum that is too large is cut to the maximum. An exception here would lose the answer of the tool.
        """
        more = structs.replace(more, model=self.scrub(more.model))
        with _ADDING:
            self._usage = capped(added(self._usage, more))

    def scrub(self, text: Any) -> Any:
        """The text without the secrets of this attempt. A value that is no text is returned as it is."""
        return text if self.scrubber is None or not isinstance(text, str) else self.scrubber.text(text)

    def _without_secrets(self, encoded: bytes) -> bytes:
        return encoded if self.scrubber is None else self.scrubber.json(encoded)

    def at_end(self, owner: Hashable, close: Closer) -> bool:
        """Await `close()` when the worker of this call ends, once for each `owner`. Returns True if `owner` is new.

        Use this for a thing that exists longer than the call, such as a connection or a process. Call this method on
        the thread of the event loop. Outside of a run there is no worker, and the method returns False.
        """
        if self._closers is None or owner in self._closers:
            return False
        self._closers[owner] = close
        return True

    def ask_to_stop(self) -> None:
        """Set `cancelled` to True. This interrupts nothing."""
        self._cancelled = True

    def __repr__(self) -> str:
        return f"<Call {self.number} of run {self.run_id or '(none)'}, attempt {self.attempt}>"


def recordable(tool: Any, value: Any, call: Call) -> Returned | Unrecordable:
    """The end of an attempt whose function returned this value.

    A secret in the result is replaced. To refuse the result would be worse: the effect has happened.
    """
    try:
        return Returned(call._without_secrets(tool.encode_result(value)))
    except BaseException as error:  # the effect has happened: an error here must not count as a failure of the call
        if inspect.iscoroutine(value):
            value.close()
        if is_interrupt(error):
            raise
        kind = "NotEncodable" if isinstance(error, NotEncodable) else type(error).__name__
        return Unrecordable(Failure(kind="not_encodable", type=kind, message=describe(error, scrub=call.scrub).message))
