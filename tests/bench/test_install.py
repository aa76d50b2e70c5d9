"""A peer that cannot be installed is left out with its reason."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from bench.race.install import NotInstalled, install
from bench.race.lanes import ROOT


def test_a_peer_without_requirements_is_left_out_with_its_reason(tmp_path: Path) -> None:
    with pytest.raises(NotInstalled, match=r"no requirements/nobody\.txt"):
        install("nobody", tmp_path / "requirements", tmp_path)


def test_perdure_needs_no_environment_of_its_own(tmp_path: Path) -> None:
    install("perdure", tmp_path, tmp_path)
    assert not list(tmp_path.iterdir())


_UV = """
import pathlib, sys
with open(pathlib.Path(__file__).with_name("calls"), "a") as calls:
    print(sys.argv[1], file=calls)
sys.exit("no such package" if "broken" in " ".join(pathlib.Path(one).read_text() for one in sys.argv if one.endswith(".txt")) else 0)
"""


@pytest.fixture
def uv(tmp_path: Path) -> Path:
    """Replaces the installer: it records the requests, and cannot find broken packages."""
    program = tmp_path / "uv.py"
    program.write_text(_UV)
    return program


def _wish(folder: Path, text: str) -> Path:
    requirements = folder / "requirements"
    requirements.mkdir(exist_ok=True)
    (folder / "peer").mkdir(exist_ok=True)
    (requirements / "peer.txt").write_text(text)
    return requirements


def _calls(uv: Path) -> list[str]:
    return uv.with_name("calls").read_text().split()


def test_what_is_installed_is_installed_once_and_again_when_its_requirements_change(tmp_path: Path, uv: Path) -> None:
    requirements = _wish(tmp_path, "peer==1\n")
    install("peer", requirements, tmp_path, uv)
    assert _calls(uv) == ["venv", "pip"]
    install("peer", requirements, tmp_path, uv)
    assert _calls(uv) == ["venv", "pip"]
    install("peer", _wish(tmp_path, "peer==2\n"), tmp_path, uv)
    assert _calls(uv) == ["venv", "pip"] * 2


def test_an_environment_is_made_anew_even_if_one_is_there_since_another_python_may_have_made_it(tmp_path: Path, uv: Path) -> None:
    requirements = _wish(tmp_path, "peer==1\n")
    (tmp_path / "peer" / "bin").mkdir()
    (tmp_path / "peer" / "bin" / "python").symlink_to(sys.executable)
    (tmp_path / "peer" / ".installed").write_text("by another Python")
    install("peer", requirements, tmp_path, uv)
    assert _calls(uv) == ["venv", "pip"]


def test_a_folder_that_cannot_be_written_to_leaves_out_the_peer_and_not_the_race(tmp_path: Path, uv: Path) -> None:
    requirements = _wish(tmp_path, "peer==1\n")
    (tmp_path / "full").touch()
    with pytest.raises(NotInstalled, match="full"):
        install("peer", requirements, tmp_path / "full", uv)


_REFUSES = """
import sys
if "pip" in sys.argv:
    sys.exit(SAID)
"""


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("error: no route to the registry", "error: no route to the registry;"),
        (
            "error: nothing found\n  cause: there is no version 7.1\n  hint: many words",
            "error: nothing found cause: there is no version 7.1;",
        ),
        (
            "  × No solution found:\n  ╰─▶ Because peer was not found, it cannot be used.\n  hint",
            "No solution found: Because peer was not found",
        ),
        ("Traceback (most recent call last):\n  File\nOSError: no uv", "OSError: no uv;"),
        ("", "ended with 1;"),
    ],
)
def test_why_a_peer_is_left_out_names_the_package_how_the_error_begins_and_what_to_try(tmp_path: Path, said: str, told: str) -> None:
    program = tmp_path / "uv.py"
    program.write_text(_REFUSES.replace("SAID", repr(said) if said else "1"))
    with pytest.raises(NotInstalled) as refused:
        install("peer", _wish(tmp_path, "# a remark\npeer==7.1\nother==2\n"), tmp_path, program)
    assert str(refused.value).startswith("peer==7.1 cannot be installed: ")
    assert told in str(refused.value)
    assert str(refused.value).endswith(f"uv.py pip install --python {tmp_path}/peer/bin/python -r {tmp_path}/requirements/peer.txt")


def test_a_race_in_which_no_peer_can_be_installed_ends_with_the_reasons(tmp_path: Path) -> None:
    checkout, results = tmp_path / "checkout", tmp_path / "results"
    shutil.copytree(ROOT / "bench", checkout / "bench", ignore=shutil.ignore_patterns("results", "__pycache__"))
    shutil.copytree(ROOT / "tests" / "servers", checkout / "tests" / "servers", ignore=shutil.ignore_patterns("__pycache__"))
    (checkout / ".ci").mkdir()
    (checkout / ".ci" / "uv.py").write_text(_REFUSES.replace("SAID", "'no route to the registry'"))
    command = [sys.executable, "-m", "bench.race", "--quick", "--only", "w1", "--with", "dbos,LangGraph", "--results", str(results)]
    done = subprocess.run(command, cwd=checkout, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    command_to_try = "uv.py pip install --python .bench/dbos/bin/python -r bench/race/requirements/dbos.txt"
    (dbos,) = [line for line in done.stderr.splitlines() if line.startswith("dbos is left out: dbos==")]
    assert "cannot be installed: no route to the registry; to try: " in dbos
    assert dbos.endswith(command_to_try)
    assert "langgraph is left out: langgraph==" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("no peer can take part, and perdure alone is no race")
    assert list(results.iterdir()) == []


def test_what_could_not_be_installed_is_tried_again(tmp_path: Path, uv: Path) -> None:
    requirements = _wish(tmp_path, "broken==1\n")
    for _ in range(2):
        with pytest.raises(NotInstalled, match="no such package"):
            install("peer", requirements, tmp_path, uv)
    assert _calls(uv) == ["venv", "pip"] * 2
