"""The files that a trial leaves behind. They are compared with the files of the undisturbed runs.

Every trial works in its own folder. Each run has its own id and its own keys. If two files differ only in these ids
and keys, the files count as equal.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from perdure.testing.lab.contents import MOST_BYTES, SIDECARS, FileSeen, seen, seen_large
from perdure.tool.artifact import SCHEME

Aliases = Mapping[str, str]
_ARTIFACT = re.compile(re.escape(SCHEME) + r"[0-9a-f]{32}")
__all__ = ["Aliases", "FileSeen", "files", "normal", "plain"]


def plain(text: str, known: Aliases) -> str:
    """The text, with the ids and keys of the run replaced by their aliases.

    The URIs of artifacts are random, so they are replaced too. The hash in an artifact's pointer is still compared.
    """
    for own, stands_for in known.items():
        text = text.replace(own, stands_for)
    return _ARTIFACT.sub("<artifact>", text) if SCHEME in text else text


def files(folder: Path, known: Aliases) -> dict[str, FileSeen]:
    """Every regular file below the folder, by its path. The sidecar files of a SQLite database are not listed."""
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
    """A JSON value, with the ids and keys of the run replaced by their aliases."""
    match value:
        case str():
            return plain(value, known)
        case list() | tuple():
            return [normal(one, known) for one in value]
        case dict():
            return {plain(str(key), known): normal(one, known) for key, one in value.items()}
        case _:
            return value
