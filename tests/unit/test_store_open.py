"""Opening a journal: which options are set, what is refused, and that every refusal says what to do."""

from __future__ import annotations

import stat
import tempfile
from pathlib import Path

import apsw
import pytest
from tests.conformance.suite import Held, hold_one, new_run, serving
from tests.unit.store_tools import first_line, output, python, raw

from perdure.core.events import ThoughtRecorded
from perdure.errors import InvalidInput, StoreCorrupt, StoreError, StoreUnavailable, StoreVersion
from perdure.store.api import Committed
from perdure.store.open import open_store, sqlite_path
from perdure.store.sqlite.migrate import APPLICATION_ID, MIGRATIONS
from perdure.store.sqlite.owner import holds_journal
from perdure.store.sqlite.place import check_place, file_system_of
from perdure.store.url import shown_url


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("sqlite:///file.db", Path("file.db").absolute()),
        ("sqlite:////tmp/file.db", Path("/tmp/file.db")),
        ("sqlite:///:memory:", Path(":memory:").absolute()),
        ("sqlite://", None),
    ],
)
def test_a_url_names_a_file(url: str, path: Path | None) -> None:
    assert sqlite_path(url) == path


@pytest.mark.parametrize(
    "url", ["", "file.db", "mysql://host/db", "sqlite:/x.db", "sqlite://host/x.db", "sqlite:///", "sqlite:///x.db?mode=ro"]
)
def test_another_url_is_refused_with_the_supported_ones(url: str) -> None:
    with pytest.raises(InvalidInput, match=r"supported: sqlite:///file\.db"):
        open_store(url)


def test_a_refused_url_does_not_show_its_password() -> None:
    with pytest.raises(InvalidInput) as caught:
        open_store("mysql://ann:hunter2@host/db")
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://ann:hunter2@host/db", "postgresql://…@host/db"),
        ("postgresql://ann:hun@ter2@host/db", "postgresql://…@host/db"),
        ("postgresql://host/db?user=ann&password=hunter2&sslmode=require", "postgresql://host/db?user=ann&password=…&sslmode=require"),
        ("postgresql://host/db?pass%77ord=hunter2", "postgresql://host/db?pass%77ord=…"),
        ("postgresql://host/db?SSLPassword=hunter2#x", "postgresql://host/db?SSLPassword=…#x"),
        ("host=h password = hunter2 dbname=d", "host=h password = … dbname=d"),
        ("host=h password='hunter2 \\'x' dbname=d", "host=h password=… dbname=d"),
        ("sqlite:///me@work/pass=1.db", "sqlite:///me@work/pass=1.db"),
    ],
)
def test_a_url_is_shown_without_what_lets_anybody_in(url: str, shown: str) -> None:
    assert shown_url(url) == shown


