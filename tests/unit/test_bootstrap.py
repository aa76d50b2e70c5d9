"""`make setup` runs only the uv whose hash is in requirements-boot.lock, and .venv has the requested interpreter."""

from __future__ import annotations

import base64
import hashlib
import os
import platform
import re
import shutil
import stat
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LOCKS = sorted(ROOT.glob("requirements*.lock"))


def python_with_pip() -> str:
    """The interpreter that `make` would use: the interpreter of .venv has no pip."""
    for python in (sys.executable, getattr(sys, "_base_executable", ""), shutil.which("python3")):
        if python and subprocess.run([python, "-m", "pip", "--version"], capture_output=True, check=False).returncode == 0:
            return python
    pytest.skip("no Python with pip is here")


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """The files of a fresh clone that `make setup` reads."""
    folder = tmp_path / "clone"
    (folder / ".ci").mkdir(parents=True)
    for name in ("Makefile", "pyproject.toml", ".ci/uv.py", *(lock.name for lock in LOCKS)):
        shutil.copy(ROOT / name, folder / name)
    return folder


def hostile_uv(folder: Path, mark: Path) -> Path:
    """A wheel with the name and the version that the project asks for. Its uv leaves a mark when it is run, and fails."""
    version = re.search(r"^uv==([\d.]+)", (ROOT / "requirements-boot.lock").read_text(), re.MULTILINE)
    assert version is not None
    name = f"uv-{version[1]}"
    files = {
        f"{name}.data/scripts/uv": f"#!/bin/sh\necho $* > {mark}\nexit 1\n",
        f"{name}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: uv\nVersion: {version[1]}\n",
        f"{name}.dist-info/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = f"{name}.dist-info/RECORD"
    lines = [f"{path},sha256={digest(text)},{len(text)}" for path, text in files.items()]
    folder.mkdir()
    wheel = folder / f"{name}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in {**files, record: "\n".join([*lines, f"{record},,"]) + "\n"}.items():
            entry = zipfile.ZipInfo(path)
            entry.external_attr = (stat.S_IFREG | 0o755) << 16
            archive.writestr(entry, text)
    return wheel


def digest(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()


def make_setup(clone: Path, wheels: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """`make setup` on a machine whose package index is this folder alone."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_", "MAKE", "MFLAGS"))}
    env = {
        **ours,
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(wheels),
        "PIP_CONFIG_FILE": os.devnull,
        "PYTHON": python_with_pip(),
        **variables,
    }
    return subprocess.run(["make", "-e", "setup"], cwd=clone, env=env, capture_output=True, text=True, timeout=110, check=False)


@pytest.mark.full
def test_a_uv_of_the_right_version_with_another_content_is_not_run(clone: Path, tmp_path: Path) -> None:
    mark = tmp_path / "PWNED"
    wheel = hostile_uv(tmp_path / "wheels", mark)
    done = make_setup(clone, wheel.parent)
    assert not mark.exists(), done.stdout
    assert done.returncode != 0
    assert "HASHES" in done.stderr


@pytest.mark.full
def test_the_uv_whose_hash_is_in_the_lock_file_is_installed_and_run(clone: Path, tmp_path: Path) -> None:
    """Or the test above would pass for any other reason."""
    mark = tmp_path / "ran"
    wheel = hostile_uv(tmp_path / "wheels", mark)
    lock = clone / "requirements-boot.lock"
    hashed = hashlib.sha256(wheel.read_bytes()).hexdigest()
    lock.write_text(re.sub(r"sha256:\w+", f"sha256:{hashed}", lock.read_text()))
    done = make_setup(clone, wheel.parent)
    assert mark.exists(), done.stderr


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.name)
def test_a_lock_file_pins_each_package_by_hash_and_names_no_registry(lock: Path) -> None:
    text = lock.read_text()
    named = re.findall(r"^[A-Za-z0-9][\w.-]*==\S+.*\\\n((?: {4}--hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)", text, re.MULTILINE)
    assert named
    assert len(named) == len(re.findall(r"^\S+==", text, re.MULTILINE))
    assert "://" not in text


# -- which interpreter ----------------------------------------------------------------------------------------------------
@pytest.mark.full
def test_an_interpreter_without_pip_gets_its_environment_by_the_uv_that_python3_installs(clone: Path, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    wheel = hostile_uv(tmp_path / "wheels", mark)
    lock = clone / "requirements-boot.lock"
    lock.write_text(re.sub(r"sha256:\w+", f"sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}", lock.read_text()))
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, starts in {"python3": python_with_pip(), "bare": f"{sys.executable} -I -S"}.items():  # -S: without site-packages
        (folder / name).write_text(f'#!/bin/sh\nexec {starts} "$@"\n')
        (folder / name).chmod(0o755)
    done = make_setup(clone, wheel.parent, PYTHON=str(folder / "bare"), PATH=f"{folder}{os.pathsep}{os.environ['PATH']}")
    assert mark.exists(), done.stderr
    assert f"--python {folder / 'bare'}" in mark.read_text()


@pytest.mark.parametrize(
    ("has", "named", "is_made"),
    [
        (platform.python_version(), (f"PYTHON={sys.executable}",), False),
        ("3.11.0rc1", (f"PYTHON={sys.executable}",), True),
        ("3.11.0rc1", (), False),
    ],
    ids=["the same version", "another version", "no version named"],
)
def test_an_environment_is_made_again_only_for_another_version_that_was_named(
    clone: Path, has: str, named: tuple[str, ...], is_made: bool
) -> None:
    for stamp in (".boot/.installed", ".venv/pyvenv.cfg", ".venv/.runtime-installed", ".venv/.dev-installed"):
        (clone / stamp).parent.mkdir(exist_ok=True)
        (clone / stamp).write_text(f"version_info = {has}\n")
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS", "PYTHON", "VENV"))}
    command = ["make", "--dry-run", "setup", *named]
    planned = subprocess.run(command, cwd=clone, env=env, capture_output=True, text=True, timeout=60, check=True).stdout
    assert ("uv.py venv" in planned) == is_made, planned
