"""What a mutant is: perdure with one dangerous line changed, and the test that must notice."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

Store = Literal["none", "sqlite", "postgres", "both"]


class Mutant(Struct, frozen=True, kw_only=True):
    """One dangerous line: in `file` below src/perdure the text `old`, which stands there exactly once, becomes `new`."""

    name: str
    guard: str  # what the line is for, in words
    promise: str  # which of our promises (G…) or known traps (T…) it keeps
    file: str
    where: str  # the function or the statement that holds the line
    old: str
    new: str
    red: str  # the test that goes red
    store: Store = "none"  # on which store that test takes place
    says: str = "AssertionError"  # what the test fails with: an assertion, or the error of ours that the mutant leads to


class Known(Struct, frozen=True, kw_only=True):
    """A guard that another file of tests takes away in the running process, listed here so that one table shows them all."""

    name: str
    guard: str
    promise: str
    where: str
    removed_in: str  # the file that holds the mutation
    red: str  # the test, or the check inside it, that goes red
    store: Store
