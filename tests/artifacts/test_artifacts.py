"""Artifacts as a user sees them: saved by a tool, passed on by a pointer, opened by another tool; on both stores."""

from __future__ import annotations

import hashlib
import io
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.artifacts import makers
from tests.artifacts.makers import MB, body
from tests.unit.drive_tools import outline, run

from perdure import (
    Artifact,
    Call,
    InvalidInput,
    NeedsAttention,
    NotEncodable,
    NotFound,
    Perdure,
    Run,
    RunFailed,
    Settings,
    StoreError,
    agent,
    tool,
)
from perdure.core.events import ToolCallCompleted
from perdure.core.failures import describe
from perdure.errors import ArtifactNotSaved, StoreCorrupt, StoreUnavailable
from perdure.inspect.artifacts import orphans
from perdure.store.artifacts import sweep
from perdure.store.open import open_store
from perdure.store.places import Folder, open_place
from perdure.tool.artifact import save

SETTINGS = Settings(poll_s=0.01, artifact_database_bytes=4 * MB)


def app(url: str, **settings: Any) -> Perdure:
    import msgspec

    return Perdure(url, makers.ALL, settings=msgspec.structs.replace(SETTINGS, **settings))


def result(url: str, agent: Any, *args: Any, tenant: str = "default", id: str | None = None, **settings: Any) -> Any:
    async def main() -> Any:
        async with app(url, **settings) as opened:
            return await opened.run(agent, *args, id=id, tenant=tenant)

    return run(main())


def pointer(artifact: Artifact) -> dict[str, Any]:
    return {"uri": artifact.uri, "sha256": artifact.sha256, "size": artifact.size, "content_type": artifact.content_type}


# -- saving and opening -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("size", [0, 1, 1 << 20, (1 << 20) + 1, 3 * MB])
def test_every_kind_of_reader_gets_the_bytes_that_were_saved(url: str, size: int) -> None:
    made = result(url, makers.relay, size)
    assert (made.size, made.sha256, made.content_type) == (size, hashlib.sha256(body(size)).hexdigest(), "text/csv")


def test_every_kind_of_maker_saves_the_same_bytes(url: str, tmp_path: Path) -> None:
    file = tmp_path / "large"
    file.write_bytes(body(2 * MB))
    made = result(url, makers.makers, 2 * MB, str(file))
    assert {one.sha256 for one in made} == {hashlib.sha256(body(2 * MB)).hexdigest()}
    assert len({one.uri for one in made}) == 5, "each is an artifact of its own"


def test_pointers_in_lists_dicts_and_models_are_artifacts_again(url: str) -> None:
    assert result(url, makers.nested, 1000) == 2 * 1002


def test_an_app_opens_what_its_run_returned(url: str) -> None:
    async def main() -> None:
        async with app(url) as opened:
            made = await opened.run(makers.one, 5, id="r")
            assert await made.read() == body(5)
            async with made.open() as stream:
                assert await stream.read(2) == body(5)[:2]
                assert await stream.read() == body(5)[2:]
            assert await opened.handle("r").artifact(pointer(made)).read() == body(5)
            with pytest.raises(NotFound):
                await opened.handle("r", tenant="other").artifact(made).read()

    run(main())


