"""A server that asks for the password in an unsafe way does not get it, whatever setting has named the server."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.servers import forked
from tests.servers.hostile import SALT, Asks, HostilePostgres
from tests.servers.postgres import OWNER, Server
from tests.unit.postgres_tools import eventually

from perdure.errors import StoreError, StoreUnavailable
from perdure.store.open import open_store

SECRET = "hunter2"
GIVES_AWAY: tuple[Asks, ...] = ("password", "md5")


def perdure(folder: Path, *args: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "perdure", *args]
    return forked.run(command, cwd=folder, env=os.environ | environ, capture_output=True, text=True, timeout=60, check=False)


def refusal(url: str) -> str:
    with pytest.raises(StoreError) as refused:
        open_store(url)
    assert not isinstance(refused.value, StoreUnavailable), "trying again makes nothing better"
    assert SECRET not in refused.value.in_full()
    return refused.value.in_full()


@pytest.mark.parametrize("asks", GIVES_AWAY)
@pytest.mark.parametrize("given", ["environment", "url", "pgpass"])
def test_the_password_does_not_reach_a_server_that_asks_for_it_in_clear_text_or_as_md5(
    asks: Asks, given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with HostilePostgres(asks) as server:
        url = server.url
        if given == "environment":
            monkeypatch.setenv("PGPASSWORD", SECRET)
        elif given == "url":
            url = url.replace("ann@", f"ann:{SECRET}@")
        else:
            passwords = tmp_path / "pgpass"
            passwords.touch(0o600)
            passwords.write_text(f"*:*:*:*:{SECRET}\n")
            monkeypatch.setenv("PGPASSFILE", str(passwords))
        said = refusal(url)
        assert server.connections
        assert server.told == b""
    assert "the password was not sent" in said
    assert "?require_auth=METHOD" in said


def test_a_server_that_asks_by_scram_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """And learns the beginning of a proof, which has no password in it."""
    monkeypatch.setenv("PGPASSWORD", SECRET)
    with HostilePostgres("scram-sha-256") as server:
        refusal(server.url)
        assert b"SCRAM-SHA-256" in server.told
        assert SECRET.encode() not in server.told


@pytest.mark.parametrize("by", ["url", "environment"])
def test_who_names_the_method_in_a_url_of_their_own_is_believed(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGPASSWORD", SECRET)
    if by == "environment":
        monkeypatch.setenv("PGREQUIREAUTH", "password")
    with HostilePostgres("password") as server:
        refusal(f"{server.url}?require_auth=password" if by == "url" else server.url)
        assert SECRET.encode() in server.told


def test_md5_is_answered_only_if_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGPASSWORD", SECRET)
    inner = hashlib.md5(f"{SECRET}ann".encode()).hexdigest()
    answer = hashlib.md5(inner.encode() + SALT).hexdigest()
    with HostilePostgres("md5") as server:
        refusal(f"{server.url}?require_auth=md5")
        assert answer.encode() in server.told


# -- a settings file of the current folder ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("asks", GIVES_AWAY)
def test_a_settings_file_cannot_send_the_password_to_the_server_that_it_names(asks: Asks, tmp_path: Path) -> None:
    with HostilePostgres(asks) as server:
        (tmp_path / "perdure.toml").write_text(f'url = "{server.url}"\n')
        done = perdure(tmp_path, "list", PGPASSWORD=SECRET)
        assert done.returncode == 2
        assert server.told == b""


@pytest.mark.parametrize(
    "settings",
    [
        "?require_auth=password",
        "?require_auth=",
        "?require_auth=scram-sha-256&require_auth=password",
        "?require_auth=scram-sha-256,password",
        "?require_auth=scram-sha-256%2Cpassword",
        "?require%5Fauth=password",
        "?sslmode=disable&require_auth =password",
        "?gssdelegation=1",
        "?servicefile=evil.conf&service=evil",
    ],
)
def test_a_settings_file_cannot_choose_how_the_password_is_sent(tmp_path: Path, settings: str) -> None:
    with HostilePostgres("password") as server:
        for url in (f"{server.url}{settings}", f"{server.url.replace('ann@', 'a?nn@')}{settings}"):
            (tmp_path / "perdure.toml").write_text(f'url = "{url}"\n')
            done = perdure(tmp_path, "list", PGPASSWORD=SECRET)
            assert (done.returncode, done.stdout) == (2, "")
            assert "perdure.toml: url must not set" in done.stderr
            assert "PERDURE_URL or --url" in done.stderr
        assert server.connections == 0


def test_a_settings_file_may_demand_scram(tmp_path: Path) -> None:
    with HostilePostgres("nothing") as server:
        (tmp_path / "perdure.toml").write_text(f'url = "{server.url}?require_auth=scram-sha-256&application_name=x"\n')
        done = perdure(tmp_path, "list", PGPASSWORD=SECRET)
        assert server.connections
    assert done.returncode == 2
    assert "does not let us in" in done.stderr


# -- servers that do no harm ----------------------------------------------------------------------------------------------------
@pytest.fixture
def guest(postgres: Server, postgres_url: str) -> Iterator[str]:
    """The URL of a user whom the server asks for a password with SCRAM; other users are trusted."""
    hba = postgres.data / "pg_hba.conf"
    trusting = hba.read_text()
    postgres.execute("SET password_encryption = 'scram-sha-256'")
    postgres.execute(f"CREATE ROLE guest LOGIN PASSWORD '{SECRET}'")
    hba.write_text(f"host all guest 127.0.0.1/32 scram-sha-256\n{trusting}")
    postgres.execute("SELECT pg_reload_conf()")
    yield postgres_url.replace(f"{OWNER}@", "guest@")
    hba.write_text(trusting)
    postgres.execute("SELECT pg_reload_conf()")
    postgres.drop(postgres_url)
    postgres.execute("DROP ROLE guest")


def test_a_server_that_does_not_ask_and_one_that_asks_by_scram_are_used_as_before(
    guest: str, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    eventually(lambda: "no password supplied" in _said(guest))  # the server has read its file again
    monkeypatch.setenv("PGPASSWORD", "wrong")
    assert "password authentication failed" in refusal(guest)
    open_store(postgres_url).close()
    monkeypatch.setenv("PGPASSWORD", SECRET)
    assert "GRANT" in refusal(guest), "it was let in, and may make no tables"


def _said(url: str) -> str:
    try:
        open_store(url).close()
    except StoreError as error:
        return error.in_full()
    return ""
