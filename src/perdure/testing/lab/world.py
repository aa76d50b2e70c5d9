"""The files that a trial leaves behind, to be compared with those of the undisturbed run.

Every trial works in a folder of its own. What differs from run to run for no other reason than that each has an id and keys of its own
counts as the same.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from perdure.testing.lab.contents import MOST_BYTES, SIDECARS, FileSeen, seen, seen_large

Aliases = Mapping[str, str]
__all__ = ["Aliases", "FileSeen", "files", "normal", "plain"]


def plain(text: str, known: Aliases) -> str:
    """The text with what is the run's own taken out."""
    for own, stands_for in known.items():
        text = text.replace(own, stands_for)
    return text


def files(folder: Path, known: Aliases) -> dict[str, FileSeen]:
    """Every regular file below the folder, by its path there; what SQLite keeps beside a database is part of it."""
    found: dict[str, FileSeen] = {}
    for root, _, names in os.walk(folder):
        for name in names:
            path = Path(root, name)
            if path.is_symlink() or not path.is_file():
                continue
            if path.stat().st_size > MOST_BYTES:
                found[plain(str(path.relative_to(folder)), known)] = seen_large(path)
                continue
            content = path.read_bytes()
            for own, stands_for in known.items():
                content = content.replace(own.encode(), stands_for.encode())
            found[plain(str(path.relative_to(folder)), known)] = seen(path, content, lambda text: plain(text, known))
    databases = {path for path, file in found.items() if file.unit == "rows"}
    beside = {f"{path}{suffix}" for path in databases for suffix in SIDECARS}
    return {path: file for path, file in found.items() if path not in beside}


def normal(value: Any, known: Aliases) -> Any:
    """A JSON value with what is the run's own taken out."""
    match value:
        case str():
            return plain(value, known)
        case list() | tuple():
            return [normal(one, known) for one in value]
        case dict():
            return {plain(str(key), known): normal(one, known) for key, one in value.items()}
        case _:
            return value
