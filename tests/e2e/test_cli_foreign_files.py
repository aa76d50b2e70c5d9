"""Databases that are no journals, or belong to another user: refused in one line, and not changed by one byte."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import apsw
import pytest
from tests.e2e.test_cli_reading import Desk
from tests.servers import forked

READING = [
    ("list",),
    ("show", "r"),
    ("events", "r"),
    ("why", "r"),
    ("trace", "r", "1"),
    ("audit",),
    ("verify",),
    ("verify", "r"),
    ("replay", "r"),
    ("replay", "--all", "shop.py:shop"),
    ("resume", "r"),
    ("cancel", "r"),
    ("resolve", "r", "1", "--did-not-happen"),
]
WRITING = [("run", "shop.py:many", "calls=0"), ("worker", "shop.py"), ("migrate",)]


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    desk = Desk(tmp_path)
    yield desk
    desk.end()


def foreign(desk: Desk, *, application_id: int = 0, mode: str = "delete") -> None:
    """The database of another program, with the default name of ours."""
    other = apsw.Connection(str(desk.folder / "perdure.db"))
    other.pragma("journal_mode", mode)
    other.execute("CREATE TABLE orders (id); INSERT INTO orders VALUES (7)")
    other.pragma("application_id", application_id)
    other.close()


def abandoned(desk: Desk) -> None:
    """The same, left by a program that was killed: its last writes are only in its log."""
    code = (
        "import apsw, os\n"
        "other = apsw.Connection('perdure.db')\n"
        "other.pragma('journal_mode', 'wal')\n"
        "other.execute('CREATE TABLE orders (id); INSERT INTO orders VALUES (7)')\n"
        "os.kill(os.getpid(), 9)"
    )
    done = forked.run([sys.executable, "-c", code], cwd=desk.folder, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    assert (desk.folder / "perdure.db-wal").stat().st_size > 0


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Every byte of the folder, and when it was last written."""
    return {
        path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in sorted(folder.iterdir()) if path.name.startswith("perdure.db")
    }


@pytest.mark.parametrize("kind", ["plain", "wal", "abandoned", "another program's", "empty"])
def test_a_verb_that_reads_or_steers_leaves_a_foreign_database_alone(desk: Desk, kind: str) -> None:
    match kind:
        case "abandoned":
            abandoned(desk)
        case "empty":
            (desk.folder / "perdure.db").touch()
        case _:
            foreign(desk, application_id=0x12345678 if kind.startswith("another") else 0, mode="wal" if kind == "wal" else "delete")
    before = contents(desk.folder)
    words = "belongs to another program" if kind.startswith("another") else "has no perdure journal in it"
    for verb in READING:
        said = desk.refusal(*verb, code=2)
        assert words in said, (verb, said)
        assert "--url" in said, said
        assert contents(desk.folder) == before, verb
    (failed,) = [check for check in desk.lines("doctor", code=1) if check["verdict"] == "FAIL"]
    assert words in failed["found"]
    desk("migrate", "--check", code=2 if kind.startswith("another") else 7)
    assert contents(desk.folder) == before


def test_nobody_writes_into_the_database_of_another_program(desk: Desk) -> None:
    foreign(desk, application_id=0x12345678)
    before = contents(desk.folder)
    for verb in WRITING:
        said = desk.refusal(*verb, code=2)
        assert "belongs to another program (application id 0x12345678)" in said, (verb, said)
        assert contents(desk.folder) == before, verb


def test_a_run_and_migrate_make_a_journal_beside_somebodys_own_tables(desk: Desk) -> None:
    foreign(desk)
    assert "made a journal" in desk("migrate")
    desk("run", "shop.py:many", "calls=0", "--id", "r")
    assert [run["run_id"] for run in desk.lines("list")] == ["r"]
    other = apsw.Connection(str(desk.folder / "perdure.db"))
    assert other.execute("SELECT id FROM orders").fetchall() == [(7,)]
    other.close()


