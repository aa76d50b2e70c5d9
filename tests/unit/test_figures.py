"""Figures of a test run: added up over processes and printed. A whole suite with too small figures fails."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = """
import pytest
from tests import figures

figures.FLOORS = {"not soak": {"real kills": 4}, "not full and not soak": {"real kills": 2}}

def pytest_configure(config):
    config.pluginmanager.register(figures.Figures(config), "figures")

@pytest.fixture(autouse=True)
def _kill():
    figures.seen(figures.KILLS)
"""
TESTS = "import pytest\n\n@pytest.mark.parametrize('n', range({}))\ndef test_one(n): pass\n"


def run(folder: Path, tests: int, *options: str) -> tuple[int, str]:
    (folder / "suite").mkdir()
    (folder / "pytest.ini").write_text("[pytest]\ntestpaths = suite\naddopts = -m 'not soak'\nmarkers =\n  soak\n  full\n")
    (folder / "suite" / "conftest.py").write_text(CONFTEST)
    (folder / "suite" / "test_these.py").write_text(TESTS.format(tests))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "--import-mode=importlib", "-p", "xdist", "-p", "no:cacheprovider", *options]
    ended = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=60)
    return ended.returncode, ended.stdout + ended.stderr


@pytest.mark.full
@pytest.mark.parametrize(
    ("tests", "options", "code", "words"),
    [
        (4, ("-n", "2"), 0, "tried: 4 real kills"),
        (3, ("-n", "2"), 1, "tried: 3 real kills\nFAILED: a whole run is to come to at least 4 real kills"),
        (3, (), 1, "tried: 3 real kills\nFAILED"),
        (3, ("-m", "not full and not soak"), 0, "tried: 3 real kills"),
        (1, ("-m", "not full and not soak"), 1, "tried: 1 real kills\nFAILED: a whole run is to come to at least 2 real kills"),
        (3, ("-k", "one"), 0, "tried: 3 real kills"),
        (3, ("suite/test_these.py",), 0, "tried: 3 real kills"),
    ],
)
def test_a_whole_suite_with_too_few_fails_and_a_part_of_one_does_not(
    tmp_path: Path, tests: int, options: tuple[str, ...], code: int, words: str
) -> None:
    found, said = run(tmp_path, tests, *options)
    assert (found, words in said, "FAILED" in said) == (code, True, code == 1), said
