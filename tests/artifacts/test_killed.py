"""SIGKILL while an artifact is saved, and between the save and the event that names it; on both stores."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.artifacts.makers import MB, body
from tests.artifacts.test_artifacts import app
from tests.unit.drive_tools import outline, run

import perdure
from perdure.inspect.artifacts import orphans
from perdure.store.artifacts import sweep
from perdure.store.open import open_store

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[2]
_PROGRAM = """
import asyncio, sys
from tests.artifacts import makers
from perdure import Perdure, Settings

async def main():
    url, agent, size, marker, place = sys.argv[1:]
    settings = Settings(poll_s=0.01, artifact_database_bytes=4_000_000, artifacts=place, reconcile_margin_s=0.01, unknown_deadline_s=0.01)
    async with Perdure(url, makers.ALL, settings=settings) as app:
        print((await app.run(agent, int(size), marker, id="r")).sha256)

asyncio.run(main())
"""


def process(url: str, agent: str, size: int, marker: Path, place: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{Path(perdure.__file__).parents[1]}"}
    command = [sys.executable, "-c", _PROGRAM, url, agent, str(size), str(marker), place]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


@pytest.mark.parametrize("size", [3 * MB, 9 * MB], ids=["in the database", "in a folder"])
def test_killed_while_saving_leaves_an_orphan_that_is_found_and_deleted(url: str, tmp_path: Path, size: int) -> None:
    folder, marker = tmp_path / "files", tmp_path / "marker"
    folder.mkdir()
    place = f"file://{folder}"
    assert process(url, "dies_within", size, marker, place).returncode == -signal.SIGKILL
    store = open_store(url)
    (half,) = store.artifacts_of("r")
    assert half.state == "saving"
    assert list(orphans(store)) == [], "its call has not ended: nobody knows that its attempt is dead"
    store.close()
    ended = process(url, "dies_within", size, marker, place)
    assert ended.stdout.strip() == hashlib.sha256(body(size)).hexdigest(), ended.stderr
    store = open_store(url)
    assert [orphan.artifact for orphan in orphans(store)] == [half.artifact]
    assert store.doom_artifact(half.artifact)
    assert sweep(store) == 1
    (kept,) = store.artifacts_of("r")
    assert (kept.state, kept.attempt) == ("saved", 2)
    assert [file.name for file in files(folder)] == ([kept.artifact] if size > 4 * MB else []), "and no half-written file is left"
    store.close()


@pytest.mark.parametrize("size", [3 * MB, 9 * MB], ids=["in the database", "in a folder"])
def test_killed_between_the_save_and_its_event_is_in_doubt_and_the_first_artifact_is_an_orphan(url: str, tmp_path: Path, size: int) -> None:
    folder, marker = tmp_path / "files", tmp_path / "marker"
    folder.mkdir()
    place = f"file://{folder}"
    assert process(url, "dies_after", size, marker, place).returncode == -signal.SIGKILL
    store = open_store(url)
    (first,) = store.artifacts_of("r")
    assert first.state == "saved", "it was durable before the event that would have named it"
    assert outline(store.read("r"))[1:] == ["initiated save_and_die 1/1"]
    assert list(orphans(store)) == [], "the call is open: its hook or a person may still name the artifact"
    store.close()
    ended = process(url, "dies_after", size, marker, place)
    assert ended.stdout.strip() == hashlib.sha256(body(size)).hexdigest(), ended.stderr
    store = open_store(url)
    assert [orphan.artifact for orphan in orphans(store)] == [first.artifact], "the hook has saved another one, which the event names"
    store.close()

    async def main() -> None:
        async with app(url, artifacts=place) as opened:
            assert await (await opened.handle("r").result()).read() == body(size)

    run(main())
