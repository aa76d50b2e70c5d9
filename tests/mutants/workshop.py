"""A copy of the sources in which one text at a time is replaced, and put back."""

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
    """The file's text as the mutant has it; a line that has moved on, or that stands there twice, is an error."""
    assert mutant.old != mutant.new, mutant.name
    count = text.count(mutant.old)
    assert count == 1, f"{mutant.name}: {mutant.file} holds the text to be replaced {count} times, not once: {mutant.old!r}"
    return text.replace(mutant.old, mutant.new)


class Workshop:
    """The copy. Compiled once: a mutant costs the compilation of one file."""

    def __init__(self, folder: Path) -> None:
        self.src = folder / "src"
        shutil.copytree(SOURCES, self.src / "perdure", copy_function=shutil.copy2)
        compileall.compile_dir(self.src, quiet=2)

    @contextmanager
    def with_mutant(self, mutant: Mutant) -> Iterator[Path]:
        """The folder to be put first on the path, while it holds the mutant."""
        file = self.src / "perdure" / mutant.file
        before, times = file.read_bytes(), file.stat()
        # Without its compiled forms, which would be taken for up to date if the file's new time and size were the old ones.
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
    """What Python has made of it, and what pytest has."""
    return list((file.parent / "__pycache__").glob(f"{file.stem}.*.pyc"))


def _forget(file: Path) -> None:
    for one in _compiled(file):
        one.unlink()
