"""The export of a run: it has exactly the bytes of the journal, and it is refused if it was changed."""

from __future__ import annotations

import asyncio
import base64
import errno
import hashlib
import json
import os
import re
import shutil
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import apsw
import pytest
from tests.servers import forked

from perdure import InvalidInput, NotFound, Perdure, Run, agent, tool
from perdure.core import codec, identity
from perdure.errors import StoreCorrupt
from perdure.inspect.export import export_run, load, verdicts
from perdure.inspect.newfile import new_file
from perdure.store.api import Store
from perdure.store.open import open_store
from perdure.store.transfer import Copying

ODD = {"nul": "a\0b", "lone": "\ud800", "big": 10**300, "zero": -0.0, "text": "é\u202e\x9b\u2028"}


@tool(effect="read")
async def look() -> dict[str, Any]:
    return ODD


@tool(effect="idempotent")
async def book(n: int) -> str:
    return "x" * 70_000


@book.compensate
async def _(n: int) -> None:
    """Taken back."""


@agent(version="1")
async def child(run: Run, n: int) -> str:
    return await book(n)


@agent(version="3")
async def shop(run: Run, order: Any) -> Any:
    found = await look()
    texts = await asyncio.gather(child(1), child(2), book(3))
    return [found, len(texts)]


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("journal") / "journal.db"

    async def main() -> None:
        async with Perdure(f"sqlite:///{path}", [shop, child]) as app:
            await app.run(shop, ODD, id="r")
            await app.undo("r", accept=True)
            await app.run(child, 9, id="other")

    asyncio.run(main())
    return path


@pytest.fixture(scope="module")
def lines(journal: Path) -> list[bytes]:
    """The export of run r."""
    return exported(f"sqlite:///{journal}", "r")


def exported(url: str, run_id: str) -> list[bytes]:
    written: list[bytes] = []
    store = open_store(url)
    try:
        export_run(store, run_id, written.append)
    finally:
        store.close()
    return written


@contextmanager
def opened(path: Path) -> Iterator[Store]:
    store = open_store(f"sqlite:///{path}")
    try:
        yield store
    finally:
        store.close()


def file_of(folder: Path, lines: list[bytes]) -> Path:
    path = folder / "run.perdure.jsonl"
    path.write_bytes(b"".join(lines))
    return path


def changed(line: bytes, **fields: Any) -> bytes:
    return json.dumps({**json.loads(line), **fields}).encode() + b"\n"


# -- the round trip ------------------------------------------------------------------------------------------------------
def test_an_export_has_what_the_journal_has_of_the_run_its_children_and_its_undo(journal, lines, tmp_path):
    export = load(file_of(tmp_path, lines))
    assert list(export.runs) == ["r", "r/2", "r/3", "r/undo"]
    assert (export.header.run_id, export.header.agent, export.header.version) == ("r", "shop", "3")
    for run_id, run in export.runs.items():
        with opened(journal) as store:
            assert run.events == store.read(run_id)
    assert export.root.state.status == "succeeded"
    created, calls = export.root.state.created, export.root.state.calls
    assert created is not None
    assert codec.decode(export.load(created.input)) == {"order": ODD}
    assert [call.result and len(export.load(call.result)) for call in calls.values()] == [len(codec.encode(ODD)), 70_002]


def test_every_column_of_every_event_and_every_blob_is_there_byte_for_byte(journal, lines):
    told = [json.loads(line) for line in lines]
    run_id = ""
    events: dict[str, list[dict[str, Any]]] = {}
    blobs: dict[str, bytes] = {}
    for line in told:
        if line["kind"] == "run":
            run_id = line["run_id"]
        elif line["kind"] == "event":
            events.setdefault(run_id, []).append(line)
        elif line["kind"] == "blob":
            blobs[line["digest"]] = base64.b64decode(line["base64"])
    for run_id, given in events.items():
        with opened(journal) as store:
            stored = store.stored(run_id)
        as_stored = [(e.seq, e.event_id.hex(), e.ts, e.epoch, e.call, e.cause, e.data, e.hash.hex()) for e in stored]
        fields = ("seq", "event_id", "ts", "epoch", "call", "cause")
        assert [(*(e[name] for name in fields), e["data"].encode(), e["hash"]) for e in given] == as_stored
    assert blobs
    with opened(journal) as store:
        assert blobs == {digest: store.blob(digest) for digest in blobs}
    assert b"".join(lines).isascii()


