"""The list of tested boundaries is true: every test in it exists, and runs on the stores that the list names."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest
from tests.crash.coverage import BOUNDARIES, FAULTS, Case

TESTS = Path(__file__).parents[1]
BOTH = frozenset(("sqlite", "postgres"))


@functools.cache
def found_in(file: str) -> dict[str, frozenset[str]]:
    """The tests of a file, each with its stores, read without importing anything."""
    module = ast.parse((TESTS / file).read_text())
    everywhere = {
        target.id: node.value
        for node in module.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    marks = [everywhere["pytestmark"]] if "pytestmark" in everywhere else []
    return {
        node.name: stores_of(file, [*marks, *node.decorator_list])
        for node in module.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    }


def stores_of(file: str, marks: list[ast.expr]) -> frozenset[str]:
    """In tests/crash both, unless a test says otherwise; elsewhere as the folder says."""
    said = "".join(ast.unparse(mark) for mark in marks)
    if not file.startswith("crash/"):
        return frozenset(("postgres",)) if file.startswith("postgres/") else frozenset(("sqlite",))
    return next((frozenset((store,)) for store in BOTH if f"parametrize('dialect', ['{store}']" in said), BOTH)


@pytest.mark.parametrize("case", [*BOUNDARIES, *FAULTS], ids=lambda case: case.name)
def test_every_test_that_is_named_exists_and_each_store_is_covered(case: Case) -> None:
    covered: set[str] = set()
    for test in case.tests:
        file, _, function = test.partition("::")
        assert function in found_in(file), f"{test} is not there (any more)"
        covered |= found_in(file)[function]
    assert covered >= ({case.only} if case.only else BOTH), f"{case.name}: only on {covered}"


def test_nothing_is_listed_twice() -> None:
    names = [case.name for case in (*BOUNDARIES, *FAULTS)]
    assert len(names) == len(set(names))


def test_a_test_that_is_gone_or_on_one_store_only_is_noticed() -> None:
    check = test_every_test_that_is_named_exists_and_each_store_is_covered
    with pytest.raises(AssertionError, match="is not there"):
        check(Case("gone", ("crash/test_disk.py::test_that_nobody_has_written",)))
    with pytest.raises(AssertionError, match="only on"):
        check(Case("half", (f"crash/test_disk.py::{next(iter(found_in('crash/test_disk.py')))}",)))
