"""The count of real kills: added up over processes, told, and a whole suite without enough of them fails."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = """
import pytest
from tests.crash import kills

kills.MINIMUM = 4

def pytest_configure(config):
    config.pluginmanager.register(kills.KillCount(config), "real kills")

@pytest.fixture(autouse=True)
def _kill():
    kills.seen()
"""
TESTS = "import pytest\n\n@pytest.mark.parametrize('n', range({}))\ndef test_one(n): pass\n"


def run(folder: Path, tests: int, *options: str) -> tuple[int, str]:
    (folder / "suite").mkdir()
    (folder / "pytest.ini").write_text("[pytest]\ntestpaths = suite\naddopts = -m 'not soak'\nmarkers = soak\n")
    (folder / "suite" / "conftest.py").write_text(CONFTEST)
    (folder / "suite" / "test_these.py").write_text(TESTS.format(tests))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "--import-mode=importlib", "-p", "xdist", "-p", "no:cacheprovider", *options]
    ended = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=60)
    return ended.returncode, ended.stdout + ended.stderr


@pytest.mark.parametrize(
    ("tests", "options", "code", "words"),
    [
        (4, ("-n", "2"), 0, "real kills: 4"),
        (3, ("-n", "2"), 1, "real kills: 3\nFAILED: the whole suite is to kill at least 4 processes"),
        (3, (), 1, "real kills: 3\nFAILED"),
        (3, ("-k", "one"), 0, "real kills: 3"),
        (3, ("suite/test_these.py",), 0, "real kills: 3"),
    ],
)
def test_a_whole_suite_with_too_few_kills_fails_and_a_part_of_one_does_not(
    tmp_path: Path, tests: int, options: tuple[str, ...], code: int, words: str
) -> None:
    found, said = run(tmp_path, tests, *options)
    assert (found, words in said, "FAILED" in said) == (code, True, code == 1), said
