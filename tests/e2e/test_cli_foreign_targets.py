"""A journal that other people write to must not choose which code runs here.

Each test does what an attacker would do.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from msgspec.structs import replace
from tests.e2e.test_cli_reading import Desk
from tests.e2e.test_postgres_cli import Desk as PostgresDesk
from tests.servers.postgres import Server
from tests.unit.inspect_tools import forge

from perdure.core.events import RunCreated
from perdure.store.open import open_store

# The user's own script, in a folder of the user's own: it deletes something, and holds no agent.
SCRIPT = "from pathlib import Path\nPath(__file__).with_name('ran').touch()\ndef main(): ...\n"
AGENT = """
from pathlib import Path
Path(__file__).with_name("ran").touch()
from perdure import Run, agent

@agent(version="1")
async def shop(run: Run, order: str) -> str:
    return order
"""
VERBS = [
    ("resume", "r"),
    ("replay", "r"),
    ("inspect", "r"),
    ("rewind", "r", "--to", "2", "--yes"),
    ("undo", "done", "--yes"),
    ("export", "r", "--test", "test_r.py"),
]


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    """A journal with a queued run and a finished run, and a script in the same folder."""
    desk = Desk(tmp_path)
    desk("run", "shop.py:shop", "order=o-1", "--id", "r", "--detach")
    desk("run", "shop.py:shop", "order=o-2", "--id", "done")
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "other.py").write_text(AGENT)
    yield desk
    desk.end()


def ran(desk: Desk | PostgresDesk) -> bool:
    return (desk.folder / "ran").exists()


def forged(desk: Desk, run_id: str, target: str) -> None:
    """Another target in the journal and in the row, and a hash chain that fits."""
    store = open_store(f"sqlite:///{desk.folder}/perdure.db")
    created = store.read(run_id)[0].body
    store.close()
    assert isinstance(created, RunCreated)
    forge(desk.folder / "perdure.db", run_id, {1: replace(created, target=target)})
    desk.edit(f"UPDATE perdure_runs SET target = '{target}' WHERE run_id = '{run_id}'")


# -- the row --------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb[0])
@pytest.mark.parametrize("named", ["script.py:main", "other.py:shop"])
def test_a_target_that_was_changed_in_the_row_alone_is_not_loaded(desk: Desk, verb: tuple[str, ...], named: str) -> None:
    desk.edit(f"UPDATE perdure_runs SET target = '{desk.folder}/{named}'")
    said = desk.refusal(*verb, code=2)
    assert not ran(desk)
    assert f"the run's row (its projection) is not: target is '{desk.folder}/{named}'" in said
    assert f"perdure verify {verb[1]} tells more" in said
    assert f"perdure {verb[0]} {verb[1]} FILE.py:NAME" in said


def test_what_why_prints_to_be_typed_does_not_name_a_target_that_was_changed(desk: Desk) -> None:
    (desk.folder / "elsewhere").mkdir()
    (desk.folder / "elsewhere" / "other.py").write_text(AGENT)
    desk.edit(f"UPDATE perdure_runs SET target = '{desk.folder}/elsewhere/other.py:shop'")
    assert "perdure resume r FILE.py:shop" in desk("why", "r")


def test_a_chain_that_was_not_recomputed_shows(desk: Desk) -> None:
    desk.edit(f"UPDATE perdure_events SET data = replace(data, '{desk.folder}/shop.py', '{desk.folder}/other.py')")
    desk.edit(f"UPDATE perdure_runs SET target = '{desk.folder}/other.py:shop'")
    assert "event 1 does not have the hash that the journal's chain gives it" in desk.refusal("resume", "r", code=2)
    assert not ran(desk)


def test_whoever_names_the_target_is_believed_whatever_the_row_says(desk: Desk) -> None:
    desk.edit(f"UPDATE perdure_runs SET target = '{desk.folder}/script.py:main'")
    assert desk("resume", "r", "shop.py:shop") == "ch_1\n"
    assert not ran(desk)


# -- a journal that another user has made completely -----------------------------------------------------------------
@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb[0])
def test_a_script_that_holds_no_agent_is_not_run_even_if_the_chain_names_it(desk: Desk, verb: tuple[str, ...]) -> None:
    forged(desk, verb[1], f"{desk.folder}/script.py:main")
    said = desk.refusal(*verb, code=2)
    assert not ran(desk)
    assert "does not declare an agent 'main' as far as can be seen without running it" in said
    assert "FILE.py:NAME" in said


def test_a_plan_whose_tools_are_said_to_be_in_a_script_is_not_loaded(desk: Desk) -> None:
    (desk.folder / "plan.toml").write_text('name = "p"\n')
    forged(desk, "r", f"{desk.folder}/plan.toml --tools {desk.folder}/script.py")
    assert "does not declare any tool as far as can be seen" in desk.refusal("resume", "r", code=2)
    assert not ran(desk)


# -- what other users of the machine can write to ---------------------------------------------------------------------------------
@pytest.fixture
def shared() -> Iterator[Desk]:
    """A folder that all users can write to, with an agent that imports another module of this folder."""
    folder = Path(tempfile.mkdtemp())  # pytest's own folders are closed to other users
    folder.chmod(0o777)
    desk = Desk(folder)
    (folder / "shop.py").write_text(AGENT.replace("from pathlib", "try:\n    import helper\nexcept ImportError:\n    pass\nfrom pathlib"))
    desk("run", "shop.py:shop", "order=o-1", "--id", "r", "--detach")
    (folder / "ran").unlink()
    yield desk
    desk.end()
    shutil.rmtree(folder)


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o757])
def test_a_module_planted_beside_the_agent_does_not_run(shared: Desk, mode: int) -> None:
    """Sticky or not: any user can add a file to the folder, and the folder is put on sys.path."""
    shared.folder.chmod(mode)
    (shared.folder / "helper.py").write_text("from pathlib import Path\nPath(__file__).with_name('planted').touch()\n")
    if os.geteuid() == 0:
        os.chown(shared.folder / "helper.py", 65534, 65534)
    said = shared.refusal("resume", "r", code=2)
    assert not (shared.folder / "planted").exists()
    assert not ran(shared)
    assert f"other users can write to {shared.folder}" in said
    assert f"look at it, then: perdure resume r {shared.folder}/shop.py:shop" in said


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_module_of_another_user_beside_the_agent_does_not_run(shared: Desk) -> None:
    (shared.folder / "helper.py").write_text("from pathlib import Path\nPath(__file__).with_name('planted').touch()\n")
    os.chown(shared.folder / "helper.py", 65534, 65534)
    shared.folder.chmod(0o755)
    assert f"{shared.folder}/helper.py, which it can import, belongs to another user" in shared.refusal("resume", "r", code=2)
    assert not (shared.folder / "planted").exists()


def test_in_a_folder_of_ones_own_the_recorded_code_is_loaded_as_before(shared: Desk) -> None:
    shared.folder.chmod(0o755)
    assert shared("resume", "r") == "o-1\n"


# -- PostgreSQL --------------------------------------------------------------------------------------------------------------------
@pytest.fixture
def worker_role(postgres: Server, postgres_url: str) -> Iterator[str]:
    """The URL for a user with the rights that a worker had in earlier releases: all columns of a run's row."""
    postgres.execute("CREATE ROLE mallory LOGIN")
    try:
        yield postgres_url.replace("app@", "mallory@")
    finally:
        with psycopg.connect(postgres_url.replace("app@", "admin@"), autocommit=True) as connection:
            connection.execute("DROP OWNED BY mallory; DROP ROLE mallory")


