"""The command line on PostgreSQL.

Every verb, the banner of a worker, the checks of doctor, and errors without a password.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from tests.servers import forked
from tests.servers.pooler import Pooler
from tests.servers.postgres import Server

from perdure.errors import StoreUnavailable
from perdure.store.open import open_store

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
SECRET = "hush-hush-1"
AGENTS = """
import asyncio, os
from pathlib import Path
from perdure import Run, agent, tool

HERE = Path(__file__).parent

@tool(effect="once")
async def charge(cents: int) -> str:
    if (HERE / "kill").exists():
        (HERE / "kill").unlink()
        os.kill(os.getpid(), 9)
    return f"charged {cents}"

@charge.compensate(effect="idempotent")
async def _(result: str, cents: int) -> None:
    ...

@tool(effect="read")
async def hold(name: str) -> str:
    (HERE / f"{name}.begun").touch()
    while not (HERE / "go").exists():
        await asyncio.sleep(0.01)
    return name

@agent(version="1")
async def shop(run: Run, cents: int) -> str:
    return await charge(cents)

@agent(version="1")
async def asking(run: Run) -> str:
    heard = await run.receive("word")
    decision = await run.request_approval("refund", {"cents": 1})
    return f"{heard}, {decision.outcome}"

@agent(version="1", queue="reports")
async def holding(run: Run, name: str) -> str:
    return await hold(name)