def test_a_run_that_goes_on_is_exported_as_far_as_it_has_come(tmp_path):
    @agent(version="1")
    async def waiter(run: Run) -> None:
        await run.receive("go")

    async def main() -> None:
        async with Perdure(f"sqlite:///{tmp_path / 'journal.db'}", [waiter]) as app:
            await app.start(waiter, id="w")
            await app.engine.drive("w")

    asyncio.run(main())
    export = load(file_of(tmp_path, exported(f"sqlite:///{tmp_path / 'journal.db'}", "w")))
    assert export.root.state.status == "waiting"


def test_an_export_from_postgres_is_the_same_file(journal, lines, postgres_url, tmp_path):
    """Copied there and exported from there: all but the first line, which has the time, and the sum is the same."""
    source, target = open_store(f"sqlite:///{shutil.copy(journal, tmp_path / 'copy.db')}"), open_store(postgres_url)
    try:
        Copying(source, target, to_url=postgres_url, by="test").history()
    finally:
        source.close()
        target.close()
    assert exported(postgres_url, "r")[1:-1] == lines[1:-1]


# -- exports that are refused -----------------------------------------------------------------------------------------
def problems(path: Path) -> list[tuple[str, int | None]]:
    """What verify says about the runs of a file, as long as it can read it."""
    found: list[tuple[str, int | None]] = []
    try:
        for verdict in verdicts(path):
            if verdict.problem is not None:
                found.append((verdict.run_id, verdict.seq))  # noqa: PERF401  # one by one: what comes before the end of a bad file counts
    except StoreCorrupt:
        found.append(("file", None))
    return found


def test_every_change_of_every_field_of_every_event_is_found_and_named(journal, tmp_path):
    lines = exported(f"sqlite:///{journal}", "other")
    for index, line in enumerate(lines):
        told = json.loads(line)
        if told["kind"] != "event":
            continue
        other_hash = ("0" if told["hash"][0] != "0" else "1") + told["hash"][1:]
        changes = {"ts": told["ts"] + 1, "epoch": told["epoch"] + 1, "event_id": "ab" * 16, "data": told["data"] + " ", "hash": other_hash}
        changes |= {"call": (told["call"] or 0) + 1, "cause": (told["cause"] or 0) + 1, "seq": told["seq"] + 1}
        for name, value in changes.items():
            path = file_of(tmp_path, [*lines[:index], changed(line, **{name: value}), *lines[index + 1 :]])
            assert problems(path)[0] == ("other", told["seq"]), name
            with pytest.raises(StoreCorrupt, match=f"run other, event {told['seq']}: "):
                load(path)


def test_an_event_that_is_gone_or_out_of_place_is_named(lines, tmp_path):
    first = next(index for index, line in enumerate(lines) if b'"seq":3' in line and b'"event"' in line)
    assert problems(file_of(tmp_path, lines[:first] + lines[first + 1 :]))[0] == ("r", 3)
    swapped = [*lines[:first], lines[first + 1], lines[first], *lines[first + 2 :]]
    assert problems(file_of(tmp_path, swapped))[0] == ("r", 3)


def test_a_blob_that_is_changed_or_gone_is_found_at_the_event_that_names_it(lines, tmp_path):
    [index, *_] = [index for index, line in enumerate(lines) if b'"kind":"blob"' in line]
    named = json.loads(lines[index + 1])["seq"]
    other = changed(lines[index], base64=base64.b64encode(b'"' + b"y" * 70_000 + b'"').decode())
    assert problems(file_of(tmp_path, [*lines[:index], other, *lines[index + 1 :]]))[0] == ("r", named)
    assert problems(file_of(tmp_path, lines[:index] + lines[index + 1 :]))[0] == ("r", named)


