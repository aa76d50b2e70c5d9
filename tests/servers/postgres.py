"""A PostgreSQL server for tests and benchmarks: real, durable (fsync is on), killable, and deleted afterwards."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, Literal

import psutil  # type: ignore[import-untyped]
import psycopg
from tests.servers.binaries import NoPostgres, account, binaries
from tests.servers.undertaker import bury, end_processes, hire, processes_in, send

SUPERUSER = "admin"
OWNER = "app"
"""The owner of the databases that tests get: an ordinary user, so that perdure never needs a superuser."""

# After a crash PostgreSQL first syncs every file of every test's database: half a minute with busy disks.
_PATIENCE_S = 150.0
_SETTINGS = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
    "max_connections": "200",
    "shared_buffers": "32MB",
    "min_wal_size": "64MB",
    "max_wal_size": "256MB",
    "timezone": "UTC",
    "log_timezone": "UTC",
    "log_checkpoints": "off",
    "log_line_prefix": "%m [%p] %q%u@%d ",
    "dynamic_shared_memory_type": "mmap",  # in the data directory, which goes away even after SIGKILL
    "huge_pages": "off",
    "jit": "off",
}


_CLEAR = """
DO $$
DECLARE name regclass;
BEGIN
    SET LOCAL session_replication_role = replica;
    FOR name IN SELECT DISTINCT tgrelid FROM pg_trigger WHERE tgenabled = 'D' AND NOT tgisinternal LOOP
        EXECUTE format('ALTER TABLE %s ENABLE TRIGGER USER', name);
    END LOOP;
    FOR name IN SELECT oid FROM pg_class WHERE relkind = 'r' AND relnamespace = 'public'::regnamespace AND relname <> 'perdure_schema' LOOP
        IF name::text LIKE 'perdure\\_%' THEN
            EXECUTE format('DELETE FROM %s', name);
        ELSE
            EXECUTE format('DROP TABLE %s CASCADE', name);
        END IF;
    END LOOP;
END $$
"""


# To drop a database and make another takes the server a checkpoint and hundreds of files, most of a second.
_EMPTY = """
SET lock_timeout = '5s';
DROP SCHEMA public CASCADE;
CREATE SCHEMA public AUTHORIZATION pg_database_owner;
GRANT USAGE ON SCHEMA public TO PUBLIC;
COMMENT ON SCHEMA public IS 'standard public schema'
"""
_IS_LIKE_NEW = f"""
SELECT NOT EXISTS (SELECT FROM pg_namespace WHERE nspname !~ '^pg_' AND nspname NOT IN ('public', 'information_schema'))
   AND NOT EXISTS (SELECT FROM pg_db_role_setting WHERE setdatabase = database.oid)
   AND NOT EXISTS (SELECT FROM pg_default_acl)
   AND NOT EXISTS (SELECT FROM pg_largeobject_metadata)
   AND NOT EXISTS (SELECT FROM pg_event_trigger)
   AND NOT EXISTS (SELECT FROM pg_publication)
   AND (SELECT count(*) = 1 FROM pg_extension)
   AND datacl IS NULL AND datallowconn AND datconnlimit = -1 AND datdba = (SELECT oid FROM pg_roles WHERE rolname = '{OWNER}')
  FROM pg_database AS database WHERE datname = current_database()
"""
_END_ALL = "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE datname = %s"
_END_OTHERS = "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE datname = current_database()"
_TABLES = "SELECT oid::regclass::text FROM pg_class WHERE relkind = 'r' AND relnamespace = 'public'::regnamespace"
_COUNTERS = "SELECT format('%I.%I', schemaname, sequencename), last_value FROM pg_sequences"
_NO_ROWS = 21  # the length of a binary copy of an empty table


class PortTaken(Exception):
    """Something else listens on the server's port."""


