"""pytest as a user with perdure installed runs it: a separate process that finds the plugin by its entry point."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import perdure

ROOT = Path(__file__).resolve().parents[2]


def entry_points() -> dict[str, str]:
    """What pyproject.toml announces to pytest."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    points: dict[str, str] = project["entry-points"]["pytest11"]
    return points


def installed(folder: Path) -> Path:
    """A folder for PYTHONPATH that announces perdure as its wheel does."""
    announced = folder / "site" / "perdure-0.0.dist-info"
    announced.mkdir(parents=True, exist_ok=True)
    (announced / "METADATA").write_text("Metadata-Version: 2.1\nName: perdure\nVersion: 0.0\n")
    lines = [f"{name} = {module}" for name, module in entry_points().items()]
    (announced / "entry_points.txt").write_text("\n".join(["[pytest11]", *lines, ""]))
    return announced.parent


def pytest_in(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run the tests in that folder, by an interpreter that has nothing imported; nothing of ours is configured there."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PERDURE_", "PYTEST_"))}
    env["PYTHONPATH"] = os.pathsep.join([str(installed(folder)), str(Path(perdure.__file__).parents[1])])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-W", "error", *options, str(folder)]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=100, check=False)
