"""Each dangerous line is removed in a copy of the sources, and the test that the registry names must fail."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec import structs
from tests.mutants.mutant import Mutant
from tests.mutants.nest import ROOT, Nest
from tests.mutants.registry import ALL, BY_NAME, KNOWN, SOURCE
from tests.mutants.table import table
from tests.mutants.workshop import SOURCES, Workshop, changed


@pytest.fixture(scope="session")
def nest() -> Iterator[Nest]:
    opened = Nest()
    yield opened
    opened.close()


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("mutants"))


# Without this guard a race between two reads goes wrong. On a busy machine the race does not happen in every run of the test.
_RACES = {"a_drive_ends_on_an_old_look": 3}  # name of the mutant: tries


@pytest.mark.parametrize("name", BY_NAME)
def test_the_named_test_goes_red_when(name: str, nest: Nest, workshop: Workshop, tmp_path: Path) -> None:
    mutant = BY_NAME[name]
    with workshop.with_mutant(mutant) as src:
        verdict = nest.run(src, [mutant.red], tmp_path / "log")
        for _ in range(_RACES.get(name, 1) - 1):
            if verdict.green:
                verdict = nest.run(src, [mutant.red], tmp_path / "log")
    assert verdict.is_red(mutant.says), f"{mutant.guard}: {verdict}\n{(tmp_path / 'log').read_text()[-4000:]}"


def test_without_a_mutant_the_copy_is_green(nest: Nest, workshop: Workshop, tmp_path: Path) -> None:
    """The unchanged copy, and a copy with a harmless change, must pass; otherwise the failures above would prove nothing."""
    test = "tests/unit/test_keys.py::test_a_key_is_the_same_for_ever"
    assert nest.run(workshop.src, [test], tmp_path / "log").green, (tmp_path / "log").read_text()
    named = next(mutant for mutant in SOURCE if mutant.file == "core/identity.py")
    harmless = structs.replace(named, new=f"        # looked at\n{named.old}")
    with workshop.with_mutant(harmless) as src:
        assert nest.run(src, [test], tmp_path / "log").green, (tmp_path / "log").read_text()


def test_what_is_not_a_red_test_is_not_taken_for_one(nest: Nest, workshop: Workshop, tmp_path: Path) -> None:
    """A file that cannot be imported, and a test that does not exist, prove nothing about a guard."""
    broken = Mutant(
        name="broken", guard="", promise="", file="core/identity.py", where="", old="import hashlib\n", new="import nothing\n", red=""
    )
    with workshop.with_mutant(broken) as src:
        verdict = nest.run(src, ["tests/unit/test_keys.py::test_a_key_is_the_same_for_ever"], tmp_path / "log")
    assert verdict.code not in (0, 1)
    assert not verdict.is_red("AssertionError")
    missing = nest.run(workshop.src, ["tests/unit/test_keys.py::test_that_nobody_has_written"], tmp_path / "log")
    assert not missing.green
    assert not missing.is_red("AssertionError")


def test_every_line_stands_where_the_registry_says() -> None:
    """The old text is in the file once, in the named function or statement. This finds moved lines quickly."""
    for mutant in SOURCE:
        text = (SOURCES / mutant.file).read_text("utf-8")
        changed(text, mutant)
        name = mutant.where.rpartition(".")[2]
        assert name in text[: text.index(mutant.old) + len(mutant.old)], f"{mutant.where} does not come before the line in {mutant.file}"


def test_names_are_unique_and_every_guard_has_a_promise() -> None:
    names = [mutant.name for mutant in SOURCE]
    assert len(set(names)) == len(names)
    assert len({(guard.name, guard.store) for guard in KNOWN}) == len(KNOWN)
    assert all(guard.guard and guard.promise and guard.red for guard in ALL)


def test_the_page_is_what_the_registry_says() -> None:
    """If it fails, generate the page again: python -m tests.mutants.table > docs/mutants.md"""
    assert (ROOT / "docs" / "mutants.md").read_text("utf-8") == table()
