"""`perdure copy` with real journals of real agents, on real servers, killed at every transaction."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import psycopg
import pytest
from tests.e2e.mortal import Mortals
from tests.e2e.moving_tools import World, effects, finish, plant, results, verified
from tests.servers import forked
from tests.unit.postgres_tools import empty

from perdure.store.open import open_store

SMALL = {"PAGE": 2, "BATCH_EVENTS": 12}  # so that there are many transactions to be killed in


@pytest.fixture(scope="module")
def mortals() -> Iterator[Mortals]:
    server = Mortals()
    yield server
    server.close()


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, World]:
    """A journal on SQLite, to be copied before use, and its world."""
    folder = tmp_path_factory.mktemp("planted")
    world = World(folder)
    asyncio.run(plant(f"sqlite:///{folder}/a.db", world))
    return folder / "a.db", world


@pytest.fixture
def source(planted: tuple[Path, World], tmp_path: Path) -> tuple[str, World]:
    journal, world = planted
    shutil.copy(journal, tmp_path / "a.db")
    shutil.copy(world.path, tmp_path / "ledger")
    return f"sqlite:///{tmp_path}/a.db", World(tmp_path)


@pytest.fixture(params=["sqlite", "postgres"])
def new_target(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], str]:
    """Makes an empty place to move to."""
    numbers = iter(range(1000))
    if request.param == "sqlite":
        return lambda: f"sqlite:///{tmp_path}/target-{next(numbers)}.db"
    return lambda: empty(request.getfixturevalue("postgres"))


def test_a_project_grows_out_of_sqlite_and_comes_back(
    mortals: Mortals, source: tuple[str, World], postgres_url: str, tmp_path: Path
) -> None:
    """sqlite → postgres → sqlite: chains intact on every side, and every run goes on where it was."""
    first, world = source
    last = f"sqlite:///{tmp_path}/b.db"
    heads = verified(first)
    for here, there in ((first, postgres_url), (postgres_url, last)):
        code, out, err = mortals.run("copy", "--from", here, "--to", there, "--json")
        assert code == 0, err
        assert json.loads(out)["runs"] == len(heads) == 7
        assert verified(here) == verified(there) == heads
    assert asyncio.run(finish(last, world)) == results()
    assert world.count() == effects()
    verified(last)


def test_runs_go_on_in_postgres(mortals: Mortals, source: tuple[str, World], postgres_url: str) -> None:
    here, world = source
    assert mortals.run("copy", "--from", here, "--to", postgres_url)[0] == 0
    assert asyncio.run(finish(postgres_url, world)) == results()
    assert world.count() == effects()
    verified(postgres_url)


def test_killed_at_every_transaction_the_same_command_finishes(
    mortals: Mortals, planted: tuple[Path, World], new_target: Callable[[], str], tmp_path: Path
) -> None:
    heads = None
    deaths = 0
    # A death rolls back the uncommitted transaction. So a death inside the nth transaction equals a death after the
    # one before, and a few samples are enough.
    for moment, step in (("after", 1), ("inside", 4)):
        for nth in range(1, 100, step):
            here, there = f"sqlite:///{tmp_path}/{moment}-{nth}.db", new_target()
            shutil.copy(planted[0], tmp_path / f"{moment}-{nth}.db")
            heads = heads or verified(here)
            code, _, err = mortals.run("copy", "--from", here, "--to", there, dies=(nth, moment), constants=SMALL)
            if code == 0:
                break
            assert code == -signal.SIGKILL, err
            deaths += 1
            assert_driven_in_one_place(here, there)
            code, _, err = mortals.run("copy", "--from", here, "--to", there, constants=SMALL)
            assert code == 0, (moment, nth, err)
            assert verified(here) == verified(there) == heads, (moment, nth)
    assert deaths >= 10


def assert_driven_in_one_place(here: str, there: str) -> None:
    """While any run is in the target, the source takes nothing."""
    source, target = open_store(here), open_store(there)
    if target.list():
        assert source.moved() is not None
    target.close()
    source.close()


def test_killed_and_taken_back_at_every_transaction_every_run_is_in_one_place(
    mortals: Mortals, planted: tuple[Path, World], new_target: Callable[[], str], tmp_path: Path
) -> None:
    heads = None
    for nth, death in ((2, None), (4, (1, "after")), (5, (2, "before")), (6, (1, "inside")), (7, (2, "inside"))):
        here, there = f"sqlite:///{tmp_path}/{nth}.db", new_target()
        shutil.copy(planted[0], tmp_path / f"{nth}.db")
        heads = heads or verified(here)
        assert mortals.run("copy", "--from", here, "--to", there, dies=(nth, "after"), constants=SMALL)[0] == -signal.SIGKILL
        if death is not None:
            assert mortals.run("copy", "--from", here, "--to", there, "--abandon", dies=death, constants=SMALL)[0] == -signal.SIGKILL
            assert_driven_in_one_place(here, there)
        code, out, err = mortals.run("copy", "--from", here, "--to", there, "--abandon", "--json", constants=SMALL)
        assert code == 0, err
        assert json.loads(out)["abandoned"]
        target, source = open_store(there), open_store(here)
        assert [row.run_id for row in target.list() if row.status not in ("succeeded", "failed")] == []
        assert source.moved() is None
        target.close()
        source.close()
        assert mortals.run("copy", "--from", here, "--to", there)[0] == 0
        assert verified(here) == verified(there) == heads


def test_while_a_worker_lives_it_refuses_and_waits_when_it_is_told_to(source: tuple[str, World], postgres_url: str, tmp_path: Path) -> None:
    here, _ = source
    (tmp_path / "agents.py").write_text("from perdure import agent\n\n\n@agent(version='1')\nasync def idle(run):\n    return 1\n")
    worker = command("worker", "agents.py", "--url", here, cwd=tmp_path)
    store = open_store(here)
    deadline = time.monotonic() + 60
    while not store.workers(time.time_ns() // 1000, 30_000_000) and time.monotonic() < deadline:
        time.sleep(0.05)
    store.close()
    refused = command("copy", "--from", here, "--to", postgres_url, cwd=tmp_path)
    _, said = refused.communicate(timeout=60)
    assert refused.returncode == 8
    assert f":{worker.pid} (0 runs)" in said
    assert "SIGTERM drains them" in said
    waiting = command("copy", "--from", here, "--to", postgres_url, "--wait", "30", cwd=tmp_path)
    time.sleep(0.7)
    assert waiting.poll() is None
    worker.send_signal(signal.SIGTERM)
    _, said = waiting.communicate(timeout=60)
    assert waiting.returncode == 0, said
    worker.communicate(timeout=60)
    late = command("worker", "agents.py", "--url", here, cwd=tmp_path)
    _, said = late.communicate(timeout=60)
    assert late.returncode != 0
    assert "this journal was moved to postgresql://…@127.0.0.1" in said


def command(*args: str, cwd: Path) -> subprocess.Popen[str]:
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return forked.Popen(
        [sys.executable, "-m", "perdure", *args], cwd=cwd, env=environ, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def test_what_is_moved_can_be_looked_at_and_says_so(mortals: Mortals, source: tuple[str, World], tmp_path: Path) -> None:
    here, there = source[0], f"sqlite:///{tmp_path}/b.db"
    code, out, _ = mortals.run("copy", "--from", here, "--to", there, "--dry-run", "--json")
    assert (code, json.loads(out)["runs"], json.loads(out)["unfinished"]) == (0, 7, 5)
    assert not (tmp_path / "b.db").exists()
    assert mortals.run("copy", "--from", here, "--to", there)[0] == 0
    for verb in (("why", "shop-0"), ("show", "shop-0"), ("list",), ("verify",)):
        code, out, err = mortals.run(*verb, "--url", here)
        assert code == 0, err
        assert f"this journal was moved to {there} on" in err
    code, out, _ = mortals.run("doctor", "--url", here)
    assert f"warn  moved         this journal was moved to {there}" in out
    code, _, err = mortals.run("signal", "waiting-0", "go", "--url", here)
    assert code == 2
    assert f"this journal was moved to {there} on" in err
    code, _, err = mortals.run("copy", "--from", here, "--to", f"sqlite:///{tmp_path}/c.db")
    assert code == 2
    assert "cannot be moved to" in err
    code, _, err = mortals.run("copy", "--from", there, "--to", here)
    assert code == 2
    assert "was itself moved to" in err


def test_history_alone_goes_to_an_archive_and_the_source_goes_on(
    mortals: Mortals, source: tuple[str, World], new_target: Callable[[], str]
) -> None:
    here, world = source
    there = new_target()
    for there_before in (0, 2):
        code, out, err = mortals.run("copy", "--from", here, "--to", there, "--only-finished", "--json")
        assert code == 0, err
        assert json.loads(out)["there"] == there_before
    assert set(verified(there)) == {"large-0", "failing-0"}
    assert asyncio.run(finish(here, world)) == results()
    assert world.count() == effects()
    assert mortals.run("copy", "--from", here, "--to", there, "--only-finished")[0] == 0
    assert verified(there) == verified(here)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--to", "{here}"), "--from and --to are both"),
        (("--to", "sqlite://"), "a database in memory is gone with its process"),
        (("--to", "{other}", "--abandon"), "this journal is not being moved"),
        (("--to", "{other}", "--abandon", "--dry-run"), "leave them out"),
        (("--to", "postgresql://u:secret@127.0.0.1:1/x"), "cannot be reached"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(
    mortals: Mortals, source: tuple[str, World], tmp_path: Path, args: tuple[str, ...], words: str
) -> None:
    here = source[0]
    given = [arg.format(here=here, other=f"sqlite:///{tmp_path}/b.db") for arg in args]
    code, out, err = mortals.run("copy", "--from", here, *given)
    assert (code, out) == (2, "")
    assert words in err
    assert "secret" not in err
    assert err.count("\n") == 1
    store = open_store(here)
    assert store.moved() is None
    store.close()


def test_tables_beside_the_journal_are_named_and_stay_behind_only_when_that_is_said(
    mortals: Mortals, source: tuple[str, World], postgres_url: str, tmp_path: Path
) -> None:
    here = source[0]
    with closing(sqlite3.connect(tmp_path / "a.db")) as own:
        own.execute("CREATE TABLE bookings (account TEXT)")
    assert "1 table beside the journal: bookings; not copied" in mortals.run("copy", "--from", here, "--to", postgres_url, "--dry-run")[1]
    code, out, err = mortals.run("copy", "--from", here, "--to", postgres_url)
    assert (code, out) == (2, "")
    assert "5 unfinished runs, and tables beside the journal that do not come along: bookings." in err
    assert "then say --leave-tables" in err
    store = open_store(here)
    assert store.moved() is None
    store.close()
    # Finished runs need no table.
    assert "beside the journal: bookings" in mortals.run("copy", "--from", here, "--to", f"sqlite:///{tmp_path}/c.db", "--only-finished")[1]
    code, out, err = mortals.run("copy", "--from", here, "--to", postgres_url, "--leave-tables")
    assert code == 0, err
    assert "1 table beside the journal: bookings; not copied" in out
    assert f"from now on: --url '{postgres_url}', or" in err.replace(f"--url {postgres_url}", f"--url '{postgres_url}'")
    with psycopg.connect(postgres_url, autocommit=True) as own_again:
        own_again.execute('CREATE TABLE "Ledger" (account text); CREATE VIEW seen AS SELECT * FROM perdure_status')
    code, out, _ = mortals.run("copy", "--from", postgres_url, "--to", f"sqlite:///{tmp_path}/b.db", "--dry-run", "--json")
    assert (code, json.loads(out)["tables"]) == (0, ["Ledger"])


def test_a_move_that_was_allowed_to_leave_tables_goes_on_after_a_kill(mortals: Mortals, source: tuple[str, World], tmp_path: Path) -> None:
    here, there = source[0], f"sqlite:///{tmp_path}/b.db"
    with closing(sqlite3.connect(tmp_path / "a.db")) as own:
        own.execute("CREATE TABLE bookings (account TEXT)")
    assert mortals.run("copy", "--from", here, "--to", there, "--leave-tables", dies=(3, "after"), constants=SMALL)[0] == -signal.SIGKILL
    assert mortals.run("copy", "--from", here, "--to", there, "--leave-tables", constants=SMALL)[0] == 0
    assert verified(here) == verified(there)