@pytest.mark.parametrize("column", ["target", "run_id", "tenant"])
def test_a_worker_role_with_rights_to_all_columns_cannot_say_where_the_code_of_a_run_is(
    tmp_path: Path, postgres_url: str, worker_role: str, column: str
) -> None:
    desk = PostgresDesk(tmp_path, postgres_url)
    desk("run", "shop.py:shop", "cents:=5", "--id", "s1", "--detach")
    with psycopg.connect(postgres_url, autocommit=True) as owner:
        owner.execute("GRANT SELECT, INSERT, UPDATE ON perdure_runs TO mallory")
    with psycopg.connect(worker_role, autocommit=True) as mallory:
        with pytest.raises(psycopg.errors.IntegrityConstraintViolation, match="what its first event says of a run stays"):
            mallory.execute(f"UPDATE perdure_runs SET {column} = '{tmp_path}/script.py:main'".encode())
        mallory.execute("UPDATE perdure_runs SET crashes = 0")
    assert desk("resume", "s1") == "charged 5\n"


def test_the_owner_of_a_database_whose_trigger_was_off_does_not_run_the_script_either(tmp_path: Path, postgres_url: str) -> None:
    desk = PostgresDesk(tmp_path, postgres_url)
    (tmp_path / "script.py").write_text(SCRIPT)
    desk("run", "shop.py:shop", "cents:=5", "--id", "s1", "--detach")
    with psycopg.connect(postgres_url, autocommit=True) as owner:
        owner.execute("ALTER TABLE perdure_runs DISABLE TRIGGER USER")
        owner.execute(f"UPDATE perdure_runs SET target = '{tmp_path}/script.py:main'".encode())
        owner.execute("ALTER TABLE perdure_runs ENABLE TRIGGER USER")
    assert "perdure verify s1 tells more" in desk.refusal("resume", "s1")
    assert not ran(desk)
