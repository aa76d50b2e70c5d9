"""A copy of the sources in which one text at a time is replaced, and restored."""

from __future__ import annotations

import compileall
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.mutants.mutant import Mutant
from tests.mutants.nest import ROOT

SOURCES = ROOT / "src" / "perdure"


def changed(text: str, mutant: Mutant) -> str:
    """The file's text with the mutant in it. It is an error if the old text is not there, or is there twice."""
    assert mutant.old != mutant.new, mutant.name
    count = text.count(mutant.old)
    assert count == 1, f"{mutant.name}: {mutant.file} holds the text to be replaced {count} times, not once: {mutant.old!r}"
    return text.replace(mutant.old, mutant.new)


class Workshop:
    """The copy of the sources. It is compiled once, so each mutant compiles only one file."""

    def __init__(self, folder: Path) -> None:
        self.src = folder / "src"
        shutil.copytree(SOURCES, self.src / "perdure", copy_function=shutil.copy2)
        compileall.compile_dir(self.src, quiet=2)

    @contextmanager
    def with_mutant(self, mutant: Mutant) -> Iterator[Path]:
        """Apply the mutant; yields the folder to put first on the import path."""
        file = self.src / "perdure" / mutant.file
        before, times = file.read_bytes(), file.stat()
        # Remove the .pyc files: Python would use them if the changed file had the same time and size.
        kept = [(one, one.read_bytes()) for one in _compiled(file)]
        _forget(file)
        file.write_text(changed(before.decode(), mutant), "utf-8")
        try:
            yield self.src
        finally:
            _forget(file)
            file.write_bytes(before)
            os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
            for one, data in kept:
                one.write_bytes(data)


def _compiled(file: Path) -> list[Path]:
    """The .pyc files of Python and of pytest."""
    return list((file.parent / "__pycache__").glob(f"{file.stem}.*.pyc"))


def _forget(file: Path) -> None:
    for one in _compiled(file):
        one.unlink()
