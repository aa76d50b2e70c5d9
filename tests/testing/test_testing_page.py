"""docs/testing.md is a test file: a reader who pastes it has tests that pass."""

from __future__ import annotations

import pytest
from tests.docs.test_examples import ROOT, programs
from tests.testing.plugged import pytest_in


@pytest.mark.long
def test_the_tests_of_the_page_pass(tmp_path):
    [program] = programs((ROOT / "docs" / "testing.md").read_text())
    (tmp_path / "test_page.py").write_text(program)

    ran = pytest_in(tmp_path)

    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert f"{program.count('def test_')} passed" in ran.stdout
