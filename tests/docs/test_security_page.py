"""The grants of docs/security.md on a real server: each role can do its work with the real program, and nothing else.

The statements are taken from the page. If a statement of perdure needs a new right, a test here fails: then add the
grant to the page.
"""

from __future__ import annotations

import re
import signal
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psycopg
import pytest
from tests.e2e.test_postgres_cli import Desk
from tests.servers.postgres import Server

from perdure.core.approval import Expire
from perdure.core.events import Body
from perdure.store.open import open_store
from perdure.store.postgres.queries import QUERIES

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "security.md").read_text()
ROLES, READER, WORKER, DECIDER, KEEPER = re.findall(r"```sql\n(.*?)```", PAGE, re.S)
LOGINS = {"ann_reads": "perdure_reader", "bob_works": "perdure_worker", "eve_decides": "perdure_decider", "keeper": "perdure_worker"}
# Statements of who prunes, moves or migrates.
KEEPING = ("prune_", "repair_", "take_in_", "bury", "close_journal", "finish_move", "reopen_journal", "record_migration")
AGENTS = """
import asyncio, os
from pathlib import Path
from perdure import Approval, Budget, Rate, Run, agent, tool

HERE = Path(__file__).parent

@tool(effect="keyed", key_window=600, rate=Rate(1000, per=1), cost=0.01)
async def refund(order: str, cents: int) -> str:
    return f"{order}: {cents}"

@tool(effect="once", approval=Approval(by=["eve"], editable=["note"]))
async def send(note: str) -> str:
    with open(HERE / "sent", "a") as sent:
        sent.write(f"{len(note)}\\n")
    return f"sent {len(note)}"

@tool(effect="once", approval=Approval(by=["zoe"], expires=3600, on_expiry="escalate", escalate_to=["eve"]))
async def urgent() -> str:
    return "sent"

@tool(effect="read")
async def hold() -> None:
    (HERE / "held").touch()
    while not (HERE / "go").exists():
        await asyncio.sleep(0.01)

@agent(version="1")
async def child(run: Run, order: str) -> str:
    return await refund(order, 5)

@agent(version="1", budget=Budget(usd=5.0, calls=100))
async def shop(run: Run, order: str) -> str:
    first = await child(order)
    await asyncio.sleep(0.01)
    heard = await run.receive("word")
    return f"{first}, {heard}, {len(await refund('x' * 100_000, 1))}"

@agent(version="1")
async def asking(run: Run) -> str:
    return await send("please")

@agent(version="1")
async def busy(run: Run) -> str:
    _, sent = await asyncio.gather(hold(), urgent())
    return sent

@agent(version="1")
async def long(run: Run) -> None:
    if run.restored is None:
        await run.checkpoint(1)
    await run.receive("never")
"""


@pytest.fixture
def desk(tmp_path: Path, postgres: Server, postgres_url: str) -> Iterator[Desk]:
    """A journal, the roles and rights of the page, and a login for each."""
    desk = Desk(tmp_path, postgres_url)
    (tmp_path / "shop.py").write_text(AGENTS)
    desk("migrate")
    names = ", ".join([*LOGINS, *dict.fromkeys(LOGINS.values())])
    try:
        with psycopg.connect(as_login(desk, "admin"), autocommit=True) as admin:
            admin.execute(ROLES.encode())
            for login, role in LOGINS.items():
                admin.execute(f"CREATE ROLE {login} LOGIN IN ROLE {role}".encode())
        with psycopg.connect(postgres_url, autocommit=True) as owner:
            for _ in range(2):  # after an upgrade the page says the same again
                owner.execute((READER + WORKER + DECIDER).encode())
        yield desk
    finally:
        for process in desk.children:
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()
        with psycopg.connect(as_login(desk, "admin"), autocommit=True) as admin:
            admin.execute(f"DROP OWNED BY {names}; DROP ROLE {names}".encode())


def as_login(desk: Desk, login: str) -> str:
    return desk.url.replace("app@", f"{login}@")


