"""`app.start(…, connection=…)`: a row of the caller and its run are one commit, on both databases."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import apsw
import psycopg
import pytest
import sqlalchemy as sa
from psycopg.conninfo import conninfo_to_dict
from psycopg.rows import dict_row
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker
from tests.servers.postgres import Server
from tests.unit.drive_tools import SETTINGS, run
from tests.unit.postgres_tools import cleared, empty, eventually
from tests.unit.store_tools import end, first_line, python

from perdure import Call, Perdure, Run, agent, tool
from perdure import sync as blocking
from perdure.errors import Conflict, InvalidInput, NotFound, PerdureError, StoreError, StoreUnavailable, ToolFailed
from perdure.settings import Settings

_TICKETS = "CREATE TABLE tickets (id TEXT PRIMARY KEY)"


@agent(version="1")
async def handle_ticket(run: Run, ticket: str) -> str:
    return f"handled {ticket}"


class Place:
    """One database with a journal and a table of the caller's own."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.is_postgres = url.startswith("postgresql")
        self._opened: list[Any] = []
        with blocking.Perdure(url):
            pass  # creates the journal
        self.execute(_TICKETS)

    @property
    def path(self) -> str:
        return self.url.removeprefix("sqlite:///")

    def app(self, settings: Settings = SETTINGS) -> Perdure:
        return Perdure(self.url, [handle_ticket], settings=settings)

    def connect(self) -> Any:
        """A connection of the caller, with a transaction that has begun."""
        connection = self.connect_only()
        if not self.is_postgres:
            connection.set_busy_timeout(60_000)
            connection.execute("BEGIN IMMEDIATE")
        return connection

    def connect_only(self, **options: Any) -> Any:
        connection: Any = psycopg.connect(self.url, **options) if self.is_postgres else apsw.Connection(self.path)
        self._opened.append(connection)
        return connection

    def close(self) -> None:
        """End what a failed test has left open: its locks would stop the next test."""
        for connection in self._opened:
            connection.close()

    def execute(self, sql: str) -> list[Any]:
        """A statement in a commit of its own."""
        if self.is_postgres:
            with psycopg.connect(self.url, autocommit=True) as other:
                done = other.execute(sql.encode())
                return done.fetchall() if done.description else []
        connection = apsw.Connection(self.path)
        try:
            return list(connection.execute(sql))
        finally:
            connection.close()

    def counts(self) -> tuple[int, int, int]:
        """How many tickets, runs and events are committed."""
        ((tickets, runs, events),) = self.execute(
            "SELECT (SELECT count(*) FROM tickets), (SELECT count(*) FROM perdure_runs), (SELECT count(*) FROM perdure_events)"
        )
        return tickets, runs, events


@pytest.fixture(params=["sqlite", "postgres"])
def place(request: pytest.FixtureRequest) -> Place:
    found: Place = request.getfixturevalue(f"on_{request.param}")
    return found


@pytest.fixture
def on_postgres(postgres: Server) -> Iterator[Place]:
    with contextlib.closing(Place(cleared(postgres))) as made:
        yield made


@pytest.fixture
def on_sqlite(tmp_path: Path) -> Iterator[Place]:
    with contextlib.closing(Place(f"sqlite:///{tmp_path}/journal.db")) as made:
        yield made


def write(connection: Any, ticket: str) -> None:
    connection.execute(f"INSERT INTO tickets VALUES ('{ticket}')")


def commit(connection: Any) -> None:
    connection.execute("COMMIT")


def rollback(connection: Any) -> None:
    connection.execute("ROLLBACK")


# -- one commit -------------------------------------------------------------------------------------------------------
def test_a_row_and_its_run_are_one_commit(place: Place) -> None:
    async def both() -> Any:
        async with place.app() as app:
            connection = place.connect()
            write(connection, "t-1")
            handle = await app.start(handle_ticket, "t-1", id="ticket-t-1", labels={"ticket": "t-1"}, connection=connection)
            assert place.counts() == (0, 0, 0)
            with pytest.raises(NotFound):
                await handle.status()
            commit(connection)
            connection.close()
            assert place.counts() == (1, 1, 1)
            return await handle.result()

    assert run(both()) == "handled t-1"


def test_after_a_rollback_there_is_no_run_and_its_id_is_free(place: Place) -> None:
    async def neither() -> Any:
        async with place.app() as app:
            connection = place.connect()
            write(connection, "t-1")
            await app.start(handle_ticket, "t-1", id="ticket-t-1", connection=connection)
            rollback(connection)
            connection.close()
            assert place.counts() == (0, 0, 0)
            return await app.run(handle_ticket, "other", id="ticket-t-1")

    assert run(neither()) == "handled other"


