"""What must not disturb a race: a second race, a database on another disk, a damaged results file of the last race."""

from __future__ import annotations

import argparse
import os
import resource
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from bench.race import database, document, machine
from bench.race.__main__ import earlier_durations, is_whole, main, parsed
from bench.race.alone import NotAlone, on_this_machine
from bench.race.figures import WORKLOADS
from bench.race.lanes import PEERS
from bench.race.results import Cell, Results
from bench.race.sizes import WHOLE

_KEY = "W1.steps_per_s"
_LANES = ["perdure/sqlite", "perdure/postgres", "dbos/sqlite"]


def _wanted() -> argparse.Namespace:
    return argparse.Namespace(quick=False, repeats=3, only=WORKLOADS, peers=PEERS)


def _found(heard: list[str], left_out: dict[str, str]) -> Results:
    """A race in which these lanes gave a figure, and the others failed."""
    cells = [Cell("one run", lane, 1, 2.0, (_KEY,), {_KEY: 10.0} if lane in heard else {}) for lane in _LANES]
    return Results("2026-11-16", False, 3, WHOLE, {}, {}, left_out, _LANES, cells)


def test_a_race_is_whole_only_if_everybody_was_there() -> None:
    assert is_whole(_wanted(), _found(_LANES, {}))
    assert not is_whole(_wanted(), _found(_LANES, {"PostgreSQL": "there is none"}))
    assert not is_whole(_wanted(), _found(_LANES[:2], {}))


@pytest.mark.parametrize("less", [{"quick": True}, {"repeats": 2}, {"only": ("W1",)}, {"peers": ("dbos",)}])
def test_a_race_is_whole_only_if_everything_was_asked_for(less: dict[str, object]) -> None:
    assert not is_whole(argparse.Namespace(**(vars(_wanted()) | less)), _found(_LANES, {}))


def test_workloads_and_peers_are_known_in_any_case_and_perdure_is_none_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    wanted = parsed(["--only", "w4, W1", "--with", "DBOS"])
    assert (wanted.only, wanted.peers) == (("W1", "W4"), ("dbos",))
    assert parsed(["--with", ""]).peers == ()
    for arguments, said in (
        (["--with", "perdure"], "perdure: there is dbos, langgraph, temporal, restate"),
        (["--only", ""], "no workload"),
    ):
        with pytest.raises(SystemExit):
            parsed(arguments)
        assert said in capsys.readouterr().err


def test_repeats_are_those_that_were_asked_for_also_in_a_trial(capsys: pytest.CaptureFixture[str]) -> None:
    asked: tuple[list[str], ...] = ([], ["--quick"], ["--quick", "--repeats", "3"], ["--repeats", "4"])
    assert [parsed(arguments).repeats for arguments in asked] == [3, 1, 3, 4]
    for arguments, code in ((["--repeats", "5"], 2), (["--help"], 0)):
        with pytest.raises(SystemExit) as ended:
            parsed(arguments)
        assert ended.value.code == code
    assert "1 to 4" in " ".join(capsys.readouterr().out.split())


def test_results_that_cannot_be_written_are_refused_in_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        assert main(["--quick", "--results", str(folder)]) == 1
        assert capsys.readouterr().err.startswith(f"--results {folder}: nothing can be written there: ")


@pytest.mark.parametrize("content", [b"", b'{"date": "2026', b"[]", b'{"cells": 7}', b"\xff\xfe"], ids=repr)
def test_a_damaged_race_of_before_costs_a_guess_and_no_race(tmp_path: Path, content: bytes) -> None:
    kept = tmp_path / "race.json"
    assert earlier_durations(kept) == {}
    kept.write_bytes(content)
    assert earlier_durations(kept) == {}
    document.write(_found(_LANES, {}), kept)
    assert earlier_durations(kept)["one run", "perdure/sqlite"] == 2.0


def test_what_cannot_be_rendered_is_named_with_the_way_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "race.json").write_text("{")
    assert main(["--render", str(tmp_path / "race.json")]) == 1
    assert "race.json cannot be read" in capsys.readouterr().err


@contextmanager
def _full_disk(after: int) -> Iterator[None]:
    """No file can become longer than this."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (after, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_what_cannot_be_written_whole_leaves_the_one_before(tmp_path: Path) -> None:
    kept = tmp_path / "race.json"
    document.write(_found(_LANES, {}), kept)
    before = kept.read_bytes()
    with pytest.raises(OSError, match="too large"), _full_disk(after=100):
        document.write(_found(_LANES[:1], {}), kept)
    assert kept.read_bytes() == before
    assert list(tmp_path.iterdir()) == [kept]


@pytest.mark.parametrize("is_measuring", [True, False], ids=["race", "trial"])
def test_a_race_beside_anything_is_refused_with_the_other_ones_pid_and_the_way_out(tmp_path: Path, is_measuring: bool) -> None:
    lock = tmp_path / ".bench" / "race.lock"
    refused = pytest.raises(NotAlone, match=f"pid {os.getpid()}.*kill {os.getpid()}")
    with on_this_machine(lock, is_measuring=is_measuring), refused, on_this_machine(lock, is_measuring=True):
        pass
    with on_this_machine(lock, is_measuring=True):
        pass


def test_a_trial_runs_beside_another_one_and_says_so_when_it_disturbs_a_race(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lock = tmp_path / "race.lock"
    with on_this_machine(lock, is_measuring=False), on_this_machine(lock, is_measuring=False):
        assert capsys.readouterr().err == ""
    with on_this_machine(lock, is_measuring=True), on_this_machine(lock, is_measuring=False):
        assert f"another race is under way (pid {os.getpid()}" in capsys.readouterr().err


def test_postgresql_goes_nowhere_but_on_the_disk_to_measure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert database.place(tmp_path, may_enter=True) == tmp_path
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert database.place(tmp_path, may_enter=False) == tmp_path
    monkeypatch.setattr(tempfile, "tempdir", "/dev/shm")
    assert machine.file_system(Path("/dev/shm")) == "tmpfs"
    with pytest.raises(database.OnAnotherDisk, match=r"/dev/shm is on another file system \(tmpfs\).*--results"):
        database.place(tmp_path, may_enter=False)
