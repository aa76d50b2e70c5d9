"""Specimens: an exported run in another journal, for people to look at.

No worker drives it, and it accepts no post.
"""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import apsw
import pytest
from click.testing import CliRunner
from tests.unit import inspect_tools
from tests.unit.inspect_tools import AGENTS, WAITERS, approval_of, listens, make_waiting, make_zoo, url_of
from tests.unit.postgres_tools import cleared, empty
from tests.unit.postgres_tools import raw as raw_postgres

from perdure import Budget, Call, Perdure, Run, agent, tool
from perdure.cli import cli
from perdure.core.approval import Vote
from perdure.core.codec import pack
from perdure.core.events import CancelRequested, Event, RunCancelled, RunCreated, RunReopened, SignalReceived
from perdure.core.identity import genesis, seal_all
from perdure.core.query import EVERYTHING
from perdure.errors import Conflict, InvalidInput, PerdureError, StoreCorrupt
from perdure.inspect.artifacts import orphans
from perdure.inspect.audit import Audit, AuditFilter
from perdure.inspect.chain import chain_problems, missing_ends
from perdure.inspect.export import EventLine, Header, RunLine, Writer, export_run, verdicts
from perdure.inspect.repair import plan_repair
from perdure.inspect.specimen import chunks, is_there, read_family
from perdure.inspect.verify import verify_run
from perdure.inspect.why.page import why
from perdure.settings import Queue
from perdure.store.api import ApprovalFilter, NewRun, Reopen, Repair, Served, Store
from perdure.store.artifacts import stored_chunks, sweep
from perdure.store.open import open_store
from perdure.store.transfer import Copying
from perdure.tool.artifact import CHUNK_BYTES

NOW = 1_800_000_000_000_000
ID = "a" * 32


