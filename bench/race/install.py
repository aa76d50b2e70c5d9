"""The peers' environments: one for each below .bench, made once, and anew when its requirements or the Python change."""

from __future__ import annotations

import hashlib
import os
import shlex
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
    """Create the environment of this contestant if needed, or raise NotInstalled."""
    if name == OURS:
        return  # perdure uses the environment of this process
    wanted = [one for one in (requirements / f"{name}.txt", requirements / f"{name}.npm.txt") if one.exists()]
    if not wanted:
        raise NotInstalled(f"there is no {requirements.name}/{name}.txt that says what it needs")
    environment = environments / name
    stamp = environment / ".installed"
    try:
        fingerprint = _fingerprint(wanted)
        if stamp.exists() and stamp.read_text() == fingerprint:
            return
        print(f"{name} -> {environment.relative_to(environments.parent)}", file=sys.stderr, flush=True)
        _make(environment, wanted, uv)
        stamp.write_text(fingerprint)
    except OSError as error:  # a full disk, a read-only folder
        raise NotInstalled(str(error)) from None


def _make(environment: Path, wanted: Sequence[Path], uv: Path) -> None:
    # Never into an existing environment: packages of another Python or of other requirements would be measured too.
    _run(
        _lines(wanted[0])[0],
        [sys.executable, str(uv), "venv", "--quiet", "--clear", "--no-project", "--python", sys.executable, str(environment)],
    )
    python = environment / "bin" / "python"
    for file in wanted:
        if file.name.endswith(".npm.txt"):
            _npm(environment, _lines(file))
        else:
            _run(_lines(file)[0], [sys.executable, str(uv), "pip", "install", "--quiet", "--python", str(python), "-r", str(file)])


def _npm(environment: Path, packages: Sequence[str]) -> None:
    npm = shutil.which("npm")
    if npm is None:
        raise NotInstalled(f"{packages[0]} needs npm, which is not on this machine: install Node.js")
    command = [npm, "install", "--no-audit", "--no-fund", "--loglevel", "error", "--prefix", str(environment), *packages]
    _run(packages[0], command)


def _run(package: str, command: Sequence[str]) -> None:
    """Run this, or raise with the package, the beginning of the error, and the command that shows the rest."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        raise NotInstalled(f"{package} was not installed after {_LIMIT_S:.0f} s; {_to_try(command)}") from None
    if done.returncode != 0:
        said = _first_words(done.stderr or done.stdout) or f"{Path(command[0]).name} ended with {done.returncode}"
        raise NotInstalled(f"{package} cannot be installed: {said}; {_to_try(command)}")


def _first_words(text: str) -> str:
    """The first line that is not empty, and the next one, in which installers print the cause."""
    lines = [stripped for line in text.splitlines() if (stripped := line.strip(" \t×╰─▶│"))]
    if not lines:
        return ""
    if lines[0].startswith("Traceback"):
        return lines[-1][:_REASON_CHARS]
    return " ".join(lines[:2])[:_REASON_CHARS]


def _to_try(command: Sequence[str]) -> str:
    """The command as a user types it at the root of the checkout, without the options that shorten its output."""
    spoken = [one for one in command if one != "--quiet"]
    return "to try: " + shlex.join(os.path.relpath(one, ROOT) if Path(one).is_relative_to(ROOT) else one for one in spoken)


def _lines(file: Path) -> list[str]:
    return [line.strip() for line in file.read_text().splitlines() if line.strip() and not line.startswith("#")]


def _fingerprint(files: Sequence[Path]) -> str:
    digest = hashlib.sha256(sys.version.encode())
    for file in files:
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()
