"""The records of the registry: a mutant is perdure with one dangerous line changed, and the test that must fail."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

Store = Literal["none", "sqlite", "postgres", "both"]


class Mutant(Struct, frozen=True, kw_only=True):
    """One dangerous line: in `file` below src/perdure the text `old`, which must occur there exactly once, becomes `new`."""

    name: str
    guard: str  # what the line guarantees, in words
    promise: str  # the promise (G…) that it keeps, or the known trap (T…) that it avoids; docs/mutants.md lists them
    file: str
    where: str  # the function or the statement that holds the line
    old: str
    new: str
    red: str  # the test that must fail
    store: Store = "none"  # the store that this test uses
    says: str = "AssertionError"  # the exception with which the test fails: an assertion, or an error of perdure that the mutant causes


class Known(Struct, frozen=True, kw_only=True):
    """A guard that another test file removes in the running process; listed here so that one table has all guards."""

    name: str
    guard: str
    promise: str
    where: str
    removed_in: str  # the file that holds the mutation
    red: str  # the test, or the check inside it, that must fail
    store: Store
