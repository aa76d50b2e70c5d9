"""What the command line says and does about artifacts."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.artifacts import makers
from tests.artifacts.makers import MB, body
from tests.artifacts.test_artifacts import app, makers_row
from tests.servers import forked
from tests.unit.drive_tools import run

from perdure import Artifact, RunFailed
from perdure.store.open import open_store


def perdure(*words: str, code: int = 0, **environment: str) -> str:
    done = forked.run(
        [sys.executable, "-m", "perdure", *words],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == code, done
    return str(done.stdout + done.stderr)


def saved(url: str, size: int = 3 * MB, id: str = "r", **settings: Any) -> Artifact:
    async def main() -> Artifact:
        async with app(url, **settings) as opened:
            made: Artifact = await opened.run(makers.one, size, id=id)
            return made

    return run(main())


def test_show_events_and_why_print_the_pointer_and_not_the_bytes(url: str) -> None:
    made = saved(url)
    for words in (("show", "r"), ("events", "r"), ("why", "r")):
        said = perdure(*words, "--url", url)
        assert f"{made.uri} (2.9 MiB, text/csv)" in said, words
        assert len(said) < 3000, words
    for verb in ("show", "events"):
        assert made.sha256 in perdure(verb, "r", "--json", "--url", url), verb


@pytest.mark.parametrize("agent", [makers.one, makers.streamed])
def test_why_names_the_setting_and_the_line_of_the_tool_that_could_not_save(url: str, agent: Any) -> None:
    async def main() -> None:
        async with app(url, artifact_database_bytes=1000) as opened:
            with pytest.raises(RunFailed):
                await opened.run(agent, 3 * MB, id="r")

    run(main())
    (outcome, place, *_) = perdure("why", "r", "--url", url).partition("not made, or failed: 1\n")[2].splitlines()
    assert "artifact_database_bytes" in outcome
    assert re.search(r"makers\.py:\d+ in (fetch|stream)$", place), place


def test_orphans_are_counted_listed_and_deleted(url: str) -> None:
    saved(url, 1000)
    store = open_store(url)
    (row,) = store.artifacts_of("r")
    store.begin_artifact(makers_row(row, "f" * 32))
    store.add_chunk("f" * 32, 0, b"half")
    store.close()
    (check,) = [line for line in perdure("doctor", "--url", url).splitlines() if "artifacts" in line and "prune" not in line]
    assert check.startswith("warn")
    assert "1 orphan that no event names" in check
    dry = perdure("prune", "--orphans", "--dry-run", "--url", url)
    assert dry == f"perdure:artifact/{'f' * 32}: run r, call 1, attempt 1, not finished\nwould delete 1 orphan\n"
    assert perdure("prune", "--orphans", "--url", url).endswith("deleted 1 orphan\n")
    assert json.loads(perdure("prune", "--orphans", "--json", "--url", url)) == {"dry_run": False, "orphans": []}
    (check,) = [line for line in perdure("doctor", "--url", url).splitlines() if "artifacts" in line]
    assert check.split(maxsplit=2)[2] == "1 artifact, 1,000 bytes, of them 1,000 in this database"


def test_prune_says_what_is_missing_or_too_much(url: str) -> None:
    saved(url, 10)
    assert "--older-than 90d, --run RUN, --tenant T, --where QUERY, --orphans, --specimen RUN, or --before-checkpoint RUN" in perdure(
        "prune", "--url", url, code=2
    )
    assert "leave --older-than, --run, --tenant and --where out" in perdure(
        "prune", "--orphans", "--older-than", "1d", "--url", url, code=2
    )
    assert ", 1 artifact that" in perdure("prune", "--older-than", "0s", "--url", url)


def test_verify_reads_the_bytes(url: str, tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    made = saved(url, 5 * MB, artifacts=f"file://{tmp_path}/files")
    assert "all as they were written" in perdure("verify", "--url", url)
    (file,) = [path for path in (tmp_path / "files").rglob("*") if path.is_file()]
    file.write_bytes(body(5 * MB)[:-1] + b"\0")
    assert f"{made.uri} does not have the bytes that were saved" in perdure("verify", "r", "--url", url, code=7)
    file.unlink()
    assert "is missing" in perdure("verify", "r", "--url", url, code=7)


def test_a_copy_carries_the_bytes(url: str, tmp_path: Path) -> None:
    made = saved(url)
    there = f"sqlite:///{tmp_path}/there.db"
    assert ", 1 artifact to" in perdure("copy", "--from", url, "--to", there)
    assert "all as they were written" in perdure("verify", "--url", there)

    async def main() -> None:
        async with app(there) as opened:
            assert await opened.handle("r").artifact(made).read() == body(3 * MB)
            assert await opened.run(makers.reader, made) == made.sha256

    run(main())
    store = open_store(url)
    with pytest.raises(Exception, match="moved"):
        store.begin_artifact(msgspec.structs.replace(store.artifacts_of("r")[0], artifact="d" * 32))
    store.close()


def test_an_export_carries_the_bytes_and_verify_checks_them(url: str, tmp_path: Path) -> None:
    made = saved(url)
    file = tmp_path / "r.jsonl"
    assert ", 1 artifact\n" in perdure("export", "r", "-o", str(file), "--url", url)
    assert "intact: 1 run" in perdure("verify", "--export", str(file))
    lines = file.read_bytes().splitlines(keepends=True)
    assert max(map(len, lines)) < 1.5 * MB, "in chunks"
    place = next(number for number, line in enumerate(lines) if line.startswith(b'{"kind":"bytes"'))
    lines[place] = lines[place].replace(b"A", b"B", 1)
    file.write_bytes(b"".join(lines))
    assert made.uri in perdure("verify", "--export", str(file), code=7)


def test_a_setting_that_names_no_place_is_refused() -> None:
    assert "the environment variable PERDURE_ARTIFACTS is '/srv'; it must be the URL" in perdure("list", code=2, PERDURE_ARTIFACTS="/srv")