"""


class Desk:
    """A folder with agents in it, a database, and the program run there."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder = folder
        self.url = url
        self.children: list[subprocess.Popen[str]] = []
        (folder / "shop.py").write_text(AGENTS)

    def run(self, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
        # In a fork, modules that PYTHONPATH should provide may be loaded already.
        start = subprocess.run if "PYTHONPATH" in env else forked.run
        done = start(
            [sys.executable, "-m", "perdure", *args],
            cwd=self.folder,
            env=self._env(env),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert "Traceback" not in done.stderr, done.stderr
        assert SECRET not in done.stdout + done.stderr
        return done

    def __call__(self, *args: str, code: int = 0, **env: str) -> str:
        """What `perdure ARGS` says on stdout; it must end with this code."""
        done = self.run(*args, **env)
        assert done.returncode == code, (args, done.returncode, done.stdout, done.stderr)
        return done.stdout

    def lines(self, *args: str, code: int = 0, **env: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self(*args, "--json", code=code, **env).splitlines()]

    def refusal(self, *args: str, code: int = 2, **env: str) -> str:
        """The only line on stderr with which the program refuses; stdout is empty."""
        done = self.run(*args, **env)
        assert (done.returncode, done.stdout) == (code, ""), (done.returncode, done.stdout, done.stderr)
        assert re.fullmatch(r"perdure: [^\n]+\n", done.stderr), done.stderr
        return done.stderr

    def worker(self, *args: str, **env: str) -> subprocess.Popen[str]:
        """A worker in the background; its output goes to the file worker.log."""
        with (self.folder / "worker.log").open("w") as log:
            child = forked.Popen(
                [sys.executable, "-m", "perdure", "worker", "shop.py", *args],
                cwd=self.folder,
                env=self._env(env),
                stdout=log,
                stderr=log,
                text=True,
            )
        self.children.append(child)
        return child

    def said(self, words: str, within_s: float = 20.0) -> str:
        """The output of the worker, as soon as it has these words."""
        deadline = time.monotonic() + within_s
        while words not in (log := (self.folder / "worker.log").read_text()):
            assert time.monotonic() < deadline, log
            time.sleep(0.02)
        assert SECRET not in log
        return log

    def begun(self, name: str) -> None:
        deadline = time.monotonic() + 60
        while not (self.folder / f"{name}.begun").exists():
            assert time.monotonic() < deadline, (self.folder / "worker.log").read_text()
            time.sleep(0.02)

    def _env(self, extra: dict[str, str]) -> dict[str, str]:
        own = {name: value for name, value in os.environ.items() if not name.startswith(("PERDURE_", "PG"))}
        return own | {"PYTHONPATH": str(ROOT / "src"), "PERDURE_URL": self.url} | extra


@pytest.fixture
def desk(tmp_path: Path, postgres_url: str) -> Iterator[Desk]:
    desk = Desk(tmp_path, postgres_url)
    yield desk
    for child in desk.children:
        child.send_signal(signal.SIGCONT)
        child.kill()
        child.wait()


def relations(url: str) -> int:
    with psycopg.connect(url, autocommit=True) as connection:
        [(count,)] = connection.execute("SELECT count(*) FROM pg_class WHERE relname LIKE 'perdure%'").fetchall()
    return int(count)


@pytest.fixture
def guarded(postgres: Server, postgres_url: str) -> Iterator[str]:
    """The URL of the same database for a user who needs a password, and has no right but to connect."""
    rules = postgres.data / "pg_hba.conf"
    before = rules.read_text()
    postgres.execute(f"CREATE ROLE guarded LOGIN PASSWORD '{SECRET}'")
    rules.write_text("host all guarded 127.0.0.1/32 scram-sha-256\n" + before)
    postgres.execute("SELECT pg_reload_conf()")
    try:
        yield postgres_url.replace("app@", f"guarded:{SECRET}@")
    finally:
        rules.write_text(before)
        postgres.execute("SELECT pg_reload_conf()")
        with psycopg.connect(postgres_url.replace("app@", "admin@"), autocommit=True) as connection:
            connection.execute("DROP OWNED BY guarded; DROP ROLE guarded")


# --- every verb ------------------------------------------------------------------------------------------------------------


def test_every_verb_works_on_postgresql(desk: Desk) -> None:
    assert desk("migrate", "--check", code=7) != ""
    assert "made a journal, schema version" in desk("migrate")
    assert desk.lines("migrate", "--check")[0]["up_to_date"] is True

    (desk.folder / "kill").touch()
    assert desk.run("run", "shop.py:shop", "cents:=5", "--id", "s1").returncode == -9
    assert desk("resume", "s1", code=4) == ""
    assert "in doubt" in desk("why", "s1")
    desk("resolve", "s1", "1", "--did-not-happen", "--final", "--by", "ann")
    assert desk("resume", "s1") == "charged 5\n"

    assert desk("run", "shop.py:asking", "--id", "a1", code=3) == ""
    desk("signal", "a1", "word", '"hello"', "--key", "1")
    desk("pause", "a1")
    desk("unpause", "a1")
    desk("resume", "a1", code=3)
    [asked] = desk.lines("approvals")
    desk("approve", asked["approval"], "--by", "bob")
    assert desk("resume", "a1") == "hello, approved\n"
    assert desk("run", "shop.py:asking", "--id", "a2", "--detach") == "a2\n"
    desk("cancel", "a2", "--reason", "enough", "--force")

    assert [row["run_id"] for row in desk.lines("list")] == ["a2", "a1", "s1"]
    assert desk.lines("show", "s1")[0]["output"] == "charged 5"
    events = desk.lines("events", "s1")
    assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
    assert "run of shop created" in desk("trace", "s1", str(len(events)))
    assert {record["run_id"] for record in map(json.loads, desk("audit").splitlines())} == {"s1", "a1", "a2"}
    assert desk.lines("costs")[0]["calls"] > 0
    assert desk("replay", "--all", "shop.py:shop").startswith("1 run: all the same")
    assert "3 runs" in desk("verify")
    desk("undo", "s1", "shop.py:shop", "--yes")
    assert {check["verdict"] for check in desk.lines("doctor")} <= {"ok", "warn"}
    completed = desk("show", _PERDURE_COMPLETE="bash_complete", COMP_WORDS="perdure show a", COMP_CWORD="2")
    assert "a1" in completed


def test_a_run_says_once_that_it_has_made_the_journal(desk: Desk) -> None:
    first = desk.run("run", "shop.py:shop", "cents:=5", "--id", "s1")
    assert (first.returncode, first.stderr.count("perdure: made a new journal in PostgreSQL at 127.0.0.1")) == (0, 1)
    assert desk.run("run", "shop.py:shop", "cents:=5", "--id", "s2").stderr == ""


def test_the_database_is_named_by_a_flag_by_the_environment_or_by_a_file(desk: Desk) -> None:
    desk("migrate")
    (desk.folder / "perdure.toml").write_text(f'url = "{desk.url}"\nconnections = 3\nanswer_s = 5.0\n')
    assert desk("list", PERDURE_URL="") == ""
    (desk.folder / "perdure.toml").write_text('url = "sqlite:///nowhere.db"\n')
    assert desk("list", "--url", desk.url, PERDURE_URL="") == ""
    assert desk.run("list", PERDURE_URL="").returncode == 6


def test_a_command_to_type_has_the_user_and_never_the_password(desk: Desk, guarded: str) -> None:
    desk("migrate")
    told = desk.run("run", "shop.py:asking", "--id", "a1", "--url", desk.url, PERDURE_URL="").stderr
    assert f"perdure resume a1 --url '{desk.url}'" in told
    with psycopg.connect(desk.url, autocommit=True) as connection:
        connection.execute("GRANT ALL ON ALL TABLES IN SCHEMA public TO guarded")
    assert f"--url '{guarded.replace(f':{SECRET}', '')}" in desk("why", "a1", "--url", guarded, PERDURE_URL="")


def test_a_verb_that_only_looks_or_steers_makes_no_journal(desk: Desk) -> None:
    for words in (["list"], ["why", "r"], ["cancel", "r"], ["signal", "r", "t"], ["resolve", "r", "1", "--did-not-happen"], ["verify"]):
        assert "has no perdure journal" in desk.refusal(*words)
    assert "there is no journal" in desk("doctor")
    assert relations(desk.url) == 0


# --- errors ----------------------------------------------------------------------------------------------------------------


def test_what_keeps_it_from_the_database_is_one_line_with_a_way_out(desk: Desk, guarded: str, postgres: Server) -> None:
    desk("migrate")
    wrong = guarded.replace(SECRET, "no-such-word")
    assert "does not let us in" in desk.refusal("list", "--url", wrong)
    assert "does not let us in" in desk.refusal("list", PERDURE_URL=wrong)
    assert "no-such-word" not in desk.refusal("list", "--url", wrong)
    assert "createdb" in desk.refusal("list", "--url", desk.url.replace("/test_", "/no_test_"))
    assert "may not do that" in desk.refusal("list", "--url", guarded)
    assert "GRANT" in desk.refusal("run", "shop.py:shop", "cents:=1", "--url", guarded)
    assert "--url" not in desk.refusal("list", "--url", guarded)  # who may not look may not migrate either
    away = desk.refusal("list", "--url", desk.url.replace(f":{postgres.port}", ":1"))
    assert "cannot be reached" in away
    assert "check host and port" in away
    assert "acknowledged" not in away
    assert "check host and port" in desk.refusal("list", "--url", "postgresql://u@no-such-host.invalid/d")
    assert "there is no setting 'no_such_option'" in desk.refusal("list", "--url", "postgresql://u@h/d?no_such_option=1")
    hidden = desk.refusal("list", "--url", "postgresql://u:part/of?hush=word@h/d")
    assert "is not the URL of a PostgreSQL database" in hidden
    assert "hush" not in hidden
    assert "~/.pgpass" in desk.refusal("list", "--url", guarded.replace(f":{SECRET}", ""))
    encrypted = f"{desk.url}{'&' if '?' in desk.url else '?'}sslmode=require"
    assert "sslmode in the URL asks for encryption" in desk.refusal("list", "--url", encrypted)
    failed = [check for check in desk.lines("doctor", "--url", wrong, code=1) if check["verdict"] == "FAIL"]
    assert [check["name"] for check in failed] == ["database"]


def test_without_the_driver_it_says_what_to_install(desk: Desk) -> None:
    (desk.folder / "psycopg.py").write_text('raise ImportError("no pq wrapper available")\n')
    path = f"{desk.folder}:{ROOT / 'src'}"
    assert "pip install '/path/to/checkout[postgres]'" in desk.refusal("run", "shop.py:shop", "cents:=1", PYTHONPATH=path)
    for verb in ("list", "migrate"):
        assert "pip install 'perdure[postgres]'" in desk.refusal(verb, PYTHONPATH=path)
    assert "pip install 'perdure[postgres]'" in desk("doctor", code=1, PYTHONPATH=path)


# --- workers ---------------------------------------------------------------------------------------------------------------


def test_a_worker_says_what_it_serves_and_from_where_and_drains(desk: Desk, postgres: Server) -> None:
    worker = desk.worker("--queue", "reports", "--concurrency", "7", PERDURE_LEASE_S="12")
    said = desk.said("SIGTERM drains it")
    assert f"serving shop@1 ({desk.folder}/shop.py:shop)" in said
    [line] = [line for line in said.splitlines() if "drains it" in line]
    for words in (
        f":{worker.pid} on PostgreSQL at 127.0.0.1:{postgres.port}/",
        "1 queue alone: reports",
        "7 runs",
        "lease 12 s",
        "schema version",
    ):
        assert words in line
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(20) == 0
    assert desk.said("drained").count("\n") < 10


def test_a_worker_waits_for_a_server_that_is_away_and_says_so_once(desk: Desk, postgres: Server) -> None:
    desk("run", "shop.py:shop", "cents:=7", "--id", "s1", "--detach")
    postgres.stop()
    try:
        worker = desk.worker()
        desk.said("waiting for the database")
        time.sleep(1.0)
        assert worker.poll() is None
    finally:
        postgres.start()
    said = desk.said("SIGTERM drains it")
    assert said.count("waiting for the database") == 1
    assert said.count("the database is available after") == 1
    deadline = time.monotonic() + 60
    while desk.lines("show", "s1")[0]["status"] != "succeeded":
        assert time.monotonic() < deadline
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(20) == 0


def test_a_worker_that_waits_leaves_at_a_signal(desk: Desk, postgres: Server) -> None:
    worker = desk.worker(PERDURE_URL=desk.url.replace(f":{postgres.port}", ":1"))
    desk.said("waiting for the database")
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(20) == 0


def test_a_worker_does_not_wait_for_what_waiting_cannot_mend(desk: Desk, guarded: str) -> None:
    desk("migrate")
    for url in (guarded.replace(SECRET, "no-such-word"), desk.url.replace("/test_", "/no_test_")):
        assert "perdure: PostgreSQL at" in desk.refusal("worker", "shop.py", PERDURE_URL=url)
    with psycopg.connect(desk.url, autocommit=True) as connection:
        connection.execute("INSERT INTO perdure_schema VALUES (99, 'x', 0)")
    assert "upgrade perdure" in desk.refusal("worker", "shop.py")
    assert "upgrade perdure" in desk.refusal("migrate")


def test_who_works_who_is_silent_and_what_waits(desk: Desk) -> None:
    (desk.folder / "perdure.toml").write_text("lease_s = 6.0\n[queues.reports]\nconcurrency = 1\n")
    worker = desk.worker()
    desk.said("SIGTERM drains it")
    desk("run", "shop.py:holding", "name=h1", "--id", "h1", "--detach")
    desk.begun("h1")
    desk("run", "shop.py:holding", "name=h2", "--id", "h2", "--detach", "--tenant", "acme")

    one, queue = desk.lines("list", "--workers")
    assert (one["kind"], one["alive"], one["runs"], one["queues"]) == ("worker", True, 1, None)
    assert one["name"].endswith(f":{worker.pid}")
    assert 0 < one["lease_left_s"] <= 6
    assert "holding@1" in one["serves"]
    assert (queue["kind"], queue["queue"], queue["ready"], queue["held"], queue["limit"], queue["tenants"]) == (
        "queue",
        "reports",
        1,
        1,
        1,
        2,
    )
    assert 0 < queue["waited_s"] < 120
    told = desk("list", "--workers")
    assert "alive" in told
    assert "1 of 1" in told

    held = desk("why", "h1")
    assert f":{worker.pid} since" in held
    assert "last sign of life" in held
    assert "lease until" in held
    assert "queue reports is full: 1 run of at most 1" in desk("why", "h2")

    worker.send_signal(signal.SIGSTOP)
    deadline = time.monotonic() + 60
    while desk.lines("list", "--workers")[0]["alive"]:
        assert time.monotonic() < deadline
    [silent, _] = desk.lines("list", "--workers")
    assert (silent["runs"], silent["lease_left_s"] < 0) == (1, True)
    assert "silent for" in desk("list", "--workers")
    assert "another worker takes the run over when the lease has run out" in desk("why", "h1")
    [left] = [row for row in desk.lines("list", "--unserved") if row["run_id"] == "h1"]
    assert left["worker_name"].endswith(f":{worker.pid}")
    assert left["unserved"] == f"held by {left['worker_name']}, which is silent (suspended, or cut off from the database); no worker is up"
    assert "lists no runs" in desk.refusal("list", "--workers", "--status", "queued")


# --- doctor ----------------------------------------------------------------------------------------------------------------


SQL = re.findall(r"```sql\n(.*?)```", (ROOT / "docs" / "postgres.md").read_text(), re.S)
_, READING, WORKING, *_ = re.findall(r"```sql\n(.*?)```", (ROOT / "docs" / "security.md").read_text(), re.S)


def reader_grants(role: str) -> list[str]:
    return re.findall(r"^GRANT [^;]+", READING.replace("TO perdure_reader", f"TO {role}"), re.M)


def worker_grants(role: str) -> list[str]:
    return [*reader_grants(role), *re.findall(r"^GRANT [^;]+", WORKING.replace("TO perdure_worker", f"TO {role}"), re.M)]


def found(desk: Desk, *args: str, code: int = 0) -> dict[str, dict[str, Any]]:
    return {check["name"]: check for check in desk.lines("doctor", *args, code=code)}


def test_doctor_says_what_the_server_does_not_keep(desk: Desk, postgres: Server) -> None:
    desk("migrate")
    well = found(desk)
    for name in (
        "database",
        "server",
        "fsync",
        "page writes",
        "commits",
        "schema",
        "server clock",
        "connections",
        "doorbell",
        "rights",
        "autovacuum",
    ):
        assert well[name]["verdict"] == "ok", well[name]
    for setting in ("fsync", "full_page_writes", "autovacuum"):
        postgres.execute(f"ALTER SYSTEM SET {setting} = off")
    postgres.execute("SELECT pg_reload_conf()")
    try:
        ill = found(desk, code=1)
    finally:
        postgres.execute("ALTER SYSTEM RESET ALL")
        postgres.execute("SELECT pg_reload_conf()")
    assert {name: check["verdict"] for name, check in ill.items() if check["verdict"] != "ok"} == {
        "fsync": "FAIL",
        "page writes": "warn",
        "autovacuum": "FAIL",
    }


def test_doctor_notices_a_proxy_that_pools_transactions(desk: Desk) -> None:
    desk("migrate")
    with Pooler(desk.url) as pooler:
        doorbell = found(desk, "--url", pooler.url(desk.url))["doorbell"]
    assert doorbell["verdict"] == "warn"
    assert "pools transactions" in doorbell["found"]


def test_a_worker_needs_the_rights_that_the_page_grants_and_no_others(desk: Desk, guarded: str) -> None:
    desk("migrate")
    told = found(desk, "--url", guarded, code=1)
    assert told["rights"]["found"].startswith("this user lacks INSERT on perdure_approvals, SELECT on perdure_approvals")
    assert "may not read" in told["schema"]["found"]
    with psycopg.connect(desk.url, autocommit=True) as connection:
        for question in SQL[0].strip().split("\n"):
            connection.execute(question.encode())
        for grant in worker_grants("guarded"):
            connection.execute(grant.encode())
        connection.execute("REVOKE UPDATE ON perdure_runs, perdure_turns FROM guarded")
        lacking = found(desk, "--url", guarded, code=1)["rights"]
        assert (lacking["verdict"], lacking["found"]) == ("FAIL", "this user lacks UPDATE on perdure_runs, UPDATE on perdure_turns")
        for grant in worker_grants("guarded"):
            connection.execute(grant.encode())
        assert found(desk, "--url", guarded)["rights"]["verdict"] == "ok"
        assert desk("run", "shop.py:shop", "cents:=5", "--id", "s1", PERDURE_URL=guarded) == "charged 5\n"
        desk("run", "shop.py:asking", "--id", "a1", "--no-wait", PERDURE_URL=guarded, code=3)
        desk("signal", "a1", "word", "--key", "k", PERDURE_URL=guarded)
        desk("cancel", "a1", PERDURE_URL=guarded)
        with pytest.raises(psycopg.errors.InsufficientPrivilege), psycopg.connect(guarded) as theirs:
            theirs.execute("DELETE FROM perdure_events")


def test_who_only_looks_needs_the_rights_that_the_page_grants(desk: Desk, guarded: str) -> None:
    desk("run", "shop.py:asking", "--id", "a1", "--no-wait", code=3)
    desk("run", "shop.py:shop", "cents:=5", "--id", "s1")
    with psycopg.connect(desk.url, autocommit=True) as connection:
        for grant in reader_grants("guarded"):
            connection.execute(grant.encode())
    for words in ("list", "list --unserved", "show s1", "events s1", "costs", "audit", "why a1", "trace s1 1"):
        assert desk(*words.split(), PERDURE_URL=guarded) != "", words
    assert (desk("list", "--workers", PERDURE_URL=guarded), desk("approvals", PERDURE_URL=guarded)) == ("", "")
    assert "2 runs" in desk("verify", PERDURE_URL=guarded)
    checks = {check["name"]: check for check in desk.lines("doctor", PERDURE_URL=guarded)}
    assert checks["rights"]["verdict"] == "ok"
    assert "may only read" in checks["rights"]["found"]
    assert (checks["workers"]["verdict"], "1 run is unfinished" in checks["workers"]["found"]) == ("warn", True)
    assert "may not do that" in desk.refusal("signal", "a1", "word", PERDURE_URL=guarded)


# --- the examples ----------------------------------------------------------------------------------------------------------


def test_the_ledger_books_once_on_postgresql_also_as_a_worker_without_the_right_to_create(desk: Desk, guarded: str) -> None:
    ledger = f"{EXAMPLES / 'ledger.py'}"
    desk("run", f"{ledger}:set_up", "--id", "accounts")
    with psycopg.connect(desk.url, autocommit=True) as owner:
        for grant in (*worker_grants("guarded"), "GRANT SELECT, INSERT, UPDATE ON accounts TO guarded"):
            owner.execute(grant.encode())
        [(may_create,)] = owner.execute("SELECT has_schema_privilege('guarded', 'public', 'CREATE')").fetchall()
    assert may_create is False
    for _ in range(2):
        done = desk("run", f"{ledger}:transfer", "source=ann", "target=bob", "cents:=2500", "--id", "pay-1", PERDURE_URL=guarded)
        assert done == "ann has 7500, bob has 12500\n"
    assert "not booked" in desk("run", f"{ledger}:transfer", "source=zoe", "target=ann", "cents:=10001", "--id", "pay-2")
    assert json.loads(desk("run", f"{ledger}:statement", "--id", "s1")) == {"ann": 7500, "bob": 12500, "zoe": 10000}
    assert "4 runs" in desk("verify")


def test_the_examples_run_on_postgresql(desk: Desk) -> None:
    refunded = desk.lines("run", f"{EXAMPLES / 'refund.py'}:refund", "order=o-81", "pause_s:=0.1", "--id", "refund-1")
    assert (refunded[0]["status"], len((desk.folder / "payments.log").read_text().splitlines())) == ("succeeded", 1)
    [counted] = desk.lines("run", f"{EXAMPLES / 'fanout.py'}:fan_out", "count:=30", "--id", "census")
    assert counted["output"] == {"measured": 30, "sum": sum(number * number for number in range(30))}
    [researched] = desk.lines("run", f"{EXAMPLES / 'research.py'}:research", "question=why", "--id", "research-1")
    assert researched["status"] == "succeeded"
    assert "shop v42 is live" in desk(
        "run", f"{EXAMPLES / 'deploy.py'}:deploy", "service=shop", "release=v42", "--id", "shop-v42", DEPLOY_PACE_S="0"
    )
    desk("run", f"{EXAMPLES / 'approval.py'}:support", "order=o-81", "--id", "refund-2", "--no-wait", code=3)
    [asked] = desk.lines("approvals")
    desk("approve", asked["approval"], "--by", "bob", "--edit", '{"cents": 2500}')
    assert desk("resume", "refund-2", f"{EXAMPLES / 'approval.py'}:support") == "ann got $25.00 back\n"
    desk("run", f"{EXAMPLES / 'chat.py'}:chat", "--id", "chat-1", "--detach")
    desk("signal", "chat-1", "user", '"bye"')
    assert json.loads(desk("run", f"{EXAMPLES / 'chat.py'}:chat", "--id", "chat-1"))[-1] == {"role": "agent", "text": "goodbye"}
    scripted: dict[str, Any] = {"ANTHROPIC_API_KEY": "", "OPENAI_API_KEY": ""}
    [reported] = desk.lines("run", f"{EXAMPLES / 'investigation.py'}:investigate", "prompt=why", "--id", "why-1", **scripted)
    assert reported["output"]["sources"] == ["fencing", "leases", "zombies"]
    closed = desk("run", f"{EXAMPLES / 'support.py'}:support", "prompt=o-82 is lost", "--id", "case-82", **scripted)
    assert closed.startswith("We have paid you back")
    desk("run", f"{EXAMPLES / 'deployment.py'}:deployment", "service=shop", "--id", "shop-1", "--no-wait", code=3)
    [asked] = desk.lines("approvals")
    desk("approve", asked["approval"], "--by", "ann")
    desk("resume", "shop-1", f"{EXAMPLES / 'deployment.py'}:deployment")
    desk("run", f"{EXAMPLES / 'crashtest_shop.py'}:shop", "order=o-1", "--id", "sale-1", "--no-wait", code=3)  # it ships an hour later
    # The MCP agent has a separate test, and nothing in that test depends on the database.
    assert sorted(path.stem for path in EXAMPLES.glob("*.py")) == sorted(
        (
            *("approval", "chat", "crashtest_shop", "deploy", "deployment", "fanout", "investigation", "ledger"),
            *("mcp_agent", "mcp_notes", "refund", "research", "support"),
        )
    )


# --- once inside -----------------------------------------------------------------------------------------------------------


def test_who_was_let_in_before_is_told_to_try_again_when_the_door_is_shut(desk: Desk, guarded: str, postgres: Server) -> None:
    desk("migrate")
    with psycopg.connect(desk.url, autocommit=True) as connection:
        connection.execute("GRANT ALL ON ALL TABLES IN SCHEMA public TO guarded")
    store = open_store(guarded)
    try:
        assert store.get("r") is None
        postgres.execute("ALTER ROLE guarded NOLOGIN")
        postgres.execute("SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE usename = 'guarded'")
        with pytest.raises(StoreUnavailable, match="does not let us in"):
            store.get("r")
        postgres.execute("ALTER ROLE guarded LOGIN")
        time.sleep(0.5)
        assert store.get("r") is None
    finally:
        store.close()