def test_an_error_half_way_leaves_nothing_of_the_run_and_the_callers_transaction_goes_on(place: Place) -> None:
    """The caller catches the error and commits: a run without its first event would stop every worker that claims it."""
    refuse = "CREATE TRIGGER refuse BEFORE INSERT ON perdure_events BEGIN SELECT raise(ABORT, 'no more events'); END"
    if place.is_postgres:
        place.execute("CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'no more events'; END $$")
        refuse = "CREATE TRIGGER refuse BEFORE INSERT ON perdure_events FOR EACH ROW EXECUTE FUNCTION refuse()"

    async def caught() -> None:
        async with place.app() as app:
            place.execute(refuse)
            connection = place.connect()
            write(connection, "t-1")
            with pytest.raises(StoreError, match="no more events"):
                await app.start(handle_ticket, "t-1", id="ticket-t-1", connection=connection)
            write(connection, "t-2")
            commit(connection)
            connection.close()

    try:
        run(caught())
        assert place.counts() == (2, 0, 0)
    finally:
        if place.is_postgres:
            place.execute("DROP FUNCTION refuse CASCADE")


def test_a_refused_start_leaves_the_callers_transaction_as_it_was(place: Place) -> None:
    async def refused() -> None:
        async with place.app() as app:
            await app.start(handle_ticket, "t-1", id="ticket-t-1")
            connection = place.connect()
            write(connection, "t-1")
            with pytest.raises(Conflict):
                await app.start(handle_ticket, "another input", id="ticket-t-1", connection=connection)
            commit(connection)
            connection.close()

    run(refused())
    assert place.counts() == (1, 1, 1)


def test_the_same_id_in_one_transaction_and_after_it_is_one_run(place: Place) -> None:
    async def again() -> None:
        async with place.app() as app:
            connection = place.connect()
            for _ in range(2):
                await app.start(handle_ticket, "t-1", id="ticket-t-1", connection=connection)
            commit(connection)
            connection.close()
            await app.start(handle_ticket, "t-1", id="ticket-t-1")
            later = place.connect()
            await app.start(handle_ticket, "t-1", id="ticket-t-1", connection=later)
            commit(later)
            later.close()

    run(again())
    assert place.counts() == (0, 1, 1)


def test_many_starts_in_one_transaction_are_one_commit_and_all_of_them_run(place: Place) -> None:
    async def many() -> list[Any]:
        async with place.app() as app:
            connection = place.connect()
            large = "x" * 100_000  # a blob, which the runs share
            handles = [await app.start("handle_ticket", ticket=f"{large}{n % 2}", id=f"r-{n}", connection=connection) for n in range(12)]
            assert place.counts() == (0, 0, 0)
            commit(connection)
            connection.close()
            return [await handle.result() for handle in handles]

    assert len(run(many())) == 12
    assert place.counts()[1] == 12


def test_blocking_code_starts_a_run_in_its_own_transaction_too(place: Place) -> None:
    with blocking.Perdure(place.url, [handle_ticket], settings=SETTINGS) as app:
        connection = place.connect()
        write(connection, "t-1")
        handle = app.start(handle_ticket, "t-1", connection=connection)
        assert place.counts() == (0, 0, 0)
        commit(connection)
        connection.close()
        assert handle.result() == "handled t-1"