def test_passing_a_pointer_on_stores_nothing_again(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/journal.db"
    open_store(url).close()
    empty = (tmp_path / "journal.db").stat().st_size  # each table and index has a page
    result(url, makers.relay, 4 * MB)
    assert (tmp_path / "journal.db").stat().st_size - empty < 4.5 * MB


def test_a_journal_has_the_pointer_and_not_the_bytes(url: str) -> None:
    made = result(url, makers.one, 200_000, id="r")
    store = open_store(url)
    (done,) = [event.body for event in store.read("r") if isinstance(event.body, ToolCallCompleted)]
    inline = b"" if done.result is None else done.result.inline or b""
    assert made.uri.encode() in inline
    assert len(inline) < 300
    store.close()


def test_an_agent_itself_opens_nothing(url: str) -> None:
    made = result(url, makers.one, 5)
    with pytest.raises(RunFailed, match="a tool opens it"):
        result(url, makers.opener, made)


def test_a_transaction_tool_saves_nothing(url: str) -> None:
    with pytest.raises(RunFailed, match="Save it in another tool before"):
        result(url, makers.in_trans)


@pytest.mark.parametrize("wrong", ["file:///etc/passwd", "s3://bucket/x", "perdure:artifact/../x", f"perdure:artifact/{'a' * 32}\n", 7])
def test_what_is_not_the_uri_of_an_artifact_is_refused_at_once(wrong: Any) -> None:
    with pytest.raises(InvalidInput, match="is not the URI of an artifact"):
        Artifact(wrong, "0" * 64, 1, "text/plain")


def test_outside_of_a_run_nothing_is_saved_or_opened() -> None:
    with pytest.raises(ArtifactNotSaved, match="call the tool from an agent"):
        Call.outside().save(b"x").wait()
    with pytest.raises(InvalidInput, match=r"app\.handle"):
        Artifact(f"perdure:artifact/{'a' * 32}", "0" * 64, 1, "text/plain").open()


class Chunks:
    """A vault in memory that shows what was written."""

    def __init__(self) -> None:
        self.written: list[bytes] = []

    def begin(self, content_type: str, size: int | None) -> Chunks:
        return self

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def finish(self) -> Artifact:
        whole = b"".join(self.written)
        return Artifact(f"perdure:artifact/{'a' * 32}", hashlib.sha256(whole).hexdigest(), len(whole), "text/plain")

    def discard(self) -> None:
        self.written.clear()

    def chunks(self, artifact: Artifact) -> Iterator[bytes]:
        return iter(self.written)

    async def ask(self, work: Any) -> Any:
        return work()


async def later(*pieces: bytes) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece


class OnlyIterable:
    def __aiter__(self) -> AsyncIterator[bytes]:
        return later(b"x" * MB, b"y" * 5 * MB, b"z")


@pytest.mark.parametrize("how", ["bytes", "lines", "file", "one long line", "async", "async iterable"])
def test_whatever_is_saved_is_written_in_chunks_of_one_size(tmp_path: Path, how: str) -> None:
    data = b"x" * MB + b"y" * 5 * MB + b"z"
    (tmp_path / "file").write_bytes(data)
    given: Any = {
        "bytes": data,
        "lines": (data[n : n + 10_000] for n in range(0, len(data), 10_000)),
        "file": tmp_path / "file",
        "one long line": io.BytesIO(data),
        "async": later(b"x" * MB, b"y" * 5 * MB, b"z"),
        "async iterable": OnlyIterable(),
    }[how]
    vault = Chunks()

    async def main() -> Artifact:
        return await save(vault, given, "text/plain")

    assert run(main()).sha256 == hashlib.sha256(data).hexdigest()
    assert {len(chunk) for chunk in vault.written[:-1]} == {1 << 20}


@pytest.mark.parametrize(
    "wrong", ["/no/such/file", 7, ["text"], later(b"x"), io.StringIO("text")], ids="path number text async textfile".split()
)
def test_wrong_data_is_no_refusal_since_the_tool_may_have_acted(wrong: Any) -> None:
    def attempt() -> Artifact:
        return save(Chunks(), wrong, "text/plain").wait()

    with pytest.raises(ArtifactNotSaved) as raised:
        attempt()
    assert describe(raised.value).kind == "not_saved"
    with pytest.raises(ArtifactNotSaved, match="content_type"):
        save(Chunks(), b"x", "no\nline").wait()


def test_a_forgotten_await_says_so() -> None:
    from perdure.core.codec import encode

    with pytest.raises(NotEncodable, match="await it"):
        encode({"file": Call.outside().save(b"x")})


# -- limits -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("agent", [makers.one, makers.streamed])
def test_too_large_for_the_database_and_no_other_place_is_an_error_that_says_what_to_do(url: str, agent: Any) -> None:
    with pytest.raises(
        RunFailed, match=r'after 1 attempt: ArtifactNotSaved: .*artifact_database_bytes is 4,000,000: .*artifacts = "file:///…"'
    ):
        result(url, agent, 5 * MB)
    store = open_store(url)
    assert store.facts()["artifacts"] == "0", "what was written before the limit was reached is deleted"
    store.close()


def test_a_once_tool_that_has_acted_and_cannot_save_is_in_doubt_and_not_failed(url: str, tmp_path: Path) -> None:
    done = tmp_path / "done"

    async def main() -> None:
        async with app(url) as opened:
            with pytest.raises(NeedsAttention):
                await opened.run(makers.acting, 5 * MB, str(done), id="r")
            assert "in_doubt 1/1" in outline(opened.store.read("r"))
            row = opened.store.get("r")
            assert row is not None
            assert row.attention == "in_doubt"

    run(main())
    assert done.read_text() == "acted\n", "it is not made again"


@pytest.mark.parametrize("agent", [makers.one, makers.streamed])
def test_larger_ones_go_to_the_folder(url: str, tmp_path: Path, agent: Any) -> None:
    folder = tmp_path / "with space"
    folder.mkdir()
    place = f"file://{tmp_path}/with%20space"

    async def main() -> None:
        async with app(url, artifacts=place) as opened:
            made = await opened.run(agent, 5 * MB, id="r")
            assert await made.read() == body(5 * MB)

    run(main())
    (file,) = [path for path in folder.rglob("*") if path.is_file()]
    assert file.read_bytes() == body(5 * MB)
    assert file.stat().st_mode & 0o077 == 0, "nobody else on the machine reads it"
    store = open_store(url)
    assert store.facts()["artifact_bytes_here"] == "0"
    store.prune(["r"], 1 << 60, by="me", now=1 << 59)
    assert file.exists(), "the bytes are deleted after the commit, by whoever prunes"
    assert sweep(store) == 1
    assert not file.exists()
    store.close()


def test_perdure_takes_a_place_and_refuses_what_is_none(tmp_path: Path) -> None:
    assert Perdure("sqlite://", artifacts=f"file://{tmp_path}").settings.artifacts == f"file://{tmp_path}"
    for wrong in ("/srv/artifacts", "http://x/y", "file://host/x", "s3://"):
        with pytest.raises(InvalidInput, match="it must be the URL of a place"):
            Perdure("sqlite://", artifacts=wrong)


def test_a_folder_that_cannot_be_written_leaves_a_read_call_to_be_tried_again(url: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")

    async def main() -> None:
        async with app(url, artifacts=f"file://{tmp_path}/file/x") as opened:
            handle = await opened.start(makers.one, 5 * MB, id="r")
            await opened.drive(handle.id, wait=False)
            assert outline(opened.store.read("r"))[1:4] == ["initiated fetch 1/1", "failing 1/1 server_error", "retry 1/2"]

    run(main())


def test_a_folder_that_is_not_mounted_is_neither_created_nor_taken_for_one_whose_files_are_deleted(url: str, tmp_path: Path) -> None:
    folder, away = tmp_path / "files", tmp_path / "away"
    folder.mkdir()
    made = result(url, makers.one, 5 * MB, id="r", artifacts=f"file://{folder}")
    store = open_store(url)
    folder.rename(away)
    for empty in (False, True):  # first without the folder, then with a mount point that has no file system
        if empty:
            folder.mkdir()
        with pytest.raises(StoreUnavailable, match="mount its file system"):
            open_place(f"file://{folder}").read(made.id, 0, 1)
    folder.rmdir()
    with pytest.raises(StoreUnavailable, match="does not exist; create it"):
        open_place(f"file://{folder}").create("a" * 32)
    assert not folder.exists()
    store.prune(["r"], 1 << 60, by="me", now=1 << 59)
    for empty in (False, True):
        if empty:
            folder.mkdir()
        with pytest.raises(StoreUnavailable, match="the next prune tries again"):
            sweep(store)
        assert store.facts()["artifacts_doomed"] == "1"
    folder.rmdir()
    away.rename(folder)
    assert sweep(store) == 1
    assert [path for path in folder.rglob("*") if path.is_file()] == []
    store.close()


@pytest.mark.parametrize("name", ["../x", "a" * 31, f"{'a' * 32}/../../x", "/etc/passwd"])
def test_a_name_that_is_a_path_is_refused_also_without_asserts(tmp_path: Path, name: str) -> None:
    for attempt in (Folder.create, Folder.delete):
        with pytest.raises(StoreCorrupt, match="is not the name of an artifact"):
            attempt(Folder(f"file://{tmp_path}"), name)


async def read_into(got: bytearray, artifact: Artifact) -> None:
    async with artifact.open() as stream:
        async for chunk in stream:
            got += chunk


# -- damage -----------------------------------------------------------------------------------------------------------
def test_other_bytes_are_an_error_that_names_the_artifact_and_come_to_no_end(url: str, tmp_path: Path) -> None:
    place = f"file://{tmp_path}/files"
    (tmp_path / "files").mkdir()
    made = result(url, makers.one, 5 * MB, id="r", artifacts=place)
    (file,) = [path for path in (tmp_path / "files").rglob("*") if path.is_file()]
    damaged = bytearray(body(5 * MB))
    damaged[4 * MB] ^= 1
    file.write_bytes(damaged)

    async def main() -> None:
        async with app(url, artifacts=place) as opened:
            handle = opened.handle("r")
            with pytest.raises(StoreCorrupt, match=made.uri):
                await handle.artifact(made).read()
            got = bytearray()
            with pytest.raises(StoreCorrupt, match=made.uri):
                await read_into(got, handle.artifact(made))
            assert 0 < len(got) < 5 * MB, "the last bytes are held back until the hash is known"
            file.write_bytes(body(5 * MB)[:-1])
            with pytest.raises(StoreCorrupt):
                await handle.artifact(made).read()
            file.unlink()
            with pytest.raises(StoreCorrupt, match="is missing"):
                await handle.artifact(made).read()

    run(main())


# -- who may open what ------------------------------------------------------------------------------------------------
def test_a_child_opens_what_another_child_of_its_family_has_saved(url: str) -> None:
    assert result(url, makers.parent, 1000) == hashlib.sha256(body(1000)).hexdigest()


def test_a_run_opens_what_it_got_with_its_input_or_a_signal(url: str) -> None:
    async def main() -> None:
        async with app(url) as opened:
            made = await opened.run(makers.one, 1000, id="maker")
            assert await opened.run(makers.reader, made) == made.sha256
            handle = await opened.start(makers.waiter)
            await opened.signal(handle.id, "file", pointer(made), by="me")
            assert await handle.result() == made.sha256

    run(main())


def test_a_forged_pointer_opens_nothing(url: str) -> None:
    """A model writes arguments, and a caller writes input: neither reaches the artifact of another family or tenant."""

    async def main() -> None:
        async with app(url) as opened:
            mine = await opened.run(makers.one, 1000, id="mine", tenant="acme")
            for tenant in ("evil", "default"):
                with pytest.raises(NotFound, match="which tenant"):
                    await opened.run(makers.reader, mine, tenant=tenant)
            # Inside a run, where no input is checked: the arguments of a call.
            for tenant in ("evil", "acme"):
                handle = await opened.start(makers.waiter, tenant=tenant, id=f"waiter-{tenant}")
                changed = pointer(mine) | {"uri": f"perdure:artifact/{'0' * 32}"}
                await opened.signal(handle.id, "file", changed, by="me")
                with pytest.raises(RunFailed, match="may open"):
                    await handle.result()
            handle = await opened.start(makers.waiter, tenant="evil", id="by-signal")
            await opened.signal(handle.id, "file", pointer(mine), by="me")
            with pytest.raises(RunFailed, match="NotFound: perdure:artifact/"):
                await handle.result()
            # Another family of the same tenant, which was never given the pointer.
            await opened.start(makers.waiter, tenant="acme", id="stranger")
            for run_id in ("stranger", "by-signal"):
                with pytest.raises(NotFound):
                    await opened.handle(run_id).artifact(mine).read()
            # The right name with another hash, size or type is refused: only the approved artifact may be opened.
            for change in ({"sha256": "0" * 64}, {"size": 999}, {"content_type": "text/html"}):
                with pytest.raises(NotFound):
                    await opened.handle("mine").artifact(pointer(mine) | change).read()
            assert await opened.handle("mine").artifact(mine).read() == body(1000)

    run(main())


@pytest.mark.parametrize("how", ["run", "start"])
@pytest.mark.parametrize("kind", ["async", "sync", "transaction"])
def test_a_run_that_a_tool_has_started_opens_artifacts_with_its_own_rights(url: str, how: str, kind: str) -> None:
    """The tool of the first run is the context in which the second run begins. Its rights must not come along."""
    opened: Any = None

    @tool(effect="read")
    async def fetch(call: Call) -> Artifact:
        return await call.save(b"of this family")

    @tool(effect="read")
    async def peek_async(file: Artifact) -> str:
        return (await file.read()).decode()

    @tool(effect="read")
    def peek_sync(file: Artifact) -> str:
        return file.read().wait().decode()

    @tool(effect="transaction")
    def peek_transaction(file: Artifact, call: Call) -> str:
        return file.read().wait().decode()

    peek: Any = {"async": peek_async, "sync": peek_sync, "transaction": peek_transaction}[kind]

    @agent(version="1")
    async def inner(run: Run, parts: list[str], sha256: str) -> str:
        own = await peek(await fetch())
        assert own == "of this family"
        # In parts, because a start is refused if its input names an artifact of another tenant.
        return str(await peek(Artifact("".join(parts), sha256, len(b"of this family"), "application/octet-stream")))

    @tool(effect="read")
    async def start(file: Artifact, whose: str) -> str:
        args = ([file.uri[:20], file.uri[20:]], file.sha256)
        try:
            if how == "run":
                return str(await opened.run(inner, *args, tenant=whose))
            return str(await (await opened.start(inner, *args, tenant=whose)).result())
        except RunFailed as error:
            return str(error)

    @agent(version="1")
    async def outer(run: Run, whose: str) -> str:
        return await start(await fetch(), whose)

    async def main() -> None:
        nonlocal opened
        async with Perdure(url, [inner, outer], settings=SETTINGS) as opened:
            for whose in ("b", "a"):
                said = await opened.run(outer, whose, tenant="a")
                # Call 2 opens an artifact of its own family, call 3 an artifact of the other family.
                assert "(call 3) failed after 1 attempt: NotFound" in said

    run(main())


def test_an_artifact_that_another_runs_tool_left_in_a_variable_is_opened_with_the_rights_of_the_reader(url: str) -> None:
    left: list[Artifact] = []
    opened: Any = None

    @tool(effect="read")
    def leave(call: Call) -> None:
        left.append(call.save(b"mine").wait())

    @tool(effect="read")
    async def take() -> str:
        return (await left[-1].read()).decode()

    @tool(effect="read")
    async def ask_app(run_id: str) -> str:
        return str((await opened.handle(run_id).artifact(left[-1]).read()).decode())

    @agent(version="1")
    async def leaves(run: Run) -> str:
        await leave()
        return await take()

    @agent(version="1")
    async def takes(run: Run) -> str:
        return await take()

    @agent(version="1")
    async def asks(run: Run) -> str:
        return await ask_app("first")

    async def main() -> None:
        nonlocal opened
        async with Perdure(url, [leaves, takes, asks], settings=SETTINGS) as opened:
            assert await opened.run(leaves, id="first", tenant="a") == "mine"
            with pytest.raises(RunFailed, match="may open"):
                await opened.run(takes, tenant="b")
            assert await opened.run(asks, tenant="b") == "mine", "the app's own code has named the run"

    run(main())


def test_a_pointer_with_other_fields_is_not_an_artifact(url: str) -> None:
    async def main() -> None:
        async with app(url) as opened:
            made = await opened.run(makers.one, 10)
            for wrong in (pointer(made) | {"path": "/etc/passwd"}, {"uri": made.uri}, {**pointer(made), "uri": "file:///etc/passwd"}):
                with pytest.raises(InvalidInput):
                    await opened.run(makers.reader, wrong)

    run(main())


# -- orphans and pruning ----------------------------------------------------------------------------------------------
def test_an_artifact_that_another_family_got_stays_until_that_family_is_pruned(url: str) -> None:
    async def main() -> None:
        async with app(url) as opened:
            made = await opened.run(makers.one, 1000, id="maker")
            await opened.run(makers.reader, made, id="reader")
            store, before = opened.store, 1 << 60
            assert store.prune(["maker"], before, by="me", now=before).artifacts == 0
            assert await opened.handle("reader").artifact(made).read() == body(1000)
            assert list(orphans(store)) == []
            assert store.prune(["reader"], before, by="me", now=before).artifacts == 1
            assert sweep(store) == 1
            assert store.facts()["artifacts"] == "0"

    run(main())


def test_an_artifact_that_no_result_names_is_an_orphan_when_its_call_has_ended(url: str) -> None:
    async def main() -> None:
        async with app(url) as opened:
            await opened.run(makers.one, 10, id="r")
            (named,) = opened.store.artifacts_of("r")
            lost = makers_row(named, "f" * 32)
            opened.store.begin_artifact(lost)
            opened.store.add_chunk(lost.artifact, 0, b"half")
            assert [orphan.artifact for orphan in orphans(opened.store)] == [lost.artifact]
            assert opened.store.doom_artifact(lost.artifact)
            assert sweep(opened.store) == 1
            assert [row.artifact for row in opened.store.artifacts_of("r")] == [named.artifact]
            assert list(orphans(opened.store)) == []

    run(main())


def makers_row(like: Any, artifact: str) -> Any:
    import msgspec

    return msgspec.structs.replace(like, artifact=artifact, sha256=None, size=None)


def test_what_an_attempt_under_way_has_saved_is_no_orphan(url: str) -> None:
    import asyncio

    going: asyncio.Event | None = None

    @tool(effect="once")
    async def slow(call: Call) -> Artifact:
        assert going is not None
        saved = await call.save(b"there")
        await going.wait()
        return saved

    @agent(version="1")
    async def slowly(run: Run) -> Artifact:
        return await slow()

    async def main() -> None:
        nonlocal going
        going = asyncio.Event()
        async with Perdure(url, [slowly], settings=SETTINGS) as opened:
            handle = await opened.start(slowly, id="r")
            driving = asyncio.ensure_future(handle.result())
            while not opened.store.artifacts_of("r") or opened.store.artifacts_of("r")[0].state != "saved":
                await asyncio.sleep(0.01)
            assert list(orphans(opened.store)) == []
            going.set()
            assert await (await driving).read() == b"there"
            assert list(orphans(opened.store)) == []

    run(main())


def test_a_save_whose_artifact_was_deleted_meanwhile_fails_and_is_not_believed(url: str) -> None:
    result(url, makers.one, 10, id="r")
    store = open_store(url)
    (row,) = store.artifacts_of("r")
    store.begin_artifact(makers_row(row, "e" * 32))
    assert store.doom_artifact("e" * 32)
    for late in (lambda: store.add_chunk("e" * 32, 0, b"x"), lambda: store.finish_artifact("e" * 32, b"0" * 32, 0)):
        with pytest.raises(Exception, match="not being saved any more"):
            late()
    store.close()


def test_a_saved_artifact_cannot_be_changed_or_deleted_by_sql(url: str) -> None:
    result(url, makers.one, 10, id="r")
    statements = (
        "UPDATE perdure_artifacts SET size = 3",
        "UPDATE perdure_artifacts SET place = 'file:///etc'",
        "DELETE FROM perdure_artifacts",
        "UPDATE perdure_artifact_chunks SET data = data",
    )
    for statement in statements:
        if url.startswith("sqlite"):
            import apsw

            with pytest.raises(apsw.ConstraintError):
                apsw.Connection(url.removeprefix("sqlite:///")).execute(statement)
        else:
            import psycopg

            with psycopg.connect(url) as other, pytest.raises(psycopg.errors.IntegrityError):
                other.execute(statement)


def test_errors_of_the_store_while_saving_leave_a_once_call_in_doubt() -> None:
    assert describe(ArtifactNotSaved("away")).kind == "server_error"
    assert describe(ArtifactNotSaved("too large", final=True)).kind == "not_saved"
    wrapped = RuntimeError("cannot report")
    wrapped.__cause__ = ArtifactNotSaved("too large", final=True)
    assert describe(wrapped).kind == "not_saved"
    assert issubclass(StoreCorrupt, StoreError)
