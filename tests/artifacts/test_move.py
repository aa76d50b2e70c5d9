"""Artifacts in a folder while a journal is moved: two journals that are in use never name the same bytes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.artifacts import makers
from tests.artifacts.makers import MB, body
from tests.artifacts.test_artifacts import app
from tests.unit.drive_tools import run

from perdure import Artifact, Conflict
from perdure.engine.artifacts import opened
from perdure.inspect.artifacts import orphans
from perdure.store.api import Store
from perdure.store.artifacts import sweep
from perdure.store.open import open_store
from perdure.store.transfer import Copying

LATER = 1 << 60


class Killed(Exception):
    """Simulates the end of the process."""


class Dying:
    """A store on which one method never returns."""

    def __init__(self, store: Store, last: str) -> None:
        self._store = store
        self._last = last

    def __getattr__(self, name: str) -> Any:
        if name == self._last:
            raise Killed(name)
        return getattr(self._store, name)


@pytest.fixture
def moving(url: str, tmp_path: Path) -> Iterator[tuple[Store, Store, Artifact]]:
    """A journal with an artifact in a folder: the finished run `r` has saved it, and `reader` got it.

    The run `small` has no artifact there.
    """

    (tmp_path / "files").mkdir()

    async def main() -> Artifact:
        async with app(url, artifacts=f"file://{tmp_path}/files") as opened:
            made: Artifact = await opened.run(makers.one, 5 * MB, id="r")
            await opened.run(makers.reader, made, id="reader")
            await opened.run(makers.one, 10, id="small")
            await opened.start(makers.waiter, id="unfinished")
            return made

    made = run(main())
    source, target = open_store(url), open_store(f"sqlite:///{tmp_path}/target.db")
    yield source, target, made
    source.close()
    target.close()


def move(source: Store, target: Any) -> None:
    Copying(source, target, to_url="sqlite:///target.db", by="me").move(now=LATER, lease_us=1)


def abandon(source: Store, target: Any) -> int:
    return Copying(source, target, to_url="sqlite:///target.db", by="me").abandon(now=LATER)


def read(store: Store, artifact: Artifact) -> bytes:
    return b"".join(opened(store, artifact, "r"))


def prune_all(store: Store) -> None:
    store.prune(["r", "reader", "small"], LATER, by="me", now=LATER)
    sweep(store)


def test_after_an_abandoned_move_a_prune_in_one_journal_leaves_the_bytes_of_the_other(moving: tuple[Store, Store, Artifact]) -> None:
    source, target, made = moving
    with pytest.raises(Killed):
        move(source, Dying(target, "take_in_rates"))
    assert read(target, made) == body(5 * MB)
    assert abandon(source, target) == 1, "of the unfinished run"
    assert target.artifact(made.id) is None
    assert [target.get(root) is None for root in ("r", "reader", "small")] == [True, True, False]
    prune_all(target)
    assert read(source, made) == body(5 * MB)
    move(source, target)
    assert read(target, made) == body(5 * MB)


def test_an_abandon_that_is_killed_before_the_source_is_open_again_goes_on(moving: tuple[Store, Store, Artifact]) -> None:
    source, target, made = moving
    with pytest.raises(Killed):
        move(source, Dying(target, "take_in_rates"))
    with pytest.raises(Killed):
        Copying(Dying(source, "reopen_journal"), target, to_url="sqlite:///target.db", by="me").abandon(now=LATER)
    assert source.moved() is not None
    abandon(source, target)
    prune_all(target)
    assert read(source, made) == body(5 * MB)


def test_a_move_that_is_killed_before_the_run_arrives_leaves_no_orphan_that_leads_to_the_bytes(
    moving: tuple[Store, Store, Artifact],
) -> None:
    source, target, made = moving
    with pytest.raises(Killed):
        move(source, Dying(target, "take_in"))
    for orphan in orphans(target):
        target.doom_artifact(orphan.artifact)
    sweep(target)
    move(source, target)
    assert read(target, made) == body(5 * MB)


def test_a_move_is_not_undone_after_the_target_has_deleted_the_bytes(moving: tuple[Store, Store, Artifact]) -> None:
    source, target, _ = moving
    with pytest.raises(Killed):
        move(source, Dying(target, "take_in_rates"))
    prune_all(target)
    with pytest.raises(Conflict, match=r"was pruned in .* so the move cannot be undone"):
        abandon(source, target)
    assert source.moved() is not None


def test_a_move_is_not_undone_after_a_new_run_of_the_target_got_the_artifact(moving: tuple[Store, Store, Artifact], tmp_path: Path) -> None:
    source, target, made = moving
    with pytest.raises(Killed):
        move(source, Dying(target, "take_in_rates"))

    async def main() -> None:
        async with app(f"sqlite:///{tmp_path}/target.db") as there:
            await there.start(makers.reader, made, id="new")

    run(main())
    with pytest.raises(Conflict, match=r"run new was started in .* so the move cannot be undone"):
        abandon(source, target)
    assert read(target, made) == body(5 * MB)