def test_a_file_that_ends_anywhere_but_at_its_end_is_not_believed(lines, tmp_path):
    for end in range(1, len(lines)):
        with pytest.raises(StoreCorrupt, match="was cut off in line"):
            load(file_of(tmp_path, lines[:end]))
    with pytest.raises(StoreCorrupt, match="was cut off in line"):
        load(file_of(tmp_path, [*lines[:-1], lines[-1][:-1]]))


def test_events_that_were_cut_off_with_a_new_sum_are_missed_by_the_line_of_their_run(lines, tmp_path):
    """The forger also computes the checksum again.

    If the forger changes the line of the run too, only a kept head shows it.
    """
    last = max(index for index, line in enumerate(lines) if b'"kind":"event"' in line)
    path = file_of(tmp_path, summed([*lines[:last], *lines[last + 1 : -1]]))
    assert problems(path) == [("r/undo", json.loads(lines[last])["seq"])]


def test_a_chain_that_was_made_anew_does_not_lead_to_the_head_that_its_run_has(journal, tmp_path):
    lines = exported(f"sqlite:///{journal}", "other")[:-1]
    head, forged = identity.genesis("other"), []
    for line in lines:
        told = json.loads(line)
        if told["kind"] == "event":
            data = told["data"].replace('"n":9', '"n":8')
            envelope = {name: told[name] for name in ("seq", "event_id", "ts", "epoch", "call", "cause")}
            head = identity.link(head, **envelope, data=data.encode())
            line = changed(line, data=data, hash=head.hex())
        forged.append(line)
    with pytest.raises(StoreCorrupt, match="and another hash"):
        load(file_of(tmp_path, summed(forged)))


def summed(lines: list[bytes]) -> list[bytes]:
    kinds = [json.loads(line)["kind"] for line in lines]
    counts = {name: kinds.count(name[:-1]) for name in ("runs", "events", "blobs")}
    total = hashlib.sha256(b"".join(lines)).hexdigest()
    return [*lines, json.dumps({"kind": "end", **counts, "sha256": total}).encode() + b"\n"]


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda lines: [changed(lines[0], perdure="another"), *lines[1:]], "do not have the checksum"),
        (lambda lines: [*lines, lines[-1]], "has more lines after the line of kind end"),
        (lambda lines: [*lines[:3], b"{}\n", *lines[3:]], "line 4: "),
        (lambda lines: [*lines[:3], b'{"kind":"event"}\n', *lines[3:]], "line 4: "),
        (lambda lines: [*lines[:3], b"[" * 100_000 + b"\n", *lines[3:]], "line 4: "),
        (lambda lines: [*lines[:3], b"\xff\xfe\n", *lines[3:]], "line 4: "),
        (lambda lines: summed([*lines[:1], *lines[:-1]]), "second header"),
        (lambda lines: summed([*lines[:-1], lines[1]]), "has run r twice"),
        (lambda lines: summed([lines[0], *lines[2:-1]]), "belongs to no run"),
        (lambda lines: summed(lines[:1]), "which its header or another run names"),
        (lambda lines: summed([lines[0], blob_of(b'"x"'), *lines[1:-1]]), "of kind blob that belongs to no run"),
        (lambda lines: summed([*lines[:-1], blob_of(b'"x"', "ab" * 32)]), "blob abab.* does not have the content that its digest says"),
    ],
)
def test_a_file_that_was_meddled_with_is_refused_with_the_place(lines, tmp_path, spoil, words):
    with pytest.raises(StoreCorrupt, match=words):
        load(file_of(tmp_path, spoil(lines)))


def blob_of(content: bytes, digest: str | None = None) -> bytes:
    line = {"kind": "blob", "digest": digest or codec.digest(content), "base64": base64.b64encode(content).decode()}
    return json.dumps(line).encode() + b"\n"