def eventually(met: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not met():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def approval_of(desk: Desk, run_id: str) -> str:
    [asked] = desk.lines("approvals", "--run", run_id)
    return str(asked["approval"])


# -- what each of them can do ------------------------------------------------------------------------------------------------------
def test_a_reader_can_look_at_everything_and_change_nothing(desk: Desk) -> None:
    desk("run", "shop.py:child", "order=o-1", "--id", "c")
    desk("run", "shop.py:asking", "--id", "a", code=3)
    asked, reads = approval_of(desk, "a"), as_login(desk, "ann_reads")
    for words in (
        "list",
        "list --unserved",
        "show a",
        "why a",
        "events a",
        "trace a 1",
        "audit",
        "costs",
        "approvals",
        "verify",
        "verify a",
    ):
        assert desk(*words.split(), PERDURE_URL=reads) != "", words
    assert desk("export", "a", PERDURE_URL=reads) != ""
    desk("sign", "--new-key", "--out", "notary.key")
    for _ in range(2):
        assert "of them changed; root " in desk("sign", "--key", "notary.key", "--to", "statements", PERDURE_URL=reads)
    assert "2 statements" in desk("verify", "--signatures", "statements", "--public-key", "notary.key.pub", PERDURE_URL=reads)
    assert "may only read" in rights(desk, "ann_reads")
    for words in (
        f"approve {asked} --by eve",
        f"reject {asked} --by eve --reason no",
        "signal a word",
        "cancel a",
        "cancel a --force",
        "pause a",
        "resume a",
        "run shop.py:asking --id b",
        "prune --older-than 0s",
    ):
        assert "may not do that" in desk.run(*words.split(), PERDURE_URL=reads).stderr, words
    assert granted(desk, "perdure_reader") == {(table, "SELECT", "") for table in tables(desk)}


def test_a_worker_drives_runs_to_their_end(desk: Desk) -> None:
    works = as_login(desk, "bob_works")
    assert "all that a worker does" in rights(desk, "bob_works")
    desk("run", "shop.py:shop", "order=o-1", "--id", "s", "--detach", PERDURE_URL=works)
    desk("run", "shop.py:asking", "--id", "a", "--detach", PERDURE_URL=works)
    worker = desk.worker(PERDURE_URL=works)
    eventually(lambda: {row["run_id"]: row["status"] for row in desk.lines("list")}.get("a") == "waiting_approval")
    desk("signal", "s", "word", '"hello"', "--key", "k", PERDURE_URL=works)
    desk("approve", approval_of(desk, "a"), "--by", "eve", PERDURE_URL=works)
    eventually(lambda: all(row["status"] == "succeeded" for row in desk.lines("list")))
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(timeout=60) == 0
    assert desk.lines("show", "s")[0]["output"].startswith("o-1: 5, hello, ")
    assert (desk.folder / "sent").read_text() == "6\n"
    assert "3 runs" in desk("verify")


def test_a_decider_decides_and_a_worker_goes_on(desk: Desk) -> None:
    decides = as_login(desk, "eve_decides")
    assert "may read and decide approvals" in rights(desk, "eve_decides")
    for run_id in ("yes", "no", "long"):
        desk("run", "shop.py:asking", "--id", run_id, code=3)
    assert len(desk.lines("approvals", PERDURE_URL=decides)) == 3
    desk("approve", approval_of(desk, "yes"), "--by", "eve", PERDURE_URL=decides)
    desk("reject", approval_of(desk, "no"), "--by", "eve", "--reason", "no", PERDURE_URL=decides)
    desk("approve", approval_of(desk, "long"), "--by", "eve", "--edit", f'{{"note": "{"x" * 90_000}"}}', PERDURE_URL=decides)
    works = as_login(desk, "bob_works")
    assert desk("resume", "yes", PERDURE_URL=works) == "sent 6\n"
    assert desk("resume", "long", PERDURE_URL=works) == "sent 90000\n"
    desk("resume", "no", code=1, PERDURE_URL=works)
    assert (desk.folder / "sent").read_text() == "6\n90000\n"
    assert "3 runs" in desk("verify", PERDURE_URL=decides)


def test_a_decider_reaches_a_run_that_a_worker_holds_and_one_whose_worker_died_with_letters_unread(desk: Desk) -> None:
    decides = as_login(desk, "eve_decides")
    desk("run", "shop.py:busy", "--id", "held", "--detach")
    worker = desk.worker(PERDURE_URL=as_login(desk, "bob_works"))
    eventually(lambda: (desk.folder / "held").exists() and len(desk.lines("approvals")) == 1)
    asked = approval_of(desk, "held")
    worker.send_signal(signal.SIGSTOP)  # it holds the run, and reads nothing
    desk("signal", "held", "word", PERDURE_URL=decides)
    escalate(as_login(desk, "bob_works"), asked)
    assert inbox(desk) == 2
    worker.kill()
    worker.wait()
    desk("approve", asked, "--by", "eve", PERDURE_URL=decides)
    assert inbox(desk) == 0
    (desk.folder / "go").touch()
    assert desk("resume", "held", PERDURE_URL=as_login(desk, "bob_works")) == "sent\n"
    assert "1 run" in desk("verify")


def escalate(url: str, approval: str) -> None:
    """What another worker does if no decision came in time: other people are asked, and get a notice."""
    store = open_store(url)
    try:
        asked = store.approval(approval)
        assert asked is not None
        store.decide(approval, Expire(), event_id=uuid.uuid4().hex, now=asked.standing.request.expires_at or 0)
    finally:
        store.close()


def inbox(desk: Desk) -> int:
    with psycopg.connect(desk.url) as owner:
        [(count,)] = owner.execute("SELECT count(*) FROM perdure_inbox").fetchall()
    return int(count)


# -- and no more ----------------------------------------------------------------------------------------------------------------------
EVENT = "INSERT INTO perdure_events (run, seq, event_id, ts, epoch, data, hash) SELECT id, seq, %s, 1, epoch, %s, %s FROM perdure_runs WHERE run_id = 'a'"
LETTER = "INSERT INTO perdure_inbox (run, event_id, ts, data) SELECT id, %s, 1, %s FROM perdure_runs WHERE run_id = 'a'"


FORBIDDEN = [
    "UPDATE perdure_runs SET target = '/tmp/other.py:x'",
    "UPDATE perdure_runs SET run_id = 'mine'",
    "UPDATE perdure_runs SET tenant = 'mine'",
    "UPDATE perdure_runs SET agent = 'mine'",
    "UPDATE perdure_events SET data = '{}'",
    "DELETE FROM perdure_events",
    "DELETE FROM perdure_runs",
    "DELETE FROM perdure_approvals",
    "DELETE FROM perdure_pruned",
    "TRUNCATE perdure_events",
    "UPDATE perdure_approvals SET action = 'something else'",
    "UPDATE perdure_blobs SET data = ''",
    "INSERT INTO perdure_moved VALUES (1, 'moved', 'there', 'ann', 1)",
    "INSERT INTO perdure_schema VALUES (99, 'x', 0)",
    "ALTER TABLE perdure_runs DISABLE TRIGGER USER",
    "CREATE TABLE perdure_more (id BIGINT)",
    "CREATE TEMPORARY TABLE perdure_moved (id BIGINT)",
    "CREATE OR REPLACE FUNCTION perdure_refuse() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END'",
]


@pytest.mark.parametrize("login", ["ann_reads", "bob_works", "eve_decides"])
def test_no_role_may_change_the_past_or_say_what_a_run_is(desk: Desk, login: str) -> None:
    with psycopg.connect(as_login(desk, login), autocommit=True) as theirs:
        for sql in FORBIDDEN:
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                theirs.execute(sql.encode())


def test_a_decider_can_say_what_people_say_and_nothing_that_a_worker_says(desk: Desk) -> None:
    desk("run", "shop.py:asking", "--id", "a", code=3)
    desk("run", "shop.py:child", "order=o-1", "--id", "done")
    types = sorted(str(body.__struct_config__.tag) for body in Body.__subclasses__())
    assert len(types) > 30
    said: dict[str, set[str]] = {EVENT: set(), LETTER: set()}
    with psycopg.connect(as_login(desk, "eve_decides"), autocommit=True) as theirs:
        for sql, accepted in said.items():
            for type_ in types:
                values: list[object] = [b"\0" * 16, f'{{"type":"{type_}","x":1}}', b"\0" * 32]
                with suppress(psycopg.errors.InsufficientPrivilege), theirs.transaction(force_rollback=True):
                    theirs.execute("UPDATE perdure_runs SET seq = seq + 1 WHERE run_id = 'a'")
                    theirs.execute(sql.encode(), values if sql == EVENT else values[:2])
                    accepted.add(type_)
    people = {"approval_voted", "approval_decided", "approval_escalated", "approval_expired", "approval_withdrawn"}
    assert said == dict.fromkeys(said, people | {"signal_received", "run_paused", "run_unpaused"})
    for words in (
        "run shop.py:asking --id b",
        "resume a",
        "cancel a",
        "cancel a --force",
        "signal a word --key k",
        "prune --older-than 0s",
    ):
        assert "may not do that" in desk.run(*words.split(), PERDURE_URL=as_login(desk, "eve_decides")).stderr, words


def test_a_worker_s_role_cannot_repair_rows_and_adds_to_the_chain_only_by_its_work(desk: Desk) -> None:
    desk("run", "shop.py:child", "order=o-1", "--id", "done")
    with psycopg.connect(as_login(desk, "bob_works"), autocommit=True) as theirs:
        theirs.execute("UPDATE perdure_runs SET error = 'forged' WHERE run_id = 'done'")
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            theirs.execute("INSERT INTO perdure_chain (chain, n, run, seq, head) VALUES (0, 99, 1, 1, '')")
    refused = desk.run("verify", "--repair", "--yes", PERDURE_URL=as_login(desk, "bob_works"))
    assert "only the owner of the tables can repair rows" in refused.stderr, refused.stderr
    assert "repaired from its journal: error: 'forged' becomes None" in desk("verify", "--repair", "--yes")


def test_each_right_of_a_worker_is_one_that_some_statement_needs_and_none_is_missing(desk: Desk) -> None:
    names = [name for name in QUERIES if not name.startswith(KEEPING)]
    assert granted(desk, "perdure_worker") == needed(names) | locked()


def test_each_right_of_a_decider_is_one_that_some_statement_needs_and_none_is_missing(desk: Desk) -> None:
    names = [
        "change_approval",
        "post_to_unheld",
        "insert_event",
        "insert_inbox",
        "consume_inbox",
        "insert_notice",
        "insert_blob",
        "use_blob",
        "insert_batch",
        "end_batch",
    ]
    assert granted(desk, "perdure_decider") == needed(names) | {("perdure_blobs", "UPDATE", "digest")}


def test_doctor_asks_for_the_rights_that_the_page_grants(desk: Desk) -> None:
    asked = " ".join(QUERIES["missing_privileges"].sql.split()).replace("' '", "")
    for role in ("worker", "decider"):
        rows = re.findall(rf"\('{role}', '(\w+)', '([A-Z, ]+)', '([\w, ]*)'\)", asked)
        rights = {(table, privilege, "") for table, privileges, _ in rows for privilege in privileges.split(", ") if privilege != "UPDATE"}
        rights |= {(table, "UPDATE", column) for table, _, columns in rows for column in columns.split(", ") if column}
        assert {right for right in rights if right[1] != "SELECT"} == granted(desk, f"perdure_{role}"), role


def locked() -> set[tuple[str, str, str]]:
    """To lock rows, a role needs the right to change one of their columns, even if it never changes them."""
    return {("perdure_blobs", "UPDATE", "digest"), ("perdure_locks", "UPDATE", "key")}


def needed(names: list[str]) -> set[tuple[str, str, str]]:
    """What these statements write: (table, privilege, column), the column for UPDATE alone."""
    found = set()
    for name in names:
        sql = re.sub(r"EXISTS \((?:[^()]|\([^()]*\))*\)", "TRUE", " ".join(QUERIES[name].sql.split()))  # which only looks
        found |= {(table, "INSERT", "") for table in re.findall(r"INSERT INTO (perdure_\w+)", sql)}
        found |= {(table, "DELETE", "") for table in re.findall(r"DELETE FROM (perdure_\w+)", sql)}
        changes = re.findall(r"UPDATE (perdure_\w+)(?: AS \w+)? SET (.*?)(?= WHERE | FROM \w+ AS | RETURNING |$)", sql)
        changes += re.findall(r"INSERT INTO (perdure_\w+).*? DO UPDATE SET (.*?)(?= WHERE | RETURNING |$)", sql)
        found |= {(table, "UPDATE", column) for table, assignments in changes for column in columns(assignments)}
    return found


def columns(assignments: str) -> list[str]:
    """The left sides of `a = f(1, 2), b = 3`."""
    flat = assignments
    while "(" in flat:
        flat, before = re.sub(r"\([^()]*\)", "", flat), flat
        assert flat != before, assignments
    return [one.partition("=")[0].strip() for one in flat.split(",")]


def granted(desk: Desk, role: str) -> set[tuple[str, str, str]]:
    """The grants to the role itself on tables and views: (table, privilege, column)."""
    with psycopg.connect(desk.url) as owner:
        tables = owner.execute(
            "SELECT c.relname, a.privilege_type, '' FROM pg_class AS c, aclexplode(c.relacl) AS a WHERE a.grantee = %s::regrole", (role,)
        ).fetchall()
        columns = owner.execute(
            "SELECT c.relname, a.privilege_type, t.attname FROM pg_class AS c JOIN pg_attribute AS t ON t.attrelid = c.oid,"
            " aclexplode(t.attacl) AS a WHERE a.grantee = %s::regrole",
            (role,),
        ).fetchall()
    return {(str(table), str(privilege), str(column)) for table, privilege, column in [*tables, *columns]}


def tables(desk: Desk) -> list[str]:
    with psycopg.connect(desk.url) as owner:
        found = owner.execute("SELECT relname FROM pg_class WHERE relname LIKE 'perdure\\_%' AND relkind IN ('r', 'v')").fetchall()
    return [str(name) for (name,) in found]


def rights(desk: Desk, login: str) -> str:
    """What doctor says about the rights of this login; nothing else may be wrong."""
    checks = desk.lines("doctor", PERDURE_URL=as_login(desk, login))
    assert {check["verdict"] for check in checks} <= {"ok", "warn"}, checks
    return next(str(check["found"]) for check in checks if check["name"] == "rights")


# -- who prunes and moves -------------------------------------------------------------------------------------------------------------
def test_who_prunes_and_moves_needs_the_rights_that_the_page_grants_and_each_of_them(desk: Desk) -> None:
    keeper = as_login(desk, "keeper")
    desk("run", "shop.py:child", "order=o-1", "--id", "done")
    desk("run", "shop.py:asking", "--id", "a", code=3)
    desk("run", "shop.py:long", "--id", "long", code=3)
    prune, copy = ("prune", "--older-than", "0s", "--url", keeper), ("copy", "--from", keeper, "--to", "sqlite:///there.db")
    remove = ("prune", "--before-checkpoint", "long", "--yes", "--url", keeper)
    grants = re.findall(r"^GRANT [^;]+", KEEPER, re.M)
    with psycopg.connect(desk.url, autocommit=True) as owner:
        for grant in grants:
            owner.execute(grant.encode())
        for grant in grants:
            owner.execute(grant.replace("GRANT", "REVOKE", 1).replace(" TO ", " FROM ").encode())
            refused = desk.run(*(copy if "perdure_moved" in grant else remove if "UPDATE (removed" in grant else prune))
            assert (refused.returncode, "permission denied" in refused.stderr) == (2, True)
            owner.execute(grant.encode())
    assert desk(*remove).startswith("removed 1 event, 0 blobs before checkpoints, of 1 run")
    assert desk(*prune).startswith("pruned 1 family, 1 run, ")
    assert ", 1 tombstone" in desk(*copy)
    assert "and was pruned at" in desk.refusal("show", "done", "--url", "sqlite:///there.db", code=6)
