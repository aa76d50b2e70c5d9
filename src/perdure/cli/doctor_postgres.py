"""The checks of `perdure doctor` for a PostgreSQL journal: durability, schema, clock, connections, rights, vacuum."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING

from perdure.cli import common
from perdure.engine.api import Reading
from perdure.errors import PerdureError
from perdure.inspect.health import Check
from perdure.inspect.text import span
from perdure.settings import Settings
from perdure.store.postgres.driver import require_psycopg

if TYPE_CHECKING:
    from perdure.store.postgres.health import Health

CLOCK_OFF_US = 2_000_000
FULL, NEARLY_FULL = 0.95, 0.8  # shares of max_connections
LONG_US = 600_000_000  # a transaction that is open for longer is reported: it stops vacuum
# A user without the rights in _WORK can neither start runs nor be a worker. A user without the rights in _ANY_WORK
# also cannot post to runs.
_WORK = frozenset(("INSERT on perdure_runs", "INSERT on perdure_workers"))
_ANY_WORK = _WORK | {"UPDATE on perdure_runs", "INSERT on perdure_events"}
DEAD_ROWS, DEAD_SHARE = 50_000, 2  # warn above DEAD_ROWS dead rows, if there are also DEAD_SHARE per live row


def server_checks(settings: Settings, inside: Callable[[Reading], Iterator[Check]]) -> Iterator[Check]:
    """The checks of the driver, the server and its journal. `inside` yields the checks for every kind of database."""
    try:
        has_journal = yield from _server(settings)
        if not has_journal:
            return
        with common.existing_runs(settings.url) as store:
            yield from inside(store)
    except PerdureError as error:
        yield Check("database", "FAIL", error.in_full(), "correct this first; nothing else can be checked before")


def _server(settings: Settings) -> Generator[Check, None, bool]:
    """The checks of the server. The return value says: is there a journal that this user may read?"""
    require_psycopg()
    from perdure.store.postgres.health import look

    health = look(settings.url, settings.answer_s)
    yield Check("database", "ok", f"{health.where}, schema {health.schema}: {health.size}")
    yield Check("server", "ok", f"PostgreSQL {health.server}")
    yield from _durability(health.settings)
    yield _schema(health)
    yield _clock(health.ahead_us)
    yield _connections(health.connections_used, health.max_connections)
    yield _doorbell(health.hears, health.direct)
    yield _rights(health.missing, health.missing_to_decide)
    yield from _vacuum(health)
    return bool(health.version) and not any(lack.startswith("SELECT") for lack in health.missing)


def _schema(health: Health) -> Check:
    if health.version is None:
        return Check("schema", "warn", f"there is a journal in schema {health.schema}, which this user may not read: see rights")
    if not health.version:
        return Check("schema", "warn", f"there is no journal in schema {health.schema} yet", "perdure migrate creates it")
    found = f"version {health.version} of {health.latest}"
    if health.version == health.latest:
        return Check("schema", "ok", found)
    # If this user lacks rights on the tables, the user is not their owner, and cannot migrate the tables.
    return Check("schema", "warn", found, "let the owner of the tables migrate them" if health.missing else "perdure migrate")


def _durability(settings: dict[str, str]) -> Iterator[Check]:
    if settings["fsync"] != "on":
        yield Check("fsync", "FAIL", "off: a power loss can lose acknowledged commits, or damage the database", "set fsync = on there")
    else:
        yield Check("fsync", "ok", "on")
    if settings["full_page_writes"] != "on":
        found = "off: a power loss can leave a page half written, unless the file system prevents that"
        yield Check("page writes", "warn", found, "set full_page_writes = on there")
    else:
        yield Check("page writes", "ok", "full")
    yield _commits(settings["synchronous_commit"], settings["synchronous_standby_names"])


def _commits(commits: str, standbys: str) -> Check:
    if commits == "local" and standbys:
        found = f"local: a commit does not wait for the standby ({standbys}), and a failover can lose it"
        return Check("commits", "warn", found, "ALTER ROLE … SET synchronous_commit = on")
    if not standbys:
        return Check(
            "commits", "ok", f"{commits}, no synchronous standby: commits survive a crash of the server, a failover may lose the last ones"
        )
    return Check("commits", "ok", f"{commits}, with {standbys}")


def _clock(ahead_us: int) -> Check:
    found = f"the server's clock is {abs(ahead_us) / 1e6:.3f} s {'ahead of' if ahead_us >= 0 else 'behind'} this machine's"
    if abs(ahead_us) > CLOCK_OFF_US:
        return Check("server clock", "warn", found, "set both by NTP; leases and timers use the server's clock")
    return Check("server clock", "ok", found)


def _connections(used: int, most: int) -> Check:
    found = f"{used} of max_connections = {most} are in use"
    way_out = "raise max_connections, lower `connections` in the workers' settings, or put a proxy in between (pgbouncer)"
    if used >= FULL * most:
        return Check("connections", "FAIL", found, way_out)
    return Check("connections", "warn", found, way_out) if used >= NEARLY_FULL * most else Check("connections", "ok", found)


def _doorbell(hears: bool, direct: bool) -> Check:
    if hears:
        return Check(
            "doorbell", "ok", "LISTEN works" + ("" if direct else ", through a proxy or a local socket: statements are not prepared")
        )
    found = "LISTEN does not work: the connection goes through a proxy that pools transactions"
    lost = "workers notice changes up to 0.25 s later, and a death on another machine only when its lease ends"
    return Check("doorbell", "warn", found, f"{lost}; connect to the server itself, or pool by session")


def _rights(missing: list[str], missing_to_decide: list[str]) -> Check:
    if not missing:
        return Check("rights", "ok", "this user may do all that a worker does")
    reads = not any(lack.startswith("SELECT") for lack in missing)
    if reads and not missing_to_decide and set(missing) >= _WORK:
        return Check("rights", "ok", "this user may read and decide approvals, but can neither be a worker nor start runs")
    if reads and set(missing) >= _ANY_WORK:
        return Check("rights", "ok", "this user may only read: it can neither be a worker nor start or steer runs")
    more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
    found = f"this user lacks {', '.join(missing[:5])}{more}"
    return Check("rights", "FAIL", found, "GRANT them as the owner of the tables; docs/security.md has the statements")


def _vacuum(health: Health) -> Iterator[Check]:
    worst = max(health.dead, key=lambda rows: rows.dead, default=None)
    if health.settings["autovacuum"] != "on" or health.settings["track_counts"] != "on":
        yield Check(
            "autovacuum", "FAIL", "off: tables whose rows change all the time grow without end", "set autovacuum and track_counts on"
        )
    elif worst is not None and worst.dead > max(DEAD_ROWS, DEAD_SHARE * worst.live):
        found = f"{worst.table} has {worst.dead:,} dead rows beside {worst.live:,} live ones"
        yield Check("autovacuum", "warn", found, f"VACUUM {worst.table}; then find out what keeps autovacuum from it")
    else:
        yield Check("autovacuum", "ok", "on" if worst is None else f"on; {worst.dead:,} dead rows in {worst.table}")
    if health.oldest is None or health.oldest.age_us < LONG_US:
        yield Check("transactions", "ok", "no transaction that this user can see has been open for long")
        return
    old = health.oldest
    found = f"process {old.pid} of the server ({old.program or 'no name'}, {old.state}) has had a transaction open for {span(old.age_us)}"
    yield Check("transactions", "warn", found, f"vacuum removes nothing while it is open: end it, SELECT pg_terminate_backend({old.pid})")
