"""The two sets of tests: `make test` runs the quick set, `make test-full` runs the rest.

Only the soak tests are in neither.

A test is in the full set if one of these is true:

- its folder is in FULL_FOLDERS, and it is not a test that tests/crash/coverage.py names as `quick`;
- it has `@pytest.mark.full`, or its file has that mark as `pytestmark`: it takes seconds, or removes a guard.

conftest.py calls mark() for all collected tests. `pytest FILE` runs both kinds, so that a developer who changes a file
sees all its tests.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
from tests.crash.coverage import BOUNDARIES, FAULTS

# The `-m` option of each set; figures.py recognises a whole run by it.
QUICK = "not full and not soak"
FULL = "full and not soak"
BOTH = "not soak"

# Real processes, real servers, every combination. The other folders (unit, core, conformance, docs) are quick.
FULL_FOLDERS = frozenset("bench check crash e2e golden lab mcp models mutants postgres power servers sim testing".split())
ONE_OF_EACH_KIND = frozenset(case.quick_test for case in (*BOUNDARIES, *FAULTS))
_TESTS = Path(__file__).parent


def mark(items: Iterable[pytest.Item]) -> None:
    """Give the marker `full` to every test of the full set that does not carry it yet."""
    for item in items:
        folder = item.path.relative_to(_TESTS).parts[0]
        if folder in FULL_FOLDERS and item.nodeid.removeprefix("tests/") not in ONE_OF_EACH_KIND:
            item.add_marker(pytest.mark.full)
