"""A peer that cannot be installed is left out with its reason."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench.race.install import NotInstalled, install


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
    """In place of the installer: writes down what it is asked for, and cannot find what is broken."""
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


def test_what_could_not_be_installed_is_tried_again(tmp_path: Path, uv: Path) -> None:
    requirements = _wish(tmp_path, "broken==1\n")
    for _ in range(2):
        with pytest.raises(NotInstalled, match="no such package"):
            install("peer", requirements, tmp_path, uv)
    assert _calls(uv) == ["venv", "pip"] * 2