def test_a_second_content_for_a_blob_does_not_take_the_place_of_the_one_that_was_checked(lines, tmp_path):
    """With a new checksum: all heads stay the same, so kept heads would not show it."""
    [first, *_] = [json.loads(line) for line in lines if b'"kind":"blob"' in line]
    size = len(base64.b64decode(first["base64"]))
    for forged in (b'"' + b"y" * (size - 2) + b'"', base64.b64decode(first["base64"])):
        path = file_of(tmp_path, summed([*lines[:-1], blob_of(forged, first["digest"])]))
        with pytest.raises(StoreCorrupt, match=f"has blob {first['digest']} twice"):
            load(path)
        assert problems(path) == [("file", None)]


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        *(("run", field, "other") for field in ("agent", "version", "tenant", "status", "parent")),
        *(("perdure_export", field, "other") for field in ("agent", "version", "target")),
        ("run", "status", "failed"),
    ],
)
def test_what_a_line_says_about_a_run_is_what_its_journal_says(lines, tmp_path, kind, field, value):
    index = next(index for index, line in enumerate(lines) if f'"kind":"{kind}"'.encode() in line)
    path = file_of(tmp_path, summed([*lines[:index], changed(lines[index], **{field: value}), *lines[index + 1 : -1]]))
    assert problems(path) == [("r", None)]
    with pytest.raises(
        StoreCorrupt, match=f"run r: the journal is sound, but the .* is not: {field} is '{value}', and by the journal it is "
    ):
        load(path)


def test_a_run_that_was_put_in_or_left_out_is_missed_by_the_journals_of_the_others(journal, lines, tmp_path):
    starts = [index for index, line in enumerate(lines) if b'"kind":"run"' in line]
    with pytest.raises(StoreCorrupt, match="lacks run r/3, which its header or another run names"):
        load(file_of(tmp_path, summed([*lines[: starts[2]], *lines[starts[3] : -1]])))
    other = [line for line in exported(f"sqlite:///{journal}", "other")[1:-1] if b'"kind":"blob"' not in line]
    with pytest.raises(StoreCorrupt, match="has run other, which no run before it has started"):
        load(file_of(tmp_path, summed([*lines[:-1], *other])))
    # If a journal is damaged, there are still verdicts on the runs below it.
    path = file_of(tmp_path, [line.replace(b"look", b"loop") for line in lines])
    told = verdicts(path)
    assert [next(told).run_id for _ in range(4)] == ["r", "r/2", "r/3", "r/undo"]
    with pytest.raises(StoreCorrupt, match="do not have the checksum"):
        next(told)


def test_a_run_without_events_is_none(lines, tmp_path):
    empty = changed(lines[1], seq=0, hash=identity.genesis("r").hex())
    with pytest.raises(StoreCorrupt, match="run r, event 1: it ends with event 0, and no journal is empty"):
        load(file_of(tmp_path, summed([lines[0], empty])))


def test_a_row_that_says_something_else_than_the_journal_does_not_get_into_the_file(journal, lines, tmp_path):
    """Also after the death of a worker.

    The row of its run says queued, and the journal says that a worker holds it.
    """
    path = Path(shutil.copy(journal, tmp_path / "journal.db"))
    with apsw.Connection(str(path)) as other:
        for (name,) in other.execute("SELECT name FROM sqlite_schema WHERE type = 'trigger'").fetchall():
            other.execute(f"DROP TRIGGER {name}")
        other.execute("UPDATE perdure_runs SET agent = 'other', tenant = 'other', status = 'failed' WHERE run_id = 'r'")
    other.close()
    written = exported(f"sqlite:///{path}", "r")
    assert written[1:-1] == lines[1:-1]
    assert load(file_of(tmp_path, written)).header.agent == "shop"


@pytest.mark.parametrize("data", [b"", b"\n", b"hello\n", b'{"a": 1}\n', b'{"kind": "run", "format": 1}\n', b"\x00" * 5000, b"[" * 50_000])
def test_what_is_no_export_is_said_to_be_none(tmp_path, data):
    with pytest.raises((InvalidInput, StoreCorrupt), match=r"is no export of perdure|line 1"):
        load(file_of(tmp_path, [data]))


