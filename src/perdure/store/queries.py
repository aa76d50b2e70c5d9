"""The statements of queries.sql by name. Loaded once; a name that does not exist fails at import, not in production."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from types import MappingProxyType

_MARK = "-- name: "


def load(text: str) -> Mapping[str, str]:
    """Statement by name; the comment lines around a statement stay in the file."""
    found: dict[str, str] = {}
    for part in text.split(f"\n{_MARK}")[1:]:
        name, *lines = part.splitlines()
        assert name not in found, f"queries.sql has two statements named {name}"
        found[name] = "\n".join(line for line in lines if line and not line.startswith("--"))
        assert found[name], f"queries.sql has no statement under the name {name}"
    return MappingProxyType(found)


QUERIES = load(resources.files("perdure.store").joinpath("queries.sql").read_text("utf-8"))
