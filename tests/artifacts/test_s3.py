"""Artifacts in a bucket of a real S3-compatible server."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from tests.artifacts import makers
from tests.artifacts.makers import MB, body
from tests.artifacts.test_artifacts import app
from tests.servers.s3 import S3Server
from tests.unit.drive_tools import outline, run

from perdure.errors import StoreCorrupt, StoreUnavailable
from perdure.inspect.artifacts import orphans
from perdure.store.artifacts import sweep
from perdure.store.open import open_store
from perdure.store.places import open_place
from perdure.store.transfer import Copying

pytestmark = pytest.mark.full


@pytest.mark.parametrize("agent", [makers.one, makers.streamed])
def test_larger_ones_go_to_the_bucket_and_are_deleted_with_their_run(url: str, s3: S3Server, agent: Any) -> None:
    before = set(s3.names())

    async def main() -> None:
        async with app(url, artifacts=s3.url) as opened:
            made = await opened.run(agent, 20 * MB, id="r")
            (name,) = set(s3.names()) - before
            assert name == f"of perdure/{made.id}"
            assert s3.read(name) == body(20 * MB)
            assert await opened.run(makers.reader, made, id="s") == made.sha256
            small = await opened.run(makers.one, 1000)
            assert await small.read() == body(1000), "smaller ones stay in the database"
            assert set(s3.names()) - before == {name}
            store = opened.store
            store.prune(["r", "s"], 1 << 60, by="me", now=1 << 59)
            assert sweep(store) == 1
            assert set(s3.names()) == before

    run(main())


def test_changed_bytes_in_the_bucket_are_noticed(url: str, s3: S3Server) -> None:
    async def main() -> None:
        async with app(url, artifacts=s3.url) as opened:
            made = await opened.run(makers.one, 5 * MB, id="r")
            s3.put(f"of perdure/{made.id}", body(5 * MB)[::-1])
            with pytest.raises(StoreCorrupt, match=made.uri):
                await opened.handle("r").artifact(made).read()

    run(main())


def test_a_bucket_that_is_not_there_leaves_the_call_to_be_tried_again(url: str, s3: S3Server) -> None:
    async def main() -> None:
        async with app(url, artifacts="s3://no-such-bucket") as opened:
            handle = await opened.start(makers.one, 5 * MB, id="r")
            await opened.drive(handle.id, wait=False)
            assert outline(opened.store.read("r"))[1:4] == ["initiated fetch 1/1", "failing 1/1 server_error", "retry 1/2"]
            assert list(orphans(opened.store)) == [], "what could not be saved was deleted"

    run(main())


def test_a_bucket_that_is_not_there_counts_nothing_as_deleted(s3: S3Server) -> None:
    place = open_place("s3://no-such-bucket/x")
    for attempt in (lambda: place.delete("a" * 32), lambda: place.read("a" * 32, 0, 1)):
        with pytest.raises(StoreUnavailable, match="is not there"):
            attempt()
    with pytest.raises(StoreCorrupt, match="an object is missing"):
        open_place(s3.url).read("a" * 32, 0, 1)
    open_place(s3.url).delete("a" * 32)


def test_a_prune_that_cannot_reach_the_bucket_is_finished_by_the_next_one(url: str, s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(s3.names())

    async def main() -> None:
        async with app(url, artifacts=s3.url) as opened:
            await opened.run(makers.one, 5 * MB, id="r")

    run(main())
    store = open_store(url)
    store.prune(["r"], 1 << 60, by="me", now=1 << 59)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(StoreUnavailable, match="the next prune tries again"):
        sweep(store)
    assert store.facts()["artifacts_doomed"] == "1"
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.endpoint)
    assert sweep(store) == 1
    assert set(s3.names()) == before
    store.close()


def test_a_copy_of_the_history_has_bytes_of_its_own_and_a_move_takes_them_along(url: str, s3: S3Server, tmp_path: Path) -> None:
    before = set(s3.names())
    made: Any = None

    async def main() -> None:
        nonlocal made
        async with app(url, artifacts=s3.url) as opened:
            made = await opened.run(makers.one, 5 * MB, id="r")

    run(main())
    source, history, moved = open_store(url), open_store(f"sqlite:///{tmp_path}/history.db"), open_store(f"sqlite:///{tmp_path}/moved.db")
    assert Copying(source, history, to_url=history.url, by="me").history().artifacts == 1
    assert len(set(s3.names()) - before) == 2
    assert Copying(source, moved, to_url=moved.url, by="me").move(now=1 << 59, lease_us=1).artifacts == 1
    assert len(set(s3.names()) - before) == 2, "a moved journal uses the bytes where they are"
    history.prune(["r"], 1 << 60, by="me", now=1 << 59)
    assert sweep(history) == 1
    (left,) = set(s3.names()) - before
    assert s3.read(left) == body(5 * MB)
    for store in (source, history, moved):
        store.close()

    async def read() -> None:
        async with app(f"sqlite:///{tmp_path}/moved.db") as opened:
            assert await opened.handle("r").artifact(made).read() == body(5 * MB)

    run(read())


def test_a_bucket_takes_and_gives_a_large_object_in_pieces(s3: S3Server) -> None:
    place, name = open_place(s3.url), "c" * 32
    tracemalloc.start()
    try:
        writer = place.create(name)
        for _ in range(40):
            writer.write(b"x" * MB)
        writer.close()
        size = 0
        while size < 40 * MB:
            size += len(place.read(name, size, place.piece_bytes))
        assert tracemalloc.get_traced_memory()[1] < 20 * MB
    finally:
        tracemalloc.stop()
        place.delete(name)
    assert size == 40 * MB
    place.delete(name)  # nothing happens