def test_a_newer_format_and_a_missing_file_are_said_to_be_that(lines, tmp_path):
    with pytest.raises(InvalidInput, match="has format 3, and this version of perdure reads 1 and 2; update perdure"):
        load(file_of(tmp_path, [changed(lines[0], format=3, more="fields")]))
    with pytest.raises(InvalidInput, match="No such file"):
        load(tmp_path / "nowhere")
    with pytest.raises(InvalidInput, match="Is a directory"):
        load(tmp_path)


def test_a_line_without_end_is_not_read_into_memory(lines, tmp_path, monkeypatch):
    monkeypatch.setattr("perdure.inspect.export._LONGEST_LINE", 1 << 20)
    path = file_of(tmp_path, [*lines[:2], b'{"kind":"blob","digest":"', b"a" * (2 << 20)])
    with pytest.raises(StoreCorrupt, match="line 3: longer than 1,048,576 bytes"):
        load(path)


def test_a_journal_that_is_not_as_it_was_written_is_not_exported(journal, tmp_path):
    path = Path(shutil.copy(journal, tmp_path / "journal.db"))
    with apsw.Connection(str(path)) as other:
        other.execute("DROP TRIGGER perdure_events_no_update")
        other.execute("UPDATE perdure_events SET data = replace(data, 'look', 'loop') WHERE seq = 3")
    other.close()
    with pytest.raises(StoreCorrupt, match="run r, event 3: it was changed after it was written, and cannot be exported"):
        exported(f"sqlite:///{path}", "r")
    with pytest.raises(NotFound):
        exported(f"sqlite:///{path}", "nobody")


# -- the command line ----------------------------------------------------------------------------------------------------
def perdure(folder: Path, *words: str) -> Any:
    env = {name: value for name, value in os.environ.items() if not name.startswith("PERDURE_")}
    return forked.run([sys.executable, "-m", "perdure", *words], cwd=folder, env=env, capture_output=True, text=True, timeout=60)


def test_the_verb_writes_a_file_for_its_owner_alone_and_overwrites_nothing(journal, lines, tmp_path):
    url = ("--url", f"sqlite:///{journal}")
    done = perdure(tmp_path, "export", "r", "-o", "r.jsonl", *url)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"r\.jsonl: run r and 3 runs below it, \d\d events, 4 blobs\n", done.stdout)
    assert stat.S_IMODE((tmp_path / "r.jsonl").stat().st_mode) == 0o600
    assert (tmp_path / "r.jsonl").read_bytes().splitlines(keepends=True)[1:-1] == lines[1:-1]
    again = perdure(tmp_path, "export", "r", "-o", "r.jsonl", *url)
    assert (again.returncode, again.stdout) == (2, "")
    assert "is there already, and nothing is overwritten" in again.stderr
    piped = perdure(tmp_path, "export", "r", *url)
    assert piped.stdout.encode().splitlines(keepends=True)[1:-1] == lines[1:-1]
    assert os.listdir(tmp_path) == ["r.jsonl"]


def test_a_link_that_leads_nowhere_is_there_too_and_is_the_one_that_is_named(journal, tmp_path):
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    done = perdure(tmp_path, "export", "r", "-o", "dangling", "--url", f"sqlite:///{journal}")
    assert done.returncode == 2
    assert "dangling is there already, and nothing is overwritten" in done.stderr
    # Before anything is written: an export without the test that it is for would be in the way the next time.
    (tmp_path / "dangling").rename(tmp_path / "test_r.py")
    done = perdure(tmp_path, "export", "r", "shop:shop", "--test", "test_r.py", "--url", f"sqlite:///{journal}")
    assert done.returncode == 2
    assert "test_r.py is there already, and nothing is overwritten" in done.stderr
    assert os.listdir(tmp_path) == ["test_r.py"]


def write_new(path: Path, data: bytes, meanwhile: Callable[[], object] = lambda: None) -> None:
    with new_file(path) as file:
        meanwhile()
        file.write(data)


