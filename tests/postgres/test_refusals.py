"""A database that cannot keep a journal, or refuses the login: one line that names it, the rule and the way out.

The line shows no password.
"""

from __future__ import annotations

import os
import subprocess
import sys
import traceback
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import psycopg
import pytest
from tests.conformance.suite import new_run
from tests.postgres.tools import opened, until
from tests.servers.postgres import OWNER, Server

from perdure.errors import InvalidInput, PerdureError, StoreCorrupt, StoreError, StoreUnavailable
from perdure.store.open import open_store

SECRET = "hunter2"


def refusal(url: str, *, create: bool = True) -> PerdureError:
    """Why the store cannot be opened."""
    with pytest.raises(PerdureError) as caught:
        open_store(url, create=create).close()
    said = caught.value.in_full()
    assert "\n" not in said
    assert len(said) < 600
    assert SECRET not in "".join(traceback.format_exception(caught.value))
    return caught.value


def database_of(url: str) -> str:
    return str(psycopg.conninfo.conninfo_to_dict(url)["dbname"])


def with_password(url: str, user: str = OWNER, password: str = SECRET) -> str:
    return url.replace(f"{OWNER}@", f"{user}:{password}@")


@pytest.fixture
def role(postgres: Server, postgres_url: str) -> Iterator[str]:
    """Somebody who owns nothing."""
    postgres.execute("CREATE ROLE guest LOGIN")
    yield "guest"
    postgres.revive()
    postgres.drop(postgres_url)
    postgres.execute("DROP ROLE guest")


@pytest.mark.parametrize(
    ("setting", "value", "kind", "words"),
    [
        ("default_transaction_read_only", "on", StoreUnavailable, "takes no writes"),
        ("synchronous_commit", "off", StoreError, "ALTER ROLE … SET synchronous_commit = on"),
        ("search_path", "'nowhere'", StoreError, "put it into the user's search_path"),
    ],
)
def test_a_setting_under_which_no_promise_can_be_kept(postgres, postgres_url, setting, value, kind, words) -> None:
    postgres.execute(f'ALTER DATABASE "{database_of(postgres_url)}" SET {setting} = {value}')
    error = refusal(with_password(postgres_url))
    assert type(error) is kind
    assert words in error.in_full()
    assert database_of(postgres_url) in error.in_full()


@pytest.mark.parametrize("encoding", ["SQL_ASCII", "LATIN1"])
def test_a_database_that_cannot_hold_every_character(postgres, postgres_url, encoding) -> None:
    postgres.execute(f"CREATE DATABASE other OWNER {OWNER} TEMPLATE template0 ENCODING '{encoding}' LC_COLLATE 'C' LC_CTYPE 'C'")
    url = postgres_url.replace(database_of(postgres_url), "other")
    try:
        error = refusal(url)
    finally:
        postgres.drop(url)
    assert type(error) is StoreError
    assert encoding in error.in_full()
    assert "ENCODING 'UTF8'" in error.in_full()


def test_a_standby_that_somebody_has_connected_to_by_mistake(postgres, postgres_url) -> None:
    with opened(postgres_url) as store:
        store.create_run(new_run("before"))
        postgres.restart_as_standby()
        error = refusal(postgres_url)
        assert type(error) is StoreUnavailable
        assert "read-only standby" in error.in_full()
        assert "connect to the primary" in error.in_full()
        # A store that was open says the same, and works again when its primary is back.
        with pytest.raises(StoreUnavailable, match="takes no writes"):
            store.create_run(new_run("r"))
        postgres.revive()
        until(lambda: _created(store))


def _created(store) -> bool:
    try:
        store.create_run(new_run("r"))
    except StoreUnavailable:
        return False
    return True


def test_a_database_that_turns_read_only_under_an_open_store(postgres, postgres_url) -> None:
    with opened(postgres_url) as store:
        store.create_run(new_run("r"))
        postgres.execute(f'ALTER DATABASE "{database_of(postgres_url)}" SET default_transaction_read_only = on')
        with psycopg.connect(postgres_url, autocommit=True) as connection:
            connection.execute("SET default_transaction_read_only = off")
            connection.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'perdure'")
        with pytest.raises(StoreUnavailable, match="takes no writes"):
            store.create_run(new_run("r2"))
        postgres.execute(f'ALTER DATABASE "{database_of(postgres_url)}" RESET default_transaction_read_only')
        until(lambda: _created(store))


