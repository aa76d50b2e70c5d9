"""Numbered schema files with checksums, for the migrations of every dialect."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct

from perdure.errors import StoreCorrupt, StoreVersion


class Migration(Struct, frozen=True):
    version: int
    checksum: str
    sql: str


def load(dialect: str) -> tuple[Migration, ...]:
    """Every schema/NNNN_*.sql file of the dialect, in order. The numbers have no gap."""
    # Read the files by path. importlib.resources imports zipfile, tempfile and shutil, which slows down every start.
    files = sorted((Path(__file__).parent / dialect / "schema").glob("*.sql"))
    found = tuple(
        Migration(int(file.name.split("_")[0]), hashlib.sha256(file.read_bytes()).hexdigest(), file.read_text("utf-8")) for file in files
    )
    assert [migration.version for migration in found] == list(range(1, len(found) + 1)), [file.name for file in files]
    return found


def check_applied(known: Sequence[Migration], applied: Sequence[tuple[int, str]], where: str) -> int:
    """How many of the known versions were applied.

    Raises an error if the schema is newer than this perdure, or is not a schema that perdure releases.
    """
    if len(applied) > len(known):
        raise StoreVersion(
            f"has schema version {len(applied)}, this perdure knows {len(known)}: upgrade perdure, nothing was changed", where=where
        )
    for migration, (version, checksum) in zip(known, applied, strict=False):
        if (version, checksum) != (migration.version, migration.checksum):
            raise StoreCorrupt(
                f"is not usable: schema version {version} is not the one that perdure releases; it was made or changed by something else",
                where=where,
            )
    return len(applied)