@pytest.mark.parametrize("code", [None, errno.EPERM, errno.EOPNOTSUPP])
def test_a_file_is_there_whole_and_takes_no_others_place_also_where_files_cannot_have_two_names(tmp_path, monkeypatch, code):
    def link(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    if code is not None:
        monkeypatch.setattr(os, "link", link)
    file, late = tmp_path / "r.jsonl", tmp_path / "late"
    write_new(file, b"whole\n")
    assert (file.read_bytes(), stat.S_IMODE(file.stat().st_mode)) == (b"whole\n", 0o600)
    with pytest.raises(InvalidInput, match="late is there already, and nothing is overwritten"):
        write_new(late, b"ours\n", lambda: late.symlink_to(file))
    assert file.read_bytes() == b"whole\n"
    assert sorted(os.listdir(tmp_path)) == ["late", "r.jsonl"]


def test_an_export_that_fails_half_way_leaves_no_file(journal, tmp_path):
    path = Path(shutil.copy(journal, tmp_path / "journal.db"))
    with apsw.Connection(str(path)) as other:
        for (name,) in other.execute("SELECT name FROM sqlite_schema WHERE type = 'trigger'").fetchall():
            other.execute(f"DROP TRIGGER {name}")
        other.execute("DELETE FROM perdure_events WHERE seq = 5")
    other.close()
    done = perdure(tmp_path, "export", "r", "-o", "r.jsonl", "--url", f"sqlite:///{path}")
    assert done.returncode == 2
    assert "run r, event 5" in done.stderr
    assert [name for name in os.listdir(tmp_path) if "jsonl" in name] == []


def test_verify_and_replay_need_nothing_but_the_file(lines, tmp_path):
    (tmp_path / "shop.py").write_text(SHOP)
    path = file_of(tmp_path, lines)
    verified = perdure(tmp_path, "verify", "--export", path.name)
    assert verified.returncode == 0, verified.stderr
    assert [line.partition(":")[0] for line in verified.stdout.splitlines()] == ["run r", "run r/2", "run r/3", "run r/undo", path.name]
    assert verified.stdout.endswith(f"{path.name}: intact: 4 runs\n")
    spoilt = tmp_path / "spoilt.jsonl"
    spoilt.write_bytes(path.read_bytes().replace(b"look", b"loop"))
    bad = perdure(tmp_path, "verify", "--export", spoilt.name)
    assert (bad.returncode, bad.stdout.splitlines()[0][:14]) == (7, "run r, event 3")
    assert bad.stdout.endswith("spoilt.jsonl: NOT INTACT: 1 of 4 runs not as written\n")
    spoilt.write_bytes(path.read_bytes().replace(b'"exported_at":"2', b'"exported_at":"3', 1))
    bad = perdure(tmp_path, "verify", "--export", spoilt.name)
    assert (bad.returncode, bad.stdout.count("are as they were written")) == (7, 4)
    assert bad.stdout.endswith("spoilt.jsonl: NOT INTACT: the file was changed, even if its runs were not\n")

    same = perdure(tmp_path, "replay", "--export", path.name, "shop.py:shop")
    assert (same.returncode, same.stdout.count("same: ")) == (0, 3), same.stdout + same.stderr
    assert "run r/undo left out" in same.stderr
    (tmp_path / "shop.py").write_text(SHOP.replace("book(3)", "book(4)"))
    other = perdure(tmp_path, "replay", "--export", path.name, "shop.py:shop")
    assert other.returncode == 7
    assert 'the journal has call 4: book({"n":3}); the code asks for call 4: book({"n":4})' in other.stdout


SHOP = """
import asyncio
from typing import Any
from perdure import Run, agent, tool

@tool(effect="read")
async def look() -> dict[str, Any]: ...

@tool(effect="idempotent")
async def book(n: int) -> str: ...

@agent(version="1")
async def child(run: Run, n: int) -> str:
    return await book(n)

@agent(version="3")
async def shop(run: Run, order: Any) -> Any:
    found = await look()
    texts = await asyncio.gather(child(1), child(2), book(3))
    return [found, len(texts)]
"""
