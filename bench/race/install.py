"""The peers' environments: one for each below .bench, installed once and again when its requirements change."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.race.lanes import ENVIRONMENTS, OURS, RACE, ROOT

_LIMIT_S = 900.0
_REASON_CHARS = 300


class NotInstalled(Exception):
    """Why a peer cannot take part."""


def install(
    name: str, requirements: Path = RACE / "requirements", environments: Path = ENVIRONMENTS, uv: Path = ROOT / ".ci" / "uv.py"
) -> None:
    """Have the environment of this contestant be there, or raise NotInstalled. The second time costs nothing."""
    if name == OURS:
        return  # it is the one that this runs in
    wanted = [one for one in (requirements / f"{name}.txt", requirements / f"{name}.npm.txt") if one.exists()]
    if not wanted:
        raise NotInstalled(f"there is no {requirements.name}/{name}.txt that says what it needs")
    environment = environments / name
    stamp, fingerprint = environment / ".installed", _fingerprint(wanted)
    if stamp.exists() and stamp.read_text() == fingerprint:
        return
    print(f"{name} -> {environment.relative_to(environments.parent)}", file=sys.stderr, flush=True)
    _make(environment, wanted, uv)
    stamp.write_text(fingerprint)


def _make(environment: Path, wanted: Sequence[Path], uv: Path) -> None:
    python = environment / "bin" / "python"
    if not python.exists():
        _run([sys.executable, str(uv), "venv", "--quiet", "--clear", "--no-project", "--python", sys.executable, str(environment)])
    for file in wanted:
        if file.name.endswith(".npm.txt"):
            _npm(environment, _lines(file))
        else:
            _run([sys.executable, str(uv), "pip", "install", "--quiet", "--python", str(python), "-r", str(file)])


def _npm(environment: Path, packages: Sequence[str]) -> None:
    npm = shutil.which("npm")
    if npm is None:
        raise NotInstalled("it needs npm, which is not on this machine: install Node.js")
    _run([npm, "install", "--no-audit", "--no-fund", "--loglevel", "error", "--prefix", str(environment), *packages])


def _run(command: Sequence[str]) -> None:
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        raise NotInstalled(f"{Path(command[0]).name} was not done after {_LIMIT_S:.0f} s") from None
    if done.returncode != 0:
        said = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        raise NotInstalled(" ".join(said[-3:])[-_REASON_CHARS:] or f"{Path(command[0]).name} ended with {done.returncode}")


def _lines(file: Path) -> list[str]:
    return [line.strip() for line in file.read_text().splitlines() if line.strip() and not line.startswith("#")]


def _fingerprint(files: Sequence[Path]) -> str:
    digest = hashlib.sha256(sys.version.encode())
    for file in files:
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()