def test_a_journal_whose_maker_was_killed_at_once_is_ours_although_only_its_log_says_so(desk: Desk) -> None:
    code = "import os\nfrom perdure.store.open import open_store\nstore = open_store('sqlite:///perdure.db')\nos.kill(os.getpid(), 9)"
    done = forked.run([sys.executable, "-c", code], cwd=desk.folder, env=desk._env, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    assert b"perdure_schema" not in (desk.folder / "perdure.db").read_bytes()
    assert desk.lines("list") == []


@pytest.mark.parametrize("kind", ["fifo", "device"])
def test_what_is_no_regular_file_is_called_that(desk: Desk, kind: str) -> None:
    url = "sqlite:////dev/null" if kind == "device" else "sqlite:///perdure.db"
    if kind == "fifo":
        os.mkfifo(desk.folder / "perdure.db")
    for verb in (("list",), ("run", "shop.py:many", "calls=0"), ("cancel", "r"), ("migrate",), ("verify",)):
        assert "is not a regular file" in desk.refusal(*verb, "--url", url, code=2)
    assert "is not a regular file" in desk("doctor", "--url", url, code=1)


# -- another user ------------------------------------------------------------------------------------------------------------
def test_a_workers_folder_that_others_can_write_to_is_refused_by_every_verb_and_found_by_doctor(desk: Desk) -> None:
    desk("run", "shop.py:many", "calls=0", "--id", "r")
    folder = desk.folder / "perdure.db-workers"
    folder.chmod(0o777)
    said = f"{folder} can be written to by other users (mode 777)"
    for verb in (("list",), ("run", "shop.py:many", "calls=0"), ("worker", "shop.py"), ("resume", "r"), ("cancel", "r"), ("verify",)):
        refusal = desk.refusal(*verb, code=2)
        assert said in refusal
        assert f"chmod 700 {folder}" in refusal
    (failed,) = [check for check in desk.lines("doctor", code=1) if check["verdict"] == "FAIL"]
    assert (failed["name"], said in failed["found"]) == ("locks", True)
    folder.chmod(0o700)
    checks = {check["name"]: check for check in desk.lines("doctor")}
    assert (checks["locks"]["verdict"], checks["locks"]["found"]) == ("ok", f"{folder}: no other user can write to it")
    (folder / "x y.lock").symlink_to("/dev/null")
    checks = {check["name"]: check for check in desk.lines("doctor")}
    assert checks["locks"]["verdict"] == "warn"
    assert "x y.lock" in checks["locks"]["found"]
    assert checks["locks"]["way_out"].endswith(f"cd {folder} && rm -- 'x y.lock'")


_AS_NOBODY = """
import os, sys
import click, apsw, msgspec, pydantic, rich  # imported as who we are: nobody may not be able to read the sources
import perdure.cli, perdure.app, perdure.inspect.audit, perdure.store.sqlite.store, perdure.config
from perdure.cli import VERBS
import importlib, pkgutil
for package in (perdure.cli, perdure.inspect):
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")
os.chdir(sys.argv[1])
os.setgid(65534), os.setuid(65534)
perdure.cli.cli.main(sys.argv[2:])
"""


@pytest.fixture
def shared() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp())  # pytest's own folders are closed to other users
    folder.chmod(0o777)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
def test_a_database_that_two_users_share_can_be_read_and_steered_by_the_other_one(shared: Path) -> None:
    desk = Desk(shared)
    (shared / "hold").touch()
    (shared / "hold").chmod(0o666)
    worker = desk.begin("run", "shop.py:shop", "order=o-1", "--id", "r")
    try:
        while not (shared / "ledger").exists():
            assert worker.poll() is None
        for file in shared.glob("perdure.db*"):
            if stat.S_ISREG(file.stat().st_mode):
                file.chmod(0o666)
        for verb in (["list"], ["why", "r"], ["show", "r"], ["doctor"], ["cancel", "r"]):
            done = subprocess.run(
                [sys.executable, "-c", _AS_NOBODY, str(shared), *verb],
                env=desk._env,
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
            assert done.returncode == 0, (verb, done.stdout, done.stderr)
    finally:
        (shared / "hold").unlink()
        worker.wait(timeout=60)
        desk.end()