def is_let_in_by_nobody(url: str) -> bool:
    return "does not let us in" in refusal(url).in_full()


def test_nobody_of_that_name_no_password_and_a_wrong_one(postgres, postgres_url, role) -> None:
    hba = postgres.data / "pg_hba.conf"
    trusting = hba.read_text()
    postgres.execute(f"ALTER ROLE {role} PASSWORD 'right'")
    hba.write_text(f"host all {role} 127.0.0.1/32 scram-sha-256\n{trusting}")
    postgres.execute("SELECT pg_reload_conf()")
    try:
        for url in (
            with_password(postgres_url, role),
            with_password(postgres_url, role, "").replace(":@", "@"),
            with_password(postgres_url, "stranger"),
        ):
            until(partial(is_let_in_by_nobody, url))
            error = refusal(url)
            assert type(error) is StoreError, "waiting would not help"
            assert "does not let us in" in error.in_full()
            assert any(way_out in error.in_full() for way_out in ("check user and password in the URL", "~/.pgpass"))
    finally:
        hba.write_text(trusting)
        postgres.execute("SELECT pg_reload_conf()")


def test_a_database_that_does_not_exist(postgres_url) -> None:
    error = refusal(with_password(postgres_url).replace(database_of(postgres_url), "no_such_thing"))
    assert type(error) is StoreError
    assert "no_such_thing" in error.in_full()
    assert "createdb" in error.in_full()


def test_a_server_that_is_not_there(postgres, postgres_url) -> None:
    postgres.stop()
    error = refusal(with_password(postgres_url))
    assert type(error) is StoreUnavailable
    assert "refused" in error.in_full()


def test_a_host_that_does_not_exist() -> None:
    error = refusal(f"postgresql://app:{SECRET}@no-such-host.invalid/db")
    assert type(error) is StoreUnavailable
    assert "no-such-host.invalid" in error.in_full()


def test_somebody_who_may_not_make_tables(postgres_url, role) -> None:
    error = refusal(with_password(postgres_url, role))
    assert type(error) is StoreError
    assert "GRANT" in error.in_full()
    assert "let the owner of the tables migrate" in error.in_full()


def test_somebody_who_may_only_read(postgres_url, role) -> None:
    with opened(postgres_url) as store:
        store.create_run(new_run("r"))
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute(f"GRANT SELECT ON ALL TABLES IN SCHEMA public TO {role}".encode())
    with opened(with_password(postgres_url, role)) as store:
        assert store.get("r") is not None
        with pytest.raises(StoreError, match=r"this user may not do that.*GRANT"):
            store.create_run(new_run("r2"))


def test_a_database_without_a_journal_is_left_alone_when_none_may_be_made(postgres_url) -> None:
    error = refusal(with_password(postgres_url), create=False)
    assert type(error) is StoreCorrupt
    assert "was left alone" in error.in_full()
    with psycopg.connect(postgres_url) as connection:
        assert connection.execute("SELECT count(*) FROM pg_tables WHERE schemaname = 'public'").fetchone() == (0,)


@pytest.mark.parametrize("url", ["postgresql://app:hunter2@[h/x", "postgresql://app@h/x?password=hunter2&nonsense=1"])
def test_a_url_that_is_none(url) -> None:
    assert type(refusal(url)) is InvalidInput


def test_without_psycopg(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "class Blocker:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] == 'psycopg': raise ImportError(name)\n"
        "sys.meta_path.insert(0, Blocker())\n"
        "from perdure.store.open import open_store\n"
        "open_store(sys.argv[1])\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code, f"postgresql://app:{SECRET}@h/x"]
    ended = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    said = ended.stderr.splitlines()[-1]
    assert "InvalidInput: a postgresql:// URL needs psycopg" in said
    assert "pip install 'perdure[postgres]'" in said
    assert SECRET not in ended.stderr