class Server:
    """A PostgreSQL of our own: own data directory, free port on 127.0.0.1, never root, ended by its pid.

    It is not started yet. Settings are postgresql.conf's: `Server(max_connections="10")`.
    """

    def __init__(self, **settings: str) -> None:
        self._who = account()
        self.folder = _own_folder()
        os.chown(self.folder, self._who.uid, self._who.gid)
        if not self._who.can_enter(self.folder):
            shutil.rmtree(self.folder)
            raise NoPostgres(f"the server's user cannot enter {self.folder}; name a folder that everybody may pass through: TMPDIR=/tmp")
        self.data = self.folder / "data"
        self.log = self.folder / "log"
        self._postmaster: subprocess.Popen[bytes] | None = None
        self._has_answered = False
        self._numbers = itertools.count(1)
        self._emptied: list[str] = []
        self.port = _free_port()
        # From here on a SIGKILL of this process leaves nothing behind.
        self._undertaker = hire(self.folder)
        try:
            self._bin = binaries(self._who, self.folder)
            self._initdb({**_SETTINGS, **settings})
        except BaseException:
            self.close()
            raise

    @property
    def url(self) -> str:
        """Of the maintenance database, as superuser."""
        return self._url("postgres", SUPERUSER)

    @property
    def is_running(self) -> bool:
        return self._postmaster is not None and self._postmaster.poll() is None

    def start(self, wait: bool = True) -> None:
        """Return when it answers and has been found to be ours; with wait=False as soon as its process exists."""
        assert not self.is_running, "the server runs already"
        self._launch()
        if not wait:
            return
        for _ in range(5):
            try:
                self.wait_ready()
                return
            except PortTaken:
                # Another process took the port after we had chosen it. Before the first answer no client knows our
                # port, so choose another.
                if self._has_answered:
                    raise
                self.port = _free_port()
                self._launch()
        self.wait_ready()

    def wait_ready(self) -> None:
        """Return when our own server answers on its port."""
        deadline = time.monotonic() + _PATIENCE_S
        while self._status() not in ("ready", "standby"):
            assert self._postmaster is not None, "the server was not started"
            code = self._postmaster.poll()
            if code is not None:
                error = PortTaken if "could not create any TCP/IP sockets" in self.log_tail() else RuntimeError
                raise error(f"PostgreSQL ended with code {code} while it started on port {self.port}:\n{self.log_tail()}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"PostgreSQL did not start within {_PATIENCE_S} s:\n{self.log_tail()}")
            time.sleep(0.01)
        check_ours(self.url, self.data)
        self._has_answered = True

    def stop(self, mode: Literal["fast", "immediate"] = "fast") -> None:
        """Shut down: fast ends every transaction in order, immediate leaves recovery to the next start."""
        assert self._postmaster is not None, "the server was not started"
        self._postmaster.send_signal({"fast": signal.SIGINT, "immediate": signal.SIGQUIT}[mode])
        self.resume()  # a stopped process would keep the signal for later
        self._postmaster.wait(_PATIENCE_S)

    def restart(self, mode: Literal["fast", "immediate"] = "fast") -> None:
        self.stop(mode)
        self.start()

    def kill(self) -> None:
        """SIGKILL for the postmaster and all its children, as a power cut would."""
        end_processes(self.folder)
        if self._postmaster is not None:
            self._postmaster.wait(_PATIENCE_S)

    def pause(self) -> None:
        """SIGSTOP for all its processes.

        Connections stay open, the kernel still accepts new ones, and there is no answer.
        """
        assert self._postmaster is not None, "the server was not started"
        self._postmaster.send_signal(signal.SIGSTOP)
        # Only the postmaster forks. When it is stopped, there are no new processes, except one that it was just
        # forking.
        while running := [process for process in processes_in(self.folder) if not _is_stopped(process)]:
            for process in running:
                send(process, signal.SIGSTOP)
            time.sleep(0.001)

    def resume(self) -> None:
        for process in self._family() if self.is_running else processes_in(self.folder):
            send(process, signal.SIGCONT)

    def _family(self) -> list[psutil.Process]:
        """The postmaster and its children, who have no children: all there are while it lives, and found without a look at every process."""
        assert self._postmaster is not None
        pid = self._postmaster.pid
        children = Path(f"/proc/{pid}/task/{pid}/children")
        if not children.exists():
            return processes_in(self.folder)
        found = []
        for number in (pid, *map(int, children.read_text().split())):
            try:
                found.append(psutil.Process(number))
            except psutil.NoSuchProcess:
                continue  # ended meanwhile
        return found

    def revive(self) -> None:
        """Bring the server to its normal state, whatever a test has done to it: running, not paused, no standby."""
        self.resume()
        if (self.data / "standby.signal").exists():
            self.stop("immediate")
            (self.data / "standby.signal").unlink()
        if self.is_running:
            self.wait_ready()
        else:
            self.start()

    def restart_as_standby(self) -> None:
        """Come back as a read-only standby that waits for a primary which never comes; revive() ends that."""
        self.stop()
        (self.data / "standby.signal").touch()
        self.start()

    def new_database(self) -> str:
        """URL of a new, empty database, owned by the user in the URL."""
        if self._emptied:
            return self._url(self._emptied.pop(), OWNER)
        name = f"test_{os.getpid()}_{next(self._numbers)}"
        self.execute(f'CREATE DATABASE "{name}" OWNER {OWNER}')
        return self._url(name, OWNER)

    def drop(self, url: str) -> None:
        """Drop a database, even if clients are connected to it."""
        name = psycopg.conninfo.conninfo_to_dict(url)["dbname"]
        self.execute(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')

    def give_back(self, url: str) -> None:
        """Drop a database, or keep it for the next test that wants a new one.

        An empty one differs only by its name.
        """
        name = psycopg.conninfo.conninfo_to_dict(url)["dbname"]
        self.part(url)
        try:
            with self._inside(url) as superuser:
                superuser.execute(_EMPTY)
                is_like_new = superuser.execute(_IS_LIKE_NEW).fetchone() == (True,)
        except psycopg.Error:
            is_like_new = False  # something in it cannot be dropped, or not now
        if is_like_new:
            self._emptied.append(str(name))
        else:
            self.drop(url)

    def part(self, url: str) -> None:
        """End every connection to a database, and wait until they are gone."""
        name = psycopg.conninfo.conninfo_to_dict(url)["dbname"]
        with psycopg.connect(self.url, autocommit=True, connect_timeout=10) as superuser:
            # The server notices the end of a client a little later; by then its statements are done or rolled back.
            while superuser.execute(_END_ALL, (name,)).fetchall():
                pass

    def clear(self, url: str) -> None:
        """Delete everything from an existing journal, and all other tables: many times faster than a new journal."""
        with self._inside(url) as superuser:
            superuser.execute(_CLEAR)

    def reuse(self, url: str, beside: str) -> None:
        """The same for a database that may still have clients; then create the other tables as its owner."""
        with self._inside(url) as superuser:
            while superuser.execute(f"{_END_OTHERS} AND pid <> pg_backend_pid()").fetchall():
                pass
            superuser.execute(_CLEAR)
            superuser.execute(f"SET ROLE {OWNER}; {beside}".encode())

    def pour(self, source: str, target: str) -> None:
        """Copy the rows and counters of one database into the empty tables of another."""
        with self._inside(source) as giver, self._inside(target) as taker, taker.transaction():
            taker.execute("SET LOCAL session_replication_role = replica")
            for (name,) in giver.execute(_TABLES).fetchall():
                with giver.cursor().copy(f"COPY {name} TO STDOUT (FORMAT binary)".encode()) as rows:
                    poured = b"".join(rows)
                if len(poured) > _NO_ROWS:
                    taker.execute(f"DELETE FROM {name}".encode())  # the version of the schema is never cleared
                    with taker.cursor().copy(f"COPY {name} FROM STDIN (FORMAT binary)".encode()) as rows:
                        rows.write(poured)
            for name, last in giver.execute(_COUNTERS).fetchall():
                taker.execute("SELECT setval(%s::regclass, %s, %s)", (name, last or 1, last is not None))

    def execute(self, statement: str) -> None:
        """Run one statement as superuser in the maintenance database, outside any transaction."""
        with psycopg.connect(self.url, autocommit=True, connect_timeout=10) as connection:
            connection.execute(statement.encode())

    def log_tail(self, lines: int = 20) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:]) if self.log.exists() else "(no log)"

    def close(self) -> None:
        """End its processes and remove its folder."""
        bury(self.folder)
        if self._postmaster is not None:
            self._postmaster.wait(_PATIENCE_S)
        self._undertaker.kill()
        self._undertaker.wait(_PATIENCE_S)

    def _inside(self, url: str) -> psycopg.Connection[tuple[Any, ...]]:
        """A superuser's connection to this database."""
        name = psycopg.conninfo.conninfo_to_dict(url)["dbname"]
        return psycopg.connect(self.url, autocommit=True, connect_timeout=10, dbname=name)

    def _launch(self) -> None:
        with self.log.open("ab") as log:
            self._postmaster = subprocess.Popen(
                [self._bin / "postgres", "-D", self.data, "-p", str(self.port)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={"PATH": os.defpath, "LC_ALL": "C"},
                cwd=self.folder,
                start_new_session=True,  # Ctrl-C is for pytest, which then stops the server itself
                **self._who.popen(),
            )

    def _url(self, database: str, user: str) -> str:
        # Tests with a proxy read the protocol on the way.
        return f"postgresql://{user}@127.0.0.1:{self.port}/{database}?sslmode=disable&gssencmode=disable"

    def _initdb(self, settings: dict[str, str]) -> None:
        made = subprocess.run(
            [
                *(self._bin / "initdb", "-D", self.data, "--username", SUPERUSER, "--auth", "trust"),
                *("--encoding", "UTF8", "--locale", "C", "--no-sync", "--no-instructions"),
            ],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env={"PATH": os.defpath, "LC_ALL": "C"},
            cwd=self.folder,
            timeout=120,
            check=False,
            **self._who.popen(),
        )
        if made.returncode != 0:
            raise NoPostgres(f"initdb failed with code {made.returncode}:\n{made.stdout}{made.stderr}")
        (self.data / "pg_hba.conf").write_text("host all all 127.0.0.1/32 trust\n")
        with (self.data / "postgresql.conf").open("a") as conf:
            conf.writelines(f"{name} = '{value}'\n" for name, value in settings.items())
        self._create_owner()

    def _create_owner(self) -> None:
        # Single-user mode: the owner exists before any client can connect.
        subprocess.run(
            [self._bin / "postgres", "--single", "-D", self.data, "postgres"],
            input=f"CREATE ROLE {OWNER} LOGIN\n",
            capture_output=True,
            text=True,
            env={"PATH": os.defpath, "LC_ALL": "C"},
            cwd=self.folder,
            timeout=60,
            check=True,
            **self._who.popen(),
        )

    def _status(self) -> str:
        """The status of our own postmaster, not of one that was killed and left its file."""
        try:
            lines = (self.data / "postmaster.pid").read_text().splitlines()
        except FileNotFoundError:
            return "absent"
        if self._postmaster is None or len(lines) < 8 or lines[0] != str(self._postmaster.pid):
            return "starting"
        return lines[7].strip()


def check_ours(url: str, data: Path) -> None:
    """Refuse to go on with a server that happens to listen where ours should."""
    with psycopg.connect(url, connect_timeout=10) as connection:
        row = connection.execute("SHOW data_directory").fetchone()
    assert row is not None
    if Path(row[0]) != data:
        raise RuntimeError(f"the server at {url} is not ours: its data directory is {row[0]}, ours is {data}")


def _own_folder() -> Path:
    # Not pytest's tmp_path: only this user may enter it. Resolved, because processes are found by this name.
    return Path(tempfile.mkdtemp(prefix="perdure-pg-")).resolve()


def _free_port() -> int:
    """A port outside the range from which the kernel takes client ports.

    While the server is down, a client that keeps trying could otherwise be given that very port and connect to itself.
    """
    for _ in range(200):
        port = random.randrange(15000, 32000)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError("no free port between 15000 and 32000 on 127.0.0.1")


def _is_stopped(process: psutil.Process) -> bool:
    try:
        return process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True