@pytest.fixture(scope="session")
def zoos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs in every state that a run can rest in, in one SQLite file."""
    path = tmp_path_factory.mktemp("zoo") / "source.db"
    make_waiting(path)
    make_zoo(path)
    return path


@pytest.fixture(params=["sqlite", "postgres"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Store, Callable[[str], Any]]]:
    """An empty journal, and direct SQL on its database."""
    if request.param == "sqlite":
        store = open_store(f"sqlite:///{tmp_path}/here.db")
        connection = apsw.Connection(str(tmp_path / "here.db"))
        yield store, lambda sql: list(connection.execute(sql))
        connection.close()
    else:
        url = empty(request.getfixturevalue("postgres"))
        store, other = open_store(url), raw_postgres(url)
        yield store, lambda sql: other.execute(sql.encode())
        other.close()
    store.close()


def exported(source: Path, run_id: str, folder: Path) -> Path:
    file = folder / f"{run_id}.jsonl"
    store = open_store(url_of(source))
    with file.open("wb") as out:
        export_run(store, run_id, out.write)
    store.close()
    return file


def take_in(store: Store, file: Path) -> bool:
    family = read_family(file, by="ann", now=NOW)
    found = store.heads(list(family.export.runs))
    if is_there(family, found, specimens=[row.run_id for row in store.list(limit=1000) if row.specimen is not None]):
        return False
    store.take_in_specimen(family.wholes, list(family.export.blobs.values()), lambda: chunks(file, family))
    return True


def roots(source: Path) -> list[str]:
    store = open_store(url_of(source))
    found = sorted(row.run_id for row in store.list(limit=1000) if "/" not in row.run_id)
    store.close()
    return found


def test_a_run_in_any_state_travels_with_its_family_and_verifies_there(zoos: Path, target: tuple[Store, Any], tmp_path: Path) -> None:
    store, _ = target
    for run_id in roots(zoos):
        assert take_in(store, exported(zoos, run_id, tmp_path)), run_id
    source = open_store(url_of(zoos))
    rows = {row.run_id: row for row in store.list(limit=1000)}
    assert set(rows) == {row.run_id for row in source.list(limit=1000)}, "with all their children"
    assert len({row.status for row in rows.values()}) >= 7
    for row in rows.values():
        assert row.imported is not None
        assert row.imported.by == "ann"
        assert (row.holder, row.ready_at) == (None, None), "never ready, and never held"
        verdict = verify_run(store, row)
        assert verdict.problem is None, (row.run_id, verdict.problem)
        assert store.stored(row.run_id) == source.stored(row.run_id), "the events are those that were hashed, byte for byte"
        assert why(store, row.run_id, now=NOW).specimen
    assert missing_ends(store) == ({}, [])
    assert list(chain_problems(store)) == []
    assert store.problems() == []
    source.close()


def test_no_worker_gets_a_specimen(zoos: Path, target: tuple[Store, Any], tmp_path: Path) -> None:
    store, _ = target
    for run_id in ("queued", "later", "doubt", "listens", "squares", "done"):
        take_in(store, exported(zoos, run_id, tmp_path))
    served = [Served(row.agent, row.version) for row in store.list(limit=1000)]
    store.register("w", "host:1", 1, NOW, served)
    far = NOW + 10**15
    assert store.claim("w", served, 100, far) == []
    assert store.claim("w", served, 100, far, limits={"default": Queue(concurrency=50)}) == []
    assert store.claim("w", served, 100, far, below="squares") == []
    assert store.next_ready(served) is None
    assert store.parents_to_replay([], far) == []
    for run_id in ("queued", "later", "doubt", "listens", "done"):
        with pytest.raises(Conflict, match="is a specimen"):
            store.claim("w", served, 1, far, run_id=run_id)
    assert store.held("w") == []


def test_a_specimen_takes_no_post_no_end_and_no_decision_and_is_not_reopened(zoos: Path, target: tuple[Store, Any], tmp_path: Path) -> None:
    store, _ = target
    for run_id in ("listens", "refund", "doubt", "done"):
        take_in(store, exported(zoos, run_id, tmp_path))
    before = {row.run_id: row for row in store.list(limit=1000)}
    for run_id in ("listens", "refund", "doubt", "done"):
        with pytest.raises(Conflict, match="is a specimen"):
            store.post(run_id, None, SignalReceived("chat", pack(b"1")[0], "ann"), event_id=ID, now=NOW)
        with pytest.raises(Conflict, match="is a specimen"):
            store.post(run_id, None, CancelRequested("ann"), event_id=ID, now=NOW)
        with pytest.raises(Conflict, match="is a specimen"):
            store.end(run_id, RunCancelled("no more", forced_by="ann"), event_id=ID, now=NOW)
    take_in(store, exported(zoos, "failed", tmp_path))
    failed = store.get("failed")
    assert failed is not None
    before["failed"] = failed
    with pytest.raises(Conflict, match="is a specimen"):
        store.reopen([Reopen("failed", failed.seq, [(RunReopened("ann", 1), None, ID)])], now=NOW)
    with pytest.raises(Conflict, match="is a specimen"):
        store.decide(approval_of(store, "refund"), Vote(by="ann", granted=True), event_id=ID, now=before["refund"].updated_at + 1)
    assert {row.run_id: row for row in store.list(limit=1000)} == before


def test_no_run_is_created_under_the_id_of_a_specimen_or_in_its_family(zoos: Path, target: tuple[Store, Any], tmp_path: Path) -> None:
    store, _ = target
    take_in(store, exported(zoos, "done", tmp_path))

    def new(run_id: str, tenant: str = "acme") -> NewRun:
        return NewRun(run_id, RunCreated(run_id, "shop", "1", tenant, pack(b"{}")[0]), ID, NOW, "d")

    with pytest.raises(Conflict, match="run done is a specimen here"):
        store.create_run(new("done"))
    with pytest.raises(Conflict, match="run done is a specimen"):
        store.create_run(new("done/undo"))
    with pytest.raises(Conflict, match="the run id done is taken") as other:
        store.create_run(new("done", tenant="other"))
    assert "specimen" not in str(other.value), "another tenant learns only that the id is taken"
    assert store.create_run(new("new"))[1]


def test_the_app_refuses_what_it_refuses(zoos: Path, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/here.db"
    store = open_store(url)
    for run_id in ("listens", "refund", "paused", "doubt", "thrifty", "failed"):
        take_in(store, exported(zoos, run_id, tmp_path))
    approval = approval_of(store, "refund")
    store.close()

    async def main() -> None:
        async with Perdure(url, [*AGENTS, *WAITERS]) as app:
            acts = {
                "start": lambda: app.start(listens, id="listens"),
                "run": lambda: app.run(listens, id="listens"),
                "result": lambda: app.handle("listens").result(),
                "drive": lambda: app.drive("listens"),
                "signal": lambda: app.signal("listens", "chat", 1),
                "approve": lambda: app.approve(approval, by="ann"),
                "reject": lambda: app.reject(approval, by="ann", reason="no"),
                "pause": lambda: app.pause("listens", by="ann"),
                "unpause": lambda: app.unpause("paused", by="ann"),
                "requeue": lambda: app.unpause("doubt", by="ann"),
                "raise": lambda: app.unpause("thrifty", by="ann", add=Budget(calls=5)),
                "adopt": lambda: app.adopt("listens", by="ann"),
                "resolve": lambda: app.resolve("doubt", 2, happened={"id": 1}, by="ann"),
                "cancel": lambda: app.cancel("listens", by="ann"),
                "force": lambda: app.cancel("doubt", by="ann", force=True),
                "undo": lambda: app.undo("listens", by="ann"),
                "retry": lambda: app.retry("failed", by="ann"),
                "rewind": lambda: app.rewind("failed", to=2, by="ann"),
            }
            for name, act in acts.items():
                async with asyncio.timeout(20):
                    with pytest.raises(Conflict, match="specimen"):
                        await act()
                    assert name
            info = await app.handle("listens").info()
            assert info.specimen
            assert [one.specimen for one in await app.list()] == [True] * 6
            assert await app.count() == {}, "what waits in this journal is counted without specimens"

    asyncio.run(main())


@pytest.mark.parametrize(
    "sql",
    [
        "UPDATE perdure_runs SET ready_at = 1 WHERE run_id = 'listens'",
        "UPDATE perdure_runs SET holder = 'w' WHERE run_id = 'listens'",
        "UPDATE perdure_runs SET status = 'queued' WHERE run_id = 'listens'",
        "UPDATE perdure_runs SET seq = seq + 1 WHERE run_id = 'listens'",
        "UPDATE perdure_runs SET specimen = NULL WHERE run_id = 'listens'",
        "UPDATE perdure_runs SET specimen = '{}' WHERE run_id = 'live'",
        "INSERT INTO perdure_inbox (run, event_id, ts, data) SELECT id, head, 1, '{}' FROM perdure_runs WHERE run_id = 'listens'",
        "UPDATE perdure_approvals SET status = 'approved'",
    ],
    ids=["ready", "held", "status", "seq", "let go", "taken in", "inbox", "approval"],
)
def test_the_database_itself_keeps_a_specimen_as_it_is(zoos: Path, target: tuple[Store, Any], tmp_path: Path, sql: str) -> None:
    store, ask = target
    for run_id in ("listens", "refund"):
        take_in(store, exported(zoos, run_id, tmp_path))
    store.create_run(NewRun("live", RunCreated("live", "shop", "1", "t", pack(b"{}")[0]), ID, NOW, "d"))
    with pytest.raises(Exception, match="specimen"):
        ask(sql)
    ask("UPDATE perdure_runs SET waiting_for = 'x' WHERE run_id = 'live'")  # a run of this journal is not concerned


def test_a_specimen_that_is_ready_or_joined_is_refused_by_the_database(zoos: Path, target: tuple[Store, Any], tmp_path: Path) -> None:
    store, ask = target
    take_in(store, exported(zoos, "done", tmp_path))
    columns = "agent, version, tenant, queue, input_digest, status, seq, head, epoch, created_at, updated_at, depth, line"
    for extra, values in (("specimen, ready_at", "'{}', 1"), ("specimen, holder", "'{}', 'w'")):
        with pytest.raises(Exception, match="a specimen is never driven"):
            ask(
                f"INSERT INTO perdure_runs (run_id, {columns}, {extra}) SELECT 'x', {columns}, {values} FROM perdure_runs WHERE run_id = 'done'"
            )
    with pytest.raises(Exception, match="a specimen is never driven"):
        ask(f"INSERT INTO perdure_runs (run_id, {columns}) SELECT 'done/undo', {columns} FROM perdure_runs WHERE run_id = 'done'")


def test_a_signal_in_one_statement_does_not_reach_a_specimen(postgres: Any, zoos: Path, tmp_path: Path) -> None:
    from perdure.store.delivery import Letter
    from perdure.store.postgres.fast_writes import signal_at_once

    store: Any = open_store(cleared(postgres))
    take_in(store, exported(zoos, "listens", tmp_path))
    letter = Letter(None, SignalReceived("chat", pack(b"1")[0], "ann"), ID, NOW)
    parked = store._database.read("run_by_id", ("listens",))[0]
    assert parked[8] == "waiting"
    found = store._database.read("signal_at_once", {**_ring(), **_values(letter)})
    assert found == [], "the statement finds no parked run, and raises nothing"
    assert not signal_at_once(store._database, store._notify, "listens", letter)
    store.close()


def _values(letter: Any) -> dict[str, Any]:
    from perdure.store.postgres.fast_writes import signal_values

    return signal_values("listens", letter)


def _ring() -> dict[str, Any]:
    return {"alone": False, "channel": "none", "ring": ""}


def test_what_is_counted_and_listed_for_people_leaves_specimens_out(zoos: Path, target: tuple[Store, Any], tmp_path: Path) -> None:
    store, _ = target
    for run_id in ("refund", "doubt", "bought"):
        take_in(store, exported(zoos, run_id, tmp_path))
    assert store.count(EVERYTHING) == {}
    assert store.approvals(ApprovalFilter()) == [], "no decision about it counts, so nobody is asked for one"
    assert len(store.approvals(ApprovalFilter(run_id="refund"))) == 1
    assert store.costs("agent") == []
    assert list(Audit(store, AuditFilter()).more()) == [], "its events happened in another journal"
    assert store.prunable(NOW * 2, ["succeeded", "failed", "cancelled"]) == []


def test_a_check_before_a_deploy_leaves_specimens_out(zoos: Path, tmp_path: Path) -> None:
    url, target = f"sqlite:///{tmp_path}/here.db", f"{Path(inspect_tools.__file__)}:listens"
    store = open_store(url)
    take_in(store, exported(zoos, "listens", tmp_path))
    store.close()
    answer = CliRunner().invoke(cli, ["replay", "--all", "--live-only", target, "--url", url])
    assert (answer.exit_code, answer.stdout) == (0, "0 unfinished runs\n"), answer.output
    assert "1 run" in CliRunner().invoke(cli, ["replay", "--all", target, "--url", url]).stdout


def test_the_same_file_again_changes_nothing_and_other_content_is_refused(zoos: Path, target: tuple[Store, Any], tmp_path: Path) -> None:
    store, _ = target
    file = exported(zoos, "squares", tmp_path)
    assert take_in(store, file)
    version = store.list(limit=1000)
    assert not take_in(store, file)
    assert not take_in(store, exported(zoos, "squares", tmp_path)), "another file with the same content"
    assert store.list(limit=1000) == version
    with pytest.raises(Conflict, match=r"specimen squares is here with other content .*perdure prune --specimen squares"):
        take_in(store, _another("squares", tmp_path))


def _another(run_id: str, tmp_path: Path) -> Path:
    """The export of another run with this id."""
    path = tmp_path / "another.db"

    async def main() -> None:
        async with Perdure(url_of(path), WAITERS) as app:
            await app.start(listens, id=run_id)

    asyncio.run(main())
    (tmp_path / "x").mkdir()
    return exported(path, run_id, tmp_path / "x")


def test_an_id_that_this_journal_uses_or_has_used_is_refused(zoos: Path, target: tuple[Store, Any], tmp_path: Path) -> None:
    store, _ = target
    source = open_store(url_of(zoos))
    Copying(source, store, to_url=store.url, by="ann").history()
    source.close()
    with pytest.raises(Conflict, match=r"run done is a run of this journal; nothing was imported.*another database"):
        take_in(store, exported(zoos, "done", tmp_path))
    store.prune(["done"], NOW * 2, by="ann", now=NOW)
    with pytest.raises(Conflict, match="run done ran in this journal and was pruned"):
        take_in(store, exported(zoos, "done", tmp_path))


def test_a_race_for_the_id_is_decided_by_the_transaction(zoos: Path, target: tuple[Store, Any], tmp_path: Path) -> None:
    store, _ = target
    file = exported(zoos, "squares", tmp_path)
    family = read_family(file, by="ann", now=NOW)
    store.create_run(NewRun("squares/1", RunCreated("squares/1", "shop", "1", "t", pack(b"{}")[0]), ID, NOW, "d"))
    with pytest.raises(Conflict, match="nothing was imported"):
        store.take_in_specimen(family.wholes, list(family.export.blobs.values()), lambda: chunks(file, family))
    assert [row.run_id for row in store.list()] == ["squares/1"], "all of the family, or nothing"


def test_a_specimen_is_deleted_whole_and_can_be_imported_again(zoos: Path, target: tuple[Store, Any], tmp_path: Path) -> None:
    store, _ = target
    file = exported(zoos, "squares", tmp_path)
    blobs = exported(zoos, "done", tmp_path)
    for _ in range(2):
        take_in(store, file)
        take_in(store, blobs)
        done = store.delete_specimens(["done", "squares"], by="ann", now=NOW)
        assert (done.families, done.runs, done.blobs) == (2, 4, 1)
        assert store.list() == []
        assert missing_ends(store) == ({}, []), "the chain knows that they were taken out"
        assert list(chain_problems(store)) == []
        assert store.problems() == []
    store.create_run(NewRun("done", RunCreated("done", "shop", "1", "t", pack(b"{}")[0]), ID, NOW, "d"))
    with pytest.raises(Conflict, match="run done is no specimen"):
        store.delete_specimens(["done"], by="ann", now=NOW)
    assert store.get("done") is not None


def test_specimens_stay_specimens_when_the_journal_moves(zoos: Path, target: tuple[Store, Any], tmp_path: Path) -> None:
    store, _ = target
    for run_id in ("squares", "refund", "thrifty", "doubt"):
        take_in(store, exported(zoos, run_id, tmp_path))
    other = open_store(f"sqlite:///{tmp_path}/moved.db")
    Copying(store, other, to_url=other.url, by="ann").move(now=NOW, lease_us=1)
    assert {row.run_id: row for row in other.list()} == {row.run_id: row for row in store.list()}
    assert all(row.specimen is not None and verify_run(other, row).problem is None for row in other.list())
    other.close()


def test_an_edited_row_of_a_specimen_is_named_and_not_repaired(zoos: Path, tmp_path: Path) -> None:
    store = open_store(f"sqlite:///{tmp_path}/here.db")
    take_in(store, exported(zoos, "doubt", tmp_path))
    with apsw.Connection(str(tmp_path / "here.db")) as other:
        other.execute("DROP TRIGGER perdure_runs_specimen")
        other.execute("UPDATE perdure_runs SET ready_at = 1, status = 'queued' WHERE run_id = 'doubt'")
    row = store.get("doubt")
    assert row is not None
    assert "is not" in str(verify_run(store, row).problem)
    planned = plan_repair(store, row)
    assert isinstance(planned, Repair)
    with pytest.raises(Conflict, match="is a specimen"):
        store.repair(planned)
    store.close()


@tool(effect="read")
async def saves(size: int, call: Call) -> Any:
    return await call.save(random.Random(size).randbytes(size), content_type="application/pdf")


@agent(version="1")
async def keeper(run: Run, sizes: list[int]) -> list[Any]:
    return [await saves(size) for size in sizes]


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The export of a run with artifacts of several chunks, of less than one, and of no byte."""
    folder = tmp_path_factory.mktemp("large")

    async def main() -> None:
        async with Perdure(url_of(folder / "source.db"), [keeper]) as app:
            await app.run(keeper, [CHUNK_BYTES * 2 + 77, 5, 0], id="kept")

    asyncio.run(main())
    return exported(folder / "source.db", "kept", folder)