def test_the_file_is_private_and_its_pragmas_are_as_promised(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    store = open_store(f"sqlite:///{path}")
    store.register("w", "host:1", 1, 1)
    for file in (path, Path(f"{path}-wal"), Path(f"{path}-shm")):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file
    assert stat.S_IMODE(Path(f"{path}-workers").stat().st_mode) == 0o700
    facts = store.facts()
    assert (facts["journal_mode"], facts["synchronous"], facts["schema_version"]) == ("wal", "2", str(len(MIGRATIONS)))
    assert raw(path).pragma("application_id") == APPLICATION_ID
    store.close()


def test_the_log_stays_short_so_that_commits_soon_write_over_it(tmp_path: Path) -> None:
    store = open_store(f"sqlite:///{tmp_path}/journal.db")
    for number in range(400):
        store.create_run(new_run(f"r{number}"))
    assert 0 < (tmp_path / "journal.db-wal").stat().st_size < 4_000_000
    store.close()


def test_the_log_is_three_times_as_long_while_commits_are_large(tmp_path: Path) -> None:
    store = open_store(f"sqlite:///{tmp_path}/journal.db")
    log, runs = tmp_path / "journal.db-wal", [hold_one(store, f"r{number}") for number in range(120)]
    assert log.stat().st_size < 4_000_000
    for _ in range(30):
        appends = [held.append(ThoughtRecorded("x" * 500)) for held in runs]
        assert store.append(appends) == [Committed()] * len(runs)
        for held, append in zip(runs, appends, strict=True):
            held.seq, held.head = held.seq + 1, append.events[-1].hash
    assert 6_000_000 < log.stat().st_size < 12_000_000  # 960 pages of 8 KiB, and one commit more
    store.close()


def test_synchronous_normal_is_taken_when_asked_for_and_nothing_below_it(tmp_path: Path) -> None:
    store = open_store(f"sqlite:///{tmp_path}/journal.db", synchronous="normal")
    assert store.facts()["synchronous"] == "1"
    store.close()
    with pytest.raises(InvalidInput, match="'full'"):
        open_store(f"sqlite:///{tmp_path}/journal.db", synchronous="off")


def test_a_file_of_zero_bytes_is_a_new_journal(tmp_path: Path) -> None:
    (tmp_path / "journal.db").touch()
    store = open_store(f"sqlite:///{tmp_path}/journal.db")
    store.create_run(new_run("r"))
    store.close()


def test_a_database_with_tables_of_its_own_becomes_a_journal_and_keeps_them(tmp_path: Path) -> None:
    path = tmp_path / "app.db"
    raw(path).execute("CREATE TABLE orders (id); INSERT INTO orders VALUES (7)")
    store = open_store(f"sqlite:///{path}")
    store.create_run(new_run("r"))
    store.close()
    assert raw(path).execute("SELECT id FROM orders").fetchall() == [(7,)]


def test_a_journal_is_opened_again_with_what_it_holds(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/journal.db"
    store = open_store(url)
    row, _ = store.create_run(new_run("r"))
    store.close()
    assert not Path(f"{tmp_path}/journal.db-wal").exists()
    again = open_store(url)
    assert again.get("r") == row
    again.close()


def test_a_closed_store_says_so(tmp_path: Path) -> None:
    store = open_store(f"sqlite:///{tmp_path}/journal.db")
    store.close()
    store.close()
    with pytest.raises(StoreError, match="closed"):
        store.get("r")
    with pytest.raises(StoreError, match="closed"):
        store.create_run(new_run("r"))


def test_something_that_is_not_a_database_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("dear diary, " * 1000)
    with pytest.raises(StoreCorrupt, match=r"(?s)is not a SQLite database; choose another file.*notes\.txt"):
        open_store(f"sqlite:///{path}")
    assert path.read_text() == "dear diary, " * 1000


def test_a_database_of_another_program_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.db"
    other = raw(path)
    other.pragma("application_id", 0x12345678)
    other.execute("CREATE TABLE t (a)")
    other.close()
    with pytest.raises(StoreCorrupt, match="another program"):
        open_store(f"sqlite:///{path}")


def test_a_file_without_a_journal_is_not_made_one_unless_that_was_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "app.db"
    with pytest.raises(StoreError):
        open_store(f"sqlite:///{path}", create=False)
    assert not path.exists()
    raw(path).execute("CREATE TABLE orders (id)")
    before = path.read_bytes()
    with pytest.raises(StoreCorrupt, match=r"(?s)the database has no perdure journal in it and was left alone.*app\.db"):
        open_store(f"sqlite:///{path}", create=False)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["app.db"]
    open_store(f"sqlite:///{path}").close()
    open_store(f"sqlite:///{path}", create=False).close()


_TRY_TO_LOCK = """
import fcntl, sys
with open(sys.argv[1], "r+b") as file:
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 510, 0x40000002)  # the bytes that every SQLite reader shares
        print("free")
    except OSError:
        print("locked")
"""


def test_looking_whose_file_it_is_drops_no_lock_of_a_store_that_is_open_in_this_process(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    store = open_store(f"sqlite:///{path}")
    store.create_run(new_run("r"))
    assert holds_journal(path)
    assert output(python(_TRY_TO_LOCK, path)) == "locked"
    store.close()
    assert output(python(_TRY_TO_LOCK, path)) == "free"


def test_a_checkpoint_that_was_killed_in_the_middle_leaves_a_journal_of_ours(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    store = open_store(f"sqlite:///{path}")
    store.create_run(new_run("r"))
    whole = tmp_path / "whole.db"
    raw(path).execute("VACUUM INTO ?", (str(whole),))
    log = Path(f"{path}-wal").read_bytes()
    first_page = whole.read_bytes()[:4096]
    store.close()
    # The first page has arrived in the file, and the others that it speaks of are in the log alone.
    path.write_bytes(first_page)
    Path(f"{path}-wal").write_bytes(log)
    open_store(f"sqlite:///{path}", create=False).close()


def test_a_damaged_journal_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    open_store(f"sqlite:///{path}").close()
    content = bytearray(path.read_bytes())
    content[100:4096] = b"\xff" * 3996
    path.write_bytes(content)
    with pytest.raises(StoreCorrupt, match=r"(?s)the database is damaged.*journal\.db"):
        open_store(f"sqlite:///{path}")


def test_a_journal_of_a_newer_perdure_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    open_store(f"sqlite:///{path}").close()
    newer = raw(path)
    newer.execute("INSERT INTO perdure_schema VALUES (?, 'abc', 0)", (len(MIGRATIONS) + 1,))
    newer.close()
    with pytest.raises(StoreVersion, match=f"schema version {len(MIGRATIONS) + 1}, this perdure knows {len(MIGRATIONS)}: upgrade perdure"):
        open_store(f"sqlite:///{path}")


def test_a_schema_that_perdure_never_released_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    open_store(f"sqlite:///{path}").close()
    other = raw(path)
    other.execute("UPDATE perdure_schema SET checksum = 'abc'")
    other.close()
    with pytest.raises(StoreCorrupt, match="schema version 1 is not the one"):
        open_store(f"sqlite:///{path}")


def test_a_missing_folder_is_named_with_the_command_that_makes_it(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match=r"mkdir -p .*/nowhere"):
        open_store(f"sqlite:///{tmp_path}/nowhere/journal.db")
    with pytest.raises(StoreUnavailable, match="is a folder"):
        open_store(f"sqlite:///{tmp_path}")


_OPEN_AS_NOBODY = """
import os, sys
import perdure.store.sqlite.store
from perdure.store.open import open_store  # imported as who we are: nobody may not be able to read the sources
if os.getuid() == 0:
    os.setgid(65534), os.setuid(65534)
try:
    open_store(f"sqlite:///{sys.argv[1]}")
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize(("locked", "words"), [("file", "is read-only for this user"), ("folder", "is not writable")])
def test_what_this_user_may_not_write_is_refused(locked: str, words: str) -> None:
    folder = Path(tempfile.mkdtemp())  # pytest's own folders are closed to other users
    try:
        path = folder / "journal.db"
        open_store(f"sqlite:///{path}").close()
        path.chmod(0o444)
        folder.chmod(0o555 if locked == "folder" else 0o777)
        said = output(python(_OPEN_AS_NOBODY, path))
        assert said.startswith("StoreUnavailable")
        assert words in said
    finally:
        folder.chmod(0o700)
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()


_MOUNTS = """/dev/vda / ext4 rw 0 0
server:/export /mnt/nfs nfs4 rw 0 0
ann@host:/data /mnt/with\\040space fuse.sshfs rw 0 0
tmpfs /mnt/nfs/local tmpfs rw 0 0
"""


@pytest.mark.parametrize(
    ("folder", "kind"),
    [
        ("/srv/ann", "ext4"),
        ("/mnt/nfs/x", "nfs4"),
        ("/mnt/nfs/local/x", "tmpfs"),
        ("/mnt/with space/x", "fuse.sshfs"),
        ("/mnt/nfsx", "ext4"),
    ],
)
def test_the_file_system_of_a_folder_is_that_of_the_nearest_mount(folder: str, kind: str) -> None:
    assert file_system_of(Path(folder), _MOUNTS) == kind


@pytest.mark.parametrize("kind", ["nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs"])
def test_a_network_file_system_is_refused(tmp_path: Path, kind: str) -> None:
    check_place(tmp_path / "journal.db", mounts=f"disk {tmp_path} ext4 rw 0 0\n")
    with pytest.raises(StoreUnavailable, match=f"network file system \\({kind}\\)"):
        check_place(tmp_path / "journal.db", mounts=f"server {tmp_path} {kind} rw 0 0\n")


_OPEN_WHEN_TOLD = """
import sys
from perdure.store.open import open_store
print("here", flush=True)
sys.stdin.readline()
store = open_store(f"sqlite:///{sys.argv[1]}")
store.register(sys.argv[2], sys.argv[2], 1, 1)
print(store.facts()["schema_version"])
store.close()
"""


def test_eight_processes_that_start_at_once_make_one_schema(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    processes = [python(_OPEN_WHEN_TOLD, path, f"w{n}") for n in range(8)]
    for process in processes:
        assert first_line(process) == "here"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    assert [output(process) for process in processes] == [str(len(MIGRATIONS))] * 8
    assert raw(path).execute("SELECT count(*) FROM perdure_schema").get == len(MIGRATIONS)
    assert raw(path).execute("SELECT count(*) FROM perdure_workers").get == 8


_CREATE_A_RUN = """
import sys
from perdure.store.open import open_store
from tests.conformance.suite import new_run
store = open_store(f"sqlite:///{sys.argv[1]}")
store.create_run(new_run("from-elsewhere"))
"""


def test_version_changes_when_another_process_commits(tmp_path: Path) -> None:
    store = open_store(f"sqlite:///{tmp_path}/journal.db")
    before = store.version()
    assert store.version() == before
    output(python(_CREATE_A_RUN, tmp_path / "journal.db"))
    assert store.version() != before
    assert store.get("from-elsewhere") is not None
    store.close()


def test_a_run_written_by_a_killed_process_is_there_although_its_log_was_never_emptied(tmp_path: Path) -> None:
    code = _CREATE_A_RUN + "\nimport os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n"
    process = python(code, tmp_path / "journal.db")
    process.communicate()
    assert process.returncode == -9
    assert (tmp_path / "journal.db-wal").stat().st_size > 0
    store = open_store(f"sqlite:///{tmp_path}/journal.db")
    assert store.get("from-elsewhere") is not None
    store.close()


def test_two_stores_on_one_file_in_one_process_see_each_other_and_fence_each_other(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/journal.db"
    one, two = open_store(url), open_store(url)
    held = hold_one(one, "r")
    one.unregister("w", 5)
    two.register("w2", "host:2", 2, 5)
    (claimed,) = two.claim("w2", serving("a"), 1, 1 << 60)
    assert [type(answer).__name__ for answer in one.append([held.append(ThoughtRecorded("zombie"))])] == ["Refused"]
    assert [type(answer).__name__ for answer in two.append([Held.of(claimed).append(ThoughtRecorded("x"))])] == ["Committed"]
    one.close()
    assert two.get("r") is not None
    two.close()


def test_the_sqlite_library_is_one_without_the_wal_reset_bug() -> None:
    assert tuple(map(int, apsw.sqlite_lib_version().split("."))) >= (3, 51, 3), "two writing processes can corrupt the log of an older one"
