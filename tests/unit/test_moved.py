"""Modules that have moved can be imported under their old names, with a warning that has the new name."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from perdure.moved import MOVED

ROOT = Path(__file__).resolve().parents[2]


def python(program: str, *flags: str) -> subprocess.CompletedProcess[str]:
    """In a fresh interpreter: a module is executed once in each."""
    environment = {"PYTHONPATH": str(ROOT / "src")}
    return subprocess.run([sys.executable, *flags, "-c", program], env=environment, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("statement", "name", "new", "instead"),
    [
        ("from perdure.react import ReAct", "ReAct", "perdure.agents.react.agent", "from perdure import ReAct"),
        ("from perdure.plan import Plan", "Plan", "perdure.agents.plan", "from perdure import Plan, Step, param, ref"),
        ("from perdure.integrations.mcp import mcp", "mcp", "perdure.agents.mcp.tools", "from perdure import mcp"),
    ],
)
def test_an_old_import_works_and_its_warning_names_the_new_place(statement, name, new, instead):
    ran = python(f"{statement}\nimport perdure\nassert {name} is perdure.{name}", "-W", "always::DeprecationWarning")
    assert ran.returncode == 0, ran.stderr
    assert f"is called {new} since 0.2; 0.3 removes the old name: {instead}" in ran.stderr
    assert "<string>:1: DeprecationWarning" in ran.stderr  # the line of the user, and none of importlib's


def test_the_package_of_integrations_can_be_imported():
    ran = python("import perdure.integrations, perdure.integrations.mcp\nassert perdure.integrations.mcp.mcp is perdure.mcp")
    assert ran.returncode == 0, ran.stderr


def test_a_warning_that_is_an_error_stops_the_import():
    ran = python("import perdure.react", "-W", "error::DeprecationWarning")
    assert ran.returncode == 1
    assert "DeprecationWarning: perdure.react is called perdure.agents.react.agent since 0.2" in ran.stderr


def test_new_imports_warn_of_nothing():
    ran = python("import perdure\nperdure.Plan, perdure.ReAct, perdure.mcp", "-W", "error")
    assert (ran.returncode, ran.stderr) == (0, "")


def test_import_perdure_loads_nothing_that_has_moved():
    ran = python(f"import perdure, sys\nassert not {set(MOVED) | {new for new, _ in MOVED.values()}!r} & set(sys.modules)")
    assert ran.returncode == 0, ran.stderr


def test_only_the_names_of_the_list_are_found():
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("perdure.nothing")
    ran = python("import perdure.plan.refs")
    assert "ModuleNotFoundError" in ran.stderr


def test_every_new_place_exists_and_no_old_one_does():
    for old, (new, _) in MOVED.items():
        assert importlib.util.find_spec(new) is not None
        path = ROOT / "src" / Path(*old.split("."))
        assert not path.with_suffix(".py").exists()
        assert not (path / "__init__.py").exists()
