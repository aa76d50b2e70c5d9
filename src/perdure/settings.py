"""One frozen Settings: every number that can be turned, with its unit, its default and its reason."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

# The description is what an error says when a value will not do.
Span = Annotated[float, Meta(ge=0, le=1e9, description="a number of seconds, 0 or more")]
Period = Annotated[float, Meta(gt=0, le=1e9, description="a number of seconds above 0")]
Count = Annotated[int, Meta(ge=1, le=2**40, description="a whole number, 1 or more")]
Connections = Annotated[int, Meta(ge=3, le=2**40, description="a whole number, 3 or more")]
Synchronous = Annotated[Literal["full", "normal"], Meta(description='"full" or "normal"')]
Text = Annotated[str, Meta(description="text")]


class Queue(Struct, frozen=True, forbid_unknown_fields=True):
    """How much of one queue may be worked on at a time, over all workers."""

    concurrency: Count | None = None
    per_tenant: Count | None = None


Queues = Annotated[dict[str, Queue], Meta(description="a table of queues: [queues.NAME] with concurrency and per_tenant")]
Roles = Annotated[dict[str, tuple[str, ...]], Meta(description='a table of roles: finance = ["ann", "bob"]')]
Hosts = Annotated[tuple[str, ...], Meta(description='a list of host names, such as ["hooks.example.com"]')]

HIDDEN = frozenset(("webhook_secret", "webhook_url"))  # an address of a webhook is often all that one needs to write to it


class Settings(Struct, frozen=True, forbid_unknown_fields=True):
    """Where a value comes from: a flag, then PERDURE_<NAME>, then perdure.toml or [tool.perdure], then the default here."""

    url: Text = "sqlite:///perdure.db"
    lease_s: Period = 30.0  # without a sign of life for this long a worker counts as dead, even if its process exists
    synchronous: Synchronous = "full"  # "normal" survives a killed process but not a power loss; there is nothing below it
    answer_s: Period = 10.0  # how long a database may take to answer before its connection is closed and the wait ends
    # That one process has open to PostgreSQL at most, beside the one that listens. At least 3: one for the transaction that a tool has in
    # its hands, and meanwhile one to renew the leases and one to append what other runs do.
    connections: Connections = 10
    concurrency: Count = 200  # runs that one worker drives at a time
    threads: Count = 64  # sync tools that run at a time in one worker
    drain_timeout_s: Span = 30.0
    flush_s: Span = 0.05  # how long results of `read` calls may wait for the next commit
    poll_s: Period = 0.25  # how often the database is asked whether anything has changed, should nobody have rung
    park_after_s: Span = 1.0  # a run that only waits for longer than this is given up by its worker until then
    cancel_grace_s: Span = 5.0  # how long a timed-out or cancelled tool gets to end by itself
    reconcile_margin_s: Span = 2.0  # waited before a reconcile hook is asked; and `settle` of a tool that does not say
    unknown_deadline_s: Span = 60.0  # taken as time-out of an attempt whose tool has none, before "not found" is believed about it
    reconcile_asks: Count = 20  # "in progress" answers before a person is asked
    poison_limit: Count = 5  # workers that may die on a run in a row, without progress, before it is parked: see core/suspects.py
    inline_bytes: Count = 65536  # payloads above this go to the blob store
    max_steps: Count = 1_000_000  # steps of an agent between two completions before it counts as stuck
    linger_s: Span = 0.1  # a run that waits for children is kept this long after the last of them, since more may end at once
    queues: Queues = {}
    # Part of the idempotency key of every call. For two journals that share an account at a provider and may use the same run ids.
    key_namespace: Text = ""
    roles: Roles = {}  # who may decide what is asked of "role:finance"
    webhook_url: Text = ""  # where notices go, signed; "" means: only to the log
    webhook_secret: Text = ""
    webhook_hosts: Hosts = ()  # where webhook_url may point to; empty: only to loopback

    def __repr__(self) -> str:
        return f"Settings({', '.join(f'{name}={value!r}' for name, value in self.__rich_repr__())})"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        # Settings end up in logs and tracebacks; the secret, and an address that can be one, must not (G15).
        shown = ((name, getattr(self, name)) for name in self.__struct_fields__)
        return [(name, "(set)" if value and name in HIDDEN else value) for name, value in shown]
