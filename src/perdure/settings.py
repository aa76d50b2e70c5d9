"""Settings: every option of perdure, with its unit, its default and its reason."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

# The error message about a wrong value uses this description.
Span = Annotated[float, Meta(ge=0, le=1e9, description="a number of seconds, 0 or more")]
Period = Annotated[float, Meta(gt=0, le=1e9, description="a number of seconds above 0")]
Count = Annotated[int, Meta(ge=1, le=2**40, description="a whole number, 1 or more")]
Amount = Annotated[int, Meta(ge=0, le=2**40, description="a whole number, 0 or more")]
Connections = Annotated[int, Meta(ge=3, le=2**40, description="a whole number, 3 or more")]
Synchronous = Annotated[Literal["full", "normal"], Meta(description='"full" or "normal"')]
TelemetryLevel = Annotated[Literal["off", "on", "payloads"], Meta(description='"off", "on" or "payloads"')]
LogFormat = Annotated[Literal["", "text", "json"], Meta(description='"text" or "json"')]
Text = Annotated[str, Meta(description="text")]


class Queue(Struct, frozen=True, forbid_unknown_fields=True):
    """How many runs of one queue workers may drive at the same time, over all workers."""

    concurrency: Count | None = None
    per_tenant: Count | None = None


Queues = Annotated[dict[str, Queue], Meta(description="a table of queues: [queues.NAME] with concurrency and per_tenant")]
Roles = Annotated[dict[str, tuple[str, ...]], Meta(description='a table of roles: finance = ["ann", "bob"]')]
Hosts = Annotated[tuple[str, ...], Meta(description='a list of host names, such as ["hooks.example.com"]')]

# Settings that are never shown. The URL is one of them: for many services the URL alone is enough to post a message.
HIDDEN = frozenset(("webhook_secret", "webhook_url"))


class Settings(Struct, frozen=True, forbid_unknown_fields=True):
    """All settings.

    The first source that has a setting counts: a flag, then PERDURE_<NAME>, then perdure.toml or [tool.perdure], then
    the default here.
    """

    url: Text = "sqlite:///perdure.db"
    lease_s: Period = 30.0  # a worker without a heartbeat for this long counts as dead, even if its process exists
    synchronous: Synchronous = "full"  # "normal" survives a killed process but not a power loss
    answer_s: Period = 10.0  # if the database does not answer for this long, its connection is closed
    # The most connections of one process to PostgreSQL, besides the connection that listens. At least 3 are needed at
    # the same time: for the transaction of a tool, to renew the leases, and to append the events of other runs.
    connections: Connections = 10
    concurrency: Count = 200  # how many runs one worker drives at the same time
    threads: Count = 64  # how many sync tools run at the same time in one worker
    drain_timeout_s: Span = 30.0
    flush_s: Span = 0.05  # how long results of `read` calls may wait for the next commit
    progress_s: Span = 2.0  # the progress of calls is stored at most this often; 0: with every iteration of the loop
    poll_s: Period = 0.25  # how often the database is polled for changes, in case a bell was missed
    park_after_s: Span = 1.0  # a run with nothing to do for longer than this is parked
    cancel_grace_s: Span = 5.0  # how long a timed-out or cancelled tool may take to stop
    reconcile_margin_s: Span = 2.0  # the wait before a reconcile hook is asked; also the default `settle` of a tool
    # The time-out that is assumed for a tool without one. It decides when a "not found" of its reconcile hook counts.
    unknown_deadline_s: Span = 60.0
    reconcile_asks: Count = 20  # after this many answers "in progress" a person is asked
    # If this many workers in a row died while they held a run, and the run made no progress, the run may count as
    # poison: see core/suspects.py.
    poison_limit: Count = 5
    inline_bytes: Count = 65536  # payloads above this size are stored as blobs
    # Where artifacts go that are larger than `artifact_database_bytes`: file:///absolute/folder or s3://bucket/prefix.
    # If this is empty, larger artifacts are refused.
    artifacts: Text = ""
    artifact_database_bytes: Count = 64 * 1024 * 1024  # artifacts up to this size are stored in the journal's database
    # Where the values of secrets come from. Empty: the environment, PERDURE_SECRET_<NAME>. file:///absolute/folder: one
    # file for each secret. python:MODULE:FUNCTION: a function that takes the name; not in a settings file.
    secrets: Text = ""
    max_steps: Count = 1_000_000  # an agent with more steps than this between two completions counts as stuck
    # After the end of a child or a decision about an approval, the worker holds the run for this long, because more
    # post may follow.
    linger_s: Span = 0.1
    # A worker keeps this many parked runs in memory, with at most this many MB by estimate. Such a run continues
    # without a replay. 0: no parked run is kept.
    cache_runs: Amount = 256
    cache_mb: Amount = 64
    queues: Queues = {}
    # Part of the idempotency key of every call. Set it if two journals use the same account at a provider and may have
    # equal run ids.
    key_namespace: Text = ""
    roles: Roles = {}  # role → the people who have this role, for approvals by "role:finance"
    # The log of a worker. If this is empty, the log is text, and has only what perdure itself says.
    log_format: LogFormat = ""
    # Whether workers report spans to OpenTelemetry. "payloads": with arguments and results of calls.
    telemetry: TelemetryLevel = "off"
    webhook_url: Text = ""  # where signed notices are sent; if empty, notices go only to the log
    webhook_secret: Text = ""
    webhook_hosts: Hosts = ()  # the hosts that webhook_url may name; if empty, only loopback is allowed

    def __repr__(self) -> str:
        return f"Settings({', '.join(f'{name}={value!r}' for name, value in self.__rich_repr__())})"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        # Settings may appear in logs and tracebacks. The secret and the URL of the webhook must not appear there
        # (G15).
        shown = ((name, getattr(self, name)) for name in self.__struct_fields__)
        return [(name, "(set)" if value and name in HIDDEN else value) for name, value in shown]