_VICTIM = """
import asyncio, sys, time
import apsw, psycopg
from perdure import Perdure

async def main(url, at):
    async with Perdure(url) as app:
        connection = psycopg.connect(url) if url.startswith("postgresql") else apsw.Connection(url.removeprefix("sqlite:///"))
        if not url.startswith("postgresql"):
            connection.execute("BEGIN IMMEDIATE")
        connection.execute("INSERT INTO tickets VALUES ('t-1')")
        if at == "before the start":
            print(at, flush=True); time.sleep(600)
        await app.start("handle_ticket", ticket="t-1", id="ticket-t-1", connection=connection)
        if at == "before the commit":
            print(at, flush=True); time.sleep(600)
        connection.execute("COMMIT")
        print(at, flush=True); time.sleep(600)

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("at", "left"), [pytest.param("before the start", 0, marks=pytest.mark.full), ("before the commit", 0), ("after the commit", 1)]
)
def test_a_process_that_is_killed_leaves_both_or_neither(place: Place, at: str, left: int) -> None:
    victim = python(_VICTIM, place.url, at)
    try:
        assert first_line(victim) == at
    finally:
        end(victim)
    assert eventually(lambda: place.counts() == (left, left, left))

    async def afterwards() -> Any:
        async with place.app() as app:
            return await app.run(handle_ticket, "t-1", id="ticket-t-1")

    assert run(afterwards()) == "handled t-1"


def test_a_worker_hears_the_commit_without_polling(on_postgres: Place) -> None:
    """The ring belongs to the caller's transaction, also for a worker in the same process."""

    async def heard() -> Any:
        async with on_postgres.app(Settings(poll_s=3600)) as app:
            stop = asyncio.Event()
            async with asyncio.TaskGroup() as group:
                rung = threading.Event()
                unlisten = app.store.listen(rung.set)
                group.create_task(app.work(stop=stop))
                connection = on_postgres.connect()
                handle = await app.start(handle_ticket, "t-1", connection=connection)
                rung.clear()
                commit(connection)
                connection.close()
                assert await asyncio.to_thread(rung.wait, 60)
                unlisten()
                result = await handle.result()
                stop.set()
            return result

    assert run(heard()) == "handled t-1"


# -- connections that cannot be used ----------------------------------------------------------------------------------
def refusal(place: Place, connection: Any, settings: Settings = SETTINGS) -> PerdureError:
    """The error of a start on this connection."""

    async def start() -> PerdureError:
        async with place.app(settings) as app:
            with pytest.raises(PerdureError) as refused:
                await app.start(handle_ticket, "t-1", id="ticket-t-1", connection=connection)
            return refused.value

    error: PerdureError = run(start())
    assert place.counts() == (0, 0, 0)
    return error


def test_a_connection_in_autocommit_mode_is_refused(place: Place) -> None:
    """Each statement would be a commit of its own."""
    error = refusal(place, place.connect_only(**{"autocommit": True} if place.is_postgres else {}))
    assert isinstance(error, InvalidInput)
    assert "begin" in str(error)


def test_a_closed_connection_is_refused(place: Place) -> None:
    connection = place.connect()
    connection.close()
    assert "is closed" in str(refusal(place, connection))


