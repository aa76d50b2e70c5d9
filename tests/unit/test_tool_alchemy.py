"""`call.sqlalchemy()` and `call.session()`: SQLAlchemy in the transaction of a tool."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column
from tests.servers.postgres import Server
from tests.unit.drive_tools import SETTINGS, run
from tests.unit.postgres_tools import cleared

from perdure import Call, Perdure, Run, ToolFailed, agent, tool
from perdure.errors import InvalidInput, StoreError


class Base(DeclarativeBase):
    pass


class Ticket(Base):
    __tablename__ = "tickets"
    id: Mapped[int] = mapped_column(primary_key=True)
    title: Mapped[str] = mapped_column(unique=True)
    facts: Mapped[dict[str, Any]] = mapped_column(sa.JSON)


class Journal(Base):
    __tablename__ = "perdure_runs"
    id: Mapped[int] = mapped_column(primary_key=True)


@pytest.fixture
def url(postgres: Server) -> str:
    found = cleared(postgres)
    with psycopg.connect(found, autocommit=True) as owner:
        owner.execute("CREATE TABLE tickets (id SERIAL PRIMARY KEY, title TEXT UNIQUE, facts JSON)")
    return found


def outcome(url: str, work: Callable[[Call], Any]) -> Any:
    """What an agent gets whose only call is a transaction tool with this body."""

    @tool(effect="transaction", name="book")
    def book(call: Call) -> Any:
        return work(call)

    @agent(version="1", name="booking")
    async def booking(run: Run) -> Any:
        try:
            return await book()
        except ToolFailed as failed:
            return f"{failed.type}: {failed}"

    async def driven() -> Any:
        async with Perdure(url, [booking], settings=SETTINGS) as app:
            return await app.run(booking)

    return run(driven())


def titles(url: str) -> list[str]:
    with psycopg.connect(url, autocommit=True) as other:
        return [title for (title,) in other.execute("SELECT title FROM tickets ORDER BY id")]


def test_what_a_session_has_is_committed_with_the_result_even_if_the_tool_does_not_flush(url: str) -> None:
    def work(call: Call) -> Any:
        session: Session = call.session()
        session.add(Ticket(title="first", facts={"a": [1, "é"]}))
        found = session.scalars(sa.select(Ticket)).one()  # autoflush
        assert found.facts == {"a": [1, "é"]}
        session.add_all([Ticket(title=f"more {n}", facts={}) for n in range(3)])
        assert call.session() is session
        return found.id

    assert outcome(url, work) == 1
    assert titles(url) == ["first", "more 0", "more 1", "more 2"]


def test_a_connection_of_sqlalchemy_is_in_the_tools_transaction(url: str) -> None:
    def work(call: Call) -> Any:
        connection: sa.Connection = call.sqlalchemy()
        connection.execute(sa.insert(Ticket), [{"title": "a", "facts": {}}, {"title": "b", "facts": {}}])
        call.connection.execute("UPDATE tickets SET title = title || ?", ["!"])
        return list(connection.scalars(sa.text("SELECT title FROM tickets WHERE title LIKE :t ORDER BY 1"), {"t": "%!"}))

    assert outcome(url, work) == ["a!", "b!"]
    assert titles(url) == ["a!", "b!"]


def test_an_error_of_the_tool_undoes_what_its_session_has_sent(url: str) -> None:
    def work(call: Call) -> Any:
        call.session().add(Ticket(title="a", facts={}))
        call.session().flush()
        raise KeyError("no")

    assert outcome(url, work).startswith("KeyError: ")
    assert titles(url) == []


def test_an_error_in_the_last_flush_is_the_failure_of_the_call(url: str) -> None:
    def work(call: Call) -> Any:
        call.session().add_all([Ticket(title="same", facts={}), Ticket(title="same", facts={})])
        return "returned"

    assert outcome(url, work).startswith("IntegrityError: ")
    assert titles(url) == []


@pytest.mark.parametrize(
    ("forbidden", "says"),
    [
        (lambda call: call.session().commit(), "may not commit"),
        (lambda call: call.session().rollback(), "may not roll back"),
        (lambda call: call.sqlalchemy().commit(), "may not commit"),
        (lambda call: call.sqlalchemy().begin_nested(), "no transaction control"),
        (lambda call: call.session().execute(sa.text("COMMIT")), "no transaction control"),
        (lambda call: call.session().scalars(sa.select(Journal.id)).all(), "nothing in perdure's own tables"),
        (lambda call: call.sqlalchemy().execute(sa.text("SELECT 1; COMMIT")), "one statement at a time"),
        (lambda call: call.sqlalchemy().execution_options(stream_results=True).execute(sa.select(Ticket)), "cursor on the server"),
        (lambda call: call.session().connection().connection.driver_connection.commit(), "may not commit"),
    ],
    ids=["commit", "rollback", "core", "savepoint", "text", "journal", "two", "stream", "driver"],
)
def test_the_transaction_stays_the_journals_own(url: str, forbidden: Callable[[Call], Any], says: str) -> None:
    """Even if the tool catches the error, the rest of its work is part of one commit."""

    def work(call: Call) -> Any:
        call.session().add(Ticket(title="a", facts={}))
        call.session().flush()
        with pytest.raises((InvalidInput, sa.exc.StatementError), match=says):
            forbidden(call)
        assert titles(url) == []
        raise KeyError("and now an error")

    assert outcome(url, work).startswith("KeyError: ")
    assert titles(url) == []


def test_a_caught_error_of_the_database_is_the_failure_of_the_call(url: str) -> None:
    def work(call: Call) -> Any:
        connection = call.sqlalchemy()
        connection.execute(sa.insert(Ticket), {"title": "a", "facts": {}})
        with pytest.raises(IntegrityError):
            connection.execute(sa.insert(Ticket), {"title": "a", "facts": {}})
        return "returned"

    assert outcome(url, work).startswith("StoreError: ")
    assert titles(url) == []


def test_after_a_rollback_of_sqlalchemy_nothing_more_is_written_and_the_call_has_failed(url: str) -> None:
    """Otherwise the second row alone would be committed, and count as the whole work of the tool."""

    def work(call: Call) -> Any:
        connection = call.sqlalchemy()
        connection.execute(sa.insert(Ticket), {"title": "a", "facts": {}})
        connection.rollback()
        with pytest.raises(StoreError, match="has failed"):
            connection.execute(sa.insert(Ticket), {"title": "b", "facts": {}})
        return "returned"

    assert outcome(url, work).startswith("StoreError: ")
    assert titles(url) == []


def test_a_session_that_is_closed_in_the_tool_leaves_its_rows_in_the_transaction(url: str) -> None:
    def work(call: Call) -> Any:
        with call.session() as session:
            session.add(Ticket(title="a", facts={}))
            session.flush()
        return "returned"

    assert outcome(url, work) == "returned"
    assert titles(url) == ["a"]


def test_after_the_tool_has_returned_its_session_is_over(url: str) -> None:
    kept: list[Any] = []

    def work(call: Call) -> Any:
        kept.append(call.sqlalchemy())
        return "returned"

    assert outcome(url, work) == "returned"
    with pytest.raises((StoreError, sa.exc.SQLAlchemyError)):
        kept[0].execute(sa.text("INSERT INTO tickets (title) VALUES ('late')"))
    assert titles(url) == []


def test_on_sqlite_the_way_out_is_named(tmp_path: Path) -> None:
    assert "call.connection.execute" in outcome(f"sqlite:///{tmp_path}/db", lambda call: call.session())
