"""The store's logic names statements, and a dialect has them.

Each used name has a statement, and each statement is used.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from perdure.store.cursor import load, statements

STORE = Path(__file__).resolve().parents[2] / "src" / "perdure" / "store"
ASKING = frozenset(("all", "one", "change", "each", "read"))  # methods whose first argument is a name
DRIVERS = frozenset(("apsw", "psycopg"))


def asked(source: str) -> Iterator[str]:
    """Names that a part of the logic asks for."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ASKING and node.args:
            if isinstance(node.args[0], ast.Constant) and isinstance(node.args[0].value, str):
                yield node.args[0].value


def words(source: str) -> Iterator[str]:
    """Every text in it, also those that are handed on."""
    return (node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant) and isinstance(node.value, str))


def drivers(source: str) -> Iterator[str]:
    """Libraries of databases that it imports."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name.split(".")[0] in DRIVERS)
        elif isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] in DRIVERS:
            yield str(node.module)


@pytest.mark.parametrize("dialect", ["sqlite"])
def test_a_dialect_has_every_statement_that_is_asked_for_and_no_other(dialect: str) -> None:
    found = load(dialect).keys()
    shared = [file.read_text("utf-8") for file in STORE.glob("*.py")]
    own = [file.read_text("utf-8") for file in (STORE / dialect).glob("*.py")]
    wanted = {name for source in shared for name in asked(source)}
    assert wanted - found == set()
    assert len(wanted) > 70
    assert found - {word for source in (*shared, *own) for word in words(source)} == set()


def test_the_logic_knows_no_driver() -> None:
    assert {file.name: found for file in STORE.glob("*.py") if (found := list(drivers(file.read_text("utf-8"))))} == {}


def test_what_is_looked_for_would_be_found() -> None:
    assert list(asked('cursor.one("line", kind)\nself._database.read("rate", (key,))\nnames.all(x)')) == ["line", "rate"]
    assert list(drivers("import apsw\nfrom psycopg.rows import x\nimport msgspec")) == ["apsw", "psycopg.rows"]


def test_two_statements_of_one_name_are_refused() -> None:
    with pytest.raises(AssertionError, match="two statements named one"):
        statements("\n-- name: one\nSELECT 1\n-- name: one\nSELECT 2\n")
    with pytest.raises(AssertionError, match="no statement under the name one"):
        statements("\n-- name: one\n-- nothing\n")