def test_another_database_is_refused(place: Place, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """It has a journal of its own, with the same tables: the run would be in the wrong journal."""
    if place.is_postgres:
        server: Server = request.getfixturevalue("postgres")
        other = Place(server.new_database())
    else:
        other = Place(f"sqlite:///{tmp_path}/other.db")
    with contextlib.closing(other):
        error = refusal(place, other.connect())
    assert isinstance(error, InvalidInput)
    assert "another" in str(error)
    assert other.counts() == (0, 0, 0)


def test_a_read_only_transaction_is_refused(place: Place) -> None:
    connection = place.connect()
    connection.execute("SET TRANSACTION READ ONLY" if place.is_postgres else "PRAGMA query_only=1")
    assert "read only" in str(refusal(place, connection))
    connection.close()


@pytest.mark.parametrize("connection", ["perdure.db", 7, object()])
def test_what_is_no_connection_is_refused_with_the_way_out(place: Place, connection: Any) -> None:
    error = refusal(place, connection)
    assert isinstance(error, InvalidInput)
    assert ("psycopg 3" if place.is_postgres else "apsw.Connection(path)") in str(error)


def test_a_failed_transaction_is_refused(on_postgres: Place) -> None:
    connection = on_postgres.connect()
    with pytest.raises(psycopg.Error):
        connection.execute("SELECT 1/0")
    assert "has failed" in str(refusal(on_postgres, connection))
    connection.close()


@pytest.mark.parametrize(
    "level", [psycopg.IsolationLevel.REPEATABLE_READ, psycopg.IsolationLevel.SERIALIZABLE], ids=["repeatable_read", "serializable"]
)
def test_a_stricter_isolation_level_is_refused(on_postgres: Place, level: psycopg.IsolationLevel) -> None:
    """Its snapshot may be older than the tombstone of a pruned run: the id would be used again."""
    connection = on_postgres.connect()
    connection.isolation_level = level
    assert "READ COMMITTED" in str(refusal(on_postgres, connection))
    connection.close()


def test_a_pipeline_is_refused(on_postgres: Place) -> None:
    with on_postgres.connect() as connection, connection.pipeline():
        assert "pipeline" in str(refusal(on_postgres, connection))


def test_another_encoding_is_refused(on_postgres: Place) -> None:
    with psycopg.connect(on_postgres.url, client_encoding="LATIN1") as connection:
        assert "UTF8" in str(refusal(on_postgres, connection))


def test_a_user_without_rights_is_told_so(on_postgres: Place, postgres: Server) -> None:
    postgres.execute("DROP ROLE IF EXISTS stranger; CREATE ROLE stranger LOGIN")
    with psycopg.connect(on_postgres.url, user="stranger") as connection:
        error = refusal(on_postgres, connection)
        assert "GRANT" in str(error) or "security.md" in str(error)


def test_a_journal_in_memory_is_refused() -> None:
    async def start() -> None:
        async with Perdure("sqlite://", [handle_ticket]) as app:
            with contextlib.closing(apsw.Connection(":memory:")) as connection, pytest.raises(InvalidInput, match="in memory"):
                await app.start(handle_ticket, "t-1", connection=connection)

    run(start())


def test_a_file_that_was_replaced_since_is_refused(on_sqlite: Place) -> None:
    connection = apsw.Connection(on_sqlite.path)
    connection.execute("SELECT count(*) FROM tickets").fetchall()
    Path(on_sqlite.path).unlink()
    for suffix in ("-wal", "-shm"):
        Path(on_sqlite.path + suffix).unlink(missing_ok=True)
    replaced = Place(on_sqlite.url)
    connection.execute("BEGIN")
    assert "another file" in str(refusal(replaced, connection))
    connection.close()


def test_a_connection_that_can_damage_the_journal_is_refused(on_sqlite: Place) -> None:
    connection = apsw.Connection(on_sqlite.path)
    connection.pragma("synchronous", 0)
    connection.execute("BEGIN IMMEDIATE")
    assert "synchronous=OFF" in str(refusal(on_sqlite, connection))
    connection.close()


def test_a_transaction_that_began_with_a_read_and_lost_the_lock_is_told_how_to_begin(on_sqlite: Place) -> None:
    connection = apsw.Connection(on_sqlite.path)
    connection.execute("BEGIN")
    connection.execute("SELECT count(*) FROM tickets").fetchall()
    on_sqlite.execute("DELETE FROM tickets")  # another commit: this snapshot cannot be written to any more
    on_sqlite.execute("INSERT INTO tickets VALUES ('other')")
    on_sqlite.execute("DELETE FROM tickets")
    error = refusal(on_sqlite, connection)
    connection.close()
    assert isinstance(error, StoreUnavailable)
    assert "BEGIN IMMEDIATE" in str(error)


def test_a_tool_cannot_start_a_run_in_its_own_transaction(place: Place) -> None:
    started: list[Any] = []

    @tool(effect="transaction")
    def book(call: Call) -> None:
        with blocking.Perdure(place.url, settings=Settings(answer_s=0.5)) as app:
            started.append(app.start("handle_ticket", ticket="t-1", connection=call.connection))

    @agent(version="1")
    async def booking(run: Run) -> str:
        try:
            await book()
        except ToolFailed as failed:
            return str(failed)
        return "booked"

    async def driven() -> Any:
        async with Perdure(place.url, [booking], settings=SETTINGS) as app:
            return await app.run(booking)

    assert "a tool cannot start a run in its own transaction" in run(driven())
    assert started == []


# -- the caller's own settings stay, and do not matter ----------------------------------------------------------------
def test_rows_and_settings_of_the_callers_own_kind_do_not_matter_on_postgres(on_postgres: Place) -> None:
    class Upper(psycopg.adapt.Loader):
        def load(self, data: Any) -> str:
            return bytes(data).decode().upper()

    async def start() -> None:
        async with on_postgres.app() as app:
            with psycopg.connect(on_postgres.url, row_factory=dict_row, cursor_factory=psycopg.ClientCursor) as connection:
                connection.adapters.register_loader("text", Upper)
                connection.execute("CREATE TEMPORARY TABLE perdure_runs (id INT)")  # hides the journal's table in this session
                connection.execute("SET search_path = pg_temp; SET LOCAL lock_timeout = '7s'")
                heard: list[Any] = []
                connection.add_notice_handler(heard.append)
                await app.start(handle_ticket, "t-1", id="ticket-t-1", connection=connection)
                (settings,) = connection.execute("SELECT current_setting('search_path') p, current_setting('lock_timeout') l").fetchall()
                assert settings == {"p": "PG_TEMP", "l": "7S"}
                connection.execute("DO $$ BEGIN RAISE NOTICE 'still here'; END $$")
                assert len(heard) == 1
            assert connection.closed
            assert on_postgres.counts() == (0, 1, 1)

    run(start())


def test_tracers_of_the_caller_do_not_matter_on_sqlite(on_sqlite: Place) -> None:
    async def start() -> None:
        async with on_sqlite.app() as app:
            connection = on_sqlite.connect()
            connection.row_trace = lambda cursor, row: {"row": row}
            connection.exec_trace = lambda cursor, sql, params: "perdure" not in sql
            await app.start(handle_ticket, "t-1", id="ticket-t-1", connection=connection)
            connection.exec_trace = None
            commit(connection)
            connection.close()

    run(start())
    assert on_sqlite.counts() == (0, 1, 1)


def test_the_journal_may_be_in_another_schema(postgres: Server) -> None:
    place = Place(empty(postgres))

    async def start() -> None:
        async with place.app() as app:
            with psycopg.connect(place.url, options="-c search_path=public") as connection:
                await app.start(handle_ticket, "t-1", connection=connection)

    run(start())
    assert place.counts() == (0, 1, 1)


# -- several transactions at a time -----------------------------------------------------------------------------------
@pytest.mark.parametrize("ends", [commit, rollback])
def test_of_two_transactions_with_the_same_id_the_second_waits_for_the_first(on_postgres: Place, ends: Callable[[Any], None]) -> None:
    async def both() -> None:
        async with on_postgres.app() as app:
            first, second = on_postgres.connect(), on_postgres.connect()
            await app.start(handle_ticket, "t-1", id="ticket-t-1", connection=first)
            waiting = asyncio.create_task(app.start(handle_ticket, "t-1", id="ticket-t-1", connection=second))
            await asyncio.to_thread(eventually, lambda: waits_for_a_lock(on_postgres))
            assert not waiting.done()
            ends(first)
            assert (await waiting).id == "ticket-t-1"
            commit(second)
            first.close()
            second.close()

    run(both())
    assert on_postgres.counts() == (0, 1, 1)


def waits_for_a_lock(place: Place) -> bool:
    return bool(place.execute("SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"))


def test_the_wait_for_another_transaction_has_an_end(on_postgres: Place) -> None:
    async def both() -> None:
        async with on_postgres.app(Settings(answer_s=0.6)) as app:
            first, second = on_postgres.connect(), on_postgres.connect()
            await app.start(handle_ticket, "t-1", id="ticket-t-1", connection=first)
            write(second, "t-2")
            with pytest.raises(StoreUnavailable, match="the same id"):
                await app.start(handle_ticket, "t-1", id="ticket-t-1", connection=second)
            commit(second)
            rollback(first)
            first.close()
            second.close()

    run(both())
    assert on_postgres.counts() == (1, 0, 0)


def test_an_open_transaction_delays_no_other_start_and_no_claim(on_postgres: Place) -> None:
    """It is the first start of its kind: the line of these runs must not stay locked until the caller commits."""

    async def others() -> Any:
        async with on_postgres.app() as app:
            connection = on_postgres.connect()
            await app.start(handle_ticket, "t-1", connection=connection, tenant="new")
            result = await app.run(handle_ticket, "t-2", tenant="new")
            rollback(connection)
            connection.close()
            return result

    assert run(others()) == "handled t-2"


def test_a_cancelled_caller_gets_its_connection_back_only_when_it_is_free(on_postgres: Place) -> None:
    """Otherwise its rollback would be sent in the middle of our statements."""

    async def cancelled() -> None:
        async with on_postgres.app() as app:
            first = on_postgres.connect()
            await app.start(handle_ticket, "t-1", id="ticket-t-1", connection=first)
            async with await psycopg.AsyncConnection.connect(on_postgres.url) as second:
                starting = asyncio.create_task(app.start(handle_ticket, "t-1", id="ticket-t-1", connection=second))
                await asyncio.to_thread(eventually, lambda: waits_for_a_lock(on_postgres))
                starting.cancel()
                await asyncio.sleep(0)
                assert not starting.done()
                assert second.lock.locked()
                rollback(first)
                with pytest.raises(asyncio.CancelledError):
                    await starting
                assert second.info.transaction_status == psycopg.pq.TransactionStatus.INTRANS
                await second.rollback()
            first.close()

    run(cancelled())
    assert on_postgres.counts() == (0, 0, 0)


# -- async connections, and SQLAlchemy --------------------------------------------------------------------------------
def test_an_async_connection_of_psycopg(on_postgres: Place) -> None:
    async def start() -> None:
        async with on_postgres.app() as app, await psycopg.AsyncConnection.connect(on_postgres.url) as connection:
            await connection.execute("INSERT INTO tickets VALUES ('t-1')")
            await app.start(handle_ticket, "t-1", connection=connection)
            assert on_postgres.counts() == (0, 0, 0)

    run(start())
    assert on_postgres.counts() == (1, 1, 1)


def alchemy(place: Place) -> str:
    return place.url.replace("postgresql://", "postgresql+psycopg://", 1)


@pytest.fixture
def engine(on_postgres: Place) -> Iterator[sa.Engine]:
    made = sa.create_engine(alchemy(on_postgres))
    yield made
    made.dispose()


@pytest.mark.parametrize("first", ["insert", "start"])
@pytest.mark.parametrize("kind", ["connection", "session", "scoped"])
def test_sqlalchemy_commits_both_or_neither(on_postgres: Place, engine: sa.Engine, kind: str, first: str) -> None:
    """Also if the start is the first statement: only then SQLAlchemy knows of no transaction yet."""
    opened: Any = {"connection": engine.connect, "session": lambda: Session(engine), "scoped": lambda: scoped_session(sessionmaker(engine))}

    async def start(ends: str, ticket: str) -> None:
        async with on_postgres.app() as app:
            connection = opened[kind]()
            if first == "insert":
                connection.execute(sa.text(f"INSERT INTO tickets VALUES ('{ticket}')"))
            await app.start(handle_ticket, ticket, connection=connection)
            if first == "start":
                connection.execute(sa.text(f"INSERT INTO tickets VALUES ('{ticket}')"))
            getattr(connection, ends)()
            connection.close()

    run(start("rollback", "t-1"))
    assert on_postgres.counts() == (0, 0, 0)
    run(start("commit", "t-2"))
    assert on_postgres.counts() == (1, 1, 1)


def test_sqlalchemy_commits_a_start_that_is_its_only_statement(on_postgres: Place, engine: sa.Engine) -> None:
    async def start() -> None:
        async with on_postgres.app() as app:
            with engine.connect() as connection:
                await app.start(handle_ticket, "t-1", connection=connection)
                connection.commit()

    run(start())
    assert on_postgres.counts() == (0, 1, 1)


@contextlib.asynccontextmanager
async def opened_async(place: Place, kind: str) -> AsyncIterator[AsyncConnection | AsyncSession]:
    made = create_async_engine(alchemy(place))
    async with AsyncSession(made) if kind == "session" else made.connect() as connection:
        yield connection
    await made.dispose()


@pytest.mark.parametrize("kind", ["connection", "session"])
def test_async_sqlalchemy_commits_both_or_neither(on_postgres: Place, kind: str) -> None:
    async def start(ends: str, ticket: str) -> None:
        async with on_postgres.app() as app, opened_async(on_postgres, kind) as connection:
            await app.start(handle_ticket, ticket, connection=connection)
            await connection.execute(sa.text(f"INSERT INTO tickets VALUES ('{ticket}')"))
            await getattr(connection, ends)()

    run(start("rollback", "t-1"))
    assert on_postgres.counts() == (0, 0, 0)
    run(start("commit", "t-2"))
    assert on_postgres.counts() == (1, 1, 1)


def test_sqlalchemy_in_autocommit_mode_is_refused(on_postgres: Place, engine: sa.Engine) -> None:
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        assert "begin a transaction" in str(refusal(on_postgres, connection))


def test_sqlalchemy_over_the_standard_librarys_sqlite_is_refused(on_sqlite: Place, tmp_path: Path) -> None:
    made = sa.create_engine(f"sqlite:///{tmp_path}/other.db")
    with made.connect() as connection:
        assert "apsw.Connection(path)" in str(refusal(on_sqlite, connection))
    made.dispose()


def test_another_schema_of_the_same_database_is_no_other_database(on_postgres: Place) -> None:
    """The check looks at the database; the journal's own schema is entered for the statements."""
    assert conninfo_to_dict(on_postgres.url)["dbname"]
    with psycopg.connect(on_postgres.url, options="-c search_path=pg_catalog") as connection:

        async def start() -> None:
            async with on_postgres.app() as app:
                await app.start(handle_ticket, "t-1", connection=connection)

        run(start())
    assert on_postgres.counts() == (0, 1, 1)