def test_artifacts_travel_in_the_file(large: Path, target: tuple[Store, Any]) -> None:
    store, _ = target
    assert take_in(store, large)
    row = store.get("kept")
    assert row is not None
    assert verify_run(store, row).problem is None, "verify reads the bytes of artifacts too"
    rows = store.artifacts_of("kept")
    assert [(one.size, one.state, one.call) for one in rows] == [(CHUNK_BYTES * 2 + 77, "saved", 1), (5, "saved", 2), (0, "saved", 3)]
    assert b"".join(stored_chunks(store, rows[0])) == random.Random(CHUNK_BYTES * 2 + 77).randbytes(CHUNK_BYTES * 2 + 77)
    assert list(orphans(store)) == []
    assert store.delete_specimens(["kept"], by="ann", now=NOW).artifacts == 3
    assert sweep(store) == 3
    assert take_in(store, large), "and again"


def test_bytes_that_are_not_those_of_the_hash_are_refused(large: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    lines = large.read_bytes().splitlines(keepends=True)
    at = next(place for place, line in enumerate(lines) if line.startswith(b'{"kind":"bytes"'))
    lines[at] = lines[at].replace(b'base64":"', b'base64":"AAAA', 1)
    bad.write_bytes(b"".join(lines))
    with pytest.raises(StoreCorrupt, match=r"artifact .* does not have the bytes that its hash says; nothing was imported"):
        read_family(bad, by="ann", now=NOW)


def test_a_file_that_changes_between_the_check_and_the_write_is_refused(large: Path, tmp_path: Path) -> None:
    file = tmp_path / "changing.jsonl"
    file.write_bytes(large.read_bytes())
    family = read_family(file, by="ann", now=NOW)
    raw = file.read_bytes()
    place = raw.index(b'"kind":"bytes"') + 100
    file.write_bytes(raw[:place] + (b"A" if raw[place : place + 1] != b"A" else b"B") + raw[place + 1 :])
    store = open_store("sqlite://")
    with pytest.raises(StoreCorrupt, match="does not have the bytes"):
        store.take_in_specimen(family.wholes, list(family.export.blobs.values()), lambda: chunks(file, family))
    assert store.list() == []
    assert store.artifact_runs() == []
    store.close()


def test_an_import_that_is_killed_leaves_all_of_it_or_nothing(large: Path, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/here.db"
    open_store(url).close()
    command = [sys.executable, "-m", "perdure", "import", str(large), "--url", url]
    dead = 0
    for attempt in range(12):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            process.wait(0.2 + 0.05 * attempt)
        except subprocess.TimeoutExpired:
            process.kill()
            dead += 1
        process.wait()
        store = open_store(url)
        rows = store.list()
        saved = [row.state for row in store.artifacts_of("kept")]
        assert (len(rows), saved) in ((0, []), (1, ["saved"] * 3))
        if rows:
            assert verify_run(store, rows[0]).problem is None
            store.delete_specimens(["kept"], by="ann", now=NOW)
            sweep(store)
        store.close()
    assert dead


# -- bad input ----------------------------------------------------------------------------------------------------------------
def test_a_damaged_file_is_refused_and_the_first_bad_event_is_named(zoos: Path, tmp_path: Path) -> None:
    file = exported(zoos, "done", tmp_path)
    lines = file.read_bytes().splitlines(keepends=True)
    events = [place for place, line in enumerate(lines) if line.startswith(b'{"kind":"event"')]
    third = json.loads(lines[events[2]])
    third["ts"] += 1
    lines[events[2]] = json.dumps(third, separators=(",", ":")).encode() + b"\n"
    bad = tmp_path / "bad.jsonl"
    bad.write_bytes(b"".join(lines))
    with pytest.raises(StoreCorrupt, match=r"run done, event 3: .*nothing was imported"):
        read_family(bad, by="ann", now=NOW)


def _mangled(file: Path) -> dict[str, tuple[bytes, str]]:
    good = file.read_bytes()
    header, rest = good.split(b"\n", 1)
    head = json.loads(header)
    return {
        "empty": (b"", "is no export"),
        "text": (b"hello\n", "is no export"),
        "json of another kind": (b'{"kind": "other", "format": 1}\n', "line 1|is no export"),
        "binary": (bytes(range(256)) * 10, "is no export"),
        "compressed": (b"\x1f\x8b" + good, "is compressed: unpack it first"),
        "deep": (b"[" * 100_000 + b"\n", "is no export"),
        "newer": (json.dumps({**head, "format": 3}).encode() + b"\n" + rest, "has format 3.*update perdure"),
        "wrong types": (json.dumps({**head, "run_id": 7}).encode() + b"\n" + rest, "line 1"),
        "says redacted": (json.dumps({**head, "redacted": 1}).encode() + b"\n" + rest, "redaction"),
        "cut in a line": (good[: len(good) // 2], "was cut off"),
        "cut after a line": (b"".join(good.splitlines(keepends=True)[:-1]), "was cut off"),
        "more": (good + b"{}\n", "has more lines"),
        "a line twice": (good.replace(b'{"kind":"event","seq":2,', b'{"kind":"event","seq":1,', 1), "event 2|changed"),
        "an unknown field": (json.dumps({**head, "more": 1}).encode() + b"\n" + rest, "line 1"),
        "an id of another form": (good.replace(b'"event_id":"', b'"event_id":"x', 1), "event 1"),
    }


NAMES = [
    *("empty", "text", "json of another kind", "binary", "compressed", "deep", "newer", "wrong types", "says redacted", "cut in a line"),
    *("cut after a line", "more", "a line twice", "an unknown field", "an id of another form"),
]


@pytest.mark.parametrize("name", NAMES)
def test_a_bad_file_is_refused_in_one_line_and_changes_nothing(zoos: Path, tmp_path: Path, name: str) -> None:
    data, words = _mangled(exported(zoos, "done", tmp_path))[name]
    bad = tmp_path / "bad.jsonl"
    bad.write_bytes(data)
    url = f"sqlite:///{tmp_path}/here.db"
    answer = CliRunner().invoke(cli, ["import", str(bad), "--url", url])
    with pytest.raises(PerdureError, match=words) as error:
        read_family(bad, by="ann", now=NOW)
    assert isinstance(error.value, InvalidInput | StoreCorrupt)
    assert "\n" not in str(error.value)
    assert (answer.exit_code, answer.stderr.count("\n")) == (2, 1), answer.stderr
    assert not (tmp_path / "here.db").exists(), "not even a journal was created"


def test_a_file_that_is_too_large_for_the_memory_is_refused(zoos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = exported(zoos, "done", tmp_path)
    monkeypatch.setattr("perdure.inspect.export.MOST_BYTES", 1000)
    with pytest.raises(InvalidInput, match="has more than 1,000 bytes of events and blobs"):
        read_family(file, by="ann", now=NOW)


def test_an_id_that_perdure_never_gives_is_refused(tmp_path: Path) -> None:
    """The file may come from a stranger: its ids end up in suggested commands, in completion and in file names."""
    for name in ("$(reboot)", "a b", "../x", "-v", "x\u202e"):
        created = RunCreated(name, "shop", "1", "t", pack(b"{}")[0])
        (sealed,) = seal_all(genesis(name), [Event(1, ID, NOW, 0, None, None, created)])
        lines: list[bytes] = []
        writer = Writer(lines.append)
        writer.put(Header(1, "0.2", "2026-01-01", name, "shop", "1", None))
        writer.put(RunLine(name, "shop", "1", "t", "queued", None, 1, sealed.hash.hex()))
        writer.put(EventLine(1, ID, NOW, 0, None, None, sealed.data.decode(), sealed.hash.hex()))
        writer.end()
        file = tmp_path / "odd.jsonl"
        file.write_bytes(b"".join(lines))
        with pytest.raises(InvalidInput, match=r"which perdure never gives|part of the family"):
            read_family(file, by="ann", now=NOW)


def test_a_child_alone_is_refused_and_the_way_out_is_named(zoos: Path, tmp_path: Path) -> None:
    store = open_store(url_of(zoos))
    file = tmp_path / "child.jsonl"
    with file.open("wb") as out:
        export_run(store, "squares/1", out.write)
    store.close()
    with pytest.raises(InvalidInput, match=r"part of the family of squares; nothing was imported.*perdure export squares"):
        read_family(file, by="ann", now=NOW)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "gone", Path("/dev/zero")):
        with pytest.raises(InvalidInput):
            read_family(path, by="ann", now=NOW)


def test_an_export_of_a_specimen_is_the_export_of_the_run(zoos: Path, target: tuple[Store, Any], tmp_path: Path) -> None:
    store, _ = target
    file = exported(zoos, "squares", tmp_path)
    take_in(store, file)
    again: list[bytes] = []
    export_run(store, "squares", again.append)
    assert again[1:-1] == file.read_bytes().splitlines(keepends=True)[1:-1], "all but the time of the export and the checksum"
    (tmp_path / "again").write_bytes(b"".join(again))
    assert all(verdict.problem is None for verdict in verdicts(tmp_path / "again"))
